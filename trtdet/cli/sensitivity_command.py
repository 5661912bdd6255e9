"""``trtdet sensitivity``: what INT8 costs at each convolution."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Any

from trtdet.cli.command import Command
from trtdet.cli.options import (
    add_calibration,
    add_corrections,
    add_fp8,
    add_int8_all,
    add_int8_attention,
    add_model,
    add_output,
    add_ranking,
    add_validation,
    calibration_of,
    check_suffix,
    chosen_corrections,
    config_of,
)
from trtdet.progress import Console


def _options(parser: ArgumentParser) -> None:
    add_model(parser)
    add_output(parser, "sensitivity.json", "the ranking; its rows are kept in a .jsonl file beside it and resumed")
    add_calibration(parser)
    add_corrections(parser)
    add_int8_all(parser)
    add_int8_attention(parser)
    add_fp8(parser)
    add_validation(parser, "to measure mAP as well")
    add_ranking(parser)
    parser.add_argument(
        "--method",
        default="fast",
        choices=("fast", "reference"),
        help="fast leaves out images with few detections and shares computations; reference runs the whole model for "
        "each convolution and image (default: %(default)s)",
    )
    parser.add_argument(
        "--all-but-one",
        action="store_true",
        help="quantise all convolutions but each in turn (default: each in turn alone)",
    )


def _run(options: Namespace, console: Console) -> dict[str, Any]:
    from trtdet.files import prepare_target
    from trtdet.pipeline import SensitivityOptions, sensitivity

    check_suffix(options.output, ".json")
    prepare_target(options.output)
    (correct,) = chosen_corrections([options.correct], options.effort)
    rows = options.output.with_suffix(".jsonl")
    found = sensitivity(
        options.model,
        config_of(options),
        SensitivityOptions(
            calibration_of(options),
            correct,
            options.rank_images,
            options.method,
            "int8" if options.all_but_one else "fp32",
            options.val_images,
            options.annotations,
            options.ray,
            options.int8_all,
            options.int8_attention,
            options.fp8,
        ),
        rows,
        console.progress,
    )
    found.save(options.output)
    console.say(found.table())
    console.say(f"{found.inferences} model runs, {found.seconds:.1f} s; wrote {options.output}, {rows}")
    return found.as_dict()


COMMAND = Command("sensitivity", "what INT8 costs at each convolution, ranked", _options, _run)
