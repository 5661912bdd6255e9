"""Published rates of GPUs, for time estimates of engines that cannot be run here.

Tensor-core rates are dense; NVIDIA's pages often give the double rate with sparsity, which trtdet does not use. They
are peaks at boost clock that no kernel reaches. A GPU with a lower power limit, such as a Jetson in a lower mode, is
slower.

Sources:

- T4: product page and data sheet (bandwidth 320 GB/s, FP16 65, INT8 130, FP32 8.1); L2 of 4 MB: tables of the TU104.
- L4, H200: product pages, halved where they say "with sparsity" (L4: FP16 242, INT8 485, TF32 120; H200: FP16 1979,
  INT8 3958, TF32 989). A10, L40S, A100 80 GB SXM: data sheets, which also give dense rates.
- RTX 3090, 4090, 5090: NVIDIA, "Ampere GA102 GPU Architecture", "Ada GPU Architecture", "RTX Blackwell GPU
  Architecture", appendix A of each. FP16 rates are with FP16 accumulation; FP32 accumulation halves them.
- Jetson AGX Orin 64 GB in its highest mode: technical brief (204.8 GB/s, 5.3 TFLOPS of FP32, 170 TOPS of sparse INT8
  on the GPU, so 85 dense). FP16 and TF32 are derived as half and a quarter of INT8, as on the A100 with the same cores.
- L2 caches: the architecture papers of the chips.
- Product pages: https://www.nvidia.com/en-us/data-center/ followed by tesla-t4, l4, products/a10-gpu, l40s, a100, h200.
- GeForce papers: https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf;
  https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf and, in its neighbour folder
  blackwell/, nvidia-rtx-blackwell-gpu-architecture.pdf.
- Jetson brief: https://www.nvidia.com/content/dam/en-zz/Solutions/gtcf21/jetson-orin/
  nvidia-jetson-agx-orin-technical-brief.pdf.

The figures were read in quotations of these pages and papers in public repositories, not in the originals.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trtdet.errors import ConfigError

_LANES: Mapping[int, int] = {75: 64, 80: 64, 86: 128, 87: 128, 89: 128, 90: 128, 120: 128}
_SPECIAL_LANES = 16


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
        """Time of an exponential, a reciprocal or a type conversion, in ordinary instructions.

        Source: NVIDIA, "CUDA C++ Programming Guide", table "Throughput of Native Arithmetic Instructions": 16 results
        per clock and multiprocessor, against 64 (7.5, 8.0) or 128 (8.6 and later) for a float32 multiply-add.
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


def gpu_named(name: str) -> Gpu:
    """The GPU of this name; case, spaces and hyphens do not count, and ``RTX`` or ``Jetson AGX`` may be left out.

    Raises:
        ConfigError: the name is unknown; the message lists all names.
    """

    def plain(text: str) -> str:
        return "".join(text.lower().split()).replace("-", "").replace("_", "")

    rows = {plain(title): gpu for title, gpu in GPUS.items()}
    names = (plain(prefix + name) for prefix in ("", "Jetson AGX", "RTX"))
    gpu = next(filter(None, map(rows.get, names)), None)
    if gpu is None:
        raise ConfigError(f"no figures are known of GPU '{name}'", f"known are {', '.join(GPUS)}")
    return gpu
