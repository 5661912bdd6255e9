"""Rows: each option is a field of a frozen dataclass, and its metadata describes it completely.

    rule: str = option("percentile", "calibration rule", "--calib RULE", read=calibration_rule, key=Stage.RANGES)

The rows define the parser, ``--set``, the help, the checks of values, the keys of the stages, and the command line that
repeats given options. A row without a flag is a setting, given as ``--set NAME=VALUE``; the name is the field's path
among nested dataclasses, such as ``nms.max_detections``.

This module imports only the standard library, so that help is shown at once.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from trtdet.errors import ConfigError, one_line

_LONGEST = 255
"""Most bytes of a file's name on Linux."""

_LONGEST_PATH = 4095
"""Most bytes of a path on Linux."""


class Stage(Enum):
    """The stages of a build in their order; each has a key, see :func:`stage_keys`."""

    GRAPH = "graph"
    RANGES = "ranges"
    CORRECTIONS = "corrections"
    PLAN = "plan"
    NETWORK = "network"
    ENGINE = "engine"


def path_of(text: str) -> Path:
    """The path, if a file can have it on Linux; raises ValueError."""
    longest = max(len(os.fsencode(name)) for name in text.split("/"))
    if "\0" in text or longest > _LONGEST or len(os.fsencode(text)) > _LONGEST_PATH:
        raise ValueError(f"'{one_line(text, 60)}' is no path that a file can have")
    return Path(text)


@dataclass(frozen=True)
class Row:
    """Description of an option. :func:`rows_of` fills in ``path``, ``name``, ``default`` and ``kind``.

    Attributes:
        flag: such as ``--calib``; empty for a setting.
        group: the heading of the flag in the help.
        metavar: placeholder of the value in the help; empty for the allowed values or the type.
        values: the allowed values, by default those of a ``Literal``; empty for no such list.
        flags: value and help of flags that each set one value, such as ``--fp16``.
        read: text -> value, raises ValueError with the expected form; None to read by the field's type.
        write: value -> text, the inverse of ``read``; None for ``str``.
        many: the value is a tuple; its items are separated by spaces, in a setting by commas.
        low, high: the smallest and largest allowed number.
        above: a number must be larger than this.
        key: the first stage of a build whose result the option changes, or why it changes none.
        fact: the resolved fact that replaces the value in the key, such as the hash of the images for their folder.
        int8_only: the option has an effect only on INT8.
        beside_variant: the option is allowed together with ``--from``, which decides most of a build.
        hidden: set by trtdet, not by users.
        path: attributes from the root of the options to the value.
        name: of the setting, such as ``nms.max_detections``.
        kind: the type of the value, without None.
    """

    help: str
    flag: str = ""
    group: str = "options"
    metavar: str = ""
    values: tuple[str, ...] = ()
    flags: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    read: Callable[[str], Any] | None = None
    write: Callable[[Any], str] | None = None
    many: bool = False
    low: float | None = None
    above: float | None = None
    high: float | None = None
    key: Stage | str = ""
    fact: str = ""
    int8_only: bool = False
    beside_variant: bool = False
    hidden: bool = False
    path: tuple[str, ...] = ()
    name: str = ""
    default: Any = None
    kind: Any = str

    @property
    def is_setting(self) -> bool:
        """Whether the option is given with ``--set``."""
        return not self.flag and not self.flags

    @property
    def spelled(self) -> str:
        """The option on the command line: ``--calib``, ``--int8`` or ``--set nms.max_detections``."""
        return self.flag or next(iter(self.flags), "") or f"--set {self.name}"

    @property
    def placeholder(self) -> str:
        """Placeholder of the value in the help."""
        if self.metavar or self.kind is bool:
            return self.metavar or "true|false"
        return "|".join(self.values) or {int: "N", float: "X", Path: "PATH"}.get(self.kind, "TEXT")

    def parse(self, text: str) -> Any:
        """Reads one value, or one item of several. Raises ValueError with the expected form."""
        if self.read is not None:
            return self.read(text)
        if self.kind is bool:
            if text.lower() not in ("true", "false"):
                raise ValueError(f"'{text}' must be true or false")
            return text.lower() == "true"
        if self.kind is Path:
            return path_of(text)
        try:
            value = self.kind(text)
        except ValueError:
            numbers = {int: "a whole number", float: "a number"}
            raise ValueError(f"'{text}' must be {numbers.get(self.kind, self.kind.__name__)}") from None
        problem = self.problem(value)
        if problem:
            raise ValueError(problem)
        return value

    def problem(self, value: Any) -> str:
        """Why a value is not allowed; empty if it is allowed."""
        if self.values and isinstance(value, str) and value not in self.values:
            return f"'{value}'{nearest(value, self.values)}; allowed: {', '.join(self.values)}"
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return ""
        bounds = [f"at least {self.low:g}"] if self.low is not None else []
        bounds += [f"over {self.above:g}"] if self.above is not None else []
        bounds += [f"at most {self.high:g}"] if self.high is not None else []
        inside = (self.low is None or value >= self.low) and (self.high is None or value <= self.high)
        inside = inside and (self.above is None or value > self.above)
        if not bounds or (inside and math.isfinite(value)):
            return ""
        return f"must be {' and '.join(bounds)}, got {value:g}"

    def checked(self, value: Any) -> Any:
        """A value from Python code: text is parsed, and so are tuples of numbers that have a text form.

        Raises:
            ValueError: with the expected form.
        """
        if isinstance(value, tuple) and self.kind is int and self.write is not None:
            return self.parse(self.write(value))
        return self.parse(value) if isinstance(value, str) else value

    def text(self, value: Any) -> str:
        """A value, also one from JSON, as text for :meth:`parse`."""
        if self.write is not None:
            return self.write(value)
        if isinstance(value, bool):
            return str(value).lower()
        # All digits of a number, but no '.0' for whole numbers.
        return str(value).removesuffix(".0")


