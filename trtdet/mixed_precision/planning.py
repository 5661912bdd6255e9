"""From a ranking to a precision plan: how many of the most sensitive convolutions stay in FP16."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from trtdet.errors import ConfigError
from trtdet.mixed_precision.program import Choice, Problem, most_accurate
from trtdet.mixed_precision.scores import Sensitivity
from trtdet.mixed_precision.trade_off import MAP, Figure
from trtdet.quantization import Cause, Entry, PrecisionPlan


def check_count(count: int, convolutions: int) -> None:
    """Refuses a number of convolutions that the model does not have in INT8."""
    if not 0 <= count <= convolutions:
        raise ConfigError(f"--keep-fp16 {count}: the model has {convolutions} convolutions in INT8 to keep")


def check_share(share: float) -> None:
    """Refuses a share of the multiply-adds that is none."""
    if not 0 <= share <= 1:
        raise ConfigError(f"--fp16-budget must be a share of the multiply-adds, 0 to 1, got {share:g}")


def check_bound(bound: float, figure: Figure = MAP) -> None:
    """Refuses a bound on the loss that nothing can keep."""
    if not bound >= 0:
        raise ConfigError(f"{figure.option} must be at least 0 {figure.unit}, got {bound:g}")


def most_sensitive(ranking: Sensitivity, count: int) -> tuple[str, ...]:
    """The first ``count`` convolutions.

    Raises:
        ConfigError: there are not so many.
    """
    check_count(count, len(ranking.layers))
    return tuple(layer.name for layer in ranking.layers[:count])


def within_budget(ranking: Sensitivity, share: float) -> tuple[str, ...]:
    """The convolutions that take the most error away for a share of all multiply-adds.

    Args:
        ranking: scores and multiply-adds.
        share: of the multiply-adds of all convolutions, 0..1.

    Raises:
        ConfigError: the share is out of range.
    """
    check_share(share)
    useful = {layer.name: layer for layer in ranking.layers if layer.score > 0}
    choices = {
        name: (Choice("int8", layer.score), Choice("fp16", 0.0, half=True, cost=layer.macs))
        for name, layer in useful.items()
    }
    return most_accurate(Problem(choices), share * ranking.macs).half


def named(plan: PrecisionPlan, names: Collection[str]) -> tuple[str, ...]:
    """``names``, all of them convolutions of the model.

    Raises:
        ConfigError: a name is not that of a convolution of the model.
    """
    unknown = [name for name in names if name not in plan.entries]
    if unknown:
        close = [name for name in plan.entries if unknown[0].lower() in name.lower()][:3]
        hint = f"; did you mean {', '.join(close)}?" if close else "; plan.json of a bundle lists them"
        raise ConfigError(f"--keep-fp16: the model has no convolution '{unknown[0]}'{hint}")
    return tuple(names)


def keeping(plan: PrecisionPlan, reasons: Mapping[str, str], cause: Cause) -> PrecisionPlan:
    """The plan with some convolutions in FP16.

    Args:
        plan: the other convolutions keep their entries.
        reasons: by convolution.
        cause: of them all.
    """
    entries = {
        name: Entry("fp16", reasons[name], cause) if name in reasons else entry for name, entry in plan.entries.items()
    }
    return PrecisionPlan(entries)


def reasons(ranking: Sensitivity, names: Collection[str]) -> dict[str, str]:
    """Why each of the convolutions is kept: its rank and its part of the error."""
    total = sum(max(layer.score, 0.0) for layer in ranking.layers) or 1.0
    count = len(ranking.layers)
    return {
        layer.name: f"kept: rank {layer.rank} of {count}, {max(layer.score, 0.0) / total:.1%} of the error"
        for layer in ranking.layers
        if layer.name in names
    }
