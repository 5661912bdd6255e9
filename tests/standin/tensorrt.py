"""A stand-in for TensorRT: what trtdet calls of it, with the real names. An engine of it is a header and the ONNX
model, which it runs with onnxruntime on memory of the stand-in driver of ``cuda.c``, as work of a stream.

It is strict: what is not here raises AttributeError, to read and to set, and where the real library ends the process
(a Runtime with no device), so does this. ``CUDA_STANDIN_TENSORRT`` says which version it is; names that TensorRT
dropped are there only in the versions that had them. Building processes are handed variables whose names start with
``CUDA_``. What it cannot show: kernels, precision and speed of a GPU.
"""

import ctypes
import enum
import functools
import hashlib
import itertools
import json
import os
import re
import struct
import tempfile
import time
import weakref
from pathlib import Path

import numpy as np
import onnx

# The build process has not imported trtdet, which does this.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
import onnxruntime

_RTX = __name__ == "tensorrt_rtx"
"""TensorRT-RTX has the interface of 11, plans of its own, no plugins, and compiles for a shape when it meets it."""

__version__ = "1.7.1.116" if _RTX else os.environ.get("CUDA_STANDIN_TENSORRT", "10.9.0")
_MAJOR = 11 if _RTX else int(__version__.split(".")[0])

_MAGIC = b"vtrt" if _RTX else b"standin\0"
_PAD = 24 if _RTX else len(_MAGIC)
"""Where the header's length is."""


def _versioned(name, rows):
    """An enumeration of those names that this version has; a row is a name and the first and last major version."""
    return enum.IntEnum(name, {row[0]: value for value, row in enumerate(rows) if row[1] <= _MAJOR <= row[2]})


_NEWEST = 99
DataType = _versioned(
    "DataType",
    (
        *((name, 8, _NEWEST) for name in ("FLOAT", "HALF", "INT8", "INT32", "BOOL", "UINT8", "FP8")),
        *((name, 10, _NEWEST) for name in ("BF16", "INT64", "INT4")),
    ),
)
float32, float16, int8, int32 = DataType.FLOAT, DataType.HALF, DataType.INT8, DataType.INT32
bool, uint8 = DataType.BOOL, DataType.UINT8
if _MAJOR >= 10:
    int64 = DataType.INT64


TensorIOMode = enum.Enum("TensorIOMode", "NONE INPUT OUTPUT", start=0)


TensorLocation = enum.Enum("TensorLocation", "DEVICE HOST", start=0)


LayerInformationFormat = enum.Enum("LayerInformationFormat", "ONELINE JSON", start=0)


ProfilingVerbosity = enum.Enum("ProfilingVerbosity", "LAYER_NAMES_ONLY NONE DETAILED", start=0)


DeviceType = enum.Enum("DeviceType", "GPU DLA", start=0)


HardwareCompatibilityLevel = enum.Enum("HardwareCompatibilityLevel", "NONE AMPERE_PLUS", start=0)


MemoryPoolType = _versioned(
    "MemoryPoolType",
    (
        *((f"DLA_{name}", 8, _NEWEST) for name in ("MANAGED_SRAM", "LOCAL_DRAM", "GLOBAL_DRAM")),
        *((name, 8, _NEWEST) for name in ("WORKSPACE", "TACTIC_DRAM")),
        ("TACTIC_SHARED_MEMORY", 10, _NEWEST),
    ),
)


LayerType = enum.Enum("LayerType", "CONVOLUTION ACTIVATION ELEMENTWISE PLUGIN_V2 QUANTIZE DEQUANTIZE SHUFFLE", start=0)
TacticSource = enum.IntEnum("TacticSource", "EDGE_MASK_CONVOLUTIONS JIT_CONVOLUTIONS", start=3)
BuilderFlag = _versioned(
    "BuilderFlag",
    (
        *((name, 8, 10) for name in ("FP16", "INT8")),
        *((name, 8, _NEWEST) for name in ("DEBUG", "GPU_FALLBACK")),
        ("STRICT_TYPES", 8, 8),
        *((name, 8, _NEWEST) for name in ("REFIT", "DISABLE_TIMING_CACHE", "TF32", "SPARSE_WEIGHTS")),
        *((name, 8, 10) for name in ("OBEY_PRECISION_CONSTRAINTS", "PREFER_PRECISION_CONSTRAINTS")),
        *((name, 8, _NEWEST) for name in ("DIRECT_IO", "VERSION_COMPATIBLE")),
        *((("REQUIRE_USER_ALLOCATION", 8, _NEWEST),) if _RTX else ()),
        ("EXCLUDE_LEAN_RUNTIME", 8, _NEWEST),
        *((name, 10, _NEWEST) for name in ("EDITABLE_TIMING_CACHE", "ERROR_ON_TIMING_CACHE_MISS")),
    ),
)
NetworkDefinitionCreationFlag = _versioned(
    "NetworkDefinitionCreationFlag", (("EXPLICIT_BATCH", 8, 10), ("STRONGLY_TYPED", 10, _NEWEST))
)
PreviewFeature = _versioned(
    "PreviewFeature", (("PROFILE_SHARING_0806", 8, 10), ("ALIASED_PLUGIN_IO_10_03", 10, _NEWEST))
)


@functools.cache
def _cuda():
    driver = ctypes.CDLL("libcuda.so.1")
    size = ctypes.c_size_t
    driver.cuMemAlloc_v2.argtypes = [ctypes.POINTER(size), size]
    driver.cuMemFree_v2.argtypes = [size]
    driver.cuLaunchHostFunc.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    return driver


