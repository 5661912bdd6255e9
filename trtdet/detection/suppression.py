"""Non-maximum suppression in NumPy, the reference for all backends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtdet.config import NmsConfig
from trtdet.detection.parts import Float, Parts
from trtdet.detection.rotated import probabilistic_iou
from trtdet.errors import ModelError

_BLOCK = 128  # candidates compared in one array operation; changes the speed, never the result


@dataclass(frozen=True, eq=False)
class Detections:
    """Detections of B images, up to K each, best first: the outputs of every engine.

    Entries past ``num_dets`` are undefined (zeros in this module).
    """

    num_dets: NDArray[np.int32]  # (B, 1), 0..K
    boxes: Float  # (B, K, 4), x1 y1 x2 y2 in pixels of the network's input
    scores: Float  # (B, K), 0..1, falling
    classes: NDArray[np.int32]  # (B, K), indices into the configuration's classes
    parts: Parts = Parts()
    """Masks, keypoints and rotated boxes of the K detections."""

    def __len__(self) -> int:
        return int(self.num_dets.shape[0])

    def image(self, i: int) -> tuple[Float, Float, NDArray[np.int32]]:
        """Boxes float32 (n, 4), scores float32 (n,) and classes int32 (n,) of image ``i``."""
        count = int(self.num_dets[i, 0])
        return self.boxes[i, :count], self.scores[i, :count], self.classes[i, :count]

    def over(self, score: float) -> Detections:
        """Those with at least this score; they are the first of each image."""
        ranked = np.arange(self.scores.shape[1]) < self.num_dets
        counts = (ranked & (self.scores >= score)).sum(axis=1, keepdims=True)
        return replace(self, num_dets=np.asarray(counts, np.int32))

    def image_parts(self, i: int) -> Parts:
        """Parts of the n detections of image ``i``, without the batch axis."""
        return self.parts.image(i, slice(int(self.num_dets[i, 0])))


def detections_of(outputs: Mapping[str, NDArray[Any]], nms: NmsConfig | None, *, logits: bool = False) -> Detections:
    """Detections of a network's outputs, which are by name, batch first.

    With ``nms`` it runs on the outputs ``boxes`` and ``scores``, see :func:`non_max_suppression`; None means that the
    network contains NMS and gives the fields of Detections.
    """
    parts = Parts.of(outputs)
    if nms is not None:
        return non_max_suppression(outputs["boxes"], outputs["scores"], nms, logits=logits, parts=parts)
    num_dets, boxes, scores, classes = (outputs[name] for name in ("num_dets", "boxes", "scores", "classes"))
    return Detections(num_dets, boxes=boxes, scores=scores, classes=classes, parts=parts)


def non_max_suppression(
    boxes: NDArray[Any], scores: NDArray[Any], config: NmsConfig, *, logits: bool = False, parts: Parts = Parts()
) -> Detections:
    """Greedy non-maximum suppression, exact and deterministic.

    1. Candidates are (box, class) pairs with a float32 score strictly above ``score_threshold``; NaN never is. With
       ``best-class`` a box is a candidate only for its highest class, the lowest index if classes tie.
    2. The best ``pre_nms_topk`` stay, by falling score; equal scores keep (box, class) order.
    3. In that order, a candidate is kept unless a kept candidate of its class (of any class if ``class_agnostic``)
       overlaps it with an IoU strictly above ``iou_threshold``. The IoU is intersection / union in float32. It is 0 for
       boxes without area, and NaN suppresses nothing. Rotated boxes are compared by their probabilistic IoU, see
       :func:`trtdet.detection.rotated.probabilistic_iou`. With an ``iou_threshold`` of 1 nothing is suppressed.
    4. The first ``max_detections`` kept are the result, K = ``max_detections`` with zeros past the last.

    Args:
        boxes: float (B, N, 4), x1 y1 x2 y2 in any unit. N may be 0.
        scores: float (B, N, C), 0..1, or any real number with ``logits``.
        logits: scores have no sigmoid yet. They are compared as logits, and the result holds their probabilities.
            Unlike after a sigmoid, logits whose float32 probabilities are equal keep their order.
        parts: of the boxes; the result has those of kept boxes.

    Raises:
        ModelError: the shapes are not (B, N, 4) and (B, N, C).
    """
    all_boxes, all_scores = checked(boxes, scores)
    images, rows = [], []
    for number, (image_boxes, image_scores) in enumerate(zip(all_boxes, all_scores, strict=True)):
        box_index, class_index, score = _candidates(image_scores, config, score_bound(config.score_threshold, logits))
        candidates = image_boxes[box_index]
        groups = np.zeros_like(class_index) if config.class_agnostic else class_index
        compared, rule = candidates, _overlaps
        if parts.rotated_boxes is not None:
            compared, rule = parts.rotated_boxes[number][box_index], _rotated_overlaps
        overlaps = partial(rule, compared, groups, np.float32(config.iou_threshold))
        kept = np.arange(len(candidates))
        if config.suppresses:
            kept = greedy(len(candidates), overlaps, config.max_detections)
        score = sigmoid(score[kept]) if logits else score[kept]
        images.append((candidates[kept], score, class_index[kept]))
        rows.append(box_index[kept])
    return replace(packed(images, config.max_detections), parts=parts.gathered(rows, config.max_detections))


def score_bound(threshold: float, logits: bool) -> np.float32:
    """The bound that a score must exceed: the threshold, or its logit."""
    if not logits:
        return np.float32(threshold)
    if threshold >= 1:
        return np.float32(np.inf)
    # Below the smallest normal number a probability counts as 0, which exceeds no threshold.
    probability = max(float(np.float32(threshold)), float(np.finfo(np.float32).tiny))
    return np.float32(np.log(probability / (1 - probability)))


def sigmoid(logits: Float) -> Float:
    """Float32 probabilities 0..1 of logits of any shape; no warning if exp overflows."""
    with np.errstate(over="ignore"):  # exp(-x) reaching infinity gives the right 0
        probabilities: Float = np.float32(1) / (np.float32(1) + np.exp(-logits))
    return probabilities


def softmax(logits: Float, axis: int = -1) -> Float:
    """Float32 probabilities 0..1 of logits along an axis; no warning if infinite logits give NaN."""
    with np.errstate(invalid="ignore"):
        weights = np.exp(logits - logits.max(axis=axis, keepdims=True))
        return np.asarray(weights / weights.sum(axis=axis, keepdims=True), np.float32)


def corners_of(centre: Float, size: Float) -> Float:
    """Boxes (..., 4), x1 y1 x2 y2, from centres (..., 2) and widths and heights (..., 2)."""
    half = size * np.float32(0.5)
    return np.concatenate([centre - half, centre + half], axis=-1)


def checked(boxes: NDArray[Any], scores: NDArray[Any]) -> tuple[Float, Float]:
    if boxes.ndim != 3 or boxes.shape[2] != 4 or scores.ndim != 3 or boxes.shape[:2] != scores.shape[:2]:
        raise ModelError(
            f"suppression got boxes {boxes.shape} and scores {scores.shape}, expected (B, N, 4) and (B, N, C); "
            "trtdet.detection.heads.decode gives them so"
        )
    return np.asarray(boxes, dtype=np.float32), np.asarray(scores, dtype=np.float32)


def packed(images: Sequence[tuple[Float, Float, NDArray[np.intp]]], room: int) -> Detections:
    """Packs boxes (n, 4), scores (n,) and classes (n,) of each image into Detections with K = ``room``."""
    batch = len(images)
    result = Detections(
        np.array([[len(score)] for _, score, _ in images], np.int32).reshape(batch, 1),
        boxes=np.zeros((batch, room, 4), np.float32),
        scores=np.zeros((batch, room), np.float32),
        classes=np.zeros((batch, room), np.int32),
    )
    for image, (boxes, scores, classes) in enumerate(images):
        result.boxes[image, : len(boxes)] = boxes
        result.scores[image, : len(scores)] = scores
        result.classes[image, : len(classes)] = classes
    return result


def _candidates(
    scores: Float, config: NmsConfig, bound: np.float32
) -> tuple[NDArray[np.intp], NDArray[np.intp], Float]:
    """Box index, class index and score of the candidates of one image, best first."""
    if scores.size == 0:
        return np.zeros(0, np.intp), np.zeros(0, np.intp), np.zeros(0, np.float32)
    classes = scores.shape[1]
    values = np.ascontiguousarray(scores).reshape(-1)
    flat = np.flatnonzero(values > bound)
    if config.candidates == "best-class":
        rows = np.unique(flat // classes)
        few = scores[rows]
        few = np.where(np.isnan(few), np.float32(-np.inf), few)  # argmax takes NaN for the highest
        flat = rows * classes + few.argmax(axis=1)
    score = values[flat]
    limit = config.most_candidates
    if len(score) > limit:
        # Drop scores that cannot be among the best before sorting; ties with the last score stay until then.
        last = np.partition(score, len(score) - limit)[len(score) - limit]
        kept = score >= last
        flat, score = flat[kept], score[kept]
    order = np.argsort(-score, kind="stable")[:limit]
    flat = flat[order]
    return flat // classes, flat % classes, score[order]


def greedy(
    count: int, overlaps: Callable[[NDArray[np.intp], NDArray[np.intp]], NDArray[np.bool_]], limit: int
) -> NDArray[np.intp]:
    """Indices of the candidates that survive, at most ``limit``; candidates are sorted best first.

    ``overlaps`` returns bool (rows, columns) for two lists of candidates: which pairs cannot both stay. Each block of
    candidates is compared with those kept before it, then within itself.
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
    boxes: Float, groups: NDArray[np.intp], threshold: np.float32, rows: NDArray[np.intp], columns: NDArray[np.intp]
) -> NDArray[np.bool_]:
    """bool (rows, columns): pairs of one group with a float32 IoU above the threshold."""
    ax1, ay1, ax2, ay2 = boxes[rows].T[:, :, None]
    bx1, by1, bx2, by2 = boxes[columns].T[:, None, :]
    zero = np.float32(0)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        inter = np.maximum(np.minimum(ax2, bx2) - np.maximum(ax1, bx1), zero)
        inter *= np.maximum(np.minimum(ay2, by2) - np.maximum(ay1, by1), zero)
        area_a = np.maximum(ax2 - ax1, zero) * np.maximum(ay2 - ay1, zero)
        area_b = np.maximum(bx2 - bx1, zero) * np.maximum(by2 - by1, zero)
        iou = inter / (area_a + area_b - inter)  # 0 / 0 is NaN, which exceeds nothing
        same: NDArray[np.bool_] = groups[rows][:, None] == groups[columns][None, :]
        same &= iou > threshold
    return same


def _rotated_overlaps(
    boxes: Float, groups: NDArray[np.intp], threshold: np.float32, rows: NDArray[np.intp], columns: NDArray[np.intp]
) -> NDArray[np.bool_]:
    """As :func:`_overlaps`, of rotated boxes (N, 5) by their probabilistic IoU."""
    same: NDArray[np.bool_] = groups[rows][:, None] == groups[columns][None, :]
    with np.errstate(invalid="ignore"):
        same &= probabilistic_iou(boxes[rows][:, None], boxes[columns][None]) > threshold
    return same
