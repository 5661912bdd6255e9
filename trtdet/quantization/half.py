"""float32 around convolutions -> FP16, with as few casts as possible

An FP16 region grows from its convolutions over activation functions, sums, joins and moves of feature maps. A node
joins if it reads only FP16, or if only nodes of the region read it. The Q/DQ pairs of an INT8 convolution are in the
region, so their scales are FP16, and so is everything between two INT8 kernels. Boxes and scores are decoded in
float32: half precision cannot distinguish pixels of a large image. Operators that only move values before the decoding
join too. A DequantizeLinear that float32 operators read as well is written for them once more, without a Cast.

With matrix products the region includes the operators on features of places: attention, LayerNormalization, GELU.
Coordinates stay outside, as do GridSample, which reads them, and a LayerNormalization of several operators, whose
squares and sums overflow FP16. Coordinates are a last axis of 2 or 4, except in the results of convolutions, whose
feature maps may be that narrow.

Strongly typed networks require these casts (NVIDIA, "Working with Quantized Types", TensorRT documentation, section
"Strong Typing").
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from trtdet.errors import ModelError
from trtdet.passes.base import Writer
from trtdet.passes.model import to_graph, to_model
from trtdet.passes.opset import HALF_SCALES
from trtdet.passes.plugin_ops import PLUGIN_ACTIVATIONS
from trtdet.passes.provenance import Origin, registry
from trtdet.passes.walk import PAIR, maker, read_instead, upstream
from trtdet.quantization.encoding import LARGEST
from trtdet.quantization.placement import FEWEST_FEATURES
from trtdet.quantization.weighted import CONVOLUTIONS, LAYERS, PRODUCTS

_BETWEEN = (Origin.QDQ, Origin.CHANNEL_MAP)  # origins of nodes between convolutions

_FLOAT, _HALF = onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16

ACTIVATION_FUNCTIONS = (
    *("Sigmoid", "HardSigmoid", "HardSwish", "Relu", "LeakyRelu", "PRelu", "Clip", "Tanh", "Elu", "Selu", "Softplus"),
    *("Mish", "Swish", "Gelu", "Erf"),
    *PLUGIN_ACTIVATIONS,
)
_ARITHMETIC = ("Add", "Sub", "Mul", "Div", "Min", "Max", "Neg")
_POOLS = ("MaxPool", "AveragePool", "GlobalAveragePool", "Resize", "Pad", "DepthToSpace", "SpaceToDepth")
_MOVES = ("Concat", "Split", "Slice", "Transpose", "Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze")
_REORDERING = {"Transpose", "Reshape", "Flatten", "Squeeze", "Unsqueeze"}
_JOINING = {*ACTIVATION_FUNCTIONS, *_ARITHMETIC, *_POOLS, *_MOVES}
_OF_PLACES = {"MatMul", "Softmax", "LayerNormalization", *ACTIVATION_FUNCTIONS, *_ARITHMETIC}
"""Operators on features of places, on the last axis."""
_COORDINATES = (2, 4)  # the last sizes of points and boxes

_VALUES = {
    **dict.fromkeys(("Resize", "Slice", "Split", "Reshape", "Squeeze", "Unsqueeze"), (0,)),
    "Pad": (0, 2),
    "QuantizeLinear": (0, 1),
    "DequantizeLinear": (1,),
}
"""Input positions with the data's type, for operators whose other inputs have another type."""


