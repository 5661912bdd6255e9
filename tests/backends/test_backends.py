"""Choosing a backend, building in a process of its own, and what is said when that goes wrong."""

from __future__ import annotations

import hashlib
import importlib.util
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import onnx.parser
import pytest

from trtdet.backends import BACKENDS, BuildRequest, OnnxRunner, choose, cuda, tensorrt, tensorrt_rtx
from trtdet.config import load_config
from trtdet.errors import BackendError
from trtdet.passes import Options, load_model, rewrite
from trtdet.zoo import SHAPES_MODEL

needs_rtx = pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx") is None, reason="TensorRT-RTX is not installed: pip install 'trtdet[rtx]'"
)


def net(text: str, **weights: np.ndarray) -> onnx.ModelProto:
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 13]>\nnet {text}')
    for name, value in weights.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    return model


def conv() -> onnx.ModelProto:
    weight = np.random.default_rng(0).normal(size=(8, 3, 3, 3)).astype(np.float32)
    return net("(float[1,3,16,16] x) => (float[1,8,14,14] y) { y = Conv(x, w) }", w=weight)


# choosing


def test_an_unknown_backend_lists_the_known_ones() -> None:
    with pytest.raises(BackendError, match="no backend 'openvino'; allowed: auto, tensorrt, tensorrt-rtx, onnxruntime"):
        choose("openvino")


def test_auto_prefers_tensorrt_with_a_gpu_then_rtx_and_never_onnxruntime(monkeypatch: pytest.MonkeyPatch) -> None:
    here: set[str] = set()
    found: list[cuda.Device] = []
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if name in here else None)
    monkeypatch.setattr(cuda, "devices", lambda: tuple(found))
    monkeypatch.setattr(tensorrt, "import_or_explain", lambda module, title, pip: None)
    monkeypatch.setattr(tensorrt_rtx, "import_or_explain", lambda module, title, pip: None)
    with pytest.raises(BackendError, match="--backend onnxruntime"):
        choose("auto")
    here |= {"tensorrt", "tensorrt_rtx"}
    assert type(choose("auto")) is BACKENDS["tensorrt-rtx"]
    found.append(cuda.Device("a GPU", 86))
    assert type(choose("auto")) is BACKENDS["tensorrt"]
    here.remove("tensorrt")
    assert type(choose("auto")) is BACKENDS["tensorrt-rtx"]
    here.clear()
    with pytest.raises(BackendError, match=r"pip install 'trtdet\[trt\]' or pip install 'trtdet\[rtx\]'"):
        choose("auto")


@pytest.mark.skipif(bool(cuda.devices()), reason="this machine has a CUDA device")
def test_tensorrt_without_a_device_points_to_what_needs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    library = type("library", (), {"__version__": "8.6.0"})
    monkeypatch.setattr(tensorrt, "import_or_explain", lambda module, title, pip: library)
    with pytest.raises(BackendError, match="TensorRT 8.6.0 builds only on a machine with a CUDA device.*tensorrt-rtx"):
        choose("tensorrt")


@pytest.mark.parametrize(
    ("version", "network", "precision"),
    [
        ("8.6.0", ("EXPLICIT_BATCH",), ("INT8", "FP16")),
        ("10.4.0", ("STRONGLY_TYPED",), ()),
        ("11.0.0", (), ()),
    ],
)
def test_capabilities_of_each_tensorrt(
    monkeypatch: pytest.MonkeyPatch, version: str, network: tuple[str, ...], precision: tuple[str, ...]
) -> None:
    library = type("library", (), {"__version__": version})
    monkeypatch.setattr(tensorrt, "import_or_explain", lambda module, title, pip: library)
    monkeypatch.setattr(cuda, "devices", lambda: (cuda.Device("a GPU", 90),))
    caps = choose("tensorrt").capabilities
    assert (caps.network_flags, caps.precision_flags) == (network, precision)
    assert caps.layer_precisions == (version == "8.6.0")
    with pytest.raises(BackendError, match="compute capability 90, not 86; leave --sm out"):
        choose("tensorrt").build(BuildRequest(conv(), (86,)))


