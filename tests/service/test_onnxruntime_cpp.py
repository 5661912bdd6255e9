"""Bundles that the C++ service runs with onnxruntime: the same detections as in Python, on a machine without a GPU."""

import hashlib
import json
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import onnx.parser
import onnxruntime
import pytest
from PIL import Image
from serving import PATIENCE, check, finished, handmade, pictured, shapes_bundle

from trtdet.bundle import Bundle
from trtdet.demo import shapes
from trtdet.options import CalibrationOptions, NmsOptions
from trtdet.passes.base import PLUGIN_DOMAIN


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    files = [folder / f"{index}.png" for index in range(4)]
    for index, file in enumerate(files):
        Image.fromarray(shapes.render(shapes.DEFAULT_SEED, "onnxruntime", index)[0]).save(file)
    return files


@pytest.mark.parametrize(
    ("nms", "precision", "options"),
    [
        ("host", "fp32", ()),
        ("native", "fp16", ("--max-batch", "4", "--lanes", "1", "--precision", "built")),
        ("onnx", "fp32", ("--onnxruntime-threads", "2")),
        ("efficient", "int8", ("--precision", "built")),
    ],
)
def test_the_service_finds_what_python_finds(start, images, tmp_path, nms, precision, options):
    bundle = shapes_bundle(
        tmp_path / "bundle",
        precision=precision,
        nms=NmsOptions(mode=nms),
        batch=(1, 2, 4),
        effort="none",
        calibration=CalibrationOptions(images=images[0].parent, check_input=False),
    )
    manifest = Bundle(bundle).manifest
    with start(bundle, *options) as server:
        runs_on = f"onnxruntime {onnxruntime.__version__} (CPU)"
        assert server.output.read_text().rstrip().endswith(f" runs bundle on {runs_on}")
        assert server.call("GET", "/v1/model").json["runs_on"] == runs_on
        assert server.call("GET", "/readyz").json["runs_on"] == {"bundle": runs_on}
        found = 0
        for picture in pictured(bundle, images):
            answer = server.detect(picture.data, kind="image/png").json
            check(answer["images"][0], picture, manifest.content_hash)
            found += len(answer["images"][0]["detections"])
        assert found > len(images)


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two cores")
def test_on_two_cores_a_run_alone_has_both_and_finds_the_same_as_beside_others(start, images, tmp_path):
    bundle = shapes_bundle(tmp_path / "bundle")
    (picture, *_) = pictured(bundle, images)
    threads, answers = [], []
    for options in (("--onnxruntime-threads", "1"), ()):
        server = start(bundle, *options)
        server.wrapper = ("taskset", "-c", "0,1")  # a worker of the tests may have one alone
        with server:
            threads.append(len(list(Path(f"/proc/{server.process.pid}/task").iterdir())))
            ask = partial(server.detect, picture.data, kind="image/png")
            answers += [ask() for _ in range(6)]
            with ThreadPoolExecutor(6) as clients:
                answers += [call.result() for call in [clients.submit(ask) for _ in range(24)]]
    assert threads[1] == threads[0] + 1  # of a second pool, beside the thread that calls
    found = [answer.json["images"][0]["detections"] for answer in answers]
    assert found[0] and found == [found[0]] * len(found)


@pytest.fixture(scope="module")
def rounded(images, tmp_path_factory):
    """Makes bundles in INT8, and the same network in FP32."""
    folder = tmp_path_factory.mktemp("rounded")
    calibration = CalibrationOptions(images=images[0].parent, check_input=False)
    nms = NmsOptions(mode="efficient")
    return [
        shapes_bundle(folder / precision, precision=precision, nms=nms, effort="none", calibration=calibration)
        for precision in ("int8", "fp32")
    ]


