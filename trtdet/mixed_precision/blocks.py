"""A network's INT8 convolutions as a few blocks, each a run of neighbours with a name that people know it by."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import onnx

MOST_BLOCKS = 16
"""Blocks that a network is divided into at most: what a person can look over."""

_HELD = 4
"""So many times as large a run of one module is joined as readily as one that crosses into the next."""

_PART = re.compile(r"[^/.]+")


@dataclass(frozen=True)
class Block:
    """A run of convolutions.

    Attributes:
        name: the module that holds all of them and no other, such as ``model.2``; else the first and the last.
        convs: their names, in the order of the graph.
    """

    name: str
    convs: tuple[str, ...]


def blocks_of(model: onnx.ModelProto, convs: Sequence[str], most: int = MOST_BLOCKS) -> tuple[Block, ...]:
    """Divides convolutions into runs of neighbours.

    Neighbours are joined until there are few enough, the smallest runs first; runs that one module holds, as the names
    of their nodes say, and runs of which one feeds the other and nothing else are joined before others.

    Args:
        model: that they are of.
        convs: names of its nodes.
        most: blocks, at least 1.
    """
    wanted = set(convs)
    names = [node.name for node in model.graph.node if node.name in wanted]
    chained = _chained(model, names)
    runs = [[name] for name in names]
    while len(runs) > most:
        dear = [_price(first, second, chained) for first, second in pairwise(runs)]
        place = dear.index(min(dear))
        runs[place : place + 2] = [runs[place] + runs[place + 1]]
    modules = [_module(run) for run in runs]
    return tuple(
        Block(module if _holds(module, run, names) else _span(run), tuple(run))
        for module, run in zip(modules, runs, strict=True)
    )


def _price(first: list[str], second: list[str], chained: set[tuple[str, str]]) -> float:
    shared = len(_PART.findall(_module([*first, *second])))
    apart = 1 if (first[-1], second[0]) in chained else 2
    return (len(first) + len(second)) * apart / float(_HELD**shared)


def _chained(model: onnx.ModelProto, names: Sequence[str]) -> set[tuple[str, str]]:
    """Pairs of convolutions of which the first feeds the second alone, and nothing else feeds that."""
    wanted = set(names)
    behind: dict[str, frozenset[str]] = {}
    readers: dict[str, set[str]] = {name: set() for name in names}
    feeders: dict[str, frozenset[str]] = {}
    for node in model.graph.node:
        found = frozenset[str]().union(*(behind.get(name, frozenset()) for name in node.input))
        if node.name in wanted:
            feeders[node.name] = found
            for name in found:
                readers[name].add(node.name)
            found = frozenset({node.name})
        behind.update(dict.fromkeys(node.output, found))
    return {(next(iter(found)), name) for name, found in feeders.items() if len(found) == 1 == len(readers[min(found)])}


def _module(names: Sequence[str]) -> str:
    """The innermost module that holds nodes of these names; empty where names do not say."""
    shared = 0
    for parts in zip(*(_PART.findall(name)[:-1] for name in names), strict=False):
        if len(set(parts)) > 1:
            break
        shared += 1
    ends = [part.end() for part in _PART.finditer(names[0])]
    return names[0][: ends[shared - 1]].lstrip("/.") if shared else ""


def _holds(module: str, run: Sequence[str], names: Sequence[str]) -> bool:
    """Whether a module has all of a run and no other convolution."""
    parts = _PART.findall(module)
    return bool(parts) and sum(_PART.findall(name)[: len(parts)] == parts for name in names) == len(run)


def _span(run: Sequence[str]) -> str:
    return run[0] if len(run) == 1 else f"{run[0]} .. {run[-1]}"
