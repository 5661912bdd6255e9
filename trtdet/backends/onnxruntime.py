"""onnxruntime on the CPU, the accuracy reference: runs and times the float and the Q/DQ model, makes no engine."""

from __future__ import annotations

import copy
import json
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import cache, partial
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray

from trtdet.backends.base import BuildRequest, Built, Capabilities, LayerTime, RunInfo, Runner
from trtdet.backends.libraries import library_named
from trtdet.backends.onnxruntime_half import with_roundings
from trtdet.data.ahead import ahead, cores
from trtdet.detection.plugin_nms import EfficientNms, efficient_nms
from trtdet.errors import BackendError, one_line
from trtdet.files import scratch_folder
from trtdet.passes.base import PLUGIN_DOMAIN
from trtdet.passes.batch import filled
from trtdet.passes.nms import EFFICIENT
from trtdet.passes.plugin_ops import plain
from trtdet.passes.protobuf import graphs
from trtdet.progress import Progress, silent

LIBRARY = library_named("onnxruntime")

Item = TypeVar("Item")
Result = TypeVar("Result")

_CUSTOM_DOMAIN = "ai.onnx.contrib"
"""The only domain where onnxruntime-extensions takes operators written in Python."""


class OnnxRuntime:
    """The backend without an engine: a build only checks that the model loads."""

    capabilities = Capabilities(
        name=LIBRARY.name,
        version=onnxruntime.__version__,
        makes_engine=LIBRARY.makes_engine,
        lists_layers=False,
        in_graph_nms=("onnx", "native", "efficient"),
        silu=("keep", "swish", "plugin"),
        fp8=True,
    )

    def build(self, request: BuildRequest, progress: Progress = silent) -> Built:
        OnnxRunner(request.model)
        return Built(b"", sms=(), log=(), seconds=0.0)


