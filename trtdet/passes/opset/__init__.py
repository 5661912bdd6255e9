"""opset below 13 or ``min_opset`` -> the larger of them; opset above ``max_opset`` -> ``max_opset``"""

from __future__ import annotations

import onnx
import onnx.inliner
import onnx_graphsurgeon as gs

from trtdet.errors import ConfigError, ModelError, one_line
from trtdet.passes.base import Options, PassResult
from trtdet.passes.clean import fold, name_nodes
from trtdet.passes.model import refill, to_model
from trtdet.passes.opset.lowering import MINIMUM, lower

SWISH = 24  # the opset that introduced Swish, and the only one for which onnxruntime 1.31 has its kernel

HALF_SCALES = 19
"""First opset whose QuantizeLinear and DequantizeLinear take FP16 scales and values
(https://onnx.ai/onnx/operators/onnx__QuantizeLinear.html)."""


def apply(graph: gs.Graph, options: Options) -> PassResult:
    """Raises an old model with ONNX's version converter, and lowers a newer one to ``max_opset``.

    Operators in ``missing_ops`` are replaced by their ONNX definition if there is one.

    Raises:
        ModelError: an operator has no conversion; the message names the node.
        ConfigError: ``silu`` writes an operator that is newer than ``max_opset``.
    """
    before, newest = graph.opset, options.max_opset
    skipped = _raise(graph, options)
    if newest is not None and newest < SWISH and options.silu == "swish":
        raise ConfigError(
            f"--silu swish writes ONNX's Swish of opset {SWISH}, the backend reads opsets up to {newest}",
            "choose --silu keep",
        )
    count = int(graph.opset > before)
    if newest is not None or options.missing_ops:
        count += _lowered(graph, graph.opset if newest is None else newest, options)
    if options.silu != "swish" or graph.opset <= SWISH:
        return PassResult(count, skipped)
    try:
        return PassResult(count + _lowered(graph, SWISH, options), skipped)
    except ModelError as error:
        return PassResult(count, (*skipped, f"the opset stays {graph.opset}: {error.problem}"))


def _raise(graph: gs.Graph, options: Options) -> tuple[str, ...]:
    """Raises a graph to its oldest allowed opset, in place; returns the reason if that is impossible."""
    limits = [limit for limit in (options.min_opset or MINIMUM, options.max_opset) if limit is not None]
    oldest = max(MINIMUM, min(limits))
    if graph.opset >= oldest:
        return ()
    try:
        upgrade(graph, oldest)
    except ModelError as error:
        if oldest == MINIMUM:
            raise
        if graph.opset < MINIMUM:
            upgrade(graph, MINIMUM)
        return (f"the opset stays {graph.opset}: {error.problem}",)
    return ()


def _lowered(graph: gs.Graph, version: int, options: Options) -> int:
    """Lowers a graph in place; returns the number of rewritten nodes."""
    model = to_model(graph)
    lowered, count = lower(model, version, options.missing_ops)
    if lowered is not model:
        _replace(graph, lowered)
    return count


def upgrade(graph: gs.Graph, version: int) -> None:
    """Converts a graph to a newer opset, in place; nodes and tensors keep their names. Raises ModelError if an operator
    has no conversion."""
    model = to_model(graph)
    if model.functions:  # the converter would drop them
        model = onnx.inliner.inline_local_functions(model)
    try:
        converted = onnx.version_converter.convert_version(model, version)
    except RuntimeError as error:
        raise ModelError(
            f"the model's opset {graph.opset} cannot be upgraded to {version}: {one_line(error)}; export it with opset "
            f"{version} or newer"
        ) from None
    _replace(graph, converted)


def _replace(graph: gs.Graph, model: onnx.ModelProto) -> None:
    refill(graph, model)
    # Conversion turns attributes into Constant nodes; later passes look for constants.
    fold(graph)
    name_nodes(graph)
    graph.cleanup().toposort()
