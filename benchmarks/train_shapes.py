"""Trains the shapes detector on a CPU and exports it: ``python benchmarks/train_shapes.py --out DIR``.

The recipe is YOLOX's (Ge et al. 2021, arXiv:2107.08430) where it matters: SimOTA assignment, decoupled losses, an
exponential moving average, cosine annealing. It differs where a short run on a CPU asks for it: AdamW in place of SGD,
and the L1 term from the first epoch on, both of which converge in fewer steps; dihedral flips and permuted channels
in place of mosaic, since no shape has a handedness or a colour of its own.
"""

from __future__ import annotations

import argparse
import copy
import io
import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from trtdet.config import load_config
from trtdet.data import CocoDataset
from trtdet.data.images import preprocess, read_image
from trtdet.demo import shapes
from trtdet.detection.heads import decode
from trtdet.detection.suppression import non_max_suppression
from trtdet.errors import ConfigError, TrtdetError
from trtdet.evaluation.metrics import CocoMetric, CocoResult
from trtdet.exporter import yolox
from trtdet.files import write_atomically

SIZE = 256
CONFIG = load_config("shapes")
"""The trained network's input and output; scores over 0.001, NMS at IoU 0.65."""

_VALIDATION_IMAGES = 200
_SCORES = ("map", "map50", "map75", "map_small", "map_medium", "map_large")
_PAD = CONFIG.input.pad_value
_MAX_OBJECTS = 8
_CENTRE_RADIUS = 2.5
"""In strides: how far from an object's centre a cell may lie and still be a candidate (SimOTA's centre prior)."""
_TOP_CANDIDATES = 10
"""How many overlaps are summed to choose the number of cells of an object (SimOTA's dynamic k)."""


@dataclass(frozen=True)
class Recipe:
    """All that the result depends on, except the number of threads and the versions of the libraries."""

    seed: int = 1
    epochs: int = 9
    images: int = 8000
    """Rendered once and augmented anew in each epoch."""
    batch: int = 16
    learning_rate: float = 2e-3
    weight_decay: float = 0.02
    warmup: int = 300
    """Steps."""
    ema: float = 0.998
    """Decay of the average of the weights, per step, once it has warmed up."""


