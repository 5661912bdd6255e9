"""Checkpoints of ultralytics. The package is AGPL-3.0 and heavy: with ``pip install ultralytics`` the tests that build
its networks run too."""

import copy
import importlib.util
import sys
import time
import types
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from exported import run

torch = pytest.importorskip("torch", reason="needs torch: pip install 'trtdet[export]'")

from trtdet.config import load_config  # noqa: E402
from trtdet.demo.shapes import generate  # noqa: E402
from trtdet.detection.heads import decode_all  # noqa: E402
from trtdet.errors import ConfigError, ModelError  # noqa: E402
from trtdet.exporter import ExportOptions, export, ultralytics_models  # noqa: E402

installed = importlib.util.find_spec("ultralytics") is not None
needs_the_package = pytest.mark.skipif(
    not installed, reason="builds networks of ultralytics, which is not installed: pip install ultralytics"
)

DESCRIPTION: dict[str, Any] = {
    "nc": 2,
    "backbone": [[-1, 1, "Conv", [8, 3, 2]], [-1, 2, "nn.Upsample", [None, 2, "nearest"]]],
    "head": [[[0, 1], 1, "Detect", ["nc"]]],
}


@pytest.fixture
def tasks(monkeypatch):
    """What the description of a network may name, of a package that has a few classes."""
    package = types.ModuleType("ultralytics")
    package.__dict__["__version__"] = "8.0.0"
    monkeypatch.setitem(sys.modules, "ultralytics", package)
    names = {"Conv": "modules", "Detect": "modules", "TorchVision": "modules", "DetectionModel": "tasks"}
    made = {
        name: type(name, (torch.nn.Module,), {"__module__": f"ultralytics.nn.{place}.x"})
        for name, place in names.items()
    }
    return types.SimpleNamespace(**made, colorstr=print)


def _described(**changes: Any) -> dict[str, Any]:
    return copy.deepcopy(DESCRIPTION) | changes


def test_a_description_of_modules_is_accepted(tasks):
    for changes in ({}, {"activation": "nn.SiLU()"}, {"activation": "torch.nn.LeakyReLU(0.1, inplace=True)"}):
        ultralytics_models._check_description(Path("c.pt"), _described(**changes), tasks, package="ultralytics 8")


@pytest.mark.parametrize(
    ("description", "message"),
    [
        ({"activation": "__import__('os').system('true')"}, "has the activation .* expected a module of torch"),
        ({"activation": "nn.SiLU(print(1))"}, "has the activation"),
        ({"activation": "nn.functional()"}, "has the activation"),
        ({"activation": 3}, "has the activation 3"),
        ({"head": []}, "has no lists 'backbone' and 'head'"),
        ({"head": [[-1, 1, "Detect"]]}, r"expected \[from, number, module, args\]"),
        ({"head": [[-1, 1, "colorstr", []]]}, "the module 'colorstr', which is no part of a detector"),
        ({"head": [[-1, 1, "DetectionModel", [{"activation": "exit()"}]]]}, "the module 'DetectionModel'"),
        ({"head": [[-1, 1, "TorchVision", ["resnet18"]]]}, "the module 'TorchVision'"),
        ({"head": [[-1, 1, "nn.init", []]]}, "the module 'nn.init'"),
        ({"head": [[-1, 1, "Detect", [{"a": 1}]]]}, "expected numbers, names and lists"),
        ({"head": [[-1, 10**6, "Detect", []]]}, "expected numbers, names and lists"),
        ({"head": [[-1, 1, "Conv", []]]}, "ends in Conv, allowed are Detect, v10Detect, Segment, "),
        ({"channels": 4}, "takes 4 channels, allowed is 3"),
    ],
)
def test_a_description_that_could_do_more_is_refused(tasks, description, message):
    with pytest.raises(ModelError, match=message):
        ultralytics_models._check_description(Path("c.pt"), _described(**description), tasks, package="ultralytics 8")


