"""From a ranking to a precision plan: how many of the most sensitive convolutions stay in FP16."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from trtdet.errors import ConfigError
from trtdet.mixed_precision.ranking import DEPTHWISE, LayerScore, Sensitivity
from trtdet.quantization import Cause, Entry, PrecisionPlan

EVALUATIONS = 8
"""At most so many scores over the annotated images, that of the float model included."""


@dataclass(frozen=True)
class Score:
    """A measured score of a variant.

    Attributes:
        map: COCO mAP 0.50:0.95, 0..1.
        difference: to the float model's.
        low, high: the 90 % interval of the difference.
    """

    map: float
    difference: float
    low: float
    high: float


@dataclass(frozen=True)
class Candidate:
    """A set of convolutions in FP16 that was tried.

    Attributes:
        kept: in words.
        names: of the convolutions, in ranking order.
        share: of all multiply-adds, 0..1.
        score: as measured.
    """

    kept: str
    names: tuple[str, ...]
    share: float
    score: Score


@dataclass(frozen=True)
class TradeOff:
    """What was tried for a bound on the loss.

    Attributes:
        bound: the largest loss allowed, in mAP points (hundredths).
        reference: mAP of the float model, 0..1.
        candidates: in the order of their size.
        chosen: the smallest that keeps the bound.
        evaluations: scores that it took, the float model's included.
    """

    bound: float
    reference: float
    candidates: tuple[Candidate, ...]
    chosen: Candidate
    evaluations: int

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)

    def to_json(self) -> str:
        return json.dumps({"schema": 1, **asdict(self)}, indent=1) + "\n"

    def table(self) -> str:
        """Lines of text; mAP in points."""
        rows = [("kept in FP16", "convs", "multiply-adds", "mAP", "against FP32", "90 % interval", "")]
        for one in self.candidates:
            score = one.score
            rows.append(
                (
                    one.kept,
                    str(len(one.names)),
                    f"{one.share:.1%}",
                    f"{100 * score.map:.2f}",
                    f"{100 * score.difference:+.2f}",
                    f"{100 * score.low:+.2f} .. {100 * score.high:+.2f}",
                    "<- chosen" if one is self.chosen else "",
                )
            )
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = [
            "  ".join(
                cell.ljust(width) if column in (0, 6) else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        lines.insert(1, "-" * max(map(len, lines)))
        return "\n".join(lines)


def check_count(count: int, convolutions: int) -> None:
    """Refuses a number of convolutions that the model does not have in INT8."""
    if not 0 <= count <= convolutions:
        raise ConfigError(f"--keep-fp16 {count}: the model has {convolutions} convolutions in INT8 to keep")


def check_share(share: float) -> None:
    """Refuses a share of the multiply-adds that is none."""
    if not 0 <= share <= 1:
        raise ConfigError(f"--fp16-budget must be a share of the multiply-adds, 0 to 1, got {share:g}")


def check_bound(bound: float) -> None:
    """Refuses a bound on the loss that nothing can keep."""
    if not bound >= 0:
        raise ConfigError(f"--max-map-drop must be at least 0 mAP points, got {bound:g}")


def most_sensitive(ranking: Sensitivity, count: int) -> tuple[str, ...]:
    """The first ``count`` convolutions.

    Raises:
        ConfigError: there are not so many.
    """
    check_count(count, len(ranking.layers))
    return tuple(layer.name for layer in ranking.layers[:count])


def within_budget(ranking: Sensitivity, share: float) -> tuple[str, ...]:
    """The convolutions that take the most error away for a share of all multiply-adds.

    A knapsack filled by error per multiply-add, then by what still fits.

    Args:
        ranking: scores and multiply-adds.
        share: of the multiply-adds of all convolutions, 0..1.

    Raises:
        ConfigError: the share is out of range.
    """
    check_share(share)
    left = share * ranking.macs
    chosen = []
    useful = [layer for layer in ranking.layers if layer.score > 0]
    for layer in sorted(useful, key=lambda one: (-one.score / max(one.macs, 1), one.rank)):
        if layer.macs <= left:
            chosen.append(layer)
            left -= layer.macs
    return tuple(layer.name for layer in sorted(chosen, key=lambda one: one.rank))


def named(plan: PrecisionPlan, names: Collection[str]) -> tuple[str, ...]:
    """``names``, all of them convolutions of the model.

    Raises:
        ConfigError: one is no convolution of the model.
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
        plan: where the others stay what they are.
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


