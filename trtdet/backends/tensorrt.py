"""TensorRT 8.6 to 11: builds for the GPU of this machine. The build itself is shared with TensorRT-RTX, whose API is
that of the modern TensorRT."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from typing import Any

import onnx

from trtdet.backends import cuda
from trtdet.backends.base import BuildRequest, Built, Capabilities
from trtdet.errors import BackendError

PIP = "pip install 'trtdet[trt]'"

_loggers: dict[str, Any] = {}


class TensorRT:
    """The installed TensorRT.

    Raises:
        BackendError: it is not installed, or the machine has no CUDA device. Its Runtime ends a process on a machine
            without one, so nothing of it is created before a device is known.
    """

    def __init__(self) -> None:
        self._trt: Any = import_or_explain("tensorrt", "TensorRT", PIP)
        found = cuda.devices()
        if not found:
            raise BackendError(
                f"TensorRT {self._trt.__version__} builds only on a machine with a CUDA device, which this one lacks; "
                "build there, or use --backend tensorrt-rtx, which needs no GPU"
            )
        self._device = found[0]

    @property
    def capabilities(self) -> Capabilities:
        major = int(self._trt.__version__.split(".")[0])
        return Capabilities(
            name="tensorrt",
            version=self._trt.__version__,
            makes_engine=True,
            needs_gpu=True,
            max_topk=3840,
            network_flags={8: ("EXPLICIT_BATCH",), 9: ("EXPLICIT_BATCH",), 10: ("STRONGLY_TYPED",)}.get(major, ()),
            precision_flags=("INT8", "FP16") if major < 10 else (),
        )

    def unsupported(self, model: onnx.ModelProto) -> dict[str, str]:
        return {}

    def build(self, request: BuildRequest) -> Built:
        if request.sms and request.sms != (self._device.sm,):
            raise BackendError(
                f"TensorRT builds for the GPU it runs on, which is compute capability {self._device.sm}, not "
                f"{' '.join(map(str, request.sms))}; leave --sm out or use --backend tensorrt-rtx"
            )
        built = build_engine(self._trt, self.capabilities, request, lambda config: None)
        return Built(built.engine, (self._device.sm,), built.log, built.seconds)


def import_or_explain(module: str, title: str, pip: str) -> Any:
    """Imports a vendor's module; a missing one is an error with its pip line."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise BackendError(f"{title} is not installed here ({error}); {pip}") from None


def build_engine(trt: Any, caps: Capabilities, request: BuildRequest, target: Callable[[Any], None]) -> Built:
    """Parses a model and builds its engine with detailed layer messages.

    Args:
        trt: the module, ``tensorrt`` or ``tensorrt_rtx``.
        caps: its row.
        request: what to build.
        target: sets the compute capabilities on the builder configuration.

    Raises:
        BackendError: the parser or the builder refused; the message holds its own words.
    """
    started = time.perf_counter()
    logger = _logger(trt)
    logger.begin()
    builder = trt.Builder(logger)
    flags = 0
    for name in caps.network_flags:
        flags |= 1 << int(getattr(trt.NetworkDefinitionCreationFlag, name))
    network = builder.create_network(flags)
    parser = trt.OnnxParser(network, logger)
    if not parser.parse(request.model.SerializeToString()):
        errors = [parser.get_error(index) for index in range(parser.num_errors)]
        first = f"node '{errors[0].node_name()}' ({errors[0].node_operator()}): {errors[0].desc()}" if errors else ""
        raise BackendError(f"{caps.name} {caps.version} cannot read the model: {_one_line(first or logger.worst())}")
    config = builder.create_builder_config()
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    for name in caps.precision_flags:
        config.set_flag(getattr(trt.BuilderFlag, name))
    target(config)
    if request.batch is not None:
        profile = builder.create_optimization_profile()
        for index in range(network.num_inputs):
            tensor = network.get_input(index)
            rest = tuple(tensor.shape)[1:]
            low, usual, high = ((size, *rest) for size in request.batch)
            profile.set_shape(tensor.name, low, usual, high)
        config.add_optimization_profile(profile)
    engine = builder.build_serialized_network(network, config)
    if engine is None:
        raise BackendError(f"{caps.name} {caps.version} cannot build the engine: {_one_line(logger.worst())}")
    return Built(bytes(engine), (), logger.messages(), time.perf_counter() - started)


def _logger(trt: Any) -> Any:
    """The one logger of this process for a module: the library keeps the first it is given."""
    if trt.__name__ not in _loggers:

        class Logger(trt.ILogger):  # type: ignore[misc]  # the base is known only at run time
            def __init__(self) -> None:
                super().__init__()
                self.begin()

            def begin(self) -> None:
                self._lines: list[str] = []
                self._errors: list[str] = []

            def log(self, severity: Any, message: str) -> None:
                self._lines.append(message)
                if severity in (trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR):
                    self._errors.append(message)

            def worst(self) -> str:
                return self._errors[0] if self._errors else "it gave no reason"

            def messages(self) -> tuple[str, ...]:
                return tuple(self._lines)

        _loggers[trt.__name__] = Logger()
    return _loggers[trt.__name__]


def _one_line(text: str) -> str:
    return " ".join(text.split())[:400]
