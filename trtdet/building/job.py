"""Checks of a build before any image is decoded, and the keys that tell whether a bundle is up to date."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from trtdet import __version__
from trtdet.backends import Backend, Capabilities, EngineTarget, choose, cuda
from trtdet.building.costs import batch_of, named_gpu
from trtdet.building.default_plan import DefaultPlan, decided_by_time, fastest_plan, timed_here
from trtdet.building.graph import PlacedGraph, build_graph, model_bytes
from trtdet.building.plan import check_placement
from trtdet.building.ranges import Selection, select_images
from trtdet.building.request import request_of
from trtdet.building.validation import bounding_images, check_build, plugin_parts
from trtdet.building.variants import check_tuned, resolved, tuned_key
from trtdet.bundle import Bundle, PluginPart
from trtdet.calibration import Collection
from trtdet.config import Config
from trtdet.data import CocoDataset, content_hash, find_images
from trtdet.errors import BundleError, ModelError, OutputError
from trtdet.files import sha256_file
from trtdet.options import BuildOptions, Stage, stage_keys
from trtdet.passes import has_pairs
from trtdet.plans.front import limit_of
from trtdet.progress import Progress, silent
from trtdet.quantization import PrecisionPlan


@dataclass(frozen=True)
class Job:
    """Input of a build: an ONNX model, its configuration, the bundle's folder, and the options. ``request`` is of
    :func:`trtdet.building.request.request_of`, for a build that a command can ask for again."""

    model: Path
    config: Config
    output: Path
    options: BuildOptions
    request: str | None = None

    def beside(self, name: str) -> Path:
        """A file beside the bundle, such as ``timing-cache``, the default timing cache."""
        return self.output.with_name(f"{self.output.name}.{name}")


def job_of(model: Path, config: Config, output: Path, options: BuildOptions, repeatable: bool = False) -> Job:
    """Makes a job: applies the variant of ``--from``, and puts options such as thresholds into the configuration.
    ``repeatable`` adds the request, by which :func:`trtdet.building.request.unchanged` knows the bundle."""
    if not Path(model).exists():
        raise ModelError(f"model '{model}' does not exist; give the path of an ONNX file")
    request = request_of(Path(model), config, options) if repeatable else None
    options, config = resolved(options, config)
    options = replace(options, quantized=has_pairs(Path(model)))
    config = config.with_nms(**options.nms.values)
    if options.input.size is not None:
        config = config.with_size(options.input.size)
    return Job(Path(model), config=config, output=Path(output), options=options, request=request)


@dataclass(frozen=True, eq=False)
class CheckedBuild:
    """A checked build, before any image is decoded.

    ``selected`` has the calibration images, ``dataset`` those that score plans for a limit on accuracy loss.
    Histograms and ranking of ``previous``, the bundle at the output, may be reused. ``estimated`` says whether
    estimates choose the default plan, and ``default`` is that plan; None if the bundle is up to date.
    """

    job: Job
    backend: Backend
    graph: PlacedGraph
    plugins: tuple[PluginPart, ...]
    selected: Selection
    dataset: CocoDataset | None
    previous: Bundle | None
    keys: Mapping[Stage, str]
    estimated: bool = False
    default: DefaultPlan | None = None

    @property
    def options(self) -> BuildOptions:
        return self.job.options

    @property
    def target(self) -> EngineTarget:
        return EngineTarget.of(self.options)

    @property
    def key(self) -> str:
        """The key of the last stage, which is the bundle's content hash."""
        return self.keys[Stage.ENGINE]

    @property
    def up_to_date(self) -> Bundle | None:
        """The bundle at the output, if a build would produce the same."""
        previous = self.previous
        return previous if previous is not None and previous.manifest.content_hash == self.key else None


