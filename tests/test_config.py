import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from trtdet.config import COCO_CLASSES, Config, load_config, shipped
from trtdet.errors import ConfigError

PLAIN = """\
name: mine
classes: [cat, dog]
input:
  size: [64, 96]
head:
  decode: yolox
"""


@pytest.fixture
def write(tmp_path):
    def write(text: str, name: str = "mine.yaml") -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write


def changed(**sections: Any) -> str:
    """PLAIN with keys added or replaced: ``changed(input={"std": [1, 1, 0]}, name=3)``."""
    data = yaml.safe_load(PLAIN)
    for key, value in sections.items():
        data[key] = {**data[key], **value} if isinstance(value, dict) and isinstance(data.get(key), dict) else value
    return str(yaml.safe_dump(data))


def message(path: Path | str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    text = str(caught.value)
    assert "\n" not in text
    return text


# What is right


@pytest.mark.parametrize("name", sorted(shipped("configs")))
def test_every_shipped_configuration_loads_by_name_and_by_path(name):
    by_name = load_config(name)
    assert by_name == load_config(shipped("configs")[name])
    assert by_name.name == name
    assert len(by_name.classes) in (1, 2, 10, 15, 80)


def test_the_coco_classes_are_80_distinct_names():
    assert len(COCO_CLASSES) == len(set(COCO_CLASSES)) == 80
    assert load_config("yolox").classes == COCO_CLASSES


def test_a_users_own_model_needs_under_25_lines(write):
    assert len(PLAIN.splitlines()) < 25
    config = load_config(write(PLAIN))
    assert config.classes == ("cat", "dog")
    assert (config.input.height, config.input.width) == (64, 96)
    assert config.nms.score_threshold == 0.001


def test_whole_numbers_are_taken_where_floats_are_meant(write):
    config = load_config(write(changed(input={"mean": [0, 1, 2], "std": [1, 2, 3], "scale": 2})))
    assert config.input.mean == (0.0, 1.0, 2.0)
    assert config.input.scale == 2.0


def test_a_configuration_cannot_be_changed_after_loading():
    with pytest.raises(ValueError, match="frozen"):
        load_config("yolox").name = "other"  # type: ignore[misc]


def test_no_suppression_is_an_overlap_that_no_boxes_have(write):
    config = load_config(write(PLAIN + "nms: none\n"))
    assert (config.nms.iou_threshold, config.nms.suppresses, config.nms.most_candidates) == (1.0, False, 300)
    assert config.with_nms(max_detections=7).nms.most_candidates == 7
    assert load_config(write("extends: yolox\nnms: none\n")).nms == config.nms
    assert "nms" in message(write(PLAIN + "nms: nothing\n"))


# extends


def test_extends_gives_only_what_differs(write):
    config = load_config(write("extends: yolox\nname: mine\ninput:\n  size: [640, 640]\n"))
    base = load_config("yolox")
    assert config.input.size == (640, 640)
    assert config.input.color == base.input.color == "bgr"
    assert (config.head, config.nms, config.classes) == (base.head, base.nms, base.classes)


def test_extends_can_be_chained_and_lists_are_replaced_whole(write):
    write("extends: shapes\nname: middle\nhead:\n  strides: [8, 16]\n", "middle.yaml")
    last = write("extends: middle.yaml\nname: last\nclasses: [one]\n", "last.yaml")
    config = load_config(last)
    assert (config.name, config.classes, config.head.strides) == ("last", ("one",), (8, 16))
    assert config.input.size == (256, 256)


def test_extends_finds_a_file_beside_the_one_that_names_it(write, tmp_path):
    (tmp_path / "sub").mkdir()
    write(PLAIN, "sub/base.yaml")
    inner = write("extends: base.yaml\nname: inner\n", "sub/inner.yaml")
    outer = write("extends: sub/inner.yaml\nname: outer\n", "outer.yaml")
    assert load_config(inner).classes == ("cat", "dog")
    assert load_config(outer).name == "outer"


@pytest.mark.parametrize("other", ["a.yaml", "b.yaml"])
def test_extends_in_a_circle_is_an_error(write, other):
    write("extends: a.yaml\n", "b.yaml")
    text = message(write(f"extends: {other}\n", "a.yaml"))
    assert "circle" in text and "yolox" in text


# Files


def test_a_missing_file_lists_the_shipped_names_and_suggests_one():
    text = message("yolov55")
    assert "neither a file nor a shipped name" in text
    assert f"shipped: {', '.join(shipped('configs'))}" in text
    assert "did you mean 'yolov5'" in text


def test_what_cannot_be_read_is_an_error(tmp_path):
    assert "cannot be read" in message(tmp_path)
    assert "'/dev/zero' is larger than" in message("/dev/zero")
    path = tmp_path / "bad.yaml"
    path.write_bytes(b"\xff\xfe\x80abc")
    assert "cannot be read" in message(path)
    (tmp_path / "a.yaml").symlink_to(tmp_path / "b.yaml")
    (tmp_path / "b.yaml").symlink_to(tmp_path / "a.yaml")
    assert "cannot be read" in message(tmp_path / "a.yaml")


@pytest.mark.parametrize(
    "value",
    [
        *("2024-13-45", "2024-02-30 25:61:00", "9" * 5000, "!!int x", "!!float x", "!!bool x"),
        *("!!timestamp x", "!!binary x", "!!null {a: b}"),
    ],
)
def test_a_value_that_its_tag_cannot_be_is_an_error(write, value):
    text = message(write(PLAIN + f"nms: {{max_detections: {value}}}\n"))
    assert "mine.yaml" in text
    assert len(text) < 500


def test_a_short_message_about_a_value_of_many_parts(write):
    assert len(message(write(bomb(4) + PLAIN))) < 1000
    assert len(message(write(PLAIN.replace("mine", "[" + "abc, " * 1000 + "]")))) < 500
    many = message(write(PLAIN.replace("[cat, dog]", str(list(range(5000))))))
    assert "(and 4999 more: " in many and many.endswith(", ...)")
    assert len(many) < 2001


def test_aliases_as_they_are_meant_are_taken(write):
    text = "name: &n mine\nclasses: [*n]\ninput: &i {size: &s [64, 64]}\nhead: {decode: yolox, strides: *s}\n"
    assert load_config(write(text)).classes == ("mine",)
    merged = load_config(write(PLAIN.replace("input:\n", "input:\n  <<: {scale: 2.0}\n")))
    assert (merged.input.scale, merged.input.size) == (2.0, (64, 96))


@pytest.mark.parametrize("name", ["a\\0b", "x" * 300, "a\\nb"])
def test_extends_a_name_that_no_file_can_have_is_an_error(write, name):
    assert "configuration 'a" in message(write(f'extends: "{name}"\n')) or name.startswith("x")


# Keys


def bomb(levels: int) -> str:
    """Aliases that stand for 9 ** levels values."""
    lines = ["a0: &a0 [x]"]
    for level in range(1, levels + 1):
        nine = ", ".join([f"*a{level - 1}"] * 9)
        lines.append(f"a{level}: &a{level} [{nine}]")
    return "\n".join(lines) + "\n"


def merged(keys: int) -> str:
    """As many mappings as keys, each of which takes them all over by ``<<``."""
    base = ", ".join(f"k{number}: v" for number in range(keys))
    return f"base: &base {{{base}}}\n" + "".join(f"a{number}: {{<<: *base}}\n" for number in range(keys))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("extends: yolx\n", "did you mean 'yolox'?"),
        ("extends: [yolox]\n", "'extends' must be a name or a file, got ['yolox']"),
        ("extends: /dev/zero\n", "'/dev/zero' is larger than"),
        *((text, "is not YAML") for text in ("a: [1", "a: b: c", "\t- x", "a: !!python/object/apply:os.getcwd []")),
        (f"name: {'[' * 2_000}{']' * 2_000}\n", "is nested too deeply"),
        (f"name: {'{a: ' * 2_000}{'}' * 2_000}\n", "is nested too deeply"),
        (bomb(9) + PLAIN, "over 100000 values by its aliases"),
        (merged(400) + PLAIN, "over 100000 merged keys"),
        (PLAIN.replace("[cat, dog]", "&a [*a]"), "has an alias that contains itself"),
        ("- a\n- b", "must be a mapping of keys, got list"),
        ("hello", "must be a mapping of keys, got str"),
        ("", "must be a mapping of keys, got NoneType"),
        ("7", "must be a mapping of keys, got int"),
        (PLAIN + "5: 6\n", "keys should be strings"),
        (PLAIN + '"a\\nb": 1\n', "unknown key 'a b'"),
        (PLAIN.replace("  size", '  "\\e[2J": 1\n  size'), "unknown key 'input.\ufffd[2J'"),
        (changed(clases=1), "unknown key 'clases', did you mean 'classes'?; allowed here: classes, "),
        (changed(input={"interpolatoin": 1}), "'input.interpolatoin', did you mean 'interpolation'?; allowed here: "),
        (changed(head={"decoed": 1}), "unknown key 'head.decoed', did you mean 'decode'?; allowed here: "),
        (changed(nms={"score_treshold": 1}), "'nms.score_treshold', did you mean 'score_threshold'?; allowed here: "),
        (PLAIN.replace("name: mine\n", ""), "key 'name' is missing"),
        (PLAIN.replace("  size: [64, 96]\n", "  {}\n"), "key 'input.size' is missing"),
        (PLAIN.replace("  decode: yolox\n", "  {}\n"), "key 'head.decode' is missing"),
        (changed(input={"size": [64]}), "key 'input.size.1' is missing"),
        (changed(input={"mean": [0, 0]}), "key 'input.mean.2' is missing"),
        (PLAIN.replace("name: mine", 'name: "a\\ud800"'), "key 'name': has a lone surrogate"),
        (PLAIN.replace("dog", '"\\udfff"'), "key 'classes.1': has a lone surrogate"),
        (PLAIN + '  outputs: ["\\udc00"]\n', "key 'head.outputs.0': has a lone surrogate"),
        (PLAIN.replace("size:", 'name: "\\ud83d"\n  size:'), "key 'input.name': has a lone surrogate"),
        (PLAIN.replace("mine", f"0x{'f' * 6000}"), "key 'name': input should be a valid string, got int of too many"),
        (PLAIN.replace("64", f"0x{'f' * 6000}"), "key 'input.size.0'"),
        (changed(classes=[]), "key 'classes': needs at least one class name"),
        (changed(classes=["dog", "cat", "dog", "cat", "cow"]), "class names must be distinct, got twice: cat, dog"),
        (
            changed(nms={"max_detections": 20, "pre_nms_topk": 10}),
            "key 'nms': max_detections (20) must not exceed pre_nms_topk (10)",
        ),
    ],
    ids=itertools.count(),
)
def test_a_message_names_the_place_and_what_is_wrong(write, text, words):
    """Text with a lone surrogate could not be read again from a manifest."""
    problem = message(write(text))
    assert words in problem
    assert len(problem) < 600


