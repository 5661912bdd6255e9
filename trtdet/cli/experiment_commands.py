"""``trtdet sweep`` and ``trtdet tune``: a grid of variants, and accuracy-speed trade-offs found by a search."""

from __future__ import annotations

from argparse import Namespace
from functools import partial
from typing import Any, Literal

from trtdet.cli.command import Command
from trtdet.cli.options import model_options, options_of
from trtdet.options import SweepOptions, TuneOptions
from trtdet.progress import Console


def _measure(kind: Literal["sweep", "tune"], options: Namespace, console: Console) -> dict[str, Any]:
    """Runs an experiment, prints its variants and writes a page into its folder; with --dry-run prints a forecast."""
    from trtdet.config import load_config
    from trtdet.experiments.grid import foresee_sweep, sweep
    from trtdet.experiments.search import foresee_tune, tune
    from trtdet.files import write_atomically
    from trtdet.report import experiment_page

    config = load_config(options.config)
    request: Any = options_of(options, SweepOptions if kind == "sweep" else TuneOptions)
    if options.dry_run:
        foresee: Any = foresee_sweep if kind == "sweep" else foresee_tune
        forecast = foresee(options.model, config, options.output, options=request)
        console.say(forecast.table())
        return {"dry_run": True, "folder": str(options.output), **forecast.as_dict()}
    measure: Any = sweep if kind == "sweep" else tune
    experiment = measure(
        options.model, config, options.output, options=request, progress=console.progress, expect=console.expect
    )
    folder = experiment.folder
    page = folder / "experiment.html"
    write_atomically(page, experiment_page(experiment).encode())
    console.say(experiment.table())
    console.say(experiment.basis)
    if experiment.repeated:
        console.say(experiment.repeated)
    console.say(
        f"{len(experiment.best)} of {len(experiment.variants)} variants are Pareto-optimal; wrote {page} and "
        f"{folder / 'experiment.json'}"
    )
    console.say(f"trtdet build {options.model} --config {options.config} --from {folder}:N -o BUNDLE")
    result: dict[str, Any] = experiment.as_dict()
    return result


SWEEP = Command(
    "sweep",
    summary="build and score every combination of the given options",
    add_options=partial(
        model_options,
        metavar="DIR",
        output="folder of the rows and the table; rows of an earlier sweep in it are kept",
        rows=SweepOptions,
        dry_run=True,
    ),
    run=partial(_measure, "sweep"),
    usage="MODEL --config CONFIG --images DIR --val-images DIR --annotations JSON -o DIR [options]",
    examples=(
        (
            "m.onnx --config c.yaml --images p --val-images v --annotations v.json --calib mse minmax -o sweep",
            "two rules",
        ),
    ),
)
TUNE = Command(
    "tune",
    summary="measure speed and accuracy of plans of INT8 and FP16 layers; 'build --from DIR:N' builds one",
    add_options=partial(
        model_options,
        metavar="DIR",
        output="folder of the variants; what an earlier tune of the model measured in it is kept",
        rows=TuneOptions,
        dry_run=True,
    ),
    run=partial(_measure, "tune"),
    usage="MODEL --config CONFIG --images DIR -o DIR [options]",
    examples=(("m.onnx --config c.yaml --images photos -o tuned", "then: build ... --from tuned:1"),),
)
