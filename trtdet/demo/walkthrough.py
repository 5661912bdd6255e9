"""The demo: builds bundles of the shipped detector on generated images and measures their loss in mAP."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from trtdet.building.ranges import HISTOGRAMS
from trtdet.calibration import RULES
from trtdet.candidates import build
from trtdet.config import load_config
from trtdet.data import CocoDataset, ImageCache
from trtdet.demo import shapes
from trtdet.evaluation.scoring import evaluate
from trtdet.exporter import SHAPES_MODEL
from trtdet.files import write_atomically, write_together
from trtdet.options import BuildOptions, CalibrationOptions, PlanOptions
from trtdet.progress import Progress, silent
from trtdet.runtime.detector import Detector
from trtdet.runtime.saving import Saved, save_predictions
from trtdet.tables import Column, Table

CALIBRATION_IMAGES = 64
VALIDATION_IMAGES = 200
PICTURES = 6
MAIN = "int8"
"""The INT8 bundle with corrections, of all layers with the channels for INT8; the others use one calibration rule."""


@dataclass(frozen=True)
class DemoRow:
    """Measured values of one variant; ``loss`` is in mAP against FP32."""

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
    """Result of :func:`run_demo`."""

    rows: tuple[DemoRow, ...]
    folder: Path
    backend: str
    pictures: Saved

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "rows": [asdict(row) for row in self.rows],
            "images": VALIDATION_IMAGES,
            "backend": self.backend,
            "folder": str(self.folder),
        }

    def table(self) -> Table:
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
                f"pictures  {self.pictures.detections.parent}",
                f"figures   {self.folder / 'results.json'}",
            ),
        )


def run_demo(folder: Path | str, progress: Progress = silent) -> Demo:
    """Generates images, builds FP32, INT8 and one full-INT8 bundle per calibration rule, scores all and draws some.

    ``folder`` gets all files; files of an earlier run are used again.

    Raises:
        TrtdetError: a stage failed.
    """
    folder, config = Path(folder), load_config("shapes")
    progress("generating images", 0, 1)
    calibration = shapes.generate(folder / "data", "calibration", CALIBRATION_IMAGES)
    validation = shapes.generate(folder / "data", "val", VALIDATION_IMAGES)
    dataset = CocoDataset.load(validation.annotations, validation.images, config.classes)
    write_atomically(folder / SHAPES_MODEL.name, SHAPES_MODEL.read_bytes())
    bundles, images = folder / "bundles", calibration.images
    # By estimate, INT8 gains no time in so small a network, and the default would be FP16 alone.
    widest = PlanOptions(fastest=False)
    main = bundles / MAIN
    variants = {
        "FP32": (bundles / "fp32", BuildOptions(precision="fp32")),
        "INT8": (main, BuildOptions(calibration=CalibrationOptions(images=images), guard="off", plan=widest)),
    }
    for rule in RULES:
        # The images are run only once: every rule uses the same histograms.
        rule_only = CalibrationOptions(rule=rule, images=images, histograms=main / HISTOGRAMS)
        options = BuildOptions(calibration=rule_only, effort="none", guard="off", plan=PlanOptions(int8_all=True))
        variants[f"INT8 {rule} alone"] = (bundles / f"int8-{rule}", options)
    rows: list[DemoRow] = []
    backend, cache = "", ImageCache()
    for variant, (place, options) in variants.items():
        bundle = build(SHAPES_MODEL, config, place, options=options, progress=progress).bundle
        manifest = bundle.manifest
        counts = manifest.audit or manifest.precision
        score = evaluate(Detector.open(place), dataset, partial(progress, f"scoring {variant}"), cache=cache).result
        rows.append(
            DemoRow(
                variant=variant,
                map=score.map,
                map50=score.map50,
                loss=rows[0].map - score.map if rows else 0.0,
                int8_convs=counts.int8,
                float_convs=counts.fp16 + counts.fp32,
                engine_mb=bundle.engine.stat().st_size / 1e6 if bundle.engine else 0.0,
                bundle=str(place),
            )
        )
        backend = f"{manifest.backend.name} {manifest.backend.version}"
    predictions = Detector.open(main).predict([image.path for image in dataset.images[:PICTURES]], stream=True)
    pictures = save_predictions(predictions, folder / "pictures")
    demo = Demo(tuple(rows), folder=folder, backend=backend, pictures=pictures)
    write_together(
        {
            folder / "results.json": (json.dumps(demo.as_dict(), indent=1) + "\n").encode(),
            folder / "results.txt": (demo.table().text() + "\n").encode(),
        }
    )
    return demo
