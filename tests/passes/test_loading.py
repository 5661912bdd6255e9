"""Requirements on a model that is loaded, and corrections while loading."""

from contextlib import nullcontext
from typing import Any

import nets
import numpy as np
import onnx
import pytest

from trtdet.errors import ModelError
from trtdet.exporter import SHAPES_MODEL
from trtdet.passes import Options, load_model, rewrite

CONV = "(float[1,3,8,8] x) => (float[1,4,8,8] y) {y = Conv(x, w, b)}"


@pytest.fixture
def reload(tmp_path):
    """A model as it is after saving and loading, which ends with an error that matches a pattern, if there is one."""

    def reload(model: onnx.ModelProto, error: str = "") -> onnx.ModelProto:
        path = tmp_path / "model.onnx"
        path.write_bytes(model.SerializeToString())
        with pytest.raises(ModelError, match=error) if error else nullcontext():
            return load_model(path, allow_quantized=True)
        return model

    return reload


@pytest.fixture
def conv(net, normal):
    return net(CONV, w=normal(4, 3, 1, 1), b=normal(4))


def put(model: onnx.ModelProto, name: str, value: np.ndarray) -> onnx.ModelProto:
    weight = next(weight for weight in model.graph.initializer if weight.name == name)
    weight.CopyFrom(onnx.numpy_helper.from_array(value, name))
    return model


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_weight_that_is_not_finite_is_named(net, reload, dtype, value):
    text = "(float[2] x) => (float[2] y) {c = Cast<to=1>(w) m = Mul(w, w) z = Cast<to=1>(m) y = Add(x, z)}"
    model = net(text, w=np.array([1, value], dtype))
    reload(model, "has a weight that is not finite: 'w' holds [01] NaN and [01] infinite of 2")
    reload(put(model, "w", np.array([1, 2], dtype)))


def test_a_signalling_nan_is_named_without_a_warning(net, reload):
    signalling = np.array([0x7F800001, 0], np.uint32).view(np.float32)
    reload(net("(float[2] x) => (float[2] y) {y = Mul(x, w)}", w=signalling), "'w' holds 1 NaN and 0 infinite of 2")


def test_a_constant_that_is_not_finite_is_found_in_a_branch(net, reload):
    text = """(float[2] x, bool c) => (float[2] y) {
        y = If (c) <then_branch = a () => (float[2] u) {k = Constant<value = float[2] {1.0, 2.0}>() u = Mul(x, k)},
                    else_branch = e () => (float[2] v) {v = Identity(x)}>
    }"""
    model = net(text)
    branch = next(one.g for one in model.graph.node[0].attribute if one.name == "then_branch")
    reload(model)
    branch.node[0].attribute[0].t.CopyFrom(onnx.numpy_helper.from_array(np.array([np.nan, 1], np.float32)))
    reload(model, "not finite: 'k' holds 1 NaN")


@pytest.mark.parametrize(
    "text",
    [
        "y = Clip(x, z, w)",
        "y = Where(c, x, w)",
        "m = Cast<to=1>(c) y = Max(x, w)",
        "r = Unsqueeze(w, a) t = Squeeze(r, a) y = Where(c, x, t)",
    ],
)
def test_infinity_as_a_bound_or_a_filling_is_valid(net, reload, text):
    model = net(
        f"(float[2] x, bool[2] c) => (float[2] y) {{{text}}}",
        w=np.array(np.inf, np.float32),
        z=np.array(-np.inf, np.float32),
        a=np.array([0], np.int64),
    )
    reload(model)


