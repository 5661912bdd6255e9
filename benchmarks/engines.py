"""The rows of NVIDIA/TensorRT issue 1114 with real engines: mAP, latency against FP16, and why INT8 is not faster where
it is not. Needs a CUDA device and TensorRT 8.6 or later.

    python benchmarks/engines.py --data DIR -o OUT [--models NAME ...] [--rows NAME ...] [--batches 1 32]
    python benchmarks/engines.py --model FILE --config NAME --images DIR --val-images DIR --annotations JSON -o OUT

DIR holds ``models/``, ``coco/val2017``, ``coco/train2017`` and ``coco/annotations/instances_val2017.json``. OUT gets
``rows.jsonl``, to which each finished step is appended, the table of them as ``engines.json`` and ``engines.md``, and a
folder a model with the networks, engines, audits and detections. Run again it goes on where it stopped;
``benchmarks/README.md`` says how to spread that over several short turns on a machine, and what can be made before on
one without a GPU.

Each row is one network, handed to the builder as ``trtdet build`` would hand it, with suppression on the host:

- fp32, fp16: the float model. All rows are compared with fp32 in mAP and with fp16 in time; both are always there.
- int8: explicit, with trtdet's corrections. int8-none: ``--effort none``. int8-top5: the 5 most sensitive convolutions
  in FP16. int8-all: every convolution in INT8. int8-plugin: SiLU as trtdet's plugin, with the plugin library.
- implicit: no Q/DQ nodes, trtdet's ranges (percentile) in a calibration cache. implicit-minmax, implicit-entropy and
  implicit-percentile: TensorRT's own calibrators.

A batch has an engine of its own, of a network whose batch is fixed to it. A builder times its kernels at one shape: of
an engine for 1 to 32 images that is the 32 that it is optimised for, so that at batch 1 it would run kernels that were
chosen for other work, and INT8 loses by that differently from FP16. That costs a second build, and is what users do
who serve batches of one size. mAP is that of the engine of the largest batch, which is built first.

All rows of a model are timed side by side, in one run of :func:`trtdet.performance.measure` a batch, with fp16
of that very run as the baseline. "Times FP16" is how many times as fast a row is, without the transfers of images and
results; with them it is in a column of its own. INT8 rows that are less than 1.3 times FP16 at the largest batch are
profiled beside it; what the audit finds with the measured times, what it advises and which convolutions are slower is
written down with them.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
from coco_models import MODELS, published_config

import trtdet
from trtdet.audit import Audit, audit, layers_of
from trtdet.backends import (
    Backend,
    Capabilities,
    EngineFacts,
    EngineRunner,
    Implicit,
    build_remembering,
    choose,
    cuda,
    library_named,
    open_engine,
)
from trtdet.backends.base import EngineTarget, compose
from trtdet.backends.choice import PlannedBackend
from trtdet.backends.tensorrt.opsets import missing_operators
from trtdet.building.corrections import Prepared, prepared
from trtdet.building.engine import float_network
from trtdet.building.graph import PlacedGraph, flow_for, rewritten
from trtdet.building.plan import choose_plan
from trtdet.building.ranges import calibrated, select_images
from trtdet.calibration import Ranges
from trtdet.config import SiluForm
from trtdet.data import ImageStream
from trtdet.errors import ConfigError, TrtdetError
from trtdet.evaluation.metrics import CocoMetric
from trtdet.evaluation.scoring import Evaluation
from trtdet.files import sha256_file, write_atomically
from trtdet.files.journal import Rows
from trtdet.options import BuildOptions, CalibrationOptions, EngineOptions, PlanOptions
from trtdet.passes import Options, load_model, save_model
from trtdet.performance import BenchOptions, OnnxNodes, ProfileOptions, measure, profile_targets
from trtdet.performance import Target as Timed
from trtdet.plans.ranking import rank
from trtdet.progress import Console
from trtdet.quantization import DEFAULT_CORRECTIONS, PrecisionPlan
from trtdet.runtime.detector import Detector

WORTH_IT = 1.3
"""An INT8 row that is not so many times as fast as FP16 is explained."""

LISTED = 10
"""So many findings, pieces of advice and slower convolutions an explanation has."""


@dataclass(frozen=True)
class Row:
    """A line of the table.

    Attributes:
        name: as ``--rows`` takes it.
        precision: the lowest that the engine may use.
        quantization: ``explicit`` and ``implicit`` as ``trtdet build`` has them; empty for float models.
        correct: the corrections.
        keep: what stays in FP16.
        silu: what SiLU is written as.
        calibrator: for ``implicit``, TensorRT's own calibrator; empty for trtdet's ranges.
        int8_all: every convolution that can be is in INT8.
        options: of ``trtdet build``, that make the same network.
    """

    name: str
    precision: Literal["fp32", "fp16", "int8"]
    quantization: Literal["explicit", "implicit", ""] = ""
    correct: tuple[str, ...] = ()
    keep: int | tuple[str, ...] = 0
    silu: SiluForm = "keep"
    calibrator: Literal["minmax", "entropy", "percentile", ""] = ""
    int8_all: bool = False
    options: str = ""


FP16 = Row("fp16", "fp16", options="--fp16")
FP32 = Row("fp32", "fp32", options="--fp32")
INT8 = Row("int8", "int8", "explicit", DEFAULT_CORRECTIONS, options="--int8")
FIRST = (FP16, INT8, FP32)
"""What says most; these are done for every model before the rest is for any."""

ROWS = {
    row.name: row
    for row in (
        *FIRST,
        Row("int8-none", "int8", "explicit", options="--int8 --effort none"),
        Row("int8-all", "int8", "explicit", DEFAULT_CORRECTIONS, int8_all=True, options="--int8 --int8-all"),
        Row("implicit", "int8", "implicit", options="--int8 --quantization implicit"),
        Row("int8-plugin", "int8", "explicit", DEFAULT_CORRECTIONS, silu="plugin", options="--int8 --silu plugin"),
        Row("int8-top5", "int8", "explicit", DEFAULT_CORRECTIONS, 5, options="--int8 --keep-fp16 5"),
        *(
            Row(
                f"implicit-{rule}",
                "int8",
                "implicit",
                calibrator=rule,
                options=f"--int8 --quantization implicit --set calibration.calibrator=tensorrt --calib {rule}",
            )
            for rule in ("minmax", "entropy", "percentile")
        ),
    )
}
"""In the order in which they are made."""


@dataclass(frozen=True)
class Model:
    """A detector, the images that calibrate it and those that score it."""

    name: str
    file: Path
    config: trtdet.Config
    images: Path
    val_images: Path
    annotations: Path


@dataclass(frozen=True)
class Settings:
    """What was asked for; times and counts as on the command line."""

    output: Path
    rows: tuple[Row, ...]
    batches: tuple[int, ...]
    num_images: int
    score_images: int | None
    bench: BenchOptions
    profile: ProfileOptions
    plugins: tuple[Path, ...]
    engine: EngineOptions
    networks_for: str | None
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def largest(self) -> int:
        return self.batches[0]


Kind = Literal["network", "engine", "score", "measure", "explain", "compare"]

GUESSES: dict[Kind, float] = {"network": 60, "engine": 90, "score": 30, "explain": 30, "compare": 30}
"""Seconds that a step is taken to last while none of its kind was done."""


@dataclass(frozen=True)
class Step:
    """Something that is done as a whole and then recorded."""

    kind: Kind
    model: str
    rows: tuple[str, ...]
    batch: int = 0

    @property
    def name(self) -> str:
        at = f" at batch {self.batch}" if self.batch else ""
        return f"{self.kind} {self.model}{at}: {', '.join(self.rows)}"


class Work:
    """The steps of all models, in order, and what came of those that are done."""

    def __init__(self, models: Sequence[Model], settings: Settings, rows: Rows, console: Console) -> None:
        self.models = {model.name: model for model in models}
        self.settings = settings
        self.say = console.line
        self.progress = console.progress
        self._rows = rows
        self._networks = {model.name: Networks(model, settings, self.version, console) for model in models}

    @cached_property
    def backend(self) -> Backend:
        return choose("tensorrt")

    @cached_property
    def version(self) -> str:
        """Of TensorRT."""
        return self.settings.networks_for or self.backend.capabilities.version

    def found(self, step: Step) -> dict[str, Any] | None:
        """The record of a step: the latest, where what it made got lost and it was done again."""
        records = [record for record in self._rows.found.values() if record["step"] == step.name]
        return records[-1] if records else None

    def place(self, step: Step) -> Path | None:
        """The file that a step makes for others; None where it makes no file."""
        folder = self.settings.output / step.model / step.rows[0]
        names: dict[Kind, str] = {
            "network": "network.onnx",
            "engine": f"batch-{step.batch}.engine",
            "score": "detections.npz",
        }
        return folder / names[step.kind] if step.kind in names else None

    # which

    def waiting(self) -> list[Step]:
        """The steps that are not done and depend on no failed step, in order, without the steps they need."""
        return [step for step in dict.fromkeys(self._wanted()) if self.found(step) is None and not self._blocked(step)]

    def next(self, step: Step) -> Step:
        """A step that is waiting, or the first that has to be done for it."""
        for needed in self._needs(step):
            made = self.place(needed)
            if self.found(needed) is None or (made is not None and not made.is_file()):
                return self.next(needed)
        return step

    def _wanted(self) -> Iterator[Step]:
        settings = self.settings
        waves = [tuple(row for row in settings.rows if row in FIRST), settings.rows]
        if settings.networks_for:
            for rows in waves:
                yield from (Step("network", model, (row.name,)) for model in self.models for row in rows)
            return
        for rows in waves:
            for model in self.models:
                yield from (Step("score", model, (row.name,)) for row in rows)
                yield from self._compared(model, rows, settings.largest)
            for model in self.models:
                for batch in settings.batches[1:]:
                    yield from self._compared(model, rows, batch)
            for model in self.models:
                yield from (Step("compare", model, (row.name,)) for row in rows if row != FP32)

    def _compared(self, model: str, rows: Sequence[Row], batch: int) -> Iterator[Step]:
        """The rows side by side: those whose engine was seen to run."""
        able = [row for row in rows if not self._blocked(Step("measure", model, (row.name,), batch))]
        if FP16 not in able or len(able) < 2:
            return
        step = Step("measure", model, tuple(row.name for row in able), batch)
        yield step
        if batch == self.settings.largest:
            speeds = self.speeds(self.found(step))
            slow = [row for row in able if row.precision == "int8" and speeds.get(row.name, WORTH_IT) < WORTH_IT]
            yield from (Step("explain", model, (row.name,), batch) for row in slow)

    def _needs(self, step: Step) -> tuple[Step, ...]:
        first, largest = step.rows[:1], self.settings.largest
        if step.kind == "engine":
            return (Step("network", step.model, first),)
        if step.kind == "score":
            return (Step("engine", step.model, first, largest),)
        if step.kind == "compare":
            return tuple(Step("score", step.model, (row,)) for row in (FP32.name, *first))
        if step.kind == "measure":
            return tuple(Step("engine", step.model, (row,), step.batch) for row in step.rows)
        if step.kind == "explain":
            return tuple(Step("engine", step.model, (row,), step.batch) for row in (FP16.name, *first))
        return ()

    def _blocked(self, step: Step) -> bool:
        """Whether something that it needs failed or was left out; what failed to be scored is not timed either."""
        scored = [Step("score", step.model, (row,)) for row in step.rows] if step.kind == "measure" else []
        needed = [*self._needs(step), *scored]
        return any(not self._made(earlier) or self._blocked(earlier) for earlier in needed)

    def _made(self, step: Step) -> bool:
        record = self.found(step) or {}
        return not {"failed", "left_out"} & set(record)

    def estimate(self, step: Step) -> float:
        """Seconds that a step will take, by the longest of its kind so far."""
        alike = [record for record in self._rows.found.values() if record["kind"] == step.kind]
        known = [record["seconds"] / len(record["rows"]) for record in alike]
        guess = GUESSES.get(step.kind, 0.0)
        if step.kind == "measure":
            bench = self.settings.bench
            # With transfers, without and for the throughput; the warm-up takes up to three times what is asked.
            guess = 2 * bench.warm_up + 3 * bench.seconds + 2
        return len(step.rows) * (1.2 * max(known) if known else guess)

    def do(self, step: Step) -> bool:
        """Does and records a step; a failure is recorded as well and False is given back."""
        started = time.perf_counter()
        doing: dict[Kind, Callable[[Step], dict[str, Any]]] = {
            "network": lambda step: self._networks[step.model].make(ROWS[step.rows[0]], self._path(step)),
            "engine": self._engine,
            "score": self._score,
            "measure": self._measure,
            "explain": self._explain,
            "compare": self._compare,
        }
        try:
            found = doing[step.kind](step)
        except TrtdetError as error:
            found = {"failed": str(error)}
        count = sum(record["step"] == step.name for record in self._rows.found.values())
        seconds = round(time.perf_counter() - started, 2)
        facts = {"kind": step.kind, "model": step.model, "rows": list(step.rows), "batch": step.batch}
        self._rows.append(
            {"name": f"{step.name} #{count + 1}", "step": step.name, **facts, "seconds": seconds, **found}
        )
        said = {key: found[key] for key in ("failed", "left_out") if key in found}
        self.say(f"{step.name}: {'; '.join(said.values()) or 'done'} ({seconds:.1f} s)")
        return "failed" not in found

    # what

    def _path(self, step: Step) -> Path:
        made = self.place(step)
        assert made is not None
        return made

    def _engine(self, step: Step) -> dict[str, Any]:
        model, row, caps = self.models[step.model], ROWS[step.rows[0]], self.backend.capabilities
        source = self._path(Step("network", step.model, step.rows))
        network = Network.load(source)
        if network.version != caps.version:
            raise ConfigError(f"'{source}' was written for TensorRT {network.version}, not {caps.version}; remove it")
        graph = with_batch(onnx.load(str(source)), step.batch)
        implicit = None
        if row.calibrator:
            paths = select_images(calibration(model, self.settings)).paths
            implicit = Implicit(row.calibrator, "", paths, network.config.input, step.batch)
        elif row.quantization == "implicit":
            ranges = Ranges.load(source.with_name("ranges.json"))
            implicit = Implicit("cache", ranges.to_calibration_cache(caps.cache_version))
        timings = self.settings.output / "timing-cache"
        self.progress(f"building {step.name}", 0, 1)
        built = build_remembering(
            self.backend,
            compose(
                graph,
                row.precision,
                network.precisions,
                EngineTarget(plugins=self._plugins(row), options=self.settings.engine),
                implicit,
            ),
            timings,
            self.progress,
        )
        facts: dict[str, Any] = {
            "build_seconds": round(built.seconds, 2),
            "engine_mb": len(built.engine) / 1e6,
            "sms": list(built.sms),
            "plugins": {path.name: sha256_file(path) for path in self._plugins(row)},
            "audit": None,
        }
        if built.layers:
            found = audit(layers_of(built), network.plan, graph, silu=caps.silu)
            write_atomically(source.with_name(f"batch-{step.batch}.audit.json"), found.to_json().encode())
            facts["audit"] = {"int8": found.int8, "fp16": found.fp16, "fp32": found.fp32, "summary": found.summary}
        # Last: an engine that is there has its audit beside it.
        write_atomically(self._path(step), built.engine)
        return facts

    def _plugins(self, row: Row) -> tuple[Path, ...]:
        return self.settings.plugins if row.silu == "plugin" else ()

    def _target(self, model: str, row: str, batch: int, stack: ExitStack) -> Timed:
        """An engine that is closed with the stack."""
        engine = self._path(Step("engine", model, (row,), batch))
        caps = self.backend.capabilities
        facts = EngineFacts.built(caps, (cuda.devices()[0].sm,), self._plugins(ROWS[row]))
        runner: EngineRunner = stack.enter_context(open_engine(engine.read_bytes(), facts))
        network = Network.load(engine.with_name("network.onnx"))
        return Timed(row, runner, network.config.input, engine.name, "host")

    def _dataset(self, model: Model) -> trtdet.CocoDataset:
        found = trtdet.CocoDataset.load(model.annotations, model.val_images, model.config.classes)
        return found if self.settings.score_images is None else found.first(self.settings.score_images)

    def _score(self, step: Step) -> dict[str, Any]:
        """Runs the annotated images; the detections are kept, so that any two rows can be compared later."""
        model, (row,), largest = self.models[step.model], step.rows, self.settings.largest
        config = Network.load(self._path(Step("network", step.model, step.rows))).config
        dataset = self._dataset(model)
        kept = CocoMetric(dataset)
        with ExitStack() as stack:
            runner = self._target(step.model, row, largest, stack).runner
            detector = Detector.running(runner, config, "host")
            paths = [image.path for image in dataset.images]
            for batch in ImageStream(paths, detector.input, batch_size=detector.batch, on_bad="raise"):
                kept.update_batch(batch, detector(batch.images))
                self.progress(f"scoring {step.model} {row}", len(kept.image_ids), len(paths))
            ran_on = str(runner.run_info)
        kept.save(self._path(step))
        result = kept.compute()
        return {"map": result.map, "map50": result.map50, "images": result.images, "ran_on": ran_on}

    def _compare(self, step: Step) -> dict[str, Any]:
        model = self.models[step.model]
        dataset = self._dataset(model)

        def evaluation(row: str) -> Evaluation:
            metric = CocoMetric.load(self._path(Step("score", step.model, (row,))), dataset)
            return Evaluation(metric.compute(), metric, 0.0, row, "", "host", model.config.nms)

        found = trtdet.compare(evaluation(step.rows[0]), evaluation(FP32.name))
        return {key: value for key, value in found.as_dict().items() if key not in ("file", "ran_on", "nms")}

    def _measure(self, step: Step) -> dict[str, Any]:
        with ExitStack() as stack:
            targets = [self._target(step.model, row, step.batch, stack) for row in step.rows]
            options = replace(self.settings.bench, batches=(step.batch,))
            found = measure(targets, options, step.rows.index(FP16.name), self.progress)
        return {"bench": found.as_dict()}

    def _explain(self, step: Step) -> dict[str, Any]:
        """Where the time of an INT8 row goes, beside FP16."""
        rows = (step.rows[0], FP16.name)
        with ExitStack() as stack:
            targets = [self._target(step.model, row, step.batch, stack) for row in rows]
            nodes = [OnnxNodes(Network.load(self._path(Step("network", step.model, (row,)))).convs) for row in rows]
            options = replace(self.settings.profile, batch=step.batch)
            found = profile_targets(targets, nodes, options, self.progress)
        slower = found.slower
        facts: dict[str, Any] = {
            "slower": [asdict(difference) for difference in slower[:LISTED]],
            "slower_convs": [name for difference in slower for name in difference.convs],
            "by_type": [
                {"row": profile.name, "type": share.name, "ms": share.ms, "count": share.count}
                for profile in (found.profile, found.against)
                if profile is not None
                for share in profile.by_type
            ],
            "findings": [],
            "advice": [],
        }
        audited = self._path(Step("engine", step.model, step.rows, step.batch)).with_suffix(".audit.json")
        if audited.is_file():
            seen = Audit.load(audited).timed({layer.name: float(np.mean(layer.ms)) for layer in found.profile.layers})
            facts["findings"] = [{**asdict(finding), "parts": len(finding.parts)} for finding in seen.findings[:LISTED]]
            facts["advice"] = [str(advice) for advice in seen.advice[:LISTED]]
            facts["audit"] = f"{seen.summary}\n{seen.report()}"
        return facts

    # results

    @staticmethod
    def speeds(measured: dict[str, Any] | None) -> dict[str, float]:
        """How many times as fast as FP16 each row of a measurement is, without transfers."""
        targets = (measured or {}).get("bench", {}).get("targets", [])
        ratios = {target["name"]: target["points"][0]["compute_ratio"] for target in targets}
        return {row: 1 / ratio["value"] for row, ratio in ratios.items() if ratio is not None}

    def table(self) -> list[dict[str, Any]]:
        """A line for each model and row that something is known of."""
        lines = []
        for model in self.models:
            for row in self.settings.rows:
                kinds: tuple[tuple[Kind, int], ...] = (
                    ("network", 0),
                    ("score", 0),
                    ("compare", 0),
                    ("explain", self.settings.largest),
                )
                about = {kind: self.found(Step(kind, model, (row.name,), batch)) or {} for kind, batch in kinds}
                engines = {
                    batch: self.found(Step("engine", model, (row.name,), batch)) for batch in self.settings.batches
                }
                batches = {str(batch): self._at(model, row.name, batch, engines[batch] or {}) for batch in engines}
                parts = [*about.values(), *(engine or {} for engine in engines.values())]
                line = {
                    "model": model,
                    "row": row.name,
                    "command": self._command(model, row),
                    "not_made": "; ".join(part[key] for part in parts for key in ("failed", "left_out") if key in part),
                    "map": about["score"].get("map"),
                    "map50": about["score"].get("map50"),
                    "to_fp32": {key: about["compare"][key] for key in ("difference", "low", "high")}
                    if "difference" in about["compare"]
                    else None,
                    "kept": about["network"].get("kept", []),
                    "corrections": about["network"].get("corrections", []),
                    "batches": batches,
                    "explained": {key: value for key, value in about["explain"].items() if key in EXPLAINED},
                }
                lines.append(line)
        return lines

    def _command(self, model: str, row: Row) -> str:
        """What makes the same network as a bundle, at the largest batch."""
        batch, given = self.settings.largest, self.models[model]
        words = ["trtdet build", str(given.file), "--config", given.config.name, row.options]
        if row.precision == "int8":
            words += ["--images", str(given.images), "--num-images", str(self.settings.num_images)]
        libraries = ",".join(map(str, self.settings.plugins))
        words += ["--silu keep"] if row.silu == "keep" else [f"--set engine.plugins={libraries}"] * bool(libraries)
        sources = self.settings.engine.tactic_sources
        words += [f"--set engine.tactic_sources={','.join(sources)}"] if sources is not None else []
        return " ".join([*words, f"--nms host --batch {batch}:{batch}:{batch} --backend tensorrt"])

    def _at(self, model: str, row: str, batch: int, engine: dict[str, Any]) -> dict[str, Any]:
        """What is known at one batch, by the latest measurement that has the row, FP16's time included."""
        facts = {key: engine.get(key) for key in ("build_seconds", "engine_mb", "audit")}
        runs = [
            record["bench"]
            for record in self._rows.found.values()
            if "bench" in record and (record["model"], record["batch"]) == (model, batch) and row in record["rows"]
        ]
        if not runs:
            return {**facts, "compute_ms": None}
        points = {target["name"]: target["points"][0] for target in runs[-1]["targets"]}
        own, rate = points[row], points[row]["throughput"][0]
        return {
            **facts,
            "side_by_side": list(points),
            "compute_ms": own["compute_ms"]["p50"],
            "fp16_compute_ms": points[FP16.name]["compute_ms"]["p50"],
            "latency_ms": own["latency_ms"]["p50"],
            "images_per_second": 1000 * batch / own["compute_ms"]["p50"],
            "images_per_second_with_transfers": rate["images_per_second"],
            "times_fp16": _inverse(own["compute_ratio"]),
            "times_fp16_with_transfers": _inverse(own["ratio"]),
            "warnings": runs[-1]["warnings"],
        }

    def write(self) -> str:
        """Writes ``engines.json`` and ``engines.md``; the text of the latter is given back."""
        left = [step.name for step in self.waiting()]
        lines, facts = self.table(), self._facts()
        done = {"facts": facts, "left": left, "table": lines}
        text = markdown(lines, facts, left, self.settings)
        write_atomically(self.settings.output / "engines.json", (json.dumps(done, indent=1) + "\n").encode())
        write_atomically(self.settings.output / "engines.md", (text + "\n").encode())
        return text

    def _facts(self) -> dict[str, Any]:
        device = next(iter(cuda.devices()), None)
        driver = Path("/proc/driver/nvidia/version")
        packages = ("numpy", "onnx", "onnxruntime")
        return {
            "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
            "tensorrt": self.version,
            "device": asdict(device) if device is not None else None,
            "cuda_driver": cuda.driver_version(),
            "kernel_module": driver.read_text(encoding="utf-8").splitlines()[0] if driver.is_file() else None,
            "clocks": self._clocks(),
            "python": platform.python_version(),
            "platform": platform.platform(),
            "trtdet": trtdet.__version__,
            **{name: version(name) for name in packages},
            "batches": list(self.settings.batches),
            "calibration_images": self.settings.num_images,
            "seconds": self.settings.bench.seconds,
            "tactic_sources": self.settings.engine.tactic_sources,
        }

    def _clocks(self) -> list[dict[str, Any]]:
        runs = [record for record in self._rows.found.values() if "bench" in record]
        return [{"step": record["step"], **record["bench"]["machine"]} for record in runs]


