"""Scores of keypoints and rotated boxes: against pycocotools, and against a plain form of DOTA's evaluation."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scored import evaluation
from trained_cards import HEADS, MODEL, configured

from benchmarks import cards
from trtdet.data import CocoDataset
from trtdet.detection.masks import run_lengths
from trtdet.detection.rotated import corners, polygon_iou
from trtdet.errors import DataError
from trtdet.evaluation.agreement import AgreementOptions, agree, agreeing_parts, part_agreements
from trtdet.evaluation.comparison import PartScore, compare
from trtdet.evaluation.metrics import CocoMetric
from trtdet.evaluation.parts import (
    FoundParts,
    ImageOverlaps,
    dota_average_precision,
    keypoint_similarity,
    probabilistic_overlaps,
    ultralytics_average_precision,
)
from trtdet.evaluation.resampling import Bootstrap, mean_average_precision
from trtdet.evaluation.scoring import evaluate
from trtdet.runtime.detector import Detector

ENGINES = ("faster-coco-eval", "pycocotools")
SIGMAS = (0.05, 0.1, 0.03, 0.08)
IMAGES = 6
RECORDED = Path(__file__).parents[1] / "fixtures" / "ultralytics_rotated_map.npz"


def dataset_of(folder, annotations):
    for i in range(IMAGES):
        Image.new("RGB", (8, 8)).save(folder / f"{i}.png")
    document = {
        "images": [{"id": i, "file_name": f"{i}.png", "width": 400, "height": 300} for i in range(IMAGES)],
        "annotations": annotations,
        "categories": [{"id": 5, "name": "dog"}, {"id": 3, "name": "cat"}],
    }
    (folder / "a.json").write_text(json.dumps(document))
    return CocoDataset.load(folder / "a.json", folder, ("cat", "dog"))


@pytest.fixture
def posed(tmp_path):
    """Objects with four keypoints: some not annotated, some objects with none, some crowds."""
    rng, annotations = np.random.default_rng(1), []
    for number in range(60):
        x, y, w, h = rng.uniform(0, 200), rng.uniform(0, 150), rng.uniform(20, 150), rng.uniform(20, 130)
        points = np.column_stack([rng.uniform(x, x + w, 4), rng.uniform(y, y + h, 4), rng.integers(0, 3, 4)])
        if number % 9 == 0:
            points[:, 2] = 0
        crowd = number % 13 == 0
        points = points * (0 if crowd else 1)
        annotations.append(
            {
                "id": number,
                "image_id": number % IMAGES,
                "category_id": [3, 5][number % 2],
                "bbox": [x, y, w, h],
                "area": w * h * 0.6,
                "iscrowd": int(crowd),
                "keypoints": points.reshape(-1).tolist(),
                "num_keypoints": int((points[:, 2] > 0).sum()),
            }
        )
    return dataset_of(tmp_path, annotations)


def poses_near(metric, noise=4.0):
    rng, truth = np.random.default_rng(2), metric.dataset.truth
    for image in metric.dataset.images:
        mine = truth.image_ids == image.id
        points = truth.keypoints[mine] + np.append(
            rng.normal(0, noise, (mine.sum(), 4, 2)), np.zeros((mine.sum(), 4, 1)), 2
        )
        points = np.concatenate([points, rng.uniform(0, 200, (30, 4, 3))]).astype(np.float32)
        points[..., 2] = rng.random(points.shape[:2])
        low, high = points[..., :2].min(axis=1), points[..., :2].max(axis=1)
        classes = np.concatenate([truth.classes[mine], rng.integers(0, 2, 30)])
        scores = np.round(rng.random(len(points)), 2)
        parts = FoundParts(keypoints=points)
        metric.update(image.id, np.concatenate([low, high], axis=1), scores, classes=classes, parts=parts)
    return metric


def test_keypoints_score_as_pycocotools_scores_them(posed):
    assert posed.has_keypoints and posed.first(3).has_keypoints
    results = []
    for engine in ENGINES:
        metric = poses_near(CocoMetric(posed, engine, SIGMAS))
        results.append(metric.compute_keypoints())
        (again,) = mean_average_precision(metric.matches("keypoints"), np.ones((1, IMAGES), np.int32))
        assert again == pytest.approx(results[-1].map, abs=1e-9)
    assert 0.05 < results[0].map < results[0].map50 < 1 and results[0].images == IMAGES
    for name, value in results[0].as_dict().items():
        assert value == pytest.approx(results[1].as_dict()[name], abs=1e-6), name
    assert "map_medium" in str(results[0])


def test_similarity_is_that_of_pycocotools(posed):
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    metric = poses_near(CocoMetric(posed, "pycocotools", SIGMAS))
    truth = posed.truth
    document = json.loads(posed.annotations.read_text())
    coco, found = COCO(), COCO()
    coco.dataset = document
    found.dataset = {**document, "annotations": []}
    mine = np.flatnonzero((truth.image_ids == 0) & (truth.classes == 0))
    part = np.flatnonzero(metric.detections[0][2] == 0)
    points = metric.parts[0].keypoints[part]
    for number, row in enumerate(points):
        found.dataset["annotations"].append(
            {"id": number + 1, "image_id": 0, "category_id": 3, "keypoints": row.reshape(-1).tolist(), "score": -number}
            | {"area": 1.0, "bbox": [0, 0, 1, 1]}
        )
    for one in (coco, found):
        one.createIndex()
    reference = COCOeval(coco, found, "keypoints")
    reference.params.kpt_oks_sigmas, reference.params.maxDets = np.array(SIGMAS), [100]
    reference._prepare()
    expected = reference.computeOks(0, 3)
    similarity = keypoint_similarity(
        points, truth.keypoints[mine], boxes=truth.boxes[mine], areas=truth.areas[mine], sigmas=SIGMAS
    )
    np.testing.assert_allclose(similarity, expected, atol=1e-9)


def test_detectors_are_compared_by_their_keypoints(posed):
    near, far = (evaluation(poses_near(CocoMetric(posed, sigmas=SIGMAS), noise)) for noise in (2.0, 12.0))
    result = compare(near, far, Bootstrap(100), of="keypoints")
    assert result.difference == near.keypoints.map - far.keypoints.map > 0.05
    assert result.low < result.difference < result.high
    assert "keypoint mAP" in str(result) and result.as_dict()["map"] == far.keypoints.map
    assert near.as_dict()["keypoints"]["map"] == near.keypoints.map and near.scored_parts == ("keypoints",)


def test_detectors_agree_by_their_keypoints(posed):
    same, near, far = (evaluation(poses_near(CocoMetric(posed, sigmas=SIGMAS), noise)) for noise in (2.0, 3.0, 12.0))
    assert agreeing_parts(near, same) == ("keypoints",)
    options = AgreementOptions(bootstrap=Bootstrap(100))
    exact, high, low = (agree(one, same, options, of="keypoints") for one in (same, near, far))
    assert exact.ap == pytest.approx(1) and exact.of == "keypoints" and set(exact.per_class) == {"cat", "dog"}
    assert 1 > high.ap > low.ap and "agreement of keypoints: AP" in str(high)


def test_the_agreement_of_parts_is_a_difference_to_a_whole(posed):
    near, same = (evaluation(poses_near(CocoMetric(posed, sigmas=SIGMAS), noise)) for noise in (3.0, 2.0))
    agreed = agree(near, same, of="keypoints")
    expected = PartScore(map=None, difference=agreed.ap - 1, low=agreed.low - 1, high=agreed.high - 1)
    assert part_agreements(near, same) == {"keypoints": expected}
    unsure = CocoMetric(posed, sigmas=SIGMAS)
    for image in posed.images:
        unsure.update(image.id, [[0, 0, 9, 9]], [0.1], [1], FoundParts(keypoints=np.ones((1, 4, 3), np.float32)))
    with pytest.raises(DataError, match="the agreement of keypoints cannot be measured: the reference finds nothing"):
        part_agreements(near, evaluation(unsure))


def test_another_number_of_keypoints_is_an_error(posed):
    metric = CocoMetric(posed, sigmas=(0.1, 0.1))
    metric.update(0, [[0, 0, 9, 9]], [1], [1], FoundParts(keypoints=np.zeros((1, 2, 3), np.float32)))
    with pytest.raises(DataError, match="have 4 keypoints of each object, the detector has 2"):
        metric.compute_keypoints()


def test_parts_are_scored_where_both_sides_have_them(posed):
    metric = CocoMetric(posed, sigmas=SIGMAS).update(0, [[0, 0, 9, 9]], [1], [1])
    assert metric.compute_keypoints() is None and metric.compute_rotated_boxes() is None
    with pytest.raises(DataError, match="has no keypoints, so none can be matched"):
        metric.matches("keypoints")
    nothing = FoundParts(keypoints=np.zeros((0, 4, 3), np.float32))
    assert CocoMetric(posed, sigmas=SIGMAS).update(0, [], [], [], nothing).compute_keypoints().map == 0


# Rotated boxes


def rotated_boxes(rng, count):
    return np.column_stack(
        [rng.uniform(20, 250, (count, 2)), rng.uniform(8, 80, (count, 2)), rng.uniform(-0.78, 2.35, count)]
    )


@pytest.fixture
def turned(tmp_path):
    rng, annotations = np.random.default_rng(3), []
    for number, points in enumerate(corners(rotated_boxes(rng, 70))):
        low, size = points.min(axis=0), np.ptp(points, axis=0)
        annotations.append(
            {
                "id": number,
                "image_id": number % IMAGES,
                "category_id": [3, 5][number % 2],
                "bbox": [*low.tolist(), *size.tolist()],
                "segmentation": [points.reshape(-1).tolist()],
                "iscrowd": int(number % 11 == 0),
            }
        )
    return dataset_of(tmp_path, annotations)


def boxes_near(metric, noise=2.0):
    truth = metric.dataset.truth
    boxes, rng = rotated_boxes(np.random.default_rng(3), 70), np.random.default_rng(6)
    for image in metric.dataset.images:
        mine = np.flatnonzero(truth.image_ids == image.id)
        near = boxes[mine] + rng.normal(0, noise, (len(mine), 5)) * [1, 1, 1, 1, 0.03]
        found = np.concatenate([near, rotated_boxes(rng, 30)])
        found[:, 2:4] = np.maximum(found[:, 2:4], 1)
        hull = corners(found)
        upright = np.concatenate([hull.min(axis=1), hull.max(axis=1)], axis=1)
        classes = np.concatenate([truth.classes[mine], rng.integers(0, 2, 30)])
        parts = FoundParts(rotated_boxes=found.astype(np.float32))
        metric.update(image.id, upright, np.round(rng.random(len(found)), 3), classes=classes, parts=parts)
    return metric


def dota_by_hand(metric, name):
    """DOTA_devkit's dota_evaluation_task1 with its 2007 metric, written plainly."""
    index, truth = metric.dataset.classes.index(name), metric.dataset.truth
    rows, objects = [], {}
    for image in metric.dataset.images:
        here = (truth.image_ids == image.id) & (truth.classes == index)
        objects[image.id] = [list(truth.corners[here]), list(truth.crowd[here]), [False] * int(here.sum())]
        _, scores, classes = metric.detections[image.id]
        for row in np.flatnonzero(classes == index):
            rows.append((scores[row], image.id, metric.parts[image.id].rotated_boxes[row]))
    rows.sort(key=lambda row: -row[0])
    total = sum(not hard for _, crowd, _ in objects.values() for hard in crowd)
    right, wrong = [], []
    for _, image, found in rows:
        quads, hard, used = objects[image]
        overlaps = polygon_iou(corners(np.float64(found)), np.array(quads).reshape(-1, 4, 2))[0]
        best = max(range(len(quads)), key=lambda i: overlaps[i], default=-1)
        right.append(0)
        wrong.append(0)
        if best >= 0 and overlaps[best] > 0.5:
            if not hard[best]:
                (wrong if used[best] else right)[-1] = 1
                used[best] = True
        else:
            wrong[-1] = 1
    hits, misses = np.cumsum(right), np.cumsum(wrong)
    recall, precision = hits / total, hits / np.maximum(hits + misses, np.finfo(float).eps)
    result = 0.0
    for point in np.arange(0.0, 1.1, 0.1):
        result += (precision[recall >= point].max() if (recall >= point).any() else 0.0) / 11
    return result


