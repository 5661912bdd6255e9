"""Files that many tests read and none changes, made once for all workers of a run."""

import fcntl
import shutil
from collections.abc import Callable
from pathlib import Path


class Once:
    """``once(name, make)`` gives the file or folder of that name, which ``make(path)`` wrote for the first who asked;
    others wait for it meanwhile."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._folder = folder

    def __call__(self, name: str, make: Callable[[Path], object]) -> Path:
        path, done = self._folder / name, self._folder / f"{name}.done"
        with (self._folder / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                # What a failure left; the next who asks gets the same failure.
                if path.is_dir():
                    shutil.rmtree(path)
                make(path)
                done.touch()
        return path
