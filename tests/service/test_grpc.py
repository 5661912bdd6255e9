"""trtdet-serve as a client of the Open Inference Protocol over gRPC sees it."""

import asyncio
import contextlib
import re
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from serving import PATIENCE, Server, check, failed_start, until
from test_open_inference import OUTPUTS, files, same, tensors

from benchmarks.costly_requests import gzip_of_zeros
from benchmarks.http2 import Call, more_of_a_head, outcome, pings, prefixed

grpc = pytest.importorskip("grpc", reason="pip install grpcio")


@pytest.fixture(scope="module")
def triton():
    return pytest.importorskip("tritonclient.grpc", reason="pip install tritonclient[grpc]")


def grpc_address(server: Server) -> str:
    def told() -> Any:
        return re.search(r" listens for gRPC address=(\S+)\n", server.log.read_text())

    return str(until(told)[1])


@pytest.fixture
def server(serve, case):
    # A sanitizer on a busy machine takes its time.
    start = serve(f"other={case.bundles[1]}", "--grpc-port", 0, "--recording-time", 20, "--request-timeout", 60)
    with start as running:
        if "built without gRPC" in running.log.read_text():
            pytest.skip("built without gRPC")
        yield running


@pytest.fixture
def client(triton, server):
    with triton.InferenceServerClient(grpc_address(server)) as made:
        yield made


def asked(triton: Any, batch: np.ndarray, name: str) -> Any:
    tensor = triton.InferInput(name, list(batch.shape), "FP32")
    tensor.set_data_from_numpy(batch)
    return tensor


def test_what_is_told_is_what_http_tells(client, server, case):
    assert client.is_server_live()
    assert client.is_server_ready()
    first = case.bundles[0].name
    for name in (first, "other"):
        assert client.is_model_ready(name)
        over_http = server.call("GET", f"/v2/models/{name}").json
        facts = client.get_model_metadata(name, as_json=True)
        assert [one["name"] for one in facts["outputs"]] == [one["name"] for one in over_http["outputs"]] == OUTPUTS
        assert [[int(size) for size in one["shape"]] for one in facts["inputs"]] == [
            one["shape"] for one in over_http["inputs"]
        ]
        config = client.get_model_config(name, as_json=True)["config"]
        assert config["input"][0]["data_type"] == "TYPE_FP32"
        assert config["output"][0]["name"] == "num_dets"
    assert client.get_server_metadata(as_json=True)["extensions"] == server.call("GET", "/v2").json["extensions"]
    index = client.get_model_repository_index(as_json=True)["models"]
    assert [(one["name"], one["state"]) for one in index] == [(first, "READY"), ("other", "READY")]


def test_tensors_and_files_are_answered_as_by_python(triton, client, case):
    for bundle, name in zip(case.bundles, (case.bundles[0].name, "other"), strict=True):
        (declared,) = client.get_model_metadata(name).inputs
        batch, expected = tensors(bundle, case, 2)
        outputs = [triton.InferRequestedOutput(output) for output in OUTPUTS]
        result = client.infer(name, [asked(triton, batch, declared.name)], outputs=outputs, request_id="a 1")
        same(result.as_numpy, expected)
        response = result.get_response()
        assert (response.id, response.model_name, response.model_version) == ("a 1", name, "1")
        result = client.infer(name, [files(triton, case, declared.name, axis=True)])
        for index, picture in enumerate(case.pictures[:2]):
            count = int(result.as_numpy("num_dets")[index, 0])
            rows = zip(*(result.as_numpy(output)[index, :count] for output in OUTPUTS[1:]), strict=True)
            found = [{"box": box.tolist(), "score": float(score), "class": int(label)} for box, score, label in rows]
            content_hash = response.parameters["content_hash"].string_param
            check({"width": picture.width, "height": picture.height, "detections": found}, picture, content_hash)
    counted = client.get_inference_statistics("other", as_json=True)["model_stats"][0]
    assert counted["inference_count"] == "4"
    assert counted["inference_stats"]["success"]["count"] == "2"


