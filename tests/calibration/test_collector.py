from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from PIL import Image

from trtdet.backends import OnnxRunner
from trtdet.calibration import Collection, Histogram, collect, collection_key, expose
from trtdet.calibration import collector as module
from trtdet.calibration.collector import BINS
from trtdet.config import InputConfig
from trtdet.data import ImageStream
from trtdet.errors import CalibrationError, DataError, OutputError, TrtdetWarning

finite = arrays(
    np.float32,
    st.integers(1, 60),
    elements=st.floats(-(2.0**60), 2.0**60, width=32, allow_subnormal=False),
)


def same(one: Histogram, other: Histogram) -> bool:
    return (
        np.array_equal(one.counts, other.counts)
        and one.counts.dtype == other.counts.dtype == np.int64
        and (one.exponent, one.low, one.high) == (other.exponent, other.low, other.high)
    )


def reference(values: np.ndarray, exponent: int) -> np.ndarray:
    """Counts by their definition, in float64: the range is a power of two, so the bin edges are exact."""
    index = np.floor(np.abs(values.astype(np.float64)).ravel() * (BINS / 2.0**exponent)).astype(np.int64)
    return np.bincount(index, minlength=BINS)


# Histograms


@pytest.mark.parametrize("scale", [1e-12, 1e-3, 1.0, 255.0, 1e9])
def test_counts_are_those_of_numpy(scale: float) -> None:
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
def test_every_value_is_counted_in_its_bin(values: np.ndarray) -> None:
    histogram = Histogram.of(values)
    np.testing.assert_array_equal(histogram.counts, reference(values, histogram.exponent))


@pytest.mark.parametrize("value", [1.0, 2.0, 0.5, 1 - 2**-24, 2.0**20, 2.0**-30])
def test_a_value_on_an_edge_belongs_to_the_bin_above(value: float) -> None:
    histogram = Histogram.of(np.float32([value, -value]))
    np.testing.assert_array_equal(histogram.counts, reference(np.float32([value, value]), histogram.exponent))
    assert histogram.amax == value


def test_nothing_but_zeros_has_amax_zero() -> None:
    histogram = Histogram.of(np.zeros(7, np.float32))
    assert (histogram.amax, histogram.total, int(histogram.counts[0])) == (0.0, 7, 7)


def test_the_smallest_and_the_largest_float32_are_counted() -> None:
    for value in (np.finfo(np.float32).smallest_subnormal, np.finfo(np.float32).max):
        histogram = Histogram.of(np.array([value, -value, 0], np.float32))
        assert histogram.total == 3
        assert histogram.amax == float(value)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(parts=st.lists(finite, min_size=2, max_size=6), order=st.randoms(use_true_random=False))
def test_neither_the_order_nor_the_division_of_the_values_matters(parts: list[np.ndarray], order: Any) -> None:
    whole = Histogram.of(np.concatenate(parts))
    shuffled = list(parts)
    order.shuffle(shuffled)
    one_by_one = Histogram.of(shuffled[0])
    for part in shuffled[1:]:
        # As the collector does it: the range so far is the least the next one gets.
        one_by_one = one_by_one + Histogram.of(part, one_by_one.exponent)
    half = len(parts) // 2
    left, right = (sum_of(some) for some in (shuffled[:half], shuffled[half:]))
    assert same(one_by_one, whole)
    assert same(left + right, whole) and same(right + left, whole)


def sum_of(parts: list[np.ndarray]) -> Histogram:
    total = Histogram.of(parts[0])
    for part in parts[1:]:
        total = total + Histogram.of(part)
    return total


@pytest.mark.parametrize("by", [0, 1, 3, 14, 20])
def test_widening_is_the_histogram_of_the_wider_range(by: int) -> None:
    values = np.random.default_rng(1).normal(0, 3, 5000).astype(np.float32)
    narrow = Histogram.of(values)
    before = narrow.counts.copy()
    assert same(narrow.widened(narrow.exponent + by), Histogram.of(values, narrow.exponent + by))
    np.testing.assert_array_equal(narrow.counts, before)


