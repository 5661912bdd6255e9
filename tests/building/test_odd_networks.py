"""A build of an unusual network gives a bundle that runs, or an error of one line."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from odd_networks import CONFIG, NETWORKS, scaled
from PIL import Image

import trtdet
from trtdet.backends import OnnxRunner
from trtdet.config import Config, load_config
from trtdet.data import ImageStream, find_images
from trtdet.errors import TrtdetError
from trtdet.options import BuildOptions, changed
from trtdet.passes import Options, rewrite

pytestmark = pytest.mark.filterwarnings("ignore::trtdet.errors.TrtdetWarning")


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    file = tmp_path_factory.mktemp("odd") / "odd.yaml"
    file.write_text(CONFIG)
    return load_config(str(file))


@pytest.fixture(scope="module")
def noise(tmp_path_factory):
    """Eight images, of which two are black."""
    folder = tmp_path_factory.mktemp("noise")
    rng = np.random.default_rng(1)
    for number in range(8):
        pixels = rng.integers(0, 256, (16, 16, 3), dtype=np.uint8) * (number not in (0, 7))
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number}.png")
    return folder


def build(model: onnx.ModelProto, config: Config, images: Path, place: Path, **options: object) -> trtdet.Bundle:
    file = place / "odd.onnx"
    onnx.save(model, file)
    asked = changed(BuildOptions(), mode="host", images=images, **options)
    return trtdet.build(file, config, place / "bundle", asked).bundle


def detections(model: onnx.ModelProto, config: Config, images: Path) -> list[dict[str, np.ndarray]]:
    """Boxes and scores of every image."""
    runner = OnnxRunner(model)
    return [runner(batch.images) for batch in ImageStream(find_images(images), config.input)]


STEEP = {"huge_1e4", "huge_1e30", "huge_1e15_twice", "shared_bias", "saturated"}
DELICATE = {"normalised", "uneven_channels", "shared_weight"}
"""In both INT8 cannot be asked to keep the scores: they are steps, or hang on what is small beside the rest."""


def check(name: str, bundle: trtdet.Bundle, config: Config, images: Path) -> None:
    """The bundle runs, and gives finite numbers, and scores close to FP32's where that can be asked."""
    expected = detections(rewrite(NETWORKS[name](), Options(config, "host")).model, config, images)
    for one, other in zip(expected, detections(onnx.load(bundle.model), config, images), strict=True):
        for key, values in one.items():
            assert np.isfinite(other[key][np.isfinite(values)]).all(), key
        if name not in STEEP | DELICATE:
            np.testing.assert_allclose(other["scores"], one["scores"], atol=0.05)


@pytest.mark.parametrize("name", NETWORKS)
def test_by_default(name, config, noise, tmp_path):
    bundle = build(NETWORKS[name](), config, noise, tmp_path, backend="onnxruntime")
    check(name, bundle, config, noise)


@pytest.mark.parametrize("name", NETWORKS)
def test_with_every_convolution_in_int8(name, config, noise, tmp_path):
    bundle = build(NETWORKS[name](), config, noise, tmp_path, backend="onnxruntime", int8_all=True)
    planned = bundle.manifest.precision
    assert planned.int8 >= 3
    assert planned.fp16 == 0
    check(name, bundle, config, noise)


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_as_an_engine(name, config, noise, tmp_path):
    bundle = build(NETWORKS[name](), config, noise, tmp_path, backend="tensorrt-rtx", int8_all=True)
    assert bundle.engine.stat().st_size > 0
    check(name, bundle, config, noise)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_weight_that_is_no_number_is_one_line(value, config, noise, tmp_path):
    model = scaled(1.0, 1.0)
    weight = next(tensor for tensor in model.graph.initializer if len(tensor.dims) == 4)
    broken = onnx.numpy_helper.to_array(weight).copy()
    broken[0, 0, 0, 0] = value
    weight.CopyFrom(onnx.numpy_helper.from_array(broken, weight.name))
    with pytest.raises(TrtdetError) as caught:
        build(model, config, noise, tmp_path, backend="onnxruntime")
    assert "not finite" in str(caught.value)
    assert "\n" not in str(caught.value)
