"""Exports of other frameworks, their last nodes written as their exporters write them, are taken as they are.

Sources: mmdeploy/mmcv/ops/nms.py (``_multiclass_nms_single``) of open-mmlab/mmdeploy and
paddle2onnx/mapper/detection/multiclass_nms.cc of PaddlePaddle/Paddle2ONNX, node for node. The ends of YOLOv7
(``ORT_NMS`` and ``TRT_NMS`` in models/experimental.py of WongKinYiu/yolov7) and of DEIM are of the same form, not
copied node for node. Files of Ultralytics' own exporter are compared by benchmarks/exports.py.
"""

import nets
import numpy as np
import onnx
import onnx.parser
import pytest
from benchmark_exports import differing
from onnx import TensorProto, helper, numpy_helper

from trtdet.detection.suppression import non_max_suppression
from trtdet.errors import ConfigError, ModelError
from trtdet.evaluation.guessing import guess_config
from trtdet.exporter.forms import no_detector
from trtdet.passes import load_model
from trtdet.passes.exported import changes_of
from trtdet.runtime.detector import Detector

CLASSES = 5
CELLS = 225
BODY = """features = Conv<strides = [2,2]>(image, weight) flat = Reshape(features, rows_shape)
    rows = Transpose<perm = [0,2,1]>(flat) a, b, c = Split<axis = 2>(rows, parts)
    low_shares = Sigmoid(a) low = Mul(low_shares, reach) size_shares = Sigmoid(b) sides = Mul(size_shares, most_side)
    high = Add(low, sides) all_boxes = Concat<axis = 2>(low, high)
    c_wide = Mul(c, spread) all_scores = Sigmoid(c_wide)"""
CONSTANTS = {
    "weight": nets.normal(4 + CLASSES, 3, 4, 4, scale=0.5),
    "rows_shape": np.array([0, 4 + CLASSES, CELLS]),
    "parts": np.array([2, 2, CLASSES]),
    "reach": np.float32(20),
    "most_side": np.float32(12),
    "spread": np.float32(0.7),
    "zero": np.array(0),
    "one": np.array(1),
    "two": np.array(2),
    "zeros": np.array([0]),
    "ones": np.array([1]),
    "twos": np.array([2]),
    "end": np.array([9223372036854775807]),
    "last": np.array([-1]),
    "per_class": np.array([200]),
    "pre": np.array([200]),
    "keep": np.array([30]),
    "iou": np.array([0.5], np.float32),
    "floor": np.array([0.6], np.float32),
    "empty_row": np.zeros((1, 1, 5), np.float32),
    "empty_label": np.zeros((1, 1), np.int64),
    "boxes_a_class": np.array([CELLS]),
    "three": np.array([1, -1, 1]),
    "wide": np.array([1], np.float32),
    "offset": np.float32(640),
    "image_and_box": np.array([0, 2]),
    "column": np.array([-1, 1]),
}

MMDEPLOY = """best = ReduceMax<axes = [-1], keepdims = 0>(all_scores) of_one = Squeeze(best, zeros)
    values, top = TopK(of_one, pre) boxes_pre = Gather<axis = 1>(all_boxes, top)
    scores_pre = Gather<axis = 1>(all_scores, top) by_class = Transpose<perm = [0,2,1]>(scores_pre)
    kept = NonMaxSuppression(boxes_pre, by_class, per_class, iou, floor)
    label = Gather<axis = 1>(kept, one) at = Gather<axis = 1>(kept, two)
    moved = Transpose<perm = [1,2,0]>(by_class) label_column = Unsqueeze(label, last) at_column = Unsqueeze(at, last)
    pairs = Concat<axis = -1>(label_column, at_column) picked = GatherND(moved, pairs)
    picked_row = Transpose<perm = [1,0]>(picked) score_rows = Unsqueeze(picked_row, twos)
    box_rows = Gather<axis = 1>(boxes_pre, at) found = Concat<axis = 2>(box_rows, score_rows)
    label_rows = Unsqueeze(label, zeros) padded = Concat<axis = 1>(found, empty_row)
    padded_labels = Concat<axis = 1>(label_rows, empty_label)
    column_of_scores = Slice(padded, last, end, twos) flat_scores = Squeeze(column_of_scores, twos)
    length = Shape(flat_scores) rest = Slice(length, ones, end) limit = Min(rest, keep)
    best_scores, order = TopK<axis = 1>(flat_scores, limit) order_of_one = Squeeze(order, zeros)
    dets = Gather<axis = 1>(padded, order_of_one) labels = Gather<axis = 1>(padded_labels, order_of_one)"""

