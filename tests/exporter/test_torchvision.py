"""Detectors of torchvision; with ``pip install torchvision``, in the build for the torch that is installed."""

import importlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from exported import run

torch = pytest.importorskip("torch", reason="needs torch: pip install 'trtdet[export]'")

from trtdet.config import COCO_CLASSES, Config, InputConfig, load_config  # noqa: E402
from trtdet.errors import ConfigError, ModelError  # noqa: E402
from trtdet.exporter import ExportOptions, export, torchvision_models, trials  # noqa: E402
from trtdet.passes import Options, rewrite  # noqa: E402

SHAPES_RCNN = Path(__file__).parents[1] / "fixtures" / "shapes_rcnn"


def test_sources_that_are_not_allowed(tmp_path):
    said = r"torchvision:keypointrcnn_resnet50_fpn is not allowed, allowed are .*maskrcnn"
    with pytest.raises(ModelError, match=said):
        export("torchvision:keypointrcnn_resnet50_fpn", tmp_path / "m.onnx")
    with pytest.raises(ConfigError, match=r"torchvision:maskrcnn_resnet50_fpn is exported for one image at a time"):
        export("torchvision:maskrcnn_resnet50_fpn", tmp_path / "m.onnx", ExportOptions(dynamic_batch=True))
    with pytest.raises(ModelError, match=r"torchvision:ssd300_vgg16 needs its weights, .* --weights FILE.pth"):
        export("torchvision:ssd300_vgg16", tmp_path / "m.onnx")


def test_a_package_that_cannot_be_imported(tmp_path, monkeypatch):
    def failing(name: str) -> Any:
        raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr(torchvision_models.importlib, "import_module", failing)
    said = r"cannot be imported \(operator .*\); install it with: pip install torchvision"
    with pytest.raises(ModelError, match=said):
        torchvision_models.load("ssd300_vgg16", ExportOptions(random_weights=True))


def test_the_columns_of_coco_are_the_categories_that_it_gave():
    columns = torchvision_models._COCO_COLUMNS
    assert len(columns) == 80 and columns[0] == 1 and columns[-1] == 90
    # Published ids of some categories (instances_val2017.json).
    ids = dict(zip(COCO_CLASSES, columns, strict=True))
    published = {"stop sign": 13, "dining table": 67, "toilet": 70, "book": 84, "toothbrush": 90}
    assert {name: ids[name] for name in published} == published


def test_a_configuration_of_two_stages_has_the_thresholds_of_the_models_own_suppression():
    heads = SimpleNamespace(score_thresh=0.3, nms_thresh=0.4, detections_per_img=50)
    transform = SimpleNamespace(image_mean=[0.5, 0.5, 0.5], image_std=[0.2, 0.2, 0.2])
    model = SimpleNamespace(roi_heads=heads, transform=transform)
    nms = torchvision_models._configuration("maskrcnn_resnet50_fpn", model, 91).nms
    assert (nms.score_threshold, nms.suppresses, nms.max_detections) == (0.3, False, 50)


@pytest.fixture
def detection():
    try:
        from torchvision.models import detection
    except Exception as error:  # a build for another torch fails in many ways
        pytest.skip(f"builds networks of torchvision, which cannot be imported ({error}): pip install torchvision")
    return detection


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["retinanet_resnet50_fpn", "fcos_resnet50_fpn", "ssdlite320_mobilenet_v3_large", "ssd300_vgg16"]
)
def test_decoding_is_that_of_the_package(detection, name, tmp_path):
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
    boxes, scores = run(tmp_path / "m.onnx", ["boxes", "scores"], images=x.numpy())
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
def test_the_configuration_of_the_published_weights(detection, tmp_path):
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


def two_stage(detection: Any, name: str, columns: int, given: InputConfig) -> Any:
    torch.manual_seed(0)
    return spread(getattr(detection, name)(weights=None, weights_backbone=None, num_classes=columns), given)


def spread(model: Any, given: InputConfig) -> Any:
    """Random weights whose scores spread: of the features as they come, objectness is one number for all anchors, and
    which of them are proposals is left to rounding."""
    model.eval()
    norms = [module for module in model.modules() if isinstance(module, torch.nn.BatchNorm2d)]
    for norm in norms:
        norm.momentum = None
        norm.train()
    with torch.no_grad():
        model.backbone(torch.from_numpy(np.stack([trials.picture(given, seed) for seed in range(4)])))
        model.rpn.head.cls_logits.weight.normal_(0, 0.2)
        predictor = model.roi_heads.box_predictor
        predictor.cls_score.weight.normal_(0, 1.0)
        predictor.cls_score.bias.normal_(0, 1.0)
        predictor.bbox_pred.weight *= 5
    return model.eval()


