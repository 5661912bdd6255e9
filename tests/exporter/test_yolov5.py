import copy
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from exported import run

torch = pytest.importorskip("torch", reason="needs torch: pip install 'trtdet[export]'")

from trtdet.config import load_config  # noqa: E402
from trtdet.errors import ModelError  # noqa: E402
from trtdet.exporter import ExportOptions, checkpoints, export, yolov5  # noqa: E402

CHECKPOINT = Path(__file__).resolve().parents[1] / "fixtures" / "yolov5_tiny.pt"
"""A checkpoint of the package ``yolov5``, made by the script beside it, with what the package's network gives."""

DESCRIPTION: dict[str, Any] = {
    "nc": 1,
    "depth_multiple": 0.33,
    "width_multiple": 0.125,
    "anchors": [[10, 13, 16, 30], [30, 61, 62, 45]],
    "backbone": [[-1, 1, "Conv", [64, 6, 2, 2]], [-1, 6, "C3", [64]], [-1, 1, "SPP", [64, [3, 5]]]],
    "head": [
        [-1, 1, "Conv", [64, 3, 2]],
        [-1, 1, "nn.Upsample", ["None", 2, "nearest"]],
        [[-1, 0], 1, "Concat", [1]],
        [[-1, 3], 1, "Detect", ["nc", "anchors"]],
    ],
}


def _described(**changes: Any) -> dict[str, Any]:
    return copy.deepcopy(DESCRIPTION) | changes


def test_a_checkpoint_gives_what_its_package_gives(tmp_path):
    report = export(f"yolov5:{CHECKPOINT}", tmp_path / "m.onnx", ExportOptions(size=(64, 70), dynamic_batch=True))
    config = load_config(tmp_path / "m.yaml")
    assert config.classes == ("cat", "dog", "bird") and config.head.decode == "yolov5"
    assert config.input.size == (64, 96), "rounded up to the stride"
    assert report.detections is not None and report.detections.matched > 100 and report.undetected == ""
    image = np.random.default_rng(0).uniform(0, 1, (1, 3, 64, 96)).astype(np.float32)
    (output,) = run(tmp_path / "m.onnx", images=np.concatenate([image, image * 0.5]))
    expected = np.load(CHECKPOINT.with_suffix(".npz"))["output"]
    assert expected.shape == (1, 3 * (8 * 12 + 4 * 6 + 2 * 3), 8)
    np.testing.assert_allclose(output[:1], expected, atol=2e-4)
    assert "BatchNormalization" not in {node.op_type for node in onnx.load(str(tmp_path / "m.onnx")).graph.node}


def test_the_size_is_the_one_it_was_trained_at():
    assert yolov5.load(str(CHECKPOINT), ExportOptions()).config.input.size == (96, 96)


def test_a_description_is_followed():
    model = yolov5.build(_described(activation="nn.LeakyReLU(0.1)"))
    layers = list(model.model)
    assert [type(layer).__name__ for layer in layers] == ["Conv", "C3", "SPP", "Conv", "Upsample", "Concat", "Detect"]
    assert len(layers[1].m) == 2 and layers[1].m[0].add and layers[0].conv.kernel_size == (6, 6)
    assert layers[0].act.negative_slope == 0.1
    assert model.model[-1].stride.tolist() == [2, 4]
    assert model.model[-1].anchors[1].tolist() == [[7.5, 15.25], [15.5, 11.25]]
    with torch.no_grad():
        output = model(torch.rand(2, 3, 32, 64))
    assert output.shape == (2, 2 * (16 * 32 + 8 * 16), 6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation": "__import__('os').getcwd()"}, "has the activation .* allowed are nn.SiLU"),
        ({"activation": "nn.Sequential()"}, "has the activation"),
        (
            {"head": [[-1, 1, "GhostConv", [8]]]},
            "has the module 'GhostConv', allowed are Conv, .* give trtdet the ONNX file",
        ),
        ({"head": [[-1, 1, "Conv", [8]]]}, "ends in Conv, not Detect"),
        ({"head": [[[-1], 1, "Detect", [1, [[1, 2]]]], [-1, 1, "Conv", [8]]]}, "Detect before its last row"),
        ({"backbone": [[-1, 10**9, "C3", [8]]]}, "repeats row 0 1000000000 times"),
        ({"backbone": 5}, "cannot be followed"),
        ({"nc": None}, "cannot be followed"),
        ({"backbone": [[-1, 1, "Conv", [64, "print(1)"]]]}, "cannot be followed"),
    ],
)
def test_a_description_that_cannot_be_followed(changes, message):
    with pytest.raises(ModelError, match=message) as caught:
        yolov5.build(_described(**changes))
    assert "\n" not in str(caught.value)


def test_a_network_other_than_its_description_is_refused(tmp_path, monkeypatch):
    read = checkpoints.read

    def altered(*args: Any) -> Any:
        content = read(*args)
        content["model"].modules["model"].modules["0"].modules["conv"].attributes["padding"] = (3, 3)
        return content

    monkeypatch.setattr(checkpoints, "read", altered)
    said = r"model.0.conv.padding is \(2, 2\), in the file \(3, 3\); expected a checkpoint"
    with pytest.raises(ModelError, match=said):
        export(f"yolov5:{CHECKPOINT}", tmp_path / "m.onnx")
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_of_another_network(tmp_path):
    torch.save({"model": torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1))}, tmp_path / "c.pt")
    with pytest.raises(ModelError, match="cannot be followed .* expected a checkpoint of YOLOv5 6.0 to 7.0"):
        export(f"yolov5:{tmp_path / 'c.pt'}", tmp_path / "m.onnx")
    for content in ({"state_dict": {}}, {"model": {"w": torch.zeros(1)}}):
        torch.save(content, tmp_path / "c.pt")
        said = "holds no network under 'ema' or 'model'; expected a checkpoint of YOLOv5"
        with pytest.raises(ModelError, match=said):
            export(f"yolov5:{tmp_path / 'c.pt'}", tmp_path / "m.onnx")
