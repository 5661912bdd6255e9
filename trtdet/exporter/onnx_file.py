"""Checks and simplifies an ONNX model as a source, and guesses its configuration. Needs no torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
from onnx import helper

from trtdet.config import Config, InputConfig
from trtdet.data.folders import find_images
from trtdet.errors import ConfigError
from trtdet.exporter import Confirm, ExportOptions, ParityComparison, recognition, trials
from trtdet.exporter.trials import resized
from trtdet.passes import Options, batch, clean, load_model, two_stage
from trtdet.passes.base import explained
from trtdet.passes.input_size import with_input_size
from trtdet.passes.model import to_graph, to_model


def convert(
    source: str, options: ExportOptions, confirm: Confirm | None = None
) -> tuple[onnx.ModelProto, Config, ParityComparison]:
    """Simplifies a model and, unless the options have a configuration, guesses it.

    Constant expressions are folded, nodes without effect are removed, and the input size is fixed or, if the graph
    does not depend on it, changed.

    Raises:
        ConfigError: the size is missing or does not fit the model.
        ModelError: the model is not valid, its outputs are not recognised, or simplifying changes its results.
    """
    path = Path(source)
    original = load_model(path)
    if options.size is None and options.config is None:
        options = replace(options, size=_noted_size(original))
    if options.size is not None:
        sized = resized(options.config, options.size) if options.config else None
        original = with_input_size(original, options.size, sized)
    evidence = None
    if options.config is not None:
        config, notes = resized(options.config, options.size), []
    else:
        config, note = guess(path, original, options)
        notes = [note]
        if options.images is not None and confirm is not None:
            confirmed = confirm(original, config, find_images(options.images))
            config, evidence = confirmed.config, confirmed.evidence
            notes.append(confirmed.note)
    passes = Options(config, batch="batch" if options.dynamic_batch else None)
    with explained("clean"):
        graph = to_graph(onnx.shape_inference.infer_shapes(original))
        two_stage.check_batch(graph, passes.batch, "--dynamic-batch")
        clean.apply(graph, passes)
        graph = to_graph(to_model(graph))
    with explained("batch"):
        batch.apply(graph, passes)
        model = to_model(graph)
    keys = {entry.key for entry in model.metadata_props}
    model.metadata_props.extend(entry for entry in original.metadata_props if entry.key not in keys)
    outputs = tuple(output.name for output in original.graph.output)
    names = config.head.outputs or outputs
    whole = original
    if names != outputs:
        whole = onnx.ModelProto()
        whole.CopyFrom(original)
        del whole.graph.output[:]
        whole.graph.output.extend(helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in names)
    input_name = model.graph.input[0].name
    inputs = trials.batches(config.input, options)
    before = []
    for images in inputs:  # the original may have a batch of 1
        parts = trials.run(source, whole, names, input_name=input_name, inputs=[image[None] for image in images])
        before.append({name: np.concatenate([part[name] for part in parts]) for name in names})
    after = trials.run(source, model, names, input_name=input_name, inputs=inputs)
    pairs = list(zip(before, after, strict=True))
    comparison = trials.compared(source, config, pairs, options=options, reference="the original")
    fewer = f"{len(original.graph.node)} nodes became {len(model.graph.node)}"
    return model, config, replace(comparison, notes=(fewer, *notes), confirmed=evidence)


def guess(path: Path, model: onnx.ModelProto, options: ExportOptions) -> tuple[Config, str]:
    """The configuration that fits a float model's input and outputs, and how it was guessed, in words.

    Of the options, ``size`` is for an input of dynamic size, and the outputs on ``images`` are inspected.

    Raises:
        ConfigError: the model's input is not a single image, or the size is missing or does not fit.
        ModelError: no supported head fits the outputs, or the model cannot be run.
        DataError: the images cannot be read.
    """
    inputs = _inputs(model)
    dims = [dim.dim_value for dim in inputs[0].type.tensor_type.shape.dim] if len(inputs) == 1 else []
    if len(dims) != 4 or dims[1] not in (0, 3):
        listed = ", ".join(f"'{value.name}'" for value in inputs)
        raise ConfigError(
            f"model '{path}' has the inputs {listed or 'none'}, a single image (B, 3, H, W) is needed",
            "give a configuration with --config",
        )
    size = options.size or _noted_size(model) or (dims[2], dims[3])
    if not all(size) or any(fixed not in (0, side) for fixed, side in zip(dims[2:], size, strict=True)):
        own = f"{dims[2] or 'any'}x{dims[3] or 'any'}"
        raise ConfigError(f"the input of model '{path}' is {own} (height x width)", "give a size that fits with --size")
    names, input_name = [output.name for output in model.graph.output], inputs[0].name
    images = trials.batches(InputConfig(size=size, scale=1 / 255), replace(options, dynamic_batch=False))
    results = trials.run(str(path), model, names, input_name=input_name, inputs=images)
    outputs = {name: np.concatenate([result[name] for result in results]) for name in names}
    return recognition.guessed(outputs, size, path.stem, input_name=input_name, classes=recognition.class_names(model))


def _inputs(model: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    constants = {tensor.name for tensor in model.graph.initializer}
    return [value for value in model.graph.input if value.name not in constants]


def _noted_size(model: onnx.ModelProto) -> tuple[int, int] | None:
    """The size in the metadata, for an input of dynamic size."""
    inputs = _inputs(model)
    dims = inputs[0].type.tensor_type.shape.dim if len(inputs) == 1 else []
    return recognition.input_size(model) if len(dims) == 4 and not any(dim.dim_value for dim in dims[2:]) else None
