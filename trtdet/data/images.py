"""Decodes images, makes them the network's input, and maps boxes back.

All results are defined exactly, because calibration, evaluation and the C++ runtime must use the same pixels.
"""

from __future__ import annotations

import colorsys
import functools
import io
import re
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import ArrayLike, NDArray
from PIL import Image

from trtdet.config import InputConfig
from trtdet.errors import DataError

_INTERPOLATION = {
    "nearest": cv2.INTER_NEAREST,
    "linear": cv2.INTER_LINEAR,
    "cubic": cv2.INTER_CUBIC,
    "area": cv2.INTER_AREA,
}

_SEEN = 0.5
"""Lowest score of a keypoint in a picture."""


@dataclass(frozen=True)
class ImageTransform:
    """Position of an image in the network's input: ``network = image * scale + pad`` on each axis, in pixels.

    The scale is exactly resized size / original size. Sizes are integers, so the scales of the two axes can differ
    slightly in a letterbox.
    """

    scale_x: float
    scale_y: float
    pad_x: int
    pad_y: int
    width: int
    """Width of the original image, in pixels."""
    height: int

    def to_image(self, boxes: ArrayLike) -> NDArray[np.float32]:
        """Converts boxes (N, 4), x1 y1 x2 y2, from pixels of the network's input to float32 in pixels of the original
        image, clipped to the image."""
        network = np.asarray(boxes, dtype=np.float32).reshape(-1, 4)
        scales, pads = self._arrays()
        ends = np.array([self.width, self.height] * 2, np.float32)
        return np.clip((network - pads) / scales, 0, ends)  # type: ignore[no-any-return]

    def to_network(self, boxes: ArrayLike) -> NDArray[np.float32]:
        """Converts boxes (N, 4), x1 y1 x2 y2, from pixels of the original image to float32 in those of the input."""
        scales, pads = self._arrays()
        return np.asarray(boxes, dtype=np.float32).reshape(-1, 4) * scales + pads

    def _arrays(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        scales = np.array([self.scale_x, self.scale_y] * 2, np.float32)
        return scales, np.array([self.pad_x, self.pad_y] * 2, np.float32)


def read_image(path: Path | str) -> NDArray[np.uint8]:
    """Decodes an image file to contiguous uint8 (H, W, 3), RGB, 0..255.

    All colour modes are converted to RGB; alpha is dropped, not blended. 16-bit grey is divided by 257, so that 65535
    becomes 255. EXIF orientation is not applied, because COCO's annotations and most labels count pixels as stored. The
    first frame of an animation is read.

    Raises:
        DataError: the file is missing, not an image, truncated, damaged, or over Pillow's limit of decoded pixels.
    """
    return _decoded(path, f"image '{path}'", "replace the file or take it out of the set")


def decode_image(data: bytes) -> NDArray[np.uint8]:
    """Decodes the content of an image file as :func:`read_image` does. Raises DataError: the bytes are not an image,
    truncated, damaged, or over Pillow's limit of decoded pixels."""
    return _decoded(io.BytesIO(data), "the image", "send a whole image file")


def picture_pixels(picture: Image.Image) -> NDArray[np.uint8]:
    """The pixels of a picture of Pillow as :func:`read_image` gives those of its file. Raises DataError: as there."""
    return _decoded(picture, "the picture", "give another one")


def _decoded(source: Path | str | io.BytesIO | Image.Image, subject: str, hint: str) -> NDArray[np.uint8]:
    try:
        with nullcontext(source) if isinstance(source, Image.Image) else Image.open(source) as image:
            image.load()
            if image.mode == "I" or image.mode.startswith("I;16"):
                wide = np.asarray(image).astype(np.int64)
                low, high = int(wide.min()), int(wide.max())
                if low < 0 or high > 65535:
                    raise DataError(f"has grey levels {low}..{high}, allowed are 0..65535; convert it to 8 or 16 bits")
                grey = ((wide + 128) // 257).astype(np.uint8)
                return np.ascontiguousarray(np.broadcast_to(grey[..., None], (*grey.shape, 3)))
            if image.mode == "F":
                raise DataError("has floating-point pixels, whose range is unknown; convert it to 8 or 16 bits")
            pixels: Image.Image = image
            if image.mode == "PA" or (image.mode == "P" and "transparency" in image.info):
                pixels = image.convert("RGBA")  # Pillow warns about transparency if it converts directly to RGB
            return np.array(pixels if pixels.mode == "RGB" else pixels.convert("RGB"), dtype=np.uint8)
    except FileNotFoundError:
        raise DataError(f"{subject} does not exist; check the path or the list that names it") from None
    except DataError as error:
        raise DataError(f"{subject} {error}") from None
    except Exception as error:  # Pillow's decoders raise many types for damaged files
        # Pillow's message contains its source, which for bytes is a memory address.
        reason = re.sub(r" (?:file )?<_io\.BytesIO[^>]*>", "", " ".join(str(error).split()))
        reason = reason.replace(f" {str(source)!r}", "").rstrip(".") or type(error).__name__
        raise DataError(f"{subject} cannot be decoded: {reason}; {hint}") from None


def preprocess(image: NDArray[np.uint8], config: InputConfig) -> tuple[NDArray[np.float32], ImageTransform]:
    """Converts an image, uint8 (H, W, 3), RGB, to the network's input, float32 (3, h, w), and its position there.

    See :func:`resize` and :func:`normalise`.

    Raises:
        DataError: the array is not uint8 (H, W, 3) or is empty.
    """
    output = np.empty((3, config.height, config.width), np.float32)
    return output, prepare(image, config, output)


def prepare(image: NDArray[np.uint8], config: InputConfig, output: NDArray[np.float32]) -> ImageTransform:
    """As :func:`preprocess`, into ``output``, float32 (3, h, w)."""
    resized, transform = resize(image, config)
    normalise(resized, transform, config, output=output)
    return transform


def resize(image: NDArray[np.uint8], config: InputConfig) -> tuple[NDArray[np.uint8], ImageTransform]:
    """Resizes an image, uint8 (H, W, 3), RGB, 0..255, for the network's input, without the border.

    Both letterboxes resize by the ratio min(h/H, w/W) to whole pixels, with halves rounded to even, and fill the rest
    with ``pad_value``. ``letterbox-topleft`` has its border at the right and the bottom, as YOLOX (Ge et al. 2021,
    arXiv:2107.08430; its code truncates instead of rounding, so a side can differ by a pixel). ``letterbox-centre`` has
    half the border on each side, and an odd pixel at the right and the bottom, as YOLOv5. ``stretch`` resizes each axis
    by its own ratio.

    Returns:
        uint8 (H', W', 3), RGB, 0..255, which is ``image`` itself if its size is right; and its position in the input.

    Raises:
        DataError: the array is not uint8 (H, W, 3) or is empty.
    """
    if image.ndim != 3 or image.shape[2] != 3 or image.dtype != np.uint8 or 0 in image.shape:
        raise DataError(
            f"preprocess got {image.dtype} {image.shape}, expected uint8 (H, W, 3) with H and W above 0; "
            "read files with trtdet.data.images.read_image"
        )
    height, width = image.shape[:2]
    new_width, new_height, left, top = config.width, config.height, 0, 0
    if config.resize != "stretch":
        ratio = min(config.height / height, config.width / width)
        new_width, new_height = max(1, round(width * ratio)), max(1, round(height * ratio))
    if config.resize == "letterbox-centre":
        left, top = (config.width - new_width) // 2, (config.height - new_height) // 2
    resized = image
    if (new_width, new_height) != (width, height):
        # Intel's IPP, in OpenCV's x86 wheels, differs by up to a grey level in cubic interpolation from OpenCV itself
        # (on other machines and in C++). The setting applies to this thread only, and takes 0.1 us.
        ipp = cv2.ipp.useIPP()
        cv2.ipp.setUseIPP(False)
        try:
            pixels = cv2.resize(image, (new_width, new_height), interpolation=_INTERPOLATION[config.interpolation])
        finally:
            cv2.ipp.setUseIPP(ipp)
        resized = np.asarray(pixels, dtype=np.uint8)
    return resized, ImageTransform(
        scale_x=new_width / width, scale_y=new_height / height, pad_x=left, pad_y=top, width=width, height=height
    )


def normalise(
    resized: NDArray[np.uint8], transform: ImageTransform, config: InputConfig, output: NDArray[np.float32]
) -> None:
    """Writes the results of :func:`resize` and the border into ``output``, the network's input.

    The output is float32 (3, h, w), with channels in ``config.color`` order and values ``(x * scale - mean) / std``.
    """
    height, width = resized.shape[:2]
    top, left = transform.pad_y, transform.pad_x
    bottom, right = top + height, left + width
    planes = cv2.split(resized)
    # A table of the 256 possible values, computed in float64, makes normalisation exact and fast.
    for plane, values, table in zip(
        planes if config.color == "rgb" else planes[::-1], output, _tables(config), strict=True
    ):
        for border in (values[:top], values[bottom:], values[top:bottom, :left], values[top:bottom, right:]):
            border[...] = table[config.pad_value]
        values[top:bottom, left:right] = cv2.LUT(plane, table)


@functools.lru_cache(maxsize=32)
def _tables(config: InputConfig) -> NDArray[np.float32]:
    """float32 (3, 256): the normalised value of each 8-bit value, one row per channel."""
    values = np.arange(256, dtype=np.float64)
    rows = [(values * config.scale - mean) / std for mean, std in zip(config.mean, config.std, strict=True)]
    return np.array(rows, dtype=np.float32)


@dataclass(frozen=True, eq=False)
class Overlay:
    """What is drawn of a detection besides its box, name and score."""

    mask: NDArray[np.bool_] | None = None
    """bool (H, W): pixels that are coloured."""
    outline: NDArray[np.float32] | None = None
    """float32 (4, 2), x y: corners of a rotated box, drawn instead of the upright one."""
    keypoints: NDArray[np.float32] | None = None
    """float32 (P, 3): x, y, and a score 0..1; those with a score under 0.5 are not drawn."""
    skeleton: tuple[tuple[int, int], ...] = ()
    """Pairs of keypoints that a line joins."""


def draw(
    image: NDArray[np.uint8],
    boxes: ArrayLike,
    scores: ArrayLike,
    classes: ArrayLike,
    names: Sequence[str],
    overlays: Sequence[Overlay] = (),
) -> NDArray[np.uint8]:
    """Draws detections on a copy of an image: box, class name and score in per cent.

    Args:
        image: uint8 (H, W, 3), RGB, as the result.
        boxes: float (N, 4), x1 y1 x2 y2 in pixels of the image.
        scores: float (N,), 0..1.
        classes: int (N,), indices into ``names``. A class has the same colour in every image.
        overlays: mask, rotated box and keypoints of each detection; empty without.
    """
    canvas = np.ascontiguousarray(image).copy()
    height, width = canvas.shape[:2]
    thickness = max(1, round((height + width) / 2 * 0.003))
    font, scale, weight = cv2.FONT_HERSHEY_SIMPLEX, max(0.35, thickness / 3), max(1, thickness - 1)
    values, indices = np.asarray(scores, np.float64).reshape(-1), np.asarray(classes).reshape(-1)
    # Worst first, so that the best detection lies on top.
    for i in np.argsort(values, kind="stable"):
        index = int(indices[i])
        name = names[index] if 0 <= index < len(names) else f"class {index}"
        # Golden-ratio steps around the hue circle separate neighbouring classes, but hues are close again after 13, 21,
        # 34 ... steps; a cycle of four tones distinguishes these.
        saturation, value = ((0.9, 1.0), (0.5, 1.0), (0.95, 0.6), (0.4, 0.7))[index % 4]
        tone = colorsys.hsv_to_rgb(index * 0.618033988749895 % 1, saturation, value)
        red, green, blue = (round(part * 255) for part in tone)
        overlay = overlays[i] if len(overlays) else Overlay()
        if overlay.mask is not None:
            canvas[overlay.mask] = canvas[overlay.mask] // 2 + np.array([red, green, blue], np.uint8) // 2
        corners = np.nan_to_num(np.asarray(boxes, dtype=np.float64).reshape(-1, 4)[i])
        x1, y1, x2, y2 = (round(float(v)) for v in np.clip(corners, 0, [width - 1, height - 1] * 2))
        if overlay.outline is None:
            cv2.rectangle(canvas, (x1, y1), (x2, y2), (red, green, blue), thickness, cv2.LINE_AA)
        _draw_lines(canvas, overlay, (red, green, blue), thickness=thickness)
        label = f"{name} {values[i] * 100:.0f}"
        (text_width, text_height), base = cv2.getTextSize(label, font, scale, weight)
        left = max(0, min(x1, width - text_width))
        bottom = y1 if y1 - text_height - base >= 0 else min(height - 1, y1 + text_height + base)
        ground = (left, bottom - text_height - base), (left + text_width, bottom)
        cv2.rectangle(canvas, *ground, (red, green, blue), cv2.FILLED)
        ink = (0, 0, 0) if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else (255, 255, 255)
        cv2.putText(canvas, label, (left, bottom - base // 2 - 1), font, scale, ink, weight, cv2.LINE_AA)
    return canvas


def _draw_lines(canvas: NDArray[np.uint8], overlay: Overlay, colour: tuple[int, int, int], thickness: int) -> None:
    """Draws a rotated box, and keypoints with their lines."""
    far = 4 * max(canvas.shape)  # OpenCV's coordinates are 16 bits, with fractions

    def pixels(points: NDArray[np.float32]) -> NDArray[np.int32]:
        return np.rint(np.clip(np.nan_to_num(points.astype(np.float64)), -far, far)).astype(np.int32)

    if overlay.outline is not None:
        cv2.polylines(canvas, [pixels(overlay.outline)], isClosed=True, color=colour, thickness=thickness)
    if overlay.keypoints is None:
        return
    places, seen = pixels(overlay.keypoints[:, :2]).tolist(), overlay.keypoints[:, 2] >= _SEEN
    for first, second in overlay.skeleton:
        if seen[first] and seen[second]:
            cv2.line(canvas, places[first], places[second], colour, thickness, cv2.LINE_AA)
    for place, visible in zip(places, seen, strict=True):
        if visible:
            cv2.circle(canvas, place, thickness + 1, (255, 255, 255), cv2.FILLED, cv2.LINE_AA)
            cv2.circle(canvas, place, thickness, colour, cv2.FILLED, cv2.LINE_AA)
