"""Where Python code can be mutated, and how: for mutations.py.

A mutation changes one piece of the source text and leaves the rest as it stands, so that line numbers hold. Left out
are places where a change is no fault: docstrings, annotations, the text of errors, warnings and f-strings,
``__repr__``, ``if TYPE_CHECKING``, branches that ask for the platform, options of ``@dataclass``, ``encoding=``, and
``zip(..., strict=True)``, which only guards.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
}
ARITHMETIC: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
}
TWINS = {"min": "max", "max": "min", "any": "all", "all": "any"}
PLATFORM = re.compile(r"\bsys\.platform\b|\bos\.name\b|\bplatform\.|hasattr\((os|signal|socket)\b")
SILENT = {"warn", "cast", "TypeVar", "NewType", "debug", "info", "warning", "print"}
"""Calls whose arguments are messages or types."""


@dataclass(frozen=True)
class Site:
    """A mutation that can be made.

    Attributes:
        path: of the file, within the tree.
        kind: what is changed, such as ``comparison``.
        edits: pieces of the file's bytes, from the first to the one after the last, and what takes their place.
        first: the number of the first line of the statement or expression that is changed, from 1.
        span: the first byte of the changed expression or statement, and the byte after its last; of a ``return``, those
            of its value.
        imported: whether the place runs at import rather than in a function.
    """

    path: str
    kind: str
    edits: tuple[tuple[int, int, str], ...]
    first: int
    span: tuple[int, int]
    imported: bool

    def apply(self, source: bytes) -> bytes:
        """The mutated file."""
        for start, end, text in sorted(self.edits, reverse=True):
            source = source[:start] + text.encode() + source[end:]
        return source

    @property
    def key(self) -> str:
        return f"{self.path}:{self.kind}:" + ",".join(f"{start}-{end}={text}" for start, end, text in self.edits)


def sites(path: str, source: bytes) -> list[Site]:
    """The mutations of a file, in the order of its lines."""
    return sorted(_Finder(path, source).of(ast.parse(source)), key=lambda site: site.edits)


def works(source: bytes, site: Site) -> bool:
    """Whether a mutation changes the file, and to one that can be parsed: operators between operands in odd places may
    not change places, and ``return None`` is so already."""
    mutated = site.apply(source)
    try:
        ast.parse(mutated)
    except SyntaxError:
        return False
    return mutated != source


def marked(source: bytes, places: Mapping[Site, int], file: int, call: str) -> bytes:
    """The file with ``call`` made, for each of these sites that is in a function, with its number whenever it runs.

    Args:
        source: the file.
        places: sites of the file, and their numbers.
        file: the number for every function of the file, when it is entered.
        call: an expression that gives a function of a number; the function returns None.
    """
    # Where, the order of what comes at one byte, and the text: what ends comes before what begins, inner ends before
    # outer ones, and outer beginnings before inner ones.
    insertions: list[tuple[int, int, int, str]] = []
    for site, number in places.items():
        start, end = site.span
        if site.imported:
            continue
        if site.kind == "break/continue":
            insertions.append((start, 1, 0, f"{call}({number}); "))
        else:
            insertions.append((start, 1, start - end, f"({call}({number}) or ("))
            insertions.append((end, 0, end - start, "))"))
    finder = _Finder("", source)
    for node in ast.walk(ast.parse(source)):
        body = node.body if isinstance(node, ast.FunctionDef) else []
        if body and _is_documentation(body[0]):
            body = body[1:]
        if body:
            at, text = finder.entry(body[0], f"{call}({file})")
            insertions.append((at, 1, -len(source), text))
    for at, _, _, text in sorted(insertions, reverse=True):
        source = source[:at] + text.encode() + source[at:]
    return source


def _is_documentation(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


class _Finder:
    def __init__(self, path: str, source: bytes) -> None:
        self._path = path
        self._source = source
        self._starts = [0]
        for line in source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def of(self, tree: ast.Module) -> Iterator[Site]:
        yield from self._within(tree, imported=True)

    def _within(self, node: ast.AST, imported: bool) -> Iterator[Site]:
        for kind, edits in self._mutations(node):
            marked = node.value if isinstance(node, ast.Return) else node
            span = (self._start(marked), self._end(marked))
            yield Site(self._path, kind, edits, node.lineno, span, imported)
        inside = isinstance(node, (ast.FunctionDef, ast.Lambda))
        for name, child in self._children(node):
            # Decorators, defaults and annotations of a function run where it is defined.
            yield from self._within(child, imported and not (inside and name == "body"))

    def _children(self, node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
        """The parts of a node that may be mutated, by the field they stand in."""
        if isinstance(node, (ast.Raise, ast.JoinedStr)):
            return
        if isinstance(node, ast.FunctionDef) and node.name in ("__repr__", "__str__"):
            return
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) in ("Literal", "Annotated"):
            return
        if isinstance(node, ast.Call) and _called(node) in SILENT:
            return
        if isinstance(node, ast.If) and self._is_of_the_platform(node.test):
            yield from (("orelse", child) for child in node.orelse)
            return
        if isinstance(node, (ast.Assert, ast.IfExp)) and self._is_of_the_platform(node.test):
            return
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "type_comment") or (isinstance(node, ast.Assert) and name == "msg"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and not self._is_left(node, name, child):
                    yield name, child

    def _is_of_the_platform(self, test: ast.expr) -> bool:
        text = ast.unparse(test)
        return text.endswith("TYPE_CHECKING") or text.startswith("__name__ ==") or bool(PLATFORM.search(text))

    def _is_left(self, node: ast.AST, field: str, child: ast.AST) -> bool:
        if field == "decorator_list":
            return isinstance(child, ast.Call) and _called(child) == "dataclass"
        if isinstance(child, ast.keyword):
            return child.arg == "encoding" or (
                child.arg == "strict" and isinstance(node, ast.Call) and _called(node) == "zip"
            )
        return False

    def _mutations(self, node: ast.AST) -> Iterator[tuple[str, tuple[tuple[int, int, str], ...]]]:
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            for left, right, operator in zip(sides, sides[1:], node.ops, strict=False):
                yield from self._between(left, right, "comparison", COMPARISONS[type(operator)])
        elif isinstance(node, ast.BoolOp):
            words = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
            pairs = zip(node.values, node.values[1:], strict=False)
            edits = [edit for left, right in pairs for _, (edit,) in self._between(left, right, "and/or", words)]
            if len(edits) == len(node.values) - 1:
                yield "and/or", tuple(edits)
        elif isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC and not _is_text(node):
            yield from self._between(node.left, node.right, "arithmetic", ARITHMETIC[type(node.op)])
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            start = self._start(node)
            yield "not dropped", ((start, start + len("not"), ""),)
        elif isinstance(node, ast.Constant):
            yield from self._constant(node)
        elif isinstance(node, ast.Call):
            yield from self._call(node)
        elif isinstance(node, ast.Return) and node.value is not None:
            yield "returns None", ((self._start(node.value), self._end(node.value), "None"),)
        elif isinstance(node, (ast.Break, ast.Continue)):
            other = "continue" if isinstance(node, ast.Break) else "break"
            yield "break/continue", ((self._start(node), self._end(node), other),)

    def _constant(self, node: ast.Constant) -> Iterator[tuple[str, tuple[tuple[int, int, str], ...]]]:
        if isinstance(node.value, bool):
            yield "True/False", ((self._start(node), self._end(node), str(not node.value)),)
        elif isinstance(node.value, (int, float)):
            yield "number", ((self._start(node), self._end(node), repr(node.value + 1)),)

    def _call(self, node: ast.Call) -> Iterator[tuple[str, tuple[tuple[int, int, str], ...]]]:
        name = _called(node)
        if name in TWINS:
            end = self._end(node.func)
            yield f"{name} to {TWINS[name]}", ((end - len(name), end, TWINS[name]),)
        parts = [*node.args, *node.keywords]
        if len(parts) >= 2 and name not in SILENT:
            last = max(parts, key=self._start)
            before = max((part for part in parts if part is not last), key=self._start)
            left = isinstance(last, ast.keyword) and self._is_left(node, "keywords", last)
            if not left and not isinstance(last, (ast.Starred, ast.GeneratorExp)):
                # To the parenthesis that ends the call, with whatever stands around the argument.
                end = self._end(node) - 1
                comma = self._source.find(b",", self._end(before), self._start(last))
                if comma >= 0:
                    yield "argument dropped", ((comma, end, self._newlines(comma, end)),)

    def entry(self, node: ast.stmt, text: str) -> tuple[int, str]:
        """Where a statement begins, and text as a statement before it: on a line of its own, or on the same line."""
        decorators = getattr(node, "decorator_list", [])
        line = min([node.lineno, *(decorator.lineno for decorator in decorators)])
        at = self._starts[line - 1] + node.col_offset
        before = self._source[self._starts[line - 1] : at].decode()
        return at, f"{text}\n{before}" if before.isspace() else f"{text}; "

    def _newlines(self, start: int, end: int) -> str:
        return "\n" * self._source.count(b"\n", start, end)

    def _between(
        self, left: ast.expr, right: ast.expr, kind: str, words: tuple[str, str]
    ) -> Iterator[tuple[str, tuple[tuple[int, int, str]]]]:
        """The operator that stands between two operands, which may have parentheses and comments around them."""
        start, end = self._end(left), self._start(right)
        pattern = rb"\s+".join(re.escape(word.encode()) for word in words[0].split())
        if words[0][0].isalpha():
            pattern = rb"\b" + pattern + rb"\b"
        gap = re.sub(rb"#[^\n]*", lambda comment: b" " * len(comment[0]), self._source[start:end])
        match = re.search(pattern, gap)
        if match:
            yield kind, ((start + match.start(), start + match.end(), words[1]),)

    def _start(self, node: ast.expr | ast.stmt | ast.keyword) -> int:
        return self._starts[node.lineno - 1] + node.col_offset

    def _end(self, node: ast.expr | ast.stmt | ast.keyword) -> int:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._starts[node.end_lineno - 1] + node.end_col_offset


def _called(node: ast.Call) -> str:
    """The last part of the name of what is called."""
    if isinstance(node.func, ast.Name):
        return node.func.id
    return node.func.attr if isinstance(node.func, ast.Attribute) else ""


def _is_text(node: ast.BinOp) -> bool:
    """Whether an operand is text, of which only a sum makes sense."""
    return any(
        isinstance(side, ast.JoinedStr) or (isinstance(side, ast.Constant) and isinstance(side.value, (str, bytes)))
        for side in (node.left, node.right)
    )