def test_numbers_in_the_message_are_taken_too(triton, client, case):
    """KServe's client sends them in ``contents``."""
    name = case.bundles[0].name
    batch, expected = tensors(case.bundles[0], case, 1)
    protocol = triton.service_pb2
    (declared,) = client.get_model_metadata(name).inputs
    tensor = protocol.ModelInferRequest.InferInputTensor(name=declared.name, datatype="FP32", shape=batch.shape)
    tensor.contents.fp32_contents.extend(batch.ravel().tolist())
    response = client._client_stub.ModelInfer(protocol.ModelInferRequest(model_name=name, inputs=[tensor]))
    raw = {one.name: bytes_ for one, bytes_ in zip(response.outputs, response.raw_output_contents, strict=True)}
    shapes = {one.name: (one.datatype, list(one.shape)) for one in response.outputs}

    def output(which: str) -> np.ndarray:
        kind, shape = shapes[which]
        return np.frombuffer(raw[which], {"FP32": np.float32, "INT32": np.int32}[kind]).reshape(shape)

    same(output, expected)


def test_many_at_a_time_are_all_answered(triton, server, case):
    name = case.bundles[0].name
    address = grpc_address(server)
    failures: list[BaseException] = []

    def ask(offset: int) -> None:
        try:
            with triton.InferenceServerClient(address) as mine:
                (declared,) = mine.get_model_metadata(name).inputs
                for index in range(20):
                    picture = case.pictures[(offset + index) % len(case.pictures)]
                    tensor = triton.InferInput(declared.name, [1], "BYTES")
                    tensor.set_data_from_numpy(np.array([picture.data], np.object_))
                    result = mine.infer(name, [tensor])
                    expected = picture.found[case.hashes[0]]
                    assert int(result.as_numpy("num_dets")[0, 0]) == len(expected.boxes)
                    np.testing.assert_allclose(
                        result.as_numpy("boxes")[0, : len(expected.boxes)], expected.boxes, rtol=0, atol=0.01
                    )
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [str(failure) for failure in failures] == []
    assert server.metrics()["trtdet_images_total"] == 160


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        ({"model": "none"}, "NOT_FOUND", 'there is no model "none"'),
        ({"version": "2"}, "NOT_FOUND", 'no version "2"'),
        ({"input": "none"}, "INVALID_ARGUMENT", 'no input "none"'),
        ({"shape": [1, 3, 8, 8]}, "INVALID_ARGUMENT", "expected \\[1 to 32,3,"),
        ({"output": "none"}, "INVALID_ARGUMENT", 'no output "none"'),
    ],
)
def test_what_is_wrong_is_told_in_grpcs_words(triton, client, case, change, code, message):
    name = case.bundles[0].name
    (declared,) = client.get_model_metadata(name).inputs
    shape = change.get("shape", [1, *declared.shape[1:]])
    tensor = asked(triton, np.zeros(shape, np.float32), change.get("input", declared.name))
    outputs = [triton.InferRequestedOutput(change["output"])] if "output" in change else None
    with pytest.raises(Exception, match=message) as failed:
        client.infer(change.get("model", name), [tensor], model_version=change.get("version", ""), outputs=outputs)
    assert code in failed.value.status()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda request: request.raw_input_contents.append(b"more"), "2 raw_input_contents for 1 inputs"),
        (lambda request: request.inputs[0].contents.fp32_contents.append(1), "contents beside raw_input_contents"),
        (lambda request: request.inputs[0].contents.int_contents.extend([1] * 20_000), "bytes beside its tensors"),
        (lambda request: [request.inputs.add() for _ in range(9_000)], "bytes beside its tensors, allowed are 16384"),
    ],
    ids=["places", "both", "numbers", "inputs"],
)
def test_a_message_that_is_none_of_an_inference_is_refused_before_it_is_read(triton, client, case, spoil, message):
    name = case.bundles[0].name
    (declared,) = client.get_model_metadata(name).inputs
    protocol = triton.service_pb2
    request = protocol.ModelInferRequest(model_name=name, raw_input_contents=[b"x"])
    request.inputs.add(name=declared.name, datatype="BYTES", shape=[1])
    spoil(request)
    with pytest.raises(grpc.RpcError, match=message) as failed:
        client._client_stub.ModelInfer(request)
    assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    "data", [b"\xff", b"\x3a\x7f", b"\x2a\x05\x2a\x02\x32", b"\x2b" * 200], ids=["tag", "cut", "within", "groups"]
)
@pytest.mark.parametrize("method", ["ModelInfer", "ModelReady"])
def test_bytes_that_are_no_message_are_refused(server, data, method):
    with grpc.insecure_channel(grpc_address(server)) as channel:
        call = channel.unary_unary(f"/inference.GRPCInferenceService/{method}")
        with pytest.raises(grpc.RpcError, match="the message is") as failed:
            call(data)
        assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_a_small_message_takes_little_memory(triton, serve, case):
    """An input of two bytes becomes an object of hundreds, and unknown fields are kept: 16 MB would be gigabytes."""
    with serve("--grpc-port", 0) as server, grpc.insecure_channel(grpc_address(server)) as channel:
        name = case.bundles[0].name
        with triton.InferenceServerClient(grpc_address(server)) as client:
            (declared,) = client.get_model_metadata(name).inputs
            client.infer(name, [files(triton, case, declared.name, axis=False)])
        before = server.peak_memory()
        for method, data, message in (
            ("ModelInfer", b"\x2a\x00" * (8 << 20), "bytes beside its tensors"),
            ("ServerLive", b"\x78\x01" * (8 << 20), "bytes, allowed are"),
        ):
            with pytest.raises(grpc.RpcError, match=message):
                channel.unary_unary(f"/inference.GRPCInferenceService/{method}")(data)
        if not server.sanitized:
            assert server.peak_memory() - before < 64 << 20