def test_a_mask_may_add_minus_infinity_only(net, reload):
    text = "(float[2] x) => (float[2] y) {m = Add(x, w) y = Softmax(m)}"
    model = net(text, w=np.array([0, -np.inf], dtype=np.float32))
    reload(model)
    reload(put(model, "w", np.array([0, np.inf], np.float32)), "not finite: 'w'")
    reload(put(model, "w", np.array([-np.inf, np.nan], np.float32)), "holds 1 NaN and 1 infinite of 2")


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ("m = Add(x, w) y = Sigmoid(m)", True),
        ("m = Add(x, w) g = GatherElements<axis=0>(m, i) y = Sigmoid(g)", True),
        ("m = Add(x, w) y = Exp(m)", False),
        ("m = Mul(x, w) y = Sigmoid(m)", False),
    ],
)
def test_infinite_anchors_are_valid_where_a_sigmoid_saturates(net, reload, text, allowed):
    model = net(
        f"(float[2] x) => (float[2] y) {{{text}}}", w=np.array([0, np.inf], np.float32), i=np.array([1, 0], np.int64)
    )
    reload(model, "" if allowed else "not finite: 'w' holds 0 NaN and 1 infinite of 2")


def test_negative_dimensions_are_open_ones(net, normal, reload):
    """ONNX's shape inference ends the process on a Slice along such an axis."""
    text = "(float[1,3,8,8] x) => (float[1,3,4,8] y) {y = Slice(x, start, end, axis)}"
    bounds = {name: np.array([value], np.int64) for name, value in (("start", 0), ("end", 4), ("axis", 2))}
    model = net(text, **bounds)
    for value in (*model.graph.input, *model.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            dim.dim_value = -1
    loaded = reload(model)
    dims = [dim for value in loaded.graph.input for dim in value.type.tensor_type.shape.dim]
    assert [dim.HasField("dim_value") for dim in dims] == [False] * 4


def test_an_absurd_length_of_a_shape_is_an_open_one(net, reload):
    """ONNX's shape inference keeps 140 bytes for each element: 2**31 took all memory of the machine."""
    model = net("(float[1,3,8,8] x) => (float[1,3,8,8] y) {s = Shape(x) y = Reshape(x, s)}")
    values = [("s", onnx.TensorProto.INT64, [2**22]), ("t", onnx.TensorProto.FLOAT, [2**22])]
    model.graph.value_info.extend(onnx.helper.make_tensor_value_info(*value) for value in values)
    found = {value.name: value.type.tensor_type.shape.dim[0] for value in reload(model).graph.value_info}
    assert not found["s"].HasField("dim_value")
    assert found["t"].dim_value == 2**22


def test_a_detector_with_negative_dimensions_is_rewritten_as_one_with_open_ones(net, normal, configure, reload):
    text = "(float[N,3,8,8] x) => (float[N,64,8] y) {c = Conv(x, w) r = Reshape(c, s) y = Transpose<perm=[0,2,1]>(r)}"
    model = net(text, w=normal(8, 3, 1, 1), s=np.array([0, 8, 64], np.int64))
    expected = rewrite(reload(model), Options(configure(), batch=2)).model
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = -1
    assert rewrite(reload(model), Options(configure(), batch=2)).model == expected


def test_the_domain_ai_onnx_is_the_empty_one(conv, reload):
    expected = reload(conv)
    conv.graph.node[0].domain = "ai.onnx"
    assert reload(conv) == expected
    conv.opset_import[0].domain = "ai.onnx"
    assert reload(conv) == expected


def test_a_domain_with_two_opsets_has_the_newer(net, reload):
    model = net("(float[2] x) => (float[2] y) {y = Mish(x)}", opset=18)
    model.opset_import.append(onnx.helper.make_opsetid("ai.onnx", 13))
    assert [(entry.domain, entry.version) for entry in reload(model).opset_import] == [("", 18)]


def test_a_domain_without_an_opset_has_opset_1(net, reload):
    model = net("(float[2] x) => (float[2] y) {y = Relu(x)}")
    model.graph.node[0].op_type = "TRT_SiLU"
    loaded = reload(model)
    assert [(entry.domain, entry.version) for entry in loaded.opset_import] == [("", 13), ("trt.plugins", 1)]


def test_nodes_in_the_wrong_order_are_sorted(net, reload):
    model = net("(float[2] x) => (float[2] y) {a = Relu(x) b = Neg(a) y = Abs(b)}")
    nodes = [onnx.NodeProto.FromString(node.SerializeToString()) for node in model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend(nodes[::-1])
    assert list(reload(model).graph.node) == nodes


def test_a_circle_of_nodes_is_named(net, reload):
    model = net("(float[2] x) => (float[2] y) {a = Add(x, b) b = Neg(a) y = Abs(b)}")
    reload(model, "node 'Add_0' depends on its own output")
    reload(net("(float[2] x) => (float[2] y) {y = Relu(y)}"), "node 'Relu_0' reads its own output")


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("b", (3,), r"node 'Conv_0' \(Conv\) has a bias of size 3, 4 is needed"),
        ("w", (4, 2, 1, 1), "has an axis of channels of size 3, 2 is needed"),
        ("w", (5, 3, 1, 1), "has a bias of size 4, 5 is needed"),
    ],
)
def test_sizes_that_a_convolution_cannot_have_are_named(conv, normal, reload, name, shape, message):
    conv.graph.output[0].type.tensor_type.shape.dim[1].ClearField("dim_value")
    reload(put(conv, name, normal(*shape)), message)


