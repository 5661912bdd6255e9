"""An environment for each peer, and what a command takes in time and memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from trtdet.errors import one_line

_WATCHER = """\
import json, resource, subprocess, sys, time
started = time.perf_counter()
code = subprocess.run(sys.argv[2:], stdin=subprocess.DEVNULL, stdout=open(sys.argv[1], "wb"), stderr=subprocess.STDOUT)
seconds = time.perf_counter() - started
print(json.dumps([code.returncode, seconds, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024]))
"""
"""A small process between: a child's peak starts from that of its parent, and this one's parent has scored a model."""


class Failed(Exception):
    """A peer could not be installed or a command went wrong; the message is one line."""


@dataclass(frozen=True)
class Measured:
    """What a whole process took, from its start to its end.

    Attributes:
        seconds: wall time.
        megabytes: peak resident size of the largest process in it, in MiB.
    """

    seconds: float
    megabytes: float


def measure(command: list[str], log: Path) -> Measured:
    """Runs a command, with what it prints in ``log``.

    Raises:
        Failed: it ended with an error; the message is the last line it printed.
    """
    # NNCF reports its use over the network unless it runs in CI.
    environment = {**os.environ, "NNCF_CI": "1"}
    watcher = [sys.executable, "-c", _WATCHER, str(log), *command]
    done = subprocess.run(watcher, check=True, capture_output=True, text=True, env=environment)
    code, seconds, megabytes = json.loads(done.stdout)
    if code:
        said = log.read_text(errors="replace")
        raise Failed(f"signal {-code}, killed at {megabytes:.0f} MB" if code < 0 else _last_line(said))
    return Measured(seconds, megabytes)


def environment_of(peer: str, folder: Path) -> Path:
    """The Python of an environment with the packages that ``requirements-PEER.txt`` pins; an existing one is kept.

    Raises:
        Failed: it cannot be made or pip cannot install; the message is pip's own.
    """
    requirements = requirements_of(peer)
    place = folder / peer
    python = place / "bin" / "python"
    installed = place / "installed.txt"
    if installed.is_file() and installed.read_text() == requirements.read_text():
        return python
    print(f"{peer}: installing into {place}", file=sys.stderr)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r", str(requirements)]
    for command in ([sys.executable, "-m", "venv", str(place)], pip):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise Failed(f"not installed: {_last_line(done.stdout + done.stderr)}")
    installed.write_text(requirements.read_text())
    return python


def requirements_of(peer: str) -> Path:
    """The file with the pinned versions of a peer."""
    return Path(__file__).with_name(f"requirements-{peer}.txt")


def _last_line(said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    # pip says more after its error, in lines of their own.
    errors = [line for line in lines if line.lower().startswith("error:")]
    return one_line((errors or lines or ["no word"])[-1])
