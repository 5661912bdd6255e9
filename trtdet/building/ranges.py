"""Second step of a build: graph and calibration images -> a histogram and a range of every activation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from trtdet.backends import OnnxRunner
from trtdet.building.graph import PlacedGraph
from trtdet.building.selection import chosen_images
from trtdet.bundle import Bundle
from trtdet.calibration import Collection, CollectionRequest, Range, Ranges, collect, collection_key, expose
from trtdet.data import ImageCache, ImageStream, content_hash
from trtdet.errors import CalibrationError
from trtdet.evaluation.plausibility import Plausibility, examine_model, warn_of
from trtdet.options import CalibrationOptions
from trtdet.passes import decoded
from trtdet.progress import Progress, silent
from trtdet.quantization import Sources, reach

HISTOGRAMS = "histograms.npz"
"""File of a bundle with the histograms."""

GIVEN = "given"
"""The rule of ranges that a quantised model gives."""


@dataclass(frozen=True)
class Selection:
    """Sorted images, and the hash of their names and contents; all passes of a build share the ``cache``."""

    paths: tuple[Path, ...] = ()
    sha256: str = content_hash(())
    cache: ImageCache = field(default_factory=ImageCache, repr=False, compare=False)


def select_images(options: CalibrationOptions) -> Selection:
    """The calibration images with their hash, see :func:`trtdet.building.selection.chosen_images`."""
    paths = chosen_images(options)
    return Selection(paths, content_hash(paths)) if paths else Selection()


@dataclass(frozen=True, eq=False)
class Calibrated:
    """Histograms of a model, and ranges from them."""

    graph: PlacedGraph
    collection: Collection
    ranges: Ranges  # by the threshold rule
    paths: tuple[Path, ...]  # the readable calibration images
    cache: ImageCache
    reused: bool  # the histograms come from a file or an earlier bundle
    seen: Plausibility | None = None  # result of the input check; None if it was off


def check_detections(
    graph: PlacedGraph, options: CalibrationOptions, selected: Selection, progress: Progress = silent
) -> Plausibility | None:
    """Checks that the float model detects plausible objects on the images; None without images, or if it is off.

    Warns:
        ImplausibleDetections: the detections are implausible, or clearly better with another configuration.
    """
    if not (selected.paths and options.check_input):
        return None
    progress("checking the input", 0, 1)
    plausibility = examine_model(graph.source, graph.passes, selected.paths)
    progress("checking the input", 1, 1)
    warn_of(plausibility.warning)
    return plausibility


def calibrated(
    graph: PlacedGraph,
    options: CalibrationOptions,
    selected: Selection,
    *,
    implicit: bool = False,
    previous: Bundle | None = None,
    progress: Progress = silent,
) -> Calibrated:
    """Collects histograms on the images, or reuses those of an earlier run, and applies the threshold rule.

    ``implicit`` chooses ranges for every tensor that TensorRT may run in INT8, not only for Q/DQ pairs. Histograms of
    the bundle ``previous`` are reused if they fit. Raises CalibrationError: histograms of another model, other images
    or other preprocessing, or a non-finite activation; DataError: images cannot be read; ConfigError: an unknown rule,
    or a percentile out of range.
    """
    tensors, key = _histogram_key(graph, selected, implicit)
    reused = True
    if options.histograms is not None:
        collection = Collection.load(options.histograms)
        # Without images only the names of the tensors can be compared.
        if set(collection.histograms) != set(tensors) or (selected.paths and collection.key != key):
            raise CalibrationError(
                f"the histograms '{options.histograms}' were collected from another model, other images or another "
                "pre-processing",
                "leave calibration.histograms out to collect them again",
            )
    elif previous is not None and previous.manifest.quantization.histograms_key == key:
        collection = Collection.load(previous.file(HISTOGRAMS))
    else:
        runner = calibration_runner(graph, tensors)
        stream = ImageStream(selected.paths, graph.config.input, batch_size=runner.batch or 1, cache=selected.cache)
        request = CollectionRequest(runner.input, tensors=tensors, key=key, images_sha256=selected.sha256)
        collection = collect(
            runner, request, stream, progress=lambda images: progress("calibrating", images, len(selected.paths))
        )
        reused = False
    # A warning has named the unreadable images already.
    skipped = set(collection.skipped)
    paths = tuple(path for path in selected.paths if path.name not in skipped)
    ranges = Ranges.choose(collection, options.rule_name, options.percentile)
    sources = sources_of(graph, paths, cache=selected.cache, progress=progress)
    ranges = replace(ranges, inputs=reach(graph.model, sources) if paths else {})
    return Calibrated(graph, collection, ranges, paths=paths, cache=selected.cache, reused=reused)


def calibration_runner(graph: PlacedGraph, tensors: Sequence[str]) -> OnnxRunner:
    """Computes the activations to calibrate, and the detections, so that NaN or infinity in the head is found."""
    head = decoded(graph.nms_mode, graph.config).names
    return OnnxRunner(expose(graph.with_own_activations, list(dict.fromkeys([*tensors, *head]))))


def as_given(graph: PlacedGraph, selected: Selection) -> Calibrated:
    """The ranges of a quantised model, without histograms."""
    assert graph.own is not None
    largest = {name: 127.0 * float(graph.own.steps[places[0]]) for name, places in graph.placement.readers.items()}
    tensors = {name: Range(amax, -amax, amax) for name, amax in largest.items()}
    return without_histograms(graph, selected, GIVEN, tensors=tensors)


def without_histograms(graph: PlacedGraph, selected: Selection, rule: str, tensors: Mapping[str, Range]) -> Calibrated:
    """Ranges without calibration images; ``rule`` names their source."""
    images, source = selected.sha256, graph.model.graph.input[0].name
    ranges = Ranges(rule, None, tensors, key="", images=0, images_sha256=images)
    collection = Collection({}, key="", images=0, images_sha256=images, source=source)
    return Calibrated(graph, collection, ranges, paths=selected.paths, cache=selected.cache, reused=False)


def sources_of(
    graph: PlacedGraph, paths: tuple[Path, ...], cache: ImageCache, progress: Progress, unfinished: Path | None = None
) -> Sources:
    return Sources(
        images=paths,
        preprocess=graph.config.input,
        load=OnnxRunner,
        head=decoded(graph.nms_mode, graph.config),
        progress=progress,
        cache=cache,
        unfinished=unfinished,
    )


def existing_histograms(
    graph: PlacedGraph, options: CalibrationOptions, selected: Selection, implicit: bool, previous: Bundle | None
) -> str:
    """Source of histograms that can be reused; empty if they must be collected."""
    if options.histograms is not None:
        return "calibration.histograms"
    if previous is None:
        return ""
    key = _histogram_key(graph, selected, implicit)[1]
    return "the bundle at -o" if previous.manifest.quantization.histograms_key == key else ""


def _histogram_key(graph: PlacedGraph, selected: Selection, implicit: bool) -> tuple[tuple[str, ...], str]:
    """Names of the tensors that get a range, and the key of their histograms."""
    tensors = graph.quantizable.tensors if implicit else graph.placement.activations
    exposed = expose(graph.with_own_activations, tensors)
    return tensors, collection_key(exposed, tensors, selected.sha256, preprocess=graph.config.input.model_dump_json())