# onnxruntime


def test_a_small_batch_is_filled_up_and_cut_back() -> None:
    runner = OnnxRunner(net("(float[4,3,2,2] x) => (float[4,3,2,2] y) { y = Neg(x) }"))
    assert (runner.input, runner.batch, runner.outputs) == ("x", 4, ("y",))
    images = np.random.default_rng(0).normal(size=(3, 3, 2, 2)).astype(np.float32)
    np.testing.assert_array_equal(runner(images)["y"], -images)


def test_a_model_that_onnxruntime_refuses_is_one_line() -> None:
    with pytest.raises(BackendError, match=r"^onnxruntime [\d.]+ cannot load the model: .*") as caught:
        OnnxRunner(b"not a model")
    assert "\n" not in str(caught.value)


# TensorRT-RTX


@needs_rtx
@pytest.mark.tensorrt
def test_an_engine_with_a_loop_has_the_same_bytes_every_time() -> None:
    config = load_config("shapes").with_nms(pre_nms_topk=300, max_detections=20)
    model = rewrite(load_model(SHAPES_MODEL), Options(config, "native")).model
    assert "Loop" in [node.op_type for node in model.graph.node]
    backend = choose("tensorrt-rtx")
    built = [hashlib.sha256(backend.build(BuildRequest(model, (86,))).engine).hexdigest() for _ in range(2)]
    assert built[0] == built[1]


@needs_rtx
@pytest.mark.tensorrt
def test_an_engine_names_its_targets_in_its_header() -> None:
    backend = choose("tensorrt-rtx")
    one, several = (backend.build(BuildRequest(conv(), sms)) for sms in ((86,), (80, 89)))
    assert (one.sms, several.sms) == ((86,), (80, 89))
    masks = [int.from_bytes(built.engine[32:36], "little") for built in (one, several)]
    assert masks[0].bit_count() == 1
    assert masks[1].bit_count() == 2
    assert backend.build(BuildRequest(conv())).sms == backend.capabilities.default_sms


@needs_rtx
@pytest.mark.tensorrt
def test_a_target_it_cannot_build_for_is_named() -> None:
    with pytest.raises(
        BackendError, match=r"cannot build for compute capability 90; allowed: 75, 80, 86, 89, 120, 121"
    ):
        choose("tensorrt-rtx").build(BuildRequest(conv(), (86, 90)))


@needs_rtx
@pytest.mark.tensorrt
def test_the_parsers_own_words_are_in_the_error() -> None:
    model = net("(float[1,3,16,16] x) => (float[1,3,16,16] y) { y = example.Nothing(x) }")
    model.opset_import.append(onnx.helper.make_opsetid("example", 1))
    with pytest.raises(BackendError, match="the parser refused the model.*Nothing"):
        choose("tensorrt-rtx").build(BuildRequest(model, (86,)))


@needs_rtx
@pytest.mark.tensorrt
def test_topk_over_the_limit_is_refused_by_the_builder_as_the_row_says() -> None:
    backend = choose("tensorrt-rtx")
    limit = backend.capabilities.max_topk
    assert limit is not None

    def top(k: int) -> onnx.ModelProto:
        text = f"(float[1,9000] x) => (float[1,{k}] v, int64[1,{k}] i) {{ v, i = TopK<axis = 1>(x, k) }}"
        return net(text, k=np.array([k], np.int64))

    assert backend.build(BuildRequest(top(limit), (86,))).engine
    with pytest.raises(BackendError):
        backend.build(BuildRequest(top(limit + 1), (86,)))


