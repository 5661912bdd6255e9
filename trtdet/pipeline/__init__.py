"""From a float model to a bundle: rewrite, calibrate, quantise, build, audit, write. What is done already is kept."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal, cast, get_args

import numpy as np
import onnx

from trtdet import __version__
from trtdet.audit import Audit, audit, layers_of
from trtdet.backends import (
    Backend,
    BuildRequest,
    Built,
    Capabilities,
    EngineOptions,
    Implicit,
    OnnxRunner,
    OwnCalibrator,
    build_remembering,
    choose,
)
from trtdet.bundle import (
    AuditPart,
    BackendPart,
    Bundle,
    BundleWriter,
    CountsPart,
    FloatConvPart,
    ImagesPart,
    InputPart,
    ModelPart,
    NmsPart,
    OutputPart,
    PluginPart,
    QuantizationPart,
    ShapePart,
    SiluPart,
)
from trtdet.calibration import RULES, Collection, Ranges, cache, collect, collection_key, expose
from trtdet.config import Config, InputConfig, NmsConfig, NmsMode, SiluForm
from trtdet.data import CocoDataset, ImageStream, content_hash, evenly, find_images
from trtdet.errors import BackendError, BundleError, CalibrationError, ConfigError, ModelError, TrtdetWarning
from trtdet.evaluation.comparison import compare
from trtdet.evaluation.scoring import Evaluation, evaluate
from trtdet.files import sha256_file
from trtdet.mixed_precision.planning import (
    Score,
    TradeOff,
    keeping,
    most_sensitive,
    named,
    reasons,
    smallest,
    within_budget,
)
from trtdet.mixed_precision.ranking import DEPTHWISE, Method, Sensitivity, Subject, multiply_adds, rank, subject_key
from trtdet.passes import EmbeddedNms, Options, PassResult, Rewritten, decoded, embedded_nms, load_model, rewrite
from trtdet.passes.plugin_ops import ACTIVATIONS
from trtdet.progress import Progress, silent
from trtdet.quantization import (
    CORRECTIONS,
    LARGEST,
    Cause,
    Corrected,
    Corrections,
    Entry,
    Precision,
    PrecisionPlan,
    QdqPlacement,
    Quantizable,
    Requantized,
    Sources,
    correct,
    insert_qdq,
    lint,
    place,
    quantizable,
    reach,
    region_of,
    requantize,
    to_half,
)
from trtdet.runtime.detector import Detector

HISTOGRAMS = "histograms.npz"
RANKING = "sensitivity.json"
TRADE_OFF = "tradeoff.json"
RANKED_IMAGES = 32
DEFAULT_IMAGES = 128
OLDEST = 8600
"""The TensorRT that a calibration cache is written for where the engine's own library reads none: 8.6.0."""
FORMS: tuple[SiluForm, ...] = ("keep", "swish", "plugin")
AUTO = "auto"
"""The rule that takes, tensor by tensor, the threshold of least error on held-back images."""


@dataclass(frozen=True)
class CalibrationOptions:
    """Where the ranges come from.

    Attributes:
        rule: ``minmax``, ``entropy``, ``percentile``, ``mse``, or ``auto`` for the best of them for each tensor.
        percentile: in percent, for the rule of that name.
        images: a folder of images, or a list of file names (``.txt``).
        root: the folder that a list's names are relative to; None for the list's own folder.
        num_images: use so many, evenly spaced over the sorted names; None for at most 128.
        histograms: start from this collection instead of running the images.
    """

    rule: str = "percentile"
    percentile: float = 99.99
    images: Path | None = None
    root: Path | None = None
    num_images: int | None = None
    histograms: Path | None = None


@dataclass(frozen=True)
class KeepOptions:
    """Which convolutions an INT8 bundle keeps in FP16: by one of ``keep``, ``budget`` and ``max_map_drop``, or none.

    Attributes:
        keep: a number takes the most sensitive ones; a path an edited ``plan.json``; names are taken as they are,
            ``depthwise`` standing for all depthwise convolutions.
        budget: the most sensitive ones for this share of the multiply-adds, 0..1.
        max_map_drop: the smallest set whose measured loss is within so many mAP points (hundredths).
        images: annotated images, for ``max_map_drop``.
        annotations: their COCO file.
        num_images: calibration images that the ranking is measured on.
        ray: None, ``local`` or the address of a Ray cluster to rank on.
    """

    keep: int | Path | tuple[str, ...] | None = None
    budget: float | None = None
    max_map_drop: float | None = None
    images: Path | None = None
    annotations: Path | None = None
    num_images: int = RANKED_IMAGES
    ray: str | None = None

    @property
    def ranked(self) -> bool:
        """Whether it takes a ranking."""
        return isinstance(self.keep, int) or self.budget is not None or self.max_map_drop is not None


@dataclass(frozen=True)
class BuildOptions:
    """How a bundle is built.

    Attributes:
        precision: ``int8`` quantises every convolution that can be; ``fp16`` and ``fp32`` build the float model.
        calibration: used for ``int8``.
        correct: the corrections that may be used for ``int8``, see :mod:`trtdet.quantization.corrections`; empty for
            the textbook form.
        nms: ``native``, ``onnx`` and ``efficient`` put the suppression into the graph, see :mod:`trtdet.passes.nms`;
            ``host`` leaves it out; ``auto`` leaves a model's own as it is and else takes what the backend does best.
        backend: ``auto``, ``tensorrt``, ``tensorrt-rtx`` or ``onnxruntime``.
        sms: compute capabilities to build for, such as 86; empty for the backend's default.
        batch: (min, opt, max) for a model with a dynamic batch; None freezes it to 1.
        keep: what stays in FP16 with ``int8``.
        silu: what SiLU and HardSwish are written as, see :class:`trtdet.passes.Options`; ``auto`` asks the backend.
        plugins: libraries with the plugins, for a backend that loads them; they are copied into the bundle.
        quantization: ``explicit`` writes Q/DQ nodes into the model, for every backend; ``implicit`` leaves a float
            model and gives TensorRT up to 10 a calibrator.
        calibrator: for ``implicit``, who chooses the ranges: ``trtdet``, handed over as a calibration cache, or
            ``tensorrt``, by its own calibrator of the rule's name.
        cache: for ``implicit``, a calibration cache that is there already.
        engine: what else the builder is told.
        timing_cache: the file that keeps what TensorRT learns about the device's kernels; None for one beside the
            bundle. It is read and written where engines are timed on the device.
    """

    precision: Precision = "int8"
    calibration: CalibrationOptions = CalibrationOptions()
    correct: tuple[str, ...] = CORRECTIONS
    nms: NmsMode | Literal["auto"] = "auto"
    backend: str = "auto"
    sms: tuple[int, ...] = ()
    batch: tuple[int, int, int] | None = None
    keep: KeepOptions = KeepOptions()
    silu: SiluForm | Literal["auto"] = "auto"
    plugins: tuple[Path, ...] = ()
    quantization: Literal["explicit", "implicit"] = "explicit"
    calibrator: Literal["trtdet", "tensorrt"] = "trtdet"
    cache: Path | None = None
    engine: EngineOptions = EngineOptions()
    timing_cache: Path | None = None


