"""opset N -> opset M < N, node by node, with the same results

The version converter of onnx 1.23 cannot lower Split (18), Pad (18), Mul (14), Reshape (14) or operators newer than the
target, and it keeps attributes that the older opset lacks. So each node is checked against ONNX's schemas:

1. An operator that did not change between the two opsets stays as it is.
2. If its form changed, the entry in ``FORMS`` writes the older form, or tells why there is none.
3. The older schema must accept the attributes (those at their defaults are dropped), inputs, outputs and types.
4. Otherwise the operator is replaced by ONNX's function definition, if there is one, and its nodes are lowered in turn.

From opset 13 to 28 only these operators changed their meaning but not their attributes and inputs
(https://onnx.ai/onnx/operators/):

- RoiAlign 16: the sampling grid moved by half a pixel;
- GroupNormalization 21: scale and bias are per channel, not per group;
- AveragePool and MaxPool 22: with ``ceil_mode``, a window that starts in the padding is dropped;
- Cast and CastLike 24: infinity becomes the largest number of float8e4m3fnuz and float8e5m2fnuz, not NaN;
- Attention 24: other keys are masked if there are more keys than queries;
- Mod 28: ``fmod = 0`` takes floats.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import onnx
import onnx.inliner

from trtdet.errors import ModelError, one_line
from trtdet.passes.clean import fold
from trtdet.passes.model import to_graph, to_model
from trtdet.passes.opset.forms import older_form
from trtdet.passes.opset.nodes import InexpressibleError, Scope, text_of, types_and_constants
from trtdet.passes.protobuf import ONNX_DOMAINS, graphs, node_names, replace_nodes, subgraphs
from trtdet.passes.provenance import Origin, origin_of, put

MINIMUM = 13
"""First opset whose QuantizeLinear and DequantizeLinear have an axis, for per-channel weights. In older models the same
nodes are invalid (https://onnx.ai/onnx/operators/onnx__DequantizeLinear.html)."""


_NEW_VALUES = {
    ("Pad", "mode", b"wrap"): 19,
    ("Resize", "coordinate_transformation_mode", b"half_pixel_symmetric"): 19,
    ("ScatterND", "reduction", b"max"): 18,
    ("ScatterND", "reduction", b"min"): 18,
    ("ScatterElements", "reduction", b"max"): 18,
    ("ScatterElements", "reduction", b"min"): 18,
}
"""First opset of attribute values that are newer than their attribute."""


def lower(model: onnx.ModelProto, version: int, missing: Collection[str] = ()) -> tuple[onnx.ModelProto, int]:
    """Expresses a model in an older opset, 13 or newer.

    The nodes of ``model`` must have names; it does not change. Inputs, outputs, and nodes and tensors that stay keep
    their names; nodes of other domains stay. Operators in ``missing`` are replaced by their ONNX definition, if there
    is one, in any opset. Returns the new model and the number of rewritten nodes, or ``model`` and 0 if no node had to
    change. Raises ModelError if a node cannot be expressed in that opset; the message names it.
    """
    changed = onnx.inliner.inline_local_functions(model) if model.functions else model
    while True:
        changed = onnx.shape_inference.infer_shapes(changed, data_prop=True)
        types, constants = types_and_constants(changed.graph)
        norms = [node for node in changed.graph.node if node.op_type == "GroupNormalization"]
        untyped = [node for node in norms if node.output[0] not in types and node.input[0] in types]
        if not untyped:
            break
        for node in untyped:  # ONNX 1.23 infers no type behind a GroupNormalization
            changed.graph.value_info.add(name=node.output[0]).type.tensor_type.CopyFrom(types[node.input[0]])
    (entry,) = (entry for entry in changed.opset_import if entry.domain in ONNX_DOMAINS)
    own_names = set(node_names(changed.graph))
    scope = Scope(
        entry.version, target=min(version, entry.version), missing=frozenset(missing), types=types, constants=constants
    )
    count = _lower_graph(changed.graph, scope)
    if entry.version > version:
        entry.version = version
    elif not count and not model.functions:
        return model, 0
    written = dict.fromkeys(set(node_names(changed.graph)) - own_names, Origin.LOWERING)
    put(changed, {**origin_of(model), **written})
    return changed, count


def _lower_graph(graph: onnx.GraphProto, scope: Scope) -> int:
    """Lowers the nodes of a graph in place; returns the number of rewritten nodes."""
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
    """Nodes of the older opset that compute the same as a node; its inner graphs are lowered in place."""
    for inner in subgraphs(node):
        _lower_graph(inner, scope.inner(inner))
    if node.domain not in ONNX_DOMAINS:
        return [node]
    newer, older = _schema_of(node.op_type, scope.source), _schema_of(node.op_type, scope.target)
    if newer is None:
        raise InexpressibleError(f"opset {scope.source} does not define it")
    if node.op_type in scope.missing:  # replaced if possible
        try:
            written = older_form(node, replace(scope, target=_first_opset(node.op_type) - 1))
            if all(other.op_type != node.op_type for other in written):
                return written
            return _defined(node, newer, scope) or [node]
        except InexpressibleError:
            return [node]
    written = [node]
    try:
        if older is None or older.since_version != newer.since_version:
            written = older_form(node, scope)
            for other in written:
                if other.op_type != node.op_type:
                    continue
                if older is None:
                    raise InexpressibleError(f"the operator exists from opset {_first_opset(node.op_type)} on")
                _fit(other, newer, older, scope=scope)
    except InexpressibleError:
        definition = _defined(node, newer, scope)
        if definition is None:
            raise
        return definition
    # TensorRT's parser before 10.9 refuses ScatterND with the default ``reduction = none``: ``onnxOpImporters.cpp``
    # only tests whether the attribute is present.
    for scatter in [other for other in written if other.op_type in ("ScatterND", "ScatterElements")]:
        for entry in [entry for entry in scatter.attribute if entry.name == "reduction" and entry.s == b"none"]:
            scatter.attribute.remove(entry)
    return written


def _schema_of(op: str, version: int) -> onnx.defs.OpSchema | None:
    """Schema of an operator in an opset; None if it does not exist or is deprecated."""
    try:
        schema: onnx.defs.OpSchema = onnx.defs.get_schema(op, version, "")
    except onnx.defs.SchemaError:
        return None
    return None if schema.deprecated else schema


def _first_opset(op: str, test: Callable[[onnx.defs.OpSchema], bool] = lambda schema: True) -> int:
    """First opset whose schema of an operator passes a test."""
    versions = range(1, onnx.defs.onnx_opset_version() + 1)
    schemas = (_schema_of(op, version) for version in versions)
    return next(schema.since_version for schema in schemas if schema is not None and test(schema))


def _fit(node: onnx.NodeProto, newer: onnx.defs.OpSchema, older: onnx.defs.OpSchema, scope: Scope) -> None:
    """Makes a node fit the older schema: drops new attributes at their defaults, and empty tensors at the end.

    Raises InexpressibleError if another attribute, or the number or types of its inputs and outputs, is newer.
    """
    for attribute in list(node.attribute):
        name, value = attribute.name, onnx.helper.get_attribute_value(attribute)
        if name not in older.attributes:
            default = newer.attributes[name].default_value if name in newer.attributes else onnx.AttributeProto()
            if not default.name or value != onnx.helper.get_attribute_value(default):
                since = _first_opset(node.op_type, lambda schema, name=name: name in schema.attributes)  # type: ignore[misc]
                raise InexpressibleError(f"its attribute {name} = {text_of(value)} exists from opset {since} on")
            node.attribute.remove(attribute)
        elif isinstance(value, bytes):
            since = _NEW_VALUES.get((node.op_type, name, value), 0)
            if scope.target < since <= scope.source:
                raise InexpressibleError(f"its attribute {name} = {text_of(value)} exists from opset {since} on")
    allowed = {each.type_param_str: each.allowed_type_strs for each in older.type_constraints}
    sides = (
        ("input", node.input, older.inputs, older.min_input, older.max_input),
        ("output", node.output, older.outputs, older.min_output, older.max_output),
    )
    for side, names, parameters, least, most in sides:
        while names and not names[-1]:
            del names[-1]
        if not least <= len(names) <= most:
            raise InexpressibleError(f"it has {len(names)} {side}s, opset {scope.target} takes {least} to {most}")
        for index, name in enumerate(names):
            parameter_type = parameters[min(index, len(parameters) - 1)].type_str
            kind = onnx.TensorProto.DataType.Name(scope.type(name)).lower()
            if kind != "undefined" and f"tensor({kind})" not in allowed.get(parameter_type, [parameter_type]):
                raise InexpressibleError(f"its {side} '{name}' is {kind}, which newer opsets take")


def _defined(node: onnx.NodeProto, schema: onnx.defs.OpSchema, scope: Scope) -> list[onnx.NodeProto] | None:
    """The nodes of an operator's ONNX definition, lowered in turn; None if there is no definition.

    The inliner gets only this node, so the nodes that it writes can be named after it.
    """
    described: Any = schema  # the stub lacks the attribute
    if not described.all_function_opset_versions:
        return None
    # Opset of the definition's nodes: the target, or the operator's own opset if that is newer.
    version = max(scope.target, schema.since_version)
    read = dict.fromkeys(name for name in node.input if name)
    unknown = next((name for name in read if not scope.type(name)), None)
    if unknown is not None:
        raise InexpressibleError(f"the type of its input '{unknown}' is not known, which its definition needs")
    infos = {name: onnx.ValueInfoProto(name=name) for name in (*read, *filter(None, node.output))}
    for name, info in infos.items():
        if name in scope.types:
            info.type.tensor_type.CopyFrom(scope.types[name])
    graph = onnx.helper.make_graph(
        [node],
        "definition",
        [infos[name] for name in read],
        [infos[name] for name in node.output if name],
        [scope.constants[name] for name in read if name in scope.constants],
    )
    alone = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", version)], ir_version=10)
    try:
        model = onnx.inliner.inline_selected_functions(alone, [("", node.op_type)], inline_schema_functions=True)
        model = _folded(onnx.shape_inference.infer_shapes(model))
    except (RuntimeError, onnx.shape_inference.InferenceError, ModelError) as error:
        raise InexpressibleError(f"ONNX's definition of it does not fit: {one_line(error)}") from None
    _rename(model.graph, node)
    inside = replace(scope, source=version).inner(model.graph)
    nodes: list[onnx.NodeProto] = []
    for inner in model.graph.node:
        try:
            nodes += _lowered(inner, inside)
        except InexpressibleError as reason:
            raise InexpressibleError(f"its definition by other operators holds a {inner.op_type}: {reason}") from None
    return nodes


def _folded(model: onnx.ModelProto) -> onnx.ModelProto:
    """Folds a definition for the shapes and constants of one node; folded values become Constant nodes."""
    types, _ = types_and_constants(model.graph)
    for node in model.graph.node:
        # Definitions use CastLike for any type; a Cast of a constant can be folded.
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
        if all(tensor.name != initializer.name for initializer in model.graph.initializer)
    ]
    replace_nodes(folded.graph, [*constants, *folded.graph.node])
    return folded


def _rename(graph: onnx.GraphProto, defined: onnx.NodeProto) -> None:
    """Names the nodes and tensors of a definition after the defined node."""
    outer = {name for name in (*defined.input, *defined.output) if name}
    prefix = next(name for name in defined.output if name)
    everything = list(graphs(graph))
    tensors = {name for part in everything for node in part.node for name in node.output}
    tensors |= {value.name for part in everything[1:] for value in part.input}
    names = {name: f"{prefix}/{defined.op_type}/{name}" for name in tensors - outer if name}
    numbers = itertools.count()
    for part in everything:
        for node in part.node:
            node.name = f"{defined.name or prefix}/{node.op_type}_{next(numbers)}"
            for side in (node.input, node.output):
                side[:] = [names.get(name, name) for name in side]
        for value in (*part.value_info, *part.input, *part.output):
            value.name = names.get(value.name, value.name)