PADDLE = """divided = Div(all_boxes, scale_wide) by_class = Transpose<perm = [0,2,1]>(all_scores)
    kept = NonMaxSuppression(divided, by_class, per_class, iou, floor)
    label = Gather<axis = 1>(kept, ones) at = Gather<axis = 1>(kept, twos) flat_scores = Flatten(by_class)
    first_of_class = Mul(label, boxes_a_class) place = Add(first_of_class, at) places = Flatten(place)
    all_flat = Reshape(flat_scores, last) places_flat = Reshape(places, last) picked = Gather(all_flat, places_flat)
    how_many = Shape(picked) limits = Concat<axis = 0>(how_many, keep)
    limit = ReduceMin<axes = [0], keepdims = 1>(limits) best, order = TopK(picked, limit)
    best_labels = Gather(label, order) best_at = Gather(at, order) at_flat = Reshape(best_at, last)
    box_rows = Gather<axis = 1>(divided, at_flat) label_numbers = Cast<to = 1>(best_labels)
    score_rows = Reshape(best, three) label_rows = Reshape(label_numbers, three)
    joined = Concat<axis = 2>(label_rows, score_rows, box_rows) result = Squeeze(joined, zeros)"""

YOLOV7 = """best = ReduceMax<axes = [2], keepdims = 1>(all_scores) label = ArgMax<axis = 2, keepdims = 1>(all_scores)
    label_number = Cast<to = 1>(label) distance = Mul(label_number, offset) apart = Add(all_boxes, distance)
    by_class = Transpose<perm = [0,2,1]>(best) kept = NonMaxSuppression(apart, by_class, per_class, iou, floor)
    index = Gather<axis = 1>(kept, image_and_box) box_rows = GatherND(all_boxes, index)
    label_rows = GatherND(label, index) score_rows = GatherND(best, index) label_numbers = Cast<to = 1>(label_rows)
    image_index = Gather<axis = 1>(kept, zero) image_number = Cast<to = 1>(image_index)
    image_rows = Reshape(image_number, column)
    result = Concat<axis = 1>(image_rows, box_rows, label_numbers, score_rows)"""

DEIM = """shape = Shape(all_scores) flat_scores = Flatten(all_scores) scores, index = TopK(flat_scores, keep)
    labels = Mod(index, of_classes) place = Div(index, of_classes) shares = Div(all_boxes, side)
    sizes_twice = Concat<axis = 1>(orig_target_sizes, orig_target_sizes) sizes_number = Cast<to = 1>(sizes_twice)
    sizes_wide = Unsqueeze(sizes_number, ones) scaled = Mul(shares, sizes_wide) places = Unsqueeze(place, twos)
    places_wide = Tile(places, four_times) boxes = GatherElements<axis = 1>(scaled, places_wide)"""


def exported(tail: str, outputs: str, inputs: str = "", batch: str = "1", **more: np.ndarray) -> onnx.ModelProto:
    constants = {**CONSTANTS, **more}
    text = f"(float[{batch},3,32,32] image{inputs}) => ({outputs}) {{ {BODY} {tail} }}"
    return nets.net(text, **{name: value for name, value in constants.items() if name in text})


@pytest.fixture
def saved(tmp_path):
    def save(model):
        onnx.save(model, tmp_path / "model.onnx")
        return tmp_path / "model.onnx"

    return save


