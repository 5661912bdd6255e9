"""Calibrators for implicit quantisation in TensorRT up to 10, with trtdet's ranges or with images.

The builder calls them in the build process. TensorRT's bindings treat an exception in a calibrator as the end of the
images, and TensorRT builds without INT8 if it has no range. So the calibrators keep errors, and ``check`` raises them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtdet.backends.libraries import LIBRARIES
from trtdet.errors import BackendError, CalibrationError, ConfigError, TrtdetError, one_line

CALIBRATORS = {
    "minmax": "IInt8MinMaxCalibrator",
    "entropy": "IInt8EntropyCalibrator2",
    "percentile": "IInt8LegacyCalibrator",
}
"""TensorRT's own calibrators, by calibration rule."""

_CUTOFF = 1.0
"""Share of the largest value from which the percentile calibrator extrapolates; 1 disables that. This and the
quantile 0.9999 are from NVIDIA's BERT demo (NVIDIA/TensorRT, release/8.6, ``demo/BERT/helpers/calibrator.py``)."""

_WORDS = (
    "Calibration table does not match",
    "Could not parse the following line from the calibration cache",
    "Calibrator won't be used in explicit precision mode",
    "Calibration skipped",
    "Calibration failure occurred",
    "Init calibration params failed",
    "Building FP32 calibration engine failed",
)
"""Messages of TensorRT 8.6 when it cannot or does not calibrate."""


@dataclass(frozen=True)
class Images:
    """Images to calibrate a network on.

    Attributes:
        input: name of the network's input.
        shape: its (B, 3, H, W); B of a dynamic batch is the optimum of the calibration profile.
        batches: float32 (b, 3, H, W) with b up to B; read once, one at a time.
        upload: copies a batch (B, 3, H, W) to the device and returns its address. Each batch may use the same memory,
            as TensorRT finishes a batch before it asks for the next.
    """

    input: str
    shape: tuple[int, int, int, int]
    batches: Iterable[NDArray[np.float32]]
    upload: Callable[[NDArray[np.float32]], int]


def _base(trt: Any, rule: str) -> Any:
    try:
        return getattr(trt, CALIBRATORS[rule])
    except AttributeError:
        title = next(library.title for library in LIBRARIES if library.module == trt.__name__)
        raise BackendError(
            f"implicit quantisation is gone in {title} {trt.__version__}, it has no {CALIBRATORS[rule]}",
            "use --quantization explicit, which writes the ranges into the model and works with every version",
        ) from None


def _reason(messages: Sequence[str]) -> str:
    quoted = [line for line in messages if any(words in line for words in _WORDS)]
    return one_line(" ".join(dict.fromkeys(quoted))) if quoted else "it gave no reason"


class CacheCalibration:
    """A calibrator with a cache and without images. Raises BackendError if this version has no calibrators.

    ``text`` is the cache that :func:`trtdet.calibration.cache.write` gives for this version and
    ``EntropyCalibration2``. ``calibrator`` is for ``IBuilderConfig.int8_calibrator``; this object must outlive the
    build. ``written`` is the cache that TensorRT wrote; None before that.
    """

    def __init__(self, trt: Any, text: str) -> None:
        self.written: str | None = None
        self._read = self._images_requested = False
        base: Any = _base(trt, "entropy")
        calibration = self

        class Calibrator(base):  # type: ignore[misc]  # the base is known only at run time
            def __init__(self) -> None:
                # Not super(): the bindings find their part of the object only through the base.
                base.__init__(self)

            def get_batch_size(self) -> int:
                return 1

            def get_batch(self, names: list[str]) -> None:
                calibration._images_requested = True

            def read_calibration_cache(self) -> bytes:
                calibration._read = True
                return text.encode()

            def write_calibration_cache(self, cache: Any) -> None:
                calibration.written = bytes(cache).decode()

        self.calibrator = Calibrator()

    def check(self, built: bool, messages: Sequence[str]) -> None:
        """Checks the calibration after the build, with the build's messages, oldest first.

        If there is no engine, its error is reported elsewhere. Raises CalibrationError if TensorRT did not calibrate as
        requested; the message quotes it.
        """
        if self._images_requested:
            raise CalibrationError(
                f"TensorRT refused the ranges that it was given and asked for images instead: {_reason(messages)}",
                "calibrate again, or use --quantization explicit",
            )
        if built and not self._read:
            raise CalibrationError(
                f"TensorRT built an engine without the ranges that it was given: {_reason(messages)}",
                "a network with Q/DQ nodes needs --quantization explicit",
            )


