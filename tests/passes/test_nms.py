from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from trtdet.config import Config, NmsConfig
from trtdet.detections import Detections, non_max_suppression
from trtdet.errors import ConfigError
from trtdet.passes import Options, nms
from trtdet.passes.base import PassResult
from trtdet.passes.model import to_graph, to_model


def configuration(classes: int, **keys: Any) -> Config:
    return Config.model_validate(
        {
            "name": "test",
            "classes": [f"c{index}" for index in range(classes)],
            "input": {"size": [64, 64]},
            "head": {"decode": "yolov5"},
            "nms": keys,
        }
    )


def decoded_model(batch: int | str, count: int, classes: int) -> onnx.ModelProto:
    """What the decode pass leaves, with boxes and scores given by the test."""

    def value(name: str, last: int) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, (batch, count, last))

    nodes = [helper.make_node("Add", [f"in_{k}", "zero"], [k], name=k) for k in ("boxes", "scores")]
    graph = helper.make_graph(
        nodes,
        "decoded",
        [value("in_boxes", 4), value("in_scores", classes)],
        [value("boxes", 4), value("scores", classes)],
        [helper.make_tensor("zero", TensorProto.FLOAT, [], [0.0])],
    )
    return helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 13)])


def native(batch: int | str, count: int, config: Config, max_topk: int | None = None) -> onnx.ModelProto:
    graph = to_graph(decoded_model(batch, count, len(config.classes)))
    assert nms.apply(graph, Options(config, "native", max_topk=max_topk)) == PassResult(1)
    return to_model(graph)


def execute(model: onnx.ModelProto, boxes: np.ndarray, scores: np.ndarray) -> Detections:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return Detections(
        *session.run(
            ["num_dets", "boxes", "scores", "classes"],
            {"in_boxes": boxes.astype(np.float32), "in_scores": scores.astype(np.float32)},
        )
    )


def check(boxes: np.ndarray, scores: np.ndarray, config: Config) -> Detections:
    """Native suppression equals the reference in every bit that the contract defines."""
    boxes, scores = boxes.astype(np.float32), scores.astype(np.float32)
    expected = non_max_suppression(boxes, scores, config.nms)
    got = execute(native("N", boxes.shape[1], config), boxes, scores)
    assert got.boxes.shape == expected.boxes.shape
    assert (got.num_dets.dtype, got.classes.dtype, got.boxes.dtype) == (np.int32, np.int32, np.float32)
    np.testing.assert_array_equal(got.num_dets, expected.num_dets)
    for index in range(len(expected)):
        for mine, theirs in zip(got.image(index), expected.image(index), strict=True):
            np.testing.assert_array_equal(mine, theirs)
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


def test_the_arrow_stands_in_the_docstring() -> None:
    assert (nms.__doc__ or "").splitlines()[0] == "boxes, scores -> num_dets, boxes, scores, classes"


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32 - 1),
    count=st.integers(1, 60),
    classes=st.integers(1, 4),
    ties=st.booleans(),
    agnostic=st.booleans(),
    candidates=st.sampled_from(["all-classes", "best-class"]),
    iou=st.sampled_from([0.1, 0.5, 0.65, 1.0]),
    threshold=st.sampled_from([0.0, 0.2, 0.6]),
    limits=st.sampled_from([(1, 1), (5, 5), (5, 40), (40, 40), (3, 1000), (300, 3000)]),
)
def test_native_equals_the_reference_on_clustered_boxes(
    seed: int,
    count: int,
    classes: int,
    ties: bool,
    agnostic: bool,
    candidates: str,
    iou: float,
    threshold: float,
    limits: tuple[int, int],
) -> None:
    boxes, scores = clustered(np.random.default_rng(seed), 2, count, classes, ties)
    config = configuration(
        classes,
        score_threshold=threshold,
        iou_threshold=iou,
        max_detections=limits[0],
        pre_nms_topk=limits[1],
        class_agnostic=agnostic,
        candidates=candidates,
    )
    check(boxes, scores, config)


@pytest.mark.parametrize("length", [11, 40, 120])
def test_a_chain_of_suppressions_of_any_length_is_settled(length: int) -> None:
    # Each box overlaps its neighbours by more than the threshold and no other: every second one is kept.
    left = np.arange(length, dtype=np.float32) * 4
    boxes = np.stack([left, 0 * left, left + 10, 0 * left + 10], axis=1)[None]
    scores = np.linspace(0.9, 0.1, length, dtype=np.float32)[None, :, None]
    found = check(boxes, scores, configuration(1, iou_threshold=0.4, max_detections=length, pre_nms_topk=1000))
    assert found.num_dets[0, 0] == (length + 1) // 2


