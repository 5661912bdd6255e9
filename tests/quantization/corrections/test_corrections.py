"""The registry of corrections, their results from images, and the gate that keeps improvements."""

import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnx
import pytest
from models import judged_by
from numpy.typing import NDArray
from PIL import Image

from trtdet.backends import OnnxRunner
from trtdet.calibration import Ranges
from trtdet.errors import ConfigError, ModelError, TrtdetWarning
from trtdet.options.fields import CORRECTIONS as NAMED
from trtdet.options.fields import EFFORTS
from trtdet.passes.provenance import Origin, origin_of
from trtdet.quantization import (
    CORRECTIONS,
    DEFAULT_CORRECTIONS,
    PrecisionPlan,
    Start,
    correct,
    corrections,
    insert_qdq,
    lint,
    place,
)
from trtdet.quantization.corrections import gate, policies
from trtdet.quantization.corrections.base import Correction, Network, RoundedLayer
from trtdet.quantization.corrections.head_ranges import sense
from trtdet.quantization.corrections.policies import POLICIES, SEEN
from trtdet.quantization.corrections.rounding import Round
from trtdet.quantization.corrections.trials import Site
from trtdet.quantization.qdq import Corrections
from trtdet.quantization.sources import held_back

SHIPPED = corrections.REGISTRY
LAYERWISE = tuple(correction.name for correction in SHIPPED if not correction.needs_network)


def parts(plan: PrecisionPlan) -> set[str]:
    """Names of the corrections that some convolution has."""
    return {name for entry in plan.entries.values() for step in entry.corrections for name in step.name.split(", ")}


def test_the_names_are_those_of_the_registry():
    assert CORRECTIONS == ("range", "smooth", "round", "bias", "reconstruct", "asymmetric")
    assert tuple(name for name in CORRECTIONS if name != "reconstruct") == DEFAULT_CORRECTIONS
    assert EFFORTS["thorough"] == NAMED == CORRECTIONS


def test_a_planted_outlier_is_put_right(corrected, model, distance, case):
    given, placement, ranges = case
    found = corrected(LAYERWISE)
    int8 = insert_qdq(model, placement, found.ranges, found.corrections)
    before = distance(model, insert_qdq(model, placement, ranges), given)
    after = distance(model, int8, given)
    assert after < before / 3
    assert found.summary[-1].startswith(
        f"error at the head {before:.4f} -> {after:.4f} on 2 images held back, lower on 2 of 2 where anything is "
        "detected, 75 % sure; detections agree by "
    )
    assert found.ranges.rule == "minmax"
    for entry in found.plan.entries.values():
        assert entry.precision == "int8"
    outlier = found.plan.entries["Conv_3"].corrections[0]
    assert outlier.name == "smooth"
    assert outlier.error < outlier.without / 10
    assert lint(int8) == ()


@pytest.mark.parametrize("names", [*((name,) for name in LAYERWISE), ("smooth", "bias")])
def test_some_of_the_corrections(corrected, model, case, distance, names):
    given, placement, ranges = case
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TrtdetWarning)  # in a net this small a single correction need not help
        found = corrected(names)
    int8 = insert_qdq(model, placement, found.ranges, found.corrections)
    before = distance(model, insert_qdq(model, placement, ranges), given)
    assert distance(model, int8, given) <= before
    assert parts(found.plan) <= set(names)
    if "smooth" in names:
        assert "smooth" in parts(found.plan)
        assert distance(model, int8, given) < before / 2
    assert lint(int8) == ()


