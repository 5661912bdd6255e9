"""The options as frozen dataclasses; every field is an option, see :mod:`trtdet.options.rows`.

Lists of allowed values are copies, so that ``--help`` need not load NumPy and ONNX; tests/cli compares them with the
originals.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from trtdet.options.rows import OptionSet, Stage, option, part, same_row

Precision = Literal["int8", "fp16", "fp32"]
Objective = Literal["latency", "throughput", "size"]
Runtime = Literal["auto", "engine", "onnxruntime"]

RULES = ("minmax", "entropy", "percentile", "mse")
BACKENDS = ("auto", "tensorrt", "tensorrt-rtx", "onnxruntime")
CORRECTIONS = ("range", "smooth", "round", "bias", "reconstruct", "asymmetric")
EFFORTS = {
    "none": (),
    "quick": ("smooth", "round", "bias"),
    "default": ("range", "smooth", "round", "bias", "asymmetric"),
    "thorough": CORRECTIONS,
}
"""The corrections of each level of effort, in the order of their use."""

RANKED_IMAGES = 32
DEFAULT_IMAGES = 128
USUAL_PERCENTILE = 99.99
USUAL_GUARD = 1.02


def calibration_rule(text: str) -> str:
    """Checks the name of a rule, or ``percentile:99.9``, and returns it unchanged."""
    name, colon, _ = text.partition(":")
    if name not in RULES or (colon and name != "percentile"):
        raise ValueError(
            f"no calibration rule '{text}'; allowed: {', '.join(RULES)}, percentile:P such as percentile:99.9"
        )
    if colon:
        rule_percentile(text)
    return text


def rule_percentile(rule: str) -> float:
    """The percentile of a rule, over 0 and up to 100, by default 99.99. Raises ValueError outside this range."""
    text = rule.partition(":")[2]
    try:
        percentile = float(text) if text else USUAL_PERCENTILE
    except ValueError:
        percentile = 0.0
    if not 0 < percentile <= 100:
        raise ValueError(f"percentile must be over 0 and up to 100, got {text}; the usual value is {USUAL_PERCENTILE}")
    return percentile


def corrections_of(effort: str) -> tuple[str, ...]:
    """The corrections of a level of effort, or of a list of names, in the order of their use. Raises ValueError: a name
    is unknown."""
    if effort in EFFORTS:
        return EFFORTS[effort]
    names = effort.split(",")
    unknown = [name for name in names if name not in CORRECTIONS]
    if unknown:
        raise ValueError(
            f"no effort and no correction '{unknown[0]}'; allowed: {', '.join(EFFORTS)}, or names of "
            f"{','.join(CORRECTIONS)}"
        )
    return tuple(name for name in CORRECTIONS if name in names)


def effort_text(text: str) -> str:
    """A level of effort, or the names of corrections in the order of their use."""
    return text if text in EFFORTS else ",".join(corrections_of(text))


def kept_layers(text: str) -> int | Path | tuple[str, ...]:
    """``5`` -> 5, ``plan.json`` -> its path, ``Conv_1,Conv_7`` -> the names."""
    if text.isdigit():
        return int(text)
    if text.endswith(".json"):
        return Path(text)
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise ValueError(f"'{text}' must be a number, a plan (.json), or NODE,NODE,...")
    return names


def category_class(text: str) -> tuple[str, str]:
    """``truck=car`` -> ("truck", "car"), ``others=`` -> ("others", "")."""
    name, equals, counted_as = (part.strip() for part in text.partition("="))
    if not (name and equals):
        raise ValueError(f"'{text}' must be CATEGORY=CLASS, or CATEGORY= to leave it out")
    return name, counted_as


def batch_range(text: str) -> tuple[int, int, int]:
    """``4`` -> (4, 4, 4) and ``1:4:8`` -> (1, 4, 8)."""
    sizes = [int(size) for size in text.split(":")] if re.fullmatch(r"[0-9]{1,6}(:[0-9]{1,6}){0,2}", text) else []
    if len(sizes) == 1:
        sizes *= 3
    if len(sizes) != 3 or not 0 < sizes[0] <= sizes[1] <= sizes[2]:
        raise ValueError(f"'{text}' must be MIN:OPT:MAX with 0 < MIN <= OPT <= MAX, or one number")
    return sizes[0], sizes[1], sizes[2]


def input_size(text: str) -> tuple[int, int]:
    """``480x640`` -> (480, 640), height and width in pixels; ``640`` -> (640, 640)."""
    sides = [int(side) for side in text.split("x")] if re.fullmatch(r"[0-9]{1,6}(x[0-9]{1,6})?", text) else []
    if not sides or not all(sides):
        raise ValueError(f"'{text}' must be HEIGHTxWIDTH in pixels, such as 480x640, or one number")
    return sides[0], sides[-1]


def compute_capability(text: str) -> int:
    """``8.6`` and ``86`` -> 86."""
    if not re.fullmatch(r"[0-9]{1,2}\.[0-9]|[0-9]{2,3}", text):
        raise ValueError(f"'{text}' must be a compute capability, such as 8.6 or 86")
    return int(text.replace(".", ""))


def guard(text: str) -> float | Literal["off", "warn"]:
    """``off``, ``warn``, or the smallest speedup of INT8 over FP16."""
    if text == "off":
        return "off"
    if text == "warn":
        return "warn"
    try:
        ratio = float(text)
    except ValueError:
        ratio = 0.0
    if not 0 < ratio < float("inf"):
        raise ValueError(f"'{text}' must be off, warn or a number over 0; the usual number is {USUAL_GUARD}")
    return ratio


# The first stage of a build that an option changes, and whether it has an effect only on INT8.
GRAPH: dict[str, Any] = {"key": Stage.GRAPH, "int8_only": False}
RANGES: dict[str, Any] = {"key": Stage.RANGES, "int8_only": False}
INT8_RANGES: dict[str, Any] = {"key": Stage.RANGES, "int8_only": True}
CORRECTIONS_KEY: dict[str, Any] = {"key": Stage.CORRECTIONS, "int8_only": True}
PLAN: dict[str, Any] = {"key": Stage.PLAN, "int8_only": True}
ENGINE: dict[str, Any] = {"key": Stage.ENGINE, "int8_only": False}
INT8_ENGINE: dict[str, Any] = {"key": Stage.ENGINE, "int8_only": True}


@dataclass(frozen=True)
class CalibrationOptions(OptionSet, section="calibration", group="images", **RANGES):
    """Source of the activation ranges."""

    images: Path | None = option(
        None, "calibration images: a folder, or a .txt list", "--images DIR|LIST", fact="images"
    )
    num_images: int | None = option(
        None, f"use N of them (default: at most {DEFAULT_IMAGES})", "--num-images N", low=1, fact="images"
    )
    rule: str = option(
        "percentile",
        "threshold rule: minmax, entropy, percentile, percentile:P or mse",
        "--calib RULE",
        group="precision",
        read=calibration_rule,
        int8_only=True,
    )
    root: Path | None = option(
        None, "folder that the names of an image list are relative to (default: the list's own)", "DIR", fact="images"
    )
    histograms: Path | None = option(
        None,
        "start from the histograms that 'trtdet calibrate' wrote, without running images",
        "NPZ",
        fact="histograms",
    )
    check_input: bool = option(
        True,
        "first check whether the float model detects something, and whether another configuration detects more",
        key="looks at the model and changes nothing",
    )
    calibrator: Literal["trtdet", "tensorrt"] = option(
        "trtdet",
        "who chooses the ranges of implicit quantization: trtdet, or TensorRT's own calibrator of the rule's name",
        key=Stage.NETWORK,
        int8_only=True,
    )
    cache: Path | None = option(
        None, "use the ranges of this calibration cache, with implicit quantization", "FILE", fact="cache"
    )
    rescale: bool = option(
        False,
        "choose the ranges of a model that is quantised already anew on the images; its weights stay",
        int8_only=True,
    )
    unfinished: Path | None = option(None, "", hidden=True, key="where work is kept, not what comes out")
    """File with the progress of a reconstruction, so that a stopped build can continue."""

    def images_alone(self) -> CalibrationOptions:
        """The same images and input check, with defaults for all other options."""
        images = CalibrationOptions(images=self.images, root=self.root, num_images=self.num_images)
        return replace(images, check_input=self.check_input)

    @property
    def rule_name(self) -> str:
        """The rule without its percentile."""
        return self.rule.partition(":")[0]

    @property
    def percentile(self) -> float:
        """For the rule ``percentile``, in percent."""
        return rule_percentile(self.rule)


@dataclass(frozen=True)
class PlanOptions(OptionSet, section="plan", group="precision", **PLAN):
    """Choice of the layers in INT8 and in FP16.

    At most one of ``keep_fp16``, ``fp16_budget``, ``max_map_drop``, ``max_disagreement`` and ``max_latency`` is set.
    """

    int8_all: bool = option(False, "INT8 also for layers that it makes no faster", "--int8-all", **CORRECTIONS_KEY)
    fastest: bool = option(
        True,
        "the default plan is the fastest by estimate; false: INT8 wherever a convolution has the channels for it",
        **CORRECTIONS_KEY,
    )
    keep_fp16: int | Path | tuple[str, ...] | None = option(
        None,
        "layers that stay in FP16 (N: most sensitive)",
        "--keep-fp16 N|PLAN|NAMES",
        read=kept_layers,
        write=lambda value: ",".join(value) if isinstance(value, (tuple, list)) else str(value),
        fact="kept",
        **CORRECTIONS_KEY,
    )
    max_map_drop: float | None = option(
        None, "the cheapest plan that loses at most X mAP points", "--max-map-drop X", low=0, high=100
    )
    val_images: Path | None = option(
        None, "images to measure accuracy on", "--val-images DIR", group="images", fact="annotated", beside_variant=True
    )
    annotations: Path | None = option(
        None, "their COCO instances file", "--annotations JSON", group="images", fact="annotated", beside_variant=True
    )
    max_disagreement: float | None = option(
        None,
        "as --max-map-drop, but against the float model's own detections, without annotations; needs --val-images",
        low=0,
        high=100,
    )
    max_latency: float | None = option(
        None,
        "find the most accurate plan within X milliseconds, measured where a GPU runs the engine, else estimated",
        above=0,
    )
    fp16_budget: float | None = option(
        None,
        "keep the most sensitive convolutions in FP16, up to this share of the multiply-adds, 0 to 1",
        low=0,
        high=1,
    )
    objective: Objective = option(
        "latency",
        "what a plan is to be cheap in: milliseconds of a run, milliseconds an image at the largest batch, or bytes",
    )
    int8_attention: bool = option(
        False, "quantize the products of two activations in attention too, which builders then fuse less", **INT8_RANGES
    )
    fp8: bool = option(
        False,
        "FP8 (E4M3) instead of INT8 for matrix products; TensorRT 10 and later, compute capability 8.9 and later",
        **CORRECTIONS_KEY,
    )
    rank_images: int = option(
        RANKED_IMAGES,
        "calibration images that the sensitivity of the layers is measured on",
        low=1,
        fact="ranked_images",
    )
    ray: str | None = option(
        None,
        "rank on a Ray cluster (its address), or on Ray workers of this machine (local)",
        "ADDRESS|local",
        key="where the ranking is computed changes no number",
    )

    @property
    def limited(self) -> bool:
        """Whether a limit on accuracy or latency chooses the plan."""
        return any(limit is not None for limit in (self.max_map_drop, self.max_disagreement, self.max_latency))

    @property
    def ranked(self) -> bool:
        """Whether a ranking of the layers is needed."""
        return self.limited or self.fp16_budget is not None or (isinstance(self.keep_fp16, int) and self.keep_fp16 > 0)

    @property
    def estimated(self) -> bool:
        """Whether estimates may choose the default plan: no plan, format or limit is requested."""
        return self.fastest and not (self.formats or self.limited or isinstance(self.keep_fp16, Path))

    def formats_alone(self) -> PlanOptions:
        """The same quantized operators and formats, with defaults for all other options."""
        return PlanOptions(int8_all=self.int8_all, int8_attention=self.int8_attention, fp8=self.fp8)

    @property
    def formats(self) -> tuple[str, ...]:
        """Names of the set options on quantized operators and formats, for tables."""
        formats = {"--int8-all": self.int8_all, "int8_attention": self.int8_attention, "fp8": self.fp8}
        return tuple(name for name, value in formats.items() if value)


@dataclass(frozen=True)
class NmsOptions(OptionSet, section="nms", group="engine", key="stands in the configuration"):
    """Where NMS runs, and values that replace those of the configuration."""

    mode: Literal["auto", "efficient", "onnx", "native", "host"] = option(
        "auto", "where NMS runs: efficient, onnx, native, host", "--nms PLACE", fact="nms", **GRAPH
    )
    score_threshold: float | None = option(
        None, "a candidate's score must exceed X (default: the configuration's)", low=0, high=1
    )
    iou_threshold: float | None = option(
        None, "boxes of a class that overlap more suppress each other (default: the configuration's)", low=0, high=1
    )
    max_detections: int | None = option(None, "detections of an image at most (default: the configuration's)", low=1)
    pre_nms_topk: int | None = option(
        None, "best candidates of an image that enter NMS (default: the configuration's)", low=1
    )

    @property
    def values(self) -> dict[str, float]:
        """The set values, by key of the configuration."""
        return {name: value for name, value in vars(self).items() if name != "mode" and value is not None}


@dataclass(frozen=True)
class InputOptions(OptionSet, section="input", group="engine", **GRAPH):
    """Changes of the network input against the configuration."""

    size: tuple[int, int] | None = option(
        None,
        "height and width of the input, of a model that leaves them open or does not depend on them",
        "HxW",
        read=input_size,
        write=lambda value: "x".join(map(str, value)),
    )


@dataclass(frozen=True)
class EngineOptions(OptionSet, section="engine", group="engine", beside_variant=True, **ENGINE):
    """Options of the engine builder."""

    workspace: float | None = option(
        None, "scratch memory that a kernel may use, in MiB (default: the library's limit)", above=0
    )
    version_compatible: bool = option(False, "the engine runs on later TensorRT versions as well")
    hardware_compatible: bool = option(False, "the engine runs on every GPU since Ampere")
    embed_plugins: bool = option(False, "the engine carries the plugin libraries")
    tactic_sources: tuple[str, ...] | None = option(
        None, "kernel libraries that TensorRT may use (default: its own choice)", "NAME,...", many=True
    )
    tf32: bool = option(True, "multiply float32 in TF32 on GPUs since Ampere")
    dla: int | None = option(
        None, "core of Jetson's DLA for the layers that it takes, 0 or 1; the GPU runs the others", low=0, high=1
    )
    plugins: tuple[Path, ...] = option(
        (),
        "libraries of TensorRT plugins, for --silu plugin; they are copied into the bundle",
        "PATH,...",
        many=True,
        fact="plugins",
        beside_variant=False,
    )
    timing_cache: Path | None = option(
        None,
        "file of measured kernel times, read and extended (default: beside the bundle)",
        "FILE",
        key="measured times of kernels, no choice",
    )
    gpu: str | None = option(
        None,
        "GPU of estimates, such as T4 or 'RTX 4090' (default: the first that the engine is built for)",
        "NAME",
        fact="estimated",
        **CORRECTIONS_KEY,
    )


@dataclass(frozen=True)
class BuildOptions(OptionSet, group="engine"):
    """Options of ``trtdet build``."""

    precision: Precision = option(
        "int8",
        "precision of the engine",
        flags={
            "--int8": ("int8", "INT8, with calibration images (the default)"),
            "--fp16": ("fp16", "the float model in FP16"),
            "--fp32": ("fp32", "the float model as it is"),
        },
        group="precision",
        **RANGES,
    )
    plan: PlanOptions = part(PlanOptions())
    calibration: CalibrationOptions = part(CalibrationOptions())
    effort: str = option(
        "default",
        "corrections: none, quick, default, thorough, or names",
        "--effort LEVEL",
        group="precision",
        read=effort_text,
        **CORRECTIONS_KEY,
    )
    backend: str = option(
        "auto",
        "library: tensorrt, tensorrt-rtx, onnxruntime",
        "--backend LIBRARY",
        values=BACKENDS,
        fact="backend",
        **GRAPH,
    )
    sms: tuple[int, ...] = option(
        (),
        "compute capabilities to build for, such as 8.6 8.9",
        "--sm SM",
        many=True,
        read=compute_capability,
        **ENGINE,
    )
    batch: tuple[int, int, int] | None = option(
        None,
        "sizes of an open batch (default: 1)",
        "--batch MIN:OPT:MAX",
        read=batch_range,
        write=lambda value: ":".join(map(str, value)),
        **GRAPH,
    )
    nms: NmsOptions = part(NmsOptions())
    silu: Literal["auto", "keep", "swish", "plugin"] = option(
        "auto", "form of SiLU: keep, swish or plugin", "--silu FORM", **GRAPH
    )
    quantization: Literal["explicit", "implicit"] = option(
        "explicit", "explicit (Q/DQ nodes) or implicit (ranges beside the model)", "--quantization KIND", **INT8_RANGES
    )
    guard: float | Literal["off", "warn"] = option(
        "warn",
        "compare with FP16; X: ship FP16 unless INT8 is X times as fast",
        "--guard off|warn|X",
        group="precision",
        read=guard,
        above=0,
        fact="guard",
        beside_variant=True,
        **INT8_ENGINE,
    )
    from_: str | None = option(
        None,
        "build variant N of a sweep or a tune",
        "--from DIR:N",
        beside_variant=True,
        key="the options of the variant stand for it",
    )
    tuned: Path | None = option(None, "", hidden=True, fact="tuned", **CORRECTIONS_KEY)
    """The variant's folder, whose ranges and corrections are used unchanged."""
    quantized: bool = option(False, "", hidden=True, key="the model itself counts")
    """Whether the model has Q/DQ pairs: they give the plan, the weights and, without ``rescale``, the ranges."""
    force: bool = option(
        False, "replace a bundle of another model", "--force", beside_variant=True, key="says what may be replaced"
    )
    input: InputOptions = part(InputOptions())
    engine: EngineOptions = part(EngineOptions())

    @property
    def int8(self) -> bool:
        """Whether the requested precision is INT8."""
        return self.precision == "int8"

    @property
    def implicit(self) -> bool:
        """Whether TensorRT chooses what to quantize."""
        return self.quantization == "implicit"

    @property
    def calibrated(self) -> bool:
        """Whether INT8 ranges are computed, not read from a calibration cache or a quantised model."""
        return self.int8 and self.calibration.cache is None and (self.calibration.rescale or not self.quantized)

    @property
    def planless(self) -> bool:
        """Whether explicit INT8 from images is asked for without a plan, a variant, or a model that has its own."""
        given = self.from_ is not None or self.tuned is not None or self.quantized
        return self.calibrated and not self.implicit and self.plan.estimated and not given

    @property
    def plan_open(self) -> bool:
        """Whether the build is :attr:`planless`, and nothing else narrows its network: layers kept in FP16, a form of
        SiLU, a DLA, a cluster."""
        plan = self.plan
        narrowed = plan.keep_fp16 is not None or plan.fp16_budget is not None or plan.ray is not None
        return self.planless and not narrowed and self.engine.dla is None and self.silu == "auto"

    @property
    def runs_images(self) -> bool:
        """Whether calibration images are run: for INT8 ranges, or to find values that exceed FP16."""
        return self.calibrated or self.quantized or self.precision == "fp16"

    @property
    def corrections(self) -> tuple[str, ...]:
        """The corrections that may be used; none change the weights of a quantised model."""
        return () if self.quantized else corrections_of(self.effort)

    @property
    def compare(self) -> bool:
        """Whether an INT8 build is compared with FP16."""
        return self.guard != "off"

    @property
    def least_speedup(self) -> float | None:
        """Smallest speedup over FP16 at which INT8 is shipped; None to ship INT8 at any speed."""
        return None if isinstance(self.guard, str) else self.guard


