"""What is handed to TensorRT and kept of what it gives, with a stand-in for TensorRT and the driver: implicit
quantisation, caches, limits, compatibility, and whether INT8 was worth it."""

import json
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from models import CONVOLUTIONS, SILUS
from standin.machine import Machine, plugin_library

from trtdet.bundle import Bundle
from trtdet.calibration import cache
from trtdet.config import load_config
from trtdet.data import ImageStream, evenly, find_images

QUICK = ["--config", "shapes", "--num-images", 6, "--effort", "none", "--silu", "keep", "--backend", "tensorrt"]
OLD = "8.6.0"


def build(machine: Machine, model: Path, images: Path, place: Path, *arguments: object, **settings: Any) -> Bundle:
    every = [] if {"--fp16", "--fp32"} & set(arguments) else ["--int8-all"]
    command = ["build", model, *QUICK, *every, "--images", images, "-o", place, "--guard", "off"]
    done = machine.trtdet(*command, *arguments, **settings)
    assert done.code == 0, done.err
    return Bundle(place)


@pytest.fixture
def make(machine, model, calibration_images, tmp_path):
    """Builds a bundle of that name."""

    def call(name: str, *arguments: object, **settings: Any) -> Bundle:
        return build(machine, model, calibration_images, tmp_path / name, *arguments, **settings)

    return call


def told(bundle: Bundle) -> dict[str, Any]:
    """What the stand-in was told of an engine when it built it."""
    data = bundle.engine.read_bytes()
    (length,) = struct.unpack_from("<I", data, 8)
    found: dict[str, Any] = json.loads(data[12 : 12 + length])
    return found


@pytest.fixture(scope="module")
def implicit(machine, model, calibration_images, tmp_path_factory):
    """Quantised by TensorRT 8.6, with trtdet's ranges."""
    place = tmp_path_factory.mktemp("implicit") / "b"
    arguments = ["--quantization", "implicit", "--calib", "percentile"]
    return build(machine, model, calibration_images, place, *arguments, version=OLD)


def test_an_implicit_bundle_holds_a_float_model_and_ranges_beside_it(implicit):
    manifest = implicit.manifest
    assert (manifest.quantization.mode, manifest.quantization.source) == ("implicit", "trtdet")
    assert (manifest.quantization.calibrator, manifest.precision.int8) == ("percentile", CONVOLUTIONS)
    graph = onnx.load(str(implicit.model)).graph
    assert implicit.model.name == "float.onnx"
    assert not [node.op_type for node in graph.node if "Quantize" in node.op_type]
    facts = told(implicit)
    assert facts["calibrated"]
    assert {"INT8", "FP16", "OBEY_PRECISION_CONSTRAINTS"} <= set(facts["flags"])


def test_every_tensor_before_a_convolution_has_a_range_and_the_rest_stays_in_float(implicit):
    text = implicit.file("calibration.cache").read_text()
    scales = cache.read(text, version=8600)
    graph = onnx.load(str(implicit.model)).graph
    plan = json.loads(implicit.file("plan.json").read_text())["entries"]
    inside = {name for node in graph.node if node.name in plan for name in (node.input[0], node.output[0])}
    assert inside <= set(scales)
    # The activation functions between them as well: without a range they would run in float.
    sigmoids = [node.output[0] for node in graph.node if node.op_type == "Sigmoid"]
    assert sum(name in scales for name in sigmoids) == SILUS
    ranges = json.loads(implicit.file("ranges.json").read_text())["tensors"]
    for name, scale in scales.items():
        assert scale == pytest.approx(ranges[name]["amax"] / 127, rel=1e-6)
    outside = [node.name for node in graph.node if not set(node.output) & set(scales)]
    precisions = told(implicit)["precisions"]
    decoding = [name for name in outside if name.startswith("trtdet/decode/Mul")]
    assert decoding
    assert all(precisions[name] == "FLOAT" for name in decoding)
    stored = told(implicit)["stored"]
    assert all(stored[name] == {"0": "FLOAT"} for name in decoding)
    (suppression,) = [node.name for node in graph.node if node.op_type == "EfficientNMS_TRT"]
    assert precisions[suppression] == "FLOAT"
    assert not {name for name in precisions if name in plan and plan[name]["precision"] == "int8"}


