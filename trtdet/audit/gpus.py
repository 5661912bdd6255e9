"""The published rates of GPUs, for estimates of engines that cannot be run here.

All tensor-core rates are dense: NVIDIA's pages often give twice as much, with sparsity, which trtdet does not use. They
are peaks at boost clock that no kernel reaches; a GPU held to less power, as a Jetson in a lower mode, has less.
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
        fp16_fp32: the same with FP32 accumulation: half as much on GeForce, the same on all others.
        int8: dense INT8 tensor-core rate with INT32 accumulation, TOPS.
        tf32: dense TF32 tensor-core rate, TFLOPS, which TensorRT takes for float32 convolutions by default; None where
            the GPU has no TF32.
        fp32: rate of its ordinary cores, TFLOPS.
        l2: bytes of its L2 cache.
        source: where the vendor publishes these.
    """

    name: str
    capability: int
    bandwidth: float
    fp16: float
    fp16_fp32: float
    int8: float
    tf32: float | None
    fp32: float
    l2: int
    source: str

    @property
    def special(self) -> int:
        """How many ordinary instructions an exponential, a reciprocal or a change of type takes the time of.

        Source: NVIDIA, "CUDA C++ Programming Guide", table "Throughput of Native Arithmetic Instructions": 16 results a
        clock and multiprocessor, against 64 (7.5, 8.0) or 128 (8.6 and later) of a float32 multiply-add.
        """
        return _LANES[self.capability] // _SPECIAL_LANES


_MB = 1 << 20

GPUS: Mapping[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu("T4", 75, 320, 65, 65, 130, None, 8.1, 4 * _MB, "https://www.nvidia.com/en-us/data-center/tesla-t4/"),
        Gpu("L4", 89, 300, 121, 121, 242.5, 60, 30.3, 48 * _MB, "https://www.nvidia.com/en-us/data-center/l4/"),
        Gpu("A10", 86, 600, 125, 125, 250, 62.5, 31.2, 6 * _MB, "https://www.nvidia.com/en-us/data-center/products/a10-gpu/"),
        Gpu("L40S", 89, 864, 362.05, 362.05, 733, 183, 91.6, 96 * _MB, "https://www.nvidia.com/en-us/data-center/l40s/"),
        Gpu("A100", 80, 2039, 312, 312, 624, 156, 19.5, 40 * _MB, "https://www.nvidia.com/en-us/data-center/a100/"),
        Gpu("H200", 90, 4800, 989.5, 989.5, 1979, 494.5, 67, 50 * _MB, "https://www.nvidia.com/en-us/data-center/h200/"),
        Gpu("RTX 3090", 86, 936, 142, 71, 284, 35.6, 35.6, 6 * _MB, "https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf"),
        Gpu("RTX 4090", 89, 1008, 330.3, 165.2, 660.6, 82.6, 82.6, 72 * _MB, "https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf"),
        Gpu("RTX 5090", 120, 1792, 419, 209.5, 838, 104.8, 104.8, 96 * _MB, "https://images.nvidia.com/aem-dam/Solutions/geforce/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf"),
        Gpu("Jetson AGX Orin", 87, 204.8, 42.5, 42.5, 85, 21.3, 5.3, 4 * _MB, "https://www.nvidia.com/content/dam/en-zz/Solutions/gtcf21/jetson-orin/nvidia-jetson-agx-orin-technical-brief.pdf"),
    )
}  # fmt: skip
"""By name: GPUs that detectors are served on."""


def gpu_named(name: str) -> Gpu:
    """A row of ``GPUS``; case, spaces and hyphens do not count, and ``orin`` is the Jetson AGX Orin.

    Raises:
        ConfigError: the name is not known; the message lists all.
    """
    found = {_plain(known): gpu for known, gpu in GPUS.items()}
    gpu = found.get(_plain(name)) or found.get(_plain(f"Jetson AGX {name}")) or found.get(_plain(f"RTX {name}"))
    if gpu is None:
        raise ConfigError(f"no figures are known of GPU '{name}'", f"known are {', '.join(GPUS)}")
    return gpu


def _plain(name: str) -> str:
    return "".join(name.lower().split()).replace("-", "").replace("_", "")
