"""trtdet-serve where something is wrong around it: what it lacks, what hangs, who does not read or never ends."""

from __future__ import annotations

import os
import re
from collections.abc import Callable

from serving import Case, Server, call, check, until

Serve = Callable[..., Server]


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
