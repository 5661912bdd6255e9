"""The conversion: find the torch module, write it as ONNX, compare the two. Imports torch, so is imported late."""

from __future__ import annotations

import importlib
import io
import logging
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from trtdet.config import Config
from trtdet.data.folders import evenly, find_images
from trtdet.data.images import preprocess, read_image
from trtdet.errors import ConfigError, ModelError
from trtdet.exporter import SOURCES, ExportOptions, parity
from trtdet.exporter.parity import DetectionCheck, OutputCheck
from trtdet.exporter.subject import Float, Subject, first_line, picture, tensors

_LOADERS = {"ultralytics": "ultralytics_models", "yolov5": "yolov5", "hf": "hugging_face"}
"""By the prefix of a source, the module of this package whose ``load(place, options)`` gives the Subject."""

_MOST_IMAGES = 8
"""Of the user's images, tried in turn: enough to see a detection of every kind, and done in seconds."""


@dataclass(frozen=True)
class Converted:
    """An ONNX model that passed, and what was measured.

    Attributes:
        model: the model.
        config: of the model.
        outputs: how far each output is from torch's.
        detections: how far the final detections are; None where the outputs do not fit the configuration.
        undetected: why there are no detections to compare; empty where there are.
    """

    model: onnx.ModelProto
    config: Config
    outputs: tuple[OutputCheck, ...]
    detections: DetectionCheck | None
    undetected: str


def convert(source: str, options: ExportOptions) -> Converted:
    """The ONNX model of a source, checked.

    Raises:
        ConfigError, ModelError: see ``trtdet.exporter.export``.
    """
    subject = _subject(source, options)
    batches = _batches(subject.config, options)
    example = torch.from_numpy(batches[0])
    names = _output_names(subject, example)
    try:
        model = to_onnx(
            _Flat(subject.traced or subject.reference),
            example,
            subject.input_name,
            names,
            dynamic_batch=options.dynamic_batch,
            opset=options.opset,
        )
        onnx.checker.check_model(model)
    except Exception as error:  # an operator that has no ONNX form, control flow, a user's own module
        raise ModelError(f"export of '{source}' failed in torch's exporter: {first_line(error)}") from error
    pairs = _both(subject, model, names, batches)
    if subject.unordered:
        pairs = [(expected, parity.reordered(expected, found)) for expected, found in pairs]
    outputs = parity.compare_outputs(source, pairs, options.tolerance)
    return Converted(model, subject.config, outputs, *_detections(subject, pairs, options))


def _subject(source: str, options: ExportOptions) -> Subject:
    if source in SOURCES:
        from trtdet.exporter import zoo

        return zoo.load(source, options)
    prefix, _, place = source.partition(":")
    if prefix in _LOADERS:
        module = importlib.import_module(f"trtdet.exporter.{_LOADERS[prefix]}")
        subject: Subject = module.load(place, options)
        return subject
    from trtdet.exporter import factory

    return factory.load(source, options)


def _batches(config: Config, options: ExportOptions) -> list[Float]:
    """What is tried: the user's images or made ones, one at a time, and two at a time where the batch is open."""
    if options.images is None:
        images = [picture(config.input, seed) for seed in (0, 1)]
    else:
        chosen = evenly(find_images(options.images), _MOST_IMAGES)
        images = [preprocess(read_image(path), config.input)[0] for path in chosen]
    batches = [image[None] for image in images]
    if options.dynamic_batch:
        batches.append(np.stack((images * 2)[:2]))
    return batches


