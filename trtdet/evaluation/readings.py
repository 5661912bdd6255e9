"""Alternatives to a configuration: the usual mistakes in its pixel and head keys, one at a time.

:mod:`trtdet.evaluation.plausibility` compares them on images.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, get_args

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

_BORDERS = (0, 114, 128)
"""Grey levels of a letterbox's border in common use."""

COLOR, NORMALISATION, RESIZE, BORDER, INTERPOLATION = "color", "normalisation", "resize", "border", "interpolation"
LAYOUT, UNITS, SCORES = "layout", "units", "scores"
QUESTIONS = {
    COLOR: ("input.color",),
    NORMALISATION: ("input.scale", "input.mean", "input.std"),
    RESIZE: ("input.resize",),
    BORDER: ("input.pad_value",),
    INTERPOLATION: ("input.interpolation",),
    LAYOUT: ("head.decode", "head.boxes", "head.cell_offset"),
    UNITS: ("head.units",),
    SCORES: ("head.scores",),
}
"""Questions about a configuration, each with the keys that answer it."""

MEANINGS = {
    "input.color": {
        "rgb": "the training read images as RGB, as Pillow does",
        "bgr": "the training read images as BGR, as OpenCV does",
    },
    "input.resize": {
        "letterbox-centre": "keeps the aspect ratio, with borders on both sides",
        "letterbox-topleft": "keeps the aspect ratio, with a border on the right or below",
        "stretch": "resizes both sides to the input, whatever the aspect ratio",
    },
    "head.units": {"pixels": "boxes in pixels of the input", "relative": "boxes as shares of the input"},
    "head.boxes": {"xyxy": "two corners", "yxyx": "two corners, y first", "cxcywh": "centre and size"},
    "head.scores": {
        "probabilities": "the model has applied the sigmoid",
        "logits": "the sigmoid is still to be applied",
        "softmax": "a softmax over the classes is still to be applied",
    },
}
"""What a value of a key means."""


@dataclass(frozen=True)
class Reading:
    """A configuration that is an alternative to ``given``.

    ``question`` is that of :data:`QUESTIONS` in which the two differ; empty for the given configuration.
    """

    config: Config
    given: Config
    question: str = ""

    @cached_property
    def changes(self) -> dict[str, Any]:
        """Plain values of the keys that differ, by path such as ``input.color``."""
        return {key: value for key, (value, _) in self._both().items()}

    @property
    def text(self) -> str:
        """The changed keys as in a configuration file, such as ``input.color: bgr, input.scale: 1``."""
        return ", ".join(f"{key}: {plain(value)}" for key, value in self.changes.items())

    @property
    def meant(self) -> str:
        """The changed keys with what they would mean, and what the given values mean."""
        parts = []
        for key, (value, given) in self._both().items():
            words = MEANINGS.get(key, {})
            ours, theirs = (f" ({words[str(one)]})" if str(one) in words else "" for one in (given, value))
            parts.append(f"{key}: {plain(given)}{ours} or {plain(value)}{theirs}")
        return "; ".join(parts)

    def other(self, question: str, **changes: Any) -> Reading:
        """This reading with some keys replaced, those of the section that the question is of."""
        section = QUESTIONS[question][0].partition(".")[0]
        part = getattr(self.config, section).model_copy(update=changes)
        return Reading(self.config.model_copy(update={section: part}), self.given, question)

    def _both(self) -> dict[str, tuple[Any, Any]]:
        both: dict[str, tuple[Any, Any]] = {}
        for section in ("input", "head"):
            old, new = (getattr(config, section).model_dump(mode="json") for config in (self.given, self.config))
            both |= {f"{section}.{key}": (value, old[key]) for key, value in new.items() if value != old[key]}
        return both


