"""What was tried for a bound on the loss: plans with their costs, their errors and their measured scores."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from trtdet.mixed_precision.additivity import Additivity
from trtdet.tables import Column, Table


@dataclass(frozen=True)
class Figure:
    """What is bounded.

    Attributes:
        name: in files.
        option: that gives the bound.
        unit: of the bound.
        column: of tables.
    """

    name: str
    option: str
    unit: str
    column: str


MAP = Figure("map", "--max-map-drop", "mAP points", "mAP")
"""COCO mAP 0.50:0.95 on annotated images."""

AGREEMENT = Figure("agreement", "--max-disagreement", "points of agreement", "agreement")
"""Average precision 0.50:0.95 against the float model's detections, see :func:`trtdet.evaluation.agreement.agree`."""


@dataclass(frozen=True)
class Score:
    """A measured score of a variant.

    Attributes:
        map: COCO mAP 0.50:0.95, 0..1; None without annotations.
        difference: to the float model's; of an agreement to 1.
        low, high: the 90 % interval of the difference.
        images: that it was measured on.
        agreement: average precision against the float model's detections, 0..1, where that is bounded.
    """

    map: float | None
    difference: float
    low: float
    high: float
    images: int = 0
    agreement: float | None = None

    @property
    def value(self) -> float | None:
        """The figure that is bounded, 0..1."""
        return self.map if self.agreement is None else self.agreement

    @property
    def loss(self) -> float:
        """In points (hundredths)."""
        return -100 * self.difference

    @property
    def worst(self) -> float:
        """The upper end of the interval of the loss, in points (hundredths)."""
        return -100 * self.low

    @property
    def interval(self) -> str:
        """Of the difference, in points."""
        return f"{100 * self.low:+.2f} .. {100 * self.high:+.2f}"


@dataclass(frozen=True)
class Candidate:
    """A plan that was tried.

    Attributes:
        kept: in words.
        names: of the convolutions in FP16, in the order of the network.
        share: of all multiply-adds, 0..1.
        score: as measured on the images that choose.
        error: the sum of the errors of its convolutions, each measured alone: a power at the head.
        cost: by the program; milliseconds where an engine's layers are known.
        reported: as measured on the images that report; None where that was not asked.
        head: the power of the error at the head, measured with the whole plan; None where nothing was ranked.
    """

    kept: str
    names: tuple[str, ...]
    share: float
    score: Score
    error: float = 0.0
    cost: float = 0.0
    reported: Score | None = None
    head: float | None = None


@dataclass(frozen=True)
class TradeOff:
    """What was tried for a bound on the loss.

    Attributes:
        bound: the largest loss allowed, in points (hundredths): the upper end of its 90 % interval is within it.
        reference: the float model's score on the images that choose, 0..1; 1 for an agreement.
        candidates: the cheapest first.
        chosen: the cheapest of which the images that report show that it keeps the bound.
        evaluations: scores that it took, the float model's two included.
        unit: of the costs.
        needed: how many images to choose by, and as many to report on, would show the bound of a cheaper plan that was
            tried, were its loss what was measured; None where no number would do.
        figure: the name of what is bounded, see :class:`Figure`.
        additivity: how far errors added up; None where nothing was ranked.
    """

    bound: float
    reference: float
    candidates: tuple[Candidate, ...]
    chosen: Candidate
    evaluations: int
    unit: str = "ms"
    needed: int | None = None
    figure: str = MAP.name
    additivity: Additivity | None = None

    @property
    def summary(self) -> str:
        """One sentence: what it took, and what more images would show."""
        own = f"; FP32 mAP {100 * self.reference:.2f}" if self.figure == MAP.name else ""
        more = f"; {self.needed} images on each side would show it of a cheaper plan" if self.needed else ""
        return f"{self.evaluations} scores{own}{more}"

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)

    def to_json(self) -> str:
        return json.dumps({"schema": 1, **asdict(self)}, indent=1) + "\n"

    def table(self) -> Table:
        """What was tried; scores in points."""
        column = AGREEMENT.column if self.figure == AGREEMENT.name else MAP.column
        columns = (
            *(Column("kept in FP16", align="left"), "convs", Column("multiply-adds", ".1%"), Column(self.unit, ".4g")),
            *(Column(column, ".2f"), Column("against FP32", "+.2f"), Column("90 % interval", align="right")),
            *(Column("on other images", "+.2f"), Column("90 % interval", align="right"), ""),
        )
        rows = [
            [
                *(tried.kept, len(tried.names), tried.share, tried.cost, 100 * (tried.score.value or 0.0)),
                *(100 * tried.score.difference, tried.score.interval),
                *(None if tried.reported is None else 100 * tried.reported.difference,),
                *("" if tried.reported is None else tried.reported.interval,),
                "<- chosen" if tried is self.chosen else "",
            ]
            for tried in self.candidates
        ]
        return Table(columns, rows, notes=() if self.additivity is None else [str(self.additivity)])
