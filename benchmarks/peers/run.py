"""trtdet beside NVIDIA ModelOpt, onnxruntime.quantization and NNCF: mAP, time, memory, and what TensorRT makes of each.

    python benchmarks/peers/run.py --data DIR --work DIR [--models NAME ...] [--peers NAME ...] -o OUT

``--data`` holds ``models/``, ``coco/val2017``, ``coco/train2017`` and ``coco/annotations/instances_val2017.json``. Each
peer is installed into an environment of its own under ``--work``, in the versions that its requirements file here pins;
an environment that is there already is used again. A peer that cannot be installed, or that fails, is a row that says
why. Prints Markdown; each quantised model, and what its quantiser printed, is left in OUT/NAME, which is emptied first.

What is compared:

- Every peer gets the model as trtdet's passes leave it (batch normalisations folded, decode in the graph, suppression
  on the host), so that all results are scored by the same code, with onnxruntime on the CPU.
- Every quantiser sees the same images, pre-processed by trtdet. For the peers they are on disk beforehand, as tensors.
- Nodes that no convolution follows (the decode, the activations of the outputs) are excluded from quantisation where a
  peer quantises more than convolutions. Everything else about its placement is its default; ``quantize.py`` has the
  settings.
- Time and memory are those of a whole process, start and imports included, run once. A peer's process reads tensors,
  calibrates and writes the quantised model. trtdet's decodes and pre-processes the images, rewrites the graph,
  calibrates, writes the quantised model **and builds and audits the engine**: the peers are favoured.
- Each quantised model is then built with TensorRT-RTX, and the builder's list of layers says which convolutions are
  INT8.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import onnx
from cases import IMAGES, Case, as_cell, folder_of, pins_of, prepare, run_peer, run_trtdet
from process import Failed

import trtdet
from trtdet.audit import audit, layers_of
from trtdet.backends import BuildRequest, choose
from trtdet.errors import BackendError
from trtdet.quantization import Entry, PrecisionPlan, lint
from trtdet.quantization.placement import CONVOLUTIONS
from trtdet.runtime.detector import Detector

MODELS = {"yolox_nano": "yolox", "yolov5n": "yolov5", "picodet_s": "dfl"}
PEERS = {
    "modelopt": ("max", "entropy"),
    "onnxruntime": ("minmax", "entropy", "entropy-strided"),
    "nncf": ("performance", "per-tensor"),
}
TRTDET = {
    "percentile, --effort none": ("--calib", "percentile", "--effort", "none", "--int8-all"),
    "percentile, --effort default": ("--calib", "percentile", "--effort", "default", "--int8-all"),
}


@dataclass(frozen=True)
class Verdict:
    """What TensorRT-RTX makes of a quantised model; cells of the table, and the places where INT8 would be lost."""

    accepted: str
    convolutions: str
    seconds: str
    findings: Counter[str]


def judge(file: Path) -> Verdict:
    """Builds an engine and counts its INT8 convolutions."""
    model = onnx.load(str(file))
    convolutions = [node.name for node in model.graph.node if node.op_type in CONVOLUTIONS]
    plan = PrecisionPlan({name: Entry("int8", "") for name in convolutions})
    findings = Counter(finding.problem for finding in lint(model))
    try:
        built = choose("tensorrt-rtx").build(BuildRequest(model))
        found = audit(layers_of(built), plan, model)
    except BackendError as error:
        return Verdict(f"no: {as_cell(error)}", "-", "-", findings)
    return Verdict("yes", f"{found.int8} of {len(convolutions)}", f"{built.seconds:.1f}", findings)


def compare(case: Case, data: Path, work: Path, peers: list[str], folder: Path) -> None:
    """Prints the table of one model."""
    coco, classes = data / "coco", case.config.classes
    dataset = trtdet.CocoDataset.load(coco / "annotations" / "instances_val2017.json", coco / "val2017", classes)

    def score(detector: Detector) -> float:
        return trtdet.evaluate(detector, dataset).result.map

    baseline = score(case.detector(case.model))
    print(f"\n### {case.source.stem}: mAP {100 * baseline:.2f} in FP32\n")
    print(
        "| quantiser | method | mAP | against FP32 | s | peak MB | TensorRT-RTX builds it | convs in INT8, as built ",
        end="",
    )
    print("| engine s | lint findings |\n|" + "---|" * 10, flush=True)
    notes = []
    rows = [(peer, method) for peer in peers for method in PEERS[peer]] + [("trtdet", method) for method in TRTDET]
    for quantizer, method in rows:
        print(f"{case.source.stem}: {quantizer} {method}", file=sys.stderr)
        place = folder_of(folder, quantizer, method)
        try:
            if quantizer == "trtdet":
                measured, file, detector = run_trtdet(TRTDET[method], case, coco / "train2017", place)
            else:
                measured, file, detector = run_peer(quantizer, method, case, work, place)
        except Failed as failed:
            print(f"| {quantizer} | {method} | {as_cell(failed)} |" + " - |" * 7, flush=True)
            continue
        got, verdict = score(detector), judge(file)
        cells = [
            f"{100 * got:.2f}",
            f"{100 * (got - baseline):+.2f}",
            f"{measured.seconds:.1f}",
            f"{measured.megabytes:.0f}",
            verdict.accepted,
            verdict.convolutions,
            verdict.seconds,
            str(verdict.findings.total()),
        ]
        print(f"| {quantizer} | {method} | " + " | ".join(cells) + " |", flush=True)
        notes += [f"- {quantizer} {method}: {count} x {what}" for what, count in verdict.findings.most_common()]
    if notes:
        print("\nWhat trtdet's lint says before the build (the column of INT8 convolutions says what was built):\n")
        print("\n".join(notes), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, help="where the peers' environments are, or will be")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--peers", nargs="+", default=list(PEERS), choices=list(PEERS))
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    builder = choose("tensorrt-rtx").capabilities  # before the work: a missing backend is an error at once
    print(f"{IMAGES} calibration images; trtdet {trtdet.__version__}, {builder.name} {builder.version}.")
    for peer in options.peers:
        print(f"{peer}: {pins_of(peer)}.")
    for name in options.models:
        folder = (options.output / name).resolve()
        source = options.data / "models" / f"{name}.onnx"
        case = prepare(source, MODELS[name], options.data / "coco" / "train2017", folder)
        compare(case, options.data, options.work.resolve(), options.peers, folder)


if __name__ == "__main__":
    main()
