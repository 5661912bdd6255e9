"""onnxruntime on the CPU: the accuracy reference. It runs the float and the Q/DQ model, and makes no engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray

from trtdet.backends.base import BuildRequest, Built, Capabilities
from trtdet.errors import BackendError, one_line


class OnnxRuntime:
    """Stands in for an engine where none is wanted: what it builds is the model alone."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            name="onnxruntime", version=onnxruntime.__version__, makes_engine=False, lists_layers=False, needs_gpu=False
        )

    def unsupported(self, model: onnx.ModelProto) -> dict[str, str]:
        return {}

    def build(self, request: BuildRequest) -> Built:
        OnnxRunner(request.model)
        return Built(b"", (), (), 0.0)


class OnnxRunner:
    """Runs a model on the CPU.

    Args:
        model: the model or its bytes.

    Raises:
        BackendError: onnxruntime cannot load the model.
    """

    def __init__(self, model: onnx.ModelProto | bytes) -> None:
        data = model if isinstance(model, bytes) else model.SerializeToString()
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        # Threads that wait by spinning take the cores that decode, count and suppress meanwhile.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        # Q/DQ is computed as it is written: fused into integer kernels it saturates at 16 bits on CPUs without VNNI.
        options.add_session_config_entry("session.disable_quant_qdq", "1")
        try:
            self._session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime raises a class of its own for each status, with no common base
            raise BackendError(
                f"onnxruntime {onnxruntime.__version__} cannot load the model: {one_line(error)}"
            ) from None
        source = self._session.get_inputs()[0]
        self.input: str = source.name
        self.batch: int | None = source.shape[0] if isinstance(source.shape[0], int) else None
        """The model's fixed batch, None where it is dynamic."""
        self.outputs: tuple[str, ...] = tuple(output.name for output in self._session.get_outputs())

    def __call__(self, images: NDArray[np.float32]) -> dict[str, NDArray[Any]]:
        """Runs one batch; one smaller than a fixed batch is filled up and the filling left out of the outputs.

        Args:
            images: float32 (B, 3, H, W), pre-processed.

        Returns:
            The outputs by name, each with B rows.
        """
        count = len(images)
        if self.batch is not None and count < self.batch:
            images = np.concatenate([images, np.repeat(images[-1:], self.batch - count, axis=0)])
        results = self._session.run(None, {self.input: images})
        return {name: value[:count] for name, value in zip(self.outputs, results, strict=True)}
