"""A model repository of Triton Inference Server.

It has four models. ``NAME_preprocess`` (python backend) makes the network's input from image files or pixels.
``NAME_engine`` is the engine. ``NAME_postprocess`` (python backend) runs NMS where the engine does not, and maps boxes,
keypoints and rotated boxes back to the image. ``NAME`` is the ensemble of the three, which clients call.

Why an ensemble, and not one python model that calls the engine (business logic scripting): images of different sizes
cannot be stacked, so batches form only after pre-processing. An ensemble schedules each step by itself: requests are
pre-processed one by one, and the engine's dynamic batcher sees the tensors of all requests in flight. A python model
would wait for the engine inside its process: the batcher would never see more requests than there are processes.

Triton's batcher needs an engine with a dynamic batch size from 1. Any other engine is served with ``max_batch_size`` 0:
each request is padded with zeros to the engine's batch, and requests do not share a batch. Clients see the same shapes
in both cases.

Sources: Triton's model_config.proto and docs/user_guide (model_configuration, ensemble_models, batcher,
custom_operations); the TensorRT backend's README, ``CompareDimsSupported`` and ``InitializeGraphSpecs``.
"""

from __future__ import annotations

from pathlib import Path

from trtdet.bundle import MANIFEST, Bundle
from trtdet.deploy.triton.model_configs import Batch, ModelConfigs, TritonOptions, triton_backend
from trtdet.deploy.triton.readme import readme
from trtdet.errors import BundleError
from trtdet.passes import load_model
from trtdet.passes.protobuf import opset_of

__all__ = ["TritonOptions", "repository"]

_MODELS = Path(__file__).resolve().parent


def repository(bundle: Bundle, name: str, options: TritonOptions) -> tuple[dict[str, bytes], tuple[str, ...]]:
    """The files of a model repository by path, and warnings for the user. ``name`` is the ensemble's.

    The bundle has a TensorRT engine, or only a model, which Triton's onnxruntime backend runs.

    Raises:
        BundleError: Triton cannot serve the bundle.
    """
    manifest = bundle.manifest
    warnings, folder = _warnings(bundle), f"{name}_engine"
    files = {f"{folder}/1/{triton_backend(manifest).file}": (bundle.engine or bundle.model).read_bytes()}
    for file in manifest.backend.loose_plugins:
        files[f"{folder}/{file}"] = bundle.file(file).read_bytes()
    for model, text in ModelConfigs(manifest, name, options).texts().items():
        files[f"{model}/config.pbtxt"] = text
    files[f"{name}/labels.txt"] = "".join(f"{label}\n" for label in manifest.model.classes).encode()
    # An ensemble has no files, but Triton requires a version folder.
    files[f"{name}/1/README.md"] = b"The ensemble's version; its steps are in ../config.pbtxt.\n"
    for step in ("preprocess", "postprocess"):
        files[f"{name}_{step}/1/model.py"] = (_MODELS / f"{step}.py").read_bytes()
        files[f"{name}_{step}/1/{MANIFEST}"] = (bundle.path / MANIFEST).read_bytes()
    files["README.md"] = readme(bundle, name, options, warnings=warnings).encode()
    return files, tuple(warnings)


def _warnings(bundle: Bundle) -> list[str]:
    """Differences of serving from trtdet, as sentences without full stops."""
    manifest, batch, warnings = bundle.manifest, Batch(bundle.manifest), []
    if manifest.masks is not None:
        warnings.append(
            "masks are left out: the answer has boxes, scores and classes alone; trtdet-serve and libtrtdet give the "
            "masks of this bundle"
        )
    if manifest.parts is not None and manifest.parts.masks is not None:
        warnings.append(
            "masks are given as coefficients and prototypes; the client pastes them, in Python with "
            "trtdet.detection.placing.place, or ask trtdet-serve, whose answers have run lengths"
        )
    if not batch.shared:
        takes = f"{batch.most}" if batch.least == batch.most else f"{batch.least} to {batch.most}"
        warnings.append(
            f"the engine takes {takes} image{'s' if batch.most > 1 else ''} at once, so that requests do not share a "
            "batch; Triton fills batches from several requests where a detector of one stage is built with "
            "--batch 1:8:16"
        )
    # The threshold for COCO mAP is far below what clients want.
    if manifest.nms.score_threshold < 0.05:
        warnings.append(
            f"the score threshold is {manifest.nms.score_threshold:g}, as COCO is scored with; filter the scores in "
            "the client, or build with a higher --score-threshold"
        )
    if bundle.engine is None:
        model = load_model(bundle.model, allow_quantized=True)
        plugins = sorted({node.op_type for node in model.graph.node if node.domain not in ("", "ai.onnx")})
        if plugins:
            raise BundleError(
                f"bundle '{bundle.path}' has no engine, and Triton's onnxruntime has no operator {', '.join(plugins)}",
                "build it with --backend tensorrt, or with --silu keep and --nms native",
            )
        warnings.append(
            "the bundle has no engine: Triton's onnxruntime backend runs the model on the CPU; it has opset "
            f"{opset_of(model)}, which the server's ONNX Runtime must read"
        )
    return warnings
