"""trtdet-serve where something is wrong around it: what it lacks, what hangs, who does not read or never ends."""

import contextlib
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from serving import ONNXRUNTIME, PATIENCE, call, check, failed_start, form, post, read_answer, total, until

PROBE = b"GET /readyz HTTP/1.1\r\nHost: x\r\n\r\n"


def test_a_log_that_nobody_reads_holds_up_nothing(serve, case):
    reading, writing = os.pipe()
    server = serve("--log-level", "debug")
    server.stderr = writing
    with server, os.fdopen(reading, "rb") as log:
        os.close(writing)
        connection = server.connect()
        # Each request is a line of the log; a pipe holds some hundred of them.
        for _ in range(1500):
            assert call(connection, "GET", "/healthz").status == 200
        check(server.detect(case.pictures[0].data).json["images"][0], case.pictures[0], case.hashes[0])
        # Who comes to read it later is told what is missing.
        os.set_blocking(reading, False)
        lines = (log.read() or b"").splitlines()
        assert 100 < len(lines) < 1500
        assert call(connection, "GET", "/healthz").status == 200
        connection.close()
        later = until(lambda: (log.read() or b"").decode()).splitlines()
        dropped = re.search(r" warning lines of the log were dropped, as nobody read them count=(\d+)$", later[0])
        assert dropped
        assert len(lines) + int(dropped[1]) + len(later) - 1 >= 1502


def test_requests_before_the_end_of_sending_are_all_answered(serve, case):
    with serve("--recording-time", 200) as server, server.raw() as stream:
        requests = [post(picture.data) for picture in case.pictures[:2]]
        # Those behind the first are here, and the end as well, when the first is answered; the last is cut.
        stream.sendall(b"".join([requests[0], PROBE, requests[1], PROBE[:10]]))
        stream.shutdown(socket.SHUT_WR)
        check(read_answer(stream).json["images"][0], case.pictures[0], case.hashes[0])
        assert read_answer(stream).status == 200
        check(read_answer(stream).json["images"][0], case.pictures[1], case.hashes[0])
        assert stream.recv(1) == b""


def test_an_idle_connection_makes_room_for_another(serve, case):
    with serve(
        "--max-connections", 8, "--max-client-percent", 100, "--recording-time", 300, "--idle-timeout", 600
    ) as server:
        busy, *idle = (server.raw() for _ in range(8))
        for stream in reversed(idle):
            stream.sendall(PROBE)
            assert read_answer(stream).status == 200
        busy.sendall(post(case.pictures[0].data))
        # Whoever comes is served, in the place of the one that has been idle for longest.
        for _ in range(20):
            idle.append(server.raw())
            idle[-1].sendall(PROBE)
            assert read_answer(idle[-1]).status == 200
        for stream in idle[:12]:
            assert stream.recv(1) == b""
        check(read_answer(busy).json["images"][0], case.pictures[0], case.hashes[0])
        for stream in (busy, *idle):
            stream.close()


