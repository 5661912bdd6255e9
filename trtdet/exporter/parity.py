"""Compares the outputs and the final detections of the written model with torch's.

Rounding differs, so two candidates of nearly equal score may change places, and one at a threshold may appear or not.
Each detection of only one side must be such a tie.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trtdet.config import Config, NmsConfig
from trtdet.detection.heads import decode
from trtdet.detection.parts import Float
from trtdet.detection.suppression import non_max_suppression, sigmoid
from trtdet.errors import ConfigError, ModelError

Outputs = Mapping[str, NDArray[Any]]

_NEAR_IOU = 0.01
"""An IoU this close to the threshold is a tie; rounding moves the corners of a box by far less."""

_NEAR_SCORE = 1e-6
"""Smallest score difference that counts as a tie, a few times the rounding of float32 below 1."""


@dataclass(frozen=True)
class OutputCheck:
    """Comparison of one output with torch's; ``shape`` is for a batch of 1.

    ``max_abs`` is the largest absolute error over all inputs, ``mean_abs`` the mean for the input that has it.
    """

    name: str
    shape: tuple[int, ...]
    max_abs: float
    mean_abs: float


@dataclass(frozen=True)
class DetectionCheck:
    """Comparison of the final detections with torch's over all images; all but the last two are counts.

    ``matched`` are pairs of the same class within the tolerance, ``ties`` detections of one side, each within the
    tolerance of a threshold or of a rival. ``max_score`` and ``max_box`` are the largest differences of a pair, in
    score and in pixels of the network's input.
    """

    images: int
    torch: int
    onnx: int
    matched: int
    ties: int
    max_score: float
    max_box: float


class _Reach(NamedTuple):
    """Allowed differences of a matched pair; ``box`` is in pixels."""

    score: float
    box: float
    tie: float  # scores this close to each other or to a threshold are a tie: a few times the largest error


class _Side(NamedTuple):
    """The detections of one model in one image."""

    boxes: Float
    scores: Float
    classes: NDArray[np.int32]


def reordered(expected: Outputs, outputs: Outputs) -> dict[str, NDArray[Any]]:
    """The model's outputs, each (B, N, columns), with the rows of each image in the order of torch's nearest rows."""
    from scipy.optimize import linear_sum_assignment

    if any(outputs[name].shape != array.shape or array.ndim != 3 for name, array in expected.items()):
        return dict(outputs)  # which the comparison explains
    ours, theirs = (np.concatenate([side[name] for name in expected], axis=2) for side in (expected, outputs))
    orders = []
    for rows, candidates in zip(ours, theirs, strict=True):
        distances = np.nan_to_num(np.abs(rows[:, None] - candidates[None]).max(axis=2))
        orders.append(linear_sum_assignment(distances)[1])
    return {name: np.stack([rows[at] for rows, at in zip(outputs[name], orders, strict=True)]) for name in expected}


def compare_selection(
    source: str, pairs: Sequence[tuple[Outputs, Outputs]], nms: NmsConfig | None, score: float, corner: float
) -> DetectionCheck:
    """Matches the selections of torch and of the written model from the same candidates.

    ``pairs`` are ``boxes`` (n, 4) in pixels, ``scores`` (n,) and ``labels`` (n,) of both, per image. ``score`` and
    ``corner`` are the allowed differences, of corners in pixels. Without ``nms`` every unpaired detection is a tie.
    Raises ModelError if a detection of one side alone is not a tie.
    """
    names, reach = (source, "torch"), _Reach(score, box=corner, tie=_NEAR_SCORE)
    sides = ([_Side(each["boxes"], each["scores"], each["labels"]) for each in pair] for pair in pairs)
    return _total([_match(names, ours, theirs, nms=nms, reach=reach) for ours, theirs in sides])


def compare_outputs(
    source: str, pairs: Sequence[tuple[Outputs, Outputs]], tolerance: float, reference: str = "torch"
) -> tuple[OutputCheck, ...]:
    """Compares each output of torch and of the model over all batches, the first of them with one image. Raises
    ModelError if an output has another shape, is not finite, or differs too much."""
    worst: dict[str, OutputCheck] = {}
    for expected, outputs in pairs:
        for name, want in expected.items():
            got = outputs[name]
            if want.shape != got.shape:
                raise ModelError(
                    f"export of '{source}': output {name} is {got.shape} in ONNX and {want.shape} in {reference}"
                )
            if not np.isfinite(want).all():
                raise ModelError(f"'{source}' gives values that are not finite in output {name}; check its weights")
            error = np.abs(want.astype(np.float64) - got.astype(np.float64))
            largest, mean = float(error.max(initial=0.0)), float(error.mean()) if error.size else 0.0
            allowed = tolerance * max(1.0, float(np.abs(want).max(initial=0.0)))
            _check_difference(f"export of '{source}': output {name} differs from {reference}", largest, allowed)
            if name not in worst or largest > worst[name].max_abs:
                shape = worst[name].shape if name in worst else tuple(want.shape)
                worst[name] = OutputCheck(name, shape, max_abs=largest, mean_abs=mean)
    return tuple(worst.values())


def _check_difference(problem: str, value: float, allowed: float) -> None:
    if not value <= allowed:
        advice = "export with another --opset, or raise the tolerance if the difference is harmless"
        raise ModelError(f"{problem} by {value:.3g}, allowed is {allowed:.3g}; {advice}")


def compare_detections(
    source: str, pairs: Sequence[tuple[Outputs, Outputs]], config: Config, tolerance: float, reference: str = "torch"
) -> DetectionCheck:
    """Decodes torch's outputs and the model's for each batch, applies NMS, and matches the detections.

    The tolerance is for scores, and for corners as a share of the longer input side. Raises ConfigError if the outputs
    do not fit the configuration; ModelError if a score or a box differs too much, or a detection of one side alone is
    not a tie.
    """
    try:
        decoded = [(decode(expected, config), decode(outputs, config)) for expected, outputs in pairs]
    except ModelError as error:
        raise ConfigError(str(error)) from None
    logits = config.suppresses_logits
    near, longer = _NEAR_SCORE, tolerance * max(config.input.size)
    for (boxes, scores), (other_boxes, other_scores) in decoded:
        ours, theirs = (sigmoid(x) if logits else x for x in (scores, other_scores))
        detected = ours.max(axis=2, initial=0.0) > config.nms.score_threshold
        off, far = (
            float(np.abs(first.astype(np.float64) - other.astype(np.float64)).max(initial=0.0))
            for first, other in ((ours, theirs), (boxes[detected], other_boxes[detected]))
        )
        for name, value, allowed in (("a score", off, tolerance), ("a corner of a box", far, longer)):
            _check_difference(f"export of '{source}': {name} differs from {reference}", value, allowed)
        near = max(near, 4 * off)
    checks = []
    for sides in decoded:
        expected, detections = (non_max_suppression(*side, config.nms, logits=logits) for side in sides)
        for index in range(len(expected)):
            images = _Side(*expected.image(index)), _Side(*detections.image(index))
            checks.append(_match((source, reference), *images, nms=config.nms, reach=_Reach(tolerance, longer, near)))
    return _total(checks)


def _total(checks: Sequence[DetectionCheck]) -> DetectionCheck:
    numbers = ("images", "torch", "onnx", "matched", "ties")
    total: dict[str, Any] = {name: sum(getattr(check, name) for check in checks) for name in numbers}
    for name in ("max_score", "max_box"):
        total[name] = max((getattr(check, name) for check in checks), default=0.0)
    return DetectionCheck(**total)


def _match(names: tuple[str, str], ours: _Side, theirs: _Side, nms: NmsConfig | None, reach: _Reach) -> DetectionCheck:
    """Pairs the detections of one image; each unpaired one must be a tie, unless ``nms`` is None."""
    score = np.abs(ours.scores[:, None] - theirs.scores[None, :])
    box = np.abs(ours.boxes[:, None, :] - theirs.boxes[None, :, :]).max(axis=2, initial=0.0)
    near = (ours.classes[:, None] == theirs.classes[None, :]) & (score <= reach.score) & (box <= reach.box)
    distance = np.where(near, score / reach.score + box / reach.box, np.inf)
    rows, columns = list[int](), list[int]()
    for row in range(len(ours.scores)):
        column = int(distance[row].argmin()) if distance.shape[1] else 0
        if distance.shape[1] and np.isfinite(distance[row, column]):
            rows.append(row)
            columns.append(column)
            distance[:, column] = np.inf
    first, second, matched = len(ours.scores), len(theirs.scores), len(rows)
    off, far = (float(differences[rows, columns].max(initial=0.0)) for differences in (score, box))
    ties = first + second - 2 * matched
    check = DetectionCheck(1, torch=first, onnx=second, matched=matched, ties=ties, max_score=off, max_box=far)
    if nms is None:
        return check
    unpaired = np.setdiff1d(np.arange(len(ours.scores)), rows)
    other_unpaired = np.setdiff1d(np.arange(len(theirs.scores)), columns)
    for name, side, other, lacking, rivals in (
        (names[1], ours, theirs, unpaired, other_unpaired),
        ("the ONNX model", theirs, ours, other_unpaired, unpaired),
    ):
        for index in lacking:
            if not _is_tie(side, int(index), other, rivals=rivals, nms=nms, near=reach.tie):
                box_text = ", ".join(f"{value:.1f}" for value in side.boxes[index])
                raise ModelError(
                    f"export of '{names[0]}': {name} alone finds class {side.classes[index]} with score "
                    f"{side.scores[index]:.4f} in [{box_text}], and no threshold is near; export with another --opset "
                    "or --exporter, or raise the tolerance if the difference is harmless"
                )
    return check


def _is_tie(side: _Side, index: int, other: _Side, rivals: NDArray[np.intp], nms: NmsConfig, near: float) -> bool:
    """Whether an unpaired detection is within rounding of a threshold or of a rival on the other side.

    ``rivals`` are the other side's unpaired detections; scores at most ``near`` apart are a tie.
    """
    score = float(side.scores[index])
    if score <= nms.score_threshold + near:
        return True
    if len(other.scores) >= nms.max_detections and score <= float(other.scores.min()) + near:
        return True
    box, boxes = side.boxes[index].astype(np.float64), other.boxes.astype(np.float64)
    sides = np.minimum(box[2:], boxes[:, 2:]) - np.maximum(box[:2], boxes[:, :2])
    shared = np.clip(sides, 0, None).prod(axis=1)
    areas = np.clip(boxes[:, 2:] - boxes[:, :2], 0, None).prod(axis=1) + np.clip(box[2:] - box[:2], 0, None).prod()
    union = areas - shared
    overlap = np.divide(shared, union, out=np.zeros_like(shared), where=union > 0)
    same = (other.classes == side.classes[index]) | nms.class_agnostic
    equal = np.abs(other.scores - score) <= near
    if bool((equal & (overlap >= 1 - _NEAR_IOU)).any()):  # another class with the same box and the same score
        return True
    if not nms.suppresses:
        return False
    unmatched = np.isin(np.arange(len(other.scores)), rivals)
    at_threshold = np.abs(overlap - nms.iou_threshold) <= _NEAR_IOU
    hides = (overlap >= nms.iou_threshold - _NEAR_IOU) & (other.scores >= score - near)
    return bool((same & hides & (at_threshold | equal | unmatched)).any())
