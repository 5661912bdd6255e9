"""Detector.predict on everything that it takes, and what its results give."""

import base64
import itertools
import json
import re
import resource
import shutil
import sys
import threading
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from PIL import Image
from trained_cards import HEADS, MODEL, configured

from benchmarks import cards
from trtdet import Detector, Prediction, load_config
from trtdet.backends import OnnxRunner
from trtdet.data.ahead import ahead
from trtdet.data.images import preprocess, read_image
from trtdet.demo import shapes
from trtdet.detection.masks import from_run_lengths
from trtdet.errors import ConfigError, DataError, OutputError, TrtdetError
from trtdet.exporter import SHAPES_MODEL
from trtdet.runtime.saving import save_predictions
from trtdet.runtime.sources import Frame


@pytest.fixture(scope="module")
def detector():
    return Detector.open(SHAPES_MODEL, load_config("shapes"))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    split = shapes.generate(tmp_path_factory.mktemp("data"), "val", 6)
    return sorted(split.images.iterdir())


@pytest.fixture(scope="module")
def expected(detector, files):
    """Boxes in pixels of the image, scores and classes over 0.25, by the parts that predict() is made of."""
    found = []
    for file in files:
        inputs, transform = preprocess(read_image(file), detector.input)
        boxes, scores, classes = detector.run(inputs[None]).over(0.25).image(0)
        found.append((transform.to_image(boxes), scores, classes))
    assert all(len(boxes) for boxes, _, _ in found)
    return found


def same(predictions: list[Prediction], expected: list[Any]) -> None:
    assert len(predictions) == len(expected)
    for prediction, (boxes, scores, classes) in zip(predictions, expected, strict=True):
        np.testing.assert_array_equal(prediction.boxes, boxes)
        np.testing.assert_array_equal(prediction.scores, scores)
        np.testing.assert_array_equal(prediction.classes, classes)


def as_list(folder: Path, files: list[Path]) -> Path:
    listed = folder / "images.txt"
    listed.write_text("".join(f"{file}\n" for file in files))
    return listed


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(lambda files, _: files[0].parent, id="folder"),
        pytest.param(lambda files, _: str(files[0].parent), id="name of a folder"),
        pytest.param(lambda files, _: str(files[0].parent / "*.png"), id="pattern"),
        pytest.param(lambda files, folder: as_list(folder, files), id="list file"),
        pytest.param(lambda files, _: files, id="paths"),
        pytest.param(lambda files, _: (str(file) for file in files), id="generator"),
        pytest.param(lambda files, _: [file.read_bytes() for file in files], id="bytes"),
        pytest.param(lambda files, _: [Image.open(file) for file in files], id="Pillow"),
        pytest.param(lambda files, _: [files[:2], [[files[2]]], *files[3:]], id="lists of lists"),
    ],
)
def test_every_kind_of_source_is_read_alike(detector, files, expected, tmp_path, source):
    predictions = detector.predict(source(files, tmp_path))
    same(predictions, expected)
    if predictions[0].path is not None:
        assert [prediction.path for prediction in predictions] == files


def test_arrays_say_the_order_of_their_channels(detector, files, expected):
    same(detector.predict(read_image(files[0]), color="rgb"), expected[:1])
    same(detector.predict([cv2.imread(str(file)) for file in files], color="bgr"), expected)
    with pytest.raises(DataError, match="color='bgr' for what OpenCV reads"):
        detector.predict(read_image(files[0]))
    grey = read_image(files[0])[..., 0]
    assert detector.predict(grey)[0].image.shape == (*grey.shape, 3)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (np.zeros((1, 3, 8, 8), np.float32), r"float32 \(1, 3, 8, 8\).* goes to Detector.run\(\)"),
        (np.zeros((8, 8, 4), np.uint8), r"uint8 \(8, 8, 4\); expected uint8 \(H, W, 3\)"),
        (np.zeros((0, 8, 3), np.uint8), "expected uint8"),
        ("missing.png", "'missing.png' does not exist"),
        ("missing/*.png", "no file matches 'missing/"),
        (b"no image", "cannot be decoded"),
        (True, "truth value"),
        (1.5, "type float is not an image"),
        (None, "type NoneType is not an image"),
        (997, "camera 997 cannot be opened"),
        ("rtsp://127.0.0.1:9/none", "stream 'rtsp://127.0.0.1:9/none' cannot be opened"),
    ],
)
def test_what_is_no_image_is_one_clear_error(detector, source, message, capfd):
    with pytest.raises(DataError, match=message) as failed:
        detector.predict(source, color="rgb")
    assert "\n" not in str(failed.value)


