"""Kills every command that writes, and lets it fail in other ways: no result is lost, none is left by halves.

    python benchmarks/kill.py -o OUT                       every command, 50 kills each, then the other failures
    python benchmarks/kill.py -o OUT tune calibrate --kills 10 --troubles    these two, killed alone

Each command runs over the result of an older run with other options, in a process group that SIGKILL ends: a third of
the moments is drawn from the whole run, a third from its last fifth, and a third is a change in the output's folder.
After each kill the files that belong together are all of the older run or all of an undisturbed one. Then the same
command runs to its end: it gives the bytes of the undisturbed run, and nothing is left beside the output, in the
temporary folder, or of the processes.

The other failures are a full disk, a read-only one, two runs in one folder, a clock that was set back, and too little
memory (RLIMIT_AS): one line says what is wrong, and the older result is untouched. Full and read-only disks need the
right to mount.

Imports take longer than the work, so each command is forked from a process that has imported everything. GPU and
TensorRT are the stand-ins of ``tests/standin``.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import importlib
import json
import os
import pkgutil
import random
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.forked import become  # noqa: E402

PATIENCE = 300
"""Seconds after which a run is taken for one that hangs."""

State = dict[str, bytes]
"""Content of the files of a folder, by their paths in it."""


# The process that forks


def serve() -> None:
    """Reads requests, one a line, and answers each with the process id and, at its end, the exit status."""
    for name in ("cv2", "PIL.Image", "scipy.optimize", "rich.progress", "cryptography.fernet", "torch.onnx"):
        importlib.import_module(name)
    import trtdet

    for module in pkgutil.walk_packages(trtdet.__path__, "trtdet."):
        if not module.name.endswith(("__main__", "build_process")):
            with contextlib.suppress(ImportError):
                importlib.import_module(module.name)
    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w", buffering=1)
    answers.write("ready\n")
    for line in requests:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            os.setpgid(0, 0)
            requests.close()
            answers.close()
            log = request["log"]
            become(partial(_run_command, request), Path(f"{log}.out"), Path(f"{log}.err"))
        with contextlib.suppress(OSError):  # the child was faster
            os.setpgid(child, child)
        answers.write(f"{child}\n")
        _, status = os.waitpid(child, 0)
        answers.write(f"{os.waitstatus_to_exitcode(status)}\n")


def _run_command(request: Mapping[str, object]) -> int:
    """Runs a command of trtdet as a process of its own would; returns its exit status."""
    os.environ["TMPDIR"] = str(request["temporary"])
    tempfile.tempdir = None
    ahead = float(str(request["clock"]))
    if ahead:
        now = time.time
        time.time = lambda: now() + ahead
    try:
        return run([str(argument) for argument in request["arguments"]])  # type: ignore[attr-defined]
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 1


def run(words: Sequence[str]) -> int:
    """Runs a command line of trtdet, which may begin with values for constants: ``MODULE.NAME=VALUE``."""
    from trtdet.cli import main

    while re.match(r"[a-z_.]+\.[A-Z_]+=", words[0]):
        name, value = words[0].split("=")
        module, constant = name.rsplit(".", 1)
        # What cannot be imported, for lack of memory, the command says itself.
        with contextlib.suppress(ImportError, MemoryError):
            setattr(importlib.import_module(module), constant, Path(value) if "/" in value else json.loads(value))
        words = words[1:]
    return main(list(words))


@dataclass(frozen=True)
class Ended:
    """A run that ended: exit status (negative: the signal), error output, seconds, and changes seen in the folder."""

    status: int
    errors: str
    seconds: float
    changes: int = 0


class Forks:
    """Starts commands from a process that has imported everything."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=dict(environment)
        )
        self._line()

    def _line(self, timeout: float = PATIENCE) -> str:
        """The next line of an answer; empty if there is none yet."""
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], timeout)[0]:
            return ""
        line = bytearray()
        while not line.endswith(b"\n"):
            piece = os.read(self._process.stdout.fileno(), 1)
            if not piece:
                raise SystemExit(f"the process that forks ended with {self._process.wait()}")
            line += piece
        return line.decode().strip()

    def start(self, arguments: Sequence[str], place: Place, log: str = "log", clock: float = 0.0) -> Run:
        request = {
            "arguments": list(arguments),
            "temporary": str(place.temporary),
            "log": str(place.folder / log),
            "clock": clock,
        }
        errors = place.folder / f"{log}.err"
        errors.write_text("")
        assert self._process.stdin is not None
        started = time.monotonic()
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        return Run(int(self._line()), errors, started=started, line=self._line)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@dataclass
class Run:
    """A command at work."""

    pid: int
    errors: Path
    started: float
    line: Callable[[float], str]

    def wait(self, seconds: float = PATIENCE) -> Ended | None:
        """None if it is still at work after so many seconds from its start."""
        answer = self.line(max(0.0, self.started + seconds - time.monotonic()))
        if not answer:
            if seconds < PATIENCE:
                return None
            self.kill()
            raise SystemExit(f"a run hangs: {self.errors.read_text()}")
        text = self.errors.read_text(errors="replace")
        return Ended(int(answer), text, time.monotonic() - self.started)

    def kill(self) -> Ended:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        ended = self.wait()
        assert ended is not None
        return ended

    def watch(self, folder: Path, most: float = float("inf")) -> Ended | None:
        """Counts changes in the folder to the run's end; None as soon as there were so many."""
        changes, last = 0, _signature(folder)
        while True:
            answer = self.line(0.002)
            if answer:
                return Ended(int(answer), self.errors.read_text(errors="replace"), 0.0, changes=changes)
            now = _signature(folder)
            if now != last:
                changes, last = changes + 1, now
                if changes >= most:
                    return None


