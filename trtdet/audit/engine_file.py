"""Contents of an engine file by size, from its bytes and the list of its layers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from trtdet.audit.layers import Layer
from trtdet.tables import Column, Table

_TEXT = re.compile(rb"[\t\n\r\x1d-\x7e]{256,}")
_ZEROS = re.compile(rb"\x00{256,}")
_SOURCE = b"__global__"
_SHOWN = 3
"""Number of constants listed by name."""


@dataclass(frozen=True)
class Constant:
    """A constant with the first layer that reads it; ``bytes`` are of memory, its size in the file is unknown."""

    layer: str
    type: str
    dims: tuple[int, ...]
    bytes: int


@dataclass(frozen=True)
class EngineFile:
    """Parts of an engine file, in bytes.

    Attributes:
        bytes: of the whole file.
        source: CUDA source of the ``kernels`` generated kernels, which TensorRT-RTX compiles on the target machine.
        records: other text, such as TensorRT-RTX's list of what to run.
        zeros: runs of at least 256 zeros, such as constants that pad channels.
        constants: constants that layers read, the largest first, each listed once.
    """

    bytes: int
    source: int
    kernels: int
    records: int
    zeros: int
    constants: tuple[Constant, ...]

    @property
    def rest(self) -> int:
        """Bytes of everything else: weights and compiled kernels."""
        return self.bytes - self.source - self.records - self.zeros

    def table(self) -> Table:
        """The parts, then the constants by data type, then the largest constants."""
        parts = (
            (self.source, f"CUDA source of {self.kernels} generated kernels"),
            (self.records, "other text of the builder"),
            (self.zeros, "runs of zeros"),
            (self.rest, "weights and all else"),
        )
        rows = [(size / 1e6, size / max(self.bytes, 1), part) for size, part in parts if size]
        types: Counter[str] = Counter()
        for constant in self.constants:
            types[constant.type] += constant.bytes
        sums = ", ".join(f"{size / 1e6:.2f} MB {kind}" for kind, size in types.most_common())
        largest = "; ".join(
            f"{constant.bytes / 1e6:.2f} MB {constant.type} {list(constant.dims)} of {constant.layer}"
            for constant in self.constants[:_SHOWN]
        )
        notes = (f"constants that its layers read: {sums}", f"the largest: {largest}") if self.constants else ()
        columns = (Column("MB", ".2f"), Column("share", ".1%"), Column("part", align="left"))
        return Table(columns, rows, title=f"what fills the engine file ({self.bytes / 1e6:.2f} MB):", notes=notes)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "rest": self.rest}


def parts_of(engine: bytes, layers: Sequence[Layer]) -> EngineFile:
    texts = _TEXT.findall(engine)
    sources = [len(text) for text in texts if _SOURCE in text]
    constants: dict[tuple[str, tuple[int, ...], str], Constant] = {}
    for layer in layers:
        for tensor in layer.constants:
            constant = Constant(layer.name, type=tensor.type, dims=tensor.dims, bytes=tensor.bytes)
            # TensorRT 8.6 and 10 do not name constants, so each layer counts as having its own weights.
            owner = layer.name if tensor.name in ("Weights", "Bias") else ""
            constants.setdefault((tensor.name + owner, tensor.dims, tensor.type), constant)
    return EngineFile(
        bytes=len(engine),
        source=sum(sources),
        kernels=len(sources),
        records=sum(map(len, texts)) - sum(sources),
        zeros=sum(map(len, _ZEROS.findall(engine))),
        constants=tuple(sorted(constants.values(), key=lambda constant: -constant.bytes)),
    )
