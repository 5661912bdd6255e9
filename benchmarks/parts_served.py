"""What masks, keypoints and rotated boxes cost the HTTP service: the time of a request of detectors that give them,
beside that of a detector of the same family that gives boxes alone. Needs ``trtdet-serve``.

    python benchmarks/parts_served.py PLAIN PARTS... --images DIR --service build/service/serve/trtdet-serve
        [--library-folder DIR] [--num-images N] [--rounds N] [-o OUT.md]

PLAIN and PARTS are bundles. One process serves them all, as several models; one client sends each image to each in
turn, in another order every time, so that a busy moment of the machine meets all alike. A time is from the question to
the last byte of the answer, decoding and the network included; ``run`` is the network's, as the answer has it. A ratio
is that of the times of one image in one round; the table has their median and quartiles. Networks that give more take
longer, whatever serves them, so a second ratio is as if each network took as long as that of the boxes alone.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from service import listening
from trtdet.bundle import Bundle
from trtdet.data import evenly, find_images
from trtdet.errors import BackendError, ConfigError, TrtdetError
from trtdet.files import write_atomically

WARM_UP = 3
"""Requests to each model that are not counted."""


@dataclass
class Times:
    """Answers of one model in the order of questions: milliseconds of all and of the network, detections, bytes."""

    name: str
    ms: list[float] = field(default_factory=list)
    run: list[float] = field(default_factory=list)
    detections: list[int] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)

    def ask(self, connection: http.client.HTTPConnection, image: bytes) -> None:
        """Sends one image. Raises BackendError: the service refuses it."""
        headers = {"Content-Type": "application/octet-stream"}
        started = time.perf_counter()
        connection.request("POST", f"/v1/models/{self.name}/detect", image, headers)
        response = connection.getresponse()
        body = response.read()
        self.ms.append(1e3 * (time.perf_counter() - started))
        if response.status != 200:
            raise BackendError(f"model '{self.name}' answers {response.status}: {body.decode(errors='replace')}")
        found = json.loads(body)["images"][0]
        self.run.append(found["ms"]["run"])
        self.detections.append(len(found["detections"]))
        self.bytes.append(len(body))


def measure(port: int, names: Sequence[str], images: Sequence[Path], rounds: int) -> list[Times]:
    """Asks each model for each image in each round."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    files = [image.read_bytes() for image in images]
    for name in names:
        for number in range(WARM_UP):
            Times(name).ask(connection, files[number % len(files)])
    times = [Times(name) for name in names]
    turn = 0
    for _ in range(rounds):
        for file in files:
            turn += 1
            first = turn % len(times)
            for one in times[first:] + times[:first]:
                one.ask(connection, file)
    connection.close()
    return times


def parts_of(bundle: Path) -> str:
    parts = Bundle(bundle, verify=False).manifest.parts
    return "boxes" if parts is None else ", ".join(name.replace("_", " ") for name in parts.model_dump())


def ratios(ms: Sequence[float], of: Sequence[float]) -> str:
    """Median and quartiles of the ratios."""
    low, middle, high = statistics.quantiles([a / b for a, b in zip(ms, of, strict=True)], n=4)
    return f"{middle:.2f} ({low:.2f} .. {high:.2f})"


def table(bundles: Sequence[Path], times: Sequence[Times]) -> str:
    """The report in Markdown; the first bundle is what the others are compared with."""
    lines = [
        "| bundle | gives | detections | bytes | p50 ms | p50 run ms | times boxes alone | with equal networks |",
        "|---|---|---:|---:|---:|---:|---|---|",
    ]
    plain = times[0]
    for bundle, one in zip(bundles, times, strict=True):
        facts = [bundle.name, parts_of(bundle), f"{statistics.mean(one.detections):.1f}"]
        facts += [f"{statistics.mean(one.bytes):.0f}"]
        facts += [f"{statistics.median(one.ms):.2f}", f"{statistics.median(one.run):.2f}"]
        equal = [all_ - run + plain_run for all_, run, plain_run in zip(one.ms, one.run, plain.run, strict=True)]
        facts += ["", ""] if one is plain else [ratios(one.ms, plain.ms), ratios(equal, plain.ms)]
        lines.append(f"| {' | '.join(facts)} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("parts_served.py", description="Time of masks, keypoints and rotated boxes.")
    parser.add_argument("plain", type=Path, metavar="PLAIN", help="a bundle of boxes alone")
    parser.add_argument("parts", type=Path, nargs="+", metavar="PARTS", help="bundles that give more")
    parser.add_argument("--images", type=Path, required=True, metavar="DIR|LIST")
    parser.add_argument("--num-images", type=int, default=20, metavar="N", help="evenly spaced (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="of all images (default: %(default)s)")
    parser.add_argument("--service", type=Path, required=True, metavar="PATH", help="the program trtdet-serve")
    parser.add_argument("--library-folder", type=Path, action="append", default=[], metavar="DIR")
    parser.add_argument("-o", "--output", type=Path, metavar="OUT.md", help="also write the report there")
    options = parser.parse_args(arguments)
    try:
        bundles = [options.plain, *options.parts]
        names = [f"model{index}" for index in range(len(bundles))]
        if Bundle(options.plain, verify=False).manifest.parts is not None:
            raise ConfigError(f"'{options.plain}' gives {parts_of(options.plain)}; name a bundle of boxes alone first")
        images = evenly(find_images(options.images), options.num_images)
        command = [options.service, *(f"{name}={bundle}" for name, bundle in zip(names, bundles, strict=True))]
        command += ["--host", "127.0.0.1", "--port", "0", "--max-delay-us", "0", "--log-level", "error"]
        for folder in options.library_folder:
            command += ["--library-folder", folder]
        with listening(command) as server:
            text = table(bundles, measure(server.port, names, images, options.rounds))
        load = " ".join(f"{value:.1f}" for value in os.getloadavg())
        text += f"\n{len(images)} images, {options.rounds} rounds, one client; load of the machine {load}\n"
        if options.output is not None:
            write_atomically(options.output, text.encode())
    except TrtdetError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
