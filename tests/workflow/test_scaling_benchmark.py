"""The script that measures how time and memory grow."""

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "scaling.py"

pytestmark = pytest.mark.benchmark


@pytest.fixture(scope="module")
def scaling():
    spec = importlib.util.spec_from_file_location("scaling", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["scaling"] = module
    spec.loader.exec_module(module)
    return module


def test_a_network_has_so_many_convolutions(scaling):
    model = scaling.chain(12, 64)
    assert sum(node.op_type == "Conv" for node in model.graph.node) == 12
    assert [dim.dim_value for dim in model.graph.output[0].type.tensor_type.shape.dim] == [1, 6, 64]


def test_the_fit_finds_a_constant_and_a_factor(scaling):
    values = np.array([64.0, 512, 1742])
    assert scaling.fit(values, 3 + 0.02 * values) == pytest.approx((3, 0.02))


def test_each_command_is_measured_once(scaling, tmp_path, monkeypatch, capsys):
    pixels = np.random.default_rng(0).integers(0, 256, (6, 20, 30, 3), np.uint8)
    for number, image in enumerate(pixels):
        Image.fromarray(image).save(tmp_path / f"{number}.png")
    images = [{"id": n, "file_name": f"{n}.png", "width": 30, "height": 20} for n in range(6)]
    box = {"category_id": 7, "bbox": [1, 1, 8, 9], "area": 72, "iscrowd": 0}
    boxes = [{**box, "id": n + 1, "image_id": n} for n in range(6)]
    whole = {"images": images, "annotations": boxes, "categories": [{"id": 7, "name": "x"}]}
    (tmp_path / "all.json").write_text(json.dumps(whole))
    for name, value in {"AXES": {"images": (4, 6)}, "FEW": 4, "CALIBRATED": 2, "CONVS": 5, "SIDE": 64}.items():
        monkeypatch.setattr(scaling, name, value)
    command = ["scaling", "--images", tmp_path, "--annotations", tmp_path / "all.json", "-o", tmp_path / "out"]
    monkeypatch.setattr(sys, "argv", [*map(str, command), "--only", "images"])
    scaling.main()
    rows = (tmp_path / "out" / "rows.jsonl").read_text().splitlines()
    assert [(json.loads(row)["command"], json.loads(row)["value"]) for row in rows] == [
        (name, value) for value in (4, 6) for name in ("calibrate", "eval", "prepare", "tune")
    ]
    first = capsys.readouterr().out
    assert "| calibrate | 4 / 6 |" in first
    scaling.main()
    assert (tmp_path / "out" / "rows.jsonl").read_text().splitlines() == rows
    assert capsys.readouterr().out == first
