"""Measures the rows of a ranking: the error at the head with convolutions switched to INT8 or back, on real images."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from numpy.typing import NDArray
from typing_extensions import TypedDict

from trtdet.backends import OnnxRunner
from trtdet.calibration import expose
from trtdet.config import NmsConfig
from trtdet.data import Batch, ImageStream
from trtdet.detection.suppression import non_max_suppression
from trtdet.evaluation.metrics import CocoMetric
from trtdet.files import cluster
from trtdet.mixed_precision.subject import Method, Subject
from trtdet.progress import Progress
from trtdet.quantization import HeadError, Switch
from trtdet.quantization.head_error import chooses_rows

_TOGETHER = 32
"""At most so many convolutions share one pass over the images."""

_WEIGHTS = 1 << 30
"""Bytes of weights that are held at a time by the models of one pass."""

Arrays = Mapping[str, NDArray[Any]]


class Row(TypedDict):
    """One measured convolution or group, as ``sensitivity.jsonl`` holds it."""

    name: str
    score: float
    distance: float
    map: float | None
    base_distance: float
    base_map: float | None
    inferences: int
    seconds: float


@dataclass(frozen=True)
class Work:
    """What every worker needs.

    Attributes:
        subject: what is ranked.
        method: how.
        members: by row, the convolutions that are switched together.
        threads: convolutions that are measured at a time.
    """

    subject: Subject
    method: Method
    members: tuple[tuple[str, tuple[str, ...]], ...]
    threads: int

    def blocks(self) -> list[tuple[str, ...]]:
        """The rows that are measured together: always the same, so that a resumed run gives the same bits."""
        size = sum(len(tensor.raw_data) for tensor in self.subject.model.graph.initializer)
        count = max(1, min(_TOGETHER, _WEIGHTS // max(1, 2 * size)))
        names = [name for name, _ in self.members]
        return [tuple(names[start : start + count]) for start in range(0, len(names), count)]


def measure_missing(
    work: Work,
    found: Mapping[str, dict[str, Any]],
    add: Callable[[str, dict[str, Any]], None],
    ray: str | None,
    progress: Progress,
) -> None:
    """Measures the blocks of which rows are missing, here or on a Ray cluster.

    Args:
        work: the ranking.
        found: rows by name, those of an earlier run included.
        add: takes a finished row.
        ray: None, ``local`` or a cluster's address.
        progress: told of rows done and in all.
    """
    waiting = [block for block in work.blocks() if any(name not in found for name in block)]
    total = sum(len(block) for block in work.blocks())
    done = total - sum(len(block) for block in waiting)
    progress("ranking", done, total)

    def tell(start: int, block: tuple[str, ...]) -> Callable[[float], None]:
        return lambda part: progress("ranking", int(start + part * len(block)), total)

    results = (
        cluster.run(measure_block, work, waiting, ray)
        if ray
        else (measure_block(work, block, tell(done, block)) for block in waiting)
    )
    for rows in results:
        for row in rows:
            add(row["name"], row)
        done += len(rows)
        progress("ranking", done, total)


def measure_block(
    work: Work, names: tuple[str, ...], progress: Callable[[float], None] = lambda part: None
) -> list[dict[str, Any]]:
    """Measures some rows in one pass over the images.

    Args:
        work: the ranking.
        names: of the rows.
        progress: told of the part of the images that is done, 0..1.
    """
    return _Block(work, names).rows(progress)


class _Block:
    """The models of a block of rows, and the errors that were found so far."""

    def __init__(self, work: Work, names: tuple[str, ...]) -> None:
        self._started = time.perf_counter()
        self._work, self._names = work, names
        subject, method, members = work.subject, work.method, dict(work.members)
        switch = Switch(subject.model, subject.placement, subject.ranges, subject.corrections, method.base)
        fast = method.name == "fast"
        make = switch.suffix if fast else switch.whole
        head = subject.head.names
        models = {name: make(members[name], head) for name in names}
        # What does not reach the boxes and scores, such as the head of masks, leaves nothing to run.
        self._variants = {
            name: OnnxRunner(model, alone=fast) if model.graph.output else None for name, model in models.items()
        }
        self._source = subject.model.graph.input[0].name
        runners = [runner for runner in self._variants.values() if runner is not None]
        read = (name for runner in runners for name in runner.inputs if name != self._source)
        self._base = OnnxRunner(expose(switch.base, list(dict.fromkeys([*head, *read]))))
        # What the errors are against: the float model, which is the base itself where each is in INT8 alone.
        self._exact = OnnxRunner(expose(subject.model, head)) if method.base == "int8" else self._base
        chosen = chooses_rows(subject.model, head)
        self._errors = {name: _Errors(method, chosen) for name in names}
        self._own = _Errors(method, chosen)

    def rows(self, progress: Callable[[float], None]) -> list[dict[str, Any]]:
        subject, method, runs, images = self._work.subject, self._work.method, 0, 0
        stream = ImageStream(
            subject.images,
            subject.preprocess,
            batch_size=self._base.batch or 1,
            on_bad="raise" if method.dataset else "skip",
            cache=subject.cache,
        )
        with ThreadPoolExecutor(self._work.threads if method.name == "fast" else 1) as pool:
            for batch in stream:
                runs += self._add(batch, pool)
                images += len(batch)
                progress(images / len(subject.images))
        return self._rows(runs)

    def _add(self, batch: Batch, pool: ThreadPoolExecutor) -> int:
        """Runs every model on a batch; how many runs that took."""
        filled = self._base.filled(batch.images)
        tensors: Arrays = {**self._base.feed({self._source: filled}), self._source: filled}
        exact = self._exact.feed({self._source: filled}) if self._exact is not self._base else tensors
        list(pool.map(partial(self._add_variant, batch, tensors, exact), self._names))
        self._own.update(self._work.subject, batch, exact, tensors)
        return 1 + (self._exact is not self._base) + len(self._variants)

    def _add_variant(self, batch: Batch, tensors: Arrays, exact: Arrays, name: str) -> None:
        runner = self._variants[name]
        made = {} if runner is None else runner.feed({tensor: tensors[tensor] for tensor in runner.inputs})
        self._errors[name].update(self._work.subject, batch, exact, {**tensors, **made})

    def _rows(self, runs: int) -> list[dict[str, Any]]:
        seconds, names = time.perf_counter() - self._started, self._names
        own, base_map, base = self._own.error, self._own.map(), self._work.method.base
        rows = []
        for name, found in self._errors.items():
            power = found.error.power
            row = Row(
                name=name,
                score=power if base == "fp32" else own.power - power,
                distance=found.error.distance,
                map=found.map(),
                base_distance=own.distance,
                base_map=base_map,
                inferences=runs // len(names) + (runs % len(names) if name == names[0] else 0),
                seconds=seconds / len(names),
            )
            rows.append(dict(row))
        return rows


class _Errors:
    """The error of one variant and, where boxes are known, its detections."""

    def __init__(self, method: Method, chosen: bool) -> None:
        self.error = HeadError(chosen)
        self._nms = method.nms or NmsConfig()
        self._metric = CocoMetric(method.dataset) if method.dataset else None

    def update(self, subject: Subject, batch: Batch, reference: Arrays, outputs: Arrays) -> None:
        exact, (boxes, scores) = subject.head.read(reference), subject.head.read(outputs)
        for row in range(len(batch)):
            self.error.update((exact[0][row], exact[1][row]), (boxes[row], scores[row]))
        if self._metric is not None:
            self._metric.update_batch(batch, non_max_suppression(boxes, scores, self._nms))

    def map(self) -> float | None:
        return None if self._metric is None else self._metric.compute().map
