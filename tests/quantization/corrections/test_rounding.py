from typing import Any

import numpy as np
import pytest

from trtdet.errors import TrtdetWarning
from trtdet.quantization.corrections import rounding as module
from trtdet.quantization.corrections.bias import Bias
from trtdet.quantization.corrections.rounding import Round, compensated
from trtdet.quantization.encoding import ChannelMap, half_step, nearest, weight_scales


@pytest.mark.parametrize("width", [9, 150])
def test_compensated_rounding_lowers_the_error_of_the_output(width):
    rng = np.random.default_rng(0)
    mixing = rng.normal(0, 1, (2, width, width // 3))
    covariance = mixing @ mixing.transpose(0, 2, 1) + 0.01 * np.eye(width)
    rows = rng.normal(0, 1, (2, 16, width))
    scales = np.stack([weight_scales(group) for group in rows])
    errors = []
    for integers in (nearest(rows, scales), compensated(rows, scales, covariance)):
        assert integers.dtype == np.int8
        assert np.abs(integers.astype(int)).max() <= 127
        rest = rows - integers * scales[..., None].astype(np.float64)
        errors.append(np.einsum("goi,gij,goj->go", rest, covariance, rest))
    assert errors[1].sum() < 0.3 * errors[0].sum()
    assert (errors[1] < errors[0]).mean() > 0.9


def test_with_independent_inputs_nearest_is_best():
    rng = np.random.default_rng(1)
    rows = rng.normal(0, 1, (1, 5, 20))
    rows[0, 2] = 0
    scales = weight_scales(rows[0])[None]
    assert scales[0, 2] == half_step(1 / 127)
    covariance = np.diag(rng.uniform(0.1, 2, 20))[None]
    np.testing.assert_array_equal(compensated(rows, scales, covariance), nearest(rows, scales))


def test_a_silent_input_is_no_trouble():
    rows = np.ones((1, 2, 4))
    np.testing.assert_array_equal(compensated(rows, np.full((1, 2), 0.5, np.float32), np.zeros((1, 4, 4))), 2)


def test_the_covariance_is_that_of_the_mapped_and_quantised_input(layer):
    """Rounding adds a twelfth of a squared step to each variance, and nothing between channels."""
    rng = np.random.default_rng(2)
    samples = rng.normal(0, 1, (4, 4)) @ rng.uniform(-1, 1, (4, 5000))
    scale = np.array([1.0, 2.0, 0.5, 4.0])
    amax = float(np.abs(scale[:, None] * samples).max())
    found = layer(rng.normal(0, 1, (3, 4, 1, 1)), samples, ChannelMap(amax, scale)).covariance()[0]
    step = float(ChannelMap(amax, scale).step)
    exact = np.cov(scale[:, None] * samples.astype(np.float32).astype(np.float64), bias=True)
    np.testing.assert_allclose(found - exact, np.eye(4) * step**2 / 12, atol=1e-6 * step**2)


def test_a_covariance_that_cannot_be_factored_leaves_nearest_with_a_warning(layer, monkeypatch):
    def fails(*_: Any, **named: Any) -> None:
        raise np.linalg.LinAlgError("Matrix is not positive definite")

    monkeypatch.setattr(module, "compensated", fails)
    given = layer(np.ones((3, 8, 1, 1)), np.random.default_rng(1).normal(0, 1, (8, 50)), ChannelMap(4.0))
    with pytest.warns(TrtdetWarning, match="'Conv_0' are rounded to nearest: the covariance .* not positive definite"):
        assert Round().round(given) is None


def test_the_mean_of_the_output_becomes_that_of_the_float_model():
    rng = np.random.default_rng(0)
    bias, wanted, got = rng.normal(0, 1, (3, 2, 5))
    np.testing.assert_allclose(got + Bias().offset(bias, wanted, got), wanted + bias)
