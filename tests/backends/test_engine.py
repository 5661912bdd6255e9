"""Running engines, on the stand-ins for TensorRT and the CUDA driver; cuda-python is the real one."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import pytest
from standin.machine import FOLDER, plugin_library

from trtdet.backends.tensorrt.engine_layers import onnx_nodes

needs_cuda_python = pytest.mark.skipif(
    importlib.util.find_spec("cuda") is None, reason="cuda-python is not installed: pip install 'trtdet[cuda]'"
)
needs_rtx = pytest.mark.skipif(
    importlib.util.find_spec("tensorrt_rtx") is None, reason="TensorRT-RTX is not installed: pip install 'trtdet[rtx]'"
)

PRELUDE = """
import ctypes, json, sys, threading
from dataclasses import replace
from pathlib import Path
import numpy as np, onnx, onnx.parser
import tensorrt as trt
from trtdet.backends import EngineFacts, OnnxRunner, cuda, library_named, open_engine
from trtdet.backends.tensorrt.messages import logger_of
from trtdet.errors import BackendError

def net(text, **weights):
    opsets = '["" : 17, "trt.plugins" : 1]'
    model = onnx.parser.parse_model(f"<ir_version: 8, opset_import: {opsets}>\\nnet {text}")
    for name, value in weights.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    for node in model.graph.node:
        node.name = f"/{node.op_type}_{node.output[0]}"
    return model

def conv(batch="1"):
    weight = np.random.default_rng(0).normal(size=(8, 3, 3, 3)).astype(np.float32)
    text = f"(float[{batch},3,16,16] x) => (float[{batch},8,14,14] y, float[{batch},8,14,14] z)"
    return net(text + " { c = Conv(x, w) y = Relu(c) s = Sigmoid(y) z = Mul(y, s) }", w=weight)

def built(model, batch=None, plugins=(), **options):
    # TensorRT keeps the first logger of a process.
    logger = logger_of(trt)
    builder = trt.Builder(logger)
    trt.init_libnvinfer_plugins(logger, "")
    for path in plugins:
        builder.get_plugin_registry().load_library(str(path))
    network = builder.create_network()
    parser = trt.OnnxParser(network, logger)
    assert parser.parse(model.SerializeToString()), parser.get_error(0).desc()
    config = builder.create_builder_config()
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    for name in options.pop("flags", ()):
        config.set_flag(trt.BuilderFlag[name])
    for name in options.pop("previews", ()):
        config.set_preview_feature(trt.PreviewFeature[name], True)
    for name, value in options.items():
        setattr(config, name, value)
    if batch:
        profile = builder.create_optimization_profile()
        profile.set_shape("x", *((size, *network.get_input(0).shape[1:]) for size in batch))
        config.add_optimization_profile(profile)
    return bytes(builder.build_serialized_network(network, config))

facts = EngineFacts(library_named("tensorrt"), trt.__version__, (89,))

def images(count, seed=0):
    return np.random.default_rng(seed).normal(size=(count, 3, 16, 16)).astype(np.float32)

def same(got, wanted):
    assert got.keys() == wanted.keys()
    for name in wanted:
        np.testing.assert_array_equal(got[name], wanted[name])
        assert got[name].dtype == wanted[name].dtype

def alive():
    return [ctypes.CDLL("libcuda.so.1").standin_live(kind) for kind in range(6)]

def refused(function, *arguments, **named):
    try:
        function(*arguments, **named)
    except BackendError as error:
        print(error)
    else:
        print("NOT REFUSED")