EXPLAINED = ("slower", "slower_convs", "by_type", "findings", "advice", "audit")


def _inverse(ratio: dict[str, float] | None) -> dict[str, float] | None:
    """Of a ratio of times the ratio of speeds."""
    if ratio is None:
        return None
    return {"value": 1 / ratio["value"], "low": 1 / ratio["high"], "high": 1 / ratio["low"]}


# networks


def calibration(model: Model, settings: Settings) -> CalibrationOptions:
    """The images; trtdet's ranges are those of its default rule everywhere."""
    return CalibrationOptions(images=model.images, num_images=settings.num_images)


@dataclass(frozen=True)
class Network:
    """What goes with the ONNX file of a row.

    Attributes:
        version: of the TensorRT that it was written for.
        config: as the rewriting left it.
        plan: what each convolution is to run in.
        precisions: what a weakly typed network is told, by node.
        convs: names of the convolutions in order.
    """

    version: str
    config: trtdet.Config
    plan: PrecisionPlan
    precisions: dict[str, str]
    convs: tuple[str, ...]

    @staticmethod
    def load(path: Path) -> Network:
        facts = json.loads(path.with_name("network.json").read_text(encoding="utf-8"))
        return Network(
            facts["version"],
            trtdet.Config.model_validate(facts["config"]),
            PrecisionPlan.load(path.with_name("plan.json")),
            facts["precisions"],
            tuple(facts["convs"]),
        )


