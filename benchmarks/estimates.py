"""How far estimates of engine times are from times that others measured on real GPUs. No engine is run here.

    python -m pip install ultralytics
    python benchmarks/estimates.py MEASURED --models DIR [--latencies CSV ...] [--fit]

MEASURED holds ``engines/NAME.graph.json``, ``NAME.profile.json`` and ``NAME.profile.metadata.json``, as NVIDIA's
trt-engine-explorer writes them, and ``latencies.csv`` with the columns model, input, batch, gpu, ms_fp16, ms_int8, how.
The layers of the first are those of real engines. Those of a detector are derived from an ONNX model with random
weights (``fused_plan.py``), which DIR keeps: of ultralytics, or of trtdet's exporter for YOLOX.

Prints Markdown: engines, their layers by kind, detectors, and the rows that are left out with the reason. ``--fit``
fits the constants of ``trtdet/audit/roofline.py`` anew, and prints them and the errors for each GPU and each model that
the fit did not see: the source of ``TIME_WITHIN`` and ``RATIO_WITHIN``.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import re
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import onnx
from fused_plan import FusedPlan
from onnx import TensorProto, helper

from trtdet.audit import roofline
from trtdet.audit.gpus import Gpu, gpu_named
from trtdet.audit.layers import Layer, parse_inspector
from trtdet.audit.roofline import estimate
from trtdet.audit.traffic import Flow
from trtdet.errors import ConfigError
from trtdet.quantization import Entry, PrecisionPlan
from trtdet.tables import Column, Table

PREDICTOR_MS = 0.34
"""Milliseconds an image that ultralytics' own timing adds to the engine's, fitted to its 14 times: conversion of the
input, calls from Python, and synchronisation."""

CONFIDENCE = 0.9


@dataclass(frozen=True)
class Engine:
    """An engine with the times of its layers, by name; ``ms`` is the median of whole runs in a CUDA graph."""

    name: str
    gpu: Gpu
    batch: int
    flow: Flow
    ms: float
    layer_ms: Mapping[str, float]

    def estimated(self, gpu: Gpu) -> float:
        return estimate(self.flow, gpu, self.batch).ms


@dataclass(frozen=True)
class Detector:
    """Published times of a detector in FP16 and INT8; ``extra_ms`` is of what timed it, not of the engine."""

    name: str
    gpu: Gpu
    batch: int
    fp16: Flow
    int8: Flow
    ms: tuple[float, float]
    extra_ms: float

    def estimated(self, gpu: Gpu) -> tuple[float, float]:
        fp16, int8 = (estimate(flow, gpu, self.batch).ms + self.extra_ms for flow in (self.fp16, self.int8))
        return fp16, int8


@dataclass(frozen=True)
class Skipped:
    name: str
    reason: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", type=Path, metavar="MEASURED")
    parser.add_argument("--models", type=Path, required=True, metavar="DIR", help="ONNX files of the detectors")
    parser.add_argument("--latencies", type=Path, nargs="+", metavar="CSV", help="(default: MEASURED/latencies.csv)")
    parser.add_argument("--fit", action="store_true", help="fit the constants anew, some minutes")
    options = parser.parse_args()
    measured = engines(options.measured / "engines")
    rows = list(detectors(options.latencies or [options.measured / "latencies.csv"], options.models))
    timed = [row for row in rows if isinstance(row, Detector)]
    for table in (engine_table(measured), kind_table(measured), detector_table(timed)):
        print(table.markdown(), end="\n\n")
    skipped = [(row.name, row.reason) for row in rows if isinstance(row, Skipped)]
    print(Table(("left out", Column("why", align="left")), skipped).markdown(), end="\n\n")
    print(summary(measured, timed))
    if options.fit:
        fit(measured, timed)


# Engines


def engines(folder: Path) -> list[Engine]:
    """The engines of a folder, by name."""
    return [engine(path) for path in sorted(folder.glob("*.graph.json"))]


def engine(path: Path) -> Engine:
    """Reads an engine's layers, and the times of its layers and runs from the files beside it."""
    stem = path.name.removesuffix(".graph.json")
    text = path.read_text()
    facts = json.loads((path.parent / f"{stem}.profile.metadata.json").read_text())
    flow = engine_flow(parse_inspector(text), json.loads(text)["Layers"])
    rows = json.loads((path.parent / f"{stem}.profile.json").read_text())
    times = {row["name"]: row.get("medianMs", row["averageMs"]) for row in rows if "name" in row}
    # trtexec's summary: least, most, mean, median, and percentiles.
    ms = facts["performance_summary"]["Latency"][3]
    gpu = gpu_named(facts["device_information"]["Selected Device"])
    return Engine(stem, gpu, batch=flow.batch, flow=flow, ms=ms, layer_ms=times)


