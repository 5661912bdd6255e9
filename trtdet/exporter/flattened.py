"""Raw maps (B, 5 + C, H, W) of a YOLOX head: as outputs of their own, or flattened in a wrong order at a model's end.

Some exporters reshape each map to (H * W, 5 + C) without a transpose first, so that the rows of the output are no
cells, and no rule reads them. The maps before them can be read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from trtdet.config import COCO_CLASSES
from trtdet.passes.protobuf import sizes_of

_MOVES = ("Transpose", "Identity", "Squeeze", "Unsqueeze")


def before_flattening(model: onnx.ModelProto) -> onnx.ModelProto | None:
    """The model with its maps as outputs, if its only output is the maps flattened without a transpose; else None."""
    if len(model.graph.output) != 1:
        return None
    inferred = onnx.shape_inference.infer_shapes(model).graph
    shapes = {value.name: sizes_of(value) for value in inferred.value_info}
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    makers = {name: node for node in model.graph.node for name in node.output}
    node = makers.get(model.graph.output[0].name)
    while node is not None and node.op_type in _MOVES:
        node = makers.get(node.input[0])
    if node is None or node.op_type != "Concat":
        return None
    maps: list[str] = []
    for name in node.input:
        part = makers.get(name)
        if part is None or part.op_type != "Reshape" or part.input[1] not in constants:
            return None
        shape = shapes.get(part.input[0], ())
        target = [int(size) for size in numpy_helper.to_array(constants[part.input[1]]) if size != 1]
        if len(shape) != 4 or 0 in shape[1:] or shape[1] == shape[2] * shape[3]:
            return None
        if target not in ([shape[2] * shape[3], shape[1]], [-1, shape[1]]):
            return None
        maps.append(part.input[0])
    whole = onnx.ModelProto()
    whole.CopyFrom(model)
    del whole.graph.output[:]
    whole.graph.output.extend(
        helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shapes[name]) for name in maps
    )
    return whole


def map_heads(
    outputs: Mapping[str, NDArray[Any]], size: tuple[int, int], strides: Sequence[int], class_count: int | None
) -> Iterator[tuple[str, dict[str, Any], int]]:
    """The head of raw YOLOX maps with these strides: its family, its keys and its number of classes.

    Without names in the model, only COCO's 80 classes are taken: the channels of other heads could be any number.
    """
    arrays = list(outputs.values())
    if len(arrays) != len(strides) or any(array.ndim != 4 for array in arrays):
        return
    count = arrays[0].shape[1] - 5
    if count != (class_count or len(COCO_CLASSES)):
        return
    numbers = []
    for stride in strides:
        expected = (count + 5, -(-size[0] // stride), -(-size[1] // stride))
        numbers += [number for number, array in enumerate(arrays) if array.shape[1:] == expected]
    if len(numbers) != len(strides):
        return
    scores = np.concatenate([array[:, 4:].ravel() for array in arrays])
    applied = scores.min() >= -1e-6 and scores.max() <= 1 + 1e-5
    product = "rows[..., 4:5] * rows[..., 5:]" if applied else "sigmoid(rows[..., 4:5]) * sigmoid(rows[..., 5:])"
    flat = ", ".join(f"reshape(output{number}, 0, 0, -1)" for number in numbers)
    compute = {
        "rows": f"transpose(concat({flat}), 0, 2, 1)",
        "centre": "points(0) + rows[..., :2] * strides()",
        "sides": "exp(rows[..., 2:4]) * strides()",
        "boxes": "concat(centre, sides)",
        "scores": product,
    }
    yield "yolox", {"decode": "boxes", "boxes": "cxcywh", "strides": tuple(strides), "compute": compute}, count
