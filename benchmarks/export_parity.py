"""How far exported models are from torch, for each source of ``trtdet export`` and both of torch's exporters.

    pip install 'transformers>=5' torchvision ultralytics onnxscript
    python benchmarks/export_parity.py [SOURCE ...] > export.md

Networks have the published layers and random weights, with batch normalisation's statistics taken on pictures and
scores made to spread: with those of a fresh network all scores are equal, and nothing is found that could differ.
Prints Markdown, a row as soon as it is known; a source that cannot be exported gives its message.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from trtdet.config import InputConfig, load_config
from trtdet.errors import TrtdetError
from trtdet.exporter import ExportOptions, ExportReport, export, trials, yolox

SIDE = 192
"""Height and width of the input, in pixels, where a network does not have its own."""

OPSET = 18
"""The oldest that both exporters write."""

Exporter = Literal["auto", "torchscript", "dynamo"]

Made = tuple[str, ExportOptions]
"""A source of ``trtdet export`` and its options."""


@dataclass(frozen=True)
class Source:
    """A network whose export is measured: ``make`` writes what is exported into a folder."""

    name: str
    make: Callable[[Path], Made]
    exporters: tuple[Exporter, ...] = ("torchscript", "dynamo")


def pictures(given: InputConfig, count: int = 4) -> torch.Tensor:
    return torch.from_numpy(np.stack([trials.picture(given, seed) for seed in range(count)]))


@contextlib.contextmanager
def statistics(model: nn.Module) -> Iterator[None]:
    """Batch normalisation takes the mean and variance of what runs through it inside the block."""
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    model.eval()
    for norm in norms:
        norm.momentum = None
        norm.train()
    with torch.no_grad():
        yield
    model.eval()


def made_ultralytics(name: str, folder: Path) -> Made:
    from ultralytics.nn.tasks import DetectionModel

    torch.manual_seed(0)
    model = DetectionModel(f"{name}.yaml", nc=80, verbose=False)
    with statistics(model):
        model(pictures(InputConfig(size=(SIDE, SIDE), scale=1 / 255)))
        spread_last(model.model[-1], ("cv3", "one2one_cv3"))
    torch.save({"model": model.half(), "ema": None, "train_args": {"imgsz": SIDE}}, folder / "c.pt")
    return f"ultralytics:{folder / 'c.pt'}", ExportOptions()


def spread_last(head: nn.Module, branches: tuple[str, ...]) -> None:
    """The last layer of each branch of scores gets biases about even odds, so that some scores are high."""
    for branch in branches:
        for level in getattr(head, branch, None) or ():
            last = [module for module in level.modules() if isinstance(module, nn.Conv2d)][-1]
            last.bias.data.normal_(-3, 1)  # type: ignore[union-attr]


def made_yolov5(folder: Path) -> Made:
    return f"yolov5:{Path(__file__).parents[1] / 'tests/fixtures/yolov5_tiny.pt'}", ExportOptions(size=(SIDE, SIDE))


def made_yolox(variant: str, folder: Path) -> Made:
    torch.save({"model": detector(variant).state_dict()}, folder / "w.pth")
    return f"yolox-{variant}", ExportOptions(weights=folder / "w.pth", size=(SIDE, SIDE))


def detector(variant: str = "nano") -> nn.Module:
    """A YOLOX, as the factory of somebody's own module would give it."""
    torch.manual_seed(0)
    model = yolox.build(variant)
    with statistics(model):
        model(pictures(InputConfig(size=(SIDE, SIDE))))
        for name, value in model.named_parameters():
            if "preds" in name and name.endswith("bias"):
                value.normal_(-0.5, 0.5)
    return model


def made_factory(folder: Path) -> Made:
    sys.path.insert(0, str(Path(__file__).parent))
    config = load_config("yolox")
    resized = config.model_copy(update={"input": config.input.model_copy(update={"size": (SIDE, SIDE)})})
    return "export_parity:detector", ExportOptions(config=resized)


def made_torchvision(name: str, size: tuple[int, int] | None, folder: Path) -> Made:
    from torchvision.models import detection

    options = ExportOptions(weights=folder / "w.pth", size=size)
    torch.manual_seed(0)
    model = getattr(detection, name)(weights=None, weights_backbone=None, num_classes=91)
    given = InputConfig(size=size or (320, 320), mean=(123.675, 116.28, 103.53), std=(58.395, 57.12, 57.375))
    with statistics(model):
        model.backbone(pictures(given))
        if hasattr(model, "roi_heads"):
            model.rpn.head.cls_logits.weight.normal_(0, 0.2)
            predictor = model.roi_heads.box_predictor
            predictor.cls_score.weight.normal_(0, 1.0)
            predictor.cls_score.bias.normal_(0, 1.0)
            predictor.bbox_pred.weight *= 5
        else:
            for key, value in model.head.named_parameters():
                if key.endswith("bias"):
                    value.normal_(0, 0.5)
    torch.save(model.state_dict(), folder / "w.pth")
    return f"torchvision:{name}", options


