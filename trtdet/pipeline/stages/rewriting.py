"""First stage: a float ONNX model -> the graph that every later stage works on, with its Q/DQ placement."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

import onnx

from trtdet.backends import Backend, Capabilities, check_compiler
from trtdet.config import Config, NmsConfig, NmsMode, SiluForm
from trtdet.errors import BackendError, ModelError, TrtdetWarning
from trtdet.passes import EmbeddedNms, Options, PassResult, Rewritten, embedded_nms, load_model, rewrite
from trtdet.passes.input_size import with_input_size
from trtdet.passes.opset import HALF_SCALES
from trtdet.passes.plugin_ops import PLUGIN_ACTIVATIONS, plugin_nodes
from trtdet.pipeline.options import BuildOptions
from trtdet.quantization import DataFlow, PrecisionPlan, QdqPlacement, Quantizable, default_plan, place, quantizable

FORMS: tuple[SiluForm, ...] = ("keep", "swish", "plugin")


@dataclass(frozen=True, eq=False)
class Graph:
    """A float model as the passes leave it.

    Attributes:
        source: the model as it was given.
        passes: what the passes were asked for.
        done: the rewritten model, its configuration, and the result of each pass.
        placement: where Q/DQ pairs go; its plan has every convolution in INT8 that can be.
        int8_all: whether INT8 is also wanted where it makes nothing faster.
        nms_reason: why the suppression is where it is, as far as CUDA graphs decided it or suffer from it.
        flow: how the INT8 kernels of the backend read and write.
    """

    source: onnx.ModelProto
    passes: Options
    done: Rewritten
    placement: QdqPlacement
    int8_all: bool = False
    nms_reason: str = ""
    flow: DataFlow = DataFlow()

    @property
    def model(self) -> onnx.ModelProto:
        """The rewritten model."""
        return self.done.model

    @property
    def config(self) -> Config:
        """The configuration, as the model's embedded NMS left it."""
        return self.done.config

    @property
    def nms_mode(self) -> NmsMode:
        """What does the suppression."""
        return self.passes.nms

    @property
    def silu(self) -> PassResult:
        """The result of the pass that writes SiLU and HardSwish."""
        return self.done.results["silu"]

    @property
    def dynamic(self) -> bool:
        """Whether the batch stays open."""
        return isinstance(self.passes.batch, str)

    @cached_property
    def plan(self) -> PrecisionPlan:
        """What each convolution runs in, as long as nothing else is asked for."""
        return self.placement.plan if self.int8_all else default_plan(self.model, self.placement, self.flow)

    @cached_property
    def quantizable(self) -> Quantizable:
        """What TensorRT may run in INT8 where it quantises by itself."""
        return quantizable(self.model, self.placement.plan)

    @cached_property
    def with_own_activations(self) -> onnx.ModelProto:
        """The model with SiLU, HardSwish and opset as they were: histograms of it serve every form of SiLU and every
        backend."""
        oldest = self.passes.min_opset
        raised = oldest is not None and any(
            entry.domain == "" and entry.version < oldest for entry in self.source.opset_import
        )
        if self.passes.silu == "keep" and not raised:
            return self.model
        return rewrite(self.source, replace(self.passes, silu="keep", min_opset=None)).model


def rewritten(source: onnx.ModelProto, passes: Options, attention: bool = False, fp8: bool = False) -> Graph:
    """Runs the passes over a model and places its Q/DQ pairs.

    Raises:
        ModelError: it does not fit the configuration, cannot be rewritten, has no convolutions, or has an opset without
            FP8 where that is asked for.
        ConfigError: the NMS asked for is beyond the backend.

    Warns:
        TrtdetWarning: FP8 or INT8 attention is asked for, and the model has no product for it.
    """
    done = rewrite(source, passes)
    placement = place(done.model, attention, fp8)
    if not placement.plan.entries:
        raise ModelError("the model has no convolutions, so there is nothing to quantise; is it a detector?")
    if placement.plan.fp8 and (opset := _opset(done.model)) < HALF_SCALES:
        reasons = "; ".join(done.results["opset"].skipped)
        raise ModelError(
            f"--fp8 takes opset {HALF_SCALES}, and the model has opset {opset}{f': {reasons}' * bool(reasons)}",
            "export it with that opset or a later one, or leave --fp8 out",
        )
    if attention and not placement.attention:
        warnings.warn(
            "--int8-attention changes nothing: the model has no product of two activations that is quantised with it",
            TrtdetWarning,
            stacklevel=3,
        )
    if fp8 and not placement.plan.fp8:
        _warn_of_no_fp8(done.model, attention)
    return Graph(source, passes, done, placement)


