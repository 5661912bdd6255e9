"""Every command that README and docs show is run here, in their order, in one folder; so is the Python example."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from trtdet.config import load_config

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def commands(page: Path) -> list[str]:
    return [line for block in blocks(page, "sh") for line in block.splitlines() if line and not line.startswith("#")]


@pytest.fixture(scope="session")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the README's commands have been run, as far as each page needs them."""
    pytest.importorskip("torch", reason="the README exports from torch: pip install 'trtdet[export]'")
    pytest.importorskip("tensorrt_rtx", reason="the README builds engines: pip install 'trtdet[rtx]'")
    folder = tmp_path_factory.mktemp("reader")
    shutil.copytree(ROOT / "calib", folder / "calib")
    for command in commands(ROOT / "README.md"):
        execute(command, folder)
    return folder


def execute(command: str, folder: Path) -> None:
    """Runs one command; what would install or run the tests again is checked instead."""
    if command.startswith("pip install"):
        extras = re.findall(r"trtdet\[(\w+)\]", command)
        assert extras
        assert set(extras) <= set(importlib.metadata.metadata("trtdet").get_all("Provides-Extra") or ())
        return
    if command.startswith("make "):
        # Without what an outer make hands down, which would add lines of its own.
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))}
        plan = subprocess.run(
            ["make", "-n", *command.split()[1:]], cwd=ROOT, capture_output=True, text=True, check=True, env=clean
        )
        last = plan.stdout.strip().splitlines()[-1]
        if command != "make demo":
            assert "pytest" in last
            return
        command = last.removeprefix(".venv/bin/")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PATH": path},
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


@pytest.mark.slow
@pytest.mark.tensorrt
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_shown_runs(page: Path, workplace: Path) -> None:
    shown = commands(page)
    assert shown, f"{page.name} shows no command"
    if page.name != "README.md":
        for command in shown:
            execute(command, workplace)
    else:
        assert (workplace / "demo" / "results.json").is_file()
        assert (workplace / "shapes-int8" / "model.engine").is_file()
        assert (workplace / "pictures" / "000001.jpg").is_file()


@pytest.mark.slow
@pytest.mark.tensorrt
def test_the_python_example_runs(workplace: Path) -> None:
    (example,) = blocks(ROOT / "README.md", "python")
    done = subprocess.run([sys.executable, "-c", example], cwd=workplace, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "convolutions in INT8" in done.stdout


def test_the_configuration_shown_is_whole_and_short(tmp_path: Path) -> None:
    (shown,) = blocks(ROOT / "README.md", "yaml")
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
        for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / link).exists(), f"{page.name}: {link}"
