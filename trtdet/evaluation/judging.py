"""Judges from detections alone whether a detector works on images.

The detector also runs on each image mirrored and shifted by 20 pixels, which is no multiple of a stride (the "other
look"). A working detector's boxes move with the image. A network that is fed wrong values gives boxes on a grid, along
the border or everywhere, and these stay in place, however confident they are.

The figure of an image is a sum over pairs of overlapping detections of a class, one from each look: the cube of the
smaller score times ``2 * IoU - 1``, less a quarter of the cubed scores of detections without a partner. The thresholds
are measured in docs/results/init.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trtdet.config import Config, InputConfig, NmsConfig
from trtdet.detection.parts import Float
from trtdet.detection.suppression import Detections
from trtdet.evaluation.matching import iou, xywh
from trtdet.tables import counted

FEWEST_IMAGES = 4
"""Fewer images give no verdict."""

SUPPRESSION = NmsConfig(score_threshold=0.1, iou_threshold=0.5, max_detections=100, pre_nms_topk=1000)
_CONFIDENT = 0.3
_SHIFT = 20
"""Pixels by which the mirror image is shifted right and down: half a stride of 8 beyond a multiple of 16."""

_MOST_SURE = 4.0
"""Largest magnitude of the figure of an image, so that crowds and grids do not outweigh other images."""
_FEWEST_BOXES = 6
"""A detector with fewer confident boxes on all images cannot be judged."""
_MOVED = 0.6
"""Least share of confident boxes that go with the image in a working detector; measured: over 0.86, else under 0.5."""
_AGREEMENT = 0.3
"""Least share of the scores over 0.3 that is found again in the other look by a working detector."""

_FEW_FILLING = 3
"""Most confident boxes an image of a detector whose boxes fill the image, as a page's layout does for a photograph."""

Found = tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]
"""Boxes (N, 4) in pixels of the input, scores and classes of an image, best first."""


@dataclass(frozen=True)
class Tally:
    """Measurements of one image with one reading. ``filling`` counts confident boxes as large as the input."""

    figure: float = 0.0
    score: float = 0.0
    agreed: float = 0.0
    confident: int = 0
    moved: float = 0.0
    stayed: float = 0.0
    saturated: int = 0
    misplaced: int = 0
    filling: int = 0
    classes: frozenset[int] = frozenset()
    improbable: bool = False


def other_look(image: Float) -> Float:
    """The image float32 (3, H, W) mirrored and shifted right and down; what comes in repeats the edge."""
    shift = _shift(image.shape[1:])
    return np.pad(image[:, :, ::-1], ((0, 0), (shift, 0), (shift, 0)), mode="edge")[:, :-shift, :-shift]


def _shift(size: Sequence[int]) -> int:
    return _SHIFT if min(size) >= 8 * _SHIFT else 4


def tally_of(pair: tuple[Found, Found] | None, config: InputConfig) -> Tally:
    """Compares the detections of an image with those of its other look."""
    if pair is None:
        return Tally(improbable=True)
    boxes, scores, classes = pair[0]
    shift, ends = _shift(config.size), np.array([config.width, config.height] * 2, np.float64)
    mirrored = np.stack([config.width - boxes[:, 2], boxes[:, 1], config.width - boxes[:, 0], boxes[:, 3]], axis=1)
    matches = _matched(pair, mirrored + shift, ends)
    stayed = np.maximum(_overlaps(pair, boxes, ends), _overlaps(pair, mirrored, ends)).max(axis=1, initial=0.0)
    sure, near = scores > _CONFIDENT, matches.overlaps
    counted = sure & matches.kept
    less = np.where(matches.paired, np.minimum(scores, matches.partners), 0.0)
    # Without area, or with a centre outside the network's input.
    size, centre = boxes[sure, 2:] - boxes[sure, :2], (boxes[sure, 2:] + boxes[sure, :2]) / 2
    misplaced = (size < 1) | (centre < 0) | (centre > ends[:2])
    filling = (boxes[sure, :2] <= shift).all(axis=1) & (boxes[sure, 2:] >= ends[:2] - shift).all(axis=1)
    return Tally(
        figure=matches.figure,
        score=float(scores[counted].sum()),
        agreed=float(less[counted].sum()),
        confident=int(sure.sum()),
        moved=float((scores[counted & (near > stayed + 1e-3)] ** 2).sum()),
        stayed=float((scores[counted & (stayed > near + 1e-3)] ** 2).sum()),
        saturated=int((scores > 0.9999).sum()),
        misplaced=int(misplaced.any(axis=1).sum()),
        filling=int(filling.sum()),
        classes=frozenset(classes[sure].tolist()),
    )


