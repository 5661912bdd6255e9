"""Bundles that the C++ service runs with onnxruntime: the same detections as in Python, on a machine without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import onnxruntime
import pytest
from PIL import Image
from serving import ONNXRUNTIME, Picture, Server, check, find

from trtdet.bundle import Bundle
from trtdet.config import load_config
from trtdet.data.images import read_image
from trtdet.demo import shapes
from trtdet.exporter import SHAPES_MODEL
from trtdet.pipeline import BuildOptions, CalibrationOptions, build
from trtdet.runtime.detector import Detector


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Sequence[Path]:
    folder = tmp_path_factory.mktemp("images")
    files = [folder / f"{index}.png" for index in range(4)]
    for index, file in enumerate(files):
        Image.fromarray(shapes.render(shapes.DEFAULT_SEED, "onnxruntime", index)[0]).save(file)
    return files


@pytest.fixture
def start(program: Callable[[str], Path], tmp_path: Path) -> Callable[..., Server]:
    """Makes a service on a bundle, with onnxruntime from its wheel and more options."""
    path = program("serve/trtdet-serve")
    return lambda bundle, *options: Server(
        path, [bundle, "--library-folder", ONNXRUNTIME, *options], tmp_path / "server"
    )


def pictures(bundle: Path, files: Sequence[Path]) -> list[Picture]:
    """The images and what Python finds in them."""
    content_hash, detector = Bundle(bundle).manifest.content_hash, Detector.open(bundle, runtime="onnxruntime")
    return [
        Picture(file, file.read_bytes(), *read_image(file).shape[1::-1], {content_hash: find(detector, file)})
        for file in files
    ]


@pytest.mark.parametrize(
    ("nms", "precision", "options"),
    [
        ("host", "fp32", ()),
        ("native", "fp16", ("--max-batch", "4", "--lanes", "1")),
        ("onnx", "fp32", ("--onnxruntime-threads", "2")),
        ("efficient", "int8", ()),
    ],
)
def test_the_service_finds_what_python_finds(
    start: Callable[..., Server],
    images: Sequence[Path],
    tmp_path: Path,
    nms: str,
    precision: str,
    options: Sequence[str],
) -> None:
    bundle = tmp_path / "bundle"
    calibration = CalibrationOptions(images=images[0].parent, check_input=False)
    build(
        SHAPES_MODEL,
        load_config("shapes"),
        bundle,
        BuildOptions(precision, backend="onnxruntime", nms=nms, batch=(1, 2, 4), correct=(), calibration=calibration),
    )
    manifest = Bundle(bundle).manifest
    with start(bundle, *options) as server:
        runs_on = f"onnxruntime {onnxruntime.__version__} (CPU)"
        assert server.output.read_text().rstrip().endswith(f" runs bundle on {runs_on}")
        assert server.call("GET", "/v1/model").json["runs_on"] == runs_on
        assert server.call("GET", "/readyz").json["runs_on"] == {"bundle": runs_on}
        found = 0
        for picture in pictures(bundle, images):
            answer = server.detect(picture.data, kind="image/png").json
            check(answer["images"][0], picture, manifest.content_hash)
            found += len(answer["images"][0]["detections"])
        assert found > len(images)
