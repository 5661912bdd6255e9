"""What engines move in INT8, in INT8 with their depthwise convolutions in FP16, and in FP16; and how close the audit's
advice comes to what an engine that follows it moves.

    python benchmarks/audit.py --data DIR -o OUT

DIR holds ``models/`` and ``coco/train2017``; each bundle is left in OUT. Prints Markdown. Builds with TensorRT-RTX and
eight calibration images: what an engine moves does not depend on its ranges.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from coco_models import MODELS

import trtdet
from trtdet.audit import Audit
from trtdet.options import PlanOptions

PARTS = ("suppression", "activation", "padding", "quantise", "cast", "copy", "reformat")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()

    def audited(name: str, variant: str, changes: Sequence[str]) -> Audit:
        """Builds one variant by the options that the audit gives its advice in."""
        config, keep, precision, every = trtdet.load_config(MODELS[name][0]), PlanOptions(), "int8", False
        for option, value in itertools.zip_longest(changes, changes[1:], fillvalue=""):
            if option == "--fp16":
                precision = "fp16"
            elif option == "--int8-all":
                every = True
            elif option == "--keep-fp16":
                keep = PlanOptions(keep_fp16=tuple(value.split(",")))
            elif option == "--set nms.pre_nms_topk":
                config = config.with_nms(pre_nms_topk=int(value))
        calibration = trtdet.CalibrationOptions(images=options.data / "coco" / "train2017", num_images=8)
        asked = trtdet.BuildOptions(
            precision=precision,
            effort="none",
            backend="tensorrt-rtx",
            sms=(86,),
            guard="off",
            calibration=calibration,
            plan=replace(keep, int8_all=every, fastest=precision != "int8"),
        )
        place = options.output / f"{name}-{variant}"
        built = trtdet.build(options.data / "models" / f"{name}.onnx", config, place, asked)
        print(f"built {place}", file=sys.stderr)
        return Audit.load(built.bundle.file("audit.json"))

    print("| model | precision | layers | MB | against FP16 | " + " | ".join(PARTS) + " |")
    print("|" + "---|" * (5 + len(PARTS)), flush=True)
    checks = []
    for name in MODELS:
        variants = {
            title: audited(name, title.replace(" ", "-"), changes)
            for title, changes in (
                *(("fp16", ["--fp16"]), ("int8", []), ("int8 all", ["--int8-all"])),
                ("int8 depthwise", ["--int8-all", "--keep-fp16", "depthwise"]),
            )
        }
        half = variants["fp16"].bytes
        for title, found in variants.items():
            sums = [sum(finding.bytes for finding in found.findings if finding.kind == kind) for kind in PARTS]
            parts = " | ".join(f"{moved / 1e6:.1f}" if moved else "" for moved in sums)
            ratio = found.bytes / half
            print(
                f"| {name} | {title} | {len(found.layers)} | {found.bytes / 1e6:.1f} | {ratio:.2f} | {parts} |",
                flush=True,
            )
        # What stays in FP16 by default leaves little to advise.
        before = variants["int8 all"]
        for index, advice in enumerate(before.advice):
            changes = advice.option.split()
            after = audited(name, f"advice-{index}", changes if changes == ["--fp16"] else ["--int8-all", *changes])
            checks.append((name, advice, before.bytes - advice.bytes, after.bytes))

    print("\n| model | advice | saves, MB | expected, MB | as built, MB | error |\n" + "|---|" + "---|" * 5)
    for name, advice, expected, got in checks:
        option = advice.option
        if len(option) >= 60:
            option = f"{option[:45]}... ({option.count(',') + 1})"
        error = expected / got - 1
        figures = f"{advice.bytes / 1e6:.1f} | {expected / 1e6:.1f} | {got / 1e6:.1f} | {error:+.1%}"
        print(f"| {name} | `{option}` | {figures} |")


if __name__ == "__main__":
    main()
