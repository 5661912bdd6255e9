"""The build process on a partial stand-in for TensorRT."""

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engine_programs import needs_rtx
from small_models import conv, net

from trtdet.backends import BuildRequest, Capabilities, choose
from trtdet.backends.tensorrt import build_process, silu_aot
from trtdet.backends.tensorrt import builder as tensorrt
from trtdet.backends.tensorrt.builder import LIBRARY, _facts
from trtdet.errors import BackendError
from trtdet.options import EngineOptions
from trtdet.progress import silent


class FakeLayer:
    """A layer that keeps what it is told; like the real one it takes no type for an output of integers."""

    def __init__(self, name: str, kinds: list[str]) -> None:
        self.name, self.precision, self.num_outputs = name, None, len(kinds)
        self.stored: dict[int, str] = {}
        self._kinds = kinds

    def get_output(self, index: int) -> SimpleNamespace:
        return SimpleNamespace(dtype=self._kinds[index])

    def set_output_type(self, index: int, kind: str) -> None:
        assert self._kinds[index] in ("float", "half")
        self.stored[index] = kind


class FakeTensorRT:
    """As much of a weakly typed TensorRT as a build touches; without a device the real one stops at its Builder."""

    float16, float32 = "half", "float"
    __version__ = "8.6.0"

    ProfilingVerbosity = SimpleNamespace(DETAILED=2)
    BuilderFlag = SimpleNamespace(
        INT8="INT8", FP16="FP16", TF32="TF32", OBEY_PRECISION_CONSTRAINTS="OBEY", VERSION_COMPATIBLE="VERSION"
    )
    NetworkDefinitionCreationFlag = SimpleNamespace(EXPLICIT_BATCH=0)
    MemoryPoolType = SimpleNamespace(WORKSPACE="workspace")
    HardwareCompatibilityLevel = SimpleNamespace(AMPERE_PLUS="ampere")
    TacticSource = SimpleNamespace(CUBLAS=0, CUBLAS_LT=1, JIT_CONVOLUTIONS=4)

    def __init__(self, layers: list[str], others: dict[str, list[str]] | None = None) -> None:
        """``others`` has the types of the outputs of the layers that do not give one float tensor."""
        self.layers = [
            *(FakeLayer(name, ["float"]) for name in layers),
            *(FakeLayer(name, kinds) for name, kinds in (others or {}).items()),
        ]
        self.flags: list[str] = []
        self.told: list[str] = []
        self.config = SimpleNamespace(
            set_flag=self.flags.append,
            clear_flag=lambda flag: self.flags.append(f"no {flag}"),
            set_memory_pool_limit=lambda pool, size: self.told.append(f"{pool} {size}"),
            set_tactic_sources=lambda mask: self.told.append(f"tactics {mask:b}"),
            create_timing_cache=lambda data: None if data in self.spoilt else data,
            set_timing_cache=self.take,
            get_timing_cache=lambda: SimpleNamespace(serialize=lambda: self.timings + b"+"),
        )
        self.timings = b""
        self.spoilt: tuple[bytes, ...] = (b"spoilt",)

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
        Path("model.onnx").write_bytes(b"")
        request = {
            **dict.fromkeys(("network_flags", "builder_flags", "sms", "plugins", "preview_features"), ()),
            **dict.fromkeys(("batch", "implicit", "compiled_plugins", "keep_timings", "inspect")),
            "precisions": {},
            "loads_plugins": True,
            "options": asdict(EngineOptions()),
        }
        logger = SimpleNamespace(errors=[], first=lambda: "it gave no reason")
        return build_process.build(self, {**request, **changes}, logger, lambda report: None)


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A working directory of its own, as a building process has."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "precisions", [{}, {"Conv_1": "fp16", "Conv_3": "fp32", "gone": "fp16", "Shape_4": "fp32", "Assertion_5": "fp32"}]
)
def test_a_weakly_typed_network_is_told_layer_by_layer(elsewhere, precisions):
    fake = FakeTensorRT(["Conv_0", "Conv_1", "Sigmoid_2", "Conv_3"], {"Shape_4": ["int64"], "Assertion_5": []})
    made = fake.made(network_flags=["EXPLICIT_BATCH"], builder_flags=["INT8", "FP16"], precisions=precisions)
    assert made == {"engine": b"engine"}
    told = {layer.name: layer.precision for layer in fake.layers if layer.precision}
    assert told == ({"Conv_1": "half", "Conv_3": "float"} if precisions else {})
    # What is to be float32 is stored so as well; what a layer of FP16 gives is the builder's choice.
    assert [layer.name for layer in fake.layers if layer.stored] == (["Conv_3"] if precisions else [])
    assert fake.flags == [*(["OBEY"] if precisions else []), "INT8", "FP16"]


