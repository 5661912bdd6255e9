"""Takes a model with Q/DQ pairs of another tool apart: its float form, and the integers and scales of its pairs.

The float form goes through the same passes as any float model, and then :meth:`QuantizedInput.placed` finds the layers
again by name. It keeps the pairs of layer inputs and of skips of residual sums, which is where
:mod:`trtdet.quantization.placement` puts pairs; all others only cost time and accuracy.

Weights are taken as integer constants before a DequantizeLinear (ModelOpt, onnxruntime, NNCF) or as float constants
before a pair (pytorch-quantization, brevitas), biases also as INT32 constants before a DequantizeLinear.

A pair whose range is not symmetric, as of UINT8 or with a zero point, has no counterpart in TensorRT: it becomes the
symmetric INT8 pair that covers the same range.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from numpy.typing import NDArray

from trtdet.errors import ModelError
from trtdet.passes.base import explained
from trtdet.passes.clean import fold, name_nodes
from trtdet.passes.model import to_graph, to_model
from trtdet.passes.protobuf import add_metadata
from trtdet.passes.walk import PAIR, above, constant, maker, read_instead, redirect
from trtdet.quantization.encoding import Rounded, half_step
from trtdet.quantization.pair_check import COMMUTING, PairProblem, check_pairs
from trtdet.quantization.placement import QdqPlacement, place
from trtdet.quantization.precision import Cause, Entry, PrecisionPlan
from trtdet.quantization.qdq import Corrections
from trtdet.quantization.weighted import PRODUCTS, Weighted

_AGAIN = "quantise the float model again with INT8, one scale for each activation"
_RANGES = {"int8": (-128, 127), "uint8": (0, 255), "int32": (-(2**31), 2**31 - 1)}
_NEAR = 0.01  # distance of a weight from its integer, in steps, that rounding of float32 explains


@dataclass(frozen=True, eq=False)
class OwnScales:
    """The pairs of a quantised model that a network keeps.

    Attributes:
        steps: scale of each layer's input and of each skip, by node and input position.
        weights: by layer.
        problems: places where the pairs of the model cost time.
        key: hash of the pairs.
    """

    steps: Mapping[tuple[str, int], np.float32]
    weights: Mapping[str, Rounded]
    problems: tuple[PairProblem, ...]
    key: str

    def corrections(self, half: bool, rescaled: bool = False) -> Corrections:
        """The numbers of the pairs to write.

        Args:
            half: the pairs take FP16 scales; each scale becomes the nearest FP16 number.
            rescaled: without the scales of activations, which the ranges then give.
        """
        steps, weights = self.steps, self.weights
        if half:
            steps = {place: np.float32(half_step(step, up=False)) for place, step in steps.items()}
            weights = {
                name: replace(rounded, scales=half_step(rounded.scales, up=False)) for name, rounded in weights.items()
            }
        return Corrections(weights=weights, steps={} if rescaled else steps)

    def problems_for(self, half: bool) -> tuple[PairProblem, ...]:
        """The problems, and that of scales that rounding to FP16 changes, if the network has FP16 scales (``half``)."""
        scales = np.concatenate([[*self.steps.values()], *(one.scales for one in self.weights.values())])
        moved = np.abs(half_step(scales, up=False) / scales.astype(np.float64) - 1)
        if not half or not moved.any():
            return self.problems
        text = f"{np.count_nonzero(moved)} of {moved.size} scales are rounded to FP16, as the library takes no others "
        text += f"between FP16 values, by at most {moved.max():.2%}; a model with FP16 scales is taken to the bit"
        return (*self.problems, PairProblem("fp16-scales", (), text))


@dataclass(frozen=True, eq=False)
class _Weights:
    """Integers int8 (out, ...) and scales float32 (out,) of a layer's weights."""

    integers: NDArray[np.int8]
    scales: NDArray[np.float32]

    def rounded(self, layer: Weighted) -> Rounded | None:
        """The weights of the layer after the passes, which may have multiplied each output channel, as folded batch
        normalisations do. None if they changed otherwise."""
        rows, values = self.integers.reshape(len(self.scales), -1), layer.weight.astype(np.float64)
        if layer.weight.shape != self.integers.shape:
            return None
        largest = np.abs(rows.astype(np.int16)).argmax(axis=1)[:, None]
        whole = np.take_along_axis(rows, largest, 1)[:, 0]
        exact = (whole * self.scales).astype(np.float64)
        now = np.take_along_axis(values.reshape(rows.shape), largest, 1)[:, 0]
        factor = np.divide(now, exact, out=np.ones_like(exact), where=exact != 0)
        scales = np.where(factor == 0, self.scales, self.scales * np.abs(factor)).astype(np.float32)
        integers = np.clip(rows * np.sign(factor)[:, None], -128, 127).astype(np.int8)
        distance = np.abs(values.reshape(rows.shape) / scales[:, None] - integers).max(initial=0.0)
        return Rounded(integers.reshape(layer.weight.shape), scales, layer.bias) if distance < _NEAR else None


