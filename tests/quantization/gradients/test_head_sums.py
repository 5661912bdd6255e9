"""The detection error in torch equals that in NumPy, and has gradients."""

from typing import Any

import numpy as np
import pytest

from trtdet.detection.parts import PROTOTYPES, Parts
from trtdet.passes import Decoded
from trtdet.quantization.head_error import HeadError

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'trtdet[correct]'")

from trtdet.quantization.gradients.head_error import HeadRows, head_sums, matched  # noqa: E402

SIZE = (64, 96)
ROWS, CLASSES, PROTOTYPE = 40, 3, 4
SHAPES: dict[str, tuple[int, ...]] = {
    "mask_coefficients": (ROWS, PROTOTYPE),
    PROTOTYPES: (PROTOTYPE, *(side // 4 for side in SIZE)),
    "keypoints": (ROWS, 5, 3),
    "rotated_boxes": (ROWS, 5),
}
TASKS = (("mask_coefficients", PROTOTYPES), ("keypoints",), ("rotated_boxes",), ())


def outputs(parts: tuple[str, ...], seed: int) -> dict[str, Any]:
    """Two images' outputs; those of two seeds are near each other."""
    exact, moved = np.random.default_rng(1), np.random.default_rng(seed)
    centres = exact.uniform(10, 54, (2, ROWS, 2)) + moved.normal(0, 1, (2, ROWS, 2))
    sides = exact.uniform(12, 30, (2, ROWS, 2))
    made = {
        "boxes": np.concatenate([centres - sides / 2, centres + sides / 2], axis=-1),
        "scores": np.clip(exact.random((2, ROWS, CLASSES)) ** 3 + moved.normal(0, 0.02, (2, ROWS, CLASSES)), 0, 1),
    }
    for part in parts:
        made[part] = exact.normal(0, 3, (2, *SHAPES[part])) + moved.normal(0, 0.5, (2, *SHAPES[part]))
        if part == "keypoints":
            made[part] = made[part] + centres[:, :, None, :1]
        elif part == "rotated_boxes":
            angle = exact.uniform(-1, 2, (2, ROWS, 1)) + moved.normal(0, 0.05, (2, ROWS, 1))
            made[part] = np.concatenate([centres, sides, angle], axis=-1)
        elif part == PROTOTYPES:
            made[part] *= 100  # probabilities of 0 and 1, of which the soft overlap is the IoU
    return {name: torch.tensor(value, dtype=torch.float32) for name, value in made.items()}


def head_of(parts: tuple[str, ...]) -> Decoded:
    return Decoded("boxes", "scores", parts=tuple((part, part) for part in parts), size=SIZE)


@pytest.mark.parametrize("chosen", [False, True])
@pytest.mark.parametrize("parts", TASKS)
def test_the_sums_are_those_of_numpy(parts, chosen):
    first, second, head = outputs(parts, 2), outputs(parts, 3), head_of(parts)
    if chosen:  # the other model has its rows in another order
        order = np.random.default_rng(5).permutation(ROWS)
        second = {name: value if name == PROTOTYPES else value[:, order] for name, value in second.items()}
    expected = HeadError(chosen, SIZE)
    for image in range(2):
        one, two = ({name: value[image].numpy() for name, value in each.items()} for each in (first, second))
        sides = [(each["boxes"], each["scores"]) for each in (one, two)]
        expected.update(*sides, (Parts.of(one), Parts.of(two)))
    pair = HeadRows.of(first, head), HeadRows.of(second, head)
    sums = [float(value) for value in head_sums(*(matched(*pair) if chosen else pair), SIZE)]
    score, weight, lost, _, share, _ = expected.by_image.sum(axis=0)
    assert sums == pytest.approx([score, weight, lost, share], rel=2e-3)
    assert 0.05 < sums[2] / sums[3] < 0.95


@pytest.mark.parametrize("parts", TASKS[:-1])
def test_every_part_is_learned(parts):
    head, moved = head_of(parts), outputs(parts, 3)
    if PROTOTYPES in moved:
        moved[PROTOTYPES] = moved[PROTOTYPES] / 100
    leaves = {name: value.requires_grad_() for name, value in moved.items()}
    reference = HeadRows.of(outputs(parts, 2), head)
    before = list(head_sums(reference, HeadRows.of(leaves, head), SIZE))[2]
    before.backward()
    for part in parts:
        slope = leaves[part].grad
        assert torch.isfinite(slope).all() and slope.abs().sum() > 0
        with torch.no_grad():
            leaves[part] -= 0.02 * slope / slope.abs().max()
    with torch.no_grad():
        assert list(head_sums(reference, HeadRows.of(leaves, head), SIZE))[2] < before


@pytest.mark.parametrize("parts", TASKS)
def test_equal_models_have_no_error(parts):
    rows = HeadRows.of(outputs(parts, 2), head_of(parts))
    score, _, lost, share = (float(value) for value in head_sums(rows, rows, SIZE))
    assert score == 0 and lost / share < 2e-3
    nothing = HeadRows(rows.boxes, torch.zeros_like(rows.scores), rows.images, rows.parts)
    assert [float(value) for value in head_sums(nothing, nothing, SIZE)] == [0, 0, 0, 0]
