"""The report of doctor on a library that is installed and cannot start."""

import sys

from trtdet.backends import doctor

STAND_IN = """
class ILogger:
    class Severity:
        INTERNAL_ERROR, ERROR = 0, 1
class Builder:
    def __init__(self, logger): {}
"""


def test_a_library_is_usable_only_where_it_starts(tmp_path, monkeypatch):
    cases = {
        "fine": ("pass", ""),
        "raising": ("raise TypeError('pybind11::init(): factory function returned nullptr')", "returned nullptr"),
        "ending": ("import os; os._exit(3)", "exit code 3"),
    }
    for name, (body, _) in cases.items():
        (tmp_path / f"{name}_library.py").write_text(STAND_IN.format(body))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for name, (_, expected) in cases.items():
        failure = doctor.start_failure(f"{name}_library")
        assert expected in failure and bool(failure) == bool(expected)
    monkeypatch.setattr(sys.modules[doctor.__name__], "start_failure", lambda module: "no driver")
    checks = [check for check in doctor.diagnose().backends if "does not start" in check.detail]
    assert all(not check.ok and "no driver" in check.detail and check.fix for check in checks)
