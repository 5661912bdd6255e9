"""What the corrections take, against one pass over the same images with every convolution input exposed.

    python benchmarks/correction_cost.py MODEL --config NAME --images DIR [--num-images 64] [--runs 3]

Pass and corrections alternate in one process, so that a machine whose speed drifts favours neither; the ratio is the
median of the pairs. Memory is the growth of the process's peak from half of the images to all of them.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from pathlib import Path

from trtdet.backends import OnnxRunner
from trtdet.calibration import CollectionRequest, Ranges, collect, expose
from trtdet.config import load_config
from trtdet.data import ImageStream, find_images
from trtdet.passes import Options, decoded, load_model, rewrite
from trtdet.quantization import DEFAULT_CORRECTIONS, Sources, correct, place, sense


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--config", required=True)
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--num-images", type=int, default=64)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    config = load_config(options.config)
    images = find_images(options.images)[: options.num_images]
    model = rewrite(load_model(options.model), Options(config, batch=1)).model
    placement = place(model)
    runner = OnnxRunner(expose(model, placement.activations))
    stream = ImageStream(images, config.input)
    found = collect(runner, CollectionRequest(runner.input, placement.activations), stream)
    rule = Ranges.choose(found, "percentile")

    def corrections(count: int) -> float:
        started = time.perf_counter()
        sources = Sources(images[:count], config.input, OnnxRunner, decoded("host", config))
        ranges, start = sense(model, placement, rule, sources=sources)
        correct(model, placement, {ranges.rule: ranges}, DEFAULT_CORRECTIONS, sources, start)
        return time.perf_counter() - started

    for _ in range(3):  # the allocator settles
        corrections(len(images) // 2)
    half = peak()
    pairs = []
    for _ in range(options.runs):
        started = time.perf_counter()
        for batch in ImageStream(images, config.input):
            runner(batch.images)
        bare = time.perf_counter() - started
        pairs.append((bare, corrections(len(images))))
    bare, seconds = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratio = statistics.median(corrected / plain for plain, corrected in pairs)
    print(
        f"{options.model.name}, {len(images)} images: one pass {bare:.2f} s, corrections {seconds:.2f} s, {ratio:.1f}x"
    )
    print(f"peak memory {half:.0f} MB with {len(images) // 2} images, {peak():.0f} MB with {len(images)}")


if __name__ == "__main__":
    main()
