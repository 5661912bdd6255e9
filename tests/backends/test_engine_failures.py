"""Engines that cannot run or fail while running, on the stand-ins, with the real cuda-python."""

import pytest
from engine_programs import PRELUDE, RTX, needs_cuda_python
from standin.machine import plugin_library

pytestmark = needs_cuda_python


@pytest.mark.parametrize(
    ("settings", "change", "said"),
    [
        ({}, "sms=(80, 86)", "the engine was built for compute capability 8.0 or 8.6, and this machine has Stand-in"),
        ({"sm": 75}, "sms=(80,), hardware_compatible=True", "compute capability 8.0 and later, and this machine has"),
        ({}, "version='10.8.0'", "the engine was built with TensorRT 10.8.0, and 10.9.0 is installed here; build it"),
    ],
)
def test_an_engine_for_something_else_is_refused_before_it_is_touched(machine, settings, change, said):
    done = machine.python(PRELUDE + f"refused(open_engine, b'', replace(facts, {change}))", **settings)
    assert done.out.startswith("the engine cannot be run here, as ")
    assert said in done.out


def test_what_is_missing_is_said_in_turn(machine):
    program = """
from trtdet.backends import obstacle
print(obstacle(facts) or "none")
sys.modules["tensorrt"] = None
print(obstacle(facts))
"""
    said = machine.python(PRELUDE + program).out.splitlines()
    assert said[0] == "none"
    assert said[1].startswith("TensorRT is not installed here (")
    assert said[1].endswith("); pip install 'trtdet[trt]'")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        ("b''", "the engine is empty; build it again"),
        ("data[:-100]", "Plan is corrupt); [runtime.cpp::deserializeCudaEngine] Error Code 4: Internal Error"),
        ("data[:-1] + b'!'", "it was altered or cut short; build it again"),
        ("b'PK' + data", "Magic tag does not match"),
        ("b'vtrt' + data", "this is not an engine of TensorRT: it starts with b'vtrt'; build it again"),
    ],
)
def test_an_engine_that_is_not_whole_is_refused(machine, spoil, said):
    program = PRELUDE + f"data = built(conv()); refused(open_engine, {spoil}, facts); print(alive())"
    out = machine.python(program).out.splitlines()
    assert said in out[0]
    assert out[1:] == ["[0, 0, 0, 0, 0, 0]"]


def test_tensorrts_own_words_come_with_advice(machine):
    """Facts that say too much let through what TensorRT then refuses."""
    program = """
data = built(conv())
length = int.from_bytes(data[8:12], "little")
header = json.loads(data[12 : 12 + length])
def changed(**facts):
    new = json.dumps({**header, **facts}).encode()
    return data[:8] + len(new).to_bytes(4, "little") + new + data[12 + length :]
refused(open_engine, changed(version="10.8.0"), facts)
refused(open_engine, changed(sm=86), facts)
print(alive())
"""
    first, second, left = machine.python(PRELUDE + program).out.splitlines()
    assert "expecting library version 10.9.0 got 10.8.0" in first
    assert first.endswith("; build it again with the TensorRT installed here")
    assert "expecting compute 8.9 got compute 8.6" in second
    assert second.endswith("; build it again on this machine")
    assert left == "[0, 0, 0, 0, 0, 0]"


def test_compatible_engines_run_elsewhere(machine):
    program = """
level = trt.HardwareCompatibilityLevel.AMPERE_PLUS
Path(sys.argv[1]).write_bytes(built(conv(), flags=["VERSION_COMPATIBLE"], hardware_compatibility_level=level))
"""
    file = machine.libraries / "compatible.engine"
    machine.python(PRELUDE + program, file, version="8.6.0", sm=80)
    program = """
data = Path(sys.argv[1]).read_bytes()
both = replace(facts, version="8.6.0", sms=(80,), version_compatible=True, hardware_compatible=True)
with open_engine(data, both) as runner:
    same(runner(images(1)), computed(conv(), images(1)))
refused(open_engine, data, replace(both, version_compatible=False))
"""
    assert machine.python(PRELUDE + program, file, version="10.9.0", sm=90).out.startswith(
        "the engine cannot be run here, as the engine was built with TensorRT 8.6.0"
    )


