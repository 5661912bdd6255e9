"""The options, the result and the node writer of every graph rewrite."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs
from numpy.typing import ArrayLike

from trtdet.config import Config, NmsMode, SiluForm
from trtdet.errors import ModelError, TrtdetError, one_line
from trtdet.passes.provenance import Origin, registry

PLUGIN_DOMAIN = "trt.plugins"
"""ONNX domain of operators that are TensorRT plugins; TensorRT's parser goes by the operator's name alone."""


@dataclass(frozen=True)
class Options:
    """The options of all passes.

    Attributes:
        config: the detector.
        nms: the form of the suppression in the graph, see :mod:`trtdet.passes.nms`; ``host`` leaves it to the
            consumer.
        batch: a size, which any batch is fixed to; a name, which makes it dynamic; None keeps the model's own.
        max_topk: the largest K that the backend's TopK takes; None for any.
        silu: the form of SiLU and HardSwish: ``keep`` leaves the model's own, ``swish`` writes ONNX operators,
            ``plugin`` operators of trtdet's plugin library.
        keep_embedded: keep the thresholds of an NMS that is embedded in the model instead of the configuration's.
        max_opset: the newest ONNX opset that the backend reads; None for any.
        missing_ops: operators that the backend lacks, to be replaced where ONNX defines them by other operators.
        min_opset: the oldest ONNX opset that is wanted; a model that cannot be raised to it keeps its own.
            ``max_opset`` goes before it.
        masks: the last output of the graph is that of masks, see :mod:`trtdet.passes.masks`.
    """

    config: Config
    nms: NmsMode = "host"
    batch: int | str | None = None
    max_topk: int | None = None
    silu: SiluForm = "keep"
    keep_embedded: bool = False
    max_opset: int | None = None
    missing_ops: frozenset[str] = frozenset()
    min_opset: int | None = None
    masks: bool = False


@dataclass(frozen=True)
class PassResult:
    """How often a rewrite was applied and, for each near-match that was left alone, the reason."""

    count: int
    skipped: tuple[str, ...] = ()


@contextlib.contextmanager
def explained(name: str) -> Iterator[None]:
    """Turns the exceptions of the libraries below a pass into a ModelError that names the pass."""
    try:
        yield
    except TrtdetError:
        raise
    except Exception as error:
        raise ModelError(
            f"the model cannot be rewritten: pass '{name}' met {type(error).__name__}: {one_line(error)}",
            "export the model again, or cut the graph before the operators that are at fault with head.outputs",
        ) from error


class Writer:
    """Appends nodes to a graph and registers their origin.

    Every node and tensor it makes is named ``prefix/op_number``. Where the graph has names of that prefix already, the
    prefix is made longer.

    Args:
        graph: gets the nodes.
        prefix: of names.
        origin: of the nodes.
        outer: the graph whose node holds ``graph`` as a branch or a body; the registry is that graph's.
    """

    def __init__(self, graph: gs.Graph, prefix: str, origin: Origin, outer: gs.Graph | None = None) -> None:
        self.graph = graph
        self.origin = origin
        self._registry = registry(graph if outer is None else outer)
        taken = {node.name for node in graph.nodes} | set(graph.tensors())
        while any(name.startswith(f"{prefix}/") for name in taken):
            prefix += "+"
        self.prefix = prefix
        self._numbers = itertools.count(1)

    def of(self, origin: Origin) -> Writer:
        """The same writer, with its graph, prefix and numbers, for nodes of another origin."""
        other = copy.copy(self)
        other.origin = origin
        return other

    def const(self, value: ArrayLike, dtype: Any) -> gs.Constant:
        return gs.Constant(f"{self.prefix}/const_{next(self._numbers)}", np.array(value, dtype=dtype))

    def __call__(self, op: str, *inputs: gs.Tensor, **attrs: Any) -> gs.Variable:
        """Writes a node with a single output and gives that output."""
        return self.many(op, 1, *inputs, **attrs)[0]

    def many(self, op: str, outputs: int, *inputs: gs.Tensor, **attrs: Any) -> list[gs.Variable]:
        """Writes a node with several outputs."""
        name = f"{self.prefix}/{op}_{next(self._numbers)}"
        made = [gs.Variable(f"{name}:{index}" if outputs > 1 else name) for index in range(outputs)]
        self.graph.nodes.append(gs.Node(op=op, name=name, attrs=attrs, inputs=list(inputs), outputs=made))
        self._registry[name] = self.origin
        return made

    def plugin(self, op: str, inputs: list[gs.Tensor], outputs: int, attrs: dict[str, Any]) -> list[gs.Variable]:
        """Writes a node that is a TensorRT plugin."""
        made = self.many(op, outputs, *inputs, **attrs)
        self.graph.nodes[-1].domain = PLUGIN_DOMAIN
        return made
