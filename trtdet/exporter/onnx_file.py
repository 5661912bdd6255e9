"""An ONNX model as a source: checked, simplified, and its configuration guessed where none is given. Needs no torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
from onnx import helper

from trtdet.config import Config, InputConfig
from trtdet.data.folders import find_images
from trtdet.errors import ConfigError
from trtdet.exporter import Confirm, ExportOptions, recognition, trials
from trtdet.exporter.trials import Converted, resized
from trtdet.passes import Options, batch, clean, load_model, two_stage
from trtdet.passes.base import explained
from trtdet.passes.input_size import with_input_size
from trtdet.passes.model import to_graph, to_model


def convert(source: str, options: ExportOptions, confirm: Confirm | None = None) -> Converted:
    """A model that computes the same with fewer nodes, and its configuration.

    Constant expressions are computed, nodes that do nothing are dropped, and open heights and widths are fixed; fixed
    ones are changed where the graph does not depend on them.

    Args:
        source: the path of the model.
        options: ``config`` takes the place of the guess.
        confirm: holds the guess to the images, where there are some.

    Raises:
        ConfigError: the size is needed, or is not the model's.
        ModelError: the model is not valid, its outputs cannot be recognised, or it computes something else afterwards.
    """
    path = Path(source)
    original = load_model(path)
    if options.size is None and options.config is None:
        options = replace(options, size=_noted_size(original))
    if options.size is not None:
        sized = resized(options.config, options.size) if options.config else None
        original = with_input_size(original, options.size, sized)
    seen = None
    if options.config is not None:
        config, notes = resized(options.config, options.size), []
    else:
        config, said = guess(path, original, options)
        notes = [said]
        if options.images is not None and confirm is not None:
            found = confirm(original, config, find_images(options.images))
            config, seen = found.config, found.seen
            notes.append(found.said)
    passes = Options(config, batch="batch" if options.dynamic_batch else None)
    with explained("clean"):
        graph = to_graph(onnx.shape_inference.infer_shapes(original))
        two_stage.check_batch(graph, passes.batch, "--dynamic-batch")
        clean.apply(graph, passes)
        graph = to_graph(to_model(graph))
    with explained("batch"):
        batch.apply(graph, passes)
        model = to_model(graph)
    for entry in original.metadata_props:
        if entry.key not in {known.key for known in model.metadata_props}:
            model.metadata_props.append(entry)
    names = config.head.outputs or tuple(output.name for output in original.graph.output)
    input_name = model.graph.input[0].name
    tried = trials.batches(config.input, options)
    whole = _with_outputs(original, names)
    # The original may take one image at a time.
    before = []
    for images in tried:
        parts = trials.run(source, whole, names, input_name, [image[None] for image in images])
        before.append({name: np.concatenate([part[name] for part in parts]) for name in names})
    after = trials.run(source, model, names, input_name, tried)
    done = trials.compared(source, model, config, list(zip(before, after, strict=True)), options, "the original")
    fewer = f"{len(original.graph.node)} nodes became {len(model.graph.node)}"
    return replace(done, notes=(fewer, *notes), confirmed=seen)


def guess(path: Path, model: onnx.ModelProto, options: ExportOptions) -> tuple[Config, str]:
    """The configuration that fits a model's input and outputs, and in words what was taken from where.

    Args:
        path: of the model, whose name becomes the configuration's.
        model: as it was loaded.
        options: ``size`` for an input that leaves it open, ``images`` to look at the outputs on.

    Raises:
        ConfigError: the model has not one image as its input, or the size is needed or does not fit.
        ModelError: no head that is known fits the outputs, or the model cannot be run.
        DataError: the images cannot be read.
    """
    constants = {tensor.name for tensor in model.graph.initializer}
    inputs = [value for value in model.graph.input if value.name not in constants]
    dims = [dim.dim_value for dim in inputs[0].type.tensor_type.shape.dim] if len(inputs) == 1 else []
    if len(dims) != 4 or dims[1] not in (0, 3):
        listed = ", ".join(f"'{value.name}'" for value in inputs)
        raise ConfigError(
            f"model '{path}' has the inputs {listed or 'none'}, a single image (B, 3, H, W) is needed",
            "give a configuration with --config",
        )
    size = options.size or _noted_size(model) or (dims[2], dims[3])
    if not all(size) or any(fixed not in (0, side) for fixed, side in zip(dims[2:], size, strict=True)):
        given = f"{dims[2] or 'any'}x{dims[3] or 'any'}"
        raise ConfigError(
            f"the input of model '{path}' is {given} (height x width)", "give a size that fits with --size"
        )
    names = [output.name for output in model.graph.output]
    single = replace(options, dynamic_batch=False)
    tried = trials.batches(InputConfig(size=size, scale=1 / 255), single)
    results = trials.run(str(path), model, names, inputs[0].name, tried)
    outputs = {name: np.concatenate([result[name] for result in results]) for name in names}
    return recognition.guessed(outputs, size, path.stem, inputs[0].name, recognition.class_names(model))


def _noted_size(model: onnx.ModelProto) -> tuple[int, int] | None:
    """The size in the metadata, for an input that leaves its own open."""
    constants = {tensor.name for tensor in model.graph.initializer}
    inputs = [value for value in model.graph.input if value.name not in constants]
    dims = inputs[0].type.tensor_type.shape.dim if len(inputs) == 1 else []
    return recognition.input_size(model) if len(dims) == 4 and not any(dim.dim_value for dim in dims[2:]) else None


def _with_outputs(model: onnx.ModelProto, names: tuple[str, ...]) -> onnx.ModelProto:
    """The model with other tensors of it as its outputs."""
    if names == tuple(output.name for output in model.graph.output):
        return model
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    del changed.graph.output[:]
    changed.graph.output.extend(helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in names)
    return changed
