"""The INT8 error by number of calibration images, and the number that is enough."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from trtdet import load_config
from trtdet.building.graph import host_graph
from trtdet.building.ranges import calibrated, select_images
from trtdet.cli import main
from trtdet.demo import shapes
from trtdet.errors import ConfigError, DataError
from trtdet.evaluation.coverage import CoverageCounter
from trtdet.experiments.image_counts import CurvePoint, ImageCurve, drawings_of, enough_images, how_many_images
from trtdet.exporter import SHAPES_MODEL
from trtdet.options import CalibrationOptions

CONFIG = load_config("shapes")


@pytest.fixture(scope="module")
def images(once) -> Path:
    """Sixteen images: twelve to calibrate, four to judge."""
    return Path(once("image-counts", lambda path: shapes.generate(path, "calibration", 16))) / "calibration"


@pytest.fixture(scope="module")
def curve(images):
    return how_many_images(SHAPES_MODEL, CONFIG, CalibrationOptions(images=images), effort="bias")


@pytest.mark.parametrize(
    ("errors", "enough"),
    [
        ({4: [0.3], 8: [0.2], 16: [0.12], 32: [0.104], 64: [0.1]}, 32),
        ({4: [0.4], 8: [0.3], 16: [0.2], 32: [0.1]}, None),  # still falls
        ({4: [0.1], 8: [0.1], 16: [0.1]}, 4),
        ({4: [0.1], 8: [0.2], 16: [0.1], 32: [0.1]}, 16),  # lucky with 4
        ({4: [0.05], 8: [0.1], 16: [0.2]}, 4),  # rises
        ({4: [0.3, 0.1, 0.2], 8: [0.10, 0.12, 0.14], 16: [0.11]}, 8),  # within the spread of 8
        ({4: [0.2, 0.2, 0.2, 0.2, 0.3], 8: [0.2] * 5, 16: [0.2]}, 8),  # one drawing in five of 4 is unlucky
        ({4: [0.0], 8: [0.0]}, 4),
        ({}, None),
    ],
)
def test_the_number_that_is_enough_follows_from_the_curve(errors, enough):
    assert enough_images(errors) == enough


@pytest.mark.parametrize("total", [6, 12, 47, 96, 100, 384])
def test_drawings_of_a_size_share_no_image(total):
    drawings = drawings_of(total)
    assert list(drawings) == sorted(drawings) and drawings[total] == [range(total)]
    for size, each in drawings.items():
        places = [place for drawn in each for place in drawn]
        assert len(places) == len(set(places)) == size * len(each) and max(places) < total
        assert size == total or size <= 0.75 * total
    assert {len(each) for size, each in drawings.items() if 5 * size <= total} <= {5}


def test_every_image_is_drawn_where_the_size_divides_the_images():
    assert drawings_of(8) == {4: [range(4), range(4, 8)], 8: [range(8)]}


@pytest.mark.slow
def test_a_point_has_all_drawings_and_the_corrected_error(curve):
    assert [(point.images, len(point.errors)) for point in curve.points] == [(4, 3), (8, 1), (12, 1)]
    assert curve.held == 4 and curve.coverage.images == 16 and curve.seconds > 0
    for point in curve.points:
        assert all(error > 0 for error in point.errors) and point.corrected is not None
        assert all(0 < agreement < 1 for agreement in point.agreements)
    low, high = curve.points[0].spread or (1, 0)
    assert min(curve.points[0].errors) <= low < high <= max(curve.points[0].errors)
    assert curve.points[1].spread is None
    assert curve.as_dict()["points"][0]["spread"] == (low, high)
    table = str(curve.table())
    assert "corrections of --effort bias" in table and "4 other images judged" in table


@pytest.mark.slow
def test_the_last_point_is_what_one_pass_over_its_images_gives(curve, images, tmp_path):
    """Histograms of parts add up to those of all."""
    graph = host_graph(SHAPES_MODEL, CONFIG)
    selected = select_images(CalibrationOptions(images=images))
    fit = tuple(path for place, path in enumerate(selected.paths) if place % 4 != 3)
    parts = [calibrated(graph, CalibrationOptions(), replace(selected, paths=part)) for part in (fit[:5], fit[5:])]
    whole = calibrated(graph, CalibrationOptions(), replace(selected, paths=fit))
    added = parts[0].collection + parts[1].collection
    assert (added.images, added.key) == (12, "")
    assert added.histograms.keys() == whole.collection.histograms.keys()
    for name, histogram in whole.collection.histograms.items():
        other = added.histograms[name]
        assert np.array_equal(histogram.counts, other.counts)
        assert (histogram.exponent, histogram.low, histogram.high) == (other.exponent, other.low, other.high)


def test_the_spread_of_a_point_leaves_the_tenth_at_each_end_out():
    assert CurvePoint(4, tuple(np.linspace(0.1, 0.2, 11)), ()).spread == pytest.approx((0.11, 0.19))
    assert CurvePoint(4, (0.1, 0.2), ()).spread is None


def said(points: list[CurvePoint], **facts: object) -> str:
    picture = np.zeros((8, 8, 3), np.uint8)
    coverage = CoverageCounter(("a",)).update(picture, np.zeros((0, 4), np.float32), np.zeros(0, np.int64)).compute()
    curve = ImageCurve("minmax", "none", tuple(points), held=4, coverage=coverage, seconds=1.0)
    return " ".join(replace(curve, **facts).sentences())


def test_sentences_say_what_to_do():
    def points(*errors: float) -> list[CurvePoint]:
        return [CurvePoint(4 * 2**place, (error,), (0.9,)) for place, error in enumerate(errors)]

    assert "minmax: more would help, the error still falls at 16 images" in said(points(0.4, 0.3, 0.2))
    assert "minmax: 8 images are enough" in said(points(0.4, 0.2, 0.2))
    rising = said(points(0.2, 0.2, 0.3))
    assert "minmax: the error rises with the images" in rising and "enough" not in rising
    corrected = [replace(point, corrected=point.images / 100) for point in points(0.2, 0.2, 0.2)]
    assert "corrections of --effort quick: 4 images are enough" in said(corrected, effort="quick")


def test_few_images_or_images_that_show_nothing_are_errors(images, tmp_path):
    with pytest.raises(ConfigError, match="7 images are too few to compare numbers of images: give 8 or more"):
        how_many_images(SHAPES_MODEL, CONFIG, CalibrationOptions(images=images, num_images=7))
    rng = np.random.default_rng(0)
    for number in range(8):
        Image.fromarray(rng.integers(100, 110, (64, 64, 3), np.uint8)).save(tmp_path / f"{number}.png")
    with pytest.raises(DataError, match="nothing over 0.25 on the 2 images that judge, and something on 0 of all 8"):
        how_many_images(SHAPES_MODEL, CONFIG, CalibrationOptions(images=tmp_path))


def test_a_model_without_int8_layers_and_histograms_are_refused(small_model, images, tmp_path):
    with pytest.raises(ConfigError, match="no layer of the model is in INT8 by default"):
        how_many_images(small_model, CONFIG, CalibrationOptions(images=images))
    with pytest.raises(ConfigError, match="leave --set calibration.histograms out"):
        how_many_images(small_model, CONFIG, CalibrationOptions(images=images, histograms=tmp_path / "h.npz"))
    with pytest.raises(ConfigError, match="a comparison of numbers of images needs calibration images"):
        how_many_images(small_model, CONFIG, CalibrationOptions())


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--how-many", "-o", "r.json"], "--how-many measures and writes nothing: leave -o r.json out"),
        (["--how-many", "--quantization", "implicit"], "leave --quantization out"),
        (["--how-many", "--tensorrt", "10.3.0"], "leave --tensorrt out"),
        (["--effort", "quick", "-o", "r.json"], "give --effort with --how-many"),
        ([], "name their file with -o ranges.json"),
    ],
)
def test_options_that_do_not_go_together_are_refused(words, problem, images, small_model, capfd):
    assert main(["calibrate", str(small_model), "--config", "shapes", "--images", str(images), *words]) == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert problem in line