def test_every_character_is_taken_in_a_name(write):
    assert load_config(write(PLAIN.replace("mine", '"h\u00e9lmet \U0001f600"'))).name == "h\u00e9lmet \U0001f600"


def test_every_problem_is_told_at_once(write):
    text = message(write("name: mine\nclasses: [a]\ninput: {siez: [1, 1]}\nhead: {}\n"))
    assert "(and 2 more: " in text
    assert all(part in text for part in ("'input.siez'", "'input.size' is missing", "'head.decode' is missing"))


WRONG: dict[str, list[Any]] = {
    "name": [7],
    "classes": ["coconut"],
    "classes.0": [[1, 2]],
    "classes.1": [["yes", True]],
    "input": [None, [1]],
    "input.size": [640, [64, 64, 3]],
    "input.size.0": [[64.0, 64], [-64, 64]],
    "input.size.1": [[64, "64"], [64, 0]],
    "input.resize": ["letterbox"],
    "input.color": ["RGB"],
    "input.pad_value": [256, -1, True],
    "input.scale": [0, "1/255", math.nan, math.inf],
    "input.mean.1": [[0, math.nan, 0]],
    "input.std.2": [[1, 1, -math.inf]],
    "input.std": [[1, 1, 0], [1, -1, 1]],
    "head.decode": ["yolo"],
    "head.strides.1": [[8, 0]],
    "head.strides": [[], 8],
    "head.bins": [1],
    "head.cell_offset": [1.5, math.nan],
    "head.outputs": ["output", []],
    "head.scores": ["sigmoid"],
    "nms.score_threshold": [1.01, -0.1, math.nan],
    "nms.iou_threshold": [0, math.nan, math.inf],
    "nms.max_detections": [0],
    "nms.pre_nms_topk": [1.5],
    "nms.class_agnostic": ["yes please"],
    "nms.candidates": ["best"],
}
"""Values by the path that an error names."""


