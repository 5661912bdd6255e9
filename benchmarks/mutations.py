"""Whether the tests notice when the code of trtdet is wrong: docs/results/mutations.md.

    python benchmarks/mutations.py --record [ROOM or file of tests ...]
    python benchmarks/mutations.py [ROOM ...] [--count 300] [--seed 0] [--limit 120] [--again]

Both draw the same mutations from all of ``trtdet/``, each place with the same probability. The first runs the tests of
the rooms (``tests/ROOM`` or ``tests/test_ROOM.py``), all of them without names, on a copy in which the places drawn say
when they are executed, and records which test executes which place, also in processes that tests start. The second
makes one mutation after the other and runs the tests that execute its place: those of its own room first, the fastest
first, up to the first that fails. A mutation that no test fails on within the limit has survived. With names of rooms,
only those drawn in these rooms are tested now. Results are appended to ``build/mutations/results.jsonl``: a run goes on
where it was interrupted, ``--again`` tests what survived once more, and a summary goes to
``build/mutations/summary.md``. Tests run on copies of the tree. Needs Linux.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import gc
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
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from forked import become
from mutation_sites import Site, marked, sites, works

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


class Clock:
    """A plugin of pytest that takes the time of each test with its fixtures, and notes those that fail or skip."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._skipped: set[str] = set()
        self.failed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += report.duration
        if not report.passed:
            (self.failed if report.failed else self._skipped).add(report.nodeid)

    @property
    def passed(self) -> dict[str, float]:
        """Seconds of those that pass."""
        return {name: round(time, 3) for name, time in self._seconds.items() if name not in self.failed | self._skipped}


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
        for name in ("home", "temporary"):
            (folder / name).mkdir(parents=True)
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

    def _prepared(self, work: Callable[[], int]) -> int:
        """Does the work in a session of its own, in the copy's folder, with limited memory."""
        os.setsid()
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        os.chdir(self.tree)
        home, temporary = str(self._folder / "home"), str(self._folder / "temporary")
        os.environ.update(HOME=home, TMPDIR=temporary, PYTHONPATH=str(self.tree), ORT_DISABLE_TELEMETRY="1")
        # Compiled files belong to the copy: without them every run would compile all of it again.
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        sys.dont_write_bytecode, tempfile.tempdir = False, None
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

MARKS = """import os

_seen = set()


def mark(number):
    line = str(number) + "\\t" + os.environ.get("PYTEST_CURRENT_TEST", "") + "\\n"
    if line in _seen:
        return
    _seen.add(line)
    try:
        file = os.open(FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        os.write(file, line.encode())
        os.close(file)
    except OSError:
        pass
"""
"""The module that notes which place was executed in which test, in a file that all processes share."""
MARK = "__import__('trtdet._marks', fromlist=['mark']).mark"


def units(rooms: Sequence[str]) -> list[str]:
    """The files of tests that are named, or of the rooms that are; of all rooms where none is named."""
    tests = ROOT / "tests"
    if not rooms:
        folders = {path.parent.name for path in tests.glob("*/test_*.py")} - set(WITHOUT_ROOM)
        rooms = sorted(folders | {path.stem.removeprefix("test_") for path in tests.glob("test_*.py")})
    both = [path for room in rooms for path in (ROOT / room, tests / room, tests / f"test_{room}.py")]
    found = [file for path in both for file in ([path] if path.is_file() else sorted(path.rglob("test_*.py")))]
    return [str(path.relative_to(ROOT)) for path in found if tests in path.parents]


def noted(sample: Sequence[Site]) -> list[str]:
    """What is noted when it is executed: the keys of the places, then the paths of their files, for any function."""
    return [*(site.key for site in sample), *sorted({site.path for site in sample})]


