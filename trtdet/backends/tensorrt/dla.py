"""Which layers Jetson's DLA takes, by the limits that NVIDIA publishes.

Sources: ``NvInfer.h`` of TensorRT 10.7, where each limit stands beside the layer's setter; for sizes, batch, Div, Pow,
LeakyRelu, ReduceMax and reshaping "DLA Supported Layers and Restrictions" in TensorRT's documentation. The builder's
``can_run_on_DLA`` decides; it also refuses what does not fit into the DLA's memory, which is not known before.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import onnx
import onnx_graphsurgeon as gs

from trtdet.quantization.macs import multiply_adds

SMS = (72, 87)
"""Compute capabilities of the modules with a DLA: Xavier and Orin."""

_LARGEST, _LARGEST_BATCH = 8192, 4096
_FREE = ("Constant", "Identity", "Dropout", "Cast", "QuantizeLinear", "DequantizeLinear")
"""Operators that are folded, or only change the type."""


def has_dla(version: str, sm: int) -> bool:
    """Whether a TensorRT can build for a DLA: up to 10.7, and from 11.4.1 on, where networks are strongly typed.

    Source: "Working with DLA" in the documentation of TensorRT 11.3.0 and 11.4.1.
    """
    numbers = tuple(int(part) for part in version.split(".")[:3])
    return sm in SMS and (numbers[:2] <= (10, 7) or numbers >= (11, 4, 1))


@dataclass(frozen=True)
class _Window:
    """Largest height and width of a kernel or window, and of its padding, stride and dilation; the smallest is 1."""

    kernel: int
    padding: int
    stride: int
    dilation: int = 1

    def problem(self, node: gs.Node, kernel: tuple[int, ...]) -> str:
        """Why the DLA does not take a layer with this kernel; empty if it does."""
        automatic = node.attrs.get("auto_pad", "NOTSET") != "NOTSET"
        limits = {
            "kernel": (kernel, self.kernel),
            "padding": ((0,) if automatic else node.attrs.get("pads", (0,)), self.padding),
            "stride": (node.attrs.get("strides", (1,)), self.stride),
            "dilation": (node.attrs.get("dilations", (1,)), self.dilation),
        }
        for name, (values, most) in limits.items():
            if max(values) > most:
                return f"its {name} is {'x'.join(map(str, values))}, the largest is {most}"
        return ""


_CONVOLUTION = _Window(kernel=32, padding=31, stride=8, dilation=32)
_TRANSPOSED = _Window(kernel=32, padding=0, stride=32)
_POOLING = _Window(kernel=8, padding=7, stride=16)


def _convolution(node: gs.Node) -> str:
    weights, groups = node.inputs[1], node.attrs.get("group", 1)
    while not isinstance(weights, gs.Constant) and weights.inputs and weights.inputs[0].inputs:
        weights = weights.inputs[0].inputs[0]
    if not isinstance(weights, gs.Constant):
        return "its weights are not constant"
    shape, transposed = tuple(weights.shape), node.op == "ConvTranspose"
    if transposed and groups > 1:
        return f"it has {groups} groups, a transposed convolution may have 1"
    problem = (_TRANSPOSED if transposed else _CONVOLUTION).problem(node, shape[2:])
    pads = node.attrs.get("pads", ())
    if not problem and not transposed and any(pad >= shape[2 + side % 2] for side, pad in enumerate(pads)):
        return f"its padding {'x'.join(map(str, pads))} is not less than its kernel"
    return problem


def _resize(node: gs.Node) -> str:
    mode, most = node.attrs.get("mode", "nearest"), {"nearest": 32, "linear": 4}
    coordinates = node.attrs.get("coordinate_transformation_mode", "half_pixel")
    rounding = node.attrs.get("nearest_mode", "round_prefer_floor")
    before, after = node.inputs[0].shape, node.outputs[0].shape
    scales = [size / old for old, size in zip(before, after, strict=True)]
    taken = {("asymmetric", "floor"), ("half_pixel", "round_prefer_floor"), ("half_pixel", "round_prefer_ceil")}
    if mode not in most:
        return f"its mode is {mode}, DLA has nearest and linear"
    if (coordinates, rounding) not in taken if mode == "nearest" else coordinates != "half_pixel":
        return f"{mode} with {coordinates} coordinates" + (f" and {rounding}" if mode == "nearest" else "")
    if scales[:2] != [1, 1] or any(scale != int(scale) or not 1 <= scale <= most[mode] for scale in scales[2:]):
        return f"its scales are {', '.join(f'{scale:g}' for scale in scales)}, DLA takes whole ones up to {most[mode]}"
    return ""


def _slice(node: gs.Node) -> str:
    if not all(isinstance(tensor, gs.Constant) for tensor in node.inputs[1:]):
        return "its bounds are not constant"
    axes = [0, 1, 2, 3]
    if len(node.inputs) > 3 and not node.inputs[3].is_empty():
        axes = [int(axis) % 4 for axis in node.inputs[3].values]
    if len(node.inputs) > 4 and any(step != 1 for step in node.inputs[4].values):
        return f"its steps are {', '.join(str(step) for step in node.inputs[4].values)}, DLA takes 1 alone"
    before, after = node.inputs[0].shape, node.outputs[0].shape
    return "it slices images of the batch" if 0 in axes and before[0] != after[0] else ""


def _simple(node: gs.Node) -> str:
    """The limits of operators with one limit."""
    shape, problem = node.inputs[0].shape, ""
    if node.op == "PRelu" and not isinstance(node.inputs[1], gs.Constant):
        problem = "its slope is not constant"
    elif node.op == "Concat" and len(node.inputs) < 2:
        problem = "it has one input"
    elif node.op == "Concat" and node.attrs["axis"] % 4 != 1:
        problem = f"it concatenates axis {node.attrs['axis']}, DLA takes channels alone"
    elif node.op == "Split" and node.attrs.get("axis", 0) % 4 == 0:
        problem = "it splits the batch"
    elif node.op == "Transpose" and node.attrs.get("perm", [0])[0] != 0:
        problem = "it moves the batch"
    elif node.op == "Reshape":
        beside = (*node.inputs[0].inputs, *(reader for tensor in node.outputs for reader in tensor.outputs))
        other = next((near.op for near in beside if near.op in ("Slice", "Split", "Concat")), "")
        problem = f"a reshaping beside a {other}" if other else ""
    elif node.op == "Softmax":
        axis = node.attrs.get("axis", -1) % 4
        alone = all(size <= 1 for place, size in enumerate(shape) if place not in (0, axis))
        most = _LARGEST if alone else 1024
        if axis == 0:
            problem = "it runs over the batch"
        elif shape[axis] > most:
            problem = f"it runs over {shape[axis]} values, the most are {most}"
    elif node.op.endswith("Pool"):
        problem = _POOLING.problem(node, tuple(node.attrs.get("kernel_shape", ())) or tuple(shape[2:]))
    return problem


_RULES: Mapping[str, Callable[[gs.Node], str]] = {
    **dict.fromkeys(("Conv", "ConvTranspose"), _convolution),
    **dict.fromkeys(("MaxPool", "AveragePool", "GlobalMaxPool", "GlobalAveragePool"), _simple),
    **dict.fromkeys(("Relu", "Sigmoid", "Tanh", "Clip", "LeakyRelu", "Abs", "BatchNormalization", "PRelu"), _simple),
    **dict.fromkeys(("Add", "Sub", "Mul", "Max", "Min", "Div", "Pow", "ReduceMax"), _simple),
    **dict.fromkeys(("Reshape", "Transpose", "Concat", "Split", "Softmax"), _simple),
    "Resize": _resize,
    "Slice": _slice,
}
"""By operator, why a layer of four dimensions is not taken; other operators never are."""


def _shapes_problem(node: gs.Node) -> str:
    for tensor in (*node.inputs, *node.outputs):
        if isinstance(tensor, gs.Constant) or tensor.is_empty():
            continue
        if tensor.shape is None or not all(isinstance(size, int) and size > 0 for size in tensor.shape[1:]):
            return "its sizes are not known when the engine is built"
        if len(tensor.shape) != 4:
            return f"it has {len(tensor.shape)} dimensions, DLA takes 4"
        batch = tensor.shape[0] if isinstance(tensor.shape[0], int) else 1
        if max(tensor.shape[1:]) > _LARGEST or batch > _LARGEST_BATCH:
            sizes = "x".join(map(str, tensor.shape))
            return f"its sizes are {sizes}, the most are {_LARGEST} and {_LARGEST_BATCH} images"
    return ""


@dataclass(frozen=True)
class DlaPlacement:
    """Where the layers of a network that depend on the image run; ``str()`` names what goes to the GPU, and why.

    ``layers`` is their number. ``on_gpu`` has the reason for each that the DLA does not take, by name, and
    ``macs_on_gpu`` is the share of these in the multiply-adds, 0..1.
    """

    layers: int
    on_gpu: Mapping[str, str]
    macs_on_gpu: float

    def __str__(self) -> str:
        if not self.on_gpu:
            return f"the DLA takes all {self.layers} layers"
        reasons: dict[str, list[str]] = {}
        for name, reason in self.on_gpu.items():
            reasons.setdefault(reason, []).append(name)
        groups = sorted(reasons.items(), key=lambda group: -len(group[1]))
        listed = "; ".join(f"{len(names)} like {names[0]}: {reason}" for reason, names in groups)
        return (
            f"{len(self.on_gpu)} of {self.layers} layers, {self.macs_on_gpu:.1%} of the multiply-adds, go to the GPU "
            f"by NVIDIA's list of what a DLA takes: {listed}"
        )


def place_on_dla(model: onnx.ModelProto, in_float32: Collection[str] = ()) -> DlaPlacement:
    """Divides the layers of a network, with the shapes of its tensors, between DLA and GPU.

    The DLA has no FP32: the layers ``in_float32`` run on the GPU.
    """
    graph = gs.import_onnx(model)
    live = {tensor.name for tensor in graph.inputs}
    on_gpu, layers = {}, 0
    for node in graph.nodes:
        if live.isdisjoint(tensor.name for tensor in node.inputs):
            continue
        live.update(tensor.name for tensor in node.outputs)
        if node.op in _FREE:
            continue
        layers += 1
        rule = _RULES.get(node.op)
        problem = f"DLA has no {node.op}" if rule is None else _shapes_problem(node)
        if rule is not None and not problem:
            problem = rule(node)
        if not problem and node.name in in_float32:
            problem = "in FP32, DLA has FP16 and INT8"
        if problem:
            on_gpu[node.name] = problem
    work = multiply_adds(model)
    total = sum(macs.count for macs in work.values())
    moved = sum(macs.count for name, macs in work.items() if name in on_gpu)
    return DlaPlacement(layers, on_gpu, moved / total if total else 0.0)
