"""The README of a model repository."""

from __future__ import annotations

import shlex

from trtdet import __version__
from trtdet.bundle import Bundle
from trtdet.deploy.triton.model_configs import Batch, TritonOptions, detections_per_image, part_shapes

_SENT = {
    "encoded": 'images = np.array([[open("street.jpg", "rb").read()]], dtype=object)\n'
    'tensor = grpcclient.InferInput("image", images.shape, "BYTES")',
    "pixels": "images = np.zeros((1, 480, 640, 3), np.uint8)  # RGB\n"
    'tensor = grpcclient.InferInput("image", images.shape, "UINT8")',
}
"""Example code that makes the client's input."""


def readme(bundle: Bundle, name: str, options: TritonOptions, warnings: list[str]) -> str:
    """The README in Markdown; ``name`` is the ensemble's."""
    manifest, batch = bundle.manifest, Batch(bundle.manifest)
    shapes = {
        "encoded": "`image` BYTES (n, 1): n image files (JPEG, PNG, ...) of any sizes",
        "pixels": "`image` UINT8 (n, height, width, 3): n images of one size, RGB",
    }
    room = detections_per_image(manifest)
    post = "suppression with trtdet's own code, and " if manifest.nms.mode == "host" else ""
    sentences = "".join(f"- {warning}.\n" for warning in warnings) or (
        "Nothing: what trtdet measured is what is served.\n"
    )
    batching = f"A request is served by itself, filled up to {batch.least} images where it has fewer."
    if batch.shared:
        batching = (
            f"A batch has up to {batch.most} images of one or several requests, which wait for others at most "
            f"{options.queue_delay_us} us\n(`dynamic_batching` in the engine's config.pbtxt)."
        )
    return f"""# {name}: a model repository of Triton Inference Server

Made by trtdet {__version__}. Serve this folder; nothing in it has to be edited.

| model | what |
|---|---|
| `{name}` | what clients call: the ensemble of the other three |
| `{name}_preprocess` | image to network input, with trtdet's own code |
| `{name}_engine` | {_engine_line(bundle)} |
| `{name}_postprocess` | {post}boxes back to the image's pixels |

In: {shapes[options.input]}, n from 1 to {batch.most}.
Out: `num_dets` INT32 (n, 1); `boxes` FP32 (n, {room}, 4), x1 y1 x2 y2 in pixels of the image that was sent; `scores`
FP32 (n, {room}); `classes` INT32 (n, {room}). {_parts(bundle)}Entries at or past `num_dets` are zero.
Class names: `{name}/labels.txt`, and the parameter `classes` of `GET /v2/models/{name}/config`.

## To know before

{sentences}
{_image_section(bundle)}## Start

```text
{_start(bundle, name)}
```

Triton is ready when `GET /v2/health/ready` answers 200; its metrics are at port 8002.
{batching}

## Call it

```python
import numpy as np
import tritonclient.grpc as grpcclient  # pip install 'tritonclient[grpc]'

{_SENT[options.input]}
tensor.set_data_from_numpy(images)
found = grpcclient.InferenceServerClient("localhost:8001").infer("{name}", [tensor])
count = found.as_numpy("num_dets")[0, 0]
print(found.as_numpy("boxes")[0, :count], found.as_numpy("scores")[0, :count], found.as_numpy("classes")[0, :count])
```
"""


_PART_UNITS = {
    "keypoints": ", x y score, in pixels of the image",
    "rotated_boxes": ", centre, width and height in pixels of the image, angle in radians",
}


def _parts(bundle: Bundle) -> str:
    """A sentence about the outputs beside boxes, scores and classes; empty for plain boxes."""
    listed = [
        f"`{name}` FP32 ({', '.join(map(str, ('n', *sizes)))}){_PART_UNITS.get(name, '')}"
        for name, sizes in part_shapes(bundle.manifest).items()
    ]
    return f"\nBeside them {'; '.join(listed)}.\n" if listed else ""


def _engine_line(bundle: Bundle) -> str:
    backend = bundle.manifest.backend
    if bundle.engine is None:
        return "the ONNX model, run by the onnxruntime backend"
    capabilities = ", ".join(f"{sm // 10}.{sm % 10}" for sm in backend.sms)
    devices = "8.0 and later" if backend.hardware_compatible else capabilities
    return f"the engine of TensorRT {backend.version}" + (f", for compute capability {devices}" if devices else "")


def _image_section(bundle: Bundle) -> str:
    """Requirements of the server: Python packages, and the TensorRT version."""
    backend = bundle.manifest.backend
    if bundle.engine is None:
        text = (
            "The onnxruntime backend comes with the server. Triton's compatibility matrix lists the ONNX "
            "Runtime of each release\n(docs/introduction/compatibility.md of triton-inference-server/server).\n"
        )
    else:
        which = "TensorRT " + backend.version + (" or a later one" if backend.version_compatible else " and no other")
        text = f"""The server must have **{which}**: an engine of another version is refused when it is loaded. NVIDIA's
Deep Learning Frameworks Support Matrix lists the TensorRT of each release of Triton; in a container,
`dpkg -l | grep libnvinfer` prints it. The usual order is the other way round: choose the release, and build the bundle
with its version of TensorRT. The GPU's compute capability must be one that the engine was built for.
"""
    return f"""## What the server's image needs

The two python models import trtdet, but only its pre-processing and suppression. Add to the image:

```text
pip install --no-deps trtdet=={__version__}
pip install numpy opencv-python-headless pillow pydantic pyyaml
```

Triton's releases up to 24.10 read image files through NumPy 1 only: `'numpy<2' 'opencv-python-headless<4.12'`. The
python backend takes the packages of the `python3` that is first on its `PATH`.

{text}
"""


def _start(bundle: Bundle, name: str) -> str:
    backend = bundle.manifest.backend
    flags = []
    if bundle.engine is not None:
        libraries = [f"/models/{name}_engine/{file}" for file in backend.loose_plugins]
        if libraries:
            flags.append("--backend-config=" + shlex.quote(f"tensorrt,plugins={';'.join(libraries)}"))
        # The same flag allows embedded plugins, which are host code.
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
