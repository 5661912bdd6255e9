"""Conv in FP16 -> Conv in float32, Cast to FP16, Cast to float32: FP16 with its roundings, on the CPU.

onnxruntime has few FP16 kernels for the CPU. It puts casts around the other nodes, removes the casts between two such
nodes, and folds a Mul by constants into the convolution before it, so only some results are rounded. It keeps the
casts of a float32 model, so :func:`with_roundings` writes the roundings of an FP16 engine as casts:

- A node rounds its result once, half to even; above 65504 the result is infinite (IEEE 754 binary16). Sums inside a
  node are float32, as Tensor Cores accumulate them.
- Operators that select, move or compare values are exact in FP16 and are not rounded.
- DequantizeLinear is not rounded for convolutions and matrix products whose weights come from a DequantizeLinear as
  well, directly or through moves: their INT8 kernels multiply the integers. Other readers, such as a residual sum, read
  the rounded value.
- QuantizeLinear divides in float32. ONNX leaves the type of ``x / y_scale`` open before opset 23, which has the
  attribute ``precision``. Kernels divide, or multiply by the reciprocal, in float32 registers, as does onnxruntime's
  own FP16 kernel. Rounding the quotient to FP16 first would round twice.

Branches, loop bodies and operators of other domains stay as they are and get the types they expect.
"""

from __future__ import annotations

import onnx

from trtdet.passes.protobuf import ONNX_DOMAINS, captured, subgraphs
from trtdet.passes.provenance import Origin, origin_of, put
from trtdet.quantization import LAYERS

_FLOAT, _HALF = onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16

_EXACT = frozenset(
    (
        *("Abs", "Compress", "Concat", "Constant", "ConstantOfShape", "DepthToSpace", "Dropout", "Expand", "Flatten"),
        *("Gather", "GatherElements", "GatherND", "GlobalMaxPool", "Identity", "Max", "MaxPool", "Min", "Neg", "Pad"),
        *("ReduceMax", "ReduceMin", "Relu", "Reshape", "ReverseSequence", "Slice", "SpaceToDepth", "Split", "Squeeze"),
        *("Tile", "Transpose", "Trilu", "Unsqueeze", "Where"),
    )
)
"""Operators whose FP16 result is the same whether their inputs or their outputs are rounded."""

_TYPES = ("to", "dtype", "output_dtype", "precision", "softmax_precision")
"""Attributes whose value is an element type."""


