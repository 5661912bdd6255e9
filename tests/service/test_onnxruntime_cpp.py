"""Bundles that the C++ service runs with onnxruntime: the same detections as in Python, on a machine without a GPU."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from PIL import Image
from serving import ONNXRUNTIME, PATIENCE, Picture, Server, check, find

from trtdet.bundle import Bundle, BundleWriter
from trtdet.config import load_config
from trtdet.data.images import read_image
from trtdet.demo import shapes
from trtdet.exporter import SHAPES_MODEL
from trtdet.passes.base import PLUGIN_DOMAIN
from trtdet.pipeline import BuildOptions, CalibrationOptions, build
from trtdet.runtime.detector import Detector


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Sequence[Path]:
    folder = tmp_path_factory.mktemp("images")
    files = [folder / f"{index}.png" for index in range(4)]
    for index, file in enumerate(files):
        Image.fromarray(shapes.render(shapes.DEFAULT_SEED, "onnxruntime", index)[0]).save(file)
    return files


@pytest.fixture
def start(program: Callable[[str], Path], tmp_path: Path) -> Callable[..., Server]:
    """Makes a service on a bundle, with onnxruntime from its wheel and more options."""
    path = program("serve/trtdet-serve")
    return lambda bundle, *options: Server(
        path, [bundle, "--library-folder", ONNXRUNTIME, *options], tmp_path / "server"
    )


def pictures(bundle: Path, files: Sequence[Path]) -> list[Picture]:
    """The images and what Python finds in them."""
    content_hash, detector = Bundle(bundle).manifest.content_hash, Detector.open(bundle, runtime="onnxruntime")
    return [
        Picture(file, file.read_bytes(), *read_image(file).shape[1::-1], {content_hash: find(detector, file)})
        for file in files
    ]


@pytest.mark.parametrize(
    ("nms", "precision", "options"),
    [
        ("host", "fp32", ()),
        ("native", "fp16", ("--max-batch", "4", "--lanes", "1")),
        ("onnx", "fp32", ("--onnxruntime-threads", "2")),
        ("efficient", "int8", ()),
    ],
)
def test_the_service_finds_what_python_finds(
    start: Callable[..., Server],
    images: Sequence[Path],
    tmp_path: Path,
    nms: str,
    precision: str,
    options: Sequence[str],
) -> None:
    bundle = tmp_path / "bundle"
    calibration = CalibrationOptions(images=images[0].parent, check_input=False)
    build(
        SHAPES_MODEL,
        load_config("shapes"),
        bundle,
        BuildOptions(precision, backend="onnxruntime", nms=nms, batch=(1, 2, 4), correct=(), calibration=calibration),
    )
    manifest = Bundle(bundle).manifest
    with start(bundle, *options) as server:
        runs_on = f"onnxruntime {onnxruntime.__version__} (CPU)"
        assert server.output.read_text().rstrip().endswith(f" runs bundle on {runs_on}")
        assert server.call("GET", "/v1/model").json["runs_on"] == runs_on
        assert server.call("GET", "/readyz").json["runs_on"] == {"bundle": runs_on}
        found = 0
        for picture in pictures(bundle, images):
            answer = server.detect(picture.data, kind="image/png").json
            check(answer["images"][0], picture, manifest.content_hash)
            found += len(answer["images"][0]["detections"])
        assert found > len(images)


def test_every_size_of_a_batch_is_run_before_the_first_request(start: Callable[..., Server], tmp_path: Path) -> None:
    """A network that fails with three images alone does not begin to serve where there may be so many."""
    bundle = tmp_path / "bundle"
    build(SHAPES_MODEL, load_config("shapes"), bundle, BuildOptions("fp32", backend="onnxruntime", batch=(1, 2, 4)))
    manifest = json.loads((bundle / "manifest.json").read_text())
    model = onnx.load(bundle / manifest["portable"])
    node, graph = onnx.helper.make_node, model.graph
    constants = {"axis0": [0], "of_batch": [0, 0, 0, 1, 0], "nothing": [0]}
    graph.initializer.extend(
        onnx.numpy_helper.from_array(np.array(value), f"test.{name}") for name, value in constants.items()
    )
    # There is no element 1 of one element.
    graph.node.extend(
        [
            node("Shape", [graph.input[0].name], ["test.shape"]),
            node("Gather", ["test.shape", "test.axis0"], ["test.batch"]),
            node("Gather", ["test.of_batch", "test.batch"], ["test.element"]),
            node("Gather", ["test.nothing", "test.element"], ["test.zero"]),
        ]
    )
    graph.output.append(onnx.helper.make_tensor_value_info("test.zero", onnx.TensorProto.INT64, [1]))
    data = model.SerializeToString()
    (bundle / manifest["portable"]).write_bytes(data)
    manifest["files"][manifest["portable"]] = hashlib.sha256(data).hexdigest()
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    with start(bundle, "--max-batch", 2) as server:
        assert server.call("GET", "/readyz").status == 200
    server = start(bundle, "--max-batch", 4)
    command = [server.program, "--port", "0", *map(str, server.arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 1
    assert "failed at running the model" in done.stderr


BOXES, CLASSES, SIDE = 80, 5, 32
PLAIN = {
    "iou_threshold": 0.4,
    "max_output_boxes": 50,
    "background_class": -1,
    "score_activation": 0,
    "class_agnostic": 0,
    "box_coding": 0,
}


def crowd(**attributes: float) -> onnx.ModelProto:
    """EfficientNMS over boxes and scores that are an image's own pixels: crowded, inverted, of equal scores."""
    per_class = attributes.pop("per_class", 0)
    logits = bool(attributes.get("score_activation", 0))
    shape = np.array([1, BOXES, CLASSES if per_class else 1, 4])
    constants = {
        "flat": np.array([1, 3 * SIDE * SIDE]),
        "zero": np.array([0]),
        "boxes_end": np.array([shape.prod()]),
        "scores_end": np.array([shape.prod() + BOXES * CLASSES]),
        "axis": np.array([1]),
        "boxes_shape": shape,
        "scores_shape": np.array([1, BOXES, CLASSES]),
        "box_unit": np.array(SIDE / 255, np.float32),
        "score_unit": np.array(1 / 32 if logits else 1 / 255, np.float32),
        "score_start": np.array(-4 if logits else 0, np.float32),
    }
    node = onnx.helper.make_node
    nodes = [
        node("Reshape", ["images", "flat"], ["pixels"]),
        node("Slice", ["pixels", "zero", "boxes_end", "axis"], ["box_pixels"]),
        node("Slice", ["pixels", "boxes_end", "scores_end", "axis"], ["score_pixels"]),
        node("Mul", ["box_pixels", "box_unit"], ["box_values"]),
        node("Mul", ["score_pixels", "score_unit"], ["score_scaled"]),
        node("Add", ["score_scaled", "score_start"], ["score_values"]),
        node("Reshape", ["box_values", "boxes_shape"], ["all_boxes"]),
        node("Reshape", ["score_values", "scores_shape"], ["all_scores"]),
        node(
            "EfficientNMS_TRT",
            ["all_boxes", "all_scores"],
            ["num_dets", "boxes", "scores", "classes"],
            domain=PLUGIN_DOMAIN,
            plugin_version="1",
            **{**PLAIN, **attributes},
        ),
    ]
    float32, int32 = onnx.TensorProto.FLOAT, onnx.TensorProto.INT32
    value = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        nodes,
        "crowd",
        [value("images", float32, [1, 3, SIDE, SIDE])],
        [
            value("num_dets", int32, [1, 1]),
            value("boxes", float32, [1, 50, 4]),
            value("scores", float32, [1, 50]),
            value("classes", int32, [1, 50]),
        ],
        [onnx.numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    imports = [onnx.helper.make_opsetid("", 17), onnx.helper.make_opsetid(PLUGIN_DOMAIN, 1)]
    return onnx.helper.make_model(graph, opset_imports=imports, ir_version=8)


@pytest.mark.parametrize(
    "attributes",
    [
        {"score_threshold": 0.25},
        {"score_threshold": 0.001, "class_agnostic": 1, "background_class": 2},
        {"score_threshold": 0.3, "score_activation": 1, "box_coding": 1},
        {"score_threshold": 0.5, "per_class": 1},
    ],
    ids=lambda attributes: "-".join(attributes),
)
def test_efficient_nms_is_that_of_python(
    start: Callable[..., Server], tmp_path: Path, attributes: Mapping[str, float]
) -> None:
    model = crowd(**attributes).SerializeToString()
    output = [
        {"name": "num_dets", "dtype": "int32", "shape": [1, 1]},
        {"name": "boxes", "dtype": "float32", "shape": [1, 50, 4]},
        {"name": "scores", "dtype": "float32", "shape": [1, 50]},
        {"name": "classes", "dtype": "int32", "shape": [1, 50]},
    ]
    shape = [1, 3, SIDE, SIDE]
    placed = {"size": [SIDE, SIDE], "resize": "stretch", "scale": 1.0, "mean": [0, 0, 0], "std": [1, 1, 1]}
    nothing = {"int8": 0, "fp16": 0, "fp32": 0}
    bundle = tmp_path / "crowd"
    with BundleWriter(bundle) as writer:
        writer.add("fp32.onnx", model)
        writer.commit(
            {
                "trtdet_version": "0.1.0",
                "model": {"sha256": "0" * 64, "name": "crowd", "classes": list("abcde")},
                "input": {
                    "name": "images",
                    "dtype": "float32",
                    "shape": {"min": shape, "opt": shape, "max": shape},
                    "preprocess": placed,
                },
                "outputs": output,
                "nms": {"where": "efficient", **load_config("shapes").nms.model_dump()},
                "backend": {"name": "onnxruntime", "version": "1", "sms": []},
                "quantization": {"mode": "none"},
                "precision": nothing,
                "audit": None,
                "command": {"precision": "fp32"},
                "portable": "fp32.onnx",
                "content_hash": "0" * 64,
            }
        )
    files = [tmp_path / f"{seed}.png" for seed in range(3)]
    for seed, file in enumerate(files):
        noise = np.random.default_rng(seed).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
        Image.fromarray(noise).save(file)
    with start(bundle) as server:
        for picture in pictures(bundle, files):
            answer = server.detect(picture.data, kind="image/png").json
            check(answer["images"][0], picture, "0" * 64)
            assert answer["images"][0]["detections"]
