import dataclasses
import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from scored import evaluation, near_truth

from trtdet.data import CocoDataset
from trtdet.detection.masks import paste, run_lengths
from trtdet.errors import DataError
from trtdet.evaluation.comparison import compare, part_scores
from trtdet.evaluation.metrics import CocoMetric, CocoResult
from trtdet.evaluation.parts import FoundParts
from trtdet.evaluation.resampling import Bootstrap, mean_average_precision

ENGINES = ("faster-coco-eval", "pycocotools")
CLASSES = ("cat", "dog", "bird")


def make_dataset(folder: Path, annotations: list[dict[str, Any]], count: int = 6) -> CocoDataset:
    for i in range(count):
        Image.new("RGB", (8, 8)).save(folder / f"{i}.png")
    document = {
        "images": [{"id": i, "file_name": f"{i}.png", "width": 400, "height": 300} for i in range(count)],
        "annotations": annotations,
        "categories": [{"id": 5, "name": "dog"}, {"id": 3, "name": "cat"}, {"id": 8, "name": "bird"}],
    }
    (folder / "a.json").write_text(json.dumps(document))
    return CocoDataset.load(folder / "a.json", folder, CLASSES)


def box(image: int, category: int, x: float, y: float, w: float, h: float, **more: Any) -> dict[str, Any]:
    return {"image_id": image, "category_id": category, "bbox": [x, y, w, h], **more}


@pytest.fixture
def one_dog(tmp_path):
    return make_dataset(tmp_path, [box(0, 5, 10, 20, 100, 50, id=0)])


@pytest.fixture
def crowded(tmp_path):
    rng = np.random.default_rng(1)
    annotations = []
    for i in range(60):
        x, y, w, h = rng.uniform(0, 200), rng.uniform(0, 150), rng.uniform(8, 150), rng.uniform(8, 130)
        annotations.append(box(i % 5, [3, 5][i % 2], x, y, w, h, id=i, area=w * h * 0.7, iscrowd=int(i % 11 == 0)))
    return make_dataset(tmp_path, annotations)


def noisy(metric: CocoMetric) -> CocoMetric:
    """Detections near the truth and at random, of which some have equal scores."""
    rng, truth = np.random.default_rng(2), metric.dataset.truth
    for image in metric.dataset.images:
        boxes = near_truth(metric.dataset, image.id, rng, 3, 130)
        classes = np.concatenate([truth.classes[truth.image_ids == image.id], rng.integers(0, 3, 130)])
        metric.update(image.id, boxes, rng.uniform(0, 1, len(boxes)).round(2), classes)
    return metric


@pytest.mark.parametrize("engine", ENGINES)
def test_a_perfect_detection_scores_one(one_dog, engine, capfd):
    metric = CocoMetric(one_dog, engine)
    assert metric.update(0, np.array([[10, 20, 110, 70]], np.float32), [0.9], [1]) is metric
    result = metric.compute()
    # The annotation's id is 0, which the evaluators by themselves count as not found.
    assert [result.map, result.map50, result.map_medium, result.ar1] == pytest.approx([1.0] * 4)
    assert (result.images, result.detections) == (1, 1)
    assert result.map_small == result.map_large == -1
    assert result.per_class == {"cat": -1, "dog": pytest.approx(1.0), "bird": -1}
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("engine", ENGINES)
def test_no_detections_and_no_truth(one_dog, engine):
    result = CocoMetric(one_dog, engine).update(0, [], [], []).update(1, np.zeros((0, 4)), [], []).compute()
    assert (result.map, result.images, result.detections) == (0, 2, 0)
    assert CocoMetric(one_dog, engine).update(1, [[0, 0, 9, 9]], [1], [0]).compute().map == -1


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("area", "size"), [(31.0**2, "small"), (33.0**2, "medium"), (97.0**2, "large")])
def test_a_box_is_as_large_as_its_annotated_area(tmp_path, engine, area, size):
    """That of the object's mask, which a box of 100 x 50 does not tell; a box of each other size is not there."""
    dataset = make_dataset(tmp_path, [box(0, 5, 10, 20, 100, 50, area=area)])
    result = CocoMetric(dataset, engine).update(0, [[10, 20, 110, 70]], [0.9], [1]).compute()
    by_size = {"small": result.map_small, "medium": result.map_medium, "large": result.map_large}
    assert by_size == {name: pytest.approx(1.0) if name == size else -1 for name in by_size}
    recall = {"small": result.ar_small, "medium": result.ar_medium, "large": result.ar_large}
    assert recall == {name: pytest.approx(1.0) if name == size else -1 for name in recall}


