"""Costs of plans on a GPU, estimated from the layers of one engine or measured on the layers of two engines."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from statistics import fmean

import numpy as np
import onnx

from trtdet.audit.gpus import GPUS, Gpu, gpu_named
from trtdet.audit.neighbours import Costs, Joint, MeasuredPart, measured_costs, time_costs
from trtdet.audit.roofline import TIME_WITHIN, Roofline
from trtdet.backends import Backend, EngineTarget, Runner
from trtdet.building.corrections import Prepared
from trtdet.building.engine import Engine, best_engine, explicit_networks, runs_on
from trtdet.errors import TrtdetWarning
from trtdet.files import scratch_folder
from trtdet.options import BuildOptions
from trtdet.performance import BenchOptions, OnnxNodes, ProfileOptions, Target, differences, measure, profile_targets
from trtdet.plans.planning import keeping
from trtdet.progress import Progress, silent
from trtdet.quantization import LAYERS, Cause, PrecisionPlan
from trtdet.quantization.macs import multiply_adds


def gpu_of(gpu: str | None, sms: Sequence[int]) -> Gpu:
    """The GPU of an estimate: the named one, else the first in the table with one of ``sms`` (such as 86), else an L4.
    Raises ConfigError: the table lacks the named GPU."""
    if gpu is not None:
        return gpu_named(gpu)
    return next((row for row in GPUS.values() if row.capability in sms), gpu_named("L4"))


def named_gpu(options: BuildOptions) -> Gpu | None:
    """The GPU that the options name; raises ConfigError if the table lacks it."""
    return None if options.engine.gpu is None else gpu_named(options.engine.gpu)


def batch_of(options: BuildOptions, model: onnx.ModelProto) -> int:
    """Batch size at which plans are estimated and measured."""
    first = model.graph.input[0].type.tensor_type.shape.dim[0]
    if first.dim_value:
        return int(first.dim_value)
    _, usual, high = EngineTarget.of(options).batch or (1, 1, 1)
    return high if options.plan.objective == "throughput" else usual


def plan_times(
    prepared: Prepared, backend: Backend, options: BuildOptions, progress: Progress = silent
) -> Costs | None:
    """Milliseconds of all plans at the batch of the objective; None if the backend lists no layers.

    Times are per run, or per image for the throughput. If a local GPU can run engines and the options name no GPU, the
    layers of two engines are measured, see :func:`trtdet.audit.neighbours.measured_costs`: one with the plan of
    ``prepared``, one with its INT8 convolutions in FP16. Otherwise the layers of the first are estimated. Raises
    BackendError: the backend refuses the network, or an engine fails.
    """
    caps = backend.capabilities
    if not caps.lists_layers or options.implicit:
        return None
    engine = built_of(prepared, prepared.plan, backend, options=options, progress=progress)
    flow = engine.flow
    if flow is None:
        return None
    gpu, batch = gpu_of(options.engine.gpu, engine.built.sms), batch_of(options, prepared.model)
    captured = not caps.uncaptured(prepared.graph.nms_mode, prepared.graph.config.nms)
    roofline = Roofline(flow, gpu=gpu, batch=batch, graph=captured)
    if options.engine.gpu is None and runs_on("auto", caps, EngineTarget.of(options)) == "engine":
        tried = keeping(prepared.plan, dict.fromkeys(prepared.plan.names("int8"), "tried"), Cause.KEPT_LATENCY)
        plan = prepared.without_overflow(tried, progress)
        half = built_of(prepared, plan, backend, options=options, progress=progress)
        measured, name = _layers_measured(engine, half, prepared, backend=backend, options=options, progress=progress)
        costs, basis = measured_costs(flow, roofline, measured), f"from layers measured on {name}"
    else:
        costs, name, basis = time_costs(flow, roofline), gpu.name, f"estimate within {TIME_WITHIN:g}x, {gpu.name}"
    image = ""
    if options.plan.objective == "throughput":
        costs, image = costs.shared_by(batch), " an image"
    return replace(costs, unit=f"ms{image} ({basis}, batch {batch})", gpu=name)


def built_of(
    prepared: Prepared, plan: PrecisionPlan, backend: Backend, options: BuildOptions, progress: Progress = silent
) -> Engine:
    """An engine of a plan that is not shipped, without its warnings and without a timing cache of its own."""
    with scratch_folder() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", TrtdetWarning)  # the shipped engine gives the same warnings
        networks = explicit_networks(prepared, plan, backend.capabilities)
        return best_engine(networks, backend, EngineTarget.of(options), timings=folder / "timings", progress=progress)


def _layers_measured(
    int8: Engine, fp16: Engine, prepared: Prepared, backend: Backend, options: BuildOptions, progress: Progress
) -> tuple[list[MeasuredPart], str]:
    """Times of the layers of both engines, scaled to add up to a run without the profiler; and the device's name."""
    with ExitStack() as stack:
        targets, nms = [], prepared.graph.nms_mode
        for name, engine in (("INT8", int8), ("FP16", fp16)):
            run = stack.enter_context(engine.opened(backend.capabilities, EngineTarget.of(options).plugins))
            targets.append(Target(name, runner=run, input=prepared.graph.config.input, file=name, nms=nms))
        nodes = [OnnxNodes.of(engine.network.model) for engine in (int8, fp16)]
        profiling = profile_targets(
            targets, nodes, ProfileOptions(batch_of(options, prepared.model)), progress=progress
        )
    assert profiling.against is not None, "two were profiled"
    runs = [fmean(each.latency_ms) / each.sum_ms for each in (profiling.profile, profiling.against)]
    parts = [
        MeasuredPart(part.convs, layers=part.first_layers, int8=runs[0] * part.first_ms, fp16=runs[1] * part.second_ms)
        for part in differences(profiling.profile, profiling.against)
    ]
    return parts, profiling.profile.run_info.device


