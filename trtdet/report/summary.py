"""The first screen of a bundle: whether it can ship, the figures behind the answer, and its layers by precision."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trtdet.audit.roofline import Estimate
from trtdet.audit.traffic import PRECISIONS, Flow
from trtdet.bundle import CandidatePart
from trtdet.evaluation.comparison import NEGLIGIBLE
from trtdet.evaluation.parts import NAMES, Of
from trtdet.quantization.macs import multiply_adds
from trtdet.report.document import LayerBar, LayerBars, Summary, Tile, Tone
from trtdet.report.runs import Run
from trtdet.report.sections.verdicts import bundle_notes, next_steps
from trtdet.tables import counted

_CLEAR_LOSS = 0.01
"""A loss of mAP, as a fraction, that is marked as speaking against shipping if all of the interval lies beyond it."""

_NOTHING = 0.01
"""A score of the reference, as a fraction, below which no loss of mAP can show."""


@dataclass(frozen=True)
class MeasuredScore:
    """Accuracy of boxes or a part, as fractions; ``difference``, ``low`` and ``high`` are None without a reference."""

    name: str
    value: float
    difference: float | None
    low: float | None
    high: float | None
    basis: str

    @property
    def tells_nothing(self) -> bool:
        """Whether the reference finds next to nothing, so that there is nothing to lose."""
        return self.difference is not None and self.value - self.difference < _NOTHING

    @property
    def tone(self) -> Tone:
        """``bad`` for a clear loss, ``open`` for a loss that the interval does not exclude."""
        if self.low is None or self.high is None:
            return ""
        if self.tells_nothing:
            return "open"
        return "bad" if self.high < -_CLEAR_LOSS else "good" if self.low > -NEGLIGIBLE else "open"

    @property
    def spread(self) -> str:
        """The difference with its interval, in points."""
        if self.difference is None or self.low is None or self.high is None:
            return ""
        # Rounded first, and no zero is negative.
        difference, low, high = (round(100 * value, 2) + 0.0 for value in (self.difference, self.low, self.high))
        return f"{difference:+.2f} ({low:+.2f} .. {high:+.2f})"


@dataclass(frozen=True)
class Speed:
    """Speed of the bundle divided by that of ``against``; ``basis`` names the machine and the batch."""

    value: float
    low: float
    high: float
    against: str
    how: Literal["measured", "estimated"]
    basis: str

    def __str__(self) -> str:
        times = f"{self.value:.2f} times as fast as {self.against} ({self.low:.2f} .. {self.high:.2f})"
        return f"INT8 is {times}, {self.how}, {self.basis}"


def summary_of(run: Run, flow: Flow | None, estimate: Estimate | None) -> Summary:
    """The first screen of a bundle.

    ``flow`` and ``estimate`` are of its engine's layers, None for a bundle without an audit.
    """
    assert run.bundle is not None
    manifest = run.bundle.manifest
    scores, speed, warnings = scores_of(run), speed_of(run), warnings_of(run)
    plan = run.plan
    assert plan is not None
    precisions = {name: entry.number_format for name, entry in plan.entries.items()}
    precisions |= flow.precisions if flow is not None else {}
    network = network_bar(run, precisions, built=flow is not None)
    answer, reason, tone = answer_of(run, scores=scores, speed=speed)
    shape = "x".join(str(size) for size in manifest.input.shape.opt)
    backend = f"{manifest.backend.name} {manifest.backend.version}"
    return Summary(
        run.name,
        subtitle=f"{manifest.model.name}, {manifest.shipped.upper()} for {backend}, input {shape}",
        answer=answer,
        reason=reason,
        tone=tone,
        tiles=(
            *(Tile(one.name, f"{100 * one.value:.2f}", one.spread, basis=one.basis, tone=one.tone) for one in scores),
            *([] if scores else [Tile("mAP", "-", basis="not measured", tone="open")]),
            *_cost_tiles(run, speed, estimate),
            _int8_tile(network, built=flow is not None),
            Tile(
                "Warnings",
                str(len(warnings)),
                basis="listed below" if warnings else "",
                tone="open" if warnings else "good",
            ),
        ),
        network=network,
        times=time_bars(run, precisions, estimate),
        warnings=warnings,
        steps=tuple(f"{step}: {reason}" for step, reason in next_steps(run)),
        notes=bundle_notes(run),
    )


def scores_of(run: Run) -> list[MeasuredScore]:
    """Accuracy of boxes and of each part: of the evaluation, else of the build's comparison, else of its candidates."""
    assert run.bundle is not None
    worth = run.worth or {}
    if run.scores is not None:
        against = run.scores.get("against") or {}
        where = f"{Path(against['file']).name}, " if "file" in against else ""
        where += counted(run.scores["images"])
        if run.scores["map"] is None:
            return _agreements(against, where)
        own = {of: run.scores if of == "boxes" else run.scores[of] for of in NAMES if of == "boxes" or of in run.scores}
        values = {of: float(one["map"]) for of, one in own.items()}
    elif against := worth.get("comparison") or {}:
        where = f"{worth['against'].upper()}, {counted(against['images'])}"
        parts = {of: against if of == "boxes" else against[of] for of in NAMES if of == "boxes" or of in against}
        values = {of: part["map"] + part["difference"] for of, part in parts.items()}
    else:
        shipped = (part for part in run.bundle.manifest.candidates if part.shipped)
        return [score for part in shipped for score in _candidate_scores(part)]
    return [
        _score(of, value, against if of == "boxes" else against.get(of) or {}, where=where)
        for of, value in values.items()
    ]


