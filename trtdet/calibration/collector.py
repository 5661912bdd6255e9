"""One pass over the calibration images: a histogram per activation, in constant memory."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Container, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from numpy.typing import NDArray

from trtdet.calibration.histograms import BINS, SCHEMA, Collection, Histogram
from trtdet.data import ImageStream
from trtdet.errors import CalibrationError
from trtdet.passes.model import to_graph, unchecked
from trtdet.passes.provenance import without_registry

Run = Callable[[NDArray[np.float32]], Mapping[str, NDArray[Any]]]


def collection_key(exposed: onnx.ModelProto, tensors: Sequence[str], images_sha256: str, preprocess: str) -> str:
    """SHA-256 over all that a collection depends on.

    ``exposed`` is the model cut by :func:`expose`, so nodes behind the last tensor do not count. ``images_sha256`` is
    the hash of the images' names and contents, ``preprocess`` the pre-processing as text.
    """
    digest = hashlib.sha256(f"{SCHEMA} {BINS} {images_sha256} {preprocess} {sorted(tensors)}".encode())
    # The registry of written nodes changes no values.
    digest.update(without_registry(exposed).SerializeToString(deterministic=True))
    return digest.hexdigest()


def expose(model: onnx.ModelProto, tensors: Sequence[str]) -> onnx.ModelProto:
    """The part of a model that computes ``tensors``, with them as its outputs.

    The graph's own inputs need no inference and are left out. If no output remains, a copy of the first input is the
    output: a model must have one. Raises CalibrationError if the model has no such tensor.
    """
    graph = to_graph(model)
    by_name = graph.tensors()
    missing = [name for name in tensors if name not in by_name]
    if missing:
        raise CalibrationError(
            f"the model has no tensor '{missing[0]}' ({len(missing)} missing); calibrate this model anew"
        )
    inputs = {tensor.name for tensor in graph.inputs}
    graph.outputs = [by_name[name] for name in tensors if name not in inputs]
    if not graph.outputs:
        copy = gs.Variable("trtdet/expose/copy")
        graph.nodes.append(gs.Node("Identity", "trtdet/expose", inputs=[graph.inputs[0]], outputs=[copy]))
        graph.outputs = [copy]
    for tensor in graph.outputs:
        # FP16 is computed in float32 with roundings, see trtdet.backends.onnxruntime_half; integers stay.
        if tensor.dtype is None or tensor.dtype == np.float16:
            tensor.dtype = np.float32
    graph.cleanup()
    return unchecked(graph)


@dataclass(frozen=True)
class CollectionRequest:
    """Activations to collect."""

    source: str  # the network's input, which may be among ``tensors``
    tensors: Sequence[str]
    key: str = ""  # of collection_key(); empty if nothing will be compared with it
    images_sha256: str = ""


def collect(
    run: Run, request: CollectionRequest, stream: ImageStream, progress: Callable[[int], None] = lambda done: None
) -> Collection:
    """Runs the images through a model and collects a histogram for each tensor.

    While a batch is counted, the next one is computed and later ones are decoded. ``run`` executes the model of
    :func:`expose`: float32 (B, 3, H, W), like the batches of ``stream``, to arrays by tensor name. Arrays that are not
    requested, such as detections, are only checked for finite values. ``progress`` gets the number of images done.

    Raises:
        CalibrationError: an activation or output is NaN or infinite, or there are no images.
        DataError: too many images are unreadable, or pixels cannot be right.
    """
    histograms: dict[str, Histogram] = {}
    count = 0
    with ThreadPoolExecutor(max_workers=1) as counter:
        pending: Future[None] | None = None
        for batch in stream:
            outputs = dict(run(batch.images))
            if request.source in request.tensors:
                outputs[request.source] = batch.images
            if pending is not None:
                pending.result()
            names = [path.name for path in batch.paths]
            pending = counter.submit(_count, histograms, outputs, counted=set(request.tensors), images=names)
            count += len(batch)
            progress(count)
        if pending is not None:
            pending.result()
    if not count:
        raise CalibrationError("no calibration image could be read; give a folder of JPEG or PNG images with --images")
    stream.check_pixels()
    # A tensor may be empty for all images, such as the regions of a pyramid level. It counts as one zero.
    nothing = Histogram.of(np.zeros(1, np.float32))
    return Collection(
        histograms={name: histograms.get(name, nothing) for name in request.tensors},
        key=request.key,
        images=count,
        images_sha256=request.images_sha256,
        source=request.source,
        skipped=tuple(path.name for path, _ in stream.skipped),
    )


def _count(
    histograms: dict[str, Histogram], outputs: Mapping[str, NDArray[Any]], counted: Container[str], images: list[str]
) -> None:
    for name, values in outputs.items():
        try:
            if name not in counted:
                if not np.isfinite(values).all():
                    raise ValueError
            elif values.size:
                before = histograms.get(name)
                batch = Histogram.of(values, None if before is None else before.exponent)
                histograms[name] = batch if before is None else before + batch
        except ValueError:
            finite = np.isfinite(values)
            bad = [image for image, own in zip(images, finite, strict=False) if not own.all()] or images
            raise CalibrationError(
                f"{'activation' if name in counted else 'output'} '{name}' is "
                f"{'NaN' if np.isnan(values).any() else 'infinite'} in {int((~finite).sum())} of {values.size} places "
                f"for image '{bad[0]}'; the model overflows in float: check its weights and the pre-processing in the "
                "configuration"
            ) from None
