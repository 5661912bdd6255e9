"""Combines a float model and its INT8 form node by node, with some layers in INT8. Both forms compute the float model's
tensors under the same names, so each convolution can come from either. Nodes that do not depend on switched
convolutions are equal in all variants and need to run only once."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping
from typing import Literal

import onnx
import onnx_graphsurgeon as gs

from trtdet.calibration import Ranges
from trtdet.passes.protobuf import reads
from trtdet.passes.provenance import origin_of, put
from trtdet.quantization.placement import QdqPlacement
from trtdet.quantization.qdq import Corrections, insert_qdq
from trtdet.quantization.weighted import Weighted

Form = Literal["fp32", "int8"]


class Switch:
    """Creates the variants of a float model with inferred shapes. ``base`` is the form of all convolutions that are not
    switched; switched ones take the other form."""

    def __init__(
        self, model: onnx.ModelProto, placement: QdqPlacement, ranges: Ranges, corrections: Corrections, base: Form
    ) -> None:
        int8 = insert_qdq(model, placement, ranges, corrections=corrections, fold=False)
        self.base, other = (model, int8) if base == "fp32" else (int8, model)
        self._to_int8 = base == "fp32"
        self._origins = {**origin_of(other), **origin_of(self.base)}
        self._nodes = list(self.base.graph.node)
        self._makers = {output: index for index, node in enumerate(self._nodes) for output in node.output}
        self._consumers: dict[str, list[int]] = {}
        for index, node in enumerate(self._nodes):
            for name in reads(node):
                self._consumers.setdefault(name, []).append(index)
        # In INT8 another node may compute a node's output, such as a sum with a bias that a product cannot take.
        self._ends = {node.name: node.output[0] for node in model.graph.node}
        self._other = _Form(other, self._makers, self._ends)
        own = _Form(int8, {output for node in model.graph.node for output in node.output}, self._ends)
        convs = placement.plan.names("int8")
        chains = {name: {node.name for node in own.local(name)} for name in convs}
        # The sum after a product holds its bias, so both are switched together.
        layers = Weighted.by_name(node for node in gs.import_onnx(model).nodes if node.name in chains)
        self._biases = {name: layer.sum.name for name, layer in layers.items() if layer.sum}
        sums = {name for readers in placement.readers.values() for name, _ in readers} - set(convs)
        # A sum reads the INT8 copy of some convolution's input.
        self._owners = {}
        for name in sums:
            chain = {node.name for node in own.local(name)}
            self._owners[name] = {conv for conv in convs if chains[conv] & chain}
        self._initializers = {
            weight.name: weight for graph in (other.graph, self.base.graph) for weight in graph.initializer
        }
        self._infos: dict[str, onnx.ValueInfoProto] = {
            value.name: value
            for graph in (other.graph, self.base.graph)
            for value in (*graph.value_info, *graph.input, *graph.output)
        }
        # Nodes without inputs, such as the Q/DQ pairs of weights; every suffix contains them.
        self._constant: set[int] = set()
        for index, node in enumerate(self._nodes):
            if all(name in self._initializers or self._makers.get(name) in self._constant for name in reads(node)):
                self._constant.add(index)

    def whole(self, names: Collection[str], outputs: Iterable[str]) -> onnx.ModelProto:
        """The whole model with the convolutions ``names`` switched; ``outputs`` are tensors of the float model."""
        return self._assembled(range(len(self._nodes)), names, tuple(outputs))

    def suffixes(
        self, groups: Mapping[str, Collection[str]], outputs: Iterable[str]
    ) -> dict[str, tuple[onnx.ModelProto, ...]]:
        """Only the nodes that depend on switched convolutions, for each group of those that are switched together.

        Each has at most two models, which run one after the other. The first ends at the last switched convolution of
        all groups; the second has the nodes after it, and is the same object for all groups that need the same nodes.
        Their inputs are tensors of the base, or outputs of the first model. Among their outputs are those of
        ``outputs``, tensors of the float model, that depend on a switched convolution.
        """
        wanted = tuple(outputs)
        switched = set().union(*map(self._switched, groups.values()))
        last = max(self._makers[self._ends[name]] for name in switched)
        rests: dict[frozenset[int], onnx.ModelProto] = {}
        suffixes = {}
        for group, names in groups.items():
            reached = self._reached(names)
            after = frozenset(index for index in reached if index > last)
            if after not in rests:
                rests[after] = self._assembled(after | self._constant, (), self._produced(after, wanted))
            rest, before = rests[after], reached - after
            passed = [*wanted, *(value.name for value in rest.graph.input)]
            first = self._assembled(before | self._constant, names, self._produced(before, passed))
            suffixes[group] = tuple(model for model in (first, rest) if model.graph.output)
        return suffixes

    def _reached(self, names: Collection[str]) -> set[int]:
        """Indices of the nodes that depend on switched convolutions, and of these."""
        switched = self._switched(names)
        waiting = [index for index, node in enumerate(self._nodes) if node.name in switched]
        reached = set(waiting)
        while waiting:
            for output in self._nodes[waiting.pop()].output:
                fresh = [index for index in self._consumers.get(output, ()) if index not in reached]
                reached.update(fresh)
                waiting += fresh
        return reached

    def _produced(self, indices: Collection[int], names: Iterable[str]) -> tuple[str, ...]:
        """The tensors, each once, that nodes of these indices compute."""
        return tuple(name for name in dict.fromkeys(names) if self._makers.get(name) in indices)

    def _switched(self, names: Collection[str]) -> set[str]:
        """The convolutions, their biases, and the sums that read a tensor quantised for them."""
        chosen = set(names)
        sums = {
            name
            for name, owners in self._owners.items()
            if owners and (not owners.isdisjoint(chosen) if self._to_int8 else owners <= chosen)
        }
        return chosen | sums | {self._biases[name] for name in chosen & self._biases.keys()}

    def _assembled(self, indices: Iterable[int], names: Collection[str], outputs: tuple[str, ...]) -> onnx.ModelProto:
        """The nodes of these indices that ``outputs`` need, with the convolutions ``names`` switched."""
        switched = self._switched(names)
        local = {name: self._other.local(name) for name in switched}
        ends = {nodes[-1].output[0] for nodes in local.values()}
        written: dict[str, onnx.NodeProto] = {}
        for index in sorted(indices):
            node = self._nodes[index]
            if node.name in switched:
                for written_node in local[node.name]:
                    written[written_node.name] = written_node
            elif not ends.intersection(node.output):
                written[node.name] = node
        needed = set(outputs)
        nodes: list[onnx.NodeProto] = []
        for node in reversed(written.values()):
            if needed.intersection(node.output):
                needed.update(reads(node))
                nodes.append(node)
        nodes.reverse()
        produced = {output for node in nodes for output in node.output}
        read = dict.fromkeys(name for node in nodes for name in reads(node) if name not in produced)
        graph = onnx.helper.make_graph(
            nodes,
            "variant",
            [self._infos[name] for name in read if name not in self._initializers],
            [self._infos[name] for name in outputs],
            [self._initializers[name] for name in read if name in self._initializers],
            value_info=[self._infos[name] for name in sorted(produced & self._infos.keys() - set(outputs))],
        )
        model = onnx.helper.make_model(graph, opset_imports=self.base.opset_import)
        model.ir_version = self.base.ir_version
        put(model, self._origins)
        return model


class _Form:
    """One form of a model, and the tensors that the other form has as well."""

    def __init__(self, model: onnx.ModelProto, shared: Container[str], ends: Mapping[str, str]) -> None:
        self._makers = {output: node for node in model.graph.node for output in node.output}
        self._order = {node.name: index for index, node in enumerate(model.graph.node)}
        self._shared, self._ends = shared, ends

    def local(self, name: str) -> list[onnx.NodeProto]:
        """The node that makes the output of node ``name``, after the nodes before it that only this form has."""
        node = self._makers[self._ends[name]]
        nodes_by_name, waiting = {node.name: node}, [node]
        while waiting:
            for tensor in reads(waiting.pop()):
                maker = self._makers.get(tensor)
                if maker is not None and tensor not in self._shared and maker.name not in nodes_by_name:
                    nodes_by_name[maker.name] = maker
                    waiting.append(maker)
        return sorted(nodes_by_name.values(), key=lambda node: self._order[node.name])
