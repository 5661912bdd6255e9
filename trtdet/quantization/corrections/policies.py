"""Policies that combine the corrections of all layers; the gate chooses between them."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from trtdet.calibration import Ranges
from trtdet.errors import ModelError, TrtdetWarning
from trtdet.quantization.corrections.asymmetric import Asymmetric
from trtdet.quantization.corrections.base import Correction, Network
from trtdet.quantization.corrections.gate import QuantizedForm, Task, Verdict, compare
from trtdet.quantization.corrections.head_ranges import HeadRange
from trtdet.quantization.corrections.trials import Choice, Pick, Site
from trtdet.quantization.precision import PrecisionPlan
from trtdet.quantization.qdq import Corrections

POLICIES = {
    "textbook": "no channel maps, every rounding",
    "few": "channel maps where rounding reaches the head most, every other correction",
    "layers": "each kept where it lowers its layer's error",
    "mapped": "channel maps everywhere, the others where they lower their layer's error",
    "all": "every correction in every layer",
}

SEEN = "biases for what the head sees"
"""Biases compensate the part of clipping that reaches the detections, not its mean."""

_FEW = 1.15  # limit for ``few``: its noise at the detections, as a multiple of the noise with all channel maps

_HOPELESS = 2.0
"""A form without channel maps is not learned if its error is this many times the best; learning removes about a
third."""


@dataclass(frozen=True, eq=False)
class Corrected:
    """Result of the corrections."""

    ranges: Ranges  # the thresholds of the rule; with ``auto``, of the best rule of each tensor
    corrections: Corrections  # replace the plain form; empty if none was kept
    plan: PrecisionPlan  # the precision plan with the corrections of each convolution
    summary: tuple[str, ...]  # one sentence for each kind of correction, and one for the output error


@dataclass(frozen=True, eq=False)
class _Together:
    """All layers' corrections under one policy: the choice for each site, and later corrections by convolution."""

    policy: str
    choices: tuple[Choice, ...]
    form: QuantizedForm
    rebuilt: Mapping[str, str] = field(default_factory=dict)


def judge(task: Task, sites: Sequence[Site]) -> Corrected:
    """The policy of least output error on the held-back images, or the plain rule if none lowers the error."""
    plain = QuantizedForm(f"the plain rule '{task.plain.rule}'", task.plain)
    policies = [name for name in POLICIES if task.start.noise is not None or name not in ("textbook", "few")]
    first = {name: _put_together(task, sites, name) for name in (policies if task.corrections else ["layers"])}
    # Biases for means can hide which policy is best, as they add the largest error where much is clipped.
    ways = [_with_seen_biases(task, sites, way) or way for way in first.values()]
    verdict = compare(task, [plain, *(way.form for way in ways)])
    starts = _starts(ways, verdict)
    usual = [first[way.policy] for way in starts if first[way.policy] is not way]
    if usual:
        ways = [*starts, *usual]
        verdict = compare(task, [plain, *(way.form for way in ways)])
    failed = []
    for correction in [correction for correction in task.corrections if correction.needs_network]:
        try:
            rebuilt = _rebuilt(task, sites, ways, verdict=verdict, correction=correction)
        except ModelError as error:
            failed.append(f"{correction.name} not tried: {error}")
            continue
        if rebuilt:
            ways = [*ways[verdict.kept - 1 : verdict.kept], *rebuilt]
            verdict = compare(task, [plain, *(way.form for way in ways)])
    *rejected, figures = verdict.sentences()
    doubt = verdict.doubt()
    if doubt:
        warnings.warn(doubt, TrtdetWarning, stacklevel=4)
    if verdict.kept == 0:
        if not rejected:
            warnings.warn(
                f"corrected, the {figures}: {plain.name} stands; are the calibration images like those the detector "
                "was trained on?",
                TrtdetWarning,
                stacklevel=4,
            )
        summary = (*failed, *rejected, f"none kept: {figures}")
        return Corrected(plain.ranges, corrections=plain.corrections, plan=task.placement.plan, summary=summary)
    way = ways[verdict.kept - 1]
    steps = {}
    for site, choice in zip(sites, way.choices, strict=True):
        steps.update(site.steps(choice))
    entries = {
        name: replace(entry, corrections=steps.get(name, ())) for name, entry in task.placement.plan.entries.items()
    }
    how = [way.form.name] if task.corrections else []
    summary = (*_summary(task, sites, way), *failed, *how, *rejected, figures)
    return Corrected(way.form.ranges, corrections=way.form.corrections, plan=PrecisionPlan(entries), summary=summary)


