"""Bundles with other manifests, and packages of them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trtdet import PackageOptions, TritonOptions, package
from trtdet.bundle import BackendPart, Bundle, QuantizationPart
from trtdet.calibration import cache
from trtdet.config import InputConfig
from trtdet.errors import BundleError

pytest.importorskip(
    "tritonclient.grpc", reason="Triton's configuration is read by tritonclient: pip install 'trtdet[dev]'"
)

from standin.triton.server import read_config
from tritonclient.grpc import model_config_pb2

TENSORRT = BackendPart(name="tensorrt", version="10.9.0", sms=(86, 89))
INT8 = QuantizationPart(mode="explicit", calibrator="percentile")
TABLE = cache.write({"images": 0.1}, 8600)
Remake = Callable[..., Path]


def nms(made: Bundle, **changes: Any) -> Any:
    return made.manifest.nms.model_copy(update=changes)


def pixels(made: Bundle, **changes: Any) -> Any:
    part = made.manifest.input
    config = InputConfig.model_validate({**part.preprocess.model_dump(), **changes})
    return part.model_copy(update={"preprocess": config})


def repository(bundle: Path, tmp_path: Path, **options: Any) -> Path:
    return package(bundle, tmp_path / "models", PackageOptions("triton", triton=TritonOptions(**options))).folder


def configs(folder: Path) -> dict[str, Any]:
    return {path.parent.name: read_config(path.parent) for path in sorted(folder.glob("*/config.pbtxt"))}


def shape(tensor: Any) -> tuple[str, str, list[int]]:
    return tensor.name, model_config_pb2.DataType.Name(tensor.data_type), list(tensor.dims)


def refusal(bundle: Path, folder: Path, options: PackageOptions, error: type[Exception] = BundleError) -> str:
    with pytest.raises(error) as raised:
        package(bundle, folder, options)
    assert not folder.exists()
    assert "\n" not in str(raised.value)
    return str(raised.value)
