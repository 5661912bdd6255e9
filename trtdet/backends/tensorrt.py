"""TensorRT 8.6 to 11: builds for the GPU of this machine. The build itself is shared with TensorRT-RTX, whose API is
that of the modern TensorRT."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx

from trtdet.backends import cuda
from trtdet.backends.base import BuildRequest, Built, Capabilities
from trtdet.backends.opsets import missing_operators, newest_opset
from trtdet.backends.silu_aot import NETWORK_FLAG
from trtdet.errors import BackendError, one_line
from trtdet.passes.plugin_ops import plugin_nodes

PIP = "pip install 'trtdet[trt]'"

_KEPT = ("PATH", "HOME", "TMPDIR", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME", "CUDA_", "NVIDIA_", "VIRTUAL_ENV")
"""Beginnings of the environment variables that the building process is given."""


class TensorRT:
    """The installed TensorRT.

    Raises:
        BackendError: it is not installed, or the machine has no CUDA device. Its Runtime ends a process on a machine
            without one, so nothing of it is created before a device is known.
    """

    def __init__(self) -> None:
        self._trt: Any = import_or_explain("tensorrt", "TensorRT", PIP)
        found = cuda.devices()
        if not found:
            raise BackendError(
                f"TensorRT {self._trt.__version__} builds only on a machine with a CUDA device, which this one lacks; "
                "build there, or use --backend tensorrt-rtx, which needs no GPU"
            )
        self._device = found[0]

    @property
    def capabilities(self) -> Capabilities:
        major, minor = (int(part) for part in self._trt.__version__.split(".")[:2])
        # EfficientNMS is deprecated from 10.12 on, for INMSLayer, which NonMaxSuppression becomes.
        deprecated = (major, minor) >= (10, 12)
        return Capabilities(
            name="tensorrt",
            version=self._trt.__version__,
            makes_engine=True,
            lists_layers=False,
            needs_gpu=True,
            in_graph_nms=("onnx", "efficient", "native") if deprecated else ("efficient", "onnx", "native"),
            max_topk=3840,
            network_flags={8: ("EXPLICIT_BATCH",), 9: ("EXPLICIT_BATCH",), 10: ("STRONGLY_TYPED",)}.get(major, ()),
            precision_flags=("INT8", "FP16") if major < 10 else (),
            layer_precisions=major < 10,
            missing_ops=missing_operators((major, minor)),
            max_opset=newest_opset((major, minor)),
            silu=("plugin", "keep")
            if major < 10
            else ("keep", "plugin")
            if major == 10
            else ("swish", "keep", "plugin"),
            plugin_loading="process" if major < 10 else "registry",
            compiles_plugins=(major, minor) >= (10, 9),
        )

    def unsupported(self, model: onnx.ModelProto) -> dict[str, str]:
        missing = self.capabilities.missing_ops
        return {node.op_type: missing[node.op_type] for node in model.graph.node if node.op_type in missing}

    def build(self, request: BuildRequest) -> Built:
        if request.sms and request.sms != (self._device.sm,):
            raise BackendError(
                f"TensorRT builds for the GPU it runs on, which is compute capability {self._device.sm}, not "
                f"{' '.join(map(str, request.sms))}; leave --sm out or use --backend tensorrt-rtx"
            )
        return replace(build_engine("tensorrt", self.capabilities, request), sms=(self._device.sm,))


def import_or_explain(module: str, title: str, pip: str) -> Any:
    """Imports a vendor's module; a missing one is an error with its pip line."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise BackendError(f"{title} is not installed here ({error}); {pip}") from None


def build_engine(module: str, caps: Capabilities, request: BuildRequest, sms: tuple[int, ...] = ()) -> Built:
    """Builds an engine in a process of its own, with detailed layer messages.

    Args:
        module: ``tensorrt`` or ``tensorrt_rtx``.
        caps: its row.
        request: what to build.
        sms: compute capabilities to build for ahead of time; empty for the machine's own.

    Raises:
        BackendError: the parser or the builder refused, or the process ended; the message holds its own words.
    """
    started = time.perf_counter()
    compiled = caps.compiles_plugins and not request.plugins and any(plugin_nodes(request.model.graph))
    with tempfile.TemporaryDirectory(prefix="trtdet-") as name:
        folder = Path(name)
        facts = {
            "module": module,
            "network_flags": (*caps.network_flags, *((NETWORK_FLAG,) if compiled else ())),
            "precision_flags": caps.precision_flags,
            "sms": sms,
            "batch": request.batch,
            "precisions": dict(request.precisions) if caps.layer_precisions else {},
            "plugins": [str(path.resolve()) for path in request.plugins],
            "plugin_loading": caps.plugin_loading,
            "compiled_plugins": compiled,
        }
        (folder / "request.json").write_text(json.dumps(facts))
        (folder / "model.onnx").write_bytes(request.model.SerializeToString())
        # What the environment holds shifts the heap, and with it the order of what the builder sorts by address.
        kept = {key: value for key, value in os.environ.items() if key.startswith(_KEPT)}
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("build_process.py"))],
            cwd=folder,
            env={**kept, "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            # Ctrl-C reaches this process alone, which then ends the other one.
            start_new_session=True,
        )
        try:
            _, said = process.communicate()
        finally:
            process.kill()
            process.wait()
        log = folder / "log.txt"
        lines = tuple(log.read_text(errors="replace").splitlines()) if log.is_file() else ()
        if (folder / "error.txt").is_file():
            raise BackendError(f"{caps.name} {caps.version}: {one_line((folder / 'error.txt').read_text())}")
        if process.returncode != 0 or not (folder / "engine").is_file():
            how = f"signal {-process.returncode}" if process.returncode < 0 else f"exit code {process.returncode}"
            last = said.strip().splitlines()[-1:] or lines[-1:] or ("no word",)
            raise BackendError(f"{caps.name} {caps.version} ended while building, with {how}: {one_line(last[0])}")
        return Built((folder / "engine").read_bytes(), sms, lines, time.perf_counter() - started)
