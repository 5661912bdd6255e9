"""Weights of YOLOX models: out of checkpoints and ONNX files, and with batch normalisation folded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trtdet.errors import ModelError
from trtdet.exporter import checkpoints
from trtdet.exporter.yolox import YOLOX, BaseConv


def load_checkpoint(model: nn.Module, path: Path) -> None:
    """Loads a state dict as :func:`read_state` reads it.

    Raises:
        ModelError: the file is missing or is no checkpoint, or its keys or shapes are not the model's.
    """
    advice = "choose the variant and the number of classes it was trained with"
    checkpoints.load_state(model, read_state(path), path, advice)


def read_state(path: Path) -> dict[str, Tensor]:
    """Reads a state dict, bare or under the key ``model`` as YOLOX publishes it.

    Only tensors, numbers and plain containers are unpickled; a file that would run code is refused.

    Raises:
        ModelError: the file is missing or is no checkpoint.
    """
    if not path.is_file():
        raise ModelError(f"checkpoint '{path}' does not exist; check the path given with --weights")
    try:
        with torch.serialization.safe_globals(checkpoints.numpy_scalars()):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a file that is no checkpoint makes torch raise nearly anything
        reason = str(error).strip().splitlines()
        raise ModelError(
            f"checkpoint '{path}' cannot be read as weights only: {reason[0] if reason else type(error).__name__}; "
            "expected a state dict saved with torch.save, bare or under the key 'model'"
        ) from None
    state = content.get("model", content) if isinstance(content, dict) else content
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()) or not state:
        raise ModelError(
            f"checkpoint '{path}' holds no state dict; expected names and tensors, bare or under the key 'model'"
        )
    return state


def fuse_batch_norm(model: nn.Module) -> None:
    """Folds the batch normalisation of every BaseConv into its convolution, in place. The model must be in evaluation
    mode; its output stays the same but for rounding. Folding twice is folding once.

    Raises:
        ModelError: the model is in training mode.
    """
    if model.training:
        raise ModelError("batch normalisation can only be folded in evaluation mode; call model.eval() first")
    for module in model.modules():
        if isinstance(module, BaseConv) and isinstance(module.bn, nn.BatchNorm2d):
            module.conv = folded(module.conv, module.bn)
            module.bn = nn.Identity()


def folded(conv: nn.Conv2d, norm: nn.BatchNorm2d) -> nn.Conv2d:
    """A convolution that computes what a convolution and the batch normalisation behind it do in evaluation mode."""
    mean, variance = norm.running_mean, norm.running_var
    if mean is None or variance is None:
        raise ModelError("a batch normalisation has no running statistics and cannot be folded")
    fused = nn.Conv2d(
        conv.in_channels,
        conv.out_channels,
        conv.kernel_size,  # type: ignore[arg-type]
        conv.stride,  # type: ignore[arg-type]
        conv.padding,  # type: ignore[arg-type]
        groups=conv.groups,
    )
    with torch.no_grad():
        # In float64, so that folding rounds only once.
        scale = norm.weight.double() / (variance.double() + norm.eps).sqrt()
        bias = conv.bias.double() if conv.bias is not None else torch.zeros_like(scale)
        fused.weight.copy_(conv.weight.double() * scale[:, None, None, None])
        assert fused.bias is not None
        fused.bias.copy_((bias - mean.double()) * scale + norm.bias.double())
    return fused.eval()


def load_by_position(model: YOLOX, path: Path) -> None:
    """Gives the weights and biases of an ONNX model's convolutions to a folded torch model.

    Names are lost in most exports, order is not: the n-th Conv node of the graph is the n-th convolution that runs.

    Args:
        model: after ``fuse_batch_norm``.
        path: an ONNX file whose Conv nodes have constant weights and biases.

    Raises:
        ModelError: the file cannot be read, or the number of convolutions or a shape differs; the model is
            then left as it was.
    """
    convs = list(_execution_order(model))
    found = _onnx_convs(path)
    if len(found) != len(convs):
        raise ModelError(f"'{path}' has {len(found)} convolutions, the model has {len(convs)}; choose its variant")
    for index, ((name, conv), (weight, bias)) in enumerate(zip(convs, found, strict=True)):
        if conv.bias is None:
            raise ModelError(f"convolution {name} has no bias; call fuse_batch_norm before load_by_position")
        if tuple(weight.shape) != tuple(conv.weight.shape) or tuple(bias.shape) != tuple(conv.bias.shape):
            raise ModelError(
                f"'{path}': convolution {index} has weights {tuple(weight.shape)}, expected "
                f"{tuple(conv.weight.shape)} for {name}; choose the variant and number of classes it was made from"
            )
    with torch.no_grad():
        for (_, conv), (weight, bias) in zip(convs, found, strict=True):
            conv.weight.copy_(torch.from_numpy(weight))
            assert conv.bias is not None
            conv.bias.copy_(torch.from_numpy(bias))


def _execution_order(model: nn.Module) -> Iterator[tuple[str, nn.Conv2d]]:
    """The convolutions in the order in which they run."""
    ran: list[tuple[str, nn.Conv2d]] = []
    hooks = [
        module.register_forward_pre_hook(lambda _module, _inputs, item=(name, module): ran.append(item))
        for name, module in model.named_modules()
        if isinstance(module, nn.Conv2d)
    ]
    try:
        with torch.no_grad():
            model(torch.zeros(1, 3, 64, 64))
    finally:
        for hook in hooks:
            hook.remove()
    return iter(ran)


def _onnx_convs(path: Path) -> list[tuple[Any, Any]]:
    import onnx

    try:
        graph = onnx.load(str(path)).graph
    except Exception as error:  # a missing or damaged file, or missing external data
        reason = str(error).strip().splitlines()
        raise ModelError(f"ONNX model '{path}' cannot be read: {reason[0] if reason else error!r}") from None
    constants = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant" and node.attribute and node.attribute[0].name == "value":
            constants[node.output[0]] = node.attribute[0].t
    convs = []
    for node in graph.node:
        if node.op_type != "Conv":
            continue
        if len(node.input) < 3 or any(name not in constants for name in node.input[1:3]):
            raise ModelError(f"'{path}': Conv '{node.name}' has no constant weights and bias; fold it first")
        weight, bias = (onnx.numpy_helper.to_array(constants[name]) for name in node.input[1:3])
        convs.append((np.array(weight, np.float32), np.array(bias, np.float32)))
    return convs
