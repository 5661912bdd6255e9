import itertools
import json
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import nets
import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper

from trtdet.backends import OnnxRunner
from trtdet.config import Config, NmsConfig, NmsMode
from trtdet.detection.plugin_nms import EfficientNms, efficient_nms
from trtdet.detection.suppression import Detections, non_max_suppression, score_bound, sigmoid
from trtdet.errors import ConfigError
from trtdet.passes import Options, nms
from trtdet.passes.base import PassResult
from trtdet.passes.model import to_graph, to_model


def configuration(classes: int, *, logits: bool = False, **keys: Any) -> Config:
    return nets.configuration("boxes", (64, 64), classes, nms=keys, scores="logits" if logits else "probabilities")


def decoded_model(batch: int | str, count: int, classes: int) -> onnx.ModelProto:
    """What the decode pass leaves, with boxes and scores given by the test."""
    values = f"float[{batch},{count},4] in_boxes, float[{batch},{count},{classes}] in_scores"
    body = "boxes = Add(in_boxes, zero) scores = Add(in_scores, zero)"
    return nets.net(f"({values}) => ({values.replace('in_', '')}) {{ {body} }}", zero=np.float32(0))


def suppressing(
    where: NmsMode, batch: int | str, count: int, config: Config, max_topk: int | None = None
) -> onnx.ModelProto:
    graph = to_graph(decoded_model(batch, count, len(config.classes)))
    assert nms.apply(graph, Options(config, where, max_topk=max_topk)) == PassResult(1)
    return to_model(graph)


def execute(model: onnx.ModelProto | OnnxRunner, boxes: np.ndarray, scores: np.ndarray) -> Detections:
    runner = model if isinstance(model, OnnxRunner) else OnnxRunner(model, alone=True)
    found = runner.feed({"in_boxes": boxes.astype(np.float32), "in_scores": scores.astype(np.float32)})
    return Detections(*(found[name] for name in ("num_dets", "boxes", "scores", "classes")))


@lru_cache(maxsize=512)
def runner(where: NmsMode, count: int, config: Config) -> OnnxRunner:
    return OnnxRunner(suppressing(where, "N", count, config), alone=True)


def assert_same(got: Detections, expected: Detections, logits: bool = False) -> None:
    """All that the contract defines; scores to the last bit but where a sigmoid was taken of them."""
    assert got.boxes.shape == expected.boxes.shape
    assert (got.num_dets.dtype, got.classes.dtype, got.boxes.dtype) == (np.int32, np.int32, np.float32)
    np.testing.assert_array_equal(got.num_dets, expected.num_dets)
    for index in range(len(expected)):
        (boxes, scores, classes), wanted = got.image(index), expected.image(index)
        np.testing.assert_array_equal(boxes, wanted[0])
        np.testing.assert_allclose(scores, wanted[1], rtol=0, atol=2e-7 if logits else 0)
        np.testing.assert_array_equal(classes, wanted[2])


@pytest.mark.parametrize("logits", [False, True])
@pytest.mark.parametrize("where", ["native", "onnx", "efficient"])
def test_without_suppression_the_best_candidates_leave_as_they_are(where, logits):
    rng = np.random.default_rng(5)
    config = configuration(3, logits=logits, iou_threshold=1, max_detections=20, score_threshold=0.3)
    boxes = np.repeat(rng.uniform(0, 30, (2, 10, 4)), 4, axis=1)  # each four times: every box has its doubles
    scores = rng.normal(0, 2, (2, 40, 3)) if logits else rng.uniform(0, 1, (2, 40, 3))
    model = suppressing(where, 2, 40, config)
    got = execute(model, boxes, scores)
    expected = non_max_suppression(boxes, scores, config.nms, logits=logits)
    assert_same(got, expected, logits)
    flat = np.sort(scores.astype(np.float32).reshape(2, -1), axis=1)[:, ::-1][:, :20]
    np.testing.assert_allclose(expected.scores, sigmoid(flat) if logits else flat, rtol=1e-6)
    if where != "efficient":
        operators = {node.op_type for node in model.graph.node}
        assert not operators & {"Loop", "NonMaxSuppression", "MatMul"}


