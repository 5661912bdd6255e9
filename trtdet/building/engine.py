"""Fifth step of a build: the plan -> the builder's input -> an engine and its audit."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, cast

import onnx

from trtdet.audit import Audit, audit, layers_of
from trtdet.audit.traffic import Flow
from trtdet.backends import (
    Backend,
    Built,
    Capabilities,
    EngineFacts,
    EngineRunner,
    Implicit,
    OwnCalibrator,
    build_remembering,
    cuda,
    obstacle,
    open_engine,
    place_on_dla,
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
from trtdet.quantization import (
    Cause,
    DataFlow,
    Entry,
    NetworkForm,
    Precision,
    PrecisionPlan,
    Requantized,
    WeightForm,
    to_half,
)
from trtdet.runtime.detector import Runtime

OLDEST = 8600
"""TensorRT version (8.6.0) in a calibration cache if the engine's own library reads no caches."""


@dataclass(frozen=True, eq=False)
class BuildNetwork:
    """Input of the builder."""

    activations: Requantized  # the model, and how many plugin activations read and write INT8
    precision: Precision  # the lowest precision that the engine may use
    plan: PrecisionPlan
    precisions: Mapping[str, str] = field(default_factory=dict)
    """``fp16`` or ``fp32`` by name of each node that stays out of INT8, for weakly typed networks."""
    implicit: Implicit | None = None  # ranges of a model without Q/DQ nodes
    cache: str = ""  # the ranges as text of a calibration cache
    prepared: Prepared | None = None  # None for float networks and for the user's calibration cache
    form: WeightForm | None = None  # of the INT8 weight scales; None without Q/DQ nodes

    @property
    def model(self) -> onnx.ModelProto:
        """With Q/DQ nodes and casts; a float model for implicit quantization."""
        return self.activations.model


def float_plan(plan: PrecisionPlan, precision: Precision) -> PrecisionPlan:
    """Plan with all convolutions in one precision; box decoding stays in FP32."""
    entries = {}
    for name, entry in plan.entries.items():
        stays = precision == "fp16" and entry.cause is Cause.DECODES_BOXES
        entries[name] = entry if stays else Entry(precision, f"--{precision}", Cause.REQUESTED)
    return PrecisionPlan(entries)


def float_network(
    graph: PlacedGraph, precision: Precision, selected: Selection = Selection(), progress: Progress = silent
) -> BuildNetwork:
    """The model in ``fp16`` or ``fp32``; values are checked for FP16 overflow on the selected images, if any."""
    plan = float_plan(graph.placement.plan, precision)
    parts = HalfParts(plan.names("fp16"))
    if precision == "fp16" and selected.paths:
        magnitudes = Magnitudes(graph, selected)
        plan = within_half(graph.model, plan, DataFlow(), magnitudes=magnitudes, progress=progress)
        parts = half_parts(graph.model, plan, DataFlow(), magnitudes=magnitudes)
    half = to_half(graph.model, parts.names, parts.left)
    precisions = graph.quantizable.precisions(plan) if precision == "fp16" else {}
    return BuildNetwork(Requantized(half), precision=precision, plan=plan, precisions=precisions)


def explicit_network(
    prepared: Prepared,
    plan: PrecisionPlan,
    caps: Capabilities,
    *,
    form: NetworkForm = NetworkForm(),
    weights: WeightForm | None = None,
) -> BuildNetwork:
    """The model with Q/DQ nodes; ``weights`` is the form of weight scales, the backend's first if None."""
    plan = form.planned(prepared.model, plan, prepared.graph.placement.plan)
    weights = weights or prepared.graph.flow.weights[0]
    return BuildNetwork(
        prepared.explicit(plan, weights, form),
        precision="int8",
        plan=plan,
        precisions=prepared.graph.quantizable.precisions(plan),
        cache=prepared.ranges.to_calibration_cache(caps.cache_version or OLDEST),
        prepared=prepared,
        form=weights,
    )


def explicit_networks(prepared: Prepared, plan: PrecisionPlan, caps: Capabilities) -> tuple[BuildNetwork, ...]:
    """The model with Q/DQ nodes, once for each form of weight scales that the backend may run fastest."""
    forms = prepared.graph.flow.weights
    return tuple(explicit_network(prepared, plan, caps, weights=weights) for weights in forms)