@dataclass(frozen=True)
class SensitivityOptions:
    """How convolutions are ranked.

    Attributes:
        calibration: images and rule of the ranges.
        correct: the corrections, see :class:`BuildOptions`.
        num_images: images that are measured on: so many of the calibration images, or of the annotated ones.
        method: ``fast`` or ``reference``, see :mod:`trtdet.mixed_precision.ranking`.
        base: ``fp32``: each convolution alone in INT8; ``int8``: all but each.
        images: annotated images, to measure mAP as well.
        annotations: their COCO file.
        ray: None, ``local`` or the address of a Ray cluster.
    """

    calibration: CalibrationOptions = CalibrationOptions()
    correct: tuple[str, ...] = CORRECTIONS
    num_images: int = RANKED_IMAGES
    method: Literal["fast", "reference"] = "fast"
    base: Literal["fp32", "int8"] = "fp32"
    images: Path | None = None
    annotations: Path | None = None
    ray: str | None = None


@dataclass(frozen=True)
class Calibrated:
    """A collection, the ranges chosen from it, and whether the images had to be run."""

    collection: Collection
    ranges: Ranges
    reused: bool


@dataclass(frozen=True)
class BuildResult:
    """A finished bundle.

    Attributes:
        bundle: where it stands.
        audit: of its engine; None where no layers were listed, or it was there already.
        up_to_date: it was there already.
        trade_off: what was tried for ``max_map_drop``.
    """

    bundle: Bundle
    audit: Audit | None
    up_to_date: bool
    trade_off: TradeOff | None = None


def calibrate(
    model: Path,
    config: Config,
    options: CalibrationOptions,
    progress: Progress = silent,
    quantization: Literal["explicit", "implicit"] = "explicit",
) -> Calibrated:
    """Runs calibration images through a model and chooses the range of every activation that INT8 needs.

    Args:
        model: float ONNX model.
        config: its configuration.
        options: images and rule.
        progress: told of every image.
        quantization: ``explicit`` for what Q/DQ nodes read; ``implicit`` for every tensor that TensorRT may run in
            INT8 by itself, about four times as many.

    Raises:
        ModelError, DataError, CalibrationError, ConfigError: see the messages; nothing has been written.
    """
    if options.images is None and options.histograms is None:
        raise ConfigError("calibration needs images: a folder or a list of file names with --images")
    _check_images(options, ())
    done = rewritten(model, config)
    tensors = quantizable(done.model, _placement(done.model).plan).tensors if quantization == "implicit" else None
    prepared = prepare(model, done.config, options, (), graph=done.model, tensors=tensors, progress=progress)
    return replace(prepared.calibrated, ranges=prepared.ranges)


def sensitivity(
    model: Path, config: Config, options: SensitivityOptions, rows: Path | None = None, progress: Progress = silent
) -> Sensitivity:
    """Ranks the convolutions of a model by what INT8 costs at each.

    Args:
        model: float ONNX model.
        config: its configuration.
        options: calibration, corrections and method.
        rows: a file that every finished row is appended to; one that is there is gone on with.
        progress: told of every image and row.

    Raises:
        ModelError, DataError, CalibrationError, ConfigError, BackendError: see the messages.
    """
    _check_sources(options.calibration, options.correct)
    _check_pair(options.images, options.annotations)
    prepared = prepare(model, config, options.calibration, options.correct, progress=progress)
    dataset = None
    if options.images is not None and options.annotations is not None:
        dataset = CocoDataset.load(options.annotations, options.images, config.classes).first(options.num_images)
    method = Method(options.method, options.base, dataset, config.nms)
    return rank(prepared.subject(options.num_images, dataset), method, rows, options.ray, progress)


