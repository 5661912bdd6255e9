"""Files of the tiny detector, with images and annotations."""

import json

import numpy as np
import onnx
import pytest
from models import for_onnxruntime, small_detector
from PIL import Image
from tiny_detector import CLASSES, CONFIG, Tiny, tiny_detector

from trtdet.demo import shapes


@pytest.fixture(scope="session")
def wide(tmp_path_factory):
    """A detector of which two convolutions have the channels for INT8."""
    path = tmp_path_factory.mktemp("wide") / "wide.onnx"
    onnx.save(small_detector(width=16), path)
    return path


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    files = Tiny(folder / "tiny.onnx", folder / "tiny.yaml", folder / "images", folder / "annotations.json")
    onnx.save(tiny_detector(), files.model)
    files.yaml.write_text(CONFIG)
    files.images.mkdir()
    rng = np.random.default_rng(1)
    entries, boxes = [], []
    for number in range(12):
        name = f"{number:02}.png"
        # Distinct ranges: which images are held back shows in the corrections.
        pixels = rng.integers(0, 20 * (number + 1), (16, 16, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(files.images / name)
        entries.append({"id": number + 1, "file_name": name, "width": 16, "height": 16})
        boxes.append(
            {"id": number + 1, "image_id": number + 1, "category_id": 1, "bbox": [2, 2, 8, 8], "area": 64, "iscrowd": 0}
        )
    categories = [{"id": index + 1, "name": f"c{index}"} for index in range(CLASSES)]
    files.annotations.write_text(json.dumps({"images": entries, "annotations": boxes, "categories": categories}))
    return files


@pytest.fixture
def options(tiny):
    return for_onnxruntime(images=tiny.images, int8_all=True)


@pytest.fixture(scope="session")
def images(tmp_path_factory):
    """A folder of 12 drawn images."""
    return shapes.generate(tmp_path_factory.mktemp("shapes"), "calibration", 12).images
