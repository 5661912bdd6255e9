"""Compares an engine's tensors with onnxruntime's, and finds the first tensor that differs.

The inner tensors of an engine cannot be read, so a second engine is built that has them as outputs. Compared are the
inputs of convolutions before quantisation and the model's outputs, because an engine writes these anyway. Reading a
tensor between a convolution and its activation would change what the builder fuses. Source of the method, the measure
and the comparison: Polygraphy, "Debugging TensorRT Accuracy Issues" (``--trt-outputs mark all``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from trtdet.backends import EngineFacts, OnnxRunner, RunInfo, Runner, choose, obstacle, open_engine
from trtdet.backends.base import EngineTarget, compose
from trtdet.bundle import Bundle
from trtdet.data import ImageStream, evenly, find_images
from trtdet.errors import BackendError, ConfigError
from trtdet.options import EngineOptions
from trtdet.passes import load_model
from trtdet.passes.decode import ALL_BOXES, ALL_SCORES, CONTRACT, PARTS, of_all
from trtdet.progress import Progress, silent
from trtdet.quantization import CONVOLUTIONS, PRODUCTS, PrecisionPlan, quantizable
from trtdet.tables import Column, Table

LIMITS = {"int8": 20.0, "fp16": 35.0, "fp32": 50.0}
"""Lowest accepted signal-to-noise ratio in decibels, by the engine's lowest precision. INT8 needs room: rounding
differs where a value lies between two steps. 20 dB is an error of a tenth of the signal's amplitude."""


@dataclass(frozen=True)
class TensorAgreement:
    """Comparison of one tensor of the ONNX model; ``departs`` means that ``snr`` is below the limit.

    ``snr`` is the signal-to-noise ratio in decibels, the mean over the images; infinite for equal tensors.
    """

    tensor: str
    node: str
    snr: float
    departs: bool