def _score(of: Of, value: float, against: Mapping[str, Any], where: str) -> MeasuredScore:
    """The score of boxes or a part beside the reference's; ``against`` is empty without one."""
    difference, low, high = (against.get(key) for key in ("difference", "low", "high"))
    basis = where if low is None else f"against {100 * against['map']:.2f} of {where}"
    return MeasuredScore(NAMES[of], value, difference, low=low, high=high, basis=basis)


def _candidate_scores(part: CandidatePart) -> list[MeasuredScore]:
    """The accuracy of a candidate, which was measured against FP32."""
    where = f"FP32, {counted(part.images)}"
    if part.figure == "map":
        boxes = MeasuredScore(
            "mAP", part.value, part.difference, low=part.low, high=part.high, basis=f"against {where}"
        )
        others = [
            MeasuredScore(NAMES[of], one.map, one.difference, low=one.low, high=one.high, basis=f"against {where}")
            for of, one in part.parts.items()
            if one.map is not None
        ]
        return [boxes, *others]
    each = {"Agreement": part} | {f"Agreement of {of.replace('_', ' ')}": one for of, one in part.parts.items()}
    return [
        _agreement(name, 1.0 + one.difference, (1.0 + one.low, 1.0 + one.high), where=where)
        for name, one in each.items()
    ]


def _agreement(name: str, value: float, interval: tuple[float, float], where: str) -> MeasuredScore:
    """An agreement with a reference's detections, which is no loss of mAP."""
    basis = f"90 % interval {100 * interval[0]:.2f} .. {100 * interval[1]:.2f}, {where}"
    return MeasuredScore(name, value, None, low=None, high=None, basis=basis)


def _agreements(against: Mapping[str, Any], where: str) -> list[MeasuredScore]:
    """Agreement with the reference's detections of boxes and of each part, where no image is annotated."""
    each = {"Agreement": against.get("agreement") or {}}
    each |= {f"Agreement of {of.replace('_', ' ')}": one for of, one in against.get("agreement_of_parts", {}).items()}
    known = {name: one for name, one in each.items() if one.get("ap") is not None}
    return [_agreement(name, one["ap"], (one["low"], one["high"]), where=where) for name, one in known.items()]


def speed_of(run: Run) -> Speed | None:
    """Speed against FP16 or the baseline of a benchmark, measured if possible; None if unknown."""
    worth, point = run.worth or {}, None if run.target is None else run.target["points"][0]
    against = "FP16"
    how: Literal["measured", "estimated"] = "measured"
    if run.target is not None and point is not None and point["ratio"]:
        time, basis = point["ratio"], f"{run.target['ran_on']}, batch {point['batch']}"
        against = str((run.benchmark or {})["baseline"])
    elif time := worth.get("latency"):
        basis = f"{worth['ran_on']}, batch {worth['batch']}"
    elif estimate := worth.get("estimate"):
        how, basis = "estimated", f"{estimate['gpu']}, batch {estimate['batch']}"
        time = {"value": estimate["ratio"], "low": estimate["interval"][0], "high": estimate["interval"][1]}
    else:
        return None
    value, low, high = 1 / time["value"], 1 / time["high"], 1 / time["low"]
    return Speed(value, low=low, high=high, against=against, how=how, basis=basis)


