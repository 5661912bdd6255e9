"""The commands that give a bundle, a tune or a sweep again, from the options that it was made with."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trtdet.pipeline import BuildOptions, CalibrationOptions, TuneOptions
from trtdet.pipeline.variants import SweepOptions

_VALUES = (
    *(("calibration.rule", "--calib"), ("calibration.percentile", "--percentile"), ("calibration.images", "--images")),
    *(("calibration.root", "--images-root"), ("calibration.num_images", "--num-images")),
    *(("calibration.histograms", "--histograms"), ("nms", "--nms"), ("backend", "--backend"), ("silu", "--silu")),
    *(("keep.budget", "--fp16-budget"), ("keep.max_map_drop", "--max-map-drop"), ("keep.images", "--val-images")),
    *(("keep.annotations", "--annotations"), ("keep.num_images", "--rank-images"), ("keep.ray", "--ray")),
    *(("keep.max_disagreement", "--max-disagreement"), ("keep.objective", "--objective")),
    *(("keep.max_latency", "--max-latency"), ("quantization", "--quantization"), ("calibrator", "--calibrator")),
    *(("cache", "--calibration-cache"), ("timing_cache", "--timing-cache"), ("guard", "--guard"), ("gpu", "--gpu")),
)
"""By key of the resolved options, the option of ``trtdet build`` that takes its value."""

_FLAGS = (
    *(("engine.version_compatible", "--version-compatible"), ("engine.hardware_compatible", "--hardware-compatible")),
    *(("engine.embed_plugins", "--embed-plugins"), ("force", "--force"), ("accuracy_report", "--accuracy-report")),
    *(("int8_all", "--int8-all"), ("int8_attention", "--int8-attention"), ("fp8", "--fp8"), ("best", "--best")),
)
"""Those that stand for true."""

_NEGATED = (("calibration.check_input", "--no-input-check"), ("engine.tf32", "--no-tf32"), ("measure", "--no-measure"))
_LISTS = (("sms", "--sm"), ("plugins", "--plugin-library"))
_BESIDE_A_POINT = (
    *("--val-images", "--annotations", "--timing-cache", "--guard", "--gpu", "--force", "--accuracy-report"),
    *("--no-measure", "--version-compatible", "--hardware-compatible", "--embed-plugins", "--no-tf32"),
)
"""All else the tune has said."""

_PARTS = ("calibration", "keep", "engine")

_TUNE = (
    *(("images", "--val-images"), ("annotations", "--annotations"), ("points", "--points")),
    *(("rank_images", "--rank-images"), ("ray", "--ray"), ("on", "--runtime")),
)
_SWEEP = (
    *(("calibration.images", "--images"), ("calibration.root", "--images-root")),
    *(("calibration.num_images", "--num-images"), ("calibration.percentile", "--percentile")),
    *(("images", "--val-images"), ("annotations", "--annotations"), ("backend", "--backend")),
    *(("on", "--runtime"), ("ray", "--ray")),
)
_SWEEP_FLAGS = (("int8_all", "--int8-all"), ("int8_attention", "--int8-attention"), ("fp8", "--fp8"))
_SWEEP_LISTS = (
    *(("rules", "--calib"), ("keeps", "--keep-fp16"), ("silus", "--silu"), ("sms", "--sm")),
    *(("plugins", "--plugin-library"), ("rpn_pre_nms_topk", "--rpn-pre-nms-topk")),
    ("rpn_post_nms_topk", "--rpn-post-nms-topk"),
)
_THRESHOLDS = (
    *(("score_threshold", "--score-threshold"), ("iou_threshold", "--iou-threshold")),
    ("max_detections", "--max-detections"),
)
_MEBIBYTE = 2**20


def build_command(options: Mapping[str, Any], output: str) -> str:
    """The command line that gives the resolved options of a build, such as a manifest's ``command``.

    Args:
        options: :class:`trtdet.pipeline.BuildOptions` as plain values.
        output: the bundle's folder.
    """
    return _command("build", _build_words(options), output)


def tune_command(options: Mapping[str, Any], output: str) -> str:
    """The command line that gives the options of a tune.

    Args:
        options: :class:`trtdet.pipeline.TuneOptions` as plain values.
        output: the folder of the front.
    """
    defaults = _plain(TuneOptions(BuildOptions()))
    options = {**defaults, **options}
    # A tune is of INT8, and says so to no one.
    build = [word for word in _build_words(options["build"]) if word != "--int8"]
    return _command("tune", [*build, *_changed(_TUNE, options, defaults)], output)


def sweep_command(options: Mapping[str, Any], nms: Mapping[str, Any], output: str) -> str:
    """The command line that gives the options of a sweep.

    Args:
        options: :class:`trtdet.pipeline.variants.SweepOptions` as plain values.
        nms: thresholds of the configuration.
        output: the folder of the rows.
    """
    return _command("sweep", _sweep_words(options, nms), output)


def _command(verb: str, words: Iterable[str], output: str) -> str:
    return shlex.join(["trtdet", verb, "MODEL", "--config", "config.yaml", *words, "-o", output])


def _sweep_words(options: Mapping[str, Any], nms: Mapping[str, Any]) -> Iterator[str]:
    defaults = _plain(SweepOptions(CalibrationOptions(), Path(), Path()))
    options = {**defaults, **options}
    yield from _changed(_SWEEP, options, defaults)
    for key, option in _SWEEP_LISTS:
        if options[key] != defaults[key]:
            yield from (option, *map(str, options[key]))
    if options["corrections"] != defaults["corrections"]:
        yield from ("--correct", *(",".join(names) or "none" for names in options["corrections"]))
    for key, option in _THRESHOLDS:
        values = list(dict.fromkeys(one[key] for one in options["suppressions"]))
        if values and values != [nms[key]]:
            yield from (option, *map(_text, values))
    yield from (option for key, option in _SWEEP_FLAGS if options[key])


def _build_words(options: Mapping[str, Any]) -> Iterator[str]:
    defaults = _plain(BuildOptions())
    # Bundles of earlier versions lack options of later ones.
    options = {**defaults, **options, **{part: {**defaults[part], **options[part]} for part in _PARTS}}
    values: Iterable[tuple[str, str]] = _VALUES
    flags = [option for key, option in _FLAGS if _at(options, key)]
    flags += [option for key, option in _NEGATED if not _at(options, key)]
    if options["tuned"] is not None:
        yield from ("--tuned", options["tuned"], "--point", _stem(options["keep"]["keep"]))
        values = [(key, option) for key, option in values if option in _BESIDE_A_POINT]
        flags = [option for option in flags if option in _BESIDE_A_POINT]
    else:
        yield from _quantised(options, defaults)
    yield from _changed(values, options, defaults)
    engine = options["engine"]
    if engine["workspace"] is not None:
        yield from ("--workspace", _text(engine["workspace"] / _MEBIBYTE))
    if engine["tactic_sources"] is not None:
        yield from ("--tactic-sources", *engine["tactic_sources"])
    yield from flags


def _changed(
    values: Iterable[tuple[str, str]], options: Mapping[str, Any], defaults: Mapping[str, Any]
) -> Iterator[str]:
    """Options with their values, where these are not the default."""
    for key, option in values:
        value = _at(options, key)
        if value != _at(defaults, key):
            yield from (option, _text(value))


def _quantised(options: Mapping[str, Any], defaults: Mapping[str, Any]) -> Iterator[str]:
    """What a tune would have said already."""
    yield f"--{options['precision']}"
    if options["correct"] != defaults["correct"]:
        yield from ("--correct", ",".join(options["correct"]) or "none")
    if options["resize"]:
        yield from ("--size", "x".join(map(str, options["config"]["input"]["size"])))
    match options["keep"]["keep"]:
        case None:
            pass
        case list(names):
            yield from ("--keep-fp16", ",".join(names))
        case number_or_plan:
            yield from ("--keep-fp16", str(number_or_plan))
    if options["batch"] is not None:
        yield from ("--batch", ":".join(map(str, options["batch"])))
    for key, option in _LISTS:
        if options[key]:
            yield from (option, *map(str, options[key]))


def _plain(options: BuildOptions | TuneOptions | SweepOptions) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(asdict(options), default=str))
    return found


def _at(options: Mapping[str, Any], key: str) -> Any:
    """The value of ``calibration.rule`` and the like."""
    found: Any = options
    for part in key.split("."):
        found = found[part]
    return found


def _text(value: Any) -> str:
    """Of a number all digits, which round trips need, without the ``.0`` of a whole one."""
    return str(value).removesuffix(".0")


def _stem(plan: str) -> str:
    return plan.replace("\\", "/").rsplit("/", 1)[-1].removesuffix(".json")