@dataclass(frozen=True, eq=False)
class QuantizedInput:
    """A quantised model, taken apart.

    Attributes:
        model: the float form: without pairs, with weights at the steps of their scales, every node named.
        problems: see :func:`trtdet.quantization.pair_check.check_pairs`.
    """

    model: onnx.ModelProto
    problems: tuple[PairProblem, ...]
    _steps: Mapping[tuple[str, int], np.float32] = field(default_factory=dict)
    _weights: Mapping[str, _Weights] = field(default_factory=dict)

    def placed(self, model: onnx.ModelProto) -> tuple[QdqPlacement, OwnScales]:
        """The positions of the pairs in ``model``, the float form after the passes: layers whose input and weights are
        quantised are in INT8, all others in float. Raises ModelError if no layer is left in INT8."""
        able = place(model, attention=True)
        layers = Weighted.by_name(gs.import_onnx(model).nodes)
        weights: dict[str, Rounded] = {}
        entries: dict[str, Entry] = {}
        problems = list(self.problems)
        for name, entry in able.plan.entries.items():
            inputs, own = ((0, 1) if name in able.attention else (0,)), self._weights.get(name)
            given = all((name, position) in self._steps for position in inputs)
            rounded = own.rounded(layers[name]) if own is not None and name in layers else None
            if rounded is not None:
                weights[name] = rounded
            elif given and own is not None and entry.precision == "int8":
                text = f"the weights of '{name}' changed while the graph was rewritten, so that it stays in float"
                problems.append(
                    PairProblem("missing-pair", (name,), f"{text}; simplify the model and quantise it again")
                )
            if entry.precision == "int8" and given and (rounded is not None or name in able.attention):
                entries[name] = replace(entry, reason="quantised in the model")
            elif entry.precision == "int8":
                entries[name] = Entry("fp16", "not quantised in the model", Cause.FLOAT_IN_MODEL)
            else:
                entries[name] = entry
        readers = {
            tensor: tuple(place for place in places if place in self._steps) for tensor, places in able.readers.items()
        }
        placement = replace(able, plan=PrecisionPlan(entries), readers=readers).following(PrecisionPlan(entries))
        # A float product of two activations is no layer of a plan.
        floats = {name for name in able.attention if entries[name].precision != "int8"}
        plan = PrecisionPlan({name: entry for name, entry in entries.items() if name not in floats})
        if not plan.names("int8"):
            raise ModelError(
                "no layer of the quantised model can run in INT8: a layer needs a pair on its input and on its weights",
                "give the float model it was made from",
            )
        kept = {place for places in placement.readers.values() for place in places}
        steps = {place: step for place, step in self._steps.items() if place in kept}
        weights = {name: one for name, one in weights.items() if name in plan.names("int8")}
        digest = hashlib.sha256(repr([sorted(steps.items()), problems]).encode())
        Corrections(weights=weights).hash_into(digest)
        return replace(placement, plan=plan), OwnScales(steps, weights, tuple(problems), key=digest.hexdigest())


