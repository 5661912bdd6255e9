"""TensorRT's calibration cache: the ranges of a network as text, for implicit quantisation up to TensorRT 10.

The first line is ``TRT-<NV_TENSORRT_VERSION>-<algorithm>``. Every other line is ``<tensor>: <scale>``: amax / 127, the
bits of a float32 in hexadecimal. Names may contain colons and spaces.

TensorRT uses a cache only if version and algorithm match its calibrator. Otherwise it calibrates again, on images that
may be missing. So both are checked first.

Sources: ``samples/opensource/sampleINT8/README.md`` of NVIDIA/TensorRT, release/7.0; algorithm names and messages of
libnvinfer 8.6.0; caches of TensorRT 10.9 and 10.13, for missing leading zeros and tensors of zeros.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Collection, Mapping

import numpy as np

from trtdet.errors import CalibrationError, one_line

OURS = "EntropyCalibration2"
"""Algorithm of the calibrator that reads trtdet's caches. It takes ranges before layer fusion, by the model's names
(NVIDIA, TensorRT 8.6 documentation, "Post-Training Quantization Using Calibration")."""

_HEADING = re.compile(r"TRT-(\d{1,9})-(\w+)")
_DIGITS = re.compile(r"[0-9a-fA-F]{1,8}")


def version_number(version: str) -> int:
    """``NV_TENSORRT_VERSION`` of a version: 8600 for ``8.6.0``, 100900 for ``10.9.0.34``.

    Up to TensorRT 9 it is ``major * 1000 + minor * 100 + patch``, from 10 on ``major * 10000 + minor * 100 + patch``
    (``NvInferRuntimeBase.h``). Raises CalibrationError if the text does not start with three numbers.
    """
    numbers = re.match(r"(\d{1,6})\.(\d{1,6})\.(\d{1,6})(?!\d)", version)
    if numbers is None:
        raise CalibrationError(f"'{version}' is no version of TensorRT; expected a version like 8.6.0")
    major, minor, patch = (int(part) for part in numbers.groups())
    return major * (10000 if major >= 10 else 1000) + minor * 100 + patch


def write(scales: Mapping[str, float], version: int) -> str:
    """The text of a cache of scales (amax / 127) by tensor name.

    ``version`` is that of the TensorRT that will read it, see :func:`version_number`. Raises CalibrationError if a
    scale is not a finite float32 over 0, or a name is empty or has a line break.
    """
    lines = [f"TRT-{version}-{OURS}"]
    for name, scale in scales.items():
        if not name or "\n" in name:
            raise CalibrationError(f"no cache holds a tensor named {name!r}: empty, or with a line break; rename it")
        with np.errstate(over="ignore", under="ignore"):
            rounded = np.array(scale, ">f4")
        if not 0 < rounded < math.inf:
            raise CalibrationError(f"the scale of tensor '{name}' is {scale}; it must be a float32 over 0 and finite")
        lines.append(f"{name}: {rounded.tobytes().hex()}")
    return "\n".join(lines) + "\n"


def read(
    text: str, where: str = "the calibration cache", *, version: int | None = None, skip_unusable: bool = False
) -> dict[str, float]:
    """The scales of a cache by tensor name, in its order.

    Args:
        where: name of the cache in error messages.
        version: of the TensorRT that will read it with a calibrator of ``OURS``; None for any.
        skip_unusable: skip tensors without a usable scale instead of refusing the cache. TensorRT writes 0 for a tensor
            of zeros and infinity for an overflow.

    Raises:
        CalibrationError: the text is no cache or has another version or algorithm; a line is malformed or a name
            repeated; a scale is not over 0 and finite.
    """
    heading, *lines = text.removesuffix("\n").split("\n")
    fields = _HEADING.fullmatch(heading)
    if fields is None:
        raise CalibrationError(
            f"{where} is no calibration cache of TensorRT: its first line is {one_line(repr(heading), 80)}, expected a "
            "line like 'TRT-8600-EntropyCalibration2'; make a cache with 'trtdet calibrate'"
        )
    for expected, actual, label in ((OURS, fields[2], "the algorithm"), (version, int(fields[1]), "TensorRT")):
        if version is not None and actual != expected:
            raise CalibrationError(
                f"{where} is of {label} {actual}, and {expected} is what will read it: TensorRT takes no other; "
                "calibrate again"
            )
    scales: dict[str, float] = {}
    for number, line in enumerate(lines, start=2):
        name, _, digits = line.rpartition(": ")  # a name may hold colons
        if not name or _DIGITS.fullmatch(digits) is None:
            raise CalibrationError(
                f"{where}, line {number} is {one_line(repr(line), 80)}, expected the name of a tensor, ': ' and up to "
                "8 hexadecimal digits; calibrate again"
            )
        if name in scales:
            raise CalibrationError(f"{where}, line {number}: tensor '{name}' stands there twice; calibrate again")
        scales[name] = struct.unpack(">f", bytes.fromhex(digits.zfill(8)))[0]
    usable = {name: scale for name, scale in scales.items() if 0 < scale < math.inf}
    if len(usable) < len(scales) and not skip_unusable:
        first = next(name for name in scales if name not in usable)
        raise CalibrationError(
            f"{where}: the scale of {len(scales) - len(usable)} of {len(scales)} tensors is not over 0 and finite, the "
            f"first is '{first}' with {scales[first]}; calibrate again"
        )
    return usable


def matched(
    scales: Mapping[str, float], network: Collection[str], needed: Collection[str], where: str = "the calibration cache"
) -> dict[str, float]:
    """The scales for a network, in the order of its tensors.

    TensorRT ignores scales of unknown tensors and runs layers without a scale in float, with a warning each. So the
    cache of another model would give an engine without INT8. ``network`` names all tensors of the network, ``needed``
    those that must have a scale; ``where`` is the name of the cache in error messages. Raises
    CalibrationError if a scale is of a tensor that the network lacks, or a needed tensor has none.
    """
    unknown = [name for name in scales if name not in network]
    missing = [name for name in needed if name not in scales]
    problems = []
    if missing:
        problems.append(
            f"{len(missing)} of the {len(needed)} tensors that need a range have none, first '{missing[0]}'"
        )
    if unknown:
        problems.append(f"{len(unknown)} of its {len(scales)} tensors are not in the network, first '{unknown[0]}'")
    if problems:
        raise CalibrationError(f"{where} is of another model: {'; '.join(problems)}; calibrate the model that is built")
    return {name: scales[name] for name in network if name in scales}
