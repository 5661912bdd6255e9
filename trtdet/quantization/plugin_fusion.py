"""Conv -> TRT_SiLU -> Mul -> Add -> QuantizeLinear -> TRT_SiLU between INT8 and INT8

In a graph with Q/DQ pairs an activation of the plugin library absorbs its neighbours:

- behind it: channel map and step become its ``factor`` and ``offset``, and it writes INT8;
- before it: an INT8 convolution's output has one step per channel, ``step * r_c``. ``1 / r_c`` goes exactly into the
  convolution's weight scales and bias, so its output needs one step, and ``input_scale`` restores the channels.

No other node may read the float tensors. If a sum reads an activation's output, the activation writes float, with the
reason. A Pad with zeros before Q moves before the activation, since both give 0 for 0. Before a Concat each input is
mapped and quantised separately, with the same result.

Only DequantizeLinear and the activations read INT8 tensors: the parsers of TensorRT 10 and later list neither Pad nor
Concat for INT8 (onnx-tensorrt, docs/operators.md). So both stand between a DequantizeLinear and a QuantizeLinear of one
step, which keep every integer and which TensorRT may run in INT8.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from numpy.typing import NDArray

from trtdet.calibration import ChannelRange, expose
from trtdet.calibration.channel_ranges import SMALLEST, Extremes
from trtdet.passes.base import Writer
from trtdet.passes.model import to_graph, to_model
from trtdet.passes.plugin_ops import HARD_SWISH, INT8, PLUGIN_ACTIVATIONS, SAME, SILU, plugin_nodes
from trtdet.passes.provenance import Origin
from trtdet.passes.walk import maker
from trtdet.quantization.encoding import QMAX
from trtdet.quantization.sources import Sources
from trtdet.quantization.weight_forms import weight_pair

_FLOAT32 = 0  # ``output_type`` of an activation that reads INT8 and writes float

MOST_NOISE = 5e-4
"""An activation reads float if the rounding of its input would add more than this share of its variance."""


_FLOORS = {SILU: 8.0, HARD_SWISH: 3.0}
"""Below minus this value an activation is 0, up to 0.003 for SiLU and exactly for HardSwish."""

_SAMPLES = 1024  # places per tensor at which noise is measured, from all images together

_QUIET = 1e-3
"""Lower bound of a channel's variance as a share of the mean variance, since nearly constant channels hardly matter."""


@dataclass(frozen=True, eq=False)
class Requantized:
    """Result of :func:`requantize`: the model, equal but for the rounding of the activations' inputs; numbers of plugin
    activations that read and write INT8; and why others stay float."""

    model: onnx.ModelProto
    read: int = 0
    written: int = 0
    skipped: tuple[str, ...] = ()


def requantize(model: onnx.ModelProto, inputs: Mapping[str, ChannelRange]) -> Requantized:
    """Lets the activations of the plugin library read and write INT8 in a model with Q/DQ pairs, which is not changed.
    ``inputs`` holds the ranges of the activations' inputs, see :func:`reach`."""
    if next(plugin_nodes(model.graph), None) is None:
        return Requantized(model)
    graph = to_graph(model)
    write = Writer(graph, "trtdet/requantize", Origin.REQUANTIZE)
    nodes = [node for node in graph.nodes if node.op in PLUGIN_ACTIVATIONS]
    for concat in [node for node in graph.nodes if node.op == "Concat"]:
        _quantize_inputs(write, concat)
    read = written = 0
    skipped: list[str] = []
    for node in nodes:
        reasons = {"writes": _write_int8(write, node), "reads": _read_int8(write, node, inputs)}
        written += not reasons["writes"]
        read += not reasons["reads"]
        skipped += [f"{node.name}: it {side} float: {reason}" for side, reason in reasons.items() if reason]
    graph.cleanup()
    return Requantized(to_model(graph), read=read, written=written, skipped=tuple(skipped))


