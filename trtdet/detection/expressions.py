"""Boxes and scores by ``head.compute``: NumPy's notation over a model's outputs.

An expression is parsed as Python and walked, never run. Each step is an ONNX operator, either computed here as the
reference or written into a graph.
"""

from __future__ import annotations

import ast
import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from trtdet.config import Config
from trtdet.detection.anchors import anchor_points
from trtdet.detection.parts import PROTOTYPES
from trtdet.detection.suppression import sigmoid, softmax
from trtdet.errors import ConfigError, ModelError, one_line

Array = NDArray[Any]
T = TypeVar("T")

Step = Callable[[str, Sequence[T | Array], dict[str, Any]], T]
"""Computes or writes an ONNX operator with tensors, constants and attributes."""

_ELEMENTS: dict[str, Callable[..., Any]] = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Div": np.divide,
    "Pow": np.power,
    "Min": np.minimum,
    "Max": np.maximum,
    "Sigmoid": sigmoid,
    "Exp": np.exp,
    "Log": np.log,
    "Tanh": np.tanh,
    "Sqrt": np.sqrt,
    "Abs": np.abs,
}
_BINARY = {ast.Add: "Add", ast.Sub: "Sub", ast.Mult: "Mul", ast.Div: "Div", ast.Pow: "Pow"}
_UNARY = {"sigmoid": "Sigmoid", "exp": "Exp", "log": "Log", "tanh": "Tanh", "sqrt": "Sqrt", "abs": "Abs"}
_PAIRS = {"minimum": "Min", "maximum": "Max"}
_ALONG = ("softmax", "sum", "concat")
_GRIDS = ("points", "strides")
_LARGEST = float(np.finfo(np.float32).max)
_END = np.iinfo(np.int64).max
_MOST_VALUES = 1 << 26
"""Most values of a step's result, and four times the values of the largest output, if that is more."""


def computed(outputs: Mapping[str, Array], config: Config) -> dict[str, Array]:
    """``boxes``, ``scores`` and the parts of the head by ``head.compute``, float32: the reference.

    ``outputs`` have the order of the model or of ``head.outputs``.

    Raises:
        ConfigError: an expression contains something that is not allowed.
        ModelError: the outputs do not fit an expression.
    """
    return evaluate(dict(outputs), _numpy_step, config)


def shapes(outputs: Mapping[str, tuple[int | None, ...]], config: Config) -> dict[str, tuple[int | None, ...]]:
    """Shapes of the results from the outputs' shapes, None if open; raises like :func:`computed`."""
    if any(None in shape[1:] for shape in outputs.values()):
        return {name: (None,) * (4 if name == PROTOTYPES else 3) for name in _results(config)}
    zeros = {name: np.broadcast_to(np.float32(0), [size or 1 for size in shape]) for name, shape in outputs.items()}
    open_batch = any(shape[:1] == (None,) for shape in outputs.values())
    results = computed(zeros, config)
    return {name: (None, *array.shape[1:]) if open_batch else array.shape for name, array in results.items()}


def evaluate(outputs: dict[str, T], step: Step[T], config: Config) -> dict[str, T]:
    """``boxes``, ``scores`` and the parts by ``head.compute``; ``step`` computes or writes each operator.

    Names are outputs (in quotes if they are no Python names), ``output0``, ``output1`` ... in order, earlier results,
    ``input_width`` and ``input_height``. Allowed are numbers, lists of numbers, ``+ - * / **``, slices, ``sigmoid exp
    log tanh sqrt abs (x)``, ``minimum maximum (x, y)``, ``softmax(x, axis=-1)``, ``sum(x, axis=-1)``, which removes the
    axis, ``concat(x, y, ..., axis=-1)``, ``transpose(x, axis, ...)``, ``reshape(x, size, ...)`` where 0 keeps a size,
    ``points(offset)`` (1, N, 2), cell points of ``head.strides`` in pixels, and ``strides()`` (1, N, 1).

    Raises:
        ConfigError: an expression contains anything else or an unknown name.
        ModelError: a step fails on the outputs, or would give too many values.
    """
    numbered = {f"output{index}": tensor for index, tensor in enumerate(outputs.values())}
    sides = {"input_width": config.input.width, "input_height": config.input.height}
    names: dict[str, T | Array] = {name: np.array(side, np.float32) for name, side in sides.items()}
    names |= numbered | outputs
    most = max([_MOST_VALUES, *(4 * tensor.size for tensor in outputs.values() if isinstance(tensor, np.ndarray))])
    for name, text in (config.head.compute or {}).items():
        expression = ast.parse(text.strip(), mode="eval").body
        try:
            names[name] = _Walk(name, names=names, step=step, config=config, most=most).of(expression)
        except RecursionError:
            raise ConfigError(f"key 'head.compute.{name}' is nested too deeply; name its parts before it") from None
    results = {name: names[name] for name in _results(config)}
    for name, tensor in results.items():
        if isinstance(tensor, np.ndarray) and not isinstance(next(iter(outputs.values())), np.ndarray):
            raise ConfigError(f"key 'head.compute.{name}' is a constant; compute it from an output of the model")
    return results  # type: ignore[return-value]


