"""trtdet-serve as a client sees it: answers, refusals and limits of the real process."""

import io
import json
import re
import shutil
import socket
import struct
import time
from pathlib import Path
from urllib.parse import quote

import cv2
import numpy as np
import pytest
from PIL import Image
from serving import (
    PATIENCE,
    Answer,
    Server,
    call,
    check,
    failed_start,
    finished,
    form,
    parse_metrics,
    post,
    read_answer,
    total,
    turned,
    until,
)
from signing import pair

from benchmarks.costly_requests import png
from trtdet.bundle import Bundle

UNKNOWN = cv2.imencode(".png", np.full((1, 1, 3), (30, 200, 10), np.uint8))[1].tobytes()
"""An image of one pixel, which no recording has."""


@pytest.fixture
def server(serve):
    with serve("--log-level", "debug") as running:
        yield running


def test_an_image_is_answered_as_by_python(server, case):
    for picture in case.pictures[:10]:
        answer = server.detect(picture.data)
        assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
        (image,) = answer.json["images"]
        check(image, picture, case.hashes[0])
        assert image["batch"] >= 1
        assert all(image["ms"][name] >= 0 for name in ("decode", "queue", "run"))
        assert answer.json["model"]["content_hash"] == case.hashes[0]


@pytest.mark.parametrize("kind", ["image/png", "application/octet-stream", "IMAGE/jpeg; q=1", ""])
def test_the_content_says_what_an_image_is(server, case, kind):
    answer = server.detect(case.pictures[0].data, kind=kind)
    check(answer.json["images"][0], case.pictures[0], case.hashes[0])


def test_several_images_of_a_form_are_answered_in_order(server, case):
    pictures = case.pictures[:7]
    body, kind = form([(f"{index} ü.jpg", picture.data) for index, picture in enumerate(pictures)])
    answer = server.detect(body, kind=kind)
    assert answer.status == 200
    assert [image["name"] for image in answer.json["images"]] == [f"{index} ü.jpg" for index in range(7)]
    for image, picture in zip(answer.json["images"], pictures, strict=True):
        check(image, picture, case.hashes[0])


def test_a_query_narrows_the_answer(server, case):
    picture = max(case.pictures, key=lambda one: len(one.found[case.hashes[0]].scores))
    scores = picture.found[case.hashes[0]].scores
    answer = server.detect(picture.data, "?score_threshold=0.45&max_detections=2")
    assert len(answer.json["images"][0]["detections"]) == min(2, int((scores > 0.45).sum()))
    assert len(scores) > 2
    for query in ("?score_threshold=0.01", "?max_detections=0", "?max_detections=1&x=y", "?a=%zz"):
        refused = server.detect(picture.data, query)
        assert (refused.status, refused.error) == (400, "bad-query")
    assert "allowed is 0.1 " in server.detect(picture.data, "?score_threshold=0.01").json["error"]["message"]


