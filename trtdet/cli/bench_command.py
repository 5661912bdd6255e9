"""``trtdet bench``: latency and throughput."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from trtdet.cli.command import Command
from trtdet.cli.measured import add_measured_images, finish
from trtdet.cli.options import add_batch, add_output, add_target, check_suffix, config_if_given
from trtdet.progress import Console


def _options(parser: ArgumentParser) -> None:
    add_target(parser, several=True)
    add_batch(parser, "+")
    parser.add_argument(
        "--streams",
        type=int,
        nargs="+",
        default=[1],
        metavar="N",
        help="execution contexts that run side by side (default: 1)",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=3.0,
        metavar="S",
        help="seconds that each target is measured for at each point (default: %(default)s)",
    )
    parser.add_argument(
        "--warm-up",
        type=float,
        default=1.0,
        metavar="S",
        help="seconds of warm-up, continued until times are steady (default: %(default)s)",
    )
    parser.add_argument(
        "--min-runs", type=int, default=50, metavar="N", help="runs of each point at least (default: %(default)s)"
    )
    parser.add_argument(
        "--baseline",
        type=Path,
        metavar="BUNDLE|MODEL",
        help="the target that the others are compared with (default: the first)",
    )
    parser.add_argument(
        "--no-transfers", action="store_true", help="leave the copies to and from the device out of the latency"
    )
    add_measured_images(parser)
    add_output(parser, "bench.json", "write the figures into this file as well", required=False)


def _run(options: Namespace, console: Console) -> dict[str, Any]:
    from trtdet.performance import BenchOptions, bench

    check_suffix(options.output, ".json")
    done = bench(
        options.targets,
        config_if_given(options),
        BenchOptions(
            tuple(options.batch),
            tuple(options.streams),
            options.seconds,
            options.warm_up,
            options.min_runs,
            not options.no_transfers,
            options.images,
        ),
        options.baseline,
        console.progress,
    )
    console.say(done.table())
    result = done.as_dict()
    finish(options.output, console, done.warnings, json.dumps(result, indent=1))
    return result


COMMAND = Command("bench", "latency and throughput of several targets side by side", _options, _run)
