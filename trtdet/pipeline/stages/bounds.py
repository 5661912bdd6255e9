"""A plan under a bound on the loss: its choices with their costs and errors, and scores by images that are divided."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property

import onnx

from trtdet.audit.neighbours import Costs
from trtdet.data import CocoDataset
from trtdet.errors import ConfigError
from trtdet.evaluation.agreement import agree
from trtdet.evaluation.comparison import compare
from trtdet.evaluation.confidence import halves
from trtdet.evaluation.scoring import Evaluation, evaluate
from trtdet.mixed_precision.planning import keeping
from trtdet.mixed_precision.program import Choice, Problem
from trtdet.mixed_precision.ranking import error_together, telling
from trtdet.mixed_precision.scores import Sensitivity
from trtdet.mixed_precision.search import Search
from trtdet.mixed_precision.subject import Subject
from trtdet.mixed_precision.trade_off import MAP, Figure, Score
from trtdet.pipeline.stages.correcting import Prepared
from trtdet.pipeline.stages.half_range import within_half
from trtdet.progress import Progress, silent
from trtdet.quantization import Cause
from trtdet.quantization.macs import multiply_adds
from trtdet.runtime.detector import Detector

_UNSEEN = 1e-6
"""The share of the largest error that every convolution in INT8 has at least."""


def plan_problem(prepared: Prepared, costs: Costs | None, ranked: Sensitivity | None = None) -> Problem:
    """INT8 or FP16 for every convolution that is in INT8 as long as nothing else is asked for.

    Args:
        prepared: the model.
        costs: of plans; None counts millions of multiply-adds, those in FP16 twice.
        ranked: the errors; None for none. A convolution that shows no error alone loses detections with others, so each
            has a millionth of the largest at least, and the least error is that of all in FP16.
    """
    names = prepared.plan.names("int8")
    macs = multiply_adds(prepared.model)
    errors = {layer.name: layer.score for layer in ranked.layers} if ranked is not None else {}
    least = 0.0 if ranked is None else _UNSEEN * max(errors.values(), default=0.0) or _UNSEEN

    def choices(name: str) -> tuple[Choice, Choice]:
        own = macs[name].count / 1e6 if costs is None else 0.0
        return Choice("int8", max(errors.get(name, 0.0), least), cost=own), Choice("fp16", 0.0, True, 2 * own)

    joints, fixed = ((), 0.0) if costs is None else (costs.joints, costs.fixed)
    return Problem({name: choices(name) for name in names}, joints, fixed)


def cost_unit(costs: Costs | None) -> str:
    """Of the costs in :func:`plan_problem`."""
    return "million multiply-adds, FP16 twice" if costs is None else costs.unit


@dataclass(frozen=True)
class Images:
    """What plans are measured on.

    Attributes:
        dataset: scored, by halves; annotated where mAP is.
        ranked: how many calibration images errors at the head are measured on, at least 1.
        figure: what is scored.
    """

    dataset: CocoDataset
    ranked: int
    figure: Figure = MAP


def search_within(
    prepared: Prepared,
    ranked: Callable[[], Sensitivity],
    costs: Costs | None,
    images: Images,
    progress: Progress = silent,
) -> Search:
    """A search that chooses by one half of the images and shows on the other.

    Args:
        prepared: the model.
        ranked: gives the ranking; not asked before it is needed.
        costs: of plans, see :func:`plan_problem`.
        images: what plans are measured on.
        progress: told of every image.
    """

    @cache
    def subject() -> Subject:
        whole = prepared.subject(images.ranked)
        return replace(whole, images=telling(whole))

    def head(fp16: tuple[str, ...]) -> float:
        int8 = tuple(name for name in prepared.plan.names("int8") if name not in fp16)
        return error_together(subject(), int8) if int8 else 0.0

    macs = multiply_adds(prepared.model)
    depthwise = tuple(name for name in prepared.plan.names("int8") if macs[name].depthwise)
    choosing, reporting = (PlanScorer(prepared, images.figure, part, progress) for part in halves(images.dataset))
    return Search(
        plan_problem(prepared, costs),
        lambda: plan_problem(prepared, costs, ranked()),
        head,
        {name: work.count for name, work in macs.items() if name in prepared.plan.entries},
        cost_unit(costs),
        choosing,
        reporting,
        images.figure,
        (depthwise,) if depthwise else (),
    )


class PlanScorer:
    """Scores plans on images, against the float model on the same.

    Args:
        prepared: the model.
        figure: what is scored.
        dataset: the images; annotated where mAP is scored.
        progress: told of every image.
    """

    def __init__(self, prepared: Prepared, figure: Figure, dataset: CocoDataset, progress: Progress) -> None:
        self._prepared, self._figure, self._dataset, self._progress = prepared, figure, dataset, progress
        self._count = 0
        self._known: dict[tuple[str, ...], Score] = {}

    @cached_property
    def _float(self) -> Evaluation:
        return self._scored(self._prepared.model)

    @property
    def reference(self) -> float:
        """The float model's own score, 0..1."""
        return self._float.result.map if self._figure is MAP else 1.0

    def __call__(self, names: tuple[str, ...]) -> Score:
        """Of the plan with these convolutions in FP16; measured once."""
        if names not in self._known:
            self._known[names] = self._measured(names)
        return self._known[names]

    def _measured(self, names: tuple[str, ...]) -> Score:
        prepared, reference = self._prepared, self._float
        judge = _by_map if self._figure is MAP else _by_agreement
        plan = keeping(prepared.plan, dict.fromkeys(names, "tried"), Cause.KEPT_BOUND)
        plan = within_half(prepared.model, plan, prepared.flow, prepared.magnitudes, self._progress)
        return judge(self._scored(prepared.explicit(plan).model), reference)

    def _scored(self, model: onnx.ModelProto) -> Evaluation:
        self._count += 1
        stage = f"{self._figure.column} on {len(self._dataset.images)} images, evaluation {self._count}"
        prepared, told = self._prepared, self._progress
        detector = Detector.running(model, prepared.config, prepared.graph.nms_mode)
        return evaluate(
            detector, self._dataset, lambda done, total: told(stage, done, total), prepared.calibrated.cache
        )


def _by_map(got: Evaluation, reference: Evaluation) -> Score:
    found = compare(got, reference)
    return Score(got.result.map, found.difference, found.low, found.high, found.images)


def _by_agreement(got: Evaluation, reference: Evaluation) -> Score:
    found = agree(got, reference)
    if found.ap is None or found.low is None or found.high is None:
        raise ConfigError(f"--max-disagreement: {found.problem}")
    return Score(None, found.ap - 1, found.low - 1, found.high - 1, found.images, found.ap)
