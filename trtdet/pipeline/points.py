"""The front of a model: plans with what each costs and keeps, as a value, as tables and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from trtdet.evaluation.comparison import MaskScore
from trtdet.files.documents import read_result
from trtdet.pipeline.options import Objective
from trtdet.tables import Cell, Column, Table


@dataclass(frozen=True)
class Point:
    """A plan and what is known of it.

    Attributes:
        number: in its front, 1 for the cheapest.
        titles: what plan it is: ``all FP16``, ``all INT8``, ``default``, ``depthwise in FP16``; ``program`` or
            ``program, by size`` where only the integer program gives it; several where these are one plan.
        kept: the convolutions in FP16, in the order of the network.
        counts: convolutions by precision, as built where an engine lists its layers and else as planned.
        error: predicted at the head: the sum of its INT8 convolutions' powers.
        estimated: milliseconds on the front's GPU; None where no engine lists its layers.
        measured: milliseconds on the GPU of this machine; None where none ran it.
        multiply_adds: in millions for one image, those in FP16 twice: the cost where no time is known.
        weights: bytes of the convolutions' weights.
        engine: bytes of the engine's file; None where none was built.
        map: COCO mAP 0.50:0.95, 0..1; None without annotations.
        difference: of mAP to the float model's, 0..1; without annotations, of the agreement with its detections to 1.
        low, high: the 90 % interval of the difference.
        beaten_by: number of the cheapest point that is no worse in accuracy and cost and better in one, or is cheaper,
            has no larger predicted error, and is not shown to be less accurate by the interval; None where there is
            none.
        masks: the score of masks; None where the detector or the annotations have none.
    """

    number: int
    titles: tuple[str, ...]
    kept: tuple[str, ...]
    counts: dict[str, int]
    error: float
    estimated: float | None
    measured: float | None
    multiply_adds: float
    weights: int
    engine: int | None
    map: float | None
    difference: float
    low: float
    high: float
    beaten_by: int | None = None
    masks: MaskScore | None = None

    @property
    def title(self) -> str:
        return ", ".join(self.titles)

    @property
    def interval(self) -> str:
        """Of the difference, in points (hundredths)."""
        return _interval(self.low, self.high)

    @property
    def mask_difference(self) -> str:
        """Of mask mAP to the float model's and its 90 % interval, in points (hundredths); empty without masks."""
        if self.masks is None or self.masks["low"] is None or self.masks["high"] is None:
            return ""
        return f"{100 * self.masks['difference']:+.2f} ({_interval(self.masks['low'], self.masks['high'])})"


def _interval(low: float, high: float) -> str:
    return f"{100 * low:+.2f} .. {100 * high:+.2f}"


