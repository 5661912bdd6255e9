"""Builds and times candidate networks on the machine that runs the engine, and ships the fastest of them."""

from __future__ import annotations

import hashlib
import json
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from trtdet.audit import Audit
from trtdet.audit.roofline import RATIO_WITHIN, estimate
from trtdet.backends import (
    Backend,
    Capabilities,
    EngineFacts,
    EngineTarget,
    Implicit,
    choose,
    obstacle,
)
from trtdet.building.bundle import AUDIT, BUILD_LOG, audit_part, log_of, model_files
from trtdet.building.costs import gpu_of
from trtdet.building.engine import BuildNetwork, Engine, best_engine
from trtdet.building.job import previous_bundle
from trtdet.bundle import MANIFEST, Bundle, BundleWriter, CandidatePart, Manifest, PartAccuracy
from trtdet.calibration import cache
from trtdet.candidates.folder import Candidate, PreparedFolder
from trtdet.errors import BackendError, TrtdetWarning
from trtdet.evaluation.comparison import PartScore, interval_text, least_difference, spread_text
from trtdet.options import FinishOptions
from trtdet.performance import BenchOptions, Target, measure
from trtdet.performance.results import ROUNDS, Ratio
from trtdet.progress import Progress, silent, titled
from trtdet.quantization import PrecisionPlan, Requantized
from trtdet.tables import Column, Table

FP16 = "fp16"
"""Name of the candidate that is the float model in FP16."""

_EQUAL = 1.02
"""Candidates within this factor of the fastest count as equally fast if their intervals overlap."""


@dataclass(frozen=True)
class Finished:
    """A finished bundle; ``candidates`` are in its manifest too."""

    bundle: Bundle
    candidates: tuple[CandidatePart, ...]
    audit: Audit | None
    reason: str


def _spread(part: PartAccuracy) -> str:
    return spread_text(PartScore(map=part.map, difference=part.difference, low=part.low, high=part.high))


def times_table(candidates: Sequence[CandidatePart]) -> Table:
    """The candidates of a finished bundle with their times, the shipped one marked."""
    how = next((part.how for part in candidates if part.how), None)
    parts = candidates[0].parts
    columns = (
        Column("candidate", align="left"),
        Column("multiply-adds in INT8", ".0%"),
        Column("against FP32", "+.2f"),
        Column("90 % interval", align="right"),
        *(Column(f"{of.replace('_', ' ')} against FP32", align="right") for of in parts),
        Column(f"ms {how or ''}".strip(), ".3f"),
        Column("of FP16's time", ".3f"),
        Column("90 % interval", align="right"),
        Column("", align="left"),
    )
    rows = [
        (
            part.name,
            part.int8_share,
            100 * part.difference,
            interval_text(part.low, part.high),
            *(_spread(part.parts[of]) for of in parts),
            part.ms,
            part.ratio,
            "" if part.ratio_low is None else f"{part.ratio_low:.3f} .. {part.ratio_high:.3f}",
            "<- shipped" if part.shipped else part.problem,
        )
        for part in candidates
    ]
    return Table(columns, rows)


@dataclass(frozen=True, eq=False)
class _Entrant:
    """A candidate with its engine."""

    candidate: Candidate
    manifest: Manifest
    engine: Engine


@dataclass(frozen=True)
class _Times:
    """Median milliseconds of a run by name of the candidate, and the same divided by the time of ``baseline``, which is
    FP16 or else the first entrant; ``on`` is the GPU. ``problems`` says by candidate why its engine does not run, and
    ``unknown`` why no time is known, if none is."""

    ms: Mapping[str, float] = field(default_factory=dict)
    ratios: Mapping[str, Ratio] = field(default_factory=dict)
    baseline: str = ""
    how: Literal["measured", "estimated"] | None = None
    on: str = ""
    problems: Mapping[str, str] = field(default_factory=dict)
    unknown: str = ""


