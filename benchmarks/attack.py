"""Clients that want to cost a service much, one kind after the other: what it holds meanwhile, and what another client
notices of them.

    python benchmarks/attack.py BUNDLE --images DIR --service build/service/serve/trtdet-serve [--seconds N]
        [--addresses N] [--only NAME ...] [--against aiohttp triton] [--pytriton SITE_PACKAGES] [-o OUT.md]
        [-- OPTION ...]

The service gets small limits, ``--max-bodies-mb 128 --max-decoded-mb 256 --max-queue-mb 64``: its stated budget is
their sum, above what it has when it is warm. Attackers come from 127.0.0.2 and on, on 64 connections, from a process of
lower priority; the client whose times are measured comes from 127.0.0.1 and asks for one image after the other, over
gRPC where the attack comes over it. Its times without an attack are taken before and after each, and an attack's peak
memory from the kernel, which is told to forget the peak before. Needs tritonclient[grpc].

With ``--against`` the same attacks go to servers of ``benchmarks/peers``, each to a server of its own:

- aiohttp: ``aiohttp_server.py``, but for JSON and gRPC, which it does not have.
- triton: ``triton_server.py``, over HTTP and gRPC; ``--pytriton`` names the site-packages of an environment that has
  nvidia-pytriton. Its peak is the sum of those of its processes.

Everything is on this machine's loopback.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import multiprocessing
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import costly_requests
from benchmarks.http2 import Call, more_of_a_head, outcome, pings, prefixed
from benchmarks.service import DETECT, PEER_SERVERS, TRITON, Wire, family, free_port
from trtdet.bundle import Bundle
from trtdet.data import evenly, find_images
from trtdet.files import write_atomically

MIB = 1 << 20
LIMITS = {"--max-bodies-mb": 128, "--max-decoded-mb": 256, "--max-queue-mb": 64}
CONNECTIONS = 64
CLIENT = "127.0.0.1"
PATIENCE = 60.0


@dataclass(frozen=True)
class Asks:
    """What a server is asked with.

    Attributes:
        wire: over HTTP, for an image.
        model: over the Open Inference Protocol; empty where the server does not have it.
        place: the name of the model's input.
        datatype: of an image file in it: BYTES for a file as one element, UINT8 for a file's bytes.
        shape: of the tensor that the network takes.
    """

    wire: Wire
    model: str
    place: str
    datatype: str
    shape: tuple[int, ...]

    def request(self, body: bytes, target: str = "", headers: Mapping[str, str] | None = None) -> bytes:
        """A request over HTTP; one of an image without the rest."""
        fields = {"Host": "x", **(headers or self.wire.headers), "Content-Length": len(body)}
        lines = [f"POST {target or self.wire.detect} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
        return "\r\n".join([*lines, "\r\n"]).encode() + body

    def image(self, data: bytes) -> bytes:
        """An inference's message over gRPC, with an image file."""
        if self.datatype == "BYTES":
            return self.inference(len(data).to_bytes(4, "little") + data, "BYTES", [1])
        return self.inference(data, self.datatype, [len(data)])

    def inference(self, raw: bytes, datatype: str, shape: Sequence[int]) -> bytes:
        """The same, of one tensor."""
        # Only attacks over gRPC, and who asks over it, need it.
        from tritonclient.grpc import service_pb2 as protocol

        place = protocol.ModelInferRequest.InferInputTensor(name=self.place, datatype=datatype, shape=shape)
        made = protocol.ModelInferRequest(model_name=self.model, inputs=[place], raw_input_contents=[raw])
        return bytes(made.SerializeToString())

    def page(self) -> bytes:
        """A message that asks for a page of the model."""
        from tritonclient.grpc import service_pb2 as protocol

        return bytes(protocol.ModelConfigRequest(name=self.model).SerializeToString())


def asks_of(bundle: Path) -> Asks:
    """What the service is asked with, as it serves a bundle."""
    place = Bundle(bundle).manifest.input
    return Asks(DETECT, bundle.name, place.name, "BYTES", (1, *place.shape.max[1:]))


@dataclass(frozen=True)
class Attack:
    """What each of the attacker's connections sends, again and again.

    Attributes:
        name: in the table.
        data: of one connection.
        pause: seconds between the pieces that it is sent in; 0 for at once.
        piece: bytes of each of these.
        protocol: whether it needs the Open Inference Protocol over HTTP.
        leaves: whether the client does not wait for the answer.
        call: over gRPC, in place of data.
        connections: at a time.
    """

    name: str
    data: bytes = b""
    pause: float = 0.0
    piece: int = 0
    protocol: bool = False
    leaves: bool = False
    call: Call | None = None
    connections: int = CONNECTIONS


