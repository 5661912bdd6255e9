"""The HTTP service under load for long, its bundle replaced again and again: is an answer lost, does memory grow?

    python benchmarks/soak.py BUNDLE OTHER --images DIR --service build/service/serve/trtdet-serve --minutes 30
    python benchmarks/soak.py BUNDLE OTHER --images DIR --service PATH --requests 50000 --load 0.8 --swap-every 10
    python benchmarks/soak.py BUNDLE OTHER --images DIR --service PATH --requests 100000 --attack --growth-mb 64
    python benchmarks/soak.py BUNDLE OTHER --images DIR --service PATH -- OPTION ...        options of the service

Clients first ask for as much as the service gives, which is its full load, and then at the share of it that ``--load``
names, each at its own times. A copy of BUNDLE is served and replaced by OTHER, by BUNDLE and so on. Each answer is
compared with what Python finds with the bundle that it names: boxes within 0.01 pixels, scores within 1e-4.

Memory is what the process has resident, as its metrics say it, every quarter of a second in which no bundle is being
replaced. After ``--settle`` requests the rest is cut into five parts; for each bundle, as they need different amounts,
the median of none may be more than ``--growth-mb`` above that of the first.

With ``--attack`` the attacks of ``attack.py`` come meanwhile from another address, one kind after the other, with
``--grpc`` those over it in turn with them; what is refused of theirs is not counted.

With ``--grpc`` every second client asks over gRPC, and every fifth of its calls has to be refused, is given up after a
millisecond, or asks for a page: all of these have to end as they should. Needs tritonclient[grpc].

The exit code is 1 where a request was lost, refused or answered wrongly, a replacement was not served, memory grew, or
the service ended otherwise than well, as it does where it was built with a sanitizer that found something.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import multiprocessing
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from attack import Attack, asks_of, attack_for, attacks, grpc_attacks

from service import BOX, SCORE, Connection, Found, found_in, free_port, listening
from trtdet.bundle import Bundle, BundleWriter
from trtdet.data import evenly, find_images
from trtdet.data.images import preprocess, read_image
from trtdet.errors import BackendError, TrtdetError, one_line
from trtdet.files import write_atomically
from trtdet.runtime.detector import Detector

PARTS = 5
"""Into which the time after settling is cut."""


@dataclass
class Course:
    """What happened so far.

    Attributes:
        answered: requests that were answered in full and rightly.
        ms: how long each of them took.
        wrong: what was not, a line for each.
        others: calls over gRPC that found nothing and ended as they should.
        memory: how many requests had been answered, whether OTHER was in BUNDLE's place, and the MB of the service.
        swaps: how often the bundle was replaced.
    """

    answered: int = 0
    ms: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    others: int = 0
    memory: list[tuple[int, bool, float]] = field(default_factory=list)
    swaps: int = 0


def expected(bundle: Path, images: Sequence[Path]) -> list[Found]:
    """What Python finds in each image, in its pixels."""
    detector, found = Detector.open(bundle, runtime="onnxruntime"), []
    for path in images:
        inputs, placement = preprocess(read_image(path), detector.input)
        batch = detector(inputs[None])
        count = int(batch.num_dets[0, 0])
        boxes = placement.to_image(batch.boxes[0, :count])
        found.append(Found(boxes, batch.scores[0, :count], batch.classes[0, :count].astype(np.int64)))
    return found


def equal(one: Found, other: Found) -> bool:
    return (
        np.array_equal(one.classes, other.classes)
        and np.allclose(one.boxes, other.boxes, rtol=0, atol=BOX)
        and np.allclose(one.scores, other.scores, rtol=0, atol=SCORE)
    )


def replace(bundle: Path, other: Path) -> None:
    """Puts the files of another bundle in a bundle's place, as 'trtdet build' does."""
    source = Bundle(other)
    with BundleWriter(bundle) as writer:
        for name in source.manifest.files:
            writer.add(name, (other / name).read_bytes())
        writer.commit(source.manifest.model_dump(exclude={"files", "created"}))


