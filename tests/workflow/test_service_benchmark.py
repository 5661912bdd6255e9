"""The script that holds the service against the same engine driven from Python: what is compared, and what is said
where both do not find the same. The service is a stand-in here, and the real one where it was built."""

import importlib.util
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from standin.machine import FOLDER, Finished

from service.tests.record import record
from trtdet.building import build
from trtdet.config import load_config
from trtdet.data import find_images
from trtdet.options import BuildOptions, NmsOptions

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "service.py"

pytestmark = pytest.mark.benchmark


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    """A program that is the stand-in."""
    program = tmp_path_factory.mktemp("service") / "trtdet-serve"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{FOLDER / "serve.py"}" "$@"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return program


@pytest.fixture(scope="module")
def bundle(model, tmp_path_factory):
    options = BuildOptions(precision="fp32", backend="onnxruntime", nms=NmsOptions(mode="host"), batch=(1, 2, 4))
    return build(model, load_config("shapes"), tmp_path_factory.mktemp("bundle") / "bundle", options).bundle.path


@pytest.fixture(scope="module")
def recording(bundle, calibration_images, tmp_path_factory):
    file = tmp_path_factory.mktemp("recording") / "file"
    record(bundle, find_images(calibration_images), file)
    return file


@pytest.fixture(scope="module")
def run(service, calibration_images):
    def call(bundle: Path, *arguments: object, program: Path = service, env: dict[str, str] | None = None) -> Finished:
        quick = ("--clients", 1, 3, "--rounds", 2, "--seconds", 0.2, "--num-images", 6)
        given = (bundle, "--images", calibration_images, "--service", program, *quick, *arguments)
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **(env or {})}
        command = [sys.executable, str(SCRIPT), *map(str, given)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
        return Finished(done.returncode, done.stdout, done.stderr)

    return call


def rows(text: str) -> list[list[str]]:
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| ")
    ]


def check_report(text: str) -> None:
    head, *lines = rows(text)
    assert head[0] == "clients" and [line[0] for line in lines] == ["1", "3"]
    for line in lines:
        numbers = [float(cell) for cell in line[2:11]]
        assert min(numbers[:3]) > 0 and numbers[8] > 0
        _, median, tail, _, _, our_median, our_tail, _, ratio = numbers
        assert median <= tail and our_median <= our_tail
        low, high = map(float, line[11].split(" .. "))
        assert low <= ratio <= high
    found = re.search(r"Detections equal for 6 of 6 images \((\d+) detections\)", text)
    assert found is not None and int(found[1]) > 10
    assert "6 images, 2 lanes, images wait 1000 us for others; 2 rounds of 0.2 s" in text


def test_both_sides_are_timed_and_their_detections_compared(run, bundle, recording, tmp_path):
    done = run(bundle, "--recording", recording, "-o", tmp_path / "out.md").ok
    check_report(done.out)
    assert (tmp_path / "out.md").read_text() == done.out
    assert f"The service ran the recording '{recording}', in-process onnxruntime (CPU)." in done.out
    assert "No engine was run: these times and ratios tell nothing about engines." in done.out


def test_a_server_in_python_is_asked_by_the_same_clients(run, bundle, recording):
    peer = ["--against", "aiohttp", "--peer-workers", 1]
    done = run(bundle, "--recording", recording, *peer, "--", "--max-delay-us", 0).ok
    check_report(done.out)
    assert f"The service ran the recording '{recording}' with --max-delay-us 0, aiohttp onnxruntime " in done.out
    assert " with --workers 1 --intra-op 1." in done.out


@pytest.mark.skipif(
    importlib.util.find_spec("cuda") is None, reason="cuda-python is not installed: pip install 'trtdet[cuda]'"
)
@pytest.mark.parametrize("batch", ["1:2:4", "2"])
def test_the_engine_is_driven_through_lanes(run, machine, model, tmp_path, batch):
    arguments = [model, "--config", "shapes", "--fp32", "--nms", "host", "--batch", batch, "-o", tmp_path / "bundle"]
    assert machine.trtdet("build", *arguments).ok
    done = run(tmp_path / "bundle", env=machine.environment()).ok
    check_report(done.out)
    assert "The service ran the bundle, in-process TensorRT 10.9.0 (Stand-in GPU)." in done.out
    assert "No engine was run" not in done.out


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("count", r"\d+ and \d+ detections"),
        ("class", "other classes, or in another order"),
        ("box", r"boxes by up to 1(\.\d+)? pixels, scores by up to \S+"),
        ("score", r"boxes by up to \S+ pixels, scores by up to 0\.001"),
    ],
)
def test_detections_that_differ_are_named_and_fail_the_run(run, bundle, recording, what, said):
    done = run(bundle, "--recording", recording, "--rounds", 1, env={"SERVE_STANDIN_ALTERS": what})
    assert done.code == 1
    assert "Detections equal for 5 of 6 images" in done.out
    (line,) = [line for line in done.out.splitlines() if line.startswith("- ")]
    assert re.fullmatch(rf"- \S+\.(png|jpg): {said}", line)
    assert done.err.endswith(
        "service.py: error: the service and what it is compared with do not find the same; see the table\n"
    )


@pytest.mark.parametrize(
    ("arguments", "env", "message"),
    [
        ("", {"REFUSES": "trtdet-serve: error: no"}, "the service did not start: trtdet-serve: error: no"),
        ("", {"STATUS": "503@10"}, 'the service answered 503: {"error": {"type": "overloaded", '),
        ("", {"ENDS": "23"}, "the service ended with exit code 23 when it was told to stop: SUMMARY: 1 leak"),
        ("--service missing", {}, "'missing' cannot be started"),
        ("--clients 0", {}, "--clients takes numbers from 1 up, got 0"),
        ("--batch 2", {}, "--batch is for aiohttp, fastapi, grpc; leave out --against in-process"),
        ("--rounds 0", {}, "--rounds takes numbers above 0, got 0"),
        ("--images missing", {}, "'missing'"),
        ("--against fastapi", {}, "--against fastapi needs --fastapi with the site-packages that have fastapi"),
        ("--against aiohttp grpc", {}, "--against grpc needs --grpc-load with the program trtdet-grpc-load"),
    ],
)
def test_what_goes_wrong_is_one_line(run, bundle, recording, arguments, env, message):
    settings = {f"SERVE_STANDIN_{name}": value for name, value in env.items()}
    done = run(bundle, "--recording", recording, *arguments.split(), env=settings)
    assert (done.code, done.out) == (1, "")
    last = done.err.splitlines()[-1]
    assert last.startswith("service.py: error: ") and message in last


@pytest.mark.parametrize("batch", [1, 4])
def test_the_real_service_is_held_to_the_same(run, bundle, recording, batch):
    folder = Path(os.environ.get("TRTDET_SERVICE_BUILD", ROOT / "build" / "service"))
    program = folder / "serve" / "trtdet-serve"
    if not program.is_file():
        pytest.skip(f"needs '{program}', which is not built: make service")
    peer = ("--against", "aiohttp") if batch > 1 else ()
    done = run(bundle, "--recording", recording, "--batch", batch, *peer, program=program).ok
    check_report(done.out)
    assert ("Each request has 4 images" in done.out) == (batch > 1)
