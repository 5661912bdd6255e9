"""boxes, scores -> num_dets, boxes, scores, classes"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from trtdet.config import Config, NmsMode
from trtdet.detection.plugin_nms import EfficientNms
from trtdet.detection.suppression import score_bound
from trtdet.errors import ConfigError, ModelError
from trtdet.passes.base import PLUGIN_DOMAIN, Options, PassResult, Writer
from trtdet.passes.decode import ALL_BOXES, ALL_SCORES, BOXES, CONTRACT, SCORES, Decoded
from trtdet.passes.masks import follow
from trtdet.passes.provenance import Origin

EFFICIENT = "EfficientNMS_TRT"

_LOWEST = float(np.finfo(np.float32).min)
"""Also in FP16, where it becomes minus infinity, it is below every score."""


def apply(graph: gs.Graph, options: Options) -> PassResult:
    """Puts the suppression of :func:`trtdet.detection.suppression.non_max_suppression` into the graph.

    The best ``pre_nms_topk`` candidates are sorted by score; memory is bounded by them, not by the number of boxes.
    There are three modes:

    - ``native`` is written with plain operators that every backend has. With ``S[i, j] = 1`` where the better
      candidate j overlaps i by more than the threshold, greedy suppression is the only fixed point of ``keep = valid
      and not (S @ keep)``: S is strictly lower triangular, so the i-th step settles candidate i, and a Loop that ends
      when nothing changes has found it. It is exact, and takes as many steps as the longest chain of suppressions, not
      as there are candidates. Memory is that of a few (B, K, K) matrices with K = pre_nms_topk.
    - ``onnx`` is a NonMaxSuppression with all five inputs: without the fifth TensorRT drops scores up to 0.
    - ``efficient`` is TensorRT's plugin EfficientNMS_TRT, with the same meaning: it suppresses at the threshold and
      keeps at the threshold, so it gets the next larger float32 of both; boxes that it counts though they have no
      score are subtracted from ``num_dets``. It chooses its candidates itself where ``pre_nms_topk`` is its own 4096.

    Without suppression (``nms: none``) ``native`` and ``onnx`` are the best candidates and no more: a TopK, and nothing
    that the data decide.

    Scores may be logits: they are compared as they are, and the sigmoid is computed for the result alone.

    Raises:
        ConfigError: ``pre_nms_topk`` exceeds the limit of the backend's TopK or of the plugin.
        ModelError: the number of boxes is open.
    """
    if options.nms == "host":
        return PassResult(0)
    config = options.config
    masks = [graph.outputs.pop()] if options.masks else []
    boxes, scores = (next(tensor for tensor in graph.outputs if tensor.name == name) for name in (BOXES, SCORES))
    boxes.name, scores.name = decoded(options.nms, config).names
    pool = _box_count(boxes, scores) * (len(config.classes) if config.nms.candidates == "all-classes" else 1)
    topk = min(config.nms.most_candidates, pool)
    write = Writer(graph, "trtdet/nms", Origin.NMS)
    scores = _without_nan(write, scores, config)
    if options.nms == "efficient":
        _efficient(write, boxes, scores, pool, topk, options)
    else:
        _check_topk(topk, options)
        found = _candidates(write, boxes, scores, topk, config)
        valid = _as_float(write, write("Greater", found.score, write.const(_bound(config), np.float32)))
        if not config.nms.suppresses:
            keep = valid
        elif options.nms == "native":
            suppression = _suppression(write, found, config)
            keep = _fixed_point(write, suppression, valid, [found.batch, topk, 1])
        else:
            keep = _selected(write, found, valid, config)
        graph.outputs = _best(write, found, keep, config)
    if masks:
        graph.outputs += masks
        follow(graph, len(config.classes))
    graph.cleanup().toposort()
    return PassResult(1)


def decoded(nms_mode: NmsMode, config: Config) -> Decoded:
    """The tensors of all decoded boxes and scores, in a model that was rewritten for ``nms_mode``."""
    names = (BOXES, SCORES) if nms_mode == "host" else (ALL_BOXES, ALL_SCORES)
    return Decoded(*names, config.suppresses_logits)


def _bound(config: Config) -> np.float32:
    return score_bound(config.nms.score_threshold, config.suppresses_logits)


def _no_score(config: Config) -> float:
    """A score below every threshold, for a box or a class that is no candidate."""
    return _LOWEST if config.suppresses_logits else -1.0


def _without_nan(write: Writer, scores: gs.Variable, config: Config) -> gs.Variable:
    """The scores with NaN below every other value: neither a sort nor the plugin has a place for it."""
    known = write("Where", write("Equal", scores, scores), scores, write.const(_no_score(config), np.float32))
    known.dtype, known.shape = np.float32, scores.shape
    return known


def _check_topk(topk: int, options: Options) -> None:
    if options.max_topk is not None and topk > options.max_topk:
        raise ConfigError(
            f"key 'nms.pre_nms_topk' is {options.config.nms.pre_nms_topk} but this backend's TopK takes at most "
            f"{options.max_topk}; lower it with --pre-nms-topk {options.max_topk} or choose --nms host"
        )


def _box_count(boxes: gs.Variable, scores: gs.Variable) -> int:
    for tensor in (boxes, scores):
        if tensor.shape is not None and isinstance(tensor.shape[1], int):
            return int(tensor.shape[1])
    raise ModelError(
        "the number of boxes is not fixed in the model, suppression in the graph needs it; export the model with a "
        "fixed input size or choose --nms host"
    )


def _efficient(write: Writer, boxes: gs.Variable, scores: gs.Variable, pool: int, topk: int, options: Options) -> None:
    config, batch = options.config, scores.shape[0]
    if topk > EfficientNms.CANDIDATES:
        raise ConfigError(
            f"key 'nms.pre_nms_topk' is {config.nms.pre_nms_topk} but EfficientNMS takes at most "
            f"{EfficientNms.CANDIDATES} candidates; lower it with --pre-nms-topk {EfficientNms.CANDIDATES} or choose "
            "another --nms"
        )
    empty = write.const(_no_score(config), np.float32)
    if config.nms.candidates == "best-class" or topk < min(pool, EfficientNms.CANDIDATES):
        _check_topk(topk, options)
        found = _candidates(write, boxes, scores, topk, config)
        boxes = found.corners
        scores = _by_class(write, found.score, found.label, len(config.classes), empty, axis=2)
    for tensor in (boxes, scores):
        tensor.dtype = np.float32
    attributes = _attributes(config, exact=options.keep_embedded)
    outputs = write.plugin(EFFICIENT, [boxes, scores], 4, {"plugin_version": "1", **asdict(attributes)})
    if attributes.score_threshold < EfficientNms.DENSE:
        real = write("Greater", outputs[2], write.const(config.nms.score_threshold, np.float32))
        total = write("ReduceSum", _as_float(write, real), write.const([1], np.int64), keepdims=1)
        outputs[0] = write("Cast", total, to=6)
    write.graph.outputs = _named(outputs, batch, config.nms.max_detections)


def _attributes(config: Config, exact: bool) -> EfficientNms:
    """The plugin's attributes; ``exact`` keeps the thresholds, for a node that was in the model."""
    thresholds = np.array([config.nms.score_threshold, config.nms.iou_threshold], np.float32)
    if not exact:
        thresholds = np.nextafter(thresholds, np.float32(np.inf))
    return EfficientNms(
        score_threshold=float(thresholds[0]),
        iou_threshold=float(thresholds[1]),
        max_output_boxes=config.nms.max_detections,
        score_activation=int(config.suppresses_logits),
        class_agnostic=int(config.nms.class_agnostic),
    )


