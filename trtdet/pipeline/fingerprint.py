"""How options enter the keys of the stages, field by field: what decides whether a bundle is up to date.

Each field of an options dataclass says in its metadata at which stage it takes effect and in what form:

    rule: str = field(default="percentile", metadata=enters(Stage.RANGES, int8_only=True))
    images: Path | None = field(default=None, metadata=enters(Stage.RANGES, fact="images"))
    ray: str | None = field(default=None, metadata=stays_out("where work is done, not what comes out"))

The key of a stage is a hash over the key of the stage before it and over all that enters here. A field without
metadata is an error in every build: a forgotten option would let an old bundle pass for up to date.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from trtdet.backends import EngineOptions

_METADATA = "fingerprint"


class Stage(Enum):
    """The stages that have a key, in their order."""

    GRAPH = "graph"
    RANGES = "ranges"
    CORRECTIONS = "corrections"
    PLAN = "plan"
    NETWORK = "network"
    ENGINE = "engine"


@dataclass(frozen=True)
class Enters:
    """An option that the result depends on.

    Attributes:
        stage: the first stage that it changes.
        fact: name of the resolved fact that stands for it, such as the hash of the images for their folder; empty
            where the option's own value does.
        int8_only: it changes nothing unless the precision is INT8.
    """

    stage: Stage
    fact: str = ""
    int8_only: bool = False


@dataclass(frozen=True)
class StaysOut:
    """An option that the result does not depend on, and why."""

    reason: str


def enters(stage: Stage, fact: str = "", int8_only: bool = False) -> dict[str, Enters]:
    """Metadata of a field that enters the key of a stage, see :class:`Enters`."""
    return {_METADATA: Enters(stage, fact, int8_only)}


def stays_out(reason: str) -> dict[str, StaysOut]:
    """Metadata of a field that enters no key."""
    return {_METADATA: StaysOut(reason)}


FOREIGN: Mapping[type, Mapping[str, Enters | StaysOut]] = {
    EngineOptions: dict.fromkeys(
        ("workspace", "version_compatible", "hardware_compatible", "embed_plugins", "tactic_sources", "tf32"),
        Enters(Stage.ENGINE),
    )
}
"""Classes for the fields of options that are defined below this package."""


@dataclass(frozen=True)
class Option:
    """One field of the options, nested ones included.

    Attributes:
        path: such as ``calibration.rule``.
        value: as it was given.
        use: how it enters the keys; None where nobody has said.
    """

    path: str
    value: Any
    use: Enters | StaysOut | None


def every_option(options: Any, prefix: str = "") -> Iterator[Option]:
    """All fields of an options dataclass, those of the dataclasses in it in their place."""
    for field in fields(options):
        value, path = getattr(options, field.name), f"{prefix}{field.name}"
        if is_dataclass(value):
            yield from every_option(value, f"{path}.")
        else:
            foreign = FOREIGN.get(type(options), {})
            yield Option(path, value, foreign.get(field.name) or field.metadata.get(_METADATA))


def unclassed(options: Any) -> list[str]:
    """Paths of the fields for which nobody has said how they enter the keys."""
    return [option.path for option in every_option(options) if option.use is None]


def stage_keys(options: Any, facts: Mapping[str, Any], int8: bool) -> dict[Stage, str]:
    """The key of each stage; that of the last is the key of the bundle.

    Args:
        options: a dataclass whose fields are classed, see :class:`Enters`.
        facts: the resolved facts by name. Those that stand for no option enter at the first stage.
        int8: whether the precision is INT8.

    Raises:
        LookupError: an option is not classed, or the fact that stands for one is missing.
    """
    missing = unclassed(options)
    if missing:
        raise LookupError(f"option '{missing[0]}' is not classed: say in its metadata how it enters the fingerprint")
    entering: dict[Stage, dict[str, Any]] = {stage: {} for stage in Stage}
    named = set()
    for option in every_option(options):
        if isinstance(option.use, Enters):
            named.add(option.use.fact)
            if int8 or not option.use.int8_only:
                value = facts[option.use.fact] if option.use.fact else option.value
                entering[option.use.stage][option.use.fact or option.path] = value
    entering[Stage.GRAPH].update({name: value for name, value in facts.items() if name not in named})
    keys, before = {}, ""
    for stage in Stage:
        text = json.dumps([before, entering[stage]], sort_keys=True, default=_plain)
        keys[stage] = before = hashlib.sha256(text.encode()).hexdigest()
    return keys


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{value!r} has no place in a fingerprint")
