"""Pictures of tilted cards with masks, four keypoints and rotated boxes, drawn by a seed."""

from __future__ import annotations

import json
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

SIZE = (128, 160)
"""Height and width of a picture and of the networks' input in pixels."""
CLASSES = ("card", "ticket")
POINTS = ("red corner", "green corner", "third corner", "fourth corner")


def drawn(seed: int) -> tuple[NDArray[np.uint8], list[int], NDArray[np.float64]]:
    """A picture, uint8 (H, W, 3), RGB, the class of each card, and its corners float64 (n, 4, 2), x y."""
    rng = np.random.default_rng(seed)
    height, width = SIZE
    coarse = rng.integers(60, 150, (4, 5, 3)).astype(np.uint8)
    picture = cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC)
    labels, corners = list[int](), list[NDArray[np.float64]]()
    taken = np.zeros((height, width), bool)
    for _ in range(int(rng.integers(1, 5))):
        label = int(rng.integers(0, 2))
        long = rng.uniform(30, 56)
        sides = np.array([long, long * (0.65, 0.35)[label]])
        angle, centre = rng.uniform(0, 2 * np.pi), rng.uniform([24, 24], [width - 24, height - 24])
        turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
        points = np.array([[-1, -1], [1, -1], [1, 1], [-1, 1]]) * sides / 2 @ turn.T + centre
        outline, area = np.rint(points).astype(np.int32), np.zeros((height, width), np.uint8)
        cv2.fillPoly(area, [outline], 1)
        whole = bool((points > 1).all() and (points < [width - 2, height - 2]).all())
        if not whole or (taken & area.astype(bool)).any():
            continue
        taken |= cv2.dilate(area, np.ones((5, 5), np.uint8)).astype(bool)
        colour = (230, 225, 200) if label == 0 else (40, 60, 170)
        cv2.fillPoly(picture, [outline], colour, cv2.LINE_AA)
        for corner, ink in zip(points[:2], ((220, 30, 30), (30, 190, 40)), strict=True):
            spot = np.rint(corner * 0.82 + centre * 0.18).astype(int)
            cv2.circle(picture, (int(spot[0]), int(spot[1])), 4, ink, cv2.FILLED, cv2.LINE_AA)
        labels.append(label)
        corners.append(points)
    if not labels:
        return drawn(seed + 1_000_000)
    return np.asarray(picture, np.uint8), labels, np.stack(corners)


def generate(folder: Path, first: int, count: int) -> Path:
    """Writes ``count`` pictures and their annotations in COCO's format; returns the folder of the pictures.

    A segmentation is one polygon of four corners, so that it serves as mask and as rotated box.
    """
    images, annotations = list[dict[str, object]](), list[dict[str, object]]()
    pictures = folder / "images"
    pictures.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(range(first, first + count), 1):
        picture, labels, corners = drawn(seed)
        cv2.imwrite(str(pictures / f"{number:03}.png"), picture[:, :, ::-1])
        images.append({"id": number, "file_name": f"{number:03}.png", "width": SIZE[1], "height": SIZE[0]})
        for label, points in zip(labels, corners, strict=True):
            low, sides = points.min(axis=0), np.ptp(points, axis=0)
            area = float(np.linalg.norm(points[1] - points[0]) * np.linalg.norm(points[2] - points[1]))
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": number,
                    "category_id": label + 1,
                    "bbox": [*low.tolist(), *sides.tolist()],
                    "area": area,
                    "iscrowd": 0,
                    "segmentation": [points.reshape(-1).tolist()],
                    "keypoints": np.column_stack([points, np.full(4, 2)]).reshape(-1).tolist(),
                    "num_keypoints": 4,
                }
            )
    categories = [{"id": index, "name": name} for index, name in enumerate(CLASSES, 1)]
    document = {"images": images, "annotations": annotations, "categories": categories}
    (folder / "annotations.json").write_text(json.dumps(document))
    return pictures
