"""float32 regions around the convolutions that a plan keeps in FP16 -> FP16, with as few casts as that needs.

A region grows from its convolutions over activation functions, sums, joins and moves of feature maps as long as all
that they read is in FP16 already, and back over what is read by nothing else, so that no cast stands between a
convolution and its activation function. INT8 convolutions with their Q/DQ pairs, and the decoding of boxes and scores,
stay as they are: half precision cannot tell pixels of a large image apart, nor hold every weight's scale.

The casts are the form that strongly typed networks want (NVIDIA, "Working with Quantized Types", TensorRT
documentation, section "Strong Typing").
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from trtdet.passes.base import Writer
from trtdet.passes.model import to_graph, to_model
from trtdet.passes.plugin_ops import PLUGIN_ACTIVATIONS
from trtdet.passes.provenance import Origin, registry
from trtdet.quantization.placement import CONVOLUTIONS

LARGEST = 65504.0
"""The largest magnitude of FP16 (IEEE 754 binary16)."""

_FLOAT, _HALF = onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16

_ACTIVATION_FUNCTIONS = (
    *("Sigmoid", "HardSigmoid", "HardSwish", "Relu", "LeakyRelu", "PRelu", "Clip", "Tanh", "Elu", "Selu", "Softplus"),
    *("Mish", "Swish", "Gelu", "Erf"),
    *PLUGIN_ACTIVATIONS,
)
_ARITHMETIC = ("Add", "Sub", "Mul", "Div", "Min", "Max", "Neg")
_MOVES = (
    *("Concat", "Split", "Slice", "MaxPool", "AveragePool", "GlobalAveragePool", "Resize", "Transpose", "Pad"),
    *("DepthToSpace", "SpaceToDepth", "Identity"),
)
_JOINING = {*_ACTIVATION_FUNCTIONS, *_ARITHMETIC, *_MOVES}

_VALUES = {"Resize": (0,), "Slice": (0,), "Split": (0,), "Pad": (0, 2)}
"""Operators of which only some inputs have the type of the data."""


def to_half(model: onnx.ModelProto, names: Collection[str]) -> onnx.ModelProto:
    """Puts convolutions and what belongs to them into FP16.

    Args:
        model: float32, with or without Q/DQ pairs, every node named; it is not changed.
        names: of convolutions that have no Q/DQ pair.

    Returns:
        The same model, inputs and outputs still float32.
    """
    if not names:
        return model
    graph = to_graph(model)
    region = _region(graph, set(names))
    write = Writer(graph, "trtdet/half", Origin.FP16)
    lowered: dict[str, gs.Variable] = {}
    made = {id(output) for node in region for output in node.outputs}
    for node in region:
        for position in _VALUES.get(node.op, range(len(node.inputs))):
            if position >= len(node.inputs) or node.inputs[position].is_empty():
                continue
            tensor = node.inputs[position]
            if isinstance(tensor, gs.Constant):
                if tensor.values.dtype == np.float32:
                    node.inputs[position] = write.const(np.clip(tensor.values, -LARGEST, LARGEST), np.float16)
            elif id(tensor) not in made:
                if tensor.name not in lowered:
                    lowered[tensor.name] = write("Cast", tensor, to=_HALF)
                node.inputs[position] = lowered[tensor.name]
    inside = {id(node) for node in region}
    for node in region:
        for index, tensor in enumerate(node.outputs):
            outer = [reader for reader in tensor.outputs if id(reader) not in inside]
            final = any(tensor is output for output in graph.outputs)
            tensor.dtype = np.float16
            if final:
                # The name belongs to the output, which stays float32.
                half = gs.Variable(f"{tensor.name}/half", np.float16, tensor.shape)
                for reader in list(tensor.outputs):
                    if id(reader) in inside:
                        reader.inputs = [half if given is tensor else given for given in reader.inputs]
                node.outputs[index] = half
                tensor.dtype = np.float32
                name = f"{tensor.name}/float"
                graph.nodes.append(gs.Node("Cast", name, {"to": _FLOAT}, inputs=[half], outputs=[tensor]))
                registry(graph)[name] = Origin.FP16
            elif outer:
                raised = write("Cast", tensor, to=_FLOAT)
                for reader in outer:
                    reader.inputs = [raised if given is tensor else given for given in reader.inputs]
    # Types were inferred for float32.
    for tensor in graph.tensors().values():
        if isinstance(tensor, gs.Variable) and not any(
            tensor is boundary for boundary in (*graph.inputs, *graph.outputs)
        ):
            tensor.dtype = None
    graph.cleanup()
    return to_model(graph)


def region_of(model: onnx.ModelProto, names: Collection[str]) -> tuple[str, ...]:
    """The tensors that :func:`to_half` would put into FP16, those that are cast to it included."""
    found: dict[str, None] = {}
    for node in _region(to_graph(model), set(names)):
        for position in _VALUES.get(node.op, range(len(node.inputs))):
            if position < len(node.inputs) and isinstance(node.inputs[position], gs.Variable):
                found[node.inputs[position].name] = None
        found.update(dict.fromkeys(output.name for output in node.outputs))
    found.pop("", None)
    return tuple(found)


def _region(graph: gs.Graph, names: set[str]) -> list[gs.Node]:
    """The nodes that run in FP16, in graph order."""
    region = {id(node) for node in graph.nodes if node.op in CONVOLUTIONS and node.name in names}
    # What decodes, suppresses or quantises is no part of the model; what stands for a node of the model is.
    foreign = {name for name, origin in registry(graph).items() if not origin.replaces}
    joining = [node for node in graph.nodes if node.name not in foreign and _may_join(node)]
    grown = True
    while grown:
        grown = False
        for node in joining:
            if id(node) in region:
                continue
            positions = _VALUES.get(node.op, range(len(node.inputs)))
            read = [node.inputs[position] for position in positions if position < len(node.inputs)]
            makers = [source.inputs[0] if source.inputs else None for source in read if isinstance(source, gs.Variable)]
            known = [maker is not None and id(maker) in region for maker in makers]
            readers = [reader for output in node.outputs for reader in output.outputs]
            ends = any(output is end for output in node.outputs for end in graph.outputs)
            backwards = bool(readers) and not ends and all(id(reader) in region for reader in readers)
            # A sum of two needs one cast on either side of it.
            enough = node.op in _ARITHMETIC and any(known)
            if makers and (all(known) or enough or (any(known) and backwards)):
                region.add(id(node))
                grown = True
    return [node for node in graph.nodes if id(node) in region]


def _may_join(node: gs.Node) -> bool:
    if node.op not in _JOINING:
        return False
    feature_maps = [feature for feature in (*node.inputs[:1], *node.outputs) if isinstance(feature, gs.Variable)]
    return all(
        feature.shape is not None and len(feature.shape) == 4 and feature.dtype == np.float32
        for feature in feature_maps
    )
