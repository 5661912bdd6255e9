"""Recall of the proposals of a two-stage detector."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx

from trtdet.backends import OnnxRunner
from trtdet.config import InputConfig
from trtdet.data import CocoDataset, ImageCache, ImageStream
from trtdet.errors import ModelError
from trtdet.evaluation.metrics import CocoMetric
from trtdet.passes.two_stage import BOXES, REAL, up_to_proposals


@dataclass(frozen=True)
class ProposalRecall:
    """Recall of the proposals that enter the second stage, against the annotated boxes of any class.

    Attributes:
        ar100: mean recall over IoU 0.50:0.05:0.95 of the best 100 proposals of each image, 0..1; -1 without boxes.
        ar1000: the same for the best 1000.
        proposals: mean number of proposals per image.
    """

    ar100: float
    ar1000: float
    proposals: float


def proposal_recall(
    model: onnx.ModelProto,
    preprocess: InputConfig,
    dataset: CocoDataset,
    progress: Callable[[int, int], None] = lambda done, total: None,
    cache: ImageCache | None = None,
) -> ProposalRecall:
    """Runs the first stage of a two-stage model on a data set, with onnxruntime without optimisations.

    The model is a result of :func:`trtdet.passes.rewrite`, float or with Q/DQ nodes; it is not changed.

    Raises:
        ModelError: the model's proposals were not found.
        DataError: an image cannot be read.
    """
    part = up_to_proposals(model)
    if part is None:
        raise ModelError("the proposals of the model were not found between its first suppression and its regions")
    runner = OnnxRunner(part).as_written()
    metric, counts = CocoMetric(dataset), list[int]()
    paths = [image.path for image in dataset.images]
    for batch in ImageStream(paths, preprocess, on_bad="raise", cache=cache):
        outputs = runner.feed({runner.input: batch.images})
        boxes = outputs[BOXES][outputs[REAL]] if REAL in outputs else outputs[BOXES]
        # The best come first; only the order of the scores matters.
        scores = -np.arange(len(boxes), dtype=np.float64)
        (index,), (transform,) = batch.indices, batch.transforms
        metric.update(dataset.images[index].id, transform.to_image(boxes), scores, np.zeros(len(boxes), np.int64))
        counts.append(len(boxes))
        progress(len(counts), len(paths))
    best, all_of_them = metric.recall(100, 1000)
    return ProposalRecall(best, all_of_them, sum(counts) / len(counts))