def _sm():
    """The device's compute capability; without a device the real library takes the process along."""
    driver, major, minor = _cuda(), ctypes.c_int(), ctypes.c_int()
    if driver.cuInit(0) != 0:
        os.abort()
    driver.cuDeviceGetAttribute(ctypes.byref(major), 75, 0)
    driver.cuDeviceGetAttribute(ctypes.byref(minor), 76, 0)
    return 10 * major.value + minor.value


class _DeviceMemory:
    """Memory that the library takes for itself."""

    def __init__(self, size, logger):
        self._address = ctypes.c_size_t()
        code = _cuda().cuMemAlloc_v2(ctypes.byref(self._address), max(1, size))
        if code == 201:
            # No context is current: as CUDA's runtime does, the primary one of the first device is made so.
            context = ctypes.c_void_p()
            _cuda().cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
            _cuda().cuCtxPushCurrent_v2(context)
            code = _cuda().cuMemAlloc_v2(ctypes.byref(self._address), max(1, size))
        self.got = code == 0
        if not self.got:
            logger.log(
                ILogger.Severity.ERROR,
                f"[virtualMemoryBuffer.cpp::resizePhysical::140] Error Code 2: OutOfMemory (Requested size was {size} "
                "bytes.)",
            )

    def __del__(self):
        if getattr(self, "got", False):
            _cuda().cuMemFree_v2(self._address)


def _abstract(self, *_):
    raise NotImplementedError("a subclass must override it")


class ILogger:
    class Severity(enum.Enum):
        INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = range(5)

    INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = Severity
    log = _abstract


class IProfiler:
    report_layer_time = _abstract


class IProgressMonitor:
    phase_start = step_complete = phase_finish = _abstract


_LOGGER = None


def _take_logger(logger):
    """The first logger of a process is the one that every message goes to."""
    global _LOGGER
    if not isinstance(logger, ILogger):
        raise TypeError("incompatible function arguments: logger must be an ILogger")
    if _LOGGER is None:
        _LOGGER = logger
    elif _LOGGER is not logger:
        _LOGGER.log(
            ILogger.Severity.WARNING, "The logger passed into createInferRuntime differs from one already registered"
        )
    return _LOGGER


_GLOBAL_CREATORS = set()


def _creators(library):
    try:
        function = library.standin_creators
    except AttributeError:
        return set()
    function.restype = ctypes.c_char_p
    return set(function().decode().split())


def init_libnvinfer_plugins(logger, namespace):
    if _RTX:  # parsing an operator whose creator is registered ends the process
        os.abort()
    _take_logger(logger)
    _GLOBAL_CREATORS.update({"EfficientNMS_TRT", "ROIAlign_TRT"})
    # What was loaded for the whole process registered itself.
    _GLOBAL_CREATORS.update(_creators(ctypes.CDLL(None)))
    return True


class IPluginRegistry:
    __slots__ = ("_local", "parent_search_enabled")

    def __init__(self):
        self._local = set()
        self.parent_search_enabled = True

    def load_library(self, plugin_path):
        try:
            found = _creators(ctypes.CDLL(plugin_path, mode=ctypes.RTLD_LOCAL))
        except OSError as error:
            _LOGGER.log(ILogger.Severity.ERROR, f"Could not load plugin library: {error}")
            return None
        if not found or found & self._local:
            _LOGGER.log(ILogger.Severity.ERROR, f"Plugin library {plugin_path} has no creators that are new")
            return None
        self._local |= found
        return object()

    def _knows(self, name):
        return name in self._local or (self.parent_search_enabled and name in _GLOBAL_CREATORS)


def get_plugin_registry():
    return _PROCESS_REGISTRY


_PROCESS_REGISTRY = IPluginRegistry()


_ONNX_TYPES = {1: float32, 10: float16, 3: int8, 6: int32, 9: bool, 2: uint8}
if _MAJOR >= 10:
    _ONNX_TYPES[7] = int64
_NUMPY = {one: onnx.helper.tensor_dtype_to_np_dtype(number) for number, one in _ONNX_TYPES.items()}


class ITensor:
    __slots__ = ("dtype", "is_network_input", "name", "shape")

    def __init__(self, value, is_input):
        kind = value.type.tensor_type
        self.name = value.name
        self.dtype = _ONNX_TYPES[kind.elem_type]
        self.shape = tuple(one.dim_value if one.HasField("dim_value") else -1 for one in kind.shape.dim)
        self.is_network_input = is_input


class ILayer:
    __slots__ = ("_node", "_outputs", "_precision", "_stored", "name", "type")

    def __init__(self, node, outputs):
        self._node = node
        self._outputs = outputs
        self.name = node.name
        kinds = {"Conv": "CONVOLUTION", "QuantizeLinear": "QUANTIZE", "DequantizeLinear": "DEQUANTIZE"}
        self.type = LayerType[kinds.get(node.op_type, "ELEMENTWISE")]
        self._precision = None
        self._stored = {}

    num_outputs = property(lambda self: len(self._outputs))
    precision_is_set = property(lambda self: self._precision is not None)

    def get_output(self, index):
        return self._outputs[index]

    @property
    def precision(self):
        return self._precision or float32

    @precision.setter
    def precision(self, value):
        self._precision = value

    def set_output_type(self, index, dtype):
        if self._outputs[index].dtype not in (float32, float16):
            raise TypeError(f"output {index} of {self.name} is no float")
        self._stored[index] = dtype


