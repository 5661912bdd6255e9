"""The main job on published models: FP32 scores in both conventions, INT8 bundles with plain rules and every
convolution in INT8, and their audits.

    python benchmarks/published_models.py --data DIR [--models NAME ...] [--rules RULE ...] -o OUT

DIR holds ``models/``, ``coco/val2017``, ``coco/train2017`` and ``coco/annotations/instances_val2017.json``. Prints
Markdown; each bundle is left in OUT. Building is done twice to compare the engines' bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import sys
from pathlib import Path

from coco_models import MODELS, scored

import trtdet
from trtdet.evaluation.scoring import Evaluation
from trtdet.runtime.detector import Detector


def progress(stage: str, done: int, total: int) -> None:
    if done == total:
        print(f"{stage}: {done}", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--rules", nargs="+", default=["percentile", "minmax", "entropy", "mse"])
    parser.add_argument("--num-images", type=int, default=64)
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()

    def score(target: Path, config: trtdet.Config | None, nms: str = "auto") -> Evaluation:
        detector = Detector.open(target, config, nms)
        return scored(detector, options.data / "coco", lambda done, total: progress(f"scored {target}", done, total))

    print("| model | NMS | candidates | mAP | AP50 | small | medium | large |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for name in options.models:
        config = trtdet.load_config(MODELS[name][0])
        for nms, candidates in (("host", "all-classes"), ("host", "best-class"), ("native", "all-classes")):
            chosen = config.with_nms(candidates=candidates)
            got = score(options.data / "models" / f"{name}.onnx", chosen, nms).result
            figures = (got.map, got.map50, got.map_small, got.map_medium, got.map_large)
            print(
                f"| {name} | {nms} | {candidates} | " + " | ".join(f"{value:.4f}" for value in figures) + " |",
                flush=True,
            )

    print("\n| model | rule | mAP | AP50 | convs INT8 / float as built | engine MB | same bytes twice |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for name in options.models:
        config = trtdet.load_config(MODELS[name][0])
        model = options.data / "models" / f"{name}.onnx"
        histograms = None
        for rule in options.rules:
            place = options.output / f"{name}-{rule}"
            calibration = trtdet.CalibrationOptions(
                rule=rule,
                images=options.data / "coco" / "train2017",
                num_images=options.num_images,
                histograms=histograms,
            )
            engines = []
            for _ in range(2):
                shutil.rmtree(place, ignore_errors=True)
                asked = trtdet.BuildOptions(
                    effort="none", guard="off", calibration=calibration, plan=trtdet.PlanOptions(int8_all=True)
                )
                built = trtdet.build(model, config, place, asked, progress)
                engines.append(hashlib.sha256(built.bundle.file("model.engine").read_bytes()).hexdigest())
            if histograms is None:
                histograms = options.output / f"{name}.npz"
                shutil.copy(built.bundle.file("histograms.npz"), histograms)
            got = score(place, None).result
            audit = built.bundle.manifest.audit
            assert audit is not None
            size = built.bundle.file("model.engine").stat().st_size / 1e6
            same = "yes" if engines[0] == engines[1] else "NO"
            convs = f"{audit.int8} / {audit.fp16 + audit.fp32}"
            print(f"| {name} | {rule} | {got.map:.4f} | {got.map50:.4f} | {convs} | {size:.1f} | {same} |", flush=True)
            for conv in audit.float_by_backend:
                print(f"{name}: {conv.name} runs in {conv.got}: {conv.reason}", file=sys.stderr)


if __name__ == "__main__":
    main()