@needs_rtx
@pytest.mark.tensorrt
@pytest.mark.parametrize("operator", ["NonMaxSuppression", "NonZero"])
def test_the_operators_called_missing_are_missing(operator: str) -> None:
    """The row of capabilities is held to the library itself."""
    if operator == "NonZero":
        model = net("(float[1,9] x) => (int64[2,n] y) { y = NonZero(x) }")
    else:
        limits = {"m": np.array([5], np.int64), "i": np.array([0.5], np.float32), "s": np.array([0.1], np.float32)}
        text = "(float[1,9,4] b, float[1,1,9] c) => (int64[n,3] y) { y = NonMaxSuppression(b, c, m, i, s) }"
        model = net(text, **limits)
    backend = choose("tensorrt-rtx")
    assert operator in backend.unsupported(model)
    with pytest.raises(BackendError):
        backend.build(BuildRequest(model, (86,)))


@needs_rtx
@pytest.mark.tensorrt
def test_a_builder_that_ends_its_process_is_an_error_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "build_process.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGABRT)\n")
    monkeypatch.setattr(tensorrt, "__file__", str(tmp_path / "tensorrt.py"))
    with pytest.raises(BackendError, match=f"ended while building, with signal {int(signal.SIGABRT)}"):
        choose("tensorrt-rtx").build(BuildRequest(conv(), (86,)))


@needs_rtx
@pytest.mark.tensorrt
def test_the_module_of_this_package_does_not_hide_the_library() -> None:
    """build_process.py lies beside tensorrt.py, and a script's folder comes first on the path."""
    assert "tensorrt_rtx" not in sys.modules or sys.modules["tensorrt_rtx"].__file__ != tensorrt_rtx.__file__
    assert choose("tensorrt-rtx").build(BuildRequest(conv(), (86,))).engine[:4] == b"vtrt"


class FakeTensorRT:
    """As much of a weakly typed TensorRT as a build touches; without a device the real one stops at its Builder."""

    float16, float32 = "half", "float"

    class ILogger:
        class Severity:
            ERROR, INTERNAL_ERROR = 1, 0

    class ProfilingVerbosity:
        DETAILED = 2

    class BuilderFlag:
        INT8, FP16, OBEY_PRECISION_CONSTRAINTS = "INT8", "FP16", "OBEY"

    class NetworkDefinitionCreationFlag:
        EXPLICIT_BATCH = 0

    def __init__(self, layers: list[str]) -> None:
        self.layers = [SimpleNamespace(name=name, precision=None) for name in layers]
        self.flags: list[str] = []

    def Builder(self, logger: object) -> SimpleNamespace:
        network = SimpleNamespace(num_layers=len(self.layers), get_layer=self.layers.__getitem__)
        return SimpleNamespace(
            create_network=lambda flags: network,
            create_builder_config=lambda: SimpleNamespace(set_flag=self.flags.append),
            build_serialized_network=lambda network, config: b"engine",
        )

    def OnnxParser(self, network: object, logger: object) -> SimpleNamespace:
        return SimpleNamespace(parse=lambda data: True)


@pytest.mark.parametrize("precisions", [{}, {"Conv_1": "fp16", "Conv_3": "fp32", "gone": "fp16"}])
def test_a_weakly_typed_network_is_told_layer_by_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precisions: dict[str, str]
) -> None:
    from trtdet.backends.build_process import build

    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.onnx").write_bytes(b"")
    fake = FakeTensorRT(["Conv_0", "Conv_1", "Sigmoid_2", "Conv_3"])
    request = {
        "network_flags": ["EXPLICIT_BATCH"],
        "precision_flags": ["INT8", "FP16"],
        "sms": [],
        "batch": None,
        "precisions": precisions,
        "plugins": [],
        "plugin_loading": "process",
    }
    assert build(fake, request, None) == (b"engine", "")
    told = {layer.name: layer.precision for layer in fake.layers if layer.precision}
    assert told == ({"Conv_1": "half", "Conv_3": "float"} if precisions else {})
    assert fake.flags == ["INT8", "FP16", *(["OBEY"] if precisions else [])]
