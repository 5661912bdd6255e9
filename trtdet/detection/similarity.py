"""How similar masks, keypoints and rotated boxes of two models are, place by place."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trtdet.detection.parts import Float, Parts
from trtdet.detection.rotated import probabilistic_iou

TOLERANCE = 0.05
"""Of a keypoint, as in COCO's keypoint similarity: a share of the object's size."""

_MOST_MASKS = 64  # masks compared at a time, which bounds memory


def similarities(first: Parts, second: Parts, boxes: Float, size: tuple[int, int]) -> list[NDArray[np.float64]]:
    """Similarities float64 (n,), 0..1, of each part that both models give; values that are not finite count as 0.

    - masks: IoU of the masks at the resolution of the prototypes, inside the first model's box; 1 if both are empty;
    - keypoints: the mean over keypoints of ``exp(-d ** 2 / (2 * (2 * TOLERANCE) ** 2 * area))``, with the distance d in
      pixels and the area of the first model's box, as COCO's keypoint similarity;
    - rotated boxes: :func:`trtdet.detection.rotated.probabilistic_iou`.

    Args:
        first, second: of one image, n rows each.
        boxes: float32 (n, 4), of the first model, x1 y1 x2 y2 in pixels of the input.
        size: height and width of the input in pixels.
    """
    results = []
    if first.mask_coefficients is not None and second.mask_coefficients is not None:
        results.append(_masks(first, second, boxes, size=size))
    if first.keypoints is not None and second.keypoints is not None:
        sides = np.maximum(boxes[:, 2:] - boxes[:, :2], 1).astype(np.float64)
        with np.errstate(invalid="ignore", over="ignore"):
            squares = np.square(first.keypoints[..., :2].astype(np.float64) - second.keypoints[..., :2]).sum(axis=-1)
            spread = 2 * (2 * TOLERANCE) ** 2 * sides.prod(axis=1)[:, None]
            results.append(np.exp(-squares / spread).mean(axis=1))
    if first.rotated_boxes is not None and second.rotated_boxes is not None:
        results.append(probabilistic_iou(first.rotated_boxes, second.rotated_boxes).astype(np.float64))
    return [np.nan_to_num(np.clip(values, 0, 1)) for values in results]


def _masks(first: Parts, second: Parts, boxes: Float, size: tuple[int, int]) -> NDArray[np.float64]:
    result = np.ones(len(boxes))
    models = [
        (one.mask_coefficients, one.prototypes)
        for one in (first, second)
        if one.mask_coefficients is not None and one.prototypes is not None
    ]
    rows, columns = models[0][1].shape[1:]
    y, x = ((np.arange(count) + 0.5) * side / count for count, side in zip((rows, columns), size, strict=True))
    for start in range(0, len(boxes), _MOST_MASKS):
        part = slice(start, start + _MOST_MASKS)
        low, high = boxes[part, :2], boxes[part, 2:]
        across = (x >= low[:, :1]) & (x < high[:, :1])
        down = (y >= low[:, 1:]) & (y < high[:, 1:])
        inside = down[:, :, None] & across[:, None, :]
        ours, theirs = (
            inside & (np.tensordot(np.nan_to_num(coefficients[part]), prototypes, axes=1) > 0)
            for coefficients, prototypes in models
        )
        shared, joined = ((ours & theirs).sum(axis=(1, 2)), (ours | theirs).sum(axis=(1, 2)))
        result[part] = np.where(joined > 0, shared / np.maximum(joined, 1), 1.0)
    return result
