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
from trtdet.quantization.corrections.asymmetric import Asymmetric
from trtdet.quantization.corrections.base import Correction
from trtdet.quantization.corrections.bias import Bias
from trtdet.quantization.corrections.gate import QuantizedForm, Task, compare
from trtdet.quantization.corrections.head_ranges import HeadRange, Start, head_noise
from trtdet.quantization.corrections.policies import Corrected, judge
from trtdet.quantization.corrections.reconstruct import Reconstruct
from trtdet.quantization.corrections.rounding import Round
from trtdet.quantization.corrections.smooth import Smooth
from trtdet.quantization.corrections.trials import Site, batches, find_sites
from trtdet.quantization.head_noise import FRACTIONS, HeadNoise
from trtdet.quantization.placement import QdqPlacement
from trtdet.quantization.sources import Sources, held_back

REGISTRY: tuple[Correction, ...] = (HeadRange(), Smooth(), Round(), Bias(), Reconstruct(), Asymmetric())
"""All corrections, in the order in which they are tried and reported."""

CORRECTIONS = tuple(correction.name for correction in REGISTRY)  # their names in ``--effort``

DEFAULT_CORRECTIONS = EFFORTS["default"]

_LITTLE = 0.8
"""Share of a rule's noise at the detections from which on a channel map gains too little."""

_LARGE = 0.1
"""Share of all noise at the detections from which on each channel of a tensor gets its own range."""

_FEWEST = 24
"""Images from which on each channel may have its own range; it was measured with 36 and with 48."""


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
    noise, narrowed = None, {}
    for number, batch in enumerate(batches(sites)):
        if number > 0:
            for site, value, seed in _activations(task, batch, fit, stage="moments"):
                site.add_samples(value, seed)
        else:
            # Moments come from the fit images; extremes, like the rules' thresholds, from all images, and of all sites
            # in this pass, so that one pass of gradients judges the channels of all.
            here = frozenset(batch)
            for site, value, seed in _activations(task, sites, [*fit, *held], stage="moments"):
                site.add_moments(value, seed if site in here and seed < len(fit) else None)
            noise = _channel_noise(task, sites)
            narrowed = _narrowed(task, sites, noise)
        for site in batch:
            site.prepare(candidates, everywhere=start.noise is not None, reach=narrowed.get(site.tensor))
            if start.noise is not None:
                _judge_ranges(site, start.noise, noise)
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


def _channel_noise(task: Task, sites: Sequence[Site]) -> HeadNoise | None:
    """How rounding and clipping each channel of the tensors that may be mapped moves the detections."""
    reach = {site.tensor: site.reach() for site in sites if site.mappable}
    reach = {tensor: channels for tensor, channels in reach.items() if channels.max() > 0}
    if task.start.noise is None or not reach:
        return None
    readers = {tensor: task.placement.readers[tensor] for tensor in reach}
    placement = replace(task.placement, activations=tuple(reach), readers=readers)
    return head_noise(task.model, placement, task.first, sources=task.sources, reach=reach, before=task.start.noise)


def _narrowed(task: Task, sites: Sequence[Site], channels: HeadNoise | None) -> dict[str, NDArray[np.float64]]:
    """What channel maps are to represent of each channel, float64 (C,), where it is not all: of the few tensors whose
    rounding makes most of the noise at the detections, each channel's range of least noise. Where a tensor matters
    less, so do its channels, and few images do not tell how far each has to reach."""
    plain = task.start.noise
    if plain is None or channels is None or len(task.fit) < _FEWEST:
        return {}
    least = {}
    for site in (site for site in sites if site.format == "int8"):
        rules = [plain.noise(site.tensor, ranges.tensors[site.tensor].amax) for ranges in task.candidates.values()]
        mapped = [channels.noise_of(site.tensor, site.reach()).min()] if site.tensor in channels.tensors else []
        least[site.tensor] = min([*rules, *mapped])
    large = [tensor for tensor, noise in least.items() if noise > _LARGE * sum(least.values())]
    return {tensor: channels.narrowest(tensor) for tensor in large if tensor in channels.tensors}


def _judge_ranges(site: Site, plain: HeadNoise, channels: HeadNoise | None) -> None:
    """Gives a site's channel map its range of least noise at the detections, and each trial its noise there. A map that
    hardly lowers it goes: a layer's error, which it lowers, weighs outputs that matter little like the others."""
    if site.format != "int8":
        return
    for trial in site.rules:
        amax = trial.map.amax
        trial.head, trial.cut = plain.noise(site.tensor, amax), plain.cut(site.tensor, amax)
    least = min(trial.head for trial in site.rules)
    for trial in site.mapped:
        scale = trial.map.scale
        assert channels is not None and scale is not None
        limits = trial.map.amax / scale
        noise = channels.noise_of(site.tensor, limits)
        best = int(noise.argmin())
        if noise[best] > _LITTLE * least:
            site.trials.remove(trial)
            continue
        share = float(FRACTIONS[best])
        trial.map, trial.head = replace(trial.map, amax=share * trial.map.amax), float(noise[best])
        cut = channels.cut(site.tensor, share * limits)
        trial.cut = None if cut is None else scale * cut
