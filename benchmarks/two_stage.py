"""Each rewrite of a two-stage detector: its operators and its time before and after, and what the outputs differ by.

    python benchmarks/two_stage.py MODEL.onnx... --size 128 [--seconds 2] [-o OUT.md]

The models are exports of torchvision's Faster or Mask R-CNN. A rewrite is applied to what the ones before it left, and
both models are run in onnxruntime in one measurement, between whose rounds they take turns; the ratio is of these
rounds, with its 90 % interval. The difference is the largest of any output over random images and a black one. Fewer
proposals give other detections, which may be as many or not.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx

from trtdet.backends import OnnxRunner
from trtdet.config import Config, InputConfig
from trtdet.files import write_atomically
from trtdet.passes import Options, load_model
from trtdet.passes.model import to_graph, to_model
from trtdet.passes.two_stage import REWRITES, levels, prepared, proposals
from trtdet.performance import BenchOptions, Target, measure
from trtdet.tables import Column, Table

IMAGES = 3
FEWER = 200
COLUMNS = (
    *(Column("rewrite", align="left"), Column("operators", align="left"), Column("nodes", align="right")),
    *(Column("before, ms", ".2f"), Column("after, ms", ".2f"), Column("after / before (90% interval)", align="right")),
    Column("largest difference", ".2g"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--size", type=int, required=True, help="of the square images")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement")
    parser.add_argument("--rewrites", nargs="+", help="only these")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    text = ""
    for path in options.models:
        rows = [
            row(name, before, after, options)
            for name, before, after in steps(path, options.size)
            if options.rewrites is None or name in options.rewrites
        ]
        table = Table(COLUMNS, rows, path.name)
        print(table.text(), flush=True)
        text += f"### {path.name}\n\n{Table(COLUMNS, rows).markdown()}\n\n"
    if options.output is not None:
        write_atomically(options.output, text.encode())


def steps(path: Path, size: int) -> Iterator[tuple[str, onnx.ModelProto, onnx.ModelProto]]:
    """Each rewrite by name, with the model before and after it."""
    exported = onnx.shape_inference.infer_shapes(load_model(path))
    head = {"decode": "detections"}
    config = Config.model_validate({"name": "any", "classes": ["any"], "input": {"size": [size, size]}, "head": head})
    graph, result = prepared(to_graph(exported), Options(config))
    yield applied("inline_nms_guard", result.count), exported, to_model(graph)
    for name, apply in REWRITES.items():
        before = to_model(graph)
        result = apply(graph)
        if name == "merge_levels":
            other = to_graph(before)
            yield applied("merge_levels_static", levels.merge(other, static=True).count), before, to_model(other)
        yield applied(name, result.count), before, to_model(graph)
        graph = to_graph(to_model(graph))
    for name, limit in (
        (f"rpn_pre_nms_topk {FEWER}", proposals.limit_before),
        (f"rpn_post_nms_topk {FEWER}", proposals.limit_after),
    ):
        fewer = to_graph(to_model(graph))
        yield applied(name, limit(fewer, FEWER).count), to_model(graph), to_model(fewer)


def applied(name: str, count: int) -> str:
    return name if count else f"{name} (nothing to do)"


def row(
    name: str, before: onnx.ModelProto, after: onnx.ModelProto, options: argparse.Namespace
) -> tuple[str | float, ...]:
    pair = [OnnxRunner(model) for model in (before, after)]
    preprocess = InputConfig(size=(options.size, options.size))
    targets = [Target(key, run, preprocess, key, "none") for key, run in zip(("before", "after"), pair, strict=True)]
    measured = measure(targets, BenchOptions(seconds=options.seconds, warm_up=options.seconds / 4, min_runs=20))
    first, second = (target.points[0] for target in measured.targets)
    counts = [Counter(node.op_type for node in model.graph.node) for model in (before, after)]
    changed = [f"{op} {counts[0][op]} to {counts[1][op]}" for op in sorted(counts[0] | counts[1])]
    changed = [text for text in changed if text.split()[1] != text.split()[3]]
    nodes = f"{len(before.graph.node)} to {len(after.graph.node)}"
    times = first.latency_ms.p50, second.latency_ms.p50
    return name, ", ".join(changed), nodes, *times, str(second.ratio), difference(*pair, options.size)


def difference(first: OnnxRunner, second: OnnxRunner, size: int) -> float:
    """The largest difference of any value of any output; NaN where they have other shapes."""
    images = np.random.default_rng(5).normal(size=(IMAGES, 1, 3, size, size)).astype(np.float32)
    largest = 0.0
    for image in (*images, np.zeros_like(images[0])):
        want, got = (run.feed({run.input: image}) for run in (first, second))
        for name in want:
            if got[name].shape != want[name].shape:
                return float("nan")
            if want[name].size:
                apart = np.abs(got[name].astype(np.float64) - want[name].astype(np.float64)).max()
                largest = max(largest, float(apart))
    return largest


if __name__ == "__main__":
    main()
