"""Choosing a backend, building in a process of its own, and what is said when that goes wrong."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

from trtdet.backends import BuildRequest, Capabilities, EngineOptions, OnnxRunner, choose, cuda
from trtdet.backends.base import Typing
from trtdet.backends.libraries import Library
from trtdet.backends.tensorrt import builder as tensorrt
from trtdet.backends.tensorrt import rtx as tensorrt_rtx
from trtdet.backends.tensorrt.builder import LIBRARY, TensorRT
from trtdet.backends.tensorrt.rtx import TensorRTRTX
from trtdet.config import load_config
from trtdet.errors import BackendError
from trtdet.exporter import SHAPES_MODEL
from trtdet.passes import Options, load_model, rewrite
from trtdet.passes.provenance import Origin, origin_of, put
from trtdet.pipeline import plugin_parts, silu_form, suppression
from trtdet.progress import silent

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
    monkeypatch.setattr(Library, "load", lambda library: None)
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
def test_tensorrt_without_a_device_points_to_what_needs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    library = type("library", (), {"__version__": "8.6.0"})
    monkeypatch.setattr(Library, "load", lambda row: library)
    with pytest.raises(BackendError, match="TensorRT 8.6.0 builds only on a machine with a CUDA device.*tensorrt-rtx"):
        choose("tensorrt")


@pytest.mark.parametrize(
    ("version", "explicit", "implicit", "number"),
    [
        ("8.6.0", Typing(("EXPLICIT_BATCH",), weak=True), Typing(("EXPLICIT_BATCH",), weak=True), 8600),
        ("10.4.0", Typing(("STRONGLY_TYPED",)), Typing(weak=True), 100400),
        ("11.0.0", Typing(), None, 0),
    ],
)
def test_capabilities_of_each_tensorrt(
    monkeypatch: pytest.MonkeyPatch, version: str, explicit: Typing, implicit: Typing | None, number: int
) -> None:
    library = type("library", (), {"__version__": version})
    monkeypatch.setattr(Library, "load", lambda row: library)
    monkeypatch.setattr(cuda, "devices", lambda: (cuda.Device("a GPU", 90),))
    caps = choose("tensorrt").capabilities
    assert (caps.explicit, caps.implicit, caps.cache_version) == (explicit, implicit, number)
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


def test_a_model_that_fails_while_it_runs_is_one_line() -> None:
    """Only a run shows that the elements do not fit the shape."""
    model = net("(float[1,3,4,4] x) => (float[1,n,c,d] y) { y = Reshape(x, t) }", t=np.array([1, 3, 5, 5]))
    images = np.zeros((1, 3, 4, 4), np.float32)
    runner = OnnxRunner(model)
    for run in (runner, runner.new_context, lambda given: runner.profile(given, 1, 0)):
        with pytest.raises(BackendError, match=r"^onnxruntime [\d.]+ cannot run the model: .*") as caught:
            run(images)  # type: ignore[operator]
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
def test_the_registry_of_provenance_leaves_no_trace_in_an_engine() -> None:
    model = conv()
    backend = choose("tensorrt-rtx")
    without = backend.build(BuildRequest(model, (86,))).engine
    put(model, {node.name: Origin.DECODE for node in model.graph.node})
    assert origin_of(model)
    assert backend.build(BuildRequest(model, (86,))).engine == without
    assert origin_of(model)


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
    __version__ = "8.6.0"

    class ILogger:
        class Severity:
            ERROR, INTERNAL_ERROR, INFO = 1, 0, 3

    class ProfilingVerbosity:
        DETAILED = 2

    class BuilderFlag:
        INT8, FP16, OBEY_PRECISION_CONSTRAINTS, VERSION_COMPATIBLE = "INT8", "FP16", "OBEY", "VERSION"

    class NetworkDefinitionCreationFlag:
        EXPLICIT_BATCH = 0

    class MemoryPoolType:
        WORKSPACE = "workspace"

    class HardwareCompatibilityLevel:
        AMPERE_PLUS = "ampere"

    class TacticSource:
        CUBLAS, CUBLAS_LT, JIT_CONVOLUTIONS = 0, 1, 4

    def __init__(self, layers: list[str], others: list[str] | None = None) -> None:
        kinds = {**dict.fromkeys(layers, "float"), **dict.fromkeys(others or (), "int64")}
        self.layers = [
            SimpleNamespace(
                name=name, precision=None, num_outputs=1, get_output=lambda _, dtype=dtype: SimpleNamespace(dtype=dtype)
            )
            for name, dtype in kinds.items()
        ]
        self.flags: list[str] = []
        self.told: list[str] = []
        self.config = SimpleNamespace(
            set_flag=self.flags.append,
            set_memory_pool_limit=lambda pool, size: self.told.append(f"{pool} {size}"),
            set_tactic_sources=lambda mask: self.told.append(f"tactics {mask:b}"),
            create_timing_cache=lambda data: None if data == b"spoilt" else data,
            set_timing_cache=self.take,
            get_timing_cache=lambda: SimpleNamespace(serialize=lambda: self.timings + b"+"),
        )
        self.timings = b""

    def take(self, timings: bytes, ignore_mismatch: bool) -> bool:
        assert not ignore_mismatch
        good = timings in (b"", b"known")
        if good:
            self.timings = timings
        return good

    def init_libnvinfer_plugins(self, logger: object, namespace: str) -> None:
        self.told.append("creators registered")

    def Builder(self, logger: object) -> SimpleNamespace:
        self.told.append("builder")
        network = SimpleNamespace(num_layers=len(self.layers), get_layer=self.layers.__getitem__)
        return SimpleNamespace(
            create_network=lambda flags: network,
            get_plugin_registry=lambda: SimpleNamespace(load_library=self.load),
            create_builder_config=lambda: self.config,
            build_serialized_network=lambda network, config: b"engine",
        )

    def load(self, path: str) -> object:
        self.told.append(f"loaded {path}")
        return None if "empty" in path else object()

    def OnnxParser(self, network: object, logger: object) -> SimpleNamespace:
        return SimpleNamespace(parse=lambda data: True)

    def made(self, **changes: Any) -> Any:
        """What a build by this library gives, with an empty model."""
        from trtdet.backends.tensorrt import build_process

        Path("model.onnx").write_bytes(b"")
        request = {
            "network_flags": [],
            "builder_flags": [],
            "sms": [],
            "batch": None,
            "precisions": {},
            "plugins": [],
            "loads_plugins": True,
            "preview_features": [],
            "compiled_plugins": False,
            "implicit": None,
            "options": asdict(EngineOptions()),
            "keep_timings": False,
            "inspect": False,
        }
        logger = SimpleNamespace(errors=[], first=lambda: "it gave no reason")
        return build_process.build(self, {**request, **changes}, logger, lambda stage, done, total: None)


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory of its own, as a building process has."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("precisions", [{}, {"Conv_1": "fp16", "Conv_3": "fp32", "gone": "fp16", "Shape_4": "fp32"}])
def test_a_weakly_typed_network_is_told_layer_by_layer(elsewhere: Path, precisions: dict[str, str]) -> None:
    fake = FakeTensorRT(["Conv_0", "Conv_1", "Sigmoid_2", "Conv_3"], ["Shape_4"])
    made = fake.made(network_flags=["EXPLICIT_BATCH"], builder_flags=["INT8", "FP16"], precisions=precisions)
    assert (made.engine, made.error) == (b"engine", "")
    told = {layer.name: layer.precision for layer in fake.layers if layer.precision}
    assert told == ({"Conv_1": "half", "Conv_3": "float"} if precisions else {})
    assert fake.flags == ["INT8", "FP16", *(["OBEY"] if precisions else [])]


def test_the_builder_is_told_of_every_option(elsewhere: Path) -> None:
    fake = FakeTensorRT([])
    options = EngineOptions(1 << 20, True, True, True, ("CUBLAS_LT", "JIT_CONVOLUTIONS"))
    assert fake.made(options=asdict(options), plugins=[]).engine == b"engine"
    assert fake.flags == ["VERSION"]
    assert fake.config.hardware_compatibility_level == "ampere"
    assert fake.config.plugins_to_serialize == []
    assert fake.told[-2:] == ["workspace 1048576", "tactics 10010"]
    fake.made(options=asdict(EngineOptions(tactic_sources=())))
    assert fake.told[-1] == "tactics 0"


@pytest.mark.parametrize(
    ("given", "used"), [(b"", b""), (b"known", b"known"), (b"of another device", b""), (b"spoilt", b"")]
)
def test_kernel_times_are_used_or_measured_again(elsewhere: Path, given: bytes, used: bytes) -> None:
    (elsewhere / "timings").write_bytes(given)
    assert FakeTensorRT([]).made(keep_timings=True).timing_cache == used + b"+"
    assert FakeTensorRT([]).made().timing_cache == b""


@needs_rtx
@pytest.mark.tensorrt
def test_a_build_says_how_far_it_is() -> None:
    said: list[tuple[str, int, int]] = []
    built = choose("tensorrt-rtx").build(BuildRequest(conv(), (86,)), lambda *one: said.append(one))
    assert built.engine
    assert {(stage, total) for stage, _, total in said} == {
        (f"building the engine with tensorrt-rtx {choose('tensorrt-rtx').capabilities.version}", 100)
    }
    percents = [done for _, done, _ in said]
    assert len(percents) > 3
    assert percents == sorted(set(percents))
    assert percents[-1] <= 99


def test_phases_within_phases_are_parts_of_a_step() -> None:
    from trtdet.backends.tensorrt import build_process

    said: list[int] = []
    library = SimpleNamespace(IProgressMonitor=object)
    monitor = build_process.progress_monitor(library, lambda stage, done, total: said.append(done))
    monitor.phase_start("all", None, 2)
    assert monitor.step_complete("all", 0)
    monitor.phase_start("part", "all", 4)
    for step in range(4):
        monitor.step_complete("part", step)
    monitor.phase_finish("part")
    monitor.step_complete("all", 1)
    assert said == [50, 62, 75, 87, 99]


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        ("Error Code 2: OutOfMemory (no further information)", "smaller --batch or --workspace"),
        ("CUDA driver version is insufficient for CUDA runtime version", "update the driver"),
        ("getPluginCreator could not find plugin: TRT_SiLU version: 1", "--plugin-library"),
        ("something nobody has seen", None),
    ],
)
def test_words_that_are_known_come_with_advice(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: str, advice: str | None
) -> None:
    (tmp_path / "build_process.py").write_text(f"open('error.txt', 'w').write({words!r})\n")
    monkeypatch.setattr(tensorrt, "__file__", str(tmp_path / "tensorrt.py"))
    caps = Capabilities("test", "1", True, True, True)
    with pytest.raises(BackendError, match=f"^test 1: {re.escape(words)}.*{advice or '$'}"):
        tensorrt.build_engine(LIBRARY, caps, BuildRequest(conv()), silent)


# plugins and the forms of SiLU


def test_a_registry_loads_libraries_itself_and_says_when_one_is_empty() -> None:
    from trtdet.backends.tensorrt.build_process import builder_with

    fake = FakeTensorRT([])
    builder_with(fake, None, ["a.so", "b.so"], True)
    assert fake.told == ["creators registered", "builder", "loaded a.so", "loaded b.so"]
    with pytest.raises(OSError, match="'empty.so' has no plugins for TensorRT 8.6.0"):
        builder_with(fake, None, ["empty.so"], True)


@pytest.mark.parametrize("takes_plugins", [True, False])
def test_only_the_full_tensorrt_is_given_creators(takes_plugins: bool) -> None:
    from trtdet.backends.tensorrt.build_process import builder_with

    fake = FakeTensorRT([])
    builder_with(fake, None, [], takes_plugins)
    assert fake.told == (["creators registered", "builder"] if takes_plugins else ["builder"])


def test_plugins_without_a_library_are_compiled_into_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that builds is told so; there it is said what is missing, should anything be."""
    from trtdet.backends.tensorrt import silu_aot

    told: list[Any] = []
    monkeypatch.setattr(silu_aot, "register", told.append)
    monkeypatch.chdir(tmp_path)
    fake = FakeTensorRT([])
    assert fake.made(compiled_plugins=True).engine == b"engine"
    assert told == [fake]

    def refuse(trt: object) -> None:
        raise BackendError("NVRTC is not installed")

    monkeypatch.setattr(silu_aot, "register", refuse)
    assert fake.made(compiled_plugins=True).error == "NVRTC is not installed"

    facts: dict[str, Any] = {}

    def stop(arguments: list[str], cwd: Path, **others: Any) -> None:
        facts.update(json.loads((cwd / "request.json").read_text()))
        raise KeyboardInterrupt

    monkeypatch.setattr(tensorrt.subprocess, "Popen", stop)
    model = net("(float[1,3,4,4] x) => (float[1,3,4,4] y) { y = trt.plugins.TRT_SiLU(x) }")
    caps = Capabilities("test", "1", True, False, True, loads_plugins=True, compiles_plugins=True)
    for plugins, compiled in (((), True), ((tmp_path / "some.so",), False)):
        with pytest.raises(KeyboardInterrupt):
            tensorrt.build_engine(LIBRARY, caps, BuildRequest(model, plugins=plugins), silent)
        assert facts["compiled_plugins"] == compiled
        assert ("PREFER_AOT_PYTHON_PLUGINS" in facts["network_flags"]) == compiled


