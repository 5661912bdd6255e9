"""The ranges of what the activations of the plugin library read, so that they can read INT8."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray

from trtdet.calibration import ChannelRange, expose
from trtdet.calibration.channel_ranges import SMALLEST, Extremes
from trtdet.config import InputConfig
from trtdet.data import ImageCache, ImageStream
from trtdet.passes.plugin_ops import HARD_SWISH, PLUGIN_ACTIVATIONS, SILU
from trtdet.progress import Progress, silent
from trtdet.quantization.encoding import QMAX
from trtdet.quantization.simulator import Load

_FLOORS = {SILU: 8.0, HARD_SWISH: 3.0}
"""Below minus this an activation is 0, to 0.003 for SiLU and exactly for HardSwish."""

_SAMPLES = 1024
"""Places of a tensor that its noise is measured at, from all images together."""

_QUIET = 1e-3
"""A channel's variance counts as at least this share of the mean variance: no detection hangs on a still channel."""


def reach(
    model: onnx.ModelProto,
    images: Sequence[Path],
    preprocess: InputConfig,
    load: Load,
    progress: Progress = silent,
    cache: ImageCache | None = None,
) -> dict[str, ChannelRange]:
    """The range of every channel that an activation of the plugin library reads from a convolution.

    It is that of the corrections' channel maps: the largest value seen, with room for what was not seen. Values so far
    below 0 that the activation hardly tells them from 0 are left to saturate.

    Args:
        model: float model.
        images: calibration images, in any order.
        preprocess: how they become the network's input.
        load: makes a model ready to run.
        progress: told of every image.
        cache: images that other passes decoded.
    """
    makers = {output: node.op_type for node in model.graph.node for output in node.output}
    kinds = {node.input[0]: node.op_type for node in model.graph.node if node.op_type in PLUGIN_ACTIVATIONS}
    kinds = {name: kind for name, kind in kinds.items() if makers.get(name) == "Conv"}
    if not kinds:
        return {}
    extremes = {name: Extremes() for name in kinds}
    samples: dict[str, list[NDArray[np.float32]]] = {name: [] for name in kinds}
    images = sorted(images)
    simulator = load(expose(model, list(kinds)))
    places = max(1, _SAMPLES // len(images))
    done = 0
    for batch in ImageStream(images, preprocess, batch_size=simulator.batch or 1, cache=cache):
        for name, values in simulator(batch.images).items():
            for x in values:
                extremes[name].update(x)
                flat = x.reshape(len(x), -1)
                samples[name].append(flat[:, :: max(1, flat.shape[1] // places)][:, :places].copy())
        done += len(batch)
        progress("ranges of activations", done, len(images))
    found = {}
    for name, kind in kinds.items():
        low, high = extremes[name].ranges()
        amax = np.maximum(np.minimum(-low, _FLOORS[kind]), high)
        # A channel that was silent on all images must not blow its weights up.
        amax = np.maximum(amax, SMALLEST * amax.max()) if amax.max() > 0 else np.ones(len(amax))
        x = np.concatenate(samples.pop(name), axis=1).astype(np.float64)
        found[name] = ChannelRange(tuple(map(float, amax)), _noise(kind, x, amax))
    return found


def _noise(kind: str, x: NDArray[np.float64], amax: NDArray[np.float64]) -> float:
    """What the steps of a range do to an activation of samples (C, places), as a share of its variance."""
    step = amax[:, None] / QMAX
    exact = _activation(kind, x)
    error = np.square(_activation(kind, np.rint(x / step).clip(-QMAX - 1, QMAX) * step) - exact).mean(axis=1)
    variance = exact.var(axis=1)
    return float((error / np.maximum(variance, _QUIET * variance.mean() + 1e-30)).mean())


def _activation(kind: str, x: NDArray[np.float64]) -> NDArray[np.float64]:
    gate = 1 / (1 + np.exp(-np.maximum(x, -80.0))) if kind == SILU else np.clip(x / 6 + 0.5, 0, 1)
    return x * gate
