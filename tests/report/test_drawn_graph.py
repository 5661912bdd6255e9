"""The drawing of an engine's layers: every layer once, edges from left to right, marks apart."""

from itertools import pairwise

import pytest
from onnx import TensorProto, helper

from trtdet.audit import Layer, Tensor
from trtdet.audit.gpus import gpu_named
from trtdet.audit.roofline import Estimate
from trtdet.quantization import Entry, PrecisionPlan
from trtdet.report.sections.graph import Node, engine_nodes, graph_section, layout, model_nodes

PLAN = PrecisionPlan({"a": Entry("int8", "as is"), "b": Entry("fp16", "named")})


def chain(*before: tuple[int, ...]) -> list[Node]:
    return [Node(str(place), "", "int8", found) for place, found in enumerate(before)]


@pytest.mark.parametrize(
    "nodes",
    [
        chain(()),
        chain((), (0,), (1,), (2, 0)),
        chain((), (0,), (0,), (0,), (1, 2, 3), (4, 0), (4, 1)),
        chain((), (), (0, 1)),
    ],
)
def test_edges_lead_to_the_right_and_no_two_places_of_a_column_are_near(nodes):
    places, edges = layout(nodes)
    assert len(edges) == sum(len(node.before) for node in nodes)
    for edge in edges:
        columns = [x for x, _ in edge]
        assert columns == [columns[0] + step for step in range(len(columns))]
    ends = [(place, source) for place, node in enumerate(nodes) for source in node.before]
    assert [(edge[-1], edge[0]) for edge in edges] == [(places[place], places[source]) for place, source in ends]
    every = {at for edge in edges for at in edge} | set(places)
    by_column: dict[float, list[float]] = {}
    for x, y in every:
        by_column.setdefault(x, []).append(y)
    for rows in by_column.values():
        rows.sort()
        assert all(second - first > 0.99 for first, second in pairwise(rows))


def test_views_and_constants_of_an_engine_are_passed_through():
    def tensor(name: str, kind: str = "Half") -> Tensor:
        return Tensor(name, kind, (1, 8, 4, 4))

    layers = [
        Layer("first", "conv", (tensor("in", "Int8"),), (), (tensor("x"),), ("a",)),
        Layer("view", "NoOp", (tensor("x"),), (), (tensor("y"),), ()),
        Layer("second", "conv", (tensor("y"),), (), (tensor("z"),), ("b",)),
    ]
    nodes = engine_nodes(layers, PLAN, Estimate(gpu_named("L4"), 1, ()))
    assert [(node.label, node.precision, node.before) for node in nodes] == [("a", "int8", ()), ("b", "fp16", (0,))]


def test_a_kernel_of_many_convolutions_names_the_first_four():
    names = ("a", "b", "c", "d", "e")
    plan = PrecisionPlan({name: Entry("int8", "as is") for name in names})
    value = Tensor("x", "Int8", (1, 8, 4, 4))
    (node,) = engine_nodes(
        [Layer("all", "conv", (value,), (), (value,), names)], plan, Estimate(gpu_named("L4"), 1, ())
    )
    assert node.tip.split("<br>")[:3] == ["all", "conv", "a, b, c, d"]


def test_what_only_changes_the_type_is_passed_through_in_a_model():
    nodes = [
        helper.make_node("QuantizeLinear", ["in", "s"], ["q"], "q"),
        helper.make_node("DequantizeLinear", ["q", "s"], ["d"], "d"),
        helper.make_node("Conv", ["d", "w"], ["x"], "a"),
        helper.make_node("Relu", ["x"], ["y"], "relu"),
        helper.make_node("Conv", ["y", "w"], ["z"], "b"),
    ]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("in", "z")]
    found = model_nodes(helper.make_model(helper.make_graph(nodes, "g", values[:1], values[1:])), PLAN)
    assert [(node.label, node.precision, node.before) for node in found] == [
        ("a", "int8", ()),
        ("Relu", "", (0,)),
        ("b", "fp16", (1,)),
    ]


def test_marks_grow_with_the_time_and_can_be_coloured_by_it():
    nodes = [Node("a", "a", "int8", (), 4.0), Node("b", "b", "fp16", (0,), 1.0), Node("c", "c", "int8", (1,), 0.0)]
    (_, chart) = graph_section(nodes, "estimated for L4, batch 1").parts
    lines, fp16, int8 = chart.traces
    assert lines["x"] == [0.0, 1.0, None, 1.0, 2.0, None]
    assert int8["marker"]["size"] == [18.0, 6.0] and fp16["marker"]["size"] == [12.0]
    (menu,) = chart.layout["updatemenus"]
    assert menu["buttons"][1]["args"][0]["marker.color"] == [[1.0], [4.0, 0.0]]
    assert "updatemenus" not in graph_section(nodes, "").parts[1].layout
