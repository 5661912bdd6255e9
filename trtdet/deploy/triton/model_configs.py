"""The ``config.pbtxt`` of each of the four models, after Triton's model_config.proto."""

from __future__ import annotations

import json
from collections.abc import Iterable

from trtdet import __version__
from trtdet.backends.libraries import TritonBackend, library_named
from trtdet.bundle import Manifest
from trtdet.deploy.triton.options import Batch, TritonOptions
from trtdet.deploy.triton.pbtxt import Word
from trtdet.errors import BundleError

_TYPES = {"float32": "TYPE_FP32", "float16": "TYPE_FP16", "int32": "TYPE_INT32", "int64": "TYPE_INT64"}
_OUTPUTS = ("num_dets", "boxes", "scores", "classes")


def _tensor(name: str, kind: str, dims: Iterable[int]) -> dict[str, object]:
    return {"name": name, "data_type": Word(kind), "dims": list(dims)}


def data_type(dtype: str) -> str:
    if dtype not in _TYPES:
        raise BundleError(f"a tensor of type {dtype} cannot be served; allowed: {', '.join(_TYPES)}", "build it again")
    return _TYPES[dtype]


def triton_backend(manifest: Manifest) -> TritonBackend:
    """The backend of Triton that runs the bundle's engine or model.

    Raises:
        BundleError: there is none.
    """
    backend = library_named(manifest.backend.name).triton
    if backend is None:
        raise BundleError(
            f"Triton has no backend for a bundle of {manifest.backend.name}", "build it with another --backend"
        )
    return backend


def _image(batch: Batch, options: TritonOptions) -> dict[str, object]:
    if options.input == "encoded":
        return _tensor("image", "TYPE_STRING", batch.client(1))
    return _tensor("image", "TYPE_UINT8", batch.client(-1, -1, 3))


def _network_input(manifest: Manifest, batch: Batch, name: str) -> dict[str, object]:
    return _tensor(name, data_type(manifest.input.dtype), batch.engine(*manifest.input.shape.max[1:]))


def _network_outputs(manifest: Manifest, batch: Batch, prefix: str = "") -> list[dict[str, object]]:
    return [
        _tensor(
            prefix + part.name,
            data_type(part.dtype),
            batch.engine(*(size if isinstance(size, int) else -1 for size in part.shape[1:])),
        )
        for part in manifest.outputs
    ]


def _found(manifest: Manifest, batch: Batch) -> list[dict[str, object]]:
    """The client's outputs."""
    room = detections_per_image(manifest)
    kinds = {"num_dets": ("TYPE_INT32", (1,)), "boxes": ("TYPE_FP32", (room, 4)), "scores": ("TYPE_FP32", (room,))}
    kinds["classes"] = ("TYPE_INT32", (room,))
    return [_tensor(name, kinds[name][0], batch.client(*kinds[name][1])) for name in _OUTPUTS]


def detections_per_image(manifest: Manifest) -> int:
    """K, the rows of an image's detections; -1 where only the engine knows."""
    if manifest.nms.mode == "host":
        return manifest.nms.max_detections
    size = next(part.shape[1] for part in manifest.outputs if part.name == "scores")
    return size if isinstance(size, int) else -1


def _placement(batch: Batch) -> dict[str, object]:
    return _tensor("placement", "TYPE_FP64", batch.client(6))


def _head(name: str, batch: Batch, **kind: str) -> dict[str, object]:
    return {"name": name, **kind, "max_batch_size": batch.limit, "version_policy": {"latest": {"num_versions": 1}}}


