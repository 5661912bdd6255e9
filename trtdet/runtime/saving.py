"""Writes predictions as pictures, videos and JSON lines while the detector runs on."""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Callable, Iterable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

from trtdet.data import IMAGE_SUFFIXES
from trtdet.data.ahead import ahead, cores
from trtdet.errors import ConfigError, OutputError, TrtdetWarning
from trtdet.files import NewFiles, writing
from trtdet.runtime.prediction import Prediction, encoded
from trtdet.runtime.sources import VIDEO_SUFFIXES

DETECTIONS = "detections.jsonl"

_RATE = 25.0
"""Frames per second of a video that does not state its own."""

_FOURCC = "mp4v"
"""MPEG-4 part 2: every build of OpenCV encodes it."""


@dataclass(frozen=True)
class Saved:
    """Files written by :func:`save_predictions`."""

    detections: Path
    """JSON lines, one for each image or frame, in their order."""
    pictures: tuple[Path, ...]
    videos: tuple[Path, ...]


def save_predictions(
    predictions: Iterable[Prediction], output: Path | str, each: Callable[[Prediction], None] = lambda prediction: None
) -> Saved:
    """Writes a picture for each image, a video for each video, and ``detections.jsonl``.

    Drawing and encoding run in threads, so that the detector is not kept waiting. Videos (MPEG-4 in ``.mp4``) have the
    rate and the size of their source, of odd sizes one pixel more; those of cameras and live streams keep time by
    repeating or leaving out frames. All outputs appear together when they are complete. What is complete when the
    predictions fail or are stopped is kept: pictures, ``NAME.partial.mp4`` and ``detections.partial.jsonl``, of live
    sources under its own name.

    Args:
        predictions: such as ``detector.predict(source, stream=True)``; they are not kept in memory.
        output: a folder, or a ``.jsonl`` file if the lines alone are to be written; see
            :meth:`trtdet.Prediction.to_dict` for a line.
        each: called with each prediction when it is written.

    Raises:
        ConfigError: the folder is that of the images, which pictures would replace.
        OutputError: the folder cannot be written. What the predictions raise.
    """
    output = Path(output)
    lines_alone = output.suffix.lower() == ".jsonl"
    if output.suffix.lower() in (*VIDEO_SUFFIXES, *IMAGE_SUFFIXES, ".json"):
        raise ConfigError(f"'{output}' is named like one file; give a folder, or FILE.jsonl for the lines alone")
    with ExitStack() as stack:
        stack.callback(getattr(predictions, "close", lambda: None))
        target = output if lines_alone else output / DETECTIONS
        new = stack.enter_context(NewFiles(target))
        lines = _Lines(new, target, stack)
        drawing = None if lines_alone else _Drawing(new, output, stack)
        try:
            tasks = (_Task(one, new, None if drawing is None else drawing.place(one)) for one in predictions)
            with closing(ahead(tasks, _Task.work, workers=cores(), most=2 * cores())) as worked:
                for task in worked:
                    lines.write(task)
                    if drawing is not None:
                        drawing.write(task)
                    each(task.prediction)
        except OutputError:
            raise
        except BaseException:
            _keep(new, lines, drawing)
            raise
        videos = drawing.finish() if drawing is not None else ()
        detections = lines.finish()
        _put(new, detections, drawing)
        return Saved(detections, pictures=tuple(drawing.pictures) if drawing is not None else (), videos=videos)


def _keep(new: NewFiles, lines: _Lines, drawing: _Drawing | None) -> None:
    """Keeps the outputs so far, under names that mark them as partial."""
    if lines.count:
        live = lines.live
        videos = drawing.finish(partial=not live) if drawing is not None else ()
        detections = lines.finish(partial=not live)
        places = ", ".join(f"'{place}'" for place in (*videos, detections))
        _put(new, detections, drawing)
        warnings.warn(f"ended after {lines.count} images or frames, which are in {places}", TrtdetWarning, stacklevel=3)


def _put(new: NewFiles, detections: Path, drawing: _Drawing | None) -> None:
    places = [detections] if drawing is None else [*drawing.pictures, *drawing.videos, detections]
    new.put(place.name for place in places)


@dataclass
class _Task:
    """A prediction, and what the threads that draw and encode it make of it."""

    prediction: Prediction
    new: NewFiles
    place: Path | None
    """Path of its picture or video; None if nothing is drawn."""
    line: bytes = b""
    frame: NDArray[np.uint8] | None = None
    """The drawn frame of a video, uint8 (H, W, 3), BGR, with even sides; None for images."""

    def work(self) -> _Task:
        self.line = json.dumps(self.prediction.to_dict()).encode() + b"\n"
        if self.place is not None and self.prediction.seconds is None:
            picture = encoded(self.prediction.plot(), self.place.suffix, f"'{self.place}'")
            staged = self.new.place(self.place.name)
            with writing(self.place):
                staged.write_bytes(picture)
        elif self.place is not None:
            self.frame = _even(self.prediction.plot()[..., ::-1])
        return self


