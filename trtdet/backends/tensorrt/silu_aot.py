"""``TRT_SiLU`` and ``TRT_HardSwish`` as Python plugins compiled ahead of time, for TensorRT 10.9 and later.

The engine carries the kernel as PTX, so running it needs neither Python nor a plugin library. NVRTC compiles the kernel
of ``plugins/silu`` with the constants of each node in its source.

The rules below are from TensorRT's Python package (TensorRT on GitHub,
``python/packaging/bindings_wheel/tensorrt/plugin``):

- ``_validate.py``: annotations are types, not strings, and attributes have no defaults. A list attribute is a NumPy
  array. So is the single integer here, as ``_lib.py`` would make an ``int`` of an array, which NumPy 2.4 refuses.
- ``_plugin_class.py``: ``aot_impl`` gets every attribute by position, so a node must carry all of :data:`ATTRIBUTES`;
  only the C++ plugin has defaults. The kernel takes the inputs, then 32-bit integer scalars, then the outputs.
- ``_lib.py``: a creator makes a plugin that runs in Python by default; hence :data:`NETWORK_FLAG`.

The parser finds the creators by the node's ``plugin_namespace``, ``plugin_version`` and ``op_type``.
"""

from __future__ import annotations

import functools
import importlib
import sys
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from trtdet.backends import cuda
from trtdet.config import shipped_folder
from trtdet.errors import BackendError, one_line

PIP = "pip install 'trtdet[aot]'"

NAMESPACE = "trtdet"
NETWORK_FLAG = "PREFER_AOT_PYTHON_PLUGINS"
"""The NetworkDefinitionCreationFlag of a network with these nodes."""

ATTRIBUTES = ("output_type", "input_scale", "factor", "offset")
"""The attributes that every node must carry, in this order; ``plugins/README.md`` explains them."""

Activation = Literal["silu", "hard_swish"]
ElementType = Literal["float", "half", "int8"]

OPS: dict[str, Activation] = {"TRT_SiLU": "silu", "TRT_HardSwish": "hard_swish"}

LAYOUTS: dict[ElementType, dict[str, tuple[int, bool]]] = {
    "float": {},
    "half": {"CHW2": (2, False), "HWC8": (8, True), "HWC16": (16, True)},
    "int8": {"CHW4": (4, False), "CHW32": (32, False), "HWC16": (16, True)},
}
"""TensorFormat members besides LINEAR, by type of input and output: (channels per vector, channels last). They pack the
third dimension from the end, which is the channels only for (N, C, H, W)."""

THREADS = 256
"""Threads per block, as ``kThreadsPerBlock`` in ``plugins/silu/kernel.cuh``."""

_ARCHITECTURE = "compute_75"  # the oldest that NVRTC 13 supports; the driver compiles PTX for every later GPU
_HEADERS = ("activation.h", "kernel.cuh")
_CPP_ACTIVATIONS: dict[Activation, str] = {"silu": "kSiLU", "hard_swish": "kHardSwish"}
_CPP_TYPES: dict[ElementType, str] = {"float": "float", "half": "trtdet::Half", "int8": "trtdet::Int8"}
_BYTES: dict[ElementType, int] = {"float": 4, "half": 2, "int8": 1}
_AUTOTUNE: dict[ElementType, str] = {"float": "FP32", "half": "FP16", "int8": "INT8"}
_OUTPUT_TYPES = ("FLOAT", "HALF", "INT8")  # by their values in nvinfer1::DataType


@dataclass(frozen=True)
class Kernel:
    """One kernel with its constants: (input_scale, factor, offset) for each of its ``channels``, or once for all.

    ``input`` and ``output`` are the types of x and y, ``vector`` the channels per vector of the layout, 1 for LINEAR.
    """

    activation: Activation
    input: ElementType
    output: ElementType
    vector: int
    channels: tuple[tuple[float, float, float], ...]

    @property
    def name(self) -> str:
        """The entry in the PTX, such as ``trtdet_silu_int8_int8_32``."""
        return f"trtdet_{self.activation}_{self.input}_{self.output}_{self.vector}"

    @property
    def elements_per_thread(self) -> int:
        """Elements that a thread moves at once: 16 bytes of the wider type."""
        return 16 // max(_BYTES[self.input], _BYTES[self.output])

    def source(self) -> str:
        """CUDA C++ of the kernel ``(x, total, channels, span, y)``; the integers are those of ``trtdet::Extent``."""
        rows = ",\n".join(
            "    {" + ", ".join(f"{value.hex()}f" for value in (*row, 0.0)) + "}" for row in self.channels
        )
        activation = f"trtdet::Activation::{_CPP_ACTIVATIONS[self.activation]}"
        x, y = _CPP_TYPES[self.input], _CPP_TYPES[self.output]
        return f"""\
#include "kernel.cuh"

static __device__ const trtdet::Channel entries[] = {{
{rows}
}};

extern "C" __global__ void __launch_bounds__(trtdet::kThreadsPerBlock)
{self.name}(const {x}* x, int total, int channels, int span, {y}* y) {{
    trtdet::compute<{activation}, {x}, {y}, {self.vector}>(
        x, y, trtdet::Table{{entries, {len(self.channels)}}},
        trtdet::Extent{{unsigned(total), unsigned(channels), unsigned(span)}}, trtdet::Steps{{0.0f, 0.0f}});
}}
"""