def attacks(asks: Asks, picture: bytes) -> list[Attack]:
    """Of each kind over HTTP."""
    request = asks.request
    json = partial(request, target=f"/v2/models/{asks.model}/infer", headers={"Content-Type": "application/json"})
    numbers = json(costly_requests.numbers(8))
    head = request(bytes(9))[:-9]
    fields = b"".join(b"X-%d: y\r\n" % index for index in range(1200))
    return [
        Attack("WebP file of tables", request(costly_requests.webp_of_tables())),
        Attack("progressive JPEG file", request(costly_requests.progressive_jpeg())),
        Attack("PNG file of compressed texts", request(costly_requests.png_of_texts())),
        Attack("PNG file of one colour", request(costly_requests.png_of_rows())),
        Attack("JSON of numbers", numbers, protocol=True),
        Attack("JSON of numbers, and leaves", numbers, protocol=True, leaves=True),
        Attack("JSON of brackets", json(costly_requests.brackets(8)), protocol=True),
        Attack("header without its body", head, pause=5.0, piece=len(head)),
        Attack("body that trickles", request(bytes(4 * MIB)), pause=0.05, piece=4096),
        Attack("body that never ends", request(bytes(30 * MIB))[:-1], pause=0.0, piece=0),
        Attack("1200 header fields", head.replace(b"Host: x\r\n", b"Host: x\r\n" + fields) + bytes(9)),
        Attack("100 pipelined requests", request(picture) * 100),
    ]


