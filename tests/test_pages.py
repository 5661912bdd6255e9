"""Every command that README and docs show is run here, in their order, in one folder; so is the Python example."""

from __future__ import annotations

import ast
import contextlib
import importlib.metadata
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from once import Once

from trtdet.cli import main
from trtdet.config import load_config

ROOT = Path(__file__).resolve().parent.parent
FIRST = ROOT / "docs" / "first-engine.md"
PAGES = [ROOT / "README.md", FIRST, *sorted(set((ROOT / "docs").glob("*.md")) - {FIRST})]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def commands(page: Path) -> list[str]:
    return [line for block in blocks(page, "sh") for line in block.splitlines() if line and not line.startswith("#")]


def files(page: Path) -> dict[str, str]:
    """The files that a page shows, by the name in their first line."""
    found = {}
    for block in blocks(page, "yaml"):
        first = block.splitlines()[0]
        if re.fullmatch(r"# [\w-]+\.yaml", first):
            found[first.removeprefix("# ")] = block
    return found


@pytest.fixture(scope="session")
def workplace(once: Once) -> Path:
    """A folder in which the commands of the README and of the page that goes on from it have been run."""
    pytest.importorskip("torch", reason="the README exports from torch: pip install 'trtdet[export]'")
    pytest.importorskip("tensorrt_rtx", reason="the README builds engines: pip install 'trtdet[rtx]'")

    def follow(folder: Path) -> None:
        shutil.copytree(ROOT / "calib", folder / "calib")
        shutil.copy(ROOT / "tests" / "fixtures" / "two_stage" / "faster_trace.onnx", folder / "rcnn.onnx")
        for command in (*commands(ROOT / "README.md"), *commands(FIRST)):
            execute(command, folder)

    return once("reader", follow)


def execute(command: str, folder: Path) -> str:
    """Runs one command, trtdet's own in this process, and gives what it printed; what would install or run the tests
    again is checked instead."""
    if command.startswith("pip install"):
        extras = re.findall(r"trtdet\[(\w+)\]", command)
        assert extras
        assert set(extras) <= set(importlib.metadata.metadata("trtdet").get_all("Provides-Extra") or ())
        return ""
    if command.startswith("make "):
        # Without what an outer make hands down, which would add lines of its own.
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))}
        plan = subprocess.run(
            ["make", "-n", *command.split()[1:]], cwd=ROOT, capture_output=True, text=True, check=True, env=clean
        )
        lines = plan.stdout.strip().splitlines()
        if command != "make demo":
            assert "pytest" in lines[-1]
            return ""
        # The service, which comes after it, is asked by a test of its own.
        (command,) = [line.removeprefix(".venv/bin/") for line in lines if line.startswith(".venv/bin/trtdet ")]
    command, _, into = command.partition(" > ")
    program, *arguments = shlex.split(command)
    assert program == "trtdet", command
    out, err, before = io.StringIO(), io.StringIO(), Path.cwd()
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(arguments)
    finally:
        os.chdir(before)
    assert code == 0, f"{command}\n{out.getvalue()}\n{err.getvalue()}"
    if into:
        assert out.getvalue(), command
        (folder / into).write_text(out.getvalue(), encoding="utf-8")
    return out.getvalue()


@pytest.mark.slow
@pytest.mark.tensorrt
def test_every_command_of_the_readme_runs(workplace: Path) -> None:
    assert (workplace / "demo" / "results.json").is_file()
    assert (workplace / "shapes-int8" / "model.engine").is_file()
    assert (workplace / "pictures" / "000001.jpg").is_file()


@pytest.mark.slow
@pytest.mark.tensorrt
@pytest.mark.parametrize("page", PAGES[2:], ids=lambda page: page.name)
def test_every_command_of_a_page_runs(page: Path, workplace: Path) -> None:
    shown = commands(page)
    assert shown, f"{page.name} shows no command"
    for name, text in files(page).items():
        (workplace / name).write_text(text, encoding="utf-8")
    for command in shown:
        execute(command, workplace)