def test_a_batch_that_is_prepared_has_its_own_door(detector, files):
    image = read_image(files[0])
    inputs, _ = preprocess(image, detector.input)
    assert len(detector.run(inputs[None])) == 1
    height, width = detector.input.size
    for wrong in (image, inputs, inputs[None].astype(np.float64), np.zeros((1, 3, 8, 8), np.float32), [inputs]):
        with pytest.raises(DataError, match=rf"expected float32 \(B, 3, {height}, {width}\).*Detector.predict"):
            detector.run(wrong)


def video(folder: Path, files: list[Path]) -> Path:
    """Five frames a second, without loss."""
    path = folder / "street.avi"
    height, width = read_image(files[0]).shape[:2]
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"FFV1"), 5, (width, height))
    if not writer.isOpened():
        pytest.skip("OpenCV here writes no video without loss")
    for file in files:
        picture = cv2.resize(cv2.imread(str(file)), (width, height))
        writer.write(picture)
    writer.release()
    return path


def test_videos_are_read_frame_by_frame(detector, files, tmp_path):
    path = video(tmp_path, files)
    stream = detector.predict(path, stream=True)
    first = next(stream)
    assert (first.path, first.frame, first.seconds) == (path, 0, 0.0)
    rest = list(stream)
    assert [one.frame for one in rest] == [1, 2, 3, 4, 5]
    np.testing.assert_allclose([one.seconds for one in rest], [0.2, 0.4, 0.6, 0.8, 1.0], atol=0.01)
    height, width = read_image(files[0]).shape[:2]
    frames = [cv2.resize(cv2.imread(str(file)), (width, height)) for file in files]
    for one, again in zip([first, *rest], detector.predict(frames, color="bgr"), strict=True):
        assert [*one.names] == [*again.names]
        np.testing.assert_allclose(one.boxes, again.boxes, atol=4)  # through YUV
    assert first.to_dict()["seconds"] == 0.0
    broken = tmp_path / "broken.mp4"
    broken.write_bytes(b"no video")
    with pytest.raises(DataError, match=r"broken.mp4' (cannot be opened|has no frame)"):
        detector.predict(broken)


def test_a_stream_reads_no_further_than_a_little_ahead(detector, files):
    drawn: list[int] = []

    def endless() -> Any:
        for index in itertools.count():
            drawn.append(index)
            yield files[index % len(files)]

    before = threading.active_count()
    stream = detector.predict(endless(), stream=True)
    assert drawn == []
    for _ in range(3):
        next(stream)
    stream.close()
    assert 3 <= len(drawn) < 64
    assert threading.active_count() == before


def test_an_error_comes_where_its_image_would(detector, files):
    stream = detector.predict([files[0], "missing.png", files[1]], stream=True)
    assert next(stream).path == files[0]
    with pytest.raises(DataError, match=r"missing\.png"):
        next(stream)
    assert list(stream) == []


def test_items_are_worked_on_ahead_in_their_order():
    gate = threading.Event()

    def work(number: int) -> int:
        if number == 0:
            gate.wait(10)
        else:
            gate.set()
        return -number

    assert list(ahead(iter(range(100)), work, workers=2, most=4)) == [-number for number in range(100)]


