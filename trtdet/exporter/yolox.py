"""The YOLOX family (Ge et al. 2021, "YOLOX: Exceeding YOLO Series in 2021", arXiv:2107.08430) in torch, as a source.

Modules and attributes have the names of the published checkpoints. Backbone: CSPDarknet (Bochkovskiy et al. 2020,
arXiv:2004.10934) with a focus stem; neck: PAFPN (Liu et al. 2018, arXiv:1803.01534); decoupled head (figure 2).
"""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import onnx
import onnx.numpy_helper
import torch
from torch import Tensor, nn

from trtdet.config import load_config
from trtdet.errors import ConfigError
from trtdet.exporter import SHAPES_MODEL, ExportOptions, checkpoints
from trtdet.exporter.trials import SourceModel, resized

STRIDES = (8, 16, 32)


@dataclass(frozen=True)
class YoloxVariant:
    """Dimensions of a model of the family; ``input_size`` is the published height and width in pixels.

    ``depth`` scales the bottlenecks per stage, ``width`` the channels (1.0 has 64 after the stem). ``depthwise`` and
    ``depthwise_head`` replace 3x3 by depthwise separable convolutions in backbone and neck, and in the head.
    """

    depth: float
    width: float
    depthwise: bool = False
    depthwise_head: bool = False
    input_size: int = 640


VARIANTS: dict[str, YoloxVariant] = {
    "nano": YoloxVariant(0.33, 0.25, depthwise=True, depthwise_head=True, input_size=416),
    "tiny": YoloxVariant(0.33, 0.375, input_size=416),
    "s": YoloxVariant(0.33, 0.50),
    "m": YoloxVariant(0.67, 0.75),
    "l": YoloxVariant(1.0, 1.0),
    "x": YoloxVariant(1.33, 1.25),
    "shapes": YoloxVariant(0.33, 0.125, depthwise_head=True, input_size=256),
}


class Conv(nn.Sequential):
    """Convolution, batch normalisation, activation; YOLOv5 and YOLOX store it alike."""

    def __init__(
        self, inputs: int, outputs: int, kernel: int = 1, stride: int = 1, padding: int | None = None, groups: int = 1
    ) -> None:
        padding = kernel // 2 if padding is None else padding
        conv = nn.Conv2d(inputs, outputs, kernel, stride, padding, groups=groups, bias=False)
        norm = nn.BatchNorm2d(outputs, eps=1e-3, momentum=0.03)
        super().__init__(OrderedDict(conv=conv, bn=norm, act=nn.SiLU(inplace=True)))


