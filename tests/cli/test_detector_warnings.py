"""What eval and predict say of the input check."""

import json

import pytest

from trtdet.cli import main
from trtdet.demo import shapes
from trtdet.evaluation import plausibility
from trtdet.evaluation.plausibility import Plausibility
from trtdet.exporter import SHAPES_MODEL


@pytest.fixture(scope="module")
def split(tmp_path_factory):
    return shapes.generate(tmp_path_factory.mktemp("shapes"), "val", 5)


def test_predict_says_once_that_nothing_could_be_checked_and_nothing_where_it_cannot_tell(
    split, tmp_path, monkeypatch, capfd
):
    command = ["predict", str(SHAPES_MODEL), str(split.images), "--config", "shapes", "-o", str(tmp_path / "drawn")]
    monkeypatch.setattr(plausibility, "_guarded", lambda work: Plausibility(obstacle="no such tensor"))
    assert main(command) == 0
    said = capfd.readouterr()
    assert said.err.count("the input check could not be done") == 1 and "no such tensor" in said.err
    assert "in 5 images on " in said.out
    monkeypatch.setattr(plausibility, "_guarded", lambda work: Plausibility(unknown="there is no box"))
    assert main(command) == 0
    assert "cannot tell" not in capfd.readouterr().err
    one = str(next(split.images.iterdir()))
    assert main([*command[:2], one, *command[3:]]) == 0
    assert "in 1 image on " in capfd.readouterr().out


@pytest.mark.parametrize(("count", "looks"), [(3, False), (4, True)])
def test_predict_looks_at_four_images_or_more(count, looks, split, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(plausibility, "_guarded", lambda work: Plausibility(obstacle="no such tensor"))
    images = [str(path) for path in sorted(split.images.iterdir())[:count]]
    assert main(["predict", str(SHAPES_MODEL), *images, "--config", "shapes", "-o", str(tmp_path / "drawn")]) == 0
    assert ("the input check could not be done" in capfd.readouterr().err) is looks


def test_eval_warns_of_an_map_under_1_with_what_the_check_says(split, monkeypatch, capfd):
    command = ["eval", str(SHAPES_MODEL), "--images", str(split.images), "--annotations", str(split.annotations)]
    nothing = ["--config", "shapes", "--set", "nms.score_threshold=0.999"]
    monkeypatch.setattr(plausibility, "_guarded", lambda work: Plausibility(obstacle="no such tensor"))
    assert main([*command, *nothing]) == 0
    said = capfd.readouterr().err
    assert "mAP is 0.00, under 1; the input check could not be done" in said
    monkeypatch.setattr(plausibility, "_guarded", lambda work: Plausibility(images=5, boxes=3.0))
    assert main([*command, *nothing]) == 0
    assert "a working detector, 3.0 confident boxes an image: compare 'classes'" in capfd.readouterr().err
    assert main([*command, *nothing, "--set", "calibration.check_input=false"]) == 0
    assert "the input check was off" in capfd.readouterr().err
    assert main([*command, "--config", "shapes"]) == 0
    assert "under 1" not in capfd.readouterr().err


def test_eval_leaves_categories_out_and_counts_them_as_others(split, tmp_path, capfd):
    document = json.loads(split.annotations.read_text())
    renamed = [category | {"name": f"own {category['name']}"} for category in document["categories"][:2]]
    document["categories"][:2] = renamed
    document["categories"].append({"id": 99, "name": "cloud"})
    document["annotations"].append(document["annotations"][0] | {"id": 10**6, "category_id": 99})
    annotations = tmp_path / "own.json"
    annotations.write_text(json.dumps(document))
    command = ["eval", str(SHAPES_MODEL), "--images", str(split.images), "--config", "shapes", "--json"]
    assert main([*command, "--annotations", str(split.annotations)]) == 0
    expected = json.loads(capfd.readouterr().out)["map"]
    assert main([*command, "--annotations", str(annotations)]) == 1
    assert "--categories CATEGORY=CLASS" in capfd.readouterr().err
    mapped = [f"{category['name']}={category['name'][4:]}" for category in renamed]
    assert main([*command, "--annotations", str(annotations), "--categories", *mapped, "others="]) == 0
    assert json.loads(capfd.readouterr().out)["map"] == pytest.approx(expected)
    with pytest.raises(SystemExit):
        main([*command, "--annotations", str(annotations), "--categories", "cloud"])
    assert "'cloud' must be CATEGORY=CLASS, or CATEGORY= to leave it out" in capfd.readouterr().err
