"""Builds of an experiment's variants, from the files in its folder.

A variant of a search has its own plan; ranges and corrections are shared. A variant of a grid has its own options.
"""

from __future__ import annotations

import io
import zipfile
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter
from typing_extensions import TypedDict

from trtdet.building.corrections import Prepared
from trtdet.building.graph import PlacedGraph
from trtdet.building.ranges import HISTOGRAMS, Selection, calibrated
from trtdet.calibration import Ranges
from trtdet.config import Config
from trtdet.errors import ConfigError, one_line
from trtdet.files import finish_replacing, write_atomically
from trtdet.files.documents import DocumentError, parse_document, read_document
from trtdet.options import BuildOptions, changed, rows_of, value_of, with_values
from trtdet.progress import Progress, silent
from trtdet.quantization import Corrections, Entry, PrecisionPlan
from trtdet.quantization.encoding import ChannelMap, Rounded

OPTIONS = "options.json"
CORRECTED = "corrected.npz"
RANKING_ROWS = "ranking.jsonl"
ROWS = "rows.jsonl"
PLANS = "plans"
EXPERIMENT = "experiment.json"
"""Files of the folder; ``plans`` is a subfolder."""

_WEIGHTS = ("integers", "scales", "bias")


@dataclass(frozen=True)
class _SearchOptions:
    """Content of ``options.json``."""

    schema: Literal[1]
    model: str
    key: str
    options: BuildOptions


class Overrides(TypedDict):
    """Changed keys of the configuration in a variant of a grid."""

    nms: dict[str, Any]
    head: dict[str, Any]


class _BuiltVariant(TypedDict):
    """Keys of a variant in ``experiment.json`` that a build reads; options are None for a search."""

    number: int
    build: BuildOptions | None
    config: Overrides | None


class _Experiment(TypedDict):
    variants: list[_BuiltVariant]


@dataclass(frozen=True)
class _Map:
    """A channel map in ``corrected.npz``, but for its scales."""

    tensor: str
    amax: float
    shift: float
    axis: int


@dataclass(frozen=True)
class _Meta:
    """Metadata of ``corrected.npz``."""

    schema: Literal[2]
    key: str
    ranges: Ranges
    plain: Ranges
    plan: dict[str, Entry]
    summary: tuple[str, ...]
    maps: tuple[_Map, ...]
    weights: tuple[str, ...]


_T = TypeVar("_T")
_adapter: Any = cache(TypeAdapter)


def _read(path: Path, kind: type[_T], missing: str, again: str) -> _T:
    try:
        document: _T = read_document(path, _adapter(kind))
    except FileNotFoundError:
        raise ConfigError(f"--from: {missing}") from None
    except (OSError, DocumentError) as error:
        raise ConfigError(f"--from: '{path}' cannot be used ({one_line(error)}); {again}") from None
    return document


def _read_options(folder: Path) -> _SearchOptions:
    missing = f"'{folder}' is not the folder of a 'trtdet tune'; give its -o"
    return _read(folder / OPTIONS, _SearchOptions, missing, again="run 'trtdet tune' again")


def with_absolute_paths(options: BuildOptions) -> BuildOptions:
    """Options that are valid in any working directory, without the option for a histogram file."""
    paths: dict[tuple[str, ...], Any] = {}
    for row in rows_of(BuildOptions):
        value = value_of(options, row)
        if row.kind is Path and value:
            paths[row.path] = tuple(path.absolute() for path in value) if row.many else value.absolute()
    absolute: BuildOptions = with_values(options, paths)
    return changed(absolute, histograms=None)


def save_options(folder: Path, model: str, key: str, options: BuildOptions) -> None:
    """Writes ``options.json``: options of all variants, the model's SHA-256, the key of the corrections."""
    document = _SearchOptions(1, model=model, key=key, options=with_absolute_paths(options))
    write_atomically(folder / OPTIONS, _adapter(_SearchOptions).dump_json(document, indent=1) + b"\n")


def variant_options(folder: Path | str, number: int, config: Config) -> tuple[BuildOptions, Config]:
    """Build options and configuration of a variant of a finished experiment; ``number`` counts from 1.

    Raises:
        ConfigError: the folder has no finished experiment, or no such variant.
    """
    folder = Path(folder)
    missing = f"'{folder}' has no finished experiment; give the -o of 'trtdet sweep' or 'trtdet tune'"
    finish_replacing(folder)
    experiment = _read(folder / EXPERIMENT, _Experiment, missing, again="repeat the experiment")
    variants = {variant["number"]: variant for variant in experiment["variants"]}
    if number not in variants:
        raise ConfigError(f"--from {folder}:{number}: there is no such variant; allowed are 1 to {max(variants)}")
    build, overrides = variants[number]["build"], variants[number]["config"]
    if build is None:
        options = _read_options(folder).options
        plan = replace(options.plan.formats_alone(), keep_fp16=folder / PLANS / f"{number}.json")
        return replace(options, plan=plan, tuned=folder), config
    if overrides is not None:
        head = config.head.model_copy(update=overrides["head"])
        config = config.model_copy(update={"head": head}).with_nms(**overrides["nms"])
    return build, config


