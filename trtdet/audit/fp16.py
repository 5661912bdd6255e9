"""What an engine would move if some of its INT8 convolutions were in FP16, estimated from its layers as they are."""

from __future__ import annotations

from collections.abc import Collection

from trtdet.audit.layers import Layer, Tensor
from trtdet.audit.traffic import ACTIVATION_FUNCTIONS, TYPE_CHANGES, Convolution, Flow

_FUSES = frozenset(
    (
        *ACTIVATION_FUNCTIONS,
        *TYPE_CHANGES,
        *("Add", "Concat", "Conv", "ConvTranspose", "Div", "Identity", "Max", "Min", "Mul", "Sub"),
    )
)
"""Operators that a builder takes into the kernel of an FP16 convolution; Concat, because its parts become views."""


def bytes_in_fp16(flow: Flow, names: Collection[str]) -> int:
    """What all layers would move, a run, were these convolutions in FP16.

    It assumes what builders were observed to do: an FP16 convolution reads and writes FP16, has the activation
    after it in its own kernel where nothing quantises the result, and a depthwise convolution pads no channels. A
    tensor that an INT8 convolution reads too stays INT8; a tensor that is no longer quantised for any convolution has
    for its other readers the type that the model dequantises to. Outputs of the engine stay float32.

    Args:
        flow: the engine.
        names: convolutions that it runs now in INT8; all convolutions of a layer are named together.
    """
    return _InFp16(flow, names).bytes


