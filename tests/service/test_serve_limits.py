"""trtdet-serve with clients that want more than their part: what they get, and what the others notice of it."""

import contextlib
import socket
import time
from collections import Counter

import pytest
from PIL import Image
from serving import Answer, call, check, post, read_answer, until

from benchmarks.costly_requests import brackets, numbers, png_of_texts, webp_of_tables

HEADER = b"POST /v1/detect HTTP/1.1\r\nHost: x\r\nContent-Type: image/jpeg\r\nContent-Length: 9\r\n\r\n"
OTHER, THIRD = "127.0.0.2", "127.0.0.3"


def test_a_client_has_its_part_of_the_requests(serve, case):
    picture = case.pictures[0]
    with serve("--max-requests", 8, "--recording-time", 200, "--lanes", 1) as server, contextlib.ExitStack() as stack:
        greedy = [stack.enter_context(server.raw(OTHER)) for _ in range(12)]
        for stream in greedy:
            stream.sendall(post(picture.data))
        until(lambda: server.metrics()["trtdet_requests_in_flight"] == 4)
        with server.raw() as modest:
            modest.sendall(post(picture.data))
            check(read_answer(modest).json["images"][0], picture, case.hashes[0])
        answers = [read_answer(stream) for stream in greedy]
        assert Counter(answer.status for answer in answers) == {200: 4, 429: 8}
        refused = next(answer for answer in answers if answer.status == 429)
        assert (refused.error, refused.headers["retry-after"]) == ("too-many-requests", "1")
        assert "the 4 requests in work that one client may have" in refused.json["error"]["message"]


def test_images_of_clients_run_in_turn(serve, case):
    picture = case.pictures[0]
    with serve("--recording-time", 100, "--lanes", 1, "--max-batch", 1) as server, contextlib.ExitStack() as stack:
        greedy = [stack.enter_context(server.raw(OTHER)) for _ in range(16)]
        for stream in greedy:
            stream.sendall(post(picture.data))
        until(lambda: server.metrics()["trtdet_queue_images"] >= 12)
        begin = time.monotonic()
        check(server.detect(picture.data).json["images"][0], picture, case.hashes[0])
        # One run ends and one of the others' may come first; the other twelve wait.
        assert time.monotonic() - begin < 0.9
        for stream in greedy:
            check(read_answer(stream).json["images"][0], picture, case.hashes[0])


def begun(server, address: str, stack: contextlib.ExitStack) -> socket.socket:
    """A connection with a request whose body does not come."""
    stream: socket.socket = stack.enter_context(server.raw(address))
    stream.sendall(HEADER)
    return stream


@pytest.mark.slow
def test_unfinished_requests_make_room_for_others(serve, case):
    """Headers without their bodies, from three addresses, on more connections than there may be."""
    picture = case.pictures[0]
    with serve("--max-connections", 16, "--recording-time", 50) as server, contextlib.ExitStack() as stack:
        kept = server.connect()
        check(call(kept, "POST", "/v1/detect", picture.data).json["images"][0], picture, case.hashes[0])
        # One address alone has half of them: its own oldest go.
        slow = [begun(server, OTHER, stack) for _ in range(20)]
        for stream in slow[:12]:
            answer = read_answer(stream)
            assert (answer.status, answer.error) == (408, "request-timeout")
        check(call(kept, "POST", "/v1/detect", picture.data).json["images"][0], picture, case.hashes[0])
        for _ in range(12):
            begun(server, THIRD, stack)
        for _ in range(20):
            check(server.detect(picture.data).json["images"][0], picture, case.hashes[0])
        # Those who had not got so far as to be refused are served when they send the rest.
        slow[-1].sendall(b"no image.")
        assert read_answer(slow[-1]).status in (400, 408)
        kept.close()


def grown(server, before: int) -> float:
    """By how many MiB the peak of memory is higher."""
    return (server.peak_memory() - before) / (1 << 20)


def test_the_tables_of_a_webp_file_are_charged(serve, case):
    data = webp_of_tables()
    assert len(data) < 300_000
    with serve("--max-decoded-mb", 128, "--workers", 4) as server:
        if server.sanitized:
            pytest.skip("a sanitizer has the heap for itself")
        check(server.detect(case.pictures[0].data).json["images"][0], case.pictures[0], case.hashes[0])
        before = server.peak_memory()
        answer = server.detect(data)
        assert (answer.status, answer.error) == (413, "request-too-large")
        assert "--max-decoded-mb" in answer.json["error"]["message"]
        assert {answer.status for answer in server.burst(post(data), 8)} <= {413, 429}
        assert grown(server, before) < 1.1 * 128
        check(server.detect(case.pictures[0].data).json["images"][0], case.pictures[0], case.hashes[0])
    with serve("--max-decoded-mb", 4096) as server:
        # It is a legal file, and decoded where there is room. The recording does not know it.
        assert server.detect(data).error == "engine-failed"


def test_texts_in_a_png_file_cost_nothing(serve):
    data = png_of_texts(200)
    with serve("--max-decoded-mb", 16) as server:
        before = server.peak_memory()
        assert {answer.error for answer in server.burst(post(data), 4)} == {"engine-failed"}
        if not server.sanitized:
            assert grown(server, before) < 64


def test_a_large_lossless_webp_file_is_read_once(serve, tmp_path):
    """Its tables come first, and were read again for every 64 KB that follow."""
    file = tmp_path / "noise.webp"
    Image.effect_noise((2000, 2000), 100).convert("RGB").save(file, lossless=True, quality=0, method=0)
    data = file.read_bytes()
    assert len(data) > 3_000_000
    with serve() as server:
        assert server.detect(data).error == "engine-failed"


@pytest.mark.parametrize("body", [numbers(8), brackets(8)], ids=["numbers", "brackets"])
def test_numbers_are_charged_before_they_are_read(serve, case, body):
    """Those whose client is gone are not read at all."""
    target = f"/v2/models/{case.bundles[0].name}/infer"
    request = post(body, target, **{"Content-Type": "application/json"})
    with serve("--max-bodies-mb", 64, "--max-decoded-mb", 64) as server:
        before = server.peak_memory()
        answers: list[Answer] = []
        with contextlib.ExitStack() as stack:
            streams = [stack.enter_context(server.raw(OTHER)) for _ in range(12)]
            for stream in streams[:8]:
                with contextlib.suppress(ConnectionError):  # refused before all of it was sent
                    stream.sendall(request)
            check(server.detect(case.pictures[0].data).json["images"][0], case.pictures[0], case.hashes[0])
            for stream in streams[:8]:
                with contextlib.suppress(ConnectionError):
                    answers.append(read_answer(stream))
            for stream in streams[8:]:
                with contextlib.suppress(ConnectionError):
                    stream.sendall(request)
        assert {answer.status for answer in answers} <= {400, 413, 429}
        until(lambda: server.metrics()["trtdet_decoding_bytes"] == 0)
        until(lambda: server.metrics()["trtdet_body_bytes"] == 0)
        if not server.sanitized:
            assert grown(server, before) < 1.1 * 128
