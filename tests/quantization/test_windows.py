from __future__ import annotations

from typing import Any

import numpy as np
import onnx_graphsurgeon as gs
import pytest

from trtdet.backends import OnnxRunner
from trtdet.quantization.windows import Window

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
def test_windows_are_what_a_convolution_sees(net: Any, normal: Any, attributes: str, groups: int, kernel: int) -> None:
    joined = ", ".join(part for part in (attributes, f"group = {groups}") if part and "group" not in attributes)
    weight = normal(8, 4 // groups, kernel, kernel)
    model = net(f"(float[1,4,9,11] x) => (float[N,8,H,W] y) {{ y = Conv<{joined or attributes}>(x, w) }}", w=weight)
    window = Window.of(gs.import_onnx(model).nodes[0])
    assert window is not None
    x = normal(4, 9, 11, seed=1)
    expected = OnnxRunner(model)(x[None])["y"][0]
    got = window.rows(weight.astype(np.float64)) @ window.sample(x, 10_000, 0)
    np.testing.assert_allclose(got.reshape(expected.shape), expected, atol=1e-4)


def test_a_choice_of_places_repeats_itself(net: Any, normal: Any) -> None:
    model = net("(float[1,4,9,11] x) => (float[N,8,H,W] y) { y = Conv(x, w) }", w=normal(8, 4, 3, 3))
    window = Window.of(gs.import_onnx(model).nodes[0])
    assert window is not None
    x = normal(4, 9, 11)
    assert window.sample(x, 7, 1).shape == (1, 36, 7)
    np.testing.assert_array_equal(window.sample(x, 7, 1), window.sample(x, 7, 1))
    assert not np.array_equal(window.sample(x, 7, 1), window.sample(x, 7, 2))


def test_what_is_not_understood(net: Any, normal: Any) -> None:
    line = net("(float[1,4,9] x) => (float[N,8,H] y) { y = Conv(x, w) }", w=normal(8, 4, 3))
    assert Window.of(gs.import_onnx(line).nodes[0]) is None
    unknown = net(
        '(float[1,4,H,W] x) => (float[1,8,I,J] y) { y = Conv<auto_pad = "SAME_UPPER">(x, w) }', w=normal(8, 4, 3, 3)
    )
    assert Window.of(gs.import_onnx(unknown).nodes[0]) is None


def test_channels_are_spread_as_windows_are(normal: Any) -> None:
    window = Window("x", 2, (3, 1), (1, 1), (1, 1), (0, 0, 0, 0))
    x = np.broadcast_to(np.arange(4, dtype=np.float32)[:, None, None], (4, 5, 5))
    np.testing.assert_array_equal(window.sample(x, 1, 0)[..., 0], window.spread(np.arange(4.0)))
