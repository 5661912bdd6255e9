"""The default plan of backends that quantise in kernels of their own: the fastest by the estimates of built engines.

What INT8 gains in a convolution depends on its neighbours, on the GPU and on what the builder fuses, so rules alone
give plans that are slower than FP16. The optimiser takes plans between INT8, wherever a convolution has the channels
for it, and FP16, with the costs of :mod:`trtdet.audit.neighbours`. A builder fuses more, or less, than these assume. So
each plan is built, and the estimate of its own engine decides. Ranges are not known yet: a fixed one stands in, as a
builder chooses its layers without looking at scales.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from trtdet.audit.neighbours import time_costs
from trtdet.audit.roofline import Roofline, estimate
from trtdet.audit.traffic import Flow
from trtdet.backends import Backend, Capabilities, EngineTarget
from trtdet.building.corrections import prepared
from trtdet.building.costs import batch_of, built_of, gpu_of
from trtdet.building.engine import runs_on
from trtdet.building.graph import PlacedGraph
from trtdet.building.plan import keeping_named
from trtdet.building.ranges import Selection, without_histograms
from trtdet.building.selection import calibration_images
from trtdet.calibration import Range
from trtdet.data import ImageCache, find_images
from trtdet.options import DEFAULT_IMAGES, BuildOptions, CalibrationOptions
from trtdet.options.fields import USUAL_GUARD
from trtdet.plans.optimiser import PrecisionChoice, Problem, front
from trtdet.plans.planning import keeping
from trtdet.progress import Progress, silent
from trtdet.quantization import Cause, DataFlow, PrecisionPlan

_FRONT = 4
"""Plans from the cheapest to INT8 everywhere, and from the cheapest to FP16 everywhere, that are built."""

_AMAX = 4.0
"""The fixed range."""


@dataclass(frozen=True)
class DefaultPlan:
    """The fastest plan by estimate."""

    plan: PrecisionPlan  # of the build; without INT8 if FP16 is built alone
    gpu: str
    batch: int
    int8: int  # number of INT8 convolutions of the fastest plan that has some; 0 if none has the channels for INT8
    int8_ms: float | None  # estimated milliseconds per run of that plan
    fp16_ms: float
    least: float  # the smallest speed-up over FP16 for which the build has INT8 layers

    @property
    def speedup(self) -> float | None:
        """Speed of the fastest plan with INT8 layers divided by that of FP16; None without such a plan."""
        return None if self.int8_ms is None else self.fp16_ms / self.int8_ms

    @property
    def fp16_alone(self) -> bool:
        """Whether no INT8 layer is worth building."""
        return self.speedup is None or self.speedup < self.least

    @property
    def basis(self) -> str:
        """GPU and batch, as text for brackets."""
        return f"estimate for {self.gpu}, batch {self.batch}"

    @property
    def reason(self) -> str:
        """The times behind the decision."""
        if self.int8_ms is None:
            return "no convolution has the channels for INT8"
        times = f"{self.int8_ms:.3f} ms against {self.fp16_ms:.3f} ms in FP16 ({self.basis})"
        if self.fp16_alone:
            return f"no plan with INT8 layers is {self.least:g} times as fast; the best takes {times}"
        return f"INT8 in {self.int8} convolutions takes {times}"

    def __str__(self) -> str:
        """One sentence without a full stop."""
        return f"FP16 alone: {self.reason}" if self.fp16_alone else self.reason


def decided_by_time(options: BuildOptions, caps: Capabilities, flow: DataFlow) -> bool:
    """Whether the estimate chooses the plan: none is asked for or in the model, the backend quantises in separate
    kernels, and no candidates are timed instead."""
    separate = caps.lists_layers and flow.fused is False
    return options.planless and separate and not timed_here(options, caps)


def timed_here(options: BuildOptions, caps: Capabilities) -> bool:
    """Whether a default build times candidates on a GPU of this machine, see :func:`trtdet.candidates.build`."""
    return timeable(options, caps) and images_to_score(options) > 0


def timeable(options: BuildOptions, caps: Capabilities) -> bool:
    """Whether the options leave the plan open to measurements, and a GPU of this machine runs the engine."""
    return options.plan_open and options.compare and runs_on("auto", caps, EngineTarget.of(options)) == "engine"


def images_to_score(options: BuildOptions) -> int:
    """Number of images that score candidates: validation images, or else calibration images that are not used."""
    calibration, plan = options.calibration, options.plan
    if plan.val_images is not None:
        return len(find_images(plan.val_images))
    unused = len(calibration_images(calibration)) - (calibration.num_images or DEFAULT_IMAGES)
    return max(0, min(unused, DEFAULT_IMAGES))


def fastest_plan(
    graph: PlacedGraph, backend: Backend, options: BuildOptions, progress: Progress = silent
) -> DefaultPlan | None:
    """Builds plans between INT8 wherever possible and FP16, and returns the fastest; None if no layers are listed.

    Convolutions that ``keep_fp16`` names stay in FP16. FP16 alone is chosen unless a plan is ``least_speedup`` times as
    fast, without that 1.02 times. Raises ConfigError: the model lacks a named convolution, or the table of GPUs the
    named GPU; BackendError: the backend refuses a network.
    """
    start = keeping_named(graph.faster, options.plan, graph.model)
    engines = _Engines(graph, backend, options=options, progress=progress)
    able, every = start.names("int8"), graph.placement.plan.names("int8")
    if not engines.listed:
        return None
    # The costs are best known of an engine with every convolution in INT8, also those that stay in FP16 anyway.
    flow, fixed = engines.flow(every), frozenset(every).difference(able)
    costs = time_costs(flow, Roofline(flow, gpu=engines.gpu, batch=engines.batch, graph=engines.captured))
    tried: dict[tuple[str, ...], float] = {able: engines.ms(able)} if able else {}
    kept = (PrecisionChoice("fp16", 0.0, half=True),)
    # The error of a plan is its number of convolutions that are not as wanted: in INT8, then in FP16.
    for int8_error, fp16_error in ((0.0, 1.0), (1.0, 0.0)) if able else ():
        both = PrecisionChoice("int8", int8_error), PrecisionChoice("fp16", fp16_error, half=True)
        choices = {name: kept if name in fixed else both for name in every}
        for plan in front(Problem(choices, costs.joints, costs.fixed), _FRONT):
            int8 = tuple(name for name in able if name not in plan.half)
            tried |= {int8: engines.ms(int8)} if int8 else {}
    best = min(tried, key=tried.__getitem__, default=())
    fastest = DefaultPlan(
        start,
        gpu=engines.gpu.name,
        batch=engines.batch,
        int8=len(best),
        int8_ms=tried.get(best),
        fp16_ms=engines.ms(()),
        least=options.least_speedup or USUAL_GUARD,
    )
    half = frozenset(able).difference(() if fastest.fp16_alone else best)
    decision = "FP16 alone" if fastest.fp16_alone else f"in FP16 in the fastest of {len(tried)} plans"
    whole = costs.of(half | fixed)
    changes = {name: 1e3 * (costs.of((half | fixed) - {name}) - whole) for name in able if name in half}
    reasons = {
        name: f"{decision}; INT8 here alone changes the estimate by {change:+.1f} us ({fastest.basis})"
        for name, change in changes.items()
    }
    return replace(fastest, plan=keeping(start, reasons, Cause.NO_TIME_GAINED))


class _Engines:
    """Engines with some convolutions in INT8, each built once."""

    def __init__(self, graph: PlacedGraph, backend: Backend, options: BuildOptions, progress: Progress) -> None:
        self._backend, self._options, self._progress = backend, options, progress
        # Every possible convolution is in INT8, and every tensor has one fixed range.
        tensors = dict.fromkeys(graph.placement.activations, Range(_AMAX, -_AMAX, _AMAX))
        calibrated = without_histograms(graph, Selection(cache=ImageCache(0)), "minmax", tensors=tensors)
        self._prepared = prepared(calibrated, CalibrationOptions(), (), plan=graph.placement.plan)
        self.captured = not backend.capabilities.uncaptured(graph.nms_mode, graph.config.nms)
        self._flows: dict[frozenset[str], Flow | None] = {}
        self.batch = batch_of(options, graph.model)
        self.gpu = gpu_of(options.engine.gpu, ())
        self.listed = self._built(()) is not None

    def flow(self, int8: Collection[str]) -> Flow:
        flow = self._built(int8)
        assert flow is not None, "one engine listed its layers"
        return flow

    def ms(self, int8: Collection[str]) -> float:
        return estimate(self.flow(int8), self.gpu, self.batch, graph=self.captured).ms

    def _built(self, int8: Collection[str]) -> Flow | None:
        key = frozenset(int8)
        if key not in self._flows:
            self._progress("choosing the plan", len(self._flows), 2 * _FRONT + 1)
            every = self._prepared.plan
            half = (name for name in every.names("int8") if name not in key)
            plan = keeping(every, dict.fromkeys(half, "tried"), Cause.NO_TIME_GAINED)
            engine = built_of(self._prepared, plan, self._backend, options=self._options)
            self._flows[key] = engine.flow
            self.gpu = gpu_of(self._options.engine.gpu, engine.built.sms)
        return self._flows[key]
