"""Files in the folder of an experiment: rows, which resume after a kill, and provenance."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from trtdet import __version__
from trtdet.backends import Capabilities, EngineTarget
from trtdet.building.bundle import BUILD_LOG, log_kept
from trtdet.building.forecasts import Part
from trtdet.building.graph import PlacedGraph
from trtdet.building.ranges import Selection
from trtdet.building.variants import ROWS
from trtdet.config import Config
from trtdet.errors import ConfigError
from trtdet.experiments.experiment import Variant
from trtdet.files import cluster, sha256_file, write_atomically, writing
from trtdet.files.documents import read_result
from trtdet.files.journal import Rows, rows_in
from trtdet.options import PlanOptions
from trtdet.options.fields import rule_percentile
from trtdet.plans.measuring import row_check
from trtdet.progress import Progress

PROVENANCE = "provenance.json"
TIMINGS = "timing-cache"


@contextmanager
def opened_rows(folder: Path, key: str) -> Iterator[Rows]:
    """Makes the folder and opens its rows; the messages of a failing builder are kept in it."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    path = folder / ROWS
    with log_kept(folder / BUILD_LOG), Rows(path, key=key, valid=row_check(Variant, path)) as rows:
        yield rows


def row_names(folder: Path, key: str) -> frozenset[str]:
    """Names of the rows in a folder; writes nothing."""
    return frozenset(rows_in(folder / ROWS, key, row_check(Variant, folder / ROWS)))


def completed(
    rows: Rows, names: Sequence[str], missing: Iterable[Variant], stage: str, progress: Progress
) -> tuple[Variant, ...]:
    """The variants with these names; appends the missing ones to the rows as they are measured."""
    progress(stage, sum(name in rows.found for name in names), len(names))
    for variant in missing:
        rows.append(variant.row())
        progress(stage, sum(name in rows.found for name in names), len(names))
    return tuple(variant_of(rows.found[name]) for name in names)


def on_ray(plan: PlanOptions, function: Any, work: Any, waiting: Sequence[Any]) -> Iterator[Any] | None:
    """Yields ``function(work, item)`` for each waiting item from Ray workers; None without Ray or waiting items."""
    if plan.ray is None or not waiting:
        return None
    return iter(cluster.run(function, work, waiting, address=plan.ray))


def ray_parts(plan: PlanOptions, stage: str, what: str, parts: list[Part]) -> list[Part]:
    """Merges the parts of a forecast that Ray workers do into one."""
    if plan.ray is None or not parts:
        return parts
    return [Part(stage, f"{what} by Ray, as if by this machine", sum(part.seconds for part in parts))]


def variant_of(row: dict[str, Any]) -> Variant:
    return TypeAdapter(Variant).validate_json(json.dumps(row))


@dataclass(frozen=True)
class CommandRun:
    """A command that wrote into the folder.

    Attributes:
        created: ISO 8601 in UTC.
        trtdet, backend_version: versions.
        sms: requested compute capabilities, such as 86.
        options: plain values of :class:`trtdet.TuneOptions` or :class:`trtdet.SweepOptions`, as given.
    """

    created: str
    trtdet: str
    backend: str
    backend_version: str
    sms: tuple[int, ...]
    options: dict[str, Any]

    @property
    def percentile(self) -> float:
        """Percentile of the calibration rule, in percent. Raises ConfigError: the options have no rule."""
        try:
            return rule_percentile(self.options.get("build", self.options)["calibration"]["rule"])
        except (TypeError, LookupError, AttributeError, ValueError):
            raise ConfigError(
                f"{PROVENANCE} has no calibration rule in its options", "repeat the command into its folder"
            ) from None

    @staticmethod
    def now(caps: Capabilities, target: EngineTarget, options: object) -> CommandRun:
        return CommandRun(
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            trtdet=__version__,
            backend=caps.name,
            backend_version=caps.version,
            sms=target.sms,
            options=TypeAdapter(type(options)).dump_python(options, mode="json"),
        )


@dataclass(frozen=True)
class Provenance:
    """Content of ``provenance.json``.

    Attributes:
        model: SHA-256 of the float ONNX file.
        images: SHA-256 of the calibration images' names and contents.
        config: the resolved configuration.
        histograms: file name in the folder.
        inputs: by convolution, in network order, the histogram tensor that it reads.
        runs: commands whose rows are in the folder, the latest last.
    """

    schema: Literal[1]
    model: str
    images: str
    config: dict[str, Any]
    histograms: str
    inputs: dict[str, str]
    runs: Annotated[tuple[CommandRun, ...], Field(min_length=1)]

    @staticmethod
    def of(
        run: CommandRun, model: Path, config: Config, graph: PlacedGraph, selected: Selection, histograms: str
    ) -> Provenance:
        readers = graph.placement.readers.items()
        inputs = {node: tensor for tensor, nodes in readers for node, position in nodes if position == 0}
        return Provenance(
            schema=1,
            model=sha256_file(model),
            images=selected.sha256,
            config=config.model_dump(mode="json"),
            histograms=histograms,
            inputs={name: inputs[name] for name in graph.plan.entries if name in inputs},
            runs=(run,),
        )

    def save(self, folder: Path, earlier: Provenance | None) -> None:
        """Writes ``provenance.json`` with the earlier commands whose rows are in the folder, each command once."""
        options = [run.options for run in self.runs]
        before = () if earlier is None else tuple(run for run in earlier.runs if run.options not in options)
        text = json.dumps(asdict(replace(self, runs=(*before, *self.runs))), indent=1) + "\n"
        write_atomically(folder / PROVENANCE, text.encode())

    @staticmethod
    def load(folder: Path) -> Provenance | None:
        """Reads ``provenance.json``; None if there is none. Raises ConfigError if it cannot be read as provenance."""
        path = folder / PROVENANCE
        hint = "remove it and repeat the command into its folder"
        return read_result(path, Provenance, hint) if path.is_file() else None
