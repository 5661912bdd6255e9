"""Whether the tests notice when the code of trtdet is wrong: docs/results/mutations.md.

    python benchmarks/mutations.py --record [ROOM or file of tests ...]
    python benchmarks/mutations.py [ROOM ...] [--count 300] [--seed 0] [--limit 120] [--again]

The first records which lines each test executes, and how long it takes, for the tests of the rooms (``tests/ROOM`` or
``tests/test_ROOM.py``); all of them without names. Files of tests that have not changed since are left out. The second
draws mutations from all of ``trtdet/``, each place with the same probability, and tests each on the tests that execute
its lines: those of its own room first, the fastest first, up to the first that fails. A mutation that no test fails on
within the limit has survived. With names of rooms, only those drawn in these rooms are tested now. Results are appended
to ``build/mutations/results.jsonl``: a run goes on where it was interrupted, ``--again`` tests what survived once more,
and a summary goes to ``build/mutations/summary.md``. Tests run on a copy of the tree. Needs Linux and ``coverage``.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import gc
import hashlib
import importlib
import itertools
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import coverage
import pytest
from forked import become
from mutation_sites import Site, sites, works

ROOT = Path(__file__).resolve().parent.parent
LEFT_OUT = "not slow and not benchmark and not tensorrt86 and not ray and not triton"
WITHOUT_ROOM = ("service", "standin", "tensorrt86", "workflow")
"""Folders of tests that are not of a room and take long: recorded only when they are named."""
PRELOADED = (
    *("numpy", "cv2", "yaml", "onnx", "onnxruntime", "onnx_graphsurgeon", "pydantic", "faster_coco_eval", "hypothesis"),
    *("rich.progress", "PIL.Image", "scipy.optimize", "jinja2", "torch"),
)
"""What is imported once, in the process that forks for each run of tests: nothing of trtdet."""
BATCHES = (12, 100)
"""Tests of the first runs for a mutation, which a failure ends early; all others make the last run."""
MEMORY = 14 << 30
"""Bytes of addresses for a run of tests: a mutation may ask for any number."""


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


class Chooser:
    """A plugin of pytest: only these tests, in this order, each written to a file when it starts."""

    def __init__(self, names: Sequence[str], started: Path) -> None:
        self._rank = {name: rank for rank, name in enumerate(names)}
        self._started = started

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        chosen = [item for item in items if item.nodeid in self._rank]
        items[:] = sorted(chosen, key=lambda item: self._rank[item.nodeid])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        with self._started.open("a", encoding="utf-8") as file:
            file.write(nodeid + "\n")


class Recorder:
    """A plugin of pytest that records which lines each test executes: in its fixtures, and in itself.

    Attributes:
        seconds: of each test with its fixtures.
        failed: tests that did not pass.
    """

    def __init__(self, data: Path) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.failed: set[str] = set()
        self._coverage = coverage.Coverage(
            data_file=str(data), config_file=False, include=["*/trtdet/*"], messages=False
        )
        self._coverage.set_option("run:relative_files", True)
        self._coverage.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        return (yield from self._as(f"{item.nodeid}|fixtures"))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        return (yield from self._as(f"{item.nodeid}|test"))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Iterator[None]:
        return (yield from self._as(f"{item.nodeid}|fixtures"))

    def _as(self, context: str) -> Iterator[None]:
        self._coverage.switch_context(context)
        return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration
        if not report.passed:
            self.failed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        self._coverage.stop()
        self._coverage.save()


@dataclass(frozen=True)
class Run:
    """How a run of tests ended: the status, None where time was up; the last test that started; whether the time limit
    of that test was reached."""

    status: int | None
    test: str
    hung: bool


class Bench:
    """A copy of the tree on which tests run, in forked processes with temporary and home folders of their own."""

    def __init__(self, folder: Path) -> None:
        self.tree = folder / "tree"
        self._folder = folder
        self.times = itertools.count(1)
        listed = subprocess.run(
            ["git", "ls-files", "-coz", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True
        )
        for name in filter(None, listed.stdout.decode().split("\0")):
            if (ROOT / name).is_file():
                (self.tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.tree / name)
        shared = ROOT.parent / "shared"
        if shared.is_dir():
            (folder / "shared").symlink_to(shared)
        for name, variable in (("home", "HOME"), ("temporary", "TMPDIR")):
            (folder / name).mkdir()
            os.environ[variable] = str(folder / name)
        os.environ.update(PYTHONPATH=str(self.tree), ORT_DISABLE_TELEMETRY="1")
        # Compiled files belong to the copy: without them every run would compile all of it again.
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        sys.dont_write_bytecode, tempfile.tempdir = False, None
        for name in PRELOADED:
            importlib.import_module(name)
        gc.freeze()

    def run(self, work: Callable[[], int], seconds: float) -> Run:
        """Runs tests in a process of its own, and ends it with all that it started when the seconds are over."""
        log, started = self._folder / "log", self.started
        started.write_text("", encoding="utf-8")
        child = os.fork()
        if child == 0:
            become(lambda: self._prepared(work), log)
        end, status = time.monotonic() + seconds, None
        while status is None and time.monotonic() < end:
            ended, code = os.waitpid(child, os.WNOHANG)
            if ended:
                status = os.waitstatus_to_exitcode(code)
            else:
                time.sleep(0.02)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        if status is None:
            os.waitpid(child, 0)
        shutil.rmtree(self._folder / "temporary", ignore_errors=True)
        (self._folder / "temporary").mkdir(exist_ok=True)
        names = started.read_text(encoding="utf-8").splitlines()
        return Run(
            status, names[-1] if names else "", "+ Timeout +" in log.read_text(encoding="utf-8", errors="replace")
        )

    @property
    def started(self) -> Path:
        return self._folder / "started"

    @property
    def log(self) -> str:
        return (self._folder / "log").read_text(encoding="utf-8", errors="replace")

    def _prepared(self, work: Callable[[], int]) -> int:
        """Does the work in a session of its own, in the copy's folder, with limited memory."""
        os.setsid()
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        os.chdir(self.tree)
        # The tree's own benchmarks are read through pytest's settings, not through this script's folder.
        others = [path for path in sys.path if path not in (str(ROOT), str(ROOT / "benchmarks"))]
        sys.path[:] = [str(self.tree), *others]
        return work()


