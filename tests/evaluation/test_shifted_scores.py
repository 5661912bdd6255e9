import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scored

from trtdet.config import NmsConfig
from trtdet.data import CocoDataset, CocoImage, GroundTruth
from trtdet.errors import ConfigError, DataError
from trtdet.evaluation import shifted_scores
from trtdet.evaluation.metrics import Found
from trtdet.evaluation.resampling import Bootstrap
from trtdet.evaluation.scoring import Evaluation
from trtdet.evaluation.shifted_scores import ScoreShift, score_shift

CLASSES = ("cat", "dog", "bird")
FEW = Bootstrap(200)
BIRDS = 3
"""So many in all: too few for a threshold."""


def scene(annotated: bool, images: int = 30, seed: int = 0) -> tuple[CocoDataset, dict[int, Found]]:
    """Images, and what a calibrated detector finds in them: of the detections with score s, the part s is annotated.

    Cats and dogs at random in each image, a bird in the first few.
    """
    rng = np.random.default_rng(seed)
    found: dict[int, Found] = {}
    rows: list[tuple[int, int, np.ndarray]] = []
    for image in range(1, images + 1):
        corner = np.stack([100.0 * np.arange(11), rng.uniform(0, 50, 11)], axis=1)
        boxes = np.concatenate([corner, corner + rng.uniform(30, 80, (11, 2))], axis=1)
        classes = np.append(rng.integers(0, 2, 10), 2 if image <= BIRDS else 0)
        scores = rng.uniform(0.01, 0.99, 11)
        found[image] = boxes, scores, classes
        for index in np.flatnonzero(rng.uniform(0, 1, 11) < scores):
            rows.append((image, int(classes[index]), np.append(boxes[index, :2], boxes[index, 2:] - boxes[index, :2])))
    rows = rows if annotated else []
    boxes = np.array([box for _, _, box in rows]).reshape(-1, 4)
    truth = GroundTruth(
        np.array([image for image, _, _ in rows], np.int64),
        np.array([index for _, index, _ in rows], np.int64),
        boxes,
        boxes[:, 2] * boxes[:, 3],
        np.zeros(len(rows), bool),
    )
    listed = tuple(CocoImage(image, Path(f"{image}.png"), 0, 0) for image in found)
    return CocoDataset(Path("images"), CLASSES, (1, 2, 3), listed, truth), found


def evaluation(dataset: CocoDataset, found: dict[int, Found], lowest: float = 0.001) -> Evaluation:
    return scored.evaluation(scored.collected(dataset, found), thresholds=NmsConfig(score_threshold=lowest))


def scaled(found: dict[int, Found], *factors: float) -> dict[int, Found]:
    """With other scores: a factor for each class."""
    return {
        image: (boxes, scores * np.array(factors)[classes], classes)
        for image, (boxes, scores, classes) in found.items()
    }


def of_all(shift: ScoreShift) -> list[float | None]:
    return [entry.threshold for entry in shift.overall]


@pytest.mark.parametrize("annotated", [True, False])
def test_a_detector_has_its_own_thresholds(annotated):
    same = evaluation(*scene(annotated))
    shift = score_shift(same, same, FEW)
    assert shift.basis == ("precision" if annotated else "detections")
    for found in (shift.overall, shift.per_class["cat"]):
        assert [(entry.threshold, entry.low, entry.high) for entry in found] == [(0.25,) * 3, (0.5,) * 3]
    assert (shift.ratio.median, shift.ratio.low, shift.ratio.high) == (1, 1, 1)
    assert shift.ratio.pairs == shift.overall[0].detections


@pytest.mark.parametrize("annotated", [True, False])
def test_scores_that_are_compressed_need_lower_thresholds(annotated):
    dataset, found = scene(annotated)
    shift = score_shift(evaluation(dataset, scaled(found, 0.8, 0.8, 0.8)), evaluation(dataset, found), FEW)
    # Scores are some 0.003 apart.
    assert of_all(shift) == pytest.approx([0.2, 0.4], abs=0.01)
    assert shift.ratio.median == pytest.approx(0.8)
    for entry in shift.overall:
        assert entry.low is not None and entry.high is not None and entry.threshold is not None
        assert entry.low <= entry.threshold <= entry.high
        assert entry.high - entry.low < 0.06, "the order is the same, so that every draw gives nearly the same"