def to_half(model: onnx.ModelProto, names: Collection[str], left: Collection[str] = ()) -> onnx.ModelProto:
    """Converts layers with weights and the operators around them to FP16; inputs and outputs of the model stay float32.

    Args:
        model: float32, with or without Q/DQ pairs, every node named; it is not changed.
        names: layers. An INT8 layer that is not among them writes float32.
        left: other nodes that stay in float32.

    Raises:
        ModelError: the model's opset has no Q/DQ pairs with FP16 scales.
    """
    if not names:
        return model
    graph = to_graph(model)
    write = Writer(graph, "trtdet/half", Origin.FP16)
    region = _region(graph, set(names), set(left))
    if graph.opset < HALF_SCALES and any(node.op in PAIR for node in region):
        raise ModelError(f"Q/DQ pairs in FP16 need opset {HALF_SCALES}, and the model has opset {graph.opset}")
    inside = {id(node) for node in region}
    # The float32 readers of an FP16 DequantizeLinear get one of their own: a Cast would part them from INT8.
    for node in [node for node in region if node.op == "DequantizeLinear"]:
        tensor = node.outputs[0]
        outer = [reader for reader in tensor.outputs if id(reader) not in inside]
        if outer and tensor not in graph.outputs:
            own = write.of(Origin.QDQ)("DequantizeLinear", *node.inputs, **node.attrs)
            own.shape = tensor.shape
            read_instead(outer, tensor, own)
    _lower_inputs(write, region)
    _raise_outputs(write, region, inside)
    # Types were inferred for float32.
    for tensor in graph.tensors().values():
        if isinstance(tensor, gs.Variable) and tensor not in (*graph.inputs, *graph.outputs):
            tensor.dtype = None
    graph.cleanup()
    return to_model(graph)


def tensors_of(nodes: Iterable[gs.Node]) -> tuple[str, ...]:
    """The tensors that FP16 nodes read and write, including those that are cast."""
    names: dict[str, None] = {}
    for node in nodes:
        read = (node.inputs[position] for position in _positions(node))
        names.update(dict.fromkeys(tensor.name for tensor in read if isinstance(tensor, gs.Variable)))
        names.update(dict.fromkeys(output.name for output in node.outputs))
    names.pop("", None)
    return tuple(names)


def nodes_of(model: onnx.ModelProto, names: Collection[str]) -> list[gs.Node]:
    """The nodes that :func:`to_half` would convert to FP16, in graph order."""
    return _region(to_graph(model), set(names), set())


def _positions(node: gs.Node) -> Iterable[int]:
    """Positions of a node's inputs that have the data's type."""
    inputs = range(len(node.inputs))
    return (position for position in _VALUES.get(node.op, inputs) if position in inputs)


def _lower_inputs(write: Writer, region: list[gs.Node]) -> None:
    """Converts constants of the region to FP16 and casts inputs from outside."""
    lowered: dict[str, gs.Variable] = {}
    inner = {id(output) for node in region for output in node.outputs}
    for node in region:
        for position in _positions(node):
            tensor = node.inputs[position]
            if isinstance(tensor, gs.Constant):
                if tensor.values.dtype == np.float32:
                    node.inputs[position] = write.const(np.clip(tensor.values, -LARGEST, LARGEST), np.float16)
            elif id(tensor) not in inner and not tensor.is_empty():
                if tensor.name not in lowered:
                    lowered[tensor.name] = write("Cast", tensor, to=_HALF)
                node.inputs[position] = lowered[tensor.name]


def _raise_outputs(write: Writer, region: list[gs.Node], inside: set[int]) -> None:
    """Casts tensors that are read outside of the region, whose nodes' ids are ``inside``, to float32."""
    graph = write.graph
    for node in [node for node in region if node.op != "QuantizeLinear"]:
        for index, tensor in enumerate(node.outputs):
            outer = [reader for reader in tensor.outputs if id(reader) not in inside]
            if tensor in graph.outputs:
                # The name belongs to the output, which stays float32.
                half = gs.Variable(f"{tensor.name}/half", np.float16, tensor.shape)
                read_instead([reader for reader in tensor.outputs if id(reader) in inside], tensor, half)
                node.outputs[index] = half
                tensor.dtype = np.float32
                name = f"{tensor.name}/float"
                graph.nodes.append(gs.Node("Cast", name, {"to": _FLOAT}, inputs=[half], outputs=[tensor]))
                registry(graph)[name] = Origin.FP16
                continue
            tensor.dtype = np.float16
            if outer:
                read_instead(outer, tensor, write("Cast", tensor, to=_FLOAT))


