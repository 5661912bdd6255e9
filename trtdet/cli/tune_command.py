"""``trtdet tune``: the front of a model, every point of which can be built."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtdet.cli.command import Command
from trtdet.cli.options import (
    SILU,
    add_backend,
    add_batch_range,
    add_calibration,
    add_corrections,
    add_dry_run,
    add_fp8,
    add_gpu,
    add_int8_attention,
    add_model,
    add_objective,
    add_output,
    add_ranking,
    add_runtime,
    calibration_of,
    chosen_corrections,
)
from trtdet.progress import Console

if TYPE_CHECKING:
    from trtdet.pipeline import TuneOptions


def _options(parser: ArgumentParser) -> None:
    add_model(parser)
    add_output(parser, "DIR", "the folder of the front; what an earlier tune of the model measured in it is kept")
    add_calibration(parser)
    add_corrections(parser)
    add_int8_attention(parser)
    add_fp8(parser)
    group = parser.add_argument_group("images that report")
    group.add_argument(
        "--val-images",
        type=Path,
        metavar="DIR",
        help="what accuracy is measured on; calibration images among them are left out (default: images of --images "
        "that do not calibrate)",
    )
    group.add_argument(
        "--annotations",
        type=Path,
        metavar="JSON",
        help="the COCO instances file of --val-images, for mAP (default: agreement with the float model's detections)",
    )
    parser.add_argument(
        "--points",
        type=int,
        default=6,
        metavar="N",
        help="plans of the integer program, beside all FP16, all INT8, trtdet's default and depthwise in FP16 "
        "(default: %(default)s)",
    )
    add_objective(parser)
    add_gpu(parser)
    add_ranking(parser)
    parser.add_argument(
        "--silu", default="auto", choices=SILU, help="what SiLU and HardSwish become (default: auto, asks the backend)"
    )
    add_backend(parser)
    add_runtime(parser)
    add_batch_range(parser)
    add_dry_run(parser)


def _tune_options(options: Namespace) -> TuneOptions:
    from trtdet.pipeline import BuildOptions, KeepOptions, TuneOptions

    (correct,) = chosen_corrections([options.correct], options.effort)
    build = BuildOptions(
        "int8",
        calibration_of(options),
        correct,
        "auto",
        options.backend,
        tuple(options.sm),
        options.batch,
        KeepOptions(objective=options.objective),
        silu=options.silu,
        plugins=tuple(options.plugin_library),
        gpu=options.gpu,
        int8_attention=options.int8_attention,
        fp8=options.fp8,
    )
    return TuneOptions(
        build,
        options.val_images,
        options.annotations,
        options.points,
        options.rank_images,
        options.ray,
        options.runtime,
    )


def _run(options: Namespace, console: Console) -> dict[str, Any]:
    from trtdet.config import load_config
    from trtdet.files import write_atomically
    from trtdet.pipeline.tuning import foresee_tune, tune
    from trtdet.report import front_page

    config, asked = load_config(options.config), _tune_options(options)
    if options.dry_run:
        foreseen = foresee_tune(options.model, config, options.output, asked)
        console.say(foreseen.table())
        return {"dry_run": True, "folder": str(options.output), **foreseen.as_dict()}
    found = tune(options.model, config, options.output, asked, console.progress, console.expect)
    page = found.folder / "front.html"
    write_atomically(page, front_page(found).encode())
    console.say(found.table())
    console.say(found.basis)
    count = len(found.points)
    best = sum(point.beaten_by is None for point in found.points)
    console.say(f"{count} points, of which no other beats {best}; wrote {page} and {found.folder / 'plans'}")
    console.say(f"trtdet build {options.model} --config {options.config} --tuned {found.folder} --point N -o BUNDLE")
    return found.as_dict()


COMMAND = Command("tune", "what plans cost and what they keep of the accuracy; each can be built", _options, _run)
