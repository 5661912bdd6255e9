"""Damaged and hostile inputs: each is read as its command reads it, and must give a result or one error of trtdet.

    python benchmarks/fuzz.py -o OUT [--count N] [--kinds KIND ...] [--seed N]
    python benchmarks/fuzz.py -o OUT --only KIND:NUMBER
    python benchmarks/fuzz.py -o OUT --guided SECONDS [--kinds KIND ...]

Inputs are models, configurations, results, histograms, lists, images, caches, checkpoints, expressions, options and keys:
sound ones with one to five changes, see ``fuzz_inputs.py``. The number of an input and the seed give its changes. Each
kind runs in a process of its own, so that a crash of a native library is counted; 10 seconds of CPU time, 2 GB of resident
memory above that of the libraries, and no file but in the input's folder are allowed. A fault is kept in OUT/faults, as the input
and what happened, and ``--only`` shows its traceback. Prints Markdown: a row a kind.

``--guided`` keeps inputs that reach new lines and changes these further; it needs atheris and takes what time is given.

Counts are kept in OUT, and another run of the same seed goes on after them. OUT/material has a tiny detector and results of its commands, made at the first run; another run starts from the same.
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

SECONDS = 10
MEGABYTES = 2000
LONGEST = 1500
_SILENT = 120
"""Seconds without an answer after which a process that no signal reaches is killed."""


class TooLong(BaseException):
    """An input took over 10 seconds; no handler of exceptions catches it."""


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
    """Largest peak of resident memory of an input above that of the libraries."""
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
        return (
            f"| {self.name} | {' | '.join(map(str, cells))} | {mean:.1f} | {self.slowest:.2f} | {self.megabytes:.0f} |"
        )


HEADING = "| kind | inputs | one error | accepted | faults | different | mean, ms | slowest, s | peak, MB |\n|---|---|---|---|---|---|---|---|---|"


def made(kind: Kind, seeds: list[bytes], seed: int, number: int) -> bytes:
    """The input of a kind with this number."""
    draw = random.Random(f"{seed} {kind.name} {number}")
    data = draw.choice(seeds)
    for _ in range(draw.choice([1, 1, 1, 2, 3, 5])):
        data = kind.change(data, draw)
    return data


# What an input may do


@contextlib.contextmanager
def watched(allowed: Path) -> Iterator[list[str]]:
    """The files that are written outside of a folder."""
    outside = _State.paths = []
    _State.allowed = str(allowed.resolve())
    if not _State.hooked:
        sys.addaudithook(_State.hook)
        _State.hooked = True
    try:
        yield outside
    finally:
        _State.allowed = ""


class _State:
    hooked = False
    resident = 0.0
    """Resident memory of this process before its first input, in MB."""
    allowed = ""
    paths: list[str] = []  # noqa: RUF012
    CHANGING = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "os.link", "os.truncate", "os.chmod")

    @staticmethod
    def folder(event: str) -> int:
        """Where an event's details have the descriptor of a folder that names are relative to: it is inside."""
        return {"os.mkdir": 2, "os.chmod": 2}.get(event, 1)

    @staticmethod
    def hook(event: str, details: tuple[Any, ...]) -> None:
        if not _State.allowed:
            return
        names: tuple[Any, ...] = ()
        if event == "open":
            path, mode, flags = details
            if isinstance(path, (str, bytes)) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                names = (path,)
        elif event in _State.CHANGING and not any(
            isinstance(one, int) and one >= 0 for one in details[_State.folder(event) :]
        ):
            names = details[1:2] if event in ("os.symlink", "os.link") else details[: 2 if event == "os.rename" else 1]
        elif event in ("socket.connect", "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn"):
            _State.paths.append(event)
        for name in names:
            if isinstance(name, (str, bytes, os.PathLike)):
                with contextlib.suppress(ValueError, OSError):
                    real = os.path.join(
                        os.path.realpath(os.path.dirname(os.fspath(name)) or "."), os.path.basename(name)
                    )
                    place = os.fsdecode(real)
                    if not place.startswith((_State.allowed, "/dev/null")):
                        _State.paths.append(f"{event} {place}")


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


