"""Turns a ranking into a precision plan: how many of the most sensitive convolutions stay in FP16."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from trtdet.errors import ConfigError
from trtdet.plans.optimiser import PrecisionChoice, Problem, most_accurate
from trtdet.plans.scores import Sensitivity
from trtdet.quantization import Cause, Entry, PrecisionPlan


def check_count(count: int, convolutions: int) -> None:
    """Raises ConfigError unless ``count`` is 0..``convolutions``, the number of convolutions in INT8."""
    if not 0 <= count <= convolutions:
        raise ConfigError(f"--keep-fp16 {count}: the model has {convolutions} convolutions in INT8 to keep")


def most_sensitive(ranking: Sensitivity, count: int) -> tuple[str, ...]:
    """The first ``count`` convolutions; raises ConfigError if there are fewer."""
    check_count(count, len(ranking.layers))
    return tuple(layer.name for layer in ranking.layers[:count])


def within_budget(ranking: Sensitivity, share: float) -> tuple[str, ...]:
    """The convolutions that remove the most error for a share (0..1) of all multiply-adds."""
    useful = {layer.name: layer for layer in ranking.layers if layer.score > 0}
    choices = {
        name: (PrecisionChoice("int8", layer.score), PrecisionChoice("fp16", 0.0, half=True, cost=layer.macs))
        for name, layer in useful.items()
    }
    return most_accurate(Problem(choices), share * ranking.macs).half


def named(plan: PrecisionPlan, names: Collection[str]) -> tuple[str, ...]:
    """Returns ``names``; raises ConfigError if one is no convolution of the model."""
    unknown = [name for name in names if name not in plan.entries]
    if unknown:
        close = [name for name in plan.entries if unknown[0].lower() in name.lower()][:3]
        hint = f"; did you mean {', '.join(close)}?" if close else "; plan.json of a bundle lists them"
        raise ConfigError(f"--keep-fp16: the model has no convolution '{unknown[0]}'{hint}")
    return tuple(names)


def keeping(plan: PrecisionPlan, reasons: Mapping[str, str], cause: Cause) -> PrecisionPlan:
    """The plan with the convolutions of ``reasons`` in FP16; the others keep their entries."""
    entries = {
        name: Entry("fp16", reasons[name], cause) if name in reasons else entry for name, entry in plan.entries.items()
    }
    return PrecisionPlan(entries)


def reasons(ranking: Sensitivity, names: Collection[str]) -> dict[str, str]:
    """Why each of the convolutions is in FP16: its rank and its part of the error."""
    count, total = len(ranking.layers), ranking.total
    return {
        layer.name: f"kept: rank {layer.rank} of {count}, {max(layer.score, 0.0) / total:.1%} of the error"
        for layer in ranking.layers
        if layer.name in names
    }
