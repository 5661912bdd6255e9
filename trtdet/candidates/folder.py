"""The folder of candidate networks.

| file | content |
|---|---|
| ``prepared.json`` | the candidates with their accuracy, the target, and the SHA-256 of every file; written last |
| ``NAME.onnx`` | a candidate's network; its weights are in ``weights.bin`` |
| ``weights.bin`` | each distinct tensor of all networks once |
| ``NAME.manifest.json`` and others | files of the candidate's bundle, except engine and model |
| ``README.md`` | which file is which, and the command of trtexec for each |
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import onnx
from google.protobuf.message import DecodeError
from onnx.external_data_helper import set_external_data
from pydantic import TypeAdapter

from trtdet.bundle import MANIFEST, Manifest
from trtdet.errors import BundleError, one_line
from trtdet.evaluation.comparison import PartScore, each_score, spread_text
from trtdet.evaluation.parts import Of
from trtdet.files import sha256_file
from trtdet.files.documents import DocumentError, read_document
from trtdet.options.fields import Precision
from trtdet.quantization import WeightForm
from trtdet.tables import Cell, Column, Table

PREPARED = "prepared.json"
WEIGHTS = "weights.bin"
README = "README.md"

_SHARED_FROM = 1024
"""Bytes from which a tensor is stored beside the networks."""

_ALIGNED = 64


@dataclass(frozen=True)
class Accuracy:
    """Accuracy of a network on images that neither calibrated it nor chose its plan.

    ``figure``: ``map`` for COCO mAP 0.50:0.95; ``agreement`` for the average precision against the float model's
    detections, without annotations. ``low``, ``high``: 90 % interval of ``difference``. ``parts``: the same of masks,
    keypoints and rotated boxes.
    """

    figure: Literal["map", "agreement"]
    value: float  # 0..1
    difference: float  # ``value`` minus the float model's, which agrees with itself by 1
    low: float
    high: float
    images: int  # number of images
    parts: dict[Of, PartScore] = field(default_factory=dict)

    def __str__(self) -> str:
        """The boxes' difference with its interval, in points (hundredths)."""
        return spread_text(each_score(self)["boxes"])


@dataclass(frozen=True)
class Candidate:
    """A network that may become the engine.

    ``precisions``: ``fp16`` or ``fp32`` by name of the nodes that stay out of INT8, for weakly typed networks.
    ``accuracy``: of a network with the same ranges and Q/DQ nodes if ``implicit``, as TensorRT's own choice of layers
    runs on a GPU only.
    """

    name: str  # of its files
    title: str  # what it is, in words
    precision: Precision  # lowest precision that its engine may use
    precisions: dict[str, str]
    implicit: bool  # it is a float model, and its ranges are in the file ``calibration.cache``
    form: WeightForm | None  # form of its INT8 weight scales; None without Q/DQ nodes
    int8_share: float  # of the multiply-adds in INT8, 0..1
    accuracy: Accuracy
    refused: str = ""  # why it may not ship; empty if it may
    files: dict[str, str] = field(default_factory=dict)  # by name in a bundle, the file in this folder

    @property
    def model(self) -> str:
        """File name of the candidate's model."""
        return f"{self.name}.onnx"


@dataclass(frozen=True)
class FolderContent:
    """Content of ``prepared.json``.

    ``library``, ``version``: what will build the engine.
    """

    schema: Literal[1]
    trtdet_version: str
    library: str
    version: str
    sms: tuple[int, ...]  # compute capabilities to build for; empty for the machine's own
    batch: tuple[int, int, int] | None  # (min, opt, max) of a dynamic batch, else None
    key: str  # hash over all inputs
    bound: str  # which candidates may ship, in words
    reference: float  # the float model's mAP, 0..1; 1 for agreement
    candidates: tuple[Candidate, ...]
    files: dict[str, str]


