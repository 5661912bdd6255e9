"""A model with every form that the passes rewrite, and mutations that damage a model."""

import random
from collections.abc import Callable

import numpy as np
import onnx
from nets import net, normal

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


def detector() -> onnx.ModelProto:
    """A model from float32 (1, 3, 16, 16) to (1, 84, 8), with the shapes of its tensors."""

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


def renamed(model: onnx.ModelProto, draw: random.Random) -> None:
    """A tensor with another name wherever it stands."""
    nodes = [node for node in model.graph.node if node.output]
    before = draw.choice([*(value.name for value in values(model)), *(draw.choice(nodes).output if nodes else [])])
    after = draw.choice(["a\x1b[31mb", "a\nb", "\u2028", "..", "/a/../b", "a" * 5000, "", " ", "a\0b"])
    for node in model.graph.node:
        for names in (node.input, node.output):
            names[:] = [after if name == before else name for name in names]
    for value in (*values(model), *model.graph.initializer):
        if value.name == before:
            value.name = after


def external(model: onnx.ModelProto, draw: random.Random) -> None:
    """A weight in another file."""
    weight = draw.choice(model.graph.initializer)
    weight.data_location = onnx.TensorProto.EXTERNAL
    place = draw.choice(["../outside.bin", "/etc/passwd", "/dev/zero", "m.onnx", "absent", "", "a\0b", "x" * 5000, "."])
    entries = {"location": place, "offset": str(odd(draw)), "length": draw.choice([str(odd(draw)), "many", ""])}
    for key in draw.sample(list(entries), draw.randrange(1, 4)):
        weight.external_data.add(key=key, value=entries[key])


def sparse(model: onnx.ModelProto, draw: random.Random) -> None:
    """A weight as positions and values, of which some may not fit."""
    number = draw.randrange(len(model.graph.initializer))
    weight = onnx.numpy_helper.to_array(model.graph.initializer[number])
    name = model.graph.initializer[number].name
    del model.graph.initializer[number]
    places = np.arange(weight.size, dtype=np.int64) + draw.choice([0, 0, -1, odd(draw) % 2**62])
    dims = [*weight.shape]
    if dims and draw.random() < 0.4:
        dims[draw.randrange(len(dims))] = odd(draw)
    model.graph.sparse_initializer.append(
        onnx.helper.make_sparse_tensor(
            onnx.numpy_helper.from_array(weight.reshape(-1), name), onnx.numpy_helper.from_array(places), dims
        )
    )


def deep(model: onnx.ModelProto, draw: random.Random) -> None:
    """Branches in branches."""
    node = onnx.NodeProto(op_type="If", name="deep", input=[model.graph.node[0].input[0]], output=["deep"])
    for _ in range(draw.choice([2, 10, 25])):
        body = onnx.GraphProto(name="body", node=[node], output=[onnx.ValueInfoProto(name=node.output[0])])
        node = onnx.helper.make_node("If", node.input, ["deep"], "deep", then_branch=body, else_branch=body.__class__())
    model.graph.node.append(node)


def function(model: onnx.ModelProto, draw: random.Random) -> None:
    """A node becomes a call of a function, which may call itself."""
    node = draw.choice(model.graph.node)
    body = [onnx.NodeProto.FromString(node.SerializeToString())]
    body[0].op_type = draw.choice([node.op_type, "F"])
    body[0].domain = draw.choice(["", "local"])
    made = onnx.helper.make_function("local", "F", node.input, node.output, body, [onnx.helper.make_opsetid("", 13)])
    model.functions.append(made)
    model.opset_import.append(onnx.helper.make_opsetid("local", 1))
    node.op_type, node.domain = "F", "local"


def another_kind(model: onnx.ModelProto, draw: random.Random) -> None:
    """A tensor that is a sequence, a map, an optional or sparse."""
    kind = draw.choice(values(model)).type
    which = draw.choice(["sequence_type", "map_type", "optional_type", "sparse_tensor_type"])
    kind.Clear()
    getattr(kind, which).SetInParent()


def open_dimension(model: onnx.ModelProto, draw: random.Random) -> None:
    shape = draw.choice([value for value in values(model) if value.type.tensor_type.shape.dim]).type.tensor_type.shape
    draw.choice(list(shape.dim)).dim_param = draw.choice(["batch", "", "a\nb", "x" * 3000])


def another_size(model: onnx.ModelProto, draw: random.Random) -> None:
    """An input of another size, and no shapes inside."""
    for value in model.graph.input:
        for dim in value.type.tensor_type.shape.dim:
            if draw.random() < 0.5:
                dim.dim_value = draw.choice([0, 1, 2, 4, 15, 17, 64, 1000, 50_000])
    del model.graph.value_info[:]


def numbers(model: onnx.ModelProto, draw: random.Random) -> None:
    """A constant of whole numbers, such as a shape or bounds, with an odd one."""
    whole = [one for one in model.graph.initializer if one.data_type == onnx.TensorProto.INT64 and one.raw_data]
    weight = draw.choice(whole)
    array = onnx.numpy_helper.to_array(weight).copy()
    array.reshape(-1)[draw.randrange(array.size)] = odd(draw)
    weight.CopyFrom(onnx.numpy_helper.from_array(array, weight.name))


def metadata(model: onnx.ModelProto, draw: random.Random) -> None:
    """What exporters write beside the graph."""
    text = draw.choice(["{0: 'a\x1b[2J'}", "[640", "detect", "{" * 3000, "[9999999999, 1]", "-1", "x" * 5000, "\0"])
    key = draw.choice(["names", "imgsz", "task", "stride", "end2end", "kpt_shape", "args", "trtdet/origin", "\n"])
    model.metadata_props.add(key=key, value=text)
    model.producer_name = draw.choice(["pytorch", "a\nb", "x" * 5000])


MUTATIONS: tuple[Callable[[onnx.ModelProto, random.Random], None], ...] = (
    *(dimension, all_dimensions, element_type, missing_type, attribute, attribute_length, wrong_attribute, no_inputs),
    *(no_outputs, another_input, operator, domain, opset, opset_domain, weight_shape, weight_data, weight_type),
    *(weight_value, shorter, no_weight, no_node, twice, shuffled, nested, no_graph_values, names),
    *(renamed, external, sparse, deep, function, another_kind, open_dimension, another_size, numbers, metadata),
)