def outcome(kind: Kind, data: bytes, folder: Path, material: Path, show: bool = False) -> tuple[str, str]:
    """``refused``, ``accepted`` or ``fault``, and what the fault is."""
    try:
        with watched(folder.parent) as outside:
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            try:
                kind.read(data, folder, material)
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
        result, what = "accepted", ""
    except EXPECTED as error:
        text = str(error)
        if not isinstance(error, fuzz_inputs.Refused) and "\n" in text:
            what = "a message of several lines"
        else:
            what = problem_of(text)
        result = "fault" if what else "refused"
        if what:
            what = f"{what}: {ascii(text)[:200]}"
        if show:
            print(f"{type(error).__name__}: {text}")
    except (Exception, TooLong) as error:
        if show:
            traceback.print_exc()
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/trtdet/" in frame.filename]
        place = f"{'/'.join(Path(frames[-1].filename).parts[-3:])}:{frames[-1].lineno}" if frames else "?"
        result, what = "fault", f"{place} {type(error).__name__}: {ascii(str(error))[:160]}"
    left = os.listdir(folder.parent / "tmp")
    if outside:
        result, what = "fault", f"outside of its folder: {outside[0]}"
    elif left:
        result, what = "fault", f"left in the temporary folder: {left[0].split('-')[0]}"
    return result, what


def judged(kind: Kind, data: bytes, folder: Path, material: Path, show: bool = False) -> dict[str, Any]:
    """Reads one input in an empty folder."""
    shutil.rmtree(folder.parent, ignore_errors=True)
    folder.mkdir(parents=True)
    temporary = folder.parent / "tmp"
    temporary.mkdir()
    tempfile.tempdir = os.environ["TMPDIR"] = os.environ["HOME"] = str(temporary)
    started = time.process_time()
    result, what = outcome(kind, data, folder, material, show=show)
    seconds, megabytes = time.process_time() - started, peak_megabytes() - _State.resident
    if megabytes > MEGABYTES and result != "fault":
        result, what = "fault", f"{megabytes:.0f} MB"
    return {"outcome": result, "what": what, "seconds": seconds, "megabytes": megabytes}


def limit() -> None:
    """Prepares a process: an alarm that raises, warnings that are errors, and address space for 1 GB over the limit."""

    def late(*_: object) -> None:
        raise TooLong(f"over {SECONDS} s")

    signal.signal(signal.SIGPROF, late)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    from trtdet.errors import TrtdetWarning

    warnings.filterwarnings("ignore", category=TrtdetWarning)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    most = size + (MEGABYTES + 1000) * 1_000_000
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _State.resident = peak_megabytes()


# Processes


def serve(pipe: int, kind: Kind, output: Path, numbers: range, seed: int) -> None:
    """The work of a process: answers by line of JSON."""
    material, folder = output / "material", output / "run" / kind.name / "input"
    seeds = kind.seeds(material)
    with os.fdopen(pipe, "w") as answers:
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        for number in numbers:
            data = made(kind, seeds, seed, number)
            print(json.dumps({"begin": number}), file=answers, flush=True)
            answer = judged(kind, data, folder, material)
            if answer["outcome"] == "fault":
                keep(output, kind, number, data, str(answer["what"]))
            print(json.dumps({"number": number, **answer}), file=answers, flush=True)
            if answer["megabytes"] > MEGABYTES / 2:
                return  # its peak would hide those of later inputs


def keep(output: Path, kind: Kind, number: int, data: bytes, what: str) -> None:
    """Keeps an input that shows a fault."""
    faults = output / "faults"
    faults.mkdir(exist_ok=True)
    (faults / f"{kind.name}-{number}").write_bytes(data)
    (faults / f"{kind.name}-{number}.txt").write_text(f"{what}\n", errors="backslashreplace")


