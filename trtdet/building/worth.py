"""Reads ``worth.json``, the comparison of a bundle with FP16."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from trtdet.bundle import Bundle
from trtdet.errors import BundleError, one_line
from trtdet.files.documents import check_value

WORTH = "worth.json"
"""File of a bundle with the comparison."""

Number = Annotated[float, Field(allow_inf_nan=False)]
_Above = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class ReadKeys(BaseModel):
    """Other keys are allowed: a later version may add some."""

    model_config = ConfigDict(strict=True)


class _Change(ReadKeys):
    """A difference of mAP."""

    map: Number
    difference: Number
    low: Number
    high: Number


class ComparisonKeys(_Change):
    """As :meth:`trtdet.evaluation.comparison.Comparison.as_dict`, with that of each part."""

    confidence: Number
    images: int
    ran_on: str
    verdict: str
    masks: _Change | None = None
    keypoints: _Change | None = None
    rotated_boxes: _Change | None = None


class RatioKeys(ReadKeys):
    """Time divided by that of a baseline, and its interval."""

    value: _Above
    low: _Above
    high: _Above


class _EngineFigures(ReadKeys):
    ms: Number
    bytes: Number
    file_bytes: Number


class _Estimate(ReadKeys):
    gpu: str
    batch: int
    int8: _EngineFigures
    fp16: _EngineFigures
    ratio: _Above
    interval: Annotated[list[_Above], Field(min_length=2, max_length=2)]
    verdict: str


class _Worth(ReadKeys):
    said: str
    against: str
    batch: int
    comparison: ComparisonKeys | None
    latency: RatioKeys | None
    estimate: _Estimate | None
    ran_on: str | None
    speedup: Number | None = None
    advice: str = ""


_ADAPTER = TypeAdapter(_Worth)


def read_worth(bundle: Bundle) -> dict[str, Any]:
    """The content of a bundle's ``worth.json``, as :meth:`trtdet.building.comparison.Worth.as_dict`. Raises
    BundleError: the bundle has no such file, or it lacks what is read of it."""
    path = bundle.file(WORTH)
    try:
        plain: dict[str, Any] = json.loads(path.read_bytes())
        check_value(plain, _ADAPTER)
    except (OSError, ValueError, RecursionError) as error:
        raise BundleError(
            f"'{path}' is no comparison with FP16 ({one_line(error)})", "build the bundle again"
        ) from None
    return plain
