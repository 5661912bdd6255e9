"""The ``config.pbtxt`` of each of the four models, after Triton's model_config.proto."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from trtdet import __version__
from trtdet.backends.libraries import TritonBackend, library_named
from trtdet.bundle import Manifest
from trtdet.errors import BundleError, ConfigError

_TYPES = {"float32": "TYPE_FP32", "float16": "TYPE_FP16", "int32": "TYPE_INT32", "int64": "TYPE_INT64"}


@dataclass(frozen=True)
class TritonOptions:
    """Settings of a model repository.

    Attributes:
        input: of the client: ``encoded`` image files, one per element, or ``pixels``, uint8 RGB.
        queue_delay_us: longest wait for more requests in a batch, in microseconds.
        cpu_instances: number of processes for pre-processing, and for post-processing.
    """

    input: Literal["encoded", "pixels"] = "encoded"
    queue_delay_us: int = 500
    cpu_instances: int = 2

    def __post_init__(self) -> None:
        if self.queue_delay_us < 0 or self.cpu_instances < 1:
            raise ConfigError(
                f"got a queue delay of {self.queue_delay_us} us and {self.cpu_instances} processes; the delay must be "
                "at least 0, and the processes at least 1"
            )


class Batch:
    """The engine's batch sizes. ``shared``: Triton can fill a batch from several requests."""

    def __init__(self, manifest: Manifest) -> None:
        shape = manifest.input.shape
        self.least, self.usual, self.most = shape.min[0], shape.opt[0], shape.max[0]
        self.shared = self.least == 1 < self.most


class _Word(str):
    """An enumeration value, written without quotes."""


def triton_backend(manifest: Manifest) -> TritonBackend:
    """The Triton backend for the bundle's engine or model. Raises BundleError if there is none."""
    backend = library_named(manifest.backend.name).triton
    if backend is None:
        raise BundleError(
            f"Triton has no backend for a bundle of {manifest.backend.name}", "build it with another --backend"
        )
    return backend


def detections_per_image(manifest: Manifest) -> int:
    """K, the number of rows for an image's detections; -1 if it is dynamic."""
    if manifest.nms.mode == "host":
        return manifest.nms.max_detections
    size = next(part.shape[1] for part in manifest.outputs if part.name == "scores")
    return size if isinstance(size, int) else -1


def part_shapes(manifest: Manifest) -> dict[str, tuple[int, ...]]:
    """Shapes for an image of what the detector gives beside boxes, by the names of the engine's outputs; -1 is a
    dynamic size."""
    parts = manifest.parts
    if parts is None:
        return {}
    rows = [
        *([parts.masks.coefficients] if parts.masks is not None else []),
        *([parts.keypoints.output] if parts.keypoints is not None else []),
        *([parts.rotated_boxes.output] if parts.rotated_boxes is not None else []),
    ]
    sizes = {part.name: [size if isinstance(size, int) else -1 for size in part.shape] for part in manifest.outputs}
    shapes = {name: (detections_per_image(manifest), *sizes[name][2:]) for name in rows}
    if parts.masks is not None:
        shapes[parts.masks.prototypes] = tuple(sizes[parts.masks.prototypes][1:])
    return shapes


