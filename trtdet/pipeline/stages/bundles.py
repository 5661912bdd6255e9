"""Last stage: the engine -> the files and the manifest of a bundle."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import onnx

from trtdet import __version__
from trtdet.audit import Audit
from trtdet.backends import Capabilities, portable
from trtdet.bundle import (
    PORTABLE,
    AuditPart,
    BackendPart,
    Bundle,
    BundleWriter,
    CountsPart,
    FloatConvPart,
    ImagesPart,
    InputPart,
    MasksPart,
    ModelPart,
    NmsPart,
    OutputPart,
    PluginPart,
    QuantizationPart,
    ShapePart,
    SiluPart,
)
from trtdet.config import Config
from trtdet.detection.masks import THRESHOLD
from trtdet.errors import BackendError, OutputError
from trtdet.evaluation.plausibility import Plausibility
from trtdet.files import sha256_file, write_atomically
from trtdet.passes import MASKS
from trtdet.pipeline.options import BuildOptions
from trtdet.pipeline.stages.calibrating import HISTOGRAMS
from trtdet.pipeline.stages.engines import Engine
from trtdet.pipeline.stages.networks import Network
from trtdet.pipeline.stages.planning import RANKING
from trtdet.pipeline.stages.rewriting import Graph

AUDIT = "audit.json"
"""The file of a bundle that keeps the layers of its engine and what the audit found in them."""

BUILD_LOG = "build.log"
"""The file of a bundle that keeps the builder's messages."""

TRADE_OFF = "tradeoff.json"
"""The file of a bundle that keeps what was tried for a bound on the loss."""


@dataclass(frozen=True)
class Origin:
    """What a bundle is made from, beside its engine.

    Attributes:
        model: the float ONNX file.
        graph: the model as it was rewritten.
        options: as they were given.
        caps: of the backend that built the engine.
        plugins: the plugin libraries, checked.
        key: the bundle's content hash.
        seen: what the detections on the images look like; None where nobody looked.
    """

    model: Path
    graph: Graph
    options: BuildOptions
    caps: Capabilities
    plugins: tuple[PluginPart, ...]
    key: str
    seen: Plausibility | None = None


def plugin_parts(plugins: tuple[Path, ...], caps: Capabilities, embedded: bool = False) -> tuple[PluginPart, ...]:
    """The libraries that were given, checked: the one place that another source of plugins is added to.

    Raises:
        BackendError: the backend loads none, a file is missing, or two have the same name.
    """
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


def failed_log_of(bundle: Path) -> Path:
    """The file beside the bundle that keeps the messages of a builder that failed, until a build succeeds."""
    return bundle.with_name(f"{bundle.name}.failed-{BUILD_LOG}")


@contextmanager
def log_kept(place: Path) -> Iterator[None]:
    """Writes what a builder said that fails within the block to a file, which the error then names.

    Args:
        place: of the file; one that is there is removed where the block succeeds.

    Raises:
        BackendError: the builder's, with where its messages are; as it was where there are none or no place for them.
    """
    try:
        yield
    except BackendError as error:
        if not error.messages:
            raise
        try:
            write_atomically(place, _log(error.messages))
        except OutputError:
            raise error from None
        where = f"the builder's messages are in '{place}'"
        hint = f"{error.hint}; {where}" if error.hint else where
        raise BackendError(error.problem, hint, error.messages) from error
    with suppress(OSError):
        place.unlink(missing_ok=True)


def _log(messages: tuple[str, ...]) -> bytes:
    return "\n".join((*messages, "")).encode("utf-8", "replace")


def written(writer: BundleWriter, engine: Engine, origin: Origin) -> Bundle:
    """Adds the files of a bundle to its writer and puts the bundle in place."""
    network, built, options = engine.network, engine.built, origin.options
    prepared, planned = network.prepared, network.planned
    ranking, trade_off = (planned.ranking, planned.trade_off) if planned is not None else (None, None)
    name = "float.onnx" if options.implicit else f"{options.precision}.onnx"
    runnable = network.model if options.implicit else portable(network.model)
    apart = runnable is not network.model
    files: dict[str, str | bytes | None] = {
        "model.engine": built.engine or None,
        **{path.name: path.read_bytes() for path in options.plugins},
        name: model_bytes(network.model),
        PORTABLE: model_bytes(runnable) if apart else None,
        "plan.json": network.plan.to_json(),
        AUDIT: engine.audit.to_json() if engine.audit is not None else None,
        BUILD_LOG: _log(built.messages) or None,
        "calibration.cache": built.calibration_cache or network.cache or None,
        "ranges.json": prepared.ranges.to_json() if prepared is not None else None,
        HISTOGRAMS: prepared.calibrated.collection.to_bytes() if prepared is not None else None,
        RANKING: ranking.to_json() if ranking is not None else None,
        TRADE_OFF: trade_off.to_json() if trade_off is not None else None,
    }
    for file, content in files.items():
        if content is not None:
            writer.add(file, content.encode() if isinstance(content, str) else content)
    runs = None if options.implicit else PORTABLE if apart else name
    return writer.commit({**_manifest(engine, origin), "portable": runs})


