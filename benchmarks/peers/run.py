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
import json
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from process import Failed, Measured, environment_of, measure, requirements_of

import trtdet
from trtdet.audit import audit, layers_of
from trtdet.backends import BuildRequest, OnnxRunner, choose
from trtdet.bundle import Bundle
from trtdet.data import ImageStream, content_hash, find_images
from trtdet.errors import BackendError
from trtdet.passes import Options, load_model, rewrite, save_model
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
    "percentile, --correct none": ("--calib", "percentile", "--correct", "none", "--int8-all"),
    "percentile, --correct auto": ("--calib", "percentile", "--correct", "auto", "--int8-all"),
}
IMAGES = 64


@dataclass(frozen=True)
class Case:
    """One model, ready for every quantiser.

    Attributes:
        source: the published ONNX file.
        model: the same after trtdet's passes, as a file.
        images: folder of calibration tensors, one ``.npy`` an image.
        excluded: JSON list of the nodes that no convolution follows.
        config: the configuration, and its name.
        score: mAP of a detector on the validation images.
    """

    source: Path
    model: Path
    images: Path
    excluded: Path
    config: trtdet.Config
    config_name: str
    score: Callable[[Detector], float]

    def detector(self, file: Path) -> Detector:
        """A model whose outputs are boxes and scores, as a detector."""
        runner = OnnxRunner(file.read_bytes())
        config = self.config
        return Detector.running(runner, config, "host", file)


def prepare(name: str, data: Path, folder: Path) -> Case:
    """Writes what the quantisers read."""
    config = trtdet.load_config(MODELS[name])
    source = data / "models" / f"{name}.onnx"
    tensors = folder / "images"
    shutil.rmtree(folder, ignore_errors=True)
    tensors.mkdir(parents=True)
    model = rewrite(load_model(source), Options(config, batch=1)).model
    save_model(model, folder / "model.onnx")
    excluded = folder / "excluded.json"
    excluded.write_text(json.dumps(after_the_last_convolution(model)))
    for index, batch in enumerate(ImageStream(calibration_images(data), config.input)):
        np.save(tensors / f"{index:03}.npy", batch.images)
    coco = data / "coco"
    dataset = trtdet.CocoDataset.load(coco / "annotations" / "instances_val2017.json", coco / "val2017", config.classes)

    def score(detector: Detector) -> float:
        return trtdet.evaluate(detector, dataset).result.map

    return Case(source, folder / "model.onnx", tensors, excluded, config, MODELS[name], score)


def calibration_images(data: Path) -> tuple[Path, ...]:
    """Those that ``trtdet build --num-images`` chooses, which its bundle's hash confirms afterwards."""
    found = find_images(data / "coco" / "train2017")
    return tuple(found[index * len(found) // IMAGES] for index in range(IMAGES))


def after_the_last_convolution(model: onnx.ModelProto) -> list[str]:
    """Names of the nodes whose results reach no convolution."""
    feeding: set[str] = set()
    after = []
    for node in reversed(model.graph.node):
        if node.op_type in CONVOLUTIONS or feeding.intersection(node.output):
            feeding.update(node.input)
        else:
            after.append(node.name)
    return after[::-1]


def run_peer(peer: str, method: str, case: Case, work: Path, folder: Path) -> tuple[Measured, Path, Detector]:
    """Quantises with a peer."""
    python = environment_of(peer, work)
    folder.mkdir()
    # Of its own, because ModelOpt leaves files beside the model.
    model = Path(shutil.copy(case.model, folder))
    output = folder / "int8.onnx"
    script = str(Path(__file__).with_name("quantize.py"))
    command = [str(python), script, peer, method, *map(str, (model, case.images, case.excluded, output))]
    measured = measure(command, folder / "log.txt")
    try:
        return measured, output, case.detector(output)
    except BackendError as error:
        raise Failed(f"it wrote a model that does not load: {error}") from None


def run_trtdet(method: str, case: Case, data: Path, folder: Path) -> tuple[Measured, Path, Detector]:
    """Builds a bundle with trtdet's command."""
    folder.mkdir()
    place = folder / "bundle"
    images = ["--images", str(data / "coco" / "train2017"), "--num-images", str(IMAGES), "--no-measure"]
    command = [sys.executable, "-m", "trtdet", "build", str(case.source), "--config", case.config_name, "--int8"]
    measured = measure([*command, *images, *TRTDET[method], "-o", str(place)], folder / "log.txt")
    bundle = Bundle(place)
    used = bundle.manifest.quantization.images
    if used is None or used.sha256 != content_hash(calibration_images(data)):
        raise SystemExit("trtdet calibrated with other images than the peers: the comparison would not be fair")
    return measured, bundle.model, Detector.open(place)


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
    baseline = case.score(case.detector(case.model))
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
        place = folder / f"{quantizer}-{method.replace(', --', '-').replace(' ', '-')}"
        try:
            if quantizer == "trtdet":
                measured, file, detector = run_trtdet(method, case, data, place)
            else:
                measured, file, detector = run_peer(quantizer, method, case, work, place)
        except Failed as failed:
            print(f"| {quantizer} | {method} | {as_cell(failed)} |" + " - |" * 7, flush=True)
            continue
        score, verdict = case.score(detector), judge(file)
        cells = [
            f"{100 * score:.2f}",
            f"{100 * (score - baseline):+.2f}",
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


def as_cell(text: object) -> str:
    """An error's words, in a table of Markdown."""
    return str(text).replace("|", "\\|")


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
        pins = [line for line in requirements_of(peer).read_text().splitlines() if line and not line.startswith("#")]
        print(f"{peer}: {', '.join(pins)}.")
    for name in options.models:
        folder = (options.output / name).resolve()
        compare(prepare(name, options.data, folder), options.data, options.work.resolve(), options.peers, folder)


if __name__ == "__main__":
    main()
