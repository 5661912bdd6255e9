"""Bundles of models that are quantised already keep their integers and scales."""

from dataclasses import replace

import numpy as np
import onnx
import pytest
from models import CONVOLUTIONS, small_detector
from onnxruntime.quantization import QuantFormat, QuantType, quantize_dynamic
from quantized import by_onnxruntime, layers, noise, run, with_pairs

import trtdet
from trtdet.backends import OnnxRunner
from trtdet.backends.libraries import library_named
from trtdet.calibration import Ranges
from trtdet.config import load_config
from trtdet.detection.heads import decode
from trtdet.errors import ConfigError, ModelError, TrtdetWarning
from trtdet.quantization import PrecisionPlan

CONFIG = load_config("shapes")
OPTIONS = trtdet.BuildOptions(backend="onnxruntime", guard="off", nms=trtdet.NmsOptions(mode="host"))
LEFT = "/head2/boxes/Conv"


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """Quantised models by the tool that writes so; ModelOpt's leaves a convolution in float."""
    folder, model = tmp_path_factory.mktemp("given"), small_detector(width=16)
    models = {
        "onnxruntime": by_onnxruntime(model, folder),
        "pytorch-quantization": with_pairs(model, "pytorch-quantization"),
        "modelopt": with_pairs(model, "modelopt", skip=[LEFT]),
    }
    for name, each in models.items():
        onnx.save(each, folder / f"{name}.onnx")
    return {name: (folder / f"{name}.onnx", each) for name, each in models.items()}


def built(path, output, options=OPTIONS):
    bundle = trtdet.build(path, CONFIG, output, options).bundle
    return bundle, onnx.load(bundle.file("int8.onnx"))


def distances(model, network):
    """Mean differences of scores: of the quantised to the float model, of a network to the quantised model, and of the
    network to the float model."""
    image = noise(9)[-1]
    own, exact = (decode([run(each, image)["output"]], CONFIG)[1] for each in (model, small_detector(width=16)))
    scores = OnnxRunner(network).as_written()(image)["scores"]  # FP16 as of every version of onnxruntime
    return [np.abs(first - second).mean() for first, second in ((exact, own), (scores, own), (scores, exact))]


# Without images, nothing says whether FP16 holds the values of the layers that stay in float.
@pytest.mark.filterwarnings("ignore:without images")
@pytest.mark.parametrize("tool", ["pytorch-quantization", "modelopt", "onnxruntime"])
def test_integers_and_scales_are_those_of_the_model(given, tmp_path, tool):
    path, model = given[tool]
    bundle, network = built(path, tmp_path / "b")
    own, written = layers(model), layers(network)
    assert own.keys() == written.keys()
    assert len(own) == CONVOLUTIONS - (tool == "modelopt")
    for name, (step, integers, scales) in own.items():
        assert written[name][0].dtype == np.float32
        assert written[name][0] == step
        assert np.array_equal(written[name][1], integers)
        assert np.array_equal(written[name][2], scales)
    quantising, building, loss = distances(model, network)
    if tool == "onnxruntime":  # it quantises head outputs and what activations read too
        assert loss < 0.5 * quantising
    else:
        assert building < 1e-3 * quantising
    plan = PrecisionPlan.load(bundle.file("plan.json"))
    assert plan.counts() == {"int8": len(own), "fp16": CONVOLUTIONS - len(own), "fp32": 0}
    if tool == "modelopt":
        assert plan.entries[LEFT].reason == "not quantised in the model"
    quantization = bundle.manifest.quantization
    assert (quantization.source, quantization.images, quantization.corrections) == ("model", None, ())
    assert {pair.kind for pair in quantization.pairs} == ({"blocks-fusion"} if tool == "onnxruntime" else set())
    assert "histograms.npz" not in bundle.manifest.files
    assert trtdet.build(path, CONFIG, tmp_path / "b", OPTIONS).up_to_date


@pytest.mark.filterwarnings("ignore:without images")
def test_a_layer_can_be_kept_in_fp16(given, tmp_path):
    path, model = given["pytorch-quantization"]
    plan = trtdet.PlanOptions(keep_fp16=("/down1/Conv",))
    _, network = built(path, tmp_path / "b", replace(OPTIONS, plan=plan))
    assert layers(model).keys() - layers(network).keys() == {"/down1/Conv"}


def test_other_scales_and_the_same_weights_are_another_bundle(given, tmp_path):
    path, model = given["pytorch-quantization"]
    built(path, tmp_path / "b")
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    scale = next(tensor for tensor in changed.graph.initializer if tensor.name == "images/scale")
    scale.CopyFrom(onnx.numpy_helper.from_array(np.float32(2.5), "images/scale"))
    onnx.save(changed, tmp_path / "changed.onnx")
    _, network = built(tmp_path / "changed.onnx", tmp_path / "b", replace(OPTIONS, force=True))
    assert layers(network)["/stem/Conv"][0] == 2.5


