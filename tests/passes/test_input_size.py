"""Another input size for a model whose size was fixed at export: what takes it, and what is refused with the reason."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

from trtdet.errors import ModelError
from trtdet.passes.input_size import with_input_size

CONV = "c = Conv<pads = [1,1,1,1], strides = [4,4]>(x, w)"
ROWS = "r = Reshape(c, rows) y = Transpose<perm = [0,2,1]>(r)"


def network(steps: str, size: tuple[Any, Any] = (32, 64), **constants: Any) -> onnx.ModelProto:
    """A network of one convolution, x (1, 3, *size) -> c (1, 6, *size / 4), and ``steps`` from c to y."""
    text = f"""<ir_version: 8, opset_import: ["" : 17]>
    net (float[1,3,{size[0]},{size[1]}] x) => (float[1,rows,columns] y) {{ {CONV} {steps} }}"""
    model = onnx.parser.parse_model(text)
    weights = np.random.default_rng(0).normal(0, 0.1, (6, 3, 3, 3)).astype(np.float32)
    every: Mapping[str, Any] = {"w": weights, "rows": np.array([1, 6, -1]), **constants}
    for name, value in every.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(value), name))
    for index, node in enumerate(model.graph.node):
        node.name = f"{node.op_type}_{index}"
    return model


def shape(model: onnx.ModelProto) -> list[int]:
    return [dim.dim_value for dim in model.graph.input[0].type.tensor_type.shape.dim]


@pytest.mark.parametrize("size", [(32, 64), ("H", "W")], ids=["of that size", "open"])
def test_a_model_that_takes_the_size_is_left_alone(size):
    model = network(ROWS, size)
    assert with_input_size(model, (32, 64)) is model


def test_a_model_of_convolutions_takes_another_size():
    model = network(ROWS)
    before = model.SerializeToString()
    changed = with_input_size(model, (64, 32))
    assert (shape(changed), shape(model)) == ([1, 3, 64, 32], [1, 3, 32, 64])
    assert model.SerializeToString() == before
    sizes = {value.name: value.type.tensor_type.shape.dim for value in changed.graph.value_info}
    assert [dim.dim_value for dim in sizes["c"]] == [1, 6, 16, 8]
    again = with_input_size(changed, (32, 64))
    assert shape(again) == [1, 3, 32, 64]


@pytest.mark.parametrize(
    ("steps", "constants", "reason"),
    [
        (
            f'd = Resize<mode = "nearest">(c, , , sides) {ROWS.replace("(c", "(d")}',
            {"sides": np.array([1, 6, 16, 32])},
            "Resize 'Resize_1' gives the constant size 16x32",
        ),
        (f"m = Mul(c, k) {ROWS.replace('(c', '(m')}", {"k": np.float32(64)}, "Mul 'Mul_1' reads the constant 64"),
        (f"m = Div(c, k) {ROWS.replace('(c', '(m')}", {"k": np.float32(1 / 32)}, "Div 'Div_1' reads the constant"),
        # As many values as are looked at; more are a table, whose shape does not fit.
        ("r = Reshape(c, rows) m = Add(r, k) y = Identity(m)", {"k": np.zeros((1, 6, 128), np.float32)}, "Add"),
        (
            "r = Reshape(c, rows) m = Add(r, k) y = Identity(m)",
            {"rows": np.array([1, -1, 8]), "k": np.array([*range(7), 32.0], np.float32)},
            "Add 'Add_2' reads the constant 32, which is of the size",
        ),
        ("y = Reshape(c, rows)", {"rows": np.array([1, 6, 128])}, "Reshape"),
        (
            f"s = Slice(c, low, high, axes) {ROWS.replace('(c', '(s')}",
            {"low": np.array([0]), "high": np.array([4]), "axes": np.array([2])},
            "Slice 'Slice_1' cuts 0 to 4 out of 8, which are 16 at that size",
        ),
    ],
)
def test_a_graph_that_holds_its_size_is_refused(steps, constants, reason):
    with pytest.raises(ModelError) as caught:
        with_input_size(network(steps, **constants), (64, 64))
    assert "fixed to 32x64 (height x width) and cannot be changed to 64x64: " in str(caught.value)
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("steps", "constants"),
    [
        (f"m = Mul(c, k) {ROWS.replace('(c', '(m')}", {"k": np.float32(31)}),
        (f"s = Slice(c, low, high, axes) {ROWS.replace('(c', '(s')}", {
            "low": np.array([0]), "high": np.array([16]), "axes": np.array([2])}),
        (f"s = Slice(c, low, high, axes) {ROWS.replace('(c', '(s')}", {
            "low": np.array([2]), "high": np.array([4]), "axes": np.array([1]), "rows": np.array([1, 2, -1])}),
    ],
    ids=["another number", "all of them", "channels"],
)  # fmt: skip
def test_what_is_not_of_the_size_is_no_obstacle(steps, constants):
    assert shape(with_input_size(network(steps, **constants), (64, 64))) == [1, 3, 64, 64]


def test_as_many_rows_as_before_are_of_the_old_cells():
    rows = {"rows": np.array([1, 1200, -1])}
    with pytest.raises(ModelError, match="as many rows as before"):
        with_input_size(network("y = Reshape(c, rows)", (80, 160), **rows), (160, 80))
    queries = {"rows": np.array([1, 100, -1])}
    assert with_input_size(network("y = Reshape(c, rows)", (80, 160), **queries), (160, 80))
