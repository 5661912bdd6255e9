"""Damaged models: whatever is wrong with one, loading and rewriting it succeed or say so in an error of trtdet."""

import random
from collections.abc import Callable

import numpy as np
import onnx
import pytest

from trtdet.errors import TrtdetError
from trtdet.passes import Options, embedded_nms, load_model, rewrite

NET = """(float[1,3,16,16] x) => (float[1,84,8] y) {
    c = Conv<kernel_shape=[3,3], pads=[1,1,1,1]>(x, w, b)
    n = BatchNormalization(c, scale, shift, mean, variance)
    s = Sigmoid(n)
    a = Mul(n, s)
    p = MaxPool<kernel_shape=[2,2], strides=[2,2]>(a)
    u = Resize<mode="nearest">(p, , factors)
    j = Concat<axis=1>(a, u)
    h = Conv<kernel_shape=[1,1], group=2>(j, v)
    part = Slice(h, starts, ends, axes)
    d = Conv<strides=[2,2], dilations=[1,1]>(part, k)
    size = Shape(d)
    first = Gather<axis=0>(size, zero)
    row = Unsqueeze(first, axis)
    whole = Concat<axis=0>(row, rest)
    flat = Reshape(h, whole)
    turned = Transpose<perm=[0,2,1]>(flat)
    cut = Slice(turned, zeros, last, one)
    y = Identity(cut)
}"""


@pytest.fixture
def detector(net, normal):
    def ints(*values: int) -> np.ndarray:
        return np.array(values, np.int64)

    bounds = {"starts": ints(0), "ends": ints(4), "axes": ints(1), "axis": ints(0), "rest": ints(8, -1)}
    bounds |= {"zeros": ints(0), "last": ints(84), "one": ints(1), "zero": np.array(0, np.int64)}
    floats = {name: np.abs(normal(4)) + 0.1 for name in ("scale", "shift", "mean", "variance")}
    weights = {"w": normal(4, 3, 3, 3), "b": normal(4), "v": normal(8, 4, 1, 1), "k": normal(2, 4, 1, 1)}
    model = net(NET, **weights, **floats, **bounds, factors=np.array([1, 1, 2, 2], np.float32))
    model.graph.output[0].type.tensor_type.ClearField("shape")
    return onnx.shape_inference.infer_shapes(model)


def odd(draw: random.Random) -> int:
    return draw.choice([-(2**63), -(2**31), -1, 0, 1, 2, 3, 7, 2**16, 2**31, 2**40, 2**62])