def test_images_fill_batches(files, expected):
    sizes: list[int] = []
    whole = Detector.open(SHAPES_MODEL, load_config("shapes"))

    @dataclass
    class Counting:
        inner: Any
        batch: None = None

        @property
        def outputs(self) -> Any:
            return self.inner.outputs

        def __call__(self, images: np.ndarray) -> Any:
            sizes.append(len(images))
            parts = [self.inner(image[None]) for image in images]
            return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    object.__setattr__(whole, "runner", Counting(whole.runner))
    object.__setattr__(whole, "batch", 4)
    predictions = whole.predict(files)
    assert sizes == [4, 2]
    for prediction, (boxes, _, _) in zip(predictions, expected, strict=True):
        np.testing.assert_allclose(prediction.boxes, boxes, atol=0.01)


@pytest.fixture
def sessions(monkeypatch):
    """On a machine of four cores: the threads of the sessions that are made for several runs at a time."""
    made: list[int] = []
    real = OnnxRunner.with_threads
    monkeypatch.setattr("trtdet.backends.onnxruntime.cores", lambda: 4)

    def counted(runner: OnnxRunner, threads: int) -> OnnxRunner:
        made.append(threads)
        return real(runner, threads)

    monkeypatch.setattr(OnnxRunner, "with_threads", counted)
    return made


def test_many_images_run_side_by_side_and_come_in_their_order(detector, files, expected, sessions):
    same(detector.predict(files * 8), expected * 8)
    assert sessions == [1]


def test_few_images_need_no_other_session(detector, files, sessions):
    detector.predict([*files, *files[:2]])
    assert sessions == []


def test_an_error_among_many_images_comes_where_its_image_would(detector, files, sessions):
    stream = detector.predict([*files * 3, "missing.png", *files * 3], stream=True)
    found = list(itertools.islice(stream, 18))
    assert [one.path for one in found] == files * 3
    with pytest.raises(DataError, match=r"missing\.png"):
        next(stream)


def test_a_stream_of_many_images_can_be_left(detector, files, sessions):
    before = threading.active_count()
    stream = detector.predict(itertools.cycle(files), stream=True)
    for _ in range(12):
        next(stream)
    stream.close()
    assert (sessions, threading.active_count()) == ([1], before)


def test_frames_of_a_camera_run_one_after_the_other(detector, files, sessions, monkeypatch):
    pixels = read_image(files[0])
    live = [Frame(lambda: pixels, seconds=index / 30, index=index) for index in range(12)]
    monkeypatch.setattr("trtdet.runtime.detector.frames", lambda source, color: iter(live))
    assert len(detector.predict(0)) == 12
    assert sessions == []


def test_a_threshold_outside_of_its_range_is_an_error(detector, files):
    everything = detector.predict(files[0], score_threshold=0.0)[0]
    assert len(everything) > len(detector.predict(files[0], score_threshold=0.9)[0])
    for wrong in (-0.1, 1.1, float("nan")):
        with pytest.raises(ConfigError, match="allowed is 0 to 1"):
            detector.predict(files[0], score_threshold=wrong)


def test_a_prediction_is_short_to_read_and_a_picture_in_notebooks(detector, files):
    prediction = detector.predict(files[0])[0]
    text = repr(prediction)
    height, width = prediction.image.shape[:2]
    assert text.startswith(f"Prediction({files[0].name}, {width} x {height}: 1 ")
    assert len(text) < 200
    page = prediction._repr_html_()
    assert page.startswith("<figure><img alt=")
    assert 'src="data:image/jpeg;base64,' in page
    empty = detector.predict(np.zeros((64, 64, 3), np.uint8), color="rgb", score_threshold=1.0)[0]
    assert repr(empty) == "Prediction(image, 64 x 64: nothing)"
    assert (len(empty), empty.names) == (0, ())


