"""What is ranked and how, and the key that tells two rankings apart."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import onnx

from trtdet.calibration import Ranges
from trtdet.config import InputConfig, NmsConfig
from trtdet.data import CocoDataset, ImageCache
from trtdet.passes import Decoded
from trtdet.quantization import Corrections, QdqPlacement


@dataclass(frozen=True)
class Subject:
    """What is ranked.

    Attributes:
        model: float model, as the passes leave it.
        placement: its INT8 convolutions.
        ranges: of its activations.
        corrections: channel maps and weights; empty for the textbook form.
        head: where the model holds its decoded boxes and scores.
        images: the images to measure on.
        images_sha256: hash of their names and contents.
        preprocess: how they become the network's input.
        cache: images that other passes decoded; None decodes them in each pass.
    """

    model: onnx.ModelProto
    placement: QdqPlacement
    ranges: Ranges
    corrections: Corrections
    head: Decoded
    images: tuple[Path, ...]
    images_sha256: str
    preprocess: InputConfig
    cache: ImageCache | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class Method:
    """How it is measured.

    Attributes:
        name: ``fast`` or ``reference``.
        base: ``fp32``: each convolution alone in INT8; ``int8``: all but each.
        dataset: annotated images, to measure mAP as well; the subject's images are then its images.
        nms: the suppression for mAP.
    """

    name: Literal["fast", "reference"] = "fast"
    base: Literal["fp32", "int8"] = "fp32"
    dataset: CocoDataset | None = None
    nms: NmsConfig | None = None


def subject_key(subject: Subject, method: Method) -> str:
    """A hash of the model, its ranges and corrections, the images and what is measured."""
    digest = hashlib.sha256()
    facts = {
        "ranges": subject.ranges.to_json(),
        "int8": subject.placement.plan.names("int8"),
        "fp8": sorted(subject.placement.plan.fp8),
        "images": subject.images_sha256,
        "preprocess": subject.preprocess.model_dump(mode="json"),
        "base": method.base,
        "method": method.name,
        "map": [str(method.dataset.annotations), repr(method.nms)] if method.dataset else None,
    }
    digest.update(json.dumps(facts, sort_keys=True).encode())
    digest.update(subject.model.SerializeToString(deterministic=True))
    subject.corrections.hash_into(digest)
    return digest.hexdigest()
