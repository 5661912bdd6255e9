"""What a corrected network is made of, part by part: the whole with the first parts only, and without each.

The parts are those of the written network, whichever correction they came from: ranges, channel maps, weights (integers
and their scales), biases.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from trtdet.calibration import Ranges
from trtdet.quantization.corrections.gate import Whole
from trtdet.quantization.encoding import ChannelMap, Rounded, nearest, weight_scales
from trtdet.quantization.placement import QdqPlacement
from trtdet.quantization.qdq import Corrections, plain_form
from trtdet.quantization.weighted import Weighted
from trtdet.quantization.windows import Window


@dataclass(frozen=True, eq=False)
class Rung:
    """A part of the corrections.

    Attributes:
        name: ``ranges``, ``channel_maps``, ``weights`` or ``biases``.
        upto: the network with this part and those before it.
        without: the network with all parts but this one; None for channel maps, whose weights and biases suit no other
            input.
    """

    name: str
    upto: Whole
    without: Whole | None


def rungs(model: onnx.ModelProto, placement: QdqPlacement, plain: Ranges, written: Whole) -> tuple[Rung, ...]:
    """The parts in which a corrected network differs from the plain rule, in the order in which they build on another.

    Args:
        model: in float.
        placement: of its Q/DQ pairs.
        plain: the ranges of the rule.
        written: the corrected network.
    """
    corrections, ranges = written.corrections, written.ranges
    bare = _mapped(model, placement, corrections)
    given = {name: corrections.weights[name] for name in bare}
    # Biases suit their own integers, and come last: with them it is the whole.
    rounded = {name: replace(form, bias=bare[name].bias) for name, form in given.items()}
    biased = {name: replace(form, bias=given[name].bias) for name, form in bare.items()}

    def whole(name: str, weights: Mapping[str, Rounded]) -> Whole:
        return Whole(name, ranges, Corrections(corrections.tensors, weights))

    found = []
    plainly = [tensor for tensor in placement.activations if tensor not in corrections.tensors]
    if any(plain.tensors[name].amax != ranges.tensors[name].amax for name in plainly):
        found.append(Rung("ranges", Whole("ranges", ranges), Whole("all but ranges", plain, corrections)))
    if corrections.tensors:
        found.append(Rung("channel_maps", whole("channel maps", bare), None))
    if any(_differs(given[name], bare[name]) for name in bare):
        found.append(Rung("weights", whole("weights", rounded), whole("all but weights", biased)))
    if any(not np.array_equal(given[name].bias, bare[name].bias) for name in bare):
        found.append(Rung("biases", written, whole("all but biases", rounded)))
    return tuple(found)


def _mapped(model: onnx.ModelProto, placement: QdqPlacement, corrections: Corrections) -> dict[str, Rounded]:
    """Weights to the nearest and the float model's biases, for the corrected convolutions and what they read."""
    nodes = {node.name: node for node in gs.import_onnx(model).nodes}
    fp8 = placement.plan.fp8
    reads = {reader: tensor for tensor, readers in placement.readers.items() for reader, _ in readers}
    return {
        name: plain_form(layer, "fp8") if name in fp8 else _plain(layer, corrections.tensors.get(reads[name]))
        for name in placement.plan.names("int8")
        if name in corrections.weights and (layer := Weighted.of(nodes[name])) is not None
    }


def _plain(layer: Weighted, channels: ChannelMap | None) -> Rounded:
    """Weights to the nearest for an input as a map makes it."""
    window = None if channels is None else Window.of(layer.node)
    form = plain_form(layer)
    if channels is None or window is None:
        return form
    weight = layer.weight.astype(np.float64)
    rows, bias = window.rows(weight), form.bias
    if channels.shift is not None:
        bias = (bias + np.einsum("goi,gi->go", rows, window.spread(channels.shift)).reshape(-1)).astype(np.float32)
    if channels.scale is not None:
        rows = rows / window.spread(channels.scale)[:, None, :]
    scales = np.stack([weight_scales(group, f"'{layer.node.name}'") for group in rows])
    return Rounded(nearest(rows, scales).reshape(weight.shape), scales.reshape(-1), bias)


def _differs(first: Rounded, other: Rounded) -> bool:
    return not (np.array_equal(first.integers, other.integers) and np.array_equal(first.scales, other.scales))
