import numpy as np
import pytest

from trtdet.errors import ModelError
from trtdet.quantization.encoding import half_step, weight_scales


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_refused_and_counted(value):
    weight = np.ones((4, 3, 1, 1), np.float32)
    weight[2, 1] = weight[0, 0] = value
    with pytest.raises(ModelError, match=r"the weights of 'Conv_7' are NaN or infinite in 2 of 12 places; .*export"):
        weight_scales(weight, "'Conv_7'")


def test_weight_scales_are_a_127th_of_the_largest_weight_of_a_channel():
    weight = np.zeros((3, 2, 2, 2), np.float32)
    weight[0, 1, 0, 1] = -254
    weight[1] = 12.7
    scales = weight_scales(weight)
    assert scales.dtype == np.float32
    np.testing.assert_allclose(scales, [2, 0.1, 1 / 127], rtol=2**-10)
    np.testing.assert_array_equal(scales, scales.astype(np.float16))


def test_a_step_is_the_least_number_of_fp16_that_is_not_below_the_scale():
    exact = np.array([2.0, 0.1, 1e-5, 1e-9, 2**-24 * 1.5, 3e4, 1e5])
    steps = half_step(exact)
    assert steps.dtype == np.float32
    assert np.all(steps >= exact.astype(np.float32))
    held = steps[:-1].astype(np.float16)
    np.testing.assert_array_equal(held.astype(np.float32), steps[:-1])
    below = np.nextafter(held, np.float16(0)).astype(np.float64)
    assert np.all((below < exact[:-1]) | (held.astype(np.float64) == 2.0**-24))
    assert steps[0] == 2.0
    assert steps[-1] == np.float32(1e5)  # beyond FP16 there is no such number
