"""``--silu`` from the command line to the bundle."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from models import CONVOLUTIONS, SILUS

from trtdet.backends import Built, Capabilities, OnnxRunner
from trtdet.bundle import Bundle
from trtdet.calibration import Ranges
from trtdet.errors import BundleError

QUICK = ["--config", "shapes", "--num-images", 4, "--effort", "none", "--int8-all"]


def built(run: Any, model: Path, images: Path, place: Path, *arguments: object) -> dict[str, Any]:
    done = run("build", model, *QUICK, "--images", images, "-o", place, "--json", *arguments).ok
    found: dict[str, Any] = done.json["manifest"]
    return found


def operators(place: Path) -> list[str]:
    return [node.op_type for node in onnx.load(str(Bundle(place).model)).graph.node]


def test_every_form_is_built_says_so_and_detects_the_same(run, trained, calibration_images, scored, tmp_path):
    found, hashes = {}, set()
    for form in ("keep", "swish", "plugin"):
        place = tmp_path / form
        manifest = built(run, trained, calibration_images, place, "--silu", form, "--backend", "onnxruntime")
        assert (manifest["silu"]["asked"], manifest["silu"]["done"]) == (form, form)
        hashes.add(manifest["content_hash"])
        found[form] = manifest["silu"], operators(place), run("eval", place, *scored, "--json").json["map"]
    assert len(hashes) == 3
    (keep, had, score), (swish, wrote, other), (plugin, placed, third) = found.values()
    count = had.count("Sigmoid") - wrote.count("Sigmoid")
    assert keep["rewritten"] == 0
    assert swish["rewritten"] == plugin["rewritten"] == count == wrote.count("Swish") == placed.count("TRT_SiLU") > 80
    assert (other, third) == (pytest.approx(score, abs=0.005), pytest.approx(score, abs=0.04))
    # Of the shapes detector most activations lie between two convolutions.
    assert plugin["read_int8"] > 0.3 * count
    assert plugin["write_int8"] > 0.6 * count
    reads, writes = (sum(f"it {verb} float" in reason for reason in plugin["skipped"]) for verb in ("reads", "writes"))
    assert (reads, writes) == (count - plugin["read_int8"], count - plugin["write_int8"])
    ranges = Ranges.load(tmp_path / "plugin" / "ranges.json")
    assert len(ranges.inputs) == count
    assert not Ranges.load(tmp_path / "keep" / "ranges.json").inputs
    check_steps(tmp_path / "plugin", plugin["read_int8"])


def check_steps(bundle: Path, reading: int) -> None:
    """The quantisation steps in the model are those of ranges.json."""
    ranges = json.loads((bundle / "ranges.json").read_text())
    graph = onnx.load(str(bundle / "int8.onnx")).graph
    makers = {output: node for node in graph.node for output in node.output}
    values = {one.name: onnx.numpy_helper.to_array(one) for one in graph.initializer}
    checked = 0
    for node in graph.node:
        if node.op_type != "TRT_SiLU" or makers[node.input[0]].op_type != "QuantizeLinear":
            continue
        quantizer = makers[node.input[0]]
        amax = np.array(ranges["inputs"][quantizer.input[0]]["amax"])
        given = {one.name: onnx.helper.get_attribute_value(one) for one in node.attribute}
        np.testing.assert_allclose(given["input_scale"], amax / 127, rtol=1e-6)
        np.testing.assert_allclose(values[quantizer.input[1]], amax.max() / 127, rtol=1e-6)
        checked += 1
    assert checked == reading > 0


def test_histograms_serve_every_form(run, model, calibration_images, tmp_path):
    place = tmp_path / "b"
    first = built(run, model, calibration_images, place, "--silu", "keep", "--backend", "onnxruntime")
    command = ["build", model, *QUICK, "--images", calibration_images, "-o", place, "--backend", "onnxruntime"]
    assert "calibrating" not in run(*command, "--silu", "swish").ok.err
    second = Bundle(place).manifest
    assert second.quantization.histograms_key == first["quantization"]["histograms_key"]


def test_float_engines_take_every_form_too(run, model, tmp_path):
    for form, operator in (("swish", "Swish"), ("plugin", "TRT_SiLU")):
        place = tmp_path / form
        options = ["--config", "shapes", "--fp16", "--silu", form, "--backend", "onnxruntime"]
        done = run("build", model, *options, "-o", place).ok
        assert f"SiLU {form} (" in done.out.splitlines()[-4]
        assert operators(place).count(operator) == SILUS
        OnnxRunner(Bundle(place).model.read_bytes())


@pytest.mark.tensorrt
def test_tensorrt_rtx_builds_swish_with_every_convolution_in_int8(run, model, calibration_images, tmp_path):
    rtx = ["--backend", "tensorrt-rtx", "--sm", 86, "--guard", "off"]
    manifest = built(run, model, calibration_images, tmp_path / "b", "--silu", "swish", *rtx)
    assert manifest["audit"]["int8"] == manifest["precision"]["int8"] == CONVOLUTIONS
    assert manifest["audit"]["float_by_backend"] == []
    command = ["build", model, *QUICK, "--images", calibration_images, "-o", tmp_path / "no"]
    run(*command, "--silu", "plugin", *rtx).refused(
        "cannot take --silu plugin: parsing an operator of a plugin ends its process"
    )


class Fake:
    """A backend that takes plugin libraries, as TensorRT does on a machine with a GPU."""

    capabilities = Capabilities(
        "tensorrt", "10.9", True, False, True, silu=("keep", "plugin"), loads_plugins=True, max_topk=3840
    )

    def build(self, request: Any, progress: Any) -> Built:
        assert [path.name for path in request.plugins] == ["libtrtdet_plugins.so"]
        assert "TRT_SiLU" in [node.op_type for node in request.model.graph.node]
        return Built(b"engine", (90,), (), 0.0)


def test_a_plugin_library_goes_into_the_bundle_and_is_verified(run, model, calibration_images, tmp_path, monkeypatch):
    monkeypatch.setattr("trtdet.building.job.choose", lambda name: Fake())
    library = tmp_path / "libtrtdet_plugins.so"
    asked = ["build", model, *QUICK, "--images", calibration_images, "--silu", "plugin", "-o", tmp_path / "b"]
    assert "give it with --set engine.plugins=LIBRARY" in run(*asked).message
    assert "does not exist" in run(*asked, "--set", f"engine.plugins={library}").message
    assert not (tmp_path / "b").exists()
    library.write_bytes(b"a library")
    assert run(*asked, "--set", f"engine.plugins={library}").code == 0
    bundle = Bundle(tmp_path / "b")
    (part,) = bundle.manifest.backend.plugins
    assert bundle.file(part.file).read_bytes() == b"a library"
    assert bundle.manifest.files[part.file] == part.sha256
    assert "up to date" in run(*asked, "--set", f"engine.plugins={library}").out
    library.write_bytes(b"another library")
    assert "up to date" not in run(*asked, "--set", f"engine.plugins={library}").out
    (tmp_path / "b" / part.file).write_bytes(b"altered")
    with pytest.raises(BundleError, match=r"'libtrtdet_plugins.so' was altered"):
        Bundle(tmp_path / "b")


def test_a_sweep_has_a_row_for_each_form(run, model, calibration_images, val_labelled, tmp_path):
    command = ["sweep", model, *QUICK, "--images", calibration_images, *val_labelled]
    command += ["--backend", "onnxruntime", "-o", tmp_path / "s", "--json"]
    done = run(*command, "--silu", "plugin", "keep").ok
    variants = done.json["variants"]
    forms = [(variant["axes"]["precision"], variant["axes"]["SiLU"]) for variant in variants]
    assert forms == [("FP32", "keep"), ("INT8", "keep"), ("INT8", "plugin")]
    assert len({variant["name"] for variant in variants}) == 3
    assert "| INT8 | plugin | percentile |" in (tmp_path / "s" / "experiment.md").read_text()
    # What is done already is not done again.
    more = run(*command, "--silu", "auto", "swish")
    assert [variant["axes"]["SiLU"] for variant in more.json["variants"]] == ["keep", "keep", "swish", "plugin"]
    assert len((tmp_path / "s" / "rows.jsonl").read_text().splitlines()) == 1 + 4