def take_apart(model: onnx.ModelProto) -> QuantizedInput:
    """Splits a model with Q/DQ pairs into its float form and its integers and scales.

    Raises:
        ModelError: a pair is not symmetric INT8 with constant scales, one for each activation tensor.
    """
    types = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    for node in model.graph.node:
        types.update((node.output[0], each.t.data_type) for each in node.attribute if each.name == "value")
    with explained("pairs"):
        graph = to_graph(onnx.shape_inference.infer_shapes(model))
        name_nodes(graph)
        for node in graph.nodes:
            if node.op in PAIR:
                _check_type(node, types)
        fold(graph)
        _drop_clips(graph)
        pairs = {id(node): _Pair.of(node) for node in graph.nodes if node.op == "DequantizeLinear"}
        _check_integers(graph)
        problems, steps, weights = check_pairs(graph), _steps(graph, pairs), _weights(graph, pairs)
        widened = [pair for pair in pairs.values() if np.any(pair.widened > 1)]
        if widened:
            problems = (*problems, _asymmetric(widened))
        for pair in pairs.values():
            if isinstance(pair.source, gs.Constant):
                tensor, values = pair.node.outputs[0], gs.Constant(f"{pair.node.name}/values", pair.values)
                read_instead(list(tensor.outputs), tensor, values)
            else:
                redirect(graph, pair.node.outputs[0], pair.source)
            pair.node.outputs.clear()
        _raise_halves(graph)
        graph.cleanup()
        twin = to_model(graph)
    add_metadata(twin, model)
    return QuantizedInput(twin, problems, steps, _weights=weights)


@dataclass(frozen=True, eq=False)
class _Pair:
    """A DequantizeLinear ``node`` with what it reads; ``source`` is the float tensor, or the constant.

    ``scale`` is that of the symmetric pair that covers the range, and ``widened`` this scale divided by the model's
    own, 1 for a symmetric pair. ``integers`` are those of a constant in the symmetric pair.
    """

    node: gs.Node
    source: gs.Tensor
    scale: NDArray[np.float32]  # () or (C,)
    axis: int
    widened: NDArray[np.float64]  # likewise
    integers: NDArray[Any]

    @staticmethod
    def of(node: gs.Node) -> _Pair:
        quantizer = maker(node.inputs[0], "QuantizeLinear")
        source = node.inputs[0] if quantizer is None else quantizer.inputs[0]
        scale, zero, kind = _scale(node)
        axis = int(node.attrs.get("axis", 1))
        if quantizer is not None:
            others = _scale(quantizer)
            if not np.array_equal(scale, others[0]) or not np.array_equal(zero, others[1]):
                raise _problem(node, f"has another scale than QuantizeLinear '{quantizer.name}' before it", _AGAIN)
            kind = others[2]
        elif isinstance(source, gs.Constant):
            kind = source.values.dtype.name
        else:
            raise _problem(node, "reads integers that no QuantizeLinear makes", "give the model with whole pairs")
        low, high = _RANGES[kind]
        if not isinstance(source, gs.Constant):
            if scale.ndim:
                raise _problem(node, f"has {scale.size} scales of an activation, a scale for each channel", _AGAIN)
            exact, largest = np.zeros(0, np.int64), np.maximum(zero - low, high - zero)
        else:  # the integers that are there, not all that could be
            exact = _steps_from_zero(source.values, scale, zero, axis=axis, kind=kind)
            others_axes = tuple(at for at in range(exact.ndim) if not scale.ndim or at != axis % exact.ndim)
            largest = np.abs(exact).max(axis=others_axes, initial=0)
        widened = np.where(largest > 128, largest / 127, 1.0) if kind != "int32" else np.ones_like(scale, np.float64)
        whole = np.rint(exact / _spread(widened, axis, exact.ndim))
        integers = whole.astype(np.int32) if kind == "int32" else np.clip(whole, -128, 127).astype(np.int8)
        wide = (scale * widened).astype(np.float32)
        return _Pair(node, source, wide, axis=axis, widened=widened, integers=integers)

    @property
    def values(self) -> NDArray[np.floating]:
        """A constant at the steps of its scale."""
        return np.asarray(self.integers.astype(np.float32) * _spread(self.scale, self.axis, self.integers.ndim))


