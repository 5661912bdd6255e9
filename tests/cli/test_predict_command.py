"""``trtdet predict``: what it prints and writes, and what is left when it is stopped."""

import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
from PIL import Image

from trtdet.cli import main
from trtdet.demo import shapes
from trtdet.exporter import SHAPES_MODEL

MODEL = ["predict", str(SHAPES_MODEL), "--config", "shapes"]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    split = shapes.generate(tmp_path_factory.mktemp("data"), "val", 12)
    return sorted(split.images.iterdir())


@pytest.fixture(scope="module")
def video(files):
    """12 frames of 256 x 255 pixels, 12.5 a second."""
    path = files[0].parent.parent / "street.mp4"
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"mp4v"), 12.5, (256, 256))
    for file in files:
        writer.write(cv2.resize(cv2.imread(str(file)), (256, 256)))
    writer.release()
    return path


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def frames_of(path: Path) -> tuple[float, list[np.ndarray]]:
    capture = cv2.VideoCapture(str(path))
    pictures = []
    while (read := capture.read())[0]:
        pictures.append(read[1])
    return capture.get(cv2.CAP_PROP_FPS), pictures


def test_files_folders_patterns_and_lists_become_pictures_and_lines(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    folder, other = tmp_path / "folder", tmp_path / "other"
    folder.mkdir()
    other.mkdir()
    (folder / "notes.md").write_text("no image")
    for path in (tmp_path / "c.png", folder / "b.png", folder / "a.png", tmp_path / "d.png", other / "A.png"):
        Image.new("RGB", (64, 48), (10, 200, 30)).save(path)
    (tmp_path / "list.txt").write_text("d.png\n")
    assert main([*MODEL, "c.png", "folder", "list.txt", "other/*.png", "-o", "out", "--json"]) == 0
    printed = capsys.readouterr()
    assert "in 5 images on onnxruntime (CPU); wrote out, out/detections.jsonl" in printed.err
    rows = [json.loads(line) for line in printed.out.splitlines()]
    assert [row["image"] for row in rows] == ["c.png", "folder/a.png", "folder/b.png", "d.png", "other/A.png"]
    assert lines(Path("out/detections.jsonl")) == rows
    written = sorted(path.name for path in Path("out").iterdir())
    assert written == ["A-2.jpg", "a.jpg", "b.jpg", "c.jpg", "d.jpg", "detections.jsonl"]
    (tmp_path / "empty").mkdir()
    assert main([*MODEL, "empty", "-o", "none"]) == 1
    assert "has no images" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_without_an_output_each_image_is_a_line_of_text(files, capsys):
    assert main([*MODEL, *map(str, files[:2]), "--score-threshold", "1"]) == 0
    printed = capsys.readouterr()
    height, width = cv2.imread(str(files[0])).shape[:2]
    assert printed.out.splitlines()[0] == f"{files[0].name}, {width} x {height}: nothing"
    assert printed.err.endswith("0 detections in 2 images on onnxruntime (CPU)\n")
    assert main([*MODEL, str(files[0]), "missing.png", "--json"]) == 1
    first, error = map(json.loads, capsys.readouterr().out.splitlines())
    assert first["image"] == str(files[0])
    assert "'missing.png' does not exist" in error["error"]["message"]


def test_a_video_becomes_one_of_the_same_rate_size_and_order(files, video, tmp_path, capsys):
    out = tmp_path / "out"
    assert main([*MODEL, str(video), str(files[0]), str(video), "-o", str(out)]) == 0
    assert "in 25 frames on" in capsys.readouterr().out
    assert {path.name for path in out.iterdir()} == {"street.mp4", "street-2.mp4", "000001.jpg", "detections.jsonl"}
    rate, pictures = frames_of(out / "street.mp4")
    assert (rate, len(pictures), pictures[0].shape) == (12.5, 12, (256, 256, 3))
    _, originals = frames_of(video)
    for index, picture in enumerate(pictures):
        nearest = np.argmin([np.abs(picture.astype(int) - original).mean() for original in originals])
        assert nearest == index
    rows = lines(out / "detections.jsonl")
    assert [row.get("frame") for row in rows] == [*range(12), None, *range(12)]
    assert main([*MODEL, str(video), "-o", str(tmp_path / "lines.jsonl")]) == 0
    assert lines(tmp_path / "lines.jsonl") == rows[:12]


def test_pictures_never_replace_images(files, tmp_path, capsys):
    before = files[0].read_bytes()
    assert main([*MODEL, str(files[0]), "-o", str(files[0].parent)]) == 1
    assert "could replace images; choose another folder with -o" in capsys.readouterr().err
    assert files[0].read_bytes() == before and not (files[0].parent / "000001.jpg").exists()
    assert main([*MODEL, str(files[0]), "-o", str(tmp_path / "found.mp4")]) == 1
    assert "is named like one file; give a folder, or FILE.jsonl" in capsys.readouterr().err


def test_what_fails_on_the_way_keeps_the_old_output_and_what_is_complete(video, tmp_path, capsys):
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no image")
    out = tmp_path / "out"
    out.mkdir()
    (out / "street.mp4").write_bytes(b"old")
    (out / "detections.jsonl").write_bytes(b"old")
    assert main([*MODEL, str(video), str(broken), "-o", str(out)]) == 1
    errors = capsys.readouterr().err
    assert "broken.png' cannot be decoded" in errors
    assert f"ended after 12 images or frames, which are in '{out / 'street.partial.mp4'}'" in errors
    assert (out / "street.mp4").read_bytes() == (out / "detections.jsonl").read_bytes() == b"old"
    assert len(lines(out / "detections.partial.jsonl")) == len(frames_of(out / "street.partial.mp4")[1]) == 12
    assert len(list(out.iterdir())) == 4


def test_ctrl_c_leaves_a_video_that_plays_and_whole_lines(video, tmp_path):
    program = (
        "import sys, time\n"
        "from trtdet.cli import main\n"
        "from trtdet.runtime import sources\n"
        "real = sources._video\n"
        "def slow(*arguments):\n"
        "    for frame in real(*arguments):\n"
        "        time.sleep(0.05)\n"
        "        yield frame\n"
        "sources._video = slow\n"
        "sys.exit(main())\n"
    )
    out = tmp_path / "out"
    command = [sys.executable, "-c", program, *MODEL, *[str(video)] * 20, "-o", str(out), "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ})
    assert process.stdout is not None
    seen = [process.stdout.readline() for _ in range(20)]
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    printed = [json.loads(line) for line in (*seen, *rest.splitlines())]
    count = len(printed)
    assert 20 <= count < 240
    written = lines(out / "detections.partial.jsonl")
    assert written[:count] == printed and len(written) - count <= 1
    assert len(frames_of(out / "street.mp4")[1]) == 12
    videos = [path for path in out.iterdir() if path.suffix == ".mp4"]
    assert abs(sum(len(frames_of(path)[1]) for path in videos) - count) <= 1
    assert any(".partial." in path.name for path in videos) or count % 12 == 0
    assert b"stopped; nothing was left half-written" in errors
    assert not [path for path in out.iterdir() if path.suffix not in (".mp4", ".jsonl")]


class Camera:
    """Frames with 0.1 s between them, of a camera that states 20 a second, until Ctrl-C."""

    def __init__(self, source: object, pictures: list[np.ndarray], clock: list[float], rate: float = 20.0) -> None:
        self.pictures, self.clock, self.rate = pictures, clock, rate

    def isOpened(self) -> bool:
        return True

    def read(self) -> tuple[bool, np.ndarray]:
        if not self.pictures:
            raise KeyboardInterrupt
        self.clock[0] += 0.1
        return True, self.pictures.pop(0)

    def get(self, key: int) -> float:
        return {cv2.CAP_PROP_FPS: self.rate}.get(key, 0.0)

    def release(self) -> None:
        pass


@pytest.mark.parametrize("rate", [20.0, 0.0])
def test_a_camera_is_recorded_in_its_time_until_ctrl_c(files, tmp_path, monkeypatch, capsys, rate):
    pictures = [cv2.resize(cv2.imread(str(file)), (159, 123)) for file in files[:6]]
    clock = [1000.0]
    real = cv2.VideoCapture
    camera = partial(Camera, pictures=pictures, clock=clock, rate=rate)
    monkeypatch.setattr(cv2, "VideoCapture", lambda source: camera(source) if source == 0 else real(source))
    monkeypatch.setattr("trtdet.runtime.sources.time", SimpleNamespace(monotonic=lambda: clock[0]))
    out = tmp_path / "out"
    assert main([*MODEL, "0", "-o", str(out)]) == 130
    errors = capsys.readouterr().err
    assert "ended after 6 images or frames, which are in" in errors
    assert ("does not state its frame rate; it is written with 25 a second" in errors) == (rate == 0)
    assert {path.name for path in out.iterdir()} == {"video.mp4", "detections.jsonl"}
    monkeypatch.undo()
    stated, frames = frames_of(out / "video.mp4")
    # The last comes 0.5 s after the first. Sides of videos are even.
    assert stated == (rate or 25)
    assert abs(len(frames) - (0.5 * stated + 1)) < 1
    assert frames[0].shape == (124, 160, 3)
    assert [row["seconds"] for row in lines(out / "detections.jsonl")] == pytest.approx([0, 0.1, 0.2, 0.3, 0.4, 0.5])


def test_the_old_name_of_the_command_says_the_new_one(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["infer", "bundle", "street.jpg", "-o", "out"])
    assert capsys.readouterr().err.startswith("trtdet: error: 'infer' is now 'predict': trtdet predict BUNDLE|MODEL")
