"""What stays in FP16 by default, and how much of the work it is.

    python benchmarks/default_plan.py [--config NAME] [--backend BACKEND] MODEL ...

MODEL is a float ONNX file; NAME is a configuration, by default the one that is known for the file's name. Without
BACKEND the plan is that of a backend whose kernels quantise what they write, such as TensorRT 8.6 and 10. Prints
Markdown.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from trtdet.backends import choose
from trtdet.building.graph import host_graph
from trtdet.config import load_config
from trtdet.quantization import Cause
from trtdet.quantization.macs import multiply_adds

CONFIGS = {"yolox_nano": "yolox", "yolov5n": "yolov5", "picodet_s": "dfl"}
CAUSES = (Cause.DEPTHWISE, Cause.FEW_CHANNELS, Cause.HEAD_OUTPUT, Cause.BOUND_BY_MEMORY)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path, metavar="MODEL")
    parser.add_argument("--config")
    parser.add_argument("--backend")
    options = parser.parse_args()
    caps = choose(options.backend).capabilities if options.backend else None
    print("| model | convolutions | in INT8 | " + " | ".join(cause.value for cause in CAUSES) + " |")
    print("|---" * (3 + len(CAUSES)) + "|", flush=True)
    for path in options.models:
        graph = host_graph(path, load_config(options.config or CONFIGS[path.stem]), caps=caps)
        work = {name: macs.count for name, macs in multiply_adds(graph.model).items()}
        entries = graph.plan.entries

        def cell(names: list[str], work: dict[str, int] = work) -> str:
            share = sum(work[name] for name in names) / sum(work.values())
            return f"{len(names)}, {share:.1%}" if names else ""

        int8 = cell([name for name, entry in entries.items() if entry.precision == "int8"])
        left = [cell([name for name, entry in entries.items() if entry.cause is cause]) for cause in CAUSES]
        print(f"| {path.stem} | {len(entries)} | {int8} | {' | '.join(left)} |", flush=True)


if __name__ == "__main__":
    main()