def test_widening_never_narrows() -> None:
    histogram = Histogram.of(np.float32([3.0]))
    assert same(histogram.widened(histogram.exponent - 5), histogram)


def test_large_tensors_are_counted_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(2).normal(0, 1, 10_001).astype(np.float32)
    whole = Histogram.of(values)
    monkeypatch.setattr(module, "_CHUNK", 1000)
    assert same(Histogram.of(values), whole)


def test_counts_pass_the_limits_of_float32_and_int32() -> None:
    counts = np.zeros(BINS, np.int64)
    counts[5] = 2**40 + 1
    total = Histogram(counts, 0, -0.1, 0.1) + Histogram.of(np.float32([0.1]), 0)
    assert total.total == 2**40 + 2
    assert total.widened(3).total == 2**40 + 2


def test_strided_arrays_are_counted_whole() -> None:
    values = np.random.default_rng(3).normal(0, 1, (2, 3, 40, 40)).astype(np.float32)
    assert same(Histogram.of(values.transpose(0, 2, 3, 1)[:, ::2]), Histogram.of(values[:, :, ::2].copy()))


@pytest.mark.parametrize("bins", [1, 100, 2048, BINS])
@pytest.mark.parametrize("amax", [0.5001, 0.75, 0.9999999])
def test_rebinning_splits_no_count_and_reaches_just_over_the_largest_value(bins: int, amax: float) -> None:
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


# Collections as files


@pytest.fixture
def collection() -> Collection:
    rng = np.random.default_rng(5)
    histograms = {name: Histogram.of(rng.normal(0, 1, 500).astype(np.float32)) for name in ("images", "a/b:0", "ü")}
    return Collection(histograms, "key", 3, "sha", "images", ("bad.jpg",))


def test_a_collection_survives_its_file(collection: Collection, tmp_path: Path) -> None:
    path = tmp_path / "new" / "histograms.npz"
    collection.save(path)
    read = Collection.load(path)
    assert list(read.histograms) == list(collection.histograms)
    assert all(same(read.histograms[name], collection.histograms[name]) for name in read.histograms)
    assert (read.key, read.images, read.images_sha256) == ("key", 3, "sha")
    assert (read.source, read.skipped) == ("images", ("bad.jpg",))


def test_a_collection_of_nothing_survives_its_file(tmp_path: Path) -> None:
    Collection({}, "key", 1, "sha", "images").save(tmp_path / "empty.npz")
    assert Collection.load(tmp_path / "empty.npz").histograms == {}


def test_a_collection_cannot_be_written_under_a_file(collection: Collection, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OutputError, match="cannot be written"):
        collection.save(tmp_path / "file" / "h.npz")


def test_a_missing_collection_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="does not exist; make it with 'trtdet calibrate'"):
        Collection.load(tmp_path / "absent.npz")


def test_a_collection_that_is_cut_or_damaged_is_an_error(collection: Collection, tmp_path: Path) -> None:
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


def test_other_files_are_no_collections(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("change", [{"schema": 2}, {"bins": 100}])
def test_a_collection_of_another_version_is_an_error(
    collection: Collection, tmp_path: Path, change: dict[str, int]
) -> None:
    collection.save(tmp_path / "h.npz")
    with np.load(tmp_path / "h.npz") as data:
        parts = {name: data[name] for name in data.files}
    meta = json.loads(parts["meta"].tobytes())
    meta["schema"] = change.get("schema", 1)
    parts["meta"] = np.frombuffer(json.dumps(meta).encode(), np.uint8)
    parts["counts"] = parts["counts"][:, : change.get("bins", BINS)]
    np.savez(tmp_path / "other.npz", **parts)
    with pytest.raises(CalibrationError, match="was written by another version of trtdet; collect again"):
        Collection.load(tmp_path / "other.npz")


# Cutting the model


TEXT = """<ir_version: 8, opset_import: ["" : 13]>
net (float[N,3,16,16] images) => (float[N,4,16,16] out, float[N,4,16,16] other) {
    a = Conv(images, w1)
    b = Relu(a)
    c = Conv(b, w2)
    out = Mul(c, k)
    other = Neg(a) }"""


def model(**changes: np.ndarray) -> onnx.ModelProto:
    made = onnx.parser.parse_model(TEXT)
    rng = np.random.default_rng(6)
    weights = {
        "w1": rng.normal(0, 1, (4, 3, 1, 1)).astype(np.float32),
        "w2": rng.normal(0, 1, (4, 4, 1, 1)).astype(np.float32),
        "k": np.float32(2),
    }
    for name, value in {**weights, **changes}.items():
        made.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(value, np.float32), name))
    return made


