"""Work in a forked process, which begins with everything imported that its parent has imported."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn


def become(work: Callable[[], int], output: Path, errors: Path | None = None) -> NoReturn:
    """Does the work in a process that was just forked, and ends the process with its status, 99 for an exception.

    Standard input is empty; standard output goes to a new file, and errors to another one, or with None to the same.
    """
    status = 99
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), 1)
        os.dup2(1 if errors is None else os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), 2)
        status = int(work())
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Libraries are not shut down: onnxruntime would wait for a thread that was not forked.
        os._exit(status)
