import hashlib
import json
import os
import threading
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import trtdet.data.stream
from trtdet.config import COCO_CLASSES, InputConfig, shipped
from trtdet.data import CocoDataset, ImageStream, content_hash, evenly, find_images
from trtdet.data.images import preprocess, read_image
from trtdet.errors import DataError, TrtdetWarning

CONFIG = InputConfig(size=(32, 32))


def save(path: Path, seed: int = 0, low: int = 0, high: int = 256) -> Path:
    pixels = np.random.default_rng(seed).integers(low, high, (20, 30, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path


def decoders() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("trtdet-decode")]


@pytest.fixture
def images(tmp_path):
    return tuple(save(tmp_path / f"{i:03}.png", i) for i in range(25))


# Finding images


def test_the_hash_of_files_is_of_lengths_names_and_bytes(tmp_path):
    """Every version of trtdet must give the same, which bundles and journals are compared by."""
    (tmp_path / "a.png").write_bytes(b"abc")
    written = (5).to_bytes(8, "little") + b"a.png" + (3).to_bytes(8, "little") + b"abc"
    assert content_hash([tmp_path / "a.png"]) == hashlib.sha256(written).hexdigest()
    assert content_hash([]) == hashlib.sha256().hexdigest()


def test_folder_is_flat_and_sorted_by_name(tmp_path):
    for name in ("b.JPG", "a.png", "notes.md"):
        (tmp_path / name).touch()
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "c.png").touch()
    assert [path.name for path in find_images(tmp_path)] == ["a.png", "b.JPG"]


def test_folder_without_images_says_what_it_has(tmp_path):
    for name in ("a.md", "b.md", "c.npy", "Makefile"):
        (tmp_path / name).touch()
    (tmp_path / "sub" / "deep").mkdir(parents=True)
    with pytest.raises(DataError, match=r"no images, it has 2 \.md, 1 without suffix, 1 \.npy, 1 folders") as caught:
        find_images(tmp_path)
    assert "allowed suffixes are .bmp" in str(caught.value)
    with pytest.raises(DataError, match="it has 1 folders"):
        find_images(tmp_path / "sub")


def test_empty_folder_missing_source_and_wrong_kind(tmp_path):
    with pytest.raises(DataError, match="it has nothing"):
        find_images(tmp_path)
    with pytest.raises(DataError, match=r"none' does not exist; give a folder of images or a \.txt list"):
        find_images(tmp_path / "none")
    with pytest.raises(DataError, match=r"is a \.png file; give a folder or a \.txt list"):
        find_images(save(tmp_path / "a.png"))


def test_list_keeps_its_order_and_comments_say_nothing(tmp_path):
    (tmp_path / "pictures").mkdir()
    for name in ("a.png", "b.png"):
        (tmp_path / "pictures" / name).touch()
        (tmp_path / name).touch()
    pinned = tmp_path / "list.txt"
    pinned.write_text("# which\n\n b.png \na.png\n")
    assert find_images(pinned) == (tmp_path / "b.png", tmp_path / "a.png")
    assert find_images(pinned, tmp_path / "pictures")[0] == tmp_path / "pictures" / "b.png"


def test_list_errors(tmp_path):
    pinned = tmp_path / "list.txt"
    pinned.write_text("a.png\nb.png\nc.png\nd.png\n")
    (tmp_path / "a.png").touch()
    with pytest.raises(DataError, match=r"3 of 4 files named .* b\.png, c\.png, d\.png; give the folder .* root"):
        find_images(pinned)
    (tmp_path / "a.png").unlink()
    with pytest.raises(DataError, match=r"4 of 4 .* a\.png, b\.png, c\.png, \.\.\."):
        find_images(pinned)
    with pytest.raises(DataError, match="nowhere' for the names in"):
        find_images(pinned, tmp_path / "nowhere")
    pinned.write_text("# nothing\n")
    with pytest.raises(DataError, match="names no file"):
        find_images(pinned)
    pinned.write_text("a.png\na.png\n")
    with pytest.raises(DataError, match=r"names 1 files twice: a\.png"):
        find_images(pinned)
    pinned.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="cannot be read"):
        find_images(pinned)


