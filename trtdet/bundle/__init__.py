"""The bundle: a folder with an engine and its documentation. The contract with C++.

``manifest.json`` is written last and holds the SHA-256 of every other file, so a folder with a manifest that
verifies is complete. A bundle appears under its name in one step; an older bundle stays until then.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from trtdet.config import Config, InputConfig, NmsConfig, NmsMode
from trtdet.errors import BundleError
from trtdet.files import FolderWriter, sha256_file, write_atomically
from trtdet.files.documents import DocumentError, read_document

PORTABLE = "portable.onnx"
"""The file of a bundle with the model as onnxruntime runs it, where the engine is made from another."""

SCHEMA: Literal[1] = 1
MANIFEST = "manifest.json"


class _Part(BaseModel):
    # Keys whose names say too little, or belong to Python, have other names here than in the file.
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class ModelPart(_Part):
    sha256: str
    name: str
    classes: tuple[str, ...]


class ShapePart(_Part):
    min: tuple[int, ...]
    opt: tuple[int, ...]
    max: tuple[int, ...]


class InputPart(_Part):
    name: str
    shape: ShapePart
    dtype: str
    preprocess: InputConfig


class OutputPart(_Part):
    name: str
    dtype: str
    shape: tuple[int | str, ...]


class NmsPart(_Part):
    mode: NmsMode = Field(alias="where")
    scores: Literal["probabilities", "logits"] = "probabilities"
    """The values of the output ``scores`` with ``host``; thresholds are probabilities all the same."""
    embedded: bool = Field(False, alias="own")
    """The suppression and its thresholds are the model's, not the configuration's."""
    reason: str = ""
    """How CUDA graphs decided the mode, as part of a sentence; empty where they did not."""
    score_threshold: float
    iou_threshold: float
    max_detections: int
    pre_nms_topk: int
    class_agnostic: bool
    candidates: Literal["all-classes", "best-class"]

    @property
    def thresholds(self) -> NmsConfig:
        """The thresholds, as a configuration has them."""
        return NmsConfig.model_validate(self.model_dump(exclude={"mode", "scores", "embedded", "reason"}))


class MasksPart(_Part):
    """Masks of the detections, which a program pastes into the picture, see :mod:`trtdet.detection.masks`.

    ``output`` is float32 (B, K, size, size), the probabilities of each detection's class; a pixel of the object exceeds
    ``threshold``.
    """

    output: str
    size: int
    threshold: float


class PluginPart(_Part):
    file: str
    sha256: str
    embedded: bool = False
    """The engine carries the library; a service need not load the file."""


class BackendPart(_Part):
    name: str
    version: str
    sms: tuple[int, ...]
    plugins: tuple[PluginPart, ...] = ()
    version_compatible: bool = False
    """The engine runs on later versions of the library as well."""
    hardware_compatible: bool = False
    """The engine runs on every compute capability from 8.0 on, not on those of ``sms`` alone."""
    tf32: bool = False
    """The engine may multiply float32 in TF32, where the GPU can."""

    @property
    def loose_plugins(self) -> tuple[str, ...]:
        """Files with plugins that a program must load before the engine."""
        return tuple(part.file for part in self.plugins if not part.embedded)

    @property
    def carries_plugins(self) -> bool:
        """The engine holds plugins, which are code that runs on the host."""
        return any(part.embedded for part in self.plugins)


class ImagesPart(_Part):
    count: int
    sha256: str
    skipped: tuple[str, ...] = ()


class QuantizationPart(_Part):
    mode: Literal["explicit", "implicit", "none"]
    source: Literal["trtdet", "tensorrt", "cache"] = "trtdet"
    """Where the ranges come from: trtdet, TensorRT's own calibrator, or a calibration cache that was given."""
    calibrator: str | None = None
    percentile: float | None = None
    histograms_key: str | None = None
    images: ImagesPart | None = None
    corrections: tuple[str, ...] = ()
    weight_scales: Literal["channel", "tensor"] | None = None
    """One scale an output channel, or one a tensor with the channels' ratios in a product after the convolution."""


class SiluPart(_Part):
    """How SiLU and HardSwish were rewritten.

    ``asked`` and ``done`` are values of ``--silu``; ``rewritten`` counts the rewritten activations, ``read_int8`` and
    ``write_int8`` those that read and write INT8; ``skipped`` has the reason for each activation that was left.
    """

    asked: str
    done: str
    rewritten: int
    read_int8: int = 0
    write_int8: int = 0
    skipped: tuple[str, ...] = ()


class CountsPart(_Part):
    int8: int
    fp16: int
    fp32: int


class FloatConvPart(_Part):
    name: str
    got: str
    reason: str


class AuditPart(CountsPart):
    """Layers as built; those in FP8 are counted apart, where a plan counts them with INT8, whose place they take."""

    fp8: int = 0
    float_by_backend: tuple[FloatConvPart, ...] = ()


class GuardPart(_Part):
    """What ``--guard`` decided about a bundle in INT8.

    ``least`` is how many times as fast as FP16 INT8 had to be, ``speedup`` how many times as fast it is, None where
    that is unknown; ``on`` names the GPU.
    """

    asked: Literal["int8"] = "int8"
    shipped: Literal["int8", "fp16"]
    least: float
    speedup: float | None = None
    how: Literal["measured", "estimated"] | None = None
    on: str = ""
    batch: int = 1
    reason: str


