"""Streaming histograms of activations: one pass over the images, memory that does not grow with them.

Each tensor has one histogram of |x| with a fixed number of bins over [0, 2**exponent). When a larger value comes, the
range doubles and neighbouring bins are added together. Because every range is a power of two, the result is the same
as if the final range had been known from the start: it depends neither on the order of the images nor on how they are
divided among processes, so collections can be merged and compared bit for bit. Counts are int64.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import onnx
import onnx_graphsurgeon as gs
from numpy.typing import NDArray

from trtdet.data import ImageStream
from trtdet.errors import CalibrationError
from trtdet.files import write_atomically
from trtdet.passes import provenance

BINS = 16384
"""Bins of a collected histogram. At least half of them lie below the largest value."""

_CHUNK = 1 << 24
"""OpenCV gives counts as float32, exact up to here."""

_SCHEMA = 1

_UNREADABLE = (
    *(OSError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError),
    *(ValueError, KeyError, IndexError, TypeError, AttributeError),
)
"""What NumPy, zipfile and json raise on a file that is cut, damaged or something else."""

Run = Callable[[NDArray[np.float32]], Mapping[str, NDArray[Any]]]


@dataclass(frozen=True, eq=False)
class Histogram:
    """Counts of |x| over ``[0, 2**exponent)`` in equal bins, with the exact extremes of x.

    Attributes:
        counts: int64 (BINS,).
        exponent: the range's upper end is ``2.0**exponent``.
        low: smallest x seen.
        high: largest x seen.
    """

    counts: NDArray[np.int64]
    exponent: int
    low: float
    high: float

    @property
    def amax(self) -> float:
        """The largest |x| seen, exact."""
        return max(abs(self.low), abs(self.high))

    @property
    def width(self) -> float:
        """Width of one bin."""
        return float(2.0**self.exponent / len(self.counts))

    @property
    def total(self) -> int:
        return int(self.counts.sum())

    @staticmethod
    def of(values: NDArray[np.float32], exponent: int | None = None) -> Histogram:
        """The histogram of an array.

        Args:
            values: float32 of any shape, finite, not empty.
            exponent: use a range of at least ``2**exponent``.

        Raises:
            ValueError: a value is NaN or infinite.
        """
        flat = values.reshape(-1)
        with np.errstate(invalid="ignore"):
            low, high = float(flat.min()), float(flat.max())
        if not (math.isfinite(low) and math.isfinite(high)):
            raise ValueError("the values are not all finite")
        needed = _exponent(max(abs(low), abs(high)))
        exponent = needed if exponent is None else max(needed, exponent)
        # The factor is a power of two, so that truncation puts every value into its bin exactly.
        index = np.abs(flat)
        index *= np.float32(BINS / 2.0**exponent)
        bins = index.astype(np.uint16).reshape(-1, 1)
        counts = np.zeros(BINS, np.int64)
        for start in range(0, len(bins), _CHUNK):
            part = cv2.calcHist([bins[start : start + _CHUNK]], [0], None, [BINS], [0.0, float(BINS)])
            counts += part.reshape(-1).astype(np.int64)
        return Histogram(counts, exponent, low, high)

    def widened(self, exponent: int) -> Histogram:
        """The same counts over a range that is a power of two larger."""
        counts = self.counts
        for _ in range(exponent - self.exponent):
            halved = np.zeros_like(counts)
            halved[: BINS // 2] = counts.reshape(-1, 2).sum(axis=1)
            counts = halved
        return Histogram(counts, max(exponent, self.exponent), self.low, self.high)

    def __add__(self, other: Histogram) -> Histogram:
        exponent = max(self.exponent, other.exponent)
        counts = self.widened(exponent).counts + other.widened(exponent).counts
        return Histogram(counts, exponent, min(self.low, other.low), max(self.high, other.high))

    def rebinned(self, bins: int) -> tuple[NDArray[np.int64], float]:
        """The counts in at most ``bins`` wider bins that reach just over the largest value, and their width.

        A new bin is a whole number of old ones, so that no count is split.
        """
        used = min(len(self.counts), int(self.amax / self.width) + 1)
        group = max(1, math.ceil(used / bins))
        padded = np.zeros(group * bins, np.int64)
        reach = min(len(padded), len(self.counts))
        padded[:reach] = self.counts[:reach]
        return padded.reshape(bins, group).sum(axis=1), group * self.width


def _exponent(amax: float) -> int:
    """The smallest e with amax < 2**e; a range below float32's normal numbers would be of no use."""
    return max(math.frexp(amax)[1], -60) if amax > 0 else -60


