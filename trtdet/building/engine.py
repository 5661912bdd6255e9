"""Fifth step of a build: the plan -> the network that the builder is given -> an engine, and what its layers run in."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, cast

import onnx

from trtdet.audit import Audit, audit, layers_of
from trtdet.backends import (
    Backend,
    Built,
    Capabilities,
    EngineFacts,
    Implicit,
    OwnCalibrator,
    build_remembering,
    cuda,
    obstacle,
)
from trtdet.backends.base import EngineTarget, compose
from trtdet.building.corrections import Prepared
from trtdet.building.graph import PlacedGraph
from trtdet.building.half import HalfParts, Magnitudes, half_parts, within_half
from trtdet.building.ranges import Selection
from trtdet.calibration import cache
from trtdet.errors import BackendError, CalibrationError, TrtdetWarning
from trtdet.options import BuildOptions
from trtdet.progress import Progress, silent
from trtdet.quantization import Cause, DataFlow, Entry, Precision, PrecisionPlan, Requantized, WeightForm, to_half
from trtdet.runtime.detector import Runtime

OLDEST = 8600
"""The TensorRT that a calibration cache is written for where the engine's own library reads none: 8.6.0."""


@dataclass(frozen=True, eq=False)
class BuildNetwork:
    """What is handed to the builder, and how it came about.

    Attributes:
        activations: the model that is handed over, and how its plugin activations read and write.
        precision: the lowest that the engine may use.
        plan: what each convolution is to run in.
        precisions: by name of the nodes that are to stay out of INT8, for a weakly typed network.
        implicit: the ranges, where the model has no Q/DQ nodes.
        cache: the ranges as a calibration cache.
        prepared: what the plan was made for; None for float networks and given caches.
        form: of the scales of INT8 weights; None where the model has no Q/DQ nodes.
    """

    activations: Requantized
    precision: Precision
    plan: PrecisionPlan
    precisions: Mapping[str, str] = field(default_factory=dict)
    implicit: Implicit | None = None
    cache: str = ""
    prepared: Prepared | None = None
    form: WeightForm | None = None

    @property
    def model(self) -> onnx.ModelProto:
        """With Q/DQ nodes and casts; float where the ranges are handed over beside it."""
        return self.activations.model


def float_plan(plan: PrecisionPlan, precision: Precision) -> PrecisionPlan:
    """Everything in one precision; what decodes boxes stays in FP32."""
    entries = {}
    for name, entry in plan.entries.items():
        stays = precision == "fp16" and entry.cause is Cause.DECODES_BOXES
        entries[name] = entry if stays else Entry(precision, f"--{precision}", Cause.REQUESTED)
    return PrecisionPlan(entries)


def float_network(
    graph: PlacedGraph, precision: Precision, selected: Selection = Selection(), progress: Progress = silent
) -> BuildNetwork:
    """The model in one float precision.

    Args:
        precision: ``fp16`` or ``fp32``.
        selected: images that show what FP16 holds; without any nothing is checked.
    """
    plan = float_plan(graph.placement.plan, precision)
    parts = HalfParts(plan.names("fp16"))
    if precision == "fp16" and selected.paths:
        magnitudes = Magnitudes(graph, selected)
        plan = within_half(graph.model, plan, DataFlow(), magnitudes=magnitudes, progress=progress)
        parts = half_parts(graph.model, plan, DataFlow(), magnitudes=magnitudes)
    half = to_half(graph.model, parts.names, parts.left)
    precisions = graph.quantizable.precisions(plan) if precision == "fp16" else {}
    return BuildNetwork(Requantized(half), precision=precision, plan=plan, precisions=precisions)


def explicit_networks(prepared: Prepared, plan: PrecisionPlan, caps: Capabilities) -> tuple[BuildNetwork, ...]:
    """The model with Q/DQ nodes, in each form of weight scales that the backend may be fastest with."""
    return tuple(
        BuildNetwork(
            prepared.explicit(plan, form),
            precision="int8",
            plan=plan,
            precisions=prepared.graph.quantizable.precisions(plan),
            cache=prepared.ranges.to_calibration_cache(caps.cache_version or OLDEST),
            prepared=prepared,
            form=form,
        )
        for form in prepared.flow.weights
    )


