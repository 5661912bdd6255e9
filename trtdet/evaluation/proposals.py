"""How many of the objects the first stage of a detector finds: the recall of its proposals."""

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
    """The proposals that enter the second stage against the annotated boxes of any class.

    Attributes:
        ar100: mean recall over IoU 0.50:0.05:0.95 of the best 100 proposals of each image, 0..1; -1 without boxes.
        ar1000: the same of the best 1000.
        proposals: mean number of proposals of an image.
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
    """Runs the first stage of a rewritten model over a data set, with onnxruntime, as it is written.

    Args:
        model: a two-stage model as :func:`trtdet.passes.rewrite` leaves it, float or with Q/DQ nodes; not changed.
        progress: called with images done and in all.
        cache: shared by several passes over the same images.

    Raises:
        ModelError: its proposals were not found.
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
        # The best come first; what their scores are makes no difference.
        scores = -np.arange(len(boxes), dtype=np.float64)
        (index,), (transform,) = batch.indices, batch.transforms
        metric.update(dataset.images[index].id, transform.to_image(boxes), scores, np.zeros(len(boxes), np.int64))
        counts.append(len(boxes))
        progress(len(counts), len(paths))
    best, all_of_them = metric.recall(100, 1000)
    return ProposalRecall(best, all_of_them, sum(counts) / len(counts))
