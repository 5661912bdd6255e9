"""``trtdet init``: drafts a configuration for the user's own model."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtdet.cli.command import Command
from trtdet.cli.options import add_output, argument, check_suffix, reading
from trtdet.errors import ConfigError, ModelError
from trtdet.options.fields import input_size
from trtdet.progress import Console

if TYPE_CHECKING:
    from trtdet.evaluation.guessing import Guess


def _options(parser: ArgumentParser) -> None:
    argument(parser, "model MODEL", "a float ONNX detector", type=Path)
    add_output(parser, "model.yaml", "where the configuration is written")
    what = "pictures of what it detects, without annotations: order of colours, scale and resizing are tried on them"
    argument(parser, "--images DIR|LIST", what, type=Path)
    argument(parser, "--num-images N", "how many of them to look at", default=16)
    what = "input height and width, where the model leaves them open"
    argument(parser, "--size HxW", what, type=reading(input_size))
    what = (
        "class names in the model's order: a file with a name a line, or the names with commas between them (default: "
        "those in the model's metadata)"
    )
    argument(parser, "--classes FILE|A,B,...", what)
    argument(parser, "--pictures DIR", "draw what is found in the images (default: no pictures)", type=Path)
    argument(parser, "--force", "replace a configuration that is there already")


def _run(options: Namespace, console: Console) -> dict[str, Any]:
    from trtdet.data import evenly, find_images
    from trtdet.evaluation.guessing import draft, guess_config
    from trtdet.exporter.onnx_file import UnknownHead
    from trtdet.files import write_atomically
    from trtdet.runtime.detector import Detector
    from trtdet.runtime.pictures import infer

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
        guess = guess_config(options.model, images, size=options.size, classes=names)
    except UnknownHead as error:
        raise ModelError(error.problem, _drafted(options, draft(error.described, error.problem, names))) from None
    if "classes" in guess.unknown and not options.json and sys.stdin.isatty() and sys.stderr.isatty():
        console.line(
            f"class names: {guess.unknown['classes']}. A file, or names with commas; empty to write them later:"
        )
        if answer := input().strip():
            guess = guess_config(options.model, images, size=options.size, classes=_names(answer))
    write_atomically(options.output, guess.text().encode())
    console.progress("trying what the model's numbers can mean", 1, 1)
    pictures: list[str] = []
    if options.pictures is not None:
        result = infer(Detector.open(options.model, guess.config), images, options.pictures)
        pictures = [str(path) for path in result.pictures]
    _say(options, guess, console)
    return {
        "config": str(options.output),
        "origins": dict(guess.origins),
        "unknown": dict(guess.unknown),
        "looks": guess.looks.as_dict() if guess.looks else None,
        "pictures": pictures,
    }


def _names(text: str) -> list[str]:
    path = Path(text)
    if "," not in text and path.is_file():
        return [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
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
    if looks is None:
        console.say("the pixels are read as is usual for such heads: give --images to try others")
    elif looks.obstacle:
        console.warn(f"it could not be tried on images: {looks.obstacle}")
    elif looks.warning:
        console.warn(looks.warning)
    else:
        console.say(
            f"it looks like a working detector: {looks.boxes:.1f} confident detections an image on {looks.images} "
            f"images, {100 * looks.agreement:.0f} % of them in the mirror images too"
        )
    for key, note in guess.unknown.items():
        console.warn(f"{key}: {note}")
    wrote = f"wrote {options.output}" + (f", pictures in {options.pictures}" if options.pictures else "")
    console.say(f"{wrote}; next: trtdet build {options.model} --config {options.output} --images DIR -o BUNDLE")


COMMAND = Command(
    "init",
    summary="write a configuration for an ONNX model, guessed and tried on images",
    add_options=_options,
    run=_run,
)
