"""Forecast of a command: its stages, the results that exist already, and estimated times.

Nothing is run. The time of a stage is a number of model runs; the time of a run follows from the model's multiply-adds,
at a rate measured on one core of a server. Estimates may be wrong by a factor of two or three.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtdet.backends import Backend
from trtdet.building.comparison import has_comparison
from trtdet.building.default_plan import images_to_score, timed_here
from trtdet.building.graph import PlacedGraph
from trtdet.building.job import CheckedBuild, checked_build, job_of
from trtdet.building.ranges import existing_histograms
from trtdet.config import Config
from trtdet.options import BuildOptions, PlanOptions
from trtdet.progress import ExpectedStage
from trtdet.quantization.macs import multiply_adds
from trtdet.tables import Column, Table, counted

_CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

_RATE = 8e9
"""Multiply-adds per second of one core in float32, including the time of all other layers."""

IMAGE = 0.004
"""Seconds to decode and normalise an image and to start a run."""

_CORRECTING = (
    ("correcting: detections of the float model", 0.8, ("range",)),
    ("correcting: gradients of the detections", 7.0, ("range",)),
    ("correcting: moments", 0.8, ("smooth", "round", "bias")),
    ("correcting: gradients of the detections", 8.0, ("range",)),
    ("correcting: reconstruction", 400.0, ("reconstruct",)),
    ("correcting: means", 0.5, ("bias",)),
    ("correcting: held-back images", 0.7, ()),
    ("correcting: detections", 0.7, ()),
)
"""Stages of the corrections, runs per calibration image, and the corrections that need the stage (empty: all)."""

_LOOKED, _HISTOGRAMS, _HALF = 60, 2.0, 0.6
"""Runs of the input check; runs per image of the histograms and of the search for FP16 overflow."""

_ENGINE, _KERNEL = 0.5, 0.005
"""Build time in seconds: per engine, and per node of the model."""

_CANDIDATES = 10
"""Candidates that a build on a machine with a GPU prepares."""

_SCORED, _SCORED_QDQ = 1.5, 2.5
"""Time to score an image on the CPU, in runs of the float model: without and with Q/DQ nodes."""


@dataclass(frozen=True)
class Part:
    """A stage of the forecast, its input ``what`` as text, and its estimated time.

    If the result exists already, ``there`` is its place and ``seconds`` is 0; else ``there`` is empty.
    """

    stage: str
    what: str
    seconds: float
    there: str = ""


@dataclass(frozen=True)
class Forecast:
    """The stages of a command in order, empty if all results exist; ``plan`` says what a build would run in INT8."""

    parts: tuple[Part, ...]
    plan: str = ""

    @property
    def steps(self) -> list[ExpectedStage]:
        return [ExpectedStage(part.stage, part.seconds) for part in self.parts]

    @property
    def seconds(self) -> float:
        return sum(part.seconds for part in self.parts)

    def table(self) -> Table:
        if not self.parts:
            return Table(("stage",), (), notes=("everything is there already",))
        rows = [
            [part.stage, part.what, part.there or "to do", None if part.there else part.seconds] for part in self.parts
        ]
        note = (
            f"about {self.seconds:.0f} s in all on the {_CORES} cores here, by the model's multiply-adds and not "
            "measured: expect a factor of two or three either way"
        )
        return Table(
            ("stage", "of", "state", Column("about s", ".1f")),
            rows,
            notes=(*filter(None, [self.plan]), note, "nothing was computed"),
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        parts = [
            {"stage": part.stage, "of": part.what, "there": part.there or None, "seconds": round(part.seconds, 1)}
            for part in self.parts
        ]
        return {"stages": parts, "seconds": round(self.seconds, 1), "plan": self.plan or None}


def foresee_build(model: Path, config: Config, output: Path, options: BuildOptions) -> Forecast:
    """Forecast of :func:`trtdet.build` with the same arguments; raises TrtdetError if the build's checks fail."""
    return foresee(checked_build(job_of(model, config, output, options=options)))


