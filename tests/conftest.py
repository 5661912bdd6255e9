from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from standin.forked import Forks
from standin.machine import Machine

Once = Callable[[str, Callable[[Path], object]], Path]


def pytest_configure() -> None:
    """Gives each of pytest-xdist's workers cores of its own: threads of one that wait for the other's are slow."""
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is not None and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        workers = int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
        os.sched_setaffinity(0, set(cores[int(worker.removeprefix("gw")) :: workers]) or set(cores))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with long tests first, so that no worker begins one when the others have nothing left to do."""
    long = {item.path for item in items if item.get_closest_marker("slow") or "workflow" in item.path.parts}
    items.sort(key=lambda item: item.path not in long)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real images, annotations and models, which lie beside a checkout and are not part of it."""
    folder = Path(__file__).resolve().parent.parent.parent / "shared" / "data"
    if not (folder / "coco").is_dir():
        pytest.skip("needs ../shared/data (COCO images and trained models), which is absent here")
    return folder


@pytest.fixture
def ray_workers() -> Iterator[None]:
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
def once(tmp_path_factory: pytest.TempPathFactory) -> Once:
    """Makes what many tests read, once for all workers: ``once(name, make)`` gives the folder or file of that name,
    which ``make(path)`` wrote for the first that asked; others wait for it."""
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "once"
    shared.mkdir(exist_ok=True)

    def once(name: str, make: Callable[[Path], object]) -> Path:
        path, done = shared / name, shared / f"{name}.done"
        with (shared / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                if path.is_dir():
                    shutil.rmtree(path)
                make(path)
                done.touch()
        return path

    return once


@pytest.fixture(scope="session")
def machine(once: Once) -> Iterator[Machine]:
    """A machine with a GPU and TensorRT, both stand-ins."""
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler for the stand-in of the CUDA driver: apt-get install gcc")
    forks = Forks()
    yield Machine(once("machine", Machine.make), forks)
    forks.close()
