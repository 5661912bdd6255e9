"""A small model of each operator that detectors use."""

import re
from typing import Any

import numpy as np
import onnx

SHAPE = (2, 4, 6, 8)

READ = ("resize nearest", "resize linear", "pad", "steps", "suppression", "suppression of centres")
"""Nodes that read a number in float."""

NODES = {
    "conv": "y = Conv<pads = [1,0,1,2], strides = [2,1], group = 2>(x, w)",
    "conv same": 'y = Conv<auto_pad = "SAME_UPPER", strides = [2,2]>(x, w4)',
    "conv same lower": 'y = Conv<auto_pad = "SAME_LOWER", strides = [2,2]>(x, w4)',
    "transposed": "y = ConvTranspose<strides = [2,2], pads = [1,1,1,1], output_padding = [1,1]>(x, w4)",
    "transposed, more padding": "y = ConvTranspose<strides = [3,3], pads = [1,1,1,1], output_padding = [2,2]>(x, w4)",
    "max pool": "y = MaxPool<kernel_shape = [3,3], pads = [1,1,1,1], strides = [2,2]>(x)",
    "max pool ceil": "y = MaxPool<kernel_shape = [3,3], strides = [2,2], ceil_mode = 1>(x)",
    "average pool": "y = AveragePool<kernel_shape = [2,2], strides = [2,2]>(x)",
    "average pool pads": "y = AveragePool<kernel_shape = [3,3], pads = [1,1,1,1], count_include_pad = 1>(x)",
    "global average": "y = GlobalAveragePool(x)",
    "global max": "y = GlobalMaxPool(x)",
    "resize nearest": 'y = Resize<mode = "nearest", coordinate_transformation_mode = "asymmetric">(x, , twice)',
    "resize linear": 'y = Resize<mode = "linear", coordinate_transformation_mode = "half_pixel">(x, , twice)',
    "resize to": 'y = Resize<mode = "linear", coordinate_transformation_mode = "align_corners">(x, , , to)',
    "slice": "y = Slice(x, starts, ends, axes, steps)",
    "slice back": "y = Slice(x, last, before, one, minus)",
    "split": "a, y = Split<axis = 1>(x, parts)",
    "split evenly": "a, y = Split<axis = 3, num_outputs = 2>(x)",
    "concat": "y = Concat<axis = 1>(x, x)",
    "reshape": "y = Reshape(x, shape)",
    "transpose": "y = Transpose<perm = [0,2,3,1]>(x)",
    "flatten": "y = Flatten(x)",
    "unsqueeze": "a = Unsqueeze(x, axes0) y = Squeeze(a, axes0)",
    "gather": "y = Gather<axis = 1>(x, picks)",
    "gather elements": "y = GatherElements<axis = 1>(x, chosen)",
    "scatter": "y = ScatterND(x, spots, values)",
    "top": "y, b = TopK<axis = 1>(x, several)",
    "least of all": "y, b = TopK<axis = 3, largest = 0>(x, several)",
    "grid sample": "y = GridSample<align_corners = 1>(x, grid)",
    "grid sample of whole pixels": "y = GridSample(x, grid)",
    "grid sample at the border": 'y = GridSample<padding_mode = "border">(x, grid)',
    "regions": "a = RoiAlign<output_height = 3, output_width = 2, sampling_ratio = 2>(x, corners, of) "
    "y = Reshape(a, flat)",
    "regions in whole pixels": "a = RoiAlign<output_height = 2, sampling_ratio = 1, spatial_scale = 0.5, "
    'coordinate_transformation_mode = "output_half_pixel">(x, corners, of) y = Reshape(a, flat)',
    "suppression": "a = Reshape(x, chances) b = NonMaxSuppression(each, a, several, half, half) c = Cast<to = 1>(b) "
    "y = Reshape(c, flat)",
    "suppression of centres": "a = Reshape(x, chances) b = NonMaxSuppression<center_point_box = 1>(each, a, several) "
    "c = Cast<to = 1>(b) y = Reshape(c, flat)",
    "gather nd": "y = GatherND(x, spots)",
    "einsum": 'y = Einsum<equation = "bchw,cd->bdhw">(x, mixed)',
    "sine": "a = Sin(x) b = Cos(x) y = Sub(a, b)",
    "steps": "a = Greater(x, half) y = Where(a, x, half)",
    "expand": "a = GlobalAveragePool(x) y = Expand(a, like)",
    "tile": "y = Tile(x, repeats)",
    "pad": "y = Pad(x, widths, half)",
    "matmul": "y = MatMul(x, square)",
    "matmul vector": "y = MatMul(x, eight)",
    "matmul of two": "a = Transpose<perm = [0,1,3,2]>(x) y = MatMul(x, a)",
    "gemm": "a = Flatten(x) y = Gemm<alpha = 0.5, transB = 1>(a, rows)",
    "depth to space": "y = DepthToSpace<blocksize = 2>(x)",
    "depth to space crd": 'y = DepthToSpace<blocksize = 2, mode = "CRD">(x)',
    "space to depth": "y = SpaceToDepth<blocksize = 2>(x)",
    "batch norm": "y = BatchNormalization(x, four, four, four, four)",
    "batch norm of rows": "a = Reshape(x, chances) y = BatchNormalization(a, four, four, four, four)",
    "layer norm": "y = LayerNormalization(x, eight)",
    "softmax": "y = Softmax<axis = 1>(x)",
    "mean": "y = ReduceMean<keepdims = 0>(x, axes2)",
    "sum": "y = ReduceSum(x, axes2)",
    "max": "y = ReduceMax(x, axes2)",
    "arithmetic": "a = Mul(x, half) b = Add(a, x) c = Sub(b, half) d = Div(c, half) y = Pow(d, two)",
    "least": "y = Min(x, half)",
    "most": "y = Max(x, half)",
    "clip": "y = Clip(x, , half)",
    "exp": "a = Exp(x) b = Sqrt(a) c = Log(b) y = Neg(c)",
    "sigmoid": "a = Sigmoid(x) y = Mul(x, a)",
    "relu": "y = Relu(x)",
    "leaky": "y = LeakyRelu<alpha = 0.2>(x)",
    "leaky by default": "y = LeakyRelu(x)",
    "prelu": "y = PRelu(x, slope)",
    "elu": "y = Elu(x)",
    "hard swish": "y = HardSwish(x)",
    "hard sigmoid": "y = HardSigmoid<alpha = 0.16, beta = 0.4>(x)",
    "softplus": "a = Softplus(x) b = Tanh(a) y = Mul(x, b)",
    "erf": "y = Erf(x)",
    "shape": "a = Shape(x) b = Gather(a, one0) y = Reshape(x, flat)",
}


