"""COCO's mean average precision of arrays, computed by faster-coco-eval (C++) or pycocotools."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trtdet.data import CocoDataset, ImageBatch
from trtdet.detection.masks import THRESHOLD, areas, overlaps, run_lengths
from trtdet.detection.placing import place
from trtdet.detection.suppression import Detections
from trtdet.errors import DataError, one_line
from trtdet.evaluation.matching import ClassMatcher, ClassMatches, ImageTruth, xywh
from trtdet.evaluation.parts import (
    BEST_OF_KEYPOINTS,
    Figures,
    FoundParts,
    ImageOverlaps,
    KeypointResult,
    Of,
    RotatedResult,
    dota_average_precision,
    keypoint_similarity,
    probabilistic_overlaps,
    rotated_overlaps,
    ultralytics_average_precision,
)
from trtdet.evaluation.resampling import mean_average_precision

Engine = Literal["faster-coco-eval", "pycocotools"]

_Kind = Literal["bbox", "segm", "keypoints"]
"""The evaluators' names of boxes, masks and keypoints."""

Found = tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]
"""The detections of an image: boxes (N, 4) x1 y1 x2 y2 in pixels of the image, scores (N,), classes (N,)."""

_STATS = {
    "map": ("Precision  (AP)", "0.50:0.95", "all", 100),
    "map50": ("Precision  (AP)", "0.50", "all", 100),
    "map75": ("Precision  (AP)", "0.75", "all", 100),
    "map_small": ("Precision  (AP)", "0.50:0.95", "small", 100),
    "map_medium": ("Precision  (AP)", "0.50:0.95", "medium", 100),
    "map_large": ("Precision  (AP)", "0.50:0.95", "large", 100),
    "ar1": ("Recall     (AR)", "0.50:0.95", "all", 1),
    "ar10": ("Recall     (AR)", "0.50:0.95", "all", 10),
    "ar100": ("Recall     (AR)", "0.50:0.95", "all", 100),
    "ar_small": ("Recall     (AR)", "0.50:0.95", "small", 100),
    "ar_medium": ("Recall     (AR)", "0.50:0.95", "medium", 100),
    "ar_large": ("Recall     (AR)", "0.50:0.95", "large", 100),
}
"""The evaluators' ``stats`` in their order, by field of CocoResult: the printed title, IoU, area and limit."""

_SAVED = ("boxes", "scores", "classes")
"""Arrays of saved detections, in the order of :data:`Found`."""

_MODULES: dict[Engine, str] = {"faster-coco-eval": "faster_coco_eval", "pycocotools": "pycocotools"}


@dataclass(frozen=True)
class CocoResult(Figures):
    """COCO's scores of boxes or of masks, 0..1; -1, as in pycocotools, without objects of that size or class."""

    map: float
    """Mean AP over IoU 0.50:0.05:0.95 and the classes."""
    map50: float
    map75: float
    map_small: float
    """Objects of less than 32 * 32 pixels."""
    map_medium: float
    map_large: float
    """Objects of more than 96 * 96 pixels."""
    ar1: float
    """Mean recall with only the best detection of each class in an image."""
    ar10: float
    ar100: float
    ar_small: float
    ar_medium: float
    ar_large: float
    images: int
    """Number of images scored."""
    detections: int
    """Number of detections, before the limit of 100 a class and image."""
    per_class: Mapping[str, float]
    """AP over IoU 0.50:0.95, in the order of the classes."""

    def __str__(self) -> str:
        """The twelve lines of pycocotools' ``summarize``."""
        return "\n".join(
            f" Average {title} @[ IoU={iou:<9} | area={area:>6s} | maxDets={limit:>3d} ] = {getattr(self, name):0.3f}"
            for name, (title, iou, area, limit) in _STATS.items()
        )


