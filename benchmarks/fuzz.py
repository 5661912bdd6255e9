"""Damaged and hostile inputs: each is read as its command reads it, and must give a result or one error of trtdet.

    python benchmarks/fuzz.py -o OUT [--count N] [--kinds KIND ...] [--seed N]
    python benchmarks/fuzz.py -o OUT --only KIND:NUMBER
    python benchmarks/fuzz.py -o OUT --guided SECONDS [--kinds KIND ...]

Inputs are sound models, configurations, results, histograms, lists, images, caches, checkpoints, expressions, options
and keys with one to five changes, see ``fuzz_inputs.py``; the number of an input and the seed give its changes. Each
kind runs in processes of its own, so that a crash of a native library is counted. Allowed are 10 seconds of CPU time,
2 GB of resident memory beside that of the libraries, and files in the input's folder. Fault N of a kind is kept in
OUT/faults, as the input and what happened, and ``--only`` shows its traceback. Prints Markdown: a row for each kind.

``--guided`` keeps inputs that reach new lines and changes these further; it needs atheris, and takes the time given.

Counts are kept in OUT, and another run of the same seed goes on after them. OUT/material, which has a tiny detector and
results of its commands, is made at the first run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TRTDET_RAISE"] = "1"  # an unexpected exception is a fault, and not a line

if "--guided" in sys.argv:
    import atheris

    with atheris.instrument_imports(include=["trtdet"]):
        import fuzz_inputs
else:
    import fuzz_inputs

from fuzz_inputs import EXPECTED, KINDS, Kind, made_material

from trtdet.errors import TrtdetWarning

SECONDS = 10
MEGABYTES = 2000
LONGEST = 1500
_SILENT = 120
"""Seconds without an answer after which a process that no signal reaches is killed."""
_BLOCK = 5000
"""Inputs that a process reads."""


class TooLong(BaseException):
    """An input took over 10 seconds; no handler of exceptions catches it."""


@dataclass(frozen=True)
class Work:
    """The inputs of a kind."""

    kind: Kind
    output: Path
    seed: int

    @property
    def material(self) -> Path:
        return self.output / "material"

    @property
    def folder(self) -> Path:
        """The folder that an input may write into; the one beside it is for temporary files."""
        return self.output / "run" / self.kind.name / "input"

    def seeds(self) -> list[bytes]:
        return self.kind.seeds(self.material)

    def made(self, seeds: list[bytes], number: int) -> bytes:
        """The input with this number."""
        draw = random.Random(f"{self.seed} {self.kind.name} {number}")
        data = draw.choice(seeds)
        for _ in range(draw.choice([1, 1, 1, 2, 3, 5])):
            data = self.kind.change(data, draw)
        return data

    def keep(self, number: int, data: bytes, what: str) -> None:
        """Keeps an input that shows a fault."""
        faults = self.output / "faults"
        faults.mkdir(exist_ok=True)
        (faults / f"{self.kind.name}-{number}").write_bytes(data)
        (faults / f"{self.kind.name}-{number}.txt").write_text(f"{what}\n", errors="backslashreplace")


@dataclass
class Tally:
    """Outcomes of a kind."""

    name: str
    inputs: int = 0
    refused: int = 0
    accepted: int = 0
    seconds: float = 0.0
    slowest: float = 0.0
    slowest_number: int = 0
    megabytes: float = 0.0
    """Largest resident memory beside that of the libraries."""
    faults: Counter[str] = field(default_factory=Counter)
    """By place and exception."""

    def add(self, answer: dict[str, Any]) -> None:
        self.inputs += 1
        self.seconds += answer["seconds"]
        self.refused += answer["outcome"] == "refused"
        self.accepted += answer["outcome"] == "accepted"
        if answer["outcome"] == "fault":
            self.faults[answer["what"]] += 1
        if answer["seconds"] > self.slowest:
            self.slowest, self.slowest_number = answer["seconds"], answer["number"]
        self.megabytes = max(self.megabytes, answer["megabytes"])

    def row(self) -> str:
        """A row of the table."""
        cells = [self.inputs, self.refused, self.accepted, sum(self.faults.values()), len(self.faults)]
        mean = 1000 * self.seconds / max(1, self.inputs)
        times = f"{mean:.1f} | {self.slowest:.2f} | {self.megabytes:.0f}"
        return f"| {self.name} | {' | '.join(map(str, cells))} | {times} |"


HEADING = """\
| kind | inputs | one error | accepted | faults | different | mean, ms | slowest, s | peak, MB |
|---|---:|---:|---:|---:|---:|---:|---:|---:|"""


# What an input may do


class Watch:
    """What this process does outside of a folder while an input is read."""

    CHANGING = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "os.link", "os.truncate", "os.chmod")
    LEAVING = ("socket.connect", "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn")

    def __init__(self) -> None:
        self.allowed = ""
        self.outside: list[str] = []
        sys.addaudithook(self._hook)

    @contextlib.contextmanager
    def over(self, allowed: Path) -> Iterator[list[str]]:
        self.outside, self.allowed = [], str(allowed.resolve())
        try:
            yield self.outside
        finally:
            self.allowed = ""

    def _hook(self, event: str, details: tuple[Any, ...]) -> None:
        if not self.allowed:
            return
        if event in self.LEAVING:
            self.outside.append(event)
        names: tuple[Any, ...] = ()
        if event == "open" and details[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            names = details[:1]
        elif event in self.CHANGING:
            # A name that is relative to the descriptor of a folder is inside.
            after = 2 if event in ("os.mkdir", "os.chmod") else 1
            if not any(isinstance(one, int) and one >= 0 for one in details[after:]):
                names = details[1:2] if event in ("os.symlink", "os.link") else details[:1]
        for name in names:
            if isinstance(name, (str, bytes, os.PathLike)):
                with contextlib.suppress(ValueError, OSError):
                    path = Path(os.fsdecode(name))
                    place = str(path.parent.resolve() / path.name)
                    if not place.startswith((self.allowed, "/dev/null")):
                        self.outside.append(f"{event} {place}")


_watch = Watch()
_resident = 0.0
"""Resident memory of this process before its first input, in MB."""


def peak_megabytes() -> float:
    """Largest resident memory of this process so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000