@pytest.mark.parametrize("batch", [None, (1, 2, 4)])
def test_an_engine_of_rtx_runs_and_is_captured(machine, batch):
    """Of a dynamic batch, only what was compiled for its shape at once may be captured."""
    program = f"""
model = conv("n" if {batch} else "2")
with open_engine(built(model, {batch}), facts) as runner:
    context = runner.new_context(images(2))
    assert context.captured
    context.run()
    same(context.results(), computed(model, images(2)))
    same(runner(images(1)), computed(model, images(1)))
    print(runner.run_info)
print(alive())
"""
    done = machine.python(RTX + program, rtx=True)
    assert done.out.splitlines() == ["TensorRT-RTX 1.7.1.116 (Stand-in GPU)", "[0, 0, 0, 0, 0, 0]"]


@pytest.mark.parametrize("pycuda", [False, True])
@pytest.mark.parametrize("graphs", [False, True])
def test_rtx_captures_its_graphs_itself(machine, graphs, pycuda):
    """So it does for every shape and with PyCUDA, which has no graphs; a capture around its own would collide."""
    program = f"""
from unittest import mock
with mock.patch.object(cuda.Stream, "capture", side_effect=AssertionError), \\
        open_engine(built(conv("n"), (1, 2, 4)), facts, graphs={graphs}) as runner:
    context = runner.new_context(images(2))
    same(context.results(), computed(conv("n"), images(2)))
    same(runner(images(3)), computed(conv("n"), images(3)))
    made = [one._trt_context.get_runtime_config() for one in runner._contexts]
    print(*(one.cuda_graph_strategy.name for one in made))
    print(context.captured, runner.run_info.without_graphs)
    profiled = runner.profile(images(2), 2, 0)
    assert all(ms > 0 for layer in profiled for ms in layer.ms)
"""
    said = machine.python(RTX + program, rtx=True, pycuda=pycuda).out.splitlines()
    assert said == (
        ["WHOLE_GRAPH_CAPTURE WHOLE_GRAPH_CAPTURE", "True "]
        if graphs
        else ["DISABLED DISABLED", "False they were not asked for"]
    )


def test_an_engine_of_rtx_that_cannot_be_captured_says_so(machine):
    program = """
with open_engine(built(conv()), facts) as runner:
    same(runner(images(1)), computed(conv(), images(1)))
    print(runner.run_info.without_graphs)
"""
    said = machine.python(RTX + program, rtx=True, uncapturable=1).out.splitlines()
    assert said == ["TensorRT-RTX says that this engine cannot be captured"]


def test_an_engine_of_rtx_is_checked_before_the_library_sees_it(machine):
    """With a creator of plugins registered the library ends the process, when it parses."""
    program = """
header = b"vtrt" + bytes(12) + (500).to_bytes(8, "little")
for data in (header + bytes(76), b"vtrt", b"standin" + bytes(99)):
    refused(open_engine, data, facts)
refused(open_engine, built(conv()), replace(facts, plugins=(Path(sys.executable),)))
"""
    assert machine.python(RTX + program, rtx=True).out.splitlines() == [
        "the engine was cut short: 100 of 500 bytes; build it again",
        "the engine was cut short: 4 of 24 bytes; build it again",
        "this is not an engine of TensorRT-RTX: it starts with b'stan'; build it again",
        "TensorRT-RTX 1.7.1.116 takes no plugin libraries; build the engine again",
    ]


SILU = '"(float[1,3,16,16] x) => (float[1,3,16,16] y) { y = trt.plugins.TRT_SiLU<output_type = -1>(x) }"'


@pytest.mark.parametrize("version", ["8.6.0", "10.9.0"])
def test_a_plugin_library_is_loaded_and_a_missing_one_named(machine, tmp_path, version):
    program = f"""
library = Path(sys.argv[1])
Path(sys.argv[2]).write_bytes(built(net({SILU}), plugins=[library]))
"""
    library, file = plugin_library(tmp_path, "TRT_SiLU", "TRT_HardSwish"), tmp_path / "plugin.engine"
    machine.python(PRELUDE + program, library, file, version=version)
    program = f"""
library, data = Path(sys.argv[1]), Path(sys.argv[2]).read_bytes()
refused(open_engine, data, facts)
refused(open_engine, data, replace(facts, plugins=(library.with_name("no.so"),)))
library.with_name("text.so").write_text("no library")
refused(open_engine, data, replace(facts, plugins=(library.with_name("text.so"),)))
for _ in range(2):
    with open_engine(data, replace(facts, plugins=(library,))) as runner:
        same(runner(images(1)), computed(net({SILU}), images(1)))
print(alive())
"""
    said = machine.python(PRELUDE + program, library, file, version=version).out.splitlines()
    assert "Cannot find plugin: TRT_SiLU" in said[0]
    assert said[0].endswith("give the library that has the plugin with --set engine.plugins=LIBRARY when building")
    assert said[1].startswith("the engine needs the plugin library")
    assert said[1].endswith("no.so', which does not exist; put it there")
    assert "text.so" in said[2]
    assert said[3] == "[0, 0, 0, 0, 0, 0]"


