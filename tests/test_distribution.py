"""What is installed and published: every package and file of trtdet, and nothing that was forgotten."""

import configparser
import re
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml

import trtdet

ROOT = Path(__file__).resolve().parent.parent
OF_A_CHECKOUT = "trtdet.service"  # of which a package for DeepStream compiles a few files


@pytest.fixture(scope="module")
def settings():
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg", encoding="utf-8")
    return parser


def folder_of(package: str, settings: configparser.ConfigParser) -> Path:
    homes = dict(map(str.strip, line.split("=")) for line in settings["options"]["package_dir"].split("\n") if line)
    return ROOT / homes.get(package, package.replace(".", "/"))


def test_every_package_is_installed(settings):
    there = {".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "trtdet").rglob("__init__.py")}
    listed = set(settings["options"]["packages"].split())
    assert {name for name in listed if folder_of(name, settings).is_relative_to(ROOT / "trtdet")} == there


def test_every_file_that_the_packages_read_is_installed(settings):
    patterns = {
        name: [pattern.strip() for pattern in value.split(",")]
        for name, value in settings["options.package_data"].items()
    }
    for name in set(settings["options"]["packages"].split()) - {OF_A_CHECKOUT}:
        folder = folder_of(name, settings)
        inner = [path.parent for path in folder.rglob("__init__.py") if path.parent != folder]
        for path in folder.rglob("*"):
            if path.is_dir() or path.suffix in (".py", ".pyc") or any(path.is_relative_to(other) for other in inner):
                continue
            relative = path.relative_to(folder).as_posix()
            assert any(fnmatch(relative, pattern) for pattern in patterns.get(name, ())), path


def test_the_version_is_the_same_everywhere():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == trtdet.__version__
    assert f"## {trtdet.__version__}" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("path", sorted((ROOT / ".github").rglob("*.yml")), ids=lambda path: path.name)
def test_files_for_the_repository_are_yaml_that_its_host_reads(path):
    content = yaml.safe_load(path.read_text())
    if path.parent.name == "workflows":
        # YAML 1.1 reads the key "on" as true.
        assert content[True] and all("runs-on" in job and job["steps"] for job in content["jobs"].values())
        used = [step["uses"] for job in content["jobs"].values() for step in job["steps"] if "uses" in step]
        # That of PyPI is the one that PyPI's own documentation names.
        loose = [action for action in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", action)]
        assert set(loose) <= {"pypa/gh-action-pypi-publish@release/v1"}, "name actions by their commit"
    elif path.name != "config.yml":
        assert content["name"] and content["description"] and all("type" in part for part in content["body"])
