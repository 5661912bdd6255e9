"""Differentiable ONNX operators in torch, as detectors use them.

Each takes the node and its inputs, None for an omitted one, and returns the output or the outputs. Semantics are those
of the ONNX operator specification, opset 13 to 24 (https://onnx.ai/onnx/operators/).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import onnx_graphsurgeon as gs
import torch
from torch.nn import functional

from trtdet.passes.plugin_ops import HARD_SWISH, SILU
from trtdet.quantization.windows import geometry

Inputs = Sequence[Any]
Operator = Callable[[gs.Node, Inputs], Any]


def _ints(value: torch.Tensor | None) -> list[int]:
    return [] if value is None else [int(number) for number in value.reshape(-1).tolist()]


def _conv(node: gs.Node, inputs: Inputs) -> Any:
    x, weight, bias = (*inputs, None)[:3]
    strides, dilations, before, after = geometry(node, x.shape[2:], weight.shape[2:])
    if before != after:
        x, before = functional.pad(x, _torch_pads(before, after)), (0,) * len(before)
    run = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}[len(before)]
    return run(x, weight, bias, strides, before, dilations, int(node.attrs.get("group", 1)))


def _conv_transpose(node: gs.Node, inputs: Inputs) -> Any:
    x, weight, bias = (*inputs, None)[:3]
    pads = tuple(node.attrs.get("pads", (0, 0, 0, 0)))
    if weight.dim() != 4 or pads[:2] != pads[2:] or node.attrs.get("auto_pad", "NOTSET") != "NOTSET":
        raise NotImplementedError("ConvTranspose with such pads")
    return functional.conv_transpose2d(
        x,
        weight,
        bias,
        tuple(node.attrs.get("strides", (1, 1))),
        pads[:2],
        tuple(node.attrs.get("output_padding", (0, 0))),
        int(node.attrs.get("group", 1)),
        tuple(node.attrs.get("dilations", (1, 1))),
    )


def _torch_pads(before: Sequence[int], after: Sequence[int]) -> list[int]:
    return [width for pair in zip(reversed(before), reversed(after), strict=True) for width in pair]


def _pool(node: gs.Node, inputs: Inputs) -> Any:
    (x,) = inputs
    kernel = tuple(node.attrs["kernel_shape"])
    strides, dilations, before, after = geometry(node, x.shape[2:], kernel)
    if len(kernel) != 2:
        raise NotImplementedError(f"{node.op} over {len(kernel)} axes")
    if node.attrs.get("ceil_mode", 0):
        after = tuple(
            high + (stride - (length + low + high - dilation * (taps - 1) - 1) % stride) % stride
            for high, low, stride, length, dilation, taps in zip(
                after, before, strides, x.shape[2:], dilations, kernel, strict=True
            )
        )
    if node.op == "MaxPool":
        x = functional.pad(x, _torch_pads(before, after), value=float("-inf"))
        return functional.max_pool2d(x, kernel, strides, 0, dilations)
    if any(before) or any(after):
        if not node.attrs.get("count_include_pad", 0):
            raise NotImplementedError("AveragePool that does not count its pads")
        x = functional.pad(x, _torch_pads(before, after))
    return functional.avg_pool2d(x, kernel, strides)


def _resize(node: gs.Node, inputs: Inputs) -> Any:
    x, _, scales, sizes = (*inputs, None, None)[:4]
    mode = node.attrs.get("mode", "nearest")
    where = node.attrs.get("coordinate_transformation_mode", "half_pixel")
    if x.dim() != 4:
        raise NotImplementedError("Resize of other than four axes")
    if sizes is not None and sizes.numel():
        size = _ints(sizes)[-2:]
    else:
        factors = scales.reshape(-1).tolist()[-2:]
        size = [int(length * factor) for length, factor in zip(x.shape[2:], factors, strict=True)]
    if mode == "nearest" and all(new % old == 0 for new, old in zip(size, x.shape[2:], strict=True)):
        # With integer factors each value is repeated, whatever the usual modes round coordinates to.
        return functional.interpolate(x, size=size, mode="nearest")
    if mode == "linear" and where in ("half_pixel", "pytorch_half_pixel", "align_corners"):
        return functional.interpolate(x, size=size, mode="bilinear", align_corners=where == "align_corners")
    raise NotImplementedError(f"Resize with {mode} and {where}")


def _slice(node: gs.Node, inputs: Inputs) -> Any:
    x, *rest = inputs
    starts, ends, axes, steps = (_ints(value) for value in (*rest, *(None,) * (4 - len(rest))))
    for start, end, axis, step in zip(
        starts, ends, axes or range(len(starts)), steps or [1] * len(starts), strict=True
    ):
        length = x.shape[axis]
        positions = range(length)[slice(start if start > -(2**31) else None, end if end > -(2**31) else None, step)]
        if step > 0:
            x = x[(slice(None),) * (axis % x.dim()) + (slice(positions.start, positions.stop, step),)]
        else:
            x = x.index_select(axis, torch.tensor(list(positions), dtype=torch.int64, device=x.device))
    return x


def _split(node: gs.Node, inputs: Inputs) -> tuple[torch.Tensor, ...]:
    x = inputs[0]
    axis = int(node.attrs.get("axis", 0))
    sizes = _ints(inputs[1]) if len(inputs) > 1 else []
    return torch.split(x, sizes or -(-x.shape[axis] // len(node.outputs)), axis)


def _reshape(node: gs.Node, inputs: Inputs) -> Any:
    x, shape = inputs[0], _ints(inputs[1])
    if not node.attrs.get("allowzero", 0):
        shape = [x.shape[index] if size == 0 else size for index, size in enumerate(shape)]
    return x.reshape(shape)


def _unsqueeze(node: gs.Node, inputs: Inputs) -> Any:
    x, axes = inputs[0], _ints(inputs[1])
    for axis in sorted(axis % (x.dim() + len(axes)) for axis in axes):
        x = x.unsqueeze(axis)
    return x


def _gather(node: gs.Node, inputs: Inputs) -> Any:
    x, index = inputs
    axis = int(node.attrs.get("axis", 0)) % x.dim()
    index = torch.where(index < 0, index + x.shape[axis], index).to(x.device, torch.int64)
    if node.op == "GatherElements":
        return torch.gather(x, axis, index)
    return x.index_select(axis, index.reshape(-1)).reshape((*x.shape[:axis], *index.shape, *x.shape[axis + 1 :]))


def _at_places(node: gs.Node, inputs: Inputs) -> Any:
    """GatherND, or ScatterND of the updates."""
    x, index, *updates = inputs
    if node.attrs.get("batch_dims", 0):
        raise NotImplementedError("GatherND with batch axes")
    if node.attrs.get("reduction", "none") != "none":
        raise NotImplementedError("ScatterND that adds up")
    places = tuple(part.to(x.device, torch.int64) for part in index.unbind(-1))
    return x.index_put(places, updates[0].to(x.dtype)) if updates else x[places]


def _grid_sample(node: gs.Node, inputs: Inputs) -> Any:
    x, grid = inputs
    if x.dim() != 4:
        raise NotImplementedError("GridSample of other than four axes")
    mode, padding = node.attrs.get("mode", "linear"), node.attrs.get("padding_mode", "zeros")
    mode = {"linear": "bilinear", "cubic": "bicubic"}.get(mode, mode)
    return functional.grid_sample(x, grid, mode, padding, bool(node.attrs.get("align_corners", 0)))


def _roi_align(node: gs.Node, inputs: Inputs) -> Any:
    """Differentiable in the features and in the regions; samples outside of the features are 0, as ONNX defines."""
    x, regions, images = inputs
    ratio = int(node.attrs.get("sampling_ratio", 0))
    if ratio < 1 or node.attrs.get("mode", "avg") != "avg":
        raise NotImplementedError("RoiAlign of a maximum or without a sampling ratio")
    half = node.attrs.get("coordinate_transformation_mode", "half_pixel") == "half_pixel"
    corners = regions * float(node.attrs.get("spatial_scale", 1.0)) - (0.5 if half else 0.0)
    cells = [int(node.attrs.get(key, 1)) for key in ("output_width", "output_height")]
    places, inside = [], []
    for axis, count in enumerate(cells):
        size = x.shape[3 - axis]
        side = corners[:, 2 + axis] - corners[:, axis]
        side = side if half else side.clamp(min=1.0)
        steps = (torch.arange(count * ratio, device=x.device) + 0.5) / (count * ratio)
        at = corners[:, axis, None] + side[:, None] * steps
        inside.append((at >= -1) & (at <= size))
        places.append(at.clamp(0, size - 1) * (2 / max(size - 1, 1)) - 1)
    columns, rows = (count * ratio for count in cells)
    grid = torch.stack([places[0][:, None].expand(-1, rows, -1), places[1][..., None].expand(-1, -1, columns)], -1)
    features = x.new_zeros((len(regions), x.shape[1], rows, columns))
    for image in images.unique().tolist():
        mine = (images == image).nonzero().reshape(-1).to(x.device)
        samples = functional.grid_sample(x[image][None], grid[mine].reshape(1, -1, columns, 2), align_corners=True)
        features = features.index_copy(0, mine, samples[0].reshape(x.shape[1], -1, rows, columns).transpose(0, 1))
    features = features * (inside[1][:, None, :, None] & inside[0][:, None, None, :])
    return functional.avg_pool2d(features, ratio) if len(features) else features[:, :, ::ratio, ::ratio]


def _suppression(node: gs.Node, inputs: Inputs) -> Any:
    """Chosen boxes, int64 (M, 3): image, class and box; without gradient."""
    boxes, scores = (value.detach().cpu() for value in inputs[:2])
    limits = (*inputs[2:], None, None, None)[:3]
    most, overlap, lowest = (0.0 if value is None else float(value) for value in limits)
    if node.attrs.get("center_point_box", 0):
        boxes = torch.cat([boxes[..., :2] - boxes[..., 2:] / 2, boxes[..., :2] + boxes[..., 2:] / 2], -1)
    low, high = torch.minimum(boxes[..., :2], boxes[..., 2:]), torch.maximum(boxes[..., :2], boxes[..., 2:])
    areas, selected = (high - low).prod(-1), []
    for image, label in itertools.product(*map(range, scores.shape[:2])):
        mine = scores[image, label]
        order = torch.argsort(mine, descending=True, stable=True)
        if limits[2] is not None:
            order = order[mine[order] > lowest]
        for _ in range(min(int(most), len(order))):
            if not len(order):
                break
            best, order = order[0], order[1:]
            selected.append([image, label, int(best)])
            ends = torch.minimum(high[image, order], high[image, best])
            shared = (ends - torch.maximum(low[image, order], low[image, best])).clamp(min=0).prod(-1)
            order = order[shared <= overlap * (areas[image, order] + areas[image, best] - shared)]
    return torch.tensor(selected, dtype=torch.int64).reshape(-1, 3)


_REDUCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "ReduceMean": torch.mean,
    "ReduceSum": torch.sum,
    "ReduceMax": torch.amax,
    "ReduceMin": torch.amin,
}


def _reduced(node: gs.Node, inputs: Inputs) -> Any:
    x, reduce = inputs[0], _REDUCTIONS[node.op]
    axes = _ints(inputs[1]) if len(inputs) > 1 else list(node.attrs.get("axes", ()))
    return reduce(x, tuple(axes) or tuple(range(x.dim())), bool(node.attrs.get("keepdims", 1)))


def _pad(node: gs.Node, inputs: Inputs) -> Any:
    x, widths = inputs[0], _ints(inputs[1])
    if node.attrs.get("mode", "constant") != "constant" or (len(inputs) > 3 and inputs[3] is not None):
        raise NotImplementedError("such a Pad")
    half = len(widths) // 2
    value = float(inputs[2]) if len(inputs) > 2 and inputs[2] is not None else 0.0
    return functional.pad(x, _torch_pads(widths[:half], widths[half:]), value=value)


def _cast(node: gs.Node, inputs: Inputs) -> Any:
    kinds = {1: torch.float32, 6: torch.int32, 7: torch.int64, 9: torch.bool, 10: torch.float32, 11: torch.float64}
    kind = int(node.attrs["to"])
    if kind not in kinds:
        raise NotImplementedError(f"Cast to type {kind}")
    return inputs[0].to(kinds[kind])


def _gemm(node: gs.Node, inputs: Inputs) -> Any:
    first, other, *rest = inputs
    first = first.T if node.attrs.get("transA", 0) else first
    other = other.T if node.attrs.get("transB", 0) else other
    product = float(node.attrs.get("alpha", 1.0)) * (first @ other)
    return product + float(node.attrs.get("beta", 1.0)) * rest[0] if rest else product


def _space(node: gs.Node, inputs: Inputs) -> Any:
    size = int(node.attrs["blocksize"])
    if node.op == "DepthToSpace" and node.attrs.get("mode", "DCR") == "CRD":
        return functional.pixel_shuffle(inputs[0], size)
    batch, channels, rows, columns = inputs[0].shape
    if node.op == "DepthToSpace":
        x = inputs[0].reshape(batch, size, size, channels // size**2, rows, columns)
        return x.permute(0, 3, 4, 1, 5, 2).reshape(batch, channels // size**2, rows * size, columns * size)
    x = inputs[0].reshape(batch, channels, rows // size, size, columns // size, size)
    return x.permute(0, 3, 5, 1, 2, 4).reshape(batch, channels * size**2, rows // size, columns // size)


def _normalised(node: gs.Node, inputs: Inputs) -> Any:
    """BatchNormalization with the mean and variance of training, or LayerNormalization."""
    x, scale, bias, *moments = (*inputs, None)[: max(3, len(inputs))]
    epsilon = float(node.attrs.get("epsilon", 1e-5))
    if moments:
        mean, variance = moments
        return functional.batch_norm(x, mean, variance, scale, bias, False, 0.0, epsilon)
    return functional.layer_norm(x, x.shape[int(node.attrs.get("axis", -1)) % x.dim() :], scale, bias, epsilon)


def _each(run: Callable[..., torch.Tensor], **defaults: float) -> Operator:
    """A function of the inputs, then of attributes with these defaults."""
    return lambda node, inputs: run(*inputs, *(float(node.attrs.get(key, value)) for key, value in defaults.items()))


_OF_TORCH = (
    *("Add", "Sub", "Mul", "MatMul", "Where", "Exp", "Log", "Sqrt", "Sin", "Cos", "Abs", "Neg", "Reciprocal", "Floor"),
    *("Erf", "Tanh", "Sigmoid", "Relu"),
)

OPERATORS: dict[str, Operator] = {
    **{name: _each(getattr(torch, name.lower())) for name in _OF_TORCH},
    **{name: _each(getattr(functional, name.lower())) for name in ("Softplus", "Mish", "HardSwish")},
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "MaxPool": _pool,
    "AveragePool": _pool,
    "GlobalAveragePool": _each(lambda x: x.mean(tuple(range(2, x.dim())), keepdim=True)),
    "GlobalMaxPool": _each(lambda x: x.amax(tuple(range(2, x.dim())), keepdim=True)),
    "Resize": _resize,
    "Slice": _slice,
    "Split": _split,
    "Concat": lambda node, inputs: torch.cat(list(inputs), int(node.attrs["axis"])),
    "Reshape": _reshape,
    "Transpose": lambda node, inputs: inputs[0].permute(tuple(node.attrs.get("perm", range(inputs[0].dim())[::-1]))),
    "Squeeze": lambda node, inputs: inputs[0].squeeze(
        tuple(_ints(inputs[1]) if len(inputs) > 1 else [axis for axis, size in enumerate(inputs[0].shape) if size == 1])
    ),
    "Unsqueeze": _unsqueeze,
    "Flatten": lambda node, inputs: inputs[0].reshape(math.prod(inputs[0].shape[: int(node.attrs.get("axis", 1))]), -1),
    "Gather": _gather,
    "Shape": lambda node, inputs: torch.tensor(
        inputs[0].shape[int(node.attrs.get("start", 0)) : node.attrs.get("end")], dtype=torch.int64
    ),
    "GatherElements": _gather,
    "GatherND": _at_places,
    "ScatterND": _at_places,
    # The choice itself has no gradient, only the chosen values.
    "TopK": lambda node, inputs: torch.topk(
        inputs[0],
        int(inputs[1]),
        int(node.attrs.get("axis", -1)),
        *(bool(node.attrs.get(key, 1)) for key in ("largest", "sorted")),
    ),
    "GridSample": _grid_sample,
    "RoiAlign": _roi_align,
    "NonMaxSuppression": _suppression,
    "Einsum": lambda node, inputs: torch.einsum(node.attrs["equation"], *inputs),
    "Expand": _each(lambda x, shape: x + torch.zeros(_ints(shape), dtype=x.dtype, device=x.device)),
    "Tile": _each(lambda x, repeats: x.repeat(_ints(repeats))),
    "Pad": _pad,
    "Cast": _cast,
    "Identity": _each(lambda x: x),
    "Dropout": lambda node, inputs: inputs[0],
    "Gemm": _gemm,
    "DepthToSpace": _space,
    "SpaceToDepth": _space,
    "BatchNormalization": _normalised,
    "LayerNormalization": _normalised,
    "Softmax": lambda node, inputs: torch.softmax(inputs[0], int(node.attrs.get("axis", -1))),
    **dict.fromkeys(_REDUCTIONS, _reduced),
    "Div": _each(lambda x, y: x / y if x.is_floating_point() else torch.div(x, y, rounding_mode="trunc")),
    "Pow": _each(lambda x, y: torch.pow(x, y.to(x.dtype))),
    "Min": _each(lambda *inputs: functools.reduce(torch.minimum, inputs)),
    "Max": _each(lambda *inputs: functools.reduce(torch.maximum, inputs)),
    "PRelu": _each(lambda x, slope: torch.where(x < 0, x * slope, x)),
    "Gelu": lambda node, inputs: functional.gelu(inputs[0], approximate=node.attrs.get("approximate", "none")),
    "Clip": _each(lambda x, *bounds: x.clamp(*(bound if bound is None else bound.to(x.dtype) for bound in bounds))),
    "LeakyRelu": _each(functional.leaky_relu, alpha=0.01),
    "Elu": _each(functional.elu, alpha=1.0),
    "HardSigmoid": _each(lambda x, alpha, beta: (alpha * x + beta).clamp(0, 1), alpha=0.2, beta=0.5),
    "Swish": _each(lambda x, alpha: functional.silu(x) if alpha == 1.0 else x * torch.sigmoid(alpha * x), alpha=1.0),
    SILU: _each(functional.silu),
    HARD_SWISH: _each(functional.hardswish),
}
"""By operator type, including the plugin library's activations."""
