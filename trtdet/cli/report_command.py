"""``trtdet report``: what runs found, as a page, as Markdown or as JSON."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtdet.cli.command import Command
from trtdet.errors import ConfigError
from trtdet.progress import Console

if TYPE_CHECKING:
    from trtdet.report.formats import Format

_SUFFIXES: dict[str, Format] = {".html": "html", ".md": "md", ".json": "json"}


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
    group = parser.add_argument_group("pictures", "a bundle beside a reference, where they differ most")
    group.add_argument("--images", type=Path, metavar="DIR|LIST", help="images to run both on (default: none is run)")
    group.add_argument("--against", type=Path, metavar="BUNDLE|MODEL", help="the reference, such as the float model")
    group.add_argument(
        "--num-images", type=int, default=64, metavar="N", help="look at N, evenly spaced (default: %(default)s)"
    )
    parser.add_argument(
        "--format",
        choices=tuple(_SUFFIXES.values()),
        help="a page, Markdown for a pull request, or JSON (default: by the end of FILE's name, else html)",
    )


def _run(options: Namespace, console: Console) -> dict[str, Any]:
    from trtdet.files import prepare_target, write_atomically
    from trtdet.report import report, with_pictures, written
    from trtdet.report.sections.pictures import pictures_section

    if (options.images is None) != (options.against is None):
        raise ConfigError("--images and --against belong together: give both")
    bundles = [path for path in options.runs if (path / "manifest.json").is_file()]
    if options.images is not None and len(bundles) != 1:
        raise ConfigError(f"--images is for the report of one bundle, and the runs have {len(bundles)}")
    prepare_target(options.output)
    found = report([*bundles, *(path for path in options.runs if path not in bundles)])
    if options.images is not None:
        pictures = pictures_section(bundles[0], options.against, options.images, options.num_images, console.progress)
        found = with_pictures(found, pictures)
    kind: Format = options.format or _SUFFIXES.get(options.output.suffix, "html")
    data = written(found, kind)
    write_atomically(options.output, data)
    for line in found.verdict:
        console.say(line)
    for one in found.missing:
        console.say(f"not measured: {one}")
    console.say(f"wrote {options.output} ({len(data) / 1e6:.1f} MB)")
    return {"report": str(options.output), **found.as_dict()}


COMMAND = Command("report", "what runs found, as one page that loads nothing", _options, _run)
