"""An option is one row: a field of a frozen dataclass whose metadata says all that is known of it.

    rule: str = option("percentile", "calibration rule", "--calib RULE", read=calibration_rule, key=Stage.RANGES)

From the rows come the parser, ``--set``, the pages of help, the checks of values, the keys of the stages and the words
of a command that gives the same options again. A row without a flag is a setting: it is given as ``--set NAME=VALUE``,
where the name is the field's place among nested dataclasses, such as ``nms.max_detections``.

Nothing here loads more than the standard library, so that help is shown at once.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from trtdet.errors import ConfigError


class Stage(Enum):
    """The stages of a build that have a key, in their order; see :func:`stage_keys`."""

    GRAPH = "graph"
    RANGES = "ranges"
    CORRECTIONS = "corrections"
    PLAN = "plan"
    NETWORK = "network"
    ENGINE = "engine"


@dataclass(frozen=True)
class Row:
    """All that is known of an option.

    Attributes:
        help: what it does, for ``--help``.
        flag: such as ``--calib``; empty for a setting.
        group: the heading of the flag in the help.
        metavar: what stands for the value in the help; empty for the allowed values or the type.
        values: the allowed values, by default those of a ``Literal``; empty where others decide.
        flags: flags that each stand for a value, such as ``--fp16`` for ``fp16``, and their help.
        read: text -> value, raising ValueError with what is expected; None to read by the field's type.
        write: value -> text, the inverse of ``read``; None for the plain text.
        many: the value is a tuple, whose items are given one after the other, or in a setting with commas.
        low: the least value of a number.
        above: a number has to be larger than this.
        high: the largest value.
        key: the first stage of a build whose result the option changes, or why it changes none.
        fact: name of the resolved fact that stands for the value in the key, such as the hash of the images for their
            folder; empty where the value itself does.
        int8_only: the option changes nothing unless the precision is INT8.
        beside_variant: the option may be given together with ``--from``, which says most of a build.
        hidden: the value is worked out, and no user gives it.
        path: attributes from the root of the options to the value; filled in by :func:`rows_of`.
        name: of the setting, such as ``nms.max_detections``; likewise.
        default: likewise.
        kind: the type of the value, without None; likewise.
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
        """How a user gives the option: ``--calib``, ``--int8`` or ``--set nms.max_detections``."""
        return self.flag or next(iter(self.flags), "") or f"--set {self.name}"

    @property
    def placeholder(self) -> str:
        """What stands for the value in the help."""
        if self.metavar or self.kind is bool:
            return self.metavar or "true|false"
        return "|".join(self.values) or {int: "N", float: "X", Path: "PATH"}.get(self.kind, "TEXT")

    def parse(self, text: str) -> Any:
        """The value of one text, or of one item where there are several.

        Raises:
            ValueError: with what is expected.
        """
        if self.read is not None:
            return self.read(text)
        if self.kind is bool:
            if text.lower() not in ("true", "false"):
                raise ValueError(f"'{text}' must be true or false")
            return text.lower() == "true"
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
        """Why a value is not allowed; empty where it is."""
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
        """A value of Python; a text, and a tuple of numbers that is written as a text, are parsed.

        Raises:
            ValueError: with what is expected.
        """
        if isinstance(value, tuple) and self.kind is int and self.write is not None:
            return self.parse(self.write(value))
        return self.parse(value) if isinstance(value, str) else value

    def text(self, value: Any) -> str:
        """A value, typed or as JSON holds it, as :meth:`parse` reads it."""
        if self.write is not None:
            return self.write(value)
        if isinstance(value, bool):
            return str(value).lower()
        # Of a number all digits, without the '.0' of a whole number.
        return str(value).removesuffix(".0")


_ROW = "row"
_PART = "part"


def option(default: Any, help: str, spelling: str = "", **facts: Any) -> Any:
    """A field that is an option.

    Args:
        default: its value where nobody gives it.
        help: see :class:`Row`.
        spelling: the flag and what stands for its value, ``--calib RULE``; of a setting the latter alone.
        facts: further fields of :class:`Row`, which go before those that the class has in common.
    """
    flag, _, metavar = spelling.partition(" ") if spelling.startswith("--") else ("", "", spelling)
    return field(default=default, metadata={_ROW: {"help": help, "flag": flag, "metavar": metavar, **facts}})


def same_row(options: type, name: str, default: Any = MISSING, /, **changes: Any) -> Any:
    """A field that is an option of another class too, of the same name, with some facts changed."""
    row = next(row for row in rows_of(options) if row.name == name)
    default = row.default if default is MISSING else default
    return field(default=default, metadata={_ROW: {**vars(row), **changes}})


