"""INT8 on detectors that nothing was chosen on, trtdet beside its peers: loss of mAP, and agreement with FP32.

    python benchmarks/peers/detectors.py --models DIR --data DIR --work DIR [--quantizers NAME ...]
        [--method NAME ...] [--detectors NAME ...] [--chosen-on DIR] -o OUT

``--models`` holds a NAME.onnx with a NAME.yaml, its configuration, for every detector. ``--data`` holds
``coco/val2017``, ``coco/train2017`` and ``coco/annotations/instances_val2017.json``; a detector with images of its own
has ``NAME/val``, ``NAME/train`` and, where they are annotated, ``NAME/val.json`` beside it. ``--work`` holds the peers'
environments, as in ``run.py``.

Every quantiser gets what ``run.py`` gives it, and all are scored by the same code with onnxruntime on the CPU. Where
the annotations have the detector's classes, the difference of mAP has the 90 % interval of a paired bootstrap over the
images. The agreement, AP over IoU 0.50:0.95 with the detections of FP32 over 0.25 as the boxes to find, needs no
annotations.

Images are told apart by their decoded pixels. An image that calibrates, judges a correction (the gate) and is scored
would flatter, so that the script ends where one does two of these. ``--chosen-on`` is a folder of images on which
earlier decisions were made: the scored images are scored once more without these, and once only these.

FP32 is scored once per detector; all detections are kept in OUT. A method is measured on all detectors before the next.
Each row is kept in OUT/rows.jsonl as soon as it is there, and a further run goes on after it: remove a line to have it
measured anew. OUT/detectors.md, which is also printed, has all rows so far.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from statistics import mean

import numpy as np
import onnx
from cases import (
    HEAD_IN_FLOAT,
    Case,
    as_cell,
    calibration_images,
    folder_of,
    pins_of,
    prepare,
    run_peer,
    run_trtdet,
)
from process import Failed

import trtdet
from trtdet.config import COCO_CLASSES
from trtdet.data import find_images
from trtdet.data.images import read_image
from trtdet.evaluation.agreement import agree
from trtdet.evaluation.metrics import CocoMetric
from trtdet.evaluation.resampling import Bootstrap, draws, mean_average_precision
from trtdet.evaluation.scoring import Evaluation
from trtdet.quantization.placement import CONVOLUTIONS
from trtdet.quantization.sources import held_back
from trtdet.runtime.detector import Detector

METHODS: dict[str, dict[str, tuple[str, ...]]] = {
    "trtdet": {
        "default": (),
        "--int8-all": ("--int8-all",),
        "--int8-all --set plan.fp16_budget=0.05": ("--int8-all", "--set", "plan.fp16_budget=0.05"),
        "--int8-all --effort thorough": ("--int8-all", "--effort", "thorough"),
    },
    "modelopt": {f"{rule}{HEAD_IN_FLOAT}": () for rule in ("max", "entropy")},
    "nncf": {"performance": ()},
    "onnxruntime": {"minmax": (), "entropy-strided": ()},
}
"""The methods of each quantiser; for trtdet, the options of ``trtdet build --int8``."""

BOOTSTRAP = Bootstrap()

ALL, OTHERS, CHOSEN = "all images", "images that nothing was chosen on", "images that decisions were made on"


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
        images: which images were scored, and ``count``, how many.
        resampled: the difference in each resample of the images; equal images have equal resamples, whatever the model.
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
    images: str = ALL
    count: int = 0
    resampled: tuple[float, ...] = ()

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What tells rows apart."""
        return self.model, self.quantizer, self.method, self.images


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


@cache
def pixels_of(path: Path) -> str:
    """Hexadecimal SHA-256 of an image's shape and decoded pixels: the same for the same image under another name."""
    pixels = read_image(path)
    return hashlib.sha256(repr(pixels.shape).encode() + pixels.tobytes()).hexdigest()


@dataclass(frozen=True)
class Split:
    """What each image is for, by its decoded pixels.

    Attributes:
        calibration: images that ranges and corrections are computed from.
        gate: images that judge corrections.
        scored: images that are scored, in the data set's order.
        chosen_on: those of them on which decisions were made.
    """

    calibration: frozenset[str]
    gate: frozenset[str]
    scored: tuple[str, ...]
    chosen_on: frozenset[str]

    @classmethod
    def of(cls, images: Images, dataset: trtdet.CocoDataset, chosen_on: Sequence[Path]) -> Split:
        """Reads all images; ends the script where one has two purposes, or is scored twice."""
        fitted, gate = held_back(calibration_images(images.calibration))
        scored = tuple(pixels_of(image.path) for image in dataset.images)
        split = cls(
            frozenset(map(pixels_of, fitted)),
            frozenset(map(pixels_of, gate)),
            scored,
            frozenset(map(pixels_of, chosen_on)) & frozenset(scored),
        )
        twice = len(scored) - len(set(scored))
        pairs = (split.calibration & split.gate, split.calibration & set(scored), split.gate & set(scored))
        if twice or any(pairs):
            raise SystemExit(
                f"'{images.validation}' and '{images.calibration}' share images by content: "
                f"{len(pairs[0])} calibrate and judge, {len(pairs[1])} calibrate and are scored, {len(pairs[2])} judge "
                f"and are scored, {twice} are scored twice; take them out, or the scores flatter"
            )
        return split

    def __str__(self) -> str:
        decided = f", {len(self.chosen_on)} of which decisions were made on" if self.chosen_on else ""
        return (
            f"{len(self.calibration)} images calibrate, {len(self.gate)} judge corrections, {len(self.scored)} are "
            f"scored{decided}; no image, by its decoded pixels, is in two of these sets"
        )


