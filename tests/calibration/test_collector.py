from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from nets import same_histogram as same
from PIL import Image

from trtdet.backends import OnnxRunner
from trtdet.calibration import Collection, CollectionRequest, Histogram, collect, collection_key, expose
from trtdet.config import InputConfig
from trtdet.data import ImageStream
from trtdet.errors import CalibrationError, DataError, TrtdetWarning
from trtdet.passes import provenance
from trtdet.passes.provenance import Origin

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


def test_exposing_cuts_what_comes_after_and_gives_the_tensors():
    given_model = model()
    before = given_model.SerializeToString()
    exposed = expose(given_model, ("images", "b"))
    assert given_model.SerializeToString() == before
    assert [node.op_type for node in exposed.graph.node] == ["Conv", "Relu"]
    assert [output.name for output in exposed.graph.output] == ["b"]
    images = np.random.default_rng(7).normal(0, 1, (2, 3, 16, 16)).astype(np.float32)
    assert OnnxRunner(exposed)(images)["b"].shape == (2, 4, 16, 16)


def test_exposing_only_the_input_still_gives_a_model_that_runs():
    exposed = expose(model(), ("images",))
    runner = OnnxRunner(exposed)
    assert runner.input == "images"
    runner(np.zeros((1, 3, 16, 16), np.float32))


def test_exposing_an_unknown_tensor_is_an_error():
    with pytest.raises(CalibrationError, match=r"has no tensor 'x' \(2 missing\); calibrate this model anew"):
        expose(model(), ("b", "x", "y"))


def key_of(made: onnx.ModelProto, tensors: tuple[str, ...] = ("images", "b"), *rest: str) -> str:
    return collection_key(expose(made, tensors), tensors, *(rest or ("sha", "preprocess")))


def test_the_key_does_not_depend_on_what_comes_after_the_last_tensor():
    other = model(k=np.float32(3), w2=np.zeros((4, 4, 1, 1)))
    other.graph.node[-1].op_type = "Abs"
    assert key_of(other) == key_of(model())
    assert len(key_of(model())) == 64


def test_the_key_depends_on_all_that_comes_before():
    keys = [
        key_of(model()),
        key_of(model(w1=np.zeros((4, 3, 1, 1)))),
        key_of(model(), ("images", "c")),
        key_of(model(), ("b",)),
        key_of(model(), ("images", "b"), "other", "preprocess"),
        key_of(model(), ("images", "b"), "sha", "other"),
    ]
    assert len(set(keys)) == len(keys)


CONFIG = InputConfig(size=(16, 16), scale=1 / 255)


def pictures(folder: Path, count: int, seed: int = 0) -> list[Path]:
    rng = np.random.default_rng(seed)
    paths = [folder / f"{index:03}.jpg" for index in range(count)]
    for path in paths:
        Image.fromarray(rng.integers(0, 256, (20, 24, 3), np.uint8)).save(path)
    return paths


def gather(paths: list[Path], batch: int = 1, **options: Any) -> Collection:
    tensors = ("images", "b")
    exposed = expose(model(), tensors)
    runner = OnnxRunner(exposed)
    stream = ImageStream(paths, CONFIG, batch_size=batch)
    return collect(runner, CollectionRequest(runner.input, tensors, "key", "sha"), stream, **options)


def test_every_tensor_of_every_image_is_counted(tmp_path):
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


def test_neither_order_nor_batch_size_changes_the_collection(tmp_path):
    paths = pictures(tmp_path, 7)
    found = gather(paths)
    for other in (gather(paths[::-1]), gather(paths, batch=3)):
        assert same(other.histograms["images"], found.histograms["images"])
        # Another batch size may take another kernel, whose rounding differs in the last bit.
        assert other.histograms["b"].total == found.histograms["b"].total
    assert same(gather(paths[::-1]).histograms["b"], found.histograms["b"])


def test_progress_counts_the_images(tmp_path):
    seen: list[int] = []
    gather(pictures(tmp_path, 5), batch=2, progress=seen.append)
    assert seen == [2, 4, 5]