class INetworkDefinition:
    __slots__ = ("_flags", "_inputs", "_layers", "_model", "_outputs", "_registry", "name")

    def __init__(self, flags, registry):
        self._flags, self._registry = flags, registry
        self._model = None
        self._inputs, self._outputs, self._layers = [], [], []
        self.name = ""

    num_layers = property(lambda self: len(self._layers))
    num_inputs = property(lambda self: len(self._inputs))

    def get_layer(self, index):
        return self._layers[index]

    def get_input(self, index):
        return self._inputs[index]

    def get_output(self, index):
        return self._outputs[index]

    def _take(self, model):
        self._model = model
        inner = onnx.shape_inference.infer_shapes(model).graph
        values = {one.name: one for one in (*inner.value_info, *inner.output)}
        constants = {one.name for one in model.graph.initializer}
        self._inputs = [ITensor(one, True) for one in model.graph.input if one.name not in constants]
        self._outputs = [ITensor(one, False) for one in model.graph.output]
        for node in model.graph.node:
            known = [values[name] for name in node.output if name in values]
            kept = [one for one in known if one.type.tensor_type.elem_type in _ONNX_TYPES]
            self._layers.append(ILayer(node, [ITensor(one, False) for one in kept]))


class ParserError:
    __slots__ = ("_desc", "_index", "_node")

    def __init__(self, node, desc, index=-1):
        self._node, self._desc, self._index = node, desc, index

    def node_name(self):
        return self._node.name if self._node is not None else ""

    def node_operator(self):
        return self._node.op_type if self._node is not None else ""

    def desc(self):
        return self._desc

    def node(self):
        return self._index


class OnnxParser:
    __slots__ = ("_errors", "_network")

    def __init__(self, network, logger):
        _take_logger(logger)
        self._network, self._errors = network, []

    num_errors = property(lambda self: len(self._errors))

    def get_error(self, index):
        return self._errors[index]

    def parse(self, model, path=None):
        try:
            parsed = onnx.load_from_string(model)
        except Exception:
            self._errors.append(ParserError(None, "Failed to parse the ONNX model."))
            return False
        for index, node in enumerate(_nodes(parsed.graph)):
            if node.domain == "trt.plugins" and not self._network._registry._knows(node.op_type):
                asked = f"are the plugin name {node.op_type}, version, and namespace correct?"
                said = f"Assertion failed: creator: Plugin not found, {asked}"
                self._errors.append(ParserError(node, said, index))
        if self._errors:
            return False
        self._network._take(parsed)
        return True


def _nodes(graph):
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                yield from _nodes(inner)


class IOptimizationProfile:
    __slots__ = ("_shapes",)

    def __init__(self):
        self._shapes = {}

    def set_shape(self, input, min, opt, max):
        if not all(low <= mid <= high for low, mid, high in zip(min, opt, max, strict=True)):
            raise ValueError("Shape provided for min is not at most opt, or opt not at most max")
        self._shapes[input] = [list(min), list(opt), list(max)]


class ITimingCache:
    __slots__ = ("_data",)

    def __init__(self, data):
        self._data = data

    def serialize(self):
        return IHostMemory(self._data)


class IHostMemory(bytes):
    """Bytes, as the real one is a buffer of them."""

    nbytes = property(len)


class IBuilderConfig:
    __slots__ = (
        *("DLA_core", "_cache", "_calibration_profile", "_devices", "_flags", "_pools", "_previews", "_profiles"),
        *("_tactics", "builder_optimization_level", "default_device_type", "hardware_compatibility_level"),
        *("int8_calibrator", "plugins_to_serialize", "profiling_verbosity", "progress_monitor"),
    )

    def __init__(self):
        self._flags, self._previews, self._profiles = 1 << BuilderFlag.TF32, 0, []
        self._pools = {MemoryPoolType.WORKSPACE: 1 << 30}
        self._cache, self._calibration_profile, self._tactics = None, None, 0
        self.builder_optimization_level = 3
        self.default_device_type, self.DLA_core, self._devices = DeviceType.GPU, -1, {}
        self.hardware_compatibility_level = HardwareCompatibilityLevel.NONE
        if _MAJOR >= 10:
            self.progress_monitor = None
        if _MAJOR < 11:
            self.int8_calibrator = None
        self.plugins_to_serialize = []
        self.profiling_verbosity = ProfilingVerbosity.LAYER_NAMES_ONLY

    flags = property(lambda self: self._flags)

    def set_flag(self, flag):
        self._flags |= 1 << BuilderFlag(flag)

    def clear_flag(self, flag):
        self._flags &= ~(1 << BuilderFlag(flag))

    def get_flag(self, flag):
        return self._flags >> BuilderFlag(flag) & 1 == 1

    def set_preview_feature(self, feature, enable):
        bit = 1 << PreviewFeature(feature)
        self._previews = self._previews | bit if enable else self._previews & ~bit

    def get_preview_feature(self, feature):
        return self._previews >> PreviewFeature(feature) & 1 == 1

    def can_run_on_DLA(self, layer):
        """Fewer than a DLA takes: what the tests have on one."""
        return layer._node.op_type in ("Conv", "Relu", "Sigmoid", "Mul", "Add", "MaxPool")

    def set_device_type(self, layer, device_type):
        self._devices[layer.name] = DeviceType(device_type)

    def _on_dla(self, network):
        asked = [(one, self._devices.get(one.name, self.default_device_type)) for one in network._layers]
        return [one.name for one, device in asked if device is DeviceType.DLA]

    def set_memory_pool_limit(self, pool, pool_size):
        self._pools[pool] = pool_size

    def set_tactic_sources(self, tactic_sources):
        self._tactics = tactic_sources
        return True

    def add_optimization_profile(self, profile):
        self._profiles.append(profile)
        return len(self._profiles) - 1

    def set_calibration_profile(self, profile):
        self._calibration_profile = profile
        return True

    def create_timing_cache(self, serialized_timing_cache):
        data = bytes(serialized_timing_cache)
        # Spoilt data are refused here, those of another version when they are set.
        return ITimingCache(data) if not data or data.startswith(b"timings of ") else None

    def set_timing_cache(self, cache, ignore_mismatch):
        if cache._data and not ignore_mismatch and not cache._data.startswith(f"timings of {__version__}".encode()):
            return False
        self._cache = cache
        return True

    def get_timing_cache(self):
        return self._cache


