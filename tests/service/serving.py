"""A real trtdet-serve process on a recorded bundle, and clients for it, from well-behaved to hostile."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from PIL import Image

from trtdet.building import build
from trtdet.bundle import Bundle, BundleWriter
from trtdet.config import load_config
from trtdet.data.images import preprocess, read_image
from trtdet.exporter import SHAPES_MODEL
from trtdet.options import BuildOptions
from trtdet.runtime.detector import Detector

ONNXRUNTIME = Path(onnxruntime.__file__).parent / "capi"
"""Where the wheel has the library."""

Serve = Callable[..., "Server"]
"""Makes a service, see the fixtures."""

PATIENCE = 60.0
"""Seconds until a test gives up on what should take none: the machine may be busy, sanitizers make all of it slow."""


@dataclass(frozen=True)
class Picture:
    """An image file and what Python's detector finds in it, by the content hash of the bundle."""

    file: Path
    data: bytes
    width: int
    height: int
    found: Mapping[str, Found]


@dataclass(frozen=True)
class Found:
    boxes: NDArray[np.float32]
    scores: NDArray[np.float32]
    classes: NDArray[np.int32]


def find(detector: Detector, file: Path) -> Found:
    """What Python finds in an image, boxes in pixels of the image."""
    inputs, placement = preprocess(read_image(file), detector.input)
    batch = detector(inputs[None])
    count = int(batch.num_dets[0, 0])
    return Found(placement.to_image(batch.boxes[0, :count]), batch.scores[0, :count], batch.classes[0, :count])


def pictured(bundle: Path, files: Sequence[Path], runtime: str = "onnxruntime") -> list[Picture]:
    """Image files and what Python finds in them."""
    content_hash, detector = Bundle(bundle).manifest.content_hash, Detector.open(bundle, runtime=runtime)
    return [
        Picture(file, file.read_bytes(), *read_image(file).shape[1::-1], {content_hash: find(detector, file)})
        for file in files
    ]


def check(image: Mapping[str, Any], picture: Picture, content_hash: str) -> None:
    """Compares one image of an answer with what Python finds."""
    expected = picture.found[content_hash]
    assert (image["width"], image["height"]) == (picture.width, picture.height)
    got = image["detections"]
    assert [one["class"] for one in got] == expected.classes.tolist()
    np.testing.assert_allclose([one["score"] for one in got], expected.scores, rtol=0, atol=1e-4)
    boxes = np.array([one["box"] for one in got], np.float32).reshape(-1, 4)
    np.testing.assert_allclose(boxes, expected.boxes, rtol=0, atol=0.01)


@dataclass(frozen=True)
class Case:
    """Two bundles that find different things, a folder with the recording of each, and the images in it."""

    bundles: tuple[Path, Path]
    recordings: Path
    pictures: Sequence[Picture]

    @property
    def hashes(self) -> tuple[str, str]:
        first, second = (Bundle(path).manifest.content_hash for path in self.bundles)
        return first, second


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> str:
        """The type of an error; the message must be one line."""
        error = self.json["error"]
        assert set(error) == {"type", "message"}
        assert error["message"]
        assert "\n" not in error["message"]
        return str(error["type"])


