"""Loads a torch module, writes it as ONNX and compares the two. Imports torch, so it is imported late."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.numpy_helper
import torch
from torch import Tensor, nn

from trtdet.config import Config
from trtdet.errors import ConfigError, ModelError, OutputError
from trtdet.exporter import (
    LOADERS,
    SOURCES,
    ExportOptions,
    ParityComparison,
    checkpoints,
    parity,
    torchvision_models,
    trials,
    yolox,
)
from trtdet.exporter.trials import SourceModel, first_line, quiet, resized
from trtdet.files import scratch_folder
from trtdet.passes.model import IR_VERSION, to_graph, to_model
from trtdet.passes.protobuf import graphs, opset_of


def convert(source: str, options: ExportOptions) -> tuple[onnx.ModelProto, Config, ParityComparison]:
    """Converts a source to ONNX and compares the two; errors are those of ``trtdet.exporter.export``."""
    prefix, _, place = source.partition(":")
    detector: SourceModel
    if source in SOURCES:
        detector = yolox.load(source, options)
    elif prefix in LOADERS:
        detector = importlib.import_module(f"trtdet.exporter.{LOADERS[prefix][1]}").load(place, options)
    else:
        detector = _from_factory(source, options)
    inputs = trials.batches(detector.config.input, options)
    example = torch.from_numpy(inputs[0])
    names = _output_names(detector, example)
    input_name = detector.config.input.name or "images"
    model, exporter, notes = _written(detector, example, (input_name, *names), options=options)
    outputs = trials.run(source, model, names, input_name=input_name, inputs=inputs)
    if detector.compare_stages is not None:
        comparison = detector.compare_stages(detector, inputs, outputs, options.tolerance)
        graph = to_graph(model)
        graph.outputs = [tensor for tensor in graph.outputs if tensor.name not in torchvision_models.STEPS]
        graph.cleanup(recurse_subgraphs=False)
        model = to_model(graph)
    else:
        with torch.no_grad():
            references = [tensors(detector.reference(torch.from_numpy(batch))).values() for batch in inputs]
        expected = [{name: value.numpy() for name, value in zip(names, values, strict=True)} for values in references]
        if detector.unordered:
            outputs = [parity.reordered(*pair) for pair in zip(expected, outputs, strict=True)]
        pairs = list(zip(expected, outputs, strict=True))
        comparison = trials.compared(source, detector.config, pairs, options=options)
    return model, detector.config, replace(comparison, exporter=exporter, notes=(*notes, *comparison.notes))


def _from_factory(source: str, options: ExportOptions) -> SourceModel:
    """The module that the user's ``package.module:factory`` returns, with the weights of the options."""
    assert options.config is not None, "checked before torch was imported"
    path = str(Path.cwd())
    sys.path.insert(0, path)
    importlib.invalidate_caches()
    try:
        model = _call_factory(source)
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(path)
    if options.weights is not None:
        checkpoints.load_state(model, checkpoints.read_state(options.weights), options.weights)
    config = resized(options.config, options.size)
    own = sys.modules.get("torchvision.models.detection.faster_rcnn")
    if own is not None and isinstance(model, own.FasterRCNN) and not model.roi_heads.has_keypoint():
        torchvision_models.check_batch(source, options)
        return torchvision_models.two_stage_source(source, model, config)
    # The exporter itself folds a batch normalisation that follows a convolution in the trace.
    return SourceModel(source, model, config)


def _call_factory(source: str) -> nn.Module:
    module_name, _, attribute = source.partition(":")
    if not module_name or not attribute:
        raise ModelError(f"export source is {source!r}, expected package.module:factory")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # importing runs the user's code
        raise ModelError(
            f"module '{module_name}' of source '{source}' cannot be imported: {type(error).__name__}: "
            f"{first_line(error)}; run in the folder that holds it, or install it"
        ) from error
    factory = getattr(module, attribute, None)
    if factory is None:
        names = sorted(n for n, v in vars(module).items() if callable(v) and not n.startswith("_"))
        raise ModelError(
            f"module '{module_name}' has no '{attribute}'; it has {', '.join(names[:8]) or 'nothing callable'}"
        )
    if not callable(factory):
        raise ModelError(f"'{source}' is {type(factory).__name__}, expected a function that gives a torch.nn.Module")
    try:
        model = factory()
    except Exception as error:  # the user's code
        raise ModelError(f"'{source}' raised {type(error).__name__}: {first_line(error)}") from error
    if not isinstance(model, nn.Module):
        raise ModelError(f"'{source}' gave {type(model).__name__}, expected a torch.nn.Module")
    if model.training:
        raise ModelError(f"'{source}' gave a module in training mode; call eval() on it in the factory")
    return model


def _written(
    detector: SourceModel, example: Tensor, names: tuple[str, ...], options: ExportOptions
) -> tuple[onnx.ModelProto, str, tuple[str, ...]]:
    """The ONNX model with these names of input and outputs, its exporter, and notes on failures and on the opset."""
    failures: list[str] = []
    for exporter in tuple(_EXPORTERS) if options.exporter == "auto" else (options.exporter,):
        try:
            with detector.for_dynamo() if exporter == "dynamo" else contextlib.nullcontext():
                model = _EXPORTERS[exporter](
                    _Flat(detector.traced or detector.reference), example, names, options=options
                )
            if not trials.is_large(model):
                onnx.checker.check_model(model)
        except (OutputError, MemoryError):  # of the machine, not of the exporter: the other one is no answer
            raise
        except Exception as error:  # an operator that has no ONNX form, control flow, a user's own module
            cause = origin = error
            while origin.__cause__ is not None:  # torch's exporters wrap it in general advice
                origin = origin.__cause__  # type: ignore[assignment]
            failures.append(f"{exporter}: {first_line(origin)}")
            continue
        opset = opset_of(model)
        notes = [f"written by torch's exporter {exporter}, as {failure}" for failure in failures]
        if opset != options.opset:
            notes.append(f"opset {opset} in place of {options.opset}, which {exporter} does not write")
        return model, exporter, tuple(notes)
    raise ModelError(f"export of '{detector.source}' failed in torch's exporter: {'; '.join(failures)}") from cause