def arguments(paths: Iterable[str], seconds: float) -> list[str]:
    plain = (
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:randomly",
        "-n0",
        "-m",
        LEFT_OUT,
        "-W",
        "ignore::pytest.PytestAssertRewriteWarning",
        "-o",
        "timeout_method=thread",
    )
    return [*plain, f"--timeout={seconds:.0f}", "--hypothesis-seed=0", *paths]


# Recording


def units(rooms: Sequence[str]) -> list[str]:
    """The files and folders of tests that are named, or of the rooms that are; of all rooms where none is named."""
    tests = ROOT / "tests"
    if not rooms:
        folders = {path.parent.name for path in tests.glob("*/test_*.py")} - set(WITHOUT_ROOM)
        rooms = sorted(folders | {path.stem.removeprefix("test_") for path in tests.glob("test_*.py")})
    both = [path for room in rooms for path in (ROOT / room, tests / room, tests / f"test_{room}.py")]
    both = [path for path in both if path.exists() and tests in path.parents]
    return [str(path.relative_to(ROOT)) for path in both]


def record(bench: Bench, unit: str, folder: Path) -> None:
    """Runs the tests of a unit that have changed since they were recorded."""
    known = recordings(folder)
    found = sorted((ROOT / unit).rglob("test_*.py")) if (ROOT / unit).is_dir() else [ROOT / unit]
    files = {str(path.relative_to(ROOT)): digest(path) for path in found}
    changed = [name for name, value in files.items() if name not in known or known[name].digest != value]
    if not changed:
        return
    name = f"{time.time_ns()}-{Path(unit).stem}"
    data, began = folder / f"{name}.coverage", time.monotonic()

    def work() -> int:
        recorder = Recorder(data)
        status = pytest.main(arguments(changed, 600), plugins=[recorder])
        tests = {test: round(seconds, 3) for test, seconds in recorder.seconds.items() if test not in recorder.failed}
        by_file = {
            file: {
                "digest": files[file],
                "tests": {test: tests[test] for test in tests if test.startswith(f"{file}::")},
            }
            for file in changed
        }
        sources = {str(path.relative_to(ROOT)): digest(path) for path in sorted((ROOT / "trtdet").rglob("*.py"))}
        text = json.dumps({"files": by_file, "sources": sources, "failed": sorted(recorder.failed)})
        (folder / f"{name}.json").write_text(text, encoding="utf-8")
        return int(status)

    run = bench.run(work, 3600)
    (folder / f"{name}.log").write_text(bench.log, encoding="utf-8")
    print(f"{unit}: {len(changed)} files, {time.monotonic() - began:.0f} s, pytest ended with {run.status}", flush=True)


@dataclass
class Recording:
    """What is known of a file of tests: its digest when it was recorded, and seconds of each test that passed."""

    digest: str
    tests: Mapping[str, float]
    data: Path
    sources: Mapping[str, str]
    _lines: dict[str, dict[str, set[int]]] = field(default_factory=dict)


