"""A configuration of DeepStream's Gst-nvinfer, and all files that it needs.

nvinfer scales frames itself, with one ``net-scale-factor`` for all channels, and pads with black. A bundle with
unsupported pre-processing is refused; small differences are warnings.

nvinfer builds an engine from the ONNX file if the engine is missing or does not fit the machine. In INT8 it then needs
a calibration table, and builds FP16 without one; this also holds for Q/DQ models, although TensorRT ignores the table.
So the package includes the bundle's table, if the TensorRT version still has calibrators.

Sources: "Gst-nvinfer" in the DeepStream documentation (keys, ``y = net-scale-factor * (x - offsets)``), and the
published sources of the plugin and libnvds_infer (channel order of ``offsets``, name of a built engine, missing table).
"""

from __future__ import annotations

import numpy as np

from trtdet import __version__
from trtdet.backends.libraries import library_named
from trtdet.bundle import Bundle, Manifest
from trtdet.calibration import cache
from trtdet.config import InputConfig, shipped_folder
from trtdet.errors import BundleError, ConfigError

_CONFIG = "config_infer_primary.txt"
_PARSER = "nvdsinfer_trtdet"
_CALIBRATION = "calibration.cache"
_FILTERS = {"nearest": 0, "linear": 1, "cubic": 2, "area": 3}
"""Values of ``scaling-filter``: nearest, bilinear, cubic (on a GPU), and a filter that covers more pixels to shrink."""

_SOURCES = {
    f"{_PARSER}.cpp": f"deepstream/{_PARSER}.cpp",
    "CMakeLists.txt": "deepstream/CMakeLists.txt",
    "detections.cpp": "src/detections.cpp",
    **{f"trtdet/{name}.hpp": f"include/trtdet/{name}.hpp" for name in ("bundle", "detections", "errors", "export")},
}
"""Sources of the bounding-box parser by their names in the package, with libtrtdet's NMS."""


def configuration(bundle: Bundle, name: str) -> tuple[dict[str, bytes], tuple[str, ...]]:
    """The files by name, and warnings for the user. ``name`` is the detector's, for the README.

    The bundle has a TensorRT engine, or only a model, from which nvinfer builds an engine.

    Raises:
        BundleError, ConfigError: nvinfer cannot run the bundle as it was measured.
    """
    manifest = bundle.manifest
    _check(manifest)
    files = {
        "labels.txt": "".join(f"{label}\n" for label in manifest.model.classes).encode(),
        "model.onnx": bundle.model.read_bytes(),
    }
    if bundle.engine is not None:
        files["model.engine"] = bundle.engine.read_bytes()
    backend = manifest.backend
    table = _CALIBRATION in manifest.files and library_named(backend.name).may_read_calibration_cache(backend.version)
    for file in (*([_CALIBRATION] if table else []), *(part.file for part in backend.plugins)):
        files[file] = bundle.file(file).read_bytes()
    source = shipped_folder("service")
    files.update({file: (source / place).read_bytes() for file, place in _SOURCES.items()})
    files[f"{_PARSER}_config.h"] = _parser_header(manifest).encode()
    files[_CONFIG] = _config_file(bundle, table).encode()
    warnings = [*_pixel_warnings(manifest.input.preprocess), *_engine_warnings(bundle, table)]
    files["README.md"] = _readme(bundle, name, warnings).encode()
    return files, tuple(warnings)


def _check(manifest: Manifest) -> None:
    """Raises an error for bundles that nvinfer cannot run."""
    pixels = manifest.input.preprocess
    if len(set(pixels.std)) != 1:
        raise ConfigError(
            f"nvinfer has one scale for all channels, and input.std is {list(pixels.std)}",
            "put the division into the model's first convolution, set input.std to three equal values and build again",
        )
    if min(mean / pixels.scale for mean in pixels.mean) < 0:
        raise ConfigError(
            f"nvinfer's offsets must be at least 0, and input.mean is {list(pixels.mean)}",
            "put the normalisation into the model's first convolution and build again",
        )
    if manifest.input.dtype != "float32":
        raise BundleError(
            f"the network's input is {manifest.input.dtype}, and nvinfer gives float32",
            "build the bundle from a model with a float32 input",
        )
    lines = [label for label in manifest.model.classes if not label.isprintable() or label != label.strip()]
    if lines:
        raise ConfigError(f"class name {lines[0]!r} cannot be a line of labels.txt; rename it in the configuration")


