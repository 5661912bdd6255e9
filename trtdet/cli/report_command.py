"""``trtdet report``: what runs found, as a page, as Markdown or as JSON."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from trtdet.cli.command import Command
from trtdet.progress import Console

_SUFFIXES = {".html": "html", ".md": "md", ".json": "json"}


def _options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "runs",
        type=Path,
        nargs="+",
        metavar="RUN",
        help="a bundle, the -o of a tune or a sweep, a sensitivity.json, a plan.json, a profile.json, or an eval.json",
    )
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FILE", help="the report: a page that loads nothing"
    )
    parser.add_argument(
        "--format",
        choices=tuple(_SUFFIXES.values()),
        help="a page, Markdown for a pull request, or JSON (default: by the end of FILE's name, else html)",
    )


def _run(options: Namespace, console: Console) -> dict[str, Any]:
    from trtdet.files import prepare_target, write_atomically
    from trtdet.report import page, report

    kind = options.format or _SUFFIXES.get(options.output.suffix, "html")
    prepare_target(options.output)
    found = report(options.runs)
    plain = found.as_dict()
    if kind == "html":
        text = page(found)
    elif kind == "md":
        text = found.markdown()
    else:
        text = json.dumps(plain, indent=1) + "\n"
    write_atomically(options.output, text.encode())
    for line in found.verdict:
        console.say(line)
    for one in found.missing:
        console.say(f"not measured: {one}")
    console.say(f"wrote {options.output} ({len(text.encode()) / 1e6:.1f} MB)")
    return {"report": str(options.output), **plain}


COMMAND = Command("report", "what runs found, as one page that loads nothing", _options, _run)
