"""Speed of ``Detector.predict`` beside the engine alone and beside Ultralytics' ``predict``, with one ONNX model.

``python benchmarks/predict.py MODEL.onnx --config yolov8 --images DIR [--ultralytics]`` runs everything in one process,
in an order that turns with each round, and prints ratios of the same round, median and range. The video has the same
images, 640 x 480.

MODEL is an export of Ultralytics with a fixed size (outputs of 4 + classes rows). YOLOv5's own export, whose weights
are published with detections that can be compared, becomes one with ``--from-yolov5``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from trtdet.config import load_config
from trtdet.data import find_images
from trtdet.data.images import preprocess, read_image
from trtdet.runtime.detector import Detector
from trtdet.tables import Column, Table

VIDEO_SIZE = (640, 480)
IOU, SCORE, MOST = 0.7, 0.25, 300

Times = dict[str, list[tuple[float, float]]]
"""Seconds by the clock and of the processor, by contender and round."""


def as_ultralytics(model: onnx.ModelProto, names: tuple[str, ...]) -> onnx.ModelProto:
    """YOLOv5's output (1, N, 5 + classes) -> (1, 4 + classes, N), with the scores of classes times the objectness."""
    graph = model.graph
    (output,) = graph.output
    rows, columns = (size.dim_value for size in output.type.tensor_type.shape.dim[1:])
    graph.initializer.append(numpy_helper.from_array(np.array([4, 1, columns - 5], np.int64), "parts"))
    graph.node.append(helper.make_node("Split", [output.name, "parts"], ["boxes", "objectness", "classes"], axis=2))
    graph.node.append(helper.make_node("Mul", ["classes", "objectness"], ["scores"]))
    graph.node.append(helper.make_node("Concat", ["boxes", "scores"], ["joined"], axis=2))
    graph.node.append(helper.make_node("Transpose", ["joined"], ["detections"], perm=[0, 2, 1]))
    graph.output.remove(output)
    graph.output.append(helper.make_tensor_value_info("detections", TensorProto.FLOAT, [1, columns - 1, rows]))
    height, width = (size.dim_value for size in graph.input[0].type.tensor_type.shape.dim[2:])
    facts = {
        "stride": "32",
        "task": "detect",
        "batch": "1",
        "imgsz": str([height, width]),
        "names": str(dict(enumerate(names))),
    }
    helper.set_model_props(model, facts)
    onnx.checker.check_model(model)
    return model


def video_of(files: Iterable[Path], place: Path) -> Path:
    """MPEG-4, 25 frames a second, each image letterboxed in black."""
    width, height = VIDEO_SIZE
    writer = cv2.VideoWriter(str(place), cv2.VideoWriter.fourcc(*"mp4v"), 25, VIDEO_SIZE)
    for file in files:
        picture = cv2.cvtColor(read_image(file), cv2.COLOR_RGB2BGR)
        ratio = min(width / picture.shape[1], height / picture.shape[0])
        picture = cv2.resize(picture, (int(picture.shape[1] * ratio), int(picture.shape[0] * ratio)))
        right, bottom = width - picture.shape[1], height - picture.shape[0]
        writer.write(cv2.copyMakeBorder(picture, 0, bottom, 0, right, cv2.BORDER_CONSTANT))
    writer.release()
    return place


def ultralytics_contenders(model: Path, sources: dict[str, Any], size: int) -> dict[str, Callable[[], list[Any]]]:
    import torch
    import torchvision
    from ultralytics import YOLO
    from ultralytics.utils.nms import TorchNMS

    try:
        torchvision.ops.nms(torch.zeros(1, 4), torch.zeros(1), 0.5)
    except (RuntimeError, NotImplementedError):  # a torchvision that does not fit torch; Ultralytics' own does the same
        torchvision.ops.nms = TorchNMS.nms
    detector = YOLO(str(model), task="detect")

    def predicting(source: Any) -> Callable[[], list[Any]]:
        def run() -> list[Any]:
            settings = {"conf": SCORE, "iou": IOU, "max_det": MOST, "imgsz": size, "device": "cpu"}
            return [
                (found.boxes.xyxy.numpy(), found.boxes.conf.numpy())
                for found in detector.predict(source, stream=True, verbose=False, **settings)
            ]

        return run

    return {f"ultralytics, {name}": predicting(source) for name, source in sources.items()}


