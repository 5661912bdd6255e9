"""The benchmark that says when INT8 pays, on a small detector."""

import importlib
import sys
from pathlib import Path

import pytest

from trtdet import build, load_config
from trtdet.audit.gpus import gpu_named
from trtdet.audit.roofline import flow_of
from trtdet.options import BuildOptions, NmsOptions, changed

pytestmark = pytest.mark.tensorrt

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def roofline(monkeypatch):
    pytest.importorskip("torch", reason="needs torch: pip install 'trtdet[export]'")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("roofline")
    for name in ("roofline", "corrections"):
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def flows(model, calibration_images, tmp_path_factory):
    pytest.importorskip("tensorrt_rtx", reason="needs TensorRT-RTX: pip install 'trtdet[rtx]'")
    host = BuildOptions(nms=NmsOptions(mode="host"), sms=(86,))
    int8 = changed(host, effort="none", guard="off", images=calibration_images, num_images=4, int8_all=True)
    place = tmp_path_factory.mktemp("pair")
    return {
        name: flow_of(build(model, load_config("shapes"), place / name, options).bundle)
        for name, options in {"int8": int8, "fp16": changed(host, precision="fp16")}.items()
    }


def test_the_tables_of_a_pair_of_engines(roofline, flows):
    pair = roofline.Pair("small", flows["int8"], flows["fp16"])
    gpus = [gpu_named(name) for name in ("T4", "H200")]
    fused = pair.fused
    quantised = {name for name, one in pair.int8.convolutions.items() if pair.int8.layers[one.layer].input == "Int8"}
    assert quantised
    for name, convolution in fused.convolutions.items():
        assert (fused.layers[convolution.layer].input == "Int8") == (name in quantised), name
    assert fused.bytes < pair.fp16.bytes
    assert [layer.name for layer in fused.layers] == [layer.name for layer in pair.fp16.layers]
    times = roofline.times([pair], gpus, (1, 32))
    assert [(row[1], row[2]) for row in times.rows] == [("T4", 1), ("T4", 32), ("H200", 1), ("H200", 32)]
    for row in times.rows:
        assert row[5] == pytest.approx(row[3] / row[4])
        assert row[6] > 0.99, "only channels that INT8 pads further may cost a little"
    assert times.title == "Estimated, not measured:"
    crossing = roofline.crossings([pair], gpus)
    assert {row[4] for row in crossing.rows} <= {"1", "2"}
    widths = roofline.by_width([pair], gpus, (1,))
    assert widths.rows and all(ratio > 0 for row in widths.rows for ratio in row[4:])