class Builder:
    __slots__ = ("_registry", "_sm", "logger")

    def __init__(self, logger):
        self.logger = _take_logger(logger)
        if _cuda().cuInit(0) != 0:
            raise TypeError("pybind11::init(): factory function returned nullptr")
        self._sm, self._registry = _sm(), IPluginRegistry()

    num_DLA_cores = property(lambda self: int(os.environ.get("CUDA_STANDIN_DLAS", "0")))

    def create_network(self, flags=0):
        if flags >> (max(NetworkDefinitionCreationFlag) + 1):
            raise ValueError(f"unknown network flags {flags:#x}")
        return INetworkDefinition(flags, self._registry)

    def create_builder_config(self):
        return IBuilderConfig()

    def create_optimization_profile(self):
        return IOptimizationProfile()

    def get_plugin_registry(self):
        return self._registry

    def build_serialized_network(self, network, config):
        profiles = [one._shapes for one in config._profiles]
        for tensor in network._inputs:
            if -1 in tensor.shape and not (profiles and tensor.name in profiles[0]):
                self.logger.log(
                    ILogger.Severity.ERROR,
                    "IBuilder::buildSerializedNetwork: Error Code 4: Internal Error (Network has dynamic or shape "
                    "inputs, but no optimization profile has been defined.)",
                )
                return None
        if not _watched(getattr(config, "progress_monitor", None), len(network._layers)):
            self.logger.log(ILogger.Severity.ERROR, "the build was cancelled by the progress monitor")
            return None
        if _REFUSED is not None and _pairs(network._model) == int(_REFUSED):
            self.logger.log(ILogger.Severity.ERROR, "Error Code 10: Could not find any implementation for node Conv.")
            return None
        flags = [one.name for one in BuilderFlag if config.get_flag(one)]
        strong = "STRONGLY_TYPED" in NetworkDefinitionCreationFlag.__members__ and (
            _MAJOR >= 11 or network._flags >> NetworkDefinitionCreationFlag.STRONGLY_TYPED & 1
        )
        if strong and {"FP16", "INT8"} & set(flags):
            self.logger.log(ILogger.Severity.ERROR, "precision flags are not allowed in a strongly typed network")
            return None
        on_dla = config._on_dla(network)
        unfit = [one.name for one in network._layers if one.name in on_dla and not config.can_run_on_DLA(one)]
        if unfit and "GPU_FALLBACK" not in flags:
            self.logger.log(
                ILogger.Severity.ERROR, f"Default DLA is enabled but layer {unfit[0]} is not supported on DLA"
            )
            return None
        calibrator = getattr(config, "int8_calibrator", None)
        calibrated = calibrator is not None and "INT8" in flags
        images = _calibrate(calibrator, network, config) if calibrated else []
        if images is None:
            return None
        if config._cache is not None and "DISABLE_TIMING_CACHE" not in flags:
            config._cache._data = f"timings of {__version__}: {len(network._layers)} layers".encode()
        embedded = set()
        # With CUDA_STANDIN_EMBEDS=compatible the libraries are left out, without a word, of every other engine.
        if os.environ.get("CUDA_STANDIN_EMBEDS") != "compatible" or "VERSION_COMPATIBLE" in flags:
            for path in config.plugins_to_serialize:
                embedded |= _creators(ctypes.CDLL(path))
        model = network._model.SerializeToString()
        precisions = {
            one.name: one.precision.name for one in network._layers if getattr(one, "precision_is_set", False)
        }
        asked = {
            "version": __version__,
            "sm": self._sm,
            "size": len(model),
            "sha256": hashlib.sha256(model).hexdigest(),
            "flags": flags,
            "hardware": config.hardware_compatibility_level.name,
            "verbosity": config.profiling_verbosity.name,
            "profiles": profiles,
            "sharing": _MAJOR >= 10 or config.get_preview_feature(PreviewFeature.PROFILE_SHARING_0806),
            "pools": {one.name: size for one, size in config._pools.items()},
            "level": config.builder_optimization_level,
            "dla": config.DLA_core,
            "on_dla": on_dla,
            "embedded": sorted(embedded),
            "precisions": precisions,
            "stored": {
                one.name: {number: kind.name for number, kind in one._stored.items()} for one in network._layers
            },
            "calibrated": calibrated,
            "calibration_images": images,
            "calibration_profile": config._calibration_profile and config._calibration_profile._shapes,
        }
        header = json.dumps(asked).encode()
        size = _PAD + 4 + len(header) + len(model)
        start = struct.pack("<4s12xQ", _MAGIC, size) if _RTX else _MAGIC
        return IHostMemory(start + struct.pack("<I", len(header)) + header + model)


def _watched(monitor, layers):
    """Tells a progress monitor of the build; False where it stopped that."""
    if monitor is None:
        return True
    monitor.phase_start("Building engine", None, layers)
    going = all(monitor.step_complete("Building engine", step) for step in range(layers))
    monitor.phase_finish("Building engine")
    return going


class IInt8Calibrator:
    get_batch_size = get_batch = read_calibration_cache = write_calibration_cache = _abstract


IInt8EntropyCalibrator2, IInt8EntropyCalibrator, IInt8MinMaxCalibrator, IInt8LegacyCalibrator = (
    type(f"IInt8{rule}", (IInt8Calibrator,), {})
    for rule in ("EntropyCalibrator2", "EntropyCalibrator", "MinMaxCalibrator", "LegacyCalibrator")
)


