"""The messages of TensorRT: those that are kept for errors, and what to do about those that are known."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from functools import cache
from typing import Any

Advice = Sequence[tuple[str, str]]
"""Patterns of messages and what to do where one is found, the more specific first."""


def advised(words: str, table: Advice, beside: Sequence[str] = ()) -> str:
    """A library's message, followed by what to do about it where that is known.

    Args:
        words: the message.
        table: patterns, and what to do where one is found.
        beside: other messages, which are searched but not quoted.
    """
    said = "\n".join((words, *beside))
    return next((f"{words}; {advice}" for pattern, advice in table if re.search(pattern, said, re.IGNORECASE)), words)


class _Errors:
    """The last errors that TensorRT logged. It keeps a process's first logger, so each library has one."""

    def __init__(self) -> None:
        self.count = 0
        self._kept: deque[str] = deque(maxlen=20)

    def note(self, message: str) -> None:
        self._kept.append(message)
        self.count += 1

    def since(self, mark: int) -> list[str]:
        """The messages after the first ``mark``, as many of them as are kept."""
        return list(self._kept)[-(self.count - mark) :] if self.count > mark else []


@cache
def logger_of(trt: Any) -> Any:
    """The logger of a library, which keeps its errors."""

    class Logger(trt.ILogger, _Errors):  # type: ignore[misc]  # the base is known only at run time
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            _Errors.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR):
                self.note(message)

    return Logger()
