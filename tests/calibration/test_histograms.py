import json
import warnings
import zipfile
from collections.abc import Callable
from functools import reduce
from operator import add
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from nets import same_histogram as same

from trtdet.calibration import Collection, Histogram
from trtdet.calibration import histograms as module
from trtdet.calibration.histograms import BINS
from trtdet.errors import CalibrationError

finite = arrays(
    np.float32, st.integers(1, 60), elements=st.floats(-(2.0**60), 2.0**60, width=32, allow_subnormal=False)
)


def reference(values: np.ndarray, exponent: int) -> np.ndarray:
    """Counts by their definition, in float64: the range is a power of two, so the bin edges are exact."""
    index = np.floor(np.abs(values.astype(np.float64)).ravel() * (BINS / 2.0**exponent)).astype(np.int64)
    return np.bincount(index, minlength=BINS)


@pytest.mark.parametrize("scale", [1e-12, 1e-3, 1.0, 255.0, 1e9])
def test_counts_are_those_of_numpy(scale):
    values = (np.random.default_rng(0).normal(0, 1, (3, 50, 70)) * scale).astype(np.float32)
    histogram = Histogram.of(values)
    upper = 2.0**histogram.exponent
    assert upper / 2 <= np.abs(values).max() < upper
    expected, _ = np.histogram(np.abs(values.astype(np.float64)), BINS, (0, upper))
    np.testing.assert_array_equal(histogram.counts, expected)
    assert histogram.counts.dtype == np.int64
    assert histogram.total == values.size
    assert (histogram.low, histogram.high) == (float(values.min()), float(values.max()))
    assert histogram.amax == float(np.abs(values).max())
    assert histogram.width == upper / BINS


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(values=finite)
def test_every_value_is_counted_in_its_bin(values):
    histogram = Histogram.of(values)
    np.testing.assert_array_equal(histogram.counts, reference(values, histogram.exponent))


@pytest.mark.parametrize("value", [1.0, 2.0, 0.5, 1 - 2**-24, 2.0**20, 2.0**-30])
def test_a_value_on_an_edge_belongs_to_the_bin_above(value):
    histogram = Histogram.of(np.float32([value, -value]))
    np.testing.assert_array_equal(histogram.counts, reference(np.float32([value, value]), histogram.exponent))
    assert histogram.amax == value


@pytest.mark.parametrize("value", [0, np.finfo(np.float32).smallest_subnormal, np.finfo(np.float32).max])
def test_zeros_and_the_smallest_and_the_largest_float32_are_counted(value):
    histogram = Histogram.of(np.array([value, -value, 0], np.float32))
    assert (histogram.amax, histogram.total) == (float(value), 3)
    assert histogram.counts[0] == (1 if value > 1 else 3)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(parts=st.lists(finite, min_size=2, max_size=6), order=st.randoms(use_true_random=False))
def test_neither_the_order_nor_the_division_of_the_values_matters(parts, order):
    whole = Histogram.of(np.concatenate(parts))
    shuffled = list(parts)
    order.shuffle(shuffled)
    one_by_one = Histogram.of(shuffled[0])
    for part in shuffled[1:]:
        # As the collector does it: the range so far is the least the next one gets.
        one_by_one = one_by_one + Histogram.of(part, one_by_one.exponent)
    half = len(parts) // 2
    left, right = (reduce(add, map(Histogram.of, some)) for some in (shuffled[:half], shuffled[half:]))
    assert same(one_by_one, whole)
    assert same(left + right, whole) and same(right + left, whole)


@pytest.mark.parametrize("by", [-5, 0, 1, 3, 14, 20])
def test_widening_is_the_histogram_of_the_wider_range_and_never_narrows(by):
    values = np.random.default_rng(1).normal(0, 3, 5000).astype(np.float32)
    narrow = Histogram.of(values)
    before = narrow.counts.copy()
    assert same(narrow.widened(narrow.exponent + by), Histogram.of(values, narrow.exponent + by))
    np.testing.assert_array_equal(narrow.counts, before)


def test_large_tensors_are_counted_in_pieces(monkeypatch):
    values = np.random.default_rng(2).normal(0, 1, 10_001).astype(np.float32)
    whole = Histogram.of(values)
    monkeypatch.setattr(module, "_CHUNK", 1000)
    assert same(Histogram.of(values), whole)


