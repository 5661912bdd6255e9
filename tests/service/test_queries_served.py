"""A trained RT-DETR v2, from the export of transformers to the answers of the service, by the commands."""

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from serving import check, pictured

from trtdet.bundle import Bundle
from trtdet.cli import main
from trtdet.demo import shapes

MODEL = Path(__file__).parents[1] / "fixtures" / "detr.onnx"

pytestmark = [pytest.mark.slow, pytest.mark.tensorrt]


@pytest.mark.filterwarnings("ignore:.*faster than FP16:trtdet.errors.TrtdetWarning")
def test_a_detector_without_nms_from_export_to_service(start, tmp_path, capsys):
    def run(*arguments: object) -> Any:
        capsys.readouterr()
        assert main([*map(str, arguments), "--json"]) == 0, capsys.readouterr().err
        return json.loads(capsys.readouterr().out)

    val = shapes.generate(tmp_path / "coco", "val", 24)
    calibration = shapes.generate(tmp_path / "coco", "calibration", 16)
    model, bundle = tmp_path / "rtdetr.onnx", tmp_path / "int8"
    config = ("--config", MODEL.with_suffix(".yaml"))
    run("export", MODEL, *config, "-o", model)
    given = (*config, "--images", calibration.images)
    asked = "--int8 --set plan.fastest=false --effort none --backend tensorrt-rtx --sm 89"
    run("build", model, *given, *asked.split(), "-o", bundle)
    scores = run("eval", bundle, "--against", model, "--images", val.images, "--annotations", val.annotations)
    assert scores["map"] > 0.1
    assert scores["against"]["agreement"]["ap"] > 0.7
    counts = run("audit", bundle)
    assert counts["int8"] > 60
    assert counts["fp32"] == 0
    assert counts["int8"] + counts["fp16"] == sum(Bundle(bundle).manifest.precision.model_dump().values())
    picture = tmp_path / "picture.png"
    Image.fromarray(shapes.render(shapes.DEFAULT_SEED, "val", 0)[0]).save(picture)
    run("predict", bundle, picture, "-o", tmp_path / "found")
    assert {file.name for file in (tmp_path / "found").iterdir()} == {"detections.jsonl", "picture.jpg"}
    with start(bundle) as server:
        answer = server.detect(picture.read_bytes(), kind="image/png")
    content_hash = Bundle(bundle).manifest.content_hash
    (expected,) = pictured(bundle, [picture], runtime="model")
    assert len(expected.found[content_hash].scores) > 0
    check(answer.json["images"][0], expected, content_hash)