@pytest.mark.parametrize("engine", ENGINES)
def test_a_detection_that_finds_nothing_is_as_large_as_its_box(tmp_path, engine):
    """It is wrong among boxes of its own size, and says nothing about the others."""
    dataset = make_dataset(tmp_path, [box(0, 5, 10, 20, 100, 50, area=100), box(1, 5, 0, 0, 200, 200)])
    stray, small, large = [200, 200, 300, 250], [10, 20, 110, 70], [0, 0, 200, 200]  # the stray one is medium
    metric = CocoMetric(dataset, engine).update(0, [stray, small], [0.95, 0.9], [1, 1]).update(1, [large], [0.9], [1])
    result = metric.compute()
    assert (result.map_small, result.map_large) == (pytest.approx(1.0), pytest.approx(1.0))
    assert result.map_medium == -1 and result.map < 0.99


def test_wrong_class_or_place_scores_zero(one_dog):
    assert CocoMetric(one_dog).update(0, [[10, 20, 110, 70]], [0.9], [0]).compute().map == 0
    assert CocoMetric(one_dog).update(0, [[200, 20, 300, 70]], [0.9], [1]).compute().map == 0


def test_only_the_images_given_are_scored(crowded):
    full, part = noisy(CocoMetric(crowded)), CocoMetric(crowded)
    boxes, scores, classes = full.detections[2]
    part.update(2, boxes, scores, classes)
    assert part.compute().images == 1
    assert part.compute() == part.compute() != full.compute()


def test_detections_are_kept(crowded, tmp_path):
    metric = noisy(CocoMetric(crowded))
    metric.save(tmp_path / "detections.npz")
    read = CocoMetric.load(tmp_path / "detections.npz", crowded)
    assert read.image_ids == metric.image_ids
    assert read.compute() == metric.compute()


def test_parts_are_kept_with_detections(masked, tmp_path):
    metric = masks_near(CocoMetric(masked, sigmas=(0.1, 0.2)))
    rng = np.random.default_rng(4)
    for image_id, parts in list(metric.parts.items()):
        count = len(metric.detections[image_id][1])
        points, rotated = (rng.random((count, *shape)).astype(np.float32) for shape in ((2, 3), (5,)))
        metric.parts[image_id] = dataclasses.replace(parts, keypoints=points, rotated_boxes=rotated)
    metric.save(tmp_path / "detections.npz")
    read = CocoMetric.load(tmp_path / "detections.npz", masked)
    assert read.compute_masks() == metric.compute_masks() and read.sigmas == metric.sigmas
    for image_id, parts in metric.parts.items():
        assert parts.masks == read.parts[image_id].masks
        assert parts.keypoints is not None and parts.rotated_boxes is not None
        np.testing.assert_array_equal(parts.keypoints, read.parts[image_id].keypoints)
        np.testing.assert_array_equal(parts.rotated_boxes, read.parts[image_id].rotated_boxes)


def test_the_same_detections_on_fewer_images(crowded):
    full = noisy(CocoMetric(crowded))
    part = full.of(crowded.of(crowded.images[1:3]))
    alone = CocoMetric(crowded)
    for image in crowded.images[1:3]:
        alone.update(image.id, *full.detections[image.id])
    assert part.image_ids == tuple(image.id for image in crowded.images[1:3])
    assert part.compute() == alone.compute()


def test_the_engines_agree(crowded):
    first, second = (noisy(CocoMetric(crowded, engine)).compute() for engine in ENGINES)
    assert 0.01 < first.map < 1 and first.detections > 700
    for name, value in first.as_dict().items():
        assert value == pytest.approx(second.as_dict()[name], abs=1e-9), name
    assert first.map == pytest.approx(np.mean([v for v in first.per_class.values() if v >= 0]), abs=1e-9)


@pytest.fixture
def masked(tmp_path):
    """Masks in each of COCO's three forms."""
    from pycocotools import mask as coco

    annotations = []
    for number, (x, y, w, h) in enumerate(np.random.default_rng(4).integers(8, 120, (30, 4)).tolist()):
        polygon = [[x, y, x + w, y, x + w / 2, y + h]]
        pixels = np.zeros((300, 400), np.uint8, "F")
        pixels[y : y + h, x : x + w] = 1
        packed = coco.encode(pixels)
        plain = {"size": [300, 400], "counts": [x * 300 + y, h, 400 * 300 - x * 300 - y - h]}
        forms = (polygon, {"size": [300, 400], "counts": packed["counts"].decode()}, plain)
        more = {"id": number + 1, "area": w * h / 2, "iscrowd": int(number % 7 == 0)}
        annotations.append(box(number % 5, [3, 5][number % 2], x, y, w, h, segmentation=forms[number % 3], **more))
    return make_dataset(tmp_path, annotations)


