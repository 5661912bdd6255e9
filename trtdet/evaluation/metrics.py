"""COCO's mean average precision from arrays.

The arithmetic is that of the official evaluators, faster-coco-eval (C++) or pycocotools; here is only what
goes in and what comes out.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trtdet.data import CocoDataset
from trtdet.errors import DataError

Engine = Literal["faster-coco-eval", "pycocotools"]

_STATS = (
    "map", "map50", "map75", "map_small", "map_medium", "map_large",
    "ar1", "ar10", "ar100", "ar_small", "ar_medium", "ar_large",
)  # fmt: skip
"""The evaluators' ``stats`` in their order, as fields of CocoResult."""

_MODULES: dict[Engine, str] = {"faster-coco-eval": "faster_coco_eval", "pycocotools": "pycocotools"}


@dataclass(frozen=True, eq=False)
class ClassMatches:
    """What the evaluator made of one class's detections over N detections and I images, at T IoU thresholds.

    The thresholds are COCO's, 0.50:0.05:0.95; boxes of every area count, and of each image the 100 best detections.
    """

    images: NDArray[np.int64]
    """(N,), the position of each detection's image among the I images in order of id. The detections are in falling
    order of score, equal ones in the order of the images."""
    hits: NDArray[np.bool_]
    """(T, N), matched to a box."""
    ignored: NDArray[np.bool_]
    """(T, N), neither right nor wrong, such as what lies on a crowd."""
    truths: NDArray[np.int64]
    """(I,), how many boxes each image has to find."""


