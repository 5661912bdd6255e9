"""Parity: what the written model gives, beside what torch gives, as outputs and as final detections.

Rounding differs between the two, so equal detections are not enough of a test: two candidates of nearly the same score
change places, and one at a threshold comes or goes. Each detection that the other side lacks must be such a tie.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtdet.config import Config, NmsConfig
from trtdet.detection.heads import decode
from trtdet.detection.suppression import non_max_suppression, sigmoid
from trtdet.errors import ConfigError, ModelError

Float = NDArray[np.float32]
Outputs = Mapping[str, NDArray[Any]]

_NEAR_IOU = 0.01
"""How near to the threshold an IoU is a tie: rounding moves the corners of a box by far less."""

_NEAR_SCORE = 1e-6
"""How near to each other scores are a tie at least, a few times the rounding of float32 below 1."""


@dataclass(frozen=True)
class OutputCheck:
    """One output of the written model beside torch's."""

    name: str
    shape: tuple[int, ...]
    """With a batch of 1."""
    max_abs: float
    """Largest absolute error over all inputs tried."""
    mean_abs: float
    """Mean absolute error of the input where it was largest."""


@dataclass(frozen=True)
class DetectionCheck:
    """The final detections of the written model beside those of torch, over all images tried."""

    images: int
    torch: int
    """Detections of torch's outputs."""
    onnx: int
    """Detections of the written model's outputs."""
    matched: int
    """Detections of both: of one class, and as near as the tolerance allows."""
    ties: int
    """Detections of one side, each within the tolerance of a threshold or of a rival."""
    max_score: float
    """Largest difference of scores of a match."""
    max_box: float
    """Largest difference of corners of a match, in pixels of the network's input."""


def reordered(expected: Outputs, found: Outputs) -> dict[str, NDArray[Any]]:
    """The model's outputs with the rows of each image in the order of torch's rows that they are nearest to.

    Args:
        expected: torch's outputs, each (B, N, columns).
        found: the model's, by the same names.
    """
    from scipy.optimize import linear_sum_assignment

    if any(found[name].shape != want.shape or want.ndim != 3 for name, want in expected.items()):
        return dict(found)  # which the comparison explains
    wanted, given = (np.concatenate([side[name] for name in expected], axis=2) for side in (expected, found))
    orders = []
    for want, got in zip(wanted, given, strict=True):
        farthest = np.nan_to_num(np.abs(want[:, None] - got[None]).max(axis=2))
        orders.append(linear_sum_assignment(farthest)[1])
    return {name: np.stack([rows[at] for rows, at in zip(found[name], orders, strict=True)]) for name in expected}


def compare_selection(
    source: str, name: str, pairs: Sequence[tuple[Outputs, Outputs]], nms: NmsConfig, tolerance: float
) -> DetectionCheck:
    """Matches what torch and the written model choose of the same candidates.

    Args:
        source: for messages.
        name: of what is chosen, for messages.
        pairs: ``boxes`` (n, 4) in pixels, ``scores`` (n,) and ``labels`` (n,) of either, of one image each.
        nms: the thresholds of both.
        tolerance: of a score, and of a corner in pixels.

    Raises:
        ModelError: one chooses what the other does not, and no threshold or rival is within rounding.
    """
    checks = []
    for pair in pairs:
        ours, theirs = (_Side(*(outputs[part] for part in ("boxes", "scores", "labels"))) for outputs in pair)
        checks.append(
            _match((f"{source}, {name}", "torch"), (ours, theirs), nms, _Reach(tolerance, tolerance, _NEAR_SCORE))
        )
    return _total(checks)


def count_found(pairs: Sequence[tuple[Outputs, Outputs]], score: float, corner: float) -> DetectionCheck:
    """How many detections of torch the written model has; those of one side alone are counted as ties.

    Args:
        pairs: as of :func:`compare_selection`.
        score: how far scores of a match may be apart.
        corner: how far corners may be, in pixels.
    """
    checks = []
    for pair in pairs:
        ours, theirs = (_Side(*(outputs[part] for part in ("boxes", "scores", "labels"))) for outputs in pair)
        checks.append(_paired(ours, theirs, _Reach(score, corner, 0.0)).check(ours, theirs))
    return _total(checks)


