import argparse
import datetime
import functools
import os
import pickle
import sys
import types
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install 'trtdet[export]'")

from trtdet.errors import ModelError  # noqa: E402
from trtdet.exporter.checkpoints import Record, read, read_state, trained_size  # noqa: E402

RAN: list[str] = []
"""What code of a checkpoint was run."""


class Layer(torch.nn.Module):  # type: ignore[misc, name-defined]
    """A layer of a package that is there when the checkpoint is written, and gone when it is read."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 4, 1)
        self.norm = torch.nn.BatchNorm2d(4)
        self.names = {0: "cat", 1: "dog"}

    def __setstate__(self, state: Any) -> None:
        RAN.append("__setstate__")
        super().__setstate__(state)


class Hostile:
    """Calls what it is made with."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call[0], self.call[1:]


def run(*_: Any) -> None:
    RAN.append("run")


@pytest.fixture
def package(monkeypatch):
    """A package ``somenet``, of which ``Layer`` and ``run`` seem to be parts."""
    module = types.ModuleType("somenet")
    vars(module).update(Layer=Layer, run=run)
    monkeypatch.setitem(sys.modules, "somenet", module)
    monkeypatch.setattr(Layer, "__module__", "somenet")
    monkeypatch.setattr(run, "__module__", "somenet")
    RAN.clear()
    yield module


def _saved(path: Path, content: Any) -> Path:
    torch.save(content, path)
    return path


def test_a_network_is_read_as_records(package, tmp_path, monkeypatch):
    layer = Layer().half()
    path = _saved(tmp_path / "c.pt", {"model": torch.nn.Sequential(layer, torch.nn.ReLU()), "path": Path("/x")})
    monkeypatch.delitem(sys.modules, "somenet")
    content = read(path, ("somenet",), "x:")
    network = content["model"]
    assert isinstance(network, Record) and not isinstance(network, torch.nn.Module)
    assert {name: record.kind for name, record in network.walk()} == {
        "": "torch.nn.modules.container.Sequential",
        "0": "somenet.Layer",
        "1": "torch.nn.modules.activation.ReLU",
        "0.conv": "torch.nn.modules.conv.Conv2d",
        "0.norm": "torch.nn.modules.batchnorm.BatchNorm2d",
    }
    first = network.modules["0"]
    assert first["names"] == {0: "cat", 1: "dog"} and first["absent"] is None
    assert first.modules["conv"]["stride"] == (1, 1)
    state = network.state()
    expected = torch.nn.Sequential(layer.float(), torch.nn.ReLU()).state_dict()
    assert set(state) == set(expected)
    assert all(torch.equal(state[name], expected[name]) and state[name].dtype != torch.half for name in state)
    assert RAN == []


def test_what_trainers_store_beside_is_read_as_records(package, tmp_path):
    content = {
        "opt": argparse.Namespace(imgsz=320),
        "save": Path("runs"),
        "when": datetime.datetime(2026, 1, 1),
        "optimizer": functools.partial(run, 1),
    }
    found = read(_saved(tmp_path / "c.pt", content), ("somenet",), "x:")
    assert all(isinstance(value, Record) for value in found.values())
    assert trained_size(None, {"lr": 1}, found["opt"]) == (320, 320)
    assert trained_size({"imgsz": [64, 96]}) == (64, 96)
    assert trained_size({"imgsz": "320"}, found["save"]) == (640, 640)
    assert RAN == []


def test_a_function_of_a_known_package_is_not_called(package, tmp_path):
    path = _saved(tmp_path / "c.pt", {"model": Hostile(run, 1)})
    assert isinstance(read(path, ("somenet",), "x:")["model"], Record)
    assert RAN == []


@pytest.mark.parametrize(
    ("call", "argument", "named"),
    [
        (Path.touch, Path("ran"), r"pathlib.*touch|builtins.getattr"),
        (eval, "__import__('pathlib').Path('ran').touch()", "builtins.eval"),
        (__import__, "os", "builtins.__import__"),
        (os.system, "touch ran", "posix.system"),
    ],
)
def test_hostile_checkpoints_are_refused_and_not_run(package, tmp_path, monkeypatch, call, argument, named):
    monkeypatch.chdir(tmp_path)
    hostile = Hostile(call, argument)
    path = _saved(tmp_path / "c.pt", {"model": torch.nn.Sequential(Layer()), "extra": [hostile]})
    with pytest.raises(ModelError, match=rf"is refused: it names .*({named})") as caught:
        read(path, ("somenet",), "x:")
    assert "\n" not in str(caught.value)
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(hostile))
    with pytest.raises(ModelError, match="cannot be read as weights only"):
        read(tmp_path / "plain.pt", ("somenet",), "x:")
    torch.save({"model": {"w": torch.zeros(1)}, "extra": hostile}, tmp_path / "state.pt")
    for name in ("state.pt", "plain.pt"):
        with pytest.raises(ModelError, match="cannot be read as weights only") as caught:
            read_state(tmp_path / name)
        assert "\n" not in str(caught.value)
    assert not Path("ran").exists() and RAN == []


def test_a_class_of_another_package_is_refused(package, tmp_path):
    path = _saved(tmp_path / "c.pt", {"model": Layer()})
    with pytest.raises(ModelError, match=r"names somenet.Layer, which no network of ultralytics is made of; nothing"):
        read(path, ("ultralytics",), "x:")


def test_a_network_inside_itself_ends(package, tmp_path):
    layer = Layer()
    for index in range(3):
        layer._modules[f"own{index}"] = layer
    network = read(_saved(tmp_path / "c.pt", layer), ("somenet",), "x:")
    with pytest.raises(ModelError, match="over 20000 modules; is one inside itself"):
        network.state()


def test_files_that_are_no_checkpoints(tmp_path):
    with pytest.raises(ModelError, match=r"absent.pt' does not exist; check the path given with x:"):
        read(tmp_path / "absent.pt", (), "x:")
    for name, content in {"text.pt": b"not a checkpoint", "empty.pt": b""}.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ModelError, match="cannot be read as weights only"):
            read(tmp_path / name, (), "x:")
    whole = _saved(tmp_path / "whole.pt", {"w": torch.zeros(1000)}).read_bytes()
    (tmp_path / "cut.pt").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match="cannot be read as weights only"):
        read(tmp_path / "cut.pt", (), "x:")
