"""Two-stage detectors: what Faster R-CNN and Mask R-CNN are exported as, in the form that engines run well.

An export of torchvision suppresses twice, among proposals and among detections, and aligns each region on one level of
a pyramid. Either exporter of PyTorch is read: the tracing one guards each suppression with an ``If`` and joins the
levels by ScatterElements, the newer one joins them by ScatterND. Each rewrite leaves the results as they are, bit for
bit, unless it is asked for fewer proposals; the outputs become rows of detections, the rule ``detections`` of
:class:`trtdet.config.HeadConfig`, and masks of the rows.
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
"""The rewrites in the order they run, after ``inline_nms_guard``; for a backend that lacks one of ``DATA_DEPENDENT``
they are those of :mod:`trtdet.passes.two_stage.static`."""

DATA_DEPENDENT = frozenset(("NonZero", "NonMaxSuppression", "RoiAlign"))
"""Operators of ONNX that the route with shapes that depend on the image needs."""

__all__ = ["BOXES", "REAL", "REWRITES", "check_batch", "cut", "is_two_stage", "prepared", "up_to_proposals"]


def is_two_stage(graph: gs.Graph) -> bool:
    """Whether regions are aligned in a graph, which is how a second stage reads the features of the first."""
    return any(node.op == "RoiAlign" for node in graph.nodes)


def check_batch(graph: gs.Graph, batch: int | str | None, option: str) -> None:
    """Refuses any batch but one image of a two-stage model.

    Args:
        graph: of any detector.
        batch: images at once that are asked for; a name for any number, None for what the model has.
        option: that asks for it, as the command line has it.

    Raises:
        ModelError: another batch than 1 is asked of a two-stage model.
    """
    if batch in (None, 1) or not is_two_stage(graph):
        return
    raise ModelError(
        f"a batch of {batch if isinstance(batch, int) else 'any size'} is asked for, and a two-stage model is of one "
        f"image: its suppressions are written for each image; leave {option} out"
    )


def prepared(graph: gs.Graph, options: Options) -> tuple[gs.Graph, PassResult]:
    """A two-stage graph with folded constants and no guards, which the rewrites look for their patterns in, and the
    result of ``inline_nms_guard``.

    Raises:
        ModelError: the model does not fit the configuration.
    """
    for _ in range(2):  # with the shapes that are inferred after the first time, more is constant
        clean.apply(graph, options)
        graph = to_graph(to_model(graph))
    result = suppressions.inline_guards(graph)
    return to_graph(to_model(graph)), result


def cut(graph: gs.Graph, options: Options) -> tuple[gs.Graph, Options, dict[str, PassResult]]:
    """A two-stage graph with rows of detections as its output, the options for them and each rewrite's result.

    A graph of one stage is given back as it is.

    Raises:
        ModelError: the outputs are not the boxes, labels and scores of one image, or another batch is asked for.
    """
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
