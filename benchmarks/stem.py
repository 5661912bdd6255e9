"""What a Focus stem costs: a network with its slices, and with one convolution of stride 2 in their place.

    python benchmarks/stem.py MODEL ... [--rounds 60]

MODEL is an ONNX file with its configuration, NAME.yaml, beside it or in benchmarks/detectors. Both networks run in
turns in onnxruntime, one thread. Prints Markdown: the medians, that of the ratio of each round, and the largest
difference of a box and of a score on noise.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np

from trtdet import passes
from trtdet.backends import OnnxRunner
from trtdet.config import load_config
from trtdet.passes import Options, load_model, rewrite, stem

CONFIGS = Path(__file__).parent / "detectors"


def row(path: Path, rounds: int) -> str:
    """The line of a model."""
    beside = path.with_suffix(".yaml")
    config = load_config(str(beside if beside.is_file() else CONFIGS / beside.name))
    model = load_model(path)
    joined = rewrite(model, Options(config)).model
    every = passes.PASSES
    passes.PASSES = tuple(one for one in every if one is not stem)
    sliced = rewrite(model, Options(config)).model
    passes.PASSES = every
    runners = [OnnxRunner(network, alone=True) for network in (sliced, joined)]
    top = 255 if config.input.scale == 1 else 1
    image = np.random.default_rng(0).uniform(0, top, (1, 3, *config.input.size)).astype(np.float32)
    before, after = (dict(runner(image)) for runner in runners)
    times = np.zeros((rounds, 2))
    for times_of_round in times:
        for number, runner in enumerate(runners):
            began = time.perf_counter()
            runner(image)
            times_of_round[number] = 1e3 * (time.perf_counter() - began)
    gaps = [float(np.abs(before[name] - after[name]).max()) for name in ("boxes", "scores")]
    medians = " | ".join(f"{value:.1f}" for value in np.median(times, axis=0))
    return f"| {path.stem} | {medians} | {np.median(times[:, 1] / times[:, 0]):.3f} | {gaps[0]:.1e} | {gaps[1]:.1e} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path, help="ONNX files")
    parser.add_argument("--rounds", type=int, default=60)
    options = parser.parse_args()
    print(f"| model | slices, ms | one convolution, ms | ratio | boxes, px | scores |\n|{'---|' * 6}")
    for path in options.models:
        print(row(path, options.rounds), flush=True)


if __name__ == "__main__":
    main()
