"""First step of a build: an ONNX model -> the rewritten float model with its Q/DQ placement."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple

import onnx

from trtdet.backends import Backend, Capabilities, EngineTarget, check_compiler
from trtdet.config import Config, NmsMode, SiluForm
from trtdet.errors import BackendError, ConfigError, ModelError, TrtdetWarning
from trtdet.options import BuildOptions, PlanOptions
from trtdet.passes import EmbeddedNms, Options, Rewritten, embedded_nms, load_model, rewrite
from trtdet.passes.exported import images
from trtdet.passes.input_size import with_input_size
from trtdet.passes.nms import refused_parts
from trtdet.passes.opset import HALF_SCALES
from trtdet.passes.plugin_ops import PLUGIN_ACTIVATIONS, plugin_nodes
from trtdet.passes.protobuf import opset_of, sizes_of
from trtdet.quantization import (
    DataFlow,
    OwnScales,
    PrecisionPlan,
    QdqPlacement,
    Quantizable,
    QuantizedInput,
    default_plan,
    place,
    quantizable,
    take_apart,
)

FORMS: tuple[SiluForm, ...] = ("keep", "swish", "plugin")


@dataclass(frozen=True, eq=False)
class PlacedGraph:
    """A rewritten float model; ``source`` is the original model, without the pairs of a quantised one."""

    source: onnx.ModelProto
    passes: Options
    done: Rewritten  # the rewritten model, its configuration, and the result of each pass
    placement: QdqPlacement  # positions of Q/DQ pairs; its plan has all possible convolutions in INT8
    int8_all: bool = False  # use INT8 even where it is not faster
    # The plan that the estimate chose as default, or that of a quantised model; None for the structural rules.
    default: PrecisionPlan | None = None
    nms_reason: str = ""  # effect of CUDA graphs on the NMS mode, or of that mode on CUDA graphs; may be empty
    flow: DataFlow = DataFlow()  # input and output types of the backend's INT8 kernels
    own: OwnScales | None = None  # the pairs of a quantised model; None for a float model

    @property
    def model(self) -> onnx.ModelProto:
        return self.done.model

    @property
    def config(self) -> Config:
        """The configuration, with the thresholds of the model's embedded NMS."""
        return self.done.config

    @property
    def nms_mode(self) -> NmsMode:
        return self.passes.nms

    @cached_property
    def plan(self) -> PrecisionPlan:
        """The default precision of each convolution."""
        if self.default is not None:
            return self.default
        return self.placement.plan if self.int8_all else self.faster

    @cached_property
    def faster(self) -> PrecisionPlan:
        """INT8 only where it may be faster, by the shape of a convolution."""
        return default_plan(self.model, self.placement, fused=bool(self.flow.fused))

    @cached_property
    def quantizable(self) -> Quantizable:
        """Tensors and layers that TensorRT may run in INT8 with implicit quantization."""
        return quantizable(self.model, self.placement.plan)

    @cached_property
    def with_own_activations(self) -> onnx.ModelProto:
        """The model with its original SiLU, HardSwish and opset: every form and backend can use its histograms."""
        passes = self.passes
        if passes.silu == "keep" and (passes.min_opset is None or opset_of(self.source) >= passes.min_opset):
            return self.model
        return rewrite(self.source, replace(passes, silu="keep", min_opset=None)).model


def rewritten(
    source: onnx.ModelProto,
    passes: Options,
    plan: PlanOptions = PlanOptions(),
    quantized: QuantizedInput | None = None,
) -> PlacedGraph:
    """Runs the passes over a model and places its Q/DQ pairs: those of ``quantized``, whose float form ``source`` is,
    or wherever a layer can run in INT8.

    Raises ModelError: the model does not fit the configuration, cannot be rewritten, has no convolutions, or needs a
    later opset for FP8; ConfigError: the backend cannot run the requested NMS. Warns if the plan has FP8 or INT8
    attention, and the model has no matrix product for it.
    """
    result = rewrite(source, passes)
    if quantized is not None:
        placement, own = quantized.placed(result.model)
        return PlacedGraph(source, passes, done=result, placement=placement, default=placement.plan, own=own)
    placement = place(result.model, plan.int8_attention, plan.fp8)
    if not placement.plan.entries:
        raise ModelError("the model has no convolutions, so there is nothing to quantise; is it a detector?")
    if placement.plan.fp8 and (opset := opset_of(result.model)) < HALF_SCALES:
        reasons = "; ".join(result.results["opset"].skipped)
        raise ModelError(
            f"plan.fp8 needs opset {HALF_SCALES}, and the model has opset {opset}{f': {reasons}' * bool(reasons)}",
            "export it with that opset or a later one, or leave plan.fp8 out",
        )
    if plan.int8_attention and not placement.attention:
        warnings.warn(
            "plan.int8_attention changes nothing: the model has no product of two activations that it would quantize",
            TrtdetWarning,
            stacklevel=3,
        )
    if plan.fp8 and not placement.plan.fp8:
        others = 0 if plan.int8_attention else len(place(result.model, attention=True, fp8=True).plan.fp8)
        more = f", and its {others} products of two activations are quantised with plan.int8_attention only"
        warnings.warn(
            f"there is nothing to put into FP8: the model has no products with a matrix of weights{more * bool(others)}"
            "; convolutions stay in INT8",
            TrtdetWarning,
            stacklevel=3,
        )
    return PlacedGraph(source, passes=passes, done=result, placement=placement, int8_all=plan.int8_all)