class SharedWeights:
    """Collects the weights of several networks; ``data`` has each distinct tensor once."""

    def __init__(self) -> None:
        self.data = bytearray()
        self._places: dict[bytes, int] = {}

    def external(self, model: onnx.ModelProto) -> bytes:
        """The network as a file beside ``weights.bin``; the model itself is not changed."""
        light = onnx.ModelProto()
        light.CopyFrom(model)
        for tensor in light.graph.initializer:
            content = tensor.raw_data
            if len(content) < _SHARED_FROM:
                continue
            digest = hashlib.sha256(content).digest()
            if digest not in self._places:
                self.data.extend(b"\0" * (-len(self.data) % _ALIGNED))
                self._places[digest] = len(self.data)
                self.data.extend(content)
            set_external_data(tensor, WEIGHTS, offset=self._places[digest], length=len(content))
            tensor.ClearField("raw_data")
        return light.SerializeToString(deterministic=True)


class PreparedFolder:
    """Reads a folder of candidate networks and compares every file with its hash.

    Raises:
        BundleError: it is no such folder, was written by a later version, or a file is missing or changed.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        file = self.path / PREPARED
        try:
            self.content = read_document(file, TypeAdapter(FolderContent))
        except (FileNotFoundError, NotADirectoryError):
            raise BundleError(
                f"'{path}' has no {PREPARED}; give the folder that 'trtdet prepare' wrote with -o"
            ) from None
        except OSError as error:
            raise BundleError(f"'{file}' cannot be read: {error.strerror or error}; check the file") from None
        except DocumentError as error:
            raise BundleError(f"'{file}' cannot be used ({error}); run 'trtdet prepare' again") from None
        there = {entry.name for entry in self.path.iterdir() if entry.is_file()}
        for name, digest in self.content.files.items():
            # A name that leads out of the folder is no file of it.
            if name not in there:
                hint = "copy the whole folder, or run 'trtdet prepare' again"
                raise BundleError(f"'{path}' lacks '{one_line(name)}'", hint)
            if sha256_file(self.path / name) != digest:
                raise BundleError(f"'{path}': '{name}' was altered; copy it again, or run 'trtdet prepare' again")
        named = (name for candidate in self.content.candidates for name in candidate.files.values())
        missing = next((name for name in named if name not in self.content.files), "")
        if missing:
            raise BundleError(f"'{file}' names '{missing}' without a hash; run 'trtdet prepare' again")

    def model(self, candidate: Candidate) -> onnx.ModelProto:
        """A candidate's network with its weights. Raises BundleError: it is not ONNX, or its weights are missing."""
        path = self.path / candidate.model
        try:
            return onnx.load(path)
        except (OSError, DecodeError, ValueError, RuntimeError, onnx.checker.ValidationError) as error:
            raise BundleError(f"'{path}' is no network ({one_line(error)}); run 'trtdet prepare' again") from None

    def manifest(self, candidate: Candidate) -> Manifest:
        """The manifest of a candidate's bundle, still without the engine. Raises BundleError: it has none."""
        path = self.path / candidate.files.get(MANIFEST, "")
        try:
            return read_document(path, TypeAdapter(Manifest))
        except (OSError, DocumentError) as error:
            raise BundleError(f"'{path}' is no manifest ({one_line(error)}); run 'trtdet prepare' again") from None

    def table(self) -> Table:
        """The candidates with their accuracy."""
        return candidates_table(self.content.candidates)


def candidates_table(candidates: tuple[Candidate, ...]) -> Table:
    """The candidates, and whether each may ship."""
    figure, parts = "mAP" if candidates[0].accuracy.figure == "map" else "agreement", candidates[0].accuracy.parts
    columns = (
        Column("candidate", align="left"),
        Column("multiply-adds in INT8", ".0%"),
        Column(figure, ".2f"),
        Column("against FP32 (90 % interval)", align="right"),
        *(Column(of.replace("_", " "), align="right") for of in parts),
        Column("network", align="left"),
        Column("", align="left"),
    )
    rows: list[tuple[Cell, ...]] = [
        (
            candidate.name,
            candidate.int8_share,
            100 * candidate.accuracy.value,
            str(candidate.accuracy),
            *(spread_text(candidate.accuracy.parts[of]) for of in parts),
            candidate.title,
            f"may not ship: {candidate.refused}" if candidate.refused else "",
        )
        for candidate in candidates
    ]
    return Table(columns, rows)
