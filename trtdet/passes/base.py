"""Options, results and node writers of all graph rewrites."""

from __future__ import annotations

import atexit
import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from numpy.typing import ArrayLike

from trtdet.config import Config, NmsMode, SiluForm
from trtdet.errors import ModelError, TrtdetError, one_line
from trtdet.passes.provenance import Origin, registry

PLUGIN_DOMAIN = "trt.plugins"  # ONNX domain of TensorRT plugins; TensorRT's parser reads only the operator's name


@dataclass(frozen=True)
class Options:
    """Options of all passes."""

    config: Config
    nms: NmsMode = "host"  # see trtdet.passes.nms; "host": outside the engine
    batch: int | str | None = None  # a size, a name for a dynamic batch, or None for the model's own
    max_topk: int | None = None  # largest K of the backend's TopK; None for no limit
    silu: SiluForm = "keep"  # see trtdet.passes.silu; "keep": the model's own operators
    keep_embedded: bool = False  # keep the thresholds of an embedded NMS, not the configuration's
    max_opset: int | None = None  # newest ONNX opset that the backend reads; None for no limit
    missing_ops: frozenset[str] = frozenset()  # operators to replace by their ONNX definition, if there is one
    min_opset: int | None = None  # raise the model to this opset if possible, at most to max_opset
    masks: bool = False  # the graph's last output holds masks, see trtdet.passes.masks


@dataclass(frozen=True)
class PassResult:
    """How often a pass rewrote something, and for each skipped near-match the reason."""

    count: int
    skipped: tuple[str, ...] = ()


def register(plugin: onnx.defs.OpSchema, infer: Callable[[Any], None]) -> None:
    """Registers a plugin for ONNX's checker and shape inference, until the interpreter ends.

    ``infer`` sets the types of the outputs in the context that ONNX hands it. ONNX's registry outlives the
    interpreter, and without the removal ONNX 1.19 crashed or hung at the end of the process, as it let go of a function
    of Python.
    """
    plugin.set_type_and_shape_inference_function(infer)
    onnx.defs.register_schema(plugin)
    atexit.register(onnx.defs.deregister_schema, plugin.name, plugin.since_version, plugin.domain)


def rewrite_nodes(graph: gs.Graph, change: Callable[[gs.Graph, gs.Node], str | None], *ops: str) -> PassResult:
    """Rewrites the nodes of some operators, in place.

    ``change`` returns an empty text for a rewritten node, the reason for a skipped near-match, and None for other
    nodes.
    """
    results = [(node.name, change(graph, node)) for node in [node for node in graph.nodes if node.op in ops]]
    count = sum(reason == "" for _, reason in results)
    if count:
        graph.cleanup().toposort()
    return PassResult(count, tuple(f"{name}: {reason}" for name, reason in results if reason))


@contextlib.contextmanager
def explained(name: str) -> Iterator[None]:
    """Turns library exceptions inside a pass into a ModelError that names the pass."""
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
    """Appends nodes to a graph and registers their origin; ``outer`` is the graph around a loop body.

    Nodes and tensors are named ``prefix/op_number``. If the graph uses the prefix already, "+" is appended to it.
    """

    def __init__(self, graph: gs.Graph, prefix: str, origin: Origin, outer: gs.Graph | None = None) -> None:
        self.graph = graph
        self.origin = origin
        self._registry = registry(graph if outer is None else outer)
        used_names = {node.name for node in graph.nodes} | set(graph.tensors())
        while any(name.startswith(f"{prefix}/") for name in used_names):
            prefix += "+"
        self.prefix = prefix
        self._numbers = itertools.count(1)

    def of(self, origin: Origin) -> Writer:
        """The same writer for nodes of another origin."""
        writer = copy.copy(self)
        writer.origin = origin
        return writer

    def const(self, value: ArrayLike, dtype: Any) -> gs.Constant:
        return gs.Constant(f"{self.prefix}/const_{next(self._numbers)}", np.array(value, dtype=dtype))

    def __call__(self, op: str, *inputs: gs.Tensor, **attrs: Any) -> gs.Variable:
        """Writes a node with one output and returns the output."""
        return self.many(op, 1, *inputs, **attrs)[0]

    def many(self, op: str, outputs: int, *inputs: gs.Tensor, **attrs: Any) -> list[gs.Variable]:
        """Writes a node with several outputs and returns them."""
        name = f"{self.prefix}/{op}_{next(self._numbers)}"
        tensors = [gs.Variable(f"{name}:{index}" if outputs > 1 else name) for index in range(outputs)]
        self.graph.nodes.append(gs.Node(op=op, name=name, attrs=attrs, inputs=list(inputs), outputs=tensors))
        self._registry[name] = self.origin
        return tensors


class NodeWriter:
    """Writes ONNX nodes that replace a node or feed it, named after its first output."""

    def __init__(self, node: onnx.NodeProto, kind: str = "") -> None:
        self.node = onnx.NodeProto.FromString(node.SerializeToString())  # a copy that may change
        self.nodes: list[onnx.NodeProto] = []
        self.replaced = False  # whether ``nodes`` replace the node
        self._kind = kind or node.op_type

    def const(self, value: ArrayLike, dtype: Any) -> str:
        return self("Constant", value=onnx.numpy_helper.from_array(np.array(value, dtype)))

    def __call__(self, op: str, *inputs: str, **attrs: Any) -> str:
        name = f"{self.node.output[0]}/{self._kind}/{op}_{len(self.nodes)}"
        self.nodes.append(onnx.helper.make_node(op, inputs, [name], name, **attrs))
        return name

    def instead(self) -> None:
        """Makes the last written node replace the node, with its name and output."""
        self.nodes[-1].output[0] = self.node.output[0]
        self.nodes[-1].name = self.node.name
        self.replaced = True

    def drop(self, *names: str) -> None:
        for attribute in [attribute for attribute in self.node.attribute if attribute.name in names]:
            self.node.attribute.remove(attribute)

    def put(self, name: str, value: Any) -> None:
        self.drop(name)
        self.node.attribute.append(onnx.helper.make_attribute(name, value))

    def input(self, index: int) -> str:
        return self.node.input[index] if index < len(self.node.input) else ""

    def feed(self, index: int, name: str) -> None:
        self.node.input.extend([""] * (index + 1 - len(self.node.input)))
        self.node.input[index] = name
