"""Variants of an experiment and their measurements: as values, as a table and as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from pydantic import TypeAdapter
from typing_extensions import TypedDict

from trtdet.audit.roofline import TIME_WITHIN
from trtdet.building.plan import PLAIN_UNIT
from trtdet.building.variants import EXPERIMENT, Overrides
from trtdet.config import Finite
from trtdet.evaluation.comparison import PartScore, each_score, interval_text, least_difference, spread_text
from trtdet.evaluation.parts import NAMES, Of
from trtdet.files import finish_replacing, write_together
from trtdet.files.documents import read_result
from trtdet.options import BuildOptions, Objective
from trtdet.tables import Cell, Column, Table

TABLE = "experiment.md"


class Proposals(TypedDict):
    """Recall of a two-stage detector's proposals, 0..1; ``proposals`` is their mean number per image.

    ``before`` and ``after`` are ``head.rpn_pre_nms_topk`` and ``head.rpn_post_nms_topk``; None means as configured.
    """

    before: int | None
    after: int | None
    ar100: Finite
    ar1000: Finite
    proposals: Finite


@dataclass(frozen=True)
class Variant:
    """A row of an experiment; mAP and differences are fractions, 0..1.

    Attributes:
        name: identifies the row in ``rows.jsonl``.
        titles: names of the plan, such as ``all FP16`` and ``default``, or ``optimiser``; of a grid, its settings.
        axes: of a grid, the setting on each axis.
        kept: convolutions in FP16, in network order.
        counts: convolutions by precision: as built if the engine lists its layers, else as planned.
        weights: bytes of the convolutions' weights.
        multiply_adds: millions per image; those in FP16 count twice.
        map, map50: COCO mAP 0.50:0.95 and 0.50; None without annotations.
        reference: mAP of the float model; None without annotations.
        difference: ``map - reference``; without annotations, agreement with the float model's detections minus 1.
        low, high: 90 % interval of ``difference``; None for the float model itself.
        engine: bytes of the engine file; None if none was built.
        latency_ms: measured; per image if the objective is throughput; None if no engine ran.
        device: GPU that ran the engine.
        seconds: build time of a grid's engine.
        parts: scores of masks, keypoints and rotated boxes, where detector and annotations have them.
        tf32: the engine has float32 convolutions, which may run in TF32.
        proposals: of a two-stage detector, if their number is an axis.
        same_as: title of an earlier variant with the same network, whose score is reused.
        build, config: of a grid, the build options and the changed settings of the configuration.
        error: predicted output error, the sum of the INT8 convolutions' error powers; None without a ranking.
        estimated: milliseconds on the experiment's GPU; None if no engine lists its layers.
        number: in the experiment, from 1.
        dominated_by: number of the cheapest better variant. Better means no worse in accuracy and cost and better in
            one; or cheaper, with no larger predicted error and an accuracy not below the interval. Accuracy is that of
            boxes or of the part that lost most.
    """

    name: str
    titles: tuple[str, ...]
    kept: tuple[str, ...]
    counts: dict[str, int]
    weights: int
    multiply_adds: Finite
    map: Finite | None
    reference: Finite | None
    difference: Finite
    low: Finite | None
    high: Finite | None
    axes: dict[str, str] = field(default_factory=dict)
    map50: Finite | None = None
    engine: int | None = None
    latency_ms: Finite | None = None
    device: str | None = None
    seconds: Finite | None = None
    parts: dict[Of, PartScore] = field(default_factory=dict)
    tf32: bool = False
    proposals: Proposals | None = None
    same_as: str = ""
    build: BuildOptions | None = None
    config: Overrides | None = None
    error: Finite | None = None
    estimated: Finite | None = None
    number: int = 0
    dominated_by: int | None = None

    @property
    def title(self) -> str:
        return ", ".join(self.titles)

    @property
    def interval(self) -> str:
        """Interval of the difference, in points (hundredths); empty for the float model itself."""
        return "" if self.low is None or self.high is None else interval_text(self.low, self.high)

    @property
    def least(self) -> float:
        """Difference of boxes or of a part, whichever lost most."""
        return least_difference(self)

    def row(self) -> dict[str, Any]:
        """Plain values for ``rows.jsonl``."""
        plain: dict[str, Any] = TypeAdapter(Variant).dump_python(self, mode="json")
        return plain


def _columns_of(of: Of) -> tuple[tuple[Column, Callable[[Variant], Cell]], ...]:
    """Two columns of a part: its mAP, and the difference with its interval."""

    def score(row: Variant) -> float | None:
        value = row.parts[of]["map"] if of in row.parts else None
        return None if value is None else 100 * value

    def difference(row: Variant) -> str | None:
        return spread_text(row.parts[of]) or None if of in row.parts else None

    return (
        (Column(NAMES[of], ".2f"), score),
        (Column(f"{of.replace('_', ' ')} against FP32", align="right"), difference),
    )


@dataclass(frozen=True)
class Experiment:
    """Result of a sweep or a tune.

    Attributes:
        kind: ``sweep`` for a grid, ``tune`` for a search.
        name: of the model.
        folder: of the results.
        variants: of a search, the cheapest first; of a grid, FP32 first and then in axis order.
        objective: the cost that variants are compared by.
        gpu: of the estimates; None without estimates.
        batch: images per run that the times refer to.
        device: that ran the variants; None if nothing was timed.
        reference: mAP of the float model, 0..1; None without annotations.
        calibration: number of images that calibrate and rank.
        reported: number of images that measure accuracy; in a search none of them calibrates.
        left_out: number of accuracy images that were left out because they calibrate.
        formats: options that choose quantised formats, such as ``plan.fp8``.
        older: number of variants, at the end, that earlier commands measured in the folder.
    """

    kind: Literal["sweep", "tune"]
    name: str
    folder: Path
    variants: tuple[Variant, ...]
    objective: Objective
    gpu: str | None
    batch: int
    device: str | None
    reference: float | None
    calibration: int
    reported: int
    left_out: int = 0
    formats: tuple[str, ...] = ()
    older: int = 0

    @property
    def annotated(self) -> bool:
        """Whether accuracy is mAP; else it is agreement with the float model's detections."""
        return self.reference is not None

    @property
    def best(self) -> tuple[Variant, ...]:
        """The Pareto-optimal variants."""
        return tuple(variant for variant in self.variants if variant.dominated_by is None)

    @property
    def unit(self) -> str:
        """Unit of the cost."""
        image = " an image" if self.objective == "throughput" else ""
        if self.objective == "size":
            return "MB of weights"
        if self.device is not None and all(variant.latency_ms is not None for variant in self.variants):
            return f"ms{image} (measured on {self.device}, batch {self.batch})"
        if self.gpu is not None:
            return f"ms{image} (estimate within {TIME_WITHIN:g}x, {self.gpu}, batch {self.batch})"
        return PLAIN_UNIT

    @property
    def basis(self) -> str:
        """Two sentences about the images and the costs behind the columns."""
        omitted = f" ({self.left_out} that calibrate left out)" if self.left_out else ""
        measure = "mAP is of" if self.annotated else "agreement with the detections of FP32 (at 0.25 and more) is of"
        images = f"{self.calibration} calibration images chose, {measure} {self.reported} others{omitted}"
        if self.kind == "sweep":
            images = f"{self.calibration} calibration images, {measure} {self.reported} images"
        formats = f"; made with {' '.join(self.formats)}" if self.formats else ""
        return f"Variants are compared by {self.unit}; {images}{formats}"

    @property
    def repeated(self) -> str:
        """One line about variants with an earlier variant's network; empty without such variants."""
        titles = [variant.same_as for variant in self.variants if variant.same_as]
        if not titles:
            return ""
        first = "; ".join(dict.fromkeys(titles))
        return f"{len(titles)} of the rows have the network of an earlier variant, which was scored once: {first}"

    def cost(self, variant: Variant) -> float:
        """Cost of a variant, in ``unit``."""
        if self.objective == "size":
            return variant.weights / 1e6
        if self.unit == PLAIN_UNIT:
            return variant.multiply_adds
        cost = variant.estimated if variant.latency_ms is None or self.device is None else variant.latency_ms
        return variant.multiply_adds if cost is None else cost

    def numbered(self) -> Experiment:
        """A copy with ``number`` and ``dominated_by`` of every variant; a search is sorted by cost."""
        order = self.variants
        if self.kind == "tune":
            order = tuple(sorted(order, key=lambda variant: (self.cost(variant), -variant.least, len(variant.kept))))
        variants = [replace(variant, number=number) for number, variant in enumerate(order, 1)]
        by_cost = sorted(variants, key=self.cost)

        def dominates(other: Variant, variant: Variant) -> bool:
            own, theirs = ((self.cost(each), -each.least) for each in (variant, other))
            measured = theirs != own and theirs[0] <= own[0] and theirs[1] <= own[1]
            # A difference within the interval is no reason to pay more for a larger predicted error.
            scores = each_score(other)
            predicted = (
                None not in (variant.error, other.error)
                and theirs[0] < own[0]
                and (other.error or 0.0) <= (variant.error or 0.0)
                and all(
                    score["low"] is not None and of in scores and scores[of]["difference"] >= score["low"]
                    for of, score in each_score(variant).items()
                )
            )
            return measured or predicted

        best = {
            variant.number: next((other.number for other in by_cost if dominates(other, variant)), None)
            for variant in variants
        }
        return replace(
            self, variants=tuple(replace(variant, dominated_by=best[variant.number]) for variant in variants)
        )

    def markdown(self) -> str:
        """The table as Markdown."""
        return self.table().markdown()

    def table(self) -> Table:
        """A row for each variant; mAP in points, intervals of 90 %; empty columns are left out."""
        rows = self.variants
        axes = list(dict.fromkeys(name for row in rows for name in row.axes))
        against = "against FP32" if self.annotated else "agreement with FP32, against 100"
        columns: list[tuple[Column, Callable[[Variant], Cell]]] = [
            (Column("variant", align="right"), lambda row: row.number),
            *((Column(name), lambda row, name=name: row.axes.get(name) or None) for name in axes),
            *(() if axes else ((Column("plan"), lambda row: row.title),)),
            (Column("INT8 / FP16 / FP32 convs"), lambda row: " / ".join(map(str, row.counts.values()))),
            (Column("ms, measured", ".4f"), lambda row: row.latency_ms),
            (Column(f"ms, estimate for {self.gpu}", ".4f"), lambda row: row.estimated),
            (Column(PLAIN_UNIT, ".1f"), lambda row: None if self.gpu else row.multiply_adds),
            (Column("weights MB", ".3f"), lambda row: row.weights / 1e6),
            (Column("engine MB", ".2f"), lambda row: row.engine and row.engine / 1e6),
            (Column("proposals", ".0f"), lambda row: row.proposals and row.proposals["proposals"]),
            (Column("AR@100", ".2f"), lambda row: row.proposals and 100 * row.proposals["ar100"]),
            (Column("AR@1000", ".2f"), lambda row: row.proposals and 100 * row.proposals["ar1000"]),
            (Column("mAP", ".2f"), lambda row: None if row.map is None else 100 * row.map),
            (Column("AP50", ".2f"), lambda row: None if row.map50 is None else 100 * row.map50),
            (Column(against, "+.2f"), lambda row: 100 * row.difference),
            (Column("90 % interval", align="right"), lambda row: row.interval or None),
            *(column for of in dict.fromkeys(of for row in rows for of in row.parts) for column in _columns_of(of)),
            (Column("predicted error", ".3g"), lambda row: row.error),
            (Column(""), lambda row: f"dominated by {row.dominated_by}" if row.dominated_by else None),
        ]
        shown = [(column, cell) for column, cell in columns if any(cell(row) is not None for row in rows)]
        notes = [f"measured on {self.device}, batch {self.batch}"] if self.device is not None else []
        return Table([column for column, _ in shown], [[cell(row) for _, cell in shown] for row in rows], notes=notes)

    def as_dict(self) -> dict[str, Any]:
        """Plain values of ``experiment.json``."""
        plain = asdict(replace(self, variants=()))
        variants = [{**variant.row(), "cost": self.cost(variant)} for variant in self.variants]
        accuracy = "map" if self.annotated else "agreement"
        return {
            "schema": 1,
            **plain,
            "folder": str(self.folder),
            "unit": self.unit,
            "accuracy": accuracy,
            "variants": variants,
        }

    def save(self, plans: Mapping[str, bytes] = MappingProxyType({})) -> None:
        """Writes the table, ``experiment.json`` and the plans that it numbers, by name in its folder, together."""
        contents: dict[Path, bytes | Path] = {
            self.folder / TABLE: (self.markdown() + "\n").encode(),
            self.folder / EXPERIMENT: (json.dumps(self.as_dict(), indent=1) + "\n").encode(),
            **{self.folder / name: plan for name, plan in plans.items()},
        }
        write_together(contents)

    @staticmethod
    def load(path: Path | str) -> Experiment:
        """Reads ``experiment.json``. Raises ConfigError: it cannot be read, or holds no experiment."""
        finish_replacing(Path(path).parent)
        return read_result(Path(path), Experiment, "repeat the 'trtdet sweep' or 'trtdet tune'")
