"""Estimates against the measured times of NVIDIA's sample engines."""

import json
import math
import statistics
from pathlib import Path

import pytest

from trtdet.audit.roofline import TIME_WITHIN, estimate

ENGINES = Path(__file__).resolve().parents[3] / "shared" / "measured" / "engines"
if not ENGINES.is_dir():
    pytest.skip("needs the measured engines of ../shared/measured, which are absent here", allow_module_level=True)
NAMES = sorted(path.name.removesuffix(".graph.json") for path in ENGINES.glob("*.graph.json"))


@pytest.fixture(scope="module")
def engines(benchmark):
    return {each.name: each for each in benchmark.engines(ENGINES)}


@pytest.mark.parametrize("name", NAMES)
def test_a_run_takes_what_was_measured(engines, name):
    each = engines[name]
    low, high = estimate(each.flow, each.gpu, each.batch).interval_ms
    assert low <= each.ms <= high
    assert max(each.ms * TIME_WITHIN / high, high / TIME_WITHIN / each.ms) <= 1.3


def test_the_median_of_the_engines_is_close(engines):
    factors = [abs(math.log(each.estimated(each.gpu) / each.ms)) for each in engines.values()]
    assert math.exp(statistics.median(factors)) <= 1.15


@pytest.mark.parametrize("name", NAMES)
def test_every_convolution_that_the_inspector_lists_is_counted(engines, name):
    each = engines[name]
    entries = json.loads((ENGINES / f"{name}.graph.json").read_text())["Layers"]
    convolutions = [entry["Name"] for entry in entries if "OutMaps" in entry or "ConvOutMaps" in entry]
    layers = {layer.name: layer for layer in estimate(each.flow, each.gpu, each.batch).layers}
    assert convolutions and all(layers[conv].operations > 0 for conv in convolutions)
    assert set(layers) <= set(each.layer_ms)


def test_int8_of_one_model_gains_as_measured(engines):
    half, best = engines["resnet18_A100_fp16"], engines["resnet18_A100_qat-residual"]
    assert half.estimated(half.gpu) / best.estimated(best.gpu) == pytest.approx(half.ms / best.ms, abs=0.15)
    # Without Q/DQ on the skip connection, kernels that quantise eat all of the gain.
    slow = engines["resnet18_A100_qat"]
    assert half.estimated(half.gpu) / slow.estimated(slow.gpu) == pytest.approx(half.ms / slow.ms, abs=0.15)
