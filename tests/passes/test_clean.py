import numpy as np
import onnx
import pytest

from trtdet.errors import ModelError
from trtdet.passes import clean

PLAIN = "(float[N,3,8,8] x) => (float[N,3,8,8] y) {y = Relu(x)}"


def operators(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


def shape(value: onnx.ValueInfoProto) -> list[int | str]:
    return [dim.dim_value or dim.dim_param for dim in value.type.tensor_type.shape.dim]


@pytest.mark.parametrize(
    ("nodes", "outputs", "left"),
    [
        (
            "a = Identity(x) b = Relu(a) c = Dropout(b) d = Identity(c) y = Neg(d) z = Add(d, a)",
            ["y", "z"],
            ["Relu", "Neg", "Add"],
        ),
        ("a = Relu(x) b = Identity(a) y = Identity(b)", ["y"], ["Relu", "Identity"]),  # an output keeps its name
        ("a = Identity(x) y = Mul(a, a)", ["y"], ["Mul"]),
    ],
)
def test_no_ops_are_dropped_and_the_numbers_stay(net, applied, same, nodes, outputs, left):
    listed = ", ".join(f"float[1,3,8,8] {name}" for name in outputs)
    model = net(f"(float[1,3,8,8] x) => ({listed}) {{ {nodes} }}")
    after, result = applied(clean, model)
    assert operators(after) == left
    assert result.count == len(model.graph.node) - len(left)
    assert [output.name for output in after.graph.output] == outputs
    same(after, model)


def test_a_loop_keeps_inputs_that_its_body_does_not_read(net, applied, same):
    text = """(float[1,3,8,8] x) => (float[1,3,8,8] y) {
        y = Loop(three, , x) <body = g (int64 i, bool c, float[1,3,8,8] a) => (bool d, float[1,3,8,8] b) {
            d = Constant<value = bool {1}>() b = Neg(a) }> }"""
    model = net(text, three=np.array(3))
    after, _ = applied(clean, model)
    (loop,) = after.graph.node
    (body,) = (attribute.g for attribute in loop.attribute if attribute.name == "body")
    assert len(body.input) == 3
    same(after, model)


def test_a_dropout_whose_mask_is_read_stays(net, applied):
    model = net("(float[1,3,8,8] x) => (float[1,3,8,8] y, bool[1,3,8,8] m) {y, m = Dropout(x)}")
    assert operators(applied(clean, model)[0]) == ["Dropout"]


def test_constant_expressions_become_constants(net, applied, same):
    text = """(float[1,3,8,8] x) => (float[1,3,8,8] y) {
            k = Constant<value_float = 2.0>() two = Add(k, w) three = Identity(two) y = Mul(x, three) }"""
    model = net(text, w=np.float32(1))
    after, result = applied(clean, model)
    assert operators(after) == ["Mul"]
    assert result.count == 3
    same(after, model, rtol=1e-6)


@pytest.mark.parametrize(
    "value", ["value_float = 2.0", "value_floats = [2.0]", "value_int = 2", "value_ints = [2]", "value = float {2.0}"]
)
def test_every_form_of_a_constant_is_folded(net, applied, same, value):
    model = net(f"(float[1,3,8,8] x) => (float[1,3,8,8] y) {{k = Constant<{value}>() f = Cast<to=1>(k) y = Mul(x, f)}}")
    after, _ = applied(clean, model)
    assert operators(after) == ["Mul"]
    same(after, model, rtol=1e-6)


def test_nodes_without_names_get_one_and_no_two_are_equal(net, applied):
    model = net("(float[1,3,8,8] x) => (float[1,3,8,8] y) {a = Relu(x) b = Relu(a) c = Neg(b) y = Neg(c)}", named=False)
    after, _ = applied(clean, model)
    assert [node.name for node in after.graph.node] == ["Relu_0", "Relu_1", "Neg_2", "Neg_3"]


@pytest.mark.parametrize(
    "names", [["a", "a", "a", "a"], ["Relu_1", "", "n", ""], ["Neg_3", "x", "x_1", ""], ["a_2", "a", "a", "a_3"]]
)
def test_names_given_are_kept_and_equal_ones_are_told_apart(net, applied, names):
    model = net("(float[1,3,8,8] x) => (float[1,3,8,8] y) {a = Relu(x) b = Relu(a) c = Neg(b) y = Neg(c)}")
    for node, name in zip(model.graph.node, names, strict=True):
        node.name = name
    found = [node.name for node in applied(clean, model)[0].graph.node]
    assert all(found) and len(set(found)) == 4
    assert {name for name in names if name} <= set(found)


def test_weights_listed_as_inputs_are_weights(net, normal, applied, same):
    text = "(float[1,3,8,8] x, float[4,3,1,1] w) => (float[1,4,8,8] y) {y = Conv(x, w)}"
    model = net(text, w=normal(4, 3, 1, 1, seed=1))
    after, _ = applied(clean, model)
    assert [value.name for value in after.graph.input] == ["x"]
    same(after, model, rtol=1e-5, atol=1e-6)


def test_outputs_that_do_not_depend_on_the_image_are_an_error(net, applied):
    model = net("(float[1,3,8,8] x) => (float[4] y) {z = Relu(x) y = Exp(w)}", w=np.zeros(4, np.float32))
    with pytest.raises(ModelError, match="the model's outputs do not depend on the image"):
        applied(clean, model)


def test_shapes_of_another_batch_are_forgotten_when_the_batch_is_frozen(net, applied):
    model = net("(float[N,3,8,8] x) => (float[1,3,8,8] y) {a = Relu(x) y = Neg(a)}")
    model.graph.value_info.append(onnx.helper.make_tensor_value_info("a", onnx.TensorProto.FLOAT, [1, 3, 8, 8]))
    after, _ = applied(clean, model, batch=4)
    for value in (*after.graph.input, *after.graph.value_info, *after.graph.output):
        assert shape(value) == [4, 3, 8, 8]


@pytest.mark.parametrize("size", [(16, 8), (8, 16)])
def test_height_and_width_must_both_be_those_of_the_configuration(net, configure, applied, size):
    message = f"input 'x' is 8x8 .height x width. but key 'input.size' is {size[0]}x{size[1]}"
    with pytest.raises(ModelError, match=message):
        applied(clean, net(PLAIN), configure(size=size))


def test_a_dynamic_batch_stays(net, applied):
    assert shape(applied(clean, net(PLAIN))[0].graph.output[0]) == ["N", 3, 8, 8]


def test_freezing_the_batch_folds_what_computed_it(net, applied, same):
    text = """(float[N,3,8,8] x) => (float[N,192] y) {
            s = Shape(x) n = Gather(s, i) u = Unsqueeze(n, ax) t = Concat<axis = 0>(u, m) y = Reshape(x, t) }"""
    model = net(text, i=np.int64(0), ax=np.array([0]), m=np.array([-1]))
    after, _ = applied(clean, model, batch=2)
    assert operators(after) == ["Reshape"]
    assert shape(after.graph.output[0]) == [2, 192]
    same(after, model)


@pytest.mark.parametrize("batch", [2, 4, "batch"])
def test_a_fixed_batch_is_left_to_the_pass_that_changes_it(net, applied, batch):
    model = net(PLAIN.replace("N", "2"))
    assert shape(applied(clean, model, batch=batch)[0].graph.input[0]) == [2, 3, 8, 8]


def test_a_convolution_says_its_kernel(net, applied):
    """Once its weights come from a DequantizeLinear, TensorRT 8.6's parser can no longer read it from them."""
    text = "(float[1,3,8,8] x) => (float[1,4,6,4] z) {y = Conv(x, w)\n z = ConvTranspose<pads = [1, 1, 1, 1]>(y, v)}"
    model = net(text, w=np.ones((4, 3, 3, 5), np.float32), v=np.ones((4, 4, 3, 3), np.float32))
    after, _ = applied(clean, model)
    attributes = [attribute for node in after.graph.node for attribute in node.attribute]
    assert [list(each.ints) for each in attributes if each.name == "kernel_shape"] == [[3, 5], [3, 3]]


def test_a_dynamic_height_and_width_become_those_of_the_configuration(net, configure, applied):
    model = net("(float[1,3,H,W] x) => (float[1,3,H,W] y) {a = Relu(x) y = Neg(a)}")
    after, _ = applied(clean, model, configure(size=(8, 16)))
    assert shape(after.graph.input[0]) == [1, 3, 8, 16]
    assert shape(after.graph.output[0]) == [1, 3, 8, 16]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("(float[1,3,16,8] x) => (float[1,3,16,8] y) {y = Relu(x)}", r"is 16x8 \(height x width\) but .* is 8x8"),
        ("(float[1,1,8,8] x) => (float[1,1,8,8] y) {y = Relu(x)}", r"has shape \[1, 1, 8, 8\], \(batch, 3, height"),
        ("(float[1,8,8,3] x) => (float[1,8,8,3] y) {y = Relu(x)}", r"has shape \[1, 8, 8, 3\]"),
        ("(float[3,8,8] x) => (float[3,8,8] y) {y = Relu(x)}", r"has shape \[3, 8, 8\]"),
        ("(float x) => (float y) {y = Relu(x)}", r"input 'x' has shape \[\]"),
        ("(float16[1,3,8,8] x) => (float16[1,3,8,8] y) {y = Relu(x)}", "'x' is float16, float32 is needed"),
        ("(uint8[1,3,8,8] x) => (float[1,3,8,8] y) {y = Cast<to = 1>(x)}", "'x' is uint8, float32 is needed"),
        (
            "(float[1,3,8,8] x, float[1] s) => (float[1,3,8,8] y) {y = Mul(x, s)}",
            "the model has inputs x, s; name the input of the image with key 'input.name'",
        ),
        ("() => (float[1] y) {y = Constant<value_floats = [1.0]>()}", "the model has no inputs"),
    ],
)
def test_an_input_that_does_not_fit_is_an_error(net, applied, text, message):
    with pytest.raises(ModelError, match=message):
        applied(clean, net(text))


