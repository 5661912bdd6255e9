"""``trtdet prepare`` and ``trtdet finish``: candidate networks where the images are, an engine where the GPU is."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from trtdet.cli.command import Command
from trtdet.cli.options import add_output, add_rows, argument, model_options, options_of
from trtdet.options import FinishOptions, PrepareOptions
from trtdet.progress import Console


def _prepare(options: Namespace, console: Console) -> dict[str, Any]:
    from trtdet.candidates import prepare
    from trtdet.config import load_config

    config = load_config(options.config)
    folder = prepare(
        options.model, config, options.output, options=options_of(options, PrepareOptions), progress=console.progress
    )
    content = folder.content
    console.say(folder.table())
    size = sum(path.stat().st_size for path in folder.path.iterdir())
    console.say(
        f"wrote {folder.path}: {len(content.candidates)} candidates for {content.library} {content.version}, "
        f"{size / 1e6:.1f} MB; 'trtdet finish' ships the fastest with {content.bound}"
    )
    console.say(f"on the machine with the GPU: trtdet finish {folder.path} -o BUNDLE")
    return {"folder": str(folder.path), "bytes": size, **asdict(content)}


def _finish(options: Namespace, console: Console) -> dict[str, Any]:
    from trtdet.candidates import finish, times_table

    finished = finish(
        options.prepared, options.output, options=options_of(options, FinishOptions), progress=console.progress
    )
    console.say(times_table(finished.candidates))
    if finished.audit is not None:
        console.say(finished.audit.summary)
    console.say(f"wrote {finished.bundle.path}: {finished.reason}")
    return {
        "bundle": str(finished.bundle.path),
        "reason": finished.reason,
        "manifest": json.loads(finished.bundle.manifest.to_json()),
    }


def _add_finish(parser: ArgumentParser) -> None:
    argument(parser, "prepared PREPARED", "the folder that 'trtdet prepare' wrote", type=Path)
    add_output(parser, "BUNDLE", "folder that is written")
    add_rows(parser, FinishOptions)


PREPARE = Command(
    "prepare",
    summary="write candidate networks with their accuracy, for an engine that another machine builds",
    add_options=partial(model_options, metavar="PREPARED", output="folder that is written", rows=PrepareOptions),
    run=_prepare,
    usage="MODEL --config CONFIG --images DIR --for LIBRARY-VERSION -o PREPARED [options]",
    examples=(
        ("m.onnx --config c.yaml --images photos --for tensorrt-10.3 -o p", "for a Jetson with JetPack 6.2"),
        (
            "m.onnx --config c.yaml --images p --for tensorrt-10.3 --annotations v.json --val-images v -o p",
            "scored with mAP",
        ),
    ),
)
FINISH = Command(
    "finish",
    summary="build prepared candidates, time them on this machine's GPU, and ship the fastest",
    add_options=_add_finish,
    run=_finish,
    usage="PREPARED -o BUNDLE [options]",
    examples=(("prepared -o bundle", "on the machine with the GPU"),),
)