def test_a_truncated_image_among_twenty_is_named_skipped_and_counted(tmp_path):
    paths = pictures(tmp_path, 20)
    paths[7].write_bytes(paths[7].read_bytes()[:300])
    with pytest.warns(TrtdetWarning, match=r"skipped: .*007\.jpg"):
        found = gather(paths)
    assert (found.images, found.skipped) == (19, ("007.jpg",))
    assert found.histograms["images"].total == 19 * 3 * 16 * 16


def test_no_image_at_all_is_an_error():
    with pytest.raises(CalibrationError, match="no calibration image could be read; give a folder"):
        gather([])


def test_pictures_of_a_single_colour_are_an_error(tmp_path):
    path = tmp_path / "black.png"
    Image.new("RGB", (20, 20)).save(path)
    with pytest.raises(DataError, match=r"single colour \(black\.png\)"):
        gather([path])


@pytest.mark.parametrize(("value", "what"), [(np.nan, "NaN"), (np.inf, "infinite"), (-np.inf, "infinite")])
@pytest.mark.parametrize("batch", [1, 4])
def test_a_value_that_is_not_finite_names_the_tensor_and_the_image(tmp_path, value, what, batch):
    calls = []

    def run(images: np.ndarray) -> dict[str, np.ndarray]:
        calls.append(len(images))
        outputs = np.ones((len(images), 4, 2, 2), np.float32)
        done = sum(calls) - len(images)
        if done <= 5 < sum(calls):
            outputs[5 - done, 0, 0, 0] = value
        return {"layer/b": outputs}

    stream = ImageStream(pictures(tmp_path, 8), CONFIG, batch_size=batch)
    places = f"activation 'layer/b' is {what} in 1 of {16 * batch} places for image '005.jpg'"
    with pytest.raises(CalibrationError, match=f"{places}; the model overflows in float: check its weights"):
        collect(run, CollectionRequest("images", ("layer/b",)), stream)


def test_a_tensor_that_holds_nothing_for_an_image_counts_for_the_others(tmp_path):
    """As the regions on a level of a pyramid."""
    rows = iter((0, 2, 0, 1))

    def run(images: np.ndarray) -> dict[str, np.ndarray]:
        return {"some": np.full((next(rows), 3), -2, np.float32), "none": np.zeros((0, 3), np.float32)}

    stream = ImageStream(pictures(tmp_path, 4), CONFIG)
    found = collect(run, CollectionRequest("images", ("some", "none")), stream).histograms
    assert (found["some"].counts.sum(), found["some"].low, found["some"].high) == (9, -2, -2)
    assert (found["none"].counts.sum(), found["none"].low, found["none"].high) == (1, 0, 0)


def test_an_error_of_the_run_is_not_hidden(tmp_path):
    def run(images: np.ndarray) -> dict[str, np.ndarray]:
        raise RuntimeError("the run failed")

    stream = ImageStream(pictures(tmp_path, 2), CONFIG)
    with pytest.raises(RuntimeError, match="the run failed"):
        collect(run, CollectionRequest("images", ("images",)), stream)


@pytest.mark.parametrize(("value", "kind"), [(np.nan, "NaN"), (np.inf, "infinite")])
def test_outputs_that_are_not_asked_for_are_checked_and_not_counted(tmp_path, value, kind):
    calls = []

    def run(images: np.ndarray) -> dict[str, np.ndarray]:
        calls.append(len(images))
        scores = np.zeros((1, 5, 2), np.float32)
        scores[0, 1, 1] = value if len(calls) == broken else 0
        return {"b": np.ones((1, 4, 2, 2), np.float32), "scores": scores, "labels": np.zeros((1, 5), np.int64)}

    request, paths = CollectionRequest("images", ("b",)), pictures(tmp_path, 4)
    broken = 0
    assert list(collect(run, request, ImageStream(paths, CONFIG)).histograms) == ["b"]
    calls.clear()
    broken = 3
    with pytest.raises(CalibrationError, match=f"output 'scores' is {kind} in 1 of 10 places for image '002.jpg'"):
        collect(run, request, ImageStream(paths, CONFIG))


def test_the_key_does_not_depend_on_which_step_wrote_a_node():
    registered = model()
    for node in registered.graph.node:
        node.name = node.output[0]
    plain = key_of(registered)
    provenance.put(registered, {"a": Origin.ACTIVATION})
    assert key_of(registered) == plain
