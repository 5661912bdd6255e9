"""Compares two profiles of the same network by convolution: which layers are slower than in the other."""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from trtdet.backends.base import LayerTime
from trtdet.errors import ConfigError
from trtdet.passes.provenance import Origin
from trtdet.performance.profiles import Profile, part_of
from trtdet.performance.results import CONFIDENCE

_SEPARATE = (Origin.DECODE, Origin.NMS, Origin.EMBEDDED_NMS)
"""Steps after the convolutions; their layers belong to no convolution."""

Owner = tuple[str, ...]
"""The convolutions that a layer belongs to; or one other part of the network."""


@dataclass(frozen=True)
class Difference:
    """The same convolutions in two profiles, with all layers between them and the next convolutions.

    Attributes:
        convs: names in the ONNX model; several if either profile ran them as one layer; none for layers before the
            first convolution, and for decoding and NMS that trtdet added.
        part: such as ``trtdet/decode`` if there are no ``convs``; empty before the first convolution.
        first_ms, second_ms: mean time per run.
        gain_ms: ``first_ms - second_ms``, the time per run that the layers of the second profile would save.
        low_ms, high_ms: 90 % interval of the gain, from the scatter over the runs.
        first_layers, second_layers: names of the layers, in execution order.
    """

    convs: tuple[str, ...]
    part: str
    first_ms: float
    second_ms: float
    gain_ms: float
    low_ms: float
    high_ms: float
    first_layers: tuple[str, ...]
    second_layers: tuple[str, ...]


def differences(first: Profile, second: Profile) -> list[Difference]:
    """Compares two profiles of the same network, convolution by convolution.

    Engines have different layers, but the same ONNX nodes. The kernel of a convolution is the layer of a convolution
    type that names it, else the layer that names the fewest convolutions. Any other layer (pointwise kernels, copies
    between layouts and precisions) belongs to the last convolution that it names, else to the last that ran before it.
    Decoding and NMS that trtdet added belong to none. A layer that names ONNX nodes belongs where these belong in the
    second profile, so another execution order moves nothing. Convolutions that one kernel of either profile computes
    together stay together.

    Returns the layers before the first convolution, the convolutions in ONNX order, and the rest.

    Raises:
        ConfigError: the two have no convolution in common.
    """
    order = {name: index for index, name in enumerate(dict.fromkeys((*second.nodes.convs, *first.nodes.convs)))}
    kernels = [_kernels(profile.layers, order) for profile in (second, first)]
    if not set(kernels[0]) & set(kernels[1]):
        raise ConfigError(
            f"'{first.name}' and '{second.name}' run no convolution of the same name, so their layers cannot be "
            "compared",
            "give two of the same model, or compare the tables of each alone",
        )
    together = _together(kernels, order)
    homes: dict[str, Owner] = {}
    in_second, in_first = (
        _by_owner(profile, own, together, homes=homes) for profile, own in zip((second, first), kernels, strict=True)
    )
    places = {
        owner: min((order.get(name, len(order)) for name in owner), default=-1) for owner in (*in_second, *in_first)
    }
    normal = statistics.NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    rows = []
    for owner in sorted(places, key=lambda owner: (places[owner], owner)):
        first_layers, second_layers = in_first.get(owner, []), in_second.get(owner, [])
        first_ms, second_ms = (
            np.sum([layer.ms for layer in layers], axis=0) if layers else np.zeros(2)
            for layers in (first_layers, second_layers)
        )
        gain = float(first_ms.mean() - second_ms.mean())
        variance = first_ms.var(ddof=1) / len(first_ms) + second_ms.var(ddof=1) / len(second_ms)
        error = normal * float(np.sqrt(variance))
        separate = places[owner] == len(order)
        rows.append(
            Difference(
                convs=() if separate else owner,
                part=owner[0] if separate else "",
                first_ms=float(first_ms.mean()),
                second_ms=float(second_ms.mean()),
                gain_ms=gain,
                low_ms=gain - error,
                high_ms=gain + error,
                first_layers=tuple(layer.name for layer in first_layers),
                second_layers=tuple(layer.name for layer in second_layers),
            )
        )
    return rows


def slower(first: Profile, second: Profile) -> list[Difference]:
    """The convolutions that the first runs slower than the second, beyond the scatter of the runs, the worst first.

    Move these to the precision of the second. This saves the sum of ``gain_ms``, if their neighbours stay as they are.

    Raises:
        ConfigError: the two have no convolution in common.
    """
    losses = [difference for difference in differences(first, second) if difference.convs and difference.low_ms > 0]
    return sorted(losses, key=lambda difference: -difference.gain_ms)


def _kernels(layers: Sequence[LayerTime], convs: Collection[str]) -> dict[str, int]:
    """The index of each convolution's kernel among the layers."""
    ranks: dict[str, tuple[bool, int, int]] = {}
    for index, layer in enumerate(layers):
        conv_names = [name for name in layer.onnx if name in convs]
        # Types are named Conv, CaskConvolution, CaskGemmConvolution; a pointwise kernel may name its neighbours.
        rank = (re.search("conv", layer.type, re.IGNORECASE) is None, len(conv_names), index)
        for name in conv_names:
            ranks[name] = min(rank, ranks.get(name, rank))
    return {name: rank[-1] for name, rank in ranks.items()}


def _together(kernels: Sequence[dict[str, int]], order: dict[str, int]) -> dict[str, Owner]:
    """For each convolution, all that share kernels with it in any profile, directly or through others."""
    groups = {name: {name} for own in kernels for name in own}
    for own in kernels:
        sharing: dict[int, list[str]] = defaultdict(list)
        for name, index in own.items():
            sharing[index].append(name)
        for names in sharing.values():
            joined = set().union(*(groups[name] for name in names))
            for name in joined:
                groups[name] = joined
    return {name: tuple(sorted(group, key=order.__getitem__)) for name, group in groups.items()}


def _by_owner(
    profile: Profile, kernels: Mapping[str, int], together: Mapping[str, Owner], homes: dict[str, Owner]
) -> dict[Owner, list[LayerTime]]:
    """The layers by owner; stores the owner of each ONNX node in ``homes``."""
    layers_by_owner: dict[Owner, list[LayerTime]] = defaultdict(list)
    latest: Owner = ()
    before: Owner = ()
    for index, layer in enumerate(profile.layers):
        conv_names = [name for name in layer.onnx if name in kernels]
        computed = [name for name in conv_names if kernels[name] == index]
        home = next((homes[name] for name in layer.onnx if name in homes), None)
        if computed:
            owner = latest = together[computed[0]]
        elif conv_names:
            ran = [name for name in conv_names if kernels[name] < index]
            owner = together[max(ran, key=kernels.__getitem__) if ran else min(conv_names, key=kernels.__getitem__)]
        elif home is not None:
            owner = home
        elif profile.nodes.written_by(layer) in _SEPARATE:
            owner = (part_of(layer, profile.nodes),)
        else:
            owner = latest if layer.onnx else before
        before = owner
        for name in layer.onnx:
            if name not in kernels:
                homes.setdefault(name, owner)
        layers_by_owner[owner].append(layer)
    return layers_by_owner