"""

RTX = PRELUDE.replace("import tensorrt as trt", "import tensorrt_rtx as trt").replace('"tensorrt"', '"tensorrt-rtx"')
RTX = RTX.replace('    trt.init_libnvinfer_plugins(logger, "")\n', "")


# names


@pytest.mark.parametrize(
    ("name", "metadata", "nodes"),
    [
        ("Conv_41", "", ("Conv_41",)),
        ("Conv_41 + Relu_42", "", ("Conv_41", "Relu_42")),
        ("/a/Conv + PWN(PWN(/a/Sigmoid), /a/Mul)", "", ("/a/Conv", "/a/Sigmoid", "/a/Mul")),
        ("{ForeignNode[/a/Concat.../b/TopK]}", "", ("/a/Concat", "/b/TopK")),
        ("Reformatting CopyNode for Input Tensor 0 to Conv_41", "", ()),
        ("__myl_ConvSilu_myl0_12", "", ()),
        ("__myl_ConvSilu_myl0_12", "[ONNX Layer: /a/Conv]\x1e[ONNX Layer: /a/Mul]", ("/a/Conv", "/a/Mul")),
        ("anything", "[ONNX Layer: Conv_41][ONNX Layer: Conv_41]", ("Conv_41",)),
        ("Conv_41", "something else", ("Conv_41",)),
    ],
)
def test_a_layer_is_traced_to_its_nodes(name, metadata, nodes):
    assert onnx_nodes(name, metadata) == nodes


# results


@needs_cuda_python
@pytest.mark.parametrize("version", ["8.6.0", "10.9.0", "11.1.0"])
@pytest.mark.parametrize("graphs", [True, False])
def test_an_engine_gives_what_its_model_does_and_leaves_nothing(machine, version, graphs):
    program = f"""
model = conv("4")
with open_engine(built(model), facts, graphs={graphs}) as runner:
    assert (runner.input, runner.outputs) == ("x", ("y", "z"))
    assert (runner.batch, runner.usual_batch, runner.largest_batch) == (4, 4, 4)
    for count in (4, 4, 4, 1, 3):
        given = images(count, seed=count)
        same(runner(given), OnnxRunner(model)(given))
    refused(runner, images(5))
    refused(runner, np.zeros((1, 3, 8, 8), np.float32))
    print(runner.run_info)
refused(runner, images(1))
print(alive())
"""
    assert machine.python(PRELUDE + program, version=version).out.splitlines() == [
        "the engine takes 4 images at once, not 5; build it with --batch",
        "the engine takes images of 3x16x16, not 3x8x8",
        f"TensorRT {version} (Stand-in GPU)" + ("" if graphs else ", without CUDA graphs, as they were not asked for"),
        "the engine was closed",
        "[0, 0, 0, 0, 0, 0]",
    ]


@needs_cuda_python
def test_a_dynamic_batch_is_filled_to_the_smallest_and_refused_over_the_largest(machine):
    program = """
model = conv("n")
with open_engine(built(model, (2, 4, 6)), facts) as runner:
    assert (runner.batch, runner.usual_batch, runner.largest_batch) == (None, 4, 6)
    for count in (4, 1, 6, 2, 5, 1):
        given = images(count, seed=count)
        same(runner(given), OnnxRunner(model)(given))
    refused(runner, images(7))
    refused(runner.new_context, images(1))
    for count in (2, 6):
        context = runner.new_context(images(count))
        assert context.captured
        same(context.results(), OnnxRunner(model)(images(count)))
    print(runner.run_info)
"""
    assert machine.python(PRELUDE + program).out.splitlines() == [
        "the engine takes 6 images at once, not 7; build it with --batch",
        "the engine takes a batch of 2 to 6, not of 1; build it with --batch",
        "TensorRT 10.9.0 (Stand-in GPU)",
    ]


@needs_cuda_python
def test_outputs_keep_their_types(machine):
    kinds = {"float16": 10, "int8": 3, "int32": 6, "int64": 7, "bool": 9, "uint8": 2}
    outputs = ", ".join(f"{kind}[1,3,16,16] {kind}_y" for kind in kinds)
    nodes = " ".join(f"{kind}_y = Cast<to = {number}>(x)" for kind, number in kinds.items())
    program = f"""
model = net("(float[1,3,16,16] x) => ({outputs}) {{ {nodes} }}")
with open_engine(built(model), facts) as runner:
    given = np.abs(images(1)) * 20
    same(runner(given), OnnxRunner(model)(given))
    print(*(value.dtype for value in runner(given).values()))
"""
    assert machine.python(PRELUDE + program).out == " ".join(kinds) + "\n"


@needs_cuda_python
def test_a_half_input_is_given_floats(machine):
    program = """
model = net("(float16[1,3,16,16] x) => (float16[1,3,16,16] y) { y = Neg(x) }")
with open_engine(built(model), facts) as runner:
    np.testing.assert_array_equal(runner(images(1))["y"], -images(1).astype(np.float16))
"""
    machine.python(PRELUDE + program)


@needs_cuda_python
def test_a_shape_known_only_later_is_refused(machine):
    program = """