def implicit_network(
    prepared: Prepared, plan: PrecisionPlan, options: BuildOptions, caps: Capabilities
) -> BuildNetwork:
    """The float model, and its ranges or its calibration images beside it."""
    text = prepared.ranges.to_calibration_cache(caps.cache_version)
    ranges = Implicit("cache", text)
    if options.calibration.calibrator == "tensorrt":
        first = prepared.model.graph.input[0].type.tensor_type.shape.dim[0]
        ranges = Implicit(
            cast(OwnCalibrator, options.calibration.rule_name),
            images=prepared.calibrated.paths,
            preprocess=prepared.config.input,
            batch=first.dim_value if first.HasField("dim_value") else (EngineTarget.of(options).batch or (1, 1, 1))[1],
            percentile=options.calibration.percentile,
        )
    return BuildNetwork(
        activations=Requantized(prepared.model),
        precision="int8",
        plan=plan,
        precisions=prepared.graph.quantizable.precisions(plan),
        implicit=ranges,
        cache=text,
        prepared=prepared,
    )


def cached_network(graph: PlacedGraph, path: Path, caps: Capabilities) -> BuildNetwork:
    """The float model, and the ranges of a calibration cache that was made elsewhere for the model as it was.

    Raises:
        CalibrationError: the cache cannot be read, or lacks tensors of the model.
    """
    title = f"the calibration cache '{path}'"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise CalibrationError(f"{title} cannot be read: {error}; give another") from None
    cached = cache.read(text, title, version=caps.cache_version, skip_unusable=True)
    names: dict[str, None] = {}
    for model in (graph.model, graph.source):
        names.update(dict.fromkeys(value.name for value in model.graph.input))
        names.update(dict.fromkeys(name for node in model.graph.node for name in node.output))
    tensors, plan = graph.quantizable.tensors, graph.plan
    scales = cache.matched(cached, names, tensors, where=title)
    text = cache.write({name: scales[name] for name in tensors}, caps.cache_version)
    return BuildNetwork(
        activations=Requantized(graph.model),
        precision="int8",
        plan=plan,
        precisions=graph.quantizable.precisions(plan),
        implicit=Implicit("cache", text),
        cache=text,
    )


@dataclass(frozen=True, eq=False)
class Engine:
    """A built network.

    Attributes:
        audit: what its layers run in; None where no layers were listed.
    """

    network: BuildNetwork
    built: Built
    audit: Audit | None


def best_engine(
    networks: Sequence[BuildNetwork], backend: Backend, target: EngineTarget, timings: Path, progress: Progress = silent
) -> Engine:
    """Builds and audits each of some networks that compute the same, and takes the one estimated to move least.

    Args:
        networks: at least one.
        timings: the file of measured kernel times where the target's options name none; it may be missing.

    Raises:
        BackendError: the backend refused a network or the target.
    """
    caps, engines = backend.capabilities, []
    for network in networks:
        progress(f"building the engine with {caps.name} {caps.version}", 0, 1)
        request = compose(
            network.model, network.precision, network.precisions, target=target, implicit=network.implicit
        )
        built = build_remembering(backend, request, timings=target.options.timing_cache or timings, progress=progress)
        listed = caps.lists_layers and (built.layers or not caps.has_inspector)
        audited = audit(layers_of(built), network.plan, network.model, silu=caps.silu) if listed else None
        engines.append(Engine(network, built, audited))
    # Where no layers are listed there is nothing to choose by, and the backend's first form stands.
    sizes = [(engine.audit.bytes, engine) for engine in engines if len(engines) > 1 and engine.audit is not None]
    return min(sizes, key=lambda pair: pair[0])[1] if sizes else engines[0]


def runs_on(runtime: Runtime, caps: Capabilities, target: EngineTarget) -> Literal["engine", "onnxruntime"]:
    """Whether engines of a backend can be run here, as far as that shows before an engine is built.

    Raises:
        BackendError: an engine is asked for and cannot be run.
    """
    if runtime == "onnxruntime":
        return runtime
    reason = f"{caps.name} makes none"
    if caps.makes_engine:
        wanted = target.sms or caps.default_sms or tuple(device.sm for device in cuda.devices())
        reason = obstacle(EngineFacts.built(caps, wanted, target.plugins))
    if reason and runtime == "engine":
        raise BackendError(f"engines cannot be run here, as {reason}")
    return "onnxruntime" if reason else "engine"


def warn_of_audit(engine: Engine, caps: Capabilities) -> None:
    """Warns of what the audit found, or that there was nothing to audit."""
    if engine.audit is not None:
        for warning in engine.audit.warnings:
            warnings.warn(warning, TrtdetWarning, stacklevel=3)
    elif caps.lists_layers:
        warnings.warn(
            f"{caps.name} {caps.version} built the engine and its inspector gave nothing: it is not audited",
            TrtdetWarning,
            stacklevel=3,
        )
