"""Sources of a detector: files, folders, lists, arrays, videos and cameras, read as frames of pixels."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from trtdet.data import find_images
from trtdet.data.images import decode_image, picture_pixels, read_image
from trtdet.errors import DataError
from trtdet.options import path_of

Color = Literal["rgb", "bgr"]
"""The order of an array's channels; OpenCV's functions give ``bgr``."""

VIDEO_SUFFIXES = (".avi", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".webm", ".wmv")

_ADDRESSES = ("rtsp://", "rtsps://", "http://", "https://", "tcp://", "udp://")


@dataclass(frozen=True, eq=False)
class Frame:
    """An image to detect on, decoded when ``read`` is called."""

    read: Callable[[], NDArray[np.uint8]]
    """Gives uint8 (H, W, 3), 0..255; raises DataError if the image cannot be read."""
    color: Color = "rgb"
    """The order of the channels that ``read`` gives: converting a video costs more than reading it the other way."""
    path: Path | None = None
    """Path of the image or video file; None for arrays, bytes, cameras and streams."""
    index: int = 0
    """Index of the frame in its video, from 0."""
    seconds: float | None = None
    """Time from the beginning of the video to this frame, by the video's own clock; for cameras and live streams by the
    clock of this machine; None for images."""
    rate: float | None = None
    """Frames per second that the video states, 0 if it states none; None for images."""

    @property
    def live(self) -> bool:
        """Whether the frame is of a camera or a stream."""
        return self.seconds is not None and self.path is None


def frames(source: Any, color: Color | None = None) -> Iterator[Frame]:
    """The frames of a source, in its order.

    Args:
        source: the path of an image, a folder, a ``.txt`` list or a video; a pattern with ``*``, ``?`` or ``[``; the
            address of a stream (``rtsp://``, ``http://``); the number of a camera; the bytes of an image file; a
            picture of Pillow; an array, uint8 (H, W, 3) or grey (H, W); or any iterable of these.
        color: the order of an array's channels, which must be given for arrays of three channels.

    Raises:
        DataError: there is no such file, stream or camera, or it is not an image.
    """
    if isinstance(source, str | Path):
        for one in expanded(str(source)):
            yield from _opened(one)
    elif isinstance(source, bytes | bytearray | memoryview):
        data = bytes(source)
        yield Frame(lambda: decode_image(data))
    elif isinstance(source, Image.Image):
        yield Frame(lambda: picture_pixels(source))
    elif isinstance(source, np.ndarray):
        pixels = _of_array(source, color)
        yield Frame(lambda: pixels, color="bgr" if color == "bgr" and source.ndim == 3 else "rgb")
    elif isinstance(source, bool):
        raise DataError("the source is a truth value, not an image; give a path, an array or a camera's number")
    elif isinstance(source, int | np.integer):
        yield from _video(int(source), f"camera {source}", None)
    elif isinstance(source, Iterable):
        for one in source:
            yield from frames(one, color)
    else:
        raise DataError(
            f"a source of type {type(source).__name__} is not an image; give a path, an array, a picture of Pillow, "
            "the bytes of a file, the number of a camera, or a list of these"
        )


def expanded(name: str) -> list[Path | str]:
    """The image and video files that a name stands for; the address of a stream is itself.

    Raises:
        DataError: a pattern matches nothing, a folder has no images, or a list names missing files.
    """
    if name.lower().startswith(_ADDRESSES):
        return [name]
    try:
        path = path_of(name)
    except ValueError as error:
        raise DataError(f"{error}; give an image, a folder, a list, a video, a camera's number or an address") from None
    if path.is_dir() or (path.suffix.lower() == ".txt" and path.is_file()):
        return list(find_images(path))
    if path.exists() or not any(letter in name for letter in "*?["):
        return [path]
    matches = sorted(file for file in Path(path.anchor).glob(str(path.relative_to(path.anchor))) if file.is_file())
    if not matches:
        raise DataError(f"no file matches '{name}'; check the pattern and the current folder")
    return [file for match in matches for file in expanded(str(match))]


def is_video(path: Path) -> bool:
    return path.suffix.lower() in VIDEO_SUFFIXES and path.is_file()


def length(sources: Sequence[Path | str | int]) -> int | None:
    """Frames of expanded names and cameras, as the videos state them; None where one of them has no known end."""
    count = 0
    for source in sources:
        frames_here = 1
        if not isinstance(source, Path):
            return None
        if is_video(source):
            capture = cv2.VideoCapture(str(source))
            frames_here = round(capture.get(cv2.CAP_PROP_FRAME_COUNT))
            capture.release()
            if frames_here <= 0:
                return None
        count += frames_here
    return count


def _opened(source: Path | str) -> Iterator[Frame]:
    if isinstance(source, str):
        yield from _video(source, f"stream '{source}'", None)
    elif is_video(source):
        yield from _video(str(source), f"video '{source}'", source)
    else:
        yield Frame(partial(read_image, source), path=source)


def _of_array(array: NDArray[Any], color: Color | None) -> NDArray[np.uint8]:
    shape = f"{array.dtype} {array.shape}"
    if array.dtype != np.uint8:
        raise DataError(
            f"the array is {shape}; expected uint8 (H, W, 3) with values 0 to 255. What is prepared for the network, "
            "float32 (B, 3, H, W), goes to Detector.run()"
        )
    if array.ndim == 2:
        return np.ascontiguousarray(np.broadcast_to(array[..., None], (*array.shape, 3)))
    if array.ndim != 3 or array.shape[2] != 3 or 0 in array.shape:
        raise DataError(f"the array is {shape}; expected uint8 (H, W, 3), one image, channels last and without alpha")
    if color not in ("rgb", "bgr"):
        raise DataError(
            "the order of the array's channels is not known: give color='bgr' for what OpenCV reads, else color='rgb'"
        )
    return np.ascontiguousarray(array)


def _video(source: str | int, name: str, path: Path | None) -> Iterator[Frame]:
    capture = cv2.VideoCapture(source)
    try:
        if not capture.isOpened():
            raise DataError(f"{name} cannot be opened; check that it is there, and that OpenCV can decode it")
        live = capture.get(cv2.CAP_PROP_FRAME_COUNT) <= 0  # a camera's own clock begins anywhere
        rate, begun, index = capture.get(cv2.CAP_PROP_FPS), 0.0, 0
        while True:
            read, picture = capture.read()
            if not read:
                break
            now = time.monotonic() if live else capture.get(cv2.CAP_PROP_POS_MSEC) / 1000  # of the frame that was read
            begun = now if live and index == 0 else begun
            yield Frame(
                partial(np.asarray, picture, np.uint8), "bgr", path=path, index=index, seconds=now - begun, rate=rate
            )
            index += 1
        if index == 0:
            raise DataError(f"{name} has no frame that can be decoded; try to play it, or write it anew")
    finally:
        capture.release()
