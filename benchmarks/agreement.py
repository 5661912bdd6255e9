"""How certain few images make the agreement of detections, against the difference in mAP: INT8 bundles against FP32.

    python benchmarks/agreement.py --data DIR [--models NAME ...] [--sizes 16 32 64] [--draws 1000] -o OUT

DIR holds ``models/``, ``coco/val2017``, ``coco/train2017`` and ``coco/annotations/instances_val2017.json``. Each model
is built with the default options and with every convolution in INT8. Bundles and detections are kept in OUT and used
again; scores are those of onnxruntime. Every draw takes a number of the images, none twice, and both figures are taken
of the same draw. Prints Markdown.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from coco_models import MODELS, published_config, val2017
from numpy.typing import NDArray

import trtdet
from trtdet.evaluation.agreement import against_detections, agreement_of
from trtdet.evaluation.matching import pooled
from trtdet.evaluation.metrics import CocoMetric
from trtdet.evaluation.resampling import mean_average_precision

FORMS = {"default": False, "all in INT8": True}
"""Every convolution in INT8, or those alone that it makes faster."""

THRESHOLD = 0.25


@dataclass(frozen=True)
class Draws:
    """A figure on D draws of some of the images, beside the figure on all of them."""

    whole: float
    drawn: NDArray[np.float64]

    @property
    def ratio(self) -> float:
        """The figure in standard deviations of a draw: how clearly that many images tell it from nothing lost."""
        return abs(self.whole) / self.deviation

    @property
    def deviation(self) -> float:
        return float(np.nanstd(self.drawn))

    def __str__(self) -> str:
        return f"{100 * float(np.nanmean(self.drawn)):+.2f} ± {100 * self.deviation:.2f}"


def detections(target: Path, config: trtdet.Config, coco: Path, kept: Path) -> CocoMetric:
    """Those of a bundle or a model on the annotated images, from ``kept`` where they are there."""
    dataset = val2017(coco, config.classes)
    if not kept.exists():
        bundle = target.is_dir()
        detector = trtdet.Detector.open(target, None if bundle else config, runtime="onnxruntime" if bundle else "auto")
        trtdet.evaluate(detector, dataset).metric.save(kept)
    return CocoMetric.load(kept, dataset)


def built(model: Path, config: trtdet.Config, place: Path, images: Path, int8_all: bool) -> Path:
    """The bundle; a second call finds it."""
    calibration = trtdet.CalibrationOptions(images=images, num_images=64)
    if not place.exists():
        trtdet.build(
            model,
            config,
            place,
            trtdet.BuildOptions(
                guard="off", calibration=calibration, plan=trtdet.PlanOptions(int8_all=int8_all, fastest=False)
            ),
        )
    return place


def losses(found: CocoMetric, reference: CocoMetric, weights: NDArray[np.int32]) -> tuple[Draws, Draws]:
    """The loss of mAP, and of agreement, on draws of the images, as fractions; below 0 is a loss."""
    whole = np.ones((1, weights.shape[1]), np.int32)
    ours, theirs = found.matches(), reference.matches()
    agreed = (pooled(against_detections(found, reference, THRESHOLD)[0].class_matches().values()),)
    at_all, on_draws = (
        (
            mean_average_precision(ours, chosen) - mean_average_precision(theirs, chosen),
            mean_average_precision(agreed, chosen) - 1,
        )
        for chosen in (whole, weights)
    )
    return Draws(float(at_all[0][0]), on_draws[0]), Draws(float(at_all[1][0]), on_draws[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--sizes", nargs="+", type=int, default=[16, 32, 64])
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    coco = options.data / "coco"

    print("| model | INT8 | images | mAP's difference | agreement's | loss in deviations: mAP | agreement | ratio |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    rankings: list[str] = []
    whole: list[str] = []
    for name in options.models:
        config = published_config(name)
        model = options.data / "models" / f"{name}.onnx"
        reference = detections(model, config, coco, options.output / f"{name}-fp32.npz")
        drawn: dict[tuple[str, int], tuple[Draws, Draws]] = {}
        for form, int8_all in FORMS.items():
            stem = f"{name}-{form.replace(' ', '-')}"
            bundle = built(model, config, options.output / stem, coco / "train2017", int8_all)
            found = detections(bundle, config, coco, options.output / f"{stem}.npz")
            whole.append(f"| {name} | {form} | {str(agreement_of(found, reference)).partition(': ')[2]} |")
            for size in options.sizes:
                generator = np.random.default_rng(size)
                count = len(found.image_ids)
                weights = np.zeros((options.draws, count), np.int32)
                for row in weights:
                    row[generator.choice(count, min(size, count), replace=False)] = 1
                loss, disagreement = drawn[form, size] = losses(found, reference, weights)
                print(
                    f"| {name} | {form} | {size} | {loss} | {disagreement} | {loss.ratio:.1f} | "
                    f"{disagreement.ratio:.1f} | {disagreement.ratio / loss.ratio:.1f} |",
                    flush=True,
                )
        first, second = FORMS
        for size in options.sizes:
            right = [
                np.mean((one.drawn < other.drawn) == (one.whole < other.whole))
                for one, other in zip(drawn[first, size], drawn[second, size], strict=True)
            ]
            rankings.append(f"| {name} | {size} | {right[0]:.0%} | {right[1]:.0%} |")
    print("\n| model | INT8 | on all images |\n|---|---|---|", *whole, sep="\n")
    print("\n| model | images | ranked as on all: by mAP | by agreement |\n|---|---|---|---|", *rankings, sep="\n")


if __name__ == "__main__":
    main()