def attacking(
    server: Server, call: Call, connections: int, seconds: float = PATIENCE, address: str = "127.0.0.2"
) -> list[str]:
    """How calls of an address of their own end, each on a connection of its own; those that are still going on after so
    many seconds are left, and have no end."""

    async def one() -> str:
        host, port = grpc_address(server).split(":")
        reader, writer = await asyncio.open_connection(host, int(port), local_addr=(address, 0))
        try:
            async with asyncio.timeout(seconds):
                return await outcome(reader, writer, call)
        except TimeoutError:  # which is an OSError too
            return "left"
        except (OSError, asyncio.IncompleteReadError):
            return "closed"
        finally:
            writer.transport.abort()

    async def all_of_them() -> list[str]:
        return await asyncio.gather(*(one() for _ in range(connections)))

    return asyncio.run(all_of_them())


def answered(infer: Callable[[], Any], *attacks: Future[list[str]]) -> int:
    """How many inferences of another client are answered, one after the other, until all attacks are over."""
    answers = 0
    while not all(attack.done() for attack in attacks):
        infer()
        answers += 1
    return answers


@pytest.fixture
def watched(triton, serve, case):
    """Makes a server that has answered an inference, and how much its memory has grown since then."""

    @contextlib.contextmanager
    def make(*options: object) -> Iterator[tuple[Server, Callable[[], int], Callable[[], Any]]]:
        with contextlib.ExitStack() as stack:
            server = stack.enter_context(serve("--grpc-port", 0, *options))
            client = stack.enter_context(triton.InferenceServerClient(grpc_address(server)))
            name = case.bundles[0].name
            (declared,) = client.get_model_metadata(name).inputs
            tensor = files(triton, case, declared.name, axis=False)

            def infer(**more: Any) -> Any:
                return client.infer(name, [tensor], client_timeout=PATIENCE, **more)

            infer()
            before = server.peak_memory()
            yield server, lambda: 0 if server.sanitized else server.peak_memory() - before, infer

    return make


