"""Unexpected exceptions: one line for the user, and a file with the traceback."""

from __future__ import annotations

import os
import platform
import re
import shlex
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from trtdet import __version__
from trtdet.errors import one_line

RAISE = "TRTDET_RAISE"
"""Environment variable for developers; if it is set, unexpected exceptions are raised unchanged."""


def write_details(error: BaseException) -> Path | None:
    """Writes traceback, command and versions into a new temporary file; None if that fails, as on a full disk."""
    part = ""
    try:
        trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        command = shlex.join(sys.argv)
        text = f"trtdet {__version__}, Python {platform.python_version()}, {platform.platform()}\n{command}\n\n{trace}"
        handle, part = tempfile.mkstemp(prefix=time.strftime("trtdet-error-%Y%m%d-%H%M%S-"), suffix=".part")
        with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
        return Path(part).rename(Path(part).with_suffix(".txt"))
    except (OSError, MemoryError, RecursionError):
        if part:
            with suppress(OSError):
                Path(part).unlink()
        return None


def interrupted(error: BaseException) -> bool:
    """Whether Ctrl-C caused the exception; a compiled module interrupted during import raises ImportError."""
    return any(isinstance(cause, KeyboardInterrupt) for cause in _causes(error))


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The exception, then each that it was raised from or in the handling of."""
    visited: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in visited:
        yield cause
        visited.add(id(cause))
        cause = cause.__cause__ or cause.__context__


_NO_MEMORY = re.compile(
    "failed to map segment|cannot allocate memory|bad[ _]alloc|insufficient memory|failed to allocate"
    "|can't start new thread",
    re.IGNORECASE,
)
"""What the dynamic loader, onnxruntime, OpenCV and Python say for lack of memory in exceptions of other types."""


def lacks_memory(error: BaseException) -> str | None:
    """One line if the exception is for lack of memory, which is no bug; else None."""
    for cause in _causes(error):
        text = _message(cause)
        if isinstance(cause, MemoryError) or _NO_MEMORY.search(text):
            said = f" ({text})" if text else ""
            return (
                f"not enough memory{said}; close other programs, raise the limit of this process (ulimit -v), or take "
                "a machine with more"
            )
    return None


def _message(error: BaseException) -> str:
    try:
        return one_line(str(error))
    except Exception:
        return "its message cannot be printed"


def describe(error: BaseException, details: Path | None) -> str:
    """One line: the type, the message, and the file with the details."""
    message = _message(error) or "no message"
    if details is not None:
        # What the machine refuses is no bug; anything else should have been a TrtdetError.
        machine = isinstance(error, OSError)
        where = f"the details are in {details}" if machine else f"please report it with the details in {details}"
        return f"unexpected {type(error).__name__}: {message}; {where}"
    frames = traceback.extract_tb(error.__traceback__, limit=-1)
    place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"unexpected {type(error).__name__}{place}: {message}; the details could not be written into a file"
