"""Running engines on the stand-ins for TensorRT and the CUDA driver, with the real cuda-python."""

import json

import pytest
from engine_programs import PRELUDE, needs_cuda_python

pytestmark = needs_cuda_python


@pytest.mark.parametrize("version", ["8.6.0", "10.9.0", "11.1.0"])
@pytest.mark.parametrize("graphs", [True, False])
def test_an_engine_gives_what_its_model_does_and_leaves_nothing(machine, version, graphs):
    program = f"""
model = conv("4")
with open_engine(built(model), facts, graphs={graphs}) as runner:
    assert (runner.input, runner.outputs) == ("x", ("y", "z"))
    assert (runner.batch, runner.largest_batch) == (4, 4)
    for count in (4, 4, 4, 1, 3):
        given = images(count, seed=count)
        same(runner(given), computed(model, given))
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


def test_a_dynamic_batch_is_filled_to_the_smallest_and_refused_over_the_largest(machine):
    program = """
model = conv("n")
with open_engine(built(model, (2, 4, 6)), facts) as runner:
    assert (runner.batch, runner.largest_batch) == (None, 6)
    for count in (4, 1, 6, 2, 5, 1):
        given = images(count, seed=count)
        same(runner(given), computed(model, given))
    refused(runner, images(7))
    refused(runner.new_context, images(1))
    for count in (2, 6):
        context = runner.new_context(images(count))
        assert context.captured
        same(context.results(), computed(model, images(count)))
    print(runner.run_info)
"""
    assert machine.python(PRELUDE + program).out.splitlines() == [
        "the engine takes 6 images at once, not 7; build it with --batch",
        "the engine takes a batch of 2 to 6, not of 1; build it with --batch",
        "TensorRT 10.9.0 (Stand-in GPU)",
    ]


def test_outputs_keep_their_types_and_a_half_input_is_given_floats(machine):
    kinds = {"float16": 10, "int8": 3, "int32": 6, "int64": 7, "bool": 9, "uint8": 2}
    outputs = ", ".join(f"{kind}[1,3,16,16] {kind}_y" for kind in kinds)
    nodes = " ".join(f"{kind}_y = Cast<to = {number}>(x)" for kind, number in kinds.items())
    program = f"""
model = net("(float[1,3,16,16] x) => ({outputs}) {{ {nodes} }}")
with open_engine(built(model), facts) as runner:
    given = np.abs(images(1)) * 20
    same(runner(given), computed(model, given))
    print(*(value.dtype for value in runner(given).values()))
model = net("(float16[1,3,16,16] x) => (float16[1,3,16,16] y) {{ y = Neg(x) }}")
with open_engine(built(model), facts) as runner:
    np.testing.assert_array_equal(runner(images(1))["y"], -images(1).astype(np.float16))
"""
    assert machine.python(PRELUDE + program).out == " ".join(kinds) + "\n"


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


def test_images_of_a_single_pixel_or_channel_are_taken(machine):
    program = """
for size in ("3,1,1", "1,16,16"):
    with open_engine(built(net(f"(float[1,{size}] x) => (float[1,{size}] y) {{ y = Neg(x) }}")), facts) as runner:
        given = np.ones((1, *map(int, size.split(","))), np.float32)
        same(runner(given), {"y": -given})
print(alive())
"""
    assert machine.python(PRELUDE + program).out == "[0, 0, 0, 0, 0, 0]\n"


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
        same(found[seed], computed(model, images(2, seed)))
        same(found[seed, "called"], found[seed])
print(alive())
"""
    assert machine.python(PRELUDE + program, pycuda=pycuda).out == "[0, 0, 0, 0, 0, 0]\n"


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
    same(context.results(), computed(model, images(1, seed=1)))
    assert not np.array_equal(first["y"], context.results()["y"])
    context.fill(images(1, seed=2))
    assert context.compute() > 0
    context.run(transfers=False)
    context.run()
    same(context.results(), computed(model, images(1, seed=2)))
"""
    machine.python(PRELUDE + program)


@pytest.mark.parametrize("graphs", [True, False])
def test_the_launch_of_a_run_is_no_part_of_its_computing_time(machine, graphs):
    """An event on an idle stream happens when it is recorded, so that what follows, the launch too, is timed."""
    program = f"""
from unittest import mock
from trtdet.backends.tensorrt.engine import EngineContext
with open_engine(built(conv()), facts, graphs={graphs}) as runner:
    context = runner.new_context(images(1))
    done = []
    def noting(name, of):
        real = getattr(of, name)
        def call(self, *given):
            done.append(name.lstrip("_"))
            return real(self, *given)
        return mock.patch.object(of, name, call)
    with noting("record", cuda.Stream), noting("copy_in", cuda.Stream), noting("copy_out", cuda.Stream), \\
            noting("wait", cuda.Stream), noting("_launch", EngineContext):
        for call in (context.compute, context.run, lambda: context.run(False)):
            assert call() > 0
            print(*done)
            done.clear()
"""
    assert machine.python(PRELUDE + program).out.splitlines() == [
        "launch record launch record wait",
        "record copy_in launch copy_out copy_out record wait",
        "record launch record wait",
    ]


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
    same(context.results(), computed(model, images(1)))
    same(runner(images(1)), computed(model, images(1)))
    print(runner.run_info.without_graphs)
    print(runner.run_info)
print(alive())
"""
    assert machine.python(PRELUDE + program, **settings).out.splitlines() == [
        reason,
        f"TensorRT 10.9.0 (Stand-in GPU), without CUDA graphs, as {reason}",
        "[0, 0, 0, 0, 0, 0]",
    ]


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


def test_an_engine_with_names_only_is_profiled_by_those(machine):
    program = """
data = built(conv(), profiling_verbosity=trt.ProfilingVerbosity.LAYER_NAMES_ONLY)
with open_engine(data, facts) as runner:
    print(*((layer.type, layer.onnx) for layer in runner.profile(images(1), 1, 0)))
"""
    assert machine.python(PRELUDE + program).out == (
        "('unknown', ('/Conv_c', '/Relu_y')) ('unknown', ('/Sigmoid_s', '/Mul_z'))\n"
    )
