"""Two-stage detectors: what Faster R-CNN and Mask R-CNN are exported as, in the form that engines run well.

An export of torchvision suppresses twice, among proposals and among detections, and aligns each region on one level of
a pyramid. The tracing exporter of PyTorch guards each suppression with an ``If`` and joins the levels by
ScatterElements, the newer one joins them by ScatterND. But for fewer proposals, each rewrite keeps the results bit for
bit; the outputs become rows of detections, the rule ``detections`` of :class:`trtdet.config.HeadConfig`, and masks.
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
"""The rewrites in order, after ``inline_nms_guard``, where a backend has all of ``DATA_DEPENDENT``; others get those of
:mod:`trtdet.passes.two_stage.static`."""

DATA_DEPENDENT = frozenset(("NonZero", "NonMaxSuppression", "RoiAlign"))

__all__ = ["BOXES", "REAL", "REWRITES", "check_batch", "cut", "is_two_stage", "prepared", "up_to_proposals"]


def is_two_stage(graph: gs.Graph) -> bool:
    """Whether regions are aligned in a graph, which is how a second stage reads the features of the first."""
    return any(node.op == "RoiAlign" for node in graph.nodes)


def check_batch(graph: gs.Graph, batch: int | str | None, option: str) -> None:
    """Refuses a batch other than 1 for a two-stage model.

    Args:
        graph: of any detector.
        batch: the size; a name for any size, None for that of the model.
        option: of the command line that sets it.

    Raises:
        ModelError: the model is a two-stage model and the batch another than 1.
    """
    if batch in (None, 1) or not is_two_stage(graph):
        return
    raise ModelError(
        f"a batch of {batch if isinstance(batch, int) else 'any size'} is asked for, and a two-stage model is of one "
        f"image: its suppressions are written for each image; leave {option} out"
    )


def prepared(graph: gs.Graph, options: Options) -> tuple[gs.Graph, PassResult]:
    """A two-stage graph with folded constants and no guards, and the result of ``inline_nms_guard``.

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