def answered(kind: Kind, output: Path, numbers: range, seed: int) -> Iterator[dict[str, Any]]:
    """The answers of a process, until it ends; one that dies or is silent gives a last answer of a crash."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        status = 1
        try:
            limit()
            serve(write, kind, output, numbers, seed)
            status = 0
        except BaseException:
            Path(output / "run" / "broken.txt").write_text(traceback.format_exc())
        finally:
            os._exit(status)
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
                if "begin" in answer:
                    begun = answer["begin"]
                else:
                    begun = answer["number"] + 1
                    yield answer
    finally:
        os.close(read)
        _, status = os.waitpid(child, 0)
    if begun < numbers.stop and status:
        ended = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit {os.WEXITSTATUS(status)}"
        what = f"the process ended: {ended}"
        yield {"number": begun, "outcome": "fault", "what": what, "seconds": 0.0, "megabytes": 0.0}


def fuzzed(kind: Kind, output: Path, count: int, seed: int) -> Tally:
    """Runs the inputs of a kind that no earlier run had, with a new process after each crash and each 5000 inputs."""
    place = output / f"tally-{seed}-{kind.name}.json"
    tally = Tally(kind.name)
    if place.is_file():
        tally = Tally(**json.loads(place.read_bytes()))
        tally.faults = Counter(tally.faults)
    (output / "run" / kind.name).mkdir(parents=True, exist_ok=True)
    seeds = kind.seeds(output / "material")
    while tally.inputs < count:
        for answer in answered(kind, output, range(tally.inputs, min(count, tally.inputs + 5000)), seed):
            tally.add(answer)
            if answer["what"].startswith("the process ended"):
                keep(output, kind, answer["number"], made(kind, seeds, seed, answer["number"]), answer["what"])
            if tally.inputs % 100 == 0 or answer["outcome"] == "fault":
                place.write_text(json.dumps(vars(tally)))
    place.write_text(json.dumps(vars(tally)))
    return tally


def guided(kind: Kind, output: Path, seconds: float, seed: int) -> None:
    """Lets atheris choose the inputs, see its documentation; it ends the process."""
    corpus, folder = output / "corpus" / kind.name, output / "run" / kind.name / "input"
    corpus.mkdir(parents=True, exist_ok=True)
    for place, data in enumerate(kind.seeds(output / "material")):
        (corpus / f"seed-{place}").write_bytes(data)
    tally, started = Tally(kind.name), time.monotonic()
    limit()

    def one(data: bytes) -> None:
        if not data:
            return
        (output / "run" / f"{kind.name}.last").write_bytes(data)
        answer = {"number": tally.inputs, **judged(kind, data, folder, output / "material")}
        if answer["outcome"] == "fault" and answer["what"] not in tally.faults:
            keep(output, kind, tally.inputs, data, answer["what"])
        tally.add(answer)
        if time.monotonic() - started > seconds:
            report([tally])
            sys.stdout.flush()
            os._exit(0)

    def change(data: bytes, most: int, number: int) -> bytes:
        return kind.change(data, random.Random(f"{seed} {number}"))[:most]

    words = [sys.argv[0], str(corpus), f"-seed={seed + 1}", "-max_len=200000", "-timeout=60", "-rss_limit_mb=0"]
    atheris.Setup([*words, "-handle_alrm=0", "-print_final_stats=1"], one, custom_mutator=change)
    atheris.Fuzz()


def report(tallies: list[Tally]) -> None:
    print(HEADING)
    for tally in tallies:
        print(tally.row())
    total = Tally("all")
    for tally in tallies:
        total.inputs += tally.inputs
        total.seconds += tally.seconds
        total.refused += tally.refused
        total.accepted += tally.accepted
        total.faults += tally.faults
        total.slowest, total.megabytes = max(total.slowest, tally.slowest), max(total.megabytes, tally.megabytes)
    print(total.row())
    for tally in tallies:
        for what, times in tally.faults.most_common():
            print(f"{tally.name}, {times} times: {what}", file=sys.stderr)


def prepared(output: Path) -> Path:
    """The folder of the material, made in a process of its own: no thread of a library may live when processes fork."""
    material = output / "material"
    if not material.is_dir():
        child = os.fork()
        if child == 0:
            status = 1
            try:
                made_material(output / "part")
                (output / "part").rename(material)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        _, status = os.waitpid(child, 0)
        if status:
            raise SystemExit("the material could not be made")
    return material


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--count", type=int, default=100_000, help="of all kinds together")
    parser.add_argument("--kinds", nargs="+", choices=[kind.name for kind in KINDS], default=[])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", metavar="KIND:NUMBER", help="one input, with the traceback of a fault")
    parser.add_argument("--guided", type=float, metavar="SECONDS", help="of each kind, by atheris")
    options = parser.parse_args()
    output = options.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    material = prepared(output)
    (output / "run").mkdir(exist_ok=True)
    os.chdir(output / "run")  # relative paths are seen too
    if options.only:
        name, number = options.only.split(":")
        kind = next(kind for kind in KINDS if kind.name == name)
        limit()
        data = made(kind, kind.seeds(material), options.seed, int(number))
        print(judged(kind, data, output / "run" / name / "input", material, show=True))
        return
    kinds = [kind for kind in KINDS if not options.kinds or kind.name in options.kinds]
    if options.guided:
        for kind in kinds:
            child = os.fork()
            if child == 0:
                (output / "run" / kind.name).mkdir(exist_ok=True)
                guided(kind, output, options.guided, options.seed)
            os.waitpid(child, 0)
        return
    total = sum(kind.count for kind in kinds)
    tallies = []
    for kind in kinds:
        tallies.append(fuzzed(kind, output, max(1, round(options.count * kind.count / total)), options.seed))
        print(tallies[-1].row(), file=sys.stderr, flush=True)
    report(tallies)


if __name__ == "__main__":
    main()
