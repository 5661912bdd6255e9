"""service/Dockerfile without a builder: what hadolint says of it, and its steps in folders instead of images.

Steps that need root or the network are not run; what they bring is taken from here: Debian's packages and the wheel of
onnxruntime are installed where the service's tests run.
"""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import IO

import pytest
from serving import Server, check, finished

SERVICE = Path(__file__).resolve().parents[2] / "service"
DOCKERFILE = SERVICE / "Dockerfile"


@dataclass
class Stage:
    """What comes after a FROM, and the folder that stands for the file system of its image."""

    base: str
    name: str
    steps: list[tuple[str, str]] = field(default_factory=list)
    root: Path = Path()
    workdir: Path = Path("/")

    def all(self, instruction: str) -> list[str]:
        return [value for name, value in self.steps if name == instruction]

    @property
    def packages(self) -> set[str]:
        """Debian's packages that its steps install."""
        (step,) = [value for value in self.all("RUN") if "apt-get install" in value]
        words = step.partition("apt-get install")[2].partition("&&")[0].split()
        return {word for word in words if not word.startswith("-")}

    def place(self, path: str) -> Path:
        """A path of the image in its folder."""
        return self.root / (self.workdir / path).relative_to("/")


@pytest.fixture
def stages():
    parse = pytest.importorskip("dockerfile_parse", reason="reads Dockerfiles: pip install 'trtdet[dev]'")
    found: list[Stage] = []
    with DOCKERFILE.open("rb") as stream:
        for step in _steps(parse, stream):
            if step[0] == "FROM":
                base, _, name = step[1].partition(" AS ")
                found.append(Stage(base, name))
            else:
                found[-1].steps.append(step)
    return found


def _steps(parse: object, stream: IO[bytes]) -> Iterator[tuple[str, str]]:
    for step in parse.DockerfileParser(fileobj=stream).structure:  # type: ignore[attr-defined]
        if step["instruction"] != "COMMENT":
            yield step["instruction"], step["value"]


@pytest.mark.parametrize("file", sorted(SERVICE.glob("Dockerfile*")), ids=lambda file: file.name)
def test_hadolint_has_nothing_to_say(file, tmp_path):
    program = shutil.which("hadolint", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if program is None:
        pytest.skip("needs hadolint: pip install 'trtdet[dev]'")
    done = finished(program, "--no-color", file)
    assert (done.stdout, done.stderr) == ("", "")
    bad = tmp_path / "Dockerfile"
    bad.write_text(file.read_text().replace("# hadolint ignore=DL3008\n", "").replace("USER 10001:10001\n", ""))
    assert "DL3008" in subprocess.run([program, bad], capture_output=True, text=True, check=False).stdout


def test_the_image_runs_as_nobody_and_is_built_with_what_build_sh_installs(stages):
    build, _, last = stages
    assert all(re.fullmatch(r"[a-z]+:[\w.-]*\d[\w.-]*", stage.base) for stage in stages)
    assert last.base == build.base
    (user,) = last.all("USER")
    assert int(user.partition(":")[0]) > 0
    assert last.steps[-4:-2] == [("USER", user), ("EXPOSE", "8080")]
    assert {"g++", "cmake", "make"} < build.packages
    assert not {name for name in last.packages if name.endswith("-dev")}
    (needed,) = re.findall(r'^packages="(.*?)"$', (SERVICE / "build.sh").read_text(), re.M | re.S)
    assert build.packages == set(needed.replace("\\", " ").split()) - {"catch2"}


def run_steps(stages: list[Stage], folder: Path) -> None:
    """Copies files from stage to stage and runs what needs neither root nor the network. Nothing is optimised, which
    takes minutes."""
    context = folder / "context"
    shutil.copytree(SERVICE, context, ignore=shutil.ignore_patterns("build"))
    for index, stage in enumerate(stages):
        stage.root = folder / f"stage{index}"
        stage.root.mkdir()
        for instruction, value in stage.steps:
            if instruction == "WORKDIR":
                stage.workdir = Path(value)
                stage.place(".").mkdir(parents=True, exist_ok=True)
            elif instruction == "COPY":
                copy(value, context, stage, stages)
            elif instruction == "RUN" and value.startswith("pip install"):
                bring_the_wheel(value, stage)
            elif instruction == "RUN" and not value.startswith(("apt-get ", "ldconfig")):
                finished("env", "CMAKE_BUILD_TYPE=None", "sh", "-euc", value, cwd=stage.place("."))


def copy(value: str, context: Path, stage: Stage, stages: list[Stage]) -> None:
    source, target = value.split()[-2:]
    given = re.match(r"--from=(\S+) ", value)
    root = next(other.root for other in stages if other.name == given[1]) if given else context
    found = sorted(root.glob(source.strip("/"))) if source != "." else [root]
    assert found, f"nothing to copy: {value}"
    for path in found:
        if path.is_dir():
            shutil.copytree(path, stage.place(target), symlinks=True, dirs_exist_ok=True)
        else:
            stage.place(target).mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, stage.place(target), follow_symlinks=False)