class Subject:
    """A detector to quantise, with its images and the detections of FP32.

    Args:
        source: its ONNX file, with the configuration beside it.
        data, work: as the script's options.
        chosen_on: images on which decisions were made.
        folder: for all files of this detector.
    """

    def __init__(self, source: Path, data: Path, work: Path, chosen_on: Sequence[Path], folder: Path) -> None:
        self._source, self._config = source, source.with_suffix(".yaml")
        self._work, self._folder = work, folder
        classes = trtdet.load_config(self._config).classes
        self.images = images_of(source, classes, data)
        dataset = self.images.dataset(classes)
        self.split = Split.of(self.images, dataset, chosen_on)
        self.datasets = {ALL: dataset}
        if self.split.chosen_on:
            parts: dict[bool, list[trtdet.CocoImage]] = {False: [], True: []}
            for image, pixels in zip(dataset.images, self.split.scored, strict=True):
                parts[pixels in self.split.chosen_on].append(image)
            self.datasets |= {OTHERS: dataset.of(parts[False]), CHOSEN: dataset.of(parts[True])}

    @cached_property
    def case(self) -> Case:
        """What every quantiser reads."""
        return prepare(self._source, str(self._config), self.images.calibration, self._folder / "prepared")

    @cached_property
    def reference(self) -> dict[str, Evaluation]:
        """FP32 on each set of images."""
        return self._scored(self.case.detector(self.case.model), self._folder / "fp32.npz")

    def rows(self, quantizer: str, method: str) -> Iterator[Row]:
        """Quantises the detector and scores it, one row for each set of images."""
        name, place = self._source.stem, folder_of(self._folder, quantizer, method)
        print(f"{name}: {quantizer} {method}", file=sys.stderr, flush=True)
        shutil.rmtree(place, ignore_errors=True)
        try:
            if quantizer == "trtdet":
                arguments = METHODS[quantizer][method]
                measured, file, detector = run_trtdet(arguments, self.case, self.images.calibration, place)
            else:
                measured, file, detector = run_peer(quantizer, method, self.case, self._work, place)
        except Failed as failed:
            for images, dataset in self.datasets.items():
                yield Row(name, quantizer, method, str(failed), images=images, count=len(dataset.images))
            return
        convolutions = quantized_convolutions(onnx.load(str(file)))
        for images, found in self._scored(detector, place / "detections.npz").items():
            row = compared(Row(name, quantizer, method, images=images), found, self.reference[images])
            yield replace(row, convolutions=convolutions, seconds=measured.seconds)

    def _scored(self, detector: Detector, kept: Path) -> dict[str, Evaluation]:
        """A detector on each set of images, from one pass over them, whose detections are kept."""
        whole = self.datasets[ALL]
        if kept.exists():
            metric = CocoMetric.load(kept, whole)
        else:
            metric = trtdet.evaluate(detector, whole).metric
            metric.save(kept)
        scored = {}
        for images, dataset in self.datasets.items():
            part = metric if dataset is whole else metric.of(dataset)
            facts = str(detector.file), detector.runner.run_info, detector.nms_mode, detector.nms
            scored[images] = Evaluation(part.compute(), part, 0.0, *facts)
        return scored


def compared(row: Row, found: Evaluation, reference: Evaluation) -> Row:
    """The row with what a quantised detector's detections are against the annotations and against FP32's."""
    agreement = agree(found, reference)
    row = replace(
        row,
        problem=agreement.problem,
        agreement=agreement.ap,
        agreement_low=agreement.low,
        agreement_high=agreement.high,
        count=len(found.metric.image_ids),
    )
    if not found.metric.dataset.annotated:
        return row
    loss = trtdet.compare(found, reference, BOOTSTRAP)
    row = replace(row, reference=reference.result.map, difference=loss.difference, low=loss.low, high=loss.high)
    return replace(row, resampled=resampled(found.metric, reference.metric))


