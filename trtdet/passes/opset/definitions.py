"""A node -> the nodes that ONNX defines its operator by."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import onnx
import onnx.inliner

from trtdet.errors import ModelError, one_line
from trtdet.passes.clean import fold
from trtdet.passes.model import to_graph, to_model
from trtdet.passes.opset.nodes import replace_nodes
from trtdet.passes.opset.scope import InexpressibleError, Scope, known
from trtdet.passes.provenance import graphs


@dataclass(frozen=True, eq=False)
class Definition:
    """A node as ONNX defines its operator by others.

    Attributes:
        model: the node's inputs and outputs under their names; all other names begin with the node's.
        scope: what is known inside, where the nodes are of the definition's opset.
    """

    model: onnx.ModelProto
    scope: Scope


def definition_of(node: onnx.NodeProto, schema: onnx.defs.OpSchema, scope: Scope) -> Definition | None:
    """The definition of a node; None where ONNX has none.

    The inliner gets the node alone, so that the nodes it writes can be named after that node.

    Raises:
        InexpressibleError: the definition does not fit the node, or needs a type that is not known.
    """
    described: Any = schema  # the stub lacks the attribute
    if not described.all_function_opset_versions:
        return None
    # The definition's own nodes are of this opset: an operator that the target has is defined in the target's words.
    version = max(scope.target, schema.since_version)
    read = dict.fromkeys(name for name in node.input if name)
    unknown = next((name for name in read if not scope.type(name)), None)
    if unknown is not None:
        raise InexpressibleError(f"the type of its input '{unknown}' is not known, which its definition needs")
    graph = onnx.helper.make_graph(
        [node],
        "definition",
        [_value_info(name, scope) for name in read],
        [_value_info(name, scope) for name in node.output if name],
        [scope.constants[name] for name in read if name in scope.constants],
    )
    alone = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", version)], ir_version=10)
    try:
        written = onnx.inliner.inline_selected_functions(alone, [("", node.op_type)], inline_schema_functions=True)
        written = _folded(onnx.shape_inference.infer_shapes(written))
    except (RuntimeError, onnx.shape_inference.InferenceError, ModelError) as error:
        raise InexpressibleError(f"ONNX's definition of it does not fit: {one_line(error)}") from None
    _rename(written.graph, node)
    return Definition(written, replace(scope, source=version).inner(written.graph))


def _folded(model: onnx.ModelProto) -> onnx.ModelProto:
    """A definition for the shapes and constants of one node: whatever these decide becomes a Constant."""
    types, _ = known(model.graph)
    for node in model.graph.node:
        # Definitions use it to be of any type; as a Cast of a constant it can be folded.
        if node.op_type == "CastLike" and node.input[1] in types:
            node.op_type = "Cast"
            node.attribute.append(onnx.helper.make_attribute("to", types[node.input.pop()].elem_type))
    graph = to_graph(model)
    fold(graph)
    graph.cleanup().toposort()
    folded = to_model(graph)
    constants = [
        onnx.helper.make_node("Constant", [], [tensor.name], value=tensor)
        for tensor in folded.graph.initializer
        if all(tensor.name != given.name for given in model.graph.initializer)
    ]
    replace_nodes(folded.graph, [*constants, *folded.graph.node])
    return folded


def _value_info(name: str, scope: Scope) -> onnx.ValueInfoProto:
    made = onnx.ValueInfoProto(name=name)
    if name in scope.types:
        made.type.tensor_type.CopyFrom(scope.types[name])
    return made


def _rename(graph: onnx.GraphProto, defined: onnx.NodeProto) -> None:
    """Names the nodes and tensors of a definition after the node that is defined."""
    outer = {name for name in (*defined.input, *defined.output) if name}
    prefix = next(name for name in defined.output if name)
    everything = list(graphs(graph))
    inside = everything[1:]
    made = {name for part in everything for node in part.node for name in node.output}
    made |= {value.name for part in inside for value in part.input}
    names = {name: f"{prefix}/{defined.op_type}/{name}" for name in made - outer if name}
    numbers = itertools.count()
    for part in everything:
        for node in part.node:
            node.name = f"{defined.name or prefix}/{node.op_type}_{next(numbers)}"
            for tensors in (node.input, node.output):
                tensors[:] = [names.get(name, name) for name in tensors]
        for value in (*part.value_info, *part.input, *part.output):
            value.name = names.get(value.name, value.name)