_ROW = "row"
_PART = "part"


def option(default: Any, help: str, spelling: str = "", **facts: Any) -> Any:
    """A dataclass field that is an option.

    ``spelling`` is the flag and its placeholder, such as ``--calib RULE``, or only the placeholder for a setting.
    ``facts`` are more fields of :class:`Row`; they override those that the class has in common.
    """
    flag, _, metavar = spelling.partition(" ") if spelling.startswith("--") else ("", "", spelling)
    return field(default=default, metadata={_ROW: {"help": help, "flag": flag, "metavar": metavar, **facts}})


def same_row(options: type, name: str, default: Any = MISSING, /, **changes: Any) -> Any:
    """A field that repeats the option ``name`` of another class, with some facts changed."""
    row = next(row for row in rows_of(options) if row.name == name)
    default = row.default if default is MISSING else default
    return field(default=default, metadata={_ROW: {**vars(row), **changes}})


def part(default: Any, *, flat: bool = False, only: str = "", without: str = "") -> Any:
    """A field that holds another dataclass of options, by default the instance ``default``.

    Args:
        flat: omit the field's name from the names of settings.
        only: the offered options of the part, separated by spaces; empty for all.
        without: options of the part that are not offered, separated by spaces.
    """
    return field(default=default, metadata={_PART: (flat, only.split(), without.split())})


_rows_by_class: dict[type[OptionSet], tuple[Row, ...]] = {}


def rows_of(options: type[OptionSet]) -> tuple[Row, ...]:
    """The rows of an options dataclass, including those of its parts."""
    if options not in _rows_by_class:
        _rows_by_class[options] = tuple(_rows(options, (), f"{options.section}." if options.section else ""))
    return _rows_by_class[options]


def offered(options: type) -> list[Row]:
    """The rows that users can set."""
    return [row for row in rows_of(options) if not row.hidden]


