"""The service's detections against Python's on real photographs, for every family and way of suppression.

They are computed by the service itself with onnxruntime, and replayed from a recording.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from serving import ONNXRUNTIME, Server, check, pictured

from service.tests.record import record
from trtdet.building import build
from trtdet.bundle import Bundle
from trtdet.config import load_config
from trtdet.data import CocoDataset, evenly
from trtdet.evaluation.metrics import CocoMetric
from trtdet.options import BuildOptions, CalibrationOptions, NmsOptions, changed

IMAGES = 40
SCORED = 40


def as_yolov8(model: onnx.ModelProto) -> onnx.ModelProto:
    """YOLOv5's (B, N, 5 + C) as YOLOv8 has it, (B, 4 + C, N)."""
    _split(model)
    _add(model, "Concat", ["own_boxes", "own_scores"], "rows", axis=2)
    _add(model, "Transpose", ["rows"], "transposed", perm=[0, 2, 1])
    return _ending_with(model, {"transposed": (1, 84, 25200)})


def as_boxes(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same as two outputs, the scores as logits."""
    _split(model)
    for name, value in {"one": 1.0, "least": 1e-7, "most": 1 - 1e-6}.items():
        _constant(model, name, np.array(value, np.float32))
    _add(model, "Clip", ["own_scores", "least", "most"], "p")
    _add(model, "Sub", ["one", "p"], "q")
    _add(model, "Div", ["p", "q"], "odds")
    _add(model, "Log", ["odds"], "class_logits")
    return _ending_with(model, {"own_boxes": (1, 25200, 4), "class_logits": (1, 25200, 80)})


def as_detections(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same as rows of a box, its highest score and that score's class."""
    _split(model)
    _constant(model, "one_score", np.array([1]))
    model.graph.node.append(helper.make_node("TopK", ["own_scores", "one_score"], ["score", "index"], axis=2))
    _add(model, "Cast", ["index"], "class", to=TensorProto.FLOAT)
    _add(model, "Concat", ["own_boxes", "score", "class"], "rows", axis=2)
    return _ending_with(model, {"rows": (1, 25200, 6)})


def _split(model: onnx.ModelProto) -> None:
    source = model.graph.output[0].name
    _constant(model, "sizes", np.array([4, 1, 80]))
    parts = ["own_boxes", "objectness", "classes"]
    model.graph.node.append(helper.make_node("Split", [source, "sizes"], parts, axis=2))
    _add(model, "Mul", ["classes", "objectness"], "own_scores")


def _add(model: onnx.ModelProto, kind: str, inputs: list[str], output: str, **attributes: Any) -> None:
    model.graph.node.append(helper.make_node(kind, inputs, [output], **attributes))


def _constant(model: onnx.ModelProto, name: str, value: NDArray[Any]) -> None:
    model.graph.initializer.append(numpy_helper.from_array(value, name))


def _ending_with(model: onnx.ModelProto, outputs: dict[str, tuple[int, ...]]) -> onnx.ModelProto:
    del model.graph.output[:]
    model.graph.output.extend(
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in outputs.items()
    )
    return model


@dataclass(frozen=True)
class Family:
    """A real model, as it is or in another form, and how its configuration differs from a shipped one."""

    model: str
    config: str
    nms: str
    form: Callable[[onnx.ModelProto], onnx.ModelProto] | None = None
    head: tuple[tuple[str, Any], ...] = ()


FAMILIES = {
    "yolox": Family("yolox_nano", "yolox", "host"),
    "yolox-native": Family("yolox_nano", "yolox", "native"),
    "yolox-efficient": Family("yolox_nano", "yolox", "efficient"),
    "yolov5": Family("yolov5n", "yolov5", "host"),
    "yolov8": Family("yolov5n", "yolov8", "host", as_yolov8),
    "boxes": Family(
        "yolov5n", "yolov5", "host", as_boxes, (("decode", "boxes"), ("boxes", "cxcywh"), ("scores", "logits"))
    ),
    "detections": Family("yolov5n", "yolov5", "host", as_detections, (("decode", "detections"), ("boxes", "cxcywh"))),
    "dfl": Family("picodet_s", "dfl", "host"),
    "dfl-onnx": Family("picodet_s", "dfl", "onnx"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_the_service_finds_what_python_finds(name, program, shared_data, tmp_path):
    family = FAMILIES[name]
    model = shared_data / "models" / f"{family.model}.onnx"
    if family.form is not None:
        onnx.save(family.form(onnx.load(model)), tmp_path / "model.onnx")
        model = tmp_path / "model.onnx"
    config = load_config(family.config)
    config = config.model_copy(update={"head": config.head.model_copy(update=dict(family.head))})
    bundle = tmp_path / "bundle"
    build(model, config, bundle, BuildOptions(precision="fp32", backend="onnxruntime", nms=NmsOptions(mode=family.nms)))
    files = evenly(sorted((shared_data / "coco" / "val2017").glob("*.jpg")), IMAGES)
    record(bundle, files, tmp_path / "recording")
    content_hash, total = Bundle(bundle).manifest.content_hash, 0
    path = program("serve/trtdet-serve")
    with (
        Server(path, [bundle, "--recording", tmp_path / "recording"], tmp_path / "replaying") as replaying,
        Server(path, [bundle, "--library-folder", ONNXRUNTIME], tmp_path / "computing") as computing,
    ):
        for picture in pictured(bundle, files):
            for server in (replaying, computing):
                answer = server.detect(picture.data)
                assert answer.status == 200, answer.body
                check(answer.json["images"][0], picture, content_hash)
            total += len(picture.found[content_hash].scores)
    assert len(files) == IMAGES
    assert total > 20 * IMAGES


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "int8"])
@pytest.mark.parametrize("name", ["yolox", "yolov5", "dfl"])
def test_the_service_scores_what_python_scores(name, precision, start, shared_data, tmp_path):
    """Photographs, each sent to the service: the same boxes to 0.01 pixels and the same mAP to 0.01 points."""
    family, bundle = FAMILIES[name], tmp_path / "bundle"
    config = load_config(family.config)
    calibration = CalibrationOptions(images=shared_data / "coco" / "train2017", num_images=32, check_input=False)
    options = BuildOptions(precision=precision, backend="onnxruntime")
    if precision == "int8":
        options = changed(options, calibration=calibration, effort="none", guard="off")
    build(shared_data / "models" / f"{family.model}.onnx", config, bundle, options)
    dataset = CocoDataset.load(
        shared_data / "coco" / "annotations" / "instances_val2017.json",
        shared_data / "coco" / "val2017",
        config.classes,
    ).first(SCORED)
    content_hash = Bundle(bundle).manifest.content_hash
    ours, service = CocoMetric(dataset), CocoMetric(dataset)
    with start(bundle, "--precision", "built") as server:  # as Python runs it
        pictures = pictured(bundle, [image.path for image in dataset.images])
        for image, picture in zip(dataset.images, pictures, strict=True):
            found = picture.found[content_hash]
            answer = server.detect(picture.data).json["images"][0]
            check(answer, picture, content_hash)
            rows = answer["detections"]
            boxes = np.array([row["box"] for row in rows], np.float32).reshape(-1, 4)
            classes = np.array([row["class"] for row in rows], np.int32)
            service.update(image.id, boxes, np.array([row["score"] for row in rows], np.float32), classes)
            ours.update(image.id, found.boxes, found.scores, found.classes)
    assert len(dataset.images) == SCORED
    wanted, got = ours.compute().map, service.compute().map
    print(f"{name} {precision}: mAP {100 * got:.4f} in C++, {100 * wanted:.4f} in Python")
    assert 100 * wanted > 5
    assert abs(100 * got - 100 * wanted) <= 0.01