def test_what_is_implicit_can_be_scored_on_its_engine_alone(implicit, machine, labelled):
    command = ["eval", implicit.path, *labelled]
    machine.trtdet(*command, driver=False).refused(
        "INT8 is in its engine alone, which cannot be run here, as", "no CUDA driver"
    )
    refused = machine.trtdet(*command, "--runtime", "onnxruntime", version=OLD)
    assert "--runtime onnxruntime leaves out" in refused.message.replace("is what ", "")
    scored = machine.trtdet(*command, "--json", version=OLD).ok
    assert scored.json["ran_on"].startswith("TensorRT 8.6.0 (")


def test_a_calibration_cache_is_taken_and_that_of_another_model_or_version_refused(
    implicit, machine, model, make, tmp_path
):
    text = implicit.file("calibration.cache").read_text()
    given = tmp_path / "given.cache"
    given.write_text(text)
    arguments = ["--quantization", "implicit", "--set", f"calibration.cache={given}"]
    made = make("b", *arguments, version=OLD)
    assert made.manifest.quantization.source == "cache"
    assert made.file("calibration.cache").read_text() == text
    assert "ranges.json" not in made.manifest.files

    def refusal(version: str = OLD) -> str:
        done = machine.trtdet("build", model, *QUICK, *arguments, "-o", tmp_path / "no", version=version)
        assert done.code == 1
        assert not (tmp_path / "no").exists()
        return done.message

    assert "is of TensorRT 8600, and 100900 is what will read it" in refusal("10.9.0")
    lines = text.splitlines()
    given.write_text("\n".join([lines[0], *lines[5:]]) + "\n")
    assert "is of another model: 4 of the " in refusal()
    given.write_text(text.replace("EntropyCalibration2", "MinMaxCalibration"))
    assert "is of the algorithm MinMaxCalibration" in refusal()
    given.unlink()
    assert "does not exist" in refusal()


@pytest.mark.parametrize(
    ("rule", "batch", "size", "order"),
    [
        ("minmax", "4", None, [0, 1, 2, 3, 4, 5, 4, 5]),
        ("entropy", "1:2:4", 2, [0, 1, 2, 3, 4, 5]),
        ("percentile", "1:4:4", 4, [0, 1, 2, 3, 4, 5, 4, 5]),
    ],
)
def test_tensorrts_own_calibrators_see_every_image_once(model, calibration_images, make, rule, batch, size, order):
    """The last batch is filled up with its own images. A dynamic network is calibrated at the batch of the images."""
    pytest.importorskip("polygraphy", reason="Polygraphy is not installed: pip install 'trtdet[trt]'")
    arguments = ["--quantization", "implicit", "--set", "calibration.calibrator=tensorrt", "--calib", rule]
    arguments += ["--batch", batch]
    made = make("b", *arguments, version=OLD)
    assert (made.manifest.quantization.source, made.manifest.quantization.calibrator) == ("tensorrt", rule)
    paths = evenly(find_images(calibration_images), 6)
    images = [batch.images[0] for batch in ImageStream(paths, load_config("shapes").input, batch_size=1)]
    means = [float(image.mean(dtype=np.float64)) for image in images]
    assert len({round(mean, 3) for mean in means}) == len(means)  # so that one image cannot stand for another
    assert told(made)["calibration_images"] == pytest.approx([means[index] for index in order])
    profile = told(made)["calibration_profile"]
    assert profile == (size and {"images": [[size, *made.manifest.input.shape.opt[1:]]] * 3})
    # The stand-in writes the largest value it was given for the network's input, over all batches.
    (scale,) = cache.read(made.file("calibration.cache").read_text()).values()
    assert scale == pytest.approx(max(float(np.abs(image).max()) for image in images) / 127)


