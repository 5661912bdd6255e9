"""Rewrites of two-stage detectors, such as Faster R-CNN and Mask R-CNN, into a form that engines run well.

torchvision's exports suppress twice, proposals and detections, and align each region on one level of a pyramid.
PyTorch's tracing exporter guards each suppression with an ``If`` and joins the levels with ScatterElements; the newer
exporter uses ScatterND. Results stay the same bit for bit, unless there are fewer proposals. The outputs become masks
and rows of detections, rule ``detections`` of :class:`trtdet.config.HeadConfig`.
"""

from __future__ import annotations

from dataclasses import replace

import onnx_graphsurgeon as gs

from trtdet.errors import ModelError
from trtdet.passes import clean
from trtdet.passes.base import Options, PassResult, explained
from trtdet.passes.model import to_graph, to_model
from trtdet.passes.two_stage import detections, levels, proposals, static, suppressions
from trtdet.passes.two_stage.proposals import BOXES, REAL, up_to_proposals

REWRITES = {
    "nms_score_threshold": suppressions.write_thresholds,
    "fold_post_nms_topk": suppressions.fold_limits,
    "merge_levels": levels.merge,
    "roi_align_sampling": levels.write_sampling,
}
"""Rewrites after ``inline_nms_guard``, in order, for backends with all of ``DATA_DEPENDENT``; other backends get those
of :mod:`trtdet.passes.two_stage.static`."""

DATA_DEPENDENT = frozenset(("NonZero", "NonMaxSuppression", "RoiAlign"))

__all__ = ["BOXES", "REAL", "REWRITES", "check_batch", "cut", "is_two_stage", "prepared", "up_to_proposals"]


def is_two_stage(graph: gs.Graph) -> bool:
    """Whether a graph has a RoiAlign, which reads the features of the first stage for the second."""
    return any(node.op == "RoiAlign" for node in graph.nodes)


def check_batch(graph: gs.Graph, batch: int | str | None, option: str) -> None:
    """Refuses a batch other than 1 for a two-stage model.

    ``batch`` is a size, a name for any size, or None for the model's own. ``option`` is its command-line option. Raises
    ModelError if a two-stage model has another batch than 1.
    """
    if batch in (None, 1) or not is_two_stage(graph):
        return
    raise ModelError(
        f"a batch of {batch if isinstance(batch, int) else 'any size'} is asked for, and a two-stage model is of one "
        f"image: its suppressions are written for each image; leave {option} out"
    )


def prepared(graph: gs.Graph, options: Options) -> tuple[gs.Graph, PassResult]:
    """Folds constants and inlines guards of a two-stage graph; returns it with the result of ``inline_nms_guard``.
    Raises ModelError if the model does not fit the configuration."""
    for _ in range(2):  # shapes that are inferred after the first run give more constants
        clean.apply(graph, options)
        graph = to_graph(to_model(graph))
    result = suppressions.inline_guards(graph)
    return to_graph(to_model(graph)), result


def cut(graph: gs.Graph, options: Options) -> tuple[gs.Graph, Options, dict[str, PassResult]]:
    """A two-stage graph with rows of detections as its output, its options, and the result of each rewrite. Raises
    ModelError if the outputs are not boxes, labels and scores of one image, or the batch is not 1."""
    if not is_two_stage(graph):
        return graph, options, {}
    check_batch(graph, options.batch, "--batch")
    config = options.config
    results: dict[str, PassResult] = {}
    with explained("inline_nms_guard"):
        graph, results["inline_nms_guard"] = prepared(graph, options)
    limits = {
        "rpn_pre_nms_topk": (proposals.limit_before, config.head.rpn_pre_nms_topk),
        "rpn_post_nms_topk": (proposals.limit_after, config.head.rpn_post_nms_topk),
    }
    for name, (limit, count) in limits.items():
        if count is not None:
            with explained(name):
                results[name] = limit(graph, count)
                graph = to_graph(to_model(graph))
    with explained("two_stage"):
        proposals.name_boxes(graph)
        if DATA_DEPENDENT & options.missing_ops:
            graph, config, rewrites = static.rewrite(graph, options)
            results |= rewrites
        else:
            for name, apply in REWRITES.items():
                with explained(name):
                    results[name] = apply(graph)
                    graph = to_graph(to_model(graph))
            outputs = detections.outputs(graph, config)
            results["cut_masks"] = detections.cut_masks(graph, outputs, None, config=config)
            detections.write(graph, outputs, config)
    head = {"decode": "detections", "boxes": "xyxy", "outputs": None, "units": "pixels"}
    config = config.model_copy(update={"head": config.head.model_copy(update=head)})
    return graph, replace(options, config=config, masks=results["cut_masks"].count > 0), results
