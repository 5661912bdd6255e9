"""trtdet-serve as a client of the Open Inference Protocol sees it."""

import gzip
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from serving import Answer, Case, Server, check, total

from trtdet.data.images import preprocess, read_image
from trtdet.detection.suppression import Detections
from trtdet.runtime.detector import Detector

OUTPUTS = ["num_dets", "boxes", "scores", "classes"]


@pytest.fixture(scope="module")
def triton():
    return pytest.importorskip("tritonclient.http", reason="pip install tritonclient[http]")


@pytest.fixture
def server(serve, case):
    with serve(f"other={case.bundles[1]}") as running:
        yield running


@pytest.fixture
def client(triton, server):
    with triton.InferenceServerClient(f"127.0.0.1:{server.port}", network_timeout=60.0) as made:
        yield made


def tensors(bundle: Path, case: Case, count: int) -> tuple[NDArray[np.float32], Detections]:
    """A batch, and what Python's detector makes of it."""
    detector = Detector.open(bundle, runtime="onnxruntime")
    inputs = [preprocess(read_image(picture.file), detector.input)[0] for picture in case.pictures[:count]]
    batch = np.stack(inputs)
    return batch, detector(batch)


def same(got: Callable[[str], NDArray[Any]], expected: Detections) -> None:
    for name, tolerance in zip(OUTPUTS, (0, 0.01, 1e-4, 0), strict=True):
        wanted = getattr(expected, name)
        value = got(name)
        assert (value.dtype, value.shape) == (wanted.dtype, wanted.shape)
        for index, row in enumerate(wanted):
            rows = int(expected.num_dets[index, 0]) if name != "num_dets" else 1
            np.testing.assert_allclose(value[index, :rows], row[:rows], rtol=0, atol=tolerance)
            assert not value[index, rows:].any()


def ask(triton: Any, batch: NDArray[np.float32], binary: bool, name: str) -> Any:
    tensor = triton.InferInput(name, list(batch.shape), "FP32")
    tensor.set_data_from_numpy(batch, binary_data=binary)
    return tensor


@pytest.mark.parametrize("binary", [True, False])
def test_tensors_are_answered_as_by_python(triton, client, case, binary):
    for bundle, name in zip(case.bundles, (case.bundles[0].name, "other"), strict=True):
        facts = client.get_model_metadata(name)
        (declared,) = facts["inputs"]
        batch, expected = tensors(bundle, case, 3 if binary else 1)
        assert declared["shape"] == [-1, *batch.shape[1:]]
        assert {one["name"]: one["shape"][1:] for one in facts["outputs"]} == {
            output: list(getattr(expected, output).shape[1:]) for output in OUTPUTS
        }
        asked = [triton.InferRequestedOutput(output, binary_data=binary) for output in OUTPUTS]
        result = client.infer(
            name, [ask(triton, batch, binary, declared["name"])], outputs=asked, request_id="a 1", model_version="1"
        )
        same(result.as_numpy, expected)
        response = result.get_response()
        assert (response["id"], response["model_name"], response["model_version"]) == ("a 1", name, "1")
        assert response["parameters"]["content_hash"] == facts["parameters"]["content_hash"]


def test_outputs_are_those_that_are_asked_for(triton, client, case):
    name = case.bundles[0].name
    batch, expected = tensors(case.bundles[0], case, 2)
    images = ask(triton, batch, True, client.get_model_metadata(name)["inputs"][0]["name"])
    # Of what is asked for one way and the other in one answer, the bytes must stay in their order.
    asked = [
        triton.InferRequestedOutput(output, binary_data=output != "classes")
        for output in ("scores", "classes", "num_dets")
    ]
    result = client.infer(name, [images], outputs=asked)
    assert [one["name"] for one in result.get_response()["outputs"]] == ["scores", "classes", "num_dets"]
    np.testing.assert_array_equal(result.as_numpy("num_dets"), expected.num_dets)
    np.testing.assert_allclose(result.as_numpy("scores").sum(), expected.scores.sum(), rtol=1e-4)
    # None asked for: all, as bytes, as the client wants them by itself.
    same(client.infer(name, [images]).as_numpy, expected)


def test_the_server_and_its_models_are_told(client, case):
    names = [case.bundles[0].name, "other"]
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.get_server_metadata()["name"] == "trtdet-serve"
    assert [(one["name"], one["state"]) for one in client.get_model_repository_index()] == [(n, "READY") for n in names]
    for name in names:
        assert client.is_model_ready(name)
        assert client.is_model_ready(name, "1")
        assert client.get_model_metadata(name, "1")["name"] == name
    assert not client.is_model_ready("none")
    assert not client.is_model_ready("other", "2")