def same(ours: list[Any], theirs: list[Any]) -> dict[str, float]:
    """How many detections have one of the other within 2 pixels and a score of 0.01."""
    matched = total = others = 0
    for (boxes, scores), (their_boxes, their_scores) in zip(ours, theirs, strict=True):
        total, others = total + len(boxes), others + len(their_boxes)
        for box, score in zip(boxes, scores, strict=True):
            near = np.abs(their_boxes - box).max(axis=1, initial=0) < 2 if len(their_boxes) else np.zeros(0, bool)
            matched += bool((near & (np.abs(their_scores - score) < 0.01)).any())
    return {"trtdet": total, "ultralytics": others, "matched": matched}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--config", default="yolov8")
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--count", type=int, default=200, help="images; those there are, repeated")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--from-yolov5", action="store_true")
    parser.add_argument("--ultralytics", action="store_true")
    parser.add_argument("-o", "--output", type=Path, help="JSON; rounds of an earlier run are kept")
    options = parser.parse_args()
    config = load_config(options.config).with_nms(iou_threshold=IOU, max_detections=MOST, candidates="best-class")
    there = find_images(options.images)
    files = [there[index % len(there)] for index in range(options.count)]
    with tempfile.TemporaryDirectory() as folder:
        model = options.model
        if options.from_yolov5:
            model = Path(folder) / "model.onnx"
            onnx.save(as_ultralytics(onnx.load(options.model), config.classes), model)
        video = video_of(files, Path(folder) / "video.mp4")
        detector = Detector.open(model, config)
        tensors = [preprocess(read_image(file), config.input)[0][None] for file in there[:32]]
        session = onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"])
        (source,) = session.get_inputs()

        def predicted(source: Any) -> list[Any]:
            found = detector.predict(source, score_threshold=SCORE, stream=True)
            return [(one.boxes, one.scores) for one in found]

        contenders: dict[str, Callable[[], Any]] = {
            "engine": lambda: [detector.runner(tensors[i % len(tensors)]) for i in range(len(files))],
            "onnxruntime session": lambda: [
                session.run(None, {source.name: tensors[i % len(tensors)]}) for i in range(len(files))
            ],
            "trtdet, images": lambda: predicted(files),
            "trtdet, video": lambda: predicted(video),
        }
        if options.ultralytics:
            paths = [str(file) for file in files]
            sources = {"images": paths, "video": str(video)}
            contenders |= ultralytics_contenders(model, sources, size=config.input.height)
        results = {name: run() for name, run in contenders.items()}  # warm-up
        times: Times = {name: [] for name in contenders}
        if options.output and options.output.exists():
            times = json.loads(options.output.read_text())["seconds"]
        for _ in range(options.rounds):
            number = len(times["engine"])
            order = list(contenders)
            order = order[number % len(order) :] + order[: number % len(order)]
            for name in order:
                begun = time.perf_counter(), time.process_time()
                contenders[name]()
                times[name].append((time.perf_counter() - begun[0], time.process_time() - begun[1]))
    report(results, times, options)


def report(results: dict[str, Any], times: Times, options: argparse.Namespace) -> None:
    for kind, title in ((0, "by the clock"), (1, "by the processor's time")):
        rows = []
        for name, both in times.items():
            mine = [pair[kind] for pair in both]
            row: list[Any] = [name, options.count / statistics.median(mine)]
            for other in ("engine", "onnxruntime session", name.replace("trtdet", "ultralytics")):
                theirs = [pair[kind] for pair in times.get(other, [])]
                ratios = sorted(that / this for this, that in zip(mine, theirs, strict=False))
                text = f"{statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})" if ratios else None
                row.append(None if other == name else text)
            rows.append(tuple(row))
        speed = Column("images/s", ".2f")
        columns = (Column(title, align="left"), speed, "of the engine", "of the session", "of ultralytics")
        print(Table(columns, rows, notes=(f"{len(times['engine'])} rounds of {options.count} images",)).text())
    agreement = {}
    for what in ("images", "video"):
        if f"ultralytics, {what}" in results:
            agreement[what] = same(results[f"trtdet, {what}"], results[f"ultralytics, {what}"])
            print(f"detections, {what}: {agreement[what]}")
    if options.output:
        options.output.write_text(json.dumps({"seconds": times, "detections": agreement}, indent=1) + "\n")


if __name__ == "__main__":
    main()
