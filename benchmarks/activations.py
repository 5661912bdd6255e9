"""What the form of SiLU costs INT8: mAP of the Q/DQ models by ``--silu``, and the convolutions that stay in INT8.

    python benchmarks/activations.py --data DIR [--models NAME ...]

DIR is as for ``corrections.py``. The plugin is scored by its definition, on the CPU, in three ways: as it is built,
with every activation reading float, and with every one reading INT8. Engines are built for TensorRT-RTX, which takes
no plugins. Prints Markdown.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path

from coco_models import MODELS, points, published_config, scored

import trtdet
from trtdet.audit import audit, layers_of
from trtdet.backends import BuildRequest, choose
from trtdet.building.corrections import prepared
from trtdet.building.graph import FORMS, host_graph
from trtdet.building.ranges import calibrated, select_images
from trtdet.options import CalibrationOptions
from trtdet.quantization import DEFAULT_CORRECTIONS
from trtdet.runtime.detector import Detector


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--num-images", type=int, default=64)
    options = parser.parse_args()
    coco = options.data / "coco"
    print("| model | SiLU | nodes | read INT8 | write INT8 | mAP | difference, 90 % interval | convs INT8 | s |")
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    for name in options.models:
        config = published_config(name)
        path = options.data / "models" / f"{name}.onnx"
        keep = host_graph(path, config).model
        reference = scored(Detector.running(keep, config, "host"), coco)
        print(f"| {name} | FP32 | | | | {100 * reference.result.map:.2f} | | | |", flush=True)
        for form in FORMS:
            graph = replace(host_graph(path, config, form), int8_all=True)
            started = time.perf_counter()
            calibration = CalibrationOptions(images=coco / "train2017", num_images=options.num_images)
            ready = prepared(
                calibrated(graph, calibration, select_images(calibration)), calibration, DEFAULT_CORRECTIONS
            )
            seconds = time.perf_counter() - started
            inputs = ready.ranges.inputs
            variants = {form: inputs}
            if form == "plugin":
                variants["plugin, all read float"] = {}
                variants["plugin, all read INT8"] = {key: replace(entry, noise=0.0) for key, entry in inputs.items()}
            for title, ranges in variants.items():
                made = replace(ready, ranges=replace(ready.ranges, inputs=ranges)).explicit(ready.plan)
                convs = ""
                if form != "plugin":
                    built = choose("tensorrt-rtx").build(BuildRequest(made.model, (86,)))
                    convs = str(audit(layers_of(built), ready.plan, made.model).int8)
                rewrites = sum(node.op_type in OPERATORS for node in made.model.graph.node)
                got = scored(Detector.running(made.model, config, "host"), coco)
                found = trtdet.compare(got, reference)
                print(
                    f"| {name} | {title} | {rewrites or ''} | {made.read or ''} | {made.written or ''} | "
                    f"{100 * got.result.map:.2f} | {points(found)} | {convs} | {seconds:.0f} |",
                    flush=True,
                )


OPERATORS = ("Swish", "HardSwish", "TRT_SiLU", "TRT_HardSwish")

if __name__ == "__main__":
    main()
