import importlib.util
import re
from collections import Counter
from pathlib import Path
from typing import Any

import nets
import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest
from onnx import TensorProto, helper
from PIL import Image

from trtdet import build
from trtdet.backends import OnnxRunner
from trtdet.calibration import expose
from trtdet.config import Config
from trtdet.detection.plugin_nms import EfficientNms, efficient_nms
from trtdet.detection.suppression import non_max_suppression, sigmoid
from trtdet.errors import ConfigError, ModelError, TrtdetWarning
from trtdet.options import BuildOptions, CalibrationOptions, NmsOptions, PlanOptions
from trtdet.passes import Options, embedded_nms, load_model, rewrite
from trtdet.passes.cut_nms import cut_off
from trtdet.passes.own_suppression import OwnSuppression
from trtdet.runtime.detector import Detector

CLASSES = 3


def configuration(**head: Any) -> Config:
    return nets.configuration("yolov8", (16, 16), CLASSES, input={"scale": 0.01}, **head)


HEAD = """features = Conv<strides = [3,3]>(image, weight) rows = Reshape(features, flat)
    raw_boxes, class_rows = Split<axis = 1>(rows, sizes) moved = Transpose<perm = [0,2,1]>(raw_boxes)
    found_boxes = Abs(moved)"""


def detector(kind: str, classes: int = CLASSES, centre: bool = False, **attributes: Any) -> onnx.ModelProto:
    """A convolution that gives 25 boxes and their scores, with a suppression of its own after it."""
    constants = {"weight": nets.normal(4 + classes, 3, 3, 3, scale=0.4), "flat": np.array([0, 4 + classes, 25])}
    constants |= {"sizes": np.array([4, classes]), "most": np.array([50]), "column": np.array([2])}
    constants |= {"iou": np.array([0.4], np.float32), "floor": np.array([0.3], np.float32)}
    if kind == "efficient":
        given = {"score_threshold": 0.3, "iou_threshold": 0.4, "max_output_boxes": 7, "background_class": -1}
        given |= {"score_activation": 1, "box_coding": int(centre), **attributes}
        listed = ", ".join(f"{name} = {value}" for name, value in given.items())
        body = "logits = Transpose<perm = [0,2,1]>(class_rows)"
        body += f" num, b, s, c = EfficientNMS_TRT<{listed}>(found_boxes, logits)"
        outputs = "int32[] num, float[] b, float[] s, int32[] c"
    else:
        inputs = ", ".join(("found_boxes", "scores_first", "most", "iou", "floor")[: attributes.get("wired", 5)])
        body = f"kept = NonMaxSuppression<center_point_box = {int(centre)}>({inputs})"
        body = f"scores_first = Sigmoid(class_rows) {body} index = Gather<axis = 1>(kept, column)"
        outputs = "int64[] index"
    text = f"(float[B,3,16,16] image) => ({outputs}) {{ {HEAD} {body} }}"
    model = nets.net(text, **{name: value for name, value in constants.items() if re.search(rf"\b{name}\b", text)})
    for output in model.graph.output:
        output.type.tensor_type.ClearField("shape")
    for node in model.graph.node:
        node.name = {"Abs": "abs", "EfficientNMS_TRT": "nms", "NonMaxSuppression": "nms"}.get(node.op_type, node.name)
    return model


IMAGES = np.random.default_rng(1).normal(0, 3, (2, 3, 16, 16)).astype(np.float32)


@pytest.fixture
def saved(tmp_path):
    def save(model: onnx.ModelProto) -> Path:
        onnx.save(model, tmp_path / "model.onnx")
        return tmp_path / "model.onnx"

    return save


def fed(model: onnx.ModelProto) -> tuple[np.ndarray, np.ndarray]:
    """Boxes xyxy and logits (B, N, C) that go into the suppression."""
    graph = onnx.ModelProto()
    graph.CopyFrom(model)
    at = next(index for index, node in enumerate(graph.graph.node) if node.name == "abs")
    del graph.graph.node[at + 1 :], graph.graph.output[:]
    graph.graph.output.extend(
        helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("found_boxes", "class_rows")
    )
    found = OnnxRunner(graph).feed({"image": IMAGES})
    return found["found_boxes"], found["class_rows"].transpose(0, 2, 1)