def _calibrate(calibrator, network, config):
    """Asks a calibrator for its cache, or for all its batches and then writes one: the largest values it was given. The
    engine computes in float all the same.

    Gives the mean of each image of the network's first input, in order; None where the batch is not the one that the
    network is calibrated with: of a dynamic network the calibration profile's, else the first profile's optimum."""
    cache = calibrator.read_calibration_cache()
    if cache:
        first = bytes(cache).splitlines()[0].decode()
        if not re.fullmatch(r"TRT-\d+-(Entropy|Entropy2|MinMax|Legacy)?Calibration2?", first):
            raise RuntimeError(f"calibration cache starts with {first!r}")
        return []
    size, largest, means = calibrator.get_batch_size(), {}, []
    names = [one.name for one in network._inputs]
    profiles = [config._calibration_profile, *config._profiles]
    profile = next((one for one in profiles if one is not None), None)
    for tensor in network._inputs:
        batch = tensor.shape[0] if tensor.shape[0] > 0 else profile._shapes[tensor.name][1][0]
        if batch != size:
            _LOGGER.log(ILogger.Severity.ERROR, f"Calibration: batches of {size}, and '{tensor.name}' takes {batch}")
            return None
    while given := calibrator.get_batch(names):
        for tensor, address in zip(network._inputs, given, strict=True):
            values = _view(int(address), (size, *tensor.shape[1:]), _NUMPY[tensor.dtype])
            largest[tensor.name] = max(largest.get(tensor.name, 0.0), float(np.abs(values).max()))
            if tensor is network._inputs[0]:
                means += [float(image.mean(dtype=np.float64)) for image in values]
    lines = [f"{name}: {struct.pack('>f', value / 127).hex()}" for name, value in largest.items()]
    calibrator.write_calibration_cache(memoryview("\n".join(["TRT-8600-EntropyCalibration2", *lines, ""]).encode()))
    return means


def read(engine):
    """The header and the model of an engine; for tests.

    Raises:
        ValueError: it is none, was cut short or altered; the message is what TensorRT says.
    """
    if engine[: len(_MAGIC)] != _MAGIC:
        raise ValueError("Serialization assertion magicTagRead == kMAGIC_TAG failed.Magic tag does not match")
    (length,) = struct.unpack_from("<I", engine, _PAD)
    start = _PAD + 4
    try:
        header = json.loads(engine[start : start + length])
    except ValueError:
        raise ValueError("Serialization assertion size == read failed.") from None
    model = engine[start + length :]
    if len(model) != header["size"] or hashlib.sha256(model).hexdigest() != header["sha256"]:
        raise ValueError("Serialization assertion stdArchive checksum failed.Plan is corrupt")
    return header, model


class Runtime:
    __slots__ = ("DLA_core", "_registry", "_sm", "engine_host_code_allowed", "logger")

    def __init__(self, logger):
        self.logger = _take_logger(logger)
        self._sm = _sm()
        self._registry, self.engine_host_code_allowed, self.DLA_core = IPluginRegistry(), False, -1

    def get_plugin_registry(self):
        return self._registry

    def deserialize_cuda_engine(self, serialized_engine):
        refused = self._refused(bytes(serialized_engine))
        if refused:
            self.logger.log(ILogger.Severity.ERROR, refused)
            self.logger.log(
                ILogger.Severity.ERROR,
                "[runtime.cpp::deserializeCudaEngine] Error Code 4: Internal Error (Engine deserialization failed.)",
            )
            return None
        header, model = read(bytes(serialized_engine))
        engine = ICudaEngine(self, header, model)
        return engine if engine._memory.got else None

    def _refused(self, data):
        try:
            header, model = read(data)
        except ValueError as error:
            return f"[stdArchiveReader.cpp::StdArchiveReader::32] Error Code 1: Serialization ({error})"
        compatible = "VERSION_COMPATIBLE" in header["flags"]
        if compatible and not self.engine_host_code_allowed:
            return "Cannot deserialize engine with lean runtime since IRuntime::getEngineHostCodeAllowed() is false."
        if header["version"] != __version__ and not compatible:
            return (
                "[runtime.cpp::parsePlan::314] Error Code 6: The engine plan file is not compatible with this version "
                f"of TensorRT, expecting library version {__version__} got {header['version']}, please rebuild."
            )
        if header["sm"] != self._sm and not (header["hardware"] == "AMPERE_PLUS" and self._sm >= 80):
            return (
                "[engine.cpp::deserializeEngine::951] Error Code 6: The engine plan file is generated on an "
                f"incompatible device, expecting compute {self._sm / 10} got compute {header['sm'] / 10}."
            )
        if header["embedded"] and not self.engine_host_code_allowed:
            return "deserializeCudaEngineEx: plugin libraries in the plan need IRuntime::getEngineHostCodeAllowed()."
        if header["on_dla"] and self.DLA_core < 0:
            return "Error Code 2: Internal Error (an engine for a DLA, and IRuntime::setDLACore was not called)"
        for node in _nodes(onnx.load_from_string(model).graph):
            known = node.op_type in header["embedded"] or self._registry._knows(node.op_type)
            if node.domain == "trt.plugins" and not known:
                return (
                    f"IPluginRegistry::getCreator: Error Code 4: API Usage Error (Cannot find plugin: {node.op_type}, "
                    "version: 1, namespace:trtdet.)"
                )
        return ""


