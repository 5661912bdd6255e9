"""Assembles one report from runs: verdicts, the sections of each run, and missing results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trtdet.audit.roofline import estimate, flow_of
from trtdet.building.costs import gpu_of
from trtdet.errors import ConfigError
from trtdet.report.document import Missing, Report, Section
from trtdet.report.runs import Run, attached, named_apart, read_run
from trtdet.report.sections.fronts import experiment_section, experiment_verdict, never_quantized
from trtdet.report.sections.graph import engine_nodes, graph_section, model_nodes
from trtdet.report.sections.layers import audit_section, plan_section, sensitivity_section
from trtdet.report.sections.profiles import benchmark_section, profile_section
from trtdet.report.sections.ranges import inputs_of, ranges_section
from trtdet.report.sections.reproduce import provenance_section, reproduce_section
from trtdet.report.sections.scores import AGAINST, scores_section, shift_section
from trtdet.report.sections.verdicts import accuracy_sentence, figures_section
from trtdet.report.summary import summary_of

_NAMED = 4
"""Runs that a title names."""

_DIFFERENCES = Missing("AP differences by class and size, and the shift of scores", AGAINST)


def report(paths: Sequence[Path]) -> Report:
    """Reports the results of one or more runs, see :func:`trtdet.report.runs.read_run`. Raises TrtdetError: a run
    cannot be read, or is given twice."""
    if len({path.resolve() for path in paths}) < len(paths):
        raise ConfigError("a run is given twice; give each once")
    runs = named_apart(attached([read_run(path) for path in paths]))
    parts = []
    for run in runs:
        part = _part(run)
        if len(runs) > 1:
            sections = (replace(section, about=run.name) for section in part.sections)
            missing = (replace(figure, about=run.name) for figure in part.missing)
            part = replace(part, sections=tuple(sections), missing=tuple(missing))
        parts.append(part)
    what = "bundles" if all(run.bundle is not None for run in runs) else "runs"
    names = ", ".join(run.name for run in runs) if len(runs) <= _NAMED else f"{len(runs)} {what}"
    return Report(
        f"Report of {names}",
        sentences=tuple(line for part in parts for line in part.sentences),
        sections=tuple(section for part in parts for section in part.sections),
        missing=tuple(figure for part in parts for figure in part.missing),
        summaries=tuple(summary for part in parts for summary in part.summaries),
    )


def _part(run: Run) -> Report:
    """The report of one run."""
    if run.bundle is not None:
        return _bundle(run)
    if run.experiment is not None:
        return _experiment(run)
    if run.scores is not None:
        return _evaluation(run.name, run.scores)
    if run.profile is not None:
        profiles = filter(None, (run.profile, run.profile.get("against")))
        latency = run.profile["latency_ms"]
        line = f"{run.name}: a run takes {latency['mean']:.3f} ms (stddev {latency['stddev']:.3f}), "
        return Report("", (f"{line}{run.profile['ran_on']}.",), tuple(profile_section(plain) for plain in profiles))
    if run.benchmark is not None:
        return Report("", sections=(benchmark_section(run.benchmark),))
    if run.ranking is not None:
        layers = run.ranking.layers
        share = layers[0].score / run.ranking.total
        line = f"{run.name}: of {len(layers)} convolutions {layers[0].name} causes most, {share:.1%}."
        order = Missing("the order of the network", "rank again with this version of trtdet")
        section = replace(sensitivity_section(run.ranking, None), folded=False)
        return Report("", (line,), (section,), missing=() if layers[0].place else (order,))
    assert run.plan is not None
    return Report("", sections=(replace(plan_section(run.plan), folded=False),))


def _bundle(run: Run) -> Report:
    bundle, plan, model = run.bundle, run.plan, run.model
    assert bundle is not None and plan is not None and model is not None
    manifest, flow, times = bundle.manifest, None, None
    sections, missing = [figures_section(run)], list(_missing(run))
    if run.scores is not None:
        sections += _score_sections(run.scores)
    if run.ranking is not None:
        sections.append(sensitivity_section(run.ranking, plan))
    if run.collection is not None and run.ranges is not None:
        inputs = inputs_of(model, plan, run.collection)
        worst = [layer.name for layer in run.ranking.layers] if run.ranking is not None else []
        percent = run.ranges.percent
        sections.append(ranges_section(run.ranges, run.collection, inputs, worst=worst, percent=percent))
    if run.audit is not None:
        # Times are for the GPU of the build's own comparison.
        comparison = (run.worth or {}).get("estimate")
        gpu = gpu_of(comparison["gpu"] if comparison else None, manifest.backend.sms)
        flow = flow_of(bundle)
        times = estimate(flow, gpu, manifest.input.shape.opt[0])
        low, high = times.interval_ms
        basis = f"estimated for {times.gpu.name}, batch {times.batch}; a run {low:.2f} to {high:.2f} ms"
        sections.append(graph_section(engine_nodes(run.audit.layers, plan, times), basis))
        sections.append(audit_section(run.audit, plan, times))
    else:
        sections += [graph_section(model_nodes(model, plan), ""), plan_section(plan)]
    sections += [replace(profile_section(run.profile), folded=True)] if run.profile is not None else []
    sections += [replace(benchmark_section(run.benchmark), folded=True)] if run.benchmark is not None else []
    sections.append(reproduce_section(bundle))
    summary = summary_of(run, flow, times)
    return Report("", sections=tuple(sections), missing=tuple(missing), summaries=(summary,))


def _missing(run: Run) -> Iterator[Missing]:
    """What no run measured of a bundle."""
    assert run.bundle is not None
    int8 = run.bundle.manifest.quantization.mode == "explicit"
    if run.scores is None:
        figure = "AP" if accuracy_sentence(run.worth, None) else "mAP, its"
        yield Missing(f"{figure} differences by class and size, and the shift of scores", AGAINST)
    elif not run.scores.get("against"):
        yield _DIFFERENCES
    if run.ranking is None and int8:
        how = "give the -o of 'trtdet sensitivity' or 'trtdet tune' too, or build with --keep-fp16 N"
        yield Missing("sensitivity by layer", how)
    if run.audit is None:
        yield Missing("the audit of an engine", "build with --backend tensorrt or tensorrt-rtx")
    if int8 and run.worth is None and run.target is None:
        yield Missing("the time against FP16", "build with --guard warn, for TensorRT or TensorRT-RTX")
    measured = [run.profile["file"]] if run.profile is not None else []
    measured += [] if run.benchmark is None or run.target is not None else ["model"]
    if any(not run.ships(file) for file in measured):
        yield Missing(
            "the time of the engine", "profile and bench on a machine with its GPU; those given ran the model"
        )


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
            percent = provenance.runs[-1].percentile
            ranking, never = run.ranking, never_quantized(experiment)
            inputs = {name: tensor for name, tensor in provenance.inputs.items() if name not in never}
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
    sentence = accuracy_sentence(None, scores)
    sentences = (f"{name}: {sentence}.",) if sentence else ()
    sections = tuple(replace(section, folded=False) for section in _score_sections(scores))
    return Report("", sentences, sections, missing=() if scores.get("against") else (_DIFFERENCES,))


def _score_sections(scores: Mapping[str, Any]) -> list[Section]:
    """Accuracy by class and size, and the shift of scores."""
    against = scores.get("against") or {}
    sections: list[Section] = []
    if scores["map"] is not None:
        sections.append(scores_section(scores, against, Path(against.get("file", "")).name or "-"))
    if against.get("score_shift"):
        sections.append(shift_section(against["score_shift"]))
    return sections
