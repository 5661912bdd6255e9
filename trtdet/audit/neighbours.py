"""The cost of precision plans as a sum of small tables, each over the convolutions around some kernels.

The cost of a kernel depends only on the precisions of the convolutions around it, so the tables include the costs of
changing precision: a tensor that both INT8 and FP16 convolutions read is written twice, and an activation is fused into
an FP16 kernel only if no INT8 reader follows. The rules are in :class:`trtdet.audit.fp16.InFp16`.
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
"""With at most this many convolutions around a kernel all combinations are priced, otherwise all pairs."""

Price = Callable[[Sequence[int], Collection[str]], float]
"""The cost of some layers, given by index, with some convolutions in FP16."""


@dataclass(frozen=True, eq=False)
class Joint:
    """Joint cost of some kernels by the precisions of the convolutions ``convs`` around them, at least one.

    ``cost`` is float64 of shape (2,) * len(convs): an axis per convolution, with index 0 for INT8 and 1 for FP16.
    """

    convs: tuple[str, ...]
    cost: NDArray[np.float64]

    def of(self, fp16: Collection[str]) -> float:
        """The cost with these convolutions in FP16; names that are not in ``convs`` are ignored."""
        return float(self.cost[tuple(int(name in fp16) for name in self.convs)])


@dataclass(frozen=True)
class Costs:
    """The cost of an engine: ``fixed``, which does not depend on the plan, plus a sum of tables.

    The sum is exact for kernels with at most eight convolutions around them, and else for at most two of these in FP16.
    ``convs`` are the convolutions that may run in FP16, in the order of the engine. ``gpu`` is the GPU that times refer
    to; empty for other costs.
    """

    convs: tuple[str, ...]
    joints: tuple[Joint, ...]
    fixed: float
    unit: str = "ms (estimate)"
    gpu: str = ""

    def of(self, fp16: Collection[str]) -> float:
        """The cost of the plan with these convolutions in FP16 and the others in INT8."""
        chosen = frozenset(fp16)
        return self.fixed + math.fsum(joint.of(chosen) for joint in self.joints)

    def shared_by(self, images: int) -> Costs:
        """The cost per image for a batch of this many images."""
        joints = tuple(Joint(joint.convs, joint.cost / images) for joint in self.joints)
        return replace(self, joints=joints, fixed=self.fixed / images)


def time_costs(flow: Flow, roofline: Roofline) -> Costs:
    """Estimated milliseconds per run; the flow is of an engine with every allowed convolution in INT8."""
    return split_costs(flow, lambda layers, fp16: math.fsum(layer.ms for layer in roofline.layers(layers, fp16)))


@dataclass(frozen=True)
class MeasuredPart:
    """Measured milliseconds per run of some layers, with all their convolutions in INT8 and with all in FP16.

    ``convs`` are the convolutions of the layers; empty if the layers have none. The times are at least 0.
    """

    convs: tuple[str, ...]
    layers: tuple[str, ...]
    int8: float
    fp16: float


def measured_costs(flow: Flow, roofline: Roofline, measured: Sequence[MeasuredPart]) -> Costs:
    """Milliseconds per run, from the measured layer times of two engines: one all in INT8, one all in FP16.

    The estimate of a layer is scaled by its measured time over its estimated time, taken from the INT8 or the FP16
    engine by the precision of its convolutions. For both engines the cost is then the measured time. For plans between
    them the estimate gives the cost of precision boundaries. ``flow`` is as in :func:`time_costs`, ``measured`` has all
    layers of both engines, and ``roofline`` is for the measured GPU or a similar one. Raises BackendError if no
    measured layer is in the flow.
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
    """Measured over estimated time by layer; the time of layers without an estimate is spread over all others."""
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
    """Splits a cost into tables over the precisions of the convolutions around each layer."""
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
        # First the change from each convolution in FP16, then what each pair changes beyond the sum.
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
    """The convolutions that may move to FP16, which are those that read INT8, with their layers."""
    return {name: conv.layer for name, conv in flow.convolutions.items() if flow.layers[conv.layer].input == "Int8"}


def _groups(flow: Flow, open_: Mapping[str, int]) -> list[tuple[tuple[int, ...], tuple[str, ...]]]:
    """Groups of layers whose cost depends on the same convolutions, each with these convolutions.

    The types of a layer's tensors depend on the convolutions next to it, and on those next to layers that share a
    tensor with it, because these may be fused into an FP16 kernel. The search passes through layers that pass INT8 on
    and stops at convolutions that may move to FP16. A group whose convolutions are a subset of another's joins it.
    """
    own = frozenset(open_.values())
    # The tensors of each layer, without the first input of convolutions that may move to FP16.
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
        """These tensors and all that are connected to them by layers that pass INT8 on."""
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