def recordings(folder: Path) -> dict[str, Recording]:
    """By file of tests, the latest."""
    latest: dict[str, Recording] = {}
    for path in sorted(folder.glob("*.json"), key=lambda path: int(path.name.partition("-")[0])):
        document = json.loads(path.read_text(encoding="utf-8"))
        for file, entry in document["files"].items():
            latest[file] = Recording(
                entry["digest"], entry["tests"], path.with_suffix(".coverage"), document["sources"]
            )
    return latest


_COLLECTING = ""
"""What stands in place of a test while tests are collected, which imports what they need."""


class Executed:
    """Which tests execute which lines of the code as it is now."""

    def __init__(self, folder: Path) -> None:
        self._files = recordings(folder)
        self._seconds = {name: seconds for one in self._files.values() for name, seconds in one.tests.items()}
        self._lines: dict[str, list[tuple[int, str]]] = {}
        self._moved: dict[str, bool] = {}

    def of(self, site: Site) -> list[str]:
        """The tests to run, those likely to notice first.

        A line of a fixture is executed for the first test that wants the fixture; the others of the file come last.
        Where lines have moved since, or run at import, also in a function that is called there, every test counts that
        executes any line of the file.
        """
        if site.path not in self._lines:
            self._lines[site.path] = list(self._read(site.path))
        lines = [(site.first <= line <= site.last, name) for line, name in self._lines[site.path]]
        everywhere = site.imported or self._moved[site.path] or (True, _COLLECTING) in lines
        contexts = {name for changed, name in lines if (everywhere or changed) and name != _COLLECTING}
        direct = {context.partition("|")[0] for context in contexts}
        files = {name.partition("::")[0] for name in contexts if name.endswith("|fixtures")}
        direct &= self._seconds.keys()
        others = {name for file in files if file in self._files for name in self._files[file].tests} - direct
        own = (f"tests/{room(site.path)}/", f"tests/test_{room(site.path)}.py")
        return sorted(
            direct | others, key=lambda name: (name in others, not name.startswith(own), self._seconds[name], name)
        )

    def seconds(self, names: Iterable[str]) -> list[float]:
        return [self._seconds[name] for name in names]

    def _read(self, path: str) -> Iterator[tuple[int, str]]:
        now = digest(ROOT / path)
        used = {one.data: one for one in self._files.values()}
        self._moved[path] = any(one.sources.get(path) != now for one in used.values())
        for data, one in used.items():
            stored = coverage.CoverageData(str(data))
            stored.read()
            mine = {file for file, other in self._files.items() if other.data == one.data}
            for line, contexts in stored.contexts_by_lineno(path).items():
                yield from ((line, name) for name in contexts if name == _COLLECTING or name.partition("::")[0] in mine)


# Mutations


def room(path: str) -> str:
    """``trtdet/passes/nms.py`` -> ``passes``, ``trtdet/config.py`` -> ``config``."""
    return Path(path).parts[1].removesuffix(".py")


def drawn(count: int, seed: int) -> tuple[list[Site], Counter[str]]:
    """The sample, in random order, and the number of places in each room."""
    every: list[Site] = []
    for path in sorted((ROOT / "trtdet").rglob("*.py")):
        every += sites(str(path.relative_to(ROOT)), path.read_bytes())
    places = Counter(room(site.path) for site in every)
    random.Random(seed).shuffle(every)
    return every[:count], places


def changes(site: Site) -> list[str]:
    """The lines that differ, those of the code with ``-``, those of the mutation with ``+``."""
    source = (ROOT / site.path).read_bytes()
    both = (text.decode().splitlines() for text in (source, site.apply(source)))
    lines = list(difflib.unified_diff(*both, n=0, lineterm=""))
    return [line for line in lines if not line.startswith(("---", "+++", "@@"))]


def in_files(names: Sequence[str]) -> list[str]:
    """The tests with those of a file together, whose fixtures are then made once; files in the order of their first."""
    files: dict[str, list[str]] = {}
    for name in names:
        files.setdefault(name.partition("::")[0], []).append(name)
    return [name for file in files.values() for name in file]


def batches(names: Sequence[str]) -> Iterator[list[str]]:
    start = 0
    for size in (*BATCHES, len(names)):
        if names[start : start + size]:
            yield in_files(names[start : start + size])
        start += size


