"""Triton model: turns the engine's outputs into detections in pixels of the client's images.

Inputs: the engine's outputs, named ``network_NAME``, with at least n rows, and ``placement`` float64 (n, 6) of the
pre-processing. Outputs: ``num_dets`` int32 (n, 1), ``boxes`` float32 (n, K, 4), ``scores`` float32 (n, K), ``classes``
int32 (n, K); and, of a detector that has them, ``keypoints`` float32 (n, K, P, 3) and ``rotated_boxes`` float32
(n, K, 5) in pixels of the image, ``mask_coefficients`` float32 (n, K, M) and ``prototypes`` float32 (n, M, h, w). Rows
from ``num_dets`` on are zero.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from numpy.typing import NDArray

from trtdet.bundle import Bundle
from trtdet.data.images import ImageTransform
from trtdet.detection.parts import KEYPOINTS, MASK_GRIDS, PROTOTYPES, ROTATED_BOXES
from trtdet.detection.placing import place_keypoints, place_rotated
from trtdet.detection.plugin_nms import EfficientNms
from trtdet.detection.suppression import Detections, detections_of
from trtdet.errors import ModelError

_PLACED = {KEYPOINTS: place_keypoints, ROTATED_BOXES: place_rotated}
"""Maps parts to pixels of the image."""


class TritonPythonModel:
    """Triton's python backend requires this class name."""

    def initialize(self, args: dict[str, str]) -> None:
        """Reads the manifest beside this file; Triton calls it once per process."""
        manifest = Bundle(Path(args["model_repository"]) / args["model_version"], verify=False).manifest
        self._names = [part.name for part in manifest.outputs]
        self._nms = manifest.nms.thresholds if manifest.nms.mode == "host" else None
        self._logits = manifest.nms.scores == "logits"

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        placements = pb_utils.get_input_tensor_by_name(request, "placement").as_numpy()
        raw = {
            name: pb_utils.get_input_tensor_by_name(request, f"network_{name}").as_numpy()[: len(placements)]
            for name in self._names
        }
        try:
            detections = detections_of(raw, self._nms, logits=self._logits)
        except ModelError as error:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error)))
        tensors = _in_images(detections, placements)
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in tensors.items()])


def _in_images(detections: Detections, placements: NDArray[np.float64]) -> dict[str, NDArray[Any]]:
    """The outputs, with boxes, keypoints and rotated boxes in pixels of each image."""
    count, room = detections.scores.shape
    parts = {name: value for name, value in detections.parts.items().items() if name != MASK_GRIDS}
    outputs: dict[str, NDArray[Any]] = {
        "num_dets": np.zeros((count, 1), np.int32),
        "boxes": np.zeros((count, room, 4), np.float32),
        "scores": np.zeros((count, room), np.float32),
        "classes": np.zeros((count, room), np.int32),
        **{name: np.zeros_like(value) for name, value in parts.items()},
    }
    for i, (scale_x, scale_y, pad_x, pad_y, width, height) in enumerate(placements.tolist()):
        boxes, scores, classes = detections.image(i)
        # With a score threshold below 0.007, TensorRT's plugin also counts boxes below the threshold.
        real = scores > EfficientNms.EMPTY
        where = ImageTransform(
            scale_x=scale_x, scale_y=scale_y, pad_x=int(pad_x), pad_y=int(pad_y), width=int(width), height=int(height)
        )
        number = int(real.sum())
        outputs["num_dets"][i] = number
        outputs["boxes"][i, :number] = where.to_image(boxes[real])
        outputs["scores"][i, :number] = scores[real]
        outputs["classes"][i, :number] = classes[real]
        for name, value in parts.items():
            if name == PROTOTYPES:
                outputs[name][i] = value[i]
                continue
            rows = value[i, : len(scores)][real]
            outputs[name][i, :number] = _PLACED[name](rows, where) if name in _PLACED else rows
    return outputs