def problem_of(text: str) -> str:
    """What is wrong with an error's text; empty if nothing."""
    for line in text.splitlines():
        if len(line) >= LONGEST:
            return f"a message of {len(line)} characters"
        if not line.isprintable():
            return "a message with control characters"
    return ""


def outcome(work: Work, data: bytes, show: bool) -> tuple[str, str]:
    """``refused``, ``accepted`` or ``fault``, and what the fault is."""
    result, what = "accepted", ""
    with _watch.over(work.folder.parent) as outside:
        try:
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            try:
                work.kind.read(data, work.folder, work.material)
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
        except EXPECTED as error:
            result, text = "refused", str(error)
            several = not isinstance(error, fuzz_inputs.Refused) and "\n" in text
            if problem := "a message of several lines" if several else problem_of(text):
                result, what = "fault", f"{problem}: {ascii(text)[:200]}"
            if show:
                print(f"{type(error).__name__}: {text}")
        except (Exception, TooLong) as error:
            if show:
                traceback.print_exc()
            frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/trtdet/" in frame.filename]
            place = f"{'/'.join(Path(frames[-1].filename).parts[-3:])}:{frames[-1].lineno}" if frames else "?"
            result, what = "fault", f"{place} {type(error).__name__}: {ascii(str(error))[:160]}"
    left = [path.name for path in (work.folder.parent / "tmp").iterdir()]
    if outside:
        result, what = "fault", f"outside of its folder: {outside[0]}"
    elif left:
        result, what = "fault", f"left in the temporary folder: {left[0].split('-')[0]}"
    return result, what