@pytest.mark.parametrize("annotated", [True, False])
def test_each_class_has_a_shift_of_its_own(annotated):
    dataset, found = scene(annotated)
    shift = score_shift(evaluation(dataset, scaled(found, 0.6, 1.2, 1)), evaluation(dataset, found), FEW)
    cats, dogs = ([entry.threshold for entry in shift.per_class[name]] for name in ("cat", "dog"))
    assert cats == pytest.approx([0.15, 0.3], abs=0.015)
    assert dogs == pytest.approx([0.3, 0.6], abs=0.03)
    for entry in shift.per_class["bird"]:
        assert entry.threshold is entry.low is None
        assert entry.problem == f"{entry.detections} detections, under 20" and entry.detections <= BIRDS


def test_precision_is_that_of_the_reference_and_not_its_number_of_detections():
    """Detections that are wrong are added: equal precision needs a higher threshold than equal numbers do."""
    dataset, found = scene(True)
    theirs = evaluation(dataset, found)
    rng = np.random.default_rng(3)
    more: dict[int, Found] = {}
    for image, (boxes, scores, classes) in found.items():
        stray = boxes[:5] + np.array([0, 500, 0, 500])
        more[image] = (
            np.concatenate([boxes, stray]),
            np.concatenate([scores, rng.uniform(0.05, 0.45, 5)]),
            np.concatenate([classes, classes[:5]]),
        )
    shift = score_shift(evaluation(dataset, more), theirs, FEW)
    for entry in shift.overall:
        scores = np.concatenate([scores for _, scores, _ in found.values()])
        assert entry.detections == np.count_nonzero(scores >= entry.reference)
        assert entry.precision == pytest.approx((1 + entry.reference) / 2, abs=0.1)
    low, half = of_all(shift)
    assert low is not None and low > 0.3
    assert half == pytest.approx(0.5, abs=0.03), "nothing is added up there"

    def precision(detections: dict[int, Found], threshold: float) -> float:
        truth, right, every = dataset.truth, 0, 0
        for image, (boxes, scores, _) in detections.items():
            taken = boxes[scores >= threshold]
            every += len(taken)
            annotated = truth.boxes[truth.image_ids == image, :2]
            right += sum((box[:2] == annotated).all(axis=1).any() for box in taken)
        return right / every

    wanted = shift.overall[0].precision
    assert wanted is not None
    assert precision(found, 0.25) == pytest.approx(wanted, abs=0.01)
    assert precision(more, low) == pytest.approx(wanted, abs=0.01)


def test_the_interval_is_that_of_images_drawn_anew():
    """By drawing data sets one by one: the number of detections decides the threshold."""
    dataset, found = scene(False, images=12)
    rng = np.random.default_rng(5)
    noisy = {
        image: (boxes, np.clip(scores + rng.normal(0, 0.1, 11), 0.06, 1), classes)
        for image, (boxes, scores, classes) in found.items()
    }
    entry = score_shift(evaluation(dataset, noisy), evaluation(dataset, found), Bootstrap(200, 0.8, seed=4)).overall[1]
    draws = np.random.default_rng(4).multinomial(12, np.full(12, 1 / 12), size=100)
    draws = np.concatenate([draws, np.random.default_rng(4).multinomial(12, np.full(12, 1 / 12), size=200)[100:]])
    values = []
    for weights in draws:
        ours, theirs = (
            np.concatenate([np.repeat(found[image][1], weights[image - 1]) for image in found])
            for found in (noisy, found)
        )
        count = np.count_nonzero(theirs >= 0.5)
        possible = [s for s in np.unique(ours) if np.count_nonzero(ours >= s) <= count]
        highest = [s for s in possible if np.count_nonzero(ours >= s) == count]
        lowest = max([s for s in np.unique(ours) if np.count_nonzero(ours >= s) > count], default=0)
        values.append(np.clip(0.5, lowest, max(highest) if highest else min(possible)))
    assert (entry.low, entry.high) == pytest.approx(tuple(np.percentile(values, [10, 90])), abs=1e-9)


