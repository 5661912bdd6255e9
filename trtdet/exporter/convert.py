"""The conversion: find the torch module, trace it, compare the result with it. Imports torch, so is imported late."""

from __future__ import annotations

import contextlib
import copy
import importlib
import io
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from trtdet.errors import ConfigError, ModelError
from trtdet.exporter import SHAPES_MODEL, ExportOptions, OutputCheck, weights, yolox

Float = NDArray[np.float32]


@dataclass(frozen=True)
class _Subject:
    """A torch module and everything needed to trace it."""

    source: str
    reference: nn.Module
    """The result is compared with it."""
    traced: nn.Module
    """The same with batch normalisation folded where that is known to be right."""
    height: int
    width: int
    input_name: str
    output_names: tuple[str, ...] | None
    """None: taken from the outputs of the module."""
    low: Float
    """(3,), the network's value of black in each channel."""
    high: Float


def convert(source: str, options: ExportOptions) -> tuple[onnx.ModelProto, tuple[OutputCheck, ...]]:
    """The ONNX model of a source, checked, and how far each of its outputs is from torch's.

    Raises:
        ConfigError, ModelError: see ``trtdet.exporter.export``.
    """
    subject = _factory(source, options) if ":" in source else _named(source, options)
    images = [_image(subject, seed) for seed in (0, 1)]
    batches = [image[None] for image in images]
    if options.dynamic_batch:
        batches.append(np.stack(images))
    example = torch.from_numpy(batches[0])
    names = _output_names(subject, example)
    try:
        model = to_onnx(
            _Flat(subject.traced),
            example,
            subject.input_name,
            names,
            dynamic_batch=options.dynamic_batch,
            opset=options.opset,
        )
        onnx.checker.check_model(model)
    except Exception as error:  # an operator that has no ONNX form, control flow, a user's own module
        raise ModelError(f"export of '{source}' failed in torch's exporter: {_first_line(error)}") from error
    return model, _compare(subject, model, names, batches, options.tolerance)


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
        return tuple(_tensors(self.model(x)).values())


def _tensors(outputs: Any) -> dict[str, Tensor]:
    """The outputs of a module by name; a name that begins with a colon is a position."""
    if isinstance(outputs, Tensor):
        named: dict[str, Any] = {":0": outputs}
    elif isinstance(outputs, Mapping):
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


def _named(source: str, options: ExportOptions) -> _Subject:
    variant = source.removeprefix("yolox-")
    config = options.config
    shipped = source == "shapes" and options.weights is None
    classes = len(config.classes) if config else (10 if source == "shapes" else 80)
    side = yolox.VARIANTS[variant].input_size
    height, width = (config.input.height, config.input.width) if config else (side, side)
    if height % 32 or width % 32:
        raise ConfigError(f"input.size is {[height, width]}, {source} needs multiples of 32")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        reference = yolox.build(variant, classes)
    if options.weights is not None:
        weights.load_checkpoint(reference, options.weights)
    traced = copy.deepcopy(reference)
    weights.fuse_batch_norm(traced)
    if shipped:
        weights.load_by_position(traced, SHAPES_MODEL)
        reference = traced
    low, high = _input_range(options)
    names = tuple(config.head.outputs or ()) if config else ()
    name = (config.input.name if config else None) or "images"
    return _Subject(source, reference, traced, height, width, name, names or ("output",), low, high)


def _factory(source: str, options: ExportOptions) -> _Subject:
    config = options.config
    if config is None:
        raise ConfigError(f"export of '{source}' needs the input's size and name; give a configuration with --config")
    with _current_directory_importable():
        model = _call(_find(source), source)
    if options.weights is not None:
        weights.load_checkpoint(model, options.weights)
    low, high = _input_range(options)
    # The exporter folds batch normalisation itself where it follows a convolution in the trace.
    return _Subject(
        source,
        model,
        model,
        config.input.height,
        config.input.width,
        config.input.name or "images",
        config.head.outputs,
        low,
        high,
    )


@contextlib.contextmanager
def _current_directory_importable() -> Iterator[None]:
    path = str(Path.cwd())
    sys.path.insert(0, path)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(path)


def _find(source: str) -> Callable[[], Any]:
    module_name, _, attribute = source.partition(":")
    if not module_name or not attribute:
        raise ModelError(f"export source is {source!r}, expected package.module:factory")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # importing runs the user's code
        raise ModelError(
            f"module '{module_name}' of source '{source}' cannot be imported: {type(error).__name__}: "
            f"{_first_line(error)}; run in the folder that holds it, or install it"
        ) from error
    factory = getattr(module, attribute, None)
    if factory is None:
        own = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise ModelError(
            f"module '{module_name}' has no '{attribute}'; it has {', '.join(sorted(own)[:8]) or 'nothing callable'}"
        )
    if not callable(factory):
        raise ModelError(f"'{source}' is {type(factory).__name__}, expected a function that gives a torch.nn.Module")
    return factory  # type: ignore[no-any-return]


