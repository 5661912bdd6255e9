"""The effect of a Q/DQ pair at each activation on the detections, for every candidate range.

The gradient of a random combination of the decoded scores and boxes shows how an activation's rounding and clipping
reach the detections. Each score and coordinate has a random sign. So the expected square of the combination's change is
the sum of the squared changes, each weighted by what becomes a detection. This is the quadratic form of Dong et al.
2019, "HAWQ" (arXiv:1905.03696) and Li et al. 2021, "BRECQ" (arXiv:2102.05426, section 3.2), for the error of
:mod:`trtdet.quantization.head_error` and with Hutchinson's probes instead of class labels. One backward pass rates all
ranges of all tensors.

Rounding errors count as independent: each adds a twelfth of the squared step, weighted by the squared gradient.
Clipping errors do not: they are summed with their signs before squaring.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray

from trtdet.calibration import Ranges
from trtdet.passes import Decoded
from trtdet.quantization.encoding import QMAX, ChannelMap
from trtdet.quantization.gradients.network import TorchNetwork, factors
from trtdet.quantization.head_error import SEEN
from trtdet.quantization.placement import QdqPlacement

FRACTIONS = 2.0 ** (-np.arange(17) / 4)
"""Candidate ranges, as shares of the largest magnitude: 1 down to 1 / 16 in quarters of an octave."""

CLIPPING = 4.0
"""Weight of clipping relative to rounding. Clipping errors have one sign, so those of several tensors add up, and
unseen images reach further. Of 1, 4, 16 and 64 it leaves the least output error on held-back images, for YOLOX nano,
YOLOv5 n and PicoDet s alike."""


@dataclass(eq=False)
class TensorNoise:
    """Contributions to ``HeadError.power`` from rounding and clipping one activation."""

    largest: float  # the largest magnitude on the calibration images
    # float64 (2, ranges): the squared change of scores and of boxes by clipping, for each range.
    clipped: NDArray[np.float64] = field(default_factory=lambda: np.zeros((2, len(FRACTIONS))))
    # float64 (2,): the squared gradients of scores and of boxes, summed over places.
    squares: NDArray[np.float64] = field(default_factory=lambda: np.zeros(2))
    # float64 (C, ranges): the clipped amounts, summed over places, each times its squared gradient.
    cut: NDArray[np.float64] = field(default_factory=lambda: np.zeros((1, len(FRACTIONS))))
    counted: float = 0.0  # sum of the squared gradients that weight ``cut``

    def add(self, value: torch.Tensor, gradients: Sequence[torch.Tensor | None]) -> None:
        """Adds an image's value (C, ...) and the gradients of scores and boxes there, None for a gradient of 0."""
        # Only the tail that some range clips is processed: it is a small part of most tensors, and empty for zeros.
        flat = value.reshape(-1)
        chosen = flat.abs() > float(FRACTIONS[-1]) * self.largest
        tail = flat[chosen]
        # Ranges j + 1, j + 2, ... clip the values in quarter-octave j below the largest.
        octave = torch.floor(-4 * torch.log2(tail.abs() / (self.largest or 1.0))).clamp(0, len(FRACTIONS) - 1)
        octave, at = octave.to(torch.int64), torch.nonzero(chosen)[:, 0]

        def cut(weight: torch.Tensor, channels: int) -> NDArray[np.float64]:
            """Clipped amounts for each range, float64 (channels, ranges), summed with weights (places,)."""
            cells = torch.div(at, len(weight), rounding_mode="floor") * len(FRACTIONS) + octave
            signed = weight[at % len(weight)] * tail.sign()
            sums, products = (
                torch.bincount(cells, part.to(torch.float64), channels * len(FRACTIONS)).cpu().numpy()
                for part in (signed, signed * tail.abs())
            )
            sums, products = (part.reshape(channels, -1).cumsum(1)[:, :-1] for part in (sums, products))
            return np.concatenate([np.zeros((channels, 1)), products - FRACTIONS[1:] * self.largest * sums], axis=1)

        for kind, gradient in enumerate(gradients):
            if gradient is not None:
                self.squares[kind] += float(torch.linalg.vector_norm(gradient, dtype=torch.float64)) ** 2
                self.clipped[kind] += np.square(cut(gradient.reshape(-1), 1)[0])
                weight = gradient.square().sum(0).to(torch.float64)
                self.counted += float(weight.sum())
                self.cut = self.cut + cut(weight.reshape(-1), len(value))


