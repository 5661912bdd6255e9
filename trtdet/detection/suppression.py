"""Non-maximum suppression in NumPy: the reference that every backend is held to.

The meaning of a detection is fixed here once: ``non_max_suppression`` turns decoded boxes and scores into
``Detections``, whose four arrays are the outputs of every engine. The other functions compute what others mean by the
same words, exactly, so that the differences can be tested and not only told.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from trtdet.config import NmsConfig
from trtdet.errors import ModelError

Float = NDArray[np.float32]

_BLOCK = 128
"""Candidates compared with each other in one array operation; changes the speed, never the result."""


@dataclass(frozen=True, eq=False)
class Detections:
    """What a detector found in a batch of B images, with room for K detections each, best first.

    Entries at or past ``num_dets`` are undefined (zeros, where this module made them).
    """

    num_dets: NDArray[np.int32]
    """int32 (B, 1), 0..K."""
    boxes: Float
    """float32 (B, K, 4), x1 y1 x2 y2 in pixels of the network's input."""
    scores: Float
    """float32 (B, K), 0..1, falling."""
    classes: NDArray[np.int32]
    """int32 (B, K), indices into the configuration's classes."""

    def __len__(self) -> int:
        return int(self.num_dets.shape[0])

    def image(self, i: int) -> tuple[Float, Float, NDArray[np.int32]]:
        """Boxes float32 (n, 4), scores float32 (n,) and classes int32 (n,) of image ``i``; n is its count."""
        count = int(self.num_dets[i, 0])
        return self.boxes[i, :count], self.scores[i, :count], self.classes[i, :count]


def non_max_suppression(
    boxes: NDArray[Any], scores: NDArray[Any], config: NmsConfig, *, logits: bool = False
) -> Detections:
    """Greedy non-maximum suppression, exact and deterministic.

    1. Candidates are (box, class) pairs with a score strictly above ``score_threshold``, in float32; NaN
       never is. With ``best-class`` a box is a candidate for its highest class only, the lowest index where
       classes tie.
    2. The best ``pre_nms_topk`` go on, in order of falling score; equal scores keep (box, class) order.
    3. In that order each candidate is kept unless a kept one of its class (of any class when
       ``class_agnostic``) overlaps it with an IoU strictly above ``iou_threshold``. The IoU is intersection /
       union in float32; it is 0 for boxes without area, and a NaN suppresses nothing.
    4. The first ``max_detections`` kept are the result, in that order.

    Args:
        boxes: float (B, N, 4), x1 y1 x2 y2 in any unit. N may be 0.
        scores: float (B, N, C), 0..1, or any real number with ``logits``.
        config: thresholds and limits.
        logits: the scores have no sigmoid yet: a negative one is a probability under one half, not a missing box.
            They are compared as they are and the result holds their probabilities, which gives the detections that a
            sigmoid before would give, but for logits too far out for float32 to tell their probabilities apart: those
            keep the order of the logits.

    Returns:
        Detections with K = ``config.max_detections``, zeros after the last one.

    Raises:
        ModelError: the shapes are not (B, N, 4) and (B, N, C).
    """
    all_boxes, all_scores = _checked(boxes, scores)
    found = []
    for one_boxes, one_scores in zip(all_boxes, all_scores, strict=True):
        box_index, class_index, score = _candidates(one_scores, config, score_bound(config.score_threshold, logits))
        candidates = one_boxes[box_index]
        groups = np.zeros_like(class_index) if config.class_agnostic else class_index
        overlaps = partial(_overlaps, candidates, groups, np.float32(config.iou_threshold))
        kept = _greedy(len(candidates), overlaps, config.max_detections)
        score = sigmoid(score[kept]) if logits else score[kept]
        found.append((candidates[kept], score, class_index[kept]))
    return _packed(found, config.max_detections)


def score_bound(threshold: float, logits: bool) -> np.float32:
    """What a score must exceed: the threshold itself, or the logit of it."""
    if not logits:
        return np.float32(threshold)
    if threshold >= 1:
        return np.float32(np.inf)
    # Below the smallest normal number a probability counts as 0, which exceeds no threshold.
    probability = max(float(np.float32(threshold)), float(np.finfo(np.float32).tiny))
    return np.float32(np.log(probability / (1 - probability)))


def sigmoid(logits: Float) -> Float:
    """Probabilities float32 0..1 of logits, any shape; quiet where exp overflows."""
    with np.errstate(over="ignore"):  # exp(-x) reaching infinity gives the right 0
        probabilities: Float = np.float32(1) / (np.float32(1) + np.exp(-logits))
    return probabilities


