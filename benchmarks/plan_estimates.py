"""Plans that are not built, estimated from the layers of the engine with everything in INT8, against engines of them.

    python benchmarks/plan_estimates.py MODEL ... --images DIR [--gpu L4] [--batch 1]

MODEL is a float ONNX file of a name that trtdet has a configuration for. 14 engines are built by TensorRT-RTX: all
INT8, depthwise convolutions in FP16, the plan by default, random shares of the convolutions, runs of neighbours, all
FP16. The estimate of each built engine is what the estimate from the INT8 engine's layers alone is compared with. Then,
for ten GPUs, the cheapest plan of all whatever its error, beside all FP16 and all INT8, at batch 1 and 32. No engine is
run. Prints Markdown.
"""

from __future__ import annotations

import argparse
import math
import random
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory

from coco_models import MODELS
from scipy.stats import spearmanr

from trtdet.audit.gpus import gpu_named
from trtdet.audit.neighbours import time_costs
from trtdet.audit.roofline import Roofline, estimate
from trtdet.audit.traffic import Flow
from trtdet.backends import Backend, EngineTarget, choose
from trtdet.building.corrections import Prepared, prepared
from trtdet.building.engine import best_engine, explicit_networks
from trtdet.building.graph import build_graph
from trtdet.building.ranges import calibrated, select_images
from trtdet.config import load_config
from trtdet.errors import TrtdetWarning
from trtdet.options import BuildOptions, CalibrationOptions, NmsOptions, PlanOptions, changed
from trtdet.plans.optimiser import PrecisionChoice, Problem, cheapest
from trtdet.plans.planning import keeping
from trtdet.quantization import Cause
from trtdet.quantization.macs import multiply_adds

GPUS = ("T4", "L4", "A10", "L40S", "A100", "H200", "RTX 3090", "RTX 4090", "RTX 5090", "Jetson AGX Orin")


def sets(ready: Prepared, default: list[str]) -> dict[str, list[str]]:
    """The convolutions in FP16 of each plan."""
    convs = list(ready.plan.names("int8"))
    macs = multiply_adds(ready.model)
    found = {"all INT8": [], "depthwise": [name for name in convs if macs[name].depthwise], "by default": default}
    rng = random.Random(0)
    for share in (0.1, 0.2, 0.3, 0.5, 0.7, 0.9):
        found[f"{share:.0%} at random"] = rng.sample(convs, int(share * len(convs)))
    for _ in range(4):
        start, count = rng.randrange(len(convs)), rng.randrange(5, len(convs) // 2)
        found[f"{count} in a row from {start + 1}"] = convs[start : start + count]
    return {**found, "all FP16": convs}


def built(ready: Prepared, names: list[str], asked: BuildOptions, backend: Backend) -> Flow:
    plan = ready.without_overflow(keeping(ready.plan, dict.fromkeys(names, "tried"), Cause.KEPT_NAMED))
    networks = explicit_networks(ready, plan, backend.capabilities)
    with TemporaryDirectory() as folder:
        engine = best_engine(networks, backend, EngineTarget.of(asked), Path(folder) / "timings")
    assert engine.audit is not None, "TensorRT-RTX lists its layers"
    return Flow(engine.audit.layers, engine.network.plan, engine.network.model)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path, metavar="MODEL")
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--gpu", default="L4")
    parser.add_argument("--batch", type=int, default=1)
    options = parser.parse_args()
    warnings.simplefilter("ignore", TrtdetWarning)
    gpu, backend = gpu_named(options.gpu), choose("tensorrt-rtx")
    print("| model | in FP16 | convs | MB built | MB foretold | ms built | ms foretold | off |")
    print("|---" * 8 + "|", flush=True)
    ranks, bases = [], {}
    for path in options.models:
        calibration = CalibrationOptions(images=options.images, num_images=4, check_input=False)
        asked = BuildOptions(
            precision="int8",
            effort="none",
            nms=NmsOptions(mode="host"),
            backend="tensorrt-rtx",
            sms=(89,),
            guard="off",
            calibration=calibration,
            plan=PlanOptions(int8_all=True),
        )
        graph = build_graph(path, load_config(MODELS[path.stem][0]), asked, backend)
        ready = prepared(calibrated(graph, calibration, select_images(calibration)), calibration, ())
        bases[path.stem] = base = built(ready, [], asked, backend)
        by_default = build_graph(path, load_config(MODELS[path.stem][0]), changed(asked, int8_all=False), backend).plan
        default = [name for name in ready.plan.names("int8") if by_default.entries[name].precision == "fp16"]
        pairs = []
        for plan, names in sets(ready, default).items():
            done = estimate(built(ready, names, asked, backend), gpu, options.batch)
            told = estimate(base, gpu, options.batch, fp16=[name for name in names if name in base.convolutions])
            pairs.append((done.ms, told.ms))
            figures = f"{done.bytes / 1e6:.2f} | {told.bytes / 1e6:.2f} | {done.ms:.4f} | {told.ms:.4f}"
            print(f"| {path.stem} | {plan} | {len(names)} | {figures} | {told.ms / done.ms - 1:+.1%} |", flush=True)
        ranks.append(f"{path.stem} {float(spearmanr(*zip(*pairs, strict=True)).statistic):.3f}")
    print(f"\nSpearman's rank correlation of both times: {', '.join(ranks)}")
    print("\n| model | GPU | batch | all FP16, ms | all INT8, ms | cheapest plan, ms | convs in INT8 | gain |")
    print("|---" * 8 + "|", flush=True)
    for name, flow in bases.items():
        for gpu in map(gpu_named, GPUS):
            for batch in (1, 32):
                print(f"| {name} | {gpu.name} | {batch} | {least(flow, Roofline(flow, gpu, batch))} |", flush=True)


def least(flow: Flow, roofline: Roofline) -> str:
    """The cheapest plan of all."""
    costs = time_costs(flow, roofline)
    choices = {name: (PrecisionChoice("int8", 0.0), PrecisionChoice("fp16", 0.0, True)) for name in costs.convs}
    plan = cheapest(Problem(choices, costs.joints, costs.fixed), math.inf)
    half, int8 = costs.of(costs.convs), costs.of(())
    gain = min(half, int8) / plan.cost - 1
    counts = f"{len(costs.convs) - len(plan.half)} of {len(costs.convs)}"
    return f"{half:.4f} | {int8:.4f} | {plan.cost:.4f} | {counts} | {gain:.1%}"


if __name__ == "__main__":
    main()