def resampled(found: CocoMetric, reference: CocoMetric) -> tuple[float, ...]:
    """The difference of mAP in each resample that :func:`trtdet.compare` draws, as a fraction."""
    ours, theirs = found.matches(), reference.matches()
    differences = [
        mean_average_precision(ours, weights) - mean_average_precision(theirs, weights)
        for weights in draws(len(found.image_ids), BOOTSTRAP)
    ]
    return tuple(np.concatenate(differences).round(6).tolist())


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
        "| quantiser | method | detectors | mean loss of mAP, 90 % interval | largest | mean agreement | least |",
        "|" + "---|" * 7,
    ]
    for way in dict.fromkeys((row.quantizer, row.method) for row in rows):
        mine = [row for row in rows if (row.quantizer, row.method) == way]
        losses = [-100 * row.difference for row in mine if row.difference is not None]
        agreed = [100 * row.agreement for row in mine if row.agreement is not None]
        agreements = (mean(agreed), min(agreed)) if agreed else (float("nan"),) * 2
        numbers = " | ".join(f"{figure:.2f}" for figure in (max(losses, default=float("nan")), *agreements))
        lines.append(f"| {way[0]} | {way[1]} | {len(agreed)} | {mean_loss(mine)} | {numbers} |")
    return "\n".join(lines)


def mean_loss(rows: Sequence[Row]) -> str:
    """The mean loss over the detectors whose images are annotated, in points.

    The interval is that of the choice of images, which is the same for all detectors: a resample of the images gives
    each its difference, and the mean of these is one value of the bootstrap.
    """
    scored = [row for row in rows if row.difference is not None]
    if not scored:
        return "-"
    loss = -mean(row.difference or 0.0 for row in scored)
    if any(len(row.resampled) != len(scored[0].resampled) or not row.resampled for row in scored):
        return f"{100 * loss:.2f}"
    low, high = BOOTSTRAP.interval(-np.mean([row.resampled for row in scored], axis=0))
    return interval(loss, low, high)


def kept_rows(file: Path) -> list[Row]:
    """The rows of earlier runs."""
    lines = file.read_text().splitlines() if file.exists() else []
    return [
        Row(**{name: tuple(value) if isinstance(value, list) else value for name, value in json.loads(line).items()})
        for line in lines
    ]


def page(rows: Sequence[Row], splits: Sequence[Split], quantizers: Sequence[str]) -> str:
    """What was measured on which images, and the tables of each set of images."""
    lines = [f"trtdet {trtdet.__version__}."]
    lines += [f"{peer}: {pins_of(peer)}." for peer in quantizers if peer != "trtdet"]
    lines += [f"{split}." for split in dict.fromkeys(map(str, splits))]
    for images in dict.fromkeys(row.images for row in rows):
        mine = [row for row in rows if row.images == images]
        counts = sorted({row.count for row in mine})
        lines += ["", f"## {images}: {', '.join(map(str, counts))}", "", table(mine)]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, help="where the peers' environments are, or will be")
    parser.add_argument("--quantizers", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument(
        "--method",
        action="append",
        help="measure only this method, the first given first; may be repeated, as in --method=--int8-all --method "
        "default (default: all)",
    )
    parser.add_argument("--detectors", nargs="+", help="names of those to measure, in this order (default: all)")
    parser.add_argument("--chosen-on", type=Path, help="images that earlier decisions were made on (default: none)")
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    options.work.mkdir(parents=True, exist_ok=True)
    kept = options.output / "rows.jsonl"
    rows = {row.key: row for row in kept_rows(kept)}
    ways = [(quantizer, method) for quantizer in options.quantizers for method in METHODS[quantizer]]
    if options.method:
        known = dict.fromkeys(method for _, method in ways)
        if unknown := [method for method in options.method if method not in known]:
            parser.error(f"--method: {', '.join(unknown)} not among {', '.join(known)}")
        ways = sorted((way for way in ways if way[1] in options.method), key=lambda way: options.method.index(way[1]))
    there = sorted(file.stem for file in options.models.glob("*.onnx") if file.with_suffix(".yaml").is_file())
    names = options.detectors or there
    if absent := [name for name in names if name not in there]:
        parser.error(f"--detectors: {', '.join(absent)} not in '{options.models}', which has {', '.join(there)}")
    chosen_on = find_images(options.chosen_on) if options.chosen_on else ()

    @cache
    def subject(name: str) -> Subject:
        source = (options.models / f"{name}.onnx").resolve()
        return Subject(source, options.data, options.work.resolve(), chosen_on, (options.output / name).resolve())

    def write() -> str:
        order = {(name, *way): place for place, (name, way) in enumerate((n, w) for n in names for w in ways)}
        mine = sorted((row for row in rows.values() if row.key[:3] in order), key=lambda row: order[row.key[:3]])
        text = page(mine, [subject(name).split for name in names], options.quantizers)
        (options.output / "detectors.md").write_text(text)
        return text

    for way in ways:
        for name in names:
            if any(row.key[:3] == (name, *way) for row in rows.values()):
                continue
            made = list(subject(name).rows(*way))
            with kept.open("a") as file:
                file.writelines(json.dumps(asdict(row)) + "\n" for row in made)
            rows |= {row.key: row for row in made}
            write()
    print(write(), end="")


if __name__ == "__main__":
    main()
