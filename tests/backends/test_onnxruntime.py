"""Models that onnxruntime runs."""

import subprocess
import sys

import numpy as np
import pytest
from small_models import net

from trtdet.backends import OnnxRunner
from trtdet.errors import BackendError


def test_a_small_batch_is_filled_up_and_cut_back():
    runner = OnnxRunner(net("(float[4,3,2,2] x) => (float[4,3,2,2] y) { y = Neg(x) }"))
    assert (runner.input, runner.batch, runner.outputs) == ("x", 4, ("y",))
    images = np.random.default_rng(0).normal(size=(3, 3, 2, 2)).astype(np.float32)
    np.testing.assert_array_equal(runner(images)["y"], -images)


def test_the_first_input_may_be_a_scalar():
    """As a part of a model has where it begins behind the computation of a shape."""
    runner = OnnxRunner(net("(int64 n, float[2,3] x) => (float[2,3] y) { c = Cast<to = 1>(n) y = Mul(x, c) }"))
    assert runner.batch is None
    given = {"n": np.array(3), "x": np.ones((2, 3), np.float32)}
    np.testing.assert_array_equal(runner.feed(given)["y"], np.full((2, 3), 3, np.float32))


def test_a_model_that_onnxruntime_refuses_is_one_line():
    with pytest.raises(BackendError, match=r"^onnxruntime [\d.]+ cannot load the model: .*") as caught:
        OnnxRunner(b"not a model")
    assert "\n" not in str(caught.value)


def test_a_model_that_fails_while_it_runs_is_one_line():
    """Only a run shows that the elements do not fit the shape."""
    model = net("(float[1,3,4,4] x) => (float[1,n,c,d] y) { y = Reshape(x, t) }", t=np.array([1, 3, 5, 5]))
    images = np.zeros((1, 3, 4, 4), np.float32)
    runner = OnnxRunner(model)
    for run in (runner, runner.new_context, lambda given: runner.profile(given, 1, 0)):
        with pytest.raises(BackendError, match=r"^onnxruntime [\d.]+ cannot run the model: .*") as caught:
            run(images)  # type: ignore[operator]
        assert "\n" not in str(caught.value)


def test_operators_of_plugins_are_loaded_without_torch_and_leave_the_environment_alone():
    program = (
        "import os, sys\n"
        "from trtdet.backends.onnxruntime import _custom_operators\n"
        "before = dict(os.environ)\n"
        "_custom_operators()\n"
        "print('torch' in sys.modules, os.environ == before)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == "False True\n", done.stderr


def test_for_scores_a_model_is_computed_node_by_node():
    """Fused or laid out for the CPU, sums are taken in another order."""
    model = net(
        "(float[1,16,8,8] x) => (float[1,16,8,8] y) { c = Conv<kernel_shape = [1, 1]>(x, w) y = Relu(c) }",
        w=np.random.default_rng(0).normal(size=(16, 16, 1, 1)).astype(np.float32),
    )
    images = np.random.default_rng(1).normal(size=(1, 16, 8, 8)).astype(np.float32)
    runner = OnnxRunner(model)
    written = runner.as_written()
    np.testing.assert_allclose(written(images)["y"], runner(images)["y"], atol=1e-5)
    kernels, as_written = ([layer.type for layer in each.profile(images, 1, 0)] for each in (runner, written))
    assert as_written == ["Conv", "Relu"]
    assert "Relu" not in kernels
