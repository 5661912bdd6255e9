"""What other libraries mean by non-maximum suppression, a box at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def torchvision_nms(
    boxes: NDArray[Any], scores: NDArray[Any], groups: NDArray[Any] | None, iou_threshold: float
) -> NDArray[np.intp]:
    """What ``torchvision.ops.nms`` keeps, or ``batched_nms`` where there are groups.

    No score is too low: what has none is filtered before. Equal scores keep their order, and a NaN comes first, because
    that is where ``Tensor.sort`` puts it. Areas are not clipped at 0; an inverted box overlaps nothing all the same,
    because its intersections are. ``batched_nms`` moves the boxes of each group apart by a multiple of the largest
    coordinate, which rounds; here groups are compared instead.
    Source: torchvision 0.29, ``torchvision/csrc/ops/cpu/nms_kernel.cpp`` and ``torchvision/ops/boxes.py``.

    Args:
        boxes: float (N, 4), x1 y1 x2 y2.
        scores: float (N,), any real number.
        groups: int (N,), such as classes; None for one group.
        iou_threshold: suppresses strictly above it.

    Returns:
        int (n,), indices of the kept boxes, best first.
    """
    values, corners = np.asarray(scores, np.float32), np.asarray(boxes, np.float32)
    order = np.argsort(-values, kind="stable")  # NaN last, wherever its sign
    missing = np.isnan(values[order])
    order = np.concatenate([order[missing], order[~missing]])
    labels = np.zeros(len(order), np.intp) if groups is None else np.asarray(groups)
    with np.errstate(invalid="ignore", over="ignore"):
        areas = (corners[:, 2] - corners[:, 0]) * (corners[:, 3] - corners[:, 1])
    return _kept(order, corners, areas, labels, iou_threshold)


def nms_layer(
    boxes: NDArray[Any],
    scores: NDArray[Any],
    max_output_boxes_per_class: int,
    iou_threshold: float,
    score_threshold: float | None = 0.0,
    candidates: int | None = None,
) -> NDArray[np.int64]:
    """What TensorRT's INMSLayer and ONNX's NonMaxSuppression keep.

    A score must exceed the threshold. Without one, TensorRT takes 0.0 and so drops every logit at or below 0;
    onnxruntime keeps all, which is None here. The corners of a box may be any two that lie across.
    Sources: ``INMSLayer`` in NvInfer.h; https://onnx.ai/onnx/operators/onnx__NonMaxSuppression.html.

    Args:
        boxes: float (B, N, 4), two corners; order of x and y is free, being the same for all.
        scores: float (B, C, N), any real number.
        max_output_boxes_per_class: per image.
        iou_threshold: suppresses strictly above it.
        score_threshold: None for none.
        candidates: at most so many (box, class) pairs of an image enter, best first; None for any number.

    Returns:
        int64 (n, 3): image, class and box; by image, then class, then falling score.
    """
    rows: list[tuple[int, int, int]] = []
    for image, (corners, values) in enumerate(zip(boxes.astype(np.float32), scores.astype(np.float32), strict=True)):
        low, high = np.minimum(corners[:, :2], corners[:, 2:]), np.maximum(corners[:, :2], corners[:, 2:])
        upright, areas = np.concatenate([low, high], axis=1), (high - low).prod(axis=1)
        flat = values.reshape(-1)
        order = np.flatnonzero(~np.isnan(flat) if score_threshold is None else flat > np.float32(score_threshold))
        order = order[np.argsort(-flat[order], kind="stable")][:candidates]
        classes, index = order // values.shape[1], order % values.shape[1]
        for label in range(len(values)):
            same = np.zeros(len(upright), np.intp)
            kept = _kept(index[classes == label], upright, areas, same, iou_threshold)[:max_output_boxes_per_class]
            rows += [(image, label, int(box)) for box in kept]
    return np.array(rows, np.int64).reshape(-1, 3)


def _kept(
    order: NDArray[Any], boxes: NDArray[Any], areas: NDArray[Any], groups: NDArray[Any], threshold: float
) -> NDArray[np.intp]:
    """The boxes of ``order`` that no kept box of their group overlaps by more than the threshold, in float32."""
    kept: list[int] = []
    for index in order:
        rivals = np.array([other for other in kept if groups[other] == groups[index]], np.intp)
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            sides = np.minimum(boxes[rivals, 2:], boxes[index, 2:]) - np.maximum(boxes[rivals, :2], boxes[index, :2])
            shared = np.maximum(sides, np.float32(0)).prod(axis=1)
            overlaps = shared / (areas[rivals] + areas[index] - shared) > np.float32(threshold)
        if not overlaps.any():
            kept.append(int(index))
    return np.array(kept, np.intp)
