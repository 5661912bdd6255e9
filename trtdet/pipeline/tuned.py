"""The folder of a tune: the options, the corrected model and the plans that a point is built from by its number."""

from __future__ import annotations

import io
import zipfile
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from trtdet.calibration import Ranges
from trtdet.errors import ConfigError, one_line
from trtdet.files import write_atomically
from trtdet.files.documents import DocumentError, parse_document, read_document
from trtdet.pipeline.options import BuildOptions, KeepOptions
from trtdet.pipeline.stages.calibrating import HISTOGRAMS, Selection, calibrated
from trtdet.pipeline.stages.correcting import Prepared
from trtdet.pipeline.stages.rewriting import Graph
from trtdet.progress import Progress, silent
from trtdet.quantization import Corrections, Entry, PrecisionPlan
from trtdet.quantization.encoding import ChannelMap, Rounded

OPTIONS = "options.json"
CORRECTED = "corrected.npz"
RANKING_ROWS = "ranking.jsonl"
ROWS = "rows.jsonl"
PLANS = "plans"
FRONT = "front.json"
"""The files of the folder; ``plans`` is a folder of its own."""

_PARTS = ("scale", "shift")
_WEIGHTS = ("integers", "scales", "bias")


@dataclass(frozen=True)
class _File:
    """What ``options.json`` holds."""

    schema: Literal[1]
    model: str
    key: str
    options: BuildOptions


@dataclass(frozen=True)
class _Meta:
    """What ``corrected.npz`` holds beside arrays."""

    schema: Literal[1]
    key: str
    ranges: Ranges
    plain: Ranges
    plan: dict[str, Entry]
    summary: tuple[str, ...]
    maps: tuple[tuple[str, float], ...]
    weights: tuple[str, ...]


@cache
def _file_adapter() -> TypeAdapter[_File]:
    return TypeAdapter(_File)


@cache
def _meta_adapter() -> TypeAdapter[_Meta]:
    return TypeAdapter(_Meta)


def save_options(folder: Path, model: str, key: str, options: BuildOptions) -> None:
    """Writes ``options.json``: how every point is built.

    Args:
        folder: of the tune.
        model: SHA-256 of the float ONNX file.
        key: of the corrections, see :func:`trtdet.pipeline.fingerprint.stage_keys`.
        options: whose relative paths are made absolute, as a point may be built from elsewhere; given histograms are
            in the corrections.
    """
    calibration = options.calibration
    images, root = (None if path is None else path.absolute() for path in (calibration.images, calibration.root))
    plugins = tuple(path.absolute() for path in options.plugins)
    fixed = replace(
        options, calibration=replace(calibration, images=images, root=root, histograms=None), plugins=plugins
    )
    write_atomically(folder / OPTIONS, _file_adapter().dump_json(_File(1, model, key, fixed), indent=1) + b"\n")


def tuned_options(folder: Path, point: int) -> BuildOptions:
    """How a point of a front is built: the options of the tune, with the point's plan.

    Args:
        folder: of a finished tune.
        point: its number in ``front.json``.

    Raises:
        ConfigError: the folder is of no tune, or there is no such point.
    """
    plan = folder / PLANS / f"{point}.json"
    known = _read_options(folder)
    if not plan.is_file():
        numbers = sorted(int(path.stem) for path in (folder / PLANS).glob("*.json") if path.stem.isdigit())
        hint = f"its points are {numbers[0]} to {numbers[-1]}" if numbers else "finish it with the same 'trtdet tune'"
        raise ConfigError(f"--point {point}: '{folder}' has no such point; {hint}")
    return replace(known.options, keep=KeepOptions(plan), tuned=folder)


def tuned_key(folder: Path) -> str:
    """The key of the corrections that the folder keeps.

    Raises:
        ConfigError: the folder is of no tune.
    """
    return _read_options(folder).key


def tuned_ranges(folder: Path) -> Ranges:
    """The ranges that every point is built with.

    Raises:
        ConfigError: the corrections of the folder are missing or damaged.
    """
    return _read_corrected(folder / CORRECTED)[0].ranges