def _config_file(bundle: Bundle, table: bool) -> str:
    """The configuration of Gst-nvinfer; ``table``: whether the package has a calibration table."""
    manifest = bundle.manifest
    pixels, batch = manifest.input.preprocess, manifest.input.shape.max[0]
    mode, precision = (2, "fp16") if manifest.precision.fp16 else (0, "fp32")
    if manifest.quantization.mode != "none":
        mode, precision = 1, "int8"
    properties: dict[str, object] = {
        "gpu-id": 0,
        "gie-unique-id": 1,
        "process-mode": 1,
        "network-type": 3 if _has_masks(manifest) else 0,
        # nvinfer gives an engine that it builds itself this name.
        "model-engine-file": "model.engine" if bundle.engine else f"model.onnx_b{batch}_gpu0_{precision}.engine",
        "onnx-file": "model.onnx",
        **({"int8-calib-file": _CALIBRATION} if table else {}),
        "labelfile-path": "labels.txt",
        "batch-size": batch,
        "network-mode": mode,
        **({} if manifest.backend.dla is None else {"enable-dla": 1, "use-dla-core": manifest.backend.dla}),
        "infer-dims": ";".join(map(str, manifest.input.shape.max[1:])),
        # (x * scale - mean) / std is scale / std * (x - mean / scale).
        "net-scale-factor": f"{pixels.scale / pixels.std[0]:.9g}",
        "offsets": ";".join(f"{mean / pixels.scale:.9g}" for mean in pixels.mean),
        "model-color-format": {"rgb": 0, "bgr": 1}[pixels.color],
        "maintain-aspect-ratio": int(pixels.resize != "stretch"),
        "symmetric-padding": int(pixels.resize == "letterbox-centre"),
        "scaling-filter": _FILTERS[pixels.interpolation],
        "interval": 0,
        "num-detected-classes": len(manifest.model.classes),
        "cluster-mode": 4,
        "output-blob-names": ";".join(part.name for part in manifest.outputs),
        **_parser_keys(manifest),
        "custom-lib-path": f"lib{_PARSER}.so",
    }
    thresholds = {"pre-cluster-threshold": f"{manifest.nms.score_threshold:.9g}", "topk": manifest.nms.max_detections}
    lines = [f"# Gst-nvinfer, made by trtdet {__version__}. Relative paths are relative to this file.", "[property]"]
    lines += [f"{key}={value}" for key, value in properties.items()]
    lines += ["", "[class-attrs-all]", *(f"{key}={value}" for key, value in thresholds.items())]
    return "\n".join(lines) + "\n"


def _has_masks(manifest: Manifest) -> bool:
    """Whether the parser gives masks: those of one-stage detectors."""
    return manifest.parts is not None and manifest.parts.masks is not None


def _parser_keys(manifest: Manifest) -> dict[str, object]:
    if manifest.parts is None or manifest.parts.masks is None:
        return {"parse-bbox-func-name": "NvDsInferParseTrtdet"}
    return {
        "output-instance-mask": 1,
        "segmentation-threshold": f"{manifest.parts.masks.threshold:.9g}",
        "parse-bbox-instance-mask-func-name": "NvDsInferParseTrtdetMasks",
    }


