"""The service's detections against Python's on real photographs, for every family and way of suppression."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from serving import Picture, Server, check, find

from trtdet.bundle import Bundle
from trtdet.config import load_config
from trtdet.data import evenly
from trtdet.data.images import read_image
from trtdet.pipeline import BuildOptions, build
from trtdet.runtime.detector import Detector
from trtdet.runtime.recordings import record

IMAGES = 40


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
    "yolov5": Family("yolov5n", "yolov5", "host"),
    "yolov8": Family("yolov5n", "yolov8", "host", as_yolov8),
    "boxes": Family(
        "yolov5n", "yolov5", "host", as_boxes, (("decode", "boxes"), ("boxes", "cxcywh"), ("scores", "logits"))
    ),
    "dfl": Family("picodet_s", "dfl", "host"),
    "dfl-onnx": Family("picodet_s", "dfl", "onnx"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_the_service_finds_what_python_finds(
    name: str, program: Callable[[str], Path], shared_data: Path, tmp_path: Path
) -> None:
    family = FAMILIES[name]
    model = shared_data / "models" / f"{family.model}.onnx"
    if family.form is not None:
        onnx.save(family.form(onnx.load(model)), tmp_path / "model.onnx")
        model = tmp_path / "model.onnx"
    config = load_config(family.config)
    config = config.model_copy(update={"head": config.head.model_copy(update=dict(family.head))})
    bundle = tmp_path / "bundle"
    build(model, config, bundle, BuildOptions("fp32", backend="onnxruntime", nms=family.nms))
    files = evenly(sorted((shared_data / "coco" / "val2017").glob("*.jpg")), IMAGES)
    record(bundle, files, tmp_path / "recording")
    detector, content_hash, total = Detector.open(bundle), Bundle(bundle).manifest.content_hash, 0
    with Server(
        program("serve/trtdet-serve"), [bundle, "--recording", tmp_path / "recording"], tmp_path / "server"
    ) as server:
        for file in files:
            expected = find(detector, file)
            picture = Picture(file, file.read_bytes(), *read_image(file).shape[1::-1], {content_hash: expected})
            answer = server.detect(picture.data)
            assert answer.status == 200, answer.body
            check(answer.json["images"][0], picture, content_hash)
            total += len(expected.scores)
    assert len(files) == IMAGES
    assert total > 20 * IMAGES