def test_rescaling_chooses_the_ranges_by_the_rule_and_keeps_the_integers(given, images, tmp_path):
    path, model = given["modelopt"]
    calibration = trtdet.CalibrationOptions(images=images, rule="minmax", check_input=False, rescale=True)
    options = replace(OPTIONS, calibration=calibration)
    bundle, network = built(path, tmp_path / "b", options)
    ranges = Ranges.load(bundle.file("ranges.json"))
    assert ranges.rule == bundle.manifest.quantization.calibrator == "minmax"
    assert ranges.images == 12
    own, written = layers(model), layers(network)
    assert all(np.array_equal(written[name][1], own[name][1]) for name in own)
    assert all(written[name][0] != own[name][0] for name in own if name != "/stem/Conv")
    assert written["/down1/Conv"][0] == pytest.approx(ranges.tensors["/depthwise0/act/Mul_output"].scale, rel=1e-3)


@pytest.mark.filterwarnings("ignore:without images")
@pytest.mark.tensorrt
def test_tensorrt_rtx_builds_the_same_integers_with_fp16_scales(given, tmp_path):
    pytest.importorskip("tensorrt_rtx")
    path, model = given["pytorch-quantization"]
    done = trtdet.build(path, CONFIG, tmp_path / "b", replace(OPTIONS, backend="tensorrt-rtx", sms=(86,)))
    assert done.audit is not None
    assert done.audit.int8 == CONVOLUTIONS
    network = onnx.load(done.bundle.file("int8.onnx"))
    own, written = layers(model), layers(network)
    for name, (step, integers, _) in own.items():
        assert written[name][0].dtype == np.float16
        assert written[name][0] == np.float16(step)
        assert np.array_equal(written[name][1], integers)
    assert [pair.kind for pair in done.bundle.manifest.quantization.pairs] == ["fp16-scales"]
    quantising, building, _ = distances(model, network)
    assert building < 0.5 * quantising


def test_fp16_needs_no_pairs(given, tmp_path):
    bundle = trtdet.build(given["onnxruntime"][0], CONFIG, tmp_path / "b", replace(OPTIONS, precision="fp16")).bundle
    network = onnx.load(bundle.file("fp16.onnx"))
    assert not layers(network)
    assert library_named("onnxruntime").new_backend().capabilities.name == bundle.manifest.backend.name


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"effort": "quick"}, "leave --effort out"),
        ({"plan": trtdet.PlanOptions(int8_all=True)}, "leave --int8-all out"),
        ({"calibration": trtdet.CalibrationOptions(rule="minmax")}, "leave --calib out.*rescale=true chooses"),
        ({"calibration": trtdet.CalibrationOptions(rescale=True)}, "INT8 needs calibration images"),
    ],
)
def test_what_the_model_decides_cannot_be_asked_for(given, tmp_path, changes, words):
    with pytest.raises(ConfigError, match=words):
        built(given["modelopt"][0], tmp_path / "b", replace(OPTIONS, **changes))


@pytest.mark.filterwarnings("ignore:without images")
@pytest.mark.parametrize("written", [QuantFormat.QDQ, QuantFormat.QOperator])
def test_zero_points_become_symmetric_pairs_of_the_same_range(tmp_path, written):
    """As onnxruntime quantises by default, in both of its formats."""
    model = by_onnxruntime(
        small_detector(width=16),
        tmp_path,
        quant_format=written,
        op_types_to_quantize=["Conv"],
        activation_type=QuantType.QUInt8,
        extra_options={},
    )
    bundle, network = built(tmp_path / "quantized.onnx", tmp_path / "b")
    assert bundle.manifest.precision.int8 == CONVOLUTIONS
    assert "asymmetric" in {pair.kind for pair in bundle.manifest.quantization.pairs}
    quantising, building, loss = distances(model, network)
    assert loss < quantising
    assert building < 2 * quantising


def test_a_dynamically_quantised_model_is_built_as_a_float_model(tmp_path, images):
    onnx.save(small_detector(width=16), tmp_path / "float.onnx")
    quantize_dynamic(tmp_path / "float.onnx", tmp_path / "dynamic.onnx", weight_type=QuantType.QUInt8)
    calibration = trtdet.CalibrationOptions(images=images, check_input=False)
    plan = trtdet.PlanOptions(int8_all=True)
    options = replace(OPTIONS, calibration=calibration, effort="none", plan=plan)
    with pytest.warns(TrtdetWarning, match="scales that are computed from each image"):
        bundle, network = built(tmp_path / "dynamic.onnx", tmp_path / "b", options)
    assert bundle.manifest.quantization.source == "trtdet"
    assert bundle.manifest.precision.int8 == CONVOLUTIONS
    exact, scores = (
        decode([run(small_detector(width=16), noise(9)[-1])["output"]], CONFIG)[1],
        run(network, noise(9)[-1])["scores"],
    )
    assert np.abs(scores - exact).mean() < 0.1 * np.abs(exact).mean()


def test_a_float_model_cannot_be_rescaled(tmp_path, images):
    onnx.save(small_detector(), tmp_path / "m.onnx")
    options = replace(OPTIONS, calibration=trtdet.CalibrationOptions(images=images, rescale=True))
    with pytest.raises(ConfigError, match="calibration.rescale=true is about a model that is quantised already"):
        built(tmp_path / "m.onnx", tmp_path / "b", options)


def test_prepare_wants_a_float_model(given, tmp_path, images):
    build = trtdet.BuildOptions(calibration=trtdet.CalibrationOptions(images=images))
    options = trtdet.PrepareOptions(target="tensorrt-10.3", build=build)
    with pytest.raises(ModelError, match="is quantised already, so that it has one plan"):
        trtdet.prepare(given["modelopt"][0], CONFIG, tmp_path / "b", options)