class Manifest(_Part):
    """The content of ``manifest.json``. Keys are added within schema 1, never removed or given another meaning."""

    schema_: Literal[1] = Field(alias="schema")
    trtdet_version: str
    created: str
    model: ModelPart
    input: InputPart
    outputs: tuple[OutputPart, ...]
    nms: NmsPart
    backend: BackendPart
    quantization: QuantizationPart
    precision: CountsPart
    audit: AuditPart | None
    files: dict[str, str]
    command: dict[str, Any]
    portable: str | None = None
    """The file that onnxruntime runs, and that computes what the engine does; None where INT8 is in the engine alone,
    and in bundles of the first versions."""
    silu: SiluPart | None = None
    input_check: dict[str, Any] | None = None
    """:meth:`trtdet.evaluation.plausibility.Plausibility.as_dict`; None where the input was not checked."""
    masks: MasksPart | None = None
    guard: GuardPart | None = None
    """None without ``--guard``, or where INT8 has not been compared yet."""
    content_hash: str
    """SHA-256 over everything the engine was made from; equal hashes mean there is nothing to build."""

    @property
    def lacks_portable(self) -> bool:
        """The bundle was made before bundles had a portable model."""
        return self.portable is None and self.quantization.mode != "implicit"

    @property
    def shipped(self) -> Literal["int8", "fp16", "fp32"]:
        """The precision of the network in the bundle; ``command`` has the precision that was asked for."""
        return self.guard.shipped if self.guard else self.command["precision"]

    def to_json(self) -> str:
        """The file's text; bytes of file names that are no UTF-8 become ``\\udcXX``, six characters each."""
        return json.dumps(_encodable(self.model_dump(mode="json", by_alias=True)), indent=2) + "\n"


def _encodable(value: Any) -> Any:
    """A plain value with each character that UTF-8 cannot hold escaped."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, dict):
        return {_encodable(key): _encodable(item) for key, item in value.items()}
    return [_encodable(item) for item in value] if isinstance(value, list) else value


class Bundle:
    """A finished bundle, read and verified.

    Args:
        path: the bundle's folder.
        verify: compare every file with its hash.

    Raises:
        BundleError: there is no bundle, its manifest is of another schema, or a file is missing or altered.
    """

    def __init__(self, path: Path, *, verify: bool = True) -> None:
        self.path = path
        file = path / MANIFEST
        try:
            self.manifest = read_document(file, TypeAdapter(Manifest))
        except (FileNotFoundError, NotADirectoryError):
            raise BundleError(
                f"'{path}' is not a bundle: it has no {MANIFEST}; make a bundle with 'trtdet build'"
            ) from None
        except OSError as error:
            raise BundleError(f"'{file}' cannot be read: {error.strerror or error}; check the file") from None
        except DocumentError as error:
            reads = f"; this trtdet reads schema {SCHEMA}" if error.place == "schema" else ""
            raise BundleError(f"'{file}' is not a manifest: {error}{reads}; build the bundle again") from None
        for name, expected in self.manifest.files.items() if verify else ():
            try:
                digest = sha256_file(self.path / name)
            except OSError:
                raise BundleError(f"bundle '{path}' lacks '{name}'; build it again") from None
            if digest != expected:
                raise BundleError(
                    f"bundle '{path}': '{name}' was altered: sha256 {digest[:12]}... where the manifest says "
                    f"{expected[:12]}...; build it again"
                )

    def file(self, name: str) -> Path:
        """The path of one of the bundle's files.

        Raises:
            BundleError: the bundle has no such file.
        """
        if name not in self.manifest.files:
            names = ", ".join(sorted(self.manifest.files))
            raise BundleError(f"bundle '{self.path}' has no '{name}'; it holds {names}")
        return self.path / name

    def add(self, name: str, data: bytes) -> None:
        """Adds a file to the bundle, or replaces it; the bundle is whole at every moment.

        Raises:
            OutputError: the folder cannot be written.
        """
        if name in self.manifest.files:
            self._list({key: digest for key, digest in self.manifest.files.items() if key != name})
        write_atomically(self.path / name, data)
        self._list({**self.manifest.files, name: hashlib.sha256(data).hexdigest()})

    def _list(self, files: dict[str, str]) -> None:
        manifest = self.manifest.model_copy(update={"files": files})
        write_atomically(self.path / MANIFEST, manifest.to_json().encode())
        self.manifest = manifest

    @property
    def config(self) -> Config:
        """The configuration that the bundle was built with, thresholds of the command line included.

        Raises:
            BundleError: the manifest's ``command`` holds no configuration that this version reads.
        """
        try:
            return Config.model_validate(self.manifest.command.get("config"))
        except ValidationError:
            raise BundleError(
                f"'{self.path / MANIFEST}' lacks the configuration that the bundle was built with; build it again"
            ) from None

    @property
    def model(self) -> Path:
        """The ONNX model that the engine was built from, Q/DQ and casts included; float with implicit quantisation."""
        return next(self.path / name for name in self.manifest.files if name.endswith(".onnx") and name != PORTABLE)

    @property
    def engine(self) -> Path | None:
        """The engine file, or None where the bundle was built for onnxruntime."""
        return self.path / "model.engine" if "model.engine" in self.manifest.files else None


class BundleWriter(FolderWriter):
    """Collects the files of a bundle beside its place and puts all of it there in one step.

    Raises:
        OutputError: the place holds something that is not a bundle, cannot be written, or the disk is full.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, MANIFEST, "a bundle")

    def commit(self, fields: Mapping[str, Any]) -> Bundle:
        """Writes the manifest from ``fields`` (its keys without files and created) and puts the bundle in place."""
        created = datetime.now(timezone.utc).isoformat(timespec="seconds")
        manifest = Manifest.model_validate({"schema_": SCHEMA, **fields, "created": created, "files": self.files})
        self.put(manifest.to_json().encode())
        return Bundle(self.path, verify=False)