def _signature(folder: Path) -> list[tuple[str, int, int]]:
    """Names, inodes and sizes of all that is in a folder, while it changes."""
    entries: list[tuple[str, int, int]] = []
    waiting = [str(folder)]
    while waiting:
        with contextlib.suppress(OSError), os.scandir(waiting.pop()) as found:
            for entry in found:
                with contextlib.suppress(OSError):
                    entries.append((entry.path, entry.inode(), entry.stat(follow_symlinks=False).st_size))
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
    return sorted(entries)


@dataclass(frozen=True)
class Place:
    """Folders of the runs of a command: the output is in ``work``."""

    folder: Path

    @property
    def work(self) -> Path:
        return self.folder / "work"

    @property
    def temporary(self) -> Path:
        return self.folder / "temporary"

    def reset(self, state: State) -> None:
        """Puts the files of a state in the place of all others."""
        for folder in (self.work, self.temporary):
            if not os.path.ismount(folder):
                shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True, exist_ok=True)
            for path in folder.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        for name, content in state.items():
            path = self.work / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    def state(self) -> State:
        return {str(path.relative_to(self.work)): path.read_bytes() for path in self.work.rglob("*") if path.is_file()}

    def left(self) -> list[str]:
        """Temporaries in the output's folder, and all in the folder of temporaries."""
        names = [path for path in self.work.rglob("*") if _is_temporary(path.name)] + [*self.temporary.iterdir()]
        return [str(path.relative_to(self.folder)) for path in names]

    def orphans(self) -> list[int]:
        """Processes that work in these folders though their run has ended; they are ended too."""
        limit = time.monotonic() + 3
        while (found := self._processes()) and time.monotonic() < limit:
            time.sleep(0.02)
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return found

    def _processes(self) -> list[int]:
        found = []
        for path in Path("/proc").glob("[0-9]*/cwd"):
            with contextlib.suppress(OSError):
                if str(path.readlink()).startswith(str(self.folder)):
                    found.append(int(path.parent.name))
        return found


def _is_temporary(name: str) -> bool:
    return name.startswith(".") and ".trtdet" in name


# The commands


@dataclass(frozen=True)
class Command:
    """A command and the older run that it is started over.

    ``{in}`` in arguments is the folder of inputs, ``{work}`` that of outputs; :func:`run` has constants. Files whose
    patterns are in one row of ``together`` belong together; ``**`` is every file that no other row has. ``steps`` are
    files of work that resumes, which may be at any step between two runs. ``later`` is a file that is added to a
    complete set. ``measures``: every run gives other numbers.
    """

    name: str
    arguments: str
    older: tuple[str, ...]
    together: tuple[tuple[str, ...], ...] = (("**",),)
    steps: tuple[str, ...] = ()
    later: str = ""
    standin: bool = False
    measures: bool = False

    def words(self, text: str, place: Place, inputs: Path) -> list[str]:
        return [word.replace("{in}", str(inputs)).replace("{work}", str(place.work)) for word in text.split()]