@dataclass(frozen=True, eq=False)
class Prepared:
    """A model with all that INT8 needs to be known of it, before it is decided what each convolution runs in.

    Attributes:
        model: rewritten float model.
        config: its configuration.
        where: what does the suppression.
        placement: where Q/DQ pairs go; its plan has every convolution in INT8 that can be.
        paths: calibration images that could be read.
        calibrated: the collection, and the ranges of the rule that was named.
        ranges: those that are written; with ``auto`` the best of each tensor.
        corrections: what was kept.
        plan: the placement's, with the corrections of each convolution.
        summary: one sentence for each kind of correction.
    """

    model: onnx.ModelProto
    config: Config
    where: NmsMode
    placement: QdqPlacement
    paths: tuple[Path, ...]
    calibrated: Calibrated
    ranges: Ranges
    corrections: Corrections
    plan: PrecisionPlan
    summary: tuple[str, ...]
    _largest: dict[str, float] = field(default_factory=dict)

    def explicit(self, plan: PrecisionPlan) -> Requantized:
        """The Q/DQ model of a plan, checked for everything that would make INT8 run in float.

        Raises:
            ConfigError: the plan does not fit the model.
        """
        explicit = insert_qdq(self.model, self.placement.following(plan), self.ranges, self.corrections)
        made = requantize(to_half(explicit, plan.names("fp16")), self.ranges.inputs)
        findings = lint(made.model)
        if findings:
            raise ModelError(f"the INT8 graph would lose INT8 in {len(findings)} places, the first: {findings[0]}")
        return made

    def subject(self, count: int, dataset: CocoDataset | None = None) -> Subject:
        """What is ranked, on so many of the calibration images or on annotated ones."""
        paths = self.paths if dataset is None else tuple(image.path for image in dataset.images)
        if count < 1:
            raise ConfigError(f"a ranking needs at least 1 image, got {count}")
        if dataset is None:
            paths = evenly(paths, count)
        return Subject(
            self.model,
            self.placement,
            self.ranges,
            self.corrections,
            decoded(self.where, self.config),
            paths,
            content_hash(paths),
            self.config.input,
        )

    def checked(self, plan: PrecisionPlan) -> PrecisionPlan:
        """The plan, with FP32 for what would overflow FP16 on the calibration images; every such case is warned of."""
        names = plan.names("fp16")
        reached = self._reached(names)
        over = {name: value for name, value in reached.items() if value > LARGEST}
        weights = {one.name: one for one in self.model.graph.initializer}
        nodes = {node.name: node for node in self.model.graph.node}
        entries = dict(plan.entries)
        for name in names:
            heaviest = float(np.abs(onnx.numpy_helper.to_array(weights[nodes[name].input[1]])).max(initial=0))
            wrong = [(one, over[one]) for one in region_of(self.model, (name,)) if one in over] if over else []
            if heaviest > LARGEST:
                wrong.append(("its weights", heaviest))
            if wrong:
                what, value = max(wrong, key=lambda one: one[1])
                reason = f"FP16 would overflow: '{what}' reaches {value:.3g}, over {LARGEST:g}"
                entries[name] = Entry("fp32", reason, Cause.FP16_OVERFLOW)
                warnings.warn(f"'{name}' stays in FP32: {entries[name].reason}", TrtdetWarning, stacklevel=3)
        return PrecisionPlan(entries)

    def _reached(self, names: tuple[str, ...]) -> dict[str, float]:
        """The largest magnitude of every tensor that would be FP16, from the histograms or from one more pass."""
        seen = {name: one.amax for name, one in self.calibrated.collection.histograms.items()}
        tensors = region_of(self.model, names) if names else ()
        source = self.model.graph.input[0].name
        unknown = [name for name in tensors if name not in seen and name not in self._largest and name != source]
        if unknown and self.paths:
            runner = OnnxRunner(expose(self.model, unknown))
            for batch in ImageStream(self.paths, self.config.input, batch_size=runner.batch or 1):
                for name, value in runner(batch.images).items():
                    found = float(np.abs(value).max(initial=0))
                    self._largest[name] = max(self._largest.get(name, 0.0), found)
        elif unknown:
            warnings.warn(
                f"without images {len(unknown)} tensors that run in FP16 cannot be checked for overflow; give --images",
                TrtdetWarning,
                stacklevel=4,
            )
        known = {**seen, **self._largest}
        return {name: known[name] for name in tensors if name in known}


def rewritten(model: Path, config: Config, silu: SiluForm = "keep", caps: Capabilities | None = None) -> Rewritten:
    """A float ONNX model as the passes leave it, with decoded boxes and scores and a batch of 1 where it is dynamic.

    Args:
        model: float ONNX model.
        config: its configuration.
        silu: what SiLU is written as.
        caps: of the backend that is to read it; None for one that reads everything.
    """
    source = load_model(model)
    options = Options(config, batch=_batch(source, config.input.name, None), silu=silu)
    if caps is not None:
        options = replace(options, max_opset=caps.max_opset, missing_ops=frozenset(caps.missing_ops))
    return rewrite(source, options)


def prepare(
    model: Path,
    config: Config,
    calibration: CalibrationOptions,
    correct: tuple[str, ...],
    *,
    where: NmsMode = "host",
    graph: onnx.ModelProto | None = None,
    counted: onnx.ModelProto | None = None,
    tensors: tuple[str, ...] | None = None,
    selected: Selection | None = None,
    previous: Bundle | None = None,
    progress: Progress = silent,
) -> Prepared:
    """Rewrites, calibrates and corrects.

    Args:
        model: float ONNX model.
        config: its configuration.
        calibration: images and rule.
        correct: the corrections that may be used; empty for the textbook form.
        where: what does the suppression.
        graph: the model as it is rewritten, where that is done already; the configuration is then that of the result.
        counted: the same with every activation function as the model has it, where ``graph`` has others: histograms
            are collected from this one, so that they serve every ``--silu``.
        tensors: what gets a range; None for what the Q/DQ pairs need.
        selected: the images, where they are chosen already.
        previous: a bundle that may lend its histograms.
        progress: told of every image.
    """
    if graph is None:
        fresh = rewritten(model, config)
        graph, config = fresh.model, fresh.config
    placement = _placement(graph)
    selected = selected or select_images(calibration)
    tensors = placement.activations if tensors is None else tensors
    calibrated = _calibrated(counted or graph, tensors, config, selected, calibration, previous, progress)
    # Unreadable images were named when they were met first.
    skipped = set(calibrated.collection.skipped)
    paths = tuple(path for path in selected.paths if path.name not in skipped)
    inputs = reach(graph, paths, config.input, OnnxRunner, progress) if paths else {}
    calibrated = replace(calibrated, ranges=replace(calibrated.ranges, inputs=inputs))
    ranges, corrections, plan, summary = calibrated.ranges, Corrections(), placement.plan, tuple[str, ...]()
    if correct or calibration.rule == AUTO:
        done = _corrected(graph, placement, config, where, paths, calibration, correct, calibrated, progress)
        ranges, corrections, plan, summary = done.ranges, done.corrections, done.plan, done.summary
    return Prepared(graph, config, where, placement, paths, calibrated, ranges, corrections, plan, summary)


