"""From a float model to a bundle: rewrite, calibrate, quantise, build, audit, write. What is done already is kept."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import onnx

from trtdet import __version__
from trtdet.audit import Audit, audit
from trtdet.backends import Backend, BuildRequest, Built, Capabilities, OnnxRunner, choose
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
    QuantizationPart,
    ShapePart,
    sha256_file,
)
from trtdet.calibration import RULES, Collection, Ranges, collect, collection_key, expose
from trtdet.config import Config, InputConfig
from trtdet.data import ImageStream, content_hash, find_images
from trtdet.errors import BackendError, BundleError, CalibrationError, ConfigError, ModelError, TrtdetWarning
from trtdet.passes import Options, decoded, load_model, rewrite
from trtdet.quantize import (
    CORRECTIONS,
    Corrected,
    Corrections,
    Entry,
    Placement,
    PrecisionPlan,
    Sources,
    correct,
    insert_qdq,
    lint,
    place,
)

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done and how much there is."""

HISTOGRAMS = "histograms.npz"
DEFAULT_IMAGES = 128
AUTO = "auto"
"""The rule that takes, tensor by tensor, the threshold of least error on held-back images."""


def _silent(stage: str, done: int, total: int) -> None:
    return None


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
class BuildOptions:
    """How a bundle is built.

    Attributes:
        precision: ``int8`` quantises every convolution that can be; ``fp32`` builds the float model.
        calibration: used for ``int8``.
        correct: the corrections that may be used for ``int8``, see :mod:`trtdet.quantize.correct`; empty for the
            textbook form.
        nms: ``auto`` asks the backend; ``native`` puts the suppression into the graph; ``host`` leaves it out.
        backend: ``auto``, ``tensorrt``, ``tensorrt-rtx`` or ``onnxruntime``.
        sms: compute capabilities to build for, such as 86; empty for the backend's default.
        batch: (min, opt, max) for a model with a dynamic batch; None freezes it to 1.
    """

    precision: Literal["int8", "fp32"] = "int8"
    calibration: CalibrationOptions = CalibrationOptions()
    correct: tuple[str, ...] = CORRECTIONS
    nms: Literal["auto", "native", "host"] = "auto"
    backend: str = "auto"
    sms: tuple[int, ...] = ()
    batch: tuple[int, int, int] | None = None


@dataclass(frozen=True)
class Calibrated:
    """A collection, the ranges chosen from it, and whether the images had to be run."""

    collection: Collection
    ranges: Ranges
    reused: bool


@dataclass(frozen=True)
class BuildResult:
    """A finished bundle, its engine's audit (None where no layers were listed), and whether it was there already."""

    bundle: Bundle
    audit: Audit | None
    up_to_date: bool


def calibrate(model: Path, config: Config, options: CalibrationOptions, progress: Progress = _silent) -> Calibrated:
    """Runs calibration images through a model and chooses the range of every activation that INT8 needs.

    Args:
        model: float ONNX model.
        config: its configuration.
        options: images and rule.
        progress: told of every image.

    Raises:
        ModelError, DataError, CalibrationError, ConfigError: see the messages; nothing has been written.
    """
    if options.images is None and options.histograms is None:
        raise ConfigError("calibration needs images: a folder or a list of file names with --images")
    source = load_model(model)
    rewritten = rewrite(source, Options(config, batch=_frozen(source, config.input.name, None))).model
    placement, selected = _placement(rewritten), _selected(options)
    _check_images(options, ())
    calibrated = _calibrated(rewritten, placement, config, selected, options, None, progress)
    if options.rule != AUTO:
        return calibrated
    chosen = _corrected(rewritten, placement, config, "host", selected, options, (), calibrated, progress)
    return replace(calibrated, ranges=chosen.ranges)