@pytest.mark.parametrize(("path", "value"), [(path, value) for path, values in WRONG.items() for value in values])
def test_a_value_of_the_wrong_type_or_range_is_named_by_its_path(write, path, value):
    section, key = [*path.split("."), ""][:2]
    nested = section in ("input", "head", "nms") and key
    text = message(write(changed(**{section: {key: value} if nested else value})))
    assert f"key '{path}'" in text
    assert "got" in text


def test_a_size_that_is_no_multiple_of_a_stride_is_an_error_for_yolox_only(write):
    assert "input.size [64, 90] is not a multiple of stride 8" in message(write(changed(input={"size": [64, 90]})))
    load_config(write(changed(input={"size": [64, 90]}, head={"decode": "dfl"})))


# Masks, keypoints, rotated boxes


def test_parts_are_read_and_have_defaults(write):
    keys = {"decode": "yolov8", "masks": True, "keypoints": {"names": ["a", "b"]}}
    head = load_config(write(changed(head=keys))).head
    assert head.has_parts and head.masks and not head.rotated
    assert head.keypoints is not None and head.keypoints.sigmas == (0.5, 0.5) and head.keypoints.skeleton == ()
    assert not load_config(write(changed())).head.has_parts


def test_keypoints_of_coco_are_17_with_its_tolerances(write):
    keypoints = load_config(write(changed(head={"decode": "yolov8", "keypoints": "coco"}))).head.keypoints
    assert keypoints is not None and len(keypoints.names) == len(keypoints.sigmas) == 17
    assert sorted(set(sum(keypoints.skeleton, ()))) == list(range(17))
    assert keypoints.sigmas[:3] == (0.026, 0.025, 0.025)


