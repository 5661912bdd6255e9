"""``trtdet export``: torch to ONNX."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtdet.cli.command import Command
from trtdet.cli.options import add_output, config_if_given, size
from trtdet.errors import ConfigError
from trtdet.progress import Console

if TYPE_CHECKING:
    from trtdet.exporter import ExportReport


def _options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="yolox-nano|tiny|s|m|l|x, shapes, ultralytics:FILE.pt, yolov5:FILE.pt, hf:FOLDER, "
        "torchvision:NAME, model.onnx, or package.module:factory",
    )
    add_output(parser, "model.onnx", "where the ONNX model is written; model.yaml and model.parity.json lie beside it")
    parser.add_argument(
        "--weights", type=Path, metavar="FILE", help="a checkpoint of the source, loaded without running code of it"
    )
    parser.add_argument("--config", help="YAML file or shipped name; required for package.module:factory")
    parser.add_argument("--size", type=size, metavar="HxW", help="height and width of the input (default: as trained)")
    parser.add_argument(
        "--one-to-many",
        action="store_true",
        help="of a network with two heads (YOLOv10, YOLO26), the one that needs NMS (default: the one that does not)",
    )
    parser.add_argument("--dynamic-batch", action="store_true", help="leave the batch size open")
    opset = parser.add_mutually_exclusive_group()
    opset.add_argument("--opset", type=int, metavar="N", help="ONNX opset (default: 17, which suits every backend)")
    opset.add_argument(
        "--backend",
        metavar="NAME[:VERSION]",
        help="the newest opset that the parser of this backend reads and the exporter writes, such as tensorrt-rtx or "
        "tensorrt:8.6; without a version, of the one installed",
    )
    parser.add_argument(
        "--exporter",
        default="auto",
        choices=("auto", "torchscript", "dynamo"),
        help="of torch: torchscript traces, dynamo reads the program and needs onnxscript (default: auto, which is "
        "torchscript, and dynamo where that fails)",
    )
    parser.add_argument(
        "--images", type=Path, metavar="DIR|LIST", help="compare on some of these (default: on made-up images)"
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        default=1e-3,
        metavar="X",
        help="largest difference to torch's outputs that is accepted (default: %(default)s)",
    )


def _run(options: Namespace, console: Console) -> dict[str, Any]:
    from dataclasses import asdict

    from trtdet.exporter import ExportOptions, export
    from trtdet.pipeline.confirming import confirm

    report = export(
        options.source,
        options.output,
        ExportOptions(
            weights=options.weights,
            config=config_if_given(options),
            dynamic_batch=options.dynamic_batch,
            opset=_opset(options),
            tolerance=options.tolerance,
            size=options.size,
            one_to_many=options.one_to_many,
            exporter=options.exporter,
            images=options.images,
        ),
        confirm,
    )
    reference = "the original" if options.source.lower().endswith(".onnx") else "torch"
    for output in report.outputs:
        shape = "x".join(map(str, output.shape))
        difference = f"largest difference to {reference} {output.max_abs:.2e}, mean {output.mean_abs:.2e}"
        console.say(f"{output.name} {shape}: {difference}")
    console.say(_detections(report, reference))
    for note in report.notes:
        console.say(note)
    files = (report.path, report.external_data, report.config, report.parity)
    console.say(f"wrote {', '.join(str(path) for path in files if path)}")
    result: dict[str, Any] = json.loads(json.dumps(asdict(report), default=str))
    return result


def _opset(options: Namespace) -> int:
    """The opset that was asked for, by its number or by the backend that is to read the file.

    Raises:
        BackendError: no such backend, or its version is needed and not known.
        ConfigError: the source has its own, or the backend reads none that is written.
    """
    from trtdet.backends import library_named
    from trtdet.exporter import OPSETS, ExportOptions

    if options.backend is None:
        return ExportOptions.opset if options.opset is None else int(options.opset)
    if options.source.lower().endswith(".onnx"):
        raise ConfigError("--backend chooses an opset, and a model.onnx keeps its own; trtdet build rewrites it")
    name, _, version = options.backend.partition(":")
    return min(OPSETS[-1], library_named(name).newest_opset(version) or OPSETS[-1])


def _detections(report: ExportReport, reference: str) -> str:
    found = report.detections
    if found is None or report.undetected:
        hint = "; give some with --images" if found is not None else ""
        return f"final detections were not compared: {report.undetected}{hint}"
    ties = f", {found.ties} differ by a tie" if found.ties else ""
    return (
        f"final detections on {found.images} images: {found.matched} of {found.torch} of {reference} are the model's"
        f"{ties}; largest difference of scores {found.max_score:.2e}, of corners {found.max_box:.2e} pixels"
    )


COMMAND = Command("export", "torch model to ONNX, checked against torch", _options, _run)