class ImageCalibration:
    """One of TensorRT's own calibrators, with images through Polygraphy; attributes as in :class:`CacheCalibration`.

    TensorRT takes a single batch size, so a smaller batch, such as the last, is filled with copies of its own images.
    Dropping images could lose the largest activation; counting some twice changes a histogram little.

    Args:
        rule: ``minmax``, ``entropy`` or ``percentile``.
        images: the first batch is read at once.
        quantile: for ``percentile``, the share of the magnitudes inside the range, in (0, 1].

    Raises BackendError if this version has no calibrators, or Polygraphy is not installed; CalibrationError if there
    are no images, or they do not fit the network; ConfigError if TensorRT has no calibrator of that rule.
    """

    def __init__(self, trt: Any, rule: str, images: Images, quantile: float = 0.9999) -> None:
        if rule not in CALIBRATORS:
            raise ConfigError(
                f"TensorRT has no calibrator for the rule '{rule}'; allowed: {', '.join(CALIBRATORS)}",
                "--set calibration.calibrator=trtdet takes every rule",
            )
        base = _base(trt, rule)
        try:
            from polygraphy.backend.trt import Calibrator
        except ImportError as error:
            raise BackendError(
                f"TensorRT's own calibrators are fed through Polygraphy, which is not installed here ({error})",
                "pip install 'trtdet[trt]', or use --set calibration.calibrator=trtdet, which does not need it",
            ) from None
        self._images, self._uploaded, self._ended = images, 0, False
        self._failure: Exception | None = None
        batches = iter(images.batches)
        first = next(batches, None)
        if first is None:
            raise CalibrationError(
                "there is no image to calibrate on", "give a folder of images or a list of file names"
            )
        feed = self._feed(chain([self._filled(first)], map(self._filled, batches)))
        self.calibrator = Calibrator(
            feed, BaseClass=base, batch_size=images.shape[0], quantile=quantile, regression_cutoff=_CUTOFF
        )

    @property
    def written(self) -> str | None:
        cache: bytes | None = self.calibrator.cache_contents
        return None if cache is None else cache.decode()

    def check(self, built: bool, messages: Sequence[str]) -> None:
        """As :meth:`CacheCalibration.check`.

        Raises:
            CalibrationError: TensorRT did not calibrate on all images; the message quotes it.
            TrtdetError: reading the images failed with this error.
        """
        if isinstance(self._failure, TrtdetError):
            raise self._failure
        if self._failure is not None:
            raise CalibrationError(
                f"after {self._uploaded} batches the calibration images could not be given to TensorRT: "
                f"{type(self._failure).__name__}: {one_line(self._failure)}",
                "free device memory and build again",
            ) from self._failure
        if built and (not self._ended or self.written is None):
            raise CalibrationError(
                f"TensorRT built an engine without calibrating it on all images, it asked for {self._uploaded} "
                f"batches: {_reason(messages)}",
                "a network with Q/DQ nodes needs --quantization explicit",
            )

    def _feed(self, batches: Iterable[NDArray[np.float32]]) -> Iterator[dict[str, int]]:
        """The device address of each batch's copy."""
        try:
            for batch in batches:
                address = int(self._images.upload(batch))
                self._uploaded += 1
                yield {self._images.input: address}
            self._ended = True
        except Exception as error:
            # TensorRT's bindings would print it and continue as if the images had ended.
            self._failure = error

    def _filled(self, batch: NDArray[np.float32]) -> NDArray[np.float32]:
        shape = self._images.shape
        if not 0 < len(batch) <= shape[0] or batch.shape[1:] != shape[1:]:
            raise CalibrationError(
                f"a calibration batch has the shape {batch.shape}, the network takes {shape} and fewer images"
            )
        return np.ascontiguousarray(batch if len(batch) == shape[0] else np.resize(batch, shape), np.float32)