def test_wrong_paths_and_methods(server):
    for method, target, status, kind in (
        ("GET", "/v3/detect", 404, "not-found"),
        ("POST", "/", 405, "method-not-allowed"),
        ("GET", "/v1/detect", 405, "method-not-allowed"),
        ("DELETE", "/metrics", 405, "method-not-allowed"),
        ("BREW", "/healthz", 405, "method-not-allowed"),
        ("GET", "/%ff%00\x7f", 404, "not-found"),
    ):
        answer = server.send(f"{method} {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode("latin-1"))
        # A byte that no target may have is the parser's to refuse.
        assert (answer.status, answer.error) in ((status, kind), (400, "malformed-http"))
        assert "\x7f" in target or answer.status == status
        if status == 405:
            assert answer.headers["allow"] in ("POST", "GET, HEAD")
    assert total(server.metrics(), "trtdet_requests_total", 'path="other"', 'code="404"') >= 1


def test_what_is_no_image_is_refused(server, case):
    jpeg = case.pictures[0].data
    for data in (b"x", b"\xff\xd8\xff", jpeg[: len(jpeg) // 2], jpeg[:200], png((10, 10), 8, 2, b""), b"GIF89a" + jpeg):
        answer = server.detect(data)
        assert (answer.status, answer.error) == (400, "bad-image")
    assert server.detect(b"").error == "empty-body"
    assert server.detect(jpeg, kind="image/gif").status == 415
    body, kind = form([("good.jpg", jpeg), ("bad\x1b.jpg", b"x")])
    answer = server.detect(body, kind=kind)
    assert (answer.status, answer.error) == (400, "bad-image")
    assert answer.json["error"]["message"].startswith('image 1 ("bad\\u001b.jpg"): ')
    for cut in (body[:-8], b"", body.replace(b"limit", b"other")):
        assert server.detect(cut, kind=kind).status == 400
    errors = server.metrics()
    assert total(errors, "trtdet_errors_total", 'type="bad-image"') == 7
    # The service has taken no harm.
    assert server.detect(jpeg).status == 200


def test_images_are_turned_where_that_is_wanted(serve, case):
    """What was stored lying and says so is answered as if it had been stored upright."""
    picture = case.pictures[0]
    lying = turned(picture.file)
    with serve("--exif-orientation") as server:
        check(server.detect(lying, kind="image/png").json["images"][0], picture, case.hashes[0])
        check(server.detect(picture.data).json["images"][0], picture, case.hashes[0])
    with serve() as server:
        # The recording has no such image.
        assert server.detect(lying, kind="image/png").error == "engine-failed"


def test_webp_is_taken(server, case):
    picture = case.pictures[0]
    stream = io.BytesIO()
    with Image.open(io.BytesIO(picture.data)) as image:
        image.convert("RGB").save(stream, "WEBP", lossless=True)
    for kind in ("image/webp", ""):
        check(server.detect(stream.getvalue(), kind=kind).json["images"][0], picture, case.hashes[0])


def test_one_pixel_is_an_image(serve, case):
    """It is decoded, placed and run: the recording does not know it, which is the engine's error and nobody else's."""
    with serve("--unhealthy-after", 2) as server:
        assert server.call("GET", "/healthz").status == 200
        for _ in range(2):
            answer = server.detect(UNKNOWN, kind="image/png")
            assert (answer.status, answer.error) == (500, "engine-failed")
        assert server.call("GET", "/healthz").status == 503
        assert server.call("GET", "/readyz").status == 503
        assert server.detect(case.pictures[0].data).status == 200
        assert server.call("GET", "/healthz").status == 200
        assert server.log.read_text().count(" error the engine failed reason=") == 2


def test_a_decompression_bomb_is_refused_by_its_header(server):
    before = server.peak_memory()
    answer = server.detect(png((40000, 40000), 8, 2, b""), kind="image/png")
    assert (answer.status, answer.error) == (413, "image-too-large")
    assert server.detect(png((32769, 1), 8, 2, b""), kind="image/png").error == "image-too-large"
    assert server.peak_memory() - before < 50_000_000


@pytest.mark.slow
def test_a_body_of_100_mb_is_refused_early(server):
    before = server.peak_memory()
    size = 100 << 20
    # Before a byte of the body was sent.
    answer = server.send(post(b"", **{"Content-Length": str(size)}))
    assert (answer.status, answer.error) == (413, "body-too-large")
    assert answer.headers["connection"] == "close"
    # A client that sends all of it before it looks still gets the answer.
    answer = server.detect(bytes(size))
    assert (answer.status, answer.error) == (413, "body-too-large")
    assert server.peak_memory() - before < 8_000_000
    # In chunks nobody knows the size before: as much is held as is allowed.
    with server.raw() as stream:
        stream.sendall(post(b"", **{"Transfer-Encoding": "chunked"}).replace(b"Content-Length: 0\r\n", b""))
        piece = b"%x\r\n" % (1 << 20) + bytes(1 << 20) + b"\r\n"
        for _ in range(100):
            stream.sendall(piece)
        assert read_answer(stream).status == 413
    if not server.sanitized:
        assert server.peak_memory() - before < 3 * (32 << 20)


def test_chunked_bodies_are_taken(server, case):
    jpeg = case.pictures[0].data
    chunks = b"".join(b"%X;a=b\r\n" % len(part) + part + b"\r\n" for part in (jpeg[:1], jpeg[1:1000], jpeg[1000:]))
    head = post(b"", **{"Transfer-Encoding": "chunked"}).replace(b"Content-Length: 0\r\n", b"")
    with server.raw() as stream:
        for _ in range(2):
            stream.sendall(head + chunks + b"0\r\nTrailer: x\r\n\r\n")
            check(read_answer(stream).json["images"][0], case.pictures[0], case.hashes[0])
        stream.sendall(head + b"zz\r\n")
        assert read_answer(stream).error == "malformed-http"


def test_connections_are_kept_and_requests_may_be_pipelined(server, case):
    pictures = case.pictures[:5]
    connection = server.connect()
    for picture in pictures:
        answer = call(connection, "POST", "/v1/detect", picture.data, {"Content-Type": "image/jpeg"})
        assert answer.headers["connection"] == "keep-alive"
        check(answer.json["images"][0], picture, case.hashes[0])
    connection.close()
    with server.raw() as stream:
        health = b"\r\nGET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
        requests = b"".join(post(picture.data) + health for picture in pictures)
        stream.sendall(requests + b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\nGET /never HTTP/1.1\r\n\r\n")
        for picture in pictures:
            check(read_answer(stream).json["images"][0], picture, case.hashes[0])
            assert read_answer(stream).json == {"status": "ok"}
        last = read_answer(stream)
        assert last.headers["connection"] == "close"
        assert stream.recv(1) == b""
    with server.raw() as stream:
        stream.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
        assert read_answer(stream).headers["connection"] == "close"
        assert stream.recv(1) == b""


def test_a_client_that_only_ends_its_sending_is_answered(server, case):
    with server.raw() as stream:
        stream.sendall(post(case.pictures[0].data))
        stream.shutdown(socket.SHUT_WR)
        check(read_answer(stream).json["images"][0], case.pictures[0], case.hashes[0])
        assert stream.recv(1) == b""


def test_head_is_get_without_its_body(server):
    for target in ("/", "/healthz", "/readyz", "/metrics", "/v1/model"):
        with server.raw() as stream:
            for method in ("HEAD", "GET"):
                stream.sendall(f"{method} {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
                answer = read_answer(stream, method)
                assert answer.status == 200
                assert int(answer.headers["content-length"]) > 0
                assert (answer.body == b"") == (method == "HEAD")


def test_leave_to_send_is_given_to_those_who_may(server, case):
    jpeg = case.pictures[0].data
    head = post(b"", **{"Content-Length": str(len(jpeg)), "Expect": "100-continue"})
    with server.raw() as stream:
        stream.sendall(head)
        assert read_answer(stream).status == 100
        stream.sendall(jpeg)
        check(read_answer(stream).json["images"][0], case.pictures[0], case.hashes[0])
    for wrong, status in (
        (head.replace(b"/v1/detect", b"/v1/nothing"), 404),
        (head.replace(b"Content-Length: ", b"Content-Length: 9999"), 413),
        (head.replace(b"image/jpeg", b"text/plain"), 415),
        (head.replace(b"/v1/detect", b"/v1/detect?x=1"), 400),
        (head.replace(b"100-continue", b"a-miracle"), 417),
    ):
        assert server.send(wrong).status == status


def test_malformed_http_is_refused(server):
    host = "\r\nHost: x\r\n"
    for request, status in (
        ("\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
        ("GET\r\n\r\n", 400),
        ("GET / HTTP/1.1\r\n\r\n", 400),
        ("GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
        ("GET / HTTP/2.0" + host + "\r\n", 400),
        ("GET / HTTP/1.1" + host + "no colon\r\n\r\n", 400),
        ("GET / HTTP/1.1" + host + "A : b\r\n\r\n", 400),
        ("POST /v1/detect HTTP/1.1" + host + "Content-Type: image/png\r\n\r\n", 411),
        ("POST /v1/detect HTTP/1.1" + host + "Content-Length: -1\r\n\r\n", 400),
        ("POST /v1/detect HTTP/1.1" + host + "Content-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
        ("POST /v1/detect HTTP/1.1" + host + "Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        ("POST /v1/detect HTTP/1.1" + host + "Transfer-Encoding: gzip, chunked\r\n\r\n", 501),
        ("POST /v1/detect HTTP/1.1" + host + "Transfer-Encoding: gzip\r\n\r\n", 501),
        ("GET /" + "a" * 20000 + " HTTP/1.1" + host + "\r\n", 414),
        ("GET / HTTP/1.1" + host + "A: " + "b" * 20000 + "\r\n\r\n", 431),
        ("GET / HTTP/1.1" + host + "A: b\r\n" * 5000 + "\r\n", 431),
    ):
        answer = server.send(request.encode("latin-1"))
        assert answer.status == status, request[:60]
        assert answer.error
        # Where the next request would begin is known only where the header could be read.
        assert answer.headers["connection"] == ("keep-alive" if status == 411 else "close")
    assert server.call("GET", "/healthz").status == 200


def test_slow_clients_time_out_and_hurt_nobody(serve, case):
    jpeg = case.pictures[0].data
    patience = ("--header-timeout", 2, "--body-timeout", 2, "--idle-timeout", 2, "--write-timeout", 2)
    with serve(*patience) as server:
        idle, header, body, reader = (server.raw() for _ in range(4))
        header.sendall(b"GET / HTTP/1.1\r\n")
        body.sendall(post(jpeg)[:-1000])
        # Enough answers that they fit into no buffer, and none of them is read.
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.setblocking(False)
        requests = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 5000
        end = time.monotonic() + 1
        while time.monotonic() < end and requests:
            try:
                requests = requests[reader.send(requests) :]
            except BlockingIOError:
                time.sleep(0.01)
        # Each byte comes in time, the whole does not: the deadlines are totals.
        served = 0
        end = time.monotonic() + 1
        while time.monotonic() < end:
            check(server.detect(jpeg).json["images"][0], case.pictures[0], case.hashes[0])
            served += 1
            header.sendall(b"A")
            body.sendall(b"x")
        assert served > 0
        assert read_answer(header).error == "request-timeout"
        assert read_answer(body).error == "request-timeout"
        assert idle.recv(1) == b""
        until(lambda: total(server.metrics(), "trtdet_clients_left_total") >= 1)
        until(lambda: server.metrics()["trtdet_connections"] == 1)
        for stream in (idle, header, body, reader):
            stream.close()
        assert total(server.metrics(), "trtdet_requests_total", 'code="408"') == 2


def test_clients_that_leave_are_noticed(serve, case):
    jpeg = case.pictures[0].data
    with serve("--recording-time", 300) as server:
        with server.raw() as stream:
            stream.sendall(post(jpeg)[: len(jpeg) // 2])
        until(lambda: total(server.metrics(), "trtdet_clients_left_total") == 1)
        with server.raw() as stream:
            # Not only ended but reset: while the image is run.
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            stream.sendall(post(jpeg))
            until(lambda: server.metrics()["trtdet_requests_in_flight"] == 1)
        until(lambda: total(server.metrics(), "trtdet_clients_left_total") == 2)
        until(lambda: server.metrics()["trtdet_requests_in_flight"] == 0)
        with server.raw() as stream:
            stream.sendall(post(jpeg)[:100])
        until(lambda: total(server.metrics(), "trtdet_clients_left_total") == 3)
        until(lambda: server.metrics()["trtdet_connections"] == 1)
        check(server.detect(jpeg).json["images"][0], case.pictures[0], case.hashes[0])


def test_a_request_that_takes_too_long_gets_504(serve, case):
    with serve("--recording-time", 3000, "--request-timeout", 0.5) as server:
        connection = server.connect()
        begin = time.monotonic()
        answer = call(connection, "POST", "/v1/detect", case.pictures[0].data, {"Content-Type": "image/jpeg"})
        assert (answer.status, answer.error) == (504, "deadline-exceeded")
        assert 0.5 <= time.monotonic() - begin < 3
        # The late answer disturbs nobody.
        until(lambda: server.metrics()["trtdet_requests_in_flight"] == 0)
        assert call(connection, "GET", "/healthz").json == {"status": "ok"}
        connection.close()


def test_too_many_connections_are_told_so(serve, case):
    options = ("--max-connections", 2, "--max-client-percent", 100, "--recording-time", 1500, "--admin-port", 0)
    with serve(*options) as server:
        taken = [server.raw() for _ in range(2)]
        for stream in taken:
            # A request that is worked on: it will not be asked to leave.
            stream.sendall(post(case.pictures[0].data))
        until(lambda: server.metrics(server.admin_port)["trtdet_requests_in_flight"] == 2)
        answer = refused(server)
        assert (answer.status, answer.error) == (503, "overloaded")
        assert answer.headers["retry-after"] == "1"
        assert "--max-connections" in answer.json["error"]["message"]
        for stream in taken:
            check(read_answer(stream).json["images"][0], case.pictures[0], case.hashes[0])
        assert not refused(server)
        for stream in taken:
            stream.close()


def refused(server: Server) -> Answer | None:
    with server.raw() as stream:
        stream.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = read_answer(stream)
    return answer if answer.status != 200 else None


def test_bodies_have_a_limit_together(serve, case):
    large = bytes(900_000)
    with serve("--max-bodies-mb", 1, "--max-client-percent", 100) as server, server.raw() as slow:
        slow.sendall(post(large)[:-1])
        until(lambda: server.metrics()["trtdet_body_bytes"] == len(large) - 1)
        # Who sends faster takes the place of who has been sending for longest.
        assert server.detect(large).error == "bad-image"
        answer = read_answer(slow)
        assert (answer.status, answer.error) == (408, "request-timeout")
    with serve("--max-bodies-mb", 1, "--max-client-percent", 100, "--recording-time", 1500) as server:
        body, kind = form([("a.jpg", case.pictures[0].data), ("b.bin", large[:600_000])])
        with server.raw() as stream:
            # Whoever is worked on loses nothing.
            stream.sendall(post(body, **{"Content-Type": kind}))
            until(lambda: server.metrics()["trtdet_requests_in_flight"] == 1)
            answer = server.detect(large)
            assert (answer.status, answer.error) == (503, "overloaded")
            assert "--max-bodies-mb" in answer.json["error"]["message"]
            assert read_answer(stream).error == "bad-image"


def test_the_model_and_the_endpoints_are_told(server, case):
    model = server.call("GET", "/v1/model").json
    assert model["content_hash"] == case.hashes[0]
    assert "recording" in model["runs_on"]
    assert model["score_threshold"] == 0.1
    listed = server.call("GET", "/").json["endpoints"]
    paths = [one["path"] for one in listed]
    assert paths[:5] == ["/", "/v1/detect", "/v1/models/{model}/detect", "/v1/model", "/v1/models"]
    assert paths[-3:] == ["/healthz", "/readyz", "/metrics"]
    assert server.call("GET", "/readyz").json == {"status": "ready", "runs_on": {model["served_as"]: model["runs_on"]}}


def test_several_models_are_served_by_their_names(serve, case):
    first, second = case.bundles
    with serve(f"my model={second}") as server:
        picture = case.pictures[0]
        named = {first.name: case.hashes[0], "my model": case.hashes[1]}
        for name, content_hash in named.items():
            path = f"/v1/models/{quote(name)}"
            answer = server.call("POST", f"{path}/detect", picture.data, {"Content-Type": "image/jpeg"})
            assert answer.json["model"]["content_hash"] == content_hash
            check(answer.json["images"][0], picture, content_hash)
            assert server.call("GET", path).json["content_hash"] == content_hash
        assert server.detect(picture.data).json["model"]["content_hash"] == case.hashes[0]
        models = server.call("GET", "/v1/models").json["models"]
        assert {one["served_as"]: one["content_hash"] for one in models} == named
        for method, target in (("GET", "/v1/models/other"), ("POST", "/v1/models/other%0a/detect")):
            answer = server.call(
                method, target, picture.data if method == "POST" else None, {"Content-Type": "image/png"}
            )
            assert (answer.status, answer.error) == (404, "unknown-model")
            assert '"my model"' in answer.json["error"]["message"]
        metrics = server.metrics()
        assert total(metrics, "trtdet_bundle_info") == 2
        assert total(metrics, "trtdet_detect_seconds_count") == 3
        assert total(metrics, "trtdet_requests_total", 'path="/v1/models/{model}/detect"', 'code="200"') == 2


def test_a_failing_model_is_named(serve, case):
    """Although the other one works."""
    with serve(f"other={case.bundles[1]}", "--unhealthy-after", 1) as server:
        headers = {"Content-Type": "image/png"}
        assert server.call("POST", "/v1/models/other/detect", UNKNOWN, headers).status == 500
        assert server.detect(case.pictures[0].data).status == 200
        health = server.call("GET", "/healthz")
        assert health.status == 503
        assert 'of the model "other"' in health.json["error"]["message"]


def test_metrics_add_up(server, case):
    images = 0
    for count in (1, 2, 3):
        body, kind = form([(picture.file.name, picture.data) for picture in case.pictures[:count]])
        assert server.detect(body, kind=kind).status == 200
        images += count
    server.detect(b"x")
    server.call("GET", "/nowhere")
    text = server.call("GET", "/metrics").body.decode()
    metrics = parse_metrics(text)
    assert total(metrics, "trtdet_requests_total", 'path="/v1/detect"', 'code="200"') == 3
    assert (metrics["trtdet_detect_seconds_count"], metrics["trtdet_images_total"]) == (3, images)
    assert metrics["trtdet_decode_seconds_count"] == metrics["trtdet_queue_seconds_count"] == images
    assert metrics["trtdet_batch_images_sum"] == images
    assert metrics["trtdet_batch_images_count"] == metrics["trtdet_run_seconds_count"]
    found = sum(len(picture.found[case.hashes[0]].scores) for count in (1, 2, 3) for picture in case.pictures[:count])
    assert metrics["trtdet_detections_total"] == found
    assert metrics["trtdet_queue_images"] == metrics["trtdet_requests_in_flight"] == 0
    assert total(metrics, "trtdet_errors_total", 'type="bad-image"') == 1
    assert total(metrics, "trtdet_bundle_info", f'content_hash="{case.hashes[0]}"') == 1
    assert abs(metrics["process_start_time_seconds"] - time.time()) < 10 * PATIENCE
    official = pytest.importorskip("prometheus_client.parser", reason="pip install prometheus-client")
    families = {family.name: family for family in official.text_string_to_metric_families(text)}
    assert families["trtdet_detect_seconds"].type == "histogram"


def test_waiting_for_others_makes_batches(serve, case):
    with serve("--max-delay-us", 2_000_000, "--lanes", 1, "--max-batch", 4, "--workers", 2) as server:
        body, kind = form([(picture.file.name, picture.data) for picture in case.pictures[:8]])
        answer = server.detect(body, kind=kind)
        assert [image["batch"] for image in answer.json["images"]] == [4] * 8
        for image, picture in zip(answer.json["images"], case.pictures, strict=False):
            check(image, picture, case.hashes[0])
        assert server.metrics()['trtdet_batch_images_bucket{le="2"}'] == 0
        assert server.metrics()['trtdet_batch_images_bucket{le="4"}'] == 2


def test_requests_can_be_followed_through_the_log_in_json(serve, case):
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    with serve("--log-json", "--log-level", "debug") as server:
        own = {"Content-Type": "image/png", "X-Request-Id": "a/b:1", "traceparent": trace}
        answer = server.call("POST", "/v1/detect", UNKNOWN, own)
        assert (answer.status, answer.headers["x-request-id"]) == (500, "a/b:1")
        # What is no id of the allowed kind is replaced, so that it can forge nothing.
        made = [
            server.call("GET", "/", None, {"X-Request-Id": bad, "traceparent": "00-xyz"}) for bad in ('a"b', "a" * 129)
        ]
        ids = {answer.headers["x-request-id"] for answer in made}
        assert len(ids) == 2
        until(lambda: server.log.read_text().count("answered") == 3)
        assert server.send(b'GET /"{}\\ HTTP/1.1\r\nHost: x\r\n\r\n').status == 404
        until(lambda: server.log.read_text().count("answered") == 4)
    lines = server.log_lines()
    assert all({"time", "level", "message"} <= line.keys() for line in lines)
    (failure,) = [line for line in lines if line["message"] == "the engine failed"]
    *access, last = [line for line in lines if line["message"] == "answered"]
    assert (last["target"], last["status"]) == ('/"{}\\', 404)
    assert last["ms"] >= 0
    assert re.fullmatch(r"127\.0\.0\.1:\d+", last["peer"])
    assert re.fullmatch(r"[0-9a-f]{16}", last["request_id"])
    assert failure["request_id"] == access[0]["request_id"] == "a/b:1"
    assert access[0]["traceparent"] == trace
    assert {line["request_id"] for line in access[1:]} == ids
    assert access[1]["traceparent"] == ""


def test_thresholds_can_be_set_for_all_requests(serve, case):
    picture = max(case.pictures, key=lambda one: len(one.found[case.hashes[0]].scores))
    scores = picture.found[case.hashes[0]].scores
    few = int((scores > 0.45).sum())
    assert 0 < few < len(scores)

    def count(server: Server, query: str = "") -> int:
        return len(server.detect(picture.data, query).json["images"][0]["detections"])

    with serve("--score-threshold", 0.45) as server:
        assert count(server) == few
        assert count(server, "?score_threshold=0.1") == len(scores)  # a request's own word counts
    with serve("--max-detections", 1, "--score-threshold", 0.01) as server:
        assert count(server) == 1
        assert count(server, "?max_detections=2") == 2


def test_options_can_come_from_the_environment(server, case, monkeypatch, tmp_path):
    for name, value in {
        "BUNDLE": case.bundles[1],
        "RECORDING": case.recordings,
        "LOG_JSON": "true",
        "LOG_LEVEL": "debug",
        "MAX_IMAGES": 1,
    }.items():
        monkeypatch.setenv(f"TRTDET_OPTION_{name}", str(value))
    with Server(server.program, ["--max-images", 2], tmp_path / "environment") as other:
        assert other.detect(case.pictures[0].data).json["model"]["content_hash"] == case.hashes[1]
        body, kind = form([(picture.file.name, picture.data) for picture in case.pictures[:2]])
        assert other.detect(body, kind=kind).status == 200  # the command line comes first
    assert all(other.log_lines())
    monkeypatch.setenv("TRTDET_OPTION_LANES", "many")
    assert "many" in finished(server.program, code=2, timeout=PATIENCE).stderr
    monkeypatch.delenv("TRTDET_OPTION_LANES")
    shown = finished(server.program, "--help").stdout
    named = set(re.findall(r"--([a-z-]+[a-z])", shown)) - {"help", "version"}
    assert set(re.findall(r"Env:TRTDET_OPTION_([A-Z_]+)", shown)) == {
        one.upper().replace("-", "_") for one in named
    } | {"BUNDLE"}


def test_lanes_and_the_process_are_measured(serve, case):
    with serve(f"other={case.bundles[1]}", "--lanes", 3, "--recording-time", 1500) as server:
        label = 'served_as="other"'
        with server.raw() as stream:
            stream.sendall(post(case.pictures[0].data, "/v1/models/other/detect"))
            until(lambda: total(server.metrics(), "trtdet_running_batches", label) == 1)
            metrics = server.metrics()
            ages = [total(metrics, "trtdet_lane_batch_age_seconds", label, f'lane="{lane}"') for lane in range(3)]
            assert sorted(age > 0 for age in ages) == [False, False, True]
            assert read_answer(stream).status == 200
        until(lambda: total(server.metrics(), "trtdet_running_batches") == 0)
        metrics = server.metrics()
        assert total(metrics, "trtdet_lane_batch_age_seconds") == 0
        assert total(metrics, "trtdet_model_queue_images", label) == 0
        assert len([key for key in metrics if key.startswith("trtdet_lane_batch_age_seconds")]) == 6
        assert metrics["process_cpu_seconds_total"] > 0
        assert metrics["process_virtual_memory_bytes"] > metrics["process_resident_memory_bytes"] > 1_000_000
        assert metrics["process_max_fds"] > metrics["process_open_fds"] > 5
        assert metrics["process_threads"] >= 6
        # Those of connections that have ended are there for a moment still.
        assert metrics["process_open_fds"] < 100
        streams = [server.raw() for _ in range(100)]
        until(lambda: server.metrics()["process_open_fds"] >= 100)
        for stream in streams:
            stream.close()


def test_a_start_that_fails_says_why(server, case, tmp_path):
    path, bundle = server.program, case.bundles[0]
    recording = ("--recording", case.recordings)
    taken = failed_start(path, bundle, *recording, "--port", server.port)
    assert f"port {server.port}: Address already in use" in taken
    assert "cannot listen on" in failed_start(path, bundle, *recording, "--host", "256.0.0.1")
    assert "manifest.json" in failed_start(path, tmp_path / "none", *recording)
    assert failed_start(path, bundle)  # made for onnxruntime, which has no engine
    other = next(file for file in case.recordings.iterdir() if file.stem == case.hashes[1])
    assert "made from another bundle" in failed_start(path, bundle, "--recording", other)
    twice = finished(path, bundle, bundle, code=2, timeout=PATIENCE)
    assert f"two bundles are called '{bundle.name}'" in twice.stderr
    for wrong in ((), ("--port", 70000), ("--lanes", 0), ("--log-level", "loud"), ("--none",), ("--max-body-mb", "x")):
        finished(path, *([bundle] if wrong else []), *wrong, code=2, timeout=PATIENCE)


PAGE = Path(__file__).resolve().parents[2] / "docs" / "service.md"


def test_only_bundles_that_the_key_signed_are_served(server, serve, case, tmp_path):
    private, public = pair(tmp_path, "key")
    other = pair(tmp_path, "other", bytes(32))[1]
    folder = tmp_path / "signed"
    shutil.copytree(case.bundles[0], folder)
    start = [server.program, folder, "--recording", case.recordings, "--require-signature"]
    assert f"bundle '{folder}': is not signed; sign it with 'trtdet sign'" in failed_start(*start, public)
    Bundle(folder).sign(private)
    assert "is not signed by the key of" in failed_start(*start, other)
    assert "is not a public Ed25519 key in PEM" in failed_start(*start, private)
    with serve("--require-signature", public, "--reload-interval", 0.05, bundle=folder) as running:

        def reloads(result: str) -> bool:
            check(running.detect(case.pictures[0].data).json["images"][0], case.pictures[0], case.hashes[0])
            return total(running.metrics(), "trtdet_reloads_total", f'result="{result}"') >= 1

        (folder / "manifest.sig").unlink()
        until(lambda: reloads("refused"))
        Bundle(folder).sign(private)
        until(lambda: reloads("loaded"))


def test_the_page_has_every_option_metric_and_endpoint(server):
    page = PAGE.read_text(encoding="utf-8")
    shown = finished(server.program, "--help").stdout
    table = page.split("\n## Options\n")[1].split("\n## ")[0]
    first_column = "".join(line.split("|")[1] for line in table.splitlines() if line.startswith("|"))
    assert set(re.findall(r"--[a-z-]+[a-z]", first_column)) == set(re.findall(r"--[a-z-]+[a-z]", shown))
    server.detect(b"x")
    for name in re.findall(r"^# TYPE (\S+)", server.call("GET", "/metrics").body.decode(), re.MULTILINE):
        assert f"`{name}" in page, name
    for endpoint in server.call("GET", "/").json["endpoints"]:
        assert f"| `{endpoint['path']}` | {endpoint['methods']} |" in page


def test_the_page_has_every_type_of_error():
    sources = "".join(file.read_text() for file in (PAGE.parents[1] / "service" / "serve").glob("*.cpp"))
    types = set(re.findall(r"(?:error|busy)_response\(\s*(?:\d+,\s*)?\"([a-z-]+)\"", sources))
    assert {"bad-image", "overloaded", "request-timeout"} <= types
    page = PAGE.read_text(encoding="utf-8")
    assert [kind for kind in sorted(types) if f"`{kind}`" not in page] == []


def test_the_requests_on_the_page_work(server, case, tmp_path):
    if shutil.which("curl") is None:
        pytest.skip("needs curl: apt-get install curl")
    for name, picture in zip(("image.jpg", "other.jpg"), case.pictures, strict=False):
        (tmp_path / name).write_bytes(picture.data)
    lines = re.findall(r"^curl .*localhost:8080.*$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(lines) == 2
    for line, images in zip(lines, (1, 2), strict=True):
        command = line.replace("localhost:8080", f"127.0.0.1:{server.port}").replace("curl ", "curl -sS ", 1)
        assert len(json.loads(finished("bash", "-c", command, cwd=tmp_path).stdout)["images"]) == images
