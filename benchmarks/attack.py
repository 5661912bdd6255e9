"""Clients that want to cost a service much, one kind after the other: what it holds meanwhile, and what another client
notices of them.

    python benchmarks/attack.py BUNDLE --images DIR --service build/service/serve/trtdet-serve [--seconds N]
        [--addresses N] [--only NAME ...] [--against-aiohttp] [-o OUT.md] [-- OPTION ...]

The service gets small limits, ``--max-bodies-mb 128 --max-decoded-mb 256 --max-queue-mb 64``: its stated budget is
their sum, above what it has when it is warm. Attackers come from 127.0.0.2 and on, on 64 connections, from a process of
lower priority; the client whose times are measured comes from 127.0.0.1 and asks for one image after the other. Its
times without an attack are taken before and after each, and an attack's peak memory from the kernel, which is told to
forget the peak before.

With ``--against-aiohttp`` the same attacks, but for those on other endpoints, go to
``benchmarks/peers/aiohttp_server.py``.
Everything is on this machine's loopback.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import costly_requests
from trtdet.data import evenly, find_images
from trtdet.files import write_atomically

MIB = 1 << 20
LIMITS = {"--max-bodies-mb": 128, "--max-decoded-mb": 256, "--max-queue-mb": 64}
CONNECTIONS = 64
CLIENT = "127.0.0.1"
PATIENCE = 60.0


def request(body: bytes, target: str = "/v1/detect", kind: str = "application/octet-stream") -> bytes:
    head = f"POST {target} HTTP/1.1\r\nHost: x\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


@dataclass(frozen=True)
class Attack:
    """What each of the attacker's connections sends, again and again.

    Attributes:
        name: in the table.
        data: of one connection.
        pause: seconds between the pieces that it is sent in; 0 for at once.
        piece: bytes of each of these.
        only_service: whether it needs an endpoint that the peer lacks.
        leaves: whether the client does not wait for the answer.
    """

    name: str
    data: bytes
    pause: float = 0.0
    piece: int = 0
    only_service: bool = False
    leaves: bool = False


def attacks(model: str, picture: bytes) -> list[Attack]:
    """One of each kind."""
    infer = f"/v2/models/{model}/infer"
    numbers = request(costly_requests.numbers(8), infer, "application/json")
    head = request(bytes(9))[:-9]
    fields = b"".join(b"X-%d: y\r\n" % index for index in range(1200))
    return [
        Attack("WebP file of tables", request(costly_requests.webp_of_tables())),
        Attack("progressive JPEG file", request(costly_requests.progressive_jpeg())),
        Attack("PNG file of compressed texts", request(costly_requests.png_of_texts())),
        Attack("PNG file of one colour", request(costly_requests.png_of_rows())),
        Attack("JSON of numbers", numbers, only_service=True),
        Attack("JSON of numbers, and leaves", numbers, only_service=True, leaves=True),
        Attack("JSON of brackets", request(costly_requests.brackets(8), infer, "application/json"), only_service=True),
        Attack("header without its body", head, pause=5.0, piece=len(head)),
        Attack("body that trickles", request(bytes(4 * MIB)), pause=0.05, piece=4096),
        Attack("body that never ends", request(bytes(30 * MIB))[:-1], pause=0.0, piece=0),
        Attack("1200 header fields", head.replace(b"Host: x\r\n", b"Host: x\r\n" + fields) + bytes(9)),
        Attack("100 pipelined requests", request(picture) * 100),
    ]


async def _send(port: int, address: str, attack: Attack, until: float, counts: Counter[str]) -> None:
    """One connection after the other, each with the attack's bytes."""
    while time.monotonic() < until:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))
        except OSError:
            counts["no connection"] += 1
            await asyncio.sleep(0.05)
            continue
        try:
            async with asyncio.timeout(max(0.1, until - time.monotonic())):
                await _one(reader, writer, attack, counts)
        except (OSError, asyncio.IncompleteReadError, TimeoutError):
            counts["cut"] += 1
        finally:
            writer.close()


async def _one(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, attack: Attack, counts: Counter[str]
) -> None:
    piece = attack.piece or len(attack.data)
    answer = asyncio.ensure_future(reader.read(MIB))
    for start in range(0, len(attack.data), piece):
        writer.write(attack.data[start : start + piece])
        await writer.drain()
        if attack.pause:
            await asyncio.sleep(attack.pause)
        if answer.done():
            break
    if attack.leaves:
        answer.cancel()
        writer.transport.abort()
        counts["left"] += 1
        return
    status = re.match(rb"HTTP/1.1 (\d+)", await answer)
    counts[status[1].decode() if status else "closed"] += 1