_SCORED = "--set calibration.check_input=false --images {in}/val --annotations {in}/annotations/instances_val.json"
_FEWER = _SCORED.replace("=false", "=false nms.max_detections=5")
_VAL = "--val-images {in}/val --annotations {in}/annotations/instances_val.json"
_MODEL = "{in}/small.onnx --config shapes --images {in}/calibration"
_UNLOOKED = "--set calibration.check_input=false"
_FEW = f"--num-images 2 --calib minmax --effort none {_UNLOOKED}"
_GRID = "--num-images 2 --effort none"
_BUILD = f"build {_MODEL} {_FEW} --int8-all"
_ONNX = f"{_BUILD} --backend onnxruntime"
_ONE = "{in}/one.onnx --config {in}/factory.yaml --images {in}/calibration"
_RTX = f"build {_ONE} {_FEW} --int8-all --backend tensorrt-rtx"
_PREPARE = f"prepare {_ONE} {_FEW} --for tensorrt-10.3 --points 0 --val-images {{in}}/val --max-map-drop 100"
_BUNDLE = f"{_ONNX} --guard off -o {{work}}/bundle"
_EXPORT = "export factory:small --config {in}/factory.yaml"
_DEMO = "trtdet.demo.walkthrough"
_FAST_DEMO = f'{_DEMO}.SHAPES_MODEL={{in}}/small.onnx {_DEMO}.RULES=["minmax"] demo -o {{work}}/demo'
_EXPERIMENT = ("experiment.json", "experiment.md", "plans/*")

COMMANDS = (
    Command(
        "calibrate",
        f"calibrate {_MODEL} --num-images 2 {_UNLOOKED} -o {{work}}/ranges.json",
        (f"calibrate {_MODEL} --num-images 3 {_UNLOOKED} --calib minmax -o {{work}}/ranges.json",),
    ),
    Command(
        "build, onnxruntime",
        f"{_ONNX} {_VAL} -o {{work}}/bundle",
        (f"{_ONNX} --num-images 3 {_VAL} -o {{work}}/bundle",),
        later="bundle/worth.json",
    ),
    Command(
        "build, tensorrt-rtx",
        f"{_RTX} -o {{work}}/bundle",
        (f"{_RTX} --num-images 3 -o {{work}}/bundle",),
        later="bundle/worth.json",
    ),
    Command(
        "build --guard 1.02",
        f"{_RTX} --guard 1.02 -o {{work}}/bundle",
        (f"{_RTX} --guard off --num-images 3 -o {{work}}/bundle",),
    ),
    Command(
        "prepare",
        f"{_PREPARE} -o {{work}}/prepared",
        (f"{_PREPARE} --num-images 3 -o {{work}}/prepared",),
    ),
    Command(
        "finish (stand-in)",
        "finish {in}/prepared --seconds 0.05 -o {work}/bundle",
        ("finish {in}/prepared --seconds 0.05 --budget 0.000001 -o {work}/bundle",),
        steps=("*.timing-cache",),
        standin=True,
    ),
    Command(
        "build, tensorrt (stand-in)",
        f"{_BUILD} --backend tensorrt --guard off -o {{work}}/bundle",
        (f"{_BUILD} --num-images 3 --backend tensorrt --guard off -o {{work}}/bundle",),
        steps=("*.timing-cache",),
        standin=True,
    ),
    Command(
        "eval",
        f"eval {{in}}/small.onnx --config shapes {_SCORED} -o {{work}}/eval.json",
        (f"eval {{in}}/small.onnx --config shapes {_FEWER} -o {{work}}/eval.json",),
    ),
    Command(
        "sensitivity",
        f"sensitivity {_MODEL} {_FEW} --int8-all -o {{work}}/sensitivity.json",
        (),
        steps=("*.jsonl",),
    ),
    Command(
        "sweep",
        f"sweep {_MODEL} {_GRID} --calib minmax entropy --int8-all --backend onnxruntime {_VAL} -o {{work}}/swept",
        (f"sweep {_MODEL} {_GRID} --calib minmax --int8-all --backend onnxruntime {_VAL} -o {{work}}/swept",),
        together=(tuple(f"swept/{name}" for name in _EXPERIMENT),),
        steps=("swept/rows.jsonl", "swept/provenance.json", "swept/*.npz"),
    ),
    Command(
        "tune",
        f"tune {_MODEL} {_FEW} --points 3 --backend onnxruntime {_VAL} -o {{work}}/tuned",
        (f"tune {_MODEL} {_FEW} --points 2 --backend onnxruntime {_VAL} -o {{work}}/tuned",),
        together=(tuple(f"tuned/{name}" for name in _EXPERIMENT),),
        steps=("tuned/rows.jsonl", "tuned/provenance.json", "tuned/*.npz", "tuned/ranking*", "tuned/options.json"),
    ),
    Command(
        "predict",
        "predict {in}/small.onnx --config shapes {in}/val -o {work}/found",
        ("predict {in}/small.onnx --config shapes {in}/val --score-threshold 0.6 -o {work}/found",),
    ),
    Command(
        "report",
        "report {in}/bundle {in}/other -o {work}/report.html",
        ("report {in}/bundle -o {work}/report.html",),
    ),
    Command(
        "compare",
        "compare {in}/bundle {in}/other -o {work}/difference.html",
        ("compare {in}/other {in}/bundle -o {work}/difference.html",),
    ),
    Command(
        "package, Triton",
        "package {in}/bundle --format triton -o {work}/repository",
        ("package {in}/other --format triton -o {work}/repository",),
    ),
    Command(
        "package, DeepStream",
        "package {in}/bundle --format deepstream -o {work}/deepstream",
        ("package {in}/bundle --format deepstream --name older -o {work}/deepstream",),
    ),
    Command("sign", "sign {work}/bundle --key {in}/second.pem", (_BUNDLE, "sign {work}/bundle --key {in}/first.pem")),
    Command(
        "init",
        "init {in}/small.onnx --images {in}/val --num-images 3 --classes a,b,c,d,e,f,g,h,i,j --force "
        "--pictures {work}/pictures -o {work}/model.yaml",
        (
            "init {in}/small.onnx --images {in}/val --num-images 2 --classes k,l,m,n,o,p,q,r,s,t --force "
            "--pictures {work}/pictures -o {work}/model.yaml",
        ),
        together=(("model.yaml",), ("pictures/*",)),
    ),
    Command(
        "export",
        f"{_EXPORT} -o {{work}}/model.onnx",
        (f"{_EXPORT} --opset 16 -o {{work}}/model.onnx",),
    ),
    Command(
        "export model.onnx",
        "export {in}/small.onnx -o {work}/model.onnx",
        (f"{_EXPORT} --opset 16 -o {{work}}/model.onnx",),
    ),
    Command(
        "audit --onnx",
        "audit {in}/engine --onnx {work}/audited.onnx",
        ("audit {in}/engine --gpu T4 --onnx {work}/audited.onnx",),
    ),
    Command(
        "bench",
        "bench {in}/bundle --seconds 0.2 --warm-up 0.1 --min-runs 5 -o {work}/bench.json",
        ("bench {in}/other --seconds 0.2 --warm-up 0.1 --min-runs 5 -o {work}/bench.json",),
        measures=True,
    ),
    Command(
        "profile",
        "profile {in}/bundle --runs 5 -o {work}/profile.json",
        ("profile {in}/other --runs 5 -o {work}/profile.json",),
        measures=True,
    ),
    Command(
        "demo",
        f"{_DEMO}.CALIBRATION_IMAGES=3 {_DEMO}.VALIDATION_IMAGES=2 {_FAST_DEMO}",
        (f"{_DEMO}.CALIBRATION_IMAGES=2 {_DEMO}.VALIDATION_IMAGES=1 {_FAST_DEMO}",),
        together=(
            *((f"demo/data/{split}/*", f"demo/data/*_{split}.json") for split in ("calibration", "val")),
            *((f"demo/bundles/{name}/*",) for name in ("fp32", "int8", "int8-minmax")),
            ("demo/pictures/*",),
            ("demo/results.*",),
        ),
    ),
)

