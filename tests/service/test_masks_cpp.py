"""Masks by the C++ library and the service: pasted as Python pastes them, by a process with no Python in it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import onnx.parser
import pytest
from models import RCNN
from numpy.typing import NDArray
from PIL import Image
from serving import ONNXRUNTIME, handmade, turned

from service.tests.record import record
from trtdet.building import build
from trtdet.bundle import Bundle
from trtdet.data.images import preprocess, read_image
from trtdet.demo import shapes
from trtdet.detection.masks import from_run_lengths, paste
from trtdet.options import BuildOptions
from trtdet.runtime.detector import Detector

TWO_STAGE = Path(__file__).parents[1] / "fixtures" / "two_stage"
SIDE, CELLS, ROWS = 32, 28, 3


def only_edges(got: NDArray[np.bool_], want: NDArray[np.bool_]) -> bool:
    """Whether masks differ at most at pixels that have one of the object and one of none beside them."""
    inside, outside = (cv2.erode(part.astype(np.uint8), np.ones((3, 3))) > 0 for part in (want, ~want))
    return bool(got[inside].all() and not got[outside].any() and (got != want).sum() <= max(1, 0.001 * want.size))


def pixels_as_masks() -> onnx.ModelProto:
    """A network whose masks, boxes and scores are an image's own pixels."""
    cells = ROWS * CELLS * CELLS
    return onnx.parser.parse_model(f"""
        <ir_version: 8, opset_import: ["" : 17]>
        masks (float[1, 3, {SIDE}, {SIDE}] images) => (
            int32[1, 1] num_dets, float[1, {ROWS}, 4] boxes, float[1, {ROWS}] scores, int32[1, {ROWS}] classes,
            float[1, {ROWS}, {CELLS}, {CELLS}] masks
        ) <
            int64[2] flat = {{1, {3 * SIDE * SIDE}}}, int64[1] begin = {{0}}, int64[1] axis = {{1}},
            int64[1] masks_end = {{{cells}}}, int64[1] boxes_end = {{{cells + 2 * ROWS}}},
            int64[1] scores_end = {{{cells + 3 * ROWS}}},
            int64[4] masks_shape = {{1, {ROWS}, {CELLS}, {CELLS}}}, int64[3] corners_shape = {{1, {ROWS}, 2}},
            float unit = {{{1 / 255}}}, float side = {{{SIDE / 255}}}, float[2] extent = {{13.3, 9.1}},
            int32[1, 1] count = {{{ROWS - 1}}}, int32[1, {ROWS}] names = {{{", ".join(map(str, range(ROWS)))}}}
        > {{
            pixels = Reshape (images, flat)
            mask_pixels = Slice (pixels, begin, masks_end, axis)
            box_pixels = Slice (pixels, masks_end, boxes_end, axis)
            score_pixels = Slice (pixels, boxes_end, scores_end, axis)
            mask_levels = Reshape (mask_pixels, masks_shape)
            masks = Mul (mask_levels, unit)
            corner_levels = Reshape (box_pixels, corners_shape)
            corners = Mul (corner_levels, side)
            others = Add (corners, extent)
            boxes = Concat <axis = 2> (corners, others)
            raw_scores = Mul (score_pixels, unit)
            scores = Add (raw_scores, unit)
            num_dets = Identity (count)
            classes = Identity (names)
        }}
    """)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return handmade(
        tmp_path_factory.mktemp("masks") / "bundle",
        pixels_as_masks(),
        "native",
        classes=list("abc"),
        placed={"resize": "letterbox-centre"},
        nms={"max_detections": ROWS, "score_threshold": 0.0},
        masks={"output": "masks", "size": CELLS, "threshold": 0.5},
    )


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Of several sizes, smooth, so that masks are shapes."""
    folder, made = tmp_path_factory.mktemp("images"), []
    for seed, (width, height) in enumerate(((SIDE, SIDE), (200, 150), (61, 240))):
        small = np.random.default_rng(seed).integers(0, 256, (9, 9, 3), dtype=np.uint8)
        made.append(folder / f"{seed}.png")
        Image.fromarray(cv2.resize(small, (width, height), interpolation=cv2.INTER_CUBIC)).save(made[-1])
    return made


def check_masks(image: Mapping[str, Any], bundle: Path, pixels: NDArray[np.uint8]) -> int:
    """Compares one image of an answer with what Python makes of the network's outputs; returns the pixels inside."""
    detector = Detector.open(bundle, runtime="onnxruntime")
    masks = Bundle(bundle).manifest.masks
    threshold = masks.threshold if masks else 0.5
    inputs, placement = preprocess(pixels, detector.input)
    raw = detector.runner(inputs[None])
    assert len(image["detections"]) == raw["num_dets"][0, 0]
    boxes = placement.to_image(raw["boxes"][0])
    inside = 0
    for box, mask, one in zip(boxes, raw["masks"][0], image["detections"], strict=False):
        np.testing.assert_allclose(one["box"], box, rtol=0, atol=0.01)
        assert one["mask"]["size"] == list(pixels.shape[:2])
        want = paste(mask, np.array(one["box"], np.float32), *pixels.shape[:2], threshold)
        assert only_edges(from_run_lengths(one["mask"]), want)
        inside += int(want.sum())
    return inside


