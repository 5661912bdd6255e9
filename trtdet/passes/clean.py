"""constant expression -> constant; Identity(x), Dropout(x) -> x; all nodes named; batch fixed on request."""

from __future__ import annotations

import itertools
import warnings

import numpy as np
import onnx_graphsurgeon as gs
import onnxruntime
from onnx_graphsurgeon.logger import G_LOGGER

from trtdet.errors import ModelError
from trtdet.passes.base import Options, PassResult
from trtdet.passes.walk import redirect

_PLAIN_VALUES = {"value_float": np.float32, "value_floats": np.float32, "value_int": np.int64, "value_ints": np.int64}


def apply(graph: gs.Graph, options: Options) -> PassResult:
    """Cleans a graph in place; its outputs stay the same. Raises ModelError if the input does not fit the
    configuration, or a dimension besides the batch is dynamic."""
    before, tensors, names = len(graph.nodes), graph.tensors(), options.config.head.outputs
    # Make ``head.outputs`` the outputs: rewrites must not remove them, and nodes behind them need no support.
    # The decode pass reports names that the model lacks.
    if names is not None and all(name in tensors for name in names):
        graph.outputs = [tensors[name] for name in names]
        for tensor in graph.outputs:
            tensor.dtype = tensor.dtype or np.float32
        graph.cleanup().cleanup(remove_unused_graph_inputs=True, recurse_subgraphs=False)
    image = _checked_input(graph, options)
    # The batch pass changes a fixed batch later, when the shapes in the graph are constants.
    if isinstance(options.batch, int) and not (isinstance(image.shape[0], int) and image.shape[0] > 0):
        image.shape = [options.batch, *image.shape[1:]]
        # Shapes downstream were inferred for the old batch; they are inferred again on export.
        for tensor in graph.tensors().values():
            if isinstance(tensor, gs.Variable) and tensor is not image:
                tensor.shape = None
    name_nodes(graph)
    for node in graph.nodes:
        key = next((key for key in _PLAIN_VALUES if key in node.attrs), None) if node.op == "Constant" else None
        if key is not None:  # graph-surgeon folds only tensors
            value = np.array(node.attrs[key], dtype=_PLAIN_VALUES[key])
            node.attrs = {"value": gs.Constant(f"{node.name}/value", value)}
    outputs = {tensor.name for tensor in graph.outputs}
    for node in [node for node in graph.nodes if node.op in ("Identity", "Dropout") and len(node.outputs) == 1]:
        if node.inputs and isinstance(node.inputs[0], gs.Variable) and node.outputs[0].name not in outputs:
            redirect(graph, node.outputs[0], node.inputs[0])
            node.outputs.clear()
    fold(graph)
    for node in graph.nodes:
        # TensorRT 8.6's parser cannot read a kernel's shape from weights in INT8.
        if node.op in ("Conv", "ConvTranspose") and isinstance(node.inputs[1], gs.Constant):
            node.attrs.setdefault("kernel_shape", list(node.inputs[1].shape[2:]))
    graph.cleanup().cleanup(remove_unused_graph_inputs=True, recurse_subgraphs=False).toposort()
    if not graph.inputs:
        raise ModelError("the model's outputs do not depend on the image; export the whole detector")
    return PassResult(before - len(graph.nodes))


def fold(graph: gs.Graph) -> None:
    """Replaces constant expressions by their values, computed in onnxruntime."""
    _write_out_parts_of_shapes(graph)
    G_LOGGER.severity = G_LOGGER.ERROR
    onnxruntime.set_default_logger_severity(4)  # its exceptions have the same text
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph.fold_constants()


def _write_out_parts_of_shapes(graph: gs.Graph) -> None:
    """Shape<start, end>(x) -> Slice(Shape(x)): graph-surgeon 0.6 folds a Shape of opset 15 to the whole shape."""
    for node in list(graph.nodes):
        for value in node.attrs.values():
            if isinstance(value, gs.Graph):
                _write_out_parts_of_shapes(value)
        if node.op == "Shape" and not {"start", "end"}.isdisjoint(node.attrs):
            (part,) = node.outputs
            whole = gs.Variable(f"{part.name}/whole", np.int64)
            bounds = (node.attrs.pop("start", 0), node.attrs.pop("end", np.iinfo(np.int64).max), 0)
            inputs = [gs.Constant(f"{whole.name}/{at}", np.array([bound])) for at, bound in enumerate(bounds)]
            node.outputs = [whole]
            graph.nodes.append(gs.Node("Slice", f"{node.name}/part", {}, [whole, *inputs], [part]))


def network_input(graph: gs.Graph, name: str | None) -> gs.Variable:
    """The graph's image input. Raises ModelError if ``name`` is no input, or it is None and there are several."""
    names = [tensor.name for tensor in graph.inputs]
    if not names:
        raise ModelError("the model has no inputs, an input for the image is needed; export the whole detector")
    if name is None and len(names) == 1:
        return graph.inputs[0]
    if name is None:
        raise ModelError(f"the model has inputs {', '.join(names)}; name the input of the image with key 'input.name'")
    if name not in names:
        raise ModelError(
            f"key 'input.name' is '{name}' but the model's inputs are {', '.join(names)}; give one of them"
        )
    return graph.inputs[names.index(name)]


def _checked_input(graph: gs.Graph, options: Options) -> gs.Variable:
    """Checks the image input and sets its height and width to those of the configuration."""
    config = options.config.input
    tensor = network_input(graph, config.name)
    if len(graph.inputs) > 1:
        names = ", ".join(other.name for other in graph.inputs if other is not tensor)
        raise ModelError(f"the model has inputs besides the image ({names}); export it with the image alone")
    if tensor.dtype != np.float32:
        dtype = np.dtype(tensor.dtype).name
        raise ModelError(f"input '{tensor.name}' is {dtype}, float32 is needed; export the float model")
    shape = list(tensor.shape or [])
    if len(shape) != 4 or shape[1] != 3:
        raise ModelError(f"input '{tensor.name}' has shape {shape}, (batch, 3, height, width) is needed; export it so")
    for axis, size in ((2, config.height), (3, config.width)):
        if isinstance(shape[axis], int) and shape[axis] > 0 and shape[axis] != size:
            raise ModelError(
                f"input '{tensor.name}' is {shape[2]}x{shape[3]} (height x width) but key 'input.size' is "
                f"{config.height}x{config.width}; make them equal, or export the model for that size"
            )
    tensor.shape = [shape[0], 3, config.height, config.width]
    return tensor


def name_nodes(graph: gs.Graph) -> None:
    """Gives every node a unique name; unique names stay."""
    own_names, used_names = {node.name for node in graph.nodes}, set[str]()
    for index, node in enumerate(graph.nodes):
        if not node.name or node.name in used_names:
            numbered = (f"{node.name or node.op}_{number}" for number in itertools.count(index))
            node.name = next(name for name in numbered if name not in own_names and name not in used_names)
        used_names.add(node.name)