FACTORY = """
import torch


class Small(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.body = torch.nn.Conv2d(3, 9, 32, 32)

    def forward(self, images):
        cells = 0.01 * self.body(images).flatten(2).transpose(1, 2)
        return torch.cat((cells[..., :4], cells[..., 4:].sigmoid()), 2)


def small():
    return Small().eval()
"""

FACTORY_CONFIG = """
name: small
classes: [a, b, c, d]
input: {size: [64, 64]}
head: {decode: yolox, strides: [32]}
"""


def make_inputs(folder: Path, forks: Forks, place: Place) -> None:
    """Images, models, keys and bundles that the commands read, made once."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "factory.py").write_text(FACTORY)
    (folder / "factory.yaml").write_text(FACTORY_CONFIG)
    done = folder / "done"
    if done.exists():
        return
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from trtdet.demo import shapes

    shapes.generate(folder, "calibration", 3)
    shapes.generate(folder, "val", 3)
    shutil.copy(ROOT / "tests" / "fixtures" / "small.onnx", folder)
    form = serialization.PrivateFormat.PKCS8
    for name in ("first.pem", "second.pem"):
        key = Ed25519PrivateKey.generate()
        pem = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
        (folder / name).write_bytes(pem)
    place.reset({})
    for line in (
        f"{_ONNX} --guard off -o {{in}}/bundle",
        f"{_ONNX} --guard off --num-images 3 -o {{in}}/other",
        f"{_EXPORT} -o {{in}}/one.onnx",
        f"{_RTX} --guard off -o {{in}}/engine",
        f"{_PREPARE} -o {{in}}/prepared",
    ):
        finished(forks.start(Command("", "", ()).words(line, place, folder), place))
    done.touch()


def finished(run: Run) -> Ended:
    ended = run.wait()
    assert ended is not None
    if ended.status != 0:
        raise SystemExit(f"a run that nothing disturbed failed: {ended.errors}")
    return ended


# Judging


_TIMES = ("created", "seconds", "ms_per_image", "built", "time", "latency_ms", "ms", "ratio", "ratio_low", "ratio_high")


def masked(content: bytes, measured: bool) -> object:
    """What of a file does not depend on the clock: JSON without times and hashes, or text without numbers.

    Of a file of measurements (``measured``) that is which values it has.
    """
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return content
    try:
        rows = [json.loads(text)]
    except ValueError:
        try:
            rows = [json.loads(line) for line in text.splitlines()]
        except ValueError:
            return re.sub(r"[0-9]+", "0", text)
    return [sorted(row) for row in rows] if measured else [_without_times(row) for row in rows]


def _without_times(value: object) -> object:
    if isinstance(value, dict):
        return {key: _without_times(item) for key, item in value.items() if key not in (*_TIMES, "worth.json")}
    if isinstance(value, list):
        return [_without_times(item) for item in value]
    # The hash of a file with times is another each time.
    return "sha256" if isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) else value


@dataclass(frozen=True)
class Judge:
    """What a state of the output is, by the states that two runs without a kill left."""

    command: Command
    old: State
    new: State
    unstable: frozenset[str]
    """Files that differ between two runs that nothing disturbed."""

    def groups(self, names: set[str]) -> list[set[str]]:
        """The names that belong together, without files of steps."""
        rest = {name for name in names if not any(fnmatch.fnmatch(name, step) for step in self.command.steps)}
        groups = []
        for patterns in self.command.together:
            group = {name for name in rest if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)}
            groups.append(group)
            rest -= group
        return groups + [{name} for name in sorted(rest)]

    def parts(self, state: State) -> list[str]:
        """``old``, ``new``, ``to add`` (all but the file that is added later) or ``half: why`` for each group of files
        that differs between old and new."""
        state = {name: content for name, content in state.items() if ".trtdet" not in name}
        parts = []
        for group in self.groups({*state, *self.old, *self.new}):
            now, old, new = ({name: each[name] for name in group & each.keys()} for each in (state, self.old, self.new))
            if old == new and not group & self.unstable:
                parts += [] if now == old else [f"half: {self._difference(now, new)}"]
            elif now == old:
                parts.append("old")
            elif not self._difference(now, new):
                parts.append("new")
            elif self._difference(now, new) == self.command.later:
                parts.append("to add")
            else:
                news = sorted(name for name in now if now[name] != old.get(name))
                parts.append(f"half: {self._difference(now, new)}; not old: {news}")
        return parts

    def _difference(self, now: State, new: State) -> str:
        """Names that differ from the new files, apart from times."""
        return ", ".join(name for name in sorted({*now, *new}) if not self.equal(name, now.get(name), new.get(name)))

    def equal(self, name: str, first: bytes | None, second: bytes | None) -> bool:
        if first is None or second is None or name not in self.unstable:
            return first == second
        # The manifest lists the file that is added later.
        return masked(first, self.command.measures) == masked(second, self.command.measures)

    def unlike(self, state: State) -> list[str]:
        """Files of a finished run that are not those of the undisturbed one."""
        names = {name for name in state if ".trtdet" not in name} | self.new.keys()
        return [name for name in sorted(names) if not self.equal(name, state.get(name), self.new.get(name))]


@dataclass(frozen=True)
class Bench:
    """What the runs of a command need; the seconds are of an undisturbed run, and so are the changes in the folder."""

    command: Command
    forks: Callable[[int], Forks]
    """By number, for several runs at once."""
    place: Place
    inputs: Path
    judge: Judge
    seconds: float
    changes: int
    environment: Mapping[str, str]

    @property
    def words(self) -> list[str]:
        return self.command.words(self.command.arguments, self.place, self.inputs)

    def start(self, clock: float = 0.0, number: int = 0) -> Run:
        return self.forks(number).start(self.words, self.place, log=f"log{number}", clock=clock)

    def run(self, clock: float = 0.0) -> Ended:
        run = self.start(clock)
        return run.wait() or run.kill()

    def trouble(self, kind: str) -> Trouble:
        return Trouble(self.command.name, kind)


# Kills


@dataclass
class Row:
    """What the kills of a command left."""

    command: str
    seconds: float
    files: int
    kills: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    unstable: tuple[str, ...] = ()

    def line(self) -> str:
        kills = self.kills
        counts = " | ".join(
            str(kills[name])
            for name in (
                "kills",
                "old",
                "new",
                "to add",
                "parts",
                "half",
                "finished",
                "orphans",
                "runs",
                "left",
                "equal",
            )
        )
        return f"| {self.command} | {self.seconds:.1f} | {self.files} | {counts} | {', '.join(self.unstable) or '-'} |"


COLUMNS = (
    *("command", "seconds", "files", "kills", "old", "new", "new, to be compared", "some parts new", "half"),
    *("ended before", "processes left", "next runs", "next run leaves", "next run equal", "files with times"),
)


def kill(bench: Bench, count: int, seed: int, limit: float = float("inf"), every: int = 1) -> Row:
    """Kills a command so often, or for so many seconds, and judges what is left; after ``every`` so many kills the
    command runs to its end."""
    end = time.monotonic() + limit
    command, place, judge, seconds = bench.command, bench.place, bench.judge, bench.seconds
    rng = random.Random(f"{seed} {command.name}")
    row = Row(command.name, seconds, files=len(judge.new), unstable=tuple(sorted(judge.unstable)))
    for number in range(count):
        if time.monotonic() > end:
            break
        place.reset(judge.old)
        run = bench.start()
        kind = number % 3
        if kind == 2 and bench.changes:
            moment = f"change {(wanted := rng.randint(1, bench.changes))}"
            early = run.watch(place.work, wanted)
        else:
            after = seconds * rng.uniform(0.8 if kind else 0.0, 1.05)
            moment = f"{after:.3f} s"
            early = run.wait(after)
        ended = early or run.kill()
        row.kills["kills"] += 1
        row.kills["finished"] += ended.status != -signal.SIGKILL
        orphans = place.orphans()
        row.kills["orphans"] += bool(orphans)
        read_as_trtdet(place.work)
        parts = judge.parts(place.state())
        halves = [part for part in parts if part.startswith("half")]
        what = "half" if halves else parts[0] if len({*parts}) == 1 else "parts" if parts else "old"
        row.kills[what] += 1
        row.faults += [f"killed after {moment}: {half}" for half in halves]
        row.faults += [f"killed after {moment}: processes go on: {orphans}"] if orphans else []
        if number % every:
            continue
        ended = bench.run()
        row.kills["runs"] += 1
        left, unlike = place.left(), judge.unlike(place.state())
        row.kills["left"] += bool(left)
        row.kills["equal"] += not unlike and ended.status == 0
        if ended.status != 0:
            row.faults.append(f"killed after {moment}: the next run fails: {ended.errors.strip()}")
        row.faults += [f"killed after {moment}: the next run leaves {left}"] if left else []
        row.faults += [f"killed after {moment}: the next run gives another {unlike}"] if unlike else []
    return row


def read_as_trtdet(folder: Path) -> None:
    """Does what trtdet does before it reads one of several files that belong together."""
    from trtdet.files import finish_replacing

    for path in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        finish_replacing(path)


def undisturbed(command: Command, forks: Forks, place: Place, inputs: Path) -> tuple[Judge, float, int]:
    """The states before and after a command, its seconds, and the changes that it makes in the output's folder."""
    words = command.words(command.arguments, place, inputs)
    place.reset({})
    for older in command.older:
        finished(forks.start(command.words(older, place, inputs), place))
    old = place.state()
    states, seconds = [], []
    for _ in range(2):
        place.reset(old)
        seconds.append(finished(forks.start(words, place)).seconds)
        states.append(place.state())
        if place.left():
            raise SystemExit(f"{command.name} leaves {place.left()}")
    place.reset(old)
    ended = forks.start(words, place).watch(place.work)
    assert ended is not None
    unstable = frozenset(name for name, content in states[0].items() if states[1].get(name) != content)
    judge = Judge(command, old, states[0], unstable=unstable)
    if unlike := judge.unlike(states[1]):
        raise SystemExit(f"{command.name} gives other files with each run: {unlike}")
    return judge, min(seconds), ended.changes