def finish(
    prepared: Path | str,
    output: Path | str,
    options: FinishOptions = FinishOptions(),
    progress: Progress = silent,
    least_speedup: float | None = None,
) -> Finished:
    """Builds the candidates that may ship, times them side by side, and writes a bundle with the fastest.

    FP16 and the default plan are built first. Candidates within 2 % of the fastest, which the measurement cannot tell
    apart, count as equally fast; of these, the most accurate ships, by boxes or the part that lost most. Where no GPU
    runs the engines, times are estimates for a GPU.

    Args:
        prepared: the folder that ``trtdet prepare`` wrote.
        least_speedup: FP16 ships unless another candidate is at least this many times as fast.

    Raises:
        BundleError: ``prepared`` is not such a folder, or is damaged.
        BackendError: the library is missing or differs from the one prepared for, or no candidate could be built.
    """
    folder, output = PreparedFolder(prepared), Path(output)
    content, started = folder.content, time.monotonic()
    backend = choose(content.library)
    caps = backend.capabilities
    _check_version(folder, caps)
    previous_bundle(output, folder.path, folder.manifest(content.candidates[0]).model.sha256, force=options.force)
    target = EngineTarget(content.sms, batch=content.batch, options=options.engine)
    timings = options.engine.timing_cache or output.with_name(f"{output.name}.timing-cache")
    entrants, problems, failures = list[_Entrant](), dict[str, str](), list[BackendError]()
    with BundleWriter(output) as writer:
        for number, candidate in enumerate(content.candidates):
            late = options.budget is not None and time.monotonic() - started > 60 * options.budget
            if candidate.refused or (late and entrants):
                problems[candidate.name] = candidate.refused or f"not built: {options.budget:g} minutes were over"
                continue
            progress("building candidates", number, len(content.candidates))
            try:
                entrants.append(_entrant(folder, candidate, backend, target=target, timings=timings, progress=progress))
            except BackendError as error:
                failures.append(error)
                problems[candidate.name] = f"not built: {error.problem}"
        if not entrants:
            first = failures[0]
            raise BackendError(f"no candidate could be built; the first: {first.problem}", first.hint, first.messages)
        missing = obstacle(EngineFacts.built(caps, entrants[0].engine.built.sms, ()))
        if missing:
            times = _estimated(entrants, caps, options, missing=missing)
        else:
            times = _measured(entrants, caps, options, progress=progress)
        problems.update(times.problems)
        chosen, why = _choice(entrants, times, least_speedup)
        parts = tuple(
            _part(one, problems.get(one.name, ""), times, shipped=one is chosen.candidate) for one in content.candidates
        )
        bundle = _write(writer, folder, chosen, parts=parts, caps=caps, options=options)
    audit = chosen.engine.audit
    for warning in audit.warnings if audit is not None else ():
        warnings.warn(warning, TrtdetWarning, stacklevel=2)
    reason = f"{why}: {times.unknown}" if times.how is None else f"{why}, {times.how} on {times.on}"
    return Finished(bundle, parts, audit, reason=reason)


def _check_version(folder: PreparedFolder, caps: Capabilities) -> None:
    """Refuses another version of the library if it reads other networks."""
    content = folder.content
    prepared, installed = (
        tuple(int(part) for part in version.split(".")[:2]) for version in (content.version, caps.version)
    )
    if prepared[0] != installed[0] or prepared > installed:
        raise BackendError(
            f"'{folder.path}' was prepared for {content.library} {content.version}, and {caps.version} is installed "
            "here",
            f"prepare it again with --for {content.library}-{caps.version}, or install that version",
        )


def _entrant(
    folder: PreparedFolder,
    candidate: Candidate,
    backend: Backend,
    target: EngineTarget,
    timings: Path,
    progress: Progress,
) -> _Entrant:
    """Builds and audits a candidate."""
    implicit = None
    if candidate.implicit:
        # TensorRT reads only caches that name its own version.
        prepared = (folder.path / candidate.files["calibration.cache"]).read_text()
        ranges = cache.write(cache.read(prepared, skip_unusable=True), backend.capabilities.cache_version)
        implicit = Implicit("cache", ranges)
    network = BuildNetwork(
        Requantized(folder.model(candidate)),
        precision=candidate.precision,
        plan=PrecisionPlan.load(folder.path / candidate.files["plan.json"]),
        precisions=candidate.precisions,
        implicit=implicit,
    )
    tell = titled(progress, candidate.name)
    engine = best_engine((network,), backend, target, timings=timings, progress=tell)
    return _Entrant(candidate, folder.manifest(candidate), engine)


def _estimated(entrants: list[_Entrant], caps: Capabilities, options: FinishOptions, missing: str) -> _Times:
    gpu = gpu_of(options.engine.gpu, entrants[0].engine.built.sms)
    ms = {}
    for entrant in entrants:
        flow, nms = entrant.engine.flow, entrant.manifest.nms
        if flow is None:
            return _Times(unknown=f"engines do not run here, as {missing}, and no layers are listed")
        graph = not caps.uncaptured(nms.mode, nms.thresholds)
        ms[entrant.candidate.name] = estimate(flow, gpu, entrant.manifest.input.shape.opt[0], graph=graph).ms
    baseline = FP16 if FP16 in ms else next(iter(ms))
    ratios = {}
    for name, own in ms.items():
        value, within = own / ms[baseline], 1.0 if name == baseline else RATIO_WITHIN
        ratios[name] = Ratio(value, value / within, value * within)
    return _Times(ms, ratios, baseline, how="estimated", on=gpu.name)


