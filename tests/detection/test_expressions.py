"""head.compute: what an expression gives here and in a graph, and what it may not hold."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import yaml

from trtdet.backends import OnnxRunner
from trtdet.config import Config, load_config
from trtdet.detection.anchors import anchor_points
from trtdet.detection.expressions import shapes
from trtdet.detection.heads import decode
from trtdet.errors import ConfigError, ModelError, TrtdetError
from trtdet.exporter import SHAPES_MODEL
from trtdet.passes import Options, load_model, rewrite

PAGE = Path(__file__).parents[2] / "docs" / "heads.md"
BLOCKS = re.findall(r"^```yaml\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def make(compute: dict[str, str], **head: Any) -> Config:
    return Config.model_validate(
        {
            "name": "test",
            "classes": ["a", "b", "c"],
            "input": {"size": [64, 96]},
            "head": {"decode": "boxes", "compute": compute, **head},
        }
    )


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 2, shape).astype(np.float32)


def model(outputs: dict[str, np.ndarray], batch: int | str) -> onnx.ModelProto:
    """Gives what it is given, and an image's mean times 0 on top, so that it depends on an image."""
    tensor, floats = onnx.helper.make_tensor_value_info, onnx.TensorProto.FLOAT
    nodes = [
        onnx.helper.make_node("ReduceMean", ["image"], ["mean"], axes=[1, 2, 3], keepdims=1),
        onnx.helper.make_node("Sub", ["mean", "mean"], ["nothing"]),
    ]
    constants = {f"held_{name}": array for name, array in outputs.items()}
    for name, array in outputs.items():
        constants[f"shape_{name}"] = np.array([0] + [1] * (array.ndim - 1))
        nodes.append(onnx.helper.make_node("Reshape", ["nothing", f"shape_{name}"], [f"zero_{name}"]))
        nodes.append(onnx.helper.make_node("Add", [f"held_{name}", f"zero_{name}"], [name]))
    inputs = [tensor("image", floats, [batch, 3, 64, 96])]
    results = [tensor(name, floats, [batch, *array.shape[1:]]) for name, array in outputs.items()]
    weights = [onnx.numpy_helper.from_array(array, name) for name, array in constants.items()]
    graph = onnx.helper.make_graph(nodes, "g", inputs, results, weights)
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)


