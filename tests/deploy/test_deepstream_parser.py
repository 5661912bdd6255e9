"""The bounding-box parser for DeepStream, compiled against a stand-in of the SDK's headers and called as nvinfer does,
held to trtdet's own suppression."""

import configparser
import shutil
import struct
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from trtdet import PackageOptions, package
from trtdet.backends import OnnxRunner
from trtdet.building.comparison import rewritten
from trtdet.bundle import Bundle
from trtdet.config import NmsConfig
from trtdet.data.images import preprocess, read_image
from trtdet.demo import shapes
from trtdet.detection.suppression import Detections, non_max_suppression

STANDIN = Path(__file__).resolve().parents[1] / "standin" / "deepstream"
SOURCE = Path(__file__).resolve().parents[2] / "service" / "deepstream"
TYPES = {np.dtype(np.float32): 0, np.dtype(np.int32): 3}
SIZE = 256
OBJECT = np.dtype([("class", np.uint32), ("values", np.float32, 5)])


def run(*command: object, stdin: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([str(word) for word in command], input=stdin, capture_output=True, timeout=600, check=False)


def succeed(*command: object) -> str:
    done = run(*command)
    assert done.returncode == 0, (done.stdout + done.stderr).decode(errors="replace")[-4000:]
    return done.stdout.decode()


@pytest.fixture(scope="module", autouse=True)
def _tools():
    for tool in ("cmake", "g++"):
        if shutil.which(tool) is None:
            pytest.skip(f"needs {tool} to build the parser, which is not on PATH")


@dataclass(frozen=True)
class Parsed:
    """What the parser answered: whether it could read the outputs, the objects, and what it said."""

    ok: bool
    classes: NDArray[np.uint32]
    boxes: NDArray[np.float32]
    """float32 (n, 4), left, top, width, height."""
    scores: NDArray[np.float32]
    said: str
    masks: tuple[NDArray[np.float32], ...] = ()
    """Probabilities on a grid over each box, of the parser of masks."""


@dataclass(frozen=True)
class Parser:
    """A compiled parser and the program that calls it."""

    library: Path
    program: Path

    def _run(self, layers: Mapping[str, NDArray[Any]], classes: int, *names: str) -> tuple[bytes, str]:
        parts = [struct.pack("=4I", classes, SIZE, SIZE, len(layers))]
        for name, array in layers.items():
            parts += [struct.pack("=I", len(name)), name.encode(), struct.pack("=2I", TYPES[array.dtype], array.ndim)]
            parts += [struct.pack(f"={array.ndim}I", *array.shape), np.ascontiguousarray(array).tobytes()]
        done = run(self.program, self.library, *names, stdin=b"".join(parts))
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout, done.stderr.decode()

    def __call__(self, layers: Mapping[str, NDArray[Any]], classes: int) -> Parsed:
        answer, said = self._run(layers, classes, "NvDsInferParseTrtdet")
        ok, count = struct.unpack_from("=2I", answer)
        rows = np.frombuffer(answer[8:], OBJECT)
        assert len(rows) == count
        values = rows["values"]
        return Parsed(bool(ok), rows["class"], values[:, :4], values[:, 4], said)

    def with_masks(self, layers: Mapping[str, NDArray[Any]], classes: int) -> Parsed:
        answer, said = self._run(layers, classes, "NvDsInferParseTrtdetMasks", "masks")
        ok, count = struct.unpack_from("=2I", answer)
        at, rows, masks = 8, [], []
        for _ in range(count):
            rows.append(np.frombuffer(answer, OBJECT, 1, at))
            width, height = struct.unpack_from("=2I", answer, at + OBJECT.itemsize)
            at += OBJECT.itemsize + 8
            masks.append(np.frombuffer(answer, np.float32, width * height, at).reshape(height, width))
            at += 4 * width * height
        assert at == len(answer)
        table = np.concatenate([np.zeros(0, OBJECT), *rows])
        values = table["values"]
        return Parsed(bool(ok), table["class"], values[:, :4], values[:, 4], said, tuple(masks))


def built(folder: Path, release: int) -> Parser:
    """Builds what a package brings, as its README says, warnings being errors."""
    place, program, define = folder / "build", folder / "parse", f"-DSTANDIN_DEEPSTREAM={release}"
    headers, flags = f"-DDEEPSTREAM_INCLUDE_DIR={STANDIN}", f"-DCMAKE_CXX_FLAGS=-Werror {define}"
    succeed("cmake", "-S", folder, "-B", place, headers, flags)
    succeed("cmake", "--build", place)
    parser = configparser.ConfigParser()
    parser.read(folder / "config_infer_primary.txt")
    library = shutil.copy(place / parser["property"]["custom-lib-path"], folder)
    succeed("g++", "-std=c++17", define, "-I", STANDIN, STANDIN / "parse.cpp", "-o", program, "-ldl")
    return Parser(Path(library), program)


def packaged(made: Bundle, place: Path, release: int = 6, **nms: Any) -> Parser:
    """A parser with a bundle's own thresholds."""
    rewritten(place / "bundle", made, files={}, changes={"nms": made.manifest.nms.model_copy(update=nms)})
    return built(package(place / "bundle", place / "ds", PackageOptions("deepstream")).folder, release)


def crowd(seed: int, classes: int = 5, count: int = 400, logits: bool = False) -> tuple[NDArray[Any], NDArray[Any]]:
    """Boxes (count, 4) in few places, some over the edge, without area or not finite, and scores with ties and NaN."""
    rng = np.random.default_rng(seed)
    centres = rng.uniform(-20, SIZE + 20, (12, 2))[rng.integers(0, 12, count)] + rng.normal(0, 6, (count, 2))
    half = rng.uniform(4, 60, (count, 2))
    boxes = np.concatenate([centres - half, centres + half], axis=1).astype(np.float32)
    boxes[rng.integers(0, count, 6)] = np.float32(40.0)
    boxes[:2] = [[100, 100, 120, 130], [100, 100, 120, 115]]  # an IoU of exactly one half
    boxes[rng.integers(0, count, 3), rng.integers(0, 4, 3)] = np.nan
    boxes[rng.integers(0, count, 3), rng.integers(0, 4, 3)] = np.inf
    scores = (np.round(rng.beta(0.3, 2, (count, classes)) * 64) / 64).astype(np.float32)
    scores[rng.integers(0, count, 5), rng.integers(0, classes, 5)] = np.nan
    scores[0], scores[1] = 1.0, 0.96875
    return boxes, scores * 12 - 6 if logits else scores


def objects_of(found: Detections) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Classes, left top width height, and scores of what nvinfer can place of the first image."""
    boxes, scores, classes = found.image(0)
    finite = np.isfinite(boxes).all(axis=1)
    inside = np.clip(np.where(finite[:, None], boxes, 0), 0, SIZE)
    sides = inside[:, 2:] - inside[:, :2]
    real = finite & (sides > 0).all(axis=1)
    return classes[real], np.concatenate([inside[:, :2], sides], axis=1)[real], scores[real]


def hold(parsed: Parsed, found: Detections) -> int:
    classes, boxes, scores = objects_of(found)
    assert parsed.ok, parsed.said
    np.testing.assert_array_equal(parsed.classes, classes)
    np.testing.assert_allclose(parsed.boxes, boxes, atol=1e-5)
    np.testing.assert_allclose(parsed.scores, scores, rtol=1e-6)
    return len(classes)


@pytest.mark.parametrize(
    ("nms", "release"),
    [
        ({"score_threshold": 0.03125, "iou_threshold": 0.5, "candidates": "all-classes"}, 6),
        ({"score_threshold": 0.3, "class_agnostic": True, "max_detections": 7, "candidates": "all-classes"}, 9),
        ({"score_threshold": 0.0, "candidates": "best-class", "pre_nms_topk": 50, "max_detections": 50}, 6),
        ({"score_threshold": 0.4, "scores": "logits", "max_detections": 40, "candidates": "all-classes"}, 6),
        ({"score_threshold": 1.0}, 6),
    ],
)
def test_it_suppresses_as_trtdet_does(made, tmp_path, nms, release):
    parser = packaged(made, tmp_path, release, **nms)
    manifest = Bundle(tmp_path / "bundle").manifest.nms
    config = manifest.thresholds
    logits = manifest.scores == "logits"
    total = 0
    for seed in range(12):
        boxes, scores = crowd(seed, logits=logits)
        found = non_max_suppression(boxes[None], scores[None], config, logits=logits)
        total += hold(parser({"boxes": boxes, "scores": scores}, 5), found)
    assert total > 60 if manifest.score_threshold < 1 else total == 0


@pytest.fixture(scope="module")
def parser(made, tmp_path_factory):
    return packaged(made, tmp_path_factory.mktemp("parser"))


def test_a_bundles_own_outputs_on_pictures(made, parser, tmp_path):
    manifest = made.manifest
    config = manifest.nms.thresholds
    runner, total = OnnxRunner(made.model.read_bytes()), 0
    for path in sorted(shapes.generate(tmp_path, "val", 3).images.iterdir()):
        outputs = runner(preprocess(read_image(path), manifest.input.preprocess)[0][None])
        found = non_max_suppression(outputs["boxes"], outputs["scores"], config)
        total += hold(parser({name: array[0] for name, array in outputs.items()}, 10), found)
    assert total > 20


@pytest.mark.parametrize("candidates", ["all-classes", "best-class"])
def test_a_score_must_exceed_the_threshold(made, tmp_path, candidates):
    parser = packaged(made, tmp_path, candidates=candidates)
    threshold = np.float32(made.manifest.nms.score_threshold)
    boxes = np.array([[10, 10, 20, 20], [50, 50, 70, 70]], np.float32)
    scores = np.zeros((2, 10), np.float32)
    scores[0, 3], scores[1, 4] = threshold, np.nextafter(threshold, np.float32(1))
    parsed = parser({"boxes": boxes, "scores": scores}, 10)
    assert (parsed.classes.tolist(), parsed.boxes.tolist()) == ([4], [[50, 50, 20, 20]])


def suppressed(seed: int, count: int, room: int = 30) -> dict[str, NDArray[Any]]:
    boxes, scores = crowd(seed, count=room)
    return {
        "num_dets": np.array([count], np.int32),
        "boxes": boxes,
        "scores": np.sort(np.nan_to_num(scores[:, 0]))[::-1].copy(),
        "classes": np.random.default_rng(seed).integers(0, 5, room).astype(np.int32),
    }


@pytest.mark.parametrize("count", [0, 1, 17, 30])
def test_what_the_network_suppressed_is_only_read(parser, count):
    layers = suppressed(count, count)
    found = Detections(layers["num_dets"][None], *(layers[name][None] for name in ("boxes", "scores", "classes")))
    hold(parser(dict(reversed(layers.items())), 5), found)


def test_what_tensorrts_plugin_counts_without_having_found_it_is_left_out(parser):
    layers = suppressed(3, 20)
    whole = parser(layers, 5)
    layers["scores"][12:20] = -32768.0
    part = parser(layers, 5)
    np.testing.assert_array_equal(part.boxes, whole.boxes[: len(part.boxes)])
    assert 0 < len(part.boxes) < len(whole.boxes)


def raw(boxes: tuple[int, ...], scores: tuple[int, ...]) -> dict[str, Any]:
    shapes = {"boxes": np.zeros(boxes, np.float32), "scores": np.zeros(scores, np.float32)}
    return {"num_dets": None, "classes": None, **shapes}


OUTPUTS = suppressed(5, 10)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_dets": None}, "output 'scores' has type 0 and shape (30), expected type 0 and 2"),
        ({"classes": None}, "no output 'classes'; output-blob-names must list"),
        ({"classes": OUTPUTS["scores"]}, "output 'classes' has type 0"),
        ({"num_dets": np.array([31], np.int32)}, "num_dets is 31, expected 0 to 30"),
        ({"num_dets": np.array([-1], np.int32)}, "num_dets is -1, expected 0 to 30"),
        ({"num_dets": np.array([1, 2], np.int32)}, "num_dets (2), boxes (30, 4)"),
        ({"boxes": OUTPUTS["boxes"][:20]}, "boxes (20, 4), scores (30)"),
        ({"classes": OUTPUTS["classes"] + 5}, "with num-detected-classes=5; the configuration"),
        ({"classes": OUTPUTS["classes"] - 5}, "with num-detected-classes=5; the configuration"),
        (dict.fromkeys(OUTPUTS), "no output 'boxes'"),
        (raw((9, 4), (9, 6)), "boxes (9, 4) and scores (9, 6) with num-detected-classes=5"),
        (raw((9, 4), (8, 5)), "boxes (9, 4) and scores (8, 5)"),
        (raw((9, 5), (9, 5)), "boxes (9, 5)"),
    ],
)
def test_what_is_not_trtdets_is_refused_in_one_line(parser, change, said):
    parsed = parser({name: value for name, value in {**OUTPUTS, **change}.items() if value is not None}, 5)
    assert not parsed.ok
    assert parsed.said.startswith("NvDsInferParseTrtdet: ")
    assert said in parsed.said
    assert parsed.said.count("\n") == 1


def mask_over(box: NDArray[Any], logits: NDArray[Any]) -> NDArray[Any]:
    """Probabilities on a grid over a box, a value for each cell of ``logits`` (h, w) that it covers, bilinear."""
    places = []
    for axis, cells in ((1, logits.shape[0]), (0, logits.shape[1])):
        count = max(1, min(cells, int(np.ceil(box[2 + axis] * cells / SIZE))))
        pixels = box[axis] + (np.arange(count) + 0.5) * box[2 + axis] / count
        place = np.clip(pixels * cells / SIZE - 0.5, 0, cells - 1)
        first = place.astype(int)
        places.append((first, np.minimum(first + 1, cells - 1), place - first))
    (y0, y1, down), (x0, x1, across) = places
    lines = logits[:, x0] * (1 - across) + logits[:, x1] * across
    return 1 / (1 + np.exp(-(lines[y0] * (1 - down[:, None]) + lines[y1] * down[:, None])))


@pytest.mark.parametrize("where", ["network", "host"])
def test_masks_lie_over_the_boxes(parser, where):
    rng = np.random.default_rng(4)
    prototypes = rng.normal(0, 1, (6, 32, 48)).astype(np.float32)
    if where == "network":
        layers, classes = suppressed(11, 20), 5
        rows = np.arange(20)
    else:
        boxes, scores = crowd(11, classes=10)
        layers, classes = {"boxes": boxes, "scores": scores}, 10
        rows = np.arange(len(boxes))
    coefficients = rng.normal(0, 1, (len(layers["boxes"]), 6)).astype(np.float32)
    layers |= {"mask_coefficients": coefficients, "prototypes": prototypes}
    plain, parsed = parser(layers, classes), parser.with_masks(layers, classes)
    assert parsed.ok and len(parsed.masks) == len(plain.boxes) > 10
    for name in ("classes", "boxes", "scores"):
        np.testing.assert_array_equal(getattr(parsed, name), getattr(plain, name))
    ends = np.clip(np.nan_to_num(layers["boxes"], nan=-1e6, posinf=1e6, neginf=-1e6), 0, SIZE)
    ends[:, 2:] -= ends[:, :2]
    for box, mask in zip(parsed.boxes, parsed.masks, strict=True):
        same = [row for row in rows if np.array_equal(ends[row], box)]
        logits = [np.tensordot(coefficients[row], prototypes, axes=1) for row in same]
        gaps = [np.abs(mask - mask_over(box, one)).max() for one in logits if mask_over(box, one).shape == mask.shape]
        assert min(gaps) < 1e-4


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"prototypes": None}, "no output 'prototypes'; output-blob-names must list"),
        ({"mask_coefficients": np.zeros((30, 5), np.float32)}, "mask_coefficients (30, 5) and prototypes (6, 8, 8)"),
        ({"mask_coefficients": np.zeros((4, 6), np.float32)}, "mask_coefficients (4, 6) has no row 4"),
    ],
)
def test_masks_that_do_not_belong_together_are_refused_in_one_line(parser, change, said):
    given = {"mask_coefficients": np.zeros((30, 6), np.float32), "prototypes": np.zeros((6, 8, 8), np.float32)}
    layers = {name: value for name, value in {**OUTPUTS, **given, **change}.items() if value is not None}
    parsed = parser.with_masks(layers, 5)
    assert not parsed.ok
    assert said in parsed.said and parsed.said.count("\n") == 1


def test_without_the_sdk_the_build_says_what_to_give(tmp_path):
    done = run("cmake", "-S", SOURCE, "-B", tmp_path / "alone", f"-DDEEPSTREAM_DIR={tmp_path}")
    assert done.returncode != 0
    assert "no nvdsinfer_custom_impl.h: give -DDEEPSTREAM_DIR=" in done.stderr.decode()
    (tmp_path / "CMakeLists.txt").write_text(
        f"cmake_minimum_required(VERSION 3.18)\nproject(all LANGUAGES CXX)\nadd_subdirectory({SOURCE} deepstream)\n"
    )
    said = succeed("cmake", "-S", tmp_path, "-B", tmp_path / "within", f"-DDEEPSTREAM_DIR={tmp_path}")
    assert "DeepStream parser skipped: no DeepStream headers" in said


def test_in_a_checkout_it_is_built_with_trtdets_defaults(tmp_path):
    text = (SOURCE / "nvdsinfer_trtdet_config.h").read_text()
    default = NmsConfig()
    for key in ("score_threshold", "iou_threshold"):
        assert f"{key} = {getattr(default, key):g}F;" in text
    for key in ("pre_nms_topk", "max_detections"):
        assert f"{key} = {getattr(default, key)};" in text
    succeed("cmake", "-S", SOURCE, "-B", tmp_path, f"-DDEEPSTREAM_INCLUDE_DIR={STANDIN}", "-DCMAKE_CXX_FLAGS=-Werror")
    succeed("cmake", "--build", tmp_path)
