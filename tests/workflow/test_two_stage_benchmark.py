"""The benchmark of the rewrites of two-stage detectors, on a small one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.benchmark

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "tests" / "fixtures" / "two_stage" / "faster_trace.onnx"
LEAVE_THE_RESULTS = (
    *("inline_nms_guard", "nms_score_threshold", "fold_post_nms_topk", "merge_levels_static", "merge_levels"),
    "roi_align_sampling (nothing to do)",
)


def test_every_rewrite_has_its_operators_its_times_and_its_difference(tmp_path):
    command = [sys.executable, ROOT / "benchmarks" / "two_stage.py", MODEL, "--size", 128, "--seconds", 0.1]
    done = subprocess.run(
        [*map(str, command), "-o", str(tmp_path / "table.md")],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "table.md").read_text().strip().splitlines()
    assert lines[0] == "### faster_trace.onnx"
    rows = {cells[0]: cells for cells in ([cell.strip() for cell in line.strip("|").split("|")] for line in lines[4:])}
    assert list(rows) == [*LEAVE_THE_RESULTS, "rpn_pre_nms_topk 200", "rpn_post_nms_topk 200"]
    assert [rows[name][6] for name in LEAVE_THE_RESULTS] == ["0"] * len(LEAVE_THE_RESULTS)
    assert "If 2 to 0" in rows["inline_nms_guard"][1]
    assert "ScatterElements 4 to 0" in rows["merge_levels"][1] and "TopK 5 to 6" in rows["merge_levels"][1]
    for cells in rows.values():
        before, after = (int(count) for count in cells[2].split(" to "))
        assert after > 0 and before > 0
        assert float(cells[3]) > 0 and float(cells[4]) > 0
        value, low, high = (float(text.strip("().")) for text in cells[5].replace(" .. ", " ").split())
        assert low <= value <= high