def metrics(port: int) -> dict[str, float]:
    """The samples of the service by name with labels."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
    finally:
        connection.close()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


def served(counts: Mapping[str, float]) -> int:
    """How many replacements the service has loaded."""
    names = [name for name in counts if name.startswith("trtdet_reloads_total") and "loaded" in name]
    return int(sum(counts[name] for name in names))


def medians(memory: Sequence[tuple[int, bool, float]], settle: int, other: bool) -> list[float]:
    """The median of each part, in MB, while one of the bundles was served.

    Raises:
        BackendError: there is too little after so many requests.
    """
    rest = [megabytes for answered, which, megabytes in memory if answered >= settle and which == other]
    if len(rest) < PARTS:
        raise BackendError(f"memory was looked at {len(rest)} times after the first {settle} requests; go on longer")
    return [float(statistics.median(part)) for part in np.array_split(np.array(rest), PARTS)]


class OverGrpc:
    """A client over gRPC, which keeps its connection. Other calls of it take turns: what must be refused, pages, and
    calls that it gives up."""

    def __init__(self, port: int, bundle: Path) -> None:
        # Only these clients need it.
        import grpc
        from tritonclient.grpc import InferenceServerClient, InferenceServerException, InferInput

        address = f"127.0.0.1:{port}"
        self._client, self._channel = InferenceServerClient(address), grpc.insecure_channel(address)
        self._errors, self._failed, self._tensor = grpc.RpcError, InferenceServerException, InferInput
        self._model, self._input = bundle.name, Bundle(bundle).manifest.input.name

    def __enter__(self) -> OverGrpc:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()
        self._channel.close()

    def found(self, body: bytes) -> tuple[str, Found]:
        """As Connection.found()."""
        try:
            result = self._client.infer(self._model, [self._file(body)])
        except self._failed as error:
            raise BackendError(one_line(str(error))) from None
        return result.get_response().parameters["content_hash"].string_param, found_in(result)[0]

    def other(self, count: int, body: bytes) -> str:
        """What is wrong with how another call ended, one of a few kinds by its number; empty where nothing is."""
        kind = count % 6
        if kind == 0:
            code, expected = self._raw("ModelInfer", b"\xff" + body[:count]), {"INVALID_ARGUMENT"}
        elif kind == 1:
            code, expected = self._raw("ModelInfer", b"\x2a\x00" * 10_000), {"INVALID_ARGUMENT"}
        elif kind == 2:
            code, expected = self._raw("ModelStatistics", b""), {"OK"}
        elif kind == 3:
            code, expected = self._raw("ServerLive", b"\x78\x01" * count), {"OK", "INVALID_ARGUMENT"}
        elif kind == 4:
            code, expected = self._infer(self._file(body[: len(body) // 2 - count]), None), {"INVALID_ARGUMENT"}
        else:
            code, expected = self._infer(self._file(body), 0.001), {"OK", "DEADLINE_EXCEEDED"}
        return "" if code in expected else f"call {kind} over gRPC ended with {code}"

    def _file(self, body: bytes) -> Any:
        return self._tensor(self._input, [1], "BYTES").set_data_from_numpy(np.array([body], np.object_))

    def _infer(self, tensor: Any, seconds: float | None) -> str:
        try:
            self._client.infer(self._model, [tensor], client_timeout=seconds)
        except self._failed as error:
            return str(error.status()).rpartition(".")[2]
        return "OK"

    def _raw(self, method: str, message: bytes) -> str:
        try:
            self._channel.unary_unary(f"/inference.GRPCInferenceService/{method}")(message)
        except self._errors as error:
            return str(error.code().name)
        return "OK"


class Soak:
    """Clients, replacements and a look at memory, at the same time."""

    def __init__(self, options: argparse.Namespace, port: int, grpc_port: int | None, place: Path) -> None:
        self.options, self.port, self.place, self.course = options, port, place, Course()
        self.grpc_port = grpc_port
        self.images = evenly(paths := find_images(options.images), min(len(paths), options.num_images))
        self.bodies = [path.read_bytes() for path in self.images]
        self.found = {
            Bundle(bundle).manifest.content_hash: expected(bundle, self.images)
            for bundle in (options.bundle, options.other)
        }
        self._lock, self._end = threading.Lock(), threading.Event()

    def full_load(self) -> float:
        """Requests a second that the clients get when each sends the next one at once."""
        until = time.monotonic() + self.options.measure

        def ask(client: int) -> int:
            with Connection(self.port) as connection:
                for count in itertools.count():
                    if time.monotonic() >= until:
                        return count
                    connection.post(self.bodies[(client + count) % len(self.bodies)])
            raise AssertionError

        with ThreadPoolExecutor(self.options.clients) as pool:
            return sum(pool.map(ask, range(self.options.clients))) / self.options.measure

    def run(self, rate: float) -> None:
        """Asks for so many images a second, until the time is over or all requests are sent."""
        threads = [threading.Thread(target=work) for work in (self._replace, self._watch)]
        for thread in threads:
            thread.start()
        try:
            with ThreadPoolExecutor(self.options.clients) as pool:
                list(pool.map(self._ask, range(self.options.clients), itertools.repeat(rate / self.options.clients)))
        finally:
            self._end.set()
            for thread in threads:
                thread.join()

    def _ask(self, client: int, rate: float) -> None:
        options = self.options
        most = None if options.requests is None else -(-options.requests // options.clients)
        started = time.monotonic() + client / (rate * options.clients)
        over_grpc = self.grpc_port is not None and client % 2 == 1
        with OverGrpc(self.grpc_port, self.place) if over_grpc else Connection(self.port) as connection:
            for count in itertools.count():
                due = started + count / rate
                # Where the machine gives less than it did at first, what is due lags behind the time.
                if most == count or (most is None and max(due, time.monotonic()) - started > 60 * options.minutes):
                    return
                time.sleep(max(0.0, due - time.monotonic()))
                index = (client * 7 + count) % len(self.bodies)
                if over_grpc and count % 5 == 4:
                    self._check_other(connection.other(count // 5, self.bodies[index]))
                else:
                    self._check(connection, index)

    def _check_other(self, problem: str) -> None:
        with self._lock:
            if problem:
                self.course.wrong.append(problem)
            else:
                self.course.others += 1

    def _check(self, connection: Connection | OverGrpc, index: int) -> None:
        begun = time.monotonic()
        try:
            content_hash, found = connection.found(self.bodies[index])
            problem = "" if equal(found, self.found[content_hash][index]) else "other detections than Python's"
        except (BackendError, KeyError) as error:
            problem = str(error)
        with self._lock:
            if problem:
                self.course.wrong.append(f"{self.images[index].name}: {problem}")
            else:
                self.course.answered += 1
                self.course.ms.append(1e3 * (time.monotonic() - begun))

    def _replace(self) -> None:
        for bundle in itertools.cycle((self.options.other, self.options.bundle)):
            if self._end.wait(self.options.swap_every):
                return
            replace(self.place, bundle)
            self.course.swaps += 1

    def _watch(self) -> None:
        while not self._end.wait(0.25):
            swaps, counts = self.course.swaps, metrics(self.port)
            # While a bundle takes the other's place both are in memory, for as long as that takes.
            if served(counts) == swaps == self.course.swaps:
                resident = counts["process_resident_memory_bytes"] / 1e6
                self.course.memory.append((self.course.answered, swaps % 2 == 1, resident))


def attack_in_turn(port: int, grpc_port: int | None, wanted: Sequence[Attack], seconds: float) -> None:
    """One kind of attack after the other, for so long each, without end."""
    for attack in itertools.cycle(wanted):
        ours, _theirs = multiprocessing.Pipe()
        attack_for(grpc_port if attack.call and grpc_port else port, attack, addresses=1, seconds=seconds, pipe=ours)


@contextmanager
def attacked(soak: Soak) -> Iterator[None]:
    asks = asks_of(soak.place)
    wanted = attacks(asks, soak.bodies[0])
    if soak.grpc_port:
        both = itertools.zip_longest(wanted, grpc_attacks(asks))
        wanted = [attack for pair in both for attack in pair if attack]
    attacker = multiprocessing.Process(
        target=attack_in_turn, args=(soak.port, soak.grpc_port, wanted, 10.0), daemon=True
    )
    attacker.start()
    try:
        yield
    finally:
        attacker.terminate()
        attacker.join()


def report(soak: Soak, full: float, counts: dict[str, float]) -> tuple[str, bool]:
    """The report, and whether all is well."""
    course, options = soak.course, soak.options
    parts = [medians(course.memory, options.settle, other) for other in (False, True)]
    grown = max(max(part) - part[0] for part in parts)
    loaded = served(counts)
    refused = sum(value for key, value in counts.items() if key.startswith("trtdet_errors_total"))
    in_flight = counts["trtdet_requests_in_flight"]
    ms = sorted(course.ms)
    facts = {
        "requests answered rightly": f"{course.answered}",
        **({"other calls over gRPC, ended as they should": f"{course.others}"} if options.grpc else {}),
        "lost, refused or wrong": f"{len(course.wrong)}",
        "errors that the service counted": f"{refused:g}",
        "full load, requests/s": f"{full:.1f}",
        "asked for, requests/s": f"{options.load * full:.1f}",
        "p50, p99 ms": f"{ms[len(ms) // 2]:.1f}, {ms[len(ms) * 99 // 100]:.1f}" if ms else "",
        "replacements, served": f"{course.swaps}, {loaded}",
        f"MB after {options.settle} requests, in {PARTS} parts, of each bundle": "; ".join(
            ", ".join(f"{megabytes:.1f}" for megabytes in part) for part in parts
        ),
        "growth, MB": f"{grown:.1f}",
    }
    text = ["| what | |", "|---|---|", *(f"| {name} | {value} |" for name, value in facts.items())]
    # A replacement may come with the end, and not be looked at any more.
    orderly = options.attack or options.grpc or (not refused and not in_flight)
    good = not course.wrong and orderly and loaded >= course.swaps - 1
    return "\n".join([*text, *(f"- {line}" for line in course.wrong[:10])]) + "\n", good and grown <= options.growth_mb


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("other", type=Path, help="a bundle that takes its place")
    parser.add_argument("--images", type=Path, required=True, help="a folder of JPEG and PNG files, or a list of them")
    parser.add_argument("--num-images", type=int, default=40, help="so many of them, evenly spaced")
    parser.add_argument("--service", type=Path, required=True, help="the program trtdet-serve")
    parser.add_argument("--library-folder", type=Path, action="append", default=[], help="where libraries are")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--requests", type=int, help="so many, however long they take")
    parser.add_argument("--load", type=float, default=0.8, help="share of the full load")
    parser.add_argument("--measure", type=float, default=5.0, help="seconds in which the full load is measured")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--swap-every", type=float, default=10.0, help="seconds between two replacements")
    parser.add_argument("--settle", type=int, default=5000, help="requests after which memory must not grow")
    parser.add_argument("--growth-mb", type=float, default=5.0, help="by which it may")
    parser.add_argument("--attack", action="store_true", help="attack the service meanwhile")
    parser.add_argument("--grpc", action="store_true", help="let every second client ask over gRPC")
    parser.add_argument("-o", "--output", type=Path, help="a file for the Markdown that is printed")
    return parser


def main() -> int:
    given = sys.argv[1:]
    own = given.index("--") if "--" in given else len(given)
    options = arguments().parse_args(given[:own])
    try:
        with tempfile.TemporaryDirectory() as folder:
            place = Path(shutil.copytree(options.bundle, Path(folder) / "bundle"))
            command: list[object] = [options.service, place, "--port", 0, "--log-level", "error"]
            grpc_port = free_port() if options.grpc else None
            command += ["--grpc-port", grpc_port] if grpc_port else []
            command += itertools.chain.from_iterable(("--library-folder", one) for one in options.library_folder)
            with listening([*command, "--reload-interval", 0.2, *given[own + 1 :]]) as server:
                port = server.port
                soak = Soak(options, port, grpc_port, place)
                full = soak.full_load()
                with attacked(soak) if options.attack else nullcontext():
                    soak.run(options.load * full)
                time.sleep(1)  # in which the last replacement is noticed
                text, good = report(soak, full, metrics(port))
                print(text, end="", flush=True)
        if options.output is not None:
            write_atomically(options.output, text.encode())
    except TrtdetError as error:
        print(f"soak.py: error: {error}", file=sys.stderr)
        return 1
    if not good:
        print("soak.py: error: something was lost or wrong, or memory grew; see the table", file=sys.stderr)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
