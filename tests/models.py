"""A detector that is small enough to be built in tests again and again."""

from __future__ import annotations

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

WIDTH = 8
CONVOLUTIONS = 10
SILUS = 4


def small_detector(batch: int | str = 1) -> onnx.ModelProto:
    """A detector for the configuration ``shapes`` that has learnt nothing.

    Three levels of strides 8, 16 and 32, each with a convolution for boxes and one for objectness and classes; SiLU
    after the four convolutions before these, of which one is depthwise. Its scores are spread as those of a trained
    one, so that thresholds and suppression have something to do.

    Args:
        batch: how many images it takes; a name leaves that open.

    Returns:
        A model of opset 17 from ``images`` float32 (batch, 3, 256, 256) to ``output`` float32 (batch, 1344, 15).
    """
    rng = np.random.default_rng(6)
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

    def silu(name: str, source: str) -> str:
        return add("Mul", f"{name}/Mul", [source, add("Sigmoid", f"{name}/Sigmoid", [source])])

    shape = constant("flat", np.array([0, 15, -1], np.int64))
    # Pixels are 0 to 255.
    level = silu("/stem/act", conv("/stem/Conv", "images", (WIDTH, 3), 8, scale=0.03, strides=[8, 8]))
    level = silu(
        "/depthwise/act", conv("/depthwise/Conv", level, (WIDTH, 1), 3, scale=2, group=WIDTH, pads=[1, 1, 1, 1])
    )
    levels = []
    for index in range(3):
        if index:
            down = conv(f"/down{index}/Conv", level, (WIDTH, WIDTH), 2, scale=2, strides=[2, 2])
            level = silu(f"/down{index}/act", down)
        boxes = conv(f"/head{index}/boxes/Conv", level, (4, WIDTH), 1, scale=0.3)
        scores = add("Sigmoid", f"/head{index}/Sigmoid", [conv(f"/head{index}/Conv", level, (11, WIDTH), 1, scale=3)])
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
