"""A detector of five convolutions, which is built quickly."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from nets import net

from trtdet.config import Config, load_config

CLASSES = 3

CONFIG = """
name: tiny
classes: [c0, c1, c2]
input: {size: [16, 16], scale: 0.01, resize: stretch}
head: {decode: boxes, outputs: [boxes, scores], boxes: cxcywh}
nms: {score_threshold: 0.01}
"""


def tiny_detector(seed: int = 0) -> onnx.ModelProto:
    """64 boxes, each side the expectation of a softmax, as in detectors with distribution focal loss."""
    rng = np.random.default_rng(seed)

    channels = CLASSES + 4 * 4
    shapes = ((8, 3, 3, 3), (8, 1, 3, 3), (8, 1, 3, 3), (channels, 8, 1, 1))
    weights = {f"w{index}": rng.normal(0, 0.3, shape).astype(np.float32) for index, shape in enumerate(shapes)}
    model = net(
        f"""(float[1,3,16,16] image) => (float[1,64,4] boxes, float[1,64,{CLASSES}] scores)
        <int64[2] parts = {{{CLASSES}, 16}}, int64[4] by_side = {{1, 4, 4, 64}}, int64[3] sides = {{1, 4, 64}},
        int64[3] flat = {{1, {CLASSES}, 64}}, float stride = {{3.0}}, float[1,4,1,1] bins = {{0, 1, 2, 3}}> {{
            stem = Conv<strides = [2, 2], pads = [1, 1, 1, 1]>(image, w0)
            relu_0 = Relu(stem)
            depthwise_0 = Conv<group = 8, pads = [1, 1, 1, 1]>(relu_0, w1)
            relu_1 = Relu(depthwise_0)
            depthwise_1 = Conv<group = 8, pads = [1, 1, 1, 1]>(relu_1, w2)
            head = Conv(depthwise_1, w3)
            class_map, box_map = Split<axis = 1>(head, parts)
            class_rows = Reshape(class_map, flat)
            sigmoid = Sigmoid(class_rows)
            scores = Transpose<perm = [0, 2, 1]>(sigmoid)
            sides_and_bins = Reshape(box_map, by_side)
            bins_first = Transpose<perm = [0, 2, 1, 3]>(sides_and_bins)
            softmax = Softmax<axis = 1>(bins_first)
            expectation = Conv(softmax, bins)
            four = Reshape(expectation, sides)
            pixels = Mul(four, stride)
            boxes = Transpose<perm = [0, 2, 1]>(pixels)
        }}""",
        **weights,
    )
    for node in model.graph.node:
        node.name = node.output[0]
    onnx.checker.check_model(model)
    return model


@dataclass(frozen=True)
class Tiny:
    """The detector as files."""

    model: Path
    yaml: Path  # its configuration
    images: Path  # a folder of 12 images of noise
    annotations: Path  # their COCO file

    @property
    def labelled(self) -> dict[str, Path]:
        """The options of annotated images."""
        return {"val_images": self.images, "annotations": self.annotations}

    @property
    def config(self) -> Config:
        return load_config(str(self.yaml))
