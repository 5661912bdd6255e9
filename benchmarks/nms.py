"""Suppression four ways on a real detector: time, peak memory, and the mAP that must not differ.

    python benchmarks/nms.py MODEL.onnx --config yolox --images DIR --annotations JSON

Boxes and scores are those of the detector on real images; each row is a process of its own that runs nothing but the
suppression, in onnxruntime on the CPU or, for ``host``, in NumPy. ``4 x boxes`` has every box four times, moved by a
pixel each: memory that goes by the number of boxes shows there. Times are given as a ratio to ``host`` in the same run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from trtdet import CocoDataset, evaluate, load_config
from trtdet.backends import OnnxRunner
from trtdet.config import Config
from trtdet.data import ImageStream, evenly, find_images
from trtdet.detection.suppression import non_max_suppression
from trtdet.passes import Options, nms
from trtdet.passes.model import to_graph, to_model
from trtdet.runtime.detector import Detector

WAYS = ("host", "native", "onnx", "efficient")
IMAGES = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--config", required=True)
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--annotations", type=Path)
    parser.add_argument("--topk", type=int, nargs="+", default=[300, 1000, 3000])
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args()
    config = load_config(options.config)
    if options.job:
        measure(config, **json.loads(options.job))
        return
    paths = evenly(find_images(options.images), IMAGES)
    detector = Detector.open(options.model, config)
    found = [detector.runner(batch.images) for batch in ImageStream(paths, config.input)]
    boxes, scores = (np.concatenate([outputs[name] for outputs in found]) for name in ("boxes", "scores"))
    print(f"{options.model.name}: {boxes.shape[1]} boxes, {scores.shape[2]} classes, {len(paths)} images\n")
    print(
        "| pre_nms_topk | boxes | way | ms an image | of host | peak memory over idle, MB |\n|---|---|---|---|---|---|"
    )
    with tempfile.TemporaryDirectory() as folder:
        for times in (1, 4):
            moved = [boxes + np.float32(shift) for shift in range(times)]
            np.savez(
                Path(folder) / f"{times}.npz", boxes=np.concatenate(moved, 1), scores=np.tile(scores, (1, times, 1))
            )
        for topk in options.topk:
            for times in (1, 4):
                host = 0.0
                for way in WAYS:
                    job = json.dumps({"arrays": f"{folder}/{times}.npz", "way": way, "topk": topk})
                    command = [sys.executable, __file__, str(options.model), "--config", options.config]
                    done = subprocess.run(
                        [*command, "--images", str(options.images), "--job", job],
                        capture_output=True,
                        text=True,
                        check=True,
                    )
                    milliseconds, megabytes = json.loads(done.stdout)
                    host = host or milliseconds
                    count = times * boxes.shape[1]
                    ratio = milliseconds / host
                    print(
                        f"| {topk} | {count} | {way} | {milliseconds:.1f} | {ratio:.1f} | {megabytes:.0f} |", flush=True
                    )
    if options.annotations:
        dataset = CocoDataset.load(options.annotations, options.images, config.classes)
        print("\n| way | mAP | detections |\n|---|---|---|")
        for way in WAYS:
            result = evaluate(Detector.open(options.model, config, way), dataset).result
            print(f"| {way} | {100 * result.map:.4f} | {result.detections} |", flush=True)


def measure(config: Config, arrays: str, way: str, topk: int) -> None:
    stored = np.load(arrays)
    boxes, scores = stored["boxes"], stored["scores"]
    config = config.with_nms(pre_nms_topk=topk, max_detections=min(topk, config.nms.max_detections))
    runner = None if way == "host" else OnnxRunner(suppression(config, way, boxes.shape[1]))
    seconds = []
    idle = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew, proc(5)
    for number in range(len(boxes)):
        feed = {"in_boxes": boxes[number : number + 1], "in_scores": scores[number : number + 1]}
        started = time.perf_counter()
        if runner is None:
            non_max_suppression(feed["in_boxes"], feed["in_scores"], config.nms)
        else:
            runner.feed(feed)
        seconds.append(time.perf_counter() - started)
    print(json.dumps([1000 * float(np.median(seconds)), (resident("VmHWM") - idle) / 1024]))


def resident(key: str) -> int:
    """Memory of this process in KiB: VmRSS now, VmHWM at its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key))


def suppression(config: Config, way: str, count: int) -> onnx.ModelProto:
    """A model of the suppression alone, as it stands at the end of a detector."""
    shapes = {"boxes": (1, count, 4), "scores": (1, count, len(config.classes))}
    nodes = [helper.make_node("Identity", [f"in_{name}"], [name], name=name) for name in shapes]
    values = [helper.make_tensor_value_info(f"in_{name}", TensorProto.FLOAT, shape) for name, shape in shapes.items()]
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()]
    graph = helper.make_graph(nodes, "suppression", values, outputs)
    rewritten = to_graph(helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 13)]))
    nms.apply(rewritten, Options(config, way))
    return to_model(rewritten)


if __name__ == "__main__":
    main()
