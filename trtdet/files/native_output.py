"""Standard output kept from what native libraries print, which would stand between the lines of a command's JSON."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def without_native_output() -> Iterator[None]:
    """What is written to file descriptor 1 within the block is lost; Python's own output before it is not.

    Not for blocks in which another thread prints.
    """
    with suppress(AttributeError, OSError, ValueError):  # there may be no standard output, or it is closed
        sys.stdout.flush()
    try:
        kept = os.dup(1)
    except OSError:
        yield
        return
    _flush()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        _flush()
        os.dup2(kept, 1)
        os.close(nowhere)
        os.close(kept)


def _flush() -> None:
    """C's standard output, whose buffers would be written when the block has ended."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).fflush(None)
