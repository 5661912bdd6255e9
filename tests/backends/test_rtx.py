"""Builds with TensorRT-RTX itself."""

import hashlib
import shutil
import signal
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from engine_programs import rtx_marks
from small_models import conv, net

from trtdet.backends import BuildRequest, choose
from trtdet.backends.tensorrt import builder as tensorrt
from trtdet.config import load_config
from trtdet.errors import BackendError
from trtdet.exporter import SHAPES_MODEL
from trtdet.passes import Options, load_model, rewrite
from trtdet.passes.provenance import Origin, origin_of, put

pytestmark = rtx_marks


@pytest.fixture
def backend():
    return choose("tensorrt-rtx")


def test_an_engine_with_a_loop_has_the_same_bytes_every_time(backend):
    config = load_config("shapes").with_nms(pre_nms_topk=300, max_detections=20)
    model = rewrite(load_model(SHAPES_MODEL), Options(config, "native")).model
    assert "Loop" in [node.op_type for node in model.graph.node]
    built = [hashlib.sha256(backend.build(BuildRequest(model, (86,))).engine).hexdigest() for _ in range(2)]
    assert built[0] == built[1]


def test_an_engine_has_the_same_bytes_wherever_the_package_is_installed(backend, tmp_path, monkeypatch):
    model = rewrite(load_model(SHAPES_MODEL), Options(load_config("shapes"), "host")).model
    script, built = Path(tensorrt.__file__).with_name("build_process.py"), set()
    for length in (1, 9, 17, 40, 77, 120):
        folder = tmp_path / ("x" * length)
        folder.mkdir()
        shutil.copy(script, folder)
        monkeypatch.setattr(tensorrt, "__file__", str(folder / "builder.py"))
        monkeypatch.setenv("PYTHONPATH", str(folder))
        built.add(hashlib.sha256(backend.build(BuildRequest(model, (86,))).engine).hexdigest())
    assert len(built) == 1


def test_the_registry_of_provenance_leaves_no_trace_in_an_engine(backend):
    model = conv()
    without = backend.build(BuildRequest(model, (86,))).engine
    put(model, {node.name: Origin.DECODE for node in model.graph.node})
    assert origin_of(model)
    assert backend.build(BuildRequest(model, (86,))).engine == without
    assert origin_of(model)


def test_an_engine_names_its_targets_in_its_header(backend):
    one, several = (backend.build(BuildRequest(conv(), sms)) for sms in ((86,), (80, 89)))
    assert (one.sms, several.sms) == ((86,), (80, 89))
    masks = [int.from_bytes(built.engine[32:36], "little") for built in (one, several)]
    assert masks[0].bit_count() == 1
    assert masks[1].bit_count() == 2
    assert backend.build(BuildRequest(conv())).sms == backend.capabilities.default_sms


def test_a_target_it_cannot_build_for_is_named(backend):
    said = r"cannot build for compute capability 90; allowed: 75, 80, 86, 89, 120, 121"
    with pytest.raises(BackendError, match=said):
        backend.build(BuildRequest(conv(), (86, 90)))


def test_the_parsers_own_words_are_in_the_error(backend):
    model = net("(float[1,3,16,16] x) => (float[1,3,16,16] y) { y = example.Nothing(x) }")
    model.opset_import.append(onnx.helper.make_opsetid("example", 1))
    with pytest.raises(BackendError, match="the parser refused the model.*Nothing"):
        backend.build(BuildRequest(model, (86,)))


def test_topk_over_the_limit_is_refused_by_the_builder_as_the_row_says(backend):
    limit = backend.capabilities.max_topk
    assert limit is not None

    def top(k: int) -> onnx.ModelProto:
        text = f"(float[1,9000] x) => (float[1,{k}] v, int64[1,{k}] i) {{ v, i = TopK<axis = 1>(x, k) }}"
        return net(text, k=np.array([k], np.int64))

    assert backend.build(BuildRequest(top(limit), (86,))).engine
    with pytest.raises(BackendError):
        backend.build(BuildRequest(top(limit + 1), (86,)))


@pytest.mark.parametrize("operator", ["NonMaxSuppression", "NonZero"])
def test_the_operators_called_missing_are_missing(backend, operator):
    """The row of capabilities is held to the library itself."""
    if operator == "NonZero":
        model = net("(float[1,9] x) => (int64[2,n] y) { y = NonZero(x) }")
    else:
        limits = {"m": np.array([5], np.int64), "i": np.array([0.5], np.float32), "s": np.array([0.1], np.float32)}
        text = "(float[1,9,4] b, float[1,1,9] c) => (int64[n,3] y) { y = NonMaxSuppression(b, c, m, i, s) }"
        model = net(text, **limits)
    assert operator in backend.capabilities.unsupported(model)
    with pytest.raises(BackendError):
        backend.build(BuildRequest(model, (86,)))


def test_a_builder_that_ends_its_process_is_an_error_here(backend, monkeypatch, tmp_path):
    program = """
import json, os, signal, sys
print(json.dumps("[W] half way"), flush=True)
print("no memory", file=sys.stderr, flush=True)
os.kill(os.getpid(), signal.SIGABRT)
"""
    (tmp_path / "build_process.py").write_text(program)
    monkeypatch.setattr(tensorrt, "__file__", str(tmp_path / "tensorrt.py"))
    how = f"ended while building, with signal {int(signal.SIGABRT)}: no memory"
    with pytest.raises(BackendError, match=how) as failed:
        backend.build(BuildRequest(conv(), (86,)))
    assert failed.value.messages == ("[W] half way", "no memory", failed.value.problem.partition(": ")[2])


def test_a_build_says_how_far_it_is(backend):
    said: list[tuple[str, int, int]] = []
    built = backend.build(BuildRequest(conv(), (86,)), lambda *one: said.append(one))
    assert built.engine
    assert {(stage, total) for stage, _, total in said} == {
        (f"building the engine with tensorrt-rtx {choose('tensorrt-rtx').capabilities.version}", 100)
    }
    percents = [done for _, done, _ in said]
    assert len(percents) > 3
    assert percents == sorted(set(percents))
    assert percents[-1] <= 99
