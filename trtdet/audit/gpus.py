"""Published rates of GPUs, for time estimates of engines that cannot be run here.

Each row of the table holds four published figures, multiprocessors (SMs), boost clock, memory bandwidth and L2 cache;
the peak rates follow from SMs, clock and what the SM of an architecture computes in a clock. They agree with NVIDIA's
published peaks within 2 %, FP32 of H100 and H200 within 8 %. Tensor-core rates are dense; NVIDIA's pages often give the
double rate with sparsity. A Jetson is at its highest power mode; in a lower one it is slower.

Sources of the rows, by marks of the table:

- ``a``: product pages and data sheets, https://www.nvidia.com/en-us/data-center/ followed by tesla-t4, l4,
  products/a10-gpu, l40s, a100, a30, h100, h200; RTX A6000, RTX 6000 Ada, RTX PRO 6000: their data sheets.
- ``b``: NVIDIA, "Turing GPU Architecture", "Ampere GA102 GPU Architecture", "Ada GPU Architecture", "RTX Blackwell GPU
  Architecture" (appendix A of each), for the other cards of a generation the specifications of nvidia.com/geforce:
  https://images.nvidia.com/aem-dam/en-zz/Solutions/design-visualization/technologies/turing-architecture/
  NVIDIA-Turing-Architecture-Whitepaper.pdf; https://www.nvidia.com/content/PDF/
  nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf; https://images.nvidia.com/aem-dam/Solutions/geforce/ada/
  nvidia-ada-gpu-architecture.pdf and, beside it, blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf.
- ``l``: laptop cards, at the highest clock of nvidia.com/geforce/laptops; a laptop's own power limit may halve it.
- ``j``: NVIDIA, "Jetson Orin Modules" and "Jetson Thor" data sheets, "Jetson Orin Nano Super Developer Kit" (1020 MHz,
  102 GB/s); L2 caches as CUDA's deviceQuery reports them.
- Rates of an SM: the same papers; "A100 Tensor Core GPU Architecture" and "H100 Tensor Core GPU Architecture".

Figures were read in quotations of these pages and papers in public repositories, not in the originals.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

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


_TABLE = """
a 75 T4: 40 1.59 320 4
a 89 L4: 58 2.04 300 48
a 86 A10: 72 1.695 600 6
a 89 L40S: 142 2.52 864 96
a 80 A100: 108 1.41 2039 40
a 90 H200: 132 1.83 4800 50
a 80 A100 PCIe: 108 1.41 1935 40
a 80 A100 40GB: 108 1.41 1555 40
a 80 A30: 56 1.44 933 24
a 90 H100: 132 1.83 3350 50
a 90 H100 PCIe: 114 1.62 2000 50
a 86 RTX A6000: 84 1.8 768 6
a 89 RTX 6000 Ada: 142 2.505 960 96
a 120 RTX PRO 6000: 188 2.617 1792 128
b 75 TITAN RTX: 72 1.77 672 6
b 75 RTX 2060: 30 1.68 336 3
b 75 RTX 2060 Super: 34 1.65 448 4
b 75 RTX 2070: 36 1.62 448 4
b 75 RTX 2070 Super: 40 1.77 448 4
b 75 RTX 2080: 46 1.71 448 4
b 75 RTX 2080 Super: 48 1.815 496 4
b 75 RTX 2080 Ti: 68 1.545 616 5.5
b 86 RTX 3050: 20 1.777 224 2
b 86 RTX 3060: 28 1.777 360 3
b 86 RTX 3060 Ti: 38 1.665 448 4
b 86 RTX 3070: 46 1.725 448 4
b 86 RTX 3070 Ti: 48 1.77 608 4
b 86 RTX 3080: 68 1.71 760 5
b 86 RTX 3080 Ti: 80 1.665 912 6
b 86 RTX 3090: 82 1.695 936 6
b 86 RTX 3090 Ti: 84 1.86 1008 6
b 89 RTX 4060: 24 2.46 272 24
b 89 RTX 4060 Ti: 34 2.535 288 32
b 89 RTX 4070: 46 2.475 504 36
b 89 RTX 4070 Super: 56 2.475 504 48
b 89 RTX 4070 Ti: 60 2.61 504 48
b 89 RTX 4070 Ti Super: 66 2.61 672 48
b 89 RTX 4080: 76 2.505 717 64
b 89 RTX 4080 Super: 80 2.55 736 64
b 89 RTX 4090: 128 2.52 1008 72
b 120 RTX 5060: 30 2.497 448 32
b 120 RTX 5060 Ti: 36 2.572 448 32
b 120 RTX 5070: 48 2.512 672 48
b 120 RTX 5070 Ti: 70 2.452 896 48
b 120 RTX 5080: 84 2.617 960 64
b 120 RTX 5090: 170 2.407 1792 96
l 86 RTX 3060 Laptop: 30 1.703 336 3
l 86 RTX 3070 Laptop: 40 1.62 448 4
l 86 RTX 3080 Laptop: 48 1.71 448 4
l 89 RTX 4050 Laptop: 20 2.37 192 12
l 89 RTX 4060 Laptop: 24 2.37 256 32
l 89 RTX 4070 Laptop: 36 2.175 256 32
l 89 RTX 4080 Laptop: 58 2.28 432 48
l 89 RTX 4090 Laptop: 76 2.04 576 64
j 87 Jetson AGX Orin: 16 1.3 204.8 4
j 87 Jetson Orin NX: 8 0.918 102.4 2
j 87 Jetson Orin NX Super: 8 1.173 102.4 2
j 87 Jetson Orin Nano: 8 0.625 68 2
j 87 Jetson Orin Nano Super: 8 1.02 102 2
j 110 Jetson AGX Thor: 20 1.575 273 32
"""
"""Source, compute capability, name; multiprocessors, boost clock in GHz, bandwidth in GB/s, L2 cache in MB."""


def _row(line: str) -> Gpu:
    title, figures = line.split(": ")
    source, kind, name = title.split(" ", 2)
    sms, clock, bandwidth, l2 = map(float, figures.split())
    capability = int(kind)
    fp16 = sms * clock * _TENSOR[capability] / 1e3
    # GeForce cards halve the rate of tensor cores that accumulate in FP32, as TF32 does.
    share = 4 if source in "bl" else 2
    return Gpu(
        name=name,
        capability=capability,
        bandwidth=bandwidth,
        fp16=fp16,
        int8=2 * fp16,
        tf32=fp16 / share if capability >= 80 else None,
        fp32=2 * sms * clock * _LANES[capability] / 1e3,
        l2=int(l2 * (1 << 20)),
        sms=int(sms),
        sustained=POWER_LIMITED if capability in _JETSON or name in ("T4", "L4") else 1.0,
    )


GPUS: Mapping[str, Gpu] = {gpu.name: gpu for gpu in map(_row, _TABLE.strip().splitlines())}

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
