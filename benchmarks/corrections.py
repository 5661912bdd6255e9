"""What the corrections keep: INT8 bundles by default, for several rules, against FP32, with paired intervals.

    python benchmarks/corrections.py --data DIR [--models NAME ...] [--rules RULE ...] [--int8-all] -o OUT

DIR holds ``models/``, ``coco/val2017``, ``coco/train2017`` and ``coco/annotations/instances_val2017.json``. Every
bundle is built for TensorRT-RTX and its audit is read; scores are those of onnxruntime. Prints Markdown.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from coco_models import MODELS, points, published_config, scored

import trtdet
from trtdet.runtime.detector import Detector


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--rules", nargs="+", default=["percentile", "minmax", "entropy"])
    parser.add_argument("--num-images", type=int, default=64)
    parser.add_argument("--int8-all", action="store_true", help="every convolution in INT8")
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    coco = options.data / "coco"

    print("| model | rule | FP32 | INT8 | difference, 90 % interval | convs INT8 / float as built | build s |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for name in options.models:
        config = published_config(name)
        model = options.data / "models" / f"{name}.onnx"
        reference = scored(Detector.open(model, config), coco)
        for rule in options.rules:
            place = options.output / f"{name}-{rule}"
            calibration = trtdet.CalibrationOptions(rule=rule, images=coco / "train2017", num_images=options.num_images)
            started = time.perf_counter()
            asked = trtdet.BuildOptions(
                guard="off", calibration=calibration, plan=trtdet.PlanOptions(int8_all=options.int8_all, fastest=False)
            )
            built = trtdet.build(model, config, place, asked).bundle
            seconds = time.perf_counter() - started
            got = scored(Detector.open(place), coco)
            found = trtdet.compare(got, reference)
            audit = built.manifest.audit
            assert audit is not None
            print(
                f"| {name} | {rule} | {100 * reference.result.map:.2f} | {100 * got.result.map:.2f} | "
                f"{points(found)} | {audit.int8} / {audit.fp16 + audit.fp32} | {seconds:.0f} |",
                flush=True,
            )
            print(f"{name} {rule}: {'; '.join(built.manifest.quantization.corrections)}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
