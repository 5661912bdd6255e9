from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trtdet.backends import OnnxRunner
from trtdet.config import NmsConfig, load_config
from trtdet.data import CocoDataset, ImageStream
from trtdet.detection import suppression
from trtdet.detection.heads import decode
from trtdet.detection.suppression import Detections, non_max_suppression
from trtdet.errors import ModelError
from trtdet.evaluation.metrics import CocoMetric, CocoResult
from trtdet.passes import load_model

# Suppression


def plain_nms(boxes: np.ndarray, scores: np.ndarray, config: NmsConfig) -> list[tuple[int, int]]:
    """One image by the words of the contract, a candidate at a time."""
    candidates = []
    for n in range(len(boxes)):
        if config.candidates == "best-class":
            values = [-np.inf if np.isnan(v) else v for v in scores[n]]
            chosen = [int(np.argmax(values))] if values else []
        else:
            chosen = list(range(scores.shape[1]))
        candidates += [(n, c) for c in chosen if scores[n, c] > np.float32(config.score_threshold)]
    candidates = sorted(candidates, key=lambda item: -scores[item])[: config.pre_nms_topk]
    kept: list[tuple[int, int]] = []
    for n, c in candidates:
        rivals = [m for m, d in kept if config.class_agnostic or c == d]
        if not any(plain_iou(boxes[m], boxes[n]) > np.float32(config.iou_threshold) for m in rivals):
            kept.append((n, c))
    return kept[: config.max_detections]


