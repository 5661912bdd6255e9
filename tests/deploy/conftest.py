"""Bundles to be packaged."""

from pathlib import Path
from typing import Any

import pytest

from trtdet import build, load_config
from trtdet.bundle import BackendPart, BundleWriter, ShapePart
from trtdet.exporter import SHAPES_MODEL
from trtdet.options import BuildOptions, NmsOptions


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """A bundle for onnxruntime that leaves suppression to its reader."""
    options = BuildOptions(precision="fp32", nms=NmsOptions(mode="host"), backend="onnxruntime")
    return build(SHAPES_MODEL, load_config("shapes"), tmp_path_factory.mktemp("made") / "b", options).bundle


@pytest.fixture
def remade(made, tmp_path):
    """The bundle with an engine and other facts."""

    def make(batch: tuple[int, int, int] = (1, 1, 1), files: dict[str, bytes] | None = None, **changes: Any) -> Path:
        manifest = made.manifest
        fields = {name: getattr(manifest, name) for name in type(manifest).model_fields}
        shapes = {key: (size, 3, 256, 256) for key, size in zip(("min", "opt", "max"), batch, strict=True)}
        fields["input"] = manifest.input.model_copy(update={"shape": ShapePart(**shapes)})
        fields["backend"] = BackendPart(name="tensorrt", version="10.9.0", sms=(86, 89))
        given = {"model.engine": b"engine", "fp32.onnx": made.model.read_bytes(), **(files or {})}
        with BundleWriter(tmp_path / "bundle") as writer:
            for name, data in given.items():
                if data:
                    writer.add(name, data)
            kept = {key: value for key, value in {**fields, **changes}.items() if key not in ("created", "files")}
            return writer.commit(kept).path

    return make