def bring_the_wheel(value: str, stage: Stage) -> None:
    """Puts the wheel that is installed here where pip is told to."""
    (target,) = re.findall(r"--target (\S+)", value)
    spec = importlib.util.find_spec("onnxruntime")
    for library in (Path(spec.origin).parent / "capi").glob("libonnxruntime.so.*"):
        place = stage.place(target) / "onnxruntime" / "capi"
        place.mkdir(parents=True)
        shutil.copy2(library, place)


def missing_packages(file: Path, packages: set[str]) -> dict[str, set[str]]:
    """The libraries that a file is linked with and that none of the packages brings, by the packages that would."""
    missing = {}
    for name, path in re.findall(r"^\s*(\S+) => (/\S+)", finished("ldd", file).stdout, re.M):
        owners = packages_of_libraries().get(name, set())
        if owners and not owners & packages:
            missing[name] = owners
        assert owners or "stage" in path, f"{name} is from no package: {path}"
    return missing


@cache
def packages_of_libraries() -> dict[str, set[str]]:
    """The installed packages that bring each shared library: dpkg's own lists, which it would read again for each."""
    owners: dict[str, set[str]] = {}
    for files in Path("/var/lib/dpkg/info").glob("*.list"):
        for line in files.read_text(encoding="utf-8").splitlines():
            if ".so" in line:
                owners.setdefault(line.rpartition("/")[2], set()).add(files.stem.partition(":")[0])
    return owners


def closure(packages: set[str]) -> set[str]:
    """The packages with all that they depend on, and Debian's own of every image."""
    options = ["--recurse", "--no-recommends", "--no-suggests", "--no-conflicts", "--no-breaks", "--no-replaces"]
    listed = finished("apt-cache", "depends", "--installed", *options, "--no-enhances", *sorted(packages)).stdout
    return {line.partition(":")[0] for line in listed.splitlines() if re.match(r"[a-z0-9]", line)}


@pytest.mark.slow
def test_its_steps_make_a_service(stages, program, case, tmp_path):
    if shutil.which("dpkg") is None or shutil.which("apt-cache") is None:
        pytest.skip("needs Debian's packages")
    program("serve/trtdet-serve")  # where that is built, what it takes is installed
    run_steps(stages, tmp_path)
    last = stages[-1]
    installed = last.place("/usr/local")
    known = closure(last.packages | {"libc6", "libstdc++6", "libgcc-s1"})
    files = [installed / "bin" / "trtdet-serve", *installed.glob("lib/**/lib*.so*")]
    assert len(files) > 2
    for file in files:
        assert missing_packages(file, known) == {}
    # The check is one: without this package there is no program.
    assert "libspdlog.so.1.10" in missing_packages(files[0], known - {"libspdlog1.10"})

    (name,) = json.loads(last.all("ENTRYPOINT")[0])
    (command,) = last.all("CMD")
    arguments = [case.bundles[0] if word == "/bundle" else word for word in json.loads(command)]
    # In the image ldconfig has made the library known.
    more = ["--library-folder", installed / "lib"]
    picture = case.pictures[0]
    with Server(installed / "bin" / name, [*arguments, *more], tmp_path / "server") as server:
        assert "onnxruntime" in server.output.read_text()
        check(server.detect(picture.data).json["images"][0], picture, case.hashes[0])