class CocoMetric:
    """Collects detections image by image and scores them.

    Only images given to ``update`` are scored, so give images without detections too, with empty arrays. The engine
    ``auto`` is faster-coco-eval if it is installed, else pycocotools; their results are equal. ``sigmas`` are the
    tolerances of keypoints, of which the ``most_poses`` best detections of a class and image count. Raises DataError if
    the engine is not installed.
    """

    def __init__(
        self,
        dataset: CocoDataset,
        engine: Literal["auto"] | Engine = "auto",
        sigmas: Sequence[float] = (),
        most_poses: int = BEST_OF_KEYPOINTS,
    ) -> None:
        self.dataset = dataset
        self._most_poses = most_poses
        self.sigmas = tuple(sigmas)
        allowed = [name for name in _MODULES if engine in ("auto", name)]
        if not allowed:
            raise DataError(f"unknown mAP engine '{engine}'; allowed are auto, {', '.join(_MODULES)}")
        installed = [name for name in allowed if importlib.util.find_spec(_MODULES[name]) is not None]
        if not installed:
            raise DataError(f"mAP needs {' or '.join(allowed)}, not installed here; run: pip install {allowed[0]}")
        self.engine: Engine = installed[0]
        self._images = {image.id: image for image in dataset.images}
        # Kept by image, so that any choice of images can be scored without a second run of the model.
        self.detections: dict[int, Found] = {}
        """Detections by image id."""
        self.parts: dict[int, FoundParts] = {}
        """Masks, keypoints and rotated boxes by image id."""
        self._matches: dict[str, dict[str, ClassMatches]] = {}

    def update(
        self,
        image_id: int,
        boxes: ArrayLike,
        scores: ArrayLike,
        classes: ArrayLike,
        parts: FoundParts = FoundParts(),
    ) -> CocoMetric:
        """Adds the detections of one image.

        Args:
            image_id: an id of the data set, each at most once.
            boxes: float (N, 4), x1 y1 x2 y2 in pixels of the image. N may be 0.
            scores: float (N,).
            classes: int (N,), indices into the data set's classes.
            parts: what was detected beside boxes.

        Raises DataError if the id is unknown or repeated, a shape is wrong, a value is not finite, or a class is out of
        range.
        """
        if image_id not in self._images:
            raise DataError(
                f"image id {image_id!r} is not in '{self.dataset.annotations}'; its {len(self._images)} "
                f"ids run from {min(self._images)} to {max(self._images)}"
            )
        if image_id in self.detections:
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
        self._matches.clear()
        self.detections[image_id] = (box_array.copy(), score_array.copy(), class_array.astype(np.int64))
        self.parts[image_id] = parts
        return self

    def update_batch(self, batch: ImageBatch, found: Detections, mask_threshold: float = THRESHOLD) -> CocoMetric:
        """Adds detections in pixels of the network's input, with their parts; masks only if the data set has some, or
        of one-stage detectors if it has no annotations. Errors as in :meth:`update`."""
        for row, (index, transform) in enumerate(zip(batch.indices, batch.transforms, strict=True)):
            boxes, scores, classes = found.image(row)
            inside, parts = transform.to_image(boxes), found.image_parts(row)
            if not self.dataset.has_masks:  # masks take long to paste
                prototypes = None if self.dataset.annotated else parts.prototypes
                parts = replace(parts, masks=None, prototypes=prototypes)
            size = (int(batch.images.shape[2]), int(batch.images.shape[3]))
            placed = place(parts, inside, transform, size=size, threshold=mask_threshold)
            masks = None if placed.masks is None else [run_lengths(mask) for mask in placed.masks]
            kept = FoundParts(masks, keypoints=placed.keypoints, rotated_boxes=placed.rotated_boxes)
            self.update(self.dataset.images[index].id, inside, scores, classes=classes, parts=kept)
        return self

    def save(self, path: Path) -> None:
        """Writes the detections as a compressed ``.npz`` that :meth:`load` reads: ``ids`` (I,) and ``counts`` (I,) of
        the images, and of all images one after another ``boxes`` (N, 4) as x1 y1 x2 y2 in pixels, ``scores`` (N,) and
        ``classes`` (N,).

        Parts that all images have follow: ``keypoints`` (N, P, 3) with the ``sigmas`` (P,); ``rotated_boxes`` (N, 5);
        of masks the characters of all run lengths as uint8 ``masks``, their ``mask_ends`` (N,) there, and their
        ``mask_sizes`` (N, 2), height and width. Raises DataError if no image was given.
        """
        ids = self._scored()
        values = (np.concatenate(each) for each in zip(*(self.detections[one] for one in ids), strict=True))
        content: dict[str, Any] = dict(zip(_SAVED, values, strict=True))
        parts = [self.parts[one] for one in ids]
        points, rotated = ([getattr(one, name) for one in parts] for name in ("keypoints", "rotated_boxes"))
        if all(one is not None for one in points):
            content |= {"keypoints": np.concatenate(points), "sigmas": np.array(self.sigmas, np.float64)}
        if all(one is not None for one in rotated):
            content["rotated_boxes"] = np.concatenate(rotated)
        if all(one.masks is not None for one in parts):
            masks = [mask for one in parts for mask in one.masks or ()]
            texts = [mask["counts"].encode() for mask in masks]
            content["masks"] = np.frombuffer(b"".join(texts), np.uint8)
            content["mask_ends"] = np.cumsum([len(text) for text in texts], dtype=np.int64)
            content["mask_sizes"] = np.array([mask["size"] for mask in masks], np.int64).reshape(-1, 2)
        counts = [len(self.detections[one][1]) for one in ids]
        with path.open("wb") as stream:
            np.savez_compressed(stream, ids=ids, counts=counts, **content)

    @classmethod
    def load(cls, path: Path, dataset: CocoDataset) -> CocoMetric:
        """The detections of :meth:`save` on images of ``dataset``; errors as in :meth:`update`."""
        with np.load(path, allow_pickle=False) as file:
            saved = {name: file[name] for name in file.files}
        metric = cls(dataset, sigmas=saved["sigmas"].tolist() if "sigmas" in saved else ())
        masks: list[dict[str, Any]] | None = None
        if "masks" in saved:
            texts = [text.tobytes().decode() for text in np.split(saved["masks"], saved["mask_ends"])]
            pairs = zip(saved["mask_sizes"].tolist(), texts[:-1], strict=True)
            masks = [{"size": size, "counts": text} for size, text in pairs]
        ends = np.cumsum(saved["counts"])
        for image_id, start, end in zip(saved["ids"].tolist(), ends - saved["counts"], ends, strict=True):
            boxes, scores, classes = (saved[name][start:end] for name in _SAVED)
            parts = FoundParts(
                None if masks is None else masks[start:end],
                keypoints=saved["keypoints"][start:end] if "keypoints" in saved else None,
                rotated_boxes=saved["rotated_boxes"][start:end] if "rotated_boxes" in saved else None,
            )
            metric.update(image_id, boxes, scores, classes=classes, parts=parts)
        return metric

    def of(self, dataset: CocoDataset) -> CocoMetric:
        """The same detections on the images of ``dataset`` alone, some of those given so far."""
        metric = CocoMetric(dataset, self.engine, self.sigmas)
        for image in dataset.images:
            if image.id in self.detections:
                metric.update(image.id, *self.detections[image.id], parts=self.parts[image.id])
        return metric

    def compute(self) -> CocoResult:
        """Scores the images given so far; raises DataError if there are none."""
        image_ids = self._scored()
        return self._result(self._truth(image_ids), self._detections(image_ids), "bbox")

    def compute_masks(self) -> CocoResult | None:
        """Scores the masks of the images given so far; None if the data set or the detections have no masks.

        The size class of an annotation follows from its ``area``, that of a detection from its mask. Raises DataError
        if no image was given, or the segmentations of the annotations cannot be read.
        """
        image_ids, segmentations = self._scored(), self.dataset.truth.segmentations
        if segmentations is None or not self.has("masks"):
            return None
        self.dataset.check_masks()
        truth, found = self._truth(image_ids), self._detections(image_ids)
        kept = np.isin(self.dataset.truth.image_ids, image_ids)
        for annotation, segmentation in zip(truth["annotations"], segmentations[kept], strict=True):
            annotation["segmentation"] = segmentation
        masks = [mask for image_id in image_ids for mask in self.parts[image_id].masks or ()]
        for detection, mask, area in zip(found["annotations"], masks, areas(masks), strict=True):
            detection |= {"segmentation": mask, "area": area}
        try:
            return self._result(truth, found, "segm")
        except Exception as error:  # the evaluators raise many types for invalid segmentations
            raise DataError(
                f"segmentations of '{self.dataset.annotations}' cannot be read: {one_line(error)}; give polygons or "
                "run lengths in COCO's format"
            ) from error

    def compute_keypoints(self) -> KeypointResult | None:
        """Scores the keypoints of the images given so far; None if the data set or the detections have none.

        Raises DataError if no image was given, or the number of keypoints differs.
        """
        image_ids, keypoints = self._scored(), self.dataset.truth.keypoints
        if keypoints is None or not self.has("keypoints"):
            return None
        self._check_keypoints(keypoints.shape[1])
        truth, found = self._truth(image_ids), self._detections(image_ids)
        kept = np.isin(self.dataset.truth.image_ids, image_ids)
        for annotation, points in zip(truth["annotations"], keypoints[kept], strict=True):
            annotation |= {"keypoints": points.reshape(-1).tolist(), "num_keypoints": int((points[:, 2] > 0).sum())}
        each = [points for image_id in image_ids for points in self._keypoints(image_id)]
        for detection, points in zip(found["annotations"], each, strict=True):
            low, high = points[:, :2].min(axis=0), points[:, :2].max(axis=0)
            flat = points.astype(np.float64).reshape(-1).tolist()
            detection |= {"keypoints": flat, "num_keypoints": len(points), "area": float((high - low).prod())}
        poses = _Poses(self.sigmas, self._most_poses)
        evaluation = _evaluated(self.engine, truth, found, kind="keypoints", poses=poses)
        with contextlib.redirect_stdout(io.StringIO()):
            evaluation.summarize()
        names = [field.name for field in fields(KeypointResult)][:10]  # in the evaluator's order
        stats: dict[str, Any] = dict(zip(names, map(float, evaluation.stats[:10]), strict=True))
        return KeypointResult(
            **stats,
            images=len(image_ids),
            detections=len(found["annotations"]),
            per_class=self._per_class(evaluation),
        )

    def compute_rotated_boxes(self) -> RotatedResult | None:
        """Scores the rotated boxes of the images given so far; None if the data set or the detections have none.
        Raises DataError if no image was given."""
        image_ids = self._scored()
        if not self.has("rotated_boxes"):
            return None
        matches, levels = self.class_matches("rotated_boxes"), (slice(None), slice(0, 1), slice(5, 6))
        per_class = {name: _mean_of((one,), levels[0]) if one.truths.any() else -1.0 for name, one in matches.items()}
        present = self.matches("rotated_boxes")
        scores = [_mean_of(present, level) if present else -1.0 for level in levels]
        images = [self._overlaps_of_class(index) for index in range(len(self.dataset.classes))]
        dota = [ap for areas, _ in images if (ap := dota_average_precision(areas)) >= 0]
        ultralytics = [ap for _, shapes in images if (ap := ultralytics_average_precision(shapes)) >= 0]
        return RotatedResult(
            map=scores[0],
            map50=scores[1],
            map75=scores[2],
            dota50=float(np.mean(dota)) if dota else -1.0,
            ultralytics=float(np.mean(ultralytics)) if ultralytics else -1.0,
            images=len(image_ids),
            detections=sum(len(self.detections[one][1]) for one in image_ids),
            per_class=per_class,
        )

    def map_of(self, of: Of) -> float:
        """Mean average precision of boxes or of a part, 0..1. Raises DataError if there is none to score."""
        scores = {
            "boxes": self.compute,
            "masks": self.compute_masks,
            "keypoints": self.compute_keypoints,
            "rotated_boxes": self.compute_rotated_boxes,
        }
        result = scores[of]()
        if result is None:
            raise self._lacks(of)
        return float(result.map)

    def _lacks(self, of: Of) -> DataError:
        name = of.replace("_", " ")
        return DataError(f"'{self.dataset.annotations}' or what was detected has no {name}, so none can be matched")

    def _check_keypoints(self, annotated: int) -> None:
        if annotated != len(self.sigmas):
            raise DataError(
                f"annotations '{self.dataset.annotations}' have {annotated} keypoints of each object, the detector has "
                f"{len(self.sigmas)}; head.keypoints must name those of the annotations, in their order"
            )

    def _keypoints(self, image_id: int) -> NDArray[np.float32]:
        keypoints = self.parts[image_id].keypoints
        return np.zeros((0, len(self.sigmas), 3), np.float32) if keypoints is None else keypoints

    def _result(self, truth: dict[str, Any], found: dict[str, Any], kind: _Kind) -> CocoResult:
        evaluation = _evaluated(self.engine, truth, found, kind=kind)
        with contextlib.redirect_stdout(io.StringIO()):
            evaluation.summarize()
        stats = dict(zip(_STATS, (float(value) for value in evaluation.stats[:12]), strict=True))
        return CocoResult(
            **stats,
            images=len(truth["images"]),
            detections=len(found["annotations"]),
            per_class=self._per_class(evaluation),
        )

    def _per_class(self, evaluation: Any) -> dict[str, float]:
        # Axes (IoU threshold, recall, class, area, limit): area "all", the largest limit.
        precision = evaluation.eval["precision"][:, :, :, 0, -1]
        order = {category: k for k, category in enumerate(evaluation.params.catIds)}
        per_class = {}
        for name, category in zip(self.dataset.classes, self.dataset.category_ids, strict=True):
            # faster-coco-eval leaves out categories without keypoints.
            values = precision[:, :, order[category]] if category in order else np.zeros(0)
            values = values[values > -1]
            per_class[name] = float(values.mean()) if values.size else -1.0
        return per_class

    def recall(self, *limits: int) -> tuple[float, ...]:
        """Mean recall over IoU 0.50:0.05:0.95, 0..1, of boxes of any class, for each limit of detections per image.

        This is pycocotools' AR with ``useCats = 0``; -1 if there is no box to find. Raises DataError if no image was
        given.
        """
        image_ids = self._scored()
        truth, detections = self._truth(image_ids), self._detections(image_ids)
        evaluation = _evaluated(self.engine, truth, detections, kind="bbox", limits=limits)
        # Axes (IoU threshold, class, area, limit): area "all".
        recalls = evaluation.eval["recall"][:, 0, 0, :]
        return tuple(float(values[values > -1].mean()) if (values > -1).any() else -1.0 for values in recalls.T)

    def matches(self, of: Of = "boxes") -> tuple[ClassMatches, ...]:
        """Matches of every class that has a box to find, in order of category ids.

        They give the average precision of any choice of the images without another matching. Raises DataError if no
        image was given, or the data set or the detections have no such part.
        """
        if not self.has(of):
            raise self._lacks(of)
        matches = tuple(self.class_matches(of).values())
        order = np.argsort(self.dataset.category_ids, kind="stable")
        return tuple(matches[index] for index in order if matches[index].truths.any())

    def has(self, of: Of) -> bool:
        """Whether all boxes of the data set and all detections have this part."""
        annotated = {
            "boxes": True,
            "masks": self.dataset.has_masks,
            "keypoints": self.dataset.has_keypoints,
            "rotated_boxes": self.dataset.has_rotated_boxes,
        }
        return annotated[of] and all(parts.has(of) for parts in self.parts.values())

    def class_matches(self, of: Of = "boxes") -> dict[str, ClassMatches]:
        """Matches of every class by name, also without a box to find; raises DataError if no image was given."""
        if of in self._matches:
            return self._matches[of]
        image_ids, truth = self._scored(), self.dataset.truth
        if of == "masks":
            self.dataset.check_masks()
        best = {"best": self._most_poses} if of == "keypoints" else {}
        matchers = [ClassMatcher(len(image_ids), **best) for _ in self.dataset.classes]
        unseen: NDArray[np.bool_] | None = None
        if of == "keypoints" and truth.keypoints is not None:
            unseen = np.asarray((truth.keypoints[..., 2] <= 0).all(axis=1))
        rows_of = _rows_by_value(truth.image_ids)
        for position, image_id in enumerate(image_ids):
            boxes, scores, classes = self.detections[image_id]
            detected, rows = _rows_by_value(classes), rows_of.get(image_id, np.zeros(0, np.int64))
            annotated = {index: rows[part] for index, part in _rows_by_value(truth.classes[rows]).items()}
            for index in sorted(detected.keys() | annotated.keys()):
                part = detected.get(index, np.zeros(0, np.int64))
                here = annotated.get(index, np.zeros(0, np.int64))
                shared = None if of == "boxes" else self._overlaps(of, image_id, part, here=here)
                to_find = ImageTruth(
                    truth.boxes[here],
                    areas=truth.areas[here],
                    crowd=truth.crowd[here],
                    rows=here,
                    unseen=None if unseen is None else unseen[here],
                )
                matchers[index].add(position, xywh(boxes[part]), scores[part], truth=to_find, overlaps=shared)
        self._matches[of] = {
            name: matcher.matches() for name, matcher in zip(self.dataset.classes, matchers, strict=True)
        }
        return self._matches[of]

    def _overlaps(self, of: Of, image_id: int, part: NDArray[np.int64], here: NDArray[np.int64]) -> NDArray[np.float64]:
        """Overlaps (D, G), 0..1, of a part of the detections ``part`` of an image with the annotations ``here``."""
        truth, parts, image = self.dataset.truth, self.parts[image_id].of(part), self._images[image_id]
        if of == "masks" and truth.segmentations is not None:
            crowd, segmentations = truth.crowd[here].tolist(), list(truth.segmentations[here])
            return overlaps(parts.masks or (), segmentations, crowd, height=image.height, width=image.width)
        if of == "keypoints" and truth.keypoints is not None and parts.keypoints is not None:
            self._check_keypoints(truth.keypoints.shape[1])
            return keypoint_similarity(
                parts.keypoints,
                truth.keypoints[here],
                boxes=truth.boxes[here],
                areas=truth.areas[here],
                sigmas=self.sigmas,
            )
        if truth.corners is None or parts.rotated_boxes is None:
            raise self._lacks(of)
        return rotated_overlaps(parts.rotated_boxes, truth.corners[here], truth.crowd[here])

    def _overlaps_of_class(self, index: int) -> tuple[list[ImageOverlaps], list[ImageOverlaps]]:
        """Scores, overlaps of rotated boxes and crowds of a class in each image: overlaps of areas, and probabilistic
        ones."""
        truth, areas, shapes = self.dataset.truth, list[ImageOverlaps](), list[ImageOverlaps]()
        for image_id in self._scored():
            _, scores, classes = self.detections[image_id]
            part = np.flatnonzero(classes == index)
            here = np.flatnonzero((truth.image_ids == image_id) & (truth.classes == index))
            rotated = self.parts[image_id].of(part).rotated_boxes
            if rotated is None or truth.corners is None:
                raise self._lacks("rotated_boxes")
            # Unlike COCO's crowds, DOTA's difficult objects are overlapped as others are.
            shared = rotated_overlaps(rotated, truth.corners[here], np.zeros(len(here), bool))
            areas.append(ImageOverlaps(scores[part], shared, truth.crowd[here]))
            alike = probabilistic_overlaps(rotated, truth.corners[here])
            shapes.append(ImageOverlaps(scores[part], alike, truth.crowd[here]))
        return areas, shapes

    @property
    def image_ids(self) -> tuple[int, ...]:
        """Ids of the images given so far, ascending."""
        return tuple(sorted(self.detections))

    def _scored(self) -> list[int]:
        if not self.detections:
            raise DataError("no image was given, so nothing can be scored; call update for each image first")
        return list(self.image_ids)

    def _header(self, image_ids: list[int]) -> dict[str, Any]:
        sizes = self._images
        pairs = zip(self.dataset.category_ids, self.dataset.classes, strict=True)
        return {
            "info": {},
            "images": [{"id": i, "width": sizes[i].width, "height": sizes[i].height} for i in image_ids],
            "categories": [{"id": category, "name": name} for category, name in pairs],
        }

    def _truth(self, image_ids: list[int]) -> dict[str, Any]:
        truth, scored_ids = self.dataset.truth, set(image_ids)
        annotations = [
            {
                # New ids from 1: the evaluators read 0 as "not matched", and some files start at 0.
                "id": i + 1,
                "image_id": image_id,
                "category_id": self.dataset.category_ids[truth.classes[i]],
                "bbox": truth.boxes[i].tolist(),
                "area": float(truth.areas[i]),
                "iscrowd": int(truth.crowd[i]),
            }
            for i, image_id in enumerate(truth.image_ids.tolist())
            if image_id in scored_ids
        ]
        return self._header(image_ids) | {"annotations": annotations}

    def _detections(self, image_ids: list[int]) -> dict[str, Any]:
        annotations: list[dict[str, Any]] = []
        for image_id in image_ids:
            boxes, scores, classes = self.detections[image_id]
            rows = zip(xywh(boxes).tolist(), scores.tolist(), classes.tolist(), strict=True)
            annotations += [
                {
                    "id": number,
                    "image_id": image_id,
                    "category_id": self.dataset.category_ids[index],
                    "bbox": box,
                    "area": box[2] * box[3],
                    "score": score,
                    "iscrowd": 0,
                }
                for number, (box, score, index) in enumerate(rows, len(annotations) + 1)
            ]
        return self._header(image_ids) | {"annotations": annotations}