def test_plugins_in_the_engine_are_run_only_where_the_facts_say_so(machine, tmp_path):
    program = f"""
library = Path(sys.argv[1])
data = built(net({SILU}), plugins=[library], plugins_to_serialize=[str(library)])
refused(open_engine, data, facts)
with open_engine(data, replace(facts, embedded=True)) as runner:
    same(runner(images(1)), computed(net({SILU}), images(1)))
"""
    done = machine.python(PRELUDE + program, plugin_library(tmp_path, "TRT_SiLU"))
    assert "getEngineHostCodeAllowed()" in done.out


@pytest.mark.parametrize("embedded", [False, True])
def test_the_layers_of_an_engine_with_plugins_are_listed(machine, tmp_path, embedded):
    """The runtime that the inspector belongs to has a registry of its own."""
    program = f"""
from trtdet.backends import BuildRequest, choose
from trtdet.options import EngineOptions
options = EngineOptions(embed_plugins={embedded})
made = choose("tensorrt").build(BuildRequest(net({SILU}), plugins=(Path(sys.argv[1]),), options=options))
print(len(json.loads(made.layers)["Layers"]))
"""
    assert machine.python(PRELUDE + program, plugin_library(tmp_path, "TRT_SiLU")).out == "1\n"


@pytest.mark.parametrize("compatible", [False, True])
def test_libraries_that_are_not_in_the_engine_are_noticed(machine, tmp_path, compatible):
    """The header of TensorRT speaks of libraries in version-compatible engines only; others may lack them."""
    program = f"""
from trtdet.backends import BuildRequest, choose
from trtdet.options import EngineOptions
options = EngineOptions(embed_plugins=True, version_compatible={compatible})
request = BuildRequest(net({SILU}), plugins=(Path(sys.argv[1]),), options=options)
refused(choose("tensorrt").build, request)
"""
    said = machine.python(PRELUDE + program, plugin_library(tmp_path, "TRT_SiLU"), embeds="compatible").out
    if compatible:
        assert said == "NOT REFUSED\n"
    else:
        assert "the plugin libraries are not in the engine, which a process without them cannot load: " in said
        assert "Cannot find plugin: TRT_SiLU" in said
        assert said.strip().endswith("the libraries then lie beside the engine")
        assert "; set engine.version_compatible=true" in said


def test_full_memory_is_said_wherever_it_shows(machine):
    """At the weights, at the execution context, at the buffers; and all of it is given back each time."""
    program = """
data = built(conv("64"))
def tried():
    with open_engine(data, facts) as runner:
        runner(images(64))
limit, said = 1 << 10, []
while True:
    ctypes.CDLL(None).setenv(b"CUDA_STANDIN_MEMORY", str(limit).encode(), 1)
    try:
        tried()
        break
    except BackendError as error:
        said.append(str(error).split(";")[0].split(":")[0].split(" has no")[0])
        assert "smaller batch" in str(error), error
    assert alive() == [0] * 6
    limit += limit // 8
print(*dict.fromkeys(said), sep="\\n")
"""
    assert machine.python(PRELUDE + program).out.splitlines() == [
        "TensorRT 10.9.0 failed at loading the engine",
        "TensorRT 10.9.0 failed at making an execution context",
        "Stand-in GPU",
    ]


def test_a_device_that_fails_is_said_and_everything_let_go(machine):
    program = """
runner = open_engine(built(conv()), facts)
refused(runner, images(1))
runner.close()
"""
    said = machine.python(PRELUDE + program, fault=700).out
    assert said.startswith("the GPU failed at what it ran (cuStreamSynchronize: error 700")


def test_what_is_never_closed_ends_with_the_process(machine):
    program = (
        PRELUDE
        + "runner = open_engine(built(conv()), facts); context = runner.new_context(images(1)); runner(images(1))"
    )
    done = machine.python(program + "\nprint(runner.run_info)", forked=False)
    assert done.out == "TensorRT 10.9.0 (Stand-in GPU)\n"
    assert done.err == ""
