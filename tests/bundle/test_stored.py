"""Bundles that earlier versions wrote open, detect what they did, and are read by every command."""

import json
import tarfile

import numpy as np
import pytest
import stored

import trtdet
from trtdet.bundle import Bundle
from trtdet.cli import main
from trtdet.evaluation.matching import iou


@pytest.fixture(params=sorted(stored.FOLDER.glob("*.tar.xz")), ids=lambda path: path.name.split(".")[0])
def earlier(request, tmp_path):
    with tarfile.open(request.param) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / request.param.name.split(".")[0]


def test_it_opens_with_the_schema_of_its_time_and_detects_the_same(earlier):
    manifest = Bundle(earlier).manifest
    assert f"schema{manifest.schema_}" == earlier.name
    expected = json.loads((earlier.parent / stored.EXPECTED).read_text())
    (result,) = trtdet.Detector.open(earlier).predict(earlier.parent / stored.PICTURE, score_threshold=stored.THRESHOLD)
    scores = np.array(expected["scores"])
    sure = scores > 0.7 * scores.max()  # near a threshold kernels of another version may differ
    for box, label in zip(np.array(expected["boxes"])[sure], np.array(expected["classes"])[sure], strict=True):
        assert (
            iou(box[None], result.boxes[result.classes == label], np.zeros((result.classes == label).sum(), bool)) > 0.9
        ).any()
    assert (result.keypoints is not None) == (manifest.schema_ == 2)


@pytest.mark.parametrize("command", [["report", "-o", "page.html"], ["bench", "--seconds", "0.1"]])
def test_commands_read_it(earlier, command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    name, *options = command
    assert main([name, str(earlier), *options]) == 0, capsys.readouterr().err


def test_a_bundle_without_an_engine_is_not_audited(earlier, capsys):
    assert main(["audit", str(earlier)]) == 1
    assert "has no engine to audit, as onnxruntime runs the model itself; build it with" in capsys.readouterr().err


def test_a_later_schema_is_refused_with_what_to_do(earlier):
    path = earlier / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema": 3}))
    with pytest.raises(trtdet.TrtdetError, match="this trtdet reads schemas 1 and 2"):
        Bundle(earlier)