FORMS = {
    "MMDeploy": lambda: exported(MMDEPLOY, "float[1,n,5] dets, int64[1,n] labels"),
    "PaddleDetection": lambda: exported(
        "factor_twice = Concat<axis = 1>(scale_factor, scale_factor) scale_wide = Unsqueeze(factor_twice, ones)"
        + PADDLE,
        "float[n,6] result",
        ", float[1,2] im_shape, float[1,2] scale_factor",
    ),
    "unknown": lambda: exported(YOLOV7, "float[n,7] result"),
    "RT-DETR, D-FINE or DEIM": lambda: exported(
        DEIM,
        "int64[1,30] labels, float[1,30,4] boxes, float[1,30] scores",
        ", int64[1,2] orig_target_sizes",
        of_classes=np.array(CLASSES),
        side=np.float32(32),
        four_times=np.array([1, 1, 4]),
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_an_export_is_taken_as_it_is(saved, form):
    path = saved(FORMS[form]())
    guess = guess_config(path)
    assert guess.note.startswith("recognised as an export of ")
    assert form == "unknown" or form in guess.note
    total, wrong, box, score = differing(path, guess.config)
    assert total > 20 and wrong == 0 and box < 0.01 and score < 1e-4, (total, wrong, box, score)
    nms = guess.config.nms
    if form in ("MMDeploy", "PaddleDetection"):
        assert (nms.max_detections, nms.class_agnostic, nms.candidates) == (30, False, "all-classes")
    if form == "unknown":
        assert (nms.max_detections, nms.class_agnostic, nms.candidates) == (200, False, "best-class")
    if form == "RT-DETR, D-FINE or DEIM":
        assert not nms.suppresses and nms.max_detections == 30
    else:
        assert (nms.iou_threshold, nms.score_threshold) == (0.5, pytest.approx(0.6))


@pytest.mark.parametrize("operator", ["EfficientNMS_TRT", "BatchedNMSDynamic_TRT", "TRTBatchedNMS"])
def test_a_plugin_of_tensorrt_is_taken_with_its_thresholds(saved, operator):
    batched = "shareLocation = 1, backgroundLabelId = -1, numClasses = 5, topK = 1000, keepTopK = 30, "
    batched += "scoreThreshold = 0.3, iouThreshold = 0.5, isNormalized = 0, clipBoxes = 0"
    attributes = {
        "EfficientNMS_TRT": "score_threshold = 0.3, iou_threshold = 0.5, max_output_boxes = 30, background_class = -1, "
        "box_coding = 0, score_activation = 0",
        "BatchedNMSDynamic_TRT": batched,
        "TRTBatchedNMS": "num_classes = 5, background_label_id = -1, iou_threshold = 0.5, score_threshold = 0.3, "
        "topk = 1000, keep_topk = 30, is_normalized = 0, clip_boxes = 0, return_index = 0",
    }[operator]
    if operator == "TRTBatchedNMS":
        names, outputs = "dets, labels", "float[] dets, int32[] labels"
    else:
        names = "num_dets, det_boxes, det_scores, det_classes"
        outputs = "int32[] num_dets, float[] det_boxes, float[] det_scores, int32[] det_classes"
    boxes = "all_boxes"
    before = ""
    if operator == "BatchedNMSDynamic_TRT":
        before, boxes = "boxes_wide = Unsqueeze(all_boxes, twos)", "boxes_wide"
    model = exported(f"{before} {names} = {operator}<{attributes}>({boxes}, all_scores)", outputs, batch="B")
    for output in model.graph.output:
        output.type.tensor_type.ClearField("shape")
    path = saved(model)
    guess = guess_config(path)
    assert "its suppression is cut off and done again" in guess.note
    assert (guess.config.nms.max_detections, guess.config.nms.iou_threshold) == (30, 0.5)
    raw = exported("", "float[B,225,4] all_boxes, float[B,225,5] all_scores", batch="B")
    image = np.random.default_rng(0).uniform(0, 1, (2, 3, 32, 32)).astype(np.float32)
    import onnxruntime

    session = onnxruntime.InferenceSession(raw.SerializeToString(), providers=["CPUExecutionProvider"])
    wanted = non_max_suppression(*session.run(None, {"image": image}), guess.config.nms)
    for mode in ("auto", "host", "native"):
        got = Detector.open(path, guess.config, mode)(image)
        np.testing.assert_array_equal(got.num_dets, wanted.num_dets)
        np.testing.assert_allclose(got.image(1)[0], wanted.image(1)[0], atol=1e-4)
    assert wanted.num_dets.min() > 5


POSES = """c_one, c_points = Split<axis = 2>(c, pose_parts) one_score = Sigmoid(c_one)
    points = Reshape(c_points, pose_shape) padded_boxes = Concat<axis = 1>(all_boxes, empty_box)
    padded_scores = Concat<axis = 1>(one_score, empty_score) wide_boxes = Unsqueeze(padded_boxes, twos)
    a_few, labels, kept = TRTBatchedNMS<num_classes = 1, background_label_id = -1, iou_threshold = 0.5,
        score_threshold = 0.3, topk = 2000, keep_topk = 30, is_normalized = 0, clip_boxes = 0, return_index = 1>
        (wide_boxes, padded_scores)
    table = Concat<axis = 2>(padded_boxes, padded_scores) flat_table = Flatten<axis = 2>(table)
    dets_rows = Gather(flat_table, kept) dets_flat = Reshape(dets_rows, five) dets = Reshape(dets_flat, dets_shape)
    flat_points = Flatten<axis = 2>(points) points_rows = Gather(flat_points, kept)
    points_flat = Reshape(points_rows, two_twos) points_kept = Reshape(points_flat, points_shape)
    grid_rows = Gather(grid, kept) grid_wide = Unsqueeze(grid_rows, twos) keypoints_at = Add(points_kept, grid_wide)
    corner = Slice(dets, zeros, twos, twos) corner_wide = Unsqueeze(corner, twos)
    keypoints_two = Add(keypoints_at, corner_wide) points_score = Sigmoid(points_kept)
    one_column = Slice(points_score, zeros, ones, threes) keypoints = Concat<axis = 3>(keypoints_two, one_column)"""
POSE_CONSTANTS = {
    "pose_parts": np.array([1, CLASSES - 1]),
    "pose_shape": np.array([0, CELLS, 2, 2]),
    "empty_box": np.zeros((1, 1, 4), np.float32),
    "empty_score": np.zeros((1, 1, 1), np.float32),
    "five": np.array([-1, 5]),
    "dets_shape": np.array([1, 30, 5]),
    "two_twos": np.array([-1, 2, 2]),
    "points_shape": np.array([1, 30, 2, 2]),
    "grid": np.stack([np.arange(CELLS), np.arange(CELLS)[::-1]], axis=1).astype(np.float32),
    "threes": np.array([3]),
}


def test_poses_of_the_plugin_that_gives_indices_are_those_of_its_rows(saved):
    """As MMDeploy writes RTMO for TensorRT: a row of zeros, keypoints decoded from the kept boxes and grid points."""
    model = exported(POSES, "float[1,30,5] dets, float[1,30,2,3] keypoints", **POSE_CONSTANTS)
    path = saved(model)
    guess = guess_config(path)
    assert "recognised as an export of MMDeploy" in guess.note
    assert guess.config.head.keypoints.names == ("keypoint 0", "keypoint 1")
    assert guess.config.nms.max_detections == 30
    image = np.random.default_rng(0).uniform(0, 1, (1, 3, 32, 32)).astype(np.float32)
    raw = exported(
        POSES.split("padded_boxes")[0],
        "float[1,225,4] all_boxes, float[1,225,1] one_score, float[1,225,2,2] points",
        **POSE_CONSTANTS,
    )
    boxes, scores, points = _run(raw, image)
    wanted = non_max_suppression(boxes, scores, guess.config.nms)
    for mode in ("auto", "host", "native", "onnx"):
        got = Detector.open(path, guess.config, mode)(image)
        count = int(got.num_dets[0, 0])
        assert count == int(wanted.num_dets[0, 0]) > 5
        for box, keypoints in zip(got.image(0)[0], got.parts.keypoints[0, :count], strict=True):
            row = np.abs(boxes[0] - box).max(axis=1).argmin()
            expected = points[0, row] + POSE_CONSTANTS["grid"][row] + box[:2]
            np.testing.assert_allclose(keypoints[:, :2], expected, atol=1e-4)
            np.testing.assert_allclose(keypoints[:, 2], 1 / (1 + np.exp(-points[0, row, :, 0])), atol=1e-5)


def test_keypoints_that_the_configuration_leaves_out_are_not_read(saved):
    path = saved(exported(POSES, "float[1,30,5] dets, float[1,30,2,3] keypoints", **POSE_CONSTANTS))
    config = guess_config(path).config
    boxes_alone = config.model_copy(update={"head": config.head.model_copy(update={"keypoints": None})})
    image = np.zeros((1, 3, 32, 32), np.float32)
    assert Detector.open(path, boxes_alone)(image).parts.keypoints is None
    rotated = config.model_copy(update={"head": config.head.model_copy(update={"rotated": True, "boxes": "cxcywh"})})
    with pytest.raises(ModelError, match="it loses the masks, keypoints or rotated boxes"):
        Detector.open(path, rotated)


def plain(**changes):
    return exported("", "float[1,225,4] all_boxes, float[1,225,5] all_scores", **changes)


def _run(model, value):
    import onnxruntime

    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"image": value})


