"""Graphs that end with a selection of the best detections: which are cut, and which stay."""

from typing import Any

import nets
import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest
from onnx import TensorProto

from trtdet.config import Config
from trtdet.errors import ModelError
from trtdet.passes import Options, cut_topk, rewrite
from trtdet.passes.cut_nms import cut_off
from trtdet.runtime.detector import Detector

CLASSES, ANCHORS, ROWS = 3, 30, 8

BOTH = """
    moved = Transpose <perm = [0, 2, 1]> (image_rows)
    boxes_of, scores_of = Split <axis = 2> (moved, parts)
"""
# Detect.postprocess and RTDETRDecoder.postprocess of Ultralytics 8.4, exported to opset 17.
TAILS = {
    "best anchors": """
        highest = ReduceMax <axes = [-1], keepdims = 0> (scores_of)
        first_values, anchors = TopK <axis = 1> (highest, k)
        anchors_column = Unsqueeze (anchors, last)
        anchors_wide = Expand (anchors_column, wide_classes)
        their_scores = GatherElements <axis = 1> (scores_of, anchors_wide)
        flat = Flatten <axis = 1> (their_scores)
        values, places = TopK <axis = 1> (flat, k)
        score = Unsqueeze (values, last)
        label_number = Mod (places, classes)
        label_column = Unsqueeze (label_number, last)
        label = Cast <to = 1> (label_column)
        among_anchors = Div (places, classes)
        anchor = GatherElements <axis = 1> (anchors, among_anchors)
        anchor_column = Unsqueeze (anchor, last)
        anchor_wide = Expand (anchor_column, wide_boxes)
        box = GatherElements <axis = 1> (boxes_of, anchor_wide)
        output0 = Concat <axis = -1> (box, score, label)
    """,
    "all scores": """
        flat = Reshape (scores_of, flat_shape)
        values, places = TopK <axis = 1> (flat, k)
        score = Unsqueeze (values, last)
        query = Div (places, classes)
        query_column = Unsqueeze (query, last)
        query_wide = Expand (query_column, wide_boxes)
        box = GatherElements <axis = 1> (boxes_of, query_wide)
        before = Mul (query, classes)
        label_number = Sub (places, before)
        label_column = Unsqueeze (label_number, last)
        label = Cast <to = 1> (label_column)
        output0 = Concat <axis = 2> (box, score, label)
    """,
}


CONSTANTS: dict[str, Any] = {
    "w": np.random.default_rng(0).normal(0, 0.2, ((4 + CLASSES) * ANCHORS, 3, 8, 8)).astype(np.float32),
    "rows_shape": np.array([1, 4 + CLASSES, ANCHORS]),
    "parts": np.array([4, CLASSES]),
    "k": np.array([ROWS]),
    "last": np.array([-1]),
    "middle": np.array([1]),
    "classes": np.array(CLASSES),
    "wide_classes": np.array([1, ROWS, CLASSES]),
    "wide_boxes": np.array([1, ROWS, 4]),
    "flat_shape": np.array([1, -1]),
    "zero": np.zeros((1, 1, 1), np.int64),
    "ones": np.ones((1, 1, 4), np.float32),
}


def exported(net: Any, tail: str) -> onnx.ModelProto:
    body = (BOTH + tail).replace("(image_rows)", "(rows)")
    text = f"(float[1,3,8,8] image) => (float[1,{ROWS},6] output0) {{"
    if "first_wide" in body:
        body = "first_wide = Expand (zero, wide_boxes)\n" + body
    text += f"rows_flat = Conv <strides = [8, 8]> (image, w)\nrows = Reshape (rows_flat, rows_shape)\n{body}}}"
    return net(text, opset=17, **{name: value for name, value in CONSTANTS.items() if name in text})


def configuration(decode: str = "detections", nms: Any = "none", classes: int = CLASSES, **head: Any) -> Config:
    return nets.configuration(decode, (8, 8), classes, nms=nms, **head)


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("limit", [300, 3])
def test_the_best_are_those_of_the_model(net, run, tail, limit):
    model = exported(net, TAILS[tail])
    config = configuration(nms={"iou_threshold": 1, "max_detections": limit, "score_threshold": 0.001})
    done = rewrite(model, Options(config))
    assert done.config.head.decode == "boxes" and done.config.nms.max_detections == min(limit, ROWS)
    assert not {"TopK", "Mod", "GatherElements"} & {node.op_type for node in done.model.graph.node}
    images = np.random.default_rng(1).uniform(0, 1, (1, 3, 8, 8)).astype(np.float32)
    rows = run(model, image=images)["output0"][0]
    rows = rows[rows[:, 4] > 0.001][:limit]
    assert len(rows) > 2
    boxes, scores, classes = Detector.running(done.model, done.config, "host")(images).image(0)
    np.testing.assert_array_equal(boxes, rows[:, :4])
    np.testing.assert_array_equal(scores, rows[:, 4])
    np.testing.assert_array_equal(classes, rows[:, 5].astype(int))


