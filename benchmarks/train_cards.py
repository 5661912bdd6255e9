"""Trains the detector of tests/fixtures/cards.onnx on the pictures of ``cards.py``; needs torch.

One network gives boxes, masks as coefficients and prototypes, keypoints and rotated boxes; three configurations read
it. Every step draws new pictures. Losses: quality focal loss of the scores with the box's IoU as target (Li et al.
2020, arXiv:2006.04388), 1 - IoU and L1 of boxes, L1 of keypoints and rotated sides, the squared sine of the angle's
error, and the cross entropy of the masks inside their boxes (Bolya et al. 2019, arXiv:1904.02689).

    python benchmarks/train_cards.py DIR
"""

from __future__ import annotations

import argparse
import copy
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
import torch
from cards import CLASSES, POINTS, SIZE, drawn
from torch import Tensor, nn
from torch.nn import functional

from trtdet.exporter.checkpoints import fuse_batch_norm
from trtdet.exporter.convert import to_onnx
from trtdet.files import write_atomically

STRIDE, MASK_STRIDE, MASKS = 8, 4, 8
WIDTHS = {"boxes": 4, "scores": len(CLASSES), "masks": MASKS, "keypoints": 2 * len(POINTS), "sides": 2, "angle": 1}
"""Columns of the head."""

OUTPUTS = ("boxes", "scores", "mask_coefficients", "prototypes", "keypoints", "rotated", "angles")
NEAR = 1.5
"""In strides, how far from a card's centre a cell may lie and still be responsible for it."""


class Conv(nn.Module):
    """Convolution, batch normalisation, ReLU."""

    def __init__(self, inputs: int, outputs: int, size: int = 3, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False)
        self.bn = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.bn(self.conv(x)))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(Conv(width, width), Conv(width, width))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.layers(x)
        return out