def test_where_there_is_no_threshold_a_reason_stands():
    dataset, found = scene(False)
    reference = evaluation(dataset, found)
    nothing = {image: (boxes[:0], scores[:0], classes[:0]) for image, (boxes, scores, classes) in found.items()}
    blind = score_shift(evaluation(dataset, nothing, 0.1), reference, FEW)
    assert [entry.problem for entry in blind.overall] == ["below 0.1", "below 0.1"]
    assert (blind.ratio.median, blind.ratio.pairs) == (None, 0)
    assert "no object is found by both" in str(blind)
    other = score_shift(reference, evaluation(dataset, nothing), FEW)
    assert [entry.problem for entry in other.overall] == ["0 detections, under 20"] * 2
    late = score_shift(reference, evaluation(dataset, found, 0.3), FEW)
    assert [entry.problem for entry in late.overall] == ["the reference suppresses scores up to 0.3", ""]
    for shift in (blind, other, late):
        json.dumps(shift.as_dict(), allow_nan=False)
    annotated, _ = scene(True)
    below = np.array([0, 900, 0, 900])
    wrong = {image: (boxes + below, scores, classes) for image, (boxes, scores, classes) in found.items()}
    never = score_shift(evaluation(annotated, wrong), evaluation(annotated, found), FEW)
    assert [entry.problem for entry in never.overall] == ["at no threshold"] * 2
    useless = score_shift(evaluation(annotated, found), evaluation(annotated, wrong), FEW)
    assert [entry.problem[:7] for entry in useless.overall] == ["none of"] * 2


def test_blocks_of_resamples_change_nothing(monkeypatch):
    dataset, found = scene(True)
    pair = evaluation(dataset, scaled(found, 0.7, 1, 1)), evaluation(dataset, found)
    whole = score_shift(*pair, FEW)
    monkeypatch.setattr(shifted_scores, "_HELD", 1)
    assert score_shift(*pair, FEW) == whole


def test_the_table_and_the_json():
    dataset, found = scene(True)
    told: list[tuple[int, int]] = []
    pair = evaluation(dataset, scaled(found, 0.7, 1, 1)), evaluation(dataset, found)
    shift = score_shift(*pair, FEW, lambda done, total: told.append((done, total)))
    assert told == [(1, 3), (2, 3), (3, 3)]
    text = str(shift)
    assert text.startswith("thresholds with the reference's precision (against the annotations, IoU 0.50)")
    (cat,) = [line for line in text.splitlines() if line.startswith("cat")]
    entry = shift.per_class["cat"][0]
    assert f"{entry.threshold:.3f} ({entry.low:.3f} .. {entry.high:.3f})" in cat
    assert "bird" not in text
    assert "1 of 3 classes have too few detections" in text
    data: dict[str, Any] = json.loads(json.dumps(shift.as_dict(), allow_nan=False))
    assert data["basis"] == "precision"
    assert data["overall"][0]["threshold"] == shift.overall[0].threshold
    assert data["per_class"]["bird"][0]["threshold"] is None
    assert data["score_ratio"]["pairs"] == shift.ratio.pairs


def test_what_cannot_be_compared():
    dataset, found = scene(False)
    ours = evaluation(dataset, found)
    with pytest.raises(ConfigError, match="only detectors of the same classes"):
        score_shift(ours, evaluation(dataclasses.replace(dataset, classes=("cat", "dog", "fish")), found), FEW)
    part = {image: detections for image, detections in found.items() if image < 10}
    with pytest.raises(DataError, match="needs the same images for both"):
        score_shift(ours, evaluation(dataset, part), FEW)
