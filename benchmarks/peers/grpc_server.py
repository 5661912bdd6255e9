"""A bundle's model behind grpcio and onnxruntime, as an input of BYTES of the Open Inference Protocol.

    python benchmarks/peers/grpc_server.py BUNDLE [--port PORT] [--workers N] [--intra-op N] [--published FILE]

Each request is worked on by one of N threads, as in ``aiohttp_server.py``. The answer is the tensor ``answer`` with the
text of ``/v1/detect``. Prints ``grpc://127.0.0.1:PORT`` once it listens.

Needs trtdet and tritonclient[grpc], which has the protocol's messages.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from detections import Detections, server_options
from tritonclient.grpc import service_pb2, service_pb2_grpc


def elements_of(tensor: bytes) -> list[bytes]:
    """Those of a tensor of BYTES, each behind its length."""
    elements, at = [], 0
    while at < len(tensor):
        length = int.from_bytes(tensor[at : at + 4], "little")
        elements.append(tensor[at + 4 : at + 4 + length])
        at += 4 + length
    return elements


class Servicer(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    def __init__(self, detections: Detections, workers: int) -> None:
        self._detections, self._pool = detections, ThreadPoolExecutor(workers)

    async def ModelInfer(self, request: Any, _: Any) -> Any:
        files = elements_of(request.raw_input_contents[0])
        answer = await asyncio.get_running_loop().run_in_executor(self._pool, self._detections, files)
        response = service_pb2.ModelInferResponse(model_name=request.model_name, model_version="1")
        response.outputs.add(name="answer", datatype="BYTES", shape=[1])
        response.raw_output_contents.append(len(answer).to_bytes(4, "little") + answer)
        return response


async def serve(servicer: Servicer, port: int) -> None:
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", 32 << 20)])
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    print(f"grpc://127.0.0.1:{port}", flush=True)
    await server.wait_for_termination()


def main() -> None:
    options = server_options(__doc__).parse_args()
    asyncio.run(
        serve(Servicer(Detections(options.bundle, options.intra_op, options.published), options.workers), options.port)
    )


if __name__ == "__main__":
    main()