def corners_of(centre: Float, size: Float) -> Float:
    """Boxes (..., 4), x1 y1 x2 y2, of centres (..., 2) and widths and heights (..., 2)."""
    half = size * np.float32(0.5)
    return np.concatenate([centre - half, centre + half], axis=-1)


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
    order = np.argsort(-np.asarray(scores, np.float32), kind="stable")  # NaN last, wherever its sign
    missing = np.isnan(np.asarray(scores, np.float32)[order])
    order = np.concatenate([order[missing], order[~missing]])
    sorted_boxes = np.asarray(boxes, np.float32)[order]
    sorted_groups = np.zeros(len(order), np.intp) if groups is None else np.asarray(groups)[order]
    with np.errstate(invalid="ignore", over="ignore"):
        areas = (sorted_boxes[:, 2] - sorted_boxes[:, 0]) * (sorted_boxes[:, 3] - sorted_boxes[:, 1])
    overlaps = partial(_overlaps, sorted_boxes, sorted_groups, np.float32(iou_threshold), areas=areas)
    return order[_greedy(len(order), overlaps, len(order))]


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
    for image, (one_boxes, one_scores) in enumerate(
        zip(np.asarray(boxes, np.float32), np.asarray(scores, np.float32), strict=True)
    ):
        low, high = np.minimum(one_boxes[:, :2], one_boxes[:, 2:]), np.maximum(one_boxes[:, :2], one_boxes[:, 2:])
        corners = np.concatenate([low, high], axis=1)
        flat = one_scores.reshape(-1)
        eligible = ~np.isnan(flat) if score_threshold is None else flat > np.float32(score_threshold)
        order = np.flatnonzero(eligible)
        order = order[np.argsort(-flat[order], kind="stable")][:candidates]
        classes, index = order // one_scores.shape[1], order % one_scores.shape[1]
        for label in range(len(one_scores)):
            mine = index[classes == label]
            overlaps = partial(_overlaps, corners[mine], np.zeros(len(mine), np.intp), np.float32(iou_threshold))
            kept = mine[_greedy(len(mine), overlaps, max_output_boxes_per_class)]
            rows += [(image, label, int(box)) for box in kept]
    return np.array(rows, np.int64).reshape(-1, 3)


@dataclass(frozen=True)
class EfficientNms:
    """The attributes of TensorRT's EfficientNMS_TRT, by their own names.

    Attributes:
        score_threshold: at least 0; a score must reach it.
        iou_threshold: over 0; suppresses from it on.
        max_output_boxes: K.
        background_class: left out of the result; -1 for none.
        score_activation: 1 where the scores are logits.
        class_agnostic: 1 where boxes of all classes suppress each other.
        box_coding: 0 for two corners, 1 for centre and size.
    """

    score_threshold: float
    iou_threshold: float
    max_output_boxes: int
    background_class: int = -1
    score_activation: int = 0
    class_agnostic: int = 0
    box_coding: int = 0

    CANDIDATES: ClassVar[int] = 4096
    """At most so many (box, class) pairs of an image enter the suppression, best first."""
    DENSE: ClassVar[float] = 0.007
    """Under this threshold the pairs that do not reach it are sorted to the end instead of being left out."""
    EMPTY: ClassVar[float] = -32768.0
    """The score that such pairs then have; they are still counted in ``num_detections``."""


