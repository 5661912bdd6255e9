"""The gate compares whole networks: its choice, and its confidence."""

from dataclasses import replace

import numpy as np
import pytest
from models import head_error, judged_by

from trtdet.quantization import insert_qdq, place
from trtdet.quantization.corrections import gate
from trtdet.quantization.corrections.gate import QuantizedForm, Task, Verdict, compare
from trtdet.quantization.head_error import confidence, fewest_images, lower_on
from trtdet.quantization.sources import held_back


@pytest.fixture
def task(model, sources, chosen):
    given = sources()
    candidates = chosen(model, given, "minmax")
    return Task(model, place(model), candidates, (), *held_back(given.images), given)


def wholes(task: Task, *factors: float) -> list[QuantizedForm]:
    """The ranges of the rule, so many times too wide."""
    plain = task.first
    return [
        QuantizedForm(
            f"times {factor}",
            replace(plain, tensors={n: replace(t, amax=factor * t.amax) for n, t in plain.tensors.items()}),
        )
        for factor in factors
    ]


def test_any_wholes_are_judged_by_what_they_do_to_detections(task, distance):
    given = wholes(task, 30, 1, 4)
    verdict = compare(task, given)
    assert given[verdict.kept] is given[1]
    found = [error.distance for error in verdict.errors]
    expected = [distance(task.model, insert_qdq(task.model, task.placement, way.ranges), task.sources) for way in given]
    assert found == pytest.approx(expected)
    assert found[1] < found[2] < found[0]
    assert [compare(task, some).kept for some in (given[1:], given[:1])] == [0, 0]


@pytest.mark.parametrize(
    ("distances", "kept", "said"),
    [
        ((0.3, 0.2, 0.1), 2, "0.3000 -> 0.1000 on 6 images held back, lower"),
        ((0.3, 0.3, 0.4), 1, "0.3000 -> 0.3000 on 6 images held back, lower"),
        ((0.1, 0.3, 0.2), 0, "0.1000 -> 0.2000 on 6 images held back, higher"),
        ((0.1,), 0, "0.1000 -> 0.1000 on 6 images held back, lower"),
    ],
)
def test_the_least_error_is_kept(task, monkeypatch, distances, kept, said):
    monkeypatch.setattr(gate, "head_errors", judged_by(*distances, images=6))
    verdict = compare(task, wholes(task, *distances))
    assert verdict.kept == kept
    (sentence,) = verdict.sentences()
    same = "0.3000 -> 0.3000" in said or len(distances) == 1
    counts = f"on {0 if same else 6} of 6 where anything is detected, {0 if same else 98} % sure"
    assert sentence.startswith(f"error at the head {said} {counts}; detections agree by ")
    assert confidence(verdict.errors[kept], verdict.errors[0]) == pytest.approx(0 if same or kept == 0 else 63 / 64)
    assert verdict.doubt() == ""


PLAIN = QuantizedForm("plain", None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("by_image", "nodes", "kept"),
    [
        pytest.param([[0.2] * 4, [0.196] * 4], [10, 14], 0, id="unsure and hardly better"),
        pytest.param([[0.2] * 4, [0.196] * 4], [14, 14], 1, id="as simple"),
        pytest.param([[0.2] * 4, [0.196] * 4], [14, 10], 1, id="simpler and better"),
        pytest.param([[0.2] * 4, [0.18] * 4], [10, 14], 1, id="unsure and better by much"),
        pytest.param([[0.2] * 6, [0.196] * 6], [10, 14], 1, id="sure"),
        pytest.param([[0.2] * 8, [0.1] * 4 + [0.26] * 4], [10, 14], 0, id="mixed"),
        pytest.param([[0.3] * 4, [0.2] * 4, [0.198] * 4, [0.196] * 4], [10, 13, 12, 14], 2, id="simplest of the close"),
    ],
)
def test_of_two_that_the_images_cannot_tell_apart_the_simpler_is_kept(by_image, nodes, kept):
    errors = [head_error(*errors) for errors in by_image]
    verdict = Verdict((PLAIN,) * len(errors), tuple(errors), tuple(nodes))
    assert verdict.kept == kept
    least = min(range(len(errors)), key=lambda index: errors[index].distance)
    assert len(verdict.sentences()) == (1 if least == kept else 2)
    if least != kept:
        assert verdict.sentences()[0].startswith(f"left out: plain, error {errors[least].distance:.4f} for ")


def test_as_many_images_make_it_as_sure_as_chance_allows():
    for count in (1, 2, 3, 5, 7):
        assert confidence(head_error(*[0.1] * count), head_error(*[0.2] * count)) == pytest.approx(1 - 0.5**count)
    assert confidence(head_error(*[0.1] * 40), head_error(*[0.2] * 40)) > 0.999
    assert [fewest_images(sure) for sure in (0.5, 0.9, 0.95, 0.99)] == [1, 4, 5, 7]
    assert lower_on(head_error(0.1, 0.1, 0.3), head_error(0.2, 0.2, 0.2)) == (2, 3)


def test_confidence_is_that_of_the_pooled_error():
    first, other = head_error(0.1, 0.1, 0.1, 0.3), head_error(0.2, 0.2, 0.2, 0.2)
    # All scores weigh the same, so that the sums of the squares say it all.
    pooled = []
    for number in range(16):
        swap = [bool(number >> image & 1) for image in range(4)]
        one = [b if s else a for s, a, b in zip(swap, (1, 1, 1, 9), (4, 4, 4, 4), strict=True)]
        two = [a if s else b for s, a, b in zip(swap, (1, 1, 1, 9), (4, 4, 4, 4), strict=True)]
        pooled.append(np.sqrt(sum(two)) - np.sqrt(sum(one)))
    expected = 1 - np.mean([gain >= pooled[0] - 1e-9 for gain in pooled])
    assert 0 < expected < 0.9
    assert confidence(first, other) == pytest.approx(expected)
    assert confidence(first, first) == 0
    assert confidence(other, first) == pytest.approx(1 - np.mean([-gain >= -pooled[0] - 1e-9 for gain in pooled]))


def test_images_on_which_nothing_is_detected_say_nothing():
    quiet = head_error(0.0, 0.0, weight=0.01)
    assert confidence(quiet, quiet) == 0
    assert lower_on(quiet, quiet) == (0, 0)
    few = [head_error(0.1, 0.1), head_error(0.2, 0.2)]
    for error in few:
        empty = np.zeros((1, 4), np.float32), np.zeros((1, 1), np.float32)
        error.update(empty, empty)
    assert confidence(*few) == pytest.approx(0.75)
    assert lower_on(*few) == (2, 2)


def test_an_image_counts_where_only_one_of_the_models_detects_something():
    silent, sure = head_error(0.0, 0.0, weight=0.01), head_error(0.0, 0.0, weight=0.01)
    box, nothing, score = (np.array(rows, np.float32) for rows in ([[0, 0, 10, 10]], [[0]], [[0.3]]))
    silent.update((box, nothing), (box, nothing))
    sure.update((box, nothing), (box, score))
    assert lower_on(silent, sure) == (1, 1)
    assert lower_on(sure, silent) == (0, 1)


def test_other_images_cannot_be_compared():
    with pytest.raises(ValueError, match="2 and 3 images are not the same images"):
        confidence(head_error(0.1, 0.1), head_error(0.1, 0.1, 0.1))