def test_rotated_boxes_score_as_dota_defines_it(turned):
    assert turned.has_rotated_boxes and turned.truth.corners.shape == (70, 4, 2)
    metric = boxes_near(CocoMetric(turned))
    result = metric.compute_rotated_boxes()
    assert 0.1 < result.map < result.map50 and result.detections == 70 + 30 * IMAGES
    assert result.dota50 == pytest.approx(np.mean([dota_by_hand(metric, name) for name in turned.classes]), abs=1e-9)
    assert result.map == pytest.approx(np.mean(list(result.per_class.values())))
    assert result.as_dict()["dota50"] == result.dota50 and "dota50" in str(result)


def test_rotated_boxes_score_as_ultralytics_defines_it():
    """Recorded by benchmarks/fixtures/ultralytics_rotated_map.py."""
    with np.load(RECORDED) as file:
        data = dict(file)
    aps = []
    for label in range(3):
        images = []
        for image in range(int(data["at"].max()) + 1):
            part = (data["of"] == image) & (data["classes"] == label)
            here = (data["at"] == image) & (data["labels"] == label)
            alike = probabilistic_overlaps(data["found"][part], data["corners"][here])
            images.append(ImageOverlaps(data["scores"][part], alike, np.zeros(int(here.sum()), bool)))
        aps.append(ultralytics_average_precision(images))
    assert aps == pytest.approx(data["per_class"].tolist(), abs=1e-6)
    assert np.mean(aps) == pytest.approx(float(data["expected"]), abs=1e-6)


