"""Confirms or corrects a guessed configuration by the model's detections on images."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx

from trtdet.config import Config
from trtdet.data import evenly
from trtdet.evaluation.plausibility import MOST_IMAGES, settle_model
from trtdet.exporter import Confirmed
from trtdet.passes import Options


def confirm(model: onnx.ModelProto, guess: Config, images: Sequence[Path]) -> Confirmed:
    """Compares a guess with similar configurations: other preprocessing, other meanings of the outputs.

    A clearly better configuration replaces the guess, and is compared in turn, see
    :mod:`trtdet.evaluation.plausibility`. ``images`` must show the model's classes; only some of them are used.
    """
    settled = settle_model(model, Options(guess), evenly(images, MOST_IMAGES))
    first, last = settled.first, settled.looks
    changed = (
        f"with {first.better_text} in place of the guess the detections are {first.times}; " if first.better else ""
    )
    problem = last.obstacle or last.unknown or "; ".join(last.symptoms)
    if problem:
        text = f"{changed}the configuration is not confirmed: {problem}"
    else:
        text = (
            f"{changed}the configuration is confirmed on {last.images} images: of what it finds {last.agreement:.0%} "
            "goes with the image when that is mirrored and shifted, and no other reading is clearly better"
        )
    evidence = last.as_dict() | {"changed": first.better, "gain": first.as_dict()["gain"]}
    return Confirmed(settled.config, text, evidence | {"confirmed": not problem})
