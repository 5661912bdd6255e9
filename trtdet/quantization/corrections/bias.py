"""What rounding adds to an output on average is taken off in the bias.

Source: Nagel et al. 2019, "Data-Free Quantization Through Weight Equalization and Bias Correction", arXiv:1906.04721,
section 4.2, with means over calibration images. In FP8 as in INT8: weights of few digits err to one side as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from trtdet.quantization.corrections.base import Correction


@dataclass(frozen=True)
class Bias(Correction):
    """The mean of the output becomes that of the float model."""

    name: ClassVar[str] = "bias"

    def offset(
        self, bias: NDArray[np.float64], exact: NDArray[np.float64], got: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        return bias + exact - got
