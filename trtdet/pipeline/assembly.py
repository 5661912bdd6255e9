"""The row of stages, run: from a float model to a bundle. A stage whose result is there already is skipped."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from trtdet import __version__
from trtdet.audit import Audit
from trtdet.backends import Backend, Capabilities, choose
from trtdet.bundle import Bundle, BundleWriter, PluginPart
from trtdet.calibration import Collection
from trtdet.config import Config
from trtdet.data import CocoDataset, content_hash, find_images
from trtdet.files import sha256_file
from trtdet.mixed_precision.trade_off import TradeOff
from trtdet.pipeline.fingerprint import Stage, stage_keys
from trtdet.pipeline.options import BuildOptions, CalibrationOptions, KeepOptions
from trtdet.pipeline.stages.bounds import plan_problem
from trtdet.pipeline.stages.bundles import Origin, model_bytes, plugin_parts, written
from trtdet.pipeline.stages.calibrating import Selection, calibrated, looked_at, select_images
from trtdet.pipeline.stages.correcting import Prepared, prepared
from trtdet.pipeline.stages.costs import plan_costs, plan_stopwatch
from trtdet.pipeline.stages.engines import best_engine, target_of, warn_of
from trtdet.pipeline.stages.networks import (
    Network,
    cached_network,
    explicit_networks,
    float_network,
    implicit_network,
)
from trtdet.pipeline.stages.planning import Prices, choose_plan, ranking, starting_plan
from trtdet.pipeline.stages.rewriting import Graph, build_graph
from trtdet.pipeline.stages.within_time import Within, check_reachable
from trtdet.pipeline.tuned import check_tuned, load_prepared, tuned_key
from trtdet.pipeline.validation import bounding_images, check_build, check_placement, previous_bundle
from trtdet.progress import Progress, silent
from trtdet.quantization import PrecisionPlan


@dataclass(frozen=True)
class Job:
    """One build: a float ONNX model, its configuration, the bundle's folder, and how it is built."""

    model: Path
    config: Config
    output: Path
    options: BuildOptions


@dataclass(frozen=True)
class Assembled:
    """A finished bundle.

    Attributes:
        bundle: the bundle.
        audit: of its engine; None where no layers were listed, or the bundle was there already.
        up_to_date: it was there already.
        trade_off: what was tried for a bound on the loss.
        within: the plan within a time, where that was asked for.
        network: what its engine was built from; None where the bundle was there already.
    """

    bundle: Bundle
    audit: Audit | None = None
    up_to_date: bool = False
    trade_off: TradeOff | None = None
    network: Network | None = None
    within: Within | None = None


@dataclass(frozen=True, eq=False)
class Validated:
    """A build of which everything is known that needs no image to be decoded.

    Attributes:
        job: what is built.
        backend: builds the engine.
        graph: the rewritten model.
        plugins: the plugin libraries.
        selected: the calibration images.
        dataset: images, for a bound on the loss; annotated where that is in mAP.
        previous: the bundle at the output's place, which may lend its histograms and its ranking.
        keys: the key of every stage.
    """

    job: Job
    backend: Backend
    graph: Graph
    plugins: tuple[PluginPart, ...]
    selected: Selection
    dataset: CocoDataset | None
    previous: Bundle | None
    keys: Mapping[Stage, str]

    @property
    def key(self) -> str:
        """The key of the last stage, which is the bundle's content hash."""
        return self.keys[Stage.ENGINE]

    @property
    def up_to_date(self) -> Bundle | None:
        """The bundle at the output's place, where it is the one that would be built."""
        found = self.previous
        current = found is not None and found.manifest.content_hash == self.key and not found.manifest.lacks_portable
        return found if current else None


def assemble(
    job: Job,
    progress: Progress = silent,
    place: Path | None = None,
    checked: Callable[[Validated], None] = lambda known: None,
) -> Assembled:
    """Runs the stages of a build, unless the bundle is up to date.

    Args:
        job: the build.
        progress: told of every image and every stage.
        place: where a new bundle goes; None for the job's output.
        checked: called when the build is checked, before the work.

    Raises:
        TrtdetError: of the kind that says where it went wrong; the previous content of the output is untouched.
    """
    known = validated(job, progress)
    checked(known)
    if known.up_to_date is not None:
        return Assembled(known.up_to_date, up_to_date=True)
    caps = known.backend.capabilities
    # Opened before the work is done: a place that cannot be written is found out now, not after it.
    with BundleWriter(place or job.output) as writer:
        seen = looked_at(known.graph, job.options.calibration, known.selected, progress)
        networks = networks_of(known, caps, progress)
        timings = job.options.timing_cache or timing_cache_of(job.output)
        engine = best_engine(networks, known.backend, target_of(job.options), timings, progress)
        network = engine.network
        warn_of(engine, caps)
        origin = Origin(job.model, known.graph, job.options, caps, known.plugins, known.key, seen)
        bundle = written(writer, engine, origin)
    unfinished_of(job.output).unlink(missing_ok=True)
    planned = network.planned
    trade_off, within = (planned.trade_off, planned.within) if planned is not None else (None, None)
    return Assembled(bundle, engine.audit, False, trade_off, network, within)


