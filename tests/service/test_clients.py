"""trtdet-serve as clients of others see it: wrk, KServe over HTTP and gRPC, and perf_analyzer of Triton. Those that are
not installed are skipped, and the reason says what to install."""

import csv
import json
import os
import re
import shutil
import subprocess
import sys

import pytest
from serving import PATIENCE, finished, total
from test_grpc import grpc_address

POST = """\
local file = assert(io.open(os.getenv("IMAGE"), "rb"))
wrk.method, wrk.body = "POST", file:read("*all")
wrk.headers["Content-Type"] = "image/jpeg"
done = function(summary, latency, requests)
    local e = summary.errors
    local lost = e.connect + e.read + e.write + e.status + e.timeout
    print(string.format("answers %d lost %d", summary.requests, lost))
end
"""


def test_wrk_gets_an_answer_to_every_request(serve, case, tmp_path):
    wrk = shutil.which("wrk")
    if wrk is None:
        pytest.skip("needs wrk, which is not installed: apt-get install wrk")
    (tmp_path / "post.lua").write_text(POST)
    picture = case.pictures[0]
    (tmp_path / "image.jpg").write_bytes(picture.data)
    with serve() as server:
        url = f"http://127.0.0.1:{server.port}/v1/detect"
        command = (wrk, "-t", 2, "-c", 16, "-d", "3s", "--latency", "-s", tmp_path / "post.lua", url)
        environment = {**os.environ, "IMAGE": str(tmp_path / "image.jpg")}
        shown = finished(*command, timeout=PATIENCE, env=environment).stdout
        answers, lost = map(int, re.search(r"answers (\d+) lost (\d+)", shown).groups())
        assert (lost, answers > 0) == (0, True), shown
        # At its end wrk leaves requests that it does not wait for.
        assert answers <= total(server.metrics(), "trtdet_requests_total", 'path="/v1/detect"', 'code="200"')


KSERVE = """\
import asyncio, json, sys
import numpy as np
from kserve import InferInput, InferRequest, InferenceGRPCClient, InferenceRESTClient, RESTConfig

async def main(http, grpc, name, tensor, file):
    batch = np.load(file)
    given = InferInput(name=tensor, shape=list(batch.shape), datatype="FP32")
    given.set_data_from_numpy(batch, binary_data=False)
    request = InferRequest(model_name=name, infer_inputs=[given])
    rest = InferenceRESTClient(RESTConfig(protocol="v2", timeout=60, retries=0))
    told = {"http": {}, "grpc": {}}
    told["live"], told["ready"] = await rest.is_server_live(http), await rest.is_server_ready(http)
    told["model"] = await rest.is_model_ready(http, name)
    answer = await rest.infer(http, request, model_name=name)
    told["http"] = {one.name: one.as_numpy().tolist() for one in answer.outputs}
    client = InferenceGRPCClient(grpc)
    told["grpc model"] = await client.is_model_ready(name)
    answer = await client.infer(request, timeout=60)
    told["grpc"] = {one.name: one.as_numpy().tolist() for one in answer.outputs}
    print(json.dumps(told))

asyncio.run(main(*sys.argv[1:]))
"""


def test_kserves_client_gets_the_same_over_http_and_grpc(serve, case, tmp_path):
    """KServe wants other versions of packages, so it may be in an environment of its own: TRTDET_KSERVE names its
    Python."""
    import numpy as np
    from test_open_inference import OUTPUTS, tensors

    python = os.environ.get("TRTDET_KSERVE", shutil.which("python3"))
    if subprocess.run([python, "-c", "import kserve"], capture_output=True, check=False).returncode:
        pytest.skip(f"needs kserve, which '{python}' lacks: pip install kserve, and TRTDET_KSERVE=its Python")
    batch, expected = tensors(case.bundles[0], case, 2)
    np.save(tmp_path / "batch.npy", batch)
    with serve("--grpc-port", 0) as server:
        if "built without gRPC" in server.log.read_text():
            pytest.skip("built without gRPC")
        name = case.bundles[0].name
        (declared,) = server.call("GET", f"/v2/models/{name}").json["inputs"]
        command = [python, "-c", KSERVE, f"http://127.0.0.1:{server.port}", grpc_address(server), name]
        shown = finished(*command, declared["name"], tmp_path / "batch.npy", timeout=PATIENCE).stdout
    told = json.loads(shown.splitlines()[-1])
    assert (told["live"], told["ready"], told["model"], told["grpc model"]) == (True, True, True, True)
    for way in ("http", "grpc"):
        for output in OUTPUTS:
            got, wanted = np.array(told[way][output]), getattr(expected, output)
            for index, count in enumerate(expected.num_dets[:, 0]):
                rows = int(count) if output != "num_dets" else 1
                np.testing.assert_allclose(got[index, :rows], wanted[index, :rows], rtol=0, atol=0.01)


def perf_analyzer(folder):
    """The program and the environment that it runs in: what TRTDET_PERF_ANALYZER names, else that of a wheel with the
    libraries that it is linked with, in a folder of its own."""
    if named := os.environ.get("TRTDET_PERF_ANALYZER", shutil.which("perf_analyzer")):
        return named, dict(os.environ)
    wheels = "tritonclient==2.50.0", "nvidia-cuda-runtime-cu12"
    install = sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder, *wheels
    done = subprocess.run(list(map(str, install)), capture_output=True, text=True, check=False, timeout=300)
    program, libraries = folder / "bin" / "perf_analyzer", [str(one.parent) for one in folder.rglob("libcudart.so.12")]
    if done.returncode or not program.is_file() or not libraries:
        pytest.skip(f"needs perf_analyzer, which could not be had: pip install {' '.join(wheels)}")
    environment = {**os.environ, "LD_LIBRARY_PATH": ":".join(libraries)}
    if "not found" in subprocess.run(["ldd", program], capture_output=True, text=True, env=environment).stdout:
        pytest.skip("needs a library of perf_analyzer: apt-get install libb64-0d")
    return str(program), environment


@pytest.mark.slow
@pytest.mark.parametrize("way", ["http", "grpc"])
def test_tritons_perf_analyzer_measures_and_reads_what_the_server_did(serve, case, tmp_path, way):
    from test_open_inference import tensors

    program, environment = perf_analyzer(tmp_path / "perf_analyzer")
    with serve("--grpc-port", 0) as server:
        if "built without gRPC" in server.log.read_text():
            pytest.skip("built without gRPC")
        name = case.bundles[0].name
        address = grpc_address(server) if way == "grpc" else f"127.0.0.1:{server.port}"
        (declared,) = server.call("GET", f"/v2/models/{name}").json["inputs"]
        (tmp_path / "inputs").mkdir()
        tensors(case.bundles[0], case, 1)[0].tofile(tmp_path / "inputs" / declared["name"])
        measured = "--concurrency-range", "1:8:7", "-p", 500, "-r", 3, "-s", 1000, "--input-data", tmp_path / "inputs"
        command = program, "-m", name, "-i", way, "-u", address, *measured, "-f", tmp_path / "table.csv"
        shown = finished(*command, timeout=2 * PATIENCE, env=environment).stdout
        assert server.metrics()["trtdet_images_total"] > 0
    table = list(csv.DictReader((tmp_path / "table.csv").read_text().splitlines()))
    assert [row["Concurrency"] for row in table] == ["1", "8"], shown
    for row in table:
        assert float(row["Inferences/Second"]) > 0
        assert float(row["Server Compute Infer"]) > 0
