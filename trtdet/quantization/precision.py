"""The precision plan: each convolution's precision and its reason."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Literal, get_args

from pydantic import ConfigDict

from trtdet.files import write_atomically
from trtdet.files.documents import read_result

Precision = Literal["int8", "fp16", "fp32"]

Format = Literal["int8", "fp8"]
"""The number format of a quantised layer: INT8, or E4M3 (Micikevicius et al. 2022, arXiv:2209.05433)."""

_SCHEMA = 1
_STRICT = ConfigDict(strict=True, extra="forbid")


class Cause(str, Enum):
    """Why a convolution has its precision, for code; the reason is for people. The values are those in
    ``plan.json``."""

    UNSPECIFIED = "unspecified"  # not recorded: an old or hand-written plan
    QUANTIZABLE = "quantizable"  # INT8, because nothing prevents it
    TRANSPOSED = "transposed"  # FP32: these have no INT8 kernel for weights with a scale per output channel
    WEIGHTS_NOT_CONSTANT = "weights-not-constant"  # FP32: computed weights cannot be quantised in advance
    INPUT_CONSTANT = "input-constant"  # FP32: there is no activation to quantise
    DECODES_BOXES = "decodes-boxes"  # FP32, also in FP16 engines: half precision cannot tell pixels of large images
    DEPTHWISE = "depthwise"  # FP16 by default: INT8 makes a depthwise convolution no faster
    FEW_CHANNELS = "few-channels"  # FP16 by default: INT8 kernels would mostly compute padding
    HEAD_OUTPUT = "head-output"  # FP16 by default: it outputs boxes or scores, which nothing quantises
    NO_TIME_GAINED = "no-time-gained"  # FP16 by default: with its neighbours, INT8 is estimated to take longer
    FLOAT_IN_MODEL = "float-in-model"  # FP16: the quantised model that was given has it in float
    REQUESTED = "requested"  # the user requested this precision for the whole model
    KEPT_NAMED = "kept-named"  # FP16: named by the user
    KEPT_SENSITIVE = "kept-sensitive"  # FP16: one of the requested number of most sensitive convolutions
    KEPT_BUDGET = "kept-budget"  # FP16: within a share of the multiply-adds
    KEPT_BOUND = "kept-bound"  # FP16: needed to keep the measured accuracy loss within a bound
    KEPT_LATENCY = "kept-latency"  # FP16: in the most accurate plan within a latency limit
    KEPT_TUNED = "kept-tuned"  # FP16: at this point of a tune's accuracy-speed trade-off
    EDITED = "edited"  # a hand-edited plan sets another precision than trtdet would
    FP16_OVERFLOW = "fp16-overflow"  # FP32 instead of FP16: a value exceeds the FP16 maximum


@dataclass(frozen=True)
class Step:
    """A correction of a convolution, such as ``smooth``, ``round`` or ``bias``. ``without`` and ``error`` are the
    output errors without and with it, with all other corrections, on held-back images, as a share of the output's
    variance."""

    __pydantic_config__ = _STRICT

    name: str
    without: float
    error: float


@dataclass(frozen=True)
class Entry:
    """The precision of a convolution."""

    __pydantic_config__ = _STRICT

    precision: Precision
    reason: str  # text for people; code reads ``cause``
    cause: Cause = Cause.UNSPECIFIED
    corrections: tuple[Step, ...] = ()  # its corrections in INT8
    float_output: str = ""  # why an INT8 convolution writes float32 where others write FP16; else empty
    format: Format = "int8"  # the number format that an ``int8`` layer uses

    @property
    def number_format(self) -> str:
        """``int8``, ``fp8``, ``fp16`` or ``fp32``."""
        return self.format if self.precision == "int8" else self.precision

    def edited_from(self, base: Entry) -> Entry:
        """This entry of a plan that a user may have edited, with missing data from the entry ``base`` that trtdet
        computed. The cause is ``EDITED`` if the file changes the precision but not the cause, or has no cause."""
        cause = self.cause
        if self.precision != base.precision and cause in (Cause.UNSPECIFIED, base.cause):
            cause = Cause.EDITED
        elif cause is Cause.UNSPECIFIED:
            cause = base.cause
        corrections = base.corrections if self.precision == "int8" else ()
        return replace(self, cause=cause, corrections=corrections, float_output=base.float_output, format=base.format)


@dataclass(frozen=True)
class PrecisionPlan:
    """Precision by node name, one entry per convolution, in graph order."""

    entries: Mapping[str, Entry]

    def counts(self) -> dict[str, int]:
        """Number of nodes by precision: keys ``int8``, ``fp16``, ``fp32``."""
        precisions = [entry.precision for entry in self.entries.values()]
        return {precision: precisions.count(precision) for precision in get_args(Precision)}

    def names(self, precision: Precision) -> tuple[str, ...]:
        """The nodes that run in ``precision``."""
        return tuple(name for name, entry in self.entries.items() if entry.precision == precision)

    @property
    def fp8(self) -> frozenset[str]:
        """The nodes that run in FP8 instead of INT8."""
        return frozenset(name for name in self.names("int8") if self.entries[name].format == "fp8")

    def kept(self) -> dict[str, str]:
        """``fp16`` or ``fp32`` by name of each node that does not run in INT8."""
        return {name: entry.precision for name, entry in self.entries.items() if entry.precision != "int8"}

    def to_json(self) -> str:
        entries = {name: asdict(entry) for name, entry in self.entries.items()}
        for entry in entries.values():
            if entry["format"] == "int8":
                del entry["format"]
        return json.dumps({"schema": _SCHEMA, "entries": entries}, indent=1) + "\n"

    def save(self, path: Path) -> None:
        """Writes ``plan.json`` atomically."""
        write_atomically(path, self.to_json().encode())

    @staticmethod
    def load(path: Path) -> PrecisionPlan:
        """Reads ``plan.json``. Raises ConfigError if the file is missing, or is no plan."""
        return PrecisionPlan(read_result(path, _File, "start from the plan.json of a bundle").entries)


@dataclass(frozen=True)
class _File:
    __pydantic_config__ = _STRICT

    schema: Literal[1]
    entries: dict[str, Entry]
