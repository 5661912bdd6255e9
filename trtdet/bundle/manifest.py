"""The bundle: a folder with an engine and everything that is known about it. The contract with C++.

``manifest.json`` is written last and holds the SHA-256 of every other file, so a folder with a manifest that
verifies is complete. A bundle appears under its name in one rename; what stood there before stays until then.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict

from trtdet.config import InputConfig, NmsMode

if TYPE_CHECKING:
    pass

SCHEMA: Literal[1] = 1
MANIFEST = "manifest.json"


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


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
    where: NmsMode
    scores: Literal["probabilities", "logits"] = "probabilities"
    """What ``scores`` holds with ``host``; thresholds and results are probabilities all the same."""
    own: bool = False
    """The model brought its suppression along: kind and thresholds are the model's, not the configuration's."""
    score_threshold: float
    iou_threshold: float
    max_detections: int
    pre_nms_topk: int
    class_agnostic: bool
    candidates: Literal["all-classes", "best-class"]


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
    """The engine runs on compute capability 8.0 and every later one, not on those of ``sms`` alone."""

    @property
    def loose_plugins(self) -> tuple[str, ...]:
        """Files with plugins that the engine does not carry: what runs it must load them first."""
        return tuple(part.file for part in self.plugins if not part.embedded)

    @property
    def carries_plugins(self) -> bool:
        """The engine holds plugins itself, which are code of the host."""
        return any(part.embedded for part in self.plugins)


class ImagesPart(_Part):
    count: int
    sha256: str
    skipped: tuple[str, ...] = ()


class QuantizationPart(_Part):
    mode: Literal["explicit", "implicit", "none"]
    source: Literal["trtdet", "tensorrt", "cache"] = "trtdet"
    """Who chose the ranges: trtdet, TensorRT's own calibrator, or whoever made the calibration cache that was given."""
    calibrator: str | None = None
    percentile: float | None = None
    histograms_key: str | None = None
    images: ImagesPart | None = None
    corrections: tuple[str, ...] = ()


class SiluPart(_Part):
    """What became of SiLU and HardSwish.

    ``asked`` and ``done`` are values of ``--silu``; ``rewritten`` counts the nodes that were written anew,
    ``read_int8`` and ``write_int8`` the plugin's that read and write INT8; ``skipped`` has the reason for each that
    could not be.
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
    float_by_backend: tuple[FloatConvPart, ...] = ()


class Manifest(_Part):
    """What ``manifest.json`` holds. Keys are added within schema 1, never removed or given another meaning."""

    schema_: Literal[1] = SCHEMA
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
    silu: SiluPart | None = None
    content_hash: str
    """SHA-256 over everything the engine was made from; equal hashes mean there is nothing to build."""

    def to_json(self) -> str:
        data = self.model_dump(mode="json")
        ordered = {"schema": data.pop("schema_"), **data}
        return json.dumps(ordered, indent=2) + "\n"