def answer_of(run: Run, scores: list[MeasuredScore], speed: Speed | None) -> tuple[str, str, Tone]:
    """Whether the bundle can ship, the reason, and the tone of the answer."""
    assert run.bundle is not None
    manifest, audit = run.bundle.manifest, run.audit
    check, int8 = manifest.input_check or {}, manifest.shipped == "int8"
    against, unknown, losses = [], [], []
    if check.get("warning") and check.get("verdict") not in ("cannot tell", "not done"):
        against.append("the input check finds that the detector does not work as configured")
    if int8 and audit is not None and audit.int8 + audit.fp8 == 0:
        against.append("no convolution runs in INT8")
    if int8 and speed is not None and speed.high < 1:
        against.append(str(speed))
    if not scores and manifest.shipped != "fp32":
        unknown.append("accuracy was not measured")
    elif manifest.shipped != "fp32" and all(score.low is None for score in scores):
        unknown.append("the difference of mAP was not measured")
    unknown += [
        f"{score.name} is {100 * score.value:.2f}: a loss could not show" for score in scores if score.tells_nothing
    ]
    if int8 and speed is None:
        unknown.append("the speed against FP16 was not measured")
    elif int8 and speed is not None and speed.low <= 1 <= speed.high:
        unknown.append(f"{speed}: neither faster nor slower for certain")
    for score in scores:
        if (
            score.tone in ("open", "bad")
            and not score.tells_nothing
            and score.difference is not None
            and score.low is not None
        ):
            lost = f"up to {-100 * score.low:.2f} points of {score.name} may be lost"
            if score.high is not None and score.high < 0:
                lost = f"{-100 * score.difference:.2f} points of {score.name} are lost "
                lost += f"({-100 * score.high:.2f} .. {-100 * score.low:.2f})"
            losses.append(lost)
    if against:
        return "No", "; ".join((*against, *losses)), "bad"
    if any(score.tone == "bad" for score in scores):
        return "If acceptable", "; ".join((*losses, *unknown)), "bad"
    if unknown:
        return "Not known yet", "; ".join((*unknown, *losses)), "open"
    if losses:
        return "If acceptable", "; ".join(losses), "open"
    good = ["no loss is shown"] if any(score.tone == "good" for score in scores) else []
    good += [str(speed)] if int8 and speed is not None else []
    good += ["no layer leaves the precision of the model"] if manifest.shipped == "fp32" else []
    return "Yes", "; ".join(good), "good"


def warnings_of(run: Run) -> tuple[str, ...]:
    """What a reader should know before shipping: of the input check, the audit, the guard and the measurements."""
    assert run.bundle is not None
    manifest, audit, speed = run.bundle.manifest, run.audit, speed_of(run)

    def warnings() -> Iterator[str]:
        if warning := (manifest.input_check or {}).get("warning"):
            yield str(warning)
        if manifest.guard is not None and manifest.guard.shipped != manifest.guard.asked:
            yield f"FP16 is shipped in place of INT8: {manifest.guard.reason}"
        if audit is not None and audit.departures:
            yield f"{counted(len(audit.departures), 'convolution')} not in the planned precision"
            departures = {str(departure) for departure in audit.departures}
            yield from (warning for warning in audit.warnings if warning not in departures)
        elif audit is not None:
            yield from audit.warnings
        if manifest.shipped == "int8" and speed is not None and speed.low <= 1:
            yield str(speed)
        for score in scores_of(run):
            if score.high is not None and score.high < 0:
                yield f"{score.name} is lost: {score.spread}"
        for measured, what in ((run.benchmark, "benchmark"), (run.profile, "profile")):
            yield from (f"{what}: {warning}" for warning in (measured or {}).get("warnings", ()))

    return tuple(warnings())


def network_bar(run: Run, precisions: Mapping[str, str], built: bool) -> LayerBars:
    """The convolutions from left to right: widths by multiply-adds, colours by precision, as built or else planned."""
    plan, model = run.plan, run.model
    assert plan is not None and model is not None
    macs = {name: work.count for name, work in multiply_adds(model).items() if name in plan.entries}
    total = sum(macs.values())
    unit = "multiply-adds" if total else "convolutions"
    bars = []
    for name in plan.entries:
        size, precision = float(macs.get(name, 0) if total else 1), precisions[name]
        share = size / (total or len(plan.entries))
        bars.append(LayerBar(f"{name}: {precision.upper()}, {share:.1%} of the {unit}", precision, size))
    note = f"precision as {'built' if built else 'planned'}"
    return LayerBars(
        "Precision of the network, from input to output", tuple(bars), unit, note=f"width by {unit}, {note}"
    )


