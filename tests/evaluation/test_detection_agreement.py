import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from scored import collected, evaluation

from trtdet.backends import OnnxRunner
from trtdet.config import NmsConfig, load_config
from trtdet.data import CocoDataset, CocoImage, GroundTruth
from trtdet.errors import ConfigError, DataError, TrtdetWarning
from trtdet.evaluation.agreement import AgreementOptions, agree, agreement_of
from trtdet.evaluation.metrics import CocoMetric, Found
from trtdet.evaluation.resampling import Bootstrap
from trtdet.evaluation.scoring import evaluate
from trtdet.runtime.detector import Detector

CLASSES = ("cat", "dog", "bird")
FEW = AgreementOptions(bootstrap=Bootstrap(100))


def plain(images: int = 20, classes: tuple[str, ...] = CLASSES) -> CocoDataset:
    """Images alone, as of a folder without annotations."""
    listed = tuple(CocoImage(3 * i + 1, Path(f"{i}.png"), 0, 0) for i in range(images))
    empty = np.zeros(0, np.int64)
    truth = GroundTruth(empty, empty, np.zeros((0, 4)), np.zeros(0), np.zeros(0, bool))
    return CocoDataset(Path("images"), classes, tuple(range(1, 1 + len(classes))), listed, truth)


def drawn(dataset: CocoDataset, seed: int = 0, count: int = 12) -> dict[int, Found]:
    """Detections at random, far enough apart that none is a duplicate, of all scores."""
    rng = np.random.default_rng(seed)
    found: dict[int, Found] = {}
    for image in dataset.images:
        corner = np.stack([100.0 * np.arange(count), rng.uniform(0, 50, count)], axis=1)
        boxes = np.concatenate([corner, corner + rng.uniform(30, 80, (count, 2))], axis=1)
        found[image.id] = boxes, rng.uniform(0, 1, count), rng.integers(0, len(dataset.classes), count)
    return found


def moved(found: dict[int, Found], noise: float, seed: int = 1) -> dict[int, Found]:
    """The same objects with other boxes and scores."""
    rng = np.random.default_rng(seed)
    changed: dict[int, Found] = {}
    for image, (boxes, scores, classes) in found.items():
        others = np.clip(scores + rng.normal(0, noise / 100, len(scores)), 0, 1)
        changed[image] = boxes + rng.normal(0, noise, boxes.shape), others, classes
    return changed


def test_a_detector_agrees_with_itself_whatever_its_scores():
    dataset = plain()
    found = drawn(dataset)
    same = agreement_of(collected(dataset, found), collected(dataset, found), FEW)
    assert (same.ap, same.ap50, same.map) == pytest.approx((1, 1, 1))
    assert (same.low, same.high, same.problem) == (pytest.approx(1), pytest.approx(1), "")
    assert same.boxes == sum((scores >= 0.25).sum() for _, scores, _ in found.values())
    assert same.images == 20
    compressed = {image: (boxes, scores**2 / 2, classes) for image, (boxes, scores, classes) in found.items()}
    assert agreement_of(collected(dataset, compressed), collected(dataset, found), FEW).ap == pytest.approx(1)


