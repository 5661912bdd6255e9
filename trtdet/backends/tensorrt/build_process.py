"""Builds an engine in its own process. Only :mod:`trtdet.backends.tensorrt.builder` runs this script.

The builder can end its process, and Ctrl-C must stop it at once. It also orders parts of an engine by their addresses,
so identical bytes need a process without address randomisation, and a thread, whose heap (an arena of glibc's malloc)
has none of the interpreter's free blocks: those vary with the length of a path.

The script reads ``request.json`` and ``model.onnx`` in the working directory and writes ``engine`` and ``log.txt``, or
``error.txt``; depending on the request also ``layers.json``, ``timing.cache`` and ``calibration.cache``. Each line of
standard output is JSON: a progress list [stage, done, total], or a string with a builder message above VERBOSE.

With the argument ``load`` it only loads the engine in the working directory.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

Report = Callable[[Any], None]
"""Writes a line of JSON to the standard output: [stage, done, total] or a message."""

_PR_SET_PDEATHSIG = 1  # sys/prctl.h
_ADDR_NO_RANDOMIZE = 0x0040000  # sys/personality.h
_QUERY = 0xFFFFFFFF

_LETTERS = {"INTERNAL_ERROR": "F", "ERROR": "E", "WARNING": "W"}
"""Severities as TensorRT's own tools print them."""

_LOAD = "load"
_REFUSED = "refused.txt"


class RefusedError(Exception):
    """There is no engine; the message is the builder's reason."""