def test_counts_pass_the_limits_of_float32_and_int32():
    counts = np.zeros(BINS, np.int64)
    counts[5] = 2**40 + 1
    total = Histogram(counts, 0, -0.1, 0.1) + Histogram.of(np.float32([0.1]), 0)
    assert total.total == 2**40 + 2
    assert total.widened(3).total == 2**40 + 2


def test_strided_arrays_are_counted_whole():
    values = np.random.default_rng(3).normal(0, 1, (2, 3, 40, 40)).astype(np.float32)
    assert same(Histogram.of(values.transpose(0, 2, 3, 1)[:, ::2]), Histogram.of(values[:, :, ::2].copy()))


@pytest.mark.parametrize("bins", [1, 100, 2048, BINS])
@pytest.mark.parametrize("amax", [0.5001, 0.75, 0.9999999])
def test_rebinning_splits_no_count_and_reaches_just_over_the_largest_value(bins, amax):
    values = np.append(np.random.default_rng(4).uniform(0, amax, 3000), amax).astype(np.float32)
    histogram = Histogram.of(values)
    counts, width = histogram.rebinned(bins)
    assert len(counts) == bins and counts.dtype == np.int64
    assert counts.sum() == histogram.total
    assert histogram.amax < bins * width
    group = round(width / histogram.width)
    assert width == group * histogram.width
    expected = np.bincount(np.floor(values.astype(np.float64) / width).astype(int), minlength=bins)
    np.testing.assert_array_equal(counts, expected)
    assert (group - 1) * histogram.width * bins <= histogram.amax


@pytest.fixture
def collection():
    rng = np.random.default_rng(5)
    histograms = {name: Histogram.of(rng.normal(0, 1, 500).astype(np.float32)) for name in ("images", "a/b:0", "ü")}
    return Collection(histograms, "key", 3, "sha", "images", ("bad.jpg",))


def test_a_collection_survives_its_file(collection, tmp_path):
    path = tmp_path / "new" / "histograms.npz"
    collection.save(path)
    read = Collection.load(path)
    assert list(read.histograms) == list(collection.histograms)
    assert all(same(read.histograms[name], collection.histograms[name]) for name in read.histograms)
    assert (read.key, read.images, read.images_sha256) == ("key", 3, "sha")
    assert (read.source, read.skipped) == ("images", ("bad.jpg",))


def test_a_collection_of_nothing_survives_its_file(tmp_path):
    Collection({}, "key", 1, "sha", "images").save(tmp_path / "empty.npz")
    assert Collection.load(tmp_path / "empty.npz").histograms == {}


