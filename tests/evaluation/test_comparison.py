import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scored import collected, evaluation, near_truth

from trtdet.config import NmsConfig
from trtdet.data import CocoDataset, CocoImage, GroundTruth
from trtdet.errors import ConfigError, DataError, TrtdetWarning
from trtdet.evaluation import resampling
from trtdet.evaluation.comparison import Comparison, compare
from trtdet.evaluation.metrics import CocoMetric
from trtdet.evaluation.resampling import Bootstrap, mean_average_precision
from trtdet.evaluation.scoring import Evaluation

ENGINES = ("faster-coco-eval", "pycocotools")
CLASSES = ("cat", "dog", "bird")
Found = dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]]


def make_dataset(seed: int, images: int = 6, boxes: int = 40, classes: tuple[str, ...] = CLASSES) -> CocoDataset:
    """Boxes at random, every seventh a crowd, none of the last class and none in the last image."""
    rng = np.random.default_rng(seed)
    corner, size = rng.uniform(0, 200, (boxes, 2)), rng.uniform(8, 140, (boxes, 2))
    truth = GroundTruth(
        image_ids=rng.integers(0, max(1, images - 1), boxes) * 3,
        classes=rng.integers(0, max(1, len(classes) - 1), boxes),
        boxes=np.concatenate([corner, size], axis=1),
        areas=size.prod(axis=1) * 0.7,
        crowd=np.arange(boxes) % 7 == 6,
    )
    listed = tuple(CocoImage(3 * i, Path(f"{i}.png"), 400, 300) for i in range(images))
    return CocoDataset(Path("a.json"), classes, tuple(9 - 2 * i for i in range(len(classes))), listed, truth)


def detect(dataset: CocoDataset, seed: int, noise: float = 4.0, stray: int = 20, digits: int = 2) -> Found:
    """Detections near the boxes and at random; few digits make many equal scores."""
    rng, truth = np.random.default_rng(seed), dataset.truth
    found = {}
    for image in dataset.images:
        boxes = near_truth(dataset, image.id, rng, noise, stray)
        annotated = truth.classes[truth.image_ids == image.id]
        classes = np.concatenate([annotated, rng.integers(0, len(dataset.classes), stray)])
        found[image.id] = boxes, rng.uniform(0, 1, len(boxes)).round(digits), classes
    return found


def repeated(dataset: CocoDataset, found: Found, weights: np.ndarray) -> CocoMetric:
    """The score of a data set that holds each image as often as its weight says, as images of their own."""
    truth, images, chosen, ids, copies = dataset.truth, [], [], [], {}
    for image, weight in zip(dataset.images, weights, strict=True):
        for _ in range(weight):
            copy = len(images)
            images.append(dataclasses.replace(image, id=copy))
            here = np.flatnonzero(truth.image_ids == image.id)
            chosen.append(here)
            ids.append(np.full(len(here), copy))
            copies[copy] = found[image.id]
    rows = np.concatenate(chosen)
    drawn = GroundTruth(
        np.concatenate(ids), truth.classes[rows], truth.boxes[rows], truth.areas[rows], truth.crowd[rows]
    )
    return collected(dataclasses.replace(dataset, images=tuple(images), truth=drawn), copies)


@pytest.mark.parametrize("engine", ENGINES)
@given(st.integers(0, 10_000), st.integers(1, 6), st.integers(1, 40), st.data())
@settings(max_examples=40, deadline=None)
def test_weights_of_one_give_what_the_evaluator_computes(engine, seed, images, boxes, data):
    dataset = make_dataset(seed, images, boxes)
    noise, stray = data.draw(st.sampled_from([0.0, 3.0, 20.0])), data.draw(st.integers(0, 40))
    metric = collected(dataset, detect(dataset, seed, noise, stray), engine)
    (got,) = mean_average_precision(metric.matches(), np.ones((1, images), np.int32))
    expected = metric.compute().map
    assert (np.isnan(got) and expected == -1) or got == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("engine", ENGINES)
def test_no_more_than_100_detections_of_a_class_and_image_count(engine):
    dataset = make_dataset(1, images=2, boxes=12, classes=("cat",))
    metric = collected(dataset, detect(dataset, 1, stray=250), engine)
    matches = metric.matches()
    assert matches[0].hits.shape == (10, 200)
    (got,) = mean_average_precision(matches, np.ones((1, 2), np.int32))
    assert got == pytest.approx(metric.compute().map, abs=1e-12)