def attack_for(
    port: int, attack: Attack, addresses: int, seconds: float, pipe: multiprocessing.connection.Connection
) -> None:
    """The attacker's process."""
    os.nice(10)

    async def all_of_them() -> Counter[str]:
        counts: Counter[str] = Counter()
        until = time.monotonic() + seconds
        sources = [f"127.0.0.{2 + index % addresses}" for index in range(CONNECTIONS)]
        await asyncio.gather(*(_send(port, source, attack, until, counts) for source in sources))
        return counts

    pipe.send(dict(asyncio.run(all_of_them())))


class Client:
    """Asks for one image after the other in a thread of its own, and notes times in seconds."""

    def __init__(self, port: int, pictures: Sequence[bytes]) -> None:
        self.port, self.pictures = port, pictures
        self.seconds: list[float] = []
        self.lost: Counter[str] = Counter()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()

    def _ask(self) -> None:
        stream: socket.socket | None = None
        count = 0
        while not self._end.is_set():
            count += 1
            begin = time.perf_counter()
            try:
                if stream is None:
                    stream = socket.create_connection(
                        ("127.0.0.1", self.port), timeout=PATIENCE, source_address=(CLIENT, 0)
                    )
                stream.sendall(request(self.pictures[count % len(self.pictures)]))
                head, status = _answer(stream)
                if status != 200:
                    self.lost[str(status)] += 1
                if b"connection: close" in head.lower():
                    stream.close()
                    stream = None
            except OSError as error:
                self.lost[type(error).__name__] += 1
                stream = None
            self.seconds.append(time.perf_counter() - begin)
        if stream is not None:
            stream.close()

    def end(self) -> None:
        self._end.set()
        self._thread.join(2 * PATIENCE)


def _answer(stream: socket.socket) -> tuple[bytes, int]:
    data = b""
    while b"\r\n\r\n" not in data:
        if not (more := stream.recv(65536)):
            raise ConnectionError("no answer")
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    length = int(re.search(rb"(?i)content-length: (\d+)", head)[1])  # type: ignore[index]
    while len(body) < length:
        if not (more := stream.recv(65536)):
            raise ConnectionError("the answer was cut")
        body += more
    return head, int(head.split(b" ", 2)[1])


def asked_for(port: int, pictures: Sequence[bytes], seconds: float) -> Client:
    client = Client(port, pictures)
    time.sleep(seconds)
    client.end()
    return client


@dataclass(frozen=True)
class Asked:
    """The same for each attack.

    Attributes:
        seconds: that it lasts.
        addresses: that it comes from.
        fresh: whether each gets a server of its own, where one may not outlive another.
    """

    seconds: float
    addresses: int
    fresh: bool = False


@dataclass
class Result:
    attack: Attack
    quiet: list[float]
    meanwhile: list[float]
    lost: Counter[str]
    answers: dict[str, int]
    grown: int
    budget: int = field(default=sum(LIMITS.values()) * MIB)

    def row(self) -> str:
        def times(seconds: Sequence[float]) -> str:
            fifty, ninety_nine = np.percentile(np.array(seconds) * 1000, [50, 99])
            return f"{fifty:.0f}, {ninety_nine:.0f}"

        ratio = np.percentile(self.meanwhile, 99) / np.percentile(self.quiet, 99)
        answers = ", ".join(f"{count} {name}" for name, count in sorted(self.answers.items()))
        lost = ", ".join(f"{count} {name}" for name, count in sorted(self.lost.items())) or "-"
        return (
            f"| {self.attack.name} | {self.grown / MIB:.0f} | {self.grown / self.budget:.2f} | {times(self.quiet)} | "
            f"{times(self.meanwhile)} | {ratio:.1f} | {len(self.meanwhile)} | {lost} | {answers} |"
        )


COLUMNS = (
    "attack",
    "grown by, MiB",
    "of the budget",
    "quiet p50, p99 ms",
    "meanwhile p50, p99 ms",
    "ratio of p99",
    "requests",
    "lost",
    "attacker's answers",
)
HEAD = f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}"