def test_the_best_rule_of_each_tensor(model, case, distance):
    """Each of two rules has every other range thirty times too wide."""
    given, placement, ranges = case
    candidates = {}
    for number, rule in enumerate(("odd", "even")):
        wide = [replace(seen, amax=30 * seen.amax) for seen in ranges.tensors.values()]
        mixed = {
            name: wide[index] if index % 2 == number else seen
            for index, (name, seen) in enumerate(ranges.tensors.items())
        }
        candidates[rule] = replace(ranges, rule=rule, tensors=mixed)
    found = correct(model, placement, candidates, (), given)
    assert found.ranges.rule == "auto"
    assert found.corrections.tensors == found.corrections.weights == {}
    assert {name: seen.amax for name, seen in found.ranges.tensors.items()} == {
        name: seen.amax for name, seen in ranges.tensors.items()
    }
    assert found.summary[0] == "rules: even 3, odd 2"
    best = distance(model, insert_qdq(model, placement, found.ranges), given)
    assert all(best < distance(model, insert_qdq(model, placement, other), given) for other in candidates.values())


BRIGHT = """(float[1,3,32,32] x) => (float[1,1024,4] boxes, float[1,1024,2] scores) {
    a = Conv(x, w1) c = Relu(a) d = Conv(c, w2, b2)
    e = Transpose<perm = [0,2,3,1]>(d) f = Reshape(e, to) l, m = Split<axis = 2>(f, sizes)
    g = Mul(l, wide) boxes = Add(g, corners) scores = Sigmoid(m) }"""


def test_biases_do_not_make_up_for_what_no_detection_needs(net, normal, sources, chosen, distance, monkeypatch):
    """Half of each image is bright, and where it is nothing is detected: its range is cut off, and so is its mean."""
    given = sources(12)
    for path in given.images:
        with Image.open(path) as image:
            pixels = np.asarray(image) // 8
        pixels[:, :16] = 255
        Image.fromarray(pixels).save(path)
    dark = np.full((8, 3, 1, 1), 0.1, np.float32)
    seen = normal(6, 8, 1, 1, seed=2, scale=0.3)
    seen[4:] = -abs(seen[4:]) * 3
    model = net(
        BRIGHT,
        w1=dark * (1 + 0.3 * normal(8, 3, 1, 1, seed=1)),
        w2=seen,
        b2=np.array([0, 0, 0, 0, 6, 6], np.float32),
        to=np.array([1, 1024, 6], np.int64),
        sizes=np.array([4, 2], np.int64),
        wide=np.float32(3),
        corners=np.array([0, 0, 60, 60], np.float32),
    )
    placement, whole = place(model), chosen(model, given, "minmax")["minmax"]
    narrow, start = sense(model, placement, whole, given)
    found = correct(model, placement, {"minmax": narrow}, ("range", "bias"), given, start)
    assert SEEN in found.summary[-2]
    monkeypatch.setattr(policies, "_with_seen_biases", lambda *_: None)
    before = correct(model, placement, {"minmax": narrow}, ("range", "bias"), given, start)
    assert narrow.tensors["c"].amax < whole.tensors["c"].amax / 2

    def error(found: Any) -> float:
        return float(distance(model, insert_qdq(model, placement, found.ranges, found.corrections), given))

    assert error(found) < 0.95 * error(before)


def assert_same(first: Any, second: Any) -> None:
    assert first.plan == second.plan
    assert first.corrections.weights.keys() == second.corrections.weights.keys()
    for name, rounded in first.corrections.weights.items():
        np.testing.assert_array_equal(rounded.integers, second.corrections.weights[name].integers)
        np.testing.assert_array_equal(rounded.bias, second.corrections.weights[name].bias)


def test_neither_repeating_nor_the_order_of_the_images_changes_anything(model, sources, chosen):
    given, placement = sources(), place(model)
    candidates = chosen(model, given, "percentile")
    first = correct(model, placement, candidates, LAYERWISE, given)
    assert_same(first, correct(model, placement, candidates, LAYERWISE, given))
    shuffled = replace(given, images=[given.images[index] for index in (3, 7, 0, 2, 6, 1, 5, 4)])
    assert_same(first, correct(model, placement, candidates, LAYERWISE, shuffled))


def test_what_does_not_help_is_left_out(corrected, case, monkeypatch):
    monkeypatch.setattr(gate, "head_errors", judged_by(0.1, 0.2, 0.3, 0.4))
    with pytest.warns(TrtdetWarning, match=r"error at the head 0.1000 -> 0.2000 .* the plain rule 'minmax' stands"):
        found = corrected(LAYERWISE)
    assert found.corrections.tensors == found.corrections.weights == {}
    assert found.plan == case[1].plan