def _warn_of_no_fp8(model: onnx.ModelProto, attention: bool) -> None:
    others = 0 if attention else len(place(model, attention=True, fp8=True).plan.fp8)
    more = f", and its {others} products of two activations are quantised with --int8-attention only" if others else ""
    warnings.warn(
        f"there is nothing to put into FP8: the model has no products with a matrix of weights{more}; "
        "convolutions stay in INT8",
        TrtdetWarning,
        stacklevel=4,
    )


def host_graph(
    model: Path,
    config: Config,
    silu: SiluForm = "keep",
    caps: Capabilities | None = None,
    attention: bool = False,
    fp8: bool = False,
) -> Graph:
    """A float ONNX model with decoded boxes and scores as outputs and a batch of 1 where it is dynamic.

    Args:
        model: float ONNX model.
        config: its configuration.
        silu: what SiLU is written as.
        caps: of the backend that is to read it; None for a backend that reads everything.
        attention: quantise products of two activations as well.
        fp8: quantise products to FP8 instead of INT8.

    Raises:
        ModelError, ConfigError: as of :func:`rewritten`.
    """
    source = load_model(model)
    passes = Options(
        config, batch=_batch(source, config.input.name, None), silu=silu, min_opset=HALF_SCALES if fp8 else None
    )
    if caps is not None:
        passes = replace(
            passes, max_opset=caps.max_opset, missing_ops=frozenset(caps.missing_ops), min_opset=_min_opset(caps, fp8)
        )
    graph = rewritten(source, passes, attention, fp8)
    return graph if caps is None else replace(graph, flow=_flow(graph, caps))


def warn_of_left(graph: Graph) -> None:
    """Says what of a two-stage model is not rewritten, or left out.

    Warns:
        TrtdetWarning: there is something.
    """
    if graph.done.left:
        message = f"not all of the two-stage model is rewritten: {'; '.join(graph.done.left)}"
        warnings.warn(message, TrtdetWarning, stacklevel=3)


def build_graph(model: Path, config: Config, options: BuildOptions, backend: Backend) -> Graph:
    """A float ONNX model as a backend is to build it.

    Raises:
        ModelError: as of :func:`rewritten`, or the backend cannot build an operator of the model.
        ConfigError, BackendError: the suppression or the form of SiLU is beyond the backend.
    """
    caps = backend.capabilities
    source = load_model(model)
    if options.resize:
        source = with_input_size(source, config.input.size, config)
    own = embedded_nms(source, config)
    kept = own if options.nms == "auto" else None
    nms = config.with_nms(**kept.thresholds).nms if kept is not None else config.nms
    chosen = suppression(options.nms, caps, own, nms)
    passes = Options(
        config,
        chosen.mode,
        _batch(source, config.input.name, options.batch),
        caps.max_topk,
        silu_form(options.silu, options.plugins, caps),
        kept is not None,
        caps.max_opset,
        frozenset(caps.missing_ops),
        _min_opset(caps, options.fp8) if options.precision == "int8" and not options.implicit else None,
    )
    if kept is not None:
        _warn_of_thresholds(kept, config.nms)
    int8 = options.precision == "int8"
    graph = rewritten(source, passes, int8 and options.int8_attention, int8 and options.fp8)
    warn_of_left(graph)
    graph = replace(graph, int8_all=options.int8_all or options.best, nms_reason=chosen.reason, flow=_flow(graph, caps))
    _check_operators(graph.model, backend)
    return graph


@dataclass(frozen=True)
class Suppression:
    """What does the suppression, and what that has to do with CUDA graphs; empty where nothing."""

    mode: NmsMode
    reason: str = ""


def suppression(
    asked: NmsMode | Literal["auto"], caps: Capabilities, own: EmbeddedNms | None, nms: NmsConfig
) -> Suppression:
    """What does the suppression.

    With ``auto`` it is the model's own kind, if it has one; else the backend's best with which the engine can still be
    launched as a CUDA graph, and the host where there is none.

    Raises:
        BackendError: it is beyond the backend.
    """
    allowed = caps.in_graph_nms
    if nms.class_agnostic and not caps.nms_across_classes:
        allowed = tuple(mode for mode in allowed if mode != "efficient")
    if not nms.suppresses:  # the best candidates are a TopK, which a plugin for suppression only makes longer
        allowed = tuple(sorted(allowed, key=lambda mode: mode != "native"))
    captured: tuple[NmsMode, ...] = (*(mode for mode in allowed if not caps.uncaptured(mode, nms)), "host")
    wanted: NmsMode = asked if asked != "auto" else own.kind if own else captured[0]
    if caps.uncaptured(wanted, nms) and wanted in allowed:
        others = " or ".join(captured)
        reason = f"{caps.uncaptured(wanted, nms)}; --nms {others} lets the engine be launched as a CUDA graph"
        return Suppression(wanted, reason)
    if wanted == "host" and asked == "auto" and allowed:
        causes = "; ".join(caps.uncaptured(mode, nms) for mode in allowed)
        reason = f"with --nms {' or '.join(allowed)} the engine could not be launched as a CUDA graph ({causes})"
        return Suppression(wanted, reason)
    if wanted == "host" or wanted in allowed:
        return Suppression(wanted)
    said = f"--nms {asked}" if asked != "auto" or own is None else f"the model's embedded NMS '{own.name}'"
    if wanted in caps.in_graph_nms:
        said += " with key 'nms.class_agnostic', which its EfficientNMS ignores"
    raise BackendError(f"{caps.name} {caps.version} cannot take {said}; allowed: --nms {', '.join(allowed)} or host")