@pytest.mark.parametrize(
    ("arguments", "version", "message"),
    [
        ("--quantization implicit", "11.0.0", "has no calibrators, so it cannot quantize implicitly; use --quant"),
        (
            "--quantization implicit --set calibration.calibrator=tensorrt --calib mse",
            OLD,
            "for --calib mse; allowed with --set calibration.calibrator=tensorrt: minmax, entropy, percentile",
        ),
        ("--quantization implicit --fp16", OLD, "--quantization implicit is about INT8"),
        ("--set calibration.calibrator=tensorrt", OLD, "calibration.calibrator belongs to --quantization implicit"),
        ("--quantization implicit --effort bias", OLD, "corrections are made in the Q/DQ model"),
        ("--set engine.embed_plugins=true", OLD, "engine.embed_plugins needs the libraries"),
        ("--set engine.tactic_sources=CUDDN", OLD, "has no tactic source 'CUDDN'; allowed: EDGE_MASK_CONV"),
    ],
)
def test_what_does_not_go_together_is_said_before_anything_is_done(
    machine, model, calibration_images, tmp_path, arguments, version, message
):
    command = ["build", model, *QUICK, "--images", calibration_images, "-o", tmp_path / "b", *arguments.split()]
    machine.trtdet(*command, version=version).refused(message)
    assert not (tmp_path / "b").exists()


def test_a_builder_is_told_of_limits_and_compatibility(machine, calibration_images, make, tmp_path):
    library = plugin_library(tmp_path, "TRT_SiLU", "TRT_HardSwish")
    arguments = ["--silu", "plugin", "--set", "engine.workspace=64", "engine.version_compatible=true"]
    arguments += ["engine.hardware_compatible=true", "engine.tactic_sources=JIT_CONVOLUTIONS"]
    arguments += [f"engine.plugins={library}", "engine.embed_plugins=true"]
    made = make("b", *arguments, version="10.9.0", sm=86)
    facts = told(made)
    assert (facts["pools"]["WORKSPACE"], facts["hardware"]) == (64 << 20, "AMPERE_PLUS")
    assert "VERSION_COMPATIBLE" in facts["flags"]
    assert facts["embedded"] == ["TRT_HardSwish", "TRT_SiLU"]
    backend = made.manifest.backend
    assert (backend.version_compatible, backend.hardware_compatible) == (True, True)
    (part,) = backend.plugins
    assert part.embedded
    # A service on a later GPU, with a later library and without the plugin's file, runs it.
    assert made.manifest.files[part.file] == part.sha256
    run = machine.trtdet("predict", made.path, find_images(calibration_images)[0], "-o", tmp_path / "seen", sm=120).ok
    assert "TensorRT 10.9.0" in run.out


@pytest.mark.parametrize("version", [OLD, "10.9.0"])
def test_a_library_without_the_plugin_is_named_with_the_parsers_words(
    machine, model, calibration_images, make, tmp_path, version
):
    library = plugin_library(tmp_path, "TRT_Other")
    arguments = ["--images", calibration_images, "-o", tmp_path / "b", "--silu", "plugin"]
    arguments += ["--set", f"engine.plugins={library}"]
    done = machine.trtdet("build", model, *QUICK, *arguments, version=version)
    assert done.code == 1
    where = r"node '.*' \(TRT_SiLU\): "
    words = f"the parser refused the model: {where}.*Plugin not found.*; an operator of the model is unknown to this"
    assert re.search(words, done.message), done.message
    assert not (tmp_path / "b").exists()
    # What the builder said is kept until a build succeeds.
    kept = tmp_path / "b.failed-build.log"
    assert done.message.endswith(f"; the builder's messages are in '{kept}'")
    assert re.search(r"^the parser refused the model: node .*Plugin not found", kept.read_text(), re.MULTILINE)
    make("b", version=version)
    assert not kept.exists()


@pytest.mark.parametrize(("version", "flags"), [(OLD, {"FP16"}), ("10.9.0", set()), ("11.1.0", set())])
def test_a_float_engine_has_the_precisions_it_may_run_in(
    machine, model, calibration_images, make, tmp_path, version, flags
):
    """FP16 is no flag of the later versions. Float32 may run in TF32, which is said."""
    half = make("half", "--fp16", version=version)
    usual = make("usual", "--fp32", version=version)
    exact = make("exact", "--fp32", "--set", "engine.tf32=false", version=version)
    assert {"INT8", "FP16"} & set(told(half)["flags"]) == flags
    assert not {"INT8", "FP16"} & set(told(usual)["flags"])
    assert ("TF32" in told(usual)["flags"], usual.manifest.backend.tf32) == (True, True)
    assert ("TF32" in told(exact)["flags"], exact.manifest.backend.tf32) == (False, False)
    arguments = [*QUICK, "--images", calibration_images, "--fp32", "-o", usual.path]
    again = machine.trtdet("build", model, *arguments, version=version)
    assert "up to date" in again.out
    assert "FP32 (TF32 where the GPU has it) as built" in again.out
    quick = ["--seconds", 0.02, "--warm-up", 0, "--min-runs", 20]
    timed = machine.trtdet("bench", usual.path, exact.path, *quick, version=version).ok
    (line,) = [line for line in timed.out.splitlines() if "TF32" in line]
    assert line.startswith(f"{usual.path}: ")
    assert line.endswith("; its float32 convolutions may run in TF32 (engine.tf32=false avoids it)")


