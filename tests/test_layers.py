"""The layers of the package: which module may import which, and what an import costs."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import trtdet

PACKAGE = Path(trtdet.__file__).resolve().parent

LAYERS = {
    0: "errors config bundle progress rows cluster",
    1: "images data metrics heads detections shapes",
    2: "calibration passes quantize exporter zoo",
    3: "backends",
    4: "pipeline ranking planning evaluation comparison benching profiling audit agreement detector pictures doctor",
    5: "worth sweeping recording packaging report demo",
    6: "cli __main__",
}
LAYER_OF = {name: layer for layer, names in LAYERS.items() for name in names.split()}
MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in sorted(PACKAGE.rglob("*.py"))
}


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


PARTS = {name.split(".")[1] for name in MODULES if name != "trtdet.__init__"}


def test_every_module_has_a_layer() -> None:
    assert sorted(PARTS - set(LAYER_OF)) == []


@pytest.mark.parametrize("name", [name for name in MODULES if name != "trtdet.__init__"])
def test_a_module_imports_only_from_its_own_layer_or_lower_ones(name: str) -> None:
    mine = LAYER_OF[part(name)]
    wrong = {other for other in imported(name, MODULES[name]) if part(other) and LAYER_OF[part(other)] > mine}
    assert not wrong, f"{name} is in layer {mine} and imports {', '.join(sorted(wrong))}"


def test_the_package_itself_imports_nothing_of_its_own_when_it_is_imported() -> None:
    tree = ast.parse(MODULES["trtdet.__init__"].read_text(encoding="utf-8"))
    top = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = {node.module if isinstance(node, ast.ImportFrom) else node.names[0].name for node in top}
    assert names <= {"__future__", "importlib", "typing"}


@pytest.mark.parametrize(
    ("vendors", "homes"),
    [
        ({"torch", "torchvision"}, {"exporter", "zoo"}),
        ({"tensorrt", "tensorrt_rtx", "ctypes", "cuda", "pycuda"}, {"backends"}),
    ],
)
def test_a_vendor_module_is_imported_only_in_its_home(vendors: set[str], homes: set[str]) -> None:
    found = {
        (name, other)
        for name, path in MODULES.items()
        for other in imported(name, path)
        if other.split(".")[0] in vendors and part(name) not in homes
    }
    assert not found


def test_the_command_line_imports_only_the_standard_library_and_layer_0_at_its_top() -> None:
    tree = ast.parse(MODULES["trtdet.cli"].read_text(encoding="utf-8"))
    top = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = [node.module or "" if isinstance(node, ast.ImportFrom) else node.names[0].name for node in top]
    foreign = [name for name in names if name.split(".")[0] not in {*sys.stdlib_module_names, "trtdet"}]
    assert foreign == []
    assert all(LAYER_OF[part(name)] == 0 for name in names if part(name))


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["build", "--help"]])
def test_help_loads_neither_arrays_nor_models(arguments: list[str]) -> None:
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