@needs_rtx
@pytest.mark.tensorrt
def test_tensorrt_rtx_refuses_plugins_before_it_is_imported(tmp_path: Path) -> None:
    """With a creator registered there the process would end while parsing, with no word."""
    backend = choose("tensorrt-rtx")
    with pytest.raises(BackendError, match="takes no plugin libraries; leave them out or use --backend tensorrt"):
        backend.build(BuildRequest(conv(), (86,), plugins=(tmp_path / "no-such-library.so",)))
    model = net("(float[1,3,4,4] x) => (float[1,3,4,4] y) { y = trt.plugins.TRT_SiLU(x) }")
    assert "ends its process" in backend.unsupported(model)["TRT_SiLU"]


@pytest.mark.parametrize(
    ("version", "forms", "swish"),
    [
        ("8.6.0", ("plugin", "keep"), False),
        ("10.4.0", ("keep", "plugin"), False),
        ("11.0.0", ("swish", "keep", "plugin"), True),
    ],
)
def test_what_each_tensorrt_may_write_silu_as(
    monkeypatch: pytest.MonkeyPatch, version: str, forms: tuple[str, ...], swish: bool
) -> None:
    known = type("library", (), {"__version__": version})
    monkeypatch.setattr(Library, "load", lambda row: known)
    monkeypatch.setattr(cuda, "devices", lambda: (cuda.Device("a GPU", 90),))
    backend = choose("tensorrt")
    assert (backend.capabilities.silu, backend.capabilities.loads_plugins) == (forms, True)
    model = net("(float[1,3] x) => (float[1,3] y) { y = Swish(x) }")
    assert ("Swish" not in backend.unsupported(model)) == swish


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
def test_auto_never_needs_a_library_that_was_not_given(
    forms: tuple[str, ...], engine: bool, given: bool, asked: str, expected: str
) -> None:
    caps = Capabilities("test", "1", engine, False, False, silu=forms, loads_plugins=True)
    assert silu_form(asked, (Path("a.so"),) if given else (), caps) == expected


