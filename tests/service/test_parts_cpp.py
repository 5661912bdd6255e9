"""Masks, keypoints and rotated boxes by the C++ library and the service, against Python on 40 images of each task."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from parts_model import config_of, network
from PIL import Image
from serving import ONNXRUNTIME, failed_start, turned

from service.tests.record import record
from trtdet.building import build
from trtdet.data.images import preprocess, read_image
from trtdet.detection.masks import from_run_lengths
from trtdet.options import BuildOptions, NmsOptions
from trtdet.runtime.detector import Detector

IMAGES = 40


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Of several sizes, larger and smaller than the input, wide and high."""
    folder, made, rng = tmp_path_factory.mktemp("images"), [], np.random.default_rng(1)
    for index in range(IMAGES):
        width, height = (int(side) for side in rng.integers(20, 400, 2))
        small = rng.integers(0, 256, (9, 9, 3), dtype=np.uint8)
        made.append(folder / f"{index}.png")
        Image.fromarray(cv2.resize(small, (width, height), interpolation=cv2.INTER_CUBIC)).save(made[-1])
    return made


def made(task: str, mode: Any, folder: Path) -> Path:
    onnx.save(network(task), folder / "model.onnx")
    options = BuildOptions(precision="fp32", backend="onnxruntime", nms=NmsOptions(mode=mode))
    return build(folder / "model.onnx", config_of(task), folder / "bundle", options).bundle.path


def check(image: Mapping[str, Any], detector: Detector, pixels: NDArray[np.uint8]) -> tuple[int, float]:
    """Compares one image of an answer with what Python finds, in all its parts.

    Returns the number of detections, and the pixels of their masks as a share of their boxes, summed.
    """
    inputs, transform = preprocess(pixels, detector.input)
    found = detector(inputs[None])
    boxes, scores, classes = found.image(0)
    boxes = transform.to_image(boxes)
    placed = detector.placed(found, 0, boxes=boxes, transform=transform)
    rows = image["detections"]
    assert [row["class"] for row in rows] == classes.tolist()

    def close(key: str, wanted: NDArray[np.float32], tolerance: float = 0.01) -> None:
        np.testing.assert_allclose([row[key] for row in rows], wanted, rtol=0, atol=tolerance)

    if rows:
        close("box", boxes)
        close("score", scores, 1e-6)
        assert all(("keypoints" in row) == (placed.keypoints is not None) for row in rows)
        assert all(("rotated_box" in row) == (placed.rotated_boxes is not None) for row in rows)
        assert all(("mask" in row) == (placed.masks is not None) for row in rows)
        if placed.keypoints is not None:
            close("keypoints", placed.keypoints)
        if placed.rotated_boxes is not None:
            rotated = np.array([row["rotated_box"] for row in rows])
            np.testing.assert_allclose(rotated[:, :4], placed.rotated_boxes[:, :4], rtol=0, atol=0.01)
            np.testing.assert_allclose(rotated[:, 4], placed.rotated_boxes[:, 4], rtol=0, atol=1e-4)
    share = 0.0
    for row, box, mask in zip(rows, boxes, placed.masks or (), strict=False):
        assert row["mask"]["size"] == list(pixels.shape[:2])
        got = from_run_lengths(row["mask"])
        # A pixel may lie within a rounding of the threshold.
        assert (got & mask).sum() > 0.999 * (got | mask).sum() or (got != mask).sum() <= 1
        share += float(mask.sum() / max(np.prod(box[2:] - box[:2]), 1))
    return len(rows), share


