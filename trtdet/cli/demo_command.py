"""``trtdet demo``: everything on the shipped detector."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from trtdet.cli.command import Command
from trtdet.progress import Console


def _options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("demo"),
        metavar="DIR",
        help="the folder of images, bundles, pictures and figures (default: %(default)s)",
    )


def _run(options: Namespace, console: Console) -> dict[str, Any]:
    from trtdet.demo.walkthrough import run_demo

    done = run_demo(options.output, console.progress)
    console.say(done.table())
    return done.as_dict()


COMMAND = Command("demo", "the shipped detector on generated images: built, scored, drawn", _options, _run)
