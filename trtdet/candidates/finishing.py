"""Builds and times candidate networks on the machine that runs the engine, and ships the fastest of them."""

from __future__ import annotations

import hashlib
import json
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import onnx

from trtdet.audit import Audit, audit, layers_of
from trtdet.audit.roofline import RATIO_WITHIN, estimate
from trtdet.audit.traffic import Flow
from trtdet.backends import (
    Backend,
    Built,
    Capabilities,
    EngineFacts,
    EngineTarget,
    Implicit,
    Runner,
    build_remembering,
    choose,
    obstacle,
    open_engine,
    portable,
)
from trtdet.backends.base import compose
from trtdet.building.bundle import AUDIT, BUILD_LOG
from trtdet.building.costs import gpu_of
from trtdet.building.graph import model_bytes
from trtdet.bundle import MANIFEST, PORTABLE, AuditPart, Bundle, BundleWriter, CandidatePart, FloatConvPart, Manifest
from trtdet.calibration import cache
from trtdet.candidates.folder import Candidate, PreparedFolder
from trtdet.errors import BackendError, BundleError, OutputError, TrtdetWarning
from trtdet.options import FinishOptions
from trtdet.performance import BenchOptions, Target, measure
from trtdet.performance.results import ROUNDS, Ratio
from trtdet.progress import Progress, silent
from trtdet.quantization import PrecisionPlan
from trtdet.tables import Column, Table

_FP16 = "fp16"
_EQUAL = 1.02
"""Candidates within this factor of the fastest count as equally fast if their intervals overlap."""


@dataclass(frozen=True)
class Finished:
    """A finished bundle; ``candidates`` are in its manifest too."""

    bundle: Bundle
    candidates: tuple[CandidatePart, ...]
    audit: Audit | None
    reason: str

    def table(self) -> Table:
        """The candidates with their times, the shipped one marked."""
        how = next((part.how for part in self.candidates if part.how), None)
        columns = (
            Column("candidate", align="left"),
            Column("multiply-adds in INT8", ".0%"),
            Column("against FP32", "+.2f"),
            Column("90 % interval", align="right"),
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
                f"{100 * part.low:+.2f} .. {100 * part.high:+.2f}",
                part.ms,
                part.ratio,
                "" if part.ratio_low is None else f"{part.ratio_low:.3f} .. {part.ratio_high:.3f}",
                "<- shipped" if part.shipped else part.problem,
            )
            for part in self.candidates
        ]
        return Table(columns, rows)


@dataclass(frozen=True, eq=False)
class _Entrant:
    """A candidate with its engine; ``audit`` is None if the backend lists no layers."""

    candidate: Candidate
    model: onnx.ModelProto
    plan: PrecisionPlan
    manifest: Manifest
    built: Built
    audit: Audit | None


@dataclass(frozen=True)
class _Timed:
    """Milliseconds of an entrant, and its time divided by that of FP16, None if FP16 was not built."""

    ms: float
    ratio: Ratio | None


def finish(
    prepared: Path | str,
    output: Path | str,
    options: FinishOptions = FinishOptions(),
    progress: Progress = silent,
    clock: Callable[[], float] = time.monotonic,
) -> Finished:
    """Builds the candidates that may ship, times them side by side, and writes a bundle with the fastest.

    FP16 and the default plan are built first. Candidates within 2 % of the fastest, which the measurement cannot tell
    apart, count as equally fast; of these, the most accurate ships. Where no GPU runs the engines, times
    are estimates for a GPU.

    Args:
        prepared: the folder that ``trtdet prepare`` wrote.
        clock: seconds, for the budget.

    Raises:
        BundleError: ``prepared`` is not such a folder, or is damaged.
        BackendError: the library is missing or differs from the one prepared for, or no candidate could be built.
    """
    folder, output = PreparedFolder(prepared), Path(output)
    content, started = folder.content, clock()
    backend = choose(content.library)
    caps = backend.capabilities
    _check_version(folder, caps)
    _check_place(output, folder, force=options.force)
    target = EngineTarget(content.sms, batch=content.batch, options=options.engine)
    timings = options.engine.timing_cache or output.with_name(f"{output.name}.timing-cache")
    entrants, problems, failures = list[_Entrant](), dict[str, str](), list[BackendError]()
    with BundleWriter(output) as writer:
        for number, candidate in enumerate(content.candidates):
            late = options.budget is not None and clock() - started > 60 * options.budget
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
        times, how, on, reason = _times(entrants, backend, options, progress=progress)
        problems.update({name: text for name, text in reason.items() if name})
        chosen, why = _choice(entrants, times, how)
        parts = tuple(
            _part(one, problems.get(one.name, ""), times.get(one.name), how=how, on=on, shipped=one is chosen.candidate)
            for one in content.candidates
        )
        bundle = _write(writer, folder, chosen, parts=parts, caps=caps, options=options)
    for warning in chosen.audit.warnings if chosen.audit is not None else ():
        warnings.warn(warning, TrtdetWarning, stacklevel=2)
    told = f"{why}, {how} on {on}" if how else f"{why}: {reason.get('', 'no time is known')}"
    return Finished(bundle, parts, chosen.audit, reason=told)


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


