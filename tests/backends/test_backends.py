"""Forms of SiLU, plugin libraries and suppression, by the capabilities of a backend."""

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest
from small_models import install_tensorrt

from trtdet.backends import Capabilities, cuda
from trtdet.building.graph import Suppression, silu_form, suppression
from trtdet.building.validation import plugin_parts
from trtdet.config import NmsConfig, load_config
from trtdet.errors import BackendError, ConfigError
from trtdet.passes import EmbeddedNms


@pytest.mark.parametrize(
    ("forms", "engine", "given", "asked", "expected"),
    [
        (("plugin", "keep"), True, False, "auto", "keep"),
        (("plugin", "keep"), True, True, "auto", "plugin"),
        (("keep", "plugin"), True, True, "auto", "keep"),
        (("swish", "keep", "plugin"), True, False, "auto", "swish"),
        (("keep", "swish", "plugin"), False, False, "plugin", "plugin"),
        (("swish", "keep", "plugin"), True, True, "plugin", "plugin"),
    ],
)
def test_auto_never_needs_a_library_that_was_not_given(forms, engine, given, asked, expected):
    caps = Capabilities("test", "1", engine, False, False, silu=forms, loads_plugins=True)
    assert silu_form(asked, (Path("a.so"),) if given else (), caps) == expected


@pytest.mark.parametrize(
    ("forms", "asked", "message"),
    [
        (("keep", "plugin"), "plugin", "needs the library.*engine.plugins=LIBRARY.*--silu keep"),
        (("keep", "swish"), "plugin", "test 1 cannot take --silu plugin: it ends; allowed: auto, keep, swish"),
        (("plugin", "keep"), "swish", "test 1 cannot take --silu swish; allowed: auto, plugin, keep"),
    ],
)
def test_a_form_that_a_backend_lacks_is_an_error_that_says_what_to_do(forms, asked, message):
    caps = Capabilities("test", "1", True, False, False, silu=forms, missing_ops={"TRT_SiLU": "it ends"})
    with pytest.raises(BackendError, match=message):
        silu_form(asked, (), caps)


@pytest.mark.parametrize("given", [True, False])
def test_a_kernel_that_the_driver_cannot_read_is_refused_before_anything_is_done(monkeypatch, given):
    """The PTX of a later CUDA than the driver's is error 222 when it is loaded, after all the calibration."""
    pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC is not installed: pip install 'trtdet[aot]'")
    monkeypatch.setattr(cuda, "driver_version", lambda: "12.8")
    caps = Capabilities("test", "1", True, False, silu=("keep", "plugin"), loads_plugins=True, compiles_plugins=True)
    assert silu_form("auto", (), caps) == "keep"
    if given:
        assert silu_form("plugin", (Path("a.so"),), caps) == "plugin"
        return
    said = "driver reads up to 12.8; update the driver, give .* or choose another --silu"
    with pytest.raises(BackendError, match=said):
        silu_form("plugin", (), caps)
    monkeypatch.setattr(cuda, "driver_version", lambda: "13.9")
    assert silu_form("plugin", (), caps) == "plugin"


def test_plugin_libraries_are_checked_before_anything_is_done(tmp_path):
    caps = Capabilities("test", "1", True, False, True, loads_plugins=True)
    (tmp_path / "other").mkdir()
    one, other = tmp_path / "a.so", tmp_path / "other" / "a.so"
    one.write_bytes(b"one")
    with pytest.raises(BackendError, match="plugin library '.*other/a.so' does not exist"):
        plugin_parts((one, other), caps)
    other.write_bytes(b"other")
    with pytest.raises(BackendError, match="the same file name"):
        plugin_parts((one, other), caps)
    (part,) = plugin_parts((one,), caps)
    assert (part.file, part.sha256) == ("a.so", hashlib.sha256(b"one").hexdigest())
    with pytest.raises(BackendError, match="test 1 loads no plugin libraries; leave engine.plugins out"):
        plugin_parts((one,), Capabilities("test", "1", True, False, True))


def boxes_with(**nms):
    return load_config("yolov8").with_nms(**nms)