@given(seed=st.integers(0, 10_000), images=st.integers(2, 6), data=st.data())
@settings(max_examples=40, deadline=None)
def test_an_image_that_is_drawn_twice_counts_as_two(seed, images, data):
    dataset = make_dataset(seed, images, 20)
    # Scores that differ: where an image's own are equal, its copies may be sorted otherwise than its weight is.
    found = detect(dataset, seed, digits=12)
    weights = np.array(data.draw(st.lists(st.integers(0, 3), min_size=images, max_size=images)), np.int32)
    (got,) = mean_average_precision(collected(dataset, found).matches(), weights[None])
    expected = repeated(dataset, found, weights).compute().map if weights.any() else -1
    assert (np.isnan(got) and expected == -1) or got == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("engine", ENGINES)
def test_images_without_detections_and_classes_without_boxes(engine):
    dataset = make_dataset(3)
    found = detect(dataset, 3)
    empty = np.zeros((0, 4)), np.zeros(0), np.zeros(0, np.int64)
    for image_id in (0, 3):
        found[image_id] = empty
    metric = collected(dataset, found, engine)
    assert len(metric.matches()) == 2, "nothing of the third class is there to find"
    ones = np.ones((1, 6), np.int32)
    assert mean_average_precision(metric.matches(), ones)[0] == pytest.approx(metric.compute().map, abs=1e-12)
    # The last image has no box at all, so a draw of it alone has no score.
    assert np.isnan(mean_average_precision(metric.matches(), np.eye(6, dtype=np.int32)[5:])).all()
    nothing = collected(dataset, dict.fromkeys(found, empty), engine)
    assert mean_average_precision(nothing.matches(), ones)[0] == nothing.compute().map == 0


def pair(noise: float = 12.0) -> tuple[Evaluation, Evaluation]:
    """A worse and a better detector."""
    dataset = make_dataset(5, images=30, boxes=200)
    worse, better = (collected(dataset, detect(dataset, 5, level)) for level in (noise, 2.0))
    return evaluation(worse, "int8.onnx"), evaluation(better, "fp32.onnx")


def test_a_loss_and_seen_from_the_other_side_a_gain():
    worse, better = pair()
    loss, gain = compare(worse, better), compare(better, worse)
    assert loss.verdict == "a loss"
    assert gain.verdict == "a gain"
    assert loss.low < loss.difference < loss.high < 0
    assert loss.difference == worse.result.map - better.result.map
    assert (gain.low, gain.high) == pytest.approx((-loss.high, -loss.low))


def test_only_an_interval_without_zero_shows_a_loss_or_a_gain():
    verdicts = {(-0.02, -0.01): "a loss", (0.01, 0.02): "a gain"}
    verdicts |= dict.fromkeys([(-0.0005, 0.0), (-0.0009, 0.01), (0.0, 0.02)], "no loss shown")
    verdicts[-0.02, 0.0] = "up to 2.00 points may be lost; about 31 images would tell"
    verdicts[-0.01, 0.01] = "up to 1.00 points may be lost; about 3000 images would tell"
    reference = pair()[0]
    for (low, high), verdict in verdicts.items():
        assert Comparison(reference, (low + high) / 2, low, high, 30, Bootstrap()).verdict == verdict


def test_a_loss_that_chance_may_have_made_is_told_with_the_images_that_would_tell():
    doubtful = Comparison(pair()[0], -0.0057, -0.0127, 2.4e-8, 188, Bootstrap())
    assert doubtful.verdict == "up to 1.27 points may be lost; about 190 images would tell"
    assert "no loss" not in str(doubtful)
    assert Comparison(pair()[0], -0.002, -0.01, 0.006, 188, Bootstrap()).images_to_tell == 3100


def test_a_detector_against_itself():
    same = compare(pair()[0], pair()[0])
    assert (same.difference, same.low, same.high, same.verdict) == (0, 0, 0, "no loss shown")


def test_the_interval_is_that_of_the_same_draws_for_both():
    """The percentiles of the differences of data sets that are drawn and scored one by one."""
    dataset = make_dataset(6, images=8)
    found = [detect(dataset, 6, noise, digits=12) for noise in (8.0, 3.0)]
    bootstrap = Bootstrap(resamples=100, confidence=0.8, seed=4)
    got = compare(*(evaluation(collected(dataset, detections)) for detections in found), bootstrap)
    draws = np.random.default_rng(4).multinomial(8, np.full(8, 1 / 8), size=100)
    differences = []
    for weights in draws:
        first, second = (repeated(dataset, detections, weights).compute().map for detections in found)
        differences.append(first - second)
    assert (got.low, got.high) == pytest.approx(tuple(np.percentile(differences, [10, 90])), abs=1e-12)


