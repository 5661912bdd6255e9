"""What fills the engine files of bundles, and what a compressor makes of them.

    python benchmarks/engine_size.py BUNDLE...

Prints Markdown.
"""

from __future__ import annotations

import argparse
import re
import zlib
from pathlib import Path

from trtdet.bundle import Bundle
from trtdet.tables import Column, Table

_TEXT = re.compile(rb"[\t\n\r\x1d-\x7e]{256,}")
_ZEROS = re.compile(rb"\x00{256,}")
_SOURCE = b"__global__"


def parts_of(engine: bytes) -> tuple[int, tuple[int, int, int, int]]:
    """How many texts of CUDA source an engine holds, and the bytes of its parts.

    TensorRT-RTX keeps the source of each kernel that it generates, which is compiled on the machine that runs it. The
    parts are these sources, other text such as the list of what to run, runs of at least 256 zeros, and everything
    else: weights, and kernels that are compiled already.
    """
    texts = _TEXT.findall(engine)
    sources = [len(text) for text in texts if _SOURCE in text]
    source, zeros = sum(sources), sum(map(len, _ZEROS.findall(engine)))
    text = sum(map(len, texts)) - source
    return len(sources), (source, text, zeros, len(engine) - source - text - zeros)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", type=Path, nargs="+", metavar="BUNDLE")
    rows = []
    for place in parser.parse_args().bundles:
        bundle = Bundle(place)
        if bundle.engine is None:
            continue
        data = bundle.engine.read_bytes()
        kernels, parts = parts_of(data)
        sizes = (len(data), *parts, len(zlib.compress(data, 9)))
        sms = " ".join(map(str, bundle.manifest.backend.sms))
        rows.append((place.name, sms, kernels, *(size / 1e6 for size in sizes)))
    columns = ("file", "CUDA source", "other text", "zeros", "weights and all else", "compressed")
    print(
        Table(("bundle", "built for", "sources", *(Column(f"{name}, MB", ".2f") for name in columns)), rows).markdown()
    )


if __name__ == "__main__":
    main()
