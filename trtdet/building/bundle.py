"""Last step of a build: the engine -> the files and the manifest of a bundle."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import onnx

from trtdet import __version__
from trtdet.audit import Audit
from trtdet.backends import portable
from trtdet.building.engine import BuildNetwork, Engine
from trtdet.building.graph import model_bytes
from trtdet.building.job import CheckedBuild
from trtdet.building.plan import RANKING, Planned
from trtdet.building.ranges import HISTOGRAMS
from trtdet.building.request import REQUEST
from trtdet.bundle import (
    FLOAT,
    PORTABLE,
    AuditPart,
    BackendPart,
    Bundle,
    BundleWriter,
    CountsPart,
    DetectionParts,
    FloatConvPart,
    ImagesPart,
    InputPart,
    KeypointsPart,
    MasksPart,
    ModelPart,
    NmsPart,
    OutputPart,
    PairPart,
    PrototypeMasksPart,
    QuantizationPart,
    RotatedBoxesPart,
    ShapePart,
    SiluPart,
)
from trtdet.config import Config
from trtdet.detection.masks import THRESHOLD
from trtdet.detection.parts import KEYPOINTS, MASK_COEFFICIENTS, PROTOTYPES, ROTATED_BOXES
from trtdet.errors import BackendError, OutputError
from trtdet.evaluation.plausibility import Plausibility
from trtdet.files import sha256_file, write_atomically
from trtdet.options import BuildOptions
from trtdet.passes import MASKS

AUDIT = "audit.json"
"""File of a bundle with the engine's layers and the results of their audit."""

BUILD_LOG = "build.log"
"""File of a bundle with the builder's messages."""

TRADE_OFF = "tradeoff.json"
"""File of a bundle with the plans that were tried for a limit on accuracy loss."""


@contextmanager
def log_kept(place: Path) -> Iterator[None]:
    """Writes a failing builder's messages to file ``place``, which the BackendError then names; a success removes an
    old file."""
    try:
        yield
    except BackendError as error:
        if not error.messages:
            raise
        try:
            write_atomically(place, log_of(error.messages))
        except OutputError:
            raise error from None
        where = f"the builder's messages are in '{place}'"
        hint = f"{error.hint}; {where}" if error.hint else where
        raise BackendError(error.problem, hint, error.messages) from error
    with suppress(OSError):
        place.unlink(missing_ok=True)


def log_of(messages: tuple[str, ...]) -> bytes:
    """Content of ``build.log``."""
    return "\n".join((*messages, "")).encode("utf-8", "replace")


def write_bundle(
    writer: BundleWriter, build: CheckedBuild, engine: Engine, planned: Planned | None, seen: Plausibility | None
) -> Bundle:
    """Writes all files of a bundle; ``planned`` is None for a float engine, ``seen`` without an input check."""
    network, built, prepared = engine.network, engine.built, engine.network.prepared
    models, runs = model_files(network)
    in_float = runs if network.precision == "fp32" else FLOAT if FLOAT in models else None
    if in_float is None and not build.backend.capabilities.makes_engine:
        models[FLOAT], in_float = model_bytes(portable(build.graph.model)), FLOAT
    files: dict[str, str | bytes | None] = {
        "model.engine": built.engine or None,
        **{path.name: path.read_bytes() for path in build.target.plugins},
        **models,
        "plan.json": network.plan.to_json(),
        AUDIT: engine.audit.to_json() if engine.audit is not None else None,
        BUILD_LOG: log_of(built.messages) if built.messages else None,
        "calibration.cache": built.calibration_cache or network.cache or None,
        "ranges.json": prepared.ranges.to_json() if prepared is not None else None,
        HISTOGRAMS: prepared.calibrated.collection.to_bytes()
        if prepared is not None and prepared.calibrated.collection.images
        else None,
        RANKING: planned.ranking.to_json() if planned is not None and planned.ranking is not None else None,
        TRADE_OFF: planned.trade_off.to_json() if planned is not None and planned.trade_off is not None else None,
    }
    for file, content in files.items():
        if content is not None:
            writer.add(file, content.encode() if isinstance(content, str) else content)
    return writer.commit({**_manifest(build, engine, seen), "portable": runs, "float_model": in_float})


def model_files(network: BuildNetwork) -> tuple[dict[str, bytes], str | None]:
    """The ONNX files of a bundle, and the one that onnxruntime runs; None for a network without Q/DQ nodes."""
    if network.implicit is not None:
        return {FLOAT: model_bytes(network.model)}, None
    name, runnable = f"{network.precision}.onnx", portable(network.model)
    files = {name: model_bytes(network.model)}
    if runnable is network.model:
        return files, name
    return {**files, PORTABLE: model_bytes(runnable)}, PORTABLE


