"""A machine with a GPU and TensorRT, as far as one can be made without: processes in which ``libcuda.so.1``, NVML and
``tensorrt`` are the stand-ins of this folder. What is run there is trtdet itself, with the real cuda-python."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from standin.forked import Forks

FOLDER = Path(__file__).resolve().parent
_ROOT = FOLDER.parent.parent
PATIENCE = 600
"""Seconds after which a process is taken for one that hangs."""


@dataclass(frozen=True)
class Finished:
    """What a process left: exit code, standard output and standard error."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(self.out)
        return value

    @property
    def message(self) -> str:
        """The one line that says what was wrong."""
        lines = [line for line in self.err.splitlines() if line.startswith("trtdet: error: ")]
        assert len(lines) == 1, self.err
        return lines[0].removeprefix("trtdet: error: ")

    @property
    def ok(self) -> Finished:
        """This, checked to have succeeded."""
        assert self.code == 0, self.err
        return self

    def refused(self, *words: str) -> None:
        """Checks that it failed with a message that has these words."""
        assert (self.code, [word for word in words if word not in self.message]) == (1, []), self.err


@dataclass(frozen=True)
class Machine:
    """Where the compiled stand-ins are, and what starts processes.

    The keywords of every method set what this machine is like:

    - ``version``: of TensorRT, ``10.9.0`` unless said;
    - ``pycuda``: whether PyCUDA is installed;
    - ``rtx``: whether ``tensorrt_rtx`` is the stand-in, not what is installed;
    - ``driver``: False for a machine without the CUDA driver;
    - any other: what the heads of ``cuda.c`` and ``nvml.c`` list, such as ``sm=86, memory=1 << 20``.
    """

    libraries: Path
    forks: Forks

    @staticmethod
    def make(folder: Path) -> None:
        """Compiles the stand-ins into a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        for source, library in (("cuda.c", "libcuda.so.1"), ("nvml.c", "libnvidia-ml.so.1")):
            compile_library(FOLDER / source, folder / library)

    def environment(
        self,
        *,
        version: str = "10.9.0",
        pycuda: bool = False,
        rtx: bool = False,
        driver: bool = True,
        **settings: object,
    ) -> dict[str, str]:
        """The environment of a process on this machine."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith("CUDA_")}
        more = [folder for folder, wanted in (("with_pycuda", pycuda), ("with_rtx", rtx)) if wanted]
        paths = [str(FOLDER), *(str(FOLDER / folder) for folder in more), str(_ROOT)]
        libraries = [str(self.libraries)] if driver else []
        return {
            **kept,
            "PYTHONPATH": os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])]),
            "LD_LIBRARY_PATH": os.pathsep.join([*libraries, *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]),
            "PYTHONDONTWRITEBYTECODE": "1",
            "CUDA_STANDIN_TENSORRT": version,
            **{f"CUDA_STANDIN_{key.upper()}": str(value) for key, value in settings.items()},
        }

    def trtdet(self, *arguments: object, **settings: Any) -> Finished:
        """Runs a command of trtdet."""
        return self._run(["-m", "trtdet", *map(str, arguments)], settings)

    def python(self, program: str, *arguments: object, forked: bool = True, **settings: Any) -> Finished:
        """Runs a program; one that fails, fails the test. ``forked=False`` where the process's own end is looked at."""
        done = self._run(["-W", "error", "-c", program, *map(str, arguments)], settings, forked)
        assert done.code == 0, done.err
        return done

    def _run(self, arguments: list[str], settings: dict[str, Any], forked: bool = True) -> Finished:
        environment = self.environment(**settings)
        if forked:
            done = self.forks.run(arguments, environment, PATIENCE)
        else:
            command = [sys.executable, *arguments]
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=PATIENCE, env=environment
            )
        return Finished(done.returncode, done.stdout, done.stderr)


def compile_library(source: Path, library: Path) -> Path:
    """Compiles C into a shared library."""
    compiler = shutil.which("cc")
    assert compiler, "these tests compile C: apt-get install gcc"
    command = [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread"]
    subprocess.run([*command, "-o", str(library), str(source)], check=True)
    return library


def plugin_library(folder: Path, *creators: str) -> Path:
    """A library with creators of plugins of these names, for the stand-in."""
    source = folder / "plugins.c"
    source.write_text(f'const char *standin_creators(void) {{ return "{" ".join(creators)}"; }}\n')
    return compile_library(source, folder / "libplugins.so")
