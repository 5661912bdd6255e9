"""The conversion: find the torch module, write it as ONNX, compare the two. Imports torch, so is imported late."""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.numpy_helper
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from trtdet.errors import ConfigError, ModelError
from trtdet.exporter import SOURCES, ExportOptions, parity, storage, trials
from trtdet.exporter.subject import Float, Subject, tensors
from trtdet.exporter.trials import Converted, first_line
from trtdet.passes.provenance import graphs

_LOADERS = {
    "ultralytics": "ultralytics_models",
    "yolov5": "yolov5",
    "hf": "hugging_face",
    "torchvision": "torchvision_models",
}
"""By the prefix of a source, the module of this package whose ``load(place, options)`` gives the Subject."""


def convert(source: str, options: ExportOptions) -> Converted:
    """The ONNX model of a source, checked.

    Raises:
        ConfigError, ModelError: see ``trtdet.exporter.export``.
    """
    subject = _subject(source, options)
    tried = trials.batches(subject.config.input, options)
    example = torch.from_numpy(tried[0])
    names = _output_names(subject, example)
    model, exporter, notes = _written(subject, example, names, options)
    found = trials.run(source, model, names, subject.input_name, tried)
    if subject.stages is not None:
        outputs, check, said = subject.stages.compared(subject, tried, found, options.tolerance)
        undetected = "" if check.torch else "nothing was detected on the images that were tried"
        written = trials.without_outputs(model, subject.stages.hidden)
        return Converted(written, subject.config, outputs, check, undetected, (*notes, *said), exporter)
    pairs = list(zip(_reference(subject, names, tried), found, strict=True))
    if subject.unordered:
        pairs = [(expected, parity.reordered(expected, found)) for expected, found in pairs]
    return replace(trials.compared(source, model, subject.config, pairs, options), exporter=exporter, notes=notes)


def _written(
    subject: Subject, example: Tensor, names: tuple[str, ...], options: ExportOptions
) -> tuple[onnx.ModelProto, str, tuple[str, ...]]:
    """The ONNX model of a module, the exporter that wrote it, and why another did not."""
    chosen = tuple(_EXPORTERS) if options.exporter == "auto" else (options.exporter,)
    failures: list[str] = []
    for exporter in chosen:
        try:
            with subject.for_dynamo() if exporter == "dynamo" else contextlib.nullcontext():
                model = _EXPORTERS[exporter](
                    _Flat(subject.traced or subject.reference),
                    example,
                    subject.input_name,
                    names,
                    dynamic_batch=options.dynamic_batch,
                    opset=options.opset,
                )
            if not storage.is_large(model):
                onnx.checker.check_model(model)
        except Exception as error:  # an operator that has no ONNX form, control flow, a user's own module
            failures.append(f"{exporter}: {first_line(_origin(error))}")
            cause = error
            continue
        opset = next(entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx"))
        notes = [f"written by torch's exporter {exporter}, as {failure}" for failure in failures]
        if opset != options.opset:
            notes.append(f"opset {opset} in place of {options.opset}, which {exporter} does not write")
        return model, exporter, tuple(notes)
    raise ModelError(f"export of '{subject.source}' failed in torch's exporter: {'; '.join(failures)}") from cause


def _origin(error: BaseException) -> BaseException:
    """What an exception was raised from in the end: torch's exporters wrap it in general advice."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


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


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """An exporter without gradients, and without its notes of tracing and deprecation: what it writes is checked."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    try:
        logger.setLevel(logging.ERROR)
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


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
    axes = {name: {0: "batch"} for name in (input_name, *output_names)} if dynamic_batch else None
    # Into a file: beside it, the exporter puts weights that are too many for one.
    with _quiet(), tempfile.TemporaryDirectory(prefix="trtdet-") as folder:
        # The tracing exporter: it keeps the model's own shape of graph (SiLU as Sigmoid and Mul, one Conv a
        # convolution), needs no package beside torch, and writes the opset that was asked for.
        torch.onnx.export(
            model,
            (example,),
            str(Path(folder) / "model.onnx"),
            input_names=[input_name],
            output_names=list(output_names),
            dynamic_axes=axes,
            opset_version=opset,
            dynamo=False,
        )
        result = onnx.load(str(Path(folder) / "model.onnx"))
    _in_single(result)
    # Readers as old as TensorRT 8.6's refuse a newer file format, and nothing here needs it.
    result.ir_version = min(result.ir_version, 10)
    return result


def _in_single(model: onnx.ModelProto) -> None:
    """Makes what a model computes in float64 float32, in place: a trace takes Python's numbers for float64, and neither
    TensorRT nor GridSample of onnxruntime computes in it."""
    double, single = onnx.TensorProto.DOUBLE, onnx.TensorProto.FLOAT
    for graph in graphs(model.graph):
        attributes = [attribute for node in graph.node for attribute in node.attribute]
        for attribute in attributes:
            if attribute.name in ("to", "dtype") and attribute.i == double:
                attribute.i = single
        for tensor in (*graph.initializer, *(attribute.t for attribute in attributes if attribute.HasField("t"))):
            if tensor.data_type == double:
                values = onnx.numpy_helper.to_array(tensor).astype(np.float32)
                tensor.CopyFrom(onnx.numpy_helper.from_array(values, tensor.name))
        for value in (*graph.value_info, *graph.output):
            if value.type.tensor_type.elem_type == double:
                value.type.tensor_type.elem_type = single


def by_dynamo(
    model: nn.Module,
    example: Tensor,
    input_name: str,
    output_names: Sequence[str],
    *,
    dynamic_batch: bool,
    opset: int,
) -> onnx.ModelProto:
    """As :func:`to_onnx`, by torch's newer exporter, which reads a module's program in place of tracing one run.

    Raises:
        ModelError: the package that it writes with is not installed.
    """
    try:
        import onnxscript  # noqa: F401
    except ImportError:
        raise ModelError(
            "torch's newer exporter needs onnxscript, which is not installed; install it with: pip install onnxscript"
        ) from None
    with _quiet(), contextlib.redirect_stdout(sys.stderr):
        program = torch.onnx.export(
            model,
            # A batch of one would be taken for a batch that is always one.
            (torch.cat([example, example]) if dynamic_batch else example,),
            input_names=[input_name],
            output_names=list(output_names),
            dynamic_shapes=({0: torch.export.Dim("batch")},) if dynamic_batch else None,
            opset_version=max(opset, _OLDEST_OF_DYNAMO),
            dynamo=True,
            verbose=False,
        )
    assert program is not None
    result: onnx.ModelProto = program.model_proto
    _in_single(result)
    result.ir_version = min(result.ir_version, 10)
    return result


_EXPORTERS = {"torchscript": to_onnx, "dynamo": by_dynamo}
"""Torch's exporters in the order they are tried. The graph of the first is that of the network, in the opset asked for,
and has no package to depend on; the second takes what cannot be traced."""

_OLDEST_OF_DYNAMO = 18


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


def _reference(subject: Subject, names: tuple[str, ...], tried: list[Float]) -> list[dict[str, NDArray[Any]]]:
    """Torch's outputs by name, for each batch."""
    results = []
    for batch in tried:
        with torch.no_grad():
            given = tensors(subject.reference(torch.from_numpy(batch))).values()
        results.append({name: tensor.numpy() for name, tensor in zip(names, given, strict=True)})
    return results