def test_without_suppression_no_more_candidates_are_sorted_than_leave():
    config = configuration(3, iou_threshold=1, max_detections=20)
    suppressing("native", 1, 8400, config, max_topk=20)
    with pytest.raises(ConfigError, match="TopK takes at most 20"):
        suppressing("native", 1, 8400, configuration(3, max_detections=20), max_topk=20)


def check(boxes: np.ndarray, scores: np.ndarray, config: Config) -> Detections:
    """Every way to suppress in the graph gives what the reference gives."""
    boxes, scores, logits = boxes.astype(np.float32), scores.astype(np.float32), config.suppresses_logits
    expected = non_max_suppression(boxes, scores, config.nms, logits=logits)
    for where in ("native", "onnx"):
        assert_same(execute(runner(where, boxes.shape[1], config), boxes, scores), expected, logits)
    return expected


def clustered(rng: np.random.Generator, batch: int, count: int, classes: int, ties: bool) -> tuple[Any, Any]:
    """Boxes in a few heaps, some without area, with scores on a coarse grid where ties are wanted."""
    centres = rng.uniform(0, 100, (batch, 3, 2))
    chosen = centres[np.arange(batch)[:, None], rng.integers(0, 3, (batch, count))]
    corner = np.round(chosen + rng.normal(0, 4, (batch, count, 2)))
    size = np.round(rng.uniform(0, 30, (batch, count, 2)))
    scores = rng.uniform(0, 1, (batch, count, classes))
    if ties:
        scores = np.round(scores * 5) / 5
    # Images of a batch differ in how many candidates they have.
    scores[0] *= rng.integers(0, 2, (count, 1))
    return np.concatenate([corner, corner + size], axis=2), scores


LIMITS = ((1, 1), (5, 5), (5, 40), (40, 40), (3, 1000), (300, 3000))
SETTINGS = [
    configuration(
        classes,
        logits=logits,
        score_threshold=threshold,
        iou_threshold=iou,
        max_detections=limits[0],
        pre_nms_topk=limits[1],
        class_agnostic=agnostic,
        candidates=candidates,
    )
    for number, (classes, logits, candidates, agnostic) in enumerate(
        itertools.product((1, 2, 3, 7), (False, True), ("all-classes", "best-class"), (False, True))
    )
    for limits, threshold, iou in [(LIMITS[number % 6], (0.0, 0.2, 0.6)[number % 3], (0.1, 0.5, 0.65, 1.0)[number % 4])]
]
COUNT = 40


@settings(max_examples=2000, deadline=None, derandomize=True, database=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    setting=st.integers(0, len(SETTINGS) - 1),
    count=st.integers(0, COUNT),
    kind=st.sampled_from(["spread", "ties", "negative", "zero", "positive", "one"]),
    odd=st.sampled_from(["", "", "inverted", "nan box", "nan score", "infinite"]),
)
def test_all_ways_agree_on_two_thousand_random_cases(seed, setting, count, kind, odd):
    config, rng = SETTINGS[setting], np.random.default_rng(seed)
    boxes, scores = clustered(rng, 2, count, len(config.classes), kind == "ties")
    if config.suppresses_logits:
        scores = np.round(scores * 128 - 64) / 8
    changes = {"negative": -np.abs(scores) - 0.125, "zero": 0 * scores, "positive": np.abs(scores)}
    changes["one"] = 0 * scores + 1
    boxes, scores = boxes.astype(np.float32), np.asarray(changes.get(kind, scores), np.float32)
    hit = rng.random((2, count)) < 0.2
    if odd == "inverted":
        boxes[hit] = boxes[hit][:, [2, 1, 0, 3]]
    elif odd in ("nan box", "infinite"):
        boxes[hit, rng.integers(0, 4, int(hit.sum()))] = np.nan if odd == "nan box" else rng.choice([np.inf, -np.inf])
    elif odd == "nan score":
        scores[hit] = np.nan
    # A fixed number of boxes in the graph: what is missing can be no candidate.
    boxes = np.pad(boxes, ((0, 0), (0, COUNT - count), (0, 0)))
    lowest = -1e30 if config.suppresses_logits else -1.0
    found = check(boxes, np.pad(scores, ((0, 0), (0, COUNT - count), (0, 0)), constant_values=lowest), config)
    if config.suppresses_logits:
        # A sigmoid before it all changes nothing: a negative logit is a box like any other.
        assert_same(non_max_suppression(boxes[:, :count], sigmoid(scores), config.nms), found, logits=True)


