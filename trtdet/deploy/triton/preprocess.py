"""Triton model: turns images into the network's input, and records their placement in it.

Input: ``image``, encoded files (n, 1) or uint8 RGB (n, H, W, 3), see the configuration. Outputs: ``network_input``
(n, 3, h, w), padded with zero images to the engine's smallest batch, and ``placement`` float64 (n, 6): scale x, scale
y, pad x, pad y, width and height of each image.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from numpy.typing import NDArray

from trtdet.bundle import Bundle
from trtdet.data.images import decode_image, preprocess
from trtdet.errors import DataError


class TritonPythonModel:
    """Triton's python backend requires this class name."""

    def initialize(self, args: dict[str, str]) -> None:
        """Reads the manifest beside this file; Triton calls it once per process."""
        config = json.loads(args["model_config"])
        manifest = Bundle(Path(args["model_repository"]) / args["model_version"], verify=False).manifest
        self._encoded = config["input"][0]["data_type"] == "TYPE_STRING"
        self._input = manifest.input.preprocess
        self._dtype = np.dtype(manifest.input.dtype)
        self._least, self._most = manifest.input.shape.min[0], manifest.input.shape.max[0]
        preprocess(np.zeros((2, 3, 3), np.uint8), self._input)  # The first call is slow.

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answers each request; a bad image fails only its own request."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        try:
            images = pb_utils.get_input_tensor_by_name(request, "image").as_numpy()
            network, placements = self._prepared(images)
        except DataError as error:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error), pb_utils.TritonError.INVALID_ARG))
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor("network_input", network), pb_utils.Tensor("placement", placements)]
        )

    def _prepared(self, images: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.float64]]:
        count = len(images)
        if not 0 < count <= self._most:
            raise DataError(f"the request has {count} images, allowed are 1 to {self._most}; send them in several")
        network = np.zeros((max(count, self._least), 3, self._input.height, self._input.width), self._dtype)
        placements = np.zeros((count, 6), np.float64)
        for i, image in enumerate(images):
            try:
                pixels = decode_image(image.reshape(-1)[0]) if self._encoded else image
                network[i], where = preprocess(pixels, self._input)
            except DataError as error:
                raise DataError(f"image {i + 1} of {count}: {error}") from None
            placements[i] = where.scale_x, where.scale_y, where.pad_x, where.pad_y, where.width, where.height
        return network, placements