@dataclass(frozen=True, eq=False)
class Collection:
    """The histograms of one pass over the calibration images.

    Attributes:
        histograms: by tensor name.
        key: SHA-256 of what they were made from: graph, images and pre-processing.
        images: how many images went in.
        images_sha256: hash of their names and contents.
        source: name of the network's input.
        skipped: names of images that could not be read.
    """

    histograms: Mapping[str, Histogram]
    key: str
    images: int
    images_sha256: str
    source: str
    skipped: tuple[str, ...] = field(default=())

    def to_bytes(self) -> bytes:
        """The collection as a compressed ``.npz``."""
        names = list(self.histograms)
        meta = {
            "schema": _SCHEMA,
            "key": self.key,
            "images": self.images,
            "images_sha256": self.images_sha256,
            "source": self.source,
            "skipped": self.skipped,
            "tensors": names,
        }
        found = [self.histograms[name] for name in names]
        stream = io.BytesIO()
        np.savez_compressed(
            stream,
            meta=np.frombuffer(json.dumps(meta).encode(), np.uint8),
            counts=np.array([histogram.counts for histogram in found], np.int64).reshape(-1, BINS),
            exponents=np.array([histogram.exponent for histogram in found], np.int32),
            extremes=np.array([(histogram.low, histogram.high) for histogram in found], np.float64).reshape(-1, 2),
        )
        return stream.getvalue()

    def save(self, path: Path) -> None:
        """Writes the collection atomically.

        Raises:
            OutputError: the place cannot be written.
        """
        write_atomically(path, self.to_bytes())

    @staticmethod
    def load(path: Path) -> Collection:
        """Reads a collection.

        Raises:
            CalibrationError: the file is missing, truncated or not a collection.
        """
        try:
            # NumPy leaves a file that it opened itself open where it is cut.
            with path.open("rb") as stream, np.load(stream, allow_pickle=False) as data:
                meta: dict[str, Any] = json.loads(data["meta"].tobytes())
                counts, exponents, extremes = data["counts"], data["exponents"], data["extremes"]
            if meta.get("schema") != _SCHEMA or counts.ndim != 2 or counts.shape[1] != BINS:
                raise CalibrationError(f"'{path}' was written by another version of trtdet; collect again")
            histograms = {
                name: Histogram(counts[i], int(exponents[i]), float(extremes[i, 0]), float(extremes[i, 1]))
                for i, name in enumerate(meta["tensors"])
            }
            skipped = tuple(meta["skipped"])
            return Collection(histograms, meta["key"], meta["images"], meta["images_sha256"], meta["source"], skipped)
        except FileNotFoundError:
            raise CalibrationError(f"'{path}' does not exist; make it with 'trtdet calibrate'") from None
        except _UNREADABLE as error:
            raise CalibrationError(f"'{path}' is not a collection of histograms: {error}; collect again") from None


def collection_key(exposed: onnx.ModelProto, tensors: Sequence[str], images_sha256: str, preprocess: str) -> str:
    """SHA-256 over all that a collection depends on.

    Args:
        exposed: the model as :func:`expose` cuts it, so that what comes after the last tensor does not count.
        tensors: names of the activations.
        images_sha256: hash of the images' names and contents.
        preprocess: the pre-processing as text.
    """
    digest = hashlib.sha256(f"{_SCHEMA} {BINS} {images_sha256} {preprocess} {sorted(tensors)}".encode())
    digest.update(exposed.SerializeToString(deterministic=True))
    return digest.hexdigest()


