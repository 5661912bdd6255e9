"""What stands between INT8 convolutions, and what it costs: bytes, kernels, engine size and mAP of INT8 against FP16.

    python benchmarks/dataflow.py --data DIR [--models NAME ...] [--forms] -o OUT

DIR holds ``models/``, ``coco/val2017``, ``coco/train2017`` and ``coco/annotations/instances_val2017.json``. Engines are
built with TensorRT-RTX, suppression on the host, and read, not run: bytes are estimated from their layers. Scores are
those of onnxruntime, which rounds FP16 as the engine does. With ``--forms`` the data flow is varied instead, without
corrections and scores: FP16 or float32 between the convolutions, a weight scale a channel or a tensor, all convolutions
or some in INT8. Prints Markdown.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from coco_models import MODELS, points, published_config, scored

import trtdet
from trtdet.audit import Audit
from trtdet.backends.tensorrt.rtx import TensorRTRTX
from trtdet.bundle import Bundle
from trtdet.options import changed
from trtdet.quantization import DataFlow
from trtdet.runtime.detector import Detector

VARIANTS: dict[str, dict[str, Any]] = {
    "FP16": {"precision": "fp16"},
    "INT8": {},
    "INT8, `--int8-all`": {"int8_all": True},
    "INT8, `--effort none`": {"effort": "none"},
}
FORMS: dict[str, tuple[DataFlow, bool]] = {
    "float32 between, a scale a channel, all in INT8": (DataFlow(), True),
    "FP16 between, a scale a channel, all in INT8": (DataFlow(half=True), True),
    "float32 between, a scale a tensor, all in INT8": (DataFlow(weights=("tensor",)), True),
    "FP16 between, a scale a tensor, all in INT8": (DataFlow(half=True, weights=("tensor",)), True),
    "and by default without what memory bounds": (DataFlow(half=True, weights=("tensor",)), False),
    "and with what memory bounds in FP16": (DataFlow(half=True, weights=("tensor",), fused=False), False),
}


def built(options: argparse.Namespace, name: str, variant: str, changes: dict[str, Any]) -> Bundle:
    """A bundle, whose folder is named after the variant."""
    config = published_config(name)
    asked = trtdet.BuildOptions(
        backend="tensorrt-rtx",
        nms=trtdet.NmsOptions(mode="host"),
        guard="off",
        plan=trtdet.PlanOptions(fastest=False),
        calibration=trtdet.CalibrationOptions(
            images=options.data / "coco" / "train2017", num_images=options.num_images
        ),
    )
    plain = "".join(letter if letter.isalnum() else "-" for letter in variant)
    place = options.output / f"{name}-{plain}"
    done = trtdet.build(options.data / "models" / f"{name}.onnx", config, place, changed(asked, **changes))
    print(f"built {place}: {'; '.join(done.bundle.manifest.quantization.corrections)}", file=sys.stderr, flush=True)
    return done.bundle


def figures(bundle: Bundle, half: int | None) -> list[str]:
    """Convolutions in INT8 and float, kernels, MB, ratio to FP16, MB of the engine."""
    found = Audit.load(bundle.file("audit.json"))
    assert bundle.engine is not None
    kernels = sum(1 for layer in found.layers if layer.bytes)
    ratio = f"{found.bytes / half:.2f}" if half else "1.00"
    engine = f"{bundle.engine.stat().st_size / 1e6:.1f}"
    return [f"{found.int8} / {found.fp16 + found.fp32}", str(kernels), f"{found.bytes / 1e6:.1f}", ratio, engine]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--num-images", type=int, default=64)
    parser.add_argument("--forms", action="store_true")
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    if options.forms:
        forms(options)
        return
    print("| model | engine | convs INT8 / float | kernels | MB | of FP16 | engine MB | mAP | against FP32 (90 %) |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    for name in options.models:
        config = published_config(name)
        reference = scored(Detector.open(options.data / "models" / f"{name}.onnx", config), options.data / "coco")
        print(f"| {name} | FP32 |  |  |  |  |  | {100 * reference.result.map:.2f} |  |", flush=True)
        half = None
        for variant, changes in VARIANTS.items():
            bundle = built(options, name, variant, changes)
            got = scored(Detector.open(bundle.path), options.data / "coco")
            found = trtdet.compare(got, reference)
            row = [*figures(bundle, half), f"{100 * got.result.map:.2f}", points(found)]
            print(f"| {name} | {variant} | {' | '.join(row)} |", flush=True)
            half = half or Audit.load(bundle.file("audit.json")).bytes


def forms(options: argparse.Namespace) -> None:
    """The table of data flows."""
    print("| model | INT8 network | convs INT8 / float | kernels | MB | of FP16 | engine MB |")
    print("|---|---|---|---|---|---|---|", flush=True)
    caps = TensorRTRTX().capabilities
    for name in options.models:
        half = Audit.load(built(options, name, "FP16", {"precision": "fp16"}).file("audit.json")).bytes
        for title, (flow, every) in FORMS.items():
            TensorRTRTX.capabilities = property(lambda _, flow=flow: replace(caps, data_flow=flow))  # type: ignore
            bundle = built(options, name, title, {"effort": "none", "int8_all": every})
            print(f"| {name} | {title} | {' | '.join(figures(bundle, half))} |", flush=True)
        TensorRTRTX.capabilities = property(lambda _: caps)  # type: ignore[assignment,method-assign]


if __name__ == "__main__":
    main()
