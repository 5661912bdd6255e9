"""torch -> ONNX: a detector with its configuration, checked against torch before it is written.

This module imports torch only when ``export`` is called.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trtdet import __version__
from trtdet.errors import ConfigError, ModelError, OutputError
from trtdet.exporter.parity import DetectionCheck, OutputCheck
from trtdet.files import prepare_target, write_atomically

if TYPE_CHECKING:
    import onnx

    from trtdet.config import Config

__all__ = [
    "OPSETS",
    "SHAPES_MODEL",
    "SOURCES",
    "Confirm",
    "Confirmed",
    "DetectionCheck",
    "ExportOptions",
    "ExportReport",
    "OutputCheck",
    "ParityComparison",
    "export",
]

SHAPES_MODEL = Path(__file__).with_name("shapes.onnx")
"""The shapes detector: configuration ``shapes``; its recipe and its scores are in ``shapes.json``."""

SOURCES: tuple[str, ...] = ("yolox-nano", "yolox-tiny", "yolox-s", "yolox-m", "yolox-l", "yolox-x", "shapes")
"""The sources with a name."""

LOADERS = {
    "ultralytics": ("FILE.pt", "ultralytics_models"),
    "yolov5": ("FILE.pt", "yolov5"),
    "hf": ("FOLDER", "hugging_face"),
    "torchvision": ("NAME", "torchvision_models"),
}
"""By the prefix of a source, which a colon ends: what follows, and the module whose ``load(place, options)`` takes that
and gives the SourceModel, or raises a ModelError or a ConfigError. Any other prefix is ``package.module:factory``."""

OPSETS = range(11, 21)
"""From the first opset whose Resize defines its sampling to the last that the tracing exporter writes."""

_WRITTEN = "# Written by trtdet export"
"""How a configuration begins that may be replaced: it is not the user's own."""


Confirm = Callable[["onnx.ModelProto", "Config", Sequence[Path]], "Confirmed"]
"""Tries the guessed configuration of a float model on images."""


@dataclass(frozen=True)
class ExportOptions:
    """How to export.

    Attributes:
        weights: a checkpoint, a state dict saved with ``torch.save`` bare or under the key ``model``. The ``yolox-*``
            sources need a checkpoint; ``shapes`` has its own; a factory may have loaded its weights itself.
        config: the detector: the input's size and name, the classes, the head. Without it a named source has the
            published values, and a checkpoint says its own. A factory needs it.
        dynamic_batch: the batch is an axis named ``batch`` in place of 1.
        opset: of the ONNX model, 11 to 20.
        tolerance: how far an output may be from torch's: maximum absolute error <= tolerance * max(1, maximum
            absolute value). Of final detections: a score by this, a corner by this share of the input's longer side.
        random_weights: export a ``yolox-*`` or ``torchvision:`` source with no checkpoint, for tests and for timing.
        size: height and width in pixels of the network's input, in place of the configuration's or the checkpoint's.
        one_to_many: of a network with a one-to-one head beside, the other head, which needs suppression.
        exporter: of torch: ``torchscript`` traces, ``dynamo`` reads the program; ``auto`` takes the first, and the
            second where the first fails.
        images: a folder or a list of images to compare on, of which a few are taken; None makes some up, on which few
            detectors find anything.
    """

    weights: Path | str | None = None
    config: Config | None = None
    dynamic_batch: bool = False
    opset: int = 17
    tolerance: float = 1e-3
    random_weights: bool = False
    size: tuple[int, int] | None = None
    one_to_many: bool = False
    exporter: Literal["auto", "torchscript", "dynamo"] = "auto"
    images: Path | str | None = None


@dataclass(frozen=True)
class Confirmed:
    """The likeliest configuration, tried on images; how sure that is in words, and as plain values."""

    config: Config
    note: str
    evidence: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class ParityComparison:
    """How close an exported model is to its source, and how it came about.

    Attributes:
        detections: the final ones; None where the outputs do not fit the configuration.
        undetected: why final detections say nothing; empty where they do.
        notes: what the user should know about how the model came about.
        exporter: of torch, that wrote the model: ``torchscript`` or ``dynamo``; empty where none did.
        confirmed: how sure the configuration is that was guessed of an ONNX model; None where nothing was guessed, or
            no images were given.
    """

    outputs: tuple[OutputCheck, ...]
    detections: DetectionCheck | None
    undetected: str
    notes: tuple[str, ...] = ()
    exporter: str = ""
    confirmed: dict[str, Any] | None = None

    @classmethod
    def of(cls, outputs: tuple[OutputCheck, ...], check: DetectionCheck) -> ParityComparison:
        """The result where the outputs fit the configuration."""
        undetected = "" if check.torch else "nothing was detected on the images that were tried"
        return cls(outputs=outputs, detections=check, undetected=undetected)


@dataclass(frozen=True, kw_only=True)
class ExportReport(ParityComparison):
    """The files that were written, and how close the model is to its source.

    Attributes:
        sha256: of the model, hexadecimal.
        config: the configuration that was written; None where one was given.
        parity: the same report as a file.
        external_data: the weights of a model over 2 GB.
    """

    path: Path
    opset: int
    sha256: str
    config: Path | None
    parity: Path
    external_data: Path | None


