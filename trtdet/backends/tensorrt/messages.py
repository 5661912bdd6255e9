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
    """A library's message, followed by what to do about it where that is known; other messages ``beside`` it are
    searched but not quoted."""
    text = "\n".join((words, *beside))
    return next((f"{words}; {advice}" for pattern, advice in table if re.search(pattern, text, re.IGNORECASE)), words)


@cache
def logger_of(trt: Any) -> Any:
    """The logger of a library, which keeps the last errors: one for each, as TensorRT keeps a process's first."""

    class Logger(trt.ILogger):  # type: ignore[misc]  # the base is known only at run time
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.count = 0
            self._errors: deque[str] = deque(maxlen=20)

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR):
                self._errors.append(message)
                self.count += 1

        def since(self, mark: int) -> list[str]:
            """The messages after the first ``mark``, as many of them as are kept."""
            return list(self._errors)[-(self.count - mark) :] if self.count > mark else []

    return Logger()
