"""The HTTP service against the same work done in Python: throughput and latency at 1, 8 and 64 clients, and
whether both find the same. Needs ``trtdet-serve`` and what it runs the bundle with.

    python benchmarks/service.py BUNDLE --images DIR --service build/service/serve/trtdet-serve [-o OUT.md]
    python benchmarks/service.py BUNDLE --images DIR --service PATH --against aiohttp
    python benchmarks/service.py BUNDLE --images DIR --service PATH --against aiohttp fastapi grpc
        --fastapi SITE_PACKAGES --grpc-load build/service/bench/trtdet-grpc-load
    python benchmarks/service.py BUNDLE --images DIR --service PATH --against triton --pytriton SITE_PACKAGES
    python benchmarks/service.py BUNDLE --images DIR --service PATH --against torchvision --peer-factory MODULE:FUNCTION
        --peer-weights FILE.pth
    python benchmarks/service.py BUNDLE --images DIR --service PATH --recording FILE     without an engine, see below
    python benchmarks/service.py BUNDLE --images DIR --service PATH -- OPTION ...        options of the service

Both sides are asked in the same way: each client sends the next image when it has the answer for the last one, and an
answer is the detections in pixels of the image. Both decode the JPEG, pre-process it, collect waiting images into
batches, run the engine in as many lanes, suppress, and map the boxes back.

- service: ``trtdet-serve`` in a process of its own, asked over HTTP on this machine by clients in other processes.
- Python, ``--against in-process``: threads of this process call trtdet's own functions and execution contexts of
  ``trtdet.backends``; no HTTP.
- Python, ``--against aiohttp``: ``benchmarks/peers/aiohttp_server.py``, onnxruntime behind aiohttp in a process of its
  own, asked by the same clients as the service. It makes no batches. ``--peer-workers`` and ``--peer-intra-op``
  say how many requests it works on at a time, and with how many threads each run of the model. It runs the bundle's
  network; with ``--peer-model FILE`` this file, which the bundle was made from, and NumPy decodes its outputs.

- Python, ``--against fastapi``: the same behind FastAPI and uvicorn, ``benchmarks/peers/fastapi_server.py``.
  ``--fastapi`` names the site-packages of an environment that has them.

- Python, ``--against grpc``: the same behind grpcio, ``benchmarks/peers/grpc_server.py``. It and the service are asked
  over gRPC, image files as BYTES, by the clients of ``--grpc-load``, which ``make service`` builds.

- Triton, ``--against triton``: the same work in Triton's Python backend, ``benchmarks/peers/triton_server.py``.
  ``--pytriton`` names the site-packages of an environment that has nvidia-pytriton.

- torchvision, ``--against torchvision``: its own two-stage detector, run by PyTorch as it is, with the masks that it
  pastes, ``benchmarks/peers/torchvision_server.py``. The function gives the detector that the bundle was exported from.

With ``--batch N`` each request has N images, in a form over HTTP and in one tensor over gRPC, which servers in Python
run as one batch; the service does as its own ``--max-batch`` says. Times are then those of a request, throughput and
time of CPU those of an image.

All take turns, several rounds for each number of clients. The ratio of their throughput is taken round by round; its
median is shown, and between which values the rounds lay. Latency is that of all rounds. The time of CPU that a server
takes for an answer is the same on a busy machine, where throughput says little.

Every image is first asked for once of all, alone. The detections have to be equal: as many, of the same classes in the
same order, boxes within 0.01 pixels and scores within 1e-4. Where they are not, the report says where and the exit code
is 1. Of masks, where both give some, the report says how many pixels differ.

With ``--recording``, a file of ``service/tests/record.py`` of the same images, the service replays it and Python runs
the bundle's ONNX model on the CPU: that compares the detections and tries this script; its ratios say nothing of an
engine.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import math
import multiprocessing
import os
import queue
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

import trtdet
from trtdet.backends import cuda
from trtdet.bundle import Bundle
from trtdet.data import evenly, find_images
from trtdet.data.images import preprocess, read_image
from trtdet.detection.masks import from_run_lengths
from trtdet.errors import BackendError, ConfigError, DataError, TrtdetError, one_line
from trtdet.files import write_atomically
from trtdet.progress import Console
from trtdet.runtime.detector import Detector

BOX, SCORE = 0.01, 1e-4
"""How far detections may be from each other, in pixels and in probability."""

PEER_SERVERS = Path(__file__).parent / "peers"

STARTING = 300.0
"""Seconds in which the service has to be ready."""


@dataclass(frozen=True)
class Wire:
    """How a server is asked over HTTP.

    Attributes:
        detect: where an image is sent to.
        ready: what answers with 200 once it is ready.
        headers: of a request with an image.
        output: whether what ``/v1/detect`` answers is a binary output of the Open Inference Protocol here.
    """

    detect: str
    ready: str
    headers: Mapping[str, str]
    output: bool = False


IMAGE = {"Content-Type": "application/octet-stream"}
DETECT = Wire("/v1/detect", "/readyz", IMAGE)
BOUNDARY = "e3b0c44298fc1c149afb"
FORM = Wire("/v1/detect", "/readyz", {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"})
"""Of several images in a request."""
TRITON = Wire("/v2/models/detect/infer", "/v2/health/ready", {**IMAGE, "Inference-Header-Content-Length": "0"}, True)


@dataclass(frozen=True)
class Settings:
    """What was asked for.

    Attributes:
        lanes: batches at the same time, on both sides.
        seconds: of each round, of each side, for each number of clients.
        against: what the service is compared with, keys of ``PEERS``.
        peer_options: the command lines of peers in processes of their own, of the keys of ``against``.
        service_options: more of the service's command line.
        grpc_load: the program of clients over gRPC; None where nothing is asked over gRPC.
        batch: images of each request.
    """

    bundle: Path
    images: tuple[Path, ...]
    service: Path
    recording: Path | None
    library_folders: tuple[Path, ...]
    clients: tuple[int, ...]
    lanes: int
    max_delay_us: int
    rounds: int
    seconds: float
    against: tuple[str, ...]
    peer_options: Mapping[str, tuple[object, ...]]
    service_options: tuple[str, ...]
    grpc_load: Path | None
    batch: int = 1


@dataclass
class Answers:
    """What clients met: milliseconds from question to answer, how long all of it took and what it cost the server's
    process, in seconds. Each question was for ``batch`` images."""

    ms: list[float] = field(default_factory=list)
    seconds: float = 0.0
    cpu: float = 0.0
    batch: int = 1

    @property
    def throughput(self) -> float:
        """Images a second."""
        return self.batch * len(self.ms) / self.seconds

    @property
    def cpu_ms(self) -> float:
        """Of the server, in milliseconds for each image."""
        return 1e3 * self.cpu / (self.batch * len(self.ms))

    def percentile(self, share: float) -> float:
        """The smallest value that so large a share is not above."""
        return sorted(self.ms)[math.ceil(share * len(self.ms)) - 1]

    def __add__(self, other: Answers) -> Answers:
        return Answers(self.ms + other.ms, self.seconds + other.seconds, self.cpu + other.cpu, other.batch)


@dataclass(frozen=True)
class Found:
    """Detections in one image, best first; boxes in its pixels."""

    boxes: NDArray[np.float32]
    scores: NDArray[np.float32]
    classes: NDArray[np.int64]
    masks: tuple[dict[str, Any], ...] = ()
    """Run lengths, where they are given."""


class Side(Protocol):
    """The service, or what it is compared with."""

    def detect(self, paths: Sequence[Path]) -> list[Found]:
        """The detections of each image file of a request, in its own pixels."""

    def ask(self, clients: int, seconds: float) -> Answers:
        """So many clients for so long."""

    def __str__(self) -> str:
        """What it runs."""


# Python's side.


class Lane:
    """Runs batches of any size that the engine takes; each size is captured once, as the C++ lanes do."""

    def __init__(self, detector: Detector, smallest: int) -> None:
        self._detector, self._smallest = detector, smallest
        self._lanes: dict[int, Any] = {}

    def run(self, images: NDArray[np.float32]) -> dict[str, NDArray[Any]]:
        """The outputs for float32 (B, 3, H, W); what the next run gives is written over them."""
        runner = self._detector.runner
        if not runner.on_device:  # onnxruntime's has no buffers to fill
            return runner(images)
        missing = max(0, (runner.batch or self._smallest) - len(images))
        filled = np.concatenate([images, np.repeat(images[-1:], missing, axis=0)]) if missing else images
        lane = self._lanes.get(len(filled))
        if lane is None:
            # It has run with these images.
            self._lanes[len(filled)] = lane = runner.new_context(filled)
        else:
            lane.fill(filled)
            lane.run()
        return {name: value[: len(images)] for name, value in lane.results().items()}


class InPython:
    """A queue, threads that make batches of what waits and run them, and callers who wait for their detections."""

    def __init__(self, settings: Settings) -> None:
        bundle = Bundle(settings.bundle)
        self.detector = Detector.open(settings.bundle, runtime="onnxruntime" if settings.recording else "engine")
        shape = bundle.manifest.input.shape
        self._largest = self.detector.runner.largest_batch or shape.max[0]
        self._delay, self._paths = settings.max_delay_us * 1e-6, settings.images
        # SimpleQueue of Python 3.11 waits for ever where another thread takes what came just as the time was over.
        self._waiting: queue.Queue[tuple[NDArray[np.float32], Future[Any]] | None] = queue.Queue()
        self._threads = [
            threading.Thread(target=self._serve, args=(Lane(self.detector, shape.min[0]),))
            for _ in range(settings.lanes)
        ]
        for thread in self._threads:
            thread.start()

    def __str__(self) -> str:
        return str(self.detector.runner.run_info)

    def detect(self, paths: Sequence[Path]) -> list[Found]:
        return [self._detect(path) for path in paths]

    def _detect(self, path: Path) -> Found:
        image, placement = preprocess(read_image(path), self.detector.input)
        future: Future[Any] = Future()
        self._waiting.put((image, future))
        boxes, scores, classes = future.result()
        return Found(placement.to_image(boxes), scores, classes)

    def ask(self, clients: int, seconds: float) -> Answers:
        def client(first: int, end: float) -> list[float]:
            ms = []
            for index in itertools.count(first):
                started = time.monotonic()
                if started >= end:
                    return ms
                self._detect(self._paths[index % len(self._paths)])
                ms.append(1e3 * (time.monotonic() - started))
            raise AssertionError

        started, cpu = time.monotonic(), time.process_time()
        with ThreadPoolExecutor(clients) as pool:
            rows = list(pool.map(client, range(clients), [started + seconds] * clients))
        ms = list(itertools.chain.from_iterable(rows))
        return Answers(ms, time.monotonic() - started, time.process_time() - cpu)

    def close(self) -> None:
        for _ in self._threads:
            self._waiting.put(None)
        for thread in self._threads:
            thread.join()
        if hasattr(self.detector.runner, "close"):
            self.detector.runner.close()

    def _serve(self, lane: Lane) -> None:
        ended = False
        while not ended:
            first = self._waiting.get()
            if first is None:
                return
            batch, until = [first], time.monotonic() + self._delay
            while len(batch) < self._largest and not ended:
                try:
                    waiting = self._waiting.get(timeout=max(0.0, until - time.monotonic()))
                except queue.Empty:
                    break
                if waiting is None:
                    ended = True
                else:
                    batch.append(waiting)
            try:
                outputs = lane.run(np.stack([image for image, _ in batch]))
                found = self.detector.suppressed(outputs, self.detector.nms)
                for row, (_, future) in enumerate(batch):
                    future.set_result(tuple(np.array(part) for part in found.image(row)))
            except BaseException as error:
                for _, future in batch:
                    future.set_exception(error)


@contextmanager
def in_process(settings: Settings, pool: ProcessPoolExecutor) -> Iterator[Side]:
    """Threads of this process."""
    python = InPython(settings)
    try:
        yield python
    finally:
        python.close()


# Processes that are asked over HTTP.


@contextmanager
def serving(settings: Settings, pool: ProcessPoolExecutor) -> Iterator[dict[str, Side]]:
    """The service, by the protocol that it is asked over."""
    command: list[object] = [settings.service, settings.bundle, "--host", "127.0.0.1", "--port", 0]
    command += ["--lanes", settings.lanes, "--max-delay-us", settings.max_delay_us, "--log-level", "error"]
    if settings.recording:
        command += ["--recording", settings.recording]
    for folder in settings.library_folders:
        command += ["--library-folder", folder]
    runs = f"the recording '{settings.recording}'" if settings.recording else "the bundle"
    given = f" with {' '.join(settings.service_options)}" if settings.service_options else ""
    over_grpc = free_port() if settings.grpc_load else None
    command += ["--grpc-port", over_grpc] if over_grpc else []
    with (
        listening([*command, *settings.service_options]) as server,
        OverHttp(pool, server, settings, runs + given) as side,
    ):
        sides: dict[str, Side] = {"HTTP": side}
        if over_grpc:
            sides["gRPC"] = OverGrpc(Listening(over_grpc, server.process), settings, runs + given)
        yield sides


@dataclass(frozen=True)
class Listening:
    """A server in a process of its own."""

    port: int
    process: int

    def cpu(self) -> float:
        """Seconds of CPU that it has taken, with those of its children."""
        return sum(family(self.process).values()) / os.sysconf("SC_CLK_TCK")


def family(process: int) -> dict[int, int]:
    """A process and its children that run, and theirs: the time that each has taken of a CPU, with its ended ones', in
    ticks."""
    ticks, parents = {}, {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            words = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        number = int(folder.name)
        parents[number], ticks[number] = int(words[1]), sum(map(int, words[11:15]))
    own = {process}
    while grown := {number for number, parent in parents.items() if parent in own} - own:
        own |= grown
    return {number: ticks[number] for number in own if number in ticks}


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextmanager
def aiohttp_server(settings: Settings, pool: ProcessPoolExecutor) -> Iterator[Side]:
    """A server in Python, in a process of its own."""
    runs = f"onnxruntime {version('onnxruntime')}"
    with in_python("aiohttp", f"{runs} behind aiohttp {version('aiohttp')}", settings, pool) as side:
        yield side


@contextmanager
def fastapi_server(settings: Settings, pool: ProcessPoolExecutor) -> Iterator[Side]:
    """A server in Python, in a process of its own."""
    packages = {
        each.name.lower(): each.version for each in distributions(path=[str(settings.peer_options["fastapi"][1])])
    }
    behind = f"FastAPI {packages['fastapi']}, uvicorn {packages['uvicorn']}"
    with in_python("fastapi", f"onnxruntime {version('onnxruntime')} behind {behind}", settings, pool) as side:
        yield side


@contextmanager
def grpc_server(settings: Settings, pool: ProcessPoolExecutor) -> Iterator[Side]:
    """A server in Python over gRPC, in a process of its own."""
    command = [sys.executable, PEER_SERVERS / "grpc_server.py", settings.bundle, *settings.peer_options["grpc"]]
    runs = f"onnxruntime {version('onnxruntime')} behind grpcio {version('grpcio')}"
    with listening(command, None) as server:
        yield OverGrpc(server, settings, runs + given_to("grpc", settings))


@contextmanager
def torchvision_server(settings: Settings, pool: ProcessPoolExecutor) -> Iterator[Side]:
    """torchvision's own detector, in a process of its own."""
    runs = f"torchvision {version('torchvision')} on PyTorch {version('torch')}"
    with in_python("torchvision", f"{runs} behind aiohttp {version('aiohttp')}", settings, pool) as side:
        yield side


