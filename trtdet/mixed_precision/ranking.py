"""What each convolution costs in INT8: which to keep in FP16, by measuring and not by guessing.

Each convolution in turn is quantised alone (or kept in float alone, with all others in INT8), and the error of the
decoded boxes and scores is measured on real images.

The reference method runs the whole model for every convolution and image. The fast method, which is the default, does
less in three ways:

- the part of the model before a convolution does not depend on it: its tensors are computed once for many convolutions,
  and only what comes after is run again. This changes no number;
- what comes after is small, so that the cores share it out by convolution and not within one convolution. Nor does
  this;
- the error is weighted by what is detected, and most of that is in some of the images: those that together hold 85 % of
  the weight are used.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from trtdet.backends import OnnxRunner
from trtdet.calibration import expose
from trtdet.data import ImageStream
from trtdet.errors import ConfigError
from trtdet.files.journal import Rows
from trtdet.mixed_precision.measuring import Row, Work, measure_block, measure_missing
from trtdet.mixed_precision.resumed import row_check
from trtdet.mixed_precision.scores import LayerScore, Sensitivity
from trtdet.mixed_precision.subject import Method, Subject, subject_key
from trtdet.progress import Progress, silent
from trtdet.quantization import HeadError, PrecisionPlan
from trtdet.quantization.macs import DEPTHWISE, Macs, multiply_adds

_WEIGHT = 0.85
"""The fast method takes the images that hold so much of what is detected."""


def check_rankable(plan: PrecisionPlan) -> None:
    """Refuses a model without INT8 convolutions."""
    if not plan.names("int8"):
        hint = "rank those that stay in FP16 by default with --int8-all" if plan.names("fp16") else ""
        raise ConfigError("no convolution of the model runs in INT8, so there is nothing to rank", hint)


def rank(
    subject: Subject,
    method: Method = Method(),
    rows: Path | None = None,
    ray: str | None = None,
    progress: Progress = silent,
) -> Sensitivity:
    """Measures every INT8 convolution, and the depthwise convolutions as a group.

    Args:
        subject: model, ranges and images.
        method: fast or reference, alone or all but one.
        rows: a file that every finished row is appended to; an existing file is resumed.
        ray: None, ``local`` or a cluster's address, see :func:`trtdet.files.cluster.run`.
        progress: told of rows done and in all.

    Raises:
        ConfigError: there is nothing to rank, or ``rows`` belongs to something else.
        BackendError: Ray is asked for and missing.

    Warns:
        TrtdetWarning: rows of the existing file are damaged; they are measured again.
    """
    check_rankable(subject.placement.plan)
    if not subject.images:
        raise ConfigError("a ranking needs images: a folder or a list of file names with --images")
    macs = multiply_adds(subject.model)
    members = _members(subject.placement.plan, macs)
    key = subject_key(subject, method)
    if method.name == "fast" and method.dataset is None:
        subject = replace(subject, images=telling(subject))
    work = Work(subject, method, tuple(members.items()), 1 if ray else len(os.sched_getaffinity(0)))
    found: dict[str, dict[str, Any]] = {}
    if rows is None:
        measure_missing(work, found, found.__setitem__, ray, progress)
    else:
        with Rows(rows, key, valid=row_check(Row, rows)) as file:
            found = file.found
            measure_missing(work, found, lambda name, row: file.append(row), ray, progress)
    return _ranked(work, {name: found[name] for name in members}, macs, key)


def _ranked(work: Work, found: Mapping[str, dict[str, Any]], macs: Mapping[str, Macs], key: str) -> Sensitivity:
    """The measured rows in their order."""
    members = dict(work.members)
    names = work.subject.placement.plan.names("int8")
    order = sorted(names, key=lambda name: (-found[name]["score"], names.index(name)))
    ranks = {name: place + 1 for place, name in enumerate(order)}

    plan = work.subject.placement.plan

    def scored(name: str) -> LayerScore:
        own = [macs[member] for member in members[name]]
        entry = plan.entries.get(name)
        return LayerScore(
            name,
            found[name]["score"],
            ranks.get(name, 0),
            found[name]["distance"],
            sum(conv.count for conv in own),
            len(own),
            all(conv.depthwise for conv in own),
            found[name]["map"],
            entry.format if entry else "int8",
            entry.reason if entry else "",
            names.index(name) + 1 if name in ranks else 0,
        )

    any_row = found[names[0]]
    return Sensitivity(
        tuple(scored(name) for name in order),
        tuple(scored(name) for name in members if name not in ranks),
        sum(conv.count for conv in macs.values()),
        work.method.base,
        any_row["base_distance"],
        any_row["base_map"],
        len(work.subject.images),
        key,
        round(sum(row["seconds"] for row in found.values()), 3),
        sum(row["inferences"] for row in found.values()),
    )


def _members(plan: PrecisionPlan, macs: Mapping[str, Macs]) -> dict[str, tuple[str, ...]]:
    """By row, the convolutions that are switched together."""
    names = plan.names("int8")
    members: dict[str, tuple[str, ...]] = {name: (name,) for name in names}
    depthwise = tuple(name for name in names if macs[name].depthwise)
    if len(depthwise) > 1 and DEPTHWISE not in members:
        members[DEPTHWISE] = depthwise
    return members


def error_together(subject: Subject, convs: tuple[str, ...]) -> float:
    """The power of the error at the head with several convolutions in INT8 at once, and no other.

    Args:
        subject: as it is ranked; all of its images are measured on, see :func:`telling`.
        convs: at least one.
    """
    (row,) = measure_block(Work(subject, Method(), (("together", convs),), 1), ("together",))
    return float(row["score"])


def telling(subject: Subject) -> tuple[Path, ...]:
    """The subject's images in which most is detected, in their order, down to what hardly counts."""
    runner = OnnxRunner(expose(subject.model, subject.head.names))
    weights = np.zeros(len(subject.images))
    stream = ImageStream(subject.images, subject.preprocess, batch_size=runner.batch or 1, cache=subject.cache)
    for batch in stream:
        for index, scores in zip(batch.indices, subject.head.read(runner(batch.images))[1], strict=True):
            weights[index] = HeadError.weight(scores)
    order = np.argsort(-weights, kind="stable")
    enough = int(np.searchsorted(np.cumsum(weights[order]), _WEIGHT * weights.sum())) + 1
    return tuple(subject.images[index] for index in sorted(order[:enough]))
