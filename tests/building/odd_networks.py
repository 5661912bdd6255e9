"""Small detectors with unusual parts, which are built quickly."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

CONFIG = """
name: odd
classes: [c0, c1]
input: {size: [16, 16], scale: 0.0039, mean: [0.45, 0.45, 0.45], std: [0.25, 0.25, 0.25], resize: stretch}
head: {decode: yolov8, outputs: [output]}
nms: {score_threshold: 0.01}
"""

CHANNELS = 16
EVERY_OTHER = np.arange(CHANNELS) % 2
SPREAD = np.logspace(-8, 4, CHANNELS, dtype=np.float32)
Factors = float | NDArray[np.generic] | list[float]


@dataclass
class Draft:
    """A network in the making: from ``image`` float32 (1, 3, *size)."""

    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(7))
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    weights: list[onnx.TensorProto] = field(default_factory=list)
    size: tuple[int, int] = (16, 16)

    def constant(self, value: NDArray[np.generic], name: str = "") -> str:
        """The name of an initializer."""
        name = name or f"c{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(value, name))
        return name

    def weight(self, *shape: int, scale: float = 1.0) -> NDArray[np.float32]:
        """Random, of a size that keeps activations about as large as the input."""
        drawn = self.rng.normal(0, 1 / np.sqrt(np.prod(shape[1:])), shape)
        return (scale * drawn).astype(np.float32)

    def add(self, kind: str, *inputs: str, **attributes: object) -> str:
        """A node's output."""
        name = f"{kind.lower()}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [f"t{len(self.nodes)}"], name=name, **attributes))
        return self.nodes[-1].output[0]

    def conv(
        self,
        source: str,
        weight: NDArray[np.float32] | str,
        bias: NDArray[np.float32] | None = None,
        **attributes: object,
    ) -> str:
        """A convolution whose output is as large as its input, for kernels of 1 and 3 and without strides."""
        name = weight if isinstance(weight, str) else self.constant(weight)
        size = next(found for found in self.weights if found.name == name).dims[-1]
        inputs = [source, name] if bias is None else [source, name, self.constant(bias)]
        return self.add("Conv", *inputs, **{"pads": [size // 2] * 4, **attributes})

    def model(self, features: str, channels: int, cells: int) -> onnx.ModelProto:
        """With YOLOv8's output for two classes, from a map of so many channels and cells."""
        boxes = self.conv(features, self.weight(4, channels, 1, 1), np.full(4, 4, np.float32))
        classes = self.conv(features, self.weight(2, channels, 1, 1), np.full(2, -1, np.float32))
        rows = self.constant(np.array([1, -1, cells], np.int64))
        parts = [self.add("Reshape", self.add("Relu", boxes), rows)]
        parts.append(self.add("Sigmoid", self.add("Reshape", classes, rows)))
        self.nodes.append(helper.make_node("Concat", parts, ["output"], name="output", axis=1))
        graph = helper.make_graph(
            self.nodes,
            "odd",
            [helper.make_tensor_value_info("image", TensorProto.FLOAT, [1, 3, *self.size])],
            [helper.make_tensor_value_info("output", TensorProto.FLOAT, [1, 6, cells])],
            self.weights,
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
        onnx.checker.check_model(model, full_check=True)
        return model


def silu(draft: Draft, source: str) -> str:
    """x * Sigmoid(x)."""
    return draft.add("Mul", source, draft.add("Sigmoid", source))


def chain(
    weights: Factors = 1.0,
    biases: Factors = 1.0,
    offsets: Factors = 0.0,
    activation: Callable[[Draft, str], str] = silu,
) -> onnx.ModelProto:
    """Two convolutions and the head; the weights and biases of the first by factors and offsets of its channels."""
    draft = Draft()
    weight, bias = draft.weight(CHANNELS, 3, 3, 3), draft.weight(CHANNELS)
    weight *= np.broadcast_to(np.float32(weights), CHANNELS)[:, None, None, None]
    bias = np.float32(bias * np.float32(biases) + np.float32(offsets))
    first = activation(draft, draft.conv("image", weight, bias, strides=[2, 2]))
    second = silu(draft, draft.conv(first, draft.weight(CHANNELS, CHANNELS, 3, 3)))
    return draft.model(second, CHANNELS, 64)


def scaled(first: float, second: float, bias: float = 1.0) -> onnx.ModelProto:
    """Weights of the first convolution times ``first``, of the second times ``second``."""
    draft = Draft()
    features = draft.conv("image", draft.weight(CHANNELS, 3, 3, 3, scale=first), draft.weight(CHANNELS, scale=bias))
    features = draft.add("Relu", features)
    weight = draft.weight(CHANNELS, CHANNELS, 3, 3, scale=second)
    features = draft.add("LeakyRelu", draft.conv(features, weight, strides=[2, 2]), alpha=0.1)
    return draft.model(features, CHANNELS, 64)


def one_channel() -> onnx.ModelProto:
    """A map of a single channel between all convolutions."""
    draft = Draft()
    features = silu(draft, draft.conv("image", draft.weight(1, 3, 3, 3), strides=[2, 2]))
    features = silu(draft, draft.conv(features, draft.weight(1, 1, 3, 3), draft.weight(1)))
    return draft.model(features, 1, 64)


def groups() -> onnx.ModelProto:
    """Groups of several channels."""
    draft = Draft()
    features = silu(draft, draft.conv("image", draft.weight(12, 3, 3, 3), strides=[2, 2]))
    features = silu(draft, draft.conv(features, draft.weight(12, 3, 3, 3), draft.weight(12), group=4))
    features = silu(draft, draft.conv(features, draft.weight(6, 2, 1, 1), group=6))
    return draft.model(features, 6, 64)


def depthwise_multiplier() -> onnx.ModelProto:
    """Depthwise convolutions that make several channels of each, one of them on the image."""
    draft = Draft()
    features = draft.add("Relu", draft.conv("image", draft.weight(6, 1, 3, 3), draft.weight(6), group=3))
    features = silu(draft, draft.conv(features, draft.weight(18, 1, 3, 3), group=6, strides=[2, 2]))
    return draft.model(features, 18, 64)


def single_cell() -> onnx.ModelProto:
    """Maps of 1x1 from a global pool on."""
    draft = Draft()
    features = silu(draft, draft.conv("image", draft.weight(CHANNELS, 3, 3, 3), strides=[2, 2]))
    features = draft.add("GlobalAveragePool", features)
    features = silu(draft, draft.conv(features, draft.weight(CHANNELS, CHANNELS, 3, 3), draft.weight(CHANNELS)))
    features = silu(draft, draft.conv(features, draft.weight(CHANNELS, CHANNELS, 1, 1)))
    return draft.model(features, CHANNELS, 1)


def squeeze_and_excite() -> onnx.ModelProto:
    """A gate of 1x1 maps through a HardSigmoid, HardSwish after it, and a residual around."""
    draft = Draft()
    start = draft.add("Relu", draft.conv("image", draft.weight(CHANNELS, 3, 3, 3), strides=[2, 2]))
    gate = draft.conv(draft.add("GlobalAveragePool", start), draft.weight(2, CHANNELS, 1, 1), draft.weight(2))
    gate = draft.conv(draft.add("Relu", gate), draft.weight(CHANNELS, 2, 1, 1), draft.weight(CHANNELS))
    gated = draft.add("Mul", start, draft.add("HardSigmoid", gate, alpha=1 / 6))
    mixed = draft.conv(gated, draft.weight(CHANNELS, CHANNELS, 1, 1))
    mixed = draft.add("Mul", mixed, draft.add("HardSigmoid", mixed, alpha=1 / 6))
    return draft.model(draft.add("Add", mixed, start), CHANNELS, 64)


def shared_weight() -> onnx.ModelProto:
    """Two convolutions of one initializer, on inputs of different ranges, and a third reader of it."""
    draft = Draft()
    features = silu(draft, draft.conv("image", draft.weight(CHANNELS, 3, 3, 3), strides=[2, 2]))
    shared = draft.constant(draft.weight(CHANNELS, CHANNELS, 3, 3), "shared")
    first = silu(draft, draft.conv(features, shared))
    second = draft.conv(draft.add("Mul", first, draft.constant(np.float32([50.0]))), shared, draft.weight(CHANNELS))
    offset = draft.add("ReduceMean", "shared", axes=[0, 2, 3], keepdims=1)
    return draft.model(draft.add("Add", silu(draft, second), offset), CHANNELS, 64)


def shared_bias() -> onnx.ModelProto:
    """Two convolutions of one bias, of which one has weights a million times as large."""
    draft = Draft()
    bias = draft.constant(draft.weight(CHANNELS), "bias")
    features = "image"
    for channels, scale in ((3, 1.0), (CHANNELS, 1e6)):
        weight = draft.constant(draft.weight(CHANNELS, channels, 3, 3, scale=scale))
        features = draft.add("Conv", features, weight, bias, pads=[1, 1, 1, 1], strides=[2, 2])
        features = silu(draft, features)
    return draft.model(features, CHANNELS, 16)


def split_and_concat() -> onnx.ModelProto:
    """A Concat of a part of itself, of the image and of a constant map, with pooling and resizing."""
    draft = Draft()
    start = silu(draft, draft.conv("image", draft.weight(CHANNELS, 3, 3, 3), strides=[2, 2]))
    draft.nodes.append(helper.make_node("Split", [start], ["left", "right"], name="split", axis=1))
    pooled = draft.add("MaxPool", start, kernel_shape=[5, 5], pads=[2, 2, 2, 2])
    image = draft.add("AveragePool", "image", kernel_shape=[2, 2], strides=[2, 2])
    flat = draft.constant(np.full((1, 1, 8, 8), 2.0, np.float32))
    joined = draft.add("Concat", "left", "right", "left", pooled, image, flat, axis=1)
    features = silu(draft, draft.conv(joined, draft.weight(CHANNELS, 2 * CHANNELS + CHANNELS // 2 + 4, 1, 1)))
    factors = draft.constant(np.array([1, 1, 2, 2], np.float32))
    larger = draft.add("Resize", features, "", factors, mode="nearest")
    back = silu(draft, draft.conv(larger, draft.weight(CHANNELS, CHANNELS, 3, 3), strides=[2, 2]))
    return draft.model(draft.add("Add", back, features), CHANNELS, 64)


def normalised() -> onnx.ModelProto:
    """Batch normalisation of no variance after a convolution without a bias, and one before any convolution."""
    draft = Draft()

    def normalise(source: str, channels: int, variance: float) -> str:
        rest = (draft.weight(channels) + 1, draft.weight(channels), draft.weight(channels))
        spread = np.full(channels, variance, np.float32)
        return draft.add("BatchNormalization", source, *map(draft.constant, (*rest, spread)), epsilon=1e-5)

    features = normalise("image", 3, 1.0)
    features = draft.conv(features, draft.weight(CHANNELS, 3, 3, 3), strides=[2, 2])
    features = silu(draft, normalise(features, CHANNELS, 0.0))
    return draft.model(features, CHANNELS, 64)


def transposed() -> onnx.ModelProto:
    """A transposed convolution with groups, a dilated one, and PRelu of a slope a channel."""
    draft = Draft()
    features = draft.conv("image", draft.weight(CHANNELS, 3, 3, 3), draft.weight(CHANNELS), strides=[4, 4])
    features = draft.add("PRelu", features, draft.constant(np.abs(draft.weight(CHANNELS, 1, 1))))
    up = draft.constant(draft.weight(CHANNELS, 4, 2, 2))
    features = draft.add("ConvTranspose", features, up, strides=[2, 2], group=2)
    features = draft.add("Clip", features, draft.constant(np.float32(0)), draft.constant(np.float32(6)))
    features = draft.conv(features, draft.weight(CHANNELS, 8, 3, 3), dilations=[2, 2], pads=[2, 2, 2, 2])
    return draft.model(silu(draft, features), CHANNELS, 64)


NETWORKS: dict[str, Callable[[], onnx.ModelProto]] = {
    # Half of the output channels are zero whatever the image.
    "dead_channels": lambda: chain(EVERY_OTHER, EVERY_OTHER),
    # Channels that a ReLU always cuts, and one that hardly passes.
    "dead_after_relu": lambda: chain(
        biases=[0.0] * 5 + [1.0] * 11,
        offsets=[-100.0] * 4 + [-2.0] + [0.0] * 11,
        activation=lambda draft, source: draft.add("Relu", source),
    ),
    # All channels are the same number for every image.
    "constant_activation": lambda: chain(0.0, 0.0, 3.0),
    # Nothing but zeros reaches the second convolution.
    "zero_everywhere": lambda: chain(0.0, 0.0),
    # Channels that differ by twelve orders of magnitude.
    "uneven_channels": lambda: chain(SPREAD, SPREAD),
    "tiny_1e-30": lambda: scaled(1e-30, 1.0),
    "tiny_1e-8": lambda: scaled(1e-8, 1e-8, bias=1e-8),
    "denormal": lambda: scaled(1e-41, 1.0, bias=0.0),
    "huge_1e4": lambda: scaled(1e4, 1e4),
    "huge_1e30": lambda: scaled(1e30, 1e-30),
    "huge_1e15_twice": lambda: scaled(1e15, 1e15),
    "one_channel": one_channel,
    "groups": groups,
    "depthwise_multiplier": depthwise_multiplier,
    "single_cell": single_cell,
    "squeeze_and_excite": squeeze_and_excite,
    "shared_weight": shared_weight,
    "shared_bias": shared_bias,
    "split_and_concat": split_and_concat,
    "normalised": normalised,
    "transposed": transposed,
    # Scores of exactly 0 and 1 for every image.
    "saturated": lambda: chain(1e4),
}
"""By name, what makes each."""
