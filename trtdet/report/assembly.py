"""Assembles one report from runs: verdicts, the sections of each run, and missing results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trtdet.audit.roofline import estimate, flow_of
from trtdet.building.costs import gpu_of
from trtdet.errors import ConfigError
from trtdet.options.fields import rule_percentile
from trtdet.report.document import Missing, Report, Section
from trtdet.report.runs import Run, read_run
from trtdet.report.sections.fronts import experiment_section, experiment_verdict
from trtdet.report.sections.graph import engine_nodes, graph_section, model_nodes
from trtdet.report.sections.layers import audit_section, plan_section, sensitivity_section
from trtdet.report.sections.profiles import profile_section
from trtdet.report.sections.ranges import inputs_of, ranges_section
from trtdet.report.sections.reproduce import provenance_section, reproduce_section
from trtdet.report.sections.scores import AGAINST, scores_section, shift_section
from trtdet.report.sections.verdicts import accuracy_sentence, bundle_verdict, figures_section


def report(paths: Sequence[Path]) -> Report:
    """Reports the results of one or more runs, see :func:`trtdet.report.runs.read_run`. Raises TrtdetError: a run
    cannot be read, or is given twice."""
    if len({path.resolve() for path in paths}) < len(paths):
        raise ConfigError("a run is given twice; give each once")
    runs = [read_run(path) for path in paths]
    evaluations = {run.path: _evaluation_of(run, runs) for run in runs if run.bundle is not None}
    beside_bundle = [evaluation.path for evaluation in evaluations.values() if evaluation is not None]
    parts = []
    for run in runs:
        if run.path not in beside_bundle:
            part = _part(run, evaluations.get(run.path) or run)
            if len(runs) - len(beside_bundle) > 1:
                sections = (replace(section, about=run.name) for section in part.sections)
                missing = (replace(figure, about=run.name) for figure in part.missing)
                part = replace(part, sections=tuple(sections), missing=tuple(missing))
            parts.append(part)
    return Report(
        f"Report of {', '.join(run.name for run in runs)}",
        verdict=tuple(line for part in parts for line in part.verdict),
        sections=tuple(section for part in parts for section in part.sections),
        missing=tuple(figure for part in parts for figure in part.missing),
    )


def _evaluation_of(bundle: Run, runs: Sequence[Run]) -> Run | None:
    """The evaluation among ``runs`` whose file lies in the bundle; its path may be relative to the working directory or
    to the evaluation's folder."""
    for run in runs:
        if run.scores is not None:
            file = Path(run.scores["file"])
            if bundle.path.resolve() in (file.parent.resolve(), (run.path.parent / file).parent.resolve()):
                return run
    return None


def _part(run: Run, evaluation: Run) -> Report:
    """The report of one run. ``evaluation`` is the run with a bundle's scores, or ``run`` itself."""
    if run.bundle is not None:
        return _bundle(run, evaluation.scores)
    if run.experiment is not None:
        return _experiment(run)
    if run.scores is not None:
        return _evaluation(run.name, run.scores)
    if run.profile is not None:
        profiles = filter(None, (run.profile, run.profile.get("against")))
        latency = run.profile["latency_ms"]
        line = f"{run.name}: a run takes {latency['mean']:.3f} ms (stddev {latency['stddev']:.3f}), "
        return Report("", (f"{line}{run.profile['ran_on']}.",), tuple(profile_section(plain) for plain in profiles))
    if run.ranking is not None:
        layers = run.ranking.layers
        share = layers[0].score / run.ranking.total
        line = f"{run.name}: of {len(layers)} convolutions {layers[0].name} causes most, {share:.1%}."
        order = Missing("the order of the network", "rank again with this version of trtdet")
        return Report(
            "", (line,), (sensitivity_section(run.ranking, None),), missing=() if layers[0].place else (order,)
        )
    assert run.plan is not None
    return Report("", sections=(plan_section(run.plan),))


