"""Versions, the resolved configuration, and the command that gives a bundle again."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import yaml

from trtdet.bundle import Manifest
from trtdet.pipeline import BuildOptions
from trtdet.report.document import Grid, Section, Text
from trtdet.tables import Column, Table

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
_MEBIBYTE = 2**20


def reproduce_section(manifest: Manifest, output: str) -> Section:
    """What a bundle was made with: versions, the command, the configuration as it was resolved.

    Args:
        manifest: of the bundle.
        output: the bundle's folder, for the command.
    """
    images, backend = manifest.quantization.images, manifest.backend
    rows = [
        ("trtdet", manifest.trtdet_version),
        (backend.name, backend.version),
        ("compute capabilities", ", ".join(f"{sm / 10}" for sm in backend.sms)),
        ("made", manifest.created),
        ("model, SHA-256", manifest.model.sha256),
        ("calibration images, SHA-256", images.sha256 if images is not None else ""),
        ("content, SHA-256", manifest.content_hash),
    ]
    table = Table((Column("of", align="left"), Column("is", align="left")), [row for row in rows if row[1]])
    config = yaml.safe_dump(manifest.command["config"], sort_keys=False, allow_unicode=True)
    said = (
        "MODEL is the float ONNX file with the hash above, config.yaml the text below; paths are as they were given to "
        "the build. Equal content hashes mean equal inputs."
    )
    return Section(
        "Reproduce",
        (
            Grid(table),
            Text((build_command(manifest.command, output),), code=True),
            Text((said,)),
            Text(tuple(config.splitlines()), code=True),
        ),
    )


def build_command(options: Mapping[str, Any], output: str) -> str:
    """The command line that gives the resolved options of a build, such as a manifest's ``command``.

    Args:
        options: :class:`trtdet.pipeline.BuildOptions` as plain values.
        output: the bundle's folder.
    """
    return shlex.join(["trtdet", "build", "MODEL", "--config", "config.yaml", *_words(options), "-o", output])


def _words(options: Mapping[str, Any]) -> Iterator[str]:
    defaults = _defaults()
    # Bundles of earlier versions lack options of later ones.
    options = {**defaults, **options, **{part: {**defaults[part], **options[part]} for part in _PARTS}}
    values = [(key, option) for key, option in _VALUES if _at(options, key) != _at(defaults, key)]
    flags = [option for key, option in _FLAGS if _at(options, key)]
    flags += [option for key, option in _NEGATED if not _at(options, key)]
    if options["tuned"] is not None:
        yield from ("--tuned", options["tuned"], "--point", _stem(options["keep"]["keep"]))
        values = [(key, option) for key, option in values if option in _BESIDE_A_POINT]
        flags = [option for option in flags if option in _BESIDE_A_POINT]
    else:
        yield from _quantised(options, defaults)
    for key, option in values:
        yield from (option, _text(_at(options, key)))
    engine = options["engine"]
    if engine["workspace"] is not None:
        yield from ("--workspace", _text(engine["workspace"] / _MEBIBYTE))
    if engine["tactic_sources"] is not None:
        yield from ("--tactic-sources", *engine["tactic_sources"])
    yield from flags


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


def _defaults() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(asdict(BuildOptions()), default=str))
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
