"""Chooses the tensors to quantise, so that layers with weights run in INT8 and INT8 flows between them.

- The input of each convolution and of each product with a constant matrix, once per tensor. TensorRT moves this Q back
  through operators that commute with it: MaxPool, Concat, Slice, Reshape, Transpose, nearest Resize.
- The skip input of a residual Add of feature maps, if that tensor is quantised for a convolution anyway.
- On request both inputs of attention products; in float their kernels are fused with the softmax.

Normalisation, GELU, softmax and GridSample stay in float. Source: NVIDIA, "Working with Quantized Types", TensorRT
documentation, sections "Explicit Quantization" and "Q/DQ Layer-Placement Recommendations".
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import onnx
import onnx_graphsurgeon as gs

from trtdet.errors import ConfigError
from trtdet.passes.provenance import origin_of
from trtdet.passes.walk import maker
from trtdet.quantization.precision import Cause, Entry, PrecisionPlan
from trtdet.quantization.weighted import CONVOLUTIONS, PRODUCTS, is_layer

FEWEST_FEATURES = 16  # a matrix that is smaller on both sides rotates coordinates and mixes no features

_MOVES = ("Transpose", "Reshape", "Squeeze", "Unsqueeze")
_CONVOLUTION = Entry("int8", "convolution", Cause.QUANTIZABLE)
_PRODUCT = Entry("int8", "product with a matrix", Cause.QUANTIZABLE)
_ATTENTION = Entry("int8", "product of two activations", Cause.QUANTIZABLE)


@dataclass(frozen=True)
class QdqPlacement:
    """Positions of the Q/DQ pairs."""

    # ``int8`` for convolutions and products that can be quantised, ``fp32`` with a reason for the others.
    plan: PrecisionPlan
    activations: tuple[str, ...]  # tensors to quantise, in graph order
    # By tensor, the nodes and input positions that read the quantised copy.
    readers: dict[str, tuple[tuple[str, int], ...]]
    last: frozenset[str] = frozenset()  # the ``activations`` with channels on the last axis, because products read them

    @property
    def integers(self) -> QdqPlacement:
        """The positions in INT8, without FP8."""
        return self._without(self.plan.fp8)

    @property
    def floats(self) -> QdqPlacement:
        """The positions in FP8."""
        return self._without(set(self.plan.names("int8")) - self.plan.fp8)

    @property
    def attention(self) -> frozenset[str]:
        """Products of two activations; only these layers read a quantised copy at their second input."""
        reading = {name for readers in self.readers.values() for name, position in readers if position == 1}
        return frozenset(reading & self.plan.entries.keys())

    def _without(self, names: Collection[str]) -> QdqPlacement:
        others = {name: replace(self.plan.entries[name], precision="fp16") for name in names}
        return self.following(PrecisionPlan({**self.plan.entries, **others})) if others else self

    def following(self, plan: PrecisionPlan) -> QdqPlacement:
        """The same positions for a plan that keeps some of the layers in float. Raises ConfigError if the plan is of
        another model, or requests INT8 for a layer that cannot run in it."""
        unknown = sorted(plan.entries.keys() ^ self.plan.entries.keys())
        if unknown:
            raise ConfigError(
                f"the plan is of another model: '{unknown[0]}' ({len(unknown)} in all) is not a layer of both",
                "start from the plan.json of a bundle of this model",
            )
        for name, entry in plan.entries.items():
            here = self.plan.entries[name]
            if entry.precision == "int8" and here.precision != "int8":
                raise ConfigError(f"the plan asks for '{name}' in INT8, which cannot be: {here.reason}", "give it fp16")
        chosen, layers = set(plan.names("int8")), plan.entries
        readers = {
            tensor: tuple(reader for reader in places if reader[0] in chosen or reader[0] not in layers)
            for tensor, places in self.readers.items()
            if any(name in chosen for name, _ in places)
        }
        return QdqPlacement(plan, activations=tuple(readers), readers=readers, last=self.last & readers.keys())


def place(model: onnx.ModelProto, attention: bool = False, fp8: bool = False) -> QdqPlacement:
    """Finds the tensors to quantise in a float model, as the passes leave it: every node named, constants folded.
    ``attention`` also quantises products of two activations; ``fp8`` quantises products to FP8 instead of INT8."""
    graph = gs.import_onnx(model)
    # Decoding and NMS are no part of the model.
    written = {name for name, origin in origin_of(model).items() if not origin.replaces}
    entries: dict[str, Entry] = {}
    readers: dict[str, list[tuple[str, int]]] = {}
    last: set[str] = set()
    for node in graph.nodes:
        entry = None if node.op in PRODUCTS and node.name in written else _entry(node, attention)
        if entry is None:
            continue
        entries[node.name] = replace(entry, format="fp8") if fp8 and node.op in PRODUCTS else entry
        if entry.precision == "int8":
            for index, tensor in enumerate(node.inputs[: 2 if entry is _ATTENTION else 1]):
                readers.setdefault(tensor.name, []).append((node.name, index))
                last |= {tensor.name} if node.op in PRODUCTS else set()
    for node in graph.nodes:
        shapes = [list(tensor.shape or []) for tensor in node.inputs]
        residual = node.op == "Add" and shapes[0] == shapes[1] and len(shapes[0]) == 4
        if residual and not any(isinstance(tensor, gs.Constant) for tensor in node.inputs):
            quantized = [index for index, tensor in enumerate(node.inputs) if tensor.name in readers]
            if quantized:
                # Of two candidates the skip is the one with more readers.
                skip = max(quantized, key=lambda index: len(node.inputs[index].outputs))
                readers[node.inputs[skip].name].append((node.name, skip))
    return QdqPlacement(
        PrecisionPlan(entries),
        activations=tuple(readers),
        readers={name: tuple(places) for name, places in readers.items()},
        last=frozenset(last),
    )


def _entry(node: gs.Node, attention: bool) -> Entry | None:
    """The entry of a convolution, or of a product that can be quantised; None for all other nodes."""
    if node.op in PRODUCTS:
        constants = [isinstance(tensor, gs.Constant) for tensor in node.inputs[:2]]
        if not any(constants):
            return _ATTENTION if attention and node.op == "MatMul" else None
        mixes = max(node.inputs[constants.index(True)].values.shape, default=0) >= FEWEST_FEATURES
        able = constants == [False, True] and mixes and not after_softmax(node.inputs[0]) and is_layer(node)
        return _PRODUCT if able else None
    if node.op not in CONVOLUTIONS:
        return None
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
    return _CONVOLUTION


def after_softmax(tensor: gs.Tensor) -> bool:
    """Whether a tensor is a softmax, possibly moved; its sum with constant weights is an expectation."""
    producer = maker(tensor, "Softmax", *_MOVES)
    return producer is not None and (producer.op == "Softmax" or after_softmax(producer.inputs[0]))
