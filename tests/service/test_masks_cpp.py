"""Masks by the C++ library and the service: pasted as Python pastes them, by a process with no Python in it."""

from __future__ import annotations

import io
import json
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import onnx
import pytest
from models import RCNN
from numpy.typing import NDArray
from PIL import Image
from serving import ONNXRUNTIME, Server

from trtdet.bundle import Bundle, BundleWriter
from trtdet.config import load_config
from trtdet.data.images import preprocess, read_image
from trtdet.demo import shapes
from trtdet.detection.masks import from_run_lengths, paste, run_lengths
from trtdet.pipeline import BuildOptions, build
from trtdet.runtime.detector import Detector
from trtdet.runtime.recordings import record

TWO_STAGE = Path(__file__).parents[1] / "fixtures" / "two_stage"
FIXTURE = Path(__file__).parents[1] / "fixtures" / "pasted_masks.npz"
"""Of tests/fixtures/pasted_masks.py."""
SIDE, CELLS, ROWS = 32, 28, 3


def only_edges(got: NDArray[np.bool_], want: NDArray[np.bool_]) -> bool:
    """Whether masks differ at most at pixels that have one of the object and one of none beside them."""
    inside, outside = (cv2.erode(part.astype(np.uint8), np.ones((3, 3))) > 0 for part in (want, ~want))
    return bool(got[inside].all() and not got[outside].any() and (got != want).sum() <= max(1, 0.001 * want.size))


def pasted_by_probe(
    probe: Path, masks: NDArray[np.float32], boxes: NDArray[np.float32], size: tuple[int, int], threshold: float = 0.5
) -> list[dict[str, Any]]:
    cases = b"".join(
        f"{mask.shape[0]} {size[1]} {size[0]} {threshold}\n".encode() + box.tobytes() + mask.tobytes()
        for mask, box in zip(masks, boxes, strict=True)
    )
    done = subprocess.run([probe, "paste"], input=cases, capture_output=True, check=True)
    return [{"size": list(size), "counts": line} for line in done.stdout.decode().splitlines()]


def test_masks_are_pasted_as_in_torchvision_and_python(program: Callable[[str], Path]) -> None:
    with np.load(FIXTURE) as found:
        boxes, masks, packed = found["boxes"], found["masks"].astype(np.float32), found["pasted"]
    wanted = np.unpackbits(packed, axis=-1, count=120).astype(bool)
    probe = program("tests/trtdet-probe")
    for threshold in (0.5, 0.3):
        got = pasted_by_probe(probe, masks, boxes, wanted.shape[1:], threshold)
        for mask, box, encoded, want in zip(masks, boxes, got, wanted, strict=True):
            decoded = from_run_lengths(encoded)
            assert run_lengths(decoded) == encoded
            assert only_edges(decoded, paste(mask, box, *want.shape, threshold))
            assert threshold != 0.5 or only_edges(decoded, want)


def pixels_as_masks() -> onnx.ModelProto:
    """A network whose masks, boxes and scores are an image's own pixels."""
    cells = ROWS * CELLS * CELLS
    constants = {
        "flat": np.array([1, 3 * SIDE * SIDE]),
        "begin": np.array([0]),
        "masks_end": np.array([cells]),
        "boxes_end": np.array([cells + 2 * ROWS]),
        "scores_end": np.array([cells + 3 * ROWS]),
        "axis": np.array([1]),
        "masks_shape": np.array([1, ROWS, CELLS, CELLS]),
        "corners_shape": np.array([1, ROWS, 2]),
        "unit": np.array(1 / 255, np.float32),
        "side": np.array(SIDE / 255, np.float32),
        "extent": np.array([13.3, 9.1], np.float32),
        "count": np.array([[ROWS - 1]], np.int32),
        "names": np.arange(ROWS, dtype=np.int32)[None],
    }
    node = onnx.helper.make_node
    nodes = [
        node("Reshape", ["images", "flat"], ["pixels"]),
        node("Slice", ["pixels", "begin", "masks_end", "axis"], ["mask_pixels"]),
        node("Slice", ["pixels", "masks_end", "boxes_end", "axis"], ["box_pixels"]),
        node("Slice", ["pixels", "boxes_end", "scores_end", "axis"], ["score_pixels"]),
        node("Reshape", ["mask_pixels", "masks_shape"], ["mask_levels"]),
        node("Mul", ["mask_levels", "unit"], ["masks"]),
        node("Reshape", ["box_pixels", "corners_shape"], ["corner_levels"]),
        node("Mul", ["corner_levels", "side"], ["corners"]),
        node("Add", ["corners", "extent"], ["others"]),
        node("Concat", ["corners", "others"], ["boxes"], axis=2),
        node("Mul", ["score_pixels", "unit"], ["raw_scores"]),
        node("Add", ["raw_scores", "unit"], ["scores"]),
        node("Identity", ["count"], ["num_dets"]),
        node("Identity", ["names"], ["classes"]),
    ]
    float32, int32 = onnx.TensorProto.FLOAT, onnx.TensorProto.INT32
    value = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        nodes,
        "masks",
        [value("images", float32, [1, 3, SIDE, SIDE])],
        [value(name, int32 if kind == "int32" else float32, shape) for name, kind, shape in OUTPUTS],
        [onnx.numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)


