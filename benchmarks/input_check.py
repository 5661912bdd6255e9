"""Which mistakes in a configuration the check of the input tells of, and what they cost: published models.

    python benchmarks/input_check.py --data DIR [--models NAME ...] [--keys KEY ...] [--score] [--folder DIR]
    python benchmarks/input_check.py --data DIR [--models NAME ...] [--folder DIR] --sets N

With ``--folder`` the models are those of another folder, each with its right configuration NAME.yaml beside NAME.onnx.
``--data`` holds ``models/`` and ``coco/train2017``, and for ``--score`` ``coco/val2017`` with
``coco/annotations/instances_val2017.json``. Every model is read with its configuration and with every usual mistake in
it, and is looked at on train2017 as ``trtdet calibrate`` does. ``--score`` adds mAP with each. Prints Markdown.

``--sets`` is of mistakes of resizing alone: how many of N random sets of images, of several sizes, tell the right way,
and how many have a right configuration warned of.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from coco_models import MODELS, published_config, scored

import trtdet
from trtdet.data import find_images
from trtdet.evaluation import plausibility
from trtdet.evaluation.placement import Placement
from trtdet.evaluation.plausibility import Plausibility, examine_model
from trtdet.evaluation.readings import IMAGENET, RESIZE, input_readings
from trtdet.evaluation.readings import Reading as Guess
from trtdet.passes import Options, load_model
from trtdet.runtime.detector import Detector

RESIZES = ("letterbox-centre", "letterbox-topleft", "stretch")
SIZES = (128, 256, 512, 1024)
"""Numbers of images in a random set."""


@dataclass(frozen=True)
class Reading:
    """A configuration, right or with a mistake.

    Attributes:
        mistake: in words; empty for the right configuration.
        keys: those that are wrong; empty likewise.
        config: with it.
    """

    mistake: str
    keys: tuple[str, ...]
    config: trtdet.Config


def readings(right: trtdet.Config) -> Iterator[Reading]:
    """The right configuration, and then the usual mistakes."""
    pixels, head = right.input, right.head
    normalised = pixels.mean != (0.0, 0.0, 0.0)

    def wrong(mistake: str, section: str, key: str, **values: Any) -> Reading:
        part = getattr(right, section).model_copy(update={key: values.pop("to"), **values})
        return Reading(mistake, (f"{section}.{key}",), right.model_copy(update={section: part}))

    yield Reading("", (), right)
    swapped = "rgb" if pixels.color == "bgr" else "bgr"
    turned = {"mean": pixels.mean[::-1], "std": pixels.std[::-1]}
    yield wrong("channels swapped", "input", "color", to=swapped, **turned)
    scale, scaled = (1 / 255, "needless /255") if pixels.scale == 1 else (1.0, "/255 missing")
    yield wrong(scaled, "input", "scale", to=scale)
    both = wrong(f"channels swapped, {scaled}", "input", "color", to=swapped, scale=scale, **turned)
    yield replace(both, keys=("input.color", "input.scale"))
    yield wrong("-1 to 1", "input", "mean", to=(0.5,) * 3, std=(0.5,) * 3, scale=1 / 255)
    if normalised:
        yield wrong("mean and std missing", "input", "mean", to=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    else:
        yield wrong("needless mean and std", "input", "mean", to=IMAGENET[0], std=IMAGENET[1], scale=1 / 255)
    for resize in RESIZES:
        if resize != pixels.resize:
            yield wrong(f"`{resize}`", "input", "resize", to=resize)
    yield wrong("scores taken for logits", "head", "scores", to="logits")
    if head.decode == "yolox":  # the other way round the number of cells does not fit, which is an error
        yield wrong("`decode: yolov5`", "head", "decode", to="yolov5")
    if head.decode in ("boxes", "detections"):
        form = "cxcywh" if head.boxes == "xyxy" else "xyxy"
        yield wrong(f"boxes as {form}", "head", "boxes", to=form)
        units = "relative" if head.units == "pixels" else "pixels"
        yield wrong(f"boxes in {units} units", "head", "units", to=units)
    if head.decode == "dfl":
        yield wrong("cells' corners for centres", "head", "cell_offset", to=0.0)


def verdict(seen: Plausibility, reading: Reading) -> str:
    """Whether the mistake was told of, and how many images that took."""
    if seen.obstacle:
        return f"not looked at: {seen.obstacle}"
    if not seen.warning:
        return f"silent ({max(seen.images, seen.placed)})"
    pixels = {"input.scale", "input.mean"}  # mean and deviation can make up for the scale
    if reading.keys and all(
        key in seen.better or (key in pixels and pixels & seen.better.keys()) for key in reading.keys
    ):
        return f"named ({seen.images})"
    said = seen.better_text or "; ".join(seen.symptoms)
    return f"told of ({seen.images}): {said}" if said else f"cannot tell ({seen.images})"


def models(data: Path, folder: Path | None) -> Iterator[tuple[str, Path, trtdet.Config]]:
    """Name, file and right configuration of each model."""
    if folder is not None:
        for file in sorted(folder.glob("*.onnx")):
            if file.with_suffix(".yaml").is_file():
                yield file.stem, file, trtdet.load_config(str(file.with_suffix(".yaml")))
        return
    for name in MODELS:
        yield name, data / "models" / f"{name}.onnx", published_config(name)


def resizing(name: str, file: Path, right: trtdet.Config, images: Sequence[Path], sets: int) -> Iterator[str]:
    """Lines of a table: of each way of resizing, how many sets of images of each size have the check change it."""
    subject = plausibility._of_model(load_model(file), Options(right))
    cache: dict[tuple[str, Path], float] = {}  # an image is looked at once, however many sets have it
    for resize in (right.input.resize, *(other for other in RESIZES if other != right.input.resize)):
        pixels = subject.config.input.model_copy(update={"resize": resize})
        given = subject.config.model_copy(update={"input": pixels})
        guess = Guess(given, given)
        others = [other for other in input_readings(guess) if other.question == RESIZE]
        rng, shares = np.random.default_rng(0), []
        for size in SIZES:
            found: Counter[str] = Counter()
            for _ in range(sets):
                chosen = [images[number] for number in rng.choice(len(images), size, replace=False)]
                best = Placement(guess, others, subject.detected, cache=cache).run(chosen)
                found["none" if best is None else best.config.input.resize] += 1
            right_ones = found[right.input.resize] if resize != right.input.resize else sets - found["none"]
            shares.append(f"{100 * right_ones / sets:.0f} %")
        yield f"| {' | '.join([name, resize + ' (right)' * (resize == right.input.resize), *shares])} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--folder", type=Path, help="of other models with their configurations")
    parser.add_argument("--models", nargs="+", help="these alone")
    parser.add_argument(
        "--keys", nargs="+", help="only mistakes of these keys, such as input.resize, or these mistakes; right for none"
    )
    parser.add_argument("--score", action="store_true", help="mAP as well")
    parser.add_argument("--sets", type=int, default=0, help="random sets of images of val2017, for ways of resizing")
    options = parser.parse_args()
    if options.sets:
        images = find_images(options.data / "coco" / "val2017")
        print(f"| model | read with | {' | '.join(f'{size} images' for size in SIZES)} |\n|{'---|' * 6}", flush=True)
        for name, file, right in models(options.data, options.folder):
            if name in (options.models or [name]):
                for line in resizing(name, file, right, images, options.sets):
                    print(line, flush=True)
        return
    images = find_images(options.data / "coco" / "train2017")
    print("| model | mistake | " + "mAP | " * options.score + "the check (images) |")
    print("|---" * (3 + options.score) + "|", flush=True)
    told: Counter[str] = Counter()
    for name, file, right in models(options.data, options.folder):
        if name not in (options.models or [name]):
            continue
        for reading in readings(right):
            if options.keys and not set(options.keys) & {*(reading.keys or ("right",)), reading.mistake}:
                continue
            seen = examine_model(load_model(file), Options(reading.config), images)
            cells = [name, reading.mistake or "none"]
            told["right, " * (not reading.mistake) + verdict(seen, reading).partition(" (")[0]] += 1
            if options.score:
                cells.append(
                    f"{100 * scored(Detector.open(file, reading.config), options.data / 'coco').result.map:.2f}"
                )
            print(f"| {' | '.join([*cells, verdict(seen, reading)])} |", flush=True)
    print(f"\n{', '.join(f'{key}: {count}' for key, count in sorted(told.items()))}")


if __name__ == "__main__":
    main()