def test_streams_without_an_end_take_little_memory(watched):
    """Each was kept, however many there were: 640,000 of them took 6.9 GB. Until a client has confirmed how many it may
    have, gRPC takes any number; its connection is ended then."""
    with watched() as (server, grown, infer):
        ends = attacking(server, Call("ModelInfer", streams=8000, ends=False), connections=8, seconds=3)
        assert set(ends) <= {"left", "reset", "closed", "RESOURCE_EXHAUSTED"}
        infer()
        assert grown() < 160 << 20


def test_whoever_is_refused_again_and_again_waits(serve):
    """To refuse 10,000 calls a second took half of two cores, and another client waited four times as long."""
    endless = Call("ModelInfer", prefixed(bytes(3 << 20))[:-1], streams=100, ends=False)
    live = Call("ServerLive", prefixed(b""))
    with serve("--grpc-port", 0, "--max-bodies-mb", 8, "--max-body-mb", 1) as server:
        assert attacking(server, live, connections=1) == ["OK"]

        def is_closed() -> bool:
            attacking(server, endless, connections=16, seconds=0.2)
            return attacking(server, live, connections=1) == ["closed"]

        until(is_closed)
        assert attacking(server, live, connections=1, address="127.0.0.3") == ["OK"]
        until(lambda: attacking(server, live, connections=1) == ["OK"])


def test_messages_that_are_compressed_are_read_and_bounded(watched):
    """gRPC itself unpacks without a limit: 128 KB became 128 MiB, by the threads that answer all clients."""
    with watched() as (server, grown, infer):
        for kind in ("gzip", "deflate"):
            assert infer(compression_algorithm=kind).as_numpy("num_dets").shape == (2, 1)
        bomb = prefixed(gzip_of_zeros(128), compressed=True)
        for method in ("ModelInfer", "ServerLive"):
            call = Call(method, bomb, [("grpc-encoding", b"gzip")])
            assert attacking(server, call, connections=1) == ["RESOURCE_EXHAUSTED"]
        assert grown() < 96 << 20


@pytest.mark.parametrize("addresses", [1, 4])
def test_messages_of_some_addresses_leave_room_for_those_of_another(watched, addresses):
    """What gRPC holds was bounded for all together, and it sent away whoever came next: their calls were lost. Then
    each address had its part, and four left none: others waited until those messages were overdue, for 5.5 s."""
    limits = "--max-bodies-mb", 16, "--max-body-mb", 4, "--body-timeout", 60
    endless = Call("ModelInfer", prefixed(bytes(3 << 20))[:-1], ends=False)
    with watched(*limits) as (server, grown, infer), ThreadPoolExecutor(addresses) as pool:
        attacks = [
            pool.submit(attacking, server, endless, 16, 3.0, f"127.0.0.{2 + number}") for number in range(addresses)
        ]
        assert answered(infer, *attacks) > 10
        assert grown() < 32 << 20


def test_connections_of_one_address_leave_room_for_those_of_another(watched):
    with watched("--max-connections", 20) as (server, _, infer), contextlib.ExitStack() as stack:
        host, port = grpc_address(server).split(":")
        streams = [
            stack.enter_context(socket.create_connection((host, int(port)), PATIENCE, ("127.0.0.2", 0)))
            for _ in range(30)
        ]
        until(lambda: sum(map(over, streams)) == 20)  # a half may be of one address
        infer()
        streams[0].close()  # if it is one of those that are kept, its place is free
        for stream in streams:
            stream.close()

        def accepted() -> bool:
            with socket.create_connection((host, int(port)), PATIENCE, ("127.0.0.2", 0)) as again:
                return not over(again, patience=0.1)

        until(accepted)


def over(stream: socket.socket, patience: float = 0.0) -> bool:
    """Whether the other side has closed a connection."""
    readable, _, _ = select.select([stream], [], [], patience)
    try:
        return bool(readable) and stream.recv(1, socket.MSG_PEEK) == b""
    except ConnectionError:
        return True