@pytest.mark.parametrize("centre", [False, True])
def test_an_efficient_nms_is_left_as_it_is_unless_another_is_asked_for(saved, centre):
    model = detector("efficient", centre=centre)
    path, config = saved(model), configuration()
    own = embedded_nms(load_model(path), config)
    assert own is not None and (own.kind, own.name) == ("efficient", "nms")
    left = Detector.open(path, config)
    boxes, logits = fed(model)
    attributes = EfficientNms(0.3, 0.4, 7, score_activation=1, box_coding=int(centre))
    wanted, got = efficient_nms(boxes, logits, attributes), left(IMAGES)
    assert left.nms_mode == "efficient" and left.nms.iou_threshold == pytest.approx(0.4)
    np.testing.assert_array_equal(got.num_dets, wanted.num_dets)
    assert wanted.num_dets.min() > 0
    for index in range(2):
        for mine, theirs in zip(got.image(index), wanted.image(index), strict=True):
            np.testing.assert_allclose(mine, theirs, atol=1e-6)
    corners = np.concatenate([boxes[..., :2] - boxes[..., 2:] / 2, boxes[..., :2] + boxes[..., 2:] / 2], axis=2)
    for where in ("host", "native", "onnx"):
        replaced = Detector.open(path, config, where)
        wanted = non_max_suppression(corners if centre else boxes, sigmoid(logits), config.nms)
        got = replaced(IMAGES)
        assert replaced.nms == config.nms
        np.testing.assert_array_equal(got.num_dets, wanted.num_dets)
        np.testing.assert_allclose(got.image(0)[0], wanted.image(0)[0], atol=1e-5)


@pytest.mark.parametrize("wired", [2, 4, 5])
def test_a_nonmaxsuppression_keeps_its_constant_thresholds_or_is_replaced(saved, wired):
    model = detector("onnx", wired=wired)
    path, config = saved(model), configuration()
    left = Detector.open(path, config)
    assert left.nms_mode == "onnx"
    assert left.nms.iou_threshold == pytest.approx(0.4 if wired > 3 else config.nms.iou_threshold)
    assert left.nms.score_threshold == pytest.approx(0.3 if wired > 4 else config.nms.score_threshold)
    boxes, logits = fed(model)
    for one in (left, Detector.open(path, config, "native"), Detector.open(path, config, "host")):
        wanted, got = non_max_suppression(boxes, sigmoid(logits), one.nms), one(IMAGES)
        np.testing.assert_array_equal(got.num_dets, wanted.num_dets)
        assert wanted.num_dets.min() > 0
        np.testing.assert_allclose(got.image(1)[1], wanted.image(1)[1], atol=1e-6)


def test_rows_of_constants_that_the_kept_indices_pick_are_not_the_boxes():
    model = detector("onnx")
    model.graph.initializer.append(onnx.numpy_helper.from_array(nets.normal(25, 4), "anchors"))
    model.graph.node.append(helper.make_node("Gather", ["anchors", "index"], ["picked"]))
    model.graph.output.append(helper.make_tensor_value_info("picked", TensorProto.FLOAT, None))
    written = rewrite(model, Options(configuration(), "host")).model
    boxes, _ = fed(detector("onnx"))
    np.testing.assert_allclose(OnnxRunner(written)(IMAGES)["boxes"], boxes, atol=1e-5)


def selecting(classes: int, ranked: str, most: int) -> onnx.ModelProto:
    """A detector that suppresses the ten best of its rows, by the scores (1, 25) that ``ranked`` computes."""
    body = f"""scores_of = Sigmoid(class_rows) {ranked} best, places = TopK(row_scores, few)
        scores_first = Unsqueeze(best, middle) places_column = Unsqueeze(places, last)
        wide = Expand(places_column, of_boxes) best_boxes = GatherElements<axis = 1>(found_boxes, wide)
        kept = NonMaxSuppression(best_boxes, scores_first, most, iou, floor) index = Gather<axis = 1>(kept, column)"""
    rows = 4 + classes
    constants = {"weight": nets.normal(rows, 3, 3, 3, scale=0.4), "flat": np.array([0, rows, 25])}
    constants |= {"sizes": np.array([4, classes]), "few": np.array([10]), "middle": np.array([1])}
    constants |= {"last": np.array([-1]), "of_boxes": np.array([1, 10, 4]), "most": np.array([most])}
    constants |= {"column": np.array([2]), "iou": np.array([0.4], np.float32), "floor": np.array([0.3], np.float32)}
    model = nets.net(f"(float[1,3,16,16] image) => (int64[N] index) {{ {HEAD} {body} }}", **constants)
    model.graph.output[0].type.tensor_type.ClearField("shape")
    return model