@dataclass(frozen=True)
class SensitivityOptions(OptionSet, group="ranking"):
    """Options of ``trtdet sensitivity``."""

    calibration: CalibrationOptions = part(CalibrationOptions(), without="calibrator cache rescale")
    effort: str = same_row(BuildOptions, "effort")
    plan: PlanOptions = part(PlanOptions(), only="int8_all int8_attention fp8 rank_images ray val_images annotations")
    method: Literal["fast", "reference"] = option(
        "fast",
        "fast leaves out images with few detections and shares computations; reference runs the whole model for each "
        "convolution and image",
        "--method",
    )
    all_but_one: bool = option(
        False, "quantize all convolutions but each in turn (default: each in turn alone)", "--all-but-one"
    )

    @property
    def corrections(self) -> tuple[str, ...]:
        """The corrections that may be used."""
        return corrections_of(self.effort)


@dataclass(frozen=True)
class CalibrateOptions(OptionSet, group="images"):
    """Options of ``trtdet calibrate``."""

    calibration: CalibrationOptions = part(CalibrationOptions(), without="calibrator cache rescale")
    plan: PlanOptions = part(PlanOptions(), only="int8_attention")
    quantization: Literal["explicit", "implicit"] = same_row(
        BuildOptions,
        "quantization",
        help="ranges of what Q/DQ nodes read, or of every tensor that TensorRT may quantize by itself",
    )
    tensorrt: str = option("8.6.0", "TensorRT version that is to read the calibration cache", "--tensorrt VERSION")
    how_many: bool = option(
        False,
        "only measure and print how the INT8 error depends on the number of images, and which classes they show; "
        "writes nothing, so without -o",
        "--how-many",
    )
    effort: str = same_row(
        BuildOptions,
        "effort",
        "none",
        help="with --how-many: measure these corrections too: none, quick, default, thorough, or names",
        group="images",
    )


