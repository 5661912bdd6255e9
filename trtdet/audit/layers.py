"""Reads the layers of an engine from the builder's log or from the text of the engine inspector."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from trtdet.backends import Built
from trtdet.backends.tensorrt.engine import onnx_nodes
from trtdet.errors import BackendError

BITS: Mapping[str, int] = {
    **dict.fromkeys(("FP4", "Int4"), 4),
    **dict.fromkeys(("Bool", "FP8", "Int8", "UInt8"), 8),
    **dict.fromkeys(("BFloat16", "Half"), 16),
    **dict.fromkeys(("Float", "Int32"), 32),
    **dict.fromkeys(("Double", "Int64"), 64),
}
"""Bits per value by the builder's name of the data type."""

NO_KERNEL = ("Constant", "NoOp", "signal", "wait")
"""Layer types without a kernel: constants, copies that became views, and events between streams."""

_LINE = re.compile(
    r"Name: (?P<name>.*?), LayerType: (?P<type>\w+), Inputs: \[(?P<inputs>.*?)\], Constants: \[(?P<constants>.*?)\], "
    r"Outputs: \[(?P<outputs>.*?)\], TacticName: .*?(?P<metadata>Metadata: .*)?$"
)
_TENSOR = re.compile(
    r"\{ Name: (?P<name>.*?), Dimensions: \[(?P<dims>[-\d,]*)\], .*?Datatype: (?P<type>\w+), Format: (?P<format>.*?) \}"
)
_ONNX = re.compile(r"\[ONNX Layer: ([^\]]*)\]")
_OTHER_PROFILE = re.compile(r"\[profile [1-9]\d*\]")
_TYPE_WORDS = {word.lower(): word for word in BITS} | {"fp16": "Half", "fp32": "Float", "fp4e2m1": "FP4"}
_WIDTHS = {"two": 2, "four": 4, "eight": 8, "sixteen": 16, "thirty-two": 32}
_WIDE = re.compile(r"\b(two|four|eight|sixteen|thirty-two) wide channel vectorized", re.IGNORECASE)
_MULTIPLE = re.compile(r"channel % (\d+) == 0")


