"""Takes exports of other frameworks as they are, and compares detections with those of the file in onnxruntime.

``python benchmarks/exports.py FILE.onnx ... --images DIR`` writes a row for each file: what ``init`` recognised, how
many detections differ by more than 0.01 pixels or a score of 1e-4 on made-up pictures (in which random weights find
something), and whether ``build --int8`` for onnxruntime made a bundle.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray

from trtdet import build
from trtdet.config import Config
from trtdet.detection.plugin_nms import EfficientNms, efficient_nms
from trtdet.errors import TrtdetError
from trtdet.evaluation.guessing import guess_config
from trtdet.exporter.trials import picture
from trtdet.options import BuildOptions, changed
from trtdet.runtime.detector import Detector

Rows = NDArray[np.float64]
"""(n, 6 + 3 P): x1 y1 x2 y2 in pixels of the network's input, score, class, and x, y, score of each keypoint."""

OPEN_SIZE = (320, 320)
PLUGINS = ("EfficientNMS_TRT", "TRTBatchedNMS")
"""Of TensorRT and MMDeploy; both run as the reference of the first."""


def rows_of(outputs: Mapping[str, NDArray[Any]], config: Config) -> Rows:
    """The detections of the first image in the outputs of a file, as the exporters write them.

    Outputs without a suppression are suppressed with the thresholds of ``config``, class by class.
    """
    arrays = {name: np.asarray(array, np.float64) for name, array in outputs.items()}
    values = list(arrays.values())
    if {"dets", "labels"} <= arrays.keys() and arrays["labels"].ndim == 3:  # RF-DETR and LW-DETR: shares, logits
        height, width = config.input.size
        boxes = _corners(arrays["dets"][0]) * [width, height, width, height]
        columns = list(config.head.columns or range(arrays["labels"].shape[2]))
        scores = 1 / (1 + np.exp(-arrays["labels"][0][:, columns]))
        best = np.argsort(-scores, axis=None, kind="stable")[: config.nms.max_detections]
        rows, classes = np.unravel_index(best, scores.shape)
        table = np.concatenate([boxes[rows], scores[rows, classes][:, None], classes[:, None]], axis=1)
    elif {"dets", "keypoints"} <= arrays.keys():  # MMDeploy's poses, of one class
        boxes, points = arrays["dets"][0], arrays["keypoints"][0]
        # Where fewer rows are kept, the last cell follows them, whatever its score is.
        count = next((at for at in range(1, len(boxes)) if boxes[at, 4] > boxes[at - 1, 4]), len(boxes))
        table = np.concatenate([boxes, np.zeros((len(boxes), 1)), points.reshape(len(boxes), -1)], axis=1)[:count]
    elif {"dets", "labels"} <= arrays.keys():  # MMDeploy
        table = np.concatenate([arrays["dets"][0], arrays["labels"][0][:, None]], axis=1)
    elif "detection_boxes" in arrays:  # TensorFlow: y1 x1 y2 x2 as shares, classes from 1
        boxes = arrays["detection_boxes"][0][:, [1, 0, 3, 2]] * np.tile(config.input.size[::-1], 2)
        scores, labels = (arrays[f"detection_{name}"][0][:, None] for name in ("scores", "classes"))
        table = np.concatenate([boxes, scores, labels - 1], axis=1)[: int(arrays["num_detections"][0])]
    elif {"labels", "boxes", "scores"} == set(arrays) and arrays["boxes"].ndim == 2:  # torchvision
        labels = arrays["labels"] - (config.head.background == "first")  # of SSD
        table = np.concatenate([arrays["boxes"], arrays["scores"][:, None], labels[:, None]], axis=1)
    elif {"labels", "boxes", "scores"} == set(arrays):  # RT-DETR, D-FINE, DEIM
        table = np.concatenate([arrays["boxes"][0], arrays["scores"][0][:, None], arrays["labels"][0][:, None]], axis=1)
    elif len(values) == 4:  # the number, boxes, scores and classes
        count = int(values[0].reshape(-1)[0])
        boxes, scores, labels = (value[0][:count] for value in values[1:])
        table = np.concatenate([boxes, scores[:, None], labels[:, None]], axis=1)
    elif values[0].ndim == 3 and values[0].shape[2] == 6:  # Ultralytics
        table = values[0][0]
    elif values[0].shape[1] == 7 and "flat" in next(iter(arrays)):  # YOLO-NAS: image, box, score, class
        table = values[0][values[0][:, 0] == 0][:, 1:]
    elif values[0].shape[1] == 7:  # YOLOv7: image, box, class, score
        table = values[0][values[0][:, 0] == 0][:, [1, 2, 3, 4, 6, 5]]
    elif values[0].shape[1] == 6:  # PaddleDetection: class, score, box
        table = values[0][:, [2, 3, 4, 5, 1, 0]]
    elif len(values) == 1 and values[0].ndim == 3 and values[0].shape[1] < values[0].shape[2]:  # YOLOv8: no objectness
        rows = values[0][0].T
        return _suppressed(_corners(rows[:, :4]), rows[:, 4:], config)
    elif len(values) == 1 and config.head.keypoints is not None:  # YOLOv5-face: landmarks before the classes
        rows, first = values[0][0], 5 + 2 * len(config.head.keypoints.names)
        points = rows[:, 5:first].reshape(len(rows), -1, 2)
        points = np.pad(points, ((0, 0), (0, 0), (0, 1)), constant_values=1).reshape(len(rows), -1)
        return _suppressed(_corners(rows[:, :4]), rows[:, 4:5] * rows[:, first:], config, points)
    elif len(values) == 1 and values[0].ndim == 3:  # YOLOv5, YOLOv6, YOLOv7: centre, size, objectness, classes
        rows = values[0][0]
        return _suppressed(_corners(rows[:, :4]), rows[:, 4:5] * rows[:, 5:], config)
    elif len(values) == 2 and {array.ndim for array in values} == {3}:  # DAMO-YOLO: scores, corners
        scores, boxes = sorted((array[0] for array in values), key=lambda array: array.shape[1] == 4)
        return _suppressed(boxes, scores, config)
    else:
        raise ValueError(
            f"outputs { ({name: array.shape for name, array in arrays.items()}) } are read in no known way"
        )
    return table[(table[:, 4] > config.nms.score_threshold) & (table[:, 5] >= 0)]


