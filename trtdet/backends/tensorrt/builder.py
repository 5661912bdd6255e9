"""Builds with TensorRT 8.6 to 11 for the GPU of this machine; TensorRT-RTX uses the same build."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from trtdet.backends import cuda
from trtdet.backends.base import BuildRequest, Built, Capabilities, Typing
from trtdet.backends.libraries import Library, library_named
from trtdet.backends.tensorrt.dla import has_dla
from trtdet.backends.tensorrt.messages import advised
from trtdet.backends.tensorrt.opsets import missing_operators
from trtdet.backends.tensorrt.silu_aot import NETWORK_FLAG
from trtdet.calibration.cache import version_number
from trtdet.config import NmsMode, SiluForm
from trtdet.errors import BackendError, one_line
from trtdet.files import scratch_folder
from trtdet.passes.plugin_ops import plugin_nodes
from trtdet.passes.provenance import without_registry
from trtdet.progress import Progress, silent
from trtdet.quantization import DataFlow

LIBRARY = library_named("tensorrt")

_LOG = logging.getLogger(__name__)

_BUILDER_FLAGS: dict[str, tuple[str, ...]] = {"int8": ("INT8", "FP16"), "fp16": ("FP16",), "fp32": ()}
"""Precisions that the builder of a weakly typed network may use, by the lowest precision of the engine."""

_ADVICE = (
    (
        r"plugin libraries are not in the engine",
        "set engine.version_compatible=true, as TensorRT's documentation speaks of libraries in such engines only, or "
        "leave engine.embed_plugins out: the libraries then lie beside the engine",
    ),
    (
        r"out of memory|OutOfMemory|cudaErrorMemoryAllocation",
        "the device has too little free memory: end what else uses it, or build with a smaller batch or workspace",
    ),
    (
        r"driver version is insufficient|cudaErrorInsufficientDriver|system has unsupported display driver",
        "the CUDA driver is too old for this TensorRT: update the driver, or install an older TensorRT",
    ),
    (
        r"getPluginCreator could not find|Plugin not found|plugin creator",
        "an operator of the model is unknown to this TensorRT: if it is a plugin, give the library that has it with "
        "--set engine.plugins=LIBRARY",
    ),
)
"""Patterns of builder messages, each with its fix."""

UNCAPTURED_NMS: Mapping[NmsMode, str] = {
    "onnx": "the data decide how many boxes INMSLayer gives, so that memory is taken while it runs",
    "native": "the data decide when its Loop ends",
}
"""CUDA graphs cannot hold data-dependent shapes and loops (release notes of TensorRT-RTX 1.2, "Memory Management";
NVIDIA's TensorRT on GitHub, issue 4194)."""

_CONTROL_FLOW = {"If", "Loop", "Scan"}

_KEPT = ("PATH", "HOME", "TMPDIR", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME", "CUDA_", "NVIDIA_", "VIRTUAL_ENV")
"""Prefixes of the environment variables that the build process gets."""


class TensorRT:
    """The installed TensorRT; raises BackendError without it or without a CUDA device."""

    def __init__(self) -> None:
        self._trt: Any = LIBRARY.load()
        # TensorRT's Runtime ends a process without a device, so this looks for one before it creates any object.
        devices = cuda.devices()
        if not devices:
            raise BackendError(
                f"TensorRT {self._trt.__version__} builds only on a machine with a CUDA device, and {cuda.absence()}",
                "build on one that has, or use --backend tensorrt-rtx, which needs no GPU",
            )
        self._device = devices[0]

    @property
    def capabilities(self) -> Capabilities:
        version: str = self._trt.__version__
        vc_plugin = True
        try:
            ctypes.CDLL(f"libnvinfer_vc_plugin.so.{version.partition('.')[0]}")
        except OSError:
            vc_plugin = False
        sources = tuple(getattr(getattr(self._trt, "TacticSource", None), "__members__", ()))
        dla = has_dla(version, self._device.sm)
        return replace(capabilities_of(version, vc_plugin), tactic_sources=sources, dla=dla)

    def build(self, request: BuildRequest, progress: Progress = silent) -> Built:
        if request.sms and request.sms != (self._device.sm,):
            raise BackendError(
                f"TensorRT builds for the GPU it runs on, which is compute capability {self._device.sm}, not "
                f"{' '.join(map(str, request.sms))}; leave --sm out or use --backend tensorrt-rtx"
            )
        return replace(build_engine(LIBRARY, self.capabilities, request, progress=progress), sms=(self._device.sm,))


def capabilities_of(version: str, vc_plugin: bool = True) -> Capabilities:
    """Capabilities of a version of TensorRT, such as 10.3, which need not be installed.

    ``vc_plugin`` tells whether its library of version-compatible plugins is there. Tactic sources and DLA are
    left out.
    """
    major, minor = (int(part) for part in version.split(".")[:2])
    implicit = LIBRARY.may_read_calibration_cache(version)
    # By major version. Up to 10, a convolution, its SiLU and the quantisation of the result fuse (NVIDIA/TensorRT,
    # thread 3205, and the plans in its tools/experimental/trt-engine-explorer). For 11 it is not published which
    # weight scales fuse.
    silu: tuple[SiluForm, ...] = ("swish", "keep", "plugin")
    explicit, data_flow = Typing(), DataFlow(half=True, weights=("channel", "tensor"), fused=False)
    if major == 10:
        silu, explicit, data_flow = ("keep", "plugin"), Typing(("STRONGLY_TYPED",)), DataFlow(half=True, fused=True)
    elif major < 10:
        silu, explicit, data_flow = ("plugin", "keep"), Typing(("EXPLICIT_BATCH",), weak=True), DataFlow(fused=True)
    return Capabilities(
        name=LIBRARY.name,
        version=version,
        makes_engine=LIBRARY.makes_engine,
        lists_layers=True,
        keeps_timing_cache=True,
        has_inspector=True,
        # 10.12 deprecates EfficientNMS in favour of INMSLayer, which allocates memory while it runs.
        in_graph_nms=("efficient", "onnx", "native"),
        uncaptured_nms=UNCAPTURED_NMS,
        # The plugin of the 8.6.0 wheel accepts the field but ignores it.
        nms_across_classes=not version.startswith("8.6.0"),
        max_topk=3840,
        explicit=explicit,
        implicit=Typing(("EXPLICIT_BATCH",) if major < 10 else (), weak=True) if implicit else None,
        version_compatible=(major, minor) >= (8, 6),
        hardware_compatible=(major, minor) >= (8, 6),
        tf32=True,
        # Without it only one context can use a dynamic batch; later versions always share the profile.
        preview_features=("PROFILE_SHARING_0806",) if (major, minor) == (8, 6) else (),
        cache_version=version_number(version) if implicit else 0,
        missing_ops=missing_operators((major, minor), vc_plugin),
        max_opset=LIBRARY.newest_opset(version),
        silu=silu,
        loads_plugins=LIBRARY.loads_plugins,
        compiles_plugins=(major, minor) >= (10, 9),
        data_flow=data_flow,
        fp8=major >= 10,
    )


def build_engine(
    library: Library, caps: Capabilities, request: BuildRequest, progress: Progress, sms: tuple[int, ...] = ()
) -> Built:
    """Builds an engine in its own process, with detailed layer messages.

    ``caps`` describe the installed version of the library. ``sms`` are the compute capabilities to build for ahead of
    time; empty for this machine's GPU. Raises BackendError if the parser or the builder refused, or the process ended.
    The text quotes the reason; ``messages`` has all builder messages, the error output and the full reason.
    """
    started = time.perf_counter()
    with scratch_folder() as folder:
        (folder / "request.json").write_text(json.dumps(_facts(library, caps, request, sms=sms)))
        (folder / "model.onnx").write_bytes(without_registry(request.model).SerializeToString())
        (folder / "timings").write_bytes(request.timing_cache)
        # The size of the environment shifts the heap, and so the order of objects sorted by address.
        environment = {key: value for key, value in os.environ.items() if key.startswith(_KEPT)}
        with (folder / "stderr.txt").open("w") as errors:
            process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("build_process.py"))],
                cwd=folder,
                env={**environment, "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                # Ctrl-C reaches only this process, which then ends the build process.
                start_new_session=True,
            )
        messages = []
        try:
            assert process.stdout is not None
            for line in process.stdout:
                report = json.loads(line)
                if isinstance(report, str):
                    messages.append(report)
                    _LOG.info("%s", report)
                    continue
                stage, done, total = report
                progress(stage or f"building the engine with {caps.name} {caps.version}", done, total)
            process.wait()
        finally:
            process.kill()
            process.communicate()
        return _built(folder, process.returncode, caps, sms=sms, started=started, messages=tuple(messages))


