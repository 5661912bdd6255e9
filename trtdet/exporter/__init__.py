"""torch -> ONNX: a detector's raw head with batch normalisation folded, checked against torch before it is written.

This module imports torch only when ``export`` is called.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trtdet.errors import ConfigError, ModelError
from trtdet.files import write_atomically

if TYPE_CHECKING:
    from trtdet.config import Config

__all__ = ["SHAPES_MODEL", "SOURCES", "ExportOptions", "ExportReport", "OutputCheck", "export"]

SHAPES_MODEL = Path(__file__).with_name("shapes.onnx")
"""The shapes detector: configuration ``shapes``; its recipe and its scores are in ``shapes.json``."""

SOURCES: tuple[str, ...] = ("yolox-nano", "yolox-tiny", "yolox-s", "yolox-m", "yolox-l", "yolox-x", "shapes")
"""The sources with a name; any other is ``package.module:factory``."""

_OPSETS = range(11, 21)
"""From the first opset whose Resize defines its sampling to the last that the tracing exporter writes."""


@dataclass(frozen=True)
class ExportOptions:
    """How to export.

    Attributes:
        weights: a checkpoint, a state dict saved with ``torch.save`` bare or under the key ``model``. The ``yolox-*``
            sources need a checkpoint; ``shapes`` has its own; a factory may have loaded its weights itself.
        config: the detector. It gives the input's size and name and the number of classes; without it a named source
            has the published values (COCO's 80 classes). A factory needs it.
        dynamic_batch: the batch is an axis named ``batch`` in place of 1.
        opset: of the ONNX model, 11 to 20.
        tolerance: how far an output may be from torch's: maximum absolute error <= tolerance * max(1, maximum
            absolute value).
        random_weights: export a ``yolox-*`` source with no checkpoint, for tests and for timing.
    """

    weights: Path | None = None
    config: Config | None = None
    dynamic_batch: bool = False
    opset: int = 17
    tolerance: float = 1e-3
    random_weights: bool = False


@dataclass(frozen=True)
class OutputCheck:
    """One output of the written model beside torch's."""

    name: str
    shape: tuple[int, ...]
    """With a batch of 1."""
    max_abs: float
    """Largest absolute error over all inputs tried."""
    mean_abs: float
    """Mean absolute error of the input where it was largest."""


@dataclass(frozen=True)
class ExportReport:
    """The file that was written, and how close it is to torch."""

    path: Path
    opset: int
    sha256: str
    """Of the file, hexadecimal."""
    outputs: tuple[OutputCheck, ...]


def export(source: str, output: Path, options: ExportOptions = ExportOptions()) -> ExportReport:
    """Exports a detector to ONNX.

    The outputs are those of the module, not decoded. They are compared with torch's in onnxruntime on two
    random images of the range that the configuration gives, and with a dynamic batch on a batch of two as well. Only
    a model that passes is written, in one step; otherwise an existing file at ``output`` is untouched.

    Args:
        source: one of SOURCES, or ``package.module:factory`` where ``factory()`` gives a ``torch.nn.Module`` in
            evaluation mode that takes float32 (B, 3, H, W) and gives a tensor, a tuple or list of tensors, or a dict
            of tensors, each with the batch first. The current directory is importable.
        output: the ONNX file.
        options: see ExportOptions.

    Raises:
        ConfigError: an option is out of range or missing.
        ModelError: torch is not installed, the source or its weights are unusable, or the exported model
            differs from torch's.
        OutputError: ``output`` cannot be written.
    """
    _check(source, options)
    try:
        import torch  # noqa: F401
    except ImportError:
        raise ModelError(
            "export needs torch, which is not installed; install it with: pip install 'trtdet[export]'"
        ) from None
    from trtdet.exporter import convert

    model, outputs = convert.convert(source, options)
    data = model.SerializeToString()
    write_atomically(output, data)
    opset = next(entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx"))
    return ExportReport(output, opset, hashlib.sha256(data).hexdigest(), outputs)


def _check(source: str, options: ExportOptions) -> None:
    if source not in SOURCES and ":" not in source:
        raise ModelError(
            f"export source is {source!r}, allowed are {', '.join(SOURCES)}, or package.module:factory for a model of "
            "your own"
        )
    if options.opset not in _OPSETS:
        raise ConfigError(
            f"--opset is {options.opset}, allowed are {_OPSETS[0]} to {_OPSETS[-1]}; 17 suits every backend"
        )
    if not (math.isfinite(options.tolerance) and options.tolerance > 0):
        raise ConfigError(f"the export tolerance is {options.tolerance}, allowed is a finite number above 0")
    if ":" in source and options.config is None:
        raise ConfigError(f"export of '{source}' needs the input's size and name; give a configuration with --config")
    if source.startswith("yolox-") and options.weights is None and not options.random_weights:
        name = source.replace("-", "_")
        raise ModelError(
            f"export of {source} needs its weights, got none; give the checkpoint published with YOLOX's releases, "
            f"or your own, with --weights {name}.pth"
        )