@pytest.mark.parametrize("mode", ["host", "native"])
@pytest.mark.parametrize("task", ["seg", "pose", "obb", "all"])
def test_the_service_gives_what_python_gives(task, mode, start, images, tmp_path):
    bundle = made(task, mode, tmp_path)
    detector, manifest = (
        Detector.open(bundle, runtime="onnxruntime"),
        json.loads((bundle / "manifest.json").read_text()),
    )
    assert manifest["schema"] == 2
    total, share = 0, 0.0
    with start(bundle) as server:
        for file in images:
            answer = server.detect(file.read_bytes(), kind="image/png")
            assert answer.status == 200, answer.body
            counted = check(answer.json["images"][0], detector, read_image(file))
            total, share = total + counted[0], share + counted[1]
        facts = server.call("GET", "/v1/model").json
        assert (facts["masks"] is not None) == ("masks" in manifest["parts"])
        assert facts["rotated_boxes"] == ("rotated_boxes" in manifest["parts"])
        if "keypoints" in manifest["parts"]:
            assert facts["keypoints"] == {"names": list("abcd"), "skeleton": [[0, 1], [2, 3]]}
        else:
            assert facts["keypoints"] is None
    assert total > 3 * IMAGES
    assert 0.2 * total < share < 0.8 * total or "masks" not in manifest["parts"]


def test_a_recording_has_all_parts(start, images, tmp_path):
    bundle = made("all", "host", tmp_path)
    record(bundle, images[:5], tmp_path / "recording", runtime="onnxruntime")
    detector = Detector.open(bundle, runtime="onnxruntime")
    with start(bundle, "--recording", tmp_path / "recording", "--exif-orientation") as server:
        for file in images[:5]:
            answer = server.detect(turned(file), kind="image/png").json["images"][0]
            assert check(answer, detector, read_image(file))[0] > 0


def test_odd_manifests_and_queries_are_refused(program, start, images, tmp_path):
    bundle = made("all", "host", tmp_path)
    text = (bundle / "manifest.json").read_text()
    with start(bundle) as server:
        picture = images[0].read_bytes()
        plain = server.detect(picture, "?masks=false", kind="image/png").json["images"][0]["detections"]
        assert plain and all(set(row) == {"box", "score", "class", "name", "keypoints", "rotated_box"} for row in plain)
        assert server.detect(picture, "?keypoints=false", kind="image/png").error == "bad-query"
    for change, said in (
        ({"schema": 3}, "'schema' is 3, and this libtrtdet reads 1 and 2"),
        ({"schema": 1}, "'parts' belongs to schema 2, and 'schema' is 1"),
        (
            {"parts": {"depth": {"output": "depth"}}},
            "'parts' has the key 'depth', and this libtrtdet reads masks, keypo",
        ),
        ({"parts": {}}, "'parts' has none of masks, keypoints and rotated_boxes"),
        ({"parts": {"rotated_boxes": {"output": "boxes"}}}, "'boxes', which is not float32 (batch, rows, 5)"),
    ):
        (bundle / "manifest.json").write_text(json.dumps(json.loads(text) | change))
        line = failed_start(program("serve/trtdet-serve"), bundle, "--library-folder", ONNXRUNTIME)
        assert said in line


@pytest.mark.parametrize("mode", ["host", "native"])
def test_tensors_have_the_parts_as_the_network_gives_them(mode, start, images, tmp_path):
    triton = pytest.importorskip("tritonclient.http", reason="pip install tritonclient[http]")
    bundle = made("all", mode, tmp_path)
    detector = Detector.open(bundle, runtime="onnxruntime")
    inputs = preprocess(read_image(images[1]), detector.input)[0][None]
    found = detector(inputs)
    count = int(found.num_dets[0, 0])
    with start(bundle) as server, triton.InferenceServerClient(f"127.0.0.1:{server.port}") as client:
        described = {one["name"]: one["shape"] for one in client.get_model_metadata(bundle.name)["outputs"]}
        given = triton.InferInput("images", list(inputs.shape), "FP32")
        given.set_data_from_numpy(inputs)
        got = client.infer(bundle.name, [given])
        assert got.as_numpy("num_dets") == count > 0
        for name, value in found.parts.items().items():
            array = got.as_numpy(name)
            assert described[name] == [-1, *value.shape[1:]]
            if name != "prototypes":
                assert not array[:, count:].any()
                array, value = array[:, :count], value[:, :count]
            np.testing.assert_array_equal(array, value)
