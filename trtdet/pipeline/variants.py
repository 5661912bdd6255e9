"""The matrix of variants of one model: SiLU, rules, corrections, kept layers and suppression, one row each.

What rows share is done once: the images are run through the float model once for all, ranges, corrections and ranking
are made once for each form of SiLU, rule and set of corrections, and one pass over the annotated images serves every
suppression. Engines are built without suppression in the graph, so that one engine serves all of them. Where engines
can be run they are scored and timed, and the float model has a row in FP16 as well; elsewhere their ONNX models are
scored on the CPU.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trtdet.backends import choose
from trtdet.config import Config
from trtdet.data import CocoDataset
from trtdet.errors import ConfigError
from trtdet.files import cluster, write_atomically, writing
from trtdet.files.journal import Rows, names_in
from trtdet.mixed_precision.planning import check_count
from trtdet.mixed_precision.resumed import row_check
from trtdet.pipeline.forecasts import Forecast
from trtdet.pipeline.made_with import MadeWith, making
from trtdet.pipeline.matrix import Group, Matrix, Row, SweepOptions
from trtdet.pipeline.search_forecasts import foresee_matrix
from trtdet.pipeline.stages.bundles import BUILD_LOG, log_kept, plugin_parts
from trtdet.pipeline.stages.calibrating import select_images
from trtdet.pipeline.stages.engines import runs_on
from trtdet.pipeline.stages.rewriting import host_graph, silu_form
from trtdet.pipeline.validation import (
    check_calibration,
    check_fp8,
    check_targets,
    warn_of_nothing,
    warn_of_percentile,
)
from trtdet.pipeline.variant_rows import RowMaker, limited_graph, rows_of_group, save_histograms
from trtdet.progress import Expect, Progress, silent, unheard
from trtdet.tables import Cell, Column, Table

__all__ = ["Sweep", "SweepOptions", "sweep"]

ROWS = "rows.jsonl"
TABLE = "sweep.md"
RESULT = "sweep.json"


@dataclass(frozen=True)
class Sweep:
    """The finished matrix.

    Attributes:
        rows: the variants that were asked for, FP32 first, then in the order of the axes; plain values.
        folder: of rows, table and result.
        older: rows of earlier sweeps in the folder that were not asked for now.
    """

    rows: tuple[dict[str, Any], ...]
    folder: Path
    older: tuple[dict[str, Any], ...] = ()

    def table(self) -> Table:
        """The rows that were asked for and then the older ones; mAP in points, intervals of 90 %."""
        return sweep_table([*self.rows, *self.older])

    def markdown(self) -> str:
        """The same as Markdown."""
        return self.table().markdown()

    @property
    def repeated(self) -> str:
        """One line about the rows whose network another row has too; empty where there are none."""
        rows = [row for row in self.rows if "same_as" in row]
        if not rows:
            return ""
        first = "; ".join(dict.fromkeys(row["same_as"] for row in rows))
        return f"{len(rows)} of the rows have the network of an earlier variant, which was scored once: {first}"

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"rows": list(self.rows), "folder": str(self.folder)}


def sweep_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Rows of a sweep, as ``sweep.json`` holds them: mAP in points, intervals of 90 %."""
    limited = any("ar100" in row for row in rows)
    masked = any("masks" in row for row in rows)
    columns = (
        *(_LIMITED if limited else ()),
        *("precision", "SiLU", "calibration", "corrected", "kept in FP16", "options", "NMS"),
        *(Column("mAP", ".2f"), Column("AP50", ".2f"), Column("against FP32", "+.2f"), "90 % interval"),
        *(_MASKS if masked else ()),
        *("INT8 / FP16 / FP32 convs", Column("build s", ".1f"), Column("engine MB", ".1f")),
        Column("latency ms", ".1f"),
    )
    notes = sorted({f"latency on {row['timed_on']}" for row in rows if "timed_on" in row})
    cells = [[*(_limits(row) if limited else ()), *_cells(row, masked)] for row in rows]
    return Table(columns, cells, notes=notes)


_LIMITED = (
    *("anchors a level", "proposals at most", Column("proposals", ".0f")),
    *(Column("AR@100", ".2f"), Column("AR@1000", ".2f")),
)

_MASKS = (Column("mask mAP", ".2f"), Column("masks against FP32", "+.2f"), "masks, 90 % interval")


def _limits(row: Mapping[str, Any]) -> list[Cell]:
    recalls = [100 * row[key] if key in row else None for key in ("ar100", "ar1000")]
    return [row.get("rpn_pre_nms_topk"), row.get("rpn_post_nms_topk"), row.get("proposals"), *recalls]


def _cells(row: Mapping[str, Any], masked: bool) -> list[Cell]:
    nms = row["nms"]
    return [
        *(
            row["precision"] + (" (TF32)" if row["precision"] == "FP32" and row.get("tf32") else ""),
            row["silu"],
            row["calibration"],
            ", ".join(row["corrections"] or ()),
            row["kept"],
            " ".join(row.get("options", ())),
        ),
        f"{nms['score_threshold']:g} / {nms['iou_threshold']:g} / {nms['max_detections']}",
        *(100 * row["map"], 100 * row["map50"], 100 * row["difference"], _interval(row)),
        *(_mask_cells(row.get("masks")) if masked else ()),
        f"{row['int8']} / {row['fp16']} / {row['fp32']}",
        *(row["build_seconds"], row["engine_mb"], row["latency_ms"]),
    ]


def _mask_cells(masks: Mapping[str, Any] | None) -> list[Cell]:
    return [None] * len(_MASKS) if masks is None else [100 * masks["map"], 100 * masks["difference"], _interval(masks)]


