"""Choosing a backend, and the capabilities of each version."""

import ctypes

import pytest
from small_models import conv, install_tensorrt, net

from trtdet.backends import BuildRequest, choose, cuda
from trtdet.backends.base import Typing
from trtdet.backends.libraries import Library
from trtdet.backends.tensorrt.builder import TensorRT
from trtdet.backends.tensorrt.rtx import TensorRTRTX
from trtdet.errors import BackendError


def test_an_unknown_backend_lists_the_known_ones():
    with pytest.raises(BackendError, match="no backend 'openvino'; allowed: auto, tensorrt, tensorrt-rtx, onnxruntime"):
        choose("openvino")


def test_auto_prefers_tensorrt_with_a_gpu_then_rtx_and_never_onnxruntime(monkeypatch):
    here: set[str] = set()
    found: list[cuda.Device] = []
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if name in here else None)
    monkeypatch.setattr(cuda, "devices", lambda: tuple(found))
    loaded = type("library", (), {"__version__": "1.7.0", "BuilderFlag": None})
    monkeypatch.setattr(Library, "load", lambda library: loaded)
    with pytest.raises(BackendError, match="--backend onnxruntime"):
        choose("auto")
    here |= {"tensorrt", "tensorrt_rtx"}
    assert type(choose("auto")) is TensorRTRTX
    found.append(cuda.Device("a GPU", 86))
    assert type(choose("auto")) is TensorRT
    here.remove("tensorrt")
    assert type(choose("auto")) is TensorRTRTX
    here.clear()
    with pytest.raises(BackendError, match=r"pip install 'trtdet\[trt\]' or pip install 'trtdet\[rtx\]'"):
        choose("auto")


@pytest.mark.skipif(bool(cuda.devices()), reason="this machine has a CUDA device")
def test_tensorrt_without_a_device_points_to_what_needs_none(monkeypatch):
    library = type("library", (), {"__version__": "8.6.0"})
    monkeypatch.setattr(Library, "load", lambda row: library)
    with pytest.raises(BackendError, match="TensorRT 8.6.0 builds only on a machine with a CUDA device.*tensorrt-rtx"):
        choose("tensorrt")


@pytest.mark.parametrize(
    ("version", "explicit", "implicit", "number", "opset", "silu"),
    [
        ("8.6.0", Typing(("EXPLICIT_BATCH",), True), Typing(("EXPLICIT_BATCH",), True), 8600, 17, ("plugin", "keep")),
        ("10.4.0", Typing(("STRONGLY_TYPED",)), Typing(weak=True), 100400, 20, ("keep", "plugin")),
        ("10.16.1", Typing(("STRONGLY_TYPED",)), Typing(weak=True), 101601, 24, ("keep", "plugin")),
        ("11.0.0", Typing(), None, 0, 24, ("swish", "keep", "plugin")),
    ],
)
def test_capabilities_of_each_tensorrt(monkeypatch, version, explicit, implicit, number, opset, silu):
    caps = install_tensorrt(monkeypatch, version).capabilities
    assert (caps.explicit, caps.implicit, caps.cache_version) == (explicit, implicit, number)
    assert (caps.max_opset, caps.silu, caps.loads_plugins) == (opset, silu, True)
    swish = net("(float[1,3] x) => (float[1,3] y) { y = Swish(x) }")
    assert ("Swish" not in caps.unsupported(swish)) == ("swish" in silu)
    assert "ConvInteger" in caps.missing_ops
    # No wheel of any version has the library that regions want; TensorRT's archives and containers do.
    assert "libnvinfer_vc_plugin" in caps.missing_ops["RoiAlign"]
    opened: list[str] = []
    monkeypatch.setattr(ctypes, "CDLL", opened.append)
    assert "RoiAlign" not in choose("tensorrt").capabilities.missing_ops
    assert opened == [f"libnvinfer_vc_plugin.so.{version.partition('.')[0]}"]
    with pytest.raises(BackendError, match="compute capability 90, not 86; leave --sm out"):
        choose("tensorrt").build(BuildRequest(conv(), (86,)))