@pytest.mark.parametrize("recorded", [False, True])
def test_the_service_gives_the_masks_that_python_gives(start, bundle, images, tmp_path, recorded):
    recording = tmp_path / "masks.recording"
    if recorded:
        record(bundle, images, recording, runtime="onnxruntime")
    with start(bundle, *(("--recording", recording) if recorded else ())) as server:
        for file in images:
            image = server.detect(file.read_bytes(), kind="image/png").json["images"][0]
            assert len(image["detections"]) == ROWS - 1
            assert check_masks(image, bundle, read_image(file)) > 20
        assert server.call("GET", "/v1/model").json["masks"] == {"size": CELLS, "threshold": 0.5}
        plain = server.detect(images[0].read_bytes(), "?masks=false", kind="image/png").json["images"][0]
        assert [set(one) for one in plain["detections"]] == [{"box", "score", "class", "name"}] * (ROWS - 1)
        assert server.detect(images[0].read_bytes(), "?masks=maybe", kind="image/png").error == "bad-query"


@pytest.mark.slow
def test_a_mask_rcnn_is_served_without_python(start, tmp_path):
    """torchvision's own, as its newer exporter writes it: boxes and masks are those of Python."""
    bundle, file = tmp_path / "rcnn", tmp_path / "image.png"
    build(TWO_STAGE / "mask_dynamo.onnx", RCNN, bundle, BuildOptions(precision="fp32", backend="onnxruntime"))
    Image.fromarray(shapes.render(shapes.DEFAULT_SEED, "masks", 0)[0]).save(file)
    detector = Detector.open(bundle, runtime="onnxruntime")
    raw = detector.runner(preprocess(read_image(file), detector.input)[0][None])
    found = int(raw["num_dets"][0, 0])
    # Whatever the weights are, half of all probabilities are above it.
    manifest = json.loads((bundle / "manifest.json").read_text())
    manifest["masks"]["threshold"] = float(np.median(raw["masks"][0, :found]))
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    with start(bundle) as server:
        image = server.detect(file.read_bytes(), kind="image/png").json["images"][0]
        assert found > 0
        assert check_masks(image, bundle, read_image(file)) > 20
        assert "python" not in Path(f"/proc/{server.process.pid}/maps").read_text().replace(str(ONNXRUNTIME), "")


def test_masks_are_turned_with_the_image(start, bundle, images):
    with start(bundle, "--exif-orientation") as server:
        answer = server.detect(turned(images[1]), kind="image/png").json["images"][0]
        assert (answer["width"], answer["height"]) == (200, 150)
        assert check_masks(answer, bundle, read_image(images[1])) > 20


def test_tensors_have_masks_as_the_network_gives_them(start, bundle, images):
    triton = pytest.importorskip("tritonclient.http", reason="pip install tritonclient[http]")
    detector = Detector.open(bundle, runtime="onnxruntime")
    inputs = preprocess(read_image(images[1]), detector.input)[0][None]
    expected = detector.runner(inputs)["masks"]
    with start(bundle) as server, triton.InferenceServerClient(f"127.0.0.1:{server.port}") as client:
        described = client.get_model_metadata(Bundle(bundle).path.name)["outputs"][-1]
        assert described == {"name": "masks", "datatype": "FP32", "shape": [-1, ROWS, CELLS, CELLS]}
        for binary in (True, False):
            given = triton.InferInput("images", list(inputs.shape), "FP32")
            given.set_data_from_numpy(inputs, binary_data=binary)
            wanted = [triton.InferRequestedOutput(name, binary_data=binary) for name in ("masks", "num_dets")]
            got = client.infer("bundle", [given], outputs=wanted)
            masks = got.as_numpy("masks").reshape(expected.shape)
            np.testing.assert_array_equal(masks[:, : ROWS - 1], expected[:, : ROWS - 1])
            assert not masks[:, ROWS - 1 :].any()
