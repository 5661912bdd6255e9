"""A large report stays small and is made in seconds: 400 convolutions in 800 kernels, 40 variants."""

import time

import numpy as np
import pytest
from test_compare_runs import row
from test_front_page import swept

from trtdet.calibration import Collection, Histogram, Ranges
from trtdet.plans.scores import LayerScore, Sensitivity
from trtdet.quantization import Entry, PrecisionPlan
from trtdet.report import Report, page
from trtdet.report.sections.fronts import experiment_section
from trtdet.report.sections.graph import Node, graph_section
from trtdet.report.sections.layers import plan_section, sensitivity_section
from trtdet.report.sections.ranges import ranges_section


def large(convolutions: int, variants: int) -> str:
    rng = np.random.default_rng(0)
    names = [f"/backbone/stage{place // 20}/block{place % 20}/conv/Conv" for place in range(convolutions)]
    plan = PrecisionPlan({name: Entry("int8" if place % 3 else "fp16", "a reason") for place, name in enumerate(names)})
    scores = rng.lognormal(-10, 2, convolutions)
    ranked = sorted(range(convolutions), key=lambda place: -scores[place])
    layers = [
        LayerScore(names[place], float(scores[place]), rank, 0.1, 10_000, 1, False, place=place + 1)
        for rank, place in enumerate(ranked, 1)
    ]
    ranking = Sensitivity(tuple(layers), (), 10_000 * convolutions, "fp32", 0.0, None, 32, "key", 1.0, 1)
    values = rng.normal(0, 1, 50_000).astype(np.float32)
    histograms = {f"t{place}": Histogram.of(values * np.float32(place + 1)) for place in range(convolutions)}
    collection = Collection(histograms, "key", 128, "sha", "images", ())
    inputs = {name: f"t{place}" for place, name in enumerate(names)}
    # Two kernels a convolution, and every tenth is joined with one far back.
    nodes = [
        Node(
            names[place // 2],
            f"{names[place // 2]}<br>0.01 ms",
            "int8",
            (*([place - 1] if place else []), *([place - 30] if place > 30 and place % 20 == 0 else [])),
            0.01,
        )
        for place in range(2 * convolutions)
    ]
    sections = (
        experiment_section(swept(*(row(f"variant {place}", -0.001 * place) for place in range(variants)))),
        sensitivity_section(ranking, plan),
        ranges_section(Ranges.choose(collection, "percentile"), collection, inputs, [layer.name for layer in layers]),
        graph_section(nodes, "estimated for L4, batch 1"),
        plan_section(plan),
    )
    return page(Report("a large one", (), sections))


@pytest.mark.slow
@pytest.mark.parametrize(("convolutions", "variants", "seconds"), [(113, 12, 10), (400, 40, 30)])
def test_a_large_report_is_made_in_time_and_small(convolutions, variants, seconds):
    started = time.process_time()
    text = large(convolutions, variants)
    assert time.process_time() - started < seconds
    assert len(text.encode()) < 6e6