@functools.lru_cache(maxsize=256)
def compile_ptx(kernel: Kernel) -> bytes:
    """PTX of the kernel for compute capability 7.5 and later; needs no GPU. Raises BackendError if NVRTC is not
    installed or refused the source; the message quotes it."""
    nvrtc = _import_nvrtc()
    folder = shipped_folder("plugins") / "silu"
    headers = [(folder / name).read_bytes() for name in _HEADERS]
    names = [name.encode() for name in _HEADERS]
    program = _results(
        nvrtc,
        nvrtc.nvrtcCreateProgram(kernel.source().encode(), f"{kernel.name}.cu".encode(), len(names), headers, names),
    )
    try:
        options = [b"--std=c++17", f"--gpu-architecture={_ARCHITECTURE}".encode()]
        (result,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            log = b" " * int(_results(nvrtc, nvrtc.nvrtcGetProgramLogSize(program)))
            nvrtc.nvrtcGetProgramLog(program, log)
            raise BackendError(f"NVRTC cannot compile {kernel.name}: {one_line(log.decode(errors='replace'))}")
        ptx = b" " * int(_results(nvrtc, nvrtc.nvrtcGetPTXSize(program)))
        _results(nvrtc, nvrtc.nvrtcGetPTX(program, ptx))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return ptx.rstrip(b"\0")


def check_compiler() -> None:
    """Checks that kernels can be compiled here and read by the driver, before a long calibration.

    A driver reads PTX of its own and earlier CUDA versions (CUDA Compatibility, "Application Considerations"). Raises
    BackendError if NVRTC is not installed, or its CUDA is newer than the driver's.
    """
    nvrtc, newest = _import_nvrtc(), cuda.driver_version()
    major, minor = _results(nvrtc, nvrtc.nvrtcVersion())
    if newest and (major, minor) > tuple(int(part) for part in newest.split(".")):
        raise BackendError(
            f"the plugin's kernel would be PTX of CUDA {major}.{minor}, and this machine's driver reads up to {newest}",
            "update the driver, give the plugin's library with --set engine.plugins=LIBRARY (plugins/README.md), or "
            "choose another --silu",
        )


def register(trt: Any) -> None:
    """Registers both ops with the module ``tensorrt``, 10.9 or later; repeated calls do nothing.

    Raises BackendError if TensorRT-RTX is given or loaded, whose parser ends the process at an op with a registered
    creator; TensorRT or the driver is too old; or NVRTC is not installed.
    """
    if trt.__name__ == "tensorrt_rtx" or "tensorrt_rtx" in sys.modules:
        raise BackendError(
            "plugins cannot be registered in a process that holds TensorRT-RTX, which would end when it parses such a "
            "node",
            "build with TensorRT in a separate process, or leave the plugin out: TensorRT-RTX fuses SiLU itself",
        )
    if not hasattr(trt, "QuickPluginCreationRequest"):
        raise BackendError(
            f"plugins compiled ahead of time need TensorRT 10.9 or later, got {trt.__version__}",
            "update it, or build and load the plugin library (plugins/README.md)",
        )
    check_compiler()
    trtp = importlib.import_module(f"{trt.__name__}.plugin")
    registered = getattr(trtp.op, NAMESPACE, None)
    for op, activation in OPS.items():
        if not hasattr(registered, op):
            _register(trt, trtp, f"{NAMESPACE}::{op}", activation=activation)


def _register(trt: Any, trtp: Any, plugin: str, activation: Activation) -> None:
    types: dict[Any, ElementType] = {trt.DataType.FLOAT: "float", trt.DataType.HALF: "half", trt.DataType.INT8: "int8"}

    def describe(x: Any, output_type: Any, input_scale: Any, factor: Any, offset: Any) -> Any:
        kind = int(output_type[0])
        if not -1 <= kind < len(_OUTPUT_TYPES):
            raise BackendError(f"{plugin}: output_type is {kind}; allowed: -1 (as the input), 0, 1, 2")
        y = x.like()
        if kind != -1:
            y.dtype = getattr(trt.DataType, _OUTPUT_TYPES[kind])
        return y

    # Set by hand: with postponed `annotations` they are strings, which _validate.py cannot read.
    describe.__annotations__ = {
        "x": trtp.TensorDesc,
        "output_type": npt.NDArray[np.int32],
        **dict.fromkeys(("input_scale", "factor", "offset"), npt.NDArray[np.float32]),
        "return": trtp.TensorDesc,
    }

    def tune(x: Any, outputs: Any) -> Any:
        source, target = types[x.dtype], types[outputs[0].dtype]
        layouts = ["LINEAR", *(LAYOUTS[source] if source == target and x.ndim == 4 else ())]
        io_types = f"{_AUTOTUNE[source]}, {_AUTOTUNE[target]}"
        return [trtp.AutoTuneCombination(io_types, f"{layout}, {layout}") for layout in layouts]

    tune.__annotations__ = {"return": list[trtp.AutoTuneCombination]}

    def implement(
        x: Any, output_type: Any, input_scale: Any, factor: Any, offset: Any, outputs: Any, tactic: Any
    ) -> Any:
        source = types[x.dtype]
        vector, channels_last = LAYOUTS[source].get(x.format.name, (1, False))
        table = channel_table(input_scale, factor, offset)
        shape = x.shape_expr
        count = tuple(x.shape)[1]
        if len(table) > 1 and count not in (-1, len(table)):
            raise BackendError(f"{plugin}: the input has {count} channels and the attributes {len(table)}; give 1 or C")
        kernel = Kernel(activation, input=source, output=types[outputs[0].dtype], vector=vector, channels=table)
        span, total = trtp.ShapeExpr(1), shape[0] * (trtp.cdiv(shape[1], vector) * vector)
        for axis in range(2, x.ndim):
            span, total = span * shape[axis], total * shape[axis]
        launch = trtp.KernelLaunchParams()
        launch.grid_x = trtp.cdiv(total, THREADS * kernel.elements_per_thread)
        launch.block_x = THREADS
        scalars = trtp.SymIntExprs(3)
        for index, value in enumerate((total, shape[1], trtp.ShapeExpr(1) if channels_last else span)):
            scalars[index] = trtp.SymInt32(value)
        return kernel.name, compile_ptx(kernel), launch, scalars

    implement.__annotations__ = {"return": tuple[str, bytes, trtp.KernelLaunchParams, trtp.SymIntExprs]}

    trtp.register(plugin)(describe)
    trtp.autotune(plugin)(tune)
    trtp.aot_impl(plugin)(implement)


def channel_table(
    input_scale: npt.NDArray[np.float32], factor: npt.NDArray[np.float32], offset: npt.NDArray[np.float32]
) -> tuple[tuple[float, float, float], ...]:
    """(input_scale, factor, offset) for each channel, or once; each attribute has length 1 or C. Raises BackendError if
    the lengths do not match, a value is not finite, or an input_scale is not above 0."""
    attributes = {"input_scale": input_scale, "factor": factor, "offset": offset}
    count = max(len(values) for values in attributes.values())
    for name, values in attributes.items():
        if len(values) not in (1, count):
            raise BackendError(f"{name} has {len(values)} values; give 1, or one for each of the {count} channels")
        if not np.isfinite(values).all() or (name == "input_scale" and (values <= 0).any()):
            positive = " and above 0" if name == "input_scale" else ""
            raise BackendError(f"{name} holds a value that is not finite{positive}; every value must be")
    columns = [np.broadcast_to(values, count).tolist() for values in attributes.values()]
    return tuple(zip(*columns, strict=True))


def _import_nvrtc() -> Any:
    try:
        nvrtc = importlib.import_module("cuda.bindings.nvrtc")
        _results(nvrtc, nvrtc.nvrtcVersion())
    except (ImportError, RuntimeError) as error:
        raise BackendError(f"NVRTC, which compiles the kernel, is not installed ({one_line(error)})", PIP) from None
    return nvrtc


def _results(nvrtc: Any, answer: tuple[Any, ...]) -> Any:
    """The results after the status: a single one or a tuple. Any status but success is an error."""
    status, *rest = answer
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise BackendError(f"NVRTC: {nvrtc.nvrtcGetErrorString(status)[1].decode()}")
    return rest[0] if len(rest) == 1 else tuple(rest)
