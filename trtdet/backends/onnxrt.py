"""onnxruntime on the CPU: the accuracy reference. It runs the float and the Q/DQ model, and makes no engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray

from trtdet.backends.base import BuildRequest, Built, Capabilities
from trtdet.errors import BackendError, one_line
from trtdet.passes import plugin_ops


class OnnxRuntime:
    """Stands in for an engine where none is wanted: what it builds is the model alone."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            name="onnxruntime",
            version=onnxruntime.__version__,
            makes_engine=False,
            lists_layers=False,
            needs_gpu=False,
            silu=("keep", "swish", "plugin"),
        )

    def unsupported(self, model: onnx.ModelProto) -> dict[str, str]:
        return {}

    def build(self, request: BuildRequest) -> Built:
        OnnxRunner(request.model)
        return Built(b"", (), (), 0.0)


def _plain(model: onnx.ModelProto | bytes) -> bytes:
    """The model with standard operators alone; what is no model is left for onnxruntime to refuse."""
    if isinstance(model, bytes):
        if plugin_ops.DOMAIN.encode() not in model:
            return model
        model = onnx.load_model_from_string(model)
    return plugin_ops.plain(model).SerializeToString()


class OnnxRunner:
    """Runs a model on the CPU; the operators of trtdet's plugin library by what they are defined to compute.

    Args:
        model: the model or its bytes.
        alone: with one thread, for a model that runs beside others.

    Raises:
        BackendError: onnxruntime cannot load the model.
    """

    def __init__(self, model: onnx.ModelProto | bytes, *, alone: bool = False) -> None:
        data = _plain(model)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        if alone:
            options.intra_op_num_threads = 1
            # A pattern is laid out anew, in fresh memory, at the second run: more than it saves where runs are few.
            options.enable_mem_pattern = False
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
        self.inputs: tuple[str, ...] = tuple(one.name for one in self._session.get_inputs())
        self.outputs: tuple[str, ...] = tuple(output.name for output in self._session.get_outputs())

    def __call__(self, images: NDArray[np.float32]) -> dict[str, NDArray[Any]]:
        """Runs one batch; one smaller than a fixed batch is filled up and the filling left out of the outputs.

        Args:
            images: float32 (B, 3, H, W), pre-processed.

        Returns:
            The outputs by name, each with B rows.
        """
        results = self.feed({self.input: self.filled(images)})
        return {name: value[: len(images)] for name, value in results.items()}

    def filled(self, images: NDArray[np.float32]) -> NDArray[np.float32]:
        """A batch that is smaller than the model's fixed one, filled up with its last image."""
        missing = 0 if self.batch is None else max(0, self.batch - len(images))
        return np.concatenate([images, np.repeat(images[-1:], missing, axis=0)]) if missing else images

    def feed(self, arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Runs a model of any inputs, given by name; whole batches only."""
        return dict(zip(self.outputs, self._session.run(None, dict(arrays)), strict=True))
