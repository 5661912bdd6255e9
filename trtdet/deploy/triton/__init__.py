"""A model repository of Triton Inference Server.

Four models: ``NAME_preprocess`` (python backend) makes the network's input of image bytes or pixels, ``NAME_engine`` is
the engine, ``NAME_postprocess`` (python backend) suppresses where that was left to the host and maps boxes back to the
image, and ``NAME`` is the ensemble of the three that clients call.

Why an ensemble and not one python model that calls the engine (business logic scripting): images of different sizes
cannot be stacked, so a batch can only form after pre-processing. In an ensemble every step is scheduled by itself: each
request is pre-processed alone, whatever its size, and the engine's dynamic batcher sees the equal tensors of all
requests in flight. A python model that calls the engine waits inside its process, so that no more requests than it has
processes ever reach the batcher, and tensors pass through that process twice.

Triton's batcher needs an engine whose first dimension is open and starts at 1. Any other engine is served whole
(``max_batch_size`` 0): a request is filled up with zeros to what the engine takes, and requests do not share a batch.
The shapes that a client sees are the same both ways.

Sources: Triton's model_config.proto and docs/user_guide (model_configuration, ensemble_models, batcher,
custom_operations); the TensorRT backend's README, ``CompareDimsSupported`` and ``InitializeGraphSpecs``.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import onnx

from trtdet import __version__
from trtdet.backends.libraries import TritonBackend, library_named
from trtdet.bundle import MANIFEST, Bundle, Manifest
from trtdet.errors import BundleError, ConfigError

_MODELS = Path(__file__).resolve().parent
_TYPES = {"float32": "TYPE_FP32", "float16": "TYPE_FP16", "int32": "TYPE_INT32", "int64": "TYPE_INT64"}
_OUTPUTS = ("num_dets", "boxes", "scores", "classes")


@dataclass(frozen=True)
class TritonOptions:
    """How a repository serves.

    Attributes:
        input: what a client sends: ``encoded`` image files, one an element, or ``pixels``, uint8 RGB.
        queue_delay_us: how long a request waits for others to fill a batch, in microseconds.
        cpu_instances: processes for pre-processing, and as many for post-processing.
    """

    input: Literal["encoded", "pixels"] = "encoded"
    queue_delay_us: int = 500
    cpu_instances: int = 2

    def __post_init__(self) -> None:
        if self.queue_delay_us < 0 or self.cpu_instances < 1:
            raise ConfigError(
                f"a queue delay of {self.queue_delay_us} us and {self.cpu_instances} processes cannot be: the delay "
                "must be at least 0, and there must be at least 1 process"
            )


class _Word(str):
    """A value of an enumeration, which is written without quotes."""


class _Batch:
    """How many images the engine takes, and what a tensor's first dimension is called for."""

    def __init__(self, manifest: Manifest) -> None:
        shape = manifest.input.shape
        self.least, self.usual, self.most = shape.min[0], shape.opt[0], shape.max[0]
        self.shared = self.least == 1 < self.most
        """Triton's batcher can fill it from several requests."""
        self.limit = self.most if self.shared else 0
        """``max_batch_size``."""

    def engine(self, *dims: int) -> list[int]:
        """Dimensions of a tensor of the engine."""
        return list(dims) if self.shared else [self.most if self.least == self.most else -1, *dims]

    def client(self, *dims: int) -> list[int]:
        """Dimensions of a tensor with a row for each image of a request."""
        return list(dims) if self.shared else [-1, *dims]