@pytest.mark.parametrize("form", ["channels last", "own transpose", "whole pixels", "no batch", "half", "rows alone"])
def test_an_input_of_another_form_becomes_one(saved, form):
    model = plain()
    image = np.round(np.random.default_rng(0).uniform(0, 3, (1, 3, 32, 32))).astype(np.float32)
    fed, tolerance = image, 1e-5
    if form in ("channels last", "own transpose"):
        model = exported("", "float[1,225,4] all_boxes, float[1,225,5] all_scores")
        for node in model.graph.node:
            node.input[:] = ["image_first" if name == "image" else name for name in node.input]
        model.graph.node.insert(0, helper.make_node("Transpose", ["image"], ["image_first"], perm=[0, 3, 1, 2]))
        model.graph.input[0].CopyFrom(helper.make_tensor_value_info("image", TensorProto.FLOAT, [1, 32, 32, 3]))
        fed = image.transpose(0, 2, 3, 1)
        if form == "channels last":
            model.graph.node[0].input[0] = "image_scaled"
            model.graph.initializer.append(numpy_helper.from_array(np.float32(1), "unit"))
            model.graph.node.insert(0, helper.make_node("Mul", ["image", "unit"], ["image_scaled"]))
    if form == "whole pixels":
        for node in model.graph.node:
            node.input[:] = ["image_float" if name == "image" else name for name in node.input]
        model.graph.node.insert(0, helper.make_node("Cast", ["image"], ["image_float"], to=TensorProto.FLOAT))
        model.graph.input[0].type.tensor_type.elem_type = TensorProto.UINT8
        fed = image.astype(np.uint8)
    if form == "no batch":
        for node in model.graph.node:
            node.input[:] = ["image_batch" if name == "image" else name for name in node.input]
        model.graph.node.insert(0, helper.make_node("Unsqueeze", ["image", "zeros"], ["image_batch"]))
        model.graph.initializer.append(numpy_helper.from_array(np.array([0]), "zeros"))
        model.graph.input[0].CopyFrom(helper.make_tensor_value_info("image", TensorProto.FLOAT, [3, 32, 32]))
        for output, width in zip(model.graph.output, (4, 5), strict=True):
            model.graph.node.append(helper.make_node("Squeeze", [output.name, "zeros"], [f"{output.name}_one"]))
            output.CopyFrom(helper.make_tensor_value_info(f"{output.name}_one", TensorProto.FLOAT, [225, width]))
        fed = image[0]
    if form == "half":
        for tensor in model.graph.initializer:
            if tensor.data_type == TensorProto.FLOAT:
                tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float16), tensor.name))
        for value in (*model.graph.input, *model.graph.output):
            value.type.tensor_type.elem_type = TensorProto.FLOAT16
        for node in model.graph.node:
            node.input[:] = ["image_half" if name == "image" else name for name in node.input]
        model.graph.node.insert(0, helper.make_node("Cast", ["image"], ["image_half"], to=TensorProto.FLOAT16))
        fed, tolerance = image.astype(np.float16), 0.05
    if form == "rows alone":
        rows = exported("", "float[225,9] rows_alone", reshaped=np.array([-1, 9]))
        rows.graph.node.append(helper.make_node("Reshape", ["rows", "reshaped"], ["rows_alone"]))
        rows.graph.initializer.append(numpy_helper.from_array(np.array([-1, 9]), "reshaped"))
        model = rows
    before = _run(model, fed)
    loaded = load_model(saved(model))
    assert len(changes_of(loaded)) == 1
    if form == "own transpose":  # undone rather than done twice
        orders = [list(each.ints) for node in loaded.graph.node for each in node.attribute if each.name == "perm"]
        assert [0, 3, 1, 2] not in orders
    after = _run(loaded, image)
    for old, new in zip(before, after, strict=True):
        np.testing.assert_allclose(new, old if old.ndim == new.ndim else old[None], atol=tolerance, rtol=1e-3)


