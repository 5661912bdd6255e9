"""Two-stage graphs in which no shape depends on the image, for builders without NonZero or RoiAlign.

Nothing is filtered. Every chosen anchor enters the suppression of proposals. Every class of every proposal is a row of
detections; rows that the model filters out get a score below every threshold. Plain operators suppress the proposals;
the pass ``nms`` suppresses the detections, with the model's thresholds.
"""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs

from trtdet.config import Config
from trtdet.errors import ModelError
from trtdet.passes.base import Options, PassResult, Writer, rewrite_nodes
from trtdet.passes.clean import fold
from trtdet.passes.model import to_graph, to_model
from trtdet.passes.nms import greedy
from trtdet.passes.provenance import Origin
from trtdet.passes.two_stage import detections, levels
from trtdet.passes.two_stage.detections import Outputs
from trtdet.passes.two_stage.proposals import REAL
from trtdet.passes.two_stage.suppressions import LOWEST, Limit, in_order, limit_of
from trtdet.passes.walk import above, constant, maker, picks, redirect, unpick, upstream


def rewrite(graph: gs.Graph, options: Options) -> tuple[gs.Graph, Config, dict[str, PassResult]]:
    """A two-stage graph with rows of all detections, the configuration with thresholds to suppress them, and results.

    The guards of ``graph`` must be inlined. Masks need a suppression in the graph. Raises ModelError if the patterns
    are not torchvision's, or the outputs are not those of one image.
    """
    config = options.config
    best = detections.outputs(graph, config)
    names = [tensor.name for tensor in (best.boxes, best.labels, best.scores)]
    results = {"suppress_proposals": suppress_proposals(graph, config)}
    graph = _folded(graph)
    results["merge_levels"] = levels.merge(graph, static=True)
    graph = _folded(graph)
    if "RoiAlign" in options.missing_ops:
        results["sample_regions"] = sample_regions(graph)
        graph = _folded(graph)
    tensors = graph.tensors()
    boxes, labels, scores = (tensors[name] for name in names)
    every, config = all_detections(graph, Outputs(boxes, labels=labels, scores=scores, most=0), config)
    if options.nms == "host":
        needed = "where no shape may depend on the image, masks need the suppression in the graph"
        reason = f"left out: {needed}; a build has it there with any --nms but host"
        results["cut_masks"] = detections.leave_out_masks(graph, reason)
    else:
        # Placeholders, the first box and label repeated: kept detections replace them later.
        write, room = Writer(graph, "trtdet/mask_rows", Origin.DECODE), config.nms.max_detections
        start, stop = (write.const([at], np.int64) for at in (0, 1))
        box, label = (write("Slice", tensor, start, stop, start) for tensor in (every.boxes, every.labels))
        wide = write("Expand", box, write.const([room, 4], np.int64))
        rows = (wide, write("Expand", label, write.const([room], np.int64)))
        best = Outputs(boxes, labels=labels, scores=scores, most=room)
        results["cut_masks"] = detections.cut_masks(graph, best, rows, config=config)
    detections.write(graph, every, config)
    return graph, config, results


def _folded(graph: gs.Graph) -> gs.Graph:
    for _ in range(2):
        fold(graph)
        graph = to_graph(to_model(graph.cleanup().toposort()))
    return graph


def suppress_proposals(graph: gs.Graph, config: Config) -> PassResult:
    """Suppresses proposals among all chosen anchors, in place; their number is always the maximum. Raises ModelError if
    the number of anchors, the limit or the IoU threshold is computed."""
    node, limit, overlap = _suppression(graph, 2)
    write = Writer(graph, "trtdet/proposals", Origin.LOWERING)
    allowed, anchors = _unfiltered(graph, node, write)
    corners = write("Reshape", node.inputs[0], write.const([1, anchors, 4], np.int64))
    scores = write("Reshape", node.inputs[1], write.const([1, anchors], np.int64))
    lowest = write.const(LOWEST, np.float32)
    scores = write("Where", allowed, scores, lowest)
    agnostic = config.with_nms(iou_threshold=overlap, class_agnostic=True)
    kept = greedy(write, corners, scores, count=anchors, config=agnostic)
    ranked = write("Where", kept, scores, lowest)
    shape = write.const([min(limit.count, anchors)], np.int64)
    best, index = write.many("TopK", 2, ranked, shape, axis=1)
    real = write("Reshape", write("Greater", best, lowest), shape)
    real.name = REAL
    chosen = write("Reshape", index, shape)
    for tensor in {id(tensor): tensor for tensor in (limit.kept, limit.indices)}.values():
        redirect(graph, tensor, chosen)
    # Suppressed proposals are aligned too; their scores exclude them later.
    graph.outputs.append(real)
    real.dtype = bool
    graph.cleanup().toposort()
    return PassResult(1)


