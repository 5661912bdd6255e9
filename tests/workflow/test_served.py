"""What a packaged repository answers, held to what trtdet itself finds: through a stand-in of Triton everywhere, and
through Triton itself where the wheel of nvidia-pytriton is installed, which brings a server with the python backend.

The server wants NumPy 1, so it has an environment of its own, in which these tests are run with ``-m triton``:

    python -m venv .venv-triton
    .venv-triton/bin/pip install -e . nvidia-pytriton 'numpy<2' 'opencv-python-headless<4.12' pytest hypothesis
    .venv-triton/bin/python -m pytest -m triton tests
"""

import importlib.util
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models import for_onnxruntime
from numpy.typing import NDArray
from PIL import Image
from standin.machine import FOLDER

from trtdet import PackageOptions, TritonOptions, build, load_config, package
from trtdet.backends import OnnxRunner
from trtdet.bundle import Bundle
from trtdet.data.images import preprocess, read_image
from trtdet.options import BuildOptions, changed
from trtdet.runtime.detector import Detector

pytest.importorskip(
    "tritonclient.grpc", reason="Triton's configuration is read by tritonclient: pip install 'trtdet[dev]'"
)

from standin.triton.server import Ensemble, RefusedError

KINDS = {
    "dynamic": {"batch": (1, 3, 6)},
    "static batch": {"batch": (4, 4, 4)},
    "one": {},
    "at least two": {"batch": (2, 3, 4)},
    "host": {"mode": "host", "batch": (1, 2, 4)},
    "native": {"mode": "native", "batch": (1, 2, 4)},
    "border on all sides": {},
}
QUERIES = Path(__file__).parents[1] / "fixtures" / "detr.onnx"
NMS_FREE = {"queries": {"mode": "native"}, "queries, the best of them on the host": {"mode": "host"}}
"""A detector that needs no suppression, for Triton itself; its repository is held to a stand-in in tests/deploy."""
NAMES = ("num_dets", "boxes", "scores", "classes")
Answer = dict[str, NDArray[Any]]


@pytest.fixture(scope="module")
def bundles(model, dynamic, calibration_images, tmp_path_factory):
    """INT8 bundles for onnxruntime, each made once."""
    place = tmp_path_factory.mktemp("bundles")
    done: dict[str, Bundle] = {}

    def make(kind: str) -> Bundle:
        if kind not in done:
            more: dict[str, Any] = {**KINDS, **NMS_FREE}[kind]
            shared: dict[str, Any] = {"effort": "none", "backend": "onnxruntime", "int8_all": True, "num_images": 4}
            options = changed(BuildOptions(), images=calibration_images, **shared, **more)
            given = dynamic if more.get("batch", (4, 4, 4)) != (4, 4, 4) else model
            config = load_config("shapes")
            if kind == "border on all sides":
                centred = config.input.model_copy(update={"resize": "letterbox-centre"})
                config = config.model_copy(update={"input": centred})
            if kind in NMS_FREE:
                given, config = QUERIES, load_config(str(QUERIES.with_suffix(".yaml")))
            done[kind] = build(given, config, place / kind, options).bundle
        return done[kind]

    return make


@pytest.fixture(scope="module")
def pictures(validation, tmp_path_factory):
    """Files of several kinds and sizes; the second is wider than high, the third higher than wide."""
    folder = tmp_path_factory.mktemp("pictures")
    sources = sorted(validation.images.iterdir())[:5]
    sizes = [(256, 256), (400, 200), (131, 377), (640, 480), (90, 60)]
    kinds = ["png", "jpg", "bmp", "jpg", "webp"]
    for i, (source, size, kind) in enumerate(zip(sources, sizes, kinds, strict=True)):
        with Image.open(source) as image:
            image.convert("RGB").resize(size).save(folder / f"{i}.{kind}")
    return sorted(folder.iterdir())


def encoded(*files: bytes) -> NDArray[Any]:
    return np.array([[data] for data in files], dtype=object)


def expected(detector: Detector, path: Path) -> tuple[NDArray[Any], ...]:
    """What trtdet finds: boxes in pixels of the image, scores, classes."""
    network, where = preprocess(read_image(path), detector.input)
    boxes, scores, classes = detector(network[None]).image(0)
    return where.to_image(boxes), scores, classes


def hold(answer: Answer, row: int, detector: Detector, path: Path) -> int:
    """Compares one image's answer with trtdet; gives the number of detections."""
    boxes, scores, classes = expected(detector, path)
    count = int(answer["num_dets"][row, 0])
    assert count == len(scores), path
    np.testing.assert_array_equal(answer["classes"][row, :count], classes)
    np.testing.assert_allclose(answer["scores"][row, :count], scores, atol=1e-6)
    np.testing.assert_allclose(answer["boxes"][row, :count], boxes, atol=1e-3)
    assert not any(answer[name][row, count:].any() for name in NAMES[1:])
    return count


