"""The raw outputs of a bundle for some images, as a file that the C++ runtime replays on a machine without a GPU.

A recording is laid out as a safetensors file (https://huggingface.co/docs/safetensors): the length of the header as a
little-endian 64-bit integer, the header in JSON, the tensors one after the other. They are ``fingerprints`` and, for
each output of the bundle, ``outputs.<name>``; the first axis of all of them is the image. An image is found again by
its fingerprint, so that pixels may differ by a rounding, and a grey level tells two images apart.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtdet.backends import RunInfo
from trtdet.bundle import Bundle
from trtdet.data import ImageStream
from trtdet.errors import DataError
from trtdet.files import writing_atomically
from trtdet.progress import Progress, silent
from trtdet.runtime.detector import Detector, Runtime

FORMAT = "trtdet-recording-1"

CELLS = 16
"""Cells of a fingerprint on each axis, or as many as the input has pixels."""

_TYPES = {
    "float32": "F32",
    "float16": "F16",
    "int32": "I32",
    "int64": "I64",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
"""Names of types in the file, by their names in NumPy."""


@dataclass(frozen=True)
class Recording:
    """A file that :func:`record` wrote."""

    file: Path
    images: int
    size: int
    """In bytes."""
    run_info: RunInfo


def fingerprints(images: NDArray[np.float32]) -> NDArray[np.float32]:
    """Means over cells of the network's input.

    Args:
        images: float32 (B, 3, H, W).

    Returns:
        float32 (B, 3, h, w), h and w the smaller of :data:`CELLS` and H or W. Cell i has the rows from ``i * H // h``
        up to ``(i + 1) * H // h``, and columns alike.
    """
    sums = images.astype(np.float64)
    for axis in (2, 3):
        size = images.shape[axis]
        count = min(CELLS, size)
        edges = np.arange(count + 1) * size // count
        shape = [1, 1, 1, 1]
        shape[axis] = count
        sums = np.add.reduceat(sums, edges[:-1], axis=axis) / np.diff(edges).reshape(shape)
    return sums.astype(np.float32)


def record(
    bundle: Path, images: Sequence[Path], output: Path, *, runtime: Runtime = "auto", progress: Progress = silent
) -> Recording:
    """Runs a bundle on images and writes its raw outputs. One batch at a time is in memory.

    Args:
        bundle: its folder.
        images: image files.
        output: the file to write.
        runtime: whether the engine or the model is run, as for :meth:`trtdet.Detector.open`.
        progress: called after every batch.

    Raises:
        BundleError, BackendError: the bundle cannot be opened or run.
        DataError: there are no images, one cannot be read, or two have the same fingerprint, so that a replay could
            not tell them apart.
        OutputError: the file cannot be written.
    """
    if not images:
        raise DataError("there is no image to record; give a folder or a list of some")
    manifest = Bundle(bundle, verify=False).manifest  # opening it below compares every file
    detector = Detector.open(bundle, runtime=runtime)
    height, width = manifest.input.preprocess.size
    shapes: dict[str, tuple[int, ...]] = {"fingerprints": (3, min(CELLS, height), min(CELLS, width))}
    types: dict[str, np.dtype[Any]] = {"fingerprints": np.dtype(np.float32)}
    for part in manifest.outputs:
        shapes[f"outputs.{part.name}"] = tuple(int(size) for size in part.shape[1:])
        types[f"outputs.{part.name}"] = np.dtype(part.dtype)
    sizes = {name: types[name].itemsize * int(np.prod(shape)) for name, shape in shapes.items()}
    starts, end = {}, 0
    for name, size in sizes.items():
        starts[name], end = end, end + size * len(images)
    entries = {
        name: {
            "dtype": _TYPES[types[name].name],
            "shape": [len(images), *shape],
            "data_offsets": [starts[name], starts[name] + sizes[name] * len(images)],
        }
        for name, shape in shapes.items()
    }
    about = {"format": FORMAT, "content_hash": manifest.content_hash, "ran_on": str(detector.runner.run_info)}
    header = json.dumps({"__metadata__": about, **entries}).encode()
    header += b" " * (-len(header) % 8)
    seen: dict[bytes, Path] = {}
    with writing_atomically(output) as stream:
        stream.write(struct.pack("<Q", len(header)) + header)
        first, done = stream.tell(), 0
        for batch in ImageStream(images, detector.input, batch_size=detector.batch, on_bad="raise"):
            prints = fingerprints(batch.images)
            found = detector.runner(batch.images)
            _check_distinct(prints, batch.paths, seen)
            values = {"fingerprints": prints, **{f"outputs.{name}": value for name, value in found.items()}}
            for name, size in sizes.items():
                stream.seek(first + starts[name] + done * size)
                stream.write(np.ascontiguousarray(values[name][: len(batch.paths)], types[name]).tobytes())
            done += len(batch.paths)
            progress("recording", done, len(images))
    return Recording(output, len(images), first + end, detector.runner.run_info)


def _check_distinct(prints: NDArray[np.float32], paths: Sequence[Path], seen: dict[bytes, Path]) -> None:
    for fingerprint, path in zip(prints, paths, strict=True):
        other = seen.setdefault(fingerprint.tobytes(), path)
        if other is not path:
            raise DataError(f"'{path}' and '{other}' are the same for the network; record one of them")
