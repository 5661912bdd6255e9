"""Corrections: they keep the accuracy of a detector whose convolutions run in INT8, without training.

Each correction is a file and a line of :data:`REGISTRY`; :mod:`trtdet.quantization.corrections.base` says how to add
one. All statistics come from the float model. Each pass decodes the calibration images anew, so memory does not grow
with their number. Every fourth image is held back: on these images each way to quantise a layer is measured at the
layer's output, then whole networks at the decoded boxes and scores. A correction is kept only if it lowers the error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray

from trtdet.calibration import Ranges, expose
from trtdet.errors import ConfigError
from trtdet.options.fields import EFFORTS
from trtdet.quantization.corrections.base import Correction
from trtdet.quantization.corrections.bias import Bias
from trtdet.quantization.corrections.gate import QuantizedForm, Task, compare
from trtdet.quantization.corrections.head_ranges import HeadRange, Start, head_noise
from trtdet.quantization.corrections.policies import Corrected, judge
from trtdet.quantization.corrections.reconstruct import Reconstruct
from trtdet.quantization.corrections.rounding import Round
from trtdet.quantization.corrections.smooth import Smooth
from trtdet.quantization.corrections.trials import Site, batches, find_sites
from trtdet.quantization.placement import QdqPlacement
from trtdet.quantization.sources import Sources, held_back

REGISTRY: tuple[Correction, ...] = (HeadRange(), Smooth(), Round(), Bias(), Reconstruct())
"""All corrections, in the order in which they are tried and reported."""

CORRECTIONS = tuple(correction.name for correction in REGISTRY)  # their names in ``--effort``

DEFAULT_CORRECTIONS = EFFORTS["default"]

_LITTLE = 0.8
"""Share of a rule's noise at the detections from which on a channel map gains too little."""


def correct(
    model: onnx.ModelProto,
    placement: QdqPlacement,
    candidates: Mapping[str, Ranges],
    names: Sequence[str],
    sources: Sources,
    start: Start = Start(),
) -> Corrected:
    """Chooses, for each tensor and convolution, the corrections that lower the error on held-back images.

    Args:
        model: the float model that ``placement`` belongs to.
        candidates: ranges by rule; the first is the reference for the others and for the corrections.
        names: allowed corrections, out of :data:`CORRECTIONS`; may be empty.

    Raises:
        ConfigError: an unknown correction, or fewer than two images.
        ModelError: weights are not finite.
    """
    registered = [correction.name for correction in REGISTRY]
    unknown = [name for name in names if name not in registered]
    if unknown:
        raise ConfigError(f"no correction '{unknown[0]}'; allowed: none, or some of {', '.join(registered)}")
    enabled = tuple(correction for correction in REGISTRY if correction.name in names)
    fit, held = held_back(sources.images)
    task = Task(
        model,
        placement=placement,
        candidates=candidates,
        corrections=enabled,
        fit=fit,
        held=held,
        sources=sources,
        start=start,
    )
    sites = find_sites(model, placement, enabled, parted=start.parted)
    for batch in batches(sites):
        # Moments come from the fit images; extremes, like the rules' thresholds, from all images.
        for site, value, seed in _activations(task, batch, [*fit, *held], stage="moments"):
            site.add_moments(value, seed if seed < len(fit) else None)
        for site in batch:
            site.prepare(candidates, everywhere=start.noise is not None)
    _narrow(task, sites)
    for site, value, seed in _activations(task, sites, fit, stage="means"):
        site.add_means(value, seed)
    for site, value, seed in _activations(task, sites, held, stage="held-back images"):
        site.add_errors(value, seed)
    for site in sites:
        site.settle()
    return judge(task, sites)


def _activations(
    task: Task, sites: Sequence[Site], images: Sequence[Path], stage: str
) -> Iterator[tuple[Site, NDArray[np.float32], int]]:
    """Each image's activation at each site, with the image's number as the seed of its samples."""
    exposed = expose(task.model, list(dict.fromkeys(site.tensor for site in sites)))
    for seed, (outputs,) in enumerate(task.sources.outputs([exposed], images, f"correcting: {stage}")):
        for site in sites:
            yield site, outputs[site.tensor], seed


def judged_beside(
    model: onnx.ModelProto, placement: QdqPlacement, plain: Ranges, corrected: Corrected, sources: Sources
) -> Corrected | None:
    """Compares corrections that do not depend on a rule with the ranges ``plain`` of another rule. Returns
    ``corrected`` with a new sentence on the output error, or None if it is no better than ``plain``."""
    fit, held = held_back(sources.images)
    task = Task(model, placement, {plain.rule: plain}, corrections=(), fit=fit, held=held, sources=sources)
    forms = (
        QuantizedForm(f"the plain rule '{plain.rule}'", plain),
        QuantizedForm("corrected", corrected.ranges, corrected.corrections),
    )
    verdict = compare(task, forms)
    return replace(corrected, summary=(*corrected.summary[:-1], verdict.sentences()[-1])) if verdict.kept else None


def _narrow(task: Task, sites: Sequence[Site]) -> None:
    """Gives each channel map its range of least noise at the detections, and each trial its noise there. Maps that
    hardly lower it go: a layer's error, which they lower, weighs outputs that matter little like the others."""
    plain = task.start.noise
    if plain is None:
        return
    judged = [(plain, site, trial) for site in sites if site.format == "int8" for trial in site.rules]
    maps = {site.tensor: trial.map for site in sites for trial in site.mapped}
    if maps:
        readers = {tensor: task.placement.readers[tensor] for tensor in maps}
        placement = replace(task.placement, activations=tuple(maps), readers=readers)
        mapped = head_noise(task.model, placement, task.first, sources=task.sources, maps=maps, before=plain)
        for site in sites:
            for trial in site.mapped:
                trial.map = replace(trial.map, amax=mapped.best(site.tensor))
                least = min(plain.noise(site.tensor, rule.map.amax) for rule in site.rules)
                if mapped.noise(site.tensor, trial.map.amax) > _LITTLE * least:
                    site.trials.remove(trial)
                else:
                    judged.append((mapped, site, trial))
    for noise, site, trial in judged:
        trial.head, trial.cut = noise.noise(site.tensor, trial.map.amax), noise.cut(site.tensor, trial.map.amax)
