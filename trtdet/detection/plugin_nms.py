"""TensorRT's plugin EfficientNMS_TRT in NumPy, with all its differences from the reference."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from trtdet.detection.parts import Float
from trtdet.detection.suppression import Detections, checked, corners_of, greedy, packed, sigmoid


@dataclass(frozen=True)
class EfficientNms:
    """Attributes of TensorRT's EfficientNMS_TRT, by their own names."""

    score_threshold: float  # at least 0; a score equal to it is kept
    iou_threshold: float  # over 0; an IoU equal to it suppresses
    max_output_boxes: int  # K
    background_class: int = -1  # left out of the result; -1 for none
    score_activation: int = 0  # 1 where the scores are logits
    class_agnostic: int = 0  # 1 where boxes of all classes suppress each other
    box_coding: int = 0  # 0 for two corners, 1 for centre and size

    CANDIDATES: ClassVar[int] = 4096  # maximum (box, class) pairs of an image in the suppression, best first
    DENSE: ClassVar[float] = 0.007  # a lower threshold drops no pairs: those below it are sorted to the end
    EMPTY: ClassVar[float] = -32768.0  # score of these pairs, which ``num_detections`` counts


def efficient_nms(boxes: NDArray[Any], scores: NDArray[Any], attributes: EfficientNms) -> Detections:
    """The outputs of TensorRT's EfficientNMS_TRT, with its differences from :func:`non_max_suppression`.

    An IoU equal to the threshold suppresses, and a score equal to the threshold is kept. At most 4096 pairs of box and
    class take part. An inverted box is turned round before overlaps are computed. A score threshold under 0.007 filters
    nothing: pairs below it get score -32768, come last and are counted, and NaN comes first. With filtering, the
    plugin's order of equal scores varies from run to run; here it is the order of the pairs. Source: NVIDIA/TensorRT,
    ``plugin/efficientNMSPlugin/efficientNMSInference.cu`` (main, 2026-07).

    ``boxes`` are float (B, N, 4), (B, N, 1, 4) or, a box per class, (B, N, C, 4); ``scores`` are float (B, N, C).
    Returns Detections with K = ``max_output_boxes``, zeros past the last; boxes are corners for any ``box_coding``.

    Raises:
        ModelError: the shapes do not fit each other.
    """
    all_boxes = np.asarray(boxes, np.float32)
    all_boxes = all_boxes[:, :, None] if all_boxes.ndim == 3 else all_boxes
    all_scores = np.asarray(scores, np.float32)
    per_class = all_boxes.shape[2:3] == all_scores.shape[2:3] and all_boxes.shape[2:3] != (1,)
    if not per_class:
        checked(all_boxes[:, :, 0], all_scores)
    threshold, dense_from = np.float32(attributes.score_threshold), np.float32(EfficientNms.DENSE)
    if attributes.score_activation:  # both as logits
        unit = np.float32(1)
        with np.errstate(divide="ignore", invalid="ignore"):
            inverse = np.log(threshold / (unit - threshold)) if threshold > 0 else np.float32(EfficientNms.EMPTY)
        threshold, dense_from = np.float32(inverse), np.float32(np.log(dense_from / (unit - dense_from)))
    images = []
    for image_boxes, image_scores in zip(all_boxes, all_scores, strict=True):
        flat, labels = image_scores.reshape(-1).copy(), np.tile(np.arange(image_scores.shape[1]), len(image_scores))
        foreign = labels == attributes.background_class
        if threshold < dense_from:
            flat[(flat < threshold) | foreign] = EfficientNms.EMPTY
            order = np.arange(len(flat))
        else:
            order = np.flatnonzero((flat >= threshold) & ~foreign)
        falling = np.argsort(np.where(np.isnan(flat[order]), -np.inf, -flat[order]), kind="stable")
        order = order[falling][: EfficientNms.CANDIDATES]
        score, label, index = flat[order], labels[order], order // image_scores.shape[1]
        corners = image_boxes[index, label if per_class else 0]
        if attributes.box_coding:
            corners = corners_of(corners[:, :2], corners[:, 2:])
        low, high = corners[:, :2], corners[:, 2:]
        with np.errstate(invalid="ignore", over="ignore"):  # swapped by sums and differences, as in the plugin
            swapped_high = low - high + high
            swapped_low = swapped_high - (low - high)
        upright = [np.where(low > high, swapped_low, low), np.where(low > high, swapped_high, high)]
        groups = np.zeros_like(label) if attributes.class_agnostic else label
        bound = np.float32(attributes.iou_threshold)
        overlaps = partial(_overlaps, np.concatenate(upright, axis=1), score, groups, bound)
        kept = greedy(len(order), overlaps, attributes.max_output_boxes)
        result = sigmoid(score[kept]) if attributes.score_activation else score[kept]
        images.append((corners[kept], result, label[kept]))
    return packed(images, attributes.max_output_boxes)


def _overlaps(
    boxes: Float,
    scores: Float,
    groups: NDArray[np.intp],
    threshold: np.float32,
    rows: NDArray[np.intp],
    columns: NDArray[np.intp],
) -> NDArray[np.bool_]:
    """bool (rows, columns): whether the plugin treats a pair as overlapping."""

    first, second = boxes[rows].T[:, :, None], boxes[columns].T[:, None, :]
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        low = [np.where(mine > theirs, mine, theirs) for mine, theirs in zip(first[:2], second[:2], strict=True)]
        high = [np.where(mine < theirs, mine, theirs) for mine, theirs in zip(first[2:], second[2:], strict=True)]
        shared = _area(*low, *high)
        union = _area(*first) + _area(*second) - shared
        iou = np.where((shared <= 0) | (union <= 0), np.float32(0), shared / union)
        falling = scores[columns][None, :] <= scores[rows][:, None]
        same: NDArray[np.bool_] = groups[rows][:, None] == groups[columns][None, :]
        return same & falling & (iou >= threshold)


def _area(left: Float, top: Float, right: Float, bottom: Float, /) -> Float:
    width, height = right - left, bottom - top
    return np.where((width <= 0) | (height <= 0), np.float32(0), width * height)