def given_to(peer: str, settings: Settings) -> str:
    """The options of a peer that change what it does, for the report."""
    words = settings.peer_options[peer]
    return f" with {' '.join(map(str, words[words.index('--workers') :]))}"


@contextmanager
def in_python(peer: str, runs: str, settings: Settings, pool: ProcessPoolExecutor) -> Iterator[Side]:
    """A script of ``benchmarks/peers``, which serves what ``runs`` names over HTTP."""
    command = [sys.executable, PEER_SERVERS / f"{peer}_server.py", settings.bundle, *settings.peer_options[peer]]
    with listening(command) as server, OverHttp(pool, server, settings, runs + given_to(peer, settings)) as side:
        yield side


@contextmanager
def triton_server(settings: Settings, pool: ProcessPoolExecutor) -> Iterator[Side]:
    """Triton, in processes of its own."""
    command = [sys.executable, PEER_SERVERS / "triton_server.py", settings.bundle, *settings.peer_options["triton"]]
    runs = f"onnxruntime {version('onnxruntime')} in Triton's Python backend"
    told = runs + given_to("triton", settings)
    with (
        listening(command, TRITON) as server,
        OverHttp(pool, server, settings, told, TRITON) as side,
    ):
        yield side


@contextmanager
def listening(command: Sequence[object], wire: Wire | None = DETECT) -> Iterator[Listening]:
    """A service that is ready, as it says itself with no ``wire``; it runs until the end of the block.

    Raises:
        ConfigError: there is no such program.
        BackendError: it did not start, or ended otherwise than well once it was told to, as a program does in which a
            sanitizer found something; the message has its own words.
    """
    try:
        process = subprocess.Popen(
            list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8"
        )
    except OSError as error:
        raise ConfigError(f"'{command[0]}' cannot be started ({error}); build service/ and give trtdet-serve") from None
    assert process.stdout is not None and process.stderr is not None
    said: list[str] = []
    listening = threading.Thread(target=lambda: said.extend(process.stderr), daemon=True)  # type: ignore[arg-type]
    listening.start()
    try:
        url = process.stdout.readline().strip()
        if not url:
            process.wait()
            listening.join()
            raise BackendError(f"the service did not start: {one_line(''.join(said[-3:]) or 'it said nothing')}")
        port = int(next(word for word in url.split() if "://" in word).rpartition(":")[2])
        if wire is not None:
            wait_until_ready(port, wire.ready)
        yield Listening(port, process.pid)
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        listening.join()
        process.stdout.close()
        process.stderr.close()
    # What has no handler of the signal ends by it.
    if process.returncode not in (0, -signal.SIGTERM):
        words = one_line("".join(said[-3:]) or "it said nothing")
        raise BackendError(f"the service ended with exit code {process.returncode} when it was told to stop: {words}")


