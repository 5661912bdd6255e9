"""The precision plan: what each convolution runs in, and why. Nothing else says it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from trtdet.errors import ConfigError
from trtdet.files import write_atomically

Precision = Literal["int8", "fp16", "fp32"]

_SCHEMA = 1


@dataclass(frozen=True)
class Step:
    """A correction that was made for a convolution.

    Attributes:
        name: such as ``smooth, shift``, ``round`` or ``bias``.
        without: the error at the convolution's output without it, the others kept, on images held back; as a share of
            the output's variance.
        error: the same with it.
    """

    name: str
    without: float
    error: float


@dataclass(frozen=True)
class Entry:
    """What one node runs in, the reason, and the corrections it got."""

    precision: Precision
    reason: str
    corrections: tuple[Step, ...] = ()


@dataclass(frozen=True)
class PrecisionPlan:
    """Precision by node name, one entry a convolution, in graph order."""

    entries: Mapping[str, Entry]

    def counts(self) -> dict[str, int]:
        """How many nodes run in each precision: keys ``int8``, ``fp16``, ``fp32``."""
        found = [entry.precision for entry in self.entries.values()]
        return {precision: found.count(precision) for precision in get_args(Precision)}

    def names(self, precision: Precision) -> tuple[str, ...]:
        """The nodes that run in ``precision``."""
        return tuple(name for name, entry in self.entries.items() if entry.precision == precision)

    def kept(self) -> dict[str, str]:
        """``fp16`` or ``fp32`` by name of each node that does not run in INT8."""
        return {name: entry.precision for name, entry in self.entries.items() if entry.precision != "int8"}

    def to_json(self) -> str:
        return json.dumps({"schema": _SCHEMA, **asdict(self)}, indent=1) + "\n"

    def save(self, path: Path) -> None:
        """Writes ``plan.json`` atomically."""
        write_atomically(path, self.to_json().encode())

    @staticmethod
    def load(path: Path) -> PrecisionPlan:
        """Reads ``plan.json``.

        Raises:
            ConfigError: the file is missing, not JSON, or an entry is not ``{precision, reason}``.
        """
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            schema = data["schema"]
            entries = {name: _entry(**entry) for name, entry in data["entries"].items()}
        except FileNotFoundError:
            raise ConfigError(f"plan '{path}' does not exist; 'trtdet build' writes one as plan.json") from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"plan '{path}' is not a precision plan ({error}); start from a bundle's plan.json"
            ) from None
        if schema != _SCHEMA:
            raise ConfigError(f"plan '{path}' is of another schema, {schema!r}; this trtdet reads schema {_SCHEMA}")
        for name, entry in entries.items():
            if entry.precision not in get_args(Precision):
                raise ConfigError(
                    f"plan '{path}': '{name}' has precision {entry.precision!r}; "
                    f"allowed: {', '.join(get_args(Precision))}"
                )
        return PrecisionPlan(entries)


def _entry(precision: Precision, reason: str, corrections: list[dict[str, Any]] | None = None) -> Entry:
    return Entry(precision, reason, tuple(Step(**step) for step in corrections or ()))