def masks_near(metric: CocoMetric, share: float = 0.5) -> CocoMetric:
    """Masks near the truth and at random, a share of them triangles and the others the whole box."""
    rng = np.random.default_rng(5)
    for image in metric.dataset.images:
        corners = near_truth(metric.dataset, image.id, rng, 2, 9)
        grids = np.where(rng.random((len(corners), 1, 1)) < share, np.tri(28)[::-1], np.ones((28, 28)))
        pasted = [run_lengths(paste(*pair, 300, 400)) for pair in zip(grids.astype(np.float32), corners, strict=True)]
        metric.update(image.id, corners, rng.random(len(corners)), rng.integers(0, 2, len(corners)), FoundParts(pasted))
    return metric


def test_masks_score_as_pycocotools_scores_them(masked):
    assert masked.has_masks and masked.first(3).has_masks
    results = []
    for engine in ENGINES:
        metric = masks_near(CocoMetric(masked, engine))
        results.append((metric.compute(), metric.compute_masks()))
        # What intervals are drawn from gives the evaluator's own score.
        (again,) = mean_average_precision(metric.matches("masks"), np.ones((1, len(metric.image_ids)), np.int32))
        assert results[-1][1] is not None and again == pytest.approx(results[-1][1].map, abs=1e-12)
    (boxes, masks), (_, second) = results
    assert masks is not None and second is not None
    assert 0.005 < masks.map < 1 and masks.map != boxes.map and masks.images == 6
    for name, value in masks.as_dict().items():
        assert value == pytest.approx(second.as_dict()[name], abs=1e-9), name


def test_detectors_are_compared_by_their_masks(masked):
    metrics = [masks_near(CocoMetric(masked), share) for share in (0.9, 0.1)]
    pair = [evaluation(metric, "m.onnx") for metric in metrics]
    boxes, masks = (compare(*pair, Bootstrap(100), of=kind) for kind in ("boxes", "masks"))
    assert (boxes.difference, boxes.low, boxes.high) == (0, 0, 0), "the boxes are the same"
    assert pair[0].masks is not None and pair[1].masks is not None
    assert masks.difference == pair[0].masks.map - pair[1].masks.map
    assert masks.low < masks.difference < masks.high
    assert f"(mask mAP {100 * pair[1].masks.map:.2f}): mask mAP" in str(masks)
    assert masks.as_dict()["map"] == pair[1].masks.map
    ends = {end: pytest.approx(getattr(masks, end), abs=0.03) for end in ("low", "high")}
    assert part_scores(*pair) == {"masks": {"map": pair[0].masks.map, "difference": masks.difference, **ends}}
    alone = {"map": pair[1].masks.map, "difference": 0, "low": None, "high": None}
    assert part_scores(pair[1], None) == {"masks": alone}
    assert part_scores(dataclasses.replace(pair[0], masks=None), pair[1]) == {}
    with pytest.raises(DataError, match=r"'m.onnx' .* without masks"):
        compare(pair[0], dataclasses.replace(pair[1], masks=None), of="masks")


def test_masks_are_scored_where_both_sides_have_them(masked, one_dog):
    whole = run_lengths(np.ones((300, 400), bool))
    assert not one_dog.has_masks
    assert CocoMetric(one_dog).update(0, [[0, 0, 9, 9]], [1], [1], FoundParts([whole])).compute_masks() is None
    assert CocoMetric(masked).update(0, [[0, 0, 9, 9]], [1], [1]).compute_masks() is None
    with pytest.raises(DataError, match=r"has no masks, so none can be matched"):
        CocoMetric(masked).update(0, [[0, 0, 9, 9]], [1], [1]).matches("masks")
    none = CocoMetric(masked).update(0, [], [], [], FoundParts([])).compute_masks()
    assert none is not None and none.map == 0


