"""Runs every command and the Python example of README and docs in one folder; checks links and quoted messages."""

import ast
import contextlib
import importlib
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
import task_models

from benchmarks import cards
from trtdet.cli import main
from trtdet.config import load_config
from trtdet.demo import shapes

ROOT = Path(__file__).resolve().parent.parent
FIRST = ROOT / "docs" / "first-engine.md"
PAGES = [ROOT / "README.md", FIRST, *sorted(set((ROOT / "docs").glob("*.md")) - {FIRST})]
FEW = 40
"""Images that calibrate in the commands after the demo: a page takes 32 of them and needs some beside."""


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def commands(page: Path) -> list[str]:
    lines = (line for block in blocks(page, "sh") for line in re.sub(r" \\\n *", " ", block).splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def files(page: Path) -> dict[str, str]:
    """The files that a page shows, by the name in their first line."""
    texts = blocks(page, "yaml")
    return {match[1]: text for text in texts if (match := re.match(r"# ([\w-]+\.yaml)\n", text))}


@pytest.fixture(scope="session")
def workplace(once):
    """A folder in which the commands of README and of the first page have been run."""
    pytest.importorskip("torch", reason="the README exports from torch: pip install 'trtdet[export]'")
    pytest.importorskip("tensorrt_rtx", reason="the README builds engines: pip install 'trtdet[rtx]'")

    def run_first_pages(folder: Path) -> None:
        shutil.copytree(ROOT / "calib", folder / "calib")
        shutil.copy(ROOT / "tests" / "fixtures" / "two_stage" / "faster_trace.onnx", folder / "rcnn.onnx")
        for task in task_models.TASKS:
            task_models.save(folder, task)
        (folder / "cards").mkdir()
        cards.generate(folder / "cards" / "val", first=20_000, count=30)
        generated = cards.generate(folder / "cards" / "made", first=30_000, count=24)
        shutil.copytree(generated, folder / "cards" / "calibration")
        # The first page begins with commands of README.
        for command in dict.fromkeys((*commands(ROOT / "README.md"), *commands(FIRST))):
            execute(command, folder)
            if command == "make demo":
                # The demo alone needs all of its images; the other commands run on a few as they do on them.
                generate(folder, "val", 16)
                generate(folder, "calibration", FEW)

    return once("reader", run_first_pages)


def generate(folder: Path, split: str, count: int) -> None:
    """As many images of the demo as are asked for, instead of those that are there."""
    shutil.rmtree(folder / "demo" / "data" / split)
    shapes.generate(folder / "demo" / "data", split, count)


def execute(command: str, folder: Path) -> None:
    """Runs one command, trtdet's own in this process. Installation and tests are checked instead of run."""
    if command.startswith("pip install"):
        (extras,) = re.findall(r"trtdet\[([\w,]+)\]", command)
        assert set(extras.split(",")) <= set(importlib.metadata.metadata("trtdet").get_all("Provides-Extra") or ())
        return
    if command.startswith("make "):
        # Variables of an outer make would add lines.
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))}
        dry_run = ["make", "-n", *command.split()[1:]]
        plan = subprocess.run(dry_run, cwd=ROOT, capture_output=True, text=True, check=True, env=clean)
        lines = plan.stdout.strip().splitlines()
        if command != "make demo":
            assert "pytest" in lines[-1]
            return
        # Another test runs the service that follows.
        (command,) = [line.removeprefix(".venv/bin/") for line in lines if line.startswith(".venv/bin/trtdet ")]
    command, _, output = command.partition(" > ")
    program, *arguments = shlex.split(command)
    if program == "python":
        script = [sys.executable, str(ROOT / arguments[0]), *arguments[1:]]
        subprocess.run(script, cwd=folder, capture_output=True, check=True)
        return
    if program == "cp":
        source, target = (folder / argument for argument in arguments)
        shutil.copy(source, target)
        return
    assert program == "trtdet", command
    out, err, before = io.StringIO(), io.StringIO(), Path.cwd()
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(arguments)
    finally:
        os.chdir(before)
    assert code == 0, f"{command}\n{out.getvalue()}\n{err.getvalue()}"
    if output:
        assert out.getvalue(), command
        (folder / output).write_text(out.getvalue(), encoding="utf-8")


@pytest.mark.slow
@pytest.mark.tensorrt
def test_every_command_of_the_readme_runs(workplace):
    assert (workplace / "demo" / "results.json").is_file()
    assert (workplace / "shapes-int8" / "model.engine").is_file()
    assert (workplace / "pictures" / "000001.jpg").is_file()


@pytest.mark.slow
@pytest.mark.tensorrt
@pytest.mark.parametrize("page", [page for page in PAGES[2:] if commands(page)], ids=lambda page: page.name)
def test_every_command_of_a_page_runs(page, workplace):
    for name, text in files(page).items():
        (workplace / name).write_text(text, encoding="utf-8")
    if page.name == "quantized-models.md":  # its Python example writes the model of its commands
        (example,) = blocks(page, "python")
        subprocess.run([sys.executable, "-c", example], cwd=workplace, capture_output=True, check=True)
    listed = page.name == "calibration.md"  # its list has the hashes of all 64 images
    if listed:
        generate(workplace, "calibration", 64)
    for command in commands(page):
        execute(command, workplace)
    if listed:
        generate(workplace, "calibration", FEW)
    if page.name in ("ultralytics-jetson.md", "triton-client.md"):  # whose examples open what the commands have built
        for example in blocks(page, "python"):
            subprocess.run([sys.executable, "-c", example], cwd=workplace, capture_output=True, check=True)