def repository(bundle: Bundle, name: str, options: TritonOptions) -> tuple[dict[str, bytes], tuple[str, ...]]:
    """The files of a model repository by their path in it, and what a user has to know.

    Args:
        bundle: with an engine of TensorRT, or with a model alone, which Triton's onnxruntime backend then runs.
        name: of the ensemble; the other models are called after it.
        options: how it serves.

    Raises:
        BundleError: the bundle holds what Triton cannot serve.
    """
    manifest = bundle.manifest
    batch = _Batch(manifest)
    warnings = [*_batch_warnings(batch), *_threshold_warnings(manifest)]
    folder = f"{name}_engine"
    files: dict[str, bytes] = {}
    if bundle.engine is not None:
        files[f"{folder}/1/{_backend(manifest).file}"] = bundle.engine.read_bytes()
        for file in manifest.backend.loose_plugins:
            files[f"{folder}/{file}"] = bundle.file(file).read_bytes()
    else:
        warnings += _check_model(bundle)
        files[f"{folder}/1/{_backend(manifest).file}"] = bundle.model.read_bytes()
    files[f"{folder}/config.pbtxt"] = _message(_engine(manifest, name, batch, options, bundle.engine is not None))
    files[f"{name}/config.pbtxt"] = _message(_ensemble(manifest, name, batch, options))
    files[f"{name}/labels.txt"] = "".join(f"{label}\n" for label in manifest.model.classes).encode()
    # An ensemble has no files, but Triton looks for a version all the same.
    files[f"{name}/1/README.md"] = b"The ensemble's version; its steps are in ../config.pbtxt.\n"
    contract = (bundle.path / MANIFEST).read_bytes()
    for step, config in (("preprocess", _preprocess), ("postprocess", _postprocess)):
        files[f"{name}_{step}/config.pbtxt"] = _message(config(manifest, name, batch, options))
        files[f"{name}_{step}/1/model.py"] = (_MODELS / f"{step}.py").read_bytes()
        files[f"{name}_{step}/1/{MANIFEST}"] = contract
    files["README.md"] = _readme(bundle, name, batch, options, warnings).encode()
    return files, tuple(warnings)


def _batch_warnings(batch: _Batch) -> list[str]:
    if batch.shared:
        return []
    takes = f"{batch.most}" if batch.least == batch.most else f"{batch.least} to {batch.most}"
    return [
        f"the engine takes {takes} image{'s' if batch.most > 1 else ''} at once, so that requests do not share a "
        "batch; build it with --batch 1:8:16 and Triton fills batches from several requests"
    ]


def _threshold_warnings(manifest: Manifest) -> list[str]:
    """What COCO is scored with is not what a client wants to receive."""
    if manifest.nms.score_threshold >= 0.05:
        return []
    return [
        f"the score threshold is {manifest.nms.score_threshold:g}, as COCO is scored with; filter the scores in the "
        "client, or build with a higher --score-threshold"
    ]