def test_each_way_to_suppress_is_met_with_detections_and_without():
    rng = np.random.default_rng(3)
    for config in SETTINGS:
        boxes, scores = clustered(rng, 3, COUNT, len(config.classes), False)
        scores[2] = 0.0
        if config.suppresses_logits:
            scores = scores * 16 - 8
        counts = check(boxes, scores, config).num_dets.ravel()
        assert counts[1] > 0 and (counts[2] == 0 or config.nms.score_threshold == 0)


FIXTURE = Path(__file__).parent.parent / "fixtures" / "torchvision_nms.npz"


def torchvision_cases() -> Iterator[tuple[dict[str, Any], list[tuple[np.ndarray, np.ndarray, np.ndarray]]]]:
    """By setting: boxes (N, 4), scores (N, C), and the (box, class) pairs that torchvision kept."""
    stored = dict(np.load(FIXTURE))  # read once: every access to the file would inflate anew
    facts = json.loads(str(stored["facts"]))
    place = dict.fromkeys(("boxes", "scores", "kept"), 0)

    def taken(name: str, count: int) -> np.ndarray:
        place[name] += count
        return np.asarray(stored[name][place[name] - count : place[name]])

    def numbers(values: np.ndarray, scale: float) -> np.ndarray:
        return np.where(values == facts["missing"], np.nan, values / scale).astype(np.float32)

    counts = zip(stored["counts"].astype(int), stored["found"].astype(int), strict=True)
    for setting in facts["settings"]:
        cases = []
        for count, kept in itertools.islice(counts, facts["cases"]):
            boxes, scores = taken("boxes", count), taken("scores", count * setting["classes"])
            scale = 16 if setting.get("logits") else 1024
            scores = numbers(scores, scale).reshape(count, setting["classes"])
            cases.append((numbers(boxes, 1), scores, taken("kept", kept)))
        yield setting, cases


def test_all_ways_keep_what_torchvision_keeps():
    done = 0
    for setting, cases in torchvision_cases():
        config = configuration(
            setting["classes"],
            logits=setting.get("logits", False),
            score_threshold=setting["score"],
            iou_threshold=setting["iou"],
            max_detections=setting["detections"],
            pre_nms_topk=setting["topk"],
            class_agnostic=setting.get("agnostic", False),
            candidates="best-class" if setting.get("best") else "all-classes",
        )
        room = setting["most"]
        boxes = np.zeros((len(cases), room, 4), np.float32)
        scores = np.full((len(cases), room, setting["classes"]), -1e30, np.float32)
        for number, (some, values, _) in enumerate(cases):
            boxes[number, : len(some)], scores[number, : len(some)] = some, values
        found = check(boxes, scores, config)
        for number, (some, values, kept) in enumerate(cases):
            index, label = kept[:, 0].astype(int), kept[:, 1].astype(int)
            expected = sigmoid(values[index, label]) if config.suppresses_logits else values[index, label]
            got_boxes, got_scores, got_classes = found.image(number)
            np.testing.assert_array_equal(got_boxes, some[index])
            np.testing.assert_array_equal(got_classes, label)
            np.testing.assert_array_equal(got_scores, expected)
            done += 1
    assert done == 2400