def test_where_nothing_is_detected_the_layers_decide(corrected, monkeypatch):
    monkeypatch.setattr(gate, "head_errors", judged_by(0, 0, 0, 0, weight=0.01))
    seeds = []
    measure = Site.add_moments
    monkeypatch.setattr(Site, "add_moments", lambda site, x, seed: (seeds.append(seed), measure(site, x, seed)))
    with pytest.warns(TrtdetWarning, match="anything is detected on 0 of the 2 images that corrections are judged on"):
        found = corrected(LAYERWISE)
    assert found.corrections.tensors and found.corrections.weights
    # Second moments come from the images to fit on; only the extremes of channels from all.
    assert seeds[::5] == [0, 1, 2, 3, 4, 5, None, None]


def test_no_node_is_spent_on_what_may_be_chance(corrected, monkeypatch):
    """The corrected form has Muls that the plain one lacks."""
    monkeypatch.setattr(gate, "head_errors", judged_by(0.2, 0.196, 0.2, 0.2))
    found = corrected(LAYERWISE)
    assert found.corrections.tensors == found.corrections.weights == {}
    left, kept = found.summary
    assert left.startswith("left out: each kept where it lowers its layer's error, error 0.1960 for ")
    assert left.endswith(" nodes more, 75 % sure")
    assert kept.startswith("none kept: error at the head 0.2000 -> 0.1960 on 2 images held back, lower on 2 of 2")


def test_few_images_are_told_of_once_and_how_many_would_do(model, sources, chosen):
    """Five of five images in favour are the fewest that chance alone gives in less than one case of twenty."""

    def told(count: int) -> list[str]:
        given = sources(count)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", TrtdetWarning)
            correct(model, place(model), chosen(model, given, "minmax"), DEFAULT_CORRECTIONS, given)
        return [str(warning.message) for warning in caught]

    assert told(20) == []
    (said,) = told(3)
    assert said == (
        "anything is detected on 1 of the 1 images that corrections are judged on: too few to tell a gain from chance "
        "with; calibrate with 20 images or more that show objects, one in 4 is held back"
    )


@pytest.mark.parametrize("policy", range(3))
def test_the_head_decides_how_the_layers_are_put_together(corrected, monkeypatch, policy):
    errors = [0.5, 0.3, 0.3, 0.3]
    errors[1 + policy] = 0.2
    monkeypatch.setattr(gate, "head_errors", judged_by(*errors))
    found = corrected(LAYERWISE)
    assert found.summary[-2:] == (
        POLICIES[("layers", "mapped", "all")[policy]],
        "error at the head 0.5000 -> 0.2000 on 2 images held back, lower on 2 of 2 where anything is detected, 75 % "
        "sure; detections agree by 44.4 % before, 77.8 % after",
    )
    if policy == 2:
        parts = ("range: 0 of 5 tensors", "smooth: 5 of 5 tensors", "round: 5 of 5 convs", "bias: 5 of 5 convs")
        assert found.summary[:4] == parts


@pytest.mark.parametrize("fused", [True, False])
def test_no_map_is_left_as_a_mul_that_costs_more_than_fp16(corrected, model, case, distance, fused):
    """Those of the input and after a SiLU and a sum need one; where a sum reads the tensor, it needs one back."""
    given, placement, ranges = case
    found = corrected(DEFAULT_CORRECTIONS, Start(parted=placement.activations if fused else ()))
    int8 = insert_qdq(model, placement, found.ranges, found.corrections)
    muls = [node for node in int8.graph.node if origin_of(int8).get(node.name) is Origin.CHANNEL_MAP]
    left_out = [sentence for sentence in found.summary if sentence.startswith("maps left out: ")]
    assert "h" in found.corrections.tensors
    if fused:
        assert not muls and found.corrections.tensors.keys() == {"h"}
        assert left_out == [
            "maps left out: 4 of 5 tensors, where FP16 convolutions would buy more for the bytes of a Mul"
        ]
    else:
        assert "c" in found.corrections.tensors and muls
    assert distance(model, int8, given) < distance(model, insert_qdq(model, placement, ranges), given)


