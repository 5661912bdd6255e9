import numpy as np
import onnx_graphsurgeon as gs
import pytest

from trtdet.backends import OnnxRunner
from trtdet.quantization import windows
from trtdet.quantization.windows import Moments, Window

CASES = [
    ("pads = [1,1,1,1]", 1, 3),
    ("pads = [0,1,2,1], strides = [2,1]", 1, 3),
    ("pads = [2,2,2,2], dilations = [2,2], group = 4", 4, 3),
    ("", 2, 1),
    ('auto_pad = "SAME_UPPER", strides = [2,2]', 1, 3),
    ('auto_pad = "SAME_LOWER", strides = [2,2]', 1, 4),
    ('auto_pad = "VALID"', 1, 3),
]


@pytest.mark.parametrize(("attributes", "groups", "kernel"), CASES)
def test_windows_are_what_a_convolution_sees(net, normal, attributes, groups, kernel):
    joined = ", ".join(part for part in (attributes, f"group = {groups}") if part and "group" not in attributes)
    weight = normal(8, 4 // groups, kernel, kernel)
    model = net(f"(float[1,4,9,11] x) => (float[N,8,H,W] y) {{ y = Conv<{joined or attributes}>(x, w) }}", w=weight)
    window = Window.of(gs.import_onnx(model).nodes[0])
    assert window is not None
    x = normal(4, 9, 11, seed=1)
    expected = OnnxRunner(model)(x[None])["y"][0]
    got = window.rows(weight.astype(np.float64)) @ window.sample(x, 10_000, 0)
    np.testing.assert_allclose(got.reshape(expected.shape), expected, atol=1e-4)


def test_a_choice_of_places_repeats_itself(net, normal):
    model = net("(float[1,4,9,11] x) => (float[N,8,H,W] y) { y = Conv(x, w) }", w=normal(8, 4, 3, 3))
    window = Window.of(gs.import_onnx(model).nodes[0])
    assert window is not None
    x = normal(4, 9, 11)
    assert window.sample(x, 7, 1).shape == (1, 36, 7)
    np.testing.assert_array_equal(window.sample(x, 7, 1), window.sample(x, 7, 1))
    assert not np.array_equal(window.sample(x, 7, 1), window.sample(x, 7, 2))


def test_what_is_not_understood(net, normal):
    line = net("(float[1,4,9] x) => (float[N,8,H] y) { y = Conv(x, w) }", w=normal(8, 4, 3))
    assert Window.of(gs.import_onnx(line).nodes[0]) is None
    text = '(float[1,4,H,W] x) => (float[1,8,I,J] y) { y = Conv<auto_pad = "SAME_UPPER">(x, w) }'
    unknown = net(text, w=normal(8, 4, 3, 3))
    assert Window.of(gs.import_onnx(unknown).nodes[0]) is None


def test_channels_are_spread_as_windows_are(normal):
    window = Window("x", 2, (3, 1), (1, 1), (1, 1), (0, 0, 0, 0))
    x = np.broadcast_to(np.arange(4, dtype=np.float32)[:, None, None], (4, 5, 5))
    np.testing.assert_array_equal(window.sample(x, 1, 0)[..., 0], window.spread(np.arange(4.0)))


def samples(seed: int, mean: float, spread: float) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (mean + spread * rng.normal(0, 1, (2, 6, 500))).astype(np.float32)


@pytest.mark.parametrize(("mean", "spread"), [(0.0, 1.0), (5.0, 1.0), (1e3, 1e-3), (-0.08, 1e-5)])
def test_moments_are_those_of_float64(mean, spread):
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


def test_an_input_that_hardly_varies_has_a_covariance_that_can_be_factored():
    """In float32, E[xx'] - E[x]E[x]' of such values has eigenvalues far below 0."""
    rng = np.random.default_rng(0)
    shared = 1e-5 * rng.uniform(0, 1, (3, 4000))
    x = (np.array([[0.08], [0.04], [0.01]]) + rng.uniform(0.2, 1, (3, 3)) @ shared).astype(np.float32)
    found = Moments(1, 3, True)
    for part in np.array_split(x[None], 8, axis=2):
        found.update(part)
    least, *_, largest = np.linalg.eigvalsh(found.covariance()[0])
    assert largest > 0 and least > -1e-6 * largest


def test_windows_that_are_too_wide_have_variances_alone(monkeypatch):
    assert windows.MOST_COLUMNS == 4608
    monkeypatch.setattr(windows, "MOST_COLUMNS", 6)
    assert Moments(1, 6, True).dense
    assert not Moments(1, 7, True).dense
