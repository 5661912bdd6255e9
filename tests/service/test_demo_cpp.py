"""The last step of ``make demo``, as the README shows it."""

import json
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from serving import finished, shapes_bundle

from trtdet.demo import shapes

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_demo_ends_with_the_answer_of_the_readme(program, tmp_path):
    """With the demo's model in float32, whose detections are near those of INT8."""
    shapes.generate(tmp_path / "demo" / "data", "val", 1)
    bundle = Path("demo", "bundles", "int8")
    shapes_bundle(tmp_path / bundle)
    image = Path("demo", "data", "val", "000001.png")
    service = program("serve/trtdet-serve")
    output = finished(ROOT / "service" / "demo.sh", service, sys.executable, bundle, image, cwd=tmp_path).stdout
    first, command, answer = output.split("\n")[1:4]
    (shown,) = re.findall(r"^```text\ntrtdet-serve: (.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    said, asked, answered = shown.splitlines()
    assert first.startswith("trtdet-serve: http://127.0.0.1:")
    assert re.sub(r"[\d.:]+", "", said.partition(",")[0]) in re.sub(r"[\d.:]+", "", first)
    assert re.sub(r":\d+", "", command) == re.sub(r":\d+", "", asked)
    (got,), (wanted,) = (json.loads(text)["images"] for text in (answer, answered))
    assert (got["width"], got["height"]) == (wanted["width"], wanted["height"])
    assert [row["name"] for row in got["detections"]] == [row["name"] for row in wanted["detections"]]
    for row, other in zip(got["detections"], wanted["detections"], strict=True):
        np.testing.assert_allclose(row["box"], other["box"], rtol=0, atol=3)
        assert row["score"] == pytest.approx(other["score"], abs=0.1)
