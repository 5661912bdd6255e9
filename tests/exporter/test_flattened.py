"""Raw maps of a YOLOX head, and those that were flattened in a wrong order."""

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from trtdet.config import load_config
from trtdet.detection.heads import decode
from trtdet.exporter import ExportOptions, onnx_file
from trtdet.exporter.flattened import before_flattening
from trtdet.passes import Options, load_model, raw_outputs

SIZE = (64, 96)
SIDES = {8: (8, 12), 16: (4, 6), 32: (2, 3)}


def network(*, transposed: bool, channels: int = 85) -> onnx.ModelProto:
    """Three convolutions whose maps are flattened and joined, as exporters do, with or without a transpose."""
    rng = np.random.default_rng(0)
    nodes, tensors, rows = [], [], []
    for stride, (height, width) in SIDES.items():
        weights = rng.normal(0, 0.02, (channels, 3, stride, stride)).astype(np.float32) / stride
        tensors += [numpy_helper.from_array(weights, f"w{stride}")]
        nodes += [helper.make_node("Conv", ["x", f"w{stride}"], [f"m{stride}"], strides=[stride, stride])]
        order, shape = f"m{stride}", [height * width, channels, 1]
        if transposed:
            nodes += [helper.make_node("Transpose", [order], [f"t{stride}"], perm=[2, 3, 1, 0])]
            order = f"t{stride}"
        tensors += [numpy_helper.from_array(np.array(shape), f"s{stride}")]
        nodes += [helper.make_node("Reshape", [order, f"s{stride}"], [f"r{stride}"])]
        rows += [f"r{stride}"]
    nodes += [helper.make_node("Concat", rows, ["joined"], axis=0)]
    nodes += [helper.make_node("Transpose", ["joined"], ["output"], perm=[2, 0, 1])]
    cells = sum(height * width for height, width in SIDES.values())
    inputs = [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1, 3, *SIZE])]
    outputs = [helper.make_tensor_value_info("output", onnx.TensorProto.FLOAT, [1, cells, channels])]
    graph = helper.make_graph(nodes, "maps", inputs, outputs, tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)


def run(model: onnx.ModelProto) -> dict[str, Any]:
    import onnxruntime as ort

    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    image = np.random.default_rng(1).uniform(0, 1, (1, 3, *SIZE)).astype(np.float32)
    return dict(zip([output.name for output in session.get_outputs()], session.run(None, {"x": image}), strict=True))


def test_maps_flattened_in_a_wrong_order_are_read_before_that(tmp_path):
    wrong, right = tmp_path / "wrong.onnx", tmp_path / "right.onnx"
    onnx.save(network(transposed=False), str(wrong))
    onnx.save(network(transposed=True), str(right))
    config, note = onnx_file.guess(wrong, load_model(wrong), ExportOptions())
    assert config.head.outputs == ("m8", "m16", "m32") and config.head.strides == (8, 16, 32)
    assert "flattens maps without a transpose" in note and config.input.color == load_config("yolox").input.color
    cut, config = raw_outputs(load_model(wrong), Options(config))
    usual, _ = onnx_file.guess(right, load_model(right), ExportOptions())
    assert usual.head.decode == "yolox" and usual.head.outputs is None
    read, expected = decode(run(cut), config), decode(run(network(transposed=True)), usual)
    for array, other in zip(read, expected, strict=True):
        np.testing.assert_allclose(array, other, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("scores", ["logits", "probabilities"])
def test_maps_that_are_outputs_are_a_head(scores):
    rng = np.random.default_rng(0)
    maps = {
        f"m{stride}": rng.normal(0, 2, (1, 85, *sides)).astype(np.float32) for stride, sides in reversed(SIDES.items())
    }
    if scores == "probabilities":
        for array in maps.values():
            array[:, 4:] = 1 / (1 + np.exp(-array[:, 4:]))
    config, _ = onnx_file.guessed(maps, SIZE, "m", "x", classes=None)
    assert config.head.decode == "boxes" and config.head.compute is not None
    assert ("sigmoid" in config.head.compute["scores"]) == (scores == "logits")
    boxes, found = decode(maps, config)
    assert boxes.shape == (1, 126, 4) and found.shape == (1, 126, 80)
    assert found.min() >= 0 and found.max() <= 1


def test_what_is_no_such_head_is_left():
    assert before_flattening(network(transposed=True)) is None
    with pytest.raises(onnx_file.UnknownHead):  # 3 anchors of 85 channels
        maps = {f"m{stride}": np.zeros((1, 255, *sides), np.float32) for stride, sides in SIDES.items()}
        onnx_file.guessed(maps, SIZE, "m", "x", classes=None)
