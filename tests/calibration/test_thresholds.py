"""Each threshold rule against a second implementation: NumPy's percentile, or plain loops over the definition."""

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
    """KL(P || Q) of every candidate by Migacz's definition, with plain loops, of those that keep half of the values."""
    counts, _ = found.rebinned(KL_BINS)
    bins = [float(count) for count in counts]
    bins[0] = bins[1]  # as NVIDIA's implementations treat the bin at zero
    losses = {}
    for i in range(LEVELS, KL_BINS + 1):
        reference = bins[:i]
        if sum(bins[i:]) > sum(reference):
            continue
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


def odd_histogram(seed: int) -> Histogram:
    """A histogram of an odd shape: lumps, spikes, gaps and decays that begin and end anywhere."""
    rng = np.random.default_rng(seed)
    counts = np.zeros(BINS, np.int64)
    for _ in range(rng.integers(1, 5)):
        start, stop = sorted(rng.integers(0, BINS, 2))
        places = np.arange(start, stop + 1)
        counts[places] += {
            0: lambda places: rng.integers(0, 50, len(places)),
            1: lambda places: np.int64(1000 * np.exp(-(places - places[0]) / rng.uniform(3, 3000))),
            2: lambda places: np.int64(rng.uniform(size=len(places)) < 0.01) * rng.integers(1, 1000),
            3: lambda places: np.int64(places == places[-1]) * rng.integers(1, 10**6),
        }[int(rng.integers(4))](places)
    counts[rng.integers(BINS // 2, BINS)] += 1
    highest = (int(np.flatnonzero(counts)[-1]) + rng.uniform(0.01, 0.99)) / BINS
    return Histogram(counts, 0, -highest * rng.uniform(), highest)


@pytest.mark.parametrize("seeds", [range(6), pytest.param(range(6, 200), marks=pytest.mark.slow)], ids=["few", "many"])
def test_rules_find_what_a_search_over_all_candidates_finds(seeds):
    """Entropy is compared with NumPy's logarithms over each candidate's bins; the others by their definitions."""
    for seed in seeds:
        found = odd_histogram(seed)
        counts, width = found.rebinned(KL_BINS)
        assert minmax(found) == found.amax
        edge = math.floor(percentile(found, 99) / found.width - 1e-9)
        kept = [int(found.counts[: edge + more].sum()) for more in (0, 1)]
        assert kept[0] < 0.99 * found.total <= kept[1]
        centres = (np.arange(KL_BINS) + 0.5) * width
        errors = []
        for step in range(1, 101):
            scale = found.amax * step / 100 / 127
            errors.append(float(counts @ (np.minimum(np.rint(centres / scale), 127) * scale - centres) ** 2))
        assert errors[round(mse(found) / found.amax * 100) - 1] <= min(errors) * (1 + 1e-9)
        bins = counts.astype(float)
        bins[0] = bins[1]
        losses = {}
        for i in range(LEVELS, KL_BINS + 1):
            tail = bins[i:].sum()
            if tail > bins[:i].sum() or (tail and not bins[i - 1]):
                continue
            starts = -(-np.arange(LEVELS) * i // LEVELS)
            level = np.repeat(np.arange(LEVELS), np.diff(np.append(starts, i)))
            full = bins[:i] > 0
            sums, sizes = np.bincount(level, bins[:i]), np.bincount(level, full)
            reference = bins[:i].copy()
            reference[-1] += tail
            p, q = reference[full] / reference.sum(), (sums / np.maximum(sizes, 1))[level][full] / bins[:i].sum()
            losses[i] = float(p @ np.log(p / q))
        chosen = entropy(found)
        best = [min((i + 0.5) * width, found.amax) for i, loss in losses.items() if loss <= min(losses.values()) + 1e-9]
        assert any(math.isclose(chosen, value, rel_tol=1e-12) for value in best), seed


def test_entropy_does_not_clip_nearly_everything_of_values_far_from_zero():
    values = np.random.default_rng(0).uniform(300, 3700, 20_000).astype(np.float32)
    found = Histogram.of(values)
    assert entropy(found) > 3000


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
