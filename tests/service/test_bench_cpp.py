"""trtdet-bench on a recorded engine."""

import json

import pytest
from PIL import Image
from serving import finished

from trtdet.bundle import Bundle


@pytest.fixture
def bench(program, case):
    path = program("bench/trtdet-bench")
    bundle = case.bundles[0]
    recording = case.recordings / f"{Bundle(bundle).manifest.content_hash}.recording"
    first = [path, bundle, "--recording", recording, "--seconds", 0.5, "--warm-up", 0.1]

    def call(*options: object, code: int = 0) -> str:
        done = finished(*first, *options, code=code)
        assert code != 1 or done.stderr.count("\n") == 1
        return done.stderr if code else done.stdout

    return call


@pytest.fixture
def pictures(case, tmp_path):
    """The recorded images in a folder of their own, beside a file that is none."""
    for picture in case.pictures:
        (tmp_path / picture.file.name).write_bytes(picture.data)
    (tmp_path / "notes.txt").write_text("no image")
    return tmp_path


def test_it_measures_the_engine_and_clients(bench, pictures, case):
    given = ("--images", pictures, "--recording-time", 5)
    found = json.loads(bench(*given, "--clients", 1, 8, "--max-batch", 4, "--json"))
    assert found["ran_on"] == f"a recording of {len(case.pictures)} images"
    assert found["images"] == f"{len(case.pictures)} files, decoded each time"
    assert [row["batch"] for row in found["engine"]] == [1, 4, 8]
    assert [row["clients"] for row in found["clients"]] == [1, 8]
    for row in (*found["engine"], *found["clients"]):
        ms = row["latency_ms"]
        assert 5 <= ms["p50"] <= ms["p95"] <= ms["p99"]
        assert ms["mean"] >= 5
        assert row["runs"] >= 1
    # A run is not shorter than the recording says, so that many images in a second means batches.
    assert found["engine"][0]["throughput"] <= 200
    assert found["clients"][0]["mean_batch"] == 1
    assert 1 < found["clients"][1]["mean_batch"] <= 4


def test_it_prints_a_table(bench, pictures):
    table = bench("--images", pictures, "--clients", 2)
    assert "engine alone, copies included" in table
    assert "p99 ms" in table


def test_a_recording_is_enough(bench, case):
    found = json.loads(bench("--clients", 2, "--json"))
    assert found["images"] == f"{len(case.pictures)} images of the recording, which need no decoding"
    assert [row["clients"] for row in found["clients"]] == [2]


def test_what_it_cannot_do_is_one_line(bench, program, tmp_path):
    assert "has no .jpg, .jpeg or .png files" in bench("--images", tmp_path, code=1)
    # A grey image was not recorded.
    Image.new("RGB", (64, 64), (1, 2, 3)).save(tmp_path / "grey.png")
    assert bench("--images", tmp_path, code=1).startswith("trtdet-bench: the recording has no image")
    bench("--clients", 0, code=2)
    assert "is not a bundle" in finished(program("bench/trtdet-bench"), tmp_path, code=1).stderr