def silu_form(asked: str, plugins: tuple[Path, ...], caps: Capabilities) -> SiluForm:
    """What SiLU is written as; ``auto`` takes the backend's first form that needs no library that was not given.

    Raises:
        BackendError: the backend lacks the form, the plugin library for it was not given, or the plugin cannot be
            compiled here.
    """
    # onnxruntime runs a plugin's operators by their definition, and so needs no library.
    library = bool(plugins) or not caps.makes_engine
    compiled = caps.compiles_plugins and asked == "plugin"
    usable = [form for form in caps.silu if form != "plugin" or library or compiled]
    for form in usable:
        if asked in ("auto", form):
            if form == "plugin" and compiled and not plugins:
                check_compiler()
            return form
    if asked in caps.silu:
        raise BackendError(
            f"--silu plugin with {caps.name} needs the library that has the plugin: give it with --plugin-library "
            f"PATH, or choose --silu {' or '.join(usable)}"
        )
    operator = {"plugin": PLUGIN_ACTIVATIONS[0], "swish": "Swish"}.get(asked, "")
    reason = f": {caps.missing_ops[operator]}" if operator in caps.missing_ops else ""
    raise BackendError(
        f"{caps.name} {caps.version} cannot take --silu {asked}{reason}; allowed: auto, {', '.join(caps.silu)}"
    )


def _warn_of_thresholds(own: EmbeddedNms, nms: NmsConfig) -> None:
    asked = nms.model_dump()
    other = [f"{key} {value}, not {asked[key]}" for key, value in own.thresholds.items() if value != asked[key]]
    if other:
        warnings.warn(
            f"the model's embedded NMS '{own.name}' is left as it is: {'; '.join(other)}; replace it with --nms",
            TrtdetWarning,
            stacklevel=4,
        )


def _batch(model: onnx.ModelProto, name: str | None, asked: tuple[int, int, int] | None) -> int | str | None:
    """The batch that the model is to have: a size, a name for a dynamic batch, None to keep it as it is."""
    if asked is not None:
        return asked[0] if asked[0] == asked[2] else "batch"
    initializers = {tensor.name for tensor in model.graph.initializer}
    inputs = [tensor for tensor in model.graph.input if tensor.name not in initializers and name in (None, tensor.name)]
    if not inputs or not inputs[0].type.tensor_type.shape.dim:
        return None  # the passes say what is wrong with it
    return None if inputs[0].type.tensor_type.shape.dim[0].dim_value else 1


def _min_opset(caps: Capabilities, fp8: bool = False) -> int | None:
    """The oldest opset of a model with Q/DQ pairs; pairs in FP8 came with those whose scales are FP16."""
    return HALF_SCALES if caps.data_flow.half or fp8 else None


def _opset(model: onnx.ModelProto) -> int:
    return max(entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx"))


def _flow(graph: Graph, caps: Capabilities) -> DataFlow:
    """How INT8 kernels read and write, as far as the graph's opset can express it.

    Between INT8 convolutions a plugin reads and writes INT8 by itself, and takes channel maps over.
    """
    if next(plugin_nodes(graph.model.graph), None) is not None:
        return DataFlow()
    flow, wanted = caps.data_flow, graph.passes.min_opset
    if wanted is None or (caps.max_opset is not None and caps.max_opset < wanted):
        return replace(flow, half=False)
    opset = _opset(graph.model)
    if opset >= wanted:
        return flow
    reasons = "; ".join(graph.done.results["opset"].skipped)
    warnings.warn(
        f"between INT8 kernels {caps.name} {caps.version} is given float32, not FP16, which takes opset {wanted}: "
        f"{reasons or f'the model has opset {opset}'}",
        TrtdetWarning,
        stacklevel=4,
    )
    return replace(flow, half=False)


def _check_operators(model: onnx.ModelProto, backend: Backend) -> None:
    unsupported = backend.unsupported(model)
    if unsupported:
        caps = backend.capabilities
        listed = "; ".join(f"{op}: {reason}" for op, reason in unsupported.items())
        raise ModelError(
            f"the model uses operators that {caps.name} {caps.version} cannot build: {listed}; cut the graph before "
            "them with head.outputs, or choose another --backend"
        )
