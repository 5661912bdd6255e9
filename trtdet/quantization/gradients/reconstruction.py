"""Reconstruction: integers, scales and biases of a whole INT8 network are learned so that its detections move least.

No label is needed, and no node is added: the float model says what the detections are. Weights are rounded up or down
as it serves the detections (AdaRound, Nagel et al. 2020, arXiv:2004.10568), with inputs as quantised as they will be
(BRECQ, Li et al. 2021, arXiv:2102.05426), by gradients straight through the rounding rather than block by block.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import interpolate

from trtdet.errors import TrtdetWarning
from trtdet.files import writing_atomically
from trtdet.passes import Decoded
from trtdet.quantization.gradients.learned import Learned, Rates
from trtdet.quantization.head_error import SEEN, paired

_ZOOM = 1.6
"""The most that a view is enlarged or reduced by."""

_AVERAGE = 0.9
"""How much of the running error's past is kept at each step."""


@dataclass(frozen=True)
class Schedule:
    """How long and how fast.

    Attributes:
        passes: over the images.
        images: that a step is made of, at least.
        rates: at their height, which is reached after ten steps and left along half a cosine.
    """

    passes: int = 25
    images: int = 4
    rates: Rates = Rates()


class Reconstruction:
    """Learns over images.

    Args:
        learned: the network.
        head: where it holds its boxes and scores.
        schedule: how long and how fast.
        images: in a pass.
        chosen: whether the network chooses its rows, see :func:`trtdet.quantization.head_error.chooses_rows`.
    """

    def __init__(self, learned: Learned, head: Decoded, schedule: Schedule, images: int, chosen: bool = False) -> None:
        self._learned, self._head, self._schedule, self._chosen = learned, head, schedule, chosen
        self.passes = schedule.passes
        self._optimizer = torch.optim.Adam(learned.parameter_groups(schedule.rates), betas=(0.9, 0.99))
        self._rates = [float(group["lr"]) for group in self._optimizer.param_groups]
        self._total = max(1, schedule.passes * images // schedule.images)
        self._steps = self._waiting = 0
        self._sums = torch.zeros(4, dtype=torch.float64)
        self._usual: torch.Tensor | None = None

    def update(self, images: torch.Tensor) -> None:
        """Adds images, float32 (B, 3, H, W), as many as the model takes; every few make a step.

        Raises:
            ModelError: the model cannot be differentiated.
        """
        wanted = self._read(self._learned.in_float(images))
        moved = self._read(self._learned(images))
        if self._chosen:
            wanted, moved = _matched(wanted, moved)
        sums = torch.stack([part.to(torch.float64) for part in _moved(wanted, moved)])
        found = sums.detach().cpu()
        self._sums += found
        # Of a step's sums only the past is known before its last image: an image counts as the usual image does.
        usual = found.clamp(min=1e-12) if self._usual is None else self._usual
        # The derivative of the root of a mean is that of the mean over twice the root.
        square, weight, _, shares = usual.tolist()
        loss = sums[0] / weight / (2 * max(math.sqrt(square / weight), 1e-4)) + sums[2] / shares
        if loss.requires_grad and bool(torch.isfinite(loss)):
            loss.backward()
        self._waiting += len(images)
        if self._waiting >= self._schedule.images:
            self._step()

    def finish_pass(self) -> None:
        """Makes a last step of what no step was made of."""
        if self._waiting:
            self._step()

    def _step(self) -> None:
        share = min(1.0, (self._steps + 1) / 10) * (1 + math.cos(math.pi * min(1.0, self._steps / self._total))) / 2
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * share
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._learned.confine()
        mean = (self._sums / self._waiting).clamp(min=1e-12)
        self._usual = mean if self._usual is None else _AVERAGE * self._usual + (1 - _AVERAGE) * mean
        self._sums.zero_()
        self._steps, self._waiting = self._steps + 1, 0

    def _read(self, found: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        boxes, scores = found[self._head.boxes], found[self._head.scores]
        return boxes, torch.sigmoid(scores) if self._head.logits else scores

    def state(self) -> dict[str, Any]:
        """All that going on needs after a finished pass, for ``torch.save``."""
        return {
            "learned": self._learned.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "steps": self._steps,
            "usual": self._usual,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on from a state of the same network, images and schedule."""
        self._learned.load_state_dict(state["learned"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._steps, self._usual = state["steps"], state["usual"]


class Unfinished:
    """The file that keeps the state after each pass, so that a run that was stopped goes on.

    Args:
        path: the file.
        key: of all that the result follows from; what was kept for another is not gone on with.
    """

    def __init__(self, path: Path, key: str) -> None:
        self._path, self._key = path, key

    def restore(self, work: Reconstruction) -> int:
        """How many passes are done already."""
        if not self._path.is_file():
            return 0
        try:
            found = torch.load(self._path, weights_only=True, map_location="cpu")
            if found["key"] != self._key:
                return 0
            work.restore(found["state"])
            return int(found["passes"])
        except Exception as error:  # torch raises many kinds for a file that is not its own
            said = str(error).partition("\n")[0]
            warnings.warn(
                f"'{self._path}' keeps no reconstruction that could be gone on with ({said}); it starts anew",
                TrtdetWarning,
                stacklevel=2,
            )
            return 0

    def keep(self, work: Reconstruction, passes: int) -> None:
        """Replaces what was kept by the state after so many passes."""
        with writing_atomically(self._path) as stream:
            torch.save({"key": self._key, "passes": passes, "state": work.state()}, stream)


def learn(
    work: Reconstruction, shown: Callable[[int], Iterator[NDArray[np.float32]]], unfinished: Unfinished | None
) -> None:
    """Runs all passes, or those that are left.

    Args:
        work: at its start.
        shown: gives the images of a pass by its number, float32 (B, 3, H, W) each.
        unfinished: where the state is kept; None keeps it nowhere.

    Raises:
        ModelError: the model cannot be differentiated.
    """
    done = 0 if unfinished is None else unfinished.restore(work)
    for index in range(done, work.passes):
        views = Views(index)
        for images in shown(index):
            work.update(views(torch.from_numpy(images)))
        work.finish_pass()
        if unfinished is not None:
            unfinished.keep(work, index + 1)


class Views:
    """Images as they might have been taken: mirrored half the time, and nearer or further away.

    Some dozens of images are soon known by heart; views of them are not.

    Args:
        seed: of the choices.
    """

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """A view of each, float32 (B, 3, H, W) as given; further away, the image itself goes on around it."""
        return torch.stack([self._view(image) for image in images])

    def _view(self, image: torch.Tensor) -> torch.Tensor:
        if self._random.random() < 0.5:
            image = image.flip(2)
        size = np.array(image.shape[1:])
        zoom = _ZOOM ** self._random.uniform(-1, 1)
        zoomed = np.maximum(1, np.rint(size * zoom)).astype(int)
        top, left = (int(self._random.integers(0, abs(room) + 1)) for room in size - zoomed)
        made = interpolate(image[None], size=tuple(zoomed.tolist()), mode="bilinear", antialias=True)[0]
        if zoom >= 1:
            return made[:, top : top + size[0], left : left + size[1]]
        around = image.roll((int(size[0]) // 2, int(size[1]) // 2), (1, 2))
        around[:, top : top + zoomed[0], left : left + zoomed[1]] = made
        return around


def _matched(
    reference: tuple[torch.Tensor, torch.Tensor], other: tuple[torch.Tensor, torch.Tensor]
) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Boxes (M, 4) and scores (M, C) of all images, row by row of what detects the same, with the gradients of what is
    chosen; zeros beside what only one detects."""
    there: list[list[torch.Tensor]] = [[], []]
    here: list[list[torch.Tensor]] = [[], []]
    for image in range(len(reference[0])):
        first, second = ([part[image] for part in found] for found in (reference, other))
        flat = [(boxes.detach().cpu().numpy(), scores.detach().cpu().numpy()) for boxes, scores in (first, second)]
        pairs = paired(*flat)
        for kind in range(2):
            values, others = first[kind], second[kind]
            nothing = [values.new_zeros((len(rows), values.shape[1])) for rows in (pairs.alone, pairs.added)]
            there[kind] += [values[pairs.ones], values[pairs.alone], nothing[1]]
            here[kind] += [others[pairs.twos], nothing[0], others[pairs.added]]
    wanted, moved = ([torch.cat(parts) for parts in found] for found in (there, here))
    return (wanted[0], wanted[1]), (moved[0], moved[1])


def _moved(
    reference: tuple[torch.Tensor, torch.Tensor], other: tuple[torch.Tensor, torch.Tensor]
) -> Iterator[torch.Tensor]:
    """The sums that :class:`trtdet.quantization.head_error.HeadError` is made of: squared score errors, their weight,
    1 - IoU, its weight; of boxes (..., 4) and scores (..., C)."""
    (boxes, scores), (moved, changed) = reference, other
    pairs = (scores > SEEN) | (changed.detach() > SEEN)
    weight = torch.maximum(scores, changed.detach())[pairs]
    yield (weight * (changed[pairs] - scores[pairs]).square()).sum()
    yield weight.sum()
    best = scores.amax(-1)
    seen = best > SEEN
    yield (best[seen] * (1 - _iou(boxes[seen], moved[seen]))).sum()
    yield best[seen].sum()


def _iou(first: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Of boxes (N, 4), pair by pair."""
    low, high = torch.maximum(first[:, :2], other[:, :2]), torch.minimum(first[:, 2:], other[:, 2:])
    shared, one, two = (
        (end - start).clamp(min=0).prod(1)
        for start, end in ((low, high), (first[:, :2], first[:, 2:]), (other[:, :2], other[:, 2:]))
    )
    return shared / (one + two - shared).clamp(min=1e-6)