def wait_until_ready(port: int, target: str) -> None:
    until = time.monotonic() + STARTING
    status = 0
    while status != 200:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=STARTING)
        try:
            connection.request("GET", target)
            status = connection.getresponse().status
        except OSError:
            status = 0
        finally:
            connection.close()
        if status != 200 and time.monotonic() > until:
            raise BackendError(f"the service is not ready after {STARTING:g} s; ask it at {target} why")
        time.sleep(0 if status == 200 else 0.05)


def found_of(image: Mapping[str, Any]) -> Found:
    """What ``/v1/detect`` answers for an image."""
    rows = image["detections"]
    return Found(
        np.array([row["box"] for row in rows], np.float32).reshape(-1, 4),
        np.array([row["score"] for row in rows], np.float32),
        np.array([row["class"] for row in rows], np.int64),
        tuple(row["mask"] for row in rows if "mask" in row),
    )


def request_body(files: Sequence[bytes]) -> bytes:
    """An image as it is, or several as a form."""
    if len(files) == 1:
        return files[0]
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="image"\r\n'
    head += "Content-Type: application/octet-stream\r\n\r\n"
    return b"".join(head.encode() + file + b"\r\n" for file in files) + f"--{BOUNDARY}--\r\n".encode()


def from_each(paths: Sequence[Path], batch: int) -> list[list[Path]]:
    """For each of the images a request of so many, which begins with it."""
    return [[paths[(first + index) % len(paths)] for index in range(batch)] for first in range(len(paths))]


