"""The source archive and the wheel made from it, as they are published: installed alone, used in an empty folder."""

import json
import os
import shutil
import site
import subprocess
import sys
import tarfile
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = shutil.ignore_patterns(".git", ".venv*", "build", "demo", "dist", "*.egg-info", "__pycache__", ".*_cache")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folder of both files."""
    folder = tmp_path_factory.mktemp("dist")
    # What 'make' leaves stands at the top alone: trtdet/demo is a package.
    copied = shutil.copytree(ROOT, folder / "checkout", ignore=lambda at, names: _left_out(Path(at), names))
    command = [sys.executable, "-m", "build", "--outdir", folder / "made", copied]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:]
    return folder / "made"


def _left_out(folder: Path, names: list[str]) -> set[str]:
    found = LEFT_OUT(str(folder), names)
    return found if folder == ROOT else found - {"build", "demo", "dist"}


@pytest.fixture(scope="module")
def installed(made, tmp_path_factory):
    """The programs of an environment with the wheel, which finds what the wheel requires where these tests found it."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, with_pip=False)
    library = next(folder.glob("lib/python*/site-packages"))
    (library / "requirements.pth").write_text("\n".join(path for path in site.getsitepackages() if Path(path).is_dir()))
    (wheel,) = made.glob("*.whl")
    command = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install", "--no-deps"]
    done = subprocess.run(
        [*command, "--ignore-installed", "--quiet", wheel], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return folder / "bin"


def run(bin: Path, folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [bin / "trtdet", *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def test_the_source_archive_holds_what_a_checkout_does(made):
    (archive,) = made.glob("*.tar.gz")
    with tarfile.open(archive) as content:
        names = {name.partition("/")[2] for name in content.getnames()}
    for folder in ("benchmarks", "calib", "configs", "docs", "plugins", "service", "tests", "trtdet"):
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                assert path.relative_to(ROOT).as_posix() in names
    assert {"Makefile", "README.md", "LICENSE", "setup.cfg", "CITATION.cff"} <= names


def test_what_runs_is_the_wheel(installed, tmp_path):
    done = subprocess.run(
        [installed / "python", "-c", "import trtdet; print(trtdet.__file__)"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert Path(done.stdout.strip()).is_relative_to(installed.parent)


def test_a_bundle_is_built_and_packaged_in_an_empty_folder(installed, tmp_path):
    """The files that are read: shipped weights and configurations, pages' templates, sources for DeepStream."""
    run(installed, tmp_path, "export", "shapes", "-o", "shapes.onnx")
    program = "from pathlib import Path; from trtdet.demo import shapes; shapes.generate(Path(), 'calibration', 8)"
    subprocess.run([installed / "python", "-c", program], cwd=tmp_path, check=True, timeout=120)
    options = ("--images", "calibration", "--num-images", 8, "--effort", "none", "--backend", "onnxruntime")
    said = run(installed, tmp_path, "build", "shapes.onnx", "--config", "shapes", *options, "-o", "int8", "--json")
    assert json.loads(said.stdout)
    picture = next((tmp_path / "calibration").iterdir())
    run(installed, tmp_path, "predict", "int8", picture, "-o", "pictures")
    assert list((tmp_path / "pictures").iterdir())
    run(installed, tmp_path, "doctor")
    run(installed, tmp_path, "package", "int8", "--format", "deepstream", "-o", "deepstream")
    assert list((tmp_path / "deepstream").rglob("*.cpp"))