def test_every_nonmaxsuppression_has_its_five_inputs_and_the_last_survives_fp16():
    for logits, threshold in itertools.product((False, True), (0.0, 0.001, 0.25)):
        model = suppressing("onnx", 1, 5, configuration(3, logits=logits, score_threshold=threshold))
        (node,) = [node for node in model.graph.node if node.op_type == "NonMaxSuppression"]
        assert len(node.input) == 5 and all(node.input)
        values = {one.name: onnx.numpy_helper.to_array(one) for one in model.graph.initializer}
        bound = values[node.input[4]]
        assert bound.dtype == np.float32 and bound == pytest.approx(score_bound(threshold, logits))
        # What has no score stays below the bound in half precision too, where the lowest float32 is minus infinity.
        with np.errstate(over="ignore"):
            empty, half = np.float32(np.finfo(np.float32).min).astype(np.float16), bound.astype(np.float16)
        assert np.isfinite(half).all() and not empty > half


def test_no_score_is_over_a_threshold_of_one():
    scores = np.array([[[-50.0, 0.0, 50.0, np.finfo(np.float32).max]]], np.float32)
    boxes = np.array([[[0, 0, 9, 9]]], np.float32)
    config = configuration(4, score_threshold=1.0)
    for values, logits in ((scores, True), (sigmoid(scores), False)):
        assert non_max_suppression(boxes, values, config.nms, logits=logits).num_dets.tolist() == [[0]]


@pytest.mark.parametrize("logits", [False, True])
@pytest.mark.parametrize("candidates", ["all-classes", "best-class"])
def test_a_thousand_classes(candidates, logits):
    rng = np.random.default_rng(1)
    boxes, scores = clustered(rng, 2, 12, 1000, False)
    config = configuration(1000, logits=logits, candidates=candidates, pre_nms_topk=500, max_detections=100)
    found = check(boxes, scores * 8 - 4 if logits else scores, config)
    assert len(np.unique(found.image(1)[2])) > 3
    efficient_check(boxes, scores * 8 - 4 if logits else scores, config)


@pytest.mark.parametrize("logits", [False, True])
def test_more_boxes_than_any_limit(logits):
    rng = np.random.default_rng(2)
    corner = rng.uniform(0, 500, (2, 9000, 2))
    boxes = np.concatenate([corner, corner + rng.uniform(5, 60, (2, 9000, 2))], axis=2)
    scores = rng.uniform(0, 1, (2, 9000, 2))
    config = configuration(2, logits=logits, score_threshold=0.3, pre_nms_topk=1000, max_detections=50)
    found = check(boxes, scores * 8 - 4 if logits else scores, config)
    assert found.num_dets.ravel().tolist() == [50, 50]
    efficient_check(boxes, scores * 8 - 4 if logits else scores, config)


def efficient_check(boxes: np.ndarray, scores: np.ndarray, config: Config) -> Detections:
    """The node in the graph, computed by its reference, gives the contract's detections."""
    boxes, scores = boxes.astype(np.float32), scores.astype(np.float32)
    expected = non_max_suppression(boxes, scores, config.nms, logits=config.suppresses_logits)
    got = execute(runner("efficient", boxes.shape[1], config), boxes, scores)
    assert_same(got, expected, config.suppresses_logits)
    return got


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    setting=st.integers(0, len(SETTINGS) - 1),
    kind=st.sampled_from(["spread", "ties", "negative", "zero", "nan score"]),
)
def test_efficient_is_held_to_the_same_meaning(seed, setting, kind):
    config, rng = SETTINGS[setting], np.random.default_rng(seed)
    boxes, scores = clustered(rng, 2, COUNT, len(config.classes), kind == "ties")
    if config.suppresses_logits:
        scores = np.round(scores * 128 - 64) / 8
    scores = {"negative": -np.abs(scores) - 0.125, "zero": 0 * scores}.get(kind, scores)
    if kind == "nan score":
        scores = np.where(rng.random(scores.shape) < 0.1, np.nan, scores)
    efficient_check(boxes, scores, config)


