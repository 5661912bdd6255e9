"""A python model in the place of an engine: the same tensors, by onnxruntime. Prints how many reach it at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils

from trtdet.backends import OnnxRunner


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        folder = Path(args["model_repository"]) / args["model_version"]
        self._runner = OnnxRunner((folder / "model.onnx").read_bytes())

    def execute(self, requests: list[Any]) -> list[Any]:
        batches = [pb_utils.get_input_tensor_by_name(one, self._runner.input).as_numpy() for one in requests]
        print("TOGETHER", sum(map(len, batches)), flush=True)
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in self._runner(batch).items()])
            for batch in batches
        ]
