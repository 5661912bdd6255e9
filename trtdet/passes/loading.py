"""Reading and checking of ONNX files."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import onnx
from google.protobuf.message import DecodeError

from trtdet.errors import ModelError, one_line
from trtdet.files import finish_replacing
from trtdet.passes import plugin_ops  # noqa: F401  # registers the plugin operators with ONNX
from trtdet.passes.base import PLUGIN_DOMAIN
from trtdet.passes.exported import unwrapped
from trtdet.passes.integers import DYNAMIC, on_integers, without_integers
from trtdet.passes.own_suppression import PLUGINS
from trtdet.passes.protobuf import graphs
from trtdet.passes.validation import check, clear_unusable_dims, sort_nodes, spread_windows
from trtdet.passes.walk import PAIR

_MOST_OPSETS = 1000  # versions of a domain that is not ONNX's own; a file that names more is damaged
_MOST_BYTES = 2**31  # of a constant, as many as a file of protobuf holds


def load_model(path: Path, *, allow_quantized: bool = False) -> onnx.ModelProto:
    """Reads an ONNX file with its external data and checks it.

    Clear deviations from ONNX are corrected: negative dimensions become open, domain ``ai.onnx`` becomes the empty one,
    a stride of one number counts for both axes, and nodes are sorted. Forms of exporters become one form, see
    :mod:`trtdet.passes.exported`.

    Raises:
        ModelError: the file is missing, truncated or not ONNX; external data is missing; the model is invalid (see
            :func:`trtdet.passes.validation.check`), has unknown operators or, unless ``allow_quantized``, is quantised.
    """
    finish_replacing(path.parent)
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
        _check_header(model)
    except ModelError as error:
        raise ModelError(f"model '{path}' {error.problem}", error.hint) from None
    clear_unusable_dims(model)
    _unify_domains(model)
    try:
        onnx.load_external_data_for_model(model, str(path.parent))
    except (OSError, ValueError, RuntimeError, onnx.checker.ValidationError) as error:
        raise ModelError(
            f"model '{path}' keeps its weights in separate files and one is missing or cut ({one_line(error)}); "
            f"copy them to '{path.parent}'"
        ) from None
    try:
        _densify(model)
    except (ValueError, IndexError, TypeError, MemoryError) as error:
        raise ModelError(
            f"model '{path}' has a sparse constant that is damaged ({one_line(error)})", "export it with dense weights"
        ) from None
    # Exporters write plugins under any domain or none; their schemas have one domain.
    plugins = {*PLUGINS, *(schema.name for schema in onnx.defs.get_all_schemas() if schema.domain == PLUGIN_DOMAIN)}
    misplaced = [node for node in model.graph.node if node.op_type in plugins and node.domain != PLUGIN_DOMAIN]
    for node in misplaced:
        node.domain = PLUGIN_DOMAIN
    for node in model.graph.node:
        if node.domain == PLUGIN_DOMAIN:
            _unlist(node)
    if misplaced and all(entry.domain != PLUGIN_DOMAIN for entry in model.opset_import):
        model.opset_import.append(onnx.helper.make_opsetid(PLUGIN_DOMAIN, 1))
    try:
        sort_nodes(model.graph)
        spread_windows(model)
        _check_operators(model)
        check(model)
        model = without_integers(model)
        if not allow_quantized:
            _check_float(model)
    except ModelError as error:
        raise ModelError(f"model '{path}' {error.problem}", error.hint or "export it again") from None
    return unwrapped(model)


def _densify(model: onnx.ModelProto) -> None:
    """Writes sparse constants as dense ones, which the passes and every backend read."""
    for sparse in model.graph.sparse_initializer:
        values, places = (onnx.numpy_helper.to_array(part) for part in (sparse.values, sparse.indices))
        shape = tuple(sparse.dims)
        if math.prod(shape) * values.itemsize > _MOST_BYTES:
            raise ValueError(f"'{sparse.values.name}' has the shape {shape}")
        dense = np.zeros(shape, values.dtype)
        dense[tuple(places.T) if places.ndim == 2 else np.unravel_index(places, shape)] = values
        model.graph.initializer.append(onnx.numpy_helper.from_array(dense, sparse.values.name))
    del model.graph.sparse_initializer[:]


def _unlist(node: onnx.NodeProto) -> None:
    """Lists of one number become the number, which is how TensorRT reads a plugin's field of one value."""
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.INTS and len(attribute.ints) == 1:
            attribute.CopyFrom(onnx.helper.make_attribute(attribute.name, attribute.ints[0]))


