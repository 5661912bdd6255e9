"""Invalid masks are refused before a library rasterises them."""

import numpy as np
import pytest

from trtdet.data.segmentations import _unpacked, problem_of
from trtdet.detection.masks import run_lengths


@pytest.mark.parametrize("seed", range(20))
def test_compressed_run_lengths_are_read_as_the_library_wrote_them(seed):
    rng = np.random.default_rng(seed)
    height, width = rng.integers(1, 80, 2)
    mask = rng.random((height, width)) < rng.choice([0.0, 0.02, 0.5, 1.0])
    encoded = run_lengths(mask)
    flat = mask.T.reshape(-1)
    edges = np.flatnonzero(np.diff(np.concatenate([[False], flat]).astype(np.int8)))
    assert _unpacked(encoded["counts"]) == np.diff([0, *edges, len(flat)]).tolist()
    assert problem_of(encoded, int(width), int(height)) == ""


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        ([[2, 2, 10, 2, 10, 10]], ""),
        ([[-5, -5, 25, -5, 25, 25]], ""),
        ({"size": [16, 16], "counts": [200, 56]}, ""),
        ([], "is empty"),
        ([[1, 2, 3, 4]], "expected x, y of at least three corners"),
        ([[1, 2, 3, 4, 5]], "expected x, y of at least three corners"),
        ([[0, 0, 1e9, 0, 5, 5]], "has a corner at 1000000000.0"),
        ([[0, 0, "a", 0, 5, 5]], "has a corner at 'a'"),
        ([[0, 0, float("nan"), 0, 5, 5]], "has a corner at nan"),
        ("abc", "neither polygons nor run lengths"),
        ({"counts": []}, "neither polygons nor run lengths"),
        ({"size": [16, 17], "counts": [272]}, "has the size [16, 17], the image has [16, 16]"),
        ({"size": "ab", "counts": [256]}, "has the size 'ab'"),
        ({"size": [16, 16], "counts": [10**9]}, "has run lengths of 1000000000 pixels, 256 are needed"),
        ({"size": [16, 16], "counts": [-1, 257]}, "has the run lengths [-1, 257]"),
        ({"size": [16, 16], "counts": [1.5]}, "has the run lengths [1.5]"),
        ({"size": [16, 16], "counts": "o" * 5000}, "has the run lengths 'ooo"),
        ({"size": [16, 16], "counts": "\x00"}, "has the run lengths"),
    ],
)
def test_what_is_no_mask_says_why(mask, words):
    assert words in problem_of(mask, 16, 16)
    assert bool(words) == bool(problem_of(mask, 16, 16))


def test_an_image_without_a_size_leaves_that_of_run_lengths_open():
    assert problem_of({"size": [3, 4], "counts": [12]}, 0, 0) == ""
    assert problem_of({"size": [2, 1 << 15], "counts": [1 << 16]}, 0, 0) == ""
    for size in ([1 << 15, 1 << 14], [1 << 14, 1 << 15]):
        assert f"has the size {size}" in problem_of({"size": size, "counts": [1 << 29]}, 0, 0)
    assert "100000 x 100000 pixels" in problem_of([[0, 0, 1, 1, 2, 0]], 100_000, 100_000)
