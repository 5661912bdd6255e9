"""``trtdet compare``: what changed between two bundles, plans or sweeps."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

from trtdet.cli.command import Command
from trtdet.cli.options import add_output, check_suffix
from trtdet.errors import ConfigError
from trtdet.progress import Console


def _options(parser: ArgumentParser) -> None:
    what = "a bundle, a plan.json, or the -o of a sweep"
    parser.add_argument("first", type=Path, metavar="A", help=what)
    parser.add_argument("second", type=Path, metavar="B", help=what)
    group = parser.add_argument_group("annotated images, to run both bundles on")
    group.add_argument("--images", type=Path, metavar="DIR", help="their folder (default: nothing is run)")
    group.add_argument("--annotations", type=Path, metavar="JSON", help="their COCO instances file")
    add_output(parser, "FILE", "write a page, or with .md or .json Markdown or JSON", required=False)


def _run(options: Namespace, console: Console) -> dict[str, Any]:
    from trtdet.files import write_atomically
    from trtdet.report import compare_runs, written

    check_suffix(options.output, ".html", ".md", ".json")
    if (options.images is None) != (options.annotations is None):
        raise ConfigError("--images and --annotations belong together: give both")
    found = compare_runs(options.first, options.second)
    if options.images is not None:
        found = replace(found, scores=(*found.scores, _paired(options, console)), missing=())
    console.say(found.table())
    if options.output is not None:
        write_atomically(options.output, written(found.report(), options.output.suffix.removeprefix(".")))
        console.say(f"wrote {options.output}")
    return found.as_dict()


def _paired(options: Namespace, console: Console) -> str:
    """Runs both on the same images, and says whether they differ by more than noise."""
    from trtdet.data import CocoDataset, ImageCache
    from trtdet.evaluation.comparison import compare, open_pair
    from trtdet.evaluation.scoring import evaluate

    pair, cache = open_pair(options.second, options.first), ImageCache()
    dataset = CocoDataset.load(options.annotations, options.images, pair[0].classes)
    second, first = (
        evaluate(detector, dataset, lambda done, total: console.progress("evaluating", done, total), cache)
        for detector in pair
    )
    compared = compare(second, first, progress=lambda done, total: console.progress("resampling", done, total))
    noise = "which is noise" if compared.low <= 0 <= compared.high else "which is more than noise"
    return (
        f"mAP {100 * first.result.map:.2f} -> {100 * second.result.map:.2f}: {100 * compared.difference:+.2f} "
        f"(90 % interval {100 * compared.low:+.2f} .. {100 * compared.high:+.2f}, paired bootstrap over "
        f"{compared.images} images), {noise}."
    )


COMMAND = Command("compare", "what changed between two bundles, plans or sweeps", _options, _run)