def _check_header(model: onnx.ModelProto) -> None:
    """Refuses opsets that ONNX never defined, and names of operators and tensors that are not UTF-8."""
    newest = onnx.defs.onnx_opset_version()
    for entry in model.opset_import:
        most = newest if entry.domain in ("", "ai.onnx") else _MOST_OPSETS
        if not 1 <= entry.version <= most:
            domain = one_line(entry.domain or "ai.onnx")
            raise ModelError(
                f"has opset {entry.version} of domain '{domain}', and 1 to {most} are known",
                "export with one of these",
            )
    for graph in graphs(model.graph):
        for node in graph.node:
            try:
                # The library gives a text that is not UTF-8 as bytes, or fails.
                texts = all(isinstance(text, str) for text in (node.op_type, node.domain, node.name, *node.input))
            except UnicodeDecodeError:
                texts = False
            if not texts:
                raise ModelError("has a node whose operator or names are not UTF-8", "export it again")


def has_pairs(model: Path | onnx.ModelProto) -> bool:
    """Whether a model or an ONNX file is quantised with constant scales: has Q/DQ nodes, or operators on integers that
    become such pairs; False for a file that cannot be read."""
    if isinstance(model, Path):
        try:
            model = onnx.load(str(model), format="protobuf", load_external_data=False)
        except (OSError, DecodeError, ValueError):
            return False
    return any(node.op_type in PAIR or (on_integers(node) and node.op_type not in DYNAMIC) for node in model.graph.node)


def _check_float(model: onnx.ModelProto) -> None:
    """Refuses a model that is quantised."""
    nodes = [node for node in model.graph.node if node.op_type in PAIR]
    if nodes:
        example = f"{len(nodes)} nodes such as {nodes[0].op_type} '{nodes[0].name}'"
        advice = "give the float model it was made from; 'trtdet build' takes it as it is"
        raise ModelError(f"is quantised already: {example}", advice)


def _unify_domains(model: onnx.ModelProto) -> None:
    """Writes the domain ``ai.onnx`` as the empty one, for shape inference; domains without an opset get opset 1."""
    for entries in (model.opset_import, *(function.opset_import for function in model.functions)):
        versions: dict[str, int] = {}
        for entry in entries:
            domain = "" if entry.domain == "ai.onnx" else entry.domain
            versions[domain] = max(entry.version, versions.get(domain, 0))
        if len(versions) < len(entries) or any(entry.domain == "ai.onnx" for entry in entries):
            del entries[:]
            entries.extend(onnx.helper.make_opsetid(domain, version) for domain, version in versions.items())
    used = {""}
    for graph in graphs(model.graph):
        for node in graph.node:
            if node.domain == "ai.onnx":
                node.domain = ""
            used.add(node.domain)
    for domain in sorted(used - {entry.domain for entry in model.opset_import} - {""}):
        model.opset_import.append(onnx.helper.make_opsetid(domain, 1))


def _check_operators(model: onnx.ModelProto) -> None:
    opsets = {entry.domain: entry.version for entry in model.opset_import}
    local = {(function.domain, function.name) for function in model.functions}
    unknown: dict[str, str] = {}
    for node in model.graph.node:
        if (node.domain, node.op_type) in local or node.op_type in PLUGINS or on_integers(node):
            continue
        try:
            onnx.defs.get_schema(node.op_type, opsets.get(node.domain, 1), node.domain)
        except onnx.defs.SchemaError:
            unknown.setdefault(f"{node.domain or 'ai.onnx'}::{node.op_type}", node.name or next(iter(node.output), ""))
    if unknown:
        listed = ", ".join(f"{op} (node '{name}')" for op, name in list(unknown.items())[:5])
        raise ModelError(
            f"uses operators that ONNX opset {opsets.get('')} does not define: {listed}",
            "export without them, or cut the graph before them with head.outputs",
        )
