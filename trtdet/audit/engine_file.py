"""What fills the file of an engine, as far as its bytes and the list of its layers show."""

from __future__ import annotations

import re
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
    """A constant that layers read.

    Attributes:
        layer: the first that does.
        type: data type.
        dims: its sizes.
        bytes: of memory; how many of the file is not known.
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
        types: dict[str, int] = {}
        for constant in self.constants:
            types[constant.type] = types.get(constant.type, 0) + constant.bytes
        sums = ", ".join(f"{size / 1e6:.2f} MB {kind}" for kind, size in sorted(types.items(), key=lambda row: -row[1]))
        largest = "; ".join(
            f"{constant.bytes / 1e6:.2f} MB {constant.type} {list(constant.dims)} of {constant.layer}"
            for constant in self.constants[:_SHOWN]
        )
        notes = (f"constants that its layers read: {sums}", f"the largest: {largest}") if self.constants else ()
        title = f"what fills the engine file ({self.bytes / 1e6:.2f} MB):"
        return Table((Column("MB", ".2f"), Column("share", ".1%"), Column("part", align="left")), rows, title, notes)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**asdict(self), "rest": self.rest}


def parts_of(engine: bytes, layers: Sequence[Layer]) -> EngineFile:
    """Takes an engine's file apart.

    Args:
        engine: the file.
        layers: of the engine.
    """
    texts = [found.group() for found in _TEXT.finditer(engine)]
    sources = [len(text) for text in texts if _SOURCE in text]
    records = sum(map(len, texts)) - sum(sources)
    zeros = sum(found.end() - found.start() for found in _ZEROS.finditer(engine))
    constants: dict[tuple[str, tuple[int, ...], str], Constant] = {}
    for layer in layers:
        for tensor in layer.constants:
            found = Constant(layer.name, tensor.type, tensor.dims, tensor.bytes)
            # TensorRT 8.6 and 10 name none: each layer has weights of its own.
            owner = layer.name if tensor.name in ("Weights", "Bias") else ""
            constants.setdefault((tensor.name + owner, tensor.dims, tensor.type), found)
    ordered = sorted(constants.values(), key=lambda constant: -constant.bytes)
    return EngineFile(len(engine), sum(sources), len(sources), records, zeros, tuple(ordered))
