"""Builds detectors of random structure with every convolution in INT8, and how far INT8 is from float.

    python benchmarks/random_networks.py -o OUT [--count N] [--first SEED]

The networks are those of ``tests/building/random_structures.py``: 4 to 40 convolutions, depthwise, grouped and strided
ones, residuals, branches, pyramids, gates, pools, resizing, transposes and nine activations, for images of 32 to 96
pixels a side. Each is built by ``trtdet.build`` for onnxruntime, calibrated on 8 images, without corrections. The
distance is that of INT8's boxes and scores from those of the float model on 4 other images, as a share of the float
values: the larger of both, each the root of the sum of squares. Rows are kept in OUT/networks.jsonl, and another run
goes on after them. Prints Markdown.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "building")]

from odd_networks import CONFIG  # noqa: E402
from random_structures import random_network  # noqa: E402

import trtdet  # noqa: E402
from trtdet.backends import OnnxRunner  # noqa: E402
from trtdet.config import Config, load_config  # noqa: E402
from trtdet.data import ImageStream, find_images  # noqa: E402
from trtdet.errors import TrtdetWarning  # noqa: E402
from trtdet.options import BuildOptions, changed  # noqa: E402
from trtdet.passes import Options, rewrite  # noqa: E402


def pictures(folder: Path, count: int, first: int) -> None:
    """Images of smooth noise with flat rectangles."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(first, first + count):
        rng = np.random.default_rng(number)
        coarse = Image.fromarray(rng.integers(0, 256, (6, 6, 3), dtype=np.uint8))
        pixels = np.array(coarse.resize((96, 96), Image.Resampling.BICUBIC))
        for _ in range(4):
            left, top = rng.integers(0, 80, 2)
            pixels[top : top + 16, left : left + 16] = rng.integers(0, 256, 3)
        Image.fromarray(pixels).save(folder / f"{number}.png")


def outputs(model: onnx.ModelProto, config: Config, images: Path) -> dict[str, NDArray[np.float32]]:
    """Boxes and scores of all images together."""
    runner = OnnxRunner(model)
    batches = [runner(batch.images) for batch in ImageStream(find_images(images), config.input)]
    return {name: np.concatenate([batch[name] for batch in batches]) for name in ("boxes", "scores")}


def distance(first: dict[str, NDArray[np.float32]], second: dict[str, NDArray[np.float32]]) -> float:
    """Distance of ``first`` from ``second`` as a share of ``second``, of boxes or scores, whichever is more."""
    return max(
        float(np.linalg.norm(first[name] - values) / max(np.linalg.norm(values), 1e-12))
        for name, values in second.items()
    )


def measured(seed: int, folder: Path) -> dict[str, object]:
    """Builds a network and compares it; ``problem`` says what failed."""
    model = random_network(seed)
    sides = [dim.dim_value for dim in model.graph.input[0].type.tensor_type.shape.dim[2:]]
    (folder / "m.yaml").write_text(CONFIG.replace("size: [16, 16]", f"size: {sides}"))
    config = load_config(str(folder / "m.yaml"))
    onnx.save(model, folder / "m.onnx")
    options = changed(
        BuildOptions(), mode="host", images=folder / "calibration", int8_all=True, effort="none", force=True
    )
    options = changed(options, backend="onnxruntime", check_input=False)
    convs = sum(node.op_type == "Conv" for node in model.graph.node)
    row: dict[str, object] = {"seed": seed, "convs": convs, "sides": sides, "problem": "", "distance": None}
    started = time.process_time()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.simplefilter("ignore", TrtdetWarning)
            bundle = trtdet.build(folder / "m.onnx", config, folder / "bundle", options).bundle
            row["int8"] = bundle.manifest.precision.int8
            expected = outputs(rewrite(model, Options(config, "host")).model, config, folder / "scored")
            row["distance"] = distance(outputs(onnx.load(bundle.model), config, folder / "scored"), expected)
        if row["int8"] != convs:
            row["problem"] = f"{row['int8']} of {convs} convolutions in INT8"
    except Exception as error:  # whatever it is, it is a fault of this network
        row["problem"] = f"{type(error).__name__}: {error}"
    row["seconds"] = round(time.process_time() - started, 3)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--first", type=int, default=0, help="seed of the first network")
    options = parser.parse_args()
    folder = options.output
    pictures(folder / "calibration", 8, 0)
    pictures(folder / "scored", 4, 100)
    journal = folder / "networks.jsonl"
    lines = journal.read_text().splitlines() if journal.is_file() else []
    rows = {row["seed"]: row for row in map(json.loads, lines)}
    seeds = range(options.first, options.first + options.count)
    with journal.open("a") as stream:
        for seed in seeds:
            if seed not in rows:
                rows[seed] = measured(seed, folder)
                print(json.dumps(rows[seed]), file=stream, flush=True)
    chosen = [rows[seed] for seed in seeds]
    distances = [row["distance"] for row in chosen if row["distance"] is not None]
    median, high, worst = np.quantile(distances, [0.5, 0.95, 1.0])
    problems = [row for row in chosen if row["problem"]]
    print("| networks | convolutions | built, all in INT8 | distance, median | 95 % | worst | s each |")
    print("|---|---|---|---|---|---|---|")
    convs, seconds = sum(row["convs"] for row in chosen), np.mean([row["seconds"] for row in chosen])
    built = len(chosen) - len(problems)
    print(f"| {len(chosen)} | {convs} | {built} | {median:.2%} | {high:.2%} | {worst:.2%} | {seconds:.2f} |")
    for row in problems:
        print(f"seed {row['seed']}: {row['problem']}", file=sys.stderr)


if __name__ == "__main__":
    main()
