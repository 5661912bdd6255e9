"""A client of gRPC that does what none should: it writes the frames of HTTP/2 itself (RFC 9113), from an address of its
choice, keeps to the server's windows, and leaves off or goes on where it likes."""

from __future__ import annotations

import asyncio
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
WINDOW = 65_535
"""Bytes that may be sent on a connection, and on a stream of it, until the server says more."""


class Frame(IntEnum):
    DATA = 0
    HEADERS = 1
    RST_STREAM = 3
    SETTINGS = 4
    PING = 6
    GOAWAY = 7
    WINDOW_UPDATE = 8
    CONTINUATION = 9


ACKNOWLEDGED = END_STREAM = 0x1
END_HEADERS = 0x4
INITIAL_WINDOW = 0x4
CANCEL = 8
LARGEST = 16_384

CODES = {0: "OK", 1: "CANCELLED", 3: "INVALID_ARGUMENT", 4: "DEADLINE_EXCEEDED", 5: "NOT_FOUND"} | {
    8: "RESOURCE_EXHAUSTED",
    12: "UNIMPLEMENTED",
    13: "INTERNAL",
    14: "UNAVAILABLE",
}
"""gRPC's status codes that a service here answers with."""


def frame(kind: Frame, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def _number(value: int, bits: int) -> bytes:
    """An integer of HPACK (RFC 7541, 5.1) whose first byte has so many bits of it, the others zero."""
    most = (1 << bits) - 1
    if value < most:
        return bytes([value])
    value, encoded = value - most, [most]
    while value >= 128:
        encoded.append(value & 127 | 128)
        value >>= 7
    return bytes([*encoded, value])


def fields(pairs: Sequence[tuple[str, bytes]]) -> bytes:
    """Header fields, none of which the server has to keep."""
    return b"".join(
        b"\0" + _number(len(name), 7) + name.encode() + _number(len(value), 7) + value for name, value in pairs
    )


def headers(stream: int, block: bytes, flags: int = 0) -> bytes:
    """A block of header fields, in as many frames as it takes."""
    pieces = [block[start : start + LARGEST] for start in range(0, max(1, len(block)), LARGEST)]
    kinds = [Frame.HEADERS] + [Frame.CONTINUATION] * (len(pieces) - 1)
    own = [flags] + [0] * (len(pieces) - 1)
    own[-1] |= END_HEADERS
    return b"".join(frame(kind, flag, stream, piece) for kind, flag, piece in zip(kinds, own, pieces, strict=True))


def more_of_a_head(stream: int = 1) -> bytes:
    """A frame of 16 KiB that goes on with a block of header fields, and does not end it."""
    return frame(Frame.CONTINUATION, 0, stream, fields([(f"x-{number}", b"y" * 1000) for number in range(16)]))


def pings() -> bytes:
    """Frames that each ask for an answer, 17 KB of them."""
    return frame(Frame.PING, 0, 0, b"attacked") * 1000


def prefixed(message: bytes, compressed: bool = False) -> bytes:
    """A message as it stands in a stream of gRPC."""
    return bytes([compressed]) + struct.pack(">I", len(message)) + message


@dataclass(frozen=True)
class Call:
    """What each connection does: the same call on one stream or several, at the same time.

    Attributes:
        method: such as "ModelInfer".
        data: a message with its prefix, see ``prefixed``; the whole of it, or a part.
        more: header fields beside those that a call has.
        streams: how many.
        ends: whether the streams are ended, so that there will be an answer.
        resets: whether each stream is given up as soon as it is sent.
        pause: seconds between frames of data.
        takes: whether the answers are taken; else there is no window for them, and each call is sent before the next.
        flood: frames that are sent again and again instead of the call, or within its head where they go on with that.
    """

    method: str
    data: bytes = b""
    more: Sequence[tuple[str, bytes]] = ()
    streams: int = 1
    ends: bool = True
    resets: bool = False
    pause: float = 0.0
    takes: bool = True
    flood: bytes = b""

    def block(self) -> bytes:
        return fields(
            [
                (":method", b"POST"),
                (":scheme", b"http"),
                (":path", f"/inference.GRPCInferenceService/{self.method}".encode()),
                (":authority", b"localhost"),
                ("te", b"trailers"),
                ("content-type", b"application/grpc"),
                *self.more,
            ]
        )


class _Connection:
    """Sends calls, and reads until the server has ended each stream or the connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, call: Call) -> None:
        self.reader, self.writer, self.call = reader, writer, call
        self.window, self.windows, self.initial = WINDOW, dict[int, int](), WINDOW
        self.more, self.over = asyncio.Event(), asyncio.Event()
        self.open, self.outcome = set[int](), ""

    async def run(self) -> str:
        """How the first stream that ended did, or the connection."""
        settings = b"" if self.call.takes else struct.pack(">HI", INITIAL_WINDOW, 0)
        self.writer.write(PREFACE + frame(Frame.SETTINGS, 0, 0, settings))
        reading = asyncio.ensure_future(self._read())
        sending = asyncio.ensure_future(self._send_all())
        try:
            await asyncio.wait([reading], return_when=asyncio.FIRST_COMPLETED)
        finally:
            reading.cancel()
            sending.cancel()
            await asyncio.gather(reading, sending, return_exceptions=True)
        return self.outcome or "closed"

    async def _send_all(self) -> None:
        block = self.call.block()
        streams = range(1, 2 * self.call.streams, 2)
        self.open.update(streams)
        for stream in streams:
            self.windows[stream] = self.initial
            if self.call.flood:
                await self._flood(stream, block)
            at_once = END_STREAM if self.call.ends and not self.call.data else 0
            self.writer.write(headers(stream, block, at_once))
            if self.call.resets:
                self.writer.write(frame(Frame.RST_STREAM, 0, stream, struct.pack(">I", CANCEL)))
                self.open.discard(stream)
            await self.writer.drain()
            if not self.call.takes:
                await self._send(stream)
        if self.call.resets:
            self.outcome = "reset by the client"
            # What is answered to it says that all of it was read.
            self.writer.write(frame(Frame.PING, 0, 0, b"attacked"))
        elif self.call.data and self.call.takes:
            await asyncio.gather(*(self._send(stream) for stream in streams))

    async def _flood(self, stream: int, block: bytes) -> None:
        """The frames again and again."""
        if self.call.flood[3] == Frame.CONTINUATION:
            self.writer.write(frame(Frame.HEADERS, 0, stream, block))
        while True:
            self.writer.write(self.call.flood)
            await self.writer.drain()

    async def _send(self, stream: int) -> None:
        data, sent = self.call.data, 0
        while sent < len(data) and stream in self.open:
            count = min(LARGEST, self.window, self.windows[stream], len(data) - sent)
            if count <= 0:
                self.more.clear()
                await self.more.wait()
                continue
            self.window -= count
            self.windows[stream] -= count
            last = self.call.ends and sent + count == len(data)
            self.writer.write(frame(Frame.DATA, END_STREAM if last else 0, stream, data[sent : sent + count]))
            await self.writer.drain()
            sent += count
            if self.call.pause:
                await asyncio.sleep(self.call.pause)

    async def _read(self) -> None:
        while True:
            head = await self.reader.readexactly(9)
            payload = await self.reader.readexactly(int.from_bytes(head[:3], "big"))
            kind, flags, stream = head[3], head[4], int.from_bytes(head[5:], "big")
            if kind == Frame.SETTINGS and not flags & ACKNOWLEDGED:
                self._set(payload)
            elif kind == Frame.PING and flags & ACKNOWLEDGED:
                if not self.call.flood:
                    return
            elif kind == Frame.PING:
                self.writer.write(frame(Frame.PING, ACKNOWLEDGED, 0, payload))
            elif kind == Frame.WINDOW_UPDATE:
                self._widen(stream, int.from_bytes(payload, "big"))
            elif kind == Frame.GOAWAY:
                self.outcome = self.outcome or "sent away"
            elif kind in (Frame.HEADERS, Frame.RST_STREAM):
                self._note(kind, payload)
                if kind == Frame.RST_STREAM or flags & END_STREAM:
                    self.open.discard(stream)
                    self.more.set()
                    if not self.open and not self.call.flood:
                        return

    def _set(self, payload: bytes) -> None:
        for key, value in struct.iter_unpack(">HI", payload):
            if key == INITIAL_WINDOW:
                more, self.initial = value - self.initial, value
                self.windows = {stream: window + more for stream, window in self.windows.items()}
        # Within a head no other frame may come, and gRPC holds a client to its limits once they are confirmed.
        if not self.call.flood:
            self.writer.write(frame(Frame.SETTINGS, ACKNOWLEDGED, 0))
        self.more.set()

    def _widen(self, stream: int, more: int) -> None:
        if stream == 0:
            self.window += more
        elif stream in self.windows:
            self.windows[stream] += more
        self.more.set()

    def _note(self, kind: int, payload: bytes) -> None:
        if self.outcome:
            return
        if kind == Frame.RST_STREAM:
            self.outcome = "reset"
        # gRPC's core writes its names as they are.
        elif found := re.search(rb"grpc-status[\x01\x02](\d{1,2})", payload):
            self.outcome = CODES.get(int(found[1]), f"code {found[1].decode()}")


async def outcome(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, call: Call) -> str:
    """Makes the calls on a connection that is there.

    Returns:
        The name of the first status, or how the server ended it: "reset", "sent away", "closed".

    Raises:
        OSError, asyncio.IncompleteReadError: the connection broke.
    """
    return await _Connection(reader, writer, call).run()
