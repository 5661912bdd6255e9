"""Trains small detectors of masks, keypoints and rotated boxes with ultralytics' own trainer on the pictures of
``cards.py``, for docs/results/tasks.md. Needs ``pip install ultralytics``.

The network is that of the package's YAML file made narrower, for two classes and an input of 128 x 160 pixels. Writes
the data, the weights and the export ``DIR/cards-TASK.onnx``; and for trtdet ``DIR/measured``, 300 pictures with
annotations, and ``DIR/calibration``, 64 pictures. With one thread a network takes 5 to 25 minutes.

    OMP_NUM_THREADS=1 python benchmarks/train_tasks.py DIR --task seg pose obb
"""

from __future__ import annotations

import argparse
from pathlib import Path

import cv2
import numpy as np
from cards import CLASSES, POINTS, SIZE, drawn, generate
from ultralytics_training import SETTINGS, write_description, write_network

NETWORKS = {"seg": "11/yolo11-seg", "pose": "v8/yolov8-pose", "obb": "11/yolo11-obb"}
"""Of each task, as the package names its file."""

STEPS = {"seg": (1600, 5), "pose": (1200, 14), "obb": (1200, 4)}
"""Pictures and epochs of each task."""

SCALE = (0.5, 0.125, 1024)
"""Depth, width, and the most channels before the width; the package's smallest has a width of 0.25."""

FIRST = {"train": 100_000, "val": 10_000}
"""The seed of the first picture of a split; no other picture of the repository has these seeds."""


def label(task: str, index: int, corners: np.ndarray) -> str:
    """The line of one card, of which ``corners`` (4, 2) are x y in pixels."""
    height, width = SIZE
    points = corners / [width, height]
    values = points.reshape(-1)
    if task == "pose":
        low, high = points.min(axis=0), points.max(axis=0)
        values = np.concatenate([(low + high) / 2, high - low, np.column_stack([points, np.full(4, 2)]).reshape(-1)])
    return " ".join([str(index), *(f"{value:.6f}" for value in values)])


def write_data(folder: Path, task: str, images: int) -> Path:
    """Writes the splits ``train`` and ``val`` as ultralytics reads them; gives the file that describes them."""
    for split, count in (("train", images), ("val", 100)):
        for kind in ("images", "labels"):
            (folder / kind / split).mkdir(parents=True, exist_ok=True)
        for seed in range(FIRST[split], FIRST[split] + count):
            picture, classes, corners = drawn(seed)
            cv2.imwrite(str(folder / "images" / split / f"{seed}.png"), picture[:, :, ::-1])
            lines = [label(task, *card) for card in zip(classes, corners, strict=True)]
            (folder / "labels" / split / f"{seed}.txt").write_text("\n".join(lines))
    return write_description(folder, folder, CLASSES, **points(task))


def points(task: str) -> dict[str, list[int]]:
    """The key that says how many keypoints there are, with their number of values."""
    return {"kpt_shape": [len(POINTS), 3]} if task == "pose" else {}


def train(folder: Path, task: str) -> None:
    """Trains one network and exports it.

    No picture is mirrored: the order of a card's corners is clockwise. Keypoints weigh five times the package's
    default, whose tolerance without COCO's 17 keypoints is five times that of the evaluation.
    """
    from ultralytics import YOLO

    place = folder / task
    place.mkdir(parents=True, exist_ok=True)
    images, epochs = STEPS[task]
    data = write_data(place, task, images)
    network = write_network(place, NETWORKS[task], SCALE, CLASSES, **points(task))
    YOLO(network).train(
        **SETTINGS,
        data=data,
        imgsz=max(SIZE),
        epochs=epochs,
        lr0=0.004,
        lrf=0.02,
        fliplr=0.0,
        scale=0.15,
        erasing=0.0,
        overlap_mask=False,
        mask_ratio=2,
        pose=60.0,
        project=str(place.resolve()),
        name="run",
    )
    exported = YOLO(place / "run" / "weights" / "last.pt").export(format="onnx", imgsz=list(SIZE), opset=17)
    Path(exported).replace(folder / f"cards-{task}.onnx")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--task", nargs="+", choices=tuple(NETWORKS), default=list(NETWORKS))
    arguments = parser.parse_args()
    for name, first, count in (("measured", 20_000, 300), ("calibration", 30_000, 64)):
        generate(arguments.folder / name, first=first, count=count)
    for task in arguments.task:
        train(arguments.folder, task)


if __name__ == "__main__":
    main()
