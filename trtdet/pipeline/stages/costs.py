"""What plans cost on a GPU: every plan is estimated from the layers of one engine, or of two that are run here."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

import onnx

from trtdet.audit.gpus import GPUS, Gpu, gpu_named
from trtdet.audit.neighbours import Costs, Measured, measured_costs, time_costs
from trtdet.audit.roofline import Roofline
from trtdet.audit.traffic import Flow
from trtdet.backends import Backend, EngineFacts, Runner, open_engine
from trtdet.errors import TrtdetWarning
from trtdet.mixed_precision.planning import keeping
from trtdet.performance import (
    BenchOptions,
    OnnxNodes,
    ProfileOptions,
    Target,
    differences,
    measure,
    profile_targets,
)
from trtdet.pipeline.options import BuildOptions
from trtdet.pipeline.stages.correcting import Prepared
from trtdet.pipeline.stages.engines import Engine, best_engine, runs_on, target_of
from trtdet.pipeline.stages.networks import explicit_networks
from trtdet.pipeline.stages.planning import Planned, without_overflow
from trtdet.pipeline.stages.sizes import size_costs
from trtdet.progress import Progress, silent
from trtdet.quantization import Cause, PrecisionPlan

DEFAULT_GPU = "L4"
"""The GPU of estimates for engines that were built for none of the table's compute capabilities."""


def default_gpu(sms: Sequence[int]) -> Gpu:
    """The GPU that an engine is estimated for where nobody names it: the first of the table that it was built for.

    Args:
        sms: compute capabilities that the engine was built for, such as 86.
    """
    return next((gpu for gpu in GPUS.values() if gpu.capability in sms), gpu_named(DEFAULT_GPU))


def batch_of(options: BuildOptions, model: onnx.ModelProto) -> int:
    """Images at once that plans of a model are estimated for, and measured with."""
    first = model.graph.input[0].type.tensor_type.shape.dim[0]
    if first.dim_value:
        return int(first.dim_value)
    _, usual, high = options.batch or (1, 1, 1)
    return high if options.keep.objective == "throughput" else usual


def gpu_of(options: BuildOptions, sms: Sequence[int]) -> Gpu:
    """The GPU that plans are estimated for.

    Args:
        options: of the build.
        sms: compute capabilities that the engine is built for.
    """
    return gpu_named(options.gpu) if options.gpu is not None else default_gpu(sms)


def plan_costs(
    prepared: Prepared, backend: Backend, options: BuildOptions, progress: Progress = silent
) -> Costs | None:
    """What any plan costs by the objective: as of :func:`plan_times`, or bytes of weights.

    Raises:
        BackendError: as of :func:`plan_times`.
    """
    if options.keep.objective == "size" and not options.implicit:
        return size_costs(prepared)
    return plan_times(prepared, backend, options, progress)


def plan_times(
    prepared: Prepared, backend: Backend, options: BuildOptions, progress: Progress = silent
) -> Costs | None:
    """Milliseconds of any plan at the batch of the objective; None where the backend lists no layers.

    They are of a run, or for the throughput of an image. Where a GPU here runs engines and no other is named, the
    layers of two engines are measured, all in INT8 and all in FP16, see
    :func:`trtdet.audit.neighbours.measured_costs`. Elsewhere one is built and its layers are estimated.

    Args:
        prepared: its plan is built; what that has in INT8 may be put into FP16.
        backend: builds the engine.
        options: of the build.
        progress: told of the builder's phases.

    Raises:
        BackendError: the backend refuses the network, or an engine fails.
    """
    caps = backend.capabilities
    if not caps.lists_layers or options.implicit:
        return None
    engine = _built(prepared, prepared.plan, backend, options, progress)
    if engine.audit is None:
        return None
    flow = Flow(engine.audit.layers, engine.network.plan, engine.network.model)
    gpu = gpu_of(options, engine.built.sms)
    batch = batch_of(options, prepared.model)
    roofline = Roofline(flow, gpu, batch, not caps.uncaptured(prepared.graph.nms_mode, prepared.config.nms))
    if options.gpu is None and _run_here(backend, options):
        plan = _kept(prepared, prepared.plan.names("int8"), progress)
        half = _built(prepared, plan, backend, options, progress)
        measured, name = _layers_measured(engine, half, prepared, backend, options, progress)
        found, basis = measured_costs(flow, roofline, measured), f"from layers measured on {name}"
    else:
        found, name, basis = time_costs(flow, roofline), gpu.name, f"estimate, {gpu.name}"
    image = ""
    if options.keep.objective == "throughput":
        found, image = found.shared_by(batch), " an image"
    return replace(found, unit=f"ms{image} ({basis}, batch {batch})", gpu=name)


