"""What an engine would move if some of its INT8 convolutions were in FP16, estimated from its layers as they are."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from trtdet.audit.layers import Layer, Tensor
from trtdet.audit.traffic import ACTIVATION_FUNCTIONS, TYPE_CHANGES, Convolution, Flow

_FUSES = frozenset((*ACTIVATION_FUNCTIONS, *TYPE_CHANGES)) | frozenset(
    ("Add", "Concat", "Conv", "ConvTranspose", "Div", "Identity", "Max", "Min", "Mul", "Sub")
)
"""Operators that a builder fuses into an FP16 convolution; Concat, because its inputs become views of its output."""


@dataclass(frozen=True)
class Moved:
    """Bytes that a layer moves per run, for the batch of the engine; ``type`` is the data type that it reads.

    ``kernels`` are its launches: 0 if fused into a convolution or not needed, 2 if a separate cast follows.
    """

    activations: int
    constants: int
    kernels: int
    type: str

    @property
    def bytes(self) -> int:
        return self.activations + self.constants


class InFp16:
    """Predicts the memory traffic of an engine if the INT8 convolutions ``names`` ran in FP16.

    If a layer runs several convolutions, one of their names moves them all. The rules are what builders were observed
    to do. An FP16 convolution reads and writes FP16, and its kernel includes the activation after it unless the result
    is quantised. A depthwise FP16 convolution pads no channels. A tensor that an INT8 convolution also reads stays
    INT8. A tensor that no convolution needs in INT8 any more gets the type that the model dequantises to. Outputs of
    the engine stay float32. The traffic of a layer depends only on the convolutions around it.
    """

    def __init__(self, flow: Flow, names: Collection[str]) -> None:
        self._flow = flow
        self._half: Mapping[int, Convolution] = {
            flow.convolutions[name].layer: flow.convolutions[name] for name in names
        }
        # Tensors that stay INT8: an INT8 convolution still reads them, directly or through layers that pass INT8 on.
        self._needed: set[str] = set()
        for index, read, written in flow.int8_readers:
            if index in flow.runs:
                self._needed |= set() if index in self._half else read
            elif index in flow.hands_on and not self._needed.isdisjoint(written):
                self._needed |= read
        self._fused: dict[int, bool] = {}

    @property
    def bytes(self) -> int:
        """Bytes that all layers would move."""
        return sum(self.layer(index).bytes for index in range(len(self._flow.layers)))

    def layer(self, index: int) -> Moved:
        layer = self._flow.layers[index]
        if not layer.bytes:
            return Moved(0, constants=0, kernels=0, type=layer.input)
        if index in self._half:
            return self._convolution(layer, self._half[index])
        passed_on, inside = self._passed_to_fp16(index, layer), self._fuses(index)
        if self._only_renames(layer, inside):
            return Moved(0, constants=0, kernels=0, type=layer.input)
        constants = 0 if inside else sum(tensor.bytes for tensor in dict.fromkeys(layer.constants))
        if passed_on is not None:
            constants = min(constants, passed_on)
            return Moved(passed_on - constants, constants=constants, kernels=1, type=layer.input)
        total = 0
        for tensor in dict.fromkeys(layer.inputs):
            if not inside or not set(self._flow.writers[tensor.name]) <= self._half.keys():
                total += self._moved(tensor, tensor.elements)
        written: set[tuple[int, int]] = set()
        for tensor in dict.fromkeys(layer.outputs):
            readers = self._fp16_readers(tensor)
            share = self._removed_padding(readers[0]) if readers else 1.0
            values = int(tensor.elements / share)
            if tensor.name in self._needed or not readers:
                moved = self._moved(tensor, tensor.elements)
                total += 2 * values if readers else 0
            else:
                constants -= 0 if inside else self._flow.filling(layer, tensor, share)
                moved = self._moved(tensor, values)
            # What were an INT8 and a float copy may now be the same tensor.
            total += moved if tensor.bytes == moved or (values, moved) not in written else 0
            written.add((values, moved))
        return Moved(total, constants=constants, kernels=int(not inside and total > 0), type=layer.input)

    def _fp16_readers(self, tensor: Tensor) -> list[Convolution]:
        return [self._half[reader] for reader in self._flow.readers[tensor.name] if reader in self._half]

    def fused_layers(self, index: int) -> tuple[int, ...]:
        """The layers that would be fused into the kernel of a convolution's layer; each is fused into one kernel."""
        if index not in self._half:
            return ()
        readers = (reader for tensor in self._flow.layers[index].outputs for reader in self._flow.readers[tensor.name])
        return tuple(
            reader for reader in dict.fromkeys(readers) if self._fuses(reader) and max(self._makers(reader)) == index
        )

    def _makers(self, index: int) -> set[int]:
        """The convolution layers that write the inputs of a layer."""
        tensors = self._flow.layers[index].inputs
        return {maker for tensor in tensors for maker in self._flow.writers[tensor.name] if maker in self._flow.runs}

    def _fuses(self, index: int) -> bool:
        """Whether a layer would be fused into the FP16 convolutions before it."""
        if index not in self._fused:
            flow, layer, makers = self._flow, self._flow.layers[index], self._makers(index)
            self._fused[index] = (
                bool(makers)
                and index not in flow.runs
                and makers <= self._half.keys()
                and flow.operators(layer) <= _FUSES
                and "Slic" not in layer.name
                and not any(out.name in self._needed or not flow.readers[out.name] for out in layer.outputs)
            )
        return self._fused[index]

    def _only_renames(self, layer: Layer, inside: bool) -> bool:
        """Whether a layer only quantises a tensor that is there in FP16 anyway, for FP16 convolutions alone."""
        flow = self._flow
        if (
            not layer.onnx
            or not flow.operators(layer) <= set(TYPE_CHANGES)
            or {one.type for one in layer.outputs} != {"Int8"}
        ):
            return False
        if any(tensor.name in self._needed or not self._fp16_readers(tensor) for tensor in layer.outputs):
            return False
        if not inside:
            return layer.input == "Half"
        return not all(self._fuses(reader) for tensor in layer.inputs for reader in flow.readers[tensor.name])

    def _convolution(self, layer: Layer, convolution: Convolution) -> Moved:
        data, *added = layer.inputs
        total = 2 * int(data.elements / self._removed_padding(convolution) + sum(tensor.elements for tensor in added))
        kernels = 1
        for tensor in layer.outputs:
            readers = self._flow.readers[tensor.name]
            if not readers:
                total += 8 * tensor.elements  # written in FP16, read to be cast, written in float32
                kernels = 2
            elif not all(map(self._fuses, readers)):
                total += 2 * tensor.elements
        weights = sum(tensor.elements for tensor in layer.constants if tensor.type == "Int8")
        return Moved(total, constants=2 * weights, kernels=kernels, type="Half")

    def _passed_to_fp16(self, index: int, layer: Layer) -> int | None:
        """Bytes of a layer that passes INT8 on to an FP16 convolution if an INT8 convolution also reads its input.

        Such a layer casts a float copy to FP16. None for all other layers.
        """
        readers = [reader for tensor in layer.outputs for reader in self._fp16_readers(tensor)]
        kept = any(tensor.name in self._needed for tensor in layer.inputs)
        if not readers or not kept or index not in self._flow.hands_on:
            return None
        values = int(layer.outputs[0].elements / self._removed_padding(readers[0]))
        int8 = layer.bytes if layer.outputs[0].name in self._needed else 0
        cast = 0 if self._flow.float_bytes == 2 else 6 * values
        return int8 + self._float_copy(index, values) + cast

    def _float_copy(self, index: int, values: int) -> int:
        """Bytes of a float copy of what a layer passes on in INT8: the computing layers before it run again."""
        layer = self._flow.layers[index]
        source = layer.inputs[0]
        size = self._flow.float_bytes
        total = size * (source.elements + values) if self._flow.operators(layer) - _FUSES else 0
        makers = [writer for writer in self._flow.writers[source.name] if writer in self._flow.hands_on]
        return total + (self._float_copy(makers[0], source.elements) if makers else size * source.elements)

    def _moved(self, tensor: Tensor, values: int) -> int:
        """Bytes of this many values of a tensor in the type that they would have."""
        readers, writers = set(self._flow.readers[tensor.name]), set(self._flow.writers[tensor.name])
        if tensor.type == "Int8":
            if tensor.name in self._needed:
                return values
            if readers & self._half.keys() or any(map(self._fuses, (*readers, *writers))):
                return 2 * values
            # A tensor is no longer quantised once all its convolutions run in FP16.
            quantised = [
                output for index in writers for output in self._flow.layers[index].outputs if output.type == "Int8"
            ]
            copy_readers = {reader for output in quantised for reader in self._flow.readers[output.name]}
            if copy_readers & self._half.keys() and not any(output.name in self._needed for output in quantised):
                return self._flow.float_bytes * values
            return values
        between = tensor.type == "Float" and writers and readers
        if between and (writers <= self._half.keys() or all(map(self._fuses, writers))):
            return 2 * values
        return tensor.bytes

    def _removed_padding(self, convolution: Convolution) -> float:
        """Factor of channel padding that FP16 avoids: 1 except for depthwise convolutions."""
        return self._flow.padding(convolution) if convolution.depthwise else 1.0
