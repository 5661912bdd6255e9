"""Conv -> TRT_SiLU -> Mul -> Add -> QuantizeLinear -> TRT_SiLU between INT8 and INT8

In a graph with Q/DQ pairs an activation of the plugin library takes over what stands around it:

- what is quantised of its output: channel map and step become its ``factor`` and ``offset``, and it writes INT8;
- what an INT8 convolution gives it: a step a channel, ``step * r_c``. ``1 / r_c`` goes into the convolution's weight
  scales and bias, exactly, so that its output needs one step, and ``input_scale`` gives the channels back.

Nothing else may need the float tensors: an activation whose output a sum reads writes float, with the reason. A Pad
with zeros on the way to Q comes before the activation instead, which is the same because both give 0 for 0. Before a
Concat on the way each input is mapped and quantised by itself, which is the same as well.

An INT8 tensor is read by DequantizeLinear and the activations alone: the parsers of TensorRT 10 and later list neither
Pad nor Concat for INT8 (onnx-tensorrt, docs/operators.md). So both lie between a DequantizeLinear and a QuantizeLinear
of the same step, which give every integer back and which TensorRT may run in INT8.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from numpy.typing import NDArray

from trtdet.calibration import ChannelRange
from trtdet.passes.base import Writer
from trtdet.passes.model import to_graph, to_model
from trtdet.passes.plugin_ops import INT8, PLUGIN_ACTIVATIONS, SAME, plugin_nodes
from trtdet.passes.provenance import Origin
from trtdet.quantization.encoding import QMAX
from trtdet.quantization.weight_forms import weight_pair

_FLOAT32 = 0
"""``output_type`` of an activation that reads INT8 and writes float."""

MOST_NOISE = 5e-4
"""An activation whose input's rounding would add more than this share of its variance reads float."""


@dataclass(frozen=True, eq=False)
class Requantized:
    """What came of it.

    Attributes:
        model: the same function, but for the rounding of the activations' inputs.
        activations: how many of the plugin library's there are.
        read: how many read INT8.
        written: how many write INT8.
        skipped: for each side of an activation that stays float, why.
    """

    model: onnx.ModelProto
    activations: int = 0
    read: int = 0
    written: int = 0
    skipped: tuple[str, ...] = ()


def requantize(model: onnx.ModelProto, inputs: Mapping[str, ChannelRange]) -> Requantized:
    """Lets INT8 flow through the activations of the plugin library.

    Args:
        model: with Q/DQ pairs; it is not changed.
        inputs: ranges of what the activations read, see :func:`trtdet.quantization.activation_ranges.reach`.
    """
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
        reason = _write_int8(write, node)
        written += not reason
        if reason:
            skipped.append(f"{node.name}: it writes float: {reason}")
        reason = _read_int8(write, node, inputs)
        read += not reason
        if reason:
            skipped.append(f"{node.name}: it reads float: {reason}")
    graph.cleanup()
    return Requantized(to_model(graph), len(nodes), read, written, tuple(skipped))


def _quantize_inputs(write: Writer, concat: gs.Node) -> None:
    """Moves what is quantised of a join of channels before it, if that lets an activation write INT8."""
    made = concat.outputs[0]
    rank = len(made.shape or ())
    alone = [tensor for tensor in concat.inputs if len(tensor.outputs) == 1 and tensor.inputs]
    if rank < 3 or concat.attrs["axis"] not in (1, 1 - rank):
        return
    sizes = [int(tensor.shape[1]) for tensor in concat.inputs if tensor.shape and isinstance(tensor.shape[1], int)]
    final = any(made is output for output in write.graph.outputs)
    if len(sizes) < len(concat.inputs) or len(made.outputs) != 1 or final:
        return
    end = _quantized(write.graph, made, made.outputs[0])
    if (
        not any(tensor.inputs[0].op in PLUGIN_ACTIVATIONS for tensor in alone)
        or isinstance(end, str)
        or end.pads is not None
    ):
        return
    channels, start = sum(sizes), 0
    encoding = end.node.inputs[1:]
    factor, offset = (np.broadcast_to(values, channels) for values in (end.factor, end.offset))
    for index, (tensor, size) in enumerate(zip(concat.inputs, sizes, strict=True)):
        part = slice(start, start + size)
        start += size
        if tensor.dtype == np.float16:
            tensor = write("Cast", tensor, to=onnx.TensorProto.FLOAT)
        for op, values, neutral in (("Mul", factor[part], 1), ("Add", offset[part], 0)):
            if np.any(values != neutral):
                tensor = write(op, tensor, write.const(values.reshape(1, -1, *[1] * (rank - 2)), np.float32))
        concat.inputs[index] = write("DequantizeLinear", write("QuantizeLinear", tensor, *encoding), *encoding)
    end.node.inputs[0] = made
    made.dtype = encoding[0].dtype


