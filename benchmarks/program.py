"""How long the integer program takes, and what it saves against lists: networks of many convolutions, drawn at random.

    python benchmarks/program.py [--convs 400] [--networks 5] [--seed 0]

A network has chains that branch and join, as detectors have. A convolution costs 0.5 to 20 microseconds more or less in
FP16; kernels with up to six convolutions around them cost by the precisions of all of these, mostly least where they
agree. Errors spread over four decades, as in the rankings of docs/results/precision.md, and a second form of INT8 has a
third of the error and a cost of its own. For bounds of 1, 10 and 50 % of the error of all in INT8, the plan is compared
with the lists that take convolutions into FP16 until the bound is kept, by error and by error for each microsecond.
Prints Markdown; ``gap`` is how much better another plan could be at most.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Mapping

import numpy as np

from trtdet.audit.neighbours import Joint
from trtdet.plans.optimiser import Plan, PrecisionChoice, Problem, cheapest

BOUNDS = (0.01, 0.1, 0.5)


def network(convs: int, rng: np.random.Generator) -> Problem:
    """A problem of so many convolutions, costs in microseconds."""
    names = [f"conv{index}" for index in range(convs)]
    errors = np.exp(rng.normal(-8, 2, convs))
    choices = {
        name: (
            PrecisionChoice("int8", float(error)),
            PrecisionChoice("corrected", float(error) / 3, cost=float(rng.uniform(0, 0.5))),
            PrecisionChoice("fp16", 0.0, True, float(rng.uniform(0.5, 20) * rng.choice((-0.3, 1)))),
        )
        for name, error in zip(names, errors, strict=True)
    }
    return Problem(choices, tuple(_joint([names[index] for index in around], rng) for around in _kernels(convs, rng)))


def _kernels(convs: int, rng: np.random.Generator) -> list[list[int]]:
    """The convolutions around each kernel: those that follow each other, and those where branches meet."""
    found = []
    for index in range(1, convs):
        around = {index - 1, index}
        if rng.random() < 0.3:  # a sum or a join with one or several from a while ago
            around |= {int(place) for place in rng.integers(max(0, index - 12), index, rng.integers(1, 5))}
        found.append(sorted(around))
    return found


def _joint(convs: list[str], rng: np.random.Generator) -> Joint:
    table = rng.uniform(2, 6, (2,) * len(convs))
    for state in (0, 1):  # nothing is converted
        table[(state,) * len(convs)] = rng.uniform(0, 2)
    return Joint(tuple(convs), table)


def listed(problem: Problem, bound: float, by: Mapping[str, float]) -> Plan:
    """What a list takes into FP16 until the bound is kept; all others in the form of INT8 with the least error."""
    picks = {name: min(choices[:-1], key=lambda choice: choice.error).name for name, choices in problem.choices.items()}
    for name in sorted(picks, key=lambda name: -by[name]):
        plan = problem.plan(picks)
        if plan.error <= bound:
            return plan
        picks[name] = "fp16"
    return problem.plan(picks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--convs", type=int, default=400)
    parser.add_argument("--networks", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = np.random.default_rng(options.seed)
    print("| network | joints | bound | seconds | gap | in FP16 | cost, us | list by error | list by error a us |")
    print("|---" * 9 + "|", flush=True)
    for number in range(options.networks):
        problem = network(options.convs, rng)
        error = {name: choices[0].error for name, choices in problem.choices.items()}
        dense = {name: error[name] / max(choices[-1].cost, 0.1) for name, choices in problem.choices.items()}
        for share in BOUNDS:
            bound = share * math.fsum(error.values())
            started = time.perf_counter()
            plan = cheapest(problem, bound)
            seconds = time.perf_counter() - started
            ratios = " | ".join(f"{listed(problem, bound, by).cost / plan.cost:.2f}" for by in (error, dense))
            counts = f"{len(problem.joints)} | {share:.0%} | {seconds:.1f} | {plan.gap:.1e} | {len(plan.half)}"
            print(f"| {number + 1} | {counts} | {plan.cost:.0f} | {ratios} |", flush=True)


if __name__ == "__main__":
    main()
