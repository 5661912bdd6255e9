"""The keys of ``eval.json``, ``profile.json`` and ``bench.json`` that a report reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, model_validator

from trtdet.building.worth import ComparisonKeys, Number, RatioKeys, ReadKeys
from trtdet.files.documents import check_value


class _Agreement(ReadKeys):
    ap: Number | None = None
    low: Number | None = None
    high: Number | None = None
    images: int = 0

    @model_validator(mode="after")
    def _whole(self) -> _Agreement:
        if self.ap is not None and (self.low is None or self.high is None):
            raise ValueError("has an 'ap' without the interval 'low' and 'high'")
        return self


class _Threshold(ReadKeys):
    reference: Number
    threshold: Number | None
    low: Number | None
    high: Number | None
    problem: str | None


class _Ratio(ReadKeys):
    median: Number | None
    low: Number | None
    high: Number | None
    pairs: int

    @model_validator(mode="after")
    def _whole(self) -> _Ratio:
        if self.median is not None and (self.low is None or self.high is None):
            raise ValueError("has a 'median' without the interval 'low' and 'high'")
        return self


class _Shift(ReadKeys):
    basis: str
    overall: list[_Threshold]
    score_ratio: _Ratio


class _PartScores(ReadKeys):
    map: Number | None
    map50: Number | None = None
    map75: Number | None = None
    map_small: Number | None = None
    map_medium: Number | None = None
    map_large: Number | None = None


class _Scores(_PartScores):
    per_class: dict[str, Number | None]


class _PartAgainst(ReadKeys):
    scores: _PartScores | None = None


class _Against(ReadKeys):
    """The reference of an evaluation."""

    file: str
    scores: _Scores | None = None
    masks: _PartAgainst | None = None
    keypoints: _PartAgainst | None = None
    rotated_boxes: _PartAgainst | None = None
    agreement: _Agreement | None = None
    agreement_of_parts: dict[str, _Agreement] = Field(default_factory=dict)
    score_shift: _Shift | None = None


class _Evaluation(_Scores):
    images: int
    file: str
    ran_on: str
    masks: _PartScores | None = None
    keypoints: _PartScores | None = None
    rotated_boxes: _PartScores | None = None
    against: _Against | None = None

    @model_validator(mode="after")
    def _whole(self) -> _Evaluation:
        parts = (self.masks, self.keypoints, self.rotated_boxes)
        if self.map is not None and any(part is not None and part.map is None for part in parts):
            raise ValueError("has a part without a 'map', and a 'map' of the boxes")
        return self


class _Latency(ReadKeys):
    mean: Number
    stddev: Number


class _Share(ReadKeys):
    """:class:`trtdet.performance.profiles.Share`."""

    model_config = ConfigDict(strict=True, extra="forbid")

    name: str
    ms: Number
    stddev: Number
    count: int
    share: Number


class _Layer(ReadKeys):
    name: str
    type: str
    onnx: list[str]
    part: str
    ms: Number
    stddev: Number
    share: Number


class _Profile(ReadKeys):
    name: str
    file: str
    ran_on: str
    batch: int
    runs: int
    sum_ms: Number
    overhead: Number
    latency_ms: _Latency
    types: list[_Share]
    parts: list[_Share]
    layers: list[_Layer]
    warnings: list[str] = Field(default_factory=list)


class _Profiling(_Profile):
    against: _Profile | None = None


class _Percentiles(_Latency):
    p50: Number
    p95: Number


class _Rate(ReadKeys):
    images_per_second: Number


class _Point(ReadKeys):
    batch: int
    latency_ms: _Percentiles
    ratio: RatioKeys | None
    throughput: Annotated[list[_Rate], Field(min_length=1)]


class _Target(ReadKeys):
    name: str
    file: str
    ran_on: str
    points: Annotated[list[_Point], Field(min_length=1)]


class _Benchmark(ReadKeys):
    targets: list[_Target]
    baseline: str | None
    rounds: int
    warnings: list[str]


_COMPARISON, _EVALUATION, _PROFILING, _BENCHMARK = (
    TypeAdapter(kind) for kind in (ComparisonKeys, _Evaluation, _Profiling, _Benchmark)
)


def check_evaluation(plain: Mapping[str, Any]) -> None:
    """Raises DocumentError if the content of an ``eval.json`` lacks what a report reads, or has another type."""
    check_value(plain, _EVALUATION)
    against = plain.get("against") or {}
    # Only a comparison on annotated images has a difference.
    if "difference" in against:
        check_value(against, _COMPARISON)


def check_profile(plain: Mapping[str, Any]) -> None:
    """Raises DocumentError as :func:`check_evaluation` does, for a ``profile.json``."""
    check_value(plain, _PROFILING)


def check_benchmark(plain: Mapping[str, Any]) -> None:
    """Raises DocumentError as :func:`check_evaluation` does, for a ``bench.json``."""
    check_value(plain, _BENCHMARK)
