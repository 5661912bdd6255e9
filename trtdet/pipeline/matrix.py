"""The axes of a sweep, and the names and the key of its rows."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from typing_extensions import NotRequired, TypedDict

from trtdet.config import Config, NmsConfig, SiluForm
from trtdet.data import CocoDataset, content_hash
from trtdet.evaluation.comparison import Finite, MaskScore
from trtdet.files import sha256_file
from trtdet.pipeline.options import CalibrationOptions, formats
from trtdet.pipeline.stages.calibrating import HISTOGRAMS, Selection
from trtdet.pipeline.stages.rewriting import FORMS
from trtdet.quantization import DEFAULT_CORRECTIONS, Precision
from trtdet.runtime.detector import Runtime

Keep = int | Literal["depthwise"]

Limits = tuple[int | None, int | None]
"""``head.rpn_pre_nms_topk`` and ``head.rpn_post_nms_topk`` of a variant; None for what the configuration says."""


@dataclass(frozen=True)
class SweepOptions:
    """The axes of the matrix, and what all of it shares.

    Attributes:
        calibration: the images; its rule is the first of ``rules``.
        rules: calibration rules.
        corrections: sets of corrections, the empty one for the textbook form.
        keeps: how many of the most sensitive convolutions stay in FP16 as well, or ``depthwise``.
        suppressions: thresholds.
        images: annotated images that are scored.
        annotations: their COCO file.
        backend: builds the engines; see :class:`trtdet.BuildOptions`.
        sms: compute capabilities to build for.
        ray: None, ``local`` or the address of a Ray cluster.
        silus: what SiLU is written as in the INT8 models, see :class:`trtdet.BuildOptions`.
        plugins: libraries with the plugins.
        on: what is run and scored, see :meth:`trtdet.runtime.detector.Detector.open`.
        int8_all: every convolution that can be is in INT8, see :class:`trtdet.BuildOptions`.
        int8_attention: products of two activations are in INT8 as well.
        fp8: products of matrices are in FP8 instead of INT8.
        rpn_pre_nms_topk: of a two-stage detector, how many anchors of each level are suppressed among.
        rpn_post_nms_topk: of a two-stage detector, how many proposals its second stage gets.
    """

    calibration: CalibrationOptions
    images: Path
    annotations: Path
    rules: tuple[str, ...] = ("percentile",)
    corrections: tuple[tuple[str, ...], ...] = (DEFAULT_CORRECTIONS,)
    keeps: tuple[Keep, ...] = (0,)
    suppressions: tuple[NmsConfig, ...] = ()
    backend: str = "auto"
    sms: tuple[int, ...] = ()
    ray: str | None = None
    silus: tuple[str, ...] = ("auto",)
    plugins: tuple[Path, ...] = ()
    on: Runtime = "auto"
    int8_all: bool = False
    int8_attention: bool = False
    fp8: bool = False
    rpn_pre_nms_topk: tuple[int, ...] = ()
    rpn_post_nms_topk: tuple[int, ...] = ()

    @property
    def limits(self) -> tuple[Limits, ...]:
        """Every combination of the two numbers of proposals."""
        return tuple(itertools.product(self.rpn_pre_nms_topk or (None,), self.rpn_post_nms_topk or (None,)))

    @property
    def limited(self) -> bool:
        """Whether a number of proposals is an axis."""
        return self.limits != ((None, None),)

    @property
    def formats(self) -> tuple[str, ...]:
        """The options that say what is quantised and to which format, as the command line has them."""
        return formats(self.int8_all, self.int8_attention, self.fp8)


class Row(TypedDict):
    """One variant, as ``rows.jsonl`` and ``sweep.json`` hold it; mAP as fractions, 0..1."""

    variant: str
    precision: str
    silu: str
    calibration: str | None
    corrections: list[str] | None
    nms: NmsConfig
    map: Finite
    map50: Finite
    difference: Finite
    low: Finite | None
    high: Finite | None
    kept: int | str | None
    kept_names: list[str]
    int8: int
    fp16: int
    fp32: int
    build_seconds: Finite | None
    engine_mb: Finite | None
    latency_ms: Finite | None
    masks: NotRequired[MaskScore]
    """Where the detector and the annotations have masks."""
    options: NotRequired[list[str]]
    """The options that say what is quantised, such as ``--fp8``; none of the float model."""
    tf32: NotRequired[bool]
    """The engine has float32 convolutions, which may run in TF32."""
    rpn_pre_nms_topk: NotRequired[int | None]
    rpn_post_nms_topk: NotRequired[int | None]
    """Where a number of proposals is an axis; what follows is then there too."""
    ar100: NotRequired[Finite]
    ar1000: NotRequired[Finite]
    proposals: NotRequired[Finite]
    """Mean number of an image."""
    timed_on: NotRequired[str]
    """What ran: a device and a library."""
    same_as: NotRequired[str]
    """The earlier variant with the same network, which was built and scored for both."""


@dataclass(frozen=True)
class Group:
    """Variants that share ranges, corrections and ranking; the float model by itself, in each precision."""

    rule: str | None = None
    corrections: tuple[str, ...] = ()
    silu: SiluForm = "keep"
    precision: Precision = "int8"
    limits: Limits = (None, None)


@dataclass(frozen=True)
class Matrix:
    """One sweep: a model, its configuration, the folder of the results, the axes, and the images that were chosen."""

    model: Path
    config: Config
    folder: Path
    options: SweepOptions
    selected: Selection
    dataset: CocoDataset

    def groups(self) -> list[Group]:
        axes = tuple(itertools.product(FORMS, self.options.rules, self.options.corrections))
        precisions: tuple[Precision, ...] = ("fp32", "fp16") if self.options.on == "engine" else ("fp32",)
        found = []
        for limits in self.options.limits:
            found += [Group(precision=precision, limits=limits) for precision in precisions]
            found += [Group(rule, done, silu, limits=limits) for silu, rule, done in axes if silu in self.options.silus]
        return found

    @property
    def most(self) -> Limits:
        """The numbers of proposals of the variant that others are compared with: the largest."""
        return max(self.options.limits, key=lambda limits: [2**31 if one is None else one for one in limits])

    def config_of(self, limits: Limits) -> Config:
        """The configuration with other numbers of proposals."""
        names = ("rpn_pre_nms_topk", "rpn_post_nms_topk")
        changed = {name: one for name, one in zip(names, limits, strict=True) if one is not None}
        return self.config.model_copy(update={"head": self.config.head.model_copy(update=changed)})

    def histograms(self, limits: Limits) -> Path:
        """The file of the histograms: the second stage of a detector sees the proposals that it gets."""
        numbers = "-".join("all" if one is None else str(one) for one in limits)
        return self.folder / (f"histograms-{numbers}.npz" if self.options.limited else HISTOGRAMS)

    def keeps(self, group: Group) -> tuple[Keep | None, ...]:
        return (None,) if group.rule is None else self.options.keeps

    def name(self, group: Group, keep: Keep | None, nms: NmsConfig) -> str:
        settings = [nms.model_dump(mode="json"), self.options.backend, self.options.sms, self.options.on]
        settings += [list(group.limits)] if self.options.limited else []
        if group.rule is None:
            return json.dumps([group.precision, *settings])
        libraries = [sha256_file(path) for path in self.options.plugins] if group.silu == "plugin" else []
        calibration = [group.rule, self.options.calibration.percentile, group.corrections, keep, self.options.int8_all]
        more = [name for name in self.options.formats if name != "--int8-all"]
        return json.dumps([*calibration, *more, group.silu, *libraries, *settings])

    def names(self, group: Group) -> list[str]:
        return [self.name(group, keep, nms) for keep in self.keeps(group) for nms in self.options.suppressions]

    def waiting(self, found: Container[str]) -> list[Group]:
        """The groups with a row whose name is not among ``found``."""
        return [group for group in self.groups() if any(name not in found for name in self.names(group))]

    def key(self) -> str:
        """What all rows share."""
        facts = {
            "config": self.config.with_nms().model_dump(mode="json", exclude={"nms"}),
            "images": self.selected.sha256,
            "annotations": sha256_file(self.dataset.annotations),
            "validation": content_hash([image.path for image in self.dataset.images]),
        }
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
        digest.update(self.model.read_bytes())
        return digest.hexdigest()
