"""Reconstruction: learns integers, scales and biases of a whole INT8 network so that its detections move least.

It needs no labels, since the float model gives the detections, and adds no nodes. Weights are rounded up or down to
keep the detections (AdaRound, Nagel et al. 2020, arXiv:2004.10568), with quantised inputs (BRECQ, Li et al. 2021,
arXiv:2102.05426), by gradients straight through the rounding rather than block by block.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import interpolate

from trtdet.errors import TrtdetWarning
from trtdet.files import writing_atomically
from trtdet.passes import Decoded
from trtdet.quantization.gradients.head_error import HeadRows, head_sums, matched
from trtdet.quantization.gradients.learned import Learned

_ZOOM = 1.6  # maximum zoom factor of a view
_AVERAGE = 0.9  # weight of the past in the running error at each step


@dataclass(frozen=True)
class Schedule:
    """Passes over the images, and minimum images per step. The rates rise over ten steps, then fall as half a
    cosine."""

    passes: int = 25
    images: int = 4


class Reconstruction:
    """Learns over ``images`` images in each pass; for ``chosen`` see
    :func:`trtdet.quantization.head_error.chooses_rows`."""

    def __init__(self, learned: Learned, head: Decoded, schedule: Schedule, images: int, chosen: bool = False) -> None:
        self._learned, self._head, self._schedule, self._chosen = learned, head, schedule, chosen
        self._optimizer = torch.optim.Adam(learned.parameter_groups(), betas=(0.9, 0.99))
        self._rates = [float(group["lr"]) for group in self._optimizer.param_groups]
        self._total = max(1, schedule.passes * images // schedule.images)
        self._steps = self._waiting = 0
        self._sums = torch.zeros(4, dtype=torch.float64)
        self._usual: torch.Tensor | None = None

    def learn(
        self, shown: Callable[[int], Iterator[NDArray[np.float32]]], path: Path | None = None, key: str = ""
    ) -> None:
        """Runs all passes, or the remaining passes of an interrupted run.

        Args:
            shown: returns the images of a pass by its number, float32 (B, 3, H, W) each.
            path: file for the state after each pass; None for no file.
            key: identifies all inputs of the result; a state with another key is ignored.

        Raises:
            ModelError: the model cannot be differentiated.
        """
        for index in range(0 if path is None else self._restore(path, key), self._schedule.passes):
            views = Views(index)
            for images in shown(index):
                self._update(views(torch.from_numpy(images)))
            if self._waiting:
                self._step()
            if path is not None:
                state = {
                    "learned": self._learned.state_dict(),
                    "optimizer": self._optimizer.state_dict(),
                    "steps": self._steps,
                    "usual": self._usual,
                }
                with writing_atomically(path) as stream:
                    torch.save({"key": key, "passes": index + 1, "state": state}, stream)

    def _restore(self, path: Path, key: str) -> int:
        """Restores the state in the file; returns how many passes it contains."""
        if not path.is_file():
            return 0
        try:
            kept = torch.load(path, weights_only=True, map_location="cpu")
            if kept["key"] != key:
                return 0
            state = kept["state"]
            self._learned.load_state_dict(state["learned"])
            self._optimizer.load_state_dict(state["optimizer"])
            self._steps, self._usual = state["steps"], state["usual"]
            return int(kept["passes"])
        except Exception as error:  # torch raises many types for a foreign file
            reason = str(error).partition("\n")[0]
            warnings.warn(
                f"'{path}' keeps no reconstruction that could be gone on with ({reason}); it starts anew",
                TrtdetWarning,
                stacklevel=2,
            )
            return 0

    def _update(self, images: torch.Tensor) -> None:
        """Adds images, float32 (B, 3, H, W), as many as the model takes; makes a step when there are enough."""
        expected, moved = (
            HeadRows.of(outputs, self._head) for outputs in (self._learned.in_float(images), self._learned(images))
        )
        if self._chosen:
            expected, moved = matched(expected, moved)
        sums = torch.stack([part.to(torch.float64) for part in head_sums(expected, moved, self._head.size)])
        of_images = sums.detach().cpu()
        self._sums += of_images
        # A step's sums are unknown before its last image, so the running average of past images scales the loss.
        usual = of_images.clamp(min=1e-12) if self._usual is None else self._usual
        # The derivative of sqrt(mean) is the derivative of the mean over 2 sqrt(mean).
        square, weight, _, shares = usual.tolist()
        loss = sums[0] / weight / (2 * max(math.sqrt(square / weight), 1e-4)) + sums[2] / shares
        if loss.requires_grad and bool(torch.isfinite(loss)):
            loss.backward()
        self._waiting += len(images)
        if self._waiting >= self._schedule.images:
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


class Views:
    """Augmented images: mirrored half the time, and enlarged or reduced. Some dozens of images would be overfitted;
    their views are not. The seed determines all choices."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """A view of each image, float32 (B, 3, H, W); the image repeats around a reduced one."""
        size = np.array(images.shape[2:])
        views = []
        for image in images:
            if self._random.random() < 0.5:
                image = image.flip(2)
            zoom = _ZOOM ** self._random.uniform(-1, 1)
            zoomed = np.maximum(1, np.rint(size * zoom)).astype(int)
            top, left = (int(self._random.integers(0, abs(room) + 1)) for room in size - zoomed)
            view = interpolate(image[None], size=tuple(zoomed.tolist()), mode="bilinear", antialias=True)[0]
            if zoom >= 1:
                views.append(view[:, top : top + size[0], left : left + size[1]])
            else:
                around = image.roll((int(size[0]) // 2, int(size[1]) // 2), (1, 2))
                around[:, top : top + zoomed[0], left : left + zoomed[1]] = view
                views.append(around)
        return torch.stack(views)