LOOP = """<ir_version: 8, opset_import: ["" : 17]>
loop (uint8[1,32,32,3] image) => (float[1,3,32,32] first) <int64 count = {1}, bool start = {1}, float scale = {2}> {
    go = Not(start) again = Not(go)
    last, images = Loop(count, again, scale) <body = each (int64 at, bool before, float factor)
        => (bool after, float factor_after, float[3,32,32] scaled) <int64 unit = {1}> {
        after = Identity(before) factor_after = Add(factor, factor)
        whole = Gather<axis = 0>(image, at) pixels = Cast<to = 1>(whole)
        many = Equal(at, at)
        larger = If(many) <
            then_branch = yes () => (float[32,32,3] product) { product = Mul(pixels, factor_after) },
            else_branch = no () => (float[32,32,3] same) { same = Identity(pixels) }>
        scaled = Transpose<perm = [2,0,1]>(larger)
    }>
    first = Div(images, last)
}"""
"""The beginning of TensorFlow's detectors: one iteration, with a value that is carried on and a result that is kept."""


@pytest.mark.parametrize("count", ["", "Div(seven, seven)", "Clip(seven, , single)"])
def test_a_loop_over_one_image_is_written_out(saved, count):
    text = LOOP
    if count:
        text = text.replace("int64 count = {1}", "int64 seven = {7}, int64 single = {1}")
        text = text.replace("    go = ", f"    count = {count}\n    go = ")
    model = onnx.parser.parse_model(text)
    image = np.random.default_rng(0).integers(0, 256, (1, 32, 32, 3), np.uint8)
    (before,) = _run(model, image)
    loaded = load_model(saved(model))
    assert "Loop" not in {node.op_type for node in loaded.graph.node}
    assert changes_of(loaded)[0] == "the loop over the images of the batch, which has one image, is written out"
    (after,) = _run(loaded, image.transpose(0, 3, 1, 2).astype(np.float32))
    np.testing.assert_array_equal(after, before)
    np.testing.assert_array_equal(after, image.transpose(0, 3, 1, 2))


