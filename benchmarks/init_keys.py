"""How many keys ``trtdet init`` gets right without help, on detectors from public repositories: docs/results/init.md.

    python benchmarks/init_keys.py FOLDER --images DIR

FOLDER holds the models, which the page says where to find; those that are absent are left out. What is right is
written here as the code beside each model, or that of those who trained it, has it; where the two differ, both are
accepted.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trtdet.config import COCO_CLASSES, Config, load_config
from trtdet.data import evenly, find_images
from trtdet.errors import TrtdetError
from trtdet.evaluation.guessing import Guess, guess_config

UNIT = (1 / 255, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
BYTES = (1.0, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
IMAGENET = (1 / 255, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
LETTERBOX = ("letterbox-centre", "letterbox-topleft")


@dataclass(frozen=True)
class Truth:
    """What is right for a model.

    Attributes:
        size: height and width in pixels.
        pixels: scale, mean and standard deviation, red, green, blue.
        color: those that are right.
        resize: those that are right.
        head: the keys of the head that matter; None where no rule of trtdet reads it.
        classes: in the model's order; None where they are too many to write here and stand in the model.
    """

    size: tuple[int, int]
    pixels: tuple[float, tuple[float, ...], tuple[float, ...]]
    color: tuple[str, ...]
    resize: tuple[str, ...]
    head: Mapping[str, Any] | None
    classes: tuple[str, ...] | None = field(default=COCO_CLASSES)


def _shipped(family: str) -> dict[str, Any]:
    return load_config(family).head.model_dump()


TRUTHS = {
    "FastestDet": Truth((352, 352), UNIT, ("bgr",), ("stretch",), _shipped("fastestdet")),
    "yolo-fastestv2": Truth((352, 352), UNIT, ("bgr",), ("stretch",), None),
    "v5Lite-e-sim-320": Truth((320, 320), UNIT, ("rgb",), (*LETTERBOX, "stretch"), None),
    "nanodet_m": Truth(
        (416, 416),
        IMAGENET,
        ("bgr",),
        LETTERBOX,
        {"decode": "dfl", "strides": (8, 16, 32), "cell_offset": 0.5, "bins": 8},
    ),
    "yolov8-lite-t": Truth((640, 640), UNIT, ("rgb",), LETTERBOX, None, ("face",)),
    "scrfd_500m_kps": Truth(
        (640, 640), (1 / 128, (0.996, 0.996, 0.996), (1.0, 1.0, 1.0)), ("rgb",), LETTERBOX, _shipped("scrfd"), ("face",)
    ),
    "version-RFB-320": Truth(
        (240, 320),
        (1 / 128, (0.992, 0.992, 0.992), (1.0, 1.0, 1.0)),
        ("rgb",),
        ("stretch",),
        {"decode": "boxes", "boxes": "xyxy", "units": "relative", "scores": "probabilities", "background": "first"},
        ("face",),
    ),
    "yunet_n_640_640": Truth((640, 640), BYTES, ("bgr",), LETTERBOX, _shipped("yunet"), ("face",)),
    "320n": Truth((320, 320), UNIT, ("rgb",), LETTERBOX, {"decode": "yolov8"}, None),
    "common_det": Truth((416, 416), BYTES, ("bgr",), LETTERBOX, {"decode": "yolox", "strides": (8, 16, 32)}, ("text",)),
    "layout_cdla": Truth(
        (800, 608),
        IMAGENET,
        ("rgb", "bgr"),
        ("stretch",),
        {"decode": "dfl", "strides": (8, 16, 32, 64), "cell_offset": 0.5, "bins": 8},
        None,
    ),
}


def right(truth: Truth, config: Config) -> dict[str, bool]:
    """Of each key whether it is right; scale, mean and standard deviation count as one."""
    given = config.input
    order = 1 if given.color == "rgb" else -1
    levels = [
        [(pixel * scale - mean) / std for pixel in (0, 255) for mean, std in zip(means, deviations, strict=True)]
        for scale, means, deviations in (truth.pixels, (given.scale, given.mean[::order], given.std[::order]))
    ]
    near = max(abs(one - other) for one, other in zip(*levels, strict=True)) <= 0.02 * (max(levels[0]) - min(levels[0]))
    head = config.head.model_dump()
    named = not any(name.startswith("class ") for name in config.classes)
    return {
        "classes": config.classes == truth.classes if truth.classes else named,
        "input.size": given.size == truth.size,
        "input.name": True,  # the model's own, or it could not be run
        "input.resize": given.resize in truth.resize,
        "input.color": given.color in truth.color,
        "scale, mean, std": near,
        "head": truth.head is not None and all(head[key] == value for key, value in truth.head.items()),
    }


def row(name: str, truth: Truth, folder: Path, images: tuple[Path, ...]) -> str:
    """A line of the table."""
    began = time.perf_counter()
    found: Guess | None
    try:
        found = guess_config(folder / f"{name}.onnx", images)
    except TrtdetError as error:
        found, wrong = None, f"refused: {str(error).partition(' at an input')[0][:60]}"
    marks = right(truth, found.config) if found else {}
    if found:
        wrong = ", ".join(key + (" (said)" if key in found.unknown else "") for key, good in marks.items() if not good)
    seen = found.looks if found else None
    looks = f"{seen.boxes:.1f}, {100 * seen.agreement:.0f} %" if seen and not seen.obstacle else "-"
    return f"| {name} | {sum(marks.values())} of 7 | {wrong or '-'} | {looks} | {time.perf_counter() - began:.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the models")
    parser.add_argument("--images", type=Path, help="pictures of what they detect")
    parser.add_argument("--num-images", type=int, default=16)
    parser.add_argument("--only", nargs="+", help="these models alone")
    options = parser.parse_args()
    images = evenly(find_images(options.images), options.num_images) if options.images else ()
    print(
        "| model | keys right | wrong | detections an image, found in mirror images | seconds |\n|---|---|---|---|---|"
    )
    for name, truth in TRUTHS.items():
        if (options.folder / f"{name}.onnx").is_file() and name in (options.only or TRUTHS):
            print(row(name, truth, options.folder, images), flush=True)


if __name__ == "__main__":
    main()
