"""The criterion that compares the trials of a layer, as docs/accuracy.md describes it."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import nets
import numpy as np
import onnx
import pytest
from graphs import inferred

from trtdet.backends import OnnxRunner
from trtdet.calibration import Range, Ranges
from trtdet.quantization import place
from trtdet.quantization.corrections.base import Correction, Reader
from trtdet.quantization.corrections.bias import Bias
from trtdet.quantization.corrections.policies import choose
from trtdet.quantization.corrections.rounding import Round
from trtdet.quantization.corrections.trials import Site, batches, find_sites
from trtdet.quantization.encoding import ChannelMap, nearest, weight_scales

RANGES = Ranges("minmax", None, {}, "", 1, "")


def single_conv(weight: np.ndarray | None = None) -> onnx.ModelProto:
    weight = nets.normal(6, 4, 1, 1, seed=1) if weight is None else weight
    text = "(float[1,4,8,8] x) => (float[1,N,8,8] y) { y = Conv(x, w, b) }"
    return inferred(text, w=weight, b=nets.normal(len(weight), seed=2))


conv = pytest.fixture(lambda: single_conv, name="conv")


@pytest.fixture
def measured_site(conv, normal):
    """The site of one convolution, judged on the last of four images."""

    def measured_site(*corrections: Correction, parted: bool = False, **changes: Any) -> Site:
        model = conv()
        (site,) = find_sites(model, place(model), corrections, ("x",) if parted else ())
        for name, value in changes.items():
            setattr(site, name, value)
        images = [normal(4, 8, 8, seed=seed) for seed in range(4)]
        judged(model, site, images[:3], images[3:], minmax=4.0)
        return site

    return measured_site


def judged(model: onnx.ModelProto, site: Site, fit: list[np.ndarray], held: list[np.ndarray], **amax: float) -> None:
    """The site with its trials measured: 8x8 places are few enough for all of them to be looked at."""
    candidates = {rule: replace(RANGES, rule=rule, tensors={"x": Range(top, -top, top)}) for rule, top in amax.items()}
    for seed, x in enumerate([*fit, *held]):
        site.add_moments(x, seed if seed < len(fit) else None)
    site.prepare(candidates)
    for seed, x in enumerate(fit):
        site.add_means(x, seed)
    for seed, x in enumerate(held):
        site.add_errors(x, seed)
    site.settle()


def test_the_error_is_the_root_of_the_mean_fourth_power_as_a_share_of_the_variance(conv, normal):
    weight = normal(6, 4, 1, 1, seed=1)
    weight[5] *= 1e-3  # an output that hardly varies counts as if it had a hundredth of the median variance
    model = conv(weight)
    # Rounding wants the covariance, from which the variance of the output comes; row 0 of the errors is without it.
    (site,) = find_sites(model, place(model), (Round(), Bias()))
    fit, held = ([normal(4, 8, 8, seed=seed) for seed in seeds] for seeds in (range(3), range(3, 5)))
    judged(model, site, fit, held, tight=1.5)
    (trial,) = site.trials
    weight = onnx.numpy_helper.to_array(model.graph.initializer[0])[:, :, 0, 0]
    bias = onnx.numpy_helper.to_array(model.graph.initializer[1])
    scales = weight_scales(weight)
    integers = nearest(weight, scales) * scales[:, None]

    def int8(x: np.ndarray) -> np.ndarray:
        step = ChannelMap(1.5).step
        return integers @ (np.clip(np.rint(x.reshape(4, -1) / step), -127, 127) * step) + bias[:, None]

    def exact(x: np.ndarray) -> np.ndarray:
        return OnnxRunner(model)(x[None])["y"][0].reshape(6, -1)

    variance = np.var(np.concatenate([exact(x) for x in fit], axis=1), axis=1)
    variance = np.maximum(variance, 0.01 * np.median(variance))
    mean = np.mean([exact(x).mean(axis=1) - int8(x).mean(axis=1) for x in fit], axis=0)
    for column, offset in enumerate((np.zeros(6), mean)):
        errors = np.concatenate([int8(x) + offset[:, None] - exact(x) for x in held], axis=1)
        expected = np.sqrt((errors**4 / variance[:, None] ** 2).mean())
        assert trial.errors["Conv_0"][0, column] == pytest.approx(expected, rel=1e-3)
    assert trial.offsets == ("", "bias")


def test_rare_saturation_weighs_more_than_steps_that_are_a_little_coarser(conv):
    """By the mean square the range that saturates would win, by the fourth power the wider does."""
    model = conv(np.eye(4, dtype=np.float32).reshape(4, 4, 1, 1))
    (site,) = find_sites(model, place(model), ())
    rng = np.random.default_rng(0)
    images = [rng.uniform(-1, 1, (4, 8, 8)).astype(np.float32) for _ in range(8)]
    for x in images:
        x[:, 3, 5] = 1.04
    judged(model, site, images[:6], images[6:], tight=1.0, wide=3.0)
    square = {}
    for rule, amax in (("tight", 1.0), ("wide", 3.0)):
        step = amax / 127
        rounded = [np.clip(np.rint(x / step), -127, 127) * step for x in images[6:]]
        square[rule] = np.mean([np.square(done - x).mean() for done, x in zip(rounded, images[6:], strict=True)])
    assert square["tight"] < square["wide"]
    assert choose(site, "layers").rule.rule == "wide"


@pytest.mark.parametrize("scaled", [False, True])
def test_a_bias_makes_up_for_what_is_clipped_only_as_far_as_the_head_sees_it(conv, normal, scaled):
    model = conv()
    weight = onnx.numpy_helper.to_array(model.graph.initializer[0])[:, :, 0, 0].astype(np.float64)
    bias = onnx.numpy_helper.to_array(model.graph.initializer[1])
    images = [normal(4, 8, 8, seed=seed) for seed in range(3)]
    for x in images:
        x[:, :4] += 40.0  # half of the places are far out of the range, and no detection needs them
    (site,) = find_sites(model, place(model), (Bias(),))
    for seed, x in enumerate(images):
        site.add_moments(x, seed)
    site.prepare({"tight": replace(RANGES, rule="tight", tensors={"x": Range(4.0, -4.0, 4.0)})})
    (trial,) = site.trials
    if scaled:
        trial.map = ChannelMap(4.0, np.array([1.0, 0.5, 2.0, 1.0]))
    trial.cut = np.array([0.0, 0.5, 0.0, 0.0])
    for seed, x in enumerate(images):
        site.add_means(x, seed)
    scale = np.ones(4) if trial.map.scale is None else trial.map.scale
    mapped = np.concatenate([x.reshape(4, -1) for x in images], axis=1) * scale[:, None]
    step = trial.map.step
    read = np.clip(np.rint(mapped / step), -127, 127).mean(axis=1) * step
    (rounding,) = trial.roundings["Conv_0"]
    form = (rounding.integers * rounding.scales[..., None])[0]
    whole = np.clip(mapped, -127 * step, 127 * step).mean(axis=1) + trial.cut
    expected = bias + (weight / scale) @ whole - form @ read
    (_, plain), (name, offset) = site.offsets(trial, "Conv_0", rounding, seen=True)
    assert name == "bias" and plain == pytest.approx(bias[None])
    np.testing.assert_allclose(offset[0], expected, rtol=1e-4, atol=1e-4)
    # Were all of it made up for, places within the range would be far off.
    assert np.abs(offset[0] - bias).max() < 5


def test_a_policy_takes_the_least_error_or_everything(measured_site):
    site = measured_site(Round(), Bias())
    errors = site.trials[0].errors["Conv_0"]
    assert errors.shape == (2, 2)
    errors[:] = [[3.0, 1.0], [2.0, 4.0]]
    picks = {policy: choose(site, policy).picks["Conv_0"] for policy in ("layers", "mapped", "all")}
    assert {policy: (pick.rounding, pick.offset) for policy, pick in picks.items()} == {
        "layers": (0, 1),
        "mapped": (0, 1),
        "all": (1, 1),
    }


def test_convolutions_over_an_unknown_number_of_places_are_left_alone(net, normal):
    model = net("(float[1,4,9] x) => (float[N,8,H] y) { y = Conv(x, w) }", w=normal(8, 4, 3))
    assert find_sites(model, place(model), ()) == []


def test_moments_are_held_in_runs_that_fit_into_memory(net, normal, monkeypatch):
    text = "(float[1,4,8,8] x) => (float[1,4,8,8] y) { a = Conv(x, w) b = Conv(a, w) y = Conv(b, w) }"
    model = net(text, w=normal(4, 4, 1, 1))
    sites = find_sites(model, place(model), (Round(),))
    assert [len(batch) for batch in batches(sites)] == [3]
    monkeypatch.setattr("trtdet.quantization.corrections.trials._GRAM_BYTES", 2 * 8 * 4 * 4)
    assert [len(batch) for batch in batches(sites)] == [2, 1]
    assert [len(batch) for batch in batches(find_sites(model, place(model), (Bias(),)))] == [3]


@dataclass(frozen=True)
class Spy(Correction):
    """Proposes a map, and keeps what it was shown."""

    shown: list[tuple[np.ndarray, np.ndarray, Sequence[Reader]]] = field(default_factory=list)
    name: ClassVar[str] = "spy"

    def propose(
        self, reach: np.ndarray, variance: np.ndarray, readers: Sequence[Reader], weight_share: float
    ) -> tuple[ChannelMap, float]:
        self.shown.append((reach, variance, readers))
        return ChannelMap(1.0, np.ones(4)), 1.0


TWO = """(float[1,4,8,8] x) => (float[1,4,8,8] y, float[1,4,8,8] z) {
    y = Conv<pads = [1,1,1,1]>(x, w3) z = Conv(x, w1) }"""
OTHER = """(float[1,4,8,8] x) => (float[1,4,8,8] y, float[1,4,8,8] z) {
    z = Conv(x, w1) y = Conv<pads = [1,1,1,1]>(x, w3) }"""


@pytest.mark.parametrize("text", [TWO, OTHER])
def test_a_map_is_chosen_for_all_readers_and_for_the_zeros_of_padding(net, normal, text):
    model = net(text, w3=normal(4, 4, 3, 3), w1=normal(4, 4, 1, 1))
    spy = Spy()
    (site,) = find_sites(model, place(model), (spy,))
    images = [5 + normal(4, 8, 8, seed=seed) for seed in range(3)]
    judged(model, site, images[:2], images[2:], minmax=9.0)
    ((reach, variance, readers),) = spy.shown
    assert len(readers) == 2
    assert (reach > 5).all()
    # Windows that reach into the padding vary by more than the tensor does.
    assert (variance > 2 * np.var(np.stack(images[:2]), axis=(0, 2, 3))).all()


def test_the_plain_form_is_rounded_to_nearest_where_a_map_competes(measured_site):
    for corrections, counts in (((Round(),), [2]), ((Spy(), Round()), [1, 2])):
        site = measured_site(*corrections)
        assert [len(trial.roundings["Conv_0"]) for trial in site.trials] == counts


def test_other_places_are_looked_at_in_every_image(conv, normal):
    model = conv()
    (site,) = find_sites(model, place(model), ())
    (window,) = site.windows.values()
    x = normal(4, 64, 64)
    (first, again, second) = (dict(site._samples(x, seed))[window] for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert first.shape == (1, 4, 256)
    assert not np.array_equal(first, second)


COSTS = """(float[1,4,8,8] x) => (float[1,4,8,8] y, float[1,4,8,8] z) {
    a = Conv(x, w) r = Relu(a) y = Conv(r, w3) b = Conv(x, w1) s = Sigmoid(b) z = Conv(s, w2) }"""


@pytest.mark.parametrize(
    ("fused", "prices"),
    [
        # Four channels of 64 places; a convolution's 16 weights, twice as many where two read the tensor.
        (False, {"x": 4 * 4 / (2 * 256 + 32), "r": 0, "s": 4 * 4 / (2 * 256 + 16)}),
        (True, {"x": (4 * 4 + 4 * 256) / (2 * 256 + 32), "r": 0, "s": (4 * 4 + 4 * 256) / (2 * 256 + 16)}),
    ],
)
def test_a_mul_costs_its_constants_and_where_it_parts_kernels_its_values(net, normal, fused, prices):
    weights = {name: normal(4, 4, 1, 1, seed=seed) for seed, name in enumerate(("w", "w1", "w2", "w3"))}
    model = net(COSTS, **weights)
    sites = find_sites(model, place(model), (Round(),), place(model).activations if fused else ())
    for site in sites:
        site.add_moments(normal(4, 8, 8), 0)
    assert {site.tensor: site.mul_price for site in sites} == pytest.approx(prices)


@pytest.mark.parametrize(
    ("left", "fused", "mapped", "worthwhile"),
    [
        (0, True, 2.0, True),  # no Mul: what the layer loses is for the policy to judge
        (4, False, 2.0, True),  # its constants are 16 bytes against 2 * 256 + 24: nearly none
        (1, True, 0.4, True),  # (4 + 4 * 64) / 536: 49 %
        (1, True, 0.6, False),
    ],
)
def test_a_map_is_taken_where_it_buys_more_for_its_bytes_than_fp16(measured_site, left, fused, mapped, worthwhile):
    site = measured_site(Spy(), parted=fused, multiplied=left)
    rule, other = site.trials
    rule.errors["Conv_0"][:], other.errors["Conv_0"][:] = 1.0, mapped
    taken = {policy: choose(site, policy) for policy in ("layers", "mapped", "all")}
    assert [choice.left_out for choice in taken.values()] == [not worthwhile] * 3
    everywhere = other if worthwhile else rule
    assert {policy: choice.trial for policy, choice in taken.items()} == {
        "layers": other if worthwhile and mapped < 1 else rule,
        "mapped": everywhere,
        "all": everywhere,
    }


def test_a_map_that_costs_more_than_fp16_is_not_tried(measured_site):
    """FP16 takes all of the error away, so that nothing that costs as much can buy more."""
    site = measured_site(Spy(), Round(), parted=True)
    (rule,) = site.trials
    assert site.mul_price > 1 and site.too_dear and choose(site, "all").left_out
    assert rule.rule == "minmax" and len(rule.roundings["Conv_0"]) == 2


def test_beside_a_map_that_may_be_left_out_the_plain_form_is_rounded_as_well_as_it_can_be(measured_site):
    site = measured_site(Spy(), Round(), parted=True, multiplied=1)
    assert 0.1 < site.mul_price < 1
    assert [len(trial.roundings["Conv_0"]) for trial in site.trials] == [2, 2]