def memory(pid: int, key: str) -> int:
    """VmHWM or VmRSS of a process, in bytes."""
    (line,) = [one for one in Path(f"/proc/{pid}/status").read_text().splitlines() if one.startswith(key + ":")]
    return int(line.split()[1]) * 1024


def until_idle(process: int) -> None:
    """Waits until what the attack has left to do is done, by the time that the server's process takes."""

    def ticks() -> int:
        return sum(map(int, Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:13]))

    end = time.monotonic() + PATIENCE
    before, now = -1000, ticks()
    while now - before > 2 and time.monotonic() < end:
        time.sleep(1)
        before, now = now, ticks()


def measured(process: int, port: int, attack: Attack, pictures: Sequence[bytes], asked: Asked) -> Result:
    """The other client's times before, during and after the attack, and the peak of memory."""
    seconds = asked.seconds
    quiet = asked_for(port, pictures, seconds / 2).seconds
    Path(f"/proc/{process}/clear_refs").write_text("5")  # the peak begins anew
    before = memory(process, "VmRSS")
    ours, theirs = multiprocessing.Pipe()
    attacker = multiprocessing.Process(target=attack_for, args=(port, attack, asked.addresses, seconds, theirs))
    attacker.start()
    theirs.close()
    time.sleep(0.5)  # in which it starts
    client = asked_for(port, pictures, seconds - 1)
    try:
        answers = ours.recv() if ours.poll(seconds + PATIENCE) else {}
    except EOFError:
        answers = {}
    attacker.join(PATIENCE)
    grown = memory(process, "VmHWM") - before
    until_idle(process)
    quiet += asked_for(port, pictures, seconds / 2).seconds
    return Result(attack, quiet, client.seconds, client.lost, answers, grown)


@contextlib.contextmanager
def started(command: Sequence[object], pattern: str) -> Iterator[tuple[int, int]]:
    """A server's process, and its port as it prints it."""
    process = subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        line = process.stdout.readline() if process.stdout else ""
        found = re.search(pattern, line)
        if not found:
            raise SystemExit(f"'{command[0]}' did not start: run it by hand to see why")
        yield process.pid, int(found[1])
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()


def table(command: Sequence[object], wanted: Sequence[Attack], pictures: Sequence[bytes], asked: Asked) -> list[str]:
    """A row for each attack."""
    rows = []
    with contextlib.ExitStack() as stack:
        server: Callable[[], tuple[int, int]] = lambda: stack.enter_context(  # noqa: E731
            started(command, r"http://127\.0\.0\.1:(\d+)")
        )
        process, port = server()
        asked_for(port, pictures, 3)
        for index, attack in enumerate(wanted):
            if asked.fresh and index > 0:
                stack.pop_all().close()
                process, port = server()
                asked_for(port, pictures, 3)
            try:
                rows.append(measured(process, port, attack, pictures, asked).row())
            except (OSError, FileNotFoundError, ValueError) as error:
                rows.append(f"| {attack.name} | the server ended: {error} |" + " |" * 7)
            print(rows[-1], file=sys.stderr, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--service", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each attack")
    parser.add_argument("--addresses", type=int, default=1, choices=range(1, 65), help="that attackers have")
    parser.add_argument("--only", nargs="+", help="names of attacks")
    parser.add_argument("--against-aiohttp", action="store_true")
    parser.add_argument("-o", "--output", type=Path)
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options, service_options = parser.parse_args(sys.argv[1:end]), sys.argv[end + 1 :]
    pictures = [path.read_bytes() for path in evenly(find_images(options.images), 16)]
    wanted = attacks(options.bundle.resolve().name, pictures[0])
    if options.only:
        wanted = [attack for attack in wanted if attack.name in options.only]
    asked = Asked(options.seconds, options.addresses)
    limits = [part for name, value in LIMITS.items() for part in (name, value)]
    command = [options.service, options.bundle, "--port", 0, *limits, *service_options]
    lines = ["## trtdet-serve", "", HEAD, *table(command, wanted, pictures, asked)]
    if options.against_aiohttp:
        peer = [sys.executable, Path(__file__).parent / "peers" / "aiohttp_server.py", options.bundle]
        theirs = [attack for attack in wanted if not attack.only_service]
        lines += ["", "## aiohttp", "", HEAD, *table(peer, theirs, pictures, replace(asked, fresh=True))]
    text = "\n".join(lines) + "\n"
    print(text)
    if options.output:
        write_atomically(options.output, text.encode())


if __name__ == "__main__":
    main()
