"""``trtdet infer``: pictures with boxes."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from functools import partial
from pathlib import Path
from typing import Any

from trtdet.cli.command import Command
from trtdet.cli.options import add_output, add_runtime, add_target, argument, config_if_given
from trtdet.progress import Console


def _options(parser: ArgumentParser) -> None:
    add_target(parser)
    argument(parser, "images IMAGE|DIR|LIST", "image files, folders, or .txt lists of names", type=Path, nargs="+")
    add_output(parser, "DIR", "the folder of the pictures and of detections.json")
    argument(parser, "--score-threshold S", "detections below it are neither drawn nor listed, 0 to 1", default=0.3)
    add_runtime(parser)


def _run(options: Namespace, console: Console) -> dict[str, Any]:
    from trtdet.data import find_images
    from trtdet.runtime.detector import Detector
    from trtdet.runtime.pictures import infer

    images: list[Path] = []
    for source in options.images:
        images += find_images(source) if source.is_dir() or source.suffix.lower() == ".txt" else [source]
    detector = Detector.open(options.target, config_if_given(options), runtime=options.runtime)
    pictures = infer(
        detector,
        images,
        options.output,
        score_threshold=options.score_threshold,
        progress=partial(console.progress, "detecting"),
    )
    total = sum(len(row["detections"]) for row in pictures.detections)
    ran_on = str(detector.runner.run_info)
    console.say(
        f"{total} detections in {len(pictures.pictures)} images on {ran_on}; wrote {pictures.folder}, {pictures.json}"
    )
    return {"folder": str(pictures.folder), "images": list(pictures.detections), "ran_on": ran_on}


COMMAND = Command("infer", summary="draw boxes on images, and write them as JSON", add_options=_options, run=_run)