def test_what_is_refused(model, sources, chosen):
    candidates = chosen(model, sources(2), "minmax")
    with pytest.raises(ConfigError, match="at least 2 calibration images, one of them to judge by, got 1"):
        correct(model, place(model), candidates, LAYERWISE, sources(1))
    with pytest.raises(ConfigError, match="no correction 'magic'; allowed: none, or some of range, smooth, round"):
        correct(model, place(model), candidates, ("magic",), sources(2))
    weight = next(tensor for tensor in model.graph.initializer if tensor.name == "w3")
    broken = onnx.numpy_helper.to_array(weight).copy()
    broken[0, 0] = np.nan
    weight.CopyFrom(onnx.numpy_helper.from_array(broken, "w3"))
    with pytest.raises(ModelError, match="the weights of 'Conv_4' are NaN or infinite in 1 of 64 places"):
        correct(model, place(model), candidates, LAYERWISE, sources(2))


def test_images_are_split_once(sources):
    fit, held = held_back(sources(9).images)
    assert [path.name for path in held] == ["3.png", "7.png"]
    assert not set(fit) & set(held)
    assert len(fit) == 7
    assert [len(part) for part in held_back(sources(2).images)] == [1, 1]


@dataclass(frozen=True)
class Learned(Round):
    name: ClassVar[str] = "learned"


@dataclass(frozen=True)
class Harmful(Correction):
    name: ClassVar[str] = "harmful"

    def round(self, layer: RoundedLayer) -> NDArray[np.int8]:
        return np.zeros(layer.rows.shape, np.int8)


@dataclass(frozen=True)
class Reconstructed(Correction):
    """Knows corrections for the whole network, and writes down what it was shown."""

    known: Corrections = field(default_factory=Corrections)
    seen: list[tuple[set[Path], int]] = field(default_factory=list)
    name: ClassVar[str] = "reconstructed"
    needs_network: ClassVar[bool] = True

    def reconstruct(self, network: Network) -> tuple[Ranges, Corrections]:
        int8 = insert_qdq(network.model, network.placement, network.ranges, network.corrections)
        runs = network.sources.outputs([network.model, int8], network.images, "reconstructing")
        self.seen.append((set(network.images), sum(np.isfinite(other["boxes"]).all() for _, other in runs)))
        return network.ranges, self.known


def registered(monkeypatch: pytest.MonkeyPatch, *added: Correction) -> None:
    monkeypatch.setattr(corrections, "REGISTRY", (*SHIPPED, *added))


def test_a_learned_rounding_is_one_more_line(corrected, monkeypatch):
    registered(monkeypatch, Learned())
    found = corrected(("smooth", "learned", "bias"))
    assert "learned" in parts(found.plan)
    for name, rounded in corrected(LAYERWISE).corrections.weights.items():
        np.testing.assert_array_equal(found.corrections.weights[name].integers, rounded.integers)
    assert any(sentence.startswith("learned: ") for sentence in found.summary)


def test_what_harms_is_kept_out_by_the_gate(corrected, monkeypatch):
    registered(monkeypatch, Harmful())
    found = corrected((*LAYERWISE, "harmful"))
    assert "harmful" not in parts(found.plan)
    assert "harmful: 0 of 5 convs" in found.summary


def test_the_regions_of_an_image_lie_below_each_other(net, sources):
    model = net(
        "(float[1,3,32,32] x) => (float[N,3,32,32] three, float[M,3,32,32] none) "
        "{ double = Add(x, x) three = Concat<axis = 0>(x, double, x) none = Slice(x, zero, zero) }",
        zero=np.array([0]),
    )
    given = sources(2)
    seen = [outputs for (outputs,) in given.outputs([model], given.images, "running")]
    assert len(seen) == 2
    for outputs in seen:
        image = outputs["x"]
        assert image.shape == (3, 32, 32)
        np.testing.assert_array_equal(outputs["three"], np.concatenate([image, 2 * image, image], axis=1))
        np.testing.assert_array_equal(outputs["none"], np.zeros_like(image))