class DWConv(nn.Sequential):
    """A depthwise and a pointwise convolution, each with batch normalisation and SiLU."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int) -> None:
        depthwise = Conv(inputs, outputs=inputs, kernel=kernel, stride=stride, groups=inputs)
        super().__init__(OrderedDict(dconv=depthwise, pconv=Conv(inputs, outputs)))


def _spatial(inputs: int, outputs: int, stride: int, depthwise: bool) -> nn.Module:
    return (DWConv if depthwise else Conv)(inputs, outputs=outputs, kernel=3, stride=stride)


class _Bottleneck(nn.Module):
    """A 1x1 and a 3x3 convolution; ``shortcut`` adds the input."""

    def __init__(self, channels: int, shortcut: bool, depthwise: bool) -> None:
        super().__init__()
        self.conv1 = Conv(channels, channels)
        self.conv2 = _spatial(channels, channels, 1, depthwise=depthwise)
        self.use_add = shortcut

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv2(self.conv1(x))
        return y + x if self.use_add else y  # type: ignore[no-any-return]


class CSPLayer(nn.Module):
    """Cross stage partial layer: half of the channels go through the bottlenecks, half around them."""

    def __init__(self, inputs: int, outputs: int, count: int, shortcut: bool, depthwise: bool) -> None:
        super().__init__()
        hidden = outputs // 2
        self.conv1 = Conv(inputs, hidden)
        self.conv2 = Conv(inputs, hidden)
        self.conv3 = Conv(2 * hidden, outputs)
        self.m = nn.Sequential(*(_Bottleneck(hidden, shortcut, depthwise) for _ in range(count)))

    def forward(self, x: Tensor) -> Tensor:
        # Both 1x1 convolutions run before the bottlenecks, the published order that load_by_position needs.
        through, around = self.conv1(x), self.conv2(x)
        return self.conv3(torch.cat((self.m(through), around), dim=1))  # type: ignore[no-any-return]


class SPPBottleneck(nn.Module):
    """Spatial pyramid pooling: the features and their 5x5, 9x9 and 13x13 maxima."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        hidden = channels // 2
        self.conv1 = Conv(channels, hidden)
        self.m = nn.ModuleList(nn.MaxPool2d(size, stride=1, padding=size // 2) for size in (5, 9, 13))
        self.conv2 = Conv(4 * hidden, channels)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1(x)
        return self.conv2(torch.cat([x, *(pool(x) for pool in self.m)], dim=1))  # type: ignore[no-any-return]


class Focus(nn.Module):
    """Turns every 2x2 block of pixels into a pixel of 12 channels, then convolves."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.conv = Conv(12, outputs, 3)

    def forward(self, x: Tensor) -> Tensor:
        corners = [x[..., row::2, column::2] for column in (0, 1) for row in (0, 1)]
        return self.conv(torch.cat(corners, dim=1))  # type: ignore[no-any-return]


class CSPDarknet(nn.Module):
    """The backbone; returns features of strides 8, 16 and 32."""

    def __init__(self, variant: YoloxVariant) -> None:
        super().__init__()
        base = int(variant.width * 64)
        count = max(round(variant.depth * 3), 1)
        dw = variant.depthwise
        self.stem = Focus(base)
        self.dark2, self.dark3, self.dark4 = (
            nn.Sequential(
                _spatial(width, 2 * width, 2, depthwise=dw),
                CSPLayer(2 * width, 2 * width, repeats, shortcut=True, depthwise=dw),
            )
            for width, repeats in ((base, count), (base * 2, count * 3), (base * 4, count * 3))
        )
        self.dark5 = nn.Sequential(
            _spatial(base * 8, base * 16, 2, depthwise=dw),
            SPPBottleneck(base * 16),
            CSPLayer(base * 16, base * 16, count, shortcut=False, depthwise=dw),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        c3 = self.dark3(self.dark2(self.stem(x)))
        c4 = self.dark4(c3)
        return c3, c4, self.dark5(c4)


class YOLOPAFPN(nn.Module):
    """The backbone and the path aggregation neck; returns features of strides 8, 16 and 32."""

    def __init__(self, variant: YoloxVariant) -> None:
        super().__init__()
        c3, c4, c5 = (int(channels * variant.width) for channels in (256, 512, 1024))
        count, dw = round(3 * variant.depth), variant.depthwise
        self.backbone = CSPDarknet(variant)
        self.upsample = nn.Upsample(scale_factor=2, mode="nearest")
        self.lateral_conv0 = Conv(c5, c4)
        self.C3_p4 = CSPLayer(2 * c4, c4, count, shortcut=False, depthwise=dw)
        self.reduce_conv1 = Conv(c4, c3)
        self.C3_p3 = CSPLayer(2 * c3, c3, count, shortcut=False, depthwise=dw)
        self.bu_conv2 = _spatial(c3, c3, 2, depthwise=dw)
        self.C3_n3 = CSPLayer(2 * c3, c4, count, shortcut=False, depthwise=dw)
        self.bu_conv1 = _spatial(c4, c4, 2, depthwise=dw)
        self.C3_n4 = CSPLayer(2 * c4, c5, count, shortcut=False, depthwise=dw)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        c3, c4, c5 = self.backbone(x)
        top = self.lateral_conv0(c5)
        middle = self.reduce_conv1(self.C3_p4(torch.cat((self.upsample(top), c4), dim=1)))
        p3 = self.C3_p3(torch.cat((self.upsample(middle), c3), dim=1))
        p4 = self.C3_n3(torch.cat((self.bu_conv2(p3), middle), dim=1))
        p5 = self.C3_n4(torch.cat((self.bu_conv1(p4), top), dim=1))
        return p3, p4, p5


class YOLOXHead(nn.Module):
    """The decoupled head: classes in one branch, box and objectness in the other."""

    def __init__(self, num_classes: int, variant: YoloxVariant) -> None:
        super().__init__()
        hidden, dw = int(256 * variant.width), variant.depthwise_head
        sources = [int(channels * variant.width) for channels in (256, 512, 1024)]
        self.num_classes = num_classes
        self.cls_convs, self.reg_convs = (
            nn.ModuleList(
                nn.Sequential(*(_spatial(hidden, hidden, 1, depthwise=dw) for _ in range(2))) for _ in sources
            )
            for _ in range(2)
        )
        self.cls_preds = nn.ModuleList(nn.Conv2d(hidden, num_classes, 1) for _ in sources)
        self.reg_preds = nn.ModuleList(nn.Conv2d(hidden, 4, 1) for _ in sources)
        self.obj_preds = nn.ModuleList(nn.Conv2d(hidden, 1, 1) for _ in sources)
        self.stems = nn.ModuleList(Conv(source, hidden) for source in sources)

    def forward(self, features: tuple[Tensor, ...]) -> Tensor:
        levels = []
        for k, feature in enumerate(features):
            x = self.stems[k](feature)
            scores = self.cls_preds[k](self.cls_convs[k](x))
            boxes = self.reg_convs[k](x)
            box, objectness = self.reg_preds[k](boxes), self.obj_preds[k](boxes)
            if not self.training:
                objectness, scores = objectness.sigmoid(), scores.sigmoid()
            level = torch.cat((box, objectness, scores), dim=1)
            # Python integers, so that an exported graph has one Reshape here and no shape arithmetic.
            cells = int(level.shape[2]) * int(level.shape[3])
            levels.append(level.reshape(-1, 5 + self.num_classes, cells))
        return torch.cat(levels, dim=2).transpose(1, 2)


class YOLOX(nn.Sequential):
    """A YOLOX detector; takes float32 (B, 3, H, W), H and W multiples of 32; published weights expect BGR in 0..255.

    It returns float32 (B, N, 5 + C), not decoded, for the N cells of strides 8, 16 and 32, row by row: x and y offset
    from the cell in strides, logarithm of width and height in strides, objectness, classes. Objectness and classes are
    probabilities in evaluation mode and logits in training.
    """

    def __init__(self, num_classes: int, variant: YoloxVariant) -> None:
        super().__init__()
        self.backbone = YOLOPAFPN(variant)
        self.head = YOLOXHead(num_classes, variant)


def build(variant: str, num_classes: int = 80) -> YOLOX:
    """An untrained model in evaluation mode; ``variant`` is a key of VARIANTS."""
    model = YOLOX(num_classes, VARIANTS[variant])
    for prediction in (*model.head.obj_preds, *model.head.cls_preds):
        # Nearly every cell is background: starting at probability 0.01 keeps the first steps stable (Lin et al. 2017,
        # arXiv:1708.02002, section 3.3).
        nn.init.constant_(prediction.bias, -math.log((1 - 0.01) / 0.01))
    return model.eval()


def load_by_position(model: YOLOX, path: Path) -> None:
    """Loads the weights and biases of an ONNX model into a model whose batch normalisation is folded.

    The n-th Conv node of the graph is the n-th convolution that runs, because an export keeps the order.
    """
    graph = onnx.load(path).graph
    constants = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
    weights = [[constants[name] for name in node.input[1:3]] for node in graph.node if node.op_type == "Conv"]
    convs: list[nn.Conv2d] = []
    hooks = [
        module.register_forward_pre_hook(lambda conv, _inputs: convs.append(conv))
        for module in model.modules()
        if isinstance(module, nn.Conv2d)
    ]
    with torch.no_grad():
        model(torch.zeros(1, 3, 64, 64))
        for hook in hooks:
            hook.remove()
        for conv, (weight, bias) in zip(convs, weights, strict=True):
            assert conv.bias is not None
            conv.weight.copy_(torch.from_numpy(weight.copy()))
            conv.bias.copy_(torch.from_numpy(bias.copy()))


def load(source: str, options: ExportOptions) -> SourceModel:
    """A built-in source: YOLOX of any size, or the shapes detector. Raises ConfigError if the input size is not a
    multiple of 32; ModelError if the weights are unusable."""
    variant = source.removeprefix("yolox-")
    config, size = options.config, options.size
    if config is None:
        config = load_config("shapes" if source == "shapes" else "yolox").model_copy(update={"name": source})
        size = size or (VARIANTS[variant].input_size,) * 2
    config = resized(config, size)
    size = config.input.size
    if size[0] % 32 or size[1] % 32:
        raise ConfigError(f"input.size is {list(size)}, {source} needs multiples of 32")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        reference = build(variant, len(config.classes))
    if options.weights is not None:
        checkpoints.load_state(reference, checkpoints.read_state(options.weights), options.weights)
    traced = copy.deepcopy(reference)
    checkpoints.fuse_batch_norm(traced)
    if source == "shapes" and options.weights is None:
        load_by_position(traced, SHAPES_MODEL)
        reference = traced
    return SourceModel(source, reference=reference, config=config, traced=traced)
