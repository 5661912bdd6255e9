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
from trtdet.quantization.backward import STEPS
from trtdet.quantization.encoding import ChannelMap
from trtdet.quantization.gradients.operators import OPERATORS

Read = Callable[[str, torch.Tensor], torch.Tensor]
"""Replaces a tensor at a Q/DQ pair: from its name and value to the value that the next operator reads."""


class TorchNetwork:
    """The part of a float model, as the passes leave it, that computes the tensors ``outputs``. ``readers`` gives by
    tensor the nodes and input positions that read its quantised copy; ``device`` is by default a GPU if torch sees
    one."""

    def __init__(
        self,
        model: onnx.ModelProto,
        outputs: Sequence[str],
        readers: Mapping[str, Sequence[tuple[str, int]]],
        device: str | None = None,
    ) -> None:
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        graph = to_graph(model)
        self.input = graph.inputs[0].name
        self._outputs = tuple(outputs)
        tensors = graph.tensors()
        graph.outputs = [tensors[name] for name in self._outputs]
        graph.cleanup().toposort()
        self._nodes, self._opset = tuple(graph.nodes), int(graph.opset)
        self._quantized = {reader for places in readers.values() for reader in places}
        self._constants = {
            name: _placed(torch.from_numpy(np.array(tensor.values)), self.device)
            for name, tensor in graph.tensors().items()
            if isinstance(tensor, gs.Constant)
        }
        self._last = {tensor.name: index for index, node in enumerate(self._nodes) for tensor in node.inputs}

    def __call__(self, images: torch.Tensor, read: Read) -> dict[str, torch.Tensor]:
        """The outputs for images, float32 (B, 3, H, W), as many as the model takes. Raises ModelError if an operator
        before the outputs is not differentiable here."""
        values: dict[str, Any] = {**self._constants, self.input: images.to(self.device)}
        for index, node in enumerate(self._nodes):
            inputs: list[Any] = [None if tensor.is_empty() else values[tensor.name] for tensor in node.inputs]
            for position, tensor in enumerate(node.inputs):
                if (node.name, position) in self._quantized:
                    inputs[position] = read(tensor.name, inputs[position])
            result = _run(node, inputs, self._opset)
            outputs = result if isinstance(result, (tuple, list)) else (result,)
            values.update((tensor.name, value) for tensor, value in zip(node.outputs, outputs, strict=False))
            for tensor in node.inputs:
                if self._last[tensor.name] == index and tensor.name not in self._outputs:
                    values.pop(tensor.name, None)
        return {name: values[name] for name in self._outputs}


def factors(channels: ChannelMap | None, like: torch.Tensor) -> Any:
    """A channel map's scale in the layout of a tensor (B, C, ...) or (..., C); 1 if there is no map."""
    if channels is None or channels.scale is None:
        return 1.0
    shape = (1, -1, *(1,) * (like.dim() - 2)) if channels.axis == 1 else (-1,)
    return torch.from_numpy(channels.scale.astype(np.float32)).reshape(shape).to(like.device)


def _placed(value: torch.Tensor, device: str) -> torch.Tensor:
    """Moves floats to the device; integers are shapes and positions, which the CPU reads."""
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
    if node.op not in STEPS and any(value is not None and value.requires_grad for value in inputs):
        raise ModelError(f"'{node.name}' has no gradient here: the operator {node.op}")
    # Shape computations: ONNX's own evaluator has every operator.
    values = {
        tensor.name: value.detach().cpu().numpy()
        for tensor, value in zip(node.inputs, inputs, strict=True)
        if value is not None
    }
    read, written = ([gs.Variable(tensor.name) for tensor in tensors] for tensors in (node.inputs, node.outputs))
    alone = gs.Graph(
        nodes=[node.copy(inputs=read, outputs=written)],
        inputs=[tensor for tensor in read if tensor.name in values],
        outputs=written,
        opset=opset,
    )
    results = ReferenceEvaluator(gs.export_onnx(alone, do_type_check=False)).run(None, values)
    return tuple(torch.from_numpy(np.array(value)) for value in results)