def foresee(build: CheckedBuild) -> Forecast:
    graph, options, images, current = build.graph, build.options, len(build.selected.paths), build.up_to_date
    caps, run, plan = build.backend.capabilities, run_seconds(build.graph), build.options.plan
    alone = build.default is not None and build.default.fp16_alone
    int8, timed = options.int8 and not alone, current is None and timed_here(options, caps)
    parts: list[Part] = []
    if current is None:
        parts += looked_parts(build, run)
        if options.calibrated and int8:
            there = str(options.tuned or "") or existing_histograms(
                graph, options.calibration, build.selected, implicit=options.implicit, previous=build.previous
            )
            parts.append(calibrated_part(images, run, there))
            if not options.implicit and options.tuned is None:
                parts += corrected_parts(options.corrections, images, run)
        if int8 and (plan.ranked or timed):
            parts.append(ranked_part(graph, plan, images, run=run))
        if images:
            parts.append(Part("ranges of what FP16 holds", counted(images), _HALF * images * run))
        if timed:
            part = scored_part("measuring candidates", images_to_score(options), run, engine=False, quantized=True)
            what = f"about {_CANDIDATES} networks on {part.what}"
            parts.append(Part(part.stage, what, _CANDIDATES * part.seconds))
            forms = _CANDIDATES
        else:
            forms = len(caps.data_flow.weights) if int8 and not options.implicit else 1
        parts.append(engine_part(graph, build.backend, forms))
    compared = current is not None and has_comparison(current, options)
    if int8 and options.compare and caps.makes_engine and not compared and not timed:
        part = engine_part(graph, build.backend)
        parts.append(Part(f"FP16 to compare with: {part.stage}", part.what, part.seconds))
    return Forecast(tuple(parts), _plan_of(build) if options.int8 and current is None else "")


def _plan_of(build: CheckedBuild) -> str:
    """The layers of the default plan by precision, and its estimate if that chose it."""
    plan, work = build.graph.plan, multiply_adds(build.graph.model)
    counts, total = plan.counts(), sum(macs.count for macs in work.values())
    share = sum(work[name].count for name in plan.names("int8") if name in work) / max(total, 1)
    chosen = f"; {build.default}" if build.default is not None else ""
    ranked = ", before a ranking or a limit moves layers to FP16" if build.options.plan.ranked else ""
    numbers = ", ".join(f"{count} {precision.upper()}" for precision, count in counts.items())
    return f"plan: {numbers} layers, INT8 has {share:.1%} of the multiply-adds{ranked}{chosen}"


def run_seconds(graph: PlacedGraph) -> float:
    """Estimated seconds of the float model on one image."""
    return IMAGE + sum(macs.count for macs in multiply_adds(graph.model).values()) / _RATE / _CORES


def looked_parts(build: CheckedBuild, run: float) -> list[Part]:
    """The input check; empty if it is off or there are no images."""
    if not (build.selected.paths and build.options.calibration.check_input):
        return []
    return [Part("checking the input", counted(min(_LOOKED, len(build.selected.paths))), _LOOKED * run)]


def calibrated_part(images: int, run: float, there: str) -> Part:
    if there:
        return Part("calibrating", what="histograms", seconds=0.0, there=there)
    return Part("calibrating", counted(images), _HISTOGRAMS * images * run)


def corrected_parts(names: tuple[str, ...], images: int, run: float) -> list[Part]:
    return [
        Part(stage, counted(images), passes * images * run)
        for stage, passes, needed in _CORRECTING
        if names and (not needed or set(names).intersection(needed))
    ]


def ranked_part(graph: PlacedGraph, plan: PlanOptions, images: int, run: float) -> Part:
    """The ranking; a row runs the part of the model after its layer, half of the model on average."""
    rows, images = len(graph.plan.names("int8")), min(plan.rank_images, images)
    return Part("ranking", f"{rows} layers on {counted(images)}", 0.5 * rows * images * run)


def engine_part(graph: PlacedGraph, backend: Backend, forms: int = 1) -> Part:
    """The engine, built once for each form of weight scales."""
    caps, nodes = backend.capabilities, len(graph.model.graph.node)
    stage = f"building the engine with {caps.name} {caps.version}"
    if not caps.makes_engine:
        return Part(stage, "the model alone, no engine", 0.2)
    what = f"{nodes} nodes" + (f", {forms} times" if forms > 1 else "")
    return Part(stage, what, forms * (_ENGINE + _KERNEL * nodes))


def scored_part(stage: str, images: int, run: float, engine: bool, quantized: bool) -> Part:
    seconds = IMAGE * _SCORED if engine else run * (_SCORED_QDQ if quantized else _SCORED)
    return Part(stage, counted(images), images * seconds)
