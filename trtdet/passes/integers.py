"""Models with operators on integers, which no engine builder reads, become float models, with Q/DQ pairs where their
scales are constant.

Sources: operator definitions of ONNX (https://onnx.ai/onnx/operators/) and of onnxruntime
(https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from trtdet.errors import ModelError, TrtdetWarning
from trtdet.passes.base import explained
from trtdet.passes.clean import name_nodes
from trtdet.passes.model import to_graph, to_model
from trtdet.passes.opset import upgrade
from trtdet.passes.protobuf import add_metadata
from trtdet.passes.walk import maker

MICROSOFT = "com.microsoft"
DYNAMIC = ("DynamicQuantizeLinear", "ConvInteger", "MatMulInteger")
_CHANNELS = 13  # the opset that introduced a scale for each channel

_ADVICE = "quantise it in the QDQ format (QuantizeLinear and DequantizeLinear), or give the float model"


class _Form(NamedTuple):
    """The float operator of an operator on integers, and the positions of its quantised inputs and output scale."""

    op: str
    inputs: tuple[int, ...]  # positions of quantised inputs, each followed by its scale and zero point
    output: int  # position of the output's scale, followed by its zero point
    domain: str = MICROSOFT


_FORMS = {
    "QLinearConv": _Form("Conv", (0, 3), output=6, domain=""),
    "QLinearMatMul": _Form("MatMul", (0, 3), output=6, domain=""),
    "QGemm": _Form("Gemm", (0, 3), output=7),
    "QLinearAdd": _Form("Add", (0, 3), output=6),
    "QLinearMul": _Form("Mul", (0, 3), output=6),
    "QLinearSigmoid": _Form("Sigmoid", (0,), output=3),
    "QLinearLeakyRelu": _Form("LeakyRelu", (0,), output=3),
    "QLinearSoftmax": _Form("Softmax", (0,), output=3),
    "QLinearGlobalAveragePool": _Form("GlobalAveragePool", (0,), output=3),
    "QLinearAveragePool": _Form("AveragePool", (0,), output=3),
    "QLinearConcat": _Form("Concat", (), output=0),  # then data, scale and zero point of each input
}
_BIAS = {"QLinearConv": 8, "QGemm": 6}
_MOVING = (
    *("MaxPool", "Resize", "Reshape", "Transpose", "Slice", "Split", "Gather", "Squeeze", "Unsqueeze", "Flatten"),
    *("Concat", "Identity", "Expand"),
)
"""Operators that may read and write integers; of Concat and Split, all integers have one scale."""


def on_integers(node: onnx.NodeProto) -> bool:
    """Whether a node computes with integers, in a form that :func:`without_integers` knows."""
    form = _FORMS.get(node.op_type)
    return node.op_type in DYNAMIC or (form is not None and node.domain == form.domain)


def without_integers(model: onnx.ModelProto) -> onnx.ModelProto:
    """Rewrites operators on integers of a valid, sorted model; a model without any is returned itself.

    - ``ConvInteger`` and ``MatMulInteger`` behind ``DynamicQuantizeLinear``, whose scales are computed from each image,
      become float layers with the values of their integer weights. Warns of that: TrtdetWarning.
    - ``QLinearConv`` and other operators with constant scales become float operators between pairs of QuantizeLinear
      and DequantizeLinear with the same scales and zero points, biases become float.

    Raises:
        ModelError: integers are computed or read in another way.
    """
    if not any(on_integers(node) for node in model.graph.node):
        return model
    with explained("integers"):
        graph = to_graph(model)
        name_nodes(graph)
        floats = _Dynamic(graph).rewrite()
        if any(_form(node) for node in graph.nodes):
            if graph.opset < _CHANNELS:
                upgrade(graph, _CHANNELS)
            _Static(graph).rewrite()
        rewritten = to_model(graph.cleanup())
    add_metadata(rewritten, model)
    if floats:
        warnings.warn(
            f"the model is quantised with scales that are computed from each image ({floats} layers), which no engine "
            "can do: it is read as a float model with the values of its integer weights, and keeps what their rounding "
            "cost; give the float model it was made from if you have it",
            TrtdetWarning,
            stacklevel=3,
        )
    return rewritten


def _form(node: gs.Node) -> _Form | None:
    form = _FORMS.get(node.op)
    return form if form is not None and (node.domain or "") == form.domain else None


def _fixed(node: gs.Node, position: int) -> Any:
    """The values of a constant input; zero points may be missing, which is 0."""
    tensor = node.inputs[position] if position < len(node.inputs) else gs.Variable.empty()
    if isinstance(tensor, gs.Constant):
        return tensor.values
    if tensor.is_empty():
        return np.zeros((), np.int8)
    raise ModelError(f"{node.op} '{node.name}' has a weight, scale or zero point that is computed", _ADVICE)


@dataclass
class _Dynamic:
    """Writes layers on integers with scales of each image as float layers."""

    graph: gs.Graph

    def rewrite(self) -> int:
        """Returns the number of layers."""
        layers = [node for node in self.graph.nodes if node.op in ("ConvInteger", "MatMulInteger")]
        for node in layers:
            self._layer(node)
        self.graph.cleanup()
        left = next((node for node in self.graph.nodes if node.op in DYNAMIC), None)
        if left is not None:
            raise ModelError(f"{left.op} '{left.name}' is read in a way that is not known", _ADVICE)
        return len(layers)

    def _layer(self, node: gs.Node) -> None:
        quantizer = maker(node.inputs[0], "DynamicQuantizeLinear")
        cast = self._reader(node, "Cast")
        scaled = self._reader(cast, "Mul") if cast is not None else None
        if quantizer is None or cast is None or scaled is None:
            raise ModelError(f"{node.op} '{node.name}' is not between DynamicQuantizeLinear, Cast and Mul", _ADVICE)
        scale = self._scale(next(tensor for tensor in scaled.inputs if tensor is not cast.outputs[0]), quantizer)
        integers, zero = _fixed(node, 1).astype(np.float32), _fixed(node, 3).astype(np.float32)
        column = (-1, *[1] * (integers.ndim - 1)) if node.op == "ConvInteger" else (1, -1)
        zero = zero.reshape(column) if zero.size > 1 else zero.reshape(())
        scale = scale.reshape(column) if scale.size > 1 else scale.reshape(())
        name = node.inputs[1].name
        weights = gs.Constant(f"{name}/float", ((integers - zero) * scale).astype(np.float32))
        inputs, last = [quantizer.inputs[0], weights], scaled
        if node.op == "ConvInteger":
            added = self._reader(scaled, "Add")
            bias = added and self._bias(added, scaled.outputs[0], channels=len(integers))
            if added is not None and bias is not None:
                inputs.append(gs.Constant(f"{name}/bias", bias))
                last = added
        output = last.outputs[0]
        last.outputs.clear()
        op = "Conv" if node.op == "ConvInteger" else "MatMul"
        self.graph.nodes.append(gs.Node(op, node.name, dict(node.attrs), inputs, [output]))
        node.outputs.clear()

    def _reader(self, node: gs.Node, op: str) -> gs.Node | None:
        """The only reader of a node's output, if it is of the operator."""
        (output,) = node.outputs
        readers = output.outputs
        single = len(readers) == 1 and readers[0].op == op and all(output is not each for each in self.graph.outputs)
        return readers[0] if single else None

    @staticmethod
    def _scale(tensor: gs.Tensor, quantizer: gs.Node) -> Any:
        """The scale of the weights, out of its product with that of the image."""
        product = maker(tensor, "Mul")
        if product is not None and any(each is quantizer.outputs[1] for each in product.inputs):
            own = next((each for each in product.inputs if isinstance(each, gs.Constant)), None)
            if own is not None:
                return np.asarray(own.values, np.float32)
        raise ModelError(f"the scale of '{quantizer.name}' is used in a way that is not known", _ADVICE)

    @staticmethod
    def _bias(added: gs.Node, scaled: gs.Tensor, channels: int) -> Any:
        """The bias (channels,) that a node adds; None if it adds something else."""
        other = next((tensor for tensor in added.inputs if tensor is not scaled), None)
        reshape = maker(other, "Reshape") if other is not None else None
        other = reshape.inputs[0] if reshape is not None else other
        if not isinstance(other, gs.Constant) or other.values.size != channels:
            return None
        shape = other.values.shape
        flat = shape == (channels,) and reshape is not None
        spread = len(shape) >= 3 and shape[-3] == channels
        return other.values.astype(np.float32).reshape(-1) if flat or spread else None


