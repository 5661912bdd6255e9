"""Writes candidate networks for an engine that another machine builds."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import onnx

from trtdet import __version__
from trtdet.backends import Backend
from trtdet.backends.base import Built, EngineTarget
from trtdet.backends.choice import PlannedBackend
from trtdet.building.assembly import prepared_of
from trtdet.building.bundle import write_bundle
from trtdet.building.corrections import Prepared
from trtdet.building.engine import (
    BuildNetwork,
    Engine,
    explicit_network,
    explicit_networks,
    float_network,
    implicit_network,
)
from trtdet.building.job import CheckedBuild, Job, checked_build, job_of
from trtdet.building.plan import plan_problem, ranking, score_against, scored
from trtdet.building.ranges import HISTOGRAMS, check_detections
from trtdet.building.validation import check_measured
from trtdet.bundle import MANIFEST, PORTABLE, Bundle, BundleWriter
from trtdet.calibration import Collection
from trtdet.candidates.folder import (
    PREPARED,
    README,
    WEIGHTS,
    Accuracy,
    Candidate,
    FolderContent,
    PreparedFolder,
    SharedWeights,
)
from trtdet.candidates.readme import readme
from trtdet.config import Config
from trtdet.errors import ConfigError, ModelError
from trtdet.evaluation.comparison import PartScore, each_score
from trtdet.evaluation.parts import Of
from trtdet.evaluation.plausibility import Plausibility
from trtdet.experiments.search import measuring_images, plan_with, titled_plans
from trtdet.files import FolderWriter, scratch_folder
from trtdet.options import PrepareOptions, spelled
from trtdet.plans.optimiser import front
from trtdet.progress import Progress, silent
from trtdet.quantization import CANDIDATES, PrecisionPlan
from trtdet.quantization.macs import multiply_adds

_USUAL_DROP = 0.5
"""Largest loss without ``--max-map-drop``, in points."""

_NAMES = {"all INT8": "int8-all", "default": "default", "depthwise in FP16": "depthwise-fp16"}
"""Names of the plans that every search measures; all FP16 is a float network here."""


def prepare(
    model: Path | str, config: Config, output: Path | str, options: PrepareOptions, progress: Progress = silent
) -> PreparedFolder:
    """Writes the networks from which :func:`trtdet.candidates.finish` chooses an engine, with their accuracy.

    The candidates are FP16, the default plan, INT8 in every convolution, depthwise convolutions in FP16, plans of the
    optimiser, other forms of weight scales and of SiLU that the target takes, other Q/DQ pairs for the default plan
    (:class:`trtdet.quantization.NetworkForm`), and implicit quantisation where the target has it. All have the same
    histograms; those with Q/DQ nodes also have the same corrections.

    Args:
        output: the folder; a folder of an earlier ``prepare`` is replaced as a whole.
        progress: called for every image and stage.

    Raises:
        TrtdetError: a step failed; its subclass names the kind of failure. ``output`` is unchanged.
    """
    if not options.target:
        raise ConfigError(
            f"say what will build the engine: {spelled(PrepareOptions, 'target')} tensorrt-10.3, for example"
        )
    backend = PlannedBackend(options.target)
    plan = options.build.plan
    if plan.ray is not None:
        raise ConfigError("a folder of candidates is prepared on one machine; leave plan.ray out")
    check_measured(plan)
    job = job_of(
        Path(model), config, Path(output), options=replace(options.build, plan=plan.formats_alone(), force=True)
    )
    if job.options.quantized:
        raise ModelError(f"model '{model}' is quantised already, so that it has one plan; build it with 'trtdet build'")
    return Preparing(job, backend, options, previous=None, progress=progress).folder()


@dataclass(frozen=True, eq=False)
class _Draft:
    """A candidate before it is scored; ``scored`` is the model that stands for it on the CPU."""

    name: str
    title: str
    build: CheckedBuild
    network: BuildNetwork
    scored: onnx.ModelProto


class Preparing:
    """Makes, scores and writes the candidates of a model.

    ``job`` asks for INT8 wherever possible, and its output is the folder; ``backend`` will build the engines, and the
    images that score are those of ``options.build``. Histograms of the bundle ``previous`` are used if they fit.
    """

    def __init__(
        self, job: Job, backend: Backend, options: PrepareOptions, previous: Bundle | None, progress: Progress
    ) -> None:
        self._job, self._backend, self._options, self._progress = job, backend, options, progress
        self._build = replace(self._checked(int8_all=True), previous=previous)
        self._dataset, _ = measuring_images(options.build.plan, self._build)
        self.plausibility: Plausibility | None = None  # result of the input check; None before it, or without one
        self.reference = 1.0  # the float model's mAP, 0..1; 1 for agreement
        self.collection: Collection | None = None  # the histograms, once the candidates are there

    def folder(self) -> PreparedFolder:
        """Writes the folder; the previous one stays if a step fails."""
        backend, target = self._backend, EngineTarget.of(self._options.build)
        with FolderWriter(self._job.output, PREPARED, "a folder of candidates") as writer:
            drafts = [*self.drafts()]
            scores = self.scores(drafts)
            bound, refusals = _bound(drafts, scores, self._options.max_map_drop)
            candidates, weights, digests = [], SharedWeights(), dict[str, str]()
            for draft, accuracy, refused in zip(drafts, scores, refusals, strict=True):
                candidate = self.candidate(draft, accuracy, refused)
                writer.add(candidate.model, weights.external(draft.network.model))
                files = {}
                for name, data in _bundle_files(draft, self.plausibility):
                    file = digests.setdefault(hashlib.sha256(data).hexdigest(), f"{draft.name}.{name}")
                    if file == f"{draft.name}.{name}":
                        writer.add(file, data)
                    files[name] = file
                candidates.append(replace(candidate, files=files))
            writer.add(WEIGHTS, bytes(weights.data))
            writer.add(README, readme(tuple(candidates), backend.capabilities, bound).encode())
            content = FolderContent(
                schema=1,
                trtdet_version=__version__,
                library=backend.capabilities.name,
                version=backend.capabilities.version,
                sms=target.sms,
                batch=target.batch,
                key=self._build.key,  # over all inputs of the INT8 networks
                bound=bound,
                reference=self.reference,
                candidates=tuple(candidates),
                files=writer.files,
            )
            writer.put((json.dumps(asdict(content), indent=1) + "\n").encode())
        self._job.beside("reconstruction").unlink(missing_ok=True)
        return PreparedFolder(self._job.output)

    def _checked(self, int8_all: bool = False, **changes: Any) -> CheckedBuild:
        options = self._job.options
        options = replace(options, plan=replace(options.plan, int8_all=int8_all), **changes)
        return checked_build(replace(self._job, options=options), self._progress, self._backend)

    def drafts(self) -> Iterator[_Draft]:
        """All candidates, FP16 first."""
        build, caps = self._build, self._backend.capabilities
        graph, selected = build.graph, build.selected
        self.plausibility = check_detections(graph, build.options.calibration, selected, progress=self._progress)
        plain = self._checked(precision="fp16")
        network = float_network(plain.graph, "fp16", plain.selected, progress=self._progress)
        yield _Draft("fp16", "the float model in FP16", build=plain, network=network, scored=network.model)
        corrected = prepared_of(build, self._progress)
        self.collection = corrected.calibrated.collection
        default = graph.faster
        titled = titled_plans(graph, corrected.plan.names("int8"), default)
        plans = {kept: " and ".join(titles) for kept, titles in titled.items() if "all FP16" not in titles}
        names = {kept: _NAMES[titled[kept][0]] for kept in plans}
        if self._options.points:
            # Two more than asked for: the optimiser's ends are INT8 everywhere and FP16 alone, which have a title.
            ranked = ranking(corrected, self._options.build.plan, progress=self._progress)
            trade_off = front(plan_problem(corrected, None, ranked), self._options.points + 2)
            fresh = [plan.half for plan in trade_off if plan.half not in titled][: self._options.points]
            names.update({kept: f"front-{number}" for number, kept in enumerate(fresh, 1)})
            plans.update(dict.fromkeys(fresh, "plan of the optimiser"))
        # The default plan first, as agreement is compared with it.
        for kept in sorted(plans, key=lambda kept: names[kept] != "default"):
            plan = plan_with(corrected, kept, default, progress=self._progress)
            title = f"{plans[kept]}: {len(plan.names('int8'))} convolutions in INT8"
            networks = explicit_networks(corrected, plan, caps)
            for network in networks:
                form = "" if network.form == graph.flow.weights[0] else f"-{network.form}"
                scales = f", one weight scale a {network.form}" if len(graph.flow.weights) > 1 else ""
                yield _Draft(
                    f"{names[kept]}{form}", f"{title}{scales}", build=build, network=network, scored=network.model
                )
            if names[kept] == "default":
                yield from self._other_silu(corrected, plan, title)
                yield from self._other_forms(corrected, plan, networks[0].model)
        if caps.implicit is not None:
            build = self._checked(quantization="implicit", effort="none")
            ranged = prepared_of(build, self._progress)
            plan = ranged.without_overflow(ranged.plan, self._progress)
            network = implicit_network(ranged, plan, build.options, caps=caps)
            title = f"implicit: TensorRT chooses among {len(plan.names('int8'))} convolutions and other layers"
            yield _Draft("implicit", title, build=build, network=network, scored=ranged.explicit(plan).model)

    def _other_silu(self, corrected: Prepared, plan: PrecisionPlan, title: str) -> Iterator[_Draft]:
        """The default plan with the target's other form of SiLU, if the model has SiLU and none is a plugin's."""
        pair = {"keep", "swish"}
        other = pair & set(self._backend.capabilities.silu) - {corrected.graph.passes.silu}
        if corrected.graph.passes.silu not in pair or not other:
            return
        (form,) = other
        build = self._checked(int8_all=True, silu=form)
        if not any(each.done.results["silu"].count for each in (corrected.graph, build.graph)):
            return
        changed = replace(corrected, calibrated=replace(corrected.calibrated, graph=build.graph))
        network = explicit_network(changed, plan, self._backend.capabilities)
        yield _Draft(f"default-{form}", f"{title}, SiLU as {form}", build=build, network=network, scored=network.model)

    def _other_forms(self, corrected: Prepared, plan: PrecisionPlan, default: onnx.ModelProto) -> Iterator[_Draft]:
        """The default plan with other Q/DQ pairs, without forms that are equal to ``default`` or to one before."""
        models = [default]
        for name, form in CANDIDATES.items():
            network = explicit_network(corrected, plan, self._backend.capabilities, form=form)
            if network.model not in models:
                models.append(network.model)
                title = f"default plan in form {name}: {len(network.plan.names('int8'))} convolutions in INT8"
                yield _Draft(f"default-{name}", title, build=self._build, network=network, scored=network.model)

    def scores(self, drafts: list[_Draft]) -> list[Accuracy]:
        """The accuracy of each, against the float model on the same images."""
        build, dataset = self._build, self._dataset
        measure = partial(
            scored, graph=build.graph, dataset=dataset, cache=build.selected.cache, progress=self._progress
        )
        reference = measure(build.graph.model, stage="measuring the float model")
        figure: Literal["map", "agreement"] = "map" if dataset.annotated else "agreement"
        if dataset.annotated:
            self.reference = reference.result.map
        accuracies = []
        for draft in drafts:
            evaluation = measure(draft.scored, stage=f"measuring {draft.name}")
            score = score_against(evaluation, reference, dataset.annotated)
            assert score.value is not None, "a score has mAP or agreement"
            accuracies.append(
                Accuracy(
                    figure,
                    score.value,
                    difference=score.difference,
                    low=score.low,
                    high=score.high,
                    images=len(dataset.images),
                    parts=dict(score.parts),
                )
            )
        return accuracies

    def candidate(self, draft: _Draft, accuracy: Accuracy, refused: str) -> Candidate:
        network = draft.network
        work = {name: macs.count for name, macs in multiply_adds(draft.build.graph.model).items()}
        in_int8 = sum(work.get(name, 0) for name in network.plan.names("int8"))
        return Candidate(
            name=draft.name,
            title=draft.title,
            precision=network.precision,
            precisions=dict(network.precisions),
            implicit=network.implicit is not None,
            form=network.form,
            int8_share=in_int8 / max(sum(work.values()), 1),
            accuracy=accuracy,
            refused=refused,
        )


def _bound(drafts: list[_Draft], scores: list[Accuracy], limit: float | None) -> tuple[str, list[str]]:
    """Which candidates may ship, in words, and for each the reason why it may not. FP16 always may.

    The bound holds for boxes and for each part.
    """
    annotated = scores[0].figure == "map"
    # Without a candidate of this name the default plan is FP16, which is the first.
    default = next((score for draft, score in zip(drafts, scores, strict=True) if draft.name == "default"), scores[0])
    drop = _USUAL_DROP if limit is None else limit
    if limit is not None:
        figure = "mAP" if annotated else "agreement"
        bound = f"a loss of at most {limit:g} points of {figure}, at the upper end of its 90 % interval"
    elif annotated:
        bound = f"no loss of mAP that {scores[0].images} images show, and at most {_USUAL_DROP} points"
    else:
        bound = f"an agreement at most {_USUAL_DROP} points below that of the default plan"
    parts = list(scores[0].parts)
    if parts:
        bound += f", of boxes and of {' and of '.join(of.replace('_', ' ') for of in parts)}"
    usual = each_score(default)

    def reason(of: Of, score: PartScore) -> str:
        what = f" of {of.replace('_', ' ')}" if parts else ""
        low, high = score["low"], score["high"]
        assert low is not None and high is not None, "a candidate is compared with the float model"
        loss, worst = -100 * score["difference"], -100 * low
        if limit is not None:
            return f"loses up to {worst:.2f} points{what}, over {limit:g}" if worst > limit else ""
        if not annotated:
            below = 100 * (usual[of]["difference"] - score["difference"])
            return f"agrees {below:.2f} points less than the default plan{what}" if below > drop else ""
        if loss > drop:
            return f"loses {loss:.2f} points{what}, over {drop:g}"
        return f"loses {loss:.2f} points{what}, which the images show" if high < 0 else ""

    refusals = []
    for draft, score in zip(drafts, scores, strict=True):
        reasons = [] if draft.name == "fp16" else [reason(of, each) for of, each in each_score(score).items()]
        refusals.append("; ".join(filter(None, reasons)))
    return bound, refusals


def _bundle_files(draft: _Draft, seen: Plausibility | None) -> Iterator[tuple[str, bytes]]:
    """The files of a candidate's bundle that need neither the engine nor the images."""
    engine = Engine(draft.network, Built(b"", sms=draft.build.target.sms, log=(), seconds=0.0), None)
    with scratch_folder() as folder:
        with BundleWriter(folder / "bundle") as writer:
            bundle = write_bundle(writer, draft.build, engine, planned=None, seen=seen)
        names = (name for name in bundle.manifest.files if name not in (bundle.model.name, PORTABLE, HISTOGRAMS))
        for name in (MANIFEST, *names):
            yield name, (bundle.path / name).read_bytes()