@pytest.mark.parametrize("name", ["a" * 5000 + ".png", "a\0b.png"])
def test_a_name_that_no_file_can_have_is_an_image_that_is_missing(tmp_path, name):
    (tmp_path / "list.txt").write_text(f"{name}\n")
    with pytest.raises(DataError, match="1 of 1 files named in .* are not in") as raised:
        find_images(tmp_path / "list.txt")
    assert len(str(raised.value)) < 1000


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b"])
def test_a_source_that_no_folder_can_be_is_missing(name):
    with pytest.raises(DataError, match="does not exist; give a folder of images"):
        find_images(name)


def test_shipped_calibration_list(shared_data):
    found = find_images(shipped("calib")["coco-train2017-128"], shared_data / "coco" / "train2017")
    assert found == find_images(shared_data / "coco" / "train2017")
    assert len(found) == 128


@pytest.mark.parametrize(
    ("count", "chosen"),
    [(1, "a"), (2, "ae"), (3, "adg"), (4, "aceg"), (9, "abcdefghi"), (10, "abcdefghi"), (12, "abcdefghi")],
)
def test_items_are_chosen_evenly_from_the_first_on(count, chosen):
    assert evenly("abcdefghi", count) == tuple(chosen)


# Hashing


def test_content_hash_sees_names_bytes_and_order(tmp_path):
    a, b = tmp_path / "a.png", tmp_path / "b.png"
    a.write_bytes(b"one")
    b.write_bytes(b"two")
    first = content_hash([a, b])
    assert first == content_hash((a, b)) and len(first) == 64
    assert first != content_hash([b, a]) != content_hash([a])
    b.write_bytes(b"twp")
    assert content_hash([a, b]) != first
    moved = tmp_path / "sub"
    moved.mkdir()
    (moved / "a.png").write_bytes(b"one")
    assert content_hash([moved / "a.png"]) == content_hash([a])
    a.rename(tmp_path / "c.png")
    assert content_hash([tmp_path / "c.png"]) != content_hash([moved / "a.png"])
    with pytest.raises(DataError, match=r"a\.png' cannot be read"):
        content_hash([a])


# Streaming


@pytest.mark.parametrize("workers", [1, 3])
def test_stream_keeps_the_order_and_the_pixels(images, workers):
    stream = ImageStream(images, CONFIG, batch_size=4, workers=workers)
    batches = list(stream)
    assert [len(batch) for batch in batches] == [4] * 6 + [1]
    assert [i for batch in batches for i in batch.indices] == list(range(25))
    assert tuple(path for batch in batches for path in batch.paths) == images
    for batch in batches:
        assert batch.images.dtype == np.float32 and batch.images.shape == (len(batch), 3, 32, 32)
        for tensor, placement, path in zip(batch.images, batch.transforms, batch.paths, strict=True):
            expected, where = preprocess(read_image(path), CONFIG)
            np.testing.assert_array_equal(tensor, expected)
            assert placement == where
    assert stream.pixel_range == (0, 255) and stream.constant == () and stream.skipped == ()
    stream.check_pixels()
    assert len(list(stream)) == 7  # a second pass is a whole one
    assert not decoders()


def test_stream_reads_only_a_few_ahead(images, monkeypatch):
    started: list[Path] = []

    def counted(path: Path) -> Any:
        started.append(path)
        return read_image(path)

    monkeypatch.setattr(trtdet.data.stream, "read_image", counted)
    for seen, _ in enumerate(ImageStream(images, CONFIG, workers=2), start=1):
        assert len(started) <= seen + 2 * 2
    assert len(started) == 25


def test_stream_ends_cleanly_when_left_early(images):
    for _ in ImageStream(images, CONFIG):
        break
    assert not decoders()
    with pytest.raises(KeyboardInterrupt):
        for _ in ImageStream(images, CONFIG):
            raise KeyboardInterrupt
    assert not decoders()