@dataclass
class _Static:
    """Writes operators on integers with constant scales as float operators between pairs."""

    graph: gs.Graph
    # Scale and zero point of each tensor of integers.
    steps: dict[str, tuple[gs.Tensor, gs.Tensor]] = field(default_factory=dict)

    def rewrite(self) -> None:
        self.graph.toposort()
        for node in list(self.graph.nodes):
            form = _form(node)
            if node.op == "QuantizeLinear":
                self.steps[node.outputs[0].name] = self._step(node, 1)
            elif form is not None:
                self._operator(node, form)
            elif node.op != "DequantizeLinear" and any(tensor.name in self.steps for tensor in node.inputs):
                self._moved(node)
        if any(tensor.name in self.steps for tensor in self.graph.outputs):
            raise ModelError("an output of the model is of integers", "put a DequantizeLinear before it")

    @staticmethod
    def _step(node: gs.Node, position: int) -> tuple[gs.Tensor, gs.Tensor]:
        zero = node.inputs[position + 1] if position + 1 < len(node.inputs) else gs.Variable.empty()
        return node.inputs[position], zero

    def _float(self, node: gs.Node, position: int, step: tuple[gs.Tensor, gs.Tensor], axis: int) -> gs.Tensor:
        """Puts a DequantizeLinear before an input of a node."""
        name = f"{node.name}/dequantised{position}"
        output = gs.Variable(name, np.float32)
        inputs = [node.inputs[position], step[0], *([] if step[1].is_empty() else [step[1]])]
        attributes = {"axis": axis} if isinstance(step[0], gs.Constant) and step[0].values.size > 1 else {}
        if isinstance(step[0], gs.Constant) and step[0].values.size == 1:
            inputs[1:] = [_scalar(tensor) for tensor in inputs[1:]]
        self.graph.nodes.append(gs.Node("DequantizeLinear", name, attributes, inputs, [output]))
        return output

    def _integers(self, node: gs.Node, step: tuple[gs.Tensor, gs.Tensor]) -> None:
        """Puts a QuantizeLinear behind each output of a node."""
        for index, output in enumerate(node.outputs):
            name = f"{node.name}/float{index}"
            value = gs.Variable(name, np.float32)
            node.outputs[index] = value
            inputs = [value, *(_scalar(tensor) for tensor in step if not tensor.is_empty())]
            self.graph.nodes.append(gs.Node("QuantizeLinear", f"{name}/quantised", {}, inputs, [output]))
            self.steps[output.name] = step

    def _operator(self, node: gs.Node, form: _Form) -> None:
        first: Sequence[int] = form.inputs or range(2, len(node.inputs), 3)
        channels = {"QLinearConv": 0, "QGemm": 0 if node.attrs.get("transB") else 1}.get(node.op, -1)
        inputs = [self._float(node, position, self._step(node, position + 1), channels) for position in first]
        bias = _BIAS.get(node.op)
        if bias is not None and bias < len(node.inputs) and not node.inputs[bias].is_empty():
            values = _fixed(node, bias) * (_fixed(node, 1).reshape(-1) * _fixed(node, 4).reshape(-1))
            inputs.append(gs.Constant(f"{node.inputs[bias].name}/float", values.astype(np.float32)))
        step = self._step(node, form.output)
        attributes = {key: value for key, value in node.attrs.items() if key not in ("channels_last", "opset")}
        if node.attrs.get("channels_last"):
            raise ModelError(f"{node.op} '{node.name}' has its channels last", _ADVICE)
        node.op, node.domain, node.attrs, node.inputs = form.op, None, attributes, inputs
        self._integers(node, step)

    def _moved(self, node: gs.Node) -> None:
        """Makes an operator move floats in the place of integers."""
        if node.op not in _MOVING:
            raise ModelError(f"{node.op} '{node.name}' computes with integers", _ADVICE)
        steps = [(position, self.steps.get(tensor.name)) for position, tensor in enumerate(node.inputs)]
        (_, step), *others = [(position, step) for position, step in steps if step is not None]
        if any(not _same(step, other) for _, other in others):
            raise ModelError(f"{node.op} '{node.name}' joins integers of several scales", _ADVICE)
        for position, own in steps:
            if own is not None:
                node.inputs[position] = self._float(node, position, own, axis=-1)
        self._integers(node, step)


def _scalar(tensor: gs.Tensor) -> gs.Tensor:
    """A constant of one element without axes, as scales of whole tensors are."""
    if isinstance(tensor, gs.Constant) and tensor.values.size == 1 and tensor.values.ndim:
        return gs.Constant(f"{tensor.name}/scalar", tensor.values.reshape(()))
    return tensor


def _same(first: tuple[gs.Tensor, gs.Tensor], second: tuple[gs.Tensor, gs.Tensor]) -> bool:
    pairs = zip(first, second, strict=True)
    return all(
        mine is theirs
        or (
            isinstance(mine, gs.Constant)
            and isinstance(theirs, gs.Constant)
            and np.array_equal(mine.values, theirs.values)
        )
        for mine, theirs in pairs
    )
