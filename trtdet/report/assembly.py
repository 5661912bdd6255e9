"""Runs as one report: the verdicts first, then what each run measured, and what none did."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from trtdet.audit.gpus import gpu_named
from trtdet.audit.roofline import Estimate, estimate, flow_of
from trtdet.errors import ConfigError
from trtdet.pipeline.stages.costs import default_gpu
from trtdet.quantization import PrecisionPlan
from trtdet.report.document import Missing, Report, Section
from trtdet.report.runs import Kind, Run, read_run
from trtdet.report.sections.causes import blocks_section, sensitivity_section
from trtdet.report.sections.fronts import front_section, sweep_section
from trtdet.report.sections.graph import engine_nodes, graph_section, model_nodes
from trtdet.report.sections.layers import audit_section, plan_section
from trtdet.report.sections.profiles import profile_section
from trtdet.report.sections.ranges import inputs_of, ranges_section
from trtdet.report.sections.reproduce import made_with_section, reproduce_section
from trtdet.report.sections.scores import AGAINST, scores_section, shift_section
from trtdet.report.sections.verdicts import (
    accuracy_said,
    bundle_verdict,
    front_verdict,
    sweep_verdict,
    verdict_section,
)

_RANK = "give the -o of 'trtdet sensitivity' or 'trtdet tune' too, or build with --keep-fp16 N"


@dataclass(frozen=True)
class _Told:
    """What a run has to say."""

    verdict: tuple[str, ...] = ()
    sections: tuple[Section, ...] = ()
    missing: tuple[Missing, ...] = ()

    def about(self, name: str) -> _Told:
        """The same where a report is of several runs."""
        return replace(
            self,
            sections=tuple(replace(section, about=name) for section in self.sections),
            missing=tuple(replace(missing, about=name) for missing in self.missing),
        )


def report(paths: Sequence[Path]) -> Report:
    """Reads runs and says what they found.

    Args:
        paths: of runs, see :func:`trtdet.report.runs.read_run`; at least one.

    Raises:
        TrtdetError: a run cannot be read, or is given twice.
    """
    if len({path.resolve() for path in paths}) < len(paths):
        raise ConfigError("a run is given twice; give each once")
    runs = [read_run(path) for path in paths]
    bundles = [run for run in runs if run.bundle is not None]
    scored = {run.path: _scores_of(run, runs) for run in bundles}
    with_bundle = [found.path for found in scored.values() if found is not None]
    told = []
    for run in runs:
        if run.path in with_bundle:
            continue
        beside = scored.get(run.path)
        found = _TELLERS[run.kind](run, run.scores if beside is None else beside.scores)
        told.append(found.about(run.name) if len(runs) - len(with_bundle) > 1 else found)
    verdict = tuple(line for found in told for line in found.verdict)
    return Report(
        f"Report of {', '.join(run.name for run in runs)}",
        verdict,
        tuple(section for found in told for section in found.sections),
        tuple(missing for found in told for missing in found.missing),
    )


def with_pictures(found: Report, pictures: Section) -> Report:
    """A report of one bundle with a section of pictures behind its figures."""
    return replace(found, sections=(found.sections[0], pictures, *found.sections[1:]))


def _scores_of(run: Run, runs: Sequence[Run]) -> Run | None:
    """The evaluation of a bundle among the runs: the file that it names lies in the bundle, seen from here or from the
    evaluation's own folder."""
    own = run.path.resolve()

    def of_bundle(other: Run) -> bool:
        if other.scores is None:
            return False
        file = Path(other.scores["file"])
        return own in (file.parent.resolve(), (other.path.parent / file).parent.resolve())

    return next((other for other in runs if of_bundle(other)), None)


def _tell_bundle(run: Run, scores: Mapping[str, Any] | None) -> _Told:
    manifest, plan = run.manifest, run.plan
    assert manifest is not None and plan is not None
    sections = [verdict_section(run, scores)]
    missing: list[Missing] = []
    if scores is not None:
        told = _tell_scores(run, scores)
        sections += told.sections
        missing += told.missing
    elif accuracy_said(run.worth, None):
        missing.append(Missing("AP differences by class and size, and the shift of scores", AGAINST))
    else:
        missing.append(Missing("mAP, its differences by class and size, and the shift of scores", AGAINST))
    int8 = manifest.quantization.mode == "explicit"
    if run.breakdown is not None:
        sections.append(blocks_section(run.breakdown))
    elif int8:
        missing.append(Missing("which blocks carry the error", "build with --accuracy-report"))
    if run.ranking is not None:
        sections.append(sensitivity_section(run.ranking, plan))
    elif int8:
        missing.append(Missing("sensitivity by layer", _RANK))
    sections += _histograms(run, plan)
    assert run.model is not None
    if run.audit is not None:
        times = _estimate(run)
        basis = f"estimated for {times.gpu.name}, batch {times.batch}"
        sections.append(graph_section(engine_nodes(run.audit.layers, plan, times), True, basis))
        sections.append(audit_section(run.audit, plan, times))
    else:
        sections.append(graph_section(model_nodes(run.model, plan), False, ""))
        sections.append(plan_section(plan))
        missing.append(Missing("the audit of an engine", "build with --backend tensorrt or tensorrt-rtx"))
    if run.worth is None and int8:
        missing.append(Missing("the time against FP16", "build without --no-measure, for TensorRT or TensorRT-RTX"))
    sections.append(reproduce_section(manifest, str(run.path)))
    return _Told(bundle_verdict(run, scores), tuple(sections), tuple(missing))


