"""Layers that stay in FP16 by default, from the options to the bundle."""

import json

import onnx
import pytest
from models import CONVOLUTIONS, DEPTHWISE, SMALL_MODEL, for_onnxruntime

from trtdet.building import build, sensitivity
from trtdet.building.ranges import Selection
from trtdet.bundle import Bundle
from trtdet.cli import main
from trtdet.config import load_config
from trtdet.demo import shapes
from trtdet.errors import ConfigError, TrtdetWarning
from trtdet.experiments.grid import Group, SweepGrid
from trtdet.options import SensitivityOptions, SweepOptions, changed
from trtdet.quantization import Cause, PrecisionPlan

CONFIG = load_config("shapes")
HALVING = ("/down1/Conv", "/down2/Conv")


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return shapes.generate(tmp_path_factory.mktemp("shapes"), "calibration", 6).images


@pytest.fixture(scope="module")
def options(images):
    return for_onnxruntime(effort="none", rule="minmax", images=images)


@pytest.fixture(scope="module")
def built(wide, options, tmp_path_factory):
    return build(wide, CONFIG, tmp_path_factory.mktemp("bundles") / "default", options).bundle


def quantized(bundle: Bundle) -> tuple[str, ...]:
    """The convolutions that read INT8, sorted."""
    graph = onnx.load(str(bundle.file("int8.onnx"))).graph
    makers = {name: node.op_type for node in graph.node for name in node.output}
    convs = (node for node in graph.node if node.op_type == "Conv")
    return tuple(sorted(node.name for node in convs if makers.get(node.input[0]) == "DequantizeLinear"))


def test_the_plan_of_a_bundle_says_what_stays_in_fp16_and_why(built):
    plan = PrecisionPlan.load(built.file("plan.json"))
    assert plan.names("int8") == HALVING == quantized(built)
    causes = [entry.cause for entry in plan.entries.values()]
    assert [causes.count(cause) for cause in (Cause.FEW_CHANNELS, Cause.DEPTHWISE, Cause.HEAD_OUTPUT)] == [1, 2, 6]
    assert plan.entries["/stem/Conv"].reason.startswith("3 input channels")
    counts = built.manifest.precision
    assert (counts.int8, counts.fp16, counts.fp32) == (2, CONVOLUTIONS - 2, 0)
    assert built.manifest.command["plan"]["int8_all"] is False


def test_every_convolution_can_be_asked_for(wide, options, tmp_path, built):
    every = build(wide, CONFIG, tmp_path / "b", changed(options, int8_all=True)).bundle
    assert len(quantized(every)) == CONVOLUTIONS
    assert every.manifest.command["plan"]["int8_all"] is True
    assert every.manifest.content_hash != built.manifest.content_hash
    # Another plan needs no other histograms.
    assert every.manifest.quantization.histograms_key == built.manifest.quantization.histograms_key
    with pytest.raises(ConfigError, match="--int8-all is about INT8; leave it out with --fp16"):
        build(wide, CONFIG, tmp_path / "f", changed(options, precision="fp16", int8_all=True))


def test_an_edited_plan_puts_into_int8_what_stays_in_fp16_by_default(wide, options, tmp_path, built):
    edited = json.loads(built.file("plan.json").read_text())
    for name, precision in (("/depthwise0/Conv", "int8"), ("/down1/Conv", "fp16")):
        edited["entries"][name]["precision"] = precision
    (tmp_path / "plan.json").write_text(json.dumps(edited))
    asked = changed(options, effort="round,bias", keep_fp16=tmp_path / "plan.json")
    done = build(wide, CONFIG, tmp_path / "b", asked).bundle
    assert quantized(done) == ("/depthwise0/Conv", "/down2/Conv")
    entries = PrecisionPlan.load(done.file("plan.json")).entries
    assert [entries[name].cause for name in ("/depthwise0/Conv", "/down1/Conv")] == [Cause.EDITED] * 2
    assert entries["/depthwise1/Conv"].cause is Cause.DEPTHWISE
    # Corrections are made for what is in INT8, and for nothing else.
    corrected = {name for name, entry in entries.items() if entry.corrections}
    assert "/depthwise0/Conv" in corrected <= {"/depthwise0/Conv", "/down2/Conv"}


def test_what_is_kept_comes_on_top(wide, options, tmp_path):
    kept = build(wide, CONFIG, tmp_path / "b", changed(options, keep_fp16=1, rank_images=2)).bundle
    assert len(quantized(kept)) == 1
    with pytest.raises(ConfigError, match="--keep-fp16 3: the model has 2 convolutions in INT8 to keep"):
        build(wide, CONFIG, tmp_path / "c", changed(options, keep_fp16=3))
    group = build(wide, CONFIG, tmp_path / "d", changed(options, keep_fp16=("depthwise",))).bundle
    assert quantized(group) == HALVING
    every = changed(options, keep_fp16=("depthwise",), int8_all=True)
    assert len(quantized(build(wide, CONFIG, tmp_path / "e", every).bundle)) == CONVOLUTIONS - DEPTHWISE


def test_the_command_says_what_stays_in_fp16(wide, images, tmp_path, capsys):
    command = ["build", str(wide), "--config", "shapes", "--images", str(images), "--backend", "onnxruntime"]
    command += ["--effort", "none", "-o", str(tmp_path / "b")]
    said = "2 depthwise, 1 with few channels on a side, 6 outputs of heads (plan.json has each; --int8-all)"
    assert main(command) == 0
    assert f"in FP16 by default, as INT8 makes them no faster: {said}\n" in capsys.readouterr().out
    assert main([*command, "--int8-all"]) == 0
    assert "by default" not in capsys.readouterr().out


def test_the_ranking_is_of_what_is_in_int8(wide, images):
    asked = changed(SensitivityOptions(), rule="minmax", images=images, effort="none", rank_images=2)
    found, every = (sensitivity(wide, CONFIG, options) for options in (asked, changed(asked, int8_all=True)))
    assert {layer.name for layer in found.layers} == set(HALVING)
    assert len(every.layers) == CONVOLUTIONS
    assert found.macs == every.macs
    # A ranking of the ones is none of the others.
    assert found.key != every.key
    with pytest.raises(ConfigError, match="nothing to rank; rank those that stay in FP16 by default with --int8-all"):
        sensitivity(SMALL_MODEL, CONFIG, asked)


def test_a_model_that_int8_makes_no_faster_is_built_with_a_warning(options, tmp_path):
    said = r"INT8 has nothing to do: all 11 convolutions .* the first '/stem/Conv' \(3 input channels.*--int8-all"
    with pytest.warns(TrtdetWarning, match=said):
        done = build(SMALL_MODEL, CONFIG, tmp_path / "b", options).bundle
    assert quantized(done) == ()
    assert done.manifest.precision.fp16 == CONVOLUTIONS


def test_rows_of_a_sweep_are_told_apart(wide, images, tmp_path):
    split = shapes.generate(tmp_path, "val", 2)
    axes = changed(SweepOptions(), images=images, val_images=split.images, annotations=split.annotations)

    def name(options: SweepOptions, group: Group) -> str:
        return SweepGrid(wide, CONFIG, tmp_path, options, Selection(), None).name(group, 0, CONFIG.nms)  # type: ignore[arg-type]

    every = changed(axes, int8_all=True)
    assert name(axes, Group("minmax")) != name(every, Group("minmax"))
    assert name(axes, Group()) == name(every, Group())