def _corners(boxes: Rows) -> Rows:
    return np.concatenate([boxes[:, :2] - boxes[:, 2:] / 2, boxes[:, :2] + boxes[:, 2:] / 2], axis=1)


def _suppressed(boxes: Rows, scores: Rows, config: Config, points: Rows | None = None) -> Rows:
    """Rows by falling score, with ``points`` behind them, that no better row of their class overlaps by more than the
    threshold."""
    rows, classes = np.nonzero(scores > config.nms.score_threshold)
    order = np.argsort(-scores[rows, classes], kind="stable")[: config.nms.pre_nms_topk]
    columns = [boxes[rows], scores[rows, classes][:, None], classes[:, None].astype(np.float64)]
    table = np.concatenate([*columns, *([] if points is None else [points[rows]])], axis=1)[order]
    width = table.shape[1]
    kept: list[Rows] = []
    while len(table) and len(kept) < config.nms.max_detections:
        best, table = table[0], table[1:]
        kept.append(best)
        sides = np.minimum(best[2:4], table[:, 2:4]) - np.maximum(best[:2], table[:, :2])
        shared = np.maximum(sides, 0).prod(axis=1)
        areas = np.maximum(table[:, 2:4] - table[:, :2], 0).prod(axis=1) + np.maximum(best[2:4] - best[:2], 0).prod()
        table = table[(shared <= config.nms.iou_threshold * (areas - shared)) | (table[:, 5] != best[5])]
    return np.array(kept).reshape(-1, width)


def original(path: Path, image: NDArray[np.float32]) -> dict[str, NDArray[Any]]:
    """Outputs of a file in onnxruntime on one image (1, 3, H, W), as its inputs want it; plugins by the reference."""
    model = onnx.load(str(path))
    plugin = next((node for node in model.graph.node if node.op_type in PLUGINS), None)
    if plugin is not None:
        del model.graph.output[:]
        model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in plugin.input)
        gone = set(plugin.output)
        for node in list(model.graph.node):
            if node == plugin or not gone.isdisjoint(node.input):
                gone.update(node.output)
                model.graph.node.remove(node)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    height, width = image.shape[2:]
    sizes = {"im_shape": [[height, width]], "scale_factor": [[1, 1]], "orig_target_sizes": [[width, height]]}
    types = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(uint8)": np.uint8}
    types |= {"tensor(int64)": np.int64, "tensor(int32)": np.int32}
    feeds = {}
    for source in session.get_inputs():
        value = np.array(sizes[source.name]) if source.name in sizes else image
        if source.name not in sizes:
            last = source.shape[-1] == 3 and source.shape[-3] != 3
            value = value.transpose(0, 2, 3, 1) if last else value
            value = value if len(source.shape) == 4 else value[0]
            if len(source.shape) == 4 and isinstance(source.shape[0], int):
                value = np.repeat(value, source.shape[0], axis=0)
        feeds[source.name] = value.astype(types[source.type])
    names = [output.name for output in session.get_outputs()]
    results = session.run(None, feeds)
    if plugin is None:
        return dict(zip(names, results, strict=True))
    values = {a.name: a.ints[0] if a.ints else a.f or a.i for a in plugin.attribute if a.type != a.STRING}
    if plugin.op_type != "EfficientNMS_TRT":
        values["max_output_boxes"] = values["keep_topk"]
        found = efficient_nms(results[0].reshape(1, -1, 4), results[1], _attributes(values))
        table = np.concatenate([found.boxes, found.scores[..., None]], axis=2)[:, : int(found.num_dets[0, 0])]
        return {"dets": table, "labels": found.classes[:, : table.shape[1]]}
    found = efficient_nms(results[0], results[1], _attributes(values))
    return dict(zip(plugin.output, (found.num_dets, found.boxes, found.scores, found.classes), strict=True))


