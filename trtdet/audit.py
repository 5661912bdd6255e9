"""What precision each convolution really got, read from the builder's own list of layers."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trtdet.backends import Built
from trtdet.errors import BackendError, BundleError
from trtdet.quantize import PrecisionPlan

_LAYER = re.compile(
    r"Name: (?P<name>.*?), LayerType: (?P<type>\w+), Inputs: \[(?P<inputs>.*?)\], Constants: \[(?P<constants>.*?)\], "
    r"Outputs: \[(?P<outputs>.*?)\], TacticName: .*?(?P<metadata>Metadata: .*)?$"
)
_DATATYPE = re.compile(r"Datatype: (\w+)")
_ONNX = re.compile(r"\[ONNX Layer: ([^\]]*)\]")
_POINTWISE = "kgen"
"""The layer type of the generated kernels that work element by element around a convolution."""
_SCHEMA = 1
_PRECISION = {"Int8": "int8", "Half": "fp16", "Float": "fp32"}


@dataclass(frozen=True)
class Layer:
    """One layer of a built engine.

    Attributes:
        name: the builder's.
        type: the builder's kind of kernel.
        input: data type of its first input, such as ``Int8``; empty where it has none.
        weights: data type of its first constant.
        output: data type of its first output.
        onnx: names of the ONNX nodes it came from.
    """

    name: str
    type: str
    input: str
    weights: str
    output: str
    onnx: tuple[str, ...]


@dataclass(frozen=True)
class Departure:
    """A convolution that the builder runs in another precision than planned."""

    name: str
    planned: str
    got: str
    reason: str


@dataclass(frozen=True)
class Audit:
    """The precisions of an engine's convolutions as built.

    Attributes:
        int8: how many convolutions read INT8.
        fp16: how many read FP16.
        fp32: how many read FP32.
        layers: every layer of the engine.
        departures: convolutions that are not what the plan says.
        warnings: what to look at, one sentence each.
    """

    int8: int
    fp16: int
    fp32: int
    layers: tuple[Layer, ...]
    departures: tuple[Departure, ...]
    warnings: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)

    def to_json(self) -> str:
        return json.dumps({"schema": _SCHEMA, **asdict(self)}, indent=1) + "\n"

    @staticmethod
    def load(path: Path) -> Audit:
        """Reads ``audit.json``.

        Raises:
            BundleError: it cannot be read or is of another schema.
        """
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if data.pop("schema") != _SCHEMA:
                raise BundleError(f"'{path}' was written by another version of trtdet; build the bundle again")
            layers = tuple(Layer(**{**layer, "onnx": tuple(layer["onnx"])}) for layer in data.pop("layers"))
            departures = tuple(Departure(**one) for one in data.pop("departures"))
            return Audit(**{**data, "warnings": tuple(data["warnings"])}, layers=layers, departures=departures)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise BundleError(f"'{path}' cannot be read ({error}); build the bundle again") from None


def parse_layers(log: Sequence[str]) -> tuple[Layer, ...]:
    """The layers that a builder at verbose level lists.

    Args:
        log: messages of the builder, which may hold several lines each.
    """
    layers = []
    # Not splitlines(): TensorRT parts the names of one layer with control characters that would count as line ends.
    for line in "\n".join(log).split("\n"):
        found = _LAYER.match(line.strip())
        if found is None:
            continue
        inputs, constants, outputs = (_DATATYPE.findall(found[part]) for part in ("inputs", "constants", "outputs"))
        layers.append(
            Layer(
                found["name"],
                found["type"],
                inputs[0] if inputs else "",
                constants[0] if constants else "",
                outputs[0] if outputs else "",
                tuple(_ONNX.findall(found["metadata"] or "")),
            )
        )
    return tuple(layers)


def audit(built: Built, plan: PrecisionPlan) -> Audit:
    """Compares what was built with what was planned.

    A convolution runs in the type of its first input: INT8 kernels take INT8 there and give float, which a pointwise
    kernel scales and quantises again.

    Raises:
        BackendError: the log lists no layers, so nothing can be said.
    """
    layers = parse_layers(built.log)
    if not layers:
        raise BackendError("the builder listed no layers; is the logger at VERBOSE and profiling verbosity DETAILED?")
    kernels: dict[str, Layer] = {}
    for layer in layers:
        for node in layer.onnx:
            # A pointwise kernel also names the convolutions around it; the convolution itself is never one.
            if node in plan.entries and (node not in kernels or kernels[node].type == _POINTWISE):
                kernels[node] = layer
    got = {name: _PRECISION.get(layer.input, layer.input.lower()) for name, layer in kernels.items()}
    departures = tuple(
        Departure(name, entry.precision, got.get(name, "unknown"), _reason(kernels.get(name)))
        for name, entry in plan.entries.items()
        if got.get(name) != entry.precision
    )
    found = list(got.values())
    warnings = tuple(f"'{one.name}' was planned as {one.planned} and runs in {one.got}" for one in departures)
    counts = {precision: found.count(precision) for precision in ("int8", "fp16", "fp32")}
    return Audit(**counts, layers=layers, departures=departures, warnings=warnings)


def _reason(kernel: Layer | None) -> str:
    if kernel is None:
        return "the builder names no layer for it: it was folded away or merged into another"
    return f"the builder chose a kernel of type {kernel.type}"