class ModelConfigs:
    """The configurations of a bundle's four models; ``name`` is the ensemble's. Raises BundleError: Triton has no
    backend for the bundle, or a tensor has a type that cannot be served."""

    def __init__(self, manifest: Manifest, name: str, options: TritonOptions) -> None:
        self._manifest, self._name, self._options = manifest, name, options
        self._batch = Batch(manifest)
        part, room = manifest.input, detections_per_image(manifest)
        self._input = self._of_engine(part.name, part.dtype, part.shape.max[1:])
        encoded = options.input == "encoded"
        self._image = self._of_client("image", *(("STRING", 1) if encoded else ("UINT8", -1, -1, 3)))
        self._placement = self._of_client("placement", "FP64", 6)
        self._detections = [
            self._of_client("num_dets", "INT32", 1),
            self._of_client("boxes", "FP32", room, 4),
            self._of_client("scores", "FP32", room),
            self._of_client("classes", "INT32", room),
            *(self._of_client(name, "FP32", *sizes) for name, sizes in part_shapes(manifest).items()),
        ]

    def texts(self) -> dict[str, bytes]:
        """The ``config.pbtxt`` of each model by the model's name."""
        configs: dict[str, dict[str, Any]] = {
            f"{self._name}_engine": self._engine(),
            self._name: self._ensemble(),
            f"{self._name}_preprocess": {
                "backend": "python",
                "input": [self._image],
                "output": [self._input | {"name": "network_input"}, self._placement],
            },
            f"{self._name}_postprocess": {
                "backend": "python",
                "input": [*self._network_outputs("network_"), self._placement],
                "output": self._detections,
            },
        }
        limit = self._batch.most if self._batch.shared else 0
        for name, config in configs.items():
            kind: dict[str, Any] = {key: config[key] for key in ("platform", "backend") if key in config}
            versions = {"max_batch_size": limit, "version_policy": {"latest": {"num_versions": 1}}}
            if config.get("backend") == "python":
                config["instance_group"] = [{"count": self._options.cpu_instances, "kind": _Word("KIND_CPU")}]
            configs[name] = {"name": name, **kind, **versions, **config}
        return {name: ("\n".join(_lines(config)) + "\n").encode() for name, config in configs.items()}

    def _of_client(self, name: str, kind: str, *dims: int) -> dict[str, Any]:
        """A tensor with one row per image of a request."""
        return {
            "name": name,
            "data_type": _Word(f"TYPE_{kind}"),
            "dims": list(dims) if self._batch.shared else [-1, *dims],
        }

    def _of_engine(self, name: str, dtype: str, dims: Iterable[int]) -> dict[str, Any]:
        if dtype not in _TYPES:
            raise BundleError(
                f"a tensor of type {dtype} cannot be served; allowed: {', '.join(_TYPES)}", "build it again"
            )
        batch = self._batch
        rows = [] if batch.shared else [batch.most if batch.least == batch.most else -1]
        return {"name": name, "data_type": _Word(_TYPES[dtype]), "dims": [*rows, *dims]}

    def _network_outputs(self, prefix: str = "") -> list[dict[str, Any]]:
        return [
            self._of_engine(prefix + part.name, part.dtype, (n if isinstance(n, int) else -1 for n in part.shape[1:]))
            for part in self._manifest.outputs
        ]

    def _engine(self) -> dict[str, Any]:
        """The configuration of the engine, or of the model in a bundle without one."""
        manifest, batch, options = self._manifest, self._batch, self._options
        backend, engine = triton_backend(manifest), library_named(manifest.backend.name).makes_engine
        config: dict[str, Any] = {"platform": backend.platform, "backend": backend.backend}
        config["default_model_filename"] = backend.file
        if engine and not manifest.backend.hardware_compatible:
            config["cc_model_filenames"] = [
                {"key": f"{sm // 10}.{sm % 10}", "value": backend.file} for sm in manifest.backend.sms
            ]
        config["input"] = [self._input]
        config["output"] = self._network_outputs()
        config["instance_group"] = [{"count": 1, "kind": _Word("KIND_GPU" if engine else "KIND_CPU")}]
        sizes = sorted({batch.usual, batch.most}) if batch.shared else [1]
        if batch.shared:
            delay = {"max_queue_delay_microseconds": options.queue_delay_us}
            config["dynamic_batching"] = {"preferred_batch_size": sizes, **delay}
        # A CUDA graph cannot capture NMS as a loop in the graph, nor outputs of data-dependent size.
        if engine and manifest.nms.mode in ("efficient", "host"):
            config["optimization"] = {"cuda": {"graphs": True}}
        if not engine and manifest.quantization.mode != "none":
            # Level -1: exact optimisations only. Fused integer kernels saturate at 16 bits on CPUs without VNNI.
            config["optimization"] = {"graph": {"level": -1}}
        dims = [*([] if batch.shared else [batch.most]), *manifest.input.shape.max[1:]]
        zeros = {"data_type": self._input["data_type"], "dims": dims, "zero_data": True}
        inputs = [{"key": manifest.input.name, "value": zeros}]
        config["model_warmup"] = [{"name": f"zeros_{size}", "batch_size": size, "inputs": inputs} for size in sizes]
        return config

    def _ensemble(self) -> dict[str, Any]:
        """The configuration of the ensemble."""
        manifest = self._manifest
        raw = {f"network_{part.name}": part.name for part in manifest.outputs}
        outputs = [tensor["name"] for tensor in self._detections]
        steps = (
            ("preprocess", {"image": "image"}, {"network_input": "network_input", "placement": "placement"}),
            ("engine", {manifest.input.name: "network_input"}, {part: tensor for tensor, part in raw.items()}),
            ("postprocess", {**{key: key for key in raw}, "placement": "placement"}, {key: key for key in outputs}),
        )
        labels = json.dumps(manifest.model.classes, ensure_ascii=False)
        return {
            "platform": "ensemble",
            "input": [self._image],
            "output": self._detections,
            "parameters": [
                {"key": key, "value": {"string_value": text}}
                for key, text in (("classes", labels), ("trtdet", __version__))
            ],
            "ensemble_scheduling": {
                "step": [
                    {
                        "model_name": f"{self._name}_{step}",
                        "model_version": -1,
                        "input_map": [{"key": key, "value": value} for key, value in inputs.items()],
                        "output_map": [{"key": key, "value": value} for key, value in outputs.items()],
                    }
                    for step, inputs, outputs in steps
                ]
            },
        }


def _lines(fields: Mapping[str, object], indent: str = "") -> Iterable[str]:
    """A protocol buffer message in text format (https://protobuf.dev/reference/protobuf/textformat-spec/)."""
    for key, value in fields.items():
        if isinstance(value, list) and all(isinstance(item, int) for item in value):
            yield f"{indent}{key}: [ {', '.join(map(str, value))} ]"
            continue
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, Mapping):
                yield f"{indent}{key} {{"
                yield from _lines(item, indent + "  ")
                yield f"{indent}}}"
            else:
                # Strings, numbers and booleans have the same syntax in JSON.
                yield f"{indent}{key}: {item if isinstance(item, _Word) else json.dumps(item, ensure_ascii=False)}"