@pytest.mark.slow
@pytest.mark.tensorrt
def test_the_figures_that_the_readme_shows_are_those_of_this_machine_or_near_them(workplace: Path) -> None:
    """Every processor rounds in its own way, INT8 on the CPU above all, and histograms move by a bin: the figures
    differ by some tenths, of what a rule alone leaves by more. Which variant is better than which does not change."""
    (table,) = [block for block in blocks(ROOT / "README.md", "text") if block.startswith("variant ")]
    printed = {}
    for line in table.splitlines()[2:8]:
        variant, *figures = re.split(r"  +", line.strip())
        printed[variant] = [float(figure) for figure in figures]
    rows = {row["variant"]: row for row in json.loads((workplace / "demo" / "results.json").read_text())["rows"]}
    assert rows.keys() == printed.keys()
    for variant, row in rows.items():
        near = {"FP32": 0.1, "INT8": 1.0}.get(variant, 4.0)
        assert 100 * row["map"] == pytest.approx(printed[variant][0], abs=near), variant
        assert 100 * row["map50"] == pytest.approx(printed[variant][1], abs=near), variant
        assert [row["int8_convs"], row["float_convs"]] == printed[variant][-3:-1], variant
        assert row["engine_mb"] == pytest.approx(printed[variant][-1], rel=0.1), variant
    assert rows["FP32"]["loss"] == 0
    alone = [row["map"] for variant, row in rows.items() if variant.endswith(" alone")]
    assert len(alone) == 4
    assert rows["INT8"]["map"] > max(alone)
    (said,) = re.findall(r"\*\*mAP 0.5:0.95 of ([\d.]+)\*\*", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert rows["FP32"]["map"] == pytest.approx(float(said), abs=0.002)


@pytest.mark.slow
@pytest.mark.tensorrt
def test_the_python_example_runs(workplace: Path) -> None:
    (example,) = blocks(FIRST, "python")
    done = subprocess.run([sys.executable, "-c", example], cwd=workplace, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "convolutions in INT8" in done.stdout


def test_the_configuration_shown_is_whole_and_short(tmp_path: Path) -> None:
    (shown,) = blocks(FIRST, "yaml")
    assert len(shown.splitlines()) < 25
    (tmp_path / "own.yaml").write_text(shown)
    assert load_config(tmp_path / "own.yaml").classes == ("helmet", "head", "person")


def test_every_configuration_key_is_documented() -> None:
    from trtdet.config import Config, HeadConfig, InputConfig, NmsConfig

    text = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    for section, keys in (("", Config), ("input.", InputConfig), ("head.", HeadConfig), ("nms.", NmsConfig)):
        for key in keys.model_fields:
            if section == "" and key in ("input", "head", "nms"):
                continue
            assert f"`{section}{key}`" in text or f"`{key}`" in text, f"{section}{key}"


def test_links_lead_somewhere() -> None:
    for page in [*PAGES, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs" / "results").glob("*.md"))]:
        text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        for link in re.findall(r"\]\(([^)#:]+)\)", text):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


def _texts(tree: ast.AST) -> set[str]:
    """The strings of a module; of those with values in them, the words before, between and after."""
    whole = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return {" ".join(text.split()) for text in whole}


def test_messages_that_are_explained_are_those_that_are_printed() -> None:
    page = ROOT / "docs" / "troubleshooting.md"
    modules = (path.read_text(encoding="utf-8") for path in (ROOT / "trtdet").rglob("*.py"))
    printed = "\n".join(text for module in modules for text in _texts(ast.parse(module)))
    answers = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "service" / "serve").glob("*.cpp"))
    explained = re.findall(r"^\| (\d{3} )?`([^`]+)` \|", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(explained) > 20
    for status, message in explained:
        assert (f'"{message}"' in answers) if status else (message in printed), message


def test_every_page_is_on_the_site() -> None:
    shown = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for page in (*(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "results").glob("*.md")):
        assert f": {page.relative_to(ROOT / 'docs').as_posix()}\n" in shown, page.name


def test_every_public_name_is_on_the_page_of_python() -> None:
    import trtdet

    page = (ROOT / "docs" / "reference" / "python.md").read_text(encoding="utf-8")
    homes = {home.rpartition(".")[2]: home for home in re.findall(r"^::: trtdet\.(\S+)$", page, re.MULTILINE)}
    names = set(trtdet.__all__) - {"__version__"}
    assert homes.keys() == names
    for name, home in homes.items():
        assert home == f"{trtdet._HOMES[name]}.{name}"


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="needs mkdocs-material and mkdocstrings: pip install 'trtdet[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    built = {path.relative_to(tmp_path / "site") for path in (tmp_path / "site").rglob("*.html")}
    assert len(built) > 40
    for path in built:
        text = (tmp_path / "site" / path).read_text(encoding="utf-8")
        assert not re.findall(r"<(?:script|img|link)[^>]+(?:src|href)=\"?https?:", text), path
