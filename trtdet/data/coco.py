"""Images, boxes and categories of a COCO instances file."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field, TypeAdapter

from trtdet.data.folders import evenly, find_images, first_names, is_file
from trtdet.data.segmentations import problem_of
from trtdet.errors import DataError, TrtdetWarning
from trtdet.files.documents import DocumentError, read_document

_FARTHEST = 1e9
"""Largest coordinate in pixels."""

OTHERS = "others"
"""Stands for all categories that are no class."""


@dataclass(frozen=True)
class CocoImage:
    """An image of a data set; width and height in pixels are those of the annotations, 0 without annotations."""

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
    """In square pixels: the file's area (in COCO that of the mask), or else that of the box."""
    crowd: NDArray[np.bool_]
    segmentations: NDArray[np.object_] | None = None
    """Masks as in the file, polygons or run lengths; None if any box has no mask."""
    keypoints: NDArray[np.float64] | None = None
    """float64 (M, P, 3), x y in pixels of the image and COCO's visibility: 0 not annotated, 1 hidden, 2 visible; None
    if any box has none, or another number of them."""

    @cached_property
    def corners(self) -> NDArray[np.float64] | None:
        """Corners float64 (M, 4, 2), x y, of rotated boxes: each mask is one polygon of four corners, as converters of
        DOTA's labels write them; None if any mask is something else."""
        masks = () if self.segmentations is None else self.segmentations
        if not len(masks) or not all(map(_is_corners, masks)):
            return None
        return np.array([mask[0] for mask in masks], np.float64).reshape(-1, 4, 2)

    def __len__(self) -> int:
        return len(self.image_ids)


def _is_corners(mask: Any) -> bool:
    """Whether a segmentation is one polygon of four corners."""
    if not (isinstance(mask, list) and len(mask) == 1 and isinstance(mask[0], list) and len(mask[0]) == 8):
        return False
    return all(type(value) in (int, float) and abs(value) <= _FARTHEST for value in mask[0])