def figure_of(pair: tuple[Found, Found], expected: NDArray[np.float64], size: tuple[int, int]) -> float:
    """The figure of an image, whose boxes are at ``expected`` (N, 4) in its other look; of that look the height and
    width are ``size``, in the units of the boxes."""
    return _matched(pair, expected, np.array([size[1], size[0]] * 2, np.float64)).figure


@dataclass(frozen=True, eq=False)
class _Matches:
    """N detections of an image, best first, and their partners in its other look.

    Attributes:
        kept: (N,) whether the detection is expected in the other look.
        overlaps: (N,) IoU with the nearest detection there, 0..1.
        partners: (N,) that one's score, 0 without a partner.
        figure: of the image.
    """

    kept: NDArray[np.bool_]
    overlaps: NDArray[np.float64]
    partners: NDArray[np.float64]
    figure: float

    @property
    def paired(self) -> NDArray[np.bool_]:
        return self.partners > 0


def _matched(pair: tuple[Found, Found], expected: NDArray[np.float64], ends: NDArray[np.float64]) -> _Matches:
    """Pairs detections with those of the other look, ``ends`` wide and high, whose boxes are at ``expected`` there."""
    (boxes, scores, _), (_, other_scores, _) = pair
    # What is mostly shifted out of the image is not expected to be found.
    kept = _areas(np.clip(expected, 0, ends)) > 0.6 * np.maximum(_areas(boxes), 1)
    near = _overlaps(pair, expected, ends)
    overlaps, partners = np.zeros(len(scores)), np.zeros(len(scores))
    alone = np.ones(len(other_scores), bool)
    for row in range(len(scores) if len(other_scores) else 0):
        best = int(near[row].argmax())
        overlaps[row] = near[row, best]
        # Of what is shifted out, the rest may be found.
        if overlaps[row] >= 0.5 or (overlaps[row] > 0 and not kept[row]):
            partners[row] = other_scores[best] if kept[row] else 0.0
            alone[best] = False
            near[:, best] = 0
    paired = partners > 0
    less = np.minimum(scores, partners)[paired]
    lost = float((scores[kept & ~paired] ** 3).sum() + (other_scores[alone] ** 3).sum())
    figure = float((less**3 * (2 * overlaps[paired] - 1)).sum()) - lost / 4
    return _Matches(kept, overlaps, partners, figure=float(np.clip(figure, -_MOST_SURE, _MOST_SURE)))


def _overlaps(pair: tuple[Found, Found], places: NDArray[np.float64], ends: NDArray[np.float64]) -> NDArray[np.float64]:
    """float64 (N, M): IoU of the places (N, 4) of detections with those of the same class in the other look."""
    (_, _, classes), (others, _, other_classes) = pair
    shares = iou(xywh(np.clip(places, 0, ends)), xywh(np.clip(others, 0, ends)), np.zeros(len(others), bool))
    return np.where(classes[:, None] == other_classes, shares, 0.0)


def _areas(boxes: NDArray[np.float64]) -> NDArray[np.float64]:
    sides: NDArray[np.float64] = np.maximum(boxes[:, 2:] - boxes[:, :2], 0)
    return sides[:, 0] * sides[:, 1]


def found_in(detections: Detections, row: int) -> Found:
    """The detections of image ``row`` that take part in the figure; coordinates that are not finite become numbers."""
    boxes, scores, classes = detections.image(row)
    rows = np.flatnonzero(scores > SUPPRESSION.score_threshold)[: SUPPRESSION.max_detections]
    finite = np.nan_to_num(boxes[rows].astype(np.float64), nan=0.0, posinf=1e9, neginf=-1e9)
    return finite, scores[rows].astype(np.float64), classes[rows].astype(np.int64)


