"""What TensorRT 8.6.0 has and what it calls things: every name that the backends use is there."""

import ast
import ctypes
import mmap
import re
from pathlib import Path
from typing import Any

import pytest

import trtdet.backends
from trtdet.backends import cuda
from trtdet.backends.tensorrt import builder as tensorrt
from trtdet.backends.tensorrt import calibrators
from trtdet.backends.tensorrt.builder import TensorRT
from trtdet.calibration.cache import OURS, version_number

pytestmark = pytest.mark.tensorrt86

BACKEND_FILES = [
    path
    for path in sorted((Path(trtdet.backends.__file__).parent / "tensorrt").glob("*.py"))
    # The first is TensorRT-RTX's alone, the second for TensorRT 10.9 and later, the third reads ONNX models alone.
    if path.name not in ("rtx.py", "silu_aot.py", "dla.py")
]

CLASSES = {
    "builder": "Builder",
    "config": "IBuilderConfig",
    "trt_context": "IExecutionContext",
    "engine": "ICudaEngine",
    "inspector": "EngineInspector",
    "layer": "ILayer",
    "network": "INetworkDefinition",
    "parser": "OnnxParser",
    "profile": "IOptimizationProfile",
    "runtime": "Runtime",
    "tensor": "ITensor",
}
"""What the backends call the library's objects."""

ELSEWHERE = {
    # TensorRT-RTX
    *("trt.ComputeCapability", "config.num_compute_capabilities", "config.set_compute_capability"),
    *("trt.DynamicShapesKernelSpecializationStrategy", "config.dynamic_shapes_kernel_specialization_strategy"),
    *("trt.CudaGraphStrategy", "config.cuda_graph_strategy", "engine.create_runtime_config"),
    "trt_context.is_stream_capturable",
    # TensorRT 10
    *("trt.IProgressMonitor", "config.progress_monitor"),
}
"""Names that are used only with another version or library, which the code asks for first."""


def found(trt: Any, name: str) -> bool:
    """Whether the module has a name, or a class of it a member."""
    thing = trt
    for part in name.split("."):
        thing = getattr(thing, part, None)
        if thing is None:
            return False
    return True


def used(path: Path) -> set[str]:
    """``trt.BuilderFlag.INT8``, ``config.set_flag``: what a file uses of the library, by what it calls its objects."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        # What a call gives is none of these objects.
        if isinstance(node, ast.Attribute) and re.fullmatch(r"[\w.]+", text := ast.unparse(node)):
            first, *rest = text.removeprefix("self.").lstrip("_").split(".")
            if rest and first == "trt":
                found.add(".".join((first, *rest)))
            elif rest and first in CLASSES:
                found.add(f"{first}.{rest[0]}")
    return found


@pytest.mark.parametrize("path", BACKEND_FILES, ids=lambda path: path.name)
def test_every_name_that_a_backend_uses_is_there(trt, path):
    missing = []
    for name in sorted(used(path)):
        first, rest = name.split(".", 1)
        there = found(trt, rest if first == "trt" else f"{CLASSES[first]}.{rest}")
        if not there and not any(name.startswith(other) for other in ELSEWHERE):
            missing.append(name)
    assert missing == []


def test_names_are_found_in_the_file_that_asks_the_builder():
    asked = used(Path(tensorrt.__file__).with_name("build_process.py"))
    assert {"trt.BuilderFlag.OBEY_PRECISION_CONSTRAINTS", "config.profiling_verbosity"} <= asked
    assert asked & ELSEWHERE


def test_the_flags_that_the_capabilities_name_are_there(trt, monkeypatch):
    made = TensorRT.__new__(TensorRT)
    monkeypatch.setattr(made, "_trt", trt, raising=False)
    monkeypatch.setattr(made, "_device", cuda.Device("a GPU", 87), raising=False)
    caps = made.capabilities
    assert caps.version == "8.6.0" and caps.dla
    for typing in (caps.explicit, caps.implicit):
        assert typing is not None and typing.weak and typing.network_flags
        assert all(found(trt, f"NetworkDefinitionCreationFlag.{name}") for name in typing.network_flags)
    assert all(found(trt, f"BuilderFlag.{name}") for names in tensorrt._BUILDER_FLAGS.values() for name in names)
    assert caps.preview_features and all(found(trt, f"PreviewFeature.{name}") for name in caps.preview_features)


def test_the_version_in_the_heading_of_a_cache_is_the_librarys(trt):
    assert ctypes.CDLL("libnvinfer.so.8").getInferLibVersion() == version_number(trt.__version__) == 8600


def test_the_library_knows_the_algorithm_and_the_words_that_are_looked_for(trt):
    with (
        (Path(trt.__file__).parent / "libnvinfer.so.8").open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as library,
    ):
        assert library.find(f"\0{OURS}\0".encode()) > 0
        assert [words for words in calibrators._WORDS if library.find(words.encode()) < 0] == []
        assert library.find(b"\0TRT-\0") > 0
