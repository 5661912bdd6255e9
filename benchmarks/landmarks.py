"""Distance of a bundle's keypoints from those of its float model, on the same images.

    python benchmarks/landmarks.py BUNDLE MODEL.onnx --images DIR|LIST [--score 0.5]

Each detection of the float model with at least this score is paired with the bundle's that overlaps it most, of those
with an IoU of at least 0.5. Prints Markdown: the mean and the 95th percentile of the distance of paired keypoints in
pixels of the network's input, and how many detections were paired.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from trtdet.bundle import Bundle
from trtdet.data import ImageStream, find_images
from trtdet.evaluation.matching import iou, xywh
from trtdet.runtime.detector import Detector

_OVERLAP = 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--score", type=float, default=0.5)
    options = parser.parse_args()
    detector = Detector.open(options.bundle)
    reference = Detector.open(options.model, Bundle(options.bundle).config)
    distances, found, images = list[np.ndarray](), 0, find_images(options.images)
    for batch in ImageStream(images, detector.input, batch_size=1, on_bad="skip"):
        exact, other = (one.as_written()(batch.images) for one in (reference, detector))
        exact = exact.over(options.score)
        boxes, others = (xywh(one.image(0)[0].astype(np.float64)) for one in (exact, other))
        points, moved = exact.image_parts(0).keypoints, other.image_parts(0).keypoints
        assert points is not None and moved is not None, "a detector with keypoints is needed"
        found += len(boxes)
        overlaps = iou(boxes, others, np.zeros(len(others), bool))
        for row in range(len(boxes) if len(others) else 0):
            best = int(overlaps[row].argmax())
            if overlaps[row, best] >= _OVERLAP:
                distances.append(np.hypot(*(points[row, :, :2] - moved[best, :, :2]).T))
    every = np.concatenate(distances)
    print("| bundle | images | detections | paired | mean distance | 95th percentile |\n|---|---|---|---|---|---|")
    print(
        f"| {options.bundle.name} | {len(images)} | {found} | {len(distances)} | {every.mean():.3f} px | "
        f"{np.percentile(every, 95):.3f} px |"
    )


if __name__ == "__main__":
    main()
