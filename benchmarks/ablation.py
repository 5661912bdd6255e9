"""What each correction does alone, and what is lost without it: error at the head, agreement with FP32, mAP and nodes.

    python benchmarks/ablation.py MODEL ... --data DIR [--config NAME] [--int8-all] [--effort EFFORT] [--rows ROW ...]
        -o OUT

MODEL is a float ONNX file; NAME is a configuration, by default the YAML file beside it, of the same name, or that which
is known for the file's name. DIR holds ``coco/train2017``, ``coco/val2017`` and
``coco/annotations/instances_val2017.json``; a detector whose classes are not annotated there has no mAP.

For every model the INT8 network is made with no correction, with each alone, with all, and with all but each: those of
an effort, by default of the most thorough; with ``--rows`` some of these. What the gate does not keep is not in it.
The figures are those of the val2017 images, on which nothing was chosen: corrections are computed from and judged on
images of train2017. The error at the head is that which they are judged by, of the decoded boxes and scores against
those of the float model. Nodes are those that a network has more than the one with no correction, where that has been
measured too.

Without ``--backend`` the network is that for a backend whose kernels quantise what they write, such as TensorRT 8.6 and
10; scores are those of onnxruntime. Each row is kept in OUT/NAME.jsonl as soon as it is there, and another run goes on
after it: remove a line to have it measured anew. Prints Markdown.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from coco_models import MODELS, published_config, val2017

import trtdet
from trtdet.backends import OnnxRunner, choose
from trtdet.building.corrections import Prepared, prepared
from trtdet.building.graph import host_graph
from trtdet.building.ranges import Calibrated, calibrated, select_images
from trtdet.data import evenly
from trtdet.evaluation.scoring import Evaluation
from trtdet.files import sha256_file
from trtdet.files.journal import Rows
from trtdet.options import CalibrationOptions
from trtdet.options.fields import corrections_of, effort_text
from trtdet.passes import decoded
from trtdet.quantization import DataFlow, Sources
from trtdet.quantization.corrections.gate import Task, head_errors
from trtdet.runtime.detector import Detector
from trtdet.tables import Cell, Column, Table


@dataclass(frozen=True)
class Row:
    """A network; fractions, 0..1, and None where there is no figure.

    Attributes:
        name: which corrections it may have.
        error: at the head.
        agreement, agreement_low, agreement_high: with the detections of FP32, and its interval.
        map: its mAP.
        difference, low, high: mAP minus that of FP32, and its interval.
        nodes: that it has.
        seconds: of CPU time that the corrections took, of all threads.
    """

    name: str
    error: float
    agreement: float | None
    agreement_low: float | None
    agreement_high: float | None
    map: float | None
    difference: float | None
    low: float | None
    high: float | None
    nodes: int
    seconds: float


def ways(names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The corrections of each row: none, each alone, all, all but each; no two are the same."""
    alone = {f"`{name}` alone": (name,) for name in names}
    without = {f"all but `{name}`": tuple(other for other in names if other != name) for name in names}
    found: dict[str, tuple[str, ...]] = {}
    for title, chosen in {"none": (), **alone, "all": tuple(names), **without}.items():
        if chosen not in found.values():
            found[title] = chosen
    return found


@dataclass(frozen=True, eq=False)
class RankingSubject:
    """A calibrated model with the images that it is measured on."""

    ranged: Calibrated
    options: CalibrationOptions
    dataset: trtdet.CocoDataset
    reference: Evaluation

    def measured(self, name: str, names: tuple[str, ...]) -> Row:
        """The network with some corrections."""
        started = time.process_time()
        ready = prepared(self.ranged, self.options, names)
        seconds = time.process_time() - started
        model = ready.explicit(ready.without_overflow(ready.plan)).model
        print(f"{name}: {'; '.join(ready.summary)}", file=sys.stderr, flush=True)
        (error,) = head_errors(self._task(ready), [model])
        graph = ready.graph
        found = trtdet.evaluate(Detector.running(model, graph.config, graph.nms_mode), self.dataset)
        agreement = trtdet.agree(found, self.reference)
        compared = trtdet.compare(found, self.reference) if self.dataset.annotated else None
        return Row(
            name,
            error.distance,
            *(agreement.ap, agreement.low, agreement.high),
            found.result.map if compared else None,
            *((compared.difference, compared.low, compared.high) if compared else (None, None, None)),
            len(model.graph.node),
            seconds,
        )

    def _task(self, ready: Prepared) -> Task:
        """For the gate's measure, on the images that are scored."""
        paths = [image.path for image in self.dataset.images]
        head = decoded(ready.graph.nms_mode, ready.graph.config)
        sources = Sources(paths, ready.graph.config.input, OnnxRunner, head)
        return Task(ready.model, ready.graph.placement, {}, (), (), paths, sources)


