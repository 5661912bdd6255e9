"""A detector of five convolutions, so that a whole build takes a moment."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from trtdet.config import Config, load_config

CLASSES = 3

CONFIG = """
name: tiny
classes: [c0, c1, c2]
input: {size: [16, 16], scale: 0.01, resize: stretch}
head: {decode: boxes, outputs: [boxes, scores], boxes: cxcywh}
nms: {score_threshold: 0.01}
"""


def tiny_detector(seed: int = 0) -> onnx.ModelProto:
    """64 boxes, each side the expectation of a softmax, as in detectors with distribution focal loss."""
    rng = np.random.default_rng(seed)

    def weight(name: str, *shape: int) -> onnx.TensorProto:
        return onnx.numpy_helper.from_array(rng.normal(0, 0.3, shape).astype(np.float32), name)

    channels = CLASSES + 4 * 4
    weights = [
        weight("w0", 8, 3, 3, 3),
        weight("w1", 8, 1, 3, 3),
        weight("w2", 8, 1, 3, 3),
        weight("w3", channels, 8, 1, 1),
        onnx.numpy_helper.from_array(np.arange(4, dtype=np.float32).reshape(1, 4, 1, 1), "bins"),
        onnx.numpy_helper.from_array(np.array([CLASSES, 16], np.int64), "parts"),
        onnx.numpy_helper.from_array(np.array([1, 4, 4, 64], np.int64), "by_side"),
        onnx.numpy_helper.from_array(np.array([1, 4, 64], np.int64), "sides"),
        onnx.numpy_helper.from_array(np.array([1, CLASSES, 64], np.int64), "flat"),
        onnx.numpy_helper.from_array(np.float32(3.0), "stride"),
    ]
    same = {"pads": [1, 1, 1, 1]}
    nodes = [
        helper.make_node("Conv", ["image", "w0"], ["t0"], name="stem", strides=[2, 2], **same),
        helper.make_node("Relu", ["t0"], ["r0"], name="relu_0"),
        helper.make_node("Conv", ["r0", "w1"], ["t1"], name="depthwise_0", group=8, **same),
        helper.make_node("Relu", ["t1"], ["r1"], name="relu_1"),
        helper.make_node("Conv", ["r1", "w2"], ["t2"], name="depthwise_1", group=8, **same),
        helper.make_node("Conv", ["t2", "w3"], ["t3"], name="head"),
        helper.make_node("Split", ["t3", "parts"], ["class_map", "box_map"], name="split", axis=1),
        helper.make_node("Reshape", ["class_map", "flat"], ["class_rows"], name="class_rows"),
        helper.make_node("Sigmoid", ["class_rows"], ["probabilities"], name="sigmoid"),
        helper.make_node("Transpose", ["probabilities"], ["scores"], name="scores_last", perm=[0, 2, 1]),
        helper.make_node("Reshape", ["box_map", "by_side"], ["raw_sides"], name="sides_and_bins"),
        helper.make_node("Transpose", ["raw_sides"], ["bins_first"], name="bins_first", perm=[0, 2, 1, 3]),
        helper.make_node("Softmax", ["bins_first"], ["distribution"], name="softmax", axis=1),
        helper.make_node("Conv", ["distribution", "bins"], ["distances"], name="expectation"),
        helper.make_node("Reshape", ["distances", "sides"], ["four"], name="four"),
        helper.make_node("Mul", ["four", "stride"], ["pixels"], name="pixels"),
        helper.make_node("Transpose", ["pixels"], ["boxes"], name="boxes_last", perm=[0, 2, 1]),
    ]
    graph = helper.make_graph(
        nodes,
        "tiny",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, [1, 3, 16, 16])],
        [
            helper.make_tensor_value_info("boxes", TensorProto.FLOAT, [1, 64, 4]),
            helper.make_tensor_value_info("scores", TensorProto.FLOAT, [1, 64, CLASSES]),
        ],
        weights,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    onnx.checker.check_model(model)
    return model


@dataclass(frozen=True)
class Tiny:
    """The detector as files.

    Attributes:
        model: the ONNX file.
        yaml: its configuration.
        images: a folder of 12 images of noise.
        annotations: their COCO file.
    """

    model: Path
    yaml: Path
    images: Path
    annotations: Path

    @property
    def config(self) -> Config:
        return load_config(str(self.yaml))
