"""x[image, kept] -> x: keypoints that an exporter computes of the kept rows alone are computed of all rows, so that
another suppression can carry them.

MMDeploy writes RTMO and YOLOX-Pose of MMPose so (``predict`` in mmdeploy/codebase/mmpose/models/heads/rtmo_head.py and
yolox_pose_head.py): its suppression gives the indices of the kept rows (B, K), by which boxes, scores and all that
keypoints are decoded from are picked: ``Reshape(Reshape(Gather(Flatten(x), image * N + kept)))``. For TensorRT, boxes,
scores and keypoints have one more row of zeros, which stands where fewer rows are kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import onnx_graphsurgeon as gs

from trtdet.passes.base import Writer
from trtdet.passes.provenance import Origin
from trtdet.passes.walk import depends, downstream, maker, redirect, upstream

DETECTIONS, KEYPOINTS = "dets", "keypoints"
"""Names of the outputs (B, K, 5), boxes with scores, and (B, K, P, 3), keypoints with scores."""


def read_all_keypoints(graph: gs.Graph, suppression: gs.Node) -> gs.Tensor | None:
    """Makes the outputs of MMDeploy's pose detectors those of all rows, in place.

    Returns:
        The keypoints of all rows (B, N, P, 3): x and y in pixels of the input, and a score 0..1. None if the model is
        of another form; then nothing is changed.
    """
    if {tensor.name for tensor in graph.outputs} != {DETECTIONS, KEYPOINTS}:
        return None
    picks = [node for node in upstream(*graph.outputs, reads=_data) if _picks_kept(node, suppression)]
    pairs = [pair for node in picks if (pair := _unpicked(node)) is not None]
    if not picks or len(pairs) < len(picks):
        return None
    write = Writer(graph, "trtdet/kept", Origin.EMBEDDED_NMS)
    for picked, whole in pairs:
        # Points of a grid are the same for all images.
        constant = isinstance(whole, gs.Constant)
        redirect(graph, picked, write("Identity", write.const(whole.values[None], whole.dtype)) if constant else whole)
    tensors = [*suppression.inputs[:2], *(whole for _, whole in pairs)]
    for node in [node for tensor in tensors for node in _paddings(tensor)]:
        redirect(graph, node.outputs[0], node.inputs[0])
        tensors.append(node.inputs[0])
    for node in downstream([reader for tensor in tensors for reader in tensor.outputs]):
        for tensor in node.outputs:
            tensor.shape = None  # of the kept or padded rows
    return next(tensor for tensor in graph.outputs if tensor.name == KEYPOINTS)


def _data(node: gs.Node) -> Iterable[gs.Tensor]:
    """What a node computes with, without indices and shapes."""
    inputs: list[gs.Tensor] = list(node.inputs)
    return inputs[:1] if node.op in ("Gather", "Reshape", "Expand") else inputs


def _picks_kept(node: gs.Node, suppression: gs.Node) -> bool:
    """Whether a node picks rows of something, which does not depend on the suppression, by what was kept."""
    kept = list(suppression.outputs)
    if node.op != "Gather" or isinstance(node.inputs[1], gs.Constant):
        return False
    by_kept = any(depends(node.inputs[1], tensor) for tensor in kept)
    return by_kept and not any(depends(node.inputs[0], tensor) for tensor in kept)


def _unpicked(node: gs.Node) -> tuple[gs.Variable, gs.Tensor] | None:
    """The picked rows (B, K, ...) and what they are picked of: (B, N, ...), or a constant (N, ...); None if they are
    picked in another way."""
    if node.attrs.get("axis", 0):
        return None
    flat, result = maker(node.inputs[0], "Flatten"), node.outputs[0]
    if flat is None:
        return (result, node.inputs[0]) if isinstance(node.inputs[0], gs.Constant) else None
    for _ in range(2):
        readers = result.outputs
        if len(readers) != 1 or readers[0].op != "Reshape":
            return None
        result = readers[0].outputs[0]
    return (result, flat.inputs[0]) if flat.attrs.get("axis", 1) == 2 else None


def _paddings(tensor: gs.Tensor) -> Iterator[gs.Node]:
    """The nodes that put a row of zeros behind all rows of a tensor, or of those that it joins column by column."""
    node = maker(tensor, "Unsqueeze", "Concat")
    if node is None:
        return
    if node.op == "Concat" and node.attrs["axis"] == 1:
        last = node.inputs[-1]
        zeros = np.any(last.values) == 0 if isinstance(last, gs.Constant) else maker(last, "ConstantOfShape")
        if len(node.inputs) == 2 and zeros:
            yield node
    elif node.op == "Unsqueeze" or node.attrs["axis"] in (2, -1):
        for source in node.inputs:
            yield from _paddings(source)
