"""``trtdet doctor``: what works on this machine."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from typing import Any

from trtdet.cli.command import Command
from trtdet.progress import Console
from trtdet.tables import Table


def _options(parser: ArgumentParser) -> None:
    """The command has no options."""


def _run(options: Namespace, console: Console) -> dict[str, Any]:
    from trtdet.backends.doctor import diagnose

    state = diagnose()
    devices = ", ".join(state.devices) or "none: engines are built ahead of time with TensorRT-RTX"
    console.say(f"trtdet {state.trtdet}, Python {state.python}\nCUDA devices: {devices}\nCUDA driver: {state.driver}")
    for title, checks in (("backend", state.backends), ("extra", state.extras)):
        rows = [(check.name, "ok" if check.ok else "missing", check.detail, check.fix) for check in checks]
        console.say(f"\n{Table((title, 'status', 'detail', 'to do'), rows)}")
    places = [(use.backend, use.consumer, "yes" if use.runs else "no", use.detail) for use in state.consumers]
    console.say(f"\n{Table(('bundle of', 'in', 'runs', 'with, or why not'), places)}")
    return asdict(state)


COMMAND = Command(
    "doctor",
    summary="check this machine and print the install commands for what is missing",
    add_options=_options,
    run=_run,
)