def test_suppression_that_costs_the_cuda_graph_is_told_of(machine, model, calibration_images, tmp_path):
    reason = "the data decide when its Loop ends; --nms efficient or host lets the engine be launched as a CUDA graph"
    for nms, lines, expected in (
        ("native", [f"NMS native: {reason}"], ("native", reason)),
        ("auto", [], ("efficient", "")),
    ):
        arguments = [*QUICK, "--images", calibration_images, "--fp32", "-o", tmp_path / "b", "--nms", nms]
        done = machine.trtdet("build", model, *arguments, version="10.12.0").ok
        assert [line for line in done.out.splitlines() if line.startswith("NMS ")] == lines
        manifest = Bundle(tmp_path / "b").manifest
        assert (manifest.nms.mode, manifest.nms.reason) == expected


def test_without_suppression_the_engine_ends_in_a_topk_and_is_captured(machine, calibration_images, make, tmp_path):
    (tmp_path / "free.yaml").write_text("extends: shapes\nname: free\nnms: none\n")
    common = ["--fp16", "--set", "nms.score_threshold=0.3"]
    free = make("free", "--config", tmp_path / "free.yaml", *common, "--set", "nms.max_detections=20")
    nms = free.manifest.nms
    assert (nms.mode, nms.reason, nms.thresholds.suppresses) == ("native", "", False)
    counts = []
    for bundle in (free, make("suppressed", *common)):
        assert machine.trtdet("predict", bundle.path, calibration_images, "-o", tmp_path / "seen").ok
        lines = (tmp_path / "seen" / "detections.jsonl").read_text().splitlines()
        counts.append([len(json.loads(line)["detections"]) for line in lines])
    assert all(free >= kept for free, kept in zip(*counts, strict=True)) and sum(counts[0]) > 1.2 * sum(counts[1])
    assert max(counts[0]) <= 20


def test_what_is_learnt_of_kernels_is_kept_beside_the_bundle(make, tmp_path):
    kept = tmp_path / "b.timing-cache"
    make("b", "--fp32")
    first = kept.read_bytes()
    assert first.startswith(b"timings of 10.9.0")
    make("b", "--fp16")
    assert kept.read_bytes().startswith(b"timings of 10.9.0")
    kept.write_bytes(b"spoilt")
    make("b", "--fp32")
    assert kept.read_bytes() == first
    other = tmp_path / "elsewhere"
    make("c", "--fp32", "--set", f"engine.timing_cache={other}")
    assert other.read_bytes() == first
    assert not (tmp_path / "c.timing-cache").exists()


def test_a_dynamic_batch_shares_its_profile_among_lanes_in_every_version(machine, make):
    for version in ("10.9.0", OLD):
        # The reference of EfficientNMS_TRT, which the stand-in runs, takes longer than all the rest.
        bundle = make(version, "--fp32", "--batch", "1:2:3", "--nms", "host", version=version)
        assert told(bundle)["sharing"]
        shape = bundle.manifest.input.shape
        assert (shape.min[0], shape.opt[0], shape.max[0]) == (1, 2, 3)
    quick = ["--seconds", 0.01, "--warm-up", 0, "--min-runs", 2, "--json"]
    done = machine.trtdet("bench", bundle.path, "--batch", 1, 3, "--streams", 2, *quick, version=OLD).ok
    assert [point["batch"] for point in done.json["targets"][0]["points"]] == [1, 3]
    assert done.json["machine"]["before"]["clocks"]["sm_mhz"] > 0