def _rows(options: Any, path: tuple[str, ...], prefix: str) -> Iterator[Row]:
    hints = get_type_hints(options)
    for each in fields(options):
        place, hint = (*path, each.name), hints[each.name]
        if _ROW in each.metadata:
            facts = {"name": f"{prefix}{each.name.removesuffix('_')}", **options.common}
            facts["values"] = get_args(hint) if get_origin(hint) is Literal else ()
            facts |= each.metadata[_ROW]
            yield Row(**{**facts, "path": place, "default": each.default, "kind": _kind(hint)})
        elif _PART in each.metadata:
            flat, only, without = each.metadata[_PART]
            inner = prefix if flat else f"{prefix}{each.name}."
            for row in _rows(type(each.default), place, inner):
                within = row.name.removeprefix(inner)
                if within not in without and (not only or within in only):
                    yield row


def _kind(hint: Any) -> Any:
    """The value's type, such as int for ``tuple[int, ...] | None``; str for types that need their own ``read``."""
    if get_origin(hint) in (Union, UnionType):
        kinds = {_kind(each) for each in get_args(hint) if each is not type(None)}
        return Path if kinds == {Path, str} else kinds.pop() if len(kinds) == 1 else str
    if get_origin(hint) is tuple:
        return _kind(get_args(hint)[0])
    return hint if hint in (bool, int, float, Path) else str


def spelled(options: type, name: str) -> str:
    """The option with this name on the command line, for messages."""
    return next(row for row in rows_of(options) if row.name == name).spelled


def value_of(options: Any, row: Row) -> Any:
    """The value of a row in options of its class, or in plain values from JSON; the default if it is missing."""
    value = options
    for name in row.path:
        if isinstance(value, Mapping):
            if name not in value:
                return row.default
            value = value[name]
        elif is_dataclass(value):
            value = getattr(value, name)
        else:
            return row.default
    return value


def with_values(options: Any, values: Mapping[tuple[str, ...], Any]) -> Any:
    """Options with some values replaced; the keys are paths of rows."""
    own = {path[0]: value for path, value in values.items() if len(path) == 1}
    for name in dict.fromkeys(path[0] for path in values if len(path) > 1):
        inner = {path[1:]: value for path, value in values.items() if path[0] == name and len(path) > 1}
        own[name] = with_values(getattr(options, name), inner)
    return replace(options, **own)


class OptionSet:
    """The base of every dataclass of options.

    ``class NmsOptions(OptionSet, section="nms", group="engine")`` sets the first part of the names of its settings, and
    fields of :class:`Row` for all its rows. Values may be text as on the command line, such as ``"1:4:8"`` for a batch.

    Raises:
        ConfigError: a value is not allowed.
    """

    section: ClassVar[str]
    common: ClassVar[Mapping[str, Any]]

    def __init_subclass__(cls, section: str = "", **common: Any) -> None:
        cls.section, cls.common = section, common

    def __post_init__(self) -> None:
        for row in rows_of(type(self)):
            if len(row.path) > 1:
                continue  # a part checks itself
            value = getattr(self, row.path[0])
            items = value if isinstance(value, (tuple, list)) and row.many else (value,)
            try:
                items = tuple(row.checked(item) for item in items)
                problem = next(filter(None, (row.problem(item) for item in items if item is not None)), "")
            except ValueError as error:
                problem = str(error)
            if problem:
                raise ConfigError(f"{row.spelled}: {problem}" if problem[:1] == "'" else f"{row.spelled} {problem}")
            object.__setattr__(self, row.path[0], items if value is not None and row.many else items[0])


_Changed = TypeVar("_Changed", bound=OptionSet)


def changed(options: _Changed, **values: Any) -> _Changed:
    """Options with some values or parts changed, by the last part of their names: ``changed(options, fp8=True)``."""
    paths = {row.path[-1]: row.path for row in reversed(rows_of(type(options)))}
    result: _Changed = with_values(options, {paths.get(name, (name,)): value for name, value in values.items()})
    return result


