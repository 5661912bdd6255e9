"""TensorRT's calibrators on a stand-in for TensorRT: their input, and errors if TensorRT ignores it.

The real library is asked in tests/tensorrt86.
"""

import sys
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from trtdet.backends.tensorrt.calibrators import CALIBRATORS, CacheCalibration, ImageCalibration, Images
from trtdet.errors import BackendError, CalibrationError, ConfigError, DataError

TEXT = "TRT-8600-EntropyCalibration2\nimages: 3c010204\n"
MISMATCH = "Calibration table does not match calibrator algorithm type."


class Base:
    """As the classes of the bindings: what is not overridden must not be called."""

    def __init__(self) -> None:
        self.made = True


def library(**members: Any) -> Any:
    bases = {name: type(name, (Base,), {}) for name in (*CALIBRATORS.values(), "IInt8Calibrator")}
    return SimpleNamespace(__name__="tensorrt", __version__="8.6.0", **{**bases, **members})


@pytest.fixture
def trt(monkeypatch):
    made = library()
    pytest.importorskip("polygraphy", reason="Polygraphy is not installed: pip install 'trtdet[trt]'")
    monkeypatch.setattr("polygraphy.backend.trt.calibrator.trt", made)
    return made


class Device:
    """The memory of a device of which every copy is kept."""

    def __init__(self) -> None:
        self.copies: list[np.ndarray] = []

    def __call__(self, batch: np.ndarray) -> int:
        assert batch.dtype == np.float32 and batch.flags["C_CONTIGUOUS"]
        self.copies.append(batch.copy())
        return np.int64(0x1000 * len(self.copies))  # type: ignore[return-value]  # a caller need not know of NumPy's

    def images(self, *batches: np.ndarray, shape: tuple[int, int, int, int] = (2, 3, 4, 4)) -> Images:
        return Images("images", shape, batches, self)


def batch(count: int = 2, value: float = 0.0) -> np.ndarray:
    return np.full((count, 3, 4, 4), value, np.float32) + np.arange(count, dtype=np.float32)[:, None, None, None]


def fed(calibrator: Any) -> list[list[int]]:
    """All that TensorRT would be given."""
    found = []
    while (addresses := calibrator.get_batch(["images"])) is not None:
        found.append(addresses)
    return found


def test_the_cache_is_given_as_it_is_without_images_and_what_tensorrt_writes_back_is_kept():
    given = CacheCalibration(library(), TEXT)
    assert given.calibrator.made and type(given.calibrator).__mro__[1].__name__ == "IInt8EntropyCalibrator2"
    assert given.calibrator.read_calibration_cache() == TEXT.encode()
    given.check(True, [])
    assert given.calibrator.get_batch(["images"]) is None
    assert given.written is None
    given.calibrator.write_calibration_cache(memoryview(b"TRT-8600-EntropyCalibration2\n"))
    assert given.written == "TRT-8600-EntropyCalibration2\n"


@pytest.mark.parametrize("built", [True, False])
def test_a_refused_cache_is_an_error_in_tensorrts_own_words(built):
    given = CacheCalibration(library(), TEXT)
    given.calibrator.read_calibration_cache()
    given.calibrator.get_batch(["images"])
    with pytest.raises(CalibrationError, match=f"refused the ranges .* images instead: {MISMATCH}; calibrate again"):
        given.check(built, ["Reading Calibration Cache", MISMATCH, MISMATCH, "Starting Calibration."])
    with pytest.raises(CalibrationError, match="it gave no reason"):
        given.check(built, [])


def test_an_engine_for_which_the_cache_was_never_read_is_an_error():
    given = CacheCalibration(library(), TEXT)
    words = "Calibrator won't be used in explicit precision mode. Use quantization aware training"
    with pytest.raises(CalibrationError, match="built an engine without the ranges .* explicit precision mode"):
        given.check(True, [words])
    # Where nothing was built, the builder has a reason of its own.
    given.check(False, [words])


@pytest.mark.parametrize(("rule", "base"), CALIBRATORS.items())
def test_every_batch_reaches_the_calibrator_of_the_rule(trt, rule, base):
    device = Device()
    fed_by = ImageCalibration(trt, rule, device.images(batch(value=1), batch(value=5)))
    calibrator = fed_by.calibrator
    assert type(calibrator).__mro__[1] is getattr(trt, base) and calibrator.made
    assert calibrator.get_batch_size() == 2
    assert calibrator.read_calibration_cache() is None
    addresses = fed(calibrator)
    assert addresses == [[0x1000], [0x2000]] and all(type(one) is int for (one,) in addresses)
    np.testing.assert_array_equal(device.copies, [batch(value=1), batch(value=5)])
    calibrator.write_calibration_cache(np.frombuffer(TEXT.encode(), np.uint8))
    assert fed_by.written == TEXT
    fed_by.check(True, [])


