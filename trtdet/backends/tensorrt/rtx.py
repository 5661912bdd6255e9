"""TensorRT-RTX: builds engines ahead of time for consumer GPUs, on any machine, with or without a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trtdet.backends.base import BuildRequest, Built, Capabilities
from trtdet.backends.libraries import library_named
from trtdet.backends.tensorrt.builder import UNCAPTURED_NMS, build_engine
from trtdet.backends.tensorrt.opsets import NEVER
from trtdet.errors import BackendError
from trtdet.passes.nms import EFFICIENT
from trtdet.passes.plugin_ops import PLUGIN_ACTIVATIONS
from trtdet.progress import Progress, silent
from trtdet.quantization import DataFlow

LIBRARY = library_named("tensorrt-rtx")


class TensorRTRTX:
    """The installed TensorRT-RTX; raises BackendError, with the install command, if there is none."""

    def __init__(self) -> None:
        trt: Any = LIBRARY.load()
        # From 1.2 on; its release notes require the flag for capture.
        flags = tuple(name for name in ("REQUIRE_USER_ALLOCATION",) if hasattr(trt.BuilderFlag, name))
        self.capabilities = replace(capabilities_of(trt.__version__), capture_flags=flags)

    def build(self, request: BuildRequest, progress: Progress = silent) -> Built:
        caps = self.capabilities
        for sm in request.sms:
            if sm not in caps.sms:
                raise BackendError(
                    f"{LIBRARY.title} {caps.version} cannot build for compute capability {sm}; allowed: "
                    f"{', '.join(map(str, caps.sms))}"
                )
        built = build_engine(LIBRARY, caps, request, progress=progress, sms=request.sms or caps.default_sms)
        # An incomplete engine would otherwise fail only when it is loaded.
        if not built.engine.startswith(LIBRARY.magic) or LIBRARY.missing_bytes(built.engine):
            raise BackendError(
                f"{LIBRARY.title} {caps.version} gave an engine that is not whole",
                "free memory and build again",
                built.messages,
            )
        return built


def capabilities_of(version: str) -> Capabilities:
    """Capabilities of a version of TensorRT-RTX, which need not be installed; without its capture flags."""
    return Capabilities(
        name=LIBRARY.name,
        version=version,
        makes_engine=LIBRARY.makes_engine,
        lists_layers=True,
        # The builder ignores timing caches; its messages list the layers.
        sms=(75, 80, 86, 89, 120, 121),
        default_sms=(80, 86, 89, 120),
        sms_without_int8=(75,),
        uncaptured_nms={"native": UNCAPTURED_NMS["native"]},
        tf32=True,
        max_topk=3840,
        # INT8 convolutions never write INT8, and write float32 if they apply per-channel weight scales.
        data_flow=DataFlow(half=True, weights=("tensor",), fused=False),
        max_opset=LIBRARY.newest_opset(),
        fp8=True,
        missing_ops={
            **dict.fromkeys((*NEVER, "DeformConv"), "its parser does not know the operator"),
            "NonMaxSuppression": "it parses but has no implementation on any GPU",
            "NonZero": "its import fails",
            "RoiAlign": "its import needs a CUDA driver",
            **dict.fromkeys((*PLUGIN_ACTIVATIONS, EFFICIENT), "parsing an operator of a plugin ends its process"),
        },
    )