def build(
    model: Path,
    config: Config,
    output: Path,
    options: BuildOptions = BuildOptions(),
    progress: Progress = silent,
) -> BuildResult:
    """Builds a bundle from a float ONNX model.

    A bundle that stands at ``output`` and was made from the same model, configuration, images and options is kept as
    it is; one that differs only in what comes after the histograms lends them.

    Args:
        model: float ONNX model.
        config: its configuration, NMS thresholds included.
        output: the bundle's folder.
        options: precision, calibration, backend.
        progress: told of every image and every stage.

    Raises:
        TrtdetError: of the kind that says where it went wrong; what stood at ``output`` is untouched.
    """
    backend = choose(options.backend)
    caps = backend.capabilities
    _check(options, caps)
    progress("rewriting the graph", 0, 1)
    source = load_model(model)
    own = embedded_nms(source, config)
    where = suppression(options.nms, caps, own, config.nms.class_agnostic)
    kept = own if options.nms == "auto" else None
    if kept is not None:
        _warn_of(kept, config.nms)
    batch = _batch(source, config.input.name, options.batch)
    implicit = options.quantization == "implicit"
    silu = silu_form(options.silu, options.plugins, caps)
    plugins = plugin_parts(options.plugins, caps, options.engine.embed_plugins)
    missing = frozenset(caps.missing_ops)
    passed = Options(config, where, batch, caps.max_topk, silu, kept is not None, caps.max_opset, missing)
    done = rewrite(source, passed)
    graph, config = done.model, done.config
    _check_operators(graph, backend)
    placement = _placement(graph)
    part = quantizable(graph, placement.plan)
    selected = select_images(options.calibration) if options.precision == "int8" and not options.cache else _NOTHING
    content = _content_hash(graph, config, options, caps, selected, plugins)
    previous = _previous(output)
    if previous is not None and previous.manifest.content_hash == content:
        return BuildResult(previous, None, True)

    # Opened before the work is done: a place that cannot be written is found out now, not after it.
    with BundleWriter(output) as writer:
        if options.cache is not None:
            network = _given(source, graph, placement.plan, part, options.cache, caps)
        elif options.precision == "int8":
            counted = graph if silu == "keep" else rewrite(source, replace(passed, silu="keep")).model
            prepared = prepare(
                model,
                config,
                options.calibration,
                () if implicit else options.correct,
                where=where,
                graph=graph,
                counted=counted,
                tensors=part.tensors if implicit else None,
                selected=selected,
                previous=previous,
                progress=progress,
            )
            planned = choose_plan(
                prepared, options.keep, partial(_ranking, prepared, options.keep, previous, progress), progress
            )
            if implicit:
                network = _implicit(prepared, planned, part, options, caps)
            else:
                network = _explicit(prepared, planned, part, caps)
        else:
            plan = float_plan(placement.plan, options.precision)
            half = to_half(graph, plan.names("fp16"))
            told = part.precisions(plan) if options.precision == "fp16" else {}
            network = _Network(Requantized(half), plan, told)
        progress(f"building the engine with {caps.name} {caps.version}", 0, 1)
        built = build_remembering(
            backend,
            BuildRequest(
                network.model,
                options.sms,
                options.batch if isinstance(batch, str) else None,
                network.precisions,
                options.plugins,
                options.precision,
                network.implicit,
                options.engine,
            ),
            options.timing_cache or timing_cache_of(output),
            progress,
        )
        found = _audited(built, network.plan, network.model, caps) if caps.lists_layers else None
        if built.engine:
            writer.add("model.engine", built.engine)
        for path in options.plugins:
            writer.add(path.name, path.read_bytes())
        writer.add("float.onnx" if implicit else f"{options.precision}.onnx", _bytes(network.model))
        writer.add("plan.json", network.plan.to_json().encode())
        if found is not None:
            writer.add("audit.json", found.to_json().encode())
        if network.cache or built.calibration_cache:
            writer.add("calibration.cache", (built.calibration_cache or network.cache).encode())
        if network.prepared is not None:
            writer.add("ranges.json", network.prepared.ranges.to_json().encode())
            writer.add(HISTOGRAMS, network.prepared.calibrated.collection.to_bytes())
        if network.ranking is not None:
            writer.add(RANKING, network.ranking.to_json().encode())
        if network.trade_off is not None:
            writer.add(TRADE_OFF, network.trade_off.to_json().encode())
        fields = {
            "trtdet_version": __version__,
            "model": ModelPart(sha256=sha256_file(model), name=config.name, classes=config.classes),
            "input": _input_part(network.model, config.input, options.batch),
            "outputs": _output_parts(network.model),
            "nms": NmsPart(
                where=where,
                scores="logits" if where == "host" and config.suppresses_logits else "probabilities",
                own=kept is not None,
                **config.nms.model_dump(),
            ),
            "backend": BackendPart(
                name=caps.name,
                version=caps.version,
                sms=built.sms,
                plugins=plugins,
                version_compatible=options.engine.version_compatible,
                hardware_compatible=options.engine.hardware_compatible,
            ),
            "quantization": _quantization_part(network.prepared, options),
            "precision": CountsPart(**network.plan.counts()),
            "audit": _audit_part(found),
            "command": _command(options, config),
            "silu": _silu_part(options.silu, silu, done.results["silu"], network.activations),
            "content_hash": content,
        }
        return BuildResult(writer.commit(fields), found, False, network.trade_off)


def timing_cache_of(bundle: Path) -> Path:
    """Where what TensorRT learnt about the device's kernels is kept, unless it is said: beside the bundle."""
    return bundle.with_name(f"{bundle.name}.timing-cache")


@dataclass(frozen=True)
class _Network:
    """What is handed to the builder, and how it came about.

    Attributes:
        activations: what became of the plugin's activations, in the model that is handed over.
        plan: what each convolution is to run in.
        precisions: by name of the nodes that are to stay out of INT8, for a weakly typed network.
        implicit: the ranges, where the model has no Q/DQ nodes.
        cache: the ranges as a calibration cache.
        prepared, ranking, trade_off: what the plan was found by.
    """

    activations: Requantized
    plan: PrecisionPlan
    precisions: Mapping[str, str] = field(default_factory=dict)
    implicit: Implicit | None = None
    cache: str = ""
    prepared: Prepared | None = None
    ranking: Sensitivity | None = None
    trade_off: TradeOff | None = None

    @property
    def model(self) -> onnx.ModelProto:
        """With Q/DQ nodes and casts; float where the ranges are handed over beside it."""
        return self.activations.model


def _explicit(prepared: Prepared, planned: Planned, part: Quantizable, caps: Capabilities) -> _Network:
    return _Network(
        prepared.explicit(planned.plan),
        planned.plan,
        part.precisions(planned.plan),
        cache=prepared.ranges.to_calibration_cache(caps.cache_version or OLDEST),
        prepared=prepared,
        ranking=planned.ranking,
        trade_off=planned.trade_off,
    )


