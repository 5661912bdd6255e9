"""boxes, scores -> num_dets, boxes, scores, classes; masks, keypoints and rotated boxes of all rows -> of the kept"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs

from trtdet.config import Config, NmsMode
from trtdet.detection.parts import ANGLES, KEYPOINTS, MASK_COEFFICIENTS, PROTOTYPES, ROTATED_BOXES
from trtdet.detection.plugin_nms import EfficientNms
from trtdet.detection.rotated import EPSILON
from trtdet.detection.suppression import score_bound
from trtdet.errors import ConfigError, ModelError
from trtdet.passes.base import PLUGIN_DOMAIN, Options, PassResult, Writer, register
from trtdet.passes.decode import ALL_BOXES, ALL_SCORES, BOXES, CONTRACT, PARTS, SCORES, Decoded, of_all
from trtdet.passes.masks import follow
from trtdet.passes.provenance import Origin

EFFICIENT = "EfficientNMS_TRT"

_LOWEST = float(np.finfo(np.float32).min)  # below every score, also in FP16, where it becomes minus infinity


def apply(graph: gs.Graph, options: Options) -> PassResult:
    """Writes the suppression of :func:`trtdet.detection.suppression.non_max_suppression` into the graph.

    Only the best ``pre_nms_topk`` candidates take part, so memory depends on them and not on the number of boxes.

    - ``native`` uses plain operators that every backend has. Let ``S[i, j] = 1`` if the better candidate j overlaps i
      by more than the threshold. Greedy suppression is the only fixed point of ``keep = valid and not (S @ keep)``: S
      is strictly lower triangular, so step i settles candidate i. A Loop runs until nothing changes, as many steps as
      the longest chain of suppressions. Memory: a few (B, K, K) matrices, K = pre_nms_topk.
    - ``onnx`` is a NonMaxSuppression with all five inputs; without the fifth, TensorRT drops scores up to 0.
    - rotated boxes are compared by their probabilistic IoU (:mod:`trtdet.detection.rotated`), by ``native`` alone.
    - ``efficient`` is TensorRT's plugin EfficientNMS_TRT. It suppresses and keeps at the thresholds, so it gets the
      next larger float32 of both. It counts boxes without a score, so they are subtracted from ``num_dets``. It selects
      candidates itself if ``pre_nms_topk`` is its own 4096. It does not say which boxes it kept, so masks, keypoints
      and rotated boxes cannot follow it.

    With ``nms: none``, ``native`` and ``onnx`` are only a TopK. Logits are compared as such; the result gets a sigmoid.
    Raises ConfigError if ``pre_nms_topk`` exceeds the limit of the backend's TopK or of the plugin, or the kind of NMS
    cannot take the detector's parts, and ModelError if the number of boxes is not fixed.
    """
    if options.nms == "host":
        return PassResult(0)
    config, nms = options.config, options.config.nms
    refusal = refused_parts(options.nms, config)
    if refusal:
        raise ConfigError(refusal)
    masks = [graph.outputs.pop()] if options.masks else []
    parts = [tensor for tensor in graph.outputs if tensor.name in PARTS]
    boxes, scores = (next(tensor for tensor in graph.outputs if tensor.name == name) for name in (BOXES, SCORES))
    boxes.name, scores.name = (ALL_BOXES, ALL_SCORES)
    table = {tensor.name: tensor for tensor in parts}
    for name, tensor in table.items():
        tensor.name = of_all(name)
    counts = [tensor.shape[1] for tensor in (boxes, scores) if tensor.shape is not None]
    count = next((count for count in counts if isinstance(count, int)), None)
    if count is None:
        raise ModelError(
            "the number of boxes is not fixed in the model, suppression in the graph needs it; export the model with a "
            "fixed input size or choose --nms host"
        )
    pool = count * (len(config.classes) if nms.candidates == "all-classes" else 1)
    topk = min(nms.most_candidates, pool)
    bound = score_bound(nms.score_threshold, config.suppresses_logits)
    write = Writer(graph, "trtdet/nms", Origin.NMS)
    # NaN becomes the lowest value: neither a sort nor the plugin defines its order.
    numbers = write("Where", write("Equal", scores, scores), scores, write.const(_no_score(config), np.float32))
    numbers.dtype, numbers.shape = np.float32, scores.shape
    if options.nms == "efficient":
        _efficient(write, boxes, numbers, pool=pool, topk=topk, options=options)
    else:
        _check_topk(topk, options)
        best = _candidates(write, boxes, numbers, count=topk, config=config)
        if ROTATED_BOXES in table:
            best = replace(best, rotated=_rows(write, table[ROTATED_BOXES], best.box, width=5))
        valid = write("Cast", write("Greater", best.score, write.const(bound, np.float32)), to=1)
        if not nms.suppresses:
            keep = valid
        elif options.nms == "native":
            keep = _fixed_point(write, _suppression(write, best, config), valid, shape=[best.batch, topk, 1])
        else:
            keep = _selected(write, best, valid, bound=bound, config=config)
        graph.outputs = _best(write, best, keep, table=table, config=config)
    if masks:
        graph.outputs += masks
        follow(graph, len(config.classes))
    graph.cleanup().toposort()
    return PassResult(1)


def decoded(nms_mode: NmsMode, config: Config) -> Decoded:
    """Names of the tensors with all decoded boxes, scores and parts, in a model rewritten for ``nms_mode``."""
    boxes, scores = (BOXES, SCORES) if nms_mode == "host" else (ALL_BOXES, ALL_SCORES)
    raw = {MASK_COEFFICIENTS: MASK_COEFFICIENTS, PROTOTYPES: PROTOTYPES, KEYPOINTS: KEYPOINTS, ANGLES: ROTATED_BOXES}
    parts = [raw[name] for name in config.head.raw_parts]
    named = tuple((part, part if nms_mode == "host" else of_all(part)) for part in parts)
    return Decoded(boxes, scores, logits=config.suppresses_logits, parts=named, size=config.input.size)


def refused_parts(nms_mode: NmsMode, config: Config) -> str:
    """Why a kind of NMS cannot take what the detector gives beside boxes, as a sentence; empty if it can."""
    if nms_mode == "efficient" and config.head.has_parts:
        return (
            "--nms efficient does not say which boxes it kept, so masks, keypoints and rotated boxes cannot follow; "
            "choose --nms native or host"
        )
    if nms_mode == "onnx" and config.head.rotated and config.nms.suppresses:
        return "--nms onnx compares upright boxes, and head.rotated is set; choose --nms native or host"
    return ""


def _no_score(config: Config) -> float:
    """A score below every threshold, for a box or class that is no candidate."""
    return _LOWEST if config.suppresses_logits else -1.0


def _check_topk(topk: int, options: Options) -> None:
    if options.max_topk is not None and topk > options.max_topk:
        raise ConfigError(
            f"key 'nms.pre_nms_topk' is {options.config.nms.pre_nms_topk} but this backend's TopK takes at most "
            f"{options.max_topk}; lower it with --set nms.pre_nms_topk={options.max_topk} or choose --nms host"
        )


def _efficient(write: Writer, boxes: gs.Variable, scores: gs.Variable, pool: int, topk: int, options: Options) -> None:
    config, nms, batch = options.config, options.config.nms, scores.shape[0]
    if topk > EfficientNms.CANDIDATES:
        raise ConfigError(
            f"key 'nms.pre_nms_topk' is {nms.pre_nms_topk} but EfficientNMS takes at most {EfficientNms.CANDIDATES} "
            f"candidates; lower it with --set nms.pre_nms_topk={EfficientNms.CANDIDATES} or choose another --nms"
        )
    empty = write.const(_no_score(config), np.float32)
    if nms.candidates == "best-class" or topk < min(pool, EfficientNms.CANDIDATES):
        _check_topk(topk, options)
        best = _candidates(write, boxes, scores, count=topk, config=config)
        boxes = best.corners
        scores = _by_class(write, best.score, best.label, classes=len(config.classes), empty=empty, axis=2)
    for tensor in (boxes, scores):
        tensor.dtype = np.float32
    thresholds = np.array([nms.score_threshold, nms.iou_threshold], np.float32)
    if not options.keep_embedded:  # an embedded NMS keeps its thresholds
        thresholds = np.nextafter(thresholds, np.float32(np.inf))
    attributes = EfficientNms(
        score_threshold=float(thresholds[0]),
        iou_threshold=float(thresholds[1]),
        max_output_boxes=nms.max_detections,
        score_activation=int(config.suppresses_logits),
        class_agnostic=int(nms.class_agnostic),
    )
    outputs = write.many(EFFICIENT, 4, boxes, scores, plugin_version="1", **asdict(attributes))
    write.graph.nodes[-1].domain = PLUGIN_DOMAIN
    if attributes.score_threshold < EfficientNms.DENSE:
        real = write("Greater", outputs[2], write.const(nms.score_threshold, np.float32))
        total = write("ReduceSum", write("Cast", real, to=1), write.const([1], np.int64), keepdims=1)
        outputs[0] = write("Cast", total, to=6)
    write.graph.outputs = _named(outputs, batch, nms.max_detections)


def _by_class(
    write: Writer, score: gs.Variable, label: gs.Variable, classes: int, empty: gs.Tensor, axis: int
) -> gs.Variable:
    """Adds an axis of classes to scores (B, K): each score at its class, ``empty`` elsewhere."""
    shape = [1, 1, 1]
    shape[axis] = classes
    at = write.const([axis], np.int64)
    mine = write("Equal", write("Unsqueeze", label, at), write.const(np.arange(classes).reshape(shape), np.int64))
    return write("Where", mine, write("Unsqueeze", score, at), empty)


def _selected(write: Writer, best: _Candidates, valid: gs.Variable, bound: np.float32, config: Config) -> gs.Variable:
    """float32 (B, K), 1 for each candidate that NonMaxSuppression keeps.

    The operator takes corners in any order. So that an inverted box has no area, its upper corner moves to the lower
    one. A box with NaN becomes a point.
    """
    total = write("ReduceSum", best.corners, write.const([2], np.int64), keepdims=1)
    real = write("Where", write("Equal", total, total), best.corners, write.const(0.0, np.float32))
    low, high = write.many("Split", 2, real, write.const([2, 2], np.int64), axis=2)
    upright = write("Concat", low, write("Max", low, high), axis=2)
    empty, row = write.const(_LOWEST, np.float32), write.const([1], np.int64)
    allowed = write("Where", write("Greater", valid, write.const(0.5, np.float32)), best.score, empty)
    if config.nms.class_agnostic:
        scores = write("Unsqueeze", allowed, row)
    else:
        scores = _by_class(write, allowed, best.label, classes=len(config.classes), empty=empty, axis=1)
    limits = (
        write.const([config.nms.max_detections], np.int64),
        write.const([config.nms.iou_threshold], np.float32),
        write.const([bound], np.float32),
    )
    selected = write("NonMaxSuppression", upright, scores, *limits)
    positions = write("Gather", selected, write.const([0, 2], np.int64), axis=1)
    count = write("Slice", write("Shape", selected), *(write.const([bound], np.int64) for bound in (0, 1, 0)))
    ones = write("Expand", write.const([1.0], np.float32), count)
    return write("ScatterND", write("Mul", valid, write.const(0.0, np.float32)), positions, ones)


@dataclass(frozen=True, eq=False)
class _Candidates:
    """The K best candidates of each of B images, best first."""

    batch: int | str  # B, or the name of an open dimension
    count: int  # K
    score: gs.Variable  # float32 (B, K)
    order: gs.Variable  # int64 (B, K), the lower one wins for equal scores
    box: gs.Variable  # int64 (B, K), indices of boxes
    label: gs.Variable  # int64 (B, K), indices of classes
    corners: gs.Variable  # float32 (B, K, 4), xyxy in network pixels
    rotated: gs.Variable | None = None  # float32 (B, K, 5), which then decide about overlaps


def _candidates(write: Writer, boxes: gs.Variable, scores: gs.Variable, count: int, config: Config) -> _Candidates:
    k = write.const([count], np.int64)
    if config.nms.candidates == "all-classes":
        flat = write("Reshape", scores, write.const([0, -1], np.int64))
        score, order = write.many("TopK", 2, flat, k, axis=1)
        width = write.const(len(config.classes), np.int64)
        box = write("Div", order, width)
        label = write("Sub", order, write("Mul", box, width))
    else:
        highest, classes = write.many("TopK", 2, scores, write.const([1], np.int64), axis=2)
        axis = write.const([2], np.int64)
        score, box = write.many("TopK", 2, write("Squeeze", highest, axis), k, axis=1)
        order, label = box, write("GatherElements", write("Squeeze", classes, axis), box, axis=1)
    return _Candidates(
        batch=scores.shape[0],
        count=count,
        score=score,
        order=order,
        box=box,
        label=label,
        corners=_rows(write, boxes, box, width=4),
    )


def _rows(write: Writer, table: gs.Variable, index: gs.Variable, width: int) -> gs.Variable:
    """Rows of ``table`` (B, N, width) at ``index`` (B, K), as (B, K, width)."""
    wide = write("Unsqueeze", index, write.const([2], np.int64))
    return write("GatherElements", table, write("Tile", wide, write.const([1, 1, width], np.int64)), axis=1)


def _suppression(write: Writer, best: _Candidates, config: Config) -> gs.Variable:
    """float32 (B, K, K), 1 where the better candidate j would suppress i.

    Better is decided by score, then by index. Position would need a constant (K, K) triangle, nine megabytes of the
    engine at K = 3000, and depend on how a backend's TopK orders equal scores.
    """
    column, row = write.const([2], np.int64), write.const([1], np.int64)
    iou = _iou(write, best.corners) if best.rotated is None else _probabilistic_iou(write, best.rotated)
    overlaps = write("Greater", iou, write.const(config.nms.iou_threshold, np.float32))
    if not config.nms.class_agnostic:
        same = write("Equal", write("Unsqueeze", best.label, column), write("Unsqueeze", best.label, row))
        overlaps = write("And", overlaps, same)
    mine, theirs = write("Unsqueeze", best.score, column), write("Unsqueeze", best.score, row)
    earlier = write("Less", write("Unsqueeze", best.order, row), write("Unsqueeze", best.order, column))
    tied = write("And", write("Equal", theirs, mine), earlier)
    better = write("Or", write("Greater", theirs, mine), tied)
    return write("Cast", write("And", overlaps, better), to=1)


def _iou(write: Writer, corners: gs.Variable) -> gs.Variable:
    """IoU float32 (B, K, K) of boxes (B, K, 4) with each other."""
    x1, y1, x2, y2 = write.many("Split", 4, corners, write.const([1, 1, 1, 1], np.int64), axis=2)
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
    return write("Div", shared, union)


def _probabilistic_iou(write: Writer, rotated: gs.Variable) -> gs.Variable:
    """Probabilistic IoU float32 (B, K, K) of rotated boxes (B, K, 5) with each other, with the arithmetic of
    :func:`trtdet.detection.rotated.probabilistic_iou`."""

    def number(value: float) -> gs.Constant:
        return write.const(value, np.float32)

    def pairs(op: str, tensor: gs.Variable) -> gs.Variable:
        return write(op, tensor, write("Transpose", tensor, perm=[0, 2, 1]))

    def product(first: gs.Variable, *others: gs.Tensor) -> gs.Variable:
        for other in others:
            first = write("Mul", first, other)
        return first

    eps = number(EPSILON)
    x, y, width, height, angle = write.many("Split", 5, rotated, write.const([1] * 5, np.int64), axis=2)
    along, across = (product(side, side, number(1 / 12)) for side in (width, height))
    cos, sin = write("Cos", angle), write("Sin", angle)
    cos2, sin2 = product(cos, cos), product(sin, sin)
    own_a = write("Add", product(along, cos2), product(across, sin2))
    own_b = write("Add", product(along, sin2), product(across, cos2))
    own_c = product(write("Sub", along, across), cos, sin)
    own = write("Max", write("Sub", product(own_a, own_b), product(own_c, own_c)), number(0.0))
    a, b, c = (pairs("Add", tensor) for tensor in (own_a, own_b, own_c))
    right, down = pairs("Sub", x), pairs("Sub", y)
    determinant = write("Sub", product(a, b), product(c, c))
    whole = write("Add", determinant, eps)
    spread = write("Add", product(a, down, down), product(b, right, right))
    spread = product(write("Div", spread, whole), number(0.25))
    skew = product(write("Div", product(c, right, down), whole), number(-0.5))
    size = write("Add", product(write("Sqrt", pairs("Mul", own)), number(4.0)), eps)
    size = product(write("Log", write("Add", write("Div", determinant, size), eps)), number(0.5))
    distance = write("Add", write("Add", spread, skew), size)
    distance = write("Min", write("Max", distance, eps), number(100.0))
    rest = write("Add", write("Sub", number(1.0), write("Exp", write("Neg", distance))), eps)
    return write("Sub", number(1.0), write("Sqrt", rest))


def greedy(write: Writer, boxes: gs.Variable, scores: gs.Variable, count: int, config: Config) -> gs.Variable:
    """Greedy suppression of boxes of one class in plain operators, see ``native`` of :func:`apply`.

    Takes K = ``count`` boxes float32 (1, K, 4), xyxy, and scores float32 (1, K) in any order; the lowest float is no
    candidate. The IoU threshold is that of ``config.nms``. Returns bool (1, K), whether a box is kept.
    """
    order = write.const(np.arange(count)[None], np.int64)
    best = _Candidates(batch=1, count=count, score=scores, order=order, box=order, label=order, corners=boxes)
    valid = write("Cast", write("Greater", scores, write.const(_LOWEST, np.float32)), to=1)
    suppression = _suppression(write, best, config.with_nms(class_agnostic=True))
    return write("Greater", _fixed_point(write, suppression, valid, shape=[1, count, 1]), write.const(0.5, np.float32))


def _fixed_point(write: Writer, suppression: gs.Variable, valid: gs.Variable, shape: list[int | str]) -> gs.Variable:
    """float32 (B, K), 1 for each candidate that greedy suppression keeps."""
    column = write.const([2], np.int64)
    start = write("Unsqueeze", valid, column)
    body = gs.Graph(name="trtdet/nms/step", opset=write.graph.opset)
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


def _best(
    write: Writer, best: _Candidates, keep: gs.Variable, table: Mapping[str, gs.Variable], config: Config
) -> list[gs.Variable]:
    """The outputs for the best kept candidates; zeros past ``num_dets``. ``table`` has the parts of all boxes."""
    room = config.nms.max_detections
    count = min(room, best.count)
    kept = write("Greater", keep, write.const(0.5, np.float32))
    ranked = write("Where", kept, best.score, write.const(_LOWEST, np.float32))
    score, position = write.many("TopK", 2, ranked, write.const([count], np.int64), axis=1)
    axis = write.const([1], np.int64)
    total = write("ReduceSum", keep, axis, keepdims=1)
    num = write("Cast", write("Min", total, write.const(float(count), np.float32)), to=6)
    values = write("Sigmoid", score) if config.suppresses_logits else write("Max", score, write.const(0.0, np.float32))
    labels = write("Cast", write("GatherElements", best.label, position, axis=1), to=6)
    boxes = _rows(write, best.corners, position, width=4)
    outputs = [num, boxes, values, labels]
    for index in (1, 2, 3) if count < room else ():
        widths = [0, 0, 0, 0, room - count, 0] if index == 1 else [0, 0, 0, room - count]
        outputs[index] = write("Pad", outputs[index], write.const(widths, np.int64))
    chosen = write("GatherElements", best.box, position, axis=1) if table else position
    return [
        *_named(outputs, best.batch, room),
        *(_followed(write, name, (tensor, chosen), room=room, short=room - count) for name, tensor in table.items()),
    ]


def _followed(
    write: Writer, name: str, gathered: tuple[gs.Variable, gs.Variable], room: int, short: int
) -> gs.Variable:
    """A part of the kept boxes, named ``name``: rows of a table of all boxes at an index (B, K - ``short``)."""
    table, index = gathered
    if name == PROTOTYPES:
        table.name = name
        return table
    batch, count, *sizes = table.shape
    width = int(np.prod(sizes))
    if len(sizes) > 1:
        table = write("Reshape", table, write.const([0, count, width], np.int64))
    rows = _rows(write, table, index, width=width)
    if short:
        rows = write("Pad", rows, write.const([0, 0, 0, 0, short, 0], np.int64))
    if len(sizes) > 1:
        rows = write("Reshape", rows, write.const([0, room, *sizes], np.int64))
    rows.name, rows.dtype, rows.shape = name, np.dtype(np.float32), [batch, room, *sizes]
    return rows


def _named(outputs: list[gs.Variable], batch: int | str, room: int) -> list[gs.Variable]:
    types = ((np.int32, [1]), (np.float32, [room, 4]), (np.float32, [room]), (np.int32, [room]))
    for tensor, name, (dtype, shape) in zip(outputs, CONTRACT, types, strict=True):
        tensor.name, tensor.dtype, tensor.shape = name, dtype, [batch, *shape]
    return outputs


def _infer(context: Any) -> None:
    """Output shapes of EfficientNMS_TRT, from the shape of its scores."""
    scores = context.get_input_type(1)
    room = context.get_attribute("max_output_boxes").i
    batch = scores.tensor_type.shape.dim[0] if scores and scores.tensor_type.HasField("shape") else None
    types = ((onnx.TensorProto.INT32, [1]), (None, [room, 4]), (None, [room]), (onnx.TensorProto.INT32, [room]))
    for index, (kind, sizes) in enumerate(types):
        output = onnx.helper.make_tensor_type_proto(kind or scores.tensor_type.elem_type, [None, *sizes])
        if batch is not None:
            output.tensor_type.shape.dim[0].CopyFrom(batch)
        context.set_output_type(index, output)


def _register() -> None:
    schema, kind = onnx.defs.OpSchema, onnx.defs.OpSchema.AttrType
    attributes = {
        **dict.fromkeys(("score_threshold", "iou_threshold"), (kind.FLOAT, True)),
        **dict.fromkeys(("max_output_boxes", "background_class", "score_activation", "box_coding"), (kind.INT, True)),
        "class_agnostic": (kind.INT, False),
        **dict.fromkeys(("plugin_version", "plugin_namespace"), (kind.STRING, False)),
    }
    outputs = {"detections": "tensor(int32)", "boxes": "T", "scores": "T", "classes": "tensor(int32)"}
    plugin = schema(
        EFFICIENT,
        PLUGIN_DOMAIN,
        1,
        doc="Efficient NMS, https://github.com/NVIDIA/TensorRT/tree/main/plugin/efficientNMSPlugin",
        inputs=[schema.FormalParameter(name, "T") for name in ("boxes", "scores")],
        outputs=[schema.FormalParameter(name, element) for name, element in outputs.items()],
        type_constraints=[("T", ["tensor(float)", "tensor(float16)"], "")],
        attributes=[schema.Attribute(name, of, "", required=needed) for name, (of, needed) in attributes.items()],
    )
    register(plugin, _infer)


_register()