def attributes_of(config: Config) -> dict[str, Any]:
    model = suppressing("efficient", 1, 30, config)
    (node,) = [node for node in model.graph.node if node.op_type == "EfficientNMS_TRT"]
    assert node.domain == "trt.plugins"
    return {one.name: helper.get_attribute_value(one) for one in node.attribute}


def test_efficient_has_all_its_attributes_and_thresholds_that_exclude_equality():
    config = configuration(3, score_threshold=0.25, iou_threshold=0.5, max_detections=20, class_agnostic=True)
    found = attributes_of(config)
    assert found == {
        "plugin_version": b"1",
        "score_threshold": np.nextafter(np.float32(0.25), np.float32(1)),
        "iou_threshold": np.nextafter(np.float32(0.5), np.float32(1)),
        "max_output_boxes": 20,
        "background_class": -1,
        "score_activation": 0,
        "class_agnostic": 1,
        "box_coding": 0,
    }
    assert attributes_of(configuration(3, logits=True))["score_activation"] == 1


def test_efficient_keeps_and_suppresses_at_its_thresholds_and_the_contract_does_not():
    boxes = np.array([[[0, 0, 10, 10], [0, 0, 10, 5], [20, 20, 30, 30]]], np.float32)  # an IoU of 0.5
    scores = np.array([[[0.9], [0.8], [0.25]]], np.float32)
    plain = efficient_nms(boxes, scores, EfficientNms(0.25, 0.5, 5))
    assert plain.num_dets[0, 0] == 2 and plain.scores[0, :2].tolist() == [np.float32(0.9), 0.25]
    config = configuration(1, score_threshold=0.25, iou_threshold=0.5, max_detections=5)
    assert efficient_check(boxes, scores, config).scores[0, :3].tolist() == [np.float32(0.9), np.float32(0.8), 0.0]


def test_efficient_counts_what_has_no_score_under_a_low_threshold_and_the_contract_does_not():
    boxes = np.array([[[0, 0, 10, 10], [20, 20, 30, 30], [40, 40, 50, 50], [60, 60, 70, 70]]], np.float32)
    scores = np.array([[[0.9], [0.0005], [0.5], [np.nan]]], np.float32)
    plain = efficient_nms(boxes, scores, EfficientNms(0.001, 0.5, 10))
    assert plain.num_dets[0, 0] == 4 and plain.scores[0, 3] == -32768.0 and np.isnan(plain.scores[0, 0])
    assert efficient_nms(boxes, scores, EfficientNms(0.007, 0.5, 10)).num_dets[0, 0] == 2  # from here on it filters
    got = efficient_check(boxes, scores, configuration(1, score_threshold=0.001, max_detections=10))
    assert got.num_dets[0, 0] == 2


def test_efficient_takes_the_threshold_of_logits_through_the_inverse_sigmoid():
    boxes = np.array([[[0, 0, 10, 10], [20, 20, 30, 30], [40, 40, 50, 50]]], np.float32)
    scores = np.array([[[-1.0], [-2.0], [3.0]]], np.float32)  # 0.27, 0.12, 0.95
    found = efficient_nms(boxes, scores, EfficientNms(0.2, 0.5, 10, score_activation=1))
    assert found.num_dets[0, 0] == 2
    np.testing.assert_allclose(found.scores[0, :2], [0.952574, 0.268941], rtol=1e-5)
    assert efficient_nms(boxes, scores, EfficientNms(0.2, 0.5, 10)).num_dets[0, 0] == 1
    assert efficient_check(boxes, scores, configuration(1, logits=True, score_threshold=0.2)).num_dets[0, 0] == 2


