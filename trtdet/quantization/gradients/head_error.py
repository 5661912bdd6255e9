"""The error of :mod:`trtdet.quantization.head_error` in torch, with gradients.

Masks differ from it in one way: an IoU of pixels over a threshold has no gradient, so the probabilities are compared,
by the sum of the lower over the sum of the higher, which for two masks of zeros and ones is their IoU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from trtdet.detection.parts import KEYPOINTS, MASK_COEFFICIENTS, PROTOTYPES, ROTATED_BOXES
from trtdet.detection.rotated import EPSILON
from trtdet.detection.similarity import TOLERANCE
from trtdet.passes import Decoded
from trtdet.quantization.head_error import SEEN, paired

_MOST_MASKS = 64  # masks computed at a time, and again for their gradients, which bounds memory


@dataclass(frozen=True)
class HeadRows:
    """The M rows of all images of a model's outputs.

    Attributes:
        boxes: (M, 4), x1 y1 x2 y2 in pixels.
        scores: (M, C), 0..1.
        images: int64 (M,), the image of each row.
        parts: by name, see :class:`trtdet.detection.parts.Parts`: prototypes (B, K, h, w), others (M, ...).
    """

    boxes: torch.Tensor
    scores: torch.Tensor
    images: torch.Tensor
    parts: Mapping[str, torch.Tensor]

    @staticmethod
    def of(outputs: Mapping[str, torch.Tensor], head: Decoded) -> HeadRows:
        boxes, scores = outputs[head.boxes], outputs[head.scores]
        count = len(boxes)
        return HeadRows(
            boxes.flatten(0, 1),
            scores=(torch.sigmoid(scores) if head.logits else scores).flatten(0, 1),
            images=torch.arange(count, device=boxes.device).repeat_interleave(boxes.shape[1]),
            parts={
                part: outputs[name] if part == PROTOTYPES else outputs[name].flatten(0, 1) for part, name in head.parts
            },
        )

    def taken(self, index: torch.Tensor) -> HeadRows:
        """Some of the rows; zeros for a row of -1."""

        def rows(values: torch.Tensor) -> torch.Tensor:
            return torch.cat([values, values.new_zeros(1, *values.shape[1:])])[index]

        parts = {name: value if name == PROTOTYPES else rows(value) for name, value in self.parts.items()}
        return HeadRows(rows(self.boxes), scores=rows(self.scores), images=rows(self.images), parts=parts)


def matched(reference: HeadRows, other: HeadRows) -> tuple[HeadRows, HeadRows]:
    """Matching rows of two models; zeros without a match."""
    chosen: list[list[torch.Tensor]] = [[], []]
    for image in range(int(reference.images.max()) + 1):
        places = [torch.nonzero(each.images == image)[:, 0] for each in (reference, other)]
        first, second = (
            (each.boxes[place].detach().cpu().numpy(), each.scores[place].detach().cpu().numpy())
            for each, place in zip((reference, other), places, strict=True)
        )
        for indices, place, rows in zip(chosen, places, paired(first, second), strict=True):
            indices.append(pad(place, (0, 1), value=-1)[torch.from_numpy(rows).to(place.device)])
    return reference.taken(torch.cat(chosen[0])), other.taken(torch.cat(chosen[1]))


def head_sums(reference: HeadRows, other: HeadRows, size: tuple[int, int]) -> Iterator[torch.Tensor]:
    """The sums of :class:`trtdet.quantization.head_error.HeadError`: squared score errors, their weight, 1 - the
    similarity, its weight. The similarity of a row is the mean of the boxes' IoU and that of each part. ``size`` is
    height and width of the input in pixels."""
    scores, changed = reference.scores, other.scores
    pairs = (scores > SEEN) | (changed.detach() > SEEN)
    weight = torch.maximum(scores, changed.detach())[pairs]
    yield (weight * (changed[pairs] - scores[pairs]).square()).sum()
    yield weight.sum()
    detected = torch.nonzero(scores.amax(-1) > SEEN)[:, 0]
    first, second = reference.taken(detected), other.taken(detected)
    low = torch.maximum(first.boxes[:, :2], second.boxes[:, :2])
    high = torch.minimum(first.boxes[:, 2:], second.boxes[:, 2:])
    shared, one, two = (
        (end - start).clamp(min=0).prod(1)
        for start, end in ((low, high), *((each.boxes[:, :2], each.boxes[:, 2:]) for each in (first, second)))
    )
    overlaps = [shared / (one + two - shared).clamp(min=1e-6), *_similarities(first, second, size)]
    best = first.scores.amax(-1)
    yield (best * (1 - torch.stack(overlaps).mean(0))).sum()
    yield best.sum()


def _similarities(first: HeadRows, second: HeadRows, size: tuple[int, int]) -> Iterator[torch.Tensor]:
    """The similarities (M,), 0..1, of :func:`trtdet.detection.similarity.similarities` of each part."""
    ours, theirs = first.parts, second.parts
    if MASK_COEFFICIENTS in ours:
        yield _mask_similarity(first, second, size)
    if KEYPOINTS in ours:
        sides = (first.boxes[:, 2:] - first.boxes[:, :2]).clamp(min=1)
        squares = (ours[KEYPOINTS][..., :2] - theirs[KEYPOINTS][..., :2]).square().sum(-1)
        yield torch.exp(-squares / (2 * (2 * TOLERANCE) ** 2 * sides.prod(1)[:, None])).mean(1)
    if ROTATED_BOXES in ours:
        yield _probabilistic_iou(ours[ROTATED_BOXES], theirs[ROTATED_BOXES])


def _mask_similarity(first: HeadRows, second: HeadRows, size: tuple[int, int]) -> torch.Tensor:
    if not len(first.boxes):
        return first.boxes.new_zeros(0)
    rows, columns = first.parts[PROTOTYPES].shape[2:]
    y, x = (
        (torch.arange(count, device=first.boxes.device) + 0.5) * side / count
        for count, side in zip((rows, columns), size, strict=True)
    )

    def shares(boxes: torch.Tensor, *models: torch.Tensor) -> torch.Tensor:
        across = (x >= boxes[:, :1]) & (x < boxes[:, 2:3])
        down = (y >= boxes[:, 1:2]) & (y < boxes[:, 3:])
        inside = down[:, :, None] & across[:, None, :]
        one, two = (
            torch.sigmoid(torch.einsum("mk,mkhw->mhw", coefficients, prototypes)) * inside
            for coefficients, prototypes in zip(models[:2], models[2:], strict=True)
        )
        joined = torch.maximum(one, two).sum((1, 2))
        share = torch.minimum(one, two).sum((1, 2)) / joined.clamp(min=1e-6)
        return torch.where(joined > 0, share, torch.ones_like(share))

    parts = []
    for start in range(0, len(first.boxes), _MOST_MASKS):
        part = slice(start, start + _MOST_MASKS)
        coefficients = [each.parts[MASK_COEFFICIENTS][part] for each in (first, second)]
        prototypes = [each.parts[PROTOTYPES][each.images[part]] for each in (first, second)]
        parts.append(checkpoint(shares, first.boxes[part], *coefficients, *prototypes, use_reentrant=False))
    return torch.cat(parts)


def _probabilistic_iou(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """As :func:`trtdet.detection.rotated.probabilistic_iou`, of rotated boxes (M, 5) both."""
    (x1, y1, a1, b1, c1), (x2, y2, a2, b2, c2) = _gaussians(first), _gaussians(second)
    a, b, c = a1 + a2, b1 + b2, c1 + c2
    x, y = x2 - x1, y1 - y2
    determinant = a * b - c * c
    spread = (a * y * y + b * x * x) / (determinant + EPSILON) / 4
    skew = c * x * y / (determinant + EPSILON) / 2
    # The least area keeps the root's gradient finite where a box has none.
    own = ((a1 * b1 - c1 * c1) * (a2 * b2 - c2 * c2)).clamp(min=EPSILON)
    extent = torch.log(determinant / (4 * own.sqrt() + EPSILON) + EPSILON) / 2
    distance = (spread + skew + extent).clamp(EPSILON, 100)
    return 1 - (1 - torch.exp(-distance) + EPSILON).sqrt()


def _gaussians(rotated: torch.Tensor) -> tuple[torch.Tensor, ...]:
    x, y, width, height, angle = rotated.unbind(-1)
    along, across, cos, sin = width.square() / 12, height.square() / 12, angle.cos(), angle.sin()
    return x, y, along * cos**2 + across * sin**2, along * sin**2 + across * cos**2, (along - across) * cos * sin
