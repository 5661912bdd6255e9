"""INT8 on detectors that nothing was chosen on, trtdet beside its peers: loss of mAP, and agreement with FP32.

    python benchmarks/peers/detectors.py --models DIR --data DIR --work DIR [--quantizers NAME ...] -o OUT

``--models`` holds a NAME.onnx with a NAME.yaml, its configuration, for every detector. ``--data`` holds
``coco/val2017``, ``coco/train2017`` and ``coco/annotations/instances_val2017.json``; a detector with images of its own
has ``NAME/val``, ``NAME/train`` and, where they are annotated, ``NAME/val.json`` beside it. ``--work`` holds the peers'
environments, as in ``run.py``.

Every quantiser gets what ``run.py`` gives it, and all are scored by the same code with onnxruntime on the CPU. Where
the annotations have the detector's classes, the difference of mAP has the 90 % interval of a paired bootstrap over the
images. The agreement, AP over IoU 0.50:0.95 with the detections of FP32 over 0.25 as the boxes to find, needs no
annotations.

Each row is kept in OUT/rows.jsonl as soon as it is there, and a further run goes on after it: remove a line to have it
measured anew. Prints Markdown.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean

import onnx
from cases import HEAD_IN_FLOAT, IMAGES, Case, as_cell, folder_of, pins_of, prepare, run_peer, run_trtdet
from process import Failed

import trtdet
from trtdet.config import COCO_CLASSES
from trtdet.evaluation.agreement import agree
from trtdet.evaluation.scoring import Evaluation
from trtdet.quantization.placement import CONVOLUTIONS

METHODS: dict[str, dict[str, tuple[str, ...]]] = {
    "trtdet": {
        "default": (),
        "--int8-all": ("--int8-all",),
        "--int8-all --effort thorough": ("--int8-all", "--effort", "thorough"),
    },
    "modelopt": {f"{rule}{HEAD_IN_FLOAT}": () for rule in ("max", "entropy")},
    "nncf": {"performance": ()},
    "onnxruntime": {"minmax": (), "entropy-strided": ()},
}
"""The methods of each quantiser; for trtdet, the options of ``trtdet build --int8``."""


@dataclass(frozen=True)
class Row:
    """What a quantiser made of a detector; fractions, 0..1, and None where there is no figure.

    Attributes:
        model, quantizer, method: what was quantised, by what.
        problem: why there is no result; empty where there is.
        reference: mAP of FP32.
        difference, low, high: mAP minus that of FP32, and its interval.
        agreement, agreement_low, agreement_high: with the detections of FP32, and its interval.
        convolutions: how many have Q/DQ nodes before both inputs, and how many there are.
        seconds: wall time of the quantiser's whole process.
    """

    model: str
    quantizer: str
    method: str
    problem: str = ""
    reference: float | None = None
    difference: float | None = None
    low: float | None = None
    high: float | None = None
    agreement: float | None = None
    agreement_low: float | None = None
    agreement_high: float | None = None
    convolutions: tuple[int, int] = (0, 0)
    seconds: float = 0.0

    @property
    def key(self) -> tuple[str, str, str]:
        """What tells rows apart."""
        return self.model, self.quantizer, self.method


@dataclass(frozen=True)
class Images:
    """The images of a detector."""

    calibration: Path
    validation: Path
    annotations: Path | None

    def dataset(self, classes: tuple[str, ...]) -> trtdet.CocoDataset:
        """Those that are scored."""
        if self.annotations is None:
            return trtdet.CocoDataset.unannotated(self.validation, classes)
        return trtdet.CocoDataset.load(self.annotations, self.validation, classes)


def images_of(source: Path, classes: tuple[str, ...], data: Path) -> Images:
    """A detector's own images, or COCO's; annotated where the classes are theirs."""
    own = source.with_suffix("")
    if own.is_dir():
        annotations = own / "val.json"
        return Images(own / "train", own / "val", annotations if annotations.is_file() else None)
    coco = data / "coco"
    annotations = coco / "annotations" / "instances_val2017.json"
    return Images(coco / "train2017", coco / "val2017", annotations if classes == COCO_CLASSES else None)


def rows_of(source: Path, data: Path, work: Path, wanted: list[tuple[str, str]], folder: Path) -> Iterator[Row]:
    """Quantises and scores a detector in every wanted way."""
    config = source.with_suffix(".yaml")
    images = images_of(source, trtdet.load_config(config).classes, data)
    case = prepare(source, str(config), images.calibration, folder / "prepared")
    dataset = images.dataset(case.config.classes)
    reference = trtdet.evaluate(case.detector(case.model), dataset)
    for quantizer, method in wanted:
        print(f"{source.stem}: {quantizer} {method}", file=sys.stderr, flush=True)
        place = folder_of(folder, quantizer, method)
        shutil.rmtree(place, ignore_errors=True)
        try:
            if quantizer == "trtdet":
                arguments = METHODS[quantizer][method]
                measured, file, detector = run_trtdet(arguments, case, images.calibration, place)
            else:
                measured, file, detector = run_peer(quantizer, method, case, work, place)
        except Failed as failed:
            yield Row(source.stem, quantizer, method, str(failed))
            continue
        found = trtdet.evaluate(detector, dataset)
        yield row_of(case, (quantizer, method), found, reference, file, measured.seconds)


def row_of(
    case: Case, way: tuple[str, str], found: Evaluation, reference: Evaluation, file: Path, seconds: float
) -> Row:
    """Compares the detections of a quantised detector with the annotations and with FP32's."""
    agreement = agree(found, reference)
    compared = trtdet.compare(found, reference) if found.metric.dataset.annotated else None
    return Row(
        case.source.stem,
        *way,
        agreement.problem,
        reference.result.map if compared else None,
        compared and compared.difference,
        compared and compared.low,
        compared and compared.high,
        agreement.ap,
        agreement.low,
        agreement.high,
        quantized_convolutions(onnx.load(str(file))),
        seconds,
    )