def _manifest(build: CheckedBuild, engine: Engine, seen: Plausibility | None) -> dict[str, Any]:
    network, graph, options, caps = engine.network, build.graph, build.options, build.backend.capabilities
    config, silu, value = graph.config, graph.done.results["silu"], network.model.graph.input[0]
    tensors = (value, *network.model.graph.output)
    dtypes = [onnx.helper.tensor_dtype_to_np_dtype(each.type.tensor_type.elem_type).name for each in tensors]
    axes = [[*each.type.tensor_type.shape.dim] for each in tensors]
    shapes = [tuple(dim.dim_value if dim.HasField("dim_value") else dim.dim_param for dim in dims) for dims in axes]
    outputs = {
        each.name: OutputPart(name=each.name, dtype=dtype, shape=shape)
        for each, dtype, shape in zip(tensors[1:], dtypes[1:], shapes[1:], strict=True)
    }
    first, *rest = shapes[0]
    sizes = (first, first, first) if isinstance(first, int) else (build.target.batch or (1, 1, 1))
    low, usual, high = ((size, *(int(axis) for axis in rest)) for size in sizes)
    return {
        "trtdet_version": __version__,
        "model": ModelPart(sha256=sha256_file(build.job.model), name=config.name, classes=config.classes),
        "input": InputPart(
            name=value.name,
            shape=ShapePart(min=low, opt=usual, max=high),
            dtype=dtypes[0],
            preprocess=config.input,
        ),
        "outputs": tuple(outputs.values()),
        "nms": NmsPart(
            where=graph.nms_mode,
            scores="logits" if graph.nms_mode == "host" and config.suppresses_logits else "probabilities",
            own=graph.passes.keep_embedded,
            reason=graph.nms_reason,
            **config.nms.model_dump(),
        ),
        "masks": MasksPart(output=MASKS, size=int(outputs[MASKS].shape[-1]), threshold=THRESHOLD)
        if MASKS in outputs
        else None,
        "parts": _parts(config),
        "backend": BackendPart(
            name=caps.name,
            version=caps.version,
            sms=engine.built.sms,
            plugins=build.plugins,
            version_compatible=options.engine.version_compatible,
            hardware_compatible=options.engine.hardware_compatible,
            tf32=caps.tf32 and options.engine.tf32,
            dla=options.engine.dla,
        ),
        "quantization": _quantization_part(network, options),
        "precision": CountsPart(**network.plan.counts()),
        "audit": audit_part(engine.audit),
        "command": command_of(build),
        "silu": SiluPart(
            asked=options.silu,
            done=graph.passes.silu,
            rewritten=silu.count,
            read_int8=network.activations.read,
            write_int8=network.activations.written,
            skipped=(*silu.skipped, *network.activations.skipped),
        ),
        "input_check": seen.as_dict() if seen is not None else None,
        "content_hash": build.key,
    }


def _parts(config: Config) -> DetectionParts | None:
    """Masks, keypoints and rotated boxes of a one-stage detector; None for boxes alone."""
    head = config.head
    if not head.has_parts:
        return None
    masks, points = None, head.keypoints
    if head.masks:
        masks = PrototypeMasksPart(coefficients=MASK_COEFFICIENTS, prototypes=PROTOTYPES, threshold=THRESHOLD)
    return DetectionParts(
        masks=masks,
        keypoints=None if points is None else KeypointsPart(output=KEYPOINTS, **points.model_dump()),
        rotated_boxes=RotatedBoxesPart(output=ROTATED_BOXES) if head.rotated else None,
    )


def audit_part(audit: Audit | None) -> AuditPart | None:
    """The counts of an audit for the manifest; None if no layers were listed."""
    if audit is None:
        return None
    return AuditPart(
        **{name: getattr(audit, name) for name in ("int8", "fp8", "fp16", "fp32")},
        float_by_backend=tuple(
            FloatConvPart(name=conv.name, got=conv.got, reason=conv.reason) for conv in audit.departures
        ),
    )


def command_of(build: CheckedBuild) -> dict[str, Any]:
    """The options and the configuration of a build as plain values, for the manifest; and the hash of its request."""
    options = json.loads(json.dumps(asdict(build.options), default=str))
    return {**options, "config": build.graph.config.model_dump(mode="json"), REQUEST: build.job.request}


def _quantization_part(network: BuildNetwork, options: BuildOptions) -> QuantizationPart:
    prepared = network.prepared
    if prepared is None and network.cache:
        return QuantizationPart(mode="implicit", source="cache")
    if prepared is None:
        return QuantizationPart(mode="none")
    collection, ranges, own = prepared.calibrated.collection, prepared.ranges, prepared.graph.own
    pairs = None
    if own is not None:
        pairs = tuple(PairPart(**asdict(problem)) for problem in own.problems_for(prepared.graph.flow.half))
    if not options.calibrated:
        return QuantizationPart(mode="explicit", source="model", weight_scales=network.form, pairs=pairs)
    return QuantizationPart(
        mode=options.quantization,
        source=options.calibration.calibrator,
        pairs=pairs,
        calibrator=ranges.rule,
        percentile=ranges.percent,
        histograms_key=collection.key,
        images=ImagesPart(count=collection.images, sha256=collection.images_sha256, skipped=collection.skipped),
        corrections=prepared.summary,
        weight_scales=network.form,
    )
