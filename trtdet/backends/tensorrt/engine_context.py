"""One execution context of an engine, with its own stream and buffers."""

from __future__ import annotations

import math
import weakref
from contextlib import ExitStack, suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtdet.backends import cuda
from trtdet.backends.tensorrt.loaded_engine import LoadedEngine, release
from trtdet.errors import BackendError, one_line


class EngineContext:
    """One execution context with its own stream and memory, for up to ``largest`` images.

    ``profiler`` times every layer and rules out CUDA graphs. ``graphs`` lets TensorRT-RTX capture graphs itself.
    """

    def __init__(self, loaded: LoadedEngine, largest: int, profiler: Any = None, graphs: bool = False) -> None:
        self._loaded = loaded
        self._profiler = profiler
        self._graph: cuda.Graph | None = None
        self._library_graphs = graphs and loaded.captures_graphs and profiler is None
        self.captured = False
        """Whether the work is launched as a CUDA graph."""
        gpu = loaded.gpu
        with ExitStack() as stack:
            self._stream = stack.enter_context(gpu.stream())
            self._start, self._end = stack.enter_context(gpu.event()), stack.enter_context(gpu.event())
            mark = loaded.logger.count
            with loaded.doing("making an execution context"):
                context = self._new_context()
                if context is None:
                    raise loaded.refused("making an execution context", mark)
            self._contexts = [context]
            del context
            stack.callback(release, gpu, self._contexts)
            if profiler is not None:
                self._trt_context.profiler = profiler
            self._resize(largest)
            self._memory: dict[str, tuple[cuda.Buffer, cuda.Pinned]] = {}
            for tensor in (loaded.input, *loaded.outputs):
                count = math.prod(self._shapes[tensor.name])
                memory = stack.enter_context(gpu.buffer(count * tensor.dtype.itemsize))
                self._memory[tensor.name] = memory, stack.enter_context(gpu.pinned((count,), tensor.dtype))
                if not self._trt_context.set_tensor_address(tensor.name, memory.address):
                    raise loaded.refused(f"taking memory for '{tensor.name}'", mark)
            self._resources = stack.pop_all()
        self._finish = weakref.finalize(self, _end_context, self._stream, self._resources)

    def fill(self, images: NDArray[np.float32]) -> None:
        """Copies a batch into the input buffer."""
        size = self._loaded.input.shape[1:]
        if images.shape[1:] != size:
            raise BackendError(
                f"the engine takes images of {'x'.join(map(str, size))}, not {'x'.join(map(str, images.shape[1:]))}"
            )
        if len(images) != self._shapes[self._loaded.input.name][0]:
            self._resize(len(images))
        np.copyto(self._array(self._loaded.input.name), images, casting="same_kind")
        self._copied = False

    def run(self, transfers: bool = True) -> float:
        return self._timed(transfers, behind_another=False)

    def compute(self) -> float:
        # On an idle stream an event is recorded at once, so the time would include the launch that follows. Behind a
        # running batch it is recorded when that batch ends, after the launch.
        return self._timed(False, behind_another=True)

    def _timed(self, transfers: bool, behind_another: bool) -> float:
        if not self._finish.alive:
            raise BackendError("the engine was closed")
        loaded, stream = self._loaded, self._stream
        name = loaded.input.name
        with loaded.gpu.current():
            if not transfers and not self._copied:
                stream.copy_in(self._memory[name][0], self._array(name))
            if behind_another:
                self._launch()
            stream.record(self._start)
            if transfers:
                stream.copy_in(self._memory[name][0], self._array(name))
            self._copied = True
            self._launch()
            if transfers:
                for output in loaded.outputs:
                    stream.copy_out(self._array(output.name), self._memory[output.name][0])
            stream.record(self._end)
            stream.wait()
            return self._end.since(self._start)

    def results(self) -> dict[str, NDArray[Any]]:
        """The outputs of the last run with transfers; the next run overwrites them."""
        return {output.name: self._array(output.name) for output in self._loaded.outputs}

    def capture(self) -> str:
        """Captures the work as a CUDA graph, after a first run at this shape; TensorRT-RTX captures by itself.

        Returns why this is not possible, or an empty string.
        """
        # Only TensorRT-RTX can tell in advance.
        if hasattr(self._trt_context, "is_stream_capturable"):
            with self._loaded.gpu.current():
                if not self._trt_context.is_stream_capturable(self._stream.handle):
                    return "TensorRT-RTX says that this engine cannot be captured"
        # Capturing again around the library's own capture would fail.
        if not self._library_graphs:
            try:
                self._graph = self._resources.enter_context(self._stream.capture(self._enqueue))
            except BackendError as error:
                return f"capturing it failed ({one_line(error)})"
        self.captured = True
        return ""

    def close(self) -> None:
        """Releases everything; a second call does nothing."""
        self._finish()

    @property
    def _trt_context(self) -> Any:
        return self._contexts[0]

    def _array(self, name: str) -> NDArray[Any]:
        shape = self._shapes[name]
        flat: NDArray[Any] = self._memory[name][1].array
        return flat[: math.prod(shape)].reshape(shape)

    def _new_context(self) -> Any:
        trt, engine = self._loaded.trt, self._loaded.engine
        specialised = self._loaded.dynamic and hasattr(trt, "DynamicShapesKernelSpecializationStrategy")
        if not specialised and not self._library_graphs:
            return engine.create_execution_context()
        config = engine.create_runtime_config()
        if specialised:
            # By default TensorRT-RTX compiles a shape's kernels in the background and uses slower ones meanwhile. A
            # graph would keep the slower ones.
            config.dynamic_shapes_kernel_specialization_strategy = trt.DynamicShapesKernelSpecializationStrategy.EAGER
        if self._library_graphs:
            config.cuda_graph_strategy = trt.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
        return engine.create_execution_context(config)

    def _resize(self, batch: int) -> None:
        """Sets the batch size and reads the resulting output shapes."""
        # No local variable holds the context: in an error's traceback it would outlive its device.
        loaded, stream = self._loaded, self._stream
        mark = loaded.logger.count
        with loaded.doing(f"setting a batch of {batch}"):
            if loaded.dynamic:
                # In TensorRT 8.6, only the first context starts with a profile.
                if self._trt_context.active_optimization_profile != 0:
                    if not self._trt_context.set_optimization_profile_async(0, stream.handle):
                        raise BackendError(
                            f"{loaded.title} {loaded.trt.__version__} lets only one context use this engine: it was "
                            "built for one (PreviewFeature.PROFILE_SHARING_0806 was off); build it again"
                        )
                    stream.wait()
                if not self._trt_context.set_input_shape(loaded.input.name, (batch, *loaded.input.shape[1:])):
                    raise loaded.refused(f"setting a batch of {batch}", mark)
            self._shapes = {loaded.input.name: (batch, *loaded.input.shape[1:])}
            for output in loaded.outputs:
                shape = tuple(self._trt_context.get_tensor_shape(output.name))
                if min(shape, default=0) < 0:
                    raise BackendError(
                        f"output '{output.name}' of the engine has a shape, {'x'.join(map(str, shape))}, that is known "
                        "only when it ran; build it with --nms native or --nms host"
                    )
                self._shapes[output.name] = shape
        self._copied = False

    def _launch(self) -> None:
        if self._graph is None:
            self._enqueue()
        else:
            self._stream.launch(self._graph)

    def _enqueue(self) -> None:
        mark = self._loaded.logger.count
        with self._loaded.doing("running the engine"):
            if not self._trt_context.execute_async_v3(self._stream.handle):
                raise self._loaded.refused("running the engine", mark)


def _end_context(stream: cuda.Stream, resources: ExitStack) -> None:
    # After Ctrl-C the device may still use the memory that is about to be freed.
    with suppress(BackendError):
        stream.wait()
    resources.close()
