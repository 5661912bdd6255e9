"""What ``trtdet demo`` prints, as README shows it."""

import re
from pathlib import Path

from trtdet.demo.walkthrough import Demo, DemoRow
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
