"""A small detector of random weights with masks, keypoints and rotated boxes."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from trtdet.config import Config

SIZE, CELLS = (96, 128), 16
CANDIDATES, CLASSES, MASKS, POINTS = 50, 3, 8, 4
HEADS: dict[str, dict[str, Any]] = {
    "seg": {"masks": True},
    "pose": {"keypoints": {"names": list("abcd"), "skeleton": [[0, 1], [2, 3]]}},
    "obb": {"rotated": True, "boxes": "cxcywh"},
}
HEADS["all"] = {key: value for head in HEADS.values() for key, value in head.items()}
HEADS["boxes"] = {}
WIDTHS = {"mask_coefficients": MASKS, "keypoints": 3 * POINTS, "angles": 1}
"""Columns of each raw output."""


def config_of(task: str) -> Config:
    return Config.model_validate(
        {
            "name": task,
            "classes": ["circle", "square", "star"],
            "input": {"size": SIZE, "scale": 1 / 255},
            "head": {"decode": "boxes", "boxes": "cxcywh", **HEADS[task]},
            "nms": {"score_threshold": 0.3, "iou_threshold": 0.5, "max_detections": 20},
        }
    )


def network(task: str) -> onnx.ModelProto:
    """A network of random weights that sees the levels of 16 x 16 cells, and finds something else in each image."""
    rng = np.random.default_rng(sorted(HEADS).index(task))
    nodes, weights, outputs = [], [], []
    seen = 3 * CELLS * CELLS

    def constant(name: str, value: Any, dtype: Any = np.float32) -> str:
        weights.append(numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def add(kind: str, name: str, *inputs: str, **attributes: Any) -> str:
        nodes.append(helper.make_node(kind, list(inputs), [name], name=name, **attributes))
        return name

    def output(name: str, shape: Sequence[int], low: Any, high: Any) -> None:
        """A sigmoid of random features, between two bounds."""
        matrix = constant(f"{name}/weights", rng.normal(0, 6 / np.sqrt(seen), (seen, int(np.prod(shape)))))
        bias = constant(f"{name}/bias", rng.normal(0, 1, (1, int(np.prod(shape)))))
        features = add("Add", f"{name}/features", add("MatMul", f"{name}/product", "levels", matrix), bias)
        rows = add("Reshape", f"{name}/rows", features, constant(f"{name}/shape", [1, *shape], np.int64))
        span = constant(f"{name}/span", np.subtract(high, low, dtype=np.float32))
        scaled = add("Mul", f"{name}/scaled", add("Sigmoid", f"{name}/share", rows), span)
        add("Add", name, scaled, constant(f"{name}/low", low))
        outputs.append(helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1, *shape]))

    kernel = [SIZE[0] // CELLS, SIZE[1] // CELLS]
    cells = add("AveragePool", "cells", "images", kernel_shape=kernel, strides=kernel)
    flat = add("Flatten", "flat", cells)
    add("Sub", "levels", flat, constant("grey", 0.5))
    high, wide = SIZE
    output("boxes", (CANDIDATES, 4), [0, 0, 5, 5], [wide, high, 60, 40])
    output("scores", (CANDIDATES, CLASSES), 0, 1)
    for name in config_of(task).head.raw_parts:
        if name == "prototypes":
            output(name, (MASKS, high // 4, wide // 4), -1, 1)
            # Smooth, as prototypes are.
            nodes[-1].output[0] = "prototypes/cells"
            add("AveragePool", name, "prototypes/cells", kernel_shape=[5, 5], pads=[2, 2, 2, 2])
        else:
            low, end = {"keypoints": (-5, 140), "angles": (-2, 2)}.get(name, (-1, 1))
            output(name, (CANDIDATES, WIDTHS[name]), low, end)
    if "keypoints" in config_of(task).head.raw_parts:  # scores are 0 to 1
        share = constant("keypoints/units", np.tile(np.array([1, 1, 1 / 140], np.float32), POINTS))
        node = next(node for node in nodes if node.output[0] == "keypoints")
        node.output[0] = "keypoints/pixels"
        add("Clip", "keypoints", add("Mul", "keypoints/shares", "keypoints/pixels", share), constant("least", 0))
    image = helper.make_tensor_value_info("images", onnx.TensorProto.FLOAT, [1, 3, *SIZE])
    graph = helper.make_graph(nodes, task, [image], outputs, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