class _Poses(NamedTuple):
    """Settings of the evaluator for keypoints."""

    sigmas: Sequence[float]
    most: int


def _evaluated(
    engine: Engine,
    truth: dict[str, Any],
    found: dict[str, Any],
    kind: _Kind,
    limits: Sequence[int] = (),
    poses: _Poses | None = None,
) -> Any:
    """Runs the evaluator; with limits, classes are ignored and each limit is a number of best detections per image."""
    with contextlib.redirect_stdout(io.StringIO()):
        if engine == "faster-coco-eval":
            faster = importlib.import_module("faster_coco_eval")
            pair = faster.COCO(truth), faster.COCO(found)
            evaluation = faster.COCOeval_faster(*pair, iouType=kind, print_function=lambda *_: None)
        else:
            coco = importlib.import_module("pycocotools.coco")
            pair = coco.COCO(), coco.COCO()
            for part, data in zip(pair, (truth, found), strict=True):
                part.dataset = data
                part.createIndex()
            evaluation = importlib.import_module("pycocotools.cocoeval").COCOeval(*pair, iouType=kind)
        if poses is not None:
            evaluation.params.kpt_oks_sigmas = np.array(poses.sigmas)
            evaluation.params.maxDets = [poses.most]
        if limits:
            evaluation.params.useCats, evaluation.params.maxDets = 0, list(limits)
        evaluation.evaluate()
        evaluation.accumulate()
    return evaluation


def _mean_of(matches: Sequence[ClassMatches], level: slice) -> float:
    """Mean average precision of some of the IoU thresholds, 0..1."""
    chosen = [replace(one, hits=one.hits[level], ignored=one.ignored[level]) for one in matches]
    return float(mean_average_precision(chosen, np.ones((1, len(chosen[0].truths)), np.int32))[0])


def _rows_by_value(values: NDArray[np.int64]) -> dict[int, NDArray[np.int64]]:
    """The rows of each value, in their order."""
    order = np.argsort(values, kind="stable")
    distinct, starts = np.unique(values[order], return_index=True)
    return dict(zip(distinct.tolist(), np.split(order, starts[1:]), strict=True)) if len(values) else {}
