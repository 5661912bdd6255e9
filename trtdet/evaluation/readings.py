"""Alternatives to a configuration: each reverses one of the usual mistakes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtdet.config import Config, InputConfig

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
"""torchvision's mean and standard deviation of ImageNet, RGB, for pixels 0..1."""

_GREY = (0.5, 0.5, 0.5)
_ZERO, _ONE = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
_UNIT = 1 / 255
NORMALISATIONS: tuple[tuple[float, tuple[float, ...], tuple[float, ...]], ...] = (
    (1.0, _ZERO, _ONE),
    (_UNIT, _ZERO, _ONE),
    (_UNIT, *IMAGENET),
    (_UNIT, _GREY, _GREY),
    (1.0, (123.675, 116.28, 103.53), _ONE),
)
"""Scale, mean and standard deviation (RGB) in common use: 0..255; 0..1; ImageNet's; -1..1; Caffe's ImageNet mean."""

_SAME = 0.05
"""Two normalisations are the same if no pixel differs by more than this share of the range of values."""


@dataclass(frozen=True)
class Reading:
    """A configuration, and the ``given`` one that it is an alternative to."""

    config: Config
    given: Config

    @cached_property
    def changes(self) -> dict[str, Any]:
        """Plain values of the keys that differ, by path such as ``input.color``."""
        changes: dict[str, Any] = {}
        for section in ("input", "head"):
            old, new = (getattr(config, section).model_dump(mode="json") for config in (self.given, self.config))
            changes |= {f"{section}.{key}": value for key, value in new.items() if value != old[key]}
        return changes

    def other(self, section: str, **changes: Any) -> Reading:
        """This reading with some keys of a section replaced."""
        part = getattr(self.config, section).model_copy(update=changes)
        return Reading(self.config.model_copy(update={section: part}), self.given)

    @property
    def text(self) -> str:
        """The changed keys as in a configuration file, such as ``input.color: bgr, input.scale: 1``."""
        return ", ".join(f"{key}: {_plain(value)}" for key, value in self.changes.items())


def input_readings(reading: Reading) -> Iterator[Reading]:
    """Alternatives with the same head: swapped channels, another resize rule, another normalisation."""
    given = reading.config.input
    # Mean and standard deviation are not swapped: in a wrong configuration they are as often in the right order as not.
    yield reading.other("input", color="bgr" if given.color == "rgb" else "rgb")
    for resize in ("letterbox-centre", "letterbox-topleft", "stretch"):
        if resize != given.resize:
            yield reading.other("input", resize=resize)
    for scale, mean, std in NORMALISATIONS:
        order = 1 if given.color == "rgb" else -1
        other = reading.other("input", scale=scale, mean=mean[::order], std=std[::order])
        now, then = _values(given), _values(other.config.input)
        if np.abs(now - then).max() > _SAME * np.abs(now[:, 1] - now[:, 0]).min():
            yield other


def head_readings(reading: Reading) -> Iterator[Reading]:
    """Alternatives with the same input: other meanings of outputs of the same shape."""
    head = reading.config.head
    same_shape = {"yolox": "yolov5", "yolov5": "yolox"}
    if head.decode in same_shape:
        yield reading.other("head", decode=same_shape[head.decode])
    if head.decode in ("boxes", "detections"):
        yield reading.other("head", units="relative" if head.units == "pixels" else "pixels")
        yield from (reading.other("head", boxes=form) for form in ("xyxy", "yxyx", "cxcywh") if form != head.boxes)
    if head.decode == "dfl":
        yield from (
            reading.other("head", cell_offset=offset) for offset in (0.0, 0.5) if abs(offset - head.cell_offset) > 0.1
        )
    if head.decode != "detections":
        yield reading.other("head", scores="logits" if head.scores == "probabilities" else "probabilities")


def _values(config: InputConfig) -> NDArray[np.float64]:
    """float64 (3, 2): normalised values of 0 and 255 in each channel, RGB."""
    order = 1 if config.color == "rgb" else -1
    mean, std = np.array(config.mean[::order]), np.array(config.std[::order])
    return np.stack([(pixel * config.scale - mean) / std for pixel in (0, 255)], axis=1)


def _plain(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_plain, value))}]"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
