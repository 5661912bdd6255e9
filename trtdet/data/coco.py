"""COCO annotations: images, boxes and categories of an instances file."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtdet.data.folders import evenly, first_names
from trtdet.errors import DataError


@dataclass(frozen=True)
class CocoImage:
    """An image of a COCO data set; width and height in pixels as the annotations say."""

    id: int
    path: Path
    width: int
    height: int


@dataclass(frozen=True, eq=False)
class GroundTruth:
    """The annotated boxes of a data set as arrays of length M, in the order of the file."""

    image_ids: NDArray[np.int64]
    classes: NDArray[np.int64]
    """Class indices, not category ids."""
    boxes: NDArray[np.float64]
    """float64 (M, 4), x y width height in pixels of the image."""
    areas: NDArray[np.float64]
    """In square pixels. COCO's are those of the masks; the area of the box where the file gives none."""
    crowd: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.image_ids)


@dataclass(frozen=True, eq=False)
class CocoDataset:
    """Images and boxes in COCO's format (Lin et al. 2014, arXiv:1405.0312), with classes matched by name."""

    annotations: Path
    classes: tuple[str, ...]
    category_ids: tuple[int, ...]
    """The category id of each class, in the order of ``classes``."""
    images: tuple[CocoImage, ...]
    """Sorted by id; those without a box included."""
    truth: GroundTruth

    @classmethod
    def load(cls, annotations: Path, images: Path, classes: Sequence[str]) -> CocoDataset:
        """Reads annotations and checks that they, the image folder and the classes fit together.

        Every class must be a category of the file, by name. Categories that are no class are left out if no
        box uses them, and are an error if one does: a score over a part of the categories is not the data
        set's score.

        Args:
            annotations: a COCO instances file (JSON).
            images: the folder that ``file_name`` is relative to.
            classes: the class names of the configuration, in the model's order.

        Raises:
            DataError: the file is not such a file; categories and classes do not match; images are missing,
                or boxes are on unknown images; there are no boxes.
        """
        annotations, images, classes = Path(annotations), Path(images), tuple(classes)
        document = _read_coco(annotations)
        entries = _images(annotations, document, images)
        category_ids = _match_categories(annotations, document, classes)
        known = {entry.id for entry in entries}
        truth = _truth(annotations, document["annotations"], known, category_ids)
        missing = [entry.path.name for entry in entries if not entry.path.is_file()]
        if missing:
            raise DataError(
                f"{len(missing)} of the {len(entries)} images in '{annotations}' are not in '{images}': "
                f"{first_names(missing)}; give the folder that has them, or annotations of these images only"
            )
        return cls(annotations, classes, category_ids, entries, truth)

    def first(self, count: int) -> CocoDataset:
        """So many of the images, evenly spaced, with their boxes; all of them where there are no more.

        Raises:
            DataError: none of them has a box, so that there is nothing to score.
        """
        images = evenly(self.images, count)
        kept = np.isin(self.truth.image_ids, [image.id for image in images])
        if not kept.any():
            raise DataError(f"none of {len(images)} images of '{self.annotations}' has a box: score more of them")
        arrays = {one.name: getattr(self.truth, one.name)[kept] for one in fields(self.truth)}
        return replace(self, images=images, truth=GroundTruth(**arrays))


def _read_coco(path: Path) -> dict[str, list[dict[str, Any]]]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(
            f"annotations '{path}' cannot be read: {error.strerror or error}; give a COCO instances file"
        ) from None
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError
        raise DataError(
            f"annotations '{path}' are not JSON, or are truncated: {error}; give a complete COCO instances file"
        ) from None
    keys = ("images", "annotations", "categories")
    lacking = [key for key in keys if not isinstance(document, dict) or key not in document]
    if lacking:
        raise DataError(
            f"annotations '{path}' lack {', '.join(map(repr, lacking))}; a COCO instances file has {', '.join(keys)}"
        )
    fields = {
        "images": ("id", "file_name", "width", "height"),
        "annotations": ("image_id", "category_id", "bbox"),
        "categories": ("id", "name"),
    }
    for key in keys:
        entries = document[key]
        if not isinstance(entries, list):
            raise DataError(f"annotations '{path}': '{key}' is a {type(entries).__name__}, a list is expected")
        for i, entry in enumerate(entries):
            absent = [field for field in fields[key] if not isinstance(entry, dict) or field not in entry]
            if absent:
                raise DataError(
                    f"annotations '{path}': {key}[{i}] lacks {', '.join(map(repr, absent))}, every entry "
                    f"needs {', '.join(fields[key])}; give a COCO instances file"
                )
        if key != "annotations":
            twice = [id_ for id_, count in Counter(entry["id"] for entry in entries).items() if count > 1]
            if twice:
                raise DataError(
                    f"annotations '{path}': {key} has ids twice: {first_names(twice)}; ids must be distinct"
                )
    return {key: document[key] for key in keys}