def grpc_attacks(asks: Asks) -> list[Attack]:
    """Of each kind over gRPC."""
    most, shape = 30 * MIB, asks.shape
    packed = (("grpc-encoding", b"gzip"),)
    calls = {
        "small inputs": Call("ModelInfer", prefixed(b"\x2a\x00" * (most // 2))),
        "unknown fields": Call("ModelInfer", prefixed(b"\x78\x01" * (most // 2))),
        "unknown fields of a page": Call("ServerLive", prefixed(b"\x78\x01" * (most // 2))),
        "raw contents, too long": Call("ModelInfer", prefixed(asks.inference(bytes(most), "FP32", shape))),
        "raw contents, too short": Call("ModelInfer", prefixed(asks.inference(bytes(4), "FP32", [2**31, *shape]))),
        "gzip of zeros": Call("ModelInfer", prefixed(costly_requests.gzip_of_zeros(30), True), packed),
        "gzip of 256 MiB": Call("ModelInfer", prefixed(costly_requests.gzip_of_zeros(256), True), packed),
        "WebP file of tables": Call("ModelInfer", prefixed(asks.image(costly_requests.webp_of_tables()))),
        "progressive JPEG file": Call("ModelInfer", prefixed(asks.image(costly_requests.progressive_jpeg()))),
        "PNG file of texts": Call("ModelInfer", prefixed(asks.image(costly_requests.png_of_texts()))),
        "PNG file of one colour": Call("ModelInfer", prefixed(asks.image(costly_requests.png_of_rows()))),
        "message that never ends": Call("ModelInfer", prefixed(bytes(most))[:-1], ends=False),
        "message that trickles": Call("ModelInfer", prefixed(bytes(4 * MIB)), ends=False, pause=0.05),
        "100 streams that never end": Call("ModelInfer", prefixed(bytes(most))[:-1], streams=100, ends=False),
        "10000 streams without data": Call("ModelInfer", streams=10_000, ends=False),
        "streams given up at once": Call("ModelInfer", streams=10_000, resets=True),
        "10000 metadata fields": Call("ServerLive", prefixed(b""), [(f"x-{one}", b"y") for one in range(10_000)]),
    }
    all_of_them = [Attack(f"gRPC: {name}", call=call) for name, call in calls.items()]
    silent = Call("ModelInfer", b"\0", ends=False)
    many = Attack("gRPC: 2000 connections", call=silent, connections=2000)
    config = Call("ModelConfig", prefixed(asks.page()), streams=100, takes=False, pause=0.1)
    unread = Attack("gRPC: answers that are not taken", call=config, connections=512)
    endless = Call("ServerLive", flood=more_of_a_head())
    head = Attack("gRPC: head without an end", call=endless)
    asked = Attack("gRPC: PINGs", call=Call("ServerLive", flood=pings()))
    return [*all_of_them, many, unread, head, asked]


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
    if attack.call:
        counts[await outcome(reader, writer, attack.call)] += 1
        return
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
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

    async def all_of_them() -> Counter[str]:
        counts: Counter[str] = Counter()
        until = time.monotonic() + seconds
        sources = [f"127.0.0.{2 + index % addresses}" for index in range(attack.connections)]
        await asyncio.gather(*(_send(port, source, attack, until, counts) for source in sources))
        return counts

    pipe.send(dict(asyncio.run(all_of_them())))


class OverHttp:
    """A connection that asks for one image after the other."""

    def __init__(self, server: Server) -> None:
        self._port, self._request = server.port, server.asks.request
        self._stream: socket.socket | None = None

    def ask(self, picture: bytes) -> str:
        """Asks for one image; what is wrong with the answer, if anything is."""
        try:
            if self._stream is None:
                address = ("127.0.0.1", self._port)
                self._stream = socket.create_connection(address, timeout=PATIENCE, source_address=(CLIENT, 0))
            self._stream.sendall(self._request(picture))
            head, status = _answer(self._stream)
            if b"connection: close" in head.lower():
                self.close()
        except OSError as error:
            self.close()
            return type(error).__name__
        return "" if status == 200 else str(status)

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None


class OverGrpc:
    """The same over gRPC."""

    def __init__(self, server: Server) -> None:
        import grpc

        self._error, self._image = grpc.RpcError, server.asks.image
        self._channel = grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}")
        self._infer = self._channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")

    def ask(self, picture: bytes) -> str:
        try:
            self._infer(self._image(picture), timeout=PATIENCE)
        except self._error as error:
            return str(error.code().name)
        return ""

    def close(self) -> None:
        self._channel.close()


class Client:
    """Asks for one image after the other in a thread of its own, and notes the times of answers in seconds."""

    def __init__(self, server: Server, pictures: Sequence[bytes], over_grpc: bool = False) -> None:
        self._over: OverHttp | OverGrpc = OverGrpc(server) if over_grpc else OverHttp(server)
        self._pictures = pictures
        self.seconds: list[float] = []
        self.lost: Counter[str] = Counter()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()

    def _ask(self) -> None:
        for picture in itertools.cycle(self._pictures):
            if self._end.is_set():
                break
            begin = time.perf_counter()
            if problem := self._over.ask(picture):
                self.lost[problem] += 1
                time.sleep(0.01)
            else:
                self.seconds.append(time.perf_counter() - begin)
        self._over.close()

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


@dataclass(frozen=True)
class Server:
    """A server that is attacked: its process, its ports, 0 for gRPC where it has none, and what it is asked with."""

    process: int
    port: int
    grpc_port: int
    asks: Asks

    def memory(self, key: str) -> int:
        """VmHWM or VmRSS of its processes, in bytes."""
        return sum(memory(process, key) for process in family(self.process))

    def begin_peak(self) -> None:
        """Lets the kernel forget the peak."""
        for process in family(self.process):
            Path(f"/proc/{process}/clear_refs").write_text("5")

    def until_idle(self) -> None:
        """Waits until what an attack has left to do is done, by the time that its processes take."""
        end = time.monotonic() + PATIENCE
        before, now = -1000, sum(family(self.process).values())
        while now - before > 2 and time.monotonic() < end:
            time.sleep(1)
            before, now = now, sum(family(self.process).values())


def asked_for(server: Server, pictures: Sequence[bytes], seconds: float, over_grpc: bool = False) -> Client:
    client = Client(server, pictures, over_grpc)
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
            if not seconds:
                return "no answer"
            fifty, ninety_nine = np.percentile(np.array(seconds) * 1000, [50, 99])
            return f"{fifty:.0f}, {ninety_nine:.0f}"

        both = self.meanwhile and self.quiet
        ratio = f"{np.percentile(self.meanwhile, 99) / np.percentile(self.quiet, 99):.1f}" if both else ""
        answers = ", ".join(f"{count} {name}" for name, count in sorted(self.answers.items()))
        lost = ", ".join(f"{count} {name}" for name, count in sorted(self.lost.items())) or "-"
        return (
            f"| {self.attack.name} | {self.grown / MIB:.0f} | {self.grown / self.budget:.2f} | {times(self.quiet)} | "
            f"{times(self.meanwhile)} | {ratio} | {len(self.meanwhile)} | {lost} | {answers} |"
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
    lines = [one for one in Path(f"/proc/{pid}/status").read_text().splitlines() if one.startswith(key + ":")]
    if not lines:  # its parent has not asked yet how it ended
        raise ProcessLookupError(f"process {pid} has ended")
    return int(lines[0].split()[1]) * 1024


def measured(server: Server, attack: Attack, pictures: Sequence[bytes], asked: Asked) -> Result:
    """The other client's times before, during and after the attack, and the peak of memory."""
    seconds, over_grpc = asked.seconds, attack.call is not None
    quiet = asked_for(server, pictures, seconds / 2, over_grpc)
    server.begin_peak()
    before = server.memory("VmRSS")
    ours, theirs = multiprocessing.Pipe()
    port = server.grpc_port if over_grpc else server.port
    attacker = multiprocessing.Process(target=attack_for, args=(port, attack, asked.addresses, seconds, theirs))
    attacker.start()
    theirs.close()
    time.sleep(0.5)  # in which it starts
    client = asked_for(server, pictures, seconds - 1, over_grpc)
    try:
        answers = ours.recv() if ours.poll(seconds + PATIENCE) else {}
    except EOFError:
        answers = {}
    attacker.join(PATIENCE)
    grown = server.memory("VmHWM") - before
    server.until_idle()
    after = asked_for(server, pictures, seconds / 2, over_grpc)
    lost = client.lost + Counter({f"{name} afterwards": count for name, count in after.lost.items()})
    return Result(attack, quiet.seconds + after.seconds, client.seconds, lost, answers, grown)


@contextlib.contextmanager
def started(command: Sequence[object], asks: Asks, grpc_port: int = 0) -> Iterator[Server]:
    """A server, which prints its port for HTTP."""
    process = subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        line = process.stdout.readline() if process.stdout else ""
        found = re.search(r"http://127\.0\.0\.1:(\d+)", line)
        if not found:
            raise SystemExit(f"'{command[0]}' did not start: run it by hand to see why")
        yield Server(process.pid, int(found[1]), grpc_port, asks)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            for left in family(process.pid):
                os.kill(left, signal.SIGKILL)


def table(start: Callable[[], Any], wanted: Sequence[Attack], pictures: Sequence[bytes], asked: Asked) -> list[str]:
    """A row for each attack. start: makes a context whose value is a Server."""
    rows = []
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(start())
        asked_for(server, pictures, 3)
        for index, attack in enumerate(wanted):
            if asked.fresh and index > 0:
                stack.pop_all().close()
                server = stack.enter_context(start())
                asked_for(server, pictures, 3)
            try:
                rows.append(measured(server, attack, pictures, asked).row())
            except OSError as error:
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
    parser.add_argument("--only", nargs="+", help="attacks, by what their names begin with")
    parser.add_argument("--against", nargs="+", default=[], choices=["aiohttp", "triton"], help="peers")
    parser.add_argument("--pytriton", type=Path, help="site-packages that have nvidia-pytriton, with Triton")
    parser.add_argument("-o", "--output", type=Path)
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options, service_options = parser.parse_args(sys.argv[1:end]), sys.argv[end + 1 :]
    if "triton" in options.against and options.pytriton is None:
        parser.error("--against triton needs --pytriton with the site-packages that have nvidia-pytriton")
    pictures = [path.read_bytes() for path in evenly(find_images(options.images), 16)]
    bundle = options.bundle.resolve()
    asked = Asked(options.seconds, options.addresses)
    limits = [part for name, value in LIMITS.items() for part in (name, value)]
    grpc_port = free_port()
    asks = asks_of(bundle)
    theirs = replace(asks, wire=TRITON, model="detect", place="image", datatype="UINT8")
    python = [sys.executable, PEER_SERVERS / "aiohttp_server.py", bundle]
    triton = [sys.executable, PEER_SERVERS / "triton_server.py", bundle, "--pytriton", options.pytriton]
    service = [options.service, bundle, "--port", 0, "--grpc-port", grpc_port, *limits, *service_options]
    servers: dict[str, tuple[list[object], Asks, int]] = {
        "trtdet-serve": (service, asks, grpc_port),
        "aiohttp": (python, replace(asks, model=""), 0),
        "triton": ([*triton, "--grpc-port", grpc_port], theirs, grpc_port),
    }
    lines = []
    for name in ("trtdet-serve", *options.against):
        command, its, port = servers[name]
        wanted = [attack for attack in attacks(its, pictures[0]) if its.model or not attack.protocol]
        wanted += grpc_attacks(its) if its.model else []
        if options.only:
            wanted = [attack for attack in wanted if attack.name.startswith(tuple(options.only))]
        rows = table(
            partial(started, command, its, port), wanted, pictures, replace(asked, fresh=name in options.against)
        )
        lines += ["", f"## {name}", "", HEAD, *rows]
    text = "\n".join(lines[1:]) + "\n"
    print(text)
    if options.output:
        write_atomically(options.output, text.encode())


if __name__ == "__main__":
    main()
