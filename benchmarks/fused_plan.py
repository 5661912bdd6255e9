"""The layers of an engine of TensorRT 8.6 or 10, derived from a float ONNX model without building one.

These versions have kernels that read INT8, multiply, add a bias and a residual, activate, and write INT8; building with
them needs a GPU. The rules are those that published engines of theirs show (NVIDIA/TensorRT, trt-engine-explorer,
``examples``) and that NVIDIA's developer guide lists under "Layer Fusion":

- a convolution takes the activation behind it, also a sigmoid and its product, and the sum with a tensor made before;
- concatenations and splits are views of one buffer, reshapes are free;
- what remains between these, element-wise operators and copies, runs in one kernel for each connected part;
- a kernel converts the image to type and layout of the first convolution, and one each output to float32.

In INT8 a tensor is INT8 if all its readers are INT8 convolutions, also through pooling, resizing, views and sums; if
only some are, a kernel quantises it. What implicit quantisation leaves in FP16 because it is faster is not foreseen.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from functools import cached_property

import onnx

from trtdet.audit import Layer, Tensor
from trtdet.audit.traffic import ACTIVATION_FUNCTIONS, Flow
from trtdet.quantization import Entry, PrecisionPlan

CONVOLUTIONS = ("Conv", "ConvTranspose")
POOLS = ("AveragePool", "GlobalAveragePool", "MaxPool", "Resize")
_VIEWS = ("Cast", "Concat", "Flatten", "Identity", "Reshape", "Slice", "Split", "Squeeze", "Unsqueeze")
_OWN = (
    *("ArgMax", "Gather", "GatherElements", "GatherND", "Gemm", "GridSample", "LayerNormalization", "MatMul"),
    *("NonMaxSuppression", "ReduceMax", "ReduceMean", "ReduceSum", "ScatterND", "Softmax", "TopK"),
)
"""Operators with a kernel of their own."""

_FORMATS = {
    "Int8": "Thirty-two wide channel vectorized row major Int8 format",
    "Half": "Channel major FP16 format where channel % 8 == 0",
    "Float": "Row major linear FP32",
}


class FusedPlan:
    """The kernels of a float32 model whose nodes have names and whose sizes are fixed."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self._model = onnx.shape_inference.infer_shapes(model)
        graph = self._model.graph
        self._shapes = {
            value.name: tuple(max(dim.dim_value, 1) for dim in value.type.tensor_type.shape.dim)
            for value in (*graph.value_info, *graph.input, *graph.output)
        }
        self._constants = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
        self._live = {value.name for value in graph.input} - self._constants.keys()
        (self._image,) = self._live
        self._nodes: list[onnx.NodeProto] = []
        for node in graph.node:
            if node.op_type != "Shape" and not self._live.isdisjoint(node.input):
                self._live.update(node.output)
                self._nodes.append(node)
        self._outputs = {value.name for value in graph.output} & self._live
        self._maker = {name: node for node in self._nodes for name in node.output}
        self._readers: dict[str, list[onnx.NodeProto]] = defaultdict(list)
        for node in self._nodes:
            for name in dict.fromkeys(node.input):
                if name in self._live:
                    self._readers[name].append(node)
        self._kernel: dict[str, int] = {}
        self._kernels: list[list[onnx.NodeProto]] = []
        self._group()

    @property
    def convolutions(self) -> list[str]:
        return [node.name for node in self._nodes if node.op_type in CONVOLUTIONS]

    @property
    def quantised(self) -> list[str]:
        """The convolutions that engines in INT8 run in INT8: all but those whose results are boxes and scores."""
        return [node.name for node in self._nodes if node.op_type in CONVOLUTIONS and self._before_another(node)]

    def _before_another(self, node: onnx.NodeProto) -> bool:
        """Whether a convolution reads what was made of a node's output; that of a softmax only decodes boxes."""
        seen, waiting = set[str](), list(node.output)
        while waiting:
            for reader in self._readers[waiting.pop()]:
                if reader.op_type in CONVOLUTIONS:
                    return True
                if reader.name not in seen and reader.op_type != "Softmax":
                    seen.add(reader.name)
                    waiting += reader.output
                elif reader.op_type == "Softmax" and any(self._matrix_product(each) for each in self._ahead(reader)):
                    return True
        return False

    def _ahead(self, node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
        """The nodes that read what a node writes, also through views."""
        for name in node.output:
            for reader in self._readers[name]:
                yield reader
                if reader.op_type in (*_VIEWS, "Transpose"):
                    yield from self._ahead(reader)

    def _matrix_product(self, node: onnx.NodeProto) -> bool:
        return node.op_type == "MatMul" and all(name in self._live for name in node.input)

    def _group(self) -> None:
        for node in self._nodes:
            if node.op_type in CONVOLUTIONS:
                self._start(node)
                self._follow(node)
        for node in self._nodes:
            if node.name not in self._kernel and node.op_type in (*POOLS, *_OWN):
                self._start(node)
        for node in self._nodes:
            if node.name not in self._kernel and node.op_type not in _VIEWS:
                self._join(node)

    def _start(self, node: onnx.NodeProto) -> None:
        self._kernels.append([])
        self._into(node, len(self._kernels) - 1)

    def _into(self, node: onnx.NodeProto, kernel: int) -> None:
        self._kernel[node.name] = kernel
        self._kernels[kernel].append(node)

    def _follow(self, conv: onnx.NodeProto) -> None:
        """Takes the activation and the sum behind a convolution into its kernel."""
        kernel, tensor = self._kernel[conv.name], conv.output[0]
        activated = added = False
        while tensor not in self._outputs:
            readers = self._readers[tensor]
            ops = sorted(node.op_type for node in readers)
            step = readers[:1]
            if ops in (["Mul", "Sigmoid"], ["HardSigmoid", "Mul"]) and not activated:
                step = sorted(readers, key=lambda node: node.op_type == "Mul")
                if set(step[1].input) != {tensor, step[0].output[0]}:
                    return
                activated = True
            elif len(ops) == 1 and ops[0] in ACTIVATION_FUNCTIONS and (not activated or added):
                activated = True
            elif ops == ["Add"] and not added and self._made_before(readers[0], conv):
                added = True
            else:
                return
            for node in step:
                self._into(node, kernel)
            tensor = step[-1].output[0]

    def _made_before(self, add: onnx.NodeProto, conv: onnx.NodeProto) -> bool:
        """Whether a sum's other term is a bias, or of the same shape and made before the convolution."""
        for name in set(add.input) & self._live:
            if self._shapes.get(name) != self._shapes.get(add.output[0]):
                return False
            makers = [self._maker.get(source) for source in self.sources(name)]
            if any(
                maker and self._kernel.get(maker.name, len(self._kernels)) > self._kernel[conv.name] for maker in makers
            ):
                return False
        return True

    def _join(self, node: onnx.NodeProto) -> None:
        """Puts an element-wise node into the kernel of those that it reads, also through views, or into its own."""
        for name in node.input:
            maker = self._maker.get(name)
            while maker is not None and maker.op_type in _VIEWS:
                maker = self._maker.get(maker.input[0])
            kernel = None if maker is None else self._kernel.get(maker.name)
            if kernel is not None and self._kernels[kernel][0].op_type not in (*CONVOLUTIONS, *POOLS, *_OWN):
                self._into(node, kernel)
                return
        self._start(node)

    def sources(self, name: str) -> list[str]:
        """The tensors of kernels, or of the image, that a tensor is a view of."""
        maker = self._maker.get(name)
        if maker is None or maker.name in self._kernel or maker.op_type not in _VIEWS:
            return [name]
        return [source for one in maker.input if one in self._live for source in self.sources(one)]

    @cached_property
    def _targets(self) -> Mapping[str, list[onnx.NodeProto | None]]:
        """By tensor of a kernel: the nodes that read it, also through views; None is an output of the engine."""
        targets: dict[str, list[onnx.NodeProto | None]] = defaultdict(list)
        for node in self._nodes:
            for name in node.input if node.name in self._kernel else ():
                for source in self.sources(name) if name in self._live else ():
                    targets[source].append(node)
        for name in self._outputs:
            for source in self.sources(name):
                targets[source].append(None)
        return targets

    def flow(self, int8: Collection[str] = ()) -> Flow:
        """The layers with the convolutions ``int8`` in INT8 and everything else in FP16."""
        wanted: dict[str, set[str]] = {}

        def types(tensor: str) -> set[str]:
            """The types that readers of a kernel's tensor want: Int8, Half or both."""
            if tensor not in wanted:
                wanted[tensor] = {"Half"}
                each = [kinds(node) for node in self._targets.get(tensor, ())]
                wanted[tensor] = set().union(*each) or {"Half"}
            return wanted[tensor]

        def kinds(node: onnx.NodeProto | None) -> set[str]:
            main = None if node is None else self._kernels[self._kernel[node.name]][0]
            if main is None or main.op_type not in (*CONVOLUTIONS, *POOLS):
                return {"Half"}
            return types(main.output[0]) if main.op_type in POOLS else {"Int8" if main.name in int8 else "Half"}

        def tensor(name: str, kind: str) -> Tensor:
            dims = self._shapes.get(name, (1,))
            label = name if kind == "Half" else f"{name} {kind}"
            return Tensor(label, type=kind, dims=dims, format=_FORMATS[kind] if len(dims) == 4 else "")

        first = next(iter(self._readers[self._image]))
        kind = "Int8" if first.name in int8 else "Half"
        image = tensor(self._image, kind)
        packed = "Four wide channel vectorized row major Int8 format"
        packed = packed if kind == "Int8" else "Channel major FP16 format where channel % 4 == 0"
        image = Tensor(f"{self._image} packed", type=kind, dims=image.dims, format=packed)
        layers = [_converted("image", Tensor(self._image, "Float", image.dims, _FORMATS["Float"]), image)]
        for kernel, nodes in enumerate(self._kernels):
            main, inside = nodes[0], {name for node in nodes for name in node.output}
            reads_int8 = "Int8" in kinds(main) if main.op_type in (*CONVOLUTIONS, *POOLS) else False
            reads = "Int8" if reads_int8 else "Half"
            names = dict.fromkeys(name for node in nodes for name in node.input if name in self._live - inside)
            inputs = [
                image if name == self._image else tensor(name, reads)
                for name in names
                if not set(self.sources(name)) <= inside
            ]
            outputs, after = [], []
            for name in (name for node in nodes for name in node.output):
                read = [
                    node for node in self._targets.get(name, ()) if node is None or self._kernel[node.name] != kernel
                ]
                if read:
                    fused = reads_int8 and types(name) == {"Int8"}
                    outputs.append(tensor(name, "Int8" if fused else "Half"))
                    if "Int8" in types(name) and not fused:
                        after.append(_converted(f"quantised {name}", outputs[-1], tensor(name, "Int8")))
            conv = main.op_type in CONVOLUTIONS
            shape = self._constants.get(main.input[1], ()) if conv else ()
            weights = (Tensor("weights", reads, shape),) if shape else ()
            own = conv or main.op_type in (*POOLS, *_OWN)
            layers.append(
                Layer(
                    " + ".join(node.name for node in nodes),
                    type="CaskConvolution" if conv else main.op_type if own else "PointWiseV2",
                    inputs=tuple(inputs),
                    constants=weights,
                    outputs=tuple(outputs),
                    onnx=tuple(node.name for node in nodes),
                )
            )
            layers += after
        layers += [_converted(name, tensor(name, "Half"), tensor(name, "Float")) for name in sorted(self._outputs)]
        plan = PrecisionPlan({name: Entry("int8" if name in int8 else "fp16", "") for name in self.convolutions})
        return Flow(layers, plan, self._model)


def _converted(name: str, before: Tensor, after: Tensor) -> Layer:
    return Layer(f"convert {name}", type="Reformat", inputs=(before,), constants=(), outputs=(after,), onnx=())