def check_tuned(folder: Path, model: str, key: str) -> None:
    """Refuses to build something else than what was tuned.

    Args:
        folder: of the tune.
        model: SHA-256 of the float ONNX file.
        key: of the corrections that the build would make.

    Raises:
        ConfigError: the model, the configuration, the images or the backend differ.
    """
    known = _read_options(folder)
    if known.model != model:
        raise ConfigError(f"--tuned: '{folder}' is of another model; give the model that was tuned, or tune this model")
    if known.key != key:
        raise ConfigError(
            f"--tuned: '{folder}' was tuned with another configuration, other calibration images, another backend or "
            "another trtdet; give those, or run 'trtdet tune' again into another folder"
        )


def save_prepared(folder: Path, key: str, prepared: Prepared) -> None:
    """Writes histograms, ranges and corrections, for a tune that goes on and for the builds of its points."""
    prepared.calibrated.collection.save(folder / HISTOGRAMS)
    maps, weights = prepared.corrections.tensors, prepared.corrections.weights
    meta = _Meta(
        1,
        key,
        prepared.ranges,
        prepared.calibrated.ranges,
        dict(prepared.plan.entries),
        prepared.summary,
        tuple((name, float(found.amax)) for name, found in maps.items()),
        tuple(weights),
    )
    arrays: dict[str, NDArray[np.generic]] = {"meta": np.frombuffer(_meta_adapter().dump_json(meta), np.uint8)}
    for place, channels in enumerate(maps.values()):
        known = {part: getattr(channels, part) for part in _PARTS}
        arrays.update({f"map{place}.{part}": values for part, values in known.items() if values is not None})
    for place, rounded in enumerate(weights.values()):
        arrays.update({f"weight{place}.{part}": getattr(rounded, part) for part in _WEIGHTS})
    stream = io.BytesIO()
    np.savez(stream, **arrays)  # type: ignore[arg-type]
    write_atomically(folder / CORRECTED, stream.getvalue())


def has_corrected(folder: Path, key: str) -> bool:
    """Whether the folder of a tune seems to hold what :func:`save_prepared` wrote for these corrections."""
    return (folder / CORRECTED).exists() and (folder / OPTIONS).exists() and tuned_key(folder) == key


def load_prepared(
    folder: Path, key: str, graph: Graph, options: BuildOptions, selected: Selection, progress: Progress = silent
) -> Prepared:
    """What :func:`save_prepared` wrote.

    Args:
        folder: of the tune.
        key: of the corrections that are wanted.
        graph: the rewritten model.
        options: of the build.
        selected: the calibration images.
        progress: told of images.

    Raises:
        ConfigError: it is missing, damaged, or of another key.
        CalibrationError: the histograms are.
    """
    calibration = replace(options.calibration, histograms=folder / HISTOGRAMS)
    ranged = calibrated(graph, calibration, selected, progress=progress)
    meta, corrections = _read_corrected(folder / CORRECTED)
    if meta.key != key:
        raise ConfigError(f"'{folder / CORRECTED}' is of another model, other images or other options")
    ranged = replace(ranged, ranges=meta.plain)
    return Prepared(ranged, meta.ranges, corrections, PrecisionPlan(meta.plan), meta.summary)


def _read_corrected(path: Path) -> tuple[_Meta, Corrections]:
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as data:
            meta = parse_document(data["meta"].tobytes(), _meta_adapter())
            maps = {
                name: ChannelMap(amax, *(data.get(f"map{place}.{part}") for part in _PARTS))
                for place, (name, amax) in enumerate(meta.maps)
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


def _read_options(folder: Path) -> _File:
    path = folder / OPTIONS
    try:
        return read_document(path, _file_adapter())
    except FileNotFoundError:
        raise ConfigError(f"--tuned: '{folder}' is not the folder of a 'trtdet tune'; give its -o") from None
    except (OSError, DocumentError) as error:
        raise ConfigError(f"--tuned: '{path}' cannot be used ({one_line(error)}); run 'trtdet tune' again") from None