def input_readings(reading: Reading, *, fine: bool = False) -> Iterator[Reading]:
    """Alternatives with the same head: swapped channels, another resize rule, another normalisation.

    Mean and standard deviation are turned with the channels. Where they are not the same for each channel, they are
    also tried the other way round: alone, and as they are with the channels swapped; but not where that gives a usual
    normalisation in an order that is not the channels'. ``fine`` adds the border and the interpolation, which change
    little.
    """
    given = reading.config.input
    swapped = "bgr" if given.color == "rgb" else "rgb"
    turned = {"mean": given.mean[::-1], "std": given.std[::-1]}
    yield reading.other(COLOR, color=swapped, **turned)
    if turned != {"mean": given.mean, "std": given.std}:
        for other in (reading.other(COLOR, color=swapped), reading.other(NORMALISATION, **turned)):
            if not _misordered(other.config.input):
                yield other
    for resize in ("letterbox-centre", "letterbox-topleft", "stretch"):
        if resize != given.resize:
            yield reading.other(RESIZE, resize=resize)
    for scale, mean, std in NORMALISATIONS:
        order = 1 if given.color == "rgb" else -1
        other = reading.other(NORMALISATION, scale=scale, mean=mean[::order], std=std[::order])
        if not _alike(given, other.config.input):
            yield other
    if fine and given.resize != "stretch":
        yield from (reading.other(BORDER, pad_value=level) for level in _BORDERS if level != given.pad_value)
    if fine:
        ways = get_args(InputConfig.model_fields["interpolation"].annotation)
        yield from (reading.other(INTERPOLATION, interpolation=way) for way in ways if way != given.interpolation)


def head_readings(reading: Reading) -> Iterator[Reading]:
    """Alternatives with the same input: other meanings of outputs of the same shape."""
    head = reading.config.head
    same_shape = {"yolox": "yolov5", "yolov5": "yolox"}
    if head.decode in same_shape:
        yield reading.other(LAYOUT, decode=same_shape[head.decode])
    if head.decode in ("boxes", "detections"):
        yield reading.other(UNITS, units="relative" if head.units == "pixels" else "pixels")
        forms = (form for form in ("xyxy", "yxyx", "cxcywh") if form != head.boxes)
        yield from (reading.other(LAYOUT, boxes=form) for form in forms)
    if head.decode == "dfl":
        offsets = (offset for offset in (0.0, 0.5) if abs(offset - head.cell_offset) > 0.1)
        yield from (reading.other(LAYOUT, cell_offset=offset) for offset in offsets)
    if head.decode != "detections":
        yield reading.other(SCORES, scores="logits" if head.scores == "probabilities" else "probabilities")


def plain(value: Any) -> str:
    """A value as in a configuration file, with six digits."""
    if isinstance(value, list):
        return f"[{', '.join(map(plain, value))}]"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _alike(one: InputConfig, other: InputConfig) -> bool:
    now, then = _values(one), _values(other)
    return bool(np.abs(now - then).max() <= _SAME * np.abs(now[:, 1] - now[:, 0]).min())


def _misordered(config: InputConfig) -> bool:
    """Whether mean and standard deviation are in common use for the other order of the channels."""
    turned = config.model_copy(update={"mean": config.mean[::-1], "std": config.std[::-1]})
    order = 1 if config.color == "rgb" else -1
    for scale, mean, std in NORMALISATIONS:
        usual = config.model_copy(update={"scale": scale, "mean": mean[::order], "std": std[::order]})
        if np.allclose(_values(turned), _values(usual), rtol=1e-3, atol=1e-3 * np.ptp(_values(usual))):
            return not np.allclose(_values(config), _values(usual), rtol=1e-3, atol=1e-3 * np.ptp(_values(usual)))
    return False


def _values(config: InputConfig) -> NDArray[np.float64]:
    """float64 (3, 2): normalised values of 0 and 255 in each channel, RGB."""
    order = 1 if config.color == "rgb" else -1
    mean, std = np.array(config.mean[::order]), np.array(config.std[::order])
    return np.stack([(pixel * config.scale - mean) / std for pixel in (0, 255)], axis=1)
