"""trtdet-serve with many clients: nothing is lost or wrong, whatever happens meanwhile."""

import http.client
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from serving import PATIENCE, Case, Server, call, check, failed_start, finished, form, post, read_answer, total, until

from trtdet.building.comparison import rewritten
from trtdet.bundle import MANIFEST, Bundle

ROOT = Path(__file__).resolve().parents[2]


class Clients:
    """Threads that send pictures one after the other on connections that they keep."""

    def __init__(self, server: Server, case: Case, count: int, requests: int | None = None) -> None:
        self.server, self.case, self.requests = server, case, requests
        self.statuses: Counter[int] = Counter()
        self.bundles: Counter[str] = Counter()
        self.seconds: list[float] = []
        self.refused = 0  # requests that no byte of an answer came to, on a connection that was kept or never made
        self.failures: list[BaseException] = []
        self.stopping = False  # set before the service is told to stop
        self._end = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._guard, args=(index,)) for index in range(count)]
        for thread in self._threads:
            thread.start()

    def _guard(self, index: int) -> None:
        try:
            self._send(index)
        except BaseException as error:
            self.failures.append(error)

    def _send(self, index: int) -> None:
        connection = self.server.connect()
        sent, fresh = 0, True
        while not self._end.is_set() and (self.requests is None or sent < self.requests):
            picture = self.case.pictures[(index * 7 + sent) % len(self.case.pictures)]
            begin = time.perf_counter()
            try:
                answer = call(connection, "POST", "/v1/detect", picture.data, {"Content-Type": "image/jpeg"})
            except (http.client.RemoteDisconnected, ConnectionError) as error:
                # Not a byte was answered: allowed where the service had closed before the request came.
                assert self.stopping, error
                assert not fresh or isinstance(error, (ConnectionRefusedError, ConnectionResetError)), error
                with self._lock:
                    self.refused += 1
                return
            took = time.perf_counter() - begin
            with self._lock:
                self.seconds.append(took)
                self.statuses[answer.status] += 1
                if answer.status == 200:
                    self.bundles[answer.json["model"]["content_hash"]] += 1
            if answer.status == 200:
                check(answer.json["images"][0], picture, answer.json["model"]["content_hash"])
            sent, fresh = sent + 1, False
            if answer.headers["connection"] == "close":
                connection.close()
                fresh = True
        connection.close()

    def answered(self) -> int:
        with self._lock:
            return len(self.seconds)

    def end(self) -> None:
        self._end.set()
        self.join()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(10 * PATIENCE)
            assert not thread.is_alive(), "a client hangs"
        if self.failures:
            raise self.failures[0]


@pytest.mark.slow
def test_four_clients_with_many_requests_each(serve, case, record_property):
    with serve() as server:
        count = 125 if server.sanitized else 500
        begin = time.perf_counter()
        clients = Clients(server, case, 4, count)
        clients.join()
        took = time.perf_counter() - begin
        assert clients.statuses == {200: 4 * count}
        metrics = server.metrics()
        assert metrics["trtdet_images_total"] == metrics["trtdet_batch_images_sum"] == 4 * count
        assert total(metrics, "trtdet_errors_total") == 0
    milliseconds = np.array(clients.seconds) * 1000
    for name, value in {
        "requests per second": 4 * count / took,
        "p50 ms": np.percentile(milliseconds, 50),
        "p99 ms": np.percentile(milliseconds, 99),
        "mean ms in the service": metrics["trtdet_detect_seconds_sum"] / metrics["trtdet_detect_seconds_count"] * 1000,
    }.items():
        record_property(name, round(float(value), 2))
        print(f"{name}: {value:.2f}")


def test_a_stop_under_load_loses_nothing(serve, case):
    with serve("--recording-time", 5) as server:
        clients = Clients(server, case, 4)
        until(lambda: clients.answered() >= 40, server.alive)
        clients.stopping = True
        server.signal()
        assert server.process.wait(PATIENCE) == 0
        clients.join()
    # A client is turned away once, when it comes after the end; what was answered was answered in full and right.
    assert set(clients.statuses) == {200}
    assert clients.refused <= 4
    assert "were cut" not in server.log.read_text()
    with pytest.raises(ConnectionRefusedError):
        server.raw()


