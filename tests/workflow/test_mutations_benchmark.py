"""The mutations of benchmarks/mutations.py: which they are, what they leave alone, and that a run counts them."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def mutated(monkeypatch):
    """Gives the mutations of a program, by what each makes of it."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from mutation_sites import sites, works

    def of(program: str) -> set[str]:
        source = program.encode()
        return {site.apply(source).decode() for site in sites("a.py", source) if works(source, site)}

    return of


@pytest.mark.parametrize(
    ("program", "changed"),
    [
        ("a < b", {"a <= b"}),
        ("a >= b", {"a > b"}),
        ("a == b != c", {"a != b != c", "a == b == c"}),
        ("a in b", {"a not in b"}),
        ("a not  in b", {"a in b"}),
        ("a is None", {"a is not None"}),
        ("a and b and c", {"a or b or c"}),
        ("(a)  # and\nif (a or  # or\n    b): pass", {"(a)  # and\nif (a and  # or\n    b): pass"}),
        ("a = not b", {"a =  b"}),
        ("a + b", {"a - b"}),
        ("ä * b", {"ä / b"}),
        ("a[0]", {"a[1]"}),
        ("a = 2.5", {"a = 3.5"}),
        ("a = True", {"a = False"}),
        ("max(a)", {"min(a)"}),
        ("a.any()", {"a.all()"}),
        ("f(a, b)", {"f(a)"}),
        ("f(a,\n  b=(c),\n)", {"f(a\n\n)"}),
        ("def f():\n    return a, b", {"def f():\n    return None"}),
        ("while a:\n    break", {"while a:\n    continue"}),
    ],
)
def test_a_mutation_changes_one_place_and_keeps_the_lines(mutated, program, changed):
    assert mutated(program) == changed


@pytest.mark.parametrize(
    "program",
    [
        '"""In 1 of 2 cases."""',
        "def f(a: Literal[1, 2], b: list[Literal[3]]) -> Literal[4]: ...",
        "raise ValueError(max(1, 2))",
        "warnings.warn(a, stacklevel=2)",
        'f"{a + 1}"',
        '"%s" + a',
        "def __repr__(self):\n    return a + 1",
        "if TYPE_CHECKING:\n    a = 1",
        'if sys.platform == "darwin":\n    a = 1',
        "@dataclass(frozen=True)\nclass A: ...",
        "zip(a, strict=True)",
        "def f():\n    return None",
        'open(a, encoding="utf-8")',
        "f(a)",
    ],
)
def test_what_is_no_fault_is_left_alone(mutated, program):
    assert mutated(program) == set()


MARKED = """
def f(a, b=2):
    \"\"\"Text.\"\"\"
    @str
    def g(): return lambda c: c + 1 + a

    for c in range(9):
        if not c < b: break
    return a, max(b, c)
"""


def test_a_marked_file_does_the_same_and_says_what_it_executes(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from mutation_sites import marked, sites

    every = sites("a.py", MARKED.encode())
    numbers = {site: number for number, site in enumerate(every)}
    text = marked(MARKED.encode(), numbers, -1, "marks.append").decode()
    scope = {"marks": (marks := [])}
    exec(text, scope)
    assert scope["f"](5) == (5, 2)
    inside = {number for site, number in numbers.items() if not site.imported}
    not_called = {number for site, number in numbers.items() if site.first == 5}
    assert {1} < not_called < inside < set(numbers.values())
    assert set(marks) == {-1, *inside} - not_called
    assert marks[0] == -1


@pytest.mark.benchmark
def test_a_run_tests_each_mutation_once_and_sums_up(tmp_path):
    script = [sys.executable, str(BENCHMARKS / "mutations.py"), "-o", str(tmp_path)]
    count = ["tables", "--count", "3000", "--limit", "30"]
    refused = subprocess.run([*script, *count], check=False, timeout=600, capture_output=True, text=True)
    assert refused.returncode == 1 and "first run the same with --record" in refused.stderr
    subprocess.run([*script, "--record", *count], check=True, timeout=600)
    subprocess.run([*script, *count], check=True, timeout=1200)
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text(encoding="utf-8").splitlines()]
    assert {row["room"] for row in rows} == {"tables"}
    assert any(row["verdict"] == "caught" and row["by"].startswith("tests/test_tables.py::") for row in rows)
    again = subprocess.run([*script, *count], check=True, timeout=600, capture_output=True, text=True)
    assert f"of {len(rows)} caught" in again.stdout
    assert len((tmp_path / "results.jsonl").read_text(encoding="utf-8").splitlines()) == len(rows)
    assert re.search(rf"\| tables \| \d+ \| {len(rows)} \|", (tmp_path / "summary.md").read_text(encoding="utf-8"))