def part(default: Any, *, flat: bool = False, only: str = "", without: str = "") -> Any:
    """A field that holds further options.

    Args:
        default: an instance of their dataclass.
        flat: the names of settings leave the field's name out.
        only: names of the options that are offered, within the part, with spaces between; all where it is empty.
        without: names of options that are not.
    """
    return field(default=default, metadata={_PART: (flat, only.split(), without.split())})


_rows_by_class: dict[type[OptionSet], tuple[Row, ...]] = {}


def rows_of(options: type[OptionSet]) -> tuple[Row, ...]:
    """The rows of an options dataclass, those of its parts in their place."""
    if options not in _rows_by_class:
        _rows_by_class[options] = tuple(_rows(options, (), f"{options.section}." if options.section else ""))
    return _rows_by_class[options]


def offered(options: type) -> list[Row]:
    """The rows that a user can give."""
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
    """``tuple[int, ...] | None`` -> int and the like; str for what a reader of its own makes."""
    if get_origin(hint) in (Union, UnionType):
        kinds = {_kind(one) for one in get_args(hint) if one is not type(None)}
        return Path if kinds == {Path, str} else kinds.pop() if len(kinds) == 1 else str
    if get_origin(hint) is tuple:
        return _kind(get_args(hint)[0])
    return hint if hint in (bool, int, float, Path) else str


def spelled(options: type, name: str) -> str:
    """How a user gives an option, by the name of its setting, for messages."""
    return next(row for row in rows_of(options) if row.name == name).spelled


def value_of(options: Any, row: Row) -> Any:
    """The value of a row in options of its class, or in the plain values of JSON; the default where it is missing."""
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
    """Options with some values replaced, by the paths of their rows."""
    own = {path[0]: value for path, value in values.items() if len(path) == 1}
    for name in dict.fromkeys(path[0] for path in values if len(path) > 1):
        inner = {path[1:]: value for path, value in values.items() if path[0] == name and len(path) > 1}
        own[name] = with_values(getattr(options, name), inner)
    return replace(options, **own)


class OptionSet:
    """The base of every dataclass of options.

    ``class NmsOptions(OptionSet, section="nms", group="engine")``: the first part of the names of its settings, and
    what the rows have in common, as fields of :class:`Row`.

    A text is read as the command line reads it, so that a ``str`` may stand for a ``Path`` and ``"1:4:8"`` for a batch;
    each value is checked by its row.

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
    """Options with some values or whole parts changed, by the last part of the name: ``changed(options, fp8=True)``."""
    paths = {row.path[-1]: row.path for row in reversed(rows_of(type(options)))}
    result: _Changed = with_values(options, {paths.get(name, (name,)): value for name, value in values.items()})
    return result


def setting(options: type, text: str) -> tuple[Row, Any]:
    """``nms.max_detections=100`` -> the row and its value.

    Raises:
        ValueError: there is no such setting, with the nearest; or the value cannot be read.
    """
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
    """The words of a command that give options again: flags, then settings; what is as by default is left out.

    Args:
        options: an options dataclass, or the plain values that JSON holds of it.
        kind: the dataclass, where plain values are given.
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
            joined = ",".join(row.text(item) for item in value) if row.many else row.text(value)
            settings.append(f"{row.name}={joined}")
        elif row.kind is bool and row.read is None:
            flags.append(row.flag)
        else:
            flags += [row.flag, *(row.text(item) for item in (value if row.many else [value]))]
    return [*flags, "--set", *settings] if settings else flags


def _plain(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def stage_keys(options: Any, facts: Mapping[str, Any], int8: bool) -> dict[Stage, str]:
    """The key of each stage; that of the last is the key of the bundle, and decides whether it is up to date.

    The key of a stage is a hash over the key of the stage before it and over all that enters here.

    Args:
        options: a dataclass of options.
        facts: the resolved facts by name. Those that stand for no option enter at the first stage.
        int8: whether the precision is INT8.

    Raises:
        LookupError: the fact that stands for an option is missing.
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
        text = json.dumps([before, entering[stage]], sort_keys=True, default=_path_text)
        keys[stage] = before = hashlib.sha256(text.encode()).hexdigest()
    return keys


def _path_text(value: Any) -> str:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{value!r} has no place in a key")


def nearest(word: str, candidates: Iterable[str]) -> str:
    """``, did you mean 'build'?`` for ``biuld``; nothing where no candidate is near."""
    import difflib  # takes time, and is needed for errors alone

    close = difflib.get_close_matches(word, list(candidates), n=1)
    return f", did you mean '{close[0]}'?" if close else ""
