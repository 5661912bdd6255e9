"""``trtdet report``: the results of runs as a page, Markdown or JSON."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtdet.cli.command import Command
from trtdet.cli.options import add_output, argument
from trtdet.errors import ConfigError
from trtdet.progress import Console

if TYPE_CHECKING:
    from trtdet.report.pages import Format

_SUFFIXES: dict[str, Format] = {".html": "html", ".md": "md", ".json": "json"}


def _options(parser: ArgumentParser) -> None:
    what = "a bundle, the -o of a tune or a sweep, a sensitivity.json, a plan.json, a profile.json, or an eval.json"
    argument(parser, "runs RUN", what, type=Path, nargs="+")
    add_output(parser, "FILE", "the report: a page that loads nothing")
    group = parser.add_argument_group("pictures", "a bundle beside a reference, where they differ most")
    argument(group, "--images DIR|LIST", "images to run both on (default: none is run)", type=Path)
    argument(group, "--against BUNDLE|MODEL", "the reference, such as the float model", type=Path)
    argument(group, "--num-images N", "look at N, evenly spaced", default=64)
    what = "a page, Markdown for a pull request, or JSON (default: by the end of FILE's name, else html)"
    argument(parser, "--format", what, choices=tuple(_SUFFIXES.values()))


def _run(options: Namespace, console: Console) -> dict[str, Any]:
    from trtdet.files import prepare_target, write_atomically
    from trtdet.report import report, written
    from trtdet.report.sections.pictures import pictures_section

    if (options.images is None) != (options.against is None):
        raise ConfigError("--images and --against belong together: give both")
    bundles = [path for path in options.runs if (path / "manifest.json").is_file()]
    if options.images is not None and len(bundles) != 1:
        raise ConfigError(f"--images is for the report of one bundle, and the runs have {len(bundles)}")
    prepare_target(options.output)
    document = report([*bundles, *(path for path in options.runs if path not in bundles)])
    if options.images is not None:
        pictures = pictures_section(
            bundles[0], options.against, options.images, count=options.num_images, progress=console.progress
        )
        first, *others = document.sections
        document = replace(document, sections=(first, pictures, *others))
    kind: Format = options.format or _SUFFIXES.get(options.output.suffix, "html")
    data = written(document, kind)
    write_atomically(options.output, data)
    for line in (*document.verdict, *(f"not measured: {figure}" for figure in document.missing)):
        console.say(line)
    console.say(f"wrote {options.output} ({len(data) / 1e6:.1f} MB)")
    return {"report": str(options.output), **document.as_dict()}


COMMAND = Command("report", summary="write results as one self-contained page", add_options=_options, run=_run)
