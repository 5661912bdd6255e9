"""trtdet-serve where something is wrong around it: what it lacks, what hangs, who does not read or never ends."""

from __future__ import annotations

import os
import re
import socket
import subprocess
from collections.abc import Callable

import pytest
from serving import PATIENCE, Case, Server, call, check, post, read_answer, until

Serve = Callable[..., Server]

PROBE = b"GET /readyz HTTP/1.1\r\nHost: x\r\n\r\n"


def test_a_log_that_nobody_reads_holds_up_nothing(serve: Serve, case: Case) -> None:
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


def test_requests_before_the_end_of_sending_are_all_answered(serve: Serve, case: Case) -> None:
    with serve("--recording-time", 200) as server, server.raw() as stream:
        requests = [post(picture.data) for picture in case.pictures[:2]]
        # Those behind the first are here, and the end as well, when the first is answered; the last is cut.
        stream.sendall(b"".join([requests[0], PROBE, requests[1], PROBE[:10]]))
        stream.shutdown(socket.SHUT_WR)
        check(read_answer(stream).json["images"][0], case.pictures[0], case.hashes[0])
        assert read_answer(stream).status == 200
        check(read_answer(stream).json["images"][0], case.pictures[1], case.hashes[0])
        assert stream.recv(1) == b""


def test_an_idle_connection_makes_room_for_another(serve: Serve, case: Case) -> None:
    with serve("--max-connections", 8, "--recording-time", 300) as server:
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
            assert idle[6].recv(1) == b""
        check(read_answer(busy).json["images"][0], case.pictures[0], case.hashes[0])
        for stream in (busy, *idle):
            stream.close()


def test_probes_have_a_port_of_their_own(serve: Serve, case: Case) -> None:
    with serve("--max-connections", 2, "--admin-port", 0) as server:
        found = until(lambda: re.search(r" listens for probes url=http://127.0.0.1:(\d+)\n", server.log.read_text()))
        taken = [server.raw() for _ in range(2)]
        for stream in taken:
            stream.sendall(PROBE[:10])
        until(lambda: server.call("GET", "/readyz").status == 503)
        with socket.create_connection(("127.0.0.1", int(found[1])), timeout=PATIENCE) as probes:
            for target in ("/healthz", "/readyz", "/metrics", "/v1/model"):
                probes.sendall(f"GET {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
                assert read_answer(probes).status == 200
            # It is no way around the limits.
            probes.sendall(post(case.pictures[0].data))
            answer = read_answer(probes)
            assert (answer.status, answer.headers["allow"]) == (405, "GET, HEAD")
        for stream in taken:
            stream.close()


@pytest.mark.parametrize("room", range(1, 14, 3))
def test_too_few_threads_are_an_error_of_one_line(serve: Serve, room: int) -> None:
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
    assert process.stdout is not None
    ready = process.stdout.readline()  # empty when it has ended
    if ready:
        process.terminate()
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == (0 if ready else 1), errors
    if not ready:
        assert errors.splitlines()[-1].startswith("trtdet-serve: error: ")
