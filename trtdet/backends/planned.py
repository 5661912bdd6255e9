"""A version of a library that will build an engine on another machine."""

from __future__ import annotations

import re

from trtdet.backends.base import BuildRequest, Built, Capabilities
from trtdet.backends.libraries import LIBRARIES
from trtdet.backends.tensorrt import builder, rtx
from trtdet.errors import BackendError
from trtdet.progress import Progress, silent

_OLDEST, _NEWEST = (8, 6), 11
"""The first version of TensorRT, as (major, minor), and the last major version whose networks are known."""


class PlannedBackend:
    """A library's version by its name, such as ``tensorrt-10.3`` or ``tensorrt-rtx-1.7``. It need not be installed, and
    has capabilities but no builder.

    Raises:
        BackendError: no such library, or its version is not supported.
    """

    def __init__(self, target: str) -> None:
        libraries = {library.name: library for library in LIBRARIES if library.makes_engine}
        name, _, version = target.rpartition("-")
        examples = "tensorrt-8.6, tensorrt-10.3, tensorrt-11.0 or tensorrt-rtx-1.7"
        if name not in libraries or not re.fullmatch(r"[0-9]+\.[0-9]+(\.[0-9]+){0,2}", version):
            raise BackendError(f"'{target}' is no library with a version", f"give one such as {examples}")
        major, minor = (int(part) for part in version.split(".")[:2])
        if libraries[name].times_kernels and not ((major, minor) >= _OLDEST and major <= _NEWEST):
            raise BackendError(
                f"{libraries[name].title} {version} is not supported; allowed: {_OLDEST[0]}.{_OLDEST[1]} to {_NEWEST}"
            )
        of = builder.capabilities_of if libraries[name].times_kernels else rtx.capabilities_of
        self._capabilities = of(version if version.count(".") > 1 else f"{version}.0")

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def build(self, request: BuildRequest, progress: Progress = silent) -> Built:
        caps = self._capabilities
        raise BackendError(
            f"{caps.name} {caps.version} builds on the machine that 'trtdet finish' runs on",
            "run it there, on the folder that 'trtdet prepare' wrote",
        )
