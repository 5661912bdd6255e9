"""``trtdet export`` and ``trtdet init``: a model in ONNX, and its configuration."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtdet.cli.command import Command
from trtdet.cli.options import add_output, argument, check_suffix, config_if_given, reading
from trtdet.errors import ConfigError, ModelError
from trtdet.options.fields import input_size
from trtdet.progress import Console

if TYPE_CHECKING:
    from trtdet.evaluation.guessing import Guess


def _export_options(parser: ArgumentParser) -> None:
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


def _export(options: Namespace, console: Console) -> dict[str, Any]:
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


def _init_options(parser: ArgumentParser) -> None:
    argument(parser, "model MODEL", "a float ONNX detector", type=Path)
    add_output(parser, "model.yaml", "where the configuration is written")
    what = "pictures of what it detects, without annotations: the pixels' and the head's readings are tried on them"
    argument(parser, "--images DIR|LIST", what, type=Path)
    argument(parser, "--num-images N", "the most of them to look at; fewer, where they decide", default=128)
    what = "input height and width, where the model leaves them open"
    argument(parser, "--size HxW", what, type=reading(input_size))
    what = (
        "class names in the model's order: a file with a name a line, or the names with commas between them (default: "
        "those in the model's metadata)"
    )
    argument(parser, "--classes FILE|A,B,...", what)
    argument(parser, "--pictures DIR", "draw what is found in the images (default: no pictures)", type=Path)
    argument(parser, "--force", "replace a configuration that is there already")


def _init(options: Namespace, console: Console) -> dict[str, Any]:
    from trtdet.data import evenly, find_images
    from trtdet.evaluation.guessing import draft, guess_config
    from trtdet.exporter.onnx_file import UnknownHead
    from trtdet.files import write_atomically
    from trtdet.runtime.detector import Detector
    from trtdet.runtime.saving import save_predictions

    check_suffix(options.output, ".yaml", ".yml")
    if options.output.exists() and not options.force:
        raise ConfigError(f"'{options.output}' exists", "choose another -o, or replace it with --force")
    if options.num_images < 1:
        raise ConfigError(f"--num-images must be at least 1, got {options.num_images}")
    if options.pictures is not None and options.images is None:
        raise ConfigError("--pictures are drawn on images: give --images")
    images = evenly(find_images(options.images), options.num_images) if options.images else ()
    console.progress("trying what the model's numbers can mean", 0, 1)
    names = _names(options.classes) if options.classes else None
    try:
        guess = guess_config(options.model, images, size=options.size, classes=names, progress=console.progress)
    except UnknownHead as error:
        raise ModelError(error.problem, _drafted(options, draft(error.described, error.problem, names))) from None
    console.progress("trying what the model's numbers can mean", 1, 1)  # no bar where an answer is typed
    if "classes" in guess.unknown and not options.json and sys.stdin.isatty() and sys.stderr.isatty():
        console.line(
            f"class names: {guess.unknown['classes']}. A file, or names with commas; empty to write them later:"
        )
        while answer := _typed():
            try:
                guess = guess.named(_names(answer))
                break
            except ConfigError as error:
                console.warn(error)  # what the images said is not to be lost
    write_atomically(options.output, guess.text().encode())
    pictures: list[str] = []
    if options.pictures is not None:
        predictions = Detector.open(options.model, guess.config).predict(images, stream=True)
        pictures = [str(path) for path in save_predictions(predictions, options.pictures).pictures]
    _say(options, guess, console)
    return {
        "config": str(options.output),
        "origins": dict(guess.origins),
        "unknown": dict(guess.unknown),
        "note": guess.note,
        "looks": guess.looks.as_dict() if guess.looks else None,
        "sure": {question: round(answer.sure, 4) for question, answer in guess.answers.items()},
        "open": guess.open,
        "pictures": pictures,
    }


def _typed() -> str:
    """A line of standard input; empty at its end."""
    try:
        return input().strip()
    except EOFError:
        return ""


def _names(text: str) -> list[str]:
    path = Path(text)
    if "," not in text and path.is_file():
        try:
            return [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"--classes: '{text}' cannot be read: {error}",
                "give a text file (UTF-8) with a name a line, or A,B,...",
            ) from None
    if "," not in text and path.suffix:
        raise ConfigError(f"--classes: '{text}' does not exist", "give a file with a name a line, or A,B,...")
    return [name.strip() for name in text.split(",") if name.strip()]


def _drafted(options: Namespace, text: str) -> str:
    """Writes a draft beside the configuration's path unless one exists; returns the next step for the user."""
    from trtdet.files import write_atomically

    place = options.output.with_suffix(f".draft{options.output.suffix}")
    if place.exists() and not options.force:
        return f"finish the draft that is there, '{place}', as docs/heads.md tells, or replace it with --force"
    write_atomically(place, text.encode())
    return f"all else is in the draft '{place}': finish it as docs/heads.md tells, and give it with --config"


def _say(options: Namespace, guess: Guess, console: Console) -> None:
    looks = guess.looks
    console.say(guess.text().rstrip("\n"))
    console.say(guess.note)
    if looks is None:
        console.say("the pixels are read as is usual for such heads: give --images to try others")
    elif looks.verdict == "working":
        console.say(
            f"it looks like a working detector: {looks.boxes:.1f} confident detections an image on {looks.images} "
            f"images, {100 * looks.agreement:.0f} % of them go with the image when that is mirrored and shifted"
        )
    else:
        console.warn(looks.warning)
    for question, note in guess.open.items():
        console.warn(f"{question}: {note}; give more images, or see how the training reads its images")
    for key, note in guess.unknown.items():
        console.warn(f"{key}: {note}")
    wrote = f"wrote {options.output}" + (f", pictures in {options.pictures}" if options.pictures else "")
    console.say(f"{wrote}; next: trtdet build {options.model} --config {options.output} --images DIR -o BUNDLE")


EXPORT = Command(
    "export",
    summary="export a torch model to ONNX, checked against torch",
    add_options=_export_options,
    run=_export,
    examples=(
        ("ultralytics:yolov8n.pt -o yolov8n.onnx", "a checkpoint of Ultralytics"),
        ("yolox-s --weights yolox_s.pth -o yolox_s.onnx", "a published YOLOX"),
        ("package.module:factory --config c.yaml -o m.onnx", "any torch module"),
    ),
)
INIT = Command(
    "init",
    summary="write a configuration for an ONNX model, guessed and tried on images",
    add_options=_init_options,
    run=_init,
    examples=(
        ("m.onnx --images photos -o m.yaml", "guessed, and tried on photos"),
        ("m.onnx --classes helmet,head -o m.yaml", "with class names"),
    ),
)