def judged(tallies: Sequence[Tally], config: Config) -> tuple[tuple[str, ...], str]:
    """Signs of a detector that does not work, and why there is no verdict; both empty for a working detector."""
    images, total = len(tallies), sum(tally.confident for tally in tallies)
    if images < FEWEST_IMAGES:
        return (), f"{counted(images)} {'is' if images == 1 else 'are'} too few, give {FEWEST_IMAGES} or more"
    if sum(tally.improbable for tally in tallies) > images / 2:
        return (
            f"the scores are not 0 to 1 and mostly low, as those of objects are (head.scores is {config.head.scores})",
        ), ""
    seen = sum(tally.confident > 0 for tally in tallies)
    if total < _FEWEST_BOXES or seen < FEWEST_IMAGES:
        names = ", ".join(config.classes[:3]) + (", ..." if len(config.classes) > 3 else "")
        what = f"{total or 'no'} box{'es' * (total > 1)} over {_CONFIDENT} in {counted(images)}"
        return (), (
            f"there {'are' if total > 1 else 'is'} {what}; give images that show the model's classes ({names}); if "
            "these do, the configuration or the model is wrong"
        )
    filling = sum(tally.filling for tally in tallies)
    if filling > total / 2 and total <= _FEW_FILLING * images:
        return (), (
            f"{filling} of the {total} boxes over {_CONFIDENT} fill the whole image, which stays the same when "
            "that is mirrored; give images in which the model's classes are parts"
        )
    symptoms = tuple(_symptoms(tallies, config))
    for share, least in ((moved_share(tallies), _MOVED), (agreement_share(tallies), _AGREEMENT)):
        if not symptoms and share[0] < least:
            return (), (
                f"of what it finds in {counted(images)} only {share[0]:.0%} goes with the image when that is mirrored "
                "and shifted; give more images"
            )
    return symptoms, ""


def _symptoms(tallies: Sequence[Tally], config: Config) -> Iterator[str]:
    images, total = len(tallies), sum(tally.confident for tally in tallies)
    if sum(tally.misplaced for tally in tallies) > total / 2:
        yield "most boxes over 0.3 have no area or lie outside the image"
    moved, agreement = moved_share(tallies), agreement_share(tallies)
    stuck, lost = moved[1] < _MOVED, agreement[1] < _AGREEMENT
    if stuck:
        yield (
            f"{1 - moved[0]:.0%} of its boxes stay where they are, or lie on a grid, when the image is mirrored and "
            f"shifted by {_shift(config.input.size)} pixels"
        )
    if lost:
        yield f"of what it finds it finds {agreement[0]:.0%} again when the image is mirrored and shifted"
    if not (stuck or lost):
        return
    full = sum(tally.confident >= SUPPRESSION.max_detections for tally in tallies)
    if full > images / 2:
        yield f"over {SUPPRESSION.max_detections} boxes over {_CONFIDENT} in {full} of {counted(images)}"
    saturated = sum(tally.saturated for tally in tallies)
    if saturated > total / 4:
        yield f"{saturated / images:.0f} scores an image are 1"
    classes = frozenset().union(*(tally.classes for tally in tallies))
    if len(classes) == 1 and len(config.classes) > 1 and total > 20 * images:
        yield f"every box is '{config.classes[next(iter(classes))]}'"


def student_t(differences: NDArray[np.float64]) -> float:
    """Student's t of paired differences (N,); 0 for fewer than two."""
    if len(differences) < 2:
        return 0.0
    error = float(differences.std(ddof=1)) / math.sqrt(len(differences))
    return float(differences.mean()) / (error + 1e-9)


def normal_of(t: float, degrees: int) -> float:
    """The standard normal value of about the same probability as Student's t of 0 or more (Wallace 1959, Annals of
    Mathematical Statistics 30); ``degrees`` of freedom are 1 or more."""
    return t * (1 - 1 / (4 * degrees)) / math.sqrt(1 + t**2 / (2 * degrees))


def moved_share(tallies: Sequence[Tally]) -> tuple[float, float]:
    """Share of the confident boxes that move with the image, 0..1, and its upper bound; see :func:`_share`."""
    return _share([(tally.moved, tally.moved + tally.stayed) for tally in tallies])


def agreement_share(tallies: Sequence[Tally]) -> tuple[float, float]:
    """Share of the confident scores that is found again in the other look, 0..1, and its upper bound."""
    return _share([(tally.agreed, tally.score) for tally in tallies])


def _share(parts: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Mean of the images' shares, 0..1, and its upper bound for other such images.

    Images count equally: a crowd of small objects is no more evidence than another image.
    """
    shares = [part / whole for part, whole in parts if whole > 0]
    if not shares:
        return 0.0, 1.0
    mean, spread = float(np.mean(shares)), float(np.std(shares))
    return mean, mean + (2 + 4 / len(shares)) * spread / math.sqrt(len(shares))
