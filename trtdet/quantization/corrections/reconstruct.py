"""``reconstruct``: learns all integers, scales and biases together, by their effect on the detections. It learns how
many equal steps a weight moves. FP8 has no equal steps, so products in FP8 stay as they are."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from trtdet.calibration import Ranges
from trtdet.data import content_hash
from trtdet.errors import ModelError
from trtdet.quantization.corrections.base import Correction, Network
from trtdet.quantization.gradients import NO_TORCH, available, calm_threads
from trtdet.quantization.head_error import chooses_rows
from trtdet.quantization.qdq import Corrections


@dataclass(frozen=True)
class Reconstruct(Correction):
    """Learns every number of the INT8 network; see :mod:`trtdet.quantization.gradients.reconstruction`."""

    name: ClassVar[str] = "reconstruct"
    needs_network: ClassVar[bool] = True
    equal_steps: ClassVar[bool] = True

    def reconstruct(self, network: Network) -> tuple[Ranges, Corrections]:
        if not available():
            raise ModelError(NO_TORCH)
        calm_threads()
        from trtdet.quantization.gradients.learned import RATES, Learned
        from trtdet.quantization.gradients.reconstruction import Reconstruction, Schedule

        schedule, head, images = Schedule(), network.sources.head, network.images
        learned = Learned(
            network.model,
            placement=network.placement,
            start=(network.ranges, network.corrections),
            together=network.together,
            outputs=head.names,
        )
        chosen = chooses_rows(network.model, head.names)
        work = Reconstruction(learned, head=head, schedule=schedule, images=len(images), chosen=chosen)
        # The digest covers everything that the result depends on.
        digest = hashlib.sha256(network.model.SerializeToString(deterministic=True))
        digest.update(content_hash(images).encode())
        plan = (network.placement.plan.names("int8"), network.placement.activations, network.together)
        digest.update(repr((schedule, RATES, plan, network.sources.preprocess, head)).encode())
        digest.update(network.ranges.to_json().encode())
        network.corrections.hash_into(digest)

        def shown(index: int) -> Iterator[NDArray[np.float32]]:
            """The images of one pass in a random order, with the progress over all passes."""
            order = [images[place] for place in np.random.default_rng(index).permutation(len(images))]
            before, total = index * len(images), schedule.passes * len(images)
            progress = network.sources.progress
            sources = replace(network.sources, progress=lambda stage, done, _: progress(stage, before + done, total))
            return sources.batches(network.model, order, "correcting: reconstruction")

        work.learn(shown, network.sources.unfinished, digest.hexdigest())
        return learned.written()