def test_sizes_of_transposed_and_grouped_convolutions(net, normal, reload):
    text = "(float[1,4,8,8] x) => (float[1,6,8,8] y) {y = ConvTranspose<group=2>(x, w, b)}"
    reload(net(text, w=normal(4, 3, 1, 1), b=normal(6)))
    reload(net(text, w=normal(4, 3, 1, 1), b=normal(4)), "has a bias of size 4, 6 is needed")
    grouped = "(float[1,4,8,8] x) => (float[1,6,8,8] y) {y = Conv<group=2>(x, w)}"
    reload(net(grouped, w=normal(6, 2, 1, 1)))
    line = net("(float[1,3,8] x) => (float[1,4,8] y) {y = Conv(x, w)}", w=normal(4, 2, 1))
    reload(line, "has an axis of channels of size 3, 2 is needed")
    reload(net(grouped.replace("1,6", "1,5"), w=normal(5, 2, 1, 1)), "has 2 groups, its weights have 5 channels")


def test_a_batch_normalisation_with_a_short_parameter_is_named(net, normal, reload):
    text = "(float[1,4,8,8] x) => (float[1,4,8,8] y) {y = BatchNormalization(x, s, t, m, v)}"
    weights = {name: np.abs(normal(4)) for name in "stmv"}
    reload(net(text, **weights))
    reload(net(text, **{**weights, "m": normal(3)}), "has a parameter of size 3, 4 is needed")


@pytest.mark.parametrize(
    ("attribute", "message"),
    [
        ("strides=[1,1,1]", r"strides = \[1, 1, 1\], needed are 2 numbers"),
        ("strides=[0,1]", "needed are 2 numbers from 1"),
        ("pads=[0,0,0,-1]", "needed are 4 numbers from 0"),
        ("pads=[0,0,0,9000000000000]", "needed are 4 numbers from 0 to 2147483647"),
        ("pads=[0,0,0,2000000000]", r"has a tensor 'y' of shape .*allowed are 2147483647 elements"),
        ("kernel_shape=[3,3]", "has a kernel of size 3, 1 is needed"),
    ],
)
def test_attributes_that_a_convolution_cannot_have_are_named(net, normal, reload, attribute, message):
    text = f"(float[1,3,8,8] x) => (float[1,4,N,M] y) {{y = Conv<{attribute}>(x, w)}}"
    reload(net(text, w=normal(4, 3, 1, 1)), message)