def standing_in(bundle: Bundle, folder: Path, **options: Any) -> Ensemble:
    package(bundle.path, folder, PackageOptions("triton", triton=TritonOptions(**options)))
    return Ensemble(folder, bundle.manifest.model.name, OnnxRunner(bundle.model.read_bytes()))


@pytest.mark.parametrize("kind", KINDS)
def test_the_packaged_models_find_what_trtdet_finds(bundles, pictures, tmp_path, kind):
    bundle = bundles(kind)
    detector = Detector.open(bundle.path)
    ensemble = standing_in(bundle, tmp_path / "models")
    most = bundle.manifest.input.shape.max[0]
    total = 0
    for start in range(0, len(pictures), most):
        paths = pictures[start : start + most]
        answer = ensemble(image=encoded(*(path.read_bytes() for path in paths)))
        total += sum(hold(answer, row, detector, path) for row, path in enumerate(paths))
    assert total > 20


def test_pixels_are_taken_as_they_are(bundles, pictures, tmp_path):
    bundle = bundles("dynamic")
    ensemble = standing_in(bundle, tmp_path / "models", input="pixels")
    detector = Detector.open(bundle.path)
    for path in pictures:
        answer = ensemble(image=np.stack([read_image(path)] * 2))
        assert hold(answer, 0, detector, path) == hold(answer, 1, detector, path)


def test_of_a_tensorrt_engine_only_the_run_is_another(machine, model, calibration_images, pictures, tmp_path):
    command = ["build", model, "--config", "shapes", "--backend", "tensorrt", "--images", calibration_images]
    done = machine.trtdet(
        *command, "--num-images", 4, "--effort", "none", "--int8-all", "--guard", "off", "-o", tmp_path / "b"
    )
    assert done.code == 0, done.err
    packaged = machine.trtdet("package", tmp_path / "b", "--format", "triton", "-o", tmp_path / "models", "--json")
    assert packaged.code == 0, packaged.err
    bundle = Bundle(tmp_path / "b")
    assert (tmp_path / "models" / "shapes_engine" / "1" / "model.plan").read_bytes() == bundle.engine.read_bytes()
    assert bundle.manifest.nms.mode == "efficient"
    ensemble = Ensemble(tmp_path / "models", "shapes", Detector.open(tmp_path / "b", runtime="onnxruntime").runner)
    detector = Detector.open(tmp_path / "b", runtime="onnxruntime")
    assert sum(hold(ensemble(image=encoded(path.read_bytes())), 0, detector, path) for path in pictures) > 20


def test_what_tensorrts_plugin_counts_without_having_found_it_is_left_out(bundles, pictures, tmp_path):
    bundle = bundles("native")
    runner = OnnxRunner(bundle.model.read_bytes())

    def padded(images: NDArray[np.float32]) -> Answer:
        """The last half of what was found as EfficientNMS_TRT gives pairs under a low threshold."""
        found = {name: array.copy() for name, array in runner(images).items()}
        for row, (count,) in enumerate(found["num_dets"]):
            found["scores"][row, count // 2 : count] = -32768.0
        return found

    whole = standing_in(bundle, tmp_path / "models")
    half = Ensemble(tmp_path / "models", "shapes", padded)
    for path in pictures:
        one, other = (ensemble(image=encoded(path.read_bytes())) for ensemble in (whole, half))
        kept = int(one["num_dets"][0, 0]) // 2
        assert other["num_dets"][0, 0] == kept
        np.testing.assert_array_equal(other["boxes"][0, :kept], one["boxes"][0, :kept])
        assert not other["scores"][0, kept:].any()


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ([b""], "image 1 of 1: the image cannot be decoded"),
        ([b"GIF89a, or so it says"], "image 1 of 1: the image cannot be decoded"),
        (["whole", "half"], "image 2 of 2: the image cannot be decoded: image file is truncated"),
        (["whole"] * 5, "the request has 5 images, allowed are 1 to 4; send them in several"),
        ([], "the request has 0 images, allowed are 1 to 4; send them in several"),
    ],
)
def test_what_is_no_image_is_refused_in_one_sentence(bundles, pictures, tmp_path, files, said):
    data = pictures[1].read_bytes()
    known = {"whole": data, "half": data[: len(data) // 2]}
    ensemble = standing_in(bundles("static batch"), tmp_path / "models")
    with pytest.raises(RefusedError) as raised:
        ensemble(image=encoded(*(known.get(one, one) for one in files)).reshape(-1, 1))
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_the_served_models_load_neither_onnx_nor_a_runtime(bundles, tmp_path):
    package(bundles("host").path, tmp_path / "models", PackageOptions("triton"))
    program = (
        "import importlib.util, sys\n"
        f"for step in ('preprocess', 'postprocess'):\n"
        f"    path = {str(tmp_path / 'models')!r} + f'/shapes_{{step}}/1/model.py'\n"
        "    spec = importlib.util.spec_from_file_location(step, path)\n"
        "    spec.loader.exec_module(importlib.util.module_from_spec(spec))\n"
        "heavy = 'onnx onnxruntime onnx_graphsurgeon onnxruntime_extensions faster_coco_eval rich torch ray'.split()\n"
        "print([name for name in heavy if name in sys.modules])\n"
    )
    root = str(FOLDER.parent.parent)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(FOLDER / "triton"), root])}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


