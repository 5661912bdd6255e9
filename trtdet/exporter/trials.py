"""The exported model beside its source: the images that both run on, the ONNX file, and the comparison."""

from __future__ import annotations

import hashlib
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx.external_data_helper import load_external_data_for_model

from trtdet.config import Config, InputConfig
from trtdet.data.folders import evenly, find_images
from trtdet.data.images import preprocess, read_image
from trtdet.errors import ConfigError, ModelError, one_line
from trtdet.exporter import ExportOptions, ParityComparison, parity
from trtdet.exporter.parity import Float, Outputs
from trtdet.files import sha256_file, write_atomically, writing

if TYPE_CHECKING:
    from torch import nn

LARGEST = 2**31 - 2**26
"""Bytes of weights that fit into one file with the graph: protobuf holds no more than 2 GB."""

_EXTERNAL: dict[str, Any] = {"save_as_external_data": True, "size_threshold": 1024}

_MOST_IMAGES = 8
"""Of the user's images: enough to see a detection of every kind, and compared in seconds."""


@dataclass(frozen=True)
class SourceModel:
    """A detector in torch.

    Attributes:
        source: as the user named it, for messages.
        reference: the ONNX model is compared with it; in evaluation mode, takes float32 (B, 3, H, W) and gives a
            tensor, a tuple or list of tensors, or a dict of tensors, each with the batch first.
        config: size and name of the input, and what the outputs mean.
        traced: computes the same in the form that is exported, with batch normalisation folded where that is known to
            be right; None for the reference itself.
        compare_stages: compares a detector that chooses boxes before its end, stage by stage, on inputs and outputs
            within a tolerance; None compares the outputs.
        unordered: the order of the rows of all outputs means nothing, as rounding changes it.
        for_dynamo: what holds while torch's newer exporter reads the module.
    """

    source: str
    reference: nn.Module
    config: Config
    traced: nn.Module | None = None
    unordered: bool = False
    compare_stages: Callable[[SourceModel, Sequence[Float], Sequence[Outputs], float], ParityComparison] | None = None
    for_dynamo: Callable[[], AbstractContextManager[None]] = nullcontext


def compared(
    source: str,
    config: Config,
    pairs: Sequence[tuple[Outputs, Outputs]],
    options: ExportOptions,
    reference: str = "torch",
) -> ParityComparison:
    """Compares outputs and final detections of the written model with those of its reference; ``pairs`` are the
    reference's outputs and the model's, for each batch.

    Raises:
        ModelError: they differ, or a configuration that is trtdet's own does not fit.
    """
    outputs = parity.compare_outputs(source, pairs, options.tolerance, reference=reference)
    try:
        check = parity.compare_detections(source, pairs, config, tolerance=options.tolerance, reference=reference)
    except ConfigError as error:
        if options.config is None:
            raise ModelError(str(error)) from None
        return ParityComparison(outputs=outputs, detections=None, undetected=str(error))
    return ParityComparison.of(outputs, check)


def batches(config: InputConfig, options: ExportOptions) -> list[Float]:
    """The inputs of the comparison: the user's images or made ones, one at a time, and two where the batch is open."""
    if options.images is None:
        images = [picture(config, seed) for seed in (0, 1)]
    else:
        images = [preprocess(read_image(path), config)[0] for path in evenly(find_images(options.images), _MOST_IMAGES)]
    inputs = [image[None] for image in images]
    if options.dynamic_batch:
        inputs.append(np.stack((images * 2)[:2]))
    return inputs


def picture(config: InputConfig, seed: int) -> Float:
    """float32 (3, H, W) with the statistics of a picture, in the network's values: areas of like colour, some noise,
    full range."""
    rng = np.random.default_rng(seed)
    cell = 16
    rows, columns = -(-config.height // cell), -(-config.width // cell)
    coarse = rng.uniform(0, 1, (3, rows, columns)).repeat(cell, axis=1).repeat(cell, axis=2)
    noisy = coarse[:, : config.height, : config.width] + rng.normal(0, 0.05, (3, config.height, config.width))
    mean, std = np.array(config.mean), np.array(config.std)
    low = ((0 - mean) / std).astype(np.float32)[:, None, None]
    high = ((255 * config.scale - mean) / std).astype(np.float32)[:, None, None]
    return np.asarray(low + np.clip(noisy, 0, 1) * (high - low), np.float32)


def run(
    source: str, model: onnx.ModelProto, names: Sequence[str], input_name: str, inputs: Sequence[Float]
) -> list[dict[str, NDArray[Any]]]:
    """The outputs of a model in onnxruntime, for each batch.

    Raises:
        ModelError: onnxruntime refuses the model, or it does not run on a batch.
    """
    import onnxruntime as ort

    settings = ort.SessionOptions()
    settings.log_severity_level = 3
    providers = ["CPUExecutionProvider"]
    try:
        if is_large(model):
            with tempfile.TemporaryDirectory(prefix="trtdet-") as folder:
                path = Path(folder) / "model.onnx"
                onnx.save_model(model, path, **_EXTERNAL, location="model.data")
                session = ort.InferenceSession(str(path), settings, providers=providers)
                load_external_data_for_model(model, folder)  # saving took the weights out of it
        else:
            session = ort.InferenceSession(model.SerializeToString(), settings, providers=providers)
    except Exception as error:  # onnxruntime's exceptions have no common base
        raise ModelError(f"export of '{source}': onnxruntime refuses it: {first_line(error)}") from error
    results = []
    for batch in inputs:
        try:
            arrays = session.run(list(names), {input_name: batch})
        except Exception as error:
            raise ModelError(
                f"export of '{source}': the ONNX model does not run on a batch of {len(batch)}: {first_line(error)}"
            ) from error
        results.append({name: np.asarray(array) for name, array in zip(names, arrays, strict=True)})
    return results


def is_large(model: onnx.ModelProto) -> bool:
    """Whether a model's weights need a file of their own."""
    return sum(len(tensor.raw_data) for tensor in model.graph.initializer) > LARGEST


def write(model: onnx.ModelProto, path: Path) -> tuple[str, Path | None]:
    """Writes a model in one step; the weights of a large model into ``path`` with ``.data`` behind, just before.

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
        onnx.save_model(model, whole, **_EXTERNAL, location=data.name)
        for file in (whole.with_name(data.name), whole):
            with file.open("rb") as stream:
                os.fsync(stream.fileno())
        digest = sha256_file(whole)
        whole.with_name(data.name).replace(data)
        whole.replace(path)
    return digest, data


@contextmanager
def quiet(package: str) -> Iterator[None]:
    """Without the warnings and notes of a package; what it prints to standard output, which may be the command's
    result, goes to standard error."""
    logger = logging.getLogger(package)
    level = logger.level
    try:
        logger.setLevel(logging.ERROR)
        with warnings.catch_warnings(), redirect_stdout(sys.stderr):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def first_line(error: BaseException) -> str:
    """The first line of what an exception says, or its type."""
    lines = str(error).strip().splitlines()
    return one_line(lines[0]) if lines else type(error).__name__


def resized(config: Config, size: tuple[int, int] | None, multiple: int = 1) -> Config:
    """The configuration with another input size (height, width), rounded up to a multiple; None keeps its own.

    Raises:
        ConfigError: the strides do not divide the size.
    """
    height, width = (-(-side // multiple) * multiple for side in size or config.input.size)
    return config.with_size((height, width))