model = net("(float[1,3,16,16] x) => (int64[4,n] y) { y = NonZero(x) }")
runner = open_engine(built(model), facts)
refused(runner, images(1))
runner.close()
print(alive())
"""
    assert machine.python(PRELUDE + program).out.splitlines() == [
        "output 'y' of the engine has a shape, 4x-1, that is known only when it ran; build it with --nms native or "
        "--nms host",
        "[0, 0, 0, 0, 0, 0]",
    ]


@needs_cuda_python
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("(float[1,3,8,8] x, float[1] t) => (float[1,3,8,8] y) { y = Mul(x, t) }", "x 1x3x8x8, t 1; allowed: one"),
        ("(float[1,9] x) => (float[1,9] y) { y = Neg(x) }", "x 1x9; allowed: one input, images of one size"),
    ],
)
def test_what_takes_no_images_is_refused(machine, text, said):
    program = f"refused(open_engine, built(net({text!r})), facts); print(alive())"
    out = machine.python(PRELUDE + program).out.splitlines()
    assert said in out[0]
    assert out[1] == "[0, 0, 0, 0, 0, 0]"


# contexts


@needs_cuda_python
@pytest.mark.parametrize("pycuda", [False, True])
def test_contexts_in_threads_give_what_one_alone_does(machine, pycuda):
    program = """
model = conv("2")
with open_engine(built(model), facts) as runner:
    found = {}
    def work(seed):
        context = runner.new_context(images(2, seed))
        for _ in range(5):
            assert context.run() > 0
        found[seed] = {name: value.copy() for name, value in context.results().items()}
        found[seed, "called"] = runner(images(2, seed))
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for one in threads: one.start()
    for one in threads: one.join()
    for seed in range(4):
        same(found[seed], OnnxRunner(model)(images(2, seed)))
        same(found[seed, "called"], found[seed])
print(alive())
"""
    assert machine.python(PRELUDE + program, pycuda=pycuda).out == "[0, 0, 0, 0, 0, 0]\n"


@needs_cuda_python
def test_a_context_without_transfers_works_on_what_was_copied_last(machine):
    program = """
model = conv()
with open_engine(built(model), facts) as runner:
    context = runner.new_context(images(1))
    first = {name: value.copy() for name, value in context.results().items()}
    context.fill(images(1, seed=1))
    for value in context.results().values():
        value[:] = 0
    assert context.run(transfers=False) > 0
    assert all((value == 0).all() for value in context.results().values())
    context.run()
    same(context.results(), OnnxRunner(model)(images(1, seed=1)))
    assert not np.array_equal(first["y"], context.results()["y"])
"""
    machine.python(PRELUDE + program)


@needs_cuda_python
@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"pycuda": True}, "pycuda of an unknown version has none"),
        (
            {"uncapturable": 1},
            "capturing it failed (TensorRT 10.9.0 failed at running the engine: IExecutionContext::enqueueV3: "
            "Error Code 1: Cask (Cuda Runtime error 900))",
        ),
    ],
)
def test_an_engine_runs_without_graphs_and_says_why(machine, settings, reason):
    program = """
model = conv()
with open_engine(built(model), facts) as runner:
    context = runner.new_context(images(1))
    assert not context.captured
    context.run()
    same(context.results(), OnnxRunner(model)(images(1)))
    same(runner(images(1)), OnnxRunner(model)(images(1)))
    print(runner.run_info.without_graphs)
    print(runner.run_info)
print(alive())
"""
    assert machine.python(PRELUDE + program, **settings).out.splitlines() == [
        reason,
        f"TensorRT 10.9.0 (Stand-in GPU), without CUDA graphs, as {reason}",
        "[0, 0, 0, 0, 0, 0]",
    ]


@needs_cuda_python
def test_contexts_of_a_dynamic_engine_of_8_6_need_profile_sharing(machine):
    program = """
alone = open_engine(built(conv("n"), (1, 2, 4)), facts)
alone(images(2))
refused(alone.new_context, images(2))
alone.close()
shared = open_engine(built(conv("n"), (1, 2, 4), previews=["PROFILE_SHARING_0806"]), facts)
contexts = [shared.new_context(images(2)) for _ in range(2)]
same(contexts[0].results(), contexts[1].results())
shared.close()
print(alive())
"""
    assert machine.python(PRELUDE + program, version="8.6.0").out.splitlines() == [
        "TensorRT 8.6.0 lets only one context use this engine: it was built for one "
        "(PreviewFeature.PROFILE_SHARING_0806 was off); build it again",
        "[0, 0, 0, 0, 0, 0]",
    ]


@needs_cuda_python
def test_a_context_that_is_let_go_gives_its_memory_back(machine):
    program = """
