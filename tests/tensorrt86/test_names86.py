"""What TensorRT 8.6.0 has and what it calls things: every name that the backends use is there."""

from __future__ import annotations

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
    "trt.ComputeCapability": "TensorRT-RTX",
    "config.num_compute_capabilities": "TensorRT-RTX",
    "config.set_compute_capability": "TensorRT-RTX",
    "trt.DynamicShapesKernelSpecializationStrategy": "TensorRT-RTX",
    "config.dynamic_shapes_kernel_specialization_strategy": "TensorRT-RTX",
    "engine.create_runtime_config": "TensorRT-RTX",
    "trt_context.is_stream_capturable": "TensorRT-RTX",
    "trt.CudaGraphStrategy": "TensorRT-RTX",
    "config.cuda_graph_strategy": "TensorRT-RTX",
    "trt.IProgressMonitor": "TensorRT 10",
    "config.progress_monitor": "TensorRT 10",
}
"""Names that are used only with another version or library, which the code asks for first."""

PRESENT = {
    "": "IInt8Calibrator IInt8MinMaxCalibrator IInt8EntropyCalibrator IInt8EntropyCalibrator2 IInt8LegacyCalibrator "
    "INMSLayer IOutputAllocator IErrorRecorder IGpuAllocator IHostMemory init_libnvinfer_plugins get_plugin_registry",
    "Builder": "build_serialized_network get_plugin_registry max_threads create_optimization_profile",
    "BuilderFlag": "INT8 FP16 TF32 OBEY_PRECISION_CONSTRAINTS PREFER_PRECISION_CONSTRAINTS DIRECT_IO "
    "REJECT_EMPTY_ALGORITHMS VERSION_COMPATIBLE EXCLUDE_LEAN_RUNTIME REFIT SPARSE_WEIGHTS DISABLE_TIMING_CACHE",
    "DataType": "FLOAT HALF INT8 INT32 BOOL UINT8 FP8",
    "EngineInspector": "get_engine_information get_layer_information execution_context",
    "HardwareCompatibilityLevel": "NONE AMPERE_PLUS",
    "IBuilderConfig": "int8_calibrator set_calibration_profile set_quantization_flag set_tactic_sources "
    "set_memory_pool_limit create_timing_cache set_timing_cache get_timing_cache plugins_to_serialize "
    "hardware_compatibility_level builder_optimization_level avg_timing_iterations max_aux_streams profile_stream",
    "ICudaEngine": "create_execution_context create_engine_inspector num_io_tensors get_tensor_name get_tensor_mode "
    "get_tensor_dtype get_tensor_shape get_tensor_profile_shape device_memory_size num_layers serialize",
    "IExecutionContext": "execute_async_v3 execute_v2 set_tensor_address get_tensor_address set_input_shape "
    "get_tensor_shape infer_shapes set_optimization_profile_async profiler set_output_allocator get_max_output_size "
    "enqueue_emits_profile report_to_profiler nvtx_verbosity",
    "ILayer": "precision precision_is_set set_output_type metadata name type",
    "INetworkDefinition": "add_nms add_plugin_v2 add_cast num_layers get_layer get_input get_output",
    "IPluginCreator": "create_plugin deserialize_plugin field_names tensorrt_version",
    "IPluginRegistry": "load_library deregister_library plugin_creator_list get_plugin_creator",
    "IProfiler": "report_layer_time",
    "ITensor": "dynamic_range set_dynamic_range",
    "ITimingCache": "combine reset serialize",
    "LayerInformationFormat": "JSON ONELINE",
    "MemoryPoolType": "WORKSPACE TACTIC_DRAM",
    "NetworkDefinitionCreationFlag": "EXPLICIT_BATCH",
    "OnnxParser": "parse parse_from_file supports_model supports_operator get_error num_errors",
    "ProfilingVerbosity": "DETAILED LAYER_NAMES_ONLY NONE",
    "QuantizationFlag": "CALIBRATE_BEFORE_FUSION",
    "Runtime": "deserialize_cuda_engine get_plugin_registry engine_host_code_allowed",
    "TacticSource": "CUBLAS CUBLAS_LT CUDNN EDGE_MASK_CONVOLUTIONS JIT_CONVOLUTIONS",
    "TensorIOMode": "INPUT OUTPUT",
}
"""By class, the module itself first: what is there for a backend to use."""

ABSENT = {
    "": "IProgressMonitor IPluginV3 ISerializationConfig SerializationFlag ExecutionContextAllocationStrategy "
    "OnnxParserFlag ComputeCapability",
    "Builder": "is_plugin_supported",
    "BuilderFlag": "BF16 WEIGHT_STREAMING EDITABLE_TIMING_CACHE STRIP_PLAN",
    "DataType": "INT64 BF16 INT4",
    "IBuilderConfig": "progress_monitor num_compute_capabilities",
    "ICudaEngine": "device_memory_size_v2 create_runtime_config",
    "IExecutionContext": "update_device_memory_size_for_shapes set_all_tensors_debug_state",
    "INetworkDefinition": "add_plugin_v3",
    "IPluginRegistry": "all_creators get_creator",
    "NetworkDefinitionCreationFlag": "STRONGLY_TYPED",
    "OnnxParser": "set_flag",
}
"""What came later: a backend must ask before it uses one of these."""


def names(table: dict[str, str]) -> list[str]:
    return [f"{of}.{name}".lstrip(".") for of, members in table.items() for name in members.split()]


def found(trt: Any, name: str) -> bool:
    """Whether the module has a name, or a class of it a member."""
    thing = trt
    for part in name.split("."):
        thing = getattr(thing, part, None)
        if thing is None:
            return False
    return True


@pytest.mark.parametrize("name", names(PRESENT))
def test_it_has(trt, name):
    assert found(trt, name)


@pytest.mark.parametrize("name", names(ABSENT))
def test_it_has_not(trt, name):
    assert not found(trt, name)


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
    assert asked & set(ELSEWHERE)


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