def host_graph(
    model: Path,
    config: Config,
    silu: SiluForm = "keep",
    caps: Capabilities | None = None,
    plan: PlanOptions = PlanOptions(),
) -> PlacedGraph:
    """Rewrites a float ONNX model for NMS on the host: outputs are decoded boxes and scores, a dynamic batch becomes 1.

    ``caps`` are those of the backend; None for a backend that can run every operator. Raises ModelError, ConfigError:
    see :func:`rewritten`.
    """
    source = load_model(model)
    batch = _batch(source, config.input.name, None)
    # FP16 scales and FP8 came in the same opset.
    oldest = HALF_SCALES if plan.fp8 or (caps is not None and caps.data_flow.half) else None
    passes = Options(config, batch=batch, silu=silu, min_opset=oldest)
    if caps is None:
        return rewritten(source, passes, plan)
    passes = replace(passes, max_opset=caps.max_opset, missing_ops=frozenset(caps.missing_ops))
    graph = rewritten(source, passes, plan)
    return replace(graph, flow=flow_for(graph, caps))


def build_graph(model: Path, config: Config, options: BuildOptions, backend: Backend) -> PlacedGraph:
    """Rewrites an ONNX model for a backend.

    Raises the errors of :func:`rewritten` and :func:`trtdet.quantization.take_apart`, ModelError also if the backend
    cannot build an operator of the model, and ConfigError or BackendError if it lacks the NMS mode or the form of SiLU.
    Warns as :func:`rewritten` and :func:`warn_of_left`, and if the thresholds of the embedded NMS differ from the
    configuration.
    """
    caps, plan, target = backend.capabilities, options.plan, EngineTarget.of(options)
    source = load_model(model, allow_quantized=options.quantized)
    quantized = take_apart(source) if options.quantized else None
    source = source if quantized is None else quantized.model
    if options.input.size is not None:
        source = with_input_size(source, config.input.size, config)
    embedded = embedded_nms(source, config)
    kept = embedded if options.nms.mode == "auto" else None
    wanted = config.with_nms(**kept.thresholds) if kept is not None else config
    mode, nms_reason = suppression(options.nms.mode, caps, embedded, config=wanted)
    explicit = options.int8 and not options.implicit
    passes = Options(
        config=config,
        nms=mode,
        batch=_batch(source, config.input.name, target.batch),
        max_topk=caps.max_topk,
        silu=silu_form(options.silu, target.plugins, caps),
        keep_embedded=kept is not None,
        max_opset=caps.max_opset,
        missing_ops=frozenset(caps.missing_ops),
        min_opset=HALF_SCALES if explicit and (caps.data_flow.half or plan.fp8) else None,
    )
    if kept is not None:
        requested = config.nms.model_dump()
        other = [f"{key} {own}, not {requested[key]}" for key, own in kept.thresholds.items() if own != requested[key]]
        if other:
            warnings.warn(
                f"the thresholds of the model's embedded NMS '{kept.name}' are kept: {'; '.join(other)}; replace them "
                "with --nms",
                TrtdetWarning,
                stacklevel=3,
            )
    graph = rewritten(source, passes, plan=plan if options.int8 else PlanOptions(), quantized=quantized)
    warn_of_left(graph)
    unsupported = caps.unsupported(graph.model)
    if unsupported:
        listed = "; ".join(f"{op}: {reason}" for op, reason in unsupported.items())
        raise ModelError(
            f"the model uses operators that {caps.name} {caps.version} cannot build: {listed}; cut the graph before "
            "them with head.outputs, or choose another --backend"
        )
    return replace(graph, nms_reason=nms_reason, flow=flow_for(graph, caps))


def warn_of_left(graph: PlacedGraph) -> None:
    """Warns of the parts of a two-stage model that are not rewritten."""
    if graph.done.left:
        message = f"not all of the two-stage model is rewritten: {'; '.join(graph.done.left)}"
        warnings.warn(message, TrtdetWarning, stacklevel=3)


class Suppression(NamedTuple):
    """An NMS mode, and why ``auto`` left it to the host, or why it rules out a CUDA graph, if either holds."""

    mode: NmsMode
    reason: str = ""