class ICudaEngine:
    __slots__ = (
        *("__weakref__", "_contexts", "_digest", "_header", "_layers", "_memory", "_model", "_runtime", "_tensors"),
        "name",
    )

    def __init__(self, runtime, header, model):
        self._runtime, self._header, self._model, self.name = runtime, header, onnx.load_from_string(model), ""
        self._memory = _DeviceMemory(len(model), runtime.logger)
        self._digest = hashlib.sha256(model).digest()
        constants = {one.name for one in self._model.graph.initializer}
        inputs = [ITensor(one, True) for one in self._model.graph.input if one.name not in constants]
        outputs = [ITensor(one, False) for one in self._model.graph.output]
        self._tensors = {one.name: one for one in (*inputs, *outputs)}
        self._contexts, self._layers = weakref.WeakSet(), None

    num_io_tensors = property(lambda self: len(self._tensors))
    num_layers = property(lambda self: len(_plan(self)))
    profiling_verbosity = property(lambda self: ProfilingVerbosity[self._header["verbosity"]])
    hardware_compatibility_level = property(lambda self: HardwareCompatibilityLevel[self._header["hardware"]])

    def get_tensor_name(self, index):
        return list(self._tensors)[index]

    def get_tensor_mode(self, name):
        return TensorIOMode.INPUT if self._tensors[name].is_network_input else TensorIOMode.OUTPUT

    def get_tensor_shape(self, name):
        return self._tensors[name].shape

    def get_tensor_dtype(self, name):
        return self._tensors[name].dtype

    def get_tensor_location(self, name):
        return TensorLocation.DEVICE if name in self._tensors else TensorLocation.HOST

    def get_tensor_profile_shape(self, name, profile_index):
        return [tuple(one) for one in self._header["profiles"][profile_index][name]]

    def create_execution_context(self, runtime_config=None):
        if runtime_config is not None and not _RTX:
            raise TypeError("create_execution_context(): incompatible function arguments")
        context = IExecutionContext(self, runtime_config)
        return context if context._memory.got else None

    def create_runtime_config(self):
        return IRuntimeConfig()

    def create_engine_inspector(self):
        return EngineInspector(self)

    _dynamic = property(lambda self: any(-1 in one.shape for one in self._tensors.values() if one.is_network_input))


DynamicShapesKernelSpecializationStrategy = enum.Enum(
    "DynamicShapesKernelSpecializationStrategy", "LAZY EAGER NONE", start=0
)


CudaGraphStrategy = enum.Enum("CudaGraphStrategy", "DISABLED WHOLE_GRAPH_CAPTURE", start=0)


class IRuntimeConfig:
    __slots__ = ("cuda_graph_strategy", "dynamic_shapes_kernel_specialization_strategy")

    def __init__(self):
        self.cuda_graph_strategy = CudaGraphStrategy.DISABLED
        self.dynamic_shapes_kernel_specialization_strategy = DynamicShapesKernelSpecializationStrategy.LAZY


class IExecutionContext:
    __slots__ = (
        *("__weakref__", "_active", "_addresses", "_calls", "_config", "_eager", "_memory", "_shapes"),
        *("engine", "enqueue_emits_profile", "profiler"),
    )

    def __init__(self, engine, config=None):
        self.engine, self.profiler, self.enqueue_emits_profile = engine, None, True
        self._config = config
        strategy = getattr(config, "dynamic_shapes_kernel_specialization_strategy", None)
        self._eager = not engine._dynamic or (strategy is not None and strategy.name == "EAGER")
        self._addresses, self._shapes, self._calls = {}, {}, []
        taken = not engine._header["sharing"] and any(one._active == 0 for one in engine._contexts)
        self._active = -1 if engine._dynamic and taken else 0
        sizes = [_bytes(engine, one, one.shape[0]) for one in engine._tensors.values()]
        self._memory = _DeviceMemory(4 * sum(sizes), engine._runtime.logger)
        for tensor in engine._tensors.values():
            if tensor.is_network_input and -1 not in tensor.shape:
                self._shapes[tensor.name] = tensor.shape
        engine._contexts.add(self)

    active_optimization_profile = property(lambda self: self._active)

    def set_optimization_profile_async(self, profile_index, stream_handle):
        others = [one for one in self.engine._contexts if one is not self and one._active == profile_index]
        if others and not self.engine._header["sharing"]:
            self._say(f"Profile {profile_index} has been chosen for another IExecutionContext.")
            return False
        self._active = profile_index
        return True

    def set_input_shape(self, name, shape):
        tensor, shape = self.engine._tensors[name], tuple(shape)
        if self._active < 0:
            self._say("IExecutionContext::setInputShape: Error Code 3: no optimization profile was set")
            return False
        profiles = self.engine._header["profiles"]
        low, _, high = profiles[self._active][name] if profiles else (tensor.shape,) * 3
        if len(shape) != len(low) or not all(a <= b <= c for a, b, c in zip(low, shape, high, strict=True)):
            self._say(
                f"IExecutionContext::setInputShape: Error Code 3: API Usage Error (Parameter check failed, condition: "
                f"engineDims.d[i] == dims.d[i]. Static dimension mismatch or {shape} out of profile {low} to {high}.)"
            )
            return False
        self._shapes[name] = shape
        return True

    def get_tensor_shape(self, name):
        tensor = self.engine._tensors[name]
        if name in self._shapes:
            return self._shapes[name]
        batch = next(iter(self._shapes.values()), (-1,))[0]
        return (batch if tensor.shape[0] < 0 else tensor.shape[0], *tensor.shape[1:])

    def set_tensor_address(self, name, memory):
        if name not in self.engine._tensors:
            self._say(f"IExecutionContext::setTensorAddress: given invalid tensor name: {name}")
            return False
        self._addresses[name] = memory
        return True

    def execute_async_v3(self, stream_handle):
        missing = [name for name in self.engine._tensors if not self._addresses.get(name)]
        inputs = [name for name, one in self.engine._tensors.items() if one.is_network_input]
        if missing or any(name not in self._shapes for name in inputs):
            self._say(
                f"IExecutionContext::enqueueV3: Error Code 3: Address or shape is not set for {missing or inputs}"
            )
            return False
        shapes = {name: tuple(self.get_tensor_shape(name)) for name in self.engine._tensors}
        work = functools.partial(_execute, self.engine, shapes, dict(self._addresses))
        call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: work())
        self._calls.append(call)
        code = _cuda().cuLaunchHostFunc(stream_handle, call, None)
        if code != 0:
            self._say(f"IExecutionContext::enqueueV3: Error Code 1: Cask (Cuda Runtime error {code})")
            return False
        if self.profiler is not None and self.enqueue_emits_profile:
            _cuda().cuStreamSynchronize(ctypes.c_void_p(stream_handle))
            for name, ms in _times(self.engine, shapes, self._addresses):
                self.profiler.report_layer_time(name, ms)
        return True

    def get_runtime_config(self):
        return self._config

    def is_stream_capturable(self, stream):
        # Its compiler works in the background, and what is captured before it is done would stay what runs.
        return self._eager and not os.environ.get("CUDA_STANDIN_UNCAPTURABLE")

    def _say(self, words):
        self.engine._runtime.logger.log(ILogger.Severity.ERROR, words)