def _kept(prepared: Prepared, names: tuple[str, ...], progress: Progress) -> PrecisionPlan:
    """The plan with these convolutions in FP16."""
    tried = keeping(prepared.plan, dict.fromkeys(names, "tried"), Cause.KEPT_LATENCY)
    return without_overflow(prepared, tried, progress)


def _built(
    prepared: Prepared, plan: PrecisionPlan, backend: Backend, options: BuildOptions, progress: Progress
) -> Engine:
    """The engine of a plan, which is not shipped."""
    networks = explicit_networks(prepared, Planned(plan), backend.capabilities)
    with TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", TrtdetWarning)  # the engine that is shipped says it
        timings = options.timing_cache or Path(folder) / "timings"
        return best_engine(networks, backend, target_of(options), timings, progress)


def _run_here(backend: Backend, options: BuildOptions) -> bool:
    return runs_on("auto", backend.capabilities, options.sms, options.plugins) == "engine"


def _layers_measured(
    int8: Engine, fp16: Engine, prepared: Prepared, backend: Backend, options: BuildOptions, progress: Progress
) -> tuple[list[Measured], str]:
    """What the layers of both engines take, run in turns, by convolutions; and the device.

    Layers are measured one by one, so each engine's are made to add up to a run without the profiler.
    """
    facts = [EngineFacts.built(backend.capabilities, engine.built.sms, options.plugins) for engine in (int8, fp16)]
    with ExitStack() as stack:
        targets = [
            Target(name, run, prepared.config.input, name, prepared.graph.nms_mode)
            for name, engine, known in zip(("INT8", "FP16"), (int8, fp16), facts, strict=True)
            for run in [stack.enter_context(open_engine(engine.built.engine, known))]
        ]
        nodes = [OnnxNodes.of(engine.network.model) for engine in (int8, fp16)]
        done = profile_targets(targets, nodes, ProfileOptions(batch_of(options, prepared.model)), progress)
    assert done.against is not None, "two were profiled"
    runs = [fmean(found.latency_ms) / found.sum_ms for found in (done.profile, done.against)]
    parts = [
        Measured(part.convs, part.first_layers, runs[0] * part.first_ms, runs[1] * part.second_ms)
        for part in differences(done.profile, done.against)
    ]
    return parts, done.profile.run_info.device


def run_ms(run: Runner, prepared: Prepared, options: BuildOptions, progress: Progress = silent) -> tuple[float, str]:
    """Measured milliseconds of an engine at the batch of the objective, and the device.

    They are the median of runs with their transfers; for the throughput, that of an image.
    """
    batch = batch_of(options, prepared.model)
    target = Target("engine", run, prepared.config.input, "engine", prepared.graph.nms_mode)
    timed = measure([target], BenchOptions((batch,), seconds=1.0), progress=progress).targets[0]
    images = batch if options.keep.objective == "throughput" else 1
    return timed.points[0].latency_ms.p50 / images, timed.run_info.device


def plan_stopwatch(
    prepared: Prepared, backend: Backend, options: BuildOptions, progress: Progress = silent
) -> Callable[[tuple[str, ...]], float] | None:
    """Builds and measures the plan with the given convolutions in FP16; None where no engine can be run here."""
    if not _run_here(backend, options):
        return None

    def ms(names: tuple[str, ...]) -> float:
        built = _built(prepared, _kept(prepared, names, progress), backend, options, progress).built
        with open_engine(built.engine, EngineFacts.built(backend.capabilities, built.sms, options.plugins)) as run:
            return run_ms(run, prepared, options, progress)[0]

    return ms