def test_errors_are_told_as_the_protocol_has_them(triton, client, server, case):
    error = pytest.importorskip("tritonclient.utils").InferenceServerException
    with pytest.raises(error, match='no model "none"; served are'):
        client.get_model_metadata("none")
    name = case.bundles[0].name
    batch = np.zeros((1, 3, 8, 8), np.float32)
    with pytest.raises(error, match=r"the input's shape is .*; expected \[1 to 32,3,"):
        client.infer(name, [ask(triton, batch, True, client.get_model_metadata(name)["inputs"][0]["name"])])
    for method, target, status in (
        ("GET", "/v2/nothing", 404),
        ("GET", f"/v2/models/{name}/infer", 405),
        ("POST", f"/v2/models/{name}/versions/2/infer", 404),
        ("POST", "/v2/models/none/infer", 404),
    ):
        answer = server.call(method, target, b"{}" if method == "POST" else None)
        assert answer.status == status
        assert isinstance(answer.json["error"], str)
    # What the connection refuses has the form, too.
    with server.raw() as stream:
        stream.sendall(f"POST /v2/models/{name}/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999\r\n\r\n".encode())
        assert b'{"error":"the body has 99999999 bytes' in stream.recv(4096)
    assert server.call("GET", "/nothing").error == "not-found"
    assert total(server.metrics(), "trtdet_errors_total", 'type="bad-inference"') == 1


def infer(server: Server, name: str, request: Any, tail: bytes = b"", length: str | None = None) -> Answer:
    head = json.dumps(request).encode()
    headers = {"Inference-Header-Content-Length": length or str(len(head))} if tail or length else {}
    return server.call("POST", f"/v2/models/{name}/infer", head + tail, headers)


def test_lists_may_be_nested_as_the_shape_is(server, case):
    batch, expected = tensors(case.bundles[0], case, 2)
    name = case.bundles[0].name
    (declared,) = server.call("GET", f"/v2/models/{name}").json["inputs"]
    for data in (batch.tolist(), batch.ravel().tolist()):
        tensor = {"name": declared["name"], "shape": batch.shape, "datatype": "FP32", "data": data}
        answer = infer(server, name, {"inputs": [tensor]})
        assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
        outputs = {one["name"]: one for one in answer.json["outputs"]}

        def value(output: str, found: Any = outputs) -> NDArray[Any]:
            one = found[output]
            kind = {"FP32": np.float32, "INT32": np.int32}[one["datatype"]]
            return np.array(one["data"], kind).reshape(one["shape"])

        same(value, expected)
    metrics = server.metrics()
    assert (metrics["trtdet_images_total"], metrics["trtdet_decode_seconds_count"]) == (4, 0)
    assert metrics["trtdet_detect_seconds_count"] == 2


def files(triton: Any, case: Case, name: str, axis: bool) -> Any:
    """Two pictures as they are on the disk, as elements of a tensor."""
    elements = np.array([picture.data for picture in case.pictures[:2]], np.object_)
    tensor = triton.InferInput(name, [2, 1] if axis else [2], "BYTES")
    tensor.set_data_from_numpy(elements[:, None] if axis else elements)
    return tensor


@pytest.mark.parametrize("axis", [True, False])
def test_files_of_images_are_decoded_by_the_service(triton, client, case, axis):
    name = case.bundles[0].name
    (declared,) = client.get_model_metadata(name)["inputs"]
    result = client.infer(name, [files(triton, case, declared["name"], axis)])
    for index, picture in enumerate(case.pictures[:2]):
        count = int(result.as_numpy("num_dets")[index, 0])
        rows = zip(*(result.as_numpy(output)[index, :count] for output in OUTPUTS[1:]), strict=True)
        found = [{"box": box.tolist(), "score": float(score), "class": int(label)} for box, score, label in rows]
        # Boxes are in pixels of the image.
        check({"width": picture.width, "height": picture.height, "detections": found}, picture, case.hashes[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shape": [3]}, "end within element 2 of 3"),
        ({"shape": [1]}, "stand behind the last of the 1 elements"),
        ({"shape": [2, 2]}, "expected [1 to 32]"),
        ({"parameters": {}}, "'binary_data_size' of the input"),
        ({"data": ["x", "y"]}, "holds what is not a number"),
    ],
)
def test_files_that_are_not_as_the_protocol_says(server, case, change, message):
    picture = case.pictures[0].data
    tensors = 2 * (len(picture).to_bytes(4, "little") + picture)
    tensor = {"name": "images", "datatype": "BYTES", "shape": [2], "parameters": {"binary_data_size": len(tensors)}}
    tensor["name"] = server.call("GET", f"/v2/models/{case.bundles[0].name}").json["inputs"][0]["name"]
    head = json.dumps({"inputs": [{**tensor, **change}]}).encode()
    answer = server.call(
        "POST",
        f"/v2/models/{case.bundles[0].name}/infer",
        head + tensors,
        {"Inference-Header-Content-Length": str(len(head))},
    )
    assert answer.status == 400
    assert message in answer.json["error"]