# Other failures


@dataclass
class Trouble:
    """Runs under one kind of failure: how many ended how."""

    command: str
    kind: str
    ends: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    line: str = ""
    """An error line of a run."""

    def add(self, ended: Ended, judge: Judge, place: Place, what: str) -> None:
        """Counts a run, which must have done its work, or have said in one line why not and have changed nothing."""
        problem = judged_error(ended)
        read_as_trtdet(place.work)
        parts = judge.parts(place.state())
        if ended.status == 0:
            self.ends["done"] += 1
            problem = f"gives another {unlike}" if (unlike := judge.unlike(place.state())) else ""
        else:
            self.ends["refused"] += 1
            error = next((line for line in ended.errors.splitlines() if "trtdet: error: " in line), "")
            self.line = self.line or error.removeprefix("trtdet: error: ")
        if halves := [part for part in parts if part.startswith("half")]:
            problem = problem or halves[0]
        if left := place.left():
            problem = problem or f"leaves {left}"
        if problem:
            self.ends["faults"] += 1
            self.faults.append(f"{what}: {problem}")

    def row(self) -> str:
        ends = " | ".join(str(self.ends[name]) for name in ("done", "refused", "faults"))
        return f"| {self.command} | {self.kind} | {ends} | {self.line[:160] or '-'} |"


