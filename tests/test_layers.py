"""The rooms of the package: which package may import which, what may be called what, and what an import costs."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import trtdet

PACKAGE = Path(trtdet.__file__).resolve().parent

ORDER = (
    *(
        "errors",
        "files",
        "options",
        "config",
        "tables",
        "progress",
        "data",
        "detection",
        "bundle",
        "passes",
        "calibration",
    ),
    *("quantization", "exporter", "backends", "runtime", "audit", "evaluation", "performance", "plans"),
    *("building", "experiments", "candidates", "deploy", "report", "demo", "cli", "__main__"),
)
"""From the ground up: a package imports from those before it, and from itself."""
LEVEL = {name: level for level, name in enumerate(ORDER)}
MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in sorted(PACKAGE.rglob("*.py"))
}
PARTS = {name.split(".")[1] for name in MODULES if name != "trtdet.__init__"}


def imported(name: str, path: Path) -> Iterator[str]:
    """Every module that a file imports, wherever in it: functions and TYPE_CHECKING blocks count."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}:{node.lineno} imports relatively; write the whole name"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def part(module: str) -> str:
    """``trtdet.passes.nms`` -> ``passes``; nothing for the package itself and for what is not a module of it."""
    pieces = module.split(".")
    return pieces[1] if pieces[0] == "trtdet" and len(pieces) > 1 and pieces[1] in PARTS else ""


def test_every_package_has_a_level():
    assert sorted(PARTS - set(LEVEL)) == []


@pytest.mark.parametrize("name", [name for name in MODULES if name != "trtdet.__init__"])
def test_a_package_imports_only_from_packages_below_it(name):
    mine = part(name)
    others = {part(other) for other in imported(name, MODULES[name])} - {"", mine}
    wrong = sorted(other for other in others if LEVEL[other] > LEVEL[mine])
    assert not wrong, f"{name} imports from {', '.join(wrong)}, which {mine} is below"


def test_at_most_six_files_stand_at_the_top():
    assert len(list(PACKAGE.glob("*.py"))) <= 6


FOREIGN_SIGNATURES = {"trtdet.backends.tensorrt.silu_aot._register.implement"}
"""Functions whose parameters a library that calls them prescribes."""