def test_the_score_of_ultralytics_leaves_crowds_out_and_needs_objects(turned):
    result = boxes_near(CocoMetric(turned), noise=0.0).compute_rotated_boxes()
    # One draws straight lines between the points of a curve, the other looks up 101 of them.
    assert (result.map, result.ultralytics) == pytest.approx((0.3690252845, 0.3543108377))
    assert result.as_dict()["ultralytics"] == result.ultralytics
    crowd = ImageOverlaps(np.ones(1), np.ones((1, 1)), np.array([True]))
    assert ultralytics_average_precision([crowd]) == -1
    assert ultralytics_average_precision([ImageOverlaps(np.zeros(0), np.zeros((0, 1)), np.array([False]))]) == 0


def test_turned_by_a_right_angle_with_swapped_sides_is_the_same_box(turned):
    first, second = boxes_near(CocoMetric(turned)), CocoMetric(turned)
    for image, found in first.detections.items():
        boxes = first.parts[image].rotated_boxes[:, [0, 1, 3, 2, 4]] + np.float32([0, 0, 0, 0, math.pi / 2])
        second.update(image, *found, parts=FoundParts(rotated_boxes=boxes))
    assert first.compute_rotated_boxes().map == pytest.approx(second.compute_rotated_boxes().map, abs=1e-3)


