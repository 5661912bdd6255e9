"""Histograms of activations, and the file that stores those of one pass over the images.

Each tensor has one histogram of |x| with a fixed number of bins over [0, 2**exponent). A larger value doubles the
range, and neighbouring bins are added. As every range is a power of two, the result is bit-identical for any order of
the images and any division among processes.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import cv2
import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, Field, TypeAdapter

from trtdet.errors import CalibrationError, one_line
from trtdet.files import finish_replacing, write_atomically
from trtdet.files.documents import DocumentError, parse_document

BINS = 16384  # bins of a collected histogram; at least half of them lie below the largest value
_CHUNK = 1 << 24  # OpenCV counts in float32, exact up to here
SCHEMA = 1  # schema of a collection's file

_LEAST_EXPONENT, _LARGEST_EXPONENT = -60, 128
"""Limits of the exponent: below them no scale is a normal float32, above them there is no float32."""

_MOST_VALUES = 1 << 53
"""Maximum number of values: float64, in which the rules compute, is exact for integers up to here."""

_MOST_BYTES = 1 << 30
"""Most bytes of a file's arrays, which are the histograms of 8,000 tensors."""

_MOST_META = 1 << 24
"""Most bytes of its names and numbers, which are JSON."""


@dataclass(frozen=True, eq=False)
class Histogram:
    """Counts of |x| over ``[0, 2**exponent)`` in equal bins, with the exact extremes of x."""

    counts: NDArray[np.int64]  # (BINS,)
    exponent: int
    low: float  # smallest x
    high: float  # largest x

    @property
    def amax(self) -> float:
        """Largest |x|, exact."""
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
        """The histogram of float32 values of any shape, not empty, over a range of at least ``2**exponent``. Raises
        ValueError if a value is NaN or infinite."""
        flat = values.reshape(-1)
        with np.errstate(invalid="ignore"):
            low, high = float(flat.min()), float(flat.max())
        if not (math.isfinite(low) and math.isfinite(high)):
            raise ValueError("the values are not all finite")
        # The smallest power of two over the largest magnitude, at least the smallest range.
        amax = max(abs(low), abs(high))
        needed = math.frexp(amax)[1] if amax > 0 else _LEAST_EXPONENT
        exponent = max(needed, _LEAST_EXPONENT, needed if exponent is None else exponent)
        # The factor is a power of two, so truncation gives the exact bin of every value.
        index = np.abs(flat)
        index *= np.float32(BINS / 2.0**exponent)
        bins = index.astype(np.uint16).reshape(-1, 1)
        counts = np.zeros(BINS, np.int64)
        for start in range(0, len(bins), _CHUNK):
            part = cv2.calcHist([bins[start : start + _CHUNK]], [0], None, [BINS], [0.0, float(BINS)])
            counts += part.reshape(-1).astype(np.int64)
        return Histogram(counts, exponent=exponent, low=low, high=high)

    def widened(self, exponent: int) -> Histogram:
        """The same counts over a range of at least ``2**exponent``."""
        counts = self.counts
        for _ in range(exponent - self.exponent):
            halved = np.zeros_like(counts)
            halved[: BINS // 2] = counts.reshape(-1, 2).sum(axis=1)
            counts = halved
        return Histogram(counts, exponent=max(exponent, self.exponent), low=self.low, high=self.high)

    def __add__(self, other: Histogram) -> Histogram:
        exponent = max(self.exponent, other.exponent)
        counts = self.widened(exponent).counts + other.widened(exponent).counts
        return Histogram(counts, exponent=exponent, low=min(self.low, other.low), high=max(self.high, other.high))

    def rebinned(self, bins: int) -> tuple[NDArray[np.int64], float]:
        """The counts in at most ``bins`` wider bins that reach just over the largest value, and the width of a bin.

        A new bin is a whole number of old ones, so no count is split.
        """
        used = min(len(self.counts), int(self.amax / self.width) + 1)
        group = max(1, math.ceil(used / bins))
        padded = np.zeros(group * bins, np.int64)
        reach = min(len(padded), len(self.counts))
        padded[:reach] = self.counts[:reach]
        return padded.reshape(bins, group).sum(axis=1), group * self.width


_STORED = ("key", "images", "images_sha256", "source", "skipped")  # fields of a collection that its file stores as JSON
_OTHER_VERSION = "was written by another version of trtdet; collect again"


@dataclass(frozen=True, eq=False)
class Collection:
    """Histograms of one pass over the calibration images, by tensor name."""

    histograms: Mapping[str, Histogram]
    key: str  # SHA-256 of what they were made from: graph, images and pre-processing
    images: int  # number of images
    images_sha256: str  # hash of their names and contents
    source: str  # name of the network's input
    skipped: tuple[str, ...] = ()  # names of unreadable images

    def __add__(self, other: Collection) -> Collection:
        """The histograms of both sets of images, which share none, as if collected at once; without key and hash."""
        histograms = {name: histogram + other.histograms[name] for name, histogram in self.histograms.items()}
        images, skipped = self.images + other.images, (*self.skipped, *other.skipped)
        return Collection(histograms, "", images, images_sha256="", source=self.source, skipped=skipped)

    def to_bytes(self) -> bytes:
        """The collection as a compressed ``.npz``."""
        return self._compressed

    @cached_property
    def _compressed(self) -> bytes:
        meta = {"schema": SCHEMA, **{name: getattr(self, name) for name in _STORED}, "tensors": list(self.histograms)}
        histograms = self.histograms.values()
        stream = io.BytesIO()
        np.savez_compressed(
            stream,
            meta=np.frombuffer(json.dumps(meta).encode(), np.uint8),
            counts=np.array([histogram.counts for histogram in histograms], np.int64).reshape(-1, BINS),
            exponents=np.array([histogram.exponent for histogram in histograms], np.int32),
            extremes=np.array([(histogram.low, histogram.high) for histogram in histograms], np.float64).reshape(-1, 2),
        )
        return stream.getvalue()

    def save(self, path: Path) -> None:
        """Writes the collection atomically."""
        write_atomically(path, self.to_bytes())

    @staticmethod
    def load(path: Path) -> Collection:
        """Reads a collection. Raises CalibrationError if the file is missing, truncated or not a collection."""
        finish_replacing(path.parent)
        try:
            # NumPy does not close a truncated file that it opened itself.
            with path.open("rb") as stream, np.load(stream, allow_pickle=False) as data:
                unpacked = sum(entry.file_size for entry in data.zip.infolist())
                if unpacked > _MOST_BYTES:
                    raise ValueError(f"unpacked it would have {unpacked} bytes, over {_MOST_BYTES}")
                names = data.zip.getinfo("meta.npy").file_size
                if names > _MOST_META:
                    raise ValueError(f"its names would have {names} bytes, over {_MOST_META}")
                meta = parse_document(data["meta"].tobytes(), TypeAdapter(_Meta))
                counts, exponents, extremes = data["counts"], data["exponents"], data["extremes"]
            if counts.ndim != 2 or counts.shape[1] != BINS:
                raise CalibrationError(f"'{path}' {_OTHER_VERSION}")
            histograms = _histograms(meta.tensors, counts, exponents, extremes=extremes)
            return Collection(histograms, **{name: getattr(meta, name) for name in _STORED})
        except FileNotFoundError:
            raise CalibrationError(f"'{path}' does not exist; make it with 'trtdet calibrate'") from None
        except CalibrationError:
            raise
        except Exception as error:  # NumPy, zipfile and zlib raise many types for a damaged file
            if isinstance(error, DocumentError) and (error.place, error.kind) == ("schema", "literal_error"):
                raise CalibrationError(f"'{path}' {_OTHER_VERSION}") from None
            raise CalibrationError(
                f"'{path}' is not a collection of histograms: {one_line(error)}; collect again"
            ) from None


@dataclass(frozen=True)
class _Meta:
    """JSON part of a collection's file."""

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid")

    schema: Literal[1]
    key: str
    images: Annotated[int, Field(ge=1)]
    images_sha256: str
    source: str
    skipped: tuple[str, ...]
    tensors: tuple[str, ...]


def _histograms(
    tensors: Sequence[str], counts: NDArray[Any], exponents: NDArray[Any], extremes: NDArray[Any]
) -> dict[str, Histogram]:
    """Histograms of a file; raises a ValueError if arrays do not fit each other or no values have such counts."""
    total = len(tensors)
    shapes = (counts.shape, exponents.shape, extremes.shape)
    if shapes != ((total, BINS), (total,), (total, 2)):
        raise ValueError(f"{total} tensors with arrays of shapes {', '.join(map(str, shapes))}")
    if counts.dtype != np.int64 or exponents.dtype != np.int32 or extremes.dtype != np.float64:
        raise ValueError(f"arrays of types {counts.dtype}, {exponents.dtype} and {extremes.dtype}")
    histograms: dict[str, Histogram] = {}
    for name, row, exponent, (low, high) in zip(tensors, counts, exponents, extremes, strict=True):
        # In float64, as int64 may overflow.
        size = row.sum(dtype=np.float64)
        if row.min() < 0 or not 1 <= size <= _MOST_VALUES:
            raise ValueError(
                f"the counts of '{name}' are {row.min()} to {row.max()}, {size:.6g} in all; "
                f"each must be at least 0, and all 1 to {_MOST_VALUES}"
            )
        if not _LEAST_EXPONENT <= exponent <= _LARGEST_EXPONENT:
            raise ValueError(
                f"the exponent of '{name}' is {exponent}; allowed: {_LEAST_EXPONENT} to {_LARGEST_EXPONENT}"
            )
        if not (np.isfinite([low, high]).all() and low <= high and max(-low, high) <= 2.0**exponent):
            raise ValueError(f"the extremes of '{name}' are {low:g} and {high:g}, its range ends at 2^{exponent}")
        histograms[name] = Histogram(row, exponent=int(exponent), low=float(low), high=float(high))
    return histograms
