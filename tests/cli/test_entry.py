"""Ctrl-C before a command has begun."""

import signal
import subprocess
import sys

import pytest

INTERRUPTED = """
import importlib.abc, os, signal, sys
import trtdet.__main__

class Interrupting(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
sys.argv = ["trtdet", "build", "--help"]
sys.exit(trtdet.__main__.run())
"""


@pytest.mark.parametrize("module", ["trtdet.cli", "trtdet.cli.report_commands", "shtab"])
def test_ctrl_c_while_modules_are_imported_prints_no_traceback(module):
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED.format(module=module)], capture_output=True, text=True, check=False
    )
    assert "Traceback" not in done.stderr
    if module.startswith("trtdet"):
        assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


def test_a_job_in_the_background_goes_on_ignoring_it():
    code = "import signal, trtdet.__main__; assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN"
    ignoring = f"trap '' INT; exec {sys.executable} -c '{code}'"
    assert subprocess.run(["sh", "-c", ignoring], capture_output=True, check=False).returncode == 0


def test_the_exit_code_is_that_of_the_command():
    for arguments, code in ((["--version"], 0), (["build"], 2)):
        done = subprocess.run([sys.executable, "-m", "trtdet", *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == code