def run_ms(run: Runner, prepared: Prepared, options: BuildOptions, progress: Progress = silent) -> tuple[float, str]:
    """Median milliseconds of a run with its transfers, or per image for the throughput; and the device's name."""
    batch = batch_of(options, prepared.model)
    graph = prepared.graph
    target = Target("engine", runner=run, input=graph.config.input, file="engine", nms=graph.nms_mode)
    timed = measure([target], BenchOptions((batch,), seconds=1.0), progress=progress).targets[0]
    images = batch if options.plan.objective == "throughput" else 1
    return timed.points[0].latency_ms.p50 / images, timed.run_info.device


def plan_stopwatch(
    prepared: Prepared, backend: Backend, options: BuildOptions, progress: Progress = silent
) -> Callable[[tuple[str, ...]], float] | None:
    """Returns a function that measures the plan with some convolutions in FP16; None if engines cannot run here."""
    target = EngineTarget.of(options)
    if runs_on("auto", backend.capabilities, target) != "engine":
        return None

    def ms(names: tuple[str, ...]) -> float:
        tried = keeping(prepared.plan, dict.fromkeys(names, "tried"), Cause.KEPT_LATENCY)
        plan = prepared.without_overflow(tried, progress)
        engine = built_of(prepared, plan, backend, options=options, progress=progress)
        with engine.opened(backend.capabilities, target.plugins) as run:
            return run_ms(run, prepared, options, progress=progress)[0]

    return ms


_BYTES = {"int8": 1, "fp16": 2, "fp32": 4}


def weight_counts(model: onnx.ModelProto) -> dict[str, int]:
    """Number of weights of each convolution and matrix product of a float model; computed weights count 0."""
    sizes = {tensor.name: math.prod(tensor.dims) for tensor in model.graph.initializer}
    return {node.name: sizes.get(node.input[1], 0) for node in model.graph.node if node.op_type in LAYERS}


def weight_bytes(model: onnx.ModelProto, plan: PrecisionPlan) -> int:
    """Bytes of all layers' weights under a plan."""
    counts = weight_counts(model)
    return sum(_BYTES[entry.precision] * counts.get(name, 0) for name, entry in plan.entries.items())


def size_costs(prepared: Prepared) -> Costs:
    """Costs that give every plan the value of :func:`weight_bytes`."""
    counts, names = weight_counts(prepared.model), prepared.plan.names("int8")
    joints = tuple(Joint((name,), np.array([1.0, 2.0]) * counts.get(name, 0)) for name in names if counts.get(name))
    fixed = weight_bytes(prepared.model, prepared.plan) - sum(counts.get(name, 0) for name in names)
    return Costs(names, joints=joints, fixed=float(fixed), unit="bytes of weights")


def weighted_macs(model: onnx.ModelProto, plan: PrecisionPlan) -> float:
    """Million multiply-adds of a float model for one image; FP16 layers count twice, FP32 layers four times."""
    macs = multiply_adds(model)
    return sum(_BYTES[entry.precision] * macs[name].count for name, entry in plan.entries.items()) / 1e6