class Networks:
    """Makes the networks of one model, with a dynamic batch; what rows share is made once in a process."""

    def __init__(self, model: Model, settings: Settings, version: str, console: Console) -> None:
        self._model, self._settings, self._version, self._progress = model, settings, version, console.progress
        self._prepared: dict[tuple[Any, ...], Prepared] = {}
        self._graphs: dict[SiluForm, PlacedGraph] = {}

    def make(self, row: Row, place: Path) -> dict[str, Any]:
        """Writes a row's network; what the table says of it is given back."""
        graph, ready = self._graph("keep"), None
        if not row.quantization:
            network = float_network(graph, row.precision)
            made, plan, precisions = network.model, network.plan, network.precisions
        elif row.calibrator:
            made, plan = graph.model, graph.plan
            precisions = graph.quantizable.precisions(plan)
        else:
            ready = self._prepare(row)
            ranking = self._settings.output / self._model.name / "ranking.jsonl"
            plan = choose_plan(
                ready,
                BuildOptions(plan=PlanOptions(keep_fp16=row.keep)),
                lambda: rank(ready.subject(PlanOptions().rank_images), rows=ranking, progress=self._progress),
                progress=self._progress,
            ).plan
            made = ready.model if row.quantization == "implicit" else ready.explicit(plan).model
            precisions = ready.graph.quantizable.precisions(plan)
            ready.ranges.save(place.with_name("ranges.json"))
        facts = {
            "version": self._version,
            "config": self._config.model_dump(mode="json"),
            "precisions": dict(precisions),
            "convs": [node.name for node in made.graph.node if node.op_type in ("Conv", "ConvTranspose")],
        }
        plan.save(place.with_name("plan.json"))
        write_atomically(place.with_name("network.json"), json.dumps(facts).encode())
        save_model(made, place)
        return {
            "kept": list(plan.names("fp16")) if row.keep else [],
            "planned": plan.counts(),
            "corrections": list(ready.summary) if ready is not None else [],
        }

    @property
    def _config(self) -> trtdet.Config:
        return self._graph("keep").config

    def _graph(self, silu: SiluForm) -> PlacedGraph:
        if silu not in self._graphs:
            major, minor = (int(part) for part in self._version.split(".")[:2])
            opset = library_named("tensorrt").newest_opset(self._version)
            missing = frozenset(missing_operators((major, minor)))
            options = Options(self._model.config, "host", "batch", silu=silu, max_opset=opset, missing_ops=missing)
            graph = rewritten(load_model(self._model.file), options)
            caps = PlannedBackend(f"tensorrt-{self._version}").capabilities
            self._graphs[silu] = replace(graph, flow=flow_for(graph, caps))
        return self._graphs[silu]

    def _prepare(self, row: Row) -> Prepared:
        key = row.quantization, row.correct, row.silu, row.int8_all
        if key in self._prepared:
            return self._prepared[key]
        histograms = self._settings.output / self._model.name / f"histograms-{row.quantization}.npz"
        options = calibration(self._model, self._settings)
        options = replace(options, histograms=histograms if histograms.is_file() else None)
        ranged = calibrated(
            replace(self._graph(row.silu), int8_all=row.int8_all),
            options,
            select_images(options),
            implicit=row.quantization == "implicit",
            progress=self._progress,
        )
        made = prepared(ranged, options, row.correct, self._progress)
        if not histograms.is_file():
            histograms.parent.mkdir(parents=True, exist_ok=True)
            made.calibrated.collection.save(histograms)
        self._prepared[key] = made
        return made


