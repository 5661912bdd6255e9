"""Confirms or corrects a guessed configuration by the model's detections on images."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx

from trtdet.config import Config
from trtdet.evaluation.guessing import settled
from trtdet.evaluation.plausibility import FEWEST_IMAGES
from trtdet.exporter import Confirmed


def confirm(model: onnx.ModelProto, guess: Config, images: Sequence[Path]) -> Confirmed:
    """Compares a guess with similar configurations: other preprocessing, other meanings of the outputs.

    A clearly better configuration replaces the guess, and is compared in turn, see
    :mod:`trtdet.evaluation.plausibility`. ``images`` must show the model's classes; only some of them are used.
    """
    config, first, last = settled(model, guess, images)
    few = last.images < FEWEST_IMAGES
    changed = ""
    if first.better:
        times = "far more sure" if first.gain > 20 else f"{first.gain:.2f} times as sure"
        changed = f"with {first.better_text} in place of the guess the detections are {times}; "
    if last.obstacle:
        text = f"the configuration is not confirmed: {last.obstacle}"
    elif few:
        text = f"the configuration is not confirmed: {last.images} images are too few, give {FEWEST_IMAGES} or more"
    elif last.symptoms:
        text = f"{changed}the configuration is not confirmed on {last.images} images: {'; '.join(last.symptoms)}"
    else:
        text = (
            f"{changed}the configuration is confirmed on {last.images} images: in mirror images {last.agreement:.0%} "
            "of the same is found, and no other reading is clearly better"
        )
    evidence = last.as_dict() | {"changed": first.better, "gain": first.as_dict()["gain"]}
    return Confirmed(config, text, evidence | {"confirmed": not (last.obstacle or last.symptoms or few)})
