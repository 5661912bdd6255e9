"""Which tensors are quantised, so that every layer with weights that can runs in INT8 and INT8 flows between them.

- The input of each convolution and of each product with a constant matrix, once per tensor however many read it:
  TensorRT moves that Q back through MaxPool, Concat, Slice, Reshape, Transpose and nearest Resize, because they commute
  with it, so these run in INT8 as well.
- The skip input of a residual Add of feature maps where that tensor is quantised for a convolution anyway: the Add then
  reads the INT8 copy instead of keeping a float one.
- Both inputs of the products in attention, where that is asked for: their kernels are fused with the softmax between
  them as long as they are in float.

What normalises, and GELU, softmax and GridSample, stay in float.

Source: NVIDIA, "Working with Quantized Types", TensorRT documentation, sections "Explicit Quantization" and "Q/DQ
Layer-Placement Recommendations".
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import onnx
import onnx_graphsurgeon as gs

from trtdet.errors import ConfigError
from trtdet.passes.provenance import origin_of
from trtdet.quantization.precision import Cause, Entry, PrecisionPlan
from trtdet.quantization.weighted import CONVOLUTIONS, PRODUCTS, channel_axis, obstacle

FEWEST_FEATURES = 16
"""A product with a matrix that is smaller on both sides turns coordinates and mixes no features."""

_CONVOLUTION = Entry("int8", "convolution", Cause.QUANTIZABLE)
_PRODUCT = Entry("int8", "product with a matrix", Cause.QUANTIZABLE)
_ATTENTION = Entry("int8", "product of two activations", Cause.QUANTIZABLE)


@dataclass(frozen=True)
class QdqPlacement:
    """Where Q/DQ pairs go.

    Attributes:
        plan: ``int8`` for each convolution and product that can be, ``fp32`` with a reason for each convolution that
            cannot.
        activations: tensors to quantise, in graph order.
        readers: by tensor, the nodes and input positions that read the quantised copy.
        skipped: near-matches that were left, each with its reason.
        last: those of ``activations`` whose channels are on the last axis, because products read them.
    """

    plan: PrecisionPlan
    activations: tuple[str, ...]
    readers: dict[str, tuple[tuple[str, int], ...]]
    skipped: tuple[str, ...]
    last: frozenset[str] = frozenset()

    @property
    def integers(self) -> QdqPlacement:
        """Of these the places in INT8, whose steps are equal: all but those in FP8."""
        return self._without(self.plan.fp8)

    @property
    def floats(self) -> QdqPlacement:
        """Of these the places in FP8."""
        return self._without(set(self.plan.names("int8")) - self.plan.fp8)

    @property
    def attention(self) -> frozenset[str]:
        """The products of two activations: of layers only these read a quantised copy at their second input."""
        reading = {name for readers in self.readers.values() for name, position in readers if position == 1}
        return frozenset(reading & self.plan.entries.keys())

    def _without(self, names: Collection[str]) -> QdqPlacement:
        others = {name: replace(self.plan.entries[name], precision="fp16") for name in names}
        return self.following(PrecisionPlan({**self.plan.entries, **others})) if others else self

    def following(self, plan: PrecisionPlan) -> QdqPlacement:
        """The same places for a plan that keeps some of the layers in float.

        Args:
            plan: an entry for each of this placement's layers, INT8 only where it is INT8 here.

        Raises:
            ConfigError: the plan is of another model, or asks for INT8 where there is none.
        """
        unknown = sorted(plan.entries.keys() ^ self.plan.entries.keys())
        if unknown:
            raise ConfigError(
                f"the plan is of another model: '{unknown[0]}' ({len(unknown)} in all) is not a layer of both"
            )
        for name, entry in plan.entries.items():
            here = self.plan.entries[name]
            if entry.precision == "int8" and here.precision != "int8":
                raise ConfigError(f"the plan asks for '{name}' in INT8, which cannot be: {here.reason}")
        chosen = set(plan.names("int8"))
        convs = set(plan.entries)
        readers = {}
        for tensor, found in self.readers.items():
            if any(name in chosen for name, _ in found):
                readers[tensor] = tuple(reader for reader in found if reader[0] in chosen or reader[0] not in convs)
        return QdqPlacement(plan, tuple(readers), readers, self.skipped, self.last & readers.keys())


def place(model: onnx.ModelProto, attention: bool = False, fp8: bool = False) -> QdqPlacement:
    """Finds where to quantise a float model.

    Args:
        model: as the passes leave it: every node named, constants folded.
        attention: quantise products of two activations as well.
        fp8: quantise products to FP8 instead of INT8.
    """
    graph = gs.import_onnx(model)
    # What decodes or suppresses is no part of the model.
    written = {name for name, origin in origin_of(model).items() if not origin.replaces}
    entries: dict[str, Entry] = {}
    readers: dict[str, list[tuple[str, int]]] = {}
    last: set[str] = set()
    skipped: list[str] = []
    for node in graph.nodes:
        if node.op in CONVOLUTIONS:
            entry = _obstacle(node) or _CONVOLUTION
        elif node.op in PRODUCTS and node.name not in written:
            found = _product(node, attention)
            if isinstance(found, str):
                skipped += [f"{node.name}: {found}"] if found else []
                continue
            entry = replace(found, format="fp8") if fp8 else found
        else:
            continue
        entries[node.name] = entry
        if entry.precision != "int8":
            continue
        for index, tensor in enumerate(node.inputs[: 2 if entry.reason == _ATTENTION.reason else 1]):
            readers.setdefault(tensor.name, []).append((node.name, index))
            last |= {tensor.name} if channel_axis(node) == -1 else set()
    for node in graph.nodes:
        if node.op != "Add":
            continue
        position, reason = _skip_input(node, readers)
        if reason:
            skipped.append(f"{node.name}: {reason}")
        if position is not None:
            readers[node.inputs[position].name].append((node.name, position))
    return QdqPlacement(
        PrecisionPlan(entries),
        tuple(readers),
        {name: tuple(found) for name, found in readers.items()},
        tuple(skipped),
        frozenset(last),
    )


def _product(node: gs.Node, attention: bool) -> Entry | str:
    """The entry of a product, or why it has none; empty where it is no near-match."""
    constants = [isinstance(tensor, gs.Constant) for tensor in node.inputs[:2]]
    if not any(constants):
        return _ATTENTION if attention and node.op == "MatMul" else ""
    sizes = node.inputs[constants.index(True)].values.shape
    if all(constants) or max(sizes, default=0) < FEWEST_FEATURES or after_softmax(node.inputs[0]):
        return ""
    if constants[0]:
        return "product: its constant is on the left, which no layer's weights are"
    reason = obstacle(node)
    return f"product: {reason}" if reason else _PRODUCT


def _obstacle(node: gs.Node) -> Entry | None:
    """The entry of a convolution that cannot run in INT8, None where it can."""
    if node.op == "ConvTranspose":
        reason = "transposed convolution: its per-channel weight axis is 1, which TensorRT builds but runs in float"
        return Entry("fp32", reason, Cause.TRANSPOSED)
    if not isinstance(node.inputs[1], gs.Constant):
        return Entry("fp32", "its weights are not constant", Cause.WEIGHTS_NOT_CONSTANT)
    if isinstance(node.inputs[0], gs.Constant):
        return Entry("fp32", "its input is constant", Cause.INPUT_CONSTANT)
    if after_softmax(node.inputs[0]):
        reason = "expectation of a softmax (distribution focal loss): it decodes boxes, which stay in float"
        return Entry("fp32", reason, Cause.DECODES_BOXES)
    return None


def after_softmax(tensor: gs.Tensor) -> bool:
    """Whether a tensor is a softmax, moved about at most: a sum over it with constant weights is an expectation."""
    while tensor.inputs:
        producer = tensor.inputs[0]
        if producer.op == "Softmax":
            return True
        if producer.op not in ("Transpose", "Reshape", "Squeeze", "Unsqueeze"):
            return False
        tensor = producer.inputs[0]
    return False


def _skip_input(node: gs.Node, readers: dict[str, list[tuple[str, int]]]) -> tuple[int | None, str]:
    """The position of a residual Add's skip input if it is quantised anyway; the reason where a near-match is not."""
    if any(isinstance(tensor, gs.Constant) for tensor in node.inputs):
        return None, ""
    shapes = [list(tensor.shape or []) for tensor in node.inputs]
    if shapes[0] != shapes[1] or len(shapes[0]) != 4:
        return None, ""
    quantized = [index for index, tensor in enumerate(node.inputs) if tensor.name in readers]
    if not quantized:
        return None, "residual sum: neither input is quantised for a convolution, so both are read in float"
    # Of two candidates the skip is the one that is also read elsewhere.
    return max(quantized, key=lambda index: len(node.inputs[index].outputs)), ""
