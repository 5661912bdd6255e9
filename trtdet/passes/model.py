"""ONNX files in and out, and a small way to write nodes into a graph."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx_graphsurgeon as gs
from google.protobuf.message import DecodeError

from trtdet.errors import ModelError, one_line
from trtdet.files import write_atomically
from trtdet.passes import plugin_ops  # noqa: F401  # registers the plugin operators with ONNX
from trtdet.passes.base import PLUGIN_DOMAIN
from trtdet.passes.provenance import origin_of, put, registry

IR_VERSION = 10
"""Written into every file: graph-surgeon's default is newer than what released runtimes read."""

_QUANTIZED = ("QuantizeLinear", "DequantizeLinear", "QLinearConv", "ConvInteger", "QLinearMatMul", "MatMulInteger")


def load_model(path: Path, *, allow_quantized: bool = False) -> onnx.ModelProto:
    """Reads an ONNX file whole, external data included, and checks that every operator exists.

    Raises:
        ModelError: the file is missing, empty, truncated, not ONNX, lacks its external data, holds an operator that
            no ONNX opset defines, names two tensors alike, or (unless ``allow_quantized``) is quantised already.
    """
    try:
        model = onnx.load(str(path), format="protobuf", load_external_data=False)
    except FileNotFoundError:
        raise ModelError(f"model '{path}' does not exist; give the path of an ONNX file") from None
    except IsADirectoryError:
        raise ModelError(f"model '{path}' is a folder; give the path of an ONNX file") from None
    except OSError as error:
        raise ModelError(f"model '{path}' cannot be read: {error.strerror}") from None
    except (DecodeError, ValueError) as error:
        size = path.stat().st_size
        raise ModelError(
            f"model '{path}' ({size} bytes) is not ONNX or is truncated ({one_line(error)}); export or copy it again"
        ) from None
    if not model.graph.node or not model.opset_import:
        raise ModelError(f"model '{path}' is not ONNX or is truncated: it has no nodes or no opset; export it again")
    try:
        onnx.load_external_data_for_model(model, str(path.parent))
    except (OSError, ValueError, onnx.checker.ValidationError) as error:
        raise ModelError(
            f"model '{path}' keeps its weights in files beside it and one is missing or cut ({one_line(error)}); "
            f"copy them to '{path.parent}'"
        ) from None
    _check_names(model, path)
    _place_plugins(model)
    _check_operators(model, path)
    quantized = [node for node in model.graph.node if node.op_type in _QUANTIZED]
    if quantized and not allow_quantized:
        raise ModelError(
            f"model '{path}' is quantised already: {len(quantized)} nodes such as {quantized[0].op_type} "
            f"'{quantized[0].name}'; give the float model it was made from"
        )
    return model


def _check_names(model: onnx.ModelProto, path: Path) -> None:
    """A tensor that two nodes give is none that a reader could tell apart."""
    seen = {value.name for value in model.graph.input}
    for node in model.graph.node:
        for name in filter(None, node.output):
            if name in seen:
                raise ModelError(
                    f"model '{path}' is not valid ONNX: node '{node.name or node.op_type}' gives a tensor '{name}', "
                    "which another node gives or which is an input; export it again with names of their own"
                )
            seen.add(name)


def _place_plugins(model: onnx.ModelProto) -> None:
    """Exporters write plugins under any domain or none; here they have the one that their schemas are registered in."""
    schemas = {one.name for one in onnx.defs.get_all_schemas() if one.domain == PLUGIN_DOMAIN}
    found = [node for node in model.graph.node if node.op_type in schemas and node.domain != PLUGIN_DOMAIN]
    for node in found:
        node.domain = PLUGIN_DOMAIN
    if found and all(entry.domain != PLUGIN_DOMAIN for entry in model.opset_import):
        model.opset_import.append(onnx.helper.make_opsetid(PLUGIN_DOMAIN, 1))


def _check_operators(model: onnx.ModelProto, path: Path) -> None:
    opsets = {entry.domain or "ai.onnx": entry.version for entry in model.opset_import}
    local = {(function.domain, function.name) for function in model.functions}
    unknown: dict[str, str] = {}
    for node in model.graph.node:
        domain = node.domain or "ai.onnx"
        if (node.domain, node.op_type) in local:
            continue
        try:
            onnx.defs.get_schema(node.op_type, opsets.get(domain, 1), "" if domain == "ai.onnx" else domain)
        except onnx.defs.SchemaError:
            unknown.setdefault(f"{domain}::{node.op_type}", node.name or node.output[0])
    if unknown:
        listed = ", ".join(f"{op} (node '{name}')" for op, name in list(unknown.items())[:5])
        raise ModelError(
            f"model '{path}' uses operators that ONNX opset {opsets.get('ai.onnx')} does not define: {listed}; "
            "export without them, or cut the graph before them with head.outputs"
        )


def to_graph(model: onnx.ModelProto) -> gs.Graph:
    """The graph-surgeon view of a model, held to the IR version that trtdet writes."""
    graph = gs.import_onnx(model)
    graph.ir_version = IR_VERSION
    registry(graph).update(origin_of(model))
    return graph


def to_model(graph: gs.Graph) -> onnx.ModelProto:
    """The ONNX model of a graph, sorted, with inferred shapes and checked.

    Raises:
        ModelError: the graph breaks a rule of ONNX, which is a fault of the pass that wrote it.
    """
    graph.toposort()
    model: onnx.ModelProto = gs.export_onnx(graph, do_type_check=False)
    model.ir_version = IR_VERSION
    model.producer_name = "trtdet"
    put(model, registry(graph))
    imported = {entry.domain for entry in model.opset_import}
    for domain in sorted({node.domain for node in model.graph.node} - imported - {"ai.onnx"}):
        model.opset_import.append(onnx.helper.make_opsetid(domain, 1))
    try:
        model = onnx.shape_inference.infer_shapes(model, data_prop=True)
        onnx.checker.check_model(model)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise ModelError(f"the rewritten graph is not valid ONNX: {one_line(error)}") from None
    return model


def save_model(model: onnx.ModelProto, path: Path) -> None:
    """Writes a model under a temporary name and renames it, so that ``path`` is never half-written."""
    write_atomically(path, model.SerializeToString(deterministic=True))