def _bytes(engine, tensor, batch):
    if tensor.shape[0] < 0:
        name = next(one.name for one in engine._tensors.values() if one.is_network_input)
        batch = engine._header["profiles"][0][name][2][0]
    return abs(int(np.prod([batch, *tensor.shape[1:]]))) * np.dtype(_NUMPY[tensor.dtype]).itemsize


def _view(address, shape, dtype):
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer((ctypes.c_char * size).from_address(address), dtype).reshape(shape)


def _given(engine, shapes, addresses):
    return {
        name: _view(addresses[name], shapes[name], _NUMPY[one.dtype])
        for name, one in engine._tensors.items()
        if one.is_network_input
    }


def _pairs(model):
    """How many tensors a network dequantises; distinguishes networks of one detector."""
    return sum(node.op_type == "DequantizeLinear" for node in model.graph.node)


_FAST = os.environ.get("CUDA_STANDIN_FAST")
"""Number of dequantised tensors of the engine that is fast, or "int8" for every engine that has some: others wait."""

_REFUSED = os.environ.get("CUDA_STANDIN_REFUSES")
"""Number of dequantised tensors of the network that the builder refuses."""


def _execute(engine, shapes, addresses):
    if _FAST is not None:
        pairs = _pairs(engine._model)
        if pairs == 0 if _FAST == "int8" else pairs != int(_FAST):
            time.sleep(0.005)
    given = _given(engine, shapes, addresses)
    for name, value in _results(engine, given).items():
        np.copyto(_view(addresses[name], value.shape, value.dtype), value)


_KEPT = 64
_computed = {}
"""The last results, by network and inputs: a measurement runs the same images a hundred times."""


def _results(engine, given):
    key = (engine._digest, *((value.shape, value.tobytes()) for value in given.values()))
    if key not in _computed:
        if len(_computed) == _KEPT:
            _computed.pop(next(iter(_computed)), None)
        _computed[key] = _runner(engine._digest, engine._model).feed(given)
    return _computed[key]


_runners = {}


def _runner(digest, model):
    from trtdet.backends import OnnxRunner

    if digest not in _runners:
        _runners[digest] = OnnxRunner(model, written=True)
    return _runners[digest]


class EngineInspector:
    __slots__ = ("_engine",)

    def __init__(self, engine):
        self._engine = engine

    def get_engine_information(self, format):
        layers = [self._layer(one) for one in _plan(self._engine)]
        if format is LayerInformationFormat.ONELINE:
            return "\n".join(str(one) for one in layers)
        return json.dumps({"Layers": layers, "Bindings": list(self._engine._tensors)}, indent=1)

    def _layer(self, layer):
        verbosity = self._engine.profiling_verbosity
        if verbosity is ProfilingVerbosity.NONE:
            return ""
        return (
            {key: value for key, value in layer.items() if key != "nodes"}
            if (verbosity is ProfilingVerbosity.DETAILED)
            else layer["Name"]
        )


_KINDS = {"Conv": "CaskConvolution", "MaxPool": "CaskPooling", "Concat": "Concatenation"}
_FORMATS = {
    "Int8": "Thirty-two wide channel vectorized row major Int8 format",
    "Half": "Row major linear FP16 format",
    "Float": "Row major linear FP32",
}