def _write_int8(write: Writer, node: gs.Node) -> str:
    """Makes an activation write what is quantised of its output; the reason where it cannot."""
    made = node.outputs[0]
    if any(made is output for output in write.graph.outputs):
        return "its output is an output of the model"
    if not made.outputs:
        return "nothing reads it"
    ends = {}
    for reader in made.outputs:
        end = _quantized(write.graph, made, reader)
        if isinstance(end, str):
            return end
        ends[id(end.node)] = end
    if len(ends) > 1:
        return f"it is quantised in {len(ends)} ways"
    end = next(iter(ends.values()))
    step = float(end.node.inputs[1].values)
    node.attrs |= {"output_type": INT8, "factor": _floats(end.factor / step), "offset": _floats(end.offset / step)}
    node.outputs = [end.node.outputs[0]]
    end.node.outputs.clear()
    node.outputs[0].dtype = np.int8
    if end.pads is not None:
        node.inputs = [write("Pad", node.inputs[0], end.pads)]
    return ""


@dataclass(frozen=True, eq=False)
class _End:
    """A QuantizeLinear, and what it quantises: ``factor * x + offset``, (1,) or (C,) each, of x padded with 0."""

    node: gs.Node
    factor: NDArray[np.float64]
    offset: NDArray[np.float64]
    pads: gs.Constant | None


def _quantized(graph: gs.Graph, tensor: gs.Tensor, reader: gs.Node) -> _End | str:
    """Where a reader of an activation leads to, or why that is no QuantizeLinear."""
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
        made = reader.outputs[0]
        if len(made.outputs) != 1 or any(made is output for output in graph.outputs):
            return f"'{made.name}' on the way to Q is read elsewhere as well"
        tensor, reader = made, made.outputs[0]
    if reader.inputs[0] is not tensor or reader.inputs[1].values.size != 1:
        return f"QuantizeLinear '{reader.name}' has a step a channel"
    return _End(reader, factor, offset, pads)


def _pads_zeros(pad: gs.Node) -> bool:
    """Whether zeros are added, beside feature maps alone."""
    if pad.attrs.get("mode", "constant") != "constant" or not isinstance(pad.inputs[1], gs.Constant):
        return False
    value = pad.inputs[2].values if len(pad.inputs) > 2 and not pad.inputs[2].is_empty() else np.zeros(1)
    beside = pad.inputs[1].values.reshape(2, -1).T[:2]
    return len(pad.inputs) < 4 and not np.any(value) and not np.any(beside)


def _read_int8(write: Writer, node: gs.Node, inputs: Mapping[str, ChannelRange]) -> str:
    """Makes an activation read what its INT8 convolution gives; the reason where it cannot."""
    source = node.inputs[0]
    pad = source.inputs[0] if source.inputs and source.inputs[0].op == "Pad" else None
    if pad is not None and len(source.outputs) == 1 and _pads_zeros(pad):
        source = pad.inputs[0]
    conv = source.inputs[0] if source.inputs else None
    if conv is None or conv.op != "Conv":
        return f"its input comes from {conv.op if conv else 'the graph input'}, not Conv"
    weight = conv.inputs[1].inputs[0] if conv.inputs[1].inputs else None
    if weight is None or weight.op != "DequantizeLinear" or conv.inputs[0].inputs[0].op != "DequantizeLinear":
        return f"'{conv.name}' does not run in INT8"
    if len(source.outputs) != 1 or any(source is output for output in write.graph.outputs):
        return f"'{source.name}' is read elsewhere as well"
    if source.name not in inputs:
        return f"the range of '{source.name}' is not known"
    found = inputs[source.name]
    if found.noise > MOST_NOISE:
        return f"INT8 would add noise of {found.noise:.2%} of its variance, over {MOST_NOISE:.2%}"
    channels = np.array(found.amax)
    widest = channels.max()
    share = channels / widest
    conv.inputs = [conv.inputs[0], _scaled(write, weight, 1 / share), *conv.inputs[2:]]
    if len(conv.inputs) > 2:
        conv.inputs[2] = write.const(conv.inputs[2].values / share, np.float32)
    step, zero = write.const(widest / QMAX, np.float32), write.const(0, np.int8)
    quantized = write("QuantizeLinear", source, step, zero)
    if pad is not None:
        pad.inputs = [write("DequantizeLinear", quantized, step, zero), pad.inputs[1]]
        quantized = write("QuantizeLinear", pad.outputs[0], step, zero)
    node.inputs = [quantized]
    node.attrs["input_scale"] = _floats(channels / QMAX)
    if node.attrs.get("output_type", SAME) != INT8:
        node.attrs["output_type"] = _FLOAT32
    return ""


def _scaled(write: Writer, dequantizer: gs.Node, factor: NDArray[np.float64]) -> gs.Variable:
    """The weights of a convolution with their outputs scaled: the same integers, other steps. They may be shared."""
    quantizer = dequantizer.inputs[0].inputs[0]
    before = quantizer.inputs[1].values
    values = quantizer.inputs[0].values
    integers = np.rint(values / before.reshape(-1, *[1] * (values.ndim - 1)))
    return weight_pair(write, integers, (before * factor).astype(np.float32))


def _floats(values: NDArray[np.float64]) -> list[float]:
    return [float(value) for value in values.astype(np.float32)]
