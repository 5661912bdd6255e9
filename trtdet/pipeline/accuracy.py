"""The accuracy report of a bundle: measured on request, and kept in it."""

from __future__ import annotations

import warnings
from dataclasses import replace

from trtdet.data import content_hash
from trtdet.errors import TrtdetWarning
from trtdet.mixed_precision.breakdown import Breakdown, break_down
from trtdet.pipeline.assembly import Assembled, Job, networks_of, validated
from trtdet.pipeline.stages.networks import Network
from trtdet.progress import Progress, silent
from trtdet.quantization.corrections.sources import held_back

ACCURACY = "accuracy.json"
"""The file of a bundle that keeps the accuracy report."""


def report_accuracy(job: Job, done: Assembled, progress: Progress = silent) -> Breakdown | None:
    """Measures where the error at the head comes from, and adds the report to the bundle.

    A bundle that was there already is corrected once more for it, which gives the same.

    Args:
        job: the build.
        done: its bundle, explicit INT8.
        progress: told of every image and block.

    Returns:
        None where the bundle has a report.
    """
    if ACCURACY in done.bundle.manifest.files:
        return None
    network = done.network or _again(job, progress)
    ready = network.prepared
    assert ready is not None, "validation refuses what is not calibrated here"
    held = tuple(held_back(ready.calibrated.paths))
    subject = replace(
        ready.subject(1),
        placement=ready.placement.following(network.plan),
        images=held,
        images_sha256=content_hash(held),
    )
    found = break_down(subject, ready.calibrated.ranges, progress)
    done.bundle.add(ACCURACY, found.to_json().encode())
    return found


def _again(job: Job, progress: Progress) -> Network:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TrtdetWarning)  # given when the bundle was built
        known = validated(job)
        return networks_of(known, known.backend.capabilities, progress)[0]
