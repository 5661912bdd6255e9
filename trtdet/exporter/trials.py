"""Runs the exported model and its source on images, compares them, and writes the ONNX file."""

from __future__ import annotations

import logging
import os
import sys
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
from trtdet.detection.parts import Float
from trtdet.errors import ConfigError, ModelError, one_line
from trtdet.exporter import UNDETECTED, ExportOptions, ParityComparison, parity
from trtdet.exporter.parity import Outputs
from trtdet.files import scratch_folder, writing

if TYPE_CHECKING:
    from torch import nn

LARGEST = 2**31 - 2**26
"""Largest size in bytes of weights in the same file as the graph; protobuf allows 2 GB."""

_EXTERNAL: dict[str, Any] = {"save_as_external_data": True, "size_threshold": 1024}

_MOST_IMAGES = 8
"""Limit of the user's images: usually enough to detect something, and compared in seconds."""


@dataclass(frozen=True)
class SourceModel:
    """A detector in torch.

    The ONNX model is compared with ``reference``, which is in evaluation mode, takes float32 (B, 3, H, W) and returns a
    tensor, or a tuple, list or dict of tensors, each with the batch first. ``traced`` is an equivalent module for the
    export, such as with folded batch normalisation; None for ``reference``. ``compare_stages`` compares inputs and
    outputs within a tolerance, for detectors that select boxes before the end; None compares the outputs.
    ``for_dynamo`` is the context in which torch's newer exporter reads the module.
    """

    source: str  # as the user named it, for messages
    reference: nn.Module
    config: Config
    traced: nn.Module | None = None
    unordered: bool = False  # whether rounding may change the order of the rows, which then does not count
    compare_stages: Callable[[SourceModel, Sequence[Float], Sequence[Outputs], float], ParityComparison] | None = None
    for_dynamo: Callable[[], AbstractContextManager[None]] = nullcontext


def compared(
    source: str,
    config: Config,
    pairs: Sequence[tuple[Outputs, Outputs]],
    options: ExportOptions,
    reference: str = "torch",
) -> ParityComparison:
    """Compares outputs and final detections; ``pairs`` are the reference's and the model's outputs for each batch.
    Raises ModelError if they differ, or a configuration that the user did not write does not fit."""
    outputs = parity.compare_outputs(source, pairs, options.tolerance, reference=reference)
    try:
        check = parity.compare_detections(source, pairs, config, tolerance=options.tolerance, reference=reference)
    except ConfigError as error:
        if options.config is None:
            raise ModelError(str(error)) from None
        return ParityComparison(outputs=outputs, detections=None, undetected=str(error))
    return ParityComparison(outputs=outputs, detections=check, undetected="" if check.torch else UNDETECTED)


def batches(config: InputConfig, options: ExportOptions) -> list[Float]:
    """Batches of the user's images or of generated ones: one image each, and one of two for a dynamic batch."""
    if options.images is None:
        images = [picture(config, seed) for seed in (0, 1)]
    else:
        images = [preprocess(read_image(path), config)[0] for path in evenly(find_images(options.images), _MOST_IMAGES)]
    inputs = [image[None] for image in images]
    if options.dynamic_batch:
        inputs.append(np.stack((images * 2)[:2]))
    return inputs


def picture(config: InputConfig, seed: int) -> Float:
    """A generated input, float32 (3, H, W) in the network's values: areas of similar colour, some noise, full range."""
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
    """The outputs of a model in onnxruntime for each batch; a ModelError if it cannot be loaded or run."""
    import onnxruntime as ort

    settings = ort.SessionOptions()
    settings.log_severity_level = 3
    providers = ["CPUExecutionProvider"]
    try:
        if is_large(model):
            with scratch_folder() as folder:
                path = folder / "model.onnx"
                onnx.save_model(model, path, **_EXTERNAL, location="model.data")
                session = ort.InferenceSession(str(path), settings, providers=providers)
                load_external_data_for_model(model, str(folder))  # saving removed the weights from it
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
    """Whether a model's weights need a separate file."""
    return sum(len(tensor.raw_data) for tensor in model.graph.initializer) > LARGEST


@contextmanager
def serialised(model: onnx.ModelProto, path: Path) -> Iterator[dict[Path, bytes | Path]]:
    """The files of a model that is to stand at ``path``, for :func:`trtdet.files.write_together`.

    They are its bytes, or for a large model temporary files of it and of its weights, ``path`` + ``.data``. Raises an
    OutputError on failure.
    """
    if not is_large(model):
        yield {path: model.SerializeToString()}
        return
    data = path.with_name(f"{path.name}.data")
    with writing(path), scratch_folder(path) as folder:
        whole = folder / path.name
        onnx.save_model(model, whole, **_EXTERNAL, location=data.name)
        for file in (whole.with_name(data.name), whole):
            with file.open("rb") as stream:
                os.fsync(stream.fileno())
        yield {data: whole.with_name(data.name), path: whole}


@contextmanager
def quiet(package: str) -> Iterator[None]:
    """Hides a package's warnings and notes; its output goes to stderr, as stdout may hold the command's result."""
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
    """The first line of an exception's message, or its type."""
    lines = str(error).strip().splitlines()
    return one_line(lines[0]) if lines else type(error).__name__


def resized(config: Config, size: tuple[int, int] | None, multiple: int = 1) -> Config:
    """The configuration with this input size (height, width), rounded up to a multiple; None keeps the size. Raises
    ConfigError if the strides do not divide the size."""
    height, width = (-(-side // multiple) * multiple for side in size or config.input.size)
    return config.with_size((height, width))
