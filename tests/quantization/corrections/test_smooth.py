import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.optimize import minimize

from trtdet.quantization.corrections.base import Reader
from trtdet.quantization.corrections.smooth import Smooth, _noise

RNG = np.random.default_rng(0)
REACH = np.array([100.0, 1.0, 2.0, 0.5, 1.0, 3.0])
WEIGHT = RNG.normal(0, 1, (8, 6, 3, 3))


def output_noise(x: NDArray[np.float64], weight: NDArray[np.float64], scale: NDArray[np.float64]) -> float:
    """Of a 1x1 convolution with activation and weights rounded to INT8 after scaling."""
    scaled, rows = x * scale[:, None], weight[:, :, 0, 0] / scale
    step = np.abs(scaled).max() / 127
    steps = np.abs(rows).max(axis=1, keepdims=True) / 127
    got = (np.rint(rows / steps) * steps) @ (np.rint(scaled / step) * step)
    return float(np.square(got - weight[:, :, 0, 0] @ x).mean())


def chosen(
    reach: NDArray[np.float64], variance: NDArray[np.float64], reader: Reader, share: float = 1.0
) -> tuple[NDArray[np.float64], float]:
    channels, _ = Smooth().propose(reach, variance, [reader], share)
    assert channels.scale is not None
    return channels.scale, channels.amax


def test_the_scale_beats_both_extremes():
    x = RNG.uniform(-1, 1, (6, 4000)) * REACH[:, None]
    weight = WEIGHT[:, :, :1, :1]
    reader = Reader.of(weight, 1, np.ones(8))
    scale, amax = chosen(REACH, x.var(axis=1), reader)
    assert amax == pytest.approx((scale * REACH).max())
    assert np.log(scale).mean() == pytest.approx(0, abs=1e-9)
    best = output_noise(x, weight, scale)
    assert best < 0.5 * output_noise(x, weight, np.ones(6))
    assert best < output_noise(x, weight, 1 / REACH)


def test_depthwise_weights_do_not_mind():
    reader = Reader.of(RNG.normal(0, 1, (6, 1, 3, 3)), 6, np.ones(6))
    scale, _ = chosen(REACH, REACH**2, reader)
    product = scale * REACH
    assert product.max() / product.min() < 0.02 * REACH.max() / REACH.min()


def test_the_gradient_is_that_of_the_noise():
    readers = [Reader.of(WEIGHT, 1, RNG.uniform(1, 2, 8)), Reader.of(WEIGHT[:6, :1], 6, np.ones(6))]
    variance = REACH**2 / 3
    at = RNG.normal(0, 1, 6)
    _, slope = _noise(at, np.log(REACH), variance, readers, 0.5)
    for channel in range(6):
        step = np.eye(6)[channel] * 1e-6
        up, down = (_noise(at + sign * step, np.log(REACH), variance, readers, 0.5)[0] for sign in (1, -1))
        assert (up - down) / 2e-6 == pytest.approx(slope[channel], rel=1e-3, abs=1e-6 * abs(slope).max())


def expected_noise(
    scale: NDArray[np.float64], variance: NDArray[np.float64], weight: NDArray[np.float64], share: float
) -> float:
    """Of a dense convolution with importance 1, by the definition, in units of 1 / 127^2 / 12."""
    squares = np.square(weight)
    amax = (scale * REACH).max()
    activation = (amax**2 * squares.sum(axis=(0, 2, 3)) / scale**2).sum()
    steps = (squares / (scale**2).reshape(1, -1, 1, 1)).max(axis=(1, 2, 3))
    taps = weight.shape[2] * weight.shape[3]
    return float(activation + share * taps * (steps[:, None] * scale**2 * variance).sum())


@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("share", [1.0, 0.25])
def test_the_noise_is_that_of_the_definition(kernel, share):
    weight, variance = WEIGHT[:, :, :kernel, :kernel], REACH**2 / 3
    reader = Reader.of(weight, 1, np.ones(8))
    at = RNG.normal(0, 0.1, 6)  # the first channel is by far the widest, so that the smooth maximum is the maximum
    loss, _ = _noise(at, np.log(REACH), variance, [reader], share)
    assert loss == pytest.approx(expected_noise(np.exp(at), variance, weight, share), rel=1e-6)


@pytest.mark.parametrize("share", [1.0, 0.25])
def test_no_other_scale_leaves_much_less_noise(share):
    variance = REACH**2 / 3
    scale, _ = chosen(REACH, variance, Reader.of(WEIGHT, 1, np.ones(8)), share)
    found = expected_noise(scale, variance, WEIGHT, share)
    rng = np.random.default_rng(3)
    others = [scale * np.exp(rng.normal(0, spread, 6)) for spread in (0.05, 0.2, 0.5, 1.0) for _ in range(200)]
    others += [np.ones(6), 1 / REACH, REACH**-0.5]
    assert found < 1.1 * min(expected_noise(other, variance, WEIGHT, share) for other in others)


@pytest.mark.parametrize("share", [1.0, 0.25])
def test_the_descent_arrives_at_the_least_noise(share):
    variance, readers = REACH**2 / 3, [Reader.of(WEIGHT, 1, np.ones(8))]

    def logarithm(u: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        loss, slope = _noise(u, np.log(REACH), variance, readers, share)
        return np.log(loss), slope / loss

    _, loss = Smooth().propose(REACH, variance, readers, share)
    starts = (np.zeros(6), -np.log(REACH))
    assert np.log(loss) < min(minimize(logarithm, start, jac=True).fun for start in starts) + 1e-4


def test_a_silent_channel_counts_as_a_ten_thousandth_of_the_widest():
    """It gets a scale of its own, but none that leaves its weights nothing of the integers."""
    reach = np.array([4.0, 0.0, 2.0])
    reader = Reader.of(RNG.normal(0, 1, (3, 1, 3, 3)), 3, np.ones(3))
    scale, amax = chosen(reach, np.square(reach), reader)
    np.testing.assert_allclose(scale / scale[0], [1, 1e4, 2], rtol=1e-9)
    assert amax == pytest.approx(4 * scale[0])
