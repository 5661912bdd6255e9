"""What a sweep and a tune are going to do, counted as :mod:`trtdet.pipeline.forecasts` counts a build: each variant and
each point is a build that shares with others what they are all made from, and is then scored."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from trtdet.backends import choose
from trtdet.pipeline.assembly import Job, Validated
from trtdet.pipeline.fingerprint import Stage
from trtdet.pipeline.forecasts import (
    IMAGE,
    Forecast,
    Part,
    builder_memory,
    calibrated_part,
    corrected_parts,
    engine_part,
    half_parts,
    images_of,
    looked_parts,
    process_memory,
    ranked_part,
    run_seconds,
)
from trtdet.pipeline.matrix import Group, Keep, Matrix
from trtdet.pipeline.options import BuildOptions, KeepOptions
from trtdet.pipeline.point_rows import MEASURING_FLOAT, Tuning, measuring, titled_plans
from trtdet.pipeline.stages.engines import runs_on
from trtdet.pipeline.tuned import CORRECTED, RANKING_ROWS, ROWS, has_corrected
from trtdet.pipeline.variant_rows import limited_graph, scoring
from trtdet.quantization import default_plan

_FLOAT, _QUANTIZED = 1.5, 2.5
"""Scoring an image with the detections of it, in runs of the float model: as it is, and with Q/DQ nodes on the CPU."""


def foresee_matrix(matrix: Matrix, found: frozenset[str]) -> Forecast:
    """What a sweep does that was checked.

    Args:
        matrix: the sweep.
        found: the names of the rows that are there.
    """
    waiting, options = matrix.waiting(found), matrix.options
    if not waiting:
        return Forecast(())
    parts, builds = [], {group: _build_of(matrix, group) for group in waiting}
    for limits in options.limits:
        known, place = _build_of(matrix, Group("", limits=limits)), matrix.histograms(limits)
        parts.append(calibrated_part(known, run_seconds(known), str(place) if place.exists() else ""))
    rows: list[Part] = []
    begun: set[tuple[object, ...]] = set()
    for group in waiting:
        # Corrections of one rule are only compared with the next, where they decide nothing of it.
        same = (group.silu, group.corrections, group.limits)
        rows += _variants(matrix, group, builds[group], found, beside=same in begun)
        begun.add(same)
    reference = Group(precision="fp32", limits=matrix.most)
    if reference not in waiting:
        # It is scored for the differences, once the first variant is.
        first = 1 + next(place for place, part in enumerate(rows) if part.stage.startswith("scoring "))
        rows[first:first] = _scored(matrix, reference, None, _build_of(matrix, reference))
    if options.ray is not None:
        count = sum(name not in found for group in waiting for name in matrix.names(group))
        rows = [Part("sweep", f"{count} rows by Ray, as if by this machine", sum(part.seconds for part in rows))]
    known = builds[waiting[-1]]
    return Forecast((*parts, *rows), process_memory(known, len(matrix.dataset.images)), builder_memory(known))


def _build_of(matrix: Matrix, group: Group) -> Validated:
    """The build that the variants of a group are."""
    options = matrix.options
    build = BuildOptions(
        group.precision if group.rule is None else "int8",
        replace(options.calibration, rule=group.rule or options.calibration.rule),
        group.corrections,
        backend=options.backend,
        keep=KeepOptions(1),
        int8_all=options.int8_all,
    )
    graph = limited_graph(matrix, group.limits, group.silu)
    job = Job(matrix.model, matrix.config, matrix.folder, build)
    return Validated(job, choose(options.backend), graph, (), matrix.selected, matrix.dataset, None, {})


def _variants(matrix: Matrix, group: Group, known: Validated, found: frozenset[str], beside: bool) -> list[Part]:
    """The stages of the missing rows of a group."""
    if group.rule is None:
        return _scored(matrix, group, None, known)
    parts = corrected_parts(known, run_seconds(known))
    if beside:
        parts = [part for part in parts if part.stage == "correcting: detections"]
    ranked = False
    for keep in matrix.keeps(group):
        if all(matrix.name(group, keep, nms) in found for nms in matrix.options.suppressions):
            continue
        if isinstance(keep, int) and keep and not ranked:
            parts.append(ranked_part(known, run_seconds(known)))
            ranked = True
        parts += _scored(matrix, group, keep, known)
    return parts


def _scored(matrix: Matrix, group: Group, keep: Keep | None, known: Validated) -> list[Part]:
    """The engine of a variant, where one is built, and its scores."""
    options, images = matrix.options, len(matrix.dataset.images)
    engine = options.on == "engine"
    stage, quantized = scoring(group, keep), group.rule is not None
    parts = [engine_part(known)] if engine or quantized else []
    if options.limited:
        parts.append(Part(f"{stage}: proposals", images_of(images), _FLOAT * images * run_seconds(known)))
    return [*parts, Part(stage, images_of(images), images * _scoring(known, engine, quantized))]


def _scoring(known: Validated, engine: bool, quantized: bool) -> float:
    """Estimated seconds to score an image."""
    run = IMAGE if engine else run_seconds(known)
    return run * (_QUANTIZED if quantized and not engine else _FLOAT)


def foresee_points(tuning: Tuning, known: Validated, images: int, found: frozenset[str]) -> Forecast:
    """What a tune does that was checked.

    Args:
        tuning: the tune.
        known: its build.
        images: how many report.
        found: the names of the plans that were measured already.
    """
    options, folder, run = tuning.options, tuning.folder, run_seconds(known)
    caps, build = known.backend.capabilities, options.build
    engine = runs_on(options.on, caps, build.sms, build.plugins) == "engine"
    corrected = folder / CORRECTED
    there = str(corrected) if has_corrected(folder, known.keys[Stage.CORRECTIONS]) else ""
    prepared = [calibrated_part(known, run, there)]
    if there:
        prepared.append(Part("correcting", "as it was kept", 0.0, there))
    else:
        prepared += corrected_parts(known, run)
    ranking = _ranking(known, run, options.rank_images, folder / RANKING_ROWS if there else None)
    # Plans that the integer program finds may be fewer, or be among those that have a title.
    graph = known.graph
    default = default_plan(graph.model, graph.placement, graph.flow)
    plans = len(titled_plans(graph.plan.names("int8"), graph, default)) + options.points
    missing = max(0, plans - len(found))
    rows = []
    if found:
        rows.append(Part("measuring plans", _plans(len(found)), 0.0, str(folder / ROWS)))
    forms = len(caps.data_flow.weights)
    built = [engine_part(known, forms)] if caps.makes_engine else []
    for number in range(1, missing + 1):
        rows += [*built, Part(measuring(number), images_of(images), images * _scoring(known, engine, quantized=True))]
        if number == 1:
            seconds = images * _scoring(known, engine, quantized=False)
            rows += [*(built if engine else ()), Part(MEASURING_FLOAT, images_of(images), seconds)]
    if options.ray is not None and missing:
        rows = [Part("tune", f"{_plans(missing)} by Ray, as if by this machine", sum(part.seconds for part in rows))]
    costs = half_parts(known, run) + (2 * built if engine and build.gpu is None else built) if caps.lists_layers else []
    parts = (*looked_parts(known, run), *prepared, ranking, *costs, *rows)
    return Forecast(parts, process_memory(known, images), builder_memory(known))


def _ranking(known: Validated, run: float, images: int, rows: Path | None) -> Part:
    """The ranking; taken from the file of its rows where all of them are there."""
    part = ranked_part(known, run, images)
    if rows is None or not rows.exists():
        return part
    # The header is a line, and depthwise convolutions as a group are a row.
    done = rows.read_bytes().count(b"\n") - 1 >= len(known.graph.plan.names("int8"))
    return replace(part, seconds=0.0, there=str(rows)) if done else part


def _plans(count: int) -> str:
    return f"{count} plan{'s' * (count != 1)}"