def _images(path: Path, document: dict[str, list[dict[str, Any]]], folder: Path) -> tuple[CocoImage, ...]:
    if not document["images"]:
        raise DataError(f"annotations '{path}' have no images; give a COCO instances file with some")
    if not folder.is_dir():
        raise DataError(f"image folder '{folder}' does not exist; give the folder of the images in '{path}'")
    try:
        entries = [
            CocoImage(int(e["id"]), folder / str(e["file_name"]), int(e["width"]), int(e["height"]))
            for e in document["images"]
        ]
    except (TypeError, ValueError) as error:
        raise DataError(f"annotations '{path}': an image's id or size is not a whole number: {error}") from None
    return tuple(sorted(entries, key=lambda entry: entry.id))


def _match_categories(
    path: Path, document: dict[str, list[dict[str, Any]]], classes: tuple[str, ...]
) -> tuple[int, ...]:
    names = [str(category["name"]) for category in document["categories"]]
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise DataError(f"annotations '{path}' have categories twice: {first_names(twice)}; names must be distinct")
    ids = {str(category["name"]): int(category["id"]) for category in document["categories"]}
    used = {annotation["category_id"] for annotation in document["annotations"]}
    absent = [name for name in classes if name not in ids]
    extra = [name for name in names if name not in classes and ids[name] in used]
    if absent or extra:
        said = []
        if absent:
            said.append(f"{len(absent)} of the {len(classes)} classes are no category ({first_names(absent)})")
        if extra:
            said.append(
                f"{len(extra)} of the {len(names)} categories have boxes but are no class ({first_names(extra)})"
            )
        raise DataError(
            f"annotations '{path}' do not match the configuration: {' and '.join(said)}; 'classes' must "
            "name the categories exactly, in the model's order"
        )
    unknown = used - set(ids.values())
    if unknown:
        raise DataError(
            f"annotations '{path}' have boxes of category ids that are not in 'categories': "
            f"{first_names(sorted(unknown))}; add the categories or drop the boxes"
        )
    return tuple(ids[name] for name in classes)


def _truth(
    path: Path, annotations: list[dict[str, Any]], known: set[int], category_ids: tuple[int, ...]
) -> GroundTruth:
    if not annotations:
        raise DataError(f"annotations '{path}' have no boxes, so nothing can be scored; give annotated images")
    strangers = sorted({a["image_id"] for a in annotations} - known)
    if strangers:
        raise DataError(
            f"annotations '{path}' have boxes on {len(strangers)} image ids that are not in 'images': "
            f"{first_names(strangers)}; add the images or drop the boxes"
        )
    class_of = {category: index for index, category in enumerate(category_ids)}
    boxes = np.zeros((len(annotations), 4), np.float64)
    areas = np.zeros(len(annotations), np.float64)
    for i, annotation in enumerate(annotations):
        try:
            boxes[i] = annotation["bbox"]
            areas[i] = annotation.get("area", math.nan)
        except (TypeError, ValueError):
            boxes[i] = math.nan
        if not np.isfinite(boxes[i]).all():
            raise DataError(
                f"annotations '{path}': annotations[{i}] has bbox {annotation['bbox']!r}, expected four "
                "numbers x, y, width, height in pixels"
            )
    areas = np.where(np.isfinite(areas), areas, boxes[:, 2] * boxes[:, 3])
    return GroundTruth(
        image_ids=np.array([a["image_id"] for a in annotations], np.int64),
        classes=np.array([class_of[a["category_id"]] for a in annotations], np.int64),
        boxes=boxes,
        areas=areas,
        crowd=np.array([bool(a.get("iscrowd", 0)) for a in annotations], bool),
    )
