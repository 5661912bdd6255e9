from __future__ import annotations

import numpy as np

from trtdet.quantization.corrections.base import OutputMeans
from trtdet.quantization.corrections.bias import Bias


def test_the_mean_of_the_output_becomes_that_of_the_float_model() -> None:
    rng = np.random.default_rng(0)
    bias, wanted, got = rng.normal(0, 1, (3, 2, 5))
    np.testing.assert_allclose(got + Bias().offset(OutputMeans(bias, wanted, got)), wanted + bias)
