"""Several runs at a time on the CPU give the results of runs after each other, in their order."""

import gc
import threading
import weakref

import numpy as np
import onnx
import pytest

from trtdet.backends import OnnxRunner, at_once, side_by_side
from trtdet.errors import BackendError


@pytest.fixture
def four_cores(monkeypatch):
    monkeypatch.setattr("trtdet.backends.onnxruntime.cores", lambda: 4)


@pytest.fixture
def runner(small_model):
    return OnnxRunner(small_model.read_bytes())


@pytest.fixture
def images(runner):
    height, width = runner.model.graph.input[0].type.tensor_type.shape.dim[2:]
    return np.random.default_rng(0).random((12, 1, 3, height.dim_value, width.dim_value), np.float32)


def test_results_are_those_of_single_runs_to_the_bit(runner, images, four_cores):
    assert at_once(runner) == 4
    threads = set()

    def work(runner, image):
        threads.add(threading.get_ident())
        return runner(image)

    found = list(side_by_side(runner, work, iter(images)))
    assert threading.get_ident() not in threads
    for image, outputs in zip(images, found, strict=True):
        alone = runner(image)
        assert alone.keys() == outputs.keys()
        assert all(np.array_equal(alone[name], outputs[name]) for name in alone)


def test_runs_overlap(runner, four_cores):
    both = threading.Barrier(2, timeout=30)
    assert list(side_by_side(runner, lambda _, item: (both.wait(), item)[1], iter("abcd"))) == list("abcd")


def test_what_is_no_model_on_the_cpu_runs_in_the_thread_of_the_caller(four_cores):
    def engine(images):
        return threading.get_ident()

    assert at_once(engine) == 1
    assert set(side_by_side(engine, lambda run, item: run(item), iter(range(5)))) == {threading.get_ident()}


def test_on_one_core_nothing_is_made(runner, images, monkeypatch):
    monkeypatch.setattr("trtdet.backends.onnxruntime.cores", lambda: 1)
    used = list(side_by_side(runner, lambda run, _: run, iter(images)))
    assert all(each is runner for each in used)


def test_an_error_comes_in_the_place_of_its_item(runner, images, four_cores):
    def work(run, number):
        if number == 5:
            raise ValueError("five")
        return number

    found = []
    with pytest.raises(ValueError, match="five"):
        for each in side_by_side(runner, work, iter(range(12))):
            found.append(each)
    assert found == [0, 1, 2, 3, 4]


def test_a_session_with_other_threads_is_made_once(runner):
    assert runner.with_threads(1) is runner.with_threads(1)
    assert runner.as_written().with_threads(1) is not runner.with_threads(1)


def test_a_model_that_is_only_scored_is_loaded_once(runner, images, small_model, four_cores, monkeypatch):
    expected = [runner.as_written()(image) for image in images]
    loads, load = [], OnnxRunner._load
    monkeypatch.setattr(OnnxRunner, "_load", lambda *arguments: (loads.append(1), load(*arguments))[1])
    written = OnnxRunner(small_model.read_bytes(), written=True)
    assert written.as_written() is written
    assert (written.input, written.inputs, written.outputs) == (runner.input, runner.inputs, runner.outputs)
    assert (written.batch, loads) == (runner.batch, [])
    scored = side_by_side(written, lambda run, image: run(image), iter(images))
    for found, outputs in zip(scored, expected, strict=True):
        assert all(np.array_equal(found[name], outputs[name]) for name in outputs)
    assert loads == [1]


def test_a_model_that_is_only_scored_and_cannot_be_loaded_is_refused_at_its_first_run(small_model):
    model = onnx.load(small_model)
    model.graph.node[0].op_type = "Unheard"
    runner = OnnxRunner(model, written=True)
    with pytest.raises(BackendError, match="Unheard"):
        runner.with_threads(1)
    with pytest.raises(BackendError, match="Unheard"):
        OnnxRunner(model)


def test_a_runner_that_nothing_uses_is_gone_with_all_its_sessions(small_model):
    gc.disable()  # sessions hold memory that the collector of cycles does not know of
    try:
        runner = OnnxRunner(small_model.read_bytes()).as_written()
        gone = weakref.ref(runner), weakref.ref(runner.with_threads(1))
        del runner
        assert [each() for each in gone] == [None, None]
    finally:
        gc.enable()