@dataclass
class Server:
    """A process; used as a context it is stopped at the end, and must then have ended well."""

    program: Path
    arguments: Sequence[object]
    folder: Path
    process: subprocess.Popen[bytes] = field(init=False)
    port: int = field(init=False, default=0)
    wrapper: Sequence[object] = ()
    """The beginning of the command, such as ``prlimit --as=...``."""
    stderr: int | None = None
    """Where the log goes instead of into a file."""

    def __enter__(self) -> Server:
        self.folder.mkdir(parents=True, exist_ok=True)
        with self.output.open("wb") as out, self.log.open("wb") as err:
            self.process = subprocess.Popen(
                [*self.wrapper, self.program, "--port", "0", *map(str, self.arguments)],
                stdout=out,
                stderr=err if self.stderr is None else self.stderr,
            )
        line = until(lambda: self.output.read_text() if self.output.read_text().endswith("\n") else "", self.alive)
        self.port = int(line.split()[1].rpartition(":")[2])
        return self

    def __exit__(self, kind: object, value: object, trace: object) -> None:
        if kind is not None:
            self.process.kill()
            self.process.wait()
            print(self.log.read_text()[-4000:])
            return
        assert self.stop() == 0, self.log.read_text()[-4000:]

    @property
    def output(self) -> Path:
        return self.folder / "out.txt"

    @property
    def log(self) -> Path:
        return self.folder / "log.txt"

    def alive(self) -> None:
        assert self.process.poll() is None, f"the service ended: {self.log.read_text()[-4000:]}"

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def stop(self) -> int:
        if self.process.poll() is None:
            self.signal()
        return self.process.wait(PATIENCE)

    @property
    def sanitized(self) -> bool:
        """Whether the program was built with a sanitizer, which keeps memory for itself."""
        return any(name in self.program.read_bytes() for name in (b"__asan_init", b"__tsan_init"))

    def peak_memory(self) -> int:
        """The most memory that the process ever had, in bytes."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        (line,) = [line for line in text.splitlines() if line.startswith("VmHWM:")]
        return int(line.split()[1]) * 1024

    def connect(self, port: int | None = None) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", port or self.port, timeout=PATIENCE)

    def raw(self, address: str = "127.0.0.1") -> socket.socket:
        """A connection from this address, which is one of the loopback's: clients are told apart by it."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE, source_address=(address, 0))

    def call(
        self,
        method: str,
        target: str,
        body: bytes | None = None,
        headers: Mapping[str, str] = {},
        port: int | None = None,
    ) -> Answer:
        """One request on a connection of its own; to another port if one is given."""
        connection = self.connect(port)
        try:
            return call(connection, method, target, body, headers)
        finally:
            connection.close()

    def detect(self, data: bytes, query: str = "", kind: str = "image/jpeg") -> Answer:
        return self.call("POST", f"/v1/detect{query}", data, {"Content-Type": kind})

    def send(self, data: bytes) -> Answer:
        """The answer to bytes on a connection of their own."""
        with self.raw() as stream:
            stream.sendall(data)
            return read_answer(stream)

    def burst(self, data: bytes, count: int) -> list[Answer]:
        """The answers to requests that are all sent before one answer is read."""
        with contextlib.ExitStack() as stack:
            streams = [stack.enter_context(self.raw()) for _ in range(count)]
            for stream in streams:
                stream.sendall(data)
            return [read_answer(stream) for stream in streams]

    def unready(self, target: str = "/healthz") -> Answer:
        """The answer of a probe as soon as it says that the service cannot serve."""
        answer: Answer = until(lambda: (found := self.call("GET", target)).status == 503 and found)
        return answer

    def log_lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    @property
    def admin_port(self) -> int:
        found = until(lambda: re.search(r" listens for probes url=http://[^ ]+:(\d+)\n", self.log.read_text()))
        return int(found[1])

    def metrics(self, port: int | None = None) -> dict[str, float]:
        """All samples by name with labels, as they are written; by another port if one is given."""
        return parse_metrics(self.call("GET", "/metrics", port=port).body.decode())


def call(
    connection: http.client.HTTPConnection,
    method: str,
    target: str,
    body: bytes | None = None,
    headers: Mapping[str, str] = {},
) -> Answer:
    connection.request(method, target, body, dict(headers))
    response = connection.getresponse()
    return Answer(response.status, {name.lower(): value for name, value in response.getheaders()}, response.read())


