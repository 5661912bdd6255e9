"""opset < 13 -> opset 13; opset > what the backend reads -> that opset"""

from __future__ import annotations

import onnx
import onnx_graphsurgeon as gs

from trtdet.errors import ConfigError, ModelError, one_line
from trtdet.passes.base import Options, PassResult
from trtdet.passes.clean import fold
from trtdet.passes.lowering import MINIMUM, lower
from trtdet.passes.model import to_graph, to_model
from trtdet.passes.provenance import registry

_SWISH = 24
"""The opset that ONNX's Swish came with."""


def apply(graph: gs.Graph, options: Options) -> PassResult:
    """Upgrades an old model with ONNX's own version converter, and lowers a new one to ``max_opset``, where there is
    one. Operators among ``missing_ops`` that ONNX defines by others are replaced by that definition.

    Raises:
        ModelError: an operator has no conversion; the message names the node.
        ConfigError: ``silu`` writes an operator that ``max_opset`` is too old for.
    """
    upgraded = graph.opset < MINIMUM
    if upgraded:
        upgrade(graph, MINIMUM)
    newest = options.max_opset
    if newest is not None and newest < _SWISH and options.silu == "swish":
        raise ConfigError(
            f"--silu swish writes ONNX's Swish of opset {_SWISH}, the backend reads opsets up to {newest}; choose "
            "--silu keep"
        )
    if newest is None and not options.missing_ops:
        return PassResult(int(upgraded))
    model = to_model(graph)
    lowered, count = lower(model, graph.opset if newest is None else newest, options.missing_ops)
    if lowered is not model:
        _replace(graph, lowered)
    return PassResult(upgraded + count)


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
    _replace(graph, converted)


def _replace(graph: gs.Graph, model: onnx.ModelProto) -> None:
    """Puts a model's content in the place of a graph's."""
    changed = to_graph(model)
    registry(graph).update(registry(changed))
    for attribute in ("nodes", "inputs", "outputs", "import_domains", "opset", "functions"):
        setattr(graph, attribute, getattr(changed, attribute))
    # Conversion turns attributes into Constant nodes; later passes look for constants.
    fold(graph)
    graph.cleanup().toposort()
