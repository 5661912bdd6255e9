"""Which mistakes in a configuration the check of the input tells of, and what they cost: published models.

    python benchmarks/input_check.py --data DIR [--models NAME ...] [--keys KEY ...] [--score]

DIR holds ``models/`` and ``coco/train2017``, and for ``--score`` ``coco/val2017`` with
``coco/annotations/instances_val2017.json``. Every model is read with its configuration and with every usual mistake in
it, and is looked at on train2017 as ``trtdet calibrate`` does. ``--score`` adds mAP with each. Prints Markdown.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from corrections import MODELS, scored

import trtdet
from trtdet.data import find_images
from trtdet.evaluation.plausibility import Plausibility, examine_model
from trtdet.evaluation.readings import IMAGENET
from trtdet.passes import Options, load_model
from trtdet.runtime.detector import Detector

RESIZES = ("letterbox-centre", "letterbox-topleft", "stretch")


@dataclass(frozen=True)
class Reading:
    """A configuration, right or with a mistake.

    Attributes:
        mistake: in words; empty for the right configuration.
        key: the key that is wrong; empty likewise.
        config: with it.
    """

    mistake: str
    key: str
    config: trtdet.Config


def readings(right: trtdet.Config) -> Iterator[Reading]:
    """The right configuration, and then the usual mistakes."""
    pixels, head = right.input, right.head
    normalised = pixels.mean != (0.0, 0.0, 0.0)

    def wrong(mistake: str, section: str, key: str, **values: Any) -> Reading:
        part = getattr(right, section).model_copy(update={key: values.pop("to"), **values})
        return Reading(mistake, f"{section}.{key}", right.model_copy(update={section: part}))

    yield Reading("", "", right)
    yield wrong("channels swapped", "input", "color", to="rgb" if pixels.color == "bgr" else "bgr")
    if pixels.scale == 1:
        yield wrong("needless /255", "input", "scale", to=1 / 255)
    else:
        yield wrong("/255 missing", "input", "scale", to=1.0)
    if normalised:
        yield wrong("mean and std missing", "input", "mean", to=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    else:
        yield wrong("needless mean and std", "input", "mean", to=IMAGENET[0], std=IMAGENET[1], scale=1 / 255)
    for resize in RESIZES:
        if resize != pixels.resize:
            yield wrong(f"`{resize}`", "input", "resize", to=resize)
    yield wrong("scores taken for logits", "head", "scores", to="logits")
    if head.decode == "yolox":
        yield wrong("`decode: yolov5`", "head", "decode", to="yolov5")
    if head.decode == "dfl":
        yield wrong("cells' corners for centres", "head", "cell_offset", to=0.0)


def verdict(seen: Plausibility, reading: Reading) -> str:
    """Whether the mistake was told of, and how many images that took."""
    if seen.obstacle:
        return f"not looked at: {seen.obstacle}"
    if not seen.warning:
        return f"silent ({seen.images})"
    if reading.key and reading.key in seen.better:
        return f"named ({seen.images})"
    return f"told of ({seen.images}): {seen.better_text or '; '.join(seen.symptoms)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--keys", nargs="+", help="only these, such as input.resize; right for no mistake")
    parser.add_argument("--score", action="store_true", help="mAP as well")
    options = parser.parse_args()
    images = find_images(options.data / "coco" / "train2017")
    print("| model | mistake | " + "mAP | " * options.score + "the check (images) |")
    print("|---" * (3 + options.score) + "|", flush=True)
    for name in options.models:
        family, candidates = MODELS[name]
        file = options.data / "models" / f"{name}.onnx"
        for reading in readings(trtdet.load_config(family).with_nms(candidates=candidates)):
            if options.keys and (reading.key or "right") not in options.keys:
                continue
            seen = examine_model(load_model(file), Options(reading.config), images)
            cells = [name, reading.mistake or "none"]
            if options.score:
                cells.append(
                    f"{100 * scored(Detector.open(file, reading.config), options.data / 'coco').result.map:.2f}"
                )
            print(f"| {' | '.join([*cells, verdict(seen, reading)])} |", flush=True)


if __name__ == "__main__":
    main()
