"""Measures the rows of a ranking: the output error with convolutions switched to INT8 or back, on real images."""

from __future__ import annotations

import hashlib
import json
import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import onnx
from numpy.typing import NDArray
from pydantic import TypeAdapter
from typing_extensions import TypedDict

from trtdet.backends import OnnxRunner
from trtdet.calibration import Ranges, expose
from trtdet.config import InputConfig, NmsConfig
from trtdet.data import CocoDataset, ImageBatch, ImageCache, ImageStream
from trtdet.detection.suppression import non_max_suppression
from trtdet.errors import TrtdetWarning
from trtdet.evaluation.metrics import CocoMetric
from trtdet.files import cluster
from trtdet.files.documents import DocumentError, check_value
from trtdet.passes import Decoded
from trtdet.progress import Progress
from trtdet.quantization import Corrections, HeadError, QdqPlacement, Switch
from trtdet.quantization.head_error import chooses_rows

_TOGETHER = 32  # maximum number of convolutions that share a pass over the images
_WEIGHTS = 1 << 30  # maximum bytes of weights in the models of a pass, without those of models that its rows share

Arrays = Mapping[str, NDArray[Any]]


def row_check(schema: Any, path: Path) -> Callable[[Mapping[str, Any]], bool]:
    """A check of rows for :class:`trtdet.files.journal.Rows`; warns of damaged rows, which are measured again."""
    adapter: TypeAdapter[Any] = TypeAdapter(schema)

    def valid(row: Mapping[str, Any]) -> bool:
        try:
            check_value(row, adapter)
        except DocumentError as error:
            warnings.warn(f"'{path}': a row is damaged ({error}) and is measured again", TrtdetWarning, stacklevel=3)
            return False
        return True

    return valid


@dataclass(frozen=True)
class RankingSubject:
    """Inputs of a ranking."""

    model: onnx.ModelProto  # float model after the passes
    placement: QdqPlacement  # where Q/DQ pairs go; its plan names the INT8 convolutions
    ranges: Ranges
    corrections: Corrections  # channel maps and weights; empty without corrections
    head: Decoded  # tensors of the decoded boxes and scores
    images: tuple[Path, ...]
    images_sha256: str  # hash of the images' names and contents
    preprocess: InputConfig
    # Images that other passes decoded; None decodes them in each pass.
    cache: ImageCache | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class Method:
    """How the errors are measured."""

    name: Literal["fast", "reference"] = "fast"  # see :mod:`trtdet.plans.ranking`
    base: Literal["fp32", "int8"] = "fp32"  # fp32 switches each convolution alone to INT8; int8 switches all others
    dataset: CocoDataset | None = None  # to measure mAP too; the subject's images are then those of the dataset
    nms: NmsConfig | None = None  # for mAP


def subject_key(subject: RankingSubject, method: Method) -> str:
    """Hash of the model, its ranges and corrections, the images and the method."""
    facts = {
        "ranges": subject.ranges.to_json(),
        "int8": subject.placement.plan.names("int8"),
        "fp8": sorted(subject.placement.plan.fp8),
        "images": subject.images_sha256,
        "preprocess": subject.preprocess.model_dump(mode="json"),
        "base": method.base,
        "method": method.name,
        "map": [str(method.dataset.annotations), repr(method.nms)] if method.dataset else None,
    }
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    digest.update(subject.model.SerializeToString(deterministic=True))
    subject.corrections.hash_into(digest)
    return digest.hexdigest()


class LayerRow(TypedDict):
    """A measured convolution or group, as in ``sensitivity.jsonl``."""

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
    """Inputs of every worker; ``members`` are the convolutions that each row switches together."""

    subject: RankingSubject
    method: Method
    members: tuple[tuple[str, tuple[str, ...]], ...]
    threads: int

    @cached_property
    def switch(self) -> Switch:
        """Makes the models of all rows."""
        subject = self.subject
        return Switch(
            subject.model,
            placement=subject.placement,
            ranges=subject.ranges,
            corrections=subject.corrections,
            base=self.method.base,
        )

    def blocks(self) -> list[tuple[str, ...]]:
        """The rows that are measured together; always the same, so that a resumed run gives the same bits.

        The models of a row have the weights, twice, of the convolutions from its own to the last of its block; by the
        reference method, of the whole network. The convolutions of a group may be anywhere, so that by the fast method
        a group begins a block.
        """
        fast = self.method.name == "fast"
        weights = {weight.name: len(weight.raw_data) for weight in self.subject.model.graph.initializer}
        nodes = self.subject.model.graph.node
        sizes = {node.name: sum(weights.get(name, 0) for name in node.input) for node in nodes}
        sizes |= {row: sum(sizes[conv] for conv in convs) for row, convs in self.members}
        whole = sum(weights.values())

        def held(rows: list[str]) -> int:
            return 2 * sum(count * sizes[row] if fast else whole for count, row in enumerate(rows, 1))

        blocks = list[list[str]]()
        for row, convs in self.members:
            group = fast and len(convs) > 1
            if not blocks or group or len(blocks[-1]) == _TOGETHER or held([*blocks[-1], row]) > _WEIGHTS:
                blocks.append([])
            blocks[-1].append(row)
        return [tuple(block) for block in blocks]