@dataclass(frozen=True)
class Front:
    """What a tune found.

    Attributes:
        name: of the model.
        folder: of its files.
        points: the cheapest first.
        objective: what they were chosen for.
        gpu: of the estimates; None where there are none.
        batch: images at once, that times are of; times are for one image where the objective is throughput.
        device: what measured; None where nothing ran.
        reference: mAP of the float model, 0..1; None without annotations.
        calibration: images that chose: of the calibration, of which some ranked.
        reported: images that accuracy was measured on, none of which chose.
        left_out: images that were given to report on and are calibration images.
        formats: the options that say what else is quantised, such as ``--fp8``.
    """

    name: str
    folder: Path
    points: tuple[Point, ...]
    objective: Objective
    gpu: str | None
    batch: int
    device: str | None
    reference: float | None
    calibration: int
    reported: int
    left_out: int = 0
    formats: tuple[str, ...] = ()

    @property
    def annotated(self) -> bool:
        """Whether accuracy is mAP; else it is the agreement with the float model's detections."""
        return self.reference is not None

    @property
    def unit(self) -> str:
        """Of the costs that points are compared by."""
        image = " an image" if self.objective == "throughput" else ""
        if self.objective == "size":
            return "MB of weights"
        if self.device is not None:
            return f"ms{image} (measured on {self.device}, batch {self.batch})"
        if self.gpu is not None:
            return f"ms{image} (estimate, {self.gpu}, batch {self.batch})"
        return "million multiply-adds, FP16 twice"

    @property
    def basis(self) -> str:
        """What the columns rest on, in two sentences."""
        left = f" ({self.left_out} that calibrate left out)" if self.left_out else ""
        what = "mAP is of" if self.annotated else "agreement with the detections of FP32 (at 0.25 and more) is of"
        chosen = f"{self.calibration} calibration images chose, {what} {self.reported} others{left}"
        made = f"; made with {' '.join(self.formats)}" if self.formats else ""
        return f"Points are compared by {self.unit}; {chosen}{made}"

    @property
    def accuracy(self) -> str:
        """What the differences are of."""
        if self.annotated:
            return f"mAP against FP32, on {self.reported} images that chose nothing"
        return f"agreement with FP32's detections against 1, on {self.reported} images that chose nothing"

    def cost(self, point: Point) -> float:
        """What a point is compared by, in ``unit``."""
        if self.objective == "size":
            return point.weights / 1e6
        if self.device is not None and point.measured is not None:
            return point.measured
        return point.multiply_adds if point.estimated is None else point.estimated

    def numbered(self) -> Front:
        """The same with the points in the order of their costs, numbered, and compared with each other."""
        order = sorted(self.points, key=lambda point: (self.cost(point), -point.difference, len(point.kept)))
        points = [replace(point, number=number) for number, point in enumerate(order, 1)]
        return replace(self, points=tuple(replace(point, beaten_by=self._beaten(point, points)) for point in points))

    def _beaten(self, point: Point, others: Sequence[Point]) -> int | None:
        mine = (self.cost(point), -point.difference)
        for other in others:
            theirs = (self.cost(other), -other.difference)
            measured = theirs != mine and theirs[0] <= mine[0] and theirs[1] <= mine[1]
            # What images cannot tell apart is no reason to pay more for a larger error.
            predicted = theirs[0] < mine[0] and other.error <= point.error and other.difference >= point.low
            if measured or predicted:
                return other.number
        return None

    def markdown(self) -> str:
        """The same as Markdown."""
        return self.table().markdown()

    def table(self) -> Table:
        """The points, a row each."""
        shown = self._columns()
        rows = [[cell(point) for _, cell in shown] for point in self.points]
        return Table([column for column, _ in shown], rows)

    def _columns(self) -> list[tuple[Column, Callable[[Point], Cell]]]:
        """What is known of the points, each with the cell of a point."""
        found: list[tuple[Column, Callable[[Point], Cell]]] = [
            (Column("point", align="right"), lambda point: point.number),
            (Column("plan"), lambda point: point.title),
            (Column("INT8 / FP16 / FP32 convs"), lambda point: " / ".join(map(str, point.counts.values()))),
        ]
        if self.device is not None:
            found.append((Column("ms, measured", ".4f"), lambda point: point.measured))
        if self.gpu is not None:
            found.append((Column(f"ms, estimate for {self.gpu}", ".4f"), lambda point: point.estimated))
        else:
            found.append((Column("million multiply-adds, FP16 twice", ".1f"), lambda point: point.multiply_adds))
        found.append((Column("weights MB", ".3f"), lambda point: point.weights / 1e6))
        if any(point.engine is not None for point in self.points):
            found.append((Column("engine MB", ".2f"), lambda point: point.engine and point.engine / 1e6))
        if self.annotated:
            found.append((Column("mAP", ".2f"), lambda point: point.map and 100 * point.map))
        against = "against FP32" if self.annotated else "agreement with FP32, against 100"
        found.append((Column(against, "+.2f"), lambda point: 100 * point.difference))
        found.append((Column("90 % interval", align="right"), lambda point: point.interval))
        if any(point.masks is not None for point in self.points):
            found.append((Column("masks against FP32", align="right"), lambda point: point.mask_difference))
        return [
            *found,
            (Column("error at the head", ".3g"), lambda point: point.error),
            (Column(""), lambda point: f"beaten by {point.beaten_by}" if point.beaten_by else ""),
        ]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON: ``front.json``."""
        plain = asdict(replace(self, points=()))
        points = [{**asdict(point), "cost": self.cost(point)} for point in self.points]
        said = {"unit": self.unit, "accuracy": "map" if self.annotated else "agreement"}
        return {"schema": 1, **plain, "folder": str(self.folder), **said, "points": points}

    @staticmethod
    def load(path: Path) -> Front:
        """Reads ``front.json``.

        Raises:
            ConfigError: it cannot be read, or is no front.
        """
        return read_result(path, Front, "run 'trtdet tune' again")
