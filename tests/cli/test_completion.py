"""What a shell completes is what the parser takes."""

import json
import shutil
import subprocess
import sys

import pytest

from trtdet.cli import COMMANDS, main
from trtdet.cli.setup_commands import SHELLS


@pytest.fixture(scope="module")
def bash_script():
    shtab = pytest.importorskip("shtab", reason="completion is written by shtab: pip install shtab")
    assert set(SHELLS) <= set(shtab.SUPPORTED_SHELLS)
    if shutil.which("bash") is None:
        pytest.skip("needs bash, which completes")
    command = [sys.executable, "-m", "trtdet", "completion", "bash"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def completed(script: str, *words: str) -> set[str]:
    """What bash offers for the last of the words."""
    program = f"""{script}
COMP_WORDS=({" ".join(f"'{word}'" for word in words)}); COMP_CWORD={len(words) - 1}
function=$(complete -p trtdet | sed 's/.*-F \\([^ ]*\\).*/\\1/')
"$function"; printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True, timeout=60)
    return {line.strip() for line in done.stdout.splitlines()} - {""}


def test_commands_options_and_choices_are_completed(bash_script):
    assert completed(bash_script, "trtdet", "") >= {command.name for command in COMMANDS}
    assert completed(bash_script, "trtdet", "bu") == {"build"}
    assert completed(bash_script, "trtdet", "build", "--dry") == {"--dry-run"}
    assert completed(bash_script, "trtdet", "build", "--silu", "") >= {"auto", "keep", "swish", "plugin"}
    assert "--runtime" in completed(bash_script, "trtdet", "eval", "--")


@pytest.mark.parametrize("option", ["", "--config", "--images", "-o"])
def test_files_are_completed(bash_script, tmp_path, monkeypatch, option):
    (tmp_path / "model.onnx").touch()
    monkeypatch.chdir(tmp_path)
    assert completed(bash_script, "trtdet", "build", *filter(None, [option]), "mod") == {"model.onnx"}


def test_files_that_predict_detects_on_are_completed(bash_script, tmp_path, monkeypatch):
    (tmp_path / "street.jpg").touch()
    monkeypatch.chdir(tmp_path)
    assert completed(bash_script, "trtdet", "predict", "bundle", "str") == {"street.jpg"}


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_has_a_script(shell, capsys):
    pytest.importorskip("shtab", reason="completion is written by shtab: pip install shtab")
    assert main(["completion", shell, "--json"]) == 0
    script = json.loads(capsys.readouterr().out)["script"]
    assert "trtdet" in script and "dry-run" in script


def test_without_the_library_it_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 1
    assert capsys.readouterr().err == (
        "trtdet: error: completion needs the library shtab, which is not installed; pip install shtab\n"
    )
