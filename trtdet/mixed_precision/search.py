"""The search for the smallest set of convolutions in FP16 whose measured loss is within a bound."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from trtdet.errors import ConfigError
from trtdet.mixed_precision.planning import check_bound, most_sensitive
from trtdet.mixed_precision.scores import LayerScore, Sensitivity
from trtdet.quantization.macs import DEPTHWISE
from trtdet.tables import Column, Table

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

    @property
    def loss(self) -> float:
        """In mAP points (hundredths)."""
        return -100 * self.difference


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
        columns = (
            *(Column("kept in FP16", align="left"), "convs", Column("multiply-adds", ".1%"), Column("mAP", ".2f")),
            *(Column("against FP32", "+.2f"), Column("90 % interval", align="right"), ""),
        )
        rows = [
            [
                *(tried.kept, len(tried.names), tried.share),
                *(100 * tried.score.map, 100 * tried.score.difference),
                f"{100 * tried.score.low:+.2f} .. {100 * tried.score.high:+.2f}",
                "<- chosen" if tried is self.chosen else "",
            ]
            for tried in self.candidates
        ]
        return Table(columns, rows).text()


def smallest(
    ranked: Callable[[], Sensitivity],
    bound: float,
    reference: float,
    measure: Callable[[tuple[str, ...]], Score],
    evaluations: int = EVALUATIONS,
) -> TradeOff:
    """The smallest set of convolutions in FP16 whose measured loss is within a bound.

    The sets tried are the first so many of the ranking, and the depthwise convolutions. Until a set keeps the bound,
    the next guess takes the loss to fall as the error that is left does; then the number is halved between the largest
    set that failed and the smallest that did not.

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
    if none.score.loss <= bound:
        return TradeOff(bound, reference, (none,), none, 2)
    search = _Search(ranked(), bound, measure, none)
    search.run(evaluations)
    candidates = tuple(sorted(search.tried, key=lambda tried: (len(tried.names), tried.kept)))
    held = [tried for tried in candidates if tried.score.loss <= bound]
    if not held:
        best = max(candidates, key=lambda tried: tried.score.map)
        raise ConfigError(
            f"--max-map-drop {bound:g}: no set of convolutions in FP16 keeps the loss within {bound:g} mAP points of "
            f"{100 * reference:.2f}; the best of {len(candidates)}, {best.kept}, loses {best.score.loss:.2f}"
        )
    chosen = min(held, key=lambda tried: (len(tried.names), tried.share))
    return TradeOff(bound, reference, candidates, chosen, len(candidates) + 1)


class _Search:
    """What was tried so far."""

    def __init__(
        self, ranking: Sensitivity, bound: float, measure: Callable[[tuple[str, ...]], Score], none: Candidate
    ) -> None:
        self.tried = [none]
        self._ranking, self._bound, self._measure = ranking, bound, measure
        self._macs = {layer.name: layer.macs for layer in ranking.layers}

    def run(self, evaluations: int) -> None:
        """Tries sets until the smallest is found or the evaluations, the float model's included, are used up."""
        layers, bound = self._ranking.layers, self._bound
        depthwise = tuple(layer.name for layer in layers if layer.depthwise)
        if depthwise and len(depthwise) < len(layers):
            self._try(DEPTHWISE, depthwise)
        low, high, failed = 0, len(layers) + 1, 0
        count = _guess(layers, 0, bound / self.tried[0].score.loss)
        while high - low > 1 and len(self.tried) + 1 < evaluations:
            if high > len(layers) and len(self.tried) + 2 == evaluations:
                count = len(layers)  # the last chance
            loss = self._try(
                f"the first {count}" if count < len(layers) else "all", most_sensitive(self._ranking, count)
            )
            if loss <= bound:
                high = count
            else:
                low, failed = count, failed + 1
            if high <= len(layers):
                count = (low + high) // 2
            else:  # wider steps after every failure
                count = min(max(_guess(layers, low, bound / loss), low + low * failed // 4), len(layers))

    def _try(self, kept: str, names: tuple[str, ...]) -> float:
        """The loss with these convolutions in FP16."""
        share = sum(self._macs[name] for name in names) / max(self._ranking.macs, 1)
        self.tried.append(Candidate(kept, names, share, self._measure(names)))
        return self.tried[-1].score.loss


def _guess(layers: tuple[LayerScore, ...], failed: int, part: float) -> int:
    """The number of convolutions after which this part of the error is left that was left after ``failed`` of them."""
    powers = [max(layer.score, 0.0) for layer in layers]
    target = part * sum(powers[failed:])
    count = failed + 1
    while count < len(layers) and sum(powers[count:]) > target:
        count += 1
    return count