def mark(bench: Bench, sample: Sequence[Site], file: Path) -> None:
    """Writes into the copy what notes in ``file`` the numbers of what :func:`noted` lists."""
    numbers = {name: number for number, name in enumerate(noted(sample))}
    for path in {site.path for site in sample}:
        mine = {site: numbers[site.key] for site in sample if site.path == path}
        target = bench.tree / path
        target.write_bytes(marked(target.read_bytes(), mine, numbers[path], MARK))
    (bench.tree / "trtdet" / "_marks.py").write_text(f"FILE = {str(file)!r}\n{MARKS}", encoding="utf-8")


def record(folder: Path, sample: Sequence[Site], given: argparse.Namespace) -> None:
    """Runs each file of tests on a marked copy, and adds what was noted to the recording."""
    paths, marks, timed, began = units(given.rooms), folder / "marks", folder / "timed", time.monotonic()
    marks.touch()

    def part(number: int) -> None:
        copy, plain = Bench(folder / f"marked-{number}"), Bench(folder / f"plain-{number}")
        mark(copy, sample, marks)
        for path in paths:
            # The first that asks for a file runs it.
            with contextlib.suppress(FileExistsError), (folder / path.replace("/", ".")).open("x"):
                passed, failed = timed_tests(copy, [path])
                # Some tests look at the source, or wait for what the marks disturb.
                again = [path] if failed is None else failed
                rest, failed = timed_tests(plain, again) if again else ({}, [])
                with timed.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(passed | rest) + "\n")
                if failed is None or failed:
                    print(f"{path}: not all tests pass, and those that do not are left out", flush=True)

    in_processes(part, given.jobs)
    seconds = {name: time for line in timed.read_text().splitlines() for name, time in json.loads(line).items()}
    executed = Executed.read(given.folder)
    executed.add(paths, seconds, noted(sample), marks.read_text(encoding="utf-8").splitlines())
    executed.write(given.folder)
    print(f"{len(seconds)} tests recorded in {time.monotonic() - began:.0f} s", flush=True)


def timed_tests(bench: Bench, names: Sequence[str]) -> tuple[dict[str, float], list[str] | None]:
    """Seconds of the tests that pass, and those that fail; None where the run did not come to its end."""
    clock, file = Clock(), bench.started.with_name("seconds")
    file.unlink(missing_ok=True)

    def work() -> int:
        status = pytest.main(arguments(names, 120), plugins=[clock])
        file.write_text(json.dumps([clock.passed, sorted(clock.failed)]), encoding="utf-8")
        return int(status)

    bench.run(work, 1800)
    passed, failed = json.loads(file.read_text(encoding="utf-8")) if file.exists() else ({}, None)
    return passed, failed


def in_processes(part: Callable[[int], None], count: int) -> None:
    """Calls the function with 0, 1, ... in so many processes at a time."""
    children = []
    for number in range(count):
        child = os.fork()
        if child == 0:
            try:
                part(number)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(child)
    ends = [os.waitpid(child, 0)[1] for child in children]
    if any(ends):
        raise SystemExit("not all was done, see above")


