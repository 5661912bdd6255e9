"""The front of a model: what each plan costs and what it keeps of the accuracy, measured, and built by its number.

Chosen is by calibration images alone: ranges, corrections and the ranking, which gives the integer program the error of
each convolution. Measured is on other images. All that plans share is made once and kept in the folder, so that a tune
that was stopped goes on, and a point is built from what it was measured with.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

from trtdet.config import Config
from trtdet.data import CocoDataset, content_hash
from trtdet.errors import TrtdetWarning
from trtdet.files import cluster, sha256_file, write_atomically, writing
from trtdet.files.journal import Rows, names_in
from trtdet.mixed_precision.ranking import check_rankable
from trtdet.mixed_precision.resumed import row_check
from trtdet.pipeline.assembly import Validated, validated
from trtdet.pipeline.fingerprint import Stage
from trtdet.pipeline.forecasts import Forecast
from trtdet.pipeline.made_with import MadeWith, making
from trtdet.pipeline.options import TuneOptions, formats
from trtdet.pipeline.point_rows import Candidate, Points, Row, Tuning, reporting, row_of_plan
from trtdet.pipeline.points import Front, Point
from trtdet.pipeline.search_forecasts import foresee_points
from trtdet.pipeline.stages.bundles import BUILD_LOG, log_kept
from trtdet.pipeline.stages.calibrating import HISTOGRAMS, looked_at
from trtdet.pipeline.stages.engines import runs_on
from trtdet.pipeline.stages.planning import RANKING
from trtdet.pipeline.tuned import FRONT, PLANS, ROWS, save_options
from trtdet.pipeline.validation import check_tune
from trtdet.progress import Expect, Progress, silent, unheard

TABLE = "front.md"


def tune(
    model: Path,
    config: Config,
    output: Path,
    options: TuneOptions,
    progress: Progress = silent,
    expect: Expect = unheard,
) -> Front:
    """Finds the front of a model and measures each of its points.

    What is measured is appended to ``rows.jsonl`` as it is known; a tune that was stopped is resumed, and one that is
    repeated with more points, for another objective or for another GPU measures only the plans that are new.

    Args:
        model: float ONNX model.
        config: its configuration.
        output: a folder.
        options: how points are built, and what they are measured on.
        progress: told of images, builds and points.
        expect: told of the stages to come, once the tune is checked.

    Raises:
        TrtdetError: of the kind that says what is wrong; what was measured stays.
    """
    tuning, known, dataset, left_out = _validated(Tuning("", model, config, output, options), progress)
    asked, options = options, tuning.options
    with writing(output):
        output.mkdir(parents=True, exist_ok=True)
    check = row_check(Row, output / ROWS)
    with log_kept(output / BUILD_LOG), Rows(output / ROWS, tuning.key, "plan", check) as rows:
        expect(foresee_points(tuning, known, len(dataset.images), frozenset(rows.found)).steps)
        save_options(output, sha256_file(model), known.keys[Stage.CORRECTIONS], options.build)
        made = making(known.backend.capabilities, options.build.sms, asked)
        MadeWith.by(made, model, config, known.graph, known.selected, HISTOGRAMS).save(output)
        looked_at(known.graph, options.build.calibration, known.selected, progress)
        work = Points(tuning, known, dataset, progress)
        plans = work.candidates()
        measured = _measured(work, plans, rows, progress)
    work.ranking.save(output / RANKING)
    found = Front(
        model.stem,
        output,
        tuple(_point(plan, row) for plan, row in zip(plans, measured, strict=True)),
        options.build.keep.objective,
        work.gpu,
        work.batch,
        measured[0]["device"],
        measured[0]["reference"],
        len(known.selected.paths),
        len(dataset.images),
        left_out,
        formats(False, options.build.int8_attention, options.build.fp8),  # all convolutions are open anyway
    ).numbered()
    _write(found, plans)
    return found


def foresee_tune(model: Path, config: Config, output: Path, options: TuneOptions) -> Forecast:
    """What :func:`tune` of the same would do.

    Raises:
        TrtdetError: as the tune would before it decodes an image.
    """
    tuning, known, dataset, _ = _validated(Tuning("", model, config, output, options), silent)
    found = names_in(output / ROWS, tuning.key, "plan", row_check(Row, output / ROWS))
    return foresee_points(tuning, known, len(dataset.images), found)


def _validated(asked: Tuning, progress: Progress) -> tuple[Tuning, Validated, CocoDataset, int]:
    """With all that was left open decided, checked without decoding an image."""
    asked = replace(asked, options=replace(asked.options, build=replace(asked.options.build, int8_all=True)))
    check_tune(asked.options)
    known = validated(asked.job, progress)
    check_rankable(known.graph.plan)
    dataset, left_out = reporting(asked.options, known)
    if left_out:
        warnings.warn(
            f"{left_out} of the {left_out + len(dataset.images)} images of --val-images are calibration images too and "
            "are left out: what has chosen does not report",
            TrtdetWarning,
            stacklevel=3,
        )
    build = asked.options.build
    run = runs_on(asked.options.on, known.backend.capabilities, build.sms, build.plugins)
    facts = {
        "corrections": known.keys[Stage.CORRECTIONS],
        "engine": [build.sms, build.batch, repr(build.engine), [part.sha256 for part in known.plugins]],
        # Times are measured of a run or of an image; accuracy is that of what runs.
        "run": [run, run == "engine" and build.keep.objective == "throughput"],
        "images": content_hash([image.path for image in dataset.images]),
        "annotations": sha256_file(asked.options.annotations) if asked.options.annotations is not None else None,
    }
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    return replace(asked, key=key), known, dataset, left_out


def _measured(work: Points, plans: Sequence[Candidate], rows: Rows, progress: Progress) -> list[Row]:
    """The rows of the plans, of which those that are not there yet are measured."""

    def tell() -> None:
        progress("tune", sum(plan.name in rows.found for plan in plans), len(plans))

    tell()
    for row in _missing(work, [plan for plan in plans if plan.name not in rows.found]):
        rows.append(dict(row))
        tell()
    return [cast(Row, rows.found[plan.name]) for plan in plans]


def _missing(work: Points, waiting: Sequence[Candidate]) -> Iterator[Row]:
    """Measures plans, here or on a cluster."""
    ray = work.tuning.options.ray
    if ray is None or not waiting:
        for number, plan in enumerate(waiting, 1):
            yield work.row(plan, number)
    else:
        yield from cluster.run(row_of_plan, work.tuning, waiting, ray)


def _point(plan: Candidate, row: Row) -> Point:
    return Point(
        0,
        plan.titles,
        plan.kept,
        row["counts"],
        plan.error,
        plan.estimated,
        row["measured"],
        plan.multiply_adds,
        plan.weights,
        row["engine"],
        row["map"],
        row["difference"],
        row["low"],
        row["high"],
        masks=row.get("masks"),
    )


def _write(found: Front, plans: Sequence[Candidate]) -> None:
    """The plans by number, and then the front that has these numbers; while it is missing no point is built."""
    folder = found.folder
    by_names = {plan.kept: plan.plan for plan in plans}
    with writing(folder):
        (folder / FRONT).unlink(missing_ok=True)
        for path in (folder / PLANS).glob("*.json"):
            path.unlink()
    for point in found.points:
        by_names[point.kept].save(folder / PLANS / f"{point.number}.json")
    write_atomically(folder / TABLE, (found.markdown() + "\n").encode())
    text = json.dumps(found.as_dict(), indent=1) + "\n"
    write_atomically(folder / FRONT, text.encode())