class HeadNoise:
    """Collects :class:`TensorNoise` over images; ``ranges`` holds the extremes of the activations. A tensor in ``maps``
    is measured after its channel map, which clips nothing."""

    def __init__(
        self,
        model: onnx.ModelProto,
        placement: QdqPlacement,
        ranges: Ranges,
        head: Decoded,
        maps: Mapping[str, ChannelMap] = {},
    ) -> None:
        self._network = TorchNetwork(model, head.names, placement.readers)
        self._head = head
        self._random = torch.Generator().manual_seed(0)
        self._weight = np.zeros(2)
        self._maps, self._last = maps, placement.last
        self.tensors = {
            name: TensorNoise(
                maps[name].amax if name in maps else max(abs(ranges.tensors[name].low), abs(ranges.tensors[name].high))
            )
            for name in placement.activations
        }

    def update(self, images: NDArray[np.float32]) -> HeadNoise:
        """Adds images, float32 (B, 3, H, W), as many as the model takes. Raises ModelError if the model cannot be
        differentiated."""
        tapped: dict[str, torch.Tensor] = {}

        def read(name: str, value: torch.Tensor) -> torch.Tensor:
            if name not in tapped:
                tapped[name] = value * 1.0
            return tapped[name]

        outputs = self._network(torch.from_numpy(images).requires_grad_(), read)
        boxes, scores = outputs[self._head.boxes], outputs[self._head.scores]
        scores = torch.sigmoid(scores) if self._head.logits else scores
        weight = torch.where(scores > SEEN, scores, 0.0).detach()
        # Coordinates are relative to the box size: a small move changes 1 - IoU by about as much.
        best = scores.detach().amax(-1)
        sizes = (boxes[..., 2:] - boxes[..., :2]).detach()
        # An empty box has no IoU to lose.
        share = torch.where((best > SEEN) & (sizes.amin(-1) > 0), best, 0.0)
        sizes = sizes.clamp(min=1.0)
        scale = share.sqrt()[..., None] / torch.cat([sizes, sizes], -1)
        # Signs drawn on the CPU, so that every device gets the same.
        score_signs, box_signs = (
            (torch.randint(0, 2, like.shape, generator=self._random) * 2.0 - 1.0).to(like.device)
            for like in (scores, boxes)
        )
        combined = ((weight.sqrt() * score_signs * scores).sum(), (scale * box_signs * boxes).sum())
        self._weight += [float(weight.sum()), float(share.sum())]
        gradients = [
            torch.autograd.grad(each, list(tapped.values()), retain_graph=kind == 0, allow_unused=True)
            for kind, each in enumerate(combined)
        ]
        for (name, value), *slopes in zip(tapped.items(), *gradients, strict=True):
            finite = [slope if slope is not None and bool(torch.isfinite(slope).all()) else None for slope in slopes]
            value, scale = value.detach(), factors(self._maps.get(name), value)
            parts: list[Any] = [value * scale, *(None if slope is None else slope / scale for slope in finite)]
            if name in self._last:  # products read (B, ..., C) or (B * places, C)
                rows = len(images) if len(value) % len(images) == 0 else 1
                parts = [
                    None if part is None else part.reshape(rows, -1, part.shape[-1]).movedim(-1, 1) for part in parts
                ]
            for row, image in enumerate(parts[0]):
                self.tensors[name].add(image, [None if part is None else part[row] for part in parts[1:]])
        return self

    @property
    def seen(self) -> bool:
        """Whether the images have any detection."""
        return bool(self._weight.min() > 0)

    def noise(self, name: str, amax: float) -> float:
        """Error power that a tensor's range adds to the detections."""
        tensor = self.tensors[name]
        if not tensor.largest > 0:
            return 0.0
        rounded = tensor.squares * np.square(amax / QMAX) / 12
        return float(((rounded + CLIPPING * _at(tensor.clipped, amax / tensor.largest)) / self._weight).sum())

    def cut(self, name: str, amax: float) -> NDArray[np.float64] | None:
        """Mean clipped amount of each channel for a range, float64 (C,), places weighted by their squared gradient.
        None if the tensor does not reach the detections."""
        tensor = self.tensors[name]
        reaches = tensor.largest > 0 and tensor.counted > 0
        return _at(tensor.cut, amax / tensor.largest) / tensor.counted if reaches else None

    def best(self, name: str) -> float:
        """The amax of least noise; the widest if the tensor does not reach the detections."""
        largest = self.tensors[name].largest
        return float(min(FRACTIONS * largest, key=lambda amax: self.noise(name, float(amax))))


def _at(clipped: NDArray[np.float64], fraction: float) -> NDArray[np.float64]:
    """Interpolates between two ranges: (..., ranges) -> (...)."""
    place = -4 * float(np.log2(min(max(fraction, FRACTIONS[-1]), 1.0)))
    low = min(int(place), len(FRACTIONS) - 2)
    share = place - low
    return np.asarray((1 - share) * clipped[..., low] + share * clipped[..., low + 1])