@pytest.mark.parametrize("change", ["int64 count = {2}", "count of the image"])
def test_other_loops_stay_and_read_the_image_in_its_own_order(saved, change):
    text = LOOP.replace("int64 count = {1}", change if "{" in change else "int64 third = {0}")
    if "{" not in change:
        text = text.replace(
            "    go = ", "    sides = Shape<start = 0, end = 1>(image) count = Squeeze(sides)\n    go = "
        )
    model = onnx.parser.parse_model(text)
    model.graph.output[0].type.tensor_type.shape.dim[0].dim_param = "images"
    if change == "int64 count = {2}":  # each iteration reads the only image
        gather = next(node for node in model.graph.node if node.op_type == "Loop").attribute[0].g
        place = next(node for node in gather.node if node.op_type == "Gather")
        place.input[1] = "unit"
        gather.initializer[0].CopyFrom(numpy_helper.from_array(np.array(0), "unit"))
    image = np.random.default_rng(0).integers(0, 256, (1, 32, 32, 3), np.uint8)
    (before,) = _run(model, image)
    loaded = load_model(saved(model))
    assert "Loop" in {node.op_type for node in loaded.graph.node}
    (after,) = _run(loaded, image.transpose(0, 3, 1, 2).astype(np.float32))
    np.testing.assert_array_equal(after, before)


@pytest.mark.parametrize(
    ("outputs", "what"),
    [
        ("float[1,12] row", "an embedding or classification model"),
        ("float[1,9,32,32] row", "a segmentation or heat map"),
    ],
)
def test_what_is_no_detector_is_named(saved, outputs, what):
    body = "deep = Conv<pads = [1,1,1,1]>(image, w)"
    tail = "row = Identity(deep)" if "9" in outputs else "pooled = GlobalAveragePool(deep) row = Flatten(pooled)"
    width = 9 if "9" in outputs else 12
    model = nets.net(f"(float[1,3,32,32] image) => ({outputs}) {{ {body} {tail} }}", w=nets.normal(width, 3, 3, 3))
    with pytest.raises(ModelError, match=f"is not taken: it is {what}"):
        guess_config(saved(model))


