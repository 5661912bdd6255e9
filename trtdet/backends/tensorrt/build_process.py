"""The process in which an engine is built. Only :mod:`trtdet.backends.tensorrt.builder` runs this script.

It is a separate process because the builder can end the one it runs in, because Ctrl-C must stop it at once, and
because the builder orders parts of an engine by their addresses: only a fresh process without address randomisation
gives the same bytes every time.

It reads ``request.json`` and ``model.onnx`` in the working directory and writes ``engine`` and ``log.txt`` there, or
``error.txt``; depending on the backend and the request also ``layers.json``, ``timing.cache`` and
``calibration.cache``. Standard output has its progress, a JSON list of stage, done and total in a line, and the
builder's messages above VERBOSE, a JSON string in a line.

With the argument ``load`` it loads the engine that lies there and does nothing else.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Tell = Callable[[str, int, int], None]
Say = Callable[[str], None]

_ADDR_NO_RANDOMIZE = 0x0040000  # sys/personality.h
_QUERY = 0xFFFFFFFF

_LETTERS = {"INTERNAL_ERROR": "F", "ERROR": "E", "WARNING": "W"}
"""Severities as TensorRT's own tools print them."""

_LOAD = "load"
_REFUSED = "refused.txt"


@dataclass
class Made:
    """The result of a build: an engine, or the reason why there is none, as the builder reported it."""

    engine: bytes = b""
    error: str = ""
    timing_cache: bytes = b""
    calibration_cache: str = ""


def main() -> None:
    fix_addresses()
    # A script's own folder comes first on the path, and there this package's tensorrt.py would hide the library.
    sys.path.pop(0)
    tell, say = channel()
    request = json.loads(Path("request.json").read_text())
    if request["plugins"] and not request["loads_plugins"]:
        # Once a creator is registered there, parsing its operator ends the process without a message.
        Path("error.txt").write_text("it takes no plugin libraries; leave them out or use --backend tensorrt")
        return
    with Path("log.txt").open("w") as log:
        trt = __import__(request["module"])
        logger = logger_of(trt, log, say)
        made = build_or_explain(trt, request, logger, tell)
        if made.error:
            Path("error.txt").write_text(made.error)
            return
        if made.timing_cache:
            Path("timing.cache").write_bytes(made.timing_cache)
        if made.calibration_cache:
            Path("calibration.cache").write_text(made.calibration_cache)
        Path("engine").write_bytes(made.engine)
        if request["options"]["embed_plugins"]:
            refused = refused_elsewhere()
            if refused:
                Path("error.txt").write_text(refused)
                return
        if request["inspect"]:
            # Last, after the engine was written: loading it can end the process.
            layers = inspect(trt, made.engine, logger, request)
            if layers:
                Path("layers.json").write_text(layers)


def refused_elsewhere() -> str:
    """Why a process that has loaded no plugin library cannot load the engine; empty where it can.

    The engine may lack the libraries that it was to carry: TensorRT documents ``setPluginsToSerialize`` for
    version-compatible engines alone (NvInfer.h, ``IBuilderConfig``). Here they are known to the whole process.
    """
    done = subprocess.run([sys.executable, __file__, _LOAD], stdin=subprocess.DEVNULL, capture_output=True, check=False)
    refused = Path(_REFUSED)
    if done.returncode == 0 and not refused.is_file():
        return ""
    words = refused.read_text() if refused.is_file() else f"it ends with exit code {done.returncode}"
    return f"the plugin libraries are not in the engine, which a process without them cannot load: {words}"


def load() -> None:
    """Loads the engine as a program does that knows of no plugin library; says in a file where that is refused."""
    sys.path.pop(0)
    request = json.loads(Path("request.json").read_text())
    with Path("load.txt").open("w") as log:
        trt = __import__(request["module"])
        logger = logger_of(trt, log)
        trt.init_libnvinfer_plugins(logger, "")
        runtime = trt.Runtime(logger)
        runtime.engine_host_code_allowed = True  # the libraries, and the runtime of a version-compatible engine
        if runtime.deserialize_cuda_engine(Path("engine").read_bytes()) is None:
            Path(_REFUSED).write_text(logger.first())


def channel() -> tuple[Tell, Say]:
    """What reports progress, and what passes messages on, both on the original standard output; everything else that is
    printed is discarded from then on."""
    stream = os.fdopen(os.dup(1), "w", buffering=1)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)
    alone = threading.Lock()  # the builder's threads speak at the same time

    def write(value: Any) -> None:
        with alone:
            stream.write(json.dumps(value) + "\n")

    def tell(stage: str, done: int, total: int) -> None:
        write([stage, done, total])

    return tell, write


def fix_addresses() -> None:
    """Starts this script again without address randomisation; continues with it where the system forbids that."""
    libc = ctypes.CDLL(None, use_errno=True)
    now = libc.personality(_QUERY)
    if now < 0 or now & _ADDR_NO_RANDOMIZE or libc.personality(now | _ADDR_NO_RANDOMIZE) < 0:
        return
    if libc.personality(_QUERY) & _ADDR_NO_RANDOMIZE:
        os.execv(sys.executable, [sys.executable, *sys.argv])


