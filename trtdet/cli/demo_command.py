"""``trtdet demo``: everything on the shipped detector."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from trtdet.cli.command import Command
from trtdet.cli.options import argument
from trtdet.progress import Console


def _options(parser: ArgumentParser) -> None:
    what = "the folder of images, bundles, pictures and figures (default: %(default)s)"
    argument(parser, "-o --output DIR", what, default=Path("demo"), type=Path)


def _run(options: Namespace, console: Console) -> dict[str, Any]:
    from trtdet.demo.walkthrough import run_demo

    demo = run_demo(options.output, console.progress)
    console.say(demo.table())
    return demo.as_dict()


COMMAND = Command(
    "demo", summary="build, score and draw the shipped detector on generated images", add_options=_options, run=_run
)