def _errors(ways: Sequence[_Together], verdict: Verdict) -> dict[_Together, float]:
    return {way: error.distance for way, error in zip(ways, verdict.errors[1:], strict=True)}


def _starts(ways: Sequence[_Together], verdict: Verdict) -> list[_Together]:
    """The best policy that is not the plain rule, and the best of the others, which has channel maps if the first has
    none."""
    errors = _errors(ways, verdict)
    best = ways[verdict.kept - 1] if verdict.kept else min(ways, key=errors.__getitem__)
    others = [way for way in ways if (way.policy == "textbook") != (best.policy == "textbook")]
    return [best, *sorted(others, key=errors.__getitem__)[:1]]


def _with_seen_biases(task: Task, sites: Sequence[Site], way: _Together) -> _Together | None:
    """The same policy with biases that compensate only the part of clipping that reaches the detections."""
    if task.start.noise is None:
        return None
    before, weights, choices = way.form.corrections, {}, []
    for site, choice in zip(sites, way.choices, strict=True):
        last = len(choice.trial.offsets) - 1
        picks = {name: Pick(pick.rounding, last) for name, pick in choice.picks.items()}
        choices.append(replace(choice, picks=picks))
        weights.update(site.rounded(choices[-1], seen=True))
    if all(rounded.same(before.weights.get(name)) for name, rounded in weights.items()):
        return None
    form = replace(way.form, name=f"{way.form.name}, {SEEN}", corrections=replace(before, weights=weights))
    return replace(way, choices=tuple(choices), form=form)


def _rebuilt(
    task: Task, sites: Sequence[Site], ways: Sequence[_Together], *, verdict: Verdict, correction: Correction
) -> list[_Together]:
    """Applies a correction of the whole network to the best policies with and without channel maps; none where it
    changes nothing. Raises ModelError if it cannot be applied."""
    best, *others = _starts(ways, verdict)
    errors = _errors(ways, verdict)
    plain = [way for way in others if way.policy == "textbook" and errors[way] < _HOPELESS * errors[best]]
    rebuilt = []
    for way in (best, *plain):
        form = way.form
        lowest = {site.tensor: site.low(site.tensor in form.corrections.tensors, task.start.fused) for site in sites}
        network = Network(
            model=task.model,
            placement=task.placement.integers,
            ranges=form.ranges,
            corrections=form.corrections,
            together=task.start.together,
            images=task.fit,
            sources=task.sources,
            low={tensor: low for tensor, low in lowest.items() if low is not None},
        )
        ranges, corrections = correction.reconstruct(network)
        if corrections is form.corrections:
            continue
        before, after = form.corrections.weights, corrections.weights
        changed = [name for name, rounded in after.items() if not rounded.same(before.get(name))]
        form = QuantizedForm(f"{form.name}, {correction.name}", ranges, corrections)
        rebuilt_by = {**way.rebuilt, **dict.fromkeys(changed, correction.name)}
        rebuilt.append(replace(way, form=form, rebuilt=rebuilt_by))
    return rebuilt


def worst(sites: Sequence[Site]) -> frozenset[str]:
    """The fewest tensors whose channel maps bring the noise at the detections close to that of all maps."""
    gains, noise = {}, 0.0
    for site in sites:
        rule = min(site.rules, key=lambda trial: trial.loss())
        noise += rule.head
        for trial in site.worthwhile():
            gains[site.tensor] = rule.head - trial.head
    goal = _FEW * (noise - sum(gain for gain in gains.values() if gain > 0))
    tensors = []
    for tensor in sorted(gains, key=lambda tensor: -gains[tensor]):
        if noise <= goal or gains[tensor] <= 0:
            break
        tensors.append(tensor)
        noise -= gains[tensor]
    return frozenset(tensors)


