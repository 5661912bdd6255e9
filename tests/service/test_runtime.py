"""The C++ runtime's decoding, pre-processing and suppression against those of Python."""

import io
import itertools
import json
import resource
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageOps
from serving import shapes_bundle

from benchmarks.costly_requests import png
from trtdet.config import InputConfig, NmsConfig, load_config
from trtdet.data.images import preprocess, read_image
from trtdet.detection.parts import Parts
from trtdet.detection.suppression import non_max_suppression
from trtdet.errors import DataError
from trtdet.options import NmsOptions

Program = Callable[[str], Path]


@pytest.fixture(scope="session")
def probe(program):
    path = program("tests/trtdet-probe")

    def call(*arguments: object, data: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        return subprocess.run([path, *map(str, arguments)], input=data, capture_output=True, check=False)

    return call


Probe = Callable[..., "subprocess.CompletedProcess[bytes]"]


def decoded(probe: Probe, path: Path, how: str = "decode") -> NDArray[np.uint8]:
    done = probe(how, path)
    assert done.returncode == 0, done.stderr.decode()
    line, _, pixels = done.stdout.partition(b"\n")
    width, height = map(int, line.split())
    return np.frombuffer(pixels, np.uint8).reshape(height, width, 3)


def picture(mode: str, size: tuple[int, int] = (67, 45)) -> Image.Image:
    """Blurred noise, of which every channel has its own."""
    rng = np.random.default_rng(3)
    channels = {"L": 1, "1": 1, "LA": 2, "P": 3}.get(mode, len(mode))
    noise = cv2.GaussianBlur(rng.integers(0, 256, (size[1], size[0], channels), np.uint8), (5, 5), 2).reshape(
        size[1], size[0], channels
    )
    if mode in ("1", "P"):
        return Image.fromarray(noise if channels == 3 else noise[..., 0]).convert(mode)
    return Image.fromarray(noise[..., 0] if channels == 1 else noise, mode=None if mode != "CMYK" else "CMYK")


SAVED = {
    "png": [(mode, {}) for mode in ("1", "L", "LA", "P", "RGB", "RGBA")],
    "jpg": [
        (mode, {"quality": 80, "progressive": progressive, "subsampling": subsampling})
        for mode, progressive, subsampling in itertools.product(("L", "RGB", "CMYK"), (False, True), (0, 1, 2))
    ],
    "webp": [
        (mode, {"lossless": lossless, "quality": 80, "exact": True})
        for mode, lossless in itertools.product(("RGB", "RGBA"), (True, False))
    ],
}


@pytest.mark.parametrize(("kind", "mode", "how"), [(kind, *one) for kind, saved in SAVED.items() for one in saved])
def test_files_are_decoded_as_by_python(probe, tmp_path, kind, mode, how):
    file = tmp_path / f"a.{kind}"
    picture(mode).save(file, **how)
    np.testing.assert_array_equal(decoded(probe, file), read_image(file))


def test_palettes_with_few_colours_and_transparency(probe, tmp_path):
    for colours in (2, 4, 16, 256):
        small = picture("RGB").quantize(colours)
        small.save(tmp_path / "a.png", transparency=1, bits={2: 1, 4: 2, 16: 4, 256: 8}[colours])
        np.testing.assert_array_equal(decoded(probe, tmp_path / "a.png"), read_image(tmp_path / "a.png"))


@pytest.mark.parametrize("shape", [(45, 67), (45, 67, 3), (45, 67, 4)])
def test_png_files_of_16_bits(probe, tmp_path, shape):
    wide = np.random.default_rng(1).integers(0, 65536, shape, np.uint16)
    assert cv2.imwrite(str(tmp_path / "a.png"), wide)
    np.testing.assert_array_equal(decoded(probe, tmp_path / "a.png"), read_image(tmp_path / "a.png"))


@pytest.mark.parametrize("bits", [2, 4])
def test_grey_png_files_of_few_bits(probe, tmp_path, bits):
    rows = b"".join(b"\0" + bytes(range(17, 17 + bits)) for _ in range(2))
    file = tmp_path / "a.png"
    file.write_bytes(png((8, 2), bits, 0, rows))
    np.testing.assert_array_equal(decoded(probe, file), read_image(file))


def test_real_images_are_decoded_as_by_python(probe, shared_data):
    for path in sorted((shared_data / "coco" / "val2017").glob("*.jpg"))[:40]:
        np.testing.assert_array_equal(decoded(probe, path), read_image(path))


def test_an_animation_is_refused(probe, tmp_path):
    file = tmp_path / "a.webp"
    picture("RGB").save(file, "WEBP", save_all=True, append_images=[Image.new("RGB", picture("RGB").size)], duration=10)
    done = probe("decode", file)
    assert done.returncode == 1
    assert b"the WebP file is an animation" in done.stderr


@pytest.mark.parametrize("kind", ["jpg", "png", "webp"])
def test_images_are_turned_as_by_pillow(probe, tmp_path, kind):
    file = tmp_path / f"a.{kind}"
    for orientation in range(10):
        exif = Image.Exif()
        exif[0x010F] = "a camera"
        exif[0x0112] = orientation
        picture("RGB").save(file, exif=exif)
        with Image.open(file) as image:
            expected = np.asarray(
                ImageOps.exif_transpose(image.convert("RGB") if kind == "png" else image).convert("RGB")
            )
        np.testing.assert_array_equal(decoded(probe, file, "upright"), expected)


def write(data: bytes, file: Path) -> Path:
    file.write_bytes(data)
    return file


def test_damaged_exif_data_are_as_good_as_none(probe, tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    stream = io.BytesIO()
    picture("RGB").save(stream, "JPEG", exif=exif)
    whole, file = stream.getvalue(), tmp_path / "a.jpg"
    at = whole.index(b"Exif\0\0") + 6
    straight = read_image(write(whole, file))
    assert decoded(probe, file, "upright").shape == (straight.shape[1], straight.shape[0], 3)
    for position, value in (
        (at, b"XX"),
        (at + 2, b"\0\0"),
        (at + 4, b"\xff\xff\xff\xff"),
        (at + 8, b"\xff\xff"),
        (at + 10, b"\0\0"),
    ):
        damaged = whole[:position] + value + whole[position + len(value) :]
        assert decoded(probe, write(damaged, file), "upright").shape in (
            straight.shape,
            (straight.shape[1], straight.shape[0], 3),
        )
    both = whole.replace(b"MM\0*", b"II*\0") if b"MM\0*" in whole else whole.replace(b"II*\0", b"MM\0*")
    assert both != whole
    np.testing.assert_array_equal(decoded(probe, write(both, file), "upright"), straight)


@pytest.mark.parametrize("kind", ["jpg", "png", "webp"])
def test_a_truncated_file_is_refused_wherever_it_ends(probe, tmp_path, kind):
    stream = io.BytesIO()
    picture("RGB").save(stream, {"jpg": "JPEG", "png": "PNG", "webp": "WEBP"}[kind], quality=90)
    whole, file = stream.getvalue(), tmp_path / f"a.{kind}"
    for length in (1, 3, 8, 20, 40, len(whole) // 4, len(whole) // 2, len(whole) * 9 // 10):
        file.write_bytes(whole[:length])
        with pytest.raises(DataError):
            read_image(file)
        done = probe("decode", file)
        assert done.returncode == 1, length
        assert done.stderr.count(b"\n") == 1
        assert b"cannot be decoded" in done.stderr


def test_a_jpeg_file_that_scans_without_end_is_refused(probe, tmp_path):
    stream = io.BytesIO()
    picture("L").save(stream, "JPEG", progressive=True)
    whole = stream.getvalue()
    first = whole.index(b"\xff\xda")
    last = whole.index(b"\xff\xda", first + 2)
    (tmp_path / "a.jpg").write_bytes(whole[:last] + whole[last:-2] * 200 + b"\xff\xd9")
    done = probe("decode", tmp_path / "a.jpg")
    assert done.returncode == 1
    assert b"more than 100 scans" in done.stderr


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_no_memory_is_no_fault_of_the_image(program, tmp_path, kind):
    """Within less and less address space a good file is decoded, or there is no memory: it is never called damaged."""
    path = program("tests/trtdet-probe")
    if b"__asan_init" in path.read_bytes() or b"__tsan_init" in path.read_bytes():
        pytest.skip("a sanitizer takes all of the address space")
    image = Image.new("RGB", (2400, 2000))
    image.save(tmp_path / "a", kind, **({"progressive": True} if kind == "JPEG" else {}))
    ends = set()
    for megabytes in range(10, 160, 5):
        limit = (megabytes << 20, megabytes << 20)
        done = subprocess.run(
            [path, "decode", tmp_path / "a"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            preexec_fn=lambda limit=limit: resource.setrlimit(resource.RLIMIT_AS, limit),
            check=False,
        )
        if b"error while loading shared libraries" not in done.stderr and done.returncode >= 0:
            ends.add(done.returncode)
            assert done.returncode in (0, 3), done.stderr.decode()
    assert ends == {0, 3}


Manifests = Callable[[InputConfig], Path]


@pytest.fixture(scope="module")
def write_manifest(tmp_path_factory):
    """Writes the manifest of a bundle of the shipped detector, with another pre-processing."""
    folder = tmp_path_factory.mktemp("manifests")
    bundle = shapes_bundle(folder / "bundle", nms=NmsOptions(mode="host"))
    manifest = json.loads((bundle / "manifest.json").read_text())

    def write(config: InputConfig) -> Path:
        manifest["input"]["preprocess"] = config.model_dump(mode="json")
        for kind in ("min", "opt", "max"):
            manifest["input"]["shape"][kind] = [1, 3, *config.size]
        path = folder / "manifest.json"
        path.write_text(json.dumps(manifest))
        return path

    return write


def placed(probe: Probe, manifest: Path, image: Path, config: InputConfig) -> tuple[NDArray[np.float32], list[float]]:
    done = probe("preprocess", manifest, image)
    assert done.returncode == 0, done.stderr.decode()
    line, _, values = done.stdout.partition(b"\n")
    return np.frombuffer(values, np.float32).reshape(3, *config.size), [float(np.float32(one)) for one in line.split()]


def check_placed(probe: Probe, manifest: Path, image: Path, config: InputConfig) -> None:
    """The same place and the same values as Python's."""
    got, place = placed(probe, manifest, image, config)
    expected, placement = preprocess(read_image(image), config)
    wanted = (placement.scale_x, placement.scale_y, placement.pad_x, placement.pad_y)
    assert place == [float(np.float32(one)) for one in wanted]
    levels = np.abs(got - expected) / (config.scale / np.array(config.std)[:, None, None])
    assert levels.max() <= 1e-3


RESIZES = ("letterbox-topleft", "letterbox-centre", "stretch")
INTERPOLATIONS = ("nearest", "linear", "cubic", "area")


@pytest.mark.parametrize(("resize", "interpolation"), list(itertools.product(RESIZES, INTERPOLATIONS)))
def test_images_are_placed_as_by_python(probe, write_manifest, tmp_path, resize, interpolation):
    config = InputConfig.model_validate(
        {
            "size": [96, 160],
            "resize": resize,
            "interpolation": interpolation,
            "color": "bgr",
            "scale": 1 / 255,
            "mean": [0.485, 0.456, 0.406],
            "std": [0.229, 0.224, 0.225],
        }
    )
    manifest = write_manifest(config)
    for size in ((1, 1), (1, 300), (333, 2), (67, 45), (160, 96), (320, 192), (501, 499)):
        picture("RGB", size).save(tmp_path / "a.png")
        check_placed(probe, manifest, tmp_path / "a.png", config)


@pytest.mark.parametrize("name", ["yolox", "yolov5", "yolov8", "dfl"])
def test_real_images_are_placed_as_by_python(probe, write_manifest, shared_data, name):
    config = load_config(name).input
    manifest = write_manifest(config)
    for path in sorted((shared_data / "coco" / "val2017").glob("*.jpg"))[:40]:
        check_placed(probe, manifest, path, config)


def cases() -> list[tuple[NDArray[np.float32], NDArray[np.float32], NmsConfig, bool]]:
    """Random suppressions: crowded, equal scores, NaN and infinite numbers, boxes without area, none at all."""
    rng = np.random.default_rng(11)
    found = []
    for index in range(300):
        count, classes = int(rng.integers(0, 60)), int(rng.integers(1, 6))
        corners = rng.uniform(0, 60, (count, 4))
        boxes = np.sort(corners.reshape(-1, 2, 2), axis=1).reshape(-1, 4) if index % 5 else corners
        logits = bool(rng.integers(0, 2))
        scores = rng.normal(0, 2, (count, classes)) if logits else rng.uniform(0, 1, (count, classes))
        if index % 3 == 0:
            boxes, scores = np.round(boxes, -1), np.round(scores, 1)
        if index % 7 == 0:
            odd = np.array([np.nan, np.inf, -np.inf, 0.0])
            boxes = np.where(rng.random(boxes.shape) < 0.1, rng.choice(odd, boxes.shape), boxes)
            scores = np.where(rng.random(scores.shape) < 0.1, rng.choice(odd, scores.shape), scores)
        limit = int(rng.integers(1, 40))
        config = NmsConfig(
            score_threshold=float(rng.choice([0.0, 0.001, 0.1, 0.5, 1.0])),
            iou_threshold=float(rng.choice([0.3, 0.5, 0.65, 1.0])),
            max_detections=limit,
            pre_nms_topk=int(rng.integers(limit, 80)),
            class_agnostic=bool(rng.integers(0, 2)),
            candidates="best-class" if rng.integers(0, 2) else "all-classes",
        )
        found.append((boxes.astype(np.float32), scores.astype(np.float32), config, logits))
    return found


@pytest.mark.parametrize("rotated", [False, True])
def test_suppression_is_that_of_python(probe, rotated):
    data, expected = b"", []
    rng = np.random.default_rng(12)
    for boxes, scores, config, logits in cases():
        parts = Parts(keypoints=np.arange(len(boxes), dtype=np.float32)[None, :, None, None])
        if rotated:
            # Without thin boxes, whose covariances depend on how cosines are rounded. Infinite corners become NaN.
            corners = np.where(np.isfinite(boxes), boxes, np.float32(np.nan)).reshape(-1, 2, 2)
            angle = rng.uniform(-4, 4, (len(boxes), 1))
            columns = [corners.mean(axis=1), np.abs(corners[:, 1] - corners[:, 0]) + 2, angle]
            parts = replace(parts, rotated_boxes=np.concatenate(columns, axis=1).astype(np.float32)[None])
        facts = (
            *scores.shape,
            *(repr(one) for one in (config.score_threshold, config.iou_threshold)),
            *(config.max_detections, config.pre_nms_topk, int(config.class_agnostic)),
            *(int(config.candidates == "best-class"), int(logits), int(rotated)),
        )
        data += " ".join(map(str, facts)).encode() + b"\n" + boxes.tobytes() + scores.tobytes()
        data += b"" if parts.rotated_boxes is None else parts.rotated_boxes.tobytes()
        expected.append(non_max_suppression(boxes[None], scores[None], config, logits=logits, parts=parts))
    done = probe("nms", data=data)
    assert done.returncode == 0, done.stderr.decode()
    lines = iter(done.stdout.decode().splitlines())
    total = 0
    for wanted in expected:
        wanted_boxes, wanted_scores, wanted_classes = wanted.image(0)
        rows = np.array([next(lines).split() for _ in range(int(next(lines)))], np.float32).reshape(-1, 7)
        np.testing.assert_array_equal(rows[:, :4], wanted_boxes)
        np.testing.assert_allclose(rows[:, 4], wanted_scores, rtol=1e-6)
        np.testing.assert_array_equal(rows[:, 5], wanted_classes)
        np.testing.assert_array_equal(rows[:, 6], wanted.image_parts(0).keypoints[:, 0, 0])
        total += len(rows)
    assert next(lines, None) is None
    assert total > 1000


def test_manifests_that_python_writes_are_read(probe, tmp_path):
    for nms in ("host", "native"):
        bundle = shapes_bundle(tmp_path / nms, nms=NmsOptions(mode=nms))
        done = probe("manifest", bundle / "manifest.json")
        assert (done.returncode, done.stderr) == (0, b"")