def test_bad_image_is_skipped_named_and_counted(images):
    images[3].write_bytes(b"broken")
    stream = ImageStream(images, CONFIG, batch_size=10)
    with pytest.warns(TrtdetWarning, match=r"skipped: image '.*003\.png' cannot be decoded"):
        batches = list(stream)
    assert [len(batch) for batch in batches] == [10, 10, 4]
    assert batches[0].indices == (0, 1, 2, 4, 5, 6, 7, 8, 9, 10)
    ((path, reason),) = stream.skipped
    assert path == images[3] and "cannot be decoded" in reason


def test_a_tenth_of_bad_images_is_allowed_and_more_are_an_error(images):
    for path in images[3:5]:
        path.write_bytes(b"broken")
    with pytest.warns(TrtdetWarning, match="skipped"):
        assert sum(len(batch) for batch in ImageStream(images[:20], CONFIG)) == 18
    with pytest.warns(TrtdetWarning), pytest.raises(DataError, match=r"2 of 19 .* allowed are 10%: 003\.png, 004\.png"):
        list(ImageStream(images[:19], CONFIG))
    with pytest.raises(DataError, match=r"1 of 1 images cannot be read so far.*003\.png"):
        list(ImageStream(images[3:4], CONFIG))
    with pytest.raises(DataError, match=r"003\.png' cannot be decoded"):
        list(ImageStream(images, CONFIG, on_bad="raise"))
    assert not decoders()


def test_stream_options():
    with pytest.raises(ValueError, match="at least 1, got 0 and 2"):
        ImageStream([], CONFIG, batch_size=0, workers=2)
    with pytest.raises(ValueError, match="at least 1, got 1 and 0"):
        ImageStream([], CONFIG, workers=0)
    assert ImageStream([], CONFIG).workers == len(os.sched_getaffinity(0))
    assert list(ImageStream([], CONFIG)) == []


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((0, 2), r"3 images lie in 0\.\.1, expected 0\.\.255.*first: 0\.png"),
        ((0, 1), r"each of the 3 images has a single colour \(0\.png, 1\.png, 2\.png\)"),
        ((200, 201), r"each of the 3 images has a single colour"),
    ],
)
def test_check_pixels_refuses_0_to_1_and_only_constant_images(tmp_path, values, message):
    stream = ImageStream([save(tmp_path / f"{i}.png", i, *values) for i in range(3)], CONFIG)
    with pytest.raises(DataError, match="iterate the stream first"):
        stream.check_pixels()
    list(stream)
    assert stream.pixel_range == (values[0], values[1] - 1)
    with pytest.raises(DataError, match=message):
        stream.check_pixels()


def test_check_pixels_warns_of_some_constant_images(images):
    Image.new("RGB", (20, 20), (255, 0, 0)).save(images[2])
    stream = ImageStream(images, CONFIG)
    list(stream)
    assert stream.constant == (images[2],)
    with pytest.warns(TrtdetWarning, match=r"1 of 25 images have a single colour: 002\.png"):
        stream.check_pixels()


# COCO


@pytest.fixture
def coco(tmp_path):
    folder = tmp_path / "images"
    folder.mkdir()
    for i in range(5):
        save(folder / f"{i}.png", i)
    document = {
        "images": [{"id": i * 10, "file_name": f"{i}.png", "width": 30, "height": 20} for i in (3, 1, 0, 2, 4)],
        "annotations": [
            {"id": 1, "image_id": 10, "category_id": 7, "bbox": [1, 2, 3.5, 4], "area": 9.0, "iscrowd": 0},
            {"id": 2, "image_id": 0, "category_id": 2, "bbox": [5, 5, 10, 10], "iscrowd": 1},
        ],
        "categories": [{"id": 2, "name": "cat"}, {"id": 7, "name": "dog"}, {"id": 9, "name": "unused"}],
    }
    path = tmp_path / "annotations.json"
    path.write_text(json.dumps(document))
    return path, folder, document


def test_coco_is_matched_by_name_and_sorted_by_id(coco):
    path, folder, _ = coco
    dataset = CocoDataset.load(path, folder, ("dog", "cat"))
    assert dataset.category_ids == (7, 2) and dataset.annotations == path
    assert [image.id for image in dataset.images] == [0, 10, 20, 30, 40]
    assert dataset.images[1].path == folder / "1.png" and dataset.images[1].width == 30
    truth = dataset.truth
    assert len(truth) == 2 and truth.classes.tolist() == [0, 1] and truth.image_ids.tolist() == [10, 0]
    assert truth.areas.tolist() == [9.0, 100.0]  # the second file has none, so the box's
    assert truth.crowd.tolist() == [False, True]
    np.testing.assert_array_equal(truth.boxes[0], [1, 2, 3.5, 4])


