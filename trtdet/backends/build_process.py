"""The process in which an engine is built. It is run as a script, by :mod:`trtdet.backends.tensorrt` alone.

A process of its own, because the builder can end the one it runs in, because Ctrl-C must stop it at once, and because
it orders parts of an engine by their addresses: only a fresh process without address randomisation gives the same
bytes every time.

It reads ``request.json`` and ``model.onnx`` in the working directory and leaves ``engine`` and ``log.txt`` there, or
``error.txt``.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from pathlib import Path
from typing import Any

_ADDR_NO_RANDOMIZE = 0x0040000  # sys/personality.h
_QUERY = 0xFFFFFFFF


def main() -> None:
    fix_addresses()
    # A script's own folder comes first on the path, and there this package's tensorrt.py would hide the library.
    sys.path.pop(0)
    request = json.loads(Path("request.json").read_text())
    if request["plugins"] and not request["plugin_loading"]:
        # Once a creator is registered there, parsing its operator ends the process with no word.
        Path("error.txt").write_text("it takes no plugin libraries; leave them out or use --backend tensorrt")
        return
    with Path("log.txt").open("w") as log:
        engine, error = build(__import__(request["module"]), request, log)
    if error:
        Path("error.txt").write_text(error)
    else:
        Path("engine").write_bytes(engine)


def fix_addresses() -> None:
    """Starts this script again with address randomisation off; where the system forbids that, goes on as it is."""
    libc = ctypes.CDLL(None, use_errno=True)
    now = libc.personality(_QUERY)
    if now < 0 or now & _ADDR_NO_RANDOMIZE or libc.personality(now | _ADDR_NO_RANDOMIZE) < 0:
        return
    if libc.personality(_QUERY) & _ADDR_NO_RANDOMIZE:
        os.execv(sys.executable, [sys.executable, *sys.argv])


def build(trt: Any, request: dict[str, Any], log: Any) -> tuple[bytes, str]:
    """The engine, or an empty one and the reason in the builder's own words."""
    errors: list[str] = []

    class Logger(trt.ILogger):  # type: ignore[misc]  # the base is known only at run time
        def __init__(self) -> None:
            super().__init__()

        def log(self, severity: Any, message: str) -> None:
            log.write(message + "\n")
            if severity in (trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR):
                errors.append(message)
                log.flush()

    logger = Logger()
    try:
        builder = builder_with(trt, logger, request["plugins"], request["plugin_loading"])
    except OSError as error:
        return b"", f"a plugin library cannot be loaded: {error}"
    refused = register_compiled(trt) if request["compiled_plugins"] else ""
    if refused:
        return b"", refused
    flags = 0
    for name in request["network_flags"]:
        flags |= 1 << int(getattr(trt.NetworkDefinitionCreationFlag, name))
    network = builder.create_network(flags)
    parser = trt.OnnxParser(network, logger)
    if not parser.parse(Path("model.onnx").read_bytes()):
        found = [parser.get_error(index) for index in range(parser.num_errors)]
        if found:
            errors.insert(0, f"node '{found[0].node_name()}' ({found[0].node_operator()}): {found[0].desc()}")
        return b"", "the parser refused the model: " + (errors[0] if errors else "it gave no reason")
    config = builder.create_builder_config()
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    for name in request["precision_flags"]:
        config.set_flag(getattr(trt.BuilderFlag, name))
    if request["precisions"]:
        # A strongly typed network reads this from its casts; a weakly typed one takes them as a hint.
        config.set_flag(trt.BuilderFlag.OBEY_PRECISION_CONSTRAINTS)
        types = {"fp16": trt.float16, "fp32": trt.float32}
        for index in range(network.num_layers):
            layer = network.get_layer(index)
            if layer.name in request["precisions"]:
                layer.precision = types[request["precisions"][layer.name]]
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
    engine = builder.build_serialized_network(network, config)
    if engine is None:
        return b"", "the builder gave no engine: " + (errors[0] if errors else "it gave no reason")
    return bytes(engine), ""


def builder_with(trt: Any, logger: Any, plugins: list[str], how: str) -> Any:
    """A builder that knows the plugins of the libraries.

    Raises:
        OSError: a library cannot be loaded.
    """
    if how == "process":
        for path in plugins:
            ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    if how:
        # TensorRT's own plugins, EfficientNMS among them. TensorRT-RTX must have no creators at all.
        trt.init_libnvinfer_plugins(logger, "")
    builder = trt.Builder(logger)
    for path in plugins if how == "registry" else ():
        if builder.get_plugin_registry().load_library(path) is None:
            raise OSError(f"'{path}' has no plugins for TensorRT {trt.__version__}")
    return builder


def register_compiled(trt: Any) -> str:
    """Makes trtdet's plugins known as kernels that go into the engine; says why where that cannot be."""
    from trtdet.backends import silu_aot
    from trtdet.errors import BackendError

    try:
        silu_aot.register(trt)
    except BackendError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    main()
