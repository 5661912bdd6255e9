"""Detections that are scored, and models, as the tests of this folder make them."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnx.parser

from trtdet.backends import RunInfo
from trtdet.config import NmsConfig
from trtdet.data import CocoDataset
from trtdet.evaluation.metrics import CocoMetric
from trtdet.evaluation.scoring import Evaluation


def written(text: str, **constants: Any) -> onnx.ModelProto:
    """A model of opset 13 with these constants, each node named after its first output."""
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 13]>\nnet {text}')
    for name, value in constants.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(value), name))
    for node in model.graph.node:
        node.name = node.output[0]
    return model


def collected(dataset: CocoDataset, found: Mapping[int, Any], engine: Any = "auto") -> CocoMetric:
    metric = CocoMetric(dataset, engine)
    for image, detections in found.items():
        metric.update(image, *detections)
    return metric


def evaluation(metric: CocoMetric, file: str = "model.onnx", thresholds: NmsConfig = NmsConfig()) -> Evaluation:
    run_info = RunInfo("CPU", "onnxruntime")
    return Evaluation(
        metric.compute(),
        metric,
        ms_per_image=1.0,
        file=file,
        run_info=run_info,
        nms="host",
        thresholds=thresholds,
        masks=metric.compute_masks(),
        keypoints=metric.compute_keypoints(),
        rotated_boxes=metric.compute_rotated_boxes(),
    )


def near_truth(dataset: CocoDataset, image: int, rng: np.random.Generator, noise: float, stray: int) -> Any:
    """float64 (N, 4), x1 y1 x2 y2: boxes near an image's annotated boxes, which come first, and boxes at random."""
    truth = dataset.truth
    boxes = truth.boxes[truth.image_ids == image]
    near = np.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], axis=1)
    found = np.concatenate([near + rng.normal(0, noise, near.shape), rng.uniform(0, 200, (stray, 4))])
    found[:, 2:] = np.maximum(found[:, 2:], found[:, :2] + 1)
    return found