def functions(name: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Every function of a module, those within classes and functions too, by its dotted name."""

    def within(node: ast.AST, path: str) -> Iterator[tuple[str, ast.FunctionDef]]:
        for child in ast.iter_child_nodes(node):
            inner = f"{path}.{child.name}" if isinstance(child, (ast.FunctionDef, ast.ClassDef)) else path
            if isinstance(child, ast.FunctionDef):
                yield inner, child
            yield from within(child, inner)

    yield from within(ast.parse(MODULES[name].read_text(encoding="utf-8")), name)


@pytest.mark.parametrize("name", MODULES)
def test_functions_are_short_and_take_few_parameters(name):
    """At most 60 lines beside the docstring, and 6 parameters beside ``self``: a frozen dataclass takes more."""
    for path, function in functions(name):
        given = function.args
        taken = [arg.arg for arg in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
        first = function.body[0]
        documented = ast.get_docstring(function) is not None
        docstring = (first.end_lineno or 0) - first.lineno + 1 if documented else 0
        assert (function.end_lineno or 0) - function.lineno - docstring < 60, f"{path} has over 60 lines"
        count = len(taken) - (taken[:1] in (["self"], ["cls"]))
        assert count <= 6 or path in FOREIGN_SIGNATURES, f"{path} takes {count} parameters"


def top_level(name: str) -> set[str]:
    """The functions and classes that a module defines at its top or imports from the package, wherever in it."""
    tree = ast.parse(MODULES[name].read_text(encoding="utf-8"))
    names = {node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("trtdet"):
            names |= {alias.asname or alias.name for alias in node.names}
    return names


@pytest.mark.parametrize("name", MODULES)
def test_a_call_with_more_than_three_arguments_names_them(name):
    own = top_level(name) - {"above", "check_suffix", "maker"}  # which take any number of names
    for node in ast.walk(ast.parse(MODULES[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in own:
            plain = [argument for argument in node.args if not isinstance(argument, ast.Starred)]
            assert len(plain) <= 3, f"{name}:{node.lineno} calls {node.func.id} with {len(plain)} unnamed arguments"


def test_a_public_class_has_a_name_of_its_own():
    homes: dict[str, list[str]] = {}
    for name, path in MODULES.items():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(name)
    homes.pop("TritonPythonModel")  # Triton prescribes it
    assert {name: modules for name, modules in homes.items() if len(modules) > 1} == {}


def public_functions(module: str) -> set[str]:
    """The names in lower case of ``__all__`` that are not modules themselves."""
    names: set[str] = set()
    modules: set[str] = set()
    for node in ast.parse(MODULES[module].read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names = {name for name in ast.literal_eval(node.value) if name == name.lower()}
        elif isinstance(node, ast.ImportFrom) and node.module == module.removesuffix(".__init__"):
            modules |= {alias.name for alias in node.names}
    return names - modules


@pytest.mark.parametrize("name", [name for name in MODULES if name != "trtdet.__init__"])
def test_no_module_is_called_like_a_public_function(name):
    """Importing it would put the module in the function's place."""
    pieces = name.removesuffix(".__init__").split(".")
    around = ".".join([*pieces[:-1], "__init__"])
    assert pieces[-1] not in public_functions("trtdet.__init__")
    assert pieces[-1] not in public_functions(around)


def test_the_package_itself_imports_nothing_of_its_own_when_it_is_imported():
    tree = ast.parse(MODULES["trtdet.__init__"].read_text(encoding="utf-8"))
    top = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = {node.module if isinstance(node, ast.ImportFrom) else node.names[0].name for node in top}
    assert names <= {"__future__", "importlib", "os", "typing"}


@pytest.mark.parametrize(
    ("vendors", "homes"),
    [
        # Corrections ask for gradients.
        ({"torch", "torchvision"}, {"trtdet.exporter", "trtdet.quantization.gradients"}),
        ({"tensorrt", "tensorrt_rtx", "cuda", "pycuda"}, {"trtdet.backends"}),
        ({"ctypes"}, {"trtdet.backends", "trtdet.files"}),
    ],
)
def test_a_vendor_module_is_imported_only_in_its_home(vendors, homes):
    found = {
        (name, other)
        for name, path in MODULES.items()
        for other in imported(name, path)
        if other.split(".")[0] in vendors and not any(name.startswith(home) for home in homes)
    }
    assert not found


@pytest.mark.parametrize("name", [name for name in MODULES if name.startswith("trtdet.cli")])
def test_the_command_line_imports_only_the_standard_library_and_the_ground_at_its_top(name):
    tree = ast.parse(MODULES[name].read_text(encoding="utf-8"))
    top = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = [node.module or "" if isinstance(node, ast.ImportFrom) else node.names[0].name for node in top]
    foreign = [name for name in names if name.split(".")[0] not in {*sys.stdlib_module_names, "trtdet"}]
    assert foreign == []
    assert {part(name) for name in names} <= {"", "errors", "options", "progress", "tables", "cli"}


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["build", "--help"]])
def test_help_loads_neither_arrays_nor_models(arguments):
    program = (
        "import sys, trtdet.cli\n"
        f"sys.argv = ['trtdet', *{arguments!r}]\n"
        "try:\n    trtdet.cli.main()\n"
        "except SystemExit as ended:\n    assert ended.code in (0, None), ended.code\n"
        "heavy = 'numpy onnx onnxruntime onnx_graphsurgeon cv2 PIL pydantic torch tensorrt tensorrt_rtx'.split()\n"
        "print('LOADED', [name for name in heavy if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "LOADED []"


def test_no_two_files_of_tests_have_one_name():
    """pytest would read only the first of them."""
    names = [path.name for path in Path(__file__).parent.rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))
