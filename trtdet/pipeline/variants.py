"""The matrix of variants of one model: SiLU, rules, corrections, kept layers and suppression, one row each.

What rows share is done once: the images are run through the float model once for all, ranges, corrections and ranking
are made once for each form of SiLU, rule and set of corrections, and one pass over the annotated images serves every
suppression. Engines are built without suppression in the graph, so that one serves all of them. Where they can be run
they are what is scored and timed, and the float model has a row in FP16 as well; elsewhere their ONNX models are scored
on the CPU.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal

import onnx

from trtdet.audit import audit, layers_of
from trtdet.backends import (
    Backend,
    BuildRequest,
    Built,
    Capabilities,
    EngineFacts,
    build_remembering,
    choose,
    cuda,
    obstacle,
    open_engine,
)
from trtdet.config import Config, NmsConfig, SiluForm
from trtdet.data import CocoDataset, content_hash
from trtdet.errors import BackendError, ConfigError
from trtdet.evaluation.comparison import compare
from trtdet.evaluation.scoring import Evaluation, evaluate_each
from trtdet.files import cluster, sha256_file, write_atomically, writing
from trtdet.files.journal import Rows
from trtdet.mixed_precision.ranking import Sensitivity, rank
from trtdet.passes import Rewritten
from trtdet.performance.latency import BenchOptions, Target, measure
from trtdet.pipeline import (
    FORMS,
    RANKED_IMAGES,
    CalibrationOptions,
    KeepOptions,
    Selection,
    choose_plan,
    float_plan,
    plugin_parts,
    prepare,
    rewritten,
    select_images,
    silu_form,
)
from trtdet.progress import Progress, silent
from trtdet.quantization import CORRECTIONS, Precision, PrecisionPlan, Quantizable, place, quantizable, to_half
from trtdet.runtime.detector import Detector, On

ROWS = "rows.jsonl"
TABLE = "sweep.md"
RESULT = "sweep.json"
HISTOGRAMS = "histograms.npz"
TIMINGS = "timing-cache"

Keep = int | Literal["depthwise"]


@dataclass(frozen=True)
class SweepOptions:
    """The axes of the matrix, and what all of it shares.

    Attributes:
        calibration: the images; its rule is the first of ``rules``.
        rules: calibration rules.
        corrections: sets of corrections, the empty one for the textbook form.
        keeps: how many of the most sensitive convolutions stay in FP16, or ``depthwise``.
        suppressions: thresholds.
        images: annotated images that are scored.
        annotations: their COCO file.
        backend: builds the engines; see :class:`trtdet.BuildOptions`.
        sms: compute capabilities to build for.
        ray: None, ``local`` or the address of a Ray cluster.
        silus: what SiLU is written as in the INT8 models, see :class:`trtdet.BuildOptions`.
        plugins: libraries with the plugins.
        on: what is scored, see :meth:`trtdet.runtime.detector.Detector.open`.
    """

    calibration: CalibrationOptions
    images: Path
    annotations: Path
    rules: tuple[str, ...] = ("percentile",)
    corrections: tuple[tuple[str, ...], ...] = (CORRECTIONS,)
    keeps: tuple[Keep, ...] = (0,)
    suppressions: tuple[NmsConfig, ...] = ()
    backend: str = "auto"
    sms: tuple[int, ...] = ()
    ray: str | None = None
    silus: tuple[str, ...] = ("auto",)
    plugins: tuple[Path, ...] = ()
    on: On = "auto"


@dataclass(frozen=True)
class Sweep:
    """The finished matrix.

    Attributes:
        rows: FP32 first, then the variants in the order of the axes; plain values.
        folder: where rows, table and result stand.
    """

    rows: tuple[dict[str, Any], ...]
    folder: Path

    def table(self) -> str:
        """Markdown; mAP in points, intervals of 90 %."""
        lines = [
            "| precision | SiLU | calibration | corrected | kept in FP16 | NMS | mAP | AP50 | against FP32 | "
            "90 % interval | INT8 / FP16 / FP32 convs | build s | engine MB | latency ms |",
            "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
        ]
        for row in self.rows:
            nms = row["nms"]
            suppression = f"{nms['score_threshold']:g} / {nms['iou_threshold']:g} / {nms['max_detections']}"
            interval = "" if row["low"] is None else f"{100 * row['low']:+.2f} .. {100 * row['high']:+.2f}"
            lines.append(
                f"| {row['precision']} | {row['silu']} | {row['calibration'] or ''} | "
                f"{', '.join(row['corrections'] or ())} | "
                f"{row['kept'] if row['kept'] is not None else ''} | {suppression} | {100 * row['map']:.2f} | "
                f"{100 * row['map50']:.2f} | {100 * row['difference']:+.2f} | {interval} | "
                f"{row['int8']} / {row['fp16']} / {row['fp32']} | {_number(row['build_seconds'])} | "
                f"{_number(row['engine_mb'])} | {_number(row['latency_ms'])} |"
            )
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"rows": list(self.rows), "folder": str(self.folder)}


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def sweep(
    model: Path,
    config: Config,
    output: Path,
    options: SweepOptions,
    progress: Progress = silent,
) -> Sweep:
    """Builds and scores every variant.

    Rows are appended to ``rows.jsonl`` as they are finished; a sweep that was stopped goes on, and one that is run
    again with more values on an axis does what is new.

    Args:
        model: float ONNX model.
        config: its configuration.
        output: a folder.
        options: axes, images, backend.
        progress: told of images and rows.

    Raises:
        TrtdetError: of the kind that says what is wrong; the rows that are done stay.
    """
    if not options.suppressions:
        options = replace(options, suppressions=(config.nms,))
    caps = choose(options.backend).capabilities  # a missing one is said now
    plugin_parts(options.plugins, caps)
    forms = tuple(dict.fromkeys(silu_form(asked, options.plugins, caps) for asked in options.silus))
    options = replace(options, silus=forms, on=_ran_on(options, caps))
    dataset = CocoDataset.load(options.annotations, options.images, config.classes)
    selected = select_images(options.calibration)
    if not selected.paths:
        raise ConfigError("a sweep needs calibration images: a folder or a list of file names with --images")
    with writing(output):
        output.mkdir(parents=True, exist_ok=True)
    job = _Job(model, config, output, options, selected, dataset)
    names = [name for group in job.groups() for name in job.names(group)]
    with Rows(output / ROWS, job.key(), "variant") as rows:
        waiting = [group for group in job.groups() if any(name not in rows.found for name in job.names(group))]
        done = sum(name in rows.found for name in names)
        progress("sweep", done, len(names))
        if waiting:
            _collected(job, progress)
        if options.ray is None:
            worker = _Worker(job, progress)
            kept = frozenset(rows.found)
            results: Iterator[dict[str, Any]] = itertools.chain.from_iterable(
                worker.rows(group, kept) for group in waiting
            )
        else:
            results = itertools.chain.from_iterable(cluster.run(_listed, job, waiting, options.ray))
        for row in results:
            rows.append(row)
            done = sum(name in rows.found for name in names)
            progress("sweep", done, len(names))
        made = Sweep(tuple(rows.found[name] for name in names), output)
    write_atomically(output / TABLE, (made.table() + "\n").encode())
    write_atomically(output / RESULT, (json.dumps(list(made.rows), indent=1) + "\n").encode())
    return made


def _ran_on(options: SweepOptions, caps: Capabilities) -> Literal["engine", "onnxruntime"]:
    """Whether engines of this backend can be run here, as far as that shows before one is built."""
    if options.on == "onnxruntime":
        return options.on
    reason = f"{caps.name} makes none"
    if caps.makes_engine:
        sms = options.sms or caps.default_sms or tuple(device.sm for device in cuda.devices())
        reason = obstacle(EngineFacts.built(caps, sms, options.plugins))
    if reason and options.on == "engine":
        raise BackendError(f"engines cannot be run here, as {reason}")
    return "onnxruntime" if reason else "engine"


@dataclass(frozen=True)
class _Group:
    """Variants that share ranges, corrections and ranking; the float model by itself, in each precision."""

    rule: str | None = None
    corrections: tuple[str, ...] = ()
    silu: SiluForm = "keep"
    precision: Precision = "int8"


@dataclass(frozen=True)
class _Job:
    model: Path
    config: Config
    folder: Path
    options: SweepOptions
    selected: Selection
    dataset: CocoDataset

    def groups(self) -> list[_Group]:
        axes = itertools.product(FORMS, self.options.rules, self.options.corrections)
        quantized = (_Group(rule, corrections, silu) for silu, rule, corrections in axes if silu in self.options.silus)
        precisions: tuple[Precision, ...] = ("fp32", "fp16") if self.options.on == "engine" else ("fp32",)
        return [*(_Group(precision=precision) for precision in precisions), *quantized]

    def keeps(self, group: _Group) -> tuple[Keep | None, ...]:
        return (None,) if group.rule is None else self.options.keeps

    def name(self, group: _Group, keep: Keep | None, nms: NmsConfig) -> str:
        settings = [nms.model_dump(mode="json"), self.options.backend, self.options.sms, self.options.on]
        if group.rule is None:
            return json.dumps([group.precision, *settings])
        libraries = [sha256_file(path) for path in self.options.plugins] if group.silu == "plugin" else []
        calibration = [group.rule, self.options.calibration.percentile, group.corrections, keep]
        return json.dumps([*calibration, group.silu, *libraries, *settings])

    def names(self, group: _Group) -> list[str]:
        return [self.name(group, keep, nms) for keep in self.keeps(group) for nms in self.options.suppressions]

    def key(self) -> str:
        """What all rows share."""
        facts = {
            "config": self.config.with_nms().model_dump(mode="json", exclude={"nms"}),
            "images": self.selected.sha256,
            "annotations": sha256_file(self.dataset.annotations),
            "validation": content_hash([image.path for image in self.dataset.images]),
        }
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
        digest.update(self.model.read_bytes())
        return digest.hexdigest()


def _collected(job: _Job, progress: Progress) -> None:
    """Runs the calibration images, unless an earlier run did."""
    place = job.folder / HISTOGRAMS
    calibration = replace(job.options.calibration, rule=CalibrationOptions.rule, histograms=None)
    if not place.exists():
        made = prepare(job.model, job.config, calibration, (), selected=job.selected, progress=progress)
        made.calibrated.collection.save(place)


def _listed(job: _Job, group: _Group) -> list[dict[str, Any]]:
    return list(_Worker(job, silent).rows(group, frozenset()))


class _Worker:
    """Makes rows; what several groups need is made once."""

    def __init__(self, job: _Job, progress: Progress) -> None:
        self._job = job
        self._progress = progress

    @cached_property
    def _backend(self) -> Backend:
        return choose(self._job.options.backend)

    @cached_property
    def _rewritten(self) -> Rewritten:
        return rewritten(self._job.model, self._job.config, caps=self._backend.capabilities)

    @property
    def _model(self) -> onnx.ModelProto:
        return self._rewritten.model

    @cached_property
    def _quantizable(self) -> Quantizable:
        return quantizable(self._model, place(self._model).plan)

    def _with(self, silu: SiluForm) -> onnx.ModelProto:
        if silu == "keep":
            return self._model
        return rewritten(self._job.model, self._job.config, silu, self._backend.capabilities).model

    @cached_property
    def _references(self) -> tuple[list[Evaluation], dict[str, Any]]:
        return self._float("fp32")

    def rows(self, group: _Group, found: frozenset[str]) -> Iterator[dict[str, Any]]:
        """The rows of a group that are not there yet."""
        if group.rule is not None:
            yield from self._quantized(group, group.rule, found)
            return
        evaluations, built = self._references if group.precision == "fp32" else self._float(group.precision)
        for nms, one, reference in zip(self._job.options.suppressions, evaluations, self._references[0], strict=True):
            name = self._job.name(group, None, nms)
            if name not in found:
                facts = {"kept": None, "kept_names": [], **built}
                scores = _scores(nms, one, None if one is reference else reference)
                yield {"variant": name, "precision": group.precision.upper(), **_origin(group), **scores, **facts}

    def _float(self, precision: Precision) -> tuple[list[Evaluation], dict[str, Any]]:
        plan = float_plan(place(self._model).plan, precision)
        return self._scored(to_half(self._model, plan.names("fp16")), plan, precision, f"scoring {precision.upper()}")

    def _quantized(self, group: _Group, rule: str, found: frozenset[str]) -> Iterator[dict[str, Any]]:
        job, options = self._job, self._job.options
        prepared = prepare(
            job.model,
            self._rewritten.config,
            replace(options.calibration, rule=rule, histograms=job.folder / HISTOGRAMS),
            group.corrections,
            graph=self._with(group.silu),
            counted=self._model,
            selected=job.selected,
            progress=self._progress,
        )

        @cache
        def ranked() -> Sensitivity:
            rows = job.folder / f"ranking-{group.silu}-{rule}-{'-'.join(group.corrections) or 'none'}.jsonl"
            return rank(prepared.subject(RANKED_IMAGES), rows=rows, progress=self._progress)

        for keep in options.keeps:
            names = [job.name(group, keep, nms) for nms in options.suppressions]
            if all(name in found for name in names):
                continue
            asked = KeepOptions(keep if isinstance(keep, int) else (keep,))
            plan = choose_plan(prepared, asked, ranked, self._progress).plan
            explicit = prepared.explicit(plan).model
            stage = f"scoring {rule}, {keep} in FP16"
            evaluations, built = self._scored(explicit, plan, "int8", stage)
            facts: dict[str, Any] = {"kept": keep, "kept_names": list(plan.names("fp16")), **built}
            for name, nms, got, reference in zip(
                names, options.suppressions, evaluations, self._references[0], strict=True
            ):
                if name not in found:
                    scores = _scores(nms, got, reference)
                    yield {"variant": name, "precision": "INT8", **_origin(group), **scores, **facts}

    def _scored(
        self, model: onnx.ModelProto, plan: PrecisionPlan, precision: Precision, stage: str
    ) -> tuple[list[Evaluation], dict[str, Any]]:
        """With each suppression, and what is known of the engine; the model where none is run."""
        options, config = self._job.options, self._rewritten.config
        if options.on == "onnxruntime" and precision != "int8":
            # No engine of a float model is asked for where none can be run.
            nothing = {"build_seconds": None, "engine_mb": None, "latency_ms": None}
            return self._evaluated(Detector.running(model, config, "host"), stage), {**plan.counts(), **nothing}
        built, facts = self._built(model, plan, precision)
        if options.on == "onnxruntime":
            return self._evaluated(Detector.running(model, config, "host"), stage), {**facts, "latency_ms": None}
        with open_engine(
            built.engine, EngineFacts.built(self._backend.capabilities, built.sms, options.plugins)
        ) as run:
            target = Target("engine", run, config.input, "engine", "host")
            timed = measure([target], BenchOptions(seconds=1.0), progress=self._progress)
            latency = timed.targets[0].points[0].latency_ms.p50
            return self._evaluated(Detector.running(run, config, "host"), stage), {**facts, "latency_ms": latency}

    def _built(self, model: onnx.ModelProto, plan: PrecisionPlan, precision: Precision) -> tuple[Built, dict[str, Any]]:
        """Counts of convolutions as built, or as planned where no layers are listed; time and size of the engine."""
        options, caps = self._job.options, self._backend.capabilities
        self._progress(f"building with {caps.name}", 0, 1)
        built = build_remembering(
            self._backend,
            BuildRequest(
                model,
                options.sms,
                precisions=self._quantizable.precisions(plan) if precision != "fp32" else {},
                plugins=options.plugins,
                precision=precision,
            ),
            self._job.folder / TIMINGS,
            self._progress,
        )
        counts = plan.counts()
        if built.layers or (caps.lists_layers and not caps.has_inspector):
            found = audit(layers_of(built), plan, model)
            counts = {"int8": found.int8, "fp16": found.fp16, "fp32": found.fp32}
        if not built.engine:
            return built, {**counts, "build_seconds": None, "engine_mb": None}
        return built, {**counts, "build_seconds": round(built.seconds, 2), "engine_mb": len(built.engine) / 1e6}

    def _evaluated(self, detector: Detector, stage: str) -> list[Evaluation]:
        return evaluate_each(
            detector,
            self._job.dataset,
            self._job.options.suppressions,
            lambda done, total: self._progress(stage, done, total),
        )


def _origin(group: _Group) -> dict[str, Any]:
    corrections = list(group.corrections) if group.rule else None
    return {"silu": group.silu, "calibration": group.rule, "corrections": corrections}


def _scores(nms: NmsConfig, got: Evaluation, reference: Evaluation | None) -> dict[str, Any]:
    found = compare(got, reference) if reference is not None else None
    return {
        "nms": nms.model_dump(mode="json"),
        "map": got.result.map,
        "map50": got.result.map50,
        "difference": found.difference if found else 0.0,
        "low": found.low if found else None,
        "high": found.high if found else None,
    }
