"""The tiny detector as files, with images and annotations."""

from __future__ import annotations

import json

import numpy as np
import onnx
import pytest
from PIL import Image
from tiny_detector import CLASSES, CONFIG, Tiny, tiny_detector


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    folder = tmp_path_factory.mktemp("tiny")
    found = Tiny(folder / "tiny.onnx", folder / "tiny.yaml", folder / "images", folder / "annotations.json")
    onnx.save(tiny_detector(), found.model)
    found.yaml.write_text(CONFIG)
    found.images.mkdir()
    rng = np.random.default_rng(1)
    entries, boxes = [], []
    for number in range(12):
        name = f"{number:02}.png"
        # Distinct ranges: which images are held back shows in the corrections.
        pixels = rng.integers(0, 20 * (number + 1), (16, 16, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(found.images / name)
        entries.append({"id": number + 1, "file_name": name, "width": 16, "height": 16})
        boxes.append(
            {"id": number + 1, "image_id": number + 1, "category_id": 1, "bbox": [2, 2, 8, 8], "area": 64, "iscrowd": 0}
        )
    categories = [{"id": index + 1, "name": f"c{index}"} for index in range(CLASSES)]
    found.annotations.write_text(json.dumps({"images": entries, "annotations": boxes, "categories": categories}))
    return found