def all_detections(graph: gs.Graph, best: Outputs, config: Config) -> tuple[Outputs, Config]:
    """Boxes, labels and scores of every class of every proposal before suppression; changes ``graph`` in place.

    The proposals must be static. ``best`` holds the outputs that are selected from all detections. Excluded rows get
    score -1. The returned configuration has the model's own thresholds. Raises ModelError if ``best`` is not gathered
    from all detections.
    """
    node, limit, overlap = _suppression(graph, 1)
    write = Writer(graph, "trtdet/all", Origin.DECODE)
    # Score threshold of a filter before the suppression; 0 without a filter.
    filters = [source for tensor in node.inputs[:2] for source in upstream(tensor) if source.op == "NonZero"]
    tests = [maker(source.inputs[0], "Greater", "GreaterOrEqual") for source in filters]
    floors = [constant(test, 1) for test in tests if test is not None]
    threshold = next((float(floor) for floor in floors if floor is not None and 0 < floor < 1), 0.0)
    allowed, count = _unfiltered(graph, node, write)
    sources = []
    for tensor in (best.boxes, best.labels, best.scores):
        gather = maker(above(tensor, "Cast", "Identity"), "Gather", "GatherND")
        if gather is None:
            raise ModelError(f"output '{tensor.name}' of the two-stage model is not gathered behind its suppression")
        sources.append(gather.inputs[0])
    boxes, labels, scores = sources
    real = next(tensor for tensor in graph.outputs if tensor.name == REAL)
    proposals = int(real.shape[0])
    column = write("Reshape", real, write.const([proposals, 1], np.int64))
    wide = write("Expand", column, write.const([proposals, count // proposals], np.int64))
    valid = write("And", allowed, write("Reshape", wide, write.const([count], np.int64)))
    scores = write("Where", valid, scores, write.const(-1.0, np.float32))
    # The configuration can only exclude more than the model does.
    own = {"iou_threshold": overlap, "class_agnostic": False, "candidates": "all-classes"}
    own["max_detections"] = min(limit.count, config.nms.max_detections)
    own["score_threshold"] = max(threshold, config.nms.score_threshold)
    return Outputs(boxes, labels=labels, scores=scores, most=count, exact=True), config.with_nms(**own)


def sample_regions(graph: gs.Graph) -> PassResult:
    """RoiAlign -> GridSample, AveragePool, in place, for graphs of one image.

    GridSample with aligned corners and a repeated border samples like RoiAlign inside the image, and regions are
    clipped to the image. Coordinates are normalised to the feature size and back, so the last bits differ.
    """
    return rewrite_nodes(graph, _sample, "RoiAlign")


def _sample(graph: gs.Graph, node: gs.Node) -> str:
    features, regions = node.inputs[:2]
    ratio, scale = int(node.attrs.get("sampling_ratio", 0)), float(node.attrs.get("spatial_scale", 1.0))
    if graph.opset < 16:
        return f"opset {graph.opset} has no GridSample; export the model at opset 16 or later"
    if node.attrs.get("mode", "avg") != "avg":
        return "it takes the maximum of its samples"
    if ratio < 1:
        return "the number of its samples depends on the region; export it with a sampling ratio"
    shape = features.shape
    if shape is None or not all(isinstance(size, int) for size in shape) or shape[0] != 1:
        return f"its features have shape {shape}, and one image of a fixed size is needed"
    write = Writer(graph, f"{node.name}/sampled", Origin.LOWERING)
    half = node.attrs.get("coordinate_transformation_mode", "half_pixel") == "half_pixel"
    _, channels, height, width = shape
    down, across = int(node.attrs.get("output_height", 1)), int(node.attrs.get("output_width", 1))
    corners = write("Mul", regions, write.const(scale, np.float32))
    if half:
        corners = write("Sub", corners, write.const(0.5, np.float32))
    x1, y1, x2, y2 = write.many("Split", 4, corners, write.const([1, 1, 1, 1], np.int64), axis=1)

    def positions(low: gs.Variable, high: gs.Variable, cells: int, size: int) -> gs.Variable:
        """float32 (n, cells * ratio), -1..1."""
        side = write("Sub", high, low)
        if not half:
            side = write("Max", side, write.const(1.0, np.float32))
        steps = write.const(((np.arange(cells * ratio) + 0.5) / (cells * ratio))[None], np.float32)
        at = write("Add", low, write("Mul", side, steps))
        return write("Sub", write("Mul", at, write.const(2 / max(size - 1, 1), np.float32)), write.const(1, np.float32))

    rows, columns = down * ratio, across * ratio
    x = write("Unsqueeze", positions(x1, x2, across, width), write.const([1], np.int64))
    y = write("Unsqueeze", positions(y1, y2, down, height), write.const([2], np.int64))
    zero = write.const(np.zeros((1, rows, columns)), np.float32)
    pair = [write("Unsqueeze", write("Add", axis, zero), write.const([3], np.int64)) for axis in (x, y)]
    grid = write("Reshape", write("Concat", *pair, axis=3), write.const([1, -1, columns, 2], np.int64))
    mode = "linear" if graph.opset >= 20 else "bilinear"
    samples = write("GridSample", features, grid, mode=mode, padding_mode="border", align_corners=1)
    cells = write("AveragePool", samples, kernel_shape=[ratio, ratio], strides=[ratio, ratio])
    split = write("Reshape", cells, write.const([channels, -1, down, across], np.int64))
    redirect(graph, node.outputs[0], write("Transpose", split, perm=[1, 0, 2, 3]))
    node.outputs.clear()
    return ""


def _suppression(graph: gs.Graph, expected: int) -> tuple[gs.Node, Limit, float]:
    """The first of ``expected`` suppressions, with its limit and IoU threshold."""
    nodes = in_order(graph)
    if len(nodes) != expected:
        raise ModelError(f"the two-stage model has {len(nodes)} NonMaxSuppression where {expected} are expected")
    limit, overlap = limit_of(nodes[0]), constant(nodes[0], 3)
    if isinstance(limit, str):
        raise ModelError(f"'{nodes[0].name}' of the two-stage model has no fixed number of results: {limit}")
    if overlap is None:
        raise ModelError(f"the overlap of '{nodes[0].name}' is computed; export the model with a constant")
    return nodes[0], limit, float(overlap)


def _unfiltered(graph: gs.Graph, node: gs.Node, write: Writer) -> tuple[gs.Variable, int]:
    """Removes filters before a suppression, in place; returns bool (n,), the boxes that pass all of them, and n."""
    conditions: list[gs.Variable] = []
    removed: gs.Node | None = None
    while filters := [each for tensor in node.inputs[:2] for each in upstream(tensor) if each.op == "NonZero"]:
        if removed is not None and any(each is removed for each in filters):
            raise ModelError(f"what '{removed.name}' of the two-stage model selects is used in another way")
        removed = filters[0]
        condition = removed.inputs[0]
        unpick(graph, picks(removed.outputs[0]))
        if all(condition is not other for other in conditions):
            conditions.append(condition)
    shapes = [list(condition.shape or ()) for condition in conditions]
    size = next((shape[0] for shape in shapes if len(shape) == 1 and isinstance(shape[0], int)), None)
    if size is None:
        raise ModelError(f"the number of boxes before '{node.name}' of the two-stage model is not fixed")
    allowed = conditions[0]
    for condition in conditions[1:]:
        allowed = write("And", allowed, condition)
    return allowed, size