PARTS: dict[str, tuple[int, dict[str, Any]]] = {
    "masks": (5, {"masks": True}),
    "keypoints": (6, {"keypoints": {"names": ["one", "two"]}}),
    "angles": (1, {"rotated": True, "boxes": "cxcywh"}),
}


def with_parts(net: Any, width: int, prototypes: bool) -> onnx.ModelProto:
    """Rows with a part behind box, score and class, as Detect.postprocess of Ultralytics 8.4 writes them."""
    text = BOTH.replace("boxes_of, scores_of = Split", "boxes_of, scores_of, part_of = Split") + TAILS["best anchors"]
    text = text.replace("(image_rows)", "(rows)").replace("(box, score, label)", "(box, score, label, part)")
    text = text.replace(
        "output0 =",
        "wide = Expand (anchor_column, wide_part)\npart = GatherElements <axis = 1> (part_of, wide)\noutput0 =",
    )
    outputs = f"float[1,{ROWS},{6 + width}] output0" + f", float[1,{width},2,2] output1" * prototypes
    body = "rows_flat = Conv <strides = [8, 8]> (image, w)\nrows = Reshape (rows_flat, rows_shape)\n" + text
    body += "output1 = Slice (whole, start, end, middle)\n" * prototypes
    body = body.replace("output1 =", "whole = Conv <strides = [4, 4]> (image, w2)\noutput1 =")
    rng = np.random.default_rng(3)
    constants = CONSTANTS | {
        "w": rng.normal(0, 0.2, ((4 + CLASSES + width) * ANCHORS, 3, 8, 8)).astype(np.float32),
        "rows_shape": np.array([1, 4 + CLASSES + width, ANCHORS]),
        "parts": np.array([4, CLASSES, width]),
        "wide_part": np.array([1, ROWS, width]),
        "w2": rng.normal(0, 0.2, (width + 1, 3, 4, 4)).astype(np.float32),
        "start": np.array([0]),
        "end": np.array([width]),
    }
    text = f"(float[1,3,8,8] image) => ({outputs}) {{{body}}}"
    return net(text, opset=17, **{name: value for name, value in constants.items() if name in text})


@pytest.mark.parametrize("part", PARTS)
def test_parts_follow_their_boxes(net, run, part):
    width, head = PARTS[part]
    model, config = with_parts(net, width, part == "masks"), configuration(**head)
    done = rewrite(model, Options(config))
    assert done.config.head.decode == "boxes"
    assert not {"TopK", "Mod", "GatherElements"} & {node.op_type for node in done.model.graph.node}
    images = np.random.default_rng(1).uniform(0, 1, (1, 3, 8, 8)).astype(np.float32)
    given = run(model, image=images)
    rows = given["output0"][0]
    rows = rows[rows[:, 4] > config.nms.score_threshold]
    assert len(rows) > 2
    found = Detector.running(done.model, done.config, "host")(images)
    boxes, scores, classes = found.image(0)
    np.testing.assert_array_equal(scores, rows[:, 4])
    np.testing.assert_array_equal(classes, rows[:, 5].astype(int))
    parts = found.image_parts(0)
    if part == "masks":
        np.testing.assert_array_equal(boxes, rows[:, :4])
        np.testing.assert_array_equal(parts.mask_coefficients, rows[:, 6:])
        np.testing.assert_array_equal(parts.prototypes, given["output1"][0])
    elif part == "keypoints":
        np.testing.assert_array_equal(parts.keypoints, rows[:, 6:].reshape(-1, 2, 3))
    else:
        np.testing.assert_allclose(parts.rotated_boxes, rows[:, [0, 1, 2, 3, 6]], atol=1e-5)


def test_parts_that_do_not_follow_their_boxes_stay(net):
    model = with_parts(net, 6, prototypes=False)
    for node in model.graph.node:
        if "part_of" in node.input:
            node.input[1] = "first_part"
    constant = onnx.numpy_helper.from_array(np.zeros((1, ROWS, 6), np.int64), "first_part")
    model.graph.initializer.append(constant)
    done = rewrite(model, Options(configuration(keypoints={"names": ["one", "two"]})))
    assert done.config.head.decode == "detections"


ANOTHER_CHOICE = {
    "anchors by the sum of their scores": (
        "best anchors",
        "ReduceMax <axes = [-1], keepdims = 0> (scores_of)",
        "ReduceSum <keepdims = 0> (scores_of, last)",
    ),
    "boxes that are not chosen": ("all scores", "(boxes_of, query_wide)", "(boxes_of, first_wide)"),
    "columns in another order": ("all scores", "(box, score, label)", "(box, label, score)"),
}


@pytest.mark.parametrize("case", ANOTHER_CHOICE)
def test_rows_that_are_made_in_another_way_stay(net, case):
    tail, old, new = ANOTHER_CHOICE[case]
    assert TAILS[tail].count(old) == 1
    done = rewrite(exported(net, TAILS[tail].replace(old, new)), Options(configuration()))
    assert done.config.head.decode == "detections"