class OnnxRunner:
    """Runs a model on the CPU, in the form of :func:`portable`.

    ``alone`` uses one thread, for models run in parallel; ``written`` makes it :meth:`as_written`. Raises BackendError
    if onnxruntime cannot load the model, a ``written`` one at its first run.
    """

    def __init__(self, model: onnx.ModelProto | bytes, *, alone: bool = False, written: bool = False) -> None:
        # The session refers to the same bytes, so keeping them for a profile costs nothing.
        self._data, self._plugins, graph = _runnable(model)
        self._alone, self._unoptimised = alone, written
        self._threads = 1 if alone else 0
        self._others: dict[int, OnnxRunner] = {}
        self._optimised: bytes | None = None
        constants = {constant.name for constant in graph.initializer}
        sources = [source for source in graph.input if source.name not in constants]
        self.inputs: tuple[str, ...] = tuple(source.name for source in sources)
        self.outputs: tuple[str, ...] = tuple(output.name for output in graph.output)
        self.input: str = self.inputs[0]
        dims = sources[0].type.tensor_type.shape.dim  # none of a scalar, and of an inner tensor of unknown shape
        first = dims[0].dim_value if dims else 0  # 0 where it has a name, and -1 in some exports
        self.batch: int | None = first if first > 0 else None
        self.largest_batch = self.batch
        self.on_device = False
        self.run_info = RunInfo("CPU", LIBRARY.title)
        self._loaded = None if written else self._load(self._data, self._options())

    @property
    def _session(self) -> Any:
        if self._loaded is None:
            self._loaded = self._load(self._data, self._options())
        return self._loaded

    def as_written(self) -> OnnxRunner:
        """The same model without onnxruntime's optimisations, for scores; its session is made at its first run.

        The optimised layout of a convolution depends on the CPU and changes the order of summation. In a model that
        rounds to INT8 and FP16 after most layers this shifts mAP by some tenths of a point. Without optimisations,
        AVX2 and AVX-512 gave identical bits in the tests of docs/results/agreement.md.
        """
        if self._unoptimised:
            return self
        other = copy.copy(self)
        other._unoptimised, other._optimised, other._others, other._loaded = True, None, {}, None
        return other

    def with_threads(self, threads: int) -> OnnxRunner:
        """The same model with this number of threads for a run, so that several runs side by side fill the CPU. Its
        session is made at the first call and kept."""
        if threads not in self._others:
            other = copy.copy(self)
            other._threads, other._others = threads, {}  # it is not to hold itself, nor its session for ever
            other._loaded = other._load(other._data, other._options())
            self._others[threads] = other
        return self._others[threads]

    @property
    def model(self) -> onnx.ModelProto:
        """The model that runs: plugin operators in standard operators, FP16 in rounded float32."""
        return onnx.load_from_string(self._data)

    def __call__(self, images: NDArray[np.float32]) -> dict[str, NDArray[Any]]:
        filled = self.filled(images)
        results = self.feed({self.input: filled})
        if len(filled) == len(images):
            return results  # of one image also outputs without a batch dimension
        return {name: value[: len(images)] for name, value in results.items()}

    def clocks(self) -> None:
        """Always None: there is no device."""

    def filled(self, images: NDArray[np.float32]) -> NDArray[np.float32]:
        """The batch, padded with its last image to the model's fixed batch size."""
        return filled(images, self.batch or 0)

    def new_context(self, images: NDArray[np.float32]) -> OnnxContext:
        """A context that shares the model and its threads with the others."""
        context = OnnxContext(self._session, self._feeds(images))
        context.run()
        return context

    def profile(self, images: NDArray[np.float32], runs: int, warm_up: int) -> tuple[LayerTime, ...]:
        """Times kernels with onnxruntime's profiler, in a session with the same options.

        A kernel's time runs from its start to its end, to the microsecond; a Loop or an If excludes the kernels inside.
        ``onnx`` is empty for the layout copies that onnxruntime adds. Raises BackendError if the batch size is not the
        model's, or the profiler stopped before the last run.
        """
        feeds = self._feeds(images)
        with scratch_folder() as folder:
            # Each session orders and names optimised nodes differently, so all profiles run the first session's model.
            if self._optimised is None:
                options = self._options()
                options.optimized_model_filepath = str(folder / "optimised.onnx")
                self._load(self._data, options)
                self._optimised = Path(options.optimized_model_filepath).read_bytes()
            options = self._options()
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
            options.enable_profiling = True
            options.profile_file_prefix = str(folder / "trace")
            session = self._load(self._optimised, options)
            try:
                with _failures("run"):
                    for _ in range(warm_up + runs):
                        session.run(None, feeds)
            finally:
                trace = Path(session.end_profiling())
            events = json.loads(trace.read_text(encoding="utf-8"))
        return layer_times(events, self.model, warm_up + runs, warm_up=warm_up)

    def _feeds(self, images: NDArray[np.float32]) -> dict[str, NDArray[np.float32]]:
        if self.batch not in (None, len(images)):
            raise BackendError(f"the model takes batches of exactly {self.batch}, got {len(images)} images")
        return {self.input: images}

    def _options(self) -> Any:
        options = onnxruntime.SessionOptions()
        if self._plugins:
            options.register_custom_ops_library(_custom_operators())
        options.log_severity_level = 3
        if self._unoptimised:
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.intra_op_num_threads = self._threads  # 0: one for each core
        if self._alone:
            # The second run plans a pattern in fresh memory, which costs more than it saves if runs are few.
            options.enable_mem_pattern = False
        # Spinning threads would take the cores that decode images, count values and run NMS.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        # Q/DQ runs as written: integer kernels that fuse it saturate at 16 bits on CPUs without VNNI.
        options.add_session_config_entry("session.disable_quant_qdq", "1")
        # These two take the zero of FP8 for the minimum of UINT8, and drop the ReLU before it.
        options.add_session_config_entry(
            "optimization.disable_specified_optimizers", "ReluQuantRewrite;ClipQuantRewrite"
        )
        return options

    def _load(self, model: bytes, options: Any) -> Any:
        with _failures("load"):
            return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])

    def feed(self, arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Runs whole batches of any inputs, by name; raises BackendError if onnxruntime fails at a node."""
        with _failures("run"):
            return dict(zip(self.outputs, self._session.run(None, dict(arrays)), strict=True))


class OnnxContext:
    """One batch to run repeatedly; see :class:`trtdet.backends.base.ExecutionContext`."""

    def __init__(self, session: Any, feeds: dict[str, NDArray[np.float32]]) -> None:
        self._session, self._feeds = session, feeds

    def run(self, transfers: bool = True) -> float:
        """Milliseconds of one run, by the clock; the CPU copies nothing, whatever ``transfers`` says."""
        with _failures("run"):
            started = perf_counter()
            self._session.run(None, self._feeds)
            return 1000 * (perf_counter() - started)

    compute = run  # there is no device to launch work on


@contextmanager
def _failures(verb: str) -> Iterator[None]:
    """Turns any exception into a BackendError: onnxruntime has one class for each status, without a common base."""
    try:
        yield
    except Exception as error:
        raise BackendError(
            f"onnxruntime {onnxruntime.__version__} cannot {verb} the model: {one_line(error)}"
        ) from None


def portable(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model for onnxruntime: plugin operators in standard operators, except EfficientNMS_TRT, and FP16 as in
    :mod:`trtdet.backends.onnxruntime_half`. Without either, the same object is returned."""
    return with_roundings(plain(model))


def _runnable(model: onnx.ModelProto | bytes) -> tuple[bytes, bool, onnx.GraphProto]:
    """The model that onnxruntime loads, whether it has operators computed in Python, and a graph with its inputs and
    outputs."""
    with _failures("load"):
        # This takes a sixth of the time in which onnxruntime loads the model.
        source = onnx.load_from_string(model) if isinstance(model, bytes) else model
        standard = portable(source)
    has_plugins = any(node.domain == PLUGIN_DOMAIN for node in source.graph.node)
    if isinstance(model, bytes) and standard is source and not has_plugins:
        return model, False, source.graph
    changed = onnx.ModelProto()
    changed.CopyFrom(standard)
    plugin_nodes = [node for node in changed.graph.node if node.domain == PLUGIN_DOMAIN]
    for node in plugin_nodes:
        node.domain = _CUSTOM_DOMAIN
        for attribute in node.attribute:
            # The extensions pass floats as text of six digits.
            if attribute.type == onnx.AttributeProto.FLOAT:
                attribute.i, attribute.type = int(np.float32(attribute.f).view(np.int32)), onnx.AttributeProto.INT
                attribute.ClearField("f")
    if plugin_nodes:
        changed.opset_import.append(onnx.helper.make_opsetid(_CUSTOM_DOMAIN, 1))
    return changed.SerializeToString(), bool(plugin_nodes), changed.graph


@cache
def _custom_operators() -> str:
    """The library with EfficientNMS_TRT, computed by its NumPy reference."""
    # The converters of onnxruntime-extensions are not used, so their imports are blocked: torch takes seconds to
    # import. They also set a variable that makes protobuf slow in every later child process.
    variable = "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION"
    before = os.environ.get(variable)
    blocked_modules = {"torch", "transformers"} - sys.modules.keys()
    sys.modules.update(dict.fromkeys(blocked_modules))  # type: ignore[arg-type]  # None: importing it fails, and is caught
    try:
        import onnxruntime_extensions as extensions
    finally:
        for name in blocked_modules:
            sys.modules.pop(name, None)
        if before is None:
            os.environ.pop(variable, None)
        else:
            os.environ[variable] = before
    kinds = extensions.PyCustomOpDef
    names = {field.name: field.type for field in fields(EfficientNms)}

    @extensions.onnx_op(  # type: ignore[untyped-decorator]
        op_type=EFFICIENT,
        inputs=[kinds.dt_float, kinds.dt_float],
        outputs=[kinds.dt_int32, kinds.dt_float, kinds.dt_float, kinds.dt_int32],
        attrs=dict.fromkeys(names, kinds.dt_int64),
    )
    def efficient(boxes: NDArray[np.float32], scores: NDArray[np.float32], **attributes: Any) -> tuple[Any, ...]:
        values: dict[str, Any] = {
            name: float(np.int32(value).view(np.float32)) if names[name] == "float" else value
            for name, value in attributes.items()
            if value is not None
        }
        detections = efficient_nms(boxes, scores, EfficientNms(**values))
        return detections.num_dets, detections.boxes, detections.scores, detections.classes

    return str(extensions.get_library_path())


def for_scores(runner: Runner) -> Runner:
    """The runner that computes scores: a model on the CPU by :meth:`OnnxRunner.as_written`, an engine unchanged."""
    return runner.as_written() if isinstance(runner, OnnxRunner) else runner


_MOST_RUNS = 4
"""Most runs side by side: each needs memory for its activations."""


def at_once(runner: Runner) -> int:
    """How many runs :func:`side_by_side` has at a time."""
    return min(cores(), _MOST_RUNS) if isinstance(runner, OnnxRunner) else 1


def side_by_side(
    runner: Runner, work: Callable[[Runner, Item], Result], items: Iterator[Item]
) -> Generator[Result, None, None]:
    """``work(runner, item)`` for each item, in their order; on the CPU several at a time, in threads.

    A run on all cores waits for its slowest thread after each layer, and many layers have one thread: two runs of one
    thread each took 0.6 to 0.85 of the time of two runs after each other, on two cores. An engine runs in the thread of
    the caller.
    """
    count = at_once(runner)
    if count == 1 or not isinstance(runner, OnnxRunner):
        for item in items:
            yield work(runner, item)
        return
    yield from ahead(items, partial(work, runner.with_threads(cores() // count)), workers=count, most=count)


_KERNEL = "_kernel_time"
_BLOCKED = "_nchwc"
"""Suffix of kernels in onnxruntime's blocked memory layout; the name of their output tensor precedes it."""


def layer_times(
    events: Sequence[Mapping[str, Any]], model: onnx.ModelProto, runs: int, warm_up: int
) -> tuple[LayerTime, ...]:
    """Layer times from onnxruntime's trace, where ``Session`` events enclose the runs and ``Node`` events are kernels.

    ``events`` are in Chrome's format, with times in microseconds. ``runs`` counts all runs, and the first ``warm_up``
    are dropped. Raises BackendError if the trace lacks runs, as the profiler stops at a million events.
    """
    frames = sorted(
        float(event["ts"]) for event in events if event["cat"] == "Session" and event["name"] == "model_run"
    )
    if len(frames) != runs:
        raise BackendError(
            f"onnxruntime's profiler kept {len(frames)} of {runs} runs, as it stops at a million events", "run fewer"
        )
    kernels = [event for event in events if event["cat"] == "Node" and str(event["name"]).endswith(_KERNEL)]
    # Of two kernels with the same start, the longer contains the other.
    kernels.sort(key=lambda kernel: (float(kernel["ts"]), -float(kernel["dur"])))
    own = [float(kernel["dur"]) for kernel in kernels]
    ends = [float(kernel["ts"]) + float(kernel["dur"]) for kernel in kernels]
    around: list[int] = []
    for index, kernel in enumerate(kernels):
        while around and ends[around[-1]] <= float(kernel["ts"]):
            around.pop()
        if around and ends[index] <= ends[around[-1]]:
            own[around[-1]] -= float(kernel["dur"])
        around.append(index)
    times: dict[tuple[str, str], NDArray[np.float64]] = defaultdict(lambda: np.zeros(runs))
    counts: dict[tuple[str, str], int] = defaultdict(int)
    rows = np.searchsorted(frames, [float(kernel["ts"]) for kernel in kernels], side="right") - 1
    for kernel, row, microseconds in zip(kernels, rows, own, strict=True):
        key = str(kernel["name"]).removesuffix(_KERNEL), str(kernel["args"]["op_name"])
        times[key][row] += microseconds / 1000
        counts[key] += 1
    nodes = _origins(model, [name for name, _ in times])
    return tuple(
        LayerTime(
            name,
            type=kind,
            onnx=nodes.get(name, ()),
            ms=tuple(map(float, row_times[warm_up:])),
            count=max(1, round(counts[name, kind] / runs)),
        )
        for (name, kind), row_times in times.items()
    )


def _origins(model: onnx.ModelProto, kernels: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The names of the model's nodes that each kernel computes.

    A kernel is named after a node, after a node's output with ``_nchwc``, or after a node and a fusion. Any other node
    was fused into the kernel of all its readers (the Sigmoid of a SiLU, the Q/DQ of weights), else into the kernel of
    its input (an activation in a convolution). The remaining nodes were computed at load time or are unknown.
    """
    nodes = [node for node in model.graph.node if node.name]
    named, writers = {node.name for node in nodes}, {name: node for node in nodes for name in node.output}
    homes: dict[str, str] = {}
    for kernel in kernels:
        if kernel in named:
            homes[kernel] = kernel
        elif kernel.removesuffix(_BLOCKED) in writers:
            homes[writers[kernel.removesuffix(_BLOCKED)].name] = kernel
        else:
            pieces = kernel.split("/")
            starts = ("/".join(pieces[:count]) for count in range(len(pieces) - 1, 0, -1))
            if node_name := next((start for start in starts if start in named), None):
                homes[node_name] = kernel
    readers: dict[str, list[str]] = defaultdict(list)
    for node in nodes:
        for name in node.input:
            readers[name].append(node.name)
    for node in reversed(nodes):
        into = {homes.get(reader) for name in node.output for reader in readers[name]}
        if node.name not in homes and len(into) == 1 and (home := into.pop()) is not None:
            homes[node.name] = home
    for node in nodes:
        into = {homes.get(writers[name].name) for name in node.input if name in writers}
        if node.name not in homes and len(into) == 1 and (home := into.pop()) is not None:
            homes[node.name] = home
    _, *bodies = graphs(model.graph)
    inner = {node.name for body in bodies for node in body.node}
    origins: dict[str, list[str]] = defaultdict(list, {kernel: [kernel] for kernel in kernels if kernel in inner})
    for node in nodes:
        if node.name in homes:
            origins[homes[node.name]].append(node.name)
    return {kernel: tuple(names) for kernel, names in origins.items()}