def to_onnx(
    model: nn.Module, example: Tensor, names: Sequence[str], options: ExportOptions = ExportOptions()
) -> onnx.ModelProto:
    """Traces a module in evaluation mode that takes float32 (B, 3, H, W) and returns a tensor or a flat tuple of
    tensors; ``names`` are the names of the input and of each output."""
    # To a folder, because the exporter writes the weights of a large model to files of their own.
    with torch.no_grad(), quiet("torch.onnx"), scratch_folder() as folder:
        # The tracing exporter keeps the structure of the graph (SiLU as Sigmoid and Mul, one Conv per convolution),
        # needs no package besides torch, and writes the requested opset.
        torch.onnx.export(
            model,
            (example,),
            str(folder / "model.onnx"),
            input_names=[names[0]],
            output_names=list(names[1:]),
            dynamic_axes={name: {0: "batch"} for name in names} if options.dynamic_batch else None,
            opset_version=options.opset,
            dynamo=False,
        )
        return _in_single(onnx.load(str(folder / "model.onnx")))


def _in_single(model: onnx.ModelProto) -> onnx.ModelProto:
    """Changes float64 to float32, in place.

    A trace makes Python numbers float64, which TensorRT and GridSample of onnxruntime do not support.
    """
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
    # Old readers such as TensorRT 8.6's refuse newer file formats, and nothing here needs them.
    model.ir_version = min(model.ir_version, IR_VERSION)
    return model


def by_dynamo(model: nn.Module, example: Tensor, names: Sequence[str], options: ExportOptions) -> onnx.ModelProto:
    """As :func:`to_onnx`, but with torch's newer exporter, which reads the program instead of tracing one run."""
    try:
        import onnxscript  # noqa: F401
    except ImportError:
        raise ModelError(
            "torch's newer exporter needs onnxscript, which is not installed; install it with: pip install onnxscript"
        ) from None
    with torch.no_grad(), quiet("torch.onnx"):
        program = torch.onnx.export(
            model,
            # The exporter would take a batch of one for a fixed size.
            (torch.cat([example, example]) if options.dynamic_batch else example,),
            input_names=[names[0]],
            output_names=list(names[1:]),
            dynamic_shapes=({0: torch.export.Dim("batch")},) if options.dynamic_batch else None,
            opset_version=max(options.opset, 18),  # the oldest that it writes
            dynamo=True,
            verbose=False,
        )
    assert program is not None
    return _in_single(program.model_proto)


_EXPORTERS = {"torchscript": to_onnx, "dynamo": by_dynamo}
"""Torch's exporters in the order they are tried; the second exports modules that cannot be traced."""


class _Flat(nn.Module):
    """Returns the outputs of a module as a flat tuple, as a trace needs them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.train(model.training)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensors(self.model(x)).values())


def _output_names(detector: SourceModel, example: Tensor) -> tuple[str, ...]:
    try:
        with torch.no_grad():
            names = tuple(tensors(detector.reference(example)))
    except ModelError as error:
        raise ModelError(f"'{detector.source}': {error}") from None
    except Exception as error:  # the user's module
        raise ModelError(
            f"'{detector.source}' cannot run on an input {tuple(example.shape)}: {type(error).__name__}: "
            f"{first_line(error)}; check input.size"
        ) from error
    configured = detector.config.head.outputs
    if not names[0].startswith(":"):
        missing = sorted(set(configured or ()) - set(names))
        if missing:
            raise ConfigError(f"head.outputs names {', '.join(missing)}, '{detector.source}' gives {', '.join(names)}")
        return names
    if configured is None:
        return ("output",) if len(names) == 1 else tuple(f"output_{index}" for index in range(len(names)))
    if len(configured) != len(names):
        raise ConfigError(f"head.outputs names {len(configured)} outputs, '{detector.source}' gives {len(names)}")
    return configured


def tensors(outputs: Any) -> dict[str, Tensor]:
    """The outputs of a module by name, or by colon and position; a ModelError if one is no tensor or there is none."""
    outputs = [outputs] if isinstance(outputs, Tensor) else outputs
    named: dict[str, Any]
    if isinstance(outputs, Mapping):
        named = {str(key): value for key, value in outputs.items()}
    elif isinstance(outputs, (tuple, list)):
        named = {f":{index}": value for index, value in enumerate(outputs)}
    else:
        raise ModelError(f"the module gives {type(outputs).__name__}, expected a tensor, a tuple, a list or a dict")
    for name, value in named.items():
        if not isinstance(value, Tensor):
            raise ModelError(
                f"output {name.lstrip(':')} of the module is {type(value).__name__}, expected a tensor; "
                "flatten nested outputs in the factory"
            )
    if not named:
        raise ModelError("the module gives no outputs, expected at least one tensor")
    return named