def test_probes_have_a_port_of_their_own(serve, case):
    options = ("--max-connections", 2, "--max-client-percent", 100, "--admin-port", 0, "--recording-time", 3000)
    with serve(*options) as server:
        taken = [server.raw() for _ in range(2)]
        for stream in taken:
            stream.sendall(post(case.pictures[0].data))
        until(lambda: server.metrics(server.admin_port)["trtdet_requests_in_flight"] == 2)
        assert server.call("GET", "/readyz").status == 503
        with socket.create_connection(("127.0.0.1", server.admin_port), timeout=PATIENCE) as probes:
            for target in ("/healthz", "/readyz", "/metrics", "/v1/model"):
                probes.sendall(f"GET {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
                assert read_answer(probes).status == 200
            # It is no way around the limits.
            probes.sendall(post(case.pictures[0].data))
            answer = read_answer(probes)
            assert (answer.status, answer.error) == (403, "not-admin")
        for stream in taken:
            stream.close()


@pytest.mark.parametrize("room", range(1, 14, 3))
def test_too_few_threads_are_an_error_of_one_line(serve, room):
    """Each thread takes 64 MiB of address space for its stack, and there is room for so many more or less."""
    server = serve("--threads", 4, "--workers", 4, "--port", 0)
    if server.sanitized:
        pytest.skip("a sanitizer takes all of the address space")
    limits = f'ulimit -s 65536; ulimit -v {220_000 + room * 65_536}; exec "$@"'
    process = subprocess.Popen(
        ["bash", "-c", limits, "bash", server.program, *map(str, server.arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    ready = process.stdout.readline()  # empty when it has ended
    if ready:
        process.terminate()
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == (0 if ready else 1), errors
    if not ready:
        assert errors.splitlines()[-1].startswith("trtdet-serve: error: ")


def scans(program: Callable[[str], Path], width: int, height: int, count: int) -> bytes:
    """A JPEG file that goes over its pixels so often, with hardly a byte for each scan."""
    arguments = [program("tests/trtdet-probe"), "scans", *map(str, (width, height, count))]
    return subprocess.run(arguments, check=True, capture_output=True).stdout


def test_a_small_file_of_many_scans_is_refused(serve, program, case):
    data = scans(program, 7064, 7064, 98)
    assert len(data) < 110_000
    with serve() as server:
        answer = server.detect(data)
        assert (answer.status, answer.error) == (413, "image-too-large")
        assert "7064 x 7064 pixels more often" in answer.json["error"]["message"]
        check(server.detect(case.pictures[0].data).json["images"][0], case.pictures[0], case.hashes[0])


def test_decoding_ends_with_the_time_for_the_answer(serve, program, case):
    """Files that each take longer than a request may, and would keep the only worker from all others for long."""
    data = scans(program, 7064, 7064, 20)
    with serve("--request-timeout", 0.2, "--workers", 1) as server:
        assert [answer.status for answer in server.burst(post(data), 8)] == [504] * 8
        until(lambda: server.metrics()["trtdet_requests_in_flight"] == 0)
        until(lambda: server.detect(case.pictures[0].data).status == 200)
        assert server.call("GET", "/healthz").status == 200


def test_images_wait_for_the_memory_to_be_decoded_in(serve, program):
    """Each takes 100 MB, and there is room for one at a time."""
    data = scans(program, 4500, 4500, 3)
    with serve(
        "--max-decoded-mb", 120, "--max-client-percent", 100, "--workers", 4, "--request-timeout", PATIENCE
    ) as server:
        before = server.peak_memory()
        # The recording does not know them: they were decoded.
        assert [answer.error for answer in server.burst(post(data), 6)] == ["engine-failed"] * 6
        if not server.sanitized:
            assert server.peak_memory() - before < 180_000_000


def test_an_engine_that_hangs_is_unhealthy(serve, case):
    timeouts = ("--request-timeout", 0.2, "--engine-timeout", 0.5, "--stop-timeout", 0.2)
    server = serve("--recording-time", 60_000, *timeouts)
    with server:
        assert server.detect(case.pictures[0].data).status == 504
        answer = server.unready()
        assert answer.error == "engine-failed"
        assert "running a batch for longer than --engine-timeout" in answer.json["error"]["message"]
        assert server.call("GET", "/readyz").status == 503
        # Nor does a stop wait for it.
        server.signal()
        assert server.process.wait(PATIENCE / 2) == 1
        server.process.returncode = 0  # as expected


def test_an_engine_that_is_always_too_late_is_unhealthy(serve, case):
    options = ("--recording-time", 300, "--request-timeout", 0.1, "--unhealthy-after", 3, "--lanes", 1)
    with serve(*options) as server:
        for _ in range(3):
            assert server.detect(case.pictures[0].data).status == 504
        assert "or was too late with them" in server.unready().json["error"]["message"]


def test_too_many_open_files_change_no_bundle(serve, case):
    server = serve("--reload-interval", 0.02)
    server.wrapper = ("prlimit", "--nofile=64:64")
    with server:
        streams = []
        while "could not be accepted" not in server.log.read_text():
            streams.append(server.raw())
            streams[-1].sendall(PROBE[:10])
        time.sleep(0.3)  # in which it looks at the bundle again and again
        for stream in streams:
            stream.close()
        check(server.detect(case.pictures[0].data).json["images"][0], case.pictures[0], case.hashes[0])
        time.sleep(0.1)
        assert total(server.metrics(), "trtdet_reloads_total") == 0


def test_a_manifest_without_end_is_refused(serve, case, tmp_path):
    bundle = Path(shutil.copytree(case.bundles[0], tmp_path / "bundle"))
    with (bundle / "manifest.json").open("r+") as manifest:
        manifest.truncate(1 << 40)  # takes no room on the disk
    server = serve(bundle=bundle)
    assert "manifest.json has more than 16777216 bytes" in failed_start(server.program, *server.arguments)


@pytest.mark.slow
@pytest.mark.parametrize("networks", ["replayed", "computed"])
@pytest.mark.parametrize("megabytes", range(300, 901, 300))
def test_no_memory_is_no_end(serve, program, case, networks, megabytes, request):
    """However little there is: the service does not start, and says so, or serves on after requests that had none."""
    options: list[object] = [
        "--workers",
        4,
        "--threads",
        4,
        "--max-decoded-mb",
        4096,
        "--max-client-percent",
        100,
        "--stop-timeout",
        1,
    ]
    server = serve(*options)
    if networks == "computed":
        server.arguments = [case.bundles[0], "--library-folder", ONNXRUNTIME, *options]
    if server.sanitized:
        pytest.skip("a sanitizer takes all of the address space")
    large = scans(program, 7064, 7064, 3)
    many, kind = form([(picture.file.name, picture.data) for picture in case.pictures])
    server.wrapper = ("prlimit", f"--as={megabytes << 20}")
    try:
        server.__enter__()
    except AssertionError:
        assert server.process.wait(PATIENCE) == 1
        assert server.log.read_text().splitlines()[-1].startswith("trtdet-serve: error: ")
        return
    request.addfinalizer(server.process.wait)  # after the next, which does nothing to who has ended
    request.addfinalizer(server.process.kill)
    statuses = set()
    for _ in range(6):
        streams = [server.raw() for _ in range(24)]
        for index, stream in enumerate(streams):
            bodies = (large, many, bytes(8 << 20), case.pictures[0].data)
            with contextlib.suppress(ConnectionError):
                body = bodies[index % 4]
                stream.sendall(post(body, **{"Content-Type": kind if body is many else "image/jpeg"}))
        for stream in streams:
            with contextlib.suppress(ConnectionError):
                statuses.add(read_answer(stream).status)
            stream.close()
        server.alive()
    assert statuses <= {200, 400, 408, 413, 500, 503, 504}
    until(lambda: server.detect(case.pictures[0].data).status == 200, server.alive)
    # No request is in the books for ever.
    until(lambda: server.metrics()["trtdet_requests_in_flight"] == 0, server.alive)
    # A connection whose last step had no memory may have to be cut, but nothing is ever aborted.
    assert server.stop() in (0, 1)
