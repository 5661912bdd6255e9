"""What each convolution costs in INT8: which to keep in FP16, by measuring and not by guessing.

Each convolution in turn is quantised alone (or kept in float alone, with all others in INT8), and the error of the
decoded boxes and scores is measured on real images.

The reference method runs the whole model for every convolution and image. The fast one, which is the default, does less
in three ways:

- the part of the model before a convolution does not depend on it: its tensors are computed once for many convolutions,
  and only what comes after is run again. This changes no number;
- what comes after is small, so that the cores share it out by convolution and not within one. Nor does this;
- the error is weighted by what is detected, and most of that is in some of the images: those that together hold 85 % of
  the weight are used.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
from numpy.typing import NDArray

from trtdet.backends import OnnxRunner
from trtdet.calibration import Ranges, expose
from trtdet.config import InputConfig, NmsConfig
from trtdet.data import Batch, CocoDataset, ImageStream
from trtdet.detection.suppression import non_max_suppression
from trtdet.errors import ConfigError
from trtdet.evaluation.metrics import CocoMetric
from trtdet.files import cluster, write_atomically
from trtdet.files.journal import Rows
from trtdet.passes import Decoded
from trtdet.progress import Progress, silent
from trtdet.quantization import Corrections, HeadError, PrecisionPlan, QdqPlacement, Switch

DEPTHWISE = "depthwise"
"""The group of all depthwise convolutions: padded to whole vectors, they are often no faster in INT8 than in FP16."""

_TOGETHER = 32
"""At most so many convolutions share one pass over the images."""

_WEIGHTS = 1 << 30
"""Bytes of weights that are held at a time by the models of one pass."""

_WEIGHT = 0.85
"""The fast method takes the images that hold so much of what is detected."""

_SCHEMA = 1


@dataclass(frozen=True)
class Subject:
    """What is ranked.

    Attributes:
        model: float model, as the passes leave it.
        placement: its INT8 convolutions.
        ranges: of its activations.
        corrections: channel maps and weights; empty for the textbook form.
        head: where the model holds its decoded boxes and scores.
        images: what is measured on.
        images_sha256: hash of their names and contents.
        preprocess: how they become the network's input.
    """

    model: onnx.ModelProto
    placement: QdqPlacement
    ranges: Ranges
    corrections: Corrections
    head: Decoded
    images: tuple[Path, ...]
    images_sha256: str
    preprocess: InputConfig


@dataclass(frozen=True)
class Method:
    """How it is measured.

    Attributes:
        name: ``fast`` or ``reference``.
        base: ``fp32``: each convolution alone in INT8; ``int8``: all but each.
        dataset: annotated images, to measure mAP as well; the subject's images are then its images.
        nms: the suppression for mAP.
    """

    name: Literal["fast", "reference"] = "fast"
    base: Literal["fp32", "int8"] = "fp32"
    dataset: CocoDataset | None = None
    nms: NmsConfig | None = None


@dataclass(frozen=True)
class LayerScore:
    """One convolution, or the group ``depthwise``.

    Attributes:
        name: of the node.
        score: the power of the error at the head that it causes; with all but it in INT8, the power that leaving it
            out takes away. Powers of independent causes add up.
        rank: 1 for the most sensitive; 0 for a group.
        distance: the error at the head itself, as the corrections are judged by.
        macs: multiply-adds for one image.
        convs: how many convolutions it is.
        depthwise: every input channel is convolved by itself.
        map: COCO mAP 0.50:0.95, 0..1, of the variant, where it was measured.
    """

    name: str
    score: float
    rank: int
    distance: float
    macs: int
    convs: int
    depthwise: bool
    map: float | None = None


@dataclass(frozen=True)
class Sensitivity:
    """A ranking.

    Attributes:
        layers: every INT8 convolution, the most sensitive first.
        groups: groups of convolutions, ranked by nothing.
        macs: multiply-adds of all convolutions for one image, those that stay in float anyway included.
        base: ``fp32`` or ``int8``, see :class:`Method`.
        distance: of the base itself from the float model.
        map: COCO mAP of the base, where it was measured.
        images: how many images were measured on.
        key: what it was made from.
        seconds: wall time of all runs that it took.
        inferences: model runs, whole or in part.
    """

    layers: tuple[LayerScore, ...]
    groups: tuple[LayerScore, ...]
    macs: int
    base: str
    distance: float
    map: float | None
    images: int
    key: str
    seconds: float
    inferences: int

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)

    def table(self, count: int = 15) -> str:
        """The first ``count`` as lines of text."""
        total = sum(max(one.score, 0.0) for one in self.layers) or 1.0
        width = max(len(one.name) for one in (*self.layers[:count], *self.groups))
        macs = max(self.macs, 1)

        def line(one: LayerScore) -> str:
            parts = [f"{one.rank or '':>4}", one.name.ljust(width), f"{one.score:10.6f}", f"{one.score / total:7.1%}"]
            parts.append(f"{one.macs / macs:7.1%}")
            if one.map is not None and self.map is not None:
                parts.append(f"{100 * one.map:6.2f}")
            what = f"{one.convs} convs" if one.convs > 1 else "depthwise" if one.depthwise else ""
            return "  ".join([*parts, what]).rstrip()

        head = ["rank", "convolution".ljust(width), "     error", "  share", "   macs"]
        if self.map is not None:
            head.append("   mAP")
        lines = ["  ".join(head), *map(line, self.layers[:count])]
        if len(self.layers) > count:
            lines.append(f"   . {len(self.layers) - count} more")
        return "\n".join([*lines, *map(line, self.groups)])

    def to_json(self) -> str:
        return json.dumps({"schema": _SCHEMA, **asdict(self)}, indent=1) + "\n"

    def save(self, path: Path) -> None:
        """Writes ``sensitivity.json`` atomically."""
        write_atomically(path, self.to_json().encode())

    @staticmethod
    def load(path: Path) -> Sensitivity:
        """Reads ``sensitivity.json``.

        Raises:
            ConfigError: it is missing, or not a ranking.
        """
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            schema = data.pop("schema")
            layers, groups = (tuple(LayerScore(**one) for one in data.pop(key)) for key in ("layers", "groups"))
            found = Sensitivity(layers=layers, groups=groups, **data)
        except FileNotFoundError:
            raise ConfigError(f"ranking '{path}' does not exist; 'trtdet sensitivity' writes one") from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"'{path}' is not a ranking ({error}); 'trtdet sensitivity' writes one") from None
        if schema != _SCHEMA:
            raise ConfigError(f"ranking '{path}' is of another schema, {schema!r}; make it anew")
        return found


def check_rankable(plan: PrecisionPlan) -> None:
    """Refuses a model without INT8 convolutions."""
    if not plan.names("int8"):
        raise ConfigError("no convolution of the model runs in INT8, so there is nothing to rank")


def rank(
    subject: Subject,
    method: Method = Method(),
    rows: Path | None = None,
    ray: str | None = None,
    progress: Progress = silent,
) -> Sensitivity:
    """Measures every INT8 convolution, and the depthwise ones as a group.

    Args:
        subject: model, ranges and images.
        method: fast or reference, alone or all but one.
        rows: a file that every finished row is appended to; one that is there is gone on with.
        ray: None, ``local`` or a cluster's address, see :func:`trtdet.files.cluster.run`.
        progress: told of rows done and in all.

    Raises:
        ConfigError: there is nothing to rank, or ``rows`` is of something else.
        BackendError: Ray is asked for and missing.
    """
    check_rankable(subject.placement.plan)
    names = subject.placement.plan.names("int8")
    if not subject.images:
        raise ConfigError("a ranking needs images: a folder or a list of file names with --images")
    macs = multiply_adds(subject.model)
    members = _members(subject, macs)
    key = subject_key(subject, method)
    if method.name == "fast" and method.dataset is None:
        subject = replace(subject, images=_telling(subject))
    job = _Job(subject, method, tuple(members.items()), 1 if ray else len(os.sched_getaffinity(0)))
    found: dict[str, dict[str, Any]] = {}
    if rows is None:
        _measured(job, found, found.__setitem__, ray, progress)
    else:
        with Rows(rows, key) as file:
            found = file.found
            _measured(job, found, lambda name, row: file.append(row), ray, progress)
    order = sorted(names, key=lambda name: (-found[name]["score"], names.index(name)))
    ranks = {name: index + 1 for index, name in enumerate(order)}

    def scored(name: str) -> LayerScore:
        own = [macs[member] for member in members[name]]
        row = {key: found[name][key] for key in ("score", "distance", "map")}
        return LayerScore(
            name,
            rank=ranks.get(name, 0),
            macs=sum(one.count for one in own),
            convs=len(own),
            depthwise=all(one.depthwise for one in own),
            **row,
        )

    some = found[names[0]]
    return Sensitivity(
        tuple(scored(name) for name in order),
        tuple(scored(name) for name in members if name not in ranks),
        sum(one.count for one in macs.values()),
        method.base,
        some["base_distance"],
        some["base_map"],
        len(subject.images),
        key,
        round(sum(row["seconds"] for row in found.values()), 3),
        sum(row["inferences"] for row in found.values()),
    )


def _members(subject: Subject, macs: Mapping[str, Macs]) -> dict[str, tuple[str, ...]]:
    """By row, the convolutions that are switched together."""
    names = subject.placement.plan.names("int8")
    members: dict[str, tuple[str, ...]] = {name: (name,) for name in names}
    depthwise = tuple(name for name in names if macs[name].depthwise)
    if len(depthwise) > 1 and DEPTHWISE not in members:
        members[DEPTHWISE] = depthwise
    return members


def _telling(subject: Subject) -> tuple[Path, ...]:
    """The images in which most is detected, in their order, down to what hardly counts."""
    runner = OnnxRunner(expose(subject.model, subject.head.names))
    weights = np.zeros(len(subject.images))
    for batch in ImageStream(subject.images, subject.preprocess, batch_size=runner.batch or 1):
        for index, scores in zip(batch.indices, subject.head.read(runner(batch.images))[1], strict=True):
            weights[index] = HeadError.weight(scores)
    order = np.argsort(-weights, kind="stable")
    enough = int(np.searchsorted(np.cumsum(weights[order]), _WEIGHT * weights.sum())) + 1
    return tuple(subject.images[index] for index in sorted(order[:enough]))


@dataclass(frozen=True)
class Macs:
    """Multiply-adds of a convolution for one image, and whether it is depthwise."""

    count: int
    depthwise: bool


def multiply_adds(model: onnx.ModelProto) -> dict[str, Macs]:
    """By convolution, from the shapes in the model; 0 where a size is not known."""
    graph = model.graph
    shapes = {
        value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in (*graph.value_info, *graph.input, *graph.output)
    }
    weights = {one.name: list(one.dims) for one in graph.initializer}
    found = {}
    for node in graph.node:
        if node.op_type not in ("Conv", "ConvTranspose"):
            continue
        group = next((attribute.i for attribute in node.attribute if attribute.name == "group"), 1)
        kernel = weights.get(node.input[1], [0])
        # A transposed convolution uses each weight once for every place of its input.
        places = shapes.get(node.output[0] if node.op_type == "Conv" else node.input[0], [0])[2:]
        count = int(np.prod(kernel, dtype=np.int64) * np.prod(places, dtype=np.int64))
        found[node.name] = Macs(count, group > 1 and node.op_type == "Conv" and kernel[1:2] == [1])
    return found


@dataclass(frozen=True)
class _Job:
    """What every worker needs."""

    subject: Subject
    method: Method
    members: tuple[tuple[str, tuple[str, ...]], ...]
    threads: int

    def blocks(self) -> list[tuple[str, ...]]:
        """The rows that are measured together: always the same ones, so that a resumed run gives the same bits."""
        size = sum(len(one.raw_data) for one in self.subject.model.graph.initializer)
        count = max(1, min(_TOGETHER, _WEIGHTS // max(1, 2 * size)))
        names = [name for name, _ in self.members]
        return [tuple(names[start : start + count]) for start in range(0, len(names), count)]


def _measured(
    job: _Job,
    found: Mapping[str, dict[str, Any]],
    add: Callable[[str, dict[str, Any]], None],
    ray: str | None,
    progress: Progress,
) -> None:
    waiting = [block for block in job.blocks() if any(name not in found for name in block)]
    total = sum(len(block) for block in job.blocks())
    done = total - sum(len(block) for block in waiting)
    progress("ranking", done, total)

    def told(start: int, block: tuple[str, ...]) -> Callable[[float], None]:
        return lambda part: progress("ranking", int(start + part * len(block)), total)

    results = cluster.run(_block, job, waiting, ray) if ray else (_block(job, one, told(done, one)) for one in waiting)
    for made in results:
        for row in made:
            add(row["name"], row)
        done += len(made)
        progress("ranking", done, total)


def _block(
    job: _Job, names: tuple[str, ...], progress: Callable[[float], None] = lambda part: None
) -> list[dict[str, Any]]:
    """Measures some rows in one pass over the images."""
    started = time.perf_counter()
    subject, method, members = job.subject, job.method, dict(job.members)
    switch = Switch(subject.model, subject.placement, subject.ranges, subject.corrections, method.base)
    make = switch.suffix if method.name == "fast" else switch.whole
    fast = method.name == "fast"
    variants = {name: OnnxRunner(make(members[name], subject.head.names), alone=fast) for name in names}
    source = subject.model.graph.input[0].name
    needed = dict.fromkeys(name for runner in variants.values() for name in runner.inputs if name != source)
    base = OnnxRunner(expose(switch.base, list(dict.fromkeys([*subject.head.names, *needed]))))
    exact = OnnxRunner(expose(subject.model, subject.head.names)) if method.base == "int8" else base
    scores = {name: _Scored(method) for name in (*names, "")}
    stream = ImageStream(
        subject.images, subject.preprocess, batch_size=base.batch or 1, on_bad="raise" if method.dataset else "skip"
    )
    images = runs = 0
    with ThreadPoolExecutor(job.threads if fast else 1) as pool:
        for batch in stream:
            filled = base.filled(batch.images)
            tensors: dict[str, NDArray[Any]] = {**base.feed({source: filled}), source: filled}
            reference = exact.feed({source: filled}) if exact is not base else tensors

            def measure(
                name: str,
                batch: Batch = batch,
                tensors: dict[str, NDArray[Any]] = tensors,
                reference: dict[str, NDArray[Any]] = reference,
            ) -> None:
                runner = variants[name]
                made = runner.feed({one: tensors[one] for one in runner.inputs})
                scores[name].update(subject, batch, reference, {**tensors, **made})

            list(pool.map(measure, names))
            scores[""].update(subject, batch, reference, tensors)
            runs += 1 + (exact is not base) + len(variants)
            images += len(batch)
            progress(images / len(subject.images))
    seconds = time.perf_counter() - started
    own = scores.pop("")
    whole = {"base_distance": own.error.distance, "base_map": own.map()}
    rows = []
    for name, scored in scores.items():
        power = scored.error.power
        rows.append(
            {
                "name": name,
                "score": power if method.base == "fp32" else own.error.power - power,
                "distance": scored.error.distance,
                "map": scored.map(),
                **whole,
                "inferences": runs // len(names) + (runs % len(names) if name == names[0] else 0),
                "seconds": seconds / len(names),
            }
        )
    return rows


class _Scored:
    """The error of one variant and, where boxes are known, its detections."""

    def __init__(self, method: Method) -> None:
        self.error = HeadError()
        self._nms = method.nms or NmsConfig()
        self._metric = CocoMetric(method.dataset) if method.dataset else None

    def update(
        self, subject: Subject, batch: Batch, reference: Mapping[str, NDArray[Any]], outputs: Mapping[str, NDArray[Any]]
    ) -> None:
        exact, (boxes, scores) = subject.head.read(reference), subject.head.read(outputs)
        for row in range(len(batch)):
            self.error.update((exact[0][row], exact[1][row]), (boxes[row], scores[row]))
        if self._metric is not None:
            self._metric.update_batch(batch, non_max_suppression(boxes, scores, self._nms))

    def map(self) -> float | None:
        return None if self._metric is None else self._metric.compute().map


def subject_key(subject: Subject, method: Method) -> str:
    """What a ranking is of: a hash of the model, its ranges and corrections, the images and what is measured."""
    digest = hashlib.sha256()
    facts = {
        "ranges": subject.ranges.to_json(),
        "images": subject.images_sha256,
        "preprocess": subject.preprocess.model_dump(mode="json"),
        "base": method.base,
        "method": method.name,
        "map": [str(method.dataset.annotations), repr(method.nms)] if method.dataset else None,
    }
    digest.update(json.dumps(facts, sort_keys=True).encode())
    digest.update(subject.model.SerializeToString(deterministic=True))
    for name, one in sorted(subject.corrections.tensors.items()):
        for part in (np.float64(one.amax), one.scale, one.shift):
            digest.update(name.encode() + (b"" if part is None else np.asarray(part).tobytes()))
    for name, rounded in sorted(subject.corrections.weights.items()):
        digest.update(name.encode() + rounded.integers.tobytes() + rounded.scales.tobytes() + rounded.bias.tobytes())
    return digest.hexdigest()