def with_batch(model: onnx.ModelProto, batch: int) -> onnx.ModelProto:
    """A network of a dynamic batch with a fixed batch."""
    # Shapes that were inferred for the dynamic batch are wrong now; the parser infers its own.
    del model.graph.value_info[:]
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = batch
    return model


# words


def markdown(lines: Sequence[dict[str, Any]], facts: dict[str, Any], left: Sequence[str], settings: Settings) -> str:
    """The table, what made INT8 slow, and under what circumstances; mAP in points, intervals of 90 %."""
    head = ["model", "row", "mAP", "AP50", "to FP32", "90 % interval", "convs INT8 / FP16 / FP32"]
    for batch in settings.batches:
        head += [
            f"{what}, batch {batch}" for what in ("ms", "times FP16", "90 % interval", "with transfers", "images/s")
        ]
    head += ["build s", "MB"]
    text = [f"| {' | '.join(head)} |", "|---|---|" + "---:|" * (len(head) - 2)]
    for line in lines:
        change = line["to_fp32"]
        cells = [line["model"], line["row"], _points(line["map"]), _points(line["map50"])]
        cells += ["" if change is None else _points(change["difference"], "+")]
        cells += ["" if change is None else f"{_points(change['low'], '+')} .. {_points(change['high'], '+')}"]
        largest = line["batches"][str(settings.largest)]
        counts = largest["audit"]
        cells += ["" if counts is None else f"{counts['int8']} / {counts['fp16']} / {counts['fp32']}"]
        for batch in settings.batches:
            cells += _timed(line["batches"][str(batch)], line["row"])
        cells += [_number(largest["build_seconds"], 1), _number(largest["engine_mb"], 2)]
        text.append(f"| {' | '.join(cells)} |")
    text += [
        "",
        "ms: median of one run without transfers. Times FP16: how many times as fast as FP16, "
        "round by round in the same run. Build s and MB: of the engine of the largest batch. fp32 may multiply in "
        "TF32, TensorRT's default.",
        "",
    ]
    text += [f"- {name}: left out: {reason}" for name, reason in settings.left_out.items()]
    text += [f"- {line['model']} {line['row']}: not made: {line['not_made']}" for line in lines if line["not_made"]]
    text += [f"- left to do: {step}" for step in left]
    for line in lines:
        text += _explained(line)
    device, clocks = facts["device"], [reading["before"]["clocks"] for reading in facts["clocks"]]
    text += [
        "",
        f"TensorRT {facts['tensorrt']}, {device['name'] if device else 'no device'}, CUDA {facts['cuda_driver']} of "
        f"the driver, Python {facts['python']}, trtdet {facts['trtdet']}, NumPy {facts['numpy']}, onnx "
        f"{facts['onnx']}, onnxruntime {facts['onnxruntime']}; {facts['calibration_images']} calibration images, "
        f"{facts['seconds']:g} s a point. Clocks before each measurement: "
        f"{'; '.join(map(str, clocks)) or 'none made yet'}.",
        "",
        f"Command: `python {' '.join(facts['command'])}`",
    ]
    return "\n".join(text)


