"""A bundle: the folder with an engine and its manifest, which Python and C++ programs read.

The manifest holds the SHA-256 of every other file. It is written last, so a folder with a valid manifest is complete.
A new bundle replaces an older one in one step.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    TypeAdapter,
    ValidationError,
    model_serializer,
    model_validator,
)

from trtdet.bundle.signature import SIGNATURE, check_signature, written_signature
from trtdet.config import Config, InputConfig, NmsConfig, NmsMode
from trtdet.errors import BundleError
from trtdet.files import FolderWriter, sha256_file, write_atomically
from trtdet.files.documents import DocumentError, parse_document

PORTABLE = "portable.onnx"
"""Model for onnxruntime, in bundles whose engine is built from another model."""

FLOAT = "float.onnx"
"""The network in float32, without Q/DQ nodes: an extra model in bundles for onnxruntime, where CPUs run it faster, and
the only model with implicit quantisation."""

SCHEMAS = (1, 2)
"""Schemas of a manifest: 2 if it has the key ``parts``, which an older reader would overlook, else 1."""
MANIFEST = "manifest.json"


def _in_the_folder(name: str) -> str:
    """The name of a file that lies in the bundle's own folder, for pydantic."""
    if name in ("", ".", "..", MANIFEST, SIGNATURE) or "/" in name or "\0" in name:
        raise ValueError("is no name of a file in the bundle's folder")
    return name


FileName = Annotated[str, AfterValidator(_in_the_folder)]
"""Name of a file in a bundle's folder, without a path."""


class _Part(BaseModel):
    # An alias gives unclear keys of the file, and keys that are Python keywords, a better name here.
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
    """Values of the output ``scores`` with mode ``host``; thresholds are always probabilities."""
    embedded: bool = Field(False, alias="own")
    """NMS and its thresholds come from the model, not from the configuration."""
    reason: str = ""
    """Why CUDA graphs decided the mode, as part of a sentence; empty if they did not."""
    score_threshold: float
    iou_threshold: float
    max_detections: int
    pre_nms_topk: int
    class_agnostic: bool
    candidates: Literal["all-classes", "best-class"]

    @property
    def thresholds(self) -> NmsConfig:
        """As section ``nms`` of a configuration."""
        return NmsConfig.model_validate(self.model_dump(exclude={"mode", "scores", "embedded", "reason"}))


class MasksPart(_Part):
    """Masks of the detections, see :mod:`trtdet.detection.masks`.

    ``output`` is float32 (B, K, size, size): probabilities 0..1. Pixels above ``threshold`` belong to the object.
    """

    output: str
    size: int
    threshold: float


class PrototypeMasksPart(_Part):
    """Masks of a one-stage detector, see :mod:`trtdet.detection.placing`.

    ``coefficients`` names an output float32 (B, K, M), or (B, N, M) with NMS on the host; ``prototypes`` names an
    output float32 (B, M, h, w). A pixel belongs to the object if the sigmoid of their product there exceeds
    ``threshold``.
    """

    coefficients: str
    prototypes: str
    threshold: float = Field(gt=0, lt=1)


class KeypointsPart(_Part):
    """Keypoints. ``output`` names an output float32 (B, K, P, 3), or (B, N, P, 3) with NMS on the host: x and y in
    pixels of the input, and a score 0..1.

    ``names`` has P names, ``sigmas`` P tolerances as in COCO's keypoint AP, and ``skeleton`` pairs of indices from 0
    that a picture joins by a line.
    """

    output: str
    names: tuple[str, ...]
    sigmas: tuple[float, ...]
    skeleton: tuple[tuple[int, int], ...] = ()

    @property
    def settings(self) -> dict[str, Any]:
        """As key ``head.keypoints`` of a configuration."""
        return self.model_dump(exclude={"output"})


class RotatedBoxesPart(_Part):
    """Rotated boxes. ``output`` names an output float32 (B, K, 5), or (B, N, 5) with NMS on the host.

    The columns are centre x, centre y, width and height in pixels of the input, and the angle in radians from the x
    axis to the side of the width, positive towards the y axis, which points down. ``boxes`` has the upright hulls.
    """

    output: str