def _quantize_inputs(write: Writer, concat: gs.Node) -> None:
    """Moves the quantisation of a channel Concat to its inputs, if an activation can then write INT8."""
    joined = concat.outputs[0]
    rank = len(joined.shape or ())
    if rank < 3 or concat.attrs["axis"] not in (1, 1 - rank):
        return
    sizes = [int(tensor.shape[1]) for tensor in concat.inputs if tensor.shape and isinstance(tensor.shape[1], int)]
    if len(sizes) < len(concat.inputs) or len(joined.outputs) != 1 or joined in write.graph.outputs:
        return
    alone = [tensor for tensor in concat.inputs if len(tensor.outputs) == 1]
    end = _quantized(write.graph, joined, joined.outputs[0])
    if isinstance(end, str) or end.pads is not None or not any(maker(each, *PLUGIN_ACTIVATIONS) for each in alone):
        return
    encoding = end.node.inputs[1:]
    factor, offset = (np.broadcast_to(values, sum(sizes)) for values in (end.factor, end.offset))
    start = 0
    for index, (tensor, size) in enumerate(zip(concat.inputs, sizes, strict=True)):
        part = slice(start, start + size)
        start += size
        if tensor.dtype == np.float16:
            tensor = write("Cast", tensor, to=onnx.TensorProto.FLOAT)
        for op, values, neutral in (("Mul", factor[part], 1), ("Add", offset[part], 0)):
            if np.any(values != neutral):
                tensor = write(op, tensor, write.const(values.reshape(1, -1, *[1] * (rank - 2)), np.float32))
        concat.inputs[index] = write("DequantizeLinear", write("QuantizeLinear", tensor, *encoding), *encoding)
    end.node.inputs[0] = joined
    joined.dtype = encoding[0].dtype


def _write_int8(write: Writer, node: gs.Node) -> str:
    """Makes an activation write INT8; returns the reason if it cannot."""
    output = node.outputs[0]
    if output in write.graph.outputs:
        return "its output is an output of the model"
    ends = {}
    for reader in output.outputs:
        end = _quantized(write.graph, output, reader)
        if isinstance(end, str):
            return end
        ends[id(end.node)] = end
    if len(ends) != 1:
        return f"it is quantised in {len(ends)} ways" if ends else "nothing reads it"
    (end,) = ends.values()
    step = float(end.node.inputs[1].values)
    factor, offset = ((values / step).astype(np.float32).tolist() for values in (end.factor, end.offset))
    node.attrs |= {"output_type": INT8, "factor": factor, "offset": offset}
    node.outputs = [end.node.outputs[0]]
    end.node.outputs.clear()
    node.outputs[0].dtype = np.int8
    if end.pads is not None:
        node.inputs = [write("Pad", node.inputs[0], end.pads)]
    return ""


class _End(NamedTuple):
    """A QuantizeLinear and its input ``factor * x + offset``, (1,) or (C,) each, of x padded with 0."""

    node: gs.Node
    factor: NDArray[np.float64]
    offset: NDArray[np.float64]
    pads: gs.Constant | None


def _quantized(graph: gs.Graph, tensor: gs.Tensor, reader: gs.Node) -> _End | str:
    """Follows a reader of an activation to its QuantizeLinear; else returns why there is none."""
    factor, offset, pads = np.ones(1), np.zeros(1), None
    while reader.op != "QuantizeLinear":
        constants = [tensor for tensor in reader.inputs if isinstance(tensor, gs.Constant)]
        values: NDArray[np.float64] = np.zeros((2, 2))
        if len(constants) == 1:
            values = constants[0].values.astype(np.float64)
        by_channel = values.size == 1 or (values.ndim > 2 and values.size == values.shape[1])
        if reader.op == "Mul" and by_channel:
            factor, offset = factor * values.reshape(-1), offset * values.reshape(-1)
        elif reader.op == "Add" and by_channel:
            offset = offset + values.reshape(-1)
        elif reader.op == "Pad" and pads is None and not offset.any() and _pads_zeros(reader):
            pads = reader.inputs[1]
        elif reader.op != "Cast" or reader.attrs["to"] != onnx.TensorProto.FLOAT:
            return f"{reader.op} '{reader.name}' reads it as it is"
        output = reader.outputs[0]
        if len(output.outputs) != 1 or output in graph.outputs:
            return f"'{output.name}' on the way to Q is read elsewhere as well"
        tensor, reader = output, output.outputs[0]
    if reader.inputs[0] is not tensor or reader.inputs[1].values.size != 1:
        return f"QuantizeLinear '{reader.name}' has a step per channel"
    return _End(reader, factor=factor, offset=offset, pads=pads)


def _pads_zeros(pad: gs.Node) -> bool:
    """Whether a Pad adds zeros around feature maps only."""
    if pad.attrs.get("mode", "constant") != "constant" or not isinstance(pad.inputs[1], gs.Constant):
        return False
    value = pad.inputs[2].values if len(pad.inputs) > 2 and not pad.inputs[2].is_empty() else np.zeros(1)
    beside = pad.inputs[1].values.reshape(2, -1).T[:2]
    return len(pad.inputs) < 4 and not np.any(value) and not np.any(beside)