def _parser_header(manifest: Manifest) -> str:
    """The parser's C++ header with the bundle's thresholds; hexadecimal floats are exact."""
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
"""


def _pixel_warnings(pixels: InputConfig) -> list[str]:
    """Differences of nvinfer's pre-processing from the bundle's, as sentences without full stops."""
    warnings = []
    if pixels.resize != "stretch" and pixels.pad_value != 0:
        warnings.append(
            f"nvinfer pads with black, and the bundle was made for a border of grey level {pixels.pad_value}: build it "
            "with input.pad_value 0, see with 'trtdet eval' what that costs, and package that bundle"
        )
    if pixels.interpolation in ("cubic", "area"):
        warnings.append(
            f"nvinfer has no '{pixels.interpolation}' interpolation as trtdet has it; scaling-filter="
            f"{_FILTERS[pixels.interpolation]} comes closest, and what it does depends on what scales (GPU or VIC)"
        )
    return warnings


def _engine_warnings(bundle: Bundle, table: bool) -> list[str]:
    """Problems with the engine, outputs or thresholds under nvinfer, as sentences without full stops."""
    manifest = bundle.manifest
    backend = manifest.backend
    warnings = []
    beside = ["masks"] if manifest.masks is not None else []
    if manifest.parts is not None:
        beside += [name.replace("_", " ") for name in manifest.parts.model_dump() if name != "masks"]
    if beside:
        listed = " and ".join(beside)
        warnings.append(
            f"{listed} are left out: nvinfer's objects have no place for them; trtdet-serve and libtrtdet give the "
            f"{listed} of this bundle"
        )
    if bundle.engine is None:
        warnings.append(
            "the bundle has no engine: nvinfer builds one from the ONNX file at its first start, which takes minutes, "
            "and trtdet has not audited what precision its layers get"
        )
    if backend.loose_plugins:
        needed = ", ".join(backend.loose_plugins)
        warnings.append(f"the engine needs {needed}, which nvinfer does not load: start it with LD_PRELOAD")
    if backend.version_compatible or backend.carries_plugins:
        warnings.append(
            "the engine carries host code (engine.version_compatible or engine.embed_plugins), and nvinfer has no key "
            "that allows it: if it refuses the engine it builds another from the ONNX file; leave them out to be sure"
        )
    if manifest.quantization.mode != "none" and not table:
        warnings.append(
            "there is no calibration table here, without which nvinfer builds no INT8 engine"
            + (": it must take model.engine" if bundle.engine else "; build with --calib")
        )
    elif table and manifest.quantization.mode == "implicit":
        algorithm = bundle.file(_CALIBRATION).read_text().split("\n", 1)[0].split("-")[-1]
        if algorithm != cache.OURS:
            warnings.append(
                f"the calibration table is of the algorithm {algorithm}, and nvinfer's calibrator is of {cache.OURS}: "
                "an engine that nvinfer builds itself would not use it"
            )
    if manifest.nms.score_threshold < 0.05:
        warnings.append(
            f"the score threshold is {manifest.nms.score_threshold:g}, as COCO is scored with; raise "
            f"pre-cluster-threshold in {_CONFIG} to what you want to see"
        )
    return warnings


def _readme(bundle: Bundle, name: str, warnings: list[str]) -> str:
    """The README in Markdown."""
    backend = bundle.manifest.backend
    preload = ":".join(f"$PWD/{file}" for file in backend.loose_plugins)
    preload = f'LD_PRELOAD="{preload}" ' if preload else ""
    where = "nvinfer builds the engine from `model.onnx` at its first start and keeps it beside this file."
    if bundle.engine is not None:
        where = (
            f"`model.engine` is of TensorRT {backend.version}: DeepStream must have that version (its release notes "
            "say which, and\n`dpkg -l | grep libnvinfer`), and the GPU one of the compute capabilities "
            f"{', '.join(f'{sm // 10}.{sm % 10}' for sm in backend.sms) or 'that it was built for'}. Where they do not "
            "fit, nvinfer\nbuilds an engine from `model.onnx` and says so in its log."
        )
    nms = "The network suppresses; the parser only reads."
    if bundle.manifest.nms.mode == "host":
        nms = (
            "The network leaves suppression to its reader; the parser does it as trtdet does, with the values in "
            f"`{_PARSER}_config.h`."
        )
    text = "".join(f"- {warning}{'' if warning.endswith('.') else '.'}\n" for warning in warnings)
    return f"""# {name} for DeepStream

Made by trtdet {__version__}. Gst-nvinfer reads `{_CONFIG}`.

## To know before

{text}- Frames are decoded, converted and scaled by DeepStream: their grey levels are not those of trtdet, and sizes are
  cut to whole pixels where trtdet rounds. Score the pipeline on your own video.
- Scale once: give nvstreammux the size of the source, or it scales before nvinfer does.
- Gst-nvinfer leaves out boxes that reach over the upper or lower edge of the frame, as its published source has it. The
  parser clips boxes to the network's input, but where a border was padded it cannot know the frame's edge.

## Build the parser

```text
cmake -S . -B build -DCMAKE_BUILD_TYPE=Release -DDEEPSTREAM_DIR=/opt/nvidia/deepstream/deepstream
cmake --build build && cp build/lib{_PARSER}.so .
```

{nms} `cluster-mode=4` keeps nvinfer from suppressing a second time. `pre-cluster-threshold` may be raised freely.

## Run

```text
{preload}gst-launch-1.0 filesrc location=video.h264 ! h264parse ! nvv4l2decoder ! m.sink_0 nvstreammux name=m \\
    batch-size=1 width=1920 height=1080 ! nvinfer config-file-path=$PWD/{_CONFIG} ! \\
    nvvideoconvert ! nvdsosd ! fakesink
```

{where}
"""
