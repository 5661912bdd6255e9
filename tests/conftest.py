import errno
import gc
import importlib.util
import os
import shutil
import signal
from functools import cache
from pathlib import Path

import onnx
import pytest
from models import SMALL_MODEL, small_detector
from once import Once
from standin.forked import Forks
from standin.machine import Machine

from trtdet.backends import OnnxRunner
from trtdet.errors import BackendError
from trtdet.evaluation import plausibility


def pytest_configure(config: pytest.Config) -> None:
    """Lets models that have learnt nothing be what they are, and gives each of pytest-xdist's workers cores of its own:
    threads of one that wait for the other's are slow. Processes of tests can be interrupted, also where the tests run
    in the background of a shell, which makes all of them ignore Ctrl-C."""
    config.addinivalue_line("filterwarnings", "ignore::trtdet.errors.ImplausibleDetections")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is not None and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        workers = int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
        os.sched_setaffinity(0, set(cores[int(worker.removeprefix("gw")) :: workers]) or set(cores))


LONG = ("test_pages.py", "workflow", "service", "building", "experiments", "plans", "audit")
"""Files and folders of which a worker has long."""


SLOW_LIMIT = 1800
"""Seconds that a test marked slow or benchmark may take on a busy machine; setup.cfg has the limit of the others."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first, so that no worker begins one when the others have nothing left to do, and a time limit each."""
    without = importlib.util.find_spec("tensorrt_rtx") is None
    for item in items:
        if without and item.get_closest_marker("tensorrt"):
            item.add_marker(pytest.mark.skip(reason="TensorRT-RTX is not installed: pip install 'trtdet[rtx]'"))
        slow = item.get_closest_marker("slow") or item.get_closest_marker("benchmark")
        if slow and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_LIMIT))

    def place(item: pytest.Item) -> int:
        parts = item.path.parts
        return next((rank for rank, name in enumerate(LONG) if name in parts), len(LONG))

    items.sort(key=place)


def pytest_collection_finish() -> None:
    """Garbage is collected less often: graphs are many objects, and looking at all of them again and again takes a
    sixth of the time of tests that rewrite models. Those of the tests themselves are not looked at."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.section("not tested here")
    terminalreporter.line(
        "What a GPU computes, and how fast: engines were run by the stand-in of tests/standin, which runs their models "
        "on the CPU. Engines of TensorRT-RTX were built and read, not run."
    )


@cache
def runs(version: int) -> bool:
    """Whether the installed onnxruntime runs models of an ONNX opset."""
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": {version}]> g (float[1] x) => (float[1] y) {{ y = Abs(x) }}'
    )
    try:
        OnnxRunner(model, alone=True)
    except BackendError:
        return False
    return True


def pytest_runtest_setup(item):
    for mark in item.iter_markers("opset"):
        (version,) = mark.args
        if onnx.defs.onnx_opset_version() < version:
            pytest.skip(f"onnx {onnx.__version__} does not know opset {version}")
        run = min(version, 26)  # the newest that any release runs
        if not runs(run):
            pytest.skip(f"onnxruntime does not run opset {run}")


_looks = plausibility._guarded


@pytest.fixture(scope="session", autouse=True)
def no_input_check():
    """Nobody looks whether a model detects: most models of the tests do not, and looking takes longer than most tests.

    Commands that are started as processes of their own do look.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plausibility, "_guarded", lambda work: plausibility.Plausibility())
        yield


@pytest.fixture
def input_check(monkeypatch):
    """In this test the input is checked as ever."""
    monkeypatch.setattr(plausibility, "_guarded", _looks)


@pytest.fixture(scope="session")
def shared_data():
    """Real images, annotations and models, which lie beside a checkout and are not part of it."""
    folder = Path(__file__).resolve().parent.parent.parent / "shared" / "data"
    if not (folder / "coco").is_dir():
        pytest.skip("needs ../shared/data (COCO images and trained models), which is absent here")
    return folder


@pytest.fixture
def full_disk(monkeypatch):
    """Once it is called, nothing more can be flushed to disk."""

    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    return lambda: monkeypatch.setattr(os, "fsync", fail)


@pytest.fixture
def ray_workers():
    """Two Ray workers on this machine."""
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'trtdet[ray]'")
    ray.init(
        num_cpus=2,
        object_store_memory=200_000_000,
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
    )
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def once(tmp_path_factory):
    """What many tests read is made once for all workers."""
    base = tmp_path_factory.getbasetemp()
    return Once((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "once")


@pytest.fixture(scope="session")
def small_model():
    """A detector of ten convolutions for the configuration ``shapes``, for what does not ask how well it detects."""
    return SMALL_MODEL


@pytest.fixture(scope="session")
def small_dynamic(once):
    """The same with an open batch."""
    return once("small-dynamic.onnx", lambda path: onnx.save(small_detector("batch"), path))


@pytest.fixture(scope="session")
def machine(once):
    """A machine with a GPU and TensorRT, both stand-ins."""
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler for the stand-in of the CUDA driver: apt-get install gcc")
    forks = Forks()
    yield Machine(once("machine", Machine.make), forks)
    forks.close()
