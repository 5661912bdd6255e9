"""``trtdet compare``: what changed between two bundles, plans or sweeps."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from trtdet.cli.command import Command
from trtdet.cli.options import add_output, argument, check_suffix
from trtdet.errors import ConfigError
from trtdet.progress import Console


def _options(parser: ArgumentParser) -> None:
    what = "a bundle, a plan.json, or the -o of a sweep"
    argument(parser, "first A", what, type=Path)
    argument(parser, "second B", what, type=Path)
    group = parser.add_argument_group("annotated images, to run both bundles on")
    argument(group, "--images DIR", "their folder (default: nothing is run)", type=Path)
    argument(group, "--annotations JSON", "their COCO instances file", type=Path)
    add_output(parser, "FILE", "write a page, or with .md or .json Markdown or JSON", required=False)


def _run(options: Namespace, console: Console) -> dict[str, Any]:
    from trtdet.files import write_atomically
    from trtdet.report import compare_runs, written

    check_suffix(options.output, ".html", ".md", ".json")
    if (options.images is None) != (options.annotations is None):
        raise ConfigError("--images and --annotations belong together: give both")
    difference = compare_runs(options.first, options.second)
    if options.images is not None:
        difference = replace(difference, scores=(*difference.scores, _paired(options, console)), missing=())
    console.say(difference.table())
    if options.output is not None:
        write_atomically(options.output, written(difference.report(), options.output.suffix.removeprefix(".")))
        console.say(f"wrote {options.output}")
    return difference.as_dict()


def _paired(options: Namespace, console: Console) -> str:
    """Evaluates both on the same images; returns a sentence on the difference, and on whether it is noise."""
    from trtdet.data import CocoDataset, ImageCache
    from trtdet.evaluation.comparison import compare, open_pair
    from trtdet.evaluation.scoring import evaluate

    pair, cache = open_pair(options.second, options.first), ImageCache()
    dataset = CocoDataset.load(options.annotations, options.images, pair[0].classes)
    second, first = (
        evaluate(detector, dataset, partial(console.progress, "evaluating"), cache=cache) for detector in pair
    )
    comparison = compare(second, first, progress=partial(console.progress, "resampling"))
    noise = "which is noise" if comparison.low <= 0 <= comparison.high else "which is more than noise"
    return (
        f"mAP {100 * first.result.map:.2f} -> {100 * second.result.map:.2f}: {100 * comparison.difference:+.2f} "
        f"(90 % interval {100 * comparison.low:+.2f} .. {100 * comparison.high:+.2f}, paired bootstrap over "
        f"{comparison.images} images), {noise}."
    )


COMMAND = Command(
    "compare", summary="show what changed between two bundles, plans or sweeps", add_options=_options, run=_run
)