def test_exposing_cuts_what_comes_after_and_gives_the_tensors() -> None:
    given_model = model()
    before = given_model.SerializeToString()
    exposed = expose(given_model, ("images", "b"))
    assert given_model.SerializeToString() == before
    assert [node.op_type for node in exposed.graph.node] == ["Conv", "Relu"]
    assert [output.name for output in exposed.graph.output] == ["b"]
    images = np.random.default_rng(7).normal(0, 1, (2, 3, 16, 16)).astype(np.float32)
    assert OnnxRunner(exposed)(images)["b"].shape == (2, 4, 16, 16)


def test_exposing_only_the_input_still_gives_a_model_that_runs() -> None:
    exposed = expose(model(), ("images",))
    runner = OnnxRunner(exposed)
    assert runner.input == "images"
    runner(np.zeros((1, 3, 16, 16), np.float32))


def test_exposing_an_unknown_tensor_is_an_error() -> None:
    with pytest.raises(CalibrationError, match=r"has no tensor 'x' \(2 missing\); calibrate this model anew"):
        expose(model(), ("b", "x", "y"))


def key_of(made: onnx.ModelProto, tensors: tuple[str, ...] = ("images", "b"), *rest: str) -> str:
    return collection_key(expose(made, tensors), tensors, *(rest or ("sha", "preprocess")))


def test_the_key_does_not_depend_on_what_comes_after_the_last_tensor() -> None:
    other = model(k=np.float32(3), w2=np.zeros((4, 4, 1, 1)))
    other.graph.node[-1].op_type = "Abs"
    assert key_of(other) == key_of(model())
    assert len(key_of(model())) == 64


def test_the_key_depends_on_all_that_comes_before() -> None:
    keys = [
        key_of(model()),
        key_of(model(w1=np.zeros((4, 3, 1, 1)))),
        key_of(model(), ("images", "c")),
        key_of(model(), ("b",)),
        key_of(model(), ("images", "b"), "other", "preprocess"),
        key_of(model(), ("images", "b"), "sha", "other"),
    ]
    assert len(set(keys)) == len(keys)


# Collecting


CONFIG = InputConfig(size=(16, 16), scale=1 / 255)


def pictures(folder: Path, count: int, seed: int = 0) -> list[Path]:
    rng = np.random.default_rng(seed)
    paths = [folder / f"{index:03}.jpg" for index in range(count)]
    for path in paths:
        Image.fromarray(rng.integers(0, 256, (20, 24, 3), np.uint8)).save(path)
    return paths


def gather(paths: list[Path], made: onnx.ModelProto | None = None, batch: int = 1, **options: Any) -> Collection:
    tensors = ("images", "b")
    exposed = expose(made or model(), tensors)
    runner = OnnxRunner(exposed)
    stream = ImageStream(paths, CONFIG, batch_size=batch)
    return collect(runner, runner.input, tensors, stream, key="key", images_sha256="sha", **options)