@dataclass(frozen=True, eq=False)
class CocoDataset:
    """Images and boxes in COCO's format (Lin et al. 2014, arXiv:1405.0312), with classes matched by name."""

    annotations: Path
    """The instances file; without annotations, the source of the images."""
    classes: tuple[str, ...]
    category_ids: tuple[int, ...]
    """In the order of ``classes``."""
    images: tuple[CocoImage, ...]
    """Sorted by id, including images without a box."""
    truth: GroundTruth

    @classmethod
    def load(
        cls,
        annotations: Path | str,
        images: Path | str,
        classes: Sequence[str],
        *,
        categories: Mapping[str, str] | None = None,
    ) -> CocoDataset:
        """Reads a COCO instances file (JSON) and checks that it fits the folder of its images and the classes.

        Every class, in the model's order, must be the name of a category. Other categories are ignored if no box uses
        them; otherwise they are an error, because a score of only some categories is not the data set's score.

        Args:
            categories: for a model with other classes, the class that the boxes of a category count as, by the
                category's name; an empty class leaves the boxes out. :data:`OTHERS` with an empty class leaves out all
                categories that are no class, and allows classes that are no category, which are then not scored.

        Raises:
            DataError: the file is not a COCO instances file; categories and classes do not match; images are missing;
                boxes are on unknown images; there are no boxes.
        """
        annotations, images, classes = Path(annotations), Path(images), tuple(classes)
        try:
            document = read_document(annotations, TypeAdapter(_Document))
        except OSError as error:
            raise DataError(
                f"annotations '{annotations}' cannot be read: {error.strerror or error}; give a COCO instances file"
            ) from None
        except DocumentError as error:
            raise DataError(
                f"annotations '{annotations}' do not fit: {error}; give a complete COCO instances file"
            ) from None
        for key, rows in (("images", document.images), ("categories", document.categories)):
            twice = [number for number, count in Counter(row.id for row in rows).items() if count > 1]
            if twice:
                raise DataError(
                    f"annotations '{annotations}': {key} has ids twice: {first_names(twice)}; ids must be distinct"
                )
        if not document.images:
            raise DataError(f"annotations '{annotations}' have no images; give a COCO instances file with some")
        if not images.is_dir():
            raise DataError(f"image folder '{images}' does not exist; give the folder of the images in '{annotations}'")
        entries = tuple(
            CocoImage(image.id, path=images / image.file_name, width=image.width, height=image.height)
            for image in sorted(document.images, key=lambda image: image.id)
        )
        category_ids, class_of = _match_categories(annotations, document, classes, given=categories or {})
        truth = _truth(annotations, document, class_of)
        missing = [entry.path.name for entry in entries if not is_file(entry.path)]
        if missing:
            raise DataError(
                f"{len(missing)} of the {len(entries)} images in '{annotations}' are not in '{images}': "
                f"{first_names(missing)}; give the folder that has them, or annotations of these images only"
            )
        return cls(annotations, classes, category_ids, images=entries, truth=truth)

    @classmethod
    def unannotated(cls, images: Path | str, classes: Sequence[str]) -> CocoDataset:
        """The images of a folder or a ``.txt`` list, without boxes; raises DataError if there are none."""
        return cls.of_files(find_images(images), classes, Path(images))

    @classmethod
    def of_files(cls, files: Sequence[Path | str], classes: Sequence[str], source: Path | str) -> CocoDataset:
        """A data set of image files, at least one, without boxes; messages show ``source`` as their folder."""
        entries = tuple(CocoImage(number, path=Path(path), width=0, height=0) for number, path in enumerate(files, 1))
        none: NDArray[np.int64] = np.zeros(0, np.int64)
        truth = GroundTruth(none, classes=none, boxes=np.zeros((0, 4)), areas=np.zeros(0), crowd=np.zeros(0, bool))
        return cls(Path(source), tuple(classes), tuple(range(1, 1 + len(classes))), images=entries, truth=truth)

    @property
    def annotated(self) -> bool:
        return len(self.truth) > 0

    @property
    def has_masks(self) -> bool:
        """Whether each box has a mask."""
        return self.annotated and self.truth.segmentations is not None

    @property
    def has_keypoints(self) -> bool:
        """Whether each box has keypoints."""
        return self.annotated and self.truth.keypoints is not None

    @property
    def has_rotated_boxes(self) -> bool:
        """Whether each box has four corners."""
        return self.annotated and self.truth.corners is not None

    def check_masks(self) -> None:
        """Raises DataError: the mask of a box is neither polygons nor run lengths of its image."""
        if self._masks_problem:
            raise DataError(self._masks_problem)

    @cached_property
    def _masks_problem(self) -> str:
        """The problem of the first invalid mask; empty if all are valid. The masks are read once."""
        sizes = {image.id: (image.width, image.height) for image in self.images}
        masks = () if self.truth.segmentations is None else self.truth.segmentations
        for image_id, mask in zip(self.truth.image_ids.tolist(), masks, strict=True):
            if problem := problem_of(mask, *sizes[image_id]):
                return (
                    f"annotations '{self.annotations}': a segmentation of image {image_id} {problem}; give polygons or "
                    "run lengths of the image, in COCO's format"
                )
        return ""

    def first(self, count: int) -> CocoDataset:
        """At most ``count`` of the images, evenly spaced, with their boxes; errors as in :meth:`of`."""
        return self.of(evenly(self.images, count))

    def of(self, images: Sequence[CocoImage]) -> CocoDataset:
        """The data set of these images and their boxes. Raises DataError: none of them has a box, but other images
        have."""
        kept = np.isin(self.truth.image_ids, [image.id for image in images])
        if self.annotated and not kept.any():
            raise DataError(f"none of {len(images)} images of '{self.annotations}' has a box: score more of them")
        arrays: dict[str, Any] = {
            name: None if array is None else array[kept] for name, array in vars(self.truth).items()
        }
        ordered = tuple(sorted(images, key=lambda image: image.id))
        return replace(self, images=ordered, truth=GroundTruth(**arrays))


Id = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Name = Annotated[str, BeforeValidator(lambda value: str(value) if isinstance(value, int) else value)]
Coordinate = Annotated[float, Field(ge=-_FARTHEST, le=_FARTHEST, allow_inf_nan=False)]
Side = Annotated[int, Field(ge=0, lt=2**31)]


@dataclass(frozen=True)
class _Image:
    id: Id
    file_name: Name
    width: Side
    height: Side


@dataclass(frozen=True)
class _Annotation:
    image_id: Id
    category_id: Id
    bbox: tuple[Coordinate, Coordinate, Coordinate, Coordinate]
    area: float | None = None
    iscrowd: int | None = 0
    segmentation: Any = None
    keypoints: list[Coordinate] | None = None


@dataclass(frozen=True)
class _Category:
    id: Id
    name: Name


@dataclass(frozen=True)
class _Document:
    """The keys that are read from an instances file."""

    images: list[_Image]
    annotations: list[_Annotation]
    categories: list[_Category]


