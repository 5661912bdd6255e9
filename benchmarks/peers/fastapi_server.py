"""A bundle's model behind FastAPI, uvicorn and onnxruntime, answering as ``/v1/detect`` does.

    python benchmarks/peers/fastapi_server.py BUNDLE --fastapi SITE_PACKAGES [--port PORT] [--workers N]
        [--intra-op N] [--published FILE]

Each request is worked on by one of N threads, as in ``aiohttp_server.py``; uvicorn runs with uvloop and httptools where
they are installed. Prints ``http://127.0.0.1:PORT`` once it listens.

SITE_PACKAGES is of an environment for the same Python that has fastapi and uvicorn; all else is this environment's.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from detections import Detections, files_in, server_options


def application(detections: Detections, workers: int) -> Any:
    from fastapi import FastAPI, Request, Response

    pool, app = ThreadPoolExecutor(workers), FastAPI()

    async def detect(request: Request) -> Response:
        body = await request.body()
        files = files_in(body, request.headers.get("Content-Type", ""))
        answer = await asyncio.get_running_loop().run_in_executor(pool, detections, files)
        return Response(answer, media_type="application/json")

    # Annotations as text would be looked up in this module, which does not import them.
    detect.__annotations__ = {"request": Request, "return": Response}
    app.post("/v1/detect", response_model=None)(detect)
    app.get("/readyz", response_model=None)(lambda: Response("ready"))
    return app


def main() -> None:
    parser = server_options(__doc__)
    parser.add_argument("--fastapi", type=Path, required=True, help="the site-packages that have fastapi and uvicorn")
    options = parser.parse_args()
    sys.path.append(str(options.fastapi.resolve()))
    import uvicorn

    app = application(Detections(options.bundle, options.intra_op, options.published), options.workers)
    listener = socket.socket()
    listener.bind(("127.0.0.1", options.port))
    print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False)).run([listener])


if __name__ == "__main__":
    main()
