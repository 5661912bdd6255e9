"""A configuration for a model that nobody has described."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from scored import written

from trtdet.cli import main
from trtdet.config import load_config
from trtdet.data import find_images
from trtdet.demo import shapes
from trtdet.detection.heads import decode
from trtdet.errors import ConfigError
from trtdet.evaluation import guessing
from trtdet.evaluation.guessing import guess_config
from trtdet.evaluation.plausibility import Answer, Plausibility, Settled
from trtdet.evaluation.readings import Reading
from trtdet.exporter import SHAPES_MODEL


@pytest.fixture(scope="module")
def images(once):
    folder = once("guessing", lambda path: shapes.generate(path, "calibration", 16))
    return find_images(folder / "calibration")


def unit(path: Path) -> Path:
    """The shipped detector, which reads 0..255, behind a node that takes 0..1."""
    model = onnx.load(str(SHAPES_MODEL))
    graph = model.graph
    given = graph.input[0].name
    for node in graph.node:
        for index, name in enumerate(node.input):
            if name == given:
                node.input[index] = "bytes"
    graph.initializer.append(numpy_helper.from_array(np.array(255, np.float32), "most"))
    graph.node.insert(0, helper.make_node("Mul", [given, "most"], ["bytes"], "scale"))
    onnx.save(model, str(path))
    return path


@pytest.mark.usefixtures("input_check")
def test_what_the_detections_tell_replaces_what_is_usual(images, tmp_path):
    found = guess_config(unit(tmp_path / "odd.onnx"), images)
    assert found.looks is not None and not found.looks.warning
    assert found.config.input.scale == pytest.approx(1 / 255)
    assert found.origins["input.scale"].startswith("tried on images, in place of 1; ")
    assert " sure on " in found.origins["input.scale"] and " on " in found.origins["input.resize"]
    assert found.answers.keys() >= {"color", "normalisation", "resize", "interpolation"}
    assert found.open.keys() <= found.answers.keys()
    (tmp_path / "odd.yaml").write_text(found.text())
    assert load_config(str(tmp_path / "odd.yaml")) == found.config


@pytest.mark.slow
@pytest.mark.usefixtures("input_check")
def test_what_the_exporter_reads_stands_where_images_do_not_decide(images, tmp_path):
    model = onnx.load(str(SHAPES_MODEL))
    helper.set_model_props(model, {"author": "Ultralytics", "description": "Ultralytics YOLOv8n model"})
    onnx.save(model, tmp_path / "u.onnx")
    found, usual = (guess_config(path, images) for path in (tmp_path / "u.onnx", SHAPES_MODEL))
    assert not found.open
    assert all(one.rival is None for one in found.answers.values())
    for question in usual.open:
        assert found.origins[f"input.{question}"] == "as Ultralytics, which wrote the file, reads images"
    assert "as Ultralytics" in found.origins["input.pad_value"]
    helper.set_model_props(model, {"author": "Ultralytics", "description": "Ultralytics rtdetr-l model"})
    onnx.save(model, tmp_path / "stretched.onnx")
    assert "Ultralytics" not in guess_config(tmp_path / "stretched.onnx").origins["input.resize"]


def test_a_reading_that_images_do_not_decide_is_taken_back(images, monkeypatch):
    given = load_config("shapes")
    other = given.model_copy(update={"input": given.input.model_copy(update={"resize": "stretch", "color": "bgr"})})
    rival = Reading(given, other, "resize")
    first = Plausibility(images=8, better={"input.resize": "stretch", "input.color": "bgr"})
    answers = {"resize": Answer(0.6, 8, rival), "color": Answer(0.999, 8)}
    settled = Settled(other, first, first, answers=answers)
    taken = guessing._decided(settled, onnx.load(str(SHAPES_MODEL)), given=given, files=images[:4])
    assert (taken.config.input.resize, taken.config.input.color) == (given.input.resize, "bgr")
    assert taken.first.better == {"input.color": "bgr"}
    assert taken.answers.keys() == {"color"}
    assert taken.looks is not first


def test_without_images_what_is_usual_stands_and_says_so(tmp_path):
    found = guess_config(SHAPES_MODEL)
    shipped = load_config("shapes")
    assert found.looks is None and "classes" in found.unknown
    assert found.config.head == shipped.head and found.config.nms == shipped.nms
    assert "not tried: give 4 images or more" in found.origins["input.color"]
    (tmp_path / "shapes.yaml").write_text(found.text())
    assert load_config(str(tmp_path / "shapes.yaml")) == found.config
    assert all("#" in line for line in found.text().splitlines() if not line.endswith(":"))


def at_a_terminal(monkeypatch):
    """Puts a person at a terminal, of 256 colours: rich keeps a style as it was first drawn, for all later tests."""
    monkeypatch.setenv("TERM", "xterm-256color")
    for stream in (sys.stdin, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)


def test_names_are_asked_for_until_their_number_is_right(images, tmp_path, monkeypatch, capsys):
    """What was tried on the images is kept, and a wrong answer is no end."""
    (tmp_path / "names.bin").write_bytes(b"\xff\xfe")
    answers = iter(["a,b,c,d,e,f,g", "nowhere.txt", str(tmp_path / "names.bin"), ",".join("abcdefghij")])
    at_a_terminal(monkeypatch)
    monkeypatch.setattr("builtins.input", lambda: next(answers))
    tried: list[int] = []
    settle = guessing.settle_model
    monkeypatch.setattr(guessing, "settle_model", lambda *asked, **named: tried.append(1) or settle(*asked, **named))
    place = tmp_path / "shapes.yaml"
    arguments = ["init", str(SHAPES_MODEL), "--images", str(images[0].parent), "--num-images", "4", "-o", str(place)]
    assert main(arguments) == 0
    assert load_config(str(place)).classes == tuple("abcdefghij")
    assert re.search("^classes: .a, b, .*# given$", place.read_text(), re.MULTILINE)
    assert tried == [1]
    said = capsys.readouterr().err
    assert "--classes names 7, and the model has 10" in said and "'nowhere.txt' does not exist" in said
    assert "names.bin' cannot be read: 'utf-8' codec can't decode" in said


def test_the_end_of_the_input_leaves_the_names_open(tmp_path, monkeypatch):
    def ended() -> str:
        raise EOFError

    at_a_terminal(monkeypatch)
    monkeypatch.setattr("builtins.input", ended)
    assert main(["init", str(SHAPES_MODEL), "-o", str(tmp_path / "shapes.yaml")]) == 0
    assert len(load_config(str(tmp_path / "shapes.yaml")).classes) == 10


def test_expressions_are_written_in_their_order(tmp_path):
    weights = np.random.default_rng(0).normal(0, 0.01, (12, 3, 16, 16)).astype(np.float32)
    text = "(float[1,3,64,96] x) => (float[1,12,4,6] o) { raw = Conv<strides = [16, 16]>(x, w) o = Sigmoid(raw) }"
    onnx.save(written(text, w=weights), str(tmp_path / "cells.onnx"))
    found = guess_config(tmp_path / "cells.onnx")
    (tmp_path / "cells.yaml").write_text(found.text())
    compute, shipped = load_config(str(tmp_path / "cells.yaml")).head.compute, load_config("fastestdet").head.compute
    assert compute is not None and shipped is not None
    assert list(compute.items()) == list(shipped.items()) and len(found.config.classes) == 7


def test_names_are_as_many_as_the_models_classes():
    shipped = load_config("shapes")
    found = guess_config(SHAPES_MODEL, classes=shipped.classes)
    assert found.config.classes == shipped.classes and not found.unknown
    with pytest.raises(ConfigError, match=r"--classes names 2, and the model has 10; give a name for each"):
        guess_config(SHAPES_MODEL, classes=("a", "b"))


def test_names_in_the_models_metadata_are_the_classes(tmp_path):
    model, names = onnx.load(str(SHAPES_MODEL)), tuple(f"kind {number}" for number in range(10))
    helper.set_model_props(model, {"names": str(dict(enumerate(names)))})
    onnx.save(model, tmp_path / "named.onnx")
    found = guess_config(tmp_path / "named.onnx")
    assert (found.config.classes, found.origins["classes"], found.unknown) == (names, "the model's metadata", {})


def test_the_command_writes_draws_and_refuses_to_replace(images, tmp_path, capsys):
    (tmp_path / "names.txt").write_text("\n".join(load_config("shapes").classes))
    output = tmp_path / "own.yaml"
    command = ["init", str(SHAPES_MODEL), "--images", str(images[0].parent), "--num-images", "4", "-o", str(output)]
    drawn = ["--classes", str(tmp_path / "names.txt"), "--pictures", str(tmp_path / "drawn")]
    assert main([*command, *drawn, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["unknown"] == {} and len(said["pictures"]) == 4
    assert all(Path(picture).is_file() for picture in said["pictures"])
    assert load_config(str(output)).classes == load_config("shapes").classes
    before = output.read_bytes()
    assert main(command) == 1
    assert "exists; choose another -o, or replace it with --force" in capsys.readouterr().err
    assert output.read_bytes() == before


def test_the_command_without_a_terminal_asks_nothing(tmp_path, capsys):
    assert main(["init", str(SHAPES_MODEL), "-o", str(tmp_path / "own.yaml")]) == 0
    said = capsys.readouterr()
    assert "give --images to try others" in said.out and "the model does not hold them" in said.err
    assert main(["init", str(SHAPES_MODEL), "-o", str(tmp_path / "own.json")]) == 1
    assert "must end in .yaml or .yml" in capsys.readouterr().err


@pytest.mark.usefixtures("input_check")
def test_a_head_of_unnamed_classes_that_does_not_work_is_not_taken(images, tmp_path, capsys):
    # As many rows as YOLOX has cells, with the same boxes and scores in every image.
    text = """(float[1,3,64,96] image) => (float[1,126,9] rows) {
        mean = ReduceMean<axes = [1, 2, 3], keepdims = 0>(image) none = Mul(mean, zero) rows = Add(none, held) }"""
    rng = np.random.default_rng(0)
    held = np.concatenate([rng.normal(0, 1, (1, 126, 4)), rng.uniform(0.6, 1, (1, 126, 5))], axis=2).astype(np.float32)
    onnx.save(written(text, held=held, zero=np.zeros(1, np.float32)), str(tmp_path / "rows.onnx"))
    command = [
        "init",
        str(tmp_path / "rows.onnx"),
        "--images",
        str(images[0].parent),
        "-o",
        str(tmp_path / "rows.yaml"),
    ]
    assert main(command) == 1
    said = capsys.readouterr().err
    assert "has a head of decode yolox with 4 classes, but on" in said and "it does not work: " in said
    assert not (tmp_path / "rows.yaml").exists()
    assert "# What the outputs mean: 'rows' (B, 126, 9)." in (tmp_path / "rows.draft.yaml").read_text()
    assert main([*command, "--classes", "a,b,c,d"]) == 0
    assert "this does not look like a working detector" in capsys.readouterr().err


def test_of_an_unknown_head_a_draft_is_written_that_works_once_it_is_finished(tmp_path, capsys):
    # Corners, three classes and the size of a face, which no shipped head has.
    text = """(float[1,3,16,20] image) => (float[1,40,8] rows) {
        mean = ReduceMean<axes = [1, 2, 3], keepdims = 0>(image) rows = Add(mean, held) }"""
    held = np.random.default_rng(0).normal(0, 3, (1, 40, 8)).astype(np.float32)
    onnx.save(written(text, held=held), str(tmp_path / "odd.onnx"))
    command = ["init", str(tmp_path / "odd.onnx"), "-o", str(tmp_path / "odd.yaml")]
    assert main(command) == 1
    place = tmp_path / "odd.draft.yaml"
    said = capsys.readouterr().err
    assert "no head that is known has the outputs 'rows' (2, 40, 8)" in said
    assert f"all else is in the draft '{place}'" in said and not (tmp_path / "odd.yaml").exists()
    draft = place.read_text()
    assert "# What the outputs mean: 'rows' (B, 40, 8)." in draft
    with pytest.raises(ConfigError, match="classes"):
        load_config(str(place))
    # What the user does: takes every # away that stands before a key, and says what the outputs mean.
    finished = re.sub(r"^( *)# ( *\w+:)", r"\1\2", draft, flags=re.MULTILINE)
    finished = finished.replace("[a, b]", "[a, b, c]").replace("output0[..., 4:]", "sigmoid(output0[..., 4:7])")
    place.write_text(finished)
    config = load_config(str(place))
    assert (config.name, config.input.name, config.input.size) == ("odd", "image", (16, 20))
    assert config.classes == ("a", "b", "c")
    boxes, scores = decode({"rows": np.zeros((1, 40, 8), np.float32)}, config)
    assert (boxes.shape, scores.shape) == ((1, 40, 4), (1, 40, 3))
    # What was written is not lost.
    assert main(command) == 1
    assert "finish the draft that is there" in capsys.readouterr().err and place.read_text() == finished
    assert main([*command, "--force"]) == 1
    assert place.read_text() == draft