def _checkpoint(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that names a class of the package, written without it."""
    module = types.ModuleType("ultralytics.nn.tasks")
    network = type("DetectionModel", (torch.nn.Module,), {"__module__": module.__name__})
    module.__dict__["DetectionModel"] = network
    with monkeypatch.context() as patch:
        for name in ("ultralytics", "ultralytics.nn"):
            patch.setitem(sys.modules, name, types.ModuleType(name))
        patch.setitem(sys.modules, module.__name__, module)
        torch.save({"model": network(), "ema": None}, path)


def test_a_missing_package_is_an_error_with_its_pip_line(tmp_path, monkeypatch):
    _checkpoint(tmp_path / "c.pt", monkeypatch)
    monkeypatch.setitem(sys.modules, "ultralytics", None)
    monkeypatch.setitem(sys.modules, "ultralytics.nn", None)
    with pytest.raises(ModelError, match=r"needs the package ultralytics.*pip install ultralytics \(AGPL-3.0\)"):
        export(f"ultralytics:{tmp_path / 'c.pt'}", tmp_path / "m.onnx")
    assert not (tmp_path / "m.onnx").exists()


def test_the_head_is_chosen_for_ultralytics_alone(tmp_path):
    with pytest.raises(ConfigError, match="--one-to-many chooses a head of a checkpoint of ultralytics"):
        export("shapes", tmp_path / "m.onnx", ExportOptions(one_to_many=True))


def _trained(name: str, path: Path) -> Any:
    """A network of the package with two classes, whose layers give numbers as after training."""
    from ultralytics.nn import tasks

    torch.manual_seed(0)
    kinds = {"seg": tasks.SegmentationModel, "pose": tasks.PoseModel, "obb": tasks.OBBModel}
    kind = kinds.get(name.partition("-")[2], tasks.DetectionModel)
    model = kind(f"{name}.yaml", nc=2, verbose=False)
    model.names = {0: "cat", 1: "dog"}
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 2)
    torch.save({"model": copy.deepcopy(model).half(), "ema": None, "train_args": {"imgsz": 96}}, path)
    return model.eval()


@needs_the_package
@pytest.mark.slow
@pytest.mark.parametrize("name", ["yolov5n", "yolov8n", "yolov9t", "yolov10n", "yolo11n", "yolo12n", "yolo26n"])
def test_a_network_of_the_package_is_exported(name, tmp_path):
    model = _trained(name, tmp_path / "c.pt")
    images = generate(tmp_path / "shapes", "val", 2).images
    report = export(f"ultralytics:{tmp_path / 'c.pt'}", tmp_path / "m.onnx", ExportOptions(images=images))
    config = load_config(tmp_path / "m.yaml")
    assert config.classes == ("cat", "dog") and config.input.size == (96, 96)
    assert report.detections is not None and report.detections.matched + report.detections.ties > 0
    x = torch.rand(1, 3, 96, 96)
    found = run(tmp_path / "m.onnx", images=x.numpy())
    one_to_one = name in ("yolov10n", "yolo26n")
    head = model.half().float().model[-1]
    if one_to_one:
        head.end2end = True
        head.postprocess = lambda decoded, *_: decoded
    with torch.no_grad():
        expected = model(x)[0].numpy()
    assert config.nms.suppresses != one_to_one
    if one_to_one:
        found = [np.concatenate(found, axis=2)]
    np.testing.assert_allclose(found[0], expected, atol=2e-3)
    assert "BatchNormalization" not in {node.op_type for node in onnx.load(str(tmp_path / "m.onnx")).graph.node}


@needs_the_package
@pytest.mark.slow
@pytest.mark.parametrize("task", ["seg", "pose", "obb"])
@pytest.mark.parametrize("family", ["yolov8n", "yolo11n", "yolo26n"])
def test_masks_keypoints_and_rotated_boxes_are_exported(family, task, tmp_path):
    model = _trained(f"{family}-{task}", tmp_path / "c.pt")
    images = generate(tmp_path / "shapes", "val", 2).images
    report = export(f"ultralytics:{tmp_path / 'c.pt'}", tmp_path / "m.onnx", ExportOptions(images=images))
    config = load_config(tmp_path / "m.yaml")
    extra = {"seg": "mask_coefficients", "pose": "keypoints", "obb": "angles"}[task]
    names = [output.name for output in report.outputs]
    one_to_one = family == "yolo26n"
    if one_to_one:
        assert names == ["boxes", "scores", extra, *(["prototypes"] if task == "seg" else [])]
    else:
        assert names == ["output0", *(["output1"] if task == "seg" else [])]
    x = torch.rand(1, 3, 96, 96)
    found = run(tmp_path / "m.onnx", images=x.numpy())
    _, scores, parts = decode_all(found, config)
    head = model.half().float().model[-1]
    if one_to_one:
        head.end2end = True
        head.postprocess = lambda decoded, *_: decoded
    with torch.no_grad():
        expected = model(x)[0]
    rows = expected[0] if isinstance(expected, tuple) else expected
    rows = rows.numpy() if one_to_one else rows.numpy().transpose(0, 2, 1)
    np.testing.assert_allclose(scores, rows[..., 4:6], atol=1e-3)
    if task == "seg":
        np.testing.assert_allclose(parts.mask_coefficients, rows[..., 6:], atol=5e-3)
        np.testing.assert_allclose(parts.prototypes, expected[1].numpy(), atol=5e-3)
    elif task == "pose":
        np.testing.assert_allclose(parts.keypoints.reshape(1, -1, 51), rows[..., 6:], atol=2e-2)
    else:
        np.testing.assert_allclose(parts.rotated_boxes[..., :4], rows[..., :4], atol=2e-2)
        np.testing.assert_allclose(parts.rotated_boxes[..., 4], rows[..., 6], atol=1e-3)
    assert config.head.has_parts and config.nms.suppresses != one_to_one


@needs_the_package
@pytest.mark.slow
def test_the_other_head_a_dynamic_batch_and_a_size(tmp_path):
    _trained("yolo26n", tmp_path / "c.pt")
    source = f"ultralytics:{tmp_path / 'c.pt'}"
    options = ExportOptions(one_to_many=True, dynamic_batch=True, size=(64, 100))
    report = export(source, tmp_path / "m.onnx", options)
    config = load_config(tmp_path / "m.yaml")
    assert config.input.size == (64, 128) and config.head.decode == "yolov8" and config.nms.suppresses
    assert [(output.name, output.shape) for output in report.outputs] == [("output0", (1, 6, 8 * 16 + 4 * 8 + 2 * 4))]
    _trained("yolov8n", tmp_path / "c.pt")
    with pytest.raises(ModelError, match="has a single head, which is one-to-many; leave out --one-to-many"):
        export(source, tmp_path / "m.onnx", options)


@needs_the_package
@pytest.mark.slow
def test_a_network_that_the_package_builds_otherwise_is_refused(tmp_path):
    from ultralytics.nn.tasks import DetectionModel

    model = DetectionModel("yolov8n.yaml", nc=2, verbose=False)
    model.model[0].act = torch.nn.ReLU()
    torch.save({"model": model}, tmp_path / "c.pt")
    with pytest.raises(ModelError, match=r"has another network .* module model.0.act is SiLU, in the file ReLU"):
        export(f"ultralytics:{tmp_path / 'c.pt'}", tmp_path / "m.onnx")
    model.model[0].act = torch.nn.SiLU()
    model.model[0].conv.padding = (0, 0)
    torch.save({"model": model}, tmp_path / "c.pt")
    with pytest.raises(ModelError, match=r"model.0.conv.padding is \(1, 1\), in the file \(0, 0\)"):
        export(f"ultralytics:{tmp_path / 'c.pt'}", tmp_path / "m.onnx")


def test_a_hostile_activation_is_refused_at_once():
    started = time.monotonic()
    assert ultralytics_models._ACTIVATION.fullmatch("nn.SiLU(" + "a" * 4000) is None
    assert time.monotonic() - started < 1
    for text in ("nn.SiLU()", "torch.nn.LeakyReLU(0.1, inplace=True)", "nn.Softplus(beta = 1.0,threshold=20,)"):
        assert ultralytics_models._ACTIVATION.fullmatch(text)
