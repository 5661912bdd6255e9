"""Which of the built candidates ships, by times that were measured or estimated."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from trtdet.backends import Capabilities
from trtdet.building.costs import gpu_of
from trtdet.candidates import finishing
from trtdet.candidates.finishing import _choice, _Entrant, _estimated, _Times
from trtdet.candidates.folder import Accuracy, Candidate
from trtdet.options import FinishOptions
from trtdet.performance.results import Ratio

SM = 86


def entrant(name: str, difference: float = 0.0, flow: Any = "listed") -> _Entrant:
    """A candidate and as much of its manifest and engine as an estimate asks for."""
    accuracy = Accuracy("map", value=0.4, difference=difference, low=difference, high=difference, images=9, parts={})
    candidate = Candidate(name, name, "int8", {}, False, None, 0.5, accuracy)
    shape, nms = SimpleNamespace(opt=(1, 3, 8, 8)), SimpleNamespace(mode="host", thresholds=None)
    manifest: Any = SimpleNamespace(nms=nms, input=SimpleNamespace(shape=shape))
    engine: Any = SimpleNamespace(flow=flow, built=SimpleNamespace(sms=(SM,)))
    return _Entrant(candidate, manifest, engine)


def measured(**ratios: float) -> _Times:
    """Of engines that take these multiples of FP16's time, each within 1 %."""
    spread = {name: Ratio(value, 0.99 * value, 1.01 * value) for name, value in ratios.items()}
    return _Times(ms=ratios, ratios=spread, baseline="fp16", how="measured", on="a GPU")


@pytest.mark.parametrize(("least", "shipped"), [(None, "default"), (1.2, "default"), (1.3, "fp16")])
def test_fp16_ships_unless_another_is_as_many_times_as_fast_as_was_asked_for(least, shipped):
    entrants = [entrant("fp16"), entrant("default", -0.01)]
    chosen, why = _choice(entrants, measured(fp16=1.0, default=0.8), least)
    assert chosen.candidate.name == shipped
    assert why.startswith(f"'{shipped}' ships") and ("1.3 times as fast is asked for" in why) == (least == 1.3)


@pytest.mark.parametrize(("default", "shipped"), [(0.81, "default"), (0.9, "int8-all")])
def test_of_equally_fast_candidates_the_most_accurate_ships(default, shipped):
    entrants = [entrant("fp16"), entrant("default", -0.01), entrant("int8-all", -0.02)]
    times = measured(**{"fp16": 1.0, "default": default, "int8-all": 0.8})
    assert _choice(entrants, times, None)[0].candidate.name == shipped


def test_a_candidate_that_was_built_alone_is_estimated_for_the_gpu_of_its_engine(monkeypatch):
    caps = cast(Capabilities, SimpleNamespace(uncaptured=lambda mode, thresholds: ()))
    asked = []

    def estimate(flow: Any, gpu: Any, batch: int, graph: bool) -> Any:
        asked.append((flow, gpu, batch, graph))
        return SimpleNamespace(ms=2.0)

    monkeypatch.setattr(finishing, "estimate", estimate)
    gpu = gpu_of(None, (SM,))
    times = _estimated([entrant("fp16")], caps, FinishOptions(), missing="no GPU")
    assert asked == [("listed", gpu, 1, True)]
    assert (times.ms, times.baseline, times.how, times.on) == ({"fp16": 2.0}, "fp16", "estimated", gpu.name)
    assert times.ratios == {"fp16": Ratio(1.0, 1.0, 1.0)}
    unknown = _estimated([entrant("fp16", flow=None)], caps, FinishOptions(), missing="no GPU").unknown
    assert unknown == "engines do not run here, as no GPU, and no layers are listed"
