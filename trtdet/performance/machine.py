"""The state of the machine around a measurement: its load, and the device's clocks."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trtdet.performance.targets import Target


@dataclass(frozen=True)
class Machine:
    """The state of the machine before or after a measurement.

    Attributes:
        cpu: its model, as the system calls it.
        cores: how many this process may use.
        cores_in_all: how many there are.
        load: mean number of running processes over 1, 5 and 15 minutes.
        clocks: the device's clocks, temperature and throttling; None where they are not known.
    """

    cpu: str
    cores: int
    cores_in_all: int
    load: tuple[float, float, float]
    clocks: dict[str, Any] | None

    @staticmethod
    def now(targets: Sequence[Target]) -> Machine:
        """The present state, with the clocks of the device that the targets run on."""
        cores = len(os.sched_getaffinity(0))
        return Machine(_cpu(), cores, os.cpu_count() or cores, os.getloadavg(), _clocks(targets))

    @property
    def warnings(self) -> tuple[str, ...]:
        """One warning where other processes kept half of the cores or more busy over the last minute."""
        if self.load[0] < self.cores_in_all / 2:
            return ()
        return (
            f"the machine was busy before it began: load {self.load[0]:.2f} on {self.cores_in_all} cores; the times "
            "are longer and scatter more than on an idle one",
        )


def circumstances(before: Machine, after: Machine) -> tuple[str, str]:
    """The machine before and after a measurement, in two lines."""
    known = before.clocks or after.clocks
    return (
        f"{before.cpu}, {before.cores} of {before.cores_in_all} cores, load {before.load[0]:.2f} before and "
        f"{after.load[0]:.2f} after",
        f"clocks: {_in_words(before.clocks)} before, {_in_words(after.clocks)} after" if known else "clocks not known",
    )


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()


def _clocks(targets: Sequence[Target]) -> dict[str, Any] | None:
    for target in targets:
        if target.on_device:
            found = target.runner.clocks()
            return None if found is None else asdict(found)
    return None


def _in_words(clocks: dict[str, Any] | None) -> str:
    return "not known" if clocks is None else ", ".join(f"{key} {value}" for key, value in clocks.items())
