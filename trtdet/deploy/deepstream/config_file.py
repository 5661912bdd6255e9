"""The files that configure Gst-nvinfer and its bounding-box parser."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from trtdet import __version__
from trtdet.bundle import Bundle, Manifest
from trtdet.config import InputConfig
from trtdet.errors import ConfigError

CONFIG = "config_infer_primary.txt"
PARSER = "nvdsinfer_trtdet"
CALIBRATION = "calibration.cache"
FILTERS = {"nearest": 0, "linear": 1, "cubic": 2, "area": 3}
"""``scaling-filter``: nearest, bilinear, cubic on a GPU, and the one that takes in more pixels as the image shrinks."""


def normalisation(pixels: InputConfig) -> tuple[float, list[float]]:
    """``net-scale-factor`` and ``offsets``: (x * scale - mean) / std is scale / std * (x - mean / scale)."""
    if len(set(pixels.std)) != 1:
        raise ConfigError(
            f"nvinfer has one scale for all channels, and input.std is {list(pixels.std)}",
            "put the division into the model's first convolution, set input.std to three equal values and build again",
        )
    offsets = [mean / pixels.scale for mean in pixels.mean]
    if min(offsets) < 0:
        raise ConfigError(
            f"nvinfer's offsets must be at least 0, and input.mean is {list(pixels.mean)}",
            "put the normalisation into the model's first convolution and build again",
        )
    return pixels.scale / pixels.std[0], offsets


def config_file(bundle: Bundle, scale: float, offsets: list[float], table: bool) -> bytes:
    """The file that Gst-nvinfer reads.

    Args:
        bundle: that is run.
        scale, offsets: of :func:`normalisation`.
        table: whether a calibration table is in the package.
    """
    manifest = bundle.manifest
    pixels = manifest.input.preprocess
    batch = manifest.input.shape.max[0]
    mode, called = _mode(manifest)
    properties: dict[str, object] = {
        "gpu-id": 0,
        "gie-unique-id": 1,
        "process-mode": 1,
        "network-type": 0,
        # Where nvinfer builds the engine itself, it writes it under this name.
        "model-engine-file": "model.engine" if bundle.engine else f"model.onnx_b{batch}_gpu0_{called}.engine",
        "onnx-file": "model.onnx",
        **({"int8-calib-file": CALIBRATION} if table else {}),
        "labelfile-path": "labels.txt",
        "batch-size": batch,
        "network-mode": mode,
        "infer-dims": ";".join(map(str, manifest.input.shape.max[1:])),
        "net-scale-factor": f"{scale:.9g}",
        "offsets": ";".join(f"{value:.9g}" for value in offsets),
        "model-color-format": {"rgb": 0, "bgr": 1}[pixels.color],
        "maintain-aspect-ratio": int(pixels.resize != "stretch"),
        "symmetric-padding": int(pixels.resize == "letterbox-centre"),
        "scaling-filter": FILTERS[pixels.interpolation],
        "interval": 0,
        "num-detected-classes": len(manifest.model.classes),
        "cluster-mode": 4,
        "output-blob-names": ";".join(part.name for part in manifest.outputs),
        "parse-bbox-func-name": "NvDsInferParseTrtdet",
        "custom-lib-path": f"lib{PARSER}.so",
    }
    thresholds = {
        "pre-cluster-threshold": f"{manifest.nms.score_threshold:.9g}",
        "topk": manifest.nms.max_detections,
    }
    head = f"# Gst-nvinfer, made by trtdet {__version__}. Relative paths are relative to this file.\n"
    return (head + _group("property", properties) + "\n" + _group("class-attrs-all", thresholds)).encode()


def _group(name: str, keys: Mapping[str, object]) -> str:
    return f"[{name}]\n" + "".join(f"{key}={value}\n" for key, value in keys.items())


def _mode(manifest: Manifest) -> tuple[int, str]:
    """``network-mode``, and its part of the name of an engine that nvinfer builds."""
    if manifest.quantization.mode != "none":
        return 1, "int8"
    return (2, "fp16") if manifest.precision.fp16 else (0, "fp32")


def parser_header(manifest: Manifest) -> bytes:
    """The parser's C++ header with the bundle's thresholds; floats in hexadecimal, which is exact."""
    nms = manifest.nms
    score, overlap = np.float32(nms.score_threshold), np.float32(nms.iou_threshold)
    values = {
        "where": f"Suppression::{nms.mode}",
        "logits": str(nms.mode == "host" and nms.scores == "logits").lower(),
        "score_threshold": f"{float(score).hex()}F /* {float(score):.9g} */",
        "iou_threshold": f"{float(overlap).hex()}F /* {float(overlap):.9g} */",
        "max_detections": str(nms.max_detections),
        "pre_nms_topk": str(nms.pre_nms_topk),
        "class_agnostic": str(nms.class_agnostic).lower(),
        "best_class": str(nms.candidates == "best-class").lower(),
    }
    lines = "".join(f"    nms.{name} = {value};\n" for name, value in values.items())
    return f"""// What the bounding-box parser suppresses with, where the network leaves that to its reader.
// Made by trtdet {__version__}.

#pragma once

#include "trtdet/bundle.hpp"

namespace trtdet::deepstream {{

inline Nms rules() {{
    Nms nms;
{lines}    return nms;
}}

}}  // namespace trtdet::deepstream
""".encode()
