"""Ranges and their files: ``ranges.json`` and the text of TensorRT's calibration cache."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from trtdet.calibration import cache
from trtdet.calibration.histograms import Collection
from trtdet.calibration.thresholds import RULES, percentile
from trtdet.errors import CalibrationError, ConfigError, TrtdetWarning
from trtdet.files import finish_replacing, write_atomically
from trtdet.files.documents import read_result

_SCHEMA = 1
_SMALLEST_SCALE = 2.0**-126
_STRICT = ConfigDict(strict=True, extra="forbid")

_Finite = Annotated[float, Field(allow_inf_nan=False)]
_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class Range:
    """Range of one tensor. The INT8 scale is ``amax / 127``; ``low`` and ``high`` are the measured extremes."""

    __pydantic_config__ = _STRICT

    amax: _Positive
    low: _Finite
    high: _Finite

    @property
    def scale(self) -> float:
        return self.amax / 127.0


@dataclass(frozen=True)
class ChannelRange:
    """Range of each channel of a tensor."""

    __pydantic_config__ = _STRICT

    amax: tuple[_Positive, ...]  # by channel; the scale is amax / 127
    noise: _Finite  # mean square error of the activation over its variance, averaged over channels


@dataclass(frozen=True)
class Ranges:
    """Ranges of a model's activations by tensor name, and their provenance."""

    __pydantic_config__ = _STRICT

    rule: str  # a key of RULES
    percent: float | None  # of the rule percentile; None for other rules
    tensors: Mapping[str, Range]
    key: str  # of the collection, see trtdet.calibration.collector.collection_key
    images: int  # number of images
    images_sha256: str  # hash of their names and contents
    inputs: Mapping[str, ChannelRange] = field(default_factory=dict)  # of tensors that plugin activations read

    @staticmethod
    def choose(collection: Collection, rule: str, percent: float = 99.99) -> Ranges:
        """Applies a rule to every histogram of a collection.

        The network's input keeps its full range: pixels fill it by design, and the grey border of a letterbox misleads
        rules (entropy then clips the brighter half of every picture). A tensor that is zero on every image, or whose
        scale is no normal float32, gets amax 1 and a warning. Raises ConfigError if there is no
        such rule, or the percentile is out of range.
        """
        if rule not in RULES:
            raise ConfigError(f"no calibration rule '{rule}'; allowed: {', '.join(RULES)}")
        apply = partial(percentile, percent=percent) if rule == "percentile" else RULES[rule]
        histograms = collection.histograms
        silent = [name for name, histogram in histograms.items() if histogram.amax / 127.0 < _SMALLEST_SCALE]
        ruled = {name: histograms[name] for name in histograms if name not in silent and name != collection.source}
        # NumPy releases the interpreter's lock, so threads run in parallel.
        with ThreadPoolExecutor() as pool:
            amax = dict(zip(ruled, pool.map(apply, ruled.values()), strict=True))
        tensors = {
            name: Range(1.0 if name in silent else amax.get(name, histogram.amax), histogram.low, histogram.high)
            for name, histogram in histograms.items()
        }
        if silent:
            warnings.warn(
                f"{len(silent)} activations are zero on all calibration images, the first is '{silent[0]}': "
                "they get the range 1; are the images like those the detector was trained on?",
                TrtdetWarning,
                stacklevel=2,
            )
        return Ranges(
            rule=rule,
            percent=percent if rule == "percentile" else None,
            tensors=tensors,
            key=collection.key,
            images=collection.images,
            images_sha256=collection.images_sha256,
        )

    def to_json(self) -> str:
        return json.dumps({"schema": _SCHEMA, **asdict(self)}, indent=1) + "\n"

    def save(self, path: Path) -> None:
        """Writes ``ranges.json`` atomically."""
        write_atomically(path, self.to_json().encode())

    @staticmethod
    def load(path: Path) -> Ranges:
        """Reads ``ranges.json``. Raises CalibrationError if the file is missing, not JSON, of another schema, or a
        range is not over 0 and finite."""
        finish_replacing(path.parent)
        document = read_result(path, _File, "make ranges with 'trtdet calibrate'", error=CalibrationError)
        return Ranges(**{key.name: getattr(document, key.name) for key in fields(Ranges)})

    def to_calibration_cache(self, version: int) -> str:
        """The text of a calibration cache for TensorRT up to 10, see :func:`trtdet.calibration.cache.write`."""
        return cache.write({name: entry.scale for name, entry in self.tensors.items()}, version)


@dataclass(frozen=True)
class _File(Ranges):
    """Content of ``ranges.json``."""

    schema: Literal[1] = field(kw_only=True)