def model_bytes(model: onnx.ModelProto) -> bytes:
    """The model serialised, equal for equal models."""
    return model.SerializeToString(deterministic=True)


def _manifest(engine: Engine, origin: Origin) -> dict[str, Any]:
    network, graph, options, caps = engine.network, origin.graph, origin.options, origin.caps
    config = graph.config
    return {
        "trtdet_version": __version__,
        "model": ModelPart(sha256=sha256_file(origin.model), name=config.name, classes=config.classes),
        "input": _input_part(network.model, config, options.batch),
        "outputs": tuple(
            OutputPart(name=value.name, dtype=_dtype(value), shape=_dimensions(value))
            for value in network.model.graph.output
        ),
        "nms": _nms_part(graph),
        "masks": _masks_part(network.model),
        "backend": BackendPart(
            name=caps.name,
            version=caps.version,
            sms=engine.built.sms,
            plugins=origin.plugins,
            version_compatible=options.engine.version_compatible,
            hardware_compatible=options.engine.hardware_compatible,
            tf32=caps.tf32 and options.engine.tf32,
        ),
        "quantization": _quantization_part(network, options),
        "precision": CountsPart(**network.plan.counts()),
        "audit": _audit_part(engine.audit),
        "command": _command(options, config),
        "silu": SiluPart(
            asked=options.silu,
            done=graph.passes.silu,
            rewritten=graph.silu.count,
            read_int8=network.activations.read,
            write_int8=network.activations.written,
            skipped=(*graph.silu.skipped, *network.activations.skipped),
        ),
        "input_check": origin.seen.as_dict() if origin.seen is not None else None,
        "content_hash": origin.key,
    }


def _command(options: BuildOptions, config: Config) -> dict[str, Any]:
    """The resolved options as plain values."""
    plain: dict[str, Any] = json.loads(json.dumps(asdict(options), default=str))
    return {**plain, "config": config.model_dump(mode="json")}


def _dimensions(value: onnx.ValueInfoProto) -> tuple[int | str, ...]:
    return tuple(
        dim.dim_value if dim.HasField("dim_value") else dim.dim_param for dim in value.type.tensor_type.shape.dim
    )


def _dtype(value: onnx.ValueInfoProto) -> str:
    return str(onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type).name)


def _input_part(model: onnx.ModelProto, config: Config, batch: tuple[int, int, int] | None) -> InputPart:
    value = model.graph.input[0]
    first, *rest = _dimensions(value)
    low, usual, high = (first, first, first) if isinstance(first, int) else (batch or (1, 1, 1))
    shapes = [(size, *(int(axis) for axis in rest)) for size in (low, usual, high)]
    return InputPart(
        name=value.name,
        shape=ShapePart(min=shapes[0], opt=shapes[1], max=shapes[2]),
        dtype=_dtype(value),
        preprocess=config.input,
    )


def _nms_part(graph: Graph) -> NmsPart:
    mode, config = graph.nms_mode, graph.config
    return NmsPart(
        where=mode,
        scores="logits" if mode == "host" and config.suppresses_logits else "probabilities",
        own=graph.passes.keep_embedded,
        reason=graph.nms_reason,
        **config.nms.model_dump(),
    )


def _masks_part(model: onnx.ModelProto) -> MasksPart | None:
    for value in model.graph.output:
        if value.name == MASKS:
            return MasksPart(output=value.name, size=int(_dimensions(value)[-1]), threshold=THRESHOLD)
    return None


def _quantization_part(network: Network, options: BuildOptions) -> QuantizationPart:
    prepared = network.prepared
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
        weight_scales=network.form,
    )


def _audit_part(found: Audit | None) -> AuditPart | None:
    if found is None:
        return None
    lost = tuple(FloatConvPart(name=conv.name, got=conv.got, reason=conv.reason) for conv in found.departures)
    return AuditPart(int8=found.int8, fp8=found.fp8, fp16=found.fp16, fp32=found.fp32, float_by_backend=lost)