@dataclass(frozen=True)
class EvalOptions(OptionSet):
    """Options of ``trtdet eval``: the check of the input, NMS, and the categories of the annotations."""

    check_input: bool = same_row(CalibrationOptions, "calibration.check_input")
    nms: NmsOptions = part(NmsOptions())
    categories: tuple[tuple[str, str], ...] = option(
        (),
        "for a model with other classes than the annotations: boxes of a category count as a class, or with nothing "
        "after = are left out; others= leaves out all categories that are no class",
        "--categories CATEGORY=CLASS",
        many=True,
        read=category_class,
        write="=".join,
    )


@dataclass(frozen=True)
class TuneOptions(OptionSet, group="search"):
    """Options of ``trtdet tune``. The search considers every convolution that can run in INT8."""

    build: BuildOptions = part(
        BuildOptions(),
        flat=True,
        without="precision quantization guard from force nms.mode nms.score_threshold nms.pre_nms_topk "
        "nms.iou_threshold nms.max_detections plan.keep_fp16 plan.int8_all plan.fastest plan.max_map_drop "
        "plan.max_disagreement plan.max_latency plan.fp16_budget calibration.calibrator calibration.cache "
        "calibration.rescale input.size "
        "engine.workspace engine.version_compatible engine.hardware_compatible engine.embed_plugins "
        "engine.tactic_sources engine.tf32 engine.dla engine.timing_cache",
    )
    points: int = option(
        6,
        "plans of the optimiser, besides the four fixed plans: all FP16, all INT8, the default, depthwise in FP16",
        "--points N",
        low=2,
    )
    on: Runtime = option(
        "auto",
        "what runs: a bundle's engine where possible and else its ONNX model (auto), or one of the two alone",
        "--runtime",
        group="images",
    )


