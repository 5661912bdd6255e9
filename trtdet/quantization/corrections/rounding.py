"""``round``: rounds weights so that the error of the convolution's output is least, not the error of each weight. FP8
weights are rounded to E4M3 numbers in the same way, however large their steps are."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from trtdet.errors import TrtdetWarning
from trtdet.quantization.corrections.base import Correction, RoundedLayer
from trtdet.quantization.encoding import STORED, snap
from trtdet.quantization.precision import Format

_DAMPING = 0.01
_BLOCK = 64


@dataclass(frozen=True)
class Round(Correction):
    """The weights that are not rounded yet compensate each rounding error."""

    name: ClassVar[str] = "round"
    needs_covariance: ClassVar[bool] = True
    weight_share: ClassVar[float] = 0.25

    def round(self, layer: RoundedLayer) -> NDArray[np.number] | None:
        covariance = layer.covariance()
        if covariance is None:
            return None
        try:
            return compensated(layer.rows, layer.scales, covariance, format=layer.format)
        except np.linalg.LinAlgError as error:
            warnings.warn(
                f"the weights of '{layer.name}' are rounded to nearest: the covariance of its input cannot be factored "
                f"({error}); is its input constant on the calibration images?",
                TrtdetWarning,
                stacklevel=2,
            )
            return None


def compensated(
    rows: NDArray[np.float64], scales: NDArray[np.float32], covariance: NDArray[np.float64], format: Format = "int8"
) -> NDArray[np.number]:
    """Rounds column by column; the remaining columns compensate each column's rounding error.

    This lowers ``(W - Q) covariance (W - Q)^T``, the variance of the output error; ``bias`` compensates its mean.
    Source: Frantar et al. 2023, "OPTQ" (GPTQ), arXiv:2210.17323, with columns in order of falling variance.

    ``rows`` are float64 (groups, out, D), the weights, one matrix per group; ``scales`` float32 (groups, out), one per
    row; ``covariance`` is float64 (groups, D, D), of the input's windows. Raises numpy.linalg.LinAlgError if it is not
    positive definite, even with damping.
    """
    power = np.einsum("gii->gi", covariance)
    order = np.argsort(-power, axis=1, kind="stable")
    width = order.shape[1]
    damped = np.take_along_axis(covariance, order[:, :, None], axis=1)
    damped = np.take_along_axis(damped, order[:, None, :], axis=2)
    damped += np.eye(width) * (_DAMPING * power.mean(axis=1) + 1e-12)[:, None, None]
    inverse = np.linalg.inv(damped)
    upper = np.linalg.cholesky((inverse + inverse.transpose(0, 2, 1)) / 2).transpose(0, 2, 1)
    remaining = np.take_along_axis(rows, order[:, None, :], axis=2)
    steps = scales.astype(np.float64)
    rounded = np.empty_like(remaining)
    for start in range(0, width, _BLOCK):
        stop = min(start + _BLOCK, width)
        errors = np.empty((*remaining.shape[:2], stop - start))
        for column in range(start, stop):
            rounded[..., column] = snap(remaining[..., column] / steps, format)
            error = (remaining[..., column] - rounded[..., column] * steps) / upper[:, None, column, column]
            errors[..., column - start] = error
            remaining[..., column + 1 : stop] -= error[..., None] * upper[:, None, column, column + 1 : stop]
        remaining[..., stop:] -= errors @ upper[:, start:stop, stop:]
    numbers = rounded.astype(STORED[format])
    integers = np.empty_like(numbers)
    np.put_along_axis(integers, np.broadcast_to(order[:, None, :], rounded.shape), numbers, axis=2)
    return integers