def validated(job: Job, progress: Progress = silent) -> Validated:
    """Checks everything about a build that needs no image to be decoded, and rewrites its model.

    Raises:
        TrtdetError: of the kind that says what is wrong; nothing has been written.
    """
    options = job.options
    backend = choose(options.backend)
    caps = backend.capabilities
    check_build(options, caps)
    plugins = plugin_parts(options.plugins, caps, options.engine.embed_plugins)
    progress("rewriting the graph", 0, 1)
    graph = build_graph(job.model, job.config, options, backend)
    int8 = options.precision == "int8" and options.cache is None
    if options.precision == "int8":
        check_placement(options.keep, graph)
    previous = previous_bundle(job.output, job.model, options.force)
    # In FP16 they show what exceeds it.
    shown = int8 or options.precision == "fp16"
    selected = select_images(options.calibration) if shown else Selection()
    dataset = bounding_images(options.keep, graph.config, selected.paths)
    facts = _facts(graph, options, caps, selected, plugins)
    if options.tuned is not None:
        plain = replace(options, keep=KeepOptions(), tuned=None)
        made = stage_keys(plain, _facts(graph, plain, caps, selected, plugins), True)[Stage.CORRECTIONS]
        check_tuned(options.tuned, sha256_file(job.model), made)
    keys = stage_keys(options, facts, options.precision == "int8")
    return Validated(job, backend, graph, plugins, selected, dataset, previous, keys)


def timing_cache_of(bundle: Path) -> Path:
    """The default file of measured kernel times: beside the bundle."""
    return bundle.with_name(f"{bundle.name}.timing-cache")


def unfinished_of(bundle: Path) -> Path:
    """The file beside the bundle that keeps a reconstruction until the bundle is there."""
    return bundle.with_name(f"{bundle.name}.reconstruction")


def networks_of(known: Validated, caps: Capabilities, progress: Progress = silent) -> tuple[Network, ...]:
    """Calibration, corrections, plan and network, as far as the options ask for them.

    There are several where the backend may be fastest with any of them; they differ in the form of weight scales.
    """
    graph, options = known.graph, known.job.options
    if options.cache is not None:
        return (cached_network(graph, options.cache, caps),)
    if options.precision != "int8":
        return (float_network(graph, options.precision, known.selected, progress),)
    ready = prepared_of(known, progress)
    planned = choose_plan(
        ready,
        options.keep,
        lambda: ranking(ready, options.keep, known.previous, progress),
        Prices(
            lambda: plan_costs(ready, known.backend, options, progress),
            lambda: plan_stopwatch(ready, known.backend, options, progress),
        ),
        known.dataset,
        progress,
    )
    if options.implicit:
        return (implicit_network(ready, planned, options, caps),)
    return explicit_networks(ready, planned, caps)


def prepared_of(known: Validated, progress: Progress = silent) -> Prepared:
    """Calibrates and corrects, or takes both from the folder of a tune."""
    options = known.job.options
    if options.tuned is not None:
        return load_prepared(options.tuned, tuned_key(options.tuned), known.graph, options, known.selected, progress)
    ranged = calibrated(
        known.graph,
        options.calibration,
        known.selected,
        implicit=options.implicit,
        previous=known.previous,
        progress=progress,
    )
    corrections = () if options.implicit else options.correct
    plan = starting_plan(known.graph, options.keep)
    calibration = replace(options.calibration, unfinished=unfinished_of(known.job.output))
    if options.keep.max_latency is not None and options.correct:
        ruled = replace(calibration, rule=CalibrationOptions.rule)
        _check_reachable(prepared(ranged, ruled, (), progress, plan), known, progress)
    return prepared(ranged, calibration, corrections, progress, plan, share=not options.implicit)


def _check_reachable(plain: Prepared, known: Validated, progress: Progress) -> None:
    """Refuses a time that no plan keeps before corrections are worked out, which make no plan faster."""
    options = known.job.options
    limit = options.keep.max_latency
    if limit is None or plan_stopwatch(plain, known.backend, options, progress) is not None:
        return  # what is measured says it, of the plan itself
    costs = plan_costs(plain, known.backend, options, progress)
    if costs is not None:
        check_reachable(costs, plan_problem(plain, costs), limit)


def _facts(
    graph: Graph,
    options: BuildOptions,
    caps: Capabilities,
    selected: Selection,
    plugins: tuple[PluginPart, ...],
) -> dict[str, Any]:
    """What the options resolve to, by the names that their metadata gives, and what stands for no option."""
    keep, histograms = options.keep, options.calibration.histograms
    priced = (options.guard, keep.bound, keep.max_latency) != (None, None, None)
    return {
        "trtdet": __version__,
        "config": graph.config.model_dump(mode="json"),
        "model": hashlib.sha256(model_bytes(graph.model)).hexdigest(),
        "nms": [graph.nms_mode, graph.passes.keep_embedded],
        "backend": [caps.name, caps.version],
        "images": selected.sha256,
        # Images say it all; without them the given collection does.
        "histograms": Collection.load(histograms).key if histograms is not None and not selected.paths else None,
        "cache": sha256_file(options.cache) if options.cache is not None else None,
        "kept": _kept(keep),
        "annotated": _annotated(keep),
        "ranked_images": keep.num_images if keep.ranked else None,
        "tuned": tuned_key(options.tuned) if options.tuned is not None else None,
        "plugins": [part.sha256 for part in plugins],
        # The GPU decides nothing unless its estimate does.
        "guard": [options.guard, options.gpu] if priced else None,
    }


def _kept(keep: KeepOptions) -> Any:
    if isinstance(keep.keep, Path):
        return ["plan", json.dumps(asdict(PrecisionPlan.load(keep.keep)), sort_keys=True)]
    return keep.keep


def _annotated(keep: KeepOptions) -> Any:
    """The plan depends on annotated images where it is found by their score."""
    if keep.bound is None or keep.images is None:
        return None
    annotations = sha256_file(keep.annotations) if keep.annotations is not None else None
    return [annotations, content_hash(find_images(keep.images))]