def _interval(score: Mapping[str, Any]) -> str:
    return "" if score["low"] is None else f"{100 * score['low']:+.2f} .. {100 * score['high']:+.2f}"


def sweep(
    model: Path,
    config: Config,
    output: Path,
    options: SweepOptions,
    progress: Progress = silent,
    expect: Expect = unheard,
) -> Sweep:
    """Builds and scores every variant.

    Rows are appended to ``rows.jsonl`` as they are finished; a sweep that was stopped is resumed, and a sweep that is
    repeated with more values on an axis makes only the new rows. The table keeps the older ones.

    Args:
        model: float ONNX model.
        config: its configuration.
        output: a folder.
        options: axes, images, backend.
        progress: told of images and rows.
        expect: told of the stages to come, once the sweep is checked.

    Raises:
        TrtdetError: of the kind that says what is wrong; the finished rows stay.
    """
    matrix = _validated(model, config, output, options)
    with writing(output):
        output.mkdir(parents=True, exist_ok=True)
    names = [name for group in matrix.groups() for name in matrix.names(group)]
    check = row_check(Row, output / ROWS)
    with log_kept(output / BUILD_LOG), Rows(output / ROWS, matrix.key(), "variant", check) as rows:

        def tell() -> None:
            progress("sweep", sum(name in rows.found for name in names), len(names))

        found = frozenset(rows.found)
        expect(foresee_matrix(matrix, found).steps)
        _made_with(matrix, options).after(MadeWith.load(output) if found else None).save(output)
        waiting = matrix.waiting(found)
        if waiting:
            save_histograms(matrix, progress)
        tell()
        for row in _missing_rows(matrix, waiting, found, progress):
            rows.append(row)
            tell()
        older = tuple(row for name, row in rows.found.items() if name not in names)
        done = Sweep(tuple(rows.found[name] for name in names), output, older)
    write_atomically(output / TABLE, (done.markdown() + "\n").encode())
    write_atomically(output / RESULT, (json.dumps([*done.rows, *older], indent=1) + "\n").encode())
    return done


def foresee_sweep(model: Path, config: Config, output: Path, options: SweepOptions) -> Forecast:
    """What :func:`sweep` of the same would do.

    Raises:
        TrtdetError: as the sweep would before it decodes an image.
    """
    matrix = _validated(model, config, output, options)
    return foresee_matrix(matrix, names_in(output / ROWS, matrix.key(), "variant", row_check(Row, output / ROWS)))


def _validated(model: Path, config: Config, output: Path, options: SweepOptions) -> Matrix:
    """The sweep with all that was left open decided, checked without decoding an image."""
    if not options.suppressions:
        options = replace(options, suppressions=(config.nms,))
    caps = choose(options.backend).capabilities
    check_targets(options.sms, caps)
    if options.fp8:
        check_fp8(options.sms, caps)
    plugin_parts(options.plugins, caps)
    forms = tuple(dict.fromkeys(silu_form(asked, options.plugins, caps) for asked in options.silus))
    options = replace(options, silus=forms, on=runs_on(options.on, caps, options.sms, options.plugins))
    if options.calibration.images is None:
        raise ConfigError("a sweep needs calibration images: a folder or a list of file names with --images")
    for rule, corrections in itertools.product(options.rules, options.corrections):
        check_calibration(replace(options.calibration, rule=rule), corrections)
    warn_of_percentile(options.calibration.percentile, *options.rules)
    graph = host_graph(model, config, attention=options.int8_attention, fp8=options.fp8)
    graph = replace(graph, int8_all=options.int8_all)
    if options.limited:
        _check_proposals(model, config, options)
    warn_of_nothing(graph)
    convolutions = len(graph.plan.names("int8"))
    for keep in options.keeps:
        if isinstance(keep, int):
            check_count(keep, convolutions)
    dataset = CocoDataset.load(options.annotations, options.images, config.classes)
    return Matrix(model, config, output, options, select_images(options.calibration), dataset)


def _made_with(matrix: Matrix, asked: SweepOptions) -> MadeWith:
    made = making(choose(asked.backend).capabilities, asked.sms, asked)
    histograms = matrix.histograms(matrix.most).name
    return MadeWith.by(
        made, matrix.model, matrix.config, limited_graph(matrix, matrix.most), matrix.selected, histograms
    )


def _check_proposals(model: Path, config: Config, options: SweepOptions) -> None:
    """Raises ConfigError where the number of proposals of the model cannot be set."""
    asked = {"rpn_pre_nms_topk": options.rpn_pre_nms_topk, "rpn_post_nms_topk": options.rpn_post_nms_topk}
    for name, values in asked.items():
        option = f"--{name.replace('_', '-')}"
        if values and min(values) < 1:
            raise ConfigError(f"{option} {min(values)}: allowed is 1 or more")
        if not values:
            continue
        fewest = config.model_copy(update={"head": config.head.model_copy(update={name: min(values)})})
        result = host_graph(model, fewest).done.results.get(name)
        if result is None:
            raise ConfigError(f"{option} is for two-stage detectors, and '{model}' aligns no regions (RoiAlign)")
        if result.skipped:
            raise ConfigError(f"{option} cannot be set in '{model}': {'; '.join(result.skipped)}")


def _missing_rows(
    matrix: Matrix, waiting: Sequence[Group], found: frozenset[str], progress: Progress
) -> Iterator[dict[str, Any]]:
    """Makes the rows of these groups that are not there yet, here or on a cluster."""
    if matrix.options.ray is not None and waiting:
        yield from itertools.chain.from_iterable(cluster.run(rows_of_group, matrix, waiting, matrix.options.ray))
        return
    maker = RowMaker(matrix, progress)
    for group in waiting:
        yield from maker.rows(group, found)
