"""The rows of NVIDIA/TensorRT issue 1114, "quantization error analysis on object detection", on detectors with SiLU.

    python benchmarks/issue1114.py --data DIR [--models NAME ...] [--calib RULE ...] [--num-images 64] [-o OUT]

DIR holds ``models/``, ``coco/val2017``, ``coco/train2017`` and ``coco/annotations/instances_val2017.json``. The issue
scored YOLOv5s on COCO val2017 with TensorRT 7.2.1: mAP 0.362 in floating point, 0.054 in INT8 with Sigmoid and Mul
quantised as layers of their own, 0.316 with SiLU as one layer, 0.332 with the 5 most sensitive convolutions in FP16 as
well. Entropy was TensorRT's usual calibrator for detectors then, so it is the default of ``--calib``.

Each row is a graph with Q/DQ pairs that onnxruntime runs on the CPU: INT8 is simulated, and what an engine would run
in FP16 is computed in float. All rows have the same calibration images, evenly spaced over ``coco/train2017``, and all
but the last the same histograms. Suppression is on the host everywhere.

- SiLU as two layers: as an implicit-quantisation builder without SiLU fusion does, the non-constant inputs and the
  output of every Sigmoid and Mul have a range of their own and are rounded to INT8, besides the convolutions' inputs.
  The first of these rows does so to the Sigmoid and Mul of SiLU only; the second to all that the model was exported
  with, those in the head among them: scores, and in YOLOv5 the decoding of boxes. The issue does not say how much of
  the head its engine quantised.
- SiLU whole: only convolutions' inputs and residual sums read INT8.
- the 5 most sensitive convolutions in FP16: their activation and weight pairs go, other INT8 readers of the same
  tensor keep theirs. A convolution's sensitivity is the error at the head (see ``head_error``) of the model with that
  convolution alone in INT8, over 16 of the calibration images; the scored images have no part in the choice.
- trtdet: ``trtdet.build`` with its defaults.

Prints Markdown: every score with its difference to FP32 and the 90 % interval of a paired bootstrap over the images,
then the convolutions that were left in FP16. OUT keeps the graphs, the sensitivities and the bundles.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from coco_models import scored
from numpy.typing import NDArray

import trtdet
from trtdet.backends import OnnxRunner
from trtdet.calibration import RULES, Collection, CollectionRequest, Ranges, collect, collection_key, expose
from trtdet.data import ImageStream, content_hash, evenly, find_images
from trtdet.errors import ModelError
from trtdet.evaluation.scoring import Evaluation
from trtdet.passes import Options, load_model, rewrite, save_model
from trtdet.quantization import Entry, PrecisionPlan, QdqPlacement, insert_qdq, lint, place
from trtdet.runtime.detector import Detector

MODELS = {"yolov5n": "yolov5", "yolox_nano": "yolox"}
LEFT_IN_FLOAT = 5
SENSITIVITY_IMAGES = 16


def progress(stage: str, done: int, total: int) -> None:
    if done == total:
        print(f"{stage}: {done}", file=sys.stderr)


def is_silu(node: gs.Node) -> bool:
    """Whether a Sigmoid or a Mul is half of x * sigmoid(x)."""
    if node.op == "Sigmoid":
        return any(reader.op == "Mul" and is_silu(reader) for reader in node.outputs[0].outputs)
    producers = [tensor.inputs[0] for tensor in node.inputs if tensor.inputs]
    return any(producer.op == "Sigmoid" and producer.inputs[0] in node.inputs for producer in producers)


def layer_by_layer(model: onnx.ModelProto, silu_only: bool) -> QdqPlacement:
    """The placement of convolutions, and around every Sigmoid and Mul as if each were a layer with INT8 in and out."""
    placement = place(model)
    # A dict for a set that keeps its order.
    readers = {name: dict.fromkeys(found) for name, found in placement.readers.items()}
    for node in gs.import_onnx(model).nodes:
        # What trtdet's own passes decode with was not in the export.
        if node.op not in ("Sigmoid", "Mul") or node.name.startswith("trtdet/") or (silu_only and not is_silu(node)):
            continue
        for position, tensor in enumerate(node.inputs):
            if isinstance(tensor, gs.Variable):
                readers.setdefault(tensor.name, {})[node.name, position] = None
        (output,) = node.outputs
        for reader in output.outputs:
            for position, tensor in enumerate(reader.inputs):
                if tensor is output:
                    readers.setdefault(output.name, {})[reader.name, position] = None
    return QdqPlacement(placement.plan, tuple(readers), {name: tuple(found) for name, found in readers.items()})


def with_float(placement: QdqPlacement, convs: Sequence[str]) -> QdqPlacement:
    """The placement without these convolutions; a residual sum reads INT8 only where a convolution still does."""
    entries = {
        name: Entry("fp16", "sensitive") if name in convs else entry for name, entry in placement.plan.entries.items()
    }
    plan = PrecisionPlan(entries)
    int8 = set(plan.names("int8"))
    readers = {
        name: tuple(pair for pair in found if pair[0] not in convs)
        for name, found in placement.readers.items()
        if any(reader in int8 for reader, _ in found)
    }
    return QdqPlacement(plan, tuple(readers), readers)


def alone(placement: QdqPlacement, conv: str) -> QdqPlacement:
    """Only this convolution in INT8, and no residual sum."""
    source = next(name for name, found in placement.readers.items() if (conv, 0) in found)
    return QdqPlacement(PrecisionPlan({conv: Entry("int8", "alone")}), (source,), {source: ((conv, 0),)}, ())


def quantized(model: onnx.ModelProto, placement: QdqPlacement, ranges: Ranges) -> onnx.ModelProto:
    explicit = insert_qdq(model, placement, ranges)
    findings = lint(explicit)
    if findings:
        raise ModelError(f"{len(findings)} convolutions are INT8 on one side only, the first: {findings[0]}")
    return explicit


Decoded = tuple[NDArray[np.float32], NDArray[np.float32]]
"""Boxes float32 (N, 4), x1 y1 x2 y2, and scores float32 (N, C)."""


def overlap(first: NDArray[np.float32], second: NDArray[np.float32]) -> NDArray[np.float32]:
    """IoU of each box with the box in the same row, float32 (N,)."""
    sides = np.minimum(first[:, 2:], second[:, 2:]) - np.maximum(first[:, :2], second[:, :2])
    shared = np.maximum(sides, 0).prod(axis=1)
    areas = [np.maximum(boxes[:, 2:] - boxes[:, :2], 0).prod(axis=1) for boxes in (first, second)]
    iou: NDArray[np.float32] = shared / np.maximum(areas[0] + areas[1] - shared, np.finfo(np.float32).tiny)
    return iou


def head_error(got: Sequence[Decoded], wanted: Sequence[Decoded]) -> float:
    """What quantisation does to the decoded boxes and scores, before suppression; 0 where it does nothing.

    With s the float scores and s' the others, over all images, boxes and classes ``sum (s' - s)^2 / sum s^2``; added to
    it the boxes' ``sum w (1 - IoU) / sum w``, where w is the square of the box's highest float score. Both are shares,
    and in both the squares keep the many boxes of the background from outweighing the few on objects, while a score
    that appears out of nothing still counts.
    """
    scores = boxes = power = weights = 0.0
    for (new_boxes, new_scores), (old_boxes, old_scores) in zip(got, wanted, strict=True):
        scores += float(np.square(new_scores - old_scores).sum(dtype=np.float64))
        power += float(np.square(old_scores).sum(dtype=np.float64))
        weight = np.square(old_scores.max(axis=1)).astype(np.float64)
        boxes += float(weight @ (1 - overlap(new_boxes, old_boxes)))
        weights += float(weight.sum())
    return scores / power + boxes / weights


def decoded(model: onnx.ModelProto, images: Sequence[NDArray[np.float32]]) -> list[Decoded]:
    runner = OnnxRunner(model)
    found = [runner(image) for image in images]
    return [(outputs["boxes"][0], outputs["scores"][0]) for outputs in found]


def sensitivities(
    model: onnx.ModelProto, ranges: Ranges, images: Sequence[NDArray[np.float32]], stage: str
) -> dict[str, float]:
    """Every INT8 convolution with the error at the head of it alone in INT8, the largest first."""
    placement = place(model)
    wanted = decoded(model, images)
    found: dict[str, float] = {}
    convs = placement.plan.names("int8")
    for name in convs:
        found[name] = head_error(decoded(quantized(model, alone(placement, name), ranges), images), wanted)
        progress(f"sensitivity {stage}", len(found), len(convs))
    return dict(sorted(found.items(), key=lambda item: -item[1]))


@dataclass(frozen=True)
class Job:
    """One model, its images and where what is made of it goes."""

    name: str
    data: Path
    output: Path
    num_images: int

    @property
    def file(self) -> Path:
        return self.data / "models" / f"{self.name}.onnx"

    @property
    def config(self) -> trtdet.Config:
        return trtdet.load_config(MODELS[self.name])

    def images(self) -> tuple[Path, ...]:
        """Calibration images, chosen as ``trtdet.build`` chooses them."""
        return evenly(find_images(self.data / "coco" / "train2017"), self.num_images)

    def float_model(self) -> onnx.ModelProto:
        return rewrite(load_model(self.file), Options(self.config, batch=1)).model

    def collection(self, model: onnx.ModelProto, tensors: Sequence[str]) -> Collection:
        images, preprocess = self.images(), self.config.input
        exposed = expose(model, tensors)
        runner = OnnxRunner(exposed)
        sha256 = content_hash(images)
        return collect(
            runner,
            CollectionRequest(
                runner.input,
                tensors,
                collection_key(exposed, tensors, sha256, preprocess.model_dump_json()),
                sha256,
            ),
            ImageStream(images, preprocess),
            lambda done: progress(f"calibrating {self.name}", done, len(images)),
        )

    def score(self, label: str, model: onnx.ModelProto) -> Evaluation:
        file = self.output / f"{self.name}-{label}.onnx"
        save_model(model, file)
        config = self.config
        runner = OnnxRunner(model)
        return self.evaluate(Detector.running(runner, config, "host", file))

    def evaluate(self, detector: Detector) -> Evaluation:
        return scored(
            detector, self.data / "coco", lambda done, total: progress(f"scored {detector.file}", done, total)
        )

    def build(self) -> Evaluation:
        """trtdet's own row."""
        calibration = trtdet.CalibrationOptions(images=self.data / "coco" / "train2017", num_images=self.num_images)
        place = self.output / f"{self.name}-trtdet"
        # A bundle that an older trtdet left there would be taken for up to date.
        shutil.rmtree(place, ignore_errors=True)
        options = trtdet.BuildOptions(
            nms=trtdet.NmsOptions(mode="host"),
            backend="onnxruntime",
            calibration=calibration,
            plan=trtdet.PlanOptions(int8_all=True),
        )
        trtdet.build(self.file, self.config, place, options, progress)
        return self.evaluate(Detector.open(place))