class _InFp16:
    def __init__(self, flow: Flow, names: Collection[str]) -> None:
        self._flow = flow
        self._half = {flow.convolutions[name].layer: flow.convolutions[name] for name in names}
        self._stays = self._needed_in_int8()
        self._fused = {index for index in range(len(flow.layers)) if self._fuses(index)}

    @property
    def bytes(self) -> int:
        total = 0
        for index, layer in enumerate(self._flow.layers):
            if index in self._half:
                total += self._convolution(layer, self._half[index])
            elif layer.bytes:
                total += self._neighbour(index, layer)
        return total

    def _needed_in_int8(self) -> set[str]:
        """INT8 tensors that an INT8 convolution reads still, itself or after layers that hand INT8 on."""
        stays: set[str] = set()
        for index in reversed(range(len(self._flow.layers))):
            layer = self._flow.layers[index]
            needed = any(tensor.name in stays for tensor in layer.outputs)
            if (index in self._flow.runs and index not in self._half) or (needed and self._hands_on(index)):
                stays |= {tensor.name for tensor in layer.inputs if tensor.type == "Int8"}
        return stays

    def _fuses(self, index: int) -> bool:
        """Whether a layer would become part of the FP16 convolutions before it."""
        flow, layer = self._flow, self._flow.layers[index]
        if index in flow.runs or not flow.operators(layer) <= _FUSES or "Slic" in layer.name:
            return False
        if any(tensor.name in self._stays or not flow.readers[tensor.name] for tensor in layer.outputs):
            return False
        makers = {maker for tensor in layer.inputs for maker in flow.writers[tensor.name] if maker in flow.runs}
        return bool(makers) and makers <= set(self._half)

    def _convolution(self, layer: Layer, convolution: Convolution) -> int:
        data, *others = layer.inputs
        values = data.elements / self._undone(convolution) + sum(tensor.elements for tensor in others)
        weights = sum(tensor.elements for tensor in layer.constants if tensor.type == "Int8")
        total = 2 * int(values + weights)
        for tensor in layer.outputs:
            readers = set(self._flow.readers[tensor.name])
            if not readers:
                total += 8 * tensor.elements  # written in FP16, read to be cast, written in float32
            elif not readers <= self._fused:
                total += 2 * tensor.elements
        return total

    def _neighbour(self, index: int, layer: Layer) -> int:
        handed = self._handed_to_half(index, layer)
        if handed is not None:
            return handed
        inside = index in self._fused
        total = 0 if inside else sum(tensor.bytes for tensor in dict.fromkeys(layer.constants))
        for tensor in dict.fromkeys(layer.inputs):
            if not inside or not set(self._flow.writers[tensor.name]) <= set(self._half):
                total += self._moved(tensor, tensor.elements)
        written: set[tuple[int, int]] = set()
        for tensor in dict.fromkeys(layer.outputs):
            takers = [self._half[reader] for reader in self._flow.readers[tensor.name] if reader in self._half]
            share = self._undone(takers[0]) if takers else 1.0
            values = int(tensor.elements / share)
            if tensor.name in self._stays or not takers:
                moved = self._moved(tensor, tensor.elements)
                total += 2 * values if takers else 0
            else:
                total -= 0 if inside else self._flow.filling(layer, tensor, share)
                moved = self._moved(tensor, values)
            # An INT8 and a float copy may have become the same copy.
            total += moved if tensor.bytes == moved or (values, moved) not in written else 0
            written.add((values, moved))
        return total

    def _handed_to_half(self, index: int, layer: Layer) -> int | None:
        """Bytes of a layer that hands INT8 on to an FP16 convolution, while its own input has other INT8 readers.

        What is cast to FP16 then is a float copy. None for all other layers.
        """
        takers = [
            self._half[reader]
            for tensor in layer.outputs
            for reader in self._flow.readers[tensor.name]
            if reader in self._half
        ]
        shared = any(tensor.name in self._stays for tensor in layer.inputs)
        if not takers or not shared or not self._hands_on(index):
            return None
        values = int(layer.outputs[0].elements / self._undone(takers[0]))
        kept = layer.bytes if layer.outputs[0].name in self._stays else 0
        cast = 0 if self._flow.float_bytes == 2 else 6 * values
        return kept + self._float_copy(index, values) + cast

    def _float_copy(self, index: int, values: int) -> int:
        """Bytes of a float copy of the INT8 that a layer hands on: the computing layers before it run again."""
        layer = self._flow.layers[index]
        source = layer.inputs[0]
        size = self._flow.float_bytes
        total = size * (source.elements + values) if self._flow.operators(layer) - _FUSES else 0
        makers = [writer for writer in self._flow.writers[source.name] if self._hands_on(writer)]
        return total + (self._float_copy(makers[0], source.elements) if makers else size * source.elements)

    def _moved(self, tensor: Tensor, values: int) -> int:
        """Bytes of so many values of a tensor in the type that they would have."""
        readers, writers = set(self._flow.readers[tensor.name]), set(self._flow.writers[tensor.name])
        if tensor.type == "Int8":
            if tensor.name in self._stays:
                return values
            if readers & (self._half.keys() | self._fused) or writers & self._fused:
                return 2 * values
            return self._flow.float_bytes * values if self._no_longer_quantised(writers) else values
        if tensor.type == "Float" and writers and readers and (writers <= self._half.keys() or writers <= self._fused):
            return 2 * values
        return tensor.bytes

    def _no_longer_quantised(self, writers: Collection[int]) -> bool:
        """Whether every convolution that a tensor was quantised for would be in FP16."""
        outputs = [tensor for index in writers for tensor in self._flow.layers[index].outputs if tensor.type == "Int8"]
        readers = {reader for tensor in outputs for reader in self._flow.readers[tensor.name]}
        return bool(readers & self._half.keys()) and not any(tensor.name in self._stays for tensor in outputs)

    def _hands_on(self, index: int) -> bool:
        """Whether a layer only passes INT8 on: pooling, joining, moving, filling up."""
        layer = self._flow.layers[index]
        types = {tensor.type for tensor in (*layer.inputs, *layer.outputs)}
        return bool(layer.inputs) and index not in self._flow.runs and types == {"Int8"}

    def _undone(self, convolution: Convolution) -> float:
        """The padding that FP16 would not have: that of few channels as a whole it has as well."""
        return self._flow.padding(convolution) if convolution.depthwise else 1.0
