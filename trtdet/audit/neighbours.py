"""The cost of an engine as a function of neighbouring choices: which kernels depend on which convolutions' precisions.

What a kernel costs depends on the convolutions around it and on no other, so that the cost of every plan is a sum of
small tables. A change of precision then costs what the builder makes of it: a tensor that INT8 and FP16 convolutions
read is written twice, an activation goes into an FP16 kernel only where nothing behind it reads INT8, see
:class:`trtdet.audit.fp16.InFp16`.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from trtdet.audit.roofline import Roofline
from trtdet.audit.traffic import Flow
from trtdet.errors import BackendError

_MOST = 8
"""Convolutions around a kernel of which all combinations are worked out; of more than these all pairs are."""

Price = Callable[[Sequence[int], Collection[str]], float]
"""The cost of some layers, by index, with some convolutions in FP16."""


@dataclass(frozen=True, eq=False)
class Joint:
    """What kernels cost together, by the precisions of the convolutions around them.

    Attributes:
        convs: names of the convolutions; at least one.
        cost: float64 (2,) * len(convs): an axis for each convolution, 0 where it is in INT8 and 1 in FP16.
    """

    convs: tuple[str, ...]
    cost: NDArray[np.float64]

    def of(self, fp16: Collection[str]) -> float:
        """The cost with these convolutions in FP16, which may name others too."""
        return float(self.cost[tuple(int(name in fp16) for name in self.convs)])


@dataclass(frozen=True)
class Costs:
    """The cost of an engine as a sum of tables.

    Attributes:
        convs: the convolutions that may be in FP16, in the order of the engine.
        joints: of which the sum, with ``fixed``, is the cost of a plan: exactly where there are at most eight
            convolutions around each kernel; where there are more, exactly for up to two of them in FP16.
        fixed: of all that depends on no choice.
        unit: of the cost, in words.
        gpu: that times are of; empty where the cost is no time.
    """

    convs: tuple[str, ...]
    joints: tuple[Joint, ...]
    fixed: float
    unit: str = "ms (estimate)"
    gpu: str = ""

    def of(self, fp16: Collection[str]) -> float:
        """The cost of a plan with these convolutions in FP16, and all others of ``convs`` in INT8."""
        chosen = frozenset(fp16)
        return self.fixed + math.fsum(joint.of(chosen) for joint in self.joints)

    def shared_by(self, images: int) -> Costs:
        """The cost of one of so many images."""
        joints = tuple(Joint(joint.convs, joint.cost / images) for joint in self.joints)
        return replace(self, joints=joints, fixed=self.fixed / images)


def time_costs(flow: Flow, roofline: Roofline) -> Costs:
    """Milliseconds of a run, by the estimate that :func:`trtdet.audit.roofline.estimate` gives for a plan.

    The flow is of an engine with every convolution in INT8 that may be.
    """

    def price(layers: Sequence[int], fp16: Collection[str]) -> float:
        return math.fsum(layer.ms for layer in roofline.layers(layers, fp16))

    return split_costs(flow, price)


@dataclass(frozen=True)
class MeasuredPart:
    """What some layers of an engine take, and what stands in their place with every open convolution in FP16.

    Attributes:
        convs: the convolutions that the layers belong to; none for what belongs to no convolution.
        layers: names of the engine's layers.
        int8, fp16: milliseconds of a run, at least 0.
    """

    convs: tuple[str, ...]
    layers: tuple[str, ...]
    int8: float
    fp16: float


def measured_costs(flow: Flow, roofline: Roofline, measured: Sequence[MeasuredPart]) -> Costs:
    """Milliseconds of a run by what two engines took, layer by layer: all in INT8, and all in FP16.

    Each layer's estimate is multiplied by what the layer took beside its estimate, in the one engine or in the other as
    its convolutions are in INT8 or in FP16. So both engines cost what was measured; between them the estimate says what
    a boundary makes of it.

    Args:
        flow: an engine with every convolution in INT8 that may be.
        roofline: of this engine on any GPU near the measured.
        measured: all layers of the two.

    Raises:
        BackendError: no layer that was measured is the flow's.
    """
    convs = _open(flow)
    everything = range(len(flow.layers))
    int8, fp16 = ({layer.name: layer.ms for layer in roofline.layers(everything, half)} for half in ((), convs))
    slower = _ratios(int8, [(part.layers, part.int8) for part in measured])
    slower_fp16 = _ratios(fp16, [(part.layers, part.fp16) for part in measured])
    owners = {name: frozenset(part.convs) & convs.keys() for part in measured for name in part.layers}

    def price(layers: Sequence[int], half: Collection[str]) -> float:
        times = []
        for layer in roofline.layers(layers, half):
            own, ratio = owners.get(layer.name), slower.get(layer.name, 0.0)
            if own <= frozenset(half) if own else layer.ms != int8.get(layer.name):
                ratio = slower_fp16.get(layer.name, ratio)
            times.append(layer.ms * ratio)
        return math.fsum(times)

    return split_costs(flow, price)


def _ratios(estimates: Mapping[str, float], measured: Sequence[tuple[Sequence[str], float]]) -> dict[str, float]:
    """How many times as long as estimated each layer takes; what layers without an estimate take is every layer's."""
    parts = [(names, ms, math.fsum(estimates.get(name, 0.0) for name in names)) for names, ms in measured]
    matched = math.fsum(ms for _, ms, estimated in parts if estimated > 0)
    if matched <= 0:
        raise BackendError(
            "the names of the layers that were measured are none of those that the engine lists",
            "name a GPU with --gpu for estimates instead",
        )
    share = math.fsum(ms for _, ms, _ in parts) / matched
    return {name: share * ms / estimated for names, ms, estimated in parts if estimated > 0 for name in names}