class Network(nn.Module):
    """Boxes (B, N, 4) as centre and size, scores (B, N, 2), mask coefficients (B, N, 8), prototypes (B, 8, h, w),
    keypoints (B, N, 8), rotated boxes (B, N, 4), angles (B, N, 1); in pixels and radians, of N = 320 cells."""

    grid: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.shallow = nn.Sequential(Conv(3, 16, stride=2), Conv(16, 32, stride=2), Conv(32, 32))
        self.deep = nn.Sequential(Conv(32, 48, stride=2), Block(48), Block(48))
        self.context = nn.Sequential(Conv(48, 48, stride=2), Block(48), Conv(48, 48, size=1))
        self.neck = Conv(48, 48)
        self.boxes = nn.Sequential(Conv(48, 48), nn.Conv2d(48, WIDTHS["boxes"] + WIDTHS["scores"], 1))
        rest = sum(list(WIDTHS.values())[2:])
        self.parts = nn.Sequential(Conv(48, 48), Conv(48, 48), nn.Conv2d(48, rest, 1))
        self.wide = Conv(48, 32, size=1)
        self.prototypes = nn.Sequential(Conv(32, 32), Conv(32, 32), nn.Conv2d(32, MASKS, 1))
        self.boxes[-1].bias.data[WIDTHS["boxes"] :] = -4.0
        y, x = torch.meshgrid(*(torch.arange(side // STRIDE) for side in SIZE), indexing="ij")
        self.register_buffer("grid", (torch.stack([x, y], -1).reshape(1, -1, 2) + 0.5) * STRIDE, persistent=False)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        shallow = self.shallow(images)
        deep = self.deep(shallow)
        neck = self.neck(deep + functional.interpolate(self.context(deep), scale_factor=2.0, mode="nearest"))
        wide = functional.interpolate(self.wide(neck), scale_factor=2.0, mode="nearest")
        raw = torch.cat([self.boxes(neck), self.parts(neck)], 1).flatten(2).transpose(1, 2)
        boxes, scores, masks, keypoints, sides, angle = raw.split(list(WIDTHS.values()), -1)
        centre = self.grid + boxes[..., :2] * STRIDE
        size = boxes[..., 2:].exp() * 4 * STRIDE
        points = keypoints * STRIDE + torch.cat([self.grid] * len(POINTS), -1)
        rotated = torch.cat([centre, sides.exp() * 4 * STRIDE], -1)
        turned = (angle.sigmoid() - 0.25) * math.pi
        prototypes = self.prototypes(shallow + wide)
        return torch.cat([centre, size], -1), scores.sigmoid(), masks, prototypes, points, rotated, turned


@dataclass(frozen=True)
class Batch:
    """Pictures, float32 (B, 3, H, W), 0..1; and of each cell that is responsible for a card, all cards in one."""

    pictures: Tensor
    places: tuple[Tensor, Tensor]
    """The picture and the cell of each."""
    labels: Tensor
    corners: Tensor
    """(M, 4, 2), in the order of the keypoints."""
    masks: Tensor
    """(M, h, w), 0 or 1."""

    @staticmethod
    def drawn(seeds: Sequence[int], cells: np.ndarray) -> Batch:
        pictures, images, places, labels, corners, masks = [], [], [], [], [], []
        for image, seed in enumerate(seeds):
            picture, classes, points = drawn(seed)
            pictures.append(picture)
            offsets = np.abs(cells[:, None] - points.mean(axis=1)[None])
            owner = np.where((offsets < NEAR * STRIDE).all(-1), offsets.sum(-1), np.inf)
            for cell in np.flatnonzero(np.isfinite(owner).any(axis=1)):
                card = int(owner[cell].argmin())
                images.append(image)
                places.append(cell)
                labels.append(classes[card])
                corners.append(points[card])
                full = np.zeros(SIZE, np.uint8)
                cv2.fillPoly(full, [np.rint(points[card]).astype(np.int32)], 1)
                masks.append(cv2.resize(full.astype(np.float32), None, fx=0.25, fy=0.25, interpolation=cv2.INTER_AREA))
        stacked = torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).float() / 255
        return Batch(
            stacked,
            places=(torch.tensor(images), torch.tensor(np.array(places))),
            labels=torch.tensor(labels),
            corners=torch.from_numpy(np.stack(corners)).float(),
            masks=(torch.from_numpy(np.stack(masks)) >= 0.5).float(),
        )


def loss(outputs: tuple[Tensor, ...], batch: Batch) -> Tensor:
    boxes, scores, coefficients, prototypes, keypoints, rotated, angles = outputs
    mine = [each[batch.places] for each in (boxes, coefficients, keypoints, rotated, angles)]
    found, weights, points, turned, angle = mine
    low, high = batch.corners.amin(1), batch.corners.amax(1)
    near = found[:, :2] - found[:, 2:] / 2, found[:, :2] + found[:, 2:] / 2
    shared = (torch.minimum(near[1], high) - torch.maximum(near[0], low)).clamp(min=0).prod(1)
    iou = shared / ((high - low).prod(1) + found[:, 2:].prod(1) - shared)
    wanted = torch.cat([(low + high) / 2, high - low], -1)
    target = torch.zeros_like(scores)
    target[(*batch.places, batch.labels)] = iou.detach()
    focus = (scores.detach() - target).square()
    of_scores = (focus * functional.binary_cross_entropy(scores.clamp(1e-6, 1 - 1e-6), target, reduction="none")).sum()
    long, short = (batch.corners[:, 1] - batch.corners[:, 0]), (batch.corners[:, 2] - batch.corners[:, 1])
    sides = torch.stack([long.norm(dim=1), short.norm(dim=1)], -1)
    direction = torch.atan2(long[:, 1], long[:, 0])
    logits = torch.einsum("mk,mkhw->mhw", weights, prototypes[batch.places[0]])
    y, x = ((torch.arange(count) + 0.5) * MASK_STRIDE for count in prototypes.shape[2:])
    inside = ((x >= low[:, :1]) & (x < high[:, :1]))[:, None] & ((y >= low[:, 1:]) & (y < high[:, 1:]))[:, :, None]
    entropy = functional.binary_cross_entropy_with_logits(logits, batch.masks, reduction="none") * inside
    of_cards = (
        2 * (1 - iou)
        + (found - wanted).abs().mean(1) / STRIDE
        + 2 * (points - batch.corners.flatten(1)).abs().mean(1) / STRIDE
        + (turned[:, 2:].log() - sides.log()).abs().mean(1) * 3
        + 2 * torch.sin(angle[:, 0] - direction).square()
        + entropy.sum((1, 2)) / inside.sum((1, 2)).clamp(min=1)
    )
    return (of_scores + of_cards.sum()) / len(iou)


def train(folder: Path, steps: int, batch: int) -> None:
    torch.manual_seed(1)
    network = Network()
    average = copy.deepcopy(network)
    optimizer = torch.optim.AdamW(network.parameters(), lr=4e-3, weight_decay=0.01)
    cells = network.grid[0].numpy()
    started = time.monotonic()
    for step in range(steps):
        rate = 4e-3 * min(1.0, (step + 1) / 50) * (0.02 + 0.98 * (1 + math.cos(math.pi * step / steps)) / 2)
        for group in optimizer.param_groups:
            group["lr"] = rate
        first = 200_000 + step * batch
        given = Batch.drawn(range(first, first + batch), cells)
        value = loss(network(given.pictures), given)
        optimizer.zero_grad()
        value.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 10.0)
        optimizer.step()
        with torch.no_grad():
            kept = min(0.98, (1 + step) / (10 + step))
            theirs = network.state_dict()
            for name, mine in average.state_dict().items():
                if mine.is_floating_point():
                    mine.lerp_(theirs[name], 1 - kept)
        if step % 25 == 24:
            print(f"step {step + 1} loss {float(value):.3f}, {time.monotonic() - started:.0f} s", flush=True)
        if step % 100 == 99 or step + 1 == steps:
            export(average, folder)


def export(network: Network, folder: Path) -> None:
    fused = copy.deepcopy(network).eval()
    fuse_batch_norm(fused)
    model = to_onnx(fused, torch.zeros(1, 3, *SIZE), ("images", *OUTPUTS))
    write_atomically(folder / "cards.onnx", model.SerializeToString())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=16)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    train(arguments.folder, arguments.steps, arguments.batch)


if __name__ == "__main__":
    main()
