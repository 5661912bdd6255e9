"""batch of B fixed at export -> another batch

Exporters write the batch into the shapes that Reshape, Resize and Expand read. These shapes are rewritten. Then a run
on random images checks that the images of a batch do not affect each other.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from numpy.typing import NDArray

from trtdet.errors import ModelError, one_line
from trtdet.passes.base import Options, PassResult, Writer
from trtdet.passes.clean import fold
from trtdet.passes.model import cpu_session, refill, to_model
from trtdet.passes.plugin_ops import plain
from trtdet.passes.provenance import Origin

_SHAPES = {"Reshape": 1, "Resize": 3, "Expand": 1}  # index of the input that holds the output shape, by operator
_BLOCK = 16  # side of a block of equal colour, in pixels; single-pixel noise looks the same everywhere to a network
_TOLERANCE = 1e-2
"""Allowed change of an image's outputs, relative to its difference from other images: summation order may change."""


def apply(graph: gs.Graph, options: Options) -> PassResult:
    """Changes a fixed batch to ``options.batch``, in place. Raises ModelError if the operators mix the images of a
    batch, or depend on its size."""
    source, config = graph.inputs[0], options.config.input
    fixed, batch = source.shape[0], options.batch
    if batch is None or not isinstance(fixed, int) or fixed == batch:
        return PassResult(0)
    before = to_model(graph.copy())
    source.shape = [batch, *source.shape[1:]]
    # Shape inference may not reach the outputs, whose rank ONNX demands.
    ranks = {tensor.name: len(tensor.shape or ()) for tensor in graph.outputs}
    for tensor in graph.tensors().values():
        if isinstance(tensor, gs.Variable) and tensor is not source:
            rank = ranks.get(tensor.name, 0)
            tensor.shape = [batch, *[None] * (rank - 1)] if rank else None
    write = Writer(graph, "trtdet/batch", Origin.BATCH)
    count = sum(_rewritten(write, node, fixed) for node in list(graph.nodes))
    fold(graph)
    graph.cleanup().toposort()
    after = to_model(graph.copy())
    # Normalised images of coloured blocks, each of another brightness.
    size = batch if isinstance(batch, int) else 2 * fixed + 1
    height, width = source.shape[2:]
    blocks = np.random.default_rng(0).uniform(0, 255, (size, 3, -(-height // _BLOCK), -(-width // _BLOCK)))
    blocks *= np.linspace(0.2, 1, size).reshape(-1, 1, 1, 1)
    pixels = blocks.repeat(_BLOCK, axis=2).repeat(_BLOCK, axis=3)[:, :, :height, :width]
    mean, std = (np.reshape(values, (1, 3, 1, 1)) for values in (config.mean, config.std))
    obstacle = _obstacle(before, after, fixed, images=((pixels * config.scale - mean) / std).astype(np.float32))
    if obstacle:
        raise ModelError(
            f"the model's batch is fixed to {fixed} and cannot be changed: {obstacle}; export it with a dynamic batch "
            "('trtdet export --dynamic-batch') or leave --batch out"
        )
    refill(graph, after)
    return PassResult(count)


def filled(images: NDArray[np.float32], size: int) -> NDArray[np.float32]:
    """A batch with copies of its last image behind it, of at least ``size`` images."""
    missing = max(0, size - len(images))
    return np.concatenate([images, np.repeat(images[-1:], missing, axis=0)]) if missing else images


def _rewritten(write: Writer, node: gs.Node, fixed: int) -> bool:
    """Rewrites the output shape that a node reads, if it starts with the batch."""
    position = _SHAPES.get(node.op)
    if position is None or len(node.inputs) <= position or not isinstance(node.inputs[position], gs.Constant):
        return False
    shape = node.inputs[position].values
    if not len(shape) or shape[0] != fixed or (node.op == "Expand" and fixed == 1) or node.attrs.get("axes"):
        return False
    if node.op == "Reshape" and not node.attrs.get("allowzero"):
        # 0 copies the dimension of the input.
        node.inputs[position] = write.const(np.concatenate([[0], shape[1:]]), np.int64)
    else:
        read = write("Shape", node.inputs[0])
        first = write("Gather", read, write.const([0], np.int64), axis=0)
        node.inputs[position] = write("Concat", first, write.const(shape[1:], np.int64), axis=0)
    return True


def _obstacle(before: onnx.ModelProto, after: onnx.ModelProto, fixed: int, images: NDArray[np.float32]) -> str:
    """How the outputs of the new model differ from those of the old model; empty if they agree."""
    size, name = len(images), after.graph.input[0].name
    try:
        outputs = cpu_session(plain(after)).run(None, {name: images})
    except Exception as error:  # onnxruntime's exceptions have no common base class
        return f"with a batch of {size} {one_line(error)}"
    padded = filled(images, -(-size // fixed) * fixed)
    session = cpu_session(plain(before))
    pieces = [session.run(None, {name: padded[start : start + fixed]}) for start in range(0, size, fixed)]
    for index, output in enumerate(outputs):
        padded_output = np.concatenate([piece[index] for piece in pieces])
        expected = padded_output[: len(output)]
        if output.shape != expected.shape:
            return f"a batch of {size} gives an output of shape {output.shape} where {expected.shape} is expected"
        with np.errstate(invalid="ignore"):  # a difference of infinities is NaN, which exceeds nothing
            between = float(np.abs(padded_output - padded_output[:1]).max(initial=0))
            rounding = 1e-5 * float(np.abs(expected).max(initial=0))
            difference = float(np.abs(output - expected).max(initial=0))
        if difference > max(_TOLERANCE * between, rounding):
            return "an image's outputs depend on the others of its batch"
    return ""