def _implicit(
    prepared: Prepared, planned: Planned, part: Quantizable, options: BuildOptions, caps: Capabilities
) -> _Network:
    """The float network, and its ranges beside it."""
    cache = prepared.ranges.to_calibration_cache(caps.cache_version)
    ranges = Implicit("cache", cache)
    if options.calibrator == "tensorrt":
        batch = _dimensions(prepared.model.graph.input[0])[0]
        ranges = Implicit(
            cast(OwnCalibrator, options.calibration.rule),
            images=prepared.paths,
            preprocess=prepared.config.input,
            batch=batch if isinstance(batch, int) else (options.batch or (1, 1, 1))[1],
            percentile=options.calibration.percentile,
        )
    return _Network(
        Requantized(prepared.model),
        planned.plan,
        part.precisions(planned.plan),
        ranges,
        cache,
        prepared,
        planned.ranking,
        planned.trade_off,
    )


def _given(
    source: onnx.ModelProto,
    graph: onnx.ModelProto,
    plan: PrecisionPlan,
    part: Quantizable,
    path: Path,
    caps: Capabilities,
) -> _Network:
    """The float network, and the ranges of a calibration cache that was made elsewhere, for the model as it was."""
    where = f"the calibration cache '{path}'"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise CalibrationError(f"{where} cannot be read: {error}; give another") from None
    given = cache.read(text, where, version=caps.cache_version, algorithm=cache.OURS, skip_unusable=True)
    known = dict.fromkeys(name for model in (graph, source) for name in _tensors(model))
    scales = cache.matched(given, known, part.tensors, where)
    text = cache.write({name: scales[name] for name in part.tensors}, caps.cache_version, cache.OURS)
    return _Network(Requantized(graph), plan, part.precisions(plan), Implicit("cache", text), text)


def _tensors(model: onnx.ModelProto) -> list[str]:
    made = [name for node in model.graph.node for name in node.output]
    return [*(value.name for value in model.graph.input), *made]


def _check(options: BuildOptions, caps: Capabilities) -> None:
    """Refuses what cannot give what was asked for."""
    _check_engine(options, caps)
    if options.precision != "int8":
        if options.keep != KeepOptions():
            raise ConfigError(f"--{options.precision} leaves nothing in INT8 to keep out of it; leave --keep-fp16 out")
        return
    if options.quantization == "implicit":
        _check_implicit(options, caps)
    if options.cache is not None:
        return
    lost = [sm for sm in options.sms if sm in caps.sms_without_int8]
    if lost:
        raise BackendError(
            f"--sm {lost[0]} together with --int8: with compute capability {lost[0] / 10} among the targets "
            f"{caps.name} {caps.version} runs every convolution in float without saying so; leave {lost[0]} out, "
            "or build for it alone with --fp32"
        )
    _check_sources(options.calibration, () if options.quantization == "implicit" else options.correct)
    _check_keep(options)


def _check_engine(options: BuildOptions, caps: Capabilities) -> None:
    engine, said = options.engine, f"{caps.name} {caps.version}"
    if engine.version_compatible and not caps.version_compatible:
        raise BackendError(f"{said} cannot make version-compatible engines; leave --version-compatible out")
    if engine.hardware_compatible and not caps.hardware_compatible:
        raise BackendError(
            f"{said} cannot make engines for GPUs later than those it builds for; leave --hardware-compatible out"
            + (" and name them with --sm" if caps.sms else "")
        )
    if engine.embed_plugins and not options.plugins:
        raise ConfigError("--embed-plugins needs the libraries: give them with --plugin-library")
    unknown = [name for name in engine.tactic_sources or () if name not in caps.tactic_sources]
    if unknown or (engine.tactic_sources is not None and not caps.tactic_sources):
        allowed = f"allowed: {', '.join(caps.tactic_sources)}" if caps.tactic_sources else "leave --tactic-sources out"
        raise BackendError(f"{said} has no tactic source{f' {unknown[0]!r}' if unknown else 's'}; {allowed}")
    if engine.workspace is not None and engine.workspace <= 0:
        raise ConfigError(f"--workspace must be over 0 MiB, got {engine.workspace / 2**20:g}")
    if options.quantization != "implicit":
        for name, given in (("--calibrator", options.calibrator != "trtdet"), ("--calibration-cache", options.cache)):
            if given:
                raise ConfigError(f"{name} belongs to --quantization implicit; Q/DQ nodes hold trtdet's own ranges")
    elif options.precision != "int8":
        raise ConfigError(f"--quantization implicit is about INT8; leave it out with --{options.precision}")


def _check_implicit(options: BuildOptions, caps: Capabilities) -> None:
    if caps.implicit is None:
        raise BackendError(
            f"{caps.name} {caps.version} has no calibrators, so it cannot quantise implicitly; use --quantization "
            "explicit, which writes the same ranges into the model as Q/DQ nodes"
        )
    if options.correct not in ((), CORRECTIONS):
        raise ConfigError(
            "corrections are made in the Q/DQ model, which --quantization implicit has not; leave --correct out"
        )
    rule = options.calibration.rule
    if rule == AUTO:
        raise ConfigError("--calib auto compares rules in the Q/DQ model; with --quantization implicit name one rule")
    if options.calibrator == "tensorrt" and rule not in get_args(OwnCalibrator):
        raise ConfigError(
            f"TensorRT has no calibrator for --calib {rule}; allowed with --calibrator tensorrt: "
            f"{', '.join(get_args(OwnCalibrator))}"
        )
    if options.calibrator == "tensorrt" and options.calibration.images is None:
        raise ConfigError("TensorRT's own calibrators look at images: give them with --images")
    if options.keep.max_map_drop is not None:
        raise ConfigError("--max-map-drop scores Q/DQ models; with --quantization implicit give --keep-fp16")
    if options.cache is not None and not options.cache.is_file():
        raise CalibrationError(f"the calibration cache '{options.cache}' does not exist; give another")
    if options.cache is not None and options.keep != KeepOptions():
        raise ConfigError("what stays in FP16 is found on images; with --calibration-cache leave it out")


def _check_sources(calibration: CalibrationOptions, correct: tuple[str, ...]) -> None:
    if calibration.images is None and calibration.histograms is None:
        raise ConfigError("INT8 needs calibration images: a folder or a list of file names with --images")
    unknown = [name for name in correct if name not in CORRECTIONS]
    if unknown:
        raise ConfigError(f"no correction '{unknown[0]}'; allowed: auto, none, or some of {','.join(CORRECTIONS)}")
    _check_images(calibration, correct)