def judged(work: Work, data: bytes, show: bool = False) -> dict[str, Any]:
    """Reads one input in an empty folder; ``show`` prints its error or its traceback."""
    shutil.rmtree(work.folder.parent, ignore_errors=True)
    work.folder.mkdir(parents=True)
    temporary = work.folder.parent / "tmp"
    temporary.mkdir()
    tempfile.tempdir = os.environ["TMPDIR"] = os.environ["HOME"] = str(temporary)
    started = time.process_time()
    result, what = outcome(work, data, show)
    seconds, megabytes = time.process_time() - started, peak_megabytes() - _resident
    if megabytes > MEGABYTES and result != "fault":
        result, what = "fault", f"{megabytes:.0f} MB"
    return {"outcome": result, "what": what, "seconds": seconds, "megabytes": megabytes}


def limit() -> None:
    """Prepares a process: an alarm that raises, warnings that are errors, and address space for 1 GB over the limit."""
    global _resident

    def late(*_: object) -> None:
        raise TooLong(f"over {SECONDS} s")

    signal.signal(signal.SIGPROF, late)
    warnings.simplefilter("error")
    for category in (DeprecationWarning, TrtdetWarning):
        warnings.filterwarnings("ignore", category=category)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    most = size + (MEGABYTES + 1000) * 1_000_000
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _resident = peak_megabytes()


# Processes


def serve(pipe: int, work: Work, numbers: range) -> None:
    """The work of a process: answers by line of JSON."""
    seeds = work.seeds()
    with os.fdopen(pipe, "w") as answers:
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        for number in numbers:
            data = work.made(seeds, number)
            print(json.dumps({"begin": number}), file=answers, flush=True)
            answer = judged(work, data)
            if answer["outcome"] == "fault":
                work.keep(number, data, answer["what"])
            print(json.dumps({"number": number, **answer}), file=answers, flush=True)
            if answer["megabytes"] > MEGABYTES / 2:
                return  # its peak would hide those of later inputs