def test_exact_rotated_boxes_score_one_and_compare(turned):
    exact, rough = (evaluation(boxes_near(CocoMetric(turned), noise)) for noise in (0.0, 6.0))
    result = compare(exact, rough, Bootstrap(100), of="rotated_boxes")
    assert result.low > 0 and "rotated mAP" in str(result)
    assert result.difference == exact.rotated_boxes.map - rough.rotated_boxes.map


@pytest.mark.parametrize("part", HEADS)
def test_an_evaluation_has_the_scores_of_what_the_detector_gives_beside_boxes(part, tmp_path):
    cards.generate(tmp_path / "cards", first=20_000, count=3)
    dataset = CocoDataset.load(tmp_path / "cards" / "annotations.json", tmp_path / "cards" / "images", cards.CLASSES)
    found = evaluate(Detector.open(MODEL, configured(part), "host"), dataset)
    assert found.result.map > 0.5 and found.scored_parts == (part,)
    assert 0.4 < found.score_of(part).map < 1


@pytest.mark.parametrize(("share", "scores"), [(0.52, (0.1, 1, 0)), (0.73, (0.5, 1, 0)), (0.77, (0.6, 1, 1))])
def test_scores_at_an_overlap_are_those_of_rotated_boxes_that_overlap_so_far(tmp_path, share, scores):
    """Of one box, and a share of its width found."""
    truth = np.array([[100.0, 100, 60, 30, 0.5]])
    (points,) = corners(truth)
    box = [*points.min(axis=0).tolist(), *np.ptp(points, axis=0).tolist()]
    annotation = {"id": 1, "image_id": 0, "category_id": 5, "bbox": box, "segmentation": [points.reshape(-1).tolist()]}
    metric = CocoMetric(dataset_of(tmp_path, [annotation]))
    found = FoundParts(rotated_boxes=(truth * [1, 1, share, 1, 1]).astype(np.float32))
    metric.update(0, [[70, 70, 130, 130]], [0.9], [1], found)
    result = metric.compute_rotated_boxes()
    assert (result.map, result.map50, result.map75) == pytest.approx(scores)