def quantized_convolutions(model: onnx.ModelProto) -> tuple[int, int]:
    """How many convolutions have Q/DQ nodes before both inputs, seen through casts, and how many there are."""
    makers = {output: node for node in model.graph.node for output in node.output}

    def quantized(tensor: str) -> bool:
        maker = makers.get(tensor)
        while maker is not None and maker.op_type in ("Cast", "Reshape", "Transpose"):
            maker = makers.get(maker.input[0])
        return maker is not None and maker.op_type == "DequantizeLinear"

    convolutions = [node for node in model.graph.node if node.op_type in CONVOLUTIONS]
    return sum(all(map(quantized, node.input[:2])) for node in convolutions), len(convolutions)


def interval(value: float | None, low: float | None, high: float | None, sign: str = "") -> str:
    """Points (hundredths) with their interval."""
    if value is None or low is None or high is None:
        return "-"
    return f"{100 * value:{sign}.2f} ({100 * low:{sign}.2f} .. {100 * high:{sign}.2f})"


def table(rows: list[Row]) -> str:
    """All rows, and what each way of quantising loses and agrees on average."""
    lines = [
        "| detector (mAP of FP32) | quantiser | method | against FP32, 90 % interval | agreement, 90 % interval "
        "| convs with Q/DQ | s |",
        "|" + "---|" * 7,
    ]
    previous = ""
    for row in rows:
        score = "" if row.reference is None else f" ({100 * row.reference:.2f})"
        name = "" if row.model == previous else row.model + score
        previous = row.model
        cells = [name, row.quantizer, row.method]
        if row.agreement is None:
            cells += [as_cell(row.problem), "-", "-", "-"]
        else:
            cells += [
                interval(row.difference, row.low, row.high, "+"),
                interval(row.agreement, row.agreement_low, row.agreement_high),
                "{} of {}".format(*row.convolutions),
                f"{row.seconds:.0f}",
            ]
        lines.append("| " + " | ".join(cells) + " |")
    lines += [
        "",
        "| quantiser | method | detectors | mean loss of mAP | largest | mean agreement | least |",
        "|" + "---|" * 7,
    ]
    for way in dict.fromkeys((row.quantizer, row.method) for row in rows):
        mine = [row for row in rows if (row.quantizer, row.method) == way]
        losses = [-100 * row.difference for row in mine if row.difference is not None]
        agreed = [100 * row.agreement for row in mine if row.agreement is not None]
        figures = (mean(losses), max(losses)) if losses else (float("nan"),) * 2
        agreements = (mean(agreed), min(agreed)) if agreed else (float("nan"),) * 2
        numbers = " | ".join(f"{figure:.2f}" for figure in (*figures, *agreements))
        lines.append(f"| {way[0]} | {way[1]} | {len(agreed)} | {numbers} |")
    return "\n".join(lines)


def kept_rows(file: Path) -> list[Row]:
    """The rows of earlier runs."""
    lines = file.read_text().splitlines() if file.exists() else []
    return [Row(**{**values, "convolutions": tuple(values["convolutions"])}) for values in map(json.loads, lines)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, help="where the peers' environments are, or will be")
    parser.add_argument("--quantizers", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    options.work.mkdir(parents=True, exist_ok=True)
    kept = options.output / "rows.jsonl"
    rows = {row.key: row for row in kept_rows(kept)}
    ways = [(quantizer, method) for quantizer in options.quantizers for method in METHODS[quantizer]]
    sources = sorted(file for file in options.models.glob("*.onnx") if file.with_suffix(".yaml").is_file())
    for source in sources:
        wanted = [way for way in ways if (source.stem, *way) not in rows]
        if not wanted:
            continue
        folder = (options.output / source.stem).resolve()
        for row in rows_of(source.resolve(), options.data, options.work.resolve(), wanted, folder):
            rows[row.key] = row
            with kept.open("a") as file:
                file.write(json.dumps(asdict(row)) + "\n")
    print(f"{IMAGES} calibration images; trtdet {trtdet.__version__}.")
    for peer in options.quantizers:
        if peer != "trtdet":
            print(f"{peer}: {pins_of(peer)}.")
    print("\n" + table([rows[key] for key in ((s.stem, *way) for s in sources for way in ways) if key in rows]))


if __name__ == "__main__":
    main()
