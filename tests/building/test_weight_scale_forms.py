"""Each form of weight scales of a backend is built, and the engine with the least traffic is kept."""

from dataclasses import replace

import onnx
import pytest

import trtdet
from trtdet.audit import Audit
from trtdet.backends.libraries import library_named
from trtdet.backends.tensorrt.rtx import TensorRTRTX
from trtdet.bundle import Bundle
from trtdet.options import changed
from trtdet.quantization import DataFlow

pytest.importorskip("tensorrt_rtx")


@pytest.fixture
def built(tmp_path, tiny, monkeypatch):
    def built(*forms: str) -> tuple[Bundle, Audit]:
        caps = library_named("tensorrt-rtx").new_backend().capabilities
        flow = DataFlow(half=True, weights=forms, fused=False)
        changing = property(lambda self: replace(caps, data_flow=flow), lambda self, own: None)
        monkeypatch.setattr(TensorRTRTX, "capabilities", changing, raising=False)
        rtx = trtdet.BuildOptions(effort="none", backend="tensorrt-rtx", sms=(86,), guard="off")
        options = changed(rtx, mode="host", rule="minmax", images=tiny.images, int8_all=True)
        done = trtdet.build(tiny.model, trtdet.load_config(tiny.yaml), tmp_path / "-".join(forms), options)
        return done.bundle, done.audit

    return built


def products(bundle: Bundle) -> int:
    """How many products of a channel's ratio there are behind convolutions."""
    model = onnx.load(bundle.file("int8.onnx"))
    convs = {node.output[0] for node in model.graph.node if node.op_type == "Conv"}
    return sum(node.op_type == "Mul" and node.input[0] in convs for node in model.graph.node)


def test_the_form_that_moves_less_is_kept_and_named(built):
    channel, tensor, both = built("channel"), built("tensor"), built("channel", "tensor")
    least = min(channel[1].bytes, tensor[1].bytes)
    assert channel[1].bytes != tensor[1].bytes
    assert both[1].bytes == least
    kept = "channel" if channel[1].bytes == least else "tensor"
    assert both[0].manifest.quantization.weight_scales == kept
    assert products(channel[0]) == 0
    assert products(tensor[0]) == tensor[1].int8
