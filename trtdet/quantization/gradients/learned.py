"""The parameters of an INT8 network: integers, scales and biases of convolutions, scales of activations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import torch

from trtdet.calibration import Ranges
from trtdet.passes.model import to_graph, to_model
from trtdet.quantization.encoding import QMAX, Rounded, half_step
from trtdet.quantization.gradients.network import TorchNetwork, factors
from trtdet.quantization.placement import QdqPlacement
from trtdet.quantization.qdq import Corrections, plain_form
from trtdet.quantization.weighted import Weighted

DRIFT = 1.5  # maximum change of a weight in steps; larger changes would overfit the images


RATES = {"integers": 0.02, "weight scales": 5e-4, "activation scales": 2e-3, "biases": 1e-3}
"""Learning rates of Adam: for integers in steps, for scales in their logarithm, for biases as they are."""


class Learned(torch.nn.Module):
    """An INT8 network, computed in float with gradients.

    Rounding is straight through: its gradient is 1 within the range, and the rounding error for a scale (Esser et al.
    2020, "Learned Step Size Quantization", arXiv:1902.08153, section 2.1).

    Args:
        start: ranges of the activations without a channel map, and corrections: fixed channel maps, and initial
            weights. A convolution without weights there starts from the plain form.
        together: groups of activations that keep one scale.
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        placement: QdqPlacement,
        start: tuple[Ranges, Corrections],
        together: Sequence[Sequence[str]],
        outputs: Sequence[str],
    ) -> None:
        super().__init__()
        self._ranges, self._corrections = start
        graph = to_graph(model)
        int8 = set(placement.plan.names("int8"))
        layers = Weighted.by_name(node for node in graph.nodes if node.name in int8)
        self._reads = {reader: tensor for tensor, readers in placement.readers.items() for reader, _ in readers}
        self._groups = {name: int(layer.node.attrs.get("group", 1)) for name, layer in layers.items()}
        self._turned = frozenset(name for name, layer in layers.items() if layer.turned)
        self._convs = {
            name: _Convolution(self._corrections.weights.get(name) or plain_form(layer))
            for name, layer in layers.items()
        }
        self.convs = torch.nn.ModuleList(self._convs.values())
        self._tensors = placement.activations
        plain = [[name for name in group if name not in self._corrections.tensors] for group in together]
        leaders = {name: group[0] for group in plain for name in group}
        leading = {name: leaders.get(name, name) for name in placement.activations}
        rows = {name: row for row, name in enumerate(dict.fromkeys(leading.values()))}
        self._row = {name: rows[leader] for name, leader in leading.items()}
        maps, tensors = self._corrections.tensors, self._ranges.tensors
        steps = [float(maps[name].step if name in maps else half_step(tensors[name].scale)) for name in rows]
        self.steps = torch.nn.Parameter(torch.tensor(np.log(steps), dtype=torch.float32))
        owned, own = _owning(graph, layers)
        self._network = TorchNetwork(owned, outputs, {**placement.readers, **own})
        self._form: dict[str, torch.Tensor] = {}
        self.to(self._network.device)

    def forward(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
        try:
            return self._network(images, self._read)
        finally:
            self._form.clear()

    def in_float(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
        """The outputs of the float model."""
        with torch.no_grad():
            return self._network(images, lambda name, value: value)

    def _read(self, name: str, value: torch.Tensor) -> torch.Tensor:
        if name not in self._form:
            conv, _, part = name.rpartition(_PART)
            if part == "weight" and conv in self._convs:
                weight = self._weight(conv)
                self._form[name] = weight.T if conv in self._turned else weight
            elif part == "bias" and conv in self._convs:
                self._form[name] = self._convs[conv].bias
            else:
                scale = factors(self._corrections.tensors.get(name), value)
                step = self.steps[self._row[name]].exp()
                self._form[name] = _Rounding.apply(value * scale, step) / scale  # type: ignore[no-untyped-call]
        return self._form[name]

    def _weight(self, conv: str) -> torch.Tensor:
        """The weight for the unmapped input; the activation applies the channel map and its inverse."""
        parameters = self._convs[conv]
        integers: torch.Tensor = _Straight.apply(parameters.latent)  # type: ignore[no-untyped-call]
        weight = integers * parameters.scale.exp()
        channels = self._corrections.tensors.get(self._reads[conv])
        if channels is None or channels.scale is None:
            return weight
        # A value per input channel, in the layout of the weights (out, in / groups, ...).
        groups = self._groups[conv]
        rows = torch.from_numpy(np.asarray(channels.scale, np.float32)).reshape(groups, -1)
        rows = rows.repeat_interleave(len(weight) // groups, 0)
        return weight * rows.reshape(len(weight), -1, *(1,) * (weight.dim() - 2)).to(weight.device)

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Parameters for a torch optimiser, with the rates of :data:`RATES`."""
        convs = self._convs.values()
        groups = {
            "integers": [conv.latent for conv in convs],
            "weight scales": [conv.scale for conv in convs],
            "activation scales": [self.steps],
            "biases": [conv.bias for conv in convs],
        }
        return [{"params": parameters, "lr": RATES[name]} for name, parameters in groups.items()]

    @torch.no_grad()
    def confine(self) -> None:
        """Limits each weight's change to :data:`DRIFT`."""
        for conv in self._convs.values():
            conv.latent.clamp_((conv.start - DRIFT).clamp(min=-QMAX), (conv.start + DRIFT).clamp(max=QMAX))

    def written(self) -> tuple[Ranges, Corrections]:
        """The learned ranges and corrections."""
        steps = half_step(self.steps.detach().exp().cpu().numpy(), up=False)
        amax = {name: float(steps[self._row[name]]) * QMAX for name in self._tensors}
        maps = {
            name: replace(channels, amax=amax.get(name, channels.amax))
            for name, channels in self._corrections.tensors.items()
        }
        tensors = {
            name: replace(extremes, amax=amax[name]) if name in amax and name not in maps else extremes
            for name, extremes in self._ranges.tensors.items()
        }
        weights = {name: conv.rounded() for name, conv in self._convs.items()}
        return replace(self._ranges, tensors=tensors), Corrections(maps, {**self._corrections.weights, **weights})


_PART = "//learned "  # separates a convolution's name from the name of its parameter


def _owning(
    graph: gs.Graph, convs: Mapping[str, Weighted]
) -> tuple[onnx.ModelProto, dict[str, tuple[tuple[str, int], ...]]]:
    """The model with a weight and a bias of its own for each layer; by tensor, the node and position of each."""
    places: dict[str, tuple[tuple[str, int], ...]] = {}
    for name, layer in convs.items():
        bias = gs.Constant(f"{name}{_PART}bias", layer.bias)
        if not layer.has_place:
            output = layer.node.outputs[0]
            raw = gs.Variable(f"{output.name}{_PART}raw", np.float32, output.shape)
            layer.node.outputs = [raw]
            graph.nodes.append(gs.Node("Add", f"{name}{_PART}sum", {}, [raw, bias], [output]))
            places[bias.name] = ((f"{name}{_PART}sum", 1),)
        else:
            layer.set_bias(bias)
            holder = layer.sum or layer.node
            places[bias.name] = ((holder.name, holder.inputs.index(bias)),)
        weight = gs.Constant(f"{name}{_PART}weight", layer.node.inputs[1].values)
        layer.node.inputs[1] = weight
        places[weight.name] = ((name, 1),)
    graph.toposort()
    return to_model(graph), places


class _Convolution(torch.nn.Module):
    start: torch.Tensor

    def __init__(self, start: Rounded) -> None:
        super().__init__()
        integers = torch.from_numpy(start.integers.astype(np.float32))
        self.register_buffer("start", integers, persistent=False)
        self.latent = torch.nn.Parameter(integers.clone())
        shape = (-1, *(1,) * (integers.dim() - 1))
        self.scale = torch.nn.Parameter(torch.from_numpy(np.log(start.scales)).to(torch.float32).reshape(shape))
        self.bias = torch.nn.Parameter(torch.from_numpy(start.bias.astype(np.float32).copy()))

    @torch.no_grad()
    def rounded(self) -> Rounded:
        integers = self.latent.round().clamp(-QMAX, QMAX).cpu().numpy().astype(np.int8)
        return Rounded(
            integers, half_step(self.scale.exp().cpu().numpy(), up=False).reshape(-1), self.bias.cpu().numpy().copy()
        )


class _Straight(torch.autograd.Function):
    """Rounding with gradient 1."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.round(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class _Rounding(torch.autograd.Function):
    """``scale * clip(round(x / scale))``."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ratio = x / scale
        rounded = ratio.round().clamp_(-QMAX, QMAX)
        inside = ratio.abs() <= QMAX
        # The gradient of the scale, stored instead of the value.
        ctx.save_for_backward(inside, torch.where(inside, rounded - ratio, rounded))
        return rounded * scale

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        inside, steps = ctx.saved_tensors
        return gradient * inside, (gradient * steps).sum()
