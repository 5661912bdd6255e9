"""``trtdet infer``: pictures with boxes."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from trtdet.cli.command import Command
from trtdet.cli.options import add_output, add_runtime, add_target, config_if_given
from trtdet.progress import Console


def _options(parser: ArgumentParser) -> None:
    add_target(parser)
    parser.add_argument(
        "images", type=Path, nargs="+", metavar="IMAGE|DIR|LIST", help="image files, folders, or .txt lists of names"
    )
    add_output(parser, "DIR", "the folder of the pictures and of detections.json")
    parser.add_argument(
        "--score-threshold",
        type=float,
        default=0.3,
        metavar="S",
        help="detections below it are neither drawn nor listed, 0 to 1 (default: %(default)s)",
    )
    add_runtime(parser)


def _run(options: Namespace, console: Console) -> dict[str, Any]:
    from trtdet.data import find_images
    from trtdet.runtime.detector import Detector
    from trtdet.runtime.pictures import infer

    images: list[Path] = []
    for source in options.images:
        images += find_images(source) if source.is_dir() or source.suffix.lower() == ".txt" else [source]
    detector = Detector.open(options.target, config_if_given(options), runtime=options.runtime)
    done = infer(
        detector,
        images,
        options.output,
        score_threshold=options.score_threshold,
        progress=lambda count, total: console.progress("detecting", count, total),
    )
    total = sum(len(row["detections"]) for row in done.detections)
    ran_on = str(detector.runner.run_info)
    console.say(f"{total} detections in {len(done.pictures)} images on {ran_on}; wrote {done.folder}, {done.json}")
    return {"folder": str(done.folder), "images": list(done.detections), "ran_on": ran_on}


COMMAND = Command("infer", "pictures with boxes, and the boxes as JSON", _options, _run)
