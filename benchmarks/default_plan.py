"""What stays in FP16 by default, how much of the work it is, and what that is estimated to gain.

    python benchmarks/default_plan.py [--config NAME] [--backend BACKEND] [--gpu GPU] MODEL ...

MODEL is a float ONNX file; NAME is a configuration, by default the one that is known for the file's name. Without
BACKEND the plan is that of a backend whose kernels quantise what they write, such as TensorRT 8.6 and 10. With
tensorrt-rtx estimates for GPU choose it; the last columns are the estimated milliseconds of FP16 and of the fastest
plan with INT8 layers, which is built if it is 1.02 times as fast. Prints Markdown.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from coco_models import MODELS

from trtdet.backends import choose
from trtdet.building.default_plan import decided_by_time, fastest_plan
from trtdet.building.graph import build_graph, host_graph
from trtdet.config import load_config
from trtdet.options import BuildOptions, changed
from trtdet.quantization import Cause, DataFlow
from trtdet.quantization.macs import multiply_adds

CAUSES = (Cause.DEPTHWISE, Cause.FEW_CHANNELS, Cause.HEAD_OUTPUT, Cause.NO_TIME_GAINED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path, metavar="MODEL")
    parser.add_argument("--config")
    parser.add_argument("--backend")
    parser.add_argument("--gpu", default="L4")
    arguments = parser.parse_args()
    causes = " | ".join(cause.value for cause in CAUSES)
    print(f"| model | convolutions | in INT8 | {causes} | FP16 ms | with INT8 ms |")
    print("|---" * (5 + len(CAUSES)) + "|", flush=True)
    for path in arguments.models:
        config = load_config(arguments.config or MODELS[path.stem][0])
        graph, times = replace(host_graph(path, config), flow=DataFlow(fused=True)), " | "
        plan = graph.plan
        if arguments.backend:
            backend, options = choose(arguments.backend), changed(BuildOptions(), gpu=arguments.gpu)
            graph = build_graph(path, config, options, backend)
            if decided_by_time(options, backend.capabilities, graph.flow):
                found = fastest_plan(graph, backend, options)
                assert found is not None and found.int8_ms is not None
                plan, times = found.plan, f"{found.fp16_ms:.3f} | {found.int8_ms:.3f} in {found.int8}"
        work = {name: macs.count for name, macs in multiply_adds(graph.model).items()}

        def cell(names: list[str], work: dict[str, int] = work) -> str:
            share = sum(work[name] for name in names) / sum(work.values())
            return f"{len(names)}, {share:.1%}" if names else ""

        int8 = cell(list(plan.names("int8")))
        left = [cell([name for name, entry in plan.entries.items() if entry.cause is cause]) for cause in CAUSES]
        print(f"| {path.stem} | {len(plan.entries)} | {int8} | {' | '.join(left)} | {times} |", flush=True)


if __name__ == "__main__":
    main()
