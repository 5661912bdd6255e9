"""Estimates as tables: the whole engine by batch, and the layers that take most of it."""

from __future__ import annotations

from collections.abc import Sequence

from trtdet.audit.findings import listed
from trtdet.audit.gpus import Gpu
from trtdet.audit.roofline import BOUNDS, Estimate
from trtdet.tables import Column, Table, Tables

_SHOWN = 8
"""Layers of an estimate that are shown unless all are asked for."""


def estimate_tables(estimates: Sequence[Estimate], alone: Sequence[Estimate], everything: bool = False) -> Tables:
    """A table of all batches and one of each batch's layers, the slowest first.

    Args:
        estimates: of one engine on one GPU, at least one, each for another batch, launched as a CUDA graph.
        alone: the same, each kernel launched on its own.
        everything: all layers; otherwise the slowest eight of each batch.
    """
    gpu = estimates[0].gpu
    parts: list[Table | str] = [_totals(gpu, estimates, alone)]
    parts.extend(_layers(found, everything) for found in estimates)
    return Tables(parts)


def _totals(gpu: Gpu, estimates: Sequence[Estimate], alone: Sequence[Estimate]) -> Table:
    rows = [
        (
            found.batch,
            found.ms,
            1e3 * found.batch / found.ms,
            single.ms,
            found.bytes / 1e6,
            found.operations / 1e9,
            *(found.bound_ms(bound) / found.ms for bound in BOUNDS),
        )
        for found, single in zip(estimates, alone, strict=True)
    ]
    columns: tuple[Column | str, ...] = (
        "batch",
        Column("ms", ".3f"),
        Column("images/s", ".0f"),
        Column("ms without CUDA graph", ".3f"),
        Column("MB", ".1f"),
        Column("GOP", ".2f"),
        *(Column(f"bound by {bound}", ".0%") for bound in BOUNDS),
    )
    title = (
        f"estimated, not measured: {gpu.name} at its published rates ({gpu.bandwidth:g} GB/s, FP16 {gpu.fp16:g} "
        f"TFLOPS, INT8 {gpu.int8:g} TOPS), {len(estimates[0].layers)} kernels:"
    )
    held = [f"{found.cached / found.bytes:.0%} at batch {found.batch}" for found in estimates if found.bytes]
    note = (
        f"of these bytes, tensors that may stay in its L2 cache of {gpu.l2 >> 20} MB: {', '.join(held)}; as far as "
        "they do, memory takes less than estimated"
    )
    return Table(columns, rows, title, (note,))


def _layers(found: Estimate, everything: bool) -> Table:
    slowest = sorted(found.layers, key=lambda layer: -layer.ms)
    shown = slowest if everything else slowest[:_SHOWN]
    rows = [
        (
            layer.ms,
            layer.ms / found.ms,
            layer.bound,
            layer.bytes / 1e6,
            layer.operations / 1e9 or None,
            layer.precision,
            layer.type,
            listed(layer.about),
        )
        for layer in shown
    ]
    columns = (
        Column("ms", ".4f"),
        Column("share", ".1%"),
        "bound by",
        Column("MB", ".2f"),
        Column("GOP", ".2f"),
        "reads",
        "kernel",
        Column("layer", align="left"),
    )
    title = f"estimated, the slowest layers at batch {found.batch}:"
    left = () if len(shown) == len(slowest) else (f"{len(slowest) - len(shown)} more; --all shows them",)
    return Table(columns, rows, title, left)