def _by_class(
    write: Writer, score: gs.Variable, label: gs.Variable, classes: int, empty: gs.Tensor, axis: int
) -> gs.Variable:
    """The scores of the candidates (B, K) with an axis of classes put in: each at its class, ``empty`` elsewhere."""
    shape = [1, 1, 1]
    shape[axis] = classes
    at = write.const([axis], np.int64)
    mine = write("Equal", write("Unsqueeze", label, at), write.const(np.arange(classes).reshape(shape), np.int64))
    return write("Where", mine, write("Unsqueeze", score, at), empty)


def _selected(write: Writer, found: _Candidates, valid: gs.Variable, config: Config) -> gs.Variable:
    """float32 (B, K), 1 for each candidate that NonMaxSuppression keeps.

    It takes the corners of a box in any order. Here an inverted box has no area, so its upper corner is moved to the
    lower one; and a box with NaN coordinates becomes a point.
    """
    corners = found.corners
    last = write.const([2], np.int64)
    total = write("ReduceSum", corners, last, keepdims=1)
    real = write("Where", write("Equal", total, total), corners, write.const(0.0, np.float32))
    low, high = write.many("Split", 2, real, write.const([2, 2], np.int64), axis=2)
    upright = write("Concat", low, write("Max", low, high), axis=2)
    empty, row = write.const(_LOWEST, np.float32), write.const([1], np.int64)
    allowed = write("Where", write("Greater", valid, write.const(0.5, np.float32)), found.score, empty)
    if config.nms.class_agnostic:
        scores = write("Unsqueeze", allowed, row)
    else:
        scores = _by_class(write, allowed, found.label, len(config.classes), empty, axis=1)
    limits = (
        write.const([config.nms.max_detections], np.int64),
        write.const([config.nms.iou_threshold], np.float32),
        write.const([_bound(config)], np.float32),
    )
    selected = write("NonMaxSuppression", upright, scores, *limits)
    positions = write("Gather", selected, write.const([0, 2], np.int64), axis=1)
    count = write("Slice", write("Shape", selected), *(write.const([bound], np.int64) for bound in (0, 1, 0)))
    ones = write("Expand", write.const([1.0], np.float32), count)
    return write("ScatterND", write("Mul", valid, write.const(0.0, np.float32)), positions, ones)


