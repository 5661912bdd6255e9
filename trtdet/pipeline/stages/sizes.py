"""Bytes of weights: what a plan costs where an engine is to be small."""

from __future__ import annotations

import math

import numpy as np
import onnx

from trtdet.audit.neighbours import Costs, Joint
from trtdet.pipeline.stages.correcting import Prepared
from trtdet.quantization import LAYERS, PrecisionPlan

_BYTES = {"int8": 1, "fp16": 2, "fp32": 4}


def weight_counts(model: onnx.ModelProto) -> dict[str, int]:
    """How many weights each convolution and product of a float model has; those that it computes itself count 0."""
    sizes = {tensor.name: math.prod(tensor.dims) for tensor in model.graph.initializer}
    layers = (node for node in model.graph.node if node.op_type in LAYERS)
    return {node.name: sizes.get(node.input[1], 0) for node in layers}


def weight_bytes(model: onnx.ModelProto, plan: PrecisionPlan) -> int:
    """Bytes of all layers' weights in the precisions of a plan, one, two and four each.

    Args:
        model: float, as the passes leave it.
        plan: of its convolutions.
    """
    counts = weight_counts(model)
    return sum(_BYTES[entry.precision] * counts.get(name, 0) for name, entry in plan.entries.items())


def size_costs(prepared: Prepared) -> Costs:
    """Bytes of weights as a cost: what :func:`weight_bytes` gives of every plan."""
    counts, names = weight_counts(prepared.model), prepared.plan.names("int8")
    joints = tuple(Joint((name,), np.array([1.0, 2.0]) * counts.get(name, 0)) for name in names if counts.get(name))
    fixed = weight_bytes(prepared.model, prepared.plan) - sum(counts.get(name, 0) for name in names)
    return Costs(names, joints, float(fixed), "bytes of weights")