def measure_missing(
    work: Work,
    measured: Mapping[str, dict[str, Any]],
    add: Callable[[str, dict[str, Any]], None],
    ray: str | None,
    progress: Progress,
) -> None:
    """Measures blocks with missing rows, here or on a Ray cluster; calls ``add`` with each new row."""
    waiting = [block for block in work.blocks() if any(name not in measured for name in block)]
    total = len(work.members)
    finished = total - sum(len(block) for block in waiting)
    progress("ranking", finished, total)

    def tell(start: int, block: tuple[str, ...]) -> Callable[[float], None]:
        return lambda part: progress("ranking", int(start + part * len(block)), total)

    results = (
        cluster.run(measure_block, work, waiting, address=ray)
        if ray
        else (measure_block(work, block, tell(finished, block)) for block in waiting)
    )
    for rows in results:
        for row in rows:
            add(row["name"], row)
        finished += len(rows)
        progress("ranking", finished, total)


def measure_block(
    work: Work, names: tuple[str, ...], progress: Callable[[float], None] = lambda part: None
) -> list[dict[str, Any]]:
    """Measures some rows in one pass over the images."""
    return _Block(work, names).rows(progress)


class _Block:
    """The models of a block of rows, and their errors so far."""

    def __init__(self, work: Work, names: tuple[str, ...]) -> None:
        self._started = time.perf_counter()
        self._work, self._names = work, names
        subject, method, switch = work.subject, work.method, work.switch
        members, head = dict(work.members), subject.head.names
        groups = {name: members[name] for name in names}
        fast = method.name == "fast"
        models = (
            switch.suffixes(groups, head)
            if fast
            else {name: (switch.whole(convs, head),) for name, convs in groups.items()}
        )
        loaded: dict[int, OnnxRunner] = {}
        for model in chain.from_iterable(models.values()):
            if id(model) not in loaded:
                loaded[id(model)] = OnnxRunner(model, alone=fast)
        # Convolutions that do not reach the boxes and scores, such as a mask head's, leave nothing to run.
        self._variants = {name: [loaded[id(model)] for model in parts] for name, parts in models.items()}
        self._source = subject.model.graph.input[0].name
        read = (name for runner in loaded.values() for name in runner.inputs if name != self._source)
        self._base = OnnxRunner(expose(switch.base, list(dict.fromkeys([*head, *read]))))
        # Errors are against the float model; with the base fp32 that is the base itself.
        self._exact = OnnxRunner(expose(subject.model, head)) if method.base == "int8" else self._base
        chosen = chooses_rows(subject.model, head)
        self._errors = {name: _Errors(method, chosen, subject.head.size) for name in names}
        self._own = _Errors(method, chosen, subject.head.size)

    def rows(self, progress: Callable[[float], None]) -> list[dict[str, Any]]:
        subject, method, runs, images = self._work.subject, self._work.method, 0, 0

        def add(batch: ImageBatch, tensors: Arrays, exact: Arrays, name: str) -> None:
            values = dict(tensors)
            for runner in self._variants[name]:
                values.update(runner.feed({tensor: values[tensor] for tensor in runner.inputs}))
            self._errors[name].update(subject, batch, exact, values)

        stream = ImageStream(
            subject.images,
            subject.preprocess,
            batch_size=self._base.batch or 1,
            on_bad="raise" if method.dataset else "skip",
            cache=subject.cache,
        )
        with ThreadPoolExecutor(self._work.threads if method.name == "fast" else 1) as pool:
            for batch in stream:
                filled = self._base.filled(batch.images)
                tensors: Arrays = {**self._base.feed({self._source: filled}), self._source: filled}
                exact = self._exact.feed({self._source: filled}) if self._exact is not self._base else tensors
                list(pool.map(partial(add, batch, tensors, exact), self._names))
                self._own.update(subject, batch, exact, tensors)
                runs += 1 + (self._exact is not self._base) + len(self._variants)
                images += len(batch)
                progress(images / len(subject.images))
        seconds, names = time.perf_counter() - self._started, self._names
        own, base_map = self._own.error, self._own.map()
        rows = []
        for name, errors in self._errors.items():
            power = errors.error.power
            row = LayerRow(
                name=name,
                score=power if method.base == "fp32" else own.power - power,
                distance=errors.error.distance,
                map=errors.map(),
                base_distance=own.distance,
                base_map=base_map,
                inferences=runs // len(names) + (runs % len(names) if name == names[0] else 0),
                seconds=seconds / len(names),
            )
            rows.append(dict(row))
        return rows


class _Errors:
    """The error of a variant and, with annotations, its detections."""

    def __init__(self, method: Method, chosen: bool, size: tuple[int, int]) -> None:
        self.error = HeadError(chosen, size)
        self._nms = method.nms or NmsConfig()
        self._metric = CocoMetric(method.dataset) if method.dataset else None

    def update(self, subject: RankingSubject, batch: ImageBatch, reference: Arrays, outputs: Arrays) -> None:
        head = subject.head
        exact, (boxes, scores), parts = head.read(reference), head.read(outputs), head.parts_of(outputs)
        expected = head.parts_of(reference)
        for row in range(len(batch)):
            both = expected.image(row), parts.image(row)
            self.error.update((exact[0][row], exact[1][row]), (boxes[row], scores[row]), both)
        if self._metric is not None:
            self._metric.update_batch(batch, non_max_suppression(boxes, scores, self._nms, parts=parts))

    def map(self) -> float | None:
        return None if self._metric is None else self._metric.compute().map
