"""The trial: the images that both sides of an export run on, and what the written model gives for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from trtdet.config import Config, InputConfig
from trtdet.data.folders import evenly, find_images
from trtdet.data.images import preprocess, read_image
from trtdet.errors import ConfigError, ModelError, one_line
from trtdet.exporter import ExportOptions, parity, storage
from trtdet.exporter.parity import DetectionCheck, OutputCheck, Outputs
from trtdet.passes.model import to_graph, to_model

Float = NDArray[np.float32]

_MOST_IMAGES = 8
"""Of the user's images, tried in turn: enough to see a detection of every kind, and done in seconds."""


@dataclass(frozen=True)
class Converted:
    """An ONNX model that passed, and what was measured.

    Attributes:
        model: the model.
        config: of the model.
        outputs: how far each output is from the reference's.
        detections: how far the final detections are; None where the outputs do not fit the configuration.
        undetected: why there are no detections to compare; empty where there are.
        notes: what the user should know about how it came about.
        exporter: of torch, that wrote it; empty where none did.
        confirmed: how sure a guessed configuration is; None where it was not held to images.
    """

    model: onnx.ModelProto
    config: Config
    outputs: tuple[OutputCheck, ...]
    detections: DetectionCheck | None
    undetected: str
    notes: tuple[str, ...] = ()
    exporter: str = ""
    confirmed: dict[str, Any] | None = None


def compared(
    source: str,
    model: onnx.ModelProto,
    config: Config,
    pairs: Sequence[tuple[Outputs, Outputs]],
    options: ExportOptions,
    reference: str = "torch",
) -> Converted:
    """Holds a model to its reference.

    Args:
        source: for messages.
        model: the model.
        config: of the model.
        pairs: the reference's outputs and the model's, for each batch.
        options: the tolerance, and whether the configuration is the user's.
        reference: its name in messages.

    Raises:
        ModelError: they differ, or a configuration that is trtdet's own does not fit.
    """
    outputs = parity.compare_outputs(source, pairs, options.tolerance, reference)
    try:
        check = parity.compare_detections(source, pairs, config, options.tolerance, reference)
    except ConfigError as error:
        if options.config is None:
            raise ModelError(str(error)) from None
        return Converted(model, config, outputs, None, str(error))
    undetected = "" if check.torch else "nothing was detected on the images that were tried"
    return Converted(model, config, outputs, check, undetected)


def batches(given: InputConfig, options: ExportOptions) -> list[Float]:
    """What is tried: the user's images or made ones, one at a time, and two at a time where the batch is open."""
    if options.images is None:
        images = [picture(given, seed) for seed in (0, 1)]
    else:
        chosen = evenly(find_images(options.images), _MOST_IMAGES)
        images = [preprocess(read_image(path), given)[0] for path in chosen]
    tried = [image[None] for image in images]
    if options.dynamic_batch:
        tried.append(np.stack((images * 2)[:2]))
    return tried


def run(
    source: str, model: onnx.ModelProto, names: Sequence[str], input_name: str, tried: Sequence[Float]
) -> list[dict[str, NDArray[Any]]]:
    """The outputs of a model in onnxruntime, for each batch.

    Raises:
        ModelError: onnxruntime refuses the model, or it does not run on a batch.
    """
    import onnxruntime as ort

    settings = ort.SessionOptions()
    settings.log_severity_level = 3
    try:
        session = storage.session(model, settings)
    except Exception as error:  # onnxruntime's exceptions have no common base
        raise ModelError(f"export of '{source}': onnxruntime refuses it: {first_line(error)}") from error
    results = []
    for batch in tried:
        try:
            found = session.run(list(names), {input_name: batch})
        except Exception as error:
            raise ModelError(
                f"export of '{source}': the ONNX model does not run on a batch of {len(batch)}: {first_line(error)}"
            ) from error
        results.append({name: np.asarray(array) for name, array in zip(names, found, strict=True)})
    return results


def without_outputs(model: onnx.ModelProto, hidden: Sequence[str]) -> onnx.ModelProto:
    """A model with fewer outputs, and without the nodes that computed those alone."""
    graph = to_graph(model)
    graph.outputs = [tensor for tensor in graph.outputs if tensor.name not in hidden]
    graph.cleanup(recurse_subgraphs=False)
    return to_model(graph)


def picture(given: InputConfig, seed: int) -> Float:
    """float32 (3, H, W) with the statistics of a picture, in the network's values: areas of like colour, some noise,
    full range."""
    rng = np.random.default_rng(seed)
    cell = 16
    rows, columns = -(-given.height // cell), -(-given.width // cell)
    coarse = rng.uniform(0, 1, (3, rows, columns)).repeat(cell, axis=1).repeat(cell, axis=2)
    noisy = coarse[:, : given.height, : given.width] + rng.normal(0, 0.05, (3, given.height, given.width))
    mean, std = np.array(given.mean), np.array(given.std)
    low = ((0 - mean) / std).astype(np.float32)[:, None, None]
    high = ((255 * given.scale - mean) / std).astype(np.float32)[:, None, None]
    return np.asarray(low + np.clip(noisy, 0, 1) * (high - low), np.float32)


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