def _histograms(run: Run, plan: PrecisionPlan) -> list[Section]:
    collection, ranges = run.collection, run.ranges
    if collection is None or ranges is None or run.model is None:
        return []
    worst = () if run.ranking is None else tuple(layer.name for layer in run.ranking.layers)
    inputs = inputs_of(run.model, plan, collection)
    return [ranges_section(ranges, collection, inputs, worst, ranges.percent)]


def _made_with(run: Run, kind: Literal["tune", "sweep"]) -> tuple[list[Section], list[Missing]]:
    """The histograms of the calibration of a tune or a sweep, and what gives it again."""
    made, collection = run.made_with, run.collection
    if made is None:
        return [], [
            Missing("histograms, versions, configuration and command", f"repeat the {kind} into its folder"),
        ]
    reproduce = made_with_section(made, kind, str(run.path))
    if collection is None:
        return [reproduce], [Missing("the histograms of the calibration", f"repeat the {kind} into its folder")]
    worst = () if run.ranking is None else tuple(layer.name for layer in run.ranking.layers)
    asked = made.makings[-1].options
    calibration = (asked["build"] if kind == "tune" else asked)["calibration"]
    return [
        ranges_section(run.ranges, collection, made.inputs, worst, calibration["percentile"]),
        reproduce,
    ], []


def _estimate(run: Run) -> Estimate:
    """Of the layers' times, on the GPU that the build was compared for."""
    bundle = run.bundle
    assert bundle is not None
    known = (run.worth or {}).get("estimate")
    gpu = gpu_named(known["gpu"]) if known else default_gpu(bundle.manifest.backend.sms)
    return estimate(flow_of(bundle), gpu, bundle.manifest.input.shape.opt[0])


def _tell_tune(run: Run, scores: Mapping[str, Any] | None) -> _Told:
    assert run.front is not None
    sections = [front_section(run.front)]
    if run.ranking is not None:
        # Of the first plan only the order and the names are of use: points differ in precision.
        sections.append(sensitivity_section(run.ranking, None))
    more, missing = _made_with(run, "tune")
    sections += more
    if not run.front.annotated:
        missing.append(Missing("mAP of the points", "tune with --val-images and --annotations"))
    if run.front.gpu is None:
        missing.append(Missing("the time of the points", "tune with --backend tensorrt or tensorrt-rtx"))
    return _Told(front_verdict(run.name, run.front), tuple(sections), tuple(missing))


def _tell_sweep(run: Run, scores: Mapping[str, Any] | None) -> _Told:
    assert run.rows is not None
    more, missing = _made_with(run, "sweep")
    if all(row["latency_ms"] is None for row in run.rows):
        missing.append(Missing("the latency of the variants", "sweep on a machine that runs the engines"))
    return _Told(sweep_verdict(run.name, run.rows), (sweep_section(run.rows), *more), tuple(missing))


def _tell_ranking(run: Run, scores: Mapping[str, Any] | None) -> _Told:
    assert run.ranking is not None
    first = run.ranking.layers[0]
    total = sum(max(layer.score, 0.0) for layer in run.ranking.layers) or 1.0
    said = f"{run.name}: of {len(run.ranking.layers)} convolutions {first.name} causes most, {first.score / total:.1%}."
    section = sensitivity_section(run.ranking, None)
    missing = () if first.place else (Missing("the order of the network", "rank again with this version of trtdet"),)
    return _Told((said,), (section,), missing)


def _tell_scores(run: Run, scores: Mapping[str, Any] | None) -> _Told:
    assert scores is not None
    against = scores.get("against") or {}
    said = accuracy_said(None, scores)
    verdict = (f"{run.name}: {said}.",) if said else ()
    sections, missing = [], []
    if scores["map"] is not None:
        sections.append(scores_section(scores, against.get("scores"), Path(against.get("file", "")).name or "-"))
    if not against:
        missing.append(Missing("AP differences by class and size, and the shift of scores", AGAINST))
    elif against.get("score_shift"):
        sections.append(shift_section(against["score_shift"]))
    return _Told(verdict, tuple(sections), tuple(missing))


def _tell_profile(run: Run, scores: Mapping[str, Any] | None) -> _Told:
    assert run.profile is not None
    against = run.profile.get("against")
    sections = [profile_section(run.profile)] + ([profile_section(against)] if against else [])
    latency = run.profile["latency_ms"]
    said = (
        f"{run.name}: a run takes {latency['mean']:.3f} ms (stddev {latency['stddev']:.3f}), {run.profile['ran_on']}."
    )
    return _Told((said,), tuple(sections))


def _tell_plan(run: Run, scores: Mapping[str, Any] | None) -> _Told:
    assert run.plan is not None
    return _Told((), (plan_section(run.plan),))


_TELLERS: Mapping[Kind, Callable[[Run, Mapping[str, Any] | None], _Told]] = {
    "bundle": _tell_bundle,
    "tune": _tell_tune,
    "sweep": _tell_sweep,
    "sensitivity": _tell_ranking,
    "scores": _tell_scores,
    "profile": _tell_profile,
    "plan": _tell_plan,
}