def model_of(node: str, net: Any, normal: Any) -> onnx.ModelProto:
    """The model of a node, from x of :data:`SHAPE` to y, opset 21; ``net`` and ``normal`` are the fixtures."""
    shapes = {"w": (6, 2, 3, 3), "w4": (4, 4, 3, 3), "values": (2, 6, 8), "grid": (2, 3, 5, 2), "mixed": (4, 3)}
    shapes |= {"square": (8, 8), "rows": (3, 192), "eight": (8,)}
    integers = {"to": [2, 4, 9, 5], "starts": [1, -3], "ends": [2**40, 7], "axes": [2, 3], "steps": [2, 1], "one0": 0}
    integers |= {"before": [-(2**40)], "one": [1], "minus": [-1], "parts": [1, 3], "shape": [0, 2, -1], "axes0": [0, 3]}
    integers |= {"picks": [[2, -1], [0, 0]], "like": SHAPE, "spots": [[0, 1], [1, 3]], "several": [2], "axes2": [2, 3]}
    integers |= {"of": [0, 1, 1, 0], "chances": [2, 4, 48], "repeats": [1, 2, 1, 1], "flat": [2, -1], "last": [-1]}
    floats = {"twice": [1, 1, 2, 2], "half": 0.5, "two": 2, "slope": [[[0.3]]]}
    floats |= {"corners": [[0.5, 1, 6, 4], [-3, -2, 3, 3], [2, 2, 2, 2], [4, 3, 12, 9]]}
    constants = {
        **{name: normal(*shape) for name, shape in shapes.items()},
        **{name: np.array(value, np.int64) for name, value in integers.items()},
        **{name: np.array(value, np.float32) for name, value in floats.items()},
        "chosen": np.random.default_rng(0).integers(-4, 4, (2, 3, 6, 8)),
        "each": np.random.default_rng(1).uniform(0, 9, (2, 48, 4)).astype(np.float32),
        "widths": np.array([0, 0, 1, 2, 0, 0, 0, 1], np.int64),
        "four": np.abs(normal(4)) + 0.5,
    }
    text = NODES[node]
    words = set(re.findall(r"\w+", text))
    used = {name: value for name, value in constants.items() if name in words}
    model = net(f"(float[2,4,6,8] x) => (float y) {{ {text} }}", **used)
    model.opset_import[0].version, model.ir_version = 21, 10
    return model
