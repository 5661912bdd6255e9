"""The search for the cheapest plan within a limit: number of measurements, other images to verify, interval ends."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from trtdet.audit.neighbours import Joint
from trtdet.errors import ConfigError
from trtdet.evaluation.comparison import PartScore
from trtdet.plans.front import TRIES, Score, Search, TradeOff, cheapest_within
from trtdet.plans.optimiser import PrecisionChoice, Problem

POWERS = [0.5, 0.2, 0.1, 0.05, 0.05, 0.04, 0.03, 0.02, 0.005, 0.005]

# At most: the float model, the cheapest plan and the bisection choose; three plans more are verified.
EVALUATIONS, MORE = 2 + TRIES, 3
REPORTED = 2 + MORE


@dataclass
class Images:
    """Images on which mAP falls with the error that is left, and on which the interval reaches a share further."""

    loss: Callable[[float], float]
    errors: dict[str, float]
    wide: float = 0.5
    images: int = 50
    part: float = 0.0
    """Points that keypoints lose more than boxes; none without it."""
    asked: list[tuple[str, ...]] = field(default_factory=list)

    @property
    def reference(self) -> float:
        return 0.3

    def __call__(self, names: tuple[str, ...]) -> Score:
        self.asked.append(names)
        lost = self.loss(sum(error for name, error in self.errors.items() if name not in names))
        reach = self.wide * lost
        score = Score(0.3 - lost, -lost, -lost - reach, -lost + reach, self.images)
        further = lost + self.part / 100 * (lost > 0)
        keypoints = PartScore(map=0.4, difference=-further, low=-further - reach, high=-further + reach)
        return replace(score, parts={"keypoints": keypoints}) if self.part else score


def search(
    powers: list[float],
    loss: Callable[[float], float],
    other: Callable[[float], float] | None = None,
    alone: list[float] | None = None,
) -> tuple[Search, list[str]]:
    """Each convolution is a millisecond dearer in FP16; the list grows where the ranking is asked for.

    ``alone`` are the errors that the ranking says, where they are not those that the convolutions have in a plan.
    """
    errors = {f"c{index}": power for index, power in enumerate(powers)}
    said = dict(zip(errors, alone or powers, strict=True))
    joints = tuple(Joint((name,), np.array([1.0, 2.0])) for name in errors)
    ranked: list[str] = []

    def problem(known: bool) -> Problem:
        ranked.extend(["ranked"] if known else [])
        return Problem(
            {
                name: (PrecisionChoice("int8", error * known), PrecisionChoice("fp16", 0.0, True))
                for name, error in said.items()
            },
            joints,
        )

    chooses, reports = Images(loss, errors), Images(other or loss, errors)
    macs = dict.fromkeys(errors, 10)
    return Search(problem(False), lambda: problem(True), macs, "ms", chooses, reports), ranked


def linear(whole: float) -> Callable[[float], float]:
    return lambda error: whole * error


@pytest.mark.parametrize("bound", [0.1, 0.3, 0.5, 1.0, 2.0, 4.0, 7.0])
def test_the_plan_keeps_the_bound_at_the_upper_end_and_little_cheaper_would(bound):
    asked, _ = search(POWERS, linear(0.10))
    done = cheapest_within(asked, bound)
    assert done.chosen.score.worst <= bound and done.chosen.reported is not None
    assert done.chosen.reported.worst <= bound
    errors = sorted(POWERS, reverse=True)
    least = next(count for count in range(11) if 15 * sum(errors[count:]) <= bound)
    assert least <= len(done.chosen.names) <= least + 1
    assert done.chosen.share == sum(asked.macs[name] for name in done.chosen.names) / sum(asked.macs.values()) <= 1
    assert len(asked.measure.asked) <= EVALUATIONS - 1 + MORE and len(asked.report.asked) <= REPORTED - 1
    assert done.evaluations == len(asked.measure.asked) + len(asked.report.asked) + 2
    assert "<- chosen" in str(done.table())


def test_nothing_is_ranked_where_the_cheapest_plan_keeps_the_bound():
    asked, ranked = search(POWERS, linear(0.001))
    done = cheapest_within(asked, 0.3)
    assert (done.chosen.names, done.evaluations, ranked) == ((), 4, [])
    assert len(asked.report.asked) == 1
    # Barely kept it might not be on the other images, where nothing is asked after a failure.
    asked, ranked = search(POWERS, linear(0.001), linear(0.0025))
    done = cheapest_within(asked, 0.25)
    assert ranked == ["ranked"] and asked.report.asked[-1] == () and 0 < len(done.chosen.names) < len(POWERS)


def test_a_plan_with_nothing_in_int8_is_asked_alone():
    """Where FP16 is the faster everywhere there is nothing to rank."""
    asked, ranked = search(POWERS, linear(0.1))
    cheap = replace(asked.start, joints=tuple(Joint(joint.convs, joint.cost[::-1]) for joint in asked.start.joints))
    done = cheapest_within(replace(asked, start=cheap), 0.1)
    assert (done.chosen.kept, len(asked.report.asked), ranked) == ("all", 1, [])


@pytest.mark.parametrize("count", [20, 113])
def test_long_models_take_no_more_evaluations(count):
    asked, _ = search([0.9**index for index in range(count)], linear(0.02))
    done = cheapest_within(asked, 0.5)
    assert len(asked.measure.asked) <= EVALUATIONS - 1 + MORE
    assert done.chosen.score.worst <= 0.5 and 0 < len(done.chosen.names) < count


def test_what_holds_on_the_images_that_chose_alone_is_not_taken():
    """On the other images each plan loses three times as much; only more accurate plans are shown to keep the bound."""
    asked, _ = search(POWERS, linear(0.05), linear(0.15))
    done = cheapest_within(asked, 1.0)
    cheaper = [found for found in done.candidates if found.cost < done.chosen.cost and found.score.worst <= 1.0]
    assert cheaper and done.chosen.reported is not None and done.chosen.reported.worst <= 1.0
    assert [found.reported.worst > 1.0 for found in cheaper if found.reported] == [True]
    # The most accurate first, and no further than the first that fails.
    sizes = [len(names) for names in asked.report.asked]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] == len(POWERS)


def test_a_known_plan_that_is_cheaper_is_tried():
    """The errors do not know that the last two are worth all others together; somebody does."""
    true = [0.01] * 8 + [0.9, 0.9]
    asked, _ = search(true, linear(0.1), alone=[0.5] * 8 + [0.4, 0.4])
    alone = cheapest_within(asked, 2.0)
    done = cheapest_within(replace(asked, others=(("c8", "c9"),)), 2.0)
    assert done.chosen.names == ("c8", "c9") and done.chosen.cost < alone.chosen.cost
    # A plan that is dearer than what was found is not.
    asked, _ = search(POWERS, linear(0.1))
    dear = tuple(f"c{index}" for index in range(1, 10))
    assert dear not in {plan.names for plan in cheapest_within(replace(asked, others=(dear,)), 2.0).candidates}


def test_how_many_images_would_do_is_said():
    """The other images say the same with four times the interval."""
    asked, _ = search(POWERS, linear(0.05))
    wide = Images(linear(0.05), asked.report.errors, wide=2.0)
    done = cheapest_within(replace(asked, report=wide), 1.0)
    assert done.needed is not None and 50 < done.needed < 50 * 16 + 1
    nothing = Images(lambda error: 0.009, asked.report.errors, wide=1.0)
    with pytest.raises(
        ConfigError, match=r"is not shown to on the 50 others, where it loses 0.90 \(up to 1.80 at 90 %\)"
    ):
        cheapest_within(replace(asked, report=nothing), 1.0)


def test_how_many_images_would_show_a_cheaper_plan_is_said():
    """A plan loses half of the bound on the images that choose and might lose twice as much as the bound."""
    asked, _ = search(POWERS, linear(0.05))
    wide = [Images(linear(0.05), asked.report.errors, wide=3.0) for _ in range(2)]
    done = cheapest_within(replace(asked, measure=wide[0], report=wide[1]), 1.0)
    near = [found for found in done.candidates if found.score.loss < 1.0 < found.score.worst]
    assert near and all(found.cost < done.chosen.cost for found in near)
    # Three losses of interval have to become the rest of the bound.
    least = min(50 * (3 * found.score.loss / (1.0 - found.score.loss)) ** 2 for found in near)
    assert done.needed == pytest.approx(least, abs=1)
    assert f"; {done.needed} images on each side would show it of a cheaper plan" in done.summary


def test_a_bound_holds_for_what_loses_most():
    (alone, _), (both, _) = (search(POWERS, linear(0.01)) for _ in range(2))
    for images in (both.measure, both.report):
        assert isinstance(images, Images)
        images.part = 0.2
    boxes, parts = (cheapest_within(each, 0.3) for each in (alone, both))
    assert len(parts.chosen.names) > len(boxes.chosen.names) and parts.chosen.score.worst <= 0.3
    table = parts.table().markdown()
    assert "keypoints against FP32" in table and "keypoints on other images" in table
    assert "keypoints" not in boxes.table().markdown()


def test_an_error_names_what_loses_most():
    asked, _ = search(POWERS, lambda error: 0.05 + error)
    assert isinstance(asked.measure, Images)
    asked.measure.part = 2.0
    with pytest.raises(ConfigError, match=r"the best of \d, all, loses 7.00 of keypoints \(up to 9.50 at 90 %\)"):
        cheapest_within(asked, 0.3)


def test_a_bound_that_nothing_keeps_is_an_error_that_names_the_best():
    asked, _ = search(POWERS, lambda error: 0.05 + error)
    with pytest.raises(ConfigError, match=r"no plan .* 0.3 mAP points of 30.00; the best of \d, all, loses 5.00"):
        cheapest_within(asked, 0.3)


def test_the_bisection_ends_at_the_least_error():
    asked, _ = search([1.0, *[1e-9] * 39], lambda error: 0.05 if error else 0.0)
    done = cheapest_within(asked, 0.3)
    assert done.chosen.kept == "all" and len(asked.measure.asked) < EVALUATIONS


def test_the_file_has_all_that_was_tried():
    done: TradeOff = cheapest_within(search(POWERS, linear(0.1))[0], 1.0)
    plain = done.as_dict()
    known = {"bound", "reference", "candidates", "chosen", "evaluations", "unit", "needed", "figure"}
    assert known == plain.keys()
    assert plain["figure"] == "map"
    assert plain["chosen"]["reported"]["images"] == 50
    costs = [found["cost"] for found in plain["candidates"]]
    assert costs == sorted(costs)
