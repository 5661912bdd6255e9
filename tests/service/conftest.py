"""The programs of service/, which 'make service' builds."""

import itertools
import os
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image
from serving import ONNXRUNTIME, Case, Server, pictured

from service.tests.record import record
from trtdet.building import build
from trtdet.building.bundle import BUILD_LOG
from trtdet.config import load_config
from trtdet.demo import shapes
from trtdet.exporter import SHAPES_MODEL
from trtdet.options import BuildOptions, NmsOptions

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def program():
    """Finds a program by its path in the build folder: ``build/service``, or what TRTDET_SERVICE_BUILD names, such as a
    build with sanitizers."""
    folder = Path(os.environ.get("TRTDET_SERVICE_BUILD", ROOT / "build" / "service"))

    def find(name: str) -> Path:
        path = folder / name
        if not path.is_file():
            pytest.skip(f"needs '{path}', which is not built: make service")
        return path

    return find


@pytest.fixture(scope="session")
def case(tmp_path_factory):
    """Real photographs where there are some, else generated images, both as JPEG, and two bundles with recordings."""
    folder = tmp_path_factory.mktemp("serving")
    data = ROOT.parent / "shared" / "data"
    if (data / "coco").is_dir():
        files = sorted((data / "coco" / "val2017").glob("*.jpg"))[:20]
        model, config = data / "models" / "yolox_nano.onnx", load_config("yolox")
    else:
        files = []
        for index in range(20):
            files.append(folder / f"{index}.jpg")
            Image.fromarray(shapes.render(shapes.DEFAULT_SEED, "serving", index)[0]).save(files[-1], quality=95)
        model, config = SHAPES_MODEL, load_config("shapes")
    recordings = folder / "recordings"
    recordings.mkdir()
    bundles = []
    # Two ways of suppression and two thresholds: another number of boxes in nearly every image.
    for nms, threshold in (("host", 0.1), ("native", 0.3)):
        own = config.model_copy(update={"nms": config.nms.model_copy(update={"score_threshold": threshold})})
        options = BuildOptions(precision="fp32", backend="onnxruntime", nms=NmsOptions(mode=nms), batch=(1, 4, 8))
        bundle = build(model, own, folder / nms, options).bundle
        # The builder's log, as a bundle with an engine has it: the service checks it as every other file.
        bundle.add(BUILD_LOG, b"[I] Engine generation completed in 0.6 seconds.\n")
        content_hash = bundle.manifest.content_hash
        record(bundle.path, files, recordings / f"{content_hash}.recording", runtime="onnxruntime")
        bundles.append(bundle.path)
    both = zip(*(pictured(bundle, files) for bundle in bundles), strict=True)
    pictures = [replace(first, found={**first.found, **second.found}) for first, second in both]
    return Case((bundles[0], bundles[1]), recordings, pictures)


@pytest.fixture
def start(program, tmp_path):
    """Makes a service on a bundle, with onnxruntime from its wheel and more options."""
    path = program("serve/trtdet-serve")
    return lambda *arguments: Server(path, [*arguments, "--library-folder", ONNXRUNTIME], tmp_path / "server")


@pytest.fixture
def serve(program, case, tmp_path):
    """Makes a service on the first bundle, or on another one, with more options."""
    path = program("serve/trtdet-serve")
    count = itertools.count()

    def start(*options: object, bundle: Path | None = None, recording: Path | None = None) -> Server:
        first = [bundle or case.bundles[0], "--recording", recording or case.recordings]
        return Server(path, [*first, *options], tmp_path / f"server{next(count)}")

    return start