def build(
    model: Path,
    config: Config,
    output: Path,
    options: BuildOptions = BuildOptions(),
    progress: Progress = _silent,
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
    where = _suppression(options.nms, backend)
    progress("rewriting the graph", 0, 1)
    source = load_model(model)
    batch = _frozen(source, config.input.name, options.batch)
    rewritten = rewrite(source, Options(config, where, batch, caps.max_topk)).model
    _check_operators(rewritten, backend)
    placement = _placement(rewritten)
    selected = _selected(options.calibration) if options.precision == "int8" else _NOTHING
    content = _content_hash(rewritten, config, options, caps, selected)
    previous = _previous(output)
    if previous is not None and previous.manifest.content_hash == content:
        return BuildResult(previous, None, True)

    # Opened before the work is done: a place that cannot be written is found out now, not after it.
    with BundleWriter(output) as writer:
        calibrated: Calibrated | None = None
        plan, explicit, summary = placement.plan, rewritten, tuple[str, ...]()
        if options.precision == "int8":
            calibration = options.calibration
            calibrated = _calibrated(rewritten, placement, config, selected, calibration, previous, progress)
            corrections = Corrections()
            if options.correct or calibration.rule == AUTO:
                corrected = _corrected(
                    rewritten, placement, config, where, selected, calibration, options.correct, calibrated, progress
                )
                calibrated = replace(calibrated, ranges=corrected.ranges)
                plan, corrections, summary = corrected.plan, corrected.corrections, corrected.summary
            explicit = _explicit(rewritten, placement, calibrated.ranges, corrections)
        else:
            plan = PrecisionPlan({name: Entry("fp32", "--fp32") for name in plan.entries})
        progress(f"building the engine with {caps.name} {caps.version}", 0, 1)
        built = backend.build(BuildRequest(explicit, options.sms, options.batch if batch is None else None))
        found = _audited(built, plan) if caps.lists_layers else None

        if built.engine:
            writer.add("model.engine", built.engine)
        writer.add(f"{options.precision}.onnx", explicit.SerializeToString(deterministic=True))
        writer.add("plan.json", plan.to_json().encode())
        if found is not None:
            writer.add("audit.json", found.to_json().encode())
        if calibrated is not None:
            writer.add("ranges.json", calibrated.ranges.to_json().encode())
            writer.add("calibration.cache", calibrated.ranges.to_calibration_cache().encode())
            writer.add(HISTOGRAMS, calibrated.collection.to_bytes())
        fields = {
            "trtdet_version": __version__,
            "model": ModelPart(sha256=sha256_file(model), name=config.name, classes=config.classes),
            "input": _input_part(explicit, config.input, options.batch),
            "outputs": _output_parts(explicit),
            "nms": NmsPart(where=where, **config.nms.model_dump()),
            "backend": BackendPart(name=caps.name, version=caps.version, sms=built.sms),
            "quantization": _quantization_part(calibrated, summary),
            "precision": CountsPart(**plan.counts()),
            "audit": _audit_part(found),
            "command": _command(options, config),
            "content_hash": content,
        }
        return BuildResult(writer.commit(fields), found, False)


def _check(options: BuildOptions, caps: Capabilities) -> None:
    """Refuses what cannot give what was asked for."""
    if options.precision != "int8":
        return
    lost = [sm for sm in options.sms if sm in caps.sms_without_int8]
    if lost:
        raise BackendError(
            f"--sm {lost[0]} together with --int8: with compute capability {lost[0] / 10} among the targets "
            f"{caps.name} {caps.version} runs every convolution in float without saying so; leave {lost[0]} out, "
            "or build for it alone with --fp32"
        )
    if options.calibration.images is None and options.calibration.histograms is None:
        raise ConfigError("--int8 needs calibration images: a folder or a list of file names with --images")
    unknown = [name for name in options.correct if name not in CORRECTIONS]
    if unknown:
        raise ConfigError(f"no correction '{unknown[0]}'; allowed: auto, none, or some of {','.join(CORRECTIONS)}")
    _check_images(options.calibration, options.correct)


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


def _explicit(
    model: onnx.ModelProto, placement: Placement, ranges: Ranges, corrections: Corrections
) -> onnx.ModelProto:
    """The Q/DQ model, checked for everything that would make INT8 run in float."""
    explicit = insert_qdq(model, placement, ranges, corrections)
    findings = lint(explicit)
    if findings:
        raise ModelError(f"the INT8 graph would lose INT8 in {len(findings)} places, the first: {findings[0]}")
    return explicit


def _audited(built: Built, plan: PrecisionPlan) -> Audit:
    found = audit(built, plan)
    for warning in found.warnings:
        warnings.warn(warning, TrtdetWarning, stacklevel=3)
    return found


def _suppression(asked: str, backend: Backend) -> Literal["native", "host"]:
    caps = backend.capabilities
    if asked == "host" or (asked == "auto" and "native" not in caps.in_graph_nms):
        return "host"
    if "native" not in caps.in_graph_nms:
        raise BackendError(f"{caps.name} {caps.version} cannot take --nms native; allowed: host")
    return "native"


def _previous(output: Path) -> Bundle | None:
    """The bundle that stands at the place, if it is whole."""
    try:
        return Bundle(output)
    except BundleError:
        return None


def _frozen(model: onnx.ModelProto, name: str | None, asked: tuple[int, int, int] | None) -> int | None:
    """The batch to freeze a dynamic model to; None keeps the model's batch as it is."""
    initializers = {tensor.name for tensor in model.graph.initializer}
    inputs = [tensor for tensor in model.graph.input if tensor.name not in initializers and name in (None, tensor.name)]
    if not inputs or not inputs[0].type.tensor_type.shape.dim:
        return None  # the passes say what is wrong with it
    fixed = int(inputs[0].type.tensor_type.shape.dim[0].dim_value)
    if fixed:
        if asked is not None and asked != (fixed, fixed, fixed):
            raise ConfigError(
                f"the model's batch is fixed to {fixed}, --batch asks for {':'.join(map(str, asked))}; export it "
                "with a dynamic batch ('trtdet export --dynamic-batch') or leave --batch out"
            )
        return None
    if asked is None:
        return 1
    return asked[0] if asked[0] == asked[2] else None


def _placement(model: onnx.ModelProto) -> Placement:
    placement = place(model)
    if not placement.plan.entries:
        raise ModelError("the model has no convolutions, so there is nothing to quantise; is it a detector?")
    return placement


@dataclass(frozen=True)
class _Selection:
    """The images that are run, and the hash of their names and contents."""

    paths: tuple[Path, ...]
    sha256: str


def _selected(options: CalibrationOptions) -> _Selection:
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
    count = min(wanted, len(found))
    paths = tuple(found[index * len(found) // count] for index in range(count))
    return _Selection(paths, content_hash(paths))


_NOTHING = _Selection((), content_hash(()))


def _calibrated(
    model: onnx.ModelProto,
    placement: Placement,
    config: Config,
    selected: _Selection,
    options: CalibrationOptions,
    previous: Bundle | None,
    progress: Progress,
) -> Calibrated:
    tensors = placement.activations
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
    placement: Placement,
    config: Config,
    where: str,
    selected: _Selection,
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
    # Unreadable images were named when they were met first.
    skipped = set(calibrated.collection.skipped)
    images = [path for path in selected.paths if path.name not in skipped]
    return correct(
        model, placement, candidates, names, Sources(images, config.input, OnnxRunner, decoded(where), progress)
    )


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
    model: onnx.ModelProto, config: Config, options: BuildOptions, caps: Capabilities, selected: _Selection
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
        "images": selected.sha256,
        "histograms": given,
        "sms": options.sms,
        "batch": options.batch,
    }
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    digest.update(model.SerializeToString(deterministic=True))
    return digest.hexdigest()


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


def _quantization_part(calibrated: Calibrated | None, corrections: tuple[str, ...]) -> QuantizationPart:
    if calibrated is None:
        return QuantizationPart(mode="none")
    collection, ranges = calibrated.collection, calibrated.ranges
    return QuantizationPart(
        mode="explicit",
        calibrator=ranges.rule,
        percentile=ranges.percent,
        histograms_key=collection.key,
        images=ImagesPart(count=collection.images, sha256=collection.images_sha256, skipped=collection.skipped),
        corrections=corrections,
    )


def _audit_part(found: Audit | None) -> AuditPart | None:
    if found is None:
        return None
    lost = tuple(FloatConvPart(name=one.name, got=one.got, reason=one.reason) for one in found.departures)
    return AuditPart(int8=found.int8, fp16=found.fp16, fp32=found.fp32, float_by_backend=lost)
