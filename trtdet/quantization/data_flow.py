"""What stands between two INT8 kernels, and how a backend takes weights: what a Q/DQ network is written by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

WeightForm = Literal["channel", "tensor"]
"""How the scales of a convolution's weights are written.

- ``channel``: one scale an output channel, on axis 0 of the weights; the bias stays in the convolution.
- ``tensor``: one scale for the whole tensor, and the channels' ratios to it as a product after the convolution, with
  the bias after that. It is the same function: ``sum_i s r_o q_oi x_i + b_o``.
"""


@dataclass(frozen=True)
class DataFlow:
    """How the INT8 kernels of a backend read and write.

    Attributes:
        half: the network is strongly typed, so that FP16 stands between INT8 kernels only where it is written: scales
            of Q/DQ pairs, biases, constants and all operators up to the decoding of boxes. False where the builder may
            choose FP16 by itself, or where nothing gains by it.
        weights: the forms of weight scales that its kernels take without writing float32, each to be tried where there
            are several.
        fused: True where an INT8 convolution has its activation function and the quantisation of the result in its own
            kernel; False where a pointwise kernel follows, which costs its input and output in FP16 and takes products
            and sums by constants for nothing; None where there is no engine whose kernels could be known.
    """

    half: bool = False
    weights: tuple[WeightForm, ...] = ("channel",)
    fused: bool | None = None