def test_a_message_that_does_not_arrive_ends(serve):
    with serve("--grpc-port", 0, "--body-timeout", 0.3) as server:
        for data in (b"", prefixed(bytes(1 << 20))[:-1]):
            assert attacking(server, Call("ModelInfer", data, ends=False), 1) == ["DEADLINE_EXCEEDED"]


def test_an_answer_that_is_not_taken_ends(serve):
    with serve("--grpc-port", 0, "--write-timeout", 1.2) as server:
        begin = time.monotonic()
        assert attacking(server, Call("ServerLive", prefixed(b""), takes=False), 1) == ["CANCELLED"]
        assert 1.2 <= time.monotonic() - begin < PATIENCE


def test_of_answers_that_are_not_taken_a_client_keeps_the_newest(serve):
    """Those of four addresses took all memory for messages: others waited for six seconds."""
    older, newer = (Call("ServerLive", prefixed(b""), streams=count, takes=False) for count in (60, 100))
    with serve("--grpc-port", 0, "--write-timeout", 600) as server, ThreadPoolExecutor(2) as pool:
        first = pool.submit(attacking, server, older, 1)
        time.sleep(0.5)
        assert not first.done()
        assert attacking(server, newer, 1, seconds=4.0) == ["left"]
        assert first.result() == ["CANCELLED"]


def test_answers_that_are_not_taken_leave_room_for_messages_of_others(watched):
    with watched("--max-bodies-mb", 16, "--max-body-mb", 4) as (server, grown, infer), ThreadPoolExecutor(3) as pool:
        if server.sanitized:
            pytest.skip("a sanitizer makes messages arrive so slowly that they give way to others")
        call = Call("ServerLive", prefixed(b""), streams=80, takes=False, pause=0.01)
        attacks = [pool.submit(attacking, server, call, 10, 5.0, f"127.0.0.{2 + number}") for number in range(3)]
        assert answered(infer, *attacks) > 20
        assert grown() < 128 << 20


def test_what_belongs_to_no_call_ends_the_connection(watched):
    """gRPC keeps a head without an end as long as its limit is not confirmed: 250 MiB a second of one connection."""
    head = Call("ServerLive", flood=more_of_a_head())
    with watched() as (server, grown, infer), ThreadPoolExecutor(1) as pool:
        attack = pool.submit(attacking, server, head, 4)
        assert attack.result() == ["closed"] * 4
        infer()
        assert grown() < 256 << 20


def test_pings_without_end_end_the_connection(watched):
    """gRPC itself takes longer for each one that is too many: another client waited for more than 5 s."""
    with watched() as (server, grown, infer), ThreadPoolExecutor(1) as pool:
        attack = pool.submit(attacking, server, Call("ServerLive", flood=pings()), 16)
        answered(infer, attack)
        assert attack.result() == ["closed"] * 16
        assert grown() < 96 << 20


def test_calls_that_are_given_up_while_they_arrive_are_no_flood(triton, serve, case):
    name = case.bundles[0].name
    with serve("--grpc-port", 0) as server, grpc.insecure_channel(grpc_address(server)) as channel:
        states: list[grpc.ChannelConnectivity] = []
        channel.subscribe(states.append, try_to_connect=True)
        until(lambda: grpc.ChannelConnectivity.READY in states)
        message = triton.service_pb2.ModelInferRequest(model_name=name, raw_input_contents=[bytes(24 << 20)])
        data = message.SerializeToString()
        infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        for pause in np.linspace(0.001, 0.02, 60):
            given_up = infer.future(data, timeout=PATIENCE)
            time.sleep(pause)
            given_up.cancel()
        time.sleep(0.2)
        assert channel.unary_unary("/inference.GRPCInferenceService/ServerLive")(b"", timeout=PATIENCE) == b"\x08\x01"
        assert states[-1] == grpc.ChannelConnectivity.READY
        assert states.count(grpc.ChannelConnectivity.READY) == 1  # it is still the same connection


