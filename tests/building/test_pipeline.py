"""Parts of a build without a whole build: the selected images, and when a bundle is up to date."""

from pathlib import Path

import onnx
import pytest
from models import SMALL_MODEL, for_onnxruntime, small_detector
from PIL import Image

from trtdet import build, calibrate, load_config
from trtdet.building import BuildResult
from trtdet.building.engine import float_plan
from trtdet.building.graph import host_graph
from trtdet.demo import shapes
from trtdet.options import CalibrationOptions
from trtdet.passes.protobuf import sizes_of
from trtdet.quantization import CORRECTIONS, Cause, Entry, PrecisionPlan


@pytest.fixture(scope="module")
def more_images(tmp_path_factory):
    return shapes.generate(tmp_path_factory.mktemp("more"), "calibration", 24).images


def bundle(
    images: Path, place: Path, config: str = "shapes", correct: tuple[str, ...] = (), **calibration: object
) -> BuildResult:
    options = CalibrationOptions(**calibration, images=images)  # type: ignore[arg-type]
    asked = for_onnxruntime(effort=",".join(correct) or "none", calibration=options, int8_all=True)
    return build(SMALL_MODEL, load_config(config), place, asked)


@pytest.mark.parametrize(("batch", "rewritten"), [("batch", 1), (1, 1), (3, 3)])
def test_an_open_batch_becomes_one_image_and_a_fixed_one_stays(tmp_path, batch, rewritten):
    onnx.save(small_detector(batch), tmp_path / "model.onnx")
    graph = host_graph(tmp_path / "model.onnx", load_config("shapes"))
    assert [sizes_of(tensor)[0] for tensor in (*graph.model.graph.input, *graph.model.graph.output)] == [rewritten] * 3


def test_images_are_taken_evenly_spaced(images, tmp_path):
    seen: list[tuple[str, int, int]] = []
    options = CalibrationOptions(images=images, num_images=4)
    done = calibrate(SMALL_MODEL, load_config("shapes"), options, lambda *said: seen.append(said))
    assert done.collection.images == 4
    assert seen == [*(("checking the input", at, 1) for at in (0, 1)), *(("calibrating", at, 4) for at in (1, 2, 3, 4))]
    every_third = tmp_path / "third"
    every_third.mkdir()
    for path in sorted(images.iterdir())[::3]:
        (every_third / path.name).write_bytes(path.read_bytes())
    same = calibrate(SMALL_MODEL, load_config("shapes"), CalibrationOptions(images=every_third))
    assert same.collection.images_sha256 == done.collection.images_sha256
    assert same.ranges == done.ranges


def test_what_is_done_is_kept_and_what_changed_is_done_again(images, tmp_path):
    place = tmp_path / "bundle"
    first = bundle(images, place)
    assert not first.up_to_date
    assert bundle(images, place).up_to_date
    other = bundle(images, place, rule="mse")
    assert not other.up_to_date
    assert other.bundle.manifest.content_hash != first.bundle.manifest.content_hash
    assert other.bundle.manifest.files["histograms.npz"] == first.bundle.manifest.files["histograms.npz"]
    assert other.bundle.manifest.files["int8.onnx"] != first.bundle.manifest.files["int8.onnx"]
    # What was built before, and what is spoilt.
    for _ in range(2):
        back = bundle(images, place)
        assert not back.up_to_date
        assert back.bundle.manifest.files == first.bundle.manifest.files
        (place / "int8.onnx").write_bytes(b"spoilt")


def test_what_a_killed_build_left_beside_its_complete_bundle_is_removed(images, tmp_path):
    place = tmp_path / "bundle"
    bundle(images, place)
    (tmp_path / ".bundle.abcdefgh.trtdet" / "fp32").mkdir(parents=True)
    (tmp_path / "bundle.reconstruction").touch()
    assert bundle(images, place).up_to_date
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


def test_changed_pixels_are_noticed_under_the_same_names(images, tmp_path):
    folder = tmp_path / "images"
    folder.mkdir()
    for path in images.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    first = bundle(folder, tmp_path / "bundle")
    victim = sorted(folder.iterdir())[0]
    Image.effect_noise((256, 256), 80).convert("RGB").save(victim)
    again = bundle(folder, tmp_path / "bundle")
    assert not again.up_to_date
    assert again.bundle.manifest.quantization.images != first.bundle.manifest.quantization.images


@pytest.mark.slow
def test_corrections_are_written_down_and_repeatable(more_images, tmp_path):
    plain = bundle(more_images, tmp_path / "plain")
    assert plain.bundle.manifest.quantization.corrections == ()
    first = bundle(more_images, tmp_path / "one", correct=CORRECTIONS)
    said = first.bundle.manifest.quantization.corrections
    before, after = (float(part.split()[0]) for part in said[-1].removeprefix("error at the head ").split(" -> "))
    assert after < before
    # Of what the corrections map, the rule decides nothing.
    assert said[-2] == "--calib percentile decides none of 5 ranges, the corrections all"
    steps = [entry.corrections for entry in PrecisionPlan.load(first.bundle.file("plan.json")).entries.values()]
    assert "round" in {step.name for taken in steps for step in taken}
    assert first.bundle.manifest.files["ranges.json"] != plain.bundle.manifest.files["ranges.json"]
    assert first.bundle.manifest.files["int8.onnx"] != plain.bundle.manifest.files["int8.onnx"]
    again = bundle(more_images, tmp_path / "two", correct=CORRECTIONS)
    assert again.bundle.manifest.files["int8.onnx"] == first.bundle.manifest.files["int8.onnx"]


def test_what_decodes_boxes_stays_fp32_in_an_fp16_engine_whatever_its_reason_says():
    plan = PrecisionPlan(
        {
            "body": Entry("int8", "", Cause.QUANTIZABLE),
            "head": Entry("fp32", "any words at all", Cause.DECODES_BOXES),
            "other": Entry("fp32", "it decodes boxes, says the text", Cause.TRANSPOSED),
        }
    )
    assert {name: entry.precision for name, entry in float_plan(plan, "fp16").entries.items()} == {
        "body": "fp16",
        "head": "fp32",
        "other": "fp16",
    }
    assert float_plan(plan, "fp32").counts() == {"int8": 0, "fp16": 0, "fp32": 3}