class Connection:
    """A client of the service, which keeps its connection."""

    def __init__(self, port: int, wire: Wire = DETECT) -> None:
        self._wire = wire
        self._http = http.client.HTTPConnection("127.0.0.1", port, timeout=STARTING)

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def post(self, body: bytes) -> bytes:
        """Raises BackendError where the answer is not a success."""
        try:
            self._http.request("POST", self._wire.detect, body, self._wire.headers)
            answer = self._http.getresponse()
            text = answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise BackendError(f"the service went away: {one_line(repr(error))}") from None
        if answer.status != 200:
            raise BackendError(f"the service answered {answer.status}: {one_line(text.decode(errors='replace'))}")
        return text

    def found(self, body: bytes) -> tuple[str | None, Found]:
        """The content hash of the bundle that was run on an image, where the answer has it, and the detections."""
        content_hash, (found,) = self.all_found(body)
        return content_hash, found

    def all_found(self, body: bytes) -> tuple[str | None, list[Found]]:
        """The same for each image of a request."""
        try:
            text = self.post(body)
            if self._wire.output:
                # What it is, and then one string after its length in four bytes.
                text = text[json.JSONDecoder().raw_decode(text.decode("latin-1"))[1] + 4 :]
            answer = json.loads(text)
            return answer.get("model", {}).get("content_hash"), [found_of(image) for image in answer["images"]]
        except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
            raise BackendError(f"the service's answer is none of /v1/detect: {one_line(repr(error))}") from None


