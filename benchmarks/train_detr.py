"""Trains a small RT-DETR v2 of transformers on the synthetic shapes, for docs/results/nms-free.md.

A narrow ResNet, an encoder of one layer, a decoder of two, 40 queries and ten classes, on 128 x 128. The loss is the
package's own, contrastive denoising in it, and one of all cells beside it, as in Co-DETR (Zong et al. 2023,
arXiv:2211.12860): with one query an object alone a network learns too slowly for an hour of one core. Each epoch writes
the averaged weights as a folder that ``trtdet export`` reads, so that training can be stopped at any time; a second
call with the same folder goes on.

    pip install 'transformers>=5' torchvision scipy
    python benchmarks/train_detr.py DIR
    trtdet export hf:DIR/model -o DIR/rtdetr.onnx
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torchvision.ops import generalized_box_iou_loss
from transformers import RTDetrResNetConfig, RTDetrV2Config, RTDetrV2ForObjectDetection

from trtdet.config import InputConfig
from trtdet.data.images import preprocess
from trtdet.demo.shapes import CLASSES, generate, render

SIDE = 128
INPUT = InputConfig(size=(SIDE, SIDE), resize="stretch")
BATCH = 8
LEARNING_RATE = 1e-3
WARMUP = 200
"""Steps."""
DECAY = 0.3
"""Of the steps, the last, over which the learning rate falls to a hundredth."""
AVERAGE = 0.998
"""Of the weights' moving average, a step."""

Batch = tuple[Tensor, list[dict[str, Tensor]]]


def network() -> RTDetrV2ForObjectDetection:
    backbone = RTDetrResNetConfig(
        embedding_size=16,
        hidden_sizes=[16, 48, 96, 160],
        depths=[1, 1, 1, 1],
        layer_type="basic",
        out_features=["stage2", "stage3", "stage4"],
    )
    config = RTDetrV2Config(
        backbone_config=backbone,
        freeze_backbone_batch_norms=False,
        encoder_in_channels=[48, 96, 160],
        encoder_hidden_dim=64,
        encoder_ffn_dim=256,
        encoder_attention_heads=4,
        hidden_expansion=0.5,
        d_model=64,
        decoder_in_channels=[64, 64, 64],
        decoder_ffn_dim=256,
        decoder_attention_heads=4,
        decoder_layers=2,
        decoder_n_points=2,
        num_queries=40,
        num_denoising=16,
        id2label=dict(enumerate(CLASSES)),
        label2id={name: index for index, name in enumerate(CLASSES)},
    )
    model = RTDetrV2ForObjectDetection(config)
    # The package's own start is made to be overwritten by published weights: nearly no signal passes it.
    for name, module in model.named_modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.ones_(module.weight)
        elif isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, nn.Linear) and not module.weight.eq(0).all() and "class_embed" not in name:
            nn.init.xavier_uniform_(module.weight)
    return model


