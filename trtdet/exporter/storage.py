"""ONNX models on the disk and in onnxruntime, of any size: protobuf holds no more than 2 GB, so that the weights of a
larger model lie in a file beside it."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path
from typing import Any

import onnx
from onnx.external_data_helper import load_external_data_for_model

from trtdet.files import sha256_file, write_atomically, writing

LARGEST = 2**31 - 2**26
"""Bytes of weights that fit into one file, with room for the graph."""

_SMALLEST = 1024
"""Bytes of a tensor that goes into the file beside."""


def is_large(model: onnx.ModelProto) -> bool:
    """Whether a model's weights need a file of their own."""
    return sum(len(tensor.raw_data) for tensor in model.graph.initializer) > LARGEST


def session(model: onnx.ModelProto, settings: Any) -> Any:
    """The model in onnxruntime, on the CPU; its exceptions pass through."""
    import onnxruntime as ort

    providers = ["CPUExecutionProvider"]
    if not is_large(model):
        return ort.InferenceSession(model.SerializeToString(), settings, providers=providers)
    with tempfile.TemporaryDirectory(prefix="trtdet-") as folder:
        _save(model, Path(folder) / "model.onnx", "model.data")
        opened = ort.InferenceSession(str(Path(folder) / "model.onnx"), settings, providers=providers)
        load_external_data_for_model(model, folder)  # saving took the weights out of it
        return opened


def write(model: onnx.ModelProto, path: Path) -> tuple[str, Path | None]:
    """Writes a model in one step; the weights of a large one into ``path`` with ``.data`` behind, just before.

    Returns:
        SHA-256 of the file at ``path``, in hexadecimal, and the file of weights, if there is one.

    Raises:
        OutputError: it cannot be written.
    """
    if not is_large(model):
        content = model.SerializeToString()
        write_atomically(path, content)
        return hashlib.sha256(content).hexdigest(), None
    data = path.with_name(f"{path.name}.data")
    with writing(path), tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
        whole = Path(folder) / path.name
        _save(model, whole, data.name)
        for file in (whole.with_name(data.name), whole):
            with file.open("rb") as stream:
                os.fsync(stream.fileno())
        digest = sha256_file(whole)
        whole.with_name(data.name).replace(data)
        whole.replace(path)
    return digest, data


def _save(model: onnx.ModelProto, path: Path, location: str) -> None:
    onnx.save_model(model, str(path), save_as_external_data=True, location=location, size_threshold=_SMALLEST)
