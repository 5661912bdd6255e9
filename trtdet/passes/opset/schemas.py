"""Checks of nodes against an older opset's schemas."""

from __future__ import annotations

from collections.abc import Callable

import onnx

from trtdet.passes.opset.nodes import InexpressibleError, Scope, text_of

_NEW_VALUES = {
    ("Pad", "mode", b"wrap"): 19,
    ("Resize", "coordinate_transformation_mode", b"half_pixel_symmetric"): 19,
    ("ScatterND", "reduction", b"max"): 18,
    ("ScatterND", "reduction", b"min"): 18,
    ("ScatterElements", "reduction", b"max"): 18,
    ("ScatterElements", "reduction", b"min"): 18,
}
"""First opset of attribute values that are newer than their attribute."""


def schema_of(op: str, version: int) -> onnx.defs.OpSchema | None:
    """Schema of an operator in an opset; None if it does not exist or is deprecated."""
    try:
        schema: onnx.defs.OpSchema = onnx.defs.get_schema(op, version, "")
    except onnx.defs.SchemaError:
        return None
    return None if schema.deprecated else schema


def first_opset(op: str, test: Callable[[onnx.defs.OpSchema], bool] = lambda schema: True) -> int:
    """First opset whose schema of an operator passes a test."""
    versions = range(1, onnx.defs.onnx_opset_version() + 1)
    schemas = (schema_of(op, version) for version in versions)
    return next(schema.since_version for schema in schemas if schema is not None and test(schema))


def drop_new_attributes(
    node: onnx.NodeProto, newer: onnx.defs.OpSchema, older: onnx.defs.OpSchema, scope: Scope
) -> None:
    """Drops attributes that the older schema lacks, if they have their default value.

    Raises:
        InexpressibleError: such an attribute has another value, or a value is newer than its attribute.
    """
    for attribute in list(node.attribute):
        name, value = attribute.name, onnx.helper.get_attribute_value(attribute)
        if name not in older.attributes:
            default = newer.attributes[name].default_value if name in newer.attributes else onnx.AttributeProto()
            if not default.name or value != onnx.helper.get_attribute_value(default):
                since = first_opset(node.op_type, lambda schema, name=name: name in schema.attributes)  # type: ignore[misc]
                raise InexpressibleError(f"its attribute {name} = {text_of(value)} exists from opset {since} on")
            node.attribute.remove(attribute)
        elif isinstance(value, bytes):
            since = _NEW_VALUES.get((node.op_type, name, value), 0)
            if scope.target < since <= scope.source:
                raise InexpressibleError(f"its attribute {name} = {text_of(value)} exists from opset {since} on")


def check_tensors(node: onnx.NodeProto, older: onnx.defs.OpSchema, scope: Scope) -> None:
    """Drops empty inputs and outputs at the end and checks the others.

    Raises:
        InexpressibleError: the older schema does not accept their number or their types.
    """
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