def _check_keep(options: BuildOptions) -> None:
    keep = options.keep
    ways = {"--keep-fp16": keep.keep, "--fp16-budget": keep.budget, "--max-map-drop": keep.max_map_drop}
    asked = [name for name, value in ways.items() if value is not None]
    if len(asked) > 1:
        raise ConfigError(f"{asked[0]} and {asked[1]} both say what stays in FP16: give one of them")
    _check_pair(keep.images, keep.annotations)
    if keep.max_map_drop is not None and keep.images is None:
        raise ConfigError("--max-map-drop measures mAP: give annotated images with --val-images and --annotations")
    if keep.ranked and options.calibration.images is None:
        raise ConfigError("a ranking of the convolutions is measured on images: give --images, or name them")


def _check_pair(images: Path | None, annotations: Path | None) -> None:
    if (images is None) != (annotations is None):
        raise ConfigError("--val-images and --annotations belong together: give both")


def _check_images(options: CalibrationOptions, corrections: tuple[str, ...]) -> None:
    """Histograms alone are enough for a rule, not for what is judged on images."""
    if options.images is not None:
        return
    if options.rule == AUTO:
        raise ConfigError("--calib auto compares the rules on images: give --images, or name one rule")
    if corrections:
        raise ConfigError("corrections are worked out on images: give --images, or build with --correct none")


def _check_operators(model: onnx.ModelProto, backend: Backend) -> None:
    unsupported = backend.unsupported(model)
    if unsupported:
        caps = backend.capabilities
        listed = "; ".join(f"{op}: {reason}" for op, reason in unsupported.items())
        raise ModelError(
            f"the model uses operators that {caps.name} {caps.version} cannot build: {listed}; cut the graph before "
            "them with head.outputs, or choose another --backend"
        )


@dataclass(frozen=True)
class Planned:
    """What each convolution runs in, and what that was found by."""

    plan: PrecisionPlan
    ranking: Sensitivity | None = None
    trade_off: TradeOff | None = None


def choose_plan(
    prepared: Prepared, keep: KeepOptions, ranked: Callable[[], Sensitivity], progress: Progress = silent
) -> Planned:
    """The plan that the options ask for.

    Args:
        prepared: the model.
        keep: what stays in FP16.
        ranked: gives the ranking, where one is needed.
        progress: told of every image that is scored.

    Raises:
        ConfigError: the options do not fit the model, or no plan keeps the bound.
    """
    plan = prepared.plan
    if isinstance(keep.keep, Path):
        return Planned(prepared.checked(_edited(prepared, PrecisionPlan.load(keep.keep), keep.keep)))
    if isinstance(keep.keep, tuple):
        macs = multiply_adds(prepared.model)
        group = [name for name in plan.names("int8") if macs[name].depthwise]
        names = [one for name in keep.keep for one in (group if name == DEPTHWISE else (name,))]
        said = dict.fromkeys(named(plan, names), "kept: named")
        return Planned(prepared.checked(keeping(plan, said, Cause.KEPT_NAMED)))
    if not keep.ranked or keep.keep == 0:
        return Planned(plan)
    once = lru_cache(maxsize=1)(ranked)
    trade_off = None
    if keep.max_map_drop is not None:
        trade_off = _trade_off(prepared, once, keep, progress)
        chosen, cause = trade_off.chosen.names, Cause.KEPT_BOUND
        if not chosen:
            return Planned(plan, trade_off=trade_off)
    elif isinstance(keep.keep, int):
        chosen, cause = most_sensitive(once(), keep.keep), Cause.KEPT_SENSITIVE
    else:
        chosen, cause = within_budget(once(), keep.budget or 0.0), Cause.KEPT_BUDGET
    ranking = once()
    return Planned(prepared.checked(keeping(plan, reasons(ranking, chosen), cause)), ranking, trade_off)


def _ranking(prepared: Prepared, keep: KeepOptions, previous: Bundle | None, progress: Progress) -> Sensitivity:
    subject = prepared.subject(keep.num_images)
    if previous is not None and RANKING in previous.manifest.files:
        found = Sensitivity.load(previous.file(RANKING))
        if found.key == subject_key(subject, Method()):
            return found
    return rank(subject, ray=keep.ray, progress=progress)


def _edited(prepared: Prepared, plan: PrecisionPlan, path: Path) -> PrecisionPlan:
    """A plan from a file, with what was done to the convolutions that are still in INT8."""
    try:
        prepared.placement.following(plan)
    except ConfigError as error:
        raise ConfigError(f"plan '{path}': {error}") from None
    return PrecisionPlan({name: plan.entries[name].edited_from(known) for name, known in prepared.plan.entries.items()})


def _trade_off(
    prepared: Prepared, ranked: Callable[[], Sensitivity], keep: KeepOptions, progress: Progress
) -> TradeOff:
    assert keep.images is not None and keep.annotations is not None and keep.max_map_drop is not None
    config = prepared.config
    dataset = CocoDataset.load(keep.annotations, keep.images, config.classes)
    count = 0

    def scored(model: onnx.ModelProto) -> Evaluation:
        nonlocal count
        count += 1
        stage = f"mAP, evaluation {count}"
        detector = Detector.running(model, config, prepared.where)
        return evaluate(detector, dataset, lambda done, total: progress(stage, done, total))

    reference = scored(prepared.model)

    def measure(names: tuple[str, ...]) -> Score:
        plan = keeping(prepared.plan, dict.fromkeys(names, "tried"), Cause.KEPT_BOUND)
        got = scored(prepared.explicit(plan).model)
        found = compare(got, reference)
        return Score(got.result.map, found.difference, found.low, found.high)

    return smallest(ranked, keep.max_map_drop, reference.result.map, measure)


def float_plan(plan: PrecisionPlan, precision: Precision) -> PrecisionPlan:
    """Everything in one precision; what decodes boxes stays in FP32."""
    entries = {}
    for name, entry in plan.entries.items():
        stays = precision == "fp16" and entry.cause is Cause.DECODES_BOXES
        entries[name] = entry if stays else Entry(precision, f"--{precision}", Cause.REQUESTED)
    return PrecisionPlan(entries)


def _audited(built: Built, plan: PrecisionPlan, model: onnx.ModelProto, caps: Capabilities) -> Audit | None:
    if caps.has_inspector and not built.layers:
        warnings.warn(
            f"{caps.name} {caps.version} built the engine and its inspector gave nothing: it is not audited",
            TrtdetWarning,
            stacklevel=3,
        )
        return None
    found = audit(layers_of(built), plan, model, silu=caps.silu)
    for warning in found.warnings:
        warnings.warn(warning, TrtdetWarning, stacklevel=3)
    return found


