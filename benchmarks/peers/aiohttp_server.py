"""What people write first: a bundle's model behind aiohttp and onnxruntime, answering as ``/v1/detect`` does.

    python benchmarks/peers/aiohttp_server.py BUNDLE [--port PORT] [--workers N] [--intra-op N]

Each request is worked on by one of N threads, from the JPEG to the detections: OpenCV and NumPy leave the interpreter's
lock, and so does the model. The event loop only reads and writes. Prints ``http://127.0.0.1:PORT`` once it listens.

Needs trtdet and aiohttp.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import onnxruntime
from aiohttp import web

from trtdet.data.images import decode_image, preprocess
from trtdet.runtime.detector import Detector


class Detections:
    """Answers for images: the whole way of one image, in the thread that calls it."""

    def __init__(self, bundle: Path, intra_op: int) -> None:
        self._detector = Detector.open(bundle, runtime="onnxruntime")
        options = onnxruntime.SessionOptions()
        # As trtdet-serve runs it: Q/DQ pairs as they are written, and no thread that waits by spinning.
        options.add_session_config_entry("session.disable_quant_qdq", "1")
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.intra_op_num_threads = intra_op
        self._session = onnxruntime.InferenceSession(
            self._detector.runner.model.SerializeToString(), options, ["CPUExecutionProvider"]
        )
        self._names = [output.name for output in self._session.get_outputs()]
        self._input = self._session.get_inputs()[0].name

    def __call__(self, body: bytes) -> bytes:
        """The answer for the bytes of a JPEG or PNG file."""
        pixels = decode_image(body)
        image, placement = preprocess(pixels, self._detector.input)
        outputs = dict(zip(self._names, self._session.run(None, {self._input: image[None]}), strict=True))
        boxes, scores, classes = self._detector.suppressed(outputs, self._detector.nms).image(0)
        rows: list[dict[str, Any]] = [
            {"box": box, "score": score, "class": number, "name": self._detector.classes[number]}
            for box, score, number in zip(
                placement.to_image(boxes).tolist(), scores.tolist(), classes.tolist(), strict=True
            )
        ]
        height, width = pixels.shape[:2]
        return json.dumps({"images": [{"width": width, "height": height, "detections": rows}]}).encode()


def application(detect: Detections, workers: int) -> web.Application:
    pool = ThreadPoolExecutor(workers)

    async def post(request: web.Request) -> web.Response:
        body = await request.read()
        answer = await asyncio.get_running_loop().run_in_executor(pool, detect, body)
        return web.Response(body=answer, content_type="application/json")

    async def ready(_: web.Request) -> web.Response:
        return web.Response(text="ready")

    app = web.Application(client_max_size=32 << 20)
    app.add_routes([web.post("/v1/detect", post), web.get("/readyz", ready)])
    return app


async def serve(app: web.Application, port: int) -> None:
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2, help="requests that are worked on at the same time")
    parser.add_argument("--intra-op", type=int, default=1, help="threads of each run of the model; 0 for one per core")
    options = parser.parse_args()
    asyncio.run(serve(application(Detections(options.bundle, options.intra_op), options.workers), options.port))


if __name__ == "__main__":
    main()