def plain_iou(a: np.ndarray, b: np.ndarray) -> np.float32:
    zero = np.float32(0)
    inter = max(min(a[2], b[2]) - max(a[0], b[0]), zero) * max(min(a[3], b[3]) - max(a[1], b[1]), zero)
    areas = [max(box[2] - box[0], zero) * max(box[3] - box[1], zero) for box in (a, b)]
    union = areas[0] + areas[1] - inter
    return inter / union if union > 0 else zero


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    count=st.integers(0, 300),
    classes=st.integers(1, 4),
    spread=st.sampled_from([4, 12, 60]),
    levels=st.sampled_from([4, 50, 10**6]),
    nan=st.booleans(),
    options=st.fixed_dictionaries(
        {
            "score_threshold": st.sampled_from([0.0, 0.25, 0.5]),
            "iou_threshold": st.sampled_from([0.25, 0.5, 0.65, 1.0]),
            "max_detections": st.sampled_from([1, 7, 100]),
            "pre_nms_topk": st.sampled_from([100, 150, 3000]),
            "class_agnostic": st.booleans(),
            "candidates": st.sampled_from(["all-classes", "best-class"]),
        }
    ),
)
def test_against_plain_greedy(seed, count, classes, spread, levels, nan, options):
    # Few whole coordinates and few score levels make ties, duplicates and empty boxes common.
    rng = np.random.default_rng(seed)
    corner = rng.integers(0, spread, (count, 2))
    boxes = np.concatenate([corner, corner + rng.integers(0, 9, (count, 2))], axis=1).astype(np.float32)
    scores = (rng.integers(0, levels + 1, (count, classes)) / levels).astype(np.float32)
    if nan and count:
        scores[rng.integers(0, count, count // 5 + 1), rng.integers(0, classes)] = np.nan
    config = NmsConfig(**options)
    expected = plain_nms(boxes, scores, config)
    found = non_max_suppression(boxes[None], scores[None], config)
    got_boxes, got_scores, got_classes = found.image(0)
    assert len(got_boxes) == len(expected)
    np.testing.assert_array_equal(got_classes, [c for _, c in expected])
    np.testing.assert_array_equal(got_scores, [scores[item] for item in expected])
    np.testing.assert_array_equal(got_boxes, boxes[[n for n, _ in expected]].reshape(-1, 4))


def test_result_is_padded_with_zeros_and_each_image_is_its_own():
    boxes = np.array([[[0, 0, 10, 10], [50, 50, 60, 60]], [[0, 0, 10, 10], [0, 0, 10, 10]]], np.float32)
    scores = np.array([[[0.5], [0.9]], [[0.4], [0.8]]], np.float32)
    found = non_max_suppression(boxes, scores, NmsConfig(max_detections=5))
    assert isinstance(found, Detections) and len(found) == 2
    dtypes = [array.dtype for array in (found.num_dets, found.boxes, found.scores, found.classes)]
    assert (dtypes, found.num_dets.tolist()) == ([np.int32, np.float32, np.float32, np.int32], [[2], [1]])
    assert found.boxes.shape == (2, 5, 4) and found.scores.shape == found.classes.shape == (2, 5)
    np.testing.assert_array_equal(found.scores, np.array([[0.9, 0.5, 0, 0, 0], [0.8, 0, 0, 0, 0]], np.float32))
    assert not found.boxes[1, 1:].any()
    assert [len(part) for part in found.image(1)] == [1, 1, 1]


@pytest.mark.parametrize("shape", [(0, 3), (4, 3), (4, 1)])
@pytest.mark.parametrize("candidates", ["all-classes", "best-class"])
def test_no_boxes_and_none_over_the_threshold(shape, candidates):
    config = NmsConfig.model_validate({"candidates": candidates, "score_threshold": 0.5})
    scores = np.full((2, *shape), 0.5, np.float32)  # at the threshold is not over it
    found = non_max_suppression(np.zeros((2, shape[0], 4)), scores, config)
    assert found.num_dets.tolist() == [[0], [0]] and found.boxes.shape == (2, 300, 4)


def test_with_an_iou_threshold_of_one_nothing_is_suppressed():
    rng = np.random.default_rng(3)
    boxes = np.repeat(rng.uniform(0, 1e3, (1, 1, 4)).astype(np.float32), 5, axis=1)
    boxes[0, 3:] = boxes[0, :1] * np.float32(1 + 1e-7)  # overlaps that round to 1
    scores = np.array([[[0.5], [0.9], [0.7], [0.8], [0.6]]], np.float32)
    found = non_max_suppression(boxes, scores, NmsConfig(iou_threshold=1.0, max_detections=4, pre_nms_topk=4))
    assert found.scores.tolist() == [[np.float32(score) for score in (0.9, 0.8, 0.7, 0.6)]]
    assert found.num_dets.tolist() == [[4]]


def test_an_overlap_of_exactly_the_threshold_does_not_suppress():
    boxes, scores = np.float32([[[0, 0, 2, 1], [0, 0, 1, 1]]]), np.float32([[[0.9], [0.8]]])
    for threshold, kept in ((0.5, 2), (0.49, 1)):
        assert non_max_suppression(boxes, scores, NmsConfig(iou_threshold=threshold)).num_dets[0, 0] == kept


def test_best_class_ties_go_to_the_lowest_index_and_nan_never_passes():
    boxes = np.array([[[0, 0, 9, 9], [20, 0, 29, 9], [40, 0, 49, 9]]], np.float32)
    scores = np.array([[[0.2, 0.7, 0.7], [np.nan, 0.3, 0.4], [np.nan, np.nan, np.nan]]], np.float32)
    _, found, classes = non_max_suppression(boxes, scores, NmsConfig(candidates="best-class")).image(0)
    assert classes.tolist() == [1, 2] and found.tolist() == pytest.approx([0.7, 0.4])
    assert not np.isnan(non_max_suppression(boxes, scores, NmsConfig()).image(0)[1]).any()


@pytest.mark.filterwarnings("error")
def test_boxes_that_are_not_finite_suppress_nothing_and_stay_quiet():
    inf = np.inf
    boxes = np.array([[[-inf, -inf, inf, inf]] * 2 + [[np.nan] * 4, [0, 0, 5, 5], [9, 9, 1, 1]]], np.float32)
    found = non_max_suppression(boxes, np.full((1, 5, 1), 0.5, np.float32), NmsConfig())
    assert found.num_dets[0, 0] == 5


@pytest.mark.parametrize("shapes", [((1, 5, 4), (1, 6, 2)), ((5, 4), (5, 2)), ((1, 5, 5), (1, 5, 2))])
def test_shapes_that_do_not_fit(shapes):
    with pytest.raises(ModelError, match=r"expected \(B, N, 4\) and \(B, N, C\)"):
        non_max_suppression(np.zeros(shapes[0]), np.zeros(shapes[1]), NmsConfig())


@pytest.mark.parametrize(("spread", "most"), [(60, 1), (250, 1), (2000, 0.25)])
def test_three_thousand_candidates_take_bounded_work(monkeypatch, spread, most):
    """Pairs whose overlap is computed: those of kept with others and those within a block, not nine million."""
    rng = np.random.default_rng(0)
    corner = rng.uniform(0, spread, (1, 3000, 2))
    boxes = np.concatenate([corner, corner + rng.uniform(40, 60, corner.shape)], axis=2).astype(np.float32)
    scores = rng.uniform(0.01, 1, (1, 3000, 1)).astype(np.float32)
    pairs: list[int] = []
    overlaps = suppression._overlaps

    def counted(*args: Any) -> Any:
        pairs.append(len(args[-2]) * len(args[-1]))
        return overlaps(*args)

    monkeypatch.setattr(suppression, "_overlaps", counted)
    config = NmsConfig(max_detections=300)
    assert non_max_suppression(boxes, scores, config).num_dets[0, 0] > 0
    block = suppression._BLOCK
    assert max(pairs) <= block * max(block, config.max_detections), "memory is bounded too"
    assert sum(pairs) <= most * (3000 + block) * (config.max_detections + block)


# Trained models

MODELS = {"yolox": "yolox_nano.onnx", "yolov5": "yolov5n.onnx", "dfl": "picodet_s.onnx"}


def score(data: Path, name: str, count: int) -> dict[str, CocoResult]:
    """Both conventions of one model in FP32, from one run of it."""
    config = load_config(name)
    root = data / "coco"
    dataset = CocoDataset.load(root / "annotations/instances_val2017.json", root / "val2017", config.classes)
    runner = OnnxRunner(load_model(data / "models" / MODELS[name]))
    metrics = {"all-classes": CocoMetric(dataset), "best-class": CocoMetric(dataset)}
    for batch in ImageStream([image.path for image in dataset.images][:count], config.input):
        boxes, scores = decode(runner(batch.images), config)
        for candidates, metric in metrics.items():
            found = non_max_suppression(boxes, scores, config.with_nms(candidates=candidates).nms)
            places, values, classes = found.image(0)
            image = dataset.images[batch.indices[0]]
            metric.update(image.id, batch.transforms[0].to_image(places), values, classes)
    return {candidates: metric.compute() for candidates, metric in metrics.items()}


@pytest.mark.parametrize(
    ("name", "all_classes", "best_class"),
    [("yolox", 0.31297, 0.31063), ("yolov5", 0.33252, 0.32295), ("dfl", 0.39280, 0.37977)],
)
def test_fp32_map_of_24_images(shared_data, name, all_classes, best_class):
    results = score(shared_data, name, 24)
    assert results["all-classes"].map == pytest.approx(all_classes, abs=1e-3)
    assert results["best-class"].map == pytest.approx(best_class, abs=1e-3)