def change(path: Path, document: dict[str, Any], key: str, value: Any) -> None:
    path.write_text(json.dumps(document | {key: value}))


def test_coco_broken_files(coco, tmp_path):
    path, folder, document = coco

    def fails(match: str) -> None:
        with pytest.raises(DataError, match=match) as caught:
            CocoDataset.load(path, folder, ("cat", "dog"))
        assert "\n" not in str(caught.value)

    path.write_text(path.read_text()[:-50])
    fails("do not fit: Invalid JSON: EOF")
    path.write_bytes(b"\xff\xff")
    fails("Invalid JSON")
    path.write_text("[]")
    fails("do not fit: Input should be an object; give a complete COCO instances file")
    path.write_text("[" * 100_000)
    fails("Invalid JSON")
    path.write_text(json.dumps({"images": [], "annotations": []}))
    fails("do not fit: 'categories': field required; give")
    change(path, document, "images", {})
    fails(r"'images': input should be a valid (list|array), got {}")
    change(path, document, "images", [{"id": 1, "file_name": "a", "width": 3}])
    fails(r"'images\.0\.height': field required")
    change(path, document, "annotations", [3])
    fails(r"'annotations\.0': input should be .*, got 3")
    for key, name, value in (
        ("images", "id", [1]),
        ("images", "id", 2**63),
        ("images", "width", None),
        ("images", "height", "x" * 10_000),
        ("annotations", "image_id", {}),
        ("annotations", "category_id", 1.5),
        ("annotations", "area", "large"),
        ("categories", "id", None),
        ("categories", "name", ["cat"]),
    ):
        change(path, document, key, [document[key][0] | {name: value}, *document[key][1:]])
        # Pydantic 2.6 says of so long a text only that it is too long.
        words = "unable to parse|input should be" if name == "height" else "input should be"
        fails(rf"do not fit: '{key}\.0\.{name}': ({words}) .*, got .{{,80}}; give")
    change(path, document, "images", [])
    fails("have no images")
    change(path, document, "images", document["images"] + document["images"][:1])
    fails("images has ids twice: 30")
    change(path, document, "annotations", [])
    fails("have no boxes")
    change(path, document, "annotations", [document["annotations"][0] | {"image_id": 99}])
    fails("1 image ids that are not in 'images': 99")
    change(path, document, "annotations", [document["annotations"][0] | {"category_id": 5}])
    fails("category ids that are not in 'categories': 5")
    for bbox in ([1, 2, 3], "x", [1, 2, None, 4], [1, 2, float("nan"), 4]):
        change(path, document, "annotations", [document["annotations"][0] | {"bbox": bbox}])
        fails(r"'annotations\.0\.bbox(\.2|\.3)?': (field required|input should be )")
    change(path, document, "categories", [*document["categories"], {"id": 11, "name": "cat"}])
    fails("categories twice: cat")
    path.unlink()
    fails("cannot be read: No such file")


def test_coco_fields_that_are_absent_or_of_another_kind_of_number(coco):
    path, folder, document = coco
    plain = {"image_id": 10, "category_id": 7, "bbox": [1, 2, 3, 4]}
    boxes = [plain, plain | {"area": None, "iscrowd": None}, plain | {"area": float("nan"), "iscrowd": True}]
    change(path, document, "annotations", [*boxes, plain | {"image_id": 10.0, "area": 5, "segmentation": [[1, 2]]}])
    truth = CocoDataset.load(path, folder, ("cat", "dog")).truth
    assert truth.areas.tolist() == [12.0, 12.0, 12.0, 5.0]
    assert truth.crowd.tolist() == [False, False, True, False] and truth.image_ids.tolist() == [10] * 4
    change(path, document, "categories", [{"id": 2, "name": 0}, {"id": 7, "name": "dog"}])
    assert CocoDataset.load(path, folder, ("dog", "0")).category_ids == (7, 2)