@pytest.mark.slow
def test_a_detector_of_two_stages_finds_what_the_package_finds(detection, tmp_path):
    name = "fasterrcnn_mobilenet_v3_large_320_fpn"
    config = Config.model_validate(
        {
            "name": name,
            "classes": ("a", "b", "c"),
            "input": {"size": (128, 160), "name": "images"},
            "head": {"decode": "detections"},
            "nms": "none",
        }
    )
    model = two_stage(detection, name, 4, config.input)
    torch.save(model.state_dict(), tmp_path / "w.pth")
    options = ExportOptions(config=config, weights=tmp_path / "w.pth", opset=18)
    report = export(f"torchvision:{name}", tmp_path / "m.onnx", options)
    names = ["boxes", "labels", "scores"]
    assert [output.name for output in onnx.load(tmp_path / "m.onnx").graph.output] == names
    assert [check.name for check in report.outputs] == ["objectness", "deltas", "logits", "regression"]
    assert report.detections is not None and report.detections.torch > 10 and report.detections.ties == 0
    assert "each stage on the model's own values" in report.notes[-1]
    x = torch.from_numpy(trials.picture(config.input, 7))[None]
    found = dict(zip(names, run(tmp_path / "m.onnx", names, images=x.numpy()), strict=True))
    # The whole of torchvision's detector, given an image that it neither resizes nor normalises.
    model.transform.min_size, model.transform.max_size = (128,), 160
    model.transform.image_mean, model.transform.image_std = [0.0] * 3, [1.0] * 3
    with torch.no_grad():
        (wanted,) = model(list(x))
    assert len(wanted["scores"]) > 5
    # Scores that differ by their last bits alone stand in any order.
    apart = np.abs(found["boxes"][None] - wanted["boxes"].numpy()[:, None]).max(2)
    order = (apart + 1e3 * (found["labels"][None] != wanted["labels"].numpy()[:, None])).argmin(1)
    assert sorted(order) == list(range(len(found["scores"])))
    found = {key: value[order] for key, value in found.items()}
    np.testing.assert_allclose(found["boxes"], wanted["boxes"].numpy(), atol=0.01)
    np.testing.assert_allclose(found["scores"], wanted["scores"].numpy(), atol=1e-4)
    np.testing.assert_array_equal(found["labels"], wanted["labels"].numpy())
    # Its two levels have one scale, so that no region is of the second.
    (left,) = rewrite(onnx.load(tmp_path / "m.onnx"), Options(config, "native")).left
    assert "merge_levels" in left and "a region may be of levels [0]" in left


@pytest.mark.slow
@pytest.mark.usefixtures("detection")
@pytest.mark.parametrize("exporter", ["torchscript", "dynamo"])
def test_a_detector_of_two_stages_from_a_factory(exporter, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(SHAPES_RCNN)
    train = importlib.import_module("train")
    torch.manual_seed(0)
    model = spread(train.detector(), train.CONFIG.input)
    torch.save(model.state_dict(), tmp_path / "w.pth")
    options = ExportOptions(config=train.CONFIG, weights=tmp_path / "w.pth", exporter=exporter)
    report = export("train:detector", tmp_path / "m.onnx", options)
    assert report.detections is not None and report.detections.torch > 10 and report.detections.ties == 0
    assert [output.name for output in onnx.load(tmp_path / "m.onnx").graph.output][3:] == ["masks"]
    with pytest.raises(ConfigError, match=r"train:detector is exported for one image at a time"):
        export("train:detector", tmp_path / "m.onnx", replace(options, dynamic_batch=True))


@pytest.mark.slow
def test_the_classes_of_coco_are_those_that_it_gave(detection, tmp_path):
    name = "maskrcnn_resnet50_fpn"
    scaled = {"mean": (123.675, 116.28, 103.53), "std": (58.395, 57.12, 57.375)}
    model = two_stage(detection, name, 91, InputConfig(size=(128, 128), **scaled))
    # Published weights have batch normalisations without a count of batches, and are run without their epsilon.
    state = {key: value for key, value in model.state_dict().items() if not key.endswith("num_batches_tracked")}
    torch.save(state, tmp_path / "w.pth")
    report = export(
        f"torchvision:{name}", tmp_path / "m.onnx", ExportOptions(weights=tmp_path / "w.pth", size=(128, 128))
    )
    assert report.detections is not None and report.detections.torch > 10
    assert report.detections.ties == 0 and report.detections.max_score < 1e-4 and report.detections.max_box < 0.01
    config = load_config(tmp_path / "m.yaml")
    assert config.classes == COCO_CLASSES and config.input.size == (128, 128)
    assert (config.nms.score_threshold, config.nms.suppresses, config.nms.max_detections) == (0.05, False, 100)
    rewritten = rewrite(onnx.load(tmp_path / "m.onnx"), Options(config, "native"))
    assert rewritten.model.graph.output[-1].name == "masks" and rewritten.left == ()
    image = np.random.default_rng(0).random((1, 3, 128, 128), np.float32)
    (labels,) = run(tmp_path / "m.onnx", ["labels"], images=image)
    assert labels.min() >= 1 and labels.max() <= 80
