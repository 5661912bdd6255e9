"""Reads the output of a command for a report: a bundle, the folder of a tune or sweep, or a JSON file."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import onnx

from trtdet.audit import Audit
from trtdet.building.bundle import AUDIT
from trtdet.building.comparison import WORTH
from trtdet.building.plan import RANKING
from trtdet.building.ranges import HISTOGRAMS
from trtdet.building.variants import CORRECTED, EXPERIMENT, tuned_ranges
from trtdet.bundle import Bundle
from trtdet.calibration import Collection, Ranges
from trtdet.errors import ConfigError
from trtdet.experiments.experiment import Experiment
from trtdet.experiments.folder import Provenance
from trtdet.plans.scores import Sensitivity
from trtdet.quantization import PrecisionPlan

PLAN = "plan.json"
_T = TypeVar("_T")


@dataclass(frozen=True)
class Run:
    """The output of one command; results that it does not have are None."""

    path: Path
    bundle: Bundle | None = None
    experiment: Experiment | None = None  # of a sweep or a tune
    scores: Mapping[str, Any] | None = None  # content of an ``eval.json``
    profile: Mapping[str, Any] | None = None  # content of a ``profile.json``
    plan: PrecisionPlan | None = None  # the precision of each convolution, of a bundle or of a ``plan.json`` alone
    audit: Audit | None = None  # the layers of a bundle's engine
    worth: Mapping[str, Any] | None = None
    """INT8 compared with FP16, as :meth:`trtdet.building.comparison.Worth.as_dict`."""
    lone_ranking: Sensitivity | None = None  # a ``sensitivity.json`` outside a bundle or folder

    @property
    def name(self) -> str:
        """The run's name in a report."""
        return self.path.name or str(self.path)

    @cached_property
    def ranking(self) -> Sensitivity | None:
        """Sensitivity of the convolutions, the most sensitive first."""
        return self.read(RANKING, Sensitivity.load) or self.lone_ranking

    @cached_property
    def collection(self) -> Collection | None:
        """The histograms of the calibration."""
        return self.read(HISTOGRAMS if self.provenance is None else self.provenance.histograms, Collection.load)

    @cached_property
    def ranges(self) -> Ranges | None:
        """The ranges in use."""
        if self.experiment is not None and self.experiment.kind == "tune":
            return self.read(CORRECTED, lambda _: tuned_ranges(self.path))
        return self.read("ranges.json", Ranges.load)

    @cached_property
    def provenance(self) -> Provenance | None:
        """Provenance of the folder of an experiment; None for a bundle, and where the folder has none."""
        return Provenance.load(self.path) if self.experiment is not None else None

    @cached_property
    def model(self) -> onnx.ModelProto | None:
        """The model that the engine was built from."""
        return None if self.bundle is None else onnx.load(self.bundle.model, load_external_data=False)

    def read(self, name: str, load: Callable[[Path], _T]) -> _T | None:
        """Loads a file of the bundle or folder; None where it does not exist."""
        if self.bundle is not None:
            return load(self.bundle.file(name)) if name in self.bundle.manifest.files else None
        path = self.path / name
        return load(path) if self.path.is_dir() and path.is_file() else None


def bundle_run(path: Path, bundle: Bundle) -> Run:
    """The build of a bundle; raises TrtdetError if its plan, audit or comparison is damaged."""
    run = Run(path, bundle=bundle)
    plan, audit = run.read(PLAN, PrecisionPlan.load), run.read(AUDIT, Audit.load)
    return replace(run, plan=plan, audit=audit, worth=run.read(WORTH, _json_object))


def read_run(path: Path) -> Run:
    """Reads a bundle, the folder of a tune or a sweep, or a sensitivity.json, plan.json, profile.json or eval.json.
    Raises ConfigError: ``path`` is none of these; TrtdetError: a file is damaged."""
    allowed = (
        "give a bundle, the -o of 'trtdet tune' or 'trtdet sweep', a sensitivity.json, a plan.json, a profile.json, "
        "or an eval.json"
    )
    if not path.exists():
        raise ConfigError(f"run '{path}' does not exist; {allowed}")
    if (path / EXPERIMENT).is_file():
        return Run(path, experiment=Experiment.load(path / EXPERIMENT))
    if (path / "manifest.json").is_file():
        return bundle_run(path, Bundle(path))
    if path.is_dir():
        raise ConfigError(f"'{path}' is the folder of no finished run; {allowed}")
    try:
        plain = _json_object(path)
    except ConfigError as error:
        raise ConfigError(f"{error}; {allowed}") from None
    if {"layers", "inferences"} <= plain.keys():
        return Run(path, lone_ranking=Sensitivity.load(path))
    if {"entries", "schema"} <= plain.keys():
        return Run(path, plan=PrecisionPlan.load(path))
    if {"layers", "sum_ms"} <= plain.keys():
        return Run(path, profile=plain)
    if {"map", "per_class", "images"} <= plain.keys():
        return Run(path, scores=plain)
    raise ConfigError(f"'{path}' is no result that a report reads; {allowed}")


def _json_object(path: Path) -> dict[str, Any]:
    try:
        plain = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"'{path}' cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"'{path}' is not JSON ({error})") from None
    if not isinstance(plain, dict):
        raise ConfigError(f"'{path}' holds no JSON object")
    return plain
