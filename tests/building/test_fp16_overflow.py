"""Layers whose values exceed FP16 on the calibration images run in FP32, with a warning."""

import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from PIL import Image

from trtdet.backends import OnnxRunner
from trtdet.building import half
from trtdet.building.corrections import Prepared
from trtdet.building.engine import float_network
from trtdet.building.graph import PlacedGraph
from trtdet.building.ranges import Calibrated, Selection
from trtdet.calibration import Collection, CollectionRequest, Ranges, collect, expose
from trtdet.config import load_config
from trtdet.data import ImageCache, ImageStream
from trtdet.errors import TrtdetWarning
from trtdet.passes import Options, Rewritten
from trtdet.plans.planning import keeping
from trtdet.quantization import Cause, Corrections, DataFlow, PrecisionPlan, insert_qdq, place, to_half

TEXT = """<ir_version: 8, opset_import: ["" : 13]>
net (float[1,3,32,32] x) => (float[1,3,32,32] y) {
    a = Conv(x, large) b = Relu(a) c = Conv(b, small) d = Relu(c) e = Conv(d, heavy) f = Conv(e, tiny) y = Relu(f) }"""
CONFIG = load_config("shapes").model_copy(
    update={"input": load_config("shapes").input.model_copy(update={"size": (32, 32), "scale": 1 / 255})}
)


@pytest.fixture
def model():
    """Conv_0 gives over 65504, Conv_4 has such a weight; what comes before and after is small."""
    made = onnx.parser.parse_model(TEXT)
    eye = np.eye(3, dtype=np.float32).reshape(3, 3, 1, 1)
    weights = {"large": 4e4 * np.ones_like(eye), "small": 1e-8 * eye, "heavy": 7e4 * eye, "tiny": 1e-2 * eye}
    for name, weight in weights.items():
        made.graph.initializer.append(onnx.numpy_helper.from_array(weight, name))
    for index, node in enumerate(made.graph.node):
        node.name = f"{node.op_type}_{index}"
    return onnx.shape_inference.infer_shapes(made)


@pytest.fixture
def paths(tmp_path):
    rng = np.random.default_rng(0)
    paths = tuple(tmp_path / f"{index}.png" for index in range(2))
    for path in paths:
        Image.fromarray(rng.integers(0, 255, (32, 32, 3), np.uint8)).save(path)
    return paths


def prepared(model: onnx.ModelProto, paths: tuple[Path, ...], histograms: bool = True) -> Prepared:
    placement = place(model)
    runner = OnnxRunner(expose(model, placement.activations))
    request = CollectionRequest(runner.input, placement.activations)
    collection = collect(runner, request, ImageStream(paths, CONFIG.input))
    ranges = Ranges.choose(collection, "minmax")
    if not histograms:
        collection = Collection({}, "", 1, "", runner.input)
        paths = ()
    graph = PlacedGraph(model, Options(CONFIG), Rewritten(model, CONFIG, {}), placement)
    calibrated = Calibrated(graph, collection, ranges, paths, ImageCache(), False)
    return Prepared(calibrated, ranges, Corrections(), placement.plan)


def kept(model: onnx.ModelProto, *names: str) -> PrecisionPlan:
    return keeping(place(model).plan, dict.fromkeys(names, "kept: named"), Cause.KEPT_NAMED)