def setting(options: type, text: str) -> tuple[Row, Any]:
    """``nms.max_detections=100`` -> the row and its value. Raises ValueError: the value cannot be read, or there is no
    such setting; the message names the most similar one."""
    name, equals, value = text.partition("=")
    settings = {row.name: row for row in offered(options) if row.is_setting}
    if name not in settings:
        flag = next((row for row in offered(options) if row.name == name), None)
        if flag is not None:
            raise ValueError(f"'{name}' is given as {flag.spelled}")
        raise ValueError(f"no setting '{name}'{nearest(name, settings)}; --help-settings lists them")
    if not equals:
        raise ValueError(f"'{text}' must be {name}=VALUE, such as {name}={settings[name].placeholder}")
    row = settings[name]
    try:
        return row, tuple(row.parse(item) for item in value.split(",")) if row.many else row.parse(value)
    except ValueError as error:
        raise ValueError(f"{name}={value}: {error}") from None


def words(options: Any, kind: type | None = None) -> list[str]:
    """The command-line words for options that differ from their defaults: flags, then settings.

    ``options`` is an options dataclass, or its plain values from JSON with the dataclass as ``kind``. Raises
    ConfigError: a value from JSON is of another type.
    """
    flags: list[str] = []
    settings: list[str] = []
    rows = offered(kind or type(options))
    if any(row.flag == "--from" and value_of(options, row) for row in rows):
        rows = [row for row in rows if row.beside_variant]
    for row in rows:
        value = value_of(options, row)
        if row.flags:
            flags += [flag for flag, (meant, _) in row.flags.items() if meant == value]
        elif _plain(value) == _plain(row.default) or value is None:
            continue
        elif not row.flag:
            settings.append(f"{row.name}={','.join(_texts(row, value))}")
        elif row.kind is bool and row.read is None:
            flags.append(row.flag)
        else:
            flags += [row.flag, *_texts(row, value)]
    return [*flags, "--set", *settings] if settings else flags


def _texts(row: Row, value: Any) -> list[str]:
    try:
        if row.many and not isinstance(value, (tuple, list)):
            raise TypeError
        return [row.text(item) for item in (value if row.many else [value])]
    except (TypeError, ValueError, AttributeError, LookupError):
        raise ConfigError(f"{row.spelled} cannot have the value {one_line(repr(value), 60)}") from None


def _plain(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def stage_keys(options: Any, facts: Mapping[str, Any], int8: bool) -> dict[Stage, str]:
    """The key of each stage: a hash over the previous key, and over the options and facts of the stage.

    The last key is the key of the bundle, and decides whether the bundle is up to date. Facts that belong to no option
    enter at the first stage.

    Raises:
        LookupError: the fact of an option is missing.
    """
    rows = rows_of(type(options))
    entering: dict[Stage, dict[str, Any]] = {stage: {} for stage in Stage}
    for row in rows:
        if isinstance(row.key, Stage) and (int8 or not row.int8_only):
            entering[row.key][row.fact or row.name] = facts[row.fact] if row.fact else value_of(options, row)
    named = {row.fact for row in rows}
    entering[Stage.GRAPH].update({name: value for name, value in facts.items() if name not in named})
    keys, before = {}, ""
    for stage in Stage:
        text = json.dumps([before, entering[stage]], sort_keys=True, default=os.fspath)
        keys[stage] = before = hashlib.sha256(text.encode()).hexdigest()
    return keys


def nearest(word: str, candidates: Iterable[str]) -> str:
    """``, did you mean 'build'?`` for ``biuld``; empty if no candidate is similar."""
    import difflib  # Slow to import, and only needed for errors.

    close = difflib.get_close_matches(word, list(candidates), n=1)
    return f", did you mean '{close[0]}'?" if close else ""