def _results(config: Config) -> tuple[str, ...]:
    return ("boxes", "scores", *config.head.raw_parts)


@dataclass(frozen=True)
class _Walk:
    """Walks the expression ``name``, which may use ``names``; NumPy makes no array of more than ``most`` values."""

    name: str
    names: Mapping[str, Any]
    step: Step[Any]
    config: Config
    most: int

    def of(self, node: ast.expr) -> Any:
        name = node.id if isinstance(node, ast.Name) else node.value if isinstance(node, ast.Constant) else None
        if isinstance(name, str):
            if name not in self.names:
                raise self._error(None, f"names '{name}', there are {', '.join(self.names)}")
            return self.names[name]
        if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
            return self._do(_BINARY[type(node.op)], self.of(node.left), self.of(node.right))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return self._do("Mul", self.of(node.operand), np.float32(-1))
        if isinstance(node, ast.Subscript):
            return self._part(node)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            return self._call(node, node.func.id)
        if isinstance(node, (ast.List, ast.Constant)):
            return self._number(node)
        raise self._error(node, "is none of numbers, names, slices, + - * / ** and the functions of head.compute")

    def _number(self, node: ast.expr) -> Array:
        if isinstance(node, ast.List):
            values = [self.of(part) for part in node.elts]
            if values and all(isinstance(value, (np.ndarray, np.floating)) and np.ndim(value) == 0 for value in values):
                return np.array(values, np.float32)
        value = node.value if isinstance(node, ast.Constant) else None
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            with contextlib.suppress(OverflowError):
                number = float(value)
                if abs(number) <= _LARGEST:
                    return np.array(number, np.float32)
        raise self._error(node, "is no number of float32 and no list of such numbers")

    def _call(self, node: ast.Call, function: str) -> Any:
        axis, arguments = -1, node.args
        for keyword in node.keywords:
            if keyword.arg != "axis" or function not in _ALONG:
                allowed = f"axis, of {', '.join(_ALONG)}, is the only one"
                raise self._error(node, f"has a keyword '{keyword.arg}'; {allowed}")
            axis = self._whole(keyword.value)
        if function in _GRIDS and len(arguments) == (function == "points"):
            offset = self._number(arguments[0]) if arguments else 0.0
            if np.ndim(offset):
                raise self._error(node, "gives points a list; an offset in cells is a number")
            return anchor_points(self.config, float(offset))[function == "strides"][None]
        if function in ("transpose", "reshape") and len(arguments) > 1:
            numbers = [self._whole(argument) for argument in arguments[1:]]
            if function == "transpose":
                return self._do("Transpose", self.of(arguments[0]), perm=numbers)
            return self._do("Reshape", self.of(arguments[0]), np.array(numbers, np.int64))
        functions = (*_UNARY, *_PAIRS, *_ALONG, "transpose", "reshape", *_GRIDS)
        if function not in functions:
            raise self._error(node, f"calls '{function}'; there are {', '.join(functions)}")
        tensors = [] if function in _GRIDS else [self.of(argument) for argument in arguments]
        table = {1: _UNARY, 2: _PAIRS}.get(len(tensors), {})
        if function in table:
            return self._do(table[function], *tensors)
        if function == "softmax" and len(tensors) == 1:
            return self._do("Softmax", *tensors, axis=axis)
        if function == "sum" and len(tensors) == 1:
            return self._do("ReduceSum", *tensors, np.array([axis], np.int64), keepdims=0)
        if function == "concat" and tensors:
            return self._do("Concat", *tensors, axis=axis)
        raise self._error(node, f"gives {function} {len(arguments)} arguments")

    def _part(self, node: ast.Subscript) -> Any:
        """A Slice for all ranges and numbers, a Gather per list, and a Squeeze of the axes of numbers."""
        parts = list(node.slice.elts) if isinstance(node.slice, ast.Tuple) else [node.slice]
        dots = [at for at, part in enumerate(parts) if isinstance(part, ast.Constant) and part.value is Ellipsis]
        if len(dots) > 1:
            raise self._error(node, "has more than one '...'")
        tensor = self.of(node.value)
        bounds: list[tuple[int, int, int, int]] = []
        lists: list[tuple[int, Array]] = []
        removed_axes = []
        for at, part in enumerate(parts):
            axis = at - len(parts) if dots and at > dots[0] else at
            if at in dots:
                continue
            if isinstance(part, ast.Slice):
                start, stop, step = (None if p is None else self._whole(p) for p in (part.lower, part.upper, part.step))
                if step is not None and step < 1:
                    raise self._error(node, "has a slice whose step is below 1")
                if (start, stop, step) != (None, None, None):
                    bounds.append((start or 0, _END if stop is None else stop, axis, step or 1))
            elif isinstance(part, ast.List):
                lists.append((axis, np.array([self._whole(index) for index in part.elts], np.int64)))
            else:
                index = self._whole(part)
                bounds.append((index, _END if index == -1 else index + 1, axis, 1))
                removed_axes.append(axis)
        if bounds:
            tensor = self._do("Slice", tensor, *(np.array(column, np.int64) for column in zip(*bounds, strict=True)))
        for axis, indices in lists:
            tensor = self._do("Gather", tensor, indices, axis=axis)
        return self._do("Squeeze", tensor, np.array(removed_axes, np.int64)) if removed_axes else tensor

    def _whole(self, node: ast.expr) -> int:
        sign = 1
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            sign, node = -1, node.operand
        if isinstance(node, ast.Constant) and type(node.value) is int and node.value < 2**31:
            return sign * node.value
        raise self._error(node, "is no whole number, which axes, sizes and slices are made of")

    def _do(self, op: str, *tensors: Any, **attributes: Any) -> Any:
        constant = all(isinstance(tensor, (np.ndarray, np.floating)) for tensor in tensors)
        try:
            size = _result_size(op, tensors, attributes) if constant else 0
            if size > self.most:
                raise ValueError(f"the result would have {size} values, over {self.most}")
            return (_numpy_step if constant else self.step)(op, tensors, attributes)
        except (ValueError, IndexError, TypeError) as error:
            raise ModelError(
                f"the outputs do not fit key 'head.compute.{self.name}': {op} of "
                f"{' and '.join(str(np.shape(tensor)) for tensor in tensors)}: {one_line(error)}"
            ) from None

    def _error(self, node: ast.expr | None, problem: str) -> ConfigError:
        shown = "it" if node is None else f"'{one_line(ast.unparse(node), 80)}'"
        return ConfigError(f"key 'head.compute.{self.name}': {shown} {problem}")