def test_suppression_whose_first_output_is_a_count_stays_in_float32(elsewhere):
    """EfficientNMS gives num_dets, boxes, scores, classes. In half its boxes would be off by pixels."""
    fake = FakeTensorRT(["Concat_0"], {"EfficientNMS_1": ["int32", "float", "float", "int32"]})
    fake.made(builder_flags=["FP16"], precisions=dict.fromkeys(("Concat_0", "EfficientNMS_1"), "fp32"))
    boxes, suppression = fake.layers
    assert (boxes.precision, boxes.stored) == ("float", {0: "float"})
    assert (suppression.precision, suppression.stored) == ("float", {1: "float", 2: "float"})


def test_the_builder_is_told_of_every_option(elsewhere):
    fake = FakeTensorRT([])
    options = EngineOptions(
        workspace=1 << 20,
        version_compatible=True,
        hardware_compatible=True,
        embed_plugins=True,
        tactic_sources=("CUBLAS_LT", "JIT_CONVOLUTIONS"),
    )
    assert fake.made(options=asdict(options), plugins=[])["engine"] == b"engine"
    assert fake.flags == ["VERSION"]
    assert fake.config.hardware_compatibility_level == "ampere"
    assert fake.config.plugins_to_serialize == []
    assert fake.told[-2:] == ["workspace 1048576", "tactics 10010"]
    fake.made(options=asdict(EngineOptions(tactic_sources=(), tf32=False)))
    assert fake.told[-1] == "tactics 0"
    assert fake.flags == ["VERSION", "no TF32"]


@pytest.mark.parametrize(
    ("given", "used"), [(b"", b""), (b"known", b"known"), (b"of another device", b""), (b"spoilt", b"")]
)
def test_kernel_times_are_used_or_measured_again_where_the_builder_keeps_them(elsewhere, given, used):
    (elsewhere / "timings").write_bytes(given)
    fake = FakeTensorRT([])
    assert fake.made(keep_timings=True)["timing.cache"] == used + b"+"
    assert fake.made() == {"engine": b"engine"}
    fake.spoilt = (given, b"")
    assert fake.made(keep_timings=True) == {"engine": b"engine"}


def test_phases_within_phases_are_parts_of_a_step():
    reports: list[Any] = []
    monitor = build_process.progress_monitor(SimpleNamespace(IProgressMonitor=object), reports.append)
    monitor.phase_start("all", None, 2)
    assert monitor.step_complete("all", 0)
    monitor.phase_start("part", "all", 4)
    for step in range(4):
        monitor.step_complete("part", step)
    monitor.phase_finish("part")
    monitor.step_complete("all", 1)
    assert reports == [["", percent, 100] for percent in (50, 62, 75, 87, 99)]


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        ("Error Code 2: OutOfMemory (no further information)", "smaller batch or workspace"),
        ("CUDA driver version is insufficient for CUDA runtime version", "update the driver"),
        ("getPluginCreator could not find plugin: TRT_SiLU version: 1", "engine.plugins"),
        ("something nobody has seen", None),
    ],
)
def test_words_that_are_known_come_with_advice(monkeypatch, tmp_path, words, advice):
    (tmp_path / "build_process.py").write_text(f"open('error.txt', 'w').write({words!r})\n")
    monkeypatch.setattr(tensorrt, "__file__", str(tmp_path / "tensorrt.py"))
    caps = Capabilities("test", "1", True, True, True)
    with pytest.raises(BackendError, match=f"^test 1: {re.escape(words)}.*{advice or '$'}"):
        tensorrt.build_engine(LIBRARY, caps, BuildRequest(conv()), silent)


def test_a_registry_loads_libraries_itself_and_only_the_full_tensorrt_is_given_creators():
    full, without_plugins = FakeTensorRT([]), FakeTensorRT([])
    build_process.builder_with(full, None, ["a.so", "b.so"], True)
    assert full.told == ["creators registered", "builder", "loaded a.so", "loaded b.so"]
    build_process.builder_with(without_plugins, None, [], False)
    assert without_plugins.told == ["builder"]
    message = "cannot be loaded: 'empty.so' has no plugins for TensorRT 8.6.0"
    with pytest.raises(build_process.RefusedError, match=message):
        build_process.builder_with(full, None, ["empty.so"], True)


def test_plugins_without_a_library_are_compiled_into_the_engine(elsewhere, monkeypatch):
    """The building process is told so, and reports what is missing."""
    told: list[Any] = []
    monkeypatch.setattr(silu_aot, "register", told.append)
    fake = FakeTensorRT([])
    assert fake.made(compiled_plugins=True)["engine"] == b"engine"
    assert told == [fake]

    def refuse(trt: object) -> None:
        raise BackendError("NVRTC is not installed")

    monkeypatch.setattr(silu_aot, "register", refuse)
    with pytest.raises(BackendError, match="NVRTC is not installed"):
        fake.made(compiled_plugins=True)

    model = net("(float[1,3,4,4] x) => (float[1,3,4,4] y) { y = trt.plugins.TRT_SiLU(x) }")
    caps = Capabilities("test", "1", True, False, True, loads_plugins=True, compiles_plugins=True)
    for plugins, compiled in (((), True), ((elsewhere / "some.so",), False)):
        facts = _facts(LIBRARY, caps, BuildRequest(model, plugins=plugins), sms=())
        assert facts["compiled_plugins"] == compiled
        assert ("PREFER_AOT_PYTHON_PLUGINS" in facts["network_flags"]) == compiled