def client_process(
    port: int, wire: Wire, requests: Sequence[Sequence[Path]], clients: Sequence[int], times: tuple[float, float]
) -> tuple[list[float], float]:
    """Some of the clients, as threads of a process, from one time to the other; gives milliseconds and when the last
    one was done."""
    start, end = times
    bodies = [request_body([path.read_bytes() for path in paths]) for paths in requests]

    def ask(client: int) -> list[float]:
        ms = []
        with Connection(port, wire) as connection:
            time.sleep(max(0.0, start - time.monotonic()))
            for index in itertools.count(client):
                started = time.monotonic()
                if started >= end:
                    break
                connection.post(bodies[index % len(bodies)])
                ms.append(1e3 * (time.monotonic() - started))
        return ms

    with ThreadPoolExecutor(len(clients)) as pool:
        rows = list(pool.map(ask, clients))
    return list(itertools.chain.from_iterable(rows)), time.monotonic()


class OverHttp:
    """The clients of a service; used as a context, which closes the connection of a client that asks alone."""

    def __init__(
        self, pool: ProcessPoolExecutor, server: Listening, settings: Settings, runs: str, wire: Wire = DETECT
    ) -> None:
        wire = FORM if settings.batch > 1 else wire
        self._pool, self._processes, self._server = pool, processes_of(settings), server
        self._batch, self._requests = settings.batch, from_each(settings.images, settings.batch)
        self._runs, self._wire, self._alone = runs, wire, Connection(server.port, wire)

    def __enter__(self) -> OverHttp:
        return self

    def __exit__(self, *_: object) -> None:
        self._alone.__exit__()

    def __str__(self) -> str:
        return self._runs

    def detect(self, paths: Sequence[Path]) -> list[Found]:
        return self._alone.all_found(request_body([path.read_bytes() for path in paths]))[1]

    def ask(self, clients: int, seconds: float) -> Answers:
        # The processes have one clock; all of them have read their files when the first question is asked.
        cpu, start = self._server.cpu(), time.monotonic() + 0.2
        parts = [range(first, clients, self._processes) for first in range(min(self._processes, clients))]
        futures = [
            self._pool.submit(
                client_process, self._server.port, self._wire, self._requests, part, (start, start + seconds)
            )
            for part in parts
        ]
        rows = [future.result() for future in futures]
        ms = list(itertools.chain.from_iterable(row for row, _ in rows))
        return Answers(ms, max(end for _, end in rows) - start, self._server.cpu() - cpu, self._batch)