def _even(picture: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The picture with its last row and column repeated where their number is odd: videos store colour at half the
    resolution."""
    height, width = picture.shape[:2]
    repeated = cv2.copyMakeBorder(picture, 0, height % 2, 0, width % 2, cv2.BORDER_REPLICATE)
    return np.asarray(repeated, np.uint8)


class _Lines:
    """The file of JSON lines."""

    def __init__(self, new: NewFiles, target: Path, stack: ExitStack) -> None:
        self._new, self._target = new, target
        self._staged = new.place(target.name)
        with writing(target):
            # Without a buffer, close() does not repeat a failed write.
            self._stream = stack.enter_context(self._staged.open("wb", buffering=0))
        self.count = self._size = 0
        self.live = True
        """Whether all lines are from cameras or live streams."""

    def write(self, task: _Task) -> None:
        written = 0
        with writing(self._target):
            while written < len(task.line):  # a disk that becomes full writes only a part
                written += self._stream.write(task.line[written:])
        self._size += len(task.line)
        self.count += 1
        self.live &= task.prediction.path is None and task.prediction.seconds is not None

    def finish(self, partial: bool = False) -> Path:
        with writing(self._target):
            self._stream.truncate(self._size)  # an interrupt can leave a part of a line
            self._stream.close()
            return _moved(self._new, self._staged, self._target, partial=partial)


def _moved(new: NewFiles, staged: Path, target: Path, partial: bool) -> Path:
    """The target of a finished file; with ``partial``, file and target get ``.partial`` into their names."""
    if partial:
        target = target.with_name(f"{target.stem}.partial{target.suffix}")
        staged.rename(new.place(target.name))
    return target


class _Drawing:
    """The pictures and videos in a folder."""

    def __init__(self, new: NewFiles, folder: Path, stack: ExitStack) -> None:
        self._new, self._folder = new, folder
        stack.callback(self._close)
        self._taken: set[str] = set()
        self._place: Path | None = None
        self._writer: _VideoWriter | None = None
        self.pictures: list[Path] = []
        self.videos: list[Path] = []

    def place(self, prediction: Prediction) -> Path:
        """Place of the next prediction's picture or video; equal names are numbered."""
        path, video = prediction.path, prediction.seconds is not None
        if self._place is not None and video and prediction.frame > 0:
            return self._place
        if path is not None and path.parent.resolve() == self._folder.resolve():
            raise ConfigError(
                f"the pictures of '{path}' would be written beside it and could replace images",
                "choose another folder with -o",
            )
        stem = ("video" if video else "image") if path is None else path.stem
        suffix = ".mp4" if video else ".jpg"
        names = (f"{stem}{'' if number == 1 else f'-{number}'}{suffix}" for number in itertools.count(1))
        name = next(name for name in names if name.lower() not in self._taken)
        self._taken.add(name.lower())
        self._place = self._folder / name
        return self._place

    def write(self, task: _Task) -> None:
        if task.place is None or task.frame is None:
            self.pictures += [task.place] if task.place is not None else []
            return
        if self._writer is None or self._writer.target != task.place:
            self._put(partial=False)
            self._writer = _VideoWriter(self._new, task.place, task.frame, prediction=task.prediction)
        self._writer.write(task.frame, task.prediction)

    def finish(self, partial: bool = False) -> tuple[Path, ...]:
        """Completes the last video, and returns all."""
        self._put(partial)
        return tuple(self.videos)

    def _put(self, partial: bool) -> None:
        if self._writer is not None:
            self.videos.append(self._writer.finish(partial))
            self._close()

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class _VideoWriter:
    """One video file."""

    def __init__(self, new: NewFiles, target: Path, first: NDArray[np.uint8], prediction: Prediction) -> None:
        self._new, self.target = new, target
        self._size = first.shape[1], first.shape[0]
        self._rate = prediction.rate or 0.0
        self._live = prediction.path is None
        if not 0 < self._rate <= 1000:
            warnings.warn(
                f"the source of '{target}' does not state its frame rate; it is written with {_RATE:.0f} a second",
                TrtdetWarning,
                stacklevel=2,
            )
            self._rate = _RATE
        self._last, self._count = first, 0
        self._staged = new.place(target.name)
        self._encoder = cv2.VideoWriter(str(self._staged), cv2.VideoWriter.fourcc(*_FOURCC), self._rate, self._size)
        if not self._encoder.isOpened():
            self.close()
            raise OutputError(
                f"'{target}' cannot be written: OpenCV here encodes no MPEG-4 video of {self._size[0]} x "
                f"{self._size[1]} pixels",
                "pip install opencv-python-headless, or give -o FILE.jsonl",
            )

    def write(self, frame: NDArray[np.uint8], prediction: Prediction) -> None:
        if (frame.shape[1], frame.shape[0]) != self._size:  # OpenCV silently drops frames of another size
            frame = np.asarray(cv2.resize(frame, self._size, interpolation=cv2.INTER_AREA), np.uint8)
        repeats = 0
        if self._live and prediction.seconds is not None:
            due = round(prediction.seconds * self._rate) - self._count
            if due < 0:
                return
            repeats = due
        for picture in (*[self._last] * repeats, frame):
            self._encoder.write(picture)
            self._count += 1
        self._last = frame

    def finish(self, partial: bool) -> Path:
        """Completes the file. Raises OutputError if frames are missing, which OpenCV does not report."""
        self._encoder.release()
        check = cv2.VideoCapture(str(self._staged))
        written = round(check.get(cv2.CAP_PROP_FRAME_COUNT))
        check.release()
        if written < self._count:
            raise OutputError(
                f"'{self.target}' cannot be written: {max(written, 0)} of {self._count} frames arrived",
                "free some space, or choose another place with -o",
            )
        return _moved(self._new, self._staged, self.target, partial=partial)

    def close(self) -> None:
        self._encoder.release()