@pytest.mark.parametrize(("most", "limit"), [(7, 10), (20, 20)])
def test_what_was_selected_before_limits_the_suppression_but_not_below_its_detections(most, limit):
    cut = cut_off(selecting(3, "row_scores = ReduceMax<axes = [1], keepdims = 0>(scores_of)", most))
    assert cut is not None
    assert (cut.thresholds["max_detections"], cut.thresholds["pre_nms_topk"]) == (most, limit)
    assert cut.thresholds["candidates"] == "best-class"


@pytest.mark.parametrize("flatten", ["Flatten", "Flatten<axis = 1>"])
def test_the_scores_of_one_class_may_be_flattened_before_the_best_are_selected(flatten):
    ranked = f"rows_of = Transpose<perm = [0,2,1]>(scores_of) row_scores = {flatten}(rows_of)"
    model = selecting(1, ranked, most=50)
    cut = cut_off(model)
    assert cut is not None
    image = {"image": IMAGES[:1]}
    boxes, scores = OnnxRunner(cut.model).feed(image).values()
    expected = OnnxRunner(expose(model, ["found_boxes", "rows_of"])).feed(image)
    np.testing.assert_array_equal(boxes, expected["found_boxes"])
    np.testing.assert_array_equal(scores, expected["rows_of"])


@pytest.mark.parametrize(
    ("shape", "by_class", "classes"),
    [
        ((1, 25, 3), False, 3),
        ((1, 3, 25), True, 3),
        ((1, 25, "C"), False, None),
        ((3,), False, None),
        (None, True, None),
    ],
)
def test_the_number_of_classes_is_known_where_the_shape_of_scores_is(shape, by_class, classes):
    boxes, scores = gs.Variable("boxes", np.float32, (1, 25, 4)), gs.Variable("scores", np.float32, shape)
    flags = {"by_class": by_class, "centre": False, "logits": False, "background": -1}
    own = OwnSuppression("nms", "onnx", boxes, scores, **flags, thresholds={})
    assert own.classes == classes


@pytest.mark.parametrize(("scores", "expected"), [("logits", 1 / (1 + np.exp(-0.3))), ("probabilities", 0.3)])
def test_a_threshold_of_logits_becomes_a_probability(scores, expected):
    config = nets.configuration("boxes", (16, 16), CLASSES, input={"scale": 0.01}, scores=scores)
    own = embedded_nms(detector("onnx"), config)
    assert own is not None and own.thresholds["score_threshold"] == pytest.approx(expected)


def test_outputs_named_in_the_configuration_cut_it_off_by_themselves():
    model, config = detector("efficient"), configuration(outputs=["rows"])
    assert embedded_nms(model, config) is None
    assert [one.name for one in rewrite(model, Options(config)).model.graph.output] == ["boxes", "scores"]


@pytest.mark.parametrize("kind", ["efficient", "onnx"])
def test_boxes_of_the_contracts_form_are_cut_off_as_they_stand(kind):
    cut = cut_off(detector(kind))
    assert cut is not None
    assert cut.model.graph.output[0].name == "found_boxes"
    assert Counter(node.op_type for node in cut.model.graph.node)["Reshape"] == 1, "that of the network alone"