def found_in(result: Any) -> list[Found]:
    """The detections of each image in what tritonclient gives over gRPC: the outputs, or what a server in Python
    answers."""
    answer = result.as_numpy("answer")
    if answer is not None:
        return [found_of(image) for image in json.loads(answer[0])["images"]]
    outputs = [result.as_numpy(name) for name in ("boxes", "scores", "classes")]
    return [
        Found(*(output[image, :count] for output in outputs))
        for image, count in enumerate(result.as_numpy("num_dets")[:, 0])
    ]


class OverGrpc:
    """The clients of a server over gRPC: a program that is started for each round, and tritonclient for detections."""

    def __init__(self, server: Listening, settings: Settings, runs: str) -> None:
        manifest, self._server = Bundle(settings.bundle).manifest, server
        self._address, self._runs, self._load = f"127.0.0.1:{server.port}", runs, settings.grpc_load
        self._model, self._input, self._paths = settings.bundle.name, manifest.input.name, settings.images
        self._batch = settings.batch

    def __str__(self) -> str:
        return self._runs

    def detect(self, paths: Sequence[Path]) -> list[Found]:
        from tritonclient.grpc import InferenceServerClient, InferInput

        tensor = InferInput(self._input, [len(paths)], "BYTES")
        tensor.set_data_from_numpy(np.array([path.read_bytes() for path in paths], np.object_))
        with InferenceServerClient(self._address) as client:
            result = client.infer(self._model, [tensor])
        return found_in(result)

    def ask(self, clients: int, seconds: float) -> Answers:
        command = [self._load, self._address, self._model, self._input, *self._paths]
        command += ["--clients", clients, "--seconds", seconds, "--batch", self._batch]
        cpu = self._server.cpu()
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
        if done.returncode:
            raise BackendError(f"the clients over gRPC failed: {one_line(done.stderr)}")
        told = json.loads(done.stdout)
        return Answers(told["ms"], told["seconds"], self._server.cpu() - cpu, self._batch)


PEERS: dict[str, Callable[[Settings, ProcessPoolExecutor], AbstractContextManager[Side]]] = {
    "in-process": in_process,
    "aiohttp": aiohttp_server,
    "fastapi": fastapi_server,
    "grpc": grpc_server,
    "torchvision": torchvision_server,
    "triton": triton_server,
}
"""What the service is compared with."""

TAKE_BATCHES = {"aiohttp", "fastapi", "grpc"}
"""Those that take several images in a request."""


