"""boxes, scores -> num_dets, boxes, scores, classes"""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs

from trtdet.errors import ConfigError, ModelError
from trtdet.passes.base import Options, PassResult, Writer
from trtdet.passes.decode import BOXES, CONTRACT, SCORES


def apply(graph: gs.Graph, options: Options) -> PassResult:
    """``native``: class-wise greedy suppression written with plain operators that every backend has.

    The best ``pre_nms_topk`` candidates are sorted by score. With ``S[i, j] = 1`` where the better candidate j
    overlaps i by more than the threshold, greedy suppression is the only fixed point of ``keep = valid and not
    (S @ keep)``: S is strictly lower triangular, so the i-th step settles candidate i, and a Loop that ends when
    nothing changes has found it. It is exact, and takes as many steps as the longest chain of suppressions, not as
    there are candidates. Memory is that of a few (B, K, K) matrices with K = pre_nms_topk.

    Raises:
        ConfigError: ``pre_nms_topk`` exceeds what the backend's TopK takes.
        ModelError: the number of boxes is open.
    """
    if options.nms == "host":
        return PassResult(0)
    nms = options.config.nms
    boxes, scores = (next(tensor for tensor in graph.outputs if tensor.name == name) for name in (BOXES, SCORES))
    boxes.name, scores.name = decoded("native")
    pool = _box_count(boxes, scores) * (len(options.config.classes) if nms.candidates == "all-classes" else 1)
    topk = min(nms.pre_nms_topk, pool)
    if options.max_topk is not None and topk > options.max_topk:
        raise ConfigError(
            f"key 'nms.pre_nms_topk' is {nms.pre_nms_topk} but this backend's TopK takes at most {options.max_topk}; "
            f"lower it with --pre-nms-topk {options.max_topk} or choose --nms host"
        )
    write = Writer(graph, "trtdet/nms")
    score, order, index, label = _candidates(write, scores, topk, options)
    corners = _rows(write, boxes, index)
    valid = _as_float(write, write("Greater", score, write.const(nms.score_threshold, np.float32)))
    suppression = _suppression(write, corners, score, order, label, options)
    keep = _fixed_point(write, suppression, valid, [scores.shape[0], topk, 1])
    graph.outputs = _best(write, corners, score, label, keep, scores.shape[0], topk, nms.max_detections)
    graph.cleanup().toposort()
    return PassResult(1)


def decoded(where: str) -> tuple[str, str]:
    """Names of the tensors with all decoded boxes and scores, in a model that was rewritten for ``where``."""
    return (f"{BOXES}_all", f"{SCORES}_all") if where == "native" else (BOXES, SCORES)


def _box_count(boxes: gs.Variable, scores: gs.Variable) -> int:
    for tensor in (boxes, scores):
        if tensor.shape is not None and isinstance(tensor.shape[1], int):
            return int(tensor.shape[1])
    raise ModelError(
        "the number of boxes is not fixed in the model, native suppression needs it; export the model with a fixed "
        "input size or choose --nms host"
    )


def _as_float(write: Writer, tensor: gs.Variable) -> gs.Variable:
    return write("Cast", tensor, to=1)


def _candidates(
    write: Writer, scores: gs.Variable, topk: int, options: Options
) -> tuple[gs.Variable, gs.Variable, gs.Variable, gs.Variable]:
    """The best candidates: scores float32, tie-breaking order, box index and class index int64, each (B, K)."""
    k = write.const([topk], np.int64)
    if options.config.nms.candidates == "all-classes":
        flat = write("Reshape", scores, write.const([0, -1], np.int64))
        score, order = write.many("TopK", 2, flat, k, axis=1)
        width = write.const(len(options.config.classes), np.int64)
        box = write("Div", order, width)
        return score, order, box, write("Sub", order, write("Mul", box, width))
    best, label = write.many("TopK", 2, scores, write.const([1], np.int64), axis=2)
    axis = write.const([2], np.int64)
    score, box = write.many("TopK", 2, write("Squeeze", best, axis), k, axis=1)
    return score, box, box, write("GatherElements", write("Squeeze", label, axis), box, axis=1)