def efficient_nms(boxes: NDArray[Any], scores: NDArray[Any], attributes: EfficientNms) -> Detections:
    """What TensorRT's EfficientNMS_TRT gives, with all that sets it apart from :func:`non_max_suppression`.

    It suppresses at an IoU equal to the threshold as well and keeps a score equal to it; no more than 4096 pairs of
    box and class enter; an inverted box is turned round before its overlaps are computed, not after; and with a
    threshold under 0.007 nothing is filtered: pairs that do not reach it get the score -32768, stand at the end and are
    counted, and a NaN is not even that: it stands at the front. Where it filters, equal scores come in an order that
    changes from run to run; here they keep theirs.
    Source: NVIDIA/TensorRT, ``plugin/efficientNMSPlugin/efficientNMSInference.cu`` (main, 2026-07).

    Args:
        boxes: float (B, N, 4), (B, N, 1, 4) or, a box for each class, (B, N, C, 4).
        scores: float (B, N, C).
        attributes: of the node.

    Returns:
        Detections with K = ``max_output_boxes``, zeros after the last one; boxes are corners whatever they were.

    Raises:
        ModelError: the shapes do not belong together.
    """
    all_boxes = np.asarray(boxes, np.float32)
    all_boxes = all_boxes[:, :, None] if all_boxes.ndim == 3 else all_boxes
    all_scores = np.asarray(scores, np.float32)
    per_class = all_boxes.shape[2:3] == all_scores.shape[2:3] and all_boxes.shape[2:3] != (1,)
    if not per_class:
        _checked(all_boxes[:, :, 0], all_scores)
    threshold, dense_from = _plugin_thresholds(attributes)
    found = []
    for one_boxes, one_scores in zip(all_boxes, all_scores, strict=True):
        flat, labels = one_scores.reshape(-1).copy(), np.tile(np.arange(one_scores.shape[1]), len(one_scores))
        foreign = labels == attributes.background_class
        if threshold < dense_from:
            flat[(flat < threshold) | foreign] = EfficientNms.EMPTY
            order = np.arange(len(flat))
        else:
            order = np.flatnonzero((flat >= threshold) & ~foreign)
        falling = np.argsort(np.where(np.isnan(flat[order]), -np.inf, -flat[order]), kind="stable")
        order = order[falling][: EfficientNms.CANDIDATES]
        score, label, index = flat[order], labels[order], order // one_scores.shape[1]
        corners = one_boxes[index, label if per_class else 0]
        if attributes.box_coding:
            corners = corners_of(corners[:, :2], corners[:, 2:])
        groups = np.zeros_like(label) if attributes.class_agnostic else label
        overlaps = partial(_plugin_overlaps, _turned(corners), score, groups, np.float32(attributes.iou_threshold))
        kept = _greedy(len(order), overlaps, attributes.max_output_boxes)
        result = sigmoid(score[kept]) if attributes.score_activation else score[kept]
        found.append((corners[kept], result, label[kept]))
    return _packed(found, attributes.max_output_boxes)


def _plugin_thresholds(attributes: EfficientNms) -> tuple[np.float32, np.float32]:
    """What a score is compared with, and what decides whether pairs are filtered, both as logits where they are."""
    threshold, dense_from = np.float32(attributes.score_threshold), np.float32(EfficientNms.DENSE)
    if not attributes.score_activation:
        return threshold, dense_from
    one = np.float32(1)
    with np.errstate(divide="ignore", invalid="ignore"):
        inverse = np.log(threshold / (one - threshold)) if threshold > 0 else np.float32(EfficientNms.EMPTY)
    return np.float32(inverse), np.float32(np.log(dense_from / (one - dense_from)))


def _turned(corners: Float) -> Float:
    """Corners with the lower one first, swapped by sums and differences as the plugin does."""
    low, high = corners[:, :2], corners[:, 2:]
    with np.errstate(invalid="ignore", over="ignore"):
        difference = low - high
        swapped_high = difference + high
        swapped_low = swapped_high - difference
    swap = low > high
    return np.concatenate([np.where(swap, swapped_low, low), np.where(swap, swapped_high, high)], axis=1)


def _plugin_overlaps(
    boxes: Float,
    scores: Float,
    groups: NDArray[np.intp],
    threshold: np.float32,
    rows: NDArray[np.intp],
    columns: NDArray[np.intp],
) -> NDArray[np.bool_]:
    """bool (rows, columns): which of the pairs the plugin takes for overlapping."""
    mine, theirs = boxes[rows][:, None], boxes[columns][None]
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        low = np.where(mine[..., :2] > theirs[..., :2], mine[..., :2], theirs[..., :2])
        high = np.where(mine[..., 2:] < theirs[..., 2:], mine[..., 2:], theirs[..., 2:])
        shared = _plugin_area(low, high)
        union = _plugin_area(mine[..., :2], mine[..., 2:]) + _plugin_area(theirs[..., :2], theirs[..., 2:]) - shared
        iou = np.where((shared <= 0) | (union <= 0), np.float32(0), shared / union)
        falling = scores[columns][None, :] <= scores[rows][:, None]
        same: NDArray[np.bool_] = groups[rows][:, None] == groups[columns][None, :]
        return same & falling & (iou >= threshold)


def _plugin_area(low: Float, high: Float) -> Float:
    sides = high - low
    area: Float = np.where((sides <= 0).any(axis=-1), np.float32(0), sides[..., 0] * sides[..., 1])
    return area


def _checked(boxes: NDArray[Any], scores: NDArray[Any]) -> tuple[Float, Float]:
    if boxes.ndim != 3 or boxes.shape[2] != 4 or scores.ndim != 3 or boxes.shape[:2] != scores.shape[:2]:
        raise ModelError(
            f"suppression got boxes {boxes.shape} and scores {scores.shape}, expected (B, N, 4) "
            "and (B, N, C); trtdet.detection.heads.decode gives them so"
        )
    return np.asarray(boxes, dtype=np.float32), np.asarray(scores, dtype=np.float32)