def test_a_collection_that_is_cut_or_damaged_is_an_error(collection, tmp_path):
    data = collection.to_bytes()
    path = tmp_path / "h.npz"
    for length in [0, 1, 4, 100, len(data) // 2, len(data) - 1]:
        path.write_bytes(data[:length])
        with pytest.raises(CalibrationError, match="is not a collection of histograms"):
            Collection.load(path)
    for position in range(40, len(data) - 200, max(1, len(data) // 40)):
        damaged = bytearray(data)
        damaged[position : position + 8] = bytes(value ^ 255 for value in damaged[position : position + 8])
        path.write_bytes(damaged)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                read = Collection.load(path)
            except CalibrationError as error:
                assert "collect again" in str(error)
            else:  # bytes that the format itself does not check, such as dates
                assert all(same(read.histograms[name], value) for name, value in collection.histograms.items())


def test_other_files_are_no_collections(tmp_path):
    with pytest.raises(CalibrationError, match="does not exist; make it with 'trtdet calibrate'"):
        Collection.load(tmp_path / "absent.npz")
    path = tmp_path / "h.npz"
    np.save(tmp_path / "array.npy", np.zeros(3))
    np.savez(tmp_path / "other.npz", x=np.zeros(3))
    (tmp_path / "text.npz").write_text("hello")
    meta = np.frombuffer(b"[1, 2]", np.uint8)
    np.savez(tmp_path / "list.npz", meta=meta, counts=np.zeros((1, BINS)), exponents=[0], extremes=[[0, 0]])
    meta = np.frombuffer(json.dumps({"schema": 1, "tensors": ["a", "b"]}).encode(), np.uint8)
    np.savez(tmp_path / "short.npz", meta=meta, counts=np.zeros((1, BINS)), exponents=[0], extremes=[[0, 0]])
    path.mkdir()
    for name in ("array.npy", "other.npz", "text.npz", "list.npz", "short.npz", "h.npz"):
        with pytest.raises(CalibrationError, match="is not a collection of histograms"):
            Collection.load(tmp_path / name)


def _in_second(value: Any) -> Callable[[np.ndarray], np.ndarray]:
    def changed(array: np.ndarray) -> np.ndarray:
        array[1] = value
        return array

    return changed


def _in_meta(old: bytes, new: bytes) -> Callable[[np.ndarray], np.ndarray]:
    return lambda meta: np.frombuffer(meta.tobytes().replace(old, new), np.uint8)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("counts", _in_second(np.zeros(BINS)), "the counts of 'a/b:0' are 0 to 0, 0 in all; each must be at least 0"),
        ("counts", _in_second(np.eye(1, BINS) * -1), "the counts of 'a/b:0' are -1 to 0"),
        ("counts", _in_second(np.eye(1, BINS) * (2**53 + 2)), "the counts of 'a/b:0' are 0 to 9007199254740994, 9.0"),
        ("counts", _in_second(np.full(BINS, 2**62)), "the counts of 'a/b:0' are 46116860.* to"),
        ("exponents", _in_second(129), "the exponent of 'a/b:0' is 129; allowed: -60 to 128"),
        ("exponents", _in_second(-61), "the exponent of 'a/b:0' is -61"),
        ("extremes", _in_second([np.nan, 1]), "the extremes of 'a/b:0' are nan and 1"),
        ("extremes", _in_second([0, np.inf]), "the extremes of 'a/b:0' are 0 and inf"),
        ("extremes", _in_second([1, 0]), "the extremes of 'a/b:0' are 1 and 0"),
        ("extremes", _in_second([-1e6, 0]), "the extremes of 'a/b:0' are -1e[+]06 and 0, its range ends at 2\\^"),
        ("counts", lambda a: a.astype(np.float64), "arrays of types float64, int32 and float64"),
        ("exponents", lambda a: a[:2], "3 tensors with arrays of shapes"),
        ("extremes", lambda a: a[:, :1], "3 tensors with arrays of shapes"),
        ("meta", lambda a: np.frombuffer(b'{"a":' * 100_000, np.uint8), "Invalid JSON: recursion limit exceeded"),
        ("meta", _in_meta(b'"images": 3', b'"images": 0'), "'images': .*0"),
        ("meta", _in_meta(b'"schema": 1', b'"schema": 2'), "was written by another version of trtdet"),
        ("counts", lambda a: a[:, :100], "was written by another version of trtdet"),
    ],
)
def test_arrays_that_no_collection_has_are_refused(collection, tmp_path, name, change, message):
    collection.save(tmp_path / "h.npz")
    with np.load(tmp_path / "h.npz") as data:
        arrays = {key: data[key] for key in data.files}
    arrays[name] = change(arrays[name])
    np.savez(tmp_path / "other.npz", **arrays)
    prefix = "" if "version" in message else "is not a collection of histograms: "
    with pytest.raises(CalibrationError, match=f"{prefix}{message}.*; collect again"):
        Collection.load(tmp_path / "other.npz")


def test_a_small_file_of_huge_arrays_is_refused_before_it_is_unpacked(tmp_path):
    path = tmp_path / "bomb.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("counts.npy", "w") as entry:
        for _ in range(1100):
            entry.write(bytes(1 << 20))
    assert path.stat().st_size < 4 << 20
    with pytest.raises(CalibrationError, match=r"unpacked it would have \d+ bytes, over 1073741824; collect again"):
        Collection.load(path)


def test_a_damaged_header_of_an_array_and_endless_names_are_refused(collection, tmp_path):
    collection.save(tmp_path / "h.npz")
    with zipfile.ZipFile(tmp_path / "h.npz") as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    counts = entries["counts.npy"]
    header = counts.replace(b"'fortran_order': False", b"'fortran_order': (alse")
    for name, content, words in (
        ("counts.npy", header, "is not a collection of histograms"),
        ("meta.npy", bytes((1 << 24) + 1), "its names would have 16777217 bytes"),
    ):
        with zipfile.ZipFile(tmp_path / "other.npz", "w", zipfile.ZIP_DEFLATED) as archive:
            for key, value in {**entries, name: content}.items():
                archive.writestr(key, value)
        with pytest.raises(CalibrationError, match=words):
            Collection.load(tmp_path / "other.npz")