def compare_outputs(
    source: str, pairs: Sequence[tuple[Outputs, Outputs]], tolerance: float, reference: str = "torch"
) -> tuple[OutputCheck, ...]:
    """Measures each output over all batches.

    Args:
        source: for messages.
        pairs: torch's outputs and the model's, by the same names in the same order, of each batch; the first is of a
            batch of 1.
        tolerance: see ``trtdet.exporter.ExportOptions``.
        reference: what the first of each pair is of, for messages.

    Raises:
        ModelError: an output has another shape, is not finite, or is too far off.
    """
    worst: dict[str, OutputCheck] = {}
    for expected, found in pairs:
        for name, want in expected.items():
            check = _measure(source, name, want, found[name], tolerance, reference)
            if name not in worst:
                worst[name] = check
            elif check.max_abs > worst[name].max_abs:
                worst[name] = replace(check, shape=worst[name].shape)
    return tuple(worst.values())


def _measure(
    source: str, name: str, want: NDArray[Any], got: NDArray[Any], tolerance: float, reference: str
) -> OutputCheck:
    if want.shape != got.shape:
        raise ModelError(f"export of '{source}': output {name} is {got.shape} in ONNX and {want.shape} in {reference}")
    if not np.isfinite(want).all():
        raise ModelError(f"'{source}' gives values that are not finite in output {name}; check its weights")
    error = np.abs(want.astype(np.float64) - got.astype(np.float64))
    largest, mean = float(error.max(initial=0.0)), float(error.mean()) if error.size else 0.0
    allowed = tolerance * max(1.0, float(np.abs(want).max(initial=0.0)))
    if not largest <= allowed:
        raise ModelError(
            f"export of '{source}': output {name} differs from {reference} by {largest:.3g}, allowed is {allowed:.3g}; "
            "export with another --opset, or raise the tolerance if the difference is harmless"
        )
    return OutputCheck(name, tuple(want.shape), largest, mean)


def compare_detections(
    source: str, pairs: Sequence[tuple[Outputs, Outputs]], config: Config, tolerance: float, reference: str = "torch"
) -> DetectionCheck:
    """Decodes and suppresses torch's outputs and the model's, and matches what is detected.

    Args:
        source: for messages.
        pairs: torch's outputs and the model's, of each batch.
        config: what the outputs mean.
        tolerance: of a score, and of a corner as a share of the longer side of the input.
        reference: what the first of each pair is of, for messages.

    Raises:
        ConfigError: the outputs do not fit the configuration.
        ModelError: a score or a box is too far off, or a detection of one side is not the other's and is no tie.
    """
    decoded = []
    for outputs in pairs:
        try:
            decoded.append((decode(outputs[0], config), decode(outputs[1], config)))
        except ModelError as error:
            raise ConfigError(str(error)) from None
    logits = config.suppresses_logits
    reach = _Reach(tolerance, tolerance * max(config.input.size), 0.0)
    for (boxes, scores), (found_boxes, found_scores) in decoded:
        off = _difference(*(sigmoid(x) if logits else x for x in (scores, found_scores)))
        best = (sigmoid(scores) if logits else scores).max(axis=2, initial=0.0)
        seen = best > config.nms.score_threshold
        far = _difference(boxes[seen], found_boxes[seen])
        for name, value, allowed in (("a score", off, reach.score), ("a corner of a box", far, reach.box)):
            if not value <= allowed:
                raise ModelError(
                    f"export of '{source}': {name} differs from {reference} by {value:.3g}, allowed is {allowed:.3g}; "
                    "export with another --opset, or raise the tolerance if the difference is harmless"
                )
        reach = replace(reach, tie=max(reach.tie, 4 * off))
    return _matched((source, reference), decoded, config, replace(reach, tie=max(reach.tie, _NEAR_SCORE)))


def _difference(first: Float, other: Float) -> float:
    return float(np.abs(first.astype(np.float64) - other.astype(np.float64)).max(initial=0.0))


def _matched(
    names: tuple[str, str],
    decoded: Sequence[tuple[tuple[Float, Float], tuple[Float, Float]]],
    config: Config,
    reach: _Reach,
) -> DetectionCheck:
    checks = []
    for sides in decoded:
        expected, found = (non_max_suppression(*side, config.nms, logits=config.suppresses_logits) for side in sides)
        for index in range(len(expected)):
            pair = (_Side(*expected.image(index)), _Side(*found.image(index)))
            checks.append(_match(names, pair, config.nms, reach))
    return _total(checks)


def _total(checks: Sequence[DetectionCheck]) -> DetectionCheck:
    numbers = ("images", "torch", "onnx", "matched", "ties")
    total: dict[str, Any] = {name: sum(getattr(check, name) for check in checks) for name in numbers}
    for name in ("max_score", "max_box"):
        total[name] = max((getattr(check, name) for check in checks), default=0.0)
    return DetectionCheck(**total)


@dataclass(frozen=True)
class _Reach:
    """How far two detections that are the same may be apart."""

    score: float
    box: float
    """In pixels."""
    tie: float
    """Scores so near to each other, or to a threshold, may change places: a few times the largest error found."""


