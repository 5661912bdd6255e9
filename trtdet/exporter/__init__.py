"""torch -> ONNX: exports a detector with its configuration and checks it against torch before writing.

Only ``export`` imports torch, when it is called.
"""

from __future__ import annotations

import hashlib
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
from trtdet.files import prepare_target, sha256_file, write_together

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
"""The shapes detector, with configuration ``shapes``; ``shapes.json`` holds its training recipe and its scores."""

SOURCES: tuple[str, ...] = ("yolox-nano", "yolox-tiny", "yolox-s", "yolox-m", "yolox-l", "yolox-x", "shapes")
"""Built-in sources."""

LOADERS = {
    "ultralytics": ("FILE.pt", "ultralytics_models"),
    "yolov5": ("FILE.pt", "yolov5"),
    "hf": ("FOLDER", "hugging_face"),
    "torchvision": ("NAME", "torchvision_models"),
}
"""By the prefix before the colon of a source: what follows the colon, and the module whose ``load(place, options)``
returns the SourceModel. Any other prefix is ``package.module:factory``."""

OPSETS = range(11, 21)
"""From the first opset whose Resize defines its sampling to the last opset of the tracing exporter."""

UNDETECTED = "nothing was detected on the images that were tried"
"""Why the comparison of final detections may say nothing."""

_WRITTEN = "# Written by trtdet export"
"""Start of a configuration file that may be overwritten, because the user did not write it."""


Confirm = Callable[["onnx.ModelProto", "Config", Sequence[Path]], "Confirmed"]
"""Tries the guessed configuration of a float model on images."""


@dataclass(frozen=True)
class ExportOptions:
    """Options of an export.

    Attributes:
        weights: a state dict saved with ``torch.save``, bare or under the key ``model``. ``yolox-*`` needs it;
            ``shapes`` has its own weights, and a factory may load them itself.
        config: input size and name, classes and head. The default is the published configuration of a built-in source
            or the one in the checkpoint. A factory needs it.
        dynamic_batch: whether the model has a dynamic batch axis named ``batch`` instead of batch 1.
        opset: ONNX opset, 11 to 20.
        tolerance: limit of the difference to torch. Outputs: maximum absolute error <= tolerance * max(1, maximum
            absolute value). Final detections: the same for scores; for corners, this share of the longer input side.
        random_weights: export a ``yolox-*`` or ``torchvision:`` source without a checkpoint, for tests and timing.
        size: height and width of the input in pixels; overrides the configuration and the checkpoint.
        one_to_many: if the network also has a one-to-one head, export the other head, which needs NMS.
        exporter: torch's exporter: ``torchscript`` traces, ``dynamo`` reads the program, ``auto`` tries both in turn.
        images: a folder or a list of images, a few of which are compared on. None generates images, on which most
            detectors find nothing.
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
    """The most likely configuration after trying images, with its confidence in words and as plain values."""

    config: Config
    note: str
    evidence: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class ParityComparison:
    """Difference between an exported model and its source; ``notes`` are on the export, for the user.

    ``confirmed``: confidence in a guessed configuration; None if nothing was guessed or there were no images.
    """

    outputs: tuple[OutputCheck, ...]
    detections: DetectionCheck | None  # final detections; None if the outputs do not fit the configuration
    undetected: str  # why the comparison of final detections says nothing; otherwise empty
    notes: tuple[str, ...] = ()
    exporter: str = ""  # torch's exporter, ``torchscript`` or ``dynamo``; empty for ONNX sources
    confirmed: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class ExportReport(ParityComparison):
    """The written files, and the difference between the model and its source.

    ``sha256`` is that of the model, hexadecimal. ``config`` is None if the options have a configuration, ``parity`` is
    the JSON file of this report, and ``external_data`` has the weights of a model over 2 GB.
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

    The model has the outputs of the torch module. Its outputs in onnxruntime and its final detections are compared with
    torch's on each image, and with a dynamic batch also on two images at once. Only a model that passes is written;
    otherwise no file changes. The files are ``model.onnx``, ``model.parity.json`` and, without a configuration in the
    options, ``model.yaml``.

    Args:
        source: one of SOURCES; ``ultralytics:FILE.pt``, a checkpoint of that package; ``yolov5:FILE.pt``, a checkpoint
            of classic YOLOv5; ``hf:FOLDER``, a folder written by ``save_pretrained`` of transformers or an id of the
            Hugging Face hub; ``torchvision:NAME``, a detector of that package; the path of an ONNX model, which is
            simplified and keeps its opset; or ``package.module:factory``. ``factory()`` returns a ``torch.nn.Module``
            in evaluation mode that takes float32 (B, 3, H, W) and returns a tensor, or a tuple, list or dict of
            tensors, each with the batch first. The current directory is importable.
        output: the ONNX file.
        confirm: finds the most likely configuration of an ONNX model by trying the images, such as
            :func:`trtdet.building.confirming.confirm`.

    Raises:
        ConfigError: an option is out of range or missing.
        ModelError: torch is not installed, the source or its weights are unusable, or the model differs from torch.
        DataError: the images cannot be read.
        OutputError: a file cannot be written, or ``model.yaml`` exists and the user wrote it.
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
    import onnxruntime

    from trtdet.exporter import trials
    from trtdet.passes.protobuf import opset_of

    versions = {"trtdet": __version__, "onnxruntime": str(onnxruntime.__version__)}
    if not is_onnx:
        versions["torch"] = str(sys.modules["torch"].__version__)
    with trials.serialised(model, output) as contents:
        written = contents[output]
        report = ExportReport(
            **vars(comparison),
            path=output,
            opset=opset_of(model),
            sha256=sha256_file(written) if isinstance(written, Path) else hashlib.sha256(written).hexdigest(),
            config=written_config,
            parity=parity,
            external_data=next((path for path in contents if path != output), None),
        )
        content = {"source": source, "versions": versions, "tolerance": options.tolerance, **asdict(report)}
        contents[parity] = (json.dumps(content, indent=2, default=str) + "\n").encode()
        if written_config is not None:
            contents[written_config] = _configuration(source, config).encode()
        write_together(contents)
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
