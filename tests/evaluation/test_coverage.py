"""What a set of images shows: classes, sizes, light and repeated images, counted by hand."""

import numpy as np
from numpy.typing import NDArray

from trtdet.evaluation.coverage import Coverage, CoverageCounter


def scene(seed: int, light: float = 1.0) -> NDArray[np.uint8]:
    """A random picture of large patches, uint8 (96, 128, 3)."""
    patches = np.random.default_rng(seed).integers(0, 256, (6, 8, 3))
    return (np.kron(patches, np.ones((16, 16, 1))) * light).astype(np.uint8)


def counted(*images: tuple[NDArray[np.uint8], list[tuple[float, int]]]) -> Coverage:
    """The coverage of images with square objects of these sides and classes."""
    counter = CoverageCounter(("cat", "dog", "bird"))
    for pixels, objects in images:
        boxes = np.array([(5, 7, 5 + side, 7 + side) for side, _ in objects], np.float32).reshape(-1, 4)
        counter.update(pixels, boxes, np.array([label for _, label in objects], np.int64))
    return counter.compute()


def test_classes_sizes_and_empty_images_are_counted():
    coverage = counted((scene(0), [(10, 0), (31.9, 0), (32, 2)]), (scene(1), [(96, 0)]), (scene(2), []))
    assert coverage.shown == {"cat": 2, "dog": 0, "bird": 1}
    assert coverage.sizes == {"small": 2, "medium": 1, "large": 1}
    assert (coverage.images, coverage.empty, coverage.objects, coverage.repeated) == (3, 1, 4, 0)
    assert coverage.thin[:3] == (
        "never detected: 1 of 3 classes (dog)",
        "detected in fewer than 3 images: 2 of 3 classes (cat, bird)",
        "1 of 3 images show nothing to the model",
    )
    assert coverage.as_dict()["thin"] == list(coverage.thin)
    assert "2 of 3: cat in 2, bird in 1" in str(coverage.table())


def test_repeated_images_are_found_whatever_their_light_and_shift():
    first = scene(0)
    frames = [first, (first * 0.8).astype(np.uint8), np.roll(first, 1, axis=1), scene(1), scene(2)]
    coverage = counted(*((frame, [(40, 0)]) for frame in frames))
    assert coverage.repeated == 2
    assert any(text.startswith("2 of 5 images nearly repeat another one") for text in coverage.thin)


def test_a_set_without_gaps_has_none():
    lights = (0.4, 0.6, 0.8, 1.0)
    objects = [(20.0, 0), (50.0, 1), (100.0, 2)]
    assert counted(*((scene(seed, light), objects) for seed, light in enumerate(lights))).thin == ()


def test_equal_light_and_a_rare_size_are_named():
    coverage = counted(*((scene(seed), [(50.0, 0), (100.0, 1), (50.0, 2)]) for seed in range(4)))
    assert coverage.thin[0] == "few small objects: 0 of 12"
    assert coverage.thin[1].startswith("the images are about equally bright: 80 % have a mean of 1")
    low, high = coverage.brightness
    assert 100 < low < high < 160
