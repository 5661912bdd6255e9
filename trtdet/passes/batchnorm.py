"""BatchNormalization(Conv(x)) -> Conv(x)"""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs

from trtdet.passes.base import Options, PassResult, rewrite_nodes


def apply(graph: gs.Graph, options: Options) -> PassResult:
    """Folds an inference-mode batch normalisation into the convolution before it.

    A float scale between convolution and activation would prevent an INT8 kernel. Source: Jacob et al. 2018,
    arXiv:1712.05877, section 3.2.
    """
    return rewrite_nodes(graph, _fold, "BatchNormalization")


def _fold(graph: gs.Graph, norm: gs.Node) -> str:
    source = norm.inputs[0].inputs
    if not source or source[0].op != "Conv":
        return f"its input comes from {source[0].op if source else 'the graph input'}, not Conv"
    conv = source[0]
    if len(conv.outputs[0].outputs) != 1:
        return "the Conv's output has another consumer"
    if any(tensor is conv.outputs[0] for tensor in graph.outputs):
        return "the Conv's output is an output of the model"
    if norm.attrs.get("training_mode"):
        return "it is in training mode"
    if not all(isinstance(tensor, gs.Constant) for tensor in [*conv.inputs[1:], *norm.inputs[1:5]]):
        return "a weight is not constant"
    if conv.inputs[1].values.ndim != 4:
        return "the Conv is not two-dimensional"
    scale, shift, mean, variance = (tensor.values.astype(np.float64) for tensor in norm.inputs[1:5])
    factor = scale / np.sqrt(variance + norm.attrs.get("epsilon", 1e-5))
    weight = conv.inputs[1].values.astype(np.float64)
    bias = conv.inputs[2].values.astype(np.float64) if len(conv.inputs) > 2 else np.zeros(len(factor))
    with np.errstate(over="ignore"):
        folded = (weight * factor.reshape(-1, 1, 1, 1)).astype(np.float32)
        shifted = ((bias - mean) * factor + shift).astype(np.float32)
    if not (np.isfinite(folded).all() and np.isfinite(shifted).all()):
        return "the folded weights exceed float32"
    constants = [gs.Constant(f"{conv.name}/weight", folded), gs.Constant(f"{conv.name}/bias", shifted)]
    conv.inputs = [conv.inputs[0], *constants]
    conv.outputs = [norm.outputs[0]]
    norm.outputs.clear()
    return ""
