"""The published rates of GPUs, for estimates of engines that cannot be run here.

All tensor-core rates are dense: NVIDIA's pages often give twice as much, with sparsity, which trtdet does not use. They
are peaks at boost clock that no kernel reaches; a GPU held to less power, such as a Jetson in a lower mode, has less.

Where each figure is published:

- T4: product page and data sheet (bandwidth 320 GB/s, FP16 65, INT8 130, FP32 8.1); L2 of 4 MB by the TU104's tables.
- L4, H200: product pages, halved where they say "with sparsity" (L4: FP16 242, INT8 485, TF32 120; H200: FP16 1979,
  INT8 3958, TF32 989). A10, L40S, A100 80 GB SXM: data sheets, which give the dense rates beside those with sparsity.
- RTX 3090: NVIDIA, "Ampere GA102 GPU Architecture", appendix A; RTX 4090: "Ada GPU Architecture", appendix A; RTX 5090:
  "RTX Blackwell GPU Architecture", appendix A. FP16 is with FP16 accumulation: with FP32 they have half of it.
- Jetson AGX Orin 64 GB in its highest mode: technical brief (204.8 GB/s, 5.3 TFLOPS of FP32, 170 TOPS of INT8 with
  sparsity on the GPU alone, hence 85 dense). FP16 and TF32 are derived: half and a quarter of INT8, as on the A100,
  whose tensor cores it has.
- L2 caches: the architecture papers of the chips.
- Product pages: https://www.nvidia.com/en-us/data-center/ followed by tesla-t4, l4, products/a10-gpu, l40s, a100, h200.
- GeForce papers: https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf;
  https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf and, in its neighbour folder
  blackwell/, nvidia-rtx-blackwell-gpu-architecture.pdf.
- Jetson brief: https://www.nvidia.com/content/dam/en-zz/Solutions/gtcf21/jetson-orin/
  nvidia-jetson-agx-orin-technical-brief.pdf.

Read for this table were quotations of these pages and papers in public repositories, not the vendor's pages themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trtdet.errors import ConfigError

_LANES: Mapping[int, int] = {75: 64, 80: 64, 86: 128, 87: 128, 89: 128, 90: 128, 120: 128}
_SPECIAL_LANES = 16


@dataclass(frozen=True)
class Gpu:
    """What a GPU can do at most.

    Attributes:
        name: as it is given to ``trtdet audit --gpu``.
        capability: compute capability times ten, such as 89.
        bandwidth: of its memory, GB/s (10^9 bytes a second).
        fp16: dense FP16 tensor-core rate with FP16 accumulation, TFLOPS (a multiply-add is two operations).
        int8: dense INT8 tensor-core rate with INT32 accumulation, TOPS.
        tf32: dense TF32 tensor-core rate, TFLOPS, which TensorRT takes for float32 convolutions by default; None where
            the GPU has no TF32.
        fp32: rate of its ordinary cores, TFLOPS.
        l2: bytes of its L2 cache.
    """

    name: str
    capability: int
    bandwidth: float
    fp16: float
    int8: float
    tf32: float | None
    fp32: float
    l2: int

    @property
    def special(self) -> int:
        """How many ordinary instructions an exponential, a reciprocal or a change of type takes the time of.

        Source: NVIDIA, "CUDA C++ Programming Guide", table "Throughput of Native Arithmetic Instructions": 16 results a
        clock and multiprocessor, against 64 (7.5, 8.0) or 128 (8.6 and later) of a float32 multiply-add.
        """
        return _LANES[self.capability] // _SPECIAL_LANES


_MB = 1 << 20

_ROWS = (
    # name, capability, bandwidth, FP16, INT8, TF32, FP32, L2
    ("T4", 75, 320, 65, 130, None, 8.1, 4 * _MB),
    ("L4", 89, 300, 121, 242.5, 60, 30.3, 48 * _MB),
    ("A10", 86, 600, 125, 250, 62.5, 31.2, 6 * _MB),
    ("L40S", 89, 864, 362.05, 733, 183, 91.6, 96 * _MB),
    ("A100", 80, 2039, 312, 624, 156, 19.5, 40 * _MB),
    ("H200", 90, 4800, 989.5, 1979, 494.5, 67, 50 * _MB),
    ("RTX 3090", 86, 936, 142, 284, 35.6, 35.6, 6 * _MB),
    ("RTX 4090", 89, 1008, 330.3, 660.6, 82.6, 82.6, 72 * _MB),
    ("RTX 5090", 120, 1792, 419, 838, 104.8, 104.8, 96 * _MB),
    ("Jetson AGX Orin", 87, 204.8, 42.5, 85, 21.25, 5.3, 4 * _MB),
)

GPUS: Mapping[str, Gpu] = {row[0]: Gpu(*row) for row in _ROWS}
"""By name: GPUs that detectors are served on."""


def gpu_named(name: str) -> Gpu:
    """A row of ``GPUS``; case, spaces and hyphens do not count, and ``orin`` is the Jetson AGX Orin.

    Raises:
        ConfigError: the name is not known; the message lists all.
    """

    def plain(text: str) -> str:
        return "".join(text.lower().split()).replace("-", "").replace("_", "")

    rows = {plain(title): gpu for title, gpu in GPUS.items()}
    names = (plain(prefix + name) for prefix in ("", "Jetson AGX", "RTX"))
    gpu = next(filter(None, map(rows.get, names)), None)
    if gpu is None:
        raise ConfigError(f"no figures are known of GPU '{name}'", f"known are {', '.join(GPUS)}")
    return gpu