def test_boxes_that_move_and_boxes_that_are_missing_cost_agreement():
    dataset = plain()
    found = drawn(dataset)
    reference = collected(dataset, found)
    near, far = (agreement_of(collected(dataset, moved(found, noise)), reference, FEW) for noise in (1.0, 4.0))
    assert near.ap is not None and far.ap is not None
    assert near.low is not None and near.high is not None
    assert far.ap < near.ap < 1
    assert near.low < near.ap < near.high
    assert near.ap50 is not None and near.ap50 > near.ap
    missing = {image: tuple(part[: len(part) // 2] for part in parts) for image, parts in found.items()}
    half = agreement_of(collected(dataset, missing), reference, FEW)  # type: ignore[arg-type]
    assert half.ap == pytest.approx(0.5, abs=0.1)
    nothing = {image: (boxes[:0], scores[:0], classes[:0]) for image, (boxes, scores, classes) in found.items()}
    assert agreement_of(collected(dataset, nothing), reference, FEW).ap == 0


def test_it_is_the_score_with_the_references_detections_as_annotations(tmp_path):
    """By way of an instances file, as any evaluator would be given it."""
    dataset = plain()
    theirs = drawn(dataset)
    ours = moved(theirs, 3.0)
    got = agreement_of(collected(dataset, ours), collected(dataset, theirs), AgreementOptions(0.4, Bootstrap(100)))
    boxes = [
        {"image_id": image, "category_id": int(label) + 1, "bbox": [*box[:2], *(box[2:] - box[:2])], "id": 0}
        for image, (found, scores, classes) in theirs.items()
        for box, score, label in zip(found, scores, classes, strict=True)
        if score >= 0.4
    ]
    for image in dataset.images:
        Image.new("RGB", (8, 8)).save(tmp_path / image.path.name)
    document = {
        "images": [{"id": i.id, "file_name": i.path.name, "width": 8, "height": 8} for i in dataset.images],
        "annotations": boxes,
        "categories": [{"id": number, "name": name} for number, name in enumerate(CLASSES, 1)],
    }
    (tmp_path / "a.json").write_text(json.dumps(document))
    annotated = CocoDataset.load(tmp_path / "a.json", tmp_path, CLASSES)
    expected = collected(annotated, ours).compute()
    assert got.boxes == len(boxes)
    assert got.map == pytest.approx(expected.map, abs=1e-12)
    assert got.per_class == pytest.approx(expected.per_class, abs=1e-12)


def test_the_classes_are_taken_together():
    """As with one class and an image for each class of an image: what an evaluator gives then."""
    dataset = plain()
    theirs = drawn(dataset)
    ours = moved(theirs, 3.0)
    got = agreement_of(collected(dataset, ours), collected(dataset, theirs), FEW)

    def split(found: dict[int, Found]) -> dict[int, Found]:
        parts: dict[int, Found] = {}
        for image, (boxes, scores, classes) in found.items():
            for label in range(len(CLASSES)):
                here = classes == label
                parts[10 * image + label] = boxes[here], scores[here], np.zeros(here.sum(), np.int64)
        return parts

    apart = tuple(CocoImage(image, Path("x.png"), 0, 0) for image in split(ours))
    single = dataclasses.replace(plain(classes=("any",)), images=apart)
    rows = [(image, *part) for image, found in split(theirs).items() for part in zip(*found[:2], strict=True)]
    kept = [(image, box) for image, box, score in rows if score >= 0.25]
    boxes = np.array([[*box[:2], *(box[2:] - box[:2])] for _, box in kept])
    none = np.zeros(len(kept), np.int64)
    ids = np.array([image for image, _ in kept])
    truth = GroundTruth(ids, none, boxes, boxes[:, 2] * boxes[:, 3], none.astype(bool))
    expected = collected(dataclasses.replace(single, truth=truth), split(ours)).compute()
    assert (got.ap, got.ap50, got.ap75) == pytest.approx((expected.map, expected.map50, expected.map75), abs=1e-12)
    assert got.map != pytest.approx(got.ap, abs=1e-6)


def test_classes_in_another_order_are_the_same_classes():
    dataset, turned = plain(), plain(classes=CLASSES[::-1])
    found = drawn(dataset)
    other = {image: (boxes, scores, 2 - classes) for image, (boxes, scores, classes) in found.items()}
    assert agreement_of(collected(dataset, found), collected(turned, other), FEW).ap == pytest.approx(1)


def test_boxes_without_an_area_find_nothing_and_are_not_to_be_found():
    dataset = plain()
    found = drawn(dataset)
    for boxes, scores, _ in found.values():
        boxes[0, 2], scores[0] = boxes[0, 0], 0.9
    same = agreement_of(collected(dataset, found), collected(dataset, found), FEW)
    assert same.ap == pytest.approx(1)


def test_a_reference_that_finds_nothing_is_told_and_not_a_number():
    dataset = plain()
    found = drawn(dataset)
    low = {image: (boxes, scores / 10, classes) for image, (boxes, scores, classes) in found.items()}
    done = agreement_of(collected(dataset, found), collected(dataset, low), FEW)
    assert (done.ap, done.low, done.boxes) == (None, None, 0)
    assert "finds nothing with a score of at least 0.25 in 20 images" in str(done)
    assert json.loads(json.dumps(done.as_dict(), allow_nan=False))["problem"] == done.problem
    late = evaluation(collected(dataset, found), thresholds=NmsConfig(score_threshold=0.3))
    censored = agree(late, late, FEW)
    assert censored.ap is None
    assert "suppresses scores up to 0.3" in censored.problem
    assert agree(late, late, AgreementOptions(0.3, Bootstrap(100))).ap == pytest.approx(1)


def test_what_cannot_be_compared():
    dataset = plain()
    found = drawn(dataset)
    ours = evaluation(collected(dataset, found))
    renamed = plain(classes=("cat", "dog", "fish"))
    with pytest.raises(ConfigError, match="'model.onnx' has 1 that the other lacks .bird.; 'm' has 1 .* .fish."):
        agree(ours, evaluation(collected(renamed, found), "m"), FEW)
    part = {image: detections for image, detections in found.items() if image < 10}
    with pytest.raises(DataError, match="ran on 20 images and 'the reference' on others .3."):
        agree(ours, evaluation(collected(dataset, part)), FEW)
    with pytest.raises(DataError, match="no image was given"):
        agreement_of(CocoMetric(dataset), CocoMetric(dataset), FEW)
    with pytest.raises(ConfigError, match="--agreement-threshold must be above 0 and below 1, got 25"):
        AgreementOptions(25)


def test_thresholds_that_differ_are_named():
    dataset = plain()
    ours = evaluation(collected(dataset, drawn(dataset)))
    other = dataclasses.replace(ours, thresholds=NmsConfig(iou_threshold=0.5))
    with pytest.warns(TrtdetWarning, match="iou_threshold 0.65 against 0.5"):
        agree(ours, other, FEW)


def test_the_sentence_and_the_json():
    dataset = plain()
    found = drawn(dataset)
    done = agreement_of(collected(dataset, moved(found, 2.0)), collected(dataset, found), FEW)
    assert done.ap is not None and done.low is not None and done.high is not None
    assert str(done) == (
        f"agreement: AP {100 * done.ap:.2f} (90 % interval {100 * done.low:.2f} .. {100 * done.high:.2f}, "
        f"bootstrap over 20 images) of the reference's {done.boxes} detections with a score of at least 0.25"
    )
    data = json.loads(json.dumps(done.as_dict(), allow_nan=False))
    assert (data["ap"], data["map"]) == (done.ap, done.map)
    assert set(data["per_class"]) == set(CLASSES)
    assert {"ap50", "ap75", "low", "high", "confidence", "resamples", "seed", "threshold", "boxes"} <= set(data)


def test_images_without_annotations(tmp_path):
    for name in ("b.png", "a.png"):
        Image.new("RGB", (8, 8)).save(tmp_path / name)
    dataset = CocoDataset.unannotated(tmp_path, CLASSES)
    assert [(image.id, image.path.name) for image in dataset.images] == [(1, "a.png"), (2, "b.png")]
    assert not dataset.annotated
    metric: Any = CocoMetric(dataset).update(1, [[0, 0, 4, 4]], [0.5], [0])
    assert metric.compute().map == -1
    assert metric.compute().as_dict()["map"] is None
    with pytest.raises(DataError, match="has no images"):
        CocoDataset.unannotated(Path(__file__).parent, CLASSES)


def test_scores_are_those_of_the_model_as_it_is_written(small_model, tmp_path, monkeypatch):
    Image.new("RGB", (64, 64), (10, 200, 90)).save(tmp_path / "a.png")
    detector = Detector.open(small_model, load_config("shapes"))
    written: list[OnnxRunner] = []
    original = OnnxRunner.as_written

    def noted(runner: OnnxRunner) -> OnnxRunner:
        written.append(original(runner))
        return written[-1]

    monkeypatch.setattr(OnnxRunner, "as_written", noted)
    dataset = CocoDataset.unannotated(tmp_path, detector.classes)
    evaluate(detector, dataset)
    assert len(written) == 1
    engine = dataclasses.replace(detector, runner=type("Engine", (), {"model": None})())
    assert engine.as_written().runner is engine.runner
