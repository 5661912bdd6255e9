"""Work that goes on ahead of the consumer in threads."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

Input = TypeVar("Input")
Output = TypeVar("Output")


def cores() -> int:
    """Number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


class _End:
    """Marks the end of the items; ``error`` is the exception that ended them, None if there was none."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


def ahead(
    items: Iterator[Input], work: Callable[[Input], Output], workers: int, most: int
) -> Generator[Output, None, None]:
    """``map(work, items)``, with the work done ahead in threads and the items drawn in one more thread.

    Args:
        items: drawn by a single thread.
        workers: number of threads for the work.
        most: largest number of items that are drawn and whose result was not yielded yet.

    Raises:
        What ``items`` or ``work`` raises, at the place of the item.
    """
    results: queue.Queue[Future[Output] | _End] = queue.Queue(most)
    stopped = threading.Event()

    def put(what: Future[Output] | _End) -> None:
        while not stopped.is_set():
            with suppress(queue.Full):
                results.put(what, timeout=0.1)
                return

    def draw() -> None:
        error: BaseException | None = None
        try:
            for item in items:
                if stopped.is_set():
                    break
                put(pool.submit(work, item))
        except BaseException as raised:
            error = raised
        finally:
            close = getattr(items, "close", None)
            if close is not None:
                close()
        put(_End(error))

    with ThreadPoolExecutor(workers, "trtdet-ahead") as pool:
        drawing = threading.Thread(target=draw, name="trtdet-source", daemon=True)
        drawing.start()
        try:
            while True:
                one = results.get()
                if isinstance(one, _End):
                    if one.error is not None:
                        raise one.error
                    return
                yield one.result()
        finally:
            stopped.set()
            drawing.join()