def processes_of(settings: Settings) -> int:
    """Processes of clients."""
    return max(1, min(max(settings.clients), (os.cpu_count() or 1) // 2))


# What came of it.


@dataclass(frozen=True)
class Compared:
    """How the detections of all images compare."""

    images: int
    detections: int
    different: tuple[str, ...]
    """For each image that differs, its name and how."""
    box: float
    score: float
    """The largest differences where as many were found, of the same classes."""
    masks: int
    pixels: int
    """Masks that both give of the same detections, and in how many pixels they differ in all."""


def in_requests(side: Side, paths: Sequence[Path], batch: int) -> Iterator[Found]:
    """The detections of each image, asked for in requests of so many; the last one has what is left."""
    for first in range(0, len(paths), batch):
        yield from side.detect(paths[first : first + batch])


def compare(paths: Sequence[Path], first: Side, other: Side, batch: int) -> Compared:
    different, box, score, count, masks, pixels = [], 0.0, 0.0, 0, 0, 0
    pairs = zip(in_requests(first, paths, batch), in_requests(other, paths, batch), strict=True)
    for path, (mine, theirs) in zip(paths, pairs, strict=True):
        count += len(mine.scores)
        if len(mine.scores) != len(theirs.scores):
            different.append(f"{path.name}: {len(mine.scores)} and {len(theirs.scores)} detections")
        elif not np.array_equal(mine.classes, theirs.classes):
            different.append(f"{path.name}: other classes, or in another order")
        elif len(mine.scores):
            boxes = float(np.abs(mine.boxes - theirs.boxes).max())
            scores = float(np.abs(mine.scores - theirs.scores).max())
            box, score = max(box, boxes), max(score, scores)
            for pair in zip(mine.masks, theirs.masks, strict=False):
                masks += 1
                pixels += int(np.count_nonzero(np.logical_xor(*map(from_run_lengths, pair))))
            if boxes > BOX or scores > SCORE:
                different.append(f"{path.name}: boxes by up to {boxes:.3g} pixels, scores by up to {scores:.3g}")
    return Compared(len(paths), count, tuple(different), box, score, masks, pixels)


@dataclass(frozen=True)
class Line:
    """One number of clients and one peer: all rounds together, and the ratios of the service to the peer of each."""

    clients: int
    against: str
    service: Answers
    peer: Answers
    ratios: tuple[float, ...]


def table(lines: Sequence[Line], compared: Mapping[str, Compared], facts: Sequence[str]) -> str:
    text = [
        "| clients | against | service images/s | p50 ms | p99 ms | CPU ms | its images/s | p50 ms | p99 ms | CPU ms "
        "| times | rounds | times by CPU |",
        f"|{13 * '---|'}",
    ]
    for line in lines:
        cells = [str(line.clients), line.against]
        for side in (line.service, line.peer):
            cells += [f"{side.throughput:.1f}", f"{side.percentile(0.5):.2f}", f"{side.percentile(0.99):.2f}"]
            cells.append(f"{side.cpu_ms:.2f}")
        cells += [f"{statistics.median(line.ratios):.2f}", f"{min(line.ratios):.2f} .. {max(line.ratios):.2f}"]
        # The kernel counts in hundredths of a second.
        cells.append(f"{line.peer.cpu_ms / line.service.cpu_ms:.2f}" if line.service.cpu else "-")
        text.append(f"| {' | '.join(cells)} |")
    for peer, found in compared.items():
        equal = found.images - len(found.different)
        text += [
            "",
            f"{peer}: Detections equal for {equal} of {found.images} images ({found.detections} detections). Boxes "
            f"differ by up to {found.box:.2g} pixels, scores by up to {found.score:.2g}.",
            *([f"Their {found.masks} masks differ in {found.pixels} pixels."] if found.masks else []),
            *(f"- {line}" for line in found.different),
        ]
    return "\n".join([*text, "", *facts]) + "\n"


def facts_of(settings: Settings, service: Mapping[str, Side], peers: Mapping[str, Side]) -> list[str]:
    devices = cuda.devices()
    clients = f"clients over HTTP in up to {processes_of(settings)} processes"
    facts = [
        f"The service ran {service['HTTP']}, {', '.join(f'{name} {side}' for name, side in peers.items())}.",
        f"{len(settings.images)} images, {settings.lanes} lanes, images wait {settings.max_delay_us} us for others; "
        f"{settings.rounds} rounds of {settings.seconds:g} s; {clients}.",
        f"{devices[0].name if devices else 'No CUDA device'}, {os.cpu_count()} CPU cores, Python "
        f"{sys.version.split()[0]}, trtdet {trtdet.__version__}, NumPy {np.__version__}.",
    ]
    if settings.batch > 1:
        facts.append(f"Each request has {settings.batch} images; p50 and p99 are those of a request.")
    if settings.recording:
        facts.append("No engine was run: these times and ratios tell nothing about engines.")
    return facts


def run(settings: Settings, console: Console) -> tuple[str, bool]:
    """The report, and whether the detections are equal."""
    with ExitStack() as stack:
        # A fork would take the device's state along.
        pool = stack.enter_context(ProcessPoolExecutor(processes_of(settings), multiprocessing.get_context("spawn")))
        peers = {name: stack.enter_context(PEERS[name](settings, pool)) for name in settings.against}
        service = stack.enter_context(serving(settings, pool))
        protocols = {name: "gRPC" if name == "grpc" else "HTTP" for name in peers}
        console.line("comparing the detections")
        compared = {
            name: compare(settings.images, service[protocols[name]], peer, settings.batch)
            for name, peer in peers.items()
        }
        lines = []
        for clients in settings.clients:
            ours: dict[str, list[Answers]] = {protocol: [] for protocol in protocols.values()}
            theirs: dict[str, list[Answers]] = {name: [] for name in peers}
            # The first round warms all up, starts the processes, and is not counted.
            for number in range(settings.rounds + 1):
                console.line(f"{clients} clients, round {number} of {settings.rounds}")
                seconds = settings.seconds if number else min(1.0, settings.seconds)
                for protocol, rounds in ours.items():
                    rounds.append(service[protocol].ask(clients, seconds))
                for name, peer in peers.items():
                    theirs[name].append(peer.ask(clients, seconds))
            for name, rounds in theirs.items():
                pairs = list(zip(ours[protocols[name]], rounds, strict=True))[1:]
                ratios = tuple(mine.throughput / its.throughput for mine, its in pairs)
                mine, its = (sum(side, Answers()) for side in zip(*pairs, strict=True))
                lines.append(Line(clients, name, mine, its, ratios))
        # Only now it is known whether graphs could be captured.
        equal = not any(found.different for found in compared.values())
        return table(lines, compared, facts_of(settings, service, peers)), equal


# command


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--images", type=Path, required=True, help="a folder of JPEG and PNG files, or a list of them")
    parser.add_argument("--num-images", type=int, default=64, help="so many of them, evenly spaced")
    parser.add_argument("--service", type=Path, required=True, help="the program trtdet-serve")
    parser.add_argument(
        "--library-folder", type=Path, action="append", default=[], help="where the service finds TensorRT"
    )
    parser.add_argument(
        "--recording", type=Path, help="what service/tests/record.py wrote of these images: without a GPU"
    )
    parser.add_argument("--clients", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--lanes", type=int, default=2)
    parser.add_argument("--batch", type=int, default=1, help="images of each request")
    parser.add_argument("--max-delay-us", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each round, for each side")
    parser.add_argument(
        "--against", nargs="+", choices=sorted(PEERS), default=["in-process"], help="what the service is compared with"
    )
    parser.add_argument("--peer-workers", type=int, default=2, help="requests at the same time of a peer server")
    parser.add_argument(
        "--peer-intra-op", type=int, default=1, help="threads of a run, with aiohttp and torchvision; 0: one per core"
    )
    parser.add_argument(
        "--peer-model",
        type=Path,
        help="the published file, for aiohttp, FastAPI, gRPC and Triton in place of the bundle's network",
    )
    parser.add_argument("--peer-factory", help="module:function that gives the detector, with torchvision")
    parser.add_argument("--peer-weights", type=Path, help="its state dict, with torchvision")
    parser.add_argument("--pytriton", type=Path, help="site-packages that have nvidia-pytriton, with Triton")
    parser.add_argument("--fastapi", type=Path, help="site-packages that have fastapi and uvicorn, with FastAPI")
    parser.add_argument("--grpc-load", type=Path, help="the program trtdet-grpc-load, with gRPC")
    parser.add_argument("-o", "--output", type=Path, help="a file for the Markdown that is printed")
    return parser


def asked(options: argparse.Namespace, service_options: Sequence[str]) -> Settings:
    """Raises ConfigError or DataError: a number out of range, or there are no images."""
    for name in ("num_images", "lanes", "rounds", "seconds", "batch"):
        if getattr(options, name) <= 0:
            raise ConfigError(f"--{name.replace('_', '-')} takes numbers above 0, got {getattr(options, name)}")
    if min(options.clients) < 1:
        raise ConfigError(f"--clients takes numbers from 1 up, got {min(options.clients)}")
    needs = {
        "triton": ("--pytriton with the site-packages that have nvidia-pytriton", options.pytriton),
        "fastapi": ("--fastapi with the site-packages that have fastapi and uvicorn", options.fastapi),
        "grpc": ("--grpc-load with the program trtdet-grpc-load of build/service/bench", options.grpc_load),
        "torchvision": (
            "--peer-factory module:function and --peer-weights FILE.pth",
            options.peer_factory and options.peer_weights,
        ),
    }
    for peer in options.against:
        if peer in needs and needs[peer][1] is None:
            raise ConfigError(f"--against {peer} needs {needs[peer][0]}")
    if options.batch > 1 and (alone := set(options.against) - TAKE_BATCHES):
        raise ConfigError(f"--batch is for {', '.join(sorted(TAKE_BATCHES))}; leave out --against {' '.join(alone)}")
    paths = find_images(options.images)
    if not paths:
        raise DataError(f"'{options.images}' has no images; give a folder that has some")
    return Settings(
        options.bundle,
        evenly(paths, min(len(paths), options.num_images)),
        options.service,
        options.recording,
        tuple(options.library_folder),
        tuple(options.clients),
        options.lanes,
        options.max_delay_us,
        options.rounds,
        options.seconds,
        tuple(dict.fromkeys(options.against)),
        {peer: peer_options(peer, options) for peer in options.against},
        tuple(service_options),
        options.grpc_load if "grpc" in options.against else None,
        options.batch,
    )


def peer_options(peer: str, options: argparse.Namespace) -> tuple[object, ...]:
    own: dict[str, tuple[object, ...]] = {
        "torchvision": ("--factory", options.peer_factory, "--weights", options.peer_weights),
        "triton": ("--pytriton", options.pytriton),
        "fastapi": ("--fastapi", options.fastapi),
    }
    if options.peer_model is not None and peer != "torchvision":
        own[peer] = (*own.get(peer, ()), "--published", options.peer_model)
    return (*own.get(peer, ()), "--workers", options.peer_workers, "--intra-op", options.peer_intra_op)


def main() -> int:
    given = sys.argv[1:]
    own = given.index("--") if "--" in given else len(given)
    options = arguments().parse_args(given[:own])
    try:
        with Console() as console:
            text, equal = run(asked(options, given[own + 1 :]), console)
        if options.output is not None:
            write_atomically(options.output, text.encode())
    except TrtdetError as error:
        print(f"service.py: error: {error}", file=sys.stderr)
        return 1
    print(text, end="")
    if not equal:
        print(
            "service.py: error: the service and what it is compared with do not find the same; see the table",
            file=sys.stderr,
        )
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