LOOP = """(float[1,3,4,4] x) => (float[1,3,4,4] y) {
  n = Constant<value = int64 {3}>()
  go = Constant<value = bool {1}>()
  y = Loop<body = step (int64 i, bool on, float[1,3,4,4] a) => (bool still, float[1,3,4,4] b) {
    still = Identity(on) b = Neg(a)
  }>(n, go, x)
}"""


@pytest.mark.parametrize(
    ("text", "given"), [("(float[1,3,4,4] x) => (float[1,3,4,4] y) { y = Neg(x) }", True), (LOOP, False)]
)
def test_an_engine_that_can_be_captured_is_built_for_it(text, given):
    """REQUIRE_USER_ALLOCATION is an error where a network needs memory that only a run can ask for."""
    caps = Capabilities("test", "1", True, False, True, capture_flags=("REQUIRE_USER_ALLOCATION",))
    facts = _facts(LIBRARY, caps, BuildRequest(net(text)), sms=())
    assert facts["builder_flags"] == (("REQUIRE_USER_ALLOCATION",) if given else ())


@needs_rtx
def test_tensorrt_rtx_has_the_flag_and_builds_with_it(caplog):
    backend = choose("tensorrt-rtx")
    assert backend.capabilities.capture_flags == ("REQUIRE_USER_ALLOCATION",)
    for model in (conv(), net(LOOP)):
        caplog.clear()
        with caplog.at_level("INFO"):
            built = backend.build(BuildRequest(model, (86,)))
        assert built.engine
        # What is kept in a bundle is heard while it is built, and the rest of the log is of level VERBOSE.
        assert [record.getMessage() for record in caplog.records] == list(built.messages)
        assert any(message.startswith("[I] Engine generation completed") for message in built.messages)
        assert 0 < len(built.messages) < len(built.log)


@needs_rtx
def test_tensorrt_rtx_refuses_plugins_before_it_is_imported(tmp_path):
    """With a creator registered there the process would end while parsing, with no word."""
    backend = choose("tensorrt-rtx")
    with pytest.raises(BackendError, match="takes no plugin libraries; leave them out or use --backend tensorrt"):
        backend.build(BuildRequest(conv(), (86,), plugins=(tmp_path / "no-such-library.so",)))
    model = net("(float[1,3,4,4] x) => (float[1,3,4,4] y) { y = trt.plugins.TRT_SiLU(x) }")
    assert "ends its process" in backend.capabilities.unsupported(model)["TRT_SiLU"]


WANTS_AN_ENGINE = """
import json, os, subprocess, sys, time
request = {"parent": os.getpid(), "module": "slow", "implicit": None, "compiled_plugins": False, "plugins": []}
json.dump(request, open("request.json", "w"))
child = subprocess.Popen([sys.executable, sys.argv[1]], env={**os.environ, "PYTHONPATH": "."}, start_new_session=True)
while not os.path.exists("started"):
    time.sleep(0.01)
print(child.pid, flush=True)
time.sleep(600)
"""


def test_it_ends_with_the_process_that_wanted_the_engine(tmp_path):
    (tmp_path / "slow.py").write_text('import time\nopen("started", "w")\ntime.sleep(600)\n')
    command = [sys.executable, "-c", WANTS_AN_ENGINE, build_process.__file__]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        builder = int(parent.stdout.readline())
        parent.kill()
    limit = time.monotonic() + 20
    stat = Path(f"/proc/{builder}/stat")
    # A process that nobody waits for stays as a zombie.
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < limit, "the build process goes on alone"
        time.sleep(0.02)


ASKS_FOR_FIXED_ADDRESSES = """
import ctypes
ctypes.CDLL(None).personality(0x0040000)  # ADDR_NO_RANDOMIZE, which some containers forbid
import seen
"""


def test_its_addresses_are_not_random_where_the_system_allows_that(tmp_path):
    (tmp_path / "seen.py").write_text('raise SystemExit(open("/proc/self/personality").read())\n')
    request = {"parent": os.getpid(), "module": "seen", "implicit": None, "compiled_plugins": False, "plugins": []}
    (tmp_path / "request.json").write_text(json.dumps(request))
    seen = []
    for command in (["-c", ASKS_FOR_FIXED_ADDRESSES], [build_process.__file__]):
        env = {**os.environ, "PYTHONPATH": "."}
        run = subprocess.run(
            [sys.executable, *command], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
        )
        seen.append(run.stderr)
    assert seen[0] == seen[1] and int(seen[0], 16) >= 0


def test_it_does_not_begin_for_a_process_that_has_ended():
    program = "from trtdet.backends.tensorrt.build_process import end_with; end_with(1 << 30)"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (1, "the process that wanted the engine has ended\n")