def time_bars(run: Run, precisions: Mapping[str, str], estimate: Estimate | None) -> LayerBars | None:
    """The time of each layer in the order of execution, measured if a profile is of what ships, else estimated.

    ``precisions`` are of the convolutions, by name.
    """
    profile = run.profile
    if profile is not None and run.ships(profile["file"]):
        reads = {layer.name: PRECISIONS.get(layer.input, "") for layer in (run.audit.layers if run.audit else ())}
        layers = []
        for layer in profile["layers"]:
            convs = [name for name in layer["onnx"] if name in precisions]
            precision = reads.get(layer["name"], precisions[convs[0]] if convs else "")
            layers.append((convs[0] if convs else layer["name"], layer["type"], precision, layer["ms"]))
        note = f"measured, {profile['ran_on']}, batch {profile['batch']}, {profile['runs']} runs"
    elif estimate is not None:
        layers = [
            (layer.about[0] if layer.about else layer.name, layer.type, PRECISIONS.get(layer.precision, ""), layer.ms)
            for layer in estimate.layers
        ]
        note = f"estimated for {estimate.gpu.name}, batch {estimate.batch}; not measured"
    else:
        return None
    bars = (
        LayerBar(f"{place}: {name[:100]} ({kind}), {precision.upper() or 'other type'}, {ms:.4f} ms", precision, ms)
        for place, (name, kind, precision, ms) in enumerate(layers, 1)
    )
    return LayerBars("Time by layer, in the order of execution", tuple(bars), "ms", note=note, columns=True)


def _cost_tiles(run: Run, speed: Speed | None, estimate: Estimate | None) -> list[Tile]:
    """Speed-up, time and size."""
    assert run.bundle is not None
    manifest, tiles = run.bundle.manifest, []
    guard, worth = manifest.guard, (run.worth or {}).get("estimate") or {}
    if manifest.shipped == "int8":
        if speed is None:
            tiles.append(Tile("Speed-up", "-", basis="not measured", tone="open"))
        else:
            tone: Tone = "good" if speed.low > 1 else "bad" if speed.high < 1 else "open"
            spread = f"({speed.low:.2f} .. {speed.high:.2f})"
            basis = f"against {speed.against}, {speed.basis}"
            tiles.append(Tile("Speed-up", f"{speed.value:.2f}x", spread, basis=basis, tone=tone, how=speed.how))
    elif guard is not None and guard.speedup is not None:
        basis = f"FP16 is shipped in place of it; {guard.on}, batch {guard.batch}"
        tiles.append(Tile("Speed-up", "-", f"of INT8 {guard.speedup:.2f}x", basis=basis, how=guard.how or ""))
    timed = run.target if run.target is not None else run.profile
    if timed is not None and run.ships(timed["file"]):
        point = timed["points"][0] if run.target is not None else timed
        latency, where = point["latency_ms"], f"{timed['ran_on']}, batch {point['batch']}"
        spread = f"stddev {latency['stddev']:.3f}"
        tiles.append(Tile("Time", f"{latency['mean']:.3f} ms", spread, basis=where, how="measured"))
    elif estimate is not None:
        low, high = estimate.interval_ms
        where = f"{estimate.gpu.name}, batch {estimate.batch}"
        tiles.append(Tile("Time", f"{estimate.ms:.3f} ms", f"({low:.2f} .. {high:.2f})", basis=where, how="estimated"))
    shipped = run.shipped
    assert shipped is not None
    twin = f"{worth['fp16']['file_bytes'] / 1e6:.2f} MB in FP16" if worth and run.bundle.engine is not None else ""
    what = "engine file" if run.bundle.engine is not None else "model file"
    return [*tiles, Tile("Size", f"{shipped.stat().st_size / 1e6:.2f} MB", twin, basis=what)]


def _int8_tile(network: LayerBars, built: bool) -> Tile:
    """Share of the multiply-adds in INT8, and the number of convolutions."""
    shares = network.shares()
    share = shares.get("int8", 0.0) + shares.get("fp8", 0.0)
    quantized = sum(bar.precision in ("int8", "fp8") for bar in network.bars)
    basis = f"of the {network.unit}, as {'built' if built else 'planned'}"
    return Tile("In INT8", f"{100 * share:.1f} %", f"{quantized} of {len(network.bars)} convolutions", basis=basis)
