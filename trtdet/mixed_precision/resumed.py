"""Rows of an earlier run: a damaged row is left out with a warning and measured again."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from trtdet.errors import TrtdetWarning
from trtdet.files.documents import DocumentError, check_value


def row_check(schema: Any, path: Path) -> Callable[[Mapping[str, Any]], bool]:
    """A check for the rows of a file, to be handed to :class:`trtdet.files.journal.Rows`.

    Args:
        schema: a ``TypedDict`` that a row must fit.
        path: the file, as the warning names it.

    Warns:
        TrtdetWarning: (when called) a row does not fit; it is left out, so that it is measured again.
    """
    adapter: TypeAdapter[Any] = TypeAdapter(schema)

    def valid(row: Mapping[str, Any]) -> bool:
        try:
            check_value(row, adapter)
        except DocumentError as error:
            warnings.warn(f"'{path}': a row is damaged ({error}) and is measured again", TrtdetWarning, stacklevel=3)
            return False
        return True

    return valid
