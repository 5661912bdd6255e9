"""``trtdet bench`` and ``trtdet profile``: latency, throughput, and time by layer."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from trtdet.cli.command import Command
from trtdet.cli.options import add_output, add_target, argument, check_suffix, config_if_given
from trtdet.progress import Console

_BATCH = "images at once (default: the fixed batch size, or 1)"
_IMAGES = "images to run: a folder or a .txt list (default: noise)"


def _bench_options(parser: ArgumentParser) -> None:
    add_target(parser, several=True)
    argument(parser, "--batch N", _BATCH, default=[], type=int, nargs="+")
    argument(
        parser, "--streams N", "execution contexts that run side by side (default: 1)", default=[1], type=int, nargs="+"
    )
    argument(parser, "--seconds S", "seconds that each target is measured for at each point", default=3.0)
    argument(parser, "--warm-up S", "seconds of warm-up, continued until times are steady", default=1.0)
    argument(parser, "--min-runs N", "runs of each point at least", default=50)
    what = "the target that the others are compared with (default: the first)"
    argument(parser, "--baseline BUNDLE|MODEL", what, type=Path)
    argument(parser, "--no-transfers", "leave the copies to and from the device out of the latency")
    argument(parser, "--images DIR|LIST", _IMAGES, type=Path)
    add_output(parser, "bench.json", "write the figures into this file as well", required=False)


def _bench(options: Namespace, console: Console) -> dict[str, Any]:
    from trtdet.performance import BenchOptions, bench

    check_suffix(options.output, ".json")
    benchmark = bench(
        options.targets,
        config_if_given(options),
        BenchOptions(
            batches=tuple(options.batch),
            streams=tuple(options.streams),
            seconds=options.seconds,
            warm_up=options.warm_up,
            min_runs=options.min_runs,
            transfers=not options.no_transfers,
            images=options.images,
        ),
        baseline=options.baseline,
        progress=console.progress,
    )
    console.say(benchmark.table())
    return _finish(options, console, benchmark)


def _profile_options(parser: ArgumentParser) -> None:
    add_target(parser)
    argument(parser, "--batch N", _BATCH, type=int)
    argument(parser, "--runs N", "runs that are timed", default=50)
    argument(parser, "--warm-up N", "runs before they are counted", default=5)
    argument(parser, "--images DIR|LIST", _IMAGES, type=Path)
    what = "a target of the same network to profile in turns with it; lists the layers that are slower than there"
    argument(parser, "--against BUNDLE|MODEL", what, type=Path)
    argument(parser, "--top N", "layers to list", default=20)
    what = "write the figures, or a page with charts, into this file"
    add_output(parser, "profile.json|profile.html", what, required=False)


def _profile(options: Namespace, console: Console) -> dict[str, Any]:
    from trtdet.performance import ProfileOptions, profile
    from trtdet.report import profile_page

    check_suffix(options.output, ".json", ".html")
    profiling = profile(
        options.target,
        config_if_given(options),
        ProfileOptions(options.batch, runs=options.runs, warm_up=options.warm_up, images=options.images),
        against=options.against,
        progress=console.progress,
    )
    console.say(profiling.table(options.top))
    page = options.output is not None and options.output.suffix == ".html"
    return _finish(options, console, profiling, text=profile_page(profiling) if page else "")


def _finish(options: Namespace, console: Console, measured: Any, text: str = "") -> dict[str, Any]:
    """Prints the warnings of a measurement, and writes it into the ``--output`` file."""
    from trtdet.files import write_atomically

    for warning in measured.warnings:
        console.warn(warning)
    result: dict[str, Any] = measured.as_dict()
    if options.output is not None:
        write_atomically(options.output, f"{text or json.dumps(result, indent=1)}\n".encode())
        console.say(f"wrote {options.output}")
    return result


BENCH = Command(
    "bench",
    summary="measure latency and throughput of several targets side by side",
    add_options=_bench_options,
    run=_bench,
)
PROFILE = Command(
    "profile", summary="measure time by kind of operator and by layer", add_options=_profile_options, run=_profile
)