@dataclass(frozen=True)
class Tensor:
    """A tensor of a layer, in the builder's words; two tensors with the same name use the same memory.

    ``type`` is such as ``Int8``, ``Half`` or ``Float``; ``format`` is the memory layout, empty if unknown. ``dims`` are
    the sizes of the part that the layer uses, (N, C, H, W) for feature maps; -1 for dynamic sizes.
    """

    name: str
    type: str
    dims: tuple[int, ...] = ()
    format: str = ""

    @cached_property
    def step(self) -> int:
        """The format pads the channels to a multiple of this number; 1 if it pads nothing."""
        wide, multiple = _WIDE.search(self.format), _MULTIPLE.search(self.format)
        if wide:
            return _WIDTHS[wide[1].lower()]
        return int(multiple[1]) if multiple else 1

    @cached_property
    def elements(self) -> int:
        """Number of values in memory with channel padding; a dynamic dimension counts as 1."""
        dims = [max(size, 1) for size in self.dims]
        if len(dims) > 2:
            dims[1] = -(-dims[1] // self.step) * self.step
        return math.prod(dims)

    @cached_property
    def bytes(self) -> int:
        """Bytes moved by one read or write; 0 if the size of the data type is unknown."""
        return -(-self.elements * BITS.get(self.type, 0) // 8)


@dataclass(frozen=True)
class Layer:
    """One layer of a built engine: name and kernel type in the builder's words, and its tensors.

    ``constants`` are weights, scales and other constants; ``onnx`` names the ONNX nodes, if the builder lists them.
    """

    name: str
    type: str
    inputs: tuple[Tensor, ...]
    constants: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    onnx: tuple[str, ...]

    @property
    def input(self) -> str:
        """Data type of the first input; empty without inputs."""
        return self.inputs[0].type if self.inputs else ""

    @property
    def weights(self) -> str:
        """Data type of the first constant; empty without constants."""
        return self.constants[0].type if self.constants else ""

    @property
    def output(self) -> str:
        """Data type of the first output; empty without outputs."""
        return self.outputs[0].type if self.outputs else ""

    @cached_property
    def bytes(self) -> int:
        """Bytes read and written per run; a part of a tensor that is listed twice counts once."""
        if self.type in NO_KERNEL:
            return 0
        return sum(
            tensor.bytes for part in (self.inputs, self.constants, self.outputs) for tensor in dict.fromkeys(part)
        )


def layers_of(built: Built) -> tuple[Layer, ...]:
    """The layers of an engine, from the inspector's text or, without one, from the builder's log. Raises BackendError
    if neither lists layers, or the inspector's text has an unknown schema."""
    layers = parse_inspector(built.layers) if built.layers else parse_layers(built.log)
    if not layers:
        raise BackendError("the builder listed no layers", "is the logger at VERBOSE and profiling verbosity DETAILED?")
    return layers


def parse_layers(log: Sequence[str]) -> tuple[Layer, ...]:
    """The layers that the builder of TensorRT-RTX logs at verbose level, in messages of one or several lines."""
    layers = []
    # Not splitlines(): TensorRT separates names by control characters that splitlines() takes for line ends.
    for line in "\n".join(log).split("\n"):
        line_parts = _LINE.match(line.strip())
        if line_parts is None:
            continue
        inputs, constants, outputs = (
            tuple(
                Tensor(
                    match["name"],
                    type=match["type"],
                    dims=tuple(int(size) for size in match["dims"].split(",") if size),
                    format=match["format"],
                )
                for match in _TENSOR.finditer(line_parts[part])
            )
            for part in ("inputs", "constants", "outputs")
        )
        name, kind, onnx = line_parts["name"], line_parts["type"], tuple(_ONNX.findall(line_parts["metadata"] or ""))
        layers.append(Layer(name, type=kind, inputs=inputs, constants=constants, outputs=outputs, onnx=onnx))
    return tuple(layers)


def parse_inspector(text: str) -> tuple[Layer, ...]:
    """The layers in the JSON of ``EngineInspector.get_engine_information``, of the first profile only.

    TensorRT 8.6 and 10 write one text ``Format/Datatype``, such as ``Thirty-two wide channel vectorized row major Int8
    format``, or just ``Half`` for layers that their compiler generated. TensorRT 11 has separate ``Datatype`` and
    ``Format`` and lists ``Constants``.

    Sources: NVIDIA/TensorRT, branch release/10.16, ``tools/experimental/trt-engine-explorer`` (sample engines);
    branch release/11.1, ``analyze-data.schema.json``; NVIDIA, "Migrating IEngineInspector Usage from TensorRT 10.x to
    11.x", TensorRT 11 documentation.

    Raises:
        BackendError: the text is not JSON, holds names only, or has another schema; the message quotes the keys.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BackendError(
            f"the engine inspector's text is not JSON ({error})", "ask it for LayerInformationFormat.JSON"
        ) from None
    listed = data.get("Layers") if isinstance(data, dict) else None
    if not isinstance(listed, list):
        met = ", ".join(sorted(data)) if isinstance(data, dict) else type(data).__name__
        raise BackendError(f"the engine inspector's text has no list 'Layers', but: {met or 'nothing'}")
    if any(isinstance(entry, str) for entry in listed):
        raise BackendError("the engine holds names of layers only", "build it with profiling verbosity DETAILED")
    return tuple(_inspected(entry) for entry in listed if not _OTHER_PROFILE.search(str(_get(entry, "Name"))))


def _inspected(entry: Any) -> Layer:
    name, kind = str(_get(entry, "Name")), str(_get(entry, "LayerType"))
    inputs, outputs = (tuple(_tensor(tensor) for tensor in _get(entry, key)) for key in ("Inputs", "Outputs"))
    constants = tuple(_tensor(tensor) for tensor in entry.get("Constants", ()))
    # TensorRT 8.6 and 10 count them instead of listing constants, under other names where a pooling is fused too.
    for key in ("Weights", "Bias", "ConvWeights", "ConvBias"):
        counted = entry.get(key)
        if isinstance(counted, dict) and counted.get("Count"):
            constants += (Tensor(key, _type_in(str(_get(counted, "Type"))), (int(counted["Count"]),)),)
    onnx = onnx_nodes(name, str(entry.get("Metadata") or ""))
    return Layer(name, type=kind, inputs=inputs, constants=constants, outputs=outputs, onnx=onnx)


def _tensor(entry: Any) -> Tensor:
    name, dims = str(_get(entry, "Name")), tuple(int(size) for size in _get(entry, "Dimensions"))
    if "Format/Datatype" in entry:
        both = str(entry["Format/Datatype"])
        return Tensor(name, type=_type_in(both), dims=dims, format=both)
    kind = entry.get("Datatype", entry.get("DataType"))
    if kind is None:
        raise _unknown("a tensor", entry)
    return Tensor(name, type=_type_in(str(kind)), dims=dims, format=str(entry.get("Format") or ""))


def _get(entry: Any, key: str) -> Any:
    if not isinstance(entry, dict) or key not in entry:
        raise _unknown("an entry", entry)
    return entry[key]


def _unknown(subject: str, entry: Any) -> BackendError:
    met = ", ".join(entry) if isinstance(entry, dict) else repr(entry)
    return BackendError(
        f"the engine inspector's text is of an unknown schema: {subject} has {met or 'no keys'}; known are the schemas "
        "of TensorRT 8.6 and 10 (Format/Datatype) and 11 (Datatype, Format)"
    )


def _type_in(text: str) -> str:
    """The data type in a text of type and format, spelled as in the builder's log; else the text itself."""
    for word in re.findall(r"\w+", text):
        if word.lower() in _TYPE_WORDS:
            return _TYPE_WORDS[word.lower()]
    return text