WEIGH = """
import json, sys
from dataclasses import replace
from pathlib import Path
import trtdet
from trtdet.performance import BenchOptions
from trtdet.building import build
from trtdet.options import BuildOptions, changed
from trtdet.building import comparison
from trtdet.building.job import Job

model, images, val, annotations, place, backend = map(Path, sys.argv[1:7])
quantization, guard = sys.argv[7:]
config = trtdet.load_config("shapes")
options = changed(
    BuildOptions(), images=images, num_images=6, check_input=False, effort="none", backend=str(backend), val_images=val,
    annotations=annotations, silu="keep", mode="host", guard="off", quantization=quantization, int8_all=True,
)
bundle = build(model, config, place, options).bundle
options = changed(options, guard=float(guard) or "warn")
# The stand-in's times do not vary, so that a moment is enough.
comparison.BenchOptions = lambda batches, seconds: BenchOptions(batches, seconds=0.05, warm_up=0, min_runs=20)
found = comparison.compare_with_fp16(Job(model, config, place, options), bundle)
print(json.dumps({**found.as_dict(), "words": str(found)}))
"""


@pytest.fixture
def weighed(machine, model, calibration_images, validation, tmp_path):
    def call(backend: str, quantization: str = "explicit", guard: float = 0, **settings: Any):
        arguments = [model, calibration_images, validation.images, validation.annotations, tmp_path / "b", backend]
        result = machine.python(WEIGH, *arguments, quantization, guard, **settings).json
        return result, Bundle(tmp_path / "b")

    return call


def test_an_int8_engine_is_weighed_against_fp16(weighed):
    found, bundle = weighed("tensorrt")
    assert (found["against"], found["ran_on"]) == ("fp16", "TensorRT 10.9.0 (Stand-in GPU)")
    low, ratio, high = (found["latency"][key] for key in ("low", "value", "high"))
    assert 0 < low <= ratio <= high
    difference = found["comparison"]["difference"]
    assert f"INT8 against FP16: mAP {100 * difference:+.2f} (" in found["words"]
    assert f"latency {ratio:.2f}x of FP16 ({low:.2f} .. {high:.2f}) at batch 1" in found["words"]
    assert ("INT8 is slower than FP16 here" in found["words"]) == (low > 1)
    named = [name for one in found["slower"] for name in one["convs"]]
    assert ("--keep-fp16" in found["words"]) == bool(named)
    kept = json.loads(bundle.file("worth.json").read_text())
    assert kept["latency"] == found["latency"]
    assert [path.name for path in bundle.path.parent.iterdir() if path.name.startswith(".")] == []


def test_an_implicit_engine_that_does_not_reach_the_bound_gives_way_to_fp16(weighed):
    found, bundle = weighed("tensorrt", "implicit", 1e6)
    manifest = bundle.manifest
    assert found["guard"] == manifest.guard.model_dump()
    assert (manifest.guard.shipped, manifest.guard.how, manifest.guard.on) == ("fp16", "measured", "Stand-in GPU")
    assert manifest.guard.speedup == pytest.approx(1 / found["latency"]["value"])
    assert (manifest.quantization.mode, bundle.model.name) == ("none", "fp16.onnx")
    assert found["comparison"]["images"] == 16


def test_without_a_gpu_the_models_are_weighed_by_map_alone(weighed):
    found, bundle = weighed("onnxruntime", driver=False)
    assert (found["against"], found["latency"]) == ("fp32", None)
    assert "latency not measured, as the bundle has no engine" in found["words"]
    assert found["comparison"]["images"] == 16
    assert "worth.json" in bundle.manifest.files


@pytest.mark.slow
def test_a_sweep_scores_and_times_engines(machine, model, calibration_images, validation, tmp_path):
    command = ["sweep", model, "--config", "shapes", "--images", calibration_images, "--num-images", 6, "--int8-all"]
    command += ["--effort", "none", "--val-images", validation.images, "--annotations", validation.annotations]
    command += ["--silu", "keep", "--json"]
    done = machine.trtdet(*command, "--backend", "tensorrt", "-o", tmp_path / "s").ok
    rows = done.json["variants"]
    assert [row["axes"]["precision"] for row in rows] == ["FP32", "FP16", "INT8"]
    assert all(row["latency_ms"] > 0 and row["seconds"] > 0 for row in rows)
    assert rows[1]["counts"]["fp16"] == rows[2]["counts"]["int8"] == rows[0]["counts"]["fp32"]
    cpu = machine.trtdet(*command, "--backend", "tensorrt", "-o", tmp_path / "c", "--runtime", "onnxruntime").ok
    on_cpu = cpu.json["variants"]
    assert [row["axes"]["precision"] for row in on_cpu] == ["FP32", "INT8"]
    assert [row["latency_ms"] for row in on_cpu] == [None, None]
    assert [row["map"] for row in on_cpu] == pytest.approx([rows[0]["map"], rows[2]["map"]], abs=1e-9)
    refused = machine.trtdet(*command, "--backend", "onnxruntime", "-o", tmp_path / "n", "--runtime", "engine")
    assert "engines cannot be run here, as onnxruntime" in refused.message