class Cache:
    """Rendered training images as the network sees them, uint8 (n, SIZE, SIZE, 3) BGR, and their boxes."""

    def __init__(self, seed: int, count: int) -> None:
        self.images = np.empty((count, SIZE, SIZE, 3), np.uint8)
        self.extents = np.empty((count, 2), np.int64)  # height and width that the image covers
        self.boxes = np.zeros((count, _MAX_OBJECTS, 4), np.float32)
        self.classes = np.full((count, _MAX_OBJECTS), -1, np.int64)
        for i in range(count):
            # Another split name and another seed than validation: no image is in both.
            image, boxes, classes = shapes.render(seed, "fit", i)
            network, placement = preprocess(image, CONFIG.input)
            self.images[i] = network.transpose(1, 2, 0)
            height, width = image.shape[:2]
            self.extents[i] = round(height * placement.scale_y), round(width * placement.scale_x)
            self.boxes[i, : len(boxes)] = placement.to_network(boxes)
            self.classes[i, : len(classes)] = classes

    def batches(self, seed: int, epoch: int, size: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """All images once, shuffled and augmented: float32 (B, 3, SIZE, SIZE) channels last, boxes float32
        (B, 8, 4) x1 y1 x2 y2, classes int64 (B, 8), -1 where there is no object."""
        rng = np.random.default_rng([seed, epoch])
        order = rng.permutation(len(self.images))
        for start in range(0, len(order) - size + 1, size):
            batch = np.full((size, SIZE, SIZE, 3), _PAD, np.uint8)
            boxes = np.empty((size, _MAX_OBJECTS, 4), np.float32)
            chosen = order[start : start + size]
            for slot, i in enumerate(chosen):
                height, width = self.extents[i]
                image, boxes[slot] = _augment(rng, self.images[i, :height, :width], self.boxes[i])
                batch[slot, : image.shape[0], : image.shape[1]] = image
            images = torch.from_numpy(batch).permute(0, 3, 1, 2).float()
            yield images, torch.from_numpy(boxes), torch.from_numpy(self.classes[chosen])


def _augment(
    rng: np.random.Generator, image: NDArray[np.uint8], boxes: NDArray[np.float32]
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    height, width = image.shape[:2]
    boxes = boxes.copy()
    flip_x, flip_y, swap = (rng.random(3) < 0.5).tolist()
    if flip_x:
        image = image[:, ::-1]
        boxes[:, [0, 2]] = width - boxes[:, [2, 0]]
    if flip_y:
        image = image[::-1]
        boxes[:, [1, 3]] = height - boxes[:, [3, 1]]
    if swap:
        image = image.transpose(1, 0, 2)
        boxes = boxes[:, [1, 0, 3, 2]]
    image = image[:, :, rng.permutation(3)]
    if rng.random() < 0.5:
        image = 255 - image
    return image, boxes


class Anchors:
    """The cells of all levels: corner in strides and stride, in the order of the network's output."""

    def __init__(self) -> None:
        corners, strides = [], []
        for stride in yolox.STRIDES:
            side = SIZE // stride
            y, x = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
            corners.append(torch.stack((x, y), dim=-1).reshape(-1, 2))
            strides.append(torch.full((side * side,), float(stride)))
        self.corners = torch.cat(corners).float()
        self.strides = torch.cat(strides)
        self.centres = (self.corners + 0.5) * self.strides[:, None]

    def decode(self, raw: Tensor) -> Tensor:
        """Boxes (B, N, 4), x1 y1 x2 y2 in pixels, of raw outputs (B, N, 4)."""
        centre = (raw[..., :2] + self.corners) * self.strides[:, None]
        # No box is larger than the input; without a limit one wild prediction overflows the exponential.
        half = raw[..., 2:].clamp(max=math.log(SIZE)).exp() * self.strides[:, None] / 2
        return torch.cat((centre - half, centre + half), dim=-1)

    def encode(self, boxes: Tensor, index: Tensor) -> Tensor:
        """The ``raw`` (n, 4) that decodes to boxes (n, 4) at cells ``index`` (n,)."""
        stride = self.strides[index][:, None]
        centre = (boxes[:, :2] + boxes[:, 2:]) / 2 / stride - self.corners[index]
        size = (boxes[:, 2:] - boxes[:, :2]).clamp(min=1.0) / stride
        return torch.cat((centre, size.log()), dim=-1)


def _overlap(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """IoU and generalised IoU (Rezatofighi et al. 2019, arXiv:1902.09630) of boxes that broadcast, (..., 4)."""
    size = (torch.minimum(a[..., 2:], b[..., 2:]) - torch.maximum(a[..., :2], b[..., :2])).clamp(min=0)
    intersection = size.prod(dim=-1)
    union = (a[..., 2:] - a[..., :2]).prod(dim=-1) + (b[..., 2:] - b[..., :2]).prod(dim=-1) - intersection
    hull = (torch.maximum(a[..., 2:], b[..., 2:]) - torch.minimum(a[..., :2], b[..., :2])).prod(dim=-1)
    iou = intersection / union.clamp(min=1e-6)
    return iou, iou - (hull - union) / hull.clamp(min=1e-6)


@torch.no_grad()
def assign(anchors: Anchors, raw: Tensor, predicted: Tensor, boxes: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
    """SimOTA (arXiv:2107.08430, section 2, "SimOTA"), for a whole batch at once.

    Args:
        anchors: the N cells.
        raw: (B, N, 5 + C), logits.
        predicted: (B, N, 4), decoded.
        boxes: (B, G, 4), x1 y1 x2 y2 in pixels.
        classes: int64 (B, G), -1 where there is no object.

    Returns:
        int64 (B, N), the object of a cell or -1; and (B, N), its IoU with the cell's box.
    """
    valid = classes >= 0
    centres, corners = anchors.centres, boxes[:, :, None]
    inside = ((centres > corners[..., :2]) & (centres < corners[..., 2:])).all(dim=-1)
    middle = (corners[..., :2] + corners[..., 2:]) / 2
    near = ((centres - middle).abs() < _CENTRE_RADIUS * anchors.strides[:, None]).all(dim=-1)
    candidate = ((inside | near) & valid[..., None]).any(dim=1, keepdim=True)

    iou, _ = _overlap(predicted[:, None], corners)
    iou = iou * (candidate & valid[..., None])
    probability = (raw[..., 5:].sigmoid() * raw[..., 4:5].sigmoid()).sqrt().clamp(1e-6, 1 - 1e-6)
    negative = (1 - probability).log()
    index = classes.clamp(min=0)[:, :, None].expand(-1, -1, raw.shape[1])
    own, own_negative = (t.transpose(1, 2).gather(1, index) for t in (probability.log(), negative))
    class_cost = own_negative - own - negative.sum(dim=-1)[:, None]
    cost = class_cost - 3.0 * (iou + 1e-8).log() + 1e5 * ~(inside & near) + 1e9 * ~(candidate & valid[..., None])

    wanted = iou.topk(_TOP_CANDIDATES, dim=-1).values.sum(dim=-1).int().clamp(min=1)
    best = cost.topk(_TOP_CANDIDATES, dim=-1, largest=False)
    taken = (torch.arange(_TOP_CANDIDATES) < wanted[..., None]) & (best.values < 1e8)
    matched = torch.zeros_like(inside).scatter(2, best.indices, taken)
    # A cell that several objects claim goes to the object with the least cost.
    owner = cost.masked_fill(~matched, torch.inf).argmin(dim=1)
    owner = owner.masked_fill(~matched.any(dim=1), -1)
    return owner, iou.gather(1, owner.clamp(min=0)[:, None])[:, 0]


def loss(anchors: Anchors, raw: Tensor, boxes: Tensor, classes: Tensor) -> Tensor:
    """The training loss: 5 GIoU + L1 + objectness + classes, per assigned cell."""
    predicted = anchors.decode(raw[..., :4])
    owner, iou = assign(anchors, raw, predicted, boxes=boxes, classes=classes)
    image, cell = torch.nonzero(owner >= 0, as_tuple=True)
    target = owner[image, cell]
    wanted = boxes[image, target]
    count = max(1, len(image))
    _, giou = _overlap(predicted[image, cell], wanted)
    box_loss = (1 - giou).sum()
    l1_loss = functional.l1_loss(raw[image, cell, :4], anchors.encode(wanted, cell), reduction="sum")
    object_loss = functional.binary_cross_entropy_with_logits(raw[..., 4], (owner >= 0).float(), reduction="sum")
    # The target of the class is the overlap, so that the score also tells how good the box is.
    one_hot = functional.one_hot(classes[image, target], raw.shape[2] - 5) * iou[image, cell][:, None]
    class_loss = functional.binary_cross_entropy_with_logits(raw[image, cell, 5:], one_hot, reduction="sum")
    return (5 * box_loss + l1_loss + object_loss + class_loss) / count


def evaluate(model: nn.Module, split: shapes.ShapesSplit) -> CocoResult:
    """COCO mAP of a model in evaluation mode over a generated split."""
    dataset = CocoDataset.load(split.annotations, split.images, CONFIG.classes)
    metric = CocoMetric(dataset)
    for entry in dataset.images:
        network, placement = preprocess(read_image(entry.path), CONFIG.input)
        with torch.no_grad():
            raw = model(torch.from_numpy(network)[None]).numpy()
        boxes, scores, classes = non_max_suppression(*decode([raw], CONFIG), CONFIG.nms).image(0)
        metric.update(entry.id, placement.to_image(boxes), scores, classes)
    return metric.compute()


def train(out: Path, recipe: Recipe, threads: int) -> None:
    """Trains, resuming from an existing ``out/checkpoint.pth``, and writes ``shapes.onnx`` and ``shapes.json``
    into ``out`` after every epoch. A finished run is exported again.

    Raises:
        ConfigError: the checkpoint in ``out`` was made with another recipe.
        OutputError: a file cannot be written.
    """
    torch.set_num_threads(threads)
    cv2.setNumThreads(1)
    torch.manual_seed(recipe.seed)
    checkpoint = out / "checkpoint.pth"
    model = yolox.build("shapes", len(shapes.CLASSES)).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    average = copy.deepcopy(model)
    optimizer = _optimizer(model, recipe)
    done, seconds = 0, 0.0
    if checkpoint.is_file():
        done, seconds = _resume(checkpoint, recipe, model, average=average, optimizer=optimizer)
    validation = shapes.generate(out / "data", "val", _VALIDATION_IMAGES)
    if done >= recipe.epochs:  # only the export is wanted again
        _publish(out, recipe, average, epoch=done, seconds=seconds, result=evaluate(average, validation))
        return
    started = time.monotonic() - seconds
    _say(f"rendering {recipe.images} images")
    cache = Cache(recipe.seed, recipe.images)
    anchors = Anchors()
    steps = recipe.images // recipe.batch
    for epoch in range(done, recipe.epochs):
        model.train()
        total, begin = 0.0, time.monotonic()
        for number, (images, boxes, classes) in enumerate(cache.batches(recipe.seed, epoch, recipe.batch)):
            step = epoch * steps + number
            for group in optimizer.param_groups:
                group["lr"] = _rate(step, recipe.epochs * steps, recipe)
            value = loss(anchors, model(images), boxes, classes=classes)
            optimizer.zero_grad(set_to_none=True)
            value.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            optimizer.step()
            _update(average, model, min(recipe.ema, (1 + step) / (10 + step)))
            total += float(value.detach())
            if number % 100 == 99:
                ran = number + 1
                speed = ran * recipe.batch / (time.monotonic() - begin)
                _say(f"epoch {epoch + 1} step {ran}/{steps} loss {total / ran:.3f} {speed:.1f} images/s")
        seconds = time.monotonic() - started
        parts = {"model": average, "training": model, "optimizer": optimizer}
        _save(
            checkpoint,
            recipe,
            epoch + 1,
            seconds=seconds,
            states={name: part.state_dict() for name, part in parts.items()},
        )
        result = evaluate(average, validation)
        _say(f"epoch {epoch + 1} map {result.map:.4f} map50 {result.map50:.4f}")
        _publish(out, recipe, average, epoch=epoch + 1, seconds=seconds, result=result)


def _optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": recipe.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=recipe.learning_rate)


def _rate(step: int, total: int, recipe: Recipe) -> float:
    if step < recipe.warmup:
        return recipe.learning_rate * (step + 1) / recipe.warmup
    progress = (step - recipe.warmup) / max(1, total - recipe.warmup)
    return recipe.learning_rate * (0.01 + 0.99 * (1 + math.cos(math.pi * progress)) / 2)


@torch.no_grad()
def _update(average: nn.Module, model: nn.Module, decay: float) -> None:
    theirs = model.state_dict()
    for name, value in average.state_dict().items():
        if value.is_floating_point():
            value.lerp_(theirs[name], 1 - decay)


def _save(path: Path, recipe: Recipe, epoch: int, seconds: float, states: dict[str, Any]) -> None:
    """Writes a checkpoint; ``states``: of the average (``model``), the trained model and the optimizer."""
    stream = io.BytesIO()
    torch.save({"recipe": asdict(recipe), "epoch": epoch, "seconds": seconds, **states}, stream)
    write_atomically(path, stream.getvalue())


def _resume(
    path: Path, recipe: Recipe, model: nn.Module, average: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[int, float]:
    content = torch.load(path, map_location="cpu", weights_only=True)
    # Another number of epochs is another annealing from here on, which is a way to shorten or lengthen a run.
    differing = [k for k, v in asdict(recipe).items() if content["recipe"].get(k) != v and k != "epochs"]
    if differing:
        raise ConfigError(
            f"'{path}' was made with another {', '.join(differing)}", "give the same options or another --out"
        )
    model.load_state_dict(content["training"])
    average.load_state_dict(content["model"])
    optimizer.load_state_dict(content["optimizer"])
    _say(f"resuming after epoch {content['epoch']}")
    return int(content["epoch"]), float(content["seconds"])


def _publish(out: Path, recipe: Recipe, average: yolox.YOLOX, epoch: int, seconds: float, result: CocoResult) -> None:
    from trtdet.exporter import checkpoints
    from trtdet.exporter.convert import to_onnx

    fused = copy.deepcopy(average)
    parameters = sum(p.numel() for p in average.parameters())
    checkpoints.fuse_batch_norm(fused)
    model = to_onnx(fused, torch.zeros(1, 3, SIZE, SIZE), ("images", "output"))
    card = {
        "command": "python benchmarks/train_shapes.py --out DIR "
        f"--epochs {recipe.epochs} --images {recipe.images} --batch {recipe.batch} --seed {recipe.seed}",
        "recipe": asdict(recipe),
        "epochs_done": epoch,
        "minutes": round(seconds / 60, 1),
        "parameters": parameters,
        "validation": {
            "split": "val",
            "images": _VALIDATION_IMAGES,
            "seed": shapes.DEFAULT_SEED,
            "score_threshold": 0.001,
            "iou_threshold": 0.65,
            **{name: round(getattr(result, name), 4) for name in _SCORES},
        },
        "torch": torch.__version__,
        "license": "Apache-2.0",
    }
    write_atomically(out / "shapes.onnx", model.SerializeToString())
    write_atomically(out / "shapes.json", (json.dumps(card, indent=2) + "\n").encode())


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; 0 when done, 1 on an error, which is printed in one line."""
    default = Recipe()
    parser = argparse.ArgumentParser("python benchmarks/train_shapes.py", description="Train the shapes detector.")
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint, shapes.onnx and shapes.json")
    parser.add_argument("--epochs", type=int, default=default.epochs)
    parser.add_argument("--images", type=int, default=default.images, help="training images to render")
    parser.add_argument("--batch", type=int, default=default.batch)
    parser.add_argument("--seed", type=int, default=default.seed)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args(arguments)
    try:
        for name in ("epochs", "images", "batch", "threads"):
            if getattr(given, name) < 1:
                raise ConfigError(f"--{name} is {getattr(given, name)}, allowed is 1 or more")
        if given.images < given.batch:
            raise ConfigError(f"--images is {given.images}, allowed is --batch ({given.batch}) or more")
        recipe = Recipe(seed=given.seed, epochs=given.epochs, images=given.images, batch=given.batch)
        train(given.out, recipe, given.threads)
    except TrtdetError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
