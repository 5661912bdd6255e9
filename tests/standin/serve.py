"""A stand-in for trtdet-serve: its options and its answers, with detections that trtdet computes with onnxruntime.

    python serve.py BUNDLE --port 0 ...

Its faults are set by environment variables:

- ``SERVE_STANDIN_REFUSES``: what it says on standard error before it ends, without having started.
- ``SERVE_STANDIN_ALTERS``: ``count``, ``class``, ``box`` or ``score``, which is another one for the first image.
- ``SERVE_STANDIN_STATUS``: the status of every answer after the first so many, as in ``503@10``.
- ``SERVE_STANDIN_ENDS``: its exit code when it is told to stop, as of a program in which a sanitizer found something.
"""

import argparse
import hashlib
import itertools
import json
import os
import signal
import sys
import tempfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from trtdet.data.images import preprocess, read_image
from trtdet.runtime.detector import Detector

ALTERED = {
    "count": lambda rows: rows[:-1],
    "class": lambda rows: [{**rows[0], "class": rows[0]["class"] + 1}, *rows[1:]],
    "box": lambda rows: [{**rows[0], "box": [rows[0]["box"][0] + 1, *rows[0]["box"][1:]]}, *rows[1:]],
    "score": lambda rows: [{**rows[0], "score": rows[0]["score"] + 0.001}, *rows[1:]],
}


class Server(ThreadingHTTPServer):
    def __init__(self, detector: Detector) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.detector = detector
        self.known: dict[str, list[dict[str, Any]]] = {}
        self.asked = itertools.count()
        status, _, after = os.environ.get("SERVE_STANDIN_STATUS", "200@0").partition("@")
        self.status, self.after = int(status), int(after)

    def handle_error(self, *_: object) -> None:
        """Says nothing of a client that has gone."""

    def detections(self, body: bytes) -> list[dict[str, Any]]:
        """Those of an image, computed once."""
        key = hashlib.sha256(body).hexdigest()
        if key not in self.known:
            with tempfile.NamedTemporaryFile() as file:
                file.write(body)
                file.flush()
                image, placement = preprocess(read_image(Path(file.name)), self.detector.input)
            boxes, scores, classes = self.detector(image[None]).image(0)
            found = zip(placement.to_image(boxes).tolist(), scores.tolist(), classes.tolist(), strict=True)
            rows = [{"box": box, "score": score, "class": label} for box, score, label in found]
            if not self.known and "SERVE_STANDIN_ALTERS" in os.environ:
                rows = ALTERED[os.environ["SERVE_STANDIN_ALTERS"]](rows)
            self.known[key] = rows
        return self.known[key]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_GET(self) -> None:
        self._answer(200 if self.path == "/readyz" else 404, {})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if next(self.server.asked) >= self.server.after and self.server.status != 200:
            self._answer(self.server.status, {"error": {"type": "overloaded", "message": "the queue is full"}})
        else:
            self._answer(200, {"images": [{"detections": self.server.detections(body)}]})

    def log_message(self, *_: object) -> None:
        """Says nothing."""

    def _answer(self, status: int, content: dict[str, Any]) -> None:
        text = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


def _end(*_: object) -> None:
    # One call: what is printed may be parted by what a thread prints, and a handler of a signal waits for no lock.
    os.write(2, b"SUMMARY: 1 leak\n")
    os._exit(int(os.environ["SERVE_STANDIN_ENDS"]))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("bundle", type=Path)
    for name in ("--host", "--port", "--lanes", "--max-delay-us", "--log-level", "--recording", "--library-folder"):
        parser.add_argument(name)
    options = parser.parse_args()
    if "SERVE_STANDIN_REFUSES" in os.environ:
        print(os.environ["SERVE_STANDIN_REFUSES"], file=sys.stderr)
        return 1
    if "SERVE_STANDIN_ENDS" in os.environ:
        signal.signal(signal.SIGTERM, _end)
    server = Server(Detector.open(options.bundle, runtime="onnxruntime"))
    print(f"trtdet-serve: http://127.0.0.1:{server.server_address[1]}", flush=True)
    server.serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main())
