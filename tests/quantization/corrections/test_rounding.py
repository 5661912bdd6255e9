from __future__ import annotations

import numpy as np
import pytest

from trtdet.quantization.corrections.rounding import compensated, nearest, weight_scales


@pytest.mark.parametrize("width", [9, 150])
def test_compensated_rounding_lowers_the_error_of_the_output(width: int) -> None:
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


def test_with_independent_inputs_nearest_is_best() -> None:
    rng = np.random.default_rng(1)
    rows = rng.normal(0, 1, (1, 5, 20))
    rows[0, 2] = 0
    scales = weight_scales(rows[0])[None]
    assert scales[0, 2] == np.float32(1 / 127)
    covariance = np.diag(rng.uniform(0.1, 2, 20))[None]
    np.testing.assert_array_equal(compensated(rows, scales, covariance), nearest(rows, scales))


def test_a_silent_input_is_no_trouble() -> None:
    rows = np.ones((1, 2, 4))
    np.testing.assert_array_equal(compensated(rows, np.full((1, 2), 0.5, np.float32), np.zeros((1, 4, 4))), 2)
