"""Models that are loaded and unloaded on the admin port while clients ask for them."""

import json
import shutil
import threading
from typing import Any

import pytest
from serving import Answer, check, total
from test_grpc import grpc_address


@pytest.fixture
def server(serve, case, tmp_path):
    bundle = tmp_path / "changed"
    shutil.copytree(case.bundles[0], bundle)
    with serve(f"other={case.bundles[1]}", "--admin-port", 0, "--reload-interval", 0, bundle=bundle) as running:
        yield running


@pytest.fixture
def client(server):
    triton = pytest.importorskip("tritonclient.http", reason="pip install tritonclient[http]")
    with triton.InferenceServerClient(f"127.0.0.1:{server.admin_port}", network_timeout=60.0) as made:
        yield made


def change(server: Any, model: str, what: str, body: bytes = b"", port: int | None = None) -> Answer:
    return server.call("POST", f"/v2/repository/models/{model}/{what}", body, port=port or server.admin_port)


def test_a_model_is_unloaded_and_loaded_again(server, client, case):
    picture = case.pictures[0]
    check(server.detect(picture.data).json["images"][0], picture, case.hashes[0])
    client.unload_model("changed")
    for method, target, body in (
        ("POST", "/v1/detect", picture.data),
        ("GET", "/v2/models/changed", None),
        ("GET", "/v2/models/changed/config", None),
        ("GET", "/v2/models/changed/ready", None),
        ("POST", "/v2/models/changed/infer", b"{}"),
        ("POST", "/v2/models/changed/infer", None),
    ):
        answer = server.call(method, target, body, {"Content-Type": "image/jpeg"})
        assert answer.status == 503, (method, target)
        assert 'the model \\"changed\\" is unloaded; load it on the admin port' in answer.body.decode()
    states = {one["name"]: (one["state"], one["reason"]) for one in client.get_model_repository_index()}
    assert states == {"changed": ("UNAVAILABLE", "unloaded"), "other": ("READY", "")}
    # The other model serves on, and the service is as ready as before.
    answer = server.call("POST", "/v1/models/other/detect", picture.data, {"Content-Type": "image/jpeg"})
    check(answer.json["images"][0], picture, case.hashes[1])
    ready = server.call("GET", "/readyz")
    assert (ready.status, ready.json["runs_on"]["changed"]) == (200, None)
    assert server.call("GET", "/v1/model").json == {"served_as": "changed", "runs_on": None}
    metrics = server.metrics()
    assert total(metrics, "trtdet_bundle_info") == 1
    assert total(metrics, "trtdet_errors_total", 'type="unloaded"') == 6
    client.unload_model("changed")  # which it is
    client.load_model("changed")
    check(server.detect(picture.data).json["images"][0], picture, case.hashes[0])
    assert total(server.metrics(), "trtdet_bundle_info") == 2
    assert client.is_model_ready("changed")


def test_another_bundle_is_loaded_or_said_to_be_refused(server, case):
    picture = case.pictures[0]
    (folder,) = [argument for argument in server.arguments if str(argument).endswith("/changed")]
    manifest = (folder / "manifest.json").read_bytes()
    (folder / "manifest.json").write_bytes(b"{}")
    answer = change(server, "changed", "load")
    assert answer.status == 409
    assert 'the model "changed" was not loaded: bundle ' in answer.json["error"]
    check(server.detect(picture.data).json["images"][0], picture, case.hashes[0])
    (folder / "manifest.json").write_bytes(manifest)
    for file in case.bundles[1].iterdir():
        shutil.copy(file, folder)
    assert change(server, "changed", "load", b"{}").status == 200
    check(server.detect(picture.data).json["images"][0], picture, case.hashes[1])


@pytest.mark.parametrize(
    ("model", "what", "body", "status", "message"),
    [
        ("none", "load", b"", 404, 'there is no model "none"; served are "changed", "other"'),
        ("other", "load", json.dumps({"parameters": {"config": "{}"}}).encode(), 400, '"config" is not supported'),
        ("other", "unload", b"[]", 400, "not a JSON object"),
        ("other", "unload", b"{", 400, "not a JSON object"),
    ],
)
def test_what_cannot_be_loaded_is_told(server, model, what, body, status, message):
    answer = change(server, model, what, body)
    assert answer.status == status
    assert message in answer.json["error"]


def test_it_is_on_the_admin_port_alone(server, case):
    for what in ("load", "unload"):
        answer = change(server, "changed", what, port=server.port)
        assert answer.status == 403
        assert "on the admin port alone; start the service with --admin-port" in answer.json["error"]
    answer = server.call("POST", "/v1/detect", case.pictures[0].data, port=server.admin_port)
    assert (answer.status, answer.error) == (403, "not-admin")
    check(server.detect(case.pictures[0].data).json["images"][0], case.pictures[0], case.hashes[0])


def test_grpc_says_where_it_is(serve, case):
    triton = pytest.importorskip("tritonclient.grpc", reason="pip install tritonclient[grpc]")
    with serve("--grpc-port", 0, "--admin-port", 0) as server:
        if "built without gRPC" in server.log.read_text():
            pytest.skip("built without gRPC")
        with triton.InferenceServerClient(grpc_address(server)) as client:
            for ask in (client.load_model, client.unload_model):
                with pytest.raises(Exception, match="is on the admin port alone") as failed:
                    ask(case.bundles[0].name)
                assert "PERMISSION_DENIED" in failed.value.status()


def test_no_request_is_lost_while_a_model_comes_and_goes(server, case):
    """Requests are answered rightly, or told that the model is unloaded."""
    told: list[int] = []
    ended = threading.Event()

    def ask() -> None:
        picture = case.pictures[0]
        while not ended.is_set():
            answer = server.detect(picture.data)
            told.append(answer.status)
            if answer.status == 200:
                check(answer.json["images"][0], picture, case.hashes[0])
            else:
                assert (answer.status, answer.error) == (503, "unloaded")

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(5):
        assert change(server, "changed", "unload").status == 200
        assert change(server, "changed", "load").status == 200
    ended.set()
    for thread in threads:
        thread.join()
    assert told
    assert server.detect(case.pictures[0].data).status == 200
