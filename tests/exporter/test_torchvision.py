"""Detectors of torchvision; with ``pip install torchvision``, in the build for the torch that is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install 'trtdet[export]'")

from trtdet.config import COCO_CLASSES, Config, load_config  # noqa: E402
from trtdet.errors import ConfigError, ModelError  # noqa: E402
from trtdet.exporter import ExportOptions, export, torchvision_models  # noqa: E402


def test_sources_that_are_not_allowed(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"torchvision:fasterrcnn_resnet50_fpn is not allowed, .* of one stage"):
        export("torchvision:fasterrcnn_resnet50_fpn", tmp_path / "m.onnx")
    with pytest.raises(ModelError, match=r"torchvision:ssd300_vgg16 needs its weights, .* --weights FILE.pth"):
        export("torchvision:ssd300_vgg16", tmp_path / "m.onnx")


def test_a_package_that_cannot_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(name: str) -> Any:
        raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr(torchvision_models.importlib, "import_module", failing)
    with pytest.raises(
        ModelError, match=r"cannot be imported \(operator .*\); install it with: pip install torchvision"
    ):
        torchvision_models.load("ssd300_vgg16", ExportOptions(random_weights=True))


def test_the_columns_of_coco_are_the_categories_that_it_gave() -> None:
    columns = torchvision_models._coco_columns()
    assert len(columns) == 80 and columns[0] == 1 and columns[-1] == 90
    # Published ids of some categories (instances_val2017.json).
    ids = dict(zip(COCO_CLASSES, columns, strict=True))
    assert (ids["stop sign"], ids["dining table"], ids["toilet"], ids["book"], ids["toothbrush"]) == (
        13,
        67,
        70,
        84,
        90,
    )


@pytest.fixture
def detection() -> Any:
    try:
        from torchvision.models import detection
    except Exception as error:  # a build for another torch fails in many ways
        pytest.skip(f"builds networks of torchvision, which cannot be imported ({error}): pip install torchvision")
    return detection


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["retinanet_resnet50_fpn", "fcos_resnet50_fpn", "ssdlite320_mobilenet_v3_large", "ssd300_vgg16"]
)
def test_decoding_is_that_of_the_package(detection: Any, name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = getattr(detection, name)(weights=None, weights_backbone=None, num_classes=4).eval()
    for key, value in model.head.named_parameters():
        if key.endswith("bias"):
            value.data.normal_(0, 0.5)
    torch.save(model.state_dict(), tmp_path / "w.pth")
    size = (320, 320) if "320" in name else (300, 300) if "300" in name else (96, 128)
    config = Config.model_validate(
        load_config("yolov8").model_dump()
        | {"classes": ("a", "b", "c"), "head": {"decode": "boxes"}, "input": {"size": size, "name": "images"}}
    )
    options = ExportOptions(config=config, weights=tmp_path / "w.pth")
    report = export(f"torchvision:{name}", tmp_path / "m.onnx", options)
    assert report.detections is not None and report.detections.torch > 0
    x = torch.rand(1, 3, *size)
    session = ort.InferenceSession(str(tmp_path / "m.onnx"), providers=["CPUExecutionProvider"])
    boxes, scores = session.run(["boxes", "scores"], {"images": x.numpy()})
    from torchvision.models.detection.image_list import ImageList

    with torch.no_grad():
        found = model.backbone(x)
        features = [found] if isinstance(found, torch.Tensor) else list(found.values())
        given = model.head(features)
        (anchors,) = model.anchor_generator(ImageList(x, [size]), features)
        coder, numbers = model.box_coder, given["bbox_regression"][0]
        expected = coder.decode(numbers, anchors) if name.startswith("fcos") else coder.decode_single(numbers, anchors)
        logits = given["cls_logits"]
        wanted = logits.softmax(-1) if name.startswith("ssd") else logits.sigmoid()
        if name.startswith("fcos"):
            wanted = (wanted * given["bbox_ctrness"].sigmoid()).sqrt()
    np.testing.assert_allclose(boxes[0], expected.numpy(), atol=0.05, rtol=1e-3)
    np.testing.assert_allclose(scores, wanted[..., 1:].numpy(), atol=1e-4)


@pytest.mark.slow
def test_the_configuration_of_the_published_weights(detection: Any, tmp_path: Path) -> None:
    options = ExportOptions(random_weights=True)
    export("torchvision:ssdlite320_mobilenet_v3_large", tmp_path / "m.onnx", options)
    config = load_config(tmp_path / "m.yaml")
    assert config.classes == COCO_CLASSES and config.input.size == (320, 320) and config.input.resize == "stretch"
    assert config.input.mean == (0.5, 0.5, 0.5) and config.nms.iou_threshold == 0.55
    with pytest.raises(ConfigError, match="have 4 columns of scores, which have no names"):
        name = "ssdlite320_mobilenet_v3_large"
        model = detection.ssdlite320_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=4)
        torch.save(model.state_dict(), tmp_path / "w.pth")
        torchvision_models.load(name, ExportOptions(weights=tmp_path / "w.pth"))
