"""``trtdet export``: torch to ONNX."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from trtdet.cli.command import Command
from trtdet.cli.options import add_output, argument, config_if_given, reading
from trtdet.errors import ConfigError
from trtdet.options.fields import input_size
from trtdet.progress import Console


def _options(parser: ArgumentParser) -> None:
    what = (
        "yolox-nano|tiny|s|m|l|x, shapes, ultralytics:FILE.pt, yolov5:FILE.pt, hf:FOLDER, torchvision:NAME, "
        "model.onnx, or package.module:factory"
    )
    argument(parser, "source SOURCE", what)
    add_output(parser, "model.onnx", "where the ONNX model is written; model.yaml and model.parity.json lie beside it")
    what = "a checkpoint of the source, loaded without running code of it"
    argument(parser, "--weights FILE", what, type=Path)
    parser.add_argument("--config", help="YAML file or shipped name; required for package.module:factory")
    argument(parser, "--size HxW", "input height and width (default: as trained)", type=reading(input_size))
    what = "of a network with two heads (YOLOv10, YOLO26), the one that needs NMS (default: the one that does not)"
    argument(parser, "--one-to-many", what)
    argument(parser, "--dynamic-batch", "leave the batch size open")
    opset = parser.add_mutually_exclusive_group()
    argument(opset, "--opset N", "ONNX opset (default: 17, which suits every backend)", type=int)
    what = (
        "the newest opset that the parser of this backend reads and the exporter writes, such as tensorrt-rtx or "
        "tensorrt:8.6; without a version, of the one installed"
    )
    argument(opset, "--backend NAME[:VERSION]", what)
    what = (
        "of torch: torchscript traces, dynamo reads the program and needs onnxscript (default: auto, which is "
        "torchscript, and dynamo where that fails)"
    )
    argument(parser, "--exporter", what, default="auto", choices=("auto", "torchscript", "dynamo"))
    argument(parser, "--images DIR|LIST", "compare on some of these (default: on made-up images)", type=Path)
    argument(parser, "--tolerance X", "largest difference to torch's outputs that is accepted", default=1e-3)


def _run(options: Namespace, console: Console) -> dict[str, Any]:
    from dataclasses import asdict

    from trtdet.building.confirming import confirm
    from trtdet.exporter import ExportOptions, export

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
        confirm=confirm,
    )
    reference = "the original" if options.source.lower().endswith(".onnx") else "torch"
    for output in report.outputs:
        shape = "x".join(map(str, output.shape))
        difference = f"largest difference to {reference} {output.max_abs:.2e}, mean {output.mean_abs:.2e}"
        console.say(f"{output.name} {shape}: {difference}")
    detections = report.detections
    if detections is None or report.undetected:
        hint = "; give some with --images" if detections is not None else ""
        console.say(f"final detections were not compared: {report.undetected}{hint}")
    else:
        ties = f", {detections.ties} differ by a tie" if detections.ties else ""
        console.say(
            f"final detections on {detections.images} images: {detections.matched} of {detections.torch} of "
            f"{reference} are the model's{ties}; largest difference of scores {detections.max_score:.2e}, of corners "
            f"{detections.max_box:.2e} pixels"
        )
    for note in report.notes:
        console.say(note)
    files = (report.path, report.external_data, report.config, report.parity)
    console.say(f"wrote {', '.join(str(path) for path in files if path)}")
    result: dict[str, Any] = json.loads(json.dumps(asdict(report), default=str))
    return result


def _opset(options: Namespace) -> int:
    """The requested opset, given as a number or by the backend that will read the file.

    Raises:
        BackendError: the backend is unknown, or its version is needed and unknown.
        ConfigError: the source has its own opset, or the backend reads none that the exporter writes.
    """
    from trtdet.backends import library_named
    from trtdet.exporter import OPSETS, ExportOptions

    if options.backend is None:
        return ExportOptions.opset if options.opset is None else int(options.opset)
    if options.source.lower().endswith(".onnx"):
        raise ConfigError("--backend chooses an opset, and a model.onnx keeps its own; trtdet build rewrites it")
    name, _, version = options.backend.partition(":")
    return min(OPSETS[-1], library_named(name).newest_opset(version) or OPSETS[-1])


COMMAND = Command(
    "export", summary="export a torch model to ONNX, checked against torch", add_options=_options, run=_run
)