def to_onnx(
    model: nn.Module,
    example: Tensor,
    input_name: str,
    output_names: Sequence[str],
    *,
    dynamic_batch: bool,
    opset: int,
) -> onnx.ModelProto:
    """Traces a module that takes a single tensor.

    Args:
        model: in evaluation mode, giving a tensor or a flat tuple of tensors.
        example: float32 (B, 3, H, W).
        input_name: of the ONNX model.
        output_names: a name for each tensor.
        dynamic_batch: the first axis of input and outputs is named ``batch`` instead of fixed.
        opset: of the ONNX model.
    """
    stream = io.BytesIO()
    axes = {name: {0: "batch"} for name in (input_name, *output_names)} if dynamic_batch else None
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    try:
        logger.setLevel(logging.ERROR)
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # tracer and deprecation notes; the result is checked against torch
            # The tracing exporter: it keeps the model's own shape of graph (SiLU as Sigmoid and Mul, one Conv a
            # convolution), needs no package beside torch, and writes the opset that was asked for.
            torch.onnx.export(
                model,
                (example,),
                stream,  # type: ignore[arg-type]  # any writable stream serves the tracing exporter
                input_names=[input_name],
                output_names=list(output_names),
                dynamic_axes=axes,
                opset_version=opset,
                dynamo=False,
            )
    finally:
        logger.setLevel(level)
    result = onnx.load_from_string(stream.getvalue())
    # Readers as old as TensorRT 8.6's refuse a newer file format, and nothing here needs it.
    result.ir_version = min(result.ir_version, 10)
    return result


class _Flat(nn.Module):
    """Gives the outputs of a module as a flat tuple, the form that a trace can hold."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.train(model.training)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensors(self.model(x)).values())


def _output_names(subject: Subject, example: Tensor) -> tuple[str, ...]:
    try:
        with torch.no_grad():
            given = tuple(tensors(subject.reference(example)))
    except ModelError as error:
        raise ModelError(f"'{subject.source}': {error}") from None
    except Exception as error:  # the user's module
        raise ModelError(
            f"'{subject.source}' cannot run on an input {tuple(example.shape)}: {type(error).__name__}: "
            f"{first_line(error)}; check input.size"
        ) from error
    wanted = subject.config.head.outputs
    if not given[0].startswith(":"):
        missing = sorted(set(wanted or ()) - set(given))
        if missing:
            raise ConfigError(f"head.outputs names {', '.join(missing)}, '{subject.source}' gives {', '.join(given)}")
        return given
    if wanted is None:
        return ("output",) if len(given) == 1 else tuple(f"output_{index}" for index in range(len(given)))
    if len(wanted) != len(given):
        raise ConfigError(f"head.outputs names {len(wanted)} outputs, '{subject.source}' gives {len(given)}")
    return wanted


def _both(
    subject: Subject, model: onnx.ModelProto, names: tuple[str, ...], batches: list[Float]
) -> list[tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]]]]:
    """The outputs of torch and of the model in onnxruntime, for each batch."""
    import onnxruntime as ort

    settings = ort.SessionOptions()
    settings.log_severity_level = 3
    try:
        session = ort.InferenceSession(model.SerializeToString(), settings, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's exceptions have no common base
        raise ModelError(f"export of '{subject.source}': onnxruntime refuses it: {first_line(error)}") from error
    pairs = []
    for batch in batches:
        with torch.no_grad():
            expected = [t.numpy() for t in tensors(subject.reference(torch.from_numpy(batch))).values()]
        try:
            found = session.run(list(names), {subject.input_name: batch})
        except Exception as error:
            raise ModelError(
                f"export of '{subject.source}': the ONNX model does not run on a batch of {len(batch)}: "
                f"{first_line(error)}"
            ) from error
        arrays = [np.asarray(array) for array in found]
        pairs.append((dict(zip(names, expected, strict=True)), dict(zip(names, arrays, strict=True))))
    return pairs


def _detections(
    subject: Subject, pairs: list[tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]]]], options: ExportOptions
) -> tuple[DetectionCheck | None, str]:
    try:
        check = parity.compare_detections(subject.source, pairs, subject.config, options.tolerance)
    except ConfigError as error:
        if options.config is None:  # what trtdet wrote about a model of its own must fit it
            raise ModelError(str(error)) from None
        return None, str(error)
    return check, "" if check.torch else "nothing was detected on the images that were tried"