@dataclass
class Server:
    """Triton with a repository in which a python model stands for the engine.

    Attributes:
        ports: of HTTP, gRPC and metrics.
        log: what it prints.
    """

    ports: tuple[int, ...]
    log: Path
    process: subprocess.Popen[bytes]
    name: str
    _client: Any = field(default=None)

    def __call__(self, images: NDArray[Any]) -> Answer:
        import tritonclient.grpc as grpcclient

        if self._client is None:
            self._client = grpcclient.InferenceServerClient(f"127.0.0.1:{self.ports[1]}")
        tensor = grpcclient.InferInput("image", images.shape, "BYTES" if images.dtype == object else "UINT8")
        tensor.set_data_from_numpy(images)
        found = self._client.infer(self.name, [tensor])
        return {name: found.as_numpy(name) for name in NAMES}

    @property
    def together(self) -> list[int]:
        """Images that reached the engine at once, since the start."""
        return [int(size) for size in re.findall(r"TOGETHER (\d+)", self.log.read_text(errors="replace"))]


@pytest.fixture
def triton(tmp_path):
    """Starts Triton on a bundle's repository."""
    if importlib.util.find_spec("pytriton") is None:
        pytest.skip("Triton is not installed; the head of this file says how")
    import pytriton

    home = Path(pytriton.__file__).resolve().parent
    backend = tmp_path / "backends" / "python"
    shutil.copytree(home / "tritonserver" / "backends" / "python", backend)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = shutil.copy(home / "tritonserver" / "python_backend_stubs" / version / "triton_python_backend_stub", backend)
    program = shutil.copy(home / "tritonserver" / "bin" / "tritonserver", tmp_path)
    for path in (stub, program):
        Path(path).chmod(0o755)
    started: list[subprocess.Popen[bytes]] = []

    def start(bundle: Bundle, **options: Any) -> Server:
        folder = package(
            bundle.path, tmp_path / "models", PackageOptions("triton", None, TritonOptions(**options))
        ).folder
        name = bundle.manifest.model.name
        stand_in(folder / f"{name}_engine", bundle)
        ports = free_ports(3)
        log = tmp_path / "triton.log"
        arguments = [f"--model-repository={folder}", f"--backend-directory={backend.parent}", "--exit-timeout-secs=5"]
        for flag, port in zip(("http", "grpc", "metrics"), ports, strict=True):
            arguments += [f"--{flag}-port={port}", f"--{flag}-address=127.0.0.1"]
        libraries = str(home.parent / "nvidia_pytriton.libs")
        # The stub takes the packages of the python3 that is first on PATH.
        path = os.pathsep.join([str(Path(sys.executable).parent), "/usr/bin", "/bin"])
        with log.open("wb") as stream:
            process = subprocess.Popen(
                [program, *arguments],
                stdout=stream,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PATH": path, "LD_LIBRARY_PATH": libraries},
            )
        started.append(process)
        url = f"http://127.0.0.1:{ports[0]}/v2/health/ready"
        for _ in range(240):
            assert process.poll() is None, log.read_text(errors="replace")[-4000:]
            try:
                with urllib.request.urlopen(url, timeout=1):
                    return Server(ports, log, process, name)
            except (urllib.error.URLError, OSError):
                time.sleep(0.25)
        raise AssertionError(log.read_text(errors="replace")[-4000:])

    yield start
    for process in started:
        process.kill()
        process.wait()


def stand_in(folder: Path, bundle: Bundle) -> None:
    """The engine's configuration as it is, but for what runs it."""
    path = folder / "config.pbtxt"
    lines = path.read_text().splitlines()
    kept = [line for line in lines if not line.startswith(("platform:", "backend:", "default_model_filename:"))]
    path.write_text("\n".join(['backend: "python"', *kept]).replace("KIND_GPU", "KIND_CPU") + "\n")
    shutil.copy(FOLDER / "triton" / "onnx_engine.py", folder / "1" / "model.py")
    (folder / "1" / "model.onnx").write_bytes(bundle.model.read_bytes())


