"""TensorRT 8.6.0's own ONNX parser, asked on a machine without a GPU.

The builder, which makes networks, cannot be had there; the parser is a library of its own and writes into any network.
``parser/`` holds one that nothing is built from, with a program around it. What the parser says of a model is thus the
real one's word. The shapes are worked out by the stand-in, for the kinds of layers that detectors have, and what a
builder would say is not known.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

SOURCES = Path(__file__).parent / "parser"
TENSORRT_HEADERS = "TRTDET_TENSORRT_HEADERS"
PARSER_HEADER = "TRTDET_ONNX_PARSER_HEADER"
LIBRARIES = ("libnvonnxparser.so.8", "libnvinfer_plugin.so.8", "libnvinfer.so.8")


@dataclass(frozen=True)
class Tensor:
    """A tensor of the network: its shape, with -1 where that is open, and the name of its ``tensorrt.DataType``."""

    name: str
    shape: tuple[int, ...]
    type: str


@dataclass(frozen=True)
class Layer:
    """A layer of the network, with the parser's name for it and the name of its ``tensorrt.LayerType``.

    ``inputs`` are names of tensors, None for one that was left out. Where it is a plugin, ``plugin`` has its ``type``,
    ``version``, ``namespace`` and serialised ``state``.
    """

    name: str
    type: str
    inputs: tuple[str | None, ...]
    outputs: tuple[Tensor, ...]
    plugin: dict[str, Any] | None


@dataclass(frozen=True)
class Parsed:
    """What the parser made of a model; the network is empty where it refused.

    ``errors`` have ``code``, ``node`` (index), ``function`` and ``words``, of an exception that it threw the words
    alone. ``messages`` are its warnings and errors as they go to a logger. ``findings`` are what the stand-in saw that
    a builder would not take, such as operands of different types. ``lacks`` is the function that the stand-in would
    have needed for this model; else empty.
    """

    ok: bool
    errors: tuple[dict[str, Any], ...] = ()
    messages: tuple[str, ...] = ()
    findings: tuple[str, ...] = ()
    inputs: tuple[Tensor, ...] = ()
    outputs: tuple[Tensor, ...] = ()
    layers: tuple[Layer, ...] = ()
    lacks: str = ""


class UnavailableError(Exception):
    """What is missing to compile the program."""


class Parser:
    """Reads models, each in a process of its own, with a program that is compiled in a folder.

    ``trt`` is the module ``tensorrt``; ``said`` is what the compiler had to say. Raises UnavailableError if a compiler
    or a header is missing.
    """

    def __init__(self, trt: Any, folder: Path) -> None:
        self._trt, self._folder, self._program = trt, folder, folder / "parse"
        self.said = self._compiled(_headers())

    def __call__(self, model: onnx.ModelProto, *libraries: Path) -> Parsed:
        """Reads a model, with libraries of plugins."""
        path = self._folder / "model.onnx"
        path.write_bytes(model.SerializeToString())
        done = subprocess.run([self._program, path, *libraries], capture_output=True, text=True, timeout=300)
        assert done.returncode in (0, 1, 3), (done.returncode, done.stdout, done.stderr)
        found = json.loads(done.stdout)
        if "lacks" in found:
            return Parsed(False, lacks=found["lacks"])
        return Parsed(
            found["parsed"],
            *(tuple(found[key]) for key in ("errors", "messages", "findings")),
            *(tuple(self._tensor(one) for one in found.get(key, ())) for key in ("inputs", "outputs")),
            tuple(self._layer(one) for one in found.get("layers", ())),
        )

    def unknown(self, operators: Iterable[str]) -> list[str]:
        """Those of some operators that the parser says it does not know."""
        done = subprocess.run([self._program, "--unknown", *operators], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        listed: list[str] = json.loads(done.stdout)
        return listed

    def _tensor(self, found: dict[str, Any]) -> Tensor:
        return Tensor(found["name"], tuple(found["shape"]), self._trt.DataType(found["type"]).name)

    def _layer(self, found: dict[str, Any]) -> Layer:
        plugin = found["plugin"]
        return Layer(
            found["name"],
            self._trt.LayerType(found["type"]).name,
            tuple(found["inputs"]),
            tuple(self._tensor(one) for one in found["outputs"]),
            plugin and {**plugin, "state": bytes.fromhex(plugin["state"])},
        )

    def _compiled(self, headers: list[Path]) -> str:
        """Compiles the program; what was said meanwhile."""
        recorded = [sys.executable, SOURCES / "recorded.py", headers[0] / "NvInferImpl.h", self._folder / "recorded.h"]
        wheel = Path(self._trt.__file__).parent
        # Half of the headers is deprecated, and the abstract classes ask for all of it.
        warnings = ("-Xcompiler", "-Wall,-Wextra,-Wno-deprecated-declarations")
        included = [word for folder in headers for word in ("-isystem", folder)]
        linked = (f"-L{wheel}", *(f"-l:{name}" for name in LIBRARIES), "-Xlinker", f"-rpath={wheel}", "-cudart=none")
        # Not a line is for a GPU: nvcc knows where CUDA's headers are.
        options = ("-std=c++17", *warnings, "-I", self._folder, *included, *linked)
        compiled = ["nvcc", *options, "-o", self._program, *sorted(SOURCES.glob("*.cpp"))]
        said = ""
        for command in (recorded, compiled):
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600)
            assert done.returncode == 0, done.stdout[-4000:]
            said += done.stdout
        return said


def built(source: Path, folder: Path, *options: str, target: str) -> Path:
    """Builds a target of CMake with g++ and the headers of TensorRT 8.6, into a folder, which is given back."""
    headers = Path(os.environ[TENSORRT_HEADERS]) / "8.6" / "include"
    options = ("-DCMAKE_CXX_COMPILER=g++", f"-DTENSORRT_INCLUDE_DIR={headers}", *options)
    for command in (
        ("cmake", "-S", source, "-B", folder, *options),
        ("cmake", "--build", folder, "--target", target, "--parallel", "2"),
    ):
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=1500)
        assert done.returncode == 0, done.stdout[-4000:]
    return folder


def why_not_built(*tools: str) -> str:
    """What is missing to build with TensorRT's headers and these tools; empty where nothing is."""
    if TENSORRT_HEADERS not in os.environ:
        return f"set {TENSORRT_HEADERS} to a folder that holds 8.6/include/NvInfer.h"
    missing = [tool for tool in tools if shutil.which(tool) is None]
    return f"needs {missing[0]} on PATH" if missing else ""


def _headers() -> list[Path]:
    """The folders of headers, TensorRT's own first."""
    if reason := why_not_built("g++", "nvcc"):
        raise UnavailableError(reason)
    own = Path(os.environ[TENSORRT_HEADERS]) / "8.6" / "include"
    given = Path(os.environ.get(PARSER_HEADER, own / "NvOnnxParser.h"))
    for path in (own / "NvInfer.h", given):
        if not path.is_file():
            named = f"; {PARSER_HEADER} may name it, from branch 8.6-EA of onnx/onnx-tensorrt" if path is given else ""
            raise UnavailableError(f"'{path}' does not exist{named}")
    return [own, given.parent]