def _check_model(bundle: Bundle) -> list[str]:
    model = onnx.load(str(bundle.model))
    foreign = sorted({node.domain for node in model.graph.node if node.domain not in ("", "ai.onnx")})
    plugins = sorted({node.op_type for node in model.graph.node if node.domain in foreign})
    if plugins:
        raise BundleError(
            f"bundle '{bundle.path}' has no engine, and Triton's onnxruntime has no operator {', '.join(plugins)}; "
            "build it with --backend tensorrt, or with --silu keep and --nms native"
        )
    opset = next(entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx"))
    return [
        f"the bundle has no engine: Triton's onnxruntime backend runs the model on the CPU; it has opset {opset}, "
        "which the server's ONNX Runtime must read"
    ]


def _tensor(name: str, kind: str, dims: Iterable[int]) -> dict[str, object]:
    return {"name": name, "data_type": _Word(kind), "dims": list(dims)}


def _type(dtype: str) -> str:
    if dtype not in _TYPES:
        raise BundleError(f"a tensor of type {dtype} cannot be served; allowed: {', '.join(_TYPES)}; build it again")
    return _TYPES[dtype]


def _backend(manifest: Manifest) -> TritonBackend:
    backend = library_named(manifest.backend.name).triton
    if backend is None:
        raise BundleError(f"Triton has no backend for a bundle of {manifest.backend.name}; build it with another one")
    return backend


def _image(batch: _Batch, options: TritonOptions) -> dict[str, object]:
    if options.input == "encoded":
        return _tensor("image", "TYPE_STRING", batch.client(1))
    return _tensor("image", "TYPE_UINT8", batch.client(-1, -1, 3))


def _network_input(manifest: Manifest, batch: _Batch, name: str) -> dict[str, object]:
    return _tensor(name, _type(manifest.input.dtype), batch.engine(*manifest.input.shape.max[1:]))


def _network_outputs(manifest: Manifest, batch: _Batch, prefix: str = "") -> list[dict[str, object]]:
    return [
        _tensor(
            prefix + part.name,
            _type(part.dtype),
            batch.engine(*(size if isinstance(size, int) else -1 for size in part.shape[1:])),
        )
        for part in manifest.outputs
    ]


def _found(manifest: Manifest, batch: _Batch) -> list[dict[str, object]]:
    """What a client receives."""
    room = _room(manifest)
    kinds = {"num_dets": ("TYPE_INT32", (1,)), "boxes": ("TYPE_FP32", (room, 4)), "scores": ("TYPE_FP32", (room,))}
    kinds["classes"] = ("TYPE_INT32", (room,))
    return [_tensor(name, kinds[name][0], batch.client(*kinds[name][1])) for name in _OUTPUTS]


def _room(manifest: Manifest) -> int:
    """K, for how many detections of an image there is room; -1 where the engine decides."""
    if manifest.nms.mode == "host":
        return manifest.nms.max_detections
    size = next(part.shape[1] for part in manifest.outputs if part.name == "scores")
    return size if isinstance(size, int) else -1


def _placement(batch: _Batch) -> dict[str, object]:
    return _tensor("placement", "TYPE_FP64", batch.client(6))


def _head(name: str, batch: _Batch, **kind: str) -> dict[str, object]:
    return {"name": name, **kind, "max_batch_size": batch.limit, "version_policy": {"latest": {"num_versions": 1}}}


def _engine(manifest: Manifest, name: str, batch: _Batch, options: TritonOptions, engine: bool) -> dict[str, object]:
    backend = _backend(manifest)
    config = _head(f"{name}_engine", batch, platform=backend.platform, backend=backend.backend)
    config["default_model_filename"] = backend.file
    if engine and not manifest.backend.hardware_compatible:
        config["cc_model_filenames"] = [
            {"key": f"{sm // 10}.{sm % 10}", "value": backend.file} for sm in manifest.backend.sms
        ]
    config["input"] = [_network_input(manifest, batch, manifest.input.name)]
    config["output"] = _network_outputs(manifest, batch)
    config["instance_group"] = [{"count": 1, "kind": _Word("KIND_GPU" if engine else "KIND_CPU")}]
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
        # Only what is always exact: fused into integer kernels, Q/DQ saturates at 16 bits on CPUs without VNNI.
        config["optimization"] = {"graph": {"level": -1}}
    zeros = {"data_type": _Word(_type(manifest.input.dtype)), "dims": _network_input(manifest, batch, "")["dims"]}
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


def _preprocess(manifest: Manifest, name: str, batch: _Batch, options: TritonOptions) -> dict[str, object]:
    return {
        **_head(f"{name}_preprocess", batch, backend="python"),
        "input": [_image(batch, options)],
        "output": [_network_input(manifest, batch, "network_input"), _placement(batch)],
        "instance_group": [{"count": options.cpu_instances, "kind": _Word("KIND_CPU")}],
    }


def _postprocess(manifest: Manifest, name: str, batch: _Batch, options: TritonOptions) -> dict[str, object]:
    return {
        **_head(f"{name}_postprocess", batch, backend="python"),
        "input": [*_network_outputs(manifest, batch, "network_"), _placement(batch)],
        "output": _found(manifest, batch),
        "instance_group": [{"count": options.cpu_instances, "kind": _Word("KIND_CPU")}],
    }


def _ensemble(manifest: Manifest, name: str, batch: _Batch, options: TritonOptions) -> dict[str, object]:
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


def _message(fields: Mapping[str, object]) -> bytes:
    """A protocol buffer message as text (https://protobuf.dev/reference/protobuf/textformat-spec/)."""
    return ("\n".join(_lines(fields)) + "\n").encode()


def _lines(fields: Mapping[str, object], indent: str = "") -> Iterable[str]:
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
                yield f"{indent}{key}: {_scalar(item)}"


def _scalar(value: object) -> str:
    if isinstance(value, _Word):
        return str(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    return json.dumps(value, ensure_ascii=False)


def _readme(bundle: Bundle, name: str, batch: _Batch, options: TritonOptions, warnings: list[str]) -> str:
    manifest = bundle.manifest
    many = f"1 to {batch.limit or batch.most}"
    shapes = {
        "encoded": f"`image` BYTES (n, 1): n image files (JPEG, PNG, ...) of any sizes, n from {many}",
        "pixels": f"`image` UINT8 (n, height, width, 3): n images of one size, RGB, n from {many}",
    }
    room = _room(manifest)
    known = "".join(f"- {warning}.\n" for warning in warnings) or "Nothing: what trtdet measured is what is served.\n"
    sent = {
        "encoded": 'images = np.array([[open("street.jpg", "rb").read()]], dtype=object)\n'
        'tensor = grpcclient.InferInput("image", images.shape, "BYTES")',
        "pixels": "images = np.zeros((1, 480, 640, 3), np.uint8)  # RGB\n"
        'tensor = grpcclient.InferInput("image", images.shape, "UINT8")',
    }
    return f"""# {name}: a model repository of Triton Inference Server

Made by trtdet {__version__}. Serve this folder; nothing in it has to be edited.

| model | what |
|---|---|
| `{name}` | what clients call: the ensemble of the other three |
| `{name}_preprocess` | image to network input, with trtdet's own code |
| `{name}_engine` | {_engine_line(bundle)} |
| `{name}_postprocess` | {_postprocess_line(manifest)} |

In: {shapes[options.input]}.
Out: `num_dets` INT32 (n, 1); `boxes` FP32 (n, {room}, 4), x1 y1 x2 y2 in pixels of the image that was sent; `scores`
FP32 (n, {room}); `classes` INT32 (n, {room}). Entries at or past `num_dets` are zero. Class names: `{name}/labels.txt`,
and the parameter `classes` of `GET /v2/models/{name}/config`.

## To know before

{known}
## What the server's image needs

The two python models import trtdet, and of it only what pre-processes and suppresses. On top of the image:

```text
pip install --no-deps trtdet=={__version__}
pip install numpy opencv-python-headless pillow pydantic pyyaml
```

Triton's releases up to 24.10 read image files through NumPy 1 only: `'numpy<2' 'opencv-python-headless<4.12'`. The
python backend takes the packages of the `python3` that is first on its `PATH`.

{_version_lines(bundle)}
## Start

```text
{_start(bundle, name)}
```

Triton is ready when `GET /v2/health/ready` answers 200; its metrics are at port 8002.
{_batch_line(batch, options)}

## Call it

```python
import numpy as np
import tritonclient.grpc as grpcclient  # pip install 'tritonclient[grpc]'

{sent[options.input]}
tensor.set_data_from_numpy(images)
found = grpcclient.InferenceServerClient("localhost:8001").infer("{name}", [tensor])
count = found.as_numpy("num_dets")[0, 0]
print(found.as_numpy("boxes")[0, :count], found.as_numpy("scores")[0, :count], found.as_numpy("classes")[0, :count])
```
"""


def _engine_line(bundle: Bundle) -> str:
    backend = bundle.manifest.backend
    if bundle.engine is None:
        return "the ONNX model, run by the onnxruntime backend"
    made = ", ".join(f"{sm // 10}.{sm % 10}" for sm in backend.sms)
    devices = "8.0 and later" if backend.hardware_compatible else made
    return f"the engine of TensorRT {backend.version}" + (f", for compute capability {devices}" if devices else "")


def _postprocess_line(manifest: Manifest) -> str:
    back = "boxes back to the image's pixels"
    return f"suppression with trtdet's own code, and {back}" if manifest.nms.mode == "host" else back


def _version_lines(bundle: Bundle) -> str:
    backend = bundle.manifest.backend
    if bundle.engine is None:
        return (
            "The onnxruntime backend comes with the server. Which ONNX Runtime a release has stands in Triton's "
            "compatibility matrix\n(docs/introduction/compatibility.md of triton-inference-server/server).\n"
        )
    which = "TensorRT " + backend.version + (" or a later one" if backend.version_compatible else " and no other")
    return f"""The server must have **{which}**: an engine of another version is refused when it is loaded. Which
release of Triton has it stands in NVIDIA's Deep Learning Frameworks Support Matrix, in the column TensorRT of Triton's
containers; a container itself says it with `dpkg -l | grep libnvinfer`. The usual order is the other way round: choose
the release, and build the bundle with its version of TensorRT. The GPU's compute capability must be one that the engine
was built for.
"""


def _start(bundle: Bundle, name: str) -> str:
    backend = bundle.manifest.backend
    flags = []
    if bundle.engine is not None:
        libraries = [f"/models/{name}_engine/{file}" for file in backend.loose_plugins]
        if libraries:
            flags.append("--backend-config=" + shlex.quote(f"tensorrt,plugins={';'.join(libraries)}"))
        # The same switch allows the host code that embedded plugins are.
        if backend.version_compatible or backend.carries_plugins:
            flags.append("--backend-config=tensorrt,version-compatible=true")
    device = "--gpus all " if bundle.engine is not None else ""
    return " \\\n    ".join(
        [
            f'docker run --rm {device}--shm-size 1g -p 8000:8000 -p 8001:8001 -p 8002:8002 -v "$PWD":/models:ro \\\n'
            "    <your image of Triton with trtdet> tritonserver --model-repository=/models",
            *flags,
        ]
    )


def _batch_line(batch: _Batch, options: TritonOptions) -> str:
    if not batch.shared:
        return f"A request is served by itself, filled up to {batch.least} images where it has fewer."
    return (
        f"A batch has up to {batch.most} images of one or several requests, which wait for others at most "
        f"{options.queue_delay_us} us\n(`dynamic_batching` in the engine's config.pbtxt)."
    )