@pytest.mark.parametrize(
    ("head", "words"),
    [
        ({"decode": "yolox", "masks": True}, "belong to head.decode yolov5, yolov8, boxes, detections, not yolox"),
        ({"decode": "boxes", "rotated": True}, "head.rotated takes head.boxes cxcywh, not xyxy"),
        (
            {"decode": "boxes", "boxes": "cxcywh", "units": "relative", "rotated": True},
            "head.rotated takes head.units pixels, not relative",
        ),
        ({"decode": "yolov8", "keypoints": {"names": ["a", "a"]}}, "keypoint names must be distinct"),
        ({"decode": "yolov8", "keypoints": {"names": ["a"], "sigmas": [1, 2]}}, "has 1 names and 2 sigmas"),
        ({"decode": "yolov8", "keypoints": {"names": ["a"], "skeleton": [[0, 1]]}}, "not among 0 to 0"),
        ({"decode": "yolov8", "keypoints": {}}, "key 'head.keypoints.names' is missing"),
        ({"decode": "yolov8", "keypoints": "face"}, "key 'head.keypoints'"),
        (
            {"decode": "yolov8", "keypoints": {"names": ["a"], "sigma": [1]}},
            "unknown key 'head.keypoints.sigma', did you mean 'sigmas'?",
        ),
    ],
)
def test_wrong_parts_are_named(write, head, words):
    assert words in message(write(changed(head=head)))


def test_plain_boxes_are_written_without_keys_of_parts():
    assert not {"masks", "keypoints", "rotated"} & set(load_config("yolov8").model_dump()["head"])


# with_nms


def test_with_nms_replaces_what_is_given_and_keeps_the_rest():
    config = load_config("yolox")
    other = config.with_nms(score_threshold=0.5, max_detections=None, class_agnostic=False)
    assert (other.nms.score_threshold, other.nms.max_detections) == (0.5, 300)
    assert (other.nms.candidates, other.input) == ("best-class", config.input)
    assert config.nms.score_threshold == 0.001
    assert config.with_nms(score_threshold=None) is config


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"score_threshold": 2.0}, "options: key 'nms.score_threshold': input should be less than or equal to 1"),
        ({"max_detections": 4000}, "max_detections (4000) must not exceed pre_nms_topk (3000)"),
        ({"topk": 4000}, "unknown key 'nms.topk'"),
    ],
)
def test_with_nms_names_what_is_out_of_range(changes, said):
    with pytest.raises(ConfigError) as caught:
        load_config("yolov5").with_nms(**changes)
    assert said in str(caught.value)


def test_a_configuration_survives_json():
    config = load_config("dfl")
    assert Config.model_validate_json(config.model_dump_json()) == config
