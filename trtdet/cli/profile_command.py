"""``trtdet profile``: where the time goes."""

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
    add_target(parser)
    add_batch(parser)
    parser.add_argument("--runs", type=int, default=50, metavar="N", help="runs that are timed (default: %(default)s)")
    parser.add_argument(
        "--warm-up", type=int, default=5, metavar="N", help="runs before they are counted (default: %(default)s)"
    )
    add_measured_images(parser)
    parser.add_argument(
        "--against",
        type=Path,
        metavar="BUNDLE|MODEL",
        help="a target of the same network to profile in turns with it; lists the layers that are slower than there",
    )
    parser.add_argument("--top", type=int, default=20, metavar="N", help="layers to list (default: %(default)s)")
    add_output(
        parser, "profile.json|profile.html", "write the figures, or a page with charts, into this file", required=False
    )


def _run(options: Namespace, console: Console) -> dict[str, Any]:
    from trtdet.performance import ProfileOptions, profile
    from trtdet.report import profile_page

    check_suffix(options.output, ".json", ".html")
    done = profile(
        options.target,
        config_if_given(options),
        ProfileOptions(options.batch, options.runs, options.warm_up, options.images),
        options.against,
        console.progress,
    )
    console.say(done.table(options.top))
    result, page = done.as_dict(), options.output is not None and options.output.suffix == ".html"
    finish(
        options.output,
        console,
        done.warnings,
        profile_page(done) if page else json.dumps(result, indent=1),
    )
    return result


COMMAND = Command("profile", "time by kind of operator and by layer", _options, _run)
