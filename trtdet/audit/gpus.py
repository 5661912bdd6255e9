"""Published rates of GPUs, for time estimates of engines that cannot be run here.

Each row of ``gpus.csv``, which names the sources, has four published figures: multiprocessors (SMs), boost clock,
memory bandwidth and L2 cache. Peak rates follow from SMs, clock and what the SM of an architecture computes in a clock.
They agree with NVIDIA's published peaks within 2 %, FP32 of H100 and H200 within 8 %. Tensor-core rates are dense;
NVIDIA's pages often give the double rate with sparsity. A Jetson is at its highest power mode.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trtdet.errors import ConfigError

_SPECIAL_LANES = 16
_JETSON = (87, 110)


_LANES: Mapping[int, int] = {75: 64, 80: 64, 86: 128, 87: 128, 89: 128, 90: 128, 110: 128, 120: 128}
"""Float32 lanes of a multiprocessor, by compute capability times ten."""

_TENSOR: Mapping[int, int] = {75: 1024, 80: 2048, 86: 1024, 87: 2048, 89: 1024, 90: 4096, 110: 8192, 120: 1024}
"""Dense FP16 operations of its tensor cores in a clock."""

POWER_LIMITED = 0.6
"""Share of its boost clock that a T4 (70 W) or a Jetson sustains, and of its bandwidth that a Jetson's GPU gets.
Fitted to 6 published times on T4 and 14 on Orin, see :mod:`trtdet.audit.roofline`; an L4 (72 W) and a Thor are taken
alike."""


@dataclass(frozen=True)
class Gpu:
    """Peak rates of a GPU; ``name`` is the value of ``trtdet audit --gpu``.

    Attributes:
        capability: compute capability times ten, such as 89.
        bandwidth: memory bandwidth, GB/s (10^9 bytes a second).
        fp16: dense FP16 tensor-core rate with FP16 accumulation, TFLOPS (a multiply-add is two operations).
        int8: dense INT8 tensor-core rate with INT32 accumulation, TOPS.
        tf32: dense TF32 tensor-core rate, TFLOPS, TensorRT's default for float32 convolutions; None without TF32.
        fp32: rate of the ordinary cores, TFLOPS.
        l2: size of the L2 cache in bytes.
        sms: number of multiprocessors.
        sustained: share of the boost clock that it keeps under load, 0 to 1.
    """

    name: str
    capability: int
    bandwidth: float
    fp16: float
    int8: float
    tf32: float | None
    fp32: float
    l2: int
    sms: int
    sustained: float = 1.0

    @property
    def special(self) -> int:
        """Time of an exponential, a reciprocal or a type conversion, in ordinary instructions.

        Source: NVIDIA, "CUDA C++ Programming Guide", table "Throughput of Native Arithmetic Instructions": 16 results
        per clock and multiprocessor, against 64 (7.5, 8.0) or 128 (8.6 and later) for a float32 multiply-add.
        """
        return _LANES[self.capability] // _SPECIAL_LANES

    @property
    def clock(self) -> float:
        """Boost clock, GHz."""
        return self.fp32 * 1e3 / (2 * _LANES[self.capability] * self.sms)

    @property
    def memory(self) -> float:
        """Share of ``bandwidth`` left to the GPU, 0 to 1: a Jetson's CPU uses the same memory."""
        return self.sustained if self.capability in _JETSON else 1.0


def _row(figures: Mapping[str, str]) -> Gpu:
    name, capability, sms = figures["name"], int(figures["capability"]), int(figures["multiprocessors"])
    clock = float(figures["boost_ghz"])
    fp16 = sms * clock * _TENSOR[capability] / 1e3
    # GeForce cards halve the rate of tensor cores that accumulate in FP32, as TF32 does.
    share = 4 if figures["source"] in "bl" else 2
    return Gpu(
        name=name,
        capability=capability,
        bandwidth=float(figures["bandwidth_gb_s"]),
        fp16=fp16,
        int8=2 * fp16,
        tf32=fp16 / share if capability >= 80 else None,
        fp32=2 * sms * clock * _LANES[capability] / 1e3,
        l2=int(float(figures["l2_mb"]) * (1 << 20)),
        sms=sms,
        sustained=POWER_LIMITED if capability in _JETSON or name in ("T4", "L4") else 1.0,
    )


_LINES = Path(__file__).with_name("gpus.csv").read_text().splitlines()
GPUS: Mapping[str, Gpu] = {
    gpu.name: gpu for gpu in map(_row, csv.DictReader(line for line in _LINES if not line.startswith("#")))
}

_NOISE = re.compile(
    r"nvidia|geforce|tesla|gpu|generation|blackwell|workstation|server|edition|sxm\d?|hbm\de?|80gb|16gb|8gb|developer|kit"
)
"""Words of a device name that tell no rate."""

_ALIASES: Mapping[str, str] = {"a100pcie40gb": "a10040gb", "orin": "jetsonagxorin", "thor": "jetsonagxthor"}


def gpu_named(name: str) -> Gpu:
    """The GPU of this name, also as CUDA reports it, such as ``NVIDIA GeForce RTX 3090`` or ``Tesla T4``.

    Case, spaces and hyphens do not count, and ``RTX``, ``Jetson`` or ``Jetson AGX`` may be left out. CUDA calls every
    Jetson Orin just ``Orin``: that is taken for an AGX. Raises ConfigError if the name is unknown; the message lists
    all names.
    """

    def plain(text: str) -> str:
        words = re.split(r"[\s_()/-]+", text.lower())
        return "".join(word for word in words if not _NOISE.fullmatch(word))

    rows = {plain(title): gpu for title, gpu in GPUS.items()}
    given = plain(name)
    given = _ALIASES.get(given, given)
    gpu = next(filter(None, (rows.get(prefix + given) for prefix in ("", "jetson", "jetsonagx", "rtx"))), None)
    if gpu is None:
        raise ConfigError(f"no figures are known of GPU '{name}'", f"known are {', '.join(GPUS)}")
    return gpu