def made_hugging_face(family: str, side: int, folder: Path) -> Made:
    from transformers import AutoConfig, AutoModelForObjectDetection

    changes: dict[str, Any] = {"id2label": {index: f"class {index}" for index in range(80)}}
    if family == "lw_detr":  # the layers whose features are used, and their scales, have no default
        changes |= {
            "backbone_config": {"model_type": "lw_detr_vit", "out_indices": [2, 4, 5, 9]},
            "projector_scale_factors": [1.0],
        }
    torch.manual_seed(0)
    model = AutoModelForObjectDetection.from_config(AutoConfig.for_model(family, **changes))
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if weights.ndim > 1 and weights.numel() and "embed" not in name:
                nn.init.normal_(weights, std=float(weights[0].numel()) ** -0.5)
    with statistics(model):
        model(pixel_values=pictures(InputConfig(size=(side, side), scale=1 / 255)))
    model.save_pretrained(folder / "model")
    pixels = {"do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": False, "resample": 2}
    (folder / "model" / "preprocessor_config.json").write_text(
        json.dumps({**pixels, "size": {"height": side, "width": side}}), encoding="utf-8"
    )
    return f"hf:{folder / 'model'}", ExportOptions()


def made_onnx(folder: Path) -> Made:
    from trtdet.exporter import SHAPES_MODEL

    return str(SHAPES_MODEL), ExportOptions(config=load_config("shapes"))


def sources() -> list[Source]:
    made = [Source(f"yolox-{name}", partial(made_yolox, name)) for name in ("nano", "s")]
    made += [
        Source(f"ultralytics: {name}", partial(made_ultralytics, name))
        for name in ("yolov5n", "yolov8n", "yolov9t", "yolov10n", "yolo11n", "yolo12n", "yolo26n")
    ]
    made.append(Source("yolov5: v6 network", made_yolov5))
    made += [
        Source(f"hf: {family}", partial(made_hugging_face, family, 448 if family in ("rf_detr", "lw_detr") else SIDE))
        for family in (
            *("rt_detr", "rt_detr_v2", "d_fine", "deimv2", "rf_detr", "lw_detr", "detr"),
            *("conditional_detr", "deformable_detr", "dab-detr", "yolos"),
        )
    ]
    sizes: dict[str, tuple[int, int] | None] = {"ssd300_vgg16": None, "ssdlite320_mobilenet_v3_large": None}
    made += [
        Source(f"torchvision: {name}", partial(made_torchvision, name, sizes.get(name, (160, 192))))
        for name in (
            *("retinanet_resnet50_fpn", "retinanet_resnet50_fpn_v2", "fcos_resnet50_fpn", *sizes),
            *("fasterrcnn_mobilenet_v3_large_320_fpn", "fasterrcnn_mobilenet_v3_large_fpn"),
            *("fasterrcnn_resnet50_fpn", "fasterrcnn_resnet50_fpn_v2"),
            *("maskrcnn_resnet50_fpn", "maskrcnn_resnet50_fpn_v2"),
        )
    ]
    return [*made, Source("package.module:factory", made_factory), Source("model.onnx", made_onnx, ("auto",))]


def row(source: Source, exporter: Exporter) -> str:
    """A line of the table."""
    said = exporter if source.exporters[0] != "auto" else ""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        name, options = source.make(folder)
        asked = replace(options, opset=OPSET, exporter=exporter)
        try:
            report = export(name, folder / "model.onnx", asked)
        except TrtdetError as error:
            return f"| `{source.name}` | {said} | {str(error).replace(place, '')} | | | |"
    return "| " + " | ".join([f"`{source.name}`", said, *measured(report)]) + " |"


def measured(report: ExportReport) -> tuple[str, ...]:
    outputs = ", ".join(f"{output.name} {output.max_abs:.1e}" for output in report.outputs)
    found = report.detections
    if found is None:
        return outputs, report.undetected, "", ""
    ties = f" ({found.ties})" if found.ties else ""
    return outputs, f"{found.matched} of {found.torch}{ties}", f"{found.max_score:.1e}", f"{found.max_box:.1e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", nargs="*", help="a part of the names of the rows that are made; all by default")
    chosen = parser.parse_args().source
    os.environ["HF_HUB_OFFLINE"] = "1"
    print("| source | exporter | largest error of the outputs | detections of both, of torch's (ties) | scores | px |")
    print("|---|---|---|---|---|---|", flush=True)
    for source in sources():
        if chosen and not any(part in source.name for part in chosen):
            continue
        for exporter in source.exporters:
            print(row(source, exporter), flush=True)


if __name__ == "__main__":
    main()
