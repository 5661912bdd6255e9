"""What fills the file of an engine, as far as its bytes and the list of its layers show."""

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
"""Constants that are named."""


@dataclass(frozen=True)
class Constant:
    """A constant that layers read: the first layer that does, data type, sizes, and bytes of memory.

    How many bytes it takes of the file is not known.
    """

    layer: str
    type: str
    dims: tuple[int, ...]
    bytes: int


@dataclass(frozen=True)
class EngineFile:
    """What fills an engine's file.

    Attributes:
        bytes: of the file.
        source: bytes of CUDA source text: TensorRT-RTX keeps the source of each kernel that it generates, which is
            compiled on the machine that runs it.
        kernels: how many such texts there are.
        records: bytes of other text, such as TensorRT-RTX's list of what to run.
        zeros: bytes in runs of at least 256 zeros, such as the constants that fill channels up.
        constants: that layers read, the largest first; a constant that several layers read is listed once.
    """

    bytes: int
    source: int
    kernels: int
    records: int
    zeros: int
    constants: tuple[Constant, ...]

    @property
    def rest(self) -> int:
        """Bytes of everything else: weights, and kernels that are compiled already."""
        return self.bytes - self.source - self.records - self.zeros

    def table(self) -> Table:
        """The parts, and below them the constants by data type and the largest of them."""
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
        """Plain values for JSON."""
        return {**asdict(self), "rest": self.rest}


def parts_of(engine: bytes, layers: Sequence[Layer]) -> EngineFile:
    """The parts of an engine's file and the constants that these layers of it read."""
    texts = _TEXT.findall(engine)
    sources = [len(text) for text in texts if _SOURCE in text]
    constants: dict[tuple[str, tuple[int, ...], str], Constant] = {}
    for layer in layers:
        for tensor in layer.constants:
            constant = Constant(layer.name, type=tensor.type, dims=tensor.dims, bytes=tensor.bytes)
            # TensorRT 8.6 and 10 name none: each layer has weights of its own.
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
