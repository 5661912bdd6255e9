"""Graph rewrites that give an exported detector the outputs num_dets, boxes, scores and classes."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import onnx
import onnx_graphsurgeon as gs

from trtdet.config import Config
from trtdet.passes import (
    batch,
    batchnorm,
    clean,
    cut_nms,
    cut_topk,
    decode,
    nms,
    opset,
    pooling,
    silu,
    stem,
    two_stage,
    unstack,
)
from trtdet.passes.base import Options, PassResult, explained
from trtdet.passes.cut_nms import CutOff, EmbeddedNms, cut_off, embedded_nms
from trtdet.passes.decode import Decoded
from trtdet.passes.loading import has_pairs, load_model
from trtdet.passes.masks import MASKS
from trtdet.passes.model import save_model, to_graph, to_model
from trtdet.passes.nms import decoded

PASSES: tuple[ModuleType, ...] = (clean, unstack, batchnorm, stem, pooling, opset, batch, silu, decode, nms)
"""All passes, in the order they run."""

__all__ = [
    "MASKS",
    "PASSES",
    "CutOff",
    "Decoded",
    "EmbeddedNms",
    "Options",
    "PassResult",
    "Rewritten",
    "cut_off",
    "decoded",
    "embedded_nms",
    "has_pairs",
    "load_model",
    "raw_outputs",
    "rewrite",
    "save_model",
]


@dataclass(frozen=True)
class Rewritten:
    """Result of :func:`rewrite`."""

    model: onnx.ModelProto
    config: Config  # of the rewritten model, without what was cut off
    results: dict[str, PassResult]  # by pass name
    left: tuple[str, ...] = ()  # why parts of a two-stage model were not rewritten, or left out


def rewrite(model: onnx.ModelProto, options: Options) -> Rewritten:
    """Runs all passes over a copy of a model. Its own NMS or TopK at the end is cut off first.

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
            # After a change, infer shapes and check the graph again.
            wrote = rewrite_pass is clean or result.count > 0 or graph.opset != opset_before
            if wrote and rewrite_pass is not PASSES[-1]:
                graph = to_graph(to_model(graph))
    with explained(name):
        return Rewritten(to_model(graph), config=options.config, results=results, left=left)


def raw_outputs(model: onnx.ModelProto, options: Options) -> tuple[onnx.ModelProto, Config]:
    """Cuts a model at the outputs that head decoding reads, without masks; returns it and its configuration. Raises
    ModelError if the model cannot be cut there."""
    graph, options, _ = _cut(model, options)
    with explained("clean"):
        if options.masks:
            graph.outputs.pop()
        clean.apply(graph, options)
        return to_model(graph), options.config


def _cut(model: onnx.ModelProto, options: Options) -> tuple[gs.Graph, Options, dict[str, PassResult]]:
    """Cuts off the model's own NMS or TopK; returns the graph, its options and the results of the rewrites."""
    with explained("two_stage"):
        graph = to_graph(onnx.shape_inference.infer_shapes(model))
        graph, options, results = two_stage.cut(graph, options)
    with explained("cut_nms"):
        graph, options = cut_nms.cut(graph, options)
    with explained("cut_topk"):
        return graph, cut_topk.cut(graph, options), results
