"""Conv(space to depth(x)) -> Conv(x) of a longer stride"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_graphsurgeon as gs
from numpy.typing import NDArray

from trtdet.passes.base import Options, PassResult, rewrite_nodes
from trtdet.passes.model import cpu_session, unchecked
from trtdet.passes.walk import maker, upstream, values_of

_MOVING = ("Concat", "Identity", "Reshape", "Slice", "SpaceToDepth", "Transpose")
"""Operators that only move values; all inputs after the first, but those of Concat, are constants."""
_MOST_CHANNELS = 4
"""Of the image; deeper in a network a longer kernel need not be faster."""
_EXACT = 2**24
"""Most numbers that float32 tells apart."""


def apply(graph: gs.Graph, options: Options) -> PassResult:
    """Gives a convolution that reads blocks of pixels as channels the pixels themselves, and a stride and a kernel that
    are longer by the size of the block.

    The first layer of YOLOX and of YOLOv5 up to 5.0 ("Focus") cuts the image into four by slices with a step of 2. That
    is the same sum of products, without the slices, which read and write the largest tensors of the network. YOLOv5
    6.0 is trained in this form (https://github.com/ultralytics/yolov5/pull/4825). What an operator does is told by the
    pixels' numbers, which it moves, so that its form does not matter: slices in any order, SpaceToDepth, or Reshape and
    Transpose.
    """
    return rewrite_nodes(graph, _join, "Conv")


def _join(graph: gs.Graph, conv: gs.Node) -> str | None:
    """Makes a convolution read the image."""
    moved = conv.inputs[0]
    image = _image(moved)
    if image is None or not isinstance(conv.inputs[1], gs.Constant) or conv.inputs[1].values.ndim != 4:
        return None
    size = _size(image)
    if len(size) != 4 or not size[0] or size[1] > _MOST_CHANNELS or np.prod(_size(moved)) != np.prod(size):
        return None
    if np.prod(size) > _EXACT:
        return "its input is too large to follow its pixels"
    places = _places(_moved(graph, image, moved), size)
    if places is None:
        return None
    block, origins = places
    attributes = {"group": 1, "dilations": [1, 1], "auto_pad": "NOTSET"}
    if any(conv.attrs.get(name, usual) != usual for name, usual in attributes.items()):
        return "the convolution has groups, a dilation or padding that depends on its input"
    weight = conv.inputs[1].values
    longer = np.zeros((len(weight), size[1], weight.shape[2] * block, weight.shape[3] * block), weight.dtype)
    for number, (channel, row, column) in enumerate(origins):
        longer[:, channel, row::block, column::block] += weight[:, number]
    conv.inputs = [image, gs.Constant(f"{conv.name}/stem/weight", longer), *conv.inputs[2:]]
    conv.attrs["kernel_shape"] = list(longer.shape[2:])
    conv.attrs["strides"] = [length * block for length in conv.attrs.get("strides", [1, 1])]
    conv.attrs["pads"] = [length * block for length in conv.attrs.get("pads", [0] * 4)]
    return ""


def _image(moved: gs.Tensor) -> gs.Variable | None:
    """The only tensor whose values a tensor holds, if operators move them to it and none reads them elsewhere."""
    nodes = [node for node in upstream(moved, reads=_values) if node.op in _MOVING]
    sources = {id(operand): operand for node in nodes for operand in _values(node) if maker(operand, *_MOVING) is None}
    indices = (operand for node in nodes for operand in node.inputs[len(_values(node)) :])
    if len(sources) != 1 or len(moved.outputs) != 1 or any(values_of(index) is None for index in indices):
        return None
    (image,) = sources.values()
    return image if isinstance(image, gs.Variable) else None


def _values(node: gs.Node) -> Sequence[gs.Tensor]:
    """The inputs of a node whose values it moves; none if it does something else."""
    if node.op not in _MOVING:
        return ()
    return list(node.inputs) if node.op == "Concat" else node.inputs[:1]


def _size(tensor: gs.Variable) -> list[int]:
    """The size of a tensor, with one for an open batch; [0] if it is not known."""
    batch, *rest = tensor.shape or [None]
    size = [batch if isinstance(batch, int) else 1, *rest]
    return size if tensor.shape and all(isinstance(length, int) for length in size) else [0]


def _moved(graph: gs.Graph, image: gs.Variable, moved: gs.Variable) -> NDArray[np.int64]:
    """The numbers of an image's values, where the operators between ``image`` and ``moved`` put them."""
    size = _size(image)
    part = graph.copy()
    tensors = part.tensors()
    first, last = tensors[image.name], tensors[moved.name]
    first.inputs.clear()
    part.inputs, part.outputs = [first], [last]
    for tensor in part.cleanup().tensors().values():
        if isinstance(tensor, gs.Variable):
            tensor.dtype = tensor.shape = None
    first.dtype = last.dtype = np.dtype(np.float32)
    first.shape = size
    numbers = np.arange(np.prod(size), dtype=np.float32).reshape(size)
    (found,) = cpu_session(unchecked(part)).run(None, {first.name: numbers})
    return np.asarray(found).astype(np.int64)


def _places(numbers: NDArray[np.int64], size: Sequence[int]) -> tuple[int, list[tuple[int, int, int]]] | None:
    """The size of the blocks and, of each channel (blocks, channels, rows, columns), the channel, row and column in the
    block that it shows; None if the channels are no blocks of pixels."""
    batch, channels, height, width = size
    if numbers.ndim != 4 or numbers.shape[0] != batch or numbers.shape[2] < 1 or numbers.shape[3] < 1:
        return None
    block = height // numbers.shape[2]
    if block < 2 or numbers.shape[2:] != (height / block, width / block):
        return None
    origins = []
    for channel, row, column in zip(*np.unravel_index(numbers[0, :, 0, 0], (channels, height, width)), strict=True):
        origins.append((int(channel), int(row), int(column)))
    pixels = np.arange(np.prod(size)).reshape(size)
    if max(max(row, column) for _, row, column in origins) >= block:
        return None
    expected = np.stack([pixels[:, channel, row::block, column::block] for channel, row, column in origins], axis=1)
    return (block, origins) if np.array_equal(numbers, expected) else None
