from __future__ import annotations

import numpy as np
import pytest

from trtdet.quantization.corrections import moments as module
from trtdet.quantization.corrections.moments import Moments


def samples(seed: int, mean: float, spread: float) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (mean + spread * rng.normal(0, 1, (2, 6, 500))).astype(np.float32)


@pytest.mark.parametrize(("mean", "spread"), [(0.0, 1.0), (5.0, 1.0), (1e3, 1e-3), (-0.08, 1e-5)])
def test_moments_are_those_of_float64(mean: float, spread: float) -> None:
    parts = [samples(seed, mean, spread) for seed in range(3)]
    found, variances = Moments(2, 6, True), Moments(2, 6, False)
    for part in parts:
        found.update(part)
        variances.update(part)
    whole = np.concatenate(parts, axis=2).astype(np.float64)
    rows = np.random.default_rng(9).normal(0, 1, (2, 4, 6))
    for group in range(2):
        expected = np.cov(whole[group], bias=True)
        np.testing.assert_allclose(found.covariance()[group], expected, rtol=1e-6, atol=1e-9 * expected.max())
        np.testing.assert_allclose(found.variance()[group], np.diag(expected), rtol=1e-6)
        np.testing.assert_allclose(variances.variance()[group], np.diag(expected), rtol=1e-6)
        through = np.var(rows[group] @ whole[group], axis=1)
        np.testing.assert_allclose(found.through(rows)[group], through, rtol=1e-5)
        independent = np.square(rows[group]) @ np.diag(expected)
        np.testing.assert_allclose(variances.through(rows)[group], independent, rtol=1e-5)


def test_an_input_that_hardly_varies_has_a_covariance_that_can_be_factored() -> None:
    """In float32, E[xx'] - E[x]E[x]' of such values has eigenvalues far below 0."""
    rng = np.random.default_rng(0)
    shared = 1e-5 * rng.uniform(0, 1, (3, 4000))
    x = (np.array([[0.08], [0.04], [0.01]]) + rng.uniform(0.2, 1, (3, 3)) @ shared).astype(np.float32)
    found = Moments(1, 3, True)
    for part in np.array_split(x[None], 8, axis=2):
        found.update(part)
    least, *_, largest = np.linalg.eigvalsh(found.covariance()[0])
    assert largest > 0 and least > -1e-6 * largest


def test_windows_that_are_too_wide_have_variances_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert module.MOST_COLUMNS == 4608
    monkeypatch.setattr(module, "MOST_COLUMNS", 6)
    assert Moments(1, 6, True).dense
    assert not Moments(1, 7, True).dense