def _rows(write: Writer, table: gs.Variable, index: gs.Variable) -> gs.Variable:
    """Rows of ``table`` (B, N, 4) at ``index`` (B, K), as (B, K, 4)."""
    wide = write("Unsqueeze", index, write.const([2], np.int64))
    return write("GatherElements", table, write("Tile", wide, write.const([1, 1, 4], np.int64)), axis=1)


def _suppression(
    write: Writer,
    corners: gs.Variable,
    score: gs.Variable,
    order: gs.Variable,
    label: gs.Variable,
    options: Options,
) -> gs.Variable:
    """float32 (B, K, K), 1 where the better candidate j would suppress i.

    Better is decided by score and then by index, not by position: a constant (K, K) triangle would be stored in the
    engine, nine megabytes of it at K = 3000, and the order would hang on how a backend's TopK treats equal scores.
    """
    column, row = write.const([2], np.int64), write.const([1], np.int64)
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
    overlaps = write("Greater", write("Div", shared, union), write.const(options.config.nms.iou_threshold, np.float32))
    if not options.config.nms.class_agnostic:
        same = write("Equal", write("Unsqueeze", label, column), write("Unsqueeze", label, row))
        overlaps = write("And", overlaps, same)
    mine, theirs = write("Unsqueeze", score, column), write("Unsqueeze", score, row)
    earlier = write("Less", write("Unsqueeze", order, row), write("Unsqueeze", order, column))
    tied = write("And", write("Equal", theirs, mine), earlier)
    better = write("Or", write("Greater", theirs, mine), tied)
    return _as_float(write, write("And", overlaps, better))


def _fixed_point(write: Writer, suppression: gs.Variable, valid: gs.Variable, shape: list[int | str]) -> gs.Variable:
    """float32 (B, K), 1 for what the greedy suppression keeps."""
    column = write.const([2], np.int64)
    start = write("Unsqueeze", valid, column)
    body = gs.Graph(name="trtdet/nms/step", opset=write.graph.opset, ir_version=write.graph.ir_version)
    step = Writer(body, "trtdet/nms/step")
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
    write: Writer,
    corners: gs.Variable,
    score: gs.Variable,
    label: gs.Variable,
    keep: gs.Variable,
    batch: int | str,
    topk: int,
    padded: int,
) -> list[gs.Variable]:
    count = min(padded, topk)
    kept = write("Greater", keep, write.const(0.5, np.float32))
    ranked = write("Where", kept, score, write.const(-1.0, np.float32))
    best, position = write.many("TopK", 2, ranked, write.const([count], np.int64), axis=1)
    axis = write.const([1], np.int64)
    total = write("ReduceSum", keep, axis, keepdims=1)
    num = write("Cast", write("Min", total, write.const(float(count), np.float32)), to=6)
    # Entries past num_dets are undefined by contract; zero is what a reader expects to see there.
    values = write("Max", best, write.const(0.0, np.float32))
    labels = write("Cast", write("GatherElements", label, position, axis=1), to=6)
    boxes = _rows(write, corners, position)
    outputs = [num, boxes, values, labels]
    if count < padded:
        short = padded - count
        outputs[1] = write("Pad", boxes, write.const([0, 0, 0, 0, short, 0], np.int64))
        outputs[2] = write("Pad", values, write.const([0, 0, 0, short], np.int64))
        outputs[3] = write("Pad", labels, write.const([0, 0, 0, short], np.int64))
    types = ((np.int32, [1]), (np.float32, [padded, 4]), (np.float32, [padded]), (np.int32, [padded]))
    for tensor, name, (dtype, shape) in zip(outputs, CONTRACT, types, strict=True):
        tensor.name, tensor.dtype, tensor.shape = name, dtype, [batch, *shape]
    return outputs