def logger_of(trt: Any, log: Any, say: Say = lambda message: None) -> Any:
    """A logger for the library: every message goes to a file, those above VERBOSE also to ``say``, and errors are kept
    for the error message."""

    class Logger(trt.ILogger):  # type: ignore[misc]  # the base is known only at run time
        def __init__(self) -> None:
            super().__init__()
            self.errors: list[str] = []
            self.messages: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            log.write(message + "\n")
            if severity != trt.ILogger.Severity.VERBOSE:
                say(f"[{_LETTERS.get(severity.name, 'I')}] {message}")
            if severity not in (trt.ILogger.Severity.INFO, trt.ILogger.Severity.VERBOSE):
                self.messages.append(message)
            if severity in (trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR):
                self.errors.append(message)
                log.flush()

        def first(self) -> str:
            return self.errors[0] if self.errors else "it gave no reason"

    return Logger()


def build_or_explain(trt: Any, request: dict[str, Any], logger: Any, tell: Tell) -> Made:
    """Builds; an error of trtdet's own calibration code becomes the reason for having no engine."""
    if not request["implicit"]:
        return build(trt, request, logger, tell)
    from trtdet.errors import TrtdetError

    try:
        return build(trt, request, logger, tell)
    except TrtdetError as error:
        return Made(error=str(error))


def build(trt: Any, request: dict[str, Any], logger: Any, tell: Tell) -> Made:
    """Builds the engine of a request."""
    try:
        builder = builder_with(trt, logger, request["plugins"], request["loads_plugins"])
    except OSError as error:
        return Made(error=f"a plugin library cannot be loaded: {error}")
    except TypeError:
        # The bindings raise it for a null pointer; the reason is among the messages.
        return Made(error=f"no builder: {logger.first()}")
    refused = register_compiled(trt) if request["compiled_plugins"] else ""
    if refused:
        return Made(error=refused)
    flags = 0
    for name in request["network_flags"]:
        flags |= 1 << int(getattr(trt.NetworkDefinitionCreationFlag, name))
    network = builder.create_network(flags)
    parser = trt.OnnxParser(network, logger)
    model = Path("model.onnx").read_bytes()
    if not parser.parse(model):
        if parser.num_errors:
            logger.errors.insert(0, words_of(parser.get_error(0), model))
        return Made(error="the parser refused the model: " + logger.first())
    config = builder.create_builder_config()
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    set_precisions(trt, network, config, request)
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
    # The cache and the monitor are held here: the configuration keeps no references to them.
    timings = timing_cache(config) if request["keep_timings"] else None
    if hasattr(trt, "IProgressMonitor"):
        monitor = progress_monitor(trt, tell)
        config.progress_monitor = monitor
    calibration = calibration_of(trt, builder, network, config, request, tell) if request["implicit"] else None
    engine = builder.build_serialized_network(network, config)
    if calibration is not None:
        calibration.check(engine is not None, logger.messages)
    if engine is None:
        return Made(error="the builder gave no engine: " + logger.first())
    learnt = bytes(config.get_timing_cache().serialize()) if timings is not None else b""
    return Made(bytes(engine), "", learnt, (calibration.written or "") if calibration is not None else "")


def words_of(error: Any, model: bytes) -> str:
    """A parser's error and the node it is about; TensorRT 8.6 gives the node's number only."""
    if hasattr(error, "node_name"):
        return f"node '{error.node_name()}' ({error.node_operator()}): {error.desc()}"
    import onnx

    nodes = onnx.load_from_string(model).graph.node
    if not 0 <= error.node() < len(nodes):
        return str(error.desc())
    node = nodes[error.node()]
    return f"node '{node.name}' ({node.op_type}): {error.desc()}"


def set_precisions(trt: Any, network: Any, config: Any, request: dict[str, Any]) -> None:
    """Gives a weakly typed network the precisions that a strongly typed one reads from its casts."""
    if not request["precisions"]:
        return
    config.set_flag(trt.BuilderFlag.OBEY_PRECISION_CONSTRAINTS)
    types = {"fp16": trt.float16, "fp32": trt.float32}
    computed = (trt.float16, trt.float32)
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        asked = request["precisions"].get(layer.name)
        if asked is None:
            continue
        # Layers that compute shapes and indices alone accept no other type; an assertion has no output. EfficientNMS
        # gives a count first and then boxes and scores.
        floats = [number for number in range(layer.num_outputs) if layer.get_output(number).dtype in computed]
        if floats:
            layer.precision = types[asked]
        if asked == "fp32":
            # The precision alone leaves the builder free to store a result in half, which boxes do not fit.
            for number in floats:
                layer.set_output_type(number, trt.float32)


def set_options(trt: Any, config: Any, request: dict[str, Any]) -> None:
    """Sets the builder's flags and options."""
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