def engine_config(manifest: Manifest, name: str, batch: Batch, options: TritonOptions) -> dict[str, object]:
    """The engine's, or the model's where there is no engine."""
    backend, engine = triton_backend(manifest), library_named(manifest.backend.name).makes_engine
    config = _head(f"{name}_engine", batch, platform=backend.platform, backend=backend.backend)
    config["default_model_filename"] = backend.file
    if engine and not manifest.backend.hardware_compatible:
        config["cc_model_filenames"] = [
            {"key": f"{sm // 10}.{sm % 10}", "value": backend.file} for sm in manifest.backend.sms
        ]
    config["input"] = [_network_input(manifest, batch, manifest.input.name)]
    config["output"] = _network_outputs(manifest, batch)
    config["instance_group"] = [{"count": 1, "kind": Word("KIND_GPU" if engine else "KIND_CPU")}]
    sizes = sorted({batch.usual, batch.most}) if batch.shared else [1]
    if batch.shared:
        config["dynamic_batching"] = {
            "preferred_batch_size": sizes,
            "max_queue_delay_microseconds": options.queue_delay_us,
        }
    # A loop over the suppressed boxes and outputs whose size the data decides cannot be captured.
    if engine and manifest.nms.mode in ("efficient", "host"):
        config["optimization"] = {"cuda": {"graphs": True}}
    if not engine and manifest.quantization.mode != "none":
        # Only exact optimisations: fused into integer kernels, Q/DQ saturates at 16 bits on CPUs without VNNI.
        config["optimization"] = {"graph": {"level": -1}}
    zeros = {"data_type": Word(data_type(manifest.input.dtype)), "dims": _network_input(manifest, batch, "")["dims"]}
    if not batch.shared:
        zeros["dims"] = [batch.most, *manifest.input.shape.max[1:]]
    config["model_warmup"] = [
        {
            "name": f"zeros_{size}",
            "batch_size": size,
            "inputs": [{"key": manifest.input.name, "value": {**zeros, "zero_data": True}}],
        }
        for size in sizes
    ]
    return config


def preprocess_config(manifest: Manifest, name: str, batch: Batch, options: TritonOptions) -> dict[str, object]:
    """The python model's that makes the network's input."""
    return {
        **_head(f"{name}_preprocess", batch, backend="python"),
        "input": [_image(batch, options)],
        "output": [_network_input(manifest, batch, "network_input"), _placement(batch)],
        "instance_group": [{"count": options.cpu_instances, "kind": Word("KIND_CPU")}],
    }


def postprocess_config(manifest: Manifest, name: str, batch: Batch, options: TritonOptions) -> dict[str, object]:
    """The python model's that suppresses and maps boxes back."""
    return {
        **_head(f"{name}_postprocess", batch, backend="python"),
        "input": [*_network_outputs(manifest, batch, "network_"), _placement(batch)],
        "output": _found(manifest, batch),
        "instance_group": [{"count": options.cpu_instances, "kind": Word("KIND_CPU")}],
    }


def ensemble_config(manifest: Manifest, name: str, batch: Batch, options: TritonOptions) -> dict[str, object]:
    """The ensemble's of the other three."""
    raw = {f"network_{part.name}": part.name for part in manifest.outputs}
    steps = (
        ("preprocess", {"image": "image"}, {"network_input": "network_input", "placement": "placement"}),
        ("engine", {manifest.input.name: "network_input"}, {part: tensor for tensor, part in raw.items()}),
        ("postprocess", {**{key: key for key in raw}, "placement": "placement"}, {key: key for key in _OUTPUTS}),
    )
    return {
        **_head(name, batch, platform="ensemble"),
        "input": [_image(batch, options)],
        "output": _found(manifest, batch),
        "parameters": [
            {"key": "classes", "value": {"string_value": json.dumps(manifest.model.classes, ensure_ascii=False)}},
            {"key": "trtdet", "value": {"string_value": __version__}},
        ],
        "ensemble_scheduling": {
            "step": [
                {
                    "model_name": f"{name}_{step}",
                    "model_version": -1,
                    "input_map": [{"key": key, "value": value} for key, value in taken.items()],
                    "output_map": [{"key": key, "value": value} for key, value in given.items()],
                }
                for step, taken, given in steps
            ]
        },
    }
