"""Images and annotations from disk: find them, stream them in batches, read COCO.

Nothing here holds more than a few decoded images, however many there are.
"""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from trtdet.config import InputConfig
from trtdet.errors import DataError, TrtdetWarning
from trtdet.images import Placement, preprocess, read_image

IMAGE_SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
"""What ``find_images`` takes for an image, in any case."""

_MOST_BAD = 0.1
"""Share of unreadable images above which a set is refused rather than thinned out."""


def find_images(source: Path, root: Path | None = None) -> tuple[Path, ...]:
    """The images of a folder, or those that a list names.

    Args:
        source: a folder, whose own images are taken sorted by name (folders in it are not entered); or a
            ``.txt`` list of one file name a line, kept in its order, in which blank lines and lines starting
            with ``#`` say nothing.
        root: the folder that the names of a list are relative to; None is the folder of the list.

    Raises:
        DataError: the source does not exist or has no images, or files of the list are missing.
    """
    source = Path(source)
    if source.is_dir():
        return _folder_images(source)
    if not source.exists():
        raise DataError(f"image source '{source}' does not exist; give a folder of images or a .txt list of file names")
    if source.suffix.lower() != ".txt":
        raise DataError(f"image source '{source}' is a {source.suffix or 'plain'} file; give a folder or a .txt list")
    try:
        lines = [line.strip() for line in source.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"image list '{source}' cannot be read: {error}; write one file name a line, in UTF-8"
        ) from None
    names = [line for line in lines if line and not line.startswith("#")]
    if not names:
        raise DataError(f"image list '{source}' names no file; write one file name a line")
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise DataError(f"image list '{source}' names {len(twice)} files twice: {_first(twice)}; name each once")
    folder = source.parent if root is None else Path(root)
    if not folder.is_dir():
        raise DataError(f"folder '{folder}' for the names in '{source}' does not exist; give the folder that has them")
    paths = tuple(folder / name for name in names)
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise DataError(
            f"{len(missing)} of {len(paths)} files named in '{source}' are not in '{folder}': "
            f"{_first(missing)}; give the folder that has them as the root of the list"
        )
    return paths


def _folder_images(folder: Path) -> tuple[Path, ...]:
    files = sorted((entry for entry in folder.iterdir() if entry.is_file()), key=lambda entry: entry.name)
    images = tuple(file for file in files if file.suffix.lower() in IMAGE_SUFFIXES)
    if images:
        return images
    found = [
        f"{count} {suffix or 'without suffix'}" for suffix, count in Counter(f.suffix for f in files).most_common()
    ]
    folders = sum(entry.is_dir() for entry in folder.iterdir())
    if folders:
        found.append(f"{folders} folders, which are not entered")
    raise DataError(
        f"folder '{folder}' has no images, it has {', '.join(found) or 'nothing'}; "
        f"allowed suffixes are {', '.join(IMAGE_SUFFIXES)}"
    )


def _first(names: Sequence[object], count: int = 3) -> str:
    shown = ", ".join(str(name) for name in names[:count])
    return f"{shown}, ..." if len(names) > count else shown


def content_hash(paths: Sequence[Path]) -> str:
    """SHA-256, in hexadecimal, over the names (without folders) and the bytes of files, in the order given.

    Raises:
        DataError: a file cannot be read.
    """
    digest = hashlib.sha256()
    for path in paths:
        try:
            name = path.name.encode("utf-8", "surrogateescape")
            # Lengths keep two sets apart whose names and bytes only join to the same stream.
            digest.update(len(name).to_bytes(8, "little") + name + path.stat().st_size.to_bytes(8, "little"))
            with path.open("rb") as file:
                while chunk := file.read(1 << 20):
                    digest.update(chunk)
        except OSError as error:
            raise DataError(f"'{path}' cannot be read: {error.strerror or error}; check the file") from None
    return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class Batch:
    """Up to ``batch_size`` images as the network takes them; the last batch of a pass may be smaller."""

    images: NDArray[np.float32]
    """float32 (B, 3, h, w)."""
    placements: tuple[Placement, ...]
    paths: tuple[Path, ...]
    indices: tuple[int, ...]
    """Positions of the images in the stream's ``paths``."""

    def __len__(self) -> int:
        return len(self.paths)


