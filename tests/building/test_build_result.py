import warnings

import pytest

from trtdet import BuildOptions, Bundle, CalibrationOptions, build, load_config
from trtdet.demo import shapes
from trtdet.errors import TrtdetWarning
from trtdet.exporter import SHAPES_MODEL


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return shapes.generate(tmp_path_factory.mktemp("data"), "train", 8).images


def test_a_result_is_ten_lines_to_read(images, tmp_path):
    asked = BuildOptions(backend="onnxruntime", effort="none", calibration=CalibrationOptions(images=images))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TrtdetWarning)
        result = build(SHAPES_MODEL, load_config("shapes"), tmp_path / "bundle", asked)
        again = build(SHAPES_MODEL, load_config("shapes"), tmp_path / "bundle", asked)
    assert repr(result.bundle) == repr(Bundle(tmp_path / "bundle"))
    counts = result.bundle.manifest.precision
    assert f"{counts.int8} convolutions in INT8, {counts.fp16} in FP16" in repr(result.bundle)
    for one in (result, again):
        lines = repr(one).splitlines()
        assert lines[0] == "BuildResult"
        assert 2 <= len(lines) <= 10
        assert max(map(len, lines)) <= 102
        assert str(tmp_path / "bundle") in "".join(line.strip() for line in lines)
    assert "up to date" in repr(again)
    assert "up to date" not in repr(result)