def _as_float(write: Writer, tensor: gs.Variable) -> gs.Variable:
    return write("Cast", tensor, to=1)


@dataclass(frozen=True, eq=False)
class _Candidates:
    """The K best candidates of each image, best first.

    Attributes:
        batch: B, a number or the name of an open dimension.
        count: K.
        score: float32 (B, K).
        order: int64 (B, K), smaller for the better of two equal scores.
        label: int64 (B, K), indices of classes.
        corners: float32 (B, K, 4), xyxy in network pixels.
    """

    batch: int | str
    count: int
    score: gs.Variable
    order: gs.Variable
    label: gs.Variable
    corners: gs.Variable


def _candidates(write: Writer, boxes: gs.Variable, scores: gs.Variable, count: int, config: Config) -> _Candidates:
    k = write.const([count], np.int64)
    if config.nms.candidates == "all-classes":
        flat = write("Reshape", scores, write.const([0, -1], np.int64))
        score, order = write.many("TopK", 2, flat, k, axis=1)
        width = write.const(len(config.classes), np.int64)
        box = write("Div", order, width)
        label = write("Sub", order, write("Mul", box, width))
    else:
        best, classes = write.many("TopK", 2, scores, write.const([1], np.int64), axis=2)
        axis = write.const([2], np.int64)
        score, box = write.many("TopK", 2, write("Squeeze", best, axis), k, axis=1)
        order, label = box, write("GatherElements", write("Squeeze", classes, axis), box, axis=1)
    return _Candidates(scores.shape[0], count, score, order, label, _rows(write, boxes, box))


def _rows(write: Writer, table: gs.Variable, index: gs.Variable) -> gs.Variable:
    """Rows of ``table`` (B, N, 4) at ``index`` (B, K), as (B, K, 4)."""
    wide = write("Unsqueeze", index, write.const([2], np.int64))
    return write("GatherElements", table, write("Tile", wide, write.const([1, 1, 4], np.int64)), axis=1)


