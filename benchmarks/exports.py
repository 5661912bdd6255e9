"""Takes exports of other frameworks as they are, and compares detections with those of the file in onnxruntime.

``python benchmarks/exports.py FILE.onnx ... --images DIR`` writes a row for each file: what ``init`` recognised, how
many detections differ by more than 0.01 pixels or a score of 1e-4 on made-up pictures (in which random weights find
something), and whether ``build --int8`` for onnxruntime made a bundle.
"""

from __future__ import annotations

import argparse
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
from trtdet.errors import TrtdetError
from trtdet.evaluation.guessing import guess_config
from trtdet.exporter.trials import picture
from trtdet.options import BuildOptions, changed
from trtdet.runtime.detector import Detector

Rows = NDArray[np.float64]
"""(n, 6): x1 y1 x2 y2 in pixels of the network's input, score, class."""


def rows_of(outputs: Mapping[str, NDArray[Any]], floor: float) -> Rows:
    """The detections of the first image in the outputs of a file, as the exporters write them."""
    arrays = {name: np.asarray(array, np.float64) for name, array in outputs.items()}
    values = list(arrays.values())
    if {"dets", "labels"} <= arrays.keys():  # MMDeploy
        table = np.concatenate([arrays["dets"][0], arrays["labels"][0][:, None]], axis=1)
    elif {"labels", "boxes", "scores"} == set(arrays):  # RT-DETR, D-FINE, DEIM
        table = np.concatenate([arrays["boxes"][0], arrays["scores"][0][:, None], arrays["labels"][0][:, None]], axis=1)
    elif len(values) == 4:  # the number, boxes, scores and classes
        count = int(values[0].reshape(-1)[0])
        boxes, scores, labels = (value[0][:count] for value in values[1:])
        table = np.concatenate([boxes, scores[:, None], labels[:, None]], axis=1)
    elif values[0].ndim == 3 and values[0].shape[2] == 6:  # Ultralytics
        table = values[0][0]
    elif values[0].shape[1] == 7 and next(iter(arrays)).startswith("flat"):  # YOLO-NAS: image, box, score, class
        table = values[0][values[0][:, 0] == 0][:, 1:]
    elif values[0].shape[1] == 7:  # YOLOv7: image, box, class, score
        table = values[0][values[0][:, 0] == 0][:, [1, 2, 3, 4, 6, 5]]
    elif values[0].shape[1] == 6:  # PaddleDetection: class, score, box
        table = values[0][:, [2, 3, 4, 5, 1, 0]]
    else:
        raise ValueError(
            f"outputs { ({name: array.shape for name, array in arrays.items()}) } are read in no known way"
        )
    return _sorted(table[(table[:, 4] > floor) & (table[:, 5] >= 0)])


def _sorted(rows: Rows) -> Rows:
    return rows[np.lexsort((*np.round(rows[:, :4], 2).T[::-1], -np.round(rows[:, 4], 5), rows[:, 5]))]


def original(path: Path, image: NDArray[np.float32]) -> dict[str, NDArray[Any]]:
    """Outputs of a file in onnxruntime on one image (1, 3, H, W), in the form of its inputs."""
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
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
    return dict(zip(names, session.run(None, feeds), strict=True))


def differing(path: Path, config: Config, pictures: int = 3) -> tuple[int, int, float, float]:
    """Detections of a file, those that differ, and the largest differences of boxes in pixels and of scores."""
    detector = Detector.open(path, config)
    total, wrong, box, score = 0, 0, 0.0, 0.0
    for seed in range(pictures):
        image = picture(config.input, seed)[None]
        image = np.round(image) if config.input.scale == 1 else image
        boxes, scores, classes = detector(np.repeat(image, detector.batch, axis=0)).image(0)
        mine = _sorted(np.concatenate([boxes, scores[:, None], classes[:, None]], axis=1).astype(np.float64))
        theirs = rows_of(original(path, image), config.nms.score_threshold)
        total += len(theirs)
        if len(mine) != len(theirs):
            wrong += abs(len(mine) - len(theirs))
            continue
        gaps = np.abs(mine - theirs)
        wrong += int(((gaps[:, :4].max(axis=1) > 0.01) | (gaps[:, 4] > 1e-4) | (gaps[:, 5] > 0)).sum())
        box, score = max(box, gaps[:, :4].max(initial=0)), max(score, gaps[:, 4].max(initial=0))
    return total, wrong, box, score


def row(path: Path, images: Path | None) -> list[str]:
    """One row of the table."""
    producer = onnx.load(str(path), load_external_data=False).producer_name or "?"
    try:
        guess = guess_config(path)
    except TrtdetError as error:
        return [path.stem, producer, f"not taken: {error.problem}", "", ""]
    try:
        total, wrong, box, score = differing(path, guess.config)
        found = f"{total} detections, {wrong} differ ({box:.1e} px, {score:.1e})"
    except Exception as error:  # such as an operator that onnxruntime lacks
        found = f"not run: {str(error).splitlines()[0][:150]}"
    built = ""
    if images is not None:
        options = changed(BuildOptions(backend="onnxruntime"), precision="int8", images=images)
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
