"""A trained Mask R-CNN gives torchvision's detections on images of shapes.

tests/fixtures/shapes_rcnn has the model in the form of either exporter; scripts of benchmarks/fixtures made it.
"""

import zlib
from pathlib import Path

import cv2
import numpy as np
import pytest
from models import RCNN

from trtdet.data.images import preprocess
from trtdet.demo import shapes
from trtdet.passes import Options, load_model, rewrite

FOLDER = Path(__file__).parents[1] / "fixtures" / "shapes_rcnn"
MASKS = 6
"""The masks of so many detections of an image were kept, in 65535ths."""


@pytest.fixture(scope="module")
def expected():
    if zlib.crc32(shapes.render(shapes.DEFAULT_SEED, "val", 0)[0]) != 0xBFC37FE9:
        pytest.skip(f"OpenCV {cv2.__version__} draws the shapes otherwise than 5.0, with which torchvision saw them")
    with np.load(FOLDER / "torchvision.npz") as found:
        return dict(found)


def image(index: int) -> np.ndarray:
    pixels, _, _ = shapes.render(shapes.DEFAULT_SEED, "val", index)
    return preprocess(pixels, RCNN.input)[0][None]


def check(got: dict[str, np.ndarray], expected: dict[str, np.ndarray], index: int, prefix: str = "") -> int:
    """Compares an image, and gives the number of its detections."""
    counts = expected[f"{prefix}counts"]
    start, count = int(counts[:index].sum()), int(counts[index])
    assert len(got["scores"]) == count
    boxes, scores, labels = (expected[prefix + name][start : start + count] for name in ("boxes", "scores", "labels"))
    # Scores that differ by their last bits alone stand in any order.
    apart = np.abs(got["boxes"][None] - boxes[:, None]).max(2) + 1e3 * (got["labels"][None] != labels[:, None])
    apart += np.abs(got["scores"][None] - scores[:, None])
    order = apart.argmin(1)
    assert len(set(order.tolist())) == count
    np.testing.assert_allclose(got["boxes"][order], boxes, rtol=0, atol=0.01)
    np.testing.assert_allclose(got["scores"][order], scores, rtol=0, atol=1e-4)
    np.testing.assert_array_equal(got["labels"][order], labels)
    if not prefix:
        first = int(np.minimum(counts[:index], MASKS).sum())
        masks = expected["masks"][first : first + min(count, MASKS)] / 65535
        np.testing.assert_allclose(got["masks"][order[: len(masks)], 0], masks, rtol=0, atol=1e-4)
    return count


def contract(found: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The outputs of a rewritten model as torchvision gives them."""
    count = int(found["num_dets"].reshape(-1)[0])
    rows = {name: found[name][0, :count] for name in ("boxes", "scores", "classes", "masks")}
    return {**rows, "labels": rows["classes"] + 1, "masks": rows["masks"][:, None]}


@pytest.mark.parametrize(
    ("name", "images"),
    [("mask_dynamo", 3), *(pytest.param(f"mask_{form}", 50, marks=pytest.mark.slow) for form in ("dynamo", "trace"))],
)
def test_torchvisions_own_detections_and_masks_are_found(name, images, expected, run):
    exported = load_model(FOLDER / f"{name}.onnx")
    rewritten = rewrite(exported, Options(RCNN, nms="native")).model
    found = 0
    for index in range(images):
        found += check(run(exported, images=image(index)), expected, index)
        check(contract(run(rewritten, images=image(index))), expected, index)
    assert found > 3 * images


@pytest.mark.slow
def test_fewer_proposals_are_those_of_torchvision(expected, run):
    head = RCNN.head.model_copy(update={"rpn_pre_nms_topk": 60, "rpn_post_nms_topk": 25})
    config = RCNN.model_copy(update={"head": head})
    rewritten = rewrite(load_model(FOLDER / "mask_trace.onnx"), Options(config, nms="native")).model
    for index in range(3):
        check(contract(run(rewritten, images=image(index))), expected, index, "fewer_")
