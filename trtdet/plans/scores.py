"""A ranking of convolutions by their error in INT8, as a value and as a file."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from trtdet.files import write_atomically
from trtdet.files.documents import read_result
from trtdet.quantization import Format
from trtdet.tables import Cell, Column, Table

_SCHEMA = 1


@dataclass(frozen=True)
class LayerScore:
    """One convolution, or the group ``depthwise``."""

    name: str
    # Error power that it causes at the output, or with the base ``int8`` the power that it removes in float; powers
    # of independent errors add up.
    score: float
    rank: int  # 1 for the most sensitive; 0 for a group
    distance: float  # error at the output, as :attr:`trtdet.quantization.HeadError.distance`
    macs: int  # multiply-adds per image
    convs: int  # number of convolutions
    depthwise: bool  # every input channel is convolved by itself
    map: float | None = None  # COCO mAP 0.50:0.95 of the variant, 0..1; None if not measured
    format: Format = "int8"  # format of the measurement; FP8 is for matrix products
    kind: str = ""  # the reason in the plan; empty for a group
    # Among the ranked convolutions in network order, from 1; 0 for a group.
    place: int = 0


@dataclass(frozen=True)
class Sensitivity:
    """A ranking."""

    layers: tuple[LayerScore, ...]  # every INT8 convolution, the most sensitive first
    groups: tuple[LayerScore, ...]  # groups of convolutions, which have no rank
    macs: int  # multiply-adds of all convolutions per image, including those that stay in float anyway
    base: str  # ``fp32`` or ``int8``, see :class:`trtdet.plans.measuring.Method`
    distance: float  # error of the base against the float model
    map: float | None  # COCO mAP of the base; None if not measured
    images: int
    key: str  # hash of the inputs
    seconds: float  # wall time of all runs
    inferences: int  # model runs, whole or in part

    @property
    def total(self) -> float:
        """Sum of the positive scores, the base of shares; 1 if it is 0."""
        return sum(max(layer.score, 0.0) for layer in self.layers) or 1.0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def table(self, count: int = 15) -> Table:
        """The first ``count`` convolutions, and the groups."""
        columns = [
            *(Column("rank", align="right"), Column("convolution", align="left"), Column("error", ".6f")),
            *(Column("share", ".1%"), Column("macs", ".1%")),
        ]
        if self.map is not None:
            columns.append(Column("mAP", ".2f"))
        remaining, total = len(self.layers) - count, self.total
        rows: list[list[Cell]] = []
        for layer in (*self.layers[:count], *self.groups):
            cells: list[Cell] = [layer.rank or None, layer.name, layer.score, layer.score / total]
            cells.append(layer.macs / max(self.macs, 1))
            if self.map is not None:
                cells.append(None if layer.map is None else 100 * layer.map)
            kind = f"{layer.convs} convs" if layer.convs > 1 else "depthwise" if layer.depthwise else layer.kind
            notes = [kind if kind != "convolution" else "", layer.format.upper() if layer.format != "int8" else ""]
            rows.append([*cells, ", ".join(filter(None, notes))])
        return Table([*columns, ""], rows, notes=[f"{remaining} more convolutions"] if remaining > 0 else ())

    def to_json(self) -> str:
        return json.dumps({"schema": _SCHEMA, **asdict(self)}, indent=1) + "\n"

    def save(self, path: Path) -> None:
        """Writes ``sensitivity.json`` atomically."""
        write_atomically(path, self.to_json().encode())

    @staticmethod
    def load(path: Path) -> Sensitivity:
        """Reads ``sensitivity.json``; raises ConfigError if it is missing or holds no ranking."""
        document = read_result(path, _File, "measure it again with 'trtdet sensitivity'")
        return Sensitivity(**{key.name: getattr(document, key.name) for key in fields(Sensitivity)})


@dataclass(frozen=True)
class _File(Sensitivity):
    """Content of ``sensitivity.json``."""

    schema: Literal[1] = field(kw_only=True)