def _call(factory: Callable[[], Any], source: str) -> nn.Module:
    try:
        model = factory()
    except Exception as error:  # the user's code
        raise ModelError(f"'{source}' raised {type(error).__name__}: {_first_line(error)}") from error
    if not isinstance(model, nn.Module):
        raise ModelError(f"'{source}' gave {type(model).__name__}, expected a torch.nn.Module")
    if model.training:
        raise ModelError(f"'{source}' gave a module in training mode; call eval() on it in the factory")
    return model


def _input_range(options: ExportOptions) -> tuple[Float, Float]:
    if options.config is None:
        return np.zeros(3, np.float32), np.full(3, 255, np.float32)
    given = options.config.input
    mean, std = np.array(given.mean), np.array(given.std)
    return ((0 - mean) / std).astype(np.float32), ((255 * given.scale - mean) / std).astype(np.float32)


def _image(subject: _Subject, seed: int) -> Float:
    """float32 (3, H, W) with the statistics of a picture: areas of like colour, some noise, full range."""
    rng = np.random.default_rng(seed)
    cell = 16
    rows, columns = -(-subject.height // cell), -(-subject.width // cell)
    coarse = rng.uniform(0, 1, (3, rows, columns)).repeat(cell, axis=1).repeat(cell, axis=2)
    noisy = coarse[:, : subject.height, : subject.width] + rng.normal(0, 0.05, (3, subject.height, subject.width))
    low, high = subject.low[:, None, None], subject.high[:, None, None]
    return np.asarray(low + np.clip(noisy, 0, 1) * (high - low), np.float32)


def _output_names(subject: _Subject, example: Tensor) -> tuple[str, ...]:
    try:
        with torch.no_grad():
            given = tuple(_tensors(subject.reference(example)))
    except ModelError as error:
        raise ModelError(f"'{subject.source}': {error}") from None
    except Exception as error:  # the user's module
        raise ModelError(
            f"'{subject.source}' cannot run on an input {tuple(example.shape)}: {type(error).__name__}: "
            f"{_first_line(error)}; check input.size"
        ) from error
    by_place = given[0].startswith(":")
    if subject.output_names is not None and by_place:
        if len(subject.output_names) != len(given):
            raise ConfigError(
                f"head.outputs names {len(subject.output_names)} outputs, '{subject.source}' gives {len(given)}"
            )
        return subject.output_names
    if not by_place:
        missing = sorted(set(subject.output_names or ()) - set(given))
        if missing:
            raise ConfigError(f"head.outputs names {', '.join(missing)}, '{subject.source}' gives {', '.join(given)}")
        return given
    return ("output",) if len(given) == 1 else tuple(f"output_{index}" for index in range(len(given)))


def _compare(
    subject: _Subject, model: onnx.ModelProto, names: tuple[str, ...], batches: list[Float], tolerance: float
) -> tuple[OutputCheck, ...]:
    """Runs both and measures each output; the first output that is too far off is an error."""
    import onnxruntime as ort

    settings = ort.SessionOptions()
    settings.log_severity_level = 3
    worst: dict[str, OutputCheck] = {}
    try:
        session = ort.InferenceSession(model.SerializeToString(), settings, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's exceptions have no common base
        raise ModelError(f"export of '{subject.source}': onnxruntime refuses it: {_first_line(error)}") from error
    for batch in batches:
        with torch.no_grad():
            expected = [t.numpy() for t in _tensors(subject.reference(torch.from_numpy(batch))).values()]
        try:
            found = session.run(list(names), {subject.input_name: batch})
        except Exception as error:
            raise ModelError(
                f"export of '{subject.source}': the ONNX model does not run on a batch of {len(batch)}: "
                f"{_first_line(error)}"
            ) from error
        for name, want, got in zip(names, expected, found, strict=True):
            check = _measure(subject.source, name, want, np.asarray(got), tolerance)
            if name not in worst:
                worst[name] = check
            elif check.max_abs > worst[name].max_abs:
                worst[name] = OutputCheck(name, worst[name].shape, check.max_abs, check.mean_abs)
    return tuple(worst[name] for name in names)


def _measure(source: str, name: str, want: NDArray[Any], got: NDArray[Any], tolerance: float) -> OutputCheck:
    if want.shape != got.shape:
        raise ModelError(f"export of '{source}': output {name} is {got.shape} in ONNX and {want.shape} in torch")
    if not np.isfinite(want).all():
        raise ModelError(f"'{source}' gives values that are not finite in output {name}; check its weights")
    error = np.abs(want.astype(np.float64) - got.astype(np.float64))
    largest, mean = float(error.max(initial=0.0)), float(error.mean()) if error.size else 0.0
    allowed = tolerance * max(1.0, float(np.abs(want).max(initial=0.0)))
    if not largest <= allowed:
        raise ModelError(
            f"export of '{source}': output {name} differs from torch by {largest:.3g}, allowed is {allowed:.3g}; "
            "export with another --opset, or raise the tolerance if the difference is harmless"
        )
    return OutputCheck(name, tuple(want.shape), largest, mean)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
