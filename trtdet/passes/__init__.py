"""Graph rewrites: an exported detector gets the outputs of the contract of detections."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import onnx
import onnx_graphsurgeon as gs

from trtdet.config import Config
from trtdet.passes import batch, batchnorm, clean, cut_nms, cut_topk, decode, nms, opset, silu, two_stage, unstack
from trtdet.passes.base import Options, PassResult, explained
from trtdet.passes.cut_nms import EmbeddedNms, embedded_nms
from trtdet.passes.decode import Decoded
from trtdet.passes.loading import load_model
from trtdet.passes.masks import MASKS
from trtdet.passes.model import save_model, to_graph, to_model
from trtdet.passes.nms import decoded

PASSES: tuple[ModuleType, ...] = (clean, unstack, batchnorm, opset, batch, silu, decode, nms)
"""Every rewrite, in the order they run."""

__all__ = [
    "MASKS",
    "PASSES",
    "Decoded",
    "EmbeddedNms",
    "Options",
    "PassResult",
    "Rewritten",
    "decoded",
    "embedded_nms",
    "load_model",
    "raw_outputs",
    "rewrite",
    "save_model",
]


@dataclass(frozen=True)
class Rewritten:
    """A rewritten model, its configuration without what was cut off, and the result of each pass by its name.

    ``left`` has the reasons why parts of a two-stage model stay as they are, or are left out.
    """

    model: onnx.ModelProto
    config: Config
    results: dict[str, PassResult]
    left: tuple[str, ...] = ()


def rewrite(model: onnx.ModelProto, options: Options) -> Rewritten:
    """Runs all passes over a model, which is not changed.

    What the model does with its decoded boxes and scores is cut off first: an NMS, or the choice of the best.

    Raises:
        ModelError: the model does not fit the configuration or cannot be rewritten.
        ConfigError: the backend cannot run the NMS.
    """
    graph, options, results = _cut(model, options)
    left = tuple(f"{name}: {reason}" for name, result in results.items() for reason in result.skipped)
    for rewrite_pass in PASSES:
        name = rewrite_pass.__name__.rpartition(".")[2]
        opset_before = graph.opset
        with explained(name):
            result = results[name] = rewrite_pass.apply(graph, options)
            # Shapes are inferred and the rules of ONNX checked anew where a pass wrote something.
            wrote = rewrite_pass is clean or result.count > 0 or graph.opset != opset_before
            if wrote and rewrite_pass is not PASSES[-1]:
                graph = to_graph(to_model(graph))
    with explained(name):
        return Rewritten(to_model(graph), config=options.config, results=results, left=left)


def raw_outputs(model: onnx.ModelProto, options: Options) -> tuple[onnx.ModelProto, Config]:
    """A model up to the outputs that head decoding reads, without masks, and the configuration of them.

    Raises:
        ModelError: the model cannot be cut there.
    """
    graph, options, _ = _cut(model, options)
    with explained("clean"):
        if options.masks:
            graph.outputs.pop()
        clean.apply(graph, options)
        return to_model(graph), options.config


def _cut(model: onnx.ModelProto, options: Options) -> tuple[gs.Graph, Options, dict[str, PassResult]]:
    """The graph up to its decoded boxes and scores, or its raw outputs, the options for it, and what was rewritten."""
    with explained("two_stage"):
        graph = to_graph(onnx.shape_inference.infer_shapes(model))
        graph, options, results = two_stage.cut(graph, options)
    with explained("cut_nms"):
        options = cut_nms.cut(graph, options)
    with explained("cut_topk"):
        return graph, cut_topk.cut(graph, options), results