@dataclass(frozen=True)
class CocoResult:
    """COCO's box scores, 0..1; -1, as in pycocotools, where no box of that size or class is there to find."""

    map: float
    """Mean AP over IoU 0.50:0.05:0.95 and the classes."""
    map50: float
    map75: float
    map_small: float
    """Of boxes whose area is below 32 * 32 pixels."""
    map_medium: float
    map_large: float
    """Of boxes whose area is above 96 * 96 pixels."""
    ar1: float
    """Mean recall with the one best detection of each class in an image."""
    ar10: float
    ar100: float
    ar_small: float
    ar_medium: float
    ar_large: float
    images: int
    """How many images were scored."""
    detections: int
    """How many detections went in, before the limit of 100 a class and image."""
    per_class: Mapping[str, float]
    """AP over IoU 0.50:0.95 of each class, in the order of the classes."""

    def __str__(self) -> str:
        """The twelve lines of pycocotools' ``summarize``."""
        lines = (
            ("Precision", "AP", "0.50:0.95", "all", 100, self.map),
            ("Precision", "AP", "0.50", "all", 100, self.map50),
            ("Precision", "AP", "0.75", "all", 100, self.map75),
            ("Precision", "AP", "0.50:0.95", "small", 100, self.map_small),
            ("Precision", "AP", "0.50:0.95", "medium", 100, self.map_medium),
            ("Precision", "AP", "0.50:0.95", "large", 100, self.map_large),
            ("Recall", "AR", "0.50:0.95", "all", 1, self.ar1),
            ("Recall", "AR", "0.50:0.95", "all", 10, self.ar10),
            ("Recall", "AR", "0.50:0.95", "all", 100, self.ar100),
            ("Recall", "AR", "0.50:0.95", "small", 100, self.ar_small),
            ("Recall", "AR", "0.50:0.95", "medium", 100, self.ar_medium),
            ("Recall", "AR", "0.50:0.95", "large", 100, self.ar_large),
        )
        return "\n".join(
            f" Average {title:<9}  ({kind}) @[ IoU={iou:<9} | area={area:>6s} | maxDets={limit:>3d} ] = {value:0.3f}"
            for title, kind, iou, area, limit, value in lines
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON; what is -1 here, because there is nothing to find, is None there."""
        names = [field.name for field in dataclasses.fields(self) if field.name != "per_class"]
        data: dict[str, Any] = {name: _none_if_absent(getattr(self, name)) for name in names}
        data["per_class"] = {name: _none_if_absent(value) for name, value in self.per_class.items()}
        return data


def _none_if_absent(value: float) -> float | None:
    return None if value < 0 else value


class CocoMetric:
    """Collects detections image by image and scores them.

    Only the images given to ``update`` are scored, so an image without detections must be given too, with
    empty arrays.

    Args:
        dataset: the annotated boxes.
        engine: ``auto`` is faster-coco-eval where it is installed and pycocotools otherwise; both give the
            same.

    Raises:
        DataError: the engine is not installed.
    """

    def __init__(self, dataset: CocoDataset, engine: Literal["auto"] | Engine = "auto") -> None:
        self.dataset = dataset
        self.engine: Engine = _find_engine(engine)
        self._image_ids = {image.id for image in dataset.images}
        # Kept by image, so that a score over any choice of images needs no second run of the model.
        self._found: dict[int, tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]] = {}

    def update(self, image_id: int, boxes: ArrayLike, scores: ArrayLike, classes: ArrayLike) -> CocoMetric:
        """Adds the detections of one image.

        Args:
            image_id: an id of the data set, each at most once.
            boxes: float (N, 4), x1 y1 x2 y2 in pixels of the image. N may be 0.
            scores: float (N,).
            classes: int (N,), indices into the data set's classes.

        Raises:
            DataError: the id is unknown or was given before, the shapes do not fit, a value is not finite, or
                a class is out of range.
        """
        if image_id not in self._image_ids:
            raise DataError(
                f"image id {image_id!r} is not in '{self.dataset.annotations}'; its {len(self._image_ids)} "
                f"ids run from {min(self._image_ids)} to {max(self._image_ids)}"
            )
        if image_id in self._found:
            raise DataError(f"image id {image_id} was given before; give each image once, with all its detections")
        box_array, score_array = np.asarray(boxes, dtype=np.float64), np.asarray(scores, dtype=np.float64)
        class_array = np.asarray(classes)
        if box_array.size == 0:
            box_array = box_array.reshape(-1, 4)
        count = len(box_array)
        shapes = (box_array.shape, score_array.shape, class_array.shape)
        if shapes != ((count, 4), (count,), (count,)):
            raise DataError(
                f"detections of image {image_id} have shapes {shapes[0]}, {shapes[1]} and {shapes[2]}, "
                "expected boxes (N, 4), scores (N,) and classes (N,)"
            )
        if count and not np.issubdtype(class_array.dtype, np.integer):
            raise DataError(f"classes of image {image_id} are {class_array.dtype}, expected integers (class indices)")
        if not (np.isfinite(box_array).all() and np.isfinite(score_array).all()):
            raise DataError(
                f"detections of image {image_id} hold NaN or infinity; the model's outputs have overflowed, "
                "run it in a wider precision to see where"
            )
        total = len(self.dataset.classes)
        if count and (class_array.min() < 0 or class_array.max() >= total):
            raise DataError(
                f"classes of image {image_id} run from {class_array.min()} to {class_array.max()}, allowed "
                f"are 0 to {total - 1}: indices into the classes, not category ids"
            )
        self._found[image_id] = (box_array.copy(), score_array.copy(), class_array.astype(np.int64))
        return self

    def compute(self) -> CocoResult:
        """Scores what was given so far.

        Raises:
            DataError: no image was given.
        """
        image_ids = self._scored()
        truth, found = self._truth(image_ids), self._detections(image_ids)
        evaluation = _evaluate(self.engine, truth, found)
        stats = dict(zip(_STATS, (float(value) for value in evaluation.stats[:12]), strict=True))
        # (IoU threshold, recall, class, area, limit): area "all", limit 100.
        precision = evaluation.eval["precision"][:, :, :, 0, -1]
        order = {category: k for k, category in enumerate(evaluation.params.catIds)}
        per_class = {}
        for name, category in zip(self.dataset.classes, self.dataset.category_ids, strict=True):
            values = precision[:, :, order[category]]
            values = values[values > -1]
            per_class[name] = float(values.mean()) if values.size else -1.0
        return CocoResult(**stats, images=len(image_ids), detections=len(found["annotations"]), per_class=per_class)

    def matches(self) -> tuple[ClassMatches, ...]:
        """What each detection was matched to, of every class that has a box to find.

        The average precision over any choice of the images follows from this without another match.

        Raises:
            DataError: no image was given, or the installed engine does not tell its matches.
        """
        image_ids = self._scored()
        evaluation = _evaluator(self.engine, self._truth(image_ids), self._detections(image_ids), separate=True)
        evaluation.params.areaRng = evaluation.params.areaRng[:1]
        evaluation.params.areaRngLbl = evaluation.params.areaRngLbl[:1]
        evaluation.params.maxDets = evaluation.params.maxDets[-1:]
        with contextlib.redirect_stdout(io.StringIO()):
            evaluation.evaluate()
        read = _read_faster if self.engine == "faster-coco-eval" else _read_plain
        cells, count = read(evaluation), len(image_ids)
        # Class by class, and within each image by image.
        by_class = (cells[start : start + count] for start in range(0, len(cells), count))
        thresholds = len(evaluation.params.iouThrs)
        matches = (_class_matches(of_class, thresholds) for of_class in by_class)
        return tuple(one for one in matches if one.truths.any())

    @property
    def image_ids(self) -> tuple[int, ...]:
        """The ids of the images that were given so far, rising."""
        return tuple(sorted(self._found))

    def _scored(self) -> list[int]:
        if not self._found:
            raise DataError("no image was given, so nothing can be scored; call update for each image first")
        return list(self.image_ids)

    def _header(self, image_ids: list[int]) -> dict[str, Any]:
        sizes = {image.id: image for image in self.dataset.images}
        pairs = zip(self.dataset.category_ids, self.dataset.classes, strict=True)
        return {
            "info": {},
            "images": [{"id": i, "width": sizes[i].width, "height": sizes[i].height} for i in image_ids],
            "categories": [{"id": category, "name": name} for category, name in pairs],
        }

    def _truth(self, image_ids: list[int]) -> dict[str, Any]:
        truth, wanted = self.dataset.truth, set(image_ids)
        annotations = [
            {
                # Ids are given anew: the evaluators take 0 for "not matched", and some files start at 0.
                "id": i + 1,
                "image_id": image_id,
                "category_id": self.dataset.category_ids[truth.classes[i]],
                "bbox": truth.boxes[i].tolist(),
                "area": float(truth.areas[i]),
                "iscrowd": int(truth.crowd[i]),
            }
            for i, image_id in enumerate(truth.image_ids.tolist())
            if image_id in wanted
        ]
        return self._header(image_ids) | {"annotations": annotations}

    def _detections(self, image_ids: list[int]) -> dict[str, Any]:
        annotations: list[dict[str, Any]] = []
        for image_id in image_ids:
            boxes, scores, classes = self._found[image_id]
            sizes = boxes[:, 2:] - boxes[:, :2]
            xywh = np.concatenate([boxes[:, :2], sizes], axis=1).tolist()
            areas = (sizes[:, 0] * sizes[:, 1]).tolist()
            for box, area, score, index in zip(xywh, areas, scores.tolist(), classes.tolist(), strict=True):
                annotations.append(
                    {
                        "id": len(annotations) + 1,
                        "image_id": image_id,
                        "category_id": self.dataset.category_ids[index],
                        "bbox": box,
                        "area": area,
                        "score": score,
                        "iscrowd": 0,
                    }
                )
        return self._header(image_ids) | {"annotations": annotations}


def _find_engine(engine: str) -> Engine:
    names = tuple(_MODULES) if engine == "auto" else tuple(name for name in _MODULES if name == engine)
    if not names:
        raise DataError(f"unknown mAP engine '{engine}'; allowed are auto, {', '.join(_MODULES)}")
    for name in names:
        if importlib.util.find_spec(_MODULES[name]) is not None:
            return name
    raise DataError(f"mAP needs {' or '.join(names)}, not installed here; run: pip install {names[0]}")


def _evaluate(engine: Engine, truth: dict[str, Any], found: dict[str, Any]) -> Any:
    """The evaluator after evaluate, accumulate and summarize; nothing reaches standard output."""
    evaluation = _evaluator(engine, truth, found)
    with contextlib.redirect_stdout(io.StringIO()):
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return evaluation


def _evaluator(engine: Engine, truth: dict[str, Any], found: dict[str, Any], *, separate: bool = False) -> Any:
    """The evaluator before its first step; ``separate`` has the C++ one keep the matches that it else drops."""
    if engine == "faster-coco-eval":
        faster = importlib.import_module("faster_coco_eval")
        return faster.COCOeval_faster(
            faster.COCO(truth),
            faster.COCO(found),
            iouType="bbox",
            print_function=lambda *_: None,
            separate_eval=separate,
        )
    plain = importlib.import_module("pycocotools.coco")
    with contextlib.redirect_stdout(io.StringIO()):
        expected, actual = plain.COCO(), plain.COCO()
        for coco, data in ((expected, truth), (actual, found)):
            coco.dataset = data
            coco.createIndex()
        return importlib.import_module("pycocotools.cocoeval").COCOeval(expected, actual, iouType="bbox")


@dataclass(frozen=True)
class _Cell:
    """One class in one image that has a detection or a box: D detections and G boxes at T thresholds."""

    matched: Any
    """(T, D) or flat, the id of the box, 0 for none."""
    ignored: Any
    """(T, D) or flat."""
    scores: Any
    """(D,), falling."""
    truths_ignored: Any
    """(G,)"""


def _read_plain(evaluation: Any) -> list[_Cell | None]:
    return [
        _Cell(one["dtMatches"], one["dtIgnore"], one["dtScores"], one["gtIgnore"]) if one else None
        for one in evaluation.evalImgs
    ]


def _read_faster(evaluation: Any) -> list[_Cell | None]:
    """The C++ evaluator's results, which show themselves only as their pickled state, the same from 1.6.8 on."""
    cells: list[_Cell | None] = []
    for one in evaluation._evalImgs_cpp:
        state = one.__getstate__()
        if not isinstance(state, tuple) or len(state) < 5:
            raise DataError(
                "this version of faster-coco-eval does not tell its matches; run: pip install 'faster-coco-eval>=1.6.8'"
            )
        matched, _, scores, truths_ignored, ignored = state[:5]
        cells.append(_Cell(matched, ignored, scores, truths_ignored) if scores or truths_ignored else None)
    return cells


def _class_matches(cells: list[_Cell | None], thresholds: int) -> ClassMatches:
    truths = np.zeros(len(cells), np.int64)
    images, scores, matched, ignored = [], [], [], []
    for image, cell in enumerate(cells):
        if cell is not None:
            truths[image] = np.count_nonzero(~np.asarray(cell.truths_ignored, dtype=bool))
            images.append(np.full(len(cell.scores), image))
            scores.append(np.asarray(cell.scores, dtype=np.float64))
            matched.append(np.asarray(cell.matched, dtype=bool).reshape(thresholds, -1))
            ignored.append(np.asarray(cell.ignored, dtype=bool).reshape(thresholds, -1))
    if not images:
        none = np.zeros((thresholds, 0), bool)
        return ClassMatches(np.zeros(0, np.int64), none, none, truths)
    # As the evaluators order them: images by id, then a stable sort.
    order = np.argsort(-np.concatenate(scores), kind="stable")
    skipped = np.concatenate(ignored, axis=1)[:, order]
    hits = np.concatenate(matched, axis=1)[:, order] & ~skipped
    return ClassMatches(np.concatenate(images)[order], hits, skipped, truths)
