"""What fills the engine files of bundles, and what a compressor makes of them.

    python benchmarks/engine_size.py BUNDLE...

Prints Markdown.
"""

from __future__ import annotations

import argparse
import zlib
from pathlib import Path

from trtdet.audit import Audit
from trtdet.audit.engine_file import parts_of
from trtdet.bundle import Bundle
from trtdet.tables import Column, Table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", type=Path, nargs="+", metavar="BUNDLE")
    rows = []
    for place in parser.parse_args().bundles:
        bundle = Bundle(place)
        if bundle.engine is None:
            continue
        data = bundle.engine.read_bytes()
        found = parts_of(data, Audit.load(bundle.file("audit.json")).layers)
        sizes = (found.bytes, found.source, found.records, found.zeros, found.rest, len(zlib.compress(data, 9)))
        sms = " ".join(map(str, bundle.manifest.backend.sms))
        rows.append((place.name, sms, found.kernels, *(size / 1e6 for size in sizes)))
    columns = ("file", "CUDA source", "other text", "zeros", "weights and all else", "compressed")
    print(
        Table(("bundle", "built for", "sources", *(Column(f"{name}, MB", ".2f") for name in columns)), rows).markdown()
    )


if __name__ == "__main__":
    main()
