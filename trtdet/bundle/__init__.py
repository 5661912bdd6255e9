"""The bundle: a folder with an engine and everything that is known about it. The contract with C++."""

from __future__ import annotations

from trtdet.bundle.folder import PORTABLE, Bundle, BundleWriter
from trtdet.bundle.manifest import (
    MANIFEST,
    SCHEMA,
    AuditPart,
    BackendPart,
    CountsPart,
    FloatConvPart,
    GuardPart,
    ImagesPart,
    InputPart,
    Manifest,
    MasksPart,
    ModelPart,
    NmsPart,
    OutputPart,
    PluginPart,
    QuantizationPart,
    ShapePart,
    SiluPart,
)

__all__ = [
    "MANIFEST",
    "PORTABLE",
    "SCHEMA",
    "AuditPart",
    "BackendPart",
    "Bundle",
    "BundleWriter",
    "CountsPart",
    "FloatConvPart",
    "GuardPart",
    "ImagesPart",
    "InputPart",
    "Manifest",
    "MasksPart",
    "ModelPart",
    "NmsPart",
    "OutputPart",
    "PluginPart",
    "QuantizationPart",
    "ShapePart",
    "SiluPart",
]
