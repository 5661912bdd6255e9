import math
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from trtdet.config import Config
from trtdet.detection import heads
from trtdet.errors import ModelError
from trtdet.passes import Options, decode
from trtdet.passes.base import PassResult
from trtdet.passes.model import to_graph, to_model

SIZE = (64, 96)
CELLS = {8: 96, 16: 24, 32: 6}
TOTAL = sum(CELLS.values())


def raw_model(outputs: dict[str, tuple[int | str | None, ...]], batch: int | str = "N") -> onnx.ModelProto:
    """A model whose raw outputs are its inputs, so that a test gives them directly."""
    inputs = [helper.make_tensor_value_info(f"in_{k}", TensorProto.FLOAT, (batch, *v)) for k, v in outputs.items()]
    results = [helper.make_tensor_value_info(k, TensorProto.FLOAT, (batch, *v)) for k, v in outputs.items()]
    nodes = [helper.make_node("Mul", [f"in_{k}", "one"], [k], name=f"head_{k}") for k in outputs]
    one = helper.make_tensor("one", TensorProto.FLOAT, [], [1.0])
    graph = helper.make_graph(nodes, "head", inputs, results, [one])
    return helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 13)])


def decoded(model: onnx.ModelProto, config: Config) -> onnx.ModelProto:
    graph = to_graph(onnx.shape_inference.infer_shapes(model))
    assert decode.apply(graph, Options(config)) == PassResult(1)
    return to_model(graph)


def check(run: Any, outputs: dict[str, np.ndarray], config: Config) -> None:
    """The graph says what the reference says, for the batch the model was made with and for a dynamic one."""
    expected = heads.decode(outputs, config)
    for batch in ("N", next(iter(outputs.values())).shape[0]):
        model = decoded(raw_model({name: value.shape[1:] for name, value in outputs.items()}, batch), config)
        assert [output.name for output in model.graph.output] == ["boxes", "scores"]
        given = run(model, **{f"in_{name}": value for name, value in outputs.items()})
        np.testing.assert_allclose(given["boxes"], expected[0], rtol=2e-5, atol=2e-4)
        np.testing.assert_allclose(given["scores"], expected[1], rtol=1e-5, atol=1e-6)
        for output, last in zip(model.graph.output, (4, len(config.classes)), strict=True):
            dims = [dim.dim_value or dim.dim_param for dim in output.type.tensor_type.shape.dim]
            assert dims == [batch, expected[0].shape[1], last]


@pytest.mark.parametrize("scores", ["probabilities", "logits"])
@pytest.mark.parametrize(
    ("rule", "shape", "scale", "head"),
    [
        ("yolox", (1, TOTAL, 8), 1, {}),
        ("yolox", (2, TOTAL, 8), 1, {}),
        ("yolov5", (2, 77, 8), 20, {}),
        ("yolov8", (2, 7, 55), 20, {}),
        ("dfl", (2, TOTAL, 3 + 20), 3, {"bins": 5, "cell_offset": 0.0}),
        ("dfl", (2, TOTAL, 3 + 20), 3, {"bins": 5, "cell_offset": 0.5}),
    ],
)
def test_rules_of_one_output(run, configure, normal, scores, rule, shape, scale, head):
    check(run, {"output0": normal(*shape, scale=scale)}, configure(rule, SIZE, scores=scores, **head))


def exported(widths: tuple[int, ...], sizes: list[tuple[int, ...]], rule: str) -> onnx.ModelProto:
    """Maps (N, width, H, W) joined by channels at each level, then the levels; transposed but for YOLOv8."""
    maps = {f"{width}@{at}": ("N", width, *size) for at, size in enumerate(sizes) for width in widths}
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in maps.items()]
    nodes, channels = [], sum(widths)
    for at in range(len(sizes)):
        nodes.append(helper.make_node("Concat", [f"{width}@{at}" for width in widths], [f"level_{at}"], axis=1))
        nodes.append(helper.make_node("Reshape", [f"level_{at}", "flat"], [f"flat_{at}"]))
    nodes.append(helper.make_node("Concat", [f"flat_{at}" for at in range(len(sizes))], ["columns"], axis=2))
    nodes.append(helper.make_node("Transpose", ["columns"], ["rows"], perm=[0, 2, 1]))
    cells = sum(math.prod(size) for size in sizes)
    result = ("columns", ("N", channels, cells)) if rule == "yolov8" else ("rows", ("N", cells, channels))
    outputs = [helper.make_tensor_value_info(result[0], TensorProto.FLOAT, result[1])]
    flat = helper.make_tensor("flat", TensorProto.INT64, [3], [0, channels, -1])
    graph = helper.make_graph(nodes[: -1 if rule == "yolov8" else None], "head", inputs, outputs, [flat])
    return helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 13)])


