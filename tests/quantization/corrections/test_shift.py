from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from trtdet.quantization.corrections.base import Activation, Reader
from trtdet.quantization.corrections.shift import Shift
from trtdet.quantization.corrections.smooth import Smooth

LOW, HIGH = np.array([-0.3, 0.0, -2.0]), np.array([3.7, 6.0, 0.0])


@pytest.fixture
def activation() -> Callable[..., Activation]:
    def activation(*enabled: str, padded: bool = False) -> Activation:
        weight = np.random.default_rng(0).normal(0, 1, (4, 3, 1, 1))
        readers = [Reader.of(weight, 1, np.ones(4))]
        return Activation(LOW, HIGH, np.square(HIGH - LOW) / 12, readers, padded, 1.0, frozenset(enabled))

    return activation


def test_the_middle_of_the_range_becomes_0_and_half_of_the_width_the_range(activation: Any) -> None:
    found = Shift().propose(activation("shift"))
    assert found.names == ("shift",)
    assert found.map.scale is None
    np.testing.assert_allclose(found.map.shift, [1.7, 3.0, -1.0])
    assert found.map.amax == 3.0


def test_with_a_scale_the_shifted_range_decides_it(activation: Any) -> None:
    found = Shift().propose(activation("smooth", "shift"))
    assert found.names == ("smooth", "shift")
    np.testing.assert_allclose(found.map.shift, [1.7, 3.0, -1.0])
    assert found.map.amax == pytest.approx((found.map.scale * (HIGH - LOW) / 2).max())
    assert found.noise < Smooth().propose(activation("smooth", "shift")).noise


def test_before_padding_a_shift_must_lower_the_noise_by_a_tenth(activation: Any) -> None:
    free, padded = (Shift().propose(activation("smooth", "shift", padded=pad)) for pad in (False, True))
    assert padded.noise == pytest.approx(free.noise / 0.9)
