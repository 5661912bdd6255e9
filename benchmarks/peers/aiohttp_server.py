"""What people write first: a bundle's model behind aiohttp and onnxruntime, answering as ``/v1/detect`` does.

    python benchmarks/peers/aiohttp_server.py BUNDLE [--port PORT] [--workers N] [--intra-op N] [--published FILE]

Each request is worked on by one of N threads, from the JPEG to the detections: OpenCV and NumPy leave the interpreter's
lock, and so does the model. The event loop only reads and writes. Prints ``http://127.0.0.1:PORT`` once it listens.

Needs trtdet and aiohttp.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from aiohttp import web
from detections import Detections, files_in, server_options


def application(detect: Callable[[Sequence[bytes]], bytes], workers: int) -> web.Application:
    pool = ThreadPoolExecutor(workers)

    async def post(request: web.Request) -> web.Response:
        body = await request.read()
        files = files_in(body, request.headers.get("Content-Type", ""))
        answer = await asyncio.get_running_loop().run_in_executor(pool, detect, files)
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
    options = server_options(__doc__).parse_args()
    asyncio.run(
        serve(
            application(Detections(options.bundle, options.intra_op, options.published), options.workers), options.port
        )
    )


if __name__ == "__main__":
    main()
