"""``trtdet sensitivity``: ranks the convolutions by their sensitivity to INT8."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from trtdet.cli.command import Command
from trtdet.cli.options import check_suffix, model_options, options_of
from trtdet.options import SensitivityOptions
from trtdet.progress import Console


def _run(options: Namespace, console: Console) -> dict[str, Any]:
    from trtdet.building import sensitivity
    from trtdet.config import load_config
    from trtdet.files import prepare_target

    check_suffix(options.output, ".json")
    prepare_target(options.output)
    ranking_options = options_of(options, SensitivityOptions)
    rows = options.output.with_suffix(".jsonl")
    config = load_config(options.config)
    ranking = sensitivity(options.model, config, ranking_options, rows=rows, progress=console.progress)
    ranking.save(options.output)
    console.say(ranking.table())
    console.say(f"{ranking.inferences} model runs, {ranking.seconds:.1f} s; wrote {options.output}, {rows}")
    return ranking.as_dict()


COMMAND = Command(
    "sensitivity",
    summary="rank the convolutions by the accuracy that INT8 costs",
    add_options=model_options(
        "sensitivity.json", "the ranking; its rows are kept in a .jsonl file beside it and resumed", SensitivityOptions
    ),
    run=_run,
    usage="MODEL --config CONFIG --images DIR -o sensitivity.json [options]",
)
