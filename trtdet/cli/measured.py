"""What ``bench``, ``profile`` and ``eval`` share: the images they run, the warnings and the file they end with."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from trtdet.progress import Console


def add_measured_images(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--images", type=Path, metavar="DIR|LIST", help="images to run: a folder or a .txt list (default: noise)"
    )


def finish(output: Path | None, console: Console, warnings: Sequence[str], text: str) -> None:
    """Prints what to know before a measurement is believed, and writes it where that was asked for."""
    from trtdet.files import write_atomically

    for warning in warnings:
        console.warn(warning)
    if output is not None:
        write_atomically(output, (text + "\n").encode())
        console.say(f"wrote {output}")
