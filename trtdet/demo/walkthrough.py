"""The whole way on generated images: the shipped detector becomes INT8 bundles, and mAP tells what each costs."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trtdet.calibration import RULES
from trtdet.config import load_config
from trtdet.data import CocoDataset, ImageCache
from trtdet.demo import shapes
from trtdet.evaluation.scoring import Evaluation, evaluate
from trtdet.exporter import SHAPES_MODEL
from trtdet.files import write_atomically
from trtdet.pipeline import HISTOGRAMS, BuildOptions, CalibrationOptions, build
from trtdet.progress import Progress, silent
from trtdet.runtime.detector import Detector
from trtdet.runtime.pictures import Pictures, infer
from trtdet.tables import Column, Table

CALIBRATION_IMAGES = 64
VALIDATION_IMAGES = 200
PICTURES = 6
MAIN = "int8"
"""The bundle of a build with default options; the other bundles use a single threshold rule without corrections."""


@dataclass(frozen=True)
class Row:
    """A variant: its precision, its score, its loss against FP32, and its engine."""

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

    def table(self) -> Table:
        """The rows, and where the files are."""
        percent = Column("mAP", ".2f"), Column("AP50", ".2f"), Column("against FP32", "+.2f")
        return Table(
            (Column("variant", align="left"), *percent, "INT8 convs", "float convs", Column("engine MB", ".1f")),
            [
                (
                    *(row.variant, 100 * row.map, 100 * row.map50, -100 * row.loss if row.loss else None),
                    *(row.int8_convs, row.float_convs, row.engine_mb),
                )
                for row in self.rows
            ],
            notes=(
                f"{VALIDATION_IMAGES} generated images scored, {CALIBRATION_IMAGES} for calibration, {self.backend}",
                f"bundles   {self.folder / 'bundles'}",
                f"pictures  {self.pictures.folder}",
                f"figures   {self.folder / 'results.json'}",
            ),
        )


def run_demo(folder: Path, progress: Progress = silent) -> Demo:
    """Generates the data, builds FP32, INT8, and all of the model in INT8 by each rule alone, scores them, draws some.

    Args:
        folder: where everything goes; the files of an earlier run are used again.
        progress: called with a stage, steps done and steps in all.

    Raises:
        TrtdetError: a stage failed; its class tells which.
    """
    config = load_config("shapes")
    progress("generating images", 0, 1)
    calibration = shapes.generate(folder / "data", "calibration", CALIBRATION_IMAGES)
    validation = shapes.generate(folder / "data", "val", VALIDATION_IMAGES)
    dataset = CocoDataset.load(validation.annotations, validation.images, config.classes)
    bundles = folder / "bundles"
    main, cache = bundles / MAIN, ImageCache()

    def scored(stage: str, bundle: Path) -> Evaluation:
        return evaluate(
            Detector.open(bundle), dataset, lambda done, total: progress(f"scoring {stage}", done, total), cache
        )

    rows: list[Row] = []
    backend = ""
    for variant, (place, options) in _variants(bundles, calibration.images).items():
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
    write_atomically(folder / "results.txt", (done.table().text() + "\n").encode())
    return done


def _variants(bundles: Path, images: Path) -> dict[str, tuple[Path, BuildOptions]]:
    """The bundles of the demo by name: the folder of each, and how it is built."""
    variants = {
        "FP32": (bundles / "fp32", BuildOptions("fp32")),
        "INT8": (bundles / MAIN, BuildOptions(calibration=CalibrationOptions(images=images), measure=False)),
    }
    for rule in RULES:
        # The images are run once; every further rule starts from the same histograms.
        alone = CalibrationOptions(rule, images=images, histograms=bundles / MAIN / HISTOGRAMS)
        options = BuildOptions(calibration=alone, correct=(), measure=False, int8_all=True)
        variants[f"INT8 {rule} alone"] = (bundles / f"int8-{rule}", options)
    return variants
