"""What plans cost on a GPU: every plan is estimated from the layers of one engine, or of two that are run here."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory

import numpy as np
import onnx

from trtdet.audit.gpus import GPUS, Gpu, gpu_named
from trtdet.audit.neighbours import Costs, Joint, MeasuredPart, measured_costs, time_costs
from trtdet.audit.roofline import Roofline
from trtdet.audit.traffic import Flow
from trtdet.backends import Backend, EngineFacts, EngineTarget, Runner, open_engine
from trtdet.building.corrections import Prepared
from trtdet.building.engine import Engine, best_engine, explicit_networks, runs_on
from trtdet.errors import TrtdetWarning
from trtdet.options import BuildOptions
from trtdet.performance import BenchOptions, OnnxNodes, ProfileOptions, Target, differences, measure, profile_targets
from trtdet.plans.planning import keeping
from trtdet.progress import Progress, silent
from trtdet.quantization import LAYERS, Cause, PrecisionPlan
from trtdet.quantization.macs import multiply_adds


def gpu_of(gpu: str | None, sms: Sequence[int]) -> Gpu:
    """The GPU that an engine is estimated for: the named one, else the first of the table that it was built for (its
    compute capabilities, such as 86), else an L4.

    Raises:
        ConfigError: the named one is not in the table.
    """
    if gpu is not None:
        return gpu_named(gpu)
    return next((row for row in GPUS.values() if row.capability in sms), gpu_named("L4"))


def named_gpu(options: BuildOptions) -> Gpu | None:
    """The GPU that estimates are asked for.

    Raises:
        ConfigError: it is not in the table.
    """
    return None if options.engine.gpu is None else gpu_named(options.engine.gpu)


def batch_of(options: BuildOptions, model: onnx.ModelProto) -> int:
    """Images at once that plans of a model are estimated for, and measured with."""
    first = model.graph.input[0].type.tensor_type.shape.dim[0]
    if first.dim_value:
        return int(first.dim_value)
    _, usual, high = EngineTarget.of(options).batch or (1, 1, 1)
    return high if options.plan.objective == "throughput" else usual


def plan_costs(
    prepared: Prepared, backend: Backend, options: BuildOptions, progress: Progress = silent
) -> Costs | None:
    """What any plan costs by the objective: as of :func:`plan_times`, or bytes of weights."""
    if options.plan.objective == "size" and not options.implicit:
        return size_costs(prepared)
    return plan_times(prepared, backend, options, progress=progress)


def plan_times(
    prepared: Prepared, backend: Backend, options: BuildOptions, progress: Progress = silent
) -> Costs | None:
    """Milliseconds of any plan at the batch of the objective; None where the backend lists no layers.

    They are of a run, or for the throughput of an image. Where a GPU here runs engines and no other is named, the
    layers of two engines are measured, all in INT8 and all in FP16, see
    :func:`trtdet.audit.neighbours.measured_costs`. Elsewhere one is built and its layers are estimated.

    Args:
        prepared: its plan is built; what that has in INT8 may be put into FP16.

    Raises:
        BackendError: the backend refuses the network, or an engine fails.
    """
    caps = backend.capabilities
    if not caps.lists_layers or options.implicit:
        return None
    engine = _built(prepared, prepared.plan, backend, options=options, progress=progress)
    if engine.audit is None:
        return None
    flow = Flow(engine.audit.layers, engine.network.plan, engine.network.model)
    gpu, batch = gpu_of(options.engine.gpu, engine.built.sms), batch_of(options, prepared.model)
    graph = not caps.uncaptured(prepared.graph.nms_mode, prepared.config.nms)
    roofline = Roofline(flow, gpu=gpu, batch=batch, graph=graph)
    if options.engine.gpu is None and _run_here(backend, options):
        plan = _kept(prepared, prepared.plan.names("int8"), progress)
        half = _built(prepared, plan, backend, options=options, progress=progress)
        measured, name = _layers_measured(engine, half, prepared, backend=backend, options=options, progress=progress)
        costs, basis = measured_costs(flow, roofline, measured), f"from layers measured on {name}"
    else:
        costs, name, basis = time_costs(flow, roofline), gpu.name, f"estimate, {gpu.name}"
    image = ""
    if options.plan.objective == "throughput":
        costs, image = costs.shared_by(batch), " an image"
    return replace(costs, unit=f"ms{image} ({basis}, batch {batch})", gpu=name)


def _kept(prepared: Prepared, names: tuple[str, ...], progress: Progress) -> PrecisionPlan:
    """The plan with these convolutions in FP16."""
    plan = keeping(prepared.plan, dict.fromkeys(names, "tried"), Cause.KEPT_LATENCY)
    return prepared.without_overflow(plan, progress)


def _built(
    prepared: Prepared, plan: PrecisionPlan, backend: Backend, options: BuildOptions, progress: Progress
) -> Engine:
    """The engine of a plan, which is not shipped."""
    networks = explicit_networks(prepared, plan, backend.capabilities)
    with TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", TrtdetWarning)  # the engine that is shipped says it
        return best_engine(
            networks, backend, EngineTarget.of(options), timings=Path(folder) / "timings", progress=progress
        )


def _run_here(backend: Backend, options: BuildOptions) -> bool:
    return runs_on("auto", backend.capabilities, EngineTarget.of(options)) == "engine"


def _layers_measured(
    int8: Engine, fp16: Engine, prepared: Prepared, backend: Backend, options: BuildOptions, progress: Progress
) -> tuple[list[MeasuredPart], str]:
    """What the layers of both engines take, run in turns, by convolutions; and the device.

    Layers are measured one by one, so each engine's are made to add up to a run without the profiler.
    """
    with ExitStack() as stack:
        targets = []
        for name, engine in (("INT8", int8), ("FP16", fp16)):
            facts = EngineFacts.built(backend.capabilities, engine.built.sms, EngineTarget.of(options).plugins)
            run = stack.enter_context(open_engine(engine.built.engine, facts))
            nms = prepared.graph.nms_mode
            targets.append(Target(name, runner=run, input=prepared.config.input, file=name, nms=nms))
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
    """Measured milliseconds of an engine at the batch of the objective, and the device.

    They are the median of runs with their transfers; for the throughput, that of an image.
    """
    batch = batch_of(options, prepared.model)
    target = Target("engine", runner=run, input=prepared.config.input, file="engine", nms=prepared.graph.nms_mode)
    timed = measure([target], BenchOptions((batch,), seconds=1.0), progress=progress).targets[0]
    images = batch if options.plan.objective == "throughput" else 1
    return timed.points[0].latency_ms.p50 / images, timed.run_info.device


def plan_stopwatch(
    prepared: Prepared, backend: Backend, options: BuildOptions, progress: Progress = silent
) -> Callable[[tuple[str, ...]], float] | None:
    """Builds and measures the plan with the given convolutions in FP16; None where no engine can be run here."""
    if not _run_here(backend, options):
        return None

    def ms(names: tuple[str, ...]) -> float:
        built = _built(prepared, _kept(prepared, names, progress), backend, options=options, progress=progress).built
        facts = EngineFacts.built(backend.capabilities, built.sms, EngineTarget.of(options).plugins)
        with open_engine(built.engine, facts) as run:
            return run_ms(run, prepared, options, progress=progress)[0]

    return ms


_BYTES = {"int8": 1, "fp16": 2, "fp32": 4}


def weight_counts(model: onnx.ModelProto) -> dict[str, int]:
    """How many weights each convolution and product of a float model has; those that it computes itself count 0."""
    sizes = {tensor.name: math.prod(tensor.dims) for tensor in model.graph.initializer}
    layers = (node for node in model.graph.node if node.op_type in LAYERS)
    return {node.name: sizes.get(node.input[1], 0) for node in layers}


def weight_bytes(model: onnx.ModelProto, plan: PrecisionPlan) -> int:
    """Bytes of all layers' weights in the precisions of a plan, one, two and four each."""
    counts = weight_counts(model)
    return sum(_BYTES[entry.precision] * counts.get(name, 0) for name, entry in plan.entries.items())


def size_costs(prepared: Prepared) -> Costs:
    """Bytes of weights as a cost: what :func:`weight_bytes` gives of every plan."""
    counts, names = weight_counts(prepared.model), prepared.plan.names("int8")
    joints = tuple(Joint((name,), np.array([1.0, 2.0]) * counts.get(name, 0)) for name in names if counts.get(name))
    fixed = weight_bytes(prepared.model, prepared.plan) - sum(counts.get(name, 0) for name in names)
    return Costs(names, joints=joints, fixed=float(fixed), unit="bytes of weights")


def weighted_macs(model: onnx.ModelProto, plan: PrecisionPlan) -> float:
    """Million multiply-adds of a float model's layers for one image, those in FP16 twice and in FP32 four times."""
    macs = multiply_adds(model)
    return sum(_BYTES[entry.precision] * macs[name].count for name, entry in plan.entries.items()) / 1e6
