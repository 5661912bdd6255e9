"""The difference between two models' detections (decoded boxes and scores) as one number.

Pairs and boxes with scores up to 0.05 do not count; the others are weighted by their score. Where a detector gives
masks, keypoints or rotated boxes, the IoU of two boxes is replaced by the mean of it and of how similar these are, see
:func:`trtdet.detection.similarity.similarities`.

Row i of both models' boxes is of the same place, unless a model chooses its rows by their scores, as two-stage DETRs
choose their queries. There the smallest change of a score moves all rows, so each row is compared with the other
model's row that detects the same object.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import product

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from numpy.typing import NDArray

from trtdet.detection.parts import Parts
from trtdet.detection.similarity import similarities
from trtdet.passes.provenance import origin_of
from trtdet.passes.walk import upstream

SEEN = 0.05

_SWAPS = 4096  # exchanges of two models' images in the test: all of them up to 12 images, this many random ones beyond

Detections = tuple[NDArray[np.float32], NDArray[np.float32]]
"""A model's decoded boxes (N, 4), x1 y1 x2 y2 in pixels, and scores (N, C), 0..1."""


@dataclass(eq=False)
class HeadError:
    """Collects the error of one model against a reference over images; 48 bytes an image. ``chosen`` tells whether the
    models choose their rows, see :func:`chooses_rows`; ``size`` is height and width of the input in pixels."""

    chosen: bool = False
    size: tuple[int, int] = (0, 0)
    _sums: list[tuple[float, ...]] = field(default_factory=list)

    def update(
        self, reference: Detections, other: Detections, beside: tuple[Parts, Parts] = (Parts(), Parts())
    ) -> HeadError:
        """Adds one image's detections of both models. A NaN score counts as 0, and a NaN box overlaps nothing.

        ``beside`` are the masks, keypoints and rotated boxes of both models, without the batch axis.
        """
        (boxes, scores), (moved, changed) = reference, other
        first, second = beside
        if self.chosen:
            rows = paired(reference, other)
            first, second = (part.padded().rows(chosen) for part, chosen in zip(beside, rows, strict=True))
            # Zeros for rows without a match.
            (boxes, scores), (moved, changed) = (
                [np.pad(values, ((0, 1), (0, 0)))[chosen] for values in (each, np.nan_to_num(its))]
                for (each, its), chosen in zip((reference, other), rows, strict=True)
            )
        # Few pairs count, and speed matters: this runs for every variant of a model.
        pairs = np.flatnonzero((scores > SEEN) | (changed > SEEN))
        places, place = np.unique(pairs // scores.shape[1], return_inverse=True)
        shared = _iou(boxes[places], moved[places]).astype(np.float64)
        if first.items():
            alike = similarities(first.rows(places), second.rows(places), boxes[places], size=self.size)
            shared = np.mean([shared, *alike], axis=0)
        before, after = (np.nan_to_num(array.reshape(-1)[pairs].astype(np.float64)) for array in (scores, changed))
        weight = np.maximum(before, after)
        shares = scores[places].max(axis=1).astype(np.float64) if places.size else np.zeros(0)
        shares[~(shares > SEEN)] = 0  # without a detection there is no box to lose
        lost = 1 - shared
        parts = (
            *(weight * np.square(after - before), weight),
            *(shares * lost, shares * np.square(lost), shares),
            np.minimum(before, after) * shared[place],
        )
        self._sums.append(tuple(float(part.sum()) for part in parts))
        return self

    @staticmethod
    def weight(scores: NDArray[np.float32]) -> float:
        """Weight of an image: the sum of the scores (N, C) of all that may become a detection."""
        return float(scores[scores > SEEN].sum(dtype=np.float64))

    @property
    def by_image(self) -> NDArray[np.float64]:
        """The sums of each image, (images, 6). Squared score errors times their weights, the weights; 1 - IoU times the
        shares, its square, the shares; the lower score of each pair times IoU."""
        return np.array(self._sums, np.float64).reshape(-1, 6)

    @property
    def distance(self) -> float:
        """Root mean square of the score error plus the mean of 1 - IoU; 0 without detections."""
        return float(_distance(self.by_image.sum(axis=0)))

    @property
    def power(self) -> float:
        """Mean square of the score error plus that of 1 - IoU; errors of independent causes add up in it."""
        scores, score_weight, _, boxes, shares, _ = self.by_image.sum(axis=0)
        return float(_mean(scores, score_weight) + _mean(boxes, shares))

    @property
    def agreement(self) -> float:
        """Agreement of both models' detections, 0..1; 1 without detections. The lower score times the boxes' IoU,
        relative to the higher score. NMS is not needed, since both models' boxes are of the same places."""
        sums = self.by_image.sum(axis=0)
        return float(sums[5] / sums[1]) if sums[1] > 0 else 1.0


def chooses_rows(model: onnx.ModelProto, outputs: Collection[str]) -> bool:
    """Whether a model, as the passes leave it, computes ``outputs`` from rows that a TopK before the decoding
    chooses."""
    tensors = gs.import_onnx(model).tensors()
    written = {name for name, origin in origin_of(model).items() if not origin.replaces}
    nodes = upstream(*(tensors[name] for name in outputs))
    return any(node.op == "TopK" and node.name not in written for node in nodes)


def paired(reference: Detections, other: Detections) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Pairs the rows of two models that choose their rows, those with a score over :data:`SEEN`, with the largest sum
    of IoU times the lower scores of each class. Returns the rows of the first and of the second, int64 (M,) each; -1 if
    only one model detects the object."""
    detected = [np.flatnonzero((scores > SEEN).any(axis=1)) for _, scores in (reference, other)]
    (boxes, scores), (moved, changed) = (
        (values[rows], np.nan_to_num(classes[rows]))
        for (values, classes), rows in zip((reference, other), detected, strict=True)
    )
    first, second = (index.reshape(-1) for index in np.indices((len(boxes), len(moved))))
    shared = _iou(boxes[first], moved[second])
    gain = (shared * np.minimum(scores[first], changed[second]).sum(axis=1)).reshape(len(boxes), len(moved))
    from scipy.optimize import linear_sum_assignment  # slow to import

    ones, twos = linear_sum_assignment(gain, maximize=True)
    real = gain[ones, twos] > 0
    ones, twos = ones[real], twos[real]
    alone, added = (np.setdiff1d(np.arange(len(every)), some) for every, some in ((boxes, ones), (moved, twos)))
    nothing = np.full(max(len(alone), len(added)), -1)
    return (
        np.concatenate([detected[0][ones], detected[0][alone], nothing[: len(added)]]),
        np.concatenate([detected[1][twos], nothing[: len(alone)], detected[1][added]]),
    )


def lower_on(first: HeadError, other: HeadError) -> tuple[int, int]:
    """Number of images on which the first error is lower, and number of images with any detection."""
    own, its = _seen(first, other)
    return int((_distance(own) < _distance(its)).sum()), len(own)


def confidence(first: HeadError, other: HeadError) -> float:
    """Confidence that the first model's error is lower than the other's on the same images, 0..1.

    A paired randomisation test of the distance (Fisher, The Design of Experiments, 1935, section 21). If the models
    were equal, exchanging their outputs on any images would as likely give a difference this large. The result is 1
    minus the share of exchanges that do. So n images give at most 1 - 2**-n: 95 % needs 5 images, 99 % needs 7. Images
    are weighted by their detections.
    """
    own, its = _seen(first, other)
    count = len(own)
    if 2**count <= _SWAPS:
        swapped = np.array(list(product((0.0, 1.0), repeat=count)))
    else:
        drawn = np.random.default_rng(0).integers(0, 2, (_SWAPS - 1, count)).astype(np.float64)
        swapped = np.concatenate([np.zeros((1, count)), drawn])  # the original assignment counts as an exchange
    change = swapped @ (its - own)
    gain = _distance(its.sum(axis=0) - change) - _distance(own.sum(axis=0) + change)
    # Equal exchanges differ in summation order, so rounding must not decide.
    return float(1 - np.mean(gain >= gain[0] - 1e-12))


def fewest_images(sure: float) -> int:
    """Number of images with detections that :func:`confidence` needs for this value if all of them agree."""
    return math.ceil(-math.log2(1 - sure))


def _seen(first: HeadError, other: HeadError) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The sums of both models on the images with a detection of either."""
    own, its = first.by_image, other.by_image
    if len(own) != len(its):
        raise ValueError(f"{len(own)} and {len(its)} images are not the same images")
    detected = (own[:, 1] > 0) | (its[:, 1] > 0)
    return own[detected], its[detected]


def _distance(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    """Distance from sums (..., 6), see :attr:`HeadError.by_image`."""
    # Rounding can make differences of sums slightly negative.
    scores = np.maximum(_mean(sums[..., 0], sums[..., 1]), 0)
    distances: NDArray[np.float64] = np.sqrt(scores) + _mean(sums[..., 2], sums[..., 4])
    return distances


def _mean(total: NDArray[np.float64], weight: NDArray[np.float64]) -> NDArray[np.float64]:
    means: NDArray[np.float64] = np.where(weight > 0, total / np.where(weight > 0, weight, 1), 0.0)
    return means


def _iou(first: NDArray[np.float32], other: NDArray[np.float32]) -> NDArray[np.float64]:
    """IoU of boxes (N, 4), x1 y1 x2 y2, pair by pair; 0 if a side is not finite."""
    one, two = first.astype(np.float64), other.astype(np.float64)  # the area of a box of 1e20 is no float32
    with np.errstate(invalid="ignore"):
        low, high = np.maximum(one[:, :2], two[:, :2]), np.minimum(one[:, 2:], two[:, 2:])
        shared = np.prod(np.clip(high - low, 0, None), axis=1)
        union = np.prod(one[:, 2:] - one[:, :2], axis=1) + np.prod(two[:, 2:] - two[:, :2], axis=1) - shared
        overlaps = np.where(union > 0, shared / np.maximum(union, 1e-9), 1.0)
    finite = np.isfinite(one).all(axis=1) & np.isfinite(two).all(axis=1)
    return np.where(finite, overlaps, 0.0)