@dataclass(frozen=True)
class LayerAgreement:
    """Comparison of all tensors, in the order of the model; ``limit`` is in decibels."""

    tensors: tuple[TensorAgreement, ...]
    limit: float
    images: int
    run_info: RunInfo

    @property
    def first(self) -> TensorAgreement | None:
        """The first tensor below the limit: the cause is its node, or lies between it and the tensors before."""
        return next((tensor for tensor in self.tensors if tensor.departs), None)

    def __str__(self) -> str:
        first, count = self.first, sum(tensor.departs for tensor in self.tensors)
        against = f"{len(self.tensors)} tensors against onnxruntime, {self.images} images, {self.run_info}"
        if first is None:
            lowest = min(self.tensors, key=lambda tensor: tensor.snr)
            return f"no layer departs: '{lowest.node}' is the farthest with {lowest.snr:.1f} dB ({against})"
        return (
            f"'{first.node}' is the first layer that departs: '{first.tensor}' has {first.snr:.1f} dB, under "
            f"{self.limit:g}; {count} depart in all ({against})"
        )

    def table(self) -> Table:
        rows = [(tensor.node, tensor.tensor, tensor.snr, "x" if tensor.departs else "") for tensor in self.tensors]
        return Table(("layer", "tensor", Column("dB", ".1f", "right"), "departs"), rows)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON; a ratio that is infinite or NaN becomes null."""
        return {
            "limit": self.limit,
            "images": self.images,
            "ran_on": str(self.run_info),
            "first": self.first.node if self.first else None,
            "tensors": [
                asdict(tensor) | {"snr": tensor.snr if np.isfinite(tensor.snr) else None} for tensor in self.tensors
            ],
        }


def compare_layers(
    bundle: Bundle, images: Path, count: int = 4, limit: float | None = None, progress: Progress = silent
) -> LayerAgreement:
    """Builds a bundle's engine again with its inner tensors as outputs and compares them with onnxruntime's.

    ``images`` is a folder or a list of file names, of which ``count`` are run, evenly spaced. ``limit`` is in decibels;
    None takes the limit of the engine's precision from ``LIMITS``. Raises BackendError if the bundle has no engine, or
    it cannot be run here or built with these outputs; ConfigError if the bundle uses implicit quantisation, or there
    are no images.
    """
    manifest = bundle.manifest
    if bundle.engine is None:
        raise BackendError(f"bundle '{bundle.path}' has no engine to compare", "build it with --backend tensorrt")
    if manifest.quantization.mode == "implicit":
        raise ConfigError(
            f"bundle '{bundle.path}' is quantised implicitly: its model is float and cannot tell what INT8 should give",
            "compare a bundle that was built with --quantization explicit",
        )
    facts = EngineFacts.of(bundle)
    if reason := obstacle(facts):
        raise BackendError(f"the engine of bundle '{bundle.path}' cannot be compared here, as {reason}")
    if count < 1:
        raise ConfigError(f"--num-images must be at least 1, got {count}")
    precision = manifest.shipped
    model = load_model(bundle.model, allow_quantized=True)
    watched = watched_tensors(model)
    exposed = with_outputs(model, watched)
    shape, plan = manifest.input.shape, PrecisionPlan.load(bundle.file("plan.json"))
    backend = choose(manifest.backend.name)
    target = EngineTarget(
        facts.sms if backend.capabilities.sms else (),
        batch=(shape.min[0], shape.opt[0], shape.max[0]),
        plugins=tuple(bundle.file(part.file) for part in manifest.backend.plugins),
        options=EngineOptions(workspace=manifest.command["engine"]["workspace"], tf32=manifest.backend.tf32),
    )
    request = compose(exposed, precision, quantizable(model, plan).precisions(plan), target=target)
    built = backend.build(request, progress)
    stream = ImageStream(evenly(find_images(images), count), manifest.input.preprocess, batch_size=1)
    with open_engine(built.engine, facts) as runner:
        batches = (batch.images for batch in stream)
        return agreement(
            runner, OnnxRunner(exposed), watched, batches=batches, limit=limit or LIMITS[precision], progress=progress
        )


def watched_tensors(model: onnx.ModelProto) -> dict[str, str]:
    """The tensors to compare, each with the node that computes it, in the order of the model."""
    makers = {name: node for node in model.graph.node for name in node.output if name}
    outputs = {value.name for value in model.graph.output}
    # Outputs of NMS in the graph are undefined past the number of detections, so the inputs of NMS are compared.
    after_nms = set(CONTRACT) <= outputs
    parts = {of_all(name) if after_nms else name for name in PARTS if name in outputs}
    read = {ALL_BOXES, ALL_SCORES, *parts} if after_nms and outputs <= {*CONTRACT, *PARTS} else outputs
    for node in model.graph.node:
        quantised = node.op_type in PRODUCTS and makers.get(node.input[0], node).op_type == "DequantizeLinear"
        if node.op_type in CONVOLUTIONS or quantised:
            name = node.input[0]
            while name in makers and makers[name].op_type in ("QuantizeLinear", "DequantizeLinear", "Cast"):
                name = makers[name].input[0]
            read.add(name)
    return {name: node.name for name, node in makers.items() if name in read}


def with_outputs(model: onnx.ModelProto, tensors: Mapping[str, str]) -> onnx.ModelProto:
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    declared = {value.name: value for value in (*model.graph.value_info, *model.graph.output)}
    del changed.graph.output[:]
    changed.graph.output.extend(declared.get(name) or onnx.ValueInfoProto(name=name) for name in tensors)
    return changed


def agreement(
    runner: Runner,
    reference: OnnxRunner,
    tensors: Mapping[str, str],
    batches: Iterable[NDArray[np.float32]],
    limit: float,
    progress: Progress = silent,
) -> LayerAgreement:
    """Compares an engine with its ONNX model; ``tensors`` are the outputs of both, each with its node, in order.

    ``batches`` are pre-processed images, float32 (B, 3, H, W); ``limit`` is in decibels. Raises BackendError if
    Polygraphy is not installed; ConfigError if there are no batches.
    """
    try:
        from polygraphy.comparator import Comparator, IterationResult, RunResults, SnrCompareFunc
        from polygraphy.logger import G_LOGGER
    except ImportError as error:
        raise BackendError(
            f"layers are compared by Polygraphy, which is not installed here ({error})", "pip install 'trtdet[trt]'"
        ) from None
    ratios: dict[str, list[float]] = {name: [] for name in tensors}
    images = 0
    for batch in batches:
        results = RunResults()
        for name, run in (("onnxruntime", reference), ("engine", runner)):
            outputs = {key: np.asarray(value, np.float32) for key, value in run(batch).items()}
            results.append((name, [IterationResult(outputs, runner_name=name)]))
        with G_LOGGER.verbosity(G_LOGGER.CRITICAL):
            (compared,) = Comparator.compare_accuracy(results, compare_func=SnrCompareFunc(snr_threshold=limit))
        ((outputs_compared,),) = compared.values()
        for name, ratio in outputs_compared.items():
            ratios[name].append(float(ratio.snr))
        images += len(batch)
        progress("comparing", images, images + 1)
    if not images:
        raise ConfigError("there is no image to compare on", "give a folder of images or a list of file names")
    # The sum makes 0 of -0, which rounding leaves of a ratio just under 1.
    means = {name: round(float(np.mean(values)), 6) + 0.0 for name, values in ratios.items()}
    # If the engine gives NaN, the ratio is NaN and counts as below the limit.
    rows = tuple(
        TensorAgreement(name, node=tensors[name], snr=snr, departs=not snr >= limit) for name, snr in means.items()
    )
    progress("comparing", images, images)
    return LayerAgreement(rows, limit=limit, images=images, run_info=runner.run_info)