def test_the_percentile_has_the_quantile_asked_for_and_never_extrapolates(trt):
    usual = ImageCalibration(trt, "percentile", Device().images(batch())).calibrator
    other = ImageCalibration(trt, "percentile", Device().images(batch()), 0.999).calibrator
    assert (usual.get_quantile(), other.get_quantile()) == (0.9999, 0.999)
    assert usual.get_regression_cutoff() == 1.0
    assert usual.read_histogram_cache(0) is None


def test_the_last_batch_is_filled_up_with_its_own_images_in_turn(trt):
    device = Device()
    images = device.images(batch(5), batch(2, value=7), shape=(5, 3, 4, 4))
    assert len(fed(ImageCalibration(trt, "minmax", images).calibrator)) == 2
    np.testing.assert_array_equal(device.copies[1][:, 0, 0, 0], [7, 8, 7, 8, 7])


def test_one_batch_at_a_time_is_in_memory(trt):
    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    most = 0

    class Array(np.ndarray):
        """An array that can be referred to weakly, and hashed for that."""

        __hash__ = object.__hash__

    def stream() -> Iterator[np.ndarray]:
        for index in range(50):
            made = batch(value=index).view(Array)
            alive.add(made)
            yield made
            del made

    def upload(array: np.ndarray) -> int:
        nonlocal most
        most = max(most, len(alive))
        return 1

    made = ImageCalibration(trt, "entropy", Images("images", (2, 3, 4, 4), stream(), upload))
    assert len(fed(made.calibrator)) == 50
    assert 1 <= most <= 2


def test_no_images_are_an_error_before_anything_is_built(trt):
    with pytest.raises(CalibrationError, match="no image to calibrate on"):
        ImageCalibration(trt, "minmax", Device().images())


@pytest.mark.parametrize("wrong", [batch(3), batch(2)[:, :, :3], batch(2)[0], batch(0)])
def test_a_batch_of_another_shape_is_refused_at_once_or_when_it_comes(trt, wrong):
    with pytest.raises(CalibrationError, match=r"batch has the shape .*, the network takes \(2, 3, 4, 4\)"):
        ImageCalibration(trt, "minmax", Device().images(wrong))
    device = Device()
    later = ImageCalibration(trt, "minmax", device.images(batch(), wrong))
    assert len(fed(later.calibrator)) == len(device.copies) == 1
    with pytest.raises(CalibrationError, match="batch has the shape"):
        later.check(True, [])


def test_what_ends_the_images_is_raised_afterwards(trt):
    def stream() -> Iterator[np.ndarray]:
        yield batch()
        raise DataError("2 of 3 images cannot be read")

    made = ImageCalibration(trt, "minmax", Images("images", (2, 3, 4, 4), stream(), Device()))
    fed(made.calibrator)
    with pytest.raises(DataError, match="2 of 3 images cannot be read"):
        made.check(False, [])


def test_a_device_that_takes_no_batch_is_an_error_with_its_words(trt):
    def upload(array: np.ndarray) -> int:
        raise MemoryError("CUDA out of\nmemory")

    made = ImageCalibration(trt, "minmax", Images("images", (2, 3, 4, 4), [batch()], upload))
    fed(made.calibrator)
    said = "after 0 batches .* MemoryError: CUDA out of memory; free device memory"
    with pytest.raises(CalibrationError, match=said):
        made.check(True, [])


def test_an_engine_that_was_calibrated_on_too_little_is_an_error(trt):
    made = ImageCalibration(trt, "minmax", Device().images(batch(), batch()))
    made.check(False, [])
    said = "asked for 0 batches: Calibrator won't be used in explicit precision mode"
    with pytest.raises(CalibrationError, match=said):
        made.check(True, ["Calibrator won't be used in explicit precision mode."])
    made.calibrator.get_batch(["images"])
    with pytest.raises(CalibrationError, match="asked for 1 batches: it gave no reason"):
        made.check(True, [])
    fed(made.calibrator)
    with pytest.raises(CalibrationError, match="asked for 2 batches"):  # it wrote no cache
        made.check(True, [])


def test_a_rule_without_a_calibrator_lists_the_others(trt):
    with pytest.raises(ConfigError, match="no calibrator for the rule 'mse'; allowed: minmax, entropy, percentile"):
        ImageCalibration(trt, "mse", Device().images(batch()))


@pytest.mark.parametrize(
    ("module", "version", "title"), [("tensorrt", "11.1.0", "TensorRT"), ("tensorrt_rtx", "1.7.1", "TensorRT-RTX")]
)
def test_a_version_without_calibrators_says_what_to_use(module, version, title):
    gone = SimpleNamespace(__name__=module, __version__=version)
    for make in (
        lambda: CacheCalibration(gone, TEXT),
        lambda: ImageCalibration(gone, "minmax", Device().images(batch())),
    ):
        with pytest.raises(BackendError, match=f"is gone in {title} {version}, .*; use --quantization explicit"):
            make()


def test_without_polygraphy_the_pip_line_is_given(monkeypatch):
    monkeypatch.setitem(sys.modules, "polygraphy.backend.trt", None)
    with pytest.raises(BackendError, match=r"Polygraphy, which is not installed.*pip install 'trtdet\[trt\]'"):
        ImageCalibration(library(), "minmax", Device().images(batch()))