def free_ports(count: int) -> tuple[int, ...]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = tuple(one.getsockname()[1] for one in sockets)
    for one in sockets:
        one.close()
    return ports


@pytest.mark.triton
@pytest.mark.parametrize("kind", [*KINDS, *NMS_FREE])
def test_triton_answers_what_trtdet_finds(bundles, pictures, triton, kind):
    bundle = bundles(kind)
    detector = Detector.open(bundle.path)
    server = triton(bundle)
    with ThreadPoolExecutor(8) as pool:
        files = pictures * 4
        answers = list(pool.map(lambda path: server(encoded(path.read_bytes())), files))
    assert sum(hold(answer, 0, detector, path) for answer, path in zip(answers, files, strict=True)) > 80
    most = bundle.manifest.input.shape.max[0]
    answer = server(encoded(*(path.read_bytes() for path in pictures[:most])))
    assert len(answer["num_dets"]) == min(most, len(pictures))
    for row, path in enumerate(pictures[:most]):
        hold(answer, row, detector, path)


@pytest.mark.triton
def test_requests_with_images_of_different_sizes_share_a_batch(bundles, pictures, triton):
    server = triton(bundles("dynamic"), queue_delay_us=200_000)
    before = len(server.together)
    with ThreadPoolExecutor(10) as pool:
        list(pool.map(lambda path: server(encoded(path.read_bytes())), pictures * 2))
    assert max(server.together[before:]) >= 3


@pytest.mark.triton
def test_triton_says_which_image_is_wrong_and_goes_on(bundles, pictures, triton):
    from tritonclient.utils import InferenceServerException

    server = triton(bundles("dynamic"))
    data = pictures[1].read_bytes()
    with pytest.raises(
        InferenceServerException, match="image 2 of 2: the image cannot be decoded: image file is trunc"
    ) as raised:
        server(encoded(data, data[: len(data) // 2]))
    assert raised.value.status() == "StatusCode.INVALID_ARGUMENT"
    with pytest.raises(InferenceServerException, match="batch-size must be <= 6"):
        server(encoded(*[data] * 7))
    hold(server(encoded(data)), 0, Detector.open(bundles("dynamic").path), pictures[1])


@pytest.mark.triton
def test_triton_takes_pixels(bundles, pictures, triton):
    server = triton(bundles("dynamic"), input="pixels")
    detector = Detector.open(bundles("dynamic").path)
    for path in pictures:
        hold(server(read_image(path)[None]), 0, detector, path)


@pytest.mark.triton
def test_the_client_that_the_readme_shows_runs(bundles, pictures, triton, tmp_path):
    server = triton(bundles("dynamic"))
    (shown,) = re.findall(r"^```python\n(.*?)^```", (tmp_path / "models" / "README.md").read_text(), re.M | re.S)
    shutil.copy(pictures[1], tmp_path / "street.jpg")
    command = [sys.executable, "-c", shown.replace("localhost:8001", f"127.0.0.1:{server.ports[1]}")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"\d+\.\d+", done.stdout)) > 10


def real_model(shared_data: Path, place: Path, **options: Any) -> tuple[Bundle, list[Path]]:
    """A published model on photographs, each of another size."""
    model, asked = shared_data / "models" / "yolox_nano.onnx", for_onnxruntime(**options, precision="fp32")
    bundle = build(model, load_config("yolox"), place, asked).bundle
    return bundle, sorted((shared_data / "coco" / "val2017").glob("*.jpg"))


def test_a_published_model_on_photographs(shared_data, tmp_path):
    bundle, photographs = real_model(shared_data, tmp_path / "b", mode="host", batch=(1, 4, 8))
    ensemble, detector = standing_in(bundle, tmp_path / "models"), Detector.open(tmp_path / "b")
    answer = ensemble(image=encoded(*(path.read_bytes() for path in photographs[:6])))
    assert sum(hold(answer, row, detector, path) for row, path in enumerate(photographs[:6])) > 50


@pytest.mark.triton
@pytest.mark.slow
def test_triton_with_a_published_model_on_photographs(shared_data, tmp_path, triton):
    bundle, photographs = real_model(shared_data, tmp_path / "b", mode="host", batch=(1, 4, 8))
    server, detector = triton(bundle), Detector.open(tmp_path / "b")
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda path: server(encoded(path.read_bytes())), photographs[:40]))
    total = sum(hold(answer, 0, detector, path) for answer, path in zip(answers, photographs, strict=False))
    assert total > 400