def _packed(found: Sequence[tuple[Float, Float, NDArray[np.intp]]], room: int) -> Detections:
    """Boxes (n, 4), scores (n,) and classes (n,) of each image as the arrays of the contract."""
    batch = len(found)
    result = Detections(
        np.array([[len(score)] for _, score, _ in found], np.int32).reshape(batch, 1),
        np.zeros((batch, room, 4), np.float32),
        np.zeros((batch, room), np.float32),
        np.zeros((batch, room), np.int32),
    )
    for image, (boxes, scores, classes) in enumerate(found):
        result.boxes[image, : len(boxes)] = boxes
        result.scores[image, : len(scores)] = scores
        result.classes[image, : len(classes)] = classes
    return result


def _candidates(
    scores: Float, config: NmsConfig, bound: np.float32
) -> tuple[NDArray[np.intp], NDArray[np.intp], Float]:
    """Box index, class index and score of the candidates of one image, best first."""
    if scores.size == 0:
        none = np.zeros(0, np.intp)
        return none, none, np.zeros(0, np.float32)
    classes = scores.shape[1]
    if config.candidates == "best-class":
        best = scores.argmax(axis=1)
        values = scores[np.arange(len(scores)), best]
        if np.isnan(values).any():  # argmax takes NaN for the highest
            clean = np.where(np.isnan(scores), np.float32(-np.inf), scores)
            best = clean.argmax(axis=1)
            values = clean[np.arange(len(scores)), best]
        rows = np.flatnonzero(values > bound)
        flat, score = rows * classes + best[rows], values[rows]
    else:
        values = np.ascontiguousarray(scores).reshape(-1)
        flat = np.flatnonzero(values > bound)
        score = values[flat]
    limit = config.pre_nms_topk
    if len(score) > limit:
        # Drop what cannot be among the best before the sort; all that tie with the last one stay until then.
        last = np.partition(score, len(score) - limit)[len(score) - limit]
        kept = score >= last
        flat, score = flat[kept], score[kept]
    order = np.argsort(-score, kind="stable")[:limit]
    flat = flat[order]
    return flat // classes, flat % classes, score[order]


def _greedy(
    count: int, overlaps: Callable[[NDArray[np.intp], NDArray[np.intp]], NDArray[np.bool_]], limit: int
) -> NDArray[np.intp]:
    """Indices of the candidates, sorted best first, that survive; at most ``limit``.

    Works in blocks: a block is first compared with all that were kept before it and then within itself, which
    is the greedy rule in another order of evaluation, and stops as soon as the result is full.

    Args:
        count: of the candidates.
        overlaps: gives bool (rows, columns) for two lists of candidates: which pairs cannot both stay.
        limit: of the result.
    """
    kept = np.zeros(0, np.intp)
    for start in range(0, count, _BLOCK):
        block = np.arange(start, min(start + _BLOCK, count))
        if len(kept):
            block = block[~overlaps(kept, block).any(axis=0)]
        suppresses = np.triu(overlaps(block, block), 1)
        alive = np.ones(len(block), bool)
        for i in np.flatnonzero(suppresses.any(axis=1)):
            if alive[i]:
                alive &= ~suppresses[i]
        kept = np.concatenate([kept, block[alive]])
        if len(kept) >= limit:
            return kept[:limit]
    return kept


def _overlaps(
    boxes: Float,
    groups: NDArray[np.intp],
    threshold: np.float32,
    rows: NDArray[np.intp],
    columns: NDArray[np.intp],
    *,
    areas: Float | None = None,
) -> NDArray[np.bool_]:
    """bool (rows, columns): which pairs are of one group and have an IoU above the threshold, in float32."""
    ax1, ay1, ax2, ay2 = boxes[rows].T[:, :, None]
    bx1, by1, bx2, by2 = boxes[columns].T[:, None, :]
    zero = np.float32(0)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        inter = np.maximum(np.minimum(ax2, bx2) - np.maximum(ax1, bx1), zero)
        inter *= np.maximum(np.minimum(ay2, by2) - np.maximum(ay1, by1), zero)
        if areas is None:
            area_a = np.maximum(ax2 - ax1, zero) * np.maximum(ay2 - ay1, zero)
            area_b = np.maximum(bx2 - bx1, zero) * np.maximum(by2 - by1, zero)
        else:
            area_a, area_b = areas[rows][:, None], areas[columns][None, :]
        iou = inter / (area_a + area_b - inter)  # 0 / 0 is NaN, which exceeds nothing
        same: NDArray[np.bool_] = groups[rows][:, None] == groups[columns][None, :]
        same &= iou > threshold
    return same