def suppression(
    asked: NmsMode | Literal["auto"], caps: Capabilities, own: EmbeddedNms | None, across_classes: bool
) -> NmsMode:
    """What suppresses; with ``auto`` the model's own kind, if it has one."""
    allowed = caps.in_graph_nms
    if across_classes and not caps.nms_across_classes:
        allowed = tuple(one for one in allowed if one != "efficient")
    wanted: NmsMode = asked if asked != "auto" else own.kind if own else (*allowed, "host")[0]
    if wanted == "host" or wanted in allowed:
        return wanted
    said = f"--nms {asked}" if asked != "auto" or own is None else f"the model's own suppression '{own.name}'"
    if wanted in caps.in_graph_nms:
        said += " with key 'nms.class_agnostic', which its EfficientNMS ignores"
    raise BackendError(f"{caps.name} {caps.version} cannot take {said}; allowed: --nms {', '.join(allowed)} or host")


def _warn_of(own: EmbeddedNms, nms: NmsConfig) -> None:
    asked = nms.model_dump()
    other = [f"{key} {value}, not {asked[key]}" for key, value in own.thresholds.items() if value != asked[key]]
    if other:
        warnings.warn(
            f"the model's own suppression '{own.name}' is left as it is: {'; '.join(other)}; replace it by saying what "
            "suppresses with --nms",
            TrtdetWarning,
            stacklevel=3,
        )


def silu_form(asked: str, plugins: tuple[Path, ...], caps: Capabilities) -> SiluForm:
    """What SiLU is written as; ``auto`` takes the first of the backend's that needs nothing that was not given.

    Raises:
        BackendError: the backend lacks what was asked for, or the plugin library for it was not given.
    """
    # onnxruntime runs a plugin's operators by their definition, and so needs no library.
    library = bool(plugins) or not caps.makes_engine
    compiled = caps.compiles_plugins and asked == "plugin"
    usable = [one for one in caps.silu if one != "plugin" or library or compiled]
    for one in usable:
        if asked in ("auto", one):
            return one
    if asked in caps.silu:
        raise BackendError(
            f"--silu plugin with {caps.name} needs the library that has the plugin: give it with --plugin-library "
            f"PATH, or choose --silu {' or '.join(usable)}"
        )
    operator = {"plugin": ACTIVATIONS[0], "swish": "Swish"}.get(asked, "")
    reason = f": {caps.missing_ops[operator]}" if operator in caps.missing_ops else ""
    raise BackendError(
        f"{caps.name} {caps.version} cannot take --silu {asked}{reason}; allowed: auto, {', '.join(caps.silu)}"
    )


def plugin_parts(plugins: tuple[Path, ...], caps: Capabilities, embedded: bool = False) -> tuple[PluginPart, ...]:
    """The libraries that were given, checked: the one place that another source of plugins is added to."""
    if plugins and not caps.loads_plugins:
        raise BackendError(
            f"{caps.name} {caps.version} loads no plugin libraries; leave --plugin-library out, or use --backend "
            "tensorrt"
        )
    for path in plugins:
        if not path.is_file():
            raise BackendError(f"plugin library '{path}' does not exist; build it in plugins/ and give its path")
    names = [path.name for path in plugins]
    if len(set(names)) < len(names):
        raise BackendError(
            f"plugin libraries have the same file name ({', '.join(names)}): the bundle keeps them by it"
        )
    return tuple(PluginPart(file=path.name, sha256=sha256_file(path), embedded=embedded) for path in plugins)


def _silu_part(asked: str, done: str, result: PassResult, found: Requantized) -> SiluPart:
    return SiluPart(
        asked=asked,
        done=done,
        rewritten=result.count,
        read_int8=found.read,
        write_int8=found.written,
        skipped=(*result.skipped, *found.skipped),
    )


def _previous(output: Path) -> Bundle | None:
    """The bundle that stands at the place, if it is whole."""
    try:
        return Bundle(output)
    except BundleError:
        return None


def _batch(model: onnx.ModelProto, name: str | None, asked: tuple[int, int, int] | None) -> int | str | None:
    """The batch that the model is to have: a size, a name for a dynamic one, None to keep it as it is."""
    if asked is not None:
        return asked[0] if asked[0] == asked[2] else "batch"
    initializers = {tensor.name for tensor in model.graph.initializer}
    inputs = [tensor for tensor in model.graph.input if tensor.name not in initializers and name in (None, tensor.name)]
    if not inputs or not inputs[0].type.tensor_type.shape.dim:
        return None  # the passes say what is wrong with it
    return None if inputs[0].type.tensor_type.shape.dim[0].dim_value else 1


def _placement(model: onnx.ModelProto) -> QdqPlacement:
    placement = place(model)
    if not placement.plan.entries:
        raise ModelError("the model has no convolutions, so there is nothing to quantise; is it a detector?")
    return placement


@dataclass(frozen=True)
class Selection:
    """The images that are run, and the hash of their names and contents."""

    paths: tuple[Path, ...]
    sha256: str


def select_images(options: CalibrationOptions) -> Selection:
    """The calibration images: evenly spaced, so that the frames of a video or the folders of a set are all met."""
    if options.images is None:
        return _NOTHING
    found = find_images(options.images, options.root)
    if options.num_images is not None and options.num_images < 1:
        raise ConfigError(f"--num-images must be at least 1, got {options.num_images}")
    wanted = options.num_images or DEFAULT_IMAGES
    if options.num_images is not None and len(found) < wanted:
        warnings.warn(
            f"--num-images {wanted} but '{options.images}' has {len(found)}: all of them are used",
            TrtdetWarning,
            stacklevel=3,
        )
    paths = evenly(found, wanted)
    return Selection(paths, content_hash(paths))


_NOTHING = Selection((), content_hash(()))