TROUBLES = ("command", "failure", "done", "refused", "faults", "an error line")


def judged_error(ended: Ended) -> str:
    """What is wrong with how a failed run tells of it; empty if nothing is."""
    if ended.status == 0:
        return ""
    lines = [line for line in ended.errors.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("trtdet: error: ")]
    if ended.status != 1:
        return f"exit status {ended.status}: {' / '.join(lines[-3:])}"
    if "Traceback" in ended.errors or len(errors) != 1 or "unexpected" in errors[0]:
        return f"not one clear line: {' / '.join(lines[-4:])}"
    return ""


@contextlib.contextmanager
def small_disk(folder: Path, size: int) -> Iterator[None]:
    """A file system of so many bytes in the place of a folder. Raises CalledProcessError: this user must not mount."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    subprocess.run(command, check=True, capture_output=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


_PAGE = 4096


def pages(state: State) -> int:
    """Bytes that the files of a state take on a tmpfs, with their folders."""
    folders = {parent for name in state for parent in Path(name).parents}
    return sum(-(-len(content) // _PAGE) * _PAGE for content in state.values()) + _PAGE * len(folders)


def full_disk(bench: Bench) -> Trouble:
    """Over the old result: with room for a part of the new one, then with no room for temporaries elsewhere."""
    trouble, place, judge = bench.trouble("full disk"), bench.place, bench.judge
    old, new = pages(judge.old), pages(judge.new)
    for share in (0.0, 0.2, 0.5, 0.8):
        with small_disk(place.work, old + int(share * new) // _PAGE * _PAGE + _PAGE):
            place.reset(judge.old)
            trouble.add(bench.run(), judge, place, f"room for {share:.0%}")
    with small_disk(place.temporary, 2 * _PAGE):
        place.reset(judge.old)
        trouble.add(bench.run(), judge, place, "no room for temporaries")
    return trouble


def read_only(bench: Bench) -> Trouble:
    trouble, place, judge = bench.trouble("read-only"), bench.place, bench.judge
    with small_disk(place.work, 1 << 28):
        place.reset(judge.old)
        subprocess.run(["mount", "-o", "remount,ro", str(place.work)], check=True)
        trouble.add(bench.run(), judge, place, "read-only")
    return trouble


def two_runs(bench: Bench) -> Trouble:
    """The same command twice in one folder, at the same time or a part of its run later."""
    trouble, place, judge = bench.trouble("two runs at once"), bench.place, bench.judge
    for share in (0.0, 0.5):
        place.reset(judge.old)
        first = bench.start()
        time.sleep(share * bench.seconds)
        second = bench.start(number=1)
        ends = [run.wait() or run.kill() for run in (first, second)]
        for number, ended in enumerate(ends):
            if ended.status == 0:
                trouble.add(ended, judge, place, f"run {number} of two, {share:.0%} apart")
            else:
                problem = judged_error(ended)
                trouble.ends["refused"] += 1
                trouble.ends["faults"] += bool(problem)
                trouble.faults += [problem] if problem else []
                trouble.line = ended.errors.strip().splitlines()[-1].removeprefix("trtdet: error: ")
    return trouble


_YEARS = 3e8


def clock_back(bench: Bench) -> Trouble:
    """A killed run's files are from the future, and the clock goes back."""
    trouble, place, judge = bench.trouble("clock set back"), bench.place, bench.judge
    place.reset(judge.old)
    run = bench.start()
    (run.wait(0.7 * bench.seconds)) or run.kill()
    ahead = time.time() + _YEARS
    for path in [*place.work.rglob("*"), *place.temporary.rglob("*")]:
        os.utime(path, (ahead, ahead), follow_symlinks=False)
    trouble.add(bench.run(clock=-_YEARS), judge, place, "clock set back")
    return trouble