def _named(model):
    """The model with a name for every node, as the parser gives them."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for node in copy.graph.node:
        node.name = node.name or f"node_of_{node.output[0]}"
    return copy


def _plan(engine):
    if engine._layers is None:
        engine._layers = _planned(engine)
    return engine._layers


def _planned(engine):
    """The layers that the engine is said to have: a node each, with Q/DQ taken into what they feed, ``Conv + Relu`` as
    one and ``x * sigmoid(x)`` as one. Keys are those of the inspector; ``nodes`` are the names that run in it."""
    header, graph = engine._header, onnx.shape_inference.infer_shapes(_named(engine._model)).graph
    types = {one.name: one.type.tensor_type.elem_type for one in (*graph.value_info, *graph.input, *graph.output)}
    dims = {
        one.name: [dim.dim_value if dim.HasField("dim_value") else -1 for dim in one.type.tensor_type.shape.dim]
        for one in (*graph.value_info, *graph.input, *graph.output)
    }
    weights = {one.name: one for one in graph.initializer}
    makers = {name: node for node in graph.node for name in node.output}
    readers = {}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)

    def before(name):
        """What feeds a value, through Q and DQ, and whether it comes in INT8."""
        found = name in makers and makers[name].op_type == "DequantizeLinear"
        while name in makers and makers[name].op_type in ("QuantizeLinear", "DequantizeLinear"):
            name = makers[name].input[0]
        return name, found

    def described(name, kind, node):
        if node.op_type == "Conv" and kind == "Float" and "FP16" in header["flags"]:
            kind = {"FLOAT": "Float", "HALF": "Half"}[header["precisions"].get(node.name, "HALF")]
        if node.op_type == "Conv" and header["calibrated"] and node.name not in header["precisions"]:
            kind = "Int8"
        return {"Name": name, "Location": "Device", "Dimensions": dims.get(name, []), "Format/Datatype": _FORMATS[kind]}

    done, layers = set(), []
    for node in graph.node:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear", "Constant") or node.name in done:
            continue
        nodes, name = [node], node.name
        following = readers.get(node.output[0], [])
        if len(following) == 1 and node.op_type == "Conv" and following[0].op_type == "Relu":
            nodes, name = [node, following[0]], f"{node.name} + {following[0].name}"
        if (
            len(following) == 1
            and node.op_type == "Sigmoid"
            and following[0].op_type == "Mul"
            and (node.input[0] in following[0].input)
        ):
            nodes, name = [node, following[0]], f"PWN(PWN({node.name}), {following[0].name})"
        done |= {one.name for one in nodes}
        floating = "Half" if types.get(node.input[0] if node.input else "") == 10 else "Float"
        inputs = []
        for one in node.input:
            source, quantized = before(one)
            if source and source not in weights:
                inputs.append(described(source, "Int8" if quantized else floating, node))
        last = nodes[-1].output[0]
        after = readers.get(last, [])
        quantized = after and all(one.op_type == "QuantizeLinear" for one in after)
        kind = "PointWiseV2" if name.startswith("PWN") else _KINDS.get(node.op_type, node.op_type)
        layer = {
            "Name": name,
            "LayerType": "PluginV2" if node.domain == "trt.plugins" else kind,
            "Inputs": inputs,
            "Outputs": [described(last, "Int8" if quantized else floating, node)],
            "TacticName": f"standin_{node.op_type.lower()}",
            "StreamId": 0,
            "Metadata": "\x1e".join(f"[ONNX Layer: {one.name}]" for one in nodes),
            "nodes": [one.name for one in nodes],
        }
        if node.op_type == "Conv":
            source, quantized = before(node.input[1])
            count = int(np.prod(weights[source].dims)) if source in weights else 0
            layer["ParameterType"] = "Convolution"
            layer["Weights"] = {"Type": "Int8" if quantized else floating, "Count": count}
        layers.append(layer)
    return _with_regions(layers, set(header["on_dla"]))


def _with_regions(layers, on_dla):
    """Neighbours on a DLA are one layer, which is named after the first and the last of them."""
    regions = []
    for layer in layers:
        if not on_dla.issuperset(layer["nodes"]):
            regions.append(layer)
        elif regions and regions[-1]["LayerType"] == "DLA":
            last = regions[-1]
            last["nodes"] += layer["nodes"]
            last["Outputs"] = layer["Outputs"]
            last["Name"] = f"{{ForeignNode[{last['nodes'][0]}...{last['nodes'][-1]}]}}"
        else:
            name = f"{{ForeignNode[{layer['nodes'][0]}...{layer['nodes'][-1]}]}}"
            regions.append({**layer, "Name": name, "LayerType": "DLA", "Metadata": ""})
    return regions


_profiles = {}


def _times(engine, shapes, addresses):
    """Name and milliseconds of each layer, of one of the runs that were profiled."""
    key = (engine._digest, tuple(shapes.items()))
    if key not in _profiles:
        _profiles[key] = itertools.cycle(_profiled(engine, _given(engine, shapes, addresses)))
    spent = next(_profiles[key])
    return [(layer["Name"], sum(spent.get(name, 0.0) for name in layer["nodes"])) for layer in _plan(engine)]


_PROFILED = 5


def _profiled(engine, given):
    """Milliseconds by node of some runs of onnxruntime, with its own profile and no fusing."""
    from trtdet.backends.onnxruntime import _custom_operators, _runnable

    data, custom, _ = _runnable(_named(engine._model).SerializeToString())
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.enable_profiling, options.log_severity_level = True, 3
    if custom:
        options.register_custom_ops_library(_custom_operators())
    with tempfile.TemporaryDirectory() as folder:
        options.profile_file_prefix = str(Path(folder) / "run")
        session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
        for _ in range(_PROFILED):
            session.run(None, given)
        events = json.loads(Path(session.end_profiling()).read_text())
    runs = []
    for event in sorted(events, key=lambda event: event["ts"]):
        if event["name"] == "model_run":
            runs.append((event["ts"], event["ts"] + event["dur"], {}))
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            name = event["name"].removesuffix("_kernel_time")
            (spent,) = (spent for start, end, spent in runs if start <= event["ts"] <= end)
            spent[name] = spent.get(name, 0.0) + event["dur"] / 1000
    return [spent for *_, spent in runs]


if not _RTX:
    del DynamicShapesKernelSpecializationStrategy, CudaGraphStrategy, IRuntimeConfig
    del ICudaEngine.create_runtime_config, IExecutionContext.is_stream_capturable, IExecutionContext.get_runtime_config
if _MAJOR < 10:  # what TensorRT 8 did not have yet
    del IProgressMonitor, IBuilderConfig.progress_monitor
    del ParserError.node_name, ParserError.node_operator
if _MAJOR >= 11:  # what TensorRT 11 no longer has
    del ILayer.precision, ILayer.precision_is_set, ILayer.set_output_type
    del IBuilderConfig.int8_calibrator, IBuilderConfig.set_calibration_profile
    del IInt8Calibrator
    del IInt8EntropyCalibrator2, IInt8EntropyCalibrator, IInt8MinMaxCalibrator, IInt8LegacyCalibrator
