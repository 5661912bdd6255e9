"""The detections of one image: drawn, saved, as plain values, and in the types of other libraries."""

from __future__ import annotations

import base64
import html
import inspect
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np
from numpy.typing import NDArray

from trtdet.data.images import draw
from trtdet.detection.masks import run_lengths
from trtdet.detection.placing import Placed
from trtdet.detection.rotated import corners
from trtdet.errors import DataError, OutputError, TrtdetError
from trtdet.files import write_atomically
from trtdet.runtime.sources import Color, Frame

if TYPE_CHECKING:
    import pandas
    import supervision

_WRITTEN = {".jpg": [cv2.IMWRITE_JPEG_QUALITY, 92], ".jpeg": [cv2.IMWRITE_JPEG_QUALITY, 92], ".png": [], ".webp": []}

_WIDEST = 800
"""Largest width of the picture in a notebook, in pixels."""


@dataclass(frozen=True, eq=False, repr=False)
class Prediction:
    """Detections of one image, best first; n of them.

    Attributes:
        pixels: uint8 (H, W, 3), 0..255, with the channels in the order of ``color``; :attr:`image` is in RGB.
        boxes: float32 (n, 4), x1 y1 x2 y2 in pixels of the image, clipped to it.
        scores: float32 (n,), 0..1, falling.
        classes: int32 (n,), indices into ``class_names``.
        class_names: of the detector.
        path: of the image or video file; None for arrays, bytes, cameras and streams.
        frame: index of the frame in its video, from 0.
        seconds: from the beginning of the video to the frame; None for images.
        rate: frames per second that the video states, 0 if it states none; None for images.
        skeleton: pairs of indices of keypoints that pictures join by a line.
    """

    pixels: NDArray[np.uint8]
    boxes: NDArray[np.float32]
    scores: NDArray[np.float32]
    classes: NDArray[np.int32]
    class_names: tuple[str, ...]
    parts: Placed
    path: Path | None = None
    frame: int = 0
    seconds: float | None = None
    rate: float | None = None
    skeleton: tuple[tuple[int, int], ...] = ()
    color: Color = "rgb"

    @classmethod
    def of(cls, frame: Frame, pixels: NDArray[np.uint8], **found: Any) -> Prediction:
        """The prediction of a frame; ``found`` has the other fields, of its detections."""
        place: dict[str, Any] = {"path": frame.path, "frame": frame.index, "seconds": frame.seconds, "rate": frame.rate}
        return cls(pixels, color=frame.color, **place, **found)

    @cached_property
    def image(self) -> NDArray[np.uint8]:
        """Uint8 (H, W, 3), RGB, 0..255."""
        return (
            self.pixels if self.color == "rgb" else np.asarray(cv2.cvtColor(self.pixels, cv2.COLOR_BGR2RGB), np.uint8)
        )

    @property
    def masks(self) -> NDArray[np.bool_] | None:
        """Bool (n, H, W), the pixels of each detection; None where the detector gives no masks."""
        if self.parts.masks is None:
            return None
        height, width = self.pixels.shape[:2]
        return np.stack(self.parts.masks) if self.parts.masks else np.zeros((0, height, width), np.bool_)

    @property
    def keypoints(self) -> NDArray[np.float32] | None:
        """Float32 (n, K, 3), x and y in pixels of the image and a score 0..1; None where the detector gives none."""
        return self.parts.keypoints

    @property
    def rotated_boxes(self) -> NDArray[np.float32] | None:
        """Float32 (n, 5), centre x y, width, height in pixels and the angle in radians; None where there are none."""
        return self.parts.rotated_boxes

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The class name of each detection."""
        return tuple(self.class_names[index] for index in self.classes)

    def __len__(self) -> int:
        return len(self.boxes)

    def __repr__(self) -> str:
        return f"Prediction({self})"

    def __str__(self) -> str:
        height, width = self.pixels.shape[:2]
        name = "image" if self.path is None else self.path.name
        frame = "" if self.seconds is None else f", frame {self.frame} at {self.seconds:.2f} s"
        counts = ", ".join(f"{count} {name}" for name, count in Counter(self.names).most_common(8))
        more = len(set(self.names)) - 8
        return f"{name}, {width} x {height}{frame}: {counts or 'nothing'}{', ...' if more > 0 else ''}"

    def _repr_html_(self) -> str:
        """The picture, for notebooks."""
        picture: NDArray[Any] = self.plot()
        height, width = picture.shape[:2]
        if width > _WIDEST:
            sides = _WIDEST, max(1, round(height * _WIDEST / width))
            picture = cv2.resize(picture, sides, interpolation=cv2.INTER_AREA)
        jpeg = base64.b64encode(encoded(picture, ".jpg", "the picture")).decode()
        text = html.escape(repr(self))
        return f'<figure><img alt="{text}" src="data:image/jpeg;base64,{jpeg}"><figcaption>{text}</figcaption></figure>'

    def plot(self) -> NDArray[np.uint8]:
        """A copy of the image, uint8 (H, W, 3), RGB, with the detections drawn on it."""
        overlays = self.parts.overlays(len(self), self.skeleton)
        return draw(
            self.image, self.boxes, self.scores, classes=self.classes, names=self.class_names, overlays=overlays
        )

    def save(self, path: Path | str) -> Path:
        """Writes :meth:`plot` as JPEG, PNG or WebP by the name's suffix, and returns the path.

        Raises:
            DataError: another suffix.
        OutputError: the file cannot be written, or the image is too large for its format.
        """
        path = Path(path)
        if path.suffix.lower() not in _WRITTEN:
            raise DataError(f"'{path}' has another suffix than {', '.join(_WRITTEN)}; give one of these")
        write_atomically(path, encoded(self.plot(), path.suffix.lower(), f"'{path}'"))
        return path

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON: ``image``, ``width``, ``height``, ``detections``; of videos ``frame`` and ``seconds``.

        ``image`` is the path. A detection has ``class``, ``score``, ``box`` (x1 y1 x2 y2), and what there is of
        ``mask`` (COCO's compressed run lengths, see :func:`trtdet.detection.masks.run_lengths`), ``keypoints`` (x, y
        and score in the order of their names) and ``rotated_box`` (centre x y, width, height in pixels, angle in
        radians).
        """
        height, width = self.pixels.shape[:2]
        place = {} if self.seconds is None else {"frame": self.frame, "seconds": round(self.seconds, 6)}
        detections = [
            {
                "class": self.names[i],
                "score": round(float(self.scores[i]), 5),
                "box": _rounded(self.boxes[i], 2),
                **self._parts_of(i),
            }
            for i in range(len(self))
        ]
        return {
            "image": None if self.path is None else str(self.path),
            **place,
            "width": width,
            "height": height,
            "detections": detections,
        }

    def _parts_of(self, i: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self.parts.masks is not None:
            found["mask"] = run_lengths(self.parts.masks[i])
        if self.keypoints is not None:
            found["keypoints"] = [[*_rounded(row[:2], 2), *_rounded(row[2:], 5)] for row in self.keypoints[i]]
        if self.rotated_boxes is not None:
            box = self.rotated_boxes[i]
            found["rotated_box"] = [*_rounded(box[:4], 2), *_rounded(box[4:], 5)]
        return found

    def to_coco(self, image_id: int, category_ids: Sequence[int] | None = None) -> list[dict[str, Any]]:
        """Results in COCO's format, with ``bbox`` as x y width height, ``segmentation`` and ``keypoints``.

        Args:
            image_id: of the annotations.
            category_ids: of each class of the detector; None is the class index plus 1.
        """
        ids = range(1, len(self.class_names) + 1) if category_ids is None else category_ids
        if len(ids) != len(self.class_names):
            raise DataError(f"{len(ids)} category ids were given, the detector has {len(self.class_names)} classes")
        results = []
        for i, (x1, y1, x2, y2) in enumerate(self.boxes.tolist()):
            result = {
                "image_id": image_id,
                "category_id": int(ids[int(self.classes[i])]),
                "bbox": [x1, y1, x2 - x1, y2 - y1],
                "score": float(self.scores[i]),
            }
            if self.parts.masks is not None:
                result["segmentation"] = run_lengths(self.parts.masks[i])
            if self.keypoints is not None:
                result["keypoints"] = [float(value) for value in self.keypoints[i].reshape(-1)]
            results.append(result)
        return results

    def to_pandas(self) -> pandas.DataFrame:
        """A row for each detection: class, name, score, x1, y1, x2, y2. Raises TrtdetError: pandas is not installed."""
        try:
            import pandas
        except ImportError:
            raise TrtdetError("to_pandas() needs pandas: pip install pandas") from None
        columns = {"class": self.classes, "name": self.names, "score": self.scores}
        return pandas.DataFrame({**columns, **dict(zip(("x1", "y1", "x2", "y2"), self.boxes.T, strict=True))})

    def to_supervision(self) -> supervision.Detections:
        """Boxes and masks for the package supervision, with ``class_name`` in ``data``, and ``xyxyxyxy``, float32
        (n, 4, 2), of rotated boxes. Raises TrtdetError: supervision is not installed."""
        data = {"class_name": np.array(self.names, dtype=str)}
        if self.rotated_boxes is not None:
            data["xyxyxyxy"] = corners(self.rotated_boxes)
        found: supervision.Detections = _supervision("to_supervision").Detections(
            xyxy=self.boxes,
            confidence=self.scores,
            class_id=self.classes.astype(int),
            mask=self.masks,
            data=data,
        )
        return found

    def to_supervision_keypoints(self) -> supervision.KeyPoints:
        """Keypoints for the package supervision, with ``class_name`` in ``data``.

        Raises:
            DataError: the detector gives no keypoints. TrtdetError: supervision is not installed.
        """
        if self.keypoints is None:
            raise DataError("the detector gives no keypoints; to_supervision() gives boxes and masks")
        class_of = _supervision("to_supervision_keypoints").KeyPoints
        scores = self.keypoints[..., 2]
        # Later versions have scores of detections too, and another name for those of keypoints.
        renamed = "keypoint_confidence" in inspect.signature(class_of).parameters
        found: supervision.KeyPoints = class_of(
            xy=self.keypoints[..., :2],
            class_id=self.classes.astype(int),
            data={"class_name": np.array(self.names, dtype=str)},
            **(
                {"keypoint_confidence": scores, "detection_confidence": self.scores}
                if renamed
                else {"confidence": scores}
            ),
        )
        return found


def _supervision(method: str) -> Any:
    try:
        import supervision
    except ImportError:
        raise TrtdetError(f"{method}() needs supervision: pip install supervision") from None
    return supervision


def encoded(picture: NDArray[Any], suffix: str, name: str) -> bytes:
    """A picture, uint8 (H, W, 3), RGB, as a file of that suffix. Raises OutputError: it is too large for the format."""
    valid, data = cv2.imencode(suffix, picture[:, :, ::-1], _WRITTEN[suffix])
    if not valid:
        raise OutputError(f"{name} could not be encoded as {suffix[1:]}; is the image over 65500 pixels wide or high?")
    return bytes(data)


def _rounded(values: NDArray[np.float32], digits: int) -> list[float]:
    return [round(float(value), digits) for value in values]
