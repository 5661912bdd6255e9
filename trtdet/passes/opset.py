"""opset < 13 -> opset 13"""

from __future__ import annotations

import onnx
import onnx_graphsurgeon as gs

from trtdet.errors import ModelError, one_line
from trtdet.passes.base import Options, PassResult
from trtdet.passes.clean import fold
from trtdet.passes.model import to_graph, to_model

MINIMUM = 13
"""The first opset whose QuantizeLinear and DequantizeLinear have an axis: per-channel weights need it. Written into
an older model the same nodes are invalid (https://onnx.ai/onnx/operators/onnx__DequantizeLinear.html)."""


def apply(graph: gs.Graph, options: Options) -> PassResult:
    """Upgrades an old model with ONNX's own version converter; newer ones keep their opset.

    Raises:
        ModelError: an operator has no conversion.
    """
    if graph.opset >= MINIMUM:
        return PassResult(0)
    upgrade(graph, MINIMUM)
    return PassResult(1)


def upgrade(graph: gs.Graph, version: int) -> None:
    """Converts a graph, in place, to a newer opset.

    Raises:
        ModelError: an operator has no conversion.
    """
    try:
        converted = onnx.version_converter.convert_version(to_model(graph), version)
    except RuntimeError as error:
        raise ModelError(
            f"the model's opset {graph.opset} cannot be upgraded to {version}: {one_line(error)}; export it with opset "
            f"{version} or newer"
        ) from None
    upgraded = to_graph(converted)
    for attribute in ("nodes", "inputs", "outputs", "import_domains", "opset"):
        setattr(graph, attribute, getattr(upgraded, attribute))
    # The converter turns attributes into Constant nodes; later passes look for constants.
    fold(graph)
    graph.cleanup().toposort()
