"""Weights to integers so that the convolution's output, not each weight, is as close as it can be."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trtdet.quantization.corrections.channel_map import QMAX

MOST_COLUMNS = 4608
"""Wider matrices (over 512 channels under a 3x3 kernel) are rounded to nearest: the solution grows with the cube."""

_DAMPING = 0.01
_BLOCK = 64


@dataclass(frozen=True, eq=False)
class Rounded:
    """A convolution's weights as they are written.

    Attributes:
        integers: int8 (out, in / groups, kh, kw), -127..127.
        scales: float32 (out,), over 0.
        bias: float32 (out,).
    """

    integers: NDArray[np.int8]
    scales: NDArray[np.float32]
    bias: NDArray[np.float32]


def weight_scales(weight: NDArray[np.floating]) -> NDArray[np.float32]:
    """The scale of each output channel, float32 (out,): ``max |w| / 127``, and 1 / 127 for a channel of zeros."""
    amax = np.abs(weight.reshape(len(weight), -1)).max(axis=1)
    return np.where(amax > 0, amax, 1.0).astype(np.float32) / np.float32(QMAX)


def nearest(rows: NDArray[np.floating], scales: NDArray[np.float32]) -> NDArray[np.int8]:
    """Each weight to the nearest integer: rows (..., out, D), scales float32 (..., out) -> int8 (..., out, D)."""
    integers: NDArray[np.int8] = np.rint(rows / scales[..., None]).clip(-QMAX, QMAX).astype(np.int8)
    return integers


def compensated(
    rows: NDArray[np.float64], scales: NDArray[np.float32], covariance: NDArray[np.float64]
) -> NDArray[np.int8]:
    """Column by column, each column's rounding error made up for by the columns that are still to come.

    This lowers ``(W - Q) covariance (W - Q)^T``, the variance of the output's error; its mean is left to the bias.
    Source: Frantar et al. 2023, "OPTQ" (GPTQ), arXiv:2210.17323, with columns of falling variance.

    Args:
        rows: float64 (groups, out, D): the weights as one matrix a group.
        scales: float32 (groups, out): of each row.
        covariance: float64 (groups, D, D): of the input's windows.

    Returns:
        int8 (groups, out, D).
    """
    power = np.einsum("gii->gi", covariance)
    order = np.argsort(-power, axis=1, kind="stable")
    width = order.shape[1]
    damped = np.take_along_axis(covariance, order[:, :, None], axis=1)
    damped = np.take_along_axis(damped, order[:, None, :], axis=2)
    damped += np.eye(width) * (_DAMPING * power.mean(axis=1) + 1e-12)[:, None, None]
    inverse = np.linalg.inv(damped)
    upper = np.linalg.cholesky((inverse + inverse.transpose(0, 2, 1)) / 2).transpose(0, 2, 1)
    left = np.take_along_axis(rows, order[:, None, :], axis=2)
    steps = scales.astype(np.float64)
    chosen = np.empty_like(left)
    for start in range(0, width, _BLOCK):
        stop = min(start + _BLOCK, width)
        errors = np.empty((*left.shape[:2], stop - start))
        for column in range(start, stop):
            chosen[..., column] = np.rint(left[..., column] / steps).clip(-QMAX, QMAX)
            error = (left[..., column] - chosen[..., column] * steps) / upper[:, None, column, column]
            errors[..., column - start] = error
            left[..., column + 1 : stop] -= error[..., None] * upper[:, None, column, column + 1 : stop]
        left[..., stop:] -= errors @ upper[:, start:stop, stop:]
    integers = np.empty(chosen.shape, np.int8)
    np.put_along_axis(integers, np.broadcast_to(order[:, None, :], chosen.shape), chosen.astype(np.int8), axis=2)
    return integers