def _calibrated(
    model: onnx.ModelProto,
    tensors: tuple[str, ...],
    config: Config,
    selected: Selection,
    options: CalibrationOptions,
    previous: Bundle | None,
    progress: Progress,
) -> Calibrated:
    exposed = expose(model, tensors)
    key = collection_key(exposed, tensors, selected.sha256, config.input.model_dump_json())
    collection = _kept(options, previous, key, tensors, bool(selected.paths))
    reused = collection is not None
    if collection is None:
        runner = OnnxRunner(exposed)
        stream = ImageStream(selected.paths, config.input, batch_size=runner.batch or 1)
        collection = collect(
            runner,
            runner.input,
            tensors,
            stream,
            key=key,
            images_sha256=selected.sha256,
            progress=lambda done: progress("calibrating", done, len(selected.paths)),
        )
    # What auto is compared with, should none of the rules be better than another.
    rule = CalibrationOptions.rule if options.rule == AUTO else options.rule
    return Calibrated(collection, Ranges.choose(collection, rule, options.percentile), reused)


def _corrected(
    model: onnx.ModelProto,
    placement: QdqPlacement,
    config: Config,
    where: NmsMode,
    paths: tuple[Path, ...],
    options: CalibrationOptions,
    names: tuple[str, ...],
    calibrated: Calibrated,
    progress: Progress,
) -> Corrected:
    """The corrections that hold on images held back; with ``auto`` the rules are among what is compared."""
    candidates = {calibrated.ranges.rule: calibrated.ranges}
    if options.rule == AUTO:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TrtdetWarning)  # said when the first was chosen
            for rule in RULES:
                if rule not in candidates:
                    candidates[rule] = Ranges.choose(calibrated.collection, rule, options.percentile)
    sources = Sources(paths, config.input, OnnxRunner, decoded(where, config), progress)
    return correct(model, placement, candidates, names, sources)


def _kept(
    options: CalibrationOptions, previous: Bundle | None, key: str, tensors: tuple[str, ...], images: bool
) -> Collection | None:
    if options.histograms is not None:
        collection = Collection.load(options.histograms)
        if set(collection.histograms) != set(tensors) or (images and collection.key != key):
            raise CalibrationError(
                f"the histograms '{options.histograms}' were collected from another model, other images or another "
                "pre-processing; leave --histograms out to collect anew"
            )
        return collection
    if previous is not None and previous.manifest.quantization.histograms_key == key:
        return Collection.load(previous.file(HISTOGRAMS))
    return None


def _command(options: BuildOptions, config: Config) -> dict[str, Any]:
    """The resolved options as plain values."""
    plain: dict[str, Any] = json.loads(json.dumps(asdict(options), default=str))
    return {**plain, "config": config.model_dump(mode="json")}


def _content_hash(
    model: onnx.ModelProto,
    config: Config,
    options: BuildOptions,
    caps: Capabilities,
    selected: Selection,
    plugins: tuple[PluginPart, ...],
) -> str:
    calibration = options.calibration
    # Images say it all; without them the collection that was given does.
    given = Collection.load(calibration.histograms).key if calibration.histograms and not selected.paths else None
    facts = {
        "trtdet": __version__,
        "backend": [caps.name, caps.version],
        "config": config.model_dump(mode="json"),
        "precision": options.precision,
        "rule": [calibration.rule, calibration.percentile] if options.precision == "int8" else None,
        "correct": options.correct if options.precision == "int8" else None,
        "keep": _keep_facts(options.keep) if options.precision == "int8" else None,
        "images": selected.sha256,
        "histograms": given,
        "sms": options.sms,
        "batch": options.batch,
        "silu": options.silu,
        "plugins": [part.sha256 for part in plugins],
        "quantization": [options.quantization, options.calibrator] if options.precision == "int8" else None,
        "cache": sha256_file(options.cache) if options.cache else None,
        "engine": asdict(options.engine),
    }
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    digest.update(_bytes(model))
    return digest.hexdigest()


def _keep_facts(keep: KeepOptions) -> list[Any]:
    """What the plan depends on; where the ranking is computed says nothing."""
    listed = keep.keep
    if isinstance(keep.keep, Path):
        listed = ("plan", json.dumps(asdict(PrecisionPlan.load(keep.keep)), sort_keys=True))
    measured = None
    if keep.max_map_drop is not None and keep.images is not None and keep.annotations is not None:
        measured = [sha256_file(keep.annotations), content_hash(find_images(keep.images))]
    return [listed, keep.budget, keep.max_map_drop, measured, keep.num_images if keep.ranked else None]


def _bytes(model: onnx.ModelProto) -> bytes:
    return model.SerializeToString(deterministic=True)


def _dimensions(value: onnx.ValueInfoProto) -> tuple[int | str, ...]:
    return tuple(
        dim.dim_value if dim.HasField("dim_value") else dim.dim_param for dim in value.type.tensor_type.shape.dim
    )


def _dtype(value: onnx.ValueInfoProto) -> str:
    return str(onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type).name)


def _input_part(model: onnx.ModelProto, preprocess: InputConfig, batch: tuple[int, int, int] | None) -> InputPart:
    value = model.graph.input[0]
    first, *rest = _dimensions(value)
    low, usual, high = (first, first, first) if isinstance(first, int) else (batch or (1, 1, 1))
    shapes = [(size, *(int(axis) for axis in rest)) for size in (low, usual, high)]
    return InputPart(
        name=value.name,
        shape=ShapePart(min=shapes[0], opt=shapes[1], max=shapes[2]),
        dtype=_dtype(value),
        preprocess=preprocess,
    )


def _output_parts(model: onnx.ModelProto) -> tuple[OutputPart, ...]:
    return tuple(
        OutputPart(name=value.name, dtype=_dtype(value), shape=_dimensions(value)) for value in model.graph.output
    )


def _quantization_part(prepared: Prepared | None, options: BuildOptions) -> QuantizationPart:
    if prepared is None:
        return QuantizationPart(mode="implicit", source="cache") if options.cache else QuantizationPart(mode="none")
    collection, ranges = prepared.calibrated.collection, prepared.ranges
    return QuantizationPart(
        mode=options.quantization,
        source=options.calibrator,
        calibrator=ranges.rule,
        percentile=ranges.percent,
        histograms_key=collection.key,
        images=ImagesPart(count=collection.images, sha256=collection.images_sha256, skipped=collection.skipped),
        corrections=prepared.summary,
    )


def _audit_part(found: Audit | None) -> AuditPart | None:
    if found is None:
        return None
    lost = tuple(FloatConvPart(name=one.name, got=one.got, reason=one.reason) for one in found.departures)
    return AuditPart(int8=found.int8, fp16=found.fp16, fp32=found.fp32, float_by_backend=lost)
