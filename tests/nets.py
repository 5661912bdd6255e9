"""Models as text, arrays of noise, configurations and histograms, for the tests of several folders."""

from typing import Any

import numpy as np
import onnx
import onnx.parser

from trtdet.calibration import Histogram
from trtdet.config import Config


def net(text: str, opset: int = 13, named: bool = True, domain: str = "", **weights: Any) -> onnx.ModelProto:
    """Writes a model: ``net("(float[1,3,8,8] x) => (float[1,4,8,8] y) {y = Conv(x, w)}", w=array)``."""
    imports = f'"" : {opset}' + (f', "{domain}" : 1' if domain else "")
    model = onnx.parser.parse_model(f"<ir_version: 8, opset_import: [{imports}]>\nnet {text}")
    for name, value in weights.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(value), name))
    for index, node in enumerate(model.graph.node if named else ()):
        node.name = f"{node.op_type}_{index}"
    return model


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, scale, shape).astype(np.float32)


def configuration(
    decode: str = "yolov5", size: tuple[int, int] = (8, 8), classes: int = 3, nms: Any = None, **head: Any
) -> Config:
    """``input`` in ``head`` holds more keys of the input."""
    inputs = {"size": list(size), **head.pop("input", {})}
    names = [f"c{index}" for index in range(classes)]
    head["decode"] = decode
    return Config.model_validate({"name": "test", "classes": names, "input": inputs, "head": head, "nms": nms or {}})


def same_histogram(one: Histogram, other: Histogram) -> bool:
    return (
        np.array_equal(one.counts, other.counts)
        and one.counts.dtype == other.counts.dtype == np.int64
        and (one.exponent, one.low, one.high) == (other.exponent, other.low, other.high)
    )