def _timed(at: dict[str, Any], row: str) -> list[str]:
    if at["compute_ms"] is None:
        return [""] * 5
    alone, moved = at["times_fp16"], at["times_fp16_with_transfers"]
    baseline = row == FP16.name
    return [
        f"{at['compute_ms']:.3f}",
        "1" if baseline else f"{alone['value']:.2f}",
        "" if baseline else f"{alone['low']:.2f} .. {alone['high']:.2f}",
        "1" if baseline else f"{moved['value']:.2f}",
        f"{at['images_per_second']:.0f}",
    ]


def _explained(line: dict[str, Any]) -> list[str]:
    found = line["explained"]
    if not found:
        return []
    text = ["", f"## {line['model']} {line['row']}: less than {WORTH_IT:g} times FP16", ""]
    text += ["```text", found.get("audit", "the engine's inspector listed no layers"), "```", ""]
    named = ", ".join(found["slower_convs"]) or "none beyond the scatter of the runs"
    return [*text, f"Convolutions slower than in FP16, the worst first: {named}"]


def _points(value: float | None, sign: str = "") -> str:
    return "" if value is None else f"{100 * value:{sign}.2f}"


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


# command


def main() -> int:
    started = time.monotonic()
    options = arguments().parse_args()
    try:
        with Console() as console:
            return run(options, started, console)
    except TrtdetError as error:
        print(f"engines.py: error: {error}", file=sys.stderr)
        return 1


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="models, images and annotations, see above")
    # The first model tells most: its convolutions are large enough for INT8 to pay.
    parser.add_argument("--models", nargs="+", default=["yolov5n", "yolox_nano", "picodet_s"], choices=list(MODELS))
    parser.add_argument("--model", type=Path, help="instead: an ONNX file")
    parser.add_argument("--config", help="its configuration")
    parser.add_argument("--images", type=Path, help="its calibration images")
    parser.add_argument("--val-images", type=Path, help="its annotated images")
    parser.add_argument("--annotations", type=Path, help="their COCO file")
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS), metavar="ROW")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 32])
    parser.add_argument("--num-images", type=int, default=128, help="calibration images")
    parser.add_argument("--score-images", type=int, help="annotated images, evenly spaced; all of them by default")
    parser.add_argument("--seconds", type=float, default=3.0, help="at each point, for each row")
    parser.add_argument("--plugin-library", type=Path, action="append", default=[])
    parser.add_argument("--tactic-sources", nargs="+", help="kernel libraries that the builder is held to")
    parser.add_argument("--quick", action="store_true", help="few images and runs: to see that all of it works")
    parser.add_argument("--budget-seconds", type=float, help="begin nothing that would not be done within so long")
    parser.add_argument("--networks-for", metavar="VERSION", help="make only what needs no GPU, for this TensorRT")
    parser.add_argument(
        "--drop-bundles", action="store_true", help="keep no networks, engines and detections at the end"
    )
    return parser


