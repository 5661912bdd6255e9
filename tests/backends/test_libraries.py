"""The table of libraries; code outside ``backends`` does not decide by a library's name."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import trtdet
from trtdet.backends.libraries import CONSUMERS, LIBRARIES, consumptions, library_named

PACKAGE = Path(trtdet.__file__).resolve().parent
NAMES = {word for library in LIBRARIES for word in (library.name, library.module, library.title)}

BACKENDS = {library.backend.split(":")[1] for library in LIBRARIES}

OTHER_CHOICES = {"calibrator", "on", "runtime"}
"""Options whose values share a word with a library: whose calibrator is asked, what of a bundle is run."""


def test_the_table_is_there_where_no_library_is():
    program = (
        "import sys\n"
        "absent = 'tensorrt tensorrt_rtx onnxruntime onnx numpy cuda pycuda'.split()\n"
        "sys.modules.update(dict.fromkeys(absent))\n"
        "from trtdet.backends.libraries import LIBRARIES\n"
        "import trtdet.backends\n"
        "assert trtdet.backends.LIBRARIES is LIBRARIES\n"
        "try:\n    LIBRARIES[0].load()\n"
        "except Exception as error:\n    print(type(error).__name__, error.hint)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"BackendError {LIBRARIES[0].pip}\n"


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.name)
def test_a_row_leads_to_its_backend(library):
    module, name = library.backend.split(":")
    found = importlib.import_module(module)
    assert isinstance(getattr(found, name), type)
    assert found.LIBRARY is library
    assert library_named(library.name) is library


def test_names_are_used_once():
    for part in ("name", "title", "module"):
        assert len({getattr(library, part) for library in LIBRARIES}) == len(LIBRARIES)


def test_every_library_is_served_or_says_why_not():
    for library in LIBRARIES:
        assert (library.triton is None) == ("triton" in library.not_served), library.name
        assert sorted((*library.served, *library.not_served)) == sorted(CONSUMERS), library.name


def test_the_guides_table_of_consumers_is_that_of_the_rows():
    page = (PACKAGE.parent / "docs" / "tensorrt.md").read_text(encoding="utf-8")
    titles = {library.name: library.title for library in LIBRARIES}
    rows = [
        f"| {titles[one.backend]} | {one.consumer} | {'yes' if one.runs else 'no'} | {one.detail} |"
        for one in consumptions()
    ]
    head = ["| bundle of | in | runs | with, or why not |", "|---|---|---|---|"]
    assert "\n".join([*head, *rows]) + "\n" in page


@pytest.mark.parametrize(
    ("engine", "missing"),
    [
        (b"vtrt" + bytes(12) + (30).to_bytes(8, "little"), 6),
        (b"vtrt" + bytes(12) + (24).to_bytes(8, "little"), 0),
        (b"vtrt", 20),
    ],
)
def test_an_engine_that_holds_its_length_tells_what_it_lacks(engine, missing):
    assert library_named("tensorrt-rtx").missing_bytes(engine) == missing
    assert library_named("tensorrt").missing_bytes(engine) == 0


@pytest.mark.parametrize(
    ("name", "version", "reads"),
    [
        ("tensorrt", "8.6.0", True),
        ("tensorrt", "10.13.2", True),
        ("tensorrt", "11.0.0", False),
        ("tensorrt-rtx", "1.7.1", False),
        # Another library builds the engine of such a bundle, of a version that nobody knows yet.
        ("onnxruntime", "1.23.0", True),
    ],
)
def test_who_may_read_a_calibration_cache(name, version, reads):
    assert library_named(name).may_read_calibration_cache(version) is reads


def _constants(node: ast.AST) -> set[str]:
    return {part.value for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str)}


def _option(node: ast.AST) -> str:
    """``options.runtime`` and ``runtime`` -> ``runtime``."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _is_backend_name(node: ast.AST) -> bool:
    """``caps.name``, ``manifest.backend.name``."""
    return (
        isinstance(node, ast.Attribute)
        and node.attr == "name"
        and _option(node.value) in {"backend", "caps", "capabilities", "library"}
    )


def _decides_by_name(node: ast.AST) -> bool:
    """Whether a program decides by a library's name, its module or the class of what runs an engine."""
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        named = any(_constants(side) & NAMES for side in sides)
        other = any(_option(side) in OTHER_CHOICES for side in sides)
        return (named and not other) or any(map(_is_backend_name, sides))
    if isinstance(node, ast.MatchValue):
        return bool(_constants(node) & NAMES)
    if isinstance(node, ast.Dict):
        return len({key.value for key in node.keys if isinstance(key, ast.Constant)} & NAMES) > 1
    if isinstance(node, ast.Subscript):
        return _is_backend_name(node.slice)
    if not isinstance(node, ast.Call):
        return False
    function = _option(node.func)
    if function in {"isinstance", "issubclass"}:
        parts = map(_option, ast.walk(node.args[1]))
        return any(part.endswith(("Runner", "Backend")) or part in BACKENDS for part in parts)
    if function in {"find_spec", "import_module", "__import__", "startswith", "get"} and any(
        isinstance(part, ast.Constant) and part.value in NAMES for part in node.args
    ):
        return True
    return function in {"get", "startswith", "replace"} and any(
        map(_is_backend_name, (*node.args, *ast.iter_child_nodes(node.func)))
    )


@pytest.mark.parametrize(
    ("source", "decides"),
    [
        ("manifest.backend.name == 'tensorrt-rtx'", True),
        ("caps.name in allowed", True),
        ("name in ('tensorrt', 'onnxruntime')", True),
        ("isinstance(target.runner, OnnxRunner)", True),
        ("isinstance(runner, (backends.EngineRunner, Other))", True),
        ("importlib.util.find_spec('tensorrt')", True),
        ("{'tensorrt': 1, 'onnxruntime': 2}", True),
        ("titles[caps.name]", True),
        ("titles.get(backend.name)", True),
        ("caps.name.startswith(start)", True),
        ("match name:\n    case 'tensorrt-rtx':\n        pass", True),
        ("options.calibrator == 'tensorrt'", False),
        ("runtime != 'onnxruntime'", False),
        ("choose('tensorrt')", False),
        ("model.name == 'x'", False),
    ],
)
def test_decisions_by_name_are_told_from_others(source, decides):
    assert any(map(_decides_by_name, ast.walk(ast.parse(source)))) == decides


def test_outside_backends_nothing_decides_by_the_name_of_a_library():
    found = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}: {ast.unparse(node)}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.relative_to(PACKAGE).parts[0] != "backends"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if _decides_by_name(node)
    ]
    assert not found, "ask the row of the library or the capabilities:\n" + "\n".join(found)


def test_ctrl_c_while_a_library_starts_is_no_missing_library(monkeypatch):
    def stopped(name):
        raise ImportError("initialization failed") from KeyboardInterrupt()

    monkeypatch.setattr(importlib, "import_module", stopped)
    with pytest.raises(KeyboardInterrupt):
        LIBRARIES[0].load()