def _match_categories(
    path: Path, document: _Document, classes: tuple[str, ...], given: Mapping[str, str]
) -> tuple[tuple[int, ...], dict[int, int]]:
    """The category id of each class, and the class of each category id whose boxes count."""
    names = [category.name for category in document.categories]
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise DataError(f"annotations '{path}' have categories twice: {first_names(twice)}; names must be distinct")
    ids = {category.name: category.id for category in document.categories}
    used = {annotation.category_id for annotation in document.annotations}
    _check_given(path, names, classes, given=given)
    indices = {name: index for index, name in enumerate(classes)}
    target = {name: given.get(name, name if name in indices else "") for name in names}
    first: dict[str, int] = {}
    for name in names:
        if target[name]:
            first.setdefault(target[name], ids[name])
    first |= {name: ids[name] for name in classes if target.get(name) == name}
    absent = [name for name in classes if name not in first]
    extra = [name for name in names if not target[name] and name not in given and ids[name] in used]
    if OTHERS in given:
        if absent:
            warnings.warn(
                f"{len(absent)} of the {len(classes)} classes are no category of '{path}' and are not scored: "
                f"{first_names(absent)}",
                TrtdetWarning,
                stacklevel=3,
            )
            free = max([*ids.values(), 0]) + 1
            first |= {name: free + number for number, name in enumerate(absent)}
        absent, extra = [], []
    problems = []
    if absent:
        problems.append(f"{len(absent)} of the {len(classes)} classes are no category ({first_names(absent)})")
    if extra:
        problems.append(
            f"{len(extra)} of the {len(names)} categories have boxes but are no class ({first_names(extra)})"
        )
    if problems:
        raise DataError(
            f"annotations '{path}' do not match the configuration: {' and '.join(problems)}; 'classes' must name the "
            "categories exactly, in the model's order; for a model with other classes, 'trtdet eval' counts a category "
            "as a class with --categories CATEGORY=CLASS, and leaves all others out with --categories others="
        )
    unknown = used - set(ids.values())
    if unknown:
        raise DataError(
            f"annotations '{path}' have boxes of category ids that are not in 'categories': "
            f"{first_names(sorted(unknown))}; add the categories or drop the boxes"
        )
    class_of = {ids[name]: indices[counted_as] for name, counted_as in target.items() if counted_as}
    return tuple(first[name] for name in classes), class_of


def _check_given(path: Path, names: list[str], classes: tuple[str, ...], given: Mapping[str, str]) -> None:
    for name, counted_as in given.items():
        if name not in names and name != OTHERS:
            raise DataError(
                f"--categories {name}={counted_as}: annotations '{path}' have no category '{name}'; they have "
                f"{first_names(names)}"
            )
        if counted_as and (counted_as not in classes or name == OTHERS):
            raise DataError(
                f"--categories {name}={counted_as}: '{counted_as}' must be one of the model's classes "
                f"({first_names(list(classes))}), or nothing to leave the boxes out"
            )


def _truth(path: Path, document: _Document, class_of: Mapping[int, int]) -> GroundTruth:
    annotations = document.annotations
    if not annotations:
        raise DataError(f"annotations '{path}' have no boxes, so nothing can be scored; give annotated images")
    strangers = sorted({annotation.image_id for annotation in annotations} - {image.id for image in document.images})
    if strangers:
        raise DataError(
            f"annotations '{path}' have boxes on {len(strangers)} image ids that are not in 'images': "
            f"{first_names(strangers)}; add the images or drop the boxes"
        )
    annotations = [annotation for annotation in annotations if annotation.category_id in class_of]
    if not annotations:
        raise DataError(f"annotations '{path}' have no boxes of the model's classes: leave fewer categories out")
    boxes = np.array([annotation.bbox for annotation in annotations], np.float64)
    areas = np.array([annotation.area for annotation in annotations], np.float64)  # NaN for None
    segmentations = None
    if all(annotation.segmentation for annotation in annotations):
        segmentations = np.empty(len(annotations), object)  # an array of lists would become one of numbers
        for row, annotation in enumerate(annotations):
            segmentations[row] = annotation.segmentation
    lengths = {len(annotation.keypoints or ()) for annotation in annotations}
    count = lengths.pop() if len(lengths) == 1 else 0
    keypoints = None
    if count and count % 3 == 0:
        keypoints = np.array([annotation.keypoints for annotation in annotations], np.float64).reshape(
            -1, count // 3, 3
        )
    return GroundTruth(
        image_ids=np.array([annotation.image_id for annotation in annotations], np.int64),
        classes=np.array([class_of[annotation.category_id] for annotation in annotations], np.int64),
        boxes=boxes,
        areas=np.where(np.isfinite(areas), areas, boxes[:, 2] * boxes[:, 3]),
        crowd=np.array([bool(annotation.iscrowd) for annotation in annotations], bool),
        segmentations=segmentations,
        keypoints=keypoints,
    )
