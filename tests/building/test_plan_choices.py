"""Choices and scores of a plan within a limit."""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from trtdet.audit.neighbours import Costs, Joint
from trtdet.backends import Backend
from trtdet.building import plan
from trtdet.building.corrections import Prepared
from trtdet.building.plan import PlanScorer, plan_problem
from trtdet.errors import ConfigError
from trtdet.evaluation.agreement import Agreement, AgreementOptions
from trtdet.options import BuildOptions, PlanOptions
from trtdet.plans.front import AGREEMENT
from trtdet.plans.optimiser import least_error
from trtdet.plans.scores import LayerScore, Sensitivity
from trtdet.quantization import Entry, PrecisionPlan

COUNTS = {"a": 3_000_000, "b": 5_000_000}


@pytest.fixture
def ready(monkeypatch):
    """Two convolutions in INT8 and one that stays in FP16."""
    work = {name: SimpleNamespace(count=count) for name, count in {**COUNTS, "head": 1_000_000}.items()}
    monkeypatch.setattr(plan, "multiply_adds", lambda model: work)
    entries = {name: Entry("fp16" if name == "head" else "int8", "a test") for name in work}
    return cast(Prepared, SimpleNamespace(plan=PrecisionPlan(entries), model=None))


def ranking(**errors: float) -> Sensitivity:
    layers = tuple(LayerScore(name, error, 1, 0.0, 1, 1, False) for name, error in errors.items())
    return Sensitivity(layers, (), 1, "fp32", 0.0, None, 1, "key", 0.0, 1)


def test_without_layers_multiply_adds_count_and_those_in_fp16_twice(ready):
    problem = plan_problem(ready, None)
    assert {name: [choice.cost for choice in found] for name, found in problem.choices.items()} == {
        "a": [3.0, 6.0],
        "b": [5.0, 10.0],
    }
    joint = Joint(("a",), np.array([1.0, 2.0]))
    timed = plan_problem(ready, Costs(("a", "b"), (joint,), 0.5))
    assert all(choice.cost == 0 for found in timed.choices.values() for choice in found)
    assert (timed.joints, timed.fixed) == ((joint,), 0.5)


def test_every_convolution_in_int8_has_an_error(ready):
    problem = plan_problem(ready, None, ranking(a=2.0, b=-0.1))
    assert [found[0].error for found in problem.choices.values()] == [2.0, 2e-6]
    assert least_error(problem) == 0
    assert plan_problem(ready, None, ranking(a=0.0, b=0.0)).choices["a"][0].error > 0


@pytest.mark.parametrize("runs", [False, True])
def test_an_estimate_refuses_a_limit_before_the_ranking_and_only_where_no_engine_runs(ready, monkeypatch, runs):
    """The cheapest plan takes 1.5 ms by estimate, and every plan 0.5 ms as measured."""
    costs = Costs(("a", "b"), (Joint(("a",), np.array([1.0, 2.0])),), 0.5)
    monkeypatch.setattr(plan, "plan_times", lambda *given, **named: costs)
    stopwatch = (lambda half: 0.5) if runs else None
    monkeypatch.setattr(plan, "plan_stopwatch", lambda *given, **named: stopwatch)
    ready.without_overflow = lambda plan, progress: plan
    asked: list[str] = []

    def ranked() -> Sensitivity:
        asked.append("ranking")
        return ranking(a=2.0, b=1.0)

    options = BuildOptions(plan=PlanOptions(max_latency=1.0))
    backend = cast(Backend, object())
    if runs:
        found = plan.choose_plan(ready, options, ranked, backend)
        assert found.plan.names("fp16") == ("a", "b", "head") and asked == ["ranking"]
    else:
        with pytest.raises(ConfigError, match="no plan runs in 1 ms: the cheapest plan takes 1.5"):
            plan.choose_plan(ready, options, ranked, backend)
        assert asked == []


@pytest.mark.parametrize("runs", [False, True])
def test_an_estimate_refuses_a_limit_before_corrections_and_only_where_no_engine_runs(ready, monkeypatch, runs):
    """The cheapest plan takes 1.5 ms by estimate."""
    costs = Costs(("a", "b"), (Joint(("a",), np.array([1.0, 2.0])),), 0.5)
    monkeypatch.setattr(plan, "plan_times", lambda *given, **named: costs)
    monkeypatch.setattr(plan, "plan_stopwatch", lambda *given, **named: (lambda half: 0.5) if runs else None)
    backend = cast(Backend, object())
    plan.check_latency(ready, backend, BuildOptions(plan=PlanOptions(max_latency=1.6)))
    limited = BuildOptions(plan=PlanOptions(max_latency=1.0))
    if runs:
        plan.check_latency(ready, backend, limited)
    else:
        with pytest.raises(ConfigError, match="no plan runs in 1 ms: the cheapest plan takes 1.5"):
            plan.check_latency(ready, backend, limited)


def scorer(monkeypatch: pytest.MonkeyPatch, found: Agreement) -> PlanScorer:
    """Of a plan whose model agrees with the float model so far."""
    monkeypatch.setattr(plan, "agree", lambda *given: found)
    monkeypatch.setattr(plan, "part_agreements", lambda *given: {})
    monkeypatch.setattr(PlanScorer, "_scored", lambda self, model: SimpleNamespace(result=SimpleNamespace(map=-1.0)))
    given: Any = SimpleNamespace(
        plan=PrecisionPlan({}),
        model=None,
        without_overflow=lambda plan, progress: plan,
        explicit=lambda plan: SimpleNamespace(model=None),
    )
    return PlanScorer(given, AGREEMENT, cast(Any, None), lambda *told: None)


def test_a_disagreement_is_what_is_left_of_the_agreement(monkeypatch):
    found = Agreement(0.97, 0.99, 0.98, 0.96, 0.985, 0.9, {}, 20, 300, AgreementOptions())
    score = scorer(monkeypatch, found)(())
    assert (score.loss, score.worst) == (pytest.approx(3.0), pytest.approx(4.0))
    assert (score.map, score.agreement, score.value, score.images) == (None, 0.97, 0.97, 20)
    assert scorer(monkeypatch, found).reference == 1.0


def test_nothing_to_agree_with_is_an_error(monkeypatch):
    nothing = Agreement(
        None, None, None, None, None, None, {}, 20, 0, AgreementOptions(), "the reference finds nothing"
    )
    with pytest.raises(ConfigError, match="--set plan.max_disagreement: the reference finds nothing"):
        scorer(monkeypatch, nothing)(())