@pytest.mark.parametrize(
    ("shapes", "size", "what"),
    [
        ([(1, 201, 18, 4)], (288, 800), "a lane detection model: its output is 201 places for 4 lanes in 18 rows"),
        (
            [(1, 100, 72, 4), (1, 100, 81, 4), (1, 2, 72, 4), (1, 2, 81, 4)],
            (320, 1600),
            "a lane detection model: its outputs are places of 4 lanes by row and column",
        ),
        ([(1, 192, 78)], (320, 800), "a lane detection model: its output is 192 lines of 72 points"),
        (
            [(1, 1, 80, 80), (1, 4, 80, 80), (1, 128, 80, 80), (1, 2, 80, 80)],
            (320, 320),
            "a tracking model: a map of 128",
        ),
        ([(1, 40, 6625)], (48, 320), "a text recognition model: its output is 40 places with 6625 symbols"),
        ([(1, 1), (1, 2)], (64, 64), "a classification or regression model: its outputs are rows of 1 and 2 numbers"),
    ],
)
def test_models_of_other_tasks_are_named_by_their_outputs(shapes, size, what):
    named = no_detector({}, shapes, size)
    assert named is not None and named[0].startswith(f"it is {what}")


def test_heads_that_are_not_known_are_not_taken_for_other_tasks():
    maps = [(1, 1, 80, 80), (1, 2, 80, 80), (1, 2, 80, 80)]  # CenterNet's
    for shapes in (maps, [(1, 255, 40, 40), (1, 255, 20, 20), (1, 255, 10, 10)], [(1, 2100, 84)], [(1, 100, 91)]):
        assert no_detector({}, shapes, (320, 320)) is None


def test_a_model_of_two_images_is_named(saved):
    body = "small = MaxPool<kernel_shape = [2,2], strides = [2,2]>(search) row = Concat<axis = 1>(template, small)"
    model = nets.net(f"(float[1,3,32,32] template, float[1,3,64,64] search) => (float[1,6,32,32] row) {{ {body} }}")
    with pytest.raises(ModelError, match=r"it reads 2 images at a time \(template, search\), as models for tracking"):
        guess_config(saved(model))


def test_the_task_in_the_metadata_is_believed(saved):
    model = plain()
    helper.set_model_props(model, {"task": "classify"})
    with pytest.raises(ModelError, match=r"a classification model \(task: classify in its metadata\); trtdet takes"):
        guess_config(saved(model))
    helper.set_model_props(model, {"task": "segment"})
    with pytest.raises(ModelError, match=r"head.masks needs the output of the prototypes"):
        guess_config(saved(model))


def test_two_inputs_suggest_no_option_that_is_not_there(saved):
    model = exported(
        "mixed = Mul(all_scores, other)", "float[1,225,4] all_boxes, float[1,225,5] mixed", ", float[1] other"
    )
    with pytest.raises(ConfigError, match=r"has the inputs 'image' \[1, 3, 32, 32\], 'other' \[1\], a single") as error:
        guess_config(saved(model))
    assert "--config" not in str(error.value)


@pytest.mark.parametrize("opset", [11, 17])
def test_an_image_without_a_batch_gets_one_as_the_opset_writes_it(saved, opset):
    model = onnx.parser.parse_model(f"""<ir_version: 7, opset_import: ["" : {opset}]>
        net (float[3,32,32] image) => (float[1024,3] y) {{
            rows = Reshape(image, s) y = Transpose<perm = [1,0]>(rows) }}""")
    model.graph.initializer.append(numpy_helper.from_array(np.array([3, 1024]), "s"))
    image = np.random.default_rng(0).uniform(0, 1, (1, 3, 32, 32)).astype(np.float32)
    (expected,) = _run(model, image[0])
    (found,) = _run(load_model(saved(model)), image)
    np.testing.assert_array_equal(found, expected[None])