def scored_images(data: Path, config: trtdet.Config, count: int | None) -> trtdet.CocoDataset:
    """Those of val2017, annotated where the annotations have the detector's classes."""
    images, annotations = data / "coco" / "val2017", data / "coco" / "annotations" / "instances_val2017.json"
    known = {category["name"] for category in json.loads(annotations.read_text())["categories"]}
    if known.issuperset(config.classes):
        annotated = val2017(data / "coco", config.classes)
        return annotated.first(count or len(annotated.images))
    found = trtdet.CocoDataset.unannotated(images, config.classes)
    return replace(found, images=evenly(found.images, count or len(found.images)))


def config_of(model: Path, name: str | None) -> trtdet.Config:
    """The configuration of a model, with the candidates that its published score was made with."""
    beside = model.with_suffix(".yaml")
    if name is not None or model.stem not in MODELS:
        return trtdet.load_config(name or str(beside))
    return published_config(model.stem)


def rows_of(model: Path, options: argparse.Namespace) -> tuple[str, list[Row]]:
    """A line about the model, and its rows."""
    config = config_of(model, options.config)
    calibration = CalibrationOptions(images=options.data / "coco" / "train2017", num_images=options.num_images)
    caps = choose(options.backend).capabilities if options.backend else None
    graph = replace(host_graph(model, config, caps=caps), int8_all=options.int8_all)
    if caps is None:
        graph = replace(graph, flow=DataFlow(fused=True))
    selected = select_images(calibration)
    ranged = calibrated(graph, calibration, selected)
    dataset = scored_images(options.data, graph.config, options.score_images)
    reference = trtdet.evaluate(Detector.running(graph.model, graph.config, graph.nms_mode, model), dataset)
    subject = RankingSubject(ranged, calibration, dataset, reference)
    corrections = corrections_of(options.effort)
    network = [options.int8_all, options.backend, graph.flow.fused, corrections]
    facts = [sha256_file(model), selected.sha256, len(dataset.images), *network]
    key = hashlib.sha256(json.dumps([facts, graph.config.model_dump(mode="json")]).encode()).hexdigest()
    known = ways(corrections)
    if unknown := [name for name in options.rows or () if name not in known]:
        raise SystemExit(f"ablation.py: error: --rows has no {', '.join(unknown)}; give some of {', '.join(known)}")
    wanted = {name: names for name, names in known.items() if name in (options.rows or known)}
    with Rows(options.output / f"{model.stem}.jsonl", key) as kept:
        for name, names in wanted.items():
            if name not in kept.found:
                kept.append(asdict(subject.measured(name, names)))
        rows = [Row(**kept.found[name]) for name in wanted]
    score = f", mAP of FP32 {100 * reference.result.map:.2f}" if dataset.annotated else ""
    convs = f"{len(graph.plan.names('int8'))} of {len(graph.plan.entries)} convolutions in INT8"
    return f"{model.stem}: {convs}{score}, {len(dataset.images)} images", rows


def interval(value: float | None, low: float | None, high: float | None, sign: str = "") -> str:
    """Points (hundredths) with their interval."""
    if value is None or low is None or high is None:
        return "-"
    return f"{100 * value:{sign}.2f} ({100 * low:{sign}.2f} .. {100 * high:{sign}.2f})"


def table(title: str, rows: Sequence[Row]) -> Table:
    """The rows of a model."""
    columns = (
        *("corrections", Column("error at the head", ".4f"), "agreement, 90 % interval"),
        *("mAP against FP32, 90 % interval", Column("nodes more"), Column("CPU s", ".0f")),
    )
    plain = next((row.nodes for row in rows if row.name == "none"), None)
    lines: list[list[Cell]] = [
        [
            row.name,
            row.error,
            interval(row.agreement, row.agreement_low, row.agreement_high),
            interval(row.difference, row.low, row.high, "+"),
            None if plain is None else row.nodes - plain,
            row.seconds,
        ]
        for row in rows
    ]
    return Table(columns, lines, title)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="+", metavar="MODEL")
    parser.add_argument("--config")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--num-images", type=int, default=64, help="calibration images")
    parser.add_argument("--score-images", type=int, help="images of val2017, evenly spaced; all of them by default")
    parser.add_argument("--effort", type=effort_text, default="thorough", help="a level, or names of corrections")
    parser.add_argument("--rows", nargs="+", metavar="ROW", help="such as none and all; every row by default")
    parser.add_argument("--int8-all", action="store_true", help="every convolution in INT8")
    parser.add_argument("--backend", help="that the network is for")
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    for model in options.models:
        print(table(*rows_of(model, options)).markdown() + "\n", flush=True)


if __name__ == "__main__":
    main()
