import pickle
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import trtdet.data.stream
from trtdet.config import InputConfig
from trtdet.data import ImageBatch, ImageCache, ImageStream
from trtdet.data.images import read_image
from trtdet.data.stream import available_memory
from trtdet.errors import DataError, TrtdetWarning

CONFIG = InputConfig(size=(32, 24), mean=(1.0, 2.0, 3.0), std=(57.0, 58.0, 59.0), color="bgr")
PIXELS = 3 * 24 * 16
"""Bytes of an image of 30x20 in that input."""


@pytest.fixture
def images(tmp_path):
    paths = [tmp_path / f"{number}.png" for number in range(7)]
    for number, path in enumerate(paths):
        pixels = np.random.default_rng(number).integers(0, 256, (20, 30, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path)
    return tuple(paths)


@pytest.fixture
def decoded(monkeypatch):
    """How often each image has been decoded."""
    counts: Counter[str] = Counter()

    def counted(path: Path) -> Any:
        counts[path.name] += 1
        return read_image(path)

    monkeypatch.setattr(trtdet.data.stream, "read_image", counted)
    return counts


def equal(first: list[ImageBatch], second: list[ImageBatch]) -> bool:
    return all(
        np.array_equal(a.images, b.images) and (a.transforms, a.paths, a.indices) == (b.transforms, b.paths, b.indices)
        for a, b in zip(first, second, strict=True)
    )


@pytest.mark.parametrize("budget", [None, 0, 3 * PIXELS, 3 * PIXELS + PIXELS // 2])
def test_passes_with_a_cache_are_those_without(images, decoded, budget):
    plain = list(ImageStream(images, CONFIG, batch_size=2))
    decoded.clear()
    cache = ImageCache(budget)
    kept = 7 if budget is None else budget // PIXELS
    for number in (1, 2, 3):
        stream = ImageStream(images, CONFIG, batch_size=2, cache=cache)
        assert equal(list(stream), plain)
        assert stream.pixel_range == (0, 255) and stream.constant == ()
        # The first images stay: one that made room for another would be decoded in every pass.
        assert len(cache) == kept and cache.bytes == kept * PIXELS
        assert sorted(decoded.values()) == [1] * kept + [number] * (7 - kept)


def test_streams_over_other_files_in_other_order_share_it(images, decoded):
    cache = ImageCache()
    list(ImageStream(images[::2], CONFIG, cache=cache))
    turned = images[::-1]
    assert equal(list(ImageStream(turned, CONFIG, cache=cache)), list(ImageStream(turned, CONFIG)))
    assert set(decoded.values()) == {2}  # once with the cache, and once without


@pytest.mark.parametrize(
    ("change", "again"),
    [
        ({"size": (16, 16)}, True),
        ({"resize": "stretch"}, True),
        ({"interpolation": "nearest"}, True),
        ({"pad_value": 0}, False),
        ({"color": "rgb"}, False),
        ({"scale": 0.5}, False),
        ({"mean": (0.0, 0.0, 0.0)}, False),
        ({"std": (1.0, 1.0, 1.0)}, False),
    ],
)
def test_another_configuration_gets_its_own_pixels(images, decoded, change, again):
    cache, other = ImageCache(), CONFIG.model_copy(update=change)
    list(ImageStream(images, CONFIG, cache=cache))
    found = list(ImageStream(images, other, cache=cache))
    assert set(decoded.values()) == {1 + again}
    assert equal(found, list(ImageStream(images, other)))
    assert not equal(found, list(ImageStream(images, CONFIG)))


def test_facts_about_the_pixels_are_those_of_the_file_and_kept(tmp_path):
    """An image that is only nearly of one colour, and one value, are gone once it is small."""
    pixels = np.full((64, 64, 3), 7, np.uint8)
    Image.fromarray(pixels).save(tmp_path / "constant.png")
    pixels[40, 41] = 250
    Image.fromarray(pixels).save(tmp_path / "dot.png")
    small, cache = InputConfig(size=(8, 8), interpolation="nearest"), ImageCache()
    for _ in range(2):
        stream = ImageStream([tmp_path / "constant.png", tmp_path / "dot.png"], small, cache=cache)
        (batch, other) = list(stream)
        assert np.array_equal(batch.images, other.images)
        assert stream.pixel_range == (7, 250)
        assert [path.name for path in stream.constant] == ["constant.png"]


def test_an_unreadable_image_is_skipped_in_every_pass(images, decoded):
    images[3].write_bytes(b"broken")
    cache = ImageCache()
    for _ in range(2):
        stream = ImageStream([*images, *images], CONFIG, cache=cache)
        with pytest.raises(DataError, match="cannot be read so far"), pytest.warns(TrtdetWarning, match="skipped"):
            list(stream)
    with pytest.raises(DataError, match="cannot be decoded"):
        cache.read(images[3], CONFIG)
    assert len(cache) == 6 and decoded["2.png"] == 1


def test_an_image_that_two_threads_decode_at_once_counts_once(images, monkeypatch):
    both = threading.Barrier(2)

    def together(path: Path) -> Any:
        both.wait(timeout=60)
        return read_image(path)

    monkeypatch.setattr(trtdet.data.stream, "read_image", together)
    cache = ImageCache()
    list(ImageStream([images[0], images[0]], CONFIG, workers=2, cache=cache))
    assert (len(cache), cache.bytes) == (1, PIXELS)


def test_a_pickled_cache_is_empty_and_stays_so(images):
    cache = ImageCache(10**6)
    cache.read(images[0], CONFIG)
    other = pickle.loads(pickle.dumps(cache))
    other.read(images[0], CONFIG)
    assert (other.budget, len(other), len(cache)) == (0, 0, 1)


def test_what_is_kept_cannot_be_altered(images):
    with pytest.raises(ValueError, match="read-only"):
        ImageCache().read(images[0], CONFIG).pixels[0] = 0


@pytest.mark.parametrize(("available", "kept"), [(4 * 3 * PIXELS, 3), (1 << 60, 7), (0, 0)])
def test_the_default_budget_is_a_quarter_of_the_memory_available(images, monkeypatch, available, kept):
    monkeypatch.setattr(trtdet.data.stream, "available_memory", lambda: available)
    cache = ImageCache()
    list(ImageStream(images, CONFIG, cache=cache))
    assert len(cache) == kept
    assert cache._limit is not None and cache._limit <= 1 << 30


def test_available_memory_is_the_systems_or_what_the_control_group_leaves(tmp_path):
    meminfo, group = tmp_path / "meminfo", tmp_path / "group"
    assert available_memory(meminfo, group) == 0
    meminfo.write_text("MemTotal:       8000 kB\nMemFree:   500 kB\nMemAvailable:    2000 kB\n")
    assert available_memory(meminfo, group) == 2000 * 1024
    group.mkdir()
    (group / "memory.current").write_text("100000\n")
    for limit, expected in (("max", 2000 * 1024), ("900000", 800000), ("90000", 0), ("9000000", 2000 * 1024)):
        (group / "memory.max").write_text(limit + "\n")
        assert available_memory(meminfo, group) == expected
    assert available_memory() > 0
