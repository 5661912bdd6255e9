"""Reads the output of a command for a report: a bundle, the folder of a tune or sweep, or a JSON file."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import onnx

from trtdet.audit import Audit
from trtdet.building.bundle import AUDIT
from trtdet.building.plan import RANKING
from trtdet.building.ranges import HISTOGRAMS
from trtdet.building.variants import CORRECTED, EXPERIMENT, tuned_ranges
from trtdet.building.worth import WORTH, read_worth
from trtdet.bundle import Bundle
from trtdet.calibration import Collection, Ranges
from trtdet.errors import ConfigError
from trtdet.experiments.experiment import Experiment
from trtdet.experiments.folder import Provenance
from trtdet.files.documents import DocumentError
from trtdet.passes import load_model
from trtdet.plans.scores import Sensitivity
from trtdet.quantization import PrecisionPlan
from trtdet.report.documents import check_benchmark, check_evaluation, check_profile

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
    benchmark: Mapping[str, Any] | None = None  # content of a ``bench.json``
    target: Mapping[str, Any] | None = None  # of the benchmark, what this bundle ships
    plan: PrecisionPlan | None = None  # the precision of each convolution, of a bundle or of a ``plan.json`` alone
    audit: Audit | None = None  # the layers of a bundle's engine
    worth: Mapping[str, Any] | None = None
    """INT8 compared with FP16, as :meth:`trtdet.building.comparison.Worth.as_dict`."""
    lone_ranking: Sensitivity | None = None  # a ``sensitivity.json`` that was given by itself
    label: str = ""  # name in a report, if several runs have the same file name

    @property
    def name(self) -> str:
        """The run's name in a report."""
        return self.label or self.path.name or str(self.path)

    @cached_property
    def ranking(self) -> Sensitivity | None:
        """Sensitivity of the convolutions, the most sensitive first; one that was given by itself comes first."""
        return self.lone_ranking or self.read(RANKING, Sensitivity.load)

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

    @property
    def shipped(self) -> Path | None:
        """What a bundle ships: its engine, or the model that its backend runs."""
        return None if self.bundle is None else self.bundle.engine or self.bundle.model

    def ships(self, file: str) -> bool:
        """Whether a measured file of this bundle is the one that ships: a model's times are not those of its engine."""
        return self.shipped is not None and Path(file).name == self.shipped.name

    def holds(self, file: str, beside: Path) -> bool:
        """Whether a file of another run lies in this bundle. ``file`` is relative to the working directory or to the
        folder of ``beside``, the other run."""
        parents = (Path(file).parent.resolve(), (beside.parent / file).parent.resolve())
        return self.bundle is not None and self.path.resolve() in parents

    @cached_property
    def model(self) -> onnx.ModelProto | None:
        """The model that the engine was built from."""
        return None if self.bundle is None else load_model(self.bundle.model, allow_quantized=True)

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
    return replace(run, plan=plan, audit=audit, worth=read_worth(bundle) if WORTH in bundle.manifest.files else None)


def attached(runs: Sequence[Run]) -> list[Run]:
    """The runs, with each evaluation, profile, benchmark and sensitivity in the bundles that it is of, in place of a
    run of its own. A sensitivity belongs to every bundle whose convolutions it ranks."""
    bundles = [run for run in runs if run.bundle is not None]
    used = set()
    for run in runs:
        if run.bundle is not None or run.experiment is not None:
            continue
        for place, bundle in enumerate(bundles):
            if results := _results_of(bundle, run):
                bundles[place] = replace(bundle, **results)
                used.add(run.path)
    return [*bundles, *(run for run in runs if run.bundle is None and run.path not in used)]


def _results_of(bundle: Run, run: Run) -> dict[str, Any]:
    """The fields of ``bundle`` that another run fills; empty if it is not of the bundle."""
    if run.scores is not None and bundle.scores is None and bundle.holds(run.scores["file"], run.path):
        return {"scores": run.scores}
    if run.profile is not None and bundle.profile is None and bundle.holds(run.profile["file"], run.path):
        return {"profile": run.profile}
    if run.benchmark is not None and bundle.benchmark is None:
        own = [target for target in run.benchmark["targets"] if bundle.holds(target["file"], run.path)]
        if own:
            return {"benchmark": run.benchmark, "target": next((one for one in own if bundle.ships(one["file"])), None)}
    ranking, plan = run.lone_ranking, bundle.plan
    if ranking is not None and plan is not None and bundle.lone_ranking is None:
        return {"lone_ranking": ranking} if all(layer.name in plan.entries for layer in ranking.layers) else {}
    return {}


def named_apart(runs: Sequence[Run]) -> list[Run]:
    """The runs, with as many parent folders in their names as tell them apart."""
    depths = [1] * len(runs)

    def label(place: int) -> str:
        return "/".join(runs[place].path.resolve().parts[-depths[place] :])

    while True:
        labels = [label(place) for place in range(len(runs))]
        same = [place for place, name in enumerate(labels) if labels.count(name) > 1]
        if not same:
            return [replace(run, label=name) for run, name in zip(runs, labels, strict=True)]
        for place in same:
            depths[place] += 1


def read_run(path: Path) -> Run:
    """Reads a bundle, the folder of a tune or a sweep, or a sensitivity.json, plan.json, profile.json, bench.json or
    eval.json. Raises ConfigError: ``path`` is none of these; TrtdetError: a file is damaged."""
    allowed = (
        "give a bundle, the -o of 'trtdet tune' or 'trtdet sweep', a sensitivity.json, a plan.json, a profile.json, "
        "a bench.json, or an eval.json"
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
    try:
        if {"layers", "sum_ms"} <= plain.keys():
            check_profile(plain)
            return Run(path, profile=plain)
        if {"targets", "baseline"} <= plain.keys():
            check_benchmark(plain)
            return Run(path, benchmark=plain)
        if {"map", "per_class", "images"} <= plain.keys():
            check_evaluation(plain)
            return Run(path, scores=plain)
    except DocumentError as error:
        raise ConfigError(f"'{path}' cannot be used ({error}); measure it again with this version") from None
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
