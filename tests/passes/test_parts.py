"""Masks, keypoints and rotated boxes in the graph, against the NumPy reference."""

from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from trtdet.config import Config
from trtdet.detection.heads import decode_all
from trtdet.detection.suppression import non_max_suppression
from trtdet.errors import ConfigError, ModelError
from trtdet.passes import Options, decoded, rewrite
from trtdet.runtime.detector import Detector

FOLDER = Path(__file__).parent.parent / "fixtures" / "ultralytics_tasks"
SIZE = (96, 128)
PARTS = {
    "seg": {"masks": True},
    "pose": {"keypoints": {"names": ["a", "b", "c", "d"]}},
    "obb": {"rotated": True},
}
OUTPUTS = {"seg": ["mask_coefficients", "prototypes"], "pose": ["keypoints"], "obb": ["rotated_boxes"]}
IMAGE = np.zeros((1, 3, *SIZE), np.float32)


def model_of(arrays):
    """A model whose outputs are these arrays for a black image, by name."""
    nodes = [helper.make_node("ReduceMax", ["images"], ["zero"], keepdims=0)]
    outputs, weights = [], []
    for name, array in arrays.items():
        weights.append(numpy_helper.from_array(array, f"{name}/values"))
        nodes.append(helper.make_node("Add", [f"{name}/values", "zero"], [name], name=name))
        outputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, array.shape))
    image = helper.make_tensor_value_info("images", TensorProto.FLOAT, IMAGE.shape)
    graph = helper.make_graph(nodes, "constant", [image], outputs, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def config_of(head, classes=3, **nms):
    return Config.model_validate(
        {
            "name": "parts",
            "classes": [str(index) for index in range(classes)],
            "input": {"size": SIZE},
            "head": head,
            "nms": {"score_threshold": 0.05, "iou_threshold": 0.6, "max_detections": 40, **nms},
        }
    )


def recorded(family, task):
    with np.load(FOLDER / f"{family}-{task}.npz") as file:
        arrays = {name: file[name] for name in ("output0", "output1") if name in file}
    head = {"decode": "yolov8", **PARTS[task]}
    if family == "yolo26":
        head |= {"decode": "detections", "boxes": "cxcywh" if task == "obb" else "xyxy"}
        return arrays, config_of(head, iou_threshold=1.0)
    return arrays, config_of(head)


def check(arrays, config, mode, names):
    """Compares a rewritten model with the reference; returns its outputs."""
    boxes, scores, parts = decode_all(arrays, config)
    expected = non_max_suppression(boxes, scores, config.nms, parts=parts)
    rewritten = rewrite(model_of(arrays), Options(config, nms=mode))
    outputs = [output.name for output in rewritten.model.graph.output]
    assert outputs == [*(("boxes", "scores") if mode == "host" else ("num_dets", "boxes", "scores", "classes")), *names]
    found = Detector.running(rewritten.model, rewritten.config, mode)(IMAGE)
    count = int(expected.num_dets[0, 0])
    assert found.num_dets.tolist() == [[count]] and count > 3
    for mine, theirs in zip(found.image(0), expected.image(0), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-4)
    ours, reference = found.image_parts(0).items(), expected.image_parts(0).items()
    assert list(ours) == list(reference) == names
    for name, value in reference.items():
        assert ours[name].shape == value.shape
        np.testing.assert_allclose(ours[name], value, rtol=1e-4, atol=1e-4)
    return rewritten


@pytest.mark.parametrize("mode", ["host", "native", "onnx"])
@pytest.mark.parametrize("task", list(PARTS))
@pytest.mark.parametrize("family", ["yolov8", "yolo26"])
def test_the_graph_gives_what_the_reference_gives(family, task, mode):
    arrays, config = recorded(family, task)
    if mode == "onnx" and task == "obb" and config.nms.suppresses:
        with pytest.raises(ConfigError, match="--nms onnx compares upright boxes"):
            rewrite(model_of(arrays), Options(config, nms=mode))
        return
    check(arrays, config, mode, OUTPUTS[task])


@pytest.mark.parametrize("task", list(PARTS))
def test_fewer_boxes_than_detections_are_padded(task):
    arrays, config = recorded("yolov8", task)
    few = {name: array[..., :30] if name == "output0" else array for name, array in arrays.items()}
    rewritten = check(few, config.with_nms(candidates="best-class"), "native", OUTPUTS[task])
    sizes = {o.name: [d.dim_value for d in o.type.tensor_type.shape.dim] for o in rewritten.model.graph.output}
    assert all(sizes[name][1] == 40 for name in sizes if name not in ("num_dets", "prototypes"))


@pytest.mark.parametrize("task", list(PARTS))
def test_tensors_of_all_boxes_have_names_of_their_own(task):
    arrays, config = recorded("yolov8", task)
    for mode in ("host", "native"):
        rewritten = rewrite(model_of(arrays), Options(config, nms=mode))
        tensors = {name for node in rewritten.model.graph.node for name in node.output}
        assert set(decoded(mode, config).names) <= tensors


@pytest.mark.parametrize("task", list(PARTS))
def test_efficient_nms_is_refused(task):
    arrays, config = recorded("yolov8", task)
    with pytest.raises(ConfigError, match="does not say which boxes it kept.*; choose --nms native or host"):
        rewrite(model_of(arrays), Options(config, nms="efficient"))


@pytest.mark.parametrize("mode", ["host", "native"])
def test_yolov5_has_its_masks_behind_the_classes(mode):
    rng = np.random.default_rng(1)
    rows = rng.uniform(0, 1, (1, 60, 5 + 3 + 8)).astype(np.float32)
    rows[..., :4] = rows[..., :4] * 60 + 10
    arrays = {"output0": rows, "output1": rng.normal(size=(1, 8, 24, 32)).astype(np.float32)}
    check(arrays, config_of({"decode": "yolov5", "masks": True}), mode, OUTPUTS["seg"])


@pytest.mark.parametrize("mode", ["host", "native"])
@pytest.mark.parametrize("units", ["pixels", "relative"])
@pytest.mark.parametrize("columns", [2, 3])
def test_keypoints_without_scores_get_ones(mode, units, columns):
    rng = np.random.default_rng(2)
    low = rng.uniform(0, 0.6, (1, 50, 2))
    boxes = np.concatenate([low, low + rng.uniform(0.1, 0.3, (1, 50, 2))], axis=-1).astype(np.float32)
    factor = 1 if units == "relative" else 100
    arrays = {
        "b": boxes * np.float32(factor),
        "s": rng.uniform(0, 1, (1, 50, 3)).astype(np.float32),
        "k": rng.uniform(0, 1, (1, 50, 5 * columns)).astype(np.float32),
    }
    head = {"decode": "boxes", "units": units, "keypoints": {"names": list("abcde")}}
    check(arrays, config_of(head), mode, ["keypoints"])
    keypoints = decode_all(arrays, config_of(head))[2].keypoints
    assert keypoints is not None and keypoints.shape == (1, 50, 5, 3)
    assert (keypoints[..., 2] == 1).all() == (columns == 2)
    assert keypoints[..., 0].max() > 100 if units == "relative" else keypoints[..., 0].max() <= 1


@pytest.mark.parametrize("mode", ["host", "native"])
def test_all_parts_at_once_by_expressions(mode):
    rng = np.random.default_rng(3)
    arrays = {
        "raw": np.concatenate(
            [rng.uniform(20, 80, (1, 40, 4)), rng.uniform(0, 1, (1, 40, 1 + 4 + 6 + 2))], axis=-1
        ).astype(np.float32),
        "maps": rng.normal(size=(1, 6, 24, 32)).astype(np.float32),
    }
    head = {
        "decode": "boxes",
        "boxes": "cxcywh",
        "masks": True,
        "keypoints": {"names": ["a"]},
        "rotated": True,
        "compute": {
            "boxes": "raw[..., :4]",
            "scores": "raw[..., 5:8]",
            "mask_coefficients": "raw[..., 9:15] - 0.5",
            "prototypes": "maps",
            "keypoints": "raw[..., 15:17] * 100",
            "angles": "raw[..., 4:5]",
        },
    }
    check(arrays, config_of(head), mode, [*OUTPUTS["seg"], "keypoints", "rotated_boxes"])


@pytest.mark.parametrize(
    ("task", "change", "words"),
    [
        ("seg", {"output1": None}, "head.masks needs the output of the prototypes"),
        ("seg", {"classes": 4}, "is 39 channels; 40 were expected: 8 of boxes and classes \\+ 32 mask_coefficients"),
        ("pose", {"names": ["a", "b"]}, "19 channels; 13 were expected: 7 of boxes and classes \\+ 6 keypoints"),
        ("obb", {"plain": True}, "that is 8 channels; decode rule 'yolov8' expects"),
        ("seg", {"plain": True}, "'output1' has shape .* expects three dimensions"),
    ],
)
def test_outputs_that_do_not_fit_are_named(task, change, words):
    arrays, _ = recorded("yolov8", task)
    arrays = {name: array for name, array in arrays.items() if name not in change}
    parts = {} if "plain" in change else dict(PARTS[task])
    if "names" in change:
        parts["keypoints"] = {"names": change["names"]}
    config = config_of({"decode": "yolov8", **parts}, classes=change.get("classes", 3))
    with pytest.raises(ModelError, match=words):
        rewrite(model_of(arrays), Options(config))
    with pytest.raises(ModelError, match=words):
        decode_all(arrays, config)