def test_a_file_that_is_no_image_says_which(triton, client, case):
    name = case.bundles[0].name
    (declared,) = client.get_model_metadata(name)["inputs"]
    tensor = triton.InferInput(declared["name"], [2], "BYTES")
    tensor.set_data_from_numpy(np.array([case.pictures[0].data, b"no image"], np.object_))
    with pytest.raises(Exception, match="image 1: the image cannot be decoded"):
        client.infer(name, [tensor])


def test_configuration_and_statistics_are_read_as_triton_gives_them(triton, client, case):
    first, name = case.bundles[0].name, "other"
    config = client.get_model_config(name)
    (declared,) = client.get_model_metadata(name)["inputs"]
    assert config["name"] == name
    assert config["max_batch_size"] >= 1
    assert config["input"] == [{"name": declared["name"], "data_type": "TYPE_FP32", "dims": declared["shape"][1:]}]
    assert [output["name"] for output in config["output"]] == OUTPUTS
    client.infer(name, [files(triton, case, declared["name"], axis=False)])
    with pytest.raises(Exception, match="expected"):
        client.infer(name, [triton.InferInput("none", [1], "BYTES").set_data_from_numpy(np.array([b""], np.object_))])
    (counted,) = client.get_inference_statistics(name)["model_stats"]
    assert counted["inference_count"] == 2
    assert 1 <= counted["execution_count"] <= 2
    assert counted["last_inference"] > 1.7e12
    spent = counted["inference_stats"]
    assert spent["success"]["count"] == 1
    # Of requests, as perf_analyzer of Triton checks: what a request took is at least the sum of its parts.
    parts = [spent[part] for part in ("queue", "compute_input", "compute_infer", "compute_output")]
    assert [part["count"] for part in parts] == [1, 1, 1, 1]
    assert 0 < parts[2]["ns"] < sum(part["ns"] for part in parts) <= spent["success"]["ns"]
    for batch in counted["batch_stats"]:
        assert batch["compute_input"]["count"] == batch["compute_infer"]["count"] == batch["compute_output"]["count"]
    assert sum(batch["batch_size"] * batch["compute_infer"]["count"] for batch in counted["batch_stats"]) == 2
    others = {one["name"]: one["inference_count"] for one in client.get_inference_statistics()["model_stats"]}
    assert others == {first: 0, name: 2}


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_compressed_bodies_are_taken(triton, client, case, algorithm):
    name = case.bundles[0].name
    batch, expected = tensors(case.bundles[0], case, 1)
    (declared,) = client.get_model_metadata(name)["inputs"]
    result = client.infer(name, [ask(triton, batch, True, declared["name"])], request_compression_algorithm=algorithm)
    same(result.as_numpy, expected)


def bare(data: bytes) -> bytes:
    """Deflate without zlib's header, as some clients send it."""
    squeezer = zlib.compressobj(wbits=-15)
    return squeezer.compress(data) + squeezer.flush()


@pytest.mark.parametrize(
    ("pack", "encoding"),
    [(gzip.compress, "gzip"), (gzip.compress, "x-gzip"), (zlib.compress, "deflate"), (bare, "deflate")],
)
def test_compressed_images_are_taken(server, case, pack, encoding):
    headers = {"Content-Type": "image/jpeg", "Content-Encoding": encoding}
    packed = pack(case.pictures[0].data)
    answer = server.call("POST", "/v1/detect", packed, headers)
    check(answer.json["images"][0], case.pictures[0], case.hashes[0])
    for body, word in ((packed[:-20], "cut"), (packed + b"x", "follows the end"), (b"\x1f\x8bnothing", "is not what")):
        answer = server.call("POST", "/v1/detect", body, headers)
        assert (answer.status, answer.error) == (400, "bad-encoding")
        assert word in answer.json["error"]["message"]


def test_a_body_may_not_be_larger_without_its_encoding(serve):
    with serve("--max-body-mb", 4, "--max-bodies-mb", 32) as server:
        headers = {"Content-Type": "image/jpeg", "Content-Encoding": "gzip"}
        # As much as is allowed, and a byte more.
        answer = server.call("POST", "/v1/detect", gzip.compress(bytes(4 << 20)), headers)
        assert answer.error == "bad-image"
        before = server.peak_memory()
        for size in ((4 << 20) + 1, 1 << 28):
            answer = server.call("POST", "/v1/detect", gzip.compress(bytes(size)), headers)
            assert (answer.status, answer.error) == (413, "body-too-large")
        if not server.sanitized:
            assert server.peak_memory() - before < 16 << 20