def values(model: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    return [*model.graph.input, *model.graph.output, *model.graph.value_info]


def dimension(model: onnx.ModelProto, draw: random.Random) -> None:
    shape = draw.choice([value for value in values(model) if value.type.tensor_type.shape.dim]).type.tensor_type.shape
    draw.choice(list(shape.dim)).dim_value = odd(draw)


def all_dimensions(model: onnx.ModelProto, draw: random.Random) -> None:
    for value in values(model):
        for dim in value.type.tensor_type.shape.dim:
            dim.dim_value = -1


def element_type(model: onnx.ModelProto, draw: random.Random) -> None:
    draw.choice(values(model)).type.tensor_type.elem_type = draw.randrange(0, 30)


def missing_type(model: onnx.ModelProto, draw: random.Random) -> None:
    draw.choice(values(model)).ClearField("type")


def attribute(model: onnx.ModelProto, draw: random.Random) -> None:
    node = draw.choice([node for node in model.graph.node if node.attribute])
    changed = draw.choice(list(node.attribute))
    if changed.ints:
        changed.ints[draw.randrange(len(changed.ints))] = odd(draw)
    else:
        changed.i = odd(draw)


def attribute_length(model: onnx.ModelProto, draw: random.Random) -> None:
    node = draw.choice([node for node in model.graph.node if any(one.ints for one in node.attribute)])
    found = next(one for one in node.attribute if one.ints)
    found.ints[:] = [odd(draw)] * draw.randrange(0, 6)


def wrong_attribute(model: onnx.ModelProto, draw: random.Random) -> None:
    node = draw.choice(model.graph.node)
    node.attribute.append(onnx.helper.make_attribute(draw.choice(["axis", "to", "group", "end", "x"]), odd(draw)))


def no_inputs(model: onnx.ModelProto, draw: random.Random) -> None:
    del draw.choice(model.graph.node).input[draw.randrange(0, 2) :]


def no_outputs(model: onnx.ModelProto, draw: random.Random) -> None:
    del draw.choice(model.graph.node).output[:]


def another_input(model: onnx.ModelProto, draw: random.Random) -> None:
    """A cycle, an input of another type, or one that nothing gives."""
    node = draw.choice([node for node in model.graph.node if node.input])
    names = [name for other in model.graph.node for name in (*other.input, *other.output)] + ["absent", ""]
    node.input[draw.randrange(len(node.input))] = draw.choice(names)


def operator(model: onnx.ModelProto, draw: random.Random) -> None:
    others = ["Relu", "Split", "Loop", "If", "Cast", "Constant", "ConvTranspose", "Gemm", "TopK", "NonMaxSuppression"]
    draw.choice(model.graph.node).op_type = draw.choice([*others, "EfficientNMS_TRT", "TRT_SiLU", "Expand", "Tile", ""])


def domain(model: onnx.ModelProto, draw: random.Random) -> None:
    draw.choice(model.graph.node).domain = draw.choice(["ai.onnx", "trt.plugins", "ai.onnx.ml", "acme"])


def opset(model: onnx.ModelProto, draw: random.Random) -> None:
    model.opset_import[0].version = draw.choice([-1, 0, 1, 6, 9, 11, 18, 21, 25, 99])


def opset_domain(model: onnx.ModelProto, draw: random.Random) -> None:
    model.opset_import.append(onnx.helper.make_opsetid(draw.choice(["", "ai.onnx", "acme"]), draw.randrange(1, 20)))


def weight_shape(model: onnx.ModelProto, draw: random.Random) -> None:
    weight = draw.choice([one for one in model.graph.initializer if one.dims])
    weight.dims[draw.randrange(len(weight.dims))] = odd(draw)


def weight_data(model: onnx.ModelProto, draw: random.Random) -> None:
    weight = draw.choice(model.graph.initializer)
    weight.raw_data = weight.raw_data[: draw.randrange(len(weight.raw_data))]


def weight_type(model: onnx.ModelProto, draw: random.Random) -> None:
    draw.choice(model.graph.initializer).data_type = draw.randrange(-1, 30)


def weight_value(model: onnx.ModelProto, draw: random.Random) -> None:
    weight = draw.choice(model.graph.initializer)
    array = onnx.numpy_helper.to_array(weight).copy()
    wrong = [np.nan, np.inf, -np.inf, 1e38] if array.dtype.kind == "f" else [odd(draw)]
    array.reshape(-1)[draw.randrange(array.size)] = draw.choice(wrong)
    weight.CopyFrom(onnx.numpy_helper.from_array(array, weight.name))


def shorter(model: onnx.ModelProto, draw: random.Random) -> None:
    weight = draw.choice([one for one in model.graph.initializer if one.dims])
    array = onnx.numpy_helper.to_array(weight)
    weight.CopyFrom(onnx.numpy_helper.from_array(array[:-1], weight.name))


def no_weight(model: onnx.ModelProto, draw: random.Random) -> None:
    del model.graph.initializer[draw.randrange(len(model.graph.initializer))]


def no_node(model: onnx.ModelProto, draw: random.Random) -> None:
    del model.graph.node[draw.randrange(len(model.graph.node))]


def twice(model: onnx.ModelProto, draw: random.Random) -> None:
    model.graph.node.append(draw.choice(model.graph.node))


def shuffled(model: onnx.ModelProto, draw: random.Random) -> None:
    nodes = [onnx.NodeProto.FromString(node.SerializeToString()) for node in model.graph.node]
    draw.shuffle(nodes)
    del model.graph.node[:]
    model.graph.node.extend(nodes)


def nested(model: onnx.ModelProto, draw: random.Random) -> None:
    """A branch that reads and gives what it should not."""
    node = draw.choice(model.graph.node)
    body = onnx.GraphProto(name="body")
    body.node.append(draw.choice(model.graph.node))
    body.output.append(draw.choice(values(model)))
    for name in draw.choice([("body",), ("then_branch", "else_branch")]):
        node.attribute.append(onnx.helper.make_attribute(name, body))


def no_graph_values(model: onnx.ModelProto, draw: random.Random) -> None:
    del draw.choice([model.graph.input, model.graph.output])[:]


def names(model: onnx.ModelProto, draw: random.Random) -> None:
    node = draw.choice(model.graph.node)
    node.name = draw.choice(["", "a\nb", "\u2028", "x" * 5000, model.graph.node[0].name])


MUTATIONS: tuple[Callable[[onnx.ModelProto, random.Random], None], ...] = (
    *(dimension, all_dimensions, element_type, missing_type, attribute, attribute_length, wrong_attribute, no_inputs),
    *(no_outputs, another_input, operator, domain, opset, opset_domain, weight_shape, weight_data, weight_type),
    *(weight_value, shorter, no_weight, no_node, twice, shuffled, nested, no_graph_values, names),
)


def test_the_whole_model_is_rewritten(detector, configure, tmp_path):
    onnx.save(detector, str(tmp_path / "m.onnx"))
    config = configure(size=(16, 16), nms={"pre_nms_topk": 8, "max_detections": 4})
    done = rewrite(load_model(tmp_path / "m.onnx"), Options(config, nms="native", batch=1))
    assert [value.name for value in done.model.graph.output] == ["num_dets", "boxes", "scores", "classes"]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_a_damaged_model_is_rewritten_or_refused(detector, configure, tmp_path, mutation):
    path = tmp_path / "m.onnx"
    config = configure(size=(16, 16), nms={"pre_nms_topk": 8, "max_detections": 4})
    for seed in range(8):
        draw = random.Random(f"{mutation.__name__} {seed}")
        model = onnx.ModelProto.FromString(detector.SerializeToString())
        mutation(model, draw)
        if seed > 4:
            draw.choice(MUTATIONS)(model, draw)
        path.write_bytes(model.SerializeToString())
        options = Options(
            config, nms="native", batch=draw.choice([1, 2]), silu=draw.choice(["keep", "swish", "plugin"])
        )
        try:
            loaded = load_model(path)
            embedded_nms(loaded, config)
            rewrite(loaded, options)
        except TrtdetError as error:
            assert "\n" not in str(error)