@pytest.mark.parametrize(
    ("height", "width", "shown"), [(300, 800, (300, 800)), (60, 1600, (30, 800)), (1, 2000, (1, 800))]
)
def test_wide_pictures_are_shrunk_in_notebooks_to_at_least_one_row(detector, height, width, shown):
    prediction = detector.predict(np.zeros((height, width, 3), np.uint8), color="rgb")[0]
    _, _, data = prediction._repr_html_().partition("base64,")
    picture = cv2.imdecode(np.frombuffer(base64.b64decode(data.partition('"')[0]), np.uint8), cv2.IMREAD_COLOR)
    assert picture.shape[:2] == shown


def test_pictures_are_drawn_and_saved_by_their_suffix(detector, files, tmp_path):
    prediction = detector.predict(files[0])[0]
    before = prediction.image.copy()
    drawn = prediction.plot()
    assert (drawn != before).any()
    np.testing.assert_array_equal(prediction.image, before)
    np.testing.assert_array_equal(read_image(prediction.save(tmp_path / "a.png")), drawn)
    for name in ("a.jpg", "a.JPEG", "a.webp"):
        assert read_image(prediction.save(str(tmp_path / name))).shape == drawn.shape
    with pytest.raises(DataError, match=r"another suffix than \.jpg"):
        prediction.save(tmp_path / "a.bmp")


def test_values_for_json_and_for_coco(detector, files):
    prediction = detector.predict(files[0])[0]
    listed = json.loads(json.dumps(prediction.to_dict()))
    assert listed["image"] == str(files[0])
    assert [one["class"] for one in listed["detections"]] == list(prediction.names)
    results = prediction.to_coco(7)
    np.testing.assert_allclose(
        [[x, y, x + width, y + height] for x, y, width, height in (one["bbox"] for one in results)], prediction.boxes
    )
    assert {one["image_id"] for one in results} == {7}
    assert [one["category_id"] for one in results] == (prediction.classes + 1).tolist()
    ids = [10 * (index + 1) for index in range(len(detector.classes))]
    assert [one["category_id"] for one in prediction.to_coco(7, ids)] == (10 * (prediction.classes + 1)).tolist()
    with pytest.raises(DataError, match="1 category ids were given"):
        prediction.to_coco(7, [1])


def test_a_table_has_a_row_for_each_detection(detector, files, monkeypatch):
    pytest.importorskip("pandas")
    prediction = detector.predict(files[0])[0]
    table = prediction.to_pandas()
    assert list(table.columns) == ["class", "name", "score", "x1", "y1", "x2", "y2"]
    np.testing.assert_array_equal(table[["x1", "y1", "x2", "y2"]].to_numpy(), prediction.boxes)
    assert table["name"].tolist() == list(prediction.names)
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(TrtdetError, match="pip install pandas"):
        prediction.to_pandas()


def test_supervision_gets_what_its_constructor_takes(detector, files, monkeypatch):
    given: dict[str, Any] = {}
    monkeypatch.setitem(
        sys.modules, "supervision", types.SimpleNamespace(Detections=lambda **values: given.update(values))
    )
    prediction = detector.predict(files[0])[0]
    prediction.to_supervision()
    assert set(given) == {"xyxy", "confidence", "class_id", "mask", "data"}
    assert set(given["data"]) == {"class_name"}
    np.testing.assert_array_equal(given["xyxy"], prediction.boxes)
    assert given["class_id"].dtype.kind == "i"
    assert given["data"]["class_name"].tolist() == list(prediction.names)
    assert given["mask"] is None
    detector.predict(np.zeros((64, 64, 3), np.uint8), color="rgb")[0].to_supervision()
    assert len(given["xyxy"]) == 0 and given["data"]["class_name"].dtype.kind == "U", "names are text without any too"
    monkeypatch.setitem(sys.modules, "supervision", None)
    with pytest.raises(TrtdetError, match="pip install supervision"):
        prediction.to_supervision()


