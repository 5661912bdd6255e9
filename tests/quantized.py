"""Models with Q/DQ pairs as other tools write them."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import helper, numpy_helper

Style = Literal["pytorch-quantization", "modelopt"]

ZERO = numpy_helper.from_array(np.int8(0), "zero")


def noise(count: int) -> list[NDArray[np.float32]]:
    """Images for ``small_detector``."""
    return [np.random.default_rng(seed).uniform(0, 255, (1, 3, 256, 256)).astype(np.float32) for seed in range(count)]


def run(model: onnx.ModelProto, image: NDArray[np.float32], *names: str) -> dict[str, NDArray[np.float32]]:
    """The outputs of a model, or other tensors."""
    exposed = onnx.ModelProto()
    exposed.CopyFrom(model)
    known = {value.name for value in model.graph.output}
    exposed.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in names if name not in known)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(exposed.SerializeToString(), options, providers=["CPUExecutionProvider"])
    wanted = [*known, *(name for name in names if name not in known)]
    values = session.run(wanted, {session.get_inputs()[0].name: image})
    return dict(zip(wanted, values, strict=True))


def weight_scales(weight: NDArray[np.float32]) -> NDArray[np.float32]:
    """One scale for each output channel, no FP16 numbers."""
    return (np.abs(weight.reshape(len(weight), -1)).max(axis=1) / 127).astype(np.float32)


def with_pairs(model: onnx.ModelProto, style: Style, skip: Iterable[str] = ()) -> onnx.ModelProto:
    """A float model with pairs on the input and the weights of each convolution but those of ``skip``: weights are
    float before a pair as pytorch-quantization writes them, or INT8 before a DequantizeLinear as ModelOpt does."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    values = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    image = noise(1)[0]
    convs = [node for node in model.graph.node if node.op_type == "Conv" and node.name not in set(skip)]
    sources = list(dict.fromkeys(node.input[0] for node in convs))
    name = model.graph.input[0].name
    amax = {each: np.abs(one).max() for each, one in run(model, image, *(set(sources) - {name})).items()}
    amax[name] = image.max()
    nodes: list[onnx.NodeProto] = []
    constants = [ZERO]

    def constant(name: str, value: NDArray[np.generic]) -> str:
        constants.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def paired(tensor: str, stored: str, scale: str, zero: str, **axis: int) -> str:
        if stored == tensor:
            stored = f"{tensor}/Q"
            nodes.append(helper.make_node("QuantizeLinear", [tensor, scale, zero], [stored], stored, **axis))
        nodes.append(
            helper.make_node("DequantizeLinear", [stored, scale, zero], [f"{tensor}/DQ"], f"{tensor}/DQ", **axis)
        )
        return f"{tensor}/DQ"

    for source in sources:
        paired(source, source, constant(f"{source}/scale", np.float32(amax[source] / 127)), "zero")
    for node in result.graph.node:
        if node.name not in {conv.name for conv in convs}:
            continue
        weight = values[node.input[1]]
        scales = weight_scales(weight)
        scale = constant(f"{node.name}/scales", scales)
        zero = constant(f"{node.name}/zeros", np.zeros(len(scales), np.int8))
        stored = node.input[1]
        if style == "modelopt":
            integers = np.rint(weight / scales.reshape(-1, 1, 1, 1)).astype(np.int8)
            stored = constant(f"{node.name}/integers", integers)
        node.input[:] = [f"{node.input[0]}/DQ", paired(node.input[1], stored, scale, zero, axis=0), *node.input[2:]]
    result.graph.initializer.extend(constants)
    result.graph.node.extend(nodes)
    return sorted_nodes(result)


def sorted_nodes(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with its nodes in the order of their use."""
    known = {value.name for value in (*model.graph.initializer, *model.graph.input)}
    waiting, done = list(model.graph.node), []
    while waiting:
        ready = [node for node in waiting if known.issuperset(filter(None, node.input))]
        known |= {output for node in ready for output in node.output}
        done += ready
        waiting = [node for node in waiting if node not in ready]
    del model.graph.node[:]
    model.graph.node.extend(done)
    return model


def by_onnxruntime(model: onnx.ModelProto, folder: Path, **changes: object) -> onnx.ModelProto:
    """The model as onnxruntime's static quantisation writes it, symmetric unless ``changes`` says otherwise."""
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            self._images: Iterator[NDArray[np.float32]] = iter(noise(4))

        def get_next(self) -> dict[str, NDArray[np.float32]] | None:
            image = next(self._images, None)
            return None if image is None else {model.graph.input[0].name: image}

    settings = {
        "quant_format": QuantFormat.QDQ,
        "per_channel": True,
        "activation_type": QuantType.QInt8,
        "weight_type": QuantType.QInt8,
        "extra_options": {"ActivationSymmetric": True, "WeightSymmetric": True},
        **changes,
    }
    onnx.save(model, folder / "float.onnx")
    quantize_static(folder / "float.onnx", folder / "quantized.onnx", Reader(), **settings)
    return onnx.load(folder / "quantized.onnx")


def layers(model: onnx.ModelProto) -> dict[str, tuple[float, NDArray[np.int8], NDArray[np.float32]]]:
    """By quantised convolution: the scale of its input, the integers of its weights, their scales (out,)."""
    makers = {output: node for node in model.graph.node for output in node.output}
    values = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type == "Constant":
            values[node.output[0]] = numpy_helper.to_array(node.attribute[0].t)
    found = {}
    for node in model.graph.node:
        pairs = [makers.get(name) for name in node.input[:2]]
        if node.op_type != "Conv" or not all(pair is not None and pair.op_type == "DequantizeLinear" for pair in pairs):
            continue
        step, scales = (values[pair.input[1]] for pair in pairs if pair is not None)
        stored = pairs[1].input[0] if pairs[1] is not None else ""
        if stored in values:
            integers = values[stored]
        else:
            weight = values[makers[stored].input[0]].astype(np.float32)
            integers = np.rint(weight / scales.astype(np.float32).reshape(-1, 1, 1, 1)).astype(np.int8)
        found[node.name] = (step, integers, np.broadcast_to(scales, len(integers)))
    return found