def test_a_reconstruction_sees_the_network_but_no_image_held_back(corrected, case, monkeypatch):
    better = corrected(LAYERWISE)
    reconstructed = Reconstructed(better.corrections)
    registered(monkeypatch, reconstructed)
    found = corrected(("bias", "reconstructed"))
    fit, held = held_back(case[0].images)
    assert reconstructed.seen == [(set(fit), len(fit))]
    assert held and "reconstructed: 5 of 5 convs" in found.summary
    for name, rounded in better.corrections.weights.items():
        assert found.corrections.weights[name].same(rounded)
    zeros = {
        name: replace(rounded, integers=0 * rounded.integers) for name, rounded in found.corrections.weights.items()
    }
    registered(monkeypatch, Reconstructed(replace(better.corrections, weights=zeros)))
    assert "reconstructed: 0 of 5 convs" in corrected(("bias", "reconstructed")).summary


def test_a_reconstruction_that_cannot_be_is_told(corrected, monkeypatch):
    monkeypatch.setattr("trtdet.quantization.corrections.reconstruct.available", lambda: False)
    found = corrected(("bias", "reconstruct"))
    assert "reconstruct not tried: torch is not installed: pip install 'trtdet[correct]'" in found.summary


STILL = """(float[1,3,32,32] x) => (float[1,1024,4] boxes, float[1,1024,2] scores) {
    a = Conv(x, w1, b1) d = Conv(a, w2)
    j = Transpose<perm = [0,2,3,1]>(d) k = Reshape(j, to) l, m = Split<axis = 2>(k, sizes)
    boxes = Mul(l, wide) scores = Sigmoid(m) }"""


@pytest.mark.parametrize("names", [LAYERWISE, ("round",)])
def test_a_layer_that_hardly_varies_is_corrected(net, normal, sources, chosen, names):
    """Its second moments, summed in float32, are no covariance: rounding by them ended in a LinAlgError."""
    model = net(
        STILL,
        w1=1e-5 * np.eye(3, dtype=np.float32).reshape(3, 3, 1, 1),
        b1=np.array([0.08, 0.04, 0.01], np.float32),
        w2=normal(6, 3, 1, 1, seed=1),
        to=np.array([1, 1024, 6], np.int64),
        sizes=np.array([4, 2], np.int64),
        wide=np.float32(10),
    )
    given, placement = sources(), place(model)
    given = replace(given, preprocess=given.preprocess.model_copy(update={"scale": 1 / 255}))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "the weights of .* are rounded to nearest")
        warnings.filterwarnings("ignore", "corrected, the error at the head")
        found = correct(model, placement, chosen(model, given, "percentile"), names, given)
    int8 = insert_qdq(model, placement, found.ranges, found.corrections)
    x = np.zeros((1, 3, 32, 32), np.float32)
    expected, got = OnnxRunner(model)(x), OnnxRunner(int8)(x)
    for name in ("boxes", "scores"):
        assert np.abs(got[name] - expected[name]).max() < 0.05 * np.abs(expected[name]).max()


def test_weights_over_the_most_columns_are_rounded_to_nearest(corrected, monkeypatch):
    """The convolution of 3x3x3 columns is left, those of 8 and 16 are not."""
    monkeypatch.setattr("trtdet.quantization.windows.MOST_COLUMNS", 26)
    monkeypatch.setattr(gate, "head_errors", judged_by(0.5, 0.4, 0.4, 0.3))
    found = corrected(LAYERWISE)
    rounded = {name: "round" in {step.name for step in entry.corrections} for name, entry in found.plan.entries.items()}
    assert rounded == {"Conv_0": False, "Conv_3": True, "Conv_4": True, "Conv_6": True, "Conv_8": True}
