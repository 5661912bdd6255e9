import json
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from serving import shapes_bundle

from service.tests.record import fingerprints, main, record
from trtdet import Detector
from trtdet.data import find_images
from trtdet.data.images import preprocess, read_image
from trtdet.demo import shapes
from trtdet.errors import DataError, OutputError
from trtdet.options import NmsOptions


def contents(file: Path) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """The metadata and the tensors of a recording, read as the format is documented."""
    data = file.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    about = header.pop("__metadata__")
    types = {"F32": np.float32, "I32": np.int32}
    found = {}
    for name, part in header.items():
        begin, end = part["data_offsets"]
        found[name] = np.frombuffer(data[8 + length + begin : 8 + length + end], types[part["dtype"]]).reshape(
            part["shape"]
        )
    assert sum(value.nbytes for value in found.values()) == len(data) - 8 - length
    return about, found


@pytest.fixture(scope="module", params=["host", "native"])
def bundle(request, tmp_path_factory):
    return shapes_bundle(tmp_path_factory.mktemp("bundle") / "b", nms=NmsOptions(mode=request.param))


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return find_images(shapes.generate(tmp_path_factory.mktemp("shapes"), "val", 5).images)


def test_a_fingerprint_is_the_mean_of_cells():
    images = np.random.default_rng(0).normal(size=(2, 3, 37, 10)).astype(np.float32)
    found = fingerprints(images)
    assert found.shape == (2, 3, 16, 10)
    for row in range(16):
        block = images[:, :, row * 37 // 16 : (row + 1) * 37 // 16, 4]
        np.testing.assert_allclose(found[:, :, row, 4], block.mean(axis=2, dtype=np.float64), rtol=1e-6)


def test_a_recording_holds_what_the_bundle_gives(bundle, images, tmp_path):
    record(bundle, images, tmp_path / "r")
    about, found = contents(tmp_path / "r")
    detector = Detector.open(bundle)
    assert about["format"] == "trtdet-recording-1"
    assert about["content_hash"] == json.loads((bundle / "manifest.json").read_text())["content_hash"]
    for index, path in enumerate(images):
        inputs, _ = preprocess(read_image(path), detector.input)
        expected = {f"outputs.{name}": value for name, value in detector.runner(inputs[None]).items()}
        expected["fingerprints"] = fingerprints(inputs[None])
        assert expected.keys() == found.keys()
        for name, value in expected.items():
            np.testing.assert_array_equal(found[name][index], value[0])


def test_two_images_that_are_one_for_the_network_are_refused(bundle, images, tmp_path):
    (tmp_path / "r").write_text("kept")
    twin = Path(shutil.copy(images[0], tmp_path / "twin.png"))
    with pytest.raises(DataError, match=r"twin.png' and .* are the same for the network; record one of them"):
        record(bundle, [*images, twin], tmp_path / "r")
    assert (tmp_path / "r").read_text() == "kept"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r", "twin.png"]


def test_what_cannot_be_recorded_or_written(bundle, images, tmp_path):
    with pytest.raises(DataError, match="no image to record"):
        record(bundle, [], tmp_path / "r")
    (tmp_path / "bad.jpg").write_bytes(b"no image")
    with pytest.raises(DataError, match="bad.jpg"):
        record(bundle, [images[0], tmp_path / "bad.jpg"], tmp_path / "r")
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot be written"):
        record(bundle, images[:1], tmp_path / "file" / "r")
    assert not (tmp_path / "r").exists()


def test_the_command(bundle, tmp_path, capsys):
    folder = tmp_path / "images"
    folder.mkdir()
    for grey in range(0, 200, 20):
        Image.new("RGB", (30, 20), (grey, grey, 255 - grey)).save(folder / f"{grey}.png")
    given = [str(bundle), "--images", str(folder), "-o", str(tmp_path / "r")]
    assert main([*given, "--num-images", "4"]) == 0
    assert len(contents(tmp_path / "r")[1]["fingerprints"]) == 4
    assert main(given) == 0
    assert capsys.readouterr().out.endswith(f"10 images on onnxruntime (CPU); wrote {tmp_path / 'r'}\n")
    assert main([*given[:2], str(tmp_path / "none"), *given[3:]]) == 1
    assert "none" in capsys.readouterr().err