@dataclass(frozen=True)
class PrepareOptions(OptionSet, group="candidates"):
    """Options of ``trtdet prepare``. Those of the engine's builder are given to ``trtdet finish``."""

    target: str | None = option(
        None,
        "what will build the engine, such as tensorrt-10.3 or tensorrt-rtx-1.7; it need not be installed",
        "--for LIBRARY-VERSION",
    )
    build: BuildOptions = part(
        BuildOptions(),
        flat=True,
        without="precision backend quantization guard from force input.size plan.keep_fp16 plan.int8_all plan.fastest "
        "plan.max_map_drop plan.max_disagreement plan.max_latency plan.fp16_budget plan.objective "
        "calibration.calibrator calibration.cache calibration.rescale engine.workspace engine.version_compatible "
        "engine.hardware_compatible engine.embed_plugins engine.tactic_sources engine.tf32 engine.plugins "
        "engine.timing_cache engine.gpu engine.dla",
    )
    max_map_drop: float | None = option(
        None,
        "largest loss of a candidate that may ship, in points, at the upper end of its 90 % interval (default: no loss "
        "that the images show, and at most 0.5)",
        "--max-map-drop X",
        low=0,
        high=100,
    )
    points: int = option(
        2, "candidates of the optimiser, besides FP16, the default plan and INT8 everywhere", "--points N", low=0
    )


