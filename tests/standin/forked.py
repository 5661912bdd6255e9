"""Python processes without their start: what takes two seconds to import is imported once, in a process that forks for
each command.

    python forked.py        one request a line on standard input, its exit status a line on standard output

A forked process has the environment, the arguments and the standard streams of its request. What the dynamic loader
and Python read at their start (``LD_LIBRARY_PATH``, ``PYTHONPATH``) is that of the process that forks: ``Forks`` has a
process for each.
"""

import atexit
import importlib
import json
import os
import pkgutil
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import trtdet

AT_START = ("LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE")
PRELOADED = ("numpy", "cv2", "yaml", "onnx", "onnxruntime", "onnx_graphsurgeon", "faster_coco_eval", "rich.progress")
"""What trtdet loads where it is needed. Nothing of TensorRT or the driver, which are stand-ins that differ from one
command to the next."""

LEFT = ("trtdet.exporter", "trtdet.quantization.gradients", "trtdet.deploy.triton", "trtdet.__main__")
"""Packages of trtdet that are not preloaded: torch starts threads, which no fork has, and Triton has own modules."""


class Forks:
    """Starts commands in forked processes, one at a time."""

    def __init__(self) -> None:
        self._parents: dict[tuple[str | None, ...], subprocess.Popen[str]] = {}

    def run(
        self, arguments: Sequence[str], environment: Mapping[str, str], timeout: int
    ) -> subprocess.CompletedProcess[str]:
        """Runs what ``python ARGUMENTS`` would, with ``-m MODULE`` or ``-c PROGRAM``, after ``-W error`` or not."""
        parent = self._parent(environment)
        assert parent.stdin is not None
        assert parent.stdout is not None
        with tempfile.TemporaryDirectory() as folder:
            out, err = Path(folder) / "out", Path(folder) / "err"
            request = {
                "arguments": list(arguments),
                "environment": dict(environment),
                "directory": str(Path.cwd()),
                "out": str(out),
                "err": str(err),
                "timeout": timeout,
            }
            parent.stdin.write(json.dumps(request) + "\n")
            parent.stdin.flush()
            answer = parent.stdout.readline()
            assert answer, f"the process that forks ended with {parent.wait()}"
            status = int(answer)
            text = [path.read_text(encoding="utf-8") for path in (out, err)]
        return subprocess.CompletedProcess(list(arguments), status, *text)

    def close(self) -> None:
        for parent in self._parents.values():
            parent.kill()
            parent.communicate()

    def _parent(self, environment: Mapping[str, str]) -> subprocess.Popen[str]:
        key = tuple(environment.get(name) for name in AT_START)
        if key not in self._parents:
            self._parents[key] = subprocess.Popen(
                [sys.executable, __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=dict(environment),
            )
        return self._parents[key]


def serve() -> None:
    """Answers requests until standard input ends."""
    sys.path.pop(0)  # this file's folder, which a process started with -m or -c does not have
    for name in (*PRELOADED, *modules()):
        importlib.import_module(name)
    latency = sys.modules["trtdet.performance.latency"]
    latency.measure.__defaults__ = (*latency.measure.__defaults__[:-1], hurried)
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    for line in requests:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            requests.close()
            answers.close()
            end(become(request))
        _, status = os.waitpid(child, 0)
        answers.write(f"{os.waitstatus_to_exitcode(status)}\n")
        answers.flush()


def modules() -> list[str]:
    """All modules of trtdet but those of :data:`LEFT`: packages load theirs at first use, which is in each fork."""
    everything = pkgutil.walk_packages(trtdet.__path__, "trtdet.")
    return [module.name for module in everything if not module.name.startswith(LEFT)]


def hurried() -> float:
    """The clock that ends measurements, in seconds; its tenfold haste is enough for engines that are stand-ins."""
    return 10 * time.perf_counter()


def become(request: Mapping[str, Any]) -> int:
    """Runs a request's program as its own process would, and gives its exit status."""
    signal.alarm(request["timeout"])
    for stream, name in enumerate((os.devnull, request["out"], request["err"])):
        file = os.open(name, os.O_RDONLY if stream == 0 else os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(file, stream)
        os.close(file)
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environment"])
    arguments = list(request["arguments"])
    if arguments[:2] == ["-W", "error"]:
        warnings.simplefilter("error")
        del arguments[:2]
    kind, program, *rest = arguments
    sys.path.insert(0, "" if kind == "-c" else request["directory"])
    sys.argv = [kind, *rest]
    try:
        if kind == "-m":
            runpy.run_module(program, run_name="__main__", alter_sys=True)
        else:
            sys.modules["__main__"] = main = ModuleType("__main__")
            exec(compile(program, "<string>", "exec"), vars(main))
    except SystemExit as stop:
        if isinstance(stop.code, int) or stop.code is None:
            return stop.code or 0
        print(stop.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def end(status: int) -> None:
    """Ends the process without taking libraries apart: onnxruntime waits for a thread that was not forked."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    serve()
