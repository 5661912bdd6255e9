"""TensorRT's calibrators, asked through their C++ interface as the builder asks them."""

import ctypes
from typing import Any

import numpy as np
import pytest

from trtdet.backends.tensorrt.calibrators import CALIBRATORS, CacheCalibration, ImageCalibration, Images
from trtdet.calibration.cache import read, version_number, write
from trtdet.errors import CalibrationError

pytestmark = pytest.mark.tensorrt86

SCALES = {"images": 1 / 127, "(Unnamed Layer* 3) [Shuffle]_output": 0.25, "a b: c:0": 2.0}
ALGORITHMS = {"minmax": "MINMAX_CALIBRATION", "entropy": "ENTROPY_CALIBRATION_2", "percentile": "LEGACY_CALIBRATION"}


class Asked:
    """A calibrator as the builder sees it: an object of C++ with the virtual functions of NvInfer.h in their order."""

    def __init__(self, calibrator: Any) -> None:
        # An object of the bindings is Python's header, of two words, and then a pointer to the object of C++.
        self._this = ctypes.c_void_p.from_address(id(calibrator) + 16)
        self._kept = calibrator

    def _call(self, index: int, result: Any, *arguments: Any) -> Any:
        table = ctypes.c_void_p.from_address(self._this.value or 0).value or 0
        function = ctypes.c_void_p.from_address(table + 8 * index).value or 0
        types = [type(one) for one in arguments]
        return ctypes.CFUNCTYPE(result, ctypes.c_void_p, *types)(function)(self._this, *arguments)

    def batch_size(self) -> int:
        return int(self._call(0, ctypes.c_int32))

    def batch(self, *names: str) -> list[int] | None:
        bindings = (ctypes.c_void_p * len(names))()
        texts = (ctypes.c_char_p * len(names))(*(name.encode() for name in names))
        given = self._call(1, ctypes.c_bool, bindings, texts, ctypes.c_int32(len(names)))
        return [one or 0 for one in bindings] if given else None

    def cache(self) -> bytes | None:
        length = ctypes.c_size_t()
        start = self._call(2, ctypes.c_void_p, ctypes.pointer(length))
        return ctypes.string_at(start, length.value) if start else None

    def write(self, cache: bytes) -> None:
        self._call(3, None, ctypes.c_char_p(cache), ctypes.c_size_t(len(cache)))

    def algorithm(self) -> int:
        return int(self._call(4, ctypes.c_int32))

    # 5 and 6 are the destructors; what follows only the percentile calibrator has.

    def quantile(self) -> float:
        return float(self._call(7, ctypes.c_double))

    def regression_cutoff(self) -> float:
        return float(self._call(8, ctypes.c_double))

    def histograms(self) -> int | None:
        found: int | None = self._call(9, ctypes.c_void_p, ctypes.pointer(ctypes.c_size_t()))
        return found

    def write_histograms(self, data: bytes) -> None:
        self._call(10, None, ctypes.c_char_p(data), ctypes.c_size_t(len(data)))


def test_the_builder_reads_the_ranges_that_are_given(trt):
    text = write(SCALES, version_number(trt.__version__))
    given = CacheCalibration(trt, text)
    assert isinstance(given.calibrator, trt.IInt8EntropyCalibrator2)
    asked = Asked(given.calibrator)
    assert asked.algorithm() == int(trt.CalibrationAlgoType.ENTROPY_CALIBRATION_2)
    assert given.calibrator.get_algorithm() == trt.CalibrationAlgoType.ENTROPY_CALIBRATION_2
    assert asked.batch_size() == 1
    assert asked.cache() == text.encode()
    given.check(True, [])
    asked.write(text.encode())
    assert read(given.written or "") == pytest.approx(SCALES)


def test_a_builder_that_asks_for_images_gets_none_and_is_found_out(trt):
    given = CacheCalibration(trt, write(SCALES, 8500))
    assert Asked(given.calibrator).batch("images") is None
    with pytest.raises(CalibrationError, match="refused the ranges"):
        given.check(False, [])


@pytest.mark.parametrize("rule", CALIBRATORS)
def test_the_builder_gets_every_batch_and_its_cache_is_kept(trt, rule):
    base, algorithm = CALIBRATORS[rule], ALGORITHMS[rule]
    copies: list[np.ndarray] = []

    def upload(batch: np.ndarray) -> int:
        copies.append(batch.copy())
        return 0x7F0000000000 + len(copies)

    batches = (np.full((count, 3, 4, 4), count, np.float32) for count in (2, 2, 1))
    made = ImageCalibration(trt, rule, Images("images", (2, 3, 4, 4), batches, upload))
    assert isinstance(made.calibrator, getattr(trt, base))
    asked = Asked(made.calibrator)
    assert asked.algorithm() == int(getattr(trt.CalibrationAlgoType, algorithm))
    assert asked.batch_size() == 2
    assert asked.cache() is None
    assert [asked.batch("images") for _ in range(4)] == [[0x7F0000000001], [0x7F0000000002], [0x7F0000000003], None]
    assert [copy.shape for copy in copies] == [(2, 3, 4, 4)] * 3
    text = f"TRT-8600-{base.removeprefix('IInt8')}\nimages: 3c010204\n"
    asked.write(text.encode())
    assert made.written == text
    made.check(True, [])


def test_the_percentile_calibrator_says_its_quantile_and_keeps_no_histograms(trt):
    images = Images("images", (1, 3, 4, 4), [np.zeros((1, 3, 4, 4), np.float32)], lambda batch: 1)
    asked = Asked(ImageCalibration(trt, "percentile", images).calibrator)
    assert (asked.quantile(), asked.regression_cutoff()) == (0.9999, 1.0)
    asked.write_histograms(b"abc")
    assert asked.histograms() is None


def test_the_bindings_take_an_error_for_the_end_of_the_images_and_it_is_raised_afterwards(trt):
    def upload(batch: np.ndarray) -> int:
        raise MemoryError("out of memory")

    images = Images("images", (1, 3, 4, 4), [np.zeros((1, 3, 4, 4), np.float32)], upload)
    made = ImageCalibration(trt, "minmax", images)
    assert Asked(made.calibrator).batch("images") is None
    with pytest.raises(CalibrationError, match="MemoryError: out of memory"):
        made.check(True, [])


def test_a_network_with_another_input_ends_the_images_and_is_found_out(trt, capfd):
    images = Images("images", (1, 3, 4, 4), [np.zeros((1, 3, 4, 4), np.float32)], lambda batch: 1)
    made = ImageCalibration(trt, "minmax", images)
    assert Asked(made.calibrator).batch("images", "scale") is None
    assert "Exception caught in get_batch()" in capfd.readouterr().err
    with pytest.raises(CalibrationError, match="without calibrating it on all images"):
        made.check(True, [])
