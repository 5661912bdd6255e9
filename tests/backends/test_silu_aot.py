"""Activation plugins compiled ahead of time: every kernel through NVRTC, and the calls to TensorRT."""

from __future__ import annotations

import enum
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, get_args, get_origin

import numpy as np
import pytest

from trtdet.backends.tensorrt import silu_aot
from trtdet.backends.tensorrt.silu_aot import ATTRIBUTES, LAYOUTS, Kernel, channel_table, compile_ptx, register
from trtdet.errors import BackendError

KERNELS = [
    Kernel(activation, source, target, vector, ((0.5, 1.5, -0.25), (0.25, 3.0, 0.125)))
    for activation in ("silu", "hard_swish")
    for source in ("float", "half", "int8")
    for target in ("float", "half", "int8")
    for vector in (1, *(vector for vector, _ in LAYOUTS[source].values() if source == target))
]


@pytest.fixture(autouse=True)
def no_rtx(monkeypatch):
    """Other tests of this process may have loaded TensorRT-RTX."""
    monkeypatch.delitem(sys.modules, "tensorrt_rtx", raising=False)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_a_kernel_compiles_without_a_gpu(kernel, tmp_path):
    pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC is not installed: pip install 'trtdet[aot]'")
    ptx = compile_ptx(kernel).decode()
    entry = re.search(r"\.visible \.entry (\w+)\((.*?)\)", ptx, re.DOTALL)
    assert entry is not None
    assert entry[1] == kernel.name
    assert re.findall(r"\.param \.(\w+)", entry[2]) == ["u64", "u32", "u32", "u32", "u64"]
    assert ".target sm_75" in ptx
    # A thread stores what it computed in one instruction, 16 bytes where y is not the narrower type.
    words = kernel.elements_per_thread * {"float": 4, "half": 2, "int8": 1}[kernel.output] // 4
    assert re.search(rf"st\.global{ {4: '.v4', 2: '.v2', 1: ''}[words] }\.[ubf]32", ptx)
    # INT8 to INT8 looks up what 256 inputs become, in tables that a block shares once it has filled them.
    tables = re.findall(r"\.shared [^;]*\[(\d+)\];", ptx)
    bands = {1: 1, 4: 4, 16: 32, 32: 32}
    assert tables == ([str(256 * bands[kernel.vector])] if kernel.input == kernel.output == "int8" else [])
    assert len(re.findall(r"bar(rier)?\.sync", ptx)) == 2 * len(tables)
    # A function that is not in the source would be left to a linker, which an engine has not.
    assert ".extern" not in ptx
    assembler = shutil.which("ptxas") or shutil.which("/usr/local/cuda/bin/ptxas")
    if assembler is not None:
        (tmp_path / "kernel.ptx").write_text(ptx)
        command = [assembler, "-arch=sm_90", "-v", str(tmp_path / "kernel.ptx"), "-o", str(tmp_path / "kernel.cubin")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert "0 bytes spill stores" in done.stderr


def test_constants_are_written_exactly():
    table = channel_table(*(np.array([value], np.float32) for value in (0.1, 1 / 3, -1e-30)))
    written = re.findall(r"(-?0x[\d.a-f]+p[+-]\d+)f", Kernel("silu", "int8", "int8", 1, table).source())
    assert (
        np.float32([float.fromhex(value) for value in written]).tolist() == np.float32([0.1, 1 / 3, -1e-30, 0]).tolist()
    )


def test_a_table_takes_one_value_or_one_a_channel():
    one, three = np.array([2], np.float32), np.array([1, 2, 3], np.float32)
    assert channel_table(one, one, one) == ((2, 2, 2),)
    assert channel_table(one, three, one) == ((2, 1, 2), (2, 2, 2), (2, 3, 2))
    with pytest.raises(BackendError, match="factor has 2 values; give 1, or one for each of the 3 channels"):
        channel_table(one, three[:2], three)
    with pytest.raises(BackendError, match="input_scale holds a value that is not finite and above 0"):
        channel_table(one - 2, one, one)
    with pytest.raises(BackendError, match="offset holds a value that is not finite; every value must be"):
        channel_table(one, one, one * np.float32(np.nan))


def test_a_source_that_does_not_compile_is_one_line():
    pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC is not installed: pip install 'trtdet[aot]'")
    with pytest.raises(BackendError, match="NVRTC cannot compile trtdet_silu_float_float_1: .*nanf") as caught:
        compile_ptx(Kernel("silu", "float", "float", 1, ((float("nan"), 1.0, 0.0),)))
    assert "\n" not in str(caught.value)


def test_without_nvrtc_the_pip_line_is_given(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", None)
    with pytest.raises(BackendError, match=r"NVRTC, which compiles the kernel, is not installed .*trtdet\[aot\]"):
        compile_ptx(Kernel("silu", "half", "float", 1, ((7.0, 7.0, 7.0),)))


class DataType(enum.Enum):
    FLOAT, HALF, INT8 = 0, 1, 2


class TensorFormat(enum.Enum):
    LINEAR, CHW2, HWC8, CHW4, CHW32, HWC16 = 0, 1, 2, 3, 5, 11


class Expression:
    """A symbolic size that keeps its value, as ShapeExpr and SymInt32 do."""

    def __init__(self, value: Any) -> None:
        self.value = int(getattr(value, "value", value))

    def __mul__(self, other: Any) -> Expression:
        return Expression(self.value * Expression(other).value)


class TensorDesc:
    def __init__(self, dtype: DataType, shape: tuple[int, ...], fmt: TensorFormat = TensorFormat.LINEAR) -> None:
        self.dtype, self.shape, self.format = dtype, shape, fmt
        self.shape_expr = [Expression(size) for size in shape]
        self.ndim = len(shape)

    def like(self) -> TensorDesc:
        return TensorDesc(self.dtype, self.shape, self.format)


class AutoTuneCombination:
    def __init__(self, io_types: str, layouts: str) -> None:
        self.words = (io_types, layouts)


class KernelLaunchParams:
    def __init__(self) -> None:
        self.grid_x: Any = 1
        self.block_x: Any = 1


class SymIntExprs(list[Any]):
    def __init__(self, length: int) -> None:
        super().__init__([None] * length)


class Stand(ModuleType):
    """``tensorrt`` and its ``plugin``; ``told`` is what was registered, by (decorator, op)."""

    def __init__(self) -> None:
        super().__init__("stand_in")
        self.__version__ = "10.9.0"
        self.DataType, self.TensorFormat, self.QuickPluginCreationRequest = DataType, TensorFormat, enum.Enum
        self.told: dict[tuple[str, str], Callable[..., Any]] = {}
        self.plugin: Any = ModuleType("stand_in.plugin")
        self.plugin.op = ModuleType("op")
        for kind in (TensorDesc, AutoTuneCombination, KernelLaunchParams, SymIntExprs):
            setattr(self.plugin, kind.__name__, kind)
        self.plugin.ShapeExpr = self.plugin.SymInt32 = Expression
        self.plugin.cdiv = lambda a, b: Expression(-(-Expression(a).value // b))
        for name in ("register", "autotune", "aot_impl"):
            setattr(self.plugin, name, self.decorator(name))

    def decorator(self, name: str) -> Callable[[str], Callable[[Any], Any]]:
        def outer(plugin: str) -> Callable[[Any], Any]:
            def inner(function: Any) -> Any:
                namespace, op = plugin.split("::")
                assert (name, op) not in self.told, f"{plugin} already has a definition"
                self.told[name, op] = function
                if not hasattr(self.plugin.op, namespace):
                    setattr(self.plugin.op, namespace, ModuleType(namespace))
                setattr(getattr(self.plugin.op, namespace), op, object())
                return function

            return inner

        return outer


@pytest.fixture
def trt(monkeypatch):
    pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC is not installed: pip install 'trtdet[aot]'")
    stand = Stand()
    monkeypatch.setitem(sys.modules, "stand_in", stand)
    monkeypatch.setitem(sys.modules, "stand_in.plugin", stand.plugin)
    register(stand)
    return stand


def attributes(output_type: int = -1, channels: int = 1) -> list[np.ndarray]:
    per_channel = np.linspace(1, 2, channels).astype(np.float32)
    return [np.array([output_type], np.int32), per_channel, per_channel, per_channel]


def test_both_ops_are_registered_once_with_annotations_that_are_types(trt):
    register(trt)
    assert sorted(trt.told) == [
        (name, op) for name in ("aot_impl", "autotune", "register") for op in ("TRT_HardSwish", "TRT_SiLU")
    ]
    described = dict(trt.told["register", "TRT_SiLU"].__annotations__)
    assert described.pop("x") is described.pop("return") is TensorDesc
    assert tuple(described) == ATTRIBUTES
    assert [get_args(get_args(hint)[1])[0] for hint in described.values()] == [np.int32, *[np.float32] * 3]
    assert all(get_origin(hint) is np.ndarray for hint in described.values())
    assert trt.told["autotune", "TRT_SiLU"].__annotations__ == {"return": list[AutoTuneCombination]}
    given = get_args(trt.told["aot_impl", "TRT_SiLU"].__annotations__["return"])
    assert given == (str, bytes, KernelLaunchParams, SymIntExprs)


@pytest.mark.parametrize(("output_type", "expected"), [(-1, "INT8"), (0, "FLOAT"), (1, "HALF"), (2, "INT8")])
def test_the_output_is_of_the_type_the_node_says(trt, output_type, expected):
    x = TensorDesc(DataType.INT8, (2, 3, 4, 4))
    y = trt.told["register", "TRT_SiLU"](x, *attributes(output_type))
    assert (y.dtype, y.shape) == (DataType[expected], x.shape)
    with pytest.raises(BackendError, match="output_type is 3; allowed: -1"):
        trt.told["register", "TRT_SiLU"](x, *attributes(3))


def test_packed_formats_are_offered_where_the_channels_are_what_they_pack(trt):
    def offered(source: str, target: str, shape: tuple[int, ...]) -> list[tuple[str, str]]:
        x, y = TensorDesc(DataType[source], shape), TensorDesc(DataType[target], shape)
        return [one.words for one in trt.told["autotune", "TRT_SiLU"](x, (y,))]

    image = (1, 3, 4, 4)
    assert offered("INT8", "INT8", image) == [
        ("INT8, INT8", f"{name}, {name}") for name in ("LINEAR", "CHW4", "CHW32", "HWC16")
    ]
    assert offered("HALF", "HALF", image) == [
        ("FP16, FP16", f"{name}, {name}") for name in ("LINEAR", "CHW2", "HWC8", "HWC16")
    ]
    assert offered("INT8", "HALF", image) == [("INT8, FP16", "LINEAR, LINEAR")]
    assert (
        offered("INT8", "INT8", (1, 3, 4))
        == offered("INT8", "INT8", (1, 3, 2, 2, 2))
        == [("INT8, INT8", "LINEAR, LINEAR")]
    )


@pytest.mark.parametrize(
    ("dtype", "fmt", "vector", "scalars", "grid"),
    [
        ("INT8", "LINEAR", 1, [2 * 33 * 35, 33, 35], 1),
        ("INT8", "CHW32", 32, [2 * 64 * 35, 33, 35], 2),
        ("INT8", "HWC16", 16, [2 * 48 * 35, 33, 1], 1),
        ("HALF", "HWC8", 8, [2 * 40 * 35, 33, 1], 2),
        ("FLOAT", "LINEAR", 1, [2 * 33 * 35, 33, 35], 3),
    ],
)
def test_an_implementation_covers_the_padded_tensor(trt, dtype, fmt, vector, scalars, grid):
    x = TensorDesc(DataType[dtype], (2, 33, 5, 7), TensorFormat[fmt])
    name, ptx, launch, given = trt.told["aot_impl", "TRT_HardSwish"](x, *attributes(channels=33), (x.like(),), 0)
    assert name.startswith("trtdet_hard_swish_") and name.endswith(f"_{vector}")
    assert f".entry {name}(".encode() in ptx
    assert [one.value for one in given] == scalars
    assert (launch.grid_x.value, launch.block_x) == (grid, 256)
    assert (
        f"kThreadsPerBlock = {launch.block_x};" in (silu_aot.shipped_folder("plugins") / "silu/kernel.cuh").read_text()
    )


def test_channels_that_do_not_fit_the_attributes_are_refused(trt):
    implement = trt.told["aot_impl", "TRT_SiLU"]
    x = TensorDesc(DataType.INT8, (2, 8, 5, 7))
    with pytest.raises(BackendError, match="trtdet::TRT_SiLU: the input has 8 channels and the attributes 4"):
        implement(x, *attributes(channels=4), (x,), 0)


def test_an_old_tensorrt_is_pointed_to_the_library():
    old = ModuleType("tensorrt")
    old.__dict__["__version__"] = "10.8.0"
    with pytest.raises(BackendError, match="need TensorRT 10.9 or later, got 10.8.0; .*plugins/README.md"):
        register(old)


@pytest.mark.parametrize("version", ["12.8", "12.9"])
def test_a_driver_that_does_not_read_the_kernel_is_named(monkeypatch, version):
    pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC is not installed: pip install 'trtdet[aot]'")
    monkeypatch.setattr(silu_aot.cuda, "driver_version", lambda: version)
    with pytest.raises(BackendError, match=rf"PTX of CUDA 13\.\d, and this machine's driver reads up to {version}"):
        register(Stand())


def test_tensorrt_rtx_is_refused(monkeypatch):
    with pytest.raises(BackendError, match="holds TensorRT-RTX"):
        register(ModuleType("tensorrt_rtx"))
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", ModuleType("tensorrt_rtx"))
    with pytest.raises(BackendError, match="holds TensorRT-RTX"):
        register(Stand())


@pytest.mark.tensorrt
def test_a_process_that_loaded_tensorrt_rtx_ends_with_the_error_and_does_not_abort():
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed: pip install 'trtdet[rtx]'")
    program = (
        "import sys, tensorrt_rtx\n"
        "from trtdet.backends.tensorrt.silu_aot import register\n"
        "from trtdet.errors import BackendError\n"
        "try:\n    register(tensorrt_rtx)\n"
        "except BackendError as error:\n    sys.exit(str(error))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.startswith("plugins cannot be registered in a process that holds TensorRT-RTX")
