"""Options are rows in trtdet/options, and few files read each of them."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import trtdet
from trtdet.options import BuildOptions, SweepOptions, TuneOptions, rows_of

PACKAGE = Path(trtdet.__file__).parent
PARTS = ("calibration", "plan", "nms", "engine", "input")
HOLDERS = {f"{part.capitalize()}Options": (part,) for part in PARTS} | {
    kind.__name__: () for kind in (BuildOptions, SweepOptions, TuneOptions)
}
"""The option classes, and the part of the options of a build that each is."""

OPTIONS = sorted(
    {
        tuple(name for name in row.path if name != "build")
        for kind in (BuildOptions, SweepOptions, TuneOptions)
        for row in rows_of(kind)
        if not row.hidden
    }
)


def holders(tree: ast.AST) -> dict[str, tuple[str, ...]]:
    """Variables and attributes (``.name``) of a file that hold options, by annotation or by assignment."""
    held: dict[str, tuple[str, ...]] = {}
    for node in ast.walk(tree):
        if isinstance(node, (ast.AnnAssign, ast.arg)) and node.annotation is not None:
            name = node.arg if isinstance(node, ast.arg) else ast.unparse(node.target)
            for kind in HOLDERS.keys() & set(ast.unparse(node.annotation).split(" | ")):
                held[name] = held[f".{name}"] = HOLDERS[kind]
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            target, value = node.targets[0], node.value
            together = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
            for name, read in zip(target.elts, value.elts, strict=True) if together else [(target, value)]:
                path = option_path(read, held)
                if isinstance(name, ast.Name) and path in HOLDERS.values():
                    held[name.id] = path
    return held


def option_path(node: ast.AST, held: dict[str, tuple[str, ...]]) -> tuple[str, ...] | None:
    """``job.options.plan.fp8`` -> ("plan", "fp8"); None for what is not read from options."""
    if isinstance(node, ast.Name):
        return held.get(node.id)
    if not isinstance(node, ast.Attribute):
        return None
    inner = option_path(node.value, held)
    if inner is not None:
        return inner if node.attr == "build" else (*inner, node.attr)
    return () if node.attr == "options" else held.get(f".{node.attr}")


def reads() -> Iterator[tuple[tuple[str, ...], str]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.parent.name != "options":
            tree = ast.parse(path.read_text(encoding="utf-8"))
            held = holders(tree)
            for node in ast.walk(tree):
                option = option_path(node, held)
                if option is not None:
                    yield option, str(path.relative_to(PACKAGE))


READS = set(reads())


@pytest.mark.parametrize("option", OPTIONS, ids=".".join)
def test_at_most_three_files_read_an_option(option):
    files = sorted(file for path, file in READS if path == option)
    assert len(files) <= 3, f"{'.'.join(option)} is read in {', '.join(files)}"


def test_reads_are_found():
    assert {("plan", "keep_fp16"), ("calibration", "images"), ("batch",), ("engine", "tf32")} <= {
        option for option, _ in READS
    }