def with_roundings(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with each FP16 result computed in float32 and rounded.

    Inputs and outputs keep their types, nodes and tensors their names; a rounded tensor has the FP16 tensor's name.
    The new casts are registered as :attr:`Origin.FP16`. The model must be sorted. It is not changed; without FP16
    tensors it is returned itself.
    """
    graph = model.graph
    # An input, a constant or a cast can give FP16; branches and bodies do not count.
    has_half = (
        any(weight.data_type == _HALF for weight in graph.initializer)
        or any(value.type.tensor_type.elem_type == _HALF for value in graph.input)
        or any(
            attribute.t.data_type == _HALF or (attribute.name in _TYPES and attribute.i == _HALF)
            for node in graph.node
            for attribute in node.attribute
        )
    )
    if not has_half:
        return model
    typed = onnx.ModelProto()
    typed.CopyFrom(model)
    # The declared type of an output need not be what its node gives, so it is inferred.
    for value in typed.graph.output:
        value.type.tensor_type.ClearField("elem_type")
    typed_graph = onnx.shape_inference.infer_shapes(typed).graph
    values = (*typed_graph.value_info, *typed_graph.input, *typed_graph.output)
    half = {value.name for value in values if value.type.tensor_type.elem_type == _HALF}
    half |= {weight.name for weight in typed_graph.initializer if weight.data_type == _HALF}
    return _Rounded(model, half).model


class _Rounded:
    """Writes the model node by node. A tensor has up to three forms: FP16, float32, and float32 before rounding."""

    def __init__(self, model: onnx.ModelProto, half: set[str]) -> None:
        self.model = onnx.ModelProto()
        self.model.CopyFrom(model)
        graph = self.model.graph
        self._half = half
        self._nodes: list[onnx.NodeProto] = []
        self._origins: dict[str, Origin] = {}
        self._names = {name for node in graph.node for name in (node.name, *node.input, *node.output)}
        self._as_half: dict[str, str] = {}
        self._as_float: dict[str, str] = {}
        self._unrounded: dict[str, str] = {}
        self._constants = {weight.name for weight in graph.initializer}
        # These are FP16 under their own names; any other tensor's own name is its float32 form.
        self._pinned = {value.name for value in graph.output if value.type.tensor_type.elem_type == _HALF}
        self._pinned |= {value.name for value in graph.input} & half
        for node in graph.node:
            if _opaque(node):
                self._pinned |= half & {*node.output, *captured(node)}
        for weight in graph.initializer:
            if weight.data_type == _HALF and weight.name not in self._pinned:
                _to_float(weight)
                self._as_float[weight.name] = weight.name
        sources = {value.name for value in graph.input} | self._constants
        self._as_half.update({name: name for name in sources & self._pinned})
        for node in graph.node:
            self._write(node)
        for value in graph.output:
            if value.name in half:
                # If no node reads the output, this form is not written yet.
                self._form(value.name, "half" if value.name in self._pinned else "float")
        values = [value for value in graph.value_info if value.name not in half]
        del graph.value_info[:], graph.node[:]
        graph.value_info.extend(values)
        graph.node.extend(self._nodes)
        put(self.model, {**origin_of(self.model), **self._origins})

    def _write(self, node: onnx.NodeProto) -> None:
        """Appends a node, the casts before it and its roundings."""
        new_node = onnx.NodeProto()
        new_node.CopyFrom(node)
        if _opaque(node):
            for name in sorted(self._half.intersection(captured(node))):
                self._form(name, "half")
            new_node.input[:] = [self._form(name, "half") if name in self._half else name for name in node.input]
            self._nodes.append(new_node)
            self._as_half.update({name: name for name in node.output if name in self._half})
            return
        # Whether the node computes with integers or moves them, so that its FP16 inputs are never rounded.
        integers = node.input[:2]
        if node.op_type not in LAYERS:
            integers = [name for name in node.input if name in self._half and name not in self._constants]
        unrounded = all(name in self._unrounded for name in integers)
        unrounded &= node.op_type in LAYERS or (bool(integers) and _exact(node))
        for index, name in enumerate(node.input):
            if name in self._half:
                new_node.input[index] = (unrounded and self._unrounded.get(name)) or self._form(name, "float")
        half_outputs = [index for index, name in enumerate(node.output) if name in self._half]
        self._nodes.append(new_node)
        if node.op_type == "Cast" and half_outputs:
            new_node.output[0] = self._as_half[node.output[0]] = self._name(node.output[0], "half")
            return
        for attribute in new_node.attribute:
            if attribute.name in _TYPES and attribute.i == _HALF:
                attribute.i = _FLOAT
            if attribute.t.data_type == _HALF:
                _to_float(attribute.t)
        if node.op_type == "Constant":
            self._constants.update(node.output)
        for index in half_outputs:
            name = node.output[index]
            if node.op_type == "DequantizeLinear" or (unrounded and node.op_type not in LAYERS):
                self._unrounded[name] = new_node.output[index] = self._fresh(f"{name}/unrounded")
            elif _exact(node):
                self._as_float[name] = new_node.output[index] = self._name(name, "float")
            else:
                new_node.output[index] = self._fresh(f"{name}/unrounded")
                self._cast(new_node.output[index], name, "half")

    def _form(self, name: str, form: str) -> str:
        """The "half" form or the rounded "float" form, written at its first reader, as some tensors have none."""
        forms = self._as_half if form == "half" else self._as_float
        if name not in forms and form == "half":
            source = self._unrounded.get(name) or self._as_float.get(name)
            if source is None:
                raise ValueError(f"no node before its readers gives the tensor '{name}'")
            self._cast(source, name, form)
        elif name not in forms:
            self._cast(self._form(name, "half"), name, form)
        return forms[name]

    def _cast(self, source: str, name: str, form: str) -> None:
        forms, kind = (self._as_half, _HALF) if form == "half" else (self._as_float, _FLOAT)
        forms[name] = self._name(name, form)
        label = self._fresh(f"{name}/{form}")
        self._origins[label] = Origin.FP16
        self._nodes.append(onnx.helper.make_node("Cast", [source], [forms[name]], label, to=kind))

    def _name(self, name: str, form: str) -> str:
        """The tensor's own name for its main form, a new name for the other form."""
        return name if (name in self._pinned) == (form == "half") else self._fresh(f"{name}/{form}")

    def _fresh(self, name: str) -> str:
        while name in self._names:
            name += "+"
        self._names.add(name)
        return name


def _opaque(node: onnx.NodeProto) -> bool:
    return node.domain not in ONNX_DOMAINS or next(subgraphs(node), None) is not None


def _exact(node: onnx.NodeProto) -> bool:
    texts = {attribute.name: attribute.s for attribute in node.attribute}
    if node.op_type in ("Resize", "Upsample"):
        return texts.get("mode", b"nearest") == b"nearest"
    if node.op_type in ("ScatterElements", "ScatterND"):
        return texts.get("reduction") not in (b"add", b"mul")
    # Until opset 10 the bounds of Clip are attributes, which are float32.
    return node.op_type in _EXACT or (node.op_type == "Clip" and not node.attribute)


def _to_float(tensor: onnx.TensorProto) -> None:
    values = onnx.numpy_helper.to_array(tensor).astype("float32")
    tensor.CopyFrom(onnx.numpy_helper.from_array(values, tensor.name))
