"""All steps of a build: graph -> ranges -> corrections -> plan -> network -> engine -> bundle."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from trtdet.audit import Audit
from trtdet.building.bundle import write_bundle
from trtdet.building.corrections import Prepared, prepared, prepared_as_given
from trtdet.building.engine import (
    BuildNetwork,
    cached_network,
    explicit_networks,
    float_network,
    implicit_network,
    shipped_engine,
)
from trtdet.building.job import CheckedBuild
from trtdet.building.plan import Planned, check_latency, choose_plan, ranking, starting_plan
from trtdet.building.ranges import as_given, calibrated, check_detections
from trtdet.building.variants import load_prepared, tuned_key
from trtdet.bundle import Bundle, BundleWriter
from trtdet.progress import Progress, silent


def assemble(
    build: CheckedBuild, place: Path | None = None, progress: Progress = silent
) -> tuple[Bundle, Audit | None, Planned | None]:
    """Runs the steps of a build; ``place`` is the bundle's folder, None for the job's output.

    Returns the bundle; the engine's audit, None if no layers were listed; the plan, None for a float engine or for
    ranges from a calibration cache. Raises TrtdetError: a step failed; its subclass names the kind of failure. The
    previous bundle is unchanged.
    """
    job, graph, options, caps = build.job, build.graph, build.options, build.backend.capabilities
    planned: Planned | None = None
    # The writer is opened first so that an unwritable folder fails before the work.
    with BundleWriter(place or job.output) as writer:
        plausibility = check_detections(graph, options.calibration, build.selected, progress=progress)
        networks: tuple[BuildNetwork, ...]
        if options.calibration.cache is not None:
            networks = (cached_network(graph, options.calibration.cache, caps),)
        elif not options.int8:
            networks = (float_network(graph, options.precision, build.selected, progress=progress),)
        else:
            corrected = prepared_of(build, progress)
            ranked = partial(ranking, corrected, options.plan, previous=build.previous, progress=progress)
            planned = choose_plan(
                corrected, options, ranked, backend=build.backend, dataset=build.dataset, progress=progress
            )
            if options.implicit:
                networks = (implicit_network(corrected, planned.plan, options, caps=caps),)
            else:
                networks = explicit_networks(corrected, planned.plan, caps)
        timings = job.beside("timing-cache")
        engine = shipped_engine(networks, build.backend, build.target, timings=timings, progress=progress)
        bundle = write_bundle(writer, build, engine, planned=planned, seen=plausibility)
    job.beside("reconstruction").unlink(missing_ok=True)
    return bundle, engine.audit, planned


def prepared_of(build: CheckedBuild, progress: Progress = silent) -> Prepared:
    """Calibrates and corrects, takes the pairs of a quantised model, or loads both from the folder of a tune."""
    graph, options, selected = build.graph, build.options, build.selected
    if options.tuned is not None:
        key = tuned_key(options.tuned)
        return load_prepared(options.tuned, key, graph, options=options, selected=selected, progress=progress)
    if options.calibrated:
        ranged = calibrated(
            graph,
            options.calibration,
            selected,
            implicit=options.implicit,
            previous=build.previous,
            progress=progress,
        )
    else:
        ranged = as_given(graph, selected)
    plan = starting_plan(graph, options.plan)
    if graph.own is not None:
        return prepared_as_given(ranged, graph.own, plan=plan, rescaled=options.calibrated)
    # A partial reconstruction is kept beside the bundle, so that an interrupted build can resume it.
    calibration = replace(options.calibration, unfinished=build.job.beside("reconstruction"))
    if options.implicit:
        # A pooling on the DLA reads and writes one range (NvInfer.h of TensorRT 10.7, IPoolingLayer).
        share = options.engine.dla is not None
        return prepared(ranged, calibration, (), progress=progress, plan=plan, share=share)
    if options.plan.limited and options.corrections:
        plain = prepared(ranged, calibration, (), progress=progress, plan=plan)
        check_latency(plain, build.backend, options, progress=progress)
    return prepared(ranged, calibration, options.corrections, progress=progress, plan=plan)
