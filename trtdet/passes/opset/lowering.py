"""opset N -> opset M < N, node by node, with the same numbers

ONNX's own version converter is no help downwards: onnx 1.23 has no way back for Split (18), Pad (18), Mul (14), Reshape
(14) or any operator that is newer than the target, and leaves attributes behind that the older opset does not know. So
each node is looked up in ONNX's schemas:

1. A node whose operator did not change between the two opsets stays as it is.
2. Where its form changed, the operator's entry in ``FORMS`` writes the older form, or tells why there is none.
3. The older schema must take what is left: attributes (those at their defaults are dropped), inputs, outputs and types.
4. An operator that the older opset cannot express is replaced by its definition, where ONNX
   gives one as a function of other operators; the nodes of that definition are lowered in turn.

Between opsets 13 and 28 only these operators changed their meaning with their attributes and inputs unchanged; found by
reading the schemas of every version (https://onnx.ai/onnx/operators/):

- RoiAlign 16: the sampling grid moved by half a pixel;
- GroupNormalization 21: scale and bias are those of a channel, not of a group;
- AveragePool and MaxPool 22: with ``ceil_mode`` a window that would start in the padding is left out;
- Cast and CastLike 24: infinity becomes the largest number of float8e4m3fnuz and float8e5m2fnuz, not NaN;
- Attention 24: which keys are hidden where there are more of them than queries;
- Mod 28: ``fmod = 0`` takes floats.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import onnx
import onnx.inliner

from trtdet.errors import ModelError
from trtdet.passes.opset.definitions import definition_of
from trtdet.passes.opset.forms import FORMS
from trtdet.passes.opset.nodes import NodeWriter, copied, replace_nodes, without_no_reduction
from trtdet.passes.opset.schemas import check_tensors, drop_new_attributes, first_opset, schema_of
from trtdet.passes.opset.scope import ONNX_DOMAINS, InexpressibleError, Scope, known
from trtdet.passes.provenance import Origin, node_names, origin_of, put, subgraphs

MINIMUM = 13
"""The first opset whose QuantizeLinear and DequantizeLinear have an axis: per-channel weights need it. Written into
an older model the same nodes are invalid (https://onnx.ai/onnx/operators/onnx__DequantizeLinear.html)."""


def lower(model: onnx.ModelProto, version: int, missing: Collection[str] = ()) -> tuple[onnx.ModelProto, int]:
    """Expresses a model in an older opset.

    Names of inputs, outputs, and of nodes and tensors that stay are kept; nodes of other domains are not touched.

    Args:
        model: every node named; it is not changed.
        version: the newest opset to use, 13 or newer.
        missing: operators to replace by their definition, where ONNX has one, whatever the opset.

    Returns:
        The model, and how many nodes were rewritten; the model given, and 0, where none had to be.

    Raises:
        ModelError: a node cannot be expressed in that opset; the message names it.
    """
    changed = _inferred(onnx.inliner.inline_local_functions(model) if model.functions else model)
    (entry,) = (entry for entry in changed.opset_import if entry.domain in ONNX_DOMAINS)
    given = set(node_names(changed.graph))
    types, constants = known(changed.graph)
    scope = Scope(entry.version, min(version, entry.version), frozenset(missing), types, constants)
    count = _lower_graph(changed.graph, scope)
    if entry.version > version:
        entry.version = version
    elif not count and not model.functions:
        return model, 0
    written = dict.fromkeys(set(node_names(changed.graph)) - given, Origin.LOWERING)
    put(changed, {**origin_of(model), **written})
    return changed, count


def _inferred(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy with the types and shapes of its tensors; ONNX 1.23 itself infers none past a GroupNormalization."""
    while True:
        made: onnx.ModelProto = onnx.shape_inference.infer_shapes(model, data_prop=True)
        types, _ = known(made.graph)
        untyped = [
            node
            for node in made.graph.node
            if node.op_type == "GroupNormalization" and node.output[0] not in types and node.input[0] in types
        ]
        if not untyped:
            return made
        for node in untyped:
            made.graph.value_info.add(name=node.output[0]).type.tensor_type.CopyFrom(types[node.input[0]])
        model = made


def _lower_graph(graph: onnx.GraphProto, scope: Scope) -> int:
    """Lowers the nodes of a graph in place; gives how many were rewritten."""
    nodes: list[onnx.NodeProto] = []
    count = 0
    for node in graph.node:
        before = node.SerializeToString()
        try:
            written = _lowered(node, scope)
        except InexpressibleError as reason:
            raise ModelError(
                f"node '{node.name}' ({node.op_type}) cannot be expressed in ONNX opset {scope.target}, the newest "
                f"that the backend reads: {reason}",
                f"export the model with opset {scope.target} or older, or choose another --backend",
            ) from None
        count += len(written) != 1 or written[0].SerializeToString() != before
        nodes += written
    replace_nodes(graph, nodes)
    return count


def _lowered(node: onnx.NodeProto, scope: Scope) -> list[onnx.NodeProto]:
    """The nodes that compute in the older opset what a node computes; its inner graphs are lowered in place."""
    for inner in subgraphs(node):
        _lower_graph(inner, scope.inner(inner))
    if node.domain not in ONNX_DOMAINS:
        return [node]
    newer = schema_of(node.op_type, scope.source)
    if newer is None:
        raise InexpressibleError(f"opset {scope.source} does not define it")
    older = schema_of(node.op_type, scope.target)
    if node.op_type in scope.missing:
        return _without_operator(node, newer, scope)
    try:
        if older is None or older.since_version != newer.since_version:
            return _older_form(node, newer, older, scope)
    except InexpressibleError:
        written = _defined(node, newer, scope)
        if written is None:
            raise
        return written
    return [without_no_reduction(node)]


def _without_operator(node: onnx.NodeProto, schema: onnx.defs.OpSchema, scope: Scope) -> list[onnx.NodeProto]:
    """A node expressed by other operators; the node itself where that is impossible."""
    try:
        if node.op_type in FORMS:
            before = replace(scope, target=first_opset(node.op_type) - 1)
            made = FORMS[node.op_type](NodeWriter(node), before)
            if all(written.op_type != node.op_type for written in made):
                return made
        return _defined(node, schema, scope) or [node]
    except InexpressibleError:
        return [node]


def _older_form(
    node: onnx.NodeProto, newer: onnx.defs.OpSchema, older: onnx.defs.OpSchema | None, scope: Scope
) -> list[onnx.NodeProto]:
    made = FORMS[node.op_type](NodeWriter(node), scope) if node.op_type in FORMS else [copied(node)]
    for written in made:
        if written.op_type != node.op_type:
            continue
        if older is None:
            raise InexpressibleError(f"the operator exists from opset {first_opset(node.op_type)} on")
        drop_new_attributes(written, newer, older, scope)
        check_tensors(written, older, scope)
    return [without_no_reduction(written) for written in made]


def _defined(node: onnx.NodeProto, schema: onnx.defs.OpSchema, scope: Scope) -> list[onnx.NodeProto] | None:
    """The nodes of a node's definition, lowered in turn; None where ONNX has no definition."""
    definition = definition_of(node, schema, scope)
    if definition is None:
        return None
    nodes: list[onnx.NodeProto] = []
    for inner in definition.model.graph.node:
        try:
            nodes += _lowered(inner, definition.scope)
        except InexpressibleError as reason:
            raise InexpressibleError(f"its definition by other operators holds a {inner.op_type}: {reason}") from None
    return nodes
