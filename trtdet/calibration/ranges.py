"""Chosen ranges as files: ``ranges.json`` and the text of TensorRT's calibration cache."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, TypeAdapter

from trtdet.calibration import cache
from trtdet.calibration.histograms import Collection
from trtdet.calibration.thresholds import RULES, percentile
from trtdet.errors import CalibrationError, ConfigError, TrtdetWarning
from trtdet.files import write_atomically
from trtdet.files.documents import DocumentError, read_document

_SCHEMA = 1
_SMALLEST_SCALE = 2.0**-126
_STRICT = ConfigDict(strict=True, extra="forbid")

_Finite = Annotated[float, Field(allow_inf_nan=False)]
_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class Range:
    """The range of one tensor: INT8's scale is ``amax / 127``; ``low`` and ``high`` are the extremes seen."""

    __pydantic_config__ = _STRICT

    amax: _Positive
    low: _Finite
    high: _Finite

    @property
    def scale(self) -> float:
        return self.amax / 127.0


@dataclass(frozen=True)
class ChannelRange:
    """The range of each channel of a tensor.

    Attributes:
        amax: by channel; its step is ``amax / 127``.
        noise: mean square error of the tensor's activation over its variance, averaged over channels.
    """

    __pydantic_config__ = _STRICT

    amax: tuple[_Positive, ...]
    noise: _Finite


@dataclass(frozen=True)
class Ranges:
    """The ranges of a model's activations, and their provenance.

    Attributes:
        rule: ``minmax``, ``entropy``, ``percentile`` or ``mse``.
        percent: the percentile, None for the other rules.
        tensors: by tensor name.
        key: of the collection, see :func:`trtdet.calibration.collector.collection_key`.
        images: how many images were used.
        images_sha256: hash of their names and contents.
        inputs: by name of a tensor that an activation of the plugin library reads, its range in each channel.
    """

    __pydantic_config__ = _STRICT

    rule: str
    percent: float | None
    tensors: Mapping[str, Range]
    key: str
    images: int
    images_sha256: str
    inputs: Mapping[str, ChannelRange] = field(default_factory=dict)

    @staticmethod
    def choose(collection: Collection, rule: str, percent: float = 99.99) -> Ranges:
        """Applies a rule to every histogram of a collection.

        The network's input keeps its whole range: pixels are spread over it by design, and the one grey level of a
        letterbox's border misleads rules (entropy then cuts the brighter half of every picture off). A tensor that was
        zero on every image, or so small that its scale is no normal float32, gets amax 1 and a warning.

        Raises:
            ConfigError: no such rule, or a percentile out of range.
        """
        if rule not in RULES:
            raise ConfigError(f"no calibration rule '{rule}'; allowed: {', '.join(RULES)}")
        apply = partial(percentile, percent=percent) if rule == "percentile" else RULES[rule]
        histograms = collection.histograms
        silent = [name for name, histogram in histograms.items() if histogram.amax / 127.0 < _SMALLEST_SCALE]
        ruled = {name: histograms[name] for name in histograms if name not in silent and name != collection.source}
        # NumPy computes outside the interpreter's lock, so that threads share the work.
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
        """Reads ``ranges.json``.

        Raises:
            CalibrationError: the file is missing, not JSON, of another schema, or a range is not over 0 and finite.
        """
        try:
            document = read_document(path, TypeAdapter(_File))
            return Ranges(**{key.name: getattr(document, key.name) for key in fields(Ranges)})
        except FileNotFoundError:
            raise CalibrationError(f"ranges '{path}' do not exist; make them with 'trtdet calibrate'") from None
        except DocumentError as error:
            if (error.place, error.kind) == ("schema", "literal_error"):
                raise CalibrationError(f"ranges '{path}' are of another schema; calibrate again") from None
            raise CalibrationError(f"ranges '{path}' are no ranges: {error}; calibrate again") from None
        except OSError as error:
            raise CalibrationError(f"ranges '{path}' cannot be read: {error}; calibrate again") from None

    def to_calibration_cache(self, version: int) -> str:
        """The text that TensorRT up to 10 reads as a calibration cache, see :func:`trtdet.calibration.cache.write`."""
        return cache.write({name: entry.scale for name, entry in self.tensors.items()}, version)


@dataclass(frozen=True)
class _File(Ranges):
    """What ``ranges.json`` holds."""

    schema: Literal[1] = field(kw_only=True)