runner = open_engine(built(conv()), facts)
before = alive()
runner.new_context(images(1)).run()
assert alive() == before, (alive(), before)
kept = runner.new_context(images(1))
runner.close()
refused(kept.run)
print(alive())
"""
    assert machine.python(PRELUDE + program).out.splitlines() == ["the engine was closed", "[0, 0, 0, 0, 0, 0]"]


@needs_cuda_python
def test_work_under_way_is_waited_for_before_its_memory_goes(machine):
    """As after Ctrl-C: the stand-in's device writes to that memory later."""
    program = """
from unittest import mock
runner = open_engine(built(conv("64")), facts)
context = runner.new_context(images(64))
with mock.patch.object(cuda.Stream, "wait", side_effect=KeyboardInterrupt):
    try:
        context.run()
    except KeyboardInterrupt:
        print("stopped")
with mock.patch.object(cuda.Stream, "wait", autospec=True, side_effect=cuda.Stream.wait) as waited:
    context.close()
    print(waited.call_count)
runner.close()
print(alive())
"""
    assert machine.python(PRELUDE + program).out.splitlines() == ["stopped", "1", "[0, 0, 0, 0, 0, 0]"]


# layers


@needs_cuda_python
@pytest.mark.parametrize("version", ["8.6.0", "10.9.0"])
def test_layers_are_timed_run_by_run(machine, version):
    program = """
from dataclasses import asdict
with open_engine(built(conv("2")), facts) as runner:
    found = runner.profile(images(2), runs=3, warm_up=1)
    assert all(ms > 0 for layer in found for ms in layer.ms)
    refused(runner.profile, images(1), 1, 0)
    print(json.dumps([asdict(layer) for layer in found]))
    assert [layer["Name"] for layer in json.loads(runner.inspect())["Layers"]] == [layer.name for layer in found]
"""
    said, told = machine.python(PRELUDE + program, version=version).out.splitlines()
    assert said == "the engine takes a batch of 2, not of 1; build it with --batch"
    layers = json.loads(told)
    assert [(layer["name"], layer["type"], layer["onnx"], len(layer["ms"]), layer["count"]) for layer in layers] == [
        ("/Conv_c + /Relu_y", "CaskConvolution", ["/Conv_c", "/Relu_y"], 3, 1),
        ("PWN(PWN(/Sigmoid_s), /Mul_z)", "PointWiseV2", ["/Sigmoid_s", "/Mul_z"], 3, 1),
    ]


@needs_cuda_python
def test_an_engine_with_names_only_is_profiled_by_those(machine):
    program = """
data = built(conv(), profiling_verbosity=trt.ProfilingVerbosity.LAYER_NAMES_ONLY)
with open_engine(data, facts) as runner:
    print(*((layer.type, layer.onnx) for layer in runner.profile(images(1), 1, 0)))
"""
    assert machine.python(PRELUDE + program).out == (
        "('unknown', ('/Conv_c', '/Relu_y')) ('unknown', ('/Sigmoid_s', '/Mul_z'))\n"
    )


# what cannot be run


@needs_cuda_python
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


@needs_cuda_python
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
    program = PRELUDE + "from trtdet.backends import obstacle\nprint(obstacle(facts))"
    assert machine.python(program, driver=False).out == "this machine has no CUDA driver\n"


@needs_cuda_python
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


@needs_cuda_python
@needs_rtx
@pytest.mark.tensorrt
@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ("b'vtrt' + bytes(12) + (500).to_bytes(8, 'little') + bytes(76)", "was cut short: 100 of 500 bytes"),
        ("b'vtrt'", "was cut short: 4 of 24 bytes"),
        ("b'standin' + bytes(99)", "is not an engine of TensorRT-RTX: it starts with b'stan'"),
    ],
)
def test_an_engine_of_rtx_is_measured_before_the_library_sees_it(machine, engine, said):
    program = (
        "import tensorrt_rtx\n"
        + f"refused(open_engine, {engine}, EngineFacts(library_named('tensorrt-rtx'), rtx, (89,)))"
    )
    done = machine.python(PRELUDE + program.replace("rtx, (", "tensorrt_rtx.__version__, ("))
    assert said in done.out


