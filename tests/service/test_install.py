"""libtrtdet as other projects take it: installed, shared and static, and as a part of their own build."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from serving import find, finished, shapes_bundle

from service.tests.record import record
from trtdet import Detector, __version__
from trtdet.data import find_images
from trtdet.demo import shapes
from trtdet.options import NmsOptions

ROOT = Path(__file__).resolve().parents[2]
SERVICE = ROOT / "service"


@pytest.fixture(scope="session")
def prefix(program, tmp_path_factory):
    """Where libtrtdet and its programs are installed, moved to after that."""
    if shutil.which("cmake") is None:
        pytest.skip("needs cmake")
    folder = tmp_path_factory.mktemp("install")
    finished("cmake", "--install", program("libtrtdet.so").parent, "--prefix", folder / "first")
    return (folder / "first").rename(folder / "moved")


def configure(source: Path, build: Path, *options: object, code: int = 0) -> subprocess.CompletedProcess[str]:
    if shutil.which("cmake") is None:
        pytest.skip("needs cmake")
    return finished("cmake", "-S", source, "-B", build, *options, code=code)


def test_installed_programs_find_their_library_wherever_they_are(prefix):
    environment = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    for name in ("trtdet-serve", "trtdet-bench"):
        assert "bundle" in finished(prefix / "bin" / name, "--help", env=environment).stdout


def test_only_what_the_headers_declare_is_exported(prefix):
    if shutil.which("nm") is None:
        pytest.skip("needs nm")
    library = next(prefix.glob("lib/**/libtrtdet.so"))
    names = [line.split()[-1] for line in finished("nm", "-D", "--defined-only", library).stdout.splitlines()]
    # In the mangled names of C++: functions, and the type information and tables of classes.
    foreign = [name for name in names if not re.match(r"_Z(NK?|T[ISV]N)6trtdet", name)]
    assert foreign == []
    assert any("non_max_suppression" in name for name in names)
    # What is in no header: the library's own texts, and the class behind Detector.
    assert [name for name in names if re.search("printable|in_quotes|4Impl", name)] == []


def test_another_minor_version_is_another_library_before_1_0(prefix):
    (version,) = re.findall(
        r"^project\(trtdet VERSION (\d+\.\d+)\.\d+ ", (SERVICE / "CMakeLists.txt").read_text(), re.M
    )
    assert version.startswith("0.")
    library = next(prefix.glob("lib/**/libtrtdet.so"))
    assert library.readlink().name == f"libtrtdet.so.{version}"


def test_programs_end_where_memory_is_overrun(prefix):
    """By what the compiler and the linker add: stack protector, checked copies, tables that are read-only early."""
    if shutil.which("readelf") is None:
        pytest.skip("needs readelf")
    files = [prefix / "bin" / "trtdet-serve", next(prefix.glob("lib/**/libtrtdet.so")).resolve()]
    if b"__asan_init" in files[0].read_bytes() or b"__tsan_init" in files[0].read_bytes():
        pytest.skip("a sanitizer does that")
    for file in files:
        headers = finished("readelf", "-W", "-d", "-l", "-h", file).stdout
        assert "BIND_NOW" in headers
        assert "GNU_RELRO" in headers
        assert re.search(r"GNU_STACK .* RW ", headers)
        assert re.search(r"Type: +DYN", headers)
        symbols = finished("readelf", "-W", "--dyn-syms", file).stdout
        assert "__stack_chk_fail" in symbols
        assert "_chk@" in symbols.replace("__stack_chk_fail", "")


def test_pkg_config_finds_it_wherever_it_is(prefix, tmp_path):
    if shutil.which("pkg-config") is None:
        pytest.skip("needs pkg-config")
    (folder,) = prefix.glob("lib/**/pkgconfig")
    environment = {**os.environ, "PKG_CONFIG_PATH": str(folder)}
    flags = finished("pkg-config", "--cflags", "--libs", "trtdet", env=environment).stdout.split()
    assert finished("pkg-config", "--modversion", "trtdet", env=environment).stdout.strip() == __version__
    (tmp_path / "main.cpp").write_text(
        "#include <trtdet/detector.hpp>\n#include <trtdet/version.hpp>\n#include <cstdio>\n"
        "int main(int, char** arguments) {\n"
        "    std::puts(TRTDET_VERSION);\n"
        "    try {\n"
        "        trtdet::Detector::open(arguments[1]);\n"
        "    } catch (const trtdet::Error& error) {\n"
        "        std::puts(error.what());\n"
        "    }\n"
        "}\n"
    )
    program = tmp_path / "program"
    finished("c++", "-std=c++17", tmp_path / "main.cpp", "-o", program, *flags)
    (library,) = {file.parent for file in prefix.glob("lib/**/libtrtdet.so")}
    lines = finished(program, tmp_path, env={**os.environ, "LD_LIBRARY_PATH": str(library)}).stdout.splitlines()
    assert lines[0] == __version__
    assert "manifest.json" in lines[1]


@pytest.mark.slow
def test_its_targets_keep_clear_of_another_projects(tmp_path):
    names = ("options", "serve", "tests", "catch_main", "serve_test", "bench", "fuzz")
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.18)\nproject(other LANGUAGES CXX)\ninclude(CTest)\n"
        + "".join(f"add_library({name} INTERFACE)\n" for name in names)
        + f'add_subdirectory("{SERVICE}" trtdet)\nif(TARGET trtdet_test)\n  message(FATAL_ERROR "tests")\nendif()\n'
    )
    configure(tmp_path, tmp_path / "build")


def test_the_library_alone_needs_nothing_of_the_programs(tmp_path):
    absent = [f"-DCMAKE_DISABLE_FIND_PACKAGE_{name}=ON" for name in ("Boost", "spdlog", "CLI11", "prometheus-cpp")]
    configure(SERVICE, tmp_path / "library", "-DTRTDET_PROGRAMS=OFF", *absent)
    errors = configure(SERVICE, tmp_path / "programs", *absent, code=1).stderr
    assert (
        "apt-get install libspdlog-dev libcli11-dev libboost1.81-dev libboost-url1.81-dev prometheus-cpp-dev"
        in " ".join(errors.split())
    )


def build_example(prefix: Path, folder: Path) -> Path:
    """Builds the example of docs/runtime.md against what is installed."""
    page = (ROOT / "docs" / "runtime.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^```cpp\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (project,) = re.findall(r"^```cmake\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    folder.mkdir()
    (folder / "main.cpp").write_text(example)
    (folder / "CMakeLists.txt").write_text(project)
    finished("cmake", "-S", folder, "-B", folder / "build", f"-DCMAKE_PREFIX_PATH={prefix}")
    finished("cmake", "--build", folder / "build")
    return folder / "build" / "example"


@pytest.mark.slow
def test_a_static_library_brings_its_users_what_it_needs(tmp_path):
    options = ["-DBUILD_SHARED_LIBS=OFF", "-DTRTDET_PROGRAMS=OFF", "-DBUILD_TESTING=OFF", "-DCMAKE_BUILD_TYPE=Debug"]
    configure(SERVICE, tmp_path / "library", *options)
    finished("cmake", "--build", tmp_path / "library")
    finished("cmake", "--install", tmp_path / "library", "--prefix", tmp_path / "prefix")
    (targets,) = (tmp_path / "prefix").glob("lib/**/trtdet-targets.cmake")
    # As packages by name: where OpenCV was here, it need not be where the library is used.
    assert re.findall(r"/[\w/.-]*opencv[\w/.-]*", targets.read_text()) == []
    example = build_example(tmp_path / "prefix", tmp_path / "example")
    finished(example, code=2)


@pytest.mark.slow
def test_the_example_finds_what_python_finds(prefix, tmp_path):
    example = build_example(prefix, tmp_path / "example")
    bundle = shapes_bundle(tmp_path / "bundle", nms=NmsOptions(mode="host"))
    images = find_images(shapes.generate(tmp_path, "val", 3).images)
    record(bundle, images, tmp_path / "recording")
    detector = Detector.open(bundle)
    for image in images:
        lines = finished(example, bundle, image, tmp_path / "recording").stdout.splitlines()
        found = find(detector, image)
        expected = [
            f"{detector.classes[label]} {score:.3f} {x1:.1f} {y1:.1f} {x2:.1f} {y2:.1f}"
            for (x1, y1, x2, y2), score, label in zip(found.boxes, found.scores, found.classes, strict=True)
        ]
        assert lines == expected
        assert lines

    assert finished(example, bundle, images[0], code=1).stderr.count("\n") == 1
