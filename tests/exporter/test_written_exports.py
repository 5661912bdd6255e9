"""Files that the exporters themselves wrote, without their weights, which are drawn anew: taken as they are.

Written by ``benchmarks/make_exports.py --emptied tests/fixtures/exports``; those of PaddleDetection 2.6 by its
tools/export_model.py, and Paddle2ONNX 1.2.11.
"""

import lzma
import math
import zlib
from pathlib import Path

import numpy as np
import onnx
import pytest
from benchmark_exports import differing, opened

from trtdet.errors import TrtdetError
from trtdet.evaluation.guessing import guess_config

FIXTURES = Path(__file__).parents[1] / "fixtures" / "exports"

EXPORTS = {
    "mmdeploy-retinanet-r18": "an export of MMDeploy, 80 classes: its suppression is cut off",
    "mmdeploy-rtmdet-tiny-dynamic": "an export of MMDeploy, 80 classes: its suppression is cut off",
    "mmpose-rtmo-t": "an export of MMDeploy, 1 class: its suppression is cut off",
    "mmpose-yolox-pose-tiny": "an export of MMDeploy, 1 class: its suppression is cut off",
    "tensorflow-ssd": "an export of TensorFlow's object detection, 20 classes: its suppression is cut off",
    "tensorflow-models-ssd": "an export of TensorFlow's object detection, 6 classes: its suppression is cut off",
    "deim-dfine-n": "an export of RT-DETR, D-FINE or DEIM, 80 classes: its selection of the best is cut off",
    "paddle-picodet-xs": "an export of PaddleDetection, 80 classes: its suppression is cut off",
    "paddle-yolov3": "an export of PaddleDetection, 80 classes: its suppression is cut off",
    "torchvision-fcos-small": "an export of torchvision, 6 classes: its suppression is cut off",
    "torchvision-retinanet-small": "an export of torchvision, 6 classes: its suppression is cut off",
    "torchvision-ssdlite320": "an export of torchvision, 20 classes: its suppression is cut off",
    "yolov5-face": "decode boxes, 1 class",
    "yolov5-plate": "decode boxes, 2 classes",
    "yolov6n-end2end-ort": "an export of YOLO end to end, 80 classes: its suppression is cut off",
    "yolov6n-end2end-trt": "an export of YOLO end to end, 80 classes: its suppression is cut off",
    "yolov7-end2end-ort": "80 classes: its suppression is cut off",
    "yolov7-end2end-trt": "an export of YOLO end to end, 80 classes: its suppression is cut off",
}
"""What is said of each file."""

LARGE = ("mmdeploy-retinanet-r18", "paddle-yolov3")

VARIANCE = {
    "mmdeploy-retinanet-r18": 1.0,
    "mmdeploy-rtmdet-tiny-dynamic": 1.0,
    "mmpose-rtmo-t": 1.0,
    "mmpose-yolox-pose-tiny": 1.0,
    "tensorflow-ssd": 1.0,
    "tensorflow-models-ssd": 1.0,
}
"""Of drawn weights, times the number of inputs, where 1.85 gives scores that are all 1."""


def filled(name: str, folder: Path) -> Path:
    """The file with weights of the same spread in all layers, drawn by their names."""
    model = onnx.load_from_string(lzma.decompress((FIXTURES / f"{name}.onnx.xz").read_bytes()))
    constants = [(node.output[0], node.attribute[0].t) for node in model.graph.node if node.op_type == "Constant"]
    for key, tensor in [*((tensor.name, tensor) for tensor in model.graph.initializer), *constants]:
        size = math.prod(tensor.dims)
        if tensor.data_type == onnx.TensorProto.FLOAT and size and not (tensor.raw_data or tensor.float_data):
            inputs = size // tensor.dims[0] if len(tensor.dims) == 4 else tensor.dims[0]
            rng = np.random.default_rng(zlib.crc32(key.encode()))
            tensor.raw_data = rng.normal(0, (VARIANCE.get(name, 1.85) / inputs) ** 0.5, size).astype("<f4").tobytes()
    path = folder / f"{name}.onnx"
    path.write_bytes(model.SerializeToString())
    return path


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in LARGE else []) for name in EXPORTS]
)
def test_detections_are_those_of_the_file(name, tmp_path):
    path = filled(name, tmp_path)
    guess = guess_config(path, size=opened(path))
    assert EXPORTS[name] in guess.note
    total, wrong, _, _ = differing(path, guess.config, pictures=1)
    assert (total > 0, wrong) == (True, 0)


def test_raw_maps_of_anchors_are_named(tmp_path):
    with pytest.raises(TrtdetError, match="raw maps of three anchors a cell, whose sizes the model does not hold"):
        guess_config(filled("yolov7-raw-maps", tmp_path))


def test_boxes_and_scores_of_levels_in_different_orders_are_not_cut_off(tmp_path):
    path = filled("torchvision-retinanet-small", tmp_path)
    model = onnx.load(str(path))
    boxes = next(node for node in model.graph.node if node.name == "/Concat_10")
    boxes.input[:] = list(boxes.input)[::-1]
    onnx.save(model, str(path))
    with pytest.raises(TrtdetError, match="its boxes are decoded level by level after the best were selected"):
        guess_config(path)


def test_the_size_is_that_to_which_the_graph_resizes(tmp_path):
    path = filled("tensorflow-models-ssd", tmp_path)
    guess = guess_config(path)
    assert guess.config.input.size == (160, 160)
    assert guess.config.nms.max_detections == 100
    assert "the loop over the images of the batch, which has one image, is written out" in guess.note


def test_suppressions_of_some_classes_only_are_not_cut_off(tmp_path):
    path = filled("tensorflow-models-ssd", tmp_path)
    model = onnx.load(str(path))
    last = [node for node in model.graph.node if node.op_type == "NonMaxSuppression"][-1]
    first = next(node for node in model.graph.node if node.op_type == "NonMaxSuppression")
    last.input[1] = first.input[1]
    onnx.save(model, str(path))
    with pytest.raises(TrtdetError, match="embeds several NMS nodes"):
        guess_config(path)
