"""A configuration that was guessed of an ONNX model: confirmed, or corrected, by what the model detects on images."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx

from trtdet.config import Config
from trtdet.evaluation.guessing import settled
from trtdet.evaluation.plausibility import FEWEST_IMAGES, Plausibility
from trtdet.exporter import Confirmed


def confirm(model: onnx.ModelProto, guess: Config, images: Sequence[Path]) -> Confirmed:
    """The likeliest of a guess and its near variants: other pixels, other meanings of the same outputs.

    What is clearly better than the guess takes its place, and is looked at in turn, see
    :mod:`trtdet.evaluation.plausibility`.

    Args:
        model: the float model.
        guess: its configuration.
        images: of what it detects; some are looked at.
    """
    config, first, seen = settled(model, guess, images)
    plain = seen.as_dict() | {"changed": first.better, "gain": first.as_dict()["gain"]}
    return Confirmed(config, _said(first, seen), plain | {"confirmed": _is_sure(seen)})


def _is_sure(seen: Plausibility) -> bool:
    return not (seen.obstacle or seen.symptoms or seen.images < FEWEST_IMAGES)


def _said(first: Plausibility, seen: Plausibility) -> str:
    if seen.obstacle:
        return f"the configuration is not confirmed: {seen.obstacle}"
    if seen.images < FEWEST_IMAGES:
        return f"the configuration is not confirmed: {seen.images} images are too few, give {FEWEST_IMAGES} or more"
    changed = ""
    if first.better:
        times = "far more sure" if first.gain > 20 else f"{first.gain:.2f} times as sure"
        changed = f"with {first.better_text} in place of the guess the detections are {times}; "
    if seen.symptoms:
        return f"{changed}the configuration is not confirmed on {seen.images} images: {'; '.join(seen.symptoms)}"
    return (
        f"{changed}the configuration is confirmed on {seen.images} images: in mirror images {seen.agreement:.0%} of "
        "the same is found, and no other reading is clearly better"
    )