def end_with(parent: int) -> None:
    """Ends this process when its parent is killed, which cannot end it itself then (prctl(2))."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit("the process that wanted the engine has ended")


def main() -> None:
    end_with(json.loads(Path("request.json").read_text())["parent"])
    # Restart without address randomisation; if the system forbids that, continue with it.
    libc = ctypes.CDLL(None, use_errno=True)
    persona = libc.personality(_QUERY)
    randomised = persona >= 0 and not persona & _ADDR_NO_RANDOMIZE
    if randomised and libc.personality(persona | _ADDR_NO_RANDOMIZE) >= 0 and libc.personality(_QUERY) != persona:
        os.execv(sys.executable, [sys.executable, *sys.argv])
    # A script's own folder comes first on the path, where modules of this package could hide installed ones.
    sys.path.pop(0)
    report = channel()
    request = json.loads(Path("request.json").read_text())
    refusals: tuple[type[Exception], ...] = (RefusedError,)
    if request["implicit"] or request["compiled_plugins"]:
        from trtdet.errors import TrtdetError

        refusals = (RefusedError, TrtdetError)
    try:
        if request["plugins"] and not request["loads_plugins"]:
            # If a creator is registered in TensorRT-RTX, parsing its operator ends the process without a message.
            raise RefusedError("it takes no plugin libraries; leave them out or use --backend tensorrt")
        with Path("log.txt").open("w") as log:
            trt = __import__(request["module"])
            logger = logger_of(trt, log, report)
            files = build(trt, request, logger, report=report)
            for name, data in files.items():
                Path(name).write_bytes(data)
            if request["options"]["embed_plugins"]:
                check_embedded()
            if request["inspect"]:
                # Loading the engine can end the process, so this comes after the engine is written.
                layers = inspect(trt, files["engine"], logger, request=request)
                if layers:
                    Path("layers.json").write_text(layers)
    except refusals as error:
        Path("error.txt").write_text(str(error))


def check_embedded() -> None:
    """Refuses an engine that cannot be loaded in a process without its plugin libraries.

    TensorRT documents ``setPluginsToSerialize`` only for version-compatible engines (NvInfer.h, ``IBuilderConfig``), so
    other engines may lack the libraries. In this process the libraries are already loaded.
    """
    process = subprocess.run(
        [sys.executable, __file__, _LOAD], stdin=subprocess.DEVNULL, capture_output=True, check=False
    )
    refusal = Path(_REFUSED)
    if process.returncode != 0 or refusal.is_file():
        reason = refusal.read_text() if refusal.is_file() else f"it ends with exit code {process.returncode}"
        raise RefusedError(
            f"the plugin libraries are not in the engine, which a process without them cannot load: {reason}"
        )


def load() -> None:
    """Loads the engine without plugin libraries, as another program would; writes a refusal to a file."""
    sys.path.pop(0)
    request = json.loads(Path("request.json").read_text())
    with Path("load.txt").open("w") as log:
        trt = __import__(request["module"])
        logger = logger_of(trt, log)
        trt.init_libnvinfer_plugins(logger, "")
        runtime = trt.Runtime(logger)
        runtime.engine_host_code_allowed = True  # for the libraries and the runtime of a version-compatible engine
        if runtime.deserialize_cuda_engine(Path("engine").read_bytes()) is None:
            Path(_REFUSED).write_text(logger.first())


def channel() -> Report:
    """Reports on the original standard output; all other output is discarded from then on."""
    stream = os.fdopen(os.dup(1), "w", buffering=1)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)
    lock = threading.Lock()  # the builder's threads report at the same time

    def report(value: Any) -> None:
        with lock:
            stream.write(json.dumps(value) + "\n")

    return report


def logger_of(trt: Any, log: Any, report: Report = lambda message: None) -> Any:
    """A logger that writes every message to ``log``, reports those above VERBOSE and keeps errors."""

    class Logger(trt.ILogger):  # type: ignore[misc]  # the base is known only at run time
        def __init__(self) -> None:
            super().__init__()
            self.errors: list[str] = []
            self.messages: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            log.write(message + "\n")
            if severity != trt.ILogger.Severity.VERBOSE:
                report(f"[{_LETTERS.get(severity.name, 'I')}] {message}")
            if severity not in (trt.ILogger.Severity.INFO, trt.ILogger.Severity.VERBOSE):
                self.messages.append(message)
            if severity in (trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR):
                self.errors.append(message)
                log.flush()

        def first(self) -> str:
            return self.errors[0] if self.errors else "it gave no reason"

    return Logger()


def build(trt: Any, request: dict[str, Any], logger: Any, report: Report) -> dict[str, bytes]:
    """Builds ``engine``, and ``timing.cache`` and ``calibration.cache`` if there are any.

    Raises:
        RefusedError: there is no builder, or the parser or the builder refused.
        TrtdetError: the ranges, the calibration images or the compiled plugins do not fit.
    """
    builder = builder_with(trt, logger, request["plugins"], takes_plugins=request["loads_plugins"])
    if request["compiled_plugins"]:
        from trtdet.backends.tensorrt import silu_aot

        silu_aot.register(trt)
    flags = 0
    for name in request["network_flags"]:
        flags |= 1 << int(getattr(trt.NetworkDefinitionCreationFlag, name))
    network = builder.create_network(flags)
    parser = trt.OnnxParser(network, logger)
    model = Path("model.onnx").read_bytes()
    if not parser.parse(model):
        reason = parser_error(parser.get_error(0), model) if parser.num_errors else logger.first()
        raise RefusedError(f"the parser refused the model: {reason}")
    config = builder.create_builder_config()
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    set_precisions(trt, network, config, request=request)
    if request["sms"]:
        config.num_compute_capabilities = len(request["sms"])
        for index, sm in enumerate(request["sms"]):
            config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{sm}"), index)
    if request["batch"]:
        profile = builder.create_optimization_profile()
        for index in range(network.num_inputs):
            tensor = network.get_input(index)
            rest = tuple(tensor.shape)[1:]
            profile.set_shape(tensor.name, *((size, *rest) for size in request["batch"]))
        config.add_optimization_profile(profile)
    set_options(trt, config, request)
    if request["options"]["dla"] is not None:
        report(set_devices(trt, builder, network, config=config, core=request["options"]["dla"]))
    # The configuration keeps no references to the cache and the monitor, so these variables do.
    timings = timing_cache(config) if request["keep_timings"] else None
    if hasattr(trt, "IProgressMonitor"):
        monitor = progress_monitor(trt, report)
        config.progress_monitor = monitor
    calibration = None
    if request["implicit"]:
        calibration = calibration_of(trt, builder, network, config=config, request=request, report=report)
    engine = builder.build_serialized_network(network, config)
    if calibration is not None:
        calibration.check(engine is not None, logger.messages)
    if engine is None:
        raise RefusedError(f"the builder gave no engine: {logger.first()}")
    files = {"engine": bytes(engine)}
    if timings is not None:
        files["timing.cache"] = bytes(config.get_timing_cache().serialize())
    if calibration is not None:
        files["calibration.cache"] = (calibration.written or "").encode()
    return files


def parser_error(error: Any, model: bytes) -> str:
    """A parser's error and its node; TensorRT 8.6 gives only the node's index."""
    if hasattr(error, "node_name"):
        return f"node '{error.node_name()}' ({error.node_operator()}): {error.desc()}"
    import onnx

    nodes = onnx.load_from_string(model).graph.node
    if not 0 <= error.node() < len(nodes):
        return str(error.desc())
    node = nodes[error.node()]
    return f"node '{node.name}' ({node.op_type}): {error.desc()}"


def set_precisions(trt: Any, network: Any, config: Any, request: dict[str, Any]) -> None:
    """Sets the precisions of a weakly typed network, which a strongly typed one reads from its casts."""
    if not request["precisions"]:
        return
    config.set_flag(trt.BuilderFlag.OBEY_PRECISION_CONSTRAINTS)
    types = {"fp16": trt.float16, "fp32": trt.float32}
    computed = (trt.float16, trt.float32)
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        precision = request["precisions"].get(layer.name)
        if precision is None:
            continue
        # Layers that only compute shapes and indices accept no other type, and an assertion has no output. The first
        # output of EfficientNMS is a count.
        floats = [number for number in range(layer.num_outputs) if layer.get_output(number).dtype in computed]
        if floats:
            layer.precision = types[precision]
        if precision == "fp32":
            # Otherwise the builder could store the result in FP16, which boxes do not fit.
            for number in floats:
                layer.set_output_type(number, trt.float32)


def set_options(trt: Any, config: Any, request: dict[str, Any]) -> None:
    options = request["options"]
    for name in request["builder_flags"]:
        config.set_flag(getattr(trt.BuilderFlag, name))
    for name in request["preview_features"]:
        config.set_preview_feature(getattr(trt.PreviewFeature, name), True)
    if options["workspace"] is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, options["workspace"])
    if options["version_compatible"]:
        config.set_flag(trt.BuilderFlag.VERSION_COMPATIBLE)
    if options["hardware_compatible"]:
        config.hardware_compatibility_level = trt.HardwareCompatibilityLevel.AMPERE_PLUS
    if options["embed_plugins"]:
        config.plugins_to_serialize = request["plugins"]
    if not options["tf32"]:
        config.clear_flag(trt.BuilderFlag.TF32)
    if options["tactic_sources"] is not None:
        sources = [getattr(trt.TacticSource, name) for name in options["tactic_sources"]]
        config.set_tactic_sources(sum(1 << int(source) for source in sources))


def set_devices(trt: Any, builder: Any, network: Any, config: Any, core: int) -> str:
    """Places every layer that the DLA takes on a core of it, the others on the GPU; returns a message about them.

    Raises:
        RefusedError: the machine has no such core.
    """
    cores = builder.num_DLA_cores
    if core >= cores:
        has = f"{cores} DLA cores, numbered from 0" if cores else "no DLA"
        raise RefusedError(f"this machine has {has}, so engine.dla={core} is not possible; leave it out")
    config.default_device_type = trt.DeviceType.DLA
    config.DLA_core = core
    config.set_flag(trt.BuilderFlag.GPU_FALLBACK)
    layers = [network.get_layer(index) for index in range(network.num_layers)]
    others = [layer for layer in layers if not config.can_run_on_DLA(layer)]
    for layer in others:
        config.set_device_type(layer, trt.DeviceType.GPU)
    names = ", ".join(layer.name for layer in others) or "none"
    return f"[I] {len(layers) - len(others)} of {len(layers)} layers on DLA core {core}; on the GPU: {names}"


def timing_cache(config: Any) -> Any:
    """The kernel times of earlier builds; an empty cache if they do not fit this build, None if neither is accepted."""
    for data in (Path("timings").read_bytes(), b""):
        cache = config.create_timing_cache(data)
        if cache is not None and config.set_timing_cache(cache, ignore_mismatch=False):
            return cache
    return None


def progress_monitor(trt: Any, report: Report) -> Any:
    """Reports the total progress; a nested phase is part of one step of its parent phase."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]  # the base is known only at run time
        def __init__(self) -> None:
            super().__init__()
            self.phases: dict[str, list[int]] = {}
            self.reported = -1

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            self.phases[phase_name] = [0, max(1, num_steps)]

        def step_complete(self, phase_name: str, step: int) -> bool:
            if phase_name in self.phases:
                self.phases[phase_name][0] = step + 1
            share, progress = 1.0, 0.0
            for steps, count in self.phases.values():
                progress += share * steps / count
                share /= count
            percent = min(99, int(100 * progress))
            if percent > self.reported:
                self.reported = percent
                report(["", percent, 100])
            return True

        def phase_finish(self, phase_name: str) -> None:
            self.phases.pop(phase_name, None)

    return Monitor()