def both(outputs: dict[str, np.ndarray], config: Config, batch: int | str = 2) -> tuple[np.ndarray, np.ndarray]:
    """Boxes and scores by the reference, after a graph gave the same."""
    boxes, scores = decode(outputs, config)
    written = rewrite(model(outputs, batch), Options(config, "host")).model
    session = onnxruntime.InferenceSession(written.SerializeToString(), providers=["CPUExecutionProvider"])
    found = session.run(["boxes", "scores"], {"image": np.zeros((2, 3, 64, 96), np.float32)})
    np.testing.assert_allclose(found[0], boxes, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(found[1], scores, rtol=1e-5, atol=1e-6)
    return boxes, scores


def test_the_head_that_the_page_describes_is_that_of_the_shapes(tmp_path):
    (block,) = (text for text in BLOCKS if text.startswith("# my-head.yaml\n"))
    (tmp_path / "my-head.yaml").write_text(block, encoding="utf-8")
    mine, shipped = load_config(tmp_path / "my-head.yaml"), load_config("shapes")
    assert (mine.classes, mine.input, mine.nms) == (shipped.classes, shipped.input, shipped.nms)
    image = np.random.default_rng(0).uniform(0, 255, (1, 3, 256, 256)).astype(np.float32)
    found = [OnnxRunner(rewrite(load_model(SHAPES_MODEL), Options(c, "host")).model)(image) for c in (mine, shipped)]
    for name in ("boxes", "scores"):
        np.testing.assert_allclose(found[0][name], found[1][name], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("batch", [2, "N"])
def test_maps_become_boxes_and_scores(batch):
    """A map of channels with a point in each cell, as FastestDet's."""
    raw = noise(2, 8, 4, 6)
    config = make(
        {
            "rows": "transpose(reshape(output0, 0, 8, -1), 0, 2, 1)",
            "boxes": "concat(points(0) + 16 * tanh(rows[..., 1:3]), sigmoid(rows[..., 3:5]) * [input_width, 64])",
            "scores": "sigmoid(rows[..., :1]) ** 0.6 * softmax(rows[:, :, 5:]) ** 0.4",
        },
        boxes="cxcywh",
        strides=[16],
    )
    boxes, scores = both({"map": raw}, config, batch)
    row, column = 2, 3
    cell = raw[1, :, row, column].astype(np.float64)
    centre = np.array([column * 16, row * 16]) + 16 * np.tanh(cell[1:3])
    half = np.array([96, 64]) / (1 + np.exp(-cell[3:5])) / 2
    np.testing.assert_allclose(boxes[1, row * 6 + column], [*(centre - half), *(centre + half)], rtol=1e-4)
    weights = np.exp(cell[5:]) / np.exp(cell[5:]).sum()
    np.testing.assert_allclose(scores[1, row * 6 + column], weights**0.4 / (1 + np.exp(-cell[0])) ** 0.6, rtol=1e-4)


def test_the_distributions_that_the_page_describes_are_those_of_the_decode_rule():
    (block,) = (text for text in BLOCKS if "sum(" in text)
    shipped = load_config("nanodet")
    size = shipped.input.model_copy(update={"size": (64, 96)})
    rule = shipped.model_copy(update={"input": size})
    head = {"decode": "boxes", **yaml.safe_load(block)}
    mine = Config.model_validate(
        {"name": "mine", "classes": list(rule.classes), "input": {"size": [64, 96]}, "head": head}
    )
    raw = {"output": noise(2, len(anchor_points(rule, 0.0)[0]), 80 + 4 * 8)}
    boxes, scores = both(raw, mine)
    expected = decode(raw, rule)
    np.testing.assert_allclose(boxes, expected[0], rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(scores, expected[1], rtol=1e-5, atol=1e-6)


def test_shapes_of_results_are_known_where_those_of_the_outputs_are():
    config = make({"boxes": "a[..., :4]", "scores": "a[..., 4:7]"})
    for batch in (2, None):
        assert shapes({"a": (batch, 30, 7)}, config) == {"boxes": (batch, 30, 4), "scores": (batch, 30, 3)}
    assert shapes({"a": (2, None, 7)}, config) == {"boxes": (None,) * 3, "scores": (None,) * 3}
    apart = make({"boxes": "a", "scores": "b"})
    for batch in ((None, 1), (1, None)):
        found = shapes({"a": (batch[0], 30, 4), "b": (batch[1], 30, 3)}, apart)
        assert found == {"boxes": (None, 30, 4), "scores": (None, 30, 3)}
    assert shapes({"a": (1, 30, 4), "b": (1, None, 3)}, apart) == {"boxes": (None,) * 3, "scores": (None,) * 3}


CASES = {
    "slices": ("a[:, 1:-1:2, 4:8]", lambda a, b: a[:, 1:-1:2, 4:8]),
    "negative": ("a[:, -3:, -4:]", lambda a, b: a[:, -3:, -4:]),
    "ellipsis": ("a[..., ::2]", lambda a, b: a[..., ::2]),
    "columns": ("a[..., [3, 0, 1, 1]]", lambda a, b: a[..., [3, 0, 1, 1]]),
    "number": ("reshape(b, 0, 3, 2, 10)[:, :, 1, :4]", lambda a, b: b.reshape(2, 3, 2, 10)[:, :, 1, :4]),
    "last": ("reshape(b, 0, 3, 5, 4)[:, :, -1]", lambda a, b: b.reshape(2, 3, 5, 4)[:, :, -1]),
    "arithmetic": ("-(b[..., :4] - 2) / [1, 2, 4, 8] + 1e-1", lambda a, b: -(b[..., :4] - 2) / [1, 2, 4, 8] + 0.1),
    "constants": ("a[..., :4] * (2 * 3 - 10 / 4)", lambda a, b: a[..., :4] * 3.5),
    "joined": ("concat(a, b[:, :, :8], axis=1)[..., :4]", lambda a, b: np.concatenate([a, b[..., :8]], 1)[..., :4]),
    "elements": (
        "maximum(exp(a[..., :4] / 9), minimum(sqrt(abs(a[..., 4:])), log(2 + abs(a[..., :4]))))",
        lambda a, b: np.maximum(
            np.exp(a[..., :4] / 9), np.minimum(np.sqrt(np.abs(a[..., 4:])), np.log(2 + np.abs(a[..., :4])))
        ),
    ),
    "sum": (
        "reshape(sum(reshape(b, 0, 3, 5, 4)), 0, -1, 1) * [1, 1, 2, 3]",
        lambda a, b: _rows(b.reshape(2, 3, 5, 4).sum(-1)),
    ),
    "sum of an axis": ("sum(reshape(b, 0, 3, 5, 4), axis=1)", lambda a, b: b.reshape(2, 3, 5, 4).sum(axis=1)),
    "quoted": ("'/model/out'[..., 1:5]", lambda a, b: a[..., 1:5] + 1),
    "grid": (
        "a[:, :1, :4] + concat(points(0.5), strides(), 0 * strides())",
        lambda a, b: a[:, :1, :4] + np.concatenate([*_points(0.5), 0 * _points(0.5)[1]], axis=-1),
    ),
}


def _rows(sums: np.ndarray) -> np.ndarray:
    return sums.reshape(2, -1, 1) * np.array([1, 1, 2, 3], np.float32)


def _points(offset: float) -> tuple[np.ndarray, np.ndarray]:
    points, strides = anchor_points(make({"boxes": "a", "scores": "b"}), offset)
    return points[None], strides[None]


@pytest.mark.parametrize("case", CASES)
def test_the_notation_is_that_of_numpy(case):
    text, function = CASES[case]
    a, b = noise(2, 5, 8), noise(2, 3, 20, seed=1)
    expected = np.asarray(function(a, b), np.float32)
    scores = "reshape(boxes, 0, -1, 4)[..., :3] * 2.0"
    boxes, found = both({"a": a, "b": b, "/model/out": a + 1}, make({"boxes": text, "scores": scores}))
    np.testing.assert_allclose(boxes, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found, expected[..., :3] * 2, rtol=1e-5, atol=1e-5)


def test_tensors_inside_the_model_can_be_named():
    raw = noise(2, 5, 7)
    config = make({"boxes": "output0[..., :4]", "scores": "inner[..., 4:]"}, outputs=["inner"], scores="logits")
    inside = model({"inner": raw}, 2)
    inside.graph.node.append(onnx.helper.make_node("ReduceSum", ["inner"], ["useless"], keepdims=0))
    del inside.graph.output[:]
    inside.graph.output.append(onnx.helper.make_tensor_value_info("useless", onnx.TensorProto.FLOAT, []))
    done = rewrite(inside, Options(config, "native")).model
    assert all(node.op_type != "ReduceSum" or "useless" not in node.output for node in done.graph.node)
    assert [output.name for output in done.graph.output] == ["num_dets", "boxes", "scores", "classes"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("__import__('os').system('true')", "is none of numbers, names, slices|calls|names"),
        ("open('x')", "calls 'open'; there are sigmoid, exp"),
        ("a.shape", r"'a.shape' is none of numbers, names, slices, \+ - \* / \*\* and the functions"),
        ("[x for x in a]", "is none of numbers"),
        ("lambda: a", "is none of numbers"),
        ("missing + 1", "it names 'missing', there are input_width, input_height, output0, a"),
        ("a[::-1]", "is no whole number|has a slice whose step is below 1"),
        ("a[..., ...]", "has more than one '...'"),
        ("a[1.5]", "'1.5' is no whole number"),
        ("a + [a]", "is no number of float32 and no list"),
        ("a + True", "'True' is no number of float32"),
        ("sigmoid(a, a)", "gives sigmoid 2 arguments"),
        ("points()", "gives points 0 arguments"),
        ("points([1, 2])", "gives points a list"),
        ("sigmoid(a, axis=1)", "has a keyword 'axis'"),
        ("softmax(a, dim=1)", "has a keyword 'dim'"),
        ("1 + 1", "it is a constant|is a constant"),
        ("1" + "0" * 400 + " * a", "is no number of float32"),
        ("transpose(a, 0, 1, 2, 3)", "the outputs do not fit key 'head.compute.boxes': Transpose of"),
        ("a[..., :2] + a[..., :3]", r"do not fit key 'head.compute.boxes': Add of \(2, 5, 2\) and \(2, 5, 3\)"),
        ("reshape(a, 0, 7, 7)", "do not fit key 'head.compute.boxes': Reshape of"),
        ("a[..., [9]]", "do not fit key 'head.compute.boxes': Gather of"),
    ],
)
def test_what_an_expression_may_not_hold(text, said):
    outputs = {"a": noise(2, 5, 7)}
    config = make({"boxes": text, "scores": "a[..., 4:]"})
    with pytest.raises(TrtdetError, match=said) as caught:
        rewrite(model(outputs, 2), Options(config, "host"))
    assert isinstance(caught.value, (ConfigError, ModelError))
    assert "\n" not in str(caught.value)
    if said != "it is a constant|is a constant":
        with pytest.raises(TrtdetError, match=said):
            decode(outputs, config)


@pytest.mark.parametrize(
    ("head", "said"),
    [
        ({"decode": "boxes", "compute": {"boxes": "a"}}, "computes boxes and scores, got boxes"),
        ({"decode": "boxes", "compute": {"boxes": "a +", "scores": "a"}}, "'boxes' is no expression"),
        ({"decode": "boxes", "compute": {"boxes": "(" * 1500, "scores": "a"}}, "'boxes' is no expression"),
        ({"decode": "boxes", "compute": {"boxes": "a" * 3000, "scores": "a"}}, "has 3000 characters, allowed are 2000"),
        ({"decode": "yolov8", "compute": {"boxes": "a", "scores": "a"}}, "belongs to head.decode boxes, not yolov8"),
    ],
)
def test_keys_that_are_refused_when_they_are_read(head, said, tmp_path):
    import json

    file = tmp_path / "c.yaml"
    file.write_text(json.dumps({"name": "x", "classes": ["a"], "input": {"size": [8, 8]}, "head": head}))
    with pytest.raises(ConfigError, match=said) as caught:
        load_config(file)
    assert "\n" not in str(caught.value)


def test_an_expression_may_have_2000_characters():
    longest = "a[..., :4]" + " " * 1990
    assert make({"boxes": longest, "scores": "a"}).head.compute == {"boxes": longest, "scores": "a"}


def test_a_deep_expression_is_an_error_of_one_line():
    with pytest.raises((TrtdetError, ValueError), match="is nested too deeply|is no expression"):
        decode({"a": noise(1, 5, 7)}, make({"boxes": "-" * 1900 + "a", "scores": "a"}))


@pytest.mark.parametrize(
    "growing",
    [
        {f"x{index}": f"concat({', '.join([f'x{index - 1}' if index else 'output0'] * 8)})" for index in range(10)},
        {
            "x0": "reshape(output0, -1, 1)",
            "x1": "reshape(output0, 1, -1)",
            "x2": "x0 + x1",
            "x3": "reshape(x2, -1, 1) + x1",
        },
        {"x0": f"output0[{[0] * 200}, {[0] * 200}, {[0] * 200}]", "x1": f"concat({', '.join(['x0'] * 16)})"},
    ],
    ids=["concat", "broadcast", "gather"],
)
def test_an_expression_that_grows_without_bound_is_refused_before_it_is_computed(growing):
    config = make({**growing, "boxes": "output0[..., :4]", "scores": "output0[..., 4:7]"})
    with pytest.raises(ModelError, match=r"head\.compute\.x\d.*the result would have \d+ values, over \d+"):
        decode({"a": noise(1, 300, 7)}, config)


@pytest.mark.parametrize("number", ["1e39", "9" * 300, "9" * 400])
def test_a_number_over_float32_is_refused(number):
    with pytest.raises(ConfigError, match="is no number of float32"):
        decode({"a": noise(1, 5, 7)}, make({"boxes": f"a[..., :4] * {number}", "scores": "a"}))
