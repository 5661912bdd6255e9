"""A detector that is small enough to be built in tests again and again."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from trtdet.config import Config, load_config
from trtdet.data.images import preprocess, read_image
from trtdet.demo.shapes import CLASSES, ShapesSplit
from trtdet.options import BuildOptions, changed
from trtdet.quantization import HeadError
from trtdet.runtime.detector import Detector

SMALL_MODEL = Path(__file__).resolve().parent / "fixtures" / "small.onnx"
"""What ``small_detector()`` makes: ``python tests/models.py`` writes it."""

RCNN = Config.model_validate(
    {
        "name": "rcnn",
        "classes": list(CLASSES),
        "input": {"size": [128, 128], "mean": [123.675, 116.28, 103.53], "std": [58.395, 57.12, 57.375]},
        "head": {"decode": "detections"},
        "nms": "none",
    }
)
"""The configuration of the two-stage models in fixtures/."""

WIDTH = 8
CONVOLUTIONS = 11
DEPTHWISE = 2
SILUS = 5


def small_detector(
    batch: int | str = 1, width: int = WIDTH, activation: Literal["silu", "relu"] = "silu"
) -> onnx.ModelProto:
    """A detector for the configuration ``shapes`` that has learnt nothing.

    Three levels of strides 8, 16 and 32, each with a convolution for boxes and one for objectness and classes; SiLU
    after the five convolutions before these, of which two are depthwise. Its scores are spread as those of a trained
    one, so that thresholds and suppression have something to do.

    Args:
        batch: how many images it takes; a name leaves that open.
        width: channels between its convolutions. With 8, all of them stay in FP16 unless INT8 is asked for; with 16 or
            more, all but the two that halve the size.
        activation: after those five.

    Returns:
        A model of opset 17 from ``images`` float32 (batch, 3, 256, 256) to ``output`` float32 (batch, 1344, 15).
    """
    rng = np.random.default_rng(1)
    nodes: list[onnx.NodeProto] = []
    weights: list[onnx.TensorProto] = []

    def constant(name: str, value: NDArray[np.float32] | NDArray[np.int64]) -> str:
        weights.append(numpy_helper.from_array(value, name))
        return name

    def add(kind: str, name: str, inputs: list[str], **attributes: object) -> str:
        nodes.append(helper.make_node(kind, inputs, [f"{name}_output"], name, **attributes))
        return f"{name}_output"

    def conv(
        name: str, source: str, channels: tuple[int, int], size: int, *, scale: float, **attributes: object
    ) -> str:
        out, into = channels
        shape = (out, into, size, size)
        weight = rng.normal(0, scale / np.sqrt(into * size * size), shape).astype(np.float32)
        bias = rng.normal(0, 0.3, out).astype(np.float32)
        if name.endswith("/boxes/Conv"):
            # About three cells in width and height, so that a few boxes lie on objects.
            bias[2:] += 1
        elif name.startswith("/head"):
            # As in a trained head few cells pass a low threshold, and fewer a high one.
            bias -= 6
        inputs = [source, constant(f"{name}.weight", weight), constant(f"{name}.bias", bias)]
        return add("Conv", name, inputs, kernel_shape=[size, size], **attributes)

    def active(name: str, source: str) -> str:
        if activation == "relu":
            return add("Relu", f"{name}/Relu", [source])
        return add("Mul", f"{name}/Mul", [source, add("Sigmoid", f"{name}/Sigmoid", [source])])

    shape = constant("flat", np.array([0, 15, -1], np.int64))

    def depthwise(name: str, source: str) -> str:
        return conv(name, source, (width, 1), 3, scale=2, group=width, pads=[1, 1, 1, 1])

    # Pixels are 0 to 255.
    level = active("/stem/act", conv("/stem/Conv", "images", (width, 3), 8, scale=0.03, strides=[8, 8]))
    level = active("/depthwise0/act", depthwise("/depthwise0/Conv", level))
    levels = []
    for index in range(3):
        if index:
            down = conv(f"/down{index}/Conv", level, (width, width), 2, scale=2, strides=[2, 2])
            level = active(f"/down{index}/act", down)
        if index == 1:
            level = active("/depthwise1/act", depthwise("/depthwise1/Conv", level))
        boxes = conv(f"/head{index}/boxes/Conv", level, (4, width), 1, scale=0.3)
        scores = add("Sigmoid", f"/head{index}/Sigmoid", [conv(f"/head{index}/Conv", level, (11, width), 1, scale=2)])
        joined = add("Concat", f"/head{index}/Concat", [boxes, scores], axis=1)
        levels.append(add("Reshape", f"/head{index}/Reshape", [joined, shape]))
    cells = add("Concat", "/Concat", levels, axis=2)
    nodes.append(helper.make_node("Transpose", [cells], ["output"], "/Transpose", perm=[0, 2, 1]))
    graph = helper.make_graph(
        nodes,
        "small",
        [helper.make_tensor_value_info("images", TensorProto.FLOAT, [batch, 3, 256, 256])],
        [helper.make_tensor_value_info("output", TensorProto.FLOAT, [batch, 1344, 15])],
        weights,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    return model


def for_onnxruntime(**values: Any) -> BuildOptions:
    """Options of a build for onnxruntime, each by the last part of its name."""
    return changed(BuildOptions(backend="onnxruntime"), **values)


def own_labels(split: ShapesSplit, place: Path, model: Path = SMALL_MODEL) -> Path:
    """Annotations for the images of a split that say what the detector itself finds: in float it scores all or nearly
    all of mAP, and every other form of it that scores less finds something else.

    Args:
        split: its images.
        place: the file that is written.
        model: the detector, for the configuration ``shapes``.

    Returns:
        The file.
    """
    document = json.loads(split.annotations.read_text())
    detector = Detector.open(model, load_config("shapes"), "host")
    document["annotations"] = []
    for image in document["images"]:
        inputs, placement = preprocess(read_image(split.images / image["file_name"]), detector.input)
        boxes, scores, classes = detector(inputs[None]).image(0)
        rows = zip(placement.to_image(boxes).astype(float), scores, classes, strict=True)
        for (x1, y1, x2, y2), score, label in rows:
            if score > 0.1:
                document["annotations"].append(
                    {
                        "id": len(document["annotations"]) + 1,
                        "image_id": image["id"],
                        "category_id": document["categories"][int(label)]["id"],
                        "bbox": [x1, y1, x2 - x1, y2 - y1],
                        "area": (x2 - x1) * (y2 - y1),
                        "iscrowd": 0,
                    }
                )
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(json.dumps(document))
    return place


def head_error(*by_image: float, weight: float = 0.9) -> HeadError:
    """Of a model that is off by so much, up to the weight, on the one detection of each image."""
    error, box = HeadError(), np.array([[0, 0, 10, 10]], np.float32)
    for off in by_image:
        scores = np.array([[weight]], np.float32)
        error.update((box, scores), (box, scores - np.float32(off)))
    return error


def judged_by(*distances: float, images: int = 2, weight: float = 0.9) -> Callable[..., list[HeadError]]:
    """Stands in for the gate's measuring: the errors of the models that it is given, equal on every image.

    Models beyond these have the last of them.
    """

    def judged(_: object, models: Sequence[object]) -> list[HeadError]:
        known = [*distances[: len(models)], *[distances[-1]] * (len(models) - len(distances))]
        return [head_error(*[distance] * images, weight=weight) for distance in known]

    return judged


if __name__ == "__main__":
    onnx.save(small_detector(), SMALL_MODEL)