MEMORY = (150, 250, 350, 500, 700, 900, 1200, 1600, 2200, 3000)
"""Sizes of the address space, in MB."""


def little_memory(bench: Bench) -> Trouble:
    """In processes of their own, whose imports are a part of it."""
    trouble, place, judge = bench.trouble("little memory"), bench.place, bench.judge
    for size in MEMORY:
        place.reset(judge.old)
        program = (
            f"import resource, sys; resource.setrlimit(resource.RLIMIT_AS, ({size} << 20, {size} << 20)); "
            f"sys.path.insert(0, {str(ROOT)!r}); from benchmarks.kill import run; raise SystemExit(run(sys.argv[1:]))"
        )
        done = subprocess.run(
            [sys.executable, "-c", program, *bench.words],
            env={**bench.environment, "TMPDIR": str(place.temporary)},
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE,
        )
        trouble.add(Ended(done.returncode, done.stderr, 0.0), judge, place, f"{size} MB")
    return trouble


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commands", nargs="*", help="names, or their beginnings (default: all)")
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder of inputs, runs and results.md")
    parser.add_argument("--kills", type=int, default=50, help="kills of each command (default: 50)")
    parser.add_argument("--troubles", nargs="*", choices=TROUBLE_KINDS, default=TROUBLE_KINDS, help="other failures")
    parser.add_argument("--finish-every", type=int, default=1, help="let the next run end after so many kills")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="most seconds for the kills of a command")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    output = options.output.resolve()
    chosen = [one for one in COMMANDS if not options.commands or one.name.startswith(tuple(options.commands))]
    kills, troubles = Table(COLUMNS), Table(TROUBLES)
    with Runs(output) as runs:
        for command in chosen:
            bench = runs.bench(command)
            if options.kills:
                row = kill(bench, options.kills, options.seed, limit=options.seconds, every=options.finish_every)
                kills.add(row.line(), row.faults)
            for kind in options.troubles:
                try:
                    trouble = TROUBLE_KINDS[kind](bench)
                except subprocess.CalledProcessError as error:
                    print(f"SKIPPED: {kind}: mounting is not allowed here: {error.stderr}", flush=True)
                    continue
                troubles.add(trouble.row(), trouble.faults)
            (output / "results.md").write_text(f"{kills.text()}\n{troubles.text()}")