def differing(path: Path, config: Config, pictures: int = 3) -> tuple[int, int, float, float]:
    """Detections of a file, those that differ, and the largest differences of boxes in pixels and of scores."""
    detector = Detector.open(path, config)
    total, wrong, box, score = 0, 0, 0.0, 0.0
    for seed in range(pictures):
        image = picture(config.input, seed)[None]
        image = np.round(image) if image.max() > 100 else image  # whole pixels
        found = detector(np.repeat(image, detector.batch, axis=0))
        boxes, scores, classes = found.image(0)
        mine = np.concatenate([boxes, scores[:, None], classes[:, None]], axis=1).astype(np.float64)
        if found.parts.keypoints is not None:
            points = found.parts.keypoints[0, : len(mine)].reshape(len(mine), -1)
            mine = np.concatenate([mine, points], axis=1)
        outputs = original(path, image)
        if "raw_detection_boxes" in outputs:  # TensorFlow cuts boxes at the image's border behind its suppression
            mine[:, :4] = np.clip(mine[:, :4], 0, np.tile(config.input.size[::-1], 2))
        theirs = rows_of(outputs, config)
        total += len(theirs)
        wrong += max(0, len(mine) - len(theirs))
        for row in theirs:
            # Rows of equal scores stand in any order.
            gaps = np.abs(mine - row)
            fits = np.where(mine[:, 5] == row[5], gaps[:, :4].max(axis=1) + gaps[:, 4], np.inf)
            if not np.isfinite(fits.min(initial=np.inf)):
                wrong += 1
                continue
            best = int(fits.argmin())
            # Keypoints by random weights vary most with the order in which a convolution adds: by 0.014 pixels.
            wrong += bool(gaps[best, :4].max() > 0.01 or gaps[best, 4] > 1e-4 or gaps[best, 6:].max(initial=0) > 0.05)
            box, score = max(box, gaps[best, :4].max()), max(score, gaps[best, 4])
            mine = np.delete(mine, best, axis=0)
    return total, wrong, box, score


def _attributes(values: Mapping[str, Any]) -> EfficientNms:
    fields = {field.name for field in dataclasses.fields(EfficientNms)}
    return EfficientNms(**{name: value for name, value in values.items() if name in fields})


def opened(path: Path) -> tuple[int, int] | None:
    """The size for a file whose input has none, which neither its metadata nor its graph says."""
    inputs = onnx.load(str(path), load_external_data=False).graph.input
    sides = [dim.dim_value for dim in inputs[0].type.tensor_type.shape.dim]
    return None if len(sides) < 4 or any(sides[2:]) else OPEN_SIZE


def row(path: Path, images: Path | None) -> list[str]:
    """One row of the table."""
    producer = onnx.load(str(path), load_external_data=False).producer_name or "?"
    try:
        guess = guess_config(path, size=opened(path))
    except TrtdetError as error:
        return [path.stem, producer, f"not taken: {error.problem}", "", ""]
    try:
        total, wrong, box, score = differing(path, guess.config)
        found = f"{total} detections, {wrong} differ ({box:.1e} px, {score:.1e})"
    except Exception as error:  # such as an operator that onnxruntime lacks
        found = f"not run: {str(error).splitlines()[0][:150]}"
    built = ""
    if images is not None:
        options = changed(BuildOptions(backend="onnxruntime"), precision="int8", images=images, effort="none")
        try:
            with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                bundle = build(path, guess.config, Path(folder) / "bundle", options).bundle
                built = f"yes, NMS {bundle.manifest.nms.mode}"
        except TrtdetError as error:
            built = f"no: {error.problem}"
    return [path.stem, producer, guess.note, found, built]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--images", type=Path, help="calibration images; without them nothing is built")
    options = parser.parse_args()
    print("| file | written by | taken as | detections | INT8 built |\n|---|---|---|---|---|")
    for path in options.files:
        print(f"| {' | '.join(row(path, options.images))} |", flush=True)


if __name__ == "__main__":
    main()