@pytest.mark.parametrize(
    ("forms", "asked", "message"),
    [
        (("keep", "plugin"), "plugin", "--silu plugin with test needs the library.*--plugin-library PATH.*--silu keep"),
        (("keep", "swish"), "plugin", "test 1 cannot take --silu plugin: it ends; allowed: auto, keep, swish"),
        (("plugin", "keep"), "swish", "test 1 cannot take --silu swish; allowed: auto, plugin, keep"),
    ],
)
def test_a_form_that_a_backend_lacks_is_an_error_that_says_what_to_do(
    forms: tuple[str, ...], asked: str, message: str
) -> None:
    caps = Capabilities("test", "1", True, False, False, silu=forms, missing_ops={"TRT_SiLU": "it ends"})
    with pytest.raises(BackendError, match=message):
        silu_form(asked, (), caps)


def test_plugin_libraries_are_checked_before_anything_is_done(tmp_path: Path) -> None:
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
    with pytest.raises(BackendError, match="test 1 loads no plugin libraries; leave --plugin-library out"):
        plugin_parts((one,), Capabilities("test", "1", True, False, True))


# suppression


@pytest.mark.parametrize(("version", "heeds"), [("8.6.0", False), ("8.6.1", True), ("10.4.0", True)])
def test_a_suppression_that_would_ignore_a_key_is_not_taken(
    monkeypatch: pytest.MonkeyPatch, version: str, heeds: bool
) -> None:
    known = type("library", (), {"__version__": version})
    monkeypatch.setattr(Library, "load", lambda row: known)
    monkeypatch.setattr(cuda, "devices", lambda: (cuda.Device("a GPU", 90),))
    caps = choose("tensorrt").capabilities
    assert suppression("auto", caps, None, False) == suppression("efficient", caps, None, False) == "efficient"
    if heeds:
        assert suppression("auto", caps, None, True) == "efficient"
        return
    assert suppression("auto", caps, None, True) == "onnx"
    with pytest.raises(BackendError, match="class_agnostic', which its EfficientNMS ignores; allowed: --nms onnx, nat"):
        suppression("efficient", caps, None, True)


def test_operators_of_plugins_are_loaded_without_torch_and_leave_the_environment_alone() -> None:
    program = (
        "import os, sys\n"
        "from trtdet.backends.onnxruntime import _custom_operators\n"
        "before = dict(os.environ)\n"
        "_custom_operators()\n"
        "print('torch' in sys.modules, os.environ == before)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == "False True\n", done.stderr