def calibration_of(trt: Any, builder: Any, network: Any, config: Any, request: dict[str, Any], report: Report) -> Any:
    """Gives the builder the requested calibrator; raises TrtdetError if the ranges or images do not fit the network."""
    from trtdet.backends.tensorrt import calibrators
    from trtdet.calibration import cache

    implicit, source = request["implicit"], network.get_input(0)
    shape = (implicit["batch"], *tuple(source.shape)[1:])
    if implicit["calibrator"] == "cache":
        names = [network.get_input(index).name for index in range(network.num_inputs)]
        for index in range(network.num_layers):
            layer = network.get_layer(index)
            names += [layer.get_output(number).name for number in range(layer.num_outputs)]
        cache.matched(cache.read(implicit["cache"]), names, (), "the ranges")
        calibration: Any = calibrators.CacheCalibration(trt, implicit["cache"])
    else:
        from trtdet.backends import cuda
        from trtdet.config import InputConfig
        from trtdet.data import ImageStream

        def batches() -> Iterator[Any]:
            preprocess, images = InputConfig.model_validate(implicit["preprocess"]), 0
            paths = [Path(name) for name in implicit["images"]]
            for batch in ImageStream(paths, preprocess, batch_size=implicit["batch"]):
                yield batch.images
                images += len(batch)
                report(["calibrating with TensorRT's own calibrator", images, len(paths)])

        device = cuda.open_device()
        stream, memory = device.stream(), list[cuda.Buffer]()

        def upload(batch: Any) -> int:
            # Every batch uses the same memory, which is kept until the process ends.
            if not memory:
                memory.append(device.buffer(batch.nbytes))
            stream.copy_in(memory[0], batch)
            stream.wait()
            return memory[0].address

        images = calibrators.Images(source.name, shape, batches(), upload)
        quantile = implicit["percentile"] / 100
        calibration = calibrators.ImageCalibration(trt, implicit["calibrator"], images, quantile)
    config.int8_calibrator = calibration.calibrator
    if request["batch"]:
        # Calibration uses a single shape, that of the image batches.
        profile = builder.create_optimization_profile()
        profile.set_shape(source.name, shape, shape, shape)
        config.set_calibration_profile(profile)
    return calibration


