"""boxes (n, 4), labels (n,), scores (n,) -> rows (1, K, 6) of box, score and class

K is the limit of the second suppression. Rows beyond the n that an image has are zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from trtdet.config import Config
from trtdet.errors import ModelError
from trtdet.passes.base import Writer
from trtdet.passes.masks import MASKS
from trtdet.passes.provenance import Origin
from trtdet.passes.two_stage.levels import most_rows
from trtdet.passes.two_stage.walk import upstream


@dataclass(frozen=True)
class Outputs:
    """What a two-stage model finds.

    Attributes:
        boxes: float32 (n, 4), xyxy in pixels of the input.
        labels: int64 (n,).
        scores: float32 (n,).
        most: n at most.
        exact: whether n is always that.
    """

    boxes: gs.Variable
    labels: gs.Variable
    scores: gs.Variable
    most: int
    exact: bool = False


def write(graph: gs.Graph, found: Outputs, config: Config) -> None:
    """Gives a two-stage graph rows of detections as its output, before that of masks, in place.

    Labels count from 1 where the classifier has a column for the background.

    Raises:
        ModelError: the classes of the model are not those of the configuration.
    """
    put = Writer(graph, "trtdet/two_stage", Origin.DECODE)
    columns = [found.boxes]
    for tensor, first in ((found.scores, 0), (found.labels, first_label(found.scores, config))):
        column = put("Cast", tensor, to=int(onnx.TensorProto.FLOAT))
        if first:
            column = put("Sub", column, put.const(first, np.float32))
        columns.append(put("Unsqueeze", column, put.const([1], np.int64)))
    rows = put("Concat", *columns, axis=1)
    if not found.exact:
        padded = put("Concat", rows, put.const(np.zeros((found.most, 6)), np.float32), axis=0)
        rows = put("Slice", padded, *(put.const([at], np.int64) for at in (0, found.most, 0)))
    detections = put("Reshape", rows, put.const([1, found.most, 6], np.int64))
    detections.dtype, detections.shape = np.dtype(np.float32), [1, found.most, 6]
    graph.outputs = [detections, *(tensor for tensor in graph.outputs if tensor.name == MASKS)]
    graph.cleanup().toposort()


def outputs(graph: gs.Graph, config: Config) -> Outputs:
    """The outputs of a two-stage graph, as ``head.outputs`` or their own names say, or in this order.

    Raises:
        ModelError: they are not those of one image, or the number of detections is not bounded.
    """
    names = config.head.outputs
    tensors = {tensor.name: tensor for tensor in graph.outputs}
    if names is not None:
        everything = graph.tensors()
        missing = [name for name in names if name not in everything]
        if missing:
            raise ModelError(f"head.outputs names '{missing[0]}', which the model does not have")
        found = [everything[name] for name in names]
    else:
        found = [tensors[name] for name in ("boxes", "labels", "scores") if name in tensors]
        found = found if len(found) == 3 else list(graph.outputs)
    shapes = [list(tensor.shape or ()) for tensor in found]
    fits = len(found) >= 3 and len(shapes[0]) == 2 and shapes[0][1] == 4 and all(len(s) == 1 for s in shapes[1:3])
    if not fits:
        told = ", ".join(f"{tensor.name} {shape}" for tensor, shape in zip(found, shapes, strict=True))
        raise ModelError(
            f"the outputs of the two-stage model are {told}; expected are boxes (n, 4), labels (n,) and scores (n,) of "
            "one image, in this order; name them with head.outputs"
        )
    most = most_rows(found[0])
    if most is None:
        raise ModelError(
            "the number of detections of the two-stage model is not bounded: nothing limits its last suppression",
            "export it with a limit (torchvision: box_detections_per_img)",
        )
    return Outputs(found[0], found[1], found[2], most)


def first_label(scores: gs.Variable, config: Config) -> int:
    """The label of the first class: 1 where the classifier has a column for the background.

    Raises:
        ModelError: the classes of the model are not those of the configuration.
    """
    classes = len(config.classes)
    for node in upstream(scores):
        if node.op == "Softmax":
            columns = (node.inputs[0].shape or [None])[-1]
            if columns not in (classes, classes + 1):
                raise ModelError(
                    f"the classifier of the two-stage model has {columns} columns, and 'classes' lists {classes}; "
                    f"expected are {classes}, or {classes + 1} with the background"
                )
            return int(columns) - classes
    return 0