def test_categories_count_as_other_classes_or_are_left_out(coco):
    path, folder, _ = coco
    with pytest.raises(DataError, match=r"--categories CATEGORY=CLASS, and leaves all others out with .* others="):
        CocoDataset.load(path, folder, ("dog",))
    alone = CocoDataset.load(path, folder, ("dog",), categories={"others": ""})
    assert alone.category_ids == (7,) and alone.truth.classes.tolist() == [0]
    assert CocoDataset.load(path, folder, ("dog",), categories={"cat": ""}).truth.image_ids.tolist() == [10]
    pets = CocoDataset.load(path, folder, ("pet",), categories={"cat": "pet", "dog": "pet"})
    assert pets.category_ids == (2,) and pets.truth.classes.tolist() == [0, 0]
    with pytest.warns(TrtdetWarning, match="1 of the 2 classes are no category of .* and are not scored: bird"):
        more = CocoDataset.load(path, folder, ("bird", "dog"), categories={"others": ""})
    assert more.category_ids == (10, 7) and more.truth.classes.tolist() == [1]
    for wrong, match in (
        ({"horse": "dog"}, "have no category 'horse'; they have cat, dog, unused"),
        ({"cat": "horse"}, "'horse' must be one of the model's classes"),
        ({"others": "dog"}, "or nothing to leave the boxes out"),
        ({"cat": "", "dog": ""}, "are no category"),
    ):
        with pytest.raises(DataError, match=match):
            CocoDataset.load(path, folder, ("dog",), categories=wrong)
    with pytest.raises(DataError, match="have no boxes of the model's classes"), pytest.warns(TrtdetWarning):
        CocoDataset.load(path, folder, ("bird",), categories={"others": ""})


def test_some_of_the_images_with_their_boxes(coco):
    dataset = CocoDataset.load(coco[0], coco[1], ("cat", "dog"))
    part = dataset.first(2)
    assert [image.id for image in part.images] == [0, 20] and part.truth.image_ids.tolist() == [0]
    assert part.truth.crowd.tolist() == [True] and part.truth.areas.tolist() == [100.0]
    assert len(dataset.first(9).images) == 5
    moved = replace(dataset, truth=replace(dataset.truth, image_ids=np.array([10, 10])))
    with pytest.raises(DataError, match="none of 2 images of .* has a box"):
        moved.first(2)


def test_coco_classes_must_match_both_ways(coco):
    path, folder, _ = coco
    with pytest.raises(DataError, match=r"1 of the 3 classes are no category \(horse\); 'classes' must name"):
        CocoDataset.load(path, folder, ("cat", "dog", "horse"))
    with pytest.raises(DataError, match=r"1 of the 3 categories have boxes but are no class \(dog\)"):
        CocoDataset.load(path, folder, ("cat",))
    with pytest.raises(DataError, match=r"are no category \(Cat\) and 1 of the 3 categories .* no class \(cat\)"):
        CocoDataset.load(path, folder, ("Cat", "dog"))


def test_coco_missing_images(coco):
    path, folder, _ = coco
    for i in range(4):
        (folder / f"{i}.png").unlink()
    with pytest.raises(DataError, match=r"4 of the 5 images .* 0\.png, 1\.png, 2\.png, \.\.\.; give the folder"):
        CocoDataset.load(path, folder, ("cat", "dog"))
    with pytest.raises(DataError, match=r"image folder '.*' does not exist"):
        CocoDataset.load(path, folder / "none", ("cat", "dog"))
    path.write_text(path.read_text().replace("0.png", "x" * 300))
    with pytest.raises(DataError, match=r"4 of the 5 images"):
        CocoDataset.load(path, folder, ("cat", "dog"))


def test_coco_subset(shared_data):
    root = shared_data / "coco"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dataset = CocoDataset.load(root / "annotations/instances_val2017.json", root / "val2017", COCO_CLASSES)
    assert (len(dataset.images), len(dataset.truth), int(dataset.truth.crowd.sum())) == (188, 1692, 20)
    assert dataset.category_ids[0] == 1 and dataset.category_ids[-1] == 90
