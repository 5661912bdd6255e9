"""A batch that is fixed at export is changed to the requested batch."""

import numpy as np
import onnx
import pytest

from trtdet.backends import OnnxRunner
from trtdet.config import load_config
from trtdet.errors import ModelError
from trtdet.exporter import SHAPES_MODEL
from trtdet.passes import Options, batch, load_model, rewrite, to_graph, to_model

CONFIG = load_config("shapes")


def changed(model: onnx.ModelProto, wanted: int | str) -> onnx.ModelProto:
    graph = to_graph(onnx.shape_inference.infer_shapes(model))
    batch.apply(graph, Options(CONFIG, batch=wanted))
    return to_model(graph)


SHAPED = """(float[2,3,4,4] x) => (float[2,48] flat, float[2,3,8,8] large, float[2,3,4,4] whole, float[2,5] wide) {
    flat = Reshape(x, f) large = Resize<mode = "nearest">(x, , , s) ones = Reshape(flat, w) whole = Mul(ones, half)
    mean = ReduceMean<axes = [1, 2, 3], keepdims = 1>(x) row = Reshape(mean, r) wide = Expand(row, e) }"""


def shaped_for(net, fixed: int) -> onnx.ModelProto:
    shapes = {"f": [-1], "s": [3, 8, 8], "w": [3, 4, 4], "r": [1], "e": [5]}
    values = {name: np.array([fixed, *shape]) for name, shape in shapes.items()}
    return net(SHAPED.replace("[2,", f"[{fixed},"), **values, half=np.float32(0.5))


@pytest.fixture
def shaped(net):
    return shaped_for(net, 2)


@pytest.mark.parametrize(("fixed", "wanted"), [(2, 1), (2, 3), (2, 5), (2, "batch"), (1, 3), (1, "batch")])
def test_shapes_that_hold_the_batch_are_written_anew(net, fixed, wanted):
    shaped = shaped_for(net, fixed)
    rewritten = OnnxRunner(changed(shaped, wanted))
    assert rewritten.batch == (wanted if isinstance(wanted, int) else None)
    images = np.random.default_rng(0).normal(size=(wanted if isinstance(wanted, int) else 7, 3, 4, 4))
    images = images.astype(np.float32)
    expected = OnnxRunner(shaped)
    for start in range(len(images)):
        one = expected(images[start : start + 1])
        for name, value in rewritten(images).items():
            np.testing.assert_array_equal(value[start], one[name][0])


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("y = Softmax<axis = 0>(x)", "an image's outputs depend on the others of its batch"),
        ("m = ReduceMax<axes = [0], keepdims = 1>(x)\n y = Sub(x, m)", "depend on the others"),
        ("t = Transpose<perm = [1, 0, 2, 3]>(x)\n y = Reshape(t, s)", "with a batch of 5 .*running Reshape"),
        ("y = Add(x, c)", "with a batch of"),
    ],
)
def test_what_mixes_the_images_is_refused_with_the_reason(net, body, why):
    constants = {"s": np.array([2, 3, 4, 4]), "c": np.ones((2, 3, 4, 4), np.float32)}
    used = {name: value for name, value in constants.items() if f" {name})" in body}
    model = net(f"(float[2,3,4,4] x) => (float[2,3,4,4] y) {{ {body} }}", **used)
    with pytest.raises(ModelError, match=f"fixed to 2 and cannot be changed: .*({why}).*--dynamic-batch"):
        changed(model, "batch")


def test_a_model_whose_batch_is_right_or_open_is_left_alone(shaped):
    for wanted in (2, None):
        graph = to_graph(onnx.shape_inference.infer_shapes(shaped))
        names = [node.name for node in graph.nodes]
        assert batch.apply(graph, Options(CONFIG, batch=wanted)).count == 0
        assert [node.name for node in graph.nodes] == names


@pytest.mark.parametrize("nms", ["host", "native", "onnx"])
def test_a_detector_gives_every_image_what_it_gave_it_alone(nms):
    model = load_model(SHAPES_MODEL)
    fixed = rewrite(model, Options(CONFIG, nms, batch=1)).model  # type: ignore[arg-type]
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 1  # as an exporter with one image writes it
    again = OnnxRunner(rewrite(model, Options(CONFIG, nms, batch="batch")).model)  # type: ignore[arg-type]
    images = np.random.default_rng(0).uniform(0, 1, (3, 3, CONFIG.input.height, CONFIG.input.width))
    images = images.astype(np.float32)
    together = again(images)
    alone = OnnxRunner(fixed)
    for index in range(3):
        for name, value in alone(images[index : index + 1]).items():
            np.testing.assert_allclose(together[name][index], value[0], rtol=1e-5, atol=1e-5)


def test_an_output_whose_shape_cannot_be_inferred_keeps_its_rank(net, configure, applied):
    """The target of a Reshape is read from the graph, as in SCRFD's exports."""
    text = """(float[1,3,8,8] x) => (float[1,64,3] y) {
        last = Transpose<perm = [0,2,3,1]>(x) whole = Shape(x) first = Gather(whole, zero)
        target = ScatterElements<axis = 0>(sizes, zero, first) y = Reshape(last, target)
    }"""
    weights = {"zero": np.array([0]), "sizes": np.array([1, 64, 3])}
    after, _ = applied(batch, net(text, **weights), configure(), batch="b")
    assert len(after.graph.output[0].type.tensor_type.shape.dim) == 3
