"""The fast ranking against the reference, in one run: time, the ten most sensitive, and the order of thirty.

    python benchmarks/sensitivity.py MODEL --config NAME --images DIR [--num-images 32] [--calib percentile]

Both rank every convolution without corrections on the same images, in one process, the fast one first.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from scipy.stats import spearmanr

from trtdet.backends import OnnxRunner
from trtdet.calibration import CollectionRequest, Ranges, collect, expose
from trtdet.config import load_config
from trtdet.data import ImageStream, content_hash, evenly, find_images
from trtdet.passes import Options, decoded, load_model, rewrite
from trtdet.plans.measuring import Method, RankingSubject
from trtdet.plans.ranking import rank
from trtdet.plans.scores import Sensitivity
from trtdet.quantization import Corrections, place


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--config", required=True)
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--num-images", type=int, default=32)
    parser.add_argument("--calib", default="percentile")
    parser.add_argument("--base", default="fp32", choices=("fp32", "int8"))
    options = parser.parse_args()
    config = load_config(options.config)
    images = evenly(find_images(options.images), options.num_images)
    model = rewrite(load_model(options.model), Options(config, batch=1)).model
    placement = place(model)
    runner = OnnxRunner(expose(model, placement.activations))
    stream = ImageStream(images, config.input)
    collection = collect(runner, CollectionRequest(runner.input, placement.activations), stream)
    ranges = Ranges.choose(collection, options.calib)
    subject = RankingSubject(
        model, placement, ranges, Corrections(), decoded("host", config), images, content_hash(images), config.input
    )
    results: dict[str, Sensitivity] = {}
    seconds: dict[str, float] = {}
    for name in ("fast", "reference"):
        started = time.perf_counter()
        results[name] = rank(subject, Method(name, options.base))
        seconds[name] = time.perf_counter() - started
    fast, reference = (results[name].layers for name in ("fast", "reference"))
    shared = len({layer.name for layer in fast[:10]} & {layer.name for layer in reference[:10]})
    scores = {layer.name: layer.score for layer in fast}
    first = reference[:30]
    order = float(spearmanr([layer.score for layer in first], [scores[layer.name] for layer in first]).statistic)
    total = sum(layer.score for layer in reference)
    print(f"{options.model.name}, {len(reference)} convolutions, {len(images)} images, base {options.base}")
    print(f"reference {seconds['reference']:.1f} s, fast {seconds['fast']:.1f} s", end=": ")
    print(f"{seconds['fast'] / seconds['reference']:.3f} of the time")
    print(f"shared of the top 10: {shared}; Spearman over the reference's first 30: {order:.4f}")
    print("largest difference of a score:", max(abs(scores[layer.name] - layer.score) for layer in reference))
    print(f"the first is {reference[0].name} with {reference[0].score / total:.1%} of the summed power")
    for layer in reference[:10]:
        print(f"  {layer.rank:2} {layer.name:24} power {layer.score:.5f} distance {layer.distance:.4f}")


if __name__ == "__main__":
    main()