OUTPUTS = (
    ("num_dets", "int32", [1, 1]),
    ("boxes", "float32", [1, ROWS, 4]),
    ("scores", "float32", [1, ROWS]),
    ("classes", "int32", [1, ROWS]),
    ("masks", "float32", [1, ROWS, CELLS, CELLS]),
)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made by hand, so that the contract is tested and not the build."""
    path, shape = tmp_path_factory.mktemp("masks") / "bundle", [1, 3, SIDE, SIDE]
    placed = {"size": [SIDE, SIDE], "resize": "letterbox-centre", "scale": 1.0, "mean": [0, 0, 0], "std": [1, 1, 1]}
    nms = {**load_config("shapes").nms.model_dump(), "max_detections": ROWS, "score_threshold": 0.0}
    with BundleWriter(path) as writer:
        writer.add("fp32.onnx", pixels_as_masks().SerializeToString())
        writer.commit(
            {
                "trtdet_version": "0.1.0",
                "model": {"sha256": "0" * 64, "name": "masks", "classes": list("abc")},
                "input": {
                    "name": "images",
                    "dtype": "float32",
                    "shape": dict.fromkeys(("min", "opt", "max"), shape),
                    "preprocess": placed,
                },
                "outputs": [{"name": name, "dtype": kind, "shape": size} for name, kind, size in OUTPUTS],
                "nms": {"where": "native", **nms},
                "masks": {"output": "masks", "size": CELLS, "threshold": 0.5},
                "backend": {"name": "onnxruntime", "version": "1", "sms": []},
                "quantization": {"mode": "none"},
                "precision": {"int8": 0, "fp16": 0, "fp32": 0},
                "audit": None,
                "command": {"precision": "fp32"},
                "portable": "fp32.onnx",
                "content_hash": "0" * 64,
            }
        )
    return path


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Sequence[Path]:
    """Of several sizes, smooth, so that masks are shapes."""
    folder, made = tmp_path_factory.mktemp("images"), []
    for seed, (width, height) in enumerate(((SIDE, SIDE), (200, 150), (61, 240))):
        small = np.random.default_rng(seed).integers(0, 256, (9, 9, 3), dtype=np.uint8)
        made.append(folder / f"{seed}.png")
        Image.fromarray(cv2.resize(small, (width, height), interpolation=cv2.INTER_CUBIC)).save(made[-1])
    return made


@pytest.fixture
def start(program: Callable[[str], Path], tmp_path: Path) -> Callable[..., Server]:
    path = program("serve/trtdet-serve")
    return lambda *options: Server(path, [*options, "--library-folder", ONNXRUNTIME], tmp_path / "server")


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


def test_the_service_gives_the_masks_that_python_gives(
    start: Callable[..., Server], bundle: Path, images: Sequence[Path]
) -> None:
    with start(bundle) as server:
        for file in images:
            image = server.detect(file.read_bytes(), kind="image/png").json["images"][0]
            assert len(image["detections"]) == ROWS - 1
            assert check_masks(image, bundle, read_image(file)) > 20
        assert server.call("GET", "/v1/model").json["masks"] == {"size": CELLS, "threshold": 0.5}
        plain = server.detect(images[0].read_bytes(), "?masks=false", kind="image/png").json["images"][0]
        assert [set(one) for one in plain["detections"]] == [{"box", "score", "class", "name"}] * (ROWS - 1)
        assert server.detect(images[0].read_bytes(), "?masks=maybe", kind="image/png").error == "bad-query"


@pytest.mark.slow
def test_a_mask_rcnn_is_served_without_python(start: Callable[..., Server], tmp_path: Path) -> None:
    """torchvision's own, as its newer exporter writes it: boxes and masks are those of Python."""
    bundle, file = tmp_path / "rcnn", tmp_path / "image.png"
    build(TWO_STAGE / "mask_dynamo.onnx", RCNN, bundle, BuildOptions("fp32", backend="onnxruntime"))
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


def test_masks_are_turned_with_the_image(start: Callable[..., Server], bundle: Path, images: Sequence[Path]) -> None:
    lying, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = 6
    with Image.open(images[1]) as image:
        image.transpose(Image.Transpose.ROTATE_90).save(lying, "PNG", exif=exif)
    with start(bundle, "--exif-orientation") as server:
        answer = server.detect(lying.getvalue(), kind="image/png").json["images"][0]
        assert (answer["width"], answer["height"]) == (200, 150)
        assert check_masks(answer, bundle, read_image(images[1])) > 20


def test_a_recording_has_masks(
    start: Callable[..., Server], bundle: Path, images: Sequence[Path], tmp_path: Path
) -> None:
    record(bundle, images, tmp_path / "masks.recording", runtime="onnxruntime")
    with start(bundle, "--recording", tmp_path / "masks.recording") as server:
        for file in images:
            image = server.detect(file.read_bytes(), kind="image/png").json["images"][0]
            assert check_masks(image, bundle, read_image(file)) > 20


def test_tensors_have_masks_as_the_network_gives_them(
    start: Callable[..., Server], bundle: Path, images: Sequence[Path]
) -> None:
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