@pytest.mark.slow
def test_the_seed_decides_and_the_blocks_do_not(monkeypatch):
    worse, better = pair(4.0)
    told: list[tuple[int, int]] = []
    first = compare(worse, better, Bootstrap(250), lambda done, total: told.append((done, total)))
    assert told == [(100, 250), (200, 250), (250, 250)]
    monkeypatch.setattr(resampling, "_HELD", 1)
    monkeypatch.setattr(resampling, "_DRAWN", 7)
    again, other = compare(worse, better, Bootstrap(250)), compare(worse, better, Bootstrap(250, seed=1))
    assert (again.low, again.high) == (first.low, first.high) != (other.low, other.high)


def test_a_wider_confidence_is_a_wider_interval():
    worse, better = pair(4.0)
    narrow, wide = (compare(worse, better, Bootstrap(200, confidence)) for confidence in (0.5, 0.95))
    assert wide.low < narrow.low < narrow.high < wide.high
    assert "(95 % interval" in str(wide)


def test_the_sentence_and_the_json():
    done = compare(*pair(), Bootstrap(100))
    low, high = (f"{100 * bound:+.2f}" for bound in (done.low, done.high))
    assert str(done) == (
        f"against fp32.onnx (mAP {100 * done.reference.result.map:.2f}): mAP {100 * done.difference:+.2f} "
        f"(90 % interval {low} .. {high}, paired bootstrap over 30 images, 100 resamples): a loss"
    )
    data = json.loads(json.dumps(done.as_dict()))
    assert data["difference"] == done.difference < 0
    assert {"file", "map", "low", "high", "confidence", "resamples", "seed", "images", "verdict"} <= set(data)


def test_thresholds_that_differ_are_named():
    worse, better = pair()
    other = dataclasses.replace(better, thresholds=NmsConfig(iou_threshold=0.5, candidates="best-class"))
    with pytest.warns(TrtdetWarning) as warned:
        compare(worse, other, Bootstrap(100))
    (warning,) = warned
    assert "iou_threshold 0.65 against 0.5, candidates all-classes against best-class" in str(warning.message)


def test_what_cannot_be_compared():
    worse, better = pair()
    dataset = better.metric.dataset
    found = detect(dataset, 1)
    renamed = collected(dataclasses.replace(dataset, classes=("cat", "dog", "fish")), found)
    with pytest.raises(ConfigError, match="'int8.onnx' has 1 that the other lacks .bird.; 'm' has 1 .* .fish."):
        compare(worse, evaluation(renamed, "m"))
    part = collected(dataset, {key: value for key, value in found.items() if key < 30})
    with pytest.raises(DataError, match="ran on 30 images and 'm' on others .10.; a paired comparison needs the same"):
        compare(worse, evaluation(part, "m"))
    moved = collected(make_dataset(6, images=30, boxes=200), found)
    with pytest.raises(DataError, match="different boxes of the same images"):
        compare(worse, evaluation(moved, "m"))
    crowd = dataclasses.replace(dataset.truth, crowd=np.ones(len(dataset.truth), bool))
    lost = evaluation(collected(dataclasses.replace(dataset, truth=crowd), found))
    with pytest.raises(DataError, match="no box to find"):
        compare(lost, lost)


def test_classes_in_another_order_are_the_same_classes():
    worse, better = pair()
    dataset = better.metric.dataset
    turned = dataclasses.replace(
        dataset,
        classes=dataset.classes[::-1],
        category_ids=dataset.category_ids[::-1],
        truth=dataclasses.replace(dataset.truth, classes=2 - dataset.truth.classes),
    )
    found = {key: (boxes, scores, 2 - classes) for key, (boxes, scores, classes) in detect(dataset, 5, 2.0).items()}
    other = compare(worse, evaluation(collected(turned, found)))
    expected = compare(worse, better)
    assert (other.difference, other.low, other.high) == pytest.approx(
        (expected.difference, expected.low, expected.high), abs=1e-12
    )


def test_matches_that_do_not_give_the_score_are_refused():
    worse, better = pair()
    wrong = dataclasses.replace(better, result=dataclasses.replace(better.result, map=better.result.map + 0.01))
    with pytest.raises(DataError, match="of 'fp32.onnx' give mAP .* faster-coco-eval computes .* cannot be used"):
        compare(worse, wrong)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"resamples": 99}, "--resamples must be at least 100 .* got 99"),
        ({"confidence": 0.0}, "above 0 and below 1"),
        ({"confidence": 1.0}, "above 0 and below 1"),
    ],
)
def test_options_out_of_range(options, match):
    with pytest.raises(ConfigError, match=match):
        Bootstrap(**options)