def implicit_network(
    prepared: Prepared, plan: PrecisionPlan, options: BuildOptions, caps: Capabilities
) -> BuildNetwork:
    """The float model with separate ranges, or with calibration images for TensorRT's own calibrator."""
    text = prepared.ranges.to_calibration_cache(caps.cache_version)
    ranges = Implicit("cache", text)
    if options.calibration.calibrator == "tensorrt":
        first = prepared.model.graph.input[0].type.tensor_type.shape.dim[0]
        ranges = Implicit(
            cast(OwnCalibrator, options.calibration.rule_name),
            images=prepared.calibrated.paths,
            preprocess=prepared.graph.config.input,
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
    """The float model with the ranges of a calibration cache, which was made from the original model. Raises
    CalibrationError: the cache cannot be read, or lacks tensors of the model."""
    title = f"the calibration cache '{path}'"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise CalibrationError(f"{title} cannot be read: {error}; give another") from None
    cached = cache.read(text, title, version=caps.cache_version, skip_unusable=True)
    names: dict[str, None] = {}
    for each in (graph.model.graph, graph.source.graph):
        outputs = (name for node in each.node for name in node.output)
        names.update(dict.fromkeys((*(value.name for value in each.input), *outputs)))
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
    """A built network; ``audit`` is None if the backend lists no layers."""

    network: BuildNetwork
    built: Built
    audit: Audit | None

    @property
    def flow(self) -> Flow | None:
        """The layers with the model behind them; None if the backend lists none."""
        return None if self.audit is None else Flow(self.audit.layers, self.network.plan, self.network.model)

    def opened(self, caps: Capabilities, plugins: tuple[Path, ...] = ()) -> EngineRunner:
        """The engine on a GPU of this machine; ``caps`` are those of its backend. Raises BackendError: it cannot run
        here."""
        return open_engine(self.built.engine, EngineFacts.built(caps, self.built.sms, plugins))


def best_engine(
    networks: Sequence[BuildNetwork], backend: Backend, target: EngineTarget, timings: Path, progress: Progress = silent
) -> Engine:
    """Builds and audits equivalent networks, at least one; returns the engine that moves the fewest bytes by estimate.

    ``timings`` is the timing cache if the target's options name none; the file may be missing. Raises BackendError: the
    backend refused a network or the target.
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
    # Without listed layers sizes are unknown, so the backend's first form is used.
    sizes = [(engine.audit.bytes, engine) for engine in engines if len(engines) > 1 and engine.audit is not None]
    return min(sizes, key=lambda pair: pair[0])[1] if sizes else engines[0]


def runs_on(runtime: Runtime, caps: Capabilities, target: EngineTarget) -> Literal["engine", "onnxruntime"]:
    """Whether this machine can run engines of a backend, as far as this is known before a build. Raises BackendError:
    ``runtime`` is ``engine``, and engines cannot run here."""
    if runtime == "onnxruntime":
        return runtime
    reason = f"{caps.name} makes none"
    if caps.makes_engine:
        sms = target.sms or caps.default_sms or tuple(device.sm for device in cuda.devices())
        reason = obstacle(EngineFacts.built(caps, sms, target.plugins))
    if reason and runtime == "engine":
        raise BackendError(f"engines cannot be run here, as {reason}")
    return "onnxruntime" if reason else "engine"


def shipped_engine(
    networks: Sequence[BuildNetwork], backend: Backend, target: EngineTarget, timings: Path, progress: Progress = silent
) -> Engine:
    """As :func:`best_engine`. Warns of layers that the DLA leaves to the GPU, and of what the audit finds or lacks."""
    if target.options.dla is not None:
        in_float32 = {name for name, precision in networks[0].precisions.items() if precision == "fp32"}
        placement = place_on_dla(networks[0].model, in_float32)
        if placement.on_gpu:
            warnings.warn(str(placement), TrtdetWarning, stacklevel=3)
    engine, caps = best_engine(networks, backend, target, timings=timings, progress=progress), backend.capabilities
    findings = () if engine.audit is None else engine.audit.warnings
    if engine.audit is None and caps.lists_layers:
        findings = (f"{caps.name} {caps.version} built the engine and its inspector gave nothing: it is not audited",)
    for warning in findings:
        warnings.warn(warning, TrtdetWarning, stacklevel=3)
    return engine