def _steps_from_zero(
    values: NDArray[Any], scale: NDArray[np.float32], zero: NDArray[np.int64], axis: int, kind: str
) -> NDArray[np.int64]:
    """How many of its steps each value of a constant is from 0; ``values`` are integers, or floats before a pair."""
    offset = _spread(zero, axis, values.ndim)
    if np.issubdtype(values.dtype, np.integer):
        return np.asarray(values.astype(np.int64) - offset)
    low, high = _RANGES[kind]
    whole = np.rint(values.astype(np.float32) / _spread(scale, axis, values.ndim)).astype(np.int64)
    return np.asarray(np.clip(whole, low - offset, high - offset))


def _spread(per_channel: NDArray[Any], axis: int, rank: int) -> NDArray[Any]:
    """A number () or one for each channel (C,), to broadcast with ``rank`` axes."""
    return per_channel.reshape([-1 if at == axis % rank else 1 for at in range(rank)] if per_channel.ndim else [])


def _asymmetric(pairs: Sequence[_Pair]) -> PairProblem:
    """Says what symmetric pairs cost in the place of others."""
    most = max(float(pair.widened.max()) for pair in pairs)
    text = (
        f"{len(pairs)} pairs have zero points or UINT8, which TensorRT does not take: symmetric INT8 pairs of the same "
        f"range take their place, with steps up to {most:.2f} times as large"
    )
    hint = "choose the ranges anew on images with calibration.rescale=true, or quantise with symmetric INT8"
    return PairProblem("asymmetric", tuple(pair.node.name for pair in pairs), f"{text}; {hint}")


def _problem(node: gs.Node, problem: str, hint: str) -> ModelError:
    return ModelError(f"{node.op} '{node.name}' {problem}", hint)


def _check_type(node: gs.Node, types: Mapping[str, int]) -> None:
    """Refuses other integers than INT8, and INT32 of biases; types are read here, as NumPy lacks some of them."""
    zero = node.inputs[2].name if len(node.inputs) > 2 else ""
    kind = types.get(zero or node.inputs[0].name if node.op == "DequantizeLinear" else zero)
    if node.attrs.get("output_dtype") and node.op == "QuantizeLinear":
        kind = node.attrs["output_dtype"]
    elif kind is None and node.op == "QuantizeLinear" and not zero:
        kind = onnx.TensorProto.UINT8  # ONNX's default
    if kind is not None:
        _check_int8(node, onnx.TensorProto.DataType.Name(kind).lower())
    if node.attrs.get("block_size"):
        raise _problem(node, "has a scale for each block", _AGAIN)


def _check_int8(node: gs.Node, kind: str) -> None:
    if kind not in _RANGES or (kind == "int32" and node.op == "QuantizeLinear"):
        raise _problem(node, f"is of type {kind}, int8 or uint8 is needed", _AGAIN)


def _scale(node: gs.Node) -> tuple[NDArray[np.float32], NDArray[np.int64], str]:
    """A node's scale float32 () or (C,), its zero point of the same shape, and the integers' type."""
    scale, *given = node.inputs[1:]
    if not all(isinstance(tensor, gs.Constant) for tensor in (scale, *given)):
        raise _problem(node, "has a scale or zero point that is computed from the image", _AGAIN)
    kind = given[0].values.dtype.name if given else "uint8"
    if given:
        _check_int8(node, kind)
    values: NDArray[np.float32] = np.asarray(scale.values).astype(np.float32)
    if not np.all(np.isfinite(values) & (values > 0)):
        raise _problem(node, "has a scale that is not over 0 and finite", _AGAIN)
    values = values.reshape(()) if values.size == 1 else values
    zero = np.asarray(given[0].values, np.int64).reshape(-1) if given else np.zeros(1, np.int64)
    if zero.size not in (1, values.size):
        raise _problem(node, f"has {zero.size} zero points for {values.size} scales", _AGAIN)
    return values, np.broadcast_to(zero, (values.size,)).reshape(values.shape), kind


def _drop_clips(graph: gs.Graph) -> None:
    """Removes what brevitas writes between Q and DQ to leave -128 out."""
    for clip in [node for node in graph.nodes if node.op == "Clip" and maker(node.inputs[0], "QuantizeLinear")]:
        if (constant(clip, 1), constant(clip, 2)) not in ((-128, 127), (-127, 127)):
            raise _problem(clip, "keeps fewer than 8 bits of its integers", _AGAIN)
        redirect(graph, clip.outputs[0], clip.inputs[0])
        clip.inputs.clear()
        clip.outputs.clear()