def test_what_cannot_be_cut_off_says_why_and_what_to_do():
    config = configuration()
    with pytest.raises(ModelError, match="its class 0 is background, which 'classes' does not know; name the raw"):
        embedded_nms(detector("efficient", background_class=0), config)
    with pytest.raises(ModelError, match="gets scores of 1 classes .the class is hidden in an offset.*lists 3"):
        embedded_nms(onnx.shape_inference.infer_shapes(detector("onnx", classes=1)), config)
    double = detector("onnx")
    second = onnx.NodeProto()
    second.CopyFrom(next(node for node in double.graph.node if node.name == "nms"))
    second.name, second.output[0], second.input[3] = "again", "other", "floor"
    double.graph.node.append(second)
    double.graph.output.append(helper.make_tensor_value_info("other", TensorProto.INT64, None))
    with pytest.raises(ModelError, match="embeds several NMS nodes: nms, again; name the tensors before the last node"):
        embedded_nms(double, config)


def test_a_model_without_one_has_none(saved):
    model = detector("onnx")
    assert embedded_nms(model, configuration()) is not None
    del model.graph.node[-2:]
    assert embedded_nms(model, configuration()) is None


def test_its_thresholds_must_be_possible():
    with pytest.raises(ConfigError, match=r"nms.max_detections|max_detections \(5000\)"):
        rewrite(detector("efficient", max_output_boxes=5000), Options(configuration(), "efficient", keep_embedded=True))


@pytest.mark.parametrize("where", ["efficient", "onnx"])
def test_a_model_that_was_rewritten_before_is_taken_like_any_other(saved, where):
    config = configuration()
    once = rewrite(detector("onnx", centre=True), Options(config, where)).model
    for node in once.graph.node:
        node.domain = "" if node.op_type == "EfficientNMS_TRT" else node.domain
    path = saved(once)
    first = Detector.running(rewrite(detector("onnx", centre=True), Options(config, "host")).model, config, "host")(
        IMAGES
    )
    for ways in ("auto", "host", "native", "onnx", "efficient"):
        again = Detector.open(path, config, ways)(IMAGES)
        np.testing.assert_array_equal(again.num_dets, first.num_dets)
        np.testing.assert_allclose(again.image(0)[0], first.image(0)[0], atol=1e-5)


def test_int8_bundles_of_logits_give_the_same_detections_whatever_suppresses(saved, tmp_path):
    path = saved(detector("efficient", centre=True))
    (tmp_path / "images").mkdir()
    rng = np.random.default_rng(2)
    for number in range(4):
        Image.fromarray(rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(tmp_path / "images" / f"{number}.png")
    calibration = CalibrationOptions(images=tmp_path / "images")
    found = {}
    for where in ("host", "native", "onnx", "efficient"):
        options = BuildOptions(
            precision="int8",
            nms=NmsOptions(mode=where),
            backend="onnxruntime",
            calibration=calibration,
            plan=PlanOptions(int8_all=True),
        )  # type: ignore[arg-type]
        bundle = build(path, configuration(), tmp_path / where, options).bundle
        assert bundle.manifest.nms.scores == ("logits" if where == "host" else "probabilities")
        found[where] = Detector.open(bundle.path)(IMAGES[:1])
        assert found[where].num_dets.min() > 10
        np.testing.assert_array_equal(found[where].num_dets, found["host"].num_dets)
        np.testing.assert_allclose(found[where].image(0)[1], found["host"].image(0)[1], atol=1e-6)
    with pytest.warns(TrtdetWarning, match="embedded NMS 'nms' are kept: score_threshold 0.3.*not 0.001"):
        options = BuildOptions(
            precision="int8", backend="onnxruntime", calibration=calibration, plan=PlanOptions(int8_all=True)
        )
        manifest = build(path, configuration(), tmp_path / "own", options).bundle.manifest
    assert (manifest.nms.mode, manifest.nms.embedded, manifest.nms.max_detections) == ("efficient", True, 7)
    if importlib.util.find_spec("tensorrt_rtx") is None:
        pytest.skip("TensorRT-RTX is not installed: that it has no EfficientNMS was not seen")
    with pytest.warns(TrtdetWarning, match="embedded NMS 'nms' are kept"):
        manifest = build(
            path, configuration(), tmp_path / "rtx", BuildOptions(precision="fp32", backend="tensorrt-rtx")
        ).bundle.manifest
    assert manifest.nms.mode != "efficient" and manifest.nms.iou_threshold == pytest.approx(0.4)