@pytest.mark.slow
@pytest.mark.tensorrt
def test_the_figures_in_the_readme_are_near_those_of_this_machine(workplace):
    """CPUs round differently: corrected variants differ by some tenths, rules alone by more, in the same order.

    How large an INT8 engine of TensorRT-RTX is depends on its scales: with one image of 64 left out in calibration this
    has 7.9 to 10.3 MB.
    """
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
        assert row["engine_mb"] == pytest.approx(printed[variant][-1], rel=0.1 if variant == "FP32" else 0.4), variant
    assert rows["FP32"]["loss"] == 0
    alone = [row["map"] for variant, row in rows.items() if variant.endswith(" alone")]
    assert len(alone) == 4
    assert rows["INT8"]["map"] > max(alone)
    (score,) = re.findall(r"\*\*mAP 0.5:0.95 of ([\d.]+)\*\*", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert rows["FP32"]["map"] == pytest.approx(float(score), abs=0.002)


@pytest.mark.slow
@pytest.mark.tensorrt
def test_the_python_example_runs(workplace):
    (example,) = blocks(FIRST, "python")
    run = subprocess.run([sys.executable, "-c", example], cwd=workplace, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "convolutions in INT8" in run.stdout


def test_the_configuration_on_the_first_page_is_complete(tmp_path):
    (text,) = blocks(FIRST, "yaml")
    assert len(text.splitlines()) < 25
    (tmp_path / "own.yaml").write_text(text)
    assert load_config(tmp_path / "own.yaml").classes == ("helmet", "head", "person")


def test_every_configuration_key_is_documented():
    from trtdet.config import Config, HeadConfig, InputConfig, NmsConfig

    text = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    for section, keys in (("", Config), ("input.", InputConfig), ("head.", HeadConfig), ("nms.", NmsConfig)):
        for key in keys.model_fields:
            if section == "" and key in ("input", "head", "nms"):
                continue
            assert f"`{section}{key}`" in text or f"`{key}`" in text, f"{section}{key}"


def test_commands_fit_a_narrow_terminal():
    lines = [(page.name, line) for page in PAGES for block in blocks(page, "sh") for line in block.splitlines()]
    assert len(lines) > 80
    assert [(name, line) for name, line in lines if len(line) > 76] == []


def test_links_exist():
    for page in [*PAGES, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs" / "results").glob("*.md"))]:
        text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        for link in re.findall(r"\]\(([^)#:]+)\)", text):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


def _texts(tree: ast.AST) -> set[str]:
    """The strings of a module, with the constant parts of f-strings."""
    constants = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return {" ".join(value.split()) for value in constants if isinstance(value, str)}


def test_explained_messages_are_printed_somewhere():
    page = ROOT / "docs" / "troubleshooting.md"
    modules = (path.read_text(encoding="utf-8") for path in (ROOT / "trtdet").rglob("*.py"))
    printed = "\n".join(text for module in modules for text in _texts(ast.parse(module)))
    answers = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "service" / "serve").glob("*.cpp"))
    explained = re.findall(r"^\| (\d{3} )?`([^`]+)` \|", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(explained) > 20
    for status, message in explained:
        assert (f'"{message}"' in answers) if status else (message in printed), message


def test_every_page_is_on_the_site():
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for page in (*(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "results").glob("*.md")):
        assert f": {page.relative_to(ROOT / 'docs').as_posix()}\n" in navigation, page.name


def test_every_package_is_on_the_page_of_the_architecture():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    for folder in (ROOT / "trtdet").glob("*/__init__.py"):
        assert f"| `{folder.parent.name}/` |" in page


def test_every_public_name_is_on_the_page_of_python():
    import trtdet

    page = (ROOT / "docs" / "reference" / "python.md").read_text(encoding="utf-8")
    homes = {home.rpartition(".")[2]: home for home in re.findall(r"^::: trtdet\.(\S+)$", page, re.MULTILINE)}
    names = set(trtdet.__all__) - {"__version__"}
    assert homes.keys() == names
    for name, home in homes.items():
        module = importlib.import_module(f"trtdet.{home.rpartition('.')[0]}")
        assert getattr(module, name) is getattr(trtdet, name)


@pytest.mark.slow
def test_the_site_builds_without_warnings(tmp_path):
    pytest.importorskip("mkdocs", reason="needs mkdocs-material and mkdocstrings: pip install 'trtdet[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    built = {path.relative_to(tmp_path / "site") for path in (tmp_path / "site").rglob("*.html")}
    assert len(built) > 40
    for path in built:
        text = (tmp_path / "site" / path).read_text(encoding="utf-8")
        assert not re.findall(r"<(?:script|img|link)[^>]+(?:src|href)=\"?https?:", text), path