def test_a_window_without_a_step_is_named_before_shapes_are_inferred(net, normal, reload, monkeypatch):
    """Shape inference of ONNX 1.19 divides by the step, which ends the process without an exception."""
    monkeypatch.setattr(onnx.shape_inference, "infer_shapes", lambda *_, **__: pytest.fail("the step was not checked"))
    pool = "(float[1,3,8,8] x) => (float[1,3,N,M] y) {y = MaxPool<kernel_shape=[2,2], strides=[0,1]>(x)}"
    reload(net(pool), r"strides = \[0, 1\], needed are 2 numbers from 1")
    function = "<domain: 'own', opset_import: ['': 18]> f (x) => (y) {y = MaxPool<kernel_shape=[2], strides=[0]>(x)}"
    model = net("(float[1,3,8,8] x) => (float[1,3,8,8] y) {y = Relu(x)}")
    model.functions.append(onnx.parser.parse_function(function.replace("'", '"')))
    reload(model, r"strides = \[0\], needed are 1 numbers from 1")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda weight: weight.dims.__setitem__(0, 5), "data of weight 'w' does not fit its shape"),
        (lambda weight: weight.dims.__setitem__(0, -4), "weight 'w' has shape"),
        (lambda weight: weight.dims.__setitem__(0, 2**40), "weight 'w' has shape"),
        (lambda weight: setattr(weight, "data_type", 29), "weight 'w' has the unknown data type 29"),
        (lambda weight: setattr(weight, "data_type", 0), "weight 'w' has the unknown data type 0"),
        (lambda weight: setattr(weight, "data_type", 11), "data of weight 'w' does not fit its shape"),
        (
            lambda weight: setattr(weight, "raw_data", weight.raw_data[:-1]),
            "the data of weight 'w' does not fit its shape",
        ),
        (lambda weight: weight.ClearField("raw_data"), "data of weight 'w' does not fit its shape"),
    ],
)
def test_a_weight_of_the_wrong_size_or_type_is_named(conv, reload, damage, message):
    damage(conv.graph.initializer[0])
    reload(conv, message)


@pytest.mark.parametrize("side", ["input", "output"])
def test_a_node_without_inputs_or_outputs_is_an_error(conv, reload, side):
    del getattr(conv.graph.node[0], side)[:]
    reload(conv, r"model '.*' is not valid ONNX.*; export it again")


def test_what_readers_and_writers_of_onnx_are_lax_about_stays_allowed(conv, reload):
    conv.graph.output[0].type.tensor_type.ClearField("shape")
    conv.ir_version = 99
    assert reload(conv).ir_version == 99
    conv.graph.output[0].ClearField("type")
    reload(conv)


def test_a_failure_of_a_library_names_the_pass(net, configure, monkeypatch):
    from trtdet.passes import batchnorm

    def broken(*_: Any) -> None:
        raise IndexError("list index\nout of range")

    monkeypatch.setattr(batchnorm, "apply", broken)
    model = net("(float[1,3,8,8] x) => (float[1,3,8,8] y) {y = Relu(x)}")
    with pytest.raises(
        ModelError, match="cannot be rewritten: pass 'batchnorm' met IndexError: list index out of range; export"
    ) as caught:
        rewrite(model, Options(configure()))
    assert isinstance(caught.value.__cause__, IndexError)


@pytest.mark.parametrize("nms", ["host", "onnx", "native", "efficient"])
@pytest.mark.parametrize("silu", ["keep", "swish", "plugin"])
def test_what_trtdet_wrote_is_valid(reload, nms, silu):
    from trtdet.config import load_config

    source = load_model(SHAPES_MODEL)
    made = rewrite(source, Options(load_config("shapes"), nms=nms, silu=silu)).model
    assert reload(made) == made


@pytest.mark.parametrize("version", [2**40, 0, -1, 999])
def test_an_opset_that_onnx_does_not_have_is_named(conv, reload, version):
    conv.opset_import[0].version = version
    reload(conv, rf"has opset {version} of domain 'ai\.onnx', and 1 to \d+ are known; export with one of these")


def test_an_operator_that_is_not_text_is_an_error(conv, tmp_path):
    path = tmp_path / "model.onnx"
    path.write_bytes(conv.SerializeToString().replace(b"Conv", b"\xff\xfe\xfd\xfc"))
    with pytest.raises(ModelError, match="is not ONNX or is truncated|whose operator or names are not UTF-8"):
        load_model(path)


