"""The libraries that can run a detector, one row each; a row exists even if the library is not installed.

Only the standard library is imported here, so that the command line can list the names quickly. A row holds facts
about all versions; :class:`trtdet.backends.base.Capabilities` describes the installed version.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import pkgutil
import re
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trtdet.backends.tensorrt.opsets import NEWEST, PARSERS
from trtdet.errors import BackendError

if TYPE_CHECKING:
    from trtdet.backends.base import Backend


@dataclass(frozen=True)
class TritonBackend:
    """The Triton backend for the library's files: two fields of ``config.pbtxt``, and the file name it expects."""

    backend: str
    platform: str
    file: str


CONSUMERS = {
    "python": "Python (trtdet)",
    "libtrtdet": "C++ (libtrtdet, trtdet-serve)",
    "triton": "Triton",
    "deepstream": "DeepStream",
    "jetson": "Jetson Orin",
}
"""Programs that may run a bundle, each with its title in tables."""


@dataclass(frozen=True)
class Consumption:
    """Whether a consumer, a title of :data:`CONSUMERS`, runs a backend's bundles; its requirements, or why not."""

    backend: str
    consumer: str
    runs: bool
    detail: str


@dataclass(frozen=True)
class Library:
    """One library, with the facts that all its versions share.

    Attributes:
        name: as ``--backend`` takes it and a bundle's manifest keeps it.
        title: as messages name it.
        module: the Python module.
        distribution: the package that pip installs.
        extra: trtdet's extra that has it; empty for a fixed dependency of trtdet.
        backend: its :class:`~trtdet.backends.base.Backend`, as ``module:class``.
        makes_engine: False if it runs the Q/DQ model itself.
        times_kernels: its builder times kernels on the GPU, so it needs a machine with one.
        loads_plugins: its builder and its runtime load plugin libraries.
        magic: first bytes of its engines; empty if the format is not published.
        size_at: offset in an engine of its own length, a little-endian uint64; None if the length is not stored.
        last_calibrators: newest major version that reads calibration caches; 0 for none, None if another library
            builds the engine.
        triton: the Triton backend for its files; None for none.
        served: by name in :data:`CONSUMERS`, what the consumer needs to run its bundles.
        not_served: the other consumers, each with the reason, as words that follow "for which".
        parsers: (first version as (major, minor), newest ONNX opset that its parser reads), newest first; empty if the
            library reads any opset.
    """

    name: str
    title: str
    module: str
    distribution: str
    extra: str
    backend: str
    makes_engine: bool = True
    times_kernels: bool = False
    loads_plugins: bool = False
    magic: bytes = b""
    size_at: int | None = None
    last_calibrators: int | None = 0
    triton: TritonBackend | None = None
    served: dict[str, str] = field(default_factory=dict)
    not_served: dict[str, str] = field(default_factory=dict)
    parsers: tuple[tuple[tuple[int, int], int], ...] = ()

    def newest_opset(self, version: str = "") -> int | None:
        """The newest ONNX opset that a version such as 8.6 reads; None for any.

        The version need not be installed. The default is the installed version, which is not looked up if all versions
        read the same opset. Raises BackendError if the version is invalid, or no version is given and the library is
        not installed.
        """
        if not version and len(self.parsers) > 1:
            try:
                version = importlib.metadata.version(self.distribution)
            except importlib.metadata.PackageNotFoundError:
                raise BackendError(
                    f"{self.title} is not installed, and its versions read different opsets",
                    f"say which version the file is for, such as {self.name}:8.6",
                ) from None
        numbers = tuple(int(part) for part in re.findall(r"[0-9]+", version or "0"))
        if self.parsers and not numbers:
            raise BackendError(f"'{version}' is no version of {self.title}; give one such as {self.name}:10.15")
        return next((opset for first, opset in self.parsers if (*numbers, 0)[:2] >= first), None)

    def missing_bytes(self, engine: bytes) -> int:
        """Bytes that an engine lacks according to its stored length; 0 if it is complete or stores no length."""
        if self.size_at is None:
            return 0
        end = self.size_at + 8
        size: int = struct.unpack_from("<Q", engine, self.size_at)[0] if len(engine) >= end else end
        return max(0, size - len(engine))

    @property
    def pip(self) -> str:
        """The install command."""
        return f"pip install 'trtdet[{self.extra}]'" if self.extra else f"pip install {self.distribution}"

    @property
    def installed(self) -> bool:
        """Whether its module exists; nothing is imported."""
        return importlib.util.find_spec(self.module) is not None

    def load(self) -> Any:
        """Imports its module; raises BackendError, with the install command, if it is not installed."""
        try:
            return importlib.import_module(self.module)
        except ImportError as error:
            # pybind11 wraps what ends the initialisation of a module, also Ctrl-C.
            if isinstance(error.__cause__, KeyboardInterrupt):
                raise error.__cause__ from None
            raise BackendError(f"{self.title} is not installed here ({error})", self.pip) from None

    def new_backend(self) -> Backend:
        """An instance of ``backend``; raises BackendError if it is not installed or does not work on this machine."""
        backend: Backend = pkgutil.resolve_name(self.backend)()
        return backend

    def may_read_calibration_cache(self, version: str) -> bool:
        """Whether that version's builder reads calibration caches; True if another library builds the engine."""
        return self.last_calibrators is None or int(version.split(".")[0]) <= self.last_calibrators


