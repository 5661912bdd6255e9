"""Classic YOLOv5 from network version 6.0 on, in torch, and its checkpoints. Needs no package of YOLOv5.

The network (CSP backbone: Wang et al. 2019, arXiv:1911.11929; PAN: Liu et al. 2018, arXiv:1803.01534; spatial pyramid
pooling: He et al. 2014, arXiv:1406.4729) is built from the description in the checkpoint. Classes and attributes have
the names of the checkpoints, so that weights load and the stored layers can be compared.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trtdet.config import Config
from trtdet.errors import ModelError, one_line
from trtdet.exporter import ExportOptions, checkpoints
from trtdet.exporter.trials import SourceModel, resized
from trtdet.exporter.yolox import Conv

_PACKAGES = ("models", "utils", "yolov5")
"""Module names in a clone of YOLOv5's repository and in its PyPI package."""

_ACTIVATIONS = ("SiLU", "ReLU", "ReLU6", "LeakyReLU", "Hardswish", "Mish", "GELU", "ELU", "Identity")
_ACTIVATION = re.compile(r"(?:torch\.)?nn\.(\w+)\(((?:\w+\s*=\s*)?[\w.-]*)\)")
_MOST_REPEATS = 1000
_ADVICE = "expected a checkpoint of YOLOv5 6.0 to 7.0, for detection"


class Bottleneck(nn.Module):
    """A 1x1 and a 3x3 convolution; with ``shortcut`` and equal channels, the input is added."""

    def __init__(
        self, inputs: int, outputs: int, shortcut: bool = True, groups: int = 1, expansion: float = 0.5
    ) -> None:
        super().__init__()
        hidden = int(outputs * expansion)
        self.cv1 = Conv(inputs, outputs=hidden, kernel=1, stride=1)
        self.cv2 = Conv(hidden, outputs=outputs, kernel=3, stride=1, groups=groups)
        self.add = shortcut and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        y = self.cv2(self.cv1(x))
        return x + y if self.add else y  # type: ignore[no-any-return]


class C3(nn.Module):
    """Cross stage partial layer: half of the channels go through the bottlenecks, half around them."""

    def __init__(
        self, inputs: int, outputs: int, count: int = 1, shortcut: bool = True, groups: int = 1, expansion: float = 0.5
    ) -> None:
        super().__init__()
        hidden = int(outputs * expansion)
        self.cv1 = Conv(inputs, hidden)
        self.cv2 = Conv(inputs, hidden)
        self.cv3 = Conv(2 * hidden, outputs)
        layers = (Bottleneck(hidden, hidden, shortcut, groups=groups, expansion=1.0) for _ in range(count))
        self.m = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.cv3(torch.cat((self.m(self.cv1(x)), self.cv2(x)), 1))  # type: ignore[no-any-return]