def finished(
    *command: object, code: int = 0, timeout: float | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Runs a program to its end, which has this exit code; ``options`` are those of ``subprocess.run``."""
    words = list(map(str, command))
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=timeout, **options)
    assert done.returncode == code, done.stdout[-3000:] + done.stderr[-3000:]
    return done


def failed_start(program: Path, *arguments: object) -> str:
    """The one line of a start that fails with exit code 1."""
    done = finished(program, *arguments, code=1, timeout=PATIENCE)
    assert (done.stdout, done.stderr.count("\n")) == ("", 1), done.stderr
    assert done.stderr.startswith("trtdet-serve: error: ")
    return done.stderr


def read_answer(stream: socket.socket, method: str = "GET") -> Answer:
    """The next answer of a raw socket, and no byte more, so that pipelined ones can be read one by one."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        byte = stream.recv(1)
        if not byte:
            raise ConnectionError(f"the connection ended after {head!r}")
        head += byte
    first, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
    body = b""
    length = 0 if method == "HEAD" else int(headers.get("content-length", "0"))
    while len(body) < length:
        more = stream.recv(length - len(body))
        if not more:
            raise ConnectionError("the connection ended in an answer")
        body += more
    return Answer(int(first.split()[1]), headers, body)


def until(condition: Any, alive: Any = lambda: None, patience: float = PATIENCE) -> Any:
    """Waits until a condition holds, and returns what it gives."""
    end = time.monotonic() + patience
    while time.monotonic() < end:
        if value := condition():
            return value
        alive()
        time.sleep(0.01)
    raise AssertionError("waited in vain")


def post(data: bytes, target: str = "/v1/detect", **headers: str) -> bytes:
    """The bytes of a request with a JPEG."""
    lines = {"Host": "x", "Content-Type": "image/jpeg", "Content-Length": str(len(data)), **headers}
    return (
        f"POST {target} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in lines.items()) + "\r\n"
    ).encode() + data


def form(files: Sequence[tuple[str, bytes]], boundary: str = "limit") -> tuple[bytes, str]:
    """A body with several files, and its Content-Type."""
    parts = [
        f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n'
        f"Content-Type: image/jpeg\r\n\r\n".encode()
        + data
        + b"\r\n"
        for name, data in files
    ]
    return b"".join(parts) + f"--{boundary}--\r\n".encode(), f'multipart/form-data; boundary="{boundary}"'


def parse_metrics(text: str) -> dict[str, float]:
    """Reads Prometheus' text format, strictly.

    Every sample needs a HELP and a TYPE line of its family before it, histograms must add up, and no sample may come
    twice. See https://prometheus.io/docs/instrumenting/exposition_formats/.
    """
    samples: dict[str, float] = {}
    kinds: dict[str, str] = {}
    helped: set[str] = set()
    assert text.endswith("\n")
    for line in text.splitlines():
        if line.startswith("# HELP "):
            name = line.split(" ", 3)[2]
            assert name not in helped
            helped.add(name)
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name not in kinds
            assert kind in ("counter", "gauge", "histogram")
            kinds[name] = kind
        else:
            key, _, value = line.rpartition(" ")
            name = key.partition("{")[0]
            family = name
            for suffix in ("_bucket", "_sum", "_count"):
                if kinds.get(name.removesuffix(suffix)) == "histogram":
                    family = name.removesuffix(suffix)
            assert family in kinds, line
            assert family in helped, line
            assert kinds[family] != "counter" or family.endswith("_total"), line
            assert key not in samples, line
            samples[key] = float(value)
    for name, kind in kinds.items():
        if kind == "histogram":
            buckets = [value for key, value in samples.items() if key.startswith(f"{name}_bucket{{")]
            assert buckets == sorted(buckets)
            assert buckets[-1] == samples[f"{name}_count"]
            assert f'{name}_bucket{{le="+Inf"}}' in samples
    return samples


def shapes_bundle(path: Path, **options: Any) -> Path:
    """A bundle of the shipped detector for onnxruntime, in float32 unless the options of a build say another."""
    settings = BuildOptions(**{"precision": "fp32", "backend": "onnxruntime", **options})
    return build(SHAPES_MODEL, load_config("shapes"), path, settings).bundle.path


def turned(file: Path) -> bytes:
    """A PNG file of an image that lies on its side, and says so in its EXIF data."""
    exif, stream = Image.Exif(), io.BytesIO()
    exif[0x0112] = 6
    with Image.open(file) as image:
        image.convert("RGB").transpose(Image.Transpose.ROTATE_90).save(stream, "PNG", exif=exif)
    return stream.getvalue()


def handmade(path: Path, model: onnx.ModelProto, where: str, **fields: Any) -> Path:
    """A bundle with one network of a square input, made by hand, so that the contract is tested and not the build."""
    name = model.graph.name
    shape = [dim.dim_value for dim in model.graph.input[0].type.tensor_type.shape.dim]
    placed = {"size": shape[2:], "resize": "stretch", "scale": 1.0, "mean": [0, 0, 0], "std": [1, 1, 1]}
    outputs = [
        {
            "name": output.name,
            "dtype": {onnx.TensorProto.FLOAT: "float32"}.get(output.type.tensor_type.elem_type, "int32"),
            "shape": [dim.dim_value for dim in output.type.tensor_type.shape.dim],
        }
        for output in model.graph.output
    ]
    with BundleWriter(path) as writer:
        writer.add("fp32.onnx", model.SerializeToString())
        writer.commit(
            {
                "trtdet_version": "0.1.0",
                "model": {"sha256": "0" * 64, "name": name, "classes": fields.pop("classes")},
                "input": {
                    "name": "images",
                    "dtype": "float32",
                    "shape": dict.fromkeys(("min", "opt", "max"), shape),
                    "preprocess": placed | fields.pop("placed", {}),
                },
                "outputs": outputs,
                "nms": {"where": where, **load_config("shapes").nms.model_dump(), **fields.pop("nms", {})},
                "backend": {"name": "onnxruntime", "version": "1", "sms": []},
                "quantization": {"mode": "none"},
                "precision": {"int8": 0, "fp16": 0, "fp32": 0},
                "audit": None,
                "command": {"precision": "fp32"},
                "portable": "fp32.onnx",
                "content_hash": "0" * 64,
                **fields,
            }
        )
    return path


def total(metrics: Mapping[str, float], name: str, *labels: str) -> float:
    """The sum of the samples of a name that have all these labels, written as in 'code="200"'."""
    return sum(
        value for key, value in metrics.items() if key.partition("{")[0] == name and all(one in key for one in labels)
    )