# Jetson's DLA

ORIN = {"sm": 87, "dlas": 2}


def test_a_dla_takes_what_it_can_and_the_gpu_the_rest(machine, calibration_images, model, tmp_path):
    arguments = ["--quantization", "implicit", "--set", "engine.dla=1"]
    made = build(machine, model, calibration_images, tmp_path / "b", *arguments, version="10.3.0", **ORIN)
    facts, graph = told(made), onnx.load(str(made.model)).graph
    assert facts["dla"] == made.manifest.backend.dla == 1
    assert {"GPU_FALLBACK", "INT8", "FP16"} <= set(facts["flags"]) and facts["calibrated"]
    on_dla = [node.name for node in graph.node if node.name in facts["on_dla"]]
    assert {node.op_type for node in graph.node if node.op_type == "Conv" and node.name not in on_dla} == set()
    assert {node.op_type for node in graph.node if node.name not in on_dla} >= {"Reshape", "Transpose"}
    # One layer of the engine has many convolutions, and they are counted as what they run in.
    assert (made.manifest.audit.int8, made.manifest.audit.float_by_backend) == (CONVOLUTIONS, ())
    log = made.file("build.log").read_text()
    assert f"{len(on_dla)} of " in log and "layers on DLA core 1; on the GPU: " in log
    run = machine.trtdet(
        "predict", made.path, find_images(calibration_images)[0], "-o", tmp_path / "seen", **ORIN, version="10.3.0"
    ).ok
    assert "TensorRT 10.3.0" in run.out


def test_a_dla_computes_fp16_in_a_network_without_strong_types(make):
    facts = told(make("b", "--fp16", "--set", "engine.dla=0", version="10.3.0", **ORIN))
    assert facts["dla"] == 0 and "FP16" in facts["flags"] and facts["on_dla"] != []


def test_from_11_4_1_on_a_dla_takes_strong_types(make):
    facts = told(make("b", "--set", "engine.dla=0", version="11.4.1", **ORIN))
    assert facts["dla"] == 0 and facts["flags"] == ["GPU_FALLBACK", "TF32"]


@pytest.mark.parametrize(
    ("arguments", "settings", "words"),
    [
        (["--fp16"], {"sm": 89}, "has no DLA here; leave --set engine.dla=1 out, or build on a Jetson Xavier or Orin"),
        (["--fp16"], {"version": "10.8.0", "sm": 87}, "TensorRT up to 10.7, or from 11.4.1 on"),
        (["--fp16"], {"version": "11.4.0", "sm": 87}, "TensorRT up to 10.7, or from 11.4.1 on"),
        (["--fp16"], {"version": "10.3.0", "sm": 87, "dlas": 0}, "this machine has no DLA"),
        (["--fp16"], {"version": "10.3.0", "sm": 87, "dlas": 1}, "1 DLA cores, numbered from 0"),
        (["--fp32"], {"version": "10.3.0", "sm": 87}, "the DLA computes in FP16 and INT8"),
        ([], {"version": "10.3.0", "sm": 87}, "give --quantization implicit with --set engine.dla=1"),
        (["--fp16", "--batch", "1:2:4"], {"version": "10.3.0", "sm": 87}, "one batch size, not 1:2:4: give --batch 2"),
    ],
)
def test_where_a_dla_is_not_possible_the_error_says_what_is(
    machine, model, calibration_images, tmp_path, arguments, settings, words
):
    command = ["build", model, *QUICK, "--images", calibration_images, "-o", tmp_path / "b", "--guard", "off"]
    done = machine.trtdet(*command, *arguments, "--set", "engine.dla=1", **settings)
    assert done.code == 1 and words in done.err, done.err
    assert not (tmp_path / "b").exists()