class SPP(nn.Module):
    """Spatial pyramid pooling: the features and their maxima over windows of several sizes."""

    def __init__(self, inputs: int, outputs: int, sizes: Sequence[int] = (5, 9, 13)) -> None:
        super().__init__()
        hidden = inputs // 2
        self.cv1 = Conv(inputs, hidden)
        self.cv2 = Conv(hidden * (len(sizes) + 1), outputs)
        self.m = nn.ModuleList(nn.MaxPool2d(size, stride=1, padding=size // 2) for size in sizes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.cv1(x)
        return self.cv2(torch.cat([x, *(pool(x) for pool in self.m)], 1))  # type: ignore[no-any-return]


class SPPF(nn.Module):
    """The same with one window applied three times: size 5 covers 5, 9 and 13."""

    def __init__(self, inputs: int, outputs: int, size: int = 5) -> None:
        super().__init__()
        hidden = inputs // 2
        self.cv1 = Conv(inputs, hidden)
        self.cv2 = Conv(hidden * 4, outputs)
        self.m = nn.MaxPool2d(size, stride=1, padding=size // 2)

    def forward(self, x: Tensor) -> Tensor:
        levels = [self.cv1(x)]
        for _ in range(3):
            levels.append(self.m(levels[-1]))
        return self.cv2(torch.cat(levels, 1))  # type: ignore[no-any-return]


class Concat(nn.Module):
    def __init__(self, axis: int = 1) -> None:
        super().__init__()
        self.d = axis

    def forward(self, x: list[Tensor]) -> Tensor:
        return torch.cat(x, self.d)


class Detect(nn.Module):
    """The head; returns (B, N, 5 + C): centre, width and height in pixels, objectness and classes as probabilities.
    The N boxes are ordered by level, anchor and row. ``anchors`` (L, A, 2) are in strides."""

    anchors: Tensor

    def __init__(self, classes: int, anchors: Sequence[Sequence[float]], channels: Sequence[int]) -> None:
        super().__init__()
        self.nc = classes
        self.no = classes + 5
        self.nl = len(anchors)
        self.na = len(anchors[0]) // 2
        self.stride = torch.zeros(self.nl)
        self.register_buffer("anchors", torch.tensor(anchors, dtype=torch.float32).view(self.nl, -1, 2))
        self.m = nn.ModuleList(nn.Conv2d(count, self.no * self.na, 1) for count in channels)

    def forward(self, features: list[Tensor]) -> Tensor:
        levels = []
        for index, feature in enumerate(features):
            x = self.m[index](feature)
            rows, columns = int(x.shape[2]), int(x.shape[3])
            x = x.view(-1, self.na, self.no, rows, columns).permute(0, 1, 3, 4, 2).contiguous()
            xy, wh, scores = x.sigmoid().split((2, 2, self.nc + 1), 4)
            stride = float(self.stride[index])
            y, x = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
            # Column and row of each cell minus 0.5, the offset of twice a sigmoid.
            cells = torch.stack((x, y), 2).float()[None, None] - 0.5
            centres, sides = (xy * 2 + cells) * stride, (wh * 2) ** 2 * (self.anchors[index] * stride)[:, None, None]
            levels.append(torch.cat((centres, sides, scores), 4).view(-1, self.na * rows * columns, self.no))
        return torch.cat(levels, 1)


class DetectionModel(nn.Module):
    """The network; ``forward`` takes float32 (B, 3, H, W), RGB in 0..1, H and W multiples of the stride."""

    def __init__(self, layers: Sequence[nn.Module], sources: Sequence[list[int]]) -> None:
        super().__init__()
        self.model = nn.Sequential(*layers)
        self.sources = [[k if k >= 0 else index + k for k in froms] for index, froms in enumerate(sources)]

    def forward(self, x: Tensor) -> Any:
        outputs: list[Any] = []
        for layer, sources in zip(self.model, self.sources, strict=True):
            inputs = [outputs[k] if k >= 0 else x for k in sources]
            outputs.append(layer(inputs if isinstance(layer, (Concat, Detect)) else inputs[0]))
        return outputs[-1]


_LAYERS = {"Conv": Conv, "Bottleneck": Bottleneck, "C3": C3, "SPP": SPP, "SPPF": SPPF}
"""Layers whose first argument is the number of output channels."""


def build(description: Any) -> DetectionModel:
    """Builds an untrained network in evaluation mode.

    The description has the keys of YOLOv5's YAML files: ``nc``, ``anchors``, ``depth_multiple``, ``width_multiple``,
    and rows [from, number, module, arguments] in ``backbone`` and ``head``; the last row is Detect.

    Raises:
        ModelError: a key or a row has another form.
    """
    try:
        model = DetectionModel(*_laid_out(description))
        activation: nn.Module = nn.SiLU()
        text = description.get("activation")
        if text is not None:
            match = _ACTIVATION.fullmatch(text) if isinstance(text, str) else None
            if match is None or match[1] not in _ACTIVATIONS:
                raise ModelError(
                    f"the description of a YOLOv5 network has the activation {one_line(repr(text), 60)}, allowed are "
                    f"{', '.join(f'nn.{name}()' for name in _ACTIVATIONS)}"
                )
            argument = match[2].rpartition("=")[2].strip()
            value = ast.literal_eval(argument) if argument else False
            activation = getattr(nn, match[1])(*([] if isinstance(value, bool) else [value]))
        for module in model.modules():
            if isinstance(module, Conv):
                module.act = copy.deepcopy(activation)
        head = model.model[-1]
        assert isinstance(head, Detect)
        side, widths = 256, list[int]()
        hook = head.register_forward_pre_hook(lambda _, inputs: widths.extend(int(x.shape[3]) for x in inputs[0]))
        with torch.no_grad():
            model.eval()(torch.zeros(1, 3, side, side))
        hook.remove()
        # Width of a cell of each level in pixels; the description has the anchors in pixels.
        head.stride = torch.tensor([side / columns for columns in widths])
        head.anchors /= head.stride.view(-1, 1, 1)
    except ModelError:
        raise
    except Exception as error:  # wrong types and numbers lead to many exceptions
        raise ModelError(
            f"the description of a YOLOv5 network cannot be followed ({type(error).__name__}: {one_line(error, 100)}); "
            f"{_ADVICE}"
        ) from None
    return model.eval()


def _laid_out(description: Any) -> tuple[list[nn.Module], list[list[int]]]:
    depth, width = float(description["depth_multiple"]), float(description["width_multiple"])
    classes, anchors = int(description["nc"]), description["anchors"]
    constants = {"nc": classes, "anchors": anchors, "None": None, "True": True, "False": False}
    layers: list[nn.Module] = []
    channels: list[int] = []
    sources: list[list[int]] = []
    rows = [*description["backbone"], *description["head"]]
    for index, (places, number, name, row) in enumerate(rows):
        froms = [places] if isinstance(places, int) else list(places)
        inputs = [channels[k] if channels else 3 for k in froms]
        count = max(round(number * depth), 1) if number > 1 else number
        if not 0 < count <= _MOST_REPEATS:
            raise ModelError(f"the description of a YOLOv5 network repeats row {index} {number} times; {_ADVICE}")
        if name == "Detect" and index < len(rows) - 1:
            raise ModelError(f"the description of a YOLOv5 network has Detect before its last row; {_ADVICE}")
        arguments = []
        for argument in row:
            if isinstance(argument, str):
                with contextlib.suppress(ValueError, SyntaxError):  # a name such as "nearest" stays text
                    argument = constants[argument] if argument in constants else ast.literal_eval(argument)
            arguments.append(argument)
        layer, outputs = _layer(name, inputs, count, arguments=arguments, width=width)
        layers.append(layer)
        channels.append(outputs)
        sources.append(froms)
    if not isinstance(layers[-1], Detect):
        raise ModelError(
            f"the description of a YOLOv5 network ends in {one_line(rows[-1][2], 40)}, not Detect; {_ADVICE}"
        )
    return layers, sources


def _layer(name: str, inputs: list[int], count: int, arguments: list[Any], width: float) -> tuple[nn.Module, int]:
    """A layer and its number of output channels."""
    if name == "Concat":
        return Concat(*arguments), sum(inputs)
    if name == "nn.Upsample":
        return nn.Upsample(*arguments), inputs[0]
    if name == "Detect":
        return Detect(arguments[0], arguments[1], inputs), 0
    if name not in _LAYERS:
        raise ModelError(
            f"the description of a YOLOv5 network has the module {one_line(repr(name), 60)}, allowed are "
            f"{', '.join(_LAYERS)}, Concat, nn.Upsample and, last, Detect; export it with the package that wrote "
            "it, and give trtdet the ONNX file"
        )
    outputs = math.ceil(arguments[0] * width / 8) * 8
    if name == "C3":
        return C3(inputs[0], outputs, count, *arguments[1:]), outputs
    layers = [_LAYERS[name](outputs if i else inputs[0], outputs, *arguments[1:]) for i in range(count)]
    return layers[0] if count == 1 else nn.Sequential(*layers), outputs


def load(place: str, options: ExportOptions) -> SourceModel:
    path = Path(place)
    content = checkpoints.read(path, _PACKAGES, "yolov5:")
    network = checkpoints.network_of(path, content, _ADVICE)
    with torch.random.fork_rng(devices=[]):
        model = build(network["yaml"])
    # Up to 5.0 a head also stored its anchors in pixels, which are redundant.
    state = {name: value for name, value in network.state().items() if not name.endswith(".anchor_grid")}
    checkpoints.load_state(model, state, path, advice=_ADVICE)
    checkpoints.check_same(
        path, model, network, ignored=frozenset(("inplace",)), builder="YOLOv5 6.0 to 7.0", advice=_ADVICE
    )
    traced = copy.deepcopy(model)
    checkpoints.fuse_batch_norm(traced)
    head = model.model[-1]
    assert isinstance(head, Detect)
    if options.config is None:
        settings = checkpoints.family_settings(path, "yolov5", network, head.nc, arguments=[content.get("opt")])
        config = resized(Config.model_validate(settings), options.size, int(head.stride.max()))
    else:
        config = resized(options.config, options.size)
    return SourceModel(f"yolov5:{place}", reference=model, config=config, traced=traced)
