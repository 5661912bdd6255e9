"""An ONNX model as a differentiable function in torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import torch
from onnx.reference import ReferenceEvaluator

from trtdet.errors import ModelError
from trtdet.passes.model import to_graph
from trtdet.quantization.encoding import ChannelMap
from trtdet.quantization.gradients.operators import OPERATORS

Read = Callable[[str, torch.Tensor], torch.Tensor]
"""What takes the place of a tensor where a Q/DQ pair stands before it: its name and its value to the value that is
read."""


_STEPS = (
    *("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Not", "And", "Or", "IsNaN", "ArgMax", "ArgMin"),
    *("NonZero", "Sign", "Round", "Ceil"),
)
"""Operators whose results change in steps, with a gradient of 0."""


class Network:
    """The part of a float model that computes some of its tensors.

    Args:
        model: with every node named and constants folded, as the passes leave it.
        wanted: names of tensors.
        readers: by tensor, the nodes and input positions that read its quantised copy.
        device: what it runs on; a GPU where torch sees one.
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        wanted: Sequence[str],
        readers: Mapping[str, Sequence[tuple[str, int]]],
        device: str | None = None,
    ) -> None:
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        graph = to_graph(model)
        self.input = graph.inputs[0].name
        self._wanted = tuple(wanted)
        tensors = graph.tensors()
        graph.outputs = [tensors[name] for name in self._wanted]
        graph.cleanup().toposort()
        self._nodes, self._opset = tuple(graph.nodes), int(graph.opset)
        self._quantized = {reader for found in readers.values() for reader in found}
        self._constants = {
            name: _placed(torch.from_numpy(np.array(tensor.values)), self.device)
            for name, tensor in graph.tensors().items()
            if isinstance(tensor, gs.Constant)
        }
        self._last = {tensor.name: index for index, node in enumerate(self._nodes) for tensor in node.inputs}

    def __call__(self, images: torch.Tensor, read: Read) -> dict[str, torch.Tensor]:
        """The wanted tensors.

        Args:
            images: float32 (B, 3, H, W), as many as the model takes.
            read: what is read where a Q/DQ pair goes.

        Raises:
            ModelError: an operator on the way to the wanted tensors is not differentiable here.
        """
        values: dict[str, Any] = {**self._constants, self.input: images.to(self.device)}
        for index, node in enumerate(self._nodes):
            inputs = [self._input(node, position, values, read) for position in range(len(node.inputs))]
            made = _run(node, inputs, self._opset)
            outputs = made if isinstance(made, (tuple, list)) else (made,)
            values.update((tensor.name, value) for tensor, value in zip(node.outputs, outputs, strict=False))
            for tensor in node.inputs:
                if self._last[tensor.name] == index and tensor.name not in self._wanted:
                    values.pop(tensor.name, None)
        return {name: values[name] for name in self._wanted}

    def _input(self, node: gs.Node, position: int, values: Mapping[str, Any], read: Read) -> torch.Tensor | None:
        tensor = node.inputs[position]
        if tensor.is_empty():
            return None
        value: torch.Tensor = values[tensor.name]
        return read(tensor.name, value) if (node.name, position) in self._quantized else value


def factors(channels: ChannelMap | None, like: torch.Tensor) -> tuple[Any, Any]:
    """Scale and shift of a channel map, laid out as a tensor (B, C, ...) or (..., C); 1 and 0 where there is none."""
    if channels is None:
        return 1.0, 0.0
    shape = (1, -1, *(1,) * (like.dim() - 2)) if channels.axis == 1 else (-1,)
    scale, shift = (
        neutral if values is None else torch.from_numpy(values.astype(np.float32)).reshape(shape).to(like.device)
        for values, neutral in ((channels.scale, 1.0), (channels.shift, 0.0))
    )
    return scale, shift


def _placed(value: torch.Tensor, device: str) -> torch.Tensor:
    """On the device, but for integers: those are shapes and positions, which are read here."""
    return value.to(device) if value.is_floating_point() or value.dtype == torch.bool else value


def _run(node: gs.Node, inputs: Sequence[Any], opset: int) -> Any:
    if node.op in OPERATORS:
        used = {str(value.device) for value in inputs if value is not None}
        if len(used) > 1:
            (device,) = used - {"cpu"}
            inputs = [None if value is None else _placed(value, device) for value in inputs]
        try:
            return OPERATORS[node.op](node, inputs)
        except NotImplementedError as missing:
            raise ModelError(f"'{node.name}' has no gradient here: {missing}") from None
    if node.op not in _STEPS and any(value is not None and value.requires_grad for value in inputs):
        raise ModelError(f"'{node.name}' has no gradient here: the operator {node.op}")
    # What shapes are computed with: ONNX's own evaluator has every operator.
    given = {
        tensor.name: value.detach().cpu().numpy()
        for tensor, value in zip(node.inputs, inputs, strict=True)
        if value is not None
    }
    alone = gs.Graph(
        nodes=[
            node.copy(
                inputs=[gs.Variable(tensor.name) for tensor in node.inputs],
                outputs=[gs.Variable(tensor.name) for tensor in node.outputs],
            )
        ],
        opset=opset,
    )
    alone.inputs = [tensor for tensor in alone.nodes[0].inputs if tensor.name in given]
    alone.outputs = list(alone.nodes[0].outputs)
    found = ReferenceEvaluator(gs.export_onnx(alone, do_type_check=False)).run(None, given)
    return tuple(torch.from_numpy(np.array(value)) for value in found)
