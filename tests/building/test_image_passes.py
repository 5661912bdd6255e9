"""The passes of a build over its images share the decoded images."""

from pathlib import Path
from typing import Any

import pytest
from models import for_onnxruntime

import trtdet.data.stream
from trtdet import build, load_config
from trtdet.data.images import read_image
from trtdet.demo import shapes
from trtdet.exporter import SHAPES_MODEL
from trtdet.options import changed


@pytest.fixture
def decoded(monkeypatch):
    """The images in the order in which they are decoded."""
    paths: list[Path] = []

    def counted(path: Path) -> Any:
        paths.append(path)
        return read_image(path)

    monkeypatch.setattr(trtdet.data.stream, "read_image", counted)
    return paths


@pytest.mark.slow
def test_a_build_decodes_each_image_once_where_memory_allows_and_its_files_do_not_depend_on_it(
    tmp_path, decoded, monkeypatch
):
    """Histograms, the corrections, and the magnitudes of a convolution that is kept in FP16."""
    split = shapes.generate(tmp_path, "calibration", 4)
    options = for_onnxruntime(
        effort="bias", guard="off", images=split.images, keep_fp16=("/backbone/backbone/stem/conv/conv/Conv",)
    )
    files = [build(SHAPES_MODEL, load_config("shapes"), tmp_path / "kept", options).bundle.manifest.files]
    assert sorted(decoded) == sorted(split.images.iterdir())
    monkeypatch.setattr(trtdet.data.stream, "_LARGEST", 0)
    decoded.clear()
    files.append(build(SHAPES_MODEL, load_config("shapes"), tmp_path / "again", options).bundle.manifest.files)
    assert len(decoded) > 2 * 4, "every pass decodes where nothing can be kept"
    assert files[0] == files[1]


@pytest.mark.slow
def test_a_search_by_map_decodes_each_annotated_image_once(tmp_path, decoded):
    """The float model is scored, then plans by one half of the images, then plans by the other."""
    calibration, annotated = shapes.generate(tmp_path, "calibration", 2), shapes.generate(tmp_path, "val", 4)
    options = for_onnxruntime(effort="none", guard="off", rule="percentile:98", images=calibration.images)
    options = changed(options, max_map_drop=20.0, val_images=annotated.images, annotations=annotated.annotations)
    done = build(SHAPES_MODEL, load_config("shapes"), tmp_path / "b", options)
    assert done.trade_off.evaluations > 4
    assert sorted(decoded) == sorted([*calibration.images.iterdir(), *annotated.images.iterdir()])
