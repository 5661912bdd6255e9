"""Suppresses the prints of native libraries, which would mix with a command's JSON on standard output."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def without_native_output() -> Iterator[None]:
    """Discards what its block writes to file descriptor 1; do not use it while another thread prints."""
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
    """Flushes C's standard output, whose buffers would otherwise be written after the block."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).fflush(None)