@pytest.mark.parametrize("keys", [{"nms": {"iou_threshold": 0.5}}, {"classes": 2}])
def test_rows_that_are_suppressed_or_of_another_number_of_classes_stay(net, keys):
    done = rewrite(exported(net, TAILS["all scores"]), Options(configuration(**keys)))
    assert done.config.head.decode == "detections"


# RTDETRPostProcessor of RT-DETR, D-FINE and DEIM, exported to opset 16: boxes in pixels of an original image.
THREE = """
    (float[1,3,8,8] image, float[1,2] size) => (int64[1,ROWS] labels, float[1,ROWS,4] boxes, float[1,ROWS] scores) {
        rows_flat = Conv <strides = [8, 8]> (image, w)
        rows = Reshape (rows_flat, rows_shape)
        moved = Transpose <perm = [0, 2, 1]> (rows)
        boxes_of, logits = Split <axis = 2> (moved, parts)
        twice = Concat <axis = 1> (size, size)
        factor = Unsqueeze (twice, middle)
        pixels = Mul (boxes_of, factor)
        scores_of = Sigmoid (logits)
        flat = Flatten <axis = 1> (scores_of)
        scores, places = TopK <axis = 1> (flat, k)
        query = Div (places, classes)
        before = Mul (query, classes)
        labels = Sub (places, before)
        column = Unsqueeze (query, last)
        wide = Expand (column, wide_boxes)
        boxes = GatherElements <axis = 1> (pixels, wide)
    }
"""


def with_sizes(net: Any, old: str = "", new: str = "") -> onnx.ModelProto:
    assert old in THREE
    text = THREE.replace(old, new).replace("ROWS", str(ROWS))
    return net(
        text, opset=16, domain="trt.plugins", **{name: value for name, value in CONSTANTS.items() if name in text}
    )


@pytest.mark.parametrize(
    ("boxes", "scores", "fits"),
    [
        # As torch's exporter names what it cannot infer, in the official export of DEIMv2.
        (("b", "n", 4), ("c", "m", 3), True),
        ((1, "n", 4), (1, 30, 3), True),
        ((1, 30, 4), (1, 40, 3), False),
        ((1, "n", 5), (1, "m", 3), False),
        ((1, "n", 4), (1, "m", 4), False),
        (("n", 4), (1, "n", 3), False),
    ],
)
def test_open_numbers_of_boxes_fit_whatever_they_are_called(boxes, scores, fits):
    tensors = (gs.Variable(name, np.float32, shape) for name, shape in (("boxes", boxes), ("scores", scores)))
    assert cut_topk._fit(*tensors, CLASSES) is fits


@pytest.mark.parametrize("rule", ["boxes", "detections"])
def test_labels_boxes_and_scores_of_an_original_size(net, run, rule):
    model = with_sizes(net)
    config = configuration(rule, boxes="cxcywh")
    done = rewrite(model, Options(config))
    assert [tensor.name for tensor in done.model.graph.input] == ["image"]
    head = done.config.head
    assert (head.decode, head.boxes, head.units, head.scores) == ("boxes", "xyxy", "relative", "logits")
    assert done.config.nms.max_detections == ROWS
    images = np.random.default_rng(1).uniform(0, 1, (1, 3, 8, 8)).astype(np.float32)
    given = run(model, image=images, size=np.full((1, 2), 8, np.float32))
    boxes, scores, classes = Detector.running(done.model, done.config, "host")(images).image(0)
    np.testing.assert_allclose(boxes, given["boxes"][0], rtol=1e-6)
    np.testing.assert_allclose(scores, given["scores"][0], rtol=1e-6)
    np.testing.assert_array_equal(classes, given["labels"][0])


def test_what_a_plugin_computes_is_float32(net):
    """Nothing tells the types and shapes behind an operator that ONNX does not know."""
    model = with_sizes(net, "rows = Reshape (rows_flat, rows_shape)", "rows = trt.plugins.Rows (rows_flat)")
    cut = cut_off(model)
    assert cut is not None and cut.thresholds["max_detections"] == ROWS
    outputs = [(value.name, value.type.tensor_type.elem_type) for value in cut.model.graph.output]
    assert outputs == [("boxes_of", TensorProto.FLOAT), ("logits", TensorProto.FLOAT)]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Mul (boxes_of, factor)", "Mul (boxes_of, ones)"),
        ("Mul (boxes_of, factor)", "Add (boxes_of, factor)"),
        ("TopK <axis = 1> (flat, k)", "TopK <axis = 1, largest = 0> (flat, k)"),
    ],
)
def test_three_outputs_that_are_made_in_another_way_stay(net, old, new):
    with pytest.raises(ModelError, match="inputs|decode rule 'boxes' takes boxes"):
        rewrite(with_sizes(net, old, new), Options(configuration("boxes")))
