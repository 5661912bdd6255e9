"""What rewrites of a network save: a Focus stem and pyramid pooling, as they are and as trtdet writes them.

    python benchmarks/rewrites.py MODEL ... [--rounds 60]

MODEL is an ONNX file with its configuration, NAME.yaml, beside it or in benchmarks/detectors. All networks run in turns
in onnxruntime, one thread. Prints Markdown: the medians of the times, that of the ratio of each round, and the largest
difference of a box and of a score on noise.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType

import numpy as np

from trtdet import passes
from trtdet.backends import OnnxRunner
from trtdet.config import load_config
from trtdet.passes import Options, load_model, pooling, rewrite, stem

CONFIGS = Path(__file__).parent / "detectors"


LEFT_OUT: Mapping[str, tuple[ModuleType, ...]] = {
    "none": (stem, pooling),
    "Focus stem": (pooling,),
    "pooling": (stem,),
    "both": (),
}
"""What is rewritten, and the passes that are left out for it."""


def rows(path: Path, rounds: int) -> Iterator[str]:
    """The lines of a model."""
    beside = path.with_suffix(".yaml")
    config = load_config(str(beside if beside.is_file() else CONFIGS / beside.name))
    model, every = load_model(path), passes.PASSES
    runners = []
    for left_out in LEFT_OUT.values():
        passes.PASSES = tuple(one for one in every if one not in left_out)
        runners.append(OnnxRunner(rewrite(model, Options(config)).model, alone=True))
    passes.PASSES = every
    top = 255 if config.input.scale == 1 else 1
    image = np.random.default_rng(0).uniform(0, top, (1, 3, *config.input.size)).astype(np.float32)
    found = [dict(runner(image)) for runner in runners]
    times = np.zeros((rounds, len(runners)))
    for times_of_round in times:
        for number, runner in enumerate(runners):
            began = time.perf_counter()
            runner(image)
            times_of_round[number] = 1e3 * (time.perf_counter() - began)
    for number, name in list(enumerate(LEFT_OUT))[1:]:
        medians = " | ".join(f"{value:.1f}" for value in np.median(times[:, [0, number]], axis=0))
        ratio = np.median(times[:, number] / times[:, 0])
        gaps = [float(np.abs(found[0][key] - found[number][key]).max()) for key in ("boxes", "scores")]
        yield f"| {path.stem} | {name} | {medians} | {ratio:.3f} | {gaps[0]:.1e} | {gaps[1]:.1e} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path, help="ONNX files")
    parser.add_argument("--rounds", type=int, default=60)
    options = parser.parse_args()
    print(f"| model | rewritten | before, ms | after, ms | ratio | boxes, px | scores |\n|{'---|' * 7}")
    for path in options.models:
        for row in rows(path, options.rounds):
            print(row, flush=True)


if __name__ == "__main__":
    main()