def test_what_overflows_runs_in_fp32_and_is_warned_of(model, paths):
    given = prepared(model, paths)
    with pytest.warns(TrtdetWarning) as caught:
        plan = given.without_overflow(kept(model, "Conv_0", "Conv_2", "Conv_4", "Conv_5"))
    assert {name: (entry.precision, entry.cause) for name, entry in plan.entries.items()} == {
        "Conv_0": ("fp32", Cause.FP16_OVERFLOW),
        "Conv_2": ("fp32", Cause.FP16_OVERFLOW),
        "Conv_4": ("fp32", Cause.FP16_OVERFLOW),
        "Conv_5": ("fp16", Cause.KEPT_NAMED),
    }
    texts = [str(warning.message) for warning in caught]
    assert [text.partition(" ")[0] for text in texts] == ["'Conv_0'", "'Conv_2'", "'Conv_4'"]
    assert texts[0].startswith("'Conv_0' stays in FP32: FP16 would overflow: 'a' reaches 1")
    assert texts[2] == "'Conv_4' stays in FP32: FP16 would overflow: 'its weights' reaches 7e+04, over 65504"
    int8 = insert_qdq(model, given.graph.placement.following(plan), given.ranges)
    for batch in ImageStream(paths, CONFIG.input):
        expected = OnnxRunner(model)(batch.images)["y"]
        got = OnnxRunner(to_half(int8, plan.names("fp16")))(batch.images)["y"]
        np.testing.assert_allclose(got, expected, atol=0.01 * expected.max())


def test_an_int8_convolution_whose_output_overflows_fp16_has_the_reason_in_its_entry(model, paths):
    given = prepared(model, paths)
    graph = replace(given.graph, flow=DataFlow(half=True, weights=("tensor",), fused=False))
    given = replace(given, calibrated=replace(given.calibrated, graph=graph))
    with pytest.warns(TrtdetWarning) as caught:
        plan = given.without_overflow(place(model).plan)
    assert str(caught[0].message).startswith("'Conv_0' writes float32: FP16 would overflow: 'a' reaches 1")
    entry = plan.entries["Conv_0"]
    assert (entry.precision, entry.reason, entry.cause) == ("int8", "convolution", Cause.QUANTIZABLE)
    assert entry.float_output.startswith("FP16 would overflow: 'a' reaches 1")
    assert not plan.entries["Conv_5"].float_output
    # What a file said of other images does not stay.
    assert not entry.edited_from(place(model).plan.entries["Conv_0"]).float_output


def test_many_layers_with_the_same_reason_are_one_line_with_their_number(model, paths, monkeypatch):
    reasons = {f"Mul_{number}": f"FP16 would lose it: 'm{number}' reaches only 1e-6" for number in range(300)}
    monkeypatch.setattr(half, "half_parts", lambda *given, **named: half.HalfParts(reasons=reasons))
    given = prepared(model, paths)
    with pytest.warns(TrtdetWarning) as caught:
        given.without_overflow(kept(model, "Conv_0"))
    (text,) = (str(warning.message) for warning in caught)
    assert text.startswith("300 layers: each stays in float32; the first: 'Mul_0' stays in float32: FP16 would lose it")


def test_what_fits_stays_in_fp16_without_a_warning(model, paths):
    plan = kept(model, "Conv_5")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert prepared(model, paths).without_overflow(plan) == plan


def test_without_images_or_histograms_what_cannot_be_checked_is_counted(model, paths):
    given = prepared(model, paths, histograms=False)
    with pytest.warns(TrtdetWarning, match=r"without images \d tensors that run in FP16 cannot be checked"):
        plan = given.without_overflow(kept(model, "Conv_0"))
    assert plan.entries["Conv_0"].precision == "fp16"


def test_a_float_network_is_checked_where_images_are_given(model, paths):
    graph = prepared(model, paths).graph
    with pytest.warns(TrtdetWarning) as caught:
        checked = float_network(graph, "fp16", Selection(paths))
    assert str(caught[0].message).startswith("'Conv_0' stays in FP32: FP16 would overflow: 'a' reaches")
    assert checked.plan.names("fp32") == ("Conv_0", "Conv_2", "Conv_4")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        unchecked = float_network(graph, "fp16")
        assert unchecked.plan.names("fp32") == float_network(graph, "fp32", Selection(paths)).plan.names("fp16") == ()
    for batch in ImageStream(paths, CONFIG.input):
        expected = OnnxRunner(model)(batch.images)["y"]
        np.testing.assert_allclose(OnnxRunner(checked.model)(batch.images)["y"], expected, atol=0.01 * expected.max())
        assert not np.isfinite(OnnxRunner(unchecked.model)(batch.images)["y"]).all()
