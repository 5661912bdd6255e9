"""The beginning of each program that runs on the stand-ins for TensorRT and the CUDA driver."""

import importlib.util
from typing import Any

import pytest

needs_cuda_python = pytest.mark.skipif(
    importlib.util.find_spec("cuda") is None, reason="cuda-python is not installed: pip install 'trtdet[cuda]'"
)
_has_rtx = pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx") is None, reason="TensorRT-RTX is not installed: pip install 'trtdet[rtx]'"
)
rtx_marks = [_has_rtx, pytest.mark.tensorrt]


def needs_rtx(test: Any) -> Any:
    """Marks a test that uses TensorRT-RTX itself."""
    return pytest.mark.tensorrt(_has_rtx(test))


CUDA = """
import ctypes, sys, threading
import numpy as np
from trtdet.backends import cuda
from trtdet.errors import BackendError

def alive():
    return [ctypes.CDLL("libcuda.so.1").standin_live(kind) for kind in range(6)]

def refused(function, *arguments, **named):
    try:
        function(*arguments, **named)
    except BackendError as error:
        print(error)
    else:
        print("NOT REFUSED")
"""

PRELUDE = (
    CUDA
    + """
import json
from dataclasses import replace
from pathlib import Path
import onnx, onnx.parser
import tensorrt as trt
from trtdet.backends import EngineFacts, OnnxRunner, library_named, open_engine
from trtdet.backends.tensorrt.messages import logger_of

def net(text, **weights):
    opsets = '["" : 17, "trt.plugins" : 1]'
    model = onnx.parser.parse_model(f"<ir_version: 8, opset_import: {opsets}>\\nnet {text}")
    for name, value in weights.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    for node in model.graph.node:
        node.name = f"/{node.op_type}_{node.output[0]}"
    return model

def conv(batch="1"):
    weight = np.random.default_rng(0).normal(size=(8, 3, 3, 3)).astype(np.float32)
    text = f"(float[{batch},3,16,16] x) => (float[{batch},8,14,14] y, float[{batch},8,14,14] z)"
    return net(text + " { c = Conv(x, w) y = Relu(c) s = Sigmoid(y) z = Mul(y, s) }", w=weight)

def built(model, batch=None, plugins=(), **options):
    # TensorRT keeps the first logger of a process.
    logger = logger_of(trt)
    builder = trt.Builder(logger)
    trt.init_libnvinfer_plugins(logger, "")
    for path in plugins:
        builder.get_plugin_registry().load_library(str(path))
    network = builder.create_network()
    parser = trt.OnnxParser(network, logger)
    assert parser.parse(model.SerializeToString()), parser.get_error(0).desc()
    config = builder.create_builder_config()
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    for name in options.pop("flags", ()):
        config.set_flag(trt.BuilderFlag[name])
    for name in options.pop("previews", ()):
        config.set_preview_feature(trt.PreviewFeature[name], True)
    for name, value in options.items():
        setattr(config, name, value)
    if batch:
        profile = builder.create_optimization_profile()
        profile.set_shape("x", *((size, *network.get_input(0).shape[1:]) for size in batch))
        config.add_optimization_profile(profile)
    return bytes(builder.build_serialized_network(network, config))

facts = EngineFacts(library_named("tensorrt"), trt.__version__, (89,))

def images(count, seed=0):
    return np.random.default_rng(seed).normal(size=(count, 3, 16, 16)).astype(np.float32)

def same(got, wanted):
    assert got.keys() == wanted.keys()
    for name in wanted:
        np.testing.assert_array_equal(got[name], wanted[name])
        assert got[name].dtype == wanted[name].dtype

def computed(model, batch):
    # Node by node, as the stand-in computes: how onnxruntime optimises depends on the CPU, and moves the last digit.
    return OnnxRunner(model).as_written()(batch)
"""
)

RTX = PRELUDE.replace("import tensorrt as trt", "import tensorrt_rtx as trt").replace('"tensorrt"', '"tensorrt-rtx"')
RTX = RTX.replace('    trt.init_libnvinfer_plugins(logger, "")\n', "")
