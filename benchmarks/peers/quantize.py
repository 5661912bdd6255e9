"""Quantises one ONNX model with one peer. ``run.py`` starts it in that peer's environment; trtdet is not needed here.

    python quantize.py PEER METHOD MODEL IMAGES EXCLUDED OUTPUT

IMAGES is a folder with one ``.npy`` a calibration image, float32 (1, 3, H, W), pre-processed; EXCLUDED a JSON list of
the names of nodes that stay in float.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx


def modelopt(method: str, model: Path, images: Path, excluded: list[str], output: Path) -> None:
    """NVIDIA ModelOpt's ONNX quantisation, its own placement, calibrated on the CPU.

    Its default of float16 for the rest of the network is left out: coordinates of several hundred pixels lose mAP in
    float16, and that is no loss of INT8.
    """
    from modelopt.onnx.quantization import quantize

    quantize(
        str(model),
        quantize_mode="int8",
        calibration_method=method,
        calibration_data_reader=_reader(model, images),
        calibration_eps=["cpu"],
        high_precision_dtype="fp32",
        nodes_to_exclude=[f"{re.escape(name)}$" for name in excluded],  # it takes regular expressions
        output_path=str(output),
    )


def onnxruntime(method: str, model: Path, images: Path, excluded: list[str], output: Path) -> None:
    """onnxruntime's static quantisation, as TensorRT takes it: Q/DQ, symmetric int8, per channel, bias in float.

    Its pre-processing step is left out: shapes are inferred and batch normalisations folded already. Its entropy
    calibrator, given all images at once, has no more bins than levels and so keeps the whole range: it is ``minmax``.
    ``entropy-strided`` gives it one image at a time, which adds bins as the range grows, and spares memory.
    """
    from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantType, quantize_static

    quantize_static(
        str(model),
        str(output),
        _reader(model, images),
        quant_format=QuantFormat.QDQ,
        op_types_to_quantize=["Conv"],
        nodes_to_exclude=excluded,
        per_channel=True,
        activation_type=QuantType.QInt8,
        weight_type=QuantType.QInt8,
        calibrate_method=CalibrationMethod.MinMax if method == "minmax" else CalibrationMethod.Entropy,
        extra_options={
            "ActivationSymmetric": True,
            "WeightSymmetric": True,
            "QuantizeBias": False,
            # Of any method, in spite of the name.
            "CalibStridedMinMax": 1 if method == "entropy-strided" else None,
        },
    )


def nncf(method: str, model: Path, images: Path, excluded: list[str], output: Path) -> None:
    """NNCF's post-training quantisation with the symmetric preset, bias correction included.

    ``per-tensor`` is the same with one range an activation: the preset gives the input of a depthwise convolution a
    range per channel, with which TensorRT builds it in float.
    """
    import nncf as library
    from nncf.quantization.advanced_parameters import AdvancedQuantizationParameters, QuantizationParameters

    source = onnx.load(str(model))
    name = source.graph.input[0].name
    files = _files(images)
    per_tensor = AdvancedQuantizationParameters(
        activations_quantization_params=QuantizationParameters(per_channel=False)
    )
    quantized = library.quantize(
        source,
        library.Dataset(files, lambda file: {name: np.load(file)}),
        preset=library.QuantizationPreset.PERFORMANCE,
        target_device=library.TargetDevice.ANY,
        subset_size=len(files),
        # Not every excluded node is one in its own graph: it leaves constants out.
        ignored_scope=library.IgnoredScope(names=excluded, validate=False),
        advanced_parameters=per_tensor if method == "per-tensor" else None,
    )
    onnx.save(quantized, str(output))


def _files(images: Path) -> list[Path]:
    return sorted(images.glob("*.npy"))


def _reader(model: Path, images: Path) -> Any:
    """Reads one image at a time, so that no peer's memory holds all of them."""
    from onnxruntime.quantization import CalibrationDataReader

    name = onnx.load(str(model), load_external_data=False).graph.input[0].name
    files = _files(images)

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.rewind()

        def __len__(self) -> int:
            return len(files)

        def set_range(self, start_index: int, end_index: int) -> None:
            self._left = iter(files[start_index:end_index])

        def rewind(self) -> None:
            self.set_range(0, len(files))

        def get_first(self) -> dict[str, Any]:
            return {name: np.load(files[0])}

        def get_next(self) -> dict[str, Any] | None:
            file = next(self._left, None)
            return None if file is None else {name: np.load(file)}

    return Reader()


def main() -> None:
    peer, method, model, images, excluded, output = sys.argv[1:]
    # A script's own folder comes first on the path; nothing in it is meant to be imported from here.
    sys.path.pop(0)
    run = {"modelopt": modelopt, "onnxruntime": onnxruntime, "nncf": nncf}[peer]
    run(method, Path(model), Path(images), json.loads(Path(excluded).read_text()), Path(output))


if __name__ == "__main__":
    main()
