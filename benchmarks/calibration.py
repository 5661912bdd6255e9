"""Calibration against onnxruntime's own entropy calibrator and against bare inference, each as a process of its own.

    python benchmarks/calibration.py MODEL --config NAME --images DIR [--num-images 64] [--runs 3]

Prints wall time and peak memory of each, the ratio pair by pair, and what twice the images add to trtdet's memory. The
three read the same images through the same pre-processing; a run of each is followed at once by a run of the others, so
that a machine whose speed drifts does not favour any of them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def bare_inference(options: argparse.Namespace) -> None:
    """The bound: decode, pre-process and run the model with all convolution inputs as outputs, and drop them."""
    from trtdet.backends import OnnxRunner
    from trtdet.calibration import expose
    from trtdet.config import load_config
    from trtdet.data import ImageStream, find_images
    from trtdet.passes import Options, load_model, rewrite
    from trtdet.quantization import place

    config = load_config(options.config)
    model = rewrite(load_model(options.model), Options(config)).model
    runner = OnnxRunner(expose(model, place(model).activations))
    for batch in ImageStream(find_images(options.images)[: options.num_images], config.input):
        runner(batch.images)


def peer(options: argparse.Namespace) -> None:
    """onnxruntime.quantization's entropy calibrator on the convolutions, as its documentation shows it."""
    from onnxruntime.quantization import CalibrationDataReader, CalibrationMethod
    from onnxruntime.quantization.calibrate import create_calibrator

    from trtdet.config import load_config
    from trtdet.data import ImageStream, find_images
    from trtdet.passes import Options, load_model, rewrite, save_model

    config = load_config(options.config)

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self, name: str) -> None:
            paths = find_images(options.images)[: options.num_images]
            self._batches = iter(ImageStream(paths, config.input))
            self._name = name

        def get_next(self) -> dict[str, object] | None:
            batch = next(self._batches, None)
            return None if batch is None else {self._name: batch.images}

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.onnx"
        model = rewrite(load_model(options.model), Options(config)).model
        save_model(model, file)
        calibrator = create_calibrator(
            file,
            op_types_to_calibrate=["Conv"],
            augmented_model_path=str(Path(folder) / "augmented.onnx"),
            calibrate_method=CalibrationMethod.Entropy,
        )
        calibrator.collect_data(Reader(model.graph.input[0].name))
        calibrator.compute_data()


def measure(command: list[str]) -> tuple[float, float]:
    """Wall seconds and peak resident megabytes of a command."""
    watcher = (
        "import json,resource,subprocess,sys,time;t=time.perf_counter();"
        "subprocess.run(sys.argv[1:],check=True,stdout=subprocess.DEVNULL,stderr=subprocess.DEVNULL);"
        "print(json.dumps([time.perf_counter()-t,resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss/1024]))"
    )
    done = subprocess.run([sys.executable, "-c", watcher, *command], check=True, capture_output=True, text=True)
    seconds, megabytes = json.loads(done.stdout)
    return seconds, megabytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--config", required=True)
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--num-images", type=int, default=64)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", choices=("bare", "peer"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        {"bare": bare_inference, "peer": peer}[options.only](options)
        return

    def itself(only: str) -> list[str]:
        shared = [str(options.model), "--config", options.config, "--images", str(options.images)]
        return [sys.executable, __file__, *shared, "--num-images", str(options.num_images), "--only", only]

    with tempfile.TemporaryDirectory() as folder:

        def trtdet(rule: str, count: int, *more: str) -> list[str]:
            place = ["-o", f"{folder}/{rule}-{count}.json", *more]
            shared = ["--config", options.config, "--images", str(options.images), "--num-images", str(count)]
            return [sys.executable, "-m", "trtdet", "calibrate", str(options.model), *shared, "--calib", rule, *place]

        commands = {
            "trtdet calibrate --calib percentile": trtdet("percentile", options.num_images),
            "trtdet calibrate --calib entropy": trtdet("entropy", options.num_images),
            "bare inference, conv inputs exposed": itself("bare"),
            "onnxruntime entropy calibrator": itself("peer"),
        }
        runs: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
        for _ in range(options.runs):
            for name, command in commands.items():
                runs[name].append(measure(command))
        last = list(commands)[-1]
        print(f"{options.model.name}, {options.num_images} images, median of {options.runs} runs, whole processes")
        for name, found in runs.items():
            seconds = statistics.median(run[0] for run in found)
            ratio = statistics.median(mine[0] / other[0] for mine, other in zip(found, runs[last], strict=True))
            peak = max(run[1] for run in found)
            print(f"{name:38} {seconds:7.2f} s  {ratio:5.2f} of the peer  peak {peak:6.0f} MB")
        first = next(iter(commands))
        twice = measure(trtdet("percentile", 2 * options.num_images))[1]
        once = max(run[1] for run in runs[first])
        print(f"{first} with {2 * options.num_images} images: peak {twice:.0f} MB, {twice - once:+.0f} MB")
        histograms = f"{folder}/percentile-{options.num_images}.npz"
        again = measure(trtdet("mse", options.num_images, "--set", f"calibration.histograms={histograms}"))[0]
        print(f"a new process that chooses another rule from the same collection: {again:.2f} s")
        rules(Path(histograms))


def rules(histograms: Path) -> None:
    """How long each rule takes on a collection that is in memory."""
    from trtdet.calibration import RULES, Collection, Ranges

    collection = Collection.load(histograms)
    for rule in RULES:
        started = time.perf_counter()
        Ranges.choose(collection, rule)
        print(f"rule {rule:10} over {len(collection.histograms)} tensors: {time.perf_counter() - started:.3f} s")


if __name__ == "__main__":
    main()
