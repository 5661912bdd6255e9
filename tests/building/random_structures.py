"""Detectors of random structure, from parts of real ones and a seed."""

from dataclasses import dataclass, field

import numpy as np
import onnx
from odd_networks import Draft

ACTIVATIONS = ("relu", "silu", "leaky", "hardswish", "relu6", "prelu", "elu", "mish", "none")


@dataclass(frozen=True)
class Map:
    """A feature map."""

    name: str
    channels: int
    height: int
    width: int

    @property
    def size(self) -> tuple[int, int]:
        return self.height, self.width


@dataclass
class Writer:
    """Writes blocks of one network, which share a kind of activation."""

    seed: int
    draft: Draft = field(init=False)
    activation: str = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        sides = 32 * rng.integers(1, 4, 2)
        self.draft = Draft(rng, size=(int(sides[0]), int(sides[1])))
        self.activation = str(rng.choice(ACTIVATIONS[:-1]))

    def below(self, count: int) -> int:
        return int(self.draft.rng.integers(count))

    def channels(self) -> int:
        return int(self.draft.rng.choice([4, 8, 12, 16, 24, 32]))

    def activated(self, source: str, channels: int) -> str:
        add, constant = self.draft.add, self.draft.constant
        kind = self.activation if self.below(6) else ACTIVATIONS[self.below(len(ACTIVATIONS))]
        if kind == "relu":
            return add("Relu", source)
        if kind == "silu":
            return add("Mul", source, add("Sigmoid", source))
        if kind == "leaky":
            return add("LeakyRelu", source, alpha=0.1)
        if kind == "hardswish":
            return add("Mul", source, add("HardSigmoid", source, alpha=1 / 6))
        if kind == "relu6":
            return add("Clip", source, constant(np.float32(0)), constant(np.float32(6)))
        if kind == "prelu":
            return add("PRelu", source, constant(np.abs(self.draft.weight(channels, 1, 1))))
        if kind == "elu":
            return add("Elu", source)
        if kind == "mish":
            return add("Mul", source, add("Tanh", add("Softplus", source)))
        return source

    def conv(self, source: Map, channels: int, kernel: int = 3, *, stride: int = 1, group: int = 1) -> Map:
        """A convolution, in half of the cases with batch normalisation, and its activation."""
        draft = self.draft
        weight = draft.weight(channels, source.channels // group, kernel, kernel, scale=1.4)
        bias = draft.weight(channels, scale=0.1) if self.below(2) else None
        result = draft.conv(source.name, weight, bias, strides=[stride, stride], group=group)
        if self.below(2):
            rest = [draft.weight(channels) ** 2 + 0.5, draft.weight(channels), draft.weight(channels)]
            variance = np.float32(0.5) + draft.weight(channels) ** 2
            result = draft.add("BatchNormalization", result, *map(draft.constant, (*rest, variance)), epsilon=1e-5)
        height, width = (-(-side // stride) for side in source.size)
        return Map(self.activated(result, channels), channels, height, width)

    def block(self, source: Map, earlier: list[Map]) -> Map:
        """One of the structures of detectors, after ``source``."""
        blocks = (self.plain, self.depthwise, self.residual, self.branches, self.pyramid, self.gate, self.grouped)
        more = (self.downsampled, self.pooled, self.turned, self.larger, self.scaled)
        return (*blocks, *more)[self.below(len(blocks) + len(more))](source, earlier)

    def plain(self, source: Map, earlier: list[Map]) -> Map:
        return self.conv(source, self.channels(), (1, 3, 5)[self.below(3)])

    def depthwise(self, source: Map, earlier: list[Map]) -> Map:
        return self.conv(self.conv(source, source.channels, group=source.channels), self.channels(), 1)

    def grouped(self, source: Map, earlier: list[Map]) -> Map:
        return self.conv(source, self.channels(), group=(2, 4)[self.below(2)])

    def residual(self, source: Map, earlier: list[Map]) -> Map:
        inner = self.conv(self.conv(source, self.channels(), 1), source.channels)
        return Map(self.draft.add("Add", inner.name, source.name), source.channels, *source.size)

    def branches(self, source: Map, earlier: list[Map]) -> Map:
        """A Concat of convolutions, a pool and a part of the map itself."""
        parts = [self.conv(source, self.channels(), 1), self.conv(source, self.channels())]
        if self.below(2):
            pool = self.draft.add("MaxPool", source.name, kernel_shape=[5, 5], pads=[2, 2, 2, 2])
            parts.append(Map(pool, source.channels, *source.size))
        if self.below(2):
            bounds = [self.draft.constant(np.array([value], np.int64)) for value in (0, source.channels // 2, 1)]
            parts.append(Map(self.draft.add("Slice", source.name, *bounds), source.channels // 2, *source.size))
        joined = self.draft.add("Concat", *(part.name for part in parts), axis=1)
        return self.conv(Map(joined, sum(part.channels for part in parts), *source.size), self.channels(), 1)

    def pyramid(self, source: Map, earlier: list[Map]) -> Map:
        """Resized and joined with an earlier map of twice the size, if there is one."""
        fitting = [one for one in earlier if one.size == (2 * source.height, 2 * source.width)]
        if not fitting:
            return self.plain(source, earlier)
        up = self.larger(source, earlier)
        if self.below(2):
            joined = self.draft.add("Concat", up.name, fitting[-1].name, axis=1)
            return self.conv(Map(joined, up.channels + fitting[-1].channels, *up.size), self.channels())
        other = self.conv(fitting[-1], up.channels, 1)
        return Map(self.draft.add("Add", up.name, other.name), up.channels, *up.size)

    def larger(self, source: Map, earlier: list[Map]) -> Map:
        if source.height >= 16:
            return self.plain(source, earlier)
        factors = self.draft.constant(np.array([1, 1, 2, 2], np.float32))
        mode = ("nearest", "linear")[self.below(2)]
        up = self.draft.add("Resize", source.name, "", factors, mode=mode)
        return Map(up, source.channels, 2 * source.height, 2 * source.width)

    def gate(self, source: Map, earlier: list[Map]) -> Map:
        """Squeeze and excite."""
        mean = Map(self.draft.add("GlobalAveragePool", source.name), source.channels, 1, 1)
        inner = self.conv(mean, 4, 1)
        weight = self.draft.weight(source.channels, 4, 1, 1)
        gate = self.draft.add("Sigmoid", self.draft.conv(inner.name, weight, self.draft.weight(source.channels)))
        return Map(self.draft.add("Mul", source.name, gate), source.channels, *source.size)

    def downsampled(self, source: Map, earlier: list[Map]) -> Map:
        return self.conv(source, self.channels(), stride=2) if min(source.size) >= 4 else self.plain(source, earlier)

    def pooled(self, source: Map, earlier: list[Map]) -> Map:
        if min(source.size) < 4 or source.height % 2 or source.width % 2:
            return self.plain(source, earlier)
        kind = ("MaxPool", "AveragePool")[self.below(2)]
        pool = self.draft.add(kind, source.name, kernel_shape=[2, 2], strides=[2, 2])
        return self.conv(Map(pool, source.channels, source.height // 2, source.width // 2), self.channels(), 1)

    def turned(self, source: Map, earlier: list[Map]) -> Map:
        """Channels last and back, with a product of each channel between."""
        add = self.draft.add
        last = add("Transpose", source.name, perm=[0, 2, 3, 1])
        scaled = add("Mul", last, self.draft.constant(np.abs(self.draft.weight(source.channels)) + np.float32(0.5)))
        return self.plain(Map(add("Transpose", scaled, perm=[0, 3, 1, 2]), source.channels, *source.size), earlier)

    def scaled(self, source: Map, earlier: list[Map]) -> Map:
        """A product and a sum with constants, as of an affine layer that was not folded."""
        factor = self.draft.constant(np.abs(self.draft.weight(1, source.channels, 1, 1)) + np.float32(0.5))
        offset = self.draft.constant(self.draft.weight(1, source.channels, 1, 1, scale=0.1))
        product = self.draft.add("Add", self.draft.add("Mul", source.name, factor), offset)
        return self.conv(Map(product, source.channels, *source.size), self.channels())


def random_network(seed: int) -> onnx.ModelProto:
    """A detector of 4 to 40 convolutions with YOLOv8's output for two classes, for images of 32 to 96 pixels a side."""
    writer = Writer(seed)
    height, width = writer.draft.size
    feature = writer.conv(Map("image", 3, height, width), writer.channels(), stride=2)
    feature = writer.conv(feature, writer.channels(), stride=2)
    earlier: list[Map] = []
    for _ in range(2 + writer.below(9)):
        earlier.append(feature)
        feature = writer.block(feature, earlier)
    return writer.draft.model(feature.name, feature.channels, feature.height * feature.width)
