"""``trtdet init``: a configuration for a model of one's own."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtdet.cli.command import Command
from trtdet.cli.options import add_output, check_suffix, size
from trtdet.errors import ConfigError, ModelError
from trtdet.progress import Console

if TYPE_CHECKING:
    from trtdet.evaluation.guessing import Guess


def _options(parser: ArgumentParser) -> None:
    parser.add_argument("model", type=Path, metavar="MODEL", help="a float ONNX detector")
    add_output(parser, "model.yaml", "where the configuration is written")
    parser.add_argument(
        "--images",
        type=Path,
        metavar="DIR|LIST",
        help="pictures of what it detects, without annotations: order of colours, scale and resizing are tried on them",
    )
    parser.add_argument(
        "--num-images", type=int, default=16, metavar="N", help="how many of them to look at (default: %(default)s)"
    )
    parser.add_argument(
        "--size", type=size, metavar="HxW", help="height and width of the input, for a model that leaves them open"
    )
    parser.add_argument(
        "--classes",
        metavar="FILE|A,B,...",
        help="class names in the model's order: a file with a name a line, or the names with commas between them "
        "(default: those in the model's metadata)",
    )
    parser.add_argument(
        "--pictures", type=Path, metavar="DIR", help="draw what is found in the images (default: no pictures)"
    )
    parser.add_argument("--force", action="store_true", help="replace a configuration that is there already")


def _run(options: Namespace, console: Console) -> dict[str, Any]:
    from trtdet.data import evenly, find_images
    from trtdet.evaluation.guessing import draft, guess_config
    from trtdet.exporter.recognition import UnknownHead
    from trtdet.files import write_atomically

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
        found = guess_config(options.model, images, size=options.size, classes=names)
    except UnknownHead as error:
        raise ModelError(error.problem, _drafted(options, draft(error.described, error.problem, names))) from None
    if "classes" in found.unknown and not options.json and sys.stdin.isatty() and sys.stderr.isatty():
        console.line(
            f"class names: {found.unknown['classes']}. A file, or names with commas; empty to write them later:"
        )
        if answer := input().strip():
            found = guess_config(options.model, images, size=options.size, classes=_names(answer))
    write_atomically(options.output, found.text().encode())
    console.progress("trying what the model's numbers can mean", 1, 1)
    pictures = _drawn(options, found, images)
    _say(options, found, console)
    return {
        "config": str(options.output),
        "origins": dict(found.origins),
        "unknown": dict(found.unknown),
        "looks": found.looks.as_dict() if found.looks else None,
        "pictures": pictures,
    }


def _names(given: str) -> list[str]:
    path = Path(given)
    if "," not in given and path.is_file():
        return [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if "," not in given and path.suffix:
        raise ConfigError(f"--classes: '{given}' does not exist", "give a file with a name a line, or A,B,...")
    return [name.strip() for name in given.split(",") if name.strip()]


def _drafted(options: Namespace, text: str) -> str:
    """Writes a draft beside the place of the configuration, unless one is there; what to do with it."""
    from trtdet.files import write_atomically

    place = options.output.with_suffix(f".draft{options.output.suffix}")
    if place.exists() and not options.force:
        return f"finish the draft that is there, '{place}', as docs/heads.md tells, or replace it with --force"
    write_atomically(place, text.encode())
    return f"all else is in the draft '{place}': finish it as docs/heads.md tells, and give it with --config"


def _drawn(options: Namespace, found: Guess, images: Any) -> list[str]:
    if options.pictures is None:
        return []
    from trtdet.runtime.detector import Detector
    from trtdet.runtime.pictures import infer

    drawn = infer(Detector.open(options.model, found.config), images, options.pictures)
    return [str(path) for path in drawn.pictures]


def _say(options: Namespace, found: Guess, console: Console) -> None:
    looks = found.looks
    console.say(found.text().rstrip("\n"))
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
    for key, note in found.unknown.items():
        console.warn(f"{key}: {note}")
    wrote = f"wrote {options.output}" + (f", pictures in {options.pictures}" if options.pictures else "")
    console.say(f"{wrote}; next: trtdet build {options.model} --config {options.output} --images DIR -o BUNDLE")


COMMAND = Command("init", "a configuration for an ONNX model, guessed and tried on images", _options, _run)