def test_efficient_leaves_out_a_background_class_and_reads_centres_and_boxes_by_class():
    corners = np.array([[[0, 0, 10, 10], [20, 20, 30, 40]]], np.float32)
    centres = np.array([[[5, 5, 10, 10], [25, 30, 10, 20]]], np.float32)
    scores = np.array([[[0.9, 0.1], [0.2, 0.8]]], np.float32)
    one = efficient_nms(centres, scores, EfficientNms(0.15, 0.5, 4, box_coding=1))
    np.testing.assert_array_equal(one.boxes, efficient_nms(corners, scores, EfficientNms(0.15, 0.5, 4)).boxes)
    assert efficient_nms(corners, scores, EfficientNms(0.15, 0.5, 4, background_class=0)).classes[0, :1] == [1]
    inverted = np.array([[[10, 10, 0, 0], [0, 0, 10, 9]]], np.float32)  # turned round before overlaps are computed
    assert efficient_nms(inverted, scores[..., :1] * 4, EfficientNms(0.1, 0.5, 4)).num_dets[0, 0] == 1
    by_class = np.stack([corners, corners + 100], axis=2)
    np.testing.assert_array_equal(
        efficient_nms(by_class, scores, EfficientNms(0.15, 0.5, 4)).boxes[0, :2], [[0, 0, 10, 10], [120, 120, 130, 140]]
    )


def test_efficient_takes_no_more_than_4096_candidates():
    rng = np.random.default_rng(0)
    corner = rng.uniform(0, 1e5, (1, 5000, 2)).astype(np.float32)
    boxes, scores = np.concatenate([corner, corner + 1], axis=2), rng.uniform(0.1, 1, (1, 5000, 1)).astype(np.float32)
    assert efficient_nms(boxes, scores, EfficientNms(0.1, 0.5, 5000)).num_dets[0, 0] == 4096
    config = configuration(1, pre_nms_topk=4096, max_detections=4096)
    # It chooses them itself: there is no TopK in the graph.
    model = suppressing("efficient", 1, 5000, config)
    assert "TopK" not in [node.op_type for node in model.graph.node]
    assert efficient_check(boxes, scores, config).num_dets[0, 0] == 4096
    with pytest.raises(ConfigError, match="takes at most 4096 candidates; lower it with --set nms.pre_nms_topk="):
        suppressing("efficient", 1, 5000, configuration(1, pre_nms_topk=4500))
    with pytest.raises(ConfigError, match="this backend's TopK takes at most 3840"):
        suppressing("efficient", 1, 5000, configuration(1, pre_nms_topk=4000), max_topk=3840)


@pytest.mark.parametrize("length", [11, 40, 120])
def test_a_chain_of_suppressions_of_any_length_is_settled(length):
    # Each box overlaps its neighbours by more than the threshold and no other: every second one is kept.
    left = np.arange(length, dtype=np.float32) * 4
    boxes = np.stack([left, 0 * left, left + 10, 0 * left + 10], axis=1)[None]
    scores = np.linspace(0.9, 0.1, length, dtype=np.float32)[None, :, None]
    found = check(boxes, scores, configuration(1, iou_threshold=0.4, max_detections=length, pre_nms_topk=1000))
    assert found.num_dets[0, 0] == (length + 1) // 2


HALF = [[0, 0, 10, 10], [0, 0, 10, 5]]
"""Their IoU is exactly 0.5."""