def _result_size(op: str, tensors: Sequence[Array], attributes: Mapping[str, Any]) -> int:
    """Values of a step's result, for the operators whose result may be larger than their largest tensor."""
    if op in _ELEMENTS:
        return math.prod(np.broadcast_shapes(*(np.shape(tensor) for tensor in tensors)))
    if op == "Concat":
        return sum(tensor.size for tensor in tensors)
    if op == "Gather":
        return int(tensors[0].size // max(1, tensors[0].shape[attributes["axis"]]) * tensors[1].size)
    return 0


def _numpy_step(op: str, tensors: Sequence[Array], attributes: dict[str, Any]) -> Array:
    first, *operands = tensors
    with np.errstate(all="ignore"):  # values may be infinite or NaN, as in the graph
        if op in _ELEMENTS:
            return np.asarray(_ELEMENTS[op](*tensors), np.float32)
        if op == "Softmax":
            return softmax(first, attributes["axis"])
        if op == "Concat":
            return np.concatenate(tensors, axis=attributes["axis"])
        if op == "Transpose":
            return first.transpose(attributes["perm"])
        if op == "Reshape":
            sizes = operands[0].tolist()
            return first.reshape([size or first.shape[at] for at, size in enumerate(sizes)])
        if op == "Gather":
            return np.take(first, operands[0], axis=attributes["axis"])
        if op == "ReduceSum":
            return np.asarray(first.sum(axis=tuple(operands[0].tolist())), np.float32)
        if op == "Squeeze":
            return np.squeeze(first, tuple(operands[0].tolist()))
        slices = [slice(None)] * first.ndim
        for start, stop, axis, step in zip(*(column.tolist() for column in operands), strict=True):
            slices[axis] = slice(start, stop, step)
        return first[tuple(slices)]