def _raise_halves(graph: gs.Graph) -> None:
    """Makes FP16 between pairs float32, as the plan decides what runs in FP16: constants, and casts between floats."""
    for node in graph.nodes:
        for position, tensor in enumerate(node.inputs):
            if isinstance(tensor, gs.Constant) and tensor.values.dtype == np.float16:
                node.inputs[position] = gs.Constant(f"{tensor.name}/float", tensor.values.astype(np.float32))
        if node.op == "Cast" and node.attrs["to"] == onnx.TensorProto.FLOAT16:
            node.attrs["to"] = onnx.TensorProto.FLOAT
    casts = [node for node in graph.nodes if node.op == "Cast" and node.attrs["to"] == onnx.TensorProto.FLOAT]
    for cast in casts:
        if cast.inputs[0].dtype in (np.float16, np.float32) and isinstance(cast.inputs[0], gs.Variable):
            redirect(graph, cast.outputs[0], cast.inputs[0])
            cast.outputs.clear()
    for tensor in graph.tensors().values():
        if isinstance(tensor, gs.Variable) and tensor.dtype == np.float16:
            tensor.dtype = np.float32


def _check_integers(graph: gs.Graph) -> None:
    """Refuses integers that something else than a DequantizeLinear reads."""
    for node in graph.nodes:
        if node.op == "QuantizeLinear":
            stranger = next((each for each in node.outputs[0].outputs if each.op != "DequantizeLinear"), None)
            if stranger is not None or node.outputs[0] in graph.outputs:
                reader = "an output of the model" if stranger is None else f"{stranger.op} '{stranger.name}'"
                raise _problem(node, f"is read by {reader}", "put a DequantizeLinear directly behind it")


def _steps(graph: gs.Graph, pairs: Mapping[int, _Pair]) -> dict[tuple[str, int], np.float32]:
    """The scale of each input that is quantised, by node and position; a tensor's scale also holds behind operators
    that only move values."""
    steps = {}
    for node in graph.nodes:
        for position, tensor in enumerate(node.inputs):
            source = maker(above(tensor, *COMMUTING))
            pair = pairs.get(id(source))
            if pair is not None and not isinstance(pair.source, gs.Constant):
                steps[node.name, position] = np.float32(pair.scale)
    return steps


def _weights(graph: gs.Graph, pairs: Mapping[int, _Pair]) -> dict[str, _Weights]:
    """The integers and scales of each layer's weights, also behind a Transpose."""
    weights = {}
    for node in graph.nodes:
        if node.op not in ("Conv", *PRODUCTS):
            continue
        turns = []
        tensor = node.inputs[1]
        while (turn := maker(tensor, "Transpose")) is not None:
            turns.append(turn.attrs.get("perm"))
            tensor = turn.inputs[0]
        pair = pairs.get(id(maker(tensor)))
        if pair is None or not isinstance(pair.source, gs.Constant):
            continue
        integers = pair.integers
        if node.op in PRODUCTS and integers.ndim != 2:
            continue
        scales = np.broadcast_to(_spread(pair.scale, pair.axis, integers.ndim), integers.shape)
        if integers.dtype != np.int8:
            raise _problem(pair.node, f"gives weights from {integers.dtype}, int8 is needed", _AGAIN)
        if node.op == "MatMul" or (node.op == "Gemm" and not node.attrs.get("transB", 0)):
            turns.insert(0, None)
        for perm in reversed(turns):
            integers, scales = integers.transpose(perm), scales.transpose(perm)
        rows = scales.reshape(len(scales), -1)
        if np.any(rows != rows[:, :1]):
            problem = (
                f"scales the weights of {node.op} '{node.name}' on axis {pair.axis}, which is not that of the outputs"
            )
            raise _problem(pair.node, problem, _AGAIN)
        weights[node.name] = _Weights(np.ascontiguousarray(integers), rows[:, 0].copy())
    return weights
