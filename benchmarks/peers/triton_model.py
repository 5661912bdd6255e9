"""The model of ``triton_server.py``: Triton's Python backend runs this file."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

# Triton's interpreter does not look where PYTHONPATH says.
sys.path[:0] = os.environ["TRTDET_PEER_PATH"].split(os.pathsep)

import numpy as np  # noqa: E402
import triton_python_backend_utils as triton  # noqa: E402
from detections import Detections  # noqa: E402


class TritonPythonModel:
    def initialize(self, _: dict[str, str]) -> None:
        bundle, published = (os.environ[f"TRTDET_PEER_{name}"] for name in ("BUNDLE", "PUBLISHED"))
        threads = int(os.environ["TRTDET_PEER_INTRA_OP"])
        self._detect = Detections(Path(bundle), threads, Path(published) if published else None)

    def execute(self, requests: list[Any]) -> list[Any]:
        """An answer for each request's image; a string has to be an array of objects."""
        answers = []
        for request in requests:
            answer = self._detect([triton.get_input_tensor_by_name(request, "image").as_numpy().tobytes()])
            answers.append(triton.InferenceResponse([triton.Tensor("answer", np.array([answer], dtype=object))]))
        return answers
