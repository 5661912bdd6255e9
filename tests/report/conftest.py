from pathlib import Path

import pytest
from models import SMALL_MODEL

from trtdet import build, load_config
from trtdet.demo import shapes
from trtdet.options import BuildOptions, CalibrationOptions, PlanOptions


@pytest.fixture(scope="session")
def bundle(once):
    """A bundle for onnxruntime, with a ranking whose first three convolutions are in FP16."""

    def make(folder: Path) -> None:
        calibration = CalibrationOptions(rule="minmax", images=shapes.generate(folder, "calibration", 4).images)
        plan = PlanOptions(keep_fp16=3, rank_images=1, int8_all=True)
        options = BuildOptions(effort="none", backend="onnxruntime", calibration=calibration, plan=plan)
        build(SMALL_MODEL, load_config("shapes"), folder / "b", options)

    return once("reported", make) / "b"