def split_costs(flow: Flow, price: Price) -> Costs:
    """Splits a cost into tables over the precisions of the convolutions around each layer, on which alone it depends.

    The convolutions that read INT8 may be put into FP16.
    """
    open_ = _open(flow)
    joints: list[Joint] = []
    fixed = 0.0
    for layers, convs in _groups(flow, open_):
        if len(convs) <= _MOST:
            table = np.empty((2,) * len(convs))
            for state in np.ndindex(table.shape):
                table[state] = price(layers, [name for name, half in zip(convs, state, strict=True) if half])
            if np.ptp(table) > 0:
                joints.append(Joint(convs, table))
            else:
                fixed += float(table.flat[0])
            continue
        # What single convolutions in FP16 change, and what pairs change beyond that.
        base = price(layers, ())
        fixed += base
        alone = {name: price(layers, [name]) - base for name in convs}
        joints += [Joint((name,), np.array([0.0, change])) for name, change in alone.items() if change]
        for first, second in itertools.combinations(convs, 2):
            more = price(layers, [first, second]) - base - alone[first] - alone[second]
            if abs(more) > 1e-12 * abs(base):
                joints.append(Joint((first, second), np.array([[0.0, 0.0], [0.0, more]])))
    return Costs(tuple(open_), tuple(joints), fixed)


def _open(flow: Flow) -> dict[str, int]:
    """The convolutions that may be put into FP16, with their layers."""
    return {name: conv.layer for name, conv in flow.convolutions.items() if flow.layers[conv.layer].input == "Int8"}


def _groups(flow: Flow, open_: Mapping[str, int]) -> list[tuple[tuple[int, ...], tuple[str, ...]]]:
    """The layers whose cost depends on the same convolutions, with these; a group within another is part of it.

    A layer moves its tensors in types that the convolutions beside it decide, and those beside the layers that share a
    tensor with it, as these become part of an FP16 kernel or not. Layers that hand INT8 on are looked through, and
    convolutions whose precision is open are not: what is behind them is on their other side.
    """
    own = frozenset(open_.values())
    # The tensors of a layer, of an open convolution without those that it reads in INT8.
    sides = [
        [tensor.name for tensor in (*(layer.inputs[1:] if index in own else layer.inputs), *layer.outputs)]
        for index, layer in enumerate(flow.layers)
    ]
    layers_at: dict[str, list[int]] = defaultdict(list)
    convs_at: dict[str, set[str]] = defaultdict(set)
    for index, side in enumerate(sides):
        for tensor in side:
            layers_at[tensor].append(index)
    for name, index in open_.items():
        for tensor in (flow.layers[index].inputs[0].name, *sides[index]):
            convs_at[tensor].add(name)

    def through(tensors: Iterable[str]) -> set[str]:
        """These tensors and what layers that hand INT8 on make of them."""
        reached, waiting = set(tensors), list(tensors)
        while waiting:
            for index in layers_at[waiting.pop()]:
                fresh = set(sides[index]) - reached if index in flow.hands_on else set()
                reached |= fresh
                waiting += fresh
        return reached

    groups: dict[frozenset[str], list[int]] = {}
    for index, layer in enumerate(flow.layers):
        if layer.bytes:
            near = through(sides[index])
            beside = {other for tensor in near for other in layers_at[tensor]} - own
            reached = through(near.union(*(sides[other] for other in beside)))
            groups.setdefault(frozenset().union(*(convs_at[tensor] for tensor in reached)), []).append(index)
    merged: dict[frozenset[str], list[int]] = {}
    for convs in sorted(groups, key=lambda convs: (-len(convs), groups[convs][0])):
        larger = (other for other in merged if convs < other and len(other) <= _MOST)
        merged.setdefault(next(larger, convs), []).extend(groups[convs])
    order = {name: place for place, name in enumerate(open_)}
    return [
        (tuple(sorted(layers)), tuple(sorted(convs, key=lambda name: order[name]))) for convs, layers in merged.items()
    ]