def _suppression(write: Writer, found: _Candidates, config: Config) -> gs.Variable:
    """float32 (B, K, K), 1 where the better candidate j would suppress i.

    Better is decided by score and then by index, not by position: a constant (K, K) triangle would be stored in the
    engine, nine megabytes of it at K = 3000, and the order would hang on how a backend's TopK treats equal scores.
    """
    column, row = write.const([2], np.int64), write.const([1], np.int64)
    x1, y1, x2, y2 = write.many("Split", 4, found.corners, write.const([1, 1, 1, 1], np.int64), axis=2)
    zero = write.const(0.0, np.float32)

    def across(tensor: gs.Variable) -> gs.Variable:
        return write("Transpose", tensor, perm=[0, 2, 1])

    def clipped(high: gs.Variable, low: gs.Variable) -> gs.Variable:
        return write("Max", write("Sub", high, low), zero)

    area = write("Mul", clipped(x2, x1), clipped(y2, y1))
    width = clipped(write("Min", x2, across(x2)), write("Max", x1, across(x1)))
    height = clipped(write("Min", y2, across(y2)), write("Max", y1, across(y1)))
    shared = write("Mul", width, height)
    union = write("Sub", write("Add", area, across(area)), shared)
    overlaps = write("Greater", write("Div", shared, union), write.const(config.nms.iou_threshold, np.float32))
    if not config.nms.class_agnostic:
        same = write("Equal", write("Unsqueeze", found.label, column), write("Unsqueeze", found.label, row))
        overlaps = write("And", overlaps, same)
    mine, theirs = write("Unsqueeze", found.score, column), write("Unsqueeze", found.score, row)
    earlier = write("Less", write("Unsqueeze", found.order, row), write("Unsqueeze", found.order, column))
    tied = write("And", write("Equal", theirs, mine), earlier)
    better = write("Or", write("Greater", theirs, mine), tied)
    return _as_float(write, write("And", overlaps, better))


def greedy(write: Writer, boxes: gs.Variable, scores: gs.Variable, count: int, config: Config) -> gs.Variable:
    """Greedy suppression in plain operators, of boxes of one class: see ``native`` of :func:`apply`.

    Args:
        write: of the nodes.
        boxes: float32 (1, K, 4), xyxy.
        scores: float32 (1, K), in any order; the lowest float is no candidate.
        count: K.
        config: its ``nms`` has the overlap.

    Returns:
        bool (1, K), whether a box is kept.
    """
    order = write.const(np.arange(count)[None], np.int64)
    found = _Candidates(1, count, scores, order, order, boxes)
    valid = _as_float(write, write("Greater", scores, write.const(_LOWEST, np.float32)))
    suppression = _suppression(write, found, config.with_nms(class_agnostic=True))
    return write("Greater", _fixed_point(write, suppression, valid, [1, count, 1]), write.const(0.5, np.float32))


def _fixed_point(write: Writer, suppression: gs.Variable, valid: gs.Variable, shape: list[int | str]) -> gs.Variable:
    """float32 (B, K), 1 for each candidate that the greedy suppression keeps."""
    column = write.const([2], np.int64)
    start = write("Unsqueeze", valid, column)
    body = gs.Graph(name="trtdet/nms/step", opset=write.graph.opset, ir_version=write.graph.ir_version)
    step = Writer(body, "trtdet/nms/step", write.origin, outer=write.graph)
    iteration = gs.Variable("trtdet/nms/step/iteration", np.int64, [])
    going = gs.Variable("trtdet/nms/step/going", bool, [])
    keep = gs.Variable("trtdet/nms/step/keep", np.float32, shape)
    beaten = step("Greater", step("MatMul", suppression, keep), step.const(0.5, np.float32))
    after = step("Where", beaten, step.const(0.0, np.float32), start)
    moved = step("ReduceSum", step("Abs", step("Sub", after, keep)), keepdims=0)
    again = step("Greater", moved, step.const(0.5, np.float32))
    again.dtype, again.shape = bool, []
    after.dtype, after.shape = np.float32, shape
    body.inputs, body.outputs = [iteration, going, keep], [again, after]
    limit = write.const(int(shape[1]) + 1, np.int64)
    final = write("Loop", limit, write.const(True, np.bool_), start, body=body)
    return write("Squeeze", final, column)