def _bundle(run: Run, scores: Mapping[str, Any] | None) -> Report:
    bundle, plan, model = run.bundle, run.plan, run.model
    assert bundle is not None and plan is not None and model is not None
    manifest = bundle.manifest
    sections, missing = [figures_section(run)], list[Missing]()
    int8 = manifest.quantization.mode == "explicit"
    if scores is not None:
        evaluation = _evaluation(run.name, scores)
        sections += evaluation.sections
        missing += evaluation.missing
    else:
        figure = "AP" if accuracy_sentence(run.worth, None) else "mAP, its"
        missing.append(Missing(f"{figure} differences by class and size, and the shift of scores", AGAINST))
    if run.ranking is not None:
        sections.append(sensitivity_section(run.ranking, plan))
    elif int8:
        how = "give the -o of 'trtdet sensitivity' or 'trtdet tune' too, or build with --keep-fp16 N"
        missing.append(Missing("sensitivity by layer", how))
    if run.collection is not None and run.ranges is not None:
        inputs = inputs_of(model, plan, run.collection)
        worst = [layer.name for layer in run.ranking.layers] if run.ranking is not None else []
        percent = run.ranges.percent
        sections.append(ranges_section(run.ranges, run.collection, inputs, worst=worst, percent=percent))
    if run.audit is not None:
        # Times are for the GPU of the build's own comparison.
        comparison = (run.worth or {}).get("estimate")
        gpu = gpu_of(comparison["gpu"] if comparison else None, manifest.backend.sms)
        times = estimate(flow_of(bundle), gpu, manifest.input.shape.opt[0])
        low, high = times.interval_ms
        basis = f"estimated for {times.gpu.name}, batch {times.batch}; a run {low:.2f} to {high:.2f} ms"
        sections.append(graph_section(engine_nodes(run.audit.layers, plan, times), basis))
        sections.append(audit_section(run.audit, plan, times))
    else:
        sections += [graph_section(model_nodes(model, plan), ""), plan_section(plan)]
        missing.append(Missing("the audit of an engine", "build with --backend tensorrt or tensorrt-rtx"))
    if run.worth is None and int8:
        missing.append(Missing("the time against FP16", "build with --guard warn, for TensorRT or TensorRT-RTX"))
    sections.append(reproduce_section(bundle))
    return Report("", bundle_verdict(run, scores), tuple(sections), missing=tuple(missing))


def _experiment(run: Run) -> Report:
    experiment, provenance = run.experiment, run.provenance
    assert experiment is not None
    sections, missing = [experiment_section(experiment)], list[Missing]()
    repeat = f"repeat the {experiment.kind} into its folder"
    if run.ranking is not None:
        # Variants differ in precision, so the ranking has no colours by precision.
        sections.append(sensitivity_section(run.ranking, None))
    if provenance is None:
        missing.append(Missing("histograms, versions, configuration and command", repeat))
    else:
        if run.collection is None:
            missing.append(Missing("the histograms of the calibration", repeat))
        else:
            options = provenance.runs[-1].options
            calibration = (options["build"] if experiment.kind == "tune" else options)["calibration"]
            percent = rule_percentile(calibration["rule"])
            inputs, ranking = provenance.inputs, run.ranking
            worst = [layer.name for layer in ranking.layers] if ranking is not None else []
            sections.append(ranges_section(run.ranges, run.collection, inputs, worst=worst, percent=percent))
        sections.append(provenance_section(provenance, experiment.kind, str(run.path)))
    if not experiment.annotated:
        missing.append(Missing("mAP of the variants", "tune with --val-images and --annotations"))
    if experiment.kind == "tune" and experiment.gpu is None:
        missing.append(Missing("the time of the variants", "tune with --backend tensorrt or tensorrt-rtx"))
    if experiment.kind == "sweep" and experiment.device is None:
        missing.append(Missing("the latency of the variants", "sweep on a machine that runs the engines"))
    return Report("", experiment_verdict(run.name, experiment), tuple(sections), missing=tuple(missing))


def _evaluation(name: str, scores: Mapping[str, Any]) -> Report:
    against = scores.get("against") or {}
    sentence = accuracy_sentence(None, scores)
    sections: list[Section] = []
    if scores["map"] is not None:
        sections.append(scores_section(scores, against.get("scores"), Path(against.get("file", "")).name or "-"))
    if against.get("score_shift"):
        sections.append(shift_section(against["score_shift"]))
    differences = Missing("AP differences by class and size, and the shift of scores", AGAINST)
    verdict = (f"{name}: {sentence}.",) if sentence else ()
    return Report("", verdict, tuple(sections), missing=() if against else (differences,))
