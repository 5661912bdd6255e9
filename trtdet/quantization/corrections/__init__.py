"""Corrections: what keeps the accuracy of a detector whose convolutions all run in INT8, with no training.

Each is a file and a line of :data:`REGISTRY`; :mod:`trtdet.quantization.corrections.base` says how another is added.
Everything is worked out from the float model over calibration images, in passes over images that are decoded anew each
time, so that memory does not grow with their number. Where ranges come from gradients, they are known before, see
:func:`sense`; the range of what is mapped follows after the first of the other four passes:

1. the extremes of every channel, from all images as the thresholds of the rules are, and the second moments of every
   convolution's windows at random places;
2. the mean of what is left after rounding, for every way a tensor could be quantised;
3. on images held back from moments and means, the error of every way at the output of every convolution: what lowers it
   is kept, everything else is left as the threshold rule has it;
4. on the held-back images, the error at the decoded boxes and scores of the whole, for a few ways to put the layers'
   corrections together: the best is taken, and only if it is better than none.

Every fourth image is held back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import onnx

from trtdet.calibration import Ranges, expose
from trtdet.errors import ConfigError
from trtdet.quantization.corrections.base import Correction
from trtdet.quantization.corrections.bias import Bias
from trtdet.quantization.corrections.gate import Corrected, Task, Whole, compare
from trtdet.quantization.corrections.head_ranges import HeadRange, Start, head_noise, sense
from trtdet.quantization.corrections.policies import judge
from trtdet.quantization.corrections.reconstruct import Reconstruct
from trtdet.quantization.corrections.rounding import Round
from trtdet.quantization.corrections.shift import Shift
from trtdet.quantization.corrections.smooth import Smooth
from trtdet.quantization.corrections.sources import Sources
from trtdet.quantization.corrections.trials import Site, batches, find_sites
from trtdet.quantization.placement import QdqPlacement

__all__ = [
    "CORRECTIONS",
    "DEFAULT_CORRECTIONS",
    "EFFORTS",
    "REGISTRY",
    "Corrected",
    "HeadRange",
    "Sources",
    "Start",
    "correct",
    "judged_beside",
    "sense",
]

REGISTRY: tuple[Correction, ...] = (HeadRange(), Smooth(), Shift(), Round(), Bias(), Reconstruct())
"""Every correction, in the order in which they are tried and reported."""

CORRECTIONS = tuple(correction.name for correction in REGISTRY)
"""Every correction by the name that ``--correct`` takes."""

EFFORTS: Mapping[str, tuple[str, ...]] = {
    "quick": ("smooth", "round", "bias"),
    "default": ("range", "smooth", "round", "bias"),
    "thorough": ("range", "smooth", "round", "bias", "reconstruct"),
}
"""The corrections that ``--correct auto`` stands for, by ``--effort``: they put no node between INT8 convolutions but a
Mul where it pays. A shift needs an Add behind the activation function and a Pad before each convolution that pads."""

DEFAULT_CORRECTIONS = EFFORTS["default"]


def correct(
    model: onnx.ModelProto,
    placement: QdqPlacement,
    candidates: Mapping[str, Ranges],
    names: Sequence[str],
    sources: Sources,
    start: Start = Start(),
) -> Corrected:
    """Chooses, tensor by tensor and convolution by convolution, what lowers the error on images held back.

    Args:
        model: the float model that ``placement`` was made for.
        placement: where Q/DQ pairs go.
        candidates: ranges by rule; the first is what the others and the corrections are compared with.
        names: of the corrections that may be used, out of :data:`CORRECTIONS`; may be empty.
        sources: images and how to run them.
        start: what is known before, such as the ranges that the corrections are compared with.

    Raises:
        ConfigError: an unknown correction, or fewer than two images.
        ModelError: weights are not finite.
    """
    known = [correction.name for correction in REGISTRY]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigError(f"no correction '{unknown[0]}'; allowed: auto, none, or some of {', '.join(known)}")
    enabled = tuple(correction for correction in REGISTRY if correction.name in names)
    task = Task(model, placement, candidates, enabled, *sources.split(), sources, start)
    sites = find_sites(model, placement, enabled, start.parted)
    for batch in batches(sites):
        _measure(task, batch)
        for site in batch:
            site.prepare(candidates, everywhere=start.noise is not None)
    _narrow(task, sites)
    exposed = expose(model, list(dict.fromkeys(site.tensor for site in sites)))
    for seed, (found,) in enumerate(sources.outputs([exposed], task.fit, "correcting: means")):
        for site in sites:
            site.add_means(found[site.tensor], seed)
    for seed, (found,) in enumerate(sources.outputs([exposed], task.held, "correcting: held-back images")):
        for site in sites:
            site.add_errors(found[site.tensor], seed)
    for site in sites:
        site.settle()
    return judge(task, sites)


def judged_beside(
    model: onnx.ModelProto, placement: QdqPlacement, plain: Ranges, found: Corrected, sources: Sources
) -> Corrected | None:
    """Corrections that do not depend on a rule, compared with the ranges of another than they were compared with.

    Args:
        model: the float model.
        placement: where Q/DQ pairs go.
        plain: the ranges of the other rule.
        found: the corrections.
        sources: images and how to run them.

    Returns:
        The same with a sentence of its own on the error at the head; None where they are no better than the rule.
    """
    task = Task(model, placement, {plain.rule: plain}, (), *sources.split(), sources)
    wholes = (Whole(f"the plain rule '{plain.rule}'", plain), Whole("corrected", found.ranges, found.corrections))
    verdict = compare(task, wholes)
    if not verdict.kept:
        return None
    return replace(found, summary=(*found.summary[:-1], verdict.sentences()[-1]))


def _measure(task: Task, sites: Sequence[Site]) -> None:
    """Moments from the images to fit on; extremes, as the rules' thresholds, from all images."""
    exposed = expose(task.model, list(dict.fromkeys(site.tensor for site in sites)))
    images = [*task.fit, *task.held]
    for seed, (found,) in enumerate(task.sources.outputs([exposed], images, "correcting: moments")):
        for site in sites:
            site.add_moments(found[site.tensor], seed if seed < len(task.fit) else None)


def _narrow(task: Task, sites: Sequence[Site]) -> None:
    """Gives each channel map the range of least noise at the head, and each trial what it does there."""
    plain = task.start.noise
    if plain is None:
        return
    for site in sites:
        for trial in site.rules if site.format == "int8" else ():
            trial.head = plain.noise(site.tensor, trial.map.amax)
            trial.cut = plain.cut(site.tensor, trial.map.amax)
    maps = {site.tensor: trial.map for site in sites for trial in site.mapped}
    if not maps:
        return
    readers = {tensor: task.placement.readers[tensor] for tensor in maps}
    placement = replace(task.placement, activations=tuple(maps), readers=readers)
    mapped = head_noise(task.model, placement, task.first, task.sources, maps)
    for site in sites:
        for trial in site.mapped:
            trial.map = replace(trial.map, amax=mapped.best(site.tensor))
            trial.head = mapped.noise(site.tensor, trial.map.amax)
            trial.cut = mapped.cut(site.tensor, trial.map.amax)
