"""A detector of images: a bundle, or a model with its configuration."""

from __future__ import annotations

import itertools
import queue
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np
import onnx
from numpy.typing import NDArray

from trtdet.backends import EngineFacts, OnnxRunner, Runner, for_scores, obstacle, open_engine, side_by_side
from trtdet.backends.libraries import LIBRARIES
from trtdet.bundle import Bundle, Manifest
from trtdet.config import Config, InputConfig, KeypointsConfig, NmsConfig, NmsMode
from trtdet.data.ahead import ahead, cores
from trtdet.data.images import ImageTransform, prepare
from trtdet.detection.masks import THRESHOLD
from trtdet.detection.parts import PROTOTYPES, ROTATED_BOXES
from trtdet.detection.placing import Placed, place
from trtdet.detection.suppression import Detections, detections_of
from trtdet.errors import BackendError, ConfigError, DataError
from trtdet.passes import MASKS, Options, embedded_nms, load_model, rewrite
from trtdet.passes.nms import refused_parts
from trtdet.runtime.prediction import Prediction
from trtdet.runtime.sources import Color, Frame, frames

Runtime = Literal["auto", "engine", "onnxruntime"]
"""The file of a bundle to run: the engine if possible, else the model (``auto``); only the engine; only the model."""


@dataclass(frozen=True)
class Detector:
    """A runner with its pre-processing and NMS.

    Attributes:
        file: engine or ONNX file that runs.
        runner: runs the file; its ``run_info`` has the device, and the reason if the engine does not run.
        nms_mode: what runs NMS: a part of the graph, or the host.
        input: pre-processing.
        nms: NMS thresholds.
        logits: with ``host``, whether the model's scores are logits.
        classes: names by class index.
        batch: best number of images at a time.
        mask_threshold: probability above which a pixel belongs to a mask.
        keypoints: names and tolerances of the keypoints; None without keypoints.
    """

    file: Path
    runner: Runner
    nms_mode: NmsMode
    input: InputConfig
    nms: NmsConfig
    logits: bool
    classes: tuple[str, ...]
    batch: int = 1
    mask_threshold: float = THRESHOLD
    keypoints: KeypointsConfig | None = None

    @staticmethod
    def open(
        target: Path | str,
        config: Config | None = None,
        nms: NmsMode | Literal["auto"] = "auto",
        runtime: Runtime = "auto",
        public_key: Path | str | None = None,
    ) -> Detector:
        """Opens a bundle's folder, or an ONNX file with its configuration.

        An engine runs on a GPU that it was built for, with the library that built it. The bundle's ONNX model, the
        source of the engine, computes the same on the CPU.

        Args:
            config: required for an ONNX file, not allowed for a bundle, which has its own.
            nms: what runs the NMS of an ONNX file; ``auto`` keeps NMS in the model if it has one, else is ``host``.
            runtime: which file of a bundle runs; ``auto`` is the engine if it can run, else the model, with the reason
                in ``runner.run_info``. If an engine fails while it runs, that is an error: the model does not replace
                it.
            public_key: of a bundle, a PEM file with the public Ed25519 key that must have signed it.

        Raises:
            BundleError, ModelError, ConfigError, BackendError: the target cannot be opened or run.
        """
        target = Path(target)
        if target.is_dir():
            if config is not None:
                raise ConfigError(f"'{target}' is a bundle, which carries its own configuration; leave --config out")
            return _open_bundle(Bundle(target, public_key=public_key), nms, runtime)
        if not target.exists():
            raise ConfigError(f"'{target}' does not exist; give the folder of a bundle or an ONNX file")
        if public_key is not None:
            raise ConfigError(f"'{target}' is a model, and only bundles are signed; leave the public key out")
        if runtime == "engine":
            raise ConfigError(f"'{target}' is a model, which has no engine; give a bundle, or leave --runtime out")
        if config is None:
            raise ConfigError(
                f"'{target}' is a model, which needs --config: a YAML file or a shipped name such as yolox"
            )
        source = load_model(target, allow_quantized=True)
        own = embedded_nms(source, config) if nms == "auto" else None
        mode: NmsMode = "host" if nms == "auto" else nms
        if own is not None and not refused_parts(own.kind, config):
            mode = own.kind
        rewritten = rewrite(source, Options(config, mode, keep_embedded=own is not None))
        return Detector.running(rewritten.model, rewritten.config, mode, file=target)

    @staticmethod
    def running(
        model: onnx.ModelProto | Runner,
        config: Config,
        nms_mode: NmsMode,
        file: Path | str = "model",
        *,
        for_scores: bool = False,
    ) -> Detector:
        """The detector of a rewritten model in memory, or of a runner, with the outputs of ``nms_mode``.

        A model ``for_scores`` is loaded at its first run, as :meth:`as_written` runs it.
        """
        runner = OnnxRunner(model, written=for_scores) if isinstance(model, onnx.ModelProto) else model
        return Detector(
            file=Path(file),
            runner=runner,
            nms_mode=nms_mode,
            input=config.input,
            nms=config.nms,
            logits=config.suppresses_logits,
            classes=config.classes,
            batch=runner.batch or 1,
            keypoints=config.head.keypoints,
        )

    @property
    def has_masks(self) -> bool:
        return MASKS in self.runner.outputs or PROTOTYPES in self.runner.outputs

    @property
    def has_rotated_boxes(self) -> bool:
        return ROTATED_BOXES in self.runner.outputs

    def placed(self, detections: Detections, row: int, boxes: NDArray[np.float32], transform: ImageTransform) -> Placed:
        """Masks, keypoints and rotated boxes of image ``row`` in its picture; ``boxes`` are placed there already."""
        size = self.input.size
        return place(detections.image_parts(row), boxes, transform, size=size, threshold=self.mask_threshold)

    def as_written(self) -> Detector:
        """The detector for scores, which runs a model on the CPU node by node; see :func:`trtdet.backends.for_scores`.

        An engine is not changed.
        """
        return replace(self, runner=for_scores(self.runner))

    def __call__(self, images: NDArray[np.float32]) -> Detections:
        """Detects on a batch, float32 (B, 3, H, W), pre-processed as ``input`` says."""
        return self.suppressed(self.runner(images), self.nms)

    def run(self, images: NDArray[np.float32]) -> Detections:
        """Detects on a batch that is prepared already, with boxes in pixels of the network's input.

        Args:
            images: float32 (B, 3, H, W), as :func:`trtdet.data.images.preprocess` makes it by ``input``: resized,
                with the border, in its order of colours and normalised.

        Raises:
            DataError: the array has another type or shape.
        """
        height, width = self.input.size
        right = isinstance(images, np.ndarray) and images.dtype == np.float32 and images.ndim == 4 and len(images) > 0
        if not right or images.shape[1:] != (3, height, width):
            given = f"{images.dtype} {images.shape}" if isinstance(images, np.ndarray) else type(images).__name__
            raise DataError(
                f"the batch is {given}, expected float32 (B, 3, {height}, {width}), prepared for the network; images "
                "as they are go to Detector.predict()"
            )
        return self(images)

    @overload
    def predict(
        self, source: Any, *, color: Color | None = ..., score_threshold: float = ..., stream: Literal[False] = ...
    ) -> list[Prediction]: ...

    @overload
    def predict(
        self, source: Any, *, color: Color | None = ..., score_threshold: float = ..., stream: Literal[True]
    ) -> Generator[Prediction, None, None]: ...

    def predict(
        self, source: Any, *, color: Color | None = None, score_threshold: float = 0.25, stream: bool = False
    ) -> list[Prediction] | Generator[Prediction, None, None]:
        """Detects on images, videos or cameras, in their order. Decoding goes on ahead in threads.

        Args:
            source: the path of an image, a folder, a ``.txt`` list or a video; a pattern such as ``street/*.jpg``; the
                address of a stream (``rtsp://``, ``http://``); the number of a camera; the bytes of an image file; a
                picture of Pillow; an array, uint8 (H, W, 3) or grey (H, W); or any iterable of these.
            color: ``rgb`` or ``bgr``, the order of an array's channels; required for arrays of three channels.
            score_threshold: detections below it are left out, 0..1.
            stream: whether to give results one by one as they come, instead of a list: for videos, cameras and large
                folders, whose images do not all find room in memory.

        Raises:
            DataError: a source is not an image, does not exist, or cannot be read.
            ConfigError: the threshold is not within 0..1.
        """
        if not 0 <= score_threshold <= 1:
            raise ConfigError(f"score_threshold is {score_threshold}, allowed is 0 to 1")
        results = self._predicted(frames(source, color), score_threshold)
        return results if stream else list(results)

    def _predicted(self, images: Iterator[Frame], score_threshold: float) -> Generator[Prediction, None, None]:
        """Images are decoded in threads before the engine, NMS and results follow in a thread behind it."""
        arrays: queue.SimpleQueue[NDArray[np.float32]] = queue.SimpleQueue()  # free for reuse
        swapped = self.input.model_copy(update={"color": "bgr" if self.input.color == "rgb" else "rgb"})
        inputs = {"rgb": self.input, "bgr": swapped}

        def with_places() -> Iterator[tuple[Frame, NDArray[np.float32], int]]:
            for number, frame in enumerate(images):
                if number % self.batch == 0:
                    array = _array_of(arrays, (self.batch, 3, *self.input.size))
                yield frame, array, number % self.batch

        def prepared(place: tuple[Frame, NDArray[np.float32], int]) -> _Prepared:
            frame, array, row = place
            pixels = frame.read()
            return _Prepared(
                frame, pixels=pixels, transform=prepare(pixels, inputs[frame.color], array[row]), array=array
            )

        def batches(ready: Iterator[_Prepared]) -> Iterator[list[_Prepared]]:
            while batch := list(itertools.islice(ready, self.batch)):
                yield batch

        def run(runner: Runner, batch: list[_Prepared]) -> _Run:
            outputs = runner(batch[0].array[: len(batch)])
            arrays.put(batch[0].array)
            return batch, outputs

        def results(run: _Run) -> list[Prediction]:
            return self._results(*run, score_threshold)

        workers = cores()
        with (
            closing(ahead(with_places(), prepared, workers, most=2 * workers + self.batch)) as ready,
            closing(ahead(self._runs(batches(ready), run), results, workers=1, most=2)) as done,
        ):
            for predictions in done:
                yield from predictions

    def _runs(
        self, batches: Iterator[list[_Prepared]], run: Callable[[Runner, list[_Prepared]], _Run]
    ) -> Generator[_Run, None, None]:
        """Runs batches in their order. On the CPU, several run at a time after the first, as a thread alone wastes
        nothing on waiting for others; those of a live source do not, so that each is done as soon as possible."""
        live = False
        for batch in itertools.islice(batches, _ALONE):
            live = batch[0].frame.live
            yield run(self.runner, batch)
        batch = next(batches, [])
        if not batch:
            return
        rest = itertools.chain([batch], batches)
        yield from map(partial(run, self.runner), rest) if live else side_by_side(self.runner, run, rest)

    def _results(
        self, batch: list[_Prepared], outputs: Mapping[str, NDArray[Any]], score_threshold: float
    ) -> list[Prediction]:
        # Boxes below the threshold suppress none above it: NMS on the host skips them. over() applies the exact bound.
        bound = max(self.nms.score_threshold, score_threshold * (1 - 1e-5))
        nms = self.nms.model_copy(update={"score_threshold": bound})
        detections = self.suppressed(outputs, nms).over(score_threshold)
        predictions = []
        for row, one in enumerate(batch):
            boxes, scores, classes = detections.image(row)
            inside = one.transform.to_image(boxes)
            predictions.append(
                Prediction.of(
                    one.frame,
                    one.pixels,
                    boxes=inside,
                    scores=scores,
                    classes=classes,
                    class_names=self.classes,
                    parts=self.placed(detections, row, boxes=inside, transform=one.transform),
                    skeleton=self.keypoints.skeleton if self.keypoints else (),
                )
            )
        return predictions

    def suppressed(self, outputs: Mapping[str, NDArray[Any]], nms: NmsConfig) -> Detections:
        """Detections of the model's outputs; ``nms`` applies to ``host`` only, because a graph has its own."""
        return detections_of(outputs, nms if self.nms_mode == "host" else None, logits=self.logits)


