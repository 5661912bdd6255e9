"""opset N -> opset M < N, node by node, with the same numbers

ONNX's own version converter is no help downwards: onnx 1.23 has no way back for Split (18), Pad (18), Mul (14), Reshape
(14) or any operator that is newer than the target, and leaves attributes behind that the older opset does not know. So
each node is looked up in ONNX's schemas:

1. A node whose operator did not change between the two opsets stays as it is.
2. Where the form changed, the operator's entry in ``_FORMS`` says the same in the older form, or why it cannot.
3. The older schema must take what is left: attributes (those at their defaults are dropped), inputs, outputs and types.
4. What the older opset cannot say is replaced by the operator's definition, where ONNX gives one as a function of other
   operators; the nodes of that definition are lowered in turn.

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

import itertools
from collections import ChainMap
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx
import onnx.inliner
from numpy.typing import ArrayLike, NDArray

from trtdet.errors import ModelError, one_line
from trtdet.passes.clean import fold
from trtdet.passes.model import to_graph, to_model
from trtdet.passes.provenance import Origin, node_names, origin_of, put, subgraphs

MINIMUM = 13
"""The first opset whose QuantizeLinear and DequantizeLinear have an axis: per-channel weights need it. Written into
an older model the same nodes are invalid (https://onnx.ai/onnx/operators/onnx__DequantizeLinear.html)."""

_CAST_LIKE = "CastLike"
_ONNX = ("", "ai.onnx")
_FLOAT = onnx.TensorProto.FLOAT

_NEW_VALUES = {
    ("Pad", "mode", b"wrap"): 19,
    ("Resize", "coordinate_transformation_mode", b"half_pixel_symmetric"): 19,
    ("ScatterND", "reduction", b"max"): 18,
    ("ScatterND", "reduction", b"min"): 18,
    ("ScatterElements", "reduction", b"max"): 18,
    ("ScatterElements", "reduction", b"min"): 18,
}
"""The opset that a value of an attribute, which itself is older, came with."""


class _UnsayableError(Exception):
    """Why a node cannot be said in the older opset."""


@dataclass(frozen=True, eq=False)
class _Scope:
    """What is known where a node stands.

    Attributes:
        source: the opset that the node is written in.
        target: the opset that it shall be in.
        missing: operators to replace by their definition even where the target has them.
        types: by tensor, those of outer graphs included.
        constants: by tensor, likewise.
    """

    source: int
    target: int
    missing: frozenset[str]
    types: MutableMapping[str, onnx.TypeProto.Tensor]
    constants: MutableMapping[str, onnx.TensorProto]

    def crosses(self, version: int) -> bool:
        return self.target < version <= self.source

    def inner(self, graph: onnx.GraphProto) -> _Scope:
        types, constants = _known(graph)
        return replace(self, types=ChainMap(types, self.types), constants=ChainMap(constants, self.constants))

    def type(self, name: str) -> int:
        """Of the elements; 0 where it is not known."""
        return self.types[name].elem_type if name in self.types else 0

    def shape(self, name: str) -> list[int | None] | None:
        """With None for what is open; None where the rank is not known."""
        if name not in self.types or not self.types[name].HasField("shape"):
            return None
        return [one.dim_value if one.HasField("dim_value") else None for one in self.types[name].shape.dim]

    def rank(self, name: str) -> int:
        shape = self.shape(name)
        if shape is None:
            raise _UnsayableError(f"the rank of its input '{name}' is not known")
        return len(shape)

    def size(self, name: str, axis: int) -> int:
        shape = self.shape(name)
        size = shape[axis] if shape is not None else None
        if size is None:
            raise _UnsayableError(f"the size of axis {axis} of its input '{name}' is not fixed")
        return size

    def constant(self, name: str, called: str) -> NDArray[Any]:
        if name not in self.constants:
            raise _UnsayableError(f"its {called} are computed in the graph, an older opset wants them fixed")
        return onnx.numpy_helper.to_array(self.constants[name])


def lower(model: onnx.ModelProto, version: int, missing: Collection[str] = ()) -> tuple[onnx.ModelProto, int]:
    """Says a model in an older opset.

    Names of inputs, outputs, and of nodes and tensors that stay are kept; nodes of other domains are not touched.

    Args:
        model: every node named; it is not changed.
        version: the newest opset to use, 13 or newer.
        missing: operators to replace by their definition, where ONNX has one, whatever the opset.

    Returns:
        The model, and how many nodes were written anew; the model given, and 0, where nothing had to be.

    Raises:
        ModelError: a node that cannot be said in that opset; the message names it and says what to do.
    """
    changed = _inferred(onnx.inliner.inline_local_functions(model) if model.functions else model)
    (entry,) = (one for one in changed.opset_import if one.domain in _ONNX)
    given = set(node_names(changed.graph))
    types, constants = _known(changed.graph)
    scope = _Scope(entry.version, min(version, entry.version), frozenset(missing), types, constants)
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
        types, _ = _known(made.graph)
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


def _known(graph: onnx.GraphProto) -> tuple[dict[str, onnx.TypeProto.Tensor], dict[str, onnx.TensorProto]]:
    constants = {one.name: one for one in graph.initializer}
    for node in graph.node:
        for attribute in node.attribute:
            if node.op_type == "Constant" and node.domain in _ONNX:
                constants[node.output[0]] = _constant_value(attribute)
    types = {one.name: one.type.tensor_type for one in (*graph.value_info, *graph.input, *graph.output)}
    types |= {
        name: onnx.helper.make_tensor_type_proto(one.data_type, one.dims).tensor_type for name, one in constants.items()
    }
    return {name: one for name, one in types.items() if one.elem_type}, constants


def _constant_value(attribute: onnx.AttributeProto) -> onnx.TensorProto:
    value = onnx.helper.get_attribute_value(attribute)
    if isinstance(value, onnx.TensorProto):
        return value
    dtype = np.float32 if attribute.name in ("value_float", "value_floats") else np.int64
    return onnx.numpy_helper.from_array(np.array(value, dtype))


def _lower_graph(graph: onnx.GraphProto, scope: _Scope) -> int:
    """Lowers the nodes of a graph in place, and says how many were written anew."""
    nodes: list[onnx.NodeProto] = []
    count = 0
    for node in graph.node:
        before = node.SerializeToString()
        try:
            written = _lowered(node, scope)
        except _UnsayableError as reason:
            raise ModelError(
                f"node '{node.name}' ({node.op_type}) cannot be said in ONNX opset {scope.target}, the newest that the "
                f"backend reads: {reason}; export the model with opset {scope.target} or older, or choose another "
                "--backend"
            ) from None
        count += len(written) != 1 or written[0].SerializeToString() != before
        nodes += written
    _put(graph, nodes)
    return count


def _put(graph: onnx.GraphProto, nodes: list[onnx.NodeProto]) -> None:
    copies = [_copy(node) for node in nodes]
    del graph.node[:]
    graph.node.extend(copies)


def _lowered(node: onnx.NodeProto, scope: _Scope) -> list[onnx.NodeProto]:
    """The nodes that say in the older opset what a node says; its inner graphs are lowered in place."""
    for inner in subgraphs(node):
        _lower_graph(inner, scope.inner(inner))
    if node.domain not in _ONNX:
        return [node]
    newer = _schema(node.op_type, scope.source)
    if newer is None:
        raise _UnsayableError(f"opset {scope.source} does not define it")
    older = _schema(node.op_type, scope.target)
    if node.op_type in scope.missing:
        return _without_operator(node, newer, scope)
    try:
        if older is None or older.since_version != newer.since_version:
            return _older_form(node, newer, older, scope)
    except _UnsayableError:
        written = _definition(node, newer, scope)
        if written is None:
            raise
        return written
    return [_without_no_reduction(node)]


def _without_operator(node: onnx.NodeProto, schema: onnx.defs.OpSchema, scope: _Scope) -> list[onnx.NodeProto]:
    """A node said by other operators; the node itself where that cannot be done."""
    try:
        if node.op_type in _FORMS:
            before = replace(scope, target=_first(node.op_type) - 1)
            made = _FORMS[node.op_type](_Nodes(node), before)
            if all(one.op_type != node.op_type for one in made):
                return made
        return _definition(node, schema, scope) or [node]
    except _UnsayableError:
        return [node]


def _older_form(
    node: onnx.NodeProto, newer: onnx.defs.OpSchema, older: onnx.defs.OpSchema | None, scope: _Scope
) -> list[onnx.NodeProto]:
    made = _FORMS[node.op_type](_Nodes(node), scope) if node.op_type in _FORMS else [_copy(node)]
    for one in made:
        if one.op_type != node.op_type:
            continue
        if older is None:
            raise _UnsayableError(f"the operator exists from opset {_first(node.op_type)} on")
        _drop_new_attributes(one, newer, older, scope)
        _check_tensors(one, older, scope)
    return [_without_no_reduction(one) for one in made]


def _schema(op: str, version: int) -> onnx.defs.OpSchema | None:
    try:
        found: onnx.defs.OpSchema = onnx.defs.get_schema(op, version, "")
    except onnx.defs.SchemaError:
        return None
    return None if found.deprecated else found


def _first(op: str, test: Callable[[onnx.defs.OpSchema], bool] = lambda schema: True) -> int:
    """The first opset whose schema of an operator passes a test."""
    versions = range(1, onnx.defs.onnx_opset_version() + 1)
    schemas = (_schema(op, version) for version in versions)
    return next(one.since_version for one in schemas if one is not None and test(one))


def _default(schema: onnx.defs.OpSchema | None, name: str) -> Any:
    """An attribute's default value; None where it has none, or the schema has no such attribute."""
    value = schema.attributes[name].default_value if schema is not None and name in schema.attributes else None
    return onnx.helper.get_attribute_value(value) if value is not None and value.name else None


def _value(node: onnx.NodeProto, name: str, otherwise: Any = None) -> Any:
    return next((onnx.helper.get_attribute_value(one) for one in node.attribute if one.name == name), otherwise)


def _drop_new_attributes(
    node: onnx.NodeProto, newer: onnx.defs.OpSchema, older: onnx.defs.OpSchema, scope: _Scope
) -> None:
    for attribute in list(node.attribute):
        name, value = attribute.name, onnx.helper.get_attribute_value(attribute)
        if name not in older.attributes:
            if value != _default(newer, name):
                since = _first(node.op_type, lambda schema, name=name: name in schema.attributes)  # type: ignore[misc]
                raise _UnsayableError(f"its attribute {name} = {_said(value)} exists from opset {since} on")
            node.attribute.remove(attribute)
        elif isinstance(value, bytes) and scope.crosses(_NEW_VALUES.get((node.op_type, name, value), 0)):
            since = _NEW_VALUES[node.op_type, name, value]
            raise _UnsayableError(f"its attribute {name} = {_said(value)} exists from opset {since} on")


def _said(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else f"{value}"


def _check_tensors(node: onnx.NodeProto, older: onnx.defs.OpSchema, scope: _Scope) -> None:
    """Raises an error where the older schema does not take as many inputs or outputs, or not their types."""
    allowed = {one.type_param_str: one.allowed_type_strs for one in older.type_constraints}
    sides = (
        ("input", node.input, older.inputs, older.min_input, older.max_input),
        ("output", node.output, older.outputs, older.min_output, older.max_output),
    )
    for side, names, parameters, least, most in sides:
        while names and not names[-1]:
            del names[-1]
        if not least <= len(names) <= most:
            raise _UnsayableError(f"it has {len(names)} {side}s, opset {scope.target} takes {least} to {most}")
        for index, name in enumerate(names):
            written = parameters[min(index, len(parameters) - 1)].type_str
            kind = scope.type(name)
            if kind and f"tensor({_type_name(kind)})" not in allowed.get(written, [written]):
                raise _UnsayableError(f"its {side} '{name}' is {_type_name(kind)}, which it took later only")


def _type_name(kind: int) -> str:
    return str(onnx.TensorProto.DataType.Name(kind)).lower()


def _without_no_reduction(node: onnx.NodeProto) -> onnx.NodeProto:
    """A scattering node without ``reduction = none``, which says nothing: TensorRT's parser before 10.9 refuses
    ScatterND with it (its ``onnxOpImporters.cpp`` asks whether the attribute is there)."""
    if node.op_type not in ("ScatterND", "ScatterElements") or _value(node, "reduction") != b"none":
        return node
    made = _Nodes(node)
    made.drop("reduction")
    return made.node


def _copy(node: onnx.NodeProto) -> onnx.NodeProto:
    made = onnx.NodeProto()
    made.CopyFrom(node)
    return made


def _definition(node: onnx.NodeProto, schema: onnx.defs.OpSchema, scope: _Scope) -> list[onnx.NodeProto] | None:
    """A node as ONNX defines it by other operators, those lowered in turn; None where it does not.

    The inliner is given the node alone, so that what it writes can be named after it.
    """
    described: Any = schema  # whose stub lacks what is asked here
    if not described.all_function_opset_versions:
        return None
    # The definition's own nodes are of this opset: an operator that the target has is defined in the target's words.
    version = max(scope.target, schema.since_version)
    read = dict.fromkeys(name for name in node.input if name)
    unknown = next((name for name in read if not scope.type(name)), None)
    if unknown is not None:
        raise _UnsayableError(f"the type of its input '{unknown}' is not known, which its definition needs")
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
        raise _UnsayableError(f"ONNX's definition of it does not fit: {one_line(error)}") from None
    _rename(written.graph, node)
    inside = replace(scope, source=version).inner(written.graph)
    nodes: list[onnx.NodeProto] = []
    for one in written.graph.node:
        try:
            nodes += _lowered(one, inside)
        except _UnsayableError as reason:
            raise _UnsayableError(f"its definition by other operators holds a {one.op_type}: {reason}") from None
    return nodes


def _folded(model: onnx.ModelProto) -> onnx.ModelProto:
    """A definition as it is for the shapes and constants of one node: what those decide is a Constant."""
    types, _ = _known(model.graph)
    for node in model.graph.node:
        # Definitions use it to be of any type; as a Cast of a constant it can be folded.
        if node.op_type == _CAST_LIKE and node.input[1] in types:
            node.op_type = "Cast"
            node.attribute.append(onnx.helper.make_attribute("to", types[node.input.pop()].elem_type))
    graph = to_graph(model)
    fold(graph)
    graph.cleanup().toposort()
    folded = to_model(graph)
    constants = [
        onnx.helper.make_node("Constant", [], [one.name], value=one)
        for one in folded.graph.initializer
        if all(one.name != given.name for given in model.graph.initializer)
    ]
    _put(folded.graph, [*constants, *folded.graph.node])
    return folded


def _value_info(name: str, scope: _Scope) -> onnx.ValueInfoProto:
    made = onnx.ValueInfoProto(name=name)
    if name in scope.types:
        made.type.tensor_type.CopyFrom(scope.types[name])
    return made


def _rename(graph: onnx.GraphProto, origin: onnx.NodeProto) -> None:
    """Names the nodes and tensors of a definition after the node that it stands for."""
    outer = {name for name in (*origin.input, *origin.output) if name}
    prefix = next(name for name in origin.output if name)
    inside = list(_subgraphs(graph))
    made = {name for one in (graph, *inside) for node in one.node for name in node.output}
    made |= {value.name for one in inside for value in one.input}
    names = {name: f"{prefix}/{origin.op_type}/{name}" for name in made - outer if name}
    numbers = itertools.count()
    for one in (graph, *inside):
        for node in one.node:
            node.name = f"{origin.name or prefix}/{node.op_type}_{next(numbers)}"
            for tensors in (node.input, node.output):
                tensors[:] = [names.get(name, name) for name in tensors]
        for value in (*one.value_info, *one.input, *one.output):
            value.name = names.get(value.name, value.name)


def _subgraphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    for node in graph.node:
        for inner in subgraphs(node):
            yield inner
            yield from _subgraphs(inner)


class _Nodes:
    """What is written for a node; names come from its first output, so that they are the graph's only ones."""

    def __init__(self, node: onnx.NodeProto) -> None:
        self.node = _copy(node)
        self._made: list[onnx.NodeProto] = []
        self._number = itertools.count()

    def const(self, value: ArrayLike, dtype: Any) -> str:
        tensor = onnx.numpy_helper.from_array(np.array(value, dtype))
        return self("Constant", value=tensor)

    def __call__(self, op: str, *inputs: str, **attrs: Any) -> str:
        name = f"{self.node.output[0]}/{self.node.op_type}/{op}_{next(self._number)}"
        self._made.append(onnx.helper.make_node(op, inputs, [name], name, **attrs))
        return name

    def before(self) -> list[onnx.NodeProto]:
        """What was written, and after it the node itself, changed."""
        return [*self._made, self.node]

    def instead(self) -> list[onnx.NodeProto]:
        """What was written, the last of it in the node's place."""
        self._made[-1].output[0] = self.node.output[0]
        self._made[-1].name = self.node.name
        return self._made

    def drop(self, *names: str) -> None:
        for attribute in [one for one in self.node.attribute if one.name in names]:
            self.node.attribute.remove(attribute)

    def put(self, name: str, value: Any) -> None:
        self.drop(name)
        self.node.attribute.append(onnx.helper.make_attribute(name, value))

    def input(self, index: int) -> str:
        """Its name; empty where the node has none."""
        return self.node.input[index] if index < len(self.node.input) else ""

    def feed(self, index: int, name: str) -> None:
        self.node.input.extend([""] * (index + 1 - len(self.node.input)))
        self.node.input[index] = name


def _reduce(write: _Nodes, scope: _Scope) -> list[onnx.NodeProto]:
    """18: the axes are an input."""
    if not scope.crosses(18):
        return write.before()
    node = write.node
    axes = [int(one) for one in scope.constant(node.input[1], "axes").reshape(-1)] if write.input(1) else []
    noop = _value(node, "noop_with_empty_axes", 0)
    write.drop("noop_with_empty_axes")
    if noop and not axes:
        if node.op_type not in ("ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd"):
            raise _UnsayableError("it reduces over no axes (noop_with_empty_axes), which exists from opset 18 on")
        write("Identity", node.input[0])
        return write.instead()
    del node.input[1:]
    if axes:
        write.put("axes", axes)
    return write.before()


def _split(write: _Nodes, scope: _Scope) -> list[onnx.NodeProto]:
    """18: ``num_outputs`` says how many parts, the last may be smaller."""
    node = write.node
    parts = _value(node, "num_outputs")
    if not scope.crosses(18) or parts is None:
        return write.before()
    size = scope.size(node.input[0], _value(node, "axis", 0))
    write.drop("num_outputs")
    if size % parts:
        each = -(-size // parts)
        write.feed(1, write.const([each] * (parts - 1) + [size - each * (parts - 1)], np.int64))
    return write.before()


def _pad(write: _Nodes, scope: _Scope) -> list[onnx.NodeProto]:
    """18: ``axes`` says what the widths are of."""
    node = write.node
    if not scope.crosses(18) or not write.input(3):
        return write.before()
    rank = scope.rank(node.input[0])
    axes = scope.constant(node.input[3], "axes").reshape(-1) % rank
    widths = np.zeros((2, rank), np.int64)
    widths[:, axes] = scope.constant(node.input[1], "widths").reshape(2, -1)
    write.feed(1, write.const(widths.reshape(-1), np.int64))
    del node.input[3:]
    return write.before()


def _resize(write: _Nodes, scope: _Scope) -> list[onnx.NodeProto]:
    """18: ``axes`` says what the scales or sizes are of."""
    node = write.node
    axes = _value(node, "axes")
    if not scope.crosses(18) or axes is None:
        return write.before()
    if write.input(1):
        raise _UnsayableError("it has a region of interest for some axes only, which exists from opset 18 on")
    rank = scope.rank(node.input[0])
    axes = [axis % rank for axis in axes]
    write.drop("axes")
    if axes == list(range(rank)):
        return write.before()
    if write.input(2):
        scales = np.ones(rank, np.float32)
        scales[axes] = scope.constant(node.input[2], "scales").reshape(-1)
        write.feed(2, write.const(scales, np.float32))
    elif axes == list(range(rank - len(axes), rank)):
        first = [write.const([at], np.int64) for at in (0, rank - len(axes), 0)]
        others = write("Slice", write("Shape", node.input[0]), *first)
        write.feed(3, write("Concat", others, node.input[3], axis=0))
    else:
        sizes = np.array([1 if axis in axes else scope.size(node.input[0], axis) for axis in range(rank)])
        sizes[axes] = scope.constant(node.input[3], "sizes").reshape(-1)
        write.feed(3, write.const(sizes, np.int64))
    return write.before()


def _reshape(write: _Nodes, scope: _Scope) -> list[onnx.NodeProto]:
    """14: with ``allowzero`` a zero in the shape is meant."""
    node = write.node
    if scope.crosses(14) and _value(node, "allowzero", 0) and np.all(scope.constant(node.input[1], "sizes")):
        write.drop("allowzero")
    return write.before()


def _shape(write: _Nodes, scope: _Scope) -> list[onnx.NodeProto]:
    """15: a part of the shape."""
    start, end = _value(write.node, "start", 0), _value(write.node, "end")
    if not scope.crosses(15) or (start == 0 and end is None):
        return write.before()
    last = np.iinfo(np.int64).max if end is None else end
    bounds = [write.const([one], np.int64) for one in (start, last, 0)]
    write("Slice", write("Shape", write.node.input[0]), *bounds)
    return write.instead()


def _pool(write: _Nodes, scope: _Scope) -> list[onnx.NodeProto]:
    """22: with ``ceil_mode``, windows that start in the padding at the end are left out."""
    node = write.node
    if not scope.crosses(22) or not _value(node, "ceil_mode", 0) or _value(node, "auto_pad", b"").startswith(b"SAME"):
        return write.before()
    kernel = _value(node, "kernel_shape")
    strides, dilations = (_value(node, name, [1] * len(kernel)) for name in ("strides", "dilations"))
    pads = np.array(_value(node, "pads", [0] * 2 * len(kernel))).reshape(2, -1)
    for axis, window in enumerate(kernel):
        size = scope.size(node.input[0], axis + 2)
        reach = dilations[axis] * (window - 1) + 1
        windows = -(-(size + pads[:, axis].sum() - reach) // strides[axis]) + 1
        if (windows - 1) * strides[axis] >= size + pads[0, axis]:
            raise _UnsayableError(
                f"its last window along axis {axis + 2} starts in the padding, which is left out from opset 22 on and "
                "counted before"
            )
    return write.before()


def _roi_align(write: _Nodes, scope: _Scope) -> list[onnx.NodeProto]:
    """16: the grid of samples may be, and by default is, moved by half a pixel."""
    if scope.crosses(16):
        mode = _value(write.node, "coordinate_transformation_mode", b"half_pixel")
        if mode != b"output_half_pixel":
            raise _UnsayableError(f"coordinate_transformation_mode = {_said(mode)} exists from opset 16 on")
        write.drop("coordinate_transformation_mode")
    return write.before()


def _grid_sample(write: _Nodes, scope: _Scope) -> list[onnx.NodeProto]:
    """20: other names of the modes; any number of axes."""
    node = write.node
    if scope.crosses(20):
        if scope.rank(node.input[0]) != 4:
            raise _UnsayableError("inputs other than (N, C, H, W) exist from opset 20 on")
        mode = _value(node, "mode", b"linear").decode()
        write.put("mode", {"linear": "bilinear", "cubic": "bicubic"}.get(mode, mode))
    return write.before()


def _cast(write: _Nodes, scope: _Scope) -> list[onnx.NodeProto]:
    """24: infinity as float8."""
    kinds = (onnx.TensorProto.FLOAT8E4M3FNUZ, onnx.TensorProto.FLOAT8E5M2FNUZ)
    if scope.crosses(24) and scope.type(write.node.output[0]) in kinds:
        raise _UnsayableError("infinity becomes another value of that type from opset 24 on")
    return write.before()


def _cast_like(write: _Nodes, scope: _Scope) -> list[onnx.NodeProto]:
    """15: the operator; 24: as Cast."""
    kind = scope.type(write.node.input[1])
    if scope.crosses(15) and kind:
        write("Cast", write.node.input[0], to=kind)
        return write.instead()
    return _cast(write, scope)


def _mod(write: _Nodes, scope: _Scope) -> list[onnx.NodeProto]:
    """28: floats with the sign of the divisor."""
    floats = (_FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.DOUBLE, onnx.TensorProto.BFLOAT16)
    if scope.crosses(28) and not _value(write.node, "fmod", 0) and scope.type(write.node.input[0]) in floats:
        raise _UnsayableError("of floats it takes the sign of the divisor from opset 28 on only")
    return write.before()


def _quantize(write: _Nodes, scope: _Scope) -> list[onnx.NodeProto]:
    """21: ``output_dtype`` says the type that otherwise the zero point has."""
    node = write.node
    kind = _value(node, "output_dtype", 0)
    if not scope.crosses(21) or not kind:
        return write.before()
    shape = scope.shape(node.input[1])
    if not write.input(2) and (shape is None or None in shape):
        raise _UnsayableError(f"its attribute output_dtype = {kind} exists from opset 21 on")
    write.drop("output_dtype")
    if not write.input(2) and shape is not None:
        write.feed(2, write.const(np.zeros(shape), onnx.helper.tensor_dtype_to_np_dtype(kind)))
    return write.before()


def _dequantize(write: _Nodes, scope: _Scope) -> list[onnx.NodeProto]:
    """23: ``output_dtype`` says the type that otherwise the scale has."""
    if scope.crosses(23) and _value(write.node, "output_dtype", 0) == scope.type(write.node.input[1]):
        write.drop("output_dtype")
    return write.before()


def _swish(write: _Nodes, scope: _Scope) -> list[onnx.NodeProto]:
    """24: the operator. Its definition multiplies by ``alpha`` even where that is 1."""
    node = write.node
    if not scope.crosses(24) or _value(node, "alpha", 1.0) != 1.0:
        return write.before()
    write("Mul", node.input[0], write("Sigmoid", node.input[0]))
    return write.instead()


def _group_normalization(write: _Nodes, scope: _Scope) -> list[onnx.NodeProto]:
    """21: scale and bias are those of a channel.

    A group is what InstanceNormalization takes for a channel, as in Wu and He, "Group Normalization" (ECCV 2018),
    section 3.1. ONNX's own definition takes the variance as the difference of two means, which loses digits.
    """
    node = write.node
    if not scope.crosses(21):
        return write.before()
    source, scale, bias = node.input
    groups, rank = _value(node, "num_groups"), scope.rank(source)
    kind, computed = scope.type(source), _value(node, "stash_type", _FLOAT)
    dtype = onnx.helper.tensor_dtype_to_np_dtype(computed)
    normal = write("Reshape", source, write.const([0, groups, -1], np.int64))
    if computed != kind:
        normal = write("Cast", normal, to=computed)
    ones, zeros = write.const(np.ones(groups), dtype), write.const(np.zeros(groups), dtype)
    normal = write("InstanceNormalization", normal, ones, zeros, epsilon=_value(node, "epsilon", 1e-5))
    if computed != kind:
        normal = write("Cast", normal, to=kind)
    trailing = write.const(range(1, rank - 1), np.int64)
    normal = write("Reshape", normal, write("Shape", source))
    scaled = write("Mul", normal, write("Unsqueeze", scale, trailing))
    write("Add", scaled, write("Unsqueeze", bias, trailing))
    return write.instead()


def _attention(write: _Nodes, scope: _Scope) -> list[onnx.NodeProto]:
    """24: which keys a query sees where there are more keys than queries, or the mask is shorter."""
    if scope.crosses(24):
        raise _UnsayableError("it hides other keys from opset 24 on")
    return write.before()


def _dft(write: _Nodes, scope: _Scope) -> list[onnx.NodeProto]:
    """20: the axis is an input, and another one where it is left out."""
    if scope.crosses(20):
        raise _UnsayableError("its axis is an input from opset 20 on")
    return write.before()


_FORMS: Mapping[str, Callable[[_Nodes, _Scope], list[onnx.NodeProto]]] = {
    **dict.fromkeys(
        (
            *("ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin"),
            *("ReduceProd", "ReduceSumSquare"),
        ),
        _reduce,
    ),
    "Split": _split,
    "Pad": _pad,
    "Resize": _resize,
    "Reshape": _reshape,
    "Shape": _shape,
    "AveragePool": _pool,
    "MaxPool": _pool,
    "RoiAlign": _roi_align,
    "GridSample": _grid_sample,
    "Cast": _cast,
    _CAST_LIKE: _cast_like,
    "Mod": _mod,
    "QuantizeLinear": _quantize,
    "DequantizeLinear": _dequantize,
    "Swish": _swish,
    "GroupNormalization": _group_normalization,
    "Attention": _attention,
    "DFT": _dft,
}
"""What says, in an older form, what the newer one says; only called where the operator's schema changed in between."""
