"""Measures what each convolution costs in INT8, to choose those that stay in FP16.

Each convolution in turn is quantised alone (or stays in float while all others are in INT8). The error of the decoded
boxes and scores is measured on real images. The reference method runs the whole model for every convolution and image.
The fast method, the default, computes the tensors before a convolution once for many convolutions and uses all cores;
this changes no number. It also uses only the images that hold 85 % of all detections.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from trtdet.backends import OnnxRunner, side_by_side
from trtdet.calibration import expose
from trtdet.data import ImageStream
from trtdet.data.ahead import cores
from trtdet.errors import ConfigError
from trtdet.files.journal import Rows
from trtdet.plans.measuring import LayerRow, Method, RankingSubject, Work, measure_missing, row_check, subject_key
from trtdet.plans.scores import LayerScore, Sensitivity
from trtdet.progress import Progress, silent
from trtdet.quantization import HeadError, PrecisionPlan
from trtdet.quantization.macs import DEPTHWISE, Macs, multiply_adds

_WEIGHT = 0.85  # share of all detections in the images of the fast method


def check_rankable(plan: PrecisionPlan) -> None:
    """Raises ConfigError for a model without INT8 convolutions."""
    if not plan.names("int8"):
        hint = "rank those that stay in FP16 by default with --int8-all" if plan.names("fp16") else ""
        raise ConfigError("no convolution of the model runs in INT8, so there is nothing to rank", hint)


def rank(
    subject: RankingSubject,
    method: Method = Method(),
    rows: Path | None = None,
    ray: str | None = None,
    progress: Progress = silent,
) -> Sensitivity:
    """Measures every INT8 convolution, and the depthwise convolutions as a group.

    An existing file ``rows`` is resumed; every finished row is appended. ``ray`` is None, ``local`` or the address of a
    cluster, see :func:`trtdet.files.cluster.run`.

    Raises:
        ConfigError: there is nothing to rank, or ``rows`` belongs to other work.
        BackendError: Ray is requested and missing.

    Warns:
        TrtdetWarning: rows of the existing file are damaged; they are measured again.
    """
    check_rankable(subject.placement.plan)
    if not subject.images:
        raise ConfigError("a ranking needs images: a folder or a list of file names with --images")
    macs = multiply_adds(subject.model)
    names = subject.placement.plan.names("int8")
    # The convolutions that each row switches together.
    members: dict[str, tuple[str, ...]] = {name: (name,) for name in names}
    depthwise = tuple(name for name in names if macs[name].depthwise)
    if len(depthwise) > 1:
        members.setdefault(DEPTHWISE, depthwise)
    key = subject_key(subject, method)
    if method.name == "fast" and method.dataset is None:
        subject = replace(subject, images=telling(subject))
    work = Work(subject, method=method, members=tuple(members.items()), threads=1 if ray else cores())
    measured: dict[str, dict[str, Any]] = {}
    if rows is None:
        measure_missing(work, measured, measured.__setitem__, ray=ray, progress=progress)
    else:
        with Rows(rows, key, valid=row_check(LayerRow, rows)) as file:
            measured = file.found
            measure_missing(work, measured, lambda name, row: file.append(row), ray=ray, progress=progress)
    return _ranked(work, {name: measured[name] for name in members}, macs, key=key)


def _ranked(work: Work, measured: Mapping[str, dict[str, Any]], macs: Mapping[str, Macs], key: str) -> Sensitivity:
    """Sorts the measured rows by score."""
    members = dict(work.members)
    plan = work.subject.placement.plan
    names = plan.names("int8")
    order = sorted(names, key=lambda name: (-measured[name]["score"], names.index(name)))
    ranks = {name: rank for rank, name in enumerate(order, 1)}

    def scored(name: str) -> LayerScore:
        own = [macs[member] for member in members[name]]
        entry = plan.entries.get(name)
        return LayerScore(
            name=name,
            score=measured[name]["score"],
            rank=ranks.get(name, 0),
            distance=measured[name]["distance"],
            macs=sum(conv.count for conv in own),
            convs=len(own),
            depthwise=all(conv.depthwise for conv in own),
            map=measured[name]["map"],
            format=entry.format if entry else "int8",
            kind=entry.reason if entry else "",
            place=names.index(name) + 1 if name in ranks else 0,
        )

    any_row = measured[names[0]]
    return Sensitivity(
        layers=tuple(scored(name) for name in order),
        groups=tuple(scored(name) for name in members if name not in ranks),
        macs=sum(conv.count for conv in macs.values()),
        base=work.method.base,
        distance=any_row["base_distance"],
        map=any_row["base_map"],
        images=len(work.subject.images),
        key=key,
        seconds=round(sum(row["seconds"] for row in measured.values()), 3),
        inferences=sum(row["inferences"] for row in measured.values()),
    )


def telling(subject: RankingSubject) -> tuple[Path, ...]:
    """The fewest images that hold ``_WEIGHT`` of all detections, in the subject's order."""
    runner = OnnxRunner(expose(subject.model, subject.head.names))
    weights = np.zeros(len(subject.images))
    stream = ImageStream(subject.images, subject.preprocess, batch_size=runner.batch or 1, cache=subject.cache)
    runs = side_by_side(runner, lambda run, batch: (batch, subject.head.read(run(batch.images))[1]), iter(stream))
    for batch, found in runs:
        for index, scores in zip(batch.indices, found, strict=True):
            weights[index] = HeadError.weight(scores)
    order = np.argsort(-weights, kind="stable")
    enough = int(np.searchsorted(np.cumsum(weights[order]), _WEIGHT * weights.sum())) + 1
    return tuple(subject.images[index] for index in sorted(order[:enough]))