class Dense(nn.Module):
    """The loss of all cells of the encoder: classes by a layer of its own, boxes as the queries' first guess."""

    def __init__(self, model: RTDetrV2ForObjectDetection) -> None:
        super().__init__()
        self.classes = nn.Linear(model.config.d_model, len(CLASSES))
        nn.init.constant_(self.classes.bias, -4.0)
        self.memory = torch.empty(0)
        model.model.enc_output.register_forward_hook(self._keep)
        sides = [SIDE // stride for stride in model.config.feat_strides]
        grids = [torch.cartesian_prod(torch.arange(side), torch.arange(side)).flip(1) for side in sides]
        self.points = torch.cat([(grid + 0.5) / side for grid, side in zip(grids, sides, strict=True)])
        self.level = torch.repeat_interleave(torch.arange(len(sides)), torch.tensor([side**2 for side in sides]))
        self.stride = 1 / torch.tensor(sides)[self.level]

    def _keep(self, _module: nn.Module, _inputs: object, output: Tensor) -> None:
        self.memory = output

    def forward(self, guess: Tensor, labels: list[dict[str, Tensor]]) -> Tensor:
        """Of the encoder's boxes before the sigmoid, (B, N, 4)."""
        boxes = nn.utils.rnn.pad_sequence([label["boxes"] for label in labels], batch_first=True)
        classes = nn.utils.rnn.pad_sequence([label["class_labels"] for label in labels], batch_first=True)
        owner, owned = self._owners(boxes)
        logits = self.classes(self.memory)
        target = nn.functional.one_hot(classes.gather(1, owner), len(CLASSES)) * owned[..., None]
        count = owned.sum().clamp(min=1)
        focal = (target - logits.detach().sigmoid()).abs().square()
        entropy = nn.functional.binary_cross_entropy_with_logits(logits, target.float(), reduction="none")
        found = guess[owned].sigmoid()
        wanted = boxes.gather(1, owner[..., None].expand(-1, -1, 4))[owned]
        corners = [torch.cat([b[:, :2] - b[:, 2:] / 2, b[:, :2] + b[:, 2:] / 2], 1) for b in (found, wanted)]
        overlap = generalized_box_iou_loss(*corners, reduction="sum")
        distance = (found - wanted).abs().sum()
        return ((focal * entropy).sum() * 2 + distance * 5 + overlap * 2) / count

    def _owners(self, boxes: Tensor) -> tuple[Tensor, Tensor]:
        """Of each cell the object, (B, N), and whether it has one: those in the middle of an object, on the level of
        its size; of several the smallest."""
        reach = boxes[:, None, :, 2:] / 2
        stride = self.stride[None, :, None, None]
        reach = torch.minimum(torch.maximum(reach, stride / 2), stride * 1.5)
        inside = ((self.points[None, :, None] - boxes[:, None, :, :2]).abs() <= reach).all(-1)
        longest = boxes[..., 2:].amax(-1) * SIDE
        level = (longest >= 28).long() + (longest >= 64).long()
        inside &= (level[:, None] == self.level[None, :, None]) & (longest[:, None] > 0)
        area = boxes[..., 2:].prod(-1)[:, None].expand_as(inside).masked_fill(~inside, 2.0)
        return area.argmin(-1), inside.any(-1)


class Images:
    """Rendered once, uint8 (n, 3, SIDE, SIDE) RGB; boxes as shares of the image, x1 y1 x2 y2."""

    def __init__(self, count: int) -> None:
        self.pixels = np.empty((count, 3, SIDE, SIDE), np.uint8)
        self.boxes: list[NDArray[np.float32]] = []
        self.classes: list[NDArray[np.int64]] = []
        for index in range(count):
            image, boxes, classes = render(1, "fit", index)
            self.pixels[index], _ = preprocess(image, INPUT)
            height, width = image.shape[:2]
            self.boxes.append(boxes / np.array([width, height] * 2, np.float32))
            self.classes.append(classes)

    def batches(self, epoch: int) -> Iterator[Batch]:
        """All images once, mirrored, turned, their channels swapped: no shape has a handedness or colour of its own."""
        rng = np.random.default_rng([1, epoch])
        order = rng.permutation(len(self.pixels))
        for start in range(0, len(order) - BATCH + 1, BATCH):
            pixels, labels = np.empty((BATCH, 3, SIDE, SIDE), np.uint8), []
            for slot, index in enumerate(order[start : start + BATCH]):
                pixels[slot], boxes = _augmented(rng, self.pixels[index], self.boxes[index])
                centred = np.concatenate([(boxes[:, :2] + boxes[:, 2:]) / 2, boxes[:, 2:] - boxes[:, :2]], 1)
                labels.append(
                    {"class_labels": torch.from_numpy(self.classes[index]), "boxes": torch.from_numpy(centred)}
                )
            yield torch.from_numpy(pixels).to(memory_format=torch.channels_last).float() / 255, labels


def _augmented(
    rng: np.random.Generator, image: NDArray[np.uint8], boxes: NDArray[np.float32]
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    boxes = boxes.copy()
    flip_x, flip_y, swap, negative = (rng.random(4) < 0.5).tolist()
    if flip_x:
        image, boxes[:, [0, 2]] = image[:, :, ::-1], 1 - boxes[:, [2, 0]]
    if flip_y:
        image, boxes[:, [1, 3]] = image[:, ::-1], 1 - boxes[:, [3, 1]]
    if swap:
        image, boxes = image.transpose(0, 2, 1), boxes[:, [1, 0, 3, 2]]
    image = image[rng.permutation(3)]
    return (255 - image if negative else image), boxes


def save(model: RTDetrV2ForObjectDetection, folder: Path) -> None:
    model.save_pretrained(folder)
    pixels = {"do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": False, "resample": 2}
    (folder / "preprocessor_config.json").write_text(
        json.dumps({**pixels, "size": {"height": SIDE, "width": SIDE}}), encoding="utf-8"
    )


def rate(step: int, steps: int) -> float:
    """Of the learning rate, 0..1: a warm-up, a plateau, a fall."""
    left = (steps - step) / (DECAY * steps)
    return min(1.0, (step + 1) / WARMUP, max(0.01, left))


def average(averaged: nn.Module, model: nn.Module, step: int) -> None:
    keep = min(AVERAGE, (step + 1) / (step + 10))
    with torch.no_grad():
        for mine, theirs in zip(averaged.state_dict().values(), model.state_dict().values(), strict=True):
            if mine.is_floating_point():
                mine.lerp_(theirs, 1 - keep)
            else:
                mine.copy_(theirs)


def train(folder: Path, epochs: int, images: int) -> None:
    torch.manual_seed(1)
    model = network().to(memory_format=torch.channels_last)
    dense = Dense(model)
    averaged = network().eval()
    averaged.load_state_dict(model.state_dict())
    parts = (model, dense)
    decayed = [p for part in parts for p in part.parameters() if p.ndim > 1]
    plain = [p for part in parts for p in part.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": plain, "weight_decay": 0.0}], weight_decay=0.01)
    start, checkpoint = 0, folder / "checkpoint.pt"
    if checkpoint.is_file():
        state = torch.load(checkpoint, weights_only=True)
        start = state["epoch"] + 1
        for part, name in ((model, "model"), (dense, "dense"), (averaged, "averaged"), (optimizer, "optimizer")):
            part.load_state_dict(state[name])
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    data, steps_an_epoch = Images(images), images // BATCH
    for epoch in range(start, epochs):
        began, losses = time.perf_counter(), []
        model.train()
        for index, (pixels, labels) in enumerate(data.batches(epoch)):
            step = epoch * steps_an_epoch + index
            for group in optimizer.param_groups:
                group["lr"] = LEARNING_RATE * rate(step, epochs * steps_an_epoch)
            given = model(pixel_values=pixels, labels=labels)
            own, beside = given.loss, dense(given.enc_outputs_coord_logits, labels)
            loss = own + beside
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            average(averaged, model, step)
            losses.append([float(own.detach()), float(beside.detach())])
            if not math.isfinite(sum(losses[-1])):
                raise SystemExit(f"the loss is {losses[-1]} at step {step}")
        save(averaged, folder / "model")
        state = {"model": model, "dense": dense, "averaged": averaged, "optimizer": optimizer}
        written = checkpoint.with_suffix(".partial")
        torch.save({"epoch": epoch, **{name: part.state_dict() for name, part in state.items()}}, written)
        written.replace(checkpoint)
        print(f"epoch {epoch}: loss {np.mean(losses, 0).round(2)}, {time.perf_counter() - began:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--epochs", type=int, default=16)
    parser.add_argument("--images", type=int, default=3000)
    arguments = parser.parse_args()
    for split, count in (("calibration", 128), ("val", 400)):
        generate(arguments.folder / "coco", split, count)
    train(arguments.folder, arguments.epochs, arguments.images)


if __name__ == "__main__":
    main()