def suppression(
    requested: NmsMode | Literal["auto"], caps: Capabilities, own: EmbeddedNms | None, config: Config
) -> Suppression:
    """Chooses the NMS mode.

    ``auto`` keeps the kind of the model's embedded NMS if the backend has it. Otherwise it takes the backend's best
    mode that a CUDA graph can contain, or else the host, which also compares rotated boxes: in plain operators that can
    take longer than the network. Raises BackendError: the backend lacks the requested mode; ConfigError: the mode
    cannot take the detector's masks, keypoints or rotated boxes.
    """
    nms = config.nms
    slow = config.head.rotated and nms.suppresses
    if requested != "auto" and (refusal := refused_parts(requested, config)):
        raise ConfigError(refusal)
    allowed = tuple(mode for mode in caps.in_graph_nms if not refused_parts(mode, config))
    if nms.class_agnostic and not caps.nms_across_classes:
        allowed = tuple(mode for mode in allowed if mode != "efficient")
    if not nms.suppresses:  # a plain TopK is enough, and an NMS plugin would be slower
        allowed = tuple(sorted(allowed, key=lambda mode: mode != "native"))
    captured: tuple[NmsMode, ...] = (*(mode for mode in allowed if not caps.uncaptured(mode, nms)), "host")
    best = "host" if slow else captured[0]
    kept = own.kind if own is not None and own.kind in allowed else best
    chosen: NmsMode = kept if requested == "auto" else requested
    if caps.uncaptured(chosen, nms) and chosen in allowed:
        others = " or ".join(captured)
        reason = f"{caps.uncaptured(chosen, nms)}; --nms {others} lets the engine be launched as a CUDA graph"
        return Suppression(chosen, reason)
    if chosen == "host" and requested == "auto" and allowed:
        others = f"with --nms {' or '.join(allowed)}"
        if causes := "; ".join(cause for mode in allowed if (cause := caps.uncaptured(mode, nms))):
            return Suppression(chosen, f"{others} the engine could not be launched as a CUDA graph ({causes})")
        return Suppression(chosen, f"{others} comparing rotated boxes could take longer than the network")
    if chosen == "host" or chosen in allowed:
        return Suppression(chosen)
    subject = f"--nms {requested}"
    if chosen in caps.in_graph_nms:
        subject += " with key 'nms.class_agnostic', which its EfficientNMS ignores"
    raise BackendError(f"{caps.name} {caps.version} cannot take {subject}; allowed: --nms {', '.join(allowed)} or host")


def silu_form(requested: str, plugins: tuple[Path, ...], caps: Capabilities) -> SiluForm:
    """Chooses the form of SiLU; ``auto`` takes the backend's first form whose library is available. Raises
    BackendError: the backend lacks the form, or its plugin library is not given and cannot be compiled here."""
    # onnxruntime needs no library, as the model contains the definitions of the plugin's operators.
    library = bool(plugins) or not caps.makes_engine
    compiled = caps.compiles_plugins and requested == "plugin"
    usable = [form for form in caps.silu if form != "plugin" or library or compiled]
    for form in usable:
        if requested in ("auto", form):
            if form == "plugin" and compiled and not plugins:
                check_compiler()
            return form
    if requested in caps.silu:
        raise BackendError(
            f"--silu plugin with {caps.name} needs the library that has the plugin: give it with --set "
            f"engine.plugins=LIBRARY, or choose --silu {' or '.join(usable)}"
        )
    operator = {"plugin": PLUGIN_ACTIVATIONS[0], "swish": "Swish"}.get(requested, "")
    reason = f": {caps.missing_ops[operator]}" if operator in caps.missing_ops else ""
    raise BackendError(
        f"{caps.name} {caps.version} cannot take --silu {requested}{reason}; allowed: auto, {', '.join(caps.silu)}"
    )


def _batch(model: onnx.ModelProto, name: str | None, batch: tuple[int, int, int] | None) -> int | str | None:
    """The model's new batch: a size, a name for a dynamic batch, or None for no change."""
    if batch is not None:
        return batch[0] if batch[0] == batch[2] else "batch"
    sizes = next((sizes_of(tensor) for tensor in images(model) if name in (None, tensor.name)), ())
    return 1 if sizes[:1] == (0,) else None  # without an input or sizes, the passes report the error


def flow_for(graph: PlacedGraph, caps: Capabilities) -> DataFlow:
    """Input and output types of INT8 kernels, as far as the graph's opset can express them.

    With the plugin the default applies, as its activations read and write INT8.
    """
    if next(plugin_nodes(graph.model.graph), None) is not None:
        return DataFlow()
    flow, min_opset, opset = caps.data_flow, graph.passes.min_opset, opset_of(graph.model)
    if min_opset is None or (caps.max_opset is not None and caps.max_opset < min_opset):
        return replace(flow, half=False)
    if opset >= min_opset:
        return flow
    reasons = "; ".join(graph.done.results["opset"].skipped)
    warnings.warn(
        f"between INT8 kernels {caps.name} {caps.version} is given float32, not FP16, which takes opset {min_opset}: "
        f"{reasons or f'the model has opset {opset}'}",
        TrtdetWarning,
        stacklevel=4,
    )
    return replace(flow, half=False)


def model_bytes(model: onnx.ModelProto) -> bytes:
    """The serialised model; equal models give equal bytes."""
    return model.SerializeToString(deterministic=True)