@pytest.mark.parametrize("version", ["8.6.1", "10.9.0", "10.12.0", "11.1.0"])
def test_auto_takes_no_suppression_that_keeps_an_engine_from_being_a_cuda_graph(monkeypatch, version):
    caps = install_tensorrt(monkeypatch, version).capabilities
    assert suppression("auto", caps, None, boxes_with()) == Suppression("efficient")
    for mode in ("onnx", "native"):
        asked = suppression(mode, caps, None, boxes_with())
        assert asked.mode == mode
        assert asked.reason.startswith("the data decide")
        assert asked.reason.endswith("; --nms efficient or host lets the engine be launched as a CUDA graph")
    # A model's own suppression is kept, and what that costs is said.
    own = EmbeddedNms("nms", "onnx", {})
    assert suppression("auto", caps, own, boxes_with()) == suppression("onnx", caps, None, boxes_with())
    for mode in ("efficient", "host"):
        assert suppression(mode, caps, None, boxes_with()) == Suppression(mode)


def test_a_backend_with_native_suppression_alone_leaves_it_to_the_host_and_says_why():
    caps = Capabilities("test", "1", True, True, uncaptured_nms={"native": "it loops"})
    found = suppression("auto", caps, None, boxes_with())
    assert found.mode == "host"
    assert found.reason == "with --nms native the engine could not be launched as a CUDA graph (it loops)"
    assert suppression("auto", Capabilities("test", "1", True, True), None, boxes_with()) == Suppression("native")


def test_without_suppression_the_best_candidates_are_taken_in_the_graph():
    none, loops = boxes_with(iou_threshold=1.0), {"native": "it loops", "onnx": "the data decide"}
    modes = ("efficient", "onnx", "native")
    caps = Capabilities("test", "1", True, True, in_graph_nms=modes, uncaptured_nms=loops)
    assert suppression("auto", caps, None, none) == Suppression("native")
    assert suppression("auto", caps, None, boxes_with()) == Suppression("efficient")
    assert [suppression(mode, caps, None, none).reason for mode in (*modes, "host")] == [""] * 4
    assert [bool(caps.uncaptured(mode, NmsConfig())) for mode in (*modes, "host")] == [False, True, True, False]


def test_a_suppression_that_loses_masks_or_rotated_boxes_is_not_taken():
    caps = Capabilities("test", "1", True, True, in_graph_nms=("efficient", "onnx", "native"))
    masks, rotated = (boxes_with(), boxes_with())
    masks = masks.model_copy(update={"head": masks.head.model_copy(update={"masks": True})})
    rotated = rotated.model_copy(update={"head": rotated.head.model_copy(update={"rotated": True})})
    assert suppression("auto", caps, None, masks).mode == "onnx"
    slow = "with --nms native comparing rotated boxes could take longer than the network"
    assert suppression("auto", caps, None, rotated) == Suppression("host", slow)
    looping = replace(caps, uncaptured_nms={"native": "it loops"})
    assert suppression("auto", looping, None, rotated).reason.endswith("launched as a CUDA graph (it loops)")
    unsuppressed = rotated.model_copy(update={"nms": boxes_with(iou_threshold=1.0).nms})
    assert suppression("auto", caps, None, unsuppressed) == Suppression("native")
    assert [suppression(mode, caps, None, rotated).mode for mode in ("host", "native")] == ["host", "native"]
    with pytest.raises(ConfigError, match="--nms efficient does not say which boxes it kept"):
        suppression("efficient", caps, None, masks)
    with pytest.raises(ConfigError, match="--nms onnx compares upright boxes"):
        suppression("onnx", caps, None, rotated)


@pytest.mark.parametrize(("version", "heeds"), [("8.6.0", False), ("8.6.1", True), ("10.4.0", True)])
def test_a_suppression_that_would_ignore_a_key_is_not_taken(monkeypatch, version, heeds):
    caps = install_tensorrt(monkeypatch, version).capabilities
    assert suppression("auto", caps, None, boxes_with()) == suppression("efficient", caps, None, boxes_with())
    assert suppression("auto", caps, None, boxes_with()) == Suppression("efficient")
    if heeds:
        assert suppression("auto", caps, None, boxes_with(class_agnostic=True)) == Suppression("efficient")
        return
    left = suppression("auto", caps, None, boxes_with(class_agnostic=True))
    assert left.mode == "host"
    said = "with --nms onnx or native the engine could not be launched as a CUDA graph (the data"
    assert left.reason.startswith(said)
    with pytest.raises(BackendError, match="class_agnostic', which its EfficientNMS ignores; allowed: --nms onnx, nat"):
        suppression("efficient", caps, None, boxes_with(class_agnostic=True))