def checked_build(job: Job, progress: Progress = silent, backend: Backend | None = None) -> CheckedBuild:
    """Makes all checks that need no decoded image, rewrites the model, and chooses the default plan.

    ``backend`` replaces the backend that the options name. Raises TrtdetError: its subclass names the kind of problem;
    nothing has been written.
    """
    options, backend = job.options, backend or choose(job.options.backend)
    caps, int8 = backend.capabilities, job.options.int8
    check_build(options, caps)
    plugins = plugin_parts(options.engine.plugins, caps, options.engine.embed_plugins)
    progress("rewriting the graph", 0, 1)
    graph = build_graph(job.model, job.config, options, backend=backend)
    previous = previous_bundle(job.output, job.model, sha256_file(job.model), force=options.force)
    selected = select_images(options.calibration) if options.runs_images else Selection()
    dataset = bounding_images(options.plan, graph.config, selected.paths)

    estimated = decided_by_time(options, caps, graph.flow)
    if options.tuned is not None:
        plain = replace(options, plan=options.plan.formats_alone(), from_=None, tuned=None)
        facts = _facts(graph, plain, caps, selected=selected, plugins=plugins)
        check_tuned(options.tuned, sha256_file(job.model), stage_keys(plain, facts, int8)[Stage.CORRECTIONS])
    build = CheckedBuild(
        job=job,
        backend=backend,
        graph=graph,
        plugins=plugins,
        selected=selected,
        dataset=dataset,
        previous=previous,
        keys=stage_keys(options, _facts(graph, options, caps, selected=selected, plugins=plugins), int8),
        estimated=estimated,
    )
    if build.up_to_date is None and estimated:
        default = fastest_plan(graph, backend, options, progress=progress)
        if default is not None:
            build = replace(build, graph=replace(graph, default=default.plan), default=default)
    if int8 and (build.default is None or not build.default.fp16_alone):
        check_placement(options.plan, build.graph)
    return build


def previous_bundle(output: Path, source: Path, sha256: str, force: bool) -> Bundle | None:
    """The bundle at ``output``; None if missing or damaged.

    ``sha256`` is of the model that is built, from ``source``. Raises OutputError: it is of another model, and ``force``
    is not set.
    """
    try:
        model = Bundle(output, verify=False).manifest.model
        if force or model.sha256 == sha256:
            return Bundle(output)
    except BundleError:
        return None
    raise OutputError(
        f"'{output}' is a bundle of another model ('{model.name}', SHA-256 {model.sha256[:12]}...), not of "
        f"'{source}'; choose another place with -o, or replace it with --force"
    )


def _facts(
    graph: PlacedGraph,
    options: BuildOptions,
    caps: Capabilities,
    selected: Selection,
    plugins: tuple[PluginPart, ...],
) -> dict[str, Any]:
    """Resolved values of options, by the keys in their metadata, and other inputs of the build."""
    plan, histograms, cache = options.plan, options.calibration.histograms, options.calibration.cache
    keep_fp16: Any = plan.keep_fp16
    least = options.least_speedup
    if isinstance(keep_fp16, Path):
        keep_fp16 = ["plan", json.dumps(asdict(PrecisionPlan.load(keep_fp16)), sort_keys=True)]
    estimated: Any = None
    if decided_by_time(options, caps, graph.flow):
        gpu, target = named_gpu(options), EngineTarget.of(options)
        sms = target.sms or caps.default_sms
        estimated = [gpu and gpu.name, sms, batch_of(options, graph.model), options.least_speedup]
    elif timed_here(options, caps):
        estimated = ["timed", [device.name for device in cuda.devices()], batch_of(options, graph.model)]
    annotated: list[str | None] | None = None
    if limit_of(plan) is not None and plan.val_images is not None:  # their scores choose the plan
        annotations = sha256_file(plan.annotations) if plan.annotations is not None else None
        annotated = [annotations, content_hash(find_images(plan.val_images))]
    return {
        "trtdet": __version__,
        "config": graph.config.model_dump(mode="json"),
        "model": hashlib.sha256(model_bytes(graph.model)).hexdigest(),
        "own": None if graph.own is None else graph.own.key,
        "nms": [graph.nms_mode, graph.passes.keep_embedded],
        "backend": [caps.name, caps.version],
        "images": selected.sha256,
        # The images determine the histograms; without images the file itself counts.
        "histograms": Collection.load(histograms).key if histograms is not None and not selected.paths else None,
        "cache": sha256_file(cache) if cache is not None else None,
        "kept": keep_fp16,
        "estimated": estimated,
        "annotated": annotated,
        "ranked_images": plan.rank_images if plan.ranked else None,
        "tuned": tuned_key(options.tuned) if options.tuned is not None else None,
        "plugins": [part.sha256 for part in plugins],
        # The GPU matters only where its estimate decides.
        "guard": [least, options.engine.gpu] if least is not None or plan.limited else None,
    }