def choose(site: Site, policy: str, chosen: Collection[str] = ()) -> Choice:
    """The choice of a policy, see :data:`POLICIES`; ``chosen`` are the tensors that ``few`` maps."""
    rule = min(site.rules, key=lambda trial: trial.loss())
    maps = site.worthwhile()
    if policy == "textbook" or (policy == "few" and site.tensor not in chosen):
        options = [rule]
    else:
        options = maps if maps and policy != "layers" else [rule, *maps]
    trial = min(options, key=lambda trial: trial.loss())
    picks = {}
    for name, errors in trial.errors.items():
        if policy == "textbook":
            # With strong clipping an offset would compensate the mean even at places without clipping.
            picks[name] = Pick(errors.shape[0] - 1, 0)
        else:
            best = errors.size - 1 if policy in ("few", "all") else int(errors.argmin())
            picks[name] = Pick(*divmod(best, errors.shape[1]))
    return Choice(rule, trial=trial, picks=picks, left_out=site.too_dear or len(maps) < len(site.mapped))


def _put_together(task: Task, sites: Sequence[Site], policy: str) -> _Together:
    chosen = worst(sites) if policy == "few" else ()
    choices = tuple(choose(site, policy, chosen) for site in sites)
    maps, weights, best = {}, {}, {}
    for site, choice in zip(sites, choices, strict=True):
        weights.update(site.rounded(choice))
        if choice.rule.rule:
            best[site.tensor] = task.candidates[choice.rule.rule].tensors[site.tensor]
        if choice.trial.name:
            maps[site.tensor] = choice.trial.map
    ranges = task.first
    if len(task.candidates) > 1:  # each tensor's from its best rule
        ranges = replace(ranges, rule="auto", percent=None, tensors={**ranges.tensors, **best})
    return _Together(policy, choices, QuantizedForm(POLICIES[policy], ranges, Corrections(maps, weights)))


def _summary(task: Task, sites: Sequence[Site], way: _Together) -> tuple[str, ...]:
    """Sentences on how often each correction was kept and each rule chosen."""
    convs = [(choice.trial, name, pick) for choice in way.choices for name, pick in choice.picks.items()]
    used = [trial.roundings[name][pick.rounding].name for trial, name, pick in convs]
    used += [trial.offsets[pick.offset] for trial, _, pick in convs]
    used += [choice.trial.name for choice in way.choices]
    used += way.rebuilt.values()
    used += [Asymmetric.name for channels in way.form.corrections.tensors.values() if channels.shift]
    pairs = [(site, choice) for site, choice in zip(sites, way.choices, strict=True) if site.format == "int8"]
    total = {"tensors": len(pairs), "convs": len(convs)}
    plain, written = task.plain.tensors, way.form.ranges.tensors
    used += [
        HeadRange.name
        for site, choice in pairs
        if not choice.trial.name and plain[site.tensor].amax != written[site.tensor].amax
    ]
    sentences = [
        f"{correction.name}: {used.count(correction.name)} of {total[correction.counts]} {correction.counts}"
        for correction in task.corrections
    ]
    floats = sum(len(site.convs) for site in sites if site.format == "fp8")
    meaningless = [correction.name for correction in task.corrections if correction.equal_steps]
    if floats and meaningless:
        sentences.append(
            f"not for the {floats} products in FP8, whose steps grow with the values: {', '.join(meaningless)}"
        )
    left_out = sum(choice.left_out for choice in way.choices)
    if left_out:
        sentences.append(
            f"maps left out: {left_out} of {total['tensors']} tensors, where FP16 convolutions would buy more for the "
            "bytes of a Mul"
        )
    if task.start.reason:
        sentences.append(f"{HeadRange.name} not tried: {task.start.reason}")
    if way.form.ranges.rule == "auto":
        rules = [choice.rule.rule for _, choice in pairs]
        sentences.append("rules: " + ", ".join(f"{rule} {rules.count(rule)}" for rule in dict.fromkeys(sorted(rules))))
    return tuple(sentences)