def test_a_segmentation_that_is_none_is_an_error(tmp_path):
    dataset = make_dataset(tmp_path, [box(0, 5, 10, 20, 100, 50, id=1, segmentation={"counts": 5})])
    whole = run_lengths(np.ones((300, 400), bool))
    with pytest.raises(DataError, match=r"a\.json': a segmentation of image 0 is .*, neither polygons nor run lengths"):
        CocoMetric(dataset, "pycocotools").update(0, [[0, 0, 9, 9]], [1], [1], FoundParts([whole])).compute_masks()


@pytest.mark.parametrize("engine", ENGINES)
def test_recall_is_that_of_boxes_of_any_class(crowded, one_dog, engine):
    perfect = CocoMetric(one_dog, engine).update(0, [[0, 0, 9, 9], [10, 20, 110, 70]], [0.9, 0.8], [0, 2])
    assert perfect.recall(1, 2) == (0, 1)
    few, many = noisy(CocoMetric(crowded, engine)).recall(1, 1000)
    # As pycocotools has it, with a limit on the way that its summary wants.
    other = noisy(CocoMetric(crowded, "pycocotools")).recall(1, 100, 1000)
    assert (few, many) == pytest.approx((other[0], other[2]), abs=1e-12)
    assert 0 < few < many < 1


def test_prints_as_pycocotools_does(crowded, capsys):
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    metric = noisy(CocoMetric(crowded))
    ids = [image.id for image in crowded.images]
    pair = []
    for data in (metric._truth(ids), metric._detections(ids)):
        coco = COCO()
        coco.dataset = data
        coco.createIndex()
        pair.append(coco)
    evaluation = COCOeval(*pair, iouType="bbox")
    evaluation.evaluate()
    evaluation.accumulate()
    capsys.readouterr()
    evaluation.summarize()
    assert str(metric.compute()) == capsys.readouterr().out.rstrip("\n")


def test_as_dict_is_json_and_absent_is_none(one_dog):
    result = CocoMetric(one_dog).update(0, [[10, 20, 110, 70]], [0.9], [1]).compute()
    data = json.loads(json.dumps(result.as_dict()))
    assert data["map_small"] is None and data["per_class"]["cat"] is None and data["images"] == 1
    assert {"map", "map50", "map75", "map_small", "map_medium", "map_large", "images", "detections"} <= set(data)
    assert isinstance(result, CocoResult)


@pytest.mark.parametrize(
    ("image", "boxes", "scores", "classes", "match"),
    [
        (77, [], [], [], "image id 77 is not in .* 6 ids run from 0 to 5"),
        (0, [[0, 0, 1, 1]], [0.5, 0.5], [0], r"shapes \(1, 4\), \(2,\) and \(1,\), expected boxes \(N, 4\)"),
        (0, [[0, 0, 1]], [0.5], [0], r"shapes \(1, 3\)"),
        (0, [[0, 0, 1, np.nan]], [0.5], [0], "hold NaN or infinity"),
        (0, [[0, 0, 1, 1]], [np.inf], [0], "hold NaN or infinity"),
        (0, [[0, 0, 1, 1]], [0.5], [3], "classes of image 0 run from 3 to 3, allowed are 0 to 2"),
        (0, [[0, 0, 1, 1]], [0.5], [-1], "run from -1"),
        (0, [[0, 0, 1, 1]], [0.5], [1.0], "are float64, expected integers"),
    ],
)
def test_update_refuses(one_dog, image, boxes, scores, classes, match):
    with pytest.raises(DataError, match=match):
        CocoMetric(one_dog).update(image, boxes, scores, classes)


def test_update_refuses_an_image_twice_and_compute_refuses_none(one_dog):
    with pytest.raises(DataError, match="image id 0 was given before"):
        CocoMetric(one_dog).update(0, [], [], []).update(0, [], [], [])
    with pytest.raises(DataError, match="no image was given"):
        CocoMetric(one_dog).compute()


def test_engine_choice(one_dog, monkeypatch):
    assert CocoMetric(one_dog).engine == "faster-coco-eval"
    with pytest.raises(DataError, match="unknown mAP engine 'torch'; allowed are auto, faster-coco-eval, pycocotools"):
        CocoMetric(one_dog, "torch")  # type: ignore[arg-type]
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: None if n == "faster_coco_eval" else find(n))
    assert CocoMetric(one_dog).engine == "pycocotools"
    with pytest.raises(DataError, match="not installed here; run: pip install faster-coco-eval"):
        CocoMetric(one_dog, "faster-coco-eval")
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: None)
    with pytest.raises(DataError, match="mAP needs faster-coco-eval or pycocotools"):
        CocoMetric(one_dog)
