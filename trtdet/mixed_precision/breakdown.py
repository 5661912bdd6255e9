"""Where the error at the head comes from: block by block, and what each part of the corrections does to it.

Each block is quantised alone, by the plain rule and as it is written, and the error of the decoded boxes and scores is
measured, see :mod:`trtdet.mixed_precision.ranking`. AIMET's QuantAnalyzer enables one quantiser at a time likewise
(https://quic.github.io/aimet-pages, "Quantization analyzer"); a block shows in one look what 100 layers do not.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from trtdet.backends import OnnxRunner
from trtdet.calibration import Ranges
from trtdet.files.documents import read_result
from trtdet.mixed_precision.blocks import Block, blocks_of
from trtdet.mixed_precision.measuring import Work, measure_missing
from trtdet.mixed_precision.ranking import telling
from trtdet.mixed_precision.subject import Method, Subject
from trtdet.progress import Progress, silent
from trtdet.quantization import Corrections, Sources
from trtdet.quantization.corrections.gate import Task, Whole, compare
from trtdet.quantization.corrections.ladder import rungs
from trtdet.quantization.head_error import lower_on, sureness
from trtdet.quantization.macs import multiply_adds
from trtdet.tables import Cell, Column, Table

_SCHEMA = 1
_STAGE = "accuracy report"


@dataclass(frozen=True)
class Alone:
    """The error at the head with one block in INT8 and all else in float.

    Attributes:
        distance: as the corrections are judged by, see :class:`trtdet.quantization.HeadError`.
        power: what independent causes add up in.
    """

    distance: float
    power: float


@dataclass(frozen=True)
class BlockError:
    """A block of the network.

    Attributes:
        name: the module, or the first and the last convolution.
        convs: its INT8 convolutions.
        macs: their multiply-adds for one image.
        before: in INT8 by the plain rule.
        after: in INT8 as it is written.
    """

    name: str
    convs: tuple[str, ...]
    macs: int
    before: Alone
    after: Alone


@dataclass(frozen=True)
class PartError:
    """A part of the corrections.

    Attributes:
        name: ``ranges``, ``channel_maps``, ``weights`` or ``biases``.
        error: at the head of the whole network with this part and those before it.
        without: with all parts but this one; None for channel maps, which the parts after them are computed for.
    """

    name: str
    error: float
    without: float | None


@dataclass(frozen=True)
class Breakdown:
    """The report.

    Attributes:
        images: that the whole network was measured on: those that judged the corrections.
        block_images: of them, those that the blocks were measured on.
        before: error at the head of the whole network by the plain rule.
        after: as it is written.
        agreement_before, agreement_after: with the float model's detections, 0..1, likewise.
        lower_on: images on which the error is lower than by the plain rule.
        seen: images on which anything is detected.
        sure: how sure these images make it that the error is lower, 0..1.
        blocks: in the order of the network.
        corrections: in the order in which they build on another; empty for the plain rule.
    """

    images: int
    block_images: int
    before: float
    after: float
    agreement_before: float
    agreement_after: float
    lower_on: int
    seen: int
    sure: float
    blocks: tuple[BlockError, ...]
    corrections: tuple[PartError, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"schema": _SCHEMA, **asdict(self)}

    def table(self) -> Table:
        """The blocks."""
        columns = (
            *(Column("block alone in INT8", align="left"), "convs", Column("by the rule", ".4f")),
            *(Column("as written", ".4f"), Column("share", ".1%")),
        )
        total = sum(block.after.power for block in self.blocks) or 1.0
        rows: list[list[Cell]] = [
            [
                *(block.name, len(block.convs), block.before.distance),
                *(block.after.distance, block.after.power / total),
            ]
            for block in self.blocks
        ]
        rows.append(["all of them", sum(len(block.convs) for block in self.blocks), self.before, self.after, None])
        return Table(columns, rows, title="error at the head")

    def to_json(self) -> str:
        return json.dumps(self.as_dict(), indent=1) + "\n"

    @staticmethod
    def load(path: Path) -> Breakdown:
        """Reads ``accuracy.json``.

        Raises:
            ConfigError: it cannot be read, or is no accuracy report.
        """
        return read_result(path, Breakdown, "build the bundle again with --accuracy-report")


def break_down(subject: Subject, plain: Ranges, progress: Progress = silent) -> Breakdown:
    """Measures the blocks and the parts of the corrections.

    Args:
        subject: the model as it is written; its images are those that nothing was computed from.
        plain: the ranges of the rule alone.
        progress: told of every image and block.
    """
    written = Whole("as written", subject.ranges, subject.corrections)
    parts = rungs(subject.model, subject.placement, plain, written)
    wholes = [Whole("by the plain rule", plain), written]
    wholes += [whole for part in parts for whole in (part.upto, part.without) if whole is not None]
    errors = dict(zip(wholes, compare(_task(subject, progress), wholes).errors, strict=True))
    first, last = errors[wholes[0]], errors[written]
    lower, seen = lower_on(last, first)
    shown = replace(subject, images=telling(subject))
    return Breakdown(
        len(subject.images),
        len(shown.images),
        first.distance,
        last.distance,
        first.agreement,
        last.agreement,
        lower,
        seen,
        sureness(last, first),
        _blocks(shown, plain, bool(parts), progress),
        tuple(
            PartError(part.name, errors[part.upto].distance, errors[part.without].distance if part.without else None)
            for part in parts
        ),
    )


def _task(subject: Subject, progress: Progress) -> Task:
    """For the gate: it runs the images and compares, and computes nothing."""
    paths = subject.images
    sources = Sources(paths, subject.preprocess, OnnxRunner, subject.head, progress, subject.cache)
    return Task(subject.model, subject.placement, {}, (), (), paths, sources)


def _blocks(subject: Subject, plain: Ranges, corrected: bool, progress: Progress) -> tuple[BlockError, ...]:
    blocks = blocks_of(subject.model, subject.placement.plan.names("int8"))
    after = before = _alone(subject, blocks, progress)
    if corrected:
        before = _alone(replace(subject, ranges=plain, corrections=Corrections()), blocks, progress)
    macs = multiply_adds(subject.model)
    return tuple(
        BlockError(
            block.name,
            block.convs,
            sum(macs[name].count for name in block.convs),
            before[block.name],
            after[block.name],
        )
        for block in blocks
    )


def _alone(subject: Subject, blocks: tuple[Block, ...], progress: Progress) -> dict[str, Alone]:
    """By block, the error at the head with it alone in INT8."""
    members = tuple((block.name, block.convs) for block in blocks)
    found: dict[str, dict[str, Any]] = {}
    work = Work(subject, Method(), members, len(os.sched_getaffinity(0)))
    measure_missing(work, found, found.__setitem__, None, lambda stage, done, total: progress(_STAGE, done, total))
    return {name: Alone(row["distance"], row["score"]) for name, row in found.items()}