@pytest.mark.parametrize(
    ("rule", "widths", "apart"),
    [
        ("yolox", (4, 1, 3), True),
        ("yolox", (4, 4), False),
        ("yolox", (5, 3), False),
        ("yolov5", (4, 1, 3), True),
        ("yolov8", (4, 3), True),
        ("yolov8", (3, 4), False),
    ],
)
def test_maps_that_are_joined_stay_apart(run, configure, normal, rule, widths, apart):
    sizes = [(64 // stride, 96 // stride) for stride in CELLS]
    model, config = exported(widths, sizes, rule), configure(rule, SIZE, scores="probabilities")
    feeds = {
        each.name: normal(2, *(dim.dim_value for dim in each.type.tensor_type.shape.dim[1:]), seed=at)
        for at, each in enumerate(model.graph.input)
    }
    (raw,) = run(model, **feeds).values()
    expected, rewritten = heads.decode([raw], config), decoded(model, config)
    given = run(rewritten, **feeds)
    np.testing.assert_allclose(given["boxes"], expected[0], rtol=2e-5, atol=2e-4)
    np.testing.assert_allclose(given["scores"], expected[1], rtol=1e-5, atol=1e-6)
    # Joined by channels are the maps of a level, where they are not as wide as boxes and scores, and two corners.
    joints = [node for node in rewritten.graph.node if node.op_type == "Concat" and node.attribute[0].i == 1]
    assert len(joints) == (1 if apart else 1 + len(sizes))


def test_the_number_of_boxes_is_known_of_the_output_alone(configure):
    """Sizes of inner tensors may be open, as behind a shape that is computed."""
    model = exported((4, 4), [(8, 12), (4, 6), (2, 3)], "yolox")
    model.graph.input.append(helper.make_tensor_value_info("flat", TensorProto.INT64, [3]))
    del model.graph.initializer[:]
    for output, last in zip(decoded(model, configure("yolox", SIZE)).graph.output, (4, 3), strict=True):
        assert [dim.dim_value or dim.dim_param for dim in output.type.tensor_type.shape.dim] == ["N", TOTAL, last]


@pytest.mark.parametrize("parts", [(4, 3), (3, 4)])
def test_boxes_and_scores_that_are_joined_stay_apart(run, configure, normal, parts):
    model = raw_model({f"{width}": (width, 21) for width in parts})
    model.graph.node.append(helper.make_node("Concat", [f"{width}" for width in parts], ["output0"], axis=1))
    del model.graph.output[:]
    model.graph.output.append(helper.make_tensor_value_info("output0", TensorProto.FLOAT, ("N", 7, 21)))
    feeds = {f"in_{width}": normal(2, width, 21, seed=width, scale=20) for width in parts}
    expected = heads.decode([np.concatenate(list(feeds.values()), axis=1)], config := configure("yolov8", SIZE))
    rewritten = decoded(model, config)
    given = run(rewritten, **feeds)
    np.testing.assert_allclose(given["boxes"], expected[0], rtol=2e-5, atol=2e-4)
    np.testing.assert_allclose(given["scores"], expected[1], rtol=1e-5, atol=1e-6)
    assert ("output0" in str(rewritten.graph.node)) == (parts == (3, 4))


@pytest.mark.parametrize("scores", ["probabilities", "logits"])
@pytest.mark.parametrize("order", ["xyxy", "yxyx", "cxcywh"])
def test_boxes_in_every_order_of_coordinates(run, configure, normal, order, scores):
    config = configure("boxes", SIZE, boxes=order, scores=scores)
    check(run, {"b": normal(2, 11, 4, scale=20), "s": normal(2, 11, 3, seed=1)}, config)


@pytest.mark.parametrize("scores", ["probabilities", "softmax"])
@pytest.mark.parametrize("background", ["none", "first", "last"])
@pytest.mark.parametrize("order", ["xyxy", "yxyx", "cxcywh"])
def test_relative_boxes_and_a_background(run, configure, normal, order, scores, background):
    config = configure("boxes", SIZE, boxes=order, units="relative", scores=scores, background=background)
    columns = 3 if background == "none" else 4
    check(run, {"b": normal(2, 11, 4), "s": normal(2, 11, columns, seed=1)}, config)


@pytest.mark.parametrize("scores", ["probabilities", "softmax"])
def test_columns_of_the_classes(run, configure, normal, scores):
    config = configure("boxes", SIZE, scores=scores, columns=[4, 0, 2])
    check(run, {"b": normal(2, 11, 4, scale=20), "s": normal(2, 11, 6, seed=1)}, config)


@pytest.mark.parametrize("units", ["pixels", "relative"])
def test_rows_of_detections(run, configure, normal, units):
    rows = normal(2, 11, 6)
    rows[..., 5] = np.arange(22).reshape(2, 11) % 5 - 1  # the first and the last are no classes
    check(run, {"rows": rows}, configure("detections", SIZE, units=units))


def pairs(normal: Any, classes: int, bins: int) -> dict[str, np.ndarray]:
    outputs = {}
    for stride, cells in CELLS.items():
        outputs[f"cls_{stride}"] = normal(2, cells, classes, seed=stride)
        outputs[f"dis_{stride}"] = normal(2, cells, 4 * bins, seed=stride + 1, scale=3)
    return outputs


@pytest.mark.parametrize(
    ("classes", "order", "head"),
    [
        (3, "shuffled", {"scores": "logits"}),
        *((3, "", {"strides": strides}) for strides in ([8, 16, 32], [32, 16, 8], [16, 32, 8])),
        # As many classes as distances: classes come first, or as they are named.
        (20, "", {}),
        (20, "cls_8 cls_16 cls_32 dis_8 dis_16 dis_32", {}),
        (20, "cls_32 cls_8 dis_8 dis_32 cls_16 dis_16", {}),
        (20, "shuffled", {"outputs": ["cls_8", "cls_16", "cls_32", "dis_8", "dis_16", "dis_32"]}),
    ],
)
def test_dfl_pairs_in_any_order(run, configure, normal, classes, order, head):
    outputs = pairs(normal, classes, 5)
    shuffled = np.random.default_rng(classes).permutation(list(outputs)).tolist()
    names = shuffled if order == "shuffled" else order.split() or list(outputs)
    check(run, {name: outputs[name] for name in names}, configure("dfl", SIZE, classes=classes, bins=5, **head))


def test_dfl_pairs_of_two_levels_with_equal_cells(run, configure, normal):
    config = configure("dfl", (32, 32), strides=[32, 64], bins=5)
    widths = {"c": 3, "d": 20}
    outputs = {f"{kind}{level}": normal(1, 1, widths[kind], seed=level) for level in (0, 1) for kind in widths}
    check(run, outputs, config)


def test_a_size_that_is_no_multiple_of_a_stride_rounds_the_grid_up(run, configure, normal):
    config = configure("dfl", (50, 70), bins=5)
    cells = sum(math.ceil(50 / stride) * math.ceil(70 / stride) for stride in (8, 16, 32))
    check(run, {"output": normal(1, cells, 23)}, config)


def test_outputs_not_named_are_left_out(run, configure, normal):
    config = configure("yolov8", SIZE, outputs=["raw"])
    raw = normal(1, 7, 10)
    model = decoded(raw_model({"extra": (5,), "raw": (7, 10)}), config)
    assert [output.name for output in model.graph.output] == ["boxes", "scores"]
    assert "head_extra" not in [node.name for node in model.graph.node]
    expected = heads.decode({"raw": raw}, config)
    np.testing.assert_allclose(run(model, in_raw=raw, in_extra=normal(1, 5))["scores"], expected[1], rtol=1e-6)


@pytest.mark.parametrize("name", ["boxes", "scores"])
def test_a_raw_output_may_have_the_name_of_a_result(run, configure, normal, name):
    check(run, {name: normal(1, 7, 10)}, configure("yolov8", SIZE))


@pytest.mark.parametrize("name", ["boxes", "scores", "num_dets", "classes"])
def test_a_tensor_inside_the_model_may_have_the_name_of_a_result(net, run, configure, normal, name):
    model = net(f"(float[1,7,10] x) => (float[1,7,10] y) {{ {name} = Neg(x) y = Neg({name}) }}")
    config, raw = configure("yolov8", SIZE), normal(1, 7, 10)
    rewritten = decoded(model, config)
    assert name in ("boxes", "scores") or name not in {
        tensor for node in rewritten.graph.node for tensor in node.output
    }
    given = run(rewritten, x=raw)
    np.testing.assert_allclose(given["boxes"], heads.decode([raw], config)[0], rtol=1e-6)


def test_an_output_in_float64_is_brought_to_float32(net, run, configure, normal):
    model = net("(float[1,7,10] x) => (double[1,7,10] y) { y = Cast<to = 11>(x) }")
    config, x = configure("yolov8", SIZE), normal(1, 7, 10)
    given = run(decoded(model, config), x=x)
    expected = heads.decode([x], config)
    assert (given["boxes"].dtype, given["scores"].dtype) == (np.float32, np.float32)
    np.testing.assert_allclose(given["boxes"], expected[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(given["scores"], expected[1])


def test_outputs_that_do_not_fit_the_rule(configure):
    """With an open batch; tests/detection/test_heads.py has every reason."""
    with pytest.raises(ModelError) as caught:
        decoded(raw_model({"a": (3, 8, 8)}), configure("dfl", SIZE))
    assert str(caught.value) == (
        "output 'a' has shape (?, 3, 8, 8), decode rule 'dfl' expects three dimensions with the batch first; choose "
        "the raw outputs with head.outputs or another head.decode"
    )


def test_an_output_of_unknown_shape(net, configure):
    model = net("(float[1,3,8,8] x, int64[K] s) => (float[] y) {y = Reshape(x, s)}")
    model.graph.output[0].type.tensor_type.ClearField("shape")
    with pytest.raises(ModelError, match=r"output 'y' has shape \(\), decode rule 'yolov5' expects three dimensions"):
        decoded(model, configure("yolov5"))
