"""A model made ready for every quantiser, and quantised by a peer."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from process import Failed, Measured, environment_of, measure, requirements_of

import trtdet
from trtdet.backends import OnnxRunner
from trtdet.bundle import Bundle
from trtdet.data import ImageStream, content_hash, find_images
from trtdet.errors import BackendError
from trtdet.passes import Options, load_model, rewrite, save_model
from trtdet.quantization.placement import CONVOLUTIONS
from trtdet.runtime.detector import Detector

IMAGES = 64
"""For calibration."""

HEAD_IN_FLOAT = ", head's outputs in float"


@dataclass(frozen=True)
class Case:
    """One model, ready for every quantiser.

    Attributes:
        source: the published ONNX file.
        config: the configuration, and ``config_name``, what ``--config`` takes for it.
        model: the same after trtdet's passes, as a file.
        tensors: folder of calibration tensors, one ``.npy`` an image.
        excluded: JSON list of the nodes that no convolution follows.
        head: likewise, with the convolutions of the outputs, and of a DFL, as well.
    """

    source: Path
    config: trtdet.Config
    config_name: str
    model: Path
    tensors: Path
    excluded: Path
    head: Path

    def detector(self, file: Path) -> Detector:
        """A model whose outputs are boxes and scores, as a detector."""
        runner = OnnxRunner(file.read_bytes())
        return Detector.running(runner, self.config, "host", file)


def prepare(source: Path, config_name: str, images: Path, folder: Path) -> Case:
    """Writes what the quantisers read into a folder that is emptied first.

    Args:
        source: the published ONNX file.
        config_name: a shipped configuration or a YAML file.
        images: the folder that calibration images are chosen from.
        folder: for the files.
    """
    config = trtdet.load_config(config_name)
    tensors = folder / "images"
    shutil.rmtree(folder, ignore_errors=True)
    tensors.mkdir(parents=True)
    model = rewrite(load_model(source), Options(config, batch=1)).model
    case = Case(
        source, config, config_name, folder / "model.onnx", tensors, folder / "excluded.json", folder / "head.json"
    )
    save_model(model, case.model)
    case.excluded.write_text(json.dumps(after_the_last_convolution(model)))
    case.head.write_text(json.dumps(after_the_last_convolution(model, and_head=True)))
    for index, batch in enumerate(ImageStream(calibration_images(images), config.input)):
        np.save(tensors / f"{index:03}.npy", batch.images)
    return case


def calibration_images(folder: Path) -> tuple[Path, ...]:
    """Those that ``trtdet build --num-images`` chooses, which its bundle's hash confirms afterwards."""
    found = find_images(folder)
    count = min(IMAGES, len(found))
    return tuple(found[index * len(found) // count] for index in range(count))


def after_the_last_convolution(model: onnx.ModelProto, and_head: bool = False) -> list[str]:
    """Names of the nodes whose results reach no convolution.

    Args:
        model: with named nodes.
        and_head: the convolutions that reach no other one as well, and those that take a distribution's mean (a
            Softmax before them) do not count as one: what ultralytics leaves in float when it quantises with ModelOpt
            (https://github.com/ultralytics/ultralytics/pull/26171).
    """
    makers = {output: node for node in model.graph.node for output in node.output}
    feeding: set[str] = set()
    after = []
    for node in reversed(model.graph.node):
        follows = bool(feeding.intersection(node.output))
        convolves = node.op_type in CONVOLUTIONS and not (and_head and _after_softmax(node, makers))
        if convolves or follows:
            feeding.update(node.input)
        if not follows and not (convolves and not and_head):
            after.append(node.name)
    return after[::-1]


def _after_softmax(node: onnx.NodeProto, makers: Mapping[str, onnx.NodeProto]) -> bool:
    """Whether a Softmax, seen through changes of layout, is what a convolution reads."""
    maker = makers.get(node.input[0])
    while maker is not None and maker.op_type in ("Transpose", "Reshape"):
        maker = makers.get(maker.input[0])
    return maker is not None and maker.op_type == "Softmax"


def run_peer(peer: str, method: str, case: Case, work: Path, folder: Path) -> tuple[Measured, Path, Detector]:
    """Quantises with a peer; a method that ends in :data:`HEAD_IN_FLOAT` leaves the head's outputs out."""
    python = environment_of(peer, work)
    folder.mkdir(parents=True)
    # Of its own, because ModelOpt leaves files beside the model.
    model = Path(shutil.copy(case.model, folder))
    output = folder / "int8.onnx"
    script = str(Path(__file__).with_name("quantize.py"))
    excluded = case.head if method.endswith(HEAD_IN_FLOAT) else case.excluded
    plain = method.removesuffix(HEAD_IN_FLOAT)
    command = [str(python), script, peer, plain, *map(str, (model, case.tensors, excluded, output))]
    measured = measure(command, folder / "log.txt")
    try:
        return measured, output, case.detector(output)
    except BackendError as error:
        raise Failed(f"it wrote a model that does not load: {error}") from None


def run_trtdet(arguments: Sequence[str], case: Case, images: Path, folder: Path) -> tuple[Measured, Path, Detector]:
    """Builds a bundle with trtdet's command.

    Args:
        arguments: those of ``trtdet build --int8`` besides the images.
        case: the model.
        images: the folder that calibration images are chosen from.
        folder: for the bundle and what the command printed; it must not exist.
    """
    folder.mkdir(parents=True)
    place = folder / "bundle"
    command = [sys.executable, "-m", "trtdet", "build", str(case.source), "--config", case.config_name, "--int8"]
    chosen = ["--images", str(images), "--num-images", str(IMAGES), "--guard", "off"]
    measured = measure([*command, *chosen, *arguments, "-o", str(place)], folder / "log.txt")
    bundle = Bundle(place)
    quantization = bundle.manifest.quantization
    used = quantization.images
    # By default trtdet ships FP16 alone where INT8 is no faster: then it calibrated with nothing.
    calibrated = content_hash(calibration_images(images))
    if quantization.mode != "none" and (used is None or used.sha256 != calibrated):
        raise SystemExit("trtdet calibrated with other images than the peers: the comparison would not be fair")
    return measured, bundle.model, Detector.open(place, runtime="onnxruntime")


def folder_of(parent: Path, quantizer: str, method: str) -> Path:
    """Where a quantiser's result lies."""
    return parent / re.sub(r"[^a-z0-9]+", "-", f"{quantizer} {method}".lower()).strip("-")


def pins_of(peer: str) -> str:
    """The versions that a peer is installed in."""
    lines = requirements_of(peer).read_text().splitlines()
    return ", ".join(line for line in lines if line and not line.startswith("#"))


def as_cell(text: object) -> str:
    """An error's words, in a table of Markdown."""
    return str(text).replace("|", "\\|")