@dataclass(frozen=True)
class _Loaded:
    tensor: NDArray[np.float32]
    placement: Placement
    low: int
    high: int
    constant: bool


class ImageStream:
    """Batches of images, decoded ahead in threads and in the order given; every iteration is a new pass.

    At most ``2 * workers`` images and one batch are in memory. Ending a pass early, by an exception,
    ``break`` or Ctrl-C, waits only for images that are being decoded at that moment.

    Args:
        paths: the images.
        config: how they become the network's input.
        batch_size: images a batch.
        workers: threads that decode.
        on_bad: ``skip`` leaves an unreadable image out with a TrtdetWarning that names it, unless over 10 %
            of all are unreadable; ``raise`` stops at the first one.

    Raises:
        DataError: (when iterating) an image, or too many images, cannot be read.
        ValueError: ``batch_size`` or ``workers`` is below 1.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        config: InputConfig,
        *,
        batch_size: int = 1,
        workers: int = 2,
        on_bad: Literal["skip", "raise"] = "skip",
    ) -> None:
        if batch_size < 1 or workers < 1:
            raise ValueError(f"batch_size and workers must be at least 1, got {batch_size} and {workers}")
        self.paths = tuple(Path(path) for path in paths)
        self.config = config
        self.batch_size = batch_size
        self.workers = workers
        self.on_bad = on_bad
        self._reset()

    def _reset(self) -> None:
        self._skipped: list[tuple[Path, str]] = []
        self._constant: list[Path] = []
        self._read = 0
        self._low, self._high = 255, 0

    @property
    def skipped(self) -> tuple[tuple[Path, str], ...]:
        """The images that the latest pass left out so far, each with the reason."""
        return tuple(self._skipped)

    @property
    def constant(self) -> tuple[Path, ...]:
        """The images that the latest pass has read so far whose pixels are all equal."""
        return tuple(self._constant)

    @property
    def pixel_range(self) -> tuple[int, int]:
        """The lowest and the highest 8-bit value in all that the latest pass has read so far.

        Raises:
            DataError: nothing has been read yet.
        """
        if not self._read:
            raise DataError("no image has been read yet, so there are no pixel statistics; iterate the stream first")
        return self._low, self._high

    def check_pixels(self) -> None:
        """Checks, after a pass, that the images can be what they should be: pictures with values of 0 to 255.

        Warns (TrtdetWarning) where some images are constant.

        Raises:
            DataError: every image is constant, or no pixel of any image exceeds 1, as where values of 0 to 1
                were saved; or nothing has been read.
        """
        low, high = self.pixel_range
        if len(self._constant) == self._read:
            raise DataError(
                f"each of the {self._read} images has a single colour "
                f"({_first([p.name for p in self._constant])}), expected pictures; check how they were made"
            )
        if high <= 1:
            raise DataError(
                f"all pixels of the {self._read} images lie in {low}..{high}, expected 0..255: they look as "
                "if scaled to 0..1 before they were saved; save them as 8-bit images (first: "
                f"{_first([p.name for p in self.paths], 1)})"
            )
        if self._constant:
            warnings.warn(
                f"{len(self._constant)} of {self._read} images have a single colour: "
                f"{_first([p.name for p in self._constant], 10)}; they add nothing and may be damaged",
                TrtdetWarning,
                stacklevel=2,
            )

    def __iter__(self) -> Iterator[Batch]:
        self._reset()
        pool = ThreadPoolExecutor(self.workers, thread_name_prefix="trtdet-decode")
        try:
            yield from self._batches(pool)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _batches(self, pool: ThreadPoolExecutor) -> Iterator[Batch]:
        ahead: deque[tuple[int, Future[_Loaded]]] = deque()
        upcoming = iter(enumerate(self.paths))
        loaded: list[tuple[int, _Loaded]] = []
        while True:
            # The length of this queue is what bounds the memory.
            while len(ahead) < 2 * self.workers and (item := next(upcoming, None)) is not None:
                ahead.append((item[0], pool.submit(_load, item[1], self.config)))
            if not ahead:
                break
            index, future = ahead.popleft()
            try:
                image = future.result()
            except DataError as error:
                self._reject(self.paths[index], error)
                continue
            self._note(self.paths[index], image)
            loaded.append((index, image))
            if len(loaded) == self.batch_size:
                batch = self._batch(loaded)
                loaded = []  # before the pause, so that the batch is not held twice
                yield batch
        if loaded:
            yield self._batch(loaded)

    def _reject(self, path: Path, error: DataError) -> None:
        if self.on_bad == "raise":
            raise error
        self._skipped.append((path, str(error)))
        bad, total = len(self._skipped), len(self.paths)
        if bad > _MOST_BAD * total:
            raise DataError(
                f"{bad} of {total} images cannot be read so far, allowed are {_MOST_BAD:.0%}: "
                f"{_first([p.name for p, _ in self._skipped])}; the first: {self._skipped[0][1]}"
            )
        warnings.warn(f"skipped: {error}", TrtdetWarning, stacklevel=4)

    def _note(self, path: Path, image: _Loaded) -> None:
        self._read += 1
        self._low, self._high = min(self._low, image.low), max(self._high, image.high)
        if image.constant:
            self._constant.append(path)

    def _batch(self, loaded: list[tuple[int, _Loaded]]) -> Batch:
        indices = tuple(index for index, _ in loaded)
        return Batch(
            images=np.stack([image.tensor for _, image in loaded]),
            placements=tuple(image.placement for _, image in loaded),
            paths=tuple(self.paths[index] for index in indices),
            indices=indices,
        )


def _load(path: Path, config: InputConfig) -> _Loaded:
    pixels = read_image(path)
    tensor, placement = preprocess(pixels, config)
    # The first row decides nearly always, so the whole image is rarely compared.
    constant = bool((pixels[0] == pixels[0, 0]).all()) and bool((pixels == pixels[0, 0]).all())
    return _Loaded(tensor, placement, int(pixels.min()), int(pixels.max()), constant)


@dataclass(frozen=True)
class CocoImage:
    """An image of a COCO data set; width and height in pixels as the annotations say."""

    id: int
    path: Path
    width: int
    height: int


Item = TypeVar("Item")


def evenly(items: Sequence[Item], count: int) -> tuple[Item, ...]:
    """``count`` of the items, evenly spaced over their order; all of them where there are no more."""
    count = min(count, len(items))
    return tuple(items[index * len(items) // count] for index in range(count))


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
                f"{_first(missing)}; give the folder that has them, or annotations of these images only"
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
                raise DataError(f"annotations '{path}': {key} has ids twice: {_first(twice)}; ids must be distinct")
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
        raise DataError(f"annotations '{path}' have categories twice: {_first(twice)}; names must be distinct")
    ids = {str(category["name"]): int(category["id"]) for category in document["categories"]}
    used = {annotation["category_id"] for annotation in document["annotations"]}
    absent = [name for name in classes if name not in ids]
    extra = [name for name in names if name not in classes and ids[name] in used]
    if absent or extra:
        said = []
        if absent:
            said.append(f"{len(absent)} of the {len(classes)} classes are no category ({_first(absent)})")
        if extra:
            said.append(f"{len(extra)} of the {len(names)} categories have boxes but are no class ({_first(extra)})")
        raise DataError(
            f"annotations '{path}' do not match the configuration: {' and '.join(said)}; 'classes' must "
            "name the categories exactly, in the model's order"
        )
    unknown = used - set(ids.values())
    if unknown:
        raise DataError(
            f"annotations '{path}' have boxes of category ids that are not in 'categories': "
            f"{_first(sorted(unknown))}; add the categories or drop the boxes"
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
            f"{_first(strangers)}; add the images or drop the boxes"
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
