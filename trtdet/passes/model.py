"""Conversion between ONNX models and graph-surgeon graphs."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx_graphsurgeon as gs
import onnxruntime

from trtdet.errors import ModelError, one_line
from trtdet.files import write_atomically
from trtdet.passes.provenance import origin_of, put, registry

IR_VERSION = 10  # IR version of every written file; graph-surgeon's default is too new for released runtimes


def to_graph(model: onnx.ModelProto) -> gs.Graph:
    """The graph-surgeon graph of a model."""
    graph = gs.import_onnx(model)
    graph.ir_version = IR_VERSION  # constants are folded in models that graph-surgeon writes
    registry(graph).update(origin_of(model))
    return graph


def unchecked(graph: gs.Graph) -> onnx.ModelProto:
    """The ONNX model of a sorted graph as it is, without inferred shapes; types of outputs may be open."""
    model: onnx.ModelProto = gs.export_onnx(graph, do_type_check=False)
    model.ir_version = IR_VERSION
    model.producer_name = "trtdet"
    put(model, registry(graph))
    return model


def to_model(graph: gs.Graph) -> onnx.ModelProto:
    """The ONNX model of a graph: sorted, with inferred shapes, checked. Raises ModelError if the graph is not valid
    ONNX, which is a fault of the pass that wrote it."""
    graph.toposort()
    model = unchecked(graph)
    imported = {entry.domain for entry in model.opset_import}
    for domain in sorted({node.domain for node in model.graph.node} - imported - {"ai.onnx"}):
        model.opset_import.append(onnx.helper.make_opsetid(domain, 1))
    try:
        model = onnx.shape_inference.infer_shapes(model, data_prop=True)
        for value in model.graph.output:
            value.type.tensor_type.shape.SetInParent()  # the shape may depend on values
        onnx.checker.check_model(model)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise ModelError(f"the rewritten graph is not valid ONNX: {one_line(error)}") from None
    return model


def refill(graph: gs.Graph, model: onnx.ModelProto) -> None:
    """Replaces the content of a graph by that of a model, in place."""
    changed = to_graph(model)
    registry(graph).update(registry(changed))
    for attribute in ("nodes", "inputs", "outputs", "import_domains", "opset", "functions"):
        setattr(graph, attribute, getattr(changed, attribute))


def cpu_session(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    """An onnxruntime session on the CPU without log output; exceptions hold the reason."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def save_model(model: onnx.ModelProto, path: Path) -> None:
    """Writes a model atomically."""
    write_atomically(path, model.SerializeToString(deterministic=True))
