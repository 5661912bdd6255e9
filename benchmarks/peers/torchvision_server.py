"""torchvision's own two-stage detector, run as it is, behind aiohttp, answering as ``/v1/detect`` does.

    python benchmarks/peers/torchvision_server.py BUNDLE --factory MODULE:FUNCTION --weights FILE.pth
        [--port PORT] [--workers N] [--intra-op N]

The function gives a Faster or Mask R-CNN of torchvision, the one that the bundle was exported from; the current folder
is importable. Each request is worked on by one of N threads: OpenCV decodes and resizes as the bundle says, PyTorch
runs the network, and torchvision's own function pastes the masks.

Needs trtdet, torch, torchvision and aiohttp.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from aiohttp_server import application, serve
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.roi_heads import paste_masks_in_image

from trtdet.bundle import Bundle
from trtdet.data.images import decode_image, preprocess
from trtdet.detection.masks import THRESHOLD, run_lengths


class Torchvision:
    """Answers for images: the whole way of one image, in the thread that calls it."""

    def __init__(self, bundle: Path, factory: str, weights: Path, intra_op: int) -> None:
        self._config = Bundle(bundle, verify=False).config
        sys.path.insert(0, str(Path.cwd()))
        module, _, function = factory.partition(":")
        self._model = getattr(importlib.import_module(module), function)().eval()
        self._model.load_state_dict(torch.load(weights, weights_only=True))
        if intra_op:
            torch.set_num_threads(intra_op)

    @torch.inference_mode()
    def __call__(self, files: Sequence[bytes]) -> bytes:
        """The answer for the bytes of a JPEG or PNG file, which is the only one."""
        (file,) = files
        pixels = decode_image(file)
        height, width = pixels.shape[:2]
        image, placement = preprocess(pixels, self._config.input)
        found = self._found(torch.from_numpy(image)[None])
        boxes = placement.to_image(found["boxes"].numpy())
        rows: list[dict[str, Any]] = [
            {"box": box, "score": score, "class": label - 1, "name": self._config.classes[label - 1]}
            for box, score, label in zip(
                boxes.tolist(), found["scores"].tolist(), found["labels"].tolist(), strict=True
            )
        ]
        if "masks" in found:
            pasted = paste_masks_in_image(found["masks"], torch.from_numpy(boxes), (height, width))
            for row, mask in zip(rows, pasted[:, 0] > THRESHOLD, strict=True):
                row["mask"] = run_lengths(mask.numpy())
        return json.dumps({"images": [{"width": width, "height": height, "detections": rows}]}).encode()

    def _found(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
        """The detections in pixels of the network's input, without torchvision's own resizing, which is done."""
        model, sizes = self._model, [self._config.input.size]
        features = model.backbone(images)
        proposals, _ = model.rpn(ImageList(images, sizes), features)
        (found,), _ = model.roi_heads(features, proposals, sizes)
        result: dict[str, torch.Tensor] = found
        return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--factory", required=True)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2, help="requests that are worked on at the same time")
    parser.add_argument("--intra-op", type=int, default=1, help="threads of each operator; 0 for PyTorch's own choice")
    options = parser.parse_args()
    detect = Torchvision(options.bundle, options.factory, options.weights, options.intra_op)
    asyncio.run(serve(application(detect, options.workers), options.port))


if __name__ == "__main__":
    main()
