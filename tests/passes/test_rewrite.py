"""All passes together."""

import numpy as np
import onnx
import pytest

from trtdet.config import load_config
from trtdet.detection import heads
from trtdet.detection import suppression as detections
from trtdet.errors import ModelError
from trtdet.passes import PASSES, Options, load_model, rewrite

# A detector small enough to read: 64 cells of 8 channels at stride 8.
TEXT = """(float[N,3,64,64] x) => (float[N,64,8] raw) {
    i = Identity(x)
    c = Conv<strides = [8,8]>(i, w)
    v = Abs(variance)
    n = BatchNormalization(c, scale, shift, mean, v)
    r = Reshape(n, shape)
    raw = Transpose<perm = [0,2,1]>(r) }"""


@pytest.fixture
def detector(net, normal):
    ones = np.ones(8, np.float32)
    norm = {"scale": ones, "shift": 0 * ones, "mean": 0 * ones, "variance": ones}
    weights = {"w": normal(8, 3, 8, 8, scale=0.1), "shape": np.array([0, 8, -1])}
    return net(TEXT, opset=11, named=False, **weights, **norm)


@pytest.fixture
def config(configure):
    return configure("yolox", (64, 64), strides=[8], scores="logits", nms={"max_detections": 20})


COUNTS = {
    "clean": 2,
    "unstack": 0,
    "batchnorm": 1,
    "stem": 0,
    "pooling": 0,
    "opset": 1,
    "batch": 0,
    "silu": 0,
    "decode": 1,
    "nms": 1,
}
"""Of the detector, in the order of the passes."""


def test_the_order_of_the_passes_is_fixed_and_each_says_its_arrow():
    assert [one.__name__.rpartition(".")[2] for one in PASSES] == list(COUNTS)
    assert all("->" in (one.__doc__ or "").splitlines()[0] for one in PASSES)


@pytest.mark.parametrize("where", ["native", "host"])
@pytest.mark.parametrize("batch", [None, 2])
def test_all_passes_keep_the_meaning_and_do_not_change_the_model_given(run, normal, detector, config, where, batch):
    before = detector.SerializeToString()
    rewritten = rewrite(detector, Options(config, where, batch))
    assert detector.SerializeToString() == before
    counts = {name: result.count for name, result in rewritten.results.items()}
    assert counts == COUNTS | {"nms": int(where == "native")}
    names = [node.name for node in rewritten.model.graph.node]
    assert all(names) and len(set(names)) == len(names)
    x = normal(2, 3, 64, 64)
    raw = run(detector, x=x)
    boxes, scores = heads.decode(raw, config)
    got = run(rewritten.model, x=x)
    if where == "host":
        np.testing.assert_allclose(got["boxes"], boxes, rtol=1e-4, atol=1e-3)
        np.testing.assert_allclose(got["scores"], scores, rtol=1e-4, atol=1e-6)
    else:
        expected = detections.non_max_suppression(boxes, scores, config.nms)
        np.testing.assert_array_equal(got["num_dets"], expected.num_dets)
        np.testing.assert_allclose(got["scores"], expected.scores, rtol=1e-4, atol=1e-6)


def test_rewriting_twice_gives_the_same_bytes(detector, config):
    first, second = (rewrite(detector, Options(config, "native")).model for _ in range(2))
    assert first.SerializeToString(deterministic=True) == second.SerializeToString(deterministic=True)


def test_a_dynamic_number_of_boxes_is_an_error_that_says_so(net, configure):
    text = """(float[1,3,8,8] x) => (float[1,M,8] y) {
        f = Flatten(x) n = NonZero(f) t = Transpose<perm = [1,0]>(n) c = Cast<to = 1>(t)
        e = Unsqueeze(c, zero) y = Tile(e, four) }"""
    model = net(text, zero=np.array([0]), four=np.array([1, 1, 4]))
    with pytest.raises(ModelError, match="the number of boxes is not fixed"):
        rewrite(model, Options(configure("yolov5"), "native"))


def test_a_number_of_boxes_that_the_graph_computes_is_found(net, run, configure):
    """As exporters of torch write a reshape where the batch is open: no inference of shapes sees through it."""
    text = """
        (float[N,3,8,8] image) => (float[A,B,7] out) {
            whole = Shape (image)
            batch = Slice (whole, zero, one)
            wanted = Concat <axis = 0> (batch, rest)
            found = Equal (wanted, nothing)
            shape = Where (found, ones, wanted)
            flat = Conv <strides = [4, 4]> (image, w)
            out = Reshape (flat, shape)
        }
    """
    constants = {"zero": [0], "one": [1], "rest": [12, 7], "nothing": [-1, -1, -1], "ones": [1, 1, 1]}
    arrays = {name: np.array(value) for name, value in constants.items()}
    w = np.random.default_rng(0).normal(0, 0.2, (21, 3, 4, 4)).astype(np.float32)
    config = configure("yolov5", classes=2)
    model = net(text, opset=17, w=w, **arrays)
    images = np.random.default_rng(1).uniform(0, 1, (2, 3, 8, 8)).astype(np.float32)
    raw = run(model, image=images)["out"]
    done = run(rewrite(model, Options(config, "native")).model, image=images)
    expected = detections.non_max_suppression(*heads.decode([raw], config), config.nms)
    np.testing.assert_array_equal(done["num_dets"], expected.num_dets)
    np.testing.assert_allclose(done["scores"], expected.scores, atol=1e-6)


def test_native_takes_the_number_of_boxes_from_the_grid_where_the_model_leaves_it_open(detector, config):
    output = detector.graph.output[0].type.tensor_type.shape.dim[1]
    output.Clear()
    output.dim_param = "M"
    detector.graph.initializer.remove(next(one for one in detector.graph.initializer if one.name == "shape"))
    detector.graph.node.insert(0, onnx.helper.make_node("Reshape", ["flat", "sizes"], ["shape"]))
    for name, value in {"flat": np.array([[0, 8, -1]]), "sizes": np.array([3])}.items():
        detector.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    rewritten = rewrite(detector, Options(config, "native", 1)).model
    assert [dim.dim_value for dim in rewritten.graph.output[1].type.tensor_type.shape.dim] == [1, 20, 4]


@pytest.mark.parametrize(
    ("name", "decode", "options", "top"), [("yolox_nano", "yolox", {}, 255), ("picodet_s", "dfl", {"batch": 1}, 1)]
)
def test_the_real_models_mean_the_same_before_and_after(shared_data, run, name, decode, options, top):
    image = np.random.default_rng(0).uniform(0, top, (1, 3, 416, 416)).astype(np.float32)
    model, config = load_model(shared_data / "models" / f"{name}.onnx"), load_config(decode)
    feeds = {model.graph.input[0].name: image}
    got = run(rewrite(model, Options(config, **options)).model, **feeds)
    boxes, scores = heads.decode(run(model, **feeds), config)
    np.testing.assert_allclose(got["boxes"], boxes, rtol=1e-3, atol=1e-2)
    np.testing.assert_allclose(got["scores"], scores, rtol=1e-3, atol=1e-5)
