"""Small networks with the outputs of Ultralytics' exports for masks, keypoints and rotated boxes, with random weights.

They detect something in most pictures of :mod:`cards`, but nothing that is meant.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from benchmarks.cards import CLASSES, POINTS, SIZE

TASKS = {"seg": "segment", "pose": "pose", "obb": "obb"}
MASKS, STRIDE = 8, 8


def network(task: str, seed: int = 0) -> onnx.ModelProto:
    """A network of four convolutions and its head, 320 cells at stride 8."""
    rng = np.random.default_rng(seed)
    rows, columns = SIZE[0] // STRIDE, SIZE[1] // STRIDE
    extra = {"seg": MASKS, "pose": 3 * len(POINTS), "obb": 1}[task]
    nodes: list[onnx.NodeProto] = []
    weights: dict[str, Any] = {}

    def node(op: str, inputs: list[str], output: str, **attributes: Any) -> str:
        nodes.append(helper.make_node(op, inputs, [output], output, **attributes))
        return output

    def conv(x: str, name: str, inputs: int, outputs: int, size: int = 3, stride: int = 1, scale: float = 1.6) -> str:
        weights[f"{name}/w"] = rng.normal(0, scale / np.sqrt(inputs * size * size), (outputs, inputs, size, size))
        weights[f"{name}/b"] = rng.normal(0, 0.1, outputs)
        pads = [size // 2] * 4
        return node("Conv", [x, f"{name}/w", f"{name}/b"], name, pads=pads, strides=[stride, stride])

    def constant(name: str, value: Any, dtype: Any = np.float64) -> str:
        weights[name] = np.asarray(value, dtype)
        return name

    x = node("Relu", [conv("images", "stem", 3, 16, stride=4, scale=4.0)], "stem/relu")
    deep = node("Relu", [conv(x, "down", 16, 32, stride=2)], "down/relu")
    deep = node("Relu", [conv(deep, "body", 32, 32)], "body/relu")
    raw = conv(deep, "head", 32, 4 + len(CLASSES) + extra, size=1)
    shape = constant("shape", [0, 4 + len(CLASSES) + extra, rows * columns], np.int64)
    flat = node("Reshape", [raw, shape], "flat")
    sizes = constant("sizes", [2, 2, len(CLASSES), extra], np.int64)
    parts = ["offset", "side", "logit", "extra"]
    nodes.append(helper.make_node("Split", [flat, sizes], parts, "split", axis=1))
    y, x0 = np.mgrid[:rows, :columns]
    grid = constant("grid", (np.stack([x0, y]).reshape(1, 2, -1) + 0.5) * STRIDE)
    centre = node("Add", [node("Mul", ["offset", constant("eight", 8.0)], "moved"), grid], "centre")
    side = node(
        "Add", [node("Mul", [node("Sigmoid", ["side"], "share"), constant("wide", 60.0)], "long"), "eight"], "size"
    )
    shifted = node("Sub", ["logit", constant("rare", 2.5)], "shifted")
    score = node("Sigmoid", [shifted], "score")
    last = "extra"
    if task == "pose":
        last = _points(node, constant, grid)
    elif task == "obb":
        last = node(
            "Mul",
            [node("Sub", [node("Sigmoid", ["extra"], "turn"), constant("quarter", 0.25)], "t"), constant("pi", np.pi)],
            "angle",
        )
    outputs = [node("Concat", [centre, side, score, last], "output0", axis=1)]
    shapes = [[1, 4 + len(CLASSES) + extra, rows * columns]]
    if task == "seg":
        outputs.append(conv(x, "output1", 16, MASKS, scale=2.0))
        shapes.append([1, MASKS, SIZE[0] // 4, SIZE[1] // 4])
    graph = helper.make_graph(
        nodes,
        task,
        [helper.make_tensor_value_info("images", TensorProto.FLOAT, [1, 3, *SIZE])],
        [helper.make_tensor_value_info(*pair) for pair in zip(outputs, [TensorProto.FLOAT] * 2, shapes, strict=False)],
        [
            numpy_helper.from_array(value.astype(np.float32) if value.dtype == np.float64 else value, name)
            for name, value in weights.items()
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    names = dict(enumerate(CLASSES))
    notes = {"author": "Ultralytics", "task": TASKS[task], "names": str(names), "imgsz": str(list(SIZE))}
    helper.set_model_props(model, notes | ({"kpt_shape": f"[{len(POINTS)}, 3]"} if task == "pose" else {}))
    onnx.checker.check_model(model)
    return model


def _points(node: Any, constant: Any, grid: str) -> str:
    """Keypoints around the cells, with scores."""
    count = len(POINTS)
    apart = node("Reshape", ["extra", constant("apart", [0, count, 3, -1], np.int64)], "points")
    nodes = ["xy", "seen"]
    split = node(
        "Slice", [apart, *(constant(n, [v], np.int64) for n, v in (("p0", 0), ("p2", 2), ("ax", 2)))], nodes[0]
    )
    moved = node("Add", [node("Mul", [split, "eight"], "near"), grid], "placed")
    visible = node("Slice", [apart, "p2", constant("p3", [3], np.int64), "ax"], nodes[1])
    both = node("Concat", [moved, node("Sigmoid", [visible], "visible")], "both", axis=2)
    return str(node("Reshape", [both, constant("joined", [0, 3 * count, -1], np.int64)], "keypoints"))


def save(folder: Path, task: str) -> Path:
    path = folder / f"cards-{task}.onnx"
    onnx.save(network(task), path)
    return path