def _check_place(output: Path, folder: PreparedFolder, force: bool) -> None:
    """Refuses to replace a bundle of another model."""
    own = folder.manifest(folder.content.candidates[0]).model.sha256
    try:
        other = Bundle(output, verify=False).manifest.model
    except BundleError:
        return
    if other.sha256 != own and not force:
        raise OutputError(
            f"'{output}' is a bundle of another model ('{other.name}'); choose another place with -o, or replace it "
            "with --force"
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
    caps, model, files = backend.capabilities, folder.model(candidate), candidate.files
    ranges = ""
    if candidate.implicit:
        # TensorRT reads only caches that name its own version.
        prepared = (folder.path / files["calibration.cache"]).read_text()
        ranges = cache.write(cache.read(prepared, skip_unusable=True), caps.cache_version)
    request = compose(
        model,
        candidate.precision,
        candidate.precisions,
        target=target,
        implicit=Implicit("cache", ranges) if candidate.implicit else None,
    )
    plan = PrecisionPlan.load(folder.path / files["plan.json"])

    def tell(stage: str, done: int, total: int) -> None:
        progress(f"{candidate.name}: {stage}", done, total)

    built = build_remembering(backend, request, timings=timings, progress=tell)
    listed = caps.lists_layers and (built.layers or not caps.has_inspector)
    audited = audit(layers_of(built), plan, model, silu=caps.silu) if listed else None
    return _Entrant(candidate, model=model, plan=plan, manifest=folder.manifest(candidate), built=built, audit=audited)


def _times(
    entrants: list[_Entrant], backend: Backend, options: FinishOptions, progress: Progress
) -> tuple[dict[str, _Timed], Any, str, dict[str, str]]:
    """Times by name of the candidate, ``measured`` or ``estimated``, the GPU, and reasons: by candidate why its engine
    does not run, and under an empty name why no time is known."""
    caps = backend.capabilities
    batch = entrants[0].manifest.input.shape.opt[0]
    reasons: dict[str, str] = {}
    missing = obstacle(EngineFacts.built(caps, entrants[0].built.sms, ()))
    if missing:
        if any(one.audit is None for one in entrants):
            return {}, None, "", {"": f"engines do not run here, as {missing}, and no layers are listed"}
        gpu = gpu_of(options.engine.gpu, entrants[0].built.sms)
        estimated = {}
        for one in entrants:
            assert one.audit is not None
            nms = one.manifest.nms
            graph = not caps.uncaptured(nms.mode, nms.thresholds)
            flow = Flow(one.audit.layers, one.plan, one.model)
            estimated[one.candidate.name] = estimate(flow, gpu, batch, graph=graph).ms
        half = estimated.get(_FP16)
        ratios = {name: None if half is None else _estimated_ratio(ms / half) for name, ms in estimated.items()}
        return {name: _Timed(ms, ratios[name]) for name, ms in estimated.items()}, "estimated", gpu.name, {}
    with ExitStack() as stack:
        targets = []
        for one in entrants:
            try:
                facts = EngineFacts.built(caps, one.built.sms, ())
                runner: Runner = stack.enter_context(open_engine(one.built.engine, facts))
            except BackendError as error:
                reasons[one.candidate.name] = f"does not run: {error.problem}"
                continue
            name, manifest = one.candidate.name, one.manifest
            targets.append(
                Target(name, runner=runner, input=manifest.input.preprocess, file=name, nms=manifest.nms.mode)
            )
        names = [target.name for target in targets]
        if not names:
            return {}, None, "", {**reasons, "": "no engine runs here"}
        baseline = names.index(_FP16) if _FP16 in names else 0
        timing = BenchOptions((batch,), seconds=options.seconds, warm_up=min(1.0, options.seconds), min_runs=ROUNDS)
        results = measure(targets, timing, baseline, progress=progress).targets
    times = {}
    for name, result in zip(names, results, strict=True):
        point = result.points[0]
        ratio = Ratio(1.0, 1.0, 1.0) if point.ratio is None else point.ratio
        times[name] = _Timed(point.latency_ms.p50, ratio if _FP16 in names else None)
    return times, "measured", results[0].run_info.device, reasons


def _estimated_ratio(value: float) -> Ratio:
    within = 1.0 if value == 1 else RATIO_WITHIN
    return Ratio(value, value / within, value * within)


def _choice(entrants: list[_Entrant], times: dict[str, _Timed], how: str | None) -> tuple[_Entrant, str]:
    """The candidate to ship, and why. Without times it is the default plan, whose accuracy every build checks. An
    estimate decides by its value: its interval is as wide as most differences."""
    timed = {one.candidate.name: one for one in entrants if one.candidate.name in times}
    if not timed:
        default = next((one for one in entrants if one.candidate.name == "default"), entrants[0])
        return default, f"'{default.candidate.name}' ships"
    ratios = {name: times[name].ratio or Ratio(*[times[name].ms] * 3) for name in timed}
    fastest = min(ratios, key=lambda name: ratios[name].value)
    first = ratios[fastest]
    equal = [
        name
        for name, ratio in ratios.items()
        if how == "measured" and ratio.low <= first.high and ratio.value <= _EQUAL * first.value
    ]
    best = max(equal or [fastest], key=lambda name: timed[name].candidate.accuracy.difference)
    if best == fastest:
        return timed[best], f"'{best}' ships as the fastest of {len(timed)}"
    return timed[best], f"'{best}' ships: the most accurate of the {len(equal)} fastest, whose times do not differ"


def _part(
    candidate: Candidate, problem: str, timed: _Timed | None, how: Any, on: str, *, shipped: bool
) -> CandidatePart:
    accuracy = candidate.accuracy
    ratio = None if timed is None else timed.ratio
    return CandidatePart(
        name=candidate.name,
        title=candidate.title,
        int8_share=candidate.int8_share,
        **asdict(accuracy),
        ms=None if timed is None else timed.ms,
        ratio=None if ratio is None else ratio.value,
        ratio_low=None if ratio is None else ratio.low,
        ratio_high=None if ratio is None else ratio.high,
        how=how if timed is not None else None,
        on=on if timed is not None else "",
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
    candidate, built, manifest, audited = chosen.candidate, chosen.built, chosen.manifest, chosen.audit
    own = "float.onnx" if candidate.implicit else f"{candidate.precision}.onnx"
    runnable = chosen.model if candidate.implicit else portable(chosen.model)
    apart = runnable is not chosen.model
    writer.add("model.engine", built.engine)
    writer.add(own, model_bytes(chosen.model))
    if apart:
        writer.add(PORTABLE, model_bytes(runnable))
    for name, file in candidate.files.items():
        if name != MANIFEST and not (name == "calibration.cache" and built.calibration_cache):
            writer.add(name, (folder.path / file).read_bytes())
    if built.calibration_cache:
        writer.add("calibration.cache", built.calibration_cache.encode())
    if audited is not None:
        writer.add(AUDIT, audited.to_json().encode())
    if built.messages:
        writer.add(BUILD_LOG, "\n".join((*built.messages, "")).encode("utf-8", "replace"))
    engine = json.loads(json.dumps(asdict(options.engine), default=str))
    key = json.dumps([folder.content.key, candidate.name, caps.name, caps.version, engine], sort_keys=True)
    fields: dict[str, Any] = {name: getattr(manifest, name) for name in Manifest.model_fields}
    backend = manifest.backend.model_copy(
        update={
            "version": caps.version,
            "sms": built.sms,
            "version_compatible": options.engine.version_compatible,
            "hardware_compatible": options.engine.hardware_compatible,
            "tf32": caps.tf32 and options.engine.tf32,
        }
    )
    fields.update(
        backend=backend,
        audit=None
        if audited is None
        else AuditPart(
            **{name: getattr(audited, name) for name in ("int8", "fp8", "fp16", "fp32")},
            float_by_backend=tuple(
                FloatConvPart(name=conv.name, got=conv.got, reason=conv.reason) for conv in audited.departures
            ),
        ),
        command={**manifest.command, "engine": engine},
        portable=None if candidate.implicit else PORTABLE if apart else own,
        candidates=parts,
        content_hash=hashlib.sha256(key.encode()).hexdigest(),
    )
    return writer.commit(fields)