def _measured(entrants: list[_Entrant], caps: Capabilities, options: FinishOptions, progress: Progress) -> _Times:
    problems, targets = {}, []
    with ExitStack() as stack:
        for entrant in entrants:
            name, manifest = entrant.candidate.name, entrant.manifest
            try:
                runner = stack.enter_context(entrant.engine.opened(caps))
            except BackendError as error:
                problems[name] = f"does not run: {error.problem}"
                continue
            targets.append(
                Target(name, runner=runner, input=manifest.input.preprocess, file=name, nms=manifest.nms.mode)
            )
        names = [target.name for target in targets]
        if not names:
            return _Times(problems=problems, unknown="no engine runs here")
        baseline = names.index(FP16) if FP16 in names else 0
        batch, warm_up = entrants[0].manifest.input.shape.opt[0], min(1.0, options.seconds)
        timing = BenchOptions((batch,), seconds=options.seconds, warm_up=warm_up, min_runs=ROUNDS)
        results = measure(targets, timing, baseline, progress=progress).targets
    points = {name: result.points[0] for name, result in zip(names, results, strict=True)}
    return _Times(
        ms={name: point.latency_ms.p50 for name, point in points.items()},
        ratios={name: point.ratio or Ratio(1.0, 1.0, 1.0) for name, point in points.items()},
        baseline=names[baseline],
        how="measured",
        on=results[0].run_info.device,
        problems=problems,
    )


def _choice(entrants: list[_Entrant], times: _Times, least: float | None) -> tuple[_Entrant, str]:
    """The candidate to ship, and why. Without times it is the default plan, whose accuracy every build checks. An
    estimate decides by its value: its interval is as wide as most differences."""
    by_name = {entrant.candidate.name: entrant for entrant in entrants}
    if not times.ms:
        default = by_name.get("default", entrants[0])
        return default, f"'{default.candidate.name}' ships"
    ratios = times.ratios
    fastest = min(ratios, key=lambda name: ratios[name].value)
    first = ratios[fastest]
    equal = [fastest]
    if times.how == "measured":
        equal = [
            name for name, ratio in ratios.items() if ratio.low <= first.high and ratio.value <= _EQUAL * first.value
        ]
    best = max(equal, key=lambda name: least_difference(by_name[name].candidate.accuracy))
    if least is not None and times.baseline == FP16 and ratios[best].value > 1 / least:
        gain = f"the fastest other takes {ratios[best].value:.3f} of its time, and {least:g} times as fast is asked for"
        return by_name[FP16], f"'{FP16}' ships: {gain}"
    if best == fastest:
        return by_name[best], f"'{best}' ships as the fastest of {len(ratios)}"
    return by_name[best], f"'{best}' ships: the most accurate of the {len(equal)} fastest, whose times do not differ"


def _part(candidate: Candidate, problem: str, times: _Times, *, shipped: bool) -> CandidatePart:
    name, timed = candidate.name, candidate.name in times.ms
    ratio = times.ratios.get(name) if times.baseline == FP16 else None
    value, low, high = (None, None, None) if ratio is None else (ratio.value, ratio.low, ratio.high)
    return CandidatePart(
        name=name,
        title=candidate.title,
        int8_share=candidate.int8_share,
        **asdict(candidate.accuracy),
        ms=times.ms.get(name),
        ratio=value,
        ratio_low=low,
        ratio_high=high,
        how=times.how if timed else None,
        on=times.on if timed else "",
        shipped=shipped,
        problem=problem,
    )


def _write(
    writer: BundleWriter,
    folder: PreparedFolder,
    chosen: _Entrant,
    parts: tuple[CandidatePart, ...],
    caps: Capabilities,
    options: FinishOptions,
) -> Bundle:
    """Writes the bundle of the chosen candidate."""
    candidate, manifest, built, audit = chosen.candidate, chosen.manifest, chosen.engine.built, chosen.engine.audit
    models, runs = model_files(chosen.engine.network)
    for name, content in {"model.engine": built.engine, **models}.items():
        writer.add(name, content)
    for name, file in candidate.files.items():
        if name != MANIFEST and not (name == "calibration.cache" and built.calibration_cache):
            writer.add(name, (folder.path / file).read_bytes())
    if built.calibration_cache:
        writer.add("calibration.cache", built.calibration_cache.encode())
    if audit is not None:
        writer.add(AUDIT, audit.to_json().encode())
    if built.messages:
        writer.add(BUILD_LOG, log_of(built.messages))
    builder = json.loads(json.dumps(asdict(options.engine), default=str))
    key = json.dumps([folder.content.key, candidate.name, caps.name, caps.version, builder], sort_keys=True)
    fields: dict[str, Any] = {name: getattr(manifest, name) for name in Manifest.model_fields}
    backend = {name: getattr(options.engine, name) for name in ("version_compatible", "hardware_compatible")}
    backend |= {"version": caps.version, "sms": built.sms, "tf32": caps.tf32 and options.engine.tf32}
    fields.update(
        backend=manifest.backend.model_copy(update=backend),
        audit=audit_part(audit),
        command={**manifest.command, "engine": builder},
        portable=runs,
        candidates=parts,
        content_hash=hashlib.sha256(key.encode()).hexdigest(),
    )
    return writer.commit(fields)