def timing_cache(config: Any) -> Any:
    """The kernel times of earlier builds, or an empty cache where these are damaged or of another device or version;
    None where the builder takes neither."""
    for data in (Path("timings").read_bytes(), b""):
        cache = config.create_timing_cache(data)
        if cache is not None and config.set_timing_cache(cache, ignore_mismatch=False):
            return cache
    return None


def progress_monitor(trt: Any, tell: Tell) -> Any:
    """Reports the progress of all phases together; a nested phase is a part of one step of the phase around it."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]  # the base is known only at run time
        def __init__(self) -> None:
            super().__init__()
            self.phases: dict[str, list[int]] = {}
            self.told = -1

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            self.phases[phase_name] = [0, max(1, num_steps)]

        def step_complete(self, phase_name: str, step: int) -> bool:
            if phase_name in self.phases:
                self.phases[phase_name][0] = step + 1
            share, done = 1.0, 0.0
            for steps, count in self.phases.values():
                done += share * steps / count
                share /= count
            percent = min(99, int(100 * done))
            if percent > self.told:
                self.told = percent
                tell("", percent, 100)
            return True

        def phase_finish(self, phase_name: str) -> None:
            self.phases.pop(phase_name, None)

    return Monitor()


def calibration_of(trt: Any, builder: Any, network: Any, config: Any, request: dict[str, Any], tell: Tell) -> Any:
    """Gives the builder the requested calibrator.

    Raises:
        TrtdetError: the ranges or the images do not fit the network.
    """
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
        calibration = calibrators.from_cache(trt, implicit["cache"])
    else:
        images = calibrators.Images(source.name, shape, batches_of(implicit, tell), uploader())
        calibration = calibrators.from_images(trt, implicit["calibrator"], images, implicit["percentile"] / 100)
    config.int8_calibrator = calibration.calibrator
    if request["batch"]:
        # The network is calibrated at one shape, that of the images' batches.
        profile = builder.create_optimization_profile()
        profile.set_shape(source.name, shape, shape, shape)
        config.set_calibration_profile(profile)
    return calibration


def batches_of(implicit: dict[str, Any], tell: Tell) -> Iterator[Any]:
    """Batches of pre-processed images, of which memory holds one."""
    from trtdet.config import InputConfig
    from trtdet.data import ImageStream

    paths = [Path(name) for name in implicit["images"]]
    done = 0
    for batch in ImageStream(paths, InputConfig.model_validate(implicit["preprocess"]), batch_size=implicit["batch"]):
        yield batch.images
        done += len(batch)
        tell("calibrating with TensorRT's own calibrator", done, len(paths))


def uploader() -> Callable[[Any], int]:
    """Copies batches to the device, each over the one before, into memory that is kept until the process ends."""
    from trtdet.backends import cuda

    device = cuda.open_device()
    stream, memory = device.stream(), list[cuda.Buffer]()

    def upload(batch: Any) -> int:
        if not memory:
            memory.append(device.buffer(batch.nbytes))
        stream.copy_in(memory[0], batch)
        stream.wait()
        return memory[0].address

    return upload


def inspect(trt: Any, engine: bytes, logger: Any, request: dict[str, Any]) -> str:
    """The layers of the engine as its inspector lists them, JSON; empty where it cannot be loaded here."""
    runtime = trt.Runtime(logger)
    runtime.engine_host_code_allowed = True  # this process built it
    if not request["options"]["embed_plugins"]:
        # A runtime has a registry of its own, which does not know the libraries that the builder has loaded.
        for path in request["plugins"]:
            runtime.get_plugin_registry().load_library(path)
    loaded = runtime.deserialize_cuda_engine(engine)
    if loaded is None:
        return ""
    return str(loaded.create_engine_inspector().get_engine_information(trt.LayerInformationFormat.JSON))


def builder_with(trt: Any, logger: Any, plugins: list[str], takes_plugins: bool) -> Any:
    """A builder that knows the plugins of the libraries.

    The registry loads them, also in TensorRT 8.6: Python loads TensorRT with its symbols hidden, so a library that is
    opened by other means does not find the registry in which to enter its creators.

    Raises:
        OSError: a library cannot be loaded.
    """
    if takes_plugins:
        # TensorRT's own plugins, EfficientNMS among them. TensorRT-RTX must have no creators at all.
        trt.init_libnvinfer_plugins(logger, "")
    builder = trt.Builder(logger)
    for path in plugins:
        if builder.get_plugin_registry().load_library(path) is None:
            raise OSError(f"'{path}' has no plugins for TensorRT {trt.__version__}")
    return builder


def register_compiled(trt: Any) -> str:
    """Registers trtdet's plugins as kernels that the engine carries.

    Returns:
        Why that is not possible; empty where it was done.
    """
    from trtdet.backends.tensorrt import silu_aot
    from trtdet.errors import BackendError

    try:
        silu_aot.register(trt)
    except BackendError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    load() if sys.argv[1:] == [_LOAD] else main()
