"""How a pipeline of DeepStream differs from trtdet, and the steps that are left to the user."""

from __future__ import annotations

from trtdet.bundle import Bundle
from trtdet.calibration import cache
from trtdet.config import InputConfig
from trtdet.deploy.deepstream.config_file import CALIBRATION, CONFIG, FILTERS


def pixel_warnings(pixels: InputConfig) -> list[str]:
    """How nvinfer's pre-processing differs from the bundle's, a sentence each without its full stop."""
    warnings = []
    if pixels.resize != "stretch" and pixels.pad_value != 0:
        warnings.append(
            f"nvinfer pads with black, and the bundle was made for a border of grey level {pixels.pad_value}: build it "
            "with input.pad_value 0, see with 'trtdet eval' what that costs, and package that bundle"
        )
    if pixels.interpolation in ("cubic", "area"):
        warnings.append(
            f"nvinfer has no '{pixels.interpolation}' interpolation as trtdet has it; scaling-filter="
            f"{FILTERS[pixels.interpolation]} comes closest, and what it does depends on what scales (GPU or VIC)"
        )
    return warnings


def engine_warnings(bundle: Bundle, table: bool) -> list[str]:
    """What may make nvinfer build another engine or load none, a sentence each without its full stop.

    Args:
        bundle: that is run.
        table: whether a calibration table is in the package.
    """
    manifest = bundle.manifest
    backend = manifest.backend
    warnings = []
    if manifest.masks is not None:
        warnings.append(
            "masks are left out: the parser reads boxes, scores and classes alone; trtdet-serve and libtrtdet give the "
            "masks of this bundle"
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
            "the engine carries host code (--version-compatible or --embed-plugins), and nvinfer has no key that "
            "allows it: if it refuses the engine it builds another from the ONNX file; build without them to be sure"
        )
    if manifest.quantization.mode != "none" and not table:
        warnings.append(
            "there is no calibration table here, without which nvinfer builds no INT8 engine: it must take model.engine"
            if bundle.engine
            else "there is no calibration table here, without which nvinfer builds no INT8 engine; build with --calib"
        )
    elif table and manifest.quantization.mode == "implicit" and _algorithm(bundle) != cache.OURS:
        warnings.append(
            f"the calibration table is of the algorithm {_algorithm(bundle)}, and nvinfer's calibrator is of "
            f"{cache.OURS}: an engine that nvinfer builds itself would not use it"
        )
    if manifest.nms.score_threshold < 0.05:
        warnings.append(
            f"the score threshold is {manifest.nms.score_threshold:g}, as COCO is scored with; raise "
            f"pre-cluster-threshold in {CONFIG} to what you want to see"
        )
    return warnings


def _algorithm(bundle: Bundle) -> str:
    return bundle.file(CALIBRATION).read_text().split("\n", 1)[0].split("-")[-1]