def run(job: Job, rules: Sequence[str]) -> list[str]:
    """Prints the rows of one model; what was left in FP16 is given back, a line a rule."""
    model = job.float_model()
    convs = list(place(model).plan.entries)
    reference = job.score("fp32", model)

    def row(label: str, rule: str, got: Evaluation) -> None:
        change = "| | |"
        if got is not reference:
            compared = trtdet.compare(got, reference)
            change = f"| {compared.difference:+.4f} | {compared.low:+.4f} .. {compared.high:+.4f} |"
        print(f"| {job.name} | {label} | {rule} | {got.result.map:.4f} | {got.result.map50:.4f} {change}", flush=True)

    row("FP32", "", reference)
    two_layers = layer_by_layer(model, silu_only=True), layer_by_layer(model, silu_only=False)
    collection = job.collection(model, two_layers[1].activations)
    few = [batch.images for batch in ImageStream(evenly(job.images(), SENSITIVITY_IMAGES), job.config.input)]
    kept: list[str] = []
    for rule in rules:
        ranges = Ranges.choose(collection, rule)
        for label, placement in zip(("SiLU as two layers", "SiLU and head as layers"), two_layers, strict=True):
            file = f"{label.lower().replace(' ', '-')}-{rule}"
            row(label, rule, job.score(file, quantized(model, placement, ranges)))
        whole = place(model)
        row("SiLU whole", rule, job.score(f"silu-whole-{rule}", quantized(model, whole, ranges)))
        errors = sensitivities(model, ranges, few, f"{job.name} {rule}")
        (job.output / f"{job.name}-sensitivity-{rule}.json").write_text(json.dumps(errors, indent=1) + "\n")
        worst = list(errors)[:LEFT_IN_FLOAT]
        explicit = quantized(model, with_float(whole, worst), ranges)
        row(f"SiLU whole, {LEFT_IN_FLOAT} convs in FP16", rule, job.score(f"sensitive-in-fp16-{rule}", explicit))
        listed = ", ".join(f"{name} (no. {convs.index(name) + 1}, error {errors[name]:.4f})" for name in worst)
        kept.append(f"- {job.name}, {rule}, of {len(convs)} convolutions: {listed}")
    row("trtdet", trtdet.CalibrationOptions().rule, job.build())
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--calib", nargs="+", default=["entropy"], choices=list(RULES), metavar="RULE")
    parser.add_argument("--num-images", type=int, default=64)
    parser.add_argument("-o", "--output", type=Path, help="keep graphs, sensitivities and bundles here")
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        output = options.output or Path(folder)
        output.mkdir(parents=True, exist_ok=True)
        print("| model | row | calibrator | mAP | AP50 | difference to FP32 | 90 % interval |")
        print("|---|---|---|---|---|---|---|", flush=True)
        kept = [run(Job(name, options.data, output, options.num_images), options.calib) for name in options.models]
        print("\nThe convolutions left in FP16, by sensitivity:\n")
        print("\n".join(line for lines in kept for line in lines))


if __name__ == "__main__":
    main()