def _facts(library: Library, caps: Capabilities, request: BuildRequest, sms: tuple[int, ...]) -> dict[str, Any]:
    """The request in the form that the build process reads."""
    # The DLA knows strongly typed networks only where there are no others.
    weak = request.implicit is not None or (request.options.dla is not None and caps.implicit is not None)
    typing = caps.implicit if weak else caps.explicit
    if typing is None:
        raise BackendError(f"{caps.name} {caps.version} has no calibrators; quantise explicitly")
    compiled = caps.compiles_plugins and not request.plugins and any(plugin_nodes(request.model.graph))
    captured = not any(node.op_type in _CONTROL_FLOW for node in request.model.graph.node)
    calibration = None
    if request.implicit is not None:
        preprocess = request.implicit.preprocess
        calibration = {
            **asdict(replace(request.implicit, preprocess=None)),
            "images": [str(path.resolve()) for path in request.implicit.images],
            "preprocess": preprocess.model_dump(mode="json") if preprocess is not None else None,
        }
    options = ("version_compatible", "hardware_compatible", "embed_plugins", "tactic_sources", "tf32", "dla")
    return {
        "module": library.module,
        "parent": os.getpid(),
        "network_flags": (*typing.network_flags, *((NETWORK_FLAG,) if compiled else ())),
        "builder_flags": (
            *(_BUILDER_FLAGS[request.precision] if typing.weak else ()),
            *(caps.capture_flags if captured else ()),
        ),
        "sms": sms,
        "batch": request.batch,
        "preview_features": caps.preview_features,
        "precisions": dict(request.precisions) if typing.weak else {},
        "plugins": [str(path.resolve()) for path in request.plugins],
        "loads_plugins": caps.loads_plugins,
        "compiled_plugins": compiled,
        "implicit": calibration,
        "options": {
            "workspace": None if request.options.workspace is None else int(request.options.workspace * 2**20),
            **{name: getattr(request.options, name) for name in options},
        },
        "keep_timings": caps.keeps_timing_cache,
        "inspect": caps.has_inspector,
    }


def _built(
    folder: Path, code: int, caps: Capabilities, sms: tuple[int, ...], started: float, messages: tuple[str, ...]
) -> Built:
    """Reads the result from the build process's files; raises BackendError if there is no engine."""

    def text(name: str) -> str:
        return (folder / name).read_text(errors="replace") if (folder / name).is_file() else ""

    lines = tuple(text("log.txt").splitlines())
    printed = tuple(text("stderr.txt").strip().splitlines())
    problem = text("error.txt")
    if not problem and not (folder / "engine").is_file():
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        last = printed[-1:] or lines[-1:] or ("no message",)
        problem = f"ended while building, with {how}: {last[0]}"
    if problem:
        words = advised(one_line(problem), _ADVICE, lines[-5:])
        raise BackendError(f"{caps.name} {caps.version}: {words}", messages=(*messages, *printed, problem))
    timings = folder / "timing.cache"
    return Built(
        engine=(folder / "engine").read_bytes(),
        sms=sms,
        log=lines,
        seconds=time.perf_counter() - started,
        layers=text("layers.json"),
        timing_cache=timings.read_bytes() if timings.is_file() else b"",
        calibration_cache=text("calibration.cache"),
        messages=messages,
    )