def test_the_input_that_is_named_must_exist_and_be_the_only_one(net, configure, applied):
    with pytest.raises(
        ModelError, match=r"key 'input\.name' is 'images' but the model's inputs are x; give one of them$"
    ):
        applied(clean, net(PLAIN), configure(input={"name": "images"}))
    applied(clean, net(PLAIN), configure(input={"name": "x"}))
    model = net("(float[1,3,8,8] x, float[1] s) => (float[1,3,8,8] y) {y = Mul(x, s)}")
    with pytest.raises(ModelError, match=r"has inputs besides the image \(s\); export it with the image alone"):
        applied(clean, model, configure(input={"name": "x"}))


def test_the_graph_is_cut_at_the_outputs_that_are_named(net, run, configure, applied):
    model = net(
        "(float[1,3,8,8] x, float[1] factor) => (float[1,3,8,8] y) "
        "{ a = Neg(x) raw = Identity(a) b = Exp(raw) y = Mul(b, factor) }"
    )
    rewritten, _ = applied(clean, model, configure(outputs=["raw"], input={"name": "x"}))
    assert [node.op_type for node in rewritten.graph.node if node.op_type in ("Exp", "Mul")] == []
    assert [value.name for value in rewritten.graph.input] == ["x"]
    assert [value.name for value in rewritten.graph.output] == ["raw"]
    x = np.ones((1, 3, 8, 8), np.float32)
    np.testing.assert_array_equal(run(rewritten, x=x)["raw"], -x)


def test_a_named_output_that_is_missing_leaves_the_outputs_to_be_listed(net, configure, applied):
    kept, _ = applied(clean, net(PLAIN), configure(outputs=["nowhere"]))
    assert [value.name for value in kept.graph.output] == [value.name for value in net(PLAIN).graph.output]


@pytest.mark.parametrize(
    ("bounds", "kept"), [("end = 2", [1, 3]), ("start = 1, end = -1", [3, 8]), ("start = 2", [8, 8])]
)
def test_a_part_of_a_shape_folds_to_that_part(net, run, applied, bounds, kept):
    body = f"{{ s = Shape<{bounds}>(x) r = Concat<axis = 0>(s, k) y = Reshape(x, r) }}"
    after, _ = applied(clean, net(f"(float[1,3,8,8] x) => (float[a,b,c] y) {body}", opset=17, k=np.array([-1])))
    assert operators(after) == ["Reshape"]
    assert run(after, x=np.zeros((1, 3, 8, 8), np.float32))["y"].shape[:2] == tuple(kept)
