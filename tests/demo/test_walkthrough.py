"""What ``trtdet demo`` measures, and what it prints, as README shows it."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trtdet.calibration import RULES
from trtdet.demo import walkthrough
from trtdet.demo.walkthrough import Demo, DemoRow, run_demo
from trtdet.runtime.saving import Saved

README = Path(__file__).parents[2] / "README.md"


def shown() -> str:
    """The first block of text of README."""
    found = re.search(r"```text\n(variant .*?)\n```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    return found[1]


def test_the_table_of_the_demo_is_printed_as_readme_shows_it():
    lines = shown().splitlines()
    rows = []
    for line in lines[2 : lines.index("")]:
        variant, figures = line[: line.index("  ")], line[line.index("  ") :].split()
        loss = -float(figures.pop(2)) / 100 if variant != "FP32" else 0.0
        score, score50, int8, others, size = map(float, figures)
        counts = {"int8_convs": int(int8), "float_convs": int(others), "engine_mb": size}
        rows.append(DemoRow(variant, map=score / 100, map50=score50 / 100, loss=loss, bundle="", **counts))
    (backend,) = re.findall(r"for calibration, (.*)", shown())
    pictures = Saved(Path("demo/pictures/detections.jsonl"), pictures=(), videos=())
    assert Demo(tuple(rows), folder=Path("demo"), backend=backend, pictures=pictures).table().text() == shown()


def test_the_differences_that_readme_shows_are_those_of_its_scores():
    rows = [line.split() for line in shown().splitlines()[3:] if line.startswith("INT8")]
    reference = float(shown().splitlines()[2].split()[1])
    for row in rows:
        score, _, loss = (float(figure) for figure in row[-6:-3])
        assert abs(score - reference - loss) < 0.011


def test_a_row_has_the_score_the_loss_and_the_convolutions_of_its_bundle(tmp_path, monkeypatch):
    """Of bundles that are neither built nor run."""

    def build(model: Path, config: Any, place: Path, options: Any, progress: Any) -> Any:
        counts = {"int8": 0, "fp16": 0, "fp32": 9} if place.name == "fp32" else {"int8": 4, "fp16": 3, "fp32": 2}
        backend = SimpleNamespace(name="a backend", version="1.0")
        manifest = SimpleNamespace(audit=None, precision=SimpleNamespace(**counts), backend=backend)
        return SimpleNamespace(bundle=SimpleNamespace(manifest=manifest, engine=None))

    scores = iter([0.5, 0.48, *[0.4] * len(RULES)])
    detector = SimpleNamespace(predict=lambda paths, stream: iter(()))
    for name, stand_in in {
        "CALIBRATION_IMAGES": 1,
        "VALIDATION_IMAGES": 1,
        "build": build,
        "Detector": SimpleNamespace(open=lambda place: detector),
        "evaluate": lambda *given, **named: SimpleNamespace(result=SimpleNamespace(map=next(scores), map50=0.6)),
        "save_predictions": lambda predictions, place: Saved(place / "detections.jsonl", (), ()),
    }.items():
        monkeypatch.setattr(walkthrough, name, stand_in)
    demo = run_demo(tmp_path)
    assert [row.variant for row in demo.rows] == ["FP32", "INT8", *(f"INT8 {rule} alone" for rule in RULES)]
    assert [row.loss for row in demo.rows] == pytest.approx([0.0, 0.02, *[0.1] * len(RULES)])
    assert [(row.int8_convs, row.float_convs) for row in demo.rows] == [(0, 9), *[(4, 5)] * (1 + len(RULES))]
    assert json.loads((tmp_path / "results.json").read_text()) == demo.as_dict()
    assert (tmp_path / "results.txt").read_text() == demo.table().text() + "\n"