class DetectionParts(_Part):
    """What a detector gives beside boxes, scores and classes: at least one part. Absent parts are not written."""

    masks: PrototypeMasksPart | None = None
    keypoints: KeypointsPart | None = None
    rotated_boxes: RotatedBoxesPart | None = None

    @model_validator(mode="after")
    def _some(self) -> DetectionParts:
        if self.masks is None and self.keypoints is None and self.rotated_boxes is None:
            raise ValueError("has none of masks, keypoints and rotated_boxes")
        return self

    @model_serializer(mode="wrap")
    def _present(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {key: value for key, value in handler(self).items() if value is not None}


class PluginPart(_Part):
    file: FileName
    sha256: str
    embedded: bool = False
    """The engine contains the library, so no program has to load the file."""


class BackendPart(_Part):
    name: str
    version: str
    sms: tuple[int, ...]
    plugins: tuple[PluginPart, ...] = ()
    version_compatible: bool = False
    """The engine also runs on later versions of the library."""
    hardware_compatible: bool = False
    """The engine runs on every compute capability from 8.0 on, not only on ``sms``."""
    tf32: bool = False
    """The engine may multiply float32 values in TF32."""
    dla: int | None = None
    """Core of Jetson's DLA that runs a part of the engine."""

    @property
    def loose_plugins(self) -> tuple[str, ...]:
        """Plugin libraries that a program must load before the engine."""
        return tuple(part.file for part in self.plugins if not part.embedded)

    @property
    def carries_plugins(self) -> bool:
        """Whether the engine contains plugins, which are code that runs on the host."""
        return any(part.embedded for part in self.plugins)


class ImagesPart(_Part):
    count: int
    sha256: str
    skipped: tuple[str, ...] = ()


class PairPart(_Part):
    """Pairs of a quantised model that cost time, see :class:`trtdet.quantization.PairProblem`."""

    kind: str
    nodes: tuple[str, ...]
    text: str


class QuantizationPart(_Part):
    mode: Literal["explicit", "implicit", "none"]
    source: Literal["trtdet", "tensorrt", "cache", "model"] = "trtdet"
    """Source of the ranges: trtdet, TensorRT's own calibrator, the user's calibration cache, or a quantised model."""
    calibrator: str | None = None
    percentile: float | None = None
    histograms_key: str | None = None
    images: ImagesPart | None = None
    corrections: tuple[str, ...] = ()
    weight_scales: Literal["channel", "tensor"] | None = None
    """One scale per output channel; or one per tensor, and a Mul after the convolution with the channels' ratios."""
    pairs: tuple[PairPart, ...] | None = None
    """What was found in the Q/DQ pairs of a quantised model; None for a float model."""


class SiluPart(_Part):
    """How SiLU and HardSwish were rewritten.

    ``asked`` and ``done`` are values of ``--silu``. The numbers count activations: those rewritten, those that read
    INT8, those that write INT8. ``skipped`` has a reason for each activation that was not rewritten.
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
    """Layers of the engine by precision. FP8 is counted separately; a plan counts FP8 layers as INT8."""

    fp8: int = 0
    float_by_backend: tuple[FloatConvPart, ...] = ()


class GuardPart(_Part):
    """Decision of ``--guard X``, which ships FP16 if INT8 is too slow, or of the default plan, if INT8 gains nothing.

    ``least`` is the smallest allowed ``speedup`` over FP16; ``speedup`` is None if unknown. ``on`` names the GPU.
    """

    asked: Literal["int8"] = "int8"
    shipped: Literal["int8", "fp16"]
    least: float
    speedup: float | None = None
    how: Literal["measured", "estimated"] | None = None
    on: str = ""
    batch: int = 1
    reason: str


class PartAccuracy(_Part):
    """Accuracy of masks, keypoints or rotated boxes of a candidate, as :class:`CandidatePart` has that of boxes.

    ``map`` is null without annotated images.
    """

    map: float | None
    difference: float
    low: float
    high: float


class CandidatePart(_Part):
    """A network that was considered for the engine, see :mod:`trtdet.candidates`.

    ``map`` is the network's mAP, 0..1, and ``difference`` its distance to the float model's, with the 90 % interval
    ``low`` to ``high``; without annotated images they are of the agreement with the float model. ``parts`` has the same
    of masks, keypoints and rotated boxes, where the detector gives them. ``ms`` is the median time of a run, and
    ``ratio`` its time divided by that of FP16, with its interval. ``problem`` says why it was not built or not shipped;
    empty if it could be.
    """

    name: str
    title: str
    int8_share: float
    figure: Literal["map", "agreement"]
    value: float
    difference: float
    low: float
    high: float
    images: int
    parts: dict[Literal["masks", "keypoints", "rotated_boxes"], PartAccuracy] = {}
    ms: float | None = None
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    how: Literal["measured", "estimated"] | None = None
    on: str = ""
    shipped: bool = False
    problem: str = ""


class Manifest(_Part):
    """Content of ``manifest.json``. Schema 1 may get new keys; no key is removed or changes its meaning. Schema 2 is
    schema 1 with ``parts``."""

    schema_: Literal[1, 2] = Field(alias="schema")
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
    files: dict[FileName, str]
    command: dict[str, Any]
    portable: FileName | None = None
    """File from which onnxruntime computes the engine's results; None for implicit INT8 and in the oldest bundles."""
    float_model: FileName | None = None
    """File of the network in FP32 for onnxruntime; None where the bundle has none."""
    silu: SiluPart | None = None
    input_check: dict[str, Any] | None = None
    """:meth:`trtdet.evaluation.plausibility.Plausibility.as_dict`; None if the input was not checked."""
    masks: MasksPart | None = None
    """Masks of a two-stage detector."""
    parts: DetectionParts | None = None
    """What a one-stage detector gives beside boxes; None, and not written, with schema 1."""
    guard: GuardPart | None = None
    """None before INT8 is compared, and without ``--guard X`` if the default plan has INT8 layers."""
    candidates: tuple[CandidatePart, ...] = ()
    """The networks that were timed side by side, of which the fastest ships; empty where no plan was chosen so."""
    content_hash: str
    """SHA-256 of all inputs of the build; a build with an equal hash keeps the bundle."""

    @model_validator(mode="after")
    def _schemas(self) -> Manifest:
        if (self.schema_ == 2) != (self.parts is not None):
            raise ValueError(f"schema {self.schema_} {'lacks' if self.parts is None else 'must not have'} key 'parts'")
        if self.parts is not None and self.masks is not None:
            raise ValueError("has key 'masks' of a two-stage detector and key 'parts' of a one-stage detector")
        return self

    @model_serializer(mode="wrap")
    def _without_absent_parts(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        data: dict[str, Any] = handler(self)
        if self.parts is None:
            data.pop("parts", None)
        return data

    @property
    def shipped(self) -> Literal["int8", "fp16", "fp32"]:
        """The network's precision, which may differ from the requested one in ``command``."""
        return self.guard.shipped if self.guard else self.command["precision"]

    def to_json(self) -> str:
        """Text of the file. Bytes of file names that are not UTF-8 become ``\\udcXX``, six characters each."""
        return json.dumps(_encodable(self.model_dump(mode="json", by_alias=True)), indent=2) + "\n"


def _encodable(value: Any) -> Any:
    """Escapes each character that UTF-8 cannot encode."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, dict):
        return {_encodable(key): _encodable(item) for key, item in value.items()}
    return [_encodable(item) for item in value] if isinstance(value, list) else value


class Bundle:
    """Reads a finished bundle from its folder.

    Args:
        verify: whether to compare every file with its hash in the manifest.
        public_key: a PEM file with the public Ed25519 key that must have signed the manifest, see :meth:`sign`; None
            asks for no signature.

    Raises:
        BundleError: there is no bundle, its manifest has another schema or names a file outside of its folder, or a
            file is missing, changed or not a regular file; or it is not signed by ``public_key``.
        ConfigError: ``public_key`` cannot be used.
    """

    def __init__(self, path: Path | str, *, verify: bool = True, public_key: Path | str | None = None) -> None:
        self.path = Path(path)
        file = self.path / MANIFEST
        try:
            content = file.read_bytes()
            if public_key is not None:  # before the content is trusted
                check_signature(self.path, content, Path(public_key))
            self.manifest = parse_document(content, TypeAdapter(Manifest))
        except (FileNotFoundError, NotADirectoryError):
            raise BundleError(
                f"'{path}' is not a bundle: it has no {MANIFEST}; make a bundle with 'trtdet build'"
            ) from None
        except OSError as error:
            raise BundleError(f"'{file}' cannot be read: {error.strerror or error}; check the file") from None
        except DocumentError as error:
            reads = f"; this trtdet reads schemas {' and '.join(map(str, SCHEMAS))}" if error.place == "schema" else ""
            raise BundleError(f"'{file}' is not a manifest: {error}{reads}; build the bundle again") from None
        for name, expected in self.manifest.files.items() if verify else ():
            try:
                if (self.path / name).exists() and not (self.path / name).is_file():
                    raise BundleError(f"bundle '{path}': '{name}' is no regular file; build it again")
                digest = sha256_file(self.path / name)
            except OSError:
                raise BundleError(f"bundle '{path}' lacks '{name}'; build it again") from None
            if digest != expected:
                raise BundleError(
                    f"bundle '{path}': '{name}' was altered: sha256 {digest[:12]}... where the manifest says "
                    f"{expected[:12]}...; build it again"
                )

    def __repr__(self) -> str:
        manifest = self.manifest
        counts = manifest.audit or manifest.precision
        layers = f"{counts.int8} convolutions in INT8, {counts.fp16} in FP16, {counts.fp32} in FP32"
        backend = f"{manifest.backend.name} {manifest.backend.version}"
        return f"Bundle({str(self.path)!r}: {manifest.model.name}, {backend}, {layers})"

    def file(self, name: str) -> Path:
        """Path of a file of the bundle.

        Raises:
            BundleError: the bundle has no such file.
        """
        if name not in self.manifest.files:
            names = ", ".join(sorted(self.manifest.files))
            raise BundleError(f"bundle '{self.path}' has no '{name}'; it holds {names}")
        return self.path / name

    def sign(self, private_key: Path | str) -> Path:
        """Signs the manifest, and with it every file, into ``manifest.sig``; returns its path.

        Args:
            private_key: a PEM file with an Ed25519 key, as by ``openssl genpkey -algorithm ed25519 -out key.pem``.

        Raises:
            ConfigError: the key cannot be used, or the package ``cryptography`` is not installed.
            BundleError: the manifest was replaced meanwhile.
            OutputError: the folder cannot be written.
        """
        content = (self.path / MANIFEST).read_bytes()
        if parse_document(content, TypeAdapter(Manifest)) != self.manifest:
            raise BundleError(f"bundle '{self.path}' was replaced while it was read; sign it again")
        return written_signature(self.path, content, Path(private_key))

    def add(self, name: str, data: bytes) -> None:
        """Adds or replaces a file; the bundle stays valid at every moment, and a signature no longer fits.

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
        """The configuration of the build, with the thresholds of the command line. Raises BundleError: this version
        cannot read it."""
        try:
            return Config.model_validate(self.manifest.command.get("config"))
        except ValidationError:
            raise BundleError(
                f"'{self.path / MANIFEST}' lacks the configuration that the bundle was built with; build it again"
            ) from None

    @property
    def model(self) -> Path:
        """The ONNX model of the engine, with Q/DQ nodes and casts; a float model for implicit quantisation."""
        names = [name for name in self.manifest.files if name.endswith(".onnx") and name != PORTABLE]
        return self.path / next((name for name in names if name != FLOAT), FLOAT)

    @property
    def engine(self) -> Path | None:
        """The engine file; None for onnxruntime."""
        return self.path / "model.engine" if "model.engine" in self.manifest.files else None


class BundleWriter(FolderWriter):
    """Writes a bundle into a temporary folder and moves it to ``path`` in one step. Raises OutputError: ``path`` is not
    a bundle, it cannot be written, or the disk is full."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, MANIFEST, "a bundle")

    def commit(self, fields: Mapping[str, Any]) -> Bundle:
        """Writes the manifest and moves the bundle to its path; ``fields`` lacks ``schema``, ``files``, ``created``."""
        created = datetime.now(timezone.utc).isoformat(timespec="seconds")
        schema = 1 if fields.get("parts") is None else 2
        manifest = Manifest.model_validate({"schema_": schema, **fields, "created": created, "files": self.files})
        self.put(manifest.to_json().encode())
        return Bundle(self.path, verify=False)