@pytest.mark.parametrize("place", ["x" * 5000, "a\0b", "..", "/etc/passwd"])
def test_a_place_of_external_data_that_no_file_can_have_is_an_error(conv, tmp_path, place):
    weight = conv.graph.initializer[0]
    weight.ClearField("raw_data")
    weight.data_location = onnx.TensorProto.EXTERNAL
    weight.external_data.add(key="location", value=place)
    (tmp_path / "m.onnx").write_bytes(conv.SerializeToString())
    with pytest.raises(ModelError, match="keeps its weights in separate files"):
        load_model(tmp_path / "m.onnx")


def test_an_attribute_of_a_plugin_may_be_a_list_of_one(net, reload):
    """YOLOv7's exporter writes ``background_class`` so."""
    text = "(float[1,9,4] b, float[1,9,2] s) => (int32[1,1] n, float[1,5,4] d, float[1,5] e, int32[1,5] c)"
    attributes = "background_class=[-1], box_coding=0, score_threshold=0.25, iou_threshold=0.5, max_output_boxes=5"
    attributes += ', score_activation=[0], plugin_version="1"'
    model = net(f"{text} {{n, d, e, c = EfficientNMS_TRT<{attributes}>(b, s)}}")
    (node,) = reload(model).graph.node
    assert {a.name: a.i for a in node.attribute if a.type == onnx.AttributeProto.INT} == {
        "background_class": -1,
        "box_coding": 0,
        "max_output_boxes": 5,
        "score_activation": 0,
    }
    two = attributes.replace("[-1]", "[-1, 0]")
    reload(net(f"{text} {{n, d, e, c = EfficientNMS_TRT<{two}>(b, s)}}"), "Expected: 'INT', actual: 'INTS'")


@pytest.mark.parametrize("coordinates", [False, True], ids=["linear", "coordinates"])
def test_sparse_constants_become_dense_ones(conv, reload, coordinates):
    held = next(weight for weight in conv.graph.initializer if weight.name == "w")
    dense = np.zeros((4, 3, 1, 1), np.float32)
    dense[1, 2], dense[3, 0] = 0.5, -2.0
    conv.graph.initializer.remove(held)
    places = np.argwhere(dense) if coordinates else np.flatnonzero(dense)
    values = onnx.numpy_helper.from_array(dense[dense != 0], "w")
    sparse = onnx.helper.make_sparse_tensor(values, onnx.numpy_helper.from_array(places, "w/places"), list(dense.shape))
    conv.graph.sparse_initializer.append(sparse)
    loaded = reload(conv)
    weights = {weight.name: onnx.numpy_helper.to_array(weight) for weight in loaded.graph.initializer}
    assert np.array_equal(weights["w"], dense) and not loaded.graph.sparse_initializer
    sparse.indices.CopyFrom(onnx.numpy_helper.from_array(places + 100, "w/places"))
    del conv.graph.sparse_initializer[:]
    conv.graph.sparse_initializer.append(sparse)
    reload(conv, "has a sparse constant that is damaged")
    sparse.dims[:] = [2**20, 2**20]
    conv.graph.sparse_initializer[0].CopyFrom(sparse)
    reload(conv, "has a sparse constant that is damaged")


@pytest.mark.parametrize(("name", "written", "meant"), [("strides", [2], [2, 2]), ("pads", [1], [1, 1, 1, 1])])
def test_a_number_that_stands_for_both_axes_is_repeated(tmp_path, name, written, meant):
    model = nets.net("(float[1,3,8,8] x) => (float[1,4,N,M] y) { y = Conv(x, w) }", w=nets.normal(4, 3, 3, 3))
    model.graph.node[0].attribute.append(onnx.helper.make_attribute(name, written))
    onnx.save(model, tmp_path / "m.onnx")
    (attribute,) = [one for one in load_model(tmp_path / "m.onnx").graph.node[0].attribute if one.name == name]
    assert list(attribute.ints) == meant