def _best(write: Writer, found: _Candidates, keep: gs.Variable, config: Config) -> list[gs.Variable]:
    """The four outputs, of the best kept candidates."""
    padded = config.nms.max_detections
    count = min(padded, found.count)
    kept = write("Greater", keep, write.const(0.5, np.float32))
    ranked = write("Where", kept, found.score, write.const(_LOWEST, np.float32))
    best, position = write.many("TopK", 2, ranked, write.const([count], np.int64), axis=1)
    axis = write.const([1], np.int64)
    total = write("ReduceSum", keep, axis, keepdims=1)
    num = write("Cast", write("Min", total, write.const(float(count), np.float32)), to=6)
    # Entries past num_dets are undefined by contract; readers expect zeros.
    values = write("Sigmoid", best) if config.suppresses_logits else write("Max", best, write.const(0.0, np.float32))
    labels = write("Cast", write("GatherElements", found.label, position, axis=1), to=6)
    boxes = _rows(write, found.corners, position)
    outputs = [num, boxes, values, labels]
    if count < padded:
        short = padded - count
        outputs[1] = write("Pad", boxes, write.const([0, 0, 0, 0, short, 0], np.int64))
        outputs[2] = write("Pad", values, write.const([0, 0, 0, short], np.int64))
        outputs[3] = write("Pad", labels, write.const([0, 0, 0, short], np.int64))
    return _named(outputs, found.batch, padded)


def _named(outputs: list[gs.Variable], batch: int | str, room: int) -> list[gs.Variable]:
    types = ((np.int32, [1]), (np.float32, [room, 4]), (np.float32, [room]), (np.int32, [room]))
    for tensor, name, (dtype, shape) in zip(outputs, CONTRACT, types, strict=True):
        tensor.name, tensor.dtype, tensor.shape = name, dtype, [batch, *shape]
    return outputs


def _inferred(context: Any) -> None:
    """Shapes of EfficientNMS_TRT's outputs, from the shape of its scores."""
    scores = context.get_input_type(1)
    room = context.get_attribute("max_output_boxes").i
    batch = scores.tensor_type.shape.dim[0] if scores and scores.tensor_type.HasField("shape") else None
    types = ((onnx.TensorProto.INT32, [1]), (None, [room, 4]), (None, [room]), (onnx.TensorProto.INT32, [room]))
    for index, (kind, rest) in enumerate(types):
        made = onnx.TypeProto()
        made.tensor_type.elem_type = kind or scores.tensor_type.elem_type
        first = made.tensor_type.shape.dim.add()
        if batch is not None:
            first.CopyFrom(batch)
        for size in rest:
            made.tensor_type.shape.dim.add().dim_value = size
        context.set_output_type(index, made)


def _schema() -> onnx.defs.OpSchema:
    schema, kind = onnx.defs.OpSchema, onnx.defs.OpSchema.AttrType
    needed = {"score_threshold": kind.FLOAT, "iou_threshold": kind.FLOAT, "max_output_boxes": kind.INT}
    needed |= {"background_class": kind.INT, "score_activation": kind.INT, "box_coding": kind.INT}
    free = {"class_agnostic": kind.INT, "plugin_version": kind.STRING, "plugin_namespace": kind.STRING}
    attributes = [
        *(schema.Attribute(name, type, "", required=True) for name, type in needed.items()),
        *(schema.Attribute(name, type, "", required=False) for name, type in free.items()),
    ]
    made = schema(
        EFFICIENT,
        PLUGIN_DOMAIN,
        1,
        doc="Efficient NMS, https://github.com/NVIDIA/TensorRT/tree/main/plugin/efficientNMSPlugin",
        inputs=[schema.FormalParameter(name, "T") for name in ("boxes", "scores")],
        outputs=[
            schema.FormalParameter("num_detections", "tensor(int32)"),
            schema.FormalParameter("detection_boxes", "T"),
            schema.FormalParameter("detection_scores", "T"),
            schema.FormalParameter("detection_classes", "tensor(int32)"),
        ],
        type_constraints=[("T", ["tensor(float)", "tensor(float16)"], "")],
        attributes=attributes,
    )
    made.set_type_and_shape_inference_function(_inferred)
    return made


onnx.defs.register_schema(_schema())