def test_every_tensor_of_every_image_is_counted(tmp_path: Path) -> None:
    paths = pictures(tmp_path, 5)
    found = gather(paths)
    assert list(found.histograms) == ["images", "b"]
    assert found.histograms["images"].total == 5 * 3 * 16 * 16
    assert found.histograms["b"].total == 5 * 4 * 16 * 16
    assert (found.images, found.key, found.images_sha256, found.skipped) == (5, "key", "sha", ())
    runner = OnnxRunner(expose(model(), ("b",)))
    images = [batch.images for batch in ImageStream(paths, CONFIG)]
    everything = np.concatenate([runner(image)["b"] for image in images])
    assert same(found.histograms["b"], Histogram.of(everything))
    assert same(found.histograms["images"], Histogram.of(np.concatenate(images)))


def test_neither_order_nor_batch_size_changes_the_collection(tmp_path: Path) -> None:
    paths = pictures(tmp_path, 7)
    found = gather(paths)
    for other in (gather(paths[::-1]), gather(paths, batch=3)):
        assert same(other.histograms["images"], found.histograms["images"])
        # Another batch size may take another kernel, whose rounding differs in the last bit.
        assert other.histograms["b"].total == found.histograms["b"].total
    assert same(gather(paths[::-1]).histograms["b"], found.histograms["b"])


def test_progress_counts_the_images(tmp_path: Path) -> None:
    seen: list[int] = []
    gather(pictures(tmp_path, 5), batch=2, progress=seen.append)
    assert seen == [2, 4, 5]


def test_a_truncated_image_among_twenty_is_named_skipped_and_counted(tmp_path: Path) -> None:
    paths = pictures(tmp_path, 20)
    paths[7].write_bytes(paths[7].read_bytes()[:300])
    with pytest.warns(TrtdetWarning, match=r"skipped: .*007\.jpg"):
        found = gather(paths)
    assert (found.images, found.skipped) == (19, ("007.jpg",))
    assert found.histograms["images"].total == 19 * 3 * 16 * 16


def test_no_image_at_all_is_an_error() -> None:
    with pytest.raises(CalibrationError, match="no calibration image could be read; give a folder"):
        gather([])


def test_pictures_of_a_single_colour_are_an_error(tmp_path: Path) -> None:
    path = tmp_path / "black.png"
    Image.new("RGB", (20, 20)).save(path)
    with pytest.raises(DataError, match=r"single colour \(black\.png\)"):
        gather([path])


@pytest.mark.parametrize(("value", "what"), [(np.nan, "NaN"), (np.inf, "infinite"), (-np.inf, "infinite")])
@pytest.mark.parametrize("batch", [1, 4])
def test_a_value_that_is_not_finite_names_the_tensor_and_the_image(
    tmp_path: Path, value: float, what: str, batch: int
) -> None:
    calls = []

    def run(images: np.ndarray) -> dict[str, np.ndarray]:
        calls.append(len(images))
        outputs = np.ones((len(images), 4, 2, 2), np.float32)
        done = sum(calls) - len(images)
        if done <= 5 < sum(calls):
            outputs[5 - done, 0, 0, 0] = value
        return {"layer/b": outputs}

    stream = ImageStream(pictures(tmp_path, 8), CONFIG, batch_size=batch)
    with pytest.raises(CalibrationError) as caught:
        collect(run, "images", ("layer/b",), stream, key="", images_sha256="")
    assert f"activation 'layer/b' is {what} in 1 of {16 * batch} places for image '005.jpg'" in str(caught.value)


def test_a_model_that_overflows_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match=r"activation 'b' is (infinite|NaN) .* check its weights"):
        gather(pictures(tmp_path, 2), model(w1=np.full((4, 3, 1, 1), 3e38)))


def test_an_error_of_the_run_is_not_hidden(tmp_path: Path) -> None:
    def run(images: np.ndarray) -> dict[str, np.ndarray]:
        raise RuntimeError("the run failed")

    stream = ImageStream(pictures(tmp_path, 2), CONFIG)
    with pytest.raises(RuntimeError, match="the run failed"):
        collect(run, "images", ("images",), stream, key="", images_sha256="")
