"""``trtdet sweep``: the matrix of variants."""

from __future__ import annotations

import argparse
import itertools
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING, Any

from trtdet.cli.command import Command
from trtdet.cli.options import (
    RULES,
    SILU,
    add_backend,
    add_dry_run,
    add_effort,
    add_fp8,
    add_images,
    add_int8_all,
    add_int8_attention,
    add_model,
    add_output,
    add_percentile,
    add_ray,
    add_runtime,
    add_thresholds,
    add_validation,
    chosen_corrections,
    corrections,
)
from trtdet.progress import Console

if TYPE_CHECKING:
    from trtdet.config import Config
    from trtdet.pipeline.variants import SweepOptions


def _options(parser: ArgumentParser) -> None:
    add_model(parser)
    add_output(parser, "DIR", "the folder of the rows and the table; rows of an earlier sweep in it are kept")
    add_images(parser)
    add_validation(parser, "to score every variant on", required=True)
    axes = parser.add_argument_group("axes", "each takes several values; every combination is built and scored")
    axes.add_argument(
        "--calib", nargs="+", default=["percentile"], choices=RULES, help="calibration rules (default: percentile)"
    )
    axes.add_argument(
        "--correct",
        nargs="+",
        type=corrections,
        metavar="auto|none|NAME,...",
        help="sets of corrections (default: auto, which is what --effort says)",
    )
    add_effort(axes)
    axes.add_argument(
        "--keep-fp16",
        nargs="+",
        type=_kept,
        default=[0],
        metavar="N|depthwise",
        help="numbers of the most sensitive convolutions that stay in FP16 too, or all depthwise (default: 0)",
    )
    axes.add_argument("--silu", nargs="+", default=["auto"], choices=SILU, help="forms of SiLU (default: auto)")
    add_thresholds(axes, "+")
    axes.add_argument(
        "--rpn-pre-nms-topk",
        nargs="+",
        type=int,
        default=[],
        metavar="N",
        help="of a two-stage detector: anchors of each level that are suppressed among; rows get the recall of the "
        "proposals and the latency",
    )
    axes.add_argument(
        "--rpn-post-nms-topk",
        nargs="+",
        type=int,
        default=[],
        metavar="N",
        help="of a two-stage detector: proposals that its second stage gets",
    )
    add_int8_all(parser)
    add_int8_attention(parser)
    add_fp8(parser)
    add_percentile(parser)
    add_backend(parser)
    add_runtime(parser)
    add_ray(parser)
    add_dry_run(parser)


def _kept(text: str) -> int | str:
    if text.isdigit() or text == "depthwise":
        return int(text) if text.isdigit() else text
    raise argparse.ArgumentTypeError(f"'{text}' must be a number of convolutions, or 'depthwise'")


def _sweep_options(options: Namespace, config: Config) -> SweepOptions:
    from trtdet.pipeline import CalibrationOptions
    from trtdet.pipeline.variants import SweepOptions

    axes = {key: getattr(options, key) for key in ("score_threshold", "iou_threshold", "max_detections")}
    named = {key: values for key, values in axes.items() if values}
    suppressions = [
        config.with_nms(**dict(zip(named, values, strict=True))).nms for values in itertools.product(*named.values())
    ]
    return SweepOptions(
        CalibrationOptions(
            options.calib[0], options.percentile, options.images, options.images_root, options.num_images
        ),
        options.val_images,
        options.annotations,
        tuple(dict.fromkeys(options.calib)),
        chosen_corrections(options.correct or [None], options.effort),
        tuple(dict.fromkeys(options.keep_fp16)),
        tuple(suppressions),
        options.backend,
        tuple(options.sm),
        options.ray,
        tuple(options.silu),
        tuple(options.plugin_library),
        options.runtime,
        options.int8_all,
        options.int8_attention,
        options.fp8,
        tuple(dict.fromkeys(options.rpn_pre_nms_topk)),
        tuple(dict.fromkeys(options.rpn_post_nms_topk)),
    )


def _run(options: Namespace, console: Console) -> dict[str, Any]:
    from trtdet.config import load_config
    from trtdet.pipeline.variants import foresee_sweep, sweep

    config = load_config(options.config)
    asked = _sweep_options(options, config)
    if options.dry_run:
        foreseen = foresee_sweep(options.model, config, options.output, asked)
        console.say(foreseen.table())
        return {"dry_run": True, "folder": str(options.output), **foreseen.as_dict()}
    done = sweep(options.model, config, options.output, asked, console.progress, console.expect)
    console.say(done.table())
    if done.repeated:
        console.say(done.repeated)
    console.say(f"{len(done.rows)} rows; wrote {done.folder}")
    return done.as_dict()


COMMAND = Command("sweep", "a matrix of variants, each built and scored, with a row for each", _options, _run)
