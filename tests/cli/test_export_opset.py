"""trtdet export --backend: the opset by who is to read the file, installed or not."""

import importlib.metadata
import json

import pytest

from trtdet.backends import choose, library_named
from trtdet.cli import main
from trtdet.errors import BackendError


@pytest.mark.parametrize(
    ("backend", "opset"),
    [("tensorrt:8.6", 17), ("tensorrt:9.3.0", 19), ("tensorrt:10", 20), ("tensorrt:11.5", 20), ("tensorrt-rtx", 20)],
)
def test_the_newest_opset_that_is_read_and_written(tmp_path, capfd, backend, opset):
    assert main(["export", "shapes", "-o", str(tmp_path / "m.onnx"), "--backend", backend, "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["opset"] == opset


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["shapes", "--backend", "tensort"], "no backend 'tensort'; allowed: auto, tensorrt, "),
        (["shapes", "--backend", "tensorrt:new"], "'new' is no version of TensorRT; give one such as tensorrt:10.15"),
        (["model.onnx", "--backend", "tensorrt-rtx"], "a model.onnx keeps its own; trtdet build rewrites it"),
    ],
)
def test_what_says_no_opset_is_refused(tmp_path, capfd, words, message):
    assert main(["export", *words, "-o", str(tmp_path / "m.onnx")]) == 1
    assert message in capfd.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_library_that_is_not_here_wants_its_version(monkeypatch):
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", version)
    with pytest.raises(BackendError, match="not installed, and its versions read different opsets"):
        library_named("tensorrt").newest_opset()
    assert library_named("onnxruntime").newest_opset() is None


def test_the_row_agrees_with_the_library_that_is_here():
    pytest.importorskip("tensorrt_rtx", reason="needs TensorRT-RTX: pip install 'trtdet[rtx]'")
    assert library_named("tensorrt-rtx").newest_opset() == choose("tensorrt-rtx").capabilities.max_opset
