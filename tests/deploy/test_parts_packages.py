"""Detectors with masks, keypoints and rotated boxes in packages: Triton's steps give what trtdet itself does, and
DeepStream's parser compares rotated boxes."""

import io
import shutil

import numpy as np
import onnx
import pytest
from parts_model import SIZE, config_of, network
from PIL import Image

from trtdet import PackageOptions, build, package
from trtdet.data.images import preprocess
from trtdet.options import BuildOptions, NmsOptions
from trtdet.runtime.detector import Detector

pytest.importorskip(
    "tritonclient.grpc", reason="Triton's configuration is read by tritonclient: pip install 'trtdet[dev]'"
)

from standin.triton.server import Ensemble
from test_deepstream_parser import built


@pytest.fixture(scope="module", params=["host", "native"])
def bundle(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("parts")
    onnx.save(network("all"), folder / "m.onnx")
    options = BuildOptions(precision="fp32", nms=NmsOptions(mode=request.param), backend="onnxruntime")
    return build(folder / "m.onnx", config_of("all"), folder / "b", options).bundle


def picture(seed, width=90, height=120):
    return np.random.default_rng(seed).integers(0, 255, (height, width, 3), np.uint8)


def test_tritons_steps_give_the_parts_in_the_pictures(bundle, tmp_path):
    done = package(bundle.path, tmp_path / "models", PackageOptions("triton"))
    assert any(warning.startswith("masks are given as coefficients and prototypes") for warning in done.warnings)
    readme = (done.folder / "README.md").read_text()
    assert "`keypoints` FP32 (n, 20, 4, 3), x y score, in pixels of the image" in readme
    assert "`prototypes` FP32 (n, 8, 24, 32)" in readme
    detector, total = Detector.open(bundle.path, runtime="onnxruntime"), 0
    ensemble = Ensemble(done.folder, bundle.manifest.model.name, detector.runner)
    for seed in range(4):
        encoded = io.BytesIO()
        Image.fromarray(picture(seed)).save(encoded, "PNG")
        answer = ensemble(image=np.array([[encoded.getvalue()]], object))
        inputs, transform = preprocess(picture(seed), detector.input)
        found = detector(inputs[None])
        boxes, scores, _ = found.image(0)
        placed = detector.placed(found, 0, boxes=transform.to_image(boxes), transform=transform)
        count = int(answer["num_dets"][0, 0])
        assert count == len(scores)
        np.testing.assert_allclose(answer["boxes"][0, :count], transform.to_image(boxes), atol=1e-3)
        np.testing.assert_allclose(answer["keypoints"][0, :count], placed.keypoints, atol=1e-3)
        np.testing.assert_allclose(answer["rotated_boxes"][0, :count], placed.rotated_boxes, atol=1e-3)
        parts = found.image_parts(0)
        np.testing.assert_allclose(answer["mask_coefficients"][0, :count], parts.mask_coefficients, atol=1e-6)
        np.testing.assert_allclose(answer["prototypes"][0], parts.prototypes, atol=1e-6)
        assert not answer["keypoints"][0, count:].any()
        total += count
    assert total > 4


@pytest.mark.slow
def test_deepstreams_parser_compares_rotated_boxes(bundle, tmp_path):
    for tool in ("cmake", "g++"):
        if shutil.which(tool) is None:
            pytest.skip(f"needs {tool} to build the parser, which is not on PATH")
    done = package(bundle.path, tmp_path / "ds", PackageOptions("deepstream"))
    assert any(warning.startswith("keypoints and rotated boxes are left out") for warning in done.warnings)
    written = (done.folder / "config_infer_primary.txt").read_text()
    assert "network-type=3\n" in written and "parse-bbox-instance-mask-func-name=NvDsInferParseTrtdetMasks\n" in written
    assert "segmentation-threshold=0.5\n" in written and "mask_coefficients;prototypes" in written
    parser, detector = built(done.folder, 6), Detector.open(bundle.path, runtime="onnxruntime")
    for seed in range(3):
        outputs = detector.runner(preprocess(picture(seed, *SIZE[::-1]), detector.input)[0][None])
        _, scores, classes = detector.suppressed(outputs, detector.nms).image(0)
        parsed = parser({name: array[0] for name, array in outputs.items()}, 3)
        assert parsed.ok, parsed.said
        assert len(parser.with_masks({name: array[0] for name, array in outputs.items()}, 3).masks) == len(
            parsed.scores
        )
        # Hulls that lie outside of the input are left out.
        assert len(parsed.scores) > 0
        assert set(parsed.classes) <= set(classes)
        assert np.isin(parsed.scores.round(5), scores.round(5)).all()
        if bundle.manifest.nms.mode == "host":
            wrong = {"rotated_boxes": outputs["rotated_boxes"][0, :9]}
            refused = parser({name: array[0] for name, array in outputs.items()} | wrong, 3)
            assert not refused.ok
            assert "rotated_boxes (9, 5) with boxes (50, 4)" in refused.said