@dataclass
class Executed:
    """Which tests execute which places.

    Attributes:
        seconds: of each test.
        tests: by the key of a place, or by the path of a file of which any function is executed: tests, those in whose
            fixtures it happens with ``|fixtures`` behind the name. An empty name stands for the import of modules, and
            for processes that do not know their test.
    """

    seconds: dict[str, float]
    tests: dict[str, list[str]]

    @staticmethod
    def read(folder: Path) -> Executed:
        """The recording of a folder, an empty one where there is none."""
        path = folder / "recording.json"
        return Executed(**json.loads(path.read_text(encoding="utf-8"))) if path.exists() else Executed({}, {})

    def write(self, folder: Path) -> None:
        (folder / "recording.json").write_text(json.dumps(vars(self)), encoding="utf-8")

    def add(
        self, paths: Sequence[str], seconds: Mapping[str, float], names: Sequence[str], lines: Iterable[str]
    ) -> None:
        """Takes what was noted for the tests of these files, as numbers of ``names``, in place of what was known."""
        old = tuple(f"{path}::" for path in paths)
        self.seconds = {name: time for name, time in self.seconds.items() if not name.startswith(old)} | dict(seconds)
        tests = {key: {test for test in known if not test.startswith(old)} for key, known in self.tests.items()}
        tests = {**{name: set[str]() for name in names}, **tests}
        for line in lines:
            number, _, during = line.partition("\t")
            test, _, phase = during.rpartition(" ")
            tests[names[int(number)]].add(f"{test}|fixtures" if phase != "(call)" and test else test)
        self.tests = {key: sorted(found) for key, found in tests.items()}

    def of(self, site: Site) -> list[str]:
        """The tests to run, those likely to notice first.

        A place in a fixture is executed for the first test that wants the fixture; the others of the file come last.
        Where it is executed at import, every test counts that executes any function of the file, or else every one of
        the room.
        """
        own = (f"tests/{room(site.path)}/", f"tests/test_{room(site.path)}.py")
        contexts = set(self.tests[site.key])
        if site.imported or "" in contexts:
            contexts |= set(self.tests[site.path])
        contexts.discard("")
        if site.imported and not contexts:
            contexts = {name for name in self.seconds if name.startswith(own)}
        direct = {context.partition("|")[0] for context in contexts} & self.seconds.keys()
        files = tuple(f"{name.partition('::')[0]}::" for name in contexts if name.endswith("|fixtures"))
        others = {name for name in self.seconds if files and name.startswith(files)} - direct
        return sorted(
            direct | others, key=lambda name: (name in others, not name.startswith(own), self.seconds[name], name)
        )


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
    sources = {site.path: (ROOT / site.path).read_bytes() for site in every}
    found = (site for site in every if works(sources[site.path], site))
    return list(itertools.islice(found, count)), places


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
            allowed = max(20.0, 10 * max(executed.seconds[name] for name in batch))
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


def test_all(bench: Bench, due: Sequence[Site], executed: Executed, given: argparse.Namespace) -> None:
    for number, site in enumerate(due, 1):
        row = test(bench, site, executed, given.limit)
        with (given.folder / "results.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{number}/{len(due)} {row['path']}:{row['line']} {row['kind']}: {row['verdict']}, "
              f"{row['seconds']} s, {row['by'] or row['passed']}", flush=True)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("rooms", nargs="*", help="rooms of trtdet; without, all")
    parser.add_argument("--record", action="store_true", help="record what the rooms' tests execute")
    parser.add_argument("--count", type=int, default=300, help="mutations to draw (default 300)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw (default 0)")
    parser.add_argument("--limit", type=float, default=120, help="seconds for a mutation's tests (default 120)")
    parser.add_argument("--again", action="store_true", help="test those that survived once more")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time (default: cores)")
    parser.add_argument("-o", dest="folder", type=Path, default=ROOT / "build" / "mutations", help="folder of results")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    sample, places = drawn(given.count, given.seed)
    path = given.folder / "results.jsonl"
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        if given.record:
            record(Path(folder), sample, given)
            return 0
        executed, rows = Executed.read(given.folder), results(path)
        mine = [site for site in sample if not given.rooms or room(site.path) in given.rooms]
        if any(site.key not in executed.tests for site in mine):
            raise SystemExit(f"{given.folder} has no recording of these mutations: first run the same with --record")
        due = [site for site in mine if site.key not in rows or (given.again and not is_caught(rows[site.key]))]

        def part(number: int) -> None:
            test_all(Bench(Path(folder) / str(number)), due[number :: given.jobs], executed, given)

        in_processes(part, given.jobs)
    rows = results(path)
    tested = [rows[site.key] for site in sample if site.key in rows]
    (given.folder / "summary.md").write_text(summary(tested, places), encoding="utf-8")
    print(f"{sum(map(is_caught, tested))} of {len(tested)} caught: {given.folder / 'summary.md'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
