"""What can be asked for, as frozen values. Each field says how it enters the fingerprint of a bundle."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from trtdet.backends import EngineOptions
from trtdet.config import NmsMode, SiluForm
from trtdet.mixed_precision.trade_off import AGREEMENT, MAP, Figure
from trtdet.pipeline.fingerprint import Stage, enters, stays_out
from trtdet.quantization import DEFAULT_CORRECTIONS, Precision
from trtdet.runtime.detector import Runtime

Objective = Literal["latency", "throughput", "size"]
"""What a plan is to be best in: milliseconds at the batch that the engine is optimised for, milliseconds an image at
the largest batch, or bytes of weights."""

AUTO = "auto"
"""The rule that takes, tensor by tensor, the threshold of least error on held-back images."""

RANKED_IMAGES = 32
DEFAULT_IMAGES = 128


@dataclass(frozen=True)
class CalibrationOptions:
    """Where the ranges come from.

    Attributes:
        rule: ``minmax``, ``entropy``, ``percentile``, ``mse``, or ``auto`` for the best of them for each tensor.
        percentile: in percent, for the rule of that name.
        images: a folder of images, or a list of file names (``.txt``).
        root: the folder that a list's names are relative to; None for the list's own folder.
        num_images: use so many, evenly spaced over the sorted names; None for at most 128.
        histograms: start from this collection instead of running the images.
        check_input: look first whether the float model finds something on the images, and whether it finds clearly
            more with another configuration; see :mod:`trtdet.evaluation.plausibility`.
        unfinished: the file that keeps a reconstruction as far as it has come, so that a run that was stopped goes on;
            None keeps nothing.
    """

    rule: str = field(default="percentile", metadata=enters(Stage.RANGES, int8_only=True))
    percentile: float = field(default=99.99, metadata=enters(Stage.RANGES, int8_only=True))
    images: Path | None = field(default=None, metadata=enters(Stage.RANGES, "images"))
    root: Path | None = field(default=None, metadata=enters(Stage.RANGES, "images"))
    num_images: int | None = field(default=None, metadata=enters(Stage.RANGES, "images"))
    histograms: Path | None = field(default=None, metadata=enters(Stage.RANGES, "histograms"))
    check_input: bool = field(default=True, metadata=stays_out("looks at the model and changes nothing"))
    unfinished: Path | None = field(default=None, metadata=stays_out("where work is kept, not what comes out"))


@dataclass(frozen=True)
class KeepOptions:
    """Which convolutions an INT8 bundle keeps in FP16 besides those that stay there by default: by one of ``keep``,
    ``budget``, ``max_map_drop``, ``max_disagreement`` and ``max_latency``, or none.

    Attributes:
        keep: a number takes the most sensitive ones; a path an edited ``plan.json``, which is followed in INT8 as
            well; names are taken as they are, ``depthwise`` standing for all depthwise convolutions.
        budget: the most sensitive ones for this share of the multiply-adds, 0..1.
        max_map_drop: those of the cheapest plan whose measured loss is within so many mAP points (hundredths), at least
            0, at the upper end of its 90 % interval and on images that did not choose it.
        images: annotated images, for a bound and for the comparison after the build.
        annotations: their COCO file; not needed for ``max_disagreement``.
        num_images: calibration images that the ranking is measured on, at least 1.
        ray: None, ``local`` or the address of a Ray cluster to rank on.
        max_disagreement: likewise with 100 less the agreement with the float model's detections, in points (hundredths)
            of average precision, see :func:`trtdet.evaluation.agreement.agree`.
        objective: what is cheap, for a bound.
        max_latency: those of the plan of least error within so many milliseconds, over 0: estimated for the build's
            GPU, or measured where one here runs engines; of an image where the objective is throughput.
    """

    keep: int | Path | tuple[str, ...] | None = field(
        default=None, metadata=enters(Stage.CORRECTIONS, "kept", int8_only=True)
    )
    budget: float | None = field(default=None, metadata=enters(Stage.PLAN, int8_only=True))
    max_map_drop: float | None = field(default=None, metadata=enters(Stage.PLAN, int8_only=True))
    images: Path | None = field(default=None, metadata=enters(Stage.PLAN, "annotated", int8_only=True))
    annotations: Path | None = field(default=None, metadata=enters(Stage.PLAN, "annotated", int8_only=True))
    num_images: int = field(default=RANKED_IMAGES, metadata=enters(Stage.PLAN, "ranked_images", int8_only=True))
    ray: str | None = field(default=None, metadata=stays_out("where the ranking is computed changes no number"))
    max_disagreement: float | None = field(default=None, metadata=enters(Stage.PLAN, int8_only=True))
    objective: Objective = field(default="latency", metadata=enters(Stage.PLAN, int8_only=True))
    max_latency: float | None = field(default=None, metadata=enters(Stage.PLAN, int8_only=True))

    @property
    def bound(self) -> tuple[Figure, float] | None:
        """What is bounded, and by how many points."""
        given = ((MAP, self.max_map_drop), (AGREEMENT, self.max_disagreement))
        return next(((figure, limit) for figure, limit in given if limit is not None), None)

    @property
    def ranked(self) -> bool:
        """Whether a ranking is needed."""
        numbers = (self.budget, self.max_map_drop, self.max_disagreement, self.max_latency)
        return isinstance(self.keep, int) or any(number is not None for number in numbers)


@dataclass(frozen=True)
class BuildOptions:
    """How a bundle is built.

    Attributes:
        precision: ``int8`` quantises every convolution that is faster for it, see
            :mod:`trtdet.quantization.defaults`; ``fp16`` and ``fp32`` build the float model.
        calibration: used for ``int8``.
        correct: the corrections that may be used for ``int8``, see :mod:`trtdet.quantization.corrections`; empty for
            the textbook form.
        nms: ``native``, ``onnx`` and ``efficient`` put the suppression into the graph, see :mod:`trtdet.passes.nms`;
            ``host`` leaves it out; ``auto`` leaves a model's own as it is and else takes what the backend does best.
        backend: ``auto``, ``tensorrt``, ``tensorrt-rtx`` or ``onnxruntime``.
        sms: compute capabilities to build for, such as 86; empty for the backend's default.
        batch: (min, opt, max) for a model with a dynamic batch; None freezes it to 1.
        keep: what stays in FP16 with ``int8``.
        silu: what SiLU and HardSwish are written as, see :class:`trtdet.passes.Options`; ``auto`` asks the backend.
        plugins: libraries with the plugins, for a backend that loads them; they are copied into the bundle.
        quantization: ``explicit`` writes Q/DQ nodes into the model, for every backend; ``implicit`` leaves a float
            model and gives TensorRT up to 10 a calibrator.
        calibrator: for ``implicit``, who chooses the ranges: ``trtdet``, handed over as a calibration cache, or
            ``tensorrt``, by its own calibrator of the rule's name.
        cache: for ``implicit``, an existing calibration cache.
        engine: further settings of the builder.
        timing_cache: the file that keeps the measured times of the device's kernels; None for a file beside the
            bundle. It is read and written where engines are timed on the device.
        measure: after an INT8 build, compare it with the same model without INT8, by measurement or, where no engine
            can be run, by an estimate, and keep the answer in the bundle as ``worth.json``; skipped where nothing can
            be compared.
        guard: how many times as fast as FP16 INT8 has to be, over 0; where it is not, the FP16 engine becomes the
            bundle. None ships INT8 whatever it gains, with a warning where it gains nothing.
        gpu: the GPU of the estimate, a name in :data:`trtdet.audit.gpus.GPUS`; None for the first of them that the
            engine was built for.
        force: replace a bundle of another model.
        accuracy_report: after an INT8 build, measure which blocks cause the error at the head and what each part of the
            corrections does to it, and keep that in the bundle as ``accuracy.json``.
        int8_all: quantise every convolution that can be, also those that INT8 makes no faster.
        int8_attention: quantise the products of two activations as well, see :func:`trtdet.quantization.place`.
        fp8: quantise products of matrices to FP8 instead of INT8.
        resize: give a model of fixed height and width those of the configuration, where its graph allows it; see
            :func:`trtdet.passes.input_size.with_input_size`. Otherwise they have to be the same.
        best: every convolution that can be in INT8 is open to the choice of a plan, which ``keep`` bounds; nothing
            stays in FP16 by default.
        tuned: the folder of a tune, of which ranges and corrections are taken as they are there; see
            :func:`trtdet.pipeline.tuned.tuned_options`.
    """

    precision: Precision = field(default="int8", metadata=enters(Stage.RANGES))
    calibration: CalibrationOptions = CalibrationOptions()
    correct: tuple[str, ...] = field(default=DEFAULT_CORRECTIONS, metadata=enters(Stage.CORRECTIONS, int8_only=True))
    nms: NmsMode | Literal["auto"] = field(default="auto", metadata=enters(Stage.GRAPH, "nms"))
    backend: str = field(default="auto", metadata=enters(Stage.GRAPH, "backend"))
    sms: tuple[int, ...] = field(default=(), metadata=enters(Stage.ENGINE))
    batch: tuple[int, int, int] | None = field(default=None, metadata=enters(Stage.GRAPH))
    keep: KeepOptions = KeepOptions()
    silu: SiluForm | Literal["auto"] = field(default="auto", metadata=enters(Stage.GRAPH))
    plugins: tuple[Path, ...] = field(default=(), metadata=enters(Stage.ENGINE, "plugins"))
    quantization: Literal["explicit", "implicit"] = field(
        default="explicit", metadata=enters(Stage.RANGES, int8_only=True)
    )
    calibrator: Literal["trtdet", "tensorrt"] = field(default="trtdet", metadata=enters(Stage.NETWORK, int8_only=True))
    cache: Path | None = field(default=None, metadata=enters(Stage.RANGES, "cache"))
    engine: EngineOptions = EngineOptions()
    timing_cache: Path | None = field(default=None, metadata=stays_out("measured times of kernels, no choice"))
    measure: bool = field(default=True, metadata=stays_out("done with the finished bundle"))
    guard: float | None = field(default=None, metadata=enters(Stage.ENGINE, "guard", int8_only=True))
    gpu: str | None = field(default=None, metadata=enters(Stage.ENGINE, "guard", int8_only=True))
    force: bool = field(default=False, metadata=stays_out("says what may be replaced"))
    accuracy_report: bool = field(default=False, metadata=stays_out("measured on the finished bundle"))
    int8_all: bool = field(default=False, metadata=enters(Stage.CORRECTIONS, int8_only=True))
    int8_attention: bool = field(default=False, metadata=enters(Stage.RANGES, int8_only=True))
    fp8: bool = field(default=False, metadata=enters(Stage.CORRECTIONS, int8_only=True))
    resize: bool = field(default=False, metadata=enters(Stage.GRAPH))
    best: bool = field(default=False, metadata=enters(Stage.CORRECTIONS, int8_only=True))
    tuned: Path | None = field(default=None, metadata=enters(Stage.CORRECTIONS, "tuned", int8_only=True))

    @property
    def implicit(self) -> bool:
        """Whether TensorRT quantises by itself."""
        return self.quantization == "implicit"


def formats(int8_all: bool, int8_attention: bool, fp8: bool) -> tuple[str, ...]:
    """Those that were given of the options that say what is quantised and to which format, as the command line has
    them: what a table says of its rows."""
    asked = {"--int8-all": int8_all, "--int8-attention": int8_attention, "--fp8": fp8}
    return tuple(name for name, given in asked.items() if given)


@dataclass(frozen=True)
class SensitivityOptions:
    """How convolutions are ranked.

    Attributes:
        calibration: images and rule of the ranges.
        correct: the corrections, see :class:`BuildOptions`.
        num_images: images that are measured on: so many of the calibration images, or of the annotated ones.
        method: ``fast`` or ``reference``, see :mod:`trtdet.mixed_precision.ranking`.
        base: ``fp32``: each convolution alone in INT8; ``int8``: all but each.
        images: annotated images, to measure mAP as well.
        annotations: their COCO file.
        ray: None, ``local`` or the address of a Ray cluster.
        int8_all: rank every convolution that can be in INT8, see :class:`BuildOptions`.
        int8_attention: rank the products of two activations as well.
        fp8: rank products of matrices in FP8, not in INT8.
    """

    calibration: CalibrationOptions = CalibrationOptions()
    correct: tuple[str, ...] = DEFAULT_CORRECTIONS
    num_images: int = RANKED_IMAGES
    method: Literal["fast", "reference"] = "fast"
    base: Literal["fp32", "int8"] = "fp32"
    images: Path | None = None
    annotations: Path | None = None
    ray: str | None = None
    int8_all: bool = False
    int8_attention: bool = False
    fp8: bool = False


@dataclass(frozen=True)
class TuneOptions:
    """How the front of a model is found.

    Attributes:
        build: how a point is built: calibration, corrections, backend, batch, the GPU of estimates, and the objective
            in ``keep``, which names nothing else. Every convolution that can be in INT8 is open.
        images: images that report: annotated, or to compare with the float model's detections; None takes those of the
            calibration folder that do not calibrate, 128 at most. Calibration images among them are left out.
        annotations: their COCO file; None measures agreement with the float model's detections.
        points: plans of the integer program beside those with a title of their own, at least 2.
        rank_images: calibration images that the ranking is measured on, at least 1.
        ray: None, ``local`` or the address of a Ray cluster.
        on: what is run and scored, see :meth:`trtdet.runtime.detector.Detector.open`.
    """

    build: BuildOptions
    images: Path | None = None
    annotations: Path | None = None
    points: int = 6
    rank_images: int = RANKED_IMAGES
    ray: str | None = None
    on: Runtime = "auto"