def asked_models(options: argparse.Namespace) -> list[Model]:
    given = (options.config, options.images, options.val_images, options.annotations)
    if (options.data is None) == (options.model is None) or (options.model is not None) != all(given):
        raise ConfigError("give --data, or --model with --config, --images, --val-images and --annotations")
    if options.model is not None:
        return [Model(options.model.stem, options.model, trtdet.load_config(options.config), *given[1:])]
    coco = options.data / "coco"
    annotations = coco / "annotations" / "instances_val2017.json"
    return [
        Model(
            name,
            options.data / "models" / f"{name}.onnx",
            published_config(name),
            coco / "train2017",
            coco / "val2017",
            annotations,
        )
        for name in dict.fromkeys(options.models)
    ]


def asked_settings(options: argparse.Namespace) -> Settings:
    wanted = [FP16.name, FP32.name, *options.rows]
    if min(options.batches) < 1:
        raise ConfigError(f"--batches takes numbers from 1 up, got {min(options.batches)}")
    bench = BenchOptions(seconds=options.seconds)
    if options.quick:
        bench = BenchOptions(seconds=min(options.seconds, 0.1), warm_up=0.05, min_runs=20)
    few = [options.score_images, 32 if options.quick else None]
    return Settings(
        options.output,
        tuple(row for name, row in ROWS.items() if name in wanted),
        tuple(sorted(set(options.batches), reverse=True)),
        min(options.num_images, 16) if options.quick else options.num_images,
        min((count for count in few if count is not None), default=None),
        bench,
        ProfileOptions(runs=2, warm_up=1) if options.quick else ProfileOptions(),
        tuple(options.plugin_library),
        EngineOptions(tactic_sources=tuple(options.tactic_sources) if options.tactic_sources else None),
        options.networks_for,
    )