@pytest.mark.parametrize("part", HEADS)
def test_supervision_itself_takes_boxes_masks_keypoints_and_rotated_boxes(part):
    supervision = pytest.importorskip("supervision", reason="pip install 'trtdet[dev]'")
    detector = Detector.open(MODEL, configured(part))
    picture, classes, _ = cards.drawn(20_003)
    (prediction,) = detector.predict(picture, color="rgb")
    detections = prediction.to_supervision()
    assert len(detections) == len(prediction) >= len(classes)
    best = detections[detections.confidence > np.median(prediction.scores)]
    assert 0 < len(best) < len(detections) and len(best.data["class_name"]) == len(best)
    before = picture.copy()
    if part == "masks":
        drawn = supervision.MaskAnnotator().annotate(before, best)
    elif part == "rotated_boxes":
        drawn = supervision.OrientedBoxAnnotator().annotate(before, best)
    else:
        keypoints = prediction.to_supervision_keypoints()
        assert keypoints.xy.shape == (len(prediction), len(cards.POINTS), 2)
        drawn = supervision.VertexAnnotator(radius=3).annotate(before, keypoints)
    assert (drawn != picture).any()
    nothing = detector.predict(np.zeros((64, 64, 3), np.uint8), color="rgb", score_threshold=1.0)[0]
    assert nothing.to_supervision().is_empty()
    if part != "keypoints":
        with pytest.raises(DataError, match="gives no keypoints"):
            prediction.to_supervision_keypoints()


def test_the_examples_of_the_page_run(files, tmp_path, monkeypatch, capsys):
    pytest.importorskip("pandas", reason="pandas is not installed")
    page = (Path(__file__).resolve().parents[2] / "docs" / "predict.md").read_text(encoding="utf-8")
    examples = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(files[0].parent, tmp_path / "demo" / "data" / "val")
    shutil.copytree(files[0].parent, tmp_path / "demo" / "data" / "calibration")
    shutil.copy(SHAPES_MODEL, tmp_path)
    video(tmp_path, files).rename("street.mp4")
    names: dict[str, Any] = {}
    for example in examples:
        exec(compile(example, "docs/predict.md", "exec"), names)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"demo/data/val {len(files)} {read_image(files[0]).shape}"
    assert [line.partition(", ")[0] for line in lines if ".png, " in line] == [file.name for file in files]
    assert sorted(file.name for file in Path("found").iterdir()) == [file.name for file in files]


@pytest.mark.parametrize("part", HEADS)
def test_masks_keypoints_and_rotated_boxes_come_with_the_detections(part):
    detector = Detector.open(MODEL, configured(part))
    picture, classes, corners = cards.drawn(20_003)
    (prediction,) = detector.predict(picture, color="rgb")
    assert len(prediction) >= len(classes)
    shapes = {
        "masks": (len(prediction), *picture.shape[:2]),
        "keypoints": (len(prediction), len(cards.POINTS), 3),
        "rotated_boxes": (len(prediction), 5),
    }
    for name, shape in shapes.items():
        found = getattr(prediction, name)
        assert found.shape == shape if name == part else found is None
    listed = prediction.to_dict()["detections"][0]
    if part == "masks":
        assert prediction.masks is not None
        np.testing.assert_array_equal(from_run_lengths(listed["mask"]), prediction.masks[0])
        assert prediction.to_coco(1)[0]["segmentation"] == listed["mask"]
    elif part == "keypoints":
        assert prediction.keypoints is not None
        nearest = np.abs(prediction.keypoints[0, 0, :2] - corners[:, 0]).sum(1).min()
        assert nearest < 6
        assert len(prediction.to_coco(1)[0]["keypoints"]) == 3 * len(cards.POINTS)
    else:
        assert len(listed["rotated_box"]) == 5
    assert (prediction.plot() != picture).any()


def test_lines_on_a_disk_that_becomes_full_are_one_error_and_the_old_ones_stay(detector, files, tmp_path):
    place = tmp_path / "found.jsonl"
    place.write_text("old")
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50, limit[1]))
    try:
        with pytest.raises(OutputError, match=r"found\.jsonl' cannot be written: File too large"):
            save_predictions(detector.predict(files, stream=True), place)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert place.read_text() == "old" and [*tmp_path.iterdir()] == [place]
