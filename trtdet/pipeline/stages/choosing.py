"""What the integer program chooses between: an error and a cost for every convolution that INT8 can run in."""

from __future__ import annotations

import math

import numpy as np
import onnx

from trtdet.audit.neighbours import Costs, Joint
from trtdet.mixed_precision.program import Choice, Problem
from trtdet.mixed_precision.scores import Sensitivity
from trtdet.pipeline.stages.correcting import Prepared
from trtdet.quantization import PrecisionPlan
from trtdet.quantization.macs import multiply_adds

UNSEEN = 1e-6
"""The share of the largest error that every convolution in INT8 has at least: alone some show none, and lose detections
with others. The least error is that of all in FP16."""

_BYTES = {"int8": 1, "fp16": 2, "fp32": 4}


def problem_of(prepared: Prepared, costs: Costs | None, ranking: Sensitivity | None) -> Problem:
    """The choices of the convolutions that are in INT8, each to stay there or to be in FP16.

    Args:
        prepared: the model; its plan says what is in INT8.
        costs: of every plan; None counts multiply-adds in millions, those in FP16 twice.
        ranking: the errors; None for a problem without.
    """
    names = prepared.plan.names("int8")
    scores = {layer.name: layer.score for layer in ranking.layers} if ranking is not None else {}
    least = UNSEEN * max(scores.values(), default=0.0) or UNSEEN
    errors = {name: max(scores[name], least) if ranking is not None else 0.0 for name in names}
    macs = {} if costs is not None else multiply_adds(prepared.model)
    own = {name: macs[name].count / 1e6 if macs else 0.0 for name in names}
    choices = {
        name: (Choice("int8", errors[name], cost=own[name]), Choice("fp16", 0.0, True, 2 * own[name])) for name in names
    }
    return Problem(choices) if costs is None else Problem(choices, costs.joints, costs.fixed)


def weight_counts(model: onnx.ModelProto) -> dict[str, int]:
    """How many weights each convolution of a float model has; those that it computes itself count 0."""
    sizes = {tensor.name: math.prod(tensor.dims) for tensor in model.graph.initializer}
    convolutions = (node for node in model.graph.node if node.op_type in ("Conv", "ConvTranspose"))
    return {node.name: sizes.get(node.input[1], 0) for node in convolutions}


def weight_bytes(model: onnx.ModelProto, plan: PrecisionPlan) -> int:
    """Bytes of all convolutions' weights in the precisions of a plan, one, two and four each.

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
    return Costs(names, joints, float(fixed))