@needs_cuda_python
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


@needs_cuda_python
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
    same(runner(images(1)), OnnxRunner(conv())(images(1)))
refused(open_engine, data, replace(both, version_compatible=False))
"""
    assert machine.python(PRELUDE + program, file, version="10.9.0", sm=90).out.startswith(
        "the engine cannot be run here, as the engine was built with TensorRT 8.6.0"
    )


@needs_cuda_python
@pytest.mark.parametrize("batch", [None, (1, 2, 4)])
def test_an_engine_of_rtx_runs_and_is_captured(machine, batch):
    """Of a dynamic batch, only what was compiled for its shape at once may be captured."""
    program = f"""
model = conv("n" if {batch} else "2")
with open_engine(built(model, {batch}), facts) as runner:
    context = runner.new_context(images(2))
    assert context.captured
    context.run()
    same(context.results(), OnnxRunner(model)(images(2)))
    same(runner(images(1)), OnnxRunner(model)(images(1)))
    print(runner.run_info)
print(alive())
"""
    done = machine.python(RTX + program, rtx=True)
    assert done.out.splitlines() == ["TensorRT-RTX 1.7.1.116 (Stand-in GPU)", "[0, 0, 0, 0, 0, 0]"]


@needs_cuda_python
def test_an_engine_of_rtx_that_cannot_be_captured_says_so(machine):
    program = """
with open_engine(built(conv()), facts) as runner:
    same(runner(images(1)), OnnxRunner(conv())(images(1)))
    print(runner.run_info.without_graphs)
refused(open_engine, built(conv())[:-10], facts)
refused(open_engine, built(conv()), replace(facts, plugins=(Path(sys.executable),)))
"""
    said = machine.python(RTX + program, rtx=True, uncapturable=1).out.splitlines()
    assert said[0] == "TensorRT-RTX says that this engine cannot be captured"
    assert said[1].startswith("the engine was cut short: ")
    assert said[2] == "TensorRT-RTX 1.7.1.116 takes no plugin libraries; build the engine again"


# plugins


SILU = '"(float[1,3,16,16] x) => (float[1,3,16,16] y) { y = trt.plugins.TRT_SiLU<output_type = -1>(x) }"'


@needs_cuda_python
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
        same(runner(images(1)), OnnxRunner(net({SILU}))(images(1)))
print(alive())
"""
    said = machine.python(PRELUDE + program, library, file, version=version).out.splitlines()
    assert "Cannot find plugin: TRT_SiLU" in said[0]
    assert said[0].endswith("give the library that has the plugin with --plugin-library when building")
    assert said[1].startswith("the engine needs the plugin library")
    assert said[1].endswith("no.so', which does not exist")
    assert "text.so" in said[2]
    assert said[3] == "[0, 0, 0, 0, 0, 0]"


@needs_cuda_python
def test_plugins_in_the_engine_are_run_only_where_the_facts_say_so(machine, tmp_path):
    program = f"""
library = Path(sys.argv[1])
data = built(net({SILU}), plugins=[library], plugins_to_serialize=[str(library)])
refused(open_engine, data, facts)
with open_engine(data, replace(facts, embedded=True)) as runner:
    same(runner(images(1)), OnnxRunner(net({SILU}))(images(1)))
"""
    done = machine.python(PRELUDE + program, plugin_library(tmp_path, "TRT_SiLU"))
    assert "getEngineHostCodeAllowed()" in done.out


@needs_cuda_python
@pytest.mark.parametrize("embedded", [False, True])
def test_the_layers_of_an_engine_with_plugins_are_listed(machine, tmp_path, embedded):
    """The runtime that the inspector belongs to has a registry of its own."""
    program = f"""
from trtdet.backends import BuildRequest, EngineOptions, choose
options = EngineOptions(embed_plugins={embedded})
made = choose("tensorrt").build(BuildRequest(net({SILU}), plugins=(Path(sys.argv[1]),), options=options))
print(len(json.loads(made.layers)["Layers"]))
"""
    assert machine.python(PRELUDE + program, plugin_library(tmp_path, "TRT_SiLU")).out == "1\n"


