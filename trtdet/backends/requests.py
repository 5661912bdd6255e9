"""Where a request to a builder is composed: the only place that knows which settings go with which network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx

from trtdet.backends.base import BuildRequest, EngineOptions, Implicit
from trtdet.quantization import Precision


@dataclass(frozen=True)
class Target:
    """What an engine is built for, whatever the network is.

    Attributes:
        sms: compute capabilities; empty for the backend's default.
        batch: (min, opt, max) for a network with a dynamic batch.
        plugins: libraries with the plugins of the network's operators.
        options: further settings of the builder.
    """

    sms: tuple[int, ...] = ()
    batch: tuple[int, int, int] | None = None
    plugins: tuple[Path, ...] = ()
    options: EngineOptions = EngineOptions()


def compose(
    model: onnx.ModelProto,
    precision: Precision,
    precisions: Mapping[str, str],
    target: Target,
    implicit: Implicit | None = None,
) -> BuildRequest:
    """The request for an engine of a network.

    Args:
        model: ONNX; with Q/DQ nodes and casts unless ``implicit`` is given.
        precision: the lowest that the engine may use; in FP32 no node need be kept out of anything.
        precisions: ``fp16`` or ``fp32`` by name of the nodes that stay out of INT8.
        target: what the engine is built for; its batch counts where the network's is dynamic.
        implicit: where the ranges come from when the model has no Q/DQ nodes.
    """
    first = model.graph.input[0].type.tensor_type.shape.dim[0]
    return BuildRequest(
        model,
        target.sms,
        None if first.HasField("dim_value") else target.batch,
        precisions if precision != "fp32" else {},
        target.plugins,
        precision,
        implicit,
        target.options,
    )