def _read_int8(write: Writer, node: gs.Node, inputs: Mapping[str, ChannelRange]) -> str:
    """Makes an activation read its convolution's result in INT8; returns the reason if it cannot."""
    source = node.inputs[0]
    pad = maker(source, "Pad")
    if pad is not None and len(source.outputs) == 1 and _pads_zeros(pad):
        source = pad.inputs[0]
    conv = maker(source)
    if conv is None or conv.op != "Conv":
        return f"its input comes from {conv.op if conv else 'the graph input'}, not Conv"
    dequantizer = maker(conv.inputs[1], "DequantizeLinear")
    if dequantizer is None or maker(conv.inputs[0], "DequantizeLinear") is None:
        return f"'{conv.name}' does not run in INT8"
    if len(source.outputs) != 1 or source in write.graph.outputs:
        return f"'{source.name}' is read elsewhere as well"
    if source.name not in inputs:
        return f"the range of '{source.name}' is not known"
    noise, channels = inputs[source.name].noise, np.array(inputs[source.name].amax)
    if noise > MOST_NOISE:
        return f"INT8 would add noise of {noise:.2%} of its variance, over {MOST_NOISE:.2%}"
    widest = channels.max()
    share = channels / widest
    # Scaling the outputs keeps the integers and changes the steps. Other layers may share the weights.
    values, steps = (tensor.values for tensor in dequantizer.inputs[0].inputs[0].inputs[:2])
    integers = np.rint(values / steps.reshape(-1, *[1] * (values.ndim - 1)))
    weights = weight_pair(write, integers, (steps * (1 / share)).astype(np.float32))
    conv.inputs = [conv.inputs[0], weights, *conv.inputs[2:]]
    if len(conv.inputs) > 2:
        conv.inputs[2] = write.const(conv.inputs[2].values / share, np.float32)
    step, zero = write.const(widest / QMAX, np.float32), write.const(0, np.int8)
    quantized = write("QuantizeLinear", source, step, zero)
    if pad is not None:
        pad.inputs = [write("DequantizeLinear", quantized, step, zero), pad.inputs[1]]
        quantized = write("QuantizeLinear", pad.outputs[0], step, zero)
    node.inputs = [quantized]
    node.attrs["input_scale"] = (channels / QMAX).astype(np.float32).tolist()
    if node.attrs.get("output_type", SAME) != INT8:
        node.attrs["output_type"] = _FLOAT32
    return ""


def reach(model: onnx.ModelProto, sources: Sources) -> dict[str, ChannelRange]:
    """The range of every channel that an activation of the plugin library reads from a convolution of a float model.
    The range is the largest value in the images, with some room for other images. Values far below 0, where the
    activation is nearly 0, may saturate."""
    convs = {output for node in model.graph.node if node.op_type == "Conv" for output in node.output}
    activations = (node for node in model.graph.node if node.op_type in PLUGIN_ACTIVATIONS)
    kinds = {node.input[0]: node.op_type for node in activations if node.input[0] in convs}
    if not kinds:
        return {}
    extremes = {name: Extremes() for name in kinds}
    samples: dict[str, list[NDArray[np.float32]]] = {name: [] for name in kinds}
    images = sorted(sources.images)
    places = max(1, _SAMPLES // len(images))
    for (outputs,) in sources.outputs([expose(model, list(kinds))], images, "ranges of activations"):
        for name in kinds:
            extremes[name].update(outputs[name])
            flat = outputs[name].reshape(len(outputs[name]), -1)
            samples[name].append(flat[:, :: max(1, flat.shape[1] // places)][:, :places].copy())
    ranges = {}
    for name, kind in kinds.items():
        low, high = extremes[name].ranges()
        amax = np.maximum(np.minimum(-low, _FLOORS[kind]), high)
        # A channel that was near 0 on all images must not get huge weights.
        amax = np.maximum(amax, SMALLEST * amax.max()) if amax.max() > 0 else np.ones(len(amax))
        x = np.concatenate(samples.pop(name), axis=1).astype(np.float64)
        ranges[name] = ChannelRange(tuple(map(float, amax)), _noise(kind, x, amax))
    return ranges


def _noise(kind: str, x: NDArray[np.float64], amax: NDArray[np.float64]) -> float:
    """The rounding error after the activation of samples (C, places), as a share of its variance."""
    step = amax[:, None] / QMAX
    exact, rounded = (
        values * (1 / (1 + np.exp(-np.maximum(values, -80.0))) if kind == SILU else np.clip(values / 6 + 0.5, 0, 1))
        for values in (x, np.rint(x / step).clip(-QMAX - 1, QMAX) * step)
    )
    variance, error = exact.var(axis=1), np.square(rounded - exact).mean(axis=1)
    return float((error / np.maximum(variance, _QUIET * variance.mean() + 1e-30)).mean())
