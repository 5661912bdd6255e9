"""``trtdet report``, ``compare`` and ``package``: pages of results, and packages for other servers."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtdet.cli.command import Command
from trtdet.cli.options import add_output, argument, check_suffix
from trtdet.errors import ConfigError
from trtdet.progress import Console

if TYPE_CHECKING:
    from trtdet.report.pages import Format


_SUFFIXES: dict[str, Format] = {".html": "html", ".md": "md", ".json": "json"}


def _report_options(parser: ArgumentParser) -> None:
    what = "a bundle, the -o of a tune or a sweep, or a sensitivity, plan, profile, bench or eval.json"
    argument(parser, "runs RUN", what, type=Path, nargs="+")
    add_output(parser, "FILE", "the report: a page that loads nothing")
    group = parser.add_argument_group("pictures", "a bundle beside a reference, where they differ most")
    argument(group, "--images DIR|LIST", "images to run both on (default: none is run)", type=Path)
    argument(group, "--against BUNDLE|MODEL", "the reference, such as the float model", type=Path)
    argument(group, "--num-images N", "look at N, evenly spaced", default=64)
    what = "a page, Markdown for a pull request, or JSON (default: by the end of FILE's name, else html)"
    argument(parser, "--format", what, choices=tuple(_SUFFIXES.values()))


def _report(options: Namespace, console: Console) -> dict[str, Any]:
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


def _compare_options(parser: ArgumentParser) -> None:
    what = "a bundle, a plan.json, or the -o of a sweep"
    argument(parser, "first A", what, type=Path)
    argument(parser, "second B", what, type=Path)
    group = parser.add_argument_group("annotated images, to run both bundles on")
    argument(group, "--images DIR", "their folder (default: nothing is run)", type=Path)
    argument(group, "--annotations JSON", "their COCO instances file", type=Path)
    add_output(parser, "FILE", "write a page, or with .md or .json Markdown or JSON", required=False)


def _compare(options: Namespace, console: Console) -> dict[str, Any]:
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
    """Evaluates both on the same images; returns a sentence on each difference, and on whether it is noise."""
    from trtdet.data import CocoDataset, ImageCache
    from trtdet.evaluation.comparison import compare, open_pair
    from trtdet.evaluation.parts import NAMES, Of
    from trtdet.evaluation.scoring import evaluate

    pair, cache = open_pair(options.second, options.first), ImageCache()
    dataset = CocoDataset.load(options.annotations, options.images, pair[0].classes)
    second, first = (
        evaluate(detector, dataset, partial(console.progress, "evaluating"), cache=cache) for detector in pair
    )
    scored: tuple[Of, ...] = ("boxes", *(part for part in second.scored_parts if part in first.scored_parts))
    sentences = []
    for of in scored:
        comparison = compare(second, first, progress=partial(console.progress, "resampling"), of=of)
        noise = "which is noise" if comparison.low <= 0 <= comparison.high else "which is more than noise"
        before, after = (100 * each.score_of(of).map for each in (first, second))
        sentences.append(
            f"{NAMES[of]} {before:.2f} -> {after:.2f}: {100 * comparison.difference:+.2f} (90 % interval "
            f"{100 * comparison.low:+.2f} .. {100 * comparison.high:+.2f}, paired bootstrap over {comparison.images} "
            f"images), {noise}."
        )
    return " ".join(sentences)


def _package_options(parser: ArgumentParser) -> None:
    argument(parser, "bundle BUNDLE", "the bundle to package", type=Path)
    add_output(parser, "DIR", "the folder that is written")
    what = "a model repository of Triton Inference Server, or a configuration of DeepStream's Gst-nvinfer"
    argument(parser, "--format", what, required=True, choices=("triton", "deepstream"))
    parser.add_argument("--name", help="of the served model (default: the name in the bundle's configuration)")
    group = parser.add_argument_group("Triton")
    what = "clients send image files, or RGB pixels (default: encoded)"
    argument(group, "--input", what, choices=("encoded", "pixels"))
    argument(group, "--queue-delay US", "microseconds that a batch waits for more images (default: 500)", type=int)
    argument(group, "--cpu-instances N", "processes before and after the engine (default: 2)", type=int)


def _package(options: Namespace, console: Console) -> dict[str, Any]:
    from trtdet.deploy import PackageOptions, TritonOptions, package

    values = {"input": options.input, "queue_delay_us": options.queue_delay, "cpu_instances": options.cpu_instances}
    values = {key: value for key, value in values.items() if value is not None}
    triton = TritonOptions(**values) if values else None
    result = package(options.bundle, options.output, PackageOptions(options.format, options.name, triton))
    console.say(
        f"wrote {result.folder}: {len(result.files)} files for {result.format}; its README.md says how to start it"
    )
    for warning in result.warnings:
        console.warn(warning)
    return result.as_dict()


REPORT = Command(
    "report",
    summary="write results as one self-contained page",
    add_options=_report_options,
    run=_report,
    examples=(("int8 fp16 -o report.html", "one page for two bundles"),),
)
COMPARE = Command(
    "compare",
    summary="show what changed between two bundles, plans or sweeps",
    add_options=_compare_options,
    run=_compare,
    examples=(("before after", "two bundles"),),
)
PACKAGE = Command(
    "package",
    summary="package a bundle for Triton Inference Server or DeepStream",
    add_options=_package_options,
    run=_package,
    examples=(
        ("bundle --format triton -o models", "a model repository"),
        ("bundle --format deepstream -o deepstream", "configuration and parser"),
    ),
)