def test_images_of_one_batch_keep_different_counts() -> None:
    boxes = np.tile(np.array([[0, 0, 10, 10], [0, 0, 10, 11], [50, 50, 60, 60]], np.float32), (3, 1, 1))
    scores = np.array([[0.9, 0.8, 0.7], [0.9, 0.8, 0.0], [0.0, 0.0, 0.0]], np.float32)[:, :, None]
    found = check(boxes, scores, configuration(1))
    assert found.num_dets.ravel().tolist() == [2, 1, 0]


def test_no_candidate_at_all_gives_zero_detections() -> None:
    got = execute(native(2, 5, configuration(3)), np.ones((2, 5, 4)), np.zeros((2, 5, 3)))
    assert got.num_dets.tolist() == [[0], [0]]
    assert not got.scores.any()


def test_a_score_must_exceed_the_threshold() -> None:
    boxes = np.array([[[0, 0, 1, 1], [5, 5, 6, 6]]])
    assert check(boxes, np.array([[[0.25], [0.250001]]]), configuration(1, score_threshold=0.25)).num_dets[0, 0] == 1


def test_an_overlap_must_exceed_the_threshold() -> None:
    boxes = np.array([[[0, 0, 10, 10], [0, 0, 10, 5]]])  # their IoU is exactly 0.5
    scores = np.array([[[0.9], [0.8]]])
    assert check(boxes, scores, configuration(1, iou_threshold=0.5)).num_dets[0, 0] == 2
    assert check(boxes, scores, configuration(1, iou_threshold=0.499)).num_dets[0, 0] == 1


def test_boxes_without_area_neither_suppress_nor_are_suppressed() -> None:
    boxes = np.array([[[5, 5, 5, 5]] * 3 + [[5, 5, 5, 9]] * 2 + [[0, 0, 10, 10]] + [[9, 9, 1, 1]] * 2])
    found = check(boxes, np.linspace(0.9, 0.2, 8)[None, :, None], configuration(1))
    assert found.num_dets[0, 0] == 8


def test_equal_boxes_with_equal_scores_keep_the_first() -> None:
    boxes = np.tile(np.array([0.0, 0, 10, 10]), (1, 50, 1))
    found = check(boxes, np.full((1, 50, 4), 0.5), configuration(4))
    assert found.image(0)[2].tolist() == [0, 1, 2, 3]


def test_scores_that_are_nan_and_boxes_that_are_not_finite_are_no_reason_to_fail() -> None:
    boxes = np.array([[[0, 0, 10, 10], [0, 0, 10, np.nan], [0, 0, np.inf, np.inf], [20, 20, 30, 30]]])
    assert check(boxes, np.array([[[0.9], [0.8], [0.7], [0.6]]]), configuration(1)).num_dets[0, 0] == 4


@pytest.mark.parametrize("limit", [1, 2, 3, 30])
def test_more_room_than_candidates_is_padded(limit: int) -> None:
    boxes = np.array([[[0, 0, 1, 1], [5, 5, 6, 6], [9, 9, 10, 10]]])
    config = configuration(1, max_detections=limit)
    model = native(1, 3, config)
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
def test_the_pool_may_be_smaller_or_larger_than_the_number_of_candidates(topk: int, candidates: str) -> None:
    boxes, scores = clustered(np.random.default_rng(topk), 2, 8, 3, True)
    check(boxes, scores, configuration(3, pre_nms_topk=topk, max_detections=min(topk, 10), candidates=candidates))


def test_no_constant_grows_with_the_pool() -> None:
    config = configuration(80)
    large = native(1, 8400, config)
    assert large.ByteSize() < 30_000


def test_a_pool_beyond_the_backends_topk_is_an_error_that_says_what_to_do() -> None:
    config = configuration(80, pre_nms_topk=5000)
    with pytest.raises(ConfigError) as caught:
        native(1, 8400, config, max_topk=3840)
    assert "'nms.pre_nms_topk' is 5000 but this backend's TopK takes at most 3840" in str(caught.value)
    assert "--pre-nms-topk 3840 or choose --nms host" in str(caught.value)
    native(1, 8400, config, max_topk=None)
    native(1, 40, config, max_topk=3840)  # there are only 3200 candidates


def test_host_leaves_the_graph_as_it_is() -> None:
    graph = to_graph(decoded_model("N", 5, 2))
    assert nms.apply(graph, Options(configuration(2), "host")) == PassResult(0)
    assert [output.name for output in graph.outputs] == ["boxes", "scores"]


def test_the_defaults_are_those_coco_is_scored_with() -> None:
    assert (NmsConfig().max_detections, NmsConfig().pre_nms_topk) == (300, 3000)
    boxes, scores = clustered(np.random.default_rng(5), 1, 1200, 3, True)
    check(boxes, scores, configuration(3))
