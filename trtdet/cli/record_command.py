"""``trtdet record``: raw outputs for C++ where there is no GPU."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from trtdet.cli.command import Command
from trtdet.cli.options import add_output, add_runtime
from trtdet.progress import Console


def _options(parser: ArgumentParser) -> None:
    parser.add_argument("bundle", type=Path, metavar="BUNDLE", help="the bundle to run")
    parser.add_argument(
        "--images", type=Path, required=True, metavar="DIR|LIST", help="a folder, or a .txt list of file names"
    )
    parser.add_argument(
        "--num-images", type=int, metavar="N", help="use N of them, evenly spaced (default: all of them)"
    )
    add_output(parser, "FILE", "the recording")
    add_runtime(parser)


def _run(options: Namespace, console: Console) -> dict[str, Any]:
    from trtdet.data import evenly, find_images
    from trtdet.runtime.recordings import record

    images = find_images(options.images)
    if options.num_images is not None:
        images = evenly(images, options.num_images)
    done = record(options.bundle, images, options.output, runtime=options.runtime, progress=console.progress)
    console.say(f"{done.images} images on {done.run_info}; wrote {done.file}, {done.size / 1e6:.1f} MB")
    return {"recording": str(done.file), "images": done.images, "bytes": done.size, "ran_on": str(done.run_info)}


COMMAND = Command("record", "a bundle's raw outputs, to be replayed in C++ where there is no GPU", _options, _run)