def _region(graph: gs.Graph, names: set[str], left: set[str]) -> list[gs.Node]:
    """The nodes that run in FP16, in graph order."""
    region = {id(node) for node in graph.nodes if node.op in LAYERS and node.name in names}
    places = _of_places(graph, region)
    # Decoding and NMS are no part of the model; Q/DQ and replacements of the model's nodes are.
    foreign = {name for name, origin in registry(graph).items() if not (origin.replaces or origin in _BETWEEN)}
    # Pairs join only with INT8 convolutions in the region.
    paired = any(id(node) in region and maker(node.inputs[0], "DequantizeLinear") for node in graph.nodes)
    outside = foreign | left
    joining = [node for node in graph.nodes if node.name not in outside and _may_join(node, paired, places)]
    waiting, may_join = list(joining), {id(node) for node in joining}
    while waiting:
        node = waiting.pop()
        if id(node) not in region and _joins(graph, node, region):
            region.add(id(node))
            waiting += [near for near in _near(node) if id(near) in may_join]
    return [node for node in graph.nodes if id(node) in region]


def _near(node: gs.Node) -> list[gs.Node]:
    """The nodes of which :func:`_joins` may ask whether ``node`` is in the region."""
    readers = _readers(node)
    behind = (later for reader in readers for later in _readers(reader))
    return [*readers, *behind, *(source for tensor in node.inputs for source in tensor.inputs)]


def _readers(node: gs.Node) -> list[gs.Node]:
    return [reader for output in node.outputs for reader in output.outputs]


def _joins(graph: gs.Graph, node: gs.Node, region: set[int]) -> bool:
    """Whether a node joins the current region."""
    readers = _readers(node)
    if node.op == "DequantizeLinear":
        return any(id(reader) in region and reader.op != "QuantizeLinear" for reader in readers)
    read = [node.inputs[position] for position in ((0,) if node.op == "QuantizeLinear" else _positions(node))]
    makers = [maker(tensor) for tensor in read if isinstance(tensor, gs.Variable)]
    if node.op == "QuantizeLinear" and not makers:  # of weights
        return any(id(reader) in region for reader in readers)
    in_region = [source is not None and id(source) in region for source in makers]
    # A DequantizeLinear takes the type of its readers: what is before the pair decides.
    pairs = [source is not None and source.op == "DequantizeLinear" for source in makers]
    quantizers = [maker(source.inputs[0]) for source, pair in zip(makers, pairs, strict=True) if source and pair]
    started = any(in_region) or any(quantizer and id(quantizer) in region for quantizer in quantizers)
    ends = any(output in graph.outputs for output in node.outputs)
    backwards = bool(readers) and not ends and all(id(reader) in region for reader in readers)
    # A sum of an FP16 and a float32 tensor needs one cast, before it or after it.
    enough = backwards or node.op in _ARITHMETIC
    return started and (enough or all(inside or pair for inside, pair in zip(in_region, pairs, strict=True)))


def _of_places(graph: gs.Graph, region: set[int]) -> set[int]:
    """In models with matrix products: the nodes before the region's layers, without those on feature maps
    (convolutions, and operators on their results that keep the channel axis)."""
    layers = [node for node in graph.nodes if id(node) in region]
    before = list(upstream(*(tensor for layer in layers for tensor in layer.inputs)))
    if not any(node.op in PRODUCTS for node in (*layers, *before)):
        return set()
    maps: set[int] = set()
    for node in graph.nodes:
        makers = {id(source) for tensor in node.inputs for source in tensor.inputs}
        if node.op in CONVOLUTIONS or (node.op in _JOINING - _REORDERING and makers & maps):
            maps.add(id(node))
    return {id(node) for node in before} - maps


def _may_join(node: gs.Node, paired: bool, places: set[int]) -> bool:
    if node.op in PAIR:
        return paired
    if node.op in LAYERS and any(maker(tensor, "DequantizeLinear") for tensor in node.inputs):
        return False  # an INT8 product that writes float32
    values = [tensor for tensor in (*node.inputs[:1], *node.outputs) if isinstance(tensor, gs.Variable)]
    floats = all(tensor.dtype in (np.float32, None) for tensor in values)
    if node.op in _OF_PLACES and id(node) in places:
        # Feature maps, or features on the last axis, but no coordinates.
        lasts = [(len(tensor.shape or ()), tensor.shape[-1] if tensor.shape else None) for tensor in values]
        return floats and all(
            last not in _COORDINATES if rank == 4 else isinstance(last, int) and last >= FEWEST_FEATURES
            for rank, last in lasts
        )
    maps = node.op in _MOVES or all(tensor.shape is not None and len(tensor.shape) == 4 for tensor in values)
    return node.op in _JOINING and floats and maps