def inspect(trt: Any, engine: bytes, logger: Any, request: dict[str, Any]) -> str:
    """The engine's layers from its inspector, JSON; empty if the engine cannot be loaded here."""
    runtime = trt.Runtime(logger)
    runtime.engine_host_code_allowed = True  # this process built it
    if request["options"]["dla"] is not None:
        runtime.DLA_core = request["options"]["dla"]
    if not request["options"]["embed_plugins"]:
        # A runtime has its own registry, without the libraries that the builder has loaded.
        for path in request["plugins"]:
            runtime.get_plugin_registry().load_library(path)
    loaded = runtime.deserialize_cuda_engine(engine)
    if loaded is None:
        return ""
    return str(loaded.create_engine_inspector().get_engine_information(trt.LayerInformationFormat.JSON))


def builder_with(trt: Any, logger: Any, plugins: list[str], takes_plugins: bool) -> Any:
    """A builder with the plugins of the libraries.

    The registry must load the libraries, also in TensorRT 8.6. Python loads TensorRT with hidden symbols, so a library
    opened in another way does not find the registry for its creators.
    """
    if takes_plugins:
        # This registers TensorRT's own plugins, such as EfficientNMS. TensorRT-RTX must have no creators at all.
        trt.init_libnvinfer_plugins(logger, "")
    try:
        builder = trt.Builder(logger)
    except TypeError:
        # The bindings raise it for a null pointer; the reason is in the messages.
        raise RefusedError(f"no builder: {logger.first()}") from None
    for path in plugins:
        if builder.get_plugin_registry().load_library(path) is None:
            raise RefusedError(
                f"a plugin library cannot be loaded: '{path}' has no plugins for TensorRT {trt.__version__}"
            )
    return builder


if __name__ == "__main__":
    with ThreadPoolExecutor(1) as thread:
        thread.submit(load if sys.argv[1:] == [_LOAD] else main).result()