class Table:
    """Rows of Markdown, printed as they come."""

    def __init__(self, columns: Sequence[str]) -> None:
        self._lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]

    def add(self, line: str, faults: Sequence[str]) -> None:
        self._lines.append(line)
        print(line, *(f"    {fault}" for fault in faults), sep="\n", flush=True)

    def text(self) -> str:
        return "\n".join((*self._lines, ""))


TROUBLE_KINDS: dict[str, Callable[[Bench], Trouble]] = {
    "full": full_disk,
    "read-only": read_only,
    "two": two_runs,
    "clock": clock_back,
    "memory": little_memory,
}


class Runs:
    """The processes that fork, with the inputs of all commands in a folder; as a context manager it ends them."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._inputs, self._standin = folder, folder / "inputs", folder / "standin"
        self._forks: dict[tuple[bool, int], Forks] = {}
        make_inputs(self._inputs, self.forks(False), Place(folder / "making"))

    def __enter__(self) -> Runs:
        return self

    def __exit__(self, *_: object) -> None:
        for forks in self._forks.values():
            forks.close()

    def forks(self, standin: bool, number: int = 0) -> Forks:
        if (standin, number) not in self._forks:
            if standin and not self._standin.exists():
                sys.path.insert(0, str(ROOT / "tests"))
                from standin.machine import Machine

                Machine.make(self._standin)
            self._forks[standin, number] = Forks(self.environment(standin))
        return self._forks[standin, number]

    def environment(self, standin: bool) -> dict[str, str]:
        """One thread, so that runs take as long each time, and the stand-ins if asked for."""
        paths = [str(ROOT), str(self._inputs)]
        kept = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        if standin:
            paths.insert(0, str(ROOT / "tests" / "standin"))
            # 2 tensors are dequantised where the layer of the prepared model is in INT8: that network is the fast one.
            kept |= {"LD_LIBRARY_PATH": str(self._standin), "CUDA_STANDIN_FAST": "2"}
        return {**kept, "PYTHONPATH": os.pathsep.join(paths)}

    def bench(self, command: Command) -> Bench:
        """Runs the command undisturbed; see :class:`Bench`."""
        place = Place(self._folder / re.sub(r"\W+", "-", command.name))
        forks = self.forks(command.standin)
        judge, seconds, changes = undisturbed(command, forks, place, self._inputs)
        return Bench(
            command,
            lambda number: self.forks(command.standin, number),
            place,
            self._inputs,
            judge=judge,
            seconds=seconds,
            changes=changes,
            environment=self.environment(command.standin),
        )


if __name__ == "__main__":
    serve() if sys.argv[1:] == ["serve"] else main()
