from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest
from graphs import inferred
from PIL import Image

from trtdet.backends import OnnxRunner
from trtdet.calibration import CollectionRequest, Ranges, collect, expose
from trtdet.config import load_config
from trtdet.data import ImageStream
from trtdet.passes import Decoded
from trtdet.quantization import HeadError, Sources, Start, correct, place
from trtdet.quantization.corrections.base import RoundedLayer
from trtdet.quantization.encoding import ChannelMap, weight_scales
from trtdet.quantization.sources import held_back
from trtdet.quantization.windows import Moments, Window

NET = """(float[1,3,32,32] x) => (float[1,64,4] boxes, float[1,64,2] scores) {
    a = Conv<pads = [1,1,1,1], strides = [2,2]>(x, w1, b1) s = Sigmoid(a) c = Mul(a, s)
    d = Conv<group = 8, pads = [1,1,1,1], strides = [2,2]>(c, w2, b2) e = Conv(d, w3) f = Add(d, e)
    g = Conv(f, w4, b4) h = Relu(g) i = Conv(h, w5)
    j = Transpose<perm = [0,2,3,1]>(i) k = Reshape(j, to) l, m = Split<axis = 2>(k, sizes)
    boxes = Mul(l, wide) scores = Sigmoid(m) }"""


@pytest.fixture
def model(net, normal):
    """A detector of five convolutions; the first channel of tensor ``c`` is an outlier that one range has to cover."""
    return net(NET, **constants(normal))


@pytest.fixture
def choosing(net, normal):
    """The same, which gives only the half of its rows with the best scores, from the best down."""
    top = """all = Mul(l, wide) each = Sigmoid(m) best = ReduceMax<axes = [2], keepdims = 0>(each)
        p, q = TopK(best, half) r = Reshape(q, half) boxes = Gather<axis = 1>(all, r)
        scores = Gather<axis = 1>(each, r) }"""
    text = NET.replace("1,64,", "1,32,").partition("boxes = Mul")[0] + top
    return net(text, **constants(normal), half=np.array([32], np.int64))


def constants(normal: Any) -> dict[str, np.ndarray]:
    first = normal(8, 3, 3, 3, seed=1, scale=0.3) / 127
    first[0] *= 60
    return {
        "w1": first,
        "b1": normal(8, seed=2, scale=0.1),
        "w2": normal(8, 1, 3, 3, seed=3, scale=0.5) / np.array([60, *[1] * 7], np.float32).reshape(8, 1, 1, 1),
        "b2": normal(8, seed=4, scale=0.1),
        "w3": normal(8, 8, 1, 1, seed=5, scale=0.3),
        "w4": normal(16, 8, 3, 3, seed=6, scale=0.3)[:, :, 1:2, 1:2],
        "b4": normal(16, seed=7, scale=0.1),
        "w5": normal(6, 16, 1, 1, seed=8, scale=0.3),
        "to": np.array([1, 64, 6], np.int64),
        "sizes": np.array([4, 2], np.int64),
        "wide": np.float32(10),
    }


@pytest.fixture
def sources(tmp_path):
    """Images of noise, as the model above reads them."""

    def sources(count: int = 8) -> Sources:
        rng = np.random.default_rng(0)
        paths = [tmp_path / f"{index}.png" for index in range(count)]
        for path in paths:
            Image.fromarray(rng.integers(0, 255, (32, 32, 3), np.uint8)).save(path)
        preprocess = load_config("shapes").input.model_copy(update={"size": (32, 32)})
        return Sources(paths, preprocess, OnnxRunner, Decoded("boxes", "scores"))

    return sources


def chosen_ranges(model: onnx.ModelProto, sources: Sources, *rules: str) -> dict[str, Ranges]:
    """The ranges of a model by rule."""
    tensors = place(model).activations
    runner = OnnxRunner(expose(model, tensors))
    stream = ImageStream(sources.images, sources.preprocess)
    found = collect(runner, CollectionRequest(runner.input, tensors, "key", "sha"), stream)
    return {rule: Ranges.choose(found, rule) for rule in rules}


chosen = pytest.fixture(lambda: chosen_ranges, name="chosen")


@pytest.fixture
def case(model, sources, chosen):
    """Eight images of noise, the placement of the model, and its ranges by the largest value."""
    given = sources()
    return given, place(model), chosen(model, given, "minmax")["minmax"]


@pytest.fixture
def corrected(model, case):
    """What corrections make of the model with these ranges."""
    given, placement, ranges = case
    return lambda names, start=Start(): correct(model, placement, {"minmax": ranges}, names, given, start)


def distance_held_back(model: onnx.ModelProto, int8: onnx.ModelProto, sources: Sources, chosen: bool = False) -> float:
    """How far the detections of a model are from another's on the held-back images, measured here."""
    error = HeadError(chosen)
    _, held = held_back(sources.images)
    reference, runner = OnnxRunner(model), OnnxRunner(int8)
    for batch in ImageStream(held, sources.preprocess):
        expected, got = reference(batch.images), runner(batch.images)
        error.update((expected["boxes"][0], expected["scores"][0]), (got["boxes"][0], got["scores"][0]))
    return error.distance


distance = pytest.fixture(lambda: distance_held_back, name="distance")


def rounded_layer(weight: np.ndarray, samples: np.ndarray, map: ChannelMap, covariance: bool = True) -> RoundedLayer:
    """A 1x1 convolution whose input had the samples float32 (C, places)."""
    channels = len(samples)
    conv = inferred(f"(float[1,{channels},4,4] x) => (float[1,N,4,4] y) {{ y = Conv(x, w) }}", w=weight)
    window = Window.of(gs.import_onnx(conv).nodes[0])
    assert window is not None
    moments = Moments(1, channels, covariance).update(samples[None].astype(np.float32))
    rows = window.rows(weight.astype(np.float64))
    if map.scale is not None:
        rows = rows / window.spread(map.scale)[:, None, :]
    return RoundedLayer("Conv_0", rows, weight_scales(rows[0])[None], map, window, moments)


layer = pytest.fixture(lambda: rounded_layer, name="layer")