def test_requests_that_have_begun_are_finished(serve, case):
    picture = case.pictures[0]
    with serve("--recording-time", 500) as server:
        idle, reading, running = (server.raw() for _ in range(3))
        idle.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert read_answer(idle).headers["connection"] == "keep-alive"
        request = post(picture.data)
        reading.sendall(request[:-1])
        running.sendall(request)
        until(lambda: server.metrics()["trtdet_requests_in_flight"] == 1)
        server.signal()
        assert idle.recv(1) == b""
        reading.sendall(request[-1:])
        for stream in (running, reading):
            answer = read_answer(stream)
            check(answer.json["images"][0], picture, case.hashes[0])
            assert answer.headers["connection"] == "close"
            assert stream.recv(1) == b""
        assert server.process.wait(PATIENCE) == 0
        for stream in (idle, reading, running):
            stream.close()


def test_a_stop_waits_for_load_balancers(serve, case):
    with serve("--drain-delay", 2) as server:
        server.signal()
        assert server.unready("/readyz").error == "stopping"
        assert server.call("GET", "/healthz").status == 200
        # Until then requests are served as ever.
        check(server.detect(case.pictures[0].data).json["images"][0], case.pictures[0], case.hashes[0])
        assert server.process.wait(PATIENCE) == 0


def test_a_stop_that_takes_too_long_cuts(serve, case):
    server = serve("--recording-time", 60_000, "--request-timeout", 100, "--stop-timeout", 0.5)
    with server:
        stream = server.raw()
        stream.sendall(post(case.pictures[0].data))
        until(lambda: server.metrics()["trtdet_requests_in_flight"] == 1)
        server.signal()
        assert server.process.wait(PATIENCE) == 1
        assert "were cut" in server.log.read_text()
        with pytest.raises(ConnectionError):
            read_answer(stream)
        stream.close()
        server.process.returncode = 0  # as expected


def test_a_second_signal_ends_at_once(serve):
    with serve("--drain-delay", 600) as server:
        server.signal(signal.SIGINT)
        until(lambda: server.call("GET", "/readyz").status == 503)
        server.signal(signal.SIGINT)
        assert server.process.wait(PATIENCE) == 1
        server.process.returncode = 0  # as expected


def reloads(server: Server, result: str) -> float:
    return total(server.metrics(), "trtdet_reloads_total", f'result="{result}"')


@pytest.fixture
def place(case, tmp_path):
    """A bundle that a test may replace or spoil."""
    return Path(shutil.copytree(case.bundles[0], tmp_path / "bundle"))


def test_a_bundle_is_replaced_under_load(serve, case, place):
    with serve("--reload-interval", 0.05, bundle=place) as server:
        clients = Clients(server, case, 4)
        for loaded, other in enumerate((1, 0, 1, 0), start=1):
            before = clients.answered()
            until(lambda before=before: clients.answered() > before + 20, server.alive)
            rewritten(place, Bundle(case.bundles[other]), files={}, changes={})
            until(lambda loaded=loaded: reloads(server, "loaded") >= loaded, server.alive)
            assert server.call("GET", "/v1/model").json["content_hash"] == case.hashes[other]
            # Who asks from now on is answered by the new one.
            fresh = server.detect(case.pictures[0].data)
            assert fresh.json["model"]["content_hash"] == case.hashes[other]
            check(fresh.json["images"][0], case.pictures[0], case.hashes[other])
        clients.end()
        assert (set(clients.statuses), set(clients.bundles)) == ({200}, set(case.hashes))
        metrics = server.metrics()
        assert total(metrics, "trtdet_reloads_total", 'result="refused"') == 0
        assert total(metrics, "trtdet_bundle_info") == 1
        assert total(metrics, "trtdet_errors_total") == 0


