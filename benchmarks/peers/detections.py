"""What servers in Python do with an image: OpenCV, onnxruntime and NumPy, from the file's bytes to the answer's."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from trtdet.bundle import Bundle
from trtdet.data.images import decode_image, preprocess
from trtdet.detection.heads import decode
from trtdet.detection.suppression import non_max_suppression
from trtdet.runtime.detector import Detector


def server_options(description: str | None) -> argparse.ArgumentParser:
    """The options of every server that answers with :class:`Detections`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2, help="requests that are worked on at the same time")
    parser.add_argument("--intra-op", type=int, default=1, help="threads of each run of the model; 0 for one per core")
    parser.add_argument("--published", type=Path, help="the model's own file, run as it is and decoded by NumPy")
    return parser


def files_in(body: bytes, content_type: str) -> list[bytes]:
    """The files of a request over HTTP: one, or those of a form."""
    if not content_type.startswith("multipart/form-data"):
        return [body]
    parts = body.split(b"--" + content_type.partition("boundary=")[2].encode())
    return [part.partition(b"\r\n\r\n")[2][:-2] for part in parts[1:-1]]


class Detections:
    """Answers for images: the whole way of those of a request, in the thread that calls it.

    Runs the bundle's network, or ``published``, the file that the bundle was made from, whose outputs NumPy decodes.
    """

    def __init__(self, bundle: Path, intra_op: int, published: Path | None = None) -> None:
        self._detector = Detector.open(bundle, runtime="onnxruntime")
        self._config = Bundle(bundle).config if published else None
        model = published.read_bytes() if published else self._detector.runner.model.SerializeToString()
        self._session = self._opened(model, intra_op)
        self._names = [output.name for output in self._session.get_outputs()]
        self._input = self._session.get_inputs()[0].name

    @staticmethod
    def _opened(model: bytes, intra_op: int) -> onnxruntime.InferenceSession:
        options = onnxruntime.SessionOptions()
        # As trtdet-serve runs it: Q/DQ pairs as they are written.
        options.add_session_config_entry("session.disable_quant_qdq", "1")
        options.intra_op_num_threads = intra_op
        return onnxruntime.InferenceSession(model, options, ["CPUExecutionProvider"])

    def __call__(self, files: Sequence[bytes]) -> bytes:
        """The answer for the bytes of JPEG or PNG files, which are run as one batch."""
        images = [decode_image(file) for file in files]
        inputs, placements = zip(*(preprocess(pixels, self._detector.input) for pixels in images), strict=True)
        outputs = dict(zip(self._names, self._session.run(None, {self._input: np.stack(inputs)}), strict=True))
        if self._config is None:
            found = self._detector.suppressed(outputs, self._detector.nms)
        else:
            found = non_max_suppression(*decode(outputs, self._config), self._detector.nms)
        answers = []
        for index, (pixels, placement) in enumerate(zip(images, placements, strict=True)):
            boxes, scores, classes = found.image(index)
            rows: list[dict[str, Any]] = [
                {"box": box, "score": score, "class": number, "name": self._detector.classes[number]}
                for box, score, number in zip(
                    placement.to_image(boxes).tolist(), scores.tolist(), classes.tolist(), strict=True
                )
            ]
            height, width = pixels.shape[:2]
            answers.append({"width": width, "height": height, "detections": rows})
        return json.dumps({"images": answers}).encode()