@dataclass(frozen=True, eq=False)
class _Prepared:
    """An image whose network input is a row of ``array``."""

    frame: Frame
    pixels: NDArray[np.uint8]
    transform: ImageTransform
    array: NDArray[np.float32]


_Run = tuple[list[_Prepared], dict[str, NDArray[Any]]]
"""A batch, and the outputs of the network by name."""

_ALONE = 8
"""Batches that run before several run at a time, which takes another session."""


def _array_of(arrays: queue.SimpleQueue[NDArray[np.float32]], shape: tuple[int, ...]) -> NDArray[np.float32]:
    """A used array if one is free, else a new one."""
    try:
        return arrays.get_nowait()
    except queue.Empty:
        return np.empty(shape, np.float32)


def _open_bundle(bundle: Bundle, nms: str, runtime: Runtime) -> Detector:
    manifest = bundle.manifest
    nms_mode = manifest.nms.mode
    if nms not in ("auto", nms_mode):
        raise ConfigError(
            f"bundle '{bundle.path}' was built with --nms {nms_mode}, not {nms}; build it again or leave --nms out"
        )
    engine = bundle.engine
    if engine is None and runtime == "engine":
        builders = " or ".join(row.name for row in LIBRARIES if row.makes_engine)
        raise BackendError(f"bundle '{bundle.path}' has no engine", f"build it with --backend {builders}")
    reason = ""
    if engine is not None and runtime != "onnxruntime":
        facts = EngineFacts.of(bundle)
        reason = obstacle(facts)
        if reason and runtime == "engine":
            raise BackendError(f"the engine of bundle '{bundle.path}' cannot be run here, as {reason}")
    runner: Runner
    if engine is not None and runtime != "onnxruntime" and not reason:
        file, runner = engine, open_engine(engine.read_bytes(), facts)
    elif manifest.quantization.mode == "implicit":
        raise BackendError(
            f"bundle '{bundle.path}' is quantised implicitly: INT8 is in its engine alone, which "
            + (f"cannot be run here, as {reason}" if reason else "is what --runtime onnxruntime leaves out")
            + "; with --quantization explicit the model has it too"
        )
    else:
        file, runner = bundle.model, OnnxRunner(bundle.model.read_bytes())
        if reason:
            runner.run_info = replace(runner.run_info, fallback_reason=reason)
    parts = manifest.parts
    return Detector(
        file=file,
        runner=runner,
        nms_mode=nms_mode,
        input=manifest.input.preprocess,
        nms=manifest.nms.thresholds,
        logits=manifest.nms.scores == "logits",
        classes=manifest.model.classes,
        # With a dynamic batch, an engine is fastest at the size it was optimised for; the CPU has no preference.
        batch=runner.batch or (manifest.input.shape.opt[0] if file == bundle.engine else 1),
        mask_threshold=_mask_threshold(manifest),
        keypoints=None if parts is None or parts.keypoints is None else KeypointsConfig(**parts.keypoints.settings),
    )


def _mask_threshold(manifest: Manifest) -> float:
    masks = manifest.masks if manifest.parts is None else manifest.parts.masks
    return THRESHOLD if masks is None else masks.threshold
