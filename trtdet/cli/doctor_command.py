"""``trtdet doctor``: what works on this machine."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Any

from trtdet.cli.command import Command
from trtdet.progress import Console


def _options(parser: ArgumentParser) -> None:
    """It takes no options of its own."""


def _run(options: Namespace, console: Console) -> dict[str, Any]:
    from trtdet.backends.doctor import diagnose

    found = diagnose()
    devices = ", ".join(found.devices) or "none: engines are built ahead of time with TensorRT-RTX"
    console.say(f"trtdet {found.trtdet}, Python {found.python}\nCUDA devices: {devices}\nCUDA driver: {found.driver}")
    for title, checks in (("backends", found.backends), ("extras", found.extras)):
        console.say(f"{title}:")
        for check in checks:
            mark = "ok     " if check.ok else "missing"
            console.say(f"  {mark} {check.name:13} {check.detail}" + (f"  ->  {check.fix}" if check.fix else ""))
    return found.as_dict()


COMMAND = Command("doctor", "what works on this machine, with the pip line for the rest", _options, _run)
