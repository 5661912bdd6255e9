"""``bias``: gives each output channel the mean of the float model, in INT8 and in FP8.

Source: Nagel et al. 2019, "Data-Free Quantization Through Weight Equalization and Bias Correction", arXiv:1906.04721,
section 4.2, with means over calibration images.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from trtdet.quantization.corrections.base import Correction


@dataclass(frozen=True)
class Bias(Correction):
    name: ClassVar[str] = "bias"

    def offset(
        self, bias: NDArray[np.float64], exact: NDArray[np.float64], got: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        return bias + exact - got
