"""Which tensors are quantised, so that every convolution that can runs in INT8 and INT8 flows between them.

- The input of each convolution, once per tensor however many read it: TensorRT moves that Q back through MaxPool,
  Concat, Slice, Reshape, Transpose and nearest Resize, because they commute with it, so these run in INT8 as well.
- The skip input of a residual Add where that tensor is quantised for a convolution anyway: the Add then reads the
  INT8 copy instead of keeping a float one.

Source: NVIDIA, "Working with Quantized Types", TensorRT documentation, sections "Explicit Quantization" and "Q/DQ
Layer-Placement Recommendations".
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx
import onnx_graphsurgeon as gs

from trtdet.errors import ConfigError
from trtdet.quantization.precision import Cause, Entry, PrecisionPlan

CONVOLUTIONS = ("Conv", "ConvTranspose")


@dataclass(frozen=True)
class QdqPlacement:
    """Where Q/DQ pairs go.

    Attributes:
        plan: ``int8`` for each convolution that can be, ``fp32`` with a reason for each that cannot.
        activations: tensors to quantise, in graph order.
        readers: by tensor, the nodes and input positions that read the quantised copy.
        skipped: near-matches that were left, each with its reason.
    """

    plan: PrecisionPlan
    activations: tuple[str, ...]
    readers: dict[str, tuple[tuple[str, int], ...]]
    skipped: tuple[str, ...]

    def following(self, plan: PrecisionPlan) -> QdqPlacement:
        """The same places for a plan that keeps some of the convolutions in float.

        Args:
            plan: an entry for each of this placement's convolutions, INT8 only where it is INT8 here.

        Raises:
            ConfigError: the plan is of another model, or asks for INT8 where there is none.
        """
        unknown = sorted(plan.entries.keys() ^ self.plan.entries.keys())
        if unknown:
            raise ConfigError(
                f"the plan is of another model: '{unknown[0]}' ({len(unknown)} in all) is not a convolution of both"
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
        return QdqPlacement(plan, tuple(readers), readers, self.skipped)


def place(model: onnx.ModelProto) -> QdqPlacement:
    """Finds where to quantise a float model.

    Args:
        model: as the passes leave it: every node named, constants folded.
    """
    graph = gs.import_onnx(model)
    entries: dict[str, Entry] = {}
    readers: dict[str, list[tuple[str, int]]] = {}
    for node in graph.nodes:
        if node.op not in CONVOLUTIONS:
            continue
        obstacle = _obstacle(node)
        if obstacle is not None:
            entries[node.name] = obstacle
            continue
        entries[node.name] = Entry("int8", "convolution", Cause.QUANTIZABLE)
        readers.setdefault(node.inputs[0].name, []).append((node.name, 0))
    skipped: list[str] = []
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
    )


def _obstacle(node: gs.Node) -> Entry | None:
    """The entry of a convolution that cannot run in INT8, None where it can."""
    if node.op == "ConvTranspose":
        reason = "transposed convolution: its per-channel weight axis is 1, which TensorRT builds but runs in float"
        return Entry("fp32", reason, Cause.TRANSPOSED)
    if not isinstance(node.inputs[1], gs.Constant):
        return Entry("fp32", "its weights are not constant", Cause.WEIGHTS_NOT_CONSTANT)
    if isinstance(node.inputs[0], gs.Constant):
        return Entry("fp32", "its input is constant", Cause.INPUT_CONSTANT)
    if _after_softmax(node.inputs[0]):
        reason = "expectation of a softmax (distribution focal loss): it decodes boxes, which stay in float"
        return Entry("fp32", reason, Cause.DECODES_BOXES)
    return None


def _after_softmax(tensor: gs.Tensor) -> bool:
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
