"""Command-line options that would make an engine move fewer bytes, with their estimated saving."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from trtdet.audit.findings import Finding, activation_functions
from trtdet.audit.fp16 import InFp16
from trtdet.audit.traffic import Flow
from trtdet.config import SiluForm

_WORTH = 0.01
"""Smallest saving, as a share of all bytes, that is reported."""

_SQUARE = 256
"""A square matrix in the NMS with at least this many rows compares every candidate with every other."""


@dataclass(frozen=True)
class Advice:
    """An option of ``trtdet build`` with its effect and the estimated bytes saved per run, also as a share, 0..1.

    The shares of several options do not add up.
    """

    option: str
    text: str
    bytes: int
    share: float

    def __str__(self) -> str:
        return f"{self.option} (about {self.bytes / 1e6:.1f} MB less, {self.share:.0%}): {self.text}"


def advise(flow: Flow, findings: Sequence[Finding], silu: Collection[SiluForm]) -> tuple[Advice, ...]:
    """Options to try, the largest saving first; ``silu`` holds the values of ``--silu`` that the backend supports."""
    total = max(flow.bytes, 1)
    options = (*_precision(flow, findings), *_plugin(flow, findings, silu), *_suppression(flow, findings))
    advice = [Advice(option, text=text, bytes=saved, share=saved / total) for option, text, saved in options]
    return tuple(sorted((item for item in advice if item.bytes >= _WORTH * total), key=lambda item: -item.bytes))


def _precision(flow: Flow, findings: Sequence[Finding]) -> Iterator[tuple[str, str, int]]:
    int8 = [name for name in flow.convolutions if flow.precisions[name] == "int8"]
    depthwise = [name for name in int8 if flow.convolutions[name].depthwise]
    in_fp16 = [name for name in flow.convolutions if flow.precisions[name] == "fp16"]
    if depthwise and len(depthwise) < len(int8):
        beside = {flow.convolutions[name].layer for name in depthwise}
        for layer in [flow.layers[index] for index in beside]:
            beside |= {writer for tensor in layer.inputs for writer in flow.writers[tensor.name]}
            beside |= {reader for tensor in layer.outputs for reader in flow.readers[tensor.name]}
        moved, saved = sum(flow.layers[index].bytes for index in beside), flow.bytes - InFp16(flow, depthwise).bytes
        most = max(flow.padding(flow.convolutions[name]) for name in depthwise)
        padded = f"; in INT8 their channels are padded up to {most:.0f} times" if most > 1 else ""
        yield (
            _keeping(flow, ["depthwise"], in_fp16),
            f"the {len(depthwise)} depthwise convolutions and the layers beside them move "
            f"{moved / max(moved - saved, 1):.1f} times the bytes in INT8 that they would in FP16{padded}",
            saved,
        )
    last = []
    for name in int8:
        layer = flow.layers[flow.convolutions[name].layer]
        after = [flow.layers[reader] for tensor in layer.outputs for reader in flow.readers[tensor.name]]
        quantised = any(tensor.type == "Int8" for reader in after for tensor in reader.outputs)
        if layer.output == "Float" and not quantised and InFp16(flow, [name]).bytes < flow.bytes:
            last.append(name)
    if last and len(last) < len(int8):
        these = "this convolution gives" if len(last) == 1 else f"these {len(last)} convolutions give"
        yield (
            _keeping(flow, last, in_fp16),
            f"nothing quantises what {these}, so the INT8 kernels write 32-bit float, and FP16 halves that",
            flow.bytes - InFp16(flow, last).bytes,
        )
    if int8:
        half = InFp16(flow, int8).bytes
        kinds = ("activation", "element-wise")
        unfused = {node for finding in findings if finding.kind in kinds for node in finding.nodes}
        yield (
            "--fp16",
            f"all in all this engine moves {flow.bytes / max(half, 1):.1f} times the bytes of an FP16 engine: "
            f"after {len(unfused & set(int8))} of the {len(int8)} INT8 convolutions come kernels of their own. "
            "INT8 is faster only where its arithmetic makes up for that, so time both",
            flow.bytes - half,
        )


def _keeping(flow: Flow, names: Sequence[str], in_fp16: Sequence[str]) -> str:
    """The option that keeps these convolutions in FP16 and also those that the plan already keeps."""
    all_depthwise = {name for name, convolution in flow.convolutions.items() if convolution.depthwise}
    before = [name for name in in_fp16 if name not in all_depthwise or "depthwise" not in names]
    if all_depthwise and all_depthwise <= set(before):
        before = ["depthwise", *(name for name in before if name not in all_depthwise)]
    return f"--keep-fp16 {','.join((*before, *names))}"


def _plugin(flow: Flow, findings: Sequence[Finding], silu: Collection[SiluForm]) -> Iterator[tuple[str, str, int]]:
    if "plugin" not in silu:
        return
    layers, saved, count = {layer.name: layer for layer in flow.layers}, 0, 0
    for finding in findings:
        layer = layers[finding.layer]
        if finding.kind != "activation" or not set(activation_functions(flow, layer).values()) <= {"SiLU", "HardSwish"}:
            continue
        inputs = [tensor for tensor in layer.inputs if tensor.type in ("Float", "Half")]
        makers = {index for tensor in inputs for index in flow.writers[tensor.name]}
        if makers and all(index in flow.runs and flow.layers[index].input == "Int8" for index in makers):
            saved += sum(2 * (tensor.bytes - tensor.elements) for tensor in inputs)
            count += len(finding.nodes)
    if count:
        yield (
            "--silu plugin",
            f"{count} activations after INT8 convolutions read float in kernels of their own; between INT8 "
            "convolutions the plugin reads and writes INT8",
            saved,
        )


def _suppression(flow: Flow, findings: Sequence[Finding]) -> Iterator[tuple[str, str, int]]:
    parts = {name for finding in findings if finding.kind == "suppression" for name in finding.parts}
    squares = [
        tensor
        for layer in flow.layers
        if layer.name in parts
        for tensor in (*layer.inputs, *layer.outputs)
        if len(tensor.dims) >= 2 and tensor.dims[-1] == tensor.dims[-2] >= _SQUARE
    ]
    if squares:
        rows = max(tensor.dims[-1] for tensor in squares)
        moved = sum(tensor.bytes for tensor in squares if tensor.dims[-1] == rows)
        yield (
            f"--set nms.pre_nms_topk={rows // 2}",
            f"the suppression compares {rows} candidates with one another, {moved / 1e6:.0f} MB; half as many are a "
            "quarter of it. Score what that costs with 'trtdet eval', or suppress outside with --nms host",
            moved * 3 // 4,
        )