def test(bench: Bench, site: Site, executed: Executed, limit: float) -> dict[str, Any]:
    """Mutates the copy, runs tests on it until one fails, and puts the copy back."""
    target, source = bench.tree / site.path, ROOT / site.path
    names, began = executed.of(site), time.monotonic()
    target.write_bytes(site.apply(source.read_bytes()))
    # Python knows compiled files by seconds and size: no two mutations have the same.
    os.utime(target, (0, next(bench.times)))
    verdict, by, count = "survived" if names else "not executed", "", 0
    try:
        for batch in batches(names):
            left = limit - (time.monotonic() - began)
            allowed = max(20.0, 10 * max(executed.seconds(batch)))
            chooser = Chooser(batch, bench.started)
            paths = list(dict.fromkeys(name.partition("::")[0] for name in batch))
            given = [*arguments(paths, allowed), "-x"]
            run = bench.run(lambda given=given, chooser=chooser: pytest.main(given, plugins=[chooser]), max(left, 1))
            if run.status not in (0, 5, None) or (run.status is None and not run.test):
                late = run.hung or run.status is None
                verdict, by = "caught by the time limit" if late else "caught", run.test or "import"
                break
            if run.status is None:
                verdict = "unfinished"
                break
            count += len(batch)
    finally:
        shutil.copy2(source, target)
    return {
        "key": site.key,
        "room": room(site.path),
        "path": site.path,
        "line": site.first,
        "kind": site.kind,
        "diff": changes(site),
        "verdict": verdict,
        "by": by,
        "tests": len(names),
        "passed": count,
        "seconds": round(time.monotonic() - began, 1),
    }


# Results


def results(path: Path) -> dict[str, dict[str, Any]]:
    """The latest of each mutation."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {row["key"]: row for row in map(json.loads, lines)}


def is_caught(row: Mapping[str, Any]) -> bool:
    return bool(row["verdict"].startswith("caught"))


def summary(rows: Sequence[Mapping[str, Any]], places: Mapping[str, int]) -> str:
    """A table by room, one by kind, and what survived, in Markdown."""
    lines = ["| room | places | tested | caught | survived | % |", "|---|---|---|---|---|---|"]
    for name in [*sorted(places, key=lambda name: -places[name]), ""]:
        mine = [row for row in rows if name in ("", row["room"])]
        caught = sum(map(is_caught, mine))
        share = f"{100 * caught / len(mine):.0f}" if mine else "-"
        total = places[name] if name else sum(places.values())
        lines.append(f"| {name or 'all'} | {total} | {len(mine)} | {caught} | {len(mine) - caught} | {share} |")
    lines += ["", "| kind | tested | caught | % |", "|---|---|---|---|"]
    for kind, count in Counter(row["kind"] for row in rows).most_common():
        caught = sum(is_caught(row) for row in rows if row["kind"] == kind)
        lines.append(f"| {kind} | {count} | {caught} | {100 * caught / count:.0f} |")
    verdicts = Counter(row["verdict"] for row in rows)
    lines += ["", ", ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common()), ""]
    for row in sorted(rows, key=lambda row: (row["path"], row["line"])):
        if not is_caught(row):
            lines += [f"`{row['path']}:{row['line']}` {row['kind']}, {row['verdict']} ({row['passed']} tests)", ""]
            lines += ["```diff", *row["diff"], "```", ""]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("rooms", nargs="*", help="rooms of trtdet; without, all")
    parser.add_argument("--record", action="store_true", help="record which lines the rooms' tests execute")
    parser.add_argument("--count", type=int, default=300, help="mutations to draw (default 300)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw (default 0)")
    parser.add_argument("--limit", type=float, default=120, help="seconds for a mutation's tests (default 120)")
    parser.add_argument("--again", action="store_true", help="test those that survived once more")
    parser.add_argument("-o", dest="folder", type=Path, default=ROOT / "build" / "mutations", help="folder of results")
    given = parser.parse_args()
    lines, path = given.folder / "lines", given.folder / "results.jsonl"
    lines.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        if given.record:
            bench = Bench(Path(folder))
            for unit in units(given.rooms):
                record(bench, unit, lines)
            return 0
        sample, places = drawn(given.count, given.seed)
        bench, executed, rows = Bench(Path(folder)), Executed(lines), results(path)
        mine = [site for site in sample if not given.rooms or room(site.path) in given.rooms]
        due = [site for site in mine if site.key not in rows or (given.again and not is_caught(rows[site.key]))]
        for number, site in enumerate(due, 1):
            if not works(site.apply((ROOT / site.path).read_bytes())):
                continue
            row = rows[site.key] = test(bench, site, executed, given.limit)
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            print(f"{number}/{len(due)} {row['path']}:{row['line']} {row['kind']}: {row['verdict']}, "
                  f"{row['seconds']} s, {row['by'] or row['passed']}", flush=True)  # fmt: skip
    tested = [rows[site.key] for site in sample if site.key in rows]
    (given.folder / "summary.md").write_text(summary(tested, places), encoding="utf-8")
    print(f"{sum(map(is_caught, tested))} of {len(tested)} caught: {given.folder / 'summary.md'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
