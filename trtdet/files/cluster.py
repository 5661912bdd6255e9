"""Independent tasks on a Ray cluster; the results are the same as without a cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from trtdet.errors import BackendError, one_line

Common = TypeVar("Common")
Task = TypeVar("Task")
Result = TypeVar("Result")

PIP = "pip install 'trtdet[ray]'"


def run(
    function: Callable[[Common, Task], Result], common: Common, tasks: Sequence[Task], address: str
) -> Iterator[Result]:
    """Calls ``function(common, task)`` for every task on a Ray cluster, and yields the results as they become ready.

    Workers import the function from its module, and get ``common`` once. If a worker dies, another one gets its task.
    The address ``local`` starts workers on this machine; the machines of any other cluster must see the same files
    under the same paths.

    Raises:
        BackendError: Ray is not installed, or the cluster cannot be reached.
    """
    try:
        import ray
    except ImportError as error:
        raise BackendError(f"Ray is not installed here ({error}); {PIP}") from None
    mine = not ray.is_initialized()
    if mine:
        local = {"configure_logging": False, "include_dashboard": False}
        settings: dict[str, Any] = {"log_to_driver": False, **(local if address == "local" else {"address": address})}
        try:
            ray.init(**settings)
        except (ConnectionError, ValueError, RuntimeError, TimeoutError) as error:
            raise BackendError(
                f"no Ray cluster answers at '{address}': {one_line(error)}",
                "if it asks for a token, set RAY_AUTH_MODE=token and put the token into ~/.ray/auth_token",
            ) from None
    try:
        remote = ray.remote(max_retries=-1)(function)
        shared = ray.put(common)
        waiting = [remote.remote(shared, task) for task in tasks]
        while waiting:
            finished, waiting = ray.wait(waiting)
            for result in finished:
                yield ray.get(result)
    finally:
        if mine:
            ray.shutdown()
