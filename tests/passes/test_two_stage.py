"""torchvision's two-stage detectors from both exporters; benchmarks/fixtures/two_stage.py made the files."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import nets
import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest

from trtdet.backends import OnnxRunner
from trtdet.config import Config
from trtdet.detection.parts import Parts
from trtdet.detection.suppression import non_max_suppression
from trtdet.errors import ModelError
from trtdet.exporter import SHAPES_MODEL
from trtdet.passes import Options, load_model, rewrite
from trtdet.passes.base import PassResult
from trtdet.passes.model import to_graph, to_model
from trtdet.passes.two_stage import (
    BOXES,
    REAL,
    REWRITES,
    detections,
    levels,
    prepared,
    proposals,
    static,
    suppressions,
    up_to_proposals,
)
from trtdet.passes.walk import upstream

FOLDER = Path(__file__).parents[1] / "fixtures" / "two_stage"
MODELS = (
    pytest.param("faster_trace", marks=pytest.mark.slow),
    "faster_dynamo",
    pytest.param("mask_trace", marks=pytest.mark.slow),
    pytest.param("mask_dynamo", marks=pytest.mark.slow),
)
SIZE, CLASSES = 128, 10
BEFORE, AFTER = 60, 25
IMAGES = np.random.default_rng(5).normal(size=(3, 1, 3, SIZE, SIZE)).astype(np.float32)


@pytest.fixture(scope="module", params=MODELS)
def name(request):
    return str(request.param)


def config(nms: Any = "none", **head: Any) -> Config:
    return nets.configuration("detections", (SIZE, SIZE), CLASSES, nms=nms, **head)


@pytest.fixture(scope="module")
def exported(name):
    return load_model(FOLDER / f"{name}.onnx")


@pytest.fixture(scope="module")
def cleaned(exported):
    graph, result = prepared(to_graph(onnx.shape_inference.infer_shapes(exported)), Options(config()))
    assert result.skipped == ()
    assert result.count == sum(node.op_type == "If" for node in exported.graph.node)
    return to_model(graph)


@pytest.fixture
def graph(cleaned):
    return to_graph(cleaned)


def with_background(model: onnx.ModelProto, by: float) -> onnx.ModelProto:
    """The model with another bias of the background: with a large one nothing is found, without any much is."""
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    heads = {node.input[2] for node in changed.graph.node if node.op_type == "Gemm"}
    (bias,) = (e for e in changed.graph.initializer if e.name in heads and list(e.dims) == [CLASSES + 1])
    values = onnx.numpy_helper.to_array(bias).copy()
    values[0] += by
    bias.CopyFrom(onnx.numpy_helper.from_array(values, bias.name))
    return changed


def ops(model: onnx.ModelProto) -> Counter[str]:
    return Counter(node.op_type for node in model.graph.node)


def same(run: Any, before: onnx.ModelProto, after: onnx.ModelProto) -> None:
    """Equal bit for bit: for images with many objects, and where the background is so probable that there is none."""
    counts = set()
    for background in (0.0, 1e4):
        for image in IMAGES[:2] if background == 0 else IMAGES[:1]:
            want = run(with_background(before, background), images=image)
            got = run(with_background(after, background), images=image)
            assert list(got) == list(want)
            for output in want:
                np.testing.assert_array_equal(got[output], want[output])
            counts.add(len(want["boxes"]))
    assert counts == {0, 100}


def test_the_export_finds_what_torchvision_finds(name, exported, run):
    with np.load(FOLDER / "torchvision.npz") as expected:
        for number, image in enumerate(IMAGES):
            got = run(exported, images=image)
            compare(got, expected, f"{name.partition('_')[0]}/{number}")


def compare(got: dict[str, np.ndarray], expected: Any, key: str) -> None:
    np.testing.assert_allclose(got["scores"], expected[f"{key}/scores"], atol=1e-4)
    np.testing.assert_allclose(got["boxes"], expected[f"{key}/boxes"], atol=0.01)
    np.testing.assert_array_equal(got["labels"], expected[f"{key}/labels"])


def test_guards_become_their_branch(exported, cleaned, run):
    assert ops(cleaned)["If"] == 0
    assert ops(cleaned)["NonMaxSuppression"] == 2
    same(run, exported, cleaned)


def test_each_rewrite_leaves_the_results(name, cleaned, graph, run):
    pools = 2 if name.startswith("mask") else 1
    counts = {"nms_score_threshold": 2, "fold_post_nms_topk": 2, "merge_levels": pools, "roi_align_sampling": 0}
    assert list(counts) == list(REWRITES)
    for rewriting, apply in REWRITES.items():
        result = apply(graph)
        assert (rewriting, result.count, result.skipped) == (rewriting, counts[rewriting], ())
        graph = to_graph(to_model(graph))
        assert apply(to_graph(to_model(graph))).count == 0
    after = to_model(graph)
    same(run, cleaned, after)
    assert ops(after)["ScatterElements"] == ops(after)["ScatterND"] == 0
    assert ops(after)["TopK"] == ops(cleaned)["TopK"] + pools
    for node in graph.nodes:
        if node.op == "NonMaxSuppression":
            assert node.inputs[4].values == np.finfo(np.float32).min
    assert [node.inputs[2].values for node in suppressions.in_order(graph)] == [1000, 100]


def test_levels_merge_without_a_shape_that_depends_on_the_image(name, cleaned, graph, run):
    result = levels.merge(graph, static=True)
    assert (result.count, result.skipped) == (2 if name.startswith("mask") else 1, ())
    after = to_model(graph)
    assert ops(after)["ScatterElements"] == ops(after)["ScatterND"] == 0
    assert ops(after)["NonZero"] == 4  # of small boxes, of low scores, twice each
    assert ops(after)["RoiAlign"] == ops(cleaned)["RoiAlign"]
    same(run, cleaned, after)


def test_fewer_proposals_without_another_export(name, graph, run):
    before = proposals.limit_before(graph, BEFORE)
    assert (before.count, before.skipped) == (3, ())  # two levels have 48 and 12 anchors
    after = proposals.limit_after(graph, AFTER)
    assert (after.count, after.skipped) == (1, ())
    model = to_model(graph)
    with np.load(FOLDER / "torchvision.npz") as expected:
        for number, image in enumerate(IMAGES):
            compare(run(model, images=image), expected, f"{name.partition('_')[0]}/fewer/{number}")
    again = to_graph(model)
    assert proposals.limit_before(again, 1000).count == proposals.limit_after(again, 1000).count == 0
    assert suppressions.fold_limits(again).count == 2
    assert proposals.limit_after(again, AFTER - 1).count == 1
    with pytest.raises(ValueError, match="rpn_pre_nms_topk\n.*greater than or equal to 1"):
        config(rpn_pre_nms_topk=0)


def test_the_whole_model_gives_the_contract_of_detections(exported, run):
    rewritten = rewrite(exported, Options(config(), nms="native"))
    assert rewritten.config.head.decode == "detections"
    assert rewritten.results["merge_levels"].count > 0
    for background, image in ((0.0, IMAGES[0]), (1e4, IMAGES[0])):
        want = run(with_background(exported, background), images=image)
        got = run(with_background(rewritten.model, background), images=image)
        count = int(got["num_dets"].reshape(-1)[0])
        assert count == len(want["scores"])
        order = np.argsort(-want["scores"], kind="stable")
        np.testing.assert_allclose(got["scores"][0, :count], want["scores"][order], rtol=0, atol=0)
        ours = rows(got["boxes"][0, :count], got["classes"][0, :count])
        assert ours == rows(want["boxes"], want["labels"] - 1)
        check_masks(got, want, order, 0.0)


def check_masks(got: dict[str, np.ndarray], want: dict[str, np.ndarray], order: np.ndarray, off: float) -> None:
    """As the export has them, where it has any; zeros, or anything at all, behind the last detection."""
    assert ("masks" in got) == ("masks" in want)
    if "masks" in want:
        assert got["masks"].shape[0] == 1 and got["masks"].shape[2:] == (28, 28)
        np.testing.assert_allclose(got["masks"][0, : len(order)], want["masks"][order, 0], rtol=0, atol=off)


def rows(boxes: np.ndarray, classes: np.ndarray) -> list[tuple[float, ...]]:
    return sorted((*box, int(label)) for box, label in zip(boxes.tolist(), classes.tolist(), strict=True))


@pytest.mark.parametrize(("missing", "off"), [(["NonZero"], 0.0), (["RoiAlign"], 1e-4)])
def test_no_shape_depends_on_the_image_where_a_backend_has_no_nonzero(exported, run, missing, off):
    merged = rewrite(exported, Options(config(), nms="native"))
    fixed = rewrite(exported, Options(config(), nms="native", missing_ops=frozenset(missing)))
    assert not {*missing, "NonMaxSuppression"} & set(ops(fixed.model))
    assert fixed.results["suppress_proposals"].count == 1
    thresholds = fixed.config.nms
    assert (thresholds.iou_threshold, thresholds.max_detections) == (0.5, 100)
    assert thresholds.score_threshold == pytest.approx(0.05)
    for tensor in fixed.model.graph.value_info:
        if tensor.name.startswith("trtdet/"):
            assert all(dim.HasField("dim_value") for dim in tensor.type.tensor_type.shape.dim), tensor.name
    for background, found in ((0.0, 100), (1e4, 0)):
        want, got = (run(with_background(done.model, background), images=IMAGES[0]) for done in (merged, fixed))
        assert want["num_dets"] == got["num_dets"] == found
        for output in ("boxes", "scores", "classes"):
            np.testing.assert_allclose(got[output][:, :found], want[output][:, :found], rtol=0, atol=off)
        assert list(got) == list(want)
        if "masks" in want:
            np.testing.assert_allclose(got["masks"][0, :found], want["masks"][0, :found], rtol=0, atol=off)


def ordered_by_logits(model: onnx.ModelProto, threshold: float | None = None) -> onnx.ModelProto:
    """As custom models are: the logits of objectness, all negative, choose the proposals, and none is left out for it.

    Args:
        model: an export of torchvision.
        threshold: of the scores in the suppression of the proposals; None for no such input.
    """
    graph = to_graph(onnx.shape_inference.infer_shapes(model))
    node = suppressions.in_order(graph)[0]
    changed = Counter[str]()
    for above in upstream(node.inputs[1]):
        if above.op == "Sigmoid":
            above.op = "Sub"
            above.inputs.append(gs.Constant("shift", np.array([100], np.float32)))
        elif above.op == "GreaterOrEqual" and float(above.inputs[1].values) == 0:
            above.inputs[1] = gs.Constant("everything", np.array(suppressions.LOWEST))
        else:
            continue
        changed[above.op] += 1
    assert changed == {"Sub": 1, "GreaterOrEqual": 1}
    if threshold is not None:
        node.inputs.append(gs.Constant("score_threshold", np.array([threshold], np.float32)))
    return to_model(graph)


@pytest.mark.slow
def test_proposals_with_negative_logits_are_kept(run):
    model = load_model(FOLDER / "faster_dynamo.onnx")
    logits, cut = ordered_by_logits(model), ordered_by_logits(model, 0.0)
    want, fewer = run(logits, images=IMAGES[0]), run(cut, images=IMAGES[0])
    assert (len(want["boxes"]), len(fewer["boxes"])) == (100, 0)
    for missing in ((), ("NonZero",)):
        done = rewrite(logits, Options(config(), nms="native", missing_ops=frozenset(missing)))
        got = run(done.model, images=IMAGES[0])
        count = int(got["num_dets"].reshape(-1)[0])
        assert count == len(want["boxes"])
        assert rows(got["boxes"][0, :count], got["classes"][0, :count] + 1) == rows(want["boxes"], want["labels"])


@pytest.fixture(scope="module")
def masked():
    return load_model(FOLDER / "mask_dynamo.onnx")


@pytest.mark.slow
def test_masks_follow_whatever_suppresses(masked, run):
    want = run(masked, images=IMAGES[0])
    order = np.argsort(-want["scores"], kind="stable")[:20]
    few = config({"iou_threshold": 1.0, "score_threshold": 0.05, "max_detections": 20})
    for mode in ("onnx", "native"):
        check_masks(run(rewrite(masked, Options(few, nms=mode)).model, images=IMAGES[0]), want, order, 0.0)
    raw = run(rewrite(masked, Options(few, nms="host")).model, images=IMAGES[0])
    found = non_max_suppression(raw["boxes"], raw["scores"], few.nms, parts=Parts(masks=raw["masks"]))
    got = {"masks": found.parts.masks, "boxes": found.boxes}
    check_masks(got, want, order, 0.0)
    np.testing.assert_array_equal(found.boxes[0], want["boxes"][order])


@pytest.mark.slow
def test_masks_of_boxes_that_a_program_chooses_need_all_rows(masked):
    done = rewrite(masked, Options(config(), nms="host", missing_ops=frozenset({"NonZero"})))
    assert [output.name for output in done.model.graph.output] == ["boxes", "scores"]
    assert "left out: where no shape may depend on the image" in done.results["cut_masks"].skipped[0]
    assert "with any --nms but host" in done.left[0]


@pytest.mark.slow
def test_a_paste_in_the_graph_is_cut_off(masked, run):
    graph = to_graph(masked)
    masks = graph.outputs[3]
    kinds = {"number": ([], np.int64), "going": ([], np.bool_), "again": ([], np.bool_), "picture": (None, np.float32)}
    number, going, again, picture = (gs.Variable(name, dtype, shape) for name, (shape, dtype) in kinds.items())
    empty, sizes = gs.Variable.empty(), gs.Constant("sizes", np.array([1, 1, SIZE, SIZE]))
    row, column, none = (gs.Variable(name) for name in ("row", "column", "none"))
    steps = [
        gs.Node("Gather", "row", {"axis": 0}, [masks, number], [row]),
        gs.Node("Unsqueeze", "column", {}, [row, gs.Constant("first", np.array([0]))], [column]),
        gs.Node("Resize", "resize", {"mode": "linear"}, [column, empty, empty, sizes], [none]),
        gs.Node("Squeeze", "squeeze", {}, [none, gs.Constant("zero", np.array([0]))], [picture]),
        gs.Node("Identity", "again", {}, [going], [again]),
    ]
    body = gs.Graph(steps, [number, going], [again, picture], name="paste", opset=graph.opset)
    count, shape = gs.Variable("count"), gs.Variable("shape")
    pasted = gs.Variable("pasted", np.float32, ["n", 1, SIZE, SIZE])
    graph.nodes += [
        gs.Node("Shape", "shape", {}, [masks], [shape]),
        gs.Node("Gather", "count", {"axis": 0}, [shape, gs.Constant("at", np.array(0))], [count]),
        gs.Node("Loop", "paste", {"body": body}, [count, gs.Constant("true", np.array(True))], [pasted]),
    ]
    graph.outputs[3] = pasted
    inside = to_model(graph)
    want = run(masked, images=IMAGES[0])
    assert run(inside, images=IMAGES[0])["pasted"].shape == (100, 1, SIZE, SIZE)
    done = rewrite(inside, Options(config(), nms="native")).model
    assert ops(done)["Loop"] == ops(done)["Resize"] - 3 == 0
    check_masks(run(done, images=IMAGES[0]), want, np.argsort(-want["scores"], kind="stable"), 0.0)


@pytest.mark.slow
def test_the_configuration_may_leave_out_more_than_the_model(traced_model):
    missing = frozenset({"NonZero"})
    for nms, kept in (
        ({"score_threshold": 0.3, "max_detections": 20}, (0.3, 20)),
        ({"score_threshold": 0.01, "max_detections": 200}, (pytest.approx(0.05), 100)),
    ):
        thresholds = rewrite(traced_model, Options(config(nms), nms="host", missing_ops=missing)).config.nms
        assert (thresholds.score_threshold, thresholds.max_detections) == kept


@pytest.mark.slow
def test_the_proposals_of_either_form_are_the_regions_of_the_second_stage(exported):
    limited = config(rpn_pre_nms_topk=BEFORE, rpn_post_nms_topk=AFTER)
    merged = rewrite(exported, Options(limited, nms="native")).model
    fixed = rewrite(exported, Options(limited, nms="native", missing_ops=frozenset({"RoiAlign"}))).model
    first, second = (OnnxRunner(up_to_proposals(model)) for model in (merged, fixed))
    want, got = (runner.feed({runner.input: IMAGES[0]}) for runner in (first, second))
    assert got[REAL].all()
    np.testing.assert_array_equal(got[BOXES], want[BOXES])
    assert want[BOXES].shape == (AFTER, 4)
    # Each is aligned on one level: all of them, and nothing else, is what RoiAlign reads.
    names = [node.input[1] for node in merged.graph.node if node.op_type == "RoiAlign"]
    merged.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names[:4])
    runner = OnnxRunner(merged)
    read = runner.feed({runner.input: IMAGES[0]})
    regions = np.concatenate([read[name] for name in names[:4]])
    assert sorted(map(tuple, regions.tolist())) == sorted(map(tuple, want[BOXES].tolist()))


def test_a_detector_of_one_stage_has_no_proposals():
    assert up_to_proposals(load_model(SHAPES_MODEL)) is None


def test_proposals_are_limited_by_the_configuration(exported):
    limited = config(rpn_pre_nms_topk=BEFORE, rpn_post_nms_topk=AFTER)
    results = rewrite(exported, Options(limited, nms="native")).results
    assert (results["rpn_pre_nms_topk"].count, results["rpn_post_nms_topk"].count) == (3, 1)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"classes": ["a", "b"]}, "has 11 columns, and 'classes' lists 2; expected are 2, or 3 with the background"),
        ({"head": {"decode": "detections", "outputs": ["scores", "labels", "boxes"]}}, r"boxes \(n, 4\), labels"),
        ({"head": {"decode": "detections", "outputs": ["boxes", "scores"]}}, "expected are boxes"),
        (
            {"head": {"decode": "detections", "outputs": ["boxes", "labels", "score"]}},
            "names 'score', which the model does not have; name the outputs for boxes, labels and scores",
        ),
    ],
)
def test_what_does_not_fit_is_said(exported, changed, words):
    document = json.loads(config().model_dump_json()) | changed
    with pytest.raises(ModelError, match=words):
        rewrite(exported, Options(Config.model_validate(document)))


@pytest.mark.slow
def test_masks_that_are_not_read_are_left_out(masked):
    graph, _ = prepared(to_graph(onnx.shape_inference.infer_shapes(masked)), Options(config()))
    cleaned = to_model(graph)
    for apply in REWRITES.values():
        apply(graph)
    merged = to_model(graph)

    def cut(model: onnx.ModelProto = merged) -> tuple[gs.Graph, detections.Outputs]:
        graph = to_graph(model)
        return graph, detections.outputs(graph, config())

    assert detections.cut_masks(*cut(), None, config()).count == 1
    assert "it reads the detections at" in reason(*cut(cleaned))
    graph, found = cut()
    (sigmoid,) = (node for node in graph.nodes if node.op == "Sigmoid" and len(node.outputs[0].shape) == 4)
    sigmoid.outputs[0].shape = ["n", 5, 28, 28]
    assert "it is of 5 classes, boxes are of 11" in reason(graph, found)
    graph, found = cut()
    (sigmoid,) = (node for node in graph.nodes if node.op == "Sigmoid" and len(node.outputs[0].shape) == 4)
    sigmoid.op = "HardSigmoid"
    assert "no sigmoid of (n, classes, M, M) is behind it" in reason(graph, found)
    graph, found = cut()
    other = gs.Variable("other_boxes", np.float32, ["n", 4])
    graph.nodes.append(gs.Node("Relu", "relu_boxes", {}, [found.boxes], [other]))
    assert "its regions are not the boxes that are found" in reason(graph, replace(found, boxes=other))


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        ("masks = HardSigmoid(logits)", "no sigmoid of (n, classes, M, M) is behind it"),
        ("few = Slice(logits, zero, five, one) masks = Sigmoid(few)", "it is of 5 classes, boxes are of 10"),
        ("masks = Sigmoid(logits)", "its regions are not the boxes that are found"),
    ],
)
def test_masks_that_are_not_of_the_boxes_are_left_out(written, reason):
    text = f"""(float[n,4] boxes, int64[n] labels, float[n] scores, float[n,{CLASSES},28,28] logits)
        => (float[n,m,28,28] masks) {{ {written} }}"""
    indices = {"zero": np.array([0]), "five": np.array([5]), "one": np.array([1])}
    graph = to_graph(onnx.shape_inference.infer_shapes(nets.net(text, **indices)))
    boxes, labels, scores, _ = graph.inputs
    found = detections.Outputs(boxes, labels=labels, scores=scores, most=100)
    assert detections.cut_masks(graph, found, None, config()) == PassResult(0, (f"masks: {reason}",))
    assert graph.outputs == []


def reason(graph: gs.Graph, outputs: detections.Outputs) -> str:
    result = detections.cut_masks(graph, outputs, None, config())
    assert len(graph.outputs) == 3
    return left(result)


@pytest.fixture(scope="module")
def traced_model():
    graph, _ = prepared(to_graph(load_model(FOLDER / "faster_trace.onnx")), Options(config()))
    return to_model(graph)


@pytest.fixture
def traced(traced_model):
    return to_graph(traced_model)


def constant(graph: gs.Graph, node: gs.Node, position: int, value: Any) -> None:
    node.inputs[position] = gs.Constant(f"changed_{position}", np.array(value))


def test_limits_that_are_not_those_of_the_first_boxes_stay(traced_model):
    graph = to_graph(traced_model)
    limit = suppressions.limit_of(suppressions.in_order(graph)[0])
    assert isinstance(limit, suppressions.Limit)
    assert (limit.count, limit.slice is not None) == (1000, True)
    constant(graph, limit.slice, 1, [2])
    assert "the slice behind it is [2:1000:1], not the first of its boxes" in left(suppressions.fold_limits(graph), 1)
    assert "not bounded" in left(levels.merge(graph))

    graph = to_graph(traced_model)
    suppressions.in_order(graph)[0].inputs[1].shape = [1, 2, None]
    assert "the limit counts for each class of each image" in left(suppressions.fold_limits(graph), 1)

    graph = to_graph(traced_model)
    limit = suppressions.limit_of(suppressions.in_order(graph)[1])
    graph.outputs.append(gs.Variable("all", np.int64))
    graph.nodes.append(gs.Node("Identity", "reads_all", {}, [limit.indices], [graph.outputs[-1]]))
    assert "Identity reads its boxes before the slice" in left(suppressions.fold_limits(graph), 1)


def left(result: PassResult, count: int = 0) -> str:
    """Why the first near-match stays, where so many others are rewritten."""
    assert result.count == count
    return result.skipped[0]


def test_levels_that_are_not_those_of_all_regions_stay(traced_model):
    graph = to_graph(traced_model)
    (clip,) = (node for node in graph.nodes if node.op == "Clip" and node.inputs[0].inputs[0].op == "Floor")
    constant(graph, clip, 2, np.float32(6))
    for fixed in (False, True):
        assert "a region may be of levels [0, 1, 2, 3, 4], and it joins [0, 1, 2, 3]" in left(
            levels.merge(graph, fixed)
        )

    graph = to_graph(traced_model)
    constant(graph, suppressions.limit_of(suppressions.in_order(graph)[0]).slice, 2, [5000])
    assert "it has up to 5000 regions, and TensorRT's TopK sorts 3840" in left(levels.merge(graph))
    assert levels.merge(graph, static=True).count == 1

    graph = to_graph(traced_model)
    next(node for node in graph.nodes if node.op == "ScatterElements").attrs["reduction"] = "add"
    assert "it scatters with reduction add" in left(levels.merge(graph))


def test_guards_of_something_else_stay():
    model = load_model(FOLDER / "faster_trace.onnx")
    graph = to_graph(model)
    guard = next(node for node in graph.nodes if node.op == "If")
    guard.attrs["then_branch"].nodes[0].op = "RandomNormal"
    assert "without boxes it computes something: RandomNormal" in left(suppressions.inline_guards(graph), 1)

    graph = to_graph(model)
    guard = next(node for node in graph.nodes if node.op == "If")
    other = gs.Variable("other", np.bool_)
    graph.nodes.append(gs.Node("Not", "turned", {}, [guard.inputs[0]], [other]))
    guard.inputs[0] = other
    assert "its condition is not that there are no boxes" in left(suppressions.inline_guards(graph), 1)


def test_sampling_is_written(traced):
    for node in traced.nodes:
        if node.op == "RoiAlign":
            del node.attrs["sampling_ratio"]
    assert levels.write_sampling(traced).count == 4
    assert {node.attrs["sampling_ratio"] for node in traced.nodes if node.op == "RoiAlign"} == {0}


@pytest.mark.parametrize(
    ("attributes", "words"),
    [
        ({"mode": "max"}, "it takes the maximum of its samples"),
        ({"sampling_ratio": 0}, "the number of its samples depends on the region"),
    ],
)
def test_regions_that_cannot_be_sampled_stay(traced, attributes, words):
    for node in traced.nodes:
        if node.op == "RoiAlign":
            node.attrs |= attributes
    assert words in left(static.sample_regions(traced))


@pytest.mark.parametrize(("least", "kept"), [(0.3, 0.3), (0.05, 0.1), (0.0, 0.1)])
def test_a_score_threshold_of_the_model_raises_that_of_the_configuration(least, kept):
    text = """(float[6,4] every_box, int64[6] every_label, float[6] every_score, bool[3] regions)
        => (float[k,4] boxes, int64[k] labels, float[k] scores, bool[3] real) {
        real = Identity(regions) over = Greater(every_score, least) place = NonZero(over) row = Squeeze(place, zero)
        over_boxes = Gather(every_box, row) over_labels = Gather(every_label, row)
        over_scores = Gather(every_score, row)
        wide_boxes = Unsqueeze(over_boxes, zero) wide_scores = Unsqueeze(over_scores, both)
        chosen = NonMaxSuppression(wide_boxes, wide_scores, most, overlap)
        column = Gather<axis = 1>(chosen, two) index = Squeeze(column, one)
        boxes = Gather(over_boxes, index) labels = Gather(over_labels, index) scores = Gather(over_scores, index) }"""
    numbers = {"zero": np.array([0]), "one": np.array([1]), "two": np.array([2]), "both": np.array([0, 1])}
    limits = {"least": np.float32(least), "most": np.array([4]), "overlap": np.array([0.5], np.float32)}
    graph = to_graph(onnx.shape_inference.infer_shapes(nets.net(text, **numbers, **limits)))
    boxes, labels, scores, real = graph.outputs
    real.name = REAL
    best = detections.Outputs(boxes, labels=labels, scores=scores, most=4)
    every, thresholds = static.all_detections(graph, best, config({"score_threshold": 0.1}))
    assert (every.most, every.exact) == (6, True)
    assert thresholds.nms.score_threshold == pytest.approx(kept)
    assert (thresholds.nms.max_detections, thresholds.nms.iou_threshold) == (4, 0.5)


def test_suppressions_that_cannot_be_static(traced_model):
    graph = to_graph(traced_model)
    node = suppressions.in_order(graph)[0]
    graph.nodes.append(gs.Node("Identity", "computes", {}, [node.inputs[3]], [gs.Variable("overlap", np.float32)]))
    node.inputs[3] = graph.nodes[-1].outputs[0]
    with pytest.raises(ModelError, match="is computed; export the model with a constant"):
        static.suppress_proposals(graph, config())

    graph = to_graph(traced_model)
    third = suppressions.in_order(graph)[1].copy()
    third.name, third.outputs = "third", [gs.Variable("third", np.int64)]
    graph.nodes.append(third)
    with pytest.raises(ModelError, match="has 3 NonMaxSuppression where 2 are expected"):
        static.suppress_proposals(graph, config())


@pytest.mark.parametrize(("batch", "words"), [(4, "a batch of 4 is asked for"), ("batch", "a batch of any size")])
def test_a_batch_of_several_images_is_refused(batch, words):
    with pytest.raises(ModelError, match=f"{words}.* a two-stage model is of one image.*leave --batch out"):
        rewrite(load_model(FOLDER / "faster_dynamo.onnx"), Options(config(), batch=batch))