def test_the_network_in_fp32_of_a_bundle_in_int8_is_run_where_it_is_faster(start, rounded, images):
    int8, fp32 = rounded
    assert Bundle(int8).manifest.float_model == "float.onnx"
    assert Bundle(int8).model.name == "int8.onnx"
    wanted = {"float": fp32, "built": int8}
    for option, of in wanted.items():
        with start(int8, "--precision", option) as server:
            told = ", the bundle's network in FP32" if option == "float" else ""
            runs_on = f"onnxruntime {onnxruntime.__version__} (CPU){told}"
            assert server.call("GET", "/v1/model").json["runs_on"] == runs_on
            for picture in pictured(of, images):
                answer = server.detect(picture.data, kind="image/png").json["images"][0]
                check(answer, picture, Bundle(of).manifest.content_hash)
    with start(int8) as server:
        runs_on = server.call("GET", "/v1/model").json["runs_on"]
        # As it is measured on this machine.
        ran, faster, slower = re.fullmatch(
            r"onnxruntime .*, the (.*), as it takes ([\d.]+) ms an image and the one .* ([\d.]+) ms", runs_on
        ).groups()
        assert ran in ("bundle's network in FP32", "network as it was built")
        assert float(faster) <= float(slower)
        assert runs_on in server.log.read_text()
        config = server.call("GET", "/v2/models/int8/config").json
        assert config["parameters"] == {"runs_on": {"string_value": runs_on}}
        assert f'runs_on="{runs_on}"' in server.call("GET", "/metrics").body.decode()
        of = fp32 if ran.endswith("FP32") else int8
        for picture in pictured(of, images):
            check(
                server.detect(picture.data, kind="image/png").json["images"][0],
                picture,
                Bundle(of).manifest.content_hash,
            )


def test_a_bundle_in_int8_alone_says_that_fp32_may_be_faster(start, rounded, tmp_path):
    bundle = tmp_path / "bundle"
    shutil.copytree(rounded[0], bundle)
    manifest = json.loads((bundle / "manifest.json").read_text())
    (bundle / manifest["float_model"]).unlink()
    del manifest["files"][manifest.pop("float_model")]
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    with start(bundle) as server:
        assert "the bundle has no network in FP32; build it with --backend onnxruntime" in server.log.read_text()
    with start(bundle, "--precision", "built") as server:
        assert "FP32" not in server.log.read_text()
    server = start(bundle, "--precision", "float")
    done = finished(server.program, "--port", 0, *server.arguments, code=1, timeout=PATIENCE)
    assert "the bundle has no network in FP32" in done.stderr


def test_every_size_of_a_batch_is_run_before_the_first_request(start, tmp_path):
    """A network that fails with three images alone does not begin to serve where there may be so many."""
    bundle = shapes_bundle(tmp_path / "bundle", batch=(1, 2, 4))
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
    done = finished(server.program, "--port", 0, *server.arguments, code=1, timeout=PATIENCE)
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
    boxes_end = shape.prod()
    values = ", ".join(f"{name} = {value}" for name, value in {**PLAIN, **attributes}.items())
    return onnx.parser.parse_model(f"""
        <ir_version: 8, opset_import: ["" : 17, "{PLUGIN_DOMAIN}" : 1]>
        crowd (float[1, 3, {SIDE}, {SIDE}] images) => (
            int32[1, 1] num_dets, float[1, 50, 4] boxes, float[1, 50] scores, int32[1, 50] classes
        ) <
            int64[2] flat = {{1, {3 * SIDE * SIDE}}}, int64[1] zero = {{0}}, int64[1] axis = {{1}},
            int64[1] boxes_end = {{{boxes_end}}}, int64[1] scores_end = {{{boxes_end + BOXES * CLASSES}}},
            int64[4] boxes_shape = {{{", ".join(map(str, shape))}}}, int64[3] scores_shape = {{1, {BOXES}, {CLASSES}}},
            float box_unit = {{{SIDE / 255}}}, float score_unit = {{{1 / 32 if logits else 1 / 255}}},
            float score_start = {{{-4.0 if logits else 0.0}}}
        > {{
            pixels = Reshape (images, flat)
            box_pixels = Slice (pixels, zero, boxes_end, axis)
            score_pixels = Slice (pixels, boxes_end, scores_end, axis)
            box_values = Mul (box_pixels, box_unit)
            score_scaled = Mul (score_pixels, score_unit)
            score_values = Add (score_scaled, score_start)
            all_boxes = Reshape (box_values, boxes_shape)
            all_scores = Reshape (score_values, scores_shape)
            num_dets, boxes, scores, classes =
                {PLUGIN_DOMAIN}.EfficientNMS_TRT <plugin_version = "1", {values}> (all_boxes, all_scores)
        }}
    """)


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
def test_efficient_nms_is_that_of_python(start, tmp_path, attributes):
    bundle = handmade(tmp_path / "crowd", crowd(**attributes), "efficient", classes=list("abcde"))
    files = [tmp_path / f"{seed}.png" for seed in range(3)]
    for seed, file in enumerate(files):
        noise = np.random.default_rng(seed).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
        Image.fromarray(noise).save(file)
    with start(bundle) as server:
        for picture in pictured(bundle, files):
            answer = server.detect(picture.data, kind="image/png").json
            check(answer["images"][0], picture, "0" * 64)
            assert answer["images"][0]["detections"]