def resolved(options: BuildOptions, config: Config) -> tuple[BuildOptions, Config]:
    """Options and configuration of the variant of ``--from``, with the user's other options; no change without it.
    Raises ConfigError: there is no such variant, or an option contradicts it."""
    if options.from_ is None or options.tuned is not None:
        return options, config
    values = [(row, value_of(options, row)) for row in rows_of(BuildOptions)]
    for row, value in values:
        if not row.beside_variant and value != row.default:
            flag = next((flag for flag, (meant, _) in row.flags.items() if meant == value), row.spelled)
            raise ConfigError(f"--from: leave {flag} out, as a variant is built as it was measured")
    folder, _, number = options.from_.rpartition(":")
    if not folder or not number.isdigit():
        raise ConfigError(f"--from {options.from_} must be DIR:N, such as tuned:3")
    variant, config = variant_options(Path(folder), int(number), config)
    return with_values(variant, {row.path: value for row, value in values if row.beside_variant}), config


def tuned_key(folder: Path) -> str:
    """Key of the corrections in the folder of a search."""
    return _read_options(folder).key


def tuned_ranges(folder: Path) -> Ranges:
    """The ranges of all variants of a search."""
    return _read_corrected(folder / CORRECTED)[0].ranges


def check_tuned(folder: Path, model: str, key: str) -> None:
    """Refuses a search of another model (SHA-256), or one with another key of the corrections."""
    search = _read_options(folder)
    if search.model != model:
        raise ConfigError(f"--from: '{folder}' is of another model; give the model that was tuned, or tune this model")
    if search.key != key:
        raise ConfigError(
            f"--from: '{folder}' was tuned with another configuration, other calibration images, another backend or "
            "another trtdet; give those, or run 'trtdet tune' again into another folder"
        )


def save_prepared(folder: Path, key: str, prepared: Prepared) -> None:
    """Writes histograms, ranges and corrections, to resume a search and to build its variants."""
    prepared.calibrated.collection.save(folder / HISTOGRAMS)
    maps, weights = prepared.corrections.tensors, prepared.corrections.weights
    meta = _Meta(
        schema=2,
        key=key,
        ranges=prepared.ranges,
        plain=prepared.calibrated.ranges,
        plan=dict(prepared.plan.entries),
        summary=prepared.summary,
        maps=tuple(_Map(name, float(map.amax), shift=float(map.shift), axis=map.axis) for name, map in maps.items()),
        weights=tuple(weights),
    )
    arrays: dict[str, NDArray[np.generic]] = {"meta": np.frombuffer(_adapter(_Meta).dump_json(meta), np.uint8)}
    for place, channels in enumerate(maps.values()):
        if channels.scale is not None:
            arrays[f"map{place}.scale"] = channels.scale
    for place, rounded in enumerate(weights.values()):
        arrays.update({f"weight{place}.{part}": getattr(rounded, part) for part in _WEIGHTS})
    stream = io.BytesIO()
    np.savez(stream, **arrays)  # type: ignore[arg-type]
    write_atomically(folder / CORRECTED, stream.getvalue())


def corrected_file(folder: Path, key: str) -> str:
    """The file of :func:`save_prepared` with this key, empty if there is none; its content is not checked."""
    there = (folder / CORRECTED).exists() and (folder / OPTIONS).exists() and tuned_key(folder) == key
    return str(folder / CORRECTED) if there else ""


def load_prepared(
    folder: Path, key: str, graph: PlacedGraph, options: BuildOptions, selected: Selection, progress: Progress = silent
) -> Prepared:
    """Reads the files of :func:`save_prepared`; ConfigError if they are missing, damaged, or have another key."""
    calibration = replace(options.calibration, histograms=folder / HISTOGRAMS)
    ranged = calibrated(graph, calibration, selected, progress=progress)
    meta, corrections = _read_corrected(folder / CORRECTED)
    if meta.key != key:
        raise ConfigError(
            f"'{folder / CORRECTED}' is of another model, other images or other options",
            "run 'trtdet tune' again into another folder",
        )
    ranged, plan = replace(ranged, ranges=meta.plain), PrecisionPlan(meta.plan)
    return Prepared(ranged, ranges=meta.ranges, corrections=corrections, plan=plan, summary=meta.summary)


def _read_corrected(path: Path) -> tuple[_Meta, Corrections]:
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as data:
            meta: _Meta = parse_document(data["meta"].tobytes(), _adapter(_Meta))
            maps = {
                each.tensor: ChannelMap(each.amax, data.get(f"map{place}.scale"), each.axis, shift=each.shift)
                for place, each in enumerate(meta.maps)
            }
            weights = {
                name: Rounded(*(data[f"weight{place}.{part}"] for part in _WEIGHTS))
                for place, name in enumerate(meta.weights)
            }
    except FileNotFoundError:
        raise ConfigError(f"'{path}' does not exist; run the same 'trtdet tune' again") from None
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        problem = one_line(error)
        raise ConfigError(f"'{path}' is damaged ({problem}); remove it and run the same 'trtdet tune' again") from None
    return meta, Corrections(maps, weights)