def expose(model: onnx.ModelProto, tensors: Sequence[str]) -> onnx.ModelProto:
    """The part of a model that computes ``tensors``, with them as its outputs.

    The graph's own inputs are left out: they need no inference. Where nothing else is asked for, a copy of the first
    input stands in, because a model must have an output.

    Raises:
        CalibrationError: the model has no such tensor.
    """
    graph = gs.import_onnx(model)
    known = graph.tensors()
    missing = [name for name in tensors if name not in known]
    if missing:
        raise CalibrationError(
            f"the model has no tensor '{missing[0]}' ({len(missing)} missing); calibrate this model anew"
        )
    inputs = {tensor.name for tensor in graph.inputs}
    graph.outputs = [known[name] for name in tensors if name not in inputs]
    if not graph.outputs:
        copy = gs.Variable("trtdet/expose/copy")
        graph.nodes.append(gs.Node("Identity", "trtdet/expose", inputs=[graph.inputs[0]], outputs=[copy]))
        graph.outputs = [copy]
    for tensor in graph.outputs:
        tensor.dtype = np.float32
    graph.ir_version = model.ir_version
    graph.cleanup()
    exposed: onnx.ModelProto = gs.export_onnx(graph, do_type_check=False)
    provenance.carry(model, exposed)
    return exposed


def collect(
    run: Run,
    source: str,
    tensors: Sequence[str],
    stream: ImageStream,
    *,
    key: str,
    images_sha256: str,
    progress: Callable[[int], None] = lambda done: None,
) -> Collection:
    """Runs the images through a model and gathers a histogram for each tensor.

    Decoding, inference and counting overlap: while one batch is counted the next is computed and those after it are
    decoded.

    Args:
        run: the model that :func:`expose` gives, ready to run: float32 (B, 3, H, W) to arrays by tensor name.
        source: name of the network's input; it may be among ``tensors``.
        tensors: names of activations.
        stream: batches of float32 (B, 3, H, W).
        key: see :func:`collection_key`.
        images_sha256: hash of the images.
        progress: called with the number of images done.

    Raises:
        CalibrationError: an activation is NaN or infinite (which tensor, which image), or there were no images.
        DataError: too many unreadable images, or pixels that cannot be right.
    """
    found: dict[str, Histogram] = {}
    done = 0
    with ThreadPoolExecutor(max_workers=1) as counter:
        pending: Future[None] | None = None
        for batch in stream:
            arrays = dict(run(batch.images))
            if source in tensors:
                arrays[source] = batch.images
            if pending is not None:
                pending.result()
            pending = counter.submit(_count, found, arrays, [path.name for path in batch.paths])
            done += len(batch)
            progress(done)
        if pending is not None:
            pending.result()
    if not done:
        raise CalibrationError("no calibration image could be read; give a folder of JPEG or PNG images with --images")
    stream.check_pixels()
    skipped = tuple(path.name for path, _ in stream.skipped)
    return Collection({name: found[name] for name in tensors}, key, done, images_sha256, source, skipped)


def _count(found: dict[str, Histogram], arrays: Mapping[str, NDArray[Any]], images: list[str]) -> None:
    for name, values in arrays.items():
        before = found.get(name)
        try:
            now = Histogram.of(values, None if before is None else before.exponent)
        except ValueError:
            raise _not_finite(name, values, images) from None
        found[name] = now if before is None else before + now


def _not_finite(name: str, values: NDArray[Any], images: list[str]) -> CalibrationError:
    finite = np.isfinite(values)
    bad = [image for image, one in zip(images, finite, strict=False) if not one.all()] or images
    what = "NaN" if np.isnan(values).any() else "infinite"
    return CalibrationError(
        f"activation '{name}' is {what} in {int((~finite).sum())} of {values.size} places for image '{bad[0]}'; "
        "the model overflows in float: check its weights and the pre-processing in the configuration"
    )