def test_grpcs_own_health_check_is_answered(server):
    with grpc.insecure_channel(grpc_address(server)) as channel:
        check_health = channel.unary_unary("/grpc.health.v1.Health/Check")
        assert check_health(b"") == b"\x08\x01"  # SERVING
        with pytest.raises(grpc.RpcError, match="no such service"):
            check_health(b"\x0a\x01x")
        with pytest.raises(grpc.RpcError, match="there is no method /grpc.health.v1.Health/None here"):
            channel.unary_unary("/grpc.health.v1.Health/None")(b"")


def test_streams_are_refused_clearly(triton, client, case):
    told: list[Any] = []
    client.start_stream(lambda result, error: told.append(error))
    name = case.bundles[0].name
    # It may have ended before.
    with contextlib.suppress(triton.InferenceServerException):
        client.async_stream_infer(name, [files(triton, case, "images", axis=False)])
    until(lambda: told)
    assert "there are no streams here; call ModelInfer" in str(told[0])


def test_a_client_that_gives_up_is_worked_for_no_more(triton, serve, case):
    options = ("--grpc-port", 0, "--recording-time", 700, "--lanes", 1, "--max-batch", 1)
    with serve(*options) as server, triton.InferenceServerClient(grpc_address(server)) as client:
        name = case.bundles[0].name
        (declared,) = client.get_model_metadata(name).inputs
        tensor = files(triton, case, declared.name, axis=False)
        begin = time.monotonic()
        with pytest.raises(Exception, match="Deadline Exceeded"):
            client.infer(name, [tensor], client_timeout=0.2)
        assert time.monotonic() - begin < 0.7
        until(lambda: server.metrics()["trtdet_requests_in_flight"] == 0)
        client.infer(name, [tensor])


def test_a_message_that_is_too_large_is_refused(triton, serve, case):
    with (
        serve("--grpc-port", 0, "--max-body-mb", 1) as server,
        triton.InferenceServerClient(grpc_address(server)) as client,
    ):
        name = case.bundles[0].name
        (declared,) = client.get_model_metadata(name).inputs
        tensor = triton.InferInput(declared.name, [1], "BYTES")
        tensor.set_data_from_numpy(np.array([bytes(3 << 20)], np.object_))
        with pytest.raises(Exception, match="larger than max") as failed:
            client.infer(name, [tensor])
        assert "RESOURCE_EXHAUSTED" in failed.value.status()
        assert client.is_server_live()


def test_calls_that_have_begun_are_finished_at_a_stop(triton, serve, case):
    with serve("--grpc-port", 0, "--recording-time", 500) as server:
        with triton.InferenceServerClient(grpc_address(server)) as client:
            name = case.bundles[0].name
            (declared,) = client.get_model_metadata(name).inputs
            tensor = files(triton, case, declared.name, axis=False)
            told: list[Any] = []
            client.async_infer(name, [tensor], callback=lambda result, error: told.append(error or result))
            until(lambda: server.metrics()["trtdet_requests_in_flight"] == 1)
            server.signal()
            until(lambda: told)
            assert told[0].as_numpy("num_dets").shape == (2, 1)
        assert server.process.wait(60) == 0


def test_an_engine_that_hangs_does_not_hold_up_a_stop(triton, serve, case):
    options = ("--grpc-port", 0, "--recording-time", 60_000, "--stop-timeout", 0.2, "--request-timeout", 600)
    with serve(*options) as server, triton.InferenceServerClient(grpc_address(server)) as client:
        name = case.bundles[0].name
        (declared,) = client.get_model_metadata(name).inputs
        told: list[Any] = []
        tensor = files(triton, case, declared.name, axis=False)
        client.async_infer(name, [tensor], callback=lambda result, error: told.append(error))
        until(lambda: server.metrics()["trtdet_requests_in_flight"] == 1)
        server.signal()
        assert server.process.wait(30) == 1
        server.process.returncode = 0  # as expected
        until(lambda: told)


def test_a_port_that_is_taken_is_an_error_of_one_line(server, serve):
    port = grpc_address(server).rpartition(":")[2]
    another = serve("--grpc-port", port)
    line = failed_start(another.program, *another.arguments, "--port", 0)
    assert f"port {port} for gRPC" in line
