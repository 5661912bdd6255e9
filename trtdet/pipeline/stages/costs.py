"""What plans cost on a GPU: one engine is built, and every other plan is estimated from its layers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import onnx

from trtdet.audit.gpus import GPUS, Gpu, gpu_named
from trtdet.audit.neighbours import Costs, time_costs
from trtdet.audit.roofline import Roofline
from trtdet.audit.traffic import Flow
from trtdet.backends import Backend, EngineFacts, Runner, open_engine
from trtdet.errors import TrtdetWarning
from trtdet.mixed_precision.planning import keeping
from trtdet.performance import BenchOptions, Target, measure
from trtdet.pipeline.options import BuildOptions
from trtdet.pipeline.stages.correcting import Prepared
from trtdet.pipeline.stages.engines import best_engine, runs_on, target_of
from trtdet.pipeline.stages.networks import explicit_networks
from trtdet.pipeline.stages.planning import Planned, without_overflow
from trtdet.pipeline.stages.sizes import size_costs
from trtdet.progress import Progress, silent
from trtdet.quantization import Cause

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

    They are of a run, or for the throughput of an image.

    Args:
        prepared: its plan is built; what that has in INT8 may be put into FP16.
        backend: builds the engine.
        options: of the build.
        progress: told of the builder's phases.

    Raises:
        BackendError: the backend refuses the network.
    """
    caps = backend.capabilities
    if not caps.lists_layers or options.implicit:
        return None
    networks = explicit_networks(prepared, Planned(prepared.plan), caps)
    with TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", TrtdetWarning)  # the engine that is shipped says it
        timings = options.timing_cache or Path(folder) / "timings"
        engine = best_engine(networks, backend, target_of(options), timings, progress)
    if engine.audit is None:
        return None
    flow = Flow(engine.audit.layers, engine.network.plan, engine.network.model)
    gpu = gpu_of(options, engine.built.sms)
    graph = prepared.graph.nms_mode not in caps.uncaptured_nms
    batch = batch_of(options, prepared.model)
    found = time_costs(flow, Roofline(flow, gpu, batch, graph))
    if options.keep.objective == "throughput":
        return replace(found.shared_by(batch), unit=f"ms an image (estimate, {gpu.name}, batch {batch})")
    return replace(found, unit=f"ms (estimate, {gpu.name}, batch {batch})")


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
    caps = backend.capabilities
    if runs_on("auto", caps, options.sms, options.plugins) != "engine":
        return None

    def ms(names: tuple[str, ...]) -> float:
        tried = keeping(prepared.plan, dict.fromkeys(names, "tried"), Cause.KEPT_LATENCY)
        networks = explicit_networks(prepared, Planned(without_overflow(prepared, tried, progress)), caps)
        with TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore", TrtdetWarning)  # the engine that is shipped says it
            timings = options.timing_cache or Path(folder) / "timings"
            built = best_engine(networks, backend, target_of(options), timings, progress).built
        with open_engine(built.engine, EngineFacts.built(caps, built.sms, options.plugins)) as run:
            return run_ms(run, prepared, options, progress)[0]

    return ms