@dataclass(frozen=True)
class FinishOptions(OptionSet, group="engine"):
    """Options of ``trtdet finish``."""

    budget: float | None = option(
        None, "build no further candidate after this many minutes", "--budget MINUTES", above=0
    )
    seconds: float = option(
        2.0, "time each candidate for this long, with and without transfers", "--seconds S", above=0
    )
    force: bool = same_row(BuildOptions, "force")
    engine: EngineOptions = part(EngineOptions(), without="embed_plugins plugins dla")


Keep = int | Literal["depthwise"]


def _kept_count(text: str) -> Keep:
    if text.isdigit() or text == "depthwise":
        return int(text) if text.isdigit() else "depthwise"
    raise ValueError(f"'{text}' must be a number of convolutions, or 'depthwise'")


@dataclass(frozen=True)
class SweepOptions(OptionSet, group="axes"):
    """Options of ``trtdet sweep``: the axes of the grid, and the shared options."""

    calibration: CalibrationOptions = part(CalibrationOptions(), only="images num_images root")
    rules: tuple[str, ...] = same_row(CalibrationOptions, "calibration.rule", ("percentile",), many=True, group="axes")
    efforts: tuple[str, ...] = same_row(BuildOptions, "effort", ("default",), many=True, group="axes")
    keeps: tuple[Keep, ...] = same_row(
        PlanOptions,
        "plan.keep_fp16",
        (0,),
        help="numbers of the most sensitive convolutions that stay in FP16, or all depthwise convolutions",
        metavar="N|depthwise",
        many=True,
        read=_kept_count,
        write=None,
        group="axes",
    )
    silus: tuple[str, ...] = same_row(BuildOptions, "silu", ("auto",), many=True, group="axes")
    score_thresholds: tuple[float, ...] = same_row(NmsOptions, "nms.score_threshold", (), many=True)
    iou_thresholds: tuple[float, ...] = same_row(NmsOptions, "nms.iou_threshold", (), many=True)
    max_detections: tuple[int, ...] = same_row(NmsOptions, "nms.max_detections", (), many=True)
    rpn_pre_nms_topk: tuple[int, ...] = option(
        (),
        "of a two-stage detector: anchors of each level that enter NMS",
        "N,...",
        name="head.rpn_pre_nms_topk",
        many=True,
        low=1,
    )
    rpn_post_nms_topk: tuple[int, ...] = option(
        (),
        "of a two-stage detector: proposals that the second stage gets",
        "N,...",
        name="head.rpn_post_nms_topk",
        many=True,
        low=1,
    )
    plan: PlanOptions = part(PlanOptions(), only="int8_all int8_attention fp8 ray val_images annotations")
    backend: str = same_row(BuildOptions, "backend")
    sms: tuple[int, ...] = same_row(BuildOptions, "sms")
    engine: EngineOptions = part(EngineOptions(), only="plugins")
    on: Runtime = same_row(TuneOptions, "on")

    @property
    def corrections(self) -> tuple[tuple[str, ...], ...]:
        """The distinct sets of corrections of ``efforts``."""
        return tuple(dict.fromkeys(map(corrections_of, self.efforts)))