def in_child(action: Any, *arguments: Any) -> int:
    """Runs an action in a process of its own; returns its id."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        action(*arguments)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def answered(work: Work, numbers: range) -> Iterator[dict[str, Any]]:
    """The answers of a process, until it ends; one that dies or is silent gives a last answer of a crash."""
    read, write = os.pipe()

    def reads() -> None:
        os.close(read)
        limit()
        serve(write, work, numbers)

    child = in_child(reads)
    os.close(write)
    begun, buffer = numbers.start, b""
    try:
        while True:
            ready, _, _ = select.select([read], [], [], _SILENT)
            if not ready:
                os.kill(child, signal.SIGKILL)
            part = os.read(read, 1 << 16)
            if not part:
                break
            *lines, buffer = (buffer + part).split(b"\n")
            for line in lines:
                answer = json.loads(line)
                begun = answer.get("begin", begun)
                if "begin" not in answer:
                    begun = answer["number"] + 1
                    yield answer
    finally:
        os.close(read)
        _, status = os.waitpid(child, 0)
    if begun < numbers.stop and status:
        ended = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit {os.WEXITSTATUS(status)}"
        yield {"number": begun, "outcome": "fault", "what": f"the process ended: {ended}", "seconds": 0, "megabytes": 0}


def fuzzed(work: Work, count: int) -> Tally:
    """Reads the inputs that no earlier run had, with a new process after each crash."""
    place = work.output / f"tally-{work.seed}-{work.kind.name}.json"
    tally = Tally(work.kind.name)
    if place.is_file():
        tally = Tally(**json.loads(place.read_bytes()))
        tally.faults = Counter(tally.faults)
    seeds = work.seeds()
    while tally.inputs < count:
        for answer in answered(work, range(tally.inputs, min(count, tally.inputs + _BLOCK))):
            tally.add(answer)
            if answer["what"].startswith("the process ended"):
                work.keep(answer["number"], work.made(seeds, answer["number"]), answer["what"])
            if tally.inputs % 100 == 0 or answer["outcome"] == "fault":
                place.write_text(json.dumps(vars(tally)))
    place.write_text(json.dumps(vars(tally)))
    return tally


def guided(work: Work, seconds: float) -> None:
    """Lets atheris choose the inputs, see its documentation; it ends the process."""
    corpus = work.output / "corpus" / work.kind.name
    corpus.mkdir(parents=True, exist_ok=True)
    for place, data in enumerate(work.seeds()):
        (corpus / f"seed-{place}").write_bytes(data)
    tally, started = Tally(work.kind.name), time.monotonic()
    limit()

    def one(data: bytes) -> None:
        if not data:
            return
        (work.output / "run" / f"{work.kind.name}.last").write_bytes(data)
        answer = {"number": tally.inputs, **judged(work, data)}
        if answer["outcome"] == "fault" and answer["what"] not in tally.faults:
            work.keep(tally.inputs, data, answer["what"])
        tally.add(answer)
        if time.monotonic() - started > seconds:
            report([tally])
            sys.stdout.flush()
            os._exit(0)

    def change(data: bytes, most: int, number: int) -> bytes:
        return work.kind.change(data, random.Random(f"{work.seed} {number}"))[:most]

    words = [sys.argv[0], str(corpus), f"-seed={work.seed + 1}", "-max_len=200000", "-timeout=60", "-rss_limit_mb=0"]
    atheris.Setup([*words, "-handle_alrm=0"], one, custom_mutator=change)
    atheris.Fuzz()


def report(tallies: list[Tally]) -> None:
    """Prints the table, and the faults on standard error."""
    total = Tally("all")
    for tally in tallies:
        for name in ("inputs", "refused", "accepted", "seconds", "faults"):
            setattr(total, name, getattr(total, name) + getattr(tally, name))
        total.slowest, total.megabytes = max(total.slowest, tally.slowest), max(total.megabytes, tally.megabytes)
    print("\n".join([HEADING, *(tally.row() for tally in (*tallies, total))]))
    for tally in tallies:
        for what, times in tally.faults.most_common():
            print(f"{tally.name}, {times} times: {what}", file=sys.stderr)


def make_material(output: Path) -> None:
    """Makes the material in a process of its own: no thread of a library may live when processes fork."""

    def makes() -> None:
        shutil.rmtree(output / "part", ignore_errors=True)
        made_material(output / "part")
        (output / "part").rename(output / "material")

    if not (output / "material").is_dir() and os.waitpid(in_child(makes), 0)[1]:
        raise SystemExit("the material could not be made")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--count", type=int, default=102_000, help="of all kinds together")
    parser.add_argument("--kinds", nargs="+", choices=[kind.name for kind in KINDS], default=[])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", metavar="KIND:NUMBER", help="one input, with the traceback of a fault")
    parser.add_argument("--guided", type=float, metavar="SECONDS", help="of each kind, by atheris")
    options = parser.parse_args()
    output = options.output.resolve()
    (output / "run").mkdir(parents=True, exist_ok=True)
    make_material(output)
    os.chdir(output / "run")  # so that a relative path is seen
    works = {kind.name: Work(kind, output, options.seed) for kind in KINDS}
    if options.only:
        name, number = options.only.split(":")
        limit()
        print(judged(works[name], works[name].made(works[name].seeds(), int(number)), show=True))
        return
    chosen = [work for name, work in works.items() if not options.kinds or name in options.kinds]
    if options.guided:
        for work in chosen:
            os.waitpid(in_child(guided, work, options.guided), 0)
        return
    total = sum(work.kind.count for work in chosen)
    tallies = []
    for work in chosen:
        tallies.append(fuzzed(work, max(1, round(options.count * work.kind.count / total))))
        print(tallies[-1].row(), file=sys.stderr, flush=True)
    report(tallies)


if __name__ == "__main__":
    main()
