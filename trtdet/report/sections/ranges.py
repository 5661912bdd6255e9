"""Histograms of the activations, with the threshold of every calibration rule and the one in use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import onnx

from trtdet.calibration import RULES, Collection, Histogram, Ranges
from trtdet.calibration.thresholds import percentile
from trtdet.options import CalibrationOptions
from trtdet.quantization import PrecisionPlan
from trtdet.report.document import DrawnHistogram, Histograms, Section, Text
from trtdet.tables import listed

_SHOWN = 10
_BARS = 128
_STEPS = 20
"""A bar's height grows by this many steps when its count grows tenfold."""

_BETWEEN = ("QuantizeLinear", "DequantizeLinear", "Cast", "Mul", "Add", "Sub", "Div", "Identity")
"""Operators that trtdet inserts between a convolution and its float input: casts, Q/DQ pairs, channel maps."""


def ranges_section(
    ranges: Ranges | None,
    collection: Collection,
    inputs: Mapping[str, str],
    worst: Sequence[str],
    percent: float | None = None,
) -> Section:
    """Histograms of the tensors that INT8 convolutions read; those of the worst convolutions are drawn first.

    ``ranges`` are those in use, None where there are several, as in a sweep; ``inputs`` has the input tensor by INT8
    convolution; ``worst`` has the convolutions by falling sensitivity, none without a ranking; ``percent`` is for the
    rule ``percentile``, None for its default.
    """
    rules = dict(RULES)
    if percent is not None:
        rules["percentile"] = partial(percentile, percent=percent)
    readers: dict[str, list[str]] = {}
    for name, tensor in inputs.items():
        if tensor in collection.histograms:
            readers.setdefault(tensor, []).append(name)

    def drawn_histogram(tensor: str) -> DrawnHistogram:
        histogram = collection.histograms[tensor]
        tensor_range = None if ranges is None else ranges.tensors.get(tensor)
        top, heights = compact(histogram)
        return DrawnHistogram(
            listed(readers[tensor], 3),
            tensor=tensor,
            top=top,
            heights=heights,
            thresholds={rule: float(f"{choose(histogram):.6g}") for rule, choose in rules.items()}
            if histogram.amax
            else {},
            chosen=None if tensor_range is None else float(f"{tensor_range.amax:.6g}"),
            cut_off=None if tensor_range is None else cut_off(histogram, tensor_range.amax),
            largest=float(f"{histogram.amax:.6g}"),
        )

    with ThreadPoolExecutor() as pool:  # NumPy computes outside the interpreter's lock
        entries = tuple(pool.map(drawn_histogram, readers))
    places = {name: place for place, names in enumerate(readers.values()) for name in names}
    order, why = list(dict.fromkeys(places[name] for name in worst if name in places)), "the most sensitive"
    if not order:
        why = "those with most noise for their signal"
        # The amax in use, else the threshold of the default rule.
        amaxes = [entry.chosen or entry.thresholds.get(CalibrationOptions.rule, 0.0) for entry in entries]
        noises = [noise(collection.histograms[entry.tensor], amax) for entry, amax in zip(entries, amaxes, strict=True)]
        order = sorted(range(len(entries)), key=lambda place: -noises[place])
    shown = tuple(order[:_SHOWN])
    dotted = "" if ranges is None else f", dotted the one in use (rule {ranges.rule}, then corrections)"
    text = (
        f"|x| on {collection.images} calibration images, of tensors that are quantised; a line for each rule{dotted}. "
        "What lies right of a line is cut off."
    )
    title = f"Inputs of INT8 convolutions, {len(shown)} of {len(entries)}, {why}:"
    return Section("Histograms and thresholds", (Text((text,)), Histograms(entries, shown, title)))


def cut_off(histogram: Histogram, amax: float) -> float:
    """Share of the values above ``amax``, 0..1; the bin that ``amax`` divides counts in proportion. None are above the
    largest value, whatever its bin holds."""
    if amax >= histogram.amax:
        return 0.0
    place, inside = int(amax / histogram.width), amax / histogram.width % 1.0
    above = float(histogram.counts[place + 1 :].sum()) + (1.0 - inside) * float(histogram.counts[place])
    return above / max(histogram.total, 1)


def compact(histogram: Histogram) -> tuple[float, bytes]:
    """``top`` and ``heights`` of a :class:`trtdet.report.document.DrawnHistogram` with 128 bars."""
    bins = max(int(np.ceil(histogram.amax / histogram.width)), 1)
    group = -(-bins // _BARS)
    counts = np.zeros(group * _BARS, np.int64)
    counts[:bins] = histogram.counts[:bins]
    sums = counts.reshape(_BARS, group).sum(axis=1)
    heights = np.minimum(np.rint(_STEPS * np.log10(1.0 + sums)), 255).astype(np.uint8)
    return float(f"{group * _BARS * histogram.width:.6g}"), heights.tobytes()


def noise(histogram: Histogram, amax: float) -> float:
    """Noise of rounding and clipping: mean square error over the mean square of the values; 0 for an amax of 0."""
    counts, width = histogram.rebinned(2048)
    centres = (np.arange(len(counts)) + 0.5) * width
    power = float(counts @ np.square(centres))
    if amax <= 0 or power <= 0:
        return 0.0
    step = amax / 127
    rounded = np.minimum(np.rint(centres / step), 127) * step
    return float(counts @ np.square(rounded - centres)) / power


def inputs_of(model: onnx.ModelProto, plan: PrecisionPlan, collection: Collection) -> dict[str, str]:
    """The float input tensor of each convolution that is planned in INT8, in the order of the plan.

    ``model`` is quantized: Q/DQ nodes and casts are skipped on the way to a tensor of the collection.
    """
    nodes = {node.name: node for node in model.graph.node}
    makers = {output: node for node in model.graph.node for output in node.output}
    inputs = {}
    for name in plan.names("int8"):
        tensor = nodes[name].input[0] if name in nodes else ""
        while tensor not in collection.histograms and tensor in makers and makers[tensor].op_type in _BETWEEN:
            tensor = makers[tensor].input[0]
        if tensor in collection.histograms:
            inputs[name] = tensor
    return inputs