def test_a_request_in_work_keeps_its_bundle(serve, case, place):
    with serve("--recording-time", 1500, "--reload-interval", 0.05, bundle=place) as server:
        stream = server.raw()
        stream.sendall(post(case.pictures[0].data))
        until(lambda: server.metrics()["trtdet_requests_in_flight"] == 1)
        rewritten(place, Bundle(case.bundles[1]), files={}, changes={})
        until(lambda: server.call("GET", "/v1/model").json["content_hash"] == case.hashes[1])
        answer = read_answer(stream)
        assert answer.json["model"]["content_hash"] == case.hashes[0]
        check(answer.json["images"][0], case.pictures[0], case.hashes[0])
        stream.close()


def change(file: Path, data: bytes) -> None:
    """Puts other contents into a file in one step: a service that looks meanwhile sees one change, not several."""
    other = file.parent.with_name("change")
    other.write_bytes(data)
    other.replace(file)


def flip(file: Path, at: int = -1) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    change(file, bytes(data))


def test_a_bundle_altered_by_one_byte_is_refused(serve, case, place):
    names = sorted(Bundle(place).manifest.files)
    with serve("--reload-interval", 0.05, bundle=place) as server:
        for refused, name in enumerate(names, start=1):
            flip(place / name)
            until(lambda refused=refused: reloads(server, "refused") == refused)
            # The one before serves on.
            check(server.detect(case.pictures[0].data).json["images"][0], case.pictures[0], case.hashes[0])
            start = failed_start(server.program, place, "--recording", case.recordings, "--port", 0)
            assert f"'{name}' was altered" in start
            change(place / name, (case.bundles[0] / name).read_bytes())
            until(lambda refused=refused: reloads(server, "loaded") == refused)
        # Left as it is, it is not tried again and again.
        flip(place / names[0])
        until(lambda: reloads(server, "refused") == len(names) + 1)
        time.sleep(0.5)
        assert reloads(server, "refused") == len(names) + 1
        # Unless somebody asks for it.
        server.signal(signal.SIGHUP)
        until(lambda: reloads(server, "refused") == len(names) + 2)
        assert "was altered" in server.log.read_text()


def test_half_a_bundle_is_refused_until_it_is_whole(serve, case, place):
    with serve("--reload-interval", 0.05, bundle=place) as server:
        # As a copy in place does it, with the manifest first.
        for file in (MANIFEST, *(file.name for file in case.bundles[1].iterdir() if file.name != MANIFEST)):
            shutil.copy(case.bundles[1] / file, place / file)
            time.sleep(0.1)
            assert server.detect(case.pictures[0].data).status == 200
        until(lambda: server.call("GET", "/v1/model").json["content_hash"] == case.hashes[1])
        # No bundle at all is a moment of its replacement.
        place.rename(place.with_name("away"))
        time.sleep(0.2)
        check(server.detect(case.pictures[0].data).json["images"][0], case.pictures[0], case.hashes[1])
        refused = reloads(server, "refused")
        place.with_name("away").rename(place)
        time.sleep(0.2)
        assert reloads(server, "refused") == refused


def test_a_single_recording_follows_its_bundle(serve, case, place, tmp_path):
    recording = Path(shutil.copy(case.recordings / f"{case.hashes[0]}.recording", tmp_path / "the.recording"))
    with serve("--reload-interval", 0.05, bundle=place, recording=recording) as server:
        rewritten(place, Bundle(case.bundles[1]), files={}, changes={})
        until(lambda: reloads(server, "refused") == 1)
        check(server.detect(case.pictures[0].data).json["images"][0], case.pictures[0], case.hashes[0])
        shutil.copy(case.recordings / f"{case.hashes[1]}.recording", tmp_path / "next")
        (tmp_path / "next").rename(recording)
        until(lambda: reloads(server, "loaded") == 1)
        check(server.detect(case.pictures[0].data).json["images"][0], case.pictures[0], case.hashes[1])


