"""The example of docs/runtime.md, built against an installed libtrtdet."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from serving import find

from trtdet import BuildOptions, Detector, build, load_config
from trtdet.data import find_images
from trtdet.demo import shapes
from trtdet.exporter import SHAPES_MODEL
from trtdet.runtime.recordings import record

ROOT = Path(__file__).resolve().parents[2]


def run(*command: object) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_the_example_finds_what_python_finds(program: Callable[[str], Path], tmp_path: Path) -> None:
    if shutil.which("cmake") is None:
        pytest.skip("needs cmake")
    built = program("libtrtdet.so").parent
    run("cmake", "--install", built, "--prefix", tmp_path / "prefix")
    page = (ROOT / "docs" / "runtime.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^```cpp\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (project,) = re.findall(r"^```cmake\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "main.cpp").write_text(example)
    (tmp_path / "CMakeLists.txt").write_text(project)
    run("cmake", "-S", tmp_path, "-B", tmp_path / "build", f"-DCMAKE_PREFIX_PATH={tmp_path / 'prefix'}")
    run("cmake", "--build", tmp_path / "build")

    options = BuildOptions(precision="fp32", backend="onnxruntime", nms="host")
    bundle = build(SHAPES_MODEL, load_config("shapes"), tmp_path / "bundle", options).bundle.path
    images = find_images(shapes.generate(tmp_path, "val", 3).images)
    record(bundle, images, tmp_path / "recording")
    detector = Detector.open(bundle)
    for image in images:
        lines = run(tmp_path / "build" / "example", bundle, image, tmp_path / "recording").splitlines()
        found = find(detector, image)
        expected = [
            f"{detector.classes[label]} {score:.3f} {x1:.1f} {y1:.1f} {x2:.1f} {y2:.1f}"
            for (x1, y1, x2, y2), score, label in zip(found.boxes, found.scores, found.classes, strict=True)
        ]
        assert lines == expected
        assert lines

    refused = subprocess.run(
        [tmp_path / "build" / "example", bundle, images[0]], capture_output=True, text=True, check=False
    )
    assert refused.returncode == 1
    assert refused.stderr.count("\n") == 1
