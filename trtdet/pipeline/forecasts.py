"""What a command is going to do: its stages, what is there already, and about how long and how much memory they take.

Nothing is run for it. Times are counted in runs of the float model on an image, and such a run by its multiply-adds at
the rates of the constants below, which were measured on one core of a server; another machine is faster or slower by
some factor for all stages alike, which a progress bar soon sees.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trtdet.bundle import Bundle
from trtdet.config import Config
from trtdet.pipeline.assembly import Job, Validated, validated
from trtdet.pipeline.options import RANKED_IMAGES, BuildOptions, KeepOptions
from trtdet.pipeline.stages.calibrating import lent
from trtdet.pipeline.stages.rewriting import Graph
from trtdet.pipeline.verdict import answered
from trtdet.progress import Step
from trtdet.quantization.corrections.moments import MOST_COLUMNS
from trtdet.quantization.macs import multiply_adds
from trtdet.tables import Column, Table

_RATE = 8e9
"""Multiply-adds a second of a core in float32, with the layers between the convolutions."""

IMAGE = 0.004
"""Seconds to decode, resize and normalise an image, and to start a run."""

_CORRECTING = (
    ("correcting: gradients of the detections", 5.0, ("range",)),
    ("correcting: moments", 0.8, ("smooth", "round", "bias")),
    ("correcting: gradients of the detections", 7.0, ("range",)),
    ("correcting: reconstruction", 400.0, ("reconstruct",)),
    ("correcting: means", 0.5, ("bias",)),
    ("correcting: held-back images", 0.7, ()),
    ("correcting: detections", 0.7, ()),
)
"""Stages of the corrections, how many times the runs of the calibration images each takes, and for which corrections;
for any where none is named."""

_DOUBLE = 2e10
"""Multiply-adds a second of a core in float64, in large products of matrices."""

_SAMPLES = (256, 1024)
"""Windows of a convolution's input that second moments are taken of in an image, by their width; see
:mod:`trtdet.quantization.corrections.trials`."""

_HALF = 0.6
"""Likewise of looking for what FP16 does not hold."""

_LOOKED = 60
"""Runs of the model for a look at the input, see :mod:`trtdet.evaluation.plausibility`."""

_HISTOGRAMS = 2.0
"""A run with its histograms, in runs without."""

_ENGINE, _KERNEL = 0.5, 0.005
"""Seconds that a builder takes for any engine, and for each node of the model."""

_PROCESS, _BUILDER = 600e6, 700e6
"""Bytes of a process with its libraries, and of the one that builds an engine."""

_MOMENTS, _TORCH = 1 << 30, 300e6
"""Bytes of second moments that are held at most, and of torch, which works out gradients."""

_CACHE = 1 << 30
"""Bytes of decoded images that are kept at most, see :mod:`trtdet.data.cache`."""


@dataclass(frozen=True)
class Part:
    """A stage to come.

    Attributes:
        stage: as progress is told it.
        what: what it works on, in a few words.
        seconds: an estimate; 0 where it is there already.
        there: where its result is taken from; empty where it is made.
    """

    stage: str
    what: str
    seconds: float
    there: str = ""


@dataclass(frozen=True)
class Forecast:
    """What a command is going to do.

    Attributes:
        parts: its stages in their order; none where there is nothing to do.
        memory: bytes that this process takes at most, an estimate.
        builder: likewise of the process that builds engines; 0 where none is built.
    """

    parts: tuple[Part, ...]
    memory: int = 0
    builder: int = 0

    @property
    def steps(self) -> list[Step]:
        """For a progress bar."""
        return [Step(part.stage, part.seconds) for part in self.parts]

    @property
    def seconds(self) -> float:
        """Of all stages."""
        return sum(part.seconds for part in self.parts)

    def table(self) -> Table:
        """A row for each stage."""
        if not self.parts:
            return Table(("stage",), (), notes=("everything is there already",))
        rows = [
            [part.stage, part.what, part.there or "to do", None if part.there else part.seconds] for part in self.parts
        ]
        memory = f"memory: about {self.memory / 1e9:.1f} GB"
        if self.builder:
            memory += f", and {self.builder / 1e9:.1f} GB in the process that builds the engine"
        return Table(
            ("stage", "of", "state", Column("about s", ".1f")),
            rows,
            notes=(
                f"about {self.seconds:.0f} s in all on the {_cores()} cores here, by the model's multiply-adds and not "
                "measured: expect a factor of two or three either way",
                memory,
                "nothing was computed",
            ),
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        parts = [
            {"stage": part.stage, "of": part.what, "there": part.there or None, "seconds": round(part.seconds, 1)}
            for part in self.parts
        ]
        memory = {"memory_bytes": self.memory, "builder_bytes": self.builder}
        return {"stages": parts, "seconds": round(self.seconds, 1), **memory}


def foresee_build(model: Path, config: Config, output: Path, options: BuildOptions) -> Forecast:
    """What :func:`trtdet.build` of the same would do.

    Args:
        model: float ONNX model.
        config: its configuration.
        output: the bundle's folder.
        options: precision, calibration, backend.

    Raises:
        TrtdetError: as the build would before it decodes an image.
    """
    return foresee(validated(Job(model, config, output, options)))


def foresee(known: Validated) -> Forecast:
    """What a build does that was checked."""
    if known.up_to_date is not None:
        return Forecast(tuple(_compared(known, known.up_to_date)))
    run = run_seconds(known)
    parts = [*looked_parts(known, run), *_calibrated(known, run), *corrected_parts(known, run), *_planned(known, run)]
    parts += half_parts(known, run)
    parts += _built(known)
    return Forecast(tuple(parts), process_memory(known), builder_memory(known))


def run_seconds(known: Validated) -> float:
    """Estimated seconds of the float model on one image."""
    return IMAGE + sum(macs.count for macs in multiply_adds(known.graph.model).values()) / _RATE / _cores()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def looked_parts(known: Validated, run: float) -> list[Part]:
    """The look at the input, where one is taken, by seconds of a run."""
    if not (known.selected.paths and known.job.options.calibration.check_input):
        return []
    count = min(_LOOKED, len(known.selected.paths))
    return [Part("checking the input", images_of(count), _LOOKED * run)]


def _calibrated(known: Validated, run: float) -> list[Part]:
    options = known.job.options
    if options.precision != "int8" or options.cache is not None:
        return []
    there = str(options.tuned or "")
    if not there and lent(known.graph, options.calibration, known.selected, options.implicit, known.previous):
        there = "--histograms" if options.calibration.histograms is not None else "the bundle at -o"
    return [calibrated_part(known, run, there)]


def calibrated_part(known: Validated, run: float, there: str) -> Part:
    """The histograms, by seconds of a run and where they are taken from."""
    if there:
        return Part("calibrating", "histograms", 0.0, there)
    count = len(known.selected.paths)
    return Part("calibrating", images_of(count), _HISTOGRAMS * count * run)


def corrected_parts(known: Validated, run: float) -> list[Part]:
    """The corrections, likewise."""
    options = known.job.options
    if options.precision != "int8" or options.implicit or options.tuned is not None or not options.correct:
        return []
    count, asked = len(known.selected.paths), _asked(options)
    solving = _solving(known) if "round" in asked else 0.0
    return [
        Part(stage, images_of(count), passes * count * run + (solving if stage == "correcting: moments" else 0.0))
        for stage, passes, names in _CORRECTING
        if not names or set(names) & asked
    ]


def _asked(options: BuildOptions) -> set[str]:
    """The corrections that are tried."""
    without = {"range"} if find_spec("torch") is None else set()  # the rule stands in for it
    return set(options.correct) - without


def _solving(known: Validated) -> float:
    """Seconds of what ``round`` does with the moments of each convolution's windows, which grows with their width: the
    sums over three of four images, and the solving of two systems."""
    images = 0.75 * len(known.selected.paths)
    total = 0.0
    for groups, width in _windows(known):
        places = min(max(_SAMPLES[0], width // 4), _SAMPLES[1])
        total += groups * (images * places * width**2 + 2 * 1.2 * width**3)
    return total / _DOUBLE / _cores()


def _windows(known: Validated) -> list[tuple[int, int]]:
    """Groups and width of the windows that have full second moments."""
    macs = multiply_adds(known.graph.model)
    convs = [macs[name] for name in known.graph.plan.names("int8")]
    found = [(conv.groups, conv.inputs // conv.groups * math.prod(conv.kernel)) for conv in convs]
    return [(groups, width) for groups, width in found if width <= MOST_COLUMNS]


def _planned(known: Validated, run: float) -> list[Part]:
    options = known.job.options
    keep: KeepOptions = options.keep
    if options.precision != "int8" or not keep.ranked or keep.keep == 0:
        return []
    return [ranked_part(known, run, keep.num_images)]


def ranked_part(known: Validated, run: float, most: int = RANKED_IMAGES) -> Part:
    """The ranking on at most so many images."""
    rows = len(known.graph.plan.names("int8"))
    images = min(most, len(known.selected.paths))
    # A row runs what comes after its layer, half of the model on the mean.
    return Part("ranking", f"{rows} layers on {images_of(images)}", 0.5 * rows * images * run)


def half_parts(known: Validated, run: float) -> list[Part]:
    """The look for what FP16 does not hold, likewise."""
    count, options = len(known.selected.paths), known.job.options
    if not count or options.precision == "fp32" or options.cache is not None:
        return []
    return [Part("ranges of what FP16 holds", images_of(count), _HALF * count * run)]


def _built(known: Validated) -> list[Part]:
    options, caps = known.job.options, known.backend.capabilities
    explicit = options.precision == "int8" and not options.implicit and options.cache is None
    engine = engine_part(known, len(caps.data_flow.weights) if explicit else 1)
    return [engine, *_compared(known)] if caps.makes_engine else [engine]


def engine_part(known: Validated, forms: int = 1) -> Part:
    """The engine, built with so many forms of weight scales to choose from."""
    nodes = len(known.graph.model.graph.node)
    if not known.backend.capabilities.makes_engine:
        return Part(_building(known), "the model alone, no engine", 0.2)
    what = f"{nodes} nodes" + (f", {forms} times" if forms > 1 else "")
    return Part(_building(known), what, forms * (_ENGINE + _KERNEL * nodes))


def _building(known: Validated) -> str:
    caps = known.backend.capabilities
    return f"building the engine with {caps.name} {caps.version}"


def _compared(known: Validated, bundle: Bundle | None = None) -> list[Part]:
    """The comparison with FP16, which a bundle may have already."""
    options, nodes = known.job.options, len(known.graph.model.graph.node)
    wanted = options.precision == "int8" and options.measure and known.backend.capabilities.makes_engine
    if not wanted or (bundle is not None and answered(bundle, options)):
        return []
    return [Part(f"FP16 to compare with: {_building(known)}", f"{nodes} nodes", _ENGINE + _KERNEL * nodes)]


def process_memory(known: Validated, scored: int = 0) -> int:
    """Estimated bytes of this process, which keeps so many images beside those that calibrate."""
    graph = known.graph
    values = {value.name: value for value in graph.model.graph.value_info}
    sizes = [
        math.prod(max(dim.dim_value, 1) for dim in value.type.tensor_type.shape.dim)
        for name, value in values.items()
        if name in graph.placement.activations
    ]
    pixels = math.prod(graph.config.input.size) * 3
    cached = min(_CACHE, (len(known.selected.paths) + scored) * pixels)
    asked = _asked(known.job.options) if known.job.options.precision == "int8" else set()
    moments = sum(8 * groups * width**2 for groups, width in _windows(known)) if "round" in asked else 0
    correcting = min(_MOMENTS, moments) + (_TORCH if "range" in asked else 0)
    # Two batches are in memory at a time: one is counted while the next is computed.
    return int(_PROCESS + 6 * _weights(graph) + 3 * 4 * sum(sizes) + correcting + cached)


def builder_memory(known: Validated) -> int:
    """Likewise of the process that builds engines; 0 where none is built."""
    return int(_BUILDER + 4 * _weights(known.graph)) if known.backend.capabilities.makes_engine else 0


def _weights(graph: Graph) -> int:
    return sum(len(tensor.raw_data) for tensor in graph.model.graph.initializer)


def images_of(count: int) -> str:
    """A number of images for people."""
    return f"{count} image{'s' * (count != 1)}"
