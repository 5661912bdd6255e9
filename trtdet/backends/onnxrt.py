"""onnxruntime on the CPU: the accuracy reference. It runs the float and the Q/DQ model, and makes no engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray

from trtdet.backends.base import BuildRequest, Built, Capabilities
from trtdet.detections import EfficientNms, efficient_nms
from trtdet.errors import BackendError, one_line
from trtdet.passes.base import PLUGIN_DOMAIN
from trtdet.passes.nms import EFFICIENT
from trtdet.passes.plugin_ops import plain
from trtdet.progress import Progress, silent


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
            in_graph_nms=("onnx", "native", "efficient"),
            silu=("keep", "swish", "plugin"),
        )

    def unsupported(self, model: onnx.ModelProto) -> dict[str, str]:
        return {}

    def build(self, request: BuildRequest, progress: Progress = silent) -> Built:
        OnnxRunner(request.model)
        return Built(b"", (), (), 0.0)


class OnnxRunner:
    """Runs a model on the CPU; the operators of trtdet's plugin library by what they are defined to compute.

    Args:
        model: the model or its bytes.
        alone: with one thread, for a model that runs beside others.

    Raises:
        BackendError: onnxruntime cannot load the model.
    """

    def __init__(self, model: onnx.ModelProto | bytes, *, alone: bool = False) -> None:
        data, plugins = _runnable(model)
        options = onnxruntime.SessionOptions()
        if plugins:
            options.register_custom_ops_library(_custom_operators())
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
        self.largest_batch = self.batch
        self.ran_on = "onnxruntime (CPU)"
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


_CUSTOM_DOMAIN = "ai.onnx.contrib"
"""The only domain in which onnxruntime-extensions takes operators written in Python."""


def _runnable(model: onnx.ModelProto | bytes) -> tuple[bytes, bool]:
    """The model as onnxruntime can load it, and whether it has operators that are computed in Python."""
    # Most models have no plugins; a search of the bytes is cheaper than parsing them.
    if isinstance(model, bytes):
        if PLUGIN_DOMAIN.encode() not in model:
            return model, False
        model = onnx.load_from_string(model)
    changed = onnx.ModelProto()
    changed.CopyFrom(plain(model))
    foreign = [node for node in changed.graph.node if node.domain == PLUGIN_DOMAIN]
    for node in foreign:
        node.domain = _CUSTOM_DOMAIN
        # The extensions hand floats over as text of six digits.
        for one in [one for one in node.attribute if one.type == onnx.AttributeProto.FLOAT]:
            one.i, one.type = int(np.float32(one.f).view(np.int32)), onnx.AttributeProto.INT
            one.ClearField("f")
    if foreign:
        changed.opset_import.append(onnx.helper.make_opsetid(_CUSTOM_DOMAIN, 1))
    return changed.SerializeToString(), bool(foreign)


@cache
def _custom_operators() -> str:
    """The library with EfficientNMS_TRT, computed by its NumPy reference."""
    import onnxruntime_extensions as extensions

    kinds = extensions.PyCustomOpDef
    names = {field.name: field.type for field in fields(EfficientNms)}

    @extensions.onnx_op(  # type: ignore[untyped-decorator]
        op_type=EFFICIENT,
        inputs=[kinds.dt_float, kinds.dt_float],
        outputs=[kinds.dt_int32, kinds.dt_float, kinds.dt_float, kinds.dt_int32],
        attrs=dict.fromkeys(names, kinds.dt_int64),
    )
    def efficient(boxes: NDArray[np.float32], scores: NDArray[np.float32], **attributes: Any) -> tuple[Any, ...]:
        given: dict[str, Any] = {
            name: float(np.int32(value).view(np.float32)) if names[name] == "float" else value
            for name, value in attributes.items()
            if value is not None
        }
        found = efficient_nms(boxes, scores, EfficientNms(**given))
        return found.num_dets, found.boxes, found.scores, found.classes

    return str(extensions.get_library_path())