@pytest.mark.parametrize(
    ("boxes", "scores", "keys", "counts"),
    [
        ([[[0, 0, 1, 1], [5, 5, 6, 6]]], [[0.25, 0.250001]], {"score_threshold": 0.25}, [1]),
        ([HALF], [[0.9, 0.8]], {"iou_threshold": 0.5}, [2]),
        ([HALF], [[0.9, 0.8]], {"iou_threshold": 0.499}, [1]),
        # Boxes without area, or inverted ones, neither suppress nor are suppressed.
        (
            [[[5, 5, 5, 5]] * 3 + [[5, 5, 5, 9]] * 2 + [[0, 0, 10, 10]] + [[9, 9, 1, 1]] * 2],
            [np.linspace(0.9, 0.2, 8)],
            {},
            [8],
        ),
        ([[[10, 10, 0, 0], [0, 0, 10, 9]]], [[0.9, 0.8]], {"iou_threshold": 0.5}, [2]),
        # Coordinates that are not finite.
        (
            [[[0, 0, 10, 10], [0, 0, 10, np.nan], [0, 0, np.inf, np.inf], [20, 20, 30, 30]]],
            [[0.9, 0.8, 0.7, 0.6]],
            {},
            [4],
        ),
        # The images of a batch have different counts.
        (
            [[*HALF, [50, 50, 60, 60]]] * 4,
            [[0.9, 0.8, 0.7], [0.9, 0.8, 0.0], [0.9, 0.0, 0.0], [0.0] * 3],
            {"iou_threshold": 0.4},
            [2, 1, 1, 0],
        ),
    ],
)
def test_how_many_boxes_are_kept(boxes, scores, keys, counts):
    detections = check(np.array(boxes, np.float32), np.array(scores)[..., None], configuration(1, **keys))
    assert detections.num_dets.ravel().tolist() == counts


@pytest.mark.parametrize("limit", [1, 2, 3, 30])
def test_more_room_than_candidates_is_padded(limit):
    boxes = np.array([[[0, 0, 1, 1], [5, 5, 6, 6], [9, 9, 10, 10]]])
    config = configuration(1, max_detections=limit)
    model = suppressing("native", 1, 3, config)
    shapes = {
        output.name: [dim.dim_value for dim in output.type.tensor_type.shape.dim] for output in model.graph.output
    }
    assert shapes == {"num_dets": [1, 1], "boxes": [1, limit, 4], "scores": [1, limit], "classes": [1, limit]}
    assert list(shapes) == ["num_dets", "boxes", "scores", "classes"]
    got = execute(model, boxes, np.array([[[0.9], [0.8], [0.7]]]))
    assert got.boxes.shape == (1, limit, 4)
    assert got.num_dets[0, 0] == min(limit, 3)
    assert not got.scores[0, 3:].any()
    check(boxes, np.array([[[0.9], [0.8], [0.7]]]), config)


@pytest.mark.parametrize("candidates", ["all-classes", "best-class"])
@pytest.mark.parametrize("topk", [1, 7, 8, 9, 23, 24, 25, 3000])
def test_the_pool_may_be_smaller_or_larger_than_the_number_of_candidates(topk, candidates):
    boxes, scores = clustered(np.random.default_rng(topk), 2, 8, 3, True)
    check(boxes, scores, configuration(3, pre_nms_topk=topk, max_detections=min(topk, 10), candidates=candidates))


def test_no_constant_grows_with_the_pool():
    assert suppressing("native", 1, 8400, configuration(80)).ByteSize() < 30_000


def test_a_pool_beyond_the_backends_topk_is_an_error_that_says_what_to_do():
    config = configuration(80, pre_nms_topk=5000)
    words = "'nms.pre_nms_topk' is 5000 but this backend's TopK takes at most 3840; lower it with --set "
    with pytest.raises(ConfigError, match=words + "nms.pre_nms_topk=3840 or choose --nms host"):
        suppressing("native", 1, 8400, config, max_topk=3840)
    suppressing("native", 1, 8400, config, max_topk=None)
    suppressing("native", 1, 40, config, max_topk=3840)  # there are only 3200 candidates


def test_host_leaves_the_graph_as_it_is():
    graph = to_graph(decoded_model("N", 5, 2))
    assert nms.apply(graph, Options(configuration(2), "host")) == PassResult(0)
    assert [output.name for output in graph.outputs] == ["boxes", "scores"]


def test_the_defaults_are_those_coco_is_scored_with():
    assert (NmsConfig().max_detections, NmsConfig().pre_nms_topk) == (300, 3000)
    boxes, scores = clustered(np.random.default_rng(5), 1, 1200, 3, True)
    check(boxes, scores, configuration(3))
