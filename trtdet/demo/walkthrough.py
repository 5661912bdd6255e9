"""The whole way on generated images: the shipped detector becomes INT8 bundles, and mAP says what each one costs."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trtdet.calibration import RULES
from trtdet.config import load_config
from trtdet.data import CocoDataset
from trtdet.demo import shapes
from trtdet.evaluation.scoring import Evaluation, evaluate
from trtdet.exporter import SHAPES_MODEL
from trtdet.files import write_atomically
from trtdet.pipeline import HISTOGRAMS, BuildOptions, CalibrationOptions, build
from trtdet.progress import Progress, silent
from trtdet.runtime.detector import Detector
from trtdet.runtime.pictures import Pictures, infer

CALIBRATION_IMAGES = 64
VALIDATION_IMAGES = 200
PICTURES = 6
MAIN = "int8"
"""The bundle that a build without options makes; the others are the threshold rules alone."""


@dataclass(frozen=True)
class Row:
    """One variant: its precision, its score, what it lost against FP32, and its engine."""

    variant: str
    map: float
    map50: float
    loss: float
    int8_convs: int
    float_convs: int
    engine_mb: float
    bundle: str


@dataclass(frozen=True)
class Demo:
    """What :func:`run_demo` measured and where it left its files."""

    rows: tuple[Row, ...]
    folder: Path
    backend: str
    pictures: Pictures

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "rows": [asdict(row) for row in self.rows],
            "images": VALIDATION_IMAGES,
            "backend": self.backend,
            "folder": str(self.folder),
        }

    def table(self) -> str:
        """The rows as text, and where the files are."""
        titles = ("variant", "mAP", "AP50", "against FP32", "INT8 convs", "float convs", "engine MB")
        lines = [
            (
                row.variant,
                f"{100 * row.map:.2f}",
                f"{100 * row.map50:.2f}",
                f"{-100 * row.loss:+.2f}" if row.loss else "",
                str(row.int8_convs),
                str(row.float_convs),
                f"{row.engine_mb:.1f}",
            )
            for row in self.rows
        ]
        widths = [max(len(line[column]) for line in [titles, *lines]) for column in range(len(titles))]
        text = [
            "  ".join(
                cell.ljust(width) if column == 0 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(line, widths, strict=True))
            )
            for line in [titles, *lines]
        ]
        text.insert(1, "-" * len(text[0]))
        return "\n".join(
            [
                *text,
                "",
                f"{VALIDATION_IMAGES} generated images scored, {CALIBRATION_IMAGES} for calibration, {self.backend}",
                f"bundles   {self.folder / 'bundles'}",
                f"pictures  {self.pictures.folder}",
                f"figures   {self.folder / 'results.json'}",
            ]
        )


def run_demo(folder: Path, progress: Progress = silent) -> Demo:
    """Generates the data, builds FP32, INT8, and INT8 by each rule alone, scores all of them, draws a few pictures.

    Args:
        folder: where everything goes; what a former run left there is used again.
        progress: told of every image and stage.

    Raises:
        TrtdetError: of the kind that says where it went wrong.
    """
    config = load_config("shapes")
    progress("generating images", 0, 1)
    calibration = shapes.generate(folder / "data", "calibration", CALIBRATION_IMAGES)
    validation = shapes.generate(folder / "data", "val", VALIDATION_IMAGES)
    dataset = CocoDataset.load(validation.annotations, validation.images, config.classes)
    bundles = folder / "bundles"
    main = bundles / MAIN

    def scored(stage: str, bundle: Path) -> Evaluation:
        return evaluate(Detector.open(bundle), dataset, lambda done, total: progress(f"scoring {stage}", done, total))

    rows: list[Row] = []
    backend = ""
    calibrated = CalibrationOptions(images=calibration.images)
    variants = {
        "FP32": (bundles / "fp32", BuildOptions("fp32")),
        "INT8": (main, BuildOptions(calibration=calibrated, measure=False)),
    }
    for rule in RULES:
        # The images are run once; every further rule starts from the same histograms.
        alone = CalibrationOptions(rule, images=calibration.images, histograms=main / HISTOGRAMS)
        variants[f"INT8 {rule} alone"] = (
            bundles / f"int8-{rule}",
            BuildOptions(calibration=alone, correct=(), measure=False),
        )
    for variant, (place, options) in variants.items():
        bundle = build(SHAPES_MODEL, config, place, options, progress).bundle
        manifest = bundle.manifest
        counts = manifest.audit or manifest.precision
        score = scored(variant, place).result
        rows.append(
            Row(
                variant,
                score.map,
                score.map50,
                rows[0].map - score.map if rows else 0.0,
                counts.int8,
                counts.fp16 + counts.fp32,
                bundle.engine.stat().st_size / 1e6 if bundle.engine else 0.0,
                str(place),
            )
        )
        backend = f"{manifest.backend.name} {manifest.backend.version}"
    chosen = [image.path for image in dataset.images[:PICTURES]]
    pictures = infer(Detector.open(main), chosen, folder / "pictures")
    done = Demo(tuple(rows), folder, backend, pictures)
    write_atomically(folder / "results.json", (json.dumps(done.as_dict(), indent=1) + "\n").encode())
    write_atomically(folder / "results.txt", (done.table() + "\n").encode())
    return done