def test_detectors_agree_by_their_rotated_boxes(turned):
    exact, rough = (evaluation(boxes_near(CocoMetric(turned), noise)) for noise in (0.0, 6.0))
    options = AgreementOptions(bootstrap=Bootstrap(100))
    assert agree(exact, exact, options, of="rotated_boxes").ap == pytest.approx(1)
    assert 0 < agree(rough, exact, options, of="rotated_boxes").ap < 0.9
    assert agree(rough, exact, options).as_dict()["of"] == "boxes"


def test_detectors_agree_by_their_masks(posed):
    grids = np.zeros((2, 300, 400), bool)
    grids[0, 10:60, 10:60], grids[1, 10:60, 10:50] = True, True
    metrics = []
    for mask in grids:
        metric = CocoMetric(posed)
        for image in posed.images:
            metric.update(image.id, [[10, 10, 60, 60]], [0.9], [0], FoundParts(masks=[run_lengths(mask)]))
        metrics.append(evaluation(metric))
    options = AgreementOptions(bootstrap=Bootstrap(100))
    assert agreeing_parts(*metrics) == ("masks",)
    assert agree(metrics[0], metrics[0], options, of="masks").ap == pytest.approx(1)
    assert agree(metrics[1], metrics[0], options, of="masks").ap == pytest.approx(0.7)


def test_other_masks_are_no_corners(posed, tmp_path):
    annotation = {"id": 1, "image_id": 0, "category_id": 3, "bbox": [0, 0, 9, 9], "segmentation": [[0, 0, 9, 0, 9, 9]]}
    assert not dataset_of(tmp_path, [annotation]).has_rotated_boxes and not posed.has_rotated_boxes


def test_a_detection_of_an_object_that_was_found_is_wrong():
    # Both overlap the first object most: COCO's matching would give the second detection the other object.
    overlaps = np.array([[0.9, 0.0], [0.8, 0.7]])
    image = ImageOverlaps(np.array([0.9, 0.8]), overlaps, np.zeros(2, bool))
    assert dota_average_precision([image]) == pytest.approx(6 / 11)
    hard = ImageOverlaps(np.array([0.9, 0.8]), overlaps, np.array([True, False]))
    assert dota_average_precision([hard]) == 0
    assert dota_average_precision([ImageOverlaps(np.zeros(0), np.zeros((0, 1)), np.array([True]))]) == -1
