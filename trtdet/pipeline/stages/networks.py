"""Fifth stage: the plan -> the network that the builder is given, and the ranges beside it where it is float."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import onnx

from trtdet.backends import Capabilities, Implicit, OwnCalibrator
from trtdet.calibration import cache
from trtdet.errors import CalibrationError
from trtdet.pipeline.options import BuildOptions
from trtdet.pipeline.stages.calibrating import Selection
from trtdet.pipeline.stages.correcting import Prepared
from trtdet.pipeline.stages.half_range import HalfParts, Magnitudes, half_parts, within_half
from trtdet.pipeline.stages.planning import Planned, float_plan
from trtdet.pipeline.stages.rewriting import Graph
from trtdet.progress import Progress, silent
from trtdet.quantization import DataFlow, Precision, PrecisionPlan, Requantized, WeightForm, to_half

OLDEST = 8600
"""The TensorRT that a calibration cache is written for where the engine's own library reads none: 8.6.0."""


@dataclass(frozen=True, eq=False)
class Network:
    """What is handed to the builder, and how it came about.

    Attributes:
        activations: the model that is handed over, and how its plugin activations read and write.
        precision: the lowest that the engine may use.
        plan: what each convolution is to run in.
        precisions: by name of the nodes that are to stay out of INT8, for a weakly typed network.
        implicit: the ranges, where the model has no Q/DQ nodes.
        cache: the ranges as a calibration cache.
        prepared: what the plan was made for; None for float networks and given caches.
        planned: ranking and trade-off that the plan was found by.
        form: of the scales of INT8 weights; None where the model has no Q/DQ nodes.
    """

    activations: Requantized
    precision: Precision
    plan: PrecisionPlan
    precisions: Mapping[str, str] = field(default_factory=dict)
    implicit: Implicit | None = None
    cache: str = ""
    prepared: Prepared | None = None
    planned: Planned | None = None
    form: WeightForm | None = None

    @property
    def model(self) -> onnx.ModelProto:
        """With Q/DQ nodes and casts; float where the ranges are handed over beside it."""
        return self.activations.model


def float_network(
    graph: Graph, precision: Precision, selected: Selection = Selection(), progress: Progress = silent
) -> Network:
    """The model in one float precision.

    Args:
        graph: the model.
        precision: ``fp16`` or ``fp32``.
        selected: images that show what FP16 holds; without any nothing is checked.
        progress: told of every image.
    """
    plan = float_plan(graph.placement.plan, precision)
    parts = HalfParts(plan.names("fp16"))
    if precision == "fp16" and selected.paths:
        magnitudes = Magnitudes(graph, selected)
        plan = within_half(graph.model, plan, DataFlow(), magnitudes, progress)
        parts = half_parts(graph.model, plan, DataFlow(), magnitudes)
    half = to_half(graph.model, parts.names, parts.left)
    precisions = graph.quantizable.precisions(plan) if precision == "fp16" else {}
    return Network(Requantized(half), precision, plan, precisions)


def explicit_networks(prepared: Prepared, planned: Planned, caps: Capabilities) -> tuple[Network, ...]:
    """The model with Q/DQ nodes, in each form of weight scales that the backend may be fastest with."""
    return tuple(_explicit_network(prepared, planned, caps, form) for form in prepared.flow.weights)


def _explicit_network(prepared: Prepared, planned: Planned, caps: Capabilities, form: WeightForm) -> Network:
    return Network(
        prepared.explicit(planned.plan, form),
        "int8",
        planned.plan,
        prepared.graph.quantizable.precisions(planned.plan),
        cache=prepared.ranges.to_calibration_cache(caps.cache_version or OLDEST),
        prepared=prepared,
        planned=planned,
        form=form,
    )


def implicit_network(prepared: Prepared, planned: Planned, options: BuildOptions, caps: Capabilities) -> Network:
    """The float model, and its ranges or its calibration images beside it."""
    text = prepared.ranges.to_calibration_cache(caps.cache_version)
    ranges = Implicit("cache", text)
    if options.calibrator == "tensorrt":
        first = prepared.model.graph.input[0].type.tensor_type.shape.dim[0]
        ranges = Implicit(
            cast(OwnCalibrator, options.calibration.rule),
            images=prepared.calibrated.paths,
            preprocess=prepared.config.input,
            batch=first.dim_value if first.HasField("dim_value") else (options.batch or (1, 1, 1))[1],
            percentile=options.calibration.percentile,
        )
    return Network(
        Requantized(prepared.model),
        "int8",
        planned.plan,
        prepared.graph.quantizable.precisions(planned.plan),
        ranges,
        text,
        prepared,
        planned,
    )


def cached_network(graph: Graph, path: Path, caps: Capabilities) -> Network:
    """The float model, and the ranges of a calibration cache that was made elsewhere for the model as it was.

    Raises:
        CalibrationError: the cache cannot be read, or lacks tensors of the model.
    """
    title = f"the calibration cache '{path}'"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise CalibrationError(f"{title} cannot be read: {error}; give another") from None
    given = cache.read(text, title, version=caps.cache_version, algorithm=cache.OURS, skip_unusable=True)
    known = dict.fromkeys(name for model in (graph.model, graph.source) for name in _tensors(model))
    tensors, plan = graph.quantizable.tensors, graph.plan
    scales = cache.matched(given, known, tensors, title)
    text = cache.write({name: scales[name] for name in tensors}, caps.cache_version, cache.OURS)
    precisions = graph.quantizable.precisions(plan)
    return Network(Requantized(graph.model), "int8", plan, precisions, Implicit("cache", text), text)


def _tensors(model: onnx.ModelProto) -> list[str]:
    made = [name for node in model.graph.node for name in node.output]
    return [*(value.name for value in model.graph.input), *made]
