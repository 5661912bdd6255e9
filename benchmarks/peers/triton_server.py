"""A bundle's model in Triton: onnxruntime in its Python backend, from the JPEG to the detections.

    python benchmarks/peers/triton_server.py BUNDLE --pytriton SITE_PACKAGES [--port PORT] [--grpc-port PORT]
        [--workers N] [--intra-op N] [--published FILE]

The wheel of nvidia-pytriton has Triton and its Python backend, but not its onnxruntime backend, which comes with
NVIDIA's images alone. Each of the workers is a process of its own, with the model in it. Prints
``http://127.0.0.1:PORT`` once it is ready; an image is the body of a request to ``/v2/models/detect/infer`` with
Inference-Header-Content-Length: 0.

SITE_PACKAGES is of an environment for the same Python that has nvidia-pytriton and, as its backend cannot be given
arrays of another, NumPy before 2; all else is this environment's.
"""

from __future__ import annotations

import http.client
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import onnxruntime
from detections import server_options

import trtdet

HERE = Path(__file__).parent

CONFIG = """backend: "python"
input [{{name: "image" data_type: TYPE_UINT8 dims: [-1]}}]
output [{{name: "answer" data_type: TYPE_STRING dims: [1]}}]
instance_group [{{count: {workers} kind: KIND_CPU}}]
"""


def repository(folder: Path, pytriton: Path, workers: int) -> list[object]:
    """Writes the model and finds the backend; gives Triton's options."""
    triton = pytriton / "pytriton" / "tritonserver"
    model, backend = folder / "models" / "detect", folder / "backends" / "python"
    (model / "1").mkdir(parents=True)
    (model / "config.pbtxt").write_text(CONFIG.format(workers=workers))
    shutil.copy(HERE / "triton_model.py", model / "1" / "model.py")
    backend.mkdir(parents=True)
    stub = triton / "python_backend_stubs" / f"{sys.version_info.major}.{sys.version_info.minor}"
    for file in (*(triton / "backends" / "python").iterdir(), stub / "triton_python_backend_stub"):
        (backend / file.name).symlink_to(file.resolve())
    program = triton / "bin" / "tritonserver"
    return [program, "--model-repository", model.parent, "--backend-directory", backend.parent]


def wait_until_ready(port: int, process: subprocess.Popen[bytes]) -> None:
    while process.poll() is None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        try:
            connection.request("GET", "/v2/health/ready")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        finally:
            connection.close()
        time.sleep(0.1)
    raise SystemExit("triton_server.py: error: tritonserver ended; its words are above")


def main() -> None:
    parser = server_options(__doc__)
    parser.add_argument("--pytriton", type=Path, required=True, help="the site-packages that have nvidia-pytriton")
    parser.add_argument("--grpc-port", type=int, help="no gRPC without it")
    options = parser.parse_args()
    if not options.port:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            options.port = free.getsockname()[1]
    packages = Path(onnxruntime.__file__).parents[1]
    ours = (options.pytriton.resolve(), HERE.resolve(), Path(trtdet.__file__).parents[1], packages)
    given = {
        "TRTDET_PEER_PATH": os.pathsep.join(map(str, ours)),
        "TRTDET_PEER_BUNDLE": str(options.bundle.resolve()),
        "TRTDET_PEER_INTRA_OP": str(options.intra_op),
        "TRTDET_PEER_PUBLISHED": str(options.published.resolve()) if options.published else "",
    }
    with tempfile.TemporaryDirectory() as folder:
        command = repository(Path(folder), options.pytriton.resolve(), options.workers)
        command += ["--http-address", "127.0.0.1", "--http-port", options.port]
        over_grpc = ["--grpc-address", "127.0.0.1", "--grpc-port", options.grpc_port]
        command += over_grpc if options.grpc_port else ["--allow-grpc", "false"]
        command += ["--allow-metrics", "false", "--log-info", "false"]
        process = subprocess.Popen([str(word) for word in command], env={**os.environ, **given}, stdout=sys.stderr)
        signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        try:
            wait_until_ready(options.port, process)
            print(f"http://127.0.0.1:{options.port}", flush=True)
            process.wait()
        finally:
            process.terminate()
            process.wait()


if __name__ == "__main__":
    main()
