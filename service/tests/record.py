"""Writes the raw outputs of a bundle for some images, which trtdet-serve and trtdet-bench replay without a GPU.

python service/tests/record.py BUNDLE --images DIR -o FILE

The file is a safetensors file (https://huggingface.co/docs/safetensors): the length of the header as a little-endian
64-bit integer, the header in JSON, the tensors one after the other. The tensors are ``fingerprints`` and, for each
output of the bundle, ``outputs.<name>``; their first axis is the image. A replay finds an image by its fingerprint:
pixels may differ by a rounding, and a grey level tells two images apart.
"""

from __future__ import annotations

import argparse
import json
import struct
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trtdet import Bundle, Detector, TrtdetError
from trtdet.backends import RunInfo
from trtdet.data import ImageStream, evenly, find_images
from trtdet.errors import DataError
from trtdet.files import writing_atomically
from trtdet.runtime.detector import Runtime

CELLS = 16
"""Cells of a fingerprint on each axis, or as many as the input has pixels."""

TYPES = {
    "float32": "F32",
    "float16": "F16",
    "int32": "I32",
    "int64": "I64",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
"""Names of types in the file, by their names in NumPy."""


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


def record(bundle: Path, images: Sequence[Path], output: Path, runtime: Runtime = "auto") -> RunInfo:
    """Runs a bundle on images and writes its raw outputs, with one batch at a time in memory.

    Returns:
        What the bundle ran on.

    Raises:
        BundleError, BackendError: the bundle cannot be opened or run.
        DataError: there are no images, one cannot be read, or two have the same fingerprint, so that a replay could
            not tell them apart.
        OutputError: the file cannot be written.
    """
    if not images:
        raise DataError("there is no image to record; give a folder or a list of some")
    manifest = Bundle(bundle).manifest
    detector = Detector.open(bundle, runtime=runtime)
    height, width = manifest.input.preprocess.size
    tensors = {"fingerprints": (np.dtype(np.float32), (3, min(CELLS, height), min(CELLS, width)))}
    for part in manifest.outputs:
        tensors[f"outputs.{part.name}"] = np.dtype(part.dtype), tuple(int(size) for size in part.shape[1:])
    header: dict[str, object] = {
        "__metadata__": {
            "format": "trtdet-recording-1",
            "content_hash": manifest.content_hash,
            "ran_on": str(detector.runner.run_info),
        }
    }
    starts, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        starts[name], end = end, end + dtype.itemsize * int(np.prod(shape)) * len(images)
        header[name] = {
            "dtype": TYPES[dtype.name],
            "shape": [len(images), *shape],
            "data_offsets": [starts[name], end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    paths_by_print: dict[bytes, Path] = {}
    with writing_atomically(output) as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        first, index = stream.tell(), 0
        for batch in ImageStream(images, detector.input, batch_size=detector.batch, on_bad="raise"):
            prints = fingerprints(batch.images)
            for fingerprint, path in zip(prints, batch.paths, strict=True):
                other = paths_by_print.setdefault(fingerprint.tobytes(), path)
                if other is not path:
                    raise DataError(f"'{path}' and '{other}' are the same for the network; record one of them")
            outputs = detector.runner(batch.images)
            values = {"fingerprints": prints, **{f"outputs.{name}": value for name, value in outputs.items()}}
            for name, (dtype, shape) in tensors.items():
                stream.seek(first + starts[name] + index * dtype.itemsize * int(np.prod(shape)))
                stream.write(np.ascontiguousarray(values[name][: len(batch.paths)], dtype).tobytes())
            index += len(batch.paths)
    return detector.runner.run_info


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python service/tests/record.py", description="Record a bundle's raw outputs.")
    parser.add_argument("bundle", type=Path, metavar="BUNDLE", help="the bundle to run")
    parser.add_argument(
        "--images", type=Path, required=True, metavar="DIR|LIST", help="a folder, or a .txt list of file names"
    )
    parser.add_argument("--num-images", type=int, metavar="N", help="use N of them, evenly spaced (default: all)")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="the recording")
    parser.add_argument("--runtime", default="auto", choices=["auto", "engine", "onnxruntime"])
    options = parser.parse_args(arguments)
    try:
        images = find_images(options.images)
        if options.num_images is not None:
            images = evenly(images, options.num_images)
        run_info = record(options.bundle, images, options.output, options.runtime)
    except TrtdetError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{len(images)} images on {run_info}; wrote {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