def engine_flow(layers: Sequence[Layer], entries: Sequence[Mapping[str, Any]]) -> Flow:
    """The flow of an engine without its model: one is made up of the convolutions that the inspector describes."""
    nodes, weights, shapes, named = [], [], [], list(layers)
    plan = {}
    for index, (layer, entry) in enumerate(zip(layers, entries, strict=True)):
        prefix = "Conv" if "ConvKernel" in entry else ""
        if f"{prefix}OutMaps" not in entry:
            continue
        outputs, groups = entry[f"{prefix}OutMaps"], entry[f"{prefix}Groups"]
        kernel, stride = entry[f"{prefix}Kernel"], entry[f"{prefix}Stride"]
        data = layer.inputs[0].dims
        sizes = (
            layer.outputs[0].dims[2:] if not prefix else [size // by for size, by in zip(data[2:], stride, strict=True)]
        )
        name = f"layer {index}"
        shape = (outputs, data[1] // groups, *kernel)
        weights.append(helper.make_tensor(f"{name} w", TensorProto.INT8, shape, bytes(math.prod(shape)), raw=True))
        nodes.append(helper.make_node("Conv", [layer.inputs[0].name, f"{name} w"], [f"{name} y"], name, group=groups))
        # Work is counted for one image.
        shapes.append(helper.make_tensor_value_info(f"{name} y", TensorProto.FLOAT, (1, outputs, *(sizes or (1, 1)))))
        plan[name] = Entry("int8" if layer.input == "Int8" else "fp16", "")
        named[index] = replace(layer, onnx=(name,))
    image = layers[0].inputs[0]
    info = helper.make_tensor_value_info(image.name, TensorProto.FLOAT, image.dims)
    graph = helper.make_graph(nodes, "engine", [info], [], weights, value_info=shapes)
    return Flow(named, PrecisionPlan(plan), helper.make_model(graph))


# Detectors


def detectors(files: Sequence[Path], models: Path) -> Iterator[Detector | Skipped]:
    """The rows of tables of latencies."""
    flows: dict[tuple[str, str], tuple[Flow, Flow]] = {}
    for path in files:
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                yield _detector(row, models, flows)


def _detector(
    row: Mapping[str, str], models: Path, flows: dict[tuple[str, str], tuple[Flow, Flow]]
) -> Detector | Skipped:
    name, batch, how = f"{row['model']}, {row['gpu'] or 'no GPU named'}", int(row["batch"]), row["how"]
    if not row["gpu"]:
        return Skipped(name, "no GPU is named")
    if "whole predictor" in how:
        return Skipped(name, "the times are of a whole predictor")
    if not row["ms_fp16"] or not row["ms_int8"]:
        return Skipped(name, "one of both times is missing")
    try:
        gpu = gpu_named(row["gpu"])
    except ConfigError as error:
        return Skipped(name, str(error))
    key = row["model"], row["input"]
    if key not in flows:
        try:
            plan = FusedPlan(onnx.load(exported(*key, folder=models)))
        except (ImportError, FileNotFoundError) as error:
            return Skipped(name, f"its architecture is not at hand: {error}")
        flows[key] = plan.flow(), plan.flow(plan.quantised)
    fp16, int8 = flows[key]
    extra = batch * PREDICTOR_MS if "ultralytics' own timing" in how else 0.0
    times = float(row["ms_fp16"]), float(row["ms_int8"])
    return Detector(row["model"], gpu, batch=batch, fp16=fp16, int8=int8, ms=times, extra_ms=extra)


def exported(model: str, size: str, folder: Path) -> Path:
    """An ONNX file of an architecture with random weights, one image of ``size`` x ``size``.

    Raises:
        ImportError: ultralytics is not installed.
        FileNotFoundError: neither ultralytics nor trtdet has the architecture.
    """
    name = re.sub(r"^yolo(v?\d+)-", r"yolo\1", model.lower())
    path = folder / f"{name}-{size}.onnx"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    import torch

    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if match := re.fullmatch(r"yolox-(nano|tiny|s|m|l|x)(-leaky)?", name):
            from trtdet.exporter import yolox

            network = yolox.build(match[1]).eval()
            for module in network.modules() if match[2] else ():
                if hasattr(module, "act"):
                    module.act = torch.nn.LeakyReLU(0.1)
            image = torch.zeros(1, 3, int(size), int(size))
            torch.onnx.export(network, (image,), str(path), opset_version=17, dynamo=False)
            return path
        from ultralytics import YOLO

        if not re.fullmatch(r"yolo(v\d+|\d+)[nsmlxtbc]u?", name):
            raise FileNotFoundError(f"no '{name}' in ultralytics")
        network = YOLO(f"{name}.yaml")
        made = network.export(format="onnx", imgsz=int(size), opset=17, simplify=False, device="cpu", verbose=False)
    Path(made).rename(path)
    return path


# Tables


def engine_table(measured: Sequence[Engine]) -> Table:
    rows = []
    for each in measured:
        ms = each.estimated(each.gpu)
        rows.append((each.name, each.gpu.name, each.batch, each.ms, ms, each.ms / ms))
    columns = ("engine", "GPU", "batch", Column("measured, ms", ".3f"), Column("estimated, ms", ".3f"))
    return Table((*columns, Column("ratio", ".2f")), rows)


def kind_table(measured: Sequence[Engine]) -> Table:
    """Layers of all engines by kind. The profiler adds to each layer; what exceeds a whole run is taken off evenly."""
    groups: dict[tuple[str, str, str], list[tuple[float, float]]] = defaultdict(list)
    for each in measured:
        layers = estimate(each.flow, each.gpu, each.batch).layers
        excess = (sum(each.layer_ms.values()) - each.ms) / len(layers)
        for layer in layers:
            work = each.flow.work.get(layer.about[0]) if layer.about else None
            kind = (
                layer.type
                if work is None
                else "depthwise"
                if work.depthwise
                else f"conv {'x'.join(map(str, work.kernel))}"
            )
            key = each.gpu.name, kind, layer.precision
            groups[key].append((max(each.layer_ms[layer.name] - excess, 1e-4), layer.ms))
    rows = []
    for (gpu, kind, precision), times in sorted(groups.items()):
        sums = [sum(column) for column in zip(*times, strict=True)]
        rows.append((gpu, kind, precision, len(times), *sums, sums[0] / sums[1]))
    columns = ("GPU", "kernel", "reads", "layers", Column("measured, ms", ".3f"), Column("estimated, ms", ".3f"))
    return Table((*columns, Column("ratio", ".2f")), rows)


def detector_table(timed: Sequence[Detector]) -> Table:
    rows = []
    for each in timed:
        (half, fast), (half_ms, fast_ms) = each.ms, each.estimated(each.gpu)
        row = (each.name, each.gpu.name, each.batch, half, half_ms, half / half_ms, fast, fast_ms, fast / fast_ms)
        rows.append((*row, half / fast, half_ms / fast_ms))
    times = (Column("measured, ms", ".2f"), Column("estimated, ms", ".2f"), Column("ratio", ".2f"))
    half, fast = (
        tuple(replace(column, title=f"{kind} {column.title}") for column in times) for kind in ("FP16", "INT8")
    )
    gains = Column("INT8 faster, measured", ".2f"), Column("estimated", ".2f")
    return Table(("detector", "GPU", "batch", *half, *fast, *gains), rows)


def summary(measured: Sequence[Engine], timed: Sequence[Detector]) -> str:
    """The errors of times and of speed-ups in a sentence."""
    logs, gains = errors([*measured, *timed])
    worst = math.exp(max(map(abs, logs)))
    text = f"{len(logs)} times within a factor of {worst:.2f} (median {math.exp(median(map(abs, logs))):.2f})"
    off = [abs(first - second) for first, second in gains]
    if off:
        text += f"; {len(off)} speed-ups off by at most {max(off):.2f} (median {median(off):.2f})"
    return text + "."


def errors(rows: Sequence[Engine | Detector]) -> tuple[list[float], list[tuple[float, float]]]:
    """Logarithms of estimated over measured times, and pairs of speed-ups, measured and estimated."""
    logs, gains = [], []
    for each in rows:
        if isinstance(each, Engine):
            logs.append(math.log(each.estimated(each.gpu) / each.ms))
            continue
        ours = each.estimated(each.gpu)
        logs += [math.log(second / first) for first, second in zip(each.ms, ours, strict=True)]
        gains.append((each.ms[0] / each.ms[1], ours[0] / ours[1]))
    return logs, gains


# The fit


class Constants:
    """The fitted constants, their starting values, and how to set them."""

    names = ("KERNEL_CYCLES", "MEMORY", "QUANTISED", "IMAGE", "INT8", "FP16", "FP32", "DEPTHWISE", "sustained", "extra")
    start = (7000.0, 0.8, 0.5, 0.2, 0.65, 0.65, 0.6, 0.5, 0.6, 0.3)
    _bits: Mapping[str, int] = {"INT8": 8, "FP16": 16, "FP32": 32}

    def set(self, values: Sequence[float], rows: Sequence[Engine | Detector]) -> list[Engine | Detector]:
        """Sets the constants of :mod:`trtdet.audit.roofline`; returns the rows with those of GPUs and predictors."""
        given = dict(zip(self.names, values, strict=True))
        for name, bits in self._bits.items():
            roofline.ARITHMETIC[bits] = given[name]  # type: ignore[index]
        for name in ("KERNEL_CYCLES", "MEMORY", "QUANTISED", "IMAGE", "DEPTHWISE"):
            setattr(roofline, name, given[name])
        changed: list[Engine | Detector] = []
        for row in rows:
            if row.gpu.sustained < 1:
                row = replace(row, gpu=replace(row.gpu, sustained=min(given["sustained"], 0.999)))
            if isinstance(row, Detector) and row.extra_ms:
                row = replace(row, extra_ms=row.extra_ms / PREDICTOR_MS * given["extra"])
            changed.append(row)
        return changed


def fit(measured: Sequence[Engine], timed: Sequence[Detector]) -> None:
    """Fits all constants, then again without each GPU and without each model."""
    from scipy.optimize import least_squares

    constants, rows = Constants(), [*measured, *timed]

    def residuals(rows: Sequence[Engine | Detector]) -> Callable[[np.ndarray], np.ndarray]:
        def call(logs: np.ndarray) -> np.ndarray:
            changed = constants.set(np.exp(logs), rows)
            times, gains = errors(changed)
            out = [*times, *(math.log(second / first) for first, second in gains)]
            for each in changed:
                if isinstance(each, Engine):
                    out += _layer_errors(each)
            # A weak pull to the start, for constants that few layers decide.
            return np.array([*out, *(0.1 * (logs - np.log(constants.start)))])

        return call

    whole = least_squares(residuals(rows), np.log(constants.start), loss="soft_l1", f_scale=0.15)
    print(
        "\nfitted: "
        + ", ".join(f"{name} {value:.3g}" for name, value in zip(constants.names, np.exp(whole.x), strict=True))
    )
    print(summary(*_split(constants.set(np.exp(whole.x), rows))), flush=True)
    logs, gains, lines = [], [], []
    for title, group in _groups(rows):
        kept = [row for row in rows if row not in group]
        part = least_squares(residuals(kept), whole.x, loss="soft_l1", f_scale=0.15, max_nfev=6)
        times, pairs = errors(constants.set(np.exp(part.x), group))
        lines.append((title, len(times), *(math.exp(of(times)) for of in (min, max))))
        print(f"without {title}: {', '.join(f'{math.exp(each):.2f}' for each in times)}", file=sys.stderr, flush=True)
        logs, gains = logs + times, gains + pairs
    columns = ("left out", "times", Column("least, estimated / measured", ".2f"), Column("most", ".2f"))
    print("\n" + Table(columns, lines).markdown())
    ratios = [abs(math.log(first / second)) for first, second in gains]
    within = [math.exp(float(np.quantile(np.abs(each), CONFIDENCE))) for each in (logs, ratios)]
    off = [abs(first - second) for first, second in gains]
    middle = math.exp(median(map(abs, logs)))
    print(
        f"\nleft out: times within {within[0]:.2f} at {CONFIDENCE:.0%} (median {middle:.2f}), ratios of both times "
        f"within {within[1]:.2f}; speed-ups off by {median(off):.2f} in the median, at most {max(off):.2f}"
    )


def _layer_errors(each: Engine) -> list[float]:
    """Weighted errors of the layers, all together less than that of the run."""
    layers = estimate(each.flow, each.gpu, each.batch).layers
    excess = max(0.0, (sum(each.layer_ms.values()) - each.ms) / len(layers))
    weight = 0.6 / math.sqrt(len(layers))
    return [weight * math.log((layer.ms + excess) / each.layer_ms[layer.name]) for layer in layers]


def _split(rows: Sequence[Engine | Detector]) -> tuple[list[Engine], list[Detector]]:
    return [row for row in rows if isinstance(row, Engine)], [row for row in rows if isinstance(row, Detector)]


def _groups(rows: Sequence[Engine | Detector]) -> Iterator[tuple[str, list[Engine | Detector]]]:
    """The rows of each GPU and of each model, where not the same rows."""
    seen = list[list[Engine | Detector]]()
    for key in (lambda row: row.gpu.name, lambda row: re.sub(r"[-_]?([A-Z0-9]+_)?(fp|qat).*", "", row.name).lower()):
        groups: dict[str, list[Engine | Detector]] = defaultdict(list)
        for row in rows:
            groups[key(row)].append(row)
        for title, group in groups.items():
            if group not in seen:
                seen.append(group)
                yield title, group


if __name__ == "__main__":
    main()
