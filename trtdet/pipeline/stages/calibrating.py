"""Second stage: the graph and calibration images -> a histogram and a range for every activation that INT8 needs."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path

from trtdet.backends import OnnxRunner
from trtdet.bundle import Bundle
from trtdet.calibration import Collection, CollectionRequest, Ranges, collect, collection_key, expose
from trtdet.data import ImageCache, ImageStream, content_hash, evenly, find_images
from trtdet.errors import CalibrationError, TrtdetWarning
from trtdet.evaluation.plausibility import Plausibility, examine_model, warn_of
from trtdet.passes import decoded
from trtdet.pipeline.options import AUTO, DEFAULT_IMAGES, CalibrationOptions
from trtdet.pipeline.stages.rewriting import Graph
from trtdet.progress import Progress, silent
from trtdet.quantization import reach

HISTOGRAMS = "histograms.npz"
"""The file of a bundle that keeps the histograms."""


@dataclass(frozen=True)
class Selection:
    """The images that are run, sorted, and the hash of their names and contents.

    Attributes:
        cache: shared by all passes of a build, over these images and over annotated images.
    """

    paths: tuple[Path, ...] = ()
    sha256: str = content_hash(())
    cache: ImageCache = field(default_factory=ImageCache, repr=False, compare=False)


def select_images(options: CalibrationOptions) -> Selection:
    """The calibration images: evenly spaced over the sorted names, so that all of a video or of a set is covered.

    Sorted, because the images that judge the corrections are every fourth: the order of a list is to change nothing.

    Raises:
        DataError: the source does not exist, or has no images.
    """
    if options.images is None:
        return Selection()
    found = sorted(find_images(options.images, options.root))
    wanted = options.num_images or DEFAULT_IMAGES
    if options.num_images is not None and len(found) < wanted:
        warnings.warn(
            f"--num-images {wanted} but '{options.images}' has {len(found)}: all of them are used",
            TrtdetWarning,
            stacklevel=3,
        )
    paths = evenly(found, wanted)
    return Selection(paths, content_hash(paths))


@dataclass(frozen=True, eq=False)
class Calibrated:
    """Histograms, and the ranges chosen from them.

    Attributes:
        graph: the model.
        collection: the histograms.
        ranges: by the rule that was named; by the default rule for ``auto``, which decides with the corrections.
        paths: calibration images that could be read.
        cache: the selection's.
        reused: the histograms were there already.
        seen: what the detections on the images look like; None where nobody looked.
    """

    graph: Graph
    collection: Collection
    ranges: Ranges
    paths: tuple[Path, ...]
    cache: ImageCache
    reused: bool
    seen: Plausibility | None = None

    @property
    def key(self) -> str:
        """Hash of the graph up to the last of the tensors, the images and the pre-processing."""
        return self.collection.key


def looked_at(
    graph: Graph, options: CalibrationOptions, selected: Selection, progress: Progress = silent
) -> Plausibility | None:
    """Whether the float model looks like a working detector on the images; None without images, or where nobody asks.

    Warns:
        ImplausibleDetections: it does not, or does so clearly more with another configuration.
    """
    if not (selected.paths and options.check_input):
        return None
    progress("checking the input", 0, 1)
    seen = examine_model(graph.source, graph.passes, selected.paths)
    progress("checking the input", 1, 1)
    warn_of(seen.warning)
    return seen


def calibrated(
    graph: Graph,
    options: CalibrationOptions,
    selected: Selection,
    *,
    implicit: bool = False,
    previous: Bundle | None = None,
    progress: Progress = silent,
) -> Calibrated:
    """Runs the images through a graph, or takes histograms of an earlier run, and applies the rule.

    Args:
        graph: the model.
        options: the rule; its ``histograms`` are taken instead of running images.
        selected: the images.
        implicit: give every tensor a range that TensorRT may quantise by itself, not only those of the Q/DQ pairs.
        previous: a bundle that may lend its histograms.
        progress: told of every image.

    Raises:
        CalibrationError: the histograms are of something else, or an activation is not finite.
        DataError: images cannot be read.
        ConfigError: an unknown rule, or a percentile out of range.
    """
    tensors = graph.quantizable.tensors if implicit else graph.placement.activations
    reused, collection = _collected(graph, tensors, options, selected, previous, progress)
    # Unreadable images were named when they were met first.
    skipped = set(collection.skipped)
    paths = tuple(path for path in selected.paths if path.name not in skipped)
    # The rule that the best of each tensor is compared with.
    rule = CalibrationOptions.rule if options.rule == AUTO else options.rule
    ranges = Ranges.choose(collection, rule, options.percentile)
    pixels, cache = graph.config.input, selected.cache
    inputs = reach(graph.model, paths, pixels, OnnxRunner, progress, cache) if paths else {}
    return Calibrated(graph, collection, replace(ranges, inputs=inputs), paths, cache, reused)


def lent(
    graph: Graph, options: CalibrationOptions, selected: Selection, implicit: bool, previous: Bundle | None
) -> bool:
    """Whether histograms of an earlier run serve, so that no image is run for them."""
    if options.histograms is not None:
        return True
    tensors = graph.quantizable.tensors if implicit else graph.placement.activations
    return previous is not None and previous.manifest.quantization.histograms_key == _key(graph, tensors, selected)


def _key(graph: Graph, tensors: tuple[str, ...], selected: Selection) -> str:
    exposed = expose(graph.with_own_activations, tensors)
    return collection_key(exposed, tensors, selected.sha256, graph.config.input.model_dump_json())


def _collected(
    graph: Graph,
    tensors: tuple[str, ...],
    options: CalibrationOptions,
    selected: Selection,
    previous: Bundle | None,
    progress: Progress,
) -> tuple[bool, Collection]:
    """Whether the histograms were there already, and the histograms."""
    key = _key(graph, tensors, selected)
    if options.histograms is not None:
        return True, _given(options.histograms, tensors, key if selected.paths else None)
    if previous is not None and previous.manifest.quantization.histograms_key == key:
        return True, Collection.load(previous.file(HISTOGRAMS))
    # The detections are computed as well, so that a head that is not finite is noticed.
    head = decoded(graph.nms_mode, graph.config).names
    runner = OnnxRunner(expose(graph.with_own_activations, list(dict.fromkeys([*tensors, *head]))))
    stream = ImageStream(selected.paths, graph.config.input, batch_size=runner.batch or 1, cache=selected.cache)
    request = CollectionRequest(runner.input, tensors, key, selected.sha256)
    return False, collect(runner, request, stream, lambda done: progress("calibrating", done, len(selected.paths)))


def _given(path: Path, tensors: tuple[str, ...], key: str | None) -> Collection:
    """Histograms from a file; without images (no key) the names of the tensors are all that can be compared."""
    collection = Collection.load(path)
    if set(collection.histograms) != set(tensors) or key not in (None, collection.key):
        raise CalibrationError(
            f"the histograms '{path}' were collected from another model, other images or another pre-processing",
            "leave --histograms out to collect them again",
        )
    return collection
