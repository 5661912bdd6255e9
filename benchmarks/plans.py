"""The plan that keeps a bound on the loss, beside all FP16, all INT8, depthwise convolutions in FP16, and a list.

    python benchmarks/plans.py MODEL --config NAME --images DIR --val-images DIR --annotations JSON
        [--bounds 0.3 1] [--correct none] [--backend tensorrt-rtx] [--gpu L4] [--num-images 64]

Every convolution is open to INT8. The list is what was searched before there was a program: the first N by error at the
head, with the fewest convolutions that keep the bound. It is chosen by the same half of the annotated images and with
the same rule, the upper end of the 90 % interval. The last columns have the most accurate plan that costs no more, by
the program and the ranking alone. Losses in the table are on all images. Costs are the estimate for the GPU from an
engine that the backend builds, or, with a backend that lists no layers, millions of multiply-adds, those in FP16 twice.
Prints Markdown.
"""

from __future__ import annotations

import argparse
import warnings
from functools import cache
from pathlib import Path

from trtdet.backends import choose
from trtdet.building.corrections import Prepared, prepared
from trtdet.building.costs import plan_times
from trtdet.building.graph import build_graph
from trtdet.building.plan import PLAIN_UNIT, PlanScorer, plan_problem, search_within
from trtdet.building.ranges import calibrated, select_images
from trtdet.config import load_config
from trtdet.data import CocoDataset
from trtdet.errors import ConfigError, TrtdetWarning
from trtdet.options import BuildOptions, CalibrationOptions, EngineOptions, NmsOptions, PlanOptions
from trtdet.plans.front import MAP, Search, cheapest_within
from trtdet.plans.optimiser import Plan, most_accurate
from trtdet.plans.ranking import rank
from trtdet.plans.scores import Sensitivity
from trtdet.progress import silent
from trtdet.quantization import DEFAULT_CORRECTIONS
from trtdet.quantization.macs import multiply_adds

RANKED = 32


def build_options(options: argparse.Namespace) -> BuildOptions:
    calibration = CalibrationOptions(images=options.images, num_images=options.num_images, check_input=False)
    correct = () if options.correct == "none" else DEFAULT_CORRECTIONS
    sms = () if options.backend == "onnxruntime" else (89,)
    return BuildOptions(
        precision="int8",
        effort=",".join(correct) or "none",
        nms=NmsOptions(mode="host"),
        backend=options.backend,
        sms=sms,
        guard="off",
        calibration=calibration,
        plan=PlanOptions(int8_all=True),
        engine=EngineOptions(gpu=options.gpu),
    )


def prepare(options: argparse.Namespace, asked: BuildOptions) -> Prepared:
    graph = build_graph(options.model, load_config(options.config), asked, choose(asked.backend))
    found = calibrated(graph, asked.calibration, select_images(asked.calibration))
    return prepared(found, asked.calibration, asked.corrections)


def listed(ranking: Sensitivity, search: Search, bound: float) -> tuple[str, ...]:
    """The fewest of the most sensitive convolutions that keep the bound on the images that choose, by bisection."""
    names = [layer.name for layer in ranking.layers]
    fails, keeps = -1, len(names)
    while keeps - fails > 1:
        count = (fails + keeps) // 2
        if search.measure(tuple(names[:count])).worst <= bound:
            keeps = count
        else:
            fails = count
    return tuple(names[:keeps])


def chosen(search: Search, bound: float) -> tuple[str, ...] | None:
    """The plan that the search gives, with what is said of it; None where it gives none."""
    try:
        found = cheapest_within(search, bound)
    except ConfigError as error:
        print(f"{error}\n", flush=True)
        return None
    print(f"at most {bound:g}:\n{found.table()}\n{found.summary}\n", flush=True)
    return found.chosen.names


def rivals(ready: Prepared, search: Search, ranking: Sensitivity, bounds: list[float]) -> dict[str, tuple[str, ...]]:
    """Plans that nothing was solved for."""
    names = ready.plan.names("int8")
    macs = multiply_adds(ready.model)
    lists = {f"list by error for {bound:g}": listed(ranking, search, bound) for bound in bounds}
    depthwise = tuple(name for name in names if macs[name].depthwise)
    return {"all INT8": (), **({"depthwise in FP16": depthwise} if depthwise else {}), **lists, "all FP16": names}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="MODEL")
    parser.add_argument("--config", required=True)
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--val-images", type=Path, required=True)
    parser.add_argument("--annotations", type=Path, required=True)
    parser.add_argument("--bounds", type=float, nargs="+", default=[0.3, 1.0])
    parser.add_argument("--correct", choices=("none", "auto"), default="none")
    parser.add_argument("--backend", default="tensorrt-rtx")
    parser.add_argument("--gpu", default="L4")
    parser.add_argument("--num-images", type=int, default=64)
    options = parser.parse_args()
    warnings.simplefilter("ignore", TrtdetWarning)
    asked = build_options(options)
    ready = prepare(options, asked)
    costs = plan_times(ready, choose(asked.backend), asked)
    dataset = CocoDataset.load(options.annotations, options.val_images, ready.graph.config.classes)
    ranking = cache(lambda: rank(ready.subject(RANKED)))
    search = search_within(ready, ranking, costs, dataset)
    found = {f"chosen for {bound:g}": chosen(search, bound) for bound in options.bounds}
    plans = {label: names for label, names in found.items() if names is not None}
    plans |= rivals(ready, search, ranking(), options.bounds)
    problem = plan_problem(ready, costs, ranking())
    whole = PlanScorer(ready, MAP, dataset, silent)
    print(f"{options.model.stem}, corrections {options.correct}, FP32 {100 * whole.reference:.2f} on all images\n")
    unit = PLAIN_UNIT if costs is None else costs.unit
    print(f"| plan | convs in FP16 | {unit} | against FP32 | as cheap, by the program | against FP32 |")
    print("|---" * 6 + "|", flush=True)
    for label, names in plans.items():
        plan = problem.plan({name: "fp16" if name in names else "int8" for name in problem.choices})
        same = most_accurate(problem, plan.cost)
        solved = (
            [f"{len(same.half)}, {same.cost:.4g}", lost(whole, same)] if same.half != plan.half else ["the same", ""]
        )
        cells = (f"{len(names)} of {len(problem.choices)}", f"{plan.cost:.4g}", lost(whole, plan), *solved)
        print(f"| {label} | {' | '.join(cells)} |", flush=True)


def lost(whole: PlanScorer, plan: Plan) -> str:
    score = whole(plan.half)
    return f"{100 * score.difference:+.2f} ({score.interval})"


if __name__ == "__main__":
    main()