def test_a_signal_reloads_where_nothing_looks(serve, case, place):
    with serve("--reload-interval", 0, bundle=place) as server:
        rewritten(place, Bundle(case.bundles[1]), files={}, changes={})
        time.sleep(0.2)
        assert server.call("GET", "/v1/model").json["content_hash"] == case.hashes[0]
        server.signal(signal.SIGHUP)
        until(lambda: server.call("GET", "/v1/model").json["content_hash"] == case.hashes[1])


@pytest.mark.parametrize(
    "options",
    [("--queue", 2, "--lanes", 1, "--max-batch", 1), ("--max-requests", 3, "--max-client-percent", 100)],
    ids=["queue", "requests"],
)
def test_too_much_is_refused_at_once(serve, case, options):
    picture = case.pictures[0]
    with serve("--recording-time", 300, "--max-delay-us", 0, *options) as server:
        begin = time.monotonic()
        answers = server.burst(post(picture.data), 24)
        assert time.monotonic() - begin < PATIENCE
        statuses = Counter(answer.status for answer in answers)
        assert set(statuses) == {200, 503}
        for answer in answers:
            if answer.status == 503:
                assert (answer.error, answer.headers["retry-after"]) == ("overloaded", "1")
            else:
                check(answer.json["images"][0], picture, case.hashes[0])
        # A form whose images do not all find room is refused as a whole.
        if "--queue" in options:
            body, kind = form([(picture.file.name, picture.data)] * 8)
            assert server.detect(body, kind=kind).status == 503
        until(lambda: server.metrics()["trtdet_requests_in_flight"] == 0)
        assert server.detect(picture.data).status == 200
        metrics = server.metrics()
        assert total(metrics, "trtdet_requests_total", 'path="/v1/detect"') >= 25
        assert total(metrics, "trtdet_errors_total", 'type="overloaded"') >= statuses[503]


def test_slow_and_leaving_clients_among_others(serve, case):
    with serve("--body-timeout", 1, "--header-timeout", 1) as server:
        clients = Clients(server, case, 3)
        end = time.monotonic() + 3
        while time.monotonic() < end:
            streams = [server.raw() for _ in range(4)]
            for index, stream in enumerate(streams):
                request = post(case.pictures[index].data)
                stream.sendall(request[: (10, 1000, len(request) // 2, len(request))[index]])
                stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0" if index % 2 else bytes(8))
            time.sleep(0.02)
            for stream in streams:
                stream.close()
        clients.end()
        assert set(clients.statuses) == {200}
        until(lambda: server.metrics()["trtdet_connections"] == 1)
        until(lambda: server.metrics()["trtdet_requests_in_flight"] == 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("requests", "settle", "growth", "good"), [(3000, 1000, 5, True), (3000, 0, -1, False)], ids=["flat", "refused"]
)
def test_memory_is_flat_while_bundles_are_replaced(program, case, tmp_path, requests, settle, growth, good):
    """The soak of ``benchmarks/soak.py``, a short one; with less growth allowed than there can be it is refused."""
    service = program("serve/trtdet-serve")
    if Server(service, (), tmp_path).sanitized:
        pytest.skip("a sanitizer keeps memory for itself")
    (tmp_path / "images").mkdir()
    for picture in case.pictures:
        shutil.copy(picture.file, tmp_path / "images")
    options = ["--images", tmp_path / "images", "--service", service, "--measure", 2, "--swap-every", 2]
    options += ["--requests", requests, "--settle", settle, "--growth-mb", growth, "--", "--recording", case.recordings]
    soak = (sys.executable, ROOT / "benchmarks" / "soak.py", *case.bundles, *options)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = finished(*soak, code=0 if good else 1, timeout=10 * PATIENCE, env=environment)
    assert f"| requests answered rightly | {requests} |" in done.stdout, done.stderr
    assert "| lost, refused or wrong | 0 |" in done.stdout