def smallest(
    ranked: Callable[[], Sensitivity],
    bound: float,
    reference: float,
    measure: Callable[[tuple[str, ...]], Score],
    evaluations: int = EVALUATIONS,
) -> TradeOff:
    """The smallest set of convolutions in FP16 whose measured loss is within a bound.

    The sets tried are the first so many of the ranking, and the depthwise convolutions. Until one holds, the next guess
    takes the loss to fall as the error that is left does; then the number is halved between what failed and what held.

    Args:
        ranked: gives the ranking; not asked where nothing need be kept.
        bound: the largest loss allowed, in mAP points (hundredths).
        reference: mAP of the float model, 0..1.
        measure: scores a variant, given the convolutions in FP16.
        evaluations: at most so many scores, the float model's included; at least 4.

    Raises:
        ConfigError: a bound below 0, or no set keeps it, not even all convolutions.
    """
    check_bound(bound)
    none = Candidate("none", (), 0.0, measure(()))
    loss = -100 * none.score.difference
    if loss <= bound:
        return TradeOff(bound, reference, (none,), none, 2)
    ranking = ranked()
    layers = ranking.layers
    tried = {none.kept: none}
    macs = {layer.name: layer.macs for layer in layers}

    def attempt(kept: str, names: tuple[str, ...]) -> bool:
        share = sum(macs[name] for name in names) / max(ranking.macs, 1)
        tried[kept] = Candidate(kept, names, share, measure(names))
        return -100 * tried[kept].score.difference <= bound

    def first(count: int) -> bool:
        kept = f"the first {count}" if count < len(layers) else "all"
        return attempt(kept, most_sensitive(ranking, count))

    held: list[Candidate] = []
    depthwise = tuple(layer.name for layer in layers if layer.depthwise)
    if depthwise and len(depthwise) < len(layers) and attempt(DEPTHWISE, depthwise):
        held.append(tried[DEPTHWISE])
    low, high, failed = 0, len(layers) + 1, 0
    count = _guess(layers, 0, bound / loss)
    while high - low > 1 and len(tried) + 1 < evaluations:
        if high > len(layers) and len(tried) + 2 == evaluations:
            count = len(layers)  # the last chance
        if first(count):
            high = count
            held.append(list(tried.values())[-1])
        else:
            low, failed = count, failed + 1
            loss = -100 * list(tried.values())[-1].score.difference
        if high <= len(layers):
            count = (low + high) // 2
        else:  # wider steps after every failure
            count = min(max(_guess(layers, low, bound / loss), low + low * failed // 4), len(layers))
    candidates = tuple(sorted(tried.values(), key=lambda one: (len(one.names), one.kept)))
    if not held:
        best = max(candidates, key=lambda one: one.score.map)
        raise ConfigError(
            f"--max-map-drop {bound:g}: no set of convolutions in FP16 keeps the loss within {bound:g} mAP points of "
            f"{100 * reference:.2f}; the best of {len(candidates)}, {best.kept}, loses "
            f"{-100 * best.score.difference:.2f}"
        )
    chosen = min(held, key=lambda one: (len(one.names), one.share))
    return TradeOff(bound, reference, candidates, chosen, len(tried) + 1)


def _guess(layers: tuple[LayerScore, ...], failed: int, part: float) -> int:
    """The number of convolutions after which this part of the error is left that was left after ``failed`` of them."""
    powers = [max(layer.score, 0.0) for layer in layers]
    target = part * sum(powers[failed:])
    count = failed + 1
    while count < len(layers) and sum(powers[count:]) > target:
        count += 1
    return count