@needs_cuda_python
def test_rtx_is_never_given_a_library_of_plugins(machine, tmp_path):
    """With a creator registered it ends the process, when it parses."""
    program = "refused(open_engine, built(conv('2')), replace(facts, plugins=(Path(sys.argv[1]),)))"
    done = machine.python(RTX + program, plugin_library(tmp_path, "TRT_SiLU"), rtx=True)
    assert "takes no plugin libraries; build the engine again" in done.out


# memory and failures


@needs_cuda_python
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


@needs_cuda_python
def test_a_device_that_fails_is_said_and_everything_let_go(machine):
    program = """
runner = open_engine(built(conv()), facts)
refused(runner, images(1))
runner.close()
"""
    said = machine.python(PRELUDE + program, fault=700).out
    assert said.startswith("the GPU failed at what it ran (cuStreamSynchronize: error 700")


@needs_cuda_python
def test_what_is_never_closed_ends_with_the_process(machine):
    program = (
        PRELUDE
        + "runner = open_engine(built(conv()), facts); context = runner.new_context(images(1)); runner(images(1))"
    )
    done = machine.python(program + "\nprint(runner.run_info)", forked=False)
    assert done.out == "TensorRT 10.9.0 (Stand-in GPU)\n"
    assert done.err == ""


# the stand-in itself


def surface(version: str) -> dict[str, list[str]]:
    """The public names on each public class of the stand-in; with "rtx", as TensorRT-RTX."""
    program = """
import importlib, json, sys
sys.path.insert(0, sys.argv[1])
module = importlib.import_module(sys.argv[2])
classes = {name: one for name, one in vars(module).items() if isinstance(one, type) and not name.startswith("_")}
own = lambda one: [*vars(one), *getattr(one, "__members__", ())]
print(json.dumps({name: sorted({key for key in own(one) if not key.startswith("_")}) for name, one in classes.items()
                  if one.__module__ == sys.argv[2]}))
"""
    environment = {**os.environ, "CUDA_STANDIN_TENSORRT": version}
    where = (FOLDER / "with_rtx", "tensorrt_rtx") if version == "rtx" else (FOLDER, "tensorrt")
    command = [sys.executable, "-c", program, *map(str, where)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


ONLY_BEFORE_11 = {
    "the calibrators went in 11": {
        "CalibrationAlgoType",
        "IInt8Calibrator",
        "IInt8EntropyCalibrator",
        "IInt8EntropyCalibrator2",
        "IInt8LegacyCalibrator",
        "IInt8MinMaxCalibrator",
        "IBuilderConfig.int8_calibrator",
        "IBuilderConfig.set_calibration_profile",
        "ITensor.dynamic_range",
        "ITensor.set_dynamic_range",
    },
    "networks are always strongly typed from 11 on": {
        "BuilderFlag.FP16",
        "BuilderFlag.INT8",
        "BuilderFlag.OBEY_PRECISION_CONSTRAINTS",
        "BuilderFlag.PREFER_PRECISION_CONSTRAINTS",
        "BuilderFlag.STRICT_TYPES",
        "Builder.platform_has_fast_fp16",
        "Builder.platform_has_fast_int8",
        "ILayer.precision",
        "ILayer.precision_is_set",
    },
    "batches are always explicit, and profiles always shared, from 11 on": {
        "NetworkDefinitionCreationFlag.EXPLICIT_BATCH",
        "PreviewFeature.PROFILE_SHARING_0806",
    },
}


@needs_rtx
@pytest.mark.tensorrt
@pytest.mark.parametrize("version", ["8.6.0", "10.9.0", "11.1.0", "rtx"])
def test_the_stand_in_has_no_name_that_the_real_library_lacks(version):
    import tensorrt_rtx

    found = surface(version)
    assert {"Runtime", "ICudaEngine", "IExecutionContext", "IBuilderConfig"} < found.keys()
    names = {
        name if not hasattr(tensorrt_rtx, name) else f"{name}.{key}"
        for name, keys in found.items()
        for key in keys
        if not hasattr(getattr(tensorrt_rtx, name, None), key)
    }
    allowed = set() if version in ("11.1.0", "rtx") else set().union(*ONLY_BEFORE_11.values())
    assert sorted(names - allowed) == []