def export(
    source: str, output: Path | str, options: ExportOptions = ExportOptions(), confirm: Confirm | None = None
) -> ExportReport:
    """Exports a detector to ONNX, with its configuration and a parity report.

    The outputs are those of the module. They are compared with torch's in onnxruntime, as they are and as final
    detections, on each of the images and with a dynamic batch on two at a time as well. Only a model that passes is
    written; otherwise existing files are untouched. Beside ``model.onnx`` these are ``model.parity.json`` and, where no
    configuration was given, ``model.yaml``.

    Args:
        source: one of SOURCES; ``ultralytics:FILE.pt``, a checkpoint of that package; ``yolov5:FILE.pt``, a checkpoint
            of classic YOLOv5; ``hf:FOLDER``, a folder that ``save_pretrained`` of transformers wrote or an id of the
            Hugging Face hub; ``torchvision:NAME``, a detector of that package; the path of an ONNX model, which is
            simplified and keeps its opset; or
            ``package.module:factory`` where ``factory()`` gives a ``torch.nn.Module`` in evaluation mode that takes
            float32 (B, 3, H, W) and gives a tensor, a tuple or list of tensors, or a dict of tensors, each with the
            batch first. The current directory is importable.
        output: the ONNX file.
        options: see ExportOptions.
        confirm: gives the likeliest configuration on the images, of an ONNX model whose configuration is guessed, such
            as :func:`trtdet.building.confirming.confirm`.

    Raises:
        ConfigError: an option is out of range or missing.
        ModelError: torch is not installed, the source or its weights are unusable, or the exported model
            differs from torch's.
        DataError: the images cannot be read.
        OutputError: a file cannot be written, or ``model.yaml`` is the user's own.
    """
    output = Path(output)
    is_onnx = source.lower().endswith(".onnx")
    _check(source, options, is_onnx=is_onnx)
    written_config = output.with_suffix(".yaml") if options.config is None else None
    old = written_config.read_bytes() if written_config is not None and written_config.is_file() else None
    if old is not None and not old.startswith(_WRITTEN.encode()):
        raise OutputError(
            f"'{written_config}' would be written beside the model, and was not written by trtdet export",
            f"give it with --config {written_config} if it describes this model, or choose another -o",
        )
    parity = output.with_suffix(".parity.json")
    for path in (written_config, parity):
        if path is not None:
            prepare_target(path)
    if is_onnx:
        if output.exists() and Path(source).exists() and output.samefile(source):
            raise OutputError(f"'{output}' is the model that is read, which would be replaced", "choose another -o")
        from trtdet.exporter import onnx_file

        model, config, comparison = onnx_file.convert(source, options, confirm)
    else:
        try:
            import torch  # noqa: F401
        except ImportError:
            raise ModelError(
                "export needs torch, which is not installed; install it with: pip install 'trtdet[export]'"
            ) from None
        from trtdet.exporter import convert

        model, config, comparison = convert.convert(source, options)
    from trtdet.exporter import trials

    sha256, external_data = trials.write(model, output)
    report = ExportReport(
        **vars(comparison),
        path=output,
        opset=next(entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")),
        sha256=sha256,
        config=written_config,
        parity=parity,
        external_data=external_data,
    )
    if written_config is not None:
        write_atomically(written_config, _configuration(source, config).encode())
    import onnxruntime

    versions = {"trtdet": __version__, "onnxruntime": str(onnxruntime.__version__)}
    if "torch" in sys.modules:
        versions["torch"] = str(sys.modules["torch"].__version__)
    content = {"source": source, "versions": versions, "tolerance": options.tolerance, **asdict(report)}
    write_atomically(parity, (json.dumps(content, indent=2, default=str) + "\n").encode())
    return report


def _configuration(source: str, config: Config) -> str:
    import yaml

    from trtdet.config import COCO_CLASSES

    content: dict[str, Any] = config.model_dump(mode="json", exclude_defaults=True)
    if config.classes == COCO_CLASSES:
        content["classes"] = "coco"
    if not config.nms.suppresses and set(content["nms"]) == {"iou_threshold"}:
        content["nms"] = "none"
    body = yaml.safe_dump(content, sort_keys=False, allow_unicode=True, default_flow_style=None, width=110)
    return f"{_WRITTEN} {json.dumps(source)}.\n{body}"


def _check(source: str, options: ExportOptions, is_onnx: bool) -> None:
    """Refuses a source that does not exist or lacks what it needs, and options out of range."""
    prefix, colon, _ = source.partition(":")
    if source not in SOURCES and not colon and not is_onnx:
        if source.lower().endswith((".pt", ".pth")):
            raise ModelError(
                f"export source is the checkpoint {source!r}, which does not say what wrote it",
                f"give ultralytics:{source} for a checkpoint of YOLOv5u or later, yolov5:{source} of classic YOLOv5, "
                f"or the name of a model with --weights {source}",
            )
        raise ModelError(
            f"export source is {source!r}, allowed are {', '.join(SOURCES)}, "
            f"{', '.join(f'{prefix}:{place}' for prefix, (place, _) in LOADERS.items())}, the path of a model.onnx, or "
            "package.module:factory for a model of your own"
        )
    if colon and prefix not in LOADERS and options.config is None and not is_onnx:
        raise ConfigError(f"export of '{source}' needs the input's size and name; give a configuration with --config")
    if source.startswith("yolox-") and not (is_onnx or options.weights is not None or options.random_weights):
        raise ModelError(
            f"export of {source} needs its weights, got none; give the checkpoint published with YOLOX's releases, "
            f"or your own, with --weights {source.replace('-', '_')}.pth"
        )
    if options.one_to_many and not source.startswith("ultralytics:"):
        raise ConfigError(f"--one-to-many chooses a head of a checkpoint of ultralytics; leave it out for {source}")
    if options.opset not in OPSETS:
        raise ConfigError(
            f"--opset is {options.opset}, allowed are {OPSETS[0]} to {OPSETS[-1]}; 17 suits every backend"
        )
    if not (math.isfinite(options.tolerance) and options.tolerance > 0):
        raise ConfigError(f"the export tolerance is {options.tolerance}, allowed is a finite number above 0")