def key_of(settings: Settings) -> str:
    """What all networks share. Rows, models and batches may come one after the other."""
    return f"engines of trtdet {trtdet.__version__} with {settings.num_images} calibration images"


def left_out(row: Row, settings: Settings, caps: Capabilities | None) -> str:
    """Why a row cannot be made here; empty where it can."""
    if row.silu == "plugin" and not settings.plugins:
        return "the plugin's library was not given with --plugin-library"
    if row.quantization == "implicit" and caps is not None and caps.implicit is None:
        return f"TensorRT {caps.version} does not quantise implicitly"
    if row.calibrator and caps is not None and importlib.util.find_spec("polygraphy") is None:
        return "TensorRT's own calibrators are fed through Polygraphy, which is not installed (pip install polygraphy)"
    return ""


def check_same(rows: Rows, name: str, facts: dict[str, Any], said: str) -> None:
    """Notes what must not change from one run to the next.

    Raises:
        ConfigError: it has.
    """
    plain = json.loads(json.dumps(facts, default=str))
    known = rows.found.get(name)
    if known is None:
        rows.append({"name": name, "step": name, "kind": "facts", "rows": [], "facts": plain})
    elif known["facts"] != plain:
        raise ConfigError(f"'{rows.path}' is of {said} {known['facts']}, and this is {plain}; give another -o")