@dataclass(frozen=True, eq=False)
class _Side:
    """The detections of an image: boxes (n, 4), scores (n,), classes (n,)."""

    boxes: Float
    scores: Float
    classes: NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class _Pairs:
    """Which detections of two sides are the same."""

    rows: list[int]
    columns: list[int]
    score: NDArray[np.float32]
    box: NDArray[np.float32]
    """How far each of the one side is from each of the other."""

    def check(self, ours: _Side, theirs: _Side) -> DetectionCheck:
        counts = len(ours.scores), len(theirs.scores), len(self.rows)
        farthest = (float(apart[self.rows, self.columns].max(initial=0.0)) for apart in (self.score, self.box))
        return DetectionCheck(1, *counts, counts[0] + counts[1] - 2 * counts[2], *farthest)


def _paired(ours: _Side, theirs: _Side, reach: _Reach) -> _Pairs:
    score = np.abs(ours.scores[:, None] - theirs.scores[None, :])
    box = np.abs(ours.boxes[:, None, :] - theirs.boxes[None, :, :]).max(axis=2, initial=0.0)
    near = (ours.classes[:, None] == theirs.classes[None, :]) & (score <= reach.score) & (box <= reach.box)
    distance = np.where(near, score / reach.score + box / reach.box, np.inf)
    rows, columns = [], []
    for row in range(len(ours.scores)):
        column = int(distance[row].argmin()) if distance.shape[1] else 0
        if distance.shape[1] and np.isfinite(distance[row, column]):
            rows.append(row)
            columns.append(column)
            distance[:, column] = np.inf
    return _Pairs(rows, columns, score, box)


def _match(names: tuple[str, str], sides: tuple[_Side, _Side], nms: NmsConfig, reach: _Reach) -> DetectionCheck:
    ours, theirs = sides
    pairs = _paired(ours, theirs, reach)
    left = (
        np.setdiff1d(np.arange(len(ours.scores)), pairs.rows),
        np.setdiff1d(np.arange(len(theirs.scores)), pairs.columns),
    )
    for name, one, other, lacking, rivals in (
        (names[1], ours, theirs, left[0], left[1]),
        ("the ONNX model", theirs, ours, left[1], left[0]),
    ):
        for index in lacking:
            if not _is_tie(one, int(index), other, rivals, nms, reach.tie):
                box_text = ", ".join(f"{value:.1f}" for value in one.boxes[index])
                raise ModelError(
                    f"export of '{names[0]}': {name} alone finds class {one.classes[index]} with score "
                    f"{one.scores[index]:.4f} in [{box_text}], and no threshold is near; export with another --opset "
                    "or --exporter, or raise the tolerance if the difference is harmless"
                )
    return pairs.check(ours, theirs)


def _is_tie(side: _Side, index: int, other: _Side, rivals: NDArray[np.intp], nms: NmsConfig, near: float) -> bool:
    """Whether a detection that the other side lacks is within rounding of a threshold or of a rival there.

    Args:
        side: has the detection.
        index: of the detection.
        other: lacks it.
        rivals: the detections of the other side that this side lacks.
        nms: the thresholds.
        near: how near scores are a tie.
    """
    score = float(side.scores[index])
    if score <= nms.score_threshold + near:
        return True
    if len(other.scores) >= nms.max_detections and score <= float(other.scores.min()) + near:
        return True
    overlap = _iou(side.boxes[index], other.boxes)
    same = (other.classes == side.classes[index]) | nms.class_agnostic
    equal = np.abs(other.scores - score) <= near
    if bool((equal & (overlap >= 1 - _NEAR_IOU)).any()):  # another class of the same box, of the same score
        return True
    if not nms.suppresses:
        return False
    unmatched = np.isin(np.arange(len(other.scores)), rivals)
    at_threshold = np.abs(overlap - nms.iou_threshold) <= _NEAR_IOU
    hides = (overlap >= nms.iou_threshold - _NEAR_IOU) & (other.scores >= score - near)
    return bool((same & hides & (at_threshold | equal | unmatched)).any())


def _iou(box: Float, boxes: Float) -> NDArray[np.float64]:
    first, others = box.astype(np.float64), boxes.astype(np.float64)
    sides = np.minimum(first[2:], others[:, 2:]) - np.maximum(first[:2], others[:, :2])
    shared = np.clip(sides, 0, None).prod(axis=1)
    areas = (
        np.clip(others[:, 2:] - others[:, :2], 0, None).prod(axis=1) + np.clip(first[2:] - first[:2], 0, None).prod()
    )
    union = areas - shared
    overlap: NDArray[np.float64] = np.divide(shared, union, out=np.zeros_like(shared), where=union > 0)
    return overlap
