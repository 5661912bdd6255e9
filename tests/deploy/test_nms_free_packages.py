"""Detectors without suppression in packages: rows of box, score, class, and queries with logits; in the network or
left to the reader, Triton's steps and DeepStream's parser give what trtdet itself does."""

import io
import shutil
from typing import Any

import numpy as np
import onnx
import pytest
from attention import attention_detector
from nets import net, normal
from PIL import Image

from trtdet import PackageOptions, build, load_config, package
from trtdet.backends import OnnxRunner
from trtdet.bundle import Bundle
from trtdet.config import Config
from trtdet.detection.suppression import Detections, non_max_suppression
from trtdet.options import BuildOptions, NmsOptions

pytest.importorskip(
    "tritonclient.grpc", reason="Triton's configuration is read by tritonclient: pip install 'trtdet[dev]'"
)

from standin.triton.server import Ensemble
from test_deepstream_parser import built, hold

CONFIG = """extends: shapes
name: NAME
input: {size: [128, 128]}
head: HEAD
nms: none
"""
HEADS = {
    "rows": "{decode: detections, boxes: xyxy, units: pixels}",
    "queries": "{decode: boxes, boxes: cxcywh, units: relative, scores: logits}",
}


def one_to_one() -> onnx.ModelProto:
    """64 rows of x1 y1 x2 y2 score class, as YOLOv10 and YOLO26 give them, from a convolution that learnt nothing."""
    text = """(float[1,3,128,128] images) => (float[1,64,6] output0)
        <int64[3] rows = {0, 6, 64}, int64[4] sizes = {2, 2, 1, 1}, float most = {90}, float half = {30},
        float ten = {9.99}> {
            map = Conv<strides = [16, 16]>(images, w)
            flat = Reshape(map, rows)
            cells = Transpose<perm = [0, 2, 1]>(flat)
            unit = Sigmoid(cells)
            corner, side, score, kind = Split<axis = 2>(unit, sizes)
            first = Mul(corner, most)
            far = Mul(side, half)
            second = Add(first, far)
            ranks = Mul(kind, ten)
            label = Floor(ranks)
            output0 = Concat<axis = 2>(first, second, score, label)
        }"""
    return net(text, opset=17, w=normal(6, 3, 16, 16, seed=3, scale=4e-4))


@pytest.fixture(scope="module", params=[(head, nms) for head in HEADS for nms in ("host", "native")], ids="-".join)
def bundle(request, tmp_path_factory):
    head, nms = request.param
    folder = tmp_path_factory.mktemp("nms-free")
    (folder / "c.yaml").write_text(CONFIG.replace("NAME", head).replace("HEAD", HEADS[head]))
    onnx.save(one_to_one() if head == "rows" else attention_detector(), folder / "m.onnx")
    config: Config = load_config(str(folder / "c.yaml")).with_nms(score_threshold=0.02, max_detections=40)
    options = BuildOptions(precision="fp32", nms=NmsOptions(mode=nms), backend="onnxruntime")
    return build(folder / "m.onnx", config, folder / "b", options).bundle


def found_by(bundle: Bundle, outputs: dict[str, Any]) -> Detections:
    part = bundle.manifest.nms
    if part.mode != "host":
        return Detections(outputs["num_dets"], outputs["boxes"], outputs["scores"], outputs["classes"])
    logits = part.scores == "logits"
    return non_max_suppression(outputs["boxes"], outputs["scores"], part.thresholds, logits=logits)


def pixels(seed: int) -> Any:
    return np.random.default_rng(seed).integers(0, 255, (128, 128, 3), np.uint8)


@pytest.mark.slow
def test_deepstreams_parser_gives_the_best_and_suppresses_none(bundle, tmp_path):
    for tool in ("cmake", "g++"):
        if shutil.which(tool) is None:
            pytest.skip(f"needs {tool} to build the parser, which is not on PATH")
    parser = built(package(bundle.path, tmp_path / "ds", PackageOptions("deepstream")).folder, 6)
    runner, total = OnnxRunner(bundle.model.read_bytes()), 0
    for seed in range(3):
        outputs = runner(pixels(seed).transpose(2, 0, 1)[None].astype(np.float32))
        found = found_by(bundle, outputs)
        total += hold(parser({name: array[0] for name, array in outputs.items()}, 10), found)
    assert total > 20


def test_tritons_steps_give_the_best_and_suppress_none(bundle, tmp_path):
    repository = package(bundle.path, tmp_path / "models", PackageOptions("triton")).folder
    runner, total = OnnxRunner(bundle.model.read_bytes()), 0
    ensemble = Ensemble(repository, bundle.manifest.model.name, runner)
    for seed in range(3):
        picture = pixels(seed)
        encoded = io.BytesIO()
        Image.fromarray(picture).save(encoded, "PNG")
        answer = ensemble(image=np.array([[encoded.getvalue()]], object))
        image = (picture[..., ::-1] if bundle.config.input.color == "bgr" else picture).transpose(2, 0, 1)
        expected = found_by(bundle, runner(np.ascontiguousarray(image)[None].astype(np.float32)))
        boxes, scores, classes = expected.image(0)
        count = int(answer["num_dets"][0, 0])
        assert count == len(scores)
        np.testing.assert_array_equal(answer["classes"][0, :count], classes)
        np.testing.assert_allclose(answer["scores"][0, :count], scores, rtol=1e-6)
        np.testing.assert_allclose(answer["boxes"][0, :count], np.clip(boxes, 0, 128), atol=1e-3)
        total += count
    assert total > 20