LIBRARIES = (
    Library(
        name="tensorrt",
        title="TensorRT",
        module="tensorrt",
        distribution="tensorrt",
        extra="trt",
        backend="trtdet.backends.tensorrt.builder:TensorRT",
        times_kernels=True,
        loads_plugins=True,
        last_calibrators=10,
        parsers=PARSERS,
        triton=TritonBackend("tensorrt", "tensorrt_plan", "model.plan"),
        served={
            "python": "the engine's version of TensorRT and a GPU of its compute capability",
            "libtrtdet": "built with that major version's headers, TensorRT's libraries, and the GPU; else onnxruntime",
            "triton": "a release with the engine's version of TensorRT",
            "deepstream": "a release with the engine's version of TensorRT, else nvinfer builds another engine",
            "jetson": "built on the Jetson itself, with the TensorRT of its JetPack",
        },
    ),
    Library(
        name="tensorrt-rtx",
        title="TensorRT-RTX",
        module="tensorrt_rtx",
        distribution="tensorrt-rtx",
        extra="rtx",
        backend="trtdet.backends.tensorrt.rtx:TensorRTRTX",
        magic=b"vtrt",
        size_at=16,
        parsers=(((0, 0), NEWEST),),
        served={
            "python": "the engine's version of TensorRT-RTX and a GPU of a compute capability it was built for",
            "libtrtdet": "built with the headers of TensorRT-RTX's SDK, its libraries, and the GPU; else onnxruntime",
        },
        not_served={
            "triton": "Triton has no backend",
            "deepstream": "nvinfer has no runtime",
            "jetson": "compute capability 8.7 is no target",
        },
    ),
    Library(
        name="onnxruntime",
        title="onnxruntime",
        module="onnxruntime",
        distribution="onnxruntime",
        extra="",
        backend="trtdet.backends.onnxruntime:OnnxRuntime",
        makes_engine=False,
        last_calibrators=None,
        triton=TritonBackend("onnxruntime", "onnxruntime_onnx", "model.onnx"),
        served={
            "python": "onnxruntime, on the CPU",
            "libtrtdet": "onnxruntime 1.12 or later, on the CPU",
            "triton": "the onnxruntime backend, on the CPU unless told otherwise",
            "deepstream": "nvinfer builds an engine from the model at its first start",
            "jetson": "onnxruntime in Python, on the CPU",
        },
    ),
)
"""Every library, in the order of preference of ``--backend auto``."""


def consumptions() -> tuple[Consumption, ...]:
    """Each library with each consumer, in the order of both tables."""
    return tuple(
        Consumption(row.name, consumer=title, runs=name in row.served, detail=(row.not_served | row.served)[name])
        for row in LIBRARIES
        for name, title in CONSUMERS.items()
    )


def library_named(name: str) -> Library:
    """The row of that name; raises BackendError if there is none."""
    libraries = {library.name: library for library in LIBRARIES}
    if name not in libraries:
        raise BackendError(f"no backend '{name}'; allowed: auto, {', '.join(libraries)}")
    return libraries[name]