def run(options: argparse.Namespace, started: float, console: Console) -> int:
    models, settings = asked_models(options), asked_settings(options)
    budget = options.budget_seconds
    caps = None if settings.networks_for else choose("tensorrt").capabilities
    reasons = {row.name: left_out(row, settings, caps) for row in settings.rows}
    settings = replace(
        settings,
        rows=tuple(row for row in settings.rows if not reasons[row.name]),
        left_out={name: reason for name, reason in reasons.items() if reason},
    )
    for name, reason in settings.left_out.items():
        console.line(f"{name} is left out: {reason}")
    with Rows(settings.output / "rows.jsonl", key_of(settings)) as rows:
        for model in models:
            images = select_images(calibration(model, settings)).sha256
            facts = {"file": sha256_file(model.file), "images": images}
            check_same(rows, f"model {model.name}", facts, "another model or other images:")
        if caps is not None:
            check_same(
                rows,
                "machine",
                {
                    "tensorrt": caps.version,
                    "device": cuda.devices()[0].name,
                    "tactic_sources": settings.engine.tactic_sources,
                    "bench": asdict(settings.bench),
                    "score_images": settings.score_images,
                },
                "another machine or other options:",
            )
        work = Work(models, settings, rows, console)
        waiting, done = work.waiting(), True
        while waiting and done:
            step = work.next(waiting[0])
            spent, needed = time.monotonic() - started, work.estimate(step)
            if budget is not None and spent + needed > budget:
                console.line(
                    f"stopped after {spent:.0f} of {budget:g} s: '{step.name}' would take about {needed:.0f} s"
                )
                break
            # A kernel that went wrong leaves a device that takes no more work from this process; a build has its own.
            done = work.do(step) or step.kind in ("network", "engine")
            if step.kind not in ("network", "engine"):
                work.write()
            waiting = work.waiting()
        if settings.networks_for is None:
            print(work.write())
        print(f"left to do: {'; '.join(step.name for step in waiting) or 'nothing'}")
    if not done:
        console.line("run the same command again to go on with the rest")
        return 1
    if options.drop_bundles and waiting:
        console.line("networks and engines are kept, as there is more to do")
    elif options.drop_bundles:
        for model in models:
            shutil.rmtree(settings.output / model.name, ignore_errors=True)
        (settings.output / "timing-cache").unlink(missing_ok=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
