"""Each rule against a second implementation: NumPy's percentile, or plain loops over the published definition."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest

from trtdet.calibration import RULES, Histogram
from trtdet.calibration.histograms import BINS
from trtdet.calibration.thresholds import KL_BINS, LEVELS, entropy, minmax, mse, percentile
from trtdet.errors import ConfigError

RNG = np.random.default_rng(0)
DISTRIBUTIONS = {
    "normal": RNG.normal(0, 1, 30_000),
    "heavy tail": RNG.standard_t(3, 30_000),
    "relu": np.maximum(RNG.normal(0, 1, 30_000), 0),
    "silu": (lambda x: x / (1 + np.exp(-x)))(RNG.normal(0, 3, 30_000)),
    "laplace": RNG.laplace(0, 0.01, 30_000),
    "uniform": RNG.uniform(-3, 3, 30_000),
    "one outlier": np.append(RNG.normal(0, 1, 30_000), 60),
    "far from zero": RNG.normal(100, 1, 30_000),
    "two values": RNG.choice([0.25, 7.0], 1000),
    "one value": np.full(100, 3.7),
    "few values": RNG.uniform(0, 1, 5),
    "small": RNG.normal(0, 1e-6, 3000),
}
NAMES = sorted(DISTRIBUTIONS)


def histogram(name: str) -> Histogram:
    return Histogram.of(DISTRIBUTIONS[name].astype(np.float32))


def divergences(found: Histogram) -> dict[int, float]:
    """KL(P || Q) of every candidate by Migacz's definition, with plain loops."""
    counts, _ = found.rebinned(KL_BINS)
    bins = [float(count) for count in counts]
    bins[0] = bins[1]  # as NVIDIA's implementations treat the bin at zero
    losses = {}
    for i in range(LEVELS, KL_BINS + 1):
        reference = bins[:i]
        reference[-1] += sum(bins[i:])
        candidate = [0.0] * i
        for level in range(LEVELS):
            members = [j for j in range(-(-level * i // LEVELS), -(-(level + 1) * i // LEVELS)) if bins[j] > 0]
            for j in members:
                candidate[j] = sum(bins[k] for k in members) / len(members)
        p_total, q_total = sum(reference), sum(candidate)
        loss = 0.0
        for p, q in zip(reference, candidate, strict=True):
            if p > 0:
                loss += math.inf if q == 0 else p / p_total * math.log(p / p_total / (q / q_total))
        losses[i] = loss
    return losses


@pytest.mark.parametrize("name", ["relu", "one outlier", "far from zero"])
def test_entropy_is_the_published_rule(name):
    found = histogram(name)
    _, width = found.rebinned(KL_BINS)
    losses = divergences(found)
    least = min(losses.values())
    # Candidates that are equal but for rounding are equally right; the rule then takes the largest.
    best = [i for i, loss in losses.items() if loss <= least + 1e-9]
    amax = entropy(found)
    allowed = [min((i + 0.5) * width, found.amax) for i in best]
    assert any(math.isclose(amax, value, rel_tol=1e-12) for value in allowed)


def test_of_equally_good_candidates_entropy_takes_the_largest():
    """Three values that no level joins lose nothing, whatever is kept beyond them: the losses are exactly 0."""
    counts = np.zeros(BINS, np.int64)
    counts[[80, 320, 2400]] = 1
    found = Histogram(counts, 0, 0.0, 0.999)
    assert found.rebinned(KL_BINS)[0].nonzero()[0].tolist() == [10, 40, 300]
    assert entropy(found) == 0.999


@pytest.mark.parametrize("name", NAMES)
def test_mse_is_the_best_of_its_hundred_steps(name):
    found = histogram(name)
    counts, width = found.rebinned(KL_BINS)
    losses = []
    for step in range(1, 101):
        scale = found.amax * step / 100 / 127
        loss = 0.0
        for index in np.flatnonzero(counts):
            centre = (index + 0.5) * width
            loss += float(counts[index]) * (min(round(centre / scale), 127) * scale - centre) ** 2
        losses.append(loss)
    chosen = round(mse(found) / found.amax * 100)
    assert mse(found) == pytest.approx(found.amax * chosen / 100)
    assert losses[chosen - 1] <= min(losses) * (1 + 1e-9)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("percent", [50, 90, 99, 99.9, 99.99, 100])
def test_percentile_is_that_of_numpy_within_a_bin(name, percent):
    found = histogram(name)
    values = np.abs(DISTRIBUTIONS[name].astype(np.float32))
    # NumPy's own product of the count and the fraction rounds up past whole numbers.
    exact = np.percentile(values, percent - 1e-9, method="inverted_cdf")
    amax = percentile(found, percent)
    assert exact <= amax * (1 + 1e-12) and amax <= exact + found.width
    assert amax <= found.amax
    assert percent < 100 or amax == minmax(found)


@pytest.mark.parametrize("percent", [0, -1, 100.001, math.nan, math.inf])
def test_a_percentile_out_of_range_is_an_error(percent):
    with pytest.raises(ConfigError, match=r"must be over 0 and up to 100, got .*; the usual value is 99\.99"):
        percentile(histogram("normal"), percent)


@pytest.mark.parametrize("name", NAMES)
def test_minmax_is_the_largest_magnitude(name):
    assert minmax(histogram(name)) == float(np.abs(DISTRIBUTIONS[name].astype(np.float32)).max())


@pytest.mark.parametrize("rule", sorted(RULES))
@pytest.mark.parametrize("name", NAMES)
def test_every_rule_gives_a_range_over_0_up_to_the_largest_and_leaves_the_histogram_alone(rule, name):
    found = histogram(name)
    before = found.counts.copy()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        amax = RULES[rule](found)
    assert isinstance(amax, float)
    assert 0 < amax <= found.amax
    np.testing.assert_array_equal(found.counts, before)
    assert RULES[rule](found) == amax


@pytest.mark.parametrize("rule", sorted(RULES))
@pytest.mark.parametrize("power", [-20, 5, 40])
def test_every_rule_scales_with_the_values(rule, power):
    values = DISTRIBUTIONS["silu"].astype(np.float32)
    scaled = Histogram.of(values * np.float32(2.0**power))
    assert RULES[rule](scaled) == pytest.approx(RULES[rule](Histogram.of(values)) * 2.0**power, rel=1e-9)
