"""Keeps TensorRT's error messages and adds the fix where it is known."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from functools import cache
from typing import Any

Advice = Sequence[tuple[str, str]]
"""Patterns of messages, each with its fix, the more specific first."""


def advised(words: str, table: Advice, beside: Sequence[str] = ()) -> str:
    """A library's message with the fix if one is known; the messages ``beside`` are searched too, but not quoted."""
    text = "\n".join((words, *beside))
    return next((f"{words}; {advice}" for pattern, advice in table if re.search(pattern, text, re.IGNORECASE)), words)


@cache
def logger_of(trt: Any) -> Any:
    """A library's only logger, with the last errors; TensorRT keeps the first logger of a process."""

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
            """The messages after the first ``mark``, except those no longer kept."""
            return list(self._errors)[-(self.count - mark) :] if self.count > mark else []

    return Logger()
